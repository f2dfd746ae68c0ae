"""The adaptive sampling loop: it validates the inputs, and draws until each example stops.

Budgets and stopping rules belong in this module. The evaluation of rows is in `sampler`, the choice of the control
variate in `choose_control`, the public explainers are in `smooth_hess`, the error estimates in
`smoothhess.estimate.variance`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from smoothhess.curvature.activation_hooks import OtherPathError
from smoothhess.curvature.frozen_network import NoKinksError
from smoothhess.draws.designs import SMALL
from smoothhess.draws.gaussian import Gaussian
from smoothhess.estimate.effective_draws import carrying_rows
from smoothhess.estimate.fit_quality import zero_score
from smoothhess.estimate.grouping import Grouping
from smoothhess.estimate.hessian_estimate import HessianEstimate
from smoothhess.estimate.quadratic_rows import shows_no_kink
from smoothhess.estimate.statistics import (
    PROBES,
    Extension,
    Statistics,
    head_rows,
    most_rows,
    must_be_factored,
    unmoved,
)
from smoothhess.estimate.variance import Noise
from smoothhess.explainers.choose_control import Choice, choose_control, with_control
from smoothhess.explainers.find_tails import with_tails
from smoothhess.explainers.interrupted import STATUS, Interrupted
from smoothhess.explainers.no_kinks import KinkChecks, check_kinks
from smoothhess.explainers.options import Options, seeds_of
from smoothhess.explainers.progress import Progress
from smoothhess.explainers.recorded_kinks import with_rare_flips
from smoothhess.explainers.sampler import PRECISION_PASSES, Sampler
from smoothhess.linalg.memory import GROUPED_ROWS, KEPT_RESULTS, PART_MATRICES, is_out_of_memory, release, stored_bytes
from smoothhess.model.capacity import Capacity
from smoothhess.model.float_precision import check_precision
from smoothhess.model.gradients import Oracle
from smoothhess.model.input_parts import InputPart
from smoothhess.model.model_call import ModelCall
from smoothhess.result.features import name_each
from smoothhess.result.interactions import Interactions
from smoothhess.result.segments import group_names

FIRST_ROWS = 64  # rows before the first error estimate of an adaptive run, or one per dimension if these are fewer,
FIRST_SHARE = 8  # or this part of a block if that is more
CLEAR = 0.5  # relative error below which H is clearly not zero
LEAST_ROWS = 32  # minimum rows for the stopping rule
LEAST_DF = 8  # with fewer degrees of freedom than this a smaller error is required
LEAST_EFFECTIVE = 10  # minimum effective rows for the stopping rule
LEAST_UNITS = 40  # minimum independent replicates if the variance is estimated from them only
EXACT = 1e-6  # relative error below which the estimate is exact up to rounding
UNMOVED_ROWS = 512  # rows after which a run stops if no gradient shows a kink
ZERO_SHARE = 0.01  # H counts as zero if it explains less than this share of the gradient's variation


@dataclass(frozen=True, eq=False)
class Run:
    """The validated arguments of `SmoothHess.attribute`."""

    oracle: Oracle
    inputs: Tensor  # (B, *shape)
    gaussian: Gaussian
    grouping: Grouping | None
    options: Options
    budget: Budget
    seeds: Sequence[int]
    sums: Grouping | None = None  # groups of the result, if the rows of all features are kept for their sums
    names: tuple[str, ...] | None = None  # names of the features, or of the groups
    input_parts: tuple[InputPart, ...] | None = None  # the inputs whose features are concatenated, if there are several
    predicted: bool = False  # whether the targets are the classes that the model predicts

    @staticmethod
    def prepare(call: ModelCall, options: Options, capacity: Capacity) -> Run:
        """Validate the options that depend on the inputs; the model is not called."""
        inputs = call.inputs
        d = inputs[0].numel()
        gaussian = Gaussian.ensure(sigma=options.sigma, radius=options.radius, gaussian=options.gaussian, d=d)
        k, grouping, sums = gaussian.rank(d), None, None
        if options.feature_mask is not None:
            grouping = Grouping.make(options.feature_mask, options.direction, inputs.shape, gaussian.scales(d), inputs)
        oracle = Oracle(
            call.forward_func,
            inputs,
            call.target,
            call.additional_forward_args,
            options.internal_batch_size,
            check_precision(options.precision, inputs.device, inputs.dtype),
            options.compile,
            capacity,
        )
        budget = Budget.make(options, k)
        if options.n_calls is None and grouping is None:  # no more rows than can be kept
            budget = replace(budget, most=min(budget.most, most_rows(k, d)))
        if grouping is not None and options.shrink and _rows_fit(inputs, k, budget.most):
            grouping, sums = None, grouping
        white, seeds = gaussian.to(inputs.device, inputs.dtype), seeds_of(options.seed, len(inputs))
        groups = grouping or sums
        own = call.names if groups is None else group_names(options.feature_mask)
        names = own if options.names is None else name_each(options.names, d if groups is None else groups.count)
        return Run(oracle, inputs, white, grouping, options, budget, seeds, sums, names, predicted=call.predicted)

    def finish(self, result: Interactions) -> Interactions:
        """The result of all or the first examples, or its sums over groups if a feature_mask was given."""
        if self.sums is not None:
            sums = self.sums.to(result.device).select(torch.arange(len(result), device=result.device))
            result = replace(result.grouped(sums), status=result.status)
        return replace(
            result,
            names=None if self.names is None else (self.names,) * len(result),
            classes=None if self.options.classes is None else tuple(map(str, self.options.classes)),
            unit=self.options.unit or "",
            predicted=self.predicted,
            input_parts=self.input_parts,
        )

    def explain(self, bar: Progress) -> Interactions:
        """Execute the run; raises `Interrupted` with the result so far after a KeyboardInterrupt."""
        result = None
        try:
            result = self.result(bar)
            return self.finish(result)
        except KeyboardInterrupt as error:
            found = error.result if isinstance(error, Interrupted) else result
            raise Interrupted(result=None if found is None else self.finish(found)) from None

    def result(self, bar: Progress) -> Interactions:
        """Draw, in batches of examples whose matrices are within the limit of memory, or fewer if memory runs out.

        Results that do not fit on a GPU are moved to the host, see `linalg.memory`.
        """
        k, most = self.gaussian.rank(self.inputs[0].numel()), self.budget.most
        width = min(k, most) if self.grouping is None else self.grouping.count + PROBES
        return in_parts(
            self.oracle,
            self.inputs.device,
            bar,
            lambda: self.lead(self.start(), bar),
            lambda index: self._select(index).result(bar),
            PART_MATRICES.items(8 * k * width, self.inputs.device),
        )

    def _select(self, index: Tensor) -> Run:
        """The run of the examples at `index`."""
        return replace(
            self,
            oracle=self.oracle.select(index),
            inputs=self.inputs[index],
            grouping=None if self.grouping is None else self.grouping.select(index),
            seeds=[self.seeds[i] for i in index.tolist()],
            sums=None if self.sums is None else self.sums.select(index),
        )

    def start(self) -> Sampler:
        """The sampler of all examples; evaluates the model at the inputs."""
        return Sampler.start(self.oracle, self.inputs, self.gaussian, self.options.plan, self.grouping)

    def lead(self, sampler: Sampler, bar: Progress) -> Interactions:
        """Run all examples in one batch, with the sampler of `start` or one that replaces it."""
        options, drawn, precision = self.options, bar.n, {}
        if sampler.oracle.precision != "float32":
            error = sampler.measure_precision(self.seeds)
            precision = {"precision": sampler.oracle.precision, "precision_error": error}
            sampler = replace(sampler, extra_passes=sampler.extra_passes + PRECISION_PASSES)
        choice = choose_control(sampler, options.control, self.seeds, options.expected_calls, options.tau_probes)
        try:
            ready = with_rare_flips(self._with_tails(with_control(sampler, choice), choice), choice)
            result = self._sampled(ready, bar, choice.reason)
        except (NoKinksError, OtherPathError) as error:
            if options.control != "auto":
                raise
            choice = Choice(None, str(error), choice.passes)
            bar.update(drawn - bar.n)
            result = self._sampled(self._with_tails(with_control(sampler, choice), choice), bar, choice.reason)
        return replace(result, **precision)

    def _with_tails(self, sampler: Sampler, choice: Choice) -> Sampler:
        features = 1 if self.grouping is not None else self.inputs[0].numel()
        if self.options.tails is None or must_be_factored(features):  # the part of the strata is a dense matrix
            return sampler
        return with_tails(sampler, choice, self.seeds, self.budget.most * sampler.plan.calls_per_row)

    def _sampled(self, sampler: Sampler, bar: Progress, note: str) -> Interactions:
        start = sampler.begin(self.seeds)
        return sample_until(sampler, start, self.budget, bar, self.options.shrink, note, self.sums)


def in_parts(
    oracle: Oracle,
    device: torch.device,
    bar: Progress,
    everyone: Callable[[], Interactions],
    some: Callable[[Tensor], Interactions],
    limit: int | None = None,
) -> Interactions:
    """Return `everyone()`; if it runs out of memory, concatenate `some(index)` over batches of examples.

    Batches have equal sizes of at most `limit` examples. The number of examples that fit is kept for later runs of the
    explainer. The results are moved from a GPU to the host if all of them, at the mean size of the first ones, exceed
    the limit.
    """
    together, drawn, most = oracle.batch, bar.n, min(oracle.most_examples, limit or oracle.batch)
    if together <= most:
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
        oracle.most_examples = most = -(-together // 2)
        bar.update(drawn - bar.n)
        release()  # after the handler: the error refers to the tensors that did not fit
    parts, kept = list[Interactions](), KEPT_RESULTS.on(device)
    for index in torch.arange(together, device=device).tensor_split(-(-together // most)):
        try:
            part = some(index)
        except KeyboardInterrupt as error:
            parts += [error.result] if isinstance(error, Interrupted) and error.result is not None else []
            raise Interrupted(result=Interactions.cat(parts) if parts else None) from None
        parts.append(replace(part, estimate=part.estimate.released()))
        if device.type == "cuda" and too_large(parts, together, kept):
            parts = [part.to("cpu") for part in parts]
    result = Interactions.cat(parts)
    return result if result.control is None else replace(result, control_note="")


def too_large(parts: Sequence[Interactions], together: int, limit: int) -> bool:
    """Whether results of `together` examples with the mean size of these parts would take more than `limit` bytes."""
    return stored_bytes([part.estimate for part in parts]) * together > limit * sum(map(len, parts))


@dataclass(frozen=True)
class Budget:
    """Numbers of rows to draw, and the tolerance at which to stop."""

    first: int  # rows before the first error estimate
    most: int  # maximum number of rows
    tol: float | None  # None: draw `most` rows without error estimates
    block: int = 1  # rows up to which the error may fall faster than 1/√n, so that it is not extrapolated

    @staticmethod
    def make(options: Options, k: int) -> Budget:
        """From the options of a run with draws of k dimensions.

        The time of an error estimate grows faster with k than that of a row, so the first one of many dimensions is
        made after an eighth of a block. Doublings of it end at a complete block, where quadratics are exact.
        """
        most = options.rows(k)
        if options.n_calls is not None:
            return Budget(most, most, None)
        first = min(k, max(FIRST_ROWS, -(-k // FIRST_SHARE)))
        return Budget(min(first, most), most, options.tol, k)

    def next_rows(self, error: Tensor, rows: int) -> Tensor:
        """Rows of the next error estimate of examples with a relative error after `rows` rows, (b,).

        It is twice as many, or half of the rows that the error is expected to need if it falls like 1/√n.
        """
        doublings = torch.ones_like(error, dtype=torch.float64)
        if self.tol is not None and rows >= max(self.block, FIRST_ROWS):
            far = (_doublings(error, self.tol) - 1).clamp_min(1)
            doublings = torch.where(error < CLEAR, far, doublings)
        return (rows * 2**doublings).clamp_max(self.most).long()

    def expected_rows(self, error: Tensor, rows: int) -> Tensor:
        """Rows at which examples with a relative error after `rows` rows are expected to stop, (b,).

        >>> Budget(64, 5000, tol=0.1).expected_rows(torch.tensor([0.11, 0.39, torch.nan]), 64).tolist()
        [128.0, 1024.0, 5000.0]
        """
        assert self.tol is not None
        return (rows * 2 ** _doublings(error, self.tol)).nan_to_num(self.most).clamp_max(self.most)


def _doublings(error: Tensor, tol: float) -> Tensor:
    """Doublings of the rows after which a relative error that falls like 1/√n is below `tol`, at least 1, (b,)."""
    return (error.double() / tol).log2().mul(2).ceil().clamp_min(1)


def _rows_fit(inputs: Tensor, k: int, rows: int) -> bool:
    """Whether the rows of all features of each example, or their matrix, can be kept for group sums."""
    numbers = min(rows, head_rows(k)) * k * 3 + (3 * k * k if rows > head_rows(k) else 0)
    size = numbers * inputs.element_size() * len(inputs)
    return k > SMALL and rows <= most_rows(k, k) and size <= GROUPED_ROWS.on(inputs.device)


def sample_until(
    sampler: Sampler,
    stats: Statistics,
    budget: Budget,
    bar: Progress,
    shrink: bool,
    note: str,
    sums: Grouping | None = None,
) -> Interactions:
    """Increase the rows of each example until it stops, judged by the error of the group sums where `sums` is given.

    Raises `Interrupted` with the examples that stopped, and what was drawn of the others, after a KeyboardInterrupt.
    """
    going = sampler.extension(stats, torch.arange(len(stats), device=sampler.inputs.device))
    rows, checks, finished, warned = budget.first, KinkChecks(), [], False
    due = torch.full_like(stats.n, rows)  # rows of the next error estimate of each example, independent of the others
    total = torch.full_like(stats.n, budget.most, dtype=torch.float64)  # rows that each example is expected to take
    bar.expect(budget.most if budget.tol is None else None)
    try:
        while True:
            seen = int(going.stats.n[0])
            stats = sampler.extend(going, rows - seen, bar, check=not seen)
            now = torch.nonzero(due == rows).reshape(-1)
            index = going.index[now]
            judged_stats = stats if len(now) == len(stats) else stats.select(now)
            estimate, checks = _estimate(sampler, judged_stats, index, shrink, checks)
            judged = estimate
            if sums is not None and budget.tol is not None:
                judged = estimate.grouped(sums.select(index), sampler.inputs[0].numel())
            verdicts = _verdicts(judged, budget, rows, _controlled(sampler, index))
            stop = torch.tensor([v != "" for v in verdicts], device=index.device)
            if len(done := torch.nonzero(stop).reshape(-1)):
                part = estimate if len(done) == len(index) else estimate.select(done)
                passes = sampler.passes(part.statistics.n.double(), index[done]) + checks.passes_of(index[done])
                finished.append(_Finished(index[done], part, passes, tuple(v for v in verdicts if v)))
            if len(done) == len(stats):
                return _result(sampler, finished, note)
            error = judged.relative_error
            total[index] = torch.where(stop, float(rows), budget.expected_rows(error, rows))
            bar.expect(float(total.mean()))
            if not warned and max(FIRST_ROWS, min(budget.block, budget.most // 4)) <= rows <= budget.most // 2:
                warned = _warn_out_of_reach(sampler, budget, error[~stop], rows)
            due[now] = torch.where(stop, 0, budget.next_rows(error, rows))
            left = torch.nonzero(due).reshape(-1)
            going, due = sampler.extension(stats.select(left), going.index[left]), due[left]
            rows = int(due.min())
    except KeyboardInterrupt:
        finished += _unfinished(sampler, going, finished, shrink, checks)
        raise Interrupted(result=_result(sampler, finished, note) if finished else None) from None


def _warn_out_of_reach(sampler: Sampler, budget: Budget, error: Tensor, rows: int) -> bool:
    """Warn, and return True, if examples that continue are not expected to reach the tolerance, from their errors."""
    assert budget.tol is not None
    needed = rows * (error / budget.tol).square()
    known = error < (CLEAR if rows < UNMOVED_ROWS else 1.0)  # otherwise H may turn out to be zero
    far = known & (needed > budget.most)
    if not bool(far.any()):
        return False
    calls = sampler.plan.calls_per_row
    warnings.warn(
        f"relative_error ≤ {budget.tol:g} is probably out of reach for {int(far.sum())} example(s) with {sampler.rank} "
        f"dimensions: after {rows * calls} calls the error is up to {float(error[far].max()):.2g}, and about "
        f"{float(needed[far].max()) * calls:.2g} calls are needed, more than max_calls={budget.most * calls}. The run "
        "continues. Sums over segments of features (feature_mask=…) and a larger tolerance (tol=…) need fewer calls; "
        "n_calls=… sets their number.",
        stacklevel=2,
    )
    return True


def _unfinished(
    sampler: Sampler, going: Extension, finished: Sequence[_Finished], shrink: bool, checks: KinkChecks
) -> list[_Finished]:
    """The examples that an interruption found without verdict, as a list of one; empty if nothing was drawn of them."""
    try:
        sampler.oracle.refuse_infinite()
    except ValueError:  # an interruption is not replaced by another error
        return []
    stopped = {i for part in finished for i in part.examples.tolist()}
    left = torch.tensor([place for place, i in enumerate(going.index.tolist()) if i not in stopped], dtype=torch.long)
    stats = going.statistics()
    if not len(left) or not int(stats.n[0]):
        return []
    left = left.to(going.index.device)
    index = going.index[left]
    estimate, checks = _estimate(sampler, stats.select(left), index, shrink, checks)
    passes = sampler.passes(estimate.statistics.n.double(), index) + checks.passes_of(index)
    return [_Finished(index, estimate, passes, (STATUS,) * len(index))]


class _Finished(NamedTuple):
    """Examples that stopped after the same number of rows."""

    examples: Tensor  # their indices
    estimate: HessianEstimate
    passes: Tensor
    status: tuple[str, ...]


def _estimate(
    sampler: Sampler, stats: Statistics, index: Tensor, shrink: bool, checks: KinkChecks
) -> tuple[HessianEstimate, KinkChecks]:
    """The estimate of the examples at `index`, whose statistics are `stats`, and `checks` with those made here.

    Where no row shows a kink, the operations of the model are checked, once per example: `no_kinks` decides between an
    exact and an unknown (NaN) error.
    """
    no_kinks = None
    still = unmoved(stats) & stats.is_uncontrolled  # a residual of zero proves nothing about the model
    smooth = torch.nonzero(still | shows_no_kink(stats)).reshape(-1)
    constant = still & (stats.head.even == 0).all(2).all(1)  # an odd function has gradients that do vary
    if len(smooth):
        no_kinks = torch.zeros(len(index), dtype=torch.bool, device=index.device)
        no_kinks[smooth], checks = check_kinks(sampler, checks, index[smooth], constant[smooth])
    grouping = None if sampler.grouping is None else sampler.grouping.select(index)
    denoised = shrink and sampler.grouping is None and stats.k > SMALL
    return HessianEstimate(stats, sampler.gaussian, grouping, denoised, no_kinks), checks


def _result(sampler: Sampler, finished: Sequence[_Finished], note: str) -> Interactions:
    """The result of all examples, in the order of the inputs."""
    entries, control = sampler.oracle.entries, sampler.control
    order = torch.cat([part.examples for part in finished]).argsort()
    estimate, status = finished[0].estimate, finished[0].status
    if len(finished) > 1:
        estimate = HessianEstimate.cat([part.estimate for part in finished]).select(order)
        listed = [s for part in finished for s in part.status]
        status = tuple(listed[i] for i in order.tolist())
    return Interactions(
        inputs=sampler.inputs.clone(),  # the caller may change its tensor later
        estimate=estimate,
        target=None if entries is None else entries.cpu(),
        n_passes=torch.cat([part.passes for part in finished])[order],
        status=status,
        control=None if control is None else "kink",
        control_weights=None if control is None else torch.stack([control.linear, control.flip], 1),
        control_rank=control.directions.rank if control is not None and control.expected.hessian.is_thin else None,
        tau_probes=None if control is None else control.directions.tau_probes,
        control_note=note,
        unbiased=control is None or control.drift is None or not bool(control.flip.any()),
    )


def _controlled(sampler: Sampler, index: Tensor) -> Tensor:
    """Where a control variate is subtracted, (b,)."""
    if sampler.control is None:
        return torch.zeros_like(index, dtype=torch.bool)
    return ((sampler.control.linear != 0) | (sampler.control.flip != 0))[index]


def _verdicts(estimate: HessianEstimate, budget: Budget, rows: int, controlled: Tensor) -> list[str]:
    """The reason why each example stops, or an empty string where it continues."""
    if budget.tol is None:
        return ["calls"] * len(estimate)
    error, noise = estimate.relative_error, estimate.noise
    unclear = ~(error < CLEAR)
    if not bool(((error <= budget.tol) | unclear).any()):  # degrees of freedom and ‖Ĥ‖² cannot change the decision
        return ["budget" if rows >= budget.most else ""] * len(estimate)
    only_units = noise.prior is None or not bool((noise.prior.df > 0).any())
    scrambled = estimate.statistics.design == "sobol"
    least = LEAST_DF if scrambled else LEAST_UNITS - 1 if only_units else 1
    effective = carrying_rows(estimate.statistics, estimate.grouping is not None)
    enough = (rows >= LEAST_ROWS) & (noise.df >= least) & ((effective >= LEAST_EFFECTIVE) | (effective == 0))
    if not only_units:  # with few degrees of freedom a smaller error is required
        error = error * (LEAST_DF / noise.df.clamp_min(1)).clamp_min(1).sqrt()
    # few rows may miss a kink, or everything that the control variate does not model
    exact = (error <= EXACT) & (((error > 0) & ~controlled) | (rows >= LEAST_ROWS))
    met = (error <= budget.tol) & (enough | exact)
    zero = noise.unmoved & ~controlled & (rows >= UNMOVED_ROWS)  # with an error that the margins of the units give
    if bool((enough & unclear).any()):
        zero = zero | (enough & unclear & _looks_zero(noise))
    if bool((met & (error == 0)).any()):
        zero = zero | (met & (error == 0) & (noise.estimate.squared_norm == 0))
    found = zip(noise.unknown.tolist(), zero.tolist(), met.tolist(), strict=True)
    return [_verdict(*one, rows, rows >= budget.most) for one in found]


def _verdict(unknown: bool, zero: bool, met: bool, rows: int, last: bool) -> str:
    """The reason why one example stops after `rows` rows, or an empty string."""
    if unknown:  # no gradient shows a kink, but further draws could cross one
        return "unknown" if last or rows >= UNMOVED_ROWS else ""
    return "zero" if zero else "tolerance" if met else "budget" if last else ""


def _looks_zero(noise: Noise) -> Tensor:
    """Where H cannot be distinguished from zero and explains less than ZERO_SHARE of the gradient's variation, (B,).

    A row's estimate has E‖A‖² ≈ k/2 times that variation, and ‖W‖² is the part of it that H explains.
    """
    stats = noise.features
    signal = noise.estimate.squared_norm - noise.of_frobenius
    score = zero_score(noise)
    spread = torch.where(score != 0, signal / score, torch.inf)
    s, g = stats.head.score.double(), stats.head.odd.double()
    squares = (s.square().sum(-1) * g.square().sum(-1) + (s * g).sum(-1).square()) / 2
    row_energy = squares.sum(-1) / stats.n_head
    share = (signal.clamp_min(0) + 2 * spread) * stats.k / 2 / row_energy
    # under a correlated Gaussian the entries of directions with small variance dominate, so the test is not used
    return (score < 2) & (share < ZERO_SHARE) & noise.gaussian.has_mean_curvature
