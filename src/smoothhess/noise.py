"""How sure: the Monte-Carlo variance of what is read off the statistics.

Every estimate is a mean over independent units, so its variance is that of one unit divided by their number. One unit's
variance is measured on the head. All functions take statistics in the coordinates that the answer is wanted in.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from smoothhess.statistics import Statistics

ZERO_TEST_ROWS = 512  # rows whose products with each other tell noise from signal
BOOTSTRAPS = 16


def degrees_of_freedom(stats: Statistics) -> Tensor:
    """Of every variance in this file, (B,)."""
    return (stats.n_head - 1).clamp_min(0).double()


def of_mean(rows: Tensor, stats: Statistics) -> Tensor:
    """Variance of the mean over all rows of a quantity whose head values are `rows` (B, P, …); infinite for one row."""
    rows = rows.double()
    shape = (-1, *[1] * (rows.ndim - 2))
    head = stats.n_head.reshape(shape)
    mean = rows.sum(1) / head.clamp_min(1)
    real = _mask(stats).reshape(*rows.shape[:2], *[1] * (rows.ndim - 2))
    squares = ((rows - mean[:, None]).square() * real).sum(1)
    return _per_mean(squares, head, stats.n.reshape(shape))


def of_entries(stats: Statistics) -> Tensor:
    """Variance of each entry of the symmetrised estimate, (B, k, k)."""
    s, g = stats.head.score.double(), stats.head.odd.double()
    head = stats.n_head.reshape(-1, 1, 1)
    # Σ_i of the squares of A_i = (s gᵀ + g sᵀ)/2, entry by entry
    cross = s.square().mT @ g.square()
    square = (cross + cross.mT + 2 * (s * g).mT @ (s * g)) / 4
    mean = s.mT @ g / head.clamp_min(1)
    mean = (mean + mean.mT) / 2
    return _per_mean((square - head * mean.square()).clamp_min(0), head, stats.n.reshape(-1, 1, 1))


def of_frobenius(stats: Statistics) -> Tensor:
    """E‖Ĥ − H‖²_F: the variances of all entries, added up without making them, (B,)."""
    s, g = stats.head.score.double(), stats.head.odd.double()
    squares = (s.square().sum(-1) * g.square().sum(-1) + (s * g).sum(-1).square()) / 2  # ‖A_i‖²_F
    summed = squares.sum(-1) - stats.n_head * squared_norm(stats, head_only=True)
    floor = 1e-12 * squares.sum(-1)  # what rounding leaves of an exact zero
    return _per_mean(torch.where(summed > floor, summed, 0.0), stats.n_head, stats.n)


def squared_norm(stats: Statistics, head_only: bool = False) -> Tensor:
    """‖Ĥ‖²_F, (B,); never makes k × k where there are fewer rows than that."""
    s, g = stats.head.score, stats.head.odd
    if (stats.total is None or head_only) and s.shape[1] < stats.k:
        s, g = s.double(), g.double()
        inner = g @ s.mT
        square = ((s @ s.mT) * (g @ g.mT)).sum((-1, -2)) + (inner * inner.mT).sum((-1, -2))
        return square / 2 / stats.n_head.clamp_min(1).square()
    n = (stats.n_head if head_only else stats.n).clamp_min(1).reshape(-1, 1, 1)
    mean = (stats.head.sum() if head_only else stats.summed()) / n
    return ((mean + mean.mT) / 2).square().sum((-1, -2))


def explained(white: Statistics, features: Statistics, push: Callable[[Tensor], Tensor], mirrored: bool) -> Tensor:
    """Share of the gradient's variation around x that Ĥδ explains on gradients it has not seen, (B,).

    1 − E‖g − Ĝ − Ĥδ‖² / E‖g − G‖² over fresh draws. By Stein's identity Cov(g, δ) = HΣ, so the numerator is
    V − 2⟨HL, ĤL⟩ + ‖ĤL‖² + ‖Ĝ − G‖²; E⟨HL, ĤL⟩ = E‖ĤL‖² − noise, which needs no gradients set aside. `white` are the
    statistics of (s, γ), `features` the same after `push` to the input, (a, g).
    """
    s, y, a, g = (t.double() for t in (white.head.score, white.head.odd, features.head.score, features.head.odd))
    even, weight = features.head.even.double(), white.head.weight.double()
    n_head = white.n_head

    def inner(p: Tensor, q: Tensor) -> Tensor:
        return (p * q).sum(-1)

    # ‖A_i L‖² of each row's symmetrised estimate, and ‖ĤL‖² of their mean
    squares = (inner(a, a) * inner(y, y) + inner(g, g) * inner(s, s) + 2 * inner(a, g) * inner(s, y)) / 4
    head_norm = _one_sided_norm(white, features, push, head_only=True)
    spread = (squares.sum(-1) - n_head * head_norm).clamp_min(0)
    noise = _per_mean(spread, n_head, white.n)
    mean_even = even.sum(1) / n_head.clamp_min(1)[:, None]
    even_squares = (inner(even, even) / weight.clamp_min(1e-300)).sum(-1)  # rows of weight w stand for w draws
    variation = even_squares / n_head.clamp_min(1) - inner(mean_even, mean_even)
    if mirrored:
        variation = variation + (weight * inner(g, g)).sum(-1) / n_head.clamp_min(1)
    gradient_noise = of_mean(features.head.even, features).sum(-1)
    share = (_one_sided_norm(white, features, push) - 2 * noise - gradient_noise) / variation
    return torch.where(variation > 0, share, torch.nan)


def _one_sided_norm(
    white: Statistics, features: Statistics, push: Callable[[Tensor], Tensor], head_only: bool = False
) -> Tensor:
    """‖ĤL‖²_F, (B,)."""
    if (white.total is None or head_only) and white.head.odd.shape[1] < white.k:
        s, y, a, g = (t.double() for t in (white.head.score, white.head.odd, features.head.score, features.head.odd))
        square = ((a @ a.mT) * (y @ y.mT) + (g @ g.mT) * (s @ s.mT) + 2 * (a @ g.mT) * (y @ s.mT)).sum((-1, -2))
        return square / 4 / white.n_head.clamp_min(1).square()
    n = (white.n_head if head_only else white.n).clamp_min(1).reshape(-1, 1, 1)
    mean = (white.head.sum() if head_only else white.summed()) / n
    return push(((mean + mean.mT) / 2).to(white.gradient.dtype)).double().square().sum((-1, -2))


def zero_score(stats: Statistics) -> Tensor:
    """‖H‖² estimated without bias, in units of its standard deviation were H zero, (B,).

    ⟨A_i, A_j⟩ of different rows has mean ‖H‖²; its spread is measured on the first rows.
    """
    s, g = (t[:, :ZERO_TEST_ROWS].double() for t in (stats.head.score, stats.head.odd))
    products = ((s @ s.mT) * (g @ g.mT) + (s @ g.mT) * (g @ s.mT)) / 2
    products.diagonal(dim1=-2, dim2=-1).zero_()
    rows = stats.n_head.clamp_max(ZERO_TEST_ROWS)
    pairs = (rows * (rows - 1)).clamp_min(1)
    deviation = (2 * products.square().sum((-1, -2)) / pairs / (stats.n * (stats.n - 1)).clamp_min(1)).sqrt()
    signal = squared_norm(stats) - of_frobenius(stats)
    return torch.where(deviation > 0, signal / deviation, torch.where(signal > 0, torch.inf, 0.0))


def operator_norms(stats: Statistics, seed: int = 0) -> tuple[Tensor, Tensor]:
    """‖Ĥ‖₂ and the typical ‖Ĥ − H‖₂, (B,) each: the latter by giving the rows' deviations random signs."""
    s, g = stats.head.score.double(), stats.head.odd.double()
    rng = torch.Generator().manual_seed(seed)
    head = stats.n_head.reshape(-1, 1, 1).clamp_min(1)
    mean = stats.head.sum() / head
    norms = []
    for _ in range(BOOTSTRAPS):
        signs = torch.randint(0, 2, (1, s.shape[1], 1), generator=rng).to(s) * 2 - 1
        real = _mask(stats)[..., None] * signs
        noise = ((s * signs).mT @ g - real.sum(1, keepdim=True) * mean) / head
        norms.append(_operator_norm(noise))
    shrink = (stats.n_head / stats.n.clamp_min(1)).sqrt()
    error = torch.stack(norms).mean(0) * shrink
    error = torch.where(stats.n_head > 1, error, torch.inf)
    return _operator_norm(stats.summed() / stats.n.reshape(-1, 1, 1).clamp_min(1)), error


def _operator_norm(matrix: Tensor) -> Tensor:
    return torch.linalg.eigvalsh((matrix + matrix.mT) / 2).abs().amax(-1)


def _mask(stats: Statistics) -> Tensor:
    """1 for the rows of the head that an example has, 0 for its padding, (B, P)."""
    rows = torch.arange(stats.head.odd.shape[1], device=stats.n.device)
    return (rows < stats.n_head[:, None]).double()


def _per_mean(squares: Tensor, head: Tensor, n: Tensor) -> Tensor:
    """Sum of squared deviations over the head → variance of the mean over all n rows."""
    return torch.where(head > 1, squares / (head - 1).clamp_min(1) / n.clamp_min(1), torch.inf)
