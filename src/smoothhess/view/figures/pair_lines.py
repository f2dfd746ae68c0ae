"""Lines between two features that act together: colour, width and opacity have one meaning in all figures."""

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

    from smoothhess.result.interactions import Interactions

FAINT_LINE = 0.35  # a line has less ink than an area


def is_noise(pair: Pair) -> bool:
    """Whether the pair lies within its noise."""
    return bool(canvas.within_noise(np.array(pair.value), np.array(pair.stderr)))


def colour_of(pair: Pair) -> str:
    """Red where the two raise the output more together than apart, blue where less."""
    return canvas.POSITIVE if pair.value > 0 else canvas.NEGATIVE


def widths(found: Sequence[Pair]) -> list[float]:
    """Points, by |effect| in units of the strongest."""
    strongest = max((abs(p.effect) for p in found), default=1.0) or 1.0
    return [0.8 + 2.4 * abs(p.effect) / strongest for p in found]


def style(pair: Pair, width: float) -> dict[str, Any]:
    """How the line of a pair is drawn: dashed where not significant, faint within noise."""
    return {
        "linewidth": width,
        "linestyle": "-" if pair.significant else "--",
        "edgecolor": colour_of(pair),
        "facecolor": "none",
        "alpha": FAINT_LINE if is_noise(pair) else 0.9,
    }


def legend(
    ax: Axes, one: Interactions, found: Sequence[Pair], q: float, columns: int, more: Sequence[Artist] = ()
) -> None:
    """What the lines mean, below the Axes; only what is there."""
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
