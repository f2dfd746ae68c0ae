"""Leading eigenpairs of symmetric operators from matrix-vector products, by a restarted block Krylov method.

Blocks are as large as the number of eigenpairs, and are orthogonalised against the space as a whole: this is fast for
the 10⁻⁴ to rounding that eigenpairs need. `trust_region.lanczos` grows its space vector by vector instead, since its
blocks are residuals that become parallel to the space, and its space must contain the gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from smoothhess.linalg.eigenvalue_order import by_magnitude
from smoothhess.linalg.orthonormal import cholesky_qr, orthonormal

SPARE = 4  # additional directions in a block, to separate close eigenvalues
TOLERANCE = 100  # residual at convergence, in units of eps times the largest |eigenvalue|
KEPT_BLOCKS, FULL_BLOCKS = 4, 24  # a space of FULL_BLOCKS blocks is restarted with the best KEPT_BLOCKS
MOST_BLOCKS = 400  # largest number of products for each direction of a block
LOOK_AGAIN = 1.25  # growth of the number of blocks between two convergence checks, if products are cheap
INDEPENDENT = 1e-5  # smallest relative length of a row after projection for it to count as independent


def leading_eigenpairs(
    product: Callable[[Tensor], Tensor], like: Tensor, k: int, tolerance: float = 0.0, cheap: bool = False
) -> tuple[Tensor, Tensor]:
    """The k eigenpairs of largest |λ| of B operators, (B, k) and (B, k, d).

    `product` maps rows (B, n, d) to H times each row; the vectors have the dtype and device of `like` (B, d). The
    operator is projected on a Krylov space that grows block by block and is restarted with its best directions when it
    is full, until the residuals |Hv − λv| are below `tolerance` times the largest |λ|, or at the level of rounding. The
    starting directions are random but fixed, so the result is reproducible. If products are `cheap`, convergence is
    checked less often.

    >>> h = torch.diag(torch.tensor([0.0, 3.0, -5.0] + [1e-3] * 97)).double()
    >>> values, vectors = leading_eigenpairs(lambda rows: rows @ h, torch.zeros(1, 100).double(), 2)
    >>> values.round(decimals=9), vectors.abs().argmax(-1)
    (tensor([[-5.,  3.]], dtype=torch.float64), tensor([[2, 1]]))
    """
    batch, d = like.shape
    size = min(k + SPARE, d)
    block = _start(size, d).to(like).expand(batch, -1, -1)
    for _ in range(2):  # twice, to remove rounding errors
        block = _orthonormal(block)
    basis, image = like.new_zeros(batch, 0, d), like.new_zeros(batch, 0, d)
    rotation = like.new_zeros(batch, 0, 0)
    done, look = 0, 1
    while True:
        turned, done = product(block), done + 1
        basis, image = torch.cat([basis, block], 1), torch.cat([image, turned], 1)
        complete, full = basis.shape[1] == d, basis.shape[1] >= FULL_BLOCKS * size
        if done >= look or complete or full or done == MOST_BLOCKS:
            look = max(done + 1, int(LOOK_AGAIN * done) if cheap else 0)
            values, rotation = _best(basis @ image.mT)
            values, vectors = values[:, :k], rotation[:, :k] @ basis
            residual = torch.linalg.vector_norm(rotation[:, :k] @ image - values[..., None] * vectors, dim=-1)
            limit = max(TOLERANCE * torch.finfo(like.dtype).eps, tolerance) * values.abs().amax(1, keepdim=True)
            reached = complete or bool((residual <= limit).all())
            if reached or done == MOST_BLOCKS:
                break
        block = turned[:, : d - basis.shape[1]]
        still = ~block.flatten(1).any(1)[:, None, None]
        if bool(still.any()):  # H times the block is zero: continue with arbitrary directions
            block = torch.where(still, _anything(block.shape[1], d, seed=done).to(block), block)
        for _ in range(3):  # two are enough for a block of full rank; an exhausted block consists of rounding errors
            block = _orthonormal(block - (block @ basis.mT) @ basis)
        if full:
            best = rotation[:, : KEPT_BLOCKS * size]
            basis, image = best @ basis, best @ image
    if not reached:
        worst = float((residual / values.abs().amax(1, keepdim=True)).max())
        warnings.warn(
            f"the {k} leading eigenpairs have a relative residual of {worst:.1g} after {MOST_BLOCKS * size} products. "
            "Pass a larger or a smaller k: close eigenvalues converge slowly.",
            stacklevel=3,
        )
    return values, vectors


def _best(small: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues of (B, n, n), largest |λ| first, (B, n), and eigenvectors as rows, (B, n, n)."""
    values, rotation = torch.linalg.eigh((small + small.mT) / 2)
    order = by_magnitude(values)
    return values.gather(1, order), rotation.gather(2, order[:, None].expand_as(rotation)).mT


def _anything(rows: int, d: int, seed: int) -> Tensor:
    """Fixed random directions."""
    return torch.randn(rows, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@lru_cache(maxsize=1)
def _start(rows: int, d: int) -> Tensor:
    """The starting directions."""
    return _anything(rows, d, seed=0)


def _orthonormal(rows: Tensor) -> Tensor:
    """Orthonormalise a few long rows, (B, n, d); on a GPU by Cholesky QR if the rows are independent."""
    found = _by_products(rows) if rows.is_cuda else None
    return orthonormal(rows) if found is None else found


def _by_products(rows: Tensor) -> Tensor | None:
    found, factor = cholesky_qr(torch.nn.functional.normalize(rows.double(), dim=-1))
    independent = bool((factor.diagonal(dim1=-2, dim2=-1) > INDEPENDENT).all())
    return found.to(rows) if independent else None
