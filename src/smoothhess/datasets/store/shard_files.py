"""The files of a store: atomically written shards, an index of them, and the manifest of the job.

    store.json                                  manifest: settings of the job; written once
    shard-RANK-SERIAL-TOKEN.safetensors         records; never changed, and names are unique
    summary-RANK-SERIAL-TOKEN.safetensors       global summary of all records of process RANK, including that shard
    index-RANK.jsonl                            the records in each shard, and complete passes; rebuilt if it is missing

A summary is written before its shard. A summary without its shard was interrupted and is ignored: the previous summary
is valid. The contents of shards and summaries are defined in `record` and `running_summary`.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from smoothhess.model.atomic_write import atomic_write, remove_stale, sync_folder, temporary_path
from smoothhess.model.json_checksum import parse_checked, with_checksum
from smoothhess.result.tensor_schema import naming

FORMAT, VERSION = "smoothhess.store", 1
MANIFEST = "store.json"
KEEP = ("pairs", "hessian", "result")  # what is kept of a record, from least to most
FULL = (errno.ENOSPC, errno.EDQUOT)

Spans = tuple[tuple[int, int], ...]  # first record and last + 1

_NAME = re.compile(r"(shard|summary)-(\d{4,})-(\d{6,})-([0-9a-f]{8})\.safetensors")


def spans(numbers: Sequence[int]) -> Spans:
    """Convert ascending numbers to half-open intervals.

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


def checked_spans(listed: Any, n_bytes: int) -> Spans:
    """The intervals that a file of `n_bytes` bytes lists; raises ValueError if it cannot hold such records."""
    found = tuple((int(start), int(stop)) for start, stop in listed)
    ends = [0, *(end for interval in found for end in interval)]
    if ends != sorted(ends) or 8 * sum(stop - start for start, stop in found) > n_bytes:  # a number takes 8 bytes
        raise ValueError("expected its records as ascending intervals that fit into the file")
    return found


def numbers_in(intervals: Spans) -> np.ndarray:
    """The inverse of `spans`."""
    return np.concatenate([np.empty(0, np.int64), *(np.arange(a, b, dtype=np.int64) for a, b in intervals)])


@dataclass(frozen=True, order=True)
class Name:
    """The parts of the file name that a shard and its summary share."""

    rank: int
    serial: int
    token: str

    @staticmethod
    def read(file_name: str, kind: str) -> Name | None:
        """Parse a file name; None if it is not of that kind."""
        match = _NAME.fullmatch(file_name)
        return Name(int(match[2]), int(match[3]), match[4]) if match and match[1] == kind else None

    def file(self, kind: str) -> str:
        """File name; `kind` is "shard" or "summary"."""
        return f"{kind}-{self.rank:04d}-{self.serial:06d}-{self.token}.safetensors"


@dataclass(frozen=True)
class Shard:
    """A file of records."""

    name: Name
    n_bytes: int
    spans: Spans
    job: str  # the job that wrote it
    problem: str = ""  # why it cannot be read; empty if it can

    @property
    def file(self) -> str:
        """File name."""
        return self.name.file("shard")


@dataclass(frozen=True)
class Pass:
    """A complete pass of a process over its loader."""

    world_size: int
    records: int  # number of records of the loader
    data: str  # hash of all of them


# --- writing ----------------------------------------------------------------------------------------------------------


def commit(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file atomically and durably: `write` creates a temporary file, which is synced and renamed."""
    try:
        with atomic_write(path, durable=True) as temporary:
            write(temporary)
    except SafetensorError as error:
        if "os error" not in str(error):
            raise
        code = re.search(r"os error (\d+)", str(error))  # errno is only in the text
        raise OSError(int(code[1]) if code else errno.EIO, str(error)) from error


def found_store(folder: Path, manifest: dict[str, Any], instead: bool = False) -> bool:
    """Write the manifest, replacing one if `instead`; False if another process has written it first."""
    about = with_checksum({"format": FORMAT, "version": VERSION, **manifest})
    path = folder / MANIFEST
    with temporary_path(path) as temporary:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(about, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        try:
            if instead:
                os.replace(temporary, path)
            else:
                os.link(temporary, path)  # unlike a rename, a link fails if the file exists
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            if path.exists():
                return False
            os.replace(temporary, path)
    sync_folder(folder)
    return True


def add_to_index(folder: Path, shard: Shard) -> None:
    """Append the line of a shard to the index."""
    line = {"shard": shard.file, "bytes": shard.n_bytes, "records": shard.spans, "job": shard.job}
    _append(folder, shard.name.rank, line)


def _append(folder: Path, rank: int, line: dict[str, Any]) -> None:
    """Append a line to an index, after a line break if the last line was truncated."""
    with open(folder / f"index-{rank:04d}.jsonl", "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(with_checksum(line)).encode() + b"\n")


def add_pass(folder: Path, rank: int, ended: Pass) -> None:
    """Note in the index that a process has read its whole loader and written its share."""
    if passes(folder).get(rank) != ended:
        _append(folder, rank, {"world_size": ended.world_size, "read": ended.records, "data": ended.data})


def passes(folder: Path) -> dict[int, Pass]:
    """The last complete pass of each rank."""
    found = {}
    for rank, about in _index_lines(folder):
        with suppress(TypeError, ValueError, KeyError, OverflowError):
            found[rank] = Pass(int(about["world_size"]), int(about["read"]), about["data"])
    return found


def forget_summaries(folder: Path, rank: int, before: int) -> None:
    """Remove the summaries of a process with a serial number below `before`."""
    for entry in _files(folder):
        name = Name.read(entry.name, "summary")
        if name is not None and name.rank == rank and name.serial < before:
            Path(entry.path).unlink(missing_ok=True)


def mend_index(folder: Path, shards: Sequence[Shard], rank: int, world_size: int) -> None:
    """Add missing lines to the index, for this process and, in process 0, for processes of earlier runs."""
    listed = _read_index(folder)
    for shard in shards:
        ours = shard.name.rank == rank or (rank == 0 and shard.name.rank >= world_size)
        if ours and not shard.problem and listed.get(shard.file) != shard:
            add_to_index(folder, shard)


def sweep(folder: Path, shards: Sequence[Shard], rank: int) -> None:
    """Remove temporary folders of processes that have ended, and summaries of this rank that were interrupted."""
    remove_stale(folder)
    valid = summaries(folder, shards).get(rank)
    present = {s.name for s in shards}
    for entry in _files(folder):
        name = Name.read(entry.name, "summary")
        if name is not None and name.rank == rank and name not in present and Path(entry.path) != valid:
            Path(entry.path).unlink(missing_ok=True)


# --- reading ----------------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check the manifest that `found_store` wrote."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise FileNotFoundError(f"no store {folder}: the folder does not exist.")
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a store: it has no {MANIFEST}. explain_dataset creates one.")
    try:
        about = parse_checked(path.read_text(encoding="utf-8"))
        kind, version = about["format"], about["version"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is damaged or not a manifest ({type(error).__name__} {error}). Restore it from a backup: it "
            "is written once and never changed."
        ) from error
    if kind != FORMAT:
        raise ValueError(f"{folder} is not a store: expected format {FORMAT!r}, got {kind!r}. Use another folder.")
    if version != VERSION:
        raise ValueError(
            f"{folder} has version {version} of the format, this smoothhess reads and writes version {VERSION}. Use "
            "the smoothhess that wrote it, or another folder."
        )
    with naming(path, "Restore it from a backup: it is written once and never changed."):
        settings = about["settings"]
        fields = about["job"], about["pack_size"], settings["keep"], settings["n_pairs"], settings["summary"]
        if [type(f) for f in fields] != [str, int, str, int, bool]:
            raise ValueError("job, pack_size, keep, n_pairs or summary has another type")
        if about["pack_size"] < 1 or settings["n_pairs"] < 0 or settings["keep"] not in KEEP:
            raise ValueError(f"expected pack_size ≥ 1, n_pairs ≥ 0, and keep as one of {', '.join(KEEP)}")
    return about


def list_shards(folder: Path) -> Iterator[tuple[Name, int, Shard | None]]:
    """Name and size of each shard file, and the shard as listed in the index."""
    listed = _read_index(folder)
    for entry in _files(folder):
        name = Name.read(entry.name, "shard")
        if name is not None:
            yield name, entry.stat().st_size, listed.get(entry.name)


def summaries(folder: Path, shards: Sequence[Shard]) -> dict[int, Path]:
    """The valid summary of each process: the newest with an existing shard, otherwise the newest."""
    present = {s.name for s in shards}
    found: dict[int, list[tuple[bool, Name, Path]]] = {}
    for entry in _files(folder):
        if (name := Name.read(entry.name, "summary")) is not None:
            found.setdefault(name.rank, []).append((name in present, name, Path(entry.path)))
    return {rank: max(candidates)[2] for rank, candidates in found.items()}


def size_of(folder: Path) -> int:
    """Size of all files in bytes, without those in temporary folders."""
    total = 0
    for entry in _files(folder):
        with suppress(FileNotFoundError):  # another process renamed or removed it meanwhile
            total += os.stat(entry.path).st_size
    return total


def next_serial(folder: Path, rank: int) -> int:
    """A serial number that no file of the process has."""
    names = (Name.read(e.name, "shard") or Name.read(e.name, "summary") for e in _files(folder))
    return 1 + max((n.serial for n in names if n is not None and n.rank == rank), default=-1)


def _read_index(folder: Path) -> dict[str, Shard]:
    found = {}
    for _, about in _index_lines(folder):
        with suppress(TypeError, ValueError, KeyError, OverflowError):  # of another kind: the shard is read instead
            name = Name.read(about["shard"], "shard")
            if name is not None:
                n_bytes = int(about["bytes"])
                found[about["shard"]] = Shard(name, n_bytes, checked_spans(about["records"], n_bytes), about["job"])
    return found


def _index_lines(folder: Path) -> Iterator[tuple[int, Any]]:
    """Rank and contents of each line of each index, without truncated lines."""
    for entry in _files(folder):
        if match := re.fullmatch(r"index-(\d{4,})\.jsonl", entry.name):
            for line in Path(entry.path).read_bytes().splitlines():
                with suppress(ValueError):
                    yield int(match[1]), parse_checked(line)


def _files(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return [e for e in entries if e.is_file()]
