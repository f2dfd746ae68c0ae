"""Rank correlation, for many rows of numbers at once."""

from __future__ import annotations

import torch
from torch import Tensor

from smoothhess import student


def ranks(x: Tensor) -> Tensor:
    """Ranks 1 … n along the last dimension, float64; equal numbers share the mean of theirs.

    >>> ranks(torch.tensor([3.0, 1.0, 3.0, 2.0]))
    tensor([3.5000, 1.0000, 3.5000, 2.0000], dtype=torch.float64)
    """
    ordered, order = x.sort(-1)
    first = torch.searchsorted(ordered.contiguous(), ordered.contiguous(), right=False)
    last = torch.searchsorted(ordered.contiguous(), ordered.contiguous(), right=True)
    shared = (first + last + 1).double() / 2
    return torch.empty_like(shared).scatter(-1, order, shared)


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's ρ along the last dimension, float64; NaN where all numbers of one side are equal.

    >>> spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 100.0, 50.0]))
    tensor(0.5000, dtype=torch.float64)
    """
    a, b = torch.broadcast_tensors(a, b)
    left, right = (r - r.mean(-1, keepdim=True) for r in (ranks(a), ranks(b)))
    size = (left.square().sum(-1) * right.square().sum(-1)).sqrt()
    rho = (left * right).sum(-1) / size
    return torch.where(size > 0, rho.clamp(-1, 1), torch.nan)


def spearman_p(rho: Tensor, n: int) -> Tensor:
    """Two-sided p of ρ from n pairs of numbers, were the two unrelated (Student's approximation).

    >>> spearman_p(torch.tensor(0.6), 12)
    tensor(0.0392, dtype=torch.float64)
    """
    if n < 3:
        return torch.full_like(rho, torch.nan, dtype=torch.float64)
    rho = rho.double()
    t = rho * ((n - 2) / (1 - rho.square()).clamp_min(1e-300)).sqrt()
    p = student.two_sided_p(t.nan_to_num(0.0).clamp(-1e100, 1e100), torch.tensor(float(n - 2)))
    return torch.where(rho.isnan(), torch.nan, p)
