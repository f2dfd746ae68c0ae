"""Attacks: the inputs inside a ball at which a surrogate of the model is lowest.

Box constraints belong in `box_constraints.py`, the comparison of attacks on a classifier in `attack_comparison.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from smoothhess.evaluate.box_constraints import Box
from smoothhess.linalg.trust_region.check_radius import check_radius
from smoothhess.linalg.trust_region.spectrum import Spectrum
from smoothhess.result.hessian_forms import spectrum_of
from smoothhess.result.result import Result
from smoothhess.result.taylor import Taylor
from smoothhess.result.taylor import surrogate as surrogate_of


def attack(
    surrogate: Result | Taylor,
    radius: float | Tensor,
    *,
    order: int = 2,
    bounds: Any = None,
    maximize: bool = False,
) -> Tensor:
    """The inputs (B, *shape) inside the ball of `radius` at which the surrogate of the explained output is lowest.

    Order 1 is the step −r G/‖G‖ (zero where G = 0); order 2 is the exact global minimum of Gᵀδ + ½δᵀHδ. The attacked
    output is the one that the result explains: a probability, a logit, or a `margin`.

    Args:
        surrogate: a result, or a Taylor of one.
        radius: radius of the ball, a number or one per example (B,).
        order: 1 or 2; order 1 ignores the Hessian. A `Taylor` of order 1 has none.
        bounds: (low, high), numbers or tensors that broadcast against the inputs; perturbed inputs stay inside. To
            first order the step is optimal in ball and box; to second order it is stationary in their intersection and
            not worse than the clipped step, nor than the first-order step.
        maximize: whether to raise the explained output instead of lowering it.

    Returns:
        The perturbed inputs, (B, *shape).

    Raises:
        TypeError: if the surrogate is neither a result nor a Taylor.
        ValueError: if order, radius or bounds are invalid, or if the surrogate's gradient is not finite.

    >>> f = lambda x: x.square().sum(1) - 2 * x[:, 0]
    >>> from smoothhess import SmoothHess
    >>> result = SmoothHess(f).attribute(torch.zeros(1, 3).double(), sigma=0.1, n_calls=60)
    >>> attack(result, 0.5).round(decimals=6).abs()
    tensor([[0.5000, 0.0000, 0.0000]], dtype=torch.float64)
    >>> attack(result, 2.0).round(decimals=6).abs()  # the minimum lies inside
    tensor([[1., 0., 0.]], dtype=torch.float64)
    """
    return AttackPath.of(surrogate, order=order, bounds=bounds, maximize=maximize)(radius)


@dataclass(frozen=True, eq=False, repr=False)
class AttackPath:
    """The attack as a function of the radius; all radii share one eigendecomposition. Created by `AttackPath.of`.

    >>> f = lambda x: x[:, 0] * x[:, 1]
    >>> from smoothhess import SmoothHess
    >>> path = AttackPath.of(SmoothHess(f).attribute(torch.ones(1, 2).double(), sigma=0.1, n_calls=40))
    >>> [path(r).sum().round(decimals=3).item() for r in (0.1, 1.0)]
    [1.859, 1.0]
    """

    taylor: Taylor
    box: Box | None
    sign: int  # 1 lowers the surrogate, −1 raises it
    prepared: Spectrum | None = None  # the result of `widened`; None: computed when it is needed

    @staticmethod
    def of(surrogate: Result | Taylor, *, order: int = 2, bounds: Any = None, maximize: bool = False) -> AttackPath:
        """Prepare the attack of a surrogate; see `attack` for the arguments."""
        if order not in (1, 2):
            raise ValueError(f"order must be 1 or 2, got {order!r}.")
        if isinstance(surrogate, Result):
            taylor = surrogate_of(surrogate, order)
        elif isinstance(surrogate, Taylor):
            taylor = surrogate if order == 2 else Taylor(surrogate.inputs, surrogate.value, surrogate.gradient, None)
        else:
            raise TypeError(
                f"surrogate must be a result (Interactions) or a Taylor of one, got {type(surrogate).__name__}. "
                "For another gradient use smoothhess.baselines, or Taylor(inputs, value, gradient, None)."
            )
        if not torch.isfinite(taylor.gradient).all():
            raise ValueError("the surrogate's gradient holds NaN or infinity. Check result.gradient.")
        box = None if bounds is None else Box.around(taylor.inputs, bounds)
        return AttackPath(taylor, box, -1 if maximize else 1)

    def __call__(self, radius: float | Tensor) -> Tensor:
        """Perturbed inputs (B, *shape); `radius` may be one per example (B,)."""
        points = self.taylor.inputs + self.step(radius).reshape(self.taylor.inputs.shape)
        return points if self.box is None else self.box.contain(points)

    def step(self, radius: float | Tensor) -> Tensor:
        """The displacements δ, (B, d); `radius` may be one per example (B,)."""
        radii = self._radii(radius)
        if self.box is None:
            return self._in_ball(radii)
        first = self.box.steepest(self._gradient, radii)
        if self.taylor.product is None:
            return first
        starts = torch.stack([self._in_ball(radii), first], 1)
        return self.box.descend(starts, self._gradient, self._product, radii)

    def widened(self, radii: Sequence[float]) -> AttackPath:
        """The same path, prepared for these radii; of use where H is too large for an eigendecomposition."""
        if self.taylor.product is None:
            return self
        return replace(self, prepared=self._spectrum.widened(list(radii)))

    def change(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """Change of the surrogate at displacements (B, d): the gradient's part Gᵀδ and the Hessian's ½δᵀHδ, (B,)."""
        linear = (self.taylor.gradient * step).sum(1)
        if self.taylor.product is None:
            return linear, torch.zeros_like(linear)
        return linear, (self.taylor.product(step[:, None])[:, 0] * step).sum(1) / 2

    def _radii(self, radius: float | Tensor) -> Tensor:
        """One radius per example, (B,)."""
        inputs = self.taylor.inputs
        if not isinstance(radius, Tensor) or radius.ndim == 0:
            check_radius(radius)
            return torch.full((len(inputs),), float(radius), dtype=inputs.dtype, device=inputs.device)
        if radius.shape != (len(inputs),):
            raise ValueError(
                f"radius must be a number or one per example, ({len(inputs)},), got {tuple(radius.shape)}."
            )
        if not (torch.isfinite(radius) & (radius > 0)).all():
            raise ValueError("radius must be positive and finite for every example.")
        return radius.to(inputs)

    # --- minimisation; with sign −1, of the negated surrogate -----------------------------------------------------

    @property
    def _gradient(self) -> Tensor:
        return self.sign * self.taylor.gradient

    def _product(self, rows: Tensor) -> Tensor:
        assert self.taylor.product is not None
        return self.sign * self.taylor.product(rows)

    def _in_ball(self, radii: Tensor) -> Tensor:
        if self.taylor.product is None:
            length = self._gradient.norm(dim=1, keepdim=True)
            return torch.where(length > 0, -radii[:, None] * self._gradient / length, 0)
        return self._spectrum.minimize(radii)

    @cached_property
    def _spectrum(self) -> Spectrum:
        if self.prepared is not None:
            return self.prepared
        product = self.taylor.product
        assert product is not None
        owner = getattr(product, "__self__", None)  # the result behind a Taylor, whose Hessian may be low-rank
        found = spectrum_of(self.taylor.gradient, owner if isinstance(owner, Result) else product)
        return found if self.sign > 0 else -found


# --- the margin between two classes -----------------------------------------------------------------------------------


def margin(forward_func: Callable[..., Any]) -> Callable[..., Tensor]:
    """The score margin between two classes as a forward function: gap(x, own, other, *args) = s_own − s_other, (N,).

    Explain and attack the margin to move inputs from one class to a chosen other class: the other class has the higher
    score where the margin is negative.

    Args:
        forward_func: the classifier, which returns scores (N, C).

    Returns:
        The function `gap`. Its arguments own and other are ints, or tensors with one class per example, and are passed
        as additional_forward_args.

    >>> from smoothhess import SmoothHess
    >>> net = torch.nn.Linear(3, 4).double()
    >>> x = torch.randn(5, 3).double()
    >>> own, other = net(x).topk(2).indices.unbind(1)  # the predicted class and the runner-up
    >>> result = SmoothHess(margin(net)).attribute(x, None, (own, other), radius=0.5, n_calls=60)
    >>> bool((net(attack(result, 50.0)).argmax(1) != own).all())
    True
    """

    def gap(points: Tensor, own: int | Tensor, other: int | Tensor, *args: Any) -> Tensor:
        scores = forward_func(points, *args)
        if not isinstance(scores, Tensor) or scores.ndim != 2:
            got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(f"margin needs a model that returns scores (N, C), got {got}.")
        return _column(scores, own, "own") - _column(scores, other, "other")

    return gap


def _column(scores: Tensor, index: Any, name: str) -> Tensor:
    """The score of one class for each row."""
    if isinstance(index, Tensor):
        integral = not index.is_floating_point() and index.dtype != torch.bool
        good = integral and index.shape in ((), (1,), scores.shape[:1])
    else:
        good = isinstance(index, int) and not isinstance(index, bool)
    if not good:
        got = f"a tensor {tuple(index.shape)} {index.dtype}" if isinstance(index, Tensor) else type(index).__name__
        raise ValueError(
            f"{name} must be a class index or a tensor with one for each example, got {got}. Pass "
            "additional_forward_args=(own, other)."
        )
    rows = torch.as_tensor(index, device=scores.device).reshape(-1).expand(len(scores))
    if ((rows < 0) | (rows >= scores.shape[1])).any():
        raise ValueError(f"{name} holds classes outside 0 … {scores.shape[1] - 1}.")
    return scores.gather(1, rows[:, None])[:, 0]
