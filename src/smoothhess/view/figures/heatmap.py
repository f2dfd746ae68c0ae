"""Figure of the matrix of interactions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from smoothhess.result import shown_estimate
from smoothhess.result.pairs import labels_of
from smoothhess.view import captions
from smoothhess.view.figures import canvas, title_layout
from smoothhess.view.figures.canvas import Array
from smoothhess.view.figures.feature_order import clustered

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from smoothhess.result.result import Result

MOST_NAMES = 40  # maximum number of names on an axis
LEAST_POINTS = 4.5  # smallest legible font size


def heatmap(
    result: Result,
    *,
    names: Sequence[str] | None = None,
    order: Literal["given", "clustered"] | Sequence[int] = "given",
    k: int | None = None,
    example: int = 0,
    limit: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the Hessian as a colour matrix, red above 0 and blue below.

    Entries whose unbiased estimate is within noise (|z| < 2) are faint, also if the colours show the denoised estimate.
    The pixels of an image are in row-major order, with lines between rows.

    Args:
        result: The result to draw.
        names: One name per feature or group; written for up to 40 features, if they fit.
        order: "given"; "clustered", which makes interacting features adjacent (average linkage of |H_ij| σ_i σ_j); or
            the indices of the features to show, in their order.
        k: Show only the k features with the strongest interactions; required for more than 1 000 features.
        example: Index of the example in the batch.
        limit: The colour scale is from −limit to limit; the largest |H_ij| if None.
        ax: Axes to draw into; a new figure if None.

    Returns:
        The Axes.

    Raises:
        ValueError: If there are too many features, or `order` is invalid.
    """
    whole = canvas.one_example(result, example)
    one = shown_estimate.shown(whole)
    d = one.shape[1]
    labels = canvas.names_of(one, names)
    if d > canvas.MOST_FEATURES and (k is None or d > canvas.MOST_MATRIX):
        advice = "Pass k=40 to show only the strongest, use " if d <= canvas.MOST_MATRIX else "Use "
        raise ValueError(
            f"a matrix of {d} × {d} colours is not legible ({canvas.MOST_FEATURES} features at most). {advice}"
            "result.groups(mask).plot(), or kind 'gradient', 'diagonal' or 'eigen'."
        )
    stderr, hessian = canvas.array(one.stderr()[0]), canvas.array(one.hessian[0])
    faint = canvas.within_noise(hessian, stderr)
    chosen = _chosen(canvas.array(whole.hessian[0]), canvas.scales_of(one), order, k)
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
    noise = f"; {captions.FAINT_WORDS}" if stderr.any() else ""
    note = f"{part}{captions.quality_words(one)}{noise}"
    title = f"Which {captions.plural(captions.noun(one))} act together"
    title_layout.colour_bar(ax, shown, *captions.interaction_label(one), {ax: (title, note)})
    return ax


def _chosen(hessian: Array, scales: Array, order: str | Sequence[int], k: int | None) -> Array:
    """Return the indices of the features to show, in their order."""
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
                f"order must be 'given', 'clustered' or indices of features from 0 to {d - 1}, got {order!r:.60}."
            )
        if len(set(chosen.tolist())) < len(chosen):
            raise ValueError("order contains an index twice. Pass each index once.")
        if k is not None:
            raise ValueError("order already selects the features to show: omit k, or pass order='clustered'.")
        return chosen
    if order not in ("given", "clustered"):
        raise ValueError(f"order must be 'given', 'clustered' or indices of features, got {order!r}.")
    chosen = np.arange(d)
    if k is not None:
        strength = np.linalg.norm(effect, axis=1)
        chosen = np.sort(np.argsort(-strength, kind="stable")[: canvas.check_count(k, "features")])
    return chosen if order == "given" else chosen[clustered(effect[np.ix_(chosen, chosen)])]


def _ticks(ax: Axes, one: Result, chosen: Array, given: bool, labels: list[str] | None) -> None:
    """Label both axes with names, indices or the rows of an image."""
    n, size = len(chosen), captions.image_size(one.feature_shape)
    font, kind = title_layout.small(ax), captions.plural(captions.noun(one))
    ax.tick_params(labelsize=font)
    part = not given and n <= MOST_NAMES
    if n <= MOST_NAMES and (labels is not None or part):
        name = labels_of(labels, one.shape[1], one.feature_shape)
        text = [name(int(i)) for i in chosen]
        width, height = title_layout.cell(ax)
        # height per name: the space left by the names and the colour bar, divided by n
        longest = max(title_layout.text_width(t, font) for t in text)
        narrow = width < title_layout.NARROW  # the colour bar is below the matrix, else to its right
        free = min(width - longest - (0.3 if narrow else 1.3), height - longest - (1.5 if narrow else 0.7))
        row = 72 * max(free, 0.6) / n
        fitting = min(font, 0.95 * row)
        if fitting >= LEAST_POINTS:
            ax.set_xticks(range(n), text, rotation=90, fontsize=fitting)
            ax.set_yticks(range(n), text, fontsize=fitting)
            ax.tick_params(length=0)
            if labels is None:
                ax.set_xlabel(kind, fontsize=font)
                ax.set_ylabel(kind, fontsize=font)
            return
    if size is not None and labels is None and given and n // size[1] <= MOST_NAMES:
        width, rows = size[1], n // size[1]
        middles = np.arange(rows) * width + (width - 1) / 2
        numbers = [str(row % size[0]) for row in range(rows)]
        every = max(1, round(rows / (8 * title_layout.cell(ax)[1])))  # as many labels as fit
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
        kind = f"{kind}, clustered by interaction"
    ax.set_xlabel(kind if labels is None else f"{kind} by index: the names do not fit", fontsize=font)
