"""Figure of the interactions of one segment, or one pixel, with all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from smoothhess.result.pairs import labels_of
from smoothhess.view import captions
from smoothhess.view.figures import canvas, image_background, title_layout
from smoothhess.view.figures.canvas import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from smoothhess.result.result import Result


def segment(
    result: Result,
    *,
    source: int | tuple[int, ...] | str | None = None,
    names: Sequence[str] | None = None,
    image: Any = None,
    beside: bool = True,
    cmap: str = "gray",
    example: int = 0,
    limit: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the interactions of one segment, the source, with all others: red for H > 0, blue for H < 0.

    The result has groups of pixels, `result.groups(mask)`, or its inputs are images of one channel, whose pixels are
    the segments, or its features are the patches of a vision transformer. Segments whose unbiased interaction is within
    noise (|z| < 2) are faint. The source is outlined and grey, since its diagonal entry is not an interaction.

    Args:
        result: The result to draw.
        source: Index of the source, its position (row, column) for pixels, or one of `names`; None takes the segment
            with the strongest interactions.
        names: One name per segment.
        image: The picture of a result of patches, such as the pixels that were explained; for other results a picture
            of the same height and width in place of the input. (H, W), (3, H, W) or (H, W, 3).
        beside: Whether to draw the input as well.
        cmap: Matplotlib colour map of one-channel images.
        example: Index of the example in the batch.
        limit: The colour scale is from −limit to limit; the largest |H_ij| of the source if None.
        ax: Axes to draw into; a new figure if None.

    Returns:
        The Axes.

    Raises:
        ValueError: If the inputs are not images, the groups differ between channels, or there is no such source.

    >>> import torch, smoothhess as sh
    >>> f = lambda x: x[:, 0, 0] * x[:, 1, 1]
    >>> result = sh.SmoothHess(f).attribute(torch.zeros(1, 2, 2), sigma=0.5, n_calls=400)
    >>> segment(result, source=(0, 0)).images[-1].get_array().round(3).tolist()
    [[None, 0.0], [0.0, 1.0]]
    """
    one = canvas.one_example(result, example)
    picture = image_background.picture_of(one, image, "'heatmap' or 'pairs', or 'series' for curves")
    segments = _segments(one, picture)
    labels = canvas.names_of(one, names)
    index = source_of(one, source, labels)
    value, faint, sampled = interactions_with(one, index)
    value[index] = np.nan
    limit = canvas.symmetric_limit(value, limit)
    colours, inside = np.ma.masked_invalid(value[segments]), segments == index
    size = height, width = picture.size
    shift = width * 1.08 if beside else 0.0
    ax = canvas.new_axes(ax, 7.6 if beside else 5.2, 4.4)
    font = title_layout.small(ax)
    if beside:
        image_background.put(ax, picture.pixels, cmap, 0.0, 1.0, "", font)
        image_background.outline_one(ax, inside, 0.0)
    extent = image_background.extent_of(size, shift)
    ax.imshow(np.where(inside, 0.75, np.nan), cmap="gray", vmin=0, vmax=1, extent=extent, interpolation="none")
    shown = ax.imshow(
        colours,
        cmap=canvas.DIVERGING,
        vmin=-limit,
        vmax=limit,
        alpha=np.where(faint[segments], canvas.FAINT, 1.0),
        extent=extent,
        interpolation="none",
    )
    image_background.frame(ax, size, shift)
    image_background.outlines(ax, segments, shift, "#999999", 0.5)
    image_background.outline_one(ax, inside, shift)
    ax.set_xlim(-0.6, shift + width - 0.4)
    ax.set_ylim(height - 0.4, -0.6)
    ax.set_aspect("equal")
    ax.set_axis_off()
    name = labels_of(labels, one.shape[1], one.feature_shape)(index)
    thing = captions.noun(one)
    what = name if labels is not None and not name.startswith("(") else f"{thing} {name}"
    kept = f"{captions.FAINT_WORDS}; " if sampled else ""
    note = f"{captions.quality_words(one)}; {kept}grey: the {thing} itself"
    title_layout.colour_bar(
        ax, shown, *captions.interaction_label(one), {ax: (f"What acts together with {what} (outlined)", note)}
    )
    return ax


def _segments(one: Result, picture: image_background.Picture) -> Array:
    """Return the index of the feature that each pixel belongs to, (H, W)."""
    if picture.segments is not None:
        return picture.segments
    if one.grouping is None:
        raise ValueError(
            f"the pixels of {tuple(one.inputs.shape[1:])} have several channels each: sum over channels, or over "
            "segments, with result.groups(mask)."
        )
    raise ValueError("the groups differ between channels, so they are not segments of the image. Use kind 'pairs'.")


def source_of(one: Result, source: int | tuple[int, ...] | str | None, labels: list[str] | None) -> int:
    """Return the index of the source; the feature with the strongest interactions if None."""
    d = one.shape[1]
    if source is None:
        if d > canvas.MOST_FEATURES:
            raise ValueError(
                f"source must be given for more than {canvas.MOST_FEATURES} features, this result has {d}. Pass "
                "source=, its index or position."
            )
        scales = canvas.scales_of(one)
        effect = np.abs(canvas.array(one.hessian[0])) * scales[:, None] * scales
        np.fill_diagonal(effect, 0)
        return int(np.linalg.norm(effect, axis=1).argmax())
    if isinstance(source, str):
        if labels is None or source not in labels:
            known = "names were not given" if labels is None else f"names are {', '.join(labels[:6])}, …"
            raise ValueError(f"there is no feature named {source!r}: {known}.")
        return labels.index(source)
    place = tuple(source) if isinstance(source, tuple | list) else (source,)
    shape = one.feature_shape[-len(place) :] if len(place) > 1 else (d,)
    fits = len(place) == len(shape) and (len(place) == 1 or int(np.prod(shape)) == d)
    valid = all(isinstance(i, int | np.integer) and -n <= i < n for i, n in zip(place, shape, strict=False))
    if not fits or not valid:
        raise ValueError(f"source {source!r} is not among the {d} features of shape {one.feature_shape}.")
    return int(np.ravel_multi_index([int(i) % n for i, n in zip(place, shape, strict=True)], shape))


def interactions_with(one: Result, index: int) -> tuple[Array, Array, bool]:
    """Return row `index` of the Hessian, where it is within noise, and whether there is noise."""
    found = one.row(index)
    value, stderr = (canvas.array(x[0]).reshape(-1) for x in (found.value, found.stderr))
    return value, canvas.within_noise(value, stderr), bool(stderr.any())
