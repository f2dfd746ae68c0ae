"""Gram matrices of long rows, accumulated in float64 by chunks, without a float64 copy of all rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from smoothhess.linalg.memory import CACHED_FLOAT64, FLOAT64_CHUNK

PANEL = 128  # rows of a panel of a symmetric product
LOCAL, LOCAL_PANEL = 0.25, 64  # share of entries up to which a column is local, and number of local columns in a panel


def inner(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ of rows (b, m, k) and (b, n, k), (b, m, n) float64.

    >>> inner(torch.ones(1, 2, 3), torch.ones(1, 1, 3)).tolist()
    [[[3.0], [3.0]]]
    """
    step = _step(a)  # once: on a GPU it depends on the memory that is free at this moment
    parts = zip(a.split(step, -1), b.split(step, -1), strict=True)
    total, *rest = (x.double() @ y.double().mT for x, y in parts)
    for product in rest:
        total += product
    return total


class Grams(NamedTuple):
    """γγᵀ, γsᵀ and ssᵀ of rows γ (b, m, k) and s (1 or b, m, k)."""

    odd: Tensor  # (b, m, m) float64
    cross: Tensor  # (b, m, m)
    score: Tensor  # (1 or b, m, m)

    @staticmethod
    def of(odd: Tensor, score: Tensor) -> Grams:
        """Compute all three; each entry is converted to float64 once."""
        found, step = None, _step(odd)  # the step once, as in `inner`
        for g, s in zip(odd.split(step, -1), score.split(step, -1), strict=True):
            g, s = g.double(), s.double()
            products = symmetric_product(g, g), g @ s.mT, symmetric_product(s, s)
            found = (
                products if found is None else tuple(total.add_(p) for total, p in zip(found, products, strict=True))
            )
        assert found is not None
        return Grams(*found)


def symmetric_product(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ of (b, m, k) each, (b, m, m), which must be symmetric: half of it is computed, in panels, and mirrored.

    >>> rows = torch.arange(2.0 * PANEL * 2).reshape(1, 2 * PANEL, 2)
    >>> torch.equal(symmetric_product(rows, rows), rows @ rows.mT)
    True
    """
    m = a.shape[1]
    if m < 2 * PANEL or a.is_cuda:
        return a @ b.mT
    found = a.new_empty(len(a), m, m)
    for start in range(0, m, PANEL):
        own = slice(start, start + PANEL)
        panel = a[:, own] @ b[:, : start + PANEL].mT
        found[:, own, : start + PANEL] = panel
        found[:, :start, own] = panel[..., :start].mT
    return found


def weighted_gram(columns: Tensor, weight: Tensor) -> Tensor:
    """Σ_n w_n v_n v_nᵀ for the columns v_n of (k, n) and weights (n,), (k, k), to the rounding of their precision.

    Columns with few entries, such as the gradients of the neurons of a convolution, are sorted by their first entry, so
    that those of a panel have most rows in common and only the product of these rows is computed. Entries below the
    rounding of the largest of their column do not count.

    >>> weighted_gram(torch.tensor([[1.0, 0.0], [1.0, 2.0]]), torch.tensor([3.0, 1.0]))
    tensor([[3., 3.],
            [3., 7.]])
    """
    weighted = columns * weight.to(columns)
    size = columns.abs()
    filled = size > torch.finfo(columns.dtype).eps * size.amax(0)  # (k, n)
    is_local = filled.sum(0) <= LOCAL * len(columns)
    if not bool(is_local.any()):
        return symmetric_product(columns[None], weighted[None])[0]
    found = symmetric_product(columns[None, :, ~is_local], weighted[None, :, ~is_local])[0]
    local = torch.nonzero(is_local).reshape(-1)
    local = local[filled[:, local].to(torch.uint8).argmax(0).argsort()]
    for panel in local.split(LOCAL_PANEL):
        rows = torch.nonzero(filled[:, panel].any(1)).reshape(-1)
        place = rows[:, None], panel
        found[rows[:, None], rows] += columns[place] @ weighted[place].mT
    return found


def squared_norm(matrices: Tensor) -> Tensor:
    """‖M‖²_F of (b, m, k), (b,), summed in float64 by chunks that stay in the caches.

    >>> squared_norm(torch.full((2, 3, 4), 2.0))
    tensor([48., 48.], dtype=torch.float64)
    """
    step = CACHED_FLOAT64.items(8 * matrices.shape[-1], matrices.device)
    rows = [part.double().square().sum(-1) for part in matrices.flatten(0, 1).split(step)]
    return torch.cat(rows).unflatten(0, matrices.shape[:2]).sum(-1)


def _step(rows: Tensor) -> int:
    return FLOAT64_CHUNK.items(8 * rows.shape[0] * rows.shape[1], rows.device)


def pair_norm(s: Tensor, g: Tensor) -> Tensor:
    """‖sym SᵀG‖²_F of rows S and G, (B,)."""
    s, g = s.double(), g.double()
    if g.shape[1] >= g.shape[2]:
        product = s.mT @ g
        return ((product + product.mT) / 2).square().sum((-1, -2))
    inner = g @ s.mT
    return ((s @ s.mT) * (g @ g.mT) + inner * inner.mT).sum((-1, -2)) / 2
