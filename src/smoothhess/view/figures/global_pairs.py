"""Figure of the strongest pairs of a data set, with 95 % intervals over its records."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import TYPE_CHECKING

from smoothhess.evaluate.global_summary import GlobalInteractions
from smoothhess.result.pairs import Pair
from smoothhess.view.figures import pair_intervals

if TYPE_CHECKING:
    from matplotlib.axes import Axes

QUANTITIES = {
    "square": "$\\sqrt{E[H_{ij}^2]}\\,σ_iσ_j$",
    "abs": "mean of $|H_{ij}|\\,σ_iσ_j$",
    "mean": "mean of $H_{ij}\\,σ_iσ_j$",
}


def global_pairs(
    found: GlobalInteractions,
    *,
    k: int = 10,
    names: Sequence[str] | None = None,
    by: str = "square",
    q: float = 0.05,
    ax: Axes | None = None,
) -> Axes:
    """Draw the k strongest pairs of a data set, in units of the output, with 95 % intervals over its records.

    Args:
        found: The result of `global_interactions`.
        k, names, by, q: As for `GlobalInteractions.top_pairs`.
        ax: Axes to draw into; a new figure if None.

    Returns:
        The Axes.
    """
    pairs = found.top_pairs(k, names, by=by, q=q)
    if not pairs:
        raise ValueError("there is no pair of features to draw: fewer than two features have noise.")
    shown = [_root(p) if by == "square" else p for p in pairs]
    head = ("Pairs that act together over the data set", f"{len(found)} records, {found.method}")
    return pair_intervals.draw(
        [pair_intervals.in_effects(p) for p in shown],
        head,
        f"{QUANTITIES[by]}, in units of the output",
        f"bars: 95 % intervals over records; filled dot: q ≤ {q:g}",
        ax,
    )


def _root(p: Pair) -> Pair:
    """The pair with √E[H²] in place of E[H²]; its standard error is that of a function of the mean."""
    value, low, high = (sqrt(max(x, 0.0)) for x in (p.value, p.low, p.high))
    return p._replace(value=value, low=low, high=high, stderr=p.stderr / (2 * value) if value else 0.0)
