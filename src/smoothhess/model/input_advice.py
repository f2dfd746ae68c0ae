"""Advice after the first call of a model has failed: a missing batch dimension, or another dtype than its parameters.

The errors of torch for these mistakes name neither the inputs nor the remedy. Inputs that can be refused before a call
are refused in `gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from smoothhess.linalg.memory import is_out_of_memory
from smoothhess.model.state import modules_behind

HALVES = (torch.float16, torch.bfloat16)
# in messages of torch about layers that were made for inputs of another shape
MISFITS = ("shapes cannot be multiplied", "input to conv", "channels", "must match the size", "size mismatch")


class OutputRowsError(ValueError):
    """The model returned another number of rows than it was called with."""


@contextmanager
def advising(forward_func: Callable[..., Any], explained: Callable[[Tensor], Any], points: Tensor) -> Iterator[None]:
    """Raise ValueError with a remedy in place of an error at points (N, *shape), where the remedy is known.

    `explained` is the explained output of the model as a function of points; it raises if there is no such output.
    """
    try:
        yield
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if text := _advice(error, forward_func, explained, points):
            raise ValueError(text) from error
        raise


def _advice(
    error: Exception, forward_func: Callable[..., Any], explained: Callable[[Tensor], Any], points: Tensor
) -> str:
    """What was wrong with the points, and the remedy; "" if it is unknown."""
    if is_out_of_memory(error):
        return ""
    dtypes = {p.dtype for m in modules_behind(forward_func) for p in m.parameters() if p.is_floating_point()}
    if isinstance(error, RuntimeError) and dtypes and points.dtype not in dtypes and _is_about_dtypes(str(error)):
        return _dtype_advice(points.dtype, dtypes)
    if "'indices' to have one of the following scalar types" in str(error):
        return (
            "the model looks up embeddings, so its inputs are token ids, which cannot be perturbed. Use "
            "TokenSmoothHess(model, layer), which explains tokens."
        )
    if points.ndim > 1 and _is_about_shapes(error) and _accepts(explained, points[None]):
        one, whole = tuple(points.shape[1:]), tuple(points.shape)
        return (
            f"inputs of shape {whole} are {len(points)} examples of shape {one}, which the model does not accept, but "
            f"it accepts one example of shape {whole}: the batch dimension is missing. Pass inputs[None]."
        )
    if isinstance(error, RuntimeError) and any(words in str(error) for words in MISFITS):
        return (
            f"the model fails at {len(points)} input(s) of shape {tuple(points.shape[1:])}: {error}. Pass inputs of "
            "the shape that the model takes, with examples in dimension 0."
        )
    return ""


def _is_about_dtypes(message: str) -> bool:
    return any(words in message for words in ("dtype", "scalar type", "type should be the same", "should be the same"))


def _is_about_shapes(error: Exception) -> bool:
    """Whether an error may be one of torch about shapes: not one about the target, or about a random operation."""
    return isinstance(error, RuntimeError | IndexError | OutputRowsError) or "D input" in str(error)


def _dtype_advice(given: torch.dtype, dtypes: set[torch.dtype]) -> str:
    names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    start = f"the inputs are {str(given).removeprefix('torch.')}, but the parameters of the model are {names}"
    if dtypes <= set(HALVES):
        return (
            f"{start}, in which differences of gradients are lost to rounding. Use model.float(), and "
            "precision='bf16' or 'fp16' for speed."
        )
    cast, same = ("float", "double") if given == torch.float64 else ("double", "float")
    return f"{start}. Use inputs.{cast}(), or model.{same}()."


def _accepts(explained: Callable[[Tensor], Any], points: Tensor) -> bool:
    try:
        with torch.no_grad():
            explained(points)
    except Exception:
        return False
    return True
