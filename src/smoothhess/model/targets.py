"""The `target` argument: which scalar of the output of a model is explained.

All functions of the library accept the forms of Captum, for an output of shape (N, …):

    None                 the output has shape (N,) or (N, 1)
    int                  the same column for every example, output (N, C)
    tuple of ints        the same entry for every example, output with more dimensions
    list of B ints, or a tensor of B (or 1) integers     one column per example
    list of B tuples     one entry per example
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def entries(target: Any, batch: int) -> Tensor | None:
    """Convert `target` to a (B, q) tensor of indices into the q trailing output dimensions, or None.

    >>> entries([3, 1], 2)
    tensor([[3],
            [1]])
    """
    if target is None:
        return None
    if isinstance(target, np.ndarray):
        target = torch.from_numpy(target)
    if isinstance(target, Tensor):
        if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
            raise TypeError(f"target must hold integers, got a tensor of {target.dtype}.")
        flat = target.detach().cpu().reshape(-1)
        if target.ndim > 1 and target.shape[-1] != target.numel():
            raise ValueError(
                f"a target tensor must hold one index per example, ({batch},), got shape {tuple(target.shape)}. "
                "Squeeze it."
            )
        target = int(flat) if flat.numel() == 1 else flat.tolist()
    if _is_index(target):
        rows = [(int(target),)] * batch
    elif isinstance(target, tuple) and all(map(_is_index, target)) and target:
        rows = [tuple(map(int, target))] * batch
    elif isinstance(target, Sequence) and not isinstance(target, str | tuple) and len(target) == 0:
        raise ValueError("target is empty. Pass one index per example, or one for all.")
    elif isinstance(target, Sequence) and not isinstance(target, str | tuple):
        if not all(map(_is_index, target)) and not all(isinstance(t, tuple) and all(map(_is_index, t)) for t in target):
            raise TypeError("a list of targets must hold ints, or tuples of ints, one per example.")
        rows = [tuple(map(int, t)) if isinstance(t, tuple) else (int(t),) for t in target]
        if len(rows) != batch:
            raise ValueError(f"expected one target per example, got {len(rows)} targets for {batch} examples.")
        if len({len(r) for r in rows}) != 1:
            raise ValueError("all targets must index the same number of output dimensions: use tuples of one length.")
    else:
        raise TypeError(
            f"target must be None, an int, a tuple of ints, a list of them, or an integer tensor, "
            f"got {type(target).__name__}."
        )
    return torch.tensor(rows, dtype=torch.long)


def _is_index(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_floating_point() and value.dtype != torch.bool
    return hasattr(value, "__index__") and not isinstance(value, bool | np.ndarray)


def check(rows: Tensor | None, output: Tensor) -> None:
    """Raise an error if an (N, …) output cannot be indexed by `rows` (B, q)."""
    if not isinstance(output, Tensor):
        raise TypeError(
            f"the model must return one tensor, got {type(output).__name__}. Wrap it in a function that returns one."
        )
    shape = tuple(output.shape)
    if rows is None:
        if len(shape) == 1 or (len(shape) == 2 and shape[1] == 1):
            return
        raise ValueError(
            f"without a target the output must be (N,) or (N, 1), got {shape}. Pass target=, the index of the output "
            "to explain."
        )
    if len(shape) != rows.shape[1] + 1:
        advice = "Pass target=None." if len(shape) == 1 else f"Expected {len(shape) - 1}."
        raise ValueError(f"target has {rows.shape[1]} index(es) per example but the output has shape {shape}. {advice}")
    sizes = torch.tensor(shape[1:])
    outside = ((rows < -sizes) | (rows >= sizes)).any(1)
    if outside.any():
        bad = rows[outside][0].tolist()
        raise ValueError(f"target {bad if len(bad) > 1 else bad[0]} is out of range for an output of shape {shape}.")


def pick(output: Tensor, rows: Tensor | None) -> Tensor:
    """The (N,) scalars of an (N, …) output that has passed `check`; `rows` (N, q) are the indices of each row."""
    if rows is None:
        return output.reshape(len(output))
    return output[(torch.arange(len(output), device=output.device), *rows.unbind(1))]
