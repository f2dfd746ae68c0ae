"""The Hessian at 0 of a two-dimensional network by scale: SmoothHess by σ², SoftPlus by β, and the exact one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from paper.cells import Cells
from paper.experiments.plane import Trained
from paper.experiments.rings import ENTRIES, Rings
from paper.options import Options
from paper.tables import COLOURS
from smoothhess import SmoothHess, baselines
from smoothhess.estimate import student_t

__all__ = [
    "LABEL",
    "LOOK",
    "REACH",
    "RUNS",
    "Row",
    "agreement",
    "error_words",
    "estimate",
    "log_grid",
    "smooth_rows",
    "softplus_rows",
    "unseen_words",
    "within_from",
]

Row = dict[str, Any]
LOOK = {"H₁₁": (COLOURS[0], "^"), "H₁₂": (COLOURS[1], "o"), "H₂₂": (COLOURS[2], "v")}  # colour and marker
LABEL = {"H₁₁": "$H_{11}$", "H₁₂": "$H_{12}$", "H₂₂": "$H_{22}$"}


def log_grid(low: float, high: float, per_decade: int) -> list[float]:
    """Powers of ten from `low` to `high`, both powers of ten, with `per_decade` steps in each.

    >>> log_grid(0.01, 1, 2)
    [0.01, 0.0316228, 0.1, 0.316228, 1.0]
    """
    first, last = (round(math.log10(end) * per_decade) for end in (low, high))
    return [float(f"{10 ** (k / per_decade):.6g}") for k in range(first, last + 1)]


N_UNSEEN, NEAR = 65_536, 0.2  # new points of the square, and the radius of the disc of a quarter as many
RUNS = 32  # independent runs for each number
LEVEL = 0.95
REACH = float(student_t.quantile(LEVEL, torch.tensor(RUNS - 1.0)))  # standard errors in a 95 % interval


def smooth_rows(
    fitted: Trained,
    target: Callable[[Tensor], Tensor],
    cells: Cells,
    options: Options,
    sigma2: list[float],
    n_calls: list[int],
) -> list[Row]:
    """SmoothHess of the network at each σ², with the exact smoothed Hessian and the error of the same network.

    `n_calls` is one number for each σ², fixed in advance: stopping when the estimated error is small would bias it.
    The error is the root mean square of network − target over the Gaussian, e. By Cauchy and Schwarz the network's H₁₂
    differs from the target's by at most e/σ², its H₁₁ and H₂₂ by at most √2 e/σ².
    """
    double = fitted.in_double
    zero = torch.zeros(1, 2, dtype=torch.float64, device=options.device)

    def exact() -> dict[str, list[float]]:
        return Rings.of(lambda x: double(x)[:, 0], device=options.device).entries(sigma2)

    @torch.no_grad()
    def error() -> list[float]:
        def squared(x: Tensor) -> Tensor:
            return (double(x)[:, 0] - target(x)).square()

        mean = Rings.of(squared, device=options.device).expectation(torch.tensor(sigma2))
        return (mean + squared(zero)).sqrt().tolist()

    known = cells.compute({"exact": "network", "scales": len(sigma2)}, exact)
    errors = cells.compute({"error": "network", "scales": len(sigma2)}, error)
    rows = []
    for k, s2 in enumerate(tqdm(sigma2, desc="SmoothHess", disable=not options.show_progress)):
        # a separate seed for each σ, so that the errors at different σ are independent
        found = cells.compute(
            {"sigma2": s2},
            lambda s2=s2, k=k: _smooth_hessian(
                fitted.network, s2, n_calls[k], 1_000 * options.seed + k, options.device
            ),
        )
        row: Row = {"σ²": s2}
        for name in ENTRIES:
            row |= {name: found[name], f"{name} standard error": found[f"{name} standard error"]}
            row |= {f"{name} of the network": known[name][k]}
        rows.append({**row, "error of the network": errors[k], "calls": found["calls"]})
    return rows


def error_words(row: Row, allowed: float) -> str:
    """The bound that the error of the network implies for the error of its Hessian at one scale."""
    s2, error = row["σ²"], row["error of the network"]
    across, along = error / s2, math.sqrt(2) * error / s2
    return (
        f"at σ² = {s2:g} the network is off by {error:.2g} (root mean square over the Gaussian), which can put H₁₂ off "
        f"by up to {across:.2f} and H₁₁ by {along:.2f}; {allowed} is certain only below {allowed * s2:.2g}"
    )


def unseen_words(fitted: Trained, target: Callable[[Tensor], Tensor], device: str) -> str:
    """The error of the network at new points of the training square and at new points near 0."""
    generator = torch.Generator().manual_seed(1)
    square = 4 * torch.rand(N_UNSEEN, 2, generator=generator, dtype=torch.float64) - 2
    radius, angle = torch.rand(2, N_UNSEEN // 4, generator=generator, dtype=torch.float64)
    disc = NEAR * radius.sqrt()[:, None] * torch.stack([(math.tau * angle).cos(), (math.tau * angle).sin()], -1)
    double = fitted.in_double

    @torch.no_grad()
    def squared(points: Tensor) -> Tensor:
        return torch.cat([(double(x)[:, 0] - target(x)).square() for x in points.to(device).split(8_192)])

    whole, near = squared(square), squared(disc)
    return (
        f"at {len(square)} new points of the square: mean squared error {whole.mean():.2g}, median "
        f"{whole.median():.2g}; at {len(disc)} new points within {NEAR} of 0: mean {near.mean():.2g}"
    )


def within_from(rows: list[Row], name: str, truth: list[float], allowed: float) -> str:
    """The smallest σ² from which on an entry is near the truth at every scale, estimated and exact.

    >>> rows = [{"σ²": s, "H": h, "H of the network": h} for s, h in ((0.1, 1.0), (0.2, 2.0), (0.4, 1.1), (0.8, 1.0))]
    >>> within_from(rows, "H", [1.0] * 4, 0.2)
    'within 0.2 at every scale from σ² = 0.4 on (exact: 0.4)'
    """
    found = []
    for key in (name, f"{name} of the network"):
        outside = [k for k, row in enumerate(rows) if abs(row[key] - truth[k]) > allowed]
        first = outside[-1] + 1 if outside else 0
        found.append(f"{rows[first]['σ²']:.3g}" if first < len(rows) else "none")
    return f"within {allowed} at every scale from σ² = {found[0]} on (exact: {found[1]})"


def softplus_rows(fitted: Trained, cells: Cells, options: Options, beta: list[float]) -> list[Row]:
    """The Hessian of the network with SoftPlus at each β."""
    double = fitted.in_double
    rows: list[Row] = []
    for b in tqdm(beta, desc="SoftPlus", disable=not options.show_progress):
        found = cells.compute({"beta": b}, lambda b=b: _softplus_hessian(double, b, options.device))
        rows.append({"β": b, **found})
    return rows


def agreement(rows: list[Row], exact: str = "of the network", reach: float = REACH) -> str:
    """The distance of the estimates from the exact Hessians, in standard errors.

    Estimates without any kink in their draws have a standard error of zero and are left out.
    """
    scores = [
        abs(row[name] - row[f"{name} {exact}"]) / row[f"{name} standard error"]
        for row in rows
        for name in ENTRIES
        if row[f"{name} standard error"] > 0
    ]
    within = 100 * sum(z <= reach for z in scores) / len(scores)
    return (
        f"SmoothHess against the exact Hessian of the smoothed network: {within:.1f} % of {len(scores)} entries within "
        f"their 95 % intervals, farthest {max(scores):.1f} standard errors"
    )


def estimate(row: Row, name: str) -> str:
    """An entry with its standard error, for tables."""
    return f"{row[name]:.3f} ± {row[f'{name} standard error']:.3f}"


def _smooth_hessian(network: nn.Module, sigma2: float, n_calls: int, seed: int, device: str) -> dict[str, Any]:
    """SmoothHess at 0, the mean of `RUNS` independent runs, and the standard error over them, for a cell.

    A network that approximates a jump has very large gradients in a thin region, which few draws reach. Their
    contribution to the error is estimated by comparing runs; the standard error of a single run may miss it.
    """
    x = torch.zeros(RUNS, 2, device=device)
    seeds = [RUNS * seed + i for i in range(RUNS)]
    result = SmoothHess(network).attribute(
        x, 0, sigma=math.sqrt(sigma2), n_calls=n_calls // RUNS, seed=seeds, control=None
    )
    hessian = result.hessian.double()  # (RUNS, 2, 2)
    mean, stderr = hessian.mean(0), hessian.std(0) / math.sqrt(RUNS)
    found: dict[str, Any] = {name: float(mean[i, j]) for name, (i, j) in ENTRIES.items()}
    found |= {f"{name} standard error": float(stderr[i, j]) for name, (i, j) in ENTRIES.items()}
    return {**found, "calls": int(result.n_calls.sum())}


def _softplus_hessian(network: nn.Module, beta: float, device: str) -> dict[str, float]:
    """The Hessian at 0 of a float64 network with SoftPlus in the place of every ReLU, for a cell."""
    x = torch.zeros(1, 2, device=device, dtype=torch.float64)
    hessian = baselines.softplus(network, x, 0, beta=beta).hessian[0].tolist()
    return {name: hessian[i][j] for name, (i, j) in ENTRIES.items()}
