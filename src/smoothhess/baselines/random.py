"""A random direction in place of the gradient: the chance level of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from smoothhess.baselines.gradient import first_order
from smoothhess.draws.seeding import torch_generator
from smoothhess.model.model_call import ModelCall
from smoothhess.result.exact import Exact


def random(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    internal_batch_size: int | None = None,
    seed: int | Sequence[int] = 0,
) -> Exact:
    """A random direction with the norm of the model's gradient, and a Hessian of zero: the chance level.

    Args:
        forward_func, inputs, target, additional_forward_args, internal_batch_size: see `gradient`.
        seed: one seed, from which the directions of all examples are drawn in turn, or one seed per example.

    Returns:
        An Exact result: `gradient` is the random direction and `output` is f(x).

    Raises:
        ValueError: if the number of seeds is neither one nor the number of examples.

    >>> f, x = lambda x: x.prod(1), torch.ones(2, 3)
    >>> random(f, x).gradient.norm(dim=1), random(f, x, seed=[0, 0]).gradient.unique(dim=0).shape
    (tensor([1.7321, 1.7321]), torch.Size([1, 3]))
    """
    call = ModelCall(forward_func, inputs, target, additional_forward_args, internal_batch_size)
    inputs, (output, slope, entries) = call.inputs, first_order(call)
    b, d = len(inputs), inputs[0].numel()
    rngs = _generators(seed, b)
    drawn = torch.stack([torch.randn(d, generator=rng, dtype=torch.float64) for rng in rngs])
    length = torch.linalg.vector_norm(slope.flatten(1), dim=1, keepdim=True)
    direction = length * torch.nn.functional.normalize(drawn, dim=1).to(inputs)
    return Exact.make(
        inputs, output, direction, target=entries, n_passes=1.0, seed=seed, method="random", names=call.names
    )


def _generators(seed: Any, batch: int) -> list[torch.Generator]:
    """One generator per example: the same object for all of them, or a separate one for each seed."""
    if isinstance(seed, int) or getattr(seed, "ndim", None) == 0:
        return [torch_generator(int(seed))] * batch
    if len(seed) != batch:
        raise ValueError(f"expected one seed, or one per example: {batch}, got {len(seed)}.")
    return [torch_generator(int(s)) for s in seed]
