"""An image beside its strongest pairs, drawn as lines between pixels or segments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from smoothhess.view import canvas
from smoothhess.view.canvas import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from smoothhess.interactions import Interactions

BEND = 0.18  # so that pairs along one line can be told apart


def image(
    result: Interactions,
    *,
    k: int = 10,
    q: float = 0.05,
    scales: Tensor | None = None,
    beside: bool = True,
    numbered: bool = False,
    cmap: str = "gray",
    example: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """The input beside its k strongest pairs, one line each between two pixels, or between the middles of two segments.

    For inputs (H, W), (1, H, W) or (3, H, W), and for `groups` of them. Red lines: the two together raise the output
    more than apart; blue: less. The stronger the pair the wider the line; dashed where not significant. `numbered`
    writes the rank of each pair on its line, `beside=False` leaves out the plain input, `cmap` colours one-channel
    images.
    """
    one = result[example]
    size = canvas.image_size(tuple(one.inputs.shape[1:]))
    if size is None:
        raise ValueError(
            f"an image has shape (H, W), (1, H, W) or (3, H, W), the inputs here have {tuple(one.inputs.shape[1:])}. "
            "Use kind 'heatmap', 'pairs' or 'gradient'."
        )
    places, segments = _places(one, size)
    found = one.top_pairs(k, q=q, scales=scales)[0]
    height, width = size
    shift = width * 1.08 if beside else 0.0
    ax = canvas.new_axes(ax, 7.0 if beside else 4.4, 4.4)
    pixels = _pixels(one.inputs[0])
    if beside:
        _picture(ax, pixels, cmap, 0.0, 1.0, "input")
    _picture(ax, pixels, cmap, shift, 0.35, f"its {len(found)} strongest pairs" if beside else "")
    _outlines(ax, segments, shift)
    strongest = max((abs(p.effect) for p in found), default=1.0) or 1.0
    for p in reversed(found):  # the strongest on top
        _line(ax, places[[p.i, p.j]] + [shift, 0.0], abs(p.effect) / strongest, p.value > 0, p.significant)
    if numbered:
        _numbers(ax, [places[[p.i, p.j]] + [shift, 0.0] for p in found], [p.value > 0 for p in found])
    _legend(ax, any(not p.significant for p in found), 3 if beside else 1)
    ax.set_xlim(-0.6, shift + width - 0.4)
    ax.set_ylim(height - 0.4, -0.6)
    ax.set_aspect("equal")
    ax.set_axis_off()
    return ax


def _places(one: Interactions, size: tuple[int, int]) -> tuple[Array, Array | None]:
    """Where each feature lies, (features, 2) as x and y; and the segments as an (H, W) array of ids."""
    height, width = size
    n = one.inputs[0].numel()
    flat = np.arange(n)
    where = np.stack([flat % width, flat // width % height], 1).astype(float)
    if one.grouping is None:
        return where, None
    mask = one.grouping.mask[0].cpu().numpy()
    members = np.maximum(np.bincount(mask, minlength=one.grouping.count), 1)[:, None]
    sums = np.stack([np.bincount(mask, weights=w, minlength=one.grouping.count) for w in where.T], 1)
    return sums / members, mask.reshape(-1, height, width)[0]


def _pixels(x: Tensor) -> Array:
    """An input as matplotlib shows it: (H, W) or (H, W, 3) with colours in [0, 1]."""
    pixels = canvas.array(x)
    if pixels.ndim == 2:
        return pixels
    if len(pixels) == 1:
        return pixels[0]
    low, high = pixels.min(), pixels.max()
    if low < 0 or high > 1:  # normalised for the network
        pixels = (pixels - low) / max(high - low, 1e-12)
    return pixels.transpose(1, 2, 0)


def _picture(ax: Axes, pixels: Array, cmap: str, shift: float, alpha: float, title: str) -> None:
    height, width = pixels.shape[:2]
    extent = (shift - 0.5, shift + width - 0.5, height - 0.5, -0.5)
    ax.imshow(pixels, cmap=cmap, extent=extent, alpha=alpha, interpolation="none")
    corners = np.array([(-0.5, -0.5), (width - 0.5, -0.5), (width - 0.5, height - 0.5), (-0.5, height - 0.5)])
    x, y = np.vstack([corners, corners[:1]]).T
    ax.plot(x + shift, y, color="#999999", linewidth=0.8)
    # the words stand above the frame, outside of the data
    ax.annotate(
        title, (shift + (width - 1) / 2, -0.5), (0, 6), textcoords="offset points", ha="center", annotation_clip=False
    )


def _outlines(ax: Axes, segments: Array | None, shift: float) -> None:
    """Thin lines between segments."""
    if segments is None:
        return
    from matplotlib.collections import LineCollection

    rows, columns = np.nonzero(segments[:, 1:] != segments[:, :-1])
    upright = [[(shift + c + 0.5, r - 0.5), (shift + c + 0.5, r + 0.5)] for r, c in zip(rows, columns, strict=True)]
    rows, columns = np.nonzero(segments[1:] != segments[:-1])
    level = [[(shift + c - 0.5, r + 0.5), (shift + c + 0.5, r + 0.5)] for r, c in zip(rows, columns, strict=True)]
    ax.add_collection(LineCollection(upright + level, colors="#777777", linewidths=0.6))


def _line(ax: Axes, ends: Array, strength: float, positive: bool, significant: bool) -> None:
    from matplotlib.patches import FancyArrowPatch

    colour = canvas.POSITIVE if positive else canvas.NEGATIVE
    line = FancyArrowPatch(
        tuple(ends[0]),
        tuple(ends[1]),
        arrowstyle="-",
        connectionstyle=f"arc3,rad={BEND}",
        shrinkA=0,
        shrinkB=0,
        linewidth=0.8 + 2.4 * strength,
        linestyle="-" if significant else "--",
        color=colour,
        alpha=0.9 if significant else 0.5,
        capstyle="round",
        zorder=3,
    )
    ax.add_patch(line)
    ax.scatter(*ends.T, s=22, facecolors="black", edgecolors="white", linewidths=0.8, zorder=4)


def _numbers(ax: Axes, lines: list[Array], positive: list[bool]) -> None:
    """The rank of each line, on it, where it is farthest from the ranks already written and from all ends."""
    taken = [end for ends in lines for end in ends]
    for rank, (ends, sign) in enumerate(zip(lines, positive, strict=True), 1):
        (start, stop), (dx, dy) = ends, ends[1] - ends[0]
        knee = ends.mean(0) + BEND * np.array([-dy, dx])  # of the Bézier curve; matplotlib bends it on the screen, y up
        spots = [(1 - t) ** 2 * start + 2 * t * (1 - t) * knee + t**2 * stop for t in np.linspace(0.25, 0.75, 11)]
        spot = max(spots, key=lambda s: min(float(np.hypot(*(s - other))) for other in taken))
        taken.append(spot)
        colour = canvas.POSITIVE if sign else canvas.NEGATIVE
        ax.annotate(
            str(rank),
            tuple(spot),
            ha="center",
            va="center_baseline",
            fontsize=7,
            color=colour,
            bbox={"boxstyle": "circle,pad=0.15", "facecolor": "white", "edgecolor": colour, "linewidth": 0.8},
            zorder=5,
        )


def _legend(ax: Axes, some_uncertain: bool, most_columns: int) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=canvas.POSITIVE, linewidth=2.5, label="together more than apart (H > 0)"),
        Line2D([], [], color=canvas.NEGATIVE, linewidth=2.5, label="together less than apart (H < 0)"),
    ]
    if some_uncertain:
        handles.append(Line2D([], [], color=canvas.INK, linewidth=1.5, linestyle="--", label="not significant"))
    columns = min(len(handles), most_columns)
    ax.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=columns, fontsize="small", frameon=False
    )
