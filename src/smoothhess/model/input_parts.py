"""Several inputs of one model, such as an image and a text, as one input whose features are concatenated.

This module concatenates inputs and the options that are given for each of them, and calls the model with the separate
inputs. Which pairs of features belong to two inputs is read from results, in `smoothhess.result`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class InputPart:
    """One of several inputs: its place among the concatenated features.

    >>> part = InputPart("b", (2, 1), 3)
    >>> part.of(torch.arange(5)[None])
    tensor([[[3],
             [4]]])
    """

    name: int | str  # position of the argument, or its name
    shape: tuple[int, ...]  # of one example
    start: int  # index of its first feature

    @property
    def features(self) -> slice:
        """Its features among all of them."""
        return slice(self.start, self.start + torch.Size(self.shape).numel())

    def of(self, values: Tensor) -> Tensor:
        """The values of this input, (B, *shape), of values (B, d) of all features."""
        return values[:, self.features].reshape(len(values), *self.shape)

    def label(self, i: int) -> str:
        """Name of the feature with index `i` among all features."""
        place = torch.unravel_index(torch.tensor(i - self.start), self.shape)
        return f"{self.name}[{', '.join(str(int(p)) for p in place)}]"


class FunctionOfParts:
    """A model of several inputs as a function of their concatenated features.

    Args:
        forward_func: the model.
        parts: its inputs; they are passed by name if their names are strings, otherwise by position.
    """

    def __init__(self, forward_func: Callable[..., Any], parts: Sequence[InputPart]) -> None:
        self.forward_func, self.input_parts = forward_func, tuple(parts)

    def __call__(self, features: Tensor, *args: Any) -> Any:
        """The output of the model for features (N, d); further arguments follow its inputs."""
        inputs = {part.name: part.of(features) for part in self.input_parts}
        if isinstance(self.input_parts[0].name, str):
            return self.forward_func(*args, **{str(name): value for name, value in inputs.items()})
        return self.forward_func(*inputs.values(), *args)


def are_several(inputs: Any) -> bool:
    """Whether inputs are given as a tuple or a dictionary of tensors; lists of numbers are a common mistake."""
    tensors = isinstance(inputs, list) and any(isinstance(part, Tensor) for part in inputs)
    return tensors or isinstance(inputs, tuple | Mapping)


def place_parts(named: Iterable[tuple[int | str, Sequence[int]]]) -> tuple[InputPart, ...]:
    """Inputs of these names and shapes, one after the other."""
    parts: list[InputPart] = []
    for name, shape in named:
        parts.append(InputPart(name, tuple(shape), parts[-1].features.stop if parts else 0))
    return tuple(parts)


def join_inputs(inputs: Sequence[Tensor] | Mapping[str, Tensor]) -> tuple[Tensor, tuple[InputPart, ...]]:
    """The features of all inputs, (B, d), and the place of each input among them.

    Raises:
        TypeError: if an input is not a tensor, or if their dtypes or devices differ.
        ValueError: if there is no input, or if their batch sizes differ.

    >>> joined, parts = join_inputs((torch.zeros(2, 3), torch.ones(2, 2, 2)))
    >>> joined.shape, parts[1].features
    (torch.Size([2, 7]), slice(3, 7, None))
    """
    named: dict[Any, Any] = dict(inputs) if isinstance(inputs, Mapping) else dict(enumerate(inputs))
    if not named:
        raise ValueError("inputs are empty: pass a tensor, or a tuple of tensors with the examples in dimension 0.")
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.ndim < 2:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"input {name!r} must be a tensor (B, …) with the examples in dimension 0, got {got}.")
    kinds = {(len(v), v.dtype, v.device) for v in named.values()}
    if len({size for size, *_ in kinds}) > 1:
        raise ValueError(f"inputs must have the same number of examples, got {[len(v) for v in named.values()]}.")
    if len(kinds) > 1:
        got = ", ".join(f"{v.dtype} on {v.device}" for v in named.values())
        raise TypeError(f"inputs must have one dtype and device, got {got}. Use .to; pass ids as additional arguments.")
    parts = place_parts((name, value.shape[1:]) for name, value in named.items())
    return torch.cat([value.detach().flatten(1) for value in named.values()], 1), parts


def join_values(values: Any, parts: Sequence[InputPart], what: str) -> Any:
    """Values of all features, (d,) or (B, d), from one number or tensor for each input; other values themselves.

    Raises:
        ValueError: if there is not one value for each input, or if a shape does not fit its input.

    >>> parts = place_parts([("a", (2,)), ("b", (1,))])
    >>> join_values((0.5, 2.0), parts, "sigma")
    tensor([0.5000, 0.5000, 2.0000], dtype=torch.float64)
    """
    if not are_several(values):
        return values
    named: dict[Any, Any] = (
        dict(values) if isinstance(values, Mapping) else dict(zip(_names(parts), values, strict=False))
    )
    if len(values) != len(parts) or set(named) != set(_names(parts)):
        got = list(values) if isinstance(values, Mapping) else f"{len(values)} of them"
        raise ValueError(f"{what} must be one value for all features, or one for each of {_names(parts)}, got {got}.")
    rows = [_flat(named[part.name], part, what) for part in parts]
    batch = max(map(len, rows))
    joined = torch.cat([row.expand(batch, -1) for row in rows], 1)
    return joined if any(torch.as_tensor(named[p.name]).ndim > len(p.shape) for p in parts) else joined[0]


def join_names(names: Any, columns: Sequence[Sequence[str] | None], parts: Sequence[InputPart]) -> Any:
    """Names of all features from those of each input; `columns` are the names of inputs that are DataFrames.

    Names that are not given for each input are returned as they are.

    >>> join_names(({"a": ["x"]}), (None, None), place_parts([("a", (1,)), ("b", (2,))]))
    ['x', 'b[0]', 'b[1]']
    """
    if isinstance(names, Mapping):
        columns = [names.get(part.name) for part in parts]
    elif names is not None and not isinstance(names, str) and not all(isinstance(name, str) for name in names):
        columns = list(names)
    elif names is not None or not any(columns):
        return names
    if len(columns) != len(parts):
        raise ValueError(f"names must be one list for each of the inputs {_names(parts)}, got {len(columns)} lists.")
    joined: list[str] = []
    for part, own in zip(parts, columns, strict=True):
        places = range(part.start, part.features.stop)
        given = [part.label(i) for i in places] if own is None else list(map(str, own))
        if len(given) != len(places):
            raise ValueError(f"input {part.name!r} has {len(places)} features, got {len(given)} names for it.")
        joined += given
    return joined


def grouped_parts(parts: Sequence[InputPart], mask: Tensor) -> tuple[InputPart, ...] | None:
    """The groups of each input, for group ids (·, d); None if a range of ids contains groups of two inputs.

    >>> grouped_parts(place_parts([("a", (2,)), ("b", (3,))]), torch.tensor([[0, 0, 1, 2, 1]]))[1].features
    slice(1, 3, None)
    """
    ranges = [tuple(map(int, mask[:, part.features].aminmax())) for part in parts]
    ordered = sorted(ranges)
    if any(low <= high for (_, high), (low, _) in pairwise(ordered)):
        return None
    return tuple(InputPart(part.name, (high - low + 1,), low) for part, (low, high) in zip(parts, ranges, strict=True))


def _names(parts: Sequence[InputPart]) -> list[int | str]:
    return [part.name for part in parts]


def _flat(value: Any, part: InputPart, what: str) -> Tensor:
    """One value of an input as (1 or B, d)."""
    given = torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    shape = (len(given) if given.ndim > len(part.shape) else 1, *part.shape)
    try:
        return given.expand(shape).reshape(shape[0], -1)
    except RuntimeError as error:
        raise ValueError(
            f"{what} of input {part.name!r} must be a number or have its shape {part.shape}, got {tuple(given.shape)}."
        ) from error
