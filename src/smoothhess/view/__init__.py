"""Figures of a result, drawn with matplotlib: `result.plot(kind)` or the functions here.

Every figure takes `ax` (None makes a figure of its own) and `example`, and returns the Axes; save with
`ax.figure.savefig("x.png")`. pyplot, its backend and its settings are never touched. Red means more, blue less, on a
scale that is symmetric around 0; what lies within noise (|z| < 2) is faint. `sweep_curves` and `along` take more than a
result, and are called from here.

>>> import torch, smoothhess as sh
>>> result = sh.SmoothHess(lambda x: x[:, 0] * x[:, 1]).attribute(torch.zeros(1, 3), sigma=0.5, n_calls=400)
>>> [label.get_text() for label in result.plot("pairs", k=1, names=["age", "dose", "height"]).get_yticklabels()]
['age × dose']
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from smoothhess.view.figures.diagonal import diagonal
from smoothhess.view.figures.eigenvectors import eigen
from smoothhess.view.figures.gradient_map import gradient
from smoothhess.view.figures.graph import graph
from smoothhess.view.figures.heatmap import heatmap
from smoothhess.view.figures.image_pairs import image
from smoothhess.view.figures.interactions_by_sigma import sweep_curves
from smoothhess.view.figures.pair_intervals import pairs
from smoothhess.view.figures.segment_partners import segment
from smoothhess.view.figures.series import series
from smoothhess.view.figures.surrogate_line import along

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from smoothhess.result.interactions import Interactions

__all__ = [
    "along",
    "diagonal",
    "eigen",
    "gradient",
    "graph",
    "heatmap",
    "image",
    "pairs",
    "plot",
    "segment",
    "series",
    "sweep_curves",
]

KINDS: dict[str, Callable[..., Any]] = {
    "graph": graph,
    "segment": segment,
    "diagonal": diagonal,
    "eigen": eigen,
    "series": series,
    "heatmap": heatmap,
    "pairs": pairs,
    "gradient": gradient,
    "image": image,
}


def plot(result: Interactions, kind: str = "heatmap", **options: Any) -> Axes:
    """The figure of that kind; options are those of the function of that name.

    "heatmap", "pairs", "graph" and "image" show which features act together, "gradient" and "diagonal" what each does
    by itself, "eigen" the directions in which f bends most, "segment" what acts together with one segment of an image,
    "series" the same for a curve over time.
    """
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}.")
    return KINDS[kind](result, **options)
