"""SmoothGrad of one example: a map for images, bars for tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from smoothhess.view import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from smoothhess.interactions import Interactions


def gradient(
    result: Interactions,
    *,
    k: int = 20,
    names: Sequence[str] | None = None,
    example: int = 0,
    limit: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """SmoothGrad: a map for inputs (H, W), (1, H, W) or (3, H, W), else bars with error bars of ± 2 standard errors.

    What lies within noise is faint. Three channels are summed: what making the pixel brighter does. Bars show the k
    features with the largest |G_i| σ_i, strongest on top. A map's colours go from −limit to limit; give one limit to
    maps that are to be compared.
    """
    one = result[example]
    size = canvas.image_size(one.feature_shape)
    labels = canvas.check_names(names, one.shape[1])
    return _bars(one, k, labels, ax) if size is None else _map(one, size, limit, ax)


def _map(one: Interactions, size: tuple[int, int], limit: float | None, ax: Axes | None) -> Axes:
    if one.shape[1] > size[0] * size[1]:  # channels: the sum over each pixel, with its own standard error
        pixels = torch.arange(size[0] * size[1], device=one.device).reshape(1, *size).expand(one.feature_shape)
        one = one.groups(pixels)
    slope, stderr = (canvas.array(x[0]).reshape(size) for x in (one.gradient, one.gradient_stderr))
    limit = canvas.symmetric_limit(slope) if limit is None else limit
    ax = canvas.new_axes(ax, 5.4, 4.4)
    picture = ax.imshow(
        slope,
        cmap=canvas.DIVERGING,
        vmin=-limit,
        vmax=limit,
        alpha=np.where(canvas.within_noise(slope, stderr), canvas.FAINT, 1.0),
        interpolation="none",
    )
    bar = ax.figure.colorbar(picture, ax=ax, fraction=0.046, pad=0.03)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    bar.set_label(
        f"{canvas.slope_word(one)}: change of the output\nper unit of the pixel", fontsize="small", labelpad=10
    )
    ax.set_xticks([])
    ax.set_yticks([])
    canvas.caption(ax, "faint: within noise (|z| < 2)")
    return ax


def _bars(one: Interactions, k: int, labels: list[str] | None, ax: Axes | None) -> Axes:
    if k < 1:
        raise ValueError(f"wanted k ≥ 1 bars, got k={k}.")
    d = one.shape[1]
    slope, stderr = (canvas.array(x[0]).reshape(-1) for x in (one.gradient, one.gradient_stderr))
    scales = canvas.array(one.gaussian.scales(d) if one.grouping is None else one.grouping.scales[0])
    chosen = np.argsort(-np.abs(slope * scales), kind="stable")[:k]
    slope, reach = slope[chosen], 2 * stderr[chosen]
    labels = [str(i) if labels is None else labels[i] for i in chosen]
    ax = canvas.new_axes(ax, 6.4, 1.3 + 0.26 * len(chosen))
    y = np.arange(len(chosen))
    bars = ax.barh(y, slope, height=0.7, color=canvas.sign_colours(slope))
    for rectangle, faint in zip(bars, canvas.within_noise(slope, reach / 2), strict=True):
        rectangle.set_alpha(canvas.FAINT if faint else 0.85)
    ax.errorbar(slope, y, xerr=reach, fmt="none", ecolor="black", elinewidth=1.1, capsize=2)
    ax.axvline(0, color=canvas.INK, linewidth=0.8)
    ax.set_yticks(y, labels)
    ax.set_ylim(len(chosen) - 0.4, -0.6)
    unit = "the feature" if one.grouping is None else "every feature of the group"
    whiskers = "" if one.design == "exact" else "; whiskers: ± 2 s.e."
    ax.set_xlabel(f"{canvas.slope_word(one)}: change of the output\nper unit of {unit}{whiskers}", fontsize="small")
    left_out = d - len(chosen)
    canvas.caption(ax, f"the {len(chosen)} strongest of {d}" if left_out else "")
    ax.tick_params(axis="y", length=0)
    canvas.hide_spines(ax, "top", "right", "left")
    return ax
