"""Most dense problems need no eigendecomposition: a few products find the minimum, and it can be proven.

Lanczos gives δ and λ with (H + λI)δ = −g to rounding. If H + λI is positive definite as well, δ is the global minimum,
whatever the Krylov space may have missed. Two proofs are tried. With Q the space and Q' all outside of it,

    H = [Q Q'] [T Eᵀ; E R] [Q Q']ᵀ,   ‖E‖_F² = ‖HQ‖_F² − ‖T‖_F²,   ‖R‖_F² = ‖H‖_F² − 2‖HQ‖_F² + ‖T‖_F²,

and H + λI is definite where (λ_min(T) + λ)(λ − ‖R‖_F) > ‖E‖_F²: enough where the space holds most of H. Else a Cholesky
factor tells. Problems in or near the hard case, where δ hangs on the lowest eigenvector, and those that take long are
left to the eigendecomposition.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smoothhess.linalg.trust_region.lanczos import Look, Space

MOST_VECTORS = 96  # from about so many on, an eigendecomposition of some hundred features is as fast
TOLERANCE = 1e-13  # of the stationarity, relative
MARGIN = 1e-5  # by which H + λI must be definite, relative: closer to the hard case the sign of δ may be open
ROUNDING = 1e-12  # share of ‖H‖_F² that the norms of the blocks may be wrong by,
SQUARABLE = 1e140  # and sizes of H, and of their inverse, from which on squares overflow


def minimize_certified(gradient: Tensor, hessian: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """The minimiser (B, d) where it was found and proven, and whether it was, (B,); all float64.

    `gradient` is (B, d), `hessian` (B, d, d) symmetric, `radius` (B,). What an example gets does not depend on the
    others.
    """
    steps, shift = torch.zeros_like(gradient), torch.zeros_like(radius)
    proven, likely = torch.zeros_like(radius, dtype=torch.bool), torch.zeros_like(radius, dtype=torch.bool)
    whole = torch.linalg.vector_norm(hessian, dim=(1, 2))
    index, H, g, r = torch.arange(len(gradient), device=gradient.device), hessian, gradient, radius
    space = Space.start(g, lambda rows: (H @ rows.mT).mT)
    while len(index):
        look = Look.at(space, g, r[None])
        beyond = look.multiplier[0] - MARGIN * (space.values.abs().amax(1) + look.multiplier[0])
        good = (look.error <= TOLERANCE) & (beyond + space.values[:, 0] > 0)
        ready = index[good]
        steps[ready] = (look.coordinates[0, good][:, None] @ space.vectors[good])[:, 0]
        shift[ready], likely[ready] = beyond[good], True
        proven[ready] = _is_definite(space.select(good), whole[ready], beyond[good])
        left = torch.nonzero(~good).reshape(-1)
        if not len(left) or space.values.shape[1] + 2 > min(MOST_VECTORS, g.shape[1]):
            break
        residuals = look.residuals
        if 2 * len(left) <= len(index):
            space, residuals = space.select(left), residuals[left]
            index, H, g, r = index[left], H[left], g[left], r[left]
        space = space.grown(residuals, lambda rows: (H @ rows.mT).mT, MOST_VECTORS)  # noqa: B023
    doubtful = torch.nonzero(likely & ~proven).reshape(-1)
    if len(doubtful):
        shifted = hessian[doubtful]
        shifted.diagonal(dim1=-2, dim2=-1).add_(shift[doubtful, None])
        proven[doubtful] = torch.linalg.cholesky_ex(shifted).info == 0
    return steps, proven & (whole > 1 / SQUARABLE) & (whole < SQUARABLE)


def _is_definite(space: Space, whole: Tensor, shift: Tensor) -> Tensor:
    """Whether H + shift·I is shown to be, by what the space has of H and what of ‖H‖_F = whole it leaves, (B,)."""
    whole2, images2 = whole.square(), space.images.square().sum((1, 2))
    inside2 = space.values.square().sum(1)
    coupling2 = (images2 - inside2).clamp_min(0) + ROUNDING * whole2
    rest = ((whole2 - 2 * images2 + inside2).clamp_min(0) + ROUNDING * whole2).sqrt()
    return (shift > rest) & ((space.values[:, 0] + shift) * (shift - rest) > coupling2)
