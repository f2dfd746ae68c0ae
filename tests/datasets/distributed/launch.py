"""Starts worker scripts on several ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import smoothhess

ROOT = Path(__file__).parents[3]
LIMIT = 120  # seconds; far more than a loaded machine needs, far less than a hang
# torchrun keeps one key-value store for all its attempts, in which ranks may find old addresses, unless told otherwise.
STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# Workers import the package that is tested here, also where another copy is installed.
PATHS = os.pathsep.join([str(ROOT), str(Path(smoothhess.__file__).parents[1])])
ENVIRONMENT = {**os.environ, **STORES, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS}


def torchrun(worker: str, *arguments: object, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """As a user would, on two ranks of this machine."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    command = [*start, str(Path(__file__).parent / worker), *map(str, arguments)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT, check=False)


def by_hand(worker: str, ranks: int, *arguments: object) -> list[tuple[int, str]]:
    """Without a program that looks after them; exit code and output of each rank."""
    command = [sys.executable, str(Path(__file__).parent / worker)]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), *map(str, arguments)],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, output) for process, output in zip(running, outputs, strict=True)]
