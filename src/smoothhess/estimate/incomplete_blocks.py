"""Incomplete orthogonal blocks: the correction that keeps their estimate unbiased, and the variance it leaves.

Take one block of orthonormal directions q_1 … q_m, m < k, and let α_i = q_i·γ_i/R_i be the slope of the gradient along
its own direction, with mean tr(W)/k. The plain estimate (k/m) Σ q_i (γ_i/R_i)ᵀ errs by a((k/m)P − I) for W = aI, P the
projector on the directions, and its antisymmetric half does not show it. The corrected estimate

    Ŵ = (k/m) Σ q_i (γ_i/R_i − b_i q_i)ᵀ + â I,      b_i = ((k−1) â_{−i} + α_i)/k,

with â the mean of all α and â_{−i} that of the other rows, is unbiased for any function, exact for W = aI, and equal to
the plain estimate on a complete block. docs/theory.md has the proof and the variance that belongs to it.

This module knows rows and their blocks; what is made of them is in `unbiased` (the estimate) and `noise` (its error).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from smoothhess.draws.designs import SMALL
from smoothhess.estimate.statistics import DrawRange, Statistics

RADIAL = 1.5  # see `_radial_variance`
DEGREES = (1, 4)  # of the part of a function that is not quadratic: kinks, and the first term of a smooth one
_TINY = 1e-300
QUADRATIC, ROUNDING = 1e-6, 64  # agreement of values and slopes, relative and in units in the last place of f(x)


@dataclass(frozen=True, eq=False)
class Correction:
    """What is done about the incomplete blocks of B examples."""

    slope: Tensor  # (B, P) b_i of each row of the head, 0 in complete blocks
    lift: Tensor  # (B, P) â of the block that a row of the head belongs to, 0 in complete blocks
    constant: Tensor  # (B,) the multiple of the identity that is added back, on average over all rows
    mean: Tensor  # (B,) tr(W)/k of what is sampled
    corrected: Tensor  # (B,) Σ (m/n)² C over corrected blocks, C as in `_spread`
    plain: Tensor  # (B,) the same over incomplete blocks that could not be corrected
    wobble: Tensor  # (B,) variance that the error of â adds to the projector's
    radial: Tensor  # (B,) variance of â from the lengths of the rows, which the antisymmetric half cannot show

    @cached_property
    def is_needed(self) -> bool:
        """Whether any row is corrected."""
        return bool((self.slope != 0).any())

    @cached_property
    def has_variance(self) -> bool:
        """Whether anybody's estimate has variance that its antisymmetric half does not show."""
        return any(bool(t.any()) for t in (self.corrected, self.plain, self.radial))


def pieces(stream: Sequence[DrawRange], size: int) -> list[tuple[int, int]]:
    """First and last + 1 row of each part of a block of `size` rows, in the order in which the rows were drawn.

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


def correct(stats: Statistics, allowed: bool = True) -> Correction:
    """The correction of each example, from the slopes of its rows along their own directions.

    It is not `allowed` where mean curvature in whitened coordinates is far from that of features: with correlated noise
    it would bring noise into directions in which the plain estimate has none.
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
    radial = torch.where(_is_quadratic(stats), 0.0, _radial_variance(stats, variance, inside)) / n
    return Correction(slope, lift, constant, mean, corrected, plain, wobble * variance, radial)


def _radial_variance(stats: Statistics, variance: Tensor, inside: Tensor) -> Tensor:
    """Variance of α over the lengths R of rows, from what depends on R in all directions alike, (B,).

    Along a row the part of f of degree p has α = p w f/k, so that d = α − 2wf/k leaves out the quadratic part, however
    much it varies between directions, and is (p − 2)/p of the others'. Its mean over directions grows as R^(p−2), with
    Var(ln R) = 1/(2(k + 2)): Var(α) = (p d)²/(2(k + 2)). p is read off the slope of d; kinks have p = 1, quartics 4.

    With a control variate the values are not those of the slopes; then α may vary by a multiple RADIAL of what a linear
    field or evenly spread noise makes it vary before the rest counts.
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


def _is_quadratic(stats: Statistics) -> Tensor:
    """Whether values and slopes of every row are those of a quadratic function, w f = k α/2, (B,).

    With a control variate the slopes are not those of the function, and nothing is said.
    """
    head = stats.head
    value, slope = head.value_even.double(), head.along.double() * stats.rank / 2
    rounding = torch.finfo(head.odd.dtype).eps * head.weight.double() * stats.value.double().abs()[:, None]
    agree = ((value - slope).abs() <= QUADRATIC * (value.abs() + slope.abs()) + ROUNDING * rounding).all(1)
    return agree & stats.has_own_values


def _alike(stats: Statistics, k: int) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Examples whose blocks begin and end at the same rows, with these rows."""
    found: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for example, stream in enumerate(stats.stream):
        found.setdefault(tuple((s.start % k, s.stop - s.start) for s in stream), []).append(example)
    return [(examples, pieces(stats.stream[examples[0]], k)) for examples in found.values()]


def _spread(m: int, k: int) -> float:
    """C = k²c/2m² with c = m(k − m)/(k(k − 1)(k + 2)), the second moment of a random projector of rank m."""
    return k * (k - m) / (2 * m * (k - 1) * (k + 2))


class Values(NamedTuple):
    """uᵀHu, vᵀHv and uᵀHv of what is sampled, (B, …) each."""

    left: Tensor
    right: Tensor
    mixed: Tensor


class Gram(NamedTuple):
    """|q_u|², |q_v|² and q_u·q_v of the whitened directions, (1 or B, …) each."""

    left: Tensor
    right: Tensor
    mixed: Tensor


def missing_variance(correction: Correction, values: Values, gram: Gram, k: int) -> Tensor:
    """What the antisymmetric half cannot show of Var(uᵀĤv).

    For a linear field γ = Wz the variance of one incomplete block is, with W without its trace where it is corrected,

        C [½(|u|²|Wv|² + |v|²|Wu|²) + (u·v) Wu·Wv + (1 − 4/k) W_uv² + W_uu W_vv],

    of which the antisymmetric half shows the first two terms of the traceless part.
    """

    def each(numbers: Tensor) -> Tensor:
        return numbers.reshape(-1, *[1] * (values.mixed.ndim - 1))

    a = each(correction.mean)
    left, right, mixed = (w - a * g for w, g in zip(values, gram, strict=True))  # of W₀ = W − aI
    square, own = gram.mixed.square(), gram.left * gram.right
    variance = each(correction.corrected + correction.plain) * ((1 - 4 / k) * mixed.square() + left * right)
    if bool(correction.plain.any()):  # the same formula for W₀ + aI, less that for W₀
        rest = (1 - 2 / k) * (2 * mixed * gram.mixed + a * square) + left * gram.right + right * gram.left + a * own
        variance = variance + each(correction.plain) * 2 * a * rest
    variance = variance + each(correction.wobble) * (own + (1 - 2 / k) * square)
    return variance + each(correction.radial) * k / (k + 2) * (own + 2 * square)
