"""Figure of an image and its strongest pairs, drawn as lines between pixels or segments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from smoothhess.result.pairs import Pair
from smoothhess.view.figures import canvas, image_background, pair_lines, title_layout
from smoothhess.view.figures.canvas import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from smoothhess.result.result import Result

BEND = 0.18  # curvature of the lines, so that collinear pairs do not overlap


def image(
    result: Result,
    *,
    k: int = 10,
    q: float = 0.05,
    significant: bool = True,
    scales: Tensor | None = None,
    image: Any = None,
    beside: bool = True,
    numbered: bool = False,
    cmap: str = "gray",
    example: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """Draw the input and, next to it, the significant ones of its k strongest pairs, as lines between their features.

    Inputs have shape (H, W), (1, H, W) or (3, H, W), with or without groups, or features are patches. A line joins two
    pixels, or the centroids of two segments. It is red if raising both features raises the output by more than the sum
    of their separate effects, and blue if by less. Its width grows with |effect|; it is faint if the pair is within
    noise (|z| < 2).

    Args:
        result: The result to draw.
        k: Number of pairs.
        q: False discovery rate at which a pair is significant, as for `Interactions.top_pairs`.
        significant: Whether to draw only significant pairs; False draws the others as well, dashed.
        scales: Scale of each feature, as for `Interactions.top_pairs`.
        image: The picture of a result of patches, such as the pixels that were explained; for other results a picture
            of the same height and width in place of the input. (H, W), (3, H, W) or (H, W, 3).
        beside: Whether to draw the input without lines as well.
        numbered: Whether to write the position of each pair in the order of strength on its line.
        cmap: Matplotlib colour map of one-channel images.
        example: Index of the example in the batch.
        ax: Axes to draw into; a new figure if None.

    Returns:
        The Axes.

    Raises:
        ValueError: If the inputs are not images.
    """
    one = canvas.one_example(result, example)
    picture = image_background.picture_of(one, image, "'heatmap', 'pairs' or 'gradient'")
    pixels, places = picture.pixels, picture.places
    strongest = canvas.strongest(one, k, q=q, scales=scales)
    found = pair_lines.drawn(strongest, significant)
    height, width = picture.size
    shift = width * 1.08 if beside else 0.0
    ax = canvas.new_axes(ax, 7.0 if beside else 4.4, 4.4)
    font = 8.0 if title_layout.small(ax) < 8 else 10.0
    if beside:
        image_background.put(ax, pixels, cmap, 0.0, 1.0, "input", font)
    count = "strongest pair" if len(found) == 1 else f"{len(found)} strongest pairs"
    title = f"{'its' if beside else 'the'} {count}" if found else "no significant pair"
    image_background.put(ax, pixels, cmap, shift, 0.35, title, font)
    image_background.outlines(ax, picture.segments, shift)
    lines = [places[[p.i, p.j]] + [shift, 0.0] for p in found]
    for p, ends, thickness in reversed(
        [*zip(found, lines, pair_lines.widths(found), strict=True)]
    ):  # the strongest on top
        join(ax, ends, p, thickness)
    if numbered:
        _numbers(ax, lines, found, [strongest.index(p) + 1 for p in found])
    pair_lines.legend(ax, one, found, q, _columns(ax, beside))
    ax.set_xlim(-0.6, shift + width - 0.4)
    ax.set_ylim(height - 0.4, -0.6)
    ax.set_aspect("equal")
    ax.set_axis_off()
    return ax


def _columns(ax: Axes, beside: bool) -> int:
    return 1 if not beside or title_layout.cell(ax)[0] < title_layout.NARROW else 2


def join(ax: Axes, ends: Array, pair: Pair, width: float, dots: bool = True) -> None:
    """Draw a curved line between two points, with a dot at each."""
    from matplotlib.patches import FancyArrowPatch

    line = FancyArrowPatch(
        tuple(ends[0]),
        tuple(ends[1]),
        arrowstyle="-",
        connectionstyle=f"arc3,rad={BEND}",
        shrinkA=0,
        shrinkB=0,
        capstyle="round" if pair.significant else "butt",
        zorder=3,
        **pair_lines.style(pair, width),
    )
    ax.add_patch(line)
    if dots:
        ax.scatter(*ends.T, s=22, facecolors="black", edgecolors="white", linewidths=0.8, zorder=4)


def _numbers(ax: Axes, lines: list[Array], found: list[Pair], ranks: list[int]) -> None:
    """Write the rank of each pair on its line, at the point farthest from the other numbers and from all end points."""
    taken = [end for ends in lines for end in ends]
    for rank, ends, pair in zip(ranks, lines, found, strict=True):
        (start, stop), (dx, dy) = ends, ends[1] - ends[0]
        # control point of the Bézier curve; matplotlib bends it in screen coordinates, y up
        knee = ends.mean(0) + BEND * np.array([-dy, dx])
        spots = [(1 - t) ** 2 * start + 2 * t * (1 - t) * knee + t**2 * stop for t in np.linspace(0.25, 0.75, 11)]
        spot = max(spots, key=lambda s: min(float(np.hypot(*(s - other))) for other in taken))
        taken.append(spot)
        colour = pair_lines.colour_of(pair)
        ax.annotate(
            str(rank),
            tuple(spot),
            ha="center",
            va="center_baseline",
            fontsize=min(7.0, title_layout.small(ax)),
            color=colour,
            bbox={"boxstyle": "circle,pad=0.15", "facecolor": "white", "edgecolor": colour, "linewidth": 0.8},
            zorder=5,
        )
