"""Most dense problems need no eigendecomposition: a few products find the minimum, one Cholesky factor proves it.

Lanczos gives δ and λ with (H + λI)δ = −g to rounding. If H + λI has a Cholesky factor it is positive definite, and δ is
the global minimum, whatever the Krylov space may have missed. Problems in or near the hard case, where δ hangs on the
lowest eigenvector, and those that take long are left to the eigendecomposition.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smoothhess.evaluate.lanczos import Look, Space

MOST_VECTORS = 96  # from about so many on, an eigendecomposition of some hundred features is as fast
TOLERANCE = 1e-13  # of the stationarity, relative
MARGIN = (
    1e-5  # by which H + λI must be beyond semidefinite, relative: closer to the hard case the sign of δ may be open
)


def minimize_certified(gradient: Tensor, hessian: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """The minimiser (B, d) where it was found and proven, and whether it was, (B,); all float64.

    `gradient` is (B, d), `hessian` (B, d, d) symmetric, `radius` (B,). What an example gets does not depend on the
    others.
    """
    steps, shift = torch.zeros_like(gradient), torch.zeros_like(radius)
    found = torch.zeros_like(radius, dtype=torch.bool)
    index, H, g, r = torch.arange(len(gradient), device=gradient.device), hessian, gradient, radius
    space = Space.start(g, lambda rows: (H @ rows.mT).mT)
    while len(index):
        look = Look.at(space, g, r[None])
        beyond = look.multiplier[0] - MARGIN * (space.values.abs().amax(1) + look.multiplier[0])
        good = (look.error <= TOLERANCE) & (beyond + space.values[:, 0] > 0)
        ready = index[good]
        steps[ready] = (look.coordinates[0, good][:, None] @ space.vectors[good])[:, 0]
        shift[ready], found[ready] = beyond[good], True
        if space.values.shape[1] + 2 > min(MOST_VECTORS, g.shape[1]):
            break
        left = torch.nonzero(~good).reshape(-1)
        residuals = look.residuals
        if 2 * len(left) <= len(index):
            space, residuals = space.select(left), residuals[left]
            index, H, g, r = index[left], H[left], g[left], r[left]
        space = space.grown(residuals, lambda rows: (H @ rows.mT).mT, MOST_VECTORS)  # noqa: B023
    ready = torch.nonzero(found).reshape(-1)
    shifted = hessian[ready] if len(ready) < len(hessian) else hessian.clone()
    shifted.diagonal(dim1=-2, dim2=-1).add_(shift[ready, None])
    found[ready] = torch.linalg.cholesky_ex(shifted).info == 0
    return steps, found
