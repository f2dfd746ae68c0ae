"""Rank correlation, for many rows of numbers at once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

PERMUTATIONS = 9999  # random orders; of up to seven numbers all orders are fewer


def ranks(x: Tensor) -> Tensor:
    """Processes 1 … n along the last dimension, float64; equal numbers share the mean of theirs.

    >>> ranks(torch.tensor([3.0, 1.0, 3.0, 2.0]))
    tensor([3.5000, 1.0000, 3.5000, 2.0000], dtype=torch.float64)
    """
    from scipy.stats import rankdata

    return torch.as_tensor(rankdata(x.detach().cpu().numpy(), axis=-1)).to(x.device)


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


def spearman_p(a: Tensor, b: Tensor) -> Tensor:
    """Two-sided p of Spearman's ρ along the last dimension, were the pairing of a and b arbitrary, float64.

    From the permutation distribution of |ρ|: all n! pairings where these are at most PERMUTATIONS, else so many random
    ones with a fixed seed. No p is smaller than 1 over their number. NaN where all numbers of one side are equal.

    >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    >>> spearman_p(x, x)  # 2 of 24 orders have |ρ| = 1
    tensor(0.0833, dtype=torch.float64)
    """
    from scipy.stats import permutation_test

    a, b = torch.broadcast_tensors(a, b)
    left, right = (_standard(ranks(t)).reshape(-1, t.shape[-1]).cpu().numpy() for t in (a, b))

    def size(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        # sums of other orders of the same numbers differ by rounding: equal ones must stay equal
        return np.abs((x * y).sum(-1)).round(10)

    p = np.full(len(left), np.nan)
    for i, (x, y) in enumerate(zip(left, right, strict=True)):
        if x.any() and y.any():
            p[i] = permutation_test(
                (x,),
                lambda moved, axis=-1, y=y: size(moved, y),
                permutation_type="pairings",
                vectorized=True,
                alternative="greater",
                n_resamples=PERMUTATIONS,
                rng=np.random.default_rng(0),
            ).pvalue
    return torch.from_numpy(p).reshape(a.shape[:-1]).to(a.device)


def _standard(ranked: Tensor) -> Tensor:
    """Centred, and of length one; zero where all are equal."""
    centred = ranked - ranked.mean(-1, keepdim=True)
    length = centred.norm(dim=-1, keepdim=True)
    return torch.where(length > 0, centred / length.clamp_min(1e-300), 0.0)
