"""What all figures share: Axes of their own, colours with one meaning, and what counts as noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from smoothhess.interactions import Interactions

Array = np.ndarray[Any, np.dtype[Any]]

DIVERGING = "RdBu_r"  # safe for colour-blind readers; white at 0
POSITIVE, NEGATIVE, INK = "#b2182b", "#2166ac", "#4d4d4d"
NOISE = 2.0  # |z| below this is within noise
FAINT = 0.25  # opacity of what is within noise


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
    return new_figure(width, height).add_subplot() if ax is None else ax


def array(x: Tensor) -> Array:
    """A tensor's numbers for matplotlib."""
    return x.detach().cpu().double().numpy()


def within_noise(value: Array, stderr: Array) -> Array:
    """Where |z| < 2; an exact zero is no evidence of anything.

    >>> within_noise(np.array([3.0, 1.0, 0.0]), np.array([1.0, 1.0, 0.0]))
    array([False,  True,  True])
    """
    return (np.abs(value) < NOISE * stderr) | (value == 0)


def symmetric_limit(value: Array) -> float:
    """The largest magnitude, for a scale from −limit to limit."""
    largest = float(np.abs(value).max(initial=0.0))
    return largest if largest > 0 else 1.0


def sign_colours(value: Array) -> list[str]:
    """Red where positive, blue where negative."""
    return [POSITIVE if v > 0 else NEGATIVE for v in value]


def check_names(names: Sequence[str] | None, d: int) -> list[str] | None:
    """The names as strings, one per feature."""
    if names is None:
        return None
    if len(names) != d:
        raise ValueError(f"wanted one name per feature, {d}, got {len(names)}.")
    return [str(name) for name in names]


def image_size(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """(H, W) of an image-shaped input (H, W), (1, H, W) or (3, H, W); None of any other.

    >>> image_size((3, 32, 32)), image_size((30,)), image_size((1, 100))
    ((32, 32), None, None)
    """
    planar = len(shape) == 2 or (len(shape) == 3 and shape[0] in (1, 3))
    return (shape[-2], shape[-1]) if planar and min(shape[-2:]) > 1 else None


def unit_words(result: Interactions) -> str:
    """What a number of the Hessian is counted in."""
    if result.grouping is None:
        return "per unit of each feature"
    if result.grouping.direction is None:
        return "per unit of every feature of each group"
    return "when both groups move along the direction given"


def quality_words(result: Interactions) -> str:
    """The quality figures of a result of one example, on one line; the method's name where nothing was sampled."""
    if result.design == "exact":
        return getattr(result, "method", "") or "exact"
    error, r2, calls = float(result.relative_error[0]), float(result.r2[0]), int(result.n_calls[0])
    words = [f"relative error {100 * error:.1f} %", f"{calls:,} calls".replace(",", "\u2009")]
    return ", ".join(words if np.isnan(r2) else [words[0], f"R² {r2:.2f}", words[1]])


def slope_word(result: Interactions) -> str:
    """What the gradient of a result is called."""
    return "gradient" if result.design == "exact" else "SmoothGrad"


def caption(ax: Axes, text: str) -> None:
    """A quiet line above the figure."""
    ax.set_title(text, fontsize="small", color=INK, loc="left")


def hide_spines(ax: Axes, *sides: str) -> None:
    """Frame lines that carry no information, taken away."""
    for side in sides:
        ax.spines[side].set_visible(False)
