"""Training steps a second on one GPU: kernels started one by one, and replayed as a CUDA graph.

    python benchmarks/training_steps.py

CIFAR10's recipe (batches of 128, bfloat16, its augmentation) on random images; the difference of a long and a short
run, so that neither start-up nor recording counts.
"""

from __future__ import annotations

import argparse
import platform
import time
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Generator

from paper import networks, passes
from paper.datasets import Split
from paper.training import CIFAR10, train

SHORT, LONG = 60, 260  # steps


def steps_a_second(name: str, replayed: bool, device: str, short: int, long: int) -> float:
    rng = Generator().manual_seed(0)
    data = Split(torch.rand(4096, 3, 32, 32, generator=rng), torch.randint(10, (4096,), generator=rng))
    network = getattr(networks, name)()
    seconds = []
    with patch.object(passes, "WARM_STEPS", passes.WARM_STEPS if replayed else 10**9):
        for steps in (20, short, long):  # the first to warm up
            start = time.perf_counter()
            train(network, data, replace(CIFAR10, n_steps=steps, rate=lambda _: 0.01), device=device)
            seconds.append(time.perf_counter() - start)
    return (long - short) / (seconds[2] - seconds[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--networks", nargs="+", default=["resnet18", "resnet101"])
    options = parser.parse_args()
    on_cuda = torch.device(options.device).type == "cuda"
    short, long = (SHORT, LONG) if on_cuda else (1, 2)
    print("| network | one by one, steps/s | replayed, steps/s | ratio |\n|---|---|---|---|", flush=True)
    for name in options.networks:
        plain, replayed = (steps_a_second(name, r, options.device, short, long) for r in (False, True))
        print(f"| {name} | {plain:.1f} | {replayed:.1f} | {replayed / plain:.1f} |", flush=True)
    machine = torch.cuda.get_device_name() if on_cuda else f"{platform.machine()} CPU, which has no graphs"
    print(
        f"\n*{machine}, Python {platform.python_version()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; "
        "`python benchmarks/training_steps.py`*"
    )


if __name__ == "__main__":
    main()
