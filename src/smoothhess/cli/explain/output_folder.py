"""The output folder of `smoothhess explain` and of the demo: crash-safe writing, and reuse of finished inputs.

Files are replaced or deleted only if an earlier run wrote them, which their recorded hashes show. The content of the
files belongs to `output_files`, the lock against a concurrent run to `folder_lock`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from smoothhess.cli.explain.folder_lock import locked
from smoothhess.model.json_checksum import parse_checked, with_checksum

FORMAT, VERSION = "smoothhess.explain", 2
RECORDS, INDEX = "explain.json", "index.html"
UNFINISHED = ""  # key of a record whose files are being replaced


@dataclass(frozen=True)
class Record:
    """A finished input: the hash of its settings, its files with their hashes, and its row of the index page."""

    key: str
    files: dict[str, str]
    words: dict[str, str] = field(default_factory=dict)


class Folder:
    """A folder of explanations with a record of the finished inputs.

    Raises:
        ValueError: If `path` is a file, or holds a foreign record file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().resolve()
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"--out must be a folder, got the file {self.path}. Pass another --out.")
        self.records = self._read()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Create the folder, lock it, and read its records; remove what interrupted runs left, and an empty new folder.

        Raises:
            ValueError: If the folder cannot be written to, or is used by another run.
        """
        existed = self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise ValueError(f"cannot write to {self.path}: {error.strerror}. Pass another --out.") from error
        try:
            with locked(self.path):
                for left in self.path.glob(".smoothhess-*.partial"):
                    if re.fullmatch(r"\.smoothhess-[0-9a-f]{32}\.partial", left.name) and not left.is_symlink():
                        shutil.rmtree(left, ignore_errors=True)
                self.records = self._read()
                yield
        finally:
            if not existed:
                with suppress(OSError):  # it is not empty
                    self.path.rmdir()

    def kept(self, name: str, key: str) -> Record | None:
        """Return the record of an input that was finished with the same settings, or None."""
        record = self.records.get(name)
        if record is None or record.key != key:
            return None
        return record if all((self.path / file).is_file() for file in record.files) else None

    def refuse_foreign(self, files: Sequence[str]) -> None:
        """Raise if one of these names belongs to a file that no earlier run wrote, or that was changed since.

        Raises:
            ValueError: With the name of the file.
        """
        own = {file: written for record in self.records.values() for file, written in record.files.items()}
        for file in files:
            path = self.path / file
            if (path.exists() or path.is_symlink()) and not _is_own(path, own.get(file)):
                raise ValueError(
                    f"{path} would be replaced, but smoothhess did not write it, or it was changed since. "
                    "Move or remove it, or pass another --out."
                )

    @contextmanager
    def writing(self, name: str, key: str, words: dict[str, str]) -> Iterator[Path]:
        """Yield a temporary folder for the files of an input; they are moved to this folder on success."""
        with self._staging() as staging:
            yield staging
            files = {path.name: _hash(path) for path in sorted(staging.iterdir())}
            before = self.records.get(name, Record(UNFINISHED, {}))
            self.refuse_foreign(list(files))
            # A run that is killed in between leaves an input that counts as unfinished, and no unrecorded file.
            for file, written in before.files.items():
                if _is_own(self.path / file, written):
                    (self.path / file).unlink()
            self._record({name: Record(UNFINISHED, files)})
            for file in files:
                (staging / file).replace(self.path / file)
            self._record({name: Record(key, files, words)})

    def write_index(self, text: str) -> None:
        """Write the page that lists the explanations."""
        with self.writing(INDEX, UNFINISHED, {}) as place:
            (place / INDEX).write_text(text, encoding="utf-8")

    @contextmanager
    def _staging(self) -> Iterator[Path]:
        staging = self.path / f".smoothhess-{uuid.uuid4().hex}.partial"
        staging.mkdir()
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _record(self, changed: Mapping[str, Record]) -> None:
        """Replace records, in the record file as well."""
        self.records = {**self.records, **changed}
        finished = {name: asdict(record) for name, record in self.records.items()}
        about = with_checksum({"format": FORMAT, "version": VERSION, "finished": finished})
        with self._staging() as staging:
            (staging / RECORDS).write_text(json.dumps(about, indent=1, ensure_ascii=False), encoding="utf-8")
            (staging / RECORDS).replace(self.path / RECORDS)

    def _read(self) -> dict[str, Record]:
        path = self.path / RECORDS
        if not path.exists():
            return {}
        try:
            about = parse_checked(path.read_text(encoding="utf-8"))
            if about["format"] != FORMAT:
                raise ValueError
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} was not written by smoothhess explain, or it is damaged. Move or remove it, or pass another "
                "--out."
            ) from error
        try:
            finished = about["finished"] if about["version"] == VERSION else {}
            found = {name: Record(**record) for name, record in finished.items()}
            return {name: record for name, record in found.items() if _sound(name, record)}
        except (KeyError, TypeError, AttributeError):
            return {}


def _sound(name: str, record: Record) -> bool:
    """Whether all files of a record belong to its input: files are deleted according to the record."""
    own = re.compile(re.escape(name) + r"[.-][^/\\]+")
    texts = [*record.files.values(), *record.words.values()]
    return (
        bool(record.files)
        and all(own.fullmatch(file) or file == name == INDEX for file in record.files)
        and all(isinstance(text, str) for text in texts)
    )


def _is_own(path: Path, written: str | None) -> bool:
    return written is not None and path.is_file() and not path.is_symlink() and _hash(path) == written


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def key_of(settings: dict[str, Any]) -> str:
    """Return a short hash of the settings."""
    text = json.dumps(settings, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
