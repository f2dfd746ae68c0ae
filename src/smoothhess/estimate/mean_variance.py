"""Variance of quantities with one value per row, such as the smoothed value and gradient."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from smoothhess.estimate import student_t
from smoothhess.estimate.block_variance import Replicates
from smoothhess.estimate.effective_draws import ONE_DIRECTION
from smoothhess.linalg.effective_number import effective_number

LEAST_BLOCKS = 5  # blocks from which the variance of a mean may be taken from their scatter


class MeanVariance:
    """Variances of means over rows."""

    def __init__(self, replicates: Replicates) -> None:
        self.replicates, self.features = replicates, replicates.stats

    def of_mean(self, rows: Tensor, exact: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the variance of the mean of a quantity with one value per row, and its degrees of freedom.

        Errors of the rows of one block are negatively correlated, so the variance of independent rows is an upper
        bound; the variance between blocks is unbiased, but uncertain for few blocks. From LEAST_BLOCKS blocks on, the
        one that gives the narrower intervals is used; the variance between fewer blocks is often small by chance.
        `exact` (B, P) is a part of each row, k α/2, whose mean over a complete block has no error but that of the mean
        curvature.
        """
        units = self.replicates.of_mean(rows)
        if not self.replicates.has_blocks:
            known = (self.replicates.df > 0).reshape(-1, *[1] * (units.ndim - 1))
            return torch.where(known, units, torch.inf), self.replicates.df
        rest = rows if exact is None else rows - exact.to(rows)
        independent, df = self._as_independent(rest), (self.features.n_head - 1).clamp_min(0).double()
        if exact is not None:
            # the error of the mean curvature depends on the same lengths as the rest
            radial = self.replicates.estimate.correction.radial.sqrt() * self.features.rank / 2
            independent = (independent.sqrt() + radial).square() + self._of_quadratic(exact) * self._incomplete_share
        total = [t.reshape(len(t), -1).sum(1) for t in (units, independent)]
        df_of_blocks = self._df_of_blocks(rows)
        by_blocks, by_rows = (student_t.quantile(0.95, d.cpu()).to(d.device).square() for d in (df_of_blocks, df))
        by_units = (self.replicates.df >= LEAST_BLOCKS - 1) & (by_blocks * total[0] < by_rows * total[1])
        value = torch.where(by_units.reshape(-1, *[1] * (units.ndim - 1)), units, independent)
        chosen = torch.where(by_units, df_of_blocks, df)
        value = torch.where((chosen > 0).reshape(-1, *[1] * (value.ndim - 1)), value, torch.inf)
        return value, chosen

    def _as_independent(self, rows: Tensor) -> Tensor:
        """Variance of the mean over all rows if they were independent, (B, …)."""
        rows = rows.double()
        n_head, n = (t.reshape(-1, *[1] * (rows.ndim - 2)) for t in (self.features.n_head, self.features.n))
        mean = rows.sum(1) / n_head.clamp_min(1)
        squares = (rows.square().sum(1) - n_head * mean.square()).clamp_min(0)
        return squares / (n_head - 1).clamp_min(1) / n.clamp_min(1)

    def _df_of_blocks(self, rows: Tensor) -> Tensor:
        """Degrees of freedom of the variance between blocks, (B,): fewer if few blocks carry it, as for single rows."""
        df, sizes = self.replicates.df, self.replicates.sizes
        if not bool((df >= LEAST_BLOCKS - 1).any()):
            return df
        sums = self.replicates.sums(rows).flatten(2) if rows.ndim > 2 else self.replicates.sums(rows)[..., None]
        mean = sums.sum(1, keepdim=True) / self.replicates.weight.clamp_min(1)[:, None, None]
        number = effective_number((sums - sizes[..., None] * mean).square().sum(-1) / sizes.clamp_min(1))
        few = (number > 0) & (number < ONE_DIRECTION * (self.replicates.divisor + 1))
        return torch.where(few, torch.minimum(df, (number - 1).clamp_min(1)), df)

    def _of_quadratic(self, exact: Tensor) -> Tensor:
        """Variance of the mean of the quadratic part k α/2 over all rows if they were independent, (B,).

        α = u·Wu of a uniformly random direction u has the variance 2/(k(k + 2)) (‖W‖² − tr(W)²/k), and ‖W‖² = k E|Wu|².
        If W has low rank, few rows show less of α's own scatter when their mean is too small, and |Wu|² varies less.
        """
        head, k = self.features.head, self.features.rank
        count = self.features.n_head.clamp_min(1)
        energy = (head.along.double().square() + head.across.double()).sum(1) / count
        spread = (energy - (head.along.double().sum(1) / count).square()).clamp_min(0) * 2 / (k + 2)
        shown = self._as_independent(exact)
        own = (exact != 0).any(1)  # zero where values and gradients are not those of the same function
        return torch.maximum(shown, torch.where(own, spread * k**2 / 4 / self.features.n.clamp_min(1), 0.0))

    @cached_property
    def _incomplete_share(self) -> Tensor:
        """Variance of a quadratic form's mean over the blocks, relative to independent rows, (B,); 0 if complete."""
        c, k = self.replicates.estimate.correction, self.features.rank
        # C (m/n)² summed over blocks, as the sum of m(k − m)/n², times n/(k − 1)
        return ((c.corrected + c.plain) * 2 * (k + 2) / k * self.features.n).clamp_max(1)
