"""Locks an output folder against a second run, with a file that names the process and its start time.

The operating system holds the lock and releases it when the process ends, so that a file left by a killed run, also by
one with the same process id, does not block later runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO

LOCK = ".smoothhess.lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; the file is removed at the end.

    Raises:
        ValueError: If another run holds the lock, with its process id and start time.
    """
    path = folder / LOCK
    while True:
        file = path.open("a+", encoding="utf-8")
        if not _acquired(file):
            with file:
                file.seek(0)
                holder = " ".join(file.read(200).split()) or "unknown"
            raise ValueError(
                f"{folder} is used by another run of smoothhess ({holder}). Wait for it, or pass another --out."
            )
        with suppress(OSError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                break
        file.close()  # the run before has just removed this file
    with file:
        file.truncate(0)
        file.write(f"process {os.getpid()}, started {datetime.now().astimezone():%Y-%m-%d %H:%M:%S}\n")
        file.flush()
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()


def _acquired(file: IO[str]) -> bool:
    """Whether the lock was free; systems and file systems without such locks count as free."""
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
