"""The network with its kinks rounded off: SoftPlus or Swish in the place of every ReLU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from smoothhess import activations
from smoothhess.exact import Exact
from smoothhess.rivals.derivatives import second_order


def softplus(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    beta: float,
    feature_mask: Tensor | None = None,
    dense: bool | None = None,
    internal_batch_size: int | None = None,
) -> Exact:
    """Gradient and Hessian of the network with softplus, log(1 + exp(βz))/β, in the place of every relu.

    The surrogate is f(x) + gᵀδ + ½δᵀHδ with the *model's* own f(x), `output`; `value` is what the softened network
    says at x. leaky_relu, prelu, relu6 and hardtanh are sums of relus, and each of those is replaced; max-pooling
    stays. The model itself is not edited.

    Args:
        forward_func, inputs, target, additional_forward_args: as in `smoothhess.rivals.gradient`.
        beta: how sharp the corner is left; large β is close to the relu.
        feature_mask: integer group ids; sums over groups of features by one product for each group.
        dense: whether the matrices (B, d, d) are made now. None makes them where they fit (d ≤ 8192, 4 GiB); else the
            result is matrix-free and holds the model.
        internal_batch_size: examples × directions per pass; chosen by memory when None. Never changes the result.

    >>> f = lambda x: torch.relu(x.sum(1))
    >>> softplus(f, torch.zeros(1, 2), beta=4.0).hessian  # β/4 at the corner
    tensor([[[1., 1.],
             [1., 1.]]])
    """
    form = Softplus(_check_beta(beta))
    return second_order(
        forward_func,
        soften(forward_func, form),
        inputs,
        target,
        additional_forward_args,
        feature_mask=feature_mask,
        dense=dense,
        internal_batch_size=internal_batch_size,
        method=f"softplus β = {form.beta:g}",
    )


def swish(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    beta: float,
    feature_mask: Tensor | None = None,
    dense: bool | None = None,
    internal_batch_size: int | None = None,
) -> Exact:
    """As `softplus`, with z·sigmoid(βz) in the place of every relu.

    >>> f = lambda x: torch.relu(x.sum(1))
    >>> swish(f, torch.zeros(1, 2), beta=4.0).hessian  # β/2 at the corner
    tensor([[[2., 2.],
             [2., 2.]]])
    """
    form = Swish(_check_beta(beta))
    return second_order(
        forward_func,
        soften(forward_func, form),
        inputs,
        target,
        additional_forward_args,
        feature_mask=feature_mask,
        dense=dense,
        internal_batch_size=internal_batch_size,
        method=f"swish β = {form.beta:g}",
    )


# --- what a corner becomes --------------------------------------------------------------------------------------------


class Form(Protocol):
    """A smooth function in the place of relu, with its first two derivatives; none of them overflows."""

    def value(self, z: Tensor) -> Tensor:
        """φ(z)."""
        ...

    def slope(self, z: Tensor) -> Tensor:
        """φ′(z)."""
        ...

    def curvature(self, z: Tensor) -> Tensor:
        """φ″(z)."""
        ...


@dataclass(frozen=True)
class Softplus:
    """log(1 + exp(βz))/β.

    >>> Softplus(1e4).value(torch.tensor([-1e30, 0.0, 1e30]))
    tensor([0.0000e+00, 6.9315e-05, 1.0000e+30])
    """

    beta: float

    def value(self, z: Tensor) -> Tensor:
        """max(z, 0) + log(1 + exp(−|βz|))/β."""
        return z.clamp_min(0) + torch.log1p(torch.exp(-(self.beta * z).abs())) / self.beta

    def slope(self, z: Tensor) -> Tensor:
        """sigmoid(βz)."""
        return torch.sigmoid(self.beta * z)

    def curvature(self, z: Tensor) -> Tensor:
        """β sigmoid(βz) sigmoid(−βz)."""
        t = self.beta * z
        return self.beta * torch.sigmoid(t) * torch.sigmoid(-t)  # 1 − sigmoid(t) would cancel


@dataclass(frozen=True)
class Swish:
    """z sigmoid(βz).

    >>> Swish(1e4).slope(torch.tensor([-1e30, 0.0, 1e30])).abs()
    tensor([0.0000, 0.5000, 1.0000])
    """

    beta: float

    def value(self, z: Tensor) -> Tensor:
        """z sigmoid(βz)."""
        return z * torch.sigmoid(self.beta * z)

    def slope(self, z: Tensor) -> Tensor:
        """s + t s s̄ with t = βz, s = sigmoid(t), s̄ = 1 − s."""
        t = self._finite(z)
        return torch.sigmoid(t) * (1 + t * torch.sigmoid(-t))

    def curvature(self, z: Tensor) -> Tensor:
        """β s s̄ (2 + t (s̄ − s))."""
        t = self._finite(z)
        s, rest = torch.sigmoid(t), torch.sigmoid(-t)
        return self.beta * s * rest * (2 + t * (rest - s))

    def _finite(self, z: Tensor) -> Tensor:
        """βz, held where s s̄ is 0 in any precision: infinity times 0 is no number."""
        return (self.beta * z).clamp(-1e4, 1e4)


def soften(forward_func: Callable[..., Any], form: Form) -> Callable[..., Any]:
    """The model with `form` in the place of every relu, twice differentiable.

    >>> x = torch.zeros(1, 1, requires_grad=True)
    >>> (slope,) = torch.autograd.grad(soften(torch.relu, Softplus(2.0))(x), x, create_graph=True)
    >>> slope, torch.autograd.grad(slope, x)
    (tensor([[0.5000]], grad_fn=<_AlongBackward>), (tensor([[0.5000]]),))
    """
    return activations.replace(forward_func, lambda z: _Bent.apply(z, form))  # type: ignore[return-value]


class _Bent(torch.autograd.Function):
    """φ(z). Its derivatives are given, so that one product with each is all that a direction costs."""

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
    """g φ′(z), a gradient on its way back."""

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


def _check_beta(beta: Any) -> float:
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
            f"beta must be a positive, finite number, got {number}. Large β is close to the relu; 1 to 100 is usual."
        )
    return number
