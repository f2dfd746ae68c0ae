"""What all figures share: Axes of their own, colours with one meaning, and what counts as noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from smoothhess.result.interactions import Interactions
from smoothhess.result.pairs import Pair
from smoothhess.result.select_example import batch_of_one

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = np.ndarray[Any, np.dtype[Any]]

DIVERGING = "RdBu_r"  # safe for colour-blind readers; white at 0
POSITIVE, NEGATIVE, INK = "#b2182b", "#2166ac", "#4d4d4d"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")  # told apart by everyone
NOISE = 2.0  # |z| below this is within noise
FAINT = 0.25  # opacity of what is within noise
MOST_FEATURES = 1000  # whose d × d numbers are made for a figure without being asked for
MOST_MATRIX = 5000  # or when asked for


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches that pyplot does not know."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'smoothhess[view]'") from error
    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08, compress=True))


def new_axes(ax: Axes | None, width: float, height: float) -> Axes:
    """`ax`, or that of a new figure of this size in inches."""
    if ax is None:
        return new_figure(width, height).add_subplot()
    from matplotlib.axes import Axes

    if not isinstance(ax, Axes):
        advice = " Pass one of them." if isinstance(ax, Sequence | np.ndarray) else " Use figure.add_subplot()."
        raise ValueError(f"ax must be matplotlib Axes to draw into, got {type(ax).__name__}.{advice}")
    return ax


def row_of_axes(ax: Any, count: int, width: float, height: float) -> list[Axes]:
    """`count` Axes beside each other: of a new figure of this size, or those given."""
    if ax is None:
        return list(new_figure(width, height).subplots(1, count, squeeze=False)[0])
    return [new_axes(each, width, height) for each in _listed(ax, count)]


def stack_of_axes(ax: Any, ratios: Sequence[float], width: float, height: float) -> list[Axes]:
    """Axes above each other with these shares of the height: of a new figure, those given, or parts of one given."""
    count = len(ratios)
    if ax is None:
        return list(new_figure(width, height).subplots(count, 1, height_ratios=ratios, sharex=True))
    if isinstance(ax, Sequence | np.ndarray):
        return [new_axes(each, width, height) for each in _listed(ax, count)]
    whole = new_axes(ax, width, height)
    whole.set_axis_off()
    gap = 0.06
    shares = np.asarray(ratios) / sum(ratios) * (1 - gap * (count - 1))
    tops = 1 - np.concatenate([[0.0], np.cumsum(shares + gap)[:-1]])
    return [whole.inset_axes((0.0, top - share, 1.0, share)) for top, share in zip(tops, shares, strict=True)]


def _listed(ax: Any, count: int) -> list[Any]:
    given = list(np.ravel(np.asarray(ax, dtype=object))) if isinstance(ax, Sequence | np.ndarray) else [ax]
    if len(given) != count:
        raise ValueError(f"wanted {count} Axes, one for each panel, got {len(given)}.")
    return given


def one_example(result: Interactions, example: int) -> Interactions:
    """The example asked for, still a batch of one, after making sure that it is one of a result."""
    if not isinstance(result, Interactions):
        raise ValueError(f"wanted a result, as attribute gives it, got {type(result).__name__}.")
    return batch_of_one(result, example)


def array(x: Tensor) -> Array:
    """A tensor's numbers for matplotlib."""
    return x.detach().cpu().double().numpy()


def within_noise(value: Array, stderr: Array) -> Array:
    """Where |z| < 2; an exact zero is no evidence of anything.

    >>> within_noise(np.array([3.0, 1.0, 0.0]), np.array([1.0, 1.0, 0.0]))
    array([False,  True,  True])
    """
    return (np.abs(value) < NOISE * stderr) | (value == 0)


def symmetric_limit(value: Array, limit: float | None = None) -> float:
    """The limit given, or the largest magnitude, for a scale from −limit to limit."""
    if limit is not None:
        if not (np.isfinite(limit) and limit > 0):
            raise ValueError(f"limit must be positive, the colours go from −limit to limit, got {limit}.")
        return float(limit)
    largest = float(np.nanmax(np.abs(value), initial=0.0))
    return largest if largest > 0 else 1.0


def sign_colours(value: Array) -> list[str]:
    """Red where positive, blue where negative."""
    return [POSITIVE if v > 0 else NEGATIVE for v in value]


def check_names(names: Sequence[str] | None, d: int) -> list[str] | None:
    """The names as strings, one per feature."""
    if names is None:
        return None
    if isinstance(names, str):
        raise ValueError(f"wanted one name per feature, {d}, in a list, got a single string.")
    if len(names) != d:
        raise ValueError(f"wanted one name per feature, {d}, got {len(names)}.")
    return [str(name) for name in names]


def check_count(k: int, of_what: str) -> int:
    """k ≥ 1."""
    if k < 1:
        raise ValueError(f"wanted k ≥ 1 {of_what}, got k={k}.")
    return k


def strongest(one: Interactions, k: int, names: Sequence[str] | None = None, **options: Any) -> list[Pair]:
    """The k strongest pairs of one example, by `Interactions.top_pairs`."""
    d = one.shape[1]
    if d > MOST_MATRIX:
        raise ValueError(
            f"a figure of all pairs of {d} features would take {d} × {d} numbers ({MOST_MATRIX} features at most). Use "
            "result.groups(mask).plot(...), or kind 'gradient', 'diagonal' or 'eigen'."
        )
    found = one.top_pairs(k, names, **options)[0]
    if not found:
        raise ValueError(f"pairs need at least two features that move, this result has {d} in all.")
    return found


def scales_of(one: Interactions) -> Array:
    """The size of a usual move of each feature of one example, (d,)."""
    return array(one.gaussian.scales(one.shape[1]) if one.grouping is None else one.grouping.scales[0])


def hide_spines(ax: Axes, *sides: str) -> None:
    """Frame lines that carry no information, taken away."""
    for side in sides:
        ax.spines[side].set_visible(False)
