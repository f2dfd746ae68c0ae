"""What runs in processes that are killed, limited or out of disk space."""

import contextlib
import io
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from smoothhess import SmoothHess
from smoothhess.cli.explain import model_hash, output_files
from smoothhess.cli.main import main
from smoothhess.datasets import explain_dataset
from tests.cli.explain.conftest import MODULE, OwnModules
from tests.datasets import job

TABLE = "explain --model mine.py:table --input data.csv --rows 0:2 --sigma 0.25 --calls 40 --out".split()
DISK = 1 << 20  # bytes of the small disk


def limited(folder, n_bytes: int, fatal: bool, told) -> None:
    """The job with files of at most `n_bytes` bytes: the write that exceeds them fails, or kills the process."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if fatal else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))
    told.put(error_of(lambda: job.run(folder)))


def share(folder, rank: int, started, told) -> None:
    """The job of one of two processes."""
    torch.set_num_threads(1)
    started.set()
    told.put(error_of(lambda: job.run(folder, rank=rank, world_size=2)))


def write(folder, barrier, told) -> None:
    """The job, together with others of the same rank."""
    torch.set_num_threads(1)
    barrier.wait(60)
    told.put(error_of(lambda: job.run(folder)))


def error_of(call) -> str:
    """The error of a call as text; empty where there is none."""
    try:
        call()
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def explain(home, out, step: int | None, n_bytes: int | None, started, told) -> None:
    """`smoothhess explain` for two rows, killed −9 before the given change of the file system, if there are so many.

    Figures and pages are replaced by short texts, as they take most of the time.
    """
    torch.set_num_threads(1)
    os.chdir(home)
    model_hash.sys = SimpleNamespace(modules=OwnModules())  # without the files of installed packages
    output_files.draw = lambda question, result, place: (place / f"{question.example.name}-pairs.png").write_text("png")
    output_files.write_page = lambda question, result, model, path, remarks: path.write_text("a page")
    if step is not None:
        counted = job.killed_before(step)
        for name in ("replace", "unlink", "mkdir", "rename", "rmdir"):
            setattr(os, name, counted(getattr(os, name)))
    if n_bytes is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        started.set()
        code = main([*TABLE, str(out)])
    told.put((code, said.getvalue()))


def write_inputs(home: Path) -> None:
    """The model and the table of `explain`."""
    (home / "mine.py").write_text(MODULE)
    rows = job.data(8, 4).tolist()
    lines = ["age,dose,height,time", *(",".join(map(repr, row)) for row in rows)]
    (home / "data.csv").write_text("\n".join(lines) + "\n")


def fill_disk(folder: Path, leave: int, after: int) -> str:
    """The job on a disk that another program fills up to `leave` bytes at the given call; returns the error."""
    net, calls = job.network().double(), [0]
    filler = folder.parent / "filler"

    def fill(*_):
        calls[0] += 1
        if calls[0] == after:
            free = os.statvfs(folder.parent)
            filler.write_bytes(bytes(max(0, free.f_bavail * free.f_frsize - leave)))

    net.register_forward_pre_hook(fill)
    said = error_of(lambda: explain_dataset(SmoothHess(net), job.data(), folder, **job.ASKED))
    filler.unlink(missing_ok=True)
    return said


def on_small_disk(home: Path) -> None:
    """In a namespace of its own: mount a small disk, let it fill up at several moments, and resume each job."""
    disk, whole = home / "disk", home / "whole"
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", disk], check=True)
    job.run(whole)
    from tests.chaos.run import full_disk_outcomes

    for line in full_disk_outcomes(disk, whole):
        print(line)


if __name__ == "__main__":
    on_small_disk(Path(sys.argv[1]))
