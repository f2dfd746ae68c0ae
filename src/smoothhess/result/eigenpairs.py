"""Eigenpairs: the leading interaction directions of a result, from a matrix, its low-rank rows, or products only.

Figures of the directions are in `smoothhess.view`, the block Krylov method in `smoothhess.linalg.krylov`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from smoothhess.estimate.hessian_estimate import HessianEstimate, refuse_dense
from smoothhess.estimate.statistics import symmetric
from smoothhess.linalg.eigenvalue_order import by_magnitude
from smoothhess.linalg.krylov import leading_eigenpairs
from smoothhess.linalg.memory import ROW_SPAN, ROW_SPAN_FOR_FEW
from smoothhess.linalg.orthonormal import orthonormal

DENSE_EIGH = 2048  # features up to which a matrix is made if the rows do not span H
# A basis of the rows is made within ROW_SPAN, or ROW_SPAN_FOR_FEW for a few eigenpairs of a denoised H, whose spectrum
# decays; otherwise only products are used, to this residual, which is far below the noise of such an estimate.
TOLERANCE = 1e-4


class Eigenpairs(NamedTuple):
    """Leading interaction directions, largest |eigenvalue| first."""

    values: Tensor  # (B, k)
    vectors: Tensor  # (B, k, *feature shape)

    def shaped(self, feature_shape: tuple[int, ...]) -> Eigenpairs:
        """The same with vectors (B, k, d) in the shape of the features."""
        return Eigenpairs(self.values, self.vectors.reshape(*self.values.shape, *feature_shape))


def check_count(k: int | None, d: int) -> int:
    """Number of eigenpairs from the argument k of `eigh`; 8 if None, or d if that is less."""
    k = min(8, d) if k is None else k
    if not 1 <= k <= d:
        raise ValueError(f"k must be between 1 and {d} eigenpairs, got {k}.")
    return k


def of_estimate(estimate: HessianEstimate, k: int) -> Eigenpairs:
    """The k eigenpairs with the largest |λ| of a sampled Hessian, vectors (B, k, d)."""
    d, unbiased = estimate.features.k, estimate.unbiased
    rows = unbiased.factors()[1].shape[1] if estimate.features.is_factored else d
    lifted = not estimate.shrink and unbiased.needs_correction  # a multiple of Σ⁻¹ outside of the rows' span
    if lifted and d > DENSE_EIGH:
        return _by_products(estimate, k)
    is_dense = estimate.sums is not None or estimate.cached_matrix.value is not None
    if 2 * rows >= d or is_dense or lifted:
        refuse_dense(d)
        return of_matrix(estimate.hessian, k)
    few = 8 * k <= rows and estimate.denoised is not None
    span_bytes = 2 * rows * d * estimate.features.gradient.element_size()
    if span_bytes > (ROW_SPAN_FOR_FEW if few else ROW_SPAN).on(estimate.features.gradient.device):
        return _by_products(estimate, k)
    # The range of H is in the span of the rows: solve the eigenvalue problem in a basis of it.
    span = orthonormal(torch.cat(unbiased.factors(), 1)).mT
    small = span.mT @ estimate.product(span.mT).mT
    found = of_matrix(symmetric(small), min(k, small.shape[-1]))
    return Eigenpairs(found.values, found.vectors @ span.mT)


def of_matrix(matrix: Tensor, k: int) -> Eigenpairs:
    """The k eigenpairs with the largest |λ| of (B, d, d)."""
    values, vectors = torch.linalg.eigh(matrix)
    order = by_magnitude(values, k)
    return Eigenpairs(values.gather(1, order), vectors.gather(2, order[:, None].expand(-1, matrix.shape[-1], -1)).mT)


def _by_products(estimate: HessianEstimate, k: int) -> Eigenpairs:
    return Eigenpairs(*leading_eigenpairs(estimate.product, estimate.features.gradient, k, TOLERANCE, cheap=True))


def residuals(product: Callable[[Tensor], Tensor], pairs: Eigenpairs) -> Tensor:
    """|Hv − λv| of eigenpairs, relative to the largest |λ|, (B, k)."""
    vectors = pairs.vectors.reshape(*pairs.values.shape, -1)
    residual = product(vectors) - pairs.values[..., None] * vectors
    largest = pairs.values.abs().amax(1, keepdim=True).clamp_min(torch.finfo(vectors.dtype).tiny)
    return torch.linalg.vector_norm(residual, dim=-1) / largest
