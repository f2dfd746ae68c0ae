"""Comparison of SmoothHess with the baselines on the same points, as surrogates and as attacks.

This module chooses and runs the methods; the two comparisons belong in `compare_surrogates.py` and
`attack_comparison.py`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smoothhess import baselines as baseline_methods
from smoothhess.curvature import activation_hooks
from smoothhess.draws.seeding import fixed_normal
from smoothhess.evaluate.attack_comparison import AttackComparison, post_hoc
from smoothhess.evaluate.compare_surrogates import Comparison, compare
from smoothhess.explainers.smooth_hess import SmoothHess
from smoothhess.linalg.trust_region.check_radius import check_radius
from smoothhess.model.gradients import Oracle, check_batch_size
from smoothhess.model.model_call import ModelCall
from smoothhess.model.state import borrowed, is_opaque
from smoothhess.result.intervals import half_width
from smoothhess.result.result import Result
from smoothhess.result.taylor import Taylor, surrogate

BASELINES = ("softplus", "swish", "gradient", "random")
NAMES = {"softplus": ("SoftPlus H+G", "SoftPlus G"), "swish": ("Swish H+G", "Swish G"), "hessian": ("own H+G",)}
OURS = ("SmoothHess", "SmoothGrad")
PROBES, PROBED = 64, 16  # draws per input, and inputs: the standard deviation of pre-activations to a few per cent
_BENT = ("relu", "leaky_relu", "prelu", "hardtanh")  # activations that softened networks replace


@dataclass(frozen=True, eq=False, repr=False)
class MethodComparison:
    """Surrogate errors and attacks of SmoothHess and its baselines around the same B inputs.

    Returned by `compare_methods`.
    """

    radius: float
    results: Mapping[str, Result]  # "smoothhess", and each baseline that could be computed
    surrogates: Comparison  # P_MSE; without "random", which is not a surrogate of f
    attacks: AttackComparison | None  # None if the model is not a classifier
    notes: tuple[str, ...]  # parameters that were chosen, and methods that were left out, with the reason

    def to_markdown(self) -> str:
        """Both tables, with paired differences to SmoothHess; positive where SmoothHess is better."""
        parts = [self.surrogates.to_markdown(against=OURS[0])]
        if self.attacks is not None:
            parts.append(self.attacks.to_markdown(against=OURS[0]))
        return "\n\n".join([*parts, *self.notes])

    def __repr__(self) -> str:
        parts = [repr(self.surrogates), *self._verdicts("better surrogate", self.surrogates)]
        if self.attacks is not None:
            parts += ["", repr(self.attacks), *self._verdicts("stronger attack", self.attacks)]
        return "\n".join([*parts, "", *self.notes])

    def _verdicts(self, word: str, table: Comparison | AttackComparison) -> list[str]:
        """One line per baseline: its paired difference to SmoothHess, and which method is better."""
        lines = []
        for name in table.methods:
            if name == OURS[0]:
                continue
            apart = table.difference(name, OURS[0])
            value, stderr, p = float(apart.value[0]), float(apart.stderr[0]), float(apart.p_value[0])
            ahead = "undecided" if not p < 0.05 else f"{OURS[0] if value > 0 else name} is the {word}"
            if isinstance(table, Comparison):
                shown = f"{value:+.2g} ± {half_width(stderr, len(table) - 1):.1g}"
            else:
                shown = f"{value:+.1%} ± {half_width(stderr):.1%}"
            lines.append(f"  {name} − {OURS[0]}: {shown}, p = {p:.2g}: {ahead}")
        return lines


def compare_methods(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    radius: float,
    sigma: float | None = None,
    beta: float | None = None,
    baselines: Sequence[str] = BASELINES,
    n_calls: int | None = None,
    n_samples: int = 2_000,
    sampling: str = "ball",
    bounds: Any = None,
    decide: Callable[[Any], Tensor] | None = None,
    internal_batch_size: int | None = None,
    seed: int = 0,
) -> MethodComparison:
    """Compare SmoothHess, SmoothGrad and baselines within `radius` of each input: P_MSE, and attacks on classifiers.

    Args:
        forward_func: the model, or another callable; it is left unchanged.
        inputs: (B, *shape); the standard errors of the paired differences decrease with the number of points.
        target: the output to explain, to approximate and to attack; see `smoothhess.model.targets`.
        additional_forward_args, internal_batch_size: see `SmoothHess.attribute`.
        radius: radius of the ball for surrogate errors and attacks.
        sigma: smoothing of SmoothHess and SmoothGrad; radius/√d when None. `smoothhess.evaluate.select` tunes it.
        beta: β of SoftPlus; Swish uses half of it. None matches it to sigma: for a pre-activation with standard
            deviation τ, the curvature of a smoothed relu at its kink is 1/(√(2π) τ) under Gaussian smoothing and β/4
            (SoftPlus) or β/2 (Swish); τ is measured at these inputs.
        baselines: any of "softplus", "swish", "gradient", "random" and "hessian" (that of the model).
        n_calls: gradient calls of SmoothHess per example; None samples until its relative error is 0.1.
        n_samples, sampling: see `perturbation_mse`.
        bounds, decide: see `post_hoc`.
        seed: seed of all draws.

    Returns:
        A MethodComparison. Its p-values are not corrected for the number of baselines.

    Raises:
        TypeError: if sigma is not a number.
        ValueError: if radius, beta or the names of the baselines are invalid.

    >>> _ = torch.manual_seed(0)
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3)).double()
    >>> x = torch.randn(30, 4).double()
    >>> found = compare_methods(net, x, net(x).argmax(1), radius=0.5, n_calls=400)
    >>> found.surrogates.methods
    ('SmoothHess', 'SmoothGrad', 'SoftPlus H+G', 'SoftPlus G', 'Swish H+G', 'Swish G', 'gradient')
    >>> bool(found.surrogates.difference("gradient", "SmoothHess").value > 0)
    True
    """
    check_radius(radius)
    _check_baselines(baselines)
    if sigma is not None and (isinstance(sigma, bool) or not isinstance(sigma, int | float)):
        raise TypeError(f"sigma must be one number here, a standard deviation, got {type(sigma).__name__}.")
    call = ModelCall(forward_func, inputs, target, additional_forward_args, internal_batch_size)
    inputs, target = call.inputs, call.target
    sigma = radius / math.sqrt(inputs[0].numel()) if sigma is None else sigma
    about = (target, additional_forward_args)
    rows: dict[str, Any] = {"internal_batch_size": internal_batch_size}
    ours = SmoothHess(forward_func).attribute(inputs, *about, sigma=sigma, n_calls=n_calls, seed=seed, **rows)
    results: dict[str, Result] = {"smoothhess": ours}
    notes = ["p values are not corrected for the number of baselines.", f"SmoothHess and SmoothGrad: σ = {sigma:.3g}."]
    if beta is None and {"softplus", "swish"} & set(baselines):
        tau = _spread(forward_func, inputs, additional_forward_args, sigma, internal_batch_size, seed)
        beta = None if tau is None else 4 / (math.sqrt(2 * math.pi) * tau)
    for name in baselines:
        options: dict[str, Any] = dict(rows)
        if name in ("softplus", "swish"):
            if beta is None:
                notes.append(f"{NAMES[name][0]}: left out, since the model has no relu to replace.")
                continue
            options["beta"] = beta if name == "softplus" else beta / 2
            notes.append(f"{NAMES[name][0]}: β = {options['beta']:.3g}.")
        if name == "random":
            options["seed"] = seed
        with warnings.catch_warnings():
            if name == "hessian":  # its note, below, repeats the warning that it is zero
                warnings.simplefilter("ignore", UserWarning)
            results[name] = getattr(baseline_methods, name)(forward_func, inputs, *about, **options)
        if note := getattr(results[name], "note", ""):
            notes.append(f"{name}: {note}.")
    taylors = _taylors(results)
    surrogates = compare(
        forward_func,
        inputs,
        {name: taylor for name, taylor in taylors.items() if name != "random"},
        radius,
        *about,
        n_samples=n_samples,
        sampling=sampling,
        seed=seed,
        **rows,
    )
    attacks = None
    if decide is None and not _classifies(forward_func, inputs, additional_forward_args, internal_batch_size):
        notes.append("No attacks: the output is not scores (N, C) of classes. Pass decide=, from output to classes.")
    else:
        attacks = post_hoc(
            forward_func, inputs, taylors, radius, additional_forward_args, bounds=bounds, decide=decide, **rows
        )
    return MethodComparison(float(radius), results, surrogates, attacks, tuple(notes))


def _taylors(results: Mapping[str, Result]) -> dict[str, Taylor]:
    """The surrogates of each result by name: of second order, of first order, or both."""
    taylors: dict[str, Taylor] = {}
    for name, result in results.items():
        second, *first = {"smoothhess": OURS, **NAMES}.get(name, ("", name))
        if second:
            taylors[second] = surrogate(result)
        for other in first:
            taylors[other] = surrogate(result, 1)
    return taylors


def _spread(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    args: Any,
    sigma: float,
    internal_batch_size: int | None,
    seed: int,
) -> float | None:
    """τ: root mean square over units and inputs of the standard deviation of pre-activations under the noise.

    Measured at a few of the inputs; None if the model calls no relu.
    """
    if is_opaque(forward_func):
        return None
    oracle = Oracle(forward_func, inputs, None, args, check_batch_size(internal_batch_size))
    noise = fixed_normal(PROBES, *inputs.shape[1:], seed=seed)
    total, count = 0.0, 0
    with borrowed(forward_func, inputs.device), torch.no_grad():
        for i in torch.linspace(0, len(inputs) - 1, min(len(inputs), PROBED)).long().tolist():
            points = inputs[i] + (sigma * noise).to(inputs)
            parts = []
            for rows in points.split(min(oracle.batch_size, PROBES)):
                owner = torch.full((len(rows),), i, device=inputs.device)
                calls = activation_hooks.record(oracle.bound(owner), rows).calls
                parts.append([c.pre.double() for c in calls if c.kind in _BENT and len(c.pre) == len(rows)])
            for seen in zip(*parts, strict=True):
                variance = torch.cat(seen).var(0)
                total, count = total + float(variance.sum()), count + variance.numel()
    return math.sqrt(total / count) if total > 0 else None


def _classifies(forward_func: Callable[..., Any], inputs: Tensor, args: Any, internal_batch_size: int | None) -> bool:
    """Whether the model returns scores (N, C) of several classes."""
    oracle = Oracle(forward_func, inputs, None, args, check_batch_size(internal_batch_size))
    with borrowed(forward_func, inputs.device), torch.no_grad():
        output = oracle.bound(torch.zeros(1, dtype=torch.long, device=inputs.device))(inputs[:1])
    return isinstance(output, Tensor) and output.ndim == 2 and output.shape[1] > 1


def _check_baselines(names: Any) -> None:
    allowed = (*BASELINES, "hessian")
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(name in allowed for name in names):
        raise ValueError(f"baselines must be a list of some of {', '.join(map(repr, allowed))}, got {names!r}.")
