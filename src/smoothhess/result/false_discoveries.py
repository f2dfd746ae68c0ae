"""False-discovery rates: q-values of some statistics among many, by Benjamini and Hochberg.

This module takes |t| statistics and the function from |t| to p-values; which pairs are tested is decided in `pairs`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MANY = 512  # numbers per requested q-value from which only those that can decide are sorted
SHIFT = 17  # bits of a float32 that are dropped: numbers in a bucket differ by at most 1/64
FIRST = 0x35800000 >> SHIFT  # leading bits of 2⁻²⁰; smaller numbers share the first bucket
SLACK = 1e-3  # bound of the relative error of a p-value if |t| is rounded to float32


def q_values(t: Tensor, own: Tensor, p_value: Callable[[Tensor], Tensor]) -> Tensor:
    """The smallest false-discovery rates at which some of the tests with statistics |t| are significant.

    q(t) is the minimum of n p(t′)/#{|t| ≥ t′} over the statistics t′ ≤ t.

    Args:
        t: all statistics, (b, n), not negative.
        own: those whose q-values are computed, (b, k), a subset of each row of t.
        p_value: decreasing function from statistics (b, m) to p-values.

    Returns:
        q-values (b, k).

    >>> q_values(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([[3.0, 2.0]]), lambda t: 0.05 - 0.01 * t)
    tensor([[0.0400, 0.0400]])
    """
    if not own.numel():
        return own
    if own.shape[1] * MANY > t.shape[1]:
        ordered = t.sort(descending=True).values
        ranks = torch.arange(1, t.shape[1] + 1, device=t.device)
        return _least_below(ordered, p_value(ordered) * t.shape[1] / ranks, own)
    return _by_buckets(t, own, p_value)


def _least_below(ordered: Tensor, ratio: Tensor, own: Tensor) -> Tensor:
    """Minimum of the ratios of all statistics up to each of `own`; `ordered` is descending."""
    least = ratio.clamp_max(1).flip(1).cummin(1).values.flip(1)
    return least.gather(1, torch.searchsorted(-ordered, -own.contiguous()))


def _by_buckets(t: Tensor, own: Tensor, p_value: Callable[[Tensor], Tensor]) -> Tensor:
    """The same: buckets of similar |t| bound the ratios, and only buckets that can hold a minimum are sorted."""
    b, n = t.shape
    bucket, of_own = _buckets(t), _buckets(own)
    buckets = int(bucket.max()) + 1
    first = torch.arange(b, device=t.device)[:, None] * buckets
    count = torch.bincount((bucket + first).reshape(-1), minlength=b * buckets).reshape(b, -1)
    ranks = count.flip(1).cumsum(1).flip(1)  # of the smallest |t| of each bucket
    bits = torch.arange(FIRST, FIRST + buckets + 1, device=t.device, dtype=torch.int32) << SHIFT
    edges = bits.clamp_max(0x7F800000).view(torch.float32).double()  # at most infinity
    edges[0] = 0
    p = p_value(edges.expand(b, -1))
    low, high = (
        torch.where(count > 0, e * n / ranks.clamp_min(1), torch.inf)
        for e in (p[:, 1:] * (1 - SLACK), p[:, :-1] * (1 + SLACK))
    )
    # The minimum for a statistic is at most the best upper bound of the buckets below its own. Of all statistics above
    # a bucket, that with the fewest buckets below it has the largest such bound.
    bound = torch.nn.functional.pad(high.cummin(1).values, (1, 0), value=torch.inf).gather(1, of_own)
    allowed = torch.full_like(low, -torch.inf).scatter_reduce(1, of_own, bound, "amax")
    allowed = torch.nn.functional.pad(allowed.flip(1).cummax(1).values.flip(1)[:, 1:], (0, 1), value=-torch.inf)
    decides = (low <= allowed).scatter(1, of_own, True)
    flagged = decides.gather(1, bucket)
    skipped = torch.where(decides, 0, count).flip(1).cumsum(1).flip(1)  # larger |t| that are not flagged
    ordered = torch.where(flagged, t, -1.0).topk(int(flagged.sum(1).max())).values
    sizes = ordered.clamp_min(0)  # rows with fewer flagged numbers are padded
    rank = torch.arange(1, sizes.shape[1] + 1, device=t.device) + skipped.gather(1, _buckets(sizes))
    return _least_below(ordered, torch.where(ordered < 0, torch.inf, p_value(sizes) * n / rank), own)


def _buckets(t: Tensor) -> Tensor:
    """Indices that increase with t ≥ 0: the leading bits of its float32."""
    return ((t.float().view(torch.int32) >> SHIFT) - FIRST).clamp_min_(0).long()


def benjamini_hochberg(p: Tensor) -> Tensor:
    """q-values: the smallest false-discovery rate at which each p-value is significant.

    Args:
        p: p-values (n,).

    Returns:
        q-values (n,).

    >>> benjamini_hochberg(torch.tensor([0.01, 0.04, 0.03]))
    tensor([0.0300, 0.0400, 0.0400])
    """
    order = p.argsort(descending=True)
    ranks = torch.arange(len(p), 0, -1, device=p.device)
    q = (p[order] * len(p) / ranks).clamp_max(1).cummin(0).values
    return torch.empty_like(q).index_copy(0, order, q)
