"""The adaptive sampling loop: it validates the options, sets the control variate, and draws until each example stops.

Budgets, stopping rules and the choice of the control variate belong in this module. The evaluation of rows is in
`sampler`, the public explainers are in `smooth_hess`, the error estimates in `smoothhess.estimate.variance`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from smoothhess.curvature.control_variate import CONTROL_LIMIT, MOST_BYTES, thin_rank
from smoothhess.curvature.frozen_network import NoKinksError
from smoothhess.curvature.one_flip import Kinks
from smoothhess.draws.designs import SMALL, Design, find_design
from smoothhess.draws.gaussian import Gaussian
from smoothhess.estimate.fit_quality import zero_score
from smoothhess.estimate.grouping import Grouping
from smoothhess.estimate.incomplete_blocks import NEARLY_QUADRATIC, is_quadratic
from smoothhess.estimate.statistics import Statistics, head_rows, most_rows, unmoved
from smoothhess.estimate.variance import Noise
from smoothhess.explainers.sampler import OtherPathError, Sampler
from smoothhess.linalg.memory import is_out_of_memory, release
from smoothhess.model.float_precision import check_precision
from smoothhess.model.gradients import Oracle, check_batch_size, check_inputs
from smoothhess.result.interactions import Interactions

FIRST_ROWS = 64  # rows before the first error estimate of an adaptive run, or one per feature if these are fewer
LEAST_ROWS = 32  # minimum rows for the stopping rule
LEAST_DF = 8  # with fewer degrees of freedom than this a smaller error is required
LEAST_UNITS = 40  # minimum independent replicates if the variance is estimated from them only
EXACT = 1e-6  # relative error below which the estimate is exact up to rounding
PRICE = 1.5  # maximum passes of "auto" for the closed form and its pilot draws, per gradient call
WORTH = 3  # exponent: the unexplained share must be below (share of passes left for calls) to this power
ROWS_BYTES = 1 << 31  # maximum size of the rows of all features kept for group sums; above it the sums are streamed
UNMOVED_ROWS = 512  # rows after which a run stops if no gradient shows a kink
ZERO_SHARE = 0.01  # H counts as zero if it explains less than this share of the gradient's variation


@dataclass(frozen=True, eq=False)
class Run:
    """The validated arguments of `SmoothHess.attribute`."""

    sampler: Sampler
    budget: Budget
    seeds: Sequence[int]
    calls: float  # number of calls that the cost of the closed form is compared with
    control: str | None
    shrink: bool
    sums: Grouping | None = None  # groups of the result, if the rows of all features are kept for their sums

    @staticmethod
    def prepare(
        forward_func: Callable[..., Any],
        inputs: Tensor,
        target: Any,
        additional_forward_args: Any,
        *,
        sigma: Any,
        radius: float | None,
        gaussian: Gaussian | None,
        n_calls: int | None,
        tol: float,
        max_calls: int,
        design: str,
        control: str | None,
        tau_probes: int | None,
        shrink: bool,
        feature_mask: Tensor | None,
        internal_batch_size: int | None,
        seed: int | Sequence[int],
        precision: str,
        compile: bool,
        found_out: dict[Any, int],
    ) -> Run:
        """Validate the arguments; the model is not called."""
        plan = find_design(design)
        if control not in ("auto", "kink", None):
            raise ValueError(f'control must be "auto", "kink" or None, got {control!r}.')
        check_inputs(inputs)
        inputs = inputs.detach()
        d = inputs[0].numel()
        gaussian = Gaussian.ensure(sigma=sigma, radius=radius, gaussian=gaussian, d=d)
        grouping = None
        if feature_mask is not None:
            grouping = Grouping.make(feature_mask, None, inputs.shape, gaussian.scales(d), inputs)
        oracle = Oracle(
            forward_func,
            inputs,
            target,
            additional_forward_args,
            check_batch_size(internal_batch_size),
            check_precision(precision, inputs.device, inputs.dtype),
            compile,
            found_out,
        )
        budget = Budget.make(plan, n_calls, tol, max_calls, first=min(gaussian.rank(d), FIRST_ROWS))
        if n_calls is None and grouping is None:  # no more rows than can be kept
            budget = replace(budget, most=min(budget.most, most_rows(gaussian.rank(d), d)))
        if tau_probes is not None and (isinstance(tau_probes, bool) or not tau_probes >= 8):
            raise ValueError(f"tau_probes must be at least 8 random directions, or None for exact τ, got {tau_probes}.")
        white, sums = gaussian.to(inputs.device, inputs.dtype), None
        if grouping is not None and shrink and _rows_fit(inputs, gaussian.rank(d), budget.most):
            grouping, sums = None, grouping
        sampler = Sampler(oracle, inputs, white, plan, grouping, tau_probes=tau_probes)
        calls = n_calls if n_calls is not None else max_calls / 4
        return Run(sampler, budget, seeds_of(seed, len(inputs)), calls, control, shrink, sums)

    def finish(self, result: Interactions) -> Interactions:
        """The result itself, or its sums over groups if a feature_mask was given."""
        return result if self.sums is None else replace(result.grouped(self.sums), status=result.status)

    def progress(self, show: bool) -> tqdm:
        """A progress bar over all draws."""
        return progress_bar(show, self.budget.most, len(self.seeds))

    def result(self, bar: tqdm) -> Interactions:
        """Execute the run, in batches of examples where all of them would run out of memory."""

        def some(index: Tensor) -> Interactions:
            self.sampler.control = None  # free the memory of the control variate of all examples
            return self._select(index).result(bar)

        return in_parts(
            self.sampler.oracle, self.sampler.inputs.device, bar, partial(self.lead, self.sampler, bar), some
        )

    def _select(self, index: Tensor) -> Run:
        """A run of the examples at `index`, without any draws."""
        whole = self.sampler
        sampler = Sampler(
            whole.oracle.select(index),
            whole.inputs[index],
            whole.gaussian,
            whole.plan,
            None if whole.grouping is None else whole.grouping.select(index),
            tau_probes=whole.tau_probes,
        )
        sums = None if self.sums is None else self.sums.select(index)
        return replace(self, sampler=sampler, seeds=[self.seeds[i] for i in index.tolist()], sums=sums)

    def lead(self, sampler: Sampler, bar: tqdm) -> Interactions:
        """Run all examples in one batch, with the run's sampler or one that replaces it."""
        precision, drawn = sampler.oracle.precision, bar.n
        rounding = None if precision == "float32" else sampler.measure_precision(self.seeds)
        note = _take_control(sampler, self.control, self.seeds, self.calls)
        try:
            result = self._sampled(sampler, bar, note)
        except OtherPathError as error:
            if self.control != "auto":
                raise
            sampler.control, note = None, str(error)
            bar.update(drawn - bar.n)
            result = self._sampled(sampler, bar, note)
        return result if rounding is None else replace(result, precision=precision, precision_error=rounding)

    def _sampled(self, sampler: Sampler, bar: tqdm, note: str) -> Interactions:
        return sample_until(sampler, sampler.begin(self.seeds), self.budget, bar, self.shrink, note, self.sums)


def in_parts(
    oracle: Oracle,
    device: torch.device,
    bar: tqdm,
    everyone: Callable[[], Interactions],
    some: Callable[[Tensor], Interactions],
) -> Interactions:
    """Return `everyone()`; if it runs out of memory, concatenate `some(index)` over batches of examples.

    The number of examples that fit is kept for later runs of the explainer.
    """
    together, drawn = oracle.batch, bar.n
    if together <= oracle.most_examples:
        before = oracle.batch_size, oracle.measured
        try:
            return everyone()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if together == 1:
                oracle.most_examples = None
                raise
        oracle.begin_again(*before)  # the batch size had been halved because of the other examples
        oracle.most_examples = -(-together // 2)
        bar.update(drawn - bar.n)
    parts = []
    for index in torch.arange(together, device=device).split(oracle.most_examples):
        release()
        parts.append(some(index).lean())
    return Interactions.cat(parts)


@dataclass(frozen=True)
class Budget:
    """Numbers of rows to draw, and the tolerance at which to stop."""

    first: int  # rows before the first error estimate
    most: int  # maximum number of rows
    tol: float | None  # None: draw `most` rows without error estimates

    @staticmethod
    def make(plan: Design, n_calls: int | None, tol: float, max_calls: int, first: int) -> Budget:
        """From the arguments of `SmoothHess.attribute`."""
        if n_calls is not None:
            rows = rows_of_calls(n_calls, plan, "n_calls")
            return Budget(rows, rows, None)
        if not tol > 0:
            raise ValueError(f"tol must be positive, got {tol}. Pass a positive tol, or n_calls.")
        most = rows_of_calls(max_calls, plan, "max_calls")
        return Budget(min(first, most), most, tol)


def _rows_fit(inputs: Tensor, k: int, rows: int) -> bool:
    """Whether the rows of all features of each example, or their matrix, fit into ROWS_BYTES."""
    numbers = min(rows, head_rows(k)) * k * 3 + (3 * k * k if rows > head_rows(k) else 0)
    return k > SMALL and rows <= most_rows(k, k) and numbers * inputs.element_size() * len(inputs) <= ROWS_BYTES


def sample_until(
    sampler: Sampler,
    stats: Statistics,
    budget: Budget,
    bar: tqdm,
    shrink: bool,
    note: str,
    sums: Grouping | None = None,
) -> Interactions:
    """Double the rows of each example until it stops, judged by the error of the group sums where `sums` is given."""
    index = torch.arange(len(stats), device=sampler.inputs.device)
    rows, finished = budget.first, []
    while True:
        stats = sampler.extend(stats, rows - int(stats.n[0]), index, bar)
        result = replace(_result(sampler, stats, index, shrink), control_note=note)
        judged = result if sums is None or budget.tol is None else result.grouped(sums.select(index))
        verdicts = _verdicts(judged, budget, rows)
        stop = torch.tensor([v != "" for v in verdicts])
        done = torch.nonzero(stop).reshape(-1).to(index.device)
        if len(done):
            part = result if len(done) == len(index) else result[done]
            finished.append((index[done], part.with_status(tuple(v for v in verdicts if v))))
        if stop.all():
            break
        going = torch.nonzero(~stop).reshape(-1).to(index.device)
        stats, index = stats.select(going), index[going]
        rows = min(2 * rows, budget.most)
    order = torch.cat([i for i, _ in finished]).argsort()
    return finished[0][1] if len(finished) == 1 else Interactions.cat([r for _, r in finished])[order]


def _result(sampler: Sampler, stats: Statistics, index: Tensor, shrink: bool) -> Interactions:
    entries, control = sampler.oracle.entries, sampler.control
    no_kinks = None
    still = unmoved(stats)
    smooth = torch.nonzero(still | is_quadratic(stats, NEARLY_QUADRATIC)).reshape(-1)  # no row shows a kink
    if len(smooth):
        no_kinks = torch.zeros(len(index), dtype=torch.bool, device=index.device)
        no_kinks[smooth] = sampler.no_kinks(index[smooth], still[smooth])
    return Interactions(
        inputs=sampler.inputs[index],
        statistics=stats,
        gaussian=sampler.gaussian,
        grouping=None if sampler.grouping is None else sampler.grouping.select(index),
        target=None if entries is None else entries[index.cpu()],
        n_passes=sampler.passes(stats.n.double(), index),
        status=("calls",) * len(index),
        control=None if control is None else "kink",
        control_weights=None if control is None else torch.stack([control.linear, control.flip], 1)[index],
        unbiased=control is None or control.drift is None or not bool(control.flip.any()),
        control_rank=sampler.thin_rank if control is not None and control.expected.hessian.is_thin else None,
        tau_probes=None if control is None else sampler.tau_probes,
        shrink=shrink and sampler.grouping is None and stats.k > SMALL,
        no_kinks=no_kinks,
    )


def _verdicts(result: Interactions, budget: Budget, rows: int) -> list[str]:
    """The reason why each example stops, or an empty string where it continues."""
    if budget.tol is None:
        return ["calls"] * len(result)
    error = result.relative_error
    noise = result.noise
    only_units = noise.prior is None or not bool((noise.prior.df > 0).any())
    scrambled = result.design == "sobol"
    least = LEAST_DF if scrambled else LEAST_UNITS - 1 if only_units else 1
    enough = (rows >= LEAST_ROWS) & (noise.df >= least)
    if not only_units:  # with few degrees of freedom a smaller error is required
        error = error * (LEAST_DF / noise.df.clamp_min(1)).clamp_min(1).sqrt()
    # few rows may miss a kink, or everything that the control variate does not model
    plain = torch.ones(len(result), dtype=torch.bool, device=error.device)
    if result.control_weights is not None:
        plain = ~result.control_weights.any(1)
    exact = (error <= EXACT) & (((error > 0) & plain) | (rows >= LEAST_ROWS))
    met = (error <= budget.tol) & (enough | exact)
    zero = enough & _looks_zero(noise)
    # where no gradient shows a kink, further draws could cross one: stop after UNMOVED_ROWS
    last, unknown = rows >= budget.most, noise.unknown.tolist()
    nothing = (noise.squared_norm == 0).tolist()
    return [
        ("unknown" if last or rows >= UNMOVED_ROWS else "")
        if u
        else "zero"
        if z or (m and n)
        else "tolerance"
        if m
        else "budget"
        if last
        else ""
        for m, z, n, u in zip(met.tolist(), zero.tolist(), nothing, unknown, strict=True)
    ]


def _looks_zero(noise: Noise) -> Tensor:
    """Where H cannot be distinguished from zero and explains less than ZERO_SHARE of the gradient's variation, (B,).

    A row's estimate has E‖A‖² ≈ k/2 times that variation, and ‖W‖² is the part of it that H explains.
    """
    stats = noise.features
    signal = noise.squared_norm - noise.of_frobenius
    score = zero_score(noise)
    spread = torch.where(score != 0, signal / score, torch.inf)
    s, g = stats.head.score.double(), stats.head.odd.double()
    squares = (s.square().sum(-1) * g.square().sum(-1) + (s * g).sum(-1).square()) / 2
    row_energy = squares.sum(-1) / stats.n_head
    share = (signal.clamp_min(0) + 2 * spread) * stats.k / 2 / row_energy
    # under a correlated Gaussian the entries of directions with small variance dominate, so the test is not used
    return (score < 2) & (share < ZERO_SHARE) & noise.gaussian.has_mean_curvature


def _take_control(sampler: Sampler, control: str | None, seeds: Sequence[int], calls: float) -> str:
    """Set the sampler's control variate, or return the reason for its absence; `calls` is the budget of the run."""
    if control is None:
        return "control=None was passed"
    sampler.thin_rank = thin_rank(calls)
    if control == "kink":
        kinks = insist(sampler)
        try:
            sampler.take_control(kinks, sampler.pilot(kinks, seeds))
        except NoKinksError as error:
            raise ValueError(f"control='kink' cannot be used: {error}. Pass control=None.") from error
        return ""
    k = sampler.gaussian.rank(sampler.inputs[0].numel())
    rows = k if k <= CONTROL_LIMIT else 2 * sampler.thin_rank
    size = len(sampler.inputs) * k * rows * sampler.inputs.element_size()
    if size > MOST_BYTES * (4 if sampler.inputs.is_cuda else 1):
        return f"the closed form of {len(sampler.inputs)} examples would hold {size / 2**30:.1f} GiB"
    try:
        kinks = sampler.see_kinks(PRICE * calls)
        pilot = sampler.pilot(kinks, seeds)
        price, unexplained = sampler.price(kinks), pilot.unexplained
        worth = torch.nonzero(unexplained <= (calls / (calls + price)) ** WORTH).reshape(-1)
        if not len(worth):
            least = float(unexplained.min())
            return f"single flips do not explain {least:.0%} of the gradient's variation: not worth {price:.0f} passes"
        sampler.take_control(kinks, pilot, worth, always=False)
    except NoKinksError as error:
        return str(error)
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        sampler.control = None
        return f"freezing the activations fails ({error})"
    return ""


def insist(sampler: Sampler, refusal: str = "control='kink' cannot be used") -> Kinks:
    """The frozen model; raises ValueError with the reason if the model cannot be frozen."""
    try:
        return sampler.see_kinks(math.inf)
    except NoKinksError as error:
        raise ValueError(f"{refusal}: {error}. Use attribute with control=None.") from error


# --- validation of arguments, and the progress bar --------------------------------------------------------------------


def rows_of_calls(n: Any, plan: Design, name: str) -> int:
    """Number of rows of a design for `n` gradient calls; `name` is the argument's name in errors."""
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise TypeError(f"{name} must be an integer, got {type(n).__name__}.")
    n = int(n)
    if n < 2:
        raise ValueError(f"{name} must be at least 2, got {n}.")
    if plan.mirrored and n % 2:
        raise ValueError(
            f"{name} must be even: each direction is used twice (±), got {n}. Pass {n - 1} or {n + 1}, or design='iid'."
        )
    return n // plan.calls_per_row


def seeds_of(seed: Any, batch: int) -> list[int]:
    """One seed per example, from a single seed or a sequence."""
    given: Any = [seed] * batch if isinstance(seed, int) or getattr(seed, "ndim", None) == 0 else seed
    seeds = [operator.index(s) for s in given]
    if len(seeds) != batch:
        raise ValueError(f"seed must be one integer, or one per example: {batch}, got {len(seeds)}.")
    if min(seeds) < 0:
        raise ValueError(f"seeds must not be negative, got {min(seeds)}. Use 0, 1, 2, …")
    return seeds


def progress_bar(show: bool, rows: int, batch: int) -> tqdm:
    """A progress bar over the draws of all examples."""
    return tqdm(total=rows * batch, desc="SmoothHess", unit="draw", disable=not show, leave=False)
