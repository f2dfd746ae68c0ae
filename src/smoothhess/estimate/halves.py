"""Halves: two independent unbiased estimates from the draws of one, for choices that must not bias what they choose.

The rows are cut between two replicates of the design (blocks, scramblings or single rows), so both parts are
independent, and each is unbiased: incomplete blocks are corrected within themselves, and the control variate's
expectation is added back to both. What is chosen from one part, an eigenvector or a pair, is evaluated on the other.
Intervals of eigenvalues are in `smoothhess.result.eigenvalue_intervals`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from smoothhess.draws.designs import find_design
from smoothhess.estimate.incomplete_blocks import pieces
from smoothhess.estimate.statistics import DrawRange, symmetric
from smoothhess.estimate.unbiased_hessian import Unbiased


@dataclass(frozen=True, eq=False)
class SymmetricOperator:
    """A symmetric matrix for each of B examples: its products with rows, and its entries."""

    product: Callable[[Tensor], Tensor]  # (B, n, d) → (B, n, d)
    dense: Callable[[], Tensor]  # (B, d, d) float64


class Halves:
    """Both parts of an unbiased estimate; they mean nothing for examples without a `cut`."""

    def __init__(self, estimate: Unbiased) -> None:
        self.estimate, self.stats = estimate, estimate.stats
        stats = self.stats
        rows, kept = stats.n.tolist(), stats.n_head.tolist()
        size = find_design(stats.design).replicate_rows(stats.rank)
        cuts = [_cut(stats.stream[b], rows[b], kept[b], size) for b in range(len(stats))]
        self.cut = torch.tensor(cuts, device=stats.n.device)  # (B,) rows of the first part; 0: fewer than two blocks
        if stats.tails is not None:  # whose couples must be cut as well; those of merged runs have different weights
            known = (stats.tails.stored == stats.tails.n) & (~self._merged | (stats.tails.n == 0))
            self.cut = torch.where(known, self.cut, 0)
        self.share = torch.where(self.cut > 0, self.cut.double() / stats.n.clamp_min(1), 0.5)  # of the first part, (B,)

    @cached_property
    def _weight(self) -> Tensor:
        """Weight of each row of the head in the first part, (B, P)."""
        rows = torch.arange(self.stats.head.odd.shape[1], device=self.cut.device)
        return (rows < self.cut[:, None]).double() / self.cut.clamp_min(1)[:, None]

    @property
    def _constant(self) -> Tensor:
        """The multiple of the identity that the correction of incomplete blocks adds to the first part, (B,)."""
        return (self.estimate.correction.lift * self._weight).sum(1)

    def _first_product(self, rows: Tensor) -> Tensor:
        score, odd = self.stats.head.score, self.estimate.odd
        weight = self._weight[:, None].to(rows)
        found = ((rows @ odd.mT * weight) @ score + (rows @ score.mT * weight) @ odd) / 2
        if self.stats.added is not None:
            found = found + self.stats.added.product(rows)
        if self.stats.tails is not None:
            score, odd = self.stats.tails.first_half_change(self.share)
            found = found + ((rows @ odd.mT) @ score + (rows @ score.mT) @ odd) / 2
        if self.estimate.needs_correction:
            found = found + self._constant[:, None, None].to(rows) * self.estimate.identity.product(rows)
        return found

    def _first_dense(self) -> Tensor:
        score, odd = self.stats.head.score.double(), self.estimate.odd.double()
        found = symmetric((score * self._weight[..., None]).mT @ odd)
        if self.stats.added is not None:
            found = found + self.stats.added.dense().double()
        if self.stats.tails is not None:
            score, odd = self.stats.tails.first_half_change(self.share)
            found = found + symmetric(score.double().mT @ odd.double())
        if self.estimate.needs_correction:
            found = found + self._constant[:, None, None] * self.estimate.identity.dense()
        return found

    def _rest(self, whole: Tensor, first: Tensor) -> Tensor:
        """The second part, of which the whole is the mean with the first."""
        share = self.share[:, None, None].to(whole)
        return (whole - share * first) / (1 - share)

    @property
    def first(self) -> SymmetricOperator:
        """The estimate from the rows before the cut."""
        return SymmetricOperator(self._first_product, self._first_dense)

    @property
    def second(self) -> SymmetricOperator:
        """The estimate from the rows after the cut."""
        return SymmetricOperator(
            lambda rows: self._rest(self.estimate.product(rows), self._first_product(rows)),
            lambda: self._rest(self.estimate.dense(), self._first_dense()),
        )

    @property
    def reason(self) -> str:
        """Why some examples cannot be cut; empty if all can."""
        short = torch.nonzero(self.cut == 0).reshape(-1).tolist()
        if not short:
            return ""
        tails = self.stats.tails
        if tails is not None and bool((tails.stored < tails.n).any()):
            return (
                f"{len(short)} of {len(self.stats)} example(s), the first at index {short[0]}, have more draws from "
                f"tail strata than the {int(tails.stored.max())} that are kept. Pass fewer calls, or tails=None."
            )
        if tails is not None and bool((self._merged & (tails.n > 0)).any()):
            return (
                f"{len(short)} of {len(self.stats)} example(s), the first at index {short[0]}, are merged from runs "
                "with draws from tail strata, which cannot be divided. Use a single run, or tails=None in all of them."
            )
        design = find_design(self.stats.design)
        calls = 2 * design.replicate_rows(self.stats.rank) * design.calls_per_row
        return (
            f"{len(short)} of {len(self.stats)} example(s), the first at index {short[0]}, have fewer than two "
            f"independent blocks of draws. Pass n_calls={calls} or more."
        )

    @property
    def share_control(self) -> Tensor:
        """Where both parts have the same control variate, (B,): none, or the rows are those of one run."""
        return ~self._merged | self.stats.is_uncontrolled

    @cached_property
    def _merged(self) -> Tensor:
        """Where the rows are those of several runs, (B,)."""
        return torch.tensor([len(ranges) > 1 for ranges in self.stats.stream], device=self.stats.n.device)


def _cut(stream: Sequence[DrawRange], rows: int, kept: int, size: int) -> int:
    """The boundary of replicates among the first `kept` rows that is nearest to the middle; 0 below two replicates.

    >>> _cut([DrawRange(0, 0, 10)], 10, 10, 4), _cut([DrawRange(0, 0, 7)], 7, 7, 4)
    (4, 0)
    """
    if rows < 2 * size:
        return 0
    if size == 1:
        return min(rows // 2, kept)
    ends = [last for _, last in pieces(stream, size) if last <= kept and last < rows]
    return min(ends, key=lambda end: abs(2 * end - rows), default=0)
