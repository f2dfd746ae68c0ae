"""Kill, starve and contradict writers of stores and of `explain --out`: `python -m tests.chaos --seed 0`, `make chaos`.

Each attempt must end in records that are bitwise equal to those of an undisturbed run after the same call is repeated,
or in an error that names the cause. Files of the user stay as they are, and no temporary file is left.
"""

import argparse
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import torch

from smoothhess import Interactions, SmoothHess
from smoothhess.datasets import Store, explain_dataset
from tests.chaos import workers
from tests.datasets import job
from tests.datasets.test_explain_dataset import check_whole, same
from tests.datasets.test_other_processes import Child, second

OUTCOMES = ("resumed, equal", "refused", "violation")
OF_A_STORE = re.compile(
    r"store\.json|(shard|summary)-\d{4}-\d{6}-[0-9a-f]{8}\.safetensors|index-\d{4}\.jsonl|\.lock-(\d{4}|manifest)"
)
NOTE = "of the user"
SIZES = (0, 1, 64, 500, 1000, 2000, 3000, 4000, 5000, 6000)  # bytes at which a file is cut off
CONTEXT = multiprocessing.get_context("forkserver")
Outcome = tuple[str, str]  # one of OUTCOMES, and what was wrong


def killed(process, seconds: float) -> bool:
    """Kill −9 after a time; whether the process was still running."""
    process.join(seconds)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def checked(call) -> Outcome:
    """Turn a failed check into a violation."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call()
    except Exception as error:
        return "violation", f"{type(error).__name__}: {str(error)[:300]}"


def resumed(folder: Path, whole: Store, in_order: bool = True, **options) -> Outcome:
    """Check what an interrupted job left, resume it, and compare with the undisturbed store."""

    def check() -> Outcome:
        check_whole(folder)
        note = folder / "notes.txt"
        if (folder / "store.json").exists():
            note.write_text(NOTE)
        same(job.run(folder, **options), whole, in_order=in_order)
        stray = [path.name for path in folder.iterdir() if not OF_A_STORE.fullmatch(path.name) and path != note]
        if stray or (note.exists() and note.read_text() != NOTE):
            return "violation", f"stray or changed files: {stray}"
        return "resumed, equal", ""

    return checked(check)


def refused(said: str, words: str) -> Outcome:
    """An error must name the cause."""
    return ("refused", "") if re.search(words, said) else ("violation", f"expected {words!r}, got {said!r}")


# --- stores -----------------------------------------------------------------------------------------------------------


def kills_at_random_moments(home: Path, whole: Store, rng: random.Random) -> Iterator[Outcome]:
    """50 kills; a copy of what each of them left is resumed, and the job itself goes on to be killed again."""
    kills, folder, rounds, patience = 0, home / "0", 0, 0.3
    while kills < 50:
        started, ended = CONTEXT.Event(), CONTEXT.Event()
        process = CONTEXT.Process(target=job.run_and_tell, args=(folder, started, ended))
        process.start()
        started.wait(60)
        before = len(list(folder.glob("shard*")))
        died = killed(process, rng.uniform(0, patience))
        if ended.is_set() or not died:
            rounds += 1
            folder, patience = home / str(rounds), patience / 1.3
            continue
        kills += 1
        patience *= 1.3 if len(list(folder.glob("shard*"))) == before else 1
        copy = home / f"copy {kills}"
        shutil.copytree(folder, copy) if folder.exists() else copy.mkdir()
        yield resumed(copy, whole)


def kills_before_every_step(home: Path, whole: Store, rng: random.Random) -> Iterator[Outcome]:
    """A kill right before each write, sync, rename, link and removal, one after another."""
    first = job.run(home / "first", n=6)
    for step in range(200):
        folder, ended = home / str(step), CONTEXT.Event()
        process = CONTEXT.Process(target=job.run_until, args=(folder, step, ended))
        process.start()
        process.join()
        if ended.is_set():
            return
        folder.mkdir(exist_ok=True)
        yield resumed(folder, first, n=6)


def kills_inside_a_write(home: Path, whole: Store, rng: random.Random) -> Iterator[Outcome]:
    """The kernel kills the process at a given byte of a file."""
    for size in SIZES:
        yield from _limited(home, whole, size, fatal=True)


def files_that_cannot_grow(home: Path, whole: Store, rng: random.Random) -> Iterator[Outcome]:
    """A write fails at a given byte of a file."""
    for size in SIZES:
        yield from _limited(home, whole, size, fatal=False)


def _limited(home: Path, whole: Store, size: int, fatal: bool) -> Iterator[Outcome]:
    folder, told = home / str(size), CONTEXT.Queue()
    process = CONTEXT.Process(target=workers.limited, args=(folder, size, fatal, told))
    process.start()
    process.join()
    if not fatal and (said := told.get(timeout=10)):
        yield refused(said, r"File too large|[Tt]runcated|disk is full")
    folder.mkdir(exist_ok=True)
    yield resumed(folder, whole)


def disks_that_fill_up(home: Path, whole: Store, rng: random.Random) -> Iterator[Outcome]:
    """A tmpfs of 1 MiB that another program fills while the job runs."""
    (home / "disk").mkdir()
    command = ["unshare", "-m", sys.executable, "-W", "ignore", "-m", "tests.chaos.workers", str(home)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    except FileNotFoundError:
        return
    if "unshare failed" in done.stderr or "mount:" in done.stderr:
        print("disks that fill up: not run, as this system does not allow to mount a tmpfs")
        return
    if done.returncode:
        yield "violation", done.stderr[-500:]
    for line in done.stdout.splitlines():
        yield tuple(json.loads(line))


def full_disk_outcomes(disk: Path, whole: Path) -> Iterator[str]:
    """Lines for `disks_that_fill_up`, from the process that has mounted the disk."""
    for after in (1, 3, 8, 14):
        for leave in (0, 4096, 8192, 12288):
            folder = disk / f"{after}-{leave}"
            said = workers.fill_disk(folder, leave, after)
            if said:
                yield json.dumps(refused(said, "the disk is full|No space left on device|on the disk"))
            yield json.dumps(resumed(folder, Store(whole)))
            shutil.rmtree(folder)


def killed_ranks(home: Path, whole: Store, rng: random.Random) -> Iterator[Outcome]:
    """One of two processes is killed; the other ends its share, and the killed one is started again."""
    kills, tries = 0, 0
    while kills < 10:
        tries += 1
        folder, victim = home / str(tries), kills % 2
        ready, told = [CONTEXT.Event() for _ in range(2)], CONTEXT.Queue()
        both = [CONTEXT.Process(target=workers.share, args=(folder, rank, ready[rank], told)) for rank in (0, 1)]
        for process in both:
            process.start()
        ready[victim].wait(60)
        died = killed(both[victim], rng.uniform(0.02, 0.4))
        both[1 - victim].join()
        if not died:
            continue
        kills += 1
        told.get(timeout=60)
        yield checked(lambda folder=folder: _ranks_resumed(folder, whole))


def _ranks_resumed(folder: Path, whole: Store) -> Outcome:
    job.run(folder, rank=0, world_size=2)
    return resumed(folder, whole, in_order=False, rank=1, world_size=2)


def ranks_with_other_settings(home: Path, whole: Store, rng: random.Random) -> Iterator[Outcome]:
    """A process with other weights or settings is refused before it writes; the right one ends the job."""
    cases = [
        ({"shift": 0.1}, "model = 'Sequential"),
        ({"sigma": 0.7}, "sigma = 0.5, not 0.7"),
        ({"sigma": None, "radius": 0.5}, "radius"),
        ({"seed": 7}, "seed = 0, not 7"),
        ({"n_calls": 16}, "n_calls = 8, not 16"),
        ({"pack_size": 3}, "pack_size = 2, not 3"),
        ({"keep": "pairs"}, "keep = 'hessian', not 'pairs'"),
        ({"target": 1}, "target = "),
    ]
    for number, (given, words) in enumerate(cases):
        folder = home / str(number)
        first = Child(CONTEXT, folder)
        yield refused(workers.error_of(lambda folder=folder, given=given: second(folder, **given)), re.escape(words))
        if said := first.finish():
            yield "violation", said
        yield resumed(folder, whole, in_order=False, rank=1, world_size=2)


def ranks_with_other_data(home: Path, whole: Store, rng: random.Random) -> Iterator[Outcome]:
    """Shorter loaders and other values, in a record that the process explains, or only reads."""
    changed = [job.data(), job.data()]
    changed[0][2] += 0.1
    changed[1][0] += 0.1
    cases = [
        (job.data(7), "rank 1 has read 7 records"),
        (job.data(10), "rank 1 has read 10 records"),
        (changed[0], "record 2 is not the one"),
        (changed[1], "rank 1 has read other records"),
        (job.data().flip(0), "is not the one"),
    ]
    for number, (x, words) in enumerate(cases):
        first = Child(CONTEXT, home / str(number))
        said = workers.error_of(lambda x=x, number=number: second(home / str(number), x))
        yield refused(said + first.finish(), words)


def two_processes(home: Path, whole: Store, rng: random.Random) -> Iterator[Outcome]:
    """Two processes with the same rank that start at the same moment."""
    for number in range(5):
        folder, barrier, told = home / str(number), CONTEXT.Barrier(2), CONTEXT.Queue()
        both = [CONTEXT.Process(target=workers.write, args=(folder, barrier, told)) for _ in range(2)]
        for process in both:
            process.start()
        yield from _of_two([told.get(timeout=60) for _ in both])
        for process in both:
            process.join()
        yield resumed(folder, whole)


def two_threads(home: Path, whole: Store, rng: random.Random) -> Iterator[Outcome]:
    """Two threads of this process with the same rank."""
    explainer = SmoothHess(job.network().double())
    for number in range(5):
        folder, said = home / str(number), []

        def write(folder=folder, said=said):
            said.append(workers.error_of(lambda: explain_dataset(explainer, job.data(), folder, **job.ASKED)))

        both = [threading.Thread(target=write) for _ in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        yield from _of_two(said)
        yield resumed(folder, whole)


def _of_two(said: list[str]) -> Iterator[Outcome]:
    """At most one of two writers may be refused."""
    errors = [text for text in said if text]
    for text in errors:
        yield refused(text, "another process is writing to .* as rank 0: process")
    if len(errors) > 1:
        yield "violation", "both writers were refused"


# --- explain --out ----------------------------------------------------------------------------------------------------


class Explain:
    """Runs of `smoothhess explain` in processes of their own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        workers.write_inputs(home)
        code, said = self.run(home / "whole")
        assert code == 0, said
        self.whole = self.content(home / "whole")

    def start(self, out: Path, step: int | None = None, n_bytes: int | None = None):
        started, told = CONTEXT.Event(), CONTEXT.Queue()
        process = CONTEXT.Process(target=workers.explain, args=(self.home, out, step, n_bytes, started, told))
        process.start()
        started.wait(60)
        return process, told

    def run(self, out: Path, **limits) -> tuple[int, str]:
        process, told = self.start(out, **limits)
        process.join()
        return told.get(timeout=10) if process.exitcode == 0 else (-9, "")

    def content(self, out: Path) -> dict[str, object]:
        """The files without the hashes of result files, whose bytes are compared as tensors."""
        read = lambda path: (
            Interactions.load(path).hessian.tolist() if path.suffix == ".safetensors" else path.read_text()
        )
        return {path.name: read(path) for path in sorted(out.iterdir()) if path.name != "explain.json"}

    def resumed(self, out: Path) -> Outcome:
        def check() -> Outcome:
            (out / "notes.txt").write_text(NOTE)
            code, said = self.run(out)
            if code:
                return "violation", said
            found = {n: c for n, c in self.content(out).items() if n != "notes.txt"}
            if found != self.whole or (out / "notes.txt").read_text() != NOTE:
                return "violation", f"other files: {sorted(found.keys() ^ self.whole.keys())}"
            return "resumed, equal", ""

        out.mkdir(exist_ok=True)
        return checked(check)


def explain_killed_before_steps(home: Path, whole: Store, rng: random.Random) -> Iterator[Outcome]:
    """A kill right before every fourth change of the file system; the seed decides which."""
    explain = Explain(home)
    for step in range(rng.randrange(4), 400, 4):
        out = home / str(step)
        if explain.run(out, step=step)[0] != -9:
            return
        yield explain.resumed(out)


def explain_killed_at_random_moments(home: Path, whole: Store, rng: random.Random) -> Iterator[Outcome]:
    explain, patience = Explain(home), 0.5
    for number in range(12):
        out = home / str(number)
        process, _ = explain.start(out)
        patience *= 1.1 if killed(process, rng.uniform(0, patience)) else 0.7
        yield explain.resumed(out)


def explain_with_files_that_cannot_grow(home: Path, whole: Store, rng: random.Random) -> Iterator[Outcome]:
    explain = Explain(home)
    for size in (0, 20, 500, 2000, 5000):
        out = home / str(size)
        code, said = explain.run(out, n_bytes=size)
        if code:
            yield refused(said, r"File too large|cannot write")
        yield explain.resumed(out)


SCENARIOS = (
    kills_at_random_moments,
    kills_before_every_step,
    kills_inside_a_write,
    files_that_cannot_grow,
    disks_that_fill_up,
    killed_ranks,
    ranks_with_other_settings,
    ranks_with_other_data,
    two_processes,
    two_threads,
    explain_killed_before_steps,
    explain_killed_at_random_moments,
    explain_with_files_that_cannot_grow,
)


def _start_quiet_server() -> None:
    """Start the process that forks the workers without its stderr, where refused workers print their errors."""
    shown, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        forkserver.ensure_running()
    finally:
        os.dup2(shown, 2)
        os.close(shown)
        os.close(null)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[scenario.__name__ for scenario in SCENARIOS])
    given = parser.parse_args()
    torch.set_num_threads(1)
    CONTEXT.set_forkserver_preload(["tests.datasets.job", "tests.chaos.workers"])
    warnings.simplefilter("ignore")
    _start_quiet_server()
    began = time.monotonic()
    width = max(len(scenario.__name__) for scenario in SCENARIOS)
    print(f"{'scenario':<{width}}" + "".join(f"  {o:>14}" for o in OUTCOMES) + "  seconds")
    total: Counter = Counter()
    with tempfile.TemporaryDirectory(prefix="chaos-") as home:
        whole = job.run(Path(home) / "whole")
        for scenario in SCENARIOS:
            if given.only not in (None, scenario.__name__):
                continue
            place, start, counts, failed = Path(home) / scenario.__name__, time.monotonic(), Counter(), []
            place.mkdir()
            for found, words in scenario(place, whole, random.Random(f"{given.seed} {scenario.__name__}")):
                counts[found] += 1
                if words:
                    failed.append(words)
            total += counts
            row = "".join(f"  {counts[o]:>14}" for o in OUTCOMES)
            print(f"{scenario.__name__.replace('_', ' '):<{width}}{row}  {time.monotonic() - start:7.0f}", flush=True)
            for words in failed:
                print(f"    violation: {words}", flush=True)
    row = "".join(f"  {total[o]:>14}" for o in OUTCOMES)
    print(f"{'all':<{width}}{row}  {time.monotonic() - began:7.0f}")
    return 1 if total["violation"] else 0
