"""Finished cells of an experiment, each written to disk as soon as it is computed, so that a run can be resumed.

A cell is one small JSON file named by its key. It is written atomically, under a temporary name and moved into place,
and several processes may write to one folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from smoothhess.model.atomic_write import atomic_write

__all__ = ["Cells", "write_atomically"]


def write_atomically(text: str, path: Path) -> Path:
    """Write a text file atomically, under a temporary name that is then moved into place, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


class Cells:
    """Values by key in a folder, all computed with the same settings.

    Keys and settings are flat dictionaries of strings, numbers and None; values are anything that JSON can represent,
    and floats are restored exactly. A folder with other settings raises an error that names those that differ.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> cells = Cells(folder, {"seed": 0})
    >>> cells.put({"method": "SG", "epsilon": 0.5}, {"mean": 4.1e-05})
    >>> again = Cells(folder, {"seed": 0})
    >>> {"epsilon": 0.5, "method": "SG"} in again, again.get({"method": "SG", "epsilon": 0.5})
    (True, {'mean': 4.1e-05})
    >>> Cells(folder, {"seed": 1})
    Traceback (most recent call last):
    ...
    ValueError: ...: seed is 0 there and 1 now. Pass another --out, or remove the folder to start over.
    """

    def __init__(self, folder: Path | str, settings: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.settings: dict[str, Any] = json.loads(_canonical(settings))  # tuples become lists, as on disk
        path = self.folder / "settings.json"
        if not path.exists():
            write_atomically(json.dumps(self.settings, indent=1, sort_keys=True, ensure_ascii=False), path)
            return
        kept = _read(path)
        names = sorted(kept.keys() | self.settings.keys())
        differ = [name for name in names if kept.get(name) != self.settings.get(name)]
        if differ:
            words = "; ".join(
                f"{name} is {kept.get(name)!r} there and {self.settings.get(name)!r} now" for name in differ
            )
            raise ValueError(
                f"{self.folder} contains results of another run: {words}. "
                "Pass another --out, or remove the folder to start over."
            )

    def get(self, key: Mapping[str, Any], default: Any = None) -> Any:
        """Return the value of a finished cell, or `default`."""
        path = self._path(key)
        return _read(path)["value"] if path.exists() else default

    def put(self, key: Mapping[str, Any], value: Any) -> None:
        """Store the value of a cell, replacing an earlier one."""
        try:
            text = json.dumps({"key": dict(key), "value": value}, ensure_ascii=False)
        except TypeError as error:
            raise TypeError(f"a cell must be representable in JSON ({error}); pass .tolist() of a tensor") from error
        write_atomically(text, self._path(key))

    def compute(self, key: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        """Return the value of a cell; `make()` is called, and its value stored, only if the cell does not exist."""
        if key not in self:
            self.put(key, make())
        return self.get(key)

    def __contains__(self, key: Mapping[str, Any]) -> bool:
        return self._path(key).exists()

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        """(key, value) of every finished cell, in an order that depends only on the keys."""
        for path in sorted(self.folder.glob("cell-*.json")):
            stored = _read(path)
            yield stored["key"], stored["value"]

    def __len__(self) -> int:
        return sum(1 for _ in self.folder.glob("cell-*.json"))

    def _path(self, key: Mapping[str, Any]) -> Path:
        return self.folder / f"cell-{hashlib.sha256(_canonical(key).encode()).hexdigest()[:24]}.json"


def _canonical(record: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(record), sort_keys=True, ensure_ascii=False)
    except TypeError as error:
        raise TypeError(f"keys and settings hold strings, numbers and None ({error}), got {record!r}") from error


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); remove it and run again") from error
