"""`ModelCall`: a model with the inputs and the arguments that it is evaluated at, validated once.

Evaluation itself belongs to `gradients`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from smoothhess.model.gradients import Oracle, check_batch_size, check_inputs


@dataclass(frozen=True, eq=False)
class ModelCall:
    """The function to explain and the inputs to explain it at; the arguments are those of `SmoothHess.attribute`.

    Raises:
        TypeError: if the inputs are not a floating-point tensor.
        ValueError: if the inputs are empty or not finite, or if the batch size is not positive.

    >>> import torch
    >>> call = ModelCall(lambda x: x.sum(1), torch.ones(2, 3))
    >>> call.oracle().values(call.inputs, torch.arange(2))
    tensor([3., 3.])
    """

    forward_func: Callable[..., Any]
    inputs: Tensor  # (B, *shape), detached
    target: Any = None
    additional_forward_args: Any = None
    internal_batch_size: int | None = None

    def __post_init__(self) -> None:
        check_inputs(self.inputs)
        check_batch_size(self.internal_batch_size)
        object.__setattr__(self, "inputs", self.inputs.detach())

    def oracle(self, function: Callable[..., Any] | None = None) -> Oracle:
        """Values and gradients of the model, or of another function with the same arguments."""
        return Oracle(
            self.forward_func if function is None else function,
            self.inputs,
            self.target,
            self.additional_forward_args,
            self.internal_batch_size,
        )
