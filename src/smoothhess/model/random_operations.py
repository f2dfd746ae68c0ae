"""Refuse models that draw from a global random generator of torch.

The draws of such a model would differ from call to call, and they would take numbers from generators that belong to
all threads of the process. Draws of numpy and of Python, and of compiled and scripted code, are not seen here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from smoothhess.linalg.memory import reraise_out_of_memory
from smoothhess.model.operator_mode import OperatorMode


def call_without_random_operations(call: Callable[[Tensor], Any], points: Tensor) -> Any:
    """`call(points)`; raises ValueError with the name of the first operator that draws from a global generator.

    Operators with a generator of the model are allowed: their draws are part of the model.

    >>> call_without_random_operations(lambda x: torch.dropout(x, 0.5, train=False), torch.ones(2))
    tensor([1., 1.])
    >>> call_without_random_operations(lambda x: x + torch.rand_like(x), torch.ones(2))
    Traceback (most recent call last):
    ValueError: the model draws random numbers (rand_like), so f(x) does not depend on x only. ...
    """
    mode = _Refuse()
    try:
        with mode:
            output = call(points)
    except Exception as error:
        reraise_out_of_memory(error)
        if mode.refused:
            raise ValueError(_message(mode.refused)) from None
    else:
        if mode.refused:  # the model has caught the error
            raise ValueError(_message(mode.refused))
        return output
    return call(points)  # the error of the model itself, or a model that does not run in a dispatch mode


def _message(operator: str) -> str:
    return (
        f"the model draws random numbers ({operator}), so f(x) does not depend on x only. Call model.eval(), or pass "
        "the noise as an input (additional_forward_args)."
    )


class _Refuse(OperatorMode):
    """Raises before the first operator that would draw from a global generator, and keeps its name."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs or {}):
            self.refused = func._schema.name.partition("::")[2]
            raise ValueError(_message(self.refused))
        return func(*args, **(kwargs or {}))


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator that may be random draws from a global generator with these arguments."""
    names = [argument.name for argument in func._schema.arguments]
    given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    given |= dict(zip(names, args, strict=False)) | kwargs
    if given.get("generator") not in (None, torch.default_generator):
        return False
    off = any(given.get(name) is False for name in ("train", "training"))
    return not off and all(given.get(name, 1) != 0 for name in ("dropout_p", "dropout"))
