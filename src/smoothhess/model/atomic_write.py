"""Write files atomically: in a temporary folder beside them, then renamed, so that no partial file is left.

Every file of this package is written through `atomic_write`; what the files contain is decided by the callers.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from smoothhess.model.running_process import RunningProcess

_TEMPORARY = re.compile(r"\..+\.(\d+)-(\d+)-([0-9a-f]{8})\.tmp")  # process id, start time, hash of the host


@contextmanager
def atomic_write(path: Path | str, *, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary path; rename it to `path` when the block ends, or remove it when the block raises.

    Args:
        path: The file to write. Its folder must exist.
        durable: Whether file and folder are synced to disk, so that the file survives a power failure.

    Raises:
        ValueError: If the folder does not exist.

    >>> folder = Path(tempfile.mkdtemp())
    >>> with atomic_write(folder / "a.txt") as temporary:
    ...     _ = temporary.write_text("complete")
    >>> [p.name for p in folder.iterdir()], (folder / "a.txt").read_text()
    (['a.txt'], 'complete')
    """
    path = Path(path)
    with temporary_path(path) as temporary:
        yield temporary
        temporary.chmod(0o666 & ~_umask())  # some writers create files that only the owner can read
        if durable:
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    if durable:
        sync_folder(path.parent)


@contextmanager
def temporary_path(path: Path) -> Iterator[Path]:
    """Yield a path in a temporary folder beside `path`, whose name contains the identity of this process.

    It is a folder because some writers, such as safetensors, create further temporary files beside their file.

    Raises:
        ValueError: If the folder of `path` does not exist.
    """
    if not path.parent.is_dir():
        raise ValueError(f"the folder {path.parent} does not exist. Create it first.")
    process = RunningProcess.current()
    identity = f"{process.pid}-{process.started}-{_host_hash(process.host)}"
    folder = tempfile.mkdtemp(prefix=f".{path.name}.", suffix=f".{identity}.tmp", dir=path.parent)
    try:
        yield Path(folder, path.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_stale(folder: Path) -> None:
    """Remove temporary folders of processes of this machine that have ended without removing them."""
    here = RunningProcess.current().host
    for path in folder.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match and match[3] == _host_hash(here) and not RunningProcess(here, int(match[1]), int(match[2])).may_run:
            shutil.rmtree(path, ignore_errors=True)


def _host_hash(host: str) -> str:
    return hashlib.blake2b(host.encode(), digest_size=4).hexdigest()


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that a rename in it is durable."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # not all systems can open folders
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
