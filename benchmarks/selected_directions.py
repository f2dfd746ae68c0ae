"""Do 95 % intervals hold for what the draws have chosen: eigenvalues 1 to 4, and the strongest pairs?

    python benchmarks/selected_directions.py
    python benchmarks/selected_directions.py --dimensions 8 --blocks 2 --seeds 50

Networks with one hidden layer of ReLUs have an exact Hessian, of which the control variate leaves no residual. For the
network with two hidden layers the truth is a long run with the control variate. An eigenvalue is compared with that of
the true Hessian at the same place: the p-th largest, or the p-th smallest among the negative ones.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
import warnings
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor, nn

import smoothhess as sh

SIGMA, VALUES, PAIRS = 0.5, 4, 5
REFERENCE_BLOCKS, REFERENCE_SEEDS = 256, 16


class OneHidden(nn.Module):
    """Σ_j u_j relu(a_j·x + b_j)."""

    def __init__(self, d: int, width: int, decay: float) -> None:
        super().__init__()
        rng = Generator().manual_seed(d)
        self.a = nn.Parameter(torch.randn(width, d, generator=rng, dtype=torch.float64) / math.sqrt(d))
        self.b = nn.Parameter(0.3 * torch.randn(width, generator=rng, dtype=torch.float64))
        u = torch.randn(width, generator=rng, dtype=torch.float64)
        self.u = nn.Parameter(u * torch.linspace(1, 0, width, dtype=torch.float64) ** decay)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.a.mT + self.b) @ self.u

    @torch.no_grad()
    def hessian(self, x: Tensor) -> Tensor:
        """Σ_j u_j φ(c_j)/τ_j a_j a_jᵀ with τ_j = σ|a_j| and c_j = (a_j·x + b_j)/τ_j."""
        tau = SIGMA * self.a.norm(dim=1)
        density = torch.exp(-(((self.a @ x + self.b) / tau) ** 2) / 2) / math.sqrt(2 * math.pi)
        return (self.a.mT * (self.u * density / tau)) @ self.a


@dataclass(frozen=True, eq=False)
class Case:
    """A network, an input, the true Hessian, and the control variates to use."""

    name: str
    model: nn.Module
    x: Tensor  # (d,)
    truth: Tensor  # (d, d)
    controls: tuple[str | None, ...]


def cases(d: int) -> list[Case]:
    """The networks with d inputs."""
    x = torch.randn(d, generator=Generator().manual_seed(d + 1), dtype=torch.float64)
    found = []
    for name, width, decay in (("8d neurons", 8 * d, 0.0), ("2d, few strong", 2 * d, 6.0), ("8 neurons", 8, 0.0)):
        model = OneHidden(d, width, decay)
        found.append(Case(name, model, x, model.hessian(x), (None, "kink")))
    torch.manual_seed(0)
    deep = nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, 2 * d), nn.ReLU(), nn.Linear(2 * d, 1))
    deep = deep.double()
    long = attribute(deep, x, REFERENCE_BLOCKS, range(10_000, 10_000 + REFERENCE_SEEDS), "kink")
    return [*found, Case("two layers of 2d", deep, x, long.unshrunk().hessian.mean(0), (None, "kink"))]


def attribute(model: nn.Module, x: Tensor, blocks: int, seeds: range, control: str | None) -> sh.Interactions:
    """One input with many seeds."""
    batch = x.expand(len(seeds), -1).contiguous()
    return sh.SmoothHess(model).attribute(
        batch, target=None, sigma=SIGMA, n_calls=2 * blocks * len(x), control=control, seed=[*seeds]
    )


def at_places(truth: Tensor, values: Tensor) -> Tensor:
    """The true eigenvalues at the places of the reported ones, (B, k)."""
    ordered, positive = torch.linalg.eigvalsh(truth).flip(0), values >= 0
    return ordered[torch.where(positive, positive.cumsum(1) - 1, len(ordered) - (~positive).cumsum(1))]


def share(ends: tuple[Tensor, Tensor], truth: Tensor) -> Tensor:
    """Share of the examples whose interval holds the truth."""
    return ((ends[0] <= truth) & (truth <= ends[1])).double().mean(0)


def pairs_covered(result: sh.Interactions, truth: Tensor, selection: Literal["all", "split"]) -> float:
    """Share of the intervals of the reported pairs that hold the truth."""
    found = [p for pairs in result.top_pairs(PAIRS, selection=selection) for p in pairs]
    return sum(p.low <= float(truth[p.i, p.j]) <= p.high for p in found) / len(found)


def row(case: Case, blocks: int, seeds: int, control: str | None) -> str:
    """One row of the table."""
    result = attribute(case.model, case.x, blocks, range(seeds), control)
    pairs = result.eigh(VALUES)
    truth = at_places(case.truth, pairs.values)
    covered = share(pairs.interval(), truth)
    bias = (pairs.estimate.value - truth).mean(0) / pairs.stderr.mean(0)
    v = result.unshrunk().eigh(1).vectors[:, 0]
    in_sample = share(result.bilinear(v, v).interval(), ((v @ case.truth) * v).sum(-1))
    cells = [
        " ".join(f"{c:.2f}" for c in covered),
        " ".join(f"{b:+.2f}" for b in bias).replace("-", "−"),
        f"{float(in_sample):.2f}",
        f"{pairs_covered(result, case.truth, 'all'):.3f}",
        f"{pairs_covered(result, case.truth, 'split'):.3f}",
    ]
    return f"| {case.name} | {len(case.x)} | {control} | {blocks} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dimensions", nargs="+", type=int, default=[8, 24, 64])
    parser.add_argument("--blocks", nargs="+", type=int, default=[2, 4, 16])
    parser.add_argument("--seeds", type=int, default=200)
    options = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    command = " ".join(["python benchmarks/selected_directions.py", *sys.argv[1:]])
    print(f"{platform.machine()} CPU, {versions}; `{command}`\n")
    print(
        "| network | d | control | blocks | coverage of λ₁ … λ₄ | bias / se of λ₁ … λ₄ | coverage of v̂ᵀHv̂ by "
        "`bilinear(v̂, v̂)` | pairs, default | pairs, split |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for d in options.dimensions:
        for case in cases(d):
            for control in case.controls:
                for blocks in options.blocks:
                    print(row(case, blocks, options.seeds, control), flush=True)


if __name__ == "__main__":
    main()
