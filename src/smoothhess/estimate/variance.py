"""Monte-Carlo variance of the value, the gradient and the Hessian.

`Noise` has one method for each quantity: entries, a row, a bilinear form, a norm. Its variance is composed of the part
that the sampled rows show (`pooled_variance` for the Hessian, `mean_variance` for means over rows), of errors that no
row shows (`unseen_events`, `missed_variance`). Intervals are in
`smoothhess.result.interactions`, the error of the denoised estimate is in `shrinkage`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from smoothhess.draws.designs import SMALL
from smoothhess.draws.gaussian import Gaussian
from smoothhess.draws.seeding import torch_generator
from smoothhess.estimate.antisymmetric_variance import Prior, Products, Skew
from smoothhess.estimate.block_variance import Replicates
from smoothhess.estimate.control_errors import ControlErrors
from smoothhess.estimate.effective_draws import bounded_df
from smoothhess.estimate.incomplete_blocks import Gram, Values
from smoothhess.estimate.mean_variance import MeanVariance
from smoothhess.estimate.missed_variance import MissedVariance
from smoothhess.estimate.pooled_variance import PooledVariance
from smoothhess.estimate.rare_flip_variance import RareFlipVariance
from smoothhess.estimate.statistics import Statistics, symmetric
from smoothhess.estimate.student_t import pooled_df
from smoothhess.estimate.unbiased_hessian import Unbiased
from smoothhess.estimate.unseen_events import UnseenEvents

BOOTSTRAPS, LEAST_UNITS = 16, 8  # sign bootstraps for the operator norm, and the replicates that they need


@dataclass(frozen=True, eq=False)
class Variance:
    """Variance of an estimate, with its degrees of freedom."""

    value: Tensor
    df: Tensor  # (B,)


class Variances(Protocol):
    """The variances that every result has, whether it was sampled or not."""

    def of_mean(self, rows: Tensor, exact: Tensor | None = None) -> Variance:
        """Variance of the mean of a quantity with one value per row, (B, …)."""
        ...

    def of_value(self) -> Variance:
        """Variance of the smoothed value, (B,)."""
        ...

    def of_gradient(self) -> Variance:
        """Variance of the smoothed gradient, (B, d)."""
        ...

    def of_entries(self) -> Variance:
        """Variance of every entry of the Hessian, (B, d, d)."""
        ...

    def of_diagonal(self) -> Variance:
        """Variance of H_ii, (B, d)."""
        ...

    def of_row(self, i: int) -> Variance:
        """Variance of H_ij for every j, (B, d)."""
        ...

    def of_bilinear(self, u: Tensor, v: Tensor) -> Variance:
        """Variance of uᵀHv for directions (B, d), (B,)."""
        ...

    def operator_norms(self) -> tuple[Tensor, Tensor]:
        """‖Ĥ‖₂ and the typical ‖Ĥ − H‖₂, (B,) each."""
        ...


class Noise:
    """Variances of one sampled result, with the interface `Variances`.

    `white` holds the whitened statistics (None for group sums), `features` those in the coordinates of features or
    groups. `no_kinks` (B,) marks examples of which no draw can cross a kink; None: of none this is known.
    """

    def __init__(
        self,
        white: Statistics | None,
        features: Statistics,
        gaussian: Gaussian,
        no_kinks: Tensor | None = None,
    ) -> None:
        self.white, self.features, self.gaussian = white, features, gaussian
        self.no_kinks = no_kinks
        self.estimate = Unbiased(features, gaussian, grouped=white is None)

    # --- the parts that the variances are composed of -------------------------------------------------------------

    @cached_property
    def pooled(self) -> PooledVariance:
        """Variances of the Hessian that the rows show."""
        return PooledVariance(self.white, self.estimate)

    @cached_property
    def unseen_events(self) -> UnseenEvents:
        """Errors that no row shows."""
        return UnseenEvents(self.pooled, self.no_kinks)

    @cached_property
    def control_errors(self) -> ControlErrors:
        """Errors that a control variate adds."""
        return ControlErrors(self.white, self.features, self.gaussian)

    @property
    def biased(self) -> Tensor:
        """Where the bias of the control variate's expectation is more than half of the squared error, (B,)."""
        bias = torch.as_tensor(self.control_errors.of_drift).expand(len(self.features))
        return (bias > 0) & (2 * bias > self.of_frobenius)

    @cached_property
    def missed(self) -> MissedVariance:
        """Variance that the rows do not show."""
        flips = RareFlipVariance(self.white, self.features)
        return MissedVariance(self.control_errors, flips, self.estimate.identity)

    @property
    def replicates(self) -> Replicates:
        """The independent replicates of the head."""
        return self.pooled.replicates

    @property
    def skew(self) -> Skew | None:
        """The antisymmetric half of a whitened estimate; None for group sums and designs without blocks."""
        return self.pooled.skew

    @property
    def prior(self) -> Prior | None:
        """Variances from the antisymmetric half; None for designs without orthogonal blocks."""
        return self.pooled.prior

    @cached_property
    def df(self) -> Tensor:
        """Degrees of freedom of the Hessian's variances, (B,)."""
        tails = self.missed.tails
        if tails is None:
            return self.pooled.df
        of_tails = tails.of_frobenius
        return pooled_df((self.of_frobenius - of_tails, self.pooled.df), (of_tails, tails.df))

    @property
    def unmoved(self) -> Tensor:
        """Where the sampled gradients did not vary, (B,); further draws may still cross a kink."""
        return self.unseen_events.unmoved

    @property
    def unknown(self) -> Tensor:
        """Where the error is unknown, (B,): no sampled gradient shows a kink, but the operations may have some."""
        return self.unseen_events.unknown

    # --- value and gradient ---------------------------------------------------------------------------------------

    def of_mean(self, rows: Tensor, exact: Tensor | None = None) -> Variance:
        """Variance of the mean of a quantity with one value per row; see `MeanVariance.of_mean`."""
        value, df = MeanVariance(self.replicates).of_mean(rows, exact)
        if self.white is None:
            return Variance(value, bounded_df(self.features, df))
        return Variance(value, bounded_df(self.white.without_computed_flips, df, self.features.gradient))

    def of_value(self) -> Variance:
        """Variance of the smoothed value, (B,)."""
        exact = None
        if self.replicates.has_blocks and self.features.rank > SMALL:
            exact = self.features.head.along.double() * self.features.rank / 2  # a quadratic function has w f = k α/2
            exact = exact * self.features.has_own_values[:, None]
        found, tails = self.of_mean(self.features.head.value_even, exact), self.missed.tails
        df = found.df if tails is None else pooled_df((found.value, found.df), (tails.of_value(), tails.df))
        return Variance(found.value + self.missed.of_value(), df)

    def of_gradient(self) -> Variance:
        """Variance of the smoothed gradient, (B, d)."""
        found = self.of_mean(self.features.head.even)
        # rounding of γ(0) and of the rows, which does not average out
        rounding = (2 * self.features.n * self.unseen_events.rounding)[:, None] * self.estimate.identity.diagonal
        tails, df = self.missed.tails, found.df
        if tails is not None:
            df = pooled_df((found.value.sum(-1), df), (tails.of_gradient().sum(-1), tails.df))
        return Variance(found.value + rounding + self.missed.of_gradient(), df)

    # --- entries, rows and bilinear forms of the Hessian ----------------------------------------------------------

    def _of_form(
        self,
        rows: Tensor,
        gram: Gram,
        prior: Callable[[Prior], Tensor],
        values: Callable[[], Values],
        along: Callable[[], tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Variance of uᵀĤv from its value in each corrected row; `values` are those of the sampled estimate."""
        units = (
            self.replicates.of_form(rows, gram.mixed) if self.estimate.has_identity else self.replicates.of_mean(rows)
        )
        return self.unseen_events.bounded(self.pooled.of_form(units, gram, prior, values, along), gram)

    @cached_property
    def _moving(self) -> Tensor:
        """Features that are not frozen, (d,); the entries of frozen features are exactly zero."""
        if self.white is None:
            return torch.ones(self.features.k, dtype=torch.bool, device=self.features.n.device)
        return self.gaussian.precision_diagonal(self.features.k).to(self.features.n.device) > 0

    def of_entries(self) -> Variance:
        """Variance of every entry, (B, d, d)."""
        errors, moving, lengths = self.control_errors, self._moving, self.estimate.identity.diagonal
        independent = self.white is not None and self.gaussian.is_diagonal  # then q_i·q_j = 0 for i ≠ j
        mixed = lengths.new_zeros(1, 1, 1) if independent else self.estimate.identity.dense()
        gram = Gram(lengths[..., None], lengths[:, None], mixed)

        def prior(p: Prior) -> Tensor:
            return p.variance(*self.pooled.directions.of_entries())

        def values() -> Values:
            sampled = self.estimate.sampled_dense()
            own = sampled.diagonal(dim1=-2, dim2=-1)
            return Values(own[..., None], own[:, None], sampled)

        def along() -> tuple[Tensor, Tensor]:
            factor = self.pooled.along_features
            return factor[..., None], factor[:, None]

        units = self.replicates.of_entries()
        pooled = self.pooled.of_form(units, gram, prior, values, None if independent else along)
        entries = self.unseen_events.bounded(pooled, gram)
        entries = entries + errors.drift(errors.drifting[..., None], errors.drifting[:, None], gram)
        entries = entries + self.missed.of_form(gram, lambda w: w[..., None], lambda w: w[:, :, None])
        if independent:
            entries.diagonal(dim1=-2, dim2=-1).copy_(self.of_diagonal().value)
        if not bool(moving.all()):
            entries = torch.where(moving[:, None] & moving, entries, 0.0)
        return Variance(entries, self.df)

    def of_diagonal(self) -> Variance:
        """Variance of H_ii, (B, d)."""
        errors, lengths = self.control_errors, self.estimate.identity.diagonal

        def prior(p: Prior) -> Tensor:
            return p.variance(*[self.pooled.directions.of_features] * 3)

        def values() -> Values:
            return Values(*[self.estimate.sampled_diagonal] * 3)

        rows = self.features.head.score * self.estimate.odd
        gram = Gram(lengths, lengths, lengths)

        def along() -> tuple[Tensor, Tensor]:
            return self.pooled.along_features, self.pooled.along_features

        value = self._of_form(rows, gram, prior, values, along)
        value = (
            value
            + errors.drift(errors.drifting, errors.drifting, gram)
            + self.missed.of_form(gram, lambda w: w, lambda w: w)
        )
        return Variance(torch.where(self._moving, value, 0.0), self.df)

    def of_row(self, i: int) -> Variance:
        """Variance of H_ij for every j, (B, d)."""
        errors, lengths = self.control_errors, self.estimate.identity.diagonal
        score, odd = self.features.head.score, self.estimate.odd
        rows = (score[..., i, None] * odd + odd[..., i, None] * score) / 2
        unit = torch.zeros(1, 1, self.features.k, dtype=odd.dtype, device=odd.device)
        unit[..., i] = 1
        gram = Gram(lengths[:, i, None], lengths, self.estimate.identity.product(unit)[:, 0].double())

        def prior(p: Prior) -> Tensor:
            return p.variance(*self.pooled.directions.of_row(i, gram.mixed))

        def values() -> Values:
            own = self.estimate.sampled_diagonal
            row = self.estimate.sampled_product(unit.expand(len(self.features), 1, -1))[:, 0]
            return Values(own[:, i, None], own, row)

        def along() -> tuple[Tensor, Tensor]:
            factor = self.pooled.along_features
            return factor[:, i, None], factor

        value = self._of_form(rows, gram, prior, values, along)
        value = value + errors.drift(errors.drifting[:, i, None], errors.drifting, gram)
        value = value + self.missed.of_form(gram, lambda w: w[..., i, None], lambda w: w)
        return Variance(torch.where(self._moving & self._moving[i], value, 0.0), self.df)

    def of_bilinear(self, u: Tensor, v: Tensor) -> Variance:
        """Variance of uᵀHv for directions (B, d), (B,)."""
        errors, estimate = self.control_errors, self.estimate
        score, odd = self.features.head.score, estimate.odd
        left, right = u[:, None], v[:, None]
        rows = (score * left).sum(-1) * (odd * right).sum(-1) / 2
        rows = rows + (score * right).sum(-1) * (odd * left).sum(-1) / 2
        both = torch.stack([u, v], 1)  # (B, 2, d)
        products = estimate.identity.product(both).double() @ both.double().mT  # (B, 2, 2)
        gram = Gram(products[:, 0, 0], products[:, 1, 1], products[:, 0, 1])

        def prior(p: Prior) -> Tensor:
            return p.variance(*self.pooled.directions.of_bilinear(both, products))

        def values() -> Values:
            sampled = estimate.sampled_product(both).double() @ both.double().mT
            return Values(sampled[:, 0, 0], sampled[:, 1, 1], sampled[:, 0, 1])

        def along() -> tuple[Tensor, Tensor]:
            pairs, found = self.pooled.directions.of_bilinear(both, products), values()
            own = Products(*(torch.stack(parts, -1) for parts in zip(pairs.uu, pairs.vv, strict=True)))
            sampled = torch.stack([found.left, found.right], -1)
            factor = self.pooled.along(score @ both.mT, odd @ both.mT, own, sampled)
            return factor[:, 0], factor[:, 1]

        value = self._of_form(rows, gram, prior, values, along)
        value = value + self.missed.of_form(
            gram, lambda w: (w @ u[..., None].to(w))[..., 0], lambda w: (w @ v[..., None].to(w))[..., 0]
        )
        if self.features.drift is not None:
            left, right = ((self.features.drift @ w[..., None]).double().square().mean((1, 2)) for w in (u, v))
            value = value + errors.drift(left, right, gram)
        return Variance(value, self.df)

    # --- norms ----------------------------------------------------------------------------------------------------

    @cached_property
    def of_frobenius(self) -> Tensor:
        """E‖Ĥ − H‖²_F, the sum of the variances of all entries, computed without these, (B,)."""
        estimate, identity = self.estimate, self.estimate.identity
        units = self.replicates.of_norm(self.features.head.score, estimate.odd, estimate.pair_norm)
        total = identity.diagonal.sum(-1)

        def prior(_: Prior) -> Tensor:
            # (tr G tr κ + tr Gκ)/2 over all pairs; κ is taken to be proportional to the rows' energy
            kappa, energy = self.pooled.kappa_trace, self.pooled.directions.of_features.energy.sum(-1)
            mixed = self.pooled.directions.energy(estimate.odd, identity.product(estimate.odd)).sum(-1)
            return (kappa * total + kappa * mixed / energy.clamp_min(1e-300)) / 2

        def values() -> Values:
            trace, norm = estimate.sampled_diagonal.sum(-1), estimate.sampled_squared_norm.clamp_min(0).sqrt()
            return Values(trace, trace, norm)

        # sums over all pairs of products are products of sums, or squared norms
        gram = Gram(total, total, identity.squared_norm.sqrt())
        found = self.unseen_events.bounded(self.pooled.of_form(units, gram, prior, values), gram)
        return found + self.missed.of_frobenius

    def operator_norms(self) -> tuple[Tensor, Tensor]:
        """‖Ĥ‖₂ and the typical ‖Ĥ − H‖₂, (B,) each."""
        stats = self.features
        raw = stats.summed() / stats.n.reshape(-1, 1, 1).clamp_min(1)
        size = torch.linalg.eigvalsh(self.estimate.dense()).abs().amax(-1)
        if self.prior is not None and bool((self.replicates.df < LEAST_UNITS).any()):
            if stats.k <= SMALL or stats.rank <= SMALL:  # an upper bound, in few dimensions
                return size, self.of_frobenius.sqrt()
            skew = torch.linalg.matrix_norm((raw - raw.mT) / 2, 2)  # has the noise of the symmetric half
            skew2 = skew.square() * (stats.k + 1) / (stats.k - 1)
            return size, (skew2 + self.missed.of_frobenius).sqrt()
        s, g = stats.head.score.double(), stats.head.odd.double()
        rng = torch_generator()
        head = stats.n_head.reshape(-1, 1, 1).clamp_min(1)
        mean = stats.head.sum() / head
        norms = []
        for _ in range(BOOTSTRAPS):  # deviations of replicates from their mean, with random signs
            signs = torch.randint(0, 2, self.replicates.sizes.shape[1:], generator=rng).to(s) * 2 - 1
            balance = (self.replicates.sizes * signs).sum(1).reshape(-1, 1, 1)
            scored = s * self.replicates.spread(signs)[..., None]
            norms.append(torch.linalg.eigvalsh(symmetric((scored.mT @ g - balance * mean) / head)).abs().amax(-1))
        error = torch.stack(norms).square().mean(0).sqrt() * (stats.n_head / stats.n.clamp_min(1)).sqrt()
        error = (error.square() + self.missed.of_frobenius).sqrt()
        return size, torch.where(self.replicates.df > 0, error, torch.inf)
