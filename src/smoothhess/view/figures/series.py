"""Figure of a time series: the curve, its gradient, and the interactions of one interval with the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from smoothhess.view import captions
from smoothhess.view.figures import canvas, title_layout
from smoothhess.view.figures.canvas import Array
from smoothhess.view.figures.segment_partners import source_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from smoothhess.result.result import Result

SHADE = "#e3e3e3"  # background of the source
MOST_WHISKERS = 80  # with more bars, a band is drawn instead


def series(
    result: Result,
    *,
    source: int | None = None,
    step: float | None = None,
    k: int = 4,
    level: float = 0.95,
    example: int = 0,
    ax: Axes | Sequence[Axes] | None = None,
) -> Axes:
    """Draw a curve, SmoothGrad of its intervals, and the interactions of one interval, the source, with the others.

    Three panels share the time axis. Inputs have shape (T,) or (C, T) and are grouped by intervals of time,
    `result.groups(windows)`; with one channel they may be ungrouped, and each sample is an interval. Bars of SmoothGrad
    and of the unbiased interactions have confidence intervals as whiskers. Bars within noise
    (|z| < 2) are faint. Arcs connect the source to its k strongest partners, red for H > 0 and blue for H < 0.

    Args:
        result: The result to draw.
        source: Index of the source; None takes the interval with the strongest interactions.
        step: Time between two samples in seconds; None counts time in samples.
        k: Largest number of arcs; partners within noise (|z| < 2) have none.
        level: Level of the confidence intervals.
        example: Index of the example in the batch.
        ax: Three Axes, or one Axes that is divided into three (`ax.child_axes`); a new figure if None.

    Returns:
        The Axes of the curve, or the given Axes if it was divided.

    Raises:
        ValueError: If the inputs are not time series, or the groups are not intervals.

    >>> import torch, smoothhess as sh
    >>> result = sh.SmoothHess(lambda x: x[:, :5].sum(1) * x[:, 5:].sum(1)).attribute(
    ...     torch.ones(1, 10), sigma=0.5, n_calls=400, feature_mask=torch.arange(10) // 5)
    >>> round(series(result, source=0, step=0.1).figure.axes[2].patches[1].get_height(), 3)  # 5 × 5 pairs of samples
    25.0
    """
    one = canvas.one_example(result, example)
    starts, stops = _intervals(one)
    if step is not None and not (np.isfinite(step) and step > 0):
        raise ValueError(f"step must be positive: it is the time between two samples in seconds, got {step}.")
    canvas.check_count(k, "arcs")
    pace = 1.0 if step is None else float(step)
    index = source_of(one, source, None)
    left, right = starts * pace, stops * pace
    curve, slope, pair = canvas.stack_of_axes(ax, [1.25, 1.0, 1.25], 6.4, 5.6)
    font = title_layout.small(curve)
    samples = canvas.array(one.inputs[0]).reshape(-1, one.inputs.shape[-1])
    middles = (np.arange(samples.shape[1]) + 0.5) * pace
    for n, row in enumerate(samples):
        colour = canvas.PALETTE[n % len(canvas.PALETTE)] if len(samples) > 1 else "#333333"
        curve.plot(middles, row, linewidth=1.2, color=colour)
    for edge in left[1:] if len(left) <= 60 else ():
        curve.axvline(edge, color="#dddddd", linewidth=0.4, zorder=0)
    single = one.gradient_estimate()
    every = (single.value, single.stderr, single.half_width(level))
    value, stderr, reach = (canvas.array(x[0]).reshape(-1) for x in every)
    _bars(slope, value, stderr, reach, left, right)
    _interactions(pair, one, index, left, right, k, level)
    for panel in (curve, slope, pair):
        panel.axvspan(left[index], right[index], color=SHADE, linewidth=0, zorder=0)
        panel.set_xlim(left.min(), right.max())
        panel.tick_params(labelsize=font)
        canvas.hide_spines(panel, "top", "right")
    for panel in (curve, slope):
        panel.tick_params(labelbottom=False)
    curve.set_ylabel("input", fontsize=font)
    first_order = "first order" if captions.is_attribution(one) else captions.slope_word(one)
    slope.set_ylabel(f"by itself:\n{first_order}{title_layout.in_powers(slope.yaxis)}", fontsize=font)
    pair.set_ylabel(f"with the\nsource: H{title_layout.in_powers(pair.yaxis)}", fontsize=font)
    time = "sample" if step is None else "time (s)"
    whiskers = "" if one.design == "exact" else f"; whiskers: {level * 100:g} % intervals"
    meaning = "above 0: together more than apart, below: less"
    if captions.is_attribution(one):
        meaning = f"interactions by {captions.method(one)}"
    title_layout.compose(pair, "", "", [time, f"grey: the source; {meaning}{whiskers}"])
    if step is None:
        last = int(stops[index]) - 1
        what = f"sample {last}" if last == starts[index] else f"samples {starts[index]}–{last}"
    else:
        what = f"{left[index]:.4g}–{right[index]:.4g} s"
    title = f"What acts together with {what}"
    noise = f"; {captions.FAINT_WORDS}" if one.design != "exact" else ""
    title_layout.compose(curve, title, captions.quality_words(one) + noise)
    curve.figure.align_ylabels([curve, slope, pair])
    return curve if ax is None or isinstance(ax, Sequence | np.ndarray) else ax


def _intervals(one: Result) -> tuple[Array, Array]:
    """Return the first sample of each interval, and the first sample after it."""
    shape = tuple(one.inputs.shape[1:])
    if not 1 <= len(shape) <= 2 or (len(shape) == 2 and one.grouping is None and shape[0] > 1):
        advice = (
            "group them by intervals: result.groups(windows)" if len(shape) == 2 else "use kind 'heatmap' or 'image'"
        )
        raise ValueError(f"inputs must have shape (T,) or (C, T), grouped in time if C > 1, got {shape}: {advice}.")
    length = int(one.inputs.shape[-1])
    if one.grouping is None:
        return np.arange(length), np.arange(length) + 1
    channels = one.grouping.mask[0].cpu().numpy().reshape(-1, length)
    mask = channels[0]
    breaks = np.concatenate([[0], np.flatnonzero(np.diff(mask)) + 1, [length]])
    found = mask[breaks[:-1]]
    if (channels != mask).any() or len(set(found.tolist())) < len(found) or len(found) < one.grouping.count:
        raise ValueError(
            "the groups must be intervals of time: contiguous samples, the same in all channels. "
            "Use kind 'pairs' or 'heatmap', or groups(torch.arange(T) // length)."
        )
    starts, stops = np.empty(len(found), dtype=int), np.empty(len(found), dtype=int)
    starts[found], stops[found] = breaks[:-1], breaks[1:]
    return starts, stops


def _bars(ax: Axes, value: Array, stderr: Array, reach: Array, left: Array, right: Array) -> None:
    """Draw a bar over each interval, with whiskers of length `reach`."""
    middle, width = (left + right) / 2, right - left
    bars = ax.bar(middle, value, width=0.86 * width if len(value) <= MOST_WHISKERS else width, zorder=2)
    faint = canvas.within_noise(value, stderr)
    for rectangle, colour, weak in zip(bars, canvas.sign_colours(value), faint, strict=True):
        rectangle.set(facecolor=colour, alpha=canvas.FAINT if weak else 0.85)
    error = np.where(np.isfinite(reach), reach, np.nan)
    if error.any() and len(value) <= MOST_WHISKERS:
        ax.errorbar(middle, value, yerr=error, fmt="none", ecolor="black", elinewidth=0.8, capsize=0, zorder=3)
    elif error.any():
        ax.fill_between(middle, value - error, value + error, color=canvas.INK, alpha=0.3, linewidth=0, zorder=3)
    ax.axhline(0, color=canvas.INK, linewidth=0.6, zorder=4)


def _interactions(ax: Axes, one: Result, index: int, left: Array, right: Array, k: int, level: float) -> None:
    """Draw bars of the interactions with the source, and arcs to its strongest partners beyond noise."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    found = one.row(index)
    every = (found.value, found.stderr, found.half_width(level))
    numbers, errors, reach = (canvas.array(x[0]).reshape(-1).copy() for x in every)
    numbers[index] = errors[index] = reach[index] = 0  # the diagonal entry is not an interaction
    _bars(ax, numbers, errors, reach, left, right)
    tops = np.abs(numbers) + np.where(np.isfinite(reach), reach, 0.0)
    limit = canvas.symmetric_limit(tops)
    effect = np.abs(numbers * canvas.scales_of(one))
    faint, middle = canvas.within_noise(numbers, errors), (left + right) / 2
    partners = [int(j) for j in np.argsort(-effect, kind="stable") if j != index and not faint[j]][:k]
    farthest = np.abs(middle - middle[index]).max() or 1.0
    reached = {1.0: 0.15 * limit, -1.0: 0.15 * limit}  # above and below 0
    for sign in reached:
        reached[sign] = max(reached[sign], float(tops[numbers * sign > 0].max(initial=0.0)))
    for j in reversed(partners):
        sign = float(np.sign(numbers[j]))
        tip = sign * (tops[j] + 0.05 * limit)
        # longer arcs are higher, so that arcs to different partners do not overlap
        lift = sign * limit * (0.03 + 0.4 * np.sqrt(abs(middle[j] - middle[index]) / farthest))
        knee = ((middle[index] + middle[j]) / 2, 1.5 * tip + 2 * lift)  # the midpoint of the curve is at tip + lift
        path = Path([(middle[index], 0.0), knee, (middle[j], tip)], [Path.MOVETO, Path.CURVE3, Path.CURVE3])
        arc = PathPatch(
            path,
            facecolor="none",
            edgecolor=canvas.POSITIVE if sign > 0 else canvas.NEGATIVE,
            linewidth=0.7 + 1.3 * effect[j] / effect[partners[0]],
            alpha=0.9,
            zorder=5,
            capstyle="round",
        )
        ax.add_patch(arc)
        ax.plot(middle[j], tip, marker="v" if sign > 0 else "^", markersize=3.5, color=arc.get_edgecolor(), zorder=5)
        peak = knee[1] ** 2 / abs(2 * knee[1] - tip)  # extremum of the Bézier curve 2t(1 − t) knee + t² tip
        reached[sign] = max(reached[sign], peak)
    ax.set_ylim(-1.06 * reached[-1.0], 1.06 * reached[1.0])
