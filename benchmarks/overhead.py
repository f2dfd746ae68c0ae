"""Work of `attribute` and `top_pairs` beside the gradients of the model, on one CPU core.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --data DIR

All numbers are ratios inside one run, in CPU seconds of one thread; the column "parent" has those of the commit before
the last change of this table, from the same command on the same machine. The unit is 1000 plain gradient calls, in
batches of the size that the sampler uses. The networks are perceptrons with ReLU (784-200-200-10 with random weights,
the authors' MNIST network with --data, and that of `smoothhess demo` for 8×8 digits), and a CNN for 32×32 images with
random weights. "first" is the first call of `top_pairs` on a new result, which makes the two Hessians dense; "again" is
any later call. Peak memory is that of a process (VmHWM, so on Linux only), from two
numbers of inputs.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import cases
import torch
from torch import Tensor, nn

from smoothhess import Interactions, SmoothHess
from smoothhess.cli import demo

CALLS = 1000
AT_ONCE = 500  # gradient calls in a batch, for 784 features and more
FEW_AT_ONCE = 128  # for 64 features
PARENT = {  # of f208ca8, 2026-11-18
    "digits MLP, `attribute` of an input with tail strata": "15",
    "digits MLP, `attribute` of an input without": "9.6",
    "MNIST MLP, d = 784, ε = 1, 32 inputs: plain passes / `attribute`": "0.28",
    "MLP 784-200-200-10, radius 0.2, 32 inputs: plain passes / `attribute`": "0.11",
    "CNN 3×32×32, defaults (error 0.16): `attribute`": "60",
    "CNN 3×32×32, defaults: share of the time beside passes": "0.88",
    "CNN 3×32×32, defaults, `control=None` (error 0.34): `attribute`": "19",
    "CNN 3×32×32, defaults, `control=None`: share of the time beside passes": "0.84",
    "MLP 784-200-200-10, `top_pairs(10)`, first": "4.4",
    "MLP 784-200-200-10, `top_pairs(10)`, again": "1.5",
    "MNIST MLP, d = 784, ε = 1, `top_pairs(10)`, first": "0.98",
    "MNIST MLP, d = 784, ε = 1, `top_pairs(10)`, again": "0.65",
}


def perceptron(*widths: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval()


def small_cnn() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*first, *second, nn.Linear(2048, 64), nn.ReLU(), nn.Linear(64, 10)).eval()


def gradients(model: Callable[[Tensor], Tensor], x: Tensor, at_once: int) -> None:
    """CALLS gradients at perturbed inputs."""
    noise = 0.1 * torch.randn(at_once, *x.shape[1:], generator=torch.Generator().manual_seed(0))
    for start in range(0, CALLS, at_once):
        points = (x + noise[: CALLS - start]).requires_grad_()
        torch.autograd.grad(model(points)[:, 0].sum(), points)


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def row(work: str, ratio: float, goal: str) -> None:
    print(f"| {work} | {ratio:.2g} | {PARENT.get(work, '')} | {goal} |", flush=True)


def of_digits(runs: int) -> None:
    task = demo.digits(0)
    model = demo.train(task, demo.TASKS[demo.digits], 10, 0)
    explainer = SmoothHess(model)
    for i, which in ((0, "with tail strata"), (1, "without")):
        x, taken = task.inputs[i : i + 1], []
        for _ in range(4 * runs + 4):
            works = (
                lambda x=x: gradients(model, x, FEW_AT_ONCE),
                lambda x=x: explainer.attribute(x, 0, radius=1.0),
            )
            taken.append([cpu_seconds(work) for work in works])
        base, own = (statistics.median(column) for column in zip(*taken[4:], strict=True))
        row(f"digits MLP, `attribute` of an input {which}", own / base, "≤ 4")


def of_many(name: str, model: Callable[[Tensor], Tensor], inputs: Tensor, radius: float) -> None:
    """Time of as many plain passes as `attribute` counts, over its time."""
    gradients(model, inputs[:1], AT_ONCE)
    base = statistics.median(cpu_seconds(lambda: gradients(model, inputs[:1], AT_ONCE)) for _ in range(5)) / CALLS
    explainer, found = SmoothHess(model), []
    explainer.attribute(inputs[:1], 0, radius=radius)
    own = cpu_seconds(lambda: found.append(explainer.attribute(inputs, 0, radius=radius)))
    row(
        f"{name}, {len(inputs)} inputs: plain passes / `attribute`", float(found[0].n_passes.sum()) * base / own, "≥ .6"
    )


def of_pairs(name: str, model: Callable[[Tensor], Tensor], inputs: Tensor, radius: float, runs: int) -> None:
    explainer, taken = SmoothHess(model), []
    for run in range(runs + 1):
        x = inputs[run % len(inputs)][None]
        result: Interactions = explainer.attribute(x, 0, radius=radius, seed=run)
        works = (lambda x=x: gradients(model, x, AT_ONCE), *[lambda r=result: r.top_pairs(10)] * 2)
        taken.append([cpu_seconds(work) for work in works])
    base, first, again = (statistics.median(column) for column in zip(*taken[1:], strict=True))
    row(f"{name}, `top_pairs(10)`, first", first / base, "≤ 1")
    row(f"{name}, `top_pairs(10)`, again", again / base, "≤ 1")


def of_cnn() -> None:
    model, x = small_cnn(), torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    gradients(model, x, AT_ONCE)
    base = cpu_seconds(lambda: gradients(model, x, AT_ONCE))
    for name, control in (("defaults", "auto"), ("defaults, `control=None`", None)):
        found: list[Interactions] = []
        run = partial(SmoothHess(model).attribute, x, 0, radius=1.0, control=control)
        own = cpu_seconds(lambda run=run, found=found: found.append(run()))
        passes, error = float(found[0].n_passes) * base / CALLS, float(found[0].relative_error)
        row(f"CNN 3×32×32, {name} (error {error:.2f}): `attribute`", own / base, "≤ 10")
        row(f"CNN 3×32×32, {name}: share of the time beside passes", 1 - passes / own, "≤ .25")


def peak_of(count: int, d: int = 200) -> int:
    """Peak memory of this process after `attribute` of inputs with their own draws, in bytes."""
    model, x = perceptron(d, 64, 32, 1), torch.rand(count, d, generator=torch.Generator().manual_seed(2))
    SmoothHess(model).attribute(x, radius=1.0, seed=[*range(count)], max_calls=2 * d)
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def of_memory(d: int = 200) -> None:
    few, many = (
        int(subprocess.check_output([sys.executable, __file__, "--peak", str(count)], text=True))
        for count in (200, 500)
    )
    row("MLP 200-64-32-1, own draws: peak bytes per input / d²", (many - few) / 300 / d**2, "≤ 120")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("SMOOTHHESS_DATA"))
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.peak:
        print(peak_of(options.peak))
        return
    print("| work | ratio | parent | goal |\n|---|---|---|---|")
    of_digits(options.runs)
    of_memory()
    random, inputs = perceptron(784, 200, 200, 10), torch.rand(32, 784, generator=torch.Generator().manual_seed(2))
    of_many("MLP 784-200-200-10, radius 0.2", random, inputs, 0.2)
    of_pairs("MLP 784-200-200-10", random, inputs[:4], 2.0, options.runs)
    if options.data:
        case = next(iter(cases.MAKERS["mnist"]("cpu", 32, [1.0], Path(options.data))))
        radius = case.sigma * case.d**0.5
        of_many(case.name, case.model, case.inputs, radius)
        of_pairs(case.name, case.model, case.inputs[:4], radius, options.runs)
    of_cnn()
    print(
        f"\n*{platform.machine()} CPU, one thread, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{time.strftime('%Y-%m-%d')}, medians of {options.runs} runs; `python benchmarks/overhead.py`*"
    )


if __name__ == "__main__":
    main()
