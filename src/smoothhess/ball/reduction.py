"""Of a large Hessian, the few directions that matter: outside of them it is a multiple of the identity.

Estimates from m rows are low rank: sums of the rows' outer products, or, denoised, cΣ⁻¹ + VMVᵀ. Where Σ⁻¹ is a multiple
of the identity outside a few directions, so is the Hessian, and a quadratic gᵀδ + ½δᵀHδ over a ball needs no more than
those directions and one more: that of the rest of g.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from smoothhess.ball.scaling import unit
from smoothhess.exact import Exact
from smoothhess.gaussian import Eigenbasis, Isotropic, SegmentShift
from smoothhess.interactions import Interactions
from smoothhess.shrink import _FactoredBasis

ROUNDING = 1e-14  # share of a unit vector below which what is left of it, outside of a basis, means nothing
MOST_PASSES = 20


def span(result: Interactions) -> Tensor | None:
    """Directions (B, r, d) outside of whose span the reported H is a multiple of the identity; None if r would be ~d.

    They are neither normalised nor independent.
    """
    if isinstance(result, Exact) or result.grouping is not None or "hessian" in result.__dict__:
        return None
    gaussian, batch = result.gaussian, len(result)
    axes = None
    if isinstance(gaussian, SegmentShift):  # nothing else moves
        rank = gaussian.rank(result.shape[1])
        return gaussian.push(torch.eye(rank, dtype=result.dtype, device=result.device)).double().expand(batch, -1, -1)
    if isinstance(gaussian, Eigenbasis):
        axes = gaussian.basis.double().to(result.device).expand(batch, -1, -1)
        if not gaussian.rest:  # nothing moves outside of them
            return axes
    rows = _denoised_rows(result) if result.shrink else _sampled_rows(result)
    has_constant = result.shrink or result._unbiased.needs_correction  # a multiple of Σ⁻¹ outside of the rows
    if rows is None or (has_constant and not isinstance(gaussian, Eigenbasis | Isotropic)):
        return None
    return rows.double() if axes is None else torch.cat([rows.double(), axes], 1)


def _sampled_rows(result: Interactions) -> Tensor | None:
    """H is a sum of symmetrised outer products of scores and gradients, and of what is known, (B, r, d)."""
    unbiased = result._unbiased
    return torch.cat(unbiased.factors(), 1) if unbiased.is_factored else None


def _denoised_rows(result: Interactions) -> Tensor | None:
    """What is added to a multiple of Σ⁻¹ lies in the span of these, (B, r, d)."""
    denoised = result._denoised
    if denoised is None:
        return None
    low_rank = []
    for index, part in denoised.parts:
        factor = None if part.known is None else part.known.factor
        if not isinstance(part.basis, _FactoredBasis) or (part.known is not None and factor is None):
            return None
        rows = part.basis.rows
        low_rank.append((index, rows if factor is None else torch.cat([rows, factor.to(rows)], 1)))
    rows = result.inputs.new_zeros(len(result), max(r.shape[1] for _, r in low_rank), result.shape[1])
    for index, white in low_rank:
        rows[index, : white.shape[1]] = result.gaussian.push(white)
    return rows


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
    found = unit(vector)
    for _ in range(MOST_PASSES):
        rest = found - ((found[:, None] @ basis.mT) @ basis)[:, 0]
        length = torch.linalg.vector_norm(rest, dim=-1, keepdim=True)
        found = unit(rest)
        if bool((length >= 0.5).all()):  # little was taken off: what is left is orthogonal to rounding
            break
        if bool((length <= ROUNDING).any()):
            anything = torch.randn(vector.shape[-1], generator=rng, dtype=torch.float64).to(vector)
            found = torch.where(length > ROUNDING, found, unit(anything))
    return found
