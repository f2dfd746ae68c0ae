"""The Hessian of the network with SoftPlus in place of every ReLU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smoothhess.baselines.hessian import second_order
from smoothhess.baselines.softened_activations import check_beta, soften
from smoothhess.model.model_call import ModelCall
from smoothhess.result.exact import Exact


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
    """Gradient and Hessian of the network with softplus, log(1 + exp(βz))/β, in place of every relu.

    The surrogate is f(x) + gᵀδ + ½δᵀHδ with f(x) of the original model. leaky_relu, prelu, relu6 and hardtanh are sums
    of relus, each of which is replaced; max-pooling is not. The model itself is left unchanged.

    Args:
        forward_func, inputs, target, additional_forward_args: see `smoothhess.baselines.gradient`.
        beta: sharpness of the softplus; large β is close to the relu.
        feature_mask, dense, internal_batch_size: see `smoothhess.baselines.hessian`.

    Returns:
        An Exact result: `gradient` and `hessian` of the softened network, `value` its output, and `output` the f(x) of
        the original model.

    Raises:
        TypeError: if beta is not a number.
        ValueError: if beta is not positive and finite, or if no relu is found in the model.

    >>> f = lambda x: torch.relu(x.sum(1))
    >>> softplus(f, torch.zeros(1, 2), beta=4.0).hessian  # β/4 at the corner
    tensor([[[1., 1.],
             [1., 1.]]])
    """
    form = Softplus(check_beta(beta))
    return second_order(
        ModelCall(forward_func, inputs, target, additional_forward_args, internal_batch_size),
        soften(forward_func, form),
        feature_mask=feature_mask,
        dense=dense,
        method=f"softplus β = {form.beta:g}",
    )


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
