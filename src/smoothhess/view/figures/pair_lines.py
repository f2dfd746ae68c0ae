"""Style and legend of the lines between two features, shared by all figures that draw pairs as lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from smoothhess.result.pairs import Pair
from smoothhess.view import captions
from smoothhess.view.figures import canvas, title_layout

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from smoothhess.result.result import Result

FAINT_LINE = 0.35  # opacity of a faint line; higher than for areas, since lines are thin


def is_noise(pair: Pair) -> bool:
    """Whether the pair is within noise."""
    return bool(canvas.within_noise(np.array(pair.value), np.array(pair.stderr)))


def colour_of(pair: Pair) -> str:
    """Return red for a positive interaction and blue for any other."""
    return canvas.POSITIVE if pair.value > 0 else canvas.NEGATIVE


def widths(found: Sequence[Pair]) -> list[float]:
    """Return line widths in points, linear in |effect| relative to the strongest pair."""
    strongest = max((abs(p.effect) for p in found), default=1.0) or 1.0
    return [0.8 + 2.4 * abs(p.effect) / strongest for p in found]


def drawn(found: Sequence[Pair], significant: bool) -> list[Pair]:
    """Return the pairs that are drawn: all, or only significant ones."""
    return [p for p in found if p.significant or not significant]


def style(pair: Pair, width: float) -> dict[str, Any]:
    """Return the line style of a pair: dashed if not significant, faint within noise."""
    return {
        "linewidth": width,
        "linestyle": "-" if pair.significant else "--",
        "edgecolor": colour_of(pair),
        "facecolor": "none",
        "alpha": FAINT_LINE if is_noise(pair) else 0.9,
    }


def legend(ax: Axes, one: Result, found: Sequence[Pair], q: float, columns: int, more: Sequence[Artist] = ()) -> None:
    """Add a legend of the line styles that occur, below the Axes."""
    from matplotlib.lines import Line2D

    def line(label: str, **look: Any) -> Line2D:
        return Line2D([], [], label=label, **{"color": canvas.INK, "linewidth": 1.5, **look})

    more_words, less_words = "together more than apart (H > 0)", "together less than apart (H < 0)"
    if captions.is_attribution(one):
        more_words, less_words = "positive interaction", "negative interaction"
    handles: list[Artist] = [
        line(more_words, color=canvas.POSITIVE, linewidth=2.5),
        line(less_words, color=canvas.NEGATIVE, linewidth=2.5),
    ]
    if any(not p.significant for p in found):
        handles.append(line(f"not significant (q > {q:g})", linestyle="--"))
    if any(is_noise(p) for p in found):
        handles.append(line(captions.FAINT_WORDS, alpha=FAINT_LINE, linewidth=2.5))
    handles += more
    size = title_layout.small(ax)
    ax.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.01),
        ncols=min(len(handles), columns),
        fontsize=size,
        frameon=False,
        columnspacing=1.4,
        handlelength=2.2,
        labelspacing=0.35,
    )
