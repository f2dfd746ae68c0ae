"""Leading eigenpairs of a symmetric operator that is known by its products alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

SPARE = 4  # directions in a block beside those that are asked for, so that close eigenvalues are told apart
TOLERANCE = 100  # rounding errors that an eigenpair's residual may have, relative to the largest |eigenvalue|
KEPT_BLOCKS, FULL_BLOCKS = 4, 24  # a space of so many blocks is full, and goes on with the best ones
MOST_BLOCKS = 400  # products for each direction of a block, at most


def leading_eigenpairs(
    product: Callable[[Tensor], Tensor], like: Tensor, k: int, tolerance: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The k eigenpairs of largest |λ| of B operators, (B, k) and (B, k, d).

    `product` maps rows (B, n, d) to H times them; the vectors are of the dtype and on the device of `like` (B, d). The
    operator is projected on a Krylov space that grows block by block, and is cut down to its best directions when it is
    full, until the residuals |Hv − λv| are below `tolerance` times the largest |λ|, or of the size of rounding errors.
    It begins with fixed random directions, so the same operator gives the same answer.

    >>> h = torch.diag(torch.tensor([0.0, 3.0, -5.0] + [1e-3] * 97)).double()
    >>> values, vectors = leading_eigenpairs(lambda rows: rows @ h, torch.zeros(1, 100).double(), 2)
    >>> values.round(decimals=9), vectors.abs().argmax(-1)
    (tensor([[-5.,  3.]], dtype=torch.float64), tensor([[2, 1]]))
    """
    batch, d = like.shape
    size = min(k + SPARE, d)
    rng = torch.Generator().manual_seed(0)
    start = torch.randn(size, d, generator=rng, dtype=torch.float64).to(like)
    block = _orthonormal(start.expand(batch, -1, -1))
    basis, image = like.new_zeros(batch, 0, d), like.new_zeros(batch, 0, d)
    done = 0
    while True:
        turned, done = product(block), done + 1
        basis, image = torch.cat([basis, block], 1), torch.cat([image, turned], 1)
        small = basis @ image.mT
        found, rotation = torch.linalg.eigh((small + small.mT) / 2)
        order = found.abs().argsort(dim=1, descending=True)
        values = found.gather(1, order[:, :k])
        rotation = rotation.gather(2, order[:, None].expand_as(rotation)).mT  # (B, basis, basis), best rows first
        vectors = rotation[:, :k] @ basis
        residual = torch.linalg.vector_norm(rotation[:, :k] @ image - values[..., None] * vectors, dim=-1)
        limit = max(TOLERANCE * torch.finfo(like.dtype).eps, tolerance) * values.abs().amax(1, keepdim=True)
        reached = basis.shape[1] == d or bool((residual <= limit).all())
        if reached or done == MOST_BLOCKS:
            break
        block = turned[:, : d - basis.shape[1]]
        still = ~block.flatten(1).any(1)[:, None, None]
        if bool(still.any()):  # H is zero: any direction is as good as another
            anything = torch.randn(block.shape[1], d, generator=rng, dtype=torch.float64).to(block)
            block = torch.where(still, anything, block)
        for _ in range(3):  # twice is enough for a block of full rank; one that is exhausted leaves only rounding
            block = _orthonormal(block - (block @ basis.mT) @ basis)
        if basis.shape[1] >= FULL_BLOCKS * size:
            best = rotation[:, : KEPT_BLOCKS * size]
            basis, image = best @ basis, best @ image
    if not reached:
        worst = float((residual / values.abs().amax(1, keepdim=True)).max())
        warnings.warn(
            f"the {k} leading eigenpairs are known to {worst:.1g} of the largest after {MOST_BLOCKS * size} products. "
            "Ask for more of them, or for fewer: close ones are hard to tell apart.",
            stacklevel=3,
        )
    return values, vectors


def _orthonormal(rows: Tensor) -> Tensor:
    return torch.linalg.qr(rows.mT)[0].mT
