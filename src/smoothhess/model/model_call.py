"""`ModelCall`: a model with the inputs and the arguments that it is evaluated at, converted and validated once.

Evaluation itself belongs to `gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from smoothhess.model.convert_inputs import column_names, to_tensors
from smoothhess.model.gradients import Oracle, check_batch_size, check_inputs, entire_outputs
from smoothhess.model.state import borrowed
from smoothhess.model.targets import PREDICTED


@dataclass(frozen=True, eq=False)
class ModelCall:
    """The function to explain and the inputs to explain it at; the arguments are those of `SmoothHess.attribute`.

    Arrays and DataFrames become tensors; the target "predicted" becomes the predicted class of each input.

    Raises:
        TypeError: if the inputs are not floating-point numbers.
        ValueError: if the inputs are empty or not finite, if the batch size is not positive, or if the target is
            "predicted" and the model has no classes.

    >>> import torch
    >>> call = ModelCall(lambda x: x.sum(1), torch.ones(2, 3))
    >>> call.oracle().values(call.inputs, torch.arange(2))
    tensor([3., 3.])
    >>> ModelCall(lambda x: x, torch.eye(3), "predicted").target
    tensor([0, 1, 2])
    """

    forward_func: Callable[..., Any]
    inputs: Tensor  # (B, *shape), detached
    target: Any = None
    additional_forward_args: Any = None
    internal_batch_size: int | None = None
    names: tuple[str, ...] | None = field(default=None, init=False)  # columns of the DataFrame that was given
    predicted: bool = field(default=False, init=False)  # whether the target was given as "predicted"

    def __post_init__(self) -> None:
        check_batch_size(self.internal_batch_size)
        given = to_tensors(self.inputs, self.forward_func)
        check_inputs(given)
        object.__setattr__(self, "names", column_names(self.inputs))
        object.__setattr__(self, "inputs", given.detach())
        object.__setattr__(self, "predicted", is_predicted(self.target))
        if self.predicted:
            object.__setattr__(self, "target", self._predicted())

    def oracle(self, function: Callable[..., Any] | None = None) -> Oracle:
        """Values and gradients of the model, or of another function with the same arguments."""
        return Oracle(
            self.forward_func if function is None else function,
            self.inputs,
            self.target,
            self.additional_forward_args,
            self.internal_batch_size,
        )

    def check_classes(self, classes: Sequence[Any] | None) -> None:
        """Raise ValueError unless there is one name for each output of a classifier (N, C); calls it at one input."""
        if classes is None:
            return
        output = self._outputs(self.inputs[:1])
        if output.ndim == 2 and output.shape[1] > 1 and output.shape[1] != len(classes):
            raise ValueError(
                f"classes must have one name for each of the {output.shape[1]} outputs of the model, in their order, "
                f"got {len(classes)}."
            )

    def _outputs(self, inputs: Tensor) -> Tensor:
        """The entire outputs at the first inputs, (n, …)."""
        oracle = Oracle(self.forward_func, self.inputs, None, self.additional_forward_args, self.internal_batch_size)
        with borrowed(self.forward_func, self.inputs.device):
            return entire_outputs(oracle, inputs)

    def _predicted(self) -> Tensor:
        """The class with the largest output of each input, (B,)."""
        output = self._outputs(self.inputs)
        if output.ndim != 2 or output.shape[1] < 2:
            advice = "Pass the index of the output to explain, or None for a single output."
            if output.ndim > 2:
                advice = "Pass the indices of the output to explain, such as (-1, token) for logits (N, T, V)."
            raise ValueError(
                f'target="predicted" needs outputs (N, C) of several classes, got {tuple(output.shape)}. {advice}'
            )
        return output.argmax(1)


def is_predicted(target: Any) -> bool:
    """Whether a target is the word "predicted".

    Raises:
        ValueError: if it is another word.
    """
    if isinstance(target, str) and target != PREDICTED:
        raise ValueError(f'target must be "predicted", an index, or as in smoothhess.model.targets, got {target!r}.')
    return isinstance(target, str)
