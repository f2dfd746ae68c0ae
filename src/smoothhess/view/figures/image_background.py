"""Draws the input image under a figure: its pixels, the outlines of its segments, and the positions of features."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from smoothhess.view import captions
from smoothhess.view.figures import canvas
from smoothhess.view.figures.canvas import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from smoothhess.result.result import Result


def size_of(one: Result, instead: str) -> tuple[int, int]:
    """Return (H, W) of an image input; the error for other inputs suggests the kinds of figures in `instead`."""
    size = captions.image_of(one)
    if size is None:
        raise ValueError(
            f"inputs must be images of shape (H, W), (1, H, W) or (3, H, W), got {tuple(one.inputs.shape[1:])}. "
            f"Use kind {instead}."
        )
    return size


def segments_of(one: Result) -> Array | None:
    """Return the groups of an image as (H, W) ids; None without groups, or if they differ between channels."""
    size = captions.image_of(one)
    if one.grouping is None or size is None:
        return None
    channels = one.grouping.mask[0].cpu().numpy().reshape(-1, *size)
    return channels[0] if (channels == channels[0]).all() else None


def places_of(one: Result, size: tuple[int, int]) -> Array:
    """Return the position of each feature, or the centroid of each group, (features, 2) as x and y."""
    height, width = size
    flat = np.arange(one.inputs[0].numel())
    where = np.stack([flat % width, flat // width % height], 1).astype(float)
    if one.grouping is None:
        return where
    mask = one.grouping.mask[0].cpu().numpy()
    members = np.maximum(np.bincount(mask, minlength=one.grouping.count), 1)[:, None]
    return np.stack([np.bincount(mask, weights=w, minlength=one.grouping.count) for w in where.T], 1) / members


def pixels_of(x: Tensor) -> Array:
    """Convert an input for imshow: (H, W) or (H, W, 3) with colours in [0, 1]."""
    pixels = canvas.array(x)
    if pixels.ndim == 2:
        return pixels
    if len(pixels) == 1:
        return pixels[0]
    low, high = pixels.min(), pixels.max()
    if low < 0 or high > 1:  # normalised for the network
        pixels = (pixels - low) / max(high - low, 1e-12)
    return pixels.transpose(1, 2, 0)


def extent_of(size: tuple[int, int], shift: float = 0.0) -> tuple[float, float, float, float]:
    """Return the edges of an image whose pixel centres are integers."""
    height, width = size
    return shift - 0.5, shift + width - 0.5, height - 0.5, -0.5


def put(ax: Axes, pixels: Array, cmap: str, shift: float, alpha: float, title: str, size: float | None = None) -> None:
    """Draw the framed image at horizontal offset `shift`, with a title of `size` points above it."""
    height, width = pixels.shape[:2]
    ax.imshow(pixels, cmap=cmap, extent=extent_of((height, width), shift), alpha=alpha, interpolation="none")
    frame(ax, (height, width), shift)
    # the title is above the frame, outside the data limits
    ax.annotate(
        title,
        (shift + (width - 1) / 2, -0.5),
        (0, 5),
        textcoords="offset points",
        ha="center",
        fontsize=size,
        annotation_clip=False,
    )


def frame(ax: Axes, size: tuple[int, int], shift: float) -> None:
    """Draw a thin frame around an image."""
    left, right, bottom, top = extent_of(size, shift)
    x, y = [left, right, right, left, left], [top, top, bottom, bottom, top]
    ax.plot(x, y, color="#999999", linewidth=0.8, clip_on=False)


def outlines(ax: Axes, segments: Array | None, shift: float, colour: str = "#777777", width: float = 0.6) -> None:
    """Draw thin lines between segments."""
    if segments is not None:
        _add_edges(ax, _edges(segments), shift, colour, width, 1.5)


def outline_one(ax: Axes, inside: Array, shift: float) -> None:
    """Outline the pixels of an (H, W) mask in black on white, visible on light and dark backgrounds."""
    edges = _edges(np.pad(inside.astype(int), 1)) - 1
    _add_edges(ax, edges, shift, "white", 3.6, 4)
    _add_edges(ax, edges, shift, "black", 1.8, 4.1)


def _edges(ids: Array) -> Array:
    """Return the pixel edges between different ids, (n, 2, 2) as two end points in x and y."""
    rows, columns = np.nonzero(ids[:, 1:] != ids[:, :-1])
    upright = np.stack([columns + 0.5, rows - 0.5, columns + 0.5, rows + 0.5], 1)
    rows, columns = np.nonzero(ids[1:] != ids[:-1])
    level = np.stack([columns - 0.5, rows + 0.5, columns + 0.5, rows + 0.5], 1)
    return np.concatenate([upright, level]).reshape(-1, 2, 2)


def _add_edges(ax: Axes, edges: Array, shift: float, colour: str, width: float, zorder: float) -> None:
    from matplotlib.collections import LineCollection

    lines = list(edges + np.array([shift, 0.0]))
    drawn = LineCollection(lines, colors=colour, linewidths=width, capstyle="round", zorder=zorder, clip_on=False)
    ax.add_collection(drawn, autolim=False)
