"""Locks of a store: one writer for each rank, and one process at a time that creates or replaces the manifest.

Locks are held by the operating system and end with their process; files hold the process id, host and start time. They
work between threads and between processes of one machine, and over NFS if the server provides locks.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

from smoothhess.model.running_process import RunningProcess

POLL_SECONDS = 0.05

# Locks that threads of this process hold. Those of the operating system exclude only other processes, and end as soon
# as this process closes the file a second time.
_HELD: dict[Path, IO[str]] = {}
_GUARD = threading.Lock()


@contextmanager
def only_writer(folder: Path, rank: int) -> Iterator[None]:
    """Raise ValueError if another thread or process writes with the same rank."""
    path = folder.resolve() / f".lock-{rank:04d}"
    if not _take(path):
        raise ValueError(
            f"another process is writing to {folder} as rank {rank}: {_holder(path) or 'unknown'}. Records would be "
            "computed twice. Wait for it, or pass rank and world_size, with a different rank in each process."
        )
    try:
        yield
    finally:
        _release(path)


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait until no other thread or process is in this block."""
    path = folder.resolve() / ".lock-manifest"
    while not _take(path):
        time.sleep(POLL_SECONDS)
    try:
        yield
    finally:
        _release(path)


def other_writers(folder: Path, rank: int) -> list[int]:
    """The ranks, without `rank`, with which another thread or process writes now."""
    found = []
    for path in sorted(folder.resolve().glob(".lock-*")):
        match = re.fullmatch(r"\.lock-(\d+)", path.name)
        if match and int(match[1]) != rank:
            if _take(path):
                _release(path)
            else:
                found.append(int(match[1]))
    return found


def _take(path: Path) -> bool:
    with _GUARD:
        if path in _HELD:
            return False
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115  # closed by _release
        if not _lock(file, path):
            file.close()
            return False
        file.truncate(0)
        json.dump(asdict(RunningProcess.current()) | {"since": time.time()}, file)
        file.flush()
        _HELD[path] = file
        return True


def _release(path: Path) -> None:
    with _GUARD:
        file = _HELD.pop(path)
        with suppress(OSError):  # the folder may have been removed
            file.truncate(0)
        file.close()


def _lock(file: IO[str], path: Path) -> bool:
    """Lock the file; where the system has no locks, check that the process named in it has ended."""
    try:
        import fcntl

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except (ImportError, OSError):
        holder = _holder(path)
        return holder is None or not holder.may_run
    return True


def _holder(path: Path) -> RunningProcess | None:
    if path in _HELD:
        return RunningProcess.current()
    with suppress(OSError, ValueError, TypeError, KeyError):
        about = json.loads(path.read_text(encoding="utf-8"))
        return RunningProcess(about["host"], int(about["pid"]), int(about["started"]))
    return None
