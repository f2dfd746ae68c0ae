"""Networks with smooth activations in place of every ReLU, twice differentiable.

The activations themselves belong in `softplus.py` and `swish.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from smoothhess.curvature import activation_hooks


class Form(Protocol):
    """A smooth replacement φ of relu with its first two derivatives; none of them may overflow."""

    def value(self, z: Tensor) -> Tensor:
        """φ(z)."""
        ...

    def slope(self, z: Tensor) -> Tensor:
        """φ′(z)."""
        ...

    def curvature(self, z: Tensor) -> Tensor:
        """φ″(z)."""
        ...


def soften(forward_func: Callable[..., Any], form: Form) -> Callable[..., Any]:
    """The model with `form` in place of every relu, twice differentiable.

    >>> from smoothhess.baselines.softplus import Softplus
    >>> x = torch.zeros(1, 1, requires_grad=True)
    >>> (slope,) = torch.autograd.grad(soften(torch.relu, Softplus(2.0))(x), x, create_graph=True)
    >>> slope, torch.autograd.grad(slope, x)
    (tensor([[0.5000]], grad_fn=<_AlongBackward>), (tensor([[0.5000]]),))
    """
    return activation_hooks.replace(forward_func, lambda z: _Bent.apply(z, form))  # type: ignore[return-value]


class _Bent(torch.autograd.Function):
    """φ(z), with explicit derivatives, so that a direction costs one product with each of them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, form: Form) -> Tensor:
        return form.value(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        z, ctx.form = inputs
        ctx.save_for_backward(z)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (z,) = ctx.saved_tensors
        return _Along.apply(grad_outputs[0], z, ctx.form), None


class _Along(torch.autograd.Function):
    """g φ′(z), the backward pass of φ for an incoming gradient g."""

    generate_vmap_rule = True

    @staticmethod
    def forward(g: Tensor, z: Tensor, form: Form) -> Tensor:
        return g * form.slope(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        g, z, ctx.form = inputs
        ctx.save_for_backward(g, z)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (u,) = grad_outputs
        g, z = ctx.saved_tensors
        return u * ctx.form.slope(z), u * (g * ctx.form.curvature(z)), None


def check_beta(beta: Any) -> float:
    """Validate β and return it as a float."""
    number = None
    if not isinstance(beta, bool | str):
        try:
            number = float(beta)
        except (TypeError, ValueError, RuntimeError):
            number = None
    if number is None:
        raise TypeError(f"beta must be a positive number, got {type(beta).__name__}.")
    if not (math.isfinite(number) and number > 0):
        raise ValueError(
            f"beta must be a positive, finite number, got {number}. Pass 1 to 100, for example; large β is close to "
            "the relu."
        )
    return number
