"""Derivatives of the model as it is, and the two rows that every comparison needs: SmoothGrad alone, and chance."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from smoothhess.borrow import borrowed
from smoothhess.estimator import SmoothHess
from smoothhess.exact import Derivatives, Exact
from smoothhess.gaussian import Gaussian
from smoothhess.oracle import Oracle, check_batch_size, check_inputs, free_bytes
from smoothhess.rivals.products import HessianProducts

MATRIX_FEATURES = 8192  # more are kept as an operator, unless a matrix is asked for;
MATRIX_BYTES = 1 << 32  # so are matrices that hold more than this, or half of the free memory of a GPU

ZERO_HESSIAN = (
    "the Hessian is exactly zero: between its kinks the model is linear (the logits of a ReLU network are), or its "
    "gradient is not differentiable code"
)


def gradient(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    internal_batch_size: int | None = None,
) -> Exact:
    """The model's own gradient at each of B inputs, with a Hessian of zero.

    Args:
        forward_func: the model, borrowed and given back as it was.
        inputs: (B, *shape), floating point; examples in dimension 0.
        target: which output; see `smoothhess.target`.
        additional_forward_args: further arguments of the model; tensors with B rows follow their example.
        internal_batch_size: rows per forward pass; chosen by memory when None. Never changes the result.

    >>> gradient(lambda x: x.prod(1), torch.tensor([[1.0, 2.0, 3.0]])).gradient
    tensor([[6., 3., 2.]])
    """
    inputs, output, slope, entries = _first_order(
        forward_func, inputs, target, additional_forward_args, internal_batch_size
    )
    return Exact.make(inputs, output, slope, target=entries, n_passes=1.0, method="gradient")


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
    """The model's own gradient and Hessian at each of B inputs, by Hessian–vector products.

    The logits of a ReLU network have none: there the result says so in its `note`, and a warning is given.

    Args:
        forward_func, inputs, target, additional_forward_args: as in `gradient`.
        feature_mask: integer group ids; sums over groups of features by one product for each group.
        dense: whether the matrices (B, d, d) are made now. None makes them where they fit (d ≤ 8192, 4 GiB); else the
            result is matrix-free and holds the model.
        internal_batch_size: examples × directions per pass; chosen by memory when None. Never changes the result.

    >>> hessian(lambda x: x.prod(1), torch.tensor([[1.0, 2.0, 3.0]])).hessian
    tensor([[[0., 3., 2.],
             [3., 0., 1.],
             [2., 1., 0.]]])
    """
    result = second_order(
        forward_func,
        forward_func,
        inputs,
        target,
        additional_forward_args,
        feature_mask=feature_mask,
        dense=dense,
        internal_batch_size=internal_batch_size,
        method="hessian",
    )
    if result.note:
        warnings.warn(
            f"{result.note}. For interactions use SmoothHess(model).attribute, or a softened network: rivals.softplus.",
            stacklevel=2,
        )
    return result


def second_order(
    model: Callable[..., Any],
    function: Callable[..., Any],
    inputs: Tensor,
    target: Any,
    additional_forward_args: Any,
    *,
    feature_mask: Tensor | None,
    dense: bool | None,
    internal_batch_size: int | None,
    method: str,
) -> Exact:
    """Gradient and Hessian of `function`, the model or a softened form of it, around the model's own f(x)."""
    check_inputs(inputs)
    if dense is not None and not isinstance(dense, bool):
        raise TypeError(f"dense must be True, False or None (where it fits), got {type(dense).__name__}.")
    inputs, softened = inputs.detach(), function is not model
    rows = check_batch_size(internal_batch_size)
    oracle = Oracle(function, inputs, target, additional_forward_args, rows)
    everyone = torch.arange(len(inputs), device=inputs.device)
    products = HessianProducts(oracle, inputs, model, rows)
    with borrowed(model, inputs.device):
        value, slope = oracle(inputs, everyone)
        output = value
        if softened:
            output = Oracle(model, inputs, target, additional_forward_args, rows).values(inputs, everyone)
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
    )
    if feature_mask is not None:
        result = result.groups(feature_mask)
    elif not zero and (_fits(inputs) if dense is None else dense):
        result._refuse_dense()
        result = replace(result, derivatives=replace(result.derivatives, curvature=_symmetrised(products.dense())))
    passes = 1.0 + 0.5 * softened + products.passes / len(inputs)
    return replace(result, n_passes=torch.full_like(result.n_passes, passes))


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
    """SmoothGrad alone, E ∇f(x + δ), with its standard error and a Hessian of zero.

    The arguments are those of `SmoothHess.attribute`, of which this is the gradient; `value` is that of the smoothed
    function.

    >>> found = smoothgrad(lambda x: x.square().sum(1), torch.ones(1, 2).double(), sigma=0.5, n_calls=100)
    >>> found.gradient, bool(found.hessian.any())
    (tensor([[2., 2.]], dtype=torch.float64), False)
    """
    sampled = SmoothHess(forward_func).attribute(
        inputs,
        target,
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
    )
    seeds = sampled.seed
    return Exact(
        inputs=sampled.inputs,
        gaussian=sampled.gaussian,
        grouping=sampled.grouping,
        target=sampled.target,
        n_passes=sampled.n_passes,
        status=sampled.status,
        control=sampled.control,
        control_note=sampled.control_note,
        derivatives=Derivatives(
            output=sampled.output,
            value=sampled.value,
            gradient=sampled.gradient.flatten(1),
            curvature=None,
            n_calls=sampled.n_calls,
            value_stderr=sampled.value_stderr,
            gradient_stderr=sampled.gradient_stderr.flatten(1),
        ),
        method="smoothgrad",
        seeds=(seeds,) * len(inputs) if isinstance(seeds, int) else seeds,
    )


def random(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    internal_batch_size: int | None = None,
    seed: int | Sequence[int] = 0,
) -> Exact:
    """A random direction as long as the model's gradient, with a Hessian of zero: what chance alone achieves.

    Every example has a direction of its own: those of one `seed` in turn, or the first one of each seed of a sequence.

    >>> f, x = lambda x: x.prod(1), torch.ones(2, 3)
    >>> random(f, x).gradient.norm(dim=1), random(f, x, seed=[0, 0]).gradient.unique(dim=0).shape
    (tensor([1.7321, 1.7321]), torch.Size([1, 3]))
    """
    inputs, output, slope, entries = _first_order(
        forward_func, inputs, target, additional_forward_args, internal_batch_size
    )
    b, d = len(inputs), inputs[0].numel()
    rngs = _generators(seed, b)
    drawn = torch.stack([torch.randn(d, generator=rng, dtype=torch.float64) for rng in rngs])
    length = torch.linalg.vector_norm(slope.flatten(1), dim=1, keepdim=True)
    direction = length * torch.nn.functional.normalize(drawn, dim=1).to(inputs)
    return Exact.make(inputs, output, direction, target=entries, n_passes=1.0, seed=seed, method="random")


def _first_order(
    forward_func: Callable[..., Any], inputs: Tensor, target: Any, args: Any, internal_batch_size: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The inputs without their history, f (B,) and ∇f (B, *shape) there, and the target's entries."""
    check_inputs(inputs)
    inputs = inputs.detach()
    oracle = Oracle(forward_func, inputs, target, args, check_batch_size(internal_batch_size))
    with borrowed(forward_func, inputs.device):
        output, slope = oracle(inputs, torch.arange(len(inputs), device=inputs.device))
    return inputs, output, slope, oracle.entries


def _generators(seed: Any, batch: int) -> list[torch.Generator]:
    """One for each example: the same that goes on from example to example, or one of its own."""
    if isinstance(seed, int) or getattr(seed, "ndim", None) == 0:
        return [torch.Generator().manual_seed(int(seed))] * batch
    if len(seed) != batch:
        raise ValueError(f"wanted one seed, or one per example: {batch}, got {len(seed)}.")
    return [torch.Generator().manual_seed(int(s)) for s in seed]


def _fits(inputs: Tensor) -> bool:
    """Whether the Hessians of all inputs are kept as matrices."""
    d, room = inputs[0].numel(), MATRIX_BYTES
    if inputs.is_cuda:
        room = max(room, free_bytes(inputs.device) // 2)
    return d <= MATRIX_FEATURES and len(inputs) * d * d * inputs.element_size() <= room


def _symmetrised(hessian: Tensor) -> Tensor:
    """(H + Hᵀ)/2 in the place of H, one example at a time: a batch of them may fill half of the memory."""
    for matrix in hessian:
        matrix.copy_((matrix + matrix.mT) / 2)
    return hessian
