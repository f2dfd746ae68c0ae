"""Gradient-NID: the strength of a pair of features as its squared mixed derivative."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from smoothhess.baselines.derivative_source import Derivatives, Source, caution
from smoothhess.draws.gaussian import Diagonal
from smoothhess.model.convert_inputs import to_tensors
from smoothhess.result.exact import Attribution
from smoothhess.result.exact import Derivatives as Held
from smoothhess.result.result import Result


def gradient_nid(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    of: str | Derivatives | Result = "own",
    internal_batch_size: int | None = None,
    **options: Any,
) -> Attribution:
    """The strength of every pair of features around each input, (∂²h/∂x_i∂x_j)².

    Squares have no sign, so strengths can be averaged over inputs (`hessian.mean(0)`) without cancellation between
    interactions of opposite sign.

    Args:
        forward_func, inputs, target, additional_forward_args, internal_batch_size: see `gradient`.
        of: source of the derivatives: "own" (the model; zero for the logits of a ReLU network), "softplus" or "swish"
            (the softened network, with beta=), "smooth" (the model smoothed by a Gaussian, with sigma=, n_calls=, … of
            `SmoothHess.attribute`), a function with the signature of the baselines, or a result for these inputs,
            whose entries are squared without calling the model.
        options: passed on to the source that `of` names.

    Returns:
        An Attribution: the matrix holds the squared entries and `gradient` the squared first derivatives; `output` and
        `value` are copied from the source.

    Raises:
        TypeError: if `of` is a result and options are given.
        ValueError: if `of` is a result for other inputs, or an Attribution.

    >>> gradient_nid(lambda x: x.prod(1), torch.tensor([[1.0, 2.0, 3.0]])).hessian
    tensor([[[0., 9., 4.],
             [9., 0., 1.],
             [4., 1., 0.]]])
    """
    if isinstance(of, Result):
        if options:
            raise TypeError(f"of is an existing result, which takes no options, got {', '.join(options)}.")
        inputs = to_tensors(inputs, forward_func)
        if of.inputs.shape != inputs.shape or not torch.equal(of.inputs, inputs.detach().to(of.inputs)):
            raise ValueError("of must be a result for these inputs, in this order.")
        return squared(of)
    source = Source.ensure(of, options)
    return squared(
        source(forward_func, inputs, target, additional_forward_args, internal_batch_size=internal_batch_size)
    )


def squared(result: Result) -> Attribution:
    """Gradient-NID from an existing result, of features or of groups: its entries squared.

    The square of a sampled entry is biased upwards by its variance, so the result should have a small relative_error.

    Args:
        result: a result of `SmoothHess` or of a baseline.

    Returns:
        An Attribution, as for `gradient_nid`.

    Raises:
        ValueError: if the result is an Attribution.

    >>> from smoothhess import SmoothHess
    >>> found = SmoothHess(lambda x: x.prod(1)).attribute(torch.ones(1, 2).double(), sigma=0.1, n_calls=40)
    >>> squared(found).hessian[0, 0, 1].round(decimals=6)
    tensor(1., dtype=torch.float64)
    """
    if isinstance(result, Attribution):
        raise ValueError(
            f"result must hold derivatives, got an attribution ({result.method}). Pass a result of SmoothHess or of a "
            "baseline."
        )
    d = result.inputs[0].numel()
    seed, groups = result.seed, result.grouping
    return Attribution(
        inputs=result.inputs,
        target=result.target,
        n_passes=result.n_passes,
        status=result.status,
        derivatives=Held(
            output=result.output,
            value=result.value,
            gradient=result.gradient.flatten(1).square(),
            curvature=result.hessian.square(),
            n_calls=result.n_calls,
            gaussian=Diagonal(result.gaussian.scales(d).square()),  # pairs are ranked by their squared effect
            grouping=None if groups is None else replace(groups, scales=groups.scales.square()),
            relative_error=2 * result.relative_error.to(result.output),  # error of a square, to first order
        ),
        method="Gradient-NID",
        note=f"squares of {getattr(result, 'method', '') or 'SmoothHess'}{caution(result.relative_error)}",
        seeds=(seed,) * len(result) if isinstance(seed, int) else seed,
    )
