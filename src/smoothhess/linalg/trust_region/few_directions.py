"""A quadratic whose matrix is a multiple of the identity outside a few directions.

gᵀδ + ½δᵀHδ over a ball then needs no more than those directions and one more: that of the rest of g.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from smoothhess.linalg.trust_region.scaling import unit_vector

ROUNDING = 1e-14  # share of a unit vector below which what is left of it, outside of a basis, means nothing
MOST_PASSES = 20


def reduced(product: Callable[[Tensor], Tensor], directions: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal rows Q (B, r + 1, d) whose span holds `directions` (B, r, d) and g (B, d), and QHQᵀ.

    `product` is H times rows.
    """
    basis = torch.linalg.qr(directions.mT).Q.mT
    basis = torch.cat([basis, beside(basis, gradient)[:, None]], 1)
    small = product(basis) @ basis.mT
    return basis, (small + small.mT) / 2


def beside(basis: Tensor, vector: Tensor) -> Tensor:
    """The unit vector (B, d) along the part of `vector` outside of orthonormal rows (B, k, d), k < d.

    Where there is no such part it is any unit vector outside.
    """
    rng = torch.Generator().manual_seed(basis.shape[1])  # so that the next one in need gets another vector
    found = unit_vector(vector)
    for _ in range(MOST_PASSES):
        rest = found - ((found[:, None] @ basis.mT) @ basis)[:, 0]
        length = torch.linalg.vector_norm(rest, dim=-1, keepdim=True)
        found = unit_vector(rest)
        if bool((length >= 0.5).all()):  # little was taken off: what is left is orthogonal to rounding
            break
        if bool((length <= ROUNDING).any()):
            anything = torch.randn(vector.shape[-1], generator=rng, dtype=torch.float64).to(vector)
            found = torch.where(length > ROUNDING, found, unit_vector(anything))
    return found
