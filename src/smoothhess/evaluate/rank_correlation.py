"""Spearman's rank correlation and its permutation test, batched over rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from smoothhess.draws.seeding import evaluation_generator

PERMUTATIONS = 9999  # random permutations; for up to seven numbers, all permutations are fewer


def ranks(x: Tensor) -> Tensor:
    """Ranks 1 … n along the last dimension, float64; ties have the mean of their ranks.

    >>> ranks(torch.tensor([3.0, 1.0, 3.0, 2.0]))
    tensor([3.5000, 1.0000, 3.5000, 2.0000], dtype=torch.float64)
    """
    from scipy.stats import rankdata

    return torch.as_tensor(rankdata(x.detach().double().cpu().numpy(), axis=-1)).to(x.device)


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's ρ along the last dimension, float64; NaN where all numbers of a or of b are equal.

    >>> spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 100.0, 50.0]))
    tensor(0.5000, dtype=torch.float64)
    """
    a, b = torch.broadcast_tensors(a, b)
    left, right = (r - r.mean(-1, keepdim=True) for r in (ranks(a), ranks(b)))
    size = (left.square().sum(-1) * right.square().sum(-1)).sqrt()
    rho = (left * right).sum(-1) / size
    return torch.where(size > 0, rho.clamp(-1, 1), torch.nan)


def spearman_p(a: Tensor, b: Tensor) -> Tensor:
    """Two-sided p-value of Spearman's ρ along the last dimension for independent a and b, float64.

    From the permutation distribution of |ρ|: all n! pairings if these are at most PERMUTATIONS, otherwise PERMUTATIONS
    random ones with a fixed seed. The smallest possible p is 1 over their number. NaN where ρ is NaN.

    >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    >>> spearman_p(x, x)  # 2 of 24 orders have |ρ| = 1
    tensor(0.0833, dtype=torch.float64)
    """
    from scipy.stats import permutation_test

    a, b = torch.broadcast_tensors(a, b)
    left, right = (_standard(ranks(t)).reshape(-1, t.shape[-1]).cpu().numpy() for t in (a, b))

    def size(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        # permutations change the order of summation, hence the rounding: equal values must stay equal
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
                rng=evaluation_generator(0),
            ).pvalue
    return torch.from_numpy(p).reshape(a.shape[:-1]).to(a.device)


def _standard(ranked: Tensor) -> Tensor:
    """Centred and divided by the norm; zero where all ranks are equal."""
    centred = ranked - ranked.mean(-1, keepdim=True)
    length = centred.norm(dim=-1, keepdim=True)
    return torch.where(length > 0, centred / length.clamp_min(1e-300), 0.0)
