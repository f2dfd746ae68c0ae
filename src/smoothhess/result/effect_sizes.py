"""Sizes of interactions: shares of the separate effects of both features and of the output's change, and their words.

For independent noise δ_i of standard deviation σ_i, the Hermite expansion of f(x + δ) has orthogonal terms, and the
coefficients of first and second order are the gradient G and the Hessian H of the smoothed function. So

    Var f(x + δ) = Σ_i S_i² + Σ_{i<j} (H_ij σ_i σ_j)² + terms of higher order,   S_i² = G_i² σ_i² + H_ii² σ_i⁴ / 2,

where S_i is the standard deviation of what feature i contributes by itself, up to second order. The sizes of a pair are

    |H_ij| σ_i σ_j / (S_i² + S_j²)^½    its share of the separate effects, and
    |H_ij| σ_i σ_j / sd f(x + δ)        its share of the change of the output.

The word for the size of a pair is that of the smaller share: an interaction is large only if it is so in both ways.
The standard deviation of the output is that of the sampled values. Where the values were not sampled with these moves
(groups, other scales, exact results) it is the sum of the terms of first and second order. Pairs are ranked in `pairs`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smoothhess.draws.gaussian import SegmentShift
from smoothhess.estimate import fit_quality
from smoothhess.estimate.hessian_estimate import HessianEstimate

Result = Any  # a `Result`: its method `top_pairs` calls these functions
Pair = Any  # a `smoothhess.result.pairs.Pair`

WORDS = ((0.01, "tiny"), (0.1, "small"), (0.5, "moderate"))  # shares below a limit have its word; others are "large"
LARGE = "large"
MANY_TIMES = 1000.0  # largest multiple of the separate effects that is printed as a number


@dataclass(frozen=True, eq=False)
class EffectSizes:
    """The separate effects of the features of B examples, and the change of their output, in units of the output."""

    moves: Tensor  # (B, d) σ_i
    separate: Tensor  # (B, d) S_i²
    variance: Tensor  # (B, d) variance of S_i²
    output: Tensor  # (B,) standard deviation of the output

    @staticmethod
    def of(result: Result, scales: Tensor | None = None) -> EffectSizes:
        """The sizes for features that move by their σ, or by `scales` (d,) in place of it."""
        own = result.feature_scales if scales is None else scales.reshape(1, -1)
        moves = own.to(result.device, torch.float64).expand(len(result), -1)
        slope, bend = result.source.gradient.double() * moves, result.source.unbiased.diagonal() * moves.square()
        of_slope = (result.noise.of_gradient().value * moves.square()).nan_to_num(nan=torch.inf)
        of_bend = (result.noise.of_diagonal().value * moves**4).nan_to_num(nan=torch.inf)
        separate = slope.square() + bend.square() / 2
        variance = _product(4 * slope.square(), of_slope) + _product(bend.square(), of_bend)
        output = _of_terms(result, moves, slope, of_slope)
        if scales is None and _values_have_these_moves(result):
            sampled = fit_quality.value_variance(result.statistics).sqrt()
            output = torch.where(sampled.isfinite() & (sampled > 0), sampled, output)
        return EffectSizes(moves, separate, variance, output)

    def of_pair(self, example: int, p: Pair) -> Pair:
        """The pair with its sizes."""
        both = math.sqrt(float(self.separate[example, [p.i, p.j]].sum()))
        variance = float(self.variance[example, [p.i, p.j]].sum())
        spread = float(self.output[example])
        effect, half = abs(p.effect), (p.high - p.low) / 2
        move = float(self.moves[example, p.i] * self.moves[example, p.j])
        share, output = _ratio(effect, both), _ratio(effect, spread)
        stderr = math.nan
        if both > 0:
            relative = math.sqrt(variance) / (2 * both**2)  # standard error of both, relative to it
            stderr = math.hypot(move * p.stderr / both, share * relative if share else 0.0)
        word = size_word(share, output)
        if not math.isfinite(half):
            word = "unknown"
        elif half > 0 and p.low <= 0 <= p.high:
            most = effect + move * half
            word = f"at most {size_word(_ratio(most, both), _ratio(most, spread))}"
        return p._replace(separate_share=share, separate_share_stderr=stderr, output_share=output, size=word)


def with_sizes(pairs: list[list[Pair]], result: Result, scales: Tensor | None = None) -> list[list[Pair]]:
    """The pairs of each example with their sizes; those of an attribution, which is not a derivative, have none."""
    if not hasattr(result, "taylor"):
        return pairs
    sizes = EffectSizes.of(result, scales)
    return [[sizes.of_pair(example, p) for p in own] for example, own in enumerate(pairs)]


def size_word(separate_share: float, output_share: float = math.nan) -> str:
    """The word for the smaller share; one that is NaN is left out.

    >>> [size_word(share) for share in (0.0, 0.004, 0.03, 0.2, 0.5, float("inf"))]
    ['none', 'tiny', 'small', 'moderate', 'large', 'large']
    >>> size_word(20.0, 0.03)
    'small'
    """
    share = separate_share if math.isnan(output_share) else min(separate_share, output_share)
    return next((word for limit, word in WORDS if share < limit), LARGE) if share else "none"


def share_text(share: float) -> str:
    """A share as text.

    >>> share_text(0.0042), share_text(0.317), share_text(3.21), share_text(1e-7), share_text(float("nan"))
    ('0.42 %', '32 %', '3.2 times', 'under 0.01 %', 'unknown')
    """
    if math.isnan(share):
        return "unknown"
    if share >= MANY_TIMES:
        return f"over {MANY_TIMES:.0f} times"
    if share >= 2:
        return f"{share:.2g} times" if share < 10 else f"{share:.0f} times"
    if 0 < share < 1e-4:
        return "under 0.01 %"
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def size_sentence(p: Pair) -> str:
    """The size of a pair in words; empty for an attribution.

    >>> from smoothhess import Pair
    >>> pair = Pair(0, 1, ("a", "b"), 1.0, 0.1, 0.8, 1.2, 0.5, 0.01, True)
    >>> size_sentence(pair._replace(separate_share=0.004, output_share=0.001, size="tiny"))
    '0.4 % of their separate effects and 0.1 % of the output’s change (tiny)'
    """
    if not p.size:
        return ""
    parts = [f"{share_text(p.separate_share)} {'' if p.separate_share >= 2 else 'of '}their separate effects"]
    if math.isinf(p.separate_share):
        parts = []  # they are zero
    if not math.isnan(p.output_share):
        parts.append(f"{share_text(p.output_share)} of the output’s change")
    return f"{' and '.join(parts)} ({p.size})"


def groups_are_segments(result: Result) -> bool:
    """Whether each group of the result is one of the segments that the noise shifts."""
    gaussian, grouping = result.gaussian, result.grouping
    if grouping is None or not isinstance(gaussian, SegmentShift):
        return False
    moving = gaussian.sigmas[gaussian.mask] > 0
    group, segment = grouping.mask[0][moving], gaussian.mask[moving]
    pairs = torch.unique(group * len(gaussian.sigmas) + segment)
    return len(pairs) == len(torch.unique(group)) == len(torch.unique(segment))


def _values_have_these_moves(result: Result) -> bool:
    """Whether the values were sampled while the features, or groups, of the result moved by their scales."""
    return isinstance(result.source, HessianEstimate) and (result.grouping is None or groups_are_segments(result))


def _of_terms(result: Result, moves: Tensor, slope: Tensor, of_slope: Tensor) -> Tensor:
    """Standard deviation of the terms of first and second order, without their noise, (B,)."""
    first = (slope.square() - of_slope).sum(-1).clamp_min(0)
    scaled = result.source.unbiased.dense().double() * moves[:, :, None] * moves[:, None]
    noise = result.noise.of_entries().value * (moves[:, :, None] * moves[:, None]).square()
    second = (scaled.square() - noise).sum((-1, -2)).clamp_min(0) / 2
    known = of_slope.isfinite().all(-1) & noise.isfinite().all(-1).all(-1)
    return torch.where(known, (first + second).sqrt(), torch.nan)


def _product(factor: Tensor, variance: Tensor) -> Tensor:
    """The product, 0 where a factor is 0 although the other is infinite."""
    return torch.where((factor == 0) | (variance == 0), 0.0, factor * variance)


def _ratio(effect: float, whole: float) -> float:
    """effect / whole; infinite if only `whole` is zero, 0 if both are, NaN if it is unknown."""
    return effect / whole if whole else 0.0 if effect == 0 else math.inf
