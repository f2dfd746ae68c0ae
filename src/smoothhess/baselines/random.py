"""A random direction: what chance does in a comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from smoothhess.baselines.gradient import first_order
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
    """A random direction as long as the model's gradient, with a Hessian of zero: what chance alone achieves.

    Every example has a direction of its own: those of one `seed` in turn, or the first one of each seed of a sequence.

    >>> f, x = lambda x: x.prod(1), torch.ones(2, 3)
    >>> random(f, x).gradient.norm(dim=1), random(f, x, seed=[0, 0]).gradient.unique(dim=0).shape
    (tensor([1.7321, 1.7321]), torch.Size([1, 3]))
    """
    inputs, output, slope, entries = first_order(
        forward_func, inputs, target, additional_forward_args, internal_batch_size
    )
    b, d = len(inputs), inputs[0].numel()
    rngs = _generators(seed, b)
    drawn = torch.stack([torch.randn(d, generator=rng, dtype=torch.float64) for rng in rngs])
    length = torch.linalg.vector_norm(slope.flatten(1), dim=1, keepdim=True)
    direction = length * torch.nn.functional.normalize(drawn, dim=1).to(inputs)
    return Exact.make(inputs, output, direction, target=entries, n_passes=1.0, seed=seed, method="random")


def _generators(seed: Any, batch: int) -> list[torch.Generator]:
    """One for each example: the same that goes on from example to example, or one of its own."""
    if isinstance(seed, int) or getattr(seed, "ndim", None) == 0:
        return [torch.Generator().manual_seed(int(seed))] * batch
    if len(seed) != batch:
        raise ValueError(f"wanted one seed, or one per example: {batch}, got {len(seed)}.")
    return [torch.Generator().manual_seed(int(s)) for s in seed]
