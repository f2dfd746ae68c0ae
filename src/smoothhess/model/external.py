"""Models of other frameworks: convert a function that returns values and gradients to a forward_func."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def from_gradient(fn: Callable[..., tuple[Any, Any]], *, numpy: bool = True) -> Callable[..., Tensor]:
    """Make a forward_func from a function that returns values *and* gradients, for models of any framework.

    Args:
        fn: function of points (N, *shape), followed by the additional_forward_args. It returns a pair: values (N,) and
            gradients (N, *shape), as arrays that NumPy can convert or as tensors.
        numpy: whether `fn` is called with a NumPy array (default) or a torch tensor.

    Returns:
        A differentiable function of a tensor of points, to be passed to `SmoothHess`. It can be differentiated once.

    Raises:
        TypeError: `fn` is not callable.
        ValueError: raised by calls of the returned function if `fn` does not return such a pair.

    >>> import numpy as np
    >>> f = from_gradient(lambda x: ((x**2).sum(1), 2 * x))
    >>> f(torch.ones(2, 3))
    tensor([3., 3.])
    """
    if not callable(fn):
        raise TypeError(f"from_gradient wants a function points → (values, gradients), got {type(fn).__name__}.")

    class GivenGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, points: Tensor, *args: Any) -> Tensor:  # type: ignore[override]
            given = points.detach().cpu().numpy() if numpy else points.detach()
            with torch.enable_grad():  # fn may itself differentiate with torch
                result = fn(given, *args)
            if not isinstance(result, tuple) or len(result) != 2:
                raise ValueError("the gradient function must return a pair (values, gradients).")
            value, gradient = (_as_tensor(r, points) for r in result)
            if value.numel() != len(points) or gradient.shape != points.shape:
                raise ValueError(
                    f"expected values ({len(points)},) and gradients {tuple(points.shape)}, "
                    f"got {tuple(value.shape)} and {tuple(gradient.shape)}."
                )
            ctx.save_for_backward(gradient)
            return value.reshape(len(points)).clone()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, *grad_outputs: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            (gradient,) = ctx.saved_tensors
            weight = grad_outputs[0].reshape(-1, *[1] * (gradient.ndim - 1))
            return (weight * gradient, *[None] * (len(ctx.needs_input_grad) - 1))

    def forward_func(points: Tensor, *args: Any) -> Tensor:
        return GivenGradient.apply(points, *args)  # type: ignore[return-value]

    forward_func.__doc__ = inspect.getdoc(fn)
    return forward_func


def _as_tensor(value: Any, like: Tensor) -> Tensor:
    array = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    return array.to(like.device, like.dtype)
