"""The strongest pairs of one example with their confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from smoothhess.view import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from smoothhess.interactions import Interactions


def pairs(
    result: Interactions,
    *,
    k: int = 10,
    names: Sequence[str] | None = None,
    q: float = 0.05,
    level: float = 0.95,
    scales: Tensor | None = None,
    as_effect: bool = False,
    example: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """The k strongest pairs, strongest on top: a dot for H_ij on its confidence interval, filled where significant.

    `k`, `names`, `q`, `level` and `scales` are those of `Interactions.top_pairs`. `as_effect` draws H_ij σ_i σ_j, in
    units of the output: the numbers to compare where features have different units.
    """
    one = result[example]
    found = one.top_pairs(k, names, q=q, level=level, scales=scales)[0]
    if not found:
        raise ValueError(f"pairs need at least two features, this result has {one.shape[1]}.")
    values = np.array([(p.value, p.low, p.high) for p in found])
    if as_effect:
        # an effect is the value times a positive scale; where the value is 0, so is the effect and its interval
        values *= np.array([[p.effect / p.value if p.value else 0.0] for p in found])
    value, low, high = values.T
    colours = canvas.sign_colours(value)
    ax = canvas.new_axes(ax, 6.4, 1.3 + 0.3 * len(found))
    y = np.arange(len(found))
    ax.axvline(0, color=canvas.INK, linewidth=0.8, zorder=1)
    ax.hlines(y, low, high, colors=colours, linewidths=1.6, zorder=2)
    for end in (low, high):
        ax.scatter(end, y, s=40, marker="|", c=colours, linewidths=1.6, zorder=2)
    faces = [c if p.significant else "white" for c, p in zip(colours, found, strict=True)]
    ax.scatter(value, y, s=18, facecolors=faces, edgecolors=colours, linewidths=1.2, zorder=3)
    ax.set_yticks(y, [" × ".join(p.names) for p in found])
    ax.set_ylim(len(found) - 0.4, -0.6)
    ax.grid(axis="x", color="#e5e5e5", linewidth=0.6)
    ax.set_axisbelow(True)
    what, unit = ("effect $H_{ij}σ_iσ_j$", "in units of the output") if as_effect else ("interaction $H_{ij}$", "")
    unit = unit or canvas.unit_words(one)
    ax.set_xlabel(f"{what}, {unit}\nbars: {level * 100:g} % intervals; filled dot: q ≤ {q:g}", fontsize="small")
    canvas.caption(ax, canvas.quality_words(one))
    ax.tick_params(axis="y", length=0)
    canvas.hide_spines(ax, "top", "right", "left")
    return ax
