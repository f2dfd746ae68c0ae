"""Validation of features, directions and examples that users pass to the methods of a result.

Functions of this module turn indices and vectors of any accepted shape into flat ones, or raise.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from smoothhess.model.input_parts import InputPart
from smoothhess.model.targets import described
from smoothhess.result.pairs import labels_of

Result = Any  # a `Result`: its methods call these functions
LISTED = 12  # names that an error lists


def flat_index(
    i: int | str | tuple[int, ...], shape: tuple[int, ...], names: Sequence[Sequence[str]] | None = None
) -> int:
    """Position of a feature, given by a number, an index into the feature shape or its name, among all features."""
    if isinstance(i, str):
        return _named_index(i, names)
    d = torch.Size(shape).numel()
    single = hasattr(i, "__index__") and not isinstance(i, tuple)
    index = tuple(map(operator.index, (i,) if single else i))  # type: ignore[arg-type]
    sizes = (d,) if single else shape
    if len(index) != len(sizes) or not all(-s <= j < s for j, s in zip(index, sizes, strict=True)):
        raise ValueError(f"feature {i!r} is not among the {d} features of shape {shape}.")
    flat = 0
    for j, size in zip(index, sizes, strict=True):
        flat = flat * size + j % size
    return flat


def _named_index(name: str, names: Sequence[Sequence[str]] | None) -> int:
    """Position of the only feature of this name, which must be the same in all examples."""
    if names is None:
        raise ValueError(f"this result has no names, so there is no feature {name!r}. Pass an index, or names=.")
    if len(set(map(tuple, names))) > 1:
        raise ValueError(f"the examples have different names: pass the index of {name!r}, or select one example.")
    places = [i for i, own in enumerate(names[0]) if own == name]
    if len(places) == 1:
        return places[0]
    near = difflib.get_close_matches(name, names[0], 3, 0.5)
    if places:
        found = f"{len(places)} features are named {name!r}: pass an index."
    elif near:
        found = f"Did you mean {' or '.join(map(repr, near))}?"
    else:
        listed = ", ".join(map(repr, names[0][:LISTED]))
        found = f"Its features are {listed}{', …' if len(names[0]) > LISTED else '.'}"
    raise ValueError(f"expected the name of one feature, got {name!r}. {found}")


def name_each(names: Any, count: int) -> tuple[str, ...]:
    """Names as strings, one for each of `count` features."""
    if isinstance(names, str):
        raise TypeError("names must be a sequence of strings, one per feature, got one string.")
    given = tuple(map(str, names))
    if len(given) != count:
        raise ValueError(f"names must be {count} strings, one per feature, got {len(given)}.")
    return given


def target_names(result: Result) -> tuple[str, ...]:
    """The target of each example in words."""
    if result.target is None:
        return ("",) * len(result)

    return tuple(described(row, result.classes) for row in result.target.tolist())


def unit_rows(result: Result, index: int) -> Tensor:
    """The unit vector of a feature for every example, (B, 1, d)."""
    unit = torch.zeros(result.shape[1], dtype=result.dtype, device=result.device)
    unit[index] = 1
    return unit.expand(len(result), 1, -1)


def directions(result: Result, v: Tensor) -> Tensor:
    """A direction as (B, d)."""
    b, d, _ = result.shape
    v = torch.as_tensor(v, dtype=result.dtype, device=result.device)
    if v.shape not in ((b, *result.feature_shape), result.feature_shape, (b, d), (d,)):
        raise ValueError(
            f"a direction must have shape {result.feature_shape}, or that with {b} examples in front, got "
            f"{tuple(v.shape)}."
        )
    return v.reshape(-1, d).expand(b, d)


def check_rows(result: Result, rows: Tensor) -> Tensor:
    """Rows (B, n, d) on the device and in the dtype of the result."""
    b, d, _ = result.shape
    if rows.ndim != 3 or rows.shape[0] != b or rows.shape[2] != d:
        raise ValueError(f"rows must have shape ({b}, n, {d}), got {tuple(rows.shape)}.")
    return rows.to(result.device, result.dtype)


def matrix_product(result: Result, v: Tensor) -> Tensor:
    """H v for v of any shape that `Result.__matmul__` accepts."""
    b, d, _ = result.shape
    v = torch.as_tensor(v, dtype=result.dtype, device=result.device)
    features = result.feature_shape
    if v.shape in ((b, *features), features, (b, d), (d,)):
        flat = v.reshape(-1, d).expand(b, d)
        product = result.source.product(flat[:, None])[:, 0]
        return product.reshape(b, *(features if v.shape[-len(features) :] == features else (d,)))
    if v.ndim in (2, 3) and v.shape[-2] == d and v.shape[:-2] in ((), (b,)):
        return result.source.product(v.mT.expand(b, -1, -1)).mT
    raise ValueError(
        f"v must be a vector of {d} features, {features} or with {b} examples in front, got {tuple(v.shape)}."
    )


def find_part(result: Result, name: int | str) -> InputPart:
    """One of several inputs, by its name or position."""
    parts = result.feature_parts
    if parts is None:
        why = "this result has one input" if result.input_parts is None else "a group contains features of two inputs"
        raise ValueError(f"{why}, so there are no pairs between inputs. Explain a tuple of inputs, (a, b).")
    for part in parts:
        if part.name == name:
            return part
    raise ValueError(f"there is no input {name!r}. The inputs are {', '.join(repr(part.name) for part in parts)}.")


def pairs_between(result: Result, a: int | str, b: int | str) -> Tensor:
    """Whether a pair of features belongs to the inputs a and b, (d, d), symmetric."""
    first, second = find_part(result, a), find_part(result, b)
    allowed = torch.zeros(result.shape[1:], dtype=torch.bool, device=result.device)
    allowed[first.features, second.features] = allowed[second.features, first.features] = True
    return allowed


def label_of(result: Result, names: Sequence[str] | None) -> Callable[[int], str]:
    """A function from the index of a feature to its name: the given name, or its place in its input."""
    parts = result.feature_parts
    if names is not None or parts is None:
        return labels_of(names, result.shape[1], result.feature_shape)
    return lambda i: next((part.label(i) for part in parts if part.start <= i < part.features.stop), str(i))


def example_indices(index: int | slice | Sequence[int] | Tensor, count: int) -> Tensor:
    """Indices of examples on the CPU, at least one, from an index, a slice or several indices."""
    if isinstance(index, int) and not -count <= index < count:
        raise IndexError(f"example {index} of {count}")
    chosen = torch.arange(count)[index.cpu() if isinstance(index, Tensor) else index].reshape(-1)
    if not len(chosen):
        raise IndexError("the index must select at least one example, got none.")
    return chosen
