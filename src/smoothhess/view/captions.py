"""Sentences of figures and pages: what is shown, what its colours mean, in which unit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from smoothhess.draws.gaussian import Diagonal, Isotropic, SegmentShift
from smoothhess.result.exact import Attribution

if TYPE_CHECKING:
    from smoothhess.result.interactions import Interactions

# the two ends of a colour bar, never broken into two lines
LESS_MORE = "←\u00a0less\u00a0·\u00a0more\u00a0→"
LOWERS_RAISES = "←\u00a0lowers\u00a0f\u00a0·\u00a0raises\u00a0f\u00a0→"
DOWN_UP = "←\u00a0down\u00a0·\u00a0up\u00a0→"
FALLS_RISES = "←\u00a0falls\u00a0·\u00a0rises\u00a0→"
NEGATIVE_POSITIVE = "←\u00a0negative\u00a0·\u00a0positive\u00a0→"
FAINT_WORDS = "faint: within noise (|z| < 2)"


def is_attribution(one: Interactions) -> bool:
    """Whether the numbers are no derivatives."""
    return isinstance(one, Attribution)


def noun(one: Interactions) -> str:
    """What the features of a result are, in the plural."""
    image = image_size(tuple(one.inputs.shape[1:])) is not None
    if one.grouping is not None:
        return "segments" if image else "groups"
    return "pixels" if image else "features"


def noise_sentence(one: Interactions, kind: str) -> str:
    """What the noise moved, and what a number means then; empty where each feature is looked at by itself.

    `kind` is "image", "series" or "table".
    """
    feature, group = {"image": ("pixel", "segment"), "series": ("sample", "window")}.get(kind, ("feature", "group"))
    grouping = one.grouping
    if one.design == "exact" or is_attribution(one) or (grouping is not None and grouping.direction is not None):
        return ""
    if isinstance(one.gaussian, SegmentShift):
        meaning = f"; a number for two {group}s is what they do when both move" if _by_segments(one) else ""
        return f"The noise moved whole {group}s, all {feature}s of one by the same shift{meaning}."
    shape = one.inputs.shape[1:]
    places = math.prod({"image": shape[-2:], "series": shape[-1:]}.get(kind, shape))
    if grouping is None or grouping.count >= places:
        return ""
    moved = f"{feature}s together, as its covariance says"
    if isinstance(one.gaussian, Isotropic | Diagonal):
        moved = f"every {feature} on its own"
    return f"The noise moved {moved}; a number for two {group}s is the sum over all pairs of their {feature}s."


def _by_segments(one: Interactions) -> bool:
    """Whether each group of the result is one of the segments that the noise moves."""
    gaussian, grouping = one.gaussian, one.grouping
    if grouping is None or not isinstance(gaussian, SegmentShift):
        return False
    moving = gaussian.sigmas[gaussian.mask] > 0
    group, segment = grouping.mask[0][moving], gaussian.mask[moving]
    pairs = torch.unique(group * len(gaussian.sigmas) + segment)
    return len(pairs) == len(torch.unique(group)) == len(torch.unique(segment))


def together(one: Interactions) -> tuple[str, str]:
    """What an interaction means, for a colour bar: a sentence with both ends, and the unit."""
    if is_attribution(one):
        return f"interaction by {method(one)}   {NEGATIVE_POSITIVE}", ""
    return (
        f"raising both raises f   {LESS_MORE}   than the sum of the parts",
        f"$H_{{ij}}$: extra change when both rise, {unit_words(one)}",
    )


def alone(one: Interactions, thing: str) -> tuple[str, str]:
    """What the gradient means, likewise; `thing` is what rises."""
    if is_attribution(one):
        return f"first-order part of {method(one)}   {NEGATIVE_POSITIVE}", ""
    return f"raising {thing} by itself   {LOWERS_RAISES}", f"{slope_word(one)}, per unit of it"


def bending(one: Interactions) -> tuple[str, str]:
    """What a number on the diagonal means, likewise."""
    if is_attribution(one):
        return f"interaction with itself by {method(one)}   {NEGATIVE_POSITIVE}", ""
    thing, unit = ("it", "per unit squared")
    if one.grouping is not None:
        thing, unit = "the whole group", "per unit of all its features, squared"
    return f"as {thing} rises, f bends   {DOWN_UP}", f"curvature $H_{{ii}}$, {unit}"


def method(one: Interactions) -> str:
    """How an exact result was made."""
    return getattr(one, "method", "") or "an exact method"


def image_size(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """(H, W) of an image-shaped input (H, W), (1, H, W) or (3, H, W); None of any other.

    >>> image_size((3, 32, 32)), image_size((30,)), image_size((1, 100))
    ((32, 32), None, None)
    """
    planar = len(shape) == 2 or (len(shape) == 3 and shape[0] in (1, 3))
    return (shape[-2], shape[-1]) if planar and min(shape[-2:]) > 1 else None


def unit_words(result: Interactions) -> str:
    """What a number of the Hessian is counted in."""
    if result.grouping is None:
        return "per unit of each feature"
    if result.grouping.direction is None:
        return "per unit of every feature of each group"
    return "when both groups move along the direction given"


def quality_words(result: Interactions) -> str:
    """The quality figures of a result of one example, on one line; the method's name where nothing was sampled."""
    if result.design == "exact":
        return getattr(result, "method", "") or "exact"
    error, r2, calls = float(result.relative_error[0]), float(result.r2[0]), int(result.n_calls[0])
    shown = f"relative error {100 * error:.1f} %" if np.isfinite(error) else "more noise than signal"
    words = [shown, f"{calls:,} calls".replace(",", "\u2009")]
    return ", ".join(words if np.isnan(r2) else [words[0], f"R² {r2:.2f}", words[1]])


def slope_word(result: Interactions) -> str:
    """What the gradient of a result is called."""
    return "gradient" if result.design == "exact" else "SmoothGrad"
