"""Certified minimisers of dense problems without an eigendecomposition.

Lanczos gives δ and λ with (H + λI)δ = −g up to rounding. If H + λI is positive definite as well, δ is the global
minimum, whether or not the Krylov space contains all eigenvectors. Two proofs are tried. With Q a basis of the space
and Q' one of its complement,

    H = [Q Q'] [T Eᵀ; E R] [Q Q']ᵀ,   ‖E‖_F² = ‖HQ‖_F² − ‖T‖_F²,   ‖R‖_F² = ‖H‖_F² − 2‖HQ‖_F² + ‖T‖_F²,

and H + λI is definite if (λ_min(T) + λ)(λ − ‖R‖_F) > ‖E‖_F², which holds if the space contains most of H. Otherwise a
Cholesky factorisation decides. Problems in or near the hard case, where δ depends on the lowest eigenvector, and
problems that converge slowly are not solved here: they need the eigendecomposition.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smoothhess.linalg.trust_region.lanczos import Look, Space

MOST_VECTORS = 96  # from here on, an eigendecomposition of some hundred features is as fast
TOLERANCE = 1e-13  # relative residual of the stationarity condition
MARGIN = 1e-5  # relative margin of definiteness: closer to the hard case the sign of δ is not determined
ROUNDING = 1e-12  # rounding error of the norms of the blocks, relative to ‖H‖_F²
SQUARABLE = 1e140  # largest ‖H‖_F, and inverse of the smallest, whose squares neither overflow nor vanish


def minimize_certified(gradient: Tensor, hessian: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """The minimiser (B, d), and whether it is proven to be the minimiser, (B,); all float64.

    `gradient` is (B, d), `hessian` (B, d, d) symmetric, `radius` (B,). The result of an example does not depend
    on the others.
    """
    steps, shift = torch.zeros_like(gradient), torch.zeros_like(radius)
    proven, likely = torch.zeros_like(radius, dtype=torch.bool), torch.zeros_like(radius, dtype=torch.bool)
    norms = torch.linalg.vector_norm(hessian, dim=(1, 2))
    index, H, g, r = torch.arange(len(gradient), device=gradient.device), hessian, gradient, radius
    space = Space.start(g, lambda rows: (H @ rows.mT).mT)
    while len(index):
        look = Look.at(space, g, r[None])
        beyond = look.multiplier[0] - MARGIN * (space.values.abs().amax(1) + look.multiplier[0])
        good = (look.error <= TOLERANCE) & (beyond + space.values[:, 0] > 0)
        ready = index[good]
        steps[ready] = (look.coordinates[0, good][:, None] @ space.vectors[good])[:, 0]
        shift[ready], likely[ready] = beyond[good], True
        proven[ready] = _is_definite(space.select(good), norms[ready], beyond[good])
        unsolved = torch.nonzero(~good).reshape(-1)
        if not len(unsolved) or space.values.shape[1] + 2 > min(MOST_VECTORS, g.shape[1]):
            break
        residuals = look.residuals
        if 2 * len(unsolved) <= len(index):
            space, residuals = space.select(unsolved), residuals[unsolved]
            index, H, g, r = index[unsolved], H[unsolved], g[unsolved], r[unsolved]
        space = space.grown(residuals, lambda rows: (H @ rows.mT).mT, MOST_VECTORS)  # noqa: B023
    doubtful = torch.nonzero(likely & ~proven).reshape(-1)
    if len(doubtful):
        shifted = hessian[doubtful]
        shifted.diagonal(dim1=-2, dim2=-1).add_(shift[doubtful, None])
        proven[doubtful] = torch.linalg.cholesky_ex(shifted).info == 0
    return steps, proven & (norms > 1 / SQUARABLE) & (norms < SQUARABLE)


def _is_definite(space: Space, norms: Tensor, shift: Tensor) -> Tensor:
    """Whether the first proof shows that H + shift·I is positive definite, with ‖H‖_F = norms, (B,)."""
    norm2, images2 = norms.square(), space.images.square().sum((1, 2))
    inside2 = space.values.square().sum(1)
    coupling2 = (images2 - inside2).clamp_min(0) + ROUNDING * norm2
    rest = ((norm2 - 2 * images2 + inside2).clamp_min(0) + ROUNDING * norm2).sqrt()
    return (shift > rest) & ((space.values[:, 0] + shift) * (shift - rest) > coupling2)
