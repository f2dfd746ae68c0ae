"""Reduce a quadratic whose matrix is a multiple of the identity outside a few directions.

The minimum of gᵀδ + ½δᵀHδ over a ball lies in the span of those directions and of g.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from smoothhess.linalg.orthonormal import orthonormal
from smoothhess.linalg.trust_region.scaling import unit_vector

ROUNDING = 1e-14  # length of a projected unit vector below which it consists of rounding errors
MOST_PASSES = 20


def reduced(product: Callable[[Tensor], Tensor], directions: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal rows Q (B, r + 1, d) whose span holds `directions` (B, r, d) and g (B, d), and QHQᵀ.

    `product` maps rows to H times each row.
    """
    basis = orthonormal(directions)
    basis = torch.cat([basis, orthogonal_part(basis, gradient)[:, None]], 1)
    small = product(basis) @ basis.mT
    return basis, (small + small.mT) / 2


def orthogonal_part(basis: Tensor, vector: Tensor) -> Tensor:
    """The unit vector (B, d) along the component of `vector` orthogonal to orthonormal rows (B, k, d), k < d.

    If that component is zero, the result is an arbitrary unit vector orthogonal to the rows.
    """
    rng = torch.Generator().manual_seed(basis.shape[1])  # another arbitrary vector for every size of the basis
    found = unit_vector(vector)
    for _ in range(MOST_PASSES):
        rest = found - ((found[:, None] @ basis.mT) @ basis)[:, 0]
        length = torch.linalg.vector_norm(rest, dim=-1, keepdim=True)
        found = unit_vector(rest)
        if bool((length >= 0.5).all()):  # the projection removed little, so the rest is orthogonal up to rounding
            break
        if bool((length <= ROUNDING).any()):
            anything = torch.randn(vector.shape[-1], generator=rng, dtype=torch.float64).to(vector)
            found = torch.where(length > ROUNDING, found, unit_vector(anything))
    return found
