"""Draws one signed number per feature: a map for images and segments, a profile or bars for other inputs.

`gradient`, `diagonal` and `eigen` compute the numbers; the drawing that they share belongs here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from smoothhess.result.pairs import labels_of
from smoothhess.view import captions
from smoothhess.view.figures import canvas, image_background, title_layout
from smoothhess.view.figures.canvas import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

    from smoothhess.result.result import Result

MOST_BARS = 40  # with more unnamed features of one dimension, a profile is drawn
BARS = 20  # default number of bars


@dataclass(frozen=True, eq=False)
class Numbers:
    """The numbers to draw, one per feature, group or pixel, and the text that describes them."""

    value: Array  # (d,), or (H·W,) where channels are summed
    half: Array | None  # half-widths of the 95 % intervals, same shape; None where they are not drawn
    faint: Array  # bool, same shape
    title: str
    caption: str
    sentence: str  # describes both ends of the scale
    unit: str
    rank: Array  # the strongest features are those of largest |rank|


def draw(
    one: Result,
    numbers: Numbers,
    *,
    k: int | None,
    names: Sequence[str] | None,
    limit: float | None,
    ax: Axes | None,
) -> Axes:
    """Draw a map for pixels or segments, a profile for many unnamed features, else bars of the k strongest."""
    labels = canvas.names_of(one, names)
    size, segments = captions.image_size(one.feature_shape), image_background.segments_of(one)
    if size is not None:
        return _map(numbers, numbers.value.reshape(size), numbers.faint.reshape(size), None, limit, ax)
    if segments is not None and k is None:
        return _map(numbers, numbers.value[segments], numbers.faint[segments], segments, limit, ax)
    if k is None and is_profile(one, labels):
        return _profile(numbers, ax)
    return _bars(one, numbers, BARS if k is None else canvas.check_count(k, "bars"), labels, ax)


def is_profile(one: Result, labels: list[str] | None) -> bool:
    """Whether a profile is drawn, because there are too many unnamed features of one dimension for bars."""
    return labels is None and one.shape[1] > MOST_BARS and max(one.feature_shape) == one.shape[1]


def _map(
    numbers: Numbers, value: Array, faint: Array, segments: Array | None, limit: float | None, ax: Axes | None
) -> Axes:
    ax = canvas.new_axes(ax, 5.4, 4.4)
    shown = paint(ax, value, faint, segments, canvas.symmetric_limit(value, limit))
    title_layout.colour_bar(ax, shown, numbers.sentence, numbers.unit, {ax: (numbers.title, numbers.caption)})
    return ax


def paint(ax: Axes, value: Array, faint: Array, segments: Array | None, limit: float) -> AxesImage:
    """Draw an (H, W) map in colour with lines between segments; pixels where `faint` is set are faint."""
    shown = ax.imshow(
        value,
        cmap=canvas.DIVERGING,
        vmin=-limit,
        vmax=limit,
        alpha=np.where(faint, canvas.FAINT, 1.0),
        interpolation="none",
    )
    image_background.outlines(ax, segments, 0.0, "#999999", 0.5)
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set(color="#999999", linewidth=0.8)
    return shown


def _profile(numbers: Numbers, ax: Axes | None) -> Axes:
    """Draw the numbers against the index of the feature, with a band of the 95 % intervals."""
    ax = canvas.new_axes(ax, 6.4, 3.2)
    value, x = numbers.value, np.arange(len(numbers.value))
    font, reach = title_layout.small(ax), _reach(numbers)
    for sign, colour in ((1, canvas.POSITIVE), (-1, canvas.NEGATIVE)):
        for faint in (True, False):
            part = np.where((np.sign(value) == sign) & (numbers.faint == faint), value, 0.0)
            alpha = canvas.FAINT if faint else 0.85
            ax.bar(x, part, width=1.0, color=colour, alpha=alpha, linewidth=0)
    if reach is not None:
        ax.fill_between(x, value - reach, value + reach, color=canvas.INK, alpha=0.25, linewidth=0, zorder=3)
    ax.axhline(0, color=canvas.INK, linewidth=0.8)
    ax.set_xlim(-1, len(value))
    ax.tick_params(labelsize=font)
    name = title_layout.balanced(numbers.unit.split(",")[0], 0.5 * title_layout.cell(ax)[1], font)
    ax.set_ylabel(f"{name}{title_layout.in_powers(ax.yaxis)}", fontsize=font)
    canvas.hide_spines(ax, "top", "right")
    below = ["index of the feature", numbers.sentence.replace("←", "↓").replace("→", "↑")]
    band = "; band: 95 % intervals" if reach is not None else ""
    title_layout.compose(ax, numbers.title, numbers.caption + band, below)
    return ax


def _bars(one: Result, numbers: Numbers, k: int, labels: list[str] | None, ax: Axes | None) -> Axes:
    chosen = np.argsort(-np.abs(numbers.rank), kind="stable")[:k]
    value, faint, reach = numbers.value[chosen], numbers.faint[chosen], _reach(numbers)
    name = labels_of(labels, one.shape[1], one.feature_shape)
    text = [name(int(i)) for i in chosen]
    ax = canvas.new_axes(ax, 6.4, 1.5 + 0.26 * len(chosen))
    y, font = np.arange(len(chosen)), title_layout.small(ax)
    bars = ax.barh(y, value, height=0.7, color=canvas.sign_colours(value))
    for rectangle, weak in zip(bars, faint, strict=True):
        rectangle.set_alpha(canvas.FAINT if weak else 0.85)
    if reach is not None:
        ax.errorbar(value, y, xerr=reach[chosen], fmt="none", ecolor="black", elinewidth=0.13 * font, capsize=2)
    ax.axvline(0, color=canvas.INK, linewidth=0.8)
    wide = title_layout.cell(ax)[0] >= title_layout.NARROW
    ax.set_yticks(y, text, fontsize=font + (1.7 if wide else 0.0))
    ax.set_ylim(len(chosen) - 0.4, -0.6)
    ax.tick_params(axis="x", labelsize=font)
    ax.tick_params(axis="y", length=0)
    canvas.hide_spines(ax, "top", "right", "left")
    whiskers = "; whiskers: 95 % intervals" if reach is not None else ""
    power = title_layout.in_powers(ax.xaxis, 8 if wide else 5)
    d = len(numbers.value)
    part = f"the {len(chosen)} strongest of {d}; " if len(chosen) < d else ""
    below = [numbers.sentence, f"{numbers.unit}{power}{whiskers}"]
    title_layout.compose(ax, numbers.title, part + numbers.caption, below)
    return ax


def _reach(numbers: Numbers) -> Array | None:
    """Return the half-widths, NaN where they are unknown; None if there are none, or all are 0."""
    if numbers.half is None or not numbers.half.any():
        return None
    return np.where(np.isfinite(numbers.half), numbers.half, np.nan)
