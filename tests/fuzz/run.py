"""Damage valid files at random and load them: `python -m tests.fuzz --seconds 270 --seed 0`, or `make fuzz`.

Each outcome is a clear error (ValueError or FileNotFoundError that names the file), the same values, or other values
where the format has no checksum. Everything else is a violation, printed with the command that repeats it: another
exception, other values in spite of a checksum, more than 10 s, more than 1 GiB of memory, or code that was run.
"""

import argparse
import contextlib
import faulthandler
import multiprocessing
import resource
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from tests.fuzz.loaders import Loader, equal, loaders

HANG_SECONDS = 10
MOST_MEMORY = 1 << 30  # bytes beyond those that the process had before
OUTCOMES = ("clear error", "equal", "other values", "violation")


class HangError(BaseException):
    """Loading took more than HANG_SECONDS."""


def _interrupt(*_):
    raise HangError


def outcome(loader: Loader, expected, kind: str, seed: str, folder: Path, canary: Path) -> tuple[str, str]:
    """Damage a file, load it, and classify what happened; a violation has a description."""
    path = loader.place(folder, kind, seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
    faulthandler.dump_traceback_later(6 * HANG_SECONDS, exit=True)  # where the interrupt is not noticed
    try:
        found, words = _load(loader, path, expected)
    except HangError:
        found, words = "violation", f"more than {HANG_SECONDS} s"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
    if canary.exists():
        canary.rmdir()
        return "violation", "code in the file was run"
    if (grown := 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)) > MOST_MEMORY:
        return "violation", f"{grown >> 20} MiB of memory"
    return found, words


def _load(loader: Loader, path: Path, expected) -> tuple[str, str]:
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(None):
            warnings.simplefilter("ignore")
            values = loader.read(path)
    except (ValueError, FileNotFoundError) as error:
        if path.name in str(error) or path.parent.name in str(error):
            return "clear error", ""
        return "violation", f"an error that does not name the file: {type(error).__name__}: {error}"
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return "violation", f"{type(error).__name__}: {str(error)[:200]} ({place.filename}:{place.lineno})"
    if expected is not None and equal(values, expected):
        return "equal", ""
    return ("violation", "other values in spite of a checksum") if loader.checked else ("other values", "")


def work(seed: int, seconds: float, first: int, step: int, home: str) -> tuple[Counter, list[str]]:
    """Mutations first, first + step, … of every kind; loaders get equal shares of the time."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _interrupt)
    canary, current = Path(home) / f"canary-{first}", Path(home) / f"current-{first}"
    every = loaders(canary)
    spent, done = dict.fromkeys(range(len(every)), 0.0), Counter()
    counts: Counter = Counter()
    violations = []
    expected = [_expected(loader) for loader in every]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        at = min(spent, key=spent.__getitem__)
        loader, kinds = every[at], [*every[at].kinds]
        began = time.monotonic()
        turn, kind = divmod(done[at], len(kinds))
        kind, number = kinds[kind], first + step * turn
        current.write_text(repeat(seed, loader, kind, number))
        with fresh_folder() as folder:
            found, words = outcome(loader, expected[at], kind, f"{seed} {number}", folder, canary)
        counts[loader.name, kind, found] += 1
        if words:
            violations.append(f"{words}\n    {repeat(seed, loader, kind, number)}")
        done[at] += 1
        spent[at] += time.monotonic() - began
    return counts, violations


def _expected(loader: Loader):
    """The values of the valid file; None where every file is refused."""
    with fresh_folder() as folder:
        try:
            return loader.read(loader.place(folder))
        except ValueError:
            return None


@contextlib.contextmanager
def fresh_folder():
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def repeat(seed: int, loader: Loader, kind: str, number: int) -> str:
    return f"python -m tests.fuzz --seed {seed} --repeat '{loader.name}' '{kind}' {number}"


def repeated(seed: int, name: str, kind: str, number: str) -> None:
    """One mutation without classification, with its traceback."""
    with fresh_folder() as home:
        (loader,) = (loader for loader in loaders(home / "canary") if loader.name == name)
        with fresh_folder() as folder:
            print(equal(loader.read(loader.place(folder, kind, f"{seed} {number}")), _expected(loader)))


def table(rows: Counter, title: str) -> str:
    """One row for each first part of the keys, and the sums."""
    names = list(dict.fromkeys(name for name, _ in rows))
    width = max(map(len, [*names, title]))
    lines = [f"{title:<{width}}  {'files':>7}" + "".join(f"  {o:>12}" for o in OUTCOMES)]
    for name in [*names, "all"]:
        found = [sum(n for (a, o), n in rows.items() if o == outcome and name in (a, "all")) for outcome in OUTCOMES]
        lines.append(f"{name:<{width}}  {sum(found):>7}" + "".join(f"  {n:>12}" for n in found))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=270)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeat", nargs=3, metavar=("LOADER", "KIND", "NUMBER"))
    given = parser.parse_args()
    if given.repeat:
        repeated(given.seed, *given.repeat)
        return 0
    counts: Counter = Counter()
    violations: list[str] = []
    with (
        tempfile.TemporaryDirectory() as home,
        ProcessPoolExecutor(given.workers, multiprocessing.get_context("spawn")) as pool,
    ):
        jobs = [
            pool.submit(work, given.seed, given.seconds, first, given.workers, home) for first in range(given.workers)
        ]
        for worker, result in enumerate(jobs):
            try:
                found, words = result.result()
            except Exception as error:
                current = Path(home) / f"current-{worker}"
                violations.append(
                    f"a process ended with {error!r}\n    {current.read_text() if current.exists() else ''}"
                )
            else:
                counts += found
                violations += words
    by_loader, by_kind = Counter(), Counter()
    for (name, kind, found), n in counts.items():
        by_loader[name, found] += n
        by_kind[kind, found] += n
    print(table(by_loader, "loader"), end="\n\n")
    print(table(by_kind, "kind of damage"), end="\n\n")
    for text in violations[:40]:
        print(f"violation: {text}")
    print(
        f"{sum(counts.values())} damaged files in {given.seconds:g} s, seed {given.seed}: {len(violations)} violations"
    )
    return 1 if violations else 0
