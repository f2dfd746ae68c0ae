"""Figure of the strongest pairs with their confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from smoothhess.result.pairs import Pair
from smoothhess.view import captions
from smoothhess.view.figures import canvas, pair_lines, title_layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from smoothhess.result.result import Result


def pairs(
    result: Result,
    *,
    k: int = 10,
    names: Sequence[str] | None = None,
    q: float = 0.05,
    level: float = 0.95,
    scales: Tensor | None = None,
    as_effect: bool = False,
    example: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """Draw the k strongest pairs, strongest on top, with H_ij as a dot on its confidence interval.

    The dot is filled if the pair is significant. Pairs within noise (|z| < 2) are faint.

    Args:
        result: The result to draw.
        k: Number of pairs.
        names: One name per feature or group.
        q: False discovery rate at which a pair is significant, as for `Interactions.top_pairs`.
        level: Level of the confidence intervals.
        scales: Scale of each feature, as for `Interactions.top_pairs`.
        as_effect: Whether to draw H_ij σ_i σ_j, in units of the output, which is comparable between features of
            different units.
        example: Index of the example in the batch.
        ax: Axes to draw into; a new figure if None.

    Returns:
        The Axes.
    """
    one = canvas.one_example(result, example)
    labels = canvas.names_of(one, names)
    found = canvas.strongest(one, k, labels, q=q, level=level, scales=scales)
    what, unit = "interaction $H_{ij}$", ""
    if as_effect:
        found, what = [in_effects(p) for p in found], "effect $H_{ij}σ_iσ_j$"
        unit = f"in {one.unit or 'units of the output'}"
    if captions.is_attribution(one):
        what, unit = f"interaction by {captions.method(one)}", unit or "in units of the method"
    sampled = any(p.stderr > 0 for p in found)
    dots = f"bars: {level * 100:g} % intervals; filled dot: q ≤ {q:g}" if sampled else ""
    head = ("Pairs that act together, strongest first", captions.quality_words(one))
    return draw(found, head, f"{what}, {unit or captions.unit_words(one)}", dots, ax)


def in_effects(p: Pair) -> Pair:
    """The pair with its effect, in units of the output, in place of its value."""
    # an effect is the value times a positive scale; a value of 0 has effect 0 and an interval of length 0
    size = p.effect / p.value if p.value else 0.0
    return p._replace(value=p.effect, stderr=size * p.stderr, low=size * p.low, high=size * p.high)


def draw(found: Sequence[Pair], head: tuple[str, str], what: str, dots: str, ax: Axes | None) -> Axes:
    """Draw pairs with their intervals from top to bottom; dots of significant pairs are filled.

    Args:
        found: The pairs.
        head: Title and caption.
        what: The quantity on the axis.
        dots: What bars and dots are.
        ax: Axes to draw into; a new figure if None.
    """
    value, low, high = np.array([(p.value, p.low, p.high) for p in found]).T
    colours = canvas.sign_colours(value)
    alpha = [canvas.FAINT if pair_lines.is_noise(p) else 1.0 for p in found]
    ax = canvas.new_axes(ax, 6.4, 1.5 + 0.3 * len(found))
    from matplotlib.colors import to_rgba

    y, font = np.arange(len(found)), title_layout.small(ax)
    ax.axvline(0, color=canvas.INK, linewidth=0.8, zorder=1)
    inks = [to_rgba(c, a) for c, a in zip(colours, alpha, strict=True)]
    ax.hlines(y, low, high, colors=inks, linewidths=1.6, zorder=2)
    for end in (low, high):
        ax.scatter(end, y, s=4.8 * font, marker="|", c=inks, linewidths=1.6, zorder=2)
    faces = [c if p.significant else "white" for c, p in zip(colours, found, strict=True)]
    ax.scatter(value, y, s=2.2 * font, facecolors=faces, edgecolors=colours, linewidths=1.2, zorder=3)
    _names(ax, found)
    ax.set_ylim(len(found) - 0.4, -0.6)
    ax.grid(axis="x", color="#e5e5e5", linewidth=0.6)
    ax.set_axisbelow(True)
    wide = title_layout.cell(ax)[0] >= title_layout.NARROW
    what = f"{what}{title_layout.in_powers(ax.xaxis, 8 if wide else 5)}"
    faint = f"; {captions.FAINT_WORDS}" if dots and min(alpha) < 1 else ""
    ax.tick_params(axis="x", labelsize=font)
    ax.tick_params(axis="y", length=0)
    canvas.hide_spines(ax, "top", "right", "left")
    title_layout.compose(ax, *head, [what, f"{dots}{faint}"])
    return ax


def _names(ax: Axes, found: Sequence[Pair]) -> None:
    """Write the names of both features on the left, on two lines if they are long."""
    font = title_layout.small(ax) + (1.7 if title_layout.cell(ax)[0] >= title_layout.NARROW else 0.0)
    text = [" × ".join(p.names) for p in found]
    most = (0.5 if title_layout.cell(ax)[0] >= title_layout.NARROW else 0.4) * title_layout.cell(ax)[0]
    while font > 5.5 and max(title_layout.text_width(t, font) for t in text) > most:
        font -= 0.5
    if max(title_layout.text_width(t, font) for t in text) > most:
        row = 72 * max(title_layout.cell(ax)[1] - 1.1, 0.5) / len(found)  # points available for two lines
        font = max(min(title_layout.small(ax), font + 1, row / 2.3), 4.5)
        text = [" ×\n".join(p.names) for p in found]
    ax.set_yticks(range(len(found)), text, fontsize=font)
    for label in ax.get_yticklabels():
        label.set_linespacing(0.95)
