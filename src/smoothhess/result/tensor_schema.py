"""Validation of tensors that were read from a file: names, dtypes and shapes, described by a small table.

A line of a table is "dtype dimensions": `"real B m k"`. A dimension is a number or a name, which has one size in all
tensors; `k?` is that size or 1, and `*` any further dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

_KINDS = {
    "float64": lambda dtype: dtype == torch.float64,
    "int64": lambda dtype: dtype == torch.int64,
    "int32": lambda dtype: dtype == torch.int32,
    "uint8": lambda dtype: dtype == torch.uint8,
    "bool": lambda dtype: dtype == torch.bool,
    "real": lambda dtype: dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
_RAW = (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError, ArithmeticError, AssertionError)


def check_tensors(tensors: Mapping[str, Tensor], table: Mapping[str, str], sizes: Mapping[str, int]) -> None:
    """Raise ValueError if a tensor is not in the table, or its dtype or shape differs from it.

    >>> check_tensors({"a": torch.zeros(2, 3), "b": torch.zeros(3)}, {"a": "real B k", "b": "real k"}, {"B": 2})
    >>> check_tensors({"a": torch.zeros(2, 3), "b": torch.zeros(4)}, {"a": "real B k", "b": "real k"}, {"B": 2})
    Traceback (most recent call last):
    ValueError: expected 'b' as real k with k = 3, got float32 (4,)
    """
    found = dict(sizes)
    for name in table:
        if name in tensors:
            _check(name, tensors[name], table[name], found)
    if unknown := sorted(tensors.keys() - table.keys()):
        raise ValueError(f"unknown tensor {unknown[0]!r}")


def _check(name: str, tensor: Tensor, line: str, sizes: dict[str, int]) -> None:
    kind, *dims = line.split()
    own = tuple(tensor.shape)
    if dims[-1:] == ["*"]:
        dims, own = dims[:-1], own[: len(dims) - 1]
    fits = _KINDS[kind](tensor.dtype) and len(own) == len(dims)
    for dim, size in zip(dims, own, strict=False):
        symbol = dim.removesuffix("?")
        fits = fits and ((symbol != dim and size == 1) or size == sizes.setdefault(symbol, size))
    if not fits:
        symbols = [dim.removesuffix("?") for dim in dims]
        known = ", ".join(f"{s} = {sizes[s]}" for s in dict.fromkeys(symbols) if s in sizes)
        got = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        raise ValueError(f"expected {name!r} as {line} with {known}, got {got}")


@contextmanager
def naming(path: Path, remedy: str) -> Iterator[None]:
    """Turn errors that damaged contents cause into a ValueError that names the file."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except _RAW as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        missing = " is missing" if isinstance(error, KeyError) else ""
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}{missing}). {remedy}") from error
