"""The matrix of interactions of one example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from smoothhess.view import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from smoothhess.interactions import Interactions

MOST_NAMES = 40  # more do not fit on an axis


def heatmap(
    result: Interactions,
    *,
    names: Sequence[str] | None = None,
    example: int = 0,
    limit: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """The Hessian as a matrix of colours, red above 0 and blue below.

    Entries whose unbiased estimate lies within its noise (|z| < 2) are faint, also where the colours are denoised.

    `names` stand on the axes for up to 40 features; an image's pixels go row by row, with a line between rows.
    `limit` sets the colour scale from −limit to limit; the largest |entry| if None.
    """
    one = result[example]
    stderr, hessian = canvas.array(one.stderr()[0]), canvas.array(one.hessian[0])
    labels = canvas.check_names(names, len(hessian))
    limit = canvas.symmetric_limit(hessian) if limit is None else limit
    faint = canvas.within_noise(canvas.array(one.unshrunk().hessian[0]), stderr)
    ax = canvas.new_axes(ax, 6.6, 5.6)
    picture = ax.imshow(
        hessian,
        cmap=canvas.DIVERGING,
        vmin=-limit,
        vmax=limit,
        alpha=np.where(faint, canvas.FAINT, 1.0),
        interpolation="none",
    )
    _ticks(ax, one, labels)
    bar = ax.figure.colorbar(picture, ax=ax, fraction=0.046, pad=0.03)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    bar.set_label(
        f"interaction $H_{{ij}}$: extra change of the output when both rise,\n{canvas.unit_words(one)}",
        fontsize="small",
    )
    shown = "denoised; faint: " if one.shrink else "faint: "
    canvas.caption(ax, f"{canvas.quality_words(one)}; {shown}unbiased estimate within noise (|z| < 2)")
    canvas.hide_spines(ax, "top", "right", "left", "bottom")
    return ax


def _ticks(ax: Axes, one: Interactions, labels: list[str] | None) -> None:
    d = one.shape[1]
    size = canvas.image_size(one.feature_shape)
    if labels is not None and d <= MOST_NAMES:
        font = 8 if d <= 20 else 6.5
        ax.set_xticks(range(d), labels, rotation=90, fontsize=font)
        ax.set_yticks(range(d), labels, fontsize=font)
        ax.tick_params(length=0)
        return
    kind = "feature" if one.grouping is None else "group"
    if size is not None and labels is None and d // size[1] <= MOST_NAMES:
        width, rows = size[1], d // size[1]
        middles = np.arange(rows) * width + (width - 1) / 2
        words = [str(row % size[0]) for row in range(rows)]
        ax.set_xticks(middles, words)
        ax.set_yticks(middles, words)
        edges = np.arange(1, rows) * width - 0.5
        ax.vlines(edges, -0.5, d - 0.5, colors="#bbbbbb", linewidths=0.4)
        ax.hlines(edges, -0.5, d - 0.5, colors="#bbbbbb", linewidths=0.4)
        ax.tick_params(length=0)
        kind = "pixels, by row of the image"
    ax.set_xlabel(kind)
    ax.set_ylabel(kind)
