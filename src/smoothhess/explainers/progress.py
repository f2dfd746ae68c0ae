"""`Progress`: a progress bar with an estimate of the time left, and the rule for when it is shown.

All progress bars of the package are made here. How many draws an adaptive run is expected to take is computed in
`adaptive`.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from contextvars import ContextVar
from types import TracebackType
from typing import Self

from tqdm.auto import tqdm

DELAY = 2.0  # seconds after which a bar appears by itself
INTERVAL = 0.5  # seconds between two displays
FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} {unit} [{elapsed}{postfix}]"

_inside: ContextVar[bool] = ContextVar("_inside", default=False)  # whether another bar, shown or not, is open


class Progress:
    """A progress bar for use as a context manager.

    A separate thread displays the bar: it also appears during one long step, and an interruption of the work never
    leaves its lock acquired.

    Args:
        show: True shows the bar at once, False never. None shows it after two seconds, if stderr is a terminal or the
            program runs in a notebook; not inside another bar, in worker processes or in threads.
        total: number of units of the work of each item; None: unknown.
        description: text before the bar.
        unit: name of the units, in the plural.
        initial: units that were done before.
        items: number of items, such as the examples that are explained in turn.

    >>> with Progress(False, total=10) as bar:
    ...     bar.update(4)
    >>> bar.n
    4
    """

    def __init__(
        self,
        show: bool | None,
        total: int | None = None,
        description: str = "SmoothHess",
        unit: str = "draws",
        initial: int = 0,
        items: int = 1,
    ) -> None:
        self.n = self._initial = initial
        self._items, self._total = items, None if total is None else total * items
        self._about, self._show = (description, unit), show
        self._began = time.monotonic()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        if self._show or (self._show is None and not _inside.get() and _is_watched()):
            self._thread = threading.Thread(target=self._display, daemon=True)
            self._thread.start()
        self._token = _inside.set(True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _inside.reset(self._token)
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def update(self, units: int = 1) -> None:
        """Count further units; fewer if they are negative."""
        self.n += units

    def expect(self, total: float | None) -> None:
        """Set the mean total of an item; calls before the first unit also start the clock that is extrapolated."""
        if self.n == self._initial:
            self._began = time.monotonic()
        self._total = None if total is None else round(total * self._items)

    def time_left(self) -> float | None:
        """Seconds until the total at the mean rate so far, which includes all other work; None if it is unknown."""
        done = self.n - self._initial
        if self._total is None or done <= 0 or self._total <= self.n:
            return None
        return (time.monotonic() - self._began) / done * (self._total - self.n)

    def _display(self) -> None:
        if not self._show and self._end.wait(DELAY):
            return
        description, unit = self._about
        with tqdm(total=self._total, desc=description, unit=unit, leave=False, bar_format=FORMAT) as bar:
            bar.start_t -= 0.0 if self._show else DELAY
            while not self._end.wait(INTERVAL):
                left = self.time_left()
                bar.n, bar.total = self.n, self._total
                bar.set_postfix_str("" if left is None else duration(left), refresh=False)
                bar.refresh()


def duration(seconds: float) -> str:
    """An estimate of the time left, in words.

    >>> duration(0.2), duration(39.7), duration(400), duration(3600 * 5)
    ('about 1 s left', 'about 40 s left', 'about 7 min left', 'about 5 h left')
    """
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"about {seconds / size:.0f} {unit} left"
    return f"about {max(1, round(seconds))} s left"


def _is_watched() -> bool:
    """Whether this is the main thread of a program whose stderr is a terminal or the output of a notebook."""
    if threading.current_thread() is not threading.main_thread() or multiprocessing.parent_process() is not None:
        return False
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return "IPKernelApp" in getattr(shell, "config", ()) or (sys.stderr is not None and sys.stderr.isatty())
