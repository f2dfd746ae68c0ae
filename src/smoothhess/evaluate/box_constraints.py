"""Box constraints on inputs: projection, linear and quadratic minimisation in the intersection of box and ball.

Both the point nearest to y and the minimiser of −yᵀδ in the intersection are δ = clip(s·y) with one number s per
example (the stationarity conditions separate over features). ‖clip(s·y)‖ increases with s, piecewise between the values
of s at which features reach their bounds, so s is computed from one sort, without iteration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

STEPS = 1000  # of projected gradient, at most; tens are usual
MEMORY = 10  # recent values, whose maximum a step must stay below (nonmonotone line search)
CALM = 5  # consecutive tiny steps that count as convergence; a single one may be due to a steep direction
FARTHEST = 100.0  # longest step before projection, in radii; reached where the curvature is negative


@dataclass(frozen=True, eq=False)
class Box:
    """Bounds of the displacements of each feature, low ≤ 0 and high ≥ 0, (B, d) each."""

    low: Tensor
    high: Tensor
    walls: tuple[Tensor, Tensor]  # (B, *shape) each, bounds of the absolute inputs

    @staticmethod
    def around(inputs: Tensor, bounds: Any) -> Box:
        """From bounds = (low, high) of absolute inputs, numbers or tensors that broadcast against (B, *shape).

        >>> Box.around(torch.tensor([[0.2, 0.9]]), (0, 1)).high
        tensor([[0.8000, 0.1000]])
        """
        if not isinstance(bounds, tuple | list) or len(bounds) != 2:
            raise ValueError(f"bounds must be a pair (low, high) of numbers or tensors, got {_described(bounds)}.")
        walls = []
        for name, bound in zip(("low", "high"), bounds, strict=True):
            try:
                wall = torch.as_tensor(bound, dtype=inputs.dtype, device=inputs.device)
                walls.append(wall.expand(inputs.shape))
            except (TypeError, ValueError, RuntimeError):
                raise ValueError(
                    f"bounds must be a pair (low, high) of numbers, or of tensors that broadcast against the inputs "
                    f"{tuple(inputs.shape)}; {name} is {_described(bound)}."
                ) from None
        low, high = walls
        if not ((low <= inputs) & (inputs <= high)).all():  # also true for NaN in the bounds
            outside = int((~((low <= inputs) & (inputs <= high))).flatten(1).any(1).sum())
            raise ValueError(
                f"{outside} of {len(inputs)} inputs lie outside the bounds, expected low ≤ input ≤ high everywhere. "
                "Pass the bounds in the units of the model's inputs (after normalisation)."
            )
        return Box((low - inputs).flatten(1), (high - inputs).flatten(1), (low, high))

    def contain(self, points: Tensor) -> Tensor:
        """Clip absolute points (B, *shape) to the bounds, since x + (high − x) may round to more than high."""
        low, high = self.walls
        return torch.minimum(torch.maximum(points, low), high)

    def clip(self, rows: Tensor) -> Tensor:
        """Clip displacements (B, n, d) to the box."""
        return torch.minimum(torch.maximum(rows, self.low[:, None]), self.high[:, None])

    def project(self, rows: Tensor, radius: Tensor) -> Tensor:
        """Project displacements (B, n, d) to the intersection of box and ball; radius (B,)."""
        return self._scaled(rows, self._largest(rows, radius).clamp_max(1))

    def steepest(self, gradient: Tensor, radius: Tensor) -> Tensor:
        """The displacement (B, d) in box and ball that minimises gᵀδ; radius (B,)."""
        downhill = -gradient[:, None]
        return self._scaled(downhill, self._largest(downhill, radius))[:, 0]

    def _scaled(self, rows: Tensor, scale: Tensor) -> Tensor:
        """clip(s·y), also for s = ∞; features with y = 0 do not move."""
        return self.clip(torch.where(rows == 0, 0, rows * scale[..., None]))

    def _largest(self, rows: Tensor, radius: Tensor) -> Tensor:
        """The largest s (B, n) with ‖clip(s·y)‖ ≤ radius; ∞ where the corner of the box lies inside the ball."""
        size = rows.double().abs()
        reach = torch.where(rows > 0, self.high[:, None], -self.low[:, None]).double()
        wall = torch.where(size > 0, reach / size, torch.inf)  # the s at which a feature reaches its bound
        wall, order = wall.sort(-1)
        size2 = size.gather(-1, order).square()
        reach2 = torch.where(size > 0, reach, 0).gather(-1, order).square()
        stopped = reach2.cumsum(-1)
        before = torch.cat([torch.zeros_like(stopped[..., :1]), stopped[..., :-1]], -1)
        free = size2.flip(-1).cumsum(-1).flip(-1)  # over features that still move
        norm2 = before + torch.where(free > 0, wall.square() * free, 0)  # at each of these s
        over = norm2 > radius.double().square()[:, None, None]
        first = over.to(torch.uint8).argmax(-1, keepdim=True)
        remaining = radius.double().square()[:, None, None] - before.gather(-1, first)
        scale = (remaining.clamp_min(0) / free.gather(-1, first).clamp_min(torch.finfo(torch.float64).tiny)).sqrt()
        return torch.where(over.any(-1), scale[..., 0], torch.inf).to(rows.dtype)

    def descend(self, starts: Tensor, gradient: Tensor, product: Callable[[Tensor], Tensor], radius: Tensor) -> Tensor:
        """A local minimiser (B, d) of gᵀδ + ½δᵀHδ in box and ball, the best one from (B, n, d) starting points.

        Spectral projected gradient (Birgin, Martínez and Raydan): step sizes are inverse curvatures along the previous
        step, and the search is nonmonotone. The problem is not convex: the result is stationary and not worse than any
        starting point, but it need not be the global minimum.
        """
        delta = self.project(starts, radius)
        g, r = gradient[:, None], radius[:, None]
        bent = product(delta)
        value = ((g + bent / 2) * delta).sum(-1)  # (B, n)
        best, lowest = delta, value
        recent = value[..., None].expand(*value.shape, MEMORY)
        tiny, small = torch.finfo(delta.dtype).tiny, torch.finfo(delta.dtype).eps ** (2 / 3)
        stride = _reaching(r, g + bent)
        calm = torch.zeros_like(value)
        for _ in range(STEPS):
            slope = g + bent
            move = self.project(delta - stride[..., None] * slope, radius) - delta
            length2 = move.square().sum(-1)
            calm = torch.where(length2.sqrt() <= small * r, calm + 1, 0)
            if (calm >= CALM).all():
                break
            bend = product(move)
            down, curve = (slope * move).sum(-1), (bend * move).sum(-1)
            good = down + curve / 2 <= recent.amax(-1) - value + 1e-4 * down
            part = torch.where(good, 1.0, (-down / curve.clamp_min(tiny)).clamp(0, 1))  # exact line search
            delta, bent = delta + part[..., None] * move, bent + part[..., None] * bend
            value = value + part * down + part.square() * curve / 2
            better = value < lowest
            best, lowest = torch.where(better[..., None], delta, best), torch.where(better, value, lowest)
            recent = torch.cat([recent[..., 1:], value[..., None]], -1)
            far = _reaching(FARTHEST * r, slope)
            stride = torch.where(curve * far > length2, length2 / curve.clamp_min(tiny), far)
        value = ((g + product(best) / 2) * best).sum(-1)
        return best[torch.arange(len(best), device=best.device), value.argmin(1)]


def _reaching(radius: Tensor, slope: Tensor) -> Tensor:
    """The step size (B, n) that makes a step along slopes (B, n, d) `radius` (B, 1) long; 0 where the slope is 0."""
    length, info = slope.norm(dim=-1), torch.finfo(slope.dtype)
    return torch.where(length > 0, radius / length.clamp_min(info.tiny), 0).clamp_max(info.max**0.5)


def _described(bound: Any) -> str:
    return f"a tensor {tuple(bound.shape)}" if isinstance(bound, Tensor) else f"{type(bound).__name__}"
