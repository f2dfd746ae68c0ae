"""The folder that explanations are written into: each input whole or not at all, and kept by a later run."""

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
    """A finished input: what it was made with, its files, and the few words that the index says about it."""

    key: str
    files: list[str]
    words: dict[str, str] = field(default_factory=dict)


class Folder:
    """A folder of explanations."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().resolve()
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"wanted a folder to write into, but {self.path} is a file. Pass another --out.")
        self.records = self._read()

    def kept(self, name: str, key: str) -> Record | None:
        """The record of an input that is finished and was made with the same settings."""
        record = self.records.get(name)
        if record is None or record.key != key:
            return None
        return record if all((self.path / file).is_file() for file in record.files) else None

    def try_writing(self) -> None:
        """Make the folder, and refuse one that cannot be written into."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise ValueError(f"cannot write into {self.path}: {error.strerror}. Pass another --out.") from error

    @contextmanager
    def writing(self, name: str, key: str, words: dict[str, str]) -> Iterator[Path]:
        """A folder to write an input's files into; they appear in this one together when all are there."""
        staging = self.path / f".{name}.{os.getpid()}.partial"
        staging.mkdir(parents=True)
        try:
            yield staging
            files = sorted(path.name for path in staging.iterdir())
            before = self.records.pop(name, None)  # between the first file and the record nothing counts as finished
            self._write()
            for file in set(before.files if before else ()) - set(files):  # of other settings
                (self.path / file).unlink(missing_ok=True)
            for file in files:
                (staging / file).replace(self.path / file)
            self.records[name] = Record(key, files, words)
            self._write()
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def write_text(self, name: str, text: str) -> Path:
        """A text file, whole or not at all."""
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
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none, or not ours: nothing is finished
            return {}


def _sound(name: str, record: Record) -> bool:
    """Whether a record can be one of ours: files are deleted and kept by it, so they must be those of that input."""
    own = re.compile(re.escape(name) + r"[.-][^/\\]+")
    return bool(record.files) and all(own.fullmatch(file) for file in record.files)


def key_of(settings: dict[str, Any]) -> str:
    """A short hash of everything that an explanation depends on."""
    text = json.dumps(settings, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
