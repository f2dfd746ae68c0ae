"""Text of figures and pages: names of the quantities, meaning of the colours, units.

Layout of the text belongs to `figures.title_layout`; judgements of the quality figures to `report.quality_levels`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from smoothhess.draws.gaussian import Diagonal, Isotropic, SegmentShift
from smoothhess.result.effect_sizes import groups_are_segments
from smoothhess.result.exact import Attribution
from smoothhess.result.shown_estimate import error_text, shown

if TYPE_CHECKING:
    from smoothhess.result.result import Result

# labels for the two ends of a colour bar; non-breaking spaces keep each on one line
LESS_MORE = "←\u00a0less\u00a0·\u00a0more\u00a0→"
LOWERS_RAISES = "←\u00a0lowers\u00a0f\u00a0·\u00a0raises\u00a0f\u00a0→"
DOWN_UP = "←\u00a0down\u00a0·\u00a0up\u00a0→"
FALLS_RISES = "←\u00a0falls\u00a0·\u00a0rises\u00a0→"
NEGATIVE_POSITIVE = "←\u00a0negative\u00a0·\u00a0positive\u00a0→"
FAINT_WORDS = "faint: within noise (|z| < 2)"


def is_attribution(one: Result) -> bool:
    """Whether the numbers are attributions and not derivatives."""
    return isinstance(one, Attribution)


def noun(one: Result) -> str:
    """Return the noun for a feature of a result."""
    if one.feature_kind and (one.grouping is None or one.grouping.count == one.inputs.shape[1]):
        return one.feature_kind
    image = image_of(one) is not None
    if one.grouping is not None:
        return "segment" if image else "group"
    return "pixel" if image else "feature"


def plural(word: str) -> str:
    """Return the plural of a noun of `noun`.

    >>> plural("token"), plural("patch")
    ('tokens', 'patches')
    """
    return f"{word}es" if word.endswith("ch") else f"{word}s"


def noise_sentence(one: Result, kind: str) -> str:
    """Describe what the noise shifts and what an interaction then means; empty for ungrouped features.

    `kind` is "image", "series" or "table".
    """
    feature, group = {"image": ("pixel", "segment"), "series": ("sample", "window")}.get(kind, ("feature", "group"))
    grouping = one.grouping
    if one.feature_kind:
        return _gate_sentence(one)
    if one.design == "exact" or is_attribution(one) or (grouping is not None and grouping.direction is not None):
        return ""
    if isinstance(one.gaussian, SegmentShift):
        meaning = f"; an interaction of two {group}s is the effect of shifting both" if groups_are_segments(one) else ""
        return f"The noise shifts all {feature}s of a {group} by the same amount{meaning}."
    shape = one.inputs.shape[1:]
    places = math.prod({"image": shape[-2:], "series": shape[-1:]}.get(kind, shape))
    if grouping is None or grouping.count >= places:
        return ""
    moved = f"the {feature}s jointly, according to its covariance"
    if isinstance(one.gaussian, Isotropic | Diagonal):
        moved = f"every {feature} independently"
    return f"The noise shifts {moved}; an interaction of two {group}s is the sum over all pairs of their {feature}s."


def _gate_sentence(one: Result) -> str:
    """Describe what the noise moves in a result of `TokenSmoothHess`."""
    thing, things = one.feature_kind, plural(one.feature_kind)
    gates = f"the gate of each {thing}: 1 is the {thing}, 0 the baseline"
    if one.inputs.ndim > 2:
        gates = f"the embeddings of the {things}, and derivatives are along the line from the baseline to each {thing}"
    groups = f" An interaction of two groups is the sum over all pairs of their {things}."
    return f"The noise moves {gates}.{groups if noun(one) == 'group' else ''}"


def _gate(one: Result) -> str:
    return "the gates of the group" if noun(one) == "group" else "its gate"


def interaction_label(one: Result) -> tuple[str, str]:
    """Return the label of a colour bar of interactions: a sentence with both ends, and the unit."""
    if is_attribution(one):
        return f"interaction by {method(one)}   {NEGATIVE_POSITIVE}", ""
    return f"together   {LESS_MORE}   than apart", f"interaction $H_{{ij}}$, {unit_words(one)}"


def gradient_label(one: Result) -> tuple[str, str]:
    """Return the label of a colour bar of gradients."""
    thing = "it" if noun(one) == "feature" else _gate(one) if one.feature_kind else f"the {noun(one)}"
    if is_attribution(one):
        return f"first-order part of {method(one)}   {NEGATIVE_POSITIVE}", ""
    return f"raising {thing} by itself   {LOWERS_RAISES}", f"{slope_word(one)}, per unit of it"


def diagonal_label(one: Result) -> tuple[str, str]:
    """Return the label of a colour bar of diagonal entries."""
    if is_attribution(one):
        return f"interaction with itself by {method(one)}   {NEGATIVE_POSITIVE}", ""
    thing, unit = ("it", "per unit squared")
    if one.feature_kind:
        thing, unit = _gate(one), "per unit of the gate, squared"
    elif one.grouping is not None:
        thing, unit = "the group", "per unit of all its features, squared"
    return f"as {thing} rises, f bends   {DOWN_UP}", f"curvature $H_{{ii}}$, {unit}"


def method(one: Result) -> str:
    """Return the name of the method of an exact result."""
    return getattr(one, "method", "") or "an exact method"


def is_text(one: Result) -> bool:
    """Whether the features of one example are tokens of a text, or groups of consecutive tokens, in reading order."""
    if one.feature_kind != "token" or one.grouping is None:
        return one.feature_kind == "token"
    ids = one.grouping.mask[0].reshape(one.inputs.shape[1], -1)  # (T, 1), or (T, E) for embeddings
    return bool((ids == ids[:, :1]).all()) and bool((ids[1:, 0] >= ids[:-1, 0]).all())


def image_of(one: Result) -> tuple[int, int] | None:
    """Return (H, W) if the inputs of a result are images, else None; gates and embeddings of tokens are not."""
    return None if one.feature_kind else image_size(tuple(one.inputs.shape[1:]))


def image_size(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return (H, W) for inputs of shape (H, W), (1, H, W) or (3, H, W), and None for other shapes.

    >>> image_size((3, 32, 32)), image_size((30,)), image_size((1, 100))
    ((32, 32), None, None)
    """
    planar = len(shape) == 2 or (len(shape) == 3 and shape[0] in (1, 3))
    return (shape[-2], shape[-1]) if planar and min(shape[-2:]) > 1 else None


def unit_words(result: Result) -> str:
    """Return the unit of an entry of the Hessian."""
    if result.feature_kind:
        return "per unit of every gate of each group" if noun(result) == "group" else "per unit of each gate"
    if result.grouping is None:
        return "per unit of each feature"
    if result.grouping.direction is None:
        return "per unit of every feature of each group"
    return "per unit of the given direction in both groups"


def quality_words(result: Result) -> str:
    """Return the quality figures of one example on one line, of the estimate that views of pairs show.

    For a result without draws it is the name of the method.
    """
    if result.design == "exact":
        return getattr(result, "method", "") or "exact"
    one = shown(result)
    error, r2, calls = float(one.relative_error[0]), float(one.r2[0]), int(one.n_calls[0])
    precision = f"relative error {error_text(error)}" if np.isfinite(error) else "more noise than signal"
    words = [precision, f"{calls:,} calls".replace(",", "\u2009")]
    return ", ".join(words if np.isnan(r2) else [words[0], f"R² {r2:.2f}", words[1]])


def slope_word(result: Result) -> str:
    """Return the name of the gradient of a result."""
    return "gradient" if result.design == "exact" else "SmoothGrad"
