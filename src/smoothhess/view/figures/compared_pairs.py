"""Figure of the pairs in which two results differ: both values, and their difference with its interval."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from smoothhess.evaluate.compare_results import ERRORS, ComparedPair, ResultComparison
from smoothhess.result.pairs import Pair
from smoothhess.view import captions
from smoothhess.view.figures import canvas, pair_intervals, title_layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OFFSETS = (-0.3, -0.15)  # of the rows of both values above that of the difference
MARKERS = ("o", "s")


def compared_pairs(
    found: ResultComparison, *, example: int = 0, k: int = 10, q: float = 0.05, ax: Axes | None = None
) -> Axes:
    """Draw the k largest differences, with the value of each result above each of them.

    Args:
        found: The result of `compare_results`.
        example: Index of the example.
        k: Number of pairs.
        q: False discovery rate at which a difference is significant; its dot is then filled.
        ax: Axes to draw into; a new figure if None.

    Returns:
        The Axes.
    """
    one = found.only(example)
    pairs = one.pairs(k, q=q)[0]
    if not pairs:
        raise ValueError("there is no pair of features to draw: fewer than two features have noise.")
    head = (f"Where {found.names[0]} and {found.names[1]} differ", f"errors of differences: {ERRORS[found.errors]}")
    dots = f"large dots: {found.names[0]} − {found.names[1]}; bars: 95 % intervals; filled dot: q ≤ {q:g}"
    unit = captions.unit_words(one.results[0])
    ax = pair_intervals.draw([_difference(p) for p in pairs], head, f"interaction $H_{{ij}}$, {unit}", dots, ax)
    font, y = title_layout.small(ax), np.arange(len(pairs))
    for number, (name, offset, marker) in enumerate(zip(found.names, OFFSETS, MARKERS, strict=True)):
        value, low, high = np.array([p[3 + 3 * number : 6 + 3 * number] for p in pairs]).T
        colour = canvas.PALETTE[number + 2]
        ax.hlines(y + offset, low, high, colors=colour, linewidths=1.2)
        ax.scatter(value, y + offset, s=1.2 * font, c=colour, marker=marker, label=name, zorder=3)
    ax.legend(fontsize=font, frameon=False, loc="best")
    return ax


def _difference(p: ComparedPair) -> Pair:
    return Pair(p.i, p.j, p.names, p.difference, p.stderr, p.low, p.high, p.effect, p.q_value, p.significant)
