"""Files of results: tensors in safetensors format, everything else as JSON; pickle is not used.

This module reads, writes and checks files and holds the fields that all kinds of results share. The record of a kind of
result is made by its method `parts` and read by the function that `restorer` registers, both in the module of the kind.
Stores of many results are in `smoothhess.datasets.store`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from smoothhess.draws.gaussian import Gaussian
from smoothhess.estimate.grouping import Grouping
from smoothhess.model.atomic_write import atomic_write

FORMAT = "smoothhess.interactions"
VERSION = 3
READABLE = ("1", "2", "3")  # 1 has neither denoising nor weights of a control variate, 2 has no exact results


class Parts(NamedTuple):
    """A result as plain data."""

    about: dict[str, Any]  # values that JSON can represent
    tensors: dict[str, Tensor]

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with a prefix, by their names without the prefix."""
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}


_RESTORE: dict[str, Callable[[Parts], Any]] = {}


def restorer(kind: str) -> Callable[[Callable[[Parts], Any]], Callable[[Parts], Any]]:
    """Decorator that registers the function which makes a result of this kind from its parts."""

    def register(function: Callable[[Parts], Any]) -> Callable[[Parts], Any]:
        _RESTORE[kind] = function
        return function

    return register


def restore(parts: Parts) -> Any:
    """The result that the parts describe."""
    return _RESTORE[parts.about.get("kind", "Interactions")](parts)


def save(parts: Parts, path: str | Path) -> None:
    """Write the parts of a result to `path`, atomically."""
    metadata = {"format": FORMAT, "version": str(VERSION), "about": json.dumps(parts.about)}
    write_atomically(Path(path), {name: t.cpu().contiguous() for name, t in parts.tensors.items()}, metadata)


def write_atomically(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file to a temporary name and rename it, so that `path` never holds a partial file."""
    with atomic_write(path) as temporary:
        save_file(tensors, temporary, metadata)


def load(path: str | Path) -> Any:
    """The result that was saved to `path`."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}.")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a safetensors file, or it is truncated ({error}). Load files written by Interactions.save; "
            "repeat the copy if the file was copied."
        ) from error
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} holds tensors but no smoothhess result. Load files written by Interactions.save.")
    if metadata.get("version") not in READABLE:
        raise ValueError(
            f"{path} has format version {metadata.get('version')}, this smoothhess reads versions "
            f"{' and '.join(READABLE)}. Use the version of smoothhess that wrote it, or compute the result again."
        )
    try:
        return restore(Parts(json.loads(metadata["about"]), tensors))
    except (KeyError, TypeError, IndexError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__} {error} is missing or wrong in it.") from error


def common_parts(result: Any) -> Parts:
    """The parts that all kinds of results have: inputs, Gaussian, groups, target, total work."""
    tensors: dict[str, Tensor] = {"inputs": result.inputs, "n_passes": result.n_passes}
    gaussian: dict[str, Any] = {}
    for name, v in result.gaussian.state().items():
        if isinstance(v, Tensor):
            tensors[f"gaussian.{name}"] = v
        else:
            gaussian[name] = v
    about: dict[str, Any] = {
        "kind": type(result).__name__,
        "gaussian": [type(result.gaussian).__name__, gaussian],
        "estimator_version": result.estimator_version,
        "status": result.status,
        "groups": None if result.grouping is None else result.grouping.count,
    }
    if result.target is not None:
        tensors["target"] = result.target
    if result.grouping is not None:
        grouping = result.grouping
        tensors |= {
            "grouping.mask": grouping.mask,
            "grouping.scales": grouping.scales,
            "grouping.r2": grouping.r2,
        }
        if grouping.direction is not None:
            tensors["grouping.direction"] = grouping.direction
    return Parts(about, tensors)


def common_fields(parts: Parts) -> dict[str, Any]:
    """The inverse of `common_parts`: the fields that all kinds of results have, by name."""
    about, tensors = parts
    grouping = None
    if about["groups"] is not None:
        kept = parts.under("grouping.")
        grouping = Grouping(kept["mask"], kept.get("direction"), about["groups"], kept["scales"], kept["r2"])
    kind, numbers = about["gaussian"]
    return {
        "inputs": tensors["inputs"],
        "gaussian": Gaussian.from_state(kind, {**numbers, **parts.under("gaussian.")}),
        "grouping": grouping,
        "target": tensors.get("target"),
        "n_passes": tensors["n_passes"],
        "status": tuple(about["status"]),
        "estimator_version": about.get("estimator_version", 1),  # files written before version numbers
    }
