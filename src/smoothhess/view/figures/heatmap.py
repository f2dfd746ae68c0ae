"""The matrix of interactions of one example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from smoothhess.result.pairs import labels_of
from smoothhess.view import captions
from smoothhess.view.figures import canvas, title_layout
from smoothhess.view.figures.canvas import Array
from smoothhess.view.figures.feature_order import clustered

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from smoothhess.result.interactions import Interactions

MOST_NAMES = 40  # more do not fit on an axis
LEAST_POINTS = 4.5  # type smaller than this cannot be read


def heatmap(
    result: Interactions,
    *,
    names: Sequence[str] | None = None,
    order: Literal["given", "clustered"] | Sequence[int] = "given",
    k: int | None = None,
    example: int = 0,
    limit: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """The Hessian as a matrix of colours, red above 0 and blue below.

    Entries whose unbiased estimate lies within its noise (|z| < 2) are faint, also where the colours are denoised.

    `names` stand on the axes for up to 40 features, where they fit; an image's pixels go row by row, with a line
    between rows. `order="clustered"` puts features that act together side by side (average linkage of |H_ij| σ_i σ_j);
    a sequence of their numbers shows those, in that order. `k` shows only the k features with the strongest
    interactions, and is wanted for more than 1 000 features. `limit` sets the colour scale from −limit to limit; the
    largest |entry| if None.
    """
    one = canvas.one_example(result, example)
    d = one.shape[1]
    labels = canvas.check_names(names, d)
    if d > canvas.MOST_FEATURES and (k is None or d > canvas.MOST_MATRIX):
        advice = "Pass k=40 for the strongest alone, use " if d <= canvas.MOST_MATRIX else "Use "
        raise ValueError(
            f"a matrix of {d} × {d} colours cannot be read ({canvas.MOST_FEATURES} features at most). {advice}"
            "result.groups(mask).plot(), or kind 'gradient', 'diagonal' or 'eigen'."
        )
    stderr, hessian = canvas.array(one.stderr()[0]), canvas.array(one.hessian[0])
    faint = canvas.within_noise(canvas.array(one.unshrunk().hessian[0]), stderr)
    chosen = _chosen(hessian, canvas.scales_of(one), order, k)
    given = len(chosen) == d and bool((chosen == np.arange(d)).all())
    hessian, faint = (m[np.ix_(chosen, chosen)] for m in (hessian, faint))
    limit = canvas.symmetric_limit(hessian, limit)
    ax = canvas.new_axes(ax, 6.6, 5.6)
    shown = ax.imshow(
        hessian,
        cmap=canvas.DIVERGING,
        vmin=-limit,
        vmax=limit,
        alpha=np.where(faint, canvas.FAINT, 1.0),
        interpolation="none",
    )
    _ticks(ax, one, chosen, given, labels)
    canvas.hide_spines(ax, "top", "right", "left", "bottom")
    part = "" if len(chosen) == d else f"the {len(chosen)} strongest of {d}; " if k else f"{len(chosen)} of {d}; "
    denoised = "denoised; faint: " if one.shrink else "faint: "
    noise = f"; {denoised}unbiased estimate within noise (|z| < 2)" if stderr.any() else ""
    note = f"{part}{captions.quality_words(one)}{noise}"
    title_layout.colour_bar(
        ax, shown, *captions.together(one), {ax: (f"Which {captions.noun(one)} act together", note)}
    )
    return ax


def _chosen(hessian: Array, scales: Array, order: str | Sequence[int], k: int | None) -> Array:
    """The numbers of the features to show, in their order."""
    d = len(hessian)
    effect = np.abs(hessian) * scales[:, None] * scales
    np.fill_diagonal(effect, 0)
    if not isinstance(order, str):
        chosen = np.asarray(order)
        if (
            chosen.ndim != 1
            or not len(chosen)
            or chosen.dtype.kind not in "iu"
            or chosen.min() < 0
            or chosen.max() >= d
        ):
            raise ValueError(
                f"order must be 'given', 'clustered' or numbers of features from 0 to {d - 1}, got {order!r:.60}."
            )
        if len(set(chosen.tolist())) < len(chosen):
            raise ValueError("order names a feature twice. Give each number once.")
        if k is not None:
            raise ValueError("order already says which features to show: leave k out, or pass order='clustered'.")
        return chosen
    if order not in ("given", "clustered"):
        raise ValueError(f"order must be 'given', 'clustered' or numbers of features, got {order!r}.")
    chosen = np.arange(d)
    if k is not None:
        strength = np.linalg.norm(effect, axis=1)
        chosen = np.sort(np.argsort(-strength, kind="stable")[: canvas.check_count(k, "features")])
    return chosen if order == "given" else chosen[clustered(effect[np.ix_(chosen, chosen)])]


def _ticks(ax: Axes, one: Interactions, chosen: Array, given: bool, labels: list[str] | None) -> None:
    """Names, numbers or rows of an image on both axes."""
    n, size = len(chosen), captions.image_size(one.feature_shape)
    font = title_layout.small(ax)
    ax.tick_params(labelsize=font)
    part = not given and n <= MOST_NAMES
    if n <= MOST_NAMES and (labels is not None or part):
        name = labels_of(labels, one.shape[1], one.feature_shape)
        text = [name(int(i)) for i in chosen]
        width, height = title_layout.cell(ax)
        # each name has a row of its own: what is left of the figure beside names and colour bar, cut into n
        longest = max(title_layout.text_width(t, font) for t in text)
        narrow = width < title_layout.NARROW  # the colour bar stands below, else beside
        free = min(width - longest - (0.3 if narrow else 1.3), height - longest - (1.5 if narrow else 0.7))
        row = 72 * max(free, 0.6) / n
        fitting = min(font, 0.95 * row)
        if fitting >= LEAST_POINTS:
            ax.set_xticks(range(n), text, rotation=90, fontsize=fitting)
            ax.set_yticks(range(n), text, fontsize=fitting)
            ax.tick_params(length=0)
            if labels is None:
                ax.set_xlabel(captions.noun(one), fontsize=font)
                ax.set_ylabel(captions.noun(one), fontsize=font)
            return
    kind = captions.noun(one)
    if size is not None and labels is None and given and n // size[1] <= MOST_NAMES:
        width, rows = size[1], n // size[1]
        middles = np.arange(rows) * width + (width - 1) / 2
        numbers = [str(row % size[0]) for row in range(rows)]
        every = max(1, round(rows / (8 * title_layout.cell(ax)[1])))  # as many as there is room for
        ax.set_xticks(middles[::every], numbers[::every])
        ax.set_yticks(middles[::every], numbers[::every])
        edges = np.arange(1, rows) * width - 0.5
        ax.vlines(edges, -0.5, n - 0.5, colors="#bbbbbb", linewidths=0.4)
        ax.hlines(edges, -0.5, n - 0.5, colors="#bbbbbb", linewidths=0.4)
        ax.tick_params(length=0)
        kind = "pixels, by row of the image"
    ax.set_ylabel(kind, fontsize=font)
    if not given:
        ax.set_xticks([])
        ax.set_yticks([])
        kind = f"{kind}, those that act together side by side"
    ax.set_xlabel(kind if labels is None else f"{kind} by number: the names do not fit", fontsize=font)
