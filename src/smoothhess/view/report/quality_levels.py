"""Rates the quality figures of a result: one verdict in a few words, and a level and an explanation of each figure.

All figures are those of the unbiased estimate, to which the values, their order and their intervals on a page belong.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from smoothhess.estimate.stein_check import combined
from smoothhess.explainers.result_warnings import STEIN_LIMIT, STEIN_ROWS
from smoothhess.result.interactions import SampledResult
from smoothhess.result.pairs import relative_width
from smoothhess.result.shown_estimate import error_text, shown

if TYPE_CHECKING:
    from smoothhess.result.result import Result

ERROR_GOOD, ERROR_FAIR = 0.1, 0.3  # largest relative error that is rated good, or fair
TWO_SIDED = 1.96  # standard errors in half of a 95 % interval of a normal distribution
R2_GOOD, R2_FAIR = 0.8, 0.5  # smallest R² that is rated good, or fair


class Reading(NamedTuple):
    """One quality figure: `level` is "good", "fair", "poor" or "plain" (not rated)."""

    name: str
    figure: str
    level: str
    verdict: str
    meaning: str


class Verdict(NamedTuple):
    """The quality of all numbers of one example in a few words; `level` as in `Reading`."""

    level: str
    words: str


def verdict(one: Result) -> Verdict:
    """Return the one verdict on a result of one example; a failed check takes precedence over the error.

    >>> import torch, smoothhess as sh
    >>> result = sh.SmoothHess(lambda x: x[:, 0] * x[:, 1]).attribute(torch.zeros(1, 3), sigma=0.5, n_calls=400)
    >>> verdict(result).level
    'good'
    """
    own = shown(one)
    error = _error(own)
    if own.design == "exact" and error.figure == "0":
        return Verdict("plain", "exact: not sampled")
    if error.figure == "unknown":
        return Verdict("poor", "error unknown")
    if _self_check(own).level == "poor":
        return Verdict("poor", "gradients do not fit the values")
    if any(reading.level == "poor" for reading in _effective(own)):
        return Verdict("poor", f"error {error.figure}, but a few draws decide")
    words = f"error {error.figure}: {error.level}"
    if (share := _strongest_error(own)) > max(ERROR_GOOD, 2 * float(own.relative_error[0])):
        level = "fair" if error.level == "good" and share <= ERROR_FAIR else "poor"
        return Verdict(level, f"error {error.figure}, but the strongest pair ± {100 * TWO_SIDED * share:.0f} %")
    if float(own.r2[0]) < R2_FAIR:  # a small error of numbers that describe little is no good news
        level = "fair" if error.level == "good" else error.level
        return Verdict(level, f"{words}; pairs explain {100 * max(0.0, float(own.r2[0])):.0f} %")
    return Verdict(error.level, words)


def _strongest_error(own: Result) -> float:
    """Half of the strongest pair's 95 % interval, as a share of its value, in standard errors of a normal distribution.

    It is 0 where no pair is significant.

    The error of the matrix can be much smaller: it counts the diagonal, which may be larger than all pairs, as that of
    the tokens of a text often is.
    """
    pair = next(iter(own.top_pairs(1)[0]), None)
    return relative_width(pair) if pair is not None and pair.significant else 0.0


def readings(one: Result) -> list[Reading]:
    """Return the quality figures of a result of one example."""
    own = shown(one)
    return [_error(own), _r2(own), _calls(own), *_effective(own), _self_check(own), *_denoised(one)]


def _error(own: Result) -> Reading:
    """Rate the relative error of an unbiased matrix."""
    name = "Relative error"
    error = float(own.relative_error[0])
    meaning = (
        "The sampling error of all entries of the matrix together, as a share of its size (Frobenius norm), with the "
        "diagonal: where that is much larger than the pairs, their own errors are larger, see ±. It belongs to the "
        "numbers of this page, their order and their intervals."
    )
    if own.design == "exact" and error == 0:
        return Reading(name, "0", "plain", "not sampled", "Exact results have no sampling error.")
    if isinstance(own, SampledResult) and not float(own.noise.df[0]):
        return Reading(name, "unknown", "poor", "too few draws for an estimate", f"{meaning} Use more calls.")
    figure = "under 0.1 %" if 0 < error < 1e-3 else error_text(error)
    if error <= ERROR_GOOD:
        return Reading(name, figure, "good", "precise", meaning)
    if error <= ERROR_FAIR:
        return Reading(name, figure, "fair", "rough", f"{meaning} Rely on the strongest pairs only, or use more calls.")
    words = "noisy" if error < 1 else "mostly noise"
    more = "Rely on pairs marked significant only, or use more calls: twice the precision needs four times the calls."
    return Reading(name, figure, "poor", words, f"{meaning} {more}")


def _r2(own: Result) -> Reading:
    name, r2 = "R²: do pairs suffice?", float(own.r2[0])
    if math.isnan(r2):
        words = "not available" if own.grouping is None else "not available for groups"
        return Reading(name, "unknown", "plain", words, "The share of the gradient's changes that pairs explain.")
    figure = f"{r2:.2f}"
    meaning = f"Pairs explain {100 * max(0.0, r2):.0f} % of how the gradient of the output changes around this input"
    if r2 >= R2_GOOD:
        return Reading(name, figure, "good", "pairs explain most of it", f"{meaning}.")
    meaning += (
        "; the remainder comes from three or more features at once, or from sharp bends. The numbers here are correct "
        "averages over the noise, but do not describe the output completely. What to do: smoothhess.diagnose lists R² "
        "for each σ; choose one with a larger R², usually a smaller σ."
    )
    if r2 >= R2_FAIR:
        return Reading(name, figure, "fair", "pairs explain part of it", meaning)
    return Reading(name, figure, "poor", "pairs explain little of it", meaning)


def _calls(own: Result) -> Reading:
    level, words = {
        "tolerance": ("plain", "stopped at the requested precision"),
        "calls": ("plain", "as requested"),
        "zero": ("plain", "no interaction detected"),
        "unknown": ("poor", "error unknown"),
        "budget": ("plain", "stopped at the limit of calls"),
        "exact": ("plain", "not sampled"),
    }.get(own.status[0], ("plain", own.status[0]))
    figure = f"{int(own.n_calls[0]):,}".replace(",", "\u202f")
    return Reading("Calls", figure, level, words, "Gradient evaluations of the network at perturbed inputs.")


def _denoised(one: Result) -> list[Reading]:
    """Describe the denoised matrix that `hessian` is in Python, which a page does not show."""
    if not one.shrink:
        return []
    meaning = (
        "In Python, result.hessian is denoised: its error as a matrix is smaller, but it has no intervals. Only the "
        "directions are those of this matrix; all other numbers are those of the unbiased estimate."
    )
    stops = {
        "tolerance": " The requested precision is that of the denoised matrix.",
        "budget": " The requested precision, that of the denoised matrix, was not reached.",
    }
    figure = error_text(float(one.relative_error[0]))
    return [
        Reading("Denoised matrix", figure, "plain", "used for directions only", meaning + stops.get(one.status[0], ""))
    ]


def _effective(own: Result) -> list[Reading]:
    """Rate the effective number of draws of a sampled result."""
    if not isinstance(own, SampledResult):
        return []
    meaning = "Number of equal draws that would carry the estimate as evenly as the draws did."
    figure = f"{float(own.n_eff[0]):.0f} of {int(own.statistics.n[0])}"
    if not bool(own.estimate.has_heavy_tails[0]):
        return [Reading("Effective draws", figure, "good", "no single draw decides", meaning)]
    meaning += " Standard errors are unreliable. Explain a logit, or use a larger σ or more calls."
    return [Reading("Effective draws", figure, "poor", "a few draws decide", meaning)]


def _self_check(own: Result) -> Reading:
    meaning = "Tests whether the gradients are consistent with the values: two identities that must hold, as a z-score."
    z = float(combined(own.stein_z)[0])
    if math.isnan(z) or own.design == "exact":
        return Reading("Self-check", "unknown", "plain", "not available", meaning)
    rows = float(own.statistics.n[0]) if isinstance(own, SampledResult) else STEIN_ROWS
    if z <= STEIN_LIMIT * max(1.0, STEIN_ROWS / rows):  # as the warning of `attribute`
        return Reading("Self-check", f"|z| {z:.1f}", "good", "gradients consistent with values", meaning)
    doubt = "Possible causes: discontinuities, detached or straight-through gradients."
    return Reading("Self-check", f"|z| {z:.1f}", "poor", "gradients inconsistent with values", f"{meaning} {doubt}")
