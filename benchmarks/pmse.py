"""P_MSE of every row of the paper's table on the authors' MNIST network, beside the published cells.

    OMP_NUM_THREADS=2 python benchmarks/pmse.py --data DIR --write
    python benchmarks/pmse.py --data DIR --device cuda --batch 100 --write

DIR holds MNIST and the authors' weights (authors/MNIST.pth). The first test images, the logit of the predicted class
and the published σ² and β are used, as in the paper; SmoothHess is the plain default estimate. The paper's tables draw
the radius of a perturbation uniformly ("radius"), not the point uniformly in the ball ("ball"): both are shown. How
many calls are enough is shown on validation images. On a CPU with glibc, MALLOC_MMAP_THRESHOLD_=4294967296 and
MALLOC_TRIM_THRESHOLD_=4294967296 keep freed memory and save time. The page is written after every radius.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from paper.datasets import mnist
from paper.networks import image_mlp
from smoothhess import Exact, Interactions, SmoothHess, Taylor, baselines
from smoothhess.evaluate import Comparison, compare
from smoothhess.model.weight_files import load_weights

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "pmse.md"
ALLOWED = 0.15  # of the published cells
SETTINGS = ("OMP_NUM_THREADS", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")  # of the environment, shown
EPSILONS = (0.25, 0.5, 1.0)
Three = tuple[float, float, float]


@dataclass(frozen=True)
class Known:
    """Numbers of others for one method at ε = .25, .5, 1; MNIST, predicted-class logit, 200 test images."""

    published: Three
    smoothing: Three | None  # the published σ² or β
    remeasured: Three | None = None  # authors' network and sampler, 100 000 antithetic gradients
    remeasured_ball: Three | None = None


SIGMA2: Three = (4.5e-5, 1.8e-4, 7.2e-4)  # of SH+SG and of SG alike
KNOWN = {
    "SH+SG": Known((9.6e-7, 7.8e-6, 6.7e-5), SIGMA2, (1.07e-6, 8.4e-6, 7.3e-5), (3.9e-6, 3.1e-5, 2.6e-4)),
    "SG": Known((4.5e-6, 4.1e-5, 3.9e-4), SIGMA2, (4.8e-6, 4.2e-5, 4.1e-4)),
    "SP H+G": Known((1.2e-6, 9.6e-6, 8.1e-5), (400.0, 200.0, 95.0)),
    "SP G": Known((4.6e-6, 4.1e-5, 3.9e-4), (390.0, 200.0, 100.0)),
    "SW H+G": Known((2.4e-6, 2.0e-5, 1.9e-4), (190.0, 95.0, 55.0)),
    "SW G": Known((5.6e-6, 5.0e-5, 4.9e-4), (190.0, 95.0, 55.0)),
    "G": Known((4.2e-3, 1.7e-2, 6.7e-2), None, (7.9e-6, 6.6e-5, 5.9e-4)),  # printed values: not the gradient's
}
METHODS = tuple(KNOWN)


def sigma(epsilon: float, d: int) -> float:
    """The published σ, or the usual choice 3ε/4√d at other radii."""
    return (SIGMA2[EPSILONS.index(epsilon)] if epsilon in EPSILONS else (0.75 * epsilon) ** 2 / d) ** 0.5


def beta(method: str, epsilon: float) -> float:
    """The published β; at other radii that of ε = .5, which goes as 1/ε."""
    published = KNOWN[method].smoothing
    assert published is not None
    return published[EPSILONS.index(epsilon)] if epsilon in EPSILONS else published[1] * 0.5 / epsilon


def smoothing_text(method: str, epsilon: float, d: int) -> str:
    if method == "G":
        return "–"
    return f"σ² = {sigma(epsilon, d) ** 2:.2g}" if method.endswith("SG") else f"β = {beta(method, epsilon):g}"


def predicted(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return model(images).argmax(1)


def explain(model: nn.Module, images: Tensor, labels: Tensor, epsilon: float, calls: int, seed: int) -> Interactions:
    plain = {"control": None, "shrink": False}
    scale = sigma(epsilon, images[0].numel())
    return SmoothHess(model).attribute(images, target=labels, sigma=scale, n_calls=calls, seed=seed, **plain)


def surrogates(model: nn.Module, x: Tensor, labels: Tensor, epsilon: float, calls: int, seed: int) -> dict[str, Taylor]:
    """The seven rows, each smoothed as published."""
    smooth = explain(model, x, labels, epsilon, calls, seed)
    found: dict[str, Interactions | Exact] = {"SH+SG": smooth, "SG": smooth}
    for letters, soften in (("SP", baselines.softplus), ("SW", baselines.swish)):
        both, alone = (beta(f"{letters} {order}", epsilon) for order in ("H+G", "G"))
        found[f"{letters} H+G"] = soften(model, x, labels, beta=both)
        same = alone == both
        found[f"{letters} G"] = found[f"{letters} H+G"] if same else soften(model, x, labels, beta=alone, dense=False)
    found["G"] = baselines.gradient(model, x, labels)
    for name, result in found.items():
        if name.startswith("SH") or name.endswith("H+G"):
            _ = result.hessian  # kept: cheaper than factors and products for thousands of samples
    second = {name: name.startswith("SH") or name.endswith("H+G") for name in METHODS}
    return {name: found[name].taylor(2 if second[name] else 1) for name in METHODS}


def measure(model: nn.Module, images: Tensor, epsilon: float, options: argparse.Namespace) -> dict[str, Comparison]:
    """One comparison over all images for each sampler; every batch has draws of its own."""
    tables: dict[str, list[Comparison]] = {"radius": [], "ball": []}
    start = time.perf_counter()
    for seed, x in enumerate(images.split(options.batch)):
        labels = predicted(model, x)
        made = surrogates(model, x, labels, epsilon, options.calls, seed)
        for sampling, parts in tables.items():
            parts.append(
                compare(model, x, made, epsilon, labels, n_samples=options.samples, sampling=sampling, seed=seed)
            )
        done, seconds = min((seed + 1) * options.batch, len(images)), time.perf_counter() - start
        print(f"    ε = {epsilon:g}: image {done} of {len(images)}, {seconds:.0f} s", file=sys.stderr, flush=True)
    return {sampling: Comparison.cat(parts) for sampling, parts in tables.items()}


def results_table(tables: dict[float, dict[str, Comparison]], d: int) -> list[str]:
    """Ours beside the others, over both samplers."""
    lines = [
        "| method | ε | smoothing | ours, `radius` | published | ours / published | re-measured | ours, `ball` "
        "| re-measured, ball |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    outside = []
    for method in METHODS:
        known = KNOWN[method]
        for epsilon, by_sampling in tables.items():
            radius, ball = by_sampling["radius"], by_sampling["ball"]
            mean = radius.mean(method, epsilon)
            sampling = float(radius.sampling_stderr[radius.methods.index(method), 0])
            published, remeasured, remeasured_ball, ratio = "–", "–", "–", "–"
            if epsilon in EPSILONS:
                column = EPSILONS.index(epsilon)
                published = f"{known.published[column]:.2g}"
                remeasured = f"{known.remeasured[column]:.3g}" if known.remeasured else "–"
                remeasured_ball = f"{known.remeasured_ball[column]:.2g}" if known.remeasured_ball else "–"
                share = mean.value / known.published[column]
                ratio = f"{share:.2f} ± {sampling / known.published[column]:.2f}" if method != "G" else f"{share:.2g}"
                if method != "G" and abs(share - 1) > ALLOWED:
                    outside.append(f"{method} at ε = {epsilon:g} ({share:.2f})")
            cells = [f"{average.value:.3g} ± {average.stderr:.1g}" for average in (mean, ball.mean(method, epsilon))]
            lines.append(
                f"| {method} | {epsilon:g} | {smoothing_text(method, epsilon, d)} | {cells[0]} | {published} | {ratio} "
                f"| {remeasured} | {cells[1]} | {remeasured_ball} |"
            )
    verdict = f"all but {', '.join(outside)}" if outside else "all"
    return [*lines, "", f"Within {ALLOWED:.0%} of the published cell, G apart: {verdict}."]


def gradient_line(tables: dict[float, dict[str, Comparison]]) -> str:
    ratios = [t["radius"].mean("G", e).value / t["radius"].mean("SG", e).value for e, t in tables.items()]
    return (
        "The published row of G cannot be the gradient's: it grows as ε², like the error of an unrelated gradient. "
        f"Measured, G is {min(ratios):.2f} to {max(ratios):.2f} times SG."
    )


def paired_lines(tables: dict[float, dict[str, Comparison]], sampling: str) -> list[str]:
    """How far every other row is above SH+SG, as a share of its own P_MSE."""
    lines = [
        f"| P_MSE of SH+SG over that of … (`{sampling}`) | {' | '.join(f'ε = {e:g}' for e in tables)} |",
        f"|{'---|' * (len(tables) + 1)}",
    ]
    for method in METHODS[1:]:
        cells = []
        for epsilon, by_sampling in tables.items():
            apart, mean = by_sampling[sampling].difference("SH+SG", method), by_sampling[sampling].mean(method, epsilon)
            ratio, z = 1 + float(apart.value[0]) / mean.value, float(apart.value[0] / apart.stderr[0])
            cells.append(f"{ratio:.3f} ({z:+.1f} se)")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


def calls_table(model: nn.Module, images: Tensor, epsilon: float, samples: int, doublings: int = 4) -> list[str]:
    """SH+SG on validation images against the number of calls, from blocks of 2d upwards; one stream, extended."""
    labels = predicted(model, images)
    first = 2 * images[0].numel()
    result = explain(model, images, labels, epsilon, first, 0)
    surrogates = {}
    for doubling in range(doublings + 1):
        calls = first * 2**doubling
        if doubling:
            result = SmoothHess(model).more(result, calls // 2)
        _ = result.hessian
        surrogates[str(calls)] = result.taylor()
    table = compare(model, images, surrogates, epsilon, labels, n_samples=samples, sampling="radius")
    last = table.methods[-1]
    best = table.mean(last, epsilon).value
    lines = [f"| calls | SH+SG, ε = {epsilon:g} | above {last} calls (paired) |", "|---|---|---|"]
    for name in table.methods:
        mean, apart = table.mean(name, epsilon), table.difference(name, last)
        extra = "–" if name == last else f"{float(apart.value[0]) / best:.1%} ± {float(apart.stderr[0]) / best:.1%}"
        lines.append(f"| {name} | {mean.value:.3g} ± {mean.stderr:.1g} | {extra} |")
    return lines


def enough_calls(model: nn.Module, images: Tensor, options: argparse.Namespace) -> list[str]:
    samples = max(2, options.samples // 5)
    return [
        "",
        "## How many calls are enough",
        "",
        f"The first {len(images)} validation images, {samples} samples an image, `radius`; longer runs extend shorter "
        "ones:",
        "",
        *calls_table(model, images, min(options.radii), samples),
    ]


def page(
    tables: dict[float, dict[str, Comparison]], enough: list[str], options: argparse.Namespace, minutes: float, d: int
) -> str:
    shown = ["DIR" if word == str(options.data) else word for word in sys.argv[1:]]
    settings = [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    cpu = f"{os.cpu_count()} CPU cores, {torch.get_num_threads()} thread(s)"
    where = torch.cuda.get_device_name() if options.device.startswith("cuda") else cpu
    images = len(next(iter(tables.values()))["ball"])
    lines = [
        "# P_MSE on the authors' MNIST network",
        "",
        f"`{' '.join([*settings, 'python benchmarks/pmse.py', *shown])}`",
        "",
        f"{time.strftime('%Y-%m-%d')}, {where}, Python {platform.python_version()}, "
        f"torch {torch.__version__.split('+')[0]}, {minutes:.1f} minutes",
        "",
        f"First {images} test images, predicted-class logit, {options.samples} samples an image, published σ² and β, "
        f"float32. SH+SG: the plain default estimate (orthogonal design, {options.calls} calls, no control variate, no "
        "shrinkage), Taylor of order 2; SG: order 1 of the same result; SP and SW: gradient (and Hessian) of the "
        "network with every ReLU replaced by SoftPlus or Swish, around the network's own f(x); G: f and ∇f at the "
        "image. ± one standard error over images, except beside the ratio: there over samples, since the published "
        "cells are over the same images. `radius` is the sampler of the published tables, `ball` the uniform ball. "
        "Re-measured: authors' network, 100 000 antithetic gradients an image.",
        "",
        *results_table(tables, d),
        "",
        gradient_line(tables),
        "",
        "Paired over images, in paired standard errors:",
        "",
        *paired_lines(tables, "radius"),
        "",
        *paired_lines(tables, "ball"),
        *enough,
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("SMOOTHHESS_DATA"), help="folder with MNIST and authors/MNIST.pth"
    )
    parser.add_argument("--images", type=int, default=200, help="test images, from the first on")
    parser.add_argument("--batch", type=int, default=20, help="images at once: a result holds its draws")
    parser.add_argument("--samples", type=int, default=15_000, help="perturbations of each image")
    parser.add_argument("--calls", type=int, default=25_088, help="gradient calls of each image and radius")
    parser.add_argument("--radii", nargs="+", type=float, default=list(EPSILONS))
    parser.add_argument("--validation", type=int, default=20, help="validation images for the table of calls; 0: none")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", nargs="?", type=Path, const=PAGE, help="write the page, docs/benchmarks/pmse.md")
    options = parser.parse_args()
    if not options.data:
        parser.error("expected --data DIR (or SMOOTHHESS_DATA), a folder with MNIST and authors/MNIST.pth.")

    start = time.perf_counter()
    data = mnist(options.data)
    model = image_mlp()
    load_weights(model, Path(options.data) / "authors" / "MNIST.pth")
    model.to(options.device).eval()
    images = data.test.inputs[: options.images].to(options.device)
    d, tables, enough = images[0].numel(), {}, []

    def keep() -> str:
        text = page(tables, enough, options, (time.perf_counter() - start) / 60, d)
        if options.write:
            options.write.parent.mkdir(parents=True, exist_ok=True)
            options.write.write_text(text)
        return text

    for epsilon in sorted(options.radii):
        tables[epsilon] = measure(model, images, epsilon, options)
        keep()
    if options.validation:
        enough = enough_calls(model, data.val.inputs[: options.validation].to(options.device), options)
    print(keep())


if __name__ == "__main__":
    main()
