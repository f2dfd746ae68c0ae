"""Affine changes of units in front of a model, as part of the explained function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smoothhess.cli.explain.checked_settings import numbers_file
from smoothhess.cli.explain.option_values import check_numbers, parse_numbers
from smoothhess.model.bounded_files import read_array, read_text


class Affine:
    """The function x ↦ model(scale · x + shift); `scale` and `shift` broadcast to one input.

    >>> Affine(lambda x: x.sum(1), torch.tensor(2.0), torch.tensor([1.0, 0.0]))(torch.ones(1, 2))
    tensor([5.])
    """

    def __init__(self, model: Callable[..., Any], scale: Tensor, shift: Tensor) -> None:
        self.model, self.scale, self.shift = model, scale, shift

    def __call__(self, x: Tensor) -> Any:
        """Return the model's output for inputs in the external units."""
        return self.model(x * self.scale.to(x) + self.shift.to(x))


def normalised(model: Callable[..., Any], mean: Tensor | None, deviation: Tensor | None, shape: Sequence[int]) -> Any:
    """Return x ↦ model((x − mean)/std) for inputs of `shape`; the model itself if both are None.

    Args:
        model: The function that takes normalised inputs.
        mean: One number, one per channel of (C, H, W) or (C, L), or one per column of (D,); None is 0.
        deviation: The standard deviation, in the same forms; None is 1.
        shape: The shape of one input.

    Raises:
        ValueError: If the number of values is neither 1 nor the first entry of `shape`.
    """
    if mean is None and deviation is None:
        return model
    mean = torch.zeros(1, dtype=torch.float64) if mean is None else mean
    deviation = torch.ones(1, dtype=torch.float64) if deviation is None else deviation
    for word, numbers in (("--mean", mean), ("--std", deviation)):
        if numbers.numel() not in (1, shape[0]):
            what = f"{shape[0]} {'column' if len(shape) == 1 else 'channel'}{'s' if shape[0] > 1 else ''}"
            raise ValueError(
                f"{word} holds {numbers.numel()} numbers, but the inputs have {what}. Pass one number, or one for each."
            )
    spread = [-1] + [1] * (len(shape) - 1)
    return Affine(model, (1 / deviation).reshape(spread), (-mean / deviation).reshape(spread))


def read_numbers(words: Sequence[str] | None, option: str) -> Tensor | None:
    """Read numbers from the command line, separated by spaces or commas, or from one .npy or text file.

    >>> read_numbers(["0.5,0.25", "1"], "--mean")
    tensor([0.5000, 0.2500, 1.0000], dtype=torch.float64)
    """
    if not words:
        return None
    if (path := numbers_file(words)) is None:
        return torch.tensor(parse_numbers(words, option), dtype=torch.float64)
    try:
        numbers = np.array(_stored(path), dtype=np.float64).reshape(-1)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error
    check_numbers(numbers.tolist(), option, f"{option} {path}")
    return torch.from_numpy(numbers)


def _stored(path: Path) -> Any:
    if path.suffix == ".npy":
        return read_array(path)
    lines = [line.partition("#")[0] for line in read_text(path).splitlines()]
    try:
        return [float(cell) for line in lines if line.strip() for cell in line.split(",")]
    except ValueError as error:
        raise ValueError(f"{path} must contain only numbers, separated by commas.") from error
