"""How many draws carry an estimate: the effective number of rows, and the tail index of their contributions.

The contribution of a row is e = w |∇f(x + δ) − ∇f(x)|², of the model itself and not of the residual of a control
variate. n_eff = (Σe)²/Σe² is the number of equal rows that would have the same spread; it is small if a few draws carry
the estimate. The tail index k̂ of √e is that of a generalised Pareto distribution fitted to the largest rows (Zhang &
Stephens 2009), with the weak prior and the limit .7 of Pareto-smoothed importance sampling (Vehtari et al. 2024): above
it the scatter of the rows does not estimate their variance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smoothhess.draws.designs import SMALL
from smoothhess.estimate.statistics import Statistics
from smoothhess.estimate.tail_variance import TailVariance
from smoothhess.linalg.effective_number import effective_number

HEAVY = 0.7  # tail index above which standard errors are unreliable
FEW = 5  # effective rows below which the estimate rests on single draws
HEALTHY_SHARE = 0.25  # share of effective rows above which the rows are alike enough
SMALL_SHARE, SMALL_NUMBER = 0.1, 20  # tails are heavy below this share of effective rows, if there are fewer than that
TINY_SHARE, ENOUGH = 0.02, 100  # the same for an even smaller share
HEAVY_ROWS = 20  # effective rows below which a tail index above HEAVY counts
LITTLE = 0.3  # variance of draws from tail strata, relative to that of the rows, below which they do not matter
ENOUGH_COUPLES = 30  # effective draws from tail strata above which their tails are not heavy
LEAST_ROWS = 20  # rows below which nothing is said about tails
LEAST_TAIL = 5  # rows in the tail that a fit needs
PRIOR_ROWS, PRIOR_INDEX = 10, 0.5  # weight and value of the prior of the tail index


def contributions(stats: Statistics) -> Tensor:
    """e of the rows of the head, (B, P) float64."""
    return stats.head.energy.double()


def effective_rows(stats: Statistics) -> Tensor:
    """n_eff of all rows, (B,): that of the head in proportion to the number of rows."""
    return effective_number(contributions(stats)) * stats.n / stats.n_head.clamp_min(1)


def bounded_df(stats: Statistics, df: Tensor) -> Tensor:
    """Degrees of freedom (B,), at most n_eff − 1 where that is a small share of the rows, but at least 1."""
    number = effective_rows(stats)
    few = (number > 0) & (number < HEALTHY_SHARE * stats.n) & (stats.n_head >= LEAST_ROWS)
    return torch.where(few, torch.minimum(df, (number - 1).clamp_min(1)), df)


def heavy_tails(stats: Statistics, grouped: bool) -> Tensor:
    """Where a few draws carry the estimate, so that standard errors are unreliable, (B,)."""
    known = None if stats.rare is None else stats.rare.complete
    if not grouped:
        stats = stats.without_computed_flips
        known = None if stats.rank > SMALL or stats.design != "orthogonal" else known
    number = effective_rows(stats)
    share = number / stats.n.clamp_min(1)
    few = ((share < SMALL_SHARE) & (number < SMALL_NUMBER)) | ((share < TINY_SHARE) & (number < ENOUGH))
    uneven = (share < HEALTHY_SHARE) & (number < HEAVY_ROWS)
    if bool(uneven.any()):
        few = few | (uneven & ((number < FEW) | (row_tail_index(stats) > HEAVY)))
    found = few & (number > 0) & (stats.n_head >= LEAST_ROWS)
    if stats.tails is not None:
        tails = TailVariance(stats.tails)
        few = (tails.effective < ENOUGH_COUPLES) & (tails.effective < HEALTHY_SHARE * stats.tails.n)
        if grouped:  # rows in strata cannot be told apart
            found = found & ~stats.tails.strata.exist
        found = found | (few & (tails.of_frobenius > LITTLE * _row_variance(stats, grouped)))
    return found if known is None else found & ~known  # of which the rows that flip a neuron cannot be told apart


def carrying_rows(stats: Statistics, grouped: bool) -> Tensor:
    """n_eff of the rows, or of the draws from tail strata if these are fewer, (B,); zero if no gradient changes."""
    if stats.tails is None:
        return effective_rows(stats)
    tails = TailVariance(stats.tails)
    rows = effective_rows(stats if grouped else stats.without_computed_flips)
    number = torch.where(tails.of_frobenius > LITTLE * _row_variance(stats, grouped), tails.effective, torch.inf)
    return torch.where(rows > 0, torch.minimum(rows, number), rows)


def _row_variance(stats: Statistics, grouped: bool) -> Tensor:
    """‖·‖²_F of the error of the Hessian if its rows were independent, (B,)."""
    head, k = stats.head, stats.rank
    length2 = head.score.double().square().sum(-1)
    if grouped:
        odd = head.odd.double()
        square = length2 * odd.square().sum(-1) + (head.score.double() * odd).sum(-1).square()
    else:  # s·γ and |γ|² from the slopes along and across the rows
        along2 = head.along.double().square()
        weight = head.weight.double().clamp_min(torch.finfo(torch.float64).tiny)
        square = length2 * k / weight * (head.across.double() + along2) + k**2 * along2
    return square.sum(1) / stats.n_head.clamp_min(1) / (2 * stats.n.clamp_min(1))


def row_tail_index(stats: Statistics) -> Tensor:
    """k̂ of the rows, (B,); NaN if these are too few."""
    return tail_index(contributions(stats).sqrt(), stats.n_head)


def tail_index(sizes: Tensor, rows: Tensor) -> Tensor:
    """k̂ of the first `rows` (B,) of (B, P) sizes, (B,); NaN where fewer than LEAST_TAIL rows are in the tail.

    >>> uniform = (torch.arange(1, 1001) - 0.5)[None].double() / 1000
    >>> heavy, light = uniform ** -1.0, uniform
    >>> bool(tail_index(heavy, torch.tensor([1000])) > 0.8), bool(tail_index(light, torch.tensor([1000])) < 0)
    (True, True)
    """
    found = torch.full_like(sizes[:, 0], torch.nan) if sizes.shape[1] else sizes.new_full((len(sizes),), torch.nan)
    for n in rows.unique().tolist():
        tail = min(n // 5, int(3 * n**0.5))
        if tail < LEAST_TAIL:
            continue
        index = torch.nonzero(rows == n).reshape(-1)
        largest = sizes[index, :n].topk(tail + 1, 1).values
        beyond = largest[:, :-1] - largest[:, -1:]
        usable = beyond[:, LEAST_TAIL - 1] > 0
        found[index[usable]] = _pareto_shape(beyond[usable].flip(1))
    return found


def _pareto_shape(x: Tensor) -> Tensor:
    """Shape of a generalised Pareto distribution for ascending exceedances (B, M), (B,)."""
    m = x.shape[1]
    x = x / x[:, -1:]
    count = 30 + int(m**0.5)
    step = torch.arange(1, count + 1, dtype=x.dtype, device=x.device)
    quarter = x[:, max(int(m / 4 + 0.5) - 1, 0), None].clamp_min(1e-9)
    theta = 1 + (1 - (count / (step - 0.5)).sqrt()) / (3 * quarter)  # (B, count), relative to 1/x_max
    theta = torch.where(theta.abs() < 1e-12, 1e-12, theta)
    shape = torch.log1p(-(theta[..., None] * x[:, None]).clamp_max(1 - 1e-9)).mean(-1)
    likelihood = m * (torch.log((-theta / shape).clamp_min(1e-300)) - shape - 1)
    weight = torch.softmax(likelihood, 1)
    posterior = (weight * theta).sum(1, keepdim=True)
    found = torch.log1p(-(posterior * x).clamp_max(1 - 1e-9)).mean(1)
    return (m * found + PRIOR_ROWS * PRIOR_INDEX) / (m + PRIOR_ROWS)
