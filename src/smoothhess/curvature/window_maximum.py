"""The maximum of three jointly Gaussian candidates: its change at given points, and its moments.

With the candidates z₀ (the maximum at x), z₁ and z₂ of a window of max-pooling, max(z₀, z₁, z₂) − z₀ depends on their
gaps z₁ − z₀, z₂ − z₀ and z₂ − z₁ only, in this order the last dimension of all tensors here. Its second derivative is

    Σ_{i<j} Dirac(z_j − z_i) · 1{z_i exceeds the third} · (J_j − J_i)(J_j − J_i)ᵀ,

whose Gaussian mean is the density of each gap at 0 times the probability, given z_i = z_j, that the third is smaller:
gaps have the role of neurons. Which candidates a window has is decided in `pool_windows`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def switched(gaps: Tensor) -> Tensor:
    """The gradient of the maximum minus z₀ with respect to the gaps: 1 at the gap of the new maximum and z₀."""
    first, second, between = gaps.unbind(-1)
    won = [(first > 0) & (between <= 0), (second > 0) & (between > 0), torch.zeros_like(first, dtype=torch.bool)]
    return torch.stack(won, -1).to(gaps)


def exceeded(gaps: Tensor) -> Tensor:
    """The maximum minus z₀, at the first gap; 0 at the others."""
    total = gaps[..., :2].amax(-1).clamp_min(0)
    return torch.stack([total, torch.zeros_like(total), torch.zeros_like(total)], -1)


def moments_of_maximum(gaps: Tensor, tau: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bend, lean and rise for gaps with means `gaps` and standard deviations `tau`, float64.

    W₁ is the sum of bend · jjᵀ over the gaps, Γ₁ that of lean · j, and v₁ that of the rises.
    """
    (g1, g2, g3), (v1, v2, v3) = gaps.double().unbind(-1), tau.double().square().unbind(-1)
    inner = (v1 + v2 - v3) / 2  # Cov(z₁ − z₀, z₂ − z₀)
    at_first, at_second = (v1 + v3 - v2) / 2, (v2 + v3 - v1) / 2  # Cov(z₁ − z₀, z₁ − z₂), Cov(z₂ − z₀, z₂ − z₁)
    bend = torch.stack(
        [
            _density(g1, v1) * _below(g2, v2, g1, v1, inner),  # z₂ < z₀ where z₁ = z₀
            _density(g2, v2) * _below(g1, v1, g2, v2, inner),  # z₁ < z₀ where z₂ = z₀
            _density(g3, v3) * _below(-g1, v1, g3, v3, at_first),  # z₀ < z₁ where z₂ = z₁
        ],
        -1,
    )
    first = _both_positive(g1, v1, -g3, v3, at_first)
    second = _both_positive(g2, v2, g3, v3, at_second)
    none = torch.zeros_like(first)
    rise = g1 * first + g2 * second + (bend * tau.double().square()).sum(-1)
    return bend, torch.stack([first, second, none], -1), torch.stack([rise, none, none], -1)


_TINY, _NOT_ZERO = 1e-300, 1e-100  # least variance; least correlation, and distance from a tie, in a quotient


def _density(mean: Tensor, variance: Tensor) -> Tensor:
    """The density at 0 of a normal variable; 0 if it is constant."""
    spread = variance.clamp_min(_TINY)
    density = torch.exp(-mean.square() / (2 * spread)) / (2 * math.pi * spread).sqrt()
    return torch.where(variance > 0, density, 0.0)


def _below(mean: Tensor, variance: Tensor, given: Tensor, given_variance: Tensor, covariance: Tensor) -> Tensor:
    """The probability that a normal variable is negative, given that another one is 0; a half where it is 0."""
    slope = covariance / given_variance.clamp_min(_TINY)
    left = (variance - slope * covariance).clamp_min(_TINY)
    return torch.special.ndtr(-(mean - slope * given) / left.sqrt())


def _both_positive(a: Tensor, variance_a: Tensor, b: Tensor, variance_b: Tensor, covariance: Tensor) -> Tensor:
    """The probability that two normal variables with means a and b are positive, from Owen's T (Owen 1956)."""
    spread_a, spread_b = variance_a.clamp_min(_TINY).sqrt(), variance_b.clamp_min(_TINY).sqrt()
    h, k = (torch.where(m == 0, _NOT_ZERO, m) for m in (a / spread_a, b / spread_b))
    rho = (covariance / (spread_a * spread_b)).clamp(-1, 1)
    across = (1 - rho.square()).clamp_min(_NOT_ZERO).sqrt()
    parts = _owen(h, (k - rho * h) / (h * across)) + _owen(k, (h - rho * k) / (k * across))
    unlike = ((h < 0) != (k < 0)).double()
    found = (torch.special.ndtr(h) + torch.special.ndtr(k) - unlike) / 2 - parts
    return found.clamp(0, 1)


def _owen(h: Tensor, a: Tensor) -> Tensor:
    from scipy import special

    return torch.as_tensor(special.owens_t(h.cpu().numpy(), a.cpu().numpy())).to(h)
