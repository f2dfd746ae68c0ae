"""Figure of f and its Taylor surrogates along a line through the input."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from smoothhess.model.gradients import Oracle
from smoothhess.result.taylor import surrogate
from smoothhess.view.figures import canvas, title_layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from smoothhess.result.result import Result

REACH = 4.0  # default reach in standard deviations of the noise


def along(
    forward_func: Callable[..., Any],
    result: Result,
    direction: Tensor | None = None,
    *,
    reach: float | None = None,
    n_points: int = 201,
    additional_forward_args: Any = None,
    example: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """Draw f(x + t v) against t, with the first- and second-order surrogates of the result.

    The interval of ± one standard deviation of the noise along v, which contains about two thirds of the draws, is
    shaded.

    Args:
        forward_func: The explained model.
        result: The result whose surrogates are drawn.
        direction: v, of the shape of one input; it is scaled to length 1. None takes the direction of largest
            curvature.
        reach: t is between −reach and reach; None takes four standard deviations of the noise along v.
        n_points: Number of points at which f is evaluated.
        additional_forward_args: Further arguments of `forward_func` for this example.
        example: Index of the example in the batch.
        ax: Axes to draw into; a new figure if None.

    Returns:
        The Axes.

    Raises:
        ValueError: If `forward_func` is another model than the explained one, or an argument is out of range.

    >>> import torch, smoothhess as sh
    >>> f = lambda x: x[:, 0] * x[:, 1]
    >>> result = sh.SmoothHess(f).attribute(torch.ones(1, 2), sigma=0.5, n_calls=120)
    >>> sampled, first, second = along(f, result, torch.tensor([1.0, 1.0]), reach=1.0).lines[:3]
    >>> bool(abs(second.get_ydata() - sampled.get_ydata()).max() < 1e-5)
    True
    """
    one = canvas.one_example(result, example)
    surrogates = {order: surrogate(one, order) for order in (1, 2)}
    if not callable(forward_func):
        raise ValueError(f"forward_func must be the model that was explained, got {type(forward_func).__name__}.")
    if n_points < 2:
        raise ValueError(f"n_points must be at least 2, got {n_points}.")
    v, what = _direction(one, direction)
    sigma = float(torch.linalg.vector_norm(one.gaussian.pull(v[None])))  # |Lᵀv|, std of the noise along v
    if reach is None:
        if sigma == 0:
            raise ValueError(
                "the noise has no component in this direction: pass reach=, the largest distance from the input."
            )
        reach = REACH * sigma
    if not (np.isfinite(reach) and reach > 0):
        raise ValueError(f"reach must be positive: it is the largest distance from the input, got {reach}.")
    t = torch.linspace(-reach, reach, n_points, dtype=torch.float64)
    delta = t.to(one.inputs)[:, None] * v  # (n, d)
    oracle = Oracle(forward_func, one.inputs, _target(one), additional_forward_args)
    points = one.inputs + delta.reshape(n_points, *one.inputs.shape[1:])
    f = canvas.array(oracle.values(points, torch.zeros(n_points, dtype=torch.long, device=one.device)))
    _check_same(oracle, one)
    order = {n: canvas.array(s.displaced(delta[None])[0]) for n, s in surrogates.items()}
    error = {n: float(np.sqrt(np.mean((values - f) ** 2))) for n, values in order.items()}
    ax = canvas.new_axes(ax, 6.4, 4.2)
    font, x = title_layout.small(ax), t.numpy()
    if sigma and one.design != "exact":
        shade = ax.axvspan(-sigma, sigma, color="#ececec", linewidth=0, zorder=0)
        shade.set_label("± 1 standard deviation of the noise")
    ax.plot(x, f, color="black", linewidth=1.8, label="f, sampled", zorder=3)
    ax.plot(x, order[1], color=canvas.PALETTE[0], linewidth=1.4, linestyle="--", label="first order: value and slope")
    ax.plot(x, order[2], color=canvas.PALETTE[1], linewidth=1.6, label="second order: with interactions", zorder=4)
    ax.plot(0, float(one.output[0]), marker="o", color="black", markersize=4.5, zorder=5)
    ax.set_xlim(-reach, reach)
    ax.tick_params(labelsize=font)
    ax.set_ylabel(f"output f{title_layout.in_powers(ax.yaxis, 6)}", fontsize=font)
    canvas.hide_spines(ax, "top", "right")
    ax.legend(fontsize=font, loc="best", framealpha=0.8, edgecolor="none")
    note = f"root mean square error: first order {error[1]:.3g}, second order {error[2]:.3g}"
    title_layout.compose(ax, f"f and its surrogate along {what}", note, ["distance from the input along it"])
    return ax


def _direction(one: Result, direction: Tensor | None) -> tuple[Tensor, str]:
    """Return the direction as (d,) of length 1, and its name."""
    if direction is None:
        v = one.eigh(1).vectors[0, 0].reshape(-1)
        return v / torch.linalg.vector_norm(v), "the direction of largest curvature"
    v = torch.as_tensor(direction).detach().to(one.inputs)
    if v.shape not in (one.inputs.shape[1:], (one.shape[1],)):
        raise ValueError(f"direction must have the shape of one input, {one.feature_shape}, got {tuple(v.shape)}.")
    length = torch.linalg.vector_norm(v)
    if not bool(torch.isfinite(length) & (length > 0)):
        raise ValueError("direction must be finite and not zero.")
    return v.reshape(-1) / length, "the given direction"


def _target(one: Result) -> Any:
    return None if one.target is None else [tuple(one.target[0].tolist())]


def _check_same(oracle: Oracle, one: Result) -> None:
    value = float(oracle.values(one.inputs, torch.zeros(1, dtype=torch.long, device=one.device))[0])
    known = float(one.output[0])
    if abs(value - known) > 1e-3 * max(1.0, abs(known)):
        raise ValueError(
            f"forward_func returns {value:.6g} at the input, but the explained model returned {known:.6g}. "
            "Pass the model that was explained, with its additional_forward_args."
        )
