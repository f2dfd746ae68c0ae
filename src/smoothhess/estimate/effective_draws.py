"""How many draws carry an estimate: the effective number of rows, and the tail index of their contributions.

The contribution of a row is e = w |∇f(x + δ) − ∇f(x)|², of the model itself and not of the residual of a control
variate. n_eff = (Σe)²/Σe² is the number of equal rows that would have the same spread; it is small if a few draws carry
the estimate. The tail index k̂ of √e is that of a generalised Pareto distribution fitted to the largest rows (Zhang &
Stephens 2009), with the weak prior and the limit .7 of Pareto-smoothed importance sampling (Vehtari et al. 2024): above
it the scatter of the rows does not estimate their variance.

Both describe the rows that were met. A saturated output grows exponentially towards its steep part, and a run that has
not met that part has an inconspicuous n_eff. Its rows show the growth all the same: `exponential_share` is the share of
effective rows of exp(b·δ), whose rate b all rows determine (`growth_rate`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from smoothhess.draws.designs import SMALL, find_design
from smoothhess.estimate.statistics import NOTHING, Statistics
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
LEAST_EXPECTED = 1.0  # effective rows that exponential growth lets expect, below which a run has met too little of it
ONE_DIRECTION = 1 / 3  # share of effective rows of a linear gradient that varies along one direction, its least value
MORE_EVEN = 4.0  # effective rows, relative to those of exponential growth, from which rows do not grow so
UPPER = 0.9  # quantile whose distance to the median shows the growth
LEAST_ROWS = 20  # rows below which nothing is said about tails
LEAST_TAIL = 5  # rows in the tail that a fit needs
PRIOR_ROWS, PRIOR_INDEX = 10, 0.5  # weight and value of the prior of the tail index


def contributions(stats: Statistics) -> Tensor:
    """e of the rows of the head, (B, P) float64."""
    return stats.head.energy.double()


def effective_rows(stats: Statistics) -> Tensor:
    """n_eff of all rows, (B,): that of the head in proportion to the number of rows."""
    return effective_number(contributions(stats)) * stats.n / stats.n_head.clamp_min(1)


def growth_rate(stats: Statistics, slope: Tensor) -> Tensor:
    """The rate |b| of exponential growth that the rows allow, whitened, (B,); `slope` (B, d) is the gradient at x.

    f = exp(b·δ) has ∇f(x ± δ) = exp(±t)∇f(x) with t = b·δ, hence e/w|∇f(x)|² = ½(eᵗ − 1)² + ½(e⁻ᵗ − 1)² = 2c² − 2c with
    c = cosh t, which is solved for t, and E t² = |b|². Where the gradient at x is small without growth, the spread of
    the rows is smaller: |t| is half-normal, and ln e ≈ 2|t| for large t. Rows without a change do not count there.
    """
    weight = stats.head.weight.double()
    there = torch.arange(stats.head.energy.shape[1], device=weight.device) < stats.n_head[:, None]
    count = stats.n_head.clamp_min(1)
    tiny = torch.finfo(torch.float64).tiny
    change = torch.where(there, contributions(stats) / weight.clamp_min(tiny), 0.0)
    own = slope.double().square().sum(1).clamp_min(tiny)
    cosine = (1 + (1 + 2 * change / own[:, None]).sqrt()) / 2
    by_slope = (weight * torch.acosh(cosine).square()).sum(1) / count
    moved = change > NOTHING * change.amax(1, keepdim=True)
    logs = torch.where(moved, change.clamp_min(tiny).log() / 2, torch.nan)
    quantiles = torch.tensor([0.5, UPPER], dtype=torch.float64, device=weight.device)
    middle, upper = torch.nanquantile(logs, quantiles, dim=1)
    nodes = torch.special.ndtri((1 + quantiles) / 2)  # of |t| for a rate of 1
    return torch.minimum(by_slope.sqrt(), (upper - middle) / (nodes[1] - nodes[0])).nan_to_num(0.0)


def exponential_share(rate: Tensor) -> Tensor:
    """Share of effective rows of exp(b·δ) for rates |b|, in (0, 1/3): (E m)²/E m² with m = cosh 2t − 2 cosh t + 1.

    >>> exponential_share(torch.tensor([0.01, 1.0, 2.0], dtype=torch.float64))
    tensor([3.3326e-01, 1.9439e-02, 2.2300e-07], dtype=torch.float64)
    """
    s = rate.double().clamp(1e-2, 5.0).square()  # below, the two sums cancel; above, they overflow
    mean = torch.exp(2 * s) - 2 * torch.exp(s / 2) + 1
    square = torch.exp(8 * s) / 2 - 2 * torch.exp(4.5 * s) + 4 * torch.exp(2 * s) - 6 * torch.exp(s / 2) + 3.5
    return mean.square() / square


def exponential_rows(rate: Tensor, count: Tensor) -> Tensor:
    """Effective number of `count` (B,) rows of exp(b·δ) whose |t| are the quantiles of their distribution, (B,).

    >>> exponential_rows(torch.tensor([0.1, 2.0]), torch.tensor([200, 200])).round()
    tensor([67.,  3.], dtype=torch.float64)
    """
    place = torch.arange(int(count.max()), device=count.device, dtype=torch.float64)
    level = (1 + (place + 0.5) / count.clamp_min(1)[:, None]) / 2
    t = rate.double().clamp(1e-2, 5.0)[:, None] * torch.special.ndtri(level.clamp_max(1.0))
    energy = torch.where(place < count[:, None], torch.cosh(t).square() - torch.cosh(t), 0.0)
    return effective_number(energy)


def expected_rows(stats: Statistics, slope: Tensor) -> Tensor:
    """Effective rows that a run has on average if its growth continues, (B,); infinite where the rows show none.

    The rows must be less even than those of any linear gradient, which also grows where its slope at x is small, and
    not much more even than as many rows of exponential growth. Growth outside of tail strata ends where these begin.
    """
    grows = effective_rows(stats) < ONE_DIRECTION * stats.n
    if stats.tails is not None:
        grows = grows & ~stats.tails.strata.exist
    none = torch.full_like(stats.n, torch.inf, dtype=torch.float64)
    if not find_design(stats.design).mirrored or not bool(grows.any()):
        return none
    rate = growth_rate(stats, slope)
    typical = exponential_rows(rate, stats.n_head) * stats.n / stats.n_head.clamp_min(1)
    grows = grows & (effective_rows(stats) < MORE_EVEN * typical)
    return torch.where(grows, exponential_share(rate) * stats.n, none)


def bounded_df(stats: Statistics, df: Tensor, slope: Tensor | None = None) -> Tensor:
    """Degrees of freedom (B,), at most n_eff − 1 where that is a small share of the rows, but at least 1.

    With `slope` (B, d), the gradient at x in the coordinates of the features, n_eff is at most `expected_rows`.
    """
    number = effective_rows(stats)
    if slope is not None:
        number = torch.where(number > 0, torch.minimum(number, expected_rows(stats, slope)), number)
    few = (number > 0) & (number < HEALTHY_SHARE * stats.n) & (stats.n_head >= LEAST_ROWS)
    return torch.where(few, torch.minimum(df, (number - 1).clamp_min(1)), df)


def heavy_tails(stats: Statistics, grouped: bool, slope: Tensor | None = None) -> Tensor:
    """Where a few draws carry the estimate, so that standard errors are unreliable, (B,).

    `slope` (B, d) is the gradient at x in the coordinates of the features, if the growth of the rows is to be judged.
    """
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
    if slope is not None:
        few = few | (expected_rows(stats, slope) < LEAST_EXPECTED)
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
