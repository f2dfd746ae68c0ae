"""Figure of interactions against the scale σ of the noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from smoothhess.evaluate.sweep import Sweep
from smoothhess.result.pairs import labels_of
from smoothhess.view import captions
from smoothhess.view.figures import canvas, title_layout
from smoothhess.view.figures.segment_partners import source_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "osD^vP*"


def sweep_curves(
    sweep: Sweep,
    *,
    pairs: Sequence[tuple[int | tuple[int, ...] | str, int | tuple[int, ...] | str]] | None = None,
    k: int = 4,
    names: Sequence[str] | None = None,
    level: float = 0.95,
    as_effect: bool = False,
    example: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """Draw H_ij of some pairs against σ, each with a confidence band; markers within noise are hollow and faint.

    The scales share their draws, so that their errors are correlated: use `Sweep.difference` for the standard error of
    a change between two scales.

    Args:
        sweep: The return value of `smoothhess.sweep`.
        pairs: Pairs of features, each feature given by index, position or name; None takes the k strongest pairs of the
            middle scale.
        k: Number of pairs if `pairs` is None.
        names: One name per feature or group.
        level: Level of the confidence intervals.
        as_effect: Whether to draw H_ij σ_i σ_j, in units of the output, which is comparable between scales.
        example: Index of the example in the batch.
        ax: Axes to draw into; a new figure if None.

    Returns:
        The Axes.

    Raises:
        ValueError: If `sweep` is not a Sweep, or a pair is invalid.

    >>> import torch, smoothhess as sh
    >>> scales = sh.sweep(lambda x: x[:, 0] * x[:, 1], torch.zeros(1, 3), [0.1, 0.2, 0.4], n_calls=120)
    >>> ax = sweep_curves(scales, pairs=[("age", "dose")], names=["age", "dose", "height"])
    >>> ax.lines[0].get_ydata().round(3).tolist()
    [1.0, 1.0, 1.0]
    """
    if not isinstance(sweep, Sweep):
        raise ValueError(f"sweep must be the return value of smoothhess.sweep, got {type(sweep).__name__}.")
    results = [canvas.one_example(r, example) for r in sweep]
    first = results[0]
    labels = canvas.names_of(first, names)
    name = labels_of(labels, first.shape[1], first.feature_shape)
    if pairs is None:
        chosen = [(p.i, p.j) for p in canvas.strongest(results[len(results) // 2], canvas.check_count(k, "pairs"))]
    else:
        if any(isinstance(pair, str) or len(pair) != 2 for pair in pairs) or not pairs:
            raise ValueError("pairs must be a list of pairs of features, such as [(0, 1), (0, 2)].")
        chosen = [(source_of(first, i, labels), source_of(first, j, labels)) for i, j in pairs]
    ax = canvas.new_axes(ax, 6.4, 4.0)
    font = title_layout.small(ax)
    sigmas = canvas.array(sweep.sigmas)
    order = np.argsort(sigmas)
    one = Sweep(tuple(results))
    for n, (i, j) in enumerate(chosen):
        curve = one.entry(i, j)
        scale = np.array([canvas.scales_of(r)[[i, j]].prod() for r in results]) if as_effect else np.ones(len(results))
        value, stderr, low, high = (
            (canvas.array(t)[:, 0] * scale)[order] for t in (curve.value, curve.stderr, *curve.interval(level))
        )
        colour, marker = canvas.PALETTE[n % len(canvas.PALETTE)], MARKERS[n % len(MARKERS)]
        faint = canvas.within_noise(value, stderr)
        label = f"{name(i)} × {name(j)}"
        ax.plot(sigmas[order], value, color=colour, linewidth=1.3, label=label, marker=marker, markersize=0, zorder=3)
        ax.fill_between(sigmas[order], low, high, color=colour, alpha=0.18, linewidth=0, zorder=2)
        for weak in (False, True):
            at = faint == weak
            ax.scatter(
                sigmas[order][at],
                value[at],
                s=20,
                marker=marker,
                facecolors="white" if weak else colour,
                edgecolors=colour,
                alpha=0.45 if weak else 1.0,
                linewidths=1.0,
                zorder=4,
            )
    if sigmas.max() > 5 * sigmas.min():
        _logarithmic(ax, sigmas)
    ax.axhline(0, color=canvas.INK, linewidth=0.8, zorder=1)
    ax.tick_params(labelsize=font)
    unit = "in units of the output" if as_effect else captions.unit_words(first)
    what = "effect $H_{ij}σ_iσ_j$" if as_effect else "interaction $H_{ij}$"
    _room_for_legend(ax, len(chosen))
    unit += title_layout.in_powers(ax.yaxis, 6)
    ax.set_ylabel(title_layout.balanced(f"{what}, {unit}", 0.6 * title_layout.cell(ax)[1], font), fontsize=font)
    canvas.hide_spines(ax, "top", "right")
    _legend(ax, len(chosen))
    sampled = any(r.design != "exact" for r in results)
    noise = f"bands: {level * 100:g} % intervals of each scale; hollow: within noise (|z| < 2)" if sampled else ""
    meaning = "above 0: together more than apart"
    title_layout.compose(ax, "How interactions change with the scale", noise, ["scale σ of the noise", meaning])
    return ax


def _logarithmic(ax: Axes, sigmas: canvas.Array) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.set_xscale("log")
    wide = sigmas.max() > 30 * sigmas.min()
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())


def _legend(ax: Axes, count: int) -> None:
    from matplotlib.legend_handler import HandlerLine2D

    def show(handle, original) -> None:
        handle.update_from(original)
        handle.set_markersize(4.5)

    handler = {line: HandlerLine2D(update_func=show) for line in ax.lines[:count]}
    ax.legend(fontsize=title_layout.small(ax), frameon=False, loc="upper right", handler_map=handler, borderaxespad=0.1)


def _room_for_legend(ax: Axes, count: int) -> None:
    """Extend the y axis to leave space for the legend above the curves."""
    low, high = ax.get_ylim()
    share = min((1.5 * title_layout.small(ax) * count / 72 + 0.1) / max(0.55 * title_layout.cell(ax)[1], 0.5), 0.6)
    ax.set_ylim(low, high + (high - low) * share / (1 - share))
