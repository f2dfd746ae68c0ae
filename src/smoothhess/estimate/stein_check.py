"""Stein's identities: a check that a model's gradients are the derivatives of its values.

For each row the check has three quantities whose mean is zero if the gradients are the derivatives of the values
(`stein_rows`). Sums of their powers are kept, which are merged by addition; `z_scores` converts them to z-scores.
Warnings are issued in `smoothhess.explainers.result_warnings`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from smoothhess.draws.seeding import fixed_normal
from smoothhess.estimate.student_t import normal_score

MOMENTS = 5  # sums that are kept for each quantity: of its powers 1 to 4, and of its rounding error
ROUNDING = 16  # assumed rounding error of values and gradients, in units in the last place


def stein_rows(z: Tensor, value: Tensor, odd: Tensor, even: Tensor, slope: Tensor) -> Tensor:
    """Terms of Stein's identities for f minus its tangent at x, one per row, (b, r, 3); the mean of each is zero.

    E[φ (z·a) f (1 + 1/k)] = E[φ a·γ], along the gradient and along a fixed random direction a, and E[φ (|z|² (1 + 1/k)
    − k) f] = E[φ z·γ], where φ = exp(−|z|²/2k) makes the tails lighter. `value` holds the differences of f at z (and
    −z) to f(x), `odd` and `even` (b, r, k) those of the gradient, `slope` (b, 1, k) the gradient at x.
    """
    k = z.shape[-1]
    radius2 = z.square().sum(-1)  # (1 or b, r)
    steepness = torch.linalg.vector_norm(slope, dim=-1)  # (b, 1)
    directions = _directions(slope, steepness)  # (b, k, 2)
    moves = z @ directions  # (b, r, 2)
    tangent = moves[..., 0] * steepness  # (b, r)
    mirrored = value.shape[2] == 2
    change = (value[:, :, 0] - value[:, :, 1]) / 2 if mirrored else value[:, :, 0]
    first = moves * (change - tangent)[..., None] * (1 + 1 / k) - even @ directions
    rest = value.mean(2) if mirrored else change - tangent
    second = (radius2 * (1 + 1 / k) - k) * rest - (z * odd).sum(-1)
    return torch.exp(-radius2 / (2 * k))[..., None] * torch.cat([first, second[..., None]], -1)


def rounding_rows(z: Tensor, size: Tensor, slope: Tensor) -> Tensor:
    """Bounds on the rounding error of each quantity of `stein_rows`, (b, r, 3).

    `size` (b, r) is |f| + |∇f||x + δ| at the points, to which the rounding errors of values are proportional, since the
    inputs are rounded too. For a quadratic function on a mirrored design the first identity holds in every row; only
    rounding remains then, and its mean is not zero.
    """
    k = z.shape[-1]
    radius2 = z.square().sum(-1)
    directions = _directions(slope, torch.linalg.vector_norm(slope, dim=-1))
    first = (z @ directions).abs() * (1 + 1 / k) + 1
    second = (radius2 * (1 + 1 / k) - k).abs() + 1
    both = torch.cat([first, second[..., None].expand(*first.shape[:2], 1)], -1)
    unit = ROUNDING * torch.finfo(z.dtype).eps
    return unit * (torch.exp(-radius2 / (2 * k)) * size)[..., None] * both


def moments(rows: Tensor, rounding: Tensor) -> Tensor:
    """Sums over rows (b, r, 3) for the z-scores, (b, MOMENTS, 3) float64."""
    rows = rows.double()
    square = rows.square()
    powers = rows, square, rows * square, square.square()
    return torch.stack([p.sum(1) for p in (*powers, rounding.double())], 1)


def z_scores(sums: Tensor, n: Tensor) -> Tensor:
    """z-scores of the first identity, the worse of its two directions, and of the second, (B, 2) float64.

    Rows of one block count as independent. Their errors are negatively correlated (orthogonal directions, strata of a
    Sobol sequence), so the scores are too small rather than too large. The variance of n rows with kurtosis κ has
    2n/(κ − 1) degrees of freedom: its relative variance is (κ − 1)/n. If the rows are skewed, a mean on the side of the
    short tail has too small a variance, which Johnson's correction (1978) compensates. The correction is applied with
    twice its size, since few rows underestimate their skewness, and towards zero only.
    """
    count = n.double()[:, None]
    tiny = torch.finfo(torch.float64).tiny
    mean, square, cube, fourth, rounding = (sums / count[..., None].clamp_min(1)).unbind(1)
    spread = (square - mean.square()).clamp_min(0)
    total = spread / (count - 1).clamp_min(1) + rounding.square()
    t = torch.where(total > 0, mean / total.clamp_min(tiny).sqrt(), 0.0)
    third = cube - 3 * mean * square + 2 * mean**3
    skewness = torch.where((cube != 0) & (spread > 0), third / spread.clamp_min(tiny) ** 1.5, 0.0)
    corrected = (t + skewness * (1 + 2 * t.square()) / (3 * count.clamp_min(1).sqrt())) * t.sign()
    t = torch.minimum(corrected.clamp_min(0), t.abs()).copysign(t)
    df = 2 * count / (fourth / square.square().clamp_min(tiny) - 1).clamp_min(2)  # normal rows: κ = 3
    z = normal_score(t, (df - 1).clamp_min(1))
    worse = z[:, :2].gather(1, z[:, :2].abs().argmax(1, keepdim=True))
    return torch.cat([worst_of(worse, 2), z[:, 2:]], 1)


def worst_of(z: Tensor, tests: int) -> Tensor:
    """The z-score of the largest of several z-scores, with the Bonferroni correction for `tests` tests and its sign.

    >>> worst_of(torch.tensor([0.1, -5.0]).double(), 2)
    tensor([ 0.0000, -4.8646], dtype=torch.float64)
    """
    size = z.double().abs()
    p = (tests * torch.erfc(size / 2**0.5)).clamp_max(1)
    exact = -torch.special.ndtri(p / 2)
    far = (size.square() - 2 * torch.log(torch.tensor(float(tests)))).clamp_min(0).sqrt()  # where p underflows
    return torch.where(size < 12, exact, far).copysign(z)


def combined(z: Tensor) -> Tensor:
    """Both columns of `z_scores` as one |z|, (B,), with the false-positive rate of a single test."""
    return worst_of(z.abs().amax(1), 2)


def _directions(slope: Tensor, steepness: Tensor) -> Tensor:
    """The direction of the gradient and a fixed random one, (b, k, 2)."""
    along = slope / steepness[..., None].clamp_min(torch.finfo(slope.dtype).tiny)
    return torch.cat([along, _across(slope.shape[-1]).to(slope).expand_as(along)], 1).mT


@lru_cache(maxsize=1)
def _across(k: int) -> Tensor:
    """A fixed random direction."""
    return fixed_normal(k) / k**0.5
