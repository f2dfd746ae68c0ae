"""Variance from neurons that few draws flip, by the margins and jumps of the frozen network.

A ± pair of draws flips a neuron with probability 2p, p = Φ(−t), and its row then changes by ½a ĵ (designs without
mirror images: with probability p, by a ĵ). With
C = E[ssᵀ | flip] = I + κ ĵĵᵀ, κ = t φ(t)/p, the variance of uᵀŴv over n rows is

    V = 2p (a/2)² [C_uu w_v² + C_vv w_u² + 2 C_uv w_u w_v]/4n,      w = ĵ·q of the whitened directions q.

V is added where fewer than SEEN flips are expected, in proportion to the flips that the rows lack. Orthogonal blocks
have no error from the linear part of the flips, a share 2φ(t)²/p of their energy, and weights of about k/(k + κ) in
rows with a flip, which are long. The neurons are found in `curvature.rare_flips`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from smoothhess.curvature.rare_flips import RARE, chance, unseen_share
from smoothhess.draws.designs import SMALL, find_design
from smoothhess.estimate.incomplete_blocks import Gram
from smoothhess.estimate.statistics import Statistics

MOST_OVERCOUNTED = 3.0  # largest part of V that is subtracted for a neuron that flipped more often than expected


class RareFlipVariance:
    """Variances of the quantities of B examples, in the coordinates of `stats`; zero if no neuron is known.

    `white` holds the whitened statistics (None for group sums), which show how often the rows flip each neuron.
    """

    def __init__(self, white: Statistics | None, stats: Statistics) -> None:
        self.white, self.stats, self.flips = white, stats, stats.rare

    @property
    def is_zero(self) -> bool:
        """Whether no neuron is known."""
        return self.flips is None or not bool(self.flips.jump.any())

    @cached_property
    def directions(self) -> Tensor:
        """ĵ in the coordinates of the statistics, (B, m, d) float64."""
        assert self.flips is not None
        return self.flips.direction.double()

    @cached_property
    def _chance(self) -> Tensor:
        assert self.flips is not None
        return chance(self.flips.margin)

    @cached_property
    def _density(self) -> Tensor:
        assert self.flips is not None
        return torch.exp(-self.flips.margin.square() / 2) / math.sqrt(2 * math.pi)

    @cached_property
    def _of_mean(self) -> Tensor:
        """2p (a/2)²/n, times the share that the rows lack, (B, m)."""
        assert self.flips is not None
        return (
            self._of_one_flip
            * self._radial
            * self._lacking(lambda beyond: (beyond > 0).double(), torch.ones_like(self._chance))
        )

    @cached_property
    def _of_one_flip(self) -> Tensor:
        """2p (a/2)²/n for ± pairs, p a²/n for single draws, (B, m)."""
        assert self.flips is not None
        share = 0.5 if self._mirrored else 1.0
        return self._chance * self.flips.jump.square() * share / self.stats.n.clamp_min(1)[:, None]

    @property
    def _mirrored(self) -> bool:
        return find_design(self.stats.design).mirrored

    @cached_property
    def _weight(self) -> Tensor:
        """The same for the odd parts of the rows, without what blocks estimate exactly, (B, m)."""
        if self.stats.design != "orthogonal":
            return self._of_mean
        linear = 2 * self._density.square() / self._chance.clamp_min(1e-300)
        twice = 2.0 if self.stats.rank <= SMALL else 1.0  # half of the rows have twice the score
        return self._of_mean * (1 - linear).clamp_min(0) * twice

    @cached_property
    def _radial(self) -> Tensor:
        """E[w | flip] of the weights w of the rows, (B, m): that of k/|z|², with |z|² ≈ k + κ."""
        if self.stats.design != "orthogonal":
            return torch.ones_like(self._along)
        return 1 / (1 + self._along / self.stats.rank)

    def _lacking(self, size: Callable[[Tensor], Tensor], usual: Tensor) -> Tensor:
        """Share of the expected sum over flips that the rows lack, (B, m); 0 if many flips are expected.

        It is negative for neurons that flipped more often than expected, so that sums over neurons are not biased.
        Summed is `size` of the distance beyond the kink, in units of τ, with the mean `usual` (B, m) over flips.
        """
        assert self.flips is not None
        per_row = 2.0 if self._mirrored else 1.0
        expected = unseen_share(self.flips.margin, per_row * self.stats.n.clamp_min(1)[:, None].double())
        if self.white is None or self.white.rare is None:
            return expected
        z = self.white.draws()
        length2 = z.double().square().sum(-1)
        weight = (length2 > 0).double()  # (1 or B, P); rows without a score have no z
        rows = weight.sum(1).clamp(1, None).minimum(self.white.n_head.clamp_min(1))
        if self.stats.design == "orthogonal":  # whose rows are longer than normal draws, and weighted accordingly
            weight = torch.where(length2 > 0, self.stats.rank / length2.clamp_min(1e-300), 0.0)
        found = size(self.white.rare.beyond(z, self._mirrored)) * weight[..., None]
        lacking = 1 - found.sum(1) / rows[:, None] / (per_row * self._chance * usual).clamp_min(1e-300)
        often = (lacking == 1).double()  # neurons that flip often count only if no row flips them
        return expected * torch.where(self._chance < RARE, lacking.clamp_min(-MOST_OVERCOUNTED), often)

    @cached_property
    def _along(self) -> Tensor:
        """κ, (B, m)."""
        assert self.flips is not None
        return torch.where(self._chance > 0, self.flips.margin * self._density / self._chance.clamp_min(1e-300), 0.0)

    def of_form(self, gram: Gram, left: Tensor, right: Tensor) -> Tensor | float:
        """V of uᵀĤv, (B, …), from w_u and w_v of each neuron, (B, m, …) each, and the products of q_u and q_v."""
        if self.is_zero:
            return 0.0
        shape = (*left.shape[:2], *[1] * (left.ndim - 2))
        weight, along = (self._weight / 4).reshape(shape), self._along.reshape(shape)

        def over_neurons(a: Tensor, b: Tensor) -> Tensor:
            """Σ a b over neurons; for all entries, (B, m, d, 1) and (B, m, 1, d), a product of matrices."""
            return a[..., 0].mT @ b[:, :, 0] if left.ndim == 4 else (a * b).sum(1)

        square = right.square()
        total = gram.left * (weight * square).sum(1) + gram.right * (weight * left.square()).sum(1)
        total = total + 2 * gram.mixed * over_neurons(weight * left, right)
        return (total + over_neurons(4 * weight * along * left.square(), square)).clamp_min(0)

    def of_frobenius(self, gram: Tensor, lengths: Tensor) -> Tensor | float:
        """Sum of V over all entries, (B,); `gram` (B, m) is w·Gw of each neuron, `lengths` (B or 1,) the trace of G."""
        if self.is_zero:
            return 0.0
        size = self.directions.square().sum(-1)  # (B, m)
        inner = 2 * lengths[:, None] * size + 2 * gram + 4 * self._along * size.square()
        return (self._weight / 4 * inner).sum(1).clamp_min(0)

    def of_gradient(self) -> Tensor | float:
        """Variance of the smoothed gradient, (B, d)."""
        return 0.0 if self.is_zero else (self._of_mean[..., None] * self.directions.square()).sum(1).clamp_min(0)

    def of_value(self) -> Tensor | float:
        """Variance of the smoothed value, (B,): a flipped neuron changes it by a (ξ − t), ξ ~ N(0, 1) beyond t."""
        if self.is_zero or self.flips is None:
            return 0.0
        usual = (1 + self.flips.margin.square() - self._along).clamp_min(0)  # E[(ξ − t)² | ξ > t]
        return (self._of_one_flip * self._radial * usual * self._lacking(torch.square, usual)).sum(1).clamp_min(0)
