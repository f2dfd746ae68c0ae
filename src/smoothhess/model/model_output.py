"""`OutputField`: one field of the output of a model that returns a dataclass, a dictionary or a tuple.

Which scalar of the field is explained is decided by `targets`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


class OutputField:
    """A model that returns one field of the output of another model.

    Args:
        forward_func: the model.
        field: name of a field or key, or position in a tuple.

    >>> import torch
    >>> logits = OutputField(lambda x: {"logits": x, "loss": None}, "logits")
    >>> logits(torch.ones(2))
    tensor([1., 1.])
    """

    def __init__(self, forward_func: Callable[..., Any], field: str | int) -> None:
        self.forward_func, self.field = forward_func, field

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """The field of the output for these arguments."""
        return output_field(self.forward_func(*args, **keywords), self.field)


def output_field(output: Any, field: str | int) -> Any:
    """One field of an output, a tensor.

    Raises:
        ValueError: with the names of the fields, if there is no such field.
        TypeError: if the field is not a tensor.
    """
    try:
        found = _field(output, field)
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"the model returned {type(output).__name__}{_fields(output)}, which has no output {field!r}. Pass the "
            "name or the position of one of its fields as output=, or None for a model that returns one tensor."
        ) from error
    if not isinstance(found, Tensor):
        raise TypeError(
            f"output {field!r} of the model must be a tensor, got {type(found).__name__}. The model returned "
            f"{type(output).__name__}{_fields(output)}: pass another field as output=, or wrap the model in a function."
        )
    return found


def _field(output: Any, field: str | int) -> Any:
    if isinstance(output, Tensor):
        raise TypeError  # its rows are examples
    if isinstance(field, str) and not isinstance(output, Mapping) and hasattr(output, field):
        return getattr(output, field)
    if isinstance(field, int) and is_dataclass(output) and not isinstance(output, Mapping):
        return getattr(output, fields(output)[field].name)
    return output[field]


def _fields(output: Any) -> str:
    if isinstance(output, Mapping):
        return f" with {', '.join(map(str, output))}"
    if is_dataclass(output):
        return f" with {', '.join(f.name for f in fields(output))}"
    return f" of {len(output)}" if isinstance(output, tuple | list) else ""
