"""Monte-Carlo variance of the value, the gradient and the Hessian.

Two estimates of the variance are combined, weighted by their degrees of freedom: the scatter of independent replicates
of the design (`block_variance`) and, for orthogonal blocks, the antisymmetric half of the estimate
(`antisymmetric_variance`). Contributions that no sampled row contains (rare events, rounding, the bias of a control
variate) are added here. Intervals are in `smoothhess.result.interactions`, the error of the denoised estimate is in
`shrinkage`.
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
from smoothhess.estimate.incomplete_blocks import (
    NEARLY_QUADRATIC,
    Correction,
    Gram,
    Values,
    is_quadratic,
    missing_variance,
)
from smoothhess.estimate.mean_variance import MeanVariance
from smoothhess.estimate.statistics import PROBES, Statistics, symmetric, unmoved
from smoothhess.estimate.unbiased_hessian import Unbiased

ROUNDING = 16  # assumed rounding error of a gradient, in units in the last place
EXACT_ROWS = 1e-10  # share of the noise in the energy of the rows below which they agree with a quadratic function
LEAST_SHARE = 0.5  # lower bound of the variance of incomplete blocks, as a share of that from the antisymmetric half
BOOTSTRAPS, LEAST_UNITS = 16, 8  # sign bootstraps for the operator norm, and the replicates that they need


_LEFT, _RIGHT = (..., None), (slice(None), None)  # indices that make (B, d) a column or a row of a matrix


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
    """Variances of one result: of its value and gradient, and of entries, rows and bilinear forms of its Hessian.

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

    @cached_property
    def control_errors(self) -> ControlErrors:
        """Errors that a control variate adds."""
        return ControlErrors(self.white, self.features, self.gaussian)

    @cached_property
    def means(self) -> MeanVariance:
        """Variances of means over rows."""
        return MeanVariance(self.features, self.replicates, self.correction, self.prior is not None)

    @cached_property
    def replicates(self) -> Replicates:
        """The independent replicates of the head."""
        return Replicates(self.estimate)

    @cached_property
    def skew(self) -> Skew | None:
        """The antisymmetric half of a whitened estimate; None for group sums and designs without blocks."""
        return Skew(self.white) if self.white is not None and self._has_blocks else None

    @property
    def _has_blocks(self) -> bool:
        """Whether the design has orthogonal blocks, for which the antisymmetric half is used."""
        return self.replicates.size > 1 and self.features.design == "orthogonal"

    @cached_property
    def prior(self) -> Prior | None:
        """Variances from the antisymmetric half; None for designs without orthogonal blocks."""
        if not self._has_blocks:
            return None
        if self.skew is not None:
            return Prior(self.skew.norm2, self.skew.spread, self.skew.k, self.features.n, self._total_energy)
        assert self.features.skew is not None
        probes = self.features.skew[..., self.features.k :] / self.features.n[:, None, None]
        norm2 = probes.square().sum(1).mean(-1)
        # ‖AᵀA‖²_F from inner products of different probes, which is unbiased
        products = (probes.mT @ probes).square()
        fourth = (products.sum((-1, -2)) - products.diagonal(dim1=-2, dim2=-1).sum(-1)) / (PROBES * (PROBES - 1))
        spread = torch.where(fourth > 0, norm2.square() / fourth, self.features.rank / 2)
        return Prior(norm2, spread, self.features.rank, self.features.n, self._total_energy)

    @cached_property
    def _total_energy(self) -> Tensor:
        """Mean of |γ|² over the corrected rows, whitened, (B,)."""
        head, n = self.features.head, self.features.n_head.clamp_min(1)
        along = head.along.double() - self.estimate.correction.slope
        square = (along.square() + head.across.double()) * self.features.rank
        return (square / head.weight.double().clamp_min(1e-300)).sum(1) / n

    def _energy(self, left: Tensor, right: Tensor) -> Tensor:
        """Mean over rows of the product of two quantities, (B, P, …) each."""
        n = self.features.n_head.clamp_min(1)
        return (left.double() * right.double()).sum(1) / n.reshape(-1, *[1] * (left.ndim - 2))

    @cached_property
    def _own_energy(self) -> Tensor:
        """Mean of (q_i·γ)² over rows, for every feature, (B, d)."""
        return self._energy(self.estimate.odd, self.estimate.odd)

    @cached_property
    def _group_products(self) -> tuple[Tensor, Tensor]:
        """(A q_I)·(A q_J) and q_I·q_J of groups, (B, K, K)."""
        assert self.features.skew is not None
        assert self.features.gram is not None
        turned = self.features.skew[..., : self.features.k] / self.features.n[:, None, None]
        return turned.mT @ turned, self.features.gram.expand(len(self.features), -1, -1)

    @property
    def df(self) -> Tensor:
        """Degrees of freedom of the Hessian's variances, (B,)."""
        return self.replicates.df if self.prior is None else self.replicates.df + self.prior_df

    @cached_property
    def prior_df(self) -> Tensor:
        """Degrees of freedom of the variances from a single block (Satterthwaite), (B,).

        The variance from incomplete blocks and radial functions is estimated from all rows, with about half of the
        degrees of freedom of independent rows; the rest is estimated from the directions that carry the noise.
        """
        assert self.prior is not None
        stats, k, c = self.features, self.features.rank, self.correction
        total = self.prior.trace * (k + 1) / 2  # E‖Ŵ − W‖²_F, whitened
        # ‖W₀‖² of the linear part: the energy of the rows minus their noise
        linear2 = (self._total_energy - stats.n * self.prior.trace).clamp_min(0)
        linear = torch.minimum((c.corrected + c.plain) * k * linear2, total)
        known = linear + c.radial * k * k
        rest = total - linear
        spread = known.square() / (stats.n / 2).clamp_min(1) + rest.square() / self.prior.df.clamp_min(1e-9)
        found = torch.where(spread > 0, (known + rest).square() / spread.clamp_min(1e-300), self.prior.df)
        found = torch.minimum(torch.maximum(found, self.prior.df), self.prior.df_of_directions(self._own_products))
        return torch.where(self.prior.df > 0, found, 0.0)

    def weigh(self, units: Tensor, prior: Tensor | None = None, prior_df: Tensor | None = None) -> Tensor:
        """Mean of both variances, weighted by their degrees of freedom; infinite if neither has any."""
        shape = (-1, *[1] * (units.ndim - 1))
        a = self.replicates.df.reshape(shape)
        if prior is None or prior_df is None:
            return torch.where(a > 0, units, torch.inf)
        b = prior_df.reshape(shape)
        if self.replicates.alone:
            return torch.where(b > 0, prior, torch.inf)
        return torch.where(a + b > 0, (a * units + b * prior) / (a + b).clamp_min(1e-9), torch.inf)

    # --- lower bounds for rare events and rounding ----------------------------------------------------------------

    @cached_property
    def unmoved(self) -> Tensor:
        """Where the sampled gradients did not vary, (B,); further draws may still cross a kink."""
        return unmoved(self.features)

    @cached_property
    def agrees_with_quadratic(self) -> Tensor:
        """Where the rows are those of a quadratic function, by their values or for lack of noise, (B,)."""
        found, nearly = is_quadratic(self.features), is_quadratic(self.features, NEARLY_QUADRATIC)
        if not bool((nearly & ~found).any()) or self.prior is None:
            return found
        rounding = 4 * self.features.rank * self.features.n.square() * self._rounding
        exact = self.features.n * self.prior.trace <= EXACT_ROWS * self._moved_square + rounding
        return found | (exact & nearly)  # values of float32 are less precise

    @cached_property
    def unknown(self) -> Tensor:
        """Where the error is unknown, (B,): no sampled gradient shows a kink, but the operations may have some."""
        found = (self.unmoved | self.agrees_with_quadratic) & self.features.is_uncontrolled
        return found if self.no_kinks is None else found & ~self.no_kinks

    @cached_property
    def _own_square(self) -> Tensor:
        """|γ(0)|², whitened; for groups a sum over their own directions, (B,)."""
        lengths = self.estimate.identity.diagonal
        size = self.features.gradient.double().square() / lengths.clamp_min(1e-300)
        return torch.where(lengths > 0, size, 0.0).sum(1)

    @cached_property
    def _moved_square(self) -> Tensor:
        """Mean of |γ|² over the rows, whitened, (B,)."""
        head, stats = self.features.head, self.features
        weight = head.weight.double().clamp_min(1e-300)
        moved = ((head.along.double().square() + head.across.double()) * stats.rank / weight).sum(1)
        return moved / stats.n_head.clamp_min(1)

    @cached_property
    def _rounding(self) -> Tensor:
        """Variance of uᵀĤv of whitened unit vectors from the rounding of gradients, (B,)."""
        eps = ROUNDING * torch.finfo(self.features.gradient.dtype).eps
        size = self._own_square + self._moved_square
        return eps**2 * size / (2 * self.features.rank * self.features.n.clamp_min(1))

    @cached_property
    def _rare(self) -> Tensor:
        """Variance of uᵀĤv of whitened unit vectors from an event with probability 1/n that no row contains, (B,).

        The size of the event is the average noise of a direction. This is about 1/n of the variance of directions along
        which gradients changed, and the whole variance of the others.
        """
        stats, n = self.features, self.features.n.clamp_min(1)
        noise = self._total_energy / n if self.prior is None else self.prior.trace
        return torch.where(stats.is_uncontrolled, noise / (2 * stats.rank * n), 0.0)

    @property
    def correction(self) -> Correction:
        """The correction of incomplete blocks of the estimate."""
        return self.estimate.correction

    # --- value and gradient ---------------------------------------------------------------------------------------

    def of_mean(self, rows: Tensor, exact: Tensor | None = None) -> Variance:
        """Variance of the mean of a quantity with one value per row; see `MeanVariance.of_mean`."""
        return Variance(*self.means.of_mean(rows, exact))

    def of_value(self) -> Variance:
        """Variance of the smoothed value, (B,)."""
        exact = None
        if self.prior is not None and self.features.rank > SMALL:
            exact = self.features.head.along.double() * self.features.rank / 2  # a quadratic function has w f = k α/2
            exact = exact * self.features.has_own_values[:, None]
        return self.of_mean(self.features.head.value_even, exact)

    def of_gradient(self) -> Variance:
        """Variance of the smoothed gradient, (B, d)."""
        found = self.of_mean(self.features.head.even)
        missed = 2 * self.features.n * self._rounding  # rounding of γ(0) and of the rows, which does not average out
        if self.control_errors.unseen is not None:
            missed = (
                missed + self.control_errors.unseen / self.features.rank**2
            )  # an event of average size with probability 1/n
        return Variance(found.value + missed.reshape(-1, 1) * self.estimate.identity.diagonal, found.df)

    # --- entries, rows and bilinear forms of the Hessian ----------------------------------------------------------

    def _of_form(
        self, rows: Tensor, gram: Gram, prior: Callable[[Prior], Tensor], values: Callable[[], Values]
    ) -> Variance:
        """Variance of uᵀĤv from its value in each corrected row; `values` are those of the sampled estimate."""
        units = (
            self.replicates.of_form(rows, gram.mixed) if self.estimate.has_identity else self.replicates.of_mean(rows)
        )
        return Variance(self._finished(units, gram, prior, values), self.df)

    @cached_property
    def _along_itself(self) -> Tensor:
        """Variance of the diagonal entries between blocks over that from the antisymmetric half, (B,), at least 1.

        It is computed from the sum over all diagonal entries, which suffices from two blocks on.
        """
        assert self.prior is not None
        own = self.estimate.identity.diagonal
        units = self.replicates.of_form(self.features.head.score * self.estimate.odd, own).sum(1)
        shown = self.prior.variance(*[self._own_products] * 3)
        if self.correction.has_variance:
            gram, values = Gram(own, own, own), Values(*[self.estimate.sampled_diagonal] * 3)
            shown = shown + missing_variance(self.correction, values, gram, self.features.rank)
        ratio = units / shown.sum(1).clamp_min(1e-300)
        return torch.where((self.replicates.df >= 1) & ratio.isfinite(), ratio, 1.0).clamp(1, 10)

    def _finished(
        self,
        units: Tensor,
        gram: Gram,
        prior: Callable[[Prior], Tensor],
        values: Callable[[], Values],
        parallel: bool = True,
    ) -> Tensor:
        """The variance of uᵀĤv from both estimates, with the contributions that neither of them contains."""
        if self.prior is None:
            variance = self.weigh(units)
        else:
            found = prior(self.prior)
            if not self.replicates.alone and parallel:
                cosine2 = gram.mixed.square() / (gram.left * gram.right).clamp_min(1e-300)
                found = found * (1 + (self._along_itself.reshape(-1, *[1] * (found.ndim - 1)) - 1) * cosine2)
            if self.correction.has_variance:
                missing = missing_variance(self.correction, values(), gram, self.features.rank)
                found = torch.maximum(found + missing, found * LEAST_SHARE)
            variance = self.weigh(units, found, self.prior_df)
        shape = (-1, *[1] * (variance.ndim - 1))
        both = gram.left * gram.right + gram.mixed.square()
        variance = torch.maximum(variance, self._rare.reshape(shape) * both) + self._rounding.reshape(shape) * both
        if self.no_kinks is not None:
            variance = torch.where((self.unmoved & self.no_kinks).reshape(shape), 0.0, variance)
        return torch.where(self.unknown.reshape(shape), torch.nan, variance)

    def of_entries(self) -> Variance:
        """Variance of every entry, (B, d, d)."""
        errors = self.control_errors
        inside = self._moving
        inner, gram = self._products()
        lengths = gram.diagonal(dim1=-2, dim2=-1)
        parts = Gram(lengths[..., None], lengths[:, None], gram)

        def prior(p: Prior) -> Tensor:
            assert inner is not None
            own, energy = inner.diagonal(dim1=-2, dim2=-1), self._own_energy
            mixed = torch.diag_embed(energy)
            if not self.gaussian.is_diagonal or self.white is None:
                odd = self.estimate.odd.double()
                mixed = odd.mT @ odd / self.features.n_head.clamp_min(1)[:, None, None]
            left, right = (Products(own[i], g, energy[i]) for i, g in ((_LEFT, parts.left), (_RIGHT, parts.right)))
            return p.variance(left, right, Products(inner, gram, mixed))

        def values() -> Values:
            sampled = self.estimate.sampled_dense()
            own = sampled.diagonal(dim1=-2, dim2=-1)
            return Values(own[..., None], own[:, None], sampled)

        entries = self._finished(self.replicates.of_entries(), parts, prior, values)
        if self.features.drift is not None:
            entries = entries + errors.drift(errors.drifting[:, :, None], errors.drifting[:, None])
        if errors.unseen is not None:
            entries = entries + errors.missed(errors.lengths[:, :, None], errors.lengths[:, None])
        return Variance(torch.where(inside[:, None] & inside, entries, 0.0), self.df)

    @cached_property
    def _moving(self) -> Tensor:
        """Features that are not frozen, (d,); the entries of frozen features are exactly zero."""
        if self.white is None:
            return torch.ones(self.features.k, dtype=torch.bool, device=self.features.n.device)
        return self.gaussian.precision_diagonal(self.features.k).to(self.features.n.device) > 0

    def _products(self) -> tuple[Tensor | None, Tensor]:
        """(A q_i)·(A q_j), (B, d, d) or None without blocks, and q_i·q_j, (1 or B, d, d), for all features."""
        if self.prior is None:
            return None, self.estimate.identity.dense()
        if self.skew is None:
            return self._group_products
        eye = torch.eye(self.features.k, dtype=self.features.gradient.dtype, device=self.features.n.device)
        q = self.gaussian.whiten(eye).double()
        turned = self.skew.apply(q.expand(len(self.features), -1, -1))
        return turned @ turned.mT, (q @ q.mT)[None]  # the same for all examples

    @cached_property
    def _own_products(self) -> Products:
        """|A q_j|², |q_j|² and the rows' energy for every feature, (B, d)."""
        if self.skew is None:
            inner, gram = (m.diagonal(dim1=-2, dim2=-1) for m in self._group_products)
            return Products(inner, gram, self._own_energy)
        inner = self.skew.diagonal(self.features, self.gaussian.push)
        gram = self.gaussian.precision_diagonal(self.features.k).to(inner)
        return Products(inner, gram.expand_as(inner), self._own_energy)

    def of_diagonal(self) -> Variance:
        """Variance of H_ii, (B, d)."""
        errors = self.control_errors

        def prior(p: Prior) -> Tensor:
            return p.variance(*[self._own_products] * 3)

        own = self.estimate.identity.diagonal
        rows = self.features.head.score * self.estimate.odd
        form = self._of_form(rows, Gram(own, own, own), prior, lambda: Values(*[self.estimate.sampled_diagonal] * 3))
        value = form.value + errors.drift(errors.drifting, errors.drifting)
        if errors.unseen is not None:
            value = value + errors.missed(errors.lengths, errors.lengths)
        return Variance(torch.where(self._moving, value, 0.0), form.df)

    def of_row(self, i: int) -> Variance:
        """Variance of H_ij for every j, (B, d)."""
        errors = self.control_errors
        score, odd = self.features.head.score, self.estimate.odd
        rows = (score[..., i, None] * odd + odd[..., i, None] * score) / 2
        unit = torch.zeros(1, 1, self.features.k, dtype=odd.dtype, device=odd.device)
        unit[..., i] = 1
        lengths = self.estimate.identity.diagonal
        gram = Gram(lengths[:, i, None], lengths, self.estimate.identity.product(unit)[:, 0].double())

        def prior(p: Prior) -> Tensor:
            own = self._own_products
            if self.skew is None:
                inner, mixed = (m[:, i] for m in self._group_products)
            else:
                q = self.gaussian.whiten(unit)
                twice = -self.skew.apply(self.skew.apply(q.expand(len(self.features), 1, -1)))[:, 0]  # AᵀA q_i
                inner = self.gaussian.push(twice.to(odd.dtype)).double()
                mixed = gram.mixed.expand_as(inner)
            mine = Products(*(part[:, i, None] for part in own))
            return p.variance(mine, own, Products(inner, mixed, self._energy(odd[..., i, None], odd)))

        def values() -> Values:
            own = self.estimate.sampled_diagonal
            return Values(
                own[:, i, None], own, self.estimate.sampled_product(unit.expand(len(self.features), 1, -1))[:, 0]
            )

        form = self._of_form(rows, gram, prior, values)
        mine = errors.drifting[:, i, None] if self.features.drift is not None else errors.drifting
        value = form.value + errors.drift(mine, errors.drifting)
        if errors.unseen is not None:
            value = value + errors.missed(errors.lengths[:, i, None], errors.lengths)
        return Variance(torch.where(self._moving & self._moving[i], value, 0.0), form.df)

    def of_bilinear(self, u: Tensor, v: Tensor) -> Variance:
        """Variance of uᵀHv for directions (B, d), (B,)."""
        errors = self.control_errors
        score, odd = self.features.head.score, self.estimate.odd
        left, right = u[:, None], v[:, None]
        rows = (score * left).sum(-1) * (odd * right).sum(-1) / 2
        rows = rows + (score * right).sum(-1) * (odd * left).sum(-1) / 2
        both = torch.stack([u, v], 1)  # (B, 2, d)

        def pairs(products: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return products[:, 0, 0], products[:, 1, 1], products[:, 0, 1]

        gram = Gram(*pairs(self.estimate.identity.product(both).double() @ both.double().mT))

        def prior(p: Prior) -> Tensor:
            if self.skew is None:
                inner = both.double() @ self._group_products[0] @ both.double().mT
            else:
                turned = self.skew.apply(self.gaussian.whiten(both).double())
                inner = turned @ turned.mT
            moved = odd @ both.mT.to(odd)  # (B, P, 2)
            energy = pairs(self._energy(moved[..., None], moved[..., None, :]))
            return p.variance(*(Products(*found) for found in zip(pairs(inner), gram, energy, strict=True)))

        def values() -> Values:
            return Values(*pairs(self.estimate.sampled_product(both).double() @ both.double().mT))

        form = self._of_form(rows, gram, prior, values)
        if errors.unseen is not None:
            form = Variance(form.value + errors.missed(gram.left, gram.right), form.df)
        if self.features.drift is None:
            return form
        left, right = ((self.features.drift @ w[..., None]).double().square().mean((1, 2)) for w in (u, v))
        return Variance(form.value + errors.drift(left, right), form.df)

    # --- norms, explained share, and the test of H = 0 ------------------------------------------------------------

    @cached_property
    def of_frobenius(self) -> Tensor:
        """E‖Ĥ − H‖²_F, the sum of the variances of all entries, computed without these, (B,)."""
        return self._frobenius() + self.control_errors.of_drift + self.control_errors.of_unseen

    def _frobenius(self) -> Tensor:
        estimate, identity = self.estimate, self.estimate.identity
        units = self.replicates.of_norm(self.features.head.score, estimate.odd, estimate.pair_norm)
        total = identity.diagonal.sum(-1)

        def prior(p: Prior) -> Tensor:
            # (tr G tr κ + tr Gκ)/2 over all pairs; κ is taken to be proportional to the rows' energy
            kappa, energy = self.kappa_trace, self._own_energy.sum(-1)
            mixed = self._energy(estimate.odd, identity.product(estimate.odd)).sum(-1)
            return (kappa * total + kappa * mixed / energy.clamp_min(1e-300)) / 2

        def values() -> Values:
            trace, norm = estimate.sampled_diagonal.sum(-1), estimate.sampled_squared_norm.clamp_min(0).sqrt()
            return Values(trace, trace, norm)

        # sums over all pairs of products are products of sums, or squared norms
        return self._finished(units, Gram(total, total, identity.squared_norm.sqrt()), prior, values, parallel=False)

    @cached_property
    def kappa_trace(self) -> Tensor:
        """Sum over the features of the noise of a direction, (B,)."""
        assert self.prior is not None
        return self.prior.own(self._own_products).sum(-1)

    @property
    def squared_norm(self) -> Tensor:
        """‖Ĥ‖²_F, (B,)."""
        return self.estimate.squared_norm

    def operator_norms(self) -> tuple[Tensor, Tensor]:
        """‖Ĥ‖₂ and the typical ‖Ĥ − H‖₂, (B,) each."""
        stats = self.features
        raw = stats.summed() / stats.n.reshape(-1, 1, 1).clamp_min(1)
        size = torch.linalg.eigvalsh(self.estimate.dense()).abs().amax(-1)
        if self.prior is not None and bool((self.replicates.df < LEAST_UNITS).any()):
            if stats.k <= SMALL or stats.rank <= SMALL:  # an upper bound, in few dimensions
                return size, self.of_frobenius.sqrt()
            skew = torch.linalg.matrix_norm((raw - raw.mT) / 2, 2)  # has the noise of the symmetric half
            return size, skew * ((stats.k + 1) / (stats.k - 1)) ** 0.5
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
        return size, torch.where(self.replicates.df > 0, error, torch.inf)
