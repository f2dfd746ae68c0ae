"""What sampling tail strata separately is worth where rare events carry the Hessian: error, coverage and cost.

    OMP_NUM_THREADS=1 python benchmarks/tail_strata.py [--seeds 100] [--write]

Each function is explained with tails="auto" (the default) and tails=None. "error" is the median of ‖Ĥ − H‖/‖H‖ of the
reported estimate, "coverage" that of the 95 % intervals of the ten pairs that top_pairs reports, over all runs and over
those that do not warn; "found" is the share of runs with strata. Truths are closed forms, a two-dimensional quadrature,
and for the softmax a run of 400 000 calls.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_wine
from torch import Tensor, nn

import smoothhess as sh

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "rare_events.md"
MARK = "<!-- the rest is written by benchmarks/tail_strata.py -->"
F64, PAIRS = torch.float64, 10


@dataclass(frozen=True)
class Case:
    """A function, the input (1, d), and its smoothed Hessian."""

    name: str
    model: Callable[..., Any]
    x: Tensor
    sigma: float
    hessian: Tensor
    options: dict[str, Any]


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def hidden_layer_hessian(w: Tensor, b: Tensor, a: Tensor, x: Tensor, sigma: float) -> Tensor:
    """Σ a φ(s/τ)/τ w wᵀ of one hidden layer of ReLUs."""
    s, tau = w @ x + b, sigma * w.norm(dim=1)
    return (w.T * (a * torch.exp(-((s / tau) ** 2) / 2) / math.sqrt(2 * math.pi) / tau)) @ w


def black_box(f: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def value_and_gradient(z: Tensor) -> tuple[Tensor, Tensor]:
        z = z.clone().requires_grad_()
        value = f(z)
        return value.detach(), torch.autograd.grad(value.sum(), z)[0]

    return sh.from_gradient(value_and_gradient, numpy=False)


def far_kinks() -> Iterator[Case]:
    """A hidden layer of 24 neurons, and one neuron t τ from its kink that carries as much of H as all of them."""
    d, sigma = 12, 0.5
    w, b, a, x = normal(0, 24, d) / d**0.5, 0.3 * normal(1, 24), normal(2, 24) / 24**0.5, normal(3, d)
    far = nn.functional.normalize(normal(4, d), dim=0)
    for margin in (2.5, 3.0, 4.0, 5.0):
        density = math.exp(-(margin**2) / 2) / math.sqrt(2 * math.pi)
        jump = hidden_layer_hessian(w, b, a, x, sigma).norm() * sigma / density
        weight, bias = torch.cat([w, far[None]]), torch.cat([b, (-margin * sigma - far @ x)[None]])
        out = torch.cat([a, jump[None]])

        def f(z: Tensor, weight: Tensor = weight, bias: Tensor = bias, out: Tensor = out) -> Tensor:
            return torch.relu(z @ weight.T + bias) @ out

        true = hidden_layer_hessian(weight, bias, out, x, sigma)
        yield Case(f"kink at {margin:g} τ, black box", black_box(f), x[None], sigma, true, {"max_calls": 4000})


class DeepPair(nn.Module):
    """A hidden layer, and a neuron behind two others that flips in 0.3 % of the draws."""

    def __init__(self, w: Tensor, b: Tensor, a: Tensor, inner: Tensor) -> None:
        super().__init__()
        self.w, self.b, self.a, self.inner = w, b, a, inner
        self.c = torch.tensor([0.2, -0.1], dtype=F64)

    def forward(self, z: Tensor) -> Tensor:
        inner = torch.relu(z @ self.inner.T + self.c).sum(1)
        return torch.relu(z @ self.w.T + self.b) @ self.a + 300 * torch.relu(inner - 2.2)


def deep_pairs() -> Iterator[Case]:
    d, sigma = 24, 0.5
    w, b, a = normal(0, 48, d) / d**0.5, 0.3 * normal(1, 48), normal(2, 48) / 48**0.5
    inner = torch.linalg.qr(normal(3, d, 2))[0].T
    net = DeepPair(w, b, a, inner)
    z = torch.linspace(-8, 8, 3001, dtype=F64)
    p = torch.exp(-z.square() / 2) / torch.exp(-z.square() / 2).sum()
    first, second = sigma * z[:, None] + net.c[0], sigma * z[None] + net.c[1]
    on = (torch.relu(first) + torch.relu(second) > 2.2) * p[:, None] * p[None]
    slopes = torch.stack([on * (first > 0), on * (second > 0)])
    moments = torch.stack([(slopes * z[:, None]).sum((1, 2)), (slopes * z[None]).sum((1, 2))])
    x = torch.zeros(d, dtype=F64)
    true = hidden_layer_hessian(w, b, a, x, sigma) + inner.T @ (300 * (moments + moments.T) / 2 / sigma) @ inner
    yield Case("neuron behind two others, defaults", net, x[None], sigma, true, {"max_calls": 4000})
    yield Case("the same, 400 calls", net, x[None], sigma, true, {"n_calls": 400})
    yield Case("the same, control=None", net, x[None], sigma, true, {"max_calls": 4000, "control": None})


def saturated() -> Iterator[Case]:
    """The probability of the predicted class of a network that is certain of it (wine data)."""
    torch.manual_seed(2)
    table, labels = map(torch.tensor, load_wine(return_X_y=True))
    table = ((table - table.mean(0)) / table.std(0)).float()
    net = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(600):
        rows = torch.randint(len(table), (128,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(table[rows]), labels[rows]).backward()
        optimizer.step()
    net, x = net.double(), table[:1].double()

    def probability(z: Tensor) -> Tensor:
        return torch.softmax(net(z), 1)[:, 0]

    for sigma in (0.3, 1.0):
        long = sh.SmoothHess(probability).attribute(
            x, sigma=sigma, n_calls=400_000, control=None, shrink=False, seed=999
        )
        yield Case(f"saturated softmax, σ = {sigma:g}", probability, x, sigma, long.hessian[0], {})


def measured(case: Case, tails: str | None, seeds: int) -> list[str]:
    """Errors, coverage and cost of one case."""
    inputs = case.x.expand(seeds, -1).contiguous()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = sh.SmoothHess(case.model).attribute(
            inputs, sigma=case.sigma, seed=range(seeds), tails=tails, **case.options
        )
        few = result.estimate.has_heavy_tails | result.relative_error.isnan()
    error = (result.hessian - case.hessian).flatten(1).norm(dim=1) / case.hessian.norm()
    pairs = result.top_pairs(PAIRS)
    covered = torch.tensor([[float(p.low <= case.hessian[p.i, p.j] <= p.high) for p in one] for one in pairs])
    silent = covered[~few]
    found = 0.0 if result.statistics.tails is None else float(result.statistics.tails.strata.exist.double().mean())
    return [
        f"{float(error.median()):.3f} ({float(error.max()):.2f})",
        f"{float(result.relative_error.nanmedian()):.3f}",
        f"{float(covered.mean()):.2f}",
        f"{float(silent.mean()):.2f}" if len(silent) else "–",
        f"{float(few.double().mean()):.0%}",
        f"{found:.0%}",
        f"{float(result.n_passes.median()):.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/rare_events.md")
    given = parser.parse_args()
    head = ["function", "tails", "error (largest)", "reported", "coverage", "of silent runs", "warn", "found", "passes"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    print(*lines, sep="\n", flush=True)
    for cases in (far_kinks, deep_pairs, saturated):
        for case in cases():
            for tails in (None, "auto"):
                row = [case.name, str(tails), *measured(case, tails, given.seeds)]
                lines.append("| " + " | ".join(row) + " |")
                print(lines[-1], flush=True)
    if given.write:
        where = f"{time.strftime('%Y-%m-%d')}, CPU ({platform.machine()}), {torch.get_num_threads()} thread(s)"
        about = f"`python benchmarks/tail_strata.py --seeds {given.seeds}`, {where}, torch {torch.__version__}"
        text = PAGE.read_text().split(MARK)[0]
        PAGE.write_text(f"{text}{MARK}\n\n{about}\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
