"""Functions whose smoothed value, gradient and Hessian are known in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from smoothhess import Dense, Diagonal, Eigenbasis, Gaussian, Isotropic, SmoothHess, segments


@dataclass(frozen=True)
class Truth:
    value: Tensor  # (B,)
    gradient: Tensor  # (B, d)
    hessian: Tensor  # (B, d, d)


def covariance(gaussian: Gaussian, d: int) -> Tensor:
    """Σ, from what the Gaussian does to the unit vectors."""
    root = gaussian.colour(torch.eye(gaussian.rank(d), dtype=torch.float64)).mT  # (d, k)
    return root @ root.mT


class OneHidden(nn.Module):
    """f = Σ a_k relu(w_k·x + b_k): exact for any Gaussian."""

    def __init__(self, d: int, width: int = 24, seed: int = 0) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        self.w = nn.Parameter(torch.randn(width, d, generator=rng, dtype=torch.float64) / math.sqrt(d))
        self.b = nn.Parameter(0.5 * torch.randn(width, generator=rng, dtype=torch.float64))
        self.a = nn.Parameter(torch.randn(width, generator=rng, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x.flatten(1) @ self.w.mT + self.b) @ self.a

    def truth(self, x: Tensor, gaussian: Gaussian) -> Truth:
        with torch.no_grad():
            d = self.w.shape[1]
            sigma = covariance(gaussian, d)
            s = x.flatten(1) @ self.w.mT + self.b  # (B, width)
            tau = torch.einsum("kd,de,ke->k", self.w, sigma, self.w).clamp_min(1e-300).sqrt()
            cdf = torch.special.ndtr(s / tau)
            pdf = torch.exp(-((s / tau) ** 2) / 2) / math.sqrt(2 * math.pi)
            gradient = (self.a * cdf) @ self.w
            hessian = torch.einsum("bk,kd,ke->bde", self.a * pdf / tau, self.w, self.w)
            project = torch.linalg.pinv(sigma, hermitian=True) @ sigma
            return Truth((self.a * (s * cdf + tau * pdf)).sum(1), gradient @ project, project @ hessian @ project)


def quadratic(d: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A symmetric matrix and a vector for f = b·x + ½ xᵀAx."""
    rng = torch.Generator().manual_seed(seed)
    a = torch.randn(d, d, generator=rng, dtype=torch.float64)
    return (a + a.mT) / 2, torch.randn(d, generator=rng, dtype=torch.float64)


def four_quadrant(x: Tensor) -> Tensor:
    """K x₁x₂ with K = 5, 3, 12, −10 in quadrants 1 to 4; at 0: H₁₂ = 2.5, H₁₁ = H₂₂ = 12/π."""
    a, b = x[:, 0], x[:, 1]
    k = torch.where(b >= 0, torch.where(a >= 0, 5.0, 3.0), torch.where(a < 0, 12.0, -10.0)).to(x)
    return k * a * b


FOUR_QUADRANT_HESSIAN = torch.tensor([[12 / math.pi, 2.5], [2.5, 12 / math.pi]], dtype=torch.float64)


def additive(d_left: int, d_right: int, seed: int = 0) -> nn.Module:
    """f₁(x_A) + f₂(x_B): every cross pair is exactly null."""
    left, right = OneHidden(d_left, seed=seed), OneHidden(d_right, seed=seed + 1)

    class Additive(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return left(x[:, :d_left]) + right(x[:, d_left:])

    return Additive()


def gaussians(d: int) -> dict[str, Gaussian]:
    """One of each kind for d features."""
    rng = torch.Generator().manual_seed(99)
    root = torch.randn(d, d, generator=rng, dtype=torch.float64) / math.sqrt(d)
    scales = 0.2 + torch.rand(d, generator=rng, dtype=torch.float64)
    frozen = torch.where(torch.arange(d) % 3 == 2, 0.0, scales)
    directions = torch.randn(min(d, 2), d, generator=rng, dtype=torch.float64)
    sigmas = [0.6, 0.3][: len(directions)]
    return {
        "isotropic": Isotropic(0.5),
        "diagonal": Diagonal(scales),
        "frozen": Diagonal(frozen),
        "dense": Dense(root @ root.mT + 0.1 * torch.eye(d, dtype=torch.float64)),
        "eigenbasis": Eigenbasis(directions, sigmas, rest=0.4),
        "singular": Eigenbasis(directions, sigmas, rest=0.0),
        "segments": segments.noise(torch.arange(d) // 2, scales[: (d + 1) // 2]),
    }


class Plain(SmoothHess):
    """Neither control variate nor denoising: the design alone."""

    def attribute(self, *args, **options):
        return super().attribute(*args, **{"control": None, "shrink": False} | options)
