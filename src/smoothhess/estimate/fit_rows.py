"""Fit of the rows of an incomplete block by the denoised estimate of the other rows; see `cross_fit`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from smoothhess.draws.designs import SMALL
from smoothhess.draws.gaussian import Gaussian
from smoothhess.estimate.cross_fit import CrossFit
from smoothhess.estimate.shrinkage import row_matrix
from smoothhess.estimate.statistics import DrawRange, Rows, Statistics, own_slopes
from smoothhess.linalg.gram import Grams
from smoothhess.linalg.low_rank import Known
from smoothhess.linalg.memory import EXAMPLE_MATRICES

FOLDS = 4
JITTER = 1e-9  # added to the squared lengths of rows that may be linearly dependent
OUT_OF_SAMPLE = 1 / 3  # power of 1 − m/k, the share of D_f in the rows that show the noise; measured on quadratics
FULL = 0.5  # share of a block up to which the whole prediction is subtracted; it decreases to zero at a complete block
LEAST_ROWS = 16  # fewer rows show too little of the Hessian


def fit_rows(stats: Statistics, gaussian: Gaussian) -> CrossFit | None:
    """The fit of whitened statistics; None if no example has an incomplete block alone, with enough rows."""
    counts = torch.tensor([_rows(stats, example) for example in range(len(stats))], device=stats.n.device)
    if not bool(counts.any()):
        return None
    head, most = stats.head, stats.head.odd.shape[1]
    odd, noise, along, across = head.odd.clone(), head.odd.clone(), head.along.clone(), head.across.clone()
    core = odd.new_zeros(len(stats), 2 * most, 2 * most)
    factor = odd.new_zeros(len(stats), 2 * most, stats.k)
    constant = torch.zeros_like(stats.n, dtype=torch.float64)
    step = EXAMPLE_MATRICES.items(8 * (2 * most) ** 2, odd.device)
    for m in counts[counts > 0].unique().tolist():
        for index in torch.nonzero(counts == m).reshape(-1).split(step):
            part = stats if len(index) == len(stats) else stats.select(index)
            changed, noisy, added, constant[index] = _fit(part, gaussian, m)
            odd[index, :m], noise[index, :m] = changed.to(odd), noisy.to(odd)
            slopes = own_slopes(part.head.score[:, :m], changed, part.head.weight[:, :m], stats.rank)
            along[index, :m], across[index, :m] = (slopes[name].to(odd) for name in ("along", "across"))
            assert added.factor is not None
            core[index, : 2 * m, : 2 * m], factor[index, : 2 * m] = added.core.to(odd), added.factor.to(odd)
    return CrossFit(odd, noise, along, across, Known(core, factor), constant)


def fitted(stats: Statistics, fit: CrossFit | None) -> Statistics:
    """The statistics with the fitted rows, in the coordinates of the fit; its constant is not in them."""
    if fit is None:
        return stats
    head = replace(stats.head, odd=fit.odd, along=fit.along, across=fit.across)
    known = fit.added if stats.known is None else stats.known.plus(fit.added)
    return replace(stats, head=head, known=known, skew=stats.skew if fit.skew is None else fit.skew, fit=None)


def with_noise_of(stats: Statistics, fit: CrossFit) -> Statistics:
    """Statistics of the rows from which the variance of the fitted estimate is computed: γ minus its prediction."""
    skew = stats.skew if fit.skew is None else fit.skew
    return replace(stats, head=replace(stats.head, odd=fit.noise), known=None, tails=None, skew=skew, fit=None)


def _rows(stats: Statistics, example: int) -> int:
    """Number of rows of an example that are fitted: all, if they are those of one incomplete block, or none."""
    k, stream = stats.rank, stats.stream[example]
    if stats.design != "orthogonal" or k <= SMALL or len(stream) != 1 or stats.total is not None:
        return 0
    m = int(stats.n[example])
    return m if LEAST_ROWS <= m < k and stream[0].start == 0 else 0


def _fit(stats: Statistics, gaussian: Gaussian, m: int) -> tuple[Tensor, Tensor, Known, Tensor]:
    """Of examples with m rows: γ′ and the rows that show its noise, (b, m, k) each, D̄ and its constant, float64."""
    head, k = stats.head.each(lambda t: t[:, :m]), stats.rank
    grams = Grams.of(head.odd, head.score)
    back = 1 / head.weight.double()  # z = s/w
    by_draws = grams.cross * back[:, None]  # γ·z, (b, m, m)
    squares = grams.score * back[:, None] * back[..., None]  # z·z
    ends = [m * f // FOLDS for f in range(FOLDS + 1)]
    batch = len(stats)
    weight = min(1.0, (1 - m / k) / (1 - FULL))
    core = by_draws.new_zeros(batch, 2 * m, 2 * m)
    constant = by_draws.new_zeros(batch)
    own, mean = (by_draws.new_zeros(batch, m, 2 * m) for _ in range(2))  # D_f z and D̄ z, as combinations of γ and z
    for first, last in pairwise(ends):
        rest = torch.cat([torch.arange(first), torch.arange(last, m)]).to(core.device)
        inside = rest[:, None], rest
        others = Grams(*(t[:, *inside] for t in grams))
        matrix, offset = row_matrix(_among(stats, head, rest), gaussian, others)
        matrix = matrix * weight
        turned = by_draws[:, rest] - offset[:, None, None] * squares[:, rest]  # (γ − a z) of the rest, times all z
        combined = matrix @ turned  # (b, rest, m)
        square = others.odd - offset[:, None, None] * (by_draws[:, *inside] + by_draws[:, *inside].mT)
        square = square + offset.square()[:, None, None] * squares[:, *inside]
        trace = (matrix * square).sum((-1, -2)) / k
        found = by_draws.new_zeros(batch, m, 2 * m)
        found[:, :, rest] = combined.mT
        found[:, :, m + rest] = -offset[:, None, None] * combined.mT
        found.diagonal(m, 1, 2).sub_(trace[:, None])
        own[:, first:last] = found[:, first:last]
        share = (last - first) / m
        mean += share * found
        constant -= share * trace
        for left, by_left in ((0, 1.0), (m, -offset[:, None, None])):
            for right, by_right in ((0, 1.0), (m, -offset[:, None, None])):
                core[:, left + rest[:, None], right + rest] += share * by_left * by_right * matrix
    points = (head.score.double() * back[..., None]).expand_as(head.odd)
    rows = torch.cat([head.odd.double(), points], 1)  # (b, 2m, k)
    squares = squares.expand(batch, -1, -1)
    gram = torch.cat([torch.cat([grams.odd, by_draws], 2), torch.cat([by_draws.mT, squares], 2)], 1)
    changed, noisy = (
        rows[:, :m] - torch.lerp(mean, own, share) @ rows for share in (1 - m / k, (1 - m / k) ** OUT_OF_SAMPLE)
    )
    return changed, noisy, _orthonormal(core, rows, gram), constant


def _orthonormal(core: Tensor, rows: Tensor, gram: Tensor) -> Known:
    """RᵀCR with nearly orthonormal rows, so that it can be rounded; `gram` is RRᵀ."""
    size = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    size = torch.where(size > 0, size, 1.0)
    gram = gram / size[:, :, None] / size[:, None]
    gram.diagonal(dim1=-2, dim2=-1).add_(JITTER)
    root = torch.linalg.cholesky(gram) * size[:, :, None]  # R = root · U
    return Known(root.mT @ core @ root, torch.linalg.solve_triangular(root, rows, upper=False))


def _among(stats: Statistics, head: Rows, rows: Tensor) -> Statistics:
    """The statistics of some rows of a block alone."""
    m = len(rows)
    stream = tuple((DrawRange(ranges[0].seed, 0, m),) for ranges in stats.stream)
    some = head.each(lambda t: t[:, rows])
    return replace(stats, head=some, n=torch.full_like(stats.n, m), stream=stream, known=None, tails=None)
