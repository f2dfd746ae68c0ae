"""Options of a run of `python -m paper`, and the machine on which it ran."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Options", "machine"]

SETTINGS = ("OMP_NUM_THREADS",)  # of the environment, shown with the command


@dataclass(frozen=True)
class Options:
    """The options of the command line, shared by all experiments.

    >>> options = Options(Path("results"), quick=True)
    >>> options.folder("nested").as_posix()
    'results/nested-quick'
    >>> print(options.command("nested"))
    python -m paper nested --out DIR --device cpu --quick --seed 0
    """

    out: Path
    data: Path | None = None  # None: SMOOTHHESS_DATA
    device: str = "cpu"
    quick: bool = False
    points: int | None = None  # None: as many as in the paper
    seed: int = 0
    dataset: str | None = None  # None: all of them
    function: str | None = None  # "logit" or "neuron"; None: both
    cache: Path | None = None
    steps: int | None = None  # of a training; None: those of the paper
    refined: bool = False  # two-dimensional networks: two stages of training instead of the paper's
    show_progress: bool = False

    def __post_init__(self) -> None:
        if self.points is not None and self.points < 1:
            raise ValueError(f"--points must be 1 or more, got {self.points}.")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"--steps must be 1 or more, got {self.steps}.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed must be between 0 and 2³² − 1, got {self.seed}.")
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"expected a folder to write into, but {self.out} is a file. Pass another --out.")
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:  # a torch without CUDA asserts
            raise ValueError(f"--device {self.device} cannot be used here: {str(error).splitlines()[0]}") from error

    def folder(self, name: str) -> Path:
        """Folder of the cells, tables and figures of the experiment `name`; separate for quick and refined runs."""
        return self.out / (name + "-refined" * self.refined + "-quick" * self.quick)

    @property
    def weights(self) -> Path:
        """Folder of trained weights, which are reused by later runs: `cache`, or out/weights."""
        return self.out / "weights" if self.cache is None else self.cache

    def command(self, name: str) -> str:
        """The command that reproduces this experiment, with DIR in the place of folders."""
        words = ["python -m paper", name]
        words += ["--data DIR"] * (self.data is not None)
        words += ["--out DIR", f"--device {self.device}"]
        words += ["--quick"] * self.quick
        words += ["--refined"] * self.refined
        words += [f"--points {self.points}"] * (self.points is not None)
        words += [f"--seed {self.seed}"]
        words += [f"--dataset {self.dataset}"] * (self.dataset is not None)
        words += [f"--function {self.function}"] * (self.function is not None)
        words += [f"--steps {self.steps}"] * (self.steps is not None)
        return " ".join(words)

    def made_by(self, name: str, seconds: float | None = None) -> list[str]:
        """Lines of Markdown with command, date, machine and, if given, the time of a run."""
        shown = [f"{key}={os.environ[key]}" for key in SETTINGS if key in os.environ]
        took = [] if seconds is None else [f"{seconds / 60:.1f} minutes" if seconds >= 90 else f"{seconds:.0f} s"]
        return [
            f"`{' '.join([*shown, self.command(name)])}`",
            "",
            ", ".join([time.strftime("%Y-%m-%d"), machine(self.device), *took]),
        ]


def machine(device: str = "cpu") -> str:
    """Description of the machine: GPU or CPU, threads, versions."""
    chosen = torch.device(device)
    name = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else f"{os.cpu_count()} cores of {_processor()}"
    return (
        f"{name}, {torch.get_num_threads()} thread(s), Python {platform.python_version()}, "
        f"torch {torch.__version__.split('+')[0]}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
