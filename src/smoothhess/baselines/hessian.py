"""The Hessian of the model, dense or as an operator, and the second-order result that softened networks share.

Hessian–vector products themselves belong in `hessian_vector_products.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from smoothhess.baselines.hessian_vector_products import HessianProducts
from smoothhess.linalg.memory import DENSE_HESSIANS
from smoothhess.model.model_call import ModelCall
from smoothhess.model.state import borrowed
from smoothhess.result.exact import Exact

MATRIX_FEATURES = 8192  # with dense=None, H is kept as an operator above this limit or that of DENSE_HESSIANS

ZERO_HESSIAN = (
    "the Hessian is exactly zero: the model is piecewise linear (as the logits of a ReLU network are), or its gradient "
    "is not differentiable code"
)


def hessian(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    feature_mask: Tensor | None = None,
    dense: bool | None = None,
    internal_batch_size: int | None = None,
) -> Exact:
    """The model's gradient and Hessian at each of B inputs, by Hessian–vector products.

    The Hessian of the logits of a ReLU network is zero; the `note` of the result reports this, with a warning.

    Args:
        forward_func, inputs, target, additional_forward_args: see `gradient`.
        feature_mask: integer group ids; computes sums over groups of features from one product per group.
        dense: whether to compute the matrices (B, d, d). None computes them up to d = 8192 and 4 GiB; otherwise the
            result is matrix-free and keeps a reference to the model.
        internal_batch_size: examples × directions per pass; None chooses by free memory. It does not change the result.

    Returns:
        An Exact result: `gradient` is ∇f(x), `hessian` is ∇²f(x) and `output` is f(x).

    Raises:
        ValueError: if the model's gradient cannot be differentiated, or if a second derivative is not finite.

    >>> hessian(lambda x: x.prod(1), torch.tensor([[1.0, 2.0, 3.0]])).hessian
    tensor([[[0., 3., 2.],
             [3., 0., 1.],
             [2., 1., 0.]]])
    """
    call = ModelCall(forward_func, inputs, target, additional_forward_args, internal_batch_size)
    result = second_order(call, forward_func, feature_mask=feature_mask, dense=dense, method="hessian")
    if result.note:
        warnings.warn(
            f"{result.note}. For interactions use SmoothHess(model).attribute, or the softened network of "
            "baselines.softplus.",
            stacklevel=2,
        )
    return result


def second_order(
    call: ModelCall, function: Callable[..., Any], *, feature_mask: Tensor | None, dense: bool | None, method: str
) -> Exact:
    """Gradient and Hessian of `function`, which is the model or its softened form; `output` is the model's f(x)."""
    if dense is not None and not isinstance(dense, bool):
        raise TypeError(f"dense must be True, False or None (if it fits), got {type(dense).__name__}.")
    inputs, softened = call.inputs, function is not call.forward_func
    oracle = call.oracle(function)
    everyone = torch.arange(len(inputs), device=inputs.device)
    products = HessianProducts(oracle, inputs, call.forward_func, call.internal_batch_size)
    with borrowed(call.forward_func, inputs.device):
        value, slope = oracle(inputs, everyone)
        output = call.oracle().values(inputs, everyone) if softened else value
    zero = not softened and products.vanish()
    result = Exact.make(
        inputs,
        output,
        slope,
        operator=None if zero else products,
        value=value,
        target=oracle.entries,
        method=method,
        note=ZERO_HESSIAN if zero else "",
        names=call.names,
    )
    if feature_mask is not None:
        result = result.groups(feature_mask)
    elif not zero and (_fits(inputs) if dense is None else dense):
        result.refuse_dense()
        result = replace(result, derivatives=replace(result.derivatives, curvature=_symmetrised(products.dense())))
    passes = 1.0 + 0.5 * softened + products.passes / len(inputs)
    return replace(result, n_passes=torch.full_like(result.n_passes, passes))


def _fits(inputs: Tensor) -> bool:
    """Whether the dense Hessians of all inputs are within the limits."""
    d = inputs[0].numel()
    size = len(inputs) * d * d * inputs.element_size()
    return d <= MATRIX_FEATURES and size <= DENSE_HESSIANS.on(inputs.device)


def _symmetrised(hessian: Tensor) -> Tensor:
    """(H + Hᵀ)/2, in place and one example at a time, since H may fill half of the memory."""
    for matrix in hessian:
        matrix.copy_((matrix + matrix.mT) / 2)
    return hessian
