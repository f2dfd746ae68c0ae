"""Combination of the two estimates of the Hessian's variance, weighted by their degrees of freedom.

The scatter of independent replicates of the design (`block_variance`) and, for orthogonal blocks, the antisymmetric
half of the estimate (`antisymmetric_variance`) both estimate Var(uᵀĤv). The variance of incomplete blocks, which the
antisymmetric half lacks, is added before both are averaged, and the variance along a direction is corrected with the
residuals of the rows (`residual_variance`). Errors from events that were not sampled are estimated in `unseen_events`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from smoothhess.draws.designs import SMALL
from smoothhess.estimate.antisymmetric_variance import Prior, Products, Skew
from smoothhess.estimate.block_variance import Replicates
from smoothhess.estimate.direction_products import DirectionProducts
from smoothhess.estimate.effective_draws import bounded_df
from smoothhess.estimate.incomplete_blocks import Gram, Values, missing_variance
from smoothhess.estimate.residual_variance import ResidualVariance
from smoothhess.estimate.statistics import Statistics
from smoothhess.estimate.unbiased_hessian import Unbiased

ROWS_PER_DF = 20  # rows of complete blocks whose residuals have one degree of freedom
LEAST_LENGTH = 1e-5  # of the part of a group's direction outside of the others, over the longest
MOST_ALONG = 1e6  # upper bound of the factor on the variance along a direction
LEAST_SHARE = 0.5  # lower bound of the variance of incomplete blocks, as a share of that from the antisymmetric half


class PooledVariance:
    """The weighted mean of both variances; `white` holds the whitened statistics (None for group sums)."""

    def __init__(self, white: Statistics | None, estimate: Unbiased) -> None:
        self.white, self.estimate, self.stats = white, estimate, estimate.stats

    @cached_property
    def replicates(self) -> Replicates:
        """The independent replicates of the head."""
        return Replicates(self.estimate)

    @cached_property
    def skew(self) -> Skew | None:
        """The antisymmetric half of a whitened estimate; None for group sums and designs without blocks."""
        return Skew(self.white) if self.white is not None and self.replicates.has_blocks else None

    @cached_property
    def prior(self) -> Prior | None:
        """Variances from the antisymmetric half; None for designs without orthogonal blocks."""
        if not self.replicates.has_blocks:
            return None
        if self.skew is None:
            return Prior.of_groups(self.stats, self.estimate.energy)
        return Prior.of_features(self.skew, self.stats, self.estimate.energy)

    @cached_property
    def directions(self) -> DirectionProducts:
        """Products of the directions of features or groups."""
        return DirectionProducts(self.estimate, self.skew)

    @property
    def df(self) -> Tensor:
        """Degrees of freedom of the Hessian's variances, (B,); fewer than the effective rows."""
        found = self.replicates.df if self.prior is None else self.replicates.df + self._prior_df
        if self.white is None:
            return bounded_df(self.stats, found)
        return bounded_df(self.white.without_computed_flips, found, self.stats.gradient)

    @cached_property
    def _prior_df(self) -> Tensor:
        """Degrees of freedom of the variances from a single block (Satterthwaite), (B,).

        The variance from incomplete blocks and radial functions is estimated from all rows, with about half of the
        degrees of freedom of independent rows; the rest is estimated from the directions that carry the noise. At least
        `prior.df`, at most that of the features' directions; 0 in few dimensions, where the antisymmetric half is not
        used. Its sum with `replicates.df` determines the widths of intervals, and enters the stopping rule.
        """
        assert self.prior is not None
        stats, k, c = self.stats, self.stats.rank, self.estimate.correction
        total = self.prior.trace * (k + 1) / 2  # E‖Ŵ − W‖²_F, whitened
        # ‖W₀‖² of the linear part: the energy of the rows minus their noise
        linear2 = (self.estimate.energy - stats.n * self.prior.trace).clamp_min(0)
        linear = torch.minimum((c.corrected + c.plain) * k * linear2, total)
        known = linear + c.radial * k * k
        rest = total - linear
        spread = known.square() / (stats.n / 2).clamp_min(1) + rest.square() / self.prior.df.clamp_min(1e-9)
        found = torch.where(spread > 0, (known + rest).square() / spread.clamp_min(1e-300), self.prior.df)
        most = self.prior.df_of_directions(self.directions.of_features)
        found = torch.minimum(torch.maximum(found, self.prior.df), most)
        return torch.where(self.prior.df > 0, found, 0.0)

    @cached_property
    def kappa_trace(self) -> Tensor:
        """Sum over the features of the noise of a direction, from the antisymmetric half, (B,)."""
        assert self.prior is not None
        return self.prior.own(self.directions.of_features).sum(-1)

    def weigh(self, units: Tensor, prior: Tensor | None = None) -> Tensor:
        """Mean of both variances, weighted by their degrees of freedom; infinite if neither has any."""
        shape = (-1, *[1] * (units.ndim - 1))
        a = self.replicates.df.reshape(shape)
        if prior is None:
            return torch.where(a > 0, units, torch.inf)
        b = self._prior_df.reshape(shape)
        if self.replicates.alone:
            return torch.where(b > 0, prior, torch.inf)
        return torch.where(a + b > 0, (a * units + b * prior) / (a + b).clamp_min(1e-9), torch.inf)

    @cached_property
    def whitened(self) -> Statistics | None:
        """Statistics with whitened rows; those of group sums only where the groups' directions span the whole space."""
        stats = self.stats
        if self.white is not None or stats.gram is None or stats.k != stats.rank:
            return self.white
        factor, failed = torch.linalg.cholesky_ex(stats.gram.double())
        lengths = factor.diagonal(dim1=-2, dim2=-1)
        if bool(failed.any()) or bool((lengths.amin(-1) < LEAST_LENGTH * lengths.amax(-1)).any()):
            return None
        inverse = torch.linalg.inv(factor).mT
        return replace(stats, head=stats.head.map(lambda rows: rows @ inverse.to(rows)))

    @cached_property
    def _residuals(self) -> ResidualVariance:
        assert self.prior is not None
        return ResidualVariance(self.whitened, self.estimate, self.prior.trace)

    def along(self, score: Tensor, odd: Tensor, products: Products, values: Tensor) -> Tensor:
        """Factor on the variance of vᵀĤv from the antisymmetric half, from the residuals of the rows, (B, m).

        The variance of the residuals is used where it is larger, and the mean weighted by degrees of freedom elsewhere.
        `score` and `odd` are the products of the head's rows with the directions, (B, P, m), `values` the sampled vᵀĤv.
        """
        assert self.prior is not None
        found, gram = self.prior.variance(*[products] * 3), products.gram
        if self.estimate.correction.has_variance:
            found = self._with_missing(found, Values(*[values] * 3), Gram(*[gram] * 3))
        ratio = (self._residuals.of_directions(score, odd, gram) / found.clamp_min(1e-300)).clamp_max(MOST_ALONG)
        correction = self.estimate.correction
        complete = correction.corrected + correction.plain == 0  # residuals lack the noise of incomplete blocks
        own = self.stats.n_head / ROWS_PER_DF * complete * (self.whitened is not None)
        share = self._prior_df / (self._prior_df + own).clamp_min(1e-9)
        return ratio + share[:, None] * (1 - ratio).clamp_min(0)

    @cached_property
    def along_features(self) -> Tensor:
        """The factor of every feature or group, (B, d)."""
        estimate = self.estimate
        return self.along(self.stats.head.score, estimate.odd, self.directions.of_features, estimate.sampled_diagonal)

    def _with_missing(self, found: Tensor, values: Values, gram: Gram) -> Tensor:
        """With the variance that the antisymmetric half lacks."""
        missing = missing_variance(self.estimate.correction, values, gram, self.stats.rank)
        return torch.maximum(missing.add_(found), found * LEAST_SHARE)

    def of_form(
        self,
        units: Tensor,
        gram: Gram,
        prior: Callable[[Prior], Tensor],
        values: Callable[[], Values],
        along: Callable[[], tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """Var(uᵀĤv) from its variance between replicates, `units`, and that from the antisymmetric half, `prior`.

        `values` gives the sampled uᵀĤu, vᵀĤv and uᵀĤv, `along` the factors on the variances of uᵀĤu and vᵀĤv, which
        apply to the share cos² of the whitened directions' angle; None if these are orthogonal.
        """
        if self.prior is None:
            return self.weigh(units)
        found = prior(self.prior)
        if self.estimate.correction.has_variance:
            found = self._with_missing(found, values(), gram)
        if along is not None and self.stats.rank > SMALL:  # in few dimensions the weight of this variance is zero
            left, right = along()
            cosine2 = gram.mixed.square() / (gram.left * gram.right).clamp_min(1e-300)
            found = found * (1 + ((left * right).sqrt() - 1) * cosine2)
        return self.weigh(units, found)
