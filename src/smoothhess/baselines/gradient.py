"""The gradient of the model, as a baseline with a Hessian of zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from smoothhess.model.model_call import ModelCall
from smoothhess.model.state import borrowed
from smoothhess.result.exact import Exact


def gradient(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    internal_batch_size: int | None = None,
) -> Exact:
    """The gradient of the model at each of B inputs, with a Hessian of zero.

    Args:
        forward_func: the model, or another callable; it is left unchanged.
        inputs: (B, *shape), floating point; examples in dimension 0.
        target: the output to explain; see `smoothhess.model.targets`.
        additional_forward_args: further arguments of the model; tensors with B rows are indexed with the examples.
        internal_batch_size: rows per forward pass; None chooses by free memory. It does not change the result.

    Returns:
        An Exact result: `gradient` is ∇f(x) and `output` is f(x).

    >>> gradient(lambda x: x.prod(1), torch.tensor([[1.0, 2.0, 3.0]])).gradient
    tensor([[6., 3., 2.]])
    """
    call = ModelCall(forward_func, inputs, target, additional_forward_args, internal_batch_size)
    output, slope, entries = first_order(call)
    return Exact.make(call.inputs, output, slope, target=entries, n_passes=1.0, method="gradient", names=call.names)


def first_order(call: ModelCall) -> tuple[Tensor, Tensor, Tensor | None]:
    """f (B,) and ∇f (B, *shape) at the inputs, and the indices of the target."""
    inputs, oracle = call.inputs, call.oracle()
    with borrowed(call.forward_func, inputs.device):
        output, slope = oracle(inputs, torch.arange(len(inputs), device=inputs.device))
    return output, slope, oracle.entries
