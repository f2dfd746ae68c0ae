"""Variance of what was sampled in tail strata.

The couples of draws are independent and have equal weights, so the variance of a mean over them is that of single
couples over their number. It is estimated from the couples that `tail_rows` stores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from smoothhess.estimate.tail_rows import TailRows
from smoothhess.linalg.effective_number import effective_number
from smoothhess.linalg.gram import pair_norm


class TailVariance:
    """Variances of B examples in the coordinates of their rows; zero for examples without strata."""

    def __init__(self, rows: TailRows) -> None:
        self.rows = rows

    @property
    def contributions(self) -> Tensor:
        """|s|²|γ|² of the stored couples, (B, c) float64."""
        squares = self.rows.score.double().square().sum(-1) * self.rows.odd.double().square().sum(-1)
        return squares.mean(2)

    @cached_property
    def effective(self) -> Tensor:
        """Effective number of couples, (Σe)²/Σe² of their contributions e, (B,); infinite without couples."""
        found = effective_number(self.contributions) * self.rows.n / self.rows.stored.clamp_min(1)
        return torch.where(found > 0, found, torch.inf)

    @property
    def df(self) -> Tensor:
        """Degrees of freedom of the variances, (B,): those of the couples, or fewer if a few of them carry the mean."""
        return torch.minimum(self._freedom, (self.effective - 1).clamp_min(1))

    @property
    def _freedom(self) -> Tensor:
        return (self.rows.stored - 1).clamp_min(1).double()

    def of_form(self, left: Callable[[Tensor], Tensor], right: Callable[[Tensor], Tensor]) -> Tensor | float:
        """Variance of uᵀĤv, (B, …); `left` and `right` map rows (B, r, k) to their products with u and v, (B, r, …)."""
        if not self.rows.odd.shape[1]:
            return 0.0
        score, odd = self.rows.score.double(), self.rows.odd.double()  # (B, c, 2, k)
        if left(score[:, 0]).ndim == 4:
            some = torch.nonzero(self.rows.n).reshape(-1)
            if not len(some):
                return 0.0
            entries = TailVariance(self.rows.select(some))._of_mean(*_entry_sums(score[some], odd[some]))
            return entries.new_zeros(len(score), *entries.shape[1:]).index_copy(0, some, entries)
        score, odd = score.flatten(1, 2), odd.flatten(1, 2)
        forms = left(score) * right(odd) + right(score) * left(odd)
        forms = forms.unflatten(1, (-1, 2)).sum(2) / 4  # mean over each couple of the symmetric part
        return self._of_mean(forms.sum(1), forms.square().sum(1))

    @cached_property
    def of_frobenius(self) -> Tensor:
        """Sum of the variances of all entries, (B,)."""
        zero = torch.zeros_like(self.rows.n, dtype=torch.float64)
        some = torch.nonzero(self.rows.n).reshape(-1)
        if len(some) < len(zero):
            return zero.index_copy(0, some, TailVariance(self.rows.select(some)).of_frobenius) if len(some) else zero
        score, odd = self.rows.score, self.rows.odd
        each = pair_norm(score.flatten(0, 1), odd.flatten(0, 1)).reshape(odd.shape[:2]).sum(1) / 4
        mean = pair_norm(score.flatten(1, 2), odd.flatten(1, 2)) / 4 / self.rows.stored.clamp_min(1)
        return ((each - mean) / self._freedom).clamp_min(0) / self.rows.n.clamp_min(1)

    def of_gradient(self) -> Tensor:
        """Variance of the part of the gradient, (B, k)."""
        return self._of_mean(self.rows.even.double().sum(1), self.rows.even.double().square().sum(1))

    def of_value(self) -> Tensor:
        """Variance of the part of the value, (B,)."""
        return self._of_mean(self.rows.value.double().sum(1), self.rows.value.double().square().sum(1))

    def _of_mean(self, total: Tensor, square: Tensor) -> Tensor:
        """The variance of single couples over their number, from the sum and the sum of squares of the stored ones."""
        shape = (-1, *[1] * (total.ndim - 1))
        kept, df, weight = (
            t.reshape(shape) for t in (self.rows.stored.clamp_min(1), self._freedom, (1 / self.rows.n.clamp_min(1)))
        )
        return (square - total.square() / kept).clamp_min(0) / df * weight


def _entry_sums(score: Tensor, odd: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over couples of F = Σ_p (s_p o_pᵀ + o_p s_pᵀ)/4 and of its squared entries, (B, k, k), for (B, c, 2, k).

    (s_pi o_pj + o_pi s_pj)(s_qi o_qj + o_qi s_qj) is a sum of four products of a function of i and a function of j, so
    that both sums are products of matrices.
    """
    left, right = torch.cat([score, odd], 2).flatten(1, 2), torch.cat([odd, score], 2).flatten(1, 2)
    total = left.mT @ right / 4
    square = torch.zeros_like(total)
    for p, q in ((0, 0), (0, 1), (1, 1)):  # the two rows of a couple
        first, second = (score[:, :, p], odd[:, :, p]), (score[:, :, q], odd[:, :, q])
        of_i = torch.cat([a * b for a in first for b in second], 1)
        of_j = torch.cat([a * b for a in first[::-1] for b in second[::-1]], 1)
        square = torch.baddbmm(square, of_i.mT, of_j, alpha=(1 if p == q else 2) / 16)
    return total, square
