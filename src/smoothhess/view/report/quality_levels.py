"""How to read the quality figures: a level, a word for it, and what the figure means."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from smoothhess.estimate.stein_check import combined

if TYPE_CHECKING:
    from smoothhess.result.interactions import Interactions

LIMITS = (
    "The intervals are the Monte-Carlo error of this one network's smoothed Hessian. They do not say whether an "
    "interaction is real, stable or causal."
)

ERROR_GOOD, ERROR_FAIR = 0.1, 0.3  # relative error up to which the matrix is good, or fair
R2_GOOD, R2_FAIR = 0.8, 0.5  # R² from which pairs tell most, or half, of the story
SELF_CHECK = 5.0  # |z| beyond which gradients do not belong to the values


class Reading(NamedTuple):
    """One quality figure: `level` is "good", "fair", "poor" or "plain" (nothing to judge)."""

    name: str
    figure: str
    level: str
    verdict: str
    meaning: str


def readings(one: Interactions) -> list[Reading]:
    """The quality figures of a result of one example."""
    return [_error(one), _r2(one), _calls(one), _self_check(one)]


def _error(one: Interactions) -> Reading:
    """Of the unbiased matrix, which pairs and intervals are of; the denoised one's own error is said beside it."""
    error = float(one.unshrunk().relative_error[0])
    meaning = "How far the whole matrix is from the exact one, as a share of its size."
    if one.design == "exact" and error == 0:
        return Reading("Relative error", "0", "plain", "not sampled", f"{meaning} Nothing was drawn by chance here.")
    if one.design != "exact" and not float(one._noise.df[0]):
        return Reading("Relative error", "unknown", "poor", "too few draws to tell", f"{meaning} Take more calls.")
    figure = _percent(error)
    if one.shrink:
        denoised = _percent(float(one.relative_error[0]))
        meaning += " Pairs and intervals are of the unbiased matrix, whose error this is;"
        meaning += f" that of the denoised one, which ranks them, is {denoised}."
    if error <= ERROR_GOOD:
        return Reading("Relative error", figure, "good", "precise", meaning)
    if error <= ERROR_FAIR:
        return Reading("Relative error", figure, "fair", "rough", f"{meaning} Trust the strongest pairs alone.")
    verdict = "noisy" if error < 1 else "mostly noise"
    more = "Take more calls; until then, only pairs marked significant say something."
    return Reading("Relative error", figure, "poor", verdict, f"{meaning} {more}")


def _percent(error: float) -> str:
    if math.isnan(error):
        return "unknown"
    return f"{100 * error:.3g} %" if math.isfinite(error) else "over 100 %"  # the noise exceeds the signal


def _r2(one: Interactions) -> Reading:
    meaning = "Share of the gradient's change around the input that pairs account for; the rest is of higher order."
    r2 = float(one.r2[0])
    if math.isnan(r2):
        verdict = "not known here" if one.grouping is None else "not kept for sums over groups"
        return Reading("R²", "unknown", "plain", verdict, meaning)
    figure = f"{r2:.2f}"
    if r2 >= R2_GOOD:
        return Reading("R²", figure, "good", "pairs tell most of it", meaning)
    if r2 >= R2_FAIR:
        return Reading("R²", figure, "fair", "pairs tell part of it", meaning)
    meaning += " It depends on σ: smoothhess.sweep shows how."
    return Reading("R²", figure, "poor", "pairs tell little of it", meaning)


def _calls(one: Interactions) -> Reading:
    level, verdict = {
        "tolerance": ("good", "reached the precision asked for"),
        "calls": ("plain", "as many as asked for"),
        "zero": ("good", "no interaction seen anywhere"),
        "budget": ("poor", "stopped before the precision asked for"),
        "exact": ("plain", "not sampled"),
    }.get(one.status[0], ("plain", one.status[0]))
    figure = f"{int(one.n_calls[0]):,}".replace(",", "\u202f")
    meaning = "Gradients of the network taken at perturbed inputs."
    if one.shrink and one.status[0] in ("tolerance", "budget"):
        meaning += " The precision asked for is that of the denoised matrix."
    return Reading("Calls", figure, level, verdict, meaning)


def _self_check(one: Interactions) -> Reading:
    meaning = "Do the gradients belong to the values? Two identities that must hold, as a z-score."
    z = float(combined(one.stein_z)[0])
    if math.isnan(z) or one.design == "exact":
        return Reading("Self-check", "unknown", "plain", "not known here", meaning)
    if z <= SELF_CHECK:
        return Reading("Self-check", f"|z| {z:.1f}", "good", "gradients fit the values", meaning)
    doubt = "Look for jumps, detached or straight-through gradients."
    return Reading("Self-check", f"|z| {z:.1f}", "poor", "gradients do not fit the values", f"{meaning} {doubt}")
