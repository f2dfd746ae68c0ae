"""Relative error against gradient calls: how many calls does each estimator need for the same answer?

    python benchmarks/efficiency.py                        closed form and digits, on the CPU in a few minutes
    python benchmarks/efficiency.py --data DIR             MNIST with the authors' weights, CIFAR10 ResNet-18, too
    python benchmarks/efficiency.py --data DIR --only mnist --device cuda --images 20

The truth is the closed form where there is one. Elsewhere it is made here, in two independent plain antithetic halves A
and B, and error² = ⟨Ĥ − A, Ĥ − B⟩ / ⟨A, B⟩: neither the reference's own noise nor a bias of ours can hide. The error in
the operator norm is taken against (A + B)/2, so it holds the reference's noise as well.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from smoothhess import Interactions, Isotropic, SmoothHess

Model = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A network, inputs to explain, and how to know the truth."""

    name: str
    model: Model
    inputs: Tensor  # (B, *shape)
    target: list[int] | None
    sigma: float
    reference_calls: int  # per half; 0: `truth` is exact
    truth: Tensor | None = None  # (B, d, d)

    @property
    def d(self) -> int:
        return self.inputs[0].numel()


# --- the networks -----------------------------------------------------------------------------------------------------


def closed_form_case(device: str, images: int) -> Iterator[Case]:
    """One hidden layer of 200 units over 64 features: ∇²h = Σ a φ(s/τ)/τ wwᵀ."""
    rng = torch.Generator().manual_seed(3)
    w = torch.randn(200, 64, generator=rng).double() / 8
    b, a = torch.randn(200, generator=rng).double() / 2, torch.randn(200, generator=rng).double() / 14
    x = torch.randn(images, 64, generator=rng).double()
    w, b, a, x = (t.to(device) for t in (w, b, a, x))
    sigma = 0.5
    tau = sigma * w.norm(dim=1)
    s = (x @ w.T + b) / tau
    density = torch.exp(-s.square() / 2) / math.sqrt(2 * math.pi) / tau
    truth = torch.einsum("bk,kd,ke->bde", a * density, w, w)
    yield Case("closed form, d = 64", lambda x: torch.relu(x @ w.T + b) @ a, x, None, sigma, 0, truth)


def digits_case(device: str, images: int) -> Iterator[Case]:
    """The digits network of the demo, trained here."""
    from smoothhess import demonstration

    task = demonstration.digits(0)
    network = demonstration.train(task, hidden=64, epochs=40, seed=0).to(device)
    inputs = task.test_inputs[:images].float().to(device)
    target = network(inputs).argmax(1).tolist()
    yield Case("digits MLP, d = 64, r = 1", network, inputs, target, 1 / 8, 100_000)


def mnist_case(device: str, images: int, data: Path) -> Iterator[Case]:
    """The authors' MNIST network."""
    from smoothhess.reproduce.datasets import mnist
    from smoothhess.reproduce.networks import image_mlp
    from smoothhess.reproduce.weights import load_weights

    network = image_mlp()
    load_weights(network, data / "authors" / "MNIST.pth")
    inputs = mnist(data).test.inputs[:images].to(device)
    yield from image_cases("MNIST MLP", network.eval().to(device), inputs, 100_000)


def cifar_case(device: str, images: int, data: Path) -> Iterator[Case]:
    """A trained CIFAR10 ResNet-18."""
    from smoothhess.reproduce.datasets import cifar10
    from smoothhess.reproduce.networks import resnet18
    from smoothhess.reproduce.weights import load_weights

    network = resnet18()
    load_weights(network, data / "resnet18_cifar10.safetensors")
    inputs = cifar10(data, n_val=1).test.inputs[:images].to(device)
    yield from image_cases("CIFAR10 ResNet-18", network.eval().to(device), inputs, 250_000)


def image_cases(name: str, network: nn.Module, inputs: Tensor, reference_calls: int) -> Iterator[Case]:
    with torch.no_grad():
        target = network(inputs).argmax(1).tolist()
    d = inputs[0].numel()
    for epsilon in (0.25, 1.0):
        sigma = 0.75 * epsilon / math.sqrt(d)
        yield Case(f"{name}, d = {d}, ε = {epsilon:g}", network, inputs, target, sigma, reference_calls)


# --- the measurement --------------------------------------------------------------------------------------------------


def estimate(case: Case, index: int, calls: int, design: str, seed: int) -> Interactions:
    target = None if case.target is None else case.target[index]
    return SmoothHess(case.model).attribute(
        case.inputs[index : index + 1],
        target,
        gaussian=Isotropic(case.sigma),
        n_calls=calls,
        design=design,
        seed=seed,
        control=None,
        shrink=False,
    )


def reference_halves(case: Case, index: int, scale: float) -> tuple[Tensor, Tensor]:
    """Two independent estimates of the truth, (d, d) each; the same matrix twice where it is exact."""
    if case.truth is not None:
        return case.truth[index].double(), case.truth[index].double()
    calls = 2 * round(case.reference_calls * scale / 2)
    a, b = (estimate(case, index, calls, "antithetic", 10_000 + s).hessian[0].double() for s in (0, 1))
    return a, b


def relative_errors(hessian: Tensor, halves: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """In the Frobenius norm (free of the reference's noise) and in the operator norm."""
    a, b = halves
    h = hessian.double()
    squared = float(((h - a) * (h - b)).sum() / (a * b).sum())
    middle = (a + b) / 2
    operator = float(_operator_norm(h - middle) / _operator_norm(middle))
    return math.copysign(math.sqrt(abs(squared)), squared), operator


def _operator_norm(matrix: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(matrix).abs().max()  # of a symmetric matrix; an SVD takes ten times as long


def measure(
    case: Case, designs: list[str], budgets: list[int], scale: float
) -> dict[tuple[str, int], list[dict[str, float]]]:
    """For each design and budget, one record per image."""
    records: dict[tuple[str, int], list[dict[str, float]]] = {}
    for index in range(len(case.inputs)):
        halves = reference_halves(case, index, scale)
        for design in designs:
            for calls in budgets:
                result = estimate(case, index, calls, design, seed=index)
                fro, op = relative_errors(result.hessian[0], halves)
                records.setdefault((design, calls), []).append(
                    {
                        "fro": fro,
                        "op": op,
                        "estimated": float(result.relative_error[0]),
                        "deviation": float(result._noise.of_frobenius[0].sqrt()),
                        "norm": math.sqrt(max(float((halves[0] * halves[1]).sum()), 0.0)),
                    }
                )
        print(f"    {case.name}: image {index + 1} of {len(case.inputs)}", file=sys.stderr, flush=True)
    return records


def mean_of(values: list[float]) -> float:
    return sum(values) / len(values)


def geometric(values: list[float]) -> float:
    return math.exp(mean_of([math.log(v) for v in values]))


def report(case: Case, designs: list[str], budgets: list[int], scale: float) -> list[str]:
    """Markdown: errors, calls ratios, and how good the error bars are."""
    records = measure(case, designs, budgets, scale)
    lines = [
        f"### {case.name}",
        "",
        f"{len(case.inputs)} inputs, σ = {case.sigma:.4g}. Mean relative error (Frobenius / operator norm):",
        "",
    ]
    lines += ["| calls | calls/2d | " + " | ".join(designs) + " |", "|---" * (len(designs) + 2) + "|"]
    for calls in budgets:
        means = [[mean_of([r[norm] for r in records[d, calls]]) for norm in ("fro", "op")] for d in designs]
        cells = [f"{fro:.3f} / {op:.3f}" for fro, op in means]
        lines.append(f"| {calls} | {calls / 2 / case.d:.2f} | " + " | ".join(cells) + " |")
    if {"antithetic", "orthogonal"} <= set(designs):
        lines += [
            "",
            "Calls that the antithetic estimator needs for the error of the orthogonal one, over the calls of "
            "the latter (its error falls as 1/√n, so the ratio is that of squared errors):",
            "",
        ]
        lines += ["| calls | geometric mean | worst input |", "|---|---|---|"]
        for calls in budgets:
            pairs = zip(records["antithetic", calls], records["orthogonal", calls], strict=True)
            ratios = [(a["fro"] / o["fro"]) ** 2 for a, o in pairs if o["fro"] > 0 and a["fro"] > 0]
            if ratios:
                lines.append(f"| {calls} | {geometric(ratios):.2f}× | {min(ratios):.2f}× |")
    lines += ["", "Error bars: estimated ‖Ĥ − H‖ over the true one, median over inputs (orthogonal):", ""]
    lines += [
        "| rows / d | " + " | ".join(f"{c / 2 / case.d:.2f}" for c in budgets) + " |",
        "|---" * (len(budgets) + 1) + "|",
    ]
    cells = []
    for calls in budgets:
        ratio = [r["deviation"] / (r["fro"] * r["norm"]) for r in records["orthogonal", calls] if r["fro"] > 0]
        cells.append(f"{sorted(ratio)[len(ratio) // 2]:.2f}" if ratio else "–")
    lines += ["| estimated / true | " + " | ".join(cells) + " |", ""]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("SMOOTHHESS_DATA"), help="folder with MNIST, CIFAR10 and weights"
    )
    parser.add_argument("--only", choices=["closed", "digits", "mnist", "cifar10"], help="one network")
    parser.add_argument("--images", type=int, default=3, help="inputs per network")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--reference", type=float, default=1.0, help="share of the full reference calls to spend")
    parser.add_argument("--designs", nargs="+", default=["antithetic", "orthogonal"])
    parser.add_argument(
        "--blocks", nargs="+", type=float, default=[0.25, 0.5, 1, 2, 8], help="budgets in blocks of 2d calls"
    )
    parser.add_argument("--write", type=Path, help="write the tables to this file too")
    options = parser.parse_args()

    makers: dict[str, Callable[[], Iterator[Case]]] = {
        "closed": lambda: closed_form_case(options.device, options.images),
        "digits": lambda: digits_case(options.device, options.images),
    }
    if options.data:
        data = Path(options.data)
        makers["mnist"] = lambda: mnist_case(options.device, options.images, data)
        makers["cifar10"] = lambda: cifar_case(options.device, options.images, data)
    chosen = [options.only] if options.only else list(makers)
    if missing := [name for name in chosen if name not in makers]:
        parser.error(f"{missing[0]} needs --data DIR (or SMOOTHHESS_DATA).")
    machine = torch.cuda.get_device_name() if options.device.startswith("cuda") else f"{platform.machine()} CPU"
    shown = ["DIR" if word == str(options.data) else word for word in sys.argv[1:]]
    command = " ".join(["python benchmarks/efficiency.py", *shown])
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    lines = [
        f"{machine}, {torch.get_num_threads()} thread(s), {versions}, {time.strftime('%Y-%m-%d')}",
        f"`{command}`",
        "",
    ]
    for name in chosen:
        for case in makers[name]():
            budgets = [2 * max(1, round(case.d * b)) for b in options.blocks]
            lines += report(case, options.designs, budgets, options.reference)
            if options.write:  # what is finished is kept
                options.write.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
