"""Figures of a result, drawn with matplotlib: `result.plot(kind)` or the functions here.

Every figure takes `ax` (None makes a figure of its own) and `example`, and returns the Axes; save with
`ax.figure.savefig("x.png")`. pyplot, its backend and its settings are never touched.

>>> import torch, smoothhess as sh
>>> result = sh.SmoothHess(lambda x: x[:, 0] * x[:, 1]).attribute(torch.zeros(1, 3), sigma=0.5, n_calls=400)
>>> [label.get_text() for label in result.plot("pairs", k=1, names=["age", "dose", "height"]).get_yticklabels()]
['age × dose']
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smoothhess.view.intervals import pairs
from smoothhess.view.matrix import heatmap
from smoothhess.view.overlay import image
from smoothhess.view.slopes import gradient

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from smoothhess.interactions import Interactions

__all__ = ["gradient", "heatmap", "image", "pairs", "plot"]

KINDS = {"heatmap": heatmap, "pairs": pairs, "gradient": gradient, "image": image}


def plot(result: Interactions, kind: str = "heatmap", **options: Any) -> Axes:
    """The figure of that kind: "heatmap", "pairs", "gradient" or "image"; options are those of its function."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}.")
    return KINDS[kind](result, **options)
