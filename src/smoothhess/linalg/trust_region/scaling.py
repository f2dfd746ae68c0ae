"""Norms, unit vectors and eigenpairs that do not overflow or underflow: the arguments are scaled by powers of two."""

from __future__ import annotations

import torch
from torch import Tensor


def exponent(x: Tensor) -> Tensor:
    """log₂ of the largest |entry| along the last dimension, rounded up; −4096 where all are zero.

    >>> exponent(torch.tensor([[1e300, 3.0], [0.0, 0.0]], dtype=torch.float64))
    tensor([  997., -4096.], dtype=torch.float64)
    """
    largest = x.abs().amax(-1)
    return torch.where(largest > 0, torch.frexp(largest).exponent.double().clamp_min(-1000), -4096.0)


def power(exponents: Tensor) -> Tensor:
    """2 to the power of `exponents`, clamped to the range of float64."""
    return torch.exp2(exponents.clamp(-1060, 1020))


def norm(x: Tensor) -> Tensor:
    """Euclidean length along the last dimension.

    >>> norm(torch.tensor([3e200, 4e200], dtype=torch.float64))
    tensor(5.0000e+200, dtype=torch.float64)
    """
    of = exponent(x)
    return torch.linalg.vector_norm(x * power(-of)[..., None], dim=-1) * power(of)


def unit_vector(x: Tensor) -> Tensor:
    """Normalise to length 1 along the last dimension; zero stays zero."""
    x = x * power(-exponent(x))[..., None]
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.where(length > 0, x / length, 0.0)


def eigenpairs(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (B, k), ascending, and eigenvectors (B, k, k) as columns."""
    of = exponent(matrix.flatten(1))[:, None]
    values, vectors = torch.linalg.eigh(matrix * power(-of)[..., None])
    return values * power(of), vectors


def eigenvalues(matrix: Tensor) -> Tensor:
    """Eigenvalues (B, k), ascending."""
    of = exponent(matrix.flatten(1))[:, None]
    return torch.linalg.eigvalsh(matrix * power(-of)[..., None]) * power(of)
