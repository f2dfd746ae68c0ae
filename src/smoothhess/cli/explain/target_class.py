"""Resolves --target and --classes: the index and the name of the explained output."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from smoothhess.model.bounded_files import read_text
from smoothhess.model.model_call import PREDICTED


@dataclass(frozen=True)
class Target:
    """The explained output of one example; see `smoothhess.model.targets` for the forms of `index`."""

    index: int | tuple[int, ...] | None  # the `target` of `SmoothHess.attribute`
    name: str  # "cat", "output 3", "the output"
    words: str  # how it was chosen


def read_classes(path: Path | None) -> list[str] | None:
    """Read class names from a text file with one name per line, or from a json list or object keyed by number.

    If an entry is a list, like ["n01440764", "tench"], its last item is the name.

    Raises:
        ValueError: If the file is empty or has another form.
    """
    if path is None:
        return None
    path = path.expanduser()
    text = read_text(path)
    if path.suffix.lower() != ".json":
        lines = [line.strip() for line in text.rstrip().splitlines()]
        if not lines:
            raise ValueError(f"--classes: {path} is empty. Expected one name per line.")
        return lines
    try:
        found = json.loads(text)
        if isinstance(found, dict):
            numbered = {int(key): value for key, value in found.items()}
            found = [numbered[i] for i in range(len(numbered))]
        if not isinstance(found, list) or not found:
            raise TypeError
        return [str(entry[-1]) if isinstance(entry, list) else str(entry) for entry in found]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(f'--classes: {path} is not a json list of names, nor an object {{"0": "cat", …}}.') from error


def find(words: str | None, output: Tensor, classes: Sequence[str] | None) -> Target:
    """Return the target that `words` select from an output of shape (1, …).

    Args:
        words: The value of --target; None and "predicted" select the largest output.
        output: The model's output for one example.
        classes: The names of the outputs.

    Raises:
        ValueError: If there is no such output, or `words` is None and the output has several dimensions.
    """
    shape = tuple(output.shape[1:])
    if len(shape) == 0 or shape == (1,):
        if words not in (None, "0", PREDICTED):
            raise ValueError(f"--target {words}: the model has a single output. Omit --target.")
        return Target(None, classes[0] if classes and len(classes) == 1 else "the output", "the only output")
    if classes is not None and (len(shape) != 1 or len(classes) != shape[0]):
        raise ValueError(f"--classes names {len(classes)} classes, but the model's output has shape {shape}.")
    if words is None or (words == PREDICTED and PREDICTED not in (classes or ())):
        if len(shape) > 1:
            raise ValueError(
                f"the model's output has shape {shape} for each input: select an entry with --target "
                f"{','.join('0' for _ in shape)}."
            )
        largest = int(output[0].argmax())
        return Target(largest, _name(largest, classes), f"the largest of {shape[0]} outputs")
    return _asked(words, shape, classes)


def _asked(words: str, shape: tuple[int, ...], classes: Sequence[str] | None) -> Target:
    if classes is not None and words not in classes:  # ignore case
        alike = [name for name in classes if name.casefold() == words.casefold()]
        words = alike[0] if len(alike) == 1 else words
    if classes is not None and words in classes:
        numbered = [i for i, name in enumerate(classes) if name == words]
        if len(numbered) > 1:
            raise ValueError(
                f"--target {words}: the classes {', '.join(map(str, numbered))} share this name. Pass a class number."
            )
        return Target(numbered[0], words, "set by --target")
    try:
        numbers = tuple(int(part) for part in words.split(","))
    except ValueError as error:
        if classes is None:
            raise ValueError(
                f"--target {words}: expected the number of an output, 0 … {shape[0] - 1}, or --classes with its name."
            ) from error
        near = difflib.get_close_matches(words, classes, 3, 0.5)
        shown = ", ".join(classes[:20]) + (" …" if len(classes) > 20 else "")
        hint = f"Did you mean {', '.join(near)}?" if near else f"The classes are {shown}."
        raise ValueError(f"--target {words}: no such class. {hint}") from error
    if len(numbers) != len(shape):
        raise ValueError(f"--target {words}: the output has shape {shape}: expected {len(shape)} number(s).")
    if any(not -size <= n < size for n, size in zip(numbers, shape, strict=True)):
        expected = ", ".join(f"0 … {size - 1}" for size in shape)
        raise ValueError(f"--target {words} is out of range: expected {expected}.")
    numbers = tuple(n % size for n, size in zip(numbers, shape, strict=True))
    index = numbers[0] if len(numbers) == 1 else numbers
    return Target(index, _name(index, classes), "set by --target")


def _name(index: int | tuple[int, ...], classes: Sequence[str] | None) -> str:
    return classes[index] if classes is not None and isinstance(index, int) else f"output {index}"


def look_like_probabilities(output: Tensor) -> bool:
    """Whether outputs (1, C) are non-negative and sum to 1, as after softmax."""
    if output.ndim != 2 or output.shape[1] < 2:
        return False
    return bool((output >= 0).all()) and bool(torch.isclose(output.sum(), torch.ones_like(output.sum()), atol=1e-4))
