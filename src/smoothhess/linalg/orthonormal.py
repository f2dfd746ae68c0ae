"""Orthonormalisation of rows: by Householder reflections, or by Cholesky QR, which is faster but loses accuracy.

To orthogonalise one vector against a basis is in `smoothhess.linalg.trust_region.few_directions`.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALL_TRIANGLE = 64  # size of blocks that are inverted by substitution


def orthonormal(rows: Tensor) -> Tensor:
    """An orthonormal basis of the span of rows (…, n, d), n ≤ d, of any condition; signs are arbitrary."""
    return torch.linalg.qr(rows.mT).Q.mT


def gram_schmidt(rows: Tensor) -> Tensor:
    """The orthonormal rows of the Gram–Schmidt process of rows (…, n, d) in their order, computed by reflections.

    The signs are fixed, unlike those of `orthonormal`: each result has a positive product with its row.

    >>> gram_schmidt(torch.tensor([[3.0, 0.0], [1.0, -2.0]])).round(decimals=6) + 0.0
    tensor([[ 1.,  0.],
            [ 0., -1.]])
    """
    q, r = torch.linalg.qr(rows.mT)
    signs = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
    return (q * signs[..., None, :]).mT


def cholesky_qr(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`gram_schmidt` Q and the lower triangular L of rows = LQ, with L the Cholesky factor of their Gram matrix.

    It consists of products, which suit a GPU. The Gram matrix squares the condition number: both results are NaN where
    the factorisation fails, and less orthonormal the smaller the diagonal of L is relative to the rows.
    """
    factor, failed = torch.linalg.cholesky_ex(rows @ rows.mT)
    factor = torch.where((failed == 0)[..., None, None], factor, torch.nan)
    if rows.is_cuda and rows.ndim == 2:
        return triangular_inverse(factor) @ rows, factor
    return torch.linalg.solve_triangular(factor, rows, upper=False), factor


def triangular_inverse(lower: Tensor) -> Tensor:
    """Inverse of a lower triangular matrix (k, k): small diagonal blocks first, then larger ones by products.

    Substitution row by row would leave a large GPU idle.

    >>> triangular_inverse(torch.tensor([[2.0, 0.0], [1.0, 4.0]]))
    tensor([[ 0.5000,  0.0000],
            [-0.1250,  0.2500]])
    """
    k = len(lower)
    doublings = max(0, (k // SMALL_TRIANGLE).bit_length() - 1)
    size = -(-k // 2**doublings)
    padded = torch.eye(size << doublings, dtype=lower.dtype, device=lower.device)
    padded[:k, :k] = lower
    count = 1 << doublings
    which = torch.arange(count, device=lower.device)
    blocks = padded.reshape(count, size, count, size)[which, :, which]
    eye = torch.eye(size, dtype=lower.dtype, device=lower.device)
    inverses = torch.linalg.solve_triangular(blocks, eye.expand_as(blocks), upper=False)
    while count > 1:
        below = padded.reshape(count, size, count, size)[which[1::2], :, which[::2]]
        first, second = inverses[::2], inverses[1::2]
        joined = inverses.new_zeros(count // 2, 2 * size, 2 * size)
        joined[:, :size, :size], joined[:, size:, size:] = first, second
        joined[:, size:, :size] = -second @ (below @ first)
        inverses, count, size = joined, count // 2, 2 * size
        which = which[:count]
    return inverses[0, :k, :k]
