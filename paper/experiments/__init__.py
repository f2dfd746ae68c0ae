"""The experiments of the paper by name; each is a function `run(options) -> Outcome` in a separate module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from paper.options import Options

__all__ = ["EXPERIMENTS", "Outcome", "find", "run_all"]

# Name on the command line: module here, function in it. The modules are imported when they are run.
EXPERIMENTS = {
    "surface": ("surface", "run"),
    "four-quadrant": ("four_quadrant", "run"),
    "nested": ("nested", "run"),
    "pmse": ("pmse", "run"),
    "pmse-resnet101": ("pmse", "run_resnet101"),
    "attack": ("attack", "run"),
    "spirometry": ("spirometry", "run"),
    "superpixels": ("superpixels", "run"),
}


@dataclass(frozen=True)
class Outcome:
    """Result of an experiment: the files it wrote, and its findings in a few lines of text."""

    name: str
    files: Sequence[Path]
    lines: Sequence[str]


def find(name: str) -> Callable[[Options], Outcome]:
    """The experiment called `name`.

    >>> find("nest")
    Traceback (most recent call last):
    ...
    ValueError: expected one of surface, four-quadrant, nested, ..., all, got 'nest'.
    """
    if name == "all":
        return run_all
    if name not in EXPERIMENTS:
        raise ValueError(f"expected one of {', '.join(EXPERIMENTS)}, all, got {name!r}.")
    module, function = EXPERIMENTS[name]
    return getattr(import_module(f"{__name__}.{module}"), function)


def run_all(options: Options) -> Outcome:
    """Run all experiments in sequence; a failure is reported at the end and does not stop the others."""
    files: list[Path] = []
    lines: list[str] = []
    failed: list[str] = []
    for name in EXPERIMENTS:
        try:
            outcome = find(name)(options)
        except (ImportError, OSError, ValueError) as error:
            failed.append(f"{name}: {error}")
            continue
        files += outcome.files
        lines += [f"{name}: {line}" for line in outcome.lines]
    if failed:
        raise ValueError(f"{len(failed)} of {len(EXPERIMENTS)} experiments failed: {'; '.join(failed)}")
    return Outcome("all", files, lines)
