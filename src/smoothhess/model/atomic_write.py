"""Write files atomically: under a temporary name in the same folder, then renamed, so that no partial file is left.

Every file of this package is written through `atomic_write`; what the files contain is decided by the callers.
"""

from __future__ import annotations

import hashlib
import os
import re
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
    if not path.parent.is_dir():
        raise ValueError(f"the folder {path.parent} does not exist. Create it first.")
    temporary = new_temporary(path)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())  # mkstemp's files are readable by the owner only
        if durable:
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def new_temporary(path: Path) -> Path:
    """Create an empty file in the folder of `path` whose name contains the identity of this process."""
    process = RunningProcess.current()
    identity = f"{process.pid}-{process.started}-{_host_hash(process.host)}"
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=f".{identity}.tmp", dir=path.parent)
    os.close(handle)
    return Path(name)


def is_temporary(name: str) -> bool:
    """Whether a file name is that of a temporary file.

    >>> is_temporary(".a.txt.x1y2.77-1234-0a1b2c3d.tmp"), is_temporary("a.txt")
    (True, False)
    """
    return _TEMPORARY.fullmatch(name) is not None


def remove_stale(folder: Path) -> None:
    """Remove temporary files of processes of this machine that have ended without removing them."""
    here = RunningProcess.current().host
    for path in folder.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match and match[3] == _host_hash(here) and not RunningProcess(here, int(match[1]), int(match[2])).may_run:
            path.unlink(missing_ok=True)


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
