"""Correction of incomplete orthogonal blocks, and the part of their variance that the antisymmetric half lacks.

Take one block of orthonormal directions q_1 … q_m, m < k, and let α_i = q_i·γ_i/R_i be the slope of the gradient along
its own direction, with mean tr(W)/k. For W = aI the plain estimate (k/m) Σ q_i (γ_i/R_i)ᵀ has the error a((k/m)P − I),
with P the projector on the directions, and its antisymmetric half is zero. The corrected estimate

    Ŵ = (k/m) Σ q_i (γ_i/R_i − b_i q_i)ᵀ + â I,      b_i = ((k−1) â_{−i} + α_i)/k,

with â the mean of all α and â_{−i} the mean over the other rows, is unbiased for any function, exact for W = aI, and
equal to the plain estimate on a complete block. docs/theory.md has the proof and the variance.

This module computes the correction of rows and blocks. The estimate is in `unbiased_hessian`, its variance in
`variance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from smoothhess.draws.designs import SMALL
from smoothhess.estimate.quadratic_rows import is_quadratic
from smoothhess.estimate.statistics import DrawRange, Statistics

RADIAL = 1.5  # see `_radial_variance`
DEGREES = (1, 4)  # range of p for the part of f that is not quadratic: kinks, and the next even term of a smooth f
_TINY = 1e-300


@dataclass(frozen=True, eq=False)
class Correction:
    """The correction of the incomplete blocks of B examples, and its variances."""

    slope: Tensor  # (B, P) b_i of each row of the head, 0 in complete blocks
    lift: Tensor  # (B, P) â of the block of each row of the head, 0 in complete blocks
    constant: Tensor  # (B,) the multiple of the identity that is added back, averaged over all rows
    mean: Tensor  # (B,) tr(W)/k of the sampled W, without the control variate's expectation
    corrected: Tensor  # (B,) Σ (m/n)² C over corrected blocks, C as in `_spread`
    plain: Tensor  # (B,) the same sum over incomplete blocks that could not be corrected
    wobble: Tensor  # (B,) additional variance from the error of â
    radial: Tensor  # (B,) variance of â from the lengths of the rows, which the antisymmetric half does not contain

    @cached_property
    def is_needed(self) -> bool:
        """Whether any row is corrected."""
        return bool((self.slope != 0).any())

    @cached_property
    def is_incomplete(self) -> bool:
        """Whether any example has an incomplete block."""
        return any(bool(t.any()) for t in (self.corrected, self.plain))

    @cached_property
    def has_variance(self) -> bool:
        """Whether the estimate of any example has variance that its antisymmetric half does not contain."""
        return any(bool(t.any()) for t in (self.corrected, self.plain, self.radial))


def pieces(stream: Sequence[DrawRange], size: int) -> list[tuple[int, int]]:
    """First row and last row + 1 of each complete or partial block of `size` rows, in the order of the draws.

    >>> pieces([DrawRange(0, 0, 5), DrawRange(7, 2, 4)], 3)
    [(0, 3), (3, 5), (5, 6), (6, 7)]
    """
    ends, row = [], 0
    for segment in stream:
        start = segment.start
        while start < segment.stop:
            stop = min((start // size + 1) * size, segment.stop)
            ends.append((row, row + stop - start))
            row, start = row + stop - start, stop
    return ends


def has_complete_blocks(stats: Statistics) -> bool:
    """Whether the rows of every example are complete orthogonal blocks, over which the mean of s zᵀ is the identity."""
    k = stats.rank
    return (
        stats.design == "orthogonal"
        and k > SMALL
        and all(r.start % k == r.stop % k == 0 for stream in stats.stream for r in stream)
    )


def in_complete_blocks(stats: Statistics, rows: int) -> Tensor:
    """Which of the first `rows` rows belong to complete orthogonal blocks, (B, rows)."""
    inside = torch.zeros(len(stats), rows, dtype=torch.bool, device=stats.n.device)
    for examples, ends in _alike(stats, stats.rank):
        for first, last in ends:
            if last - first == stats.rank and last <= rows:
                inside[examples, first:last] = True
    return inside


def correct(stats: Statistics, allowed: bool = True) -> Correction:
    """The correction of each example, from the slopes of its rows along their own directions.

    It is not `allowed` for correlated Gaussians, under which the mean curvature in whitened coordinates differs much
    from that of features: there it would add noise in directions in which the plain estimate has none.
    """
    head, k = stats.head, stats.rank
    along = head.along.double()
    n, n_head = stats.n.clamp_min(1).double(), stats.n_head.clamp_min(1).double()
    slope, lift = torch.zeros_like(along), torch.zeros_like(along)
    constant, corrected, plain, wobble = (torch.zeros_like(n) for _ in range(4))
    mean = along.sum(1) / n_head
    if stats.design != "orthogonal" or k <= SMALL:
        return Correction(slope, lift, constant, mean, corrected, plain, wobble, torch.zeros_like(n))
    for examples, ends in _alike(stats, k):
        index = torch.tensor(examples, device=n.device)
        kept = int(stats.n_head[index[0]])
        for first, last in ends:
            m = last - first
            if m == k:
                continue
            share = (m / n[index]).square() * _spread(m, k)
            if m < 2 or last > kept or not allowed:
                plain[index] += share
                continue
            rows = along[index, first:last]
            trace = rows.mean(1, keepdim=True)  # â
            others = (m * trace - rows) / (m - 1)
            slope[index, first:last] = ((k - 1) * others + rows) / k
            lift[index, first:last] = trace
            constant[index] += trace[:, 0] * m / n[index]
            corrected[index] += share
            wobble[index] += 2 * share / (m - 1)
    inside = torch.arange(along.shape[1], device=n.device) < stats.n_head[:, None]
    variance = torch.where(inside, (along - mean[:, None]).square(), 0.0).sum(1) / (n_head - 1).clamp_min(1)
    radial = torch.where(is_quadratic(stats), 0.0, _radial_variance(stats, variance, inside)) / n
    return Correction(slope, lift, constant, mean, corrected, plain, wobble * variance, radial)


def _radial_variance(stats: Statistics, variance: Tensor, inside: Tensor) -> Tensor:
    """Variance of α over the lengths R of rows, from the part of f that depends on R equally in all directions, (B,).

    Along a row the part of f of degree p has α = p w f/k, so d = α − 2wf/k does not contain the quadratic part, however
    much that varies between directions, and is (p − 2)/p of α for the other parts. The mean of d over directions grows
    as R^(p−2), with Var(ln R) = 1/(2(k + 2)), hence Var(α) = (p d)²/(2(k + 2)). p is estimated from the slope of d;
    kinks have p = 1, quartics p = 4.

    With a control variate, values and slopes are those of different functions. Then the variance is that of α beyond
    RADIAL times the variance under a linear field or isotropic noise.
    """
    head, k = stats.head, stats.rank
    n = stats.n_head.clamp_min(1).double()
    without_values = (variance - RADIAL * 2 / k * head.across.double().sum(1) / n).clamp_min(0)

    def mean(rows: Tensor) -> Tensor:
        return torch.where(inside, rows, 0.0).sum(1) / n

    rest = head.along.double() - 2 / k * head.value_even.double()
    length = -head.weight.double().clamp_min(_TINY).log() / 2
    length = length - mean(length)[:, None]
    level = mean(rest)
    slope = mean(rest * length) / mean(length.square()).clamp_min(_TINY)
    p = (2 + slope / torch.where(level == 0, 1.0, level)).clamp(*DEGREES)
    with_values = torch.minimum((p * level).square() / (2 * (k + 2)), variance)
    return torch.where(stats.has_own_values, with_values, without_values)


def _alike(stats: Statistics, k: int) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Lists of examples whose blocks begin and end at the same rows, each with these rows."""
    found: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for example, stream in enumerate(stats.stream):
        found.setdefault(tuple((s.start % k, s.stop - s.start) for s in stream), []).append(example)
    return [(examples, pieces(stats.stream[examples[0]], k)) for examples in found.values()]


def _spread(m: int, k: int) -> float:
    """C = k²c/2m² with c = m(k − m)/(k(k − 1)(k + 2)), the second moment of a random projector of rank m."""
    return k * (k - m) / (2 * m * (k - 1) * (k + 2))


class Values(NamedTuple):
    """uᵀHu, vᵀHv and uᵀHv of the sampled H, without the control variate's expectation, (B, …) each."""

    left: Tensor
    right: Tensor
    mixed: Tensor


class Gram(NamedTuple):
    """|q_u|², |q_v|² and q_u·q_v of the whitened directions, (1 or B, …) each."""

    left: Tensor
    right: Tensor
    mixed: Tensor


def missing_variance(correction: Correction, values: Values, gram: Gram, k: int) -> Tensor:
    """The part of Var(uᵀĤv) that the antisymmetric half does not contain.

    For a linear field γ = Wz the variance of one incomplete block is, with the traceless part of W if it is corrected,

        C [½(|u|²|Wv|² + |v|²|Wu|²) + (u·v) Wu·Wv + (1 − 4/k) W_uv² + W_uu W_vv],

    of which the antisymmetric half contains the first two terms of the traceless part.
    """

    def each(numbers: Tensor) -> Tensor:
        return numbers.reshape(-1, *[1] * (values.mixed.ndim - 1))

    a = each(correction.mean)
    left, right, mixed = (w - a * g for w, g in zip(values, gram, strict=True))  # of W₀ = W − aI
    square, own = gram.mixed.square(), gram.left * gram.right
    variance = mixed.square().mul_(1 - 4 / k).add_(left * right).mul_(each(correction.corrected + correction.plain))
    if bool(correction.plain.any()):  # the formula for W₀ + aI minus that for W₀
        rest = (1 - 2 / k) * (2 * mixed * gram.mixed + a * square) + left * gram.right + right * gram.left + a * own
        variance = variance + each(correction.plain) * 2 * a * rest
    variance = variance.add_(each(correction.wobble) * (own + (1 - 2 / k) * square))
    return variance.add_(each(correction.radial) * k / (k + 2) * (own + 2 * square))
