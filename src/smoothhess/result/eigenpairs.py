"""Eigenpairs: the leading interaction directions of a result, from a matrix, its low-rank rows, or products only.

Intervals of the eigenvalues are in `eigenvalue_intervals`, figures of the directions in `smoothhess.view`, the block
Krylov method in `smoothhess.linalg.krylov`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from smoothhess.estimate.halves import SymmetricOperator
from smoothhess.estimate.hessian_estimate import HessianEstimate, refuse_dense
from smoothhess.estimate.statistics import symmetric
from smoothhess.linalg.eigenvalue_order import by_magnitude
from smoothhess.linalg.krylov import leading_eigenpairs
from smoothhess.linalg.memory import ROW_SPAN, ROW_SPAN_FOR_FEW
from smoothhess.linalg.orthonormal import orthonormal
from smoothhess.result.intervals import Estimate

DENSE_EIGH = 2048  # features up to which a matrix is made if the rows do not span H
# A basis of the rows is made within ROW_SPAN, or ROW_SPAN_FOR_FEW for a few eigenpairs of a denoised H, whose spectrum
# decays; otherwise only products are used, to this residual, which is far below the noise of such an estimate.
TOLERANCE = 1e-4


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """Leading interaction directions, largest |eigenvalue| first; `values, vectors = result.eigh(k)` unpacks them.

    `values` are the eigenvalues of the estimated matrix, which are too large in magnitude on average: each direction
    was chosen because the estimate, noise included, is large along it. `estimate`, `stderr` and `interval` correct for
    this. They describe the eigenvalues of the true H, not the curvature along `vectors`.

    >>> from smoothhess import SmoothHess
    >>> f = lambda x: x.cos().prod(1)
    >>> pairs = SmoothHess(f).attribute(torch.zeros(1, 6).double(), sigma=0.5, n_calls=96).eigh(1)
    >>> values, vectors = pairs
    >>> low, high = pairs.interval()
    >>> values.shape, vectors.shape, bool(low < high)
    (torch.Size([1, 1]), torch.Size([1, 1, 6]), True)
    """

    values: Tensor  # (B, k)
    vectors: Tensor  # (B, k, *feature shape)
    compute_estimate: Callable[[], Estimate] | None = None  # for modules of this package
    note: str = ""  # why standard errors are NaN, where the error of H itself is known

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.values, self.vectors))

    @cached_property
    def estimate(self) -> Estimate:
        """The eigenvalues of H, corrected for the choice of directions, with standard errors, an `Estimate` (B, k).

        The i-th number estimates the eigenvalue of H with the place of `values[:, i]`: the p-th largest if that is the
        p-th among the positive values, or the p-th smallest among the negative ones. It is NaN where there are fewer
        than two independent blocks of draws.
        """
        if self.compute_estimate is not None:
            return self.compute_estimate()
        unknown = torch.full_like(self.values, torch.nan)
        return Estimate(unknown, unknown, torch.zeros_like(self.values[:, 0], dtype=torch.float64))

    @property
    def stderr(self) -> Tensor:
        """Standard errors of `estimate`, (B, k); NaN where they are unknown, see `note`."""
        return self.estimate.stderr

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Confidence intervals of the eigenvalues of H; not centred at `values`, but at the corrected `estimate`.

        Args:
            level: probability with which the interval contains the true eigenvalue, between 0 and 1.

        Returns:
            The lower and upper ends, (B, k); NaN where the error is unknown, see `note`.
        """
        return self.estimate.interval(level)

    def shaped(self, feature_shape: tuple[int, ...]) -> Eigenpairs:
        """The same with vectors (B, k, d) in the shape of the features."""
        return replace(self, vectors=self.vectors.reshape(*self.values.shape, *feature_shape))


def check_count(k: int | None, d: int) -> int:
    """Number of eigenpairs from the argument k of `eigh`; 8 if None, or d if that is less."""
    k = min(8, d) if k is None else k
    if not 1 <= k <= d:
        raise ValueError(f"k must be between 1 and {d} eigenpairs, got {k}.")
    return k


@dataclass(frozen=True, eq=False)
class Solver:
    """How eigenpairs of an estimate, and of parts of it, are computed: densely, in a basis, or from products."""

    like: Tensor  # (B, d), dtype and device of the vectors
    dense: bool = False
    basis: Tensor | None = None  # (B, d, r) with orthonormal columns, of a space that contains the range of H

    @staticmethod
    def of(estimate: HessianEstimate, k: int) -> Solver:
        """The one for k eigenpairs of this estimate."""
        d, unbiased, like = estimate.features.k, estimate.unbiased, estimate.features.gradient
        rows = unbiased.factors()[1].shape[1] if estimate.features.is_factored else d
        lifted = not estimate.shrink and unbiased.needs_correction  # a multiple of Σ⁻¹ outside of the rows' span
        if lifted and d > DENSE_EIGH:
            return Solver(like)
        is_dense = estimate.sums is not None or estimate.cached_matrix.value is not None
        if 2 * rows >= d or is_dense or lifted:
            refuse_dense(d)
            return Solver(like, dense=True)
        few = 8 * k <= rows and estimate.denoised is not None
        span_bytes = 2 * rows * d * like.element_size()
        if span_bytes > (ROW_SPAN_FOR_FEW if few else ROW_SPAN).on(like.device):
            return Solver(like)
        # The range of H is in the span of the rows: solve the eigenvalue problem in a basis of it.
        return Solver(like, basis=orthonormal(torch.cat(unbiased.factors(), 1)).mT)

    def leading(self, operator: SymmetricOperator, k: int) -> Eigenpairs:
        """The k eigenpairs with the largest |λ|, vectors (B, k, d); fewer if the basis has fewer columns."""
        if self.dense:
            return of_matrix(operator.dense().to(self.like), k)
        if self.basis is None:
            return Eigenpairs(*leading_eigenpairs(operator.product, self.like, k, TOLERANCE, cheap=True))
        small = self.basis.mT @ operator.product(self.basis.mT).mT
        found = of_matrix(symmetric(small), min(k, small.shape[-1]))
        return Eigenpairs(found.values, found.vectors @ self.basis.mT)


def of_estimate(estimate: HessianEstimate, k: int) -> Eigenpairs:
    """The k eigenpairs with the largest |λ| of a sampled Hessian, vectors (B, k, d)."""
    return Solver.of(estimate, k).leading(SymmetricOperator(estimate.product, lambda: estimate.hessian), k)


def of_matrix(matrix: Tensor, k: int) -> Eigenpairs:
    """The k eigenpairs with the largest |λ| of (B, d, d)."""
    values, vectors = torch.linalg.eigh(matrix)
    order = by_magnitude(values, k)
    return Eigenpairs(values.gather(1, order), vectors.gather(2, order[:, None].expand(-1, matrix.shape[-1], -1)).mT)


def residuals(product: Callable[[Tensor], Tensor], pairs: Eigenpairs) -> Tensor:
    """|Hv − λv| of eigenpairs, relative to the largest |λ|, (B, k)."""
    vectors = pairs.vectors.reshape(*pairs.values.shape, -1)
    residual = product(vectors) - pairs.values[..., None] * vectors
    largest = pairs.values.abs().amax(1, keepdim=True).clamp_min(torch.finfo(vectors.dtype).tiny)
    return torch.linalg.vector_norm(residual, dim=-1) / largest
