"""Handles Ctrl-C while the command line is still importing its packages, which takes seconds.

`main` imports this module first. It does nothing unless the process is the command line, and imports only the standard
library.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INTERRUPTED = 130  # exit code; the convention of shells for Ctrl-C
NAME = "smoothhess"


def is_command_line() -> bool:
    """Whether this process is `smoothhess …` or `python -m smoothhess …`."""
    script = sys.argv[0] if sys.argv else ""
    if script == "-m":  # Python is looking for the module
        return " ".join(sys.orig_argv[1:]).partition("-m")[2].split()[:1] == [NAME]
    return os.path.splitext(os.path.basename(script))[0] == NAME


def exit_on_interrupt() -> None:
    """Until `raise_on_interrupt`, let Ctrl-C end the process with one line, and without a traceback."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, if `exit_on_interrupt` was called."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def exit_during_imports() -> Iterator[None]:
    """Let Ctrl-C end the process of the command line while torch is imported, which does not expect exceptions."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler and is_command_line():
        exit_on_interrupt()
    try:
        yield
    finally:
        raise_on_interrupt()


def _exit(*_: Any) -> None:
    os.write(2, f"{NAME}: interrupted\n".encode())
    os._exit(INTERRUPTED)


if is_command_line() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    exit_on_interrupt()
