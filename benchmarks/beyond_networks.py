"""Coverage of 95 % intervals on functions that are not networks, with closed-form truth: where one block is not enough.

    python benchmarks/beyond_networks.py --seeds 200

Ridge functions Σ a φ(w·x + b), whose smoothed derivatives are one-dimensional integrals (Gauss–Hermite quadrature), and
sums of Gaussian bumps. None of them was used to choose a constant of the estimator; the bumps and the sum of |x| led to
the terms for mean curvature and for directions that no row moved. A cell shows the coverage and the median width over
that of an oracle interval ± 1.96 standard deviations.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import smoothhess as sh

F64 = torch.float64
NODES, WEIGHTS = (torch.from_numpy(v) for v in np.polynomial.hermite_e.hermegauss(160))


@dataclass(frozen=True)
class Problem:
    name: str
    function: Callable[[Tensor], Tensor]
    x: Tensor  # (d,)
    sigma: float
    hessian: Tensor  # (d, d)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def ridges(name: str, phi: Callable[[Tensor], Tensor], w: Tensor, x: Tensor, sigma: float) -> Problem:
    """Σ φ(w·x) over the rows of w."""
    tau = sigma * w.norm(dim=1)
    t = ((w @ x)[:, None] + tau[:, None] * NODES).requires_grad_()
    (first,) = torch.autograd.grad(phi(t).sum(), t, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), t)
    curvature = second.detach() @ (WEIGHTS / WEIGHTS.sum())
    return Problem(name, lambda z: phi(z @ w.mT).sum(1), x, sigma, (w.mT * curvature) @ w)


def absolute(d: int, sigma: float) -> Problem:
    """Σ |x|, with kinks up to 3 σ away."""
    x = sigma * torch.linspace(0, 3, d, dtype=F64)
    own = 2 * torch.exp(-((x / sigma) ** 2) / 2) / math.sqrt(2 * math.pi) / sigma
    return Problem("Σ |x|", lambda z: z.abs().sum(1), x, sigma, torch.diag(own))


def bumps(d: int, centres: int, sigma: float) -> Problem:
    """Σ exp(−|x − c|²/2w²)."""
    width = 1.2 * math.sqrt(d)
    c = width * normal(d, centres, d) / math.sqrt(d)
    spread = width**2 + sigma**2
    weight = (width**2 / spread) ** (d / 2) * torch.exp(-c.square().sum(1) / 2 / spread)
    hessian = (c.mT * weight) @ c / spread**2 - weight.sum() / spread * torch.eye(d, dtype=F64)
    return Problem(
        f"{centres} Gaussian bumps",
        lambda z: torch.exp(-(z[:, None] - c).square().sum(-1) / 2 / width**2).sum(1),
        torch.zeros(d, dtype=F64),
        sigma,
        hessian,
    )


def problems() -> list[Problem]:
    unit = normal(6, 1, 20)
    unit = unit / unit.norm()
    return [
        ridges("Σ x⁴", lambda t: t**4, torch.eye(50, dtype=F64), normal(1, 50), 0.5),
        ridges("cosh(w·x)", torch.cosh, unit, 0.3 * normal(2, 20), 1.0),
        ridges("exp(w·x)", torch.exp, unit, 0.3 * normal(2, 20), 1.0),
        ridges("20 sines", torch.sin, normal(7, 20, 20) / 20**0.5, normal(3, 20), 1.5),
        ridges("20 softplus units", torch.nn.functional.softplus, normal(8, 20, 20), normal(4, 20), 0.5),
        absolute(50, 0.5),
        bumps(40, 12, 0.5),
    ]


def judge(problem: Problem, blocks: float, seeds: int) -> str:
    d = len(problem.x)
    calls = 2 * max(1, round(blocks * d))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = sh.SmoothHess(problem.function).attribute(
            problem.x.expand(seeds, d).clone(), sigma=problem.sigma, n_calls=calls, seed=range(seeds), control=None
        )
    values, vectors = torch.linalg.eigh(problem.hessian)
    top = vectors[:, values.abs().argmax()].expand(seeds, d)
    ones = torch.ones(seeds, d, dtype=F64)
    cells = []
    for estimate, truth in (
        (result.diagonal(), problem.hessian.diagonal()),
        (result.row(1), problem.hessian[1]),
        (result.bilinear(top, top), top[0] @ problem.hessian @ top[0]),
        (result.bilinear(ones, ones), problem.hessian.sum()),
    ):
        low, high = estimate.interval()
        held = ((low <= truth) & (truth <= high)).double().mean()
        deviation = (estimate.value - truth).square().mean(0).sqrt()
        width = ((high - low).median(0).values / (2 * 1.96 * deviation.clamp_min(1e-300))).median()
        cells.append(f"{float(held):.2f}, {float(width):.2g}")
    true = torch.linalg.matrix_norm(result.hessian - problem.hessian) / problem.hessian.norm()
    ratio = float((result.relative_error / true).median())
    return f"| {problem.name}, d = {d} | {blocks:g} | {' | '.join(cells)} | {ratio:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    options = parser.parse_args()
    print(f"{platform.machine()} CPU, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, {options.seeds} seeds\n")
    print("| function | blocks | diagonal | one row | vᵀHv, v the top eigenvector | 1ᵀH1 | reported / true error |")
    print("|---|---|---|---|---|---|---|")
    for problem in problems():
        for blocks in (0.5, 1, 5):
            print(judge(problem, blocks, options.seeds), flush=True)


if __name__ == "__main__":
    main()
