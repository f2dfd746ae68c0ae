"""Seconds and calls of one explanation on a CPU, by number of features and network: the table of docs/cost.md.

    python benchmarks/cost.py                     tables, digits, a curve, photos, tokens
    python benchmarks/cost.py --data DIR          also the MNIST perceptron and the CIFAR10 ResNet-18
    python benchmarks/cost.py --only table digits

Every row explains INPUTS inputs, one at a time, with the default options: sampling stops at a relative error of 10 %,
or at `max_calls`. Calls, passes and CPU seconds are medians over the inputs, the error is the largest. A new explainer
is made for each input, after one call that is not timed. Seconds are those of the process with one thread, which other
jobs on the machine disturb little; the column "gradients" has the seconds of 1000 plain gradient calls of the model.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cases
import small_transformers
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes
from torch import Tensor, nn

from smoothhess import Interactions, SmoothHess, TokenSmoothHess, segments

INPUTS = 3
CALLS = 1000


@dataclass(frozen=True)
class Row:
    """A network, inputs, and what is asked about one of them."""

    network: str
    asked: str
    model: Callable[[Tensor], Tensor]
    inputs: Tensor
    explain: Callable[[Tensor], Interactions]
    dimensions: int  # of the noise


def asked_of(model: Callable[[Tensor], Tensor], **options: Any) -> Callable[[Tensor], Interactions]:
    return lambda x: SmoothHess(model).attribute(x, **options)


def regression(x: Tensor, y: Tensor) -> nn.Module:
    """A perceptron on standardised columns."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(x.shape[1], 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    adam = torch.optim.AdamW(model.parameters(), 1e-2)
    for rows in torch.randint(len(x), (300, 64)):
        adam.zero_grad()
        noisy = x[rows] + 0.2 * torch.randn(64, x.shape[1])
        nn.functional.mse_loss(model(noisy)[:, 0], y[rows]).backward()
        adam.step()
    return model.eval()


def table(data: Path | None) -> Iterator[Row]:
    for load in (load_diabetes, load_breast_cancer):
        x, y = (torch.tensor(part).float() for part in load(return_X_y=True))
        x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
        model = regression(x, y)
        explain = asked_of(model, sigma=0.25)
        yield Row("MLP, 2 × 32 units", "columns of a table", model, x[:INPUTS], explain, x.shape[1])


def digits(data: Path | None) -> Iterator[Row]:
    for maker, name in ((cases.digits, "MLP, 2 × 64 units"), (cases.vgg, "VGG with max-pooling, 16 and 32 channels")):
        (case,) = maker("cpu", INPUTS, (0.5,), data)
        explain = asked_of(case.model, target="predicted", sigma=case.sigma)
        yield Row(name, "pixels of a digit", case.model, case.inputs, explain, case.d)


def curve(data: Path | None) -> Iterator[Row]:
    (case,) = cases.curve("cpu", INPUTS, (0.5,), data)
    windows = segments.windows((100,), 10, unit="points")
    noise = segments.noise(windows, 0.1)
    name = "1-D CNN, 4 blocks of 8 channels"
    options = {"gaussian": noise, "feature_mask": windows}
    yield Row(name, "windows of a curve, shifted", case.model, case.inputs, asked_of(case.model, **options), 10)
    yield Row(name, "points of a curve", case.model, case.inputs, asked_of(case.model, sigma=case.sigma), case.d)


def photo(data: Path | None) -> Iterator[Row]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 7, stride=4, padding=3), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10),
    ).eval()  # fmt: skip
    images = torch.rand(INPUTS, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    tiles = segments.grid((3, 224, 224), 7)
    options = {"target": 0, "gaussian": segments.noise(tiles, 0.1), "feature_mask": tiles}
    name = "CNN, 2 layers, random weights"
    yield Row(name, "tiles of a photo of 150 528 features, shifted", model, images, asked_of(model, **options), 49)
    explain = asked_of(model, target=0, sigma=0.1, n_calls=256)
    yield Row(name, "pixels of a photo, 256 calls: directions and sums", model, images, explain, 150528)


def tokens(data: Path | None) -> Iterator[Row]:
    for length in (16, 64):
        shape = small_transformers.Shape(causal=False, classes=3, length=length, width=128, layers=4)
        torch.manual_seed(0)
        model = small_transformers.Transformer(shape).eval()
        ids = torch.randint(shape.vocabulary, (INPUTS, length), generator=torch.Generator().manual_seed(1))

        def explain(x: Tensor, model: small_transformers.Transformer = model) -> Interactions:
            return TokenSmoothHess(model, model.tokens).attribute(x, 0, sigma=0.2)

        yield Row("transformer, 4 layers of 128, random weights", "tokens of a text", model, ids, explain, length)


def large(data: Path | None) -> Iterator[Row]:
    (case,) = cases.mnist("cpu", INPUTS, (0.25,), data)
    explain = asked_of(case.model, target="predicted", sigma=case.sigma)
    yield Row("MLP of the paper's authors", "pixels of MNIST", case.model, case.inputs, explain, case.d)
    (case,) = cases.cifar10("cpu", INPUTS, (0.25,), data)
    tiles = segments.grid(case.inputs.shape[1:], 4)
    options = {"target": "predicted", "gaussian": segments.noise(tiles, 0.02), "feature_mask": tiles}
    yield Row("ResNet-18", "tiles of CIFAR10, shifted", case.model, case.inputs, asked_of(case.model, **options), 16)


PARTS = {"table": table, "digits": digits, "curve": curve, "photo": photo, "tokens": tokens, "large": large}


def gradients(model: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """CPU seconds of CALLS gradient calls, measured on a part of them."""
    rows = 64 if x[0].numel() < 1000 else 8
    points = (x + 0.1 * torch.randn(rows, *x.shape[1:])).requires_grad_()
    start, done = time.process_time(), 0
    while done < rows or (time.process_time() - start < 1 and done < CALLS):
        torch.autograd.grad(model(points).flatten(1)[:, 0].sum(), points)
        done += rows
    return (time.process_time() - start) * CALLS / done


def measured(row: Row) -> str:
    """One line of the table."""
    seconds, results = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row.explain(row.inputs[:1])
        for x in row.inputs.split(1):
            start = time.process_time()
            results.append(row.explain(x))
            seconds.append(time.process_time() - start)
    calls, passes = (statistics.median(float(getattr(r, name)) for r in results) for name in ("n_calls", "n_passes"))
    error = max(float(r.relative_error) for r in results)
    plain = f"{gradients(row.model, row.inputs[:1]):.2g} s" if row.inputs.is_floating_point() else "–"
    return (
        f"| {row.asked} | {row.dimensions:,} | {row.network} | CPU | {calls:,.0f} | {passes:,.0f} | {error:.2f} | "
        f"{statistics.median(seconds):.2g} s | {plain} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with MNIST, CIFAR10 and the networks trained on them")
    parser.add_argument("--only", nargs="*", choices=PARTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| what | d | network | device | calls | passes | error | seconds | 1000 gradients |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for name in options.only or [n for n in PARTS if n != "large" or options.data]:
        for row in PARTS[name](options.data):
            print(measured(row), flush=True)
    print(
        f"\n*{platform.machine()} CPU, one thread, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{time.strftime('%Y-%m-%d')}; `python benchmarks/cost.py --data DIR`*"
    )


if __name__ == "__main__":
    main()
