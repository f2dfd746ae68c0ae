"""HessianEstimate: the Hessian of B examples as it is estimated from statistics, with its error.

The stopping rule of the explainers and the results that users hold read the same estimate. This module chooses between
the unbiased and the denoised estimate, and forms sums over groups; the formulas of the two are in `unbiased_hessian`
and `shrinkage`, the variances of single numbers in `variance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from smoothhess.draws.gaussian import Gaussian
from smoothhess.estimate import effective_draws, fit_quality
from smoothhess.estimate.grouping import Grouping, probes
from smoothhess.estimate.once import Once
from smoothhess.estimate.shrinkage import Denoised, Shrunk, denoise
from smoothhess.estimate.statistics import DENSE_LIMIT, Statistics, concatenate, symmetric
from smoothhess.estimate.stein_check import z_scores
from smoothhess.estimate.unbiased_hessian import Unbiased
from smoothhess.estimate.variance import Noise

TOLD_FROM_ZERO = 1.0  # the estimate of ‖H‖² must exceed this many standard deviations that it would have for H = 0


@dataclass(frozen=True, eq=False)
class HessianEstimate:
    """The unbiased and the denoised estimate of the Hessian from one set of statistics.

    `hessian`, `product`, `relative_error` and `r2` are those of the *reported* estimate: the denoised one if `shrink`
    is True, otherwise the unbiased one. `noise` holds the variances of the unbiased estimate.
    """

    statistics: Statistics  # whitened, or of group sums
    gaussian: Gaussian
    grouping: Grouping | None
    shrink: bool = False
    no_kinks: Tensor | None = None  # (B,) where no draw can cross a kink; None: unknown for all examples
    sums: Shrunk | None = None  # denoised group sums, which cannot be denoised from their own statistics
    cached_denoised: Once[Denoised] = field(default_factory=lambda: Once[Denoised]())
    cached_matrix: Once[Tensor] = field(default_factory=lambda: Once[Tensor]())

    def __len__(self) -> int:
        return len(self.statistics)

    @cached_property
    def features(self) -> Statistics:
        """The statistics in the coordinates of the features or groups."""
        return self.statistics if self.grouping is not None else self.statistics.map(self.gaussian.push)

    @cached_property
    def noise(self) -> Noise:
        """Variances of everything that is read off the unbiased estimate."""
        return Noise(self.statistics if self.grouping is None else None, self.features, self.gaussian, self.no_kinks)

    @property
    def unbiased(self) -> Unbiased:
        """The unbiased estimate."""
        return self.noise.estimate

    @property
    def denoised(self) -> Denoised | None:
        """The denoised estimate in whitened coordinates; None for group sums, or if `shrink` is False."""
        if not self.shrink or self.grouping is not None:
            return None
        return self.cached_denoised.get(lambda: denoise(self.statistics, self.gaussian, self.features.k))

    # --- value, gradient, and the reported Hessian ----------------------------------------------------------------

    @property
    def output(self) -> Tensor:
        """f(x), (B,)."""
        return self.statistics.value

    @property
    def value(self) -> Tensor:
        """Estimate of h(x) = E f(x + δ), (B,)."""
        stats = self.statistics
        return stats.value + stats.value_mean.to(stats.gradient.dtype)

    @property
    def gradient(self) -> Tensor:
        """Estimate of ∇h(x), (B, d)."""
        stats = self.features
        return stats.gradient + stats.even_mean.to(stats.gradient.dtype)

    @property
    def hessian(self) -> Tensor:
        """The reported Hessian, dense and symmetric, (B, d, d)."""
        return self.cached_matrix.get(self._dense)

    def _dense(self) -> Tensor:
        dtype = self.statistics.gradient.dtype
        if self.sums is not None:
            return self.sums.hessian
        if self.denoised is not None:
            refuse_dense(self.features.k)
            return symmetric(self.gaussian.push(self.gaussian.push(self.denoised.dense().to(dtype)).mT))
        return self.unbiased.dense().to(dtype)

    def product(self, rows: Tensor) -> Tensor:
        """The reported H applied to each row of (B, n, d)."""
        if self.sums is not None or self.cached_matrix.value is not None:
            return rows @ self.hessian
        if self.denoised is not None:
            return self.gaussian.push(self.denoised.product(self.gaussian.whiten(rows)))
        return self.unbiased.product(rows)

    # --- quality --------------------------------------------------------------------------------------------------

    @cached_property
    def relative_error(self) -> Tensor:
        """Estimated ‖Ĥ − H‖_F / ‖H‖_F of the reported Hessian, (B,); see `Interactions.relative_error`."""
        error = torch.where(self.noise.unseen_events.exact, 0.0, self._known_error())
        return torch.where(self.noise.unknown, torch.nan, error).to(self.statistics.gradient.dtype)

    def _known_error(self) -> Tensor:
        """`relative_error` of examples whose error is known, (B,)."""
        if self.sums is not None:
            return _ratio(self.sums.error2, self.sums.true2)
        if self.denoised is not None:
            more = self.noise.missed.of_frobenius
            error2, true2 = self.denoised.error2 + more, self.denoised.true2
            error = _ratio(error2, torch.where(true2 > 0, true2 + more, 0.0))
            number = effective_draws.effective_rows(self.statistics.without_computed_flips)
            few = (number < effective_draws.FEW) & (number > 0)
            if not bool(few.any()):
                return error
            # a few draws do not show which part of an estimate is noise
            return torch.where(few, error.maximum(_unbiased_error(self.noise)), error)
        return _unbiased_error(self.noise)

    @property
    def has_heavy_tails(self) -> Tensor:
        """Where a few draws carry the estimate, (B,); see `effective_draws.heavy_tails`."""
        slope = None if self.grouping is not None else self.gaussian.push(self.statistics.gradient)
        return effective_draws.heavy_tails(self.statistics, self.grouping is not None, slope)

    @cached_property
    def r2(self) -> Tensor:
        """Share of the gradient's variation that the reported Hessian explains, (B,); see `Interactions.r2`."""
        dtype = self.statistics.gradient.dtype
        if self.grouping is not None:
            return self.grouping.r2
        if self.denoised is not None:
            variation = fit_quality.variation(self.noise)
            share = (self.denoised.explained / variation).clamp_max(1)
            return torch.where(variation > 0, share, torch.nan).to(dtype)
        return fit_quality.explained(self.noise).to(dtype)

    @cached_property
    def stein_z(self) -> Tensor:
        """z-scores of the check that the gradients are the derivatives of the values, (B, 2)."""
        return z_scores(self.statistics.stein, self.statistics.n).to(self.statistics.gradient.dtype)

    # --- group sums -----------------------------------------------------------------------------------------------

    def grouped(self, grouping: Grouping, d: int) -> HessianEstimate:
        """The estimate of sums over groups of features, or of groups; an input has `d` features."""
        grouping = replace(grouping, r2=self.r2)
        stats = self.features.map(grouping.sum)
        composed = grouping
        if self.grouping is not None:  # composed to one grouping of the features, which `more` needs
            composed = grouping.after(self.grouping, self.gaussian.scales(d))
        if self.noise.skew is not None:  # the antisymmetric half of the groups is kept with their sums
            q = grouping.directions(self.gaussian).double()
            watched = torch.cat([q, probes(stats.rank, q).expand(len(q), -1, -1)], 1).expand(len(self), -1, -1)
            skew = self.noise.skew.apply(watched).mT * stats.n[:, None, None]
            stats = replace(stats, skew=skew, gram=q @ q.mT)
        elif stats.skew is not None and stats.gram is not None:
            k = self.features.k
            skew = torch.cat([grouping.sum(stats.skew[..., :k]), stats.skew[..., k:]], -1)
            stats = replace(stats, skew=skew, gram=grouping.sum(grouping.sum(stats.gram).mT))
        unbiased = HessianEstimate(stats, self.gaussian, composed, no_kinks=self.no_kinks)
        sums = self._denoised_groups(grouping, unbiased)
        return unbiased if sums is None else unbiased.changed(sums=sums, shrink=True)

    def _denoised_groups(self, grouping: Grouping, unbiased: HessianEstimate) -> Shrunk | None:
        """Group sums that use the denoised Hessian; None if there is none, and for groups of groups."""
        if self.denoised is None:
            return None
        q = grouping.directions(self.gaussian).expand(len(self), -1, -1)
        hessian = symmetric(self.denoised.product(q) @ q.mT).double()
        risk = self.denoised.group_error2(lambda rows, i: grouping.select(i).sum(self.gaussian.push(rows)))
        noise = unbiased.noise
        rows = noise.estimate.odd.double()
        gram, missed = noise.estimate.identity.dense(), noise.missed.of_frobenius  # common to both
        found = Shrunk.combine(
            noise.estimate.dense(), noise.of_entries().value, hessian, risk + missed, gram, rows.mT @ rows
        )
        return replace(found, hessian=found.hessian.to(self.statistics.gradient.dtype))

    # --- selection, concatenation, merging ------------------------------------------------------------------------

    def changed(self, **fields: Any) -> HessianEstimate:
        """A copy with other fields, and without the cached quantities, which depend on them."""
        return replace(self, **{"cached_denoised": Once(), "cached_matrix": Once(), **fields})

    def with_statistics(self, statistics: Statistics) -> HessianEstimate:
        """The estimate from other statistics of the same examples; denoised sums of groups are lost."""
        return HessianEstimate(
            statistics,
            self.gaussian,
            None if self.grouping is None else self.grouping.without_r2(),
            self.shrink and self.sums is None,
            self.no_kinks,
        )

    def released(self) -> HessianEstimate:
        """A copy without cached quantities, except the denoised estimate."""
        return replace(self, statistics=replace(self.statistics), cached_matrix=Once())

    def select(self, index: Tensor) -> HessianEstimate:
        """The examples at `index`, in that order."""
        return HessianEstimate(
            self.statistics.select(index),
            self.gaussian,
            None if self.grouping is None else self.grouping.select(index),
            self.shrink,
            None if self.no_kinks is None else self.no_kinks[index],
            None if self.sums is None else self.sums.select(index),
            self.cached_denoised.then(lambda denoised: denoised.select(index)),
        )

    def to(self, device: torch.device | str) -> HessianEstimate:
        """Copy to another device."""
        return HessianEstimate(
            self.statistics.to(device),
            self.gaussian.to(device, self.statistics.gradient.dtype),
            None if self.grouping is None else self.grouping.to(device),
            self.shrink,
            None if self.no_kinks is None else self.no_kinks.to(device),
            None if self.sums is None else self.sums.to(device),
            self.cached_denoised.then(lambda denoised: denoised.to(device)),
        )

    @staticmethod
    def cat(parts: Sequence[HessianEstimate]) -> HessianEstimate:
        """Concatenate estimates of different examples with equal settings."""
        first = parts[0]
        denoised = [p.cached_denoised.value for p in parts if p.cached_denoised.value is not None]
        groupings = [p.grouping for p in parts if p.grouping is not None]
        sums = [p.sums for p in parts if p.sums is not None]
        return HessianEstimate(
            concatenate([p.statistics for p in parts]),
            first.gaussian,
            Grouping.cat(groupings, [*map(len, parts)]) if groupings else None,
            first.shrink,
            _flags(parts),
            Shrunk.cat(sums) if sums else None,
            Once(Denoised.cat(denoised) if len(denoised) == len(parts) else None),
        )


def refuse_dense(features: int, use: str = "groups(mask), row(i), diagonal(), bilinear(u, v) or result @ v") -> None:
    """Raise if there are too many features for a dense matrix; `use` names what can be used instead."""
    if features > DENSE_LIMIT:
        raise ValueError(f"{features} features are too many for a dense matrix ({DENSE_LIMIT} at most). Use {use}.")


def _flags(parts: Sequence[HessianEstimate]) -> Tensor | None:
    """`no_kinks` of all examples; False for estimates without it."""
    if all(p.no_kinks is None for p in parts):
        return None
    none = [torch.zeros_like(p.statistics.n, dtype=torch.bool) for p in parts]
    return torch.cat([z if p.no_kinks is None else p.no_kinks for p, z in zip(parts, none, strict=True)])


def _unbiased_error(noise: Noise) -> Tensor:
    """The relative error of the unbiased estimate, (B,)."""
    variance = noise.of_frobenius
    signal = noise.estimate.squared_norm - variance
    return _ratio(variance, torch.where(fit_quality.zero_score(noise) > TOLD_FROM_ZERO, signal, 0.0))


def _ratio(error2: Tensor, true2: Tensor) -> Tensor:
    """√(error²/‖H‖²); infinite where the estimate of ‖H‖² is zero and the error is not."""
    ratio = (error2 / true2.clamp_min(torch.finfo(torch.float64).tiny)).sqrt()
    return torch.where(true2 > 0, ratio, torch.where(error2 > 0, torch.inf, 0.0))
