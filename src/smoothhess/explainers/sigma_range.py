"""The range of σ that is usable for a model and its inputs, and the σ that is recommended within it.

A σ is too small where noise or gradients are lost to rounding, or where a draw meets no kink; it is too large where the
change of the gradient stops growing with σ, so that Ĥ falls like 1/σ and does not depend on the input any more, or
where the noise exceeds the scale of the data. Between these limits the fit of the quadratic surrogate decides.
`docs/sigma.md` derives the rules. The measurements are in `gradient_changes` and `activation_flips`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smoothhess.curvature.control_variate import CONTROL_LIMIT, Directions
from smoothhess.draws.designs import find_design
from smoothhess.estimate.fit_quality import variation
from smoothhess.explainers.activation_flips import Activations
from smoothhess.explainers.adaptive import Run
from smoothhess.explainers.gradient_changes import MARGIN, MULTIPLES, GradientChanges
from smoothhess.explainers.options import Options
from smoothhess.explainers.progress import Progress
from smoothhess.linalg.memory import with_bytes_kept
from smoothhess.model.capacity import Capacity
from smoothhess.model.convert_inputs import to_tensors
from smoothhess.model.gradients import Oracle
from smoothhess.model.model_call import ModelCall
from smoothhess.model.state import borrowed

SATURATED = 0.25  # slope of log o against log σ: half of the slope of independent kinks
LOST = 0.1  # share of the noise lost in x + δ above which `attribute` raises
LEAST_CALLS = 64  # calls that `attribute` takes at least with its default options
PILOT_ROWS = 64  # most ± pairs of the pilot run at each σ
FITS = 0.5  # share of the best R² below which the surrogate of a σ fits badly
NEARLY_BEST = 0.8  # share of the best R² that a recommended σ has at least
CENTRE = 0.1  # centre of the grid, as a multiple of the typical distance of a kink

GOOD, SATURATES, INFINITE, BEYOND, MISFIT, NOISE, FEW, ROUNDED = range(8)  # states of one σ; from NOISE on: too small
SAYS = {
    GOOD: "lies inside the good range",
    SATURATES: "is too large: the gradient's change hardly grows with σ any more",
    INFINITE: "is too large: values or gradients are not finite there",
    NOISE: f"is too small: most draws change the gradient by less than {MARGIN:g} times its rounding",
    FEW: "is too small: a draw meets less than one kink on average",
    ROUNDED: f"is too small: adding such noise to the inputs loses over {LOST:.0%} of it to rounding",
    BEYOND: "is too large: the noise exceeds the scale of the data",
    MISFIT: f"fits badly: R² of its quadratic surrogate is less than {FITS:g} of the best",
}


@dataclass(frozen=True)
class Cost:
    """Estimated work of one `attribute` call with `n_calls` calls per example."""

    block: int  # calls of a complete block, 2 × dimensions of the noise: every direction is used once
    n_calls: int  # calls per example: the budget
    n_passes: float  # passes per example: calls, and the closed form of the control variate where it applies
    seconds: float  # for all examples, from timed calls
    n_bytes: int  # activations of a batch, and the rows that are kept for the result

    def __str__(self) -> str:
        return (
            f"{self.n_calls} calls per example (one block: {self.block}), {self.n_passes:.0f} passes, "
            f"about {self.seconds:.2g} s and {max(1.0, self.n_bytes / 2**20):.0f} MiB"
        )


def estimated_cost(oracle: Oracle, x: Tensor, rank: int, n_calls: int, seconds: float, found: Activations) -> Cost:
    """The cost of a run, from the `seconds` that one call takes and the memory that one forward pass keeps."""
    everyone = torch.arange(len(x), device=x.device)

    def forward() -> Tensor:
        return oracle.forward(x.clone().requires_grad_(), everyone)

    _, row_bytes = with_bytes_kept(forward, len(x))
    closed = math.inf
    if found.kinks is not None and rank <= CONTROL_LIMIT:
        closed = Directions().least_price(found.kinks, rank)
    passes = n_calls + (closed + 0.75 * n_calls if closed <= 1.5 * n_calls else 0)  # as control="auto"
    batch = min(oracle.batch_size, n_calls * len(x)) * row_bytes
    kept = 3 * (n_calls // 2) * rank * len(x) * x.element_size()
    return Cost(2 * rank, n_calls, passes, seconds * passes * len(x), batch + kept)


# --- states of the σ of a grid ----------------------------------------------------------------------------------------


def states_of(found: Activations, own: Sequence[str], changes: GradientChanges, flips: Tensor) -> Tensor:
    """The state of each multiple of the grid, (B, S)."""
    height = changes.odd.mean(2).clamp_min(torch.finfo(torch.float64).tiny).log()
    (slope,) = torch.gradient(height, spacing=(MULTIPLES.log(),), dim=1)
    slope = slope + slope_stderr(changes.odd)  # a slope from few flips may be small by chance
    only_kinks = torch.tensor([word == "zero" for word in own])
    states = torch.full(slope.shape, GOOD)
    states[slope < SATURATED] = SATURATES
    states[~changes.seen(changes.odd)] = NOISE
    states[(flips < min(1.0, found.n_knots / 4)) & only_kinks[:, None]] = FEW  # at most half of all knots flip
    states[changes.lost > LOST] = ROUNDED
    # o exceeded the rounding error at a smaller σ
    states[(states >= NOISE) & ((states < NOISE).cumsum(1) > 0)] = SATURATES
    states[~changes.odd.isfinite().all(2)] = INFINITE
    return states


def slope_stderr(odd: Tensor) -> Tensor:
    """Standard error of the slope of log o between the neighbours of each multiple, (B, S), from o (B, S, n).

    The logarithm of a ratio of two means a/b over the same n directions has the variance of a_i/a − b_i/b over n.
    """
    relative = odd / odd.mean(2, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)  # (B, S, n)
    last = odd.shape[1] - 1
    after, before = (torch.arange(last + 1).add(step).clamp(0, last) for step in (1, -1))
    stderr = (relative[:, after] - relative[:, before]).std(2) / math.sqrt(odd.shape[2])
    return (stderr / (MULTIPLES[after] / MULTIPLES[before]).log()).nan_to_num(0.0)


def ends(states: Sequence[int], scales: Tensor, near: int) -> tuple[float, float]:
    """Ends of the range of good multiples nearest to index `near`; NaN where it reaches the end of the grid."""
    good = [i for i, state in enumerate(states) if state == GOOD]
    low = high = min(good, key=lambda i: abs(i - near), default=0)
    while low - 1 in good:
        low -= 1
    while high + 1 in good:
        high += 1
    return (
        float(scales[low]) if good and low > 0 else math.nan,
        float(scales[high]) if good and high < len(states) - 1 else math.nan,
    )


def typical_states(states: Tensor) -> list[int]:
    """The state of each multiple for all examples: good if it is for half of them, otherwise the most frequent other.

    >>> typical_states(torch.tensor([[GOOD, FEW], [FEW, FEW]])) == [GOOD, FEW]
    True
    """
    found = []
    for column in states.T.tolist():
        counts = Counter(column)
        found.append(GOOD if 2 * counts[GOOD] >= len(column) else max(counts.keys() - {GOOD}, key=counts.__getitem__))
    return found


# --- the recommended σ ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Recommendation:
    """The σ of a grid that is recommended for all examples."""

    states: list[int]  # of the grid, with σ whose surrogate fits badly
    r2: Tensor  # (B, S) of the pilot runs; NaN where there was none
    index: int | None  # of the recommended σ
    passes: float  # per example


def recommend(
    call: ModelCall, scales: Tensor, states: Tensor, seed: int, controlled: bool, show_progress: bool | None
) -> Recommendation:
    """Recommend one of the usable σ after a pilot run at each of them, with common random numbers.

    `states` (B, S) are those of each example. Where no σ is usable, the nearest one is recommended.
    """
    r2 = torch.full(states.shape, math.nan, dtype=torch.float64)
    passes, typical = 0.0, typical_states(states)
    good = [i for i, state in enumerate(typical) if state == GOOD] or nearest_to_usable(typical)
    with Progress(show_progress, len(good), "diagnose", "σ") as bar:
        for i in good:
            measured, spent = pilot_r2(call, float(scales[i]), seed, controlled)
            r2[:, i] = measured.clamp(-1, 1).masked_fill(states[:, i] >= NOISE, math.nan)  # few flips: no variation
            passes += spent
            bar.update()
    if typical.count(GOOD) == 0:
        return Recommendation(typical, r2, good[0] if good else None, passes)
    typical = with_misfits(typical, r2)
    return Recommendation(typical, r2, recommended_index(typical, r2), passes)


def data_scale(x: Tensor, data: Tensor | None) -> float:
    """Root mean square of the features' standard deviations in a sample, otherwise of the inputs themselves."""
    square = x.double().square() if data is None else data.double().flatten(1).var(0)
    return float(square.mean().sqrt())


def check_data(data: Any, x: Tensor, forward_func: Callable[..., Any]) -> Tensor | None:
    """A sample of inputs, a tensor, array or DataFrame, as a tensor; None if there is none.

    Raises:
        ValueError: if it is no sample of inputs.
    """
    if data is None:
        return None
    data = to_tensors(data, forward_func)
    fits = isinstance(data, Tensor) and data.shape[1:] == x.shape[1:] and len(data) > 1
    if not fits or not bool(data.isfinite().all()):
        given = tuple(data.shape) if isinstance(data, Tensor) else type(data).__name__
        raise ValueError(
            f"data must be a finite tensor, array or DataFrame of at least 2 inputs of shape {tuple(x.shape[1:])}, got "
            f"{given}. Pass rows of the training data, prepared like the inputs."
        )
    return data.detach().to(x)


def pilot_r2(call: ModelCall, sigma: float, seed: int, controlled: bool) -> tuple[Tensor, float]:
    """R² of the quadratic surrogate at σ from a few draws, (B,), and the passes per example.

    It is the share σ²‖H‖²/E‖∇f − G‖² of the gradient's variation that Hδ explains, with an unbiased estimate of ‖H‖².
    """
    block = find_design("orthogonal").block_rows(call.inputs[0].numel())
    rows = PILOT_ROWS // block * block or PILOT_ROWS  # complete blocks, if they are small enough
    options = Options(
        sigma=sigma,
        n_calls=2 * rows,
        seed=seed,
        control="auto" if controlled else None,
        internal_batch_size=call.internal_batch_size,
    )
    run = Run.prepare(call, options, Capacity())
    try:
        with borrowed(call.forward_func, call.inputs.device), Progress(False) as bar:
            result = run.finish(run.result(bar)).unshrunk()
    except ValueError:  # not finite at one of the draws
        return torch.full((len(call.inputs),), math.nan, dtype=torch.float64), 2 * rows
    noise = result.noise
    spread = noise.of_frobenius.nan_to_num(0.0)  # NaN where the draws show no kink: the rows are those of a quadratic
    share = sigma**2 * (noise.estimate.squared_norm - spread) / variation(noise)
    return share.double().cpu(), float(result.n_passes.mean())


def nearest_to_usable(states: Sequence[int]) -> list[int]:
    """Index of the σ to use where none is usable, or none, as a list.

    It is the smallest one at which draws meet kinks although the gradient's change hardly grows, otherwise the largest
    one with fewer kinks; never one beyond the data, or at which gradients are lost to rounding or not finite.

    >>> nearest_to_usable([NOISE, FEW, FEW, SATURATES, BEYOND]), nearest_to_usable([FEW, FEW, BEYOND])
    ([3], [1])
    >>> nearest_to_usable([NOISE, NOISE])
    []
    """
    saturated = [i for i, state in enumerate(states) if state == SATURATES]
    few = [i for i, state in enumerate(states) if state == FEW]
    return saturated[:1] or few[-1:]


def with_misfits(states: list[int], r2: Tensor) -> list[int]:
    """The states, in which σ whose mean R² (B, S) is far below the best are marked."""
    mean = r2.nanmean(0)
    best = max(float(mean.nan_to_num(-math.inf).max()), 0.0)
    return [MISFIT if s == GOOD and m < FITS * best else s for s, m in zip(states, mean.tolist(), strict=True)]


def longest_good(states: Sequence[int]) -> range:
    """Indices of the longest run of good states; of several the last.

    >>> longest_good([FEW, GOOD, GOOD, SATURATES, GOOD])
    range(1, 3)
    """
    best = range(0)
    for start in range(len(states)):
        stop = start
        while stop < len(states) and states[stop] == GOOD:
            stop += 1
        if stop - start > 0 and stop - start >= len(best):
            best = range(start, stop)
    return best


def recommended_index(states: Sequence[int], r2: Tensor) -> int:
    """Index of the largest σ of the longest good run whose mean R² is nearly the best, or of the next smaller one.

    The smaller one leaves room for inputs at which the range ends earlier; the scale of the data is the same for all.
    """
    good, mean = longest_good(states), r2.nanmean(0).nan_to_num(0.0).tolist()
    best = max(mean[i] for i in good)
    fitting = [i for i in good if mean[i] >= NEARLY_BEST * max(best, 0.0)] or [max(good, key=mean.__getitem__)]
    last = fitting[-1]
    ends_at_data = states[last + 1 : last + 2] == [BEYOND]
    return last if ends_at_data or last - 1 not in fitting else last - 1
