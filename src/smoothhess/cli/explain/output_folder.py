"""The output folder of `smoothhess explain`: crash-safe writing, and reuse of finished inputs by a later run.

The content of the files belongs to `output_files`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT, VERSION = "smoothhess.explain", 1
RECORDS = "explain.json"


@dataclass(frozen=True)
class Record:
    """A finished input: the hash of its settings, its files, and its row of the index page."""

    key: str
    files: list[str]
    words: dict[str, str] = field(default_factory=dict)


class Folder:
    """A folder of explanations with a record of the finished inputs.

    Raises:
        ValueError: If `path` is a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().resolve()
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"--out must be a folder, got the file {self.path}. Pass another --out.")
        self.records = self._read()

    def kept(self, name: str, key: str) -> Record | None:
        """Return the record of an input that was finished with the same settings, or None."""
        record = self.records.get(name)
        if record is None or record.key != key:
            return None
        return record if all((self.path / file).is_file() for file in record.files) else None

    def try_writing(self) -> None:
        """Create the folder.

        Raises:
            ValueError: If the folder cannot be written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise ValueError(f"cannot write to {self.path}: {error.strerror}. Pass another --out.") from error

    @contextmanager
    def writing(self, name: str, key: str, words: dict[str, str]) -> Iterator[Path]:
        """Yield a temporary folder for the files of an input; they are moved to this folder on success."""
        staging = self.path / f".{name}.{os.getpid()}.partial"
        staging.mkdir(parents=True)
        try:
            yield staging
            files = sorted(path.name for path in staging.iterdir())
            before = self.records.pop(name, None)  # until the new record is written, the input counts as unfinished
            self._write()
            for file in set(before.files if before else ()) - set(files):  # files of other settings
                (self.path / file).unlink(missing_ok=True)
            for file in files:
                (staging / file).replace(self.path / file)
            self.records[name] = Record(key, files, words)
            self._write()
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def write_text(self, name: str, text: str) -> Path:
        """Write a text file atomically and return its path."""
        part = self.path / f".{name}.{os.getpid()}.partial"
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(self.path / name)
        finally:
            part.unlink(missing_ok=True)
        return self.path / name

    def _write(self) -> None:
        about = {
            "format": FORMAT,
            "version": VERSION,
            "finished": {name: asdict(record) for name, record in self.records.items()},
        }
        self.write_text(RECORDS, json.dumps(about, indent=1, ensure_ascii=False))

    def _read(self) -> dict[str, Record]:
        try:
            about = json.loads((self.path / RECORDS).read_text(encoding="utf-8"))
            if about["format"] != FORMAT or about["version"] != VERSION:
                return {}
            found = {name: Record(**record) for name, record in about["finished"].items()}
            return {name: record for name, record in found.items() if _sound(name, record)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no record file, or a foreign one
            return {}


def _sound(name: str, record: Record) -> bool:
    """Whether all files of a record belong to its input: files are deleted according to the record."""
    own = re.compile(re.escape(name) + r"[.-][^/\\]+")
    return bool(record.files) and all(own.fullmatch(file) for file in record.files)


def key_of(settings: dict[str, Any]) -> str:
    """Return a short hash of the settings."""
    text = json.dumps(settings, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
