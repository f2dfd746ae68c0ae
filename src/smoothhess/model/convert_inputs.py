"""Arrays and tables as inputs: conversion to tensors of the model's dtype on its device, and the names of columns.

Validation of the converted inputs is in `gradients`; advice after a failed call of the model is in `input_advice`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smoothhess.model.input_parts import are_several
from smoothhess.model.scikit_learn import FittedNetwork
from smoothhess.model.state import modules_behind


def to_tensors(inputs: Any, forward_func: Callable[..., Any]) -> Any:
    """NumPy arrays and DataFrames as tensors in the dtype and on the device of the model; anything else as it is.

    Arrays keep their dtype if the model has no parameters, or parameters of several dtypes. A tuple or a dictionary of
    several inputs is converted item by item.

    Raises:
        TypeError: if a column of a DataFrame does not hold numbers.
        ValueError: if the columns of a DataFrame are not those of the model from `from_sklearn`.

    >>> to_tensors(np.ones((1, 2)), torch.nn.Linear(2, 1))
    tensor([[1., 1.]])
    """
    if isinstance(inputs, Mapping):
        return {name: to_tensors(value, forward_func) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list) and (are_several(inputs) or any(is_array(value) for value in inputs)):
        return tuple(to_tensors(value, forward_func) for value in inputs)
    if isinstance(inputs, Tensor) or not is_array(inputs):
        return inputs
    if is_table(inputs):
        _check_columns(inputs, forward_func)
    array = _numbers_of(inputs) if is_table(inputs) else np.asarray(inputs)
    if array.dtype == object or array.dtype.kind in "USMm":
        raise TypeError(f"inputs must hold numbers, got an array of {array.dtype}. Use array.astype(float).")
    tensor = torch.tensor(np.ascontiguousarray(array))
    if not tensor.is_floating_point():
        return tensor
    weights = [p for module in modules_behind(forward_func) for p in module.parameters() if p.is_floating_point()]
    dtypes, devices = {p.dtype for p in weights}, {p.device for p in weights}
    dtype = dtypes.pop() if len(dtypes) == 1 else tensor.dtype
    half = dtype in (torch.float16, torch.bfloat16)  # noise of half precision would be lost to rounding
    return tensor.to(devices.pop() if len(devices) == 1 else tensor.device, torch.float32 if half else dtype)


def column_names(inputs: Any) -> tuple[str, ...] | None:
    """The names of the columns of a DataFrame; None for other inputs."""
    return tuple(map(str, inputs.columns)) if is_table(inputs) else None


def in_column_order(values: Any, inputs: Any) -> Any:
    """A Series with one value per column of a DataFrame, in the order of the columns; anything else as it is.

    Raises:
        ValueError: if its labels are neither the columns of the DataFrame nor a count from zero.
    """
    names = column_names(inputs)
    if names is None or not (hasattr(values, "index") and hasattr(values, "to_numpy")) or is_table(values):
        return values
    labels = list(map(str, values.index))
    if sorted(labels) == sorted(names):
        return values.to_numpy()[[labels.index(name) for name in names]]
    if labels == list(map(str, range(len(names)))):
        return values
    missing = sorted(set(names) - set(labels))
    raise ValueError(
        f"a Series with one value per column must be indexed by the {len(names)} columns of the inputs, got "
        f"{len(labels)} labels{f', without {missing[0]!r}' if missing else ''}. Use values.reindex(inputs.columns), or "
        "values.to_numpy() in the order of the columns."
    )


def is_table(value: Any) -> bool:
    """Whether a value is a DataFrame, of pandas or of a package with the same methods."""
    return hasattr(value, "columns") and hasattr(value, "to_numpy")


def is_array(value: Any) -> bool:
    """Whether a value is a NumPy array or a table or column of pandas."""
    return isinstance(value, np.ndarray) or (hasattr(value, "to_numpy") and not isinstance(value, type))


def as_array(value: Any) -> Any:
    """A table or column of pandas as a new NumPy array; anything else as it is."""
    return np.array(value) if hasattr(value, "to_numpy") else value


def _check_columns(table: Any, forward_func: Callable[..., Any]) -> None:
    """Raise ValueError if a model was fitted on other columns, or in another order."""
    names = column_names(table)
    for module in modules_behind(forward_func):
        fitted = module.feature_names if isinstance(module, FittedNetwork) else None
        if fitted is not None and fitted != names:
            i = next((i for i, (a, b) in enumerate(zip(fitted, names or (), strict=False)) if a != b), 0)
            raise ValueError(
                f"the columns of inputs must be those of the table that the model was fitted on, in the same order: "
                f"expected {fitted[i]!r} at position {i}, got {'nothing' if not names else repr(names[i])}. Use "
                "inputs[estimator.feature_names_in_]."
            )


def _numbers_of(table: Any) -> np.ndarray[Any, Any]:
    """The values of a table as floating-point numbers; columns of integers and booleans are converted."""
    array = table.to_numpy()
    if array.dtype.kind in "biu":
        return array.astype(np.float64)
    if array.dtype != object:
        return array
    for name, column in zip(table.columns, array.T, strict=True):
        if any(isinstance(value, str) or not np.isscalar(value) for value in column):
            raise TypeError(
                f"column {str(name)!r} must hold numbers, got {type(column[0]).__name__}. Drop it, or encode its "
                "categories as numbers (pandas.get_dummies)."
            )
    return array.astype(np.float64)
