"""Figure of the pairs of several models: the value in each model, and their mean with its interval."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from smoothhess.evaluate.across_models import ModelAgreement, StablePair
from smoothhess.result.pairs import Pair
from smoothhess.view.figures import canvas, pair_intervals, title_layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def model_agreement(found: ModelAgreement, *, example: int = 0, k: int = 10, ax: Axes | None = None) -> Axes:
    """Draw the k most stable pairs: a small dot for each model, and the mean with its 95 % interval over models.

    The dot of the mean is filled if most models have the pair among their strongest, with the same sign.

    Args:
        found: The result of `across_models`.
        example: Index of the example.
        k: Number of pairs.
        ax: Axes to draw into; a new figure if None.

    Returns:
        The Axes.
    """
    one = found.only(example)
    pairs = one.pairs(k)[0]
    head = (
        f"Pairs that {len(found)} models have in common",
        f"number of models with the pair among their {found.k} strongest, q ≤ {found.q:g}, same sign, at the right",
    )
    dots = "small dots: models; bars: 95 % interval of their mean; filled: most of the models have it"
    ax = pair_intervals.draw([_as_pair(p) for p in pairs], head, "interaction $H_{ij}$, per unit of each", dots, ax)
    values = canvas.array(one.values[:, 0])
    font = title_layout.small(ax)
    for row, p in enumerate(pairs):
        own = values[:, p.i, p.j]
        ax.scatter(own, np.full(len(own), row + 0.24), s=0.6 * font, c=canvas.INK, alpha=0.7, linewidths=0, zorder=4)
        count = f" {round(p.share * len(found))}/{len(found)}"
        ax.text(1.0, row, count, transform=ax.get_yaxis_transform(), va="center", ha="left", fontsize=font)
    return ax


def _as_pair(p: StablePair) -> Pair:
    return Pair(p.i, p.j, p.names, p.mean, p.stderr, p.low, p.high, p.effect, 0.0, p.share > 0.5)
