"""SmoothGrad: the gradient of the smoothed model, with a Hessian of zero."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from smoothhess.draws.gaussian import Gaussian
from smoothhess.explainers.smooth_hess import SmoothHess
from smoothhess.model.model_call import ModelCall
from smoothhess.result.derivatives import Derivatives
from smoothhess.result.exact import Exact


def smoothgrad(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    sigma: Any = None,
    radius: float | None = None,
    gaussian: Gaussian | None = None,
    n_calls: int = 1000,
    design: str = "orthogonal",
    control: str | None = "auto",
    feature_mask: Tensor | None = None,
    internal_batch_size: int | None = None,
    seed: int | Sequence[int] = 0,
) -> Exact:
    """SmoothGrad, E ∇f(x + δ), with its standard error and a Hessian of zero.

    Args:
        forward_func: the model, or another callable; it is left unchanged.
        inputs, target, additional_forward_args, sigma, radius, gaussian: see `SmoothHess.attribute`.
        n_calls, design, control, feature_mask, internal_batch_size, seed: see `SmoothHess.attribute`.

    Returns:
        An Exact result: `gradient` is the gradient that `SmoothHess.attribute` estimates, `gradient_stderr` its
        standard error, `output` is f(x) and `value` is the smoothed value E f(x + δ).

    >>> import torch
    >>> found = smoothgrad(lambda x: x.square().sum(1), torch.ones(1, 2).double(), sigma=0.5, n_calls=100)
    >>> found.gradient, bool(found.hessian.any())
    (tensor([[2., 2.]], dtype=torch.float64), False)
    """
    call = ModelCall(forward_func, inputs, target, additional_forward_args, internal_batch_size)
    sampled = SmoothHess(forward_func).attribute(
        call.inputs,
        call.target,
        additional_forward_args,
        sigma=sigma,
        radius=radius,
        gaussian=gaussian,
        n_calls=n_calls,
        design=design,
        control=control,
        shrink=False,
        feature_mask=feature_mask,
        internal_batch_size=internal_batch_size,
        seed=seed,
        names=call.names if feature_mask is None else None,
    )
    seeds = sampled.seed
    return Exact(
        inputs=sampled.inputs,
        target=sampled.target,
        n_passes=sampled.n_passes,
        status=sampled.status,
        control=sampled.control,
        control_note=sampled.control_note,
        names=sampled.names,
        predicted=call.predicted,
        derivatives=Derivatives(
            output=sampled.output,
            value=sampled.value,
            gradient=sampled.gradient.flatten(1),
            curvature=None,
            n_calls=sampled.n_calls,
            gaussian=sampled.gaussian,
            grouping=sampled.grouping,
            value_stderr=sampled.value_stderr,
            gradient_stderr=sampled.gradient_stderr.flatten(1),
        ),
        method="smoothgrad",
        seeds=(seeds,) * len(sampled) if isinstance(seeds, int) else seeds,
    )
