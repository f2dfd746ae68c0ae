"""Gram matrices of long rows, accumulated in float64 by chunks, without a float64 copy of all rows."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from smoothhess.linalg.memory import FLOAT64_CHUNK

PANEL = 128  # rows of a panel of a symmetric product


def inner(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ of rows (b, m, k) and (b, n, k), (b, m, n) float64.

    >>> import torch
    >>> inner(torch.ones(1, 2, 3), torch.ones(1, 1, 3)).tolist()
    [[[3.0], [3.0]]]
    """
    parts = zip(a.split(_step(a), -1), b.split(_step(a), -1), strict=True)
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
        found = None
        for g, s in zip(odd.split(_step(odd), -1), score.split(_step(odd), -1), strict=True):
            g, s = g.double(), s.double()
            products = symmetric_product(g, g), g @ s.mT, symmetric_product(s, s)
            found = (
                products if found is None else tuple(total.add_(p) for total, p in zip(found, products, strict=True))
            )
        assert found is not None
        return Grams(*found)


def symmetric_product(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ of (b, m, k) each, (b, m, m), which must be symmetric: half of it is computed, in panels, and mirrored.

    >>> import torch
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
