"""A box around each input, and what can be done exactly in its intersection with a ball.

Both the nearest point to y and the lowest point of −yᵀδ in the intersection are δ = clip(s·y) with one number s per
example (the stationarity conditions separate over features), and ‖clip(s·y)‖ grows with s, in pieces between the values
at which features reach their walls. So s comes from one sort, without iteration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

STEPS = 1000  # of projected gradient, at most; tens are usual
MEMORY = 10  # values, the highest of which a step must stay below
CALM = 5  # tiny steps in a row after which nothing moves any more; one alone may be that of a steep direction
FARTHEST = 100.0  # radii that a step may aim beyond the ball, where the quadratic bends down


@dataclass(frozen=True, eq=False)
class Box:
    """How far each feature may move down (low ≤ 0) and up (high ≥ 0), each (B, d)."""

    low: Tensor
    high: Tensor
    walls: tuple[Tensor, Tensor]  # (B, *shape), where absolute inputs end

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
        if not ((low <= inputs) & (inputs <= high)).all():  # NaN in the bounds, too
            outside = int((~((low <= inputs) & (inputs <= high))).flatten(1).any(1).sum())
            raise ValueError(
                f"{outside} of {len(inputs)} inputs lie outside the bounds, wanted low ≤ input ≤ high everywhere. Pass "
                "the bounds in the units that the model sees (after normalisation)."
            )
        return Box((low - inputs).flatten(1), (high - inputs).flatten(1), (low, high))

    def contain(self, points: Tensor) -> Tensor:
        """Absolute points (B, *shape) to the last bit inside: x + (high − x) may round to more than high."""
        low, high = self.walls
        return torch.minimum(torch.maximum(points, low), high)

    def clip(self, rows: Tensor) -> Tensor:
        """Each displacement (B, n, d) moved into the box, feature by feature."""
        return torch.minimum(torch.maximum(rows, self.low[:, None]), self.high[:, None])

    def project(self, rows: Tensor, radius: Tensor) -> Tensor:
        """The points of box and ball nearest to displacements (B, n, d); radius (B,)."""
        return self._scaled(rows, self._largest(rows, radius).clamp_max(1))

    def steepest(self, gradient: Tensor, radius: Tensor) -> Tensor:
        """The displacement (B, d) in box and ball at which gᵀδ is lowest; radius (B,)."""
        downhill = -gradient[:, None]
        return self._scaled(downhill, self._largest(downhill, radius))[:, 0]

    def _scaled(self, rows: Tensor, scale: Tensor) -> Tensor:
        """clip(s·y), also for s = ∞, where features that do not pull stay."""
        return self.clip(torch.where(rows == 0, 0, rows * scale[..., None]))

    def _largest(self, rows: Tensor, radius: Tensor) -> Tensor:
        """The largest s (B, n) with ‖clip(s·y)‖ ≤ radius; ∞ where the whole corner lies inside the ball."""
        size = rows.double().abs()
        reach = torch.where(rows > 0, self.high[:, None], -self.low[:, None]).double()
        wall = torch.where(size > 0, reach / size, torch.inf)  # the s at which a feature stops
        wall, order = wall.sort(-1)
        size2 = size.gather(-1, order).square()
        reach2 = torch.where(size > 0, reach, 0).gather(-1, order).square()
        stopped = reach2.cumsum(-1)
        before = torch.cat([torch.zeros_like(stopped[..., :1]), stopped[..., :-1]], -1)
        free = size2.flip(-1).cumsum(-1).flip(-1)  # of those that still move
        norm2 = before + torch.where(free > 0, wall.square() * free, 0)  # at each wall
        over = norm2 > radius.double().square()[:, None, None]
        first = over.to(torch.uint8).argmax(-1, keepdim=True)
        left = radius.double().square()[:, None, None] - before.gather(-1, first)
        scale = (left.clamp_min(0) / free.gather(-1, first).clamp_min(torch.finfo(torch.float64).tiny)).sqrt()
        return torch.where(over.any(-1), scale[..., 0], torch.inf).to(rows.dtype)

    def descend(self, starts: Tensor, gradient: Tensor, product: Callable[[Tensor], Tensor], radius: Tensor) -> Tensor:
        """The lowest of gᵀδ + ½δᵀHδ (B, d) that is found in box and ball from each of (B, n, d) starts.

        Spectral projected gradient (Birgin, Martínez and Raydan): steps of the inverse curvature along the last one,
        which may go uphill for a while. The problem is not convex: what is found is stationary and not worse than any
        start, but not known to be the lowest of all.
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
            part = torch.where(good, 1.0, (-down / curve.clamp_min(tiny)).clamp(0, 1))  # the lowest point on the way
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
    """The stride (B, n) along slopes (B, n, d) that is `radius` (B, 1) long; 0 where there is no slope."""
    length, info = slope.norm(dim=-1), torch.finfo(slope.dtype)
    return torch.where(length > 0, radius / length.clamp_min(info.tiny), 0).clamp_max(info.max**0.5)


def _described(bound: Any) -> str:
    return f"a tensor {tuple(bound.shape)}" if isinstance(bound, Tensor) else f"{type(bound).__name__}"
