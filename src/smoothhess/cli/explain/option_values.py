"""Parses the texts of --size, --rows, --mean and --std. Nothing here imports torch or opens a file."""

from __future__ import annotations

import math
from collections.abc import Sequence


def parse_size(words: str) -> tuple[int, int]:
    """Parse "224" or "224x320" as (height, width).

    >>> parse_size("224"), parse_size("20x30")
    ((224, 224), (20, 30))
    """
    try:
        numbers = [int(part) for part in words.lower().replace("×", "x").split("x")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or min(numbers) < 1:
        raise ValueError(f"--size must be 224 or 224x320 (height x width) pixels, got {words!r}.")
    return (numbers[0], numbers[-1])


def parse_rows(words: str) -> list[tuple[str, int | slice]]:
    """Parse "0:5", "3", "1,4,7" or "all" as indices and slices, each with its text.

    >>> parse_rows("0:3,7")
    [('0:3', slice(0, 3, None)), ('7', 7)]
    """
    try:
        found = [(part, _rows(part)) for part in words.split(",")]
        if any(isinstance(rows, slice) and rows.step == 0 for _, rows in found):
            raise ValueError
    except (ValueError, TypeError) as error:
        raise ValueError(f"--rows must be like 0:5, 3, 1,4,7 or all, got {words!r}.") from error
    return found


def _rows(part: str) -> int | slice:
    if part.strip() == "all":
        return slice(None)
    if ":" not in part:
        return int(part)
    return slice(*(int(end) if end.strip() else None for end in part.split(":")))


def parse_numbers(words: Sequence[str], option: str) -> list[float]:
    """Parse numbers that are separated by spaces or commas.

    >>> parse_numbers(["0.5,0.25", "1"], "--mean")
    [0.5, 0.25, 1.0]
    """
    try:
        numbers = [float(part) for word in words for part in word.split(",") if part.strip()]
    except ValueError as error:
        raise ValueError(f"{option} must be numbers, like 0.5 or 0.485,0.456,0.406, or a .npy file.") from error
    check_numbers(numbers, option, option)
    return numbers


def check_numbers(numbers: Sequence[float], option: str, source: str) -> None:
    """Raise unless the numbers of --mean or --std are finite, and those of --std positive."""
    if not len(numbers) or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{source} must be at least one finite number.")
    if option == "--std" and min(numbers) <= 0:
        raise ValueError(f"{source} must be positive: inputs are divided by it.")
