"""Principal directions of a matrix of second moments, exact in low and approximate in high dimensions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from smoothhess.linalg.concurrent_map import concurrently

EIGENBASIS = 1024  # dimensions up to which directions are eigenvectors
POWERS = 1, 1, 2  # above it: subspace iteration, orthonormalised after 1, 1 and 2 products
FLOOR = 1e-6  # added to the spectrum, relative to the trace, so that empty directions are not chosen by rounding
ORTHONORMAL, PROBES = 1e-9, 8  # largest entry of QᵀQv − v, checked for this many unit vectors v
SMALL_TRIANGLE = 64  # size of blocks that are inverted by substitution


def strongest_directions(moments: Tensor, mix: Callable[[int, torch.device], Tensor]) -> Tensor:
    """Orthonormal columns for positive semidefinite M, (b, k, k), in descending order of second moments.

    These are eigenvectors. In high dimensions, where an eigendecomposition would be slower than the model, they are an
    orthonormal basis of M⁴Ω with a fixed orthogonal Ω = `mix(k, device)`, which mixes only adjacent eigenvectors.

    >>> moments = torch.diag(torch.tensor([1.0, 3.0, 2.0]).double())[None]
    >>> strongest_directions(moments, torch.eye)[0].abs().argmax(0)
    tensor([1, 2, 0])
    """
    k = moments.shape[-1]
    if k <= EIGENBASIS:
        return torch.linalg.eigh(moments)[1].flip(-1)
    return concurrently(partial(_powered, mix=mix(k, moments.device)), moments)


def _powered(moments: Tensor, mix: Tensor) -> Tensor:
    """Orthonormal columns of M⁴Ω, (k, k), M of trace 1 with a floor."""
    scaled = moments / moments.diagonal().sum().clamp_min(torch.finfo(moments.dtype).tiny)
    scaled.diagonal().add_(FLOOR)
    found, seen = _in_steps(scaled, mix, _by_products), mix[:, :PROBES]
    for repaired in (False, True):
        if bool((found.mT @ (found @ seen) - seen).abs().amax() < ORTHONORMAL):
            return found
        if not repaired:
            found = 1.5 * found - 0.5 * found @ (found.mT @ found)  # Newton–Schulz step: squares the error
    return _in_steps(scaled, mix, _by_reflections)


def _in_steps(scaled: Tensor, mix: Tensor, gram_schmidt: Callable[[Tensor], Tensor]) -> Tensor:
    """M⁴Ω, orthonormalised between products: otherwise weak directions would be lost to rounding."""
    columns = mix
    for power in POWERS:
        for _ in range(power):
            columns = scaled @ columns
        # From the second step on, the Gram matrix of the normalised columns is close to the identity.
        columns = gram_schmidt(torch.nn.functional.normalize(columns, dim=0, eps=1e-100))
    return columns


def _by_products(columns: Tensor) -> Tensor:
    """Q of a QR decomposition by Cholesky QR, which is fast; NaN if the factorisation fails."""
    factor, failed = torch.linalg.cholesky_ex(columns.mT @ columns)
    if columns.is_cuda:
        found = columns @ triangular_inverse(factor).mT
    else:
        found = torch.linalg.solve_triangular(factor.mT, columns, upper=True, left=False)
    return torch.where(failed == 0, found, torch.nan)


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


def _by_reflections(columns: Tensor) -> Tensor:
    """Q of a QR decomposition by Householder reflections, with the signs of `_by_products`."""
    q, r = torch.linalg.qr(columns)
    return q * r.diagonal().sign()
