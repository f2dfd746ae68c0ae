"""The diagonal of the Hessian: how f bends along each feature by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from smoothhess.view import captions
from smoothhess.view.figures import canvas, feature_map

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from smoothhess.result.interactions import Interactions


def diagonal(
    result: Interactions,
    *,
    k: int | None = None,
    names: Sequence[str] | None = None,
    example: int = 0,
    limit: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """H_ii, each feature's interaction with itself, unbiased: red where f bends up as the feature rises, blue down.

    A map for images and for groups of them, else bars with ± 2 standard errors, as `gradient`; bars show the k largest
    |H_ii| σ_i². Within noise (|z| < 2) is faint. Three channels are summed, each bending by itself; the standard error
    is then at most the sum of theirs, and that is taken. No d × d matrix is made.

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
    sentence, unit = captions.bending(one)
    noise = f"{captions.quality_words(one)}; {captions.FAINT_WORDS}" if stderr.any() else captions.quality_words(one)
    numbers = feature_map.Numbers(
        value=value,
        stderr=stderr,
        faint=canvas.within_noise(value, stderr),
        title=f"Where f bends along one {captions.noun(one).removesuffix('s')} by itself",
        caption=channels + noise,
        sentence=sentence,
        unit=unit,
        rank=rank,
    )
    return feature_map.draw(one, numbers, k=k, names=names, limit=limit, ax=ax)
