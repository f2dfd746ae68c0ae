"""Segments: groups of features as super-pixels, grid cells, named columns, time windows, or from a mask.

Functions that make masks, and the noise that shifts segments, belong here. Sums over groups are computed in
`smoothhess.estimate.grouping`, the Gaussian of such noise is in `smoothhess.draws.gaussian`.

>>> import torch, smoothhess as sh
>>> cells = grid((1, 8, 8), 2)
>>> cells.names
('cell (0, 0)', 'cell (0, 1)', 'cell (1, 0)', 'cell (1, 1)')
>>> f = lambda x: x[:, 0, 0, 0] * x[:, 0, 7, 7]
>>> result = sh.SmoothHess(f).attribute(torch.zeros(1, 1, 8, 8), sigma=0.5, n_calls=4000, feature_mask=cells)
>>> result.top_pairs(1, cells.names)[0][0].names
('cell (0, 0)', 'cell (1, 1)')
"""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smoothhess.draws.gaussian import Gaussian, SegmentShift
from smoothhess.model.bounded_files import read_array, read_image, read_text

__all__ = ["Segments", "columns", "from_mask", "grid", "noise", "parse", "slic", "windows"]

COMPACTNESS = 10.0, 100.0, 1000.0  # of super-pixels, tried in this order; 1000 gives squares
WORDS = "slic:50, grid:14 or grid:7x14, columns or columns:groups.json, window:0.5s (with --step), mask:file, none"


@dataclass(frozen=True, eq=False)
class Segments:
    """A partition of the features of one input into K named segments.

    Pass it, or its `mask`, as feature_mask, and `names` as names. All channels of a pixel, or of a time step, belong to
    the same segment.

    Raises:
        ValueError: if the ids of the mask are not exactly 0 … K−1.
    """

    mask: Tensor  # shape of one input; segment ids 0 … K−1, each of them used
    names: tuple[str, ...]  # K names

    def __post_init__(self) -> None:
        found = torch.unique(self.mask)
        if not torch.equal(found, torch.arange(len(self.names), device=found.device)):
            raise ValueError(
                f"mask must use all ids 0 … {len(self.names) - 1}, one for each of the {len(self.names)} names, got "
                f"{len(found)} different ids from {int(found[0])} to {int(found[-1])}. segments.from_mask(mask) "
                "numbers any ids so."
            )

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"Segments({len(self)} segments of shape {tuple(self.mask.shape)}: {_listed(self.names)})"

    def __dlpack__(self, **options: Any) -> Any:  # torch.as_tensor(segments) is its mask
        return self.mask.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.mask.__dlpack_device__()

    @property
    def sizes(self) -> Tensor:
        """Number of features in each segment, (K,)."""
        return torch.bincount(self.mask.reshape(-1), minlength=len(self))


def group_names(feature_mask: Any) -> tuple[str, ...] | None:
    """The names of the groups of a `feature_mask`; None if it is not a `Segments`."""
    return feature_mask.names if isinstance(feature_mask, Segments) else None


def slic(image: Any, n: int = 50, *, compactness: float | None = None) -> Segments:
    """Super-pixels of an image: patches of similar colour that follow its edges (SLIC).

    Args:
        image: (H, W) or (C, H, W). Values may be on any scale: they are rescaled to 0 … 1.
        n: approximate number of super-pixels.
        compactness: weight of distance against colour; larger values give squarer patches. None: 10, or 100 or 1000
            where that gives fewer than half of n super-pixels, as in small and noisy images.

    Returns:
        `Segments` with the shape of the image. A warning is issued if there are fewer than half of n.

    Raises:
        ImportError: if scikit-image is not installed.
        ValueError: if the image has another number of dimensions, its channels in the last one, or if n is not between
            1 and the number of pixels.
    """
    pixels = torch.as_tensor(image).detach().cpu()
    height, width = _image_size(tuple(pixels.shape))
    if pixels.ndim == 3 and width in (1, 3, 4) and pixels.shape[0] > 4:
        raise ValueError(
            f"the channels of an image must come first, (C, H, W), got {tuple(pixels.shape)}. Use image.permute(2, 0, "
            "1), or image.transpose(2, 0, 1) for an array."
        )
    n = _count(n, "super-pixels")
    if n > height * width:
        raise ValueError(f"n must be at most {height * width} super-pixels, one per pixel of this image, got {n}.")
    try:
        from skimage.segmentation import slic as find
    except ImportError as error:
        raise ImportError(
            "super-pixels need scikit-image: pip install scikit-image, or use a grid (grid:14) instead"
        ) from error
    planes = pixels.reshape(-1, height, width).double()
    low, high = planes.min(), planes.max()
    planes = (planes - low) / (high - low).clamp_min(torch.finfo(torch.float64).tiny)
    colours = planes.permute(1, 2, 0).numpy()
    # three channels are converted from RGB to CIELAB, 0 … 100; others are used as they are, 0 … 1
    coloured = colours.shape[-1] == 3

    def found(weight: float) -> Segments:
        mask = find(
            colours,
            n_segments=n,
            compactness=weight if coloured else weight / 100,
            start_label=0,
            channel_axis=-1,
            convert2lab=coloured,
        )
        return _numbered(mask, "segment {}", tuple(pixels.shape))

    tried = (found(weight) for weight in (COMPACTNESS if compactness is None else (compactness,)))
    parts = [next(tried)]
    while 2 * len(parts[-1]) < n and (more := next(tried, None)) is not None:
        parts.append(more)
    best = max(parts, key=len)
    if 2 * len(best) < n:
        warnings.warn(
            f"SLIC found {len(best)} of {n} super-pixels: it merges patches of which few pixels are connected. Pass a "
            "larger compactness, or use segments.grid.",
            stacklevel=2,
        )
    return best


def grid(shape: Sequence[int], cells: int | tuple[int, int]) -> Segments:
    """A grid of rectangular cells over an image, or of intervals over a curve.

    The sizes of cells differ by at most one pixel if the image size is not a multiple of the number of cells.

    Args:
        shape: shape of one input: (H, W), (C, H, W), or (L,).
        cells: number of cells along each side, or (rows, columns).

    Returns:
        `Segments` with the given shape.

    Raises:
        ValueError: if there are more cells than pixels along a side, or fewer than 1.

    >>> grid((4, 6), (2, 3)).mask
    tensor([[0, 0, 1, 1, 2, 2],
            [0, 0, 1, 1, 2, 2],
            [3, 3, 4, 4, 5, 5],
            [3, 3, 4, 4, 5, 5]])
    """
    shape = tuple(shape)
    if len(shape) == 1:
        n = _count(cells, "cells")
        _refuse_more(n, shape[0])
        return _spread(_parts(shape[0], n), [f"cell {i}" for i in range(n)], shape)
    height, width = _image_size(shape)
    given = (cells, cells) if not isinstance(cells, tuple | list) else tuple(cells)
    if len(given) != 2:
        raise ValueError(f"cells must be one number, or rows and columns, got {len(given)} numbers.")
    rows, across = (_count(c, "cells") for c in given)
    _refuse_more(rows, height)
    _refuse_more(across, width)
    mask = _parts(height, rows)[:, None] * across + _parts(width, across)
    return _spread(mask, [f"cell ({r}, {c})" for r in range(rows) for c in range(across)], shape)


def columns(names: Sequence[str], groups: Mapping[str, Sequence[str]] | None = None) -> Segments:
    """Named groups of the columns of a table; a column in no group is a segment under its own name.

    Args:
        names: the names of the columns, in order.
        groups: lists of column names by the name of their group.

    Returns:
        `Segments` with shape (number of columns,).

    Raises:
        TypeError: if a group is a string instead of a list.
        ValueError: if two columns have the same name, a group names an unknown column, a column is in two groups, or a
            group has the name of a column outside it.

    >>> body = columns(["age", "height", "weight", "dose"], {"body": ["height", "weight"]})
    >>> body.names, body.mask.tolist()
    (('age', 'body', 'dose'), [0, 1, 1, 2])
    """
    names, groups = [str(name) for name in names], groups or {}
    if len(set(names)) != len(names):
        raise ValueError("names must be different, got two columns with the same name. Rename one of them.")
    known, home = set(names), dict[str, str]()
    for group, members in groups.items():
        if isinstance(members, str):
            raise TypeError(f"group {group!r} must be a list of columns, got a string.")
        for member in members:
            if member not in known:
                raise ValueError(f"group {group!r} names the column {member!r}, which is not among {_listed(names)}.")
            if member in home:
                raise ValueError(f"the column {member!r} is in the groups {home[member]!r} and {group!r}: choose one.")
            home[member] = str(group)
    ungrouped = [name for name in names if name not in home]
    if clash := sorted(set(ungrouped) & set(home.values())):
        raise ValueError(f"{clash[0]!r} is both a group and a column outside it. Give the group another name.")
    labels = [home.get(name, name) for name in names]
    order = list(dict.fromkeys(labels))
    numbers = {label: i for i, label in enumerate(order)}
    return Segments(torch.tensor([numbers[label] for label in labels]), tuple(order))


def windows(
    length: int | Sequence[int], width: float, step: float | None = None, *, unit: str | None = None
) -> Segments:
    """Time windows of equal width over a curve; the last window is shorter if the width does not divide the curve.

    Args:
        length: number of samples, or the shape of one input, (L,) or (C, L): time is its last dimension, and all
            channels of a time step belong to the same window.
        width: width of a window, in the unit of `step`.
        step: time between two samples; None measures the width in samples.
        unit: name of the unit of time, for the names of the windows; None is "s" with a step, and no name without.

    Returns:
        `Segments` with the shape of one input.

    Raises:
        ValueError: if `step` is not positive, or `width` is less than `step`.

    >>> windows(10, 0.2, step=0.05).names
    ('0–0.2 s', '0.2–0.4 s', '0.4–0.5 s')
    >>> windows((2, 4), 2).mask
    tensor([[0, 0, 1, 1],
            [0, 0, 1, 1]])
    """
    shape = (int(length),) if hasattr(length, "__index__") else tuple(length)  # type: ignore[arg-type]
    samples, ending = shape[-1], "s" if unit is None and step is not None else unit or ""
    step = 1.0 if step is None else step
    if not (step > 0 and math.isfinite(step)):
        raise ValueError(f"step must be the positive time between two samples, got {step}.")
    if not width >= step * (1 - 1e-9):
        raise ValueError(
            f"a window of {width:g} is shorter than the step of {step:g} between samples, so it could be empty. Pass a "
            "larger width, or the correct step."
        )
    per_window = width / step
    count = max(1, math.ceil(samples / per_window - 1e-9))
    edges = [min(samples, round(i * per_window)) for i in range(count)] + [samples]
    mask = torch.zeros(samples, dtype=torch.long)
    kept = [(a, b) for a, b in itertools.pairwise(edges) if b > a]
    for i, (a, b) in enumerate(kept):
        mask[a:b] = i
    return _spread(mask, [f"{a * step:.6g}–{b * step:.6g} {ending}".rstrip() for a, b in kept], shape)


def from_mask(mask: Any, shape: Sequence[int] | None = None) -> Segments:
    """Segments from an array of integer ids or a file.

    Ids need not be consecutive: they are numbered 0 … K−1 in increasing order, and the names contain the original ids.

    Args:
        mask: an array of integer ids, or the path of a .npy file, or of a .png or other image file with one colour per
            segment.
        shape: shape of one input; a mask (H, W) is then used for all channels of (C, H, W).

    Returns:
        `Segments` with the given shape, or that of the mask.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the mask does not hold integers, does not fit `shape`, or the file cannot be read.

    >>> from_mask(np.array([[7, 7], [9, 7]])).names
    ('segment 7', 'segment 9')
    """
    ids, colours = _read_mask(Path(mask)) if isinstance(mask, str | Path) else (torch.as_tensor(mask).cpu(), None)
    if ids.is_floating_point() or ids.is_complex():
        raise ValueError(f"mask must hold whole numbers, one id per feature, got {ids.dtype}.")
    ids, what = ids.long(), f"the mask {mask}" if isinstance(mask, str | Path) else "the mask"
    if shape is not None:
        try:
            ids = ids.expand(tuple(shape))
        except RuntimeError as error:
            raise ValueError(
                f"{what} has shape {tuple(ids.shape)}, but one input has {tuple(shape)}. Pass an id for every "
                "feature, or for every pixel."
            ) from error
    found, mask_ids = torch.unique(ids, return_inverse=True)
    names = [f"segment {i}" if colours is None else f"colour {colours[i]}" for i in found.tolist()]
    return Segments(mask_ids, tuple(names))


def noise(parts: Any, sigma: Any) -> Gaussian:
    """Noise that shifts all features of a segment by the same random amount, for the argument `gaussian`.

    With feature_mask=parts, entry (I, J) of the result is the mixed second derivative of the smoothed model with
    respect to the shifts of segments I and J. The rank of the problem is K, the number of segments, for any number of
    features. Independent noise on every feature (sigma= or radius=) explains the features inside the segments, and
    their sums need many more calls.

    Args:
        parts: `Segments`, or integer ids 0 … K−1 with the shape of one input, each of them used; the same for all
            examples.
        sigma: standard deviation of the shifts, a number or one per segment; a segment with 0 does not move.

    Returns:
        A Gaussian of rank K. No d × d matrix is made.

    Raises:
        TypeError: if `parts` does not hold integers, or sigma is not numeric.
        ValueError: if the ids are not 0 … K−1, or sigma is negative, not finite, or of another length than K.

    >>> import smoothhess as sh
    >>> halves = grid((1, 8, 8), (1, 2))
    >>> f = lambda x: x[:, 0, :, :4].mean((1, 2)) * x[:, 0, :, 4:].mean((1, 2))
    >>> explainer, x = sh.SmoothHess(f), torch.zeros(1, 1, 8, 8, dtype=torch.float64)
    >>> result = explainer.attribute(x, gaussian=noise(halves, 0.5), feature_mask=halves, n_calls=8)
    >>> [[round(value, 6) for value in row] for row in result.hessian[0].abs().tolist()]
    [[0.0, 1.0], [1.0, 0.0]]
    """
    try:
        mask = torch.as_tensor(parts).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"parts must be one mask of integer ids or Segments, got {type(parts).__name__}. If the examples have "
            "different segments, explain them one by one, each with its own segments.noise."
        ) from error
    if mask.is_floating_point() or mask.is_complex() or mask.dtype == torch.bool:
        raise TypeError(f"parts must hold integer ids 0 … K−1, one per feature, got {mask.dtype}.")
    mask = mask.reshape(-1).long()
    if not mask.numel() or int(mask.min()) < 0:
        got = "none" if not mask.numel() else int(mask.min())
        raise ValueError(f"segment ids must be 0, 1, 2, …, got {got}. segments.from_mask(mask) numbers any ids so.")
    count = int(mask.max()) + 1
    used = torch.unique(mask)
    if len(used) < count:  # memory for all ids could be large
        first = int(torch.nonzero(used != torch.arange(len(used)))[0])
        raise ValueError(
            f"each of the ids 0 … {count - 1} must have a feature, got {count - len(used)} without (such as {first}). "
            "segments.from_mask(mask) numbers the ids that are used without gaps."
        )
    try:
        sigmas = torch.as_tensor(sigma, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"sigma must be a number or one per segment, got {type(sigma).__name__}.") from error
    if sigmas.ndim > 0 and sigmas.shape != (count,):
        raise ValueError(f"sigma must be a number or one per segment, {count} here, got shape {tuple(sigmas.shape)}.")
    if not bool(((sigmas >= 0) & sigmas.isfinite()).all()) or not bool((sigmas > 0).any()):
        raise ValueError(
            "sigma must be a positive, finite standard deviation (0 for segments that must not move), got "
            f"{float(sigmas.min()):g} … {float(sigmas.max()):g}."
        )
    return SegmentShift(mask, sigmas.expand(count).clone())


def parse(words: str, inputs: Tensor, names: Sequence[str] | None = None, step: float | None = None) -> Segments | None:
    """Segments of one input from the text of the command-line option.

    Args:
        words: such as "grid:14", "slic:50", "columns:groups.json", "window:0.5s", "mask:file" or "none".
        inputs: one input, (*shape).
        names: names of the columns, for "columns".
        step: seconds between two samples, for "window".

    Returns:
        `Segments`, or None for "none".

    Raises:
        FileNotFoundError: if a file does not exist.
        ValueError: if the text is not understood, or does not fit the input.

    >>> len(parse("grid:2x3", torch.zeros(3, 8, 9)))
    6
    >>> parse("window:0.1s", torch.zeros(1, 5), step=0.05).names
    ('0–0.1 s', '0.1–0.2 s', '0.2–0.25 s')
    """
    kind, _, rest = words.strip().partition(":")
    shape = tuple(inputs.shape)
    if kind == "none" and not rest:
        return None
    if kind == "slic":
        return slic(inputs, _number(rest or "50", words))
    if kind == "grid" and rest:
        across = [_number(part, words) for part in rest.lower().replace("×", "x").split("x")]
        if len(across) > 2:
            raise ValueError(f"a grid must be given as grid:14 or grid:7x14, got {words!r}.")
        return grid(shape, across[0] if len(across) == 1 else (across[0], across[1]))
    if kind == "columns":
        if names is None:
            raise ValueError("segments by columns need the names of the columns, got none. Use a csv with a header.")
        groups = _read_groups(Path(rest)) if rest else None
        try:
            return columns(names, groups)
        except ValueError as error:
            raise ValueError(f"{words}: {error}") from error
    if kind == "window" and rest:
        return _parse_window(rest, words, shape, step)
    if kind == "mask" and rest:
        return from_mask(rest, shape)
    raise ValueError(f"segments can be {WORDS}; got {words!r}.")


def _parse_window(rest: str, words: str, shape: tuple[int, ...], step: float | None) -> Segments:
    seconds = rest.endswith("s")
    try:
        width = float(rest.removesuffix("s").removesuffix("m")) / (1000 if rest.endswith("ms") else 1)
    except ValueError as error:
        raise ValueError(
            f"a window must be given as window:0.5s, window:20ms or window:20 (samples), got {words!r}."
        ) from error
    if step is None:
        if seconds:
            raise ValueError(
                f"{words} is in seconds: give --step, the seconds between two samples, or a width in samples."
            )
        return windows(shape, width)
    return windows(shape, width if seconds else width * step, step)


def _number(text: str, words: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"expected a whole number in {words!r}, got {text!r}. Segments can be {WORDS}.") from error


def _read_groups(path: Path) -> dict[str, list[str]]:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}. Write json like {{'body': ['height', 'weight']}} to it.")
    text = read_text(path)
    try:
        groups = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not json ({error}).") from error
    lists = groups.values() if isinstance(groups, dict) else [None]
    if not all(isinstance(v, list) and all(isinstance(name, str) for name in v) for v in lists):
        raise ValueError(f"{path} must hold an object with a list of column names for each group.")
    return groups


def _read_mask(path: Path) -> tuple[Tensor, list[str] | None]:
    """Ids, and for a colour image the colour of each id."""
    if not path.is_file():
        raise FileNotFoundError(f"no mask at {path}. Pass the path of a .npy or .png file.")
    if path.suffix == ".npy":
        array = read_array(path)
        if array.dtype.kind not in "iub":
            raise ValueError(f"{path} must hold an array of whole numbers, got {array.dtype}.")
        return torch.from_numpy(array.astype(np.int64)), None
    ids = np.asarray(read_image(path)[0])
    if ids.ndim == 2:  # grey levels, black and white, or palette indices
        return torch.from_numpy(ids.astype(np.int64)), None
    colours, inverse = np.unique(ids.reshape(-1, ids.shape[-1])[:, :3], axis=0, return_inverse=True)
    names = ["#" + "".join(f"{int(c):02x}" for c in colour) for colour in colours]
    return torch.from_numpy(inverse.reshape(ids.shape[:2]).astype(np.int64)), names


def _numbered(found: Any, name: str, shape: tuple[int, ...]) -> Segments:
    ids, mask = torch.unique(torch.from_numpy(np.asarray(found).astype(np.int64)), return_inverse=True)
    return _spread(mask, [name.format(i) for i in range(len(ids))], shape)


def _spread(mask: Tensor, names: Sequence[str], shape: Sequence[int]) -> Segments:
    """Segments of the given shape from a mask of its trailing dimensions."""
    return Segments(mask.expand(tuple(shape)).contiguous(), tuple(names))


def _parts(size: int, n: int) -> Tensor:
    """Indices (size,) of n consecutive parts of nearly equal length."""
    return torch.arange(size) * n // size


def _image_size(shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) not in (2, 3):
        raise ValueError(f"the shape must be that of one image, (H, W) or (C, H, W), got {shape}.")
    return shape[-2], shape[-1]


def _count(n: Any, what: str) -> int:
    if isinstance(n, bool) or not hasattr(n, "__index__") or int(n) < 1:
        raise ValueError(f"the number of {what} must be a whole number, at least 1, got {n!r}.")
    return int(n)


def _refuse_more(n: int, size: int) -> None:
    if n > size:
        raise ValueError(f"{n} cells are more than the {size} features along that side. Pass fewer cells.")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
