"""SmoothHess: draw, evaluate, add, ask, stop."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from smoothhess.borrow import borrowed
from smoothhess.closed_form import LAYER_BYTES, ClosedForm, Layer
from smoothhess.control import CONTROL_LIMIT, MOST_BYTES, thin_rank
from smoothhess.design import SMALL, Design, find_design
from smoothhess.gaussian import Gaussian
from smoothhess.grouping import Grouping
from smoothhess.interactions import Interactions
from smoothhess.kinks import Kinks, NoKinksError
from smoothhess.noise import Noise
from smoothhess.oracle import Neuron, Oracle, check_batch_size, check_inputs, is_out_of_memory
from smoothhess.precision import check_precision
from smoothhess.sampler import OtherPathError, Sampler
from smoothhess.statistics import Statistics, concatenate, most_rows, symmetric

FIRST_ROWS = 64  # an adaptive run begins with this many rows, or one per feature where there are fewer
LEAST_ROWS = 32  # and does not judge its own error from fewer rows;
LEAST_DF = 8  # with fewer degrees of freedom than this it asks for a smaller error,
LEAST_UNITS = 40  # where units are the only witness, not from fewer of them
STEIN_LIMIT, STEIN_ROWS = 6, 100  # standard errors beyond which a warning is given, and from how many rows on
EXACT = 1e-6  # relative error that is never reached by luck
PRICE = 1.5  # passes that "auto" spends on the closed form and its pilot, at most, for each call
WORTH = 3  # the closed form must leave less open than this power of the share of passes that it does not take
ZERO_SHARE = 0.01  # H counts as zero when it can be seen to explain less of the gradient's variation than this


class SmoothHess:
    """Feature interactions of any differentiable model, ReLU networks included.

    SmoothHess is the Hessian of the model convolved with a Gaussian, ∇²E f(x + δ) = E[Σ⁻¹ δ ∇f(x + δ)ᵀ], estimated from
    gradient calls alone; SmoothGrad comes from the same calls.

    >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    >>> x = torch.zeros(4, 3, dtype=torch.float64)
    >>> result = SmoothHess(net).attribute(x, target=1, sigma=0.5, n_calls=200)
    >>> result.hessian.shape
    torch.Size([4, 3, 3])
    """

    def __init__(self, forward_func: Callable[..., Any]) -> None:
        if not callable(forward_func):
            raise TypeError(f"forward_func must be a model or another callable, got {type(forward_func).__name__}.")
        self.forward_func = forward_func
        self._known_rows: dict[Any, int] = {}  # rows that fit into the memory, found once for each kind of input

    def attribute(
        self,
        inputs: Tensor,
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        sigma: Any = None,
        radius: float | None = None,
        gaussian: Gaussian | None = None,
        n_calls: int | None = None,
        tol: float = 0.1,
        max_calls: int = 20_000,
        design: str = "orthogonal",
        control: str | None = "auto",
        tau_probes: int | None = None,
        shrink: bool = True,
        feature_mask: Tensor | None = None,
        internal_batch_size: int | None = None,
        seed: int | Sequence[int] = 0,
        precision: str = "float32",
        compile: bool = False,
        show_progress: bool = False,
    ) -> Interactions:
        """Interactions around each of B inputs.

        Args:
            inputs: (B, *shape), floating point; examples in dimension 0.
            target: which output to explain; see `smoothhess.target`.
            additional_forward_args: further arguments of the model; tensors with B rows follow their example.
            sigma: standard deviation of the noise, a number or one per feature. Pass one of sigma, radius, gaussian.
            radius: asks about the neighbourhood of that radius: sigma = radius/√d.
            gaussian: Isotropic, Diagonal, Dense or Eigenbasis.
            n_calls: gradient calls per example. None doubles it until relative_error ≤ tol, each example on its own.
            tol: relative error to reach when n_calls is None.
            max_calls: most calls per example when n_calls is None.
            design: "orthogonal" (± pairs along orthonormal directions), "sobol", "antithetic" (± pairs, as in the
                paper) or "iid" (Eq. 8 of the paper to the letter).
            control: "kink" samples only what the closed-form one-flip Hessian H₁ of the model's activations leaves
                over: unbiased, for rank/2 (or 3/2 rank) passes beforehand and 3/4 of a pass for each call. "auto" does
                so where H₁ costs at most 1.5 n_calls (or 3/8 of max_calls) and a few pairs of draws show that it is
                worth it, and takes the passes for each call only where they are seen to pay; a model whose activations
                cannot be seen goes without, and the result's control_note says why. None samples the gradient as it is.
            tau_probes: estimate the closed form's spreads τ from so many random directions instead of exactly: rank/2
                passes fewer where the network is too large to keep its Jacobian. H₁, and so the estimate, is then
                biased by about √(2/tau_probes) times its sensitivity to τ; the error is measured, the error bars hold
                it, and unbiased is False. Beyond 8192 dimensions H₁ serves in a few directions alone, and without bias
                whatever τ is: there it is estimated from 64 directions by default, and exact with as many as the rank.
            shrink: report the denoised Hessian, `hessian`, `@`, `eigh` and `taylor` of the result, with its own
                relative_error. Intervals, pairs, rows and stderr() stay those of the unbiased estimate either way.
            feature_mask: integer group ids; streams sums over groups of features and never makes (d, d).
            internal_batch_size: rows per forward pass; chosen by memory when None. Never changes the result.
            seed: one seed gives all examples the same draws, so comparisons are paired; a sequence gives each its own.
            precision: "float32" evaluates the model with the inputs' own precision. "tf32", "fp16" and "bf16" are
                faster on a GPU and put noise on the gradients; precision_error of the result says how much.
            compile: let torch.compile make the model faster; pays for many calls of a large model on a GPU.
            show_progress: a progress bar.
        """
        run = Run.prepare(
            self,
            inputs,
            target,
            additional_forward_args,
            sigma=sigma,
            radius=radius,
            gaussian=gaussian,
            n_calls=n_calls,
            tol=tol,
            max_calls=max_calls,
            design=design,
            control=control,
            tau_probes=tau_probes,
            shrink=shrink,
            feature_mask=feature_mask,
            internal_batch_size=internal_batch_size,
            seed=seed,
            precision=precision,
            compile=compile,
        )
        with borrowed(self.forward_func, run.sampler.inputs.device), run.progress(show_progress) as bar:
            result = run.lead(run.sampler, bar)
        warn_of(result, run.budget.tol)
        return result

    def closed_form(
        self,
        inputs: Tensor,
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        sigma: Any = None,
        radius: float | None = None,
        gaussian: Gaussian | None = None,
        check_calls: int = 512,
        tolerance: float = 0.1,
        internal_batch_size: int | None = None,
        seed: int | Sequence[int] = 0,
        show_progress: bool = False,
    ) -> ClosedForm:
        """H₁, the Hessian in which every unit flips alone: no draws, an approximation, and a sampled check of it.

        Exact for one hidden layer; good where few units flip within sigma; badly wrong where many do, and the check
        says so: `check_calls` gradient calls estimate ‖H₁ − H‖/‖H‖, and a warning is given where that exceeds
        `tolerance`. `by_layer()` of the result splits H₁.

        >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).double()
        >>> closed = SmoothHess(net).closed_form(torch.zeros(1, 3).double(), target=1, sigma=0.5)
        >>> [(layer.name, layer.kind, layer.units) for layer in closed.by_layer()], bool(closed.error < 1e-9)
        ([('1', 'relu', 8)], True)
        """
        check_inputs(inputs)
        inputs, plan = inputs.detach(), find_design("orthogonal")
        d = inputs[0].numel()
        gaussian = Gaussian.ensure(sigma=sigma, radius=radius, gaussian=gaussian, d=d).to(inputs.device, inputs.dtype)
        if (k := gaussian.rank(d)) > CONTROL_LIMIT:
            raise ValueError(
                f"the closed form keeps a {k} × {k} matrix for each example, and {CONTROL_LIMIT} dimensions are the "
                "most. Use attribute: its control variate keeps it in a few directions; control='kink' with "
                f"tau_probes={k} makes its τ exact, for {k // 2} passes."
            )
        rows = _rows(check_calls, plan, "check_calls")
        rows_at_once = check_batch_size(internal_batch_size)
        oracle = Oracle(
            self.forward_func, inputs, target, additional_forward_args, rows_at_once, known_rows=self._known_rows
        )
        sampler = Sampler(oracle, inputs, gaussian, plan, None)
        with borrowed(self.forward_func, inputs.device), _progress(show_progress, rows, len(inputs)) as bar:
            kinks = _insist(sampler, "the closed form cannot be made")
            size = len(kinks.bent) * len(inputs) * gaussian.rank(d) ** 2 * 8
            ones = torch.ones(len(inputs), 2, dtype=torch.float64, device=inputs.device)
            sampler.take_control(kinks, ones, layers=size <= LAYER_BYTES)
            budget = Budget(rows, rows, None)
            check = _sample_until(sampler, sampler.begin(_seeds(seed, len(inputs))), budget, bar, shrink=False, note="")
        warn_of(check, None)
        assert sampler.control is not None
        closed = _closed_form(sampler, check, tolerance)
        if bool(closed.suspect.any()):
            off, unseen = closed.error[closed.suspect].max(), kinks.unmodelled
            reason = f"it knows nothing of {unseen}, or many units flip" if unseen else "many units flip"
            warnings.warn(
                f"the closed form of {int(closed.suspect.sum())} of {len(closed)} example(s) is seen to be off by more "
                f"than {tolerance:g} (up to {float(off):.2g}): {reason} within this sigma. Use attribute, which "
                "samples what is missing, or a smaller sigma.",
                stacklevel=2,
            )
        return closed

    def more(
        self,
        result: Interactions,
        n: int,
        additional_forward_args: Any = None,
        *,
        internal_batch_size: int | None = None,
        show_progress: bool = False,
    ) -> Interactions:
        """`n` further calls of the same stream for every example of `result`, with the model that made it.

        n₁ calls and then more(n₂) equal one run of n₁ + n₂ with the same control variate; under control="auto" a run of
        n₁ + n₂ may have decided for another one.

        >>> f = lambda x: x.prod(1)
        >>> first = SmoothHess(f).attribute(torch.ones(1, 2), sigma=0.1, n_calls=100)
        >>> SmoothHess(f).more(first, 60).n_calls
        tensor([160])
        """
        statistics = result.statistics  # derivatives that were not sampled have none, and say so
        if type(result) is not Interactions:
            raise ValueError(f"a {type(result).__name__} cannot be gone on with: it is made of other results.")
        plan = find_design(result.design)
        rows = _rows(n, plan, "n")
        target = None if result.target is None else [tuple(t) for t in result.target.tolist()]
        oracle = Oracle(
            self.forward_func,
            result.inputs,
            target,
            additional_forward_args,
            check_batch_size(internal_batch_size),
            check_precision(result.precision, result.device, result.dtype),
            known_rows=self._known_rows,
        )
        sampler = Sampler(oracle, result.inputs, result.gaussian, plan, result.grouping)
        with borrowed(self.forward_func, result.device), _progress(show_progress, rows, len(result)) as bar:
            if result.control == "kink":
                sampler.tau_probes = result.tau_probes
                assert result.control_weights is not None
                sampler.thin_rank = result.control_rank or sampler.thin_rank
                sampler.take_control(_insist(sampler), result.control_weights)
            parts = []
            for index in torch.arange(len(result), device=result.device).split(1):
                sampler.check_same_model(statistics, index)
            for count in statistics.n.unique().tolist():  # examples that stopped at the same place go together
                index = torch.nonzero(statistics.n == count).reshape(-1)
                parts.append((index, sampler.extend(statistics.select(index), rows, index, bar)))
        stats = _in_order(parts)
        everyone = torch.arange(len(result), device=result.device)
        grown = replace(
            result,
            statistics=stats,
            grouping=None if result.grouping is None else result.grouping.without_r2(),
            n_passes=result.n_passes + sampler.passes(torch.full_like(result.n_passes, rows), everyone),
            denoised=None,
            shrink=result.shrink and result.denoised is None,
            status=tuple("budget" if s == "budget" else "calls" for s in result.status),
        )
        _warn_inconsistent(grown)
        return grown


class NeuronSmoothHess:
    """Interactions inside one neuron of a layer; the neuron takes the place of the model's output.

    >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> neuron = NeuronSmoothHess(net, net[2])
    >>> neuron.attribute(torch.zeros(1, 3), 1, sigma=0.5, n_calls=100).output.shape
    torch.Size([1])
    """

    def __init__(self, forward_func: Callable[..., Any], layer: nn.Module | str) -> None:
        self.forward_func = forward_func
        self.layer = layer
        self._known_rows: dict[Any, int] = {}

    def _explainer(self, selector: Any, attribute_to_neuron_input: bool) -> SmoothHess:
        explainer = SmoothHess(Neuron(self.forward_func, self.layer, selector, attribute_to_neuron_input))
        explainer._known_rows = self._known_rows
        return explainer

    def attribute(
        self,
        inputs: Tensor,
        neuron_selector: int | tuple[int | slice, ...] | Callable[[Tensor], Tensor],
        additional_forward_args: Any = None,
        *,
        attribute_to_neuron_input: bool = False,
        **options: Any,
    ) -> Interactions:
        """As `SmoothHess.attribute`, for the neuron that `neuron_selector` picks from the layer's output.

        The selector is an int, a tuple of ints and slices (a slice sums), or a callable (N, …) → (N,).
        `attribute_to_neuron_input` takes the layer's input instead: of an activation layer, the pre-activation.
        """
        explainer = self._explainer(neuron_selector, attribute_to_neuron_input)
        return explainer.attribute(inputs, None, additional_forward_args, **options)

    def more(
        self,
        result: Interactions,
        n: int,
        neuron_selector: Any,
        *args: Any,
        attribute_to_neuron_input: bool = False,
        **options: Any,
    ) -> Interactions:
        """As `SmoothHess.more`, for the same neuron."""
        return self._explainer(neuron_selector, attribute_to_neuron_input).more(result, n, *args, **options)


def smooth_hvp(forward_func: Callable[..., Any], x: Tensor, v: Tensor, target: Any = None, **options: Any) -> Tensor:
    """∇²h(x) v, the Hessian-vector product of the smoothed function: not zero on ReLU networks.

    `options` are those of `SmoothHess.attribute`; v has the shape of x, or of one input.

    >>> f, x, v = lambda x: x.prod(1), torch.ones(1, 2).double(), torch.tensor([1.0, 0.0])
    >>> smooth_hvp(f, x, v, sigma=1.0, n_calls=20_000).round(decimals=1).abs()
    tensor([[0., 1.]], dtype=torch.float64)
    """
    return SmoothHess(forward_func).attribute(x, target, **options) @ v


# --- one run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Run:
    """What `SmoothHess.attribute` makes of its arguments, before it draws."""

    sampler: Sampler
    budget: Budget
    seeds: Sequence[int]
    calls: float  # that the closed form is weighed against
    control: str | None
    shrink: bool

    @staticmethod
    def prepare(
        explainer: SmoothHess,
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
    ) -> Run:
        """With all that is refused at the door; the model is not called."""
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
            explainer.forward_func,
            inputs,
            target,
            additional_forward_args,
            check_batch_size(internal_batch_size),
            check_precision(precision, inputs.device, inputs.dtype),
            compile,
            explainer._known_rows,
        )
        budget = Budget.make(plan, n_calls, tol, max_calls, first=min(gaussian.rank(d), FIRST_ROWS))
        if n_calls is None and grouping is None:  # more than can be kept cannot be drawn
            budget = replace(budget, most=min(budget.most, most_rows(gaussian.rank(d), d)))
        if tau_probes is not None and (isinstance(tau_probes, bool) or not tau_probes >= 8):
            raise ValueError(f"tau_probes must be at least 8 random directions, or None for exact τ, got {tau_probes}.")
        white = gaussian.to(inputs.device, inputs.dtype)
        sampler = Sampler(oracle, inputs, white, plan, grouping, tau_probes=tau_probes)
        calls = n_calls if n_calls is not None else max_calls / 4
        return Run(sampler, budget, _seeds(seed, len(inputs)), calls, control, shrink)

    def progress(self, show: bool) -> tqdm:
        """A bar for all draws."""
        return _progress(show, self.budget.most, len(self.seeds))

    def lead(self, sampler: Sampler, bar: tqdm) -> Interactions:
        """The run itself, by its own sampler or by one in its place."""
        precision = sampler.oracle.precision
        rounding = None if precision == "float32" else sampler.measure_precision(self.seeds)
        note = _take_control(sampler, self.control, self.seeds, self.calls)
        try:
            result = _sample_until(sampler, sampler.begin(self.seeds), self.budget, bar, self.shrink, note)
        except OtherPathError as error:
            if self.control != "auto":
                raise
            sampler.control, note = None, str(error)
            bar.reset()
            result = _sample_until(sampler, sampler.begin(self.seeds), self.budget, bar, self.shrink, note)
        return result if rounding is None else replace(result, precision=precision, precision_error=rounding)


@dataclass(frozen=True)
class Budget:
    """How many rows to draw, and when to stop."""

    first: int  # rows before the first look
    most: int
    tol: float | None  # None: draw `most` rows without looking

    @staticmethod
    def make(plan: Design, n_calls: int | None, tol: float, max_calls: int, first: int) -> Budget:
        """From what a user asked for."""
        if n_calls is not None:
            rows = _rows(n_calls, plan, "n_calls")
            return Budget(rows, rows, None)
        if not tol > 0:
            raise ValueError(f"tol must be positive, got {tol}. Or pass n_calls.")
        most = _rows(max_calls, plan, "max_calls")
        return Budget(min(first, most), most, tol)


def _sample_until(
    sampler: Sampler, stats: Statistics, budget: Budget, bar: tqdm, shrink: bool, note: str
) -> Interactions:
    """Double the rows of every example until it may stop."""
    index = torch.arange(len(stats), device=sampler.inputs.device)
    rows, finished = budget.first, []
    while True:
        stats = sampler.extend(stats, rows - int(stats.n[0]), index, bar)
        result = replace(_result(sampler, stats, index, shrink), control_note=note)
        verdicts = _verdicts(result, budget, rows)
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
    )


def _verdicts(result: Interactions, budget: Budget, rows: int) -> list[str]:
    """Why each example stops here; empty where it goes on."""
    if budget.tol is None:
        return ["calls"] * len(result)
    error = result.relative_error
    noise = result._noise
    only_units = noise.prior is None or not bool((noise.prior.df > 0).any())
    enough = (rows >= LEAST_ROWS) & (noise.df >= (LEAST_UNITS - 1 if only_units else 1))
    if not only_units:  # an error that few directions share is known less well, and must be smaller for it
        error = error * (LEAST_DF / noise.df.clamp_min(1)).clamp_min(1).sqrt()
    # a few rows without a kink, or with nothing that the closed form does not know, prove nothing
    plain = torch.ones(len(result), dtype=torch.bool, device=error.device)
    if result.control_weights is not None:
        plain = ~result.control_weights.any(1)
    exact = (error <= EXACT) & (((error > 0) & plain) | (rows >= LEAST_ROWS))
    met = (error <= budget.tol) & (enough | exact)
    zero = enough & _looks_zero(noise)
    last = rows >= budget.most
    return [
        "zero" if z or (m and nothing) else "tolerance" if m else "budget" if last else ""
        for m, z, nothing in zip(met.tolist(), zero.tolist(), (noise.squared_norm == 0).tolist(), strict=True)
    ]


def _looks_zero(noise: Noise) -> Tensor:
    """Where H cannot be told from zero, and is seen to explain less than ZERO_SHARE of the gradient's variation, (B,).

    A row's estimate has E‖A‖² ≈ k/2 times that variation, and ‖W‖² is the part of it that H explains.
    """
    stats = noise.features
    signal = noise.squared_norm - noise.of_frobenius
    score = noise.zero_score()
    spread = torch.where(score != 0, signal / score, torch.inf)
    s, g = stats.head.score.double(), stats.head.odd.double()
    squares = (s.square().sum(-1) * g.square().sum(-1) + (s * g).sum(-1).square()) / 2
    row_energy = squares.sum(-1) / stats.n_head
    share = (signal.clamp_min(0) + 2 * spread) * stats.k / 2 / row_energy
    return (score < 2) & (share < ZERO_SHARE)


def warn_of(result: Interactions, tol: float | None) -> None:
    """Say what the user of a method that calls this should know of its result."""
    _warn_unfinished(result, tol)
    _warn_inconsistent(result)


def _warn_unfinished(result: Interactions, tol: float | None) -> None:
    stopped = [i for i, s in enumerate(result.status) if s == "budget"]
    if stopped:
        part = result[stopped]
        needed = part.calls_for(tol or 0.1)
        estimate = f" About {int(needed.max())} calls would do." if torch.isfinite(needed).all() else ""
        low, high = (f"{float(e):.3g}" for e in part.relative_error.aminmax())
        reached = low if low == high else f"{low} to {high}"
        warnings.warn(
            f"{len(stopped)} of {len(result)} example(s) stopped at max_calls={int(part.n_calls.max())} before "
            f"relative_error ≤ {tol}: reached {reached}.{estimate} "
            "Raise max_calls, or accept the error bars as they are.",
            stacklevel=4,
        )
    zeros = sum(s == "zero" for s in result.status)
    if zeros:
        warnings.warn(
            f"{zeros} of {len(result)} example(s): H cannot be told from zero. Interactions explain less than "
            f"{ZERO_SHARE:.0%} of the gradient's variation at this sigma, or the gradient did not vary at all: the "
            "model is linear there, its output is saturated (explain a logit instead), or no kink was met and a larger "
            "sigma would meet some. smoothhess.diagnose tells which.",
            stacklevel=4,
        )


def _warn_inconsistent(result: Interactions) -> None:
    first, second = (result.stein_z.abs() > STEIN_LIMIT).T
    exact = result.precision == "float32"  # less exact gradients differ from the values' by rounding alone
    first, second = (flags & (result.statistics.n >= STEIN_ROWS) & exact for flags in (first, second))
    if first.any():
        warnings.warn(
            f"the gradients of {int(first.sum())} of {len(result)} example(s) do not belong to the values: E[f δ] and "
            f"E[∇f] differ by {float(result.stein_z[:, 0].abs().max()):.0f} standard errors. Look for detached or "
            "straight-through steps, jumps, or a wrong gradient function; the interactions describe the gradients.",
            stacklevel=4,
        )
    elif second.any():
        warnings.warn(
            f"the function of {int(second.sum())} of {len(result)} example(s) curves in a way that its gradients do "
            f"not show: E[f(|z|² − d)] and E[z·∇f] differ by {float(result.stein_z[:, 1].abs().max()):.0f} standard "
            "errors. It probably jumps (is discontinuous) near the input; jumps are missing from the interactions.",
            stacklevel=4,
        )


def _take_control(sampler: Sampler, control: str | None, seeds: Sequence[int], calls: float) -> str:
    """Give the sampler its control variate, or say why it goes without; `calls` is how many the run may take."""
    if control is None:
        return "none was asked for"
    sampler.thin_rank = thin_rank(calls)
    if control == "kink":
        kinks = _insist(sampler)
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
            return f"single flips leave {least:.0%} of the gradient's variation open: not worth {price:.0f} passes"
        sampler.take_control(kinks, pilot, worth, always=False)
    except NoKinksError as error:
        return str(error)
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        sampler.control = None
        return f"freezing the activations fails ({error})"
    return ""


def _insist(sampler: Sampler, refusal: str = "control='kink' cannot be used") -> Kinks:
    """The frozen model, or an error that says why there is none."""
    try:
        return sampler.see_kinks(math.inf)
    except NoKinksError as error:
        raise ValueError(f"{refusal}: {error}. Use attribute with control=None.") from error


def _closed_form(sampler: Sampler, check: Interactions, tolerance: float) -> ClosedForm:
    """What the sampler's control knows, in the coordinates of the features."""
    control, inputs, push = sampler.control, sampler.inputs, sampler.gaussian.push
    assert control is not None

    def among_features(white: Tensor) -> Tensor:
        return symmetric(push(push(white.to(inputs)).mT))

    hessian = among_features(control.expected.hessian.dense())
    norm2 = hessian.double().square().sum((-1, -2)).clamp_min(torch.finfo(torch.float64).tiny)
    layers = []
    for call, white in zip(control.kinks.calls, control.expected.layers, strict=False):
        part = among_features(white)
        share = ((part.double() * hessian.double()).sum((-1, -2)) / norm2).to(inputs)
        layers.append(Layer(call.name, call.operator, call.pre[0].numel(), part, share))
    gradient = check.statistics.gradient + control.expected.gradient.to(inputs)
    return ClosedForm(
        inputs=inputs,
        hessian=hessian,
        gradient=push(gradient).reshape(inputs.shape),
        output=check.output,
        check=check,
        layers=tuple(layers),
        tolerance=tolerance,
        n_passes=check.n_passes,
    )


def _in_order(parts: Sequence[tuple[Tensor, Statistics]]) -> Statistics:
    order = torch.cat([index for index, _ in parts]).argsort()
    return parts[0][1] if len(parts) == 1 else concatenate([s for _, s in parts]).select(order)


# --- what is refused at the door --------------------------------------------------------------------------------------


def _rows(n: Any, plan: Design, name: str) -> int:
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


def _seeds(seed: Any, batch: int) -> list[int]:
    given: Any = [seed] * batch if isinstance(seed, int) or getattr(seed, "ndim", None) == 0 else seed
    seeds = [operator.index(s) for s in given]
    if len(seeds) != batch:
        raise ValueError(f"wanted one seed, or one per example: {batch}, got {len(seeds)}.")
    if min(seeds) < 0:
        raise ValueError(f"seeds must not be negative, got {min(seeds)}. Use 0, 1, 2, …")
    return seeds


def _progress(show: bool, rows: int, batch: int) -> tqdm:
    return tqdm(total=rows * batch, desc="SmoothHess", unit="draw", disable=not show, leave=False)
