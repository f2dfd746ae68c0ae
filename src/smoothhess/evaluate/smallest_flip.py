"""The smallest joint change of the features that flips a prediction, and the share of interactions in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smoothhess.evaluate.attack import AttackPath
from smoothhess.evaluate.attack_comparison import Judge
from smoothhess.evaluate.check_integer import check_integer
from smoothhess.linalg.trust_region.check_radius import check_radius
from smoothhess.model.state import borrowed
from smoothhess.result.result import Result
from smoothhess.result.taylor import Taylor


@dataclass(frozen=True, eq=False, repr=False)
class Flip:
    """The first point on the path of an attack with another predicted class, for each of B examples.

    Returned by `smallest_flip`. Examples that keep their class up to `max_radius` have radius ∞ and NaN elsewhere.
    """

    max_radius: float
    radius: Tensor  # (B,) radius of the ball in which the attack flips the prediction
    change: Tensor  # (B, *shape) the joint change of the features, x′ − x
    before: Tensor  # (B,) predicted class of the input
    after: Tensor  # (B,) predicted class at x + change; equal to `before` if the prediction does not flip
    gradient_part: Tensor  # (B,) Gᵀδ, the first-order part of the surrogate's change of the explained output
    interaction_part: Tensor  # (B,) ½δᵀHδ, the second-order part

    def __len__(self) -> int:
        return len(self.radius)

    @property
    def flipped(self) -> Tensor:
        """Whether the prediction changed within `max_radius`, (B,)."""
        return self.radius.isfinite()

    @property
    def size(self) -> Tensor:
        """‖change‖, (B,); below `radius` if the surrogate has its minimum inside the ball, or if bounds are active."""
        return self.change.flatten(1).norm(dim=1)

    @property
    def predicted_change(self) -> Tensor:
        """Change of the explained output that the surrogate predicts, Gᵀδ + ½δᵀHδ, (B,)."""
        return self.gradient_part + self.interaction_part

    @property
    def interaction_share(self) -> Tensor:
        """½δᵀHδ divided by the predicted change, (B,); negative if it has the opposite sign."""
        return self.interaction_part / self.predicted_change + 0.0  # turns −0 into 0

    def __repr__(self) -> str:
        lines = [
            f"Smallest flips of {len(self)} example(s), {int(self.flipped.sum())} of them within radius "
            f"{self.max_radius:g}",
            "  example  class → class  radius    gradient's part  interaction's part  share",
        ]
        for i in range(min(len(self), 8)):
            if not self.flipped[i]:
                lines.append(f"  {i:7d}  {int(self.before[i]):5d} → –      none")
                continue
            lines.append(
                f"  {i:7d}  {int(self.before[i]):5d} → {int(self.after[i]):<5d}  {float(self.radius[i]):<8.4g}  "
                f"{float(self.gradient_part[i]):<15.4g}  {float(self.interaction_part[i]):<18.4g}  "
                f"{float(self.interaction_share[i]):.1%}"
            )
        return "\n".join(lines + ([f"  … and {len(self) - 8} more"] if len(self) > 8 else []))


def smallest_flip(
    forward_func: Callable[..., Any],
    surrogate: Result | Taylor | AttackPath,
    max_radius: float,
    additional_forward_args: Any = None,
    *,
    bounds: Any = None,
    decide: Callable[[Any], Tensor] | None = None,
    n_radii: int = 64,
    tol: float = 1e-5,
    internal_batch_size: int | None = None,
) -> Flip:
    """The smallest radius at which the attack flips each prediction, the joint change there, and its two parts.

    The path of attacks is scanned at `n_radii` equal steps up to `max_radius`, then the first step with a flip is
    bisected to the relative tolerance `tol`; all radii share one eigendecomposition. A flip that is reversed within one
    step of the scan is not detected.

    Args:
        forward_func: the classifier, which returns scores (N, C); it is left unchanged.
        surrogate: a result or a Taylor around the inputs (with order 1: the first-order path), or an AttackPath.
        max_radius: largest radius of the search.
        additional_forward_args, internal_batch_size: see `SmoothHess.attribute`.
        bounds: (low, high) of the inputs; see `attack`.
        decide: maps the model's output to classes (N,); None takes the argmax of scores (N, C).
        n_radii: number of steps of the scan.
        tol: relative tolerance of the radius.

    Returns:
        A Flip with the radius, the change and its two parts for each example.

    Raises:
        TypeError: if the surrogate is none of the types above.
        ValueError: if max_radius, n_radii or tol is out of range, or if bounds are given with an AttackPath.

    >>> from smoothhess import SmoothHess
    >>> model = lambda x: torch.stack([1 + x[:, 0] * x[:, 1], torch.zeros(len(x)).to(x)], 1)
    >>> result = SmoothHess(model).attribute(torch.zeros(1, 2).double(), target=0, sigma=0.1, n_calls=40)
    >>> flip = smallest_flip(model, result, 3.0)  # a change of one feature has no effect; x₁ = 1, x₂ = −1 flips
    >>> flip.radius.round(decimals=3), flip.interaction_share.round(decimals=3)
    (tensor([1.4140], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    check_radius(max_radius)
    check_integer(n_radii, "n_radii", 1)
    if not 0 < tol < 1:
        raise ValueError(f"tol must lie between 0 and 1, the relative tolerance of the radius, got {tol!r}.")
    if isinstance(surrogate, AttackPath):
        if bounds is not None:
            raise ValueError("an AttackPath already has bounds. Pass bounds to AttackPath.of instead.")
        path = surrogate
    else:
        path = AttackPath.of(surrogate, bounds=bounds)
    path = path.widened([max_radius * k / 8 for k in range(1, 9)])
    inputs = path.taylor.inputs
    judge = Judge(forward_func, inputs, additional_forward_args, decide, internal_batch_size)
    with borrowed(forward_func, inputs.device), torch.no_grad():
        before = judge(inputs)
        low, high = _scan(path, judge, before, float(max_radius), int(n_radii))
        high = _halve(path, judge, before, low, high, tol)
        found = high.isfinite()
        points = path(torch.where(found, high, float(max_radius)))
        after, change = judge(points), points - inputs
        parts = path.change(change.flatten(1))
    nothing = torch.where(found, 0.0, torch.nan).to(inputs)
    return Flip(
        float(max_radius),
        high,
        change + nothing.reshape(-1, *[1] * (inputs.ndim - 1)),
        before,
        torch.where(found, after, before),
        parts[0] + nothing,
        parts[1] + nothing,
    )


def _scan(path: AttackPath, judge: Judge, before: Tensor, most: float, n_radii: int) -> tuple[Tensor, Tensor]:
    """The last radius before the first flip (0 if there is none), and the radius of the flip (∞ if none), (B,) each."""
    inputs = path.taylor.inputs
    low = torch.zeros(len(inputs), dtype=inputs.dtype, device=inputs.device)
    high = torch.full_like(low, torch.inf)
    for k in range(1, n_radii + 1):
        radius = most * k / n_radii
        open_ = high.isinf()
        if not open_.any():
            break
        flips = judge(path(radius)) != before
        high = torch.where(open_ & flips, radius, high)
        low = torch.where(open_ & ~flips, radius, low)
    return low, high


def _halve(path: AttackPath, judge: Judge, before: Tensor, low: Tensor, high: Tensor, tol: float) -> Tensor:
    """Bisect the interval (low, high] of each example, which holds a flip; the prediction always flips at `high`."""
    while True:
        middle = (low + high) / 2
        wide = high.isfinite() & (high - low > tol * high) & (low < middle) & (middle < high)
        if not wide.any():
            return high
        radius = torch.where(wide, middle, torch.where(high.isfinite(), high, low))
        flips = judge(path(radius)) != before
        high = torch.where(wide & flips, middle, high)
        low = torch.where(wide & ~flips, middle, low)
