"""The files of a store: shards that are whole or not there, an index of them, and the job that they belong to.

    store.json                                  what the job is; written once
    shard-RANK-SERIAL-TOKEN.safetensors         records; never changed, and no name is used twice
    summary-RANK-SERIAL-TOKEN.safetensors       global summary of all that RANK has stored, up to and with that shard
    index-RANK.jsonl                            which records are in which shard; made again where it is missing

A summary is written before its shard, and the shard is what counts: a summary whose shard is not there was cut off by
a kill, and the one before it stands.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

FORMAT, VERSION = "smoothhess.store", 1
MANIFEST = "store.json"
FULL = (errno.ENOSPC, errno.EDQUOT)

Spans = tuple[tuple[int, int], ...]  # first record and last + 1

_NAME = re.compile(r"(shard|summary)-(\d{4,})-(\d{6,})-([0-9a-f]{8})\.safetensors")


def spans(numbers: Sequence[int]) -> Spans:
    """Numbers in rising order as stretches.

    >>> spans([0, 1, 2, 7, 8])
    ((0, 3), (7, 9))
    """
    found: list[tuple[int, int]] = []
    for n in numbers:
        if found and found[-1][1] == n:
            found[-1] = (found[-1][0], n + 1)
        else:
            found.append((n, n + 1))
    return tuple(found)


def numbers_in(stretches: Spans) -> np.ndarray:
    """The inverse of `spans`."""
    return np.concatenate([np.empty(0, np.int64), *(np.arange(a, b, dtype=np.int64) for a, b in stretches)])


@dataclass(frozen=True, order=True)
class Name:
    """That of a shard, and of the summary which goes with it."""

    rank: int
    serial: int
    token: str

    @staticmethod
    def read(file_name: str, kind: str) -> Name | None:
        """From the name of a file; None where it is not of that kind."""
        match = _NAME.fullmatch(file_name)
        return Name(int(match[2]), int(match[3]), match[4]) if match and match[1] == kind else None

    def file(self, kind: str) -> str:
        """Name of the file, of kind "shard" or "summary"."""
        return f"{kind}-{self.rank:04d}-{self.serial:06d}-{self.token}.safetensors"


@dataclass(frozen=True)
class Shard:
    """One file of records."""

    name: Name
    n_bytes: int
    spans: Spans
    problem: str = ""  # why it cannot be read

    @property
    def file(self) -> str:
        """Name of the file."""
        return self.name.file("shard")


# --- writing ----------------------------------------------------------------------------------------------------------


def commit(path: Path, write: Callable[[Path], None]) -> None:
    """A file that is complete the moment it is there, and stays so when the power goes; `write` makes it elsewhere."""
    temporary = path.with_name(f".{path.name}")
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, SafetensorError) and "os error" in str(error):  # what the writer makes of an OSError
            code = re.search(r"os error (\d+)", str(error))
            raise OSError(int(code[1]) if code else errno.EIO, str(error)) from error
        raise
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Make what was renamed last."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # folders cannot be opened everywhere
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def found_store(folder: Path, manifest: dict[str, Any], rank: int, instead: bool = False) -> bool:
    """Begin a store, in the place of another if `instead`; False where another process was faster."""
    about = {"format": FORMAT, "version": VERSION, **manifest}
    temporary = folder / f".{MANIFEST}-{rank:04d}-{os.urandom(4).hex()}"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(about, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        try:
            if instead:
                os.replace(temporary, folder / MANIFEST)
            else:
                os.link(temporary, folder / MANIFEST)  # unlike a rename, it fails where there is one
        except FileExistsError:
            return False
        except OSError:  # no hard links here
            if (folder / MANIFEST).exists():
                return False
            os.replace(temporary, folder / MANIFEST)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(folder)
    return True


def add_to_index(folder: Path, shard: Shard) -> None:
    """One more line; a line that a kill cut short is ended first."""
    path = folder / f"index-{shard.name.rank:04d}.jsonl"
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        line = {"shard": shard.file, "bytes": shard.n_bytes, "records": shard.spans}
        file.write(json.dumps(line).encode() + b"\n")


def forget_summaries(folder: Path, rank: int, before: int) -> None:
    """Remove those of a rank that newer ones have replaced: all but the last two."""
    for entry in _files(folder):
        name = Name.read(entry.name, "summary")
        if name is not None and name.rank == rank and name.serial < before:
            Path(entry.path).unlink(missing_ok=True)


def mend_index(folder: Path, shards: Sequence[Shard], rank: int, world_size: int) -> None:
    """Add the lines that are missing: those of `rank`, and of ranks that are no more."""
    listed = _read_index(folder)
    for shard in shards:
        ours = shard.name.rank == rank or (rank == 0 and shard.name.rank >= world_size)
        if ours and not shard.problem and listed.get(shard.file) != shard:
            add_to_index(folder, shard)


def sweep(folder: Path, shards: Sequence[Shard], rank: int, world_size: int) -> None:
    """Remove what killed writers left half-done: those of `rank`, and of ranks that are no more."""
    stands = summaries(folder, shards).get(rank)
    present = {s.name for s in shards}
    for entry in _files(folder):
        match = re.match(rf"\.+(?:shard|summary|{re.escape(MANIFEST)})-(\d+)-", entry.name)
        if match and (int(match[1]) == rank or (rank == 0 and int(match[1]) >= world_size)):
            Path(entry.path).unlink(missing_ok=True)
        name = Name.read(entry.name, "summary")
        if name is not None and name.rank == rank and name not in present and Path(entry.path) != stands:
            Path(entry.path).unlink(missing_ok=True)


@contextmanager
def only_writer(folder: Path, rank: int) -> Iterator[None]:
    """Refuse a second process of the same rank; the lock goes with its process, however that ends."""
    try:
        import fcntl
    except ImportError:  # not on this system
        yield
        return
    with open(folder / f".lock-{rank:04d}", "w", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise ValueError(
                f"another process is writing to {folder} as rank {rank}: records would be made twice. Wait for it, or "
                "give each process its own rank and all of them world_size."
            ) from error
        except OSError:  # a file system without locks
            pass
        yield


# --- reading ----------------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `found_store` wrote."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise FileNotFoundError(f"no store {folder}.")
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a store: it has no {MANIFEST}. explain_dataset makes one.")
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        kind, version = about["format"], about["version"]
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is damaged or belongs to something else ({type(error).__name__} {error}). Put it back from a "
            "copy: it is written once, and all shards carry the job's name."
        ) from error
    if kind != FORMAT:
        raise ValueError(f"{folder} holds something else: wanted format {FORMAT!r}, got {kind!r}. Use another folder.")
    if version != VERSION:
        raise ValueError(
            f"{folder} has version {version} of the format, this smoothhess reads and writes version {VERSION}. Use "
            "the smoothhess that wrote it, or another folder."
        )
    return about


def read_shards(folder: Path, job: str) -> list[Shard]:
    """All shards of a job in the order of their names; those that cannot be read say why."""
    listed = _read_index(folder)
    found = []
    for entry in _files(folder):
        name = Name.read(entry.name, "shard")
        if name is None:
            continue
        n_bytes = entry.stat().st_size
        known = listed.get(entry.name)
        if known is not None and known.n_bytes == n_bytes:
            found.append(known)
            continue
        try:
            found.append(Shard(name, n_bytes, read_spans(Path(entry.path), job)))
        except ValueError as error:
            found.append(Shard(name, n_bytes, () if known is None else known.spans, problem=str(error)))
    return sorted(found, key=lambda s: s.name)


def read_spans(path: Path, job: str) -> Spans:
    """Which records a shard says that it holds."""
    with opened(path) as file:
        about = file.metadata() or {}
    if about.get("format") != FORMAT:
        raise ValueError(f"{path} was not written by explain_dataset. Take it away.")
    if about.get("job") != job:
        raise ValueError(f"{path} belongs to another job. Take it away.")
    return tuple((a, b) for a, b in json.loads(about["records"]))


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file to read from; a ValueError with what to do where that cannot be."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError, KeyError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}). The other records are not touched by it: delete this file and run the "
            "same explain_dataset call again, which makes its records anew."
        ) from error


def summaries(folder: Path, shards: Sequence[Shard]) -> dict[int, Path]:
    """The summary of each rank that stands: the newest whose shard is there, else the newest."""
    present = {s.name for s in shards}
    found: dict[int, list[tuple[bool, Name, Path]]] = {}
    for entry in _files(folder):
        if (name := Name.read(entry.name, "summary")) is not None:
            found.setdefault(name.rank, []).append((name in present, name, Path(entry.path)))
    return {rank: max(candidates)[2] for rank, candidates in found.items()}


def size_of(folder: Path) -> int:
    """Bytes of all files."""
    total = 0
    for entry in _files(folder):
        with suppress(FileNotFoundError):  # another rank's, renamed or removed meanwhile
            total += os.stat(entry.path).st_size
    return total


def next_serial(folder: Path, rank: int) -> int:
    """One that no file of the rank has."""
    names = (Name.read(e.name, "shard") or Name.read(e.name, "summary") for e in _files(folder))
    return 1 + max((n.serial for n in names if n is not None and n.rank == rank), default=-1)


def _read_index(folder: Path) -> dict[str, Shard]:
    found = {}
    for entry in _files(folder):
        if not re.fullmatch(r"index-\d{4,}\.jsonl", entry.name):
            continue
        for line in Path(entry.path).read_bytes().splitlines():
            try:
                about = json.loads(line)
                name = Name.read(about["shard"], "shard")
                if name is not None:
                    stretches = tuple((int(a), int(b)) for a, b in about["records"])
                    found[about["shard"]] = Shard(name, int(about["bytes"]), stretches)
            except (ValueError, TypeError, KeyError):  # a line that was cut short; the shard itself is asked
                continue
    return found


def _files(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return [e for e in entries if e.is_file()]
