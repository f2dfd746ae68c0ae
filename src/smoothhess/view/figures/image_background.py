"""Draws the input image under a figure: its pixels, the outlines of its segments, and the positions of features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from smoothhess.result import segments
from smoothhess.view import captions
from smoothhess.view.figures import canvas
from smoothhess.view.figures.canvas import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from smoothhess.result.result import Result


@dataclass(frozen=True, eq=False)
class Picture:
    """An image, and the features of one example on it."""

    pixels: Array  # (H, W) or (H, W, 3)
    ids: Array  # (channels, H, W) the feature or group of each number of the image

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.pixels.shape[0], self.pixels.shape[1]

    @property
    def segments(self) -> Array | None:
        """The feature of each pixel, (H, W); None if features differ between channels."""
        return self.ids[0] if (self.ids == self.ids[:1]).all() else None

    @property
    def places(self) -> Array:
        """The centroid of each feature, (features, 2) as x and y."""
        ids = self.ids.ravel()
        rows, columns = (np.broadcast_to(i, self.ids.shape).ravel() for i in np.indices(self.size))
        sums = np.stack([np.bincount(ids, weights=columns), np.bincount(ids, weights=rows)], 1)
        return sums / np.maximum(np.bincount(ids), 1)[:, None]


def picture_of(one: Result, image: Any, instead: str) -> Picture:
    """Return the image, or the input if None, with its features; an error suggests the kinds in `instead`."""
    mask = np.arange(one.inputs[0].numel()) if one.grouping is None else one.grouping.mask[0].cpu().numpy()
    if one.feature_kind == "patch" and image is not None:
        pixels = pixels_of(image)
        return Picture(pixels, on_patches(mask, one.inputs.shape[1], pixels.shape[:2])[None])
    size = captions.image_of(one)
    if size is None:
        patches = "Pass image=, the picture of the patches, or use" if one.feature_kind == "patch" else "Use"
        raise ValueError(
            f"inputs must be images of shape (H, W), (1, H, W) or (3, H, W), got {tuple(one.inputs.shape[1:])}. "
            f"{patches} kind {instead}."
        )
    pixels = pixels_of(one.inputs[0] if image is None else image)
    if pixels.shape[:2] != size:
        raise ValueError(f"image must have the height and width of the inputs, {size}, got {pixels.shape[:2]}.")
    return Picture(pixels, mask.reshape(-1, *size))


def on_patches(mask: Array, count: int, size: tuple[int, ...]) -> Array:
    """Return the feature of each pixel, (H, W), of an image of `count` square patches, in rows.

    `mask` has the feature of each patch, or of each coordinate of their embeddings.

    >>> on_patches(np.array([0, 1]), 2, (2, 4)).tolist()
    [[0, 0, 1, 1], [0, 0, 1, 1]]
    """
    height, width = size
    side = math.isqrt(height * width // count)
    if side == 0 or height % side or width % side or count * side**2 != height * width:
        raise ValueError(
            f"an image of {height} × {width} pixels cannot be divided into {count} square patches. Pass the image that "
            "the model sees, in any resolution, and explain the layer that returns patches only, without a class token."
        )
    grid = segments.grid(size, (height // side, width // side)).mask.numpy()
    return mask.reshape(count, -1)[:, 0][grid]


def segments_of(one: Result) -> Array | None:
    """Return the groups of an image as (H, W) ids; None without groups, or if they differ between channels."""
    size = captions.image_of(one)
    if one.grouping is None or size is None:
        return None
    channels = one.grouping.mask[0].cpu().numpy().reshape(-1, *size)
    return channels[0] if (channels == channels[0]).all() else None


def pixels_of(x: Any) -> Array:
    """Convert (H, W), (1, H, W), (3, H, W) or (H, W, 3) for imshow: (H, W), or (H, W, 3) with colours in [0, 1]."""
    given = torch.as_tensor(x)
    pixels = canvas.array(given) / (255 if given.dtype == torch.uint8 else 1)
    if pixels.ndim == 3 and len(pixels) in (1, 3) and pixels.shape[2] != 3:
        pixels = pixels.transpose(1, 2, 0)
    pixels = pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] != 3) or not np.isfinite(pixels).all():
        raise ValueError(
            f"image must be (H, W), (1, H, W), (3, H, W) or (H, W, 3) of finite numbers, got {tuple(given.shape)}."
        )
    low, high = pixels.min(), pixels.max()
    if pixels.ndim == 3 and (low < 0 or high > 1):  # normalised for the network
        return (pixels - low) / max(high - low, 1e-12)
    return pixels


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


def outlines(ax: Axes, ids: Array | None, shift: float, colour: str = "#777777", width: float = 0.6) -> None:
    """Draw thin lines between segments (H, W), unless each pixel is one."""
    if ids is not None and len(np.unique(ids)) < ids.size:
        _add_edges(ax, _edges(ids), shift, colour, width, 1.5)


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
