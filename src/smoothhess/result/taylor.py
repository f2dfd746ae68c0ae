"""The surrogate: f near x₀ from its value, gradient and Hessian."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Taylor:
    """f̃(x) = f(x₀) + Gᵀ(x − x₀) + ½ (x − x₀)ᵀH(x − x₀), for each of B examples.

    Note f(x₀), the model's own output, not the smoothed value. `product` maps displacements (B, n, d) to H times them;
    None leaves the quadratic term out (order 1). Directions in which the Gaussian does not move (frozen features) have
    gradient and Hessian 0, so the surrogate says nothing about them.
    """

    inputs: Tensor  # (B, *shape)
    value: Tensor  # (B,)
    gradient: Tensor  # (B, d)
    product: Callable[[Tensor], Tensor] | None

    def __call__(self, points: Tensor) -> Tensor:
        """Values (B, n) at absolute points (B, n, *shape)."""
        shape = self.inputs.shape
        if points.ndim != self.inputs.ndim + 1 or points.shape[0] != shape[0] or points.shape[2:] != shape[1:]:
            wanted = ", ".join(map(str, (shape[0], "n", *shape[1:])))
            raise ValueError(
                f"points must be absolute and have shape ({wanted}), got {tuple(points.shape)}. "
                "For one point per example use points[:, None]."
            )
        return self.displaced((points.to(self.inputs) - self.inputs[:, None]).flatten(2))

    def displaced(self, delta: Tensor) -> Tensor:
        """Values (B, n) at x₀ + δ for displacements (B, n, d)."""
        linear = torch.einsum("bnd,bd->bn", delta, self.gradient)
        value = self.value[:, None] + linear
        if self.product is not None:
            value = value + (delta * self.product(delta)).sum(-1) / 2
        return value
