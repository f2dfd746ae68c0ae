"""Integrated Hessians: the contribution of each pair of features along the path from a baseline to the input.

The quadrature rule belongs in `log_quadrature.py`, the choice of derivatives in `derivative_source.py`.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from smoothhess.baselines.derivative_source import DENSE, Derivatives, Level, Source, caution, curvature
from smoothhess.baselines.log_quadrature import logarithmic_rule
from smoothhess.curvature import activation_hooks
from smoothhess.curvature.frozen_network import NoKinksError
from smoothhess.draws.seeding import evaluation_seed
from smoothhess.explainers.progress import Progress
from smoothhess.explainers.result_warnings import FewEventsWarning
from smoothhess.model import targets as targets
from smoothhess.model.baseline_inputs import baseline_of
from smoothhess.model.convert_inputs import to_tensors
from smoothhess.model.model_call import ModelCall
from smoothhess.model.state import borrowed, is_opaque
from smoothhess.result.exact import Attribution, StoredResult
from smoothhess.result.intervals import half_width
from smoothhess.result.result import Result

CANCELLED = 1e-3  # completeness error allowed relative to the absolute row sums, which may cancel
MOST_STEPS = 500  # points; the cost of computing the quadrature rule grows with the cube of their number
SMOOTHING = 50  # σ of a model with kinks is the mean distance to the baseline over this number
LEAST_CALLS, MOST_CALLS = 256, 4096  # gradient calls at each point of a model with kinks
SEED_BITS = (1 << 32) - 1  # mask of the seeds of the points


def integrated_hessians(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    baselines: Any = None,
    of: str | Derivatives | None = None,
    n_steps: int = 32,
    tolerance: float = 0.05,
    internal_batch_size: int | None = None,
    show_progress: bool | None = None,
    **options: Any,
) -> Attribution:
    """Interactions Γ of all pairs, and of each feature with itself, that sum to h(x) − h(x′) for a baseline x′.

    With Δ = x − x′, and h the model or the smooth function that replaces it (see `of`):

        Γ_ij = Δ_i Δ_j ∫∫ αβ ∂_ij h(x′ + αβΔ) dα dβ,  and on the diagonal + Δ_i ∫∫ ∂_i h(x′ + αβΔ) dα dβ.

    Both integrands depend only on the product t = αβ, whose density is −log t, so both are one-dimensional integrals
    over t. The Gauss rule for that weight reaches with n_steps points the accuracy of a double sum with n_steps²
    points. Row sums are the Integrated Gradients of h.

    Γ is Integrated Gradients applied twice. Its entries sum to h(x) − h(x′) if gradient and Hessian belong to one
    function and n_steps is large enough. This completeness is checked: the note reports the error of the sum, and
    there is a warning if it exceeds `tolerance`. The Hessian of a ReLU network is zero except at its kinks, which the
    points of the path miss, so completeness fails with of="own". By default such a network is smoothed with a σ of a
    fiftieth of the mean distance |x − x′|, which the method and a warning state.

    Args:
        forward_func, inputs, target, additional_forward_args, internal_batch_size: see `gradient`.
        baselines: start of the path: a number, or a tensor, array or DataFrame with the shape of one input or of the
            batch; 0 if None.
        of: source of the derivatives: "own" (the model), "softplus" or "swish" (the softened network, with beta=),
            "smooth" (the model smoothed by a Gaussian, with sigma=, n_calls=, … of `SmoothHess.attribute` and
            independent draws at every point), or a function with the signature of the baselines. None takes "smooth"
            if the activations of the model have kinks or a sigma is given, otherwise "own".
        n_steps: points on the path, from 1 to 500.
        tolerance: relative error of the sum of all entries above which a warning is issued, beyond three standard
            errors of a sampled h and a thousandth of the absolute row sums.
        show_progress: whether to show a progress bar; None: as in `SmoothHess.attribute`.
        options: passed on to the source that `of` names. dense=False keeps Γ of a softened network matrix-free.

    Returns:
        An Attribution: the matrix is Γ, `gradient` holds its row sums (Integrated Gradients), `output` is f(x) and
        `value` is h(x) − h(x′), the sum of all entries.

    Raises:
        ValueError: if baselines have another shape or are not finite, if n_steps is out of range, or if feature_mask is
            given.

    Warns:
        UserWarning: if `of` is None and the model is smoothed because it has kinks, or if the entries do not add up.

    >>> f = lambda x: x[:, 0] * x[:, 1] + x[:, 1]
    >>> integrated_hessians(f, torch.tensor([[2.0, 3.0]])).hessian  # x₁x₂ = 6 in quarters, x₂ = 3 to itself
    tensor([[[1.5000, 1.5000],
             [1.5000, 4.5000]]])
    """
    call = ModelCall(forward_func, inputs, target, additional_forward_args, internal_batch_size)
    inputs, target = call.inputs, call.target
    start = baseline_of(to_tensors(baselines, forward_func), inputs)
    _check_steps(n_steps)
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance!r}.")
    if "feature_mask" in options:
        raise ValueError(
            "feature_mask is not supported: Γ of groups is not computed from group sums of Hessians. Call groups(mask) "
            "on the result."
        )
    if of is None:
        of, options = _default_source(call, start, options)
    source = Source.ensure(of, options)

    def at(find: Callable[..., Any], points: Tensor, step: int) -> Any:
        own: dict[str, Any] = {"seed": _reseeded(options.get("seed", 0), step)} if source.is_sampled else {}
        own["internal_batch_size"] = internal_batch_size
        with warnings.catch_warnings():
            # between kinks few draws carry an estimate; completeness shows whether the sum over all points is right
            warnings.simplefilter("ignore", FewEventsWarning)
            return find(forward_func, points, target, additional_forward_args, **own)

    move = (inputs - start).flatten(1)  # Δ
    # Σ w ∇h, Σ w t ∇²h of dense Hessians, and the terms of the others
    first, second, rest = torch.zeros_like(move), None, []
    noise, error, passes = torch.zeros(3, len(inputs), dtype=inputs.dtype, device=inputs.device)  # (B,) each
    rule = zip(*logarithmic_rule(n_steps), strict=True)
    with Progress(show_progress, n_steps, "integrated Hessians", "points") as bar:
        for step, (t, weight) in enumerate(rule):
            here: Result = at(source, start + float(t) * (inputs - start), step)
            first = first + float(weight) * here.gradient.flatten(1)
            share, form = float(weight * t), curvature(here)
            if "hessian" in form:
                second = share * form["hessian"] if second is None else second.add_(form["hessian"], alpha=share)
            elif form:
                rest.append((share, here))
            if not isinstance(here, StoredResult):
                noise = noise + (share * here.bilinear(move, move).stderr).square()
            passes, error = passes + here.n_passes, torch.maximum(error, here.relative_error)
            bar.update()
    end, begin = (at(source.level, x, n_steps + i) for i, x in enumerate((inputs, start)))
    noise = (noise + end.stderr.square() + begin.stderr.square()).sqrt()
    integral = _Integral(move, first, second, tuple(rest))
    dense = not rest and (second is not None or move.shape[1] <= DENSE)
    rows = integral(torch.ones_like(move)[:, None])[:, 0]
    return Attribution.make(
        inputs,
        end.output,
        rows,
        integral.dense() if dense else None,
        operator=None if dense else integral,
        value=end.value - begin.value,
        target=targets.entries(target, len(inputs)),
        n_passes=passes + end.n_passes + begin.n_passes,
        relative_error=error,
        seed=options.get("seed", 0) if source.is_sampled else 0,
        method=f"integrated Hessians, {source.name}",
        note=_completeness(rows, end, begin, noise, tolerance) + caution(error),
        names=call.names,
    )


@dataclass(frozen=True, eq=False)
class _Integral:
    """Γ as an operator on rows: diag(Δ) Σ w t ∇²h diag(Δ) + diag(Δ Σ w ∇h)."""

    move: Tensor  # (B, d) Δ
    first: Tensor  # (B, d) Σ w ∇h
    second: Tensor | None  # (B, d, d) Σ w t ∇²h over points with a dense Hessian
    rest: tuple[tuple[float, Result], ...]  # (w t, result) of points with a matrix-free Hessian

    def __call__(self, rows: Tensor) -> Tensor:
        moved = self.move[:, None] * rows
        total = self.first[:, None] * rows
        if self.second is not None:
            total = total + moved @ self.second
        for share, here in self.rest:
            total = total + share * here.product(moved)
        return self.move[:, None] * total

    def dense(self) -> Tensor:
        """Γ as a matrix; all Hessians must be dense."""
        total = torch.diag_embed(self.move * self.first)
        return total if self.second is None else total + self.move[:, :, None] * self.second * self.move[:, None]

    def select(self, index: Tensor) -> _Integral:
        """The operator of the examples in `index`."""
        second = None if self.second is None else self.second[index]
        rest = tuple((share, here[index]) for share, here in self.rest)
        return _Integral(self.move[index], self.first[index], second, rest)


def _default_source(call: ModelCall, start: Tensor, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The source of the derivatives and its options: the smoothed model if the model has kinks; warns of it."""
    if {"sigma", "radius", "gaussian"} & options.keys():
        return "smooth", options
    distance = float((call.inputs - start).flatten(1).norm(dim=1).mean())
    if distance == 0 or "dense" in options or not _has_kinks(call):
        return "own", options
    sigma = distance / SMOOTHING
    warnings.warn(
        "the model has kinks, such as those of relu, which its Hessian does not contain, so that the entries would not "
        f"add up. The model is smoothed with sigma={sigma:.3g}, 1/{SMOOTHING} of the mean distance |x − x′|. Pass "
        "sigma, of='softplus' with beta, or of='own'.",
        stacklevel=3,
    )
    d = call.inputs[0].numel()
    return "smooth", {"n_calls": min(max(LEAST_CALLS, 4 * d), MOST_CALLS), **options, "sigma": sigma}


def _has_kinks(call: ModelCall) -> bool:
    """Whether the model calls a piecewise linear activation or a maximum; False if its calls cannot be recorded."""
    if is_opaque(call.forward_func):
        return False
    first = call.inputs[:1]
    run = call.oracle().bound(torch.zeros(1, dtype=torch.long, device=first.device))
    try:
        with borrowed(call.forward_func, first.device), torch.no_grad():
            calls = activation_hooks.record(run, first).calls
    except (NoKinksError, activation_hooks.OtherPathError, RuntimeError, TypeError):
        return False
    return any(c.knots or c.kind == "max_pool" for c in calls)


def _completeness(rows: Tensor, end: Level, begin: Level, noise: Tensor, tolerance: float) -> str:
    """Text about the error of Σ Γ = h(x) − h(x′); warns where it exceeds the tolerance."""
    total = rows.double().sum(1)
    missed = total - (end.value - begin.value).double()
    scale = (end.value - begin.value).abs().double()
    share = torch.where(missed == 0, 0.0, missed.abs() / scale)
    model = (total - (end.output - begin.output).double()).abs()
    failed = missed.abs() > tolerance * scale + 3 * noise.double() + CANCELLED * rows.abs().double().sum(1)
    if bool(failed.any()):
        warnings.warn(
            f"the entries of {int(failed.sum())} of {len(failed)} example(s) do not add up to h(x) − h(x′): the "
            f"relative error is up to {float(share[failed].max()):.2g}. Use more n_steps. The Hessian of a ReLU net "
            "does not include the contribution of its kinks: use of='softplus', 'swish' or 'smooth'.",
            stacklevel=3,
        )
    chance = f" ± {half_width(float(noise.max())):.2g}" if bool(noise.any()) else ""
    return (
        f"completeness: the sum of the entries differs from h(x) − h(x′) by at most "
        f"{float(missed.abs().max()):.2g}{chance} (relative {float(share.max()):.2g}), and from f(x) − f(x′) by "
        f"{float(model.max()):.2g}"
    )


def _reseeded(seed: int | Sequence[int], step: int) -> int | list[int]:
    """Independent seeds for a point of the path, so that the errors of different points average out."""
    if isinstance(seed, SupportsIndex):
        return evaluation_seed(operator.index(seed), step) & SEED_BITS
    return [evaluation_seed(int(s), step) & SEED_BITS for s in seed]


# --- argument validation ----------------------------------------------------------------------------------------------


def _check_steps(n_steps: Any) -> None:
    if isinstance(n_steps, bool) or not hasattr(n_steps, "__index__"):
        raise TypeError(f"n_steps must be an integer, got {type(n_steps).__name__}.")
    if not 1 <= n_steps <= MOST_STEPS:
        raise ValueError(f"n_steps must be between 1 and {MOST_STEPS} points, got {n_steps}.")
