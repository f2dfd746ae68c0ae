"""Errors and 95 % intervals of the unbiased Hessian below one block, with and without the prediction of the other rows.

    python benchmarks/incomplete_blocks.py
    python benchmarks/incomplete_blocks.py --seeds 20 --shares 0.25

Both estimates are from the same draws. The truth is a closed form (quadratic functions, one hidden layer of ReLUs as a
black box), or a long run (two hidden layers, trained on the handwritten digits of scikit-learn).
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from cases import digits
from torch import Generator, Tensor

import smoothhess as sh
from smoothhess.estimate.fit_rows import fit_rows
from smoothhess.estimate.student_t import quantile
from smoothhess.estimate.unbiased_hessian import Unbiased
from smoothhess.estimate.variance import Noise

REFERENCE_BLOCKS = 2000


@dataclass(frozen=True, eq=False)
class Problem:
    """A function, an input (d,), the true Hessian (d, d), and the arguments of `attribute`."""

    name: str
    function: Callable[[Tensor], Tensor]
    x: Tensor
    truth: Tensor
    target: int | None
    sigma: float
    control: str | None = None


def quadratic(d: int, name: str, eigenvalues: Tensor) -> Problem:
    """½ xᵀMx with random eigenvectors."""
    rng = Generator().manual_seed(d)
    turn = torch.linalg.qr(torch.randn(d, d, generator=rng, dtype=torch.float64)).Q
    matrix = turn @ torch.diag(eigenvalues.double()) @ turn.mT

    def function(x: Tensor) -> Tensor:
        return ((x @ matrix) * x).sum(1) / 2

    return Problem(f"quadratic, {name}", function, torch.zeros(d, dtype=torch.float64), matrix, None, 0.5)


def one_hidden(d: int, width: int) -> Problem:
    """Σ_j u_j relu(a_j·x), with H = Σ_j u_j φ(c_j)/τ_j a_j a_jᵀ."""
    rng, sigma = Generator().manual_seed(d + width), 0.3
    a = torch.randn(width, d, generator=rng, dtype=torch.float64) / math.sqrt(d)
    u, x = (torch.randn(n, generator=rng, dtype=torch.float64) for n in (width, d))
    tau = sigma * a.norm(dim=1)
    density = torch.exp(-((a @ x / tau) ** 2) / 2) / math.sqrt(2 * math.pi)
    truth = (a.mT * (u * density / tau)) @ a
    return Problem(f"{width} ReLUs", lambda z: torch.relu(z @ a.mT) @ u, x, truth, None, sigma)


def trained(control: str | None) -> Problem:
    """The digits network, explained on a test image it was not trained on."""
    case = next(digits("cpu", 1, [1.0], None))
    x, target = case.inputs, None if case.target is None else case.target[0]
    explainer, calls = sh.SmoothHess(case.model), 2 * case.d * REFERENCE_BLOCKS
    truth = explainer.attribute(x, target, sigma=case.sigma, n_calls=calls, seed=10**6, shrink=False).hessian[0]
    name = "digits MLP" + ("" if control is None else ", closed form as control variate")
    return Problem(name, case.model, x[0], truth.double(), target, case.sigma, control)


def measure(problem: Problem, rows: int, seeds: int) -> list[str]:
    """The cells of one line of the table."""
    x = problem.x[None].expand(seeds, *problem.x.shape)
    options = {"sigma": problem.sigma, "n_calls": 2 * rows, "seed": range(seeds), "shrink": False, "tails": None}
    result = sh.SmoothHess(problem.function).attribute(x, problem.target, control=problem.control, **options)
    noise = result.noise
    fit = fit_rows(result.statistics, result.gaussian)
    without = Noise(noise.white, noise.features, noise.gaussian, torch.ones(seeds, dtype=torch.bool))
    cells, errors = [], []
    for kind in (without, Noise(noise.white, noise.features, noise.gaussian, without.no_kinks, fit)):
        error = kind.estimate.dense() - problem.truth
        variance = kind.of_entries()
        inside = error.abs() <= quantile(0.95, variance.df)[:, None, None] * variance.value.sqrt()
        width = (variance.value.mean(0).sqrt() / error.square().mean(0).sqrt().clamp_min(1e-300)).median()
        errors.append(float(error.square().sum((1, 2)).mean().sqrt() / problem.truth.norm()))
        cells.append(f"{errors[-1]:.2f} ({float(inside.double().mean()):.3f}, {float(width):.2f})")
        if kind is not without:
            cells.append(f"{_bias(kind.estimate, problem.truth):.2f}")
    return [f"{rows / problem.x.numel():.3g}", *cells, f"{(errors[0] / errors[1]) ** 2:.1f}"]


def _bias(estimate: Unbiased, truth: Tensor) -> float:
    """Root mean square over entries of the z-scores of the mean over seeds; about 1 without bias."""
    found = estimate.dense()
    return float(((found.mean(0) - truth) / (found.std(0) / math.sqrt(len(found)))).square().mean().sqrt())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.25, 0.5, 0.75])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    d = 64
    spiked = torch.zeros(d)
    spiked[:3] = torch.tensor([3.0, -2.0, 1.0])
    problems = [
        quadratic(d, "eigenvalues 1/i", 1 / torch.arange(1.0, d + 1)),
        quadratic(d, "rank 3", spiked),
        quadratic(d, "flat spectrum", torch.randn(d, generator=Generator().manual_seed(0))),
        one_hidden(d, 10),
        one_hidden(d, 100),
        trained(None),
        trained("auto"),
    ]
    print(f"{platform.machine()}, torch {torch.__version__}, {options.seeds} seeds\n")
    print("| function | share of a block | error (coverage, width) | with the prediction | z | ratio of variances |")
    print("|---|---|---|---|---|---|")
    for problem in problems:
        for share in options.shares:
            cells = measure(problem, int(share * problem.x.numel()), options.seeds)
            print(f"| {problem.name} | {' | '.join(cells)} |")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
