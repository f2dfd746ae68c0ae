"""Gradient-NID: the strength of a pair as its squared mixed derivative."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from smoothhess.baselines.derivative_source import Derivatives, Source, caution
from smoothhess.draws.gaussian import Diagonal
from smoothhess.result.exact import Attribution
from smoothhess.result.exact import Derivatives as Held
from smoothhess.result.interactions import Interactions


def gradient_nid(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    of: str | Derivatives | Interactions = "own",
    internal_batch_size: int | None = None,
    **options: Any,
) -> Attribution:
    """The strength of every pair of features around each input, (∂²h/∂x_i∂x_j)².

    Squares have no sign, so that strengths can be averaged over inputs (`hessian.mean(0)`) without pairs cancelling
    whose interaction changes sign.

    Args:
        forward_func: the model, borrowed and given back as it was.
        inputs: (B, *shape), floating point; examples in dimension 0.
        target: which output; see `smoothhess.model.targets`.
        additional_forward_args: further arguments of the model; tensors with B rows follow their example.
        of: whose derivatives: "own" of the model, which vanish for the logits of a ReLU network; "softplus" or "swish"
            of the softened network, with beta=; "smooth" of the model smoothed by a Gaussian, with sigma=, n_calls=,
            … of `SmoothHess.attribute`; a function with the signature of the baselines; or a result for these inputs,
            whose entries are squared without calling the model.
        internal_batch_size: rows per forward pass; chosen by memory when None. Never changes the result.
        options: for what `of` names.

    Returns:
        An Attribution: its matrix holds the squared entries, `gradient` the squared first derivatives; `output` and
        `value` are those of the derivatives.

    >>> gradient_nid(lambda x: x.prod(1), torch.tensor([[1.0, 2.0, 3.0]])).hessian
    tensor([[[0., 9., 4.],
             [9., 0., 1.],
             [4., 1., 0.]]])
    """
    if isinstance(of, Interactions):
        if options:
            raise TypeError(f"a result that is made already takes no options, got {', '.join(options)}.")
        if of.inputs.shape != inputs.shape or not torch.equal(of.inputs, inputs.detach().to(of.inputs)):
            raise ValueError("of must be a result for these inputs, in this order.")
        return squared(of)
    source = Source.ensure(of, options)
    return squared(
        source(forward_func, inputs, target, additional_forward_args, internal_batch_size=internal_batch_size)
    )


def squared(result: Interactions) -> Attribution:
    """The squares of a result's entries, of groups as well as of features.

    The square of a sampled entry is too large by its variance, on average: take a result of small relative_error.

    >>> from smoothhess import SmoothHess
    >>> found = SmoothHess(lambda x: x.prod(1)).attribute(torch.ones(1, 2).double(), sigma=0.1, n_calls=40)
    >>> squared(found).hessian[0, 0, 1].round(decimals=6)
    tensor(1., dtype=torch.float64)
    """
    if isinstance(result, Attribution):
        raise ValueError(f"wanted derivatives to be squared, got an attribution ({result.method}).")
    d = result.inputs[0].numel()
    seed = result.seed
    return Attribution(
        inputs=result.inputs,
        gaussian=Diagonal(result.gaussian.scales(d).square()),  # pairs are ranked by the square of their effect
        grouping=None if result.grouping is None else replace(result.grouping, scales=result.grouping.scales.square()),
        target=result.target,
        n_passes=result.n_passes,
        status=result.status,
        derivatives=Held(
            output=result.output,
            value=result.value,
            gradient=result.gradient.flatten(1).square(),
            curvature=result.hessian.square(),
            n_calls=result.n_calls,
            relative_error=2 * result.relative_error.to(result.output),  # of a square, to first order
        ),
        method="Gradient-NID",
        note=f"squares of {getattr(result, 'method', '') or 'SmoothHess'}{caution(result.relative_error)}",
        seeds=(seed,) * len(result) if isinstance(seed, int) else seed,
    )
