"""Products of the whitened directions of features and groups, from which the antisymmetric half gives variances.

uᵀHv = q_uᵀ W q_v has the directions q_u and q_v. For entries, a row and a bilinear form of the Hessian this module
computes (A q_u)·(A q_v), q_u·q_v and the rows' energy, without a d × d matrix where none is asked for. The variance
that follows from these products is in `antisymmetric_variance`.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from smoothhess.estimate.antisymmetric_variance import Products, Skew
from smoothhess.estimate.unbiased_hessian import Unbiased


class Pairs(NamedTuple):
    """Products of u with itself, of v with itself, and of u with v."""

    uu: Products
    vv: Products
    uv: Products | None  # None: q_u and q_v are orthogonal


class DirectionProducts:
    """Products of the directions of an estimate with orthogonal blocks; `skew` is None for group sums."""

    def __init__(self, estimate: Unbiased, skew: Skew | None) -> None:
        self.estimate, self.skew = estimate, skew
        self.stats, self.gaussian = estimate.stats, estimate.identity.gaussian

    def energy(self, left: Tensor, right: Tensor) -> Tensor:
        """Mean over rows of the product of two quantities, (B, P, …) each."""
        n = self.stats.n_head.clamp_min(1)
        return (left.double() * right.double()).sum(1) / n.reshape(-1, *[1] * (left.ndim - 2))

    @cached_property
    def _groups(self) -> tuple[Tensor, Tensor]:
        """(A q_I)·(A q_J) and q_I·q_J of groups, (B, K, K)."""
        assert self.stats.skew is not None
        assert self.stats.gram is not None
        turned = self.stats.skew[..., : self.stats.k] / self.stats.n[:, None, None]
        return turned.mT @ turned, self.stats.gram.expand(len(self.stats), -1, -1)

    @cached_property
    def of_features(self) -> Products:
        """|A q_j|², |q_j|² and the rows' energy for every feature, (B, d)."""
        energy = self.energy(self.estimate.odd, self.estimate.odd)
        if self.skew is None:
            inner, gram = (m.diagonal(dim1=-2, dim2=-1) for m in self._groups)
            return Products(inner, gram, energy)
        inner = self.skew.diagonal(self.stats, self.gaussian)
        gram = self.gaussian.precision_diagonal(self.stats.k).to(inner)
        return Products(inner, gram.expand_as(inner), energy)

    def of_entries(self) -> Pairs:
        """The products of all pairs of different features, (1 or B, d, d)."""
        odd, own, uv = self.estimate.odd, self.of_features, None
        if self.skew is None or not self.gaussian.is_diagonal:
            if self.skew is None:
                inner, gram = self._groups
            else:
                eye = torch.eye(self.stats.k, dtype=odd.dtype, device=odd.device)
                q = self.gaussian.whiten(eye).double()
                turned = self.skew.apply(q.expand(len(self.stats), -1, -1))
                inner, gram = turned @ turned.mT, (q @ q.mT)[None]  # the same for all examples
            mixed = odd.double().mT @ odd.double() / self.stats.n_head.clamp_min(1)[:, None, None]
            uv = Products(inner, gram, mixed)
            own = Products(*(m.diagonal(dim1=-2, dim2=-1) for m in uv))
        return Pairs(Products(*(p[..., None] for p in own)), Products(*(p[:, None] for p in own)), uv)

    def of_row(self, i: int, gram: Tensor) -> Pairs:
        """The products of feature i with every feature; `gram` (1 or B, d) is q_i·q_j."""
        own, odd = self.of_features, self.estimate.odd
        if self.skew is None:
            inner, gram = (m[:, i] for m in self._groups)
        else:
            unit = torch.zeros(1, 1, self.stats.k, dtype=odd.dtype, device=odd.device)
            unit[..., i] = 1
            q = self.gaussian.whiten(unit)
            twice = -self.skew.apply(self.skew.apply(q.expand(len(self.stats), 1, -1)))[:, 0]  # AᵀA q_i
            inner = self.gaussian.push(twice.to(odd.dtype)).double()
            gram = gram.expand_as(inner)
        mine = Products(*(part[:, i, None] for part in own))
        return Pairs(mine, own, Products(inner, gram, self.energy(odd[..., i, None], odd)))

    def of_bilinear(self, both: Tensor, gram: Tensor) -> Pairs:
        """The products of two directions u and v, stacked to (B, 2, d); `gram` (B, 2, 2) are those of q."""
        odd = self.estimate.odd
        if self.skew is None:
            inner = both.double() @ self._groups[0] @ both.double().mT
        else:
            turned = self.skew.apply(self.gaussian.whiten(both).double())
            inner = turned @ turned.mT
        moved = odd @ both.mT.to(odd)  # (B, P, 2)
        found = inner, gram, self.energy(moved[..., None], moved[..., None, :])
        return Pairs(*(Products(*(m[:, a, b] for m in found)) for a, b in ((0, 0), (1, 1), (0, 1))))
