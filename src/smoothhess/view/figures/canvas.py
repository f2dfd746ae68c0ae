"""Shared by all figures: creation of Axes, colours, the noise threshold, and checks of shared arguments.

Text and its layout belong to `smoothhess.view.captions` and `title_layout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from torch import Tensor

from smoothhess.result.pairs import Pair
from smoothhess.result.result import Result
from smoothhess.result.select_example import batch_of_one
from smoothhess.view import token_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = np.ndarray[Any, np.dtype[Any]]
R = TypeVar("R", bound=Result)

DIVERGING = "RdBu_r"  # safe for colour-blind readers; white at 0
POSITIVE, NEGATIVE, INK = "#b2182b", "#2166ac", "#4d4d4d"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")  # colour-blind safe
NOISE = 2.0  # values with |z| below this are within noise
FAINT = 0.25  # opacity of values within noise
MOST_FEATURES = 1000  # largest d whose d × d matrix is computed by default
MOST_MATRIX = 5000  # largest d whose d × d matrix is computed on request


def new_figure(width: float, height: float) -> Figure:
    """Create an empty figure of this size in inches that is not registered with pyplot."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ImportError("figures require matplotlib: pip install 'smoothhess[view]'") from error
    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08, compress=True))


def new_axes(ax: Axes | None, width: float, height: float) -> Axes:
    """Return `ax`, or the Axes of a new figure of this size in inches if None."""
    if ax is None:
        return new_figure(width, height).add_subplot()
    from matplotlib.axes import Axes

    if not isinstance(ax, Axes):
        advice = " Pass one of them." if isinstance(ax, Sequence | np.ndarray) else " Use figure.add_subplot()."
        raise ValueError(f"ax must be matplotlib Axes to draw into, got {type(ax).__name__}.{advice}")
    return ax


def row_of_axes(ax: Any, count: int, width: float, height: float) -> list[Axes]:
    """Return the given Axes, or a row of `count` Axes in a new figure of this size."""
    if ax is None:
        return list(new_figure(width, height).subplots(1, count, squeeze=False)[0])
    return [new_axes(each, width, height) for each in _listed(ax, count)]


def stack_of_axes(ax: Any, ratios: Sequence[float], width: float, height: float) -> list[Axes]:
    """Return a column of Axes with these height ratios: in a new figure, as given, or as insets of one given Axes."""
    count = len(ratios)
    if ax is None:
        return list(new_figure(width, height).subplots(count, 1, height_ratios=ratios, sharex=True))
    if isinstance(ax, Sequence | np.ndarray):
        return [new_axes(each, width, height) for each in _listed(ax, count)]
    outer = new_axes(ax, width, height)
    outer.set_axis_off()
    gap = 0.06
    shares = np.asarray(ratios) / sum(ratios) * (1 - gap * (count - 1))
    tops = 1 - np.concatenate([[0.0], np.cumsum(shares + gap)[:-1]])
    return [outer.inset_axes((0.0, top - share, 1.0, share)) for top, share in zip(tops, shares, strict=True)]


def _listed(ax: Any, count: int) -> list[Any]:
    given = list(np.ravel(np.asarray(ax, dtype=object))) if isinstance(ax, Sequence | np.ndarray) else [ax]
    if len(given) != count:
        raise ValueError(f"expected {count} Axes, one for each panel, got {len(given)}.")
    return given


def one_example(result: R, example: int) -> R:
    """Return one example as a batch of size 1.

    Raises:
        ValueError: If `result` is not a result, or `example` is not an index of it.
    """
    if not isinstance(result, Result):
        raise ValueError(f"result must be the return value of attribute, got {type(result).__name__}.")
    return batch_of_one(result, example)


def array(x: Tensor) -> Array:
    """Convert a tensor to a float64 NumPy array."""
    return x.detach().cpu().double().numpy()


def within_noise(value: Array, stderr: Array) -> Array:
    """Return where |z| < 2; an exact zero counts as within noise.

    >>> within_noise(np.array([3.0, 1.0, 0.0]), np.array([1.0, 1.0, 0.0]))
    array([False,  True,  True])
    """
    return (np.abs(value) < NOISE * stderr) | (value == 0)


def symmetric_limit(value: Array, limit: float | None = None) -> float:
    """Return the given limit, or the largest magnitude, of a colour scale from −limit to limit."""
    if limit is not None:
        if not (np.isfinite(limit) and limit > 0):
            raise ValueError(f"limit must be positive: the colour scale is from −limit to limit, got {limit}.")
        return float(limit)
    largest = float(np.nanmax(np.abs(value), initial=0.0))
    return largest if largest > 0 else 1.0


def sign_colours(value: Array) -> list[str]:
    """Return red for positive and blue for other values."""
    return [POSITIVE if v > 0 else NEGATIVE for v in value]


def names_of(one: Result, names: Sequence[str] | None) -> list[str] | None:
    """Return the given names, or those of the result if None: of tokens, without markers of sub-words."""
    if names is not None or one.names is None:
        return check_names(names, one.shape[1])
    return token_text.labels(one.names[0]) if one.feature_kind == "token" else list(one.names[0])


def check_names(names: Sequence[str] | None, d: int) -> list[str] | None:
    """Return the names as strings, one per feature."""
    if names is None:
        return None
    if isinstance(names, str):
        raise ValueError(f"expected one name per feature, {d}, in a list, got a single string.")
    if len(names) != d:
        raise ValueError(f"expected one name per feature, {d}, got {len(names)}.")
    return [str(name) for name in names]


def check_count(k: int, of_what: str) -> int:
    """Return k; raise ValueError if k < 1."""
    if k < 1:
        raise ValueError(f"expected k ≥ 1 {of_what}, got k={k}.")
    return k


def strongest(one: Result, k: int, names: Sequence[str] | None = None, **options: Any) -> list[Pair]:
    """Return the k strongest pairs of one example, by `Interactions.top_pairs`."""
    d = one.shape[1]
    if d > MOST_MATRIX:
        raise ValueError(
            f"a figure of all pairs of {d} features needs {d} × {d} numbers ({MOST_MATRIX} features at most). Use "
            "result.groups(mask).plot(...), or kind 'gradient', 'diagonal' or 'eigen'."
        )
    found = one.top_pairs(k, names, **options)[0]
    if not found:
        raise ValueError(f"pairs need at least two features with noise, this result has {d} features.")
    return found


def scales_of(one: Result) -> Array:
    """Return the standard deviation of the noise in each feature of one example, (d,)."""
    return array(one.gaussian.scales(one.shape[1]) if one.grouping is None else one.grouping.scales[0])


def hide_spines(ax: Axes, *sides: str) -> None:
    """Hide the frame lines on these sides."""
    for side in sides:
        ax.spines[side].set_visible(False)
