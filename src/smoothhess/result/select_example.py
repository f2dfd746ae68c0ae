"""Selection of one example of a result by its index, with an error that gives the valid range.

Functions that take an `example` argument (exports, figures, reports) use it. Selection of several examples is
`Interactions.__getitem__`.
"""

from __future__ import annotations

import operator
from typing import Any, TypeVar

R = TypeVar("R", bound=Any)


class ExampleError(ValueError, IndexError):
    """The result has no example with this index."""


def batch_of_one(result: R, example: int) -> R:
    """The example at an index, as a batch of one."""
    try:
        index = operator.index(example)
    except TypeError:
        raise ValueError(f"example must be the index of one example, got {example!r}.") from None
    if not -len(result) <= index < len(result):
        raise ExampleError(f"there is no example {index} of {len(result)}. Pass 0 to {len(result) - 1}.")
    return result if len(result) == 1 else result[index]
