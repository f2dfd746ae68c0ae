"""The identity of a process, written into lock files and names of temporary files, and whether it is running."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunningProcess:
    """A process of some machine; the start time distinguishes it from a later process with the same id."""

    host: str
    pid: int
    started: int  # in clock ticks since boot; 0 where the system does not provide it

    @staticmethod
    def current() -> RunningProcess:
        """This process.

        >>> RunningProcess.current().may_run
        True
        """
        return RunningProcess(socket.gethostname(), os.getpid(), _started(os.getpid()))

    @property
    def may_run(self) -> bool:
        """Whether it is running; True for a process of another machine, about which nothing is known."""
        if self.host != socket.gethostname():
            return True
        if Path("/proc/self/stat").exists():
            return self.started != 0 and _started(self.pid) == self.started
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:  # it belongs to another user
            pass
        return True

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _started(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
