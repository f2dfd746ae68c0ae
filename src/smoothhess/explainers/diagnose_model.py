"""Diagnosis of a model before sampling: which σ are usable, is its own Hessian zero, and what does a run cost?

This module holds the public function, its record and the text of its report. The activation calls are inspected in
`activation_flips`, changes of the gradient are measured in `gradient_changes`, and the range of σ is decided in
`sigma_range`. H itself is estimated by `smooth_hess`; warnings about a finished estimate are in `result_warnings`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smoothhess.draws.designs import find_design, pilot_rows
from smoothhess.draws.gaussian import Gaussian, Isotropic
from smoothhess.explainers.activation_flips import (
    PIECEWISE_LINEAR,
    RARE,
    Activation,
    Activations,
    inspect_activations,
    n_probes_of_tau,
)
from smoothhess.explainers.gradient_changes import MULTIPLES, GradientChanges, double_backward
from smoothhess.explainers.options import rows_of_calls
from smoothhess.explainers.result_warnings import unscaled_columns
from smoothhess.explainers.sigma_range import (
    BEYOND,
    CENTRE,
    GOOD,
    LEAST_CALLS,
    NOISE,
    ROUNDED,
    SAYS,
    Cost,
    Recommendation,
    check_data,
    data_scale,
    ends,
    estimated_cost,
    longest_good,
    recommend,
    states_of,
    typical_states,
)
from smoothhess.model.convert_inputs import in_column_order
from smoothhess.model.model_call import ModelCall
from smoothhess.model.state import borrowed
from smoothhess.model.targets import by_class_name

ASKED = len(MULTIPLES) // 2  # index of the given Gaussian in the grid
HVP_DIRECTIONS = 4
NEGLIGIBLE = 0.1  # expected flips below which flips do not explain a change of the gradient over a tiny step
POOR = 0.5  # R² at the recommended σ below which a finding is reported
SHOWN_EXAMPLES, SHOWN_SIGMAS = 4, 8  # in the printed report
NO_CHANGE = "No gradient changes at any σ: the model is affine around these inputs, or a step function."
PASS_DATA = "The scale of your data is not known here: pass data=, a sample of inputs, to keep σ below it."


@dataclass(frozen=True, eq=False, repr=False)
class Diagnosis:
    """The findings of `diagnose` for B examples, on the CPU; print it for a report.

    The grid has S values of σ. Without a given σ, `calls`, `inside` and `verdict` describe the recommended one.
    """

    sigmas: Tensor  # (S,) of the grid; multiples of the given Gaussian if it is not isotropic
    expected_flips: Tensor  # (B, S) expected number of units that cross a kink in one draw; NaN where it is unknown
    share_rare: Tensor  # (B, S) share of H₁ from units with fewer than three expected flips in cost.n_calls calls
    r2: Tensor  # (B, S) share of the gradient's variation that Hδ explains; NaN where it was not measured
    states: tuple[int, ...]  # (S,) whether each σ is usable for at least half of the examples; see `sigma_range`
    low: float  # smallest and largest usable σ of the grid for at least half of the examples, NaN if there is none
    high: float
    recommended: float | None  # the nearest one if none is usable; None if σ was given, or if f is affine
    cost: Cost  # of an `attribute` call
    findings: tuple[str, ...]  # one sentence each
    calls: tuple[Activation, ...]
    unseen: str  # why the calls, or their shares, could not be recorded; empty if they were
    own_hessian: tuple[str, ...]  # "zero", "nonzero" or "undecided", of each example
    own_curvature: Tensor  # (B,) root mean square of |LᵀHLz| by double backward; NaN if that fails
    why: str  # evidence for own_hessian
    odd: Tensor  # (B, S) mean of o over the pairs
    noise: Tensor  # (B,) rounding error of o
    lower: Tensor  # (B,) lower end of the good range of each example; NaN if it lies outside of the grid
    upper: Tensor  # (B,) upper end of the good range, likewise
    inside: Tensor  # (B,) whether the given Gaussian lies in the good range
    verdict: tuple[str, ...]  # one sentence per example
    shape: tuple[int, ...]  # of the inputs
    given: bool  # whether σ, a radius or a Gaussian was given
    n_passes: float  # work of the diagnosis per example, in gradient calls

    def __str__(self) -> str:
        return "\n".join(_report_at_sigma(self) if self.given else _report_of_range(self))

    __repr__ = __str__

    def to_frame(self) -> Any:
        """A pandas DataFrame with one row for each σ of the grid and each example.

        Raises:
            ImportError: if pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("to_frame needs pandas: pip install pandas") from error
        examples, count = len(self.verdict), len(self.sigmas)
        return pd.DataFrame(
            {
                "example": torch.arange(examples).repeat_interleave(count).numpy(),
                "sigma": self.sigmas.repeat(examples).numpy(),
                "expected_flips": self.expected_flips.flatten().numpy(),
                "share_rare": self.share_rare.flatten().numpy(),
                "r2": self.r2.flatten().numpy(),
                "usable": [state == GOOD for state in self.states] * examples,
            }
        )


def diagnose(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    sigma: Any = None,
    radius: float | None = None,
    gaussian: Gaussian | None = None,
    data: Any = None,
    classes: Sequence[str] | None = None,
    n_calls: int | None = None,
    n_pairs: int = 16,
    seed: int = 0,
    internal_batch_size: int | None = None,
    show_progress: bool | None = None,
) -> Diagnosis:
    """Find the σ that are usable around the inputs, and recommend one; or examine a given σ.

    Without sigma, radius and gaussian, the range of σ is measured, and a pilot run at each usable σ of a grid measures
    how well the quadratic surrogate fits. With one of them, the report says whether it is usable, which activation
    calls have curvature there, and whether the model's own Hessian is zero.

    Args:
        forward_func: the model, as in `SmoothHess`.
        inputs, target, additional_forward_args, sigma, radius, gaussian, internal_batch_size,
            show_progress: as in `SmoothHess.attribute`.
        data: a sample of inputs, (N, *shape), as a tensor, array or DataFrame; σ above the standard deviation of their
            features are not recommended.
        classes: names of the model's outputs, if `target` names them.
        n_calls: gradient calls per example of the planned run, for the cost and for the share of H₁ that rests on rare
            flips; None: one block, two calls for each dimension of the noise, and at least 64.
        n_pairs: ± pairs of points at which gradients are compared, for each σ of the grid.
        seed: seed of these points and of the pilot runs.

    Returns:
        A `Diagnosis`; print it for a report.

    Raises:
        ValueError: if `n_pairs` is less than 2, if `n_calls` is not an even number of calls, or if the shape of `data`
            is not that of the inputs.

    >>> _ = torch.manual_seed(0)
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 40), torch.nn.ReLU(), torch.nn.Linear(40, 1)).double()
    >>> found = diagnose(net, torch.ones(1, 3).double())
    >>> found.low <= found.recommended <= found.high
    True
    >>> found = diagnose(net, torch.ones(1, 3).double(), sigma=1e-6)
    >>> found.own_hessian, found.calls[0].name, found.inside.item(), "is too small" in str(found)
    (('zero',), '1 (ReLU)', False, True)
    """
    if hasattr(forward_func, "attribute"):
        remedy = "Use explainer.diagnose(inputs, target)." if hasattr(forward_func, "diagnose") else "Pass its model."
        raise TypeError(f"diagnose takes a model, got a {type(forward_func).__name__}. {remedy}")
    target = by_class_name(target, classes)
    call = ModelCall(forward_func, inputs, target, additional_forward_args, internal_batch_size)
    if isinstance(n_pairs, bool) or not hasattr(n_pairs, "__index__") or n_pairs < 2:
        raise ValueError(f"n_pairs must be a whole number of ± pairs, at least 2, got {n_pairs!r}. 16 are enough.")
    x = call.inputs
    data, sigma = check_data(data, x, forward_func), in_column_order(sigma, inputs)
    given = any(option is not None for option in (sigma, radius, gaussian))
    if given:
        gaussian = Gaussian.ensure(sigma=sigma, radius=radius, gaussian=gaussian, d=x[0].numel())
    else:
        gaussian = Isotropic(data_scale(x, data) or 1.0)
    gaussian = gaussian.to(x.device, x.dtype)
    k = gaussian.rank(x[0].numel())
    n_calls = max(2 * k, LEAST_CALLS) if n_calls is None else n_calls
    rows_of_calls(n_calls, find_design("orthogonal"), "n_calls")
    oracle = call.oracle()
    z = pilot_rows(seed, max(n_pairs, n_probes_of_tau(k)), k).to(x)  # (≥ n_pairs, k)
    with borrowed(forward_func, x.device):
        value, gradient = oracle(x, torch.arange(len(x), device=x.device))
        found = inspect_activations(oracle, x, value, gradient, gaussian, z, n_pairs)
        passes = found.passes
        if not given:
            gaussian, found = _centred(gaussian, found)
        curvature, refusal = double_backward(oracle, x, gaussian, z[:HVP_DIRECTIONS])
        began, rows = time.perf_counter(), oracle.n_rows
        changes = GradientChanges.measure(oracle, x, gaussian, z[:n_pairs], gradient, seed)
        seconds = (time.perf_counter() - began) / (oracle.n_rows - rows)
        multiples = [m.expand(len(x)) for m in MULTIPLES]
        flips = torch.stack([found.expected_flips(m) for m in multiples], 1)
        rare = torch.stack([found.share_rare(m, n_calls) for m in multiples], 1)
        cost = estimated_cost(oracle, x, k, n_calls, seconds, found)
    own = _own_hessian(found, curvature, changes)
    states = states_of(found, own, changes, flips)
    scales = MULTIPLES * (gaussian.sigma if isinstance(gaussian, Isotropic) else 1.0)
    if data is not None or not (given or found.n_units):  # without units only the data have a scale
        states[:, _mean_sigma(gaussian, x) * MULTIPLES > (data_scale(x, data) or 1.0)] = BEYOND
    chosen = Recommendation(typical_states(states), torch.full_like(flips, math.nan), None, 0)
    if not given:
        chosen = recommend(call, scales, states, seed, not found.unseen, show_progress)
    asked = ASKED if chosen.index is None else chosen.index
    if chosen.index is not None:
        at = Isotropic(float(scales[asked])).to(x.device, x.dtype)
        with borrowed(forward_func, x.device):  # the calls at the recommended σ
            found = inspect_activations(oracle, x, value, gradient, at, z, n_pairs)
        passes += chosen.passes + found.passes
    good = longest_good(chosen.states)
    isotropic = isinstance(gaussian, Isotropic)
    label, unit = (f"σ = {float(scales[asked]):.3g}", "") if isotropic else ("the given Gaussian", " times its size")
    limits = [ends(row, scales, asked) for row in states.tolist()]
    pairs = zip(states.tolist(), limits, strict=True)
    known = [r2 for r2 in chosen.r2.nanmean(0).tolist() if not math.isnan(r2)]
    findings = _findings(found, own, max(known, default=math.nan))
    if not given and chosen.index is None and {*chosen.states} <= {NOISE, ROUNDED, BEYOND}:
        findings = [NO_CHANGE]
    if not given and data is None:
        findings.append(PASS_DATA)
    if not given and (columns := unscaled_columns(x if data is None else data, float(scales[asked]))):
        findings.append(f"Caution: {columns}")
    return Diagnosis(
        sigmas=scales,
        expected_flips=flips,
        share_rare=rare,
        r2=chosen.r2,
        states=tuple(chosen.states),
        low=float(scales[good[0]]) if good else math.nan,
        high=float(scales[good[-1]]) if good else math.nan,
        recommended=None if chosen.index is None else float(scales[asked]),
        cost=cost,
        findings=tuple(findings),
        calls=found.calls,
        unseen=found.unseen,
        own_hessian=own,
        own_curvature=curvature,
        why=_why(found, own, curvature, refusal),
        odd=changes.odd.mean(2),
        noise=changes.noise,
        lower=torch.tensor([low for low, _ in limits], dtype=torch.float64),
        upper=torch.tensor([high for _, high in limits], dtype=torch.float64),
        inside=states[:, asked] == GOOD,
        verdict=tuple(_verdict(label, row, two, scales, asked, unit) for row, two in pairs),
        shape=tuple(x.shape),
        given=given,
        n_passes=oracle.n_rows / len(x) + passes + 2 * HVP_DIRECTIONS,
    )


def _centred(gaussian: Gaussian, found: Activations) -> tuple[Gaussian, Activations]:
    """The Gaussian at the centre of the grid, below the typical distance of a kink, and the activations under it."""
    assert isinstance(gaussian, Isotropic)
    distance = found.typical_distance()
    factor = CENTRE * (1.0 if math.isnan(distance) else distance)
    return Isotropic(gaussian.sigma * factor), found.rescaled(factor)


def _mean_sigma(gaussian: Gaussian, x: Tensor) -> float:
    """Root mean square of σ over the features."""
    return float(gaussian.scales(x[0].numel()).double().square().mean().sqrt())


# --- interpretation of the measurements -------------------------------------------------------------------------------


def _own_hessian(found: Activations, curvature: Tensor, changes: GradientChanges) -> tuple[str, ...]:
    """By double backward; its zero must be confirmed by gradients that do not change over a tiny step."""
    still = ~changes.seen(changes.near)[:, 0]
    flips = found.expected_flips(changes.step)
    crossed = (curvature == 0) & found.piecewise_linear & (flips > NEGLIGIBLE)  # explains a change
    ratios = changes.near[:, 1] / changes.near[:, 0]
    doubled = ratios.median(1).values  # 2 for a smooth f, less where kinks are crossed
    return tuple(
        "nonzero" if c > 0 else "zero" if zero else "nonzero" if abs(ratio - 2) < 0.3 else "undecided"
        for c, zero, ratio in zip(curvature.tolist(), (still | crossed).tolist(), doubled.tolist(), strict=True)
    )


def _verdict(label: str, states: Sequence[int], ends: Sequence[float], scales: Tensor, asked: int, unit: str) -> str:
    first, last = (f"{float(s):.2g}" for s in (scales[0], scales[-1]))
    if min(states) >= NOISE:
        return f"{label} is too small, or f is affine: no change of the gradient at any scale from {first} to {last}."
    low = f"below {first}" if math.isnan(ends[0]) else f"{ends[0]:.2g}"
    high = f"above {last}" if math.isnan(ends[1]) else f"{ends[1]:.2g}"
    span = f"good: {low} to {high}{unit}" if GOOD in states else f"none from {first} to {last}{unit} is good"
    return f"{label} {SAYS[states[asked]]} ({span})."


def _why(found: Activations, own: Sequence[str], curvature: Tensor, refusal: str) -> str:
    """The evidence about the model's own Hessian as text."""
    words = {"smooth": "a smooth activation", "map": "softmax or normalisation"}
    bent = [f"{c.name}: {words.get(c.kind, c.kind)}" for c in found.calls if c.kind not in PIECEWISE_LINEAR]
    kinds = ", ".join(dict.fromkeys(c.kind for c in found.calls))
    if not found.calls:
        seen = f"Judged by gradients only: {found.unseen}."
    elif bent:
        seen = f"Calls with a second derivative: {'; '.join(bent)}."
    else:
        seen = f"All activation calls ({kinds}) are piecewise linear, so ∇²f = 0 almost everywhere."
        if "nonzero" in own:
            seen = f"All activation calls ({kinds}) are piecewise linear: products or other operations have curvature."
    if refusal:
        numbers = f"Double backward is not possible ({refusal}); gradients over a tiny step decide."
    elif curvature.any():
        numbers = f"Double backward gives |LᵀHLz| up to {float(curvature.max()):.2g}."
    else:
        numbers = f"Double backward gives exactly 0 along {HVP_DIRECTIONS} directions."
        if own.count("zero") < len(own):
            numbers += " Yet gradients change over a tiny step: it crosses kinks, or the gradients have no derivative."
    return f"{seen} {numbers}"


# --- the printed report -----------------------------------------------------------------------------------------------


def _findings(found: Activations, own: Sequence[str], fit: float) -> list[str]:
    """Sentences about the model and, with the best R² of all σ, about the surrogate."""
    lines = []
    if set(own) == {"zero"}:
        lines.append("The model's own Hessian is zero: only a smoothed Hessian shows interactions.")
    elif set(own) == {"nonzero"}:
        lines.append("The model's own Hessian is not zero: at small σ the smoothed Hessian equals it.")
    if found.unseen:
        lines.append(f"Flips are unknown: {found.unseen}.")
    if fit < POOR:
        lines.append(f"R² is {fit:.2f} at best: a quadratic function describes this model badly at every usable σ.")
    return lines


def _own_words(own: Sequence[str]) -> str:
    counts = " / ".join(f"{word} ({own.count(word)})" for word in sorted(set(own)))
    return f"Own Hessian: {counts if ' / ' in counts else own[0]}."


def _report_at_sigma(found: Diagnosis) -> list[str]:
    """The lines about a given σ."""
    lines = [f"{_own_words(found.own_hessian)} {found.why}"]
    if found.calls:
        table = [("call", "kind", "units", "active", "flips/draw", "share of H₁"), *map(_cells, found.calls)]
        lines += _aligned(table, str.ljust)
    if found.calls and found.unseen:
        lines.append(f"The shares of the layers are unknown: {found.unseen}.")
    for i, line in enumerate(found.verdict):
        lines.append(f"Verdict{f' {i}' if len(found.verdict) > 1 else ''}: {line}")
    rare = float(found.share_rare[:, ASKED].nanmean())
    if not math.isnan(rare):
        lines.append(f"Rare flips: {rare:.0%} of H₁ rests on fewer than {RARE} flips in {found.cost.n_calls} calls.")
    return [*lines, f"A run: {found.cost}.", f"Cost: {found.n_passes:.0f} passes per example."]


def _report_of_range(found: Diagnosis) -> list[str]:
    """The lines about a range of σ: a table, the recommendation, and what it rests on."""
    batch, d = found.shape[0], math.prod(found.shape[1:])
    lines = [f"Range of σ for {batch} example(s) of {d} features"]
    if found.recommended is None:
        low, high = _short(float(found.sigmas[0])), _short(float(found.sigmas[-1]))
        reasons = [SAYS[s].removeprefix("is ") for s in dict.fromkeys(found.states)]
        lines += [f"No σ from {low} to {high} is usable:", *(f"  {reason}" for reason in reasons)]
        return [*lines, *found.findings]
    columns = {"σ": found.sigmas.tolist(), "radius σ√d": (found.sigmas * d**0.5).tolist()}
    cells = [[name, *map(_short, values)] for name, values in columns.items()]
    for name, values, form in (
        ("flips/draw", found.expected_flips, ".2g"),
        ("rare flips", found.share_rare, ".0%"),
        ("R²", found.r2, ".2f"),
    ):
        means = values.nanmean(0)
        if not bool(means.isnan().all()):
            cells.append([name, *(_number(m, form) for m in means.tolist())])
    cells.append(["", *(_words(state) for state in found.states)])
    chosen = found.sigmas.tolist().index(found.recommended)
    cells[-1][chosen + 1] = f"← {'nearest' if math.isnan(found.low) else 'recommended'}"
    rows = [*zip(*cells, strict=True)]
    lines += [f"  {line}" for line in _aligned([rows[0], *(rows[i + 1] for i in _shown(found))], str.rjust)]
    if math.isnan(found.low):
        state = SAYS[found.states[chosen]].removeprefix("is ")
        lines.append(f"No σ is usable without reservation; the nearest is sigma={_short(found.recommended)}: {state}.")
    else:
        less = " or less" if found.states[0] == GOOD else ""  # the grid ends, not the range
        span = f"{_short(found.low)}{less} to {_short(found.high)}"
        lines.append(f"Use sigma={_short(found.recommended)}; usable are {span}.")
    if batch > 1:
        ends_of = zip(found.lower.tolist(), found.upper.tolist(), found.r2[:, chosen].tolist(), strict=True)
        for i, (low, high, r2) in [*enumerate(ends_of)][:SHOWN_EXAMPLES]:
            span = (
                f"{_end(low, 'any')} to {_end(high, 'any')}" if bool(found.inside[i]) else found.verdict[i].rstrip(".")
            )
            lines.append(f"  example {i}: {span}, R² {_number(r2, '.2f')}")
        if batch > SHOWN_EXAMPLES:
            lines.append(f"  … {batch - SHOWN_EXAMPLES} more; it is usable for {int(found.inside.sum())} of {batch}")
    return [*lines, *found.findings, f"A run: {found.cost}.", *_legend(found)]


def _legend(found: Diagnosis) -> list[str]:
    """The meaning of the columns."""
    lines = ["R²: share of the gradient's variation around x that the Hessian explains."]
    if not bool(found.expected_flips.isnan().all()):
        lines = [
            "flips/draw: hidden units that cross a kink in one draw; rare flips: share of the one-flip Hessian from",
            f"units with fewer than {RARE} flips in {found.cost.n_calls} calls. {lines[0]}",
        ]
    return lines


def _shown(found: Diagnosis) -> range:
    """Indices of the rows of the table: the usable σ, one more at each end, at most SHOWN_SIGMAS of the largest."""
    good = [i for i, sigma in enumerate(found.sigmas.tolist()) if found.low <= sigma <= found.high]
    good = good or [found.sigmas.tolist().index(found.recommended)]
    stop = min(good[-1] + 2, len(found.sigmas))
    return range(max(good[0] - 1, stop - SHOWN_SIGMAS, 0), stop)


def _words(state: int) -> str:
    return "usable" if state == GOOD else SAYS[state].removeprefix("is ")


def _short(value: float) -> str:
    """Two significant digits.

    >>> _short(123.4), _short(0.0316)
    ('120', '0.032')
    """
    return f"{float(f'{value:.2g}'):g}"


def _end(value: float, unknown: str) -> str:
    return unknown if math.isnan(value) else _short(value)


def _aligned(rows: Sequence[Sequence[str]], justify: Callable[[str, int], str]) -> list[str]:
    """Lines of a table; the last column is aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([*map(justify, row[:-1], widths), row[-1]]).rstrip() for row in rows]


def _number(value: float, form: str) -> str:
    return "–" if math.isnan(value) else format(round(value, 4) + 0.0, form)


def _cells(call: Activation) -> tuple[str, ...]:
    means = [float(t.nanmean()) for t in (call.active, call.flips, call.share)]
    active, flips, share = (_number(m, form) for m, form in zip(means, (".0%", ".3g", ".0%"), strict=True))
    return call.name, call.kind, str(call.units), active, flips, share
