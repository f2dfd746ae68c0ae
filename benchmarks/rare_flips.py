"""Coverage where a neuron that few draws flip carries much of H, with the share of runs that warn.

    OMP_NUM_THREADS=1 python benchmarks/rare_flips.py [--seeds 200]

f = relu(a·x − t σ) + b·x + xᵀQx/2 in 16 dimensions has a closed form. It is explained with its ReLU recorded, with and
without control variate, and as a black box. "silent" are runs that neither warn nor report an unknown error; coverage
is that of the 20 pairs with the largest true values over silent runs, width the median half-width over that of an
oracle, 1.96 times the standard deviation of the estimates over all seeds (NaN if no seed flips the neuron).
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import smoothhess as sh

Model = Callable[..., Any]
D, SIGMA = 16, 0.1
MARGINS, CALLS = (1.0, 2.0, 2.5, 3.0, 3.5, 4.0), (32, 128, 512)


def functions(margin: float) -> tuple[dict[str, tuple[Model, str | None]], Tensor]:
    """The same function in three forms with the control to use, and its smoothed Hessian at 0."""
    rng = torch.Generator().manual_seed(0)
    a = torch.nn.functional.normalize(torch.randn(D, generator=rng, dtype=torch.float64), dim=0)
    b = torch.randn(D, generator=rng, dtype=torch.float64)
    q = torch.randn(D, D, generator=rng, dtype=torch.float64)
    q = 0.012 * (q + q.mT)

    def recorded(x: Tensor) -> Tensor:
        return torch.relu(x @ a - margin * SIGMA) + x @ b + ((x @ q) * x).sum(1) / 2

    def gradient(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x = torch.from_numpy(points)
        step = (x @ a > margin * SIGMA).to(x)
        return recorded(x).numpy(), (step[:, None] * a + b + x @ q).numpy()

    density = math.exp(-(margin**2) / 2) / math.sqrt(2 * math.pi) / SIGMA
    forms = {
        "recorded, control=None": (recorded, None),
        "recorded, default": (recorded, "auto"),
        "black box": (sh.from_gradient(gradient), "auto"),
    }
    return forms, density * torch.outer(a, a) + q


def explained(model: Model, control: str | None, calls: int, seeds: int) -> tuple[sh.Interactions, Tensor]:
    """The results of all seeds, and which of them warn or report an unknown error, (seeds,)."""
    x, parts, loud = torch.zeros(1, D, dtype=torch.float64), [], []
    for seed in range(seeds):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            part = sh.SmoothHess(model).attribute(x, sigma=SIGMA, n_calls=calls, seed=seed, control=control)
        parts.append(part.unshrunk())
        loud.append(bool(caught) or bool(part.stderr().isnan().any()))
    return sh.Interactions.cat(parts), torch.tensor(loud)


def row(model: Model, control: str | None, calls: int, truth: Tensor, seeds: int) -> str:
    """Coverage, share of warnings and width of one case."""
    result, loud = explained(model, control, calls, seeds)
    i, j = torch.triu_indices(D, D, 1)
    top = truth[i, j].abs().argsort(descending=True)[:20]
    i, j = i[top], j[top]
    rows = [result.row(k).interval() for k in range(D)]
    low, high = (torch.stack([interval[side] for interval in rows], 1)[:, i, j] for side in (0, 1))
    held = ((low <= truth[i, j] + 1e-12) & (truth[i, j] - 1e-12 <= high)).double()
    silent = ~loud
    coverage = f"{float(held[silent].mean()):8.3f}" if bool(silent.any()) else "       –"
    spread = 1.96 * result.hessian[:, i, j].std(0)
    width = ((high - low) / 2)[silent].median(0).values / spread if bool(silent.any()) else torch.full((1,), math.nan)
    wide = float(width.median()) if float(spread.max()) > 1e-9 else math.nan
    return f"{coverage}  {float(loud.double().mean()):6.2f}  {wide:6.2f}"


def main() -> None:
    """Print a table for each form of the function."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    seeds = parser.parse_args().seeds
    for name in functions(1.0)[0]:
        print(f"{name}\n  margin  calls  expected flips  coverage  warned   width")
        for margin in MARGINS:
            forms, truth = functions(margin)
            for calls in CALLS:
                flips = calls / 2 * math.erfc(margin / 2**0.5)
                print(
                    f"  {margin:6.1f}  {calls:5d}  {flips:14.2f}  {row(*forms[name], calls, truth, seeds)}", flush=True
                )


if __name__ == "__main__":
    main()
