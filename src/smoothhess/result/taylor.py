"""Taylor: the quadratic surrogate of f near x₀, from its value, gradient and Hessian.

The class evaluates the surrogate at points. Its minimum on a ball is in `minimize_in_ball`, the comparison of
surrogates with the model in `smoothhess.evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Taylor:
    """f̃(x) = f(x₀) + Gᵀ(x − x₀) + ½ (x − x₀)ᵀH(x − x₀), for each of B examples.

    `Interactions.taylor` returns it. The constant is f(x₀), the output of the model, not the smoothed value. `product`
    maps displacements (B, n, d) to H times each; if it is None there is no quadratic term (order 1). In directions
    in which the Gaussian has no variance (frozen features), gradient and Hessian are 0 and the surrogate is constant.

    >>> surrogate = Taylor(torch.zeros(1, 2), torch.ones(1), torch.tensor([[2.0, 0.0]]), product=lambda rows: rows)
    >>> surrogate(torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]))
    tensor([[3.5000, 3.0000]])
    """

    inputs: Tensor  # (B, *shape)
    value: Tensor  # (B,)
    gradient: Tensor  # (B, d)
    product: Callable[[Tensor], Tensor] | None

    def __call__(self, points: Tensor) -> Tensor:
        """Values of the surrogate at points.

        Args:
            points: absolute points (not displacements), (B, n, *shape).

        Returns:
            (B, n).

        Raises:
            ValueError: if `points` has another shape.
        """
        shape = self.inputs.shape
        if points.ndim != self.inputs.ndim + 1 or points.shape[0] != shape[0] or points.shape[2:] != shape[1:]:
            expected = ", ".join(map(str, (shape[0], "n", *shape[1:])))
            raise ValueError(
                f"points must be absolute and have shape ({expected}), got {tuple(points.shape)}. "
                "For one point per example use points[:, None]."
            )
        delta = (points.to(self.inputs) - self.inputs[:, None]).flatten(2)
        return self.displaced(delta).to(points.device)

    def displaced(self, delta: Tensor) -> Tensor:
        """Values of the surrogate at x₀ + δ.

        Args:
            delta: flat displacements δ, (B, n, d), on any device: large results are moved from a GPU to the host.

        Returns:
            (B, n), on the device of `delta`.
        """
        asked, delta = delta.device, delta.to(self.gradient.device)
        linear = torch.einsum("bnd,bd->bn", delta, self.gradient)
        value = self.value[:, None] + linear
        if self.product is not None:
            value = value + (delta * self.product(delta)).sum(-1) / 2
        return value.to(asked)


def surrogate(result: Any, order: int = 2) -> Taylor:
    """The Taylor surrogate of a result; see `Interactions.taylor`. Raises ValueError if it holds no derivatives."""
    if not hasattr(result, "taylor"):
        raise ValueError(
            f"{result.method or 'this'} is an attribution, not a Hessian: it has no Taylor surrogate and no attack. "
            "Use SmoothHess, or a derivative among smoothhess.baselines (gradient, hessian, softplus, swish)."
        )
    if result.grouping is not None:
        raise ValueError(
            "group sums have no Taylor surrogate, since single features are not kept. Use the result before groups()."
        )
    if order not in (1, 2):
        raise ValueError(f"order must be 1 or 2, got {order}.")
    product = result.product if order == 2 else None
    return Taylor(result.inputs, result.output, result.gradient.flatten(1), product)
