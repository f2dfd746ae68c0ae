"""Matplotlib figures of a result: `result.plot(kind)`, or the functions of this package.

Every figure takes `example`, the index of the example in the batch, and `ax`, the Axes to draw into (a new figure is
created if None), and returns the Axes; save it with `ax.figure.savefig("x.png")`. pyplot, its backend and its settings
are not used. Colour scales are symmetric around 0, red for positive and blue for negative values; values within noise
(|z| < 2) are drawn faint. `sweep_curves` and `along` take other arguments than a result, and are not kinds of
`result.plot`. The interactive page belongs to `smoothhess.view.report`.

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
from smoothhess.view.figures.text_arcs import text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from smoothhess.result.result import Result

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
    "text",
]

KINDS: dict[str, Callable[..., Any]] = {
    "graph": graph,
    "segment": segment,
    "diagonal": diagonal,
    "eigen": eigen,
    "series": series,
    "text": text,
    "heatmap": heatmap,
    "pairs": pairs,
    "gradient": gradient,
    "image": image,
}


def plot(result: Result, kind: str = "heatmap", **options: Any) -> Axes:
    """Draw a figure of the given kind.

    Args:
        result: The result to draw.
        kind: "heatmap", "pairs", "graph" and "image" show the interactions of pairs of features; "gradient" and
            "diagonal" show the gradient and the curvature of each feature; "eigen" shows the directions of largest
            curvature; "segment" shows the interactions of one segment of an image; "series" shows those of one interval
            of a time series; "text" shows the tokens of a text.
        **options: Arguments of the function of the same name in this package.

    Returns:
        The Axes.

    Raises:
        ValueError: If there is no such kind.
    """
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}.")
    return KINDS[kind](result, **options)
