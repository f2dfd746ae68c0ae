"""P_MSE: the mean squared error of a surrogate of the model in a ball around each input.

The comparison of several surrogates, with standard errors, belongs in `compare_surrogates.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from smoothhess.evaluate.ball_samples import BallSamples
from smoothhess.evaluate.streaming_covariance import Moments
from smoothhess.linalg.trust_region.check_radius import check_radius
from smoothhess.model.gradients import Oracle
from smoothhess.model.model_call import ModelCall
from smoothhess.model.state import borrowed
from smoothhess.result.taylor import Taylor

Surrogate = Taylor | Callable[[Tensor], Tensor]  # absolute points (B, n, *shape) → values (B, n)


def perturbation_mse(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    surrogate: Surrogate,
    radius: float,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    n_samples: int = 10_000,
    sampling: str = "ball",
    internal_batch_size: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Mean of (f̃ − f)² over the ball of `radius` around each of B inputs, (B,).

    f̃ is a `Taylor` or any callable from absolute points (B, n, *shape) to values (B, n). Only forward passes are
    needed, and all inputs share the same draws. For standard errors and several surrogates use
    `smoothhess.evaluate.compare`.

    Args:
        forward_func: the model, or another callable; it is left unchanged.
        inputs: (B, *shape), floating point; examples in dimension 0.
        surrogate: the approximation f̃ of the model, for example `result.taylor()`.
        radius: radius of the ball.
        target: the output to approximate; see `smoothhess.model.targets`.
        additional_forward_args, internal_batch_size: see `SmoothHess.attribute`.
        n_samples: number of points in each ball.
        sampling: "ball" is uniform in the ball, the definition; "radius" draws the radius uniformly from [0, radius],
            as for the paper's tables.
        seed: seed of the draws, which are independent of those of an estimate with the same seed.

    Returns:
        P_MSE of each input, (B,).

    Raises:
        TypeError: if the surrogate is not callable.
        ValueError: if the surrogate has other inputs, or returns values of another shape or values that are not finite.

    >>> x = torch.zeros(1, 50, dtype=torch.float64)
    >>> flat = Taylor(x, torch.zeros(1).double(), torch.zeros_like(x), None)
    >>> f = lambda x: x.square().sum(1)  # |δ|⁴ is d/(d + 4) in the mean
    >>> perturbation_mse(f, x, flat, 1.0).round(decimals=2), round(50 / 54, 2)
    (tensor([0.9300], dtype=torch.float64), 0.93)
    """
    call = ModelCall(forward_func, inputs, target, additional_forward_args, internal_batch_size)
    (moments,) = measure(call, {"surrogate": surrogate}, [radius], BallSamples(n_samples, sampling, seed))
    return moments.mean[:-1, 0].to(call.inputs)


def measure(
    call: ModelCall, surrogates: Mapping[str, Surrogate], radii: Sequence[float], samples: BallSamples
) -> list[Moments]:
    """For each radius, the moments of all surrogates' squared errors: of each of B inputs, and of their mean.

    One pass over the draws: all methods use the same points and values of the model, and all radii use the same
    displacements, scaled.
    """
    inputs = call.inputs
    for radius in radii:
        check_radius(radius)
    for name, surrogate in surrogates.items():
        _check_surrogate(name, surrogate, inputs)
    oracle = call.oracle()
    moments = [Moments(len(inputs) + 1, len(surrogates)) for _ in radii]
    with borrowed(call.forward_func, inputs.device), torch.no_grad():
        for unit in samples.chunks(inputs):
            for radius, total in zip(radii, moments, strict=True):
                delta = (radius * unit).to(inputs)
                truth = _values(oracle, inputs, delta)
                guesses = [_guess(name, s, inputs, delta) for name, s in surrogates.items()]
                errors = (torch.stack(guesses) - truth).square()  # (M, B, c)
                total.add(torch.cat([errors, errors.mean(1, keepdim=True)], 1))
    return moments


def _values(oracle: Oracle, inputs: Tensor, delta: Tensor) -> Tensor:
    """The model's values (B, c) at displacements (c, d) from each of the inputs."""
    points = _points(inputs, delta).flatten(0, 1)
    owner = torch.arange(len(inputs), device=inputs.device).repeat_interleave(len(delta))
    return oracle.values(points, owner).reshape(len(inputs), len(delta))


def _points(inputs: Tensor, delta: Tensor) -> Tensor:
    """Absolute points (B, c, *shape)."""
    return inputs[:, None] + delta.reshape(1, len(delta), *inputs.shape[1:])


def _guess(name: str, surrogate: Surrogate, inputs: Tensor, delta: Tensor) -> Tensor:
    """The surrogate's values, (B, c)."""
    expected = (len(inputs), len(delta))
    if isinstance(surrogate, Taylor):
        guess = surrogate.displaced(delta.expand(len(inputs), -1, -1))
    else:
        guess = surrogate(_points(inputs, delta))
    if not isinstance(guess, Tensor) or guess.shape != expected:
        got = tuple(guess.shape) if isinstance(guess, Tensor) else type(guess).__name__
        raise ValueError(
            f"surrogate {name!r} must map points {(*expected, *inputs.shape[1:])} to values {expected}, got {got}. "
            "Points are (B, n, *shape): flatten the first two dimensions for a model with one batch dimension."
        )
    if not torch.isfinite(guess).all():
        raise ValueError(
            f"surrogate {name!r} returns NaN or infinite values in this neighbourhood. Check its gradient and Hessian, "
            "or use a smaller radius."
        )
    return guess.double()


# --- argument validation ----------------------------------------------------------------------------------------------


def _check_surrogate(name: str, surrogate: Any, inputs: Tensor) -> None:
    if not callable(surrogate):
        advice = " Pass result.taylor()." if hasattr(surrogate, "taylor") else ""
        raise TypeError(
            f"surrogate {name!r} must be a Taylor or a callable points (B, n, *shape) → (B, n), "
            f"got {type(surrogate).__name__}.{advice}"
        )
    if isinstance(surrogate, Taylor):
        check_centre(name, surrogate, inputs, ", or lambda points: surrogate(points) if other centres are meant")


def check_centre(name: str, surrogate: Taylor, inputs: Tensor, otherwise: str = "") -> None:
    """Raise unless the inputs of a surrogate are exactly these inputs; it may be on another device."""
    centre = surrogate.inputs
    if centre.shape != inputs.shape or centre.dtype != inputs.dtype:
        expected, got = (f"{tuple(t.shape)} {t.dtype}" for t in (inputs, centre))
        raise ValueError(
            f"surrogate {name!r} must be made around these inputs, {expected}, got one around {got}. "
            "Compute it from the same batch."
        )
    if not torch.equal(centre.to(inputs.device), inputs):
        raise ValueError(
            f"surrogate {name!r} must be made around these inputs, got one around others of the same shape. Pass the "
            f"same batch in the same order{otherwise}."
        )
