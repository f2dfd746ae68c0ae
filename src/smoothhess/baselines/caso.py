"""CAFO and CASO: the change of the input that raises the loss most, to first and to second order.

The loss and its derivatives belong in `cross_entropy.py`, the penalised solver in `penalized_quadratic.py`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smoothhess.baselines.cross_entropy import DENSE, Loss
from smoothhess.baselines.derivative_source import Derivatives, caution
from smoothhess.baselines.gradient import gradient
from smoothhess.baselines.penalized_quadratic import Quadratic, extremes, maximize_penalized
from smoothhess.linalg.trust_region.check_radius import check_radius
from smoothhess.result.exact import Attribution
from smoothhess.result.minimize_in_ball import minimize_in_ball
from smoothhess.result.result import Result


def cafo(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    l1: float = 0.0,
    l2: float = 0.0,
    radius: float | None = None,
    of: str | Derivatives | Result = "own",
    internal_batch_size: int | None = None,
    **options: Any,
) -> Attribution:
    """The change δ that raises the loss most to first order: argmax gᵀδ − l1 ‖δ‖₁ − l2 ‖δ‖², over ‖δ‖ ≤ radius.

    g is the gradient of the cross-entropy for the label. The solution is the soft threshold of g at l1, divided by
    2·l2 and scaled back to the ball. Without a radius, l2 must be positive.

    Args:
        forward_func: the model, which returns logits (N, C); it is left unchanged.
        inputs: (B, *shape), floating point; examples in dimension 0.
        target: the label of each example, an int or B ints; None uses the predicted labels.
        additional_forward_args, internal_batch_size: see `gradient`.
        l1: weight of the L1 penalty, which makes δ sparse.
        l2: weight of the squared L2 norm.
        radius: radius of the ball that δ is restricted to; None for no restriction.
        of: source of g: "own" (the model's gradient), "softplus" or "swish" (the softened network, with beta=),
            "smooth" (SmoothGrad, with sigma=), a function with the signature of the baselines, or a result for the
            loss.
        options: passed on to the source that `of` names.

    Returns:
        An Attribution: `gradient` is δ, the matrix is zero, `output` is the loss and `value` is the predicted increase
        gᵀδ.

    Raises:
        ValueError: if l1 or l2 is negative, or if there is neither a radius nor a positive l2.

    >>> net = torch.nn.Linear(3, 2, bias=False).double()
    >>> x = torch.ones(1, 3, dtype=torch.float64)
    >>> step = cafo(net, x, target=0, l2=0.5).gradient  # here the gradient of the loss
    >>> bool(torch.allclose(step, (net(x).softmax(1)[:, 1:] * (net.weight[1] - net.weight[0]))))
    True
    """
    penalty = _Penalty.ensure(l1, l2, radius)
    if radius is None and penalty.l2 == 0:
        raise ValueError("without a radius the first-order increase has no bound: pass radius=, or l2= above 0.")
    loss = Loss.of(forward_func, inputs, target, additional_forward_args, internal_batch_size)
    surface = loss.derivatives(gradient if isinstance(of, str) and of == "own" else of, options)
    slope = surface.gradient.flatten(1).double()
    step = slope.sign() * (slope.abs() - penalty.l1).clamp_min(0)
    length = step.norm(dim=1, keepdim=True)
    scale = torch.full_like(length, math.inf if penalty.l2 == 0 else 1 / (2 * penalty.l2))
    if radius is not None:
        scale = torch.minimum(scale, torch.where(length > 0, radius / length, 0.0))
    step = step * scale
    return Attribution.make(
        loss.inputs,
        surface.output,
        step.to(loss.inputs).reshape(loss.inputs.shape),
        value=(slope * step).sum(1).to(loss.inputs),
        target=loss.label[:, None].cpu(),
        n_passes=surface.n_passes + 0.5,
        n_calls=surface.n_calls,
        seed=surface.seed,
        method="CAFO",
        note=f"the change that raises the loss most to first order, {penalty}",
    )


def caso(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    l1: float = 0.0,
    l2: float = 0.0,
    radius: float | None = None,
    of: str | Derivatives | Result = "gauss_newton",
    internal_batch_size: int | None = None,
    **options: Any,
) -> Attribution:
    """The change δ that raises the loss most to second order.

    argmax gᵀδ + ½ δᵀHδ − l1 ‖δ‖₁ − l2 ‖δ‖², over ‖δ‖ ≤ radius, with gradient g and Hessian H of the cross-entropy for
    the label. Without a radius the maximum exists only if 2·l2 exceeds the largest eigenvalue of H. With a radius and
    l1 = 0 this is the trust-region problem, solved exactly, so caso(l1=0, l2=0, radius=r) is the attack that raises
    the loss. With a radius and l1 > 0 the problem is solved only if 2·l2 exceeds that eigenvalue.

    Args:
        forward_func: the model, which returns logits (N, C); it is left unchanged.
        inputs: (B, *shape), floating point; examples in dimension 0.
        target: the label of each example, an int or B ints; None uses the predicted labels.
        additional_forward_args, internal_batch_size: see `gradient`.
        l1: weight of the L1 penalty, which makes δ sparse.
        l2: weight of the squared L2 norm.
        radius: radius of the ball that δ is restricted to; None for no restriction.
        of: source of g and H. "gauss_newton" is the closed form for the loss, see `gauss_newton`; "own" is the full
            Hessian, which is the same for ReLU networks; "softplus" and "swish" need beta=; "smooth" is SmoothHess of
            the loss (with sigma= or gaussian=, n_calls=, …). Also a function with the signature of the baselines, or a
            result for the loss, `SmoothHess(cross_entropy(model)).attribute(x, None, label, …)`.
        options: passed on to the source that `of` names.

    Returns:
        An Attribution: `gradient` is δ, the matrix holds δ_i H_ij δ_j, whose sum is twice the quadratic part of the
        increase (it holds each pair twice), `output` is the loss and `value` is the predicted increase gᵀδ + ½δᵀHδ.

    Raises:
        ValueError: if l1 or l2 is negative, or if l2 is too small for a maximum to exist or to be found.

    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).double()
    >>> x = torch.ones(1, 3, dtype=torch.float64)
    >>> found = caso(net, x, radius=0.1)
    >>> bool(abs(found.gradient.norm() - 0.1) < 1e-9), found.hessian.shape
    (True, torch.Size([1, 3, 3]))
    """
    penalty = _Penalty.ensure(l1, l2, radius)
    loss = Loss.of(forward_func, inputs, target, additional_forward_args, internal_batch_size)
    surface = loss.derivatives(of, options)
    step, note = _steepest(surface, penalty)
    pairs = surface.product(step.to(loss.inputs)[:, None])[:, 0].double()  # Hδ, (B, d)
    slope = surface.gradient.flatten(1).double()
    return Attribution.make(
        loss.inputs,
        surface.output,
        step.to(loss.inputs).reshape(loss.inputs.shape),
        **_between(surface, step.to(loss.inputs)),
        value=((slope + pairs / 2) * step).sum(1).to(loss.inputs),
        target=loss.label[:, None].cpu(),
        n_passes=surface.n_passes + 0.5,
        n_calls=surface.n_calls,
        relative_error=surface.relative_error,
        seed=surface.seed,
        method="CASO",
        note=f"the change that raises the loss most to second order, {penalty}{note}{caution(surface.relative_error)}",
    )


# --- penalty and step -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Penalty:
    l1: float
    l2: float
    radius: float | None

    @staticmethod
    def ensure(l1: Any, l2: Any, radius: Any) -> _Penalty:
        for name, weight in (("l1", l1), ("l2", l2)):
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
                raise ValueError(f"{name}, the weight of a penalty, must be a number ≥ 0, got {weight!r}.")
        if radius is not None:
            check_radius(radius)
        return _Penalty(float(l1), float(l2), radius)

    def __str__(self) -> str:
        within = "" if self.radius is None else f", radius {self.radius:g}"
        return f"l1 {self.l1:g}, l2 {self.l2:g}{within}"


def _steepest(surface: Result, penalty: _Penalty) -> tuple[Tensor, str]:
    """δ, (B, d) float64, and the text that the result's note adds about its accuracy."""
    slope = surface.gradient.flatten(1)
    if penalty.radius is not None and penalty.l1 == 0:
        return minimize_in_ball(-slope, _bowl(surface, penalty.l2), penalty.radius).double(), ""

    lowest, highest = extremes(surface.product, slope)
    needed = float(highest.max()) / 2
    if 2 * penalty.l2 <= float(highest.max()):
        if penalty.radius is None:
            raise ValueError(
                "the second-order increase has no bound: l2 must exceed half the largest eigenvalue of H, "
                f"{needed:.6g} for these examples, got {penalty.l2:g}. Pass a larger l2, or a radius."
            )
        raise ValueError(
            "with l1 > 0 the maximum in a ball is found only where the objective is concave: l2 must exceed half "
            f"the largest eigenvalue of H, {needed:.6g} for these examples, got {penalty.l2:g}. Pass that, or l1=0."
        )
    rounding = torch.finfo(surface.dtype).eps

    def curved(v: Tensor) -> Tensor:
        return surface.product(v[:, None].to(surface.dtype))[:, 0].double()

    quadratic = Quadratic(slope.double(), curved, lowest, highest)
    step, residual = maximize_penalized(quadratic, penalty.l1, penalty.l2, penalty.radius, tol=100 * rounding)
    if bool((residual > 1000 * rounding).any()):
        warnings.warn(
            f"the solver did not converge to rounding precision for {int((residual > 1000 * rounding).sum())} of "
            f"{len(step)} example(s) (relative residual {float(residual.max()):.2g}). Pass a larger l2, which makes "
            "the problem better conditioned.",
            stacklevel=3,
        )
    return step, f", residual {float(residual.max()):.1g}"


def _bowl(surface: Result, l2: float) -> Tensor | Callable[[Tensor], Tensor]:
    """2·l2·I − H, as a matrix for at most `DENSE` features, otherwise as an operator on rows."""
    if surface.shape[1] <= DENSE:
        return 2 * l2 * torch.eye(surface.shape[1], dtype=surface.dtype, device=surface.device) - surface.hessian
    return lambda rows: 2 * l2 * rows - surface.product(rows)


def _between(surface: Result, step: Tensor) -> dict[str, Any]:
    """δ_i H_ij δ_j, as a matrix for at most `DENSE` features, otherwise as an operator."""
    if surface.shape[1] <= DENSE:
        return {"hessian": step[:, :, None] * surface.hessian * step[:, None]}
    return {"operator": _Scaled(surface, step)}


@dataclass(frozen=True, eq=False)
class _Scaled:
    """diag(δ) H diag(δ) as an operator on rows."""

    surface: Result
    step: Tensor  # (B, d)

    def __call__(self, rows: Tensor) -> Tensor:
        return self.step[:, None] * self.surface.product(rows * self.step[:, None])

    def select(self, index: Tensor) -> _Scaled:
        return _Scaled(self.surface[index], self.step[index])
