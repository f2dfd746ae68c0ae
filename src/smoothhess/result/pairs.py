"""Pair: the strongest pairs of features, with names, confidence intervals and control of the false-discovery rate.

This module ranks pairs and computes their p- and q-values from an estimate and its variances. `Interactions.top_pairs`
is the public method; the variances are in `smoothhess.estimate.variance`, Student's t in
`smoothhess.estimate.student_t`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from smoothhess.estimate import student_t
from smoothhess.estimate.effective_draws import effective_number, tail_index
from smoothhess.estimate.statistics import Statistics
from smoothhess.estimate.variance import Variance
from smoothhess.linalg.memory import EXAMPLE_MATRICES


class Pair(NamedTuple):
    """The interaction of two features: the second-order effect on f of raising both, per unit of each."""

    i: int  # index of the first feature, i < j
    j: int
    names: tuple[str, str]
    value: float  # H_ij
    stderr: float  # standard error of the value
    low: float  # lower end of the confidence interval
    high: float  # upper end
    effect: float  # H_ij σ_i σ_j, in units of the output
    q_value: float  # smallest false-discovery rate at which the pair is significant
    significant: bool  # whether q_value is at most the q that was passed to `top_pairs`
    n_eff: float = math.nan  # effective number of draws that carry the sampled part of the value; NaN if not sampled
    tail_index: float = math.nan  # of their contributions; above 0.7 the standard error is unreliable


class Columns(NamedTuple):
    """The fields of `Pair` as tensors (B, k), for the strongest pairs of B examples, strongest first."""

    i: Tensor
    j: Tensor
    value: Tensor
    stderr: Tensor
    low: Tensor
    high: Tensor
    effect: Tensor
    q_value: Tensor
    significant: Tensor

    def named(self, labels: Iterator[Callable[[int], str]]) -> list[list[Pair]]:
        """A list of `Pair` for each example; takes the function from index to name of each of them."""
        rows = zip(*(column.tolist() for column in self), strict=True)
        return [
            [Pair(i, j, (label(i), label(j)), *rest) for i, j, *rest in zip(*columns, strict=True)]
            for columns, label in zip(rows, labels, strict=False)
        ]


TEMPORARIES = 16  # float64 numbers per pair that are in memory at the same time
PAIRS_AT_ONCE = 1024  # pairs whose contributions of all rows are in memory at the same time
STRETCH = 512  # pairs per part of a row in `_least_from`
FEW_PAIRS = 4 * student_t.NODES  # up to this number, computing the p-values is faster than making a table


class Entries(NamedTuple):
    """Entries (B, d, d) from which pairs are chosen and reported."""

    hessian: Tensor  # the numbers that are reported
    variance: Variance  # of `hessian`
    ranking: Tensor  # the numbers that pairs are ranked by
    chosen_elsewhere: bool = False  # whether `ranking` is independent of `hessian`


def strongest_pairs(
    entries: Entries, scales: Tensor, k: int, q: float, level: float, allowed: Tensor | None = None
) -> list[Columns]:
    """The k pairs i < j of each example with the largest |ranking_ij| σ_i σ_j, and their intervals.

    There is one item for each run of consecutive examples in which the same features have σ > 0. q-values count all
    pairs, or only the k pairs if they were chosen from independent draws. `allowed` (d, d) excludes pairs.
    """
    hessian, ranking, variance, df = entries.hessian, entries.ranking, entries.variance.value, entries.variance.df
    if k < 1 or not 0 < q < 1:
        raise ValueError(f"top_pairs needs k ≥ 1 and 0 < q < 1, got k={k}, q={q}.")
    b, d = hessian.shape[:2]
    if scales.shape[1] != d:
        raise ValueError(f"scales must have one number per feature, {d}, got {scales.shape[1]}.")
    scales = scales.to(hessian.device, torch.float64)
    moving, width = scales > 0, student_t.quantile(level, df.cpu()).to(df.device)
    df = df.clamp_min(0.05)
    tails = student_t.Tails.of(df) if d * (d - 1) // 2 > FEW_PAIRS else None
    step = EXAMPLE_MATRICES.items(8 * TEMPORARIES * (d * (d - 1) // 2), hessian.device)
    every = torch.triu_indices(d, d, 1, device=hessian.device)
    every = every if allowed is None else every[:, allowed[every[0], every[1]]]
    alike = [0, *(torch.nonzero((moving[1:] != moving[:-1]).any(1)).reshape(-1) + 1).tolist(), b]
    found = []
    for first, last in pairwise(alike):
        pairs = every[:, moving[first][every].all(0)]  # frozen features are excluded
        parts = []
        for start in range(first, last, step):
            rows = slice(start, min(start + step, last))
            value, rank, square = (x[rows][:, pairs[0], pairs[1]].double() for x in (hessian, ranking, variance))
            moves = scales[rows][:, pairs[0]] * scales[rows][:, pairs[1]]
            chosen = _largest((rank * moves).abs(), min(k, len(pairs[0])))
            stderr = square.sqrt()
            # 0/0 is an exact zero, which is not significant
            t = torch.where(value == 0, 0.0, value.abs() / stderr)
            p = student_t.two_sided_p(t, df[rows, None]) if tails is None else tails[rows](t)
            p = torch.where(torch.isfinite(stderr), p, 1.0)
            value, stderr, moves, own = (x.gather(1, chosen) for x in (value, stderr, moves, p))
            q_value = _q_values(own if entries.chosen_elsewhere else p, own)
            reach = torch.where(stderr == 0, 0.0, width[rows, None] * stderr)
            i, j = pairs[0][chosen], pairs[1][chosen]
            parts.append((i, j, value, stderr, value - reach, value + reach, value * moves, q_value, q_value <= q))
        found.append(Columns(*(torch.cat(c) for c in zip(*parts, strict=True))))
    return found


def with_effective_draws(pairs: list[list[Pair]], stats: Statistics) -> list[list[Pair]]:
    """The pairs of each example with `n_eff` and `tail_index`; `stats` are in the coordinates of the features.

    The contribution of a row to H_ij is (s_i γ_j + s_j γ_i)/2, of the residual where there is a control variate.
    """
    found = []
    for example, own in enumerate(pairs):
        n = int(stats.n_head[example])
        score = stats.head.score[example if len(stats.head.score) > 1 else 0, :n].double()
        odd, part = stats.head.odd[example, :n].double(), []
        for start in range(0, len(own), PAIRS_AT_ONCE):
            i, j = (torch.tensor([p[k] for p in own[start : start + PAIRS_AT_ONCE]], device=odd.device) for k in (0, 1))
            rows = (score[:, i] * odd[:, j] + score[:, j] * odd[:, i]).mT.abs()  # (pairs, n)
            number = effective_number(rows.square()) * stats.n[example] / max(n, 1)
            index = tail_index(rows, torch.full((len(rows),), n, device=rows.device))
            part += zip(number.tolist(), index.tolist(), strict=True)
        found.append([p._replace(n_eff=a, tail_index=b) for p, (a, b) in zip(own, part, strict=True)])
    return found


def _largest(strength: Tensor, k: int) -> Tensor:
    """Indices of the k largest numbers of each row, largest first; ties by index, NaN last, (b, k).

    >>> _largest(torch.tensor([[1.0, torch.nan, 3.0], [torch.nan, torch.nan, 0.0]]), 2)
    tensor([[2, 0],
            [2, 0]])
    """
    if not k:
        return strength.new_zeros(len(strength), 0, dtype=torch.long)
    strength = torch.where(strength.isnan(), -1.0, strength)  # strengths are not negative
    least = strength.topk(k).values[:, -1:]
    places = torch.nonzero(strength >= least)
    if len(places) > k * len(strength):  # ties beyond the k-th place
        above, equal = strength > least, strength == least
        places = torch.nonzero(above | (equal & (equal.cumsum(1) <= k - above.sum(1, keepdim=True))))
    places = places[:, 1].reshape(-1, k)
    return places.gather(1, strength.gather(1, places).argsort(descending=True, stable=True))


def _q_values(p: Tensor, own: Tensor) -> Tensor:
    """`benjamini_hochberg` of each row of (b, n), evaluated for a subset `own` (b, k) of its p-values."""
    if not own.numel():
        return own
    ordered = p.sort().values
    ranks = torch.arange(1, p.shape[1] + 1, device=p.device)
    return _least_from(
        (ordered * p.shape[1] / ranks).clamp_max(1), torch.searchsorted(ordered, own.contiguous(), right=True) - 1
    )


def _least_from(numbers: Tensor, places: Tensor) -> Tensor:
    """Minimum of each row of (b, n) over the numbers from each of the `places` (b, k) to the end."""
    if places.shape[1] * STRETCH > numbers.shape[1]:
        return numbers.flip(1).cummin(1).values.flip(1).gather(1, places)
    # cummin over single numbers is slow on a GPU: use the minima of the later stretches and the rest of the place's own
    padded = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % STRETCH), value=torch.inf)
    stretches = padded.unflatten(1, (-1, STRETCH))
    after = torch.nn.functional.pad(stretches.amin(2), (0, 1), value=torch.inf).flip(1).cummin(1).values.flip(1)
    stretch = places // STRETCH
    inside = stretches.gather(1, stretch[..., None].expand(-1, -1, STRETCH))
    later = torch.arange(STRETCH, device=places.device) >= (places % STRETCH)[..., None]
    return torch.minimum(torch.where(later, inside, torch.inf).amin(2), after.gather(1, stretch + 1))


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


def labels_of(names: Sequence[str] | None, d: int, feature_shape: tuple[int, ...]) -> Callable[[int], str]:
    """A function from the index of a feature to its name: the given name, or its index in the feature shape."""
    if names is not None:
        if len(names) != d:
            raise ValueError(f"names must have one name per feature, {d}, got {len(names)}.")
        return lambda i: str(names[i])
    if len(feature_shape) == 1:
        return str

    def index(i: int) -> str:
        coordinates = []
        for size in reversed(feature_shape):
            i, c = divmod(i, size)
            coordinates.append(str(c))
        return "(" + ", ".join(reversed(coordinates)) + ")"

    return index
