"""Error against work: how many passes does the paper's estimator need for the error that ours reaches?

    python benchmarks/efficiency.py                        networks that are trained here, on the CPU in minutes
    python benchmarks/efficiency.py --data DIR             MNIST with the authors' weights, CIFAR10 ResNet-18, too
    python benchmarks/efficiency.py --data DIR --only mnist --device cuda --images 20

The truth is the closed form where there is one. Elsewhere it is made here, in two independent unbiased halves R₁ and
R₂ (orthogonal design, control variate, no denoising), and error² = ⟨Ĥ − R₁, Ĥ − R₂⟩ / ⟨R₁, R₂⟩: neither the
reference's own noise nor a bias of ours can hide. The error in the operator norm is taken against (R₁ + R₂)/2 and holds
its noise too.

Passes count all work in gradient calls, frozen passes included. The paper's antithetic estimator is run at four blocks
(8d calls); its error falls as 1/√n, so the passes it needs for an error e are 8d (e_antithetic/e)².
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import time
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import cases
import torch
from cases import Case
from torch import Tensor

from smoothhess import Interactions, Isotropic, SmoothHess, perturbation_mse

METHODS: dict[str, dict[str, Any]] = {
    "orthogonal": {"control": None, "shrink": False},
    "black box": {"control": None, "shrink": True},
    "unbiased": {"control": "auto", "shrink": False},
    "defaults": {},
}
PAPER = {"design": "antithetic", "control": None, "shrink": False}


def estimate(case: Case, index: int, calls: int, seed: int, **options: Any) -> Interactions:
    target = None if case.target is None else case.target[index]
    return SmoothHess(case.model).attribute(
        case.inputs[index : index + 1], target, gaussian=Isotropic(case.sigma), n_calls=calls, seed=seed, **options
    )


# --- errors -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """Two independent estimates of the Hessian; the same matrix twice where it is known."""

    first: Tensor  # (d, d) float64
    second: Tensor

    @staticmethod
    def of(case: Case, index: int, blocks: int) -> Truth:
        if case.truth is not None:
            exact = case.truth[index].double()
            return Truth(exact, exact)
        halves = [
            estimate(case, index, 2 * case.d * blocks, 10_000 + s, control="kink", shrink=False).hessian[0].double()
            for s in (0, 1)
        ]
        return Truth(*halves)

    def errors(self, hessian: Tensor) -> tuple[float, float]:
        """Relative errors in the Frobenius and in the operator norm."""
        h, a, b = hessian.double(), self.first, self.second
        squared = float(((h - a) * (h - b)).sum() / (a * b).sum())
        return math.sqrt(max(squared, 1e-12)), _operator_norm(h - (a + b) / 2) / self.size

    @cached_property
    def size(self) -> float:
        return _operator_norm((self.first + self.second) / 2)


def _operator_norm(matrix: Tensor) -> float:
    return float(torch.linalg.eigvalsh(matrix.float()).abs().max())  # of a symmetric matrix; an SVD takes much longer


@dataclass
class Run:
    """One method at one budget on all images."""

    passes: list[float] = field(default_factory=list)
    fro: list[float] = field(default_factory=list)
    op: list[float] = field(default_factory=list)
    honest: list[float] = field(default_factory=list)  # reported over true error
    gain: list[float] = field(default_factory=list)  # passes of the paper's estimator over ours, Frobenius norm
    gain_op: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)  # our error over that of orthogonal at as many passes,
    paper: list[float] = field(default_factory=list)  # and over that of antithetic


@dataclass
class Closed:
    """The closed form alone on all images."""

    error: list[float] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)
    flagged: list[bool] = field(default_factory=list)


def measure(case: Case, budgets: list[int], blocks: int) -> tuple[dict[tuple[str, int], Run], Closed, list[float]]:
    """Runs by method and calls, the closed form, and the paper's errors at 8d calls."""
    runs: dict[tuple[str, int], Run] = {}
    closed, paper = Closed(), []
    paper_calls = 8 * case.d
    for index in range(len(case.inputs)):
        truth = Truth.of(case, index, blocks)
        errors = [truth.errors(estimate(case, index, paper_calls, 500 + s, **PAPER).hessian[0]) for s in (0, 1)]
        theirs, theirs_op = (math.sqrt(mean_of([e[n] ** 2 for e in errors])) for n in (0, 1))
        paper.append(theirs)
        for name, options in METHODS.items():
            for calls in budgets:
                result = estimate(case, index, calls, seed=index, **options)
                passes = float(result.n_passes[0])
                fro, op = truth.errors(result.hessian[0])
                run = runs.setdefault((name, calls), Run())
                run.passes.append(passes)
                run.fro.append(fro)
                run.op.append(op)
                run.honest.append(float(result.relative_error[0]) / fro)
                run.gain.append(paper_calls * (theirs / fro) ** 2 / passes)
                run.gain_op.append(paper_calls * (theirs_op / op) ** 2 / passes)
                if name == "defaults":
                    spent = 2 * round(passes / 2)
                    plain = estimate(case, index, spent, seed=index, **METHODS["orthogonal"])
                    run.plain.append(fro / truth.errors(plain.hessian[0])[0])
                    run.paper.append(fro / (theirs * math.sqrt(paper_calls / spent)))
        target = None if case.target is None else case.target[index]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            alone = SmoothHess(case.model).closed_form(
                case.inputs[index : index + 1], target, gaussian=Isotropic(case.sigma), seed=index
            )
        closed.error.append(truth.errors(alone.hessian[0])[0])
        closed.seen.append(float(alone.error[0]))
        closed.flagged.append(bool(alone.suspect[0]))
        print(f"    {case.name}: image {index + 1} of {len(case.inputs)}", file=sys.stderr, flush=True)
    return runs, closed, paper


# --- tables -----------------------------------------------------------------------------------------------------------


def mean_of(values: list[float]) -> float:
    return sum(values) / len(values)


def geometric(values: list[float]) -> float:
    return math.exp(mean_of([math.log(v) for v in values]))


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def report(case: Case, budgets: list[int], blocks: int) -> list[str]:
    """Markdown: errors, gains, honesty of the reported error, never worse, closed form."""
    runs, closed, paper = measure(case, budgets, blocks)
    lines = [
        f"### {case.name}",
        "",
        f"{len(case.inputs)} inputs, σ = {case.sigma:.4g}. Paper's estimator at {8 * case.d} calls: error "
        f"{mean_of(paper):.3f}.",
        "",
        "| method | calls/2d | passes | error, Frobenius / operator | gain: mean (worst) | gain, operator norm | "
        "reported / true error: median (least) |",
        "|---|---|---|---|---|---|---|",
    ]
    for (name, calls), run in runs.items():
        gains = [f"{geometric(g):.3g}× ({min(g):.3g}×)" for g in (run.gain, run.gain_op)]
        lines.append(
            f"| {name} | {calls / 2 / case.d:.2f} | {mean_of(run.passes):.0f} | {mean_of(run.fro):.4f} / "
            f"{mean_of(run.op):.4f} | {gains[0]} | {gains[1]} | {median(run.honest):.2f} ({min(run.honest):.2f}) |"
        )
    lines += [
        "",
        "Defaults against estimators without control and denoising at as many passes, mean ratio of errors:",
        "",
        "| passes | over orthogonal | over antithetic |",
        "|---|---|---|",
    ]
    for calls in budgets:
        run = runs["defaults", calls]
        lines.append(f"| {mean_of(run.passes):.0f} | {mean_of(run.plain):.3f} | {mean_of(run.paper):.3f} |")
    flagged = sum(closed.flagged)
    lines += [
        "",
        f"Closed form alone, no samples: error {mean_of(closed.error):.4f} (up to {max(closed.error):.4f}); the check "
        f"of 512 calls says {mean_of(closed.seen):.4f}, and flags {flagged} of {len(closed.error)} as off by more than "
        f"0.1 (truly: {sum(e > 0.1 for e in closed.error)}).",
        "",
    ]
    return lines


def pmse_report(case: Case, calls: int, reference: int) -> list[str]:
    """P_MSE over the ball of radius ε: ours against a long plain run."""
    assert case.epsilon is not None
    ratios, passes = [], []
    for index in range(len(case.inputs)):
        target = None if case.target is None else case.target[index]
        ours = estimate(case, index, calls, seed=index)
        long = estimate(case, index, reference, seed=20_000, **METHODS["orthogonal"])
        scores = [
            float(
                perturbation_mse(
                    case.model, case.inputs[index : index + 1], r.taylor(), case.epsilon, target, n_samples=10_000
                )[0]
            )
            for r in (ours, long)
        ]
        ratios.append(scores[0] / scores[1])
        passes.append(float(ours.n_passes[0]))
        print(f"    {case.name}: P_MSE of image {index + 1}: {scores}", file=sys.stderr, flush=True)
    return [
        f"P_MSE over the ball of radius ε, {mean_of(passes):.0f} passes, over that of {reference} plain calls: mean "
        f"{mean_of(ratios):.3f}, worst {max(ratios):.3f}.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("SMOOTHHESS_DATA"), help="folder with MNIST, CIFAR10 and weights"
    )
    parser.add_argument("--only", nargs="+", choices=list(cases.MAKERS), help="some of the networks")
    parser.add_argument("--images", type=int, default=3, help="inputs per network")
    parser.add_argument("--epsilons", nargs="+", type=float, default=[0.25, 1.0, 4.0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--reference", type=int, default=32, help="blocks of 2d calls in each half of the reference")
    parser.add_argument(
        "--blocks", nargs="*", type=float, default=[0.25, 1, 2], help="budgets in blocks of 2d calls; none: P_MSE alone"
    )
    parser.add_argument("--pmse", type=int, metavar="CALLS", help="P_MSE of the defaults with so many calls, too")
    parser.add_argument("--pmse-reference", type=int, default=250_000, metavar="CALLS")
    parser.add_argument("--choose", action="store_true", help="other inputs: the ones that choices were made on")
    parser.add_argument("--write", type=Path, help="write the tables to this file too")
    options = parser.parse_args()

    data = Path(options.data) if options.data else None
    chosen = options.only or [name for name in cases.MAKERS if data or name not in cases.NEEDS_DATA]
    if missing := [name for name in chosen if name in cases.NEEDS_DATA and not data]:
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
        for case in cases.MAKERS[name](options.device, options.images, options.epsilons, data, choose=options.choose):
            budgets = sorted({2 * max(1, round(case.d * b)) for b in options.blocks})
            lines += report(case, budgets, options.reference) if budgets else [f"### {case.name}", ""]
            if options.pmse and case.epsilon is not None:
                lines += pmse_report(case, options.pmse, options.pmse_reference)
            if options.write:  # what is finished is kept
                options.write.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
