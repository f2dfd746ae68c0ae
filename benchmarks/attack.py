"""Attack strength against work: what the paper's estimator needs 100 000 calls for, and what the defaults need.

    python benchmarks/attack.py --data DIR --device cuda --images 400 --write
    python benchmarks/attack.py --data DIR --images 4 --calls 200 800 --default-calls 784 --only 0.75

DIR holds MNIST and the authors' weights (authors/MNIST.pth). As in the paper: the first test images, the softmax of the
predicted class, the published σ², and the share of images whose predicted class an attack leaves unchanged (low is
strong). Plain is Eq. 8 with antithetic draws, one stream that is extended; the defaults are the library's own, their
closed form counted in the passes. Every attack is the exact minimum of its surrogate inside the ball; SG is first
order. Methods are compared image by image (McNemar), since margins are smaller than the standard error of a share.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paper.datasets import mnist
from paper.networks import image_mlp
from smoothhess import Exact, Interactions, SmoothHess, baselines
from smoothhess.evaluate.attack import attack
from smoothhess.evaluate.attack_comparison import AttackComparison, AttackDifference, post_hoc
from smoothhess.model.weight_files import load_weights

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "attack.md"
PLAIN: dict[str, Any] = {"design": "antithetic", "control": None, "shrink": False}
MOST_PASSES = 5_000  # that the defaults may take


@dataclass(frozen=True)
class Cell:
    """What the paper prints for one radius: MNIST, softmax of the predicted class, 400 test images."""

    sigma2: float  # of SH+SG
    sigma2_sg: float  # of SG
    unchanged: dict[str, float]  # per cent


PUBLISHED = {
    0.25: Cell(0.001, 0.001, {"SH+SG": 93.0, "SG": 93.3, "G": 93.3, "random": 99.8}),
    0.5: Cell(0.005, 0.005, {"SH+SG": 80.3, "SG": 81.8, "G": 82.8, "random": 99.5}),
    0.75: Cell(0.03, 0.02, {"SH+SG": 48.0, "SG": 48.8, "G": 56.0, "random": 99.0}),
    1.25: Cell(0.05, 0.06, {"SH+SG": 10.5, "SG": 11.3, "G": 18.5, "random": 99.0}),
    1.75: Cell(0.15, 0.08, {"SH+SG": 2.0, "SG": 2.8, "G": 8.8, "random": 98.8}),
}


@dataclass(frozen=True)
class Attacked:
    """One method's perturbed inputs and what they took."""

    points: Tensor
    calls: float
    passes: float


class Softmax(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).softmax(-1)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def plain_runs(
    model: nn.Module, x: Tensor, labels: Tensor, sigma2: float, calls: Sequence[int], seed: int
) -> Iterator[Interactions]:
    """Results at increasing numbers of calls of one stream."""
    result, done = None, 0
    for n in sorted(calls):
        if result is None:
            result = SmoothHess(model).attribute(x, labels, sigma=sigma2**0.5, n_calls=n, seed=seed, **PLAIN)
        else:
            result = SmoothHess(model).more(result, n - done)
        done = n
        yield result


def attacked(result: Interactions | Exact, epsilon: float, order: int, bounds: Any) -> Attacked:
    points = attack(result, epsilon, order=order, bounds=bounds)
    return Attacked(points, float(result.n_calls.double().mean()), float(result.n_passes.double().mean()))


def methods(
    model: nn.Module, x: Tensor, labels: Tensor, epsilon: float, seed: int, options: argparse.Namespace
) -> dict[str, Attacked]:
    """Every attack on one batch of images."""
    cell, bounds = PUBLISHED[epsilon], (0, 1) if options.clip else None
    found, first_order = {}, {}
    for result in plain_runs(model, x, labels, cell.sigma2, options.calls, seed):
        found[f"SH+SG, plain, {int(result.n_calls[0])}"] = attacked(result, epsilon, 2, bounds)
        first_order["SG at the σ² of SH+SG"] = attacked(result, epsilon, 1, bounds)  # the longest run stays
    for n in options.default_calls:
        result = SmoothHess(model).attribute(x, labels, sigma=cell.sigma2**0.5, n_calls=n, seed=seed)
        found[f"SH+SG, defaults, {n}"] = attacked(result, epsilon, 2, bounds)
    (result,) = plain_runs(model, x, labels, cell.sigma2_sg, [max(options.calls)], seed)
    found |= {"SG": attacked(result, epsilon, 1, bounds), **first_order}
    n = max(options.default_calls)
    result = SmoothHess(model).attribute(x, labels, sigma=cell.sigma2_sg**0.5, n_calls=n, seed=seed)
    found[f"SG, defaults, {n}"] = attacked(result, epsilon, 1, bounds)
    found["G"] = attacked(baselines.gradient(model, x, labels), epsilon, 1, bounds)
    found["random"] = attacked(baselines.random(model, x, labels, seed=seed), epsilon, 1, bounds)
    return found


def measure(
    model: nn.Module, images: Tensor, epsilon: float, options: argparse.Namespace
) -> tuple[AttackComparison, dict[str, Attacked]]:
    comparisons, last = [], {}
    softmax = Softmax(model).eval()
    start = time.perf_counter()
    for seed, x in enumerate(images.split(options.batch)):
        with torch.no_grad():
            labels = model(x).argmax(1)
        last = methods(softmax, x, labels, epsilon, seed, options)
        points = {name: a.points[None] for name, a in last.items()}
        comparisons.append(post_hoc(model, x, points, epsilon))
        done = min((seed + 1) * options.batch, len(images))
        say(f"    ε = {epsilon:g}: image {done} of {len(images)}, {time.perf_counter() - start:.0f} s")
    return AttackComparison.cat(comparisons), last


# --- the page ---------------------------------------------------------------------------------------------------------


def paired(apart: AttackDifference) -> str:
    return f"{100 * float(apart.value):+.1f} ± {100 * float(apart.stderr):.1f}, p = {float(apart.p_value):.2g}"


def table(comparison: AttackComparison, found: dict[str, Attacked]) -> list[str]:
    (epsilon,) = comparison.radii
    reference = [name for name in comparison.methods if "plain" in name][-1]
    lines = [
        f"## ε = {epsilon:g}",
        "",
        f"| method | calls | passes | unchanged, % | published | − SG | − {reference} |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in comparison.methods:
        share = comparison.share(name, epsilon)
        published = PUBLISHED[epsilon].unchanged.get(name.split(",")[0])
        cells = [
            name,
            f"{found[name].calls:.0f}",
            f"{found[name].passes:.0f}",
            f"{100 * share.value:.1f} ± {100 * share.stderr:.1f}",
            "–" if published is None else f"{published:g}",
            *("–" if name == other else paired(comparison.difference(name, other)) for other in ("SG", reference)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *verdict(comparison, found, reference)]


def verdict(comparison: AttackComparison, found: dict[str, Attacked], reference: str) -> list[str]:
    """Are the defaults as strong as the long plain run, and is SG stronger than either?"""
    lines = []
    affordable = [n for n in comparison.methods if n.startswith("SH+SG, defaults") and found[n].passes <= MOST_PASSES]
    if affordable:
        best = max(affordable, key=lambda n: found[n].passes)
        apart = comparison.difference(best, reference)
        value, stderr = float(apart.value), float(apart.stderr)
        equal = "as strong, within two paired standard errors"
        word = equal if abs(value) <= 2 * stderr else "stronger" if value < 0 else "weaker"
        lines.append(
            f"The defaults at {found[best].passes:.0f} passes beside {reference} calls: {paired(apart)}: {word}."
        )
        reference = best
    apart = comparison.difference(reference, "SG")
    value, p = float(apart.value), float(apart.p_value)
    word = "no difference is seen" if p > 0.05 else "SG is weaker" if value < 0 else "SG is stronger"
    return [*lines, "", f"{reference}, beside SG: {paired(apart)}: {word}."]


def page(
    done: dict[float, tuple[AttackComparison, dict[str, Attacked]]], options: argparse.Namespace, minutes: float
) -> str:
    shown = ["DIR" if word == str(options.data) else word for word in sys.argv[1:]]
    where = torch.cuda.get_device_name() if options.device.startswith("cuda") else f"{os.cpu_count()} CPU cores"
    first = next(iter(done.values()))[0]
    lines = [
        "# Attack strength against work",
        "",
        f"`{' '.join(['python benchmarks/attack.py', *shown])}`",
        "",
        f"{time.strftime('%Y-%m-%d')}, {where}, Python {platform.python_version()}, "
        f"torch {torch.__version__.split('+')[0]}, {minutes:.1f} minutes",
        "",
        f"Authors' MNIST network, first {len(first)} test images, softmax of the predicted class, published σ², float32"
        f"{', perturbed images kept in [0, 1]' if options.clip else ', perturbed images not clipped'}. Unchanged: "
        "images whose predicted class the attack leaves as it was, ± one binomial standard error. The last two columns "
        "are paired over images: difference ± standard error, McNemar's exact p; negative is stronger. Plain: "
        "antithetic draws, no control variate, no denoising. Images of one batch share their draws. Published: 400 "
        "images, 100 000 calls.",
    ]
    for comparison, found in done.values():
        lines += ["", *table(comparison, found)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("SMOOTHHESS_DATA"), help="folder with MNIST and authors/MNIST.pth"
    )
    parser.add_argument("--images", type=int, default=400, help="test images, from the first on")
    parser.add_argument("--batch", type=int, default=100, help="images that are explained together")
    parser.add_argument("--only", nargs="+", type=float, default=[0.75, 1.25], choices=list(PUBLISHED), help="radii")
    parser.add_argument("--calls", nargs="+", type=int, default=[1_000, 4_000, 16_000, 100_000], help="plain estimator")
    parser.add_argument("--default-calls", nargs="+", type=int, default=[784, 1_568, 2_400], help="default estimator")
    parser.add_argument("--clip", action="store_true", help="keep perturbed images in [0, 1]")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", nargs="?", type=Path, const=PAGE, help="write the page, docs/benchmarks/attack.md")
    options = parser.parse_args()
    if not options.data:
        parser.error("expected --data DIR (or SMOOTHHESS_DATA), a folder with MNIST and authors/MNIST.pth.")
    warnings.simplefilter("ignore")

    start = time.perf_counter()
    model = image_mlp()
    load_weights(model, Path(options.data) / "authors" / "MNIST.pth")
    model.to(options.device).eval()
    images = mnist(options.data).test.inputs[: options.images].to(options.device)
    done: dict[float, tuple[AttackComparison, dict[str, Attacked]]] = {}
    for epsilon in options.only:
        done[epsilon] = measure(model, images, epsilon, options)
        if options.write:  # after every radius, so that a run that is cut short leaves what it has
            options.write.parent.mkdir(parents=True, exist_ok=True)
            options.write.write_text(page(done, options, (time.perf_counter() - start) / 60))
    print(page(done, options, (time.perf_counter() - start) / 60))


if __name__ == "__main__":
    main()
