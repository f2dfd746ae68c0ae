"""How well an estimated Hessian fits: variation of gradient and value, the explained share, tests of zero and of jumps.

The functions take the `Noise` or the statistics of a result. Variances themselves are in `variance`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from smoothhess.draws.designs import find_design
from smoothhess.estimate.statistics import Statistics, symmetric, unmoved
from smoothhess.estimate.unbiased_hessian import corrected_rows
from smoothhess.estimate.variance import Noise

JUMP_ROUNDING = 1e3  # units in the last place by which values of an affine function may differ
ZERO_TEST_ROWS = 512  # rows whose inner products are used in the test of H = 0


def variation(noise: Noise) -> Tensor:
    """Variation of the gradient, E‖g − G‖², (B,)."""
    features = noise.features
    energy = features.head.energy.double().sum(1) / features.n_head.clamp_min(1)
    return energy - features.even_mean.square().sum(-1)


def value_variance(stats: Statistics) -> Tensor:
    """Variance of f(x + δ) over the noise, (B,) float64; NaN if the squares of the values were not kept."""
    return (stats.square_sum / stats.n.clamp_min(1) - stats.value_mean.square()).clamp_min(0)


def explained(noise: Noise) -> Tensor:
    """Share of the gradient's variation around x that Ĥδ explains for fresh draws, (B,).

    It is 1 − E‖g − Ĝ − Ĥδ‖² / E‖g − G‖². By Stein's identity Cov(g, δ) = HΣ, so the numerator is
    V − 2⟨HL, ĤL⟩ + ‖ĤL‖² + ‖Ĝ − G‖²; with E⟨HL, ĤL⟩ = E‖ĤL‖² − noise no held-out gradients are needed.
    """
    white, features = noise.white, noise.features
    assert white is not None
    push, precisions = noise.gaussian.push, noise.gaussian.precisions(features.k)
    total = precisions.sum().double().to(features.n.device)
    lifted = noise.estimate.needs_correction
    odd = corrected_rows(white.head, noise.estimate.correction) if lifted else white.head.odd

    def norm2(score: Tensor, rows: Tensor, constant: Tensor, examples: Tensor | None = None) -> Tensor:
        found = _one_sided_norm(score, rows, push)
        if not lifted:
            return found
        mixed = (push(score).double() * push(rows).double()).sum((-1, -2))
        return found + 2 * constant * mixed + constant.square() * total

    spread = noise.replicates.of_norm(white.head.score, odd, norm2)
    if noise.prior is None:
        spread = noise.pooled.weigh(spread)
    else:
        prior = (total * noise.prior.trace + (noise.prior.k + 2) * noise.pooled.kappa_trace) / 4
        spread = noise.pooled.weigh(spread, prior)
    if white.is_factored:
        score, rows = white.factors()
        norm = norm2(score, torch.cat([odd, rows[:, odd.shape[1] :]], 1), noise.estimate.constant)
    else:
        mean = symmetric(white.summed() / white.n.clamp_min(1)[:, None, None])
        if lifted:
            rows = torch.nonzero((noise.estimate.correction.slope != 0).any(0)).reshape(-1)
            change = white.head.score[:, rows].double().mT @ (odd - white.head.odd)[:, rows].double()
            mean = mean + symmetric(change / white.n[:, None, None])
            mean.diagonal(dim1=-2, dim2=-1).add_(noise.estimate.constant[:, None])
        norm = push(mean.to(white.gradient.dtype)).double().square().sum((-1, -2))
    total_variation = variation(noise)
    gradient_noise = noise.of_gradient().value.sum(-1)
    share = (norm - 2 * spread - gradient_noise) / total_variation
    return torch.where((total_variation > 0) & torch.isfinite(spread), share, torch.nan)


def discontinuous(stats: Statistics) -> Tensor:
    """Where values changed although no gradient did, (B,); see `Interactions.discontinuous`."""
    head = stats.head
    still = unmoved(stats) & stats.is_uncontrolled  # residuals are not gradients of the function
    if not find_design(stats.design).mirrored or not bool(still.any()):
        return torch.zeros_like(still)
    still = still & (head.even.abs().amax((1, 2)) == 0)
    size = stats.value.double().abs() + torch.linalg.vector_norm(stats.gradient.double(), dim=1)
    moved = (head.value_even.double() / head.weight.double().clamp_min(1e-300)).abs().amax(1)
    return still & (moved > JUMP_ROUNDING * torch.finfo(stats.gradient.dtype).eps * size)


def zero_score(noise: Noise) -> Tensor:
    """Unbiased estimate of ‖H‖² over the standard deviation that it would have for H = 0, (B,)."""
    signal = noise.estimate.squared_norm - noise.of_frobenius
    if noise.prior is None:  # inner products of the estimates of two rows have mean ‖H‖²
        stats = noise.features
        s, g = (t[:, :ZERO_TEST_ROWS].double() for t in (stats.head.score, stats.head.odd))
        products = ((s @ s.mT) * (g @ g.mT) + (s @ g.mT) * (g @ s.mT)) / 2
        products.diagonal(dim1=-2, dim2=-1).zero_()
        rows = stats.n_head.clamp_max(ZERO_TEST_ROWS)
        pairs = (rows * (rows - 1)).clamp_min(1)
        deviation = (2 * products.square().sum((-1, -2)) / pairs / (stats.n * (stats.n - 1)).clamp_min(1)).sqrt()
    else:  # symmetric minus antisymmetric energy, for noise of rank one, which has the largest deviation
        deviation = noise.of_frobenius * (8 / noise.features.k) ** 0.5
    return torch.where(deviation > 0, signal / deviation, torch.where(signal > 0, torch.inf, 0.0))


def _one_sided_norm(score: Tensor, odd: Tensor, push: Callable[[Tensor], Tensor]) -> Tensor:
    """‖L⁺ᵀ sym SᵀG‖²_F of rows S and G, (B,)."""
    if odd.shape[1] >= odd.shape[2]:
        matrix = symmetric(score.double().mT @ odd.double())
        return push(matrix.to(odd.dtype)).double().square().sum((-1, -2))
    s, y, a, g = (t.double() for t in (score, odd, push(score), push(odd)))
    square = (a @ a.mT) * (y @ y.mT) + (g @ g.mT) * (s @ s.mT) + 2 * (a @ g.mT) * (y @ s.mT)
    return square.sum((-1, -2)) / 4
