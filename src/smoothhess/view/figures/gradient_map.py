"""Figure of SmoothGrad, the smoothed gradient: a map for images, bars for tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from smoothhess.result.interactions import SampledResult
from smoothhess.view import captions
from smoothhess.view.figures import canvas, feature_map
from smoothhess.view.figures.canvas import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from smoothhess.result.result import Result


def gradient(
    result: Result,
    *,
    k: int | None = None,
    names: Sequence[str] | None = None,
    example: int = 0,
    limit: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw SmoothGrad: a map for inputs (H, W), (1, H, W) or (3, H, W), else bars with 95 % intervals.

    Values within noise (|z| < 2) are faint. Three channels are summed, which is the effect of brightening the pixel.
    For groups of an image, all pixels of a group have its colour. More than 40 unnamed features of one dimension are
    drawn as a profile unless `k` is given.

    Args:
        result: The result to draw.
        k: Number of bars, those with the largest |G_i| σ_i, strongest on top; 20 if None.
        names: One name per feature or group.
        example: Index of the example in the batch.
        limit: The colour scale of a map is from −limit to limit; the largest |G_i| if None. Use one limit for maps
            that are compared.
        ax: Axes to draw into; a new figure if None.

    Returns:
        The Axes.
    """
    one = canvas.one_example(result, example)
    value, stderr = _by_pixel(one)
    every_feature = len(value) == one.shape[1]
    rank = value * canvas.scales_of(one) if every_feature else value
    channels = "" if every_feature else "channels summed; "
    sentence, unit = captions.gradient_label(one)
    numbers = feature_map.Numbers(
        value=value,
        half=canvas.array(one.gradient_estimate().half_width()[0]).reshape(-1) if every_feature else None,
        faint=canvas.within_noise(value, stderr),
        title=f"What each {captions.noun(one)} does by itself",
        caption=f"{channels}{captions.FAINT_WORDS}" if stderr.any() else channels + captions.quality_words(one),
        sentence=sentence,
        unit=unit,
        rank=rank,
    )
    return feature_map.draw(one, numbers, k=k, names=names, limit=limit, ax=ax)


def _by_pixel(one: Result) -> tuple[Array, Array]:
    """Return SmoothGrad and its standard errors, (d,), or their sums over channels, (H·W,)."""
    size = captions.image_size(one.feature_shape)
    if size is None or one.shape[1] == size[0] * size[1]:
        return canvas.array(one.gradient[0]).reshape(-1), canvas.array(one.gradient_stderr[0]).reshape(-1)
    slope = canvas.array(one.gradient[0]).reshape(-1, size[0] * size[1]).sum(0)
    if not isinstance(one, SampledResult):  # the standard error of a sum is at most the sum of the standard errors
        return slope, canvas.array(one.gradient_stderr[0]).reshape(-1, size[0] * size[1]).sum(0)
    # standard errors of the summed draws, as in groups(pixels), which would need a K × K matrix
    rows = one.estimate.features.head.even
    sums = rows.reshape(*rows.shape[:2], -1, size[0] * size[1]).sum(2)
    return slope, np.sqrt(canvas.array(one.noise.of_mean(sums).value[0]))
