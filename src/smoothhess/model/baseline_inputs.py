"""Baselines: the inputs that stand for absent features, in removals and at the start of paths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def baseline_of(given: Any, inputs: Tensor, name: str = "baselines") -> Tensor:
    """The baseline of each example, (B, *shape), from a number or a tensor with the shape of one input or of the batch.

    Raises:
        TypeError: if it does not hold real numbers.
        ValueError: if it has another shape or is not finite.

    >>> baseline_of(0.5, torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    """
    exact = torch.float64 if isinstance(given, float) else None  # a number is not rounded to the default dtype
    given = torch.as_tensor(0.0 if given is None else given, dtype=exact)
    shapes = ((), tuple(inputs.shape[1:]), (1, *inputs.shape[1:]), tuple(inputs.shape))
    if tuple(given.shape) not in shapes:
        raise ValueError(
            f"{name} must be a number, or have the shape of one input {shapes[1]} or of the batch {shapes[3]}, got "
            f"{tuple(given.shape)}."
        )
    if given.is_complex() or given.dtype == torch.bool:
        raise TypeError(f"{name} must hold real numbers, got {given.dtype}.")
    if not torch.isfinite(given).all():
        raise ValueError(f"{name} must hold finite numbers, got NaN or infinity. Replace them.")
    return given.detach().to(inputs).expand_as(inputs)
