"""--target and --classes: which output is explained, and what it is called."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Target:
    """One output of the model for one example."""

    index: int | tuple[int, ...] | None  # as `SmoothHess.attribute` takes it
    name: str  # "cat", "output 3", "the output"
    words: str  # how it was chosen


def read_classes(path: Path | None) -> list[str] | None:
    """Names of the classes from a text file, one on each line, or from json: a list, or an object by number.

    Of entries that are lists, like ["n01440764", "tench"], the last word counts.
    """
    if path is None:
        return None
    path = path.expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"--classes: no file {path}.")
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix.lower() != ".json":
        lines = [line.strip() for line in text.rstrip().splitlines()]
        if not lines:
            raise ValueError(f"--classes: {path} is empty. Wanted one name on each line.")
        return lines
    try:
        found = json.loads(text)
        if isinstance(found, dict):
            numbered = {int(key): value for key, value in found.items()}
            found = [numbered[i] for i in range(len(numbered))]
        if not isinstance(found, list) or not found:
            raise TypeError
        return [str(entry[-1]) if isinstance(entry, list) else str(entry) for entry in found]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f'--classes: {path} is not a json list of names, nor an object {{"0": "cat", …}}.') from error


def find(words: str | None, output: Tensor, classes: Sequence[str] | None) -> Target:
    """The target that `words` ask for, of a model whose output for one example is (1, …); the largest by default."""
    shape = tuple(output.shape[1:])
    if len(shape) == 0 or shape == (1,):
        if words not in (None, "0"):
            raise ValueError(f"--target {words}: the model has a single output. Leave --target out.")
        return Target(None, classes[0] if classes and len(classes) == 1 else "the output", "its only one")
    if classes is not None and (len(shape) != 1 or len(classes) != shape[0]):
        raise ValueError(f"--classes names {len(classes)} classes, but the model's output has shape {shape}.")
    if words is None:
        if len(shape) > 1:
            raise ValueError(
                f"the model's output has shape {shape} for each input: say which entry with --target "
                f"{','.join('0' for _ in shape)}."
            )
        largest = int(output[0].argmax())
        return Target(largest, _name(largest, classes), f"the largest of {shape[0]} outputs")
    return _asked(words, shape, classes)


def _asked(words: str, shape: tuple[int, ...], classes: Sequence[str] | None) -> Target:
    if classes is not None and words not in classes:  # CAT for cat
        alike = [name for name in classes if name.casefold() == words.casefold()]
        words = alike[0] if len(alike) == 1 else words
    if classes is not None and words in classes:
        numbered = [i for i, name in enumerate(classes) if name == words]
        if len(numbered) > 1:
            raise ValueError(
                f"--target {words}: the classes {', '.join(map(str, numbered))} share that name. Pass one's number."
            )
        return Target(numbered[0], words, "as asked")
    try:
        numbers = tuple(int(part) for part in words.split(","))
    except ValueError as error:
        if classes is None:
            raise ValueError(
                f"--target {words}: wanted the number of an output, 0 … {shape[0] - 1}, or --classes with its name."
            ) from error
        near = difflib.get_close_matches(words, classes, 3, 0.5)
        shown = ", ".join(classes[:20]) + (" …" if len(classes) > 20 else "")
        hint = f"Did you mean {', '.join(near)}?" if near else f"There are {shown}."
        raise ValueError(f"--target {words}: no such class. {hint}") from error
    if len(numbers) != len(shape):
        raise ValueError(f"--target {words}: the output has shape {shape}: wanted {len(shape)} number(s).")
    if any(not -size <= n < size for n, size in zip(numbers, shape, strict=True)):
        wanted = ", ".join(f"0 … {size - 1}" for size in shape)
        raise ValueError(f"--target {words} is not among the outputs: wanted {wanted}.")
    numbers = tuple(n % size for n, size in zip(numbers, shape, strict=True))
    index = numbers[0] if len(numbers) == 1 else numbers
    return Target(index, _name(index, classes), "as asked")


def _name(index: int | tuple[int, ...], classes: Sequence[str] | None) -> str:
    return classes[index] if classes is not None and isinstance(index, int) else f"output {index}"


def look_like_probabilities(output: Tensor) -> bool:
    """Whether outputs (1, C) are all between 0 and 1 and add up to 1, as after softmax."""
    if output.ndim != 2 or output.shape[1] < 2:
        return False
    return bool((output >= 0).all()) and bool(torch.isclose(output.sum(), torch.ones_like(output.sum()), atol=1e-4))
