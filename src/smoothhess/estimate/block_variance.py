"""Estimate of the variance from the scatter of independent replicates: blocks, scramblings or single rows.

This module sums rows over replicates and computes the variance between them. The estimate from the antisymmetric half
is in `antisymmetric_variance`; both are combined in `pooled_variance`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from smoothhess.draws.designs import find_design
from smoothhess.estimate.incomplete_blocks import pieces
from smoothhess.estimate.statistics import DrawRange, symmetric
from smoothhess.estimate.unbiased_hessian import Unbiased

SquaredNorm = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
LARGE_REPLICATE = 8  # rows; incomplete blocks of larger replicates are treated in `incomplete_blocks`


class Replicates:
    """The independent replicates of the rows in the head."""

    def __init__(self, estimate: Unbiased) -> None:
        self.estimate, self.stats = estimate, estimate.stats
        stats = self.stats
        self.size = find_design(stats.design).replicate_rows(stats.rank)
        self.has_blocks = self.size > 1 and stats.design == "orthogonal"  # the antisymmetric half is used for these
        self.alone = False  # whether no example has two replicates
        if self.size == 1:
            rows = torch.arange(stats.head.odd.shape[1], device=stats.n.device)
            self.sizes = (rows < stats.n_head[:, None]).double()  # (B, U)
        else:
            rows = stats.n_head.tolist()
            ends = [_boundaries(stats.stream[b], rows[b], self.size) for b in range(len(stats))]
            most = max(map(len, ends))
            self.alone = most < 2
            sizes = [[b - a for a, b in e] + [0] * (most - len(e)) for e in ends]
            grouped: dict[tuple[tuple[int, int], ...], list[int]] = {}
            for example, own in enumerate(ends):
                grouped.setdefault(tuple(own), []).append(example)
            # examples whose replicates begin and end at the same rows are batched
            self.alike = [(torch.tensor(e, device=stats.n.device), own) for own, e in grouped.items()]
            self.sizes = torch.tensor(sizes, dtype=torch.float64, device=stats.n.device)
        self.weight = self.sizes.sum(1)  # rows in the head, (B,)
        # The mean of a replicate of w rows has variance σ²/w; unequal replicates have fewer degrees of freedom.
        self.df = (self.weight.square() / self.sizes.square().sum(1).clamp_min(1) - 1).clamp_min(0)
        self.divisor = ((self.sizes > 0).sum(1) - 1).double()
        self.loose = torch.zeros_like(self.weight)  # rows of incomplete replicates beyond the head, (B,)
        if self.size > 1 and bool((stats.n > stats.n_head).any()):
            for example, stream in enumerate(stats.stream):
                parts = [b - a for a, b in pieces(stream, self.size) if b > int(stats.n_head[example])]
                self.loose[example] = sum(m for m in parts if m < self.size)

    def sums(self, rows: Tensor) -> Tensor:
        """Sums of values per row over each replicate, (B, P, …) → (B, U, …)."""
        rows = rows.double().expand(len(self.stats), *rows.shape[1:])
        if self.size == 1:
            return rows
        summed = rows.new_zeros(len(rows), self.sizes.shape[1], *rows.shape[2:])
        for examples, ends in self.alike:
            for unit, (a, b) in enumerate(ends):
                summed[examples, unit] = rows[examples, a:b].sum(1)
        return summed

    def spread(self, values: Tensor) -> Tensor:
        """Values per replicate (U,), repeated for the rows of each replicate, (1 or B, P)."""
        if self.size == 1:
            return values[None]
        rows = values.new_zeros(len(self.stats), self.stats.head.odd.shape[1])
        for examples, ends in self.alike:
            for unit, (a, b) in enumerate(ends):
                rows[examples, a:b] = values[unit]
        return rows

    def of_mean(self, rows: Tensor) -> Tensor:
        """Variance of the mean over all n rows of a quantity with the values `rows` (B, P, …) in the head."""
        if self.alone:
            return self.divisor.new_zeros(len(self.stats), *rows.shape[2:])
        sums = self.sums(rows)
        shape = (*self.sizes.shape, *[1] * (sums.ndim - 2))
        sizes, weight = self.sizes.reshape(shape), self.weight.reshape(-1, *shape[2:])
        centred = sums - sizes * (sums.sum(1) / weight.clamp_min(1))[:, None]
        squares = (centred.square() / sizes.clamp_min(1)).sum(1)
        return self._per_mean(squares) + self._of_loose(lambda: rows.double().square().sum(1))

    def _of_loose(self, squares: Callable[[], Tensor]) -> Tensor | float:
        """Variance from rows of incomplete replicates beyond the head; `squares` gives Σ of squares over the head."""
        if self.size > LARGE_REPLICATE or not bool((self.loose > 0).any()):
            return 0.0
        total = squares()
        n, head, loose = (t.reshape(-1, *[1] * (total.ndim - 1)) for t in (self.stats.n, self.stats.n_head, self.loose))
        return loose / n.clamp_min(1).square() * total / head.clamp_min(1)

    def of_form(self, rows: Tensor, identity: Tensor) -> Tensor:
        """As `of_mean`, for uᵀĤv of corrected rows; `identity` (1 or B, …) is uᵀIv with the image I of the identity."""
        if self.alone or not self.estimate.needs_correction:
            return self.of_mean(rows)
        lift = self.estimate.correction.lift
        return self.of_mean(rows + lift.reshape(*lift.shape, *[1] * (rows.ndim - 2)) * identity[:, None])

    def of_entries(self) -> Tensor:
        """Variance of each entry of the symmetrised estimate, (B, k, k)."""
        if self.alone:
            return self.divisor.new_zeros(1).expand(len(self.stats), self.stats.k, self.stats.k)
        s, g = self.stats.head.score.double(), self.estimate.odd.double()
        if self.size == 1:
            # Σ_i of the squared entries of (s gᵀ + g sᵀ)/2
            mean = symmetric(s.mT @ g)  # of sums
            cross = s.square().mT @ g.square()
            squares = (cross + cross.mT + 2 * (s * g).mT @ (s * g)) / 4
        else:
            mean = g.new_zeros(len(self.stats), self.stats.k, self.stats.k)
            squares = torch.zeros_like(mean)
            identity = self.estimate.identity.dense() if self.estimate.needs_correction else None
            for examples, ends in self.alike:
                scores, gradients = s if len(s) == 1 else s[examples], g[examples]
                for a, b in ends:
                    part = symmetric(scores[:, a:b].mT @ gradients[:, a:b])
                    if identity is not None:
                        lift = self.estimate.correction.lift[examples, a:b].sum(1)
                        part = part + lift[:, None, None] * (identity if len(identity) == 1 else identity[examples])
                    mean[examples] += part
                    squares[examples] += part.square() / (b - a)
        squares = squares - mean.square() / self.weight.clamp_min(1)[:, None, None]

        def of_rows() -> Tensor:
            return ((s[..., None] * g[..., None, :] + g[..., None] * s[..., None, :]) / 2).square().sum(1)

        return self._per_mean(squares.clamp_min(0)) + self._of_loose(of_rows)

    def of_norm(self, score: Tensor, odd: Tensor, squared_norm: SquaredNorm) -> Tensor:
        """Sum of the variances of all entries, (B,).

        `squared_norm(S, G, c, i)` is ‖sym SᵀG + c I‖² of rows (b, r, k) and constants (b,) of the examples i (b,), in
        any coordinates.
        """
        if self.alone:
            return torch.zeros_like(self.divisor)
        batch, lift = len(self.stats), self.estimate.correction.lift
        everyone = torch.arange(batch, device=lift.device)
        if not self.estimate.needs_correction:
            lift = torch.zeros_like(lift)
        if self.size == 1:  # the norm of a single row's estimate needs no matrix
            score = score.expand(batch, *score.shape[1:])
            of_sum = squared_norm(score, odd, lift.sum(1), everyone) / self.weight.clamp_min(1)
            rows, moved = (t.reshape(-1, 1, t.shape[-1]) for t in (score, odd))
            owner = everyone.repeat_interleave(lift.shape[1])
            squares = squared_norm(rows, moved, lift.reshape(-1), owner).reshape(batch, -1).sum(1)
        else:
            of_sum, squares = (torch.zeros_like(self.weight) for _ in range(2))
            for examples, ends in self.alike:
                s, g, c = score if len(score) == 1 else score[examples], odd[examples], lift[examples]
                last = max((b for _, b in ends), default=0)
                index = torch.as_tensor(examples, device=lift.device)
                of_sum[examples] = squared_norm(s[:, :last], g[:, :last], c[:, :last].sum(1), index) / max(last, 1)
                for a, b in ends:
                    squares[examples] += squared_norm(s[:, a:b], g[:, a:b], c[:, a:b].sum(1), index) / (b - a)
        spread = squares - of_sum

        def of_rows() -> Tensor:
            rows, moved = (t.expand(batch, *t.shape[1:]).reshape(-1, 1, t.shape[-1]) for t in (score, odd))
            owner = everyone.repeat_interleave(lift.shape[1])
            return squared_norm(rows, moved, lift.reshape(-1), owner).reshape(batch, -1).sum(1)

        return self._per_mean(torch.where(spread > 1e-12 * squares, spread, 0.0)) + self._of_loose(of_rows)

    def _per_mean(self, squares: Tensor) -> Tensor:
        shape = (-1, *[1] * (squares.ndim - 1))
        divisor, n = self.divisor.reshape(shape), self.stats.n.reshape(shape)
        return torch.where(divisor > 0, squares / divisor.clamp_min(1) / n.clamp_min(1), 0.0)


def _boundaries(stream: Sequence[DrawRange], left: int, size: int) -> list[tuple[int, int]]:
    """First row and last row + 1 of each replicate in a head of `left` rows; one that exceeds the head is left out."""
    ends = [piece for piece in pieces(stream, size) if piece[0] < left]
    return ends if ends and ends[-1][1] <= left else ends[:-1]
