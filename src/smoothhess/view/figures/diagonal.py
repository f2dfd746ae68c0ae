"""Figure of the diagonal of the Hessian: the curvature of f along each feature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from smoothhess.view import captions
from smoothhess.view.figures import canvas, feature_map

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from smoothhess.result.result import Result


def diagonal(
    result: Result,
    *,
    k: int | None = None,
    names: Sequence[str] | None = None,
    example: int = 0,
    limit: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the unbiased diagonal entries H_ii: red for positive curvature along the feature, blue for negative.

    Images and groups of pixels are drawn as a map, other inputs as bars with 95 % intervals. Values within noise
    (|z| < 2) are faint. Three channels are summed, and the standard error is the sum of the three standard errors, an
    upper bound. No d × d matrix is computed.

    Args:
        result: The result to draw.
        k: Number of bars, those with the largest |H_ii| σ_i²; 20 if None.
        names: One name per feature or group.
        example: Index of the example in the batch.
        limit: The colour scale of a map is from −limit to limit; the largest |H_ii| if None.
        ax: Axes to draw into; a new figure if None.

    Returns:
        The Axes.

    >>> import torch, smoothhess as sh
    >>> result = sh.SmoothHess(lambda x: x[:, 0] ** 2).attribute(torch.zeros(1, 3), sigma=0.5, n_calls=120)
    >>> [abs(round(bar.get_width(), 4)) for bar in diagonal(result).patches]
    [2.0, 0.0, 0.0]
    """
    one = canvas.one_example(result, example)
    found = one.diagonal()
    value, stderr = (canvas.array(x[0]).reshape(-1) for x in (found.value, found.stderr))
    rank = value * canvas.scales_of(one) ** 2
    size, channels = captions.image_size(one.feature_shape), ""
    if size is not None and len(value) > size[0] * size[1]:
        value, stderr, rank = (x.reshape(-1, size[0] * size[1]).sum(0) for x in (value, stderr, rank))
        channels = "channels summed; "
    sentence, unit = captions.diagonal_label(one)
    noise = f"{captions.quality_words(one)}; {captions.FAINT_WORDS}" if stderr.any() else captions.quality_words(one)
    numbers = feature_map.Numbers(
        value=value,
        half=None if channels else canvas.array(found.half_width()[0]).reshape(-1),
        faint=canvas.within_noise(value, stderr),
        title=f"Where f bends along one {captions.noun(one)} by itself",
        caption=channels + noise,
        sentence=sentence,
        unit=unit,
        rank=rank,
    )
    return feature_map.draw(one, numbers, k=k, names=names, limit=limit, ax=ax)
