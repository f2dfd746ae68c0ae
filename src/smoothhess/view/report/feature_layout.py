"""Determines the layout of the features of a result: on an image, along a curve, in a text, or in a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from smoothhess.view import captions
from smoothhess.view.figures import canvas, image_background
from smoothhess.view.report.encoding import Array

if TYPE_CHECKING:
    from smoothhess.result.result import Result

KINDS = ("image", "table", "series", "text")
SHORTEST_SERIES = 32  # samples; a shorter grouped row of numbers is treated as a table
LONG_STRIP = 8  # times as long as high: channels of a curve rather than an image


@dataclass(frozen=True, eq=False)
class Layout:
    """The feature index of each position: `ids` is (H, W) for an image, (L,) for a series, else (D,)."""

    kind: str
    ids: Array  # of one example
    times: Array | None = None  # (L,) times of the samples of a series
    noun: str = ""  # of a feature of a result of tokens or patches: "token", "patch", "group"

    def names(self, count: int, unit: str = "") -> list[str]:
        """Return default names for the features; `unit` is the unit of the times of a series."""
        if self.kind == "series":
            return [self._window(i, unit) for i in range(count)]
        if self.word == "pixel":
            return [f"pixel ({i // self.ids.shape[1]}, {i % self.ids.shape[1]})" for i in range(count)]
        return [f"{self.word} {i}" for i in range(count)]

    @property
    def word(self) -> str:
        """Return the noun for a feature: "pixel", "window", "group", …"""
        if self.noun:
            return self.noun
        ungrouped = self.ids.size == len(np.unique(self.ids))
        if self.kind == "series":
            return "sample" if ungrouped else "window"
        if self.kind == "image":
            return "pixel" if ungrouped else "segment"
        return "feature" if ungrouped else "group"

    @property
    def part(self) -> str:
        """Return the noun for what a group of features consists of; "" if the features are not groups."""
        return {"segment": "pixel", "window": "sample", "group": "feature"}.get(self.word, "")

    def _window(self, i: int, unit: str) -> str:
        where = np.flatnonzero(self.ids == i)
        if not len(where):
            return f"window {i} (empty)"
        if self.times is None:
            return f"sample {where[0]}" if len(where) == 1 else f"samples {where[0]}–{where[-1]}"
        ends = self._edges[[where[0], where[-1] + 1]]
        digits = max(0, 1 - math.floor(math.log10(ends[1] - ends[0])))
        words = [f"{end:.{digits}f}" for end in ends[: len(where)]]  # a single sample is named by its time
        return f"{'–'.join(words)} {unit}".strip()

    @property
    def _edges(self) -> Array:
        """Return the start time of each sample, and the end of the last, which has the length of the one before."""
        assert self.times is not None
        return np.append(self.times, 2 * self.times[-1] - self.times[-2])


def find_layout(result: Result, kind: str | None, image: Any, series: Any, b: int = 0) -> Layout:
    """Return the layout of example b; `kind`, `image` and `series` are arguments of `report`."""
    shape = tuple(result.inputs.shape[1:])
    mask = _mask(result, b)
    if result.feature_kind or kind == "text":
        return _of_tokens(result, kind, mask, image, b)
    times = _times(series, shape[-1])
    requested = kind or ("series" if times is not None or series is True else None)
    if requested not in (None, *KINDS):
        raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))} or None, got {kind!r}.")
    if requested is None and series is not False and image is None and _looks_like_channels(result, shape, mask):
        requested = "series"
    if requested in (None, "image") and series is not True:
        size = _image_size(shape, image)
        ids = None if size is None else _alike(mask, size)
        if ids is not None:
            return Layout("image", ids)
        if requested == "image":
            raise ValueError(
                f"kind='image' needs inputs of shape (H, W), (1, H, W) or (3, H, W), with the same segments in all "
                f"channels, got {shape}. Pass image=pixels, or omit kind."
            )
    if requested == "series" or (requested is None and series is not False and _looks_like_series(result, shape, mask)):
        ids = _alike(mask, shape[-1:])
        if ids is None or not _is_windows(ids):
            raise ValueError(
                "a series needs windows: each group must be one contiguous interval, the same in all channels."
            )
        return Layout("series", ids, times)
    return Layout("table", mask)


def _of_tokens(result: Result, kind: str | None, mask: Array, image: Any, b: int) -> Layout:
    """Return the layout of tokens: a text, the image of patches, or a table for groups out of reading order."""
    possible = ["table"]
    if captions.is_text(result[b]):
        possible.append("text")
    elif result.feature_kind == "patch" and image is not None:
        possible.append("image")
    if kind not in (None, *possible):
        raise ValueError(
            f"kind={kind!r} does not fit this result: kind='text' is for tokens of TokenSmoothHess, or groups of "
            "consecutive tokens, kind='image' for patches, with image=pixels. Omit kind."
        )
    noun, tokens = captions.noun(result[b]), result.inputs.shape[1]
    if (kind or possible[-1]) == "image":
        size = pixels(image, result.inputs, b, len(result)).shape[:2]
        return Layout("image", image_background.on_patches(mask, tokens, size), noun=noun)
    return Layout(kind or possible[-1], mask.reshape(tokens, -1)[:, 0], noun=noun)


def features_of_pixels(result: Result, kind: str | None, series: Any) -> Result:
    """Return the result with the channels of each pixel or sample summed; unchanged without channels."""
    shape = tuple(result.inputs.shape[1:])
    if result.grouping is not None or result.feature_kind or kind == "table":
        return result
    place = None
    if kind == "series" or series is True or _times(series, shape[-1]) is not None:
        place = shape[-1:]
    elif kind == "image" or captions.image_size(shape) is not None:
        place = shape[-2:]
    if place is None or int(np.prod(place)) == result.shape[1]:
        return result
    return result.groups(torch.arange(int(np.prod(place)), device=result.device).reshape(place).expand(shape))


def pixels(image: Any, inputs: Tensor, b: int, count: int) -> Array:
    """Return example b as bytes (H, W) or (H, W, 3): the given image, or the input if `image` is None."""
    given = inputs[b] if image is None else _one_of(image, b, count)
    array = image_background.pixels_of(given)
    low, high = float(array.min()), float(array.max())
    if low < 0 or high > 1:  # normalised for the network
        array = (array - low) / max(high - low, 1e-12)
    return np.rint(array * 255).astype(np.uint8)


def _one_of(image: Any, b: int, count: int) -> Any:
    """Return the image of example b."""
    if isinstance(image, (list, tuple)):
        if len(image) != count:
            raise ValueError(f"expected one image, or one per example: {count}, got {len(image)}.")
        return image[b]
    return image[b] if getattr(image, "ndim", 0) == 4 and len(image) == count else image


def _mask(result: Result, b: int) -> Array:
    """Return the feature that each number of the input belongs to, (D,)."""
    if result.grouping is None:
        return np.arange(result.inputs[0].numel())
    mask = result.grouping.mask
    return mask[b if len(mask) > 1 else 0].cpu().numpy()


def _alike(mask: Array, place: Sequence[int]) -> Array | None:
    """Return the ids of each position if they are the same in all channels, else None."""
    channels = mask.reshape(-1, *place)
    return channels[0] if (channels == channels[:1]).all() else None


def _image_size(shape: tuple[int, ...], image: Any) -> tuple[int, int] | None:
    if image is not None and len(shape) >= 2:
        return shape[-2], shape[-1]
    return captions.image_size(shape)


def _looks_like_series(result: Result, shape: tuple[int, ...], mask: Array) -> bool:
    if len(shape) == 2 and shape[0] == 1 and shape[1] >= SHORTEST_SERIES:
        ids = _alike(mask, shape[-1:])
        return ids is not None and _is_windows(ids)
    grouped = result.grouping is not None and len(shape) == 1 and shape[0] >= SHORTEST_SERIES
    return grouped and _is_windows(mask) and len(mask) >= 2 * result.shape[1]


def _looks_like_channels(result: Result, shape: tuple[int, ...], mask: Array) -> bool:
    """Whether an input (C, T) is much longer than high, with windows of time that all of its channels share."""
    if result.grouping is None or len(shape) != 2 or shape[1] < max(SHORTEST_SERIES, LONG_STRIP * shape[0]):
        return False
    ids = _alike(mask, shape[-1:])
    return ids is not None and _is_windows(ids)


def _is_windows(ids: Array) -> bool:
    """Whether each id is one contiguous interval."""
    return int((ids[1:] != ids[:-1]).sum()) + 1 == len(np.unique(ids))


def _times(series: Any, length: int) -> Array | None:
    """Return the times of the samples; None if they were not given."""
    if series is None or isinstance(series, bool):
        return None
    times = canvas.array(torch.as_tensor(series, dtype=torch.float64)).reshape(-1)
    if len(times) != length or not (np.diff(times) > 0).all():
        raise ValueError(
            f"series must be True, or the increasing times of the {length} samples, got {len(times)} numbers. The "
            "curve is taken from the inputs."
        )
    return times
