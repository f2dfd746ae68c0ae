"""Time of `top_pairs(10)` and of `attribute` on one CPU core, relative to 1000 plain gradient calls of the model.

    python benchmarks/top_pairs.py
    python benchmarks/top_pairs.py --data DIR

The networks are multilayer perceptrons with ReLU: 784-200-200-10 with random weights, the authors' MNIST network with
--data, and that of `smoothhess demo` for 8×8 digits. Gradient calls are batched in blocks of the size that the
sampler uses. CPU seconds of one thread, timed in turn; ratios are those of the medians. "first" is the first call of
`top_pairs` on a new result, which makes the two Hessians dense; "again" is any later call.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import cases
import torch
from torch import Tensor, nn

from smoothhess import Interactions, SmoothHess
from smoothhess.cli import demo

CALLS = 1000
AT_ONCE = 500  # gradient calls in a batch, for 784 features
FEW_AT_ONCE = 128  # for 64 features


def perceptron(*widths: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval()


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


def of_pairs(name: str, model: Callable[[Tensor], Tensor], inputs: Tensor, radius: float, runs: int) -> None:
    explainer, taken = SmoothHess(model), []
    for run in range(runs + 1):
        x = inputs[run % len(inputs)][None]
        result: Interactions = explainer.attribute(x, 0, radius=radius, seed=run)
        works = (lambda x=x: gradients(model, x, AT_ONCE), *[lambda r=result: r.top_pairs(10)] * 2)
        taken.append([cpu_seconds(work) for work in works])
    base, first, again = (statistics.median(column) for column in zip(*taken[1:], strict=True))
    print(f"| {name}, `top_pairs(10)`, first | {base * 1e3:.1f} | {first * 1e3:.1f} | {first / base:.1f} |")
    print(f"| {name}, `top_pairs(10)`, again | {base * 1e3:.1f} | {again * 1e3:.1f} | {again / base:.1f} |")


def of_attribute(runs: int) -> None:
    task = demo.digits(0)
    model, x = demo.train(task, demo.TASKS[demo.digits], 10, 0), task.inputs[:1]
    explainer, taken = SmoothHess(model), []
    for _ in range(4 * runs + 4):
        works = (lambda: gradients(model, x, FEW_AT_ONCE), lambda: explainer.attribute(x, 0, radius=1.0))
        taken.append([cpu_seconds(work) for work in works])
    base, own = (statistics.median(column) for column in zip(*taken[4:], strict=True))
    print(f"| digits MLP 64-64-64-10, `attribute` | {base * 1e3:.1f} | {own * 1e3:.1f} | {own / base:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("SMOOTHHESS_DATA"))
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"| work | {CALLS} gradient calls (ms) | time (ms) | ratio |\n|---|---|---|---|")
    inputs = torch.rand(4, 784, generator=torch.Generator().manual_seed(2))
    of_pairs("MLP 784-200-200-10", perceptron(784, 200, 200, 10), inputs, 2.0, options.runs)
    if options.data:
        case = next(iter(cases.MAKERS["mnist"]("cpu", 4, [1.0], Path(options.data))))
        of_pairs(case.name, case.model, case.inputs, case.sigma * case.d**0.5, options.runs)
    of_attribute(options.runs)
    print(
        f"\n*{platform.machine()} CPU, one thread, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{time.strftime('%Y-%m-%d')}, medians of {options.runs} runs; `python benchmarks/top_pairs.py`*"
    )


if __name__ == "__main__":
    main()
