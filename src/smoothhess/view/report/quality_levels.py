"""Rates the quality figures of a result: a level, a verdict, and an explanation of each figure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from smoothhess.estimate.effective_draws import heavy_tails
from smoothhess.estimate.stein_check import combined
from smoothhess.result.interactions import SampledResult

if TYPE_CHECKING:
    from smoothhess.result.result import Result

ERROR_GOOD, ERROR_FAIR = 0.1, 0.3  # largest relative error that is rated good, or fair
R2_GOOD, R2_FAIR = 0.8, 0.5  # smallest R² that is rated good, or fair
SELF_CHECK = 5.0  # |z| above which gradients and values are inconsistent


class Reading(NamedTuple):
    """One quality figure: `level` is "good", "fair", "poor" or "plain" (not rated)."""

    name: str
    figure: str
    level: str
    verdict: str
    meaning: str


def readings(one: Result, unbiased: bool = False) -> list[Reading]:
    """Return the quality figures of a result of one example; `unbiased` where the denoised matrix is not shown."""
    return [_error(one, unbiased), _r2(one), _calls(one), *_effective(one), _self_check(one)]


def _error(one: Result, unbiased: bool) -> Reading:
    """Rate the relative error of the unbiased matrix, to which pairs and intervals belong."""
    error = float(one.unshrunk().relative_error[0])
    meaning = "The estimated error of the matrix in the Frobenius norm, relative to the norm of the matrix."
    if one.design == "exact" and error == 0:
        return Reading(
            "Relative error", "0", "plain", "not sampled", f"{meaning} Exact results have no sampling error."
        )
    if isinstance(one, SampledResult) and not float(one.noise.df[0]):
        return Reading(
            "Relative error", "unknown", "poor", "too few draws for an estimate", f"{meaning} Use more calls."
        )
    figure = _percent(error)
    if one.shrink and not unbiased:
        denoised = _percent(float(one.relative_error[0]))
        meaning += " It is the error of the unbiased matrix, to which pairs and intervals belong;"
        meaning += f" the error of the denoised matrix, which ranks the pairs, is {denoised}."
    if error <= ERROR_GOOD:
        return Reading("Relative error", figure, "good", "precise", meaning)
    if error <= ERROR_FAIR:
        return Reading("Relative error", figure, "fair", "rough", f"{meaning} Only the strongest pairs are reliable.")
    verdict = "noisy" if error < 1 else "mostly noise"
    more = "Use more calls; with this error, only pairs marked significant are reliable."
    return Reading("Relative error", figure, "poor", verdict, f"{meaning} {more}")


def _percent(error: float) -> str:
    if math.isnan(error):
        return "unknown"
    return f"{100 * error:.3g} %" if math.isfinite(error) else "over 100 %"  # the noise exceeds the signal


def _r2(one: Result) -> Reading:
    meaning = (
        "Share of the gradient's variation around the input that pairs account for; the remainder is of higher order."
    )
    r2 = float(one.r2[0])
    if math.isnan(r2):
        verdict = "not available" if one.grouping is None else "not available for groups"
        return Reading("R²", "unknown", "plain", verdict, meaning)
    figure = f"{r2:.2f}"
    if r2 >= R2_GOOD:
        return Reading("R²", figure, "good", "pairs account for most of it", meaning)
    if r2 >= R2_FAIR:
        return Reading("R²", figure, "fair", "pairs account for part of it", meaning)
    meaning += " It depends on σ: compare scales with smoothhess.sweep."
    return Reading("R²", figure, "poor", "pairs account for little of it", meaning)


def _calls(one: Result) -> Reading:
    level, verdict = {
        "tolerance": ("good", "requested precision reached"),
        "calls": ("plain", "as requested"),
        "zero": ("good", "no interaction detected"),
        "unknown": ("poor", "error unknown"),
        "budget": ("poor", "requested precision not reached"),
        "exact": ("plain", "not sampled"),
    }.get(one.status[0], ("plain", one.status[0]))
    figure = f"{int(one.n_calls[0]):,}".replace(",", "\u202f")
    meaning = "Gradient evaluations of the network at perturbed inputs."
    if one.shrink and one.status[0] in ("tolerance", "budget"):
        denoised = _percent(float(one.relative_error[0]))
        meaning += f" The requested precision is that of the denoised matrix, {denoised}."
    return Reading("Calls", figure, level, verdict, meaning)


def _effective(one: Result) -> list[Reading]:
    """Rate the effective number of draws of a sampled result."""
    if not isinstance(one, SampledResult):
        return []
    meaning = "Number of equal draws that would carry the estimate as evenly as the draws did."
    figure = f"{float(one.n_eff[0]):.0f} of {int(one.statistics.n[0])}"
    if not bool(heavy_tails(one.statistics, one.grouping is not None)[0]):
        return [Reading("Effective draws", figure, "good", "no single draw decides", meaning)]
    meaning += " Standard errors are unreliable. Explain a logit, or use a larger σ or more calls."
    return [Reading("Effective draws", figure, "poor", "a few draws decide", meaning)]


def _self_check(one: Result) -> Reading:
    meaning = "Tests whether the gradients are consistent with the values: two identities that must hold, as a z-score."
    z = float(combined(one.stein_z)[0])
    if math.isnan(z) or one.design == "exact":
        return Reading("Self-check", "unknown", "plain", "not available", meaning)
    if z <= SELF_CHECK:
        return Reading("Self-check", f"|z| {z:.1f}", "good", "gradients consistent with values", meaning)
    doubt = "Possible causes: discontinuities, detached or straight-through gradients."
    return Reading("Self-check", f"|z| {z:.1f}", "poor", "gradients inconsistent with values", f"{meaning} {doubt}")
