"""Principal directions of a matrix of second moments, exact in low and approximate in high dimensions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from smoothhess.linalg.concurrent_map import concurrently
from smoothhess.linalg.orthonormal import cholesky_qr, gram_schmidt

EIGENBASIS = 1024  # dimensions up to which directions are eigenvectors
POWERS = 1, 1, 2  # above it: subspace iteration, orthonormalised after 1, 1 and 2 products
FLOOR = 1e-6  # added to the spectrum, relative to the trace, so that empty directions are not chosen by rounding
ORTHONORMAL, PROBES = 1e-9, 8  # largest entry of QᵀQv − v, checked for this many unit vectors v


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
    found, seen = _in_steps(scaled, mix, lambda rows: cholesky_qr(rows)[0]), mix[:, :PROBES]
    for repaired in (False, True):
        if bool((found.mT @ (found @ seen) - seen).abs().amax() < ORTHONORMAL):
            return found
        if not repaired:
            found = 1.5 * found - 0.5 * found @ (found.mT @ found)  # Newton–Schulz step: squares the error
    return _in_steps(scaled, mix, gram_schmidt)


def _in_steps(scaled: Tensor, mix: Tensor, orthonormalise: Callable[[Tensor], Tensor]) -> Tensor:
    """M⁴Ω, orthonormalised between products: otherwise weak directions would be lost to rounding."""
    columns = mix
    for power in POWERS:
        for _ in range(power):
            columns = scaled @ columns
        # From the second step on, the Gram matrix of the normalised columns is close to the identity.
        columns = orthonormalise(torch.nn.functional.normalize(columns, dim=0, eps=1e-100).mT).mT
    return columns
