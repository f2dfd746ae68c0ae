"""One example of a result that holds several."""

from __future__ import annotations

import operator
from typing import Any, TypeVar

R = TypeVar("R", bound=Any)


class ExampleError(ValueError, IndexError):
    """An example that a result does not have."""


def batch_of_one(result: R, example: int) -> R:
    """The example asked for, still a batch of one."""
    try:
        index = operator.index(example)
    except TypeError:
        raise ValueError(f"example must be the number of one example, got {example!r}.") from None
    if not -len(result) <= index < len(result):
        raise ExampleError(f"there is no example {index} of {len(result)}: wanted 0 to {len(result) - 1}.")
    return result if len(result) == 1 else result[index]
