"""Variance of quantities with one value per row, such as the smoothed value and gradient."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from smoothhess.estimate import student_t
from smoothhess.estimate.block_variance import Replicates

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
            independent = (independent.sqrt() + radial).square() + self._as_independent(exact) * self._incomplete_share
        total = [t.reshape(len(t), -1).sum(1) for t in (units, independent)]
        by_blocks, by_rows = (student_t.quantile(0.95, d.cpu()).to(d.device).square() for d in (self.replicates.df, df))
        by_units = (self.replicates.df >= LEAST_BLOCKS - 1) & (by_blocks * total[0] < by_rows * total[1])
        value = torch.where(by_units.reshape(-1, *[1] * (units.ndim - 1)), units, independent)
        chosen = torch.where(by_units, self.replicates.df, df)
        value = torch.where((chosen > 0).reshape(-1, *[1] * (value.ndim - 1)), value, torch.inf)
        return value, chosen

    def _as_independent(self, rows: Tensor) -> Tensor:
        """Variance of the mean over all rows if they were independent, (B, …)."""
        rows = rows.double()
        n_head, n = (t.reshape(-1, *[1] * (rows.ndim - 2)) for t in (self.features.n_head, self.features.n))
        mean = rows.sum(1) / n_head.clamp_min(1)
        squares = (rows.square().sum(1) - n_head * mean.square()).clamp_min(0)
        return squares / (n_head - 1).clamp_min(1) / n.clamp_min(1)

    @cached_property
    def _incomplete_share(self) -> Tensor:
        """Variance of a quadratic form's mean over the blocks, relative to independent rows, (B,); 0 if complete."""
        c, k = self.replicates.estimate.correction, self.features.rank
        # C (m/n)² summed over blocks, as the sum of m(k − m)/n², times n/(k − 1)
        return ((c.corrected + c.plain) * 2 * (k + 2) / k * self.features.n).clamp_max(1)
