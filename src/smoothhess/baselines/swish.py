"""The Hessian of the network with Swish in place of every ReLU."""

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
    """Gradient and Hessian of the network with swish, z·sigmoid(βz), in place of every relu.

    Args:
        forward_func, inputs, target, additional_forward_args, beta, feature_mask, dense, internal_batch_size: see
            `softplus`.

    Returns:
        An Exact result, as for `softplus`.

    Raises:
        TypeError: if beta is not a number.
        ValueError: if beta is not positive and finite, or if no relu is found in the model.

    >>> f = lambda x: torch.relu(x.sum(1))
    >>> swish(f, torch.zeros(1, 2), beta=4.0).hessian  # β/2 at the corner
    tensor([[[2., 2.],
             [2., 2.]]])
    """
    form = Swish(check_beta(beta))
    return second_order(
        ModelCall(forward_func, inputs, target, additional_forward_args, internal_batch_size),
        soften(forward_func, form),
        feature_mask=feature_mask,
        dense=dense,
        method=f"swish β = {form.beta:g}",
    )


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
        """βz, clamped to a range beyond which s s̄ is 0 in any precision, since infinity times 0 is NaN."""
        return (self.beta * z).clamp(-1e4, 1e4)
