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

import torch
from torch import Tensor

from smoothhess.draws.designs import SMALL
from smoothhess.draws.gaussian import Gaussian
from smoothhess.estimate import student_t
from smoothhess.estimate.antisymmetric_variance import Prior, Products, Skew
from smoothhess.estimate.block_variance import Replicates
from smoothhess.estimate.incomplete_blocks import Correction, Gram, Values, missing_variance
from smoothhess.estimate.statistics import PROBES, Statistics, symmetric, unmoved
from smoothhess.estimate.unbiased_hessian import Unbiased, corrected_rows, pair_norm
from smoothhess.linalg.low_rank import Known

SEEN, NOTHING = 8, 1e-10  # rows with a nonzero residual after which it is not rare, and the share that counts as zero
ROUNDING = 16  # assumed rounding error of a gradient, in units in the last place
LEAST_SHARE = 0.5  # lower bound of the variance of incomplete blocks, as a share of that from the antisymmetric half
ZERO_TEST_ROWS = 512  # rows whose inner products are used in the test of H = 0
BOOTSTRAPS, LEAST_UNITS = 16, 8  # sign bootstraps for the operator norm, and the replicates that they need


_LEFT, _RIGHT = (..., None), (slice(None), None)  # indices that make (B, d) a column or a row of a matrix


@dataclass(frozen=True, eq=False)
class Variance:
    """Variance of an estimate, with its degrees of freedom."""

    value: Tensor
    df: Tensor  # (B,)


class Noise:
    """Variances of one result: of its value and gradient, and of entries, rows and bilinear forms of its Hessian.

    `white` holds the whitened statistics (None for group sums), `features` those in the coordinates of features or
    groups. `exactly_zero` (B,) marks examples whose operations have no curvature.
    """

    def __init__(
        self,
        white: Statistics | None,
        features: Statistics,
        gaussian: Gaussian,
        exactly_zero: Tensor | None = None,
    ) -> None:
        self.white, self.features, self.gaussian = white, features, gaussian
        self.exactly_zero = exactly_zero
        self.estimate = Unbiased(features, gaussian, grouped=white is None)

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
        return self.replicates.df if self.prior is None else self.replicates.df + self._prior_df

    @cached_property
    def _prior_df(self) -> Tensor:
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

    def _weigh(self, units: Tensor, prior: Tensor | None = None, prior_df: Tensor | None = None) -> Tensor:
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
    def unknown(self) -> Tensor:
        """Where the error is unknown, (B,): no sampled gradient changed, but the operations may have kinks."""
        found = self.unmoved & self.features.is_uncontrolled
        return found if self.exactly_zero is None else found & ~self.exactly_zero

    @cached_property
    def _rounding(self) -> Tensor:
        """Variance of uᵀĤv of whitened unit vectors from the rounding of gradients, (B,)."""
        stats, head = self.features, self.features.head
        size = stats.gradient.double().square() / self.estimate.identity.diagonal.clamp_min(1e-300)
        own = torch.where(self.estimate.identity.diagonal > 0, size, 0.0).sum(1)
        weight = head.weight.double().clamp_min(1e-300)
        moved = ((head.along.double().square() + head.across.double()) * stats.rank / weight).sum(1)
        eps = ROUNDING * torch.finfo(stats.gradient.dtype).eps
        return eps**2 * (own + moved / stats.n_head.clamp_min(1)) / (2 * stats.rank * stats.n.clamp_min(1))

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
        """Variance of the mean of a quantity with one value per row and no antisymmetric half: value or gradient.

        Errors of the rows of one block are negatively correlated, so the variance of independent rows is an upper
        bound; the variance between blocks is unbiased, but uncertain for few blocks. The one that gives the narrower
        intervals is used. `exact` (B, P) is a part of each row whose mean over a complete block has no error.
        """
        units = self.replicates.of_mean(rows)
        if self.prior is None:
            return Variance(self._weigh(units), self.replicates.df)
        rest = rows if exact is None else rows - exact.to(rows)
        alone, df = self._as_independent(rest), (self.features.n_head - 1).clamp_min(0).double()
        if exact is not None:
            alone = alone + self._as_independent(exact) * self._left_open
        total = [t.reshape(len(t), -1).sum(1) for t in (units, alone)]
        by_blocks, by_rows = (student_t.quantile(0.95, d.cpu()).to(d.device).square() for d in (self.replicates.df, df))
        by_units = (self.replicates.df > 0) & (by_blocks * total[0] < by_rows * total[1])
        value = torch.where(by_units.reshape(-1, *[1] * (units.ndim - 1)), units, alone)
        chosen = torch.where(by_units, self.replicates.df, df)
        return Variance(torch.where((chosen > 0).reshape(-1, *[1] * (value.ndim - 1)), value, torch.inf), chosen)

    def _as_independent(self, rows: Tensor) -> Tensor:
        """Variance of the mean over all rows if they were independent, (B, …)."""
        rows = rows.double()
        n_head, n = (t.reshape(-1, *[1] * (rows.ndim - 2)) for t in (self.features.n_head, self.features.n))
        mean = rows.sum(1) / n_head.clamp_min(1)
        squares = (rows.square().sum(1) - n_head * mean.square()).clamp_min(0)
        return squares / (n_head - 1).clamp_min(1) / n.clamp_min(1)

    @cached_property
    def _left_open(self) -> Tensor:
        """Variance of a quadratic form's mean over the blocks, relative to independent rows, (B,); 0 if complete."""
        c, k = self.correction, self.features.rank
        # C (m/n)² summed over blocks, as the sum of m(k − m)/n², times n/(k − 1)
        return ((c.corrected + c.plain) * 2 * (k + 2) / k * self.features.n).clamp_max(1)

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
        if self._unseen is not None:
            missed = missed + self._unseen / self.features.rank**2  # an event of average size with probability 1/n
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
            variance = self._weigh(units)
        else:
            found = prior(self.prior)
            if not self.replicates.alone and parallel:
                cosine2 = gram.mixed.square() / (gram.left * gram.right).clamp_min(1e-300)
                found = found * (1 + (self._along_itself.reshape(-1, *[1] * (found.ndim - 1)) - 1) * cosine2)
            if self.correction.has_variance:
                missing = missing_variance(self.correction, values(), gram, self.features.rank)
                found = torch.maximum(found + missing, found * LEAST_SHARE)
            variance = self._weigh(units, found, self._prior_df)
        shape = (-1, *[1] * (variance.ndim - 1))
        both = gram.left * gram.right + gram.mixed.square()
        variance = torch.maximum(variance, self._rare.reshape(shape) * both) + self._rounding.reshape(shape) * both
        if self.exactly_zero is not None:
            variance = torch.where((self.unmoved & self.exactly_zero).reshape(shape), 0.0, variance)
        return torch.where(self.unknown.reshape(shape), torch.nan, variance)

    def _drift(self, left: Tensor, right: Tensor) -> Tensor | float:
        """(uᵀDv)² from |Du|² and |Dv|², with D the bias of the control variate's expectation, taken to have rank one.

        Further draws do not reduce it.
        """
        norm2 = self.features.drift_norm2
        if norm2 is None:
            return 0.0
        norm2 = norm2.reshape(-1, *[1] * (torch.broadcast_tensors(left, right)[0].ndim - 1)).clamp_min(1e-300)
        return left * right / norm2

    @cached_property
    def _drifting(self) -> Tensor:
        """|D q_i|² for every feature, (B, d)."""
        drift = self.features.drift
        if drift is None:
            return self.features.gradient.new_zeros(1, 1, dtype=torch.float64)
        return drift.double().square().mean(1)

    @cached_property
    def _unseen(self) -> Tensor | None:
        """Squared error from rare events that no row contains, whitened ‖·‖²_F, (B,); None without a control variate.

        The residual of a control variate can be zero in all sampled rows, because the events that it does not model are
        rare. Until SEEN rows have a nonzero residual, an event of average size with probability 1/n is assumed.
        """
        stats = self.features if self.white is None else self.white
        if stats.known is None or (self.white is None and stats.gram is None):
            return None
        usual = stats.head.energy.double().sum(1) / stats.n_head.clamp_min(1) * self._whitening
        if self.white is not None:  # the mean of z g̃ᵀ bounds the size of g̃
            usual = torch.maximum(usual, _squared_norm_of(stats.known))
        least = NOTHING * usual * (1.0 if self.white is not None else self._lengths.sum(-1) / stats.rank)
        seen = (stats.head.odd.double().square().sum(-1) > least[:, None]).sum(1)
        doubt = torch.where(stats.known.is_zero, 0.0, (1 - seen / SEEN).clamp_min(0))
        return doubt * stats.rank * usual / stats.n.clamp_min(1).square()

    @cached_property
    def _whitening(self) -> Tensor:
        """|Lᵀg|² over |g|² of the sampled gradients, (B,); for group sums, with equal shares of all dimensions."""
        p = self.gaussian.precisions(self.gaussian.dimension or self.features.rank).double()
        alike = (len(p) / p.sum()).to(self.features.n.device).expand(len(self.features))
        if self.white is None or bool((p == p[0]).all()):
            return alike
        known, rows = self.white.known, [self.white.head.even, self.white.head.odd]
        if known is not None:  # K z has the mean square ‖K‖²_F
            root = self.white.n_head.clamp_min(1).to(rows[0])[:, None, None].sqrt()
            if known.factor is None:
                rows.append(root * known.core.to(rows[0]))
            else:
                factor = known.factor.to(rows[0])
                half = torch.linalg.cholesky_ex(factor @ factor.mT).L.mT
                rows.append(root * (half @ known.core.to(factor) @ factor))
        white, plain = (
            torch.stack([r.double().square().sum((-1, -2)) for r in some]).sum(0)
            for some in (rows, [self.gaussian.push(r) for r in rows])
        )
        return torch.where(plain > 0, white / plain.clamp_min(1e-300), alike)

    @cached_property
    def _lengths(self) -> Tensor:
        """|q_i|² for every feature or group, (1 or B, d)."""
        if self.white is None:
            assert self.features.gram is not None
            return self.features.gram.diagonal(dim1=-2, dim2=-1).double()
        return self.gaussian.precision_diagonal(self.features.k).double().to(self.features.n.device)[None]

    def _missed(self, left: Tensor, right: Tensor) -> Tensor | float:
        """The part of `_unseen` in uᵀHv, from |q_u|² and |q_v|²: it is spread evenly over all pairs of dimensions."""
        if self._unseen is None:
            return 0.0
        unseen = self._unseen.reshape(-1, *[1] * (torch.broadcast_tensors(left, right)[0].ndim - 1))
        return unseen / self.features.rank**2 * left * right

    @cached_property
    def of_unseen(self) -> Tensor | float:
        """Squared error of the matrix from rare events, in feature coordinates, (B,)."""
        if self._unseen is None:
            return 0.0
        total = self._lengths.sum(-1)
        return self._missed(total, total)

    def of_entries(self) -> Variance:
        """Variance of every entry, (B, d, d)."""
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
            entries = entries + self._drift(self._drifting[:, :, None], self._drifting[:, None])
        if self._unseen is not None:
            entries = entries + self._missed(self._lengths[:, :, None], self._lengths[:, None])
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

        def prior(p: Prior) -> Tensor:
            return p.variance(*[self._own_products] * 3)

        own = self.estimate.identity.diagonal
        rows = self.features.head.score * self.estimate.odd
        form = self._of_form(rows, Gram(own, own, own), prior, lambda: Values(*[self.estimate.sampled_diagonal] * 3))
        value = form.value + self._drift(self._drifting, self._drifting)
        if self._unseen is not None:
            value = value + self._missed(self._lengths, self._lengths)
        return Variance(torch.where(self._moving, value, 0.0), form.df)

    def of_row(self, i: int) -> Variance:
        """Variance of H_ij for every j, (B, d)."""
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
        mine = self._drifting[:, i, None] if self.features.drift is not None else self._drifting
        value = form.value + self._drift(mine, self._drifting)
        if self._unseen is not None:
            value = value + self._missed(self._lengths[:, i, None], self._lengths)
        return Variance(torch.where(self._moving & self._moving[i], value, 0.0), form.df)

    def of_bilinear(self, u: Tensor, v: Tensor) -> Variance:
        """Variance of uᵀHv for directions (B, d), (B,)."""
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
        if self._unseen is not None:
            form = Variance(form.value + self._missed(gram.left, gram.right), form.df)
        if self.features.drift is None:
            return form
        left, right = ((self.features.drift @ w[..., None]).double().square().mean((1, 2)) for w in (u, v))
        return Variance(form.value + self._drift(left, right), form.df)

    # --- norms, explained share, and the test of H = 0 ------------------------------------------------------------

    @cached_property
    def of_frobenius(self) -> Tensor:
        """E‖Ĥ − H‖²_F, the sum of the variances of all entries, computed without these, (B,)."""
        return self._frobenius() + self.of_drift + self.of_unseen

    @cached_property
    def of_drift(self) -> Tensor | float:
        """‖D‖²_F in feature coordinates, with D the bias of the control variate's expectation, (B,)."""
        total = self._drifting.sum(-1)
        return self._drift(total, total)

    def _frobenius(self) -> Tensor:
        estimate, identity = self.estimate, self.estimate.identity
        units = self.replicates.of_norm(self.features.head.score, estimate.odd, estimate.pair_norm)
        total = identity.diagonal.sum(-1)

        def prior(p: Prior) -> Tensor:
            # (tr G tr κ + tr Gκ)/2 over all pairs; κ is taken to be proportional to the rows' energy
            kappa, energy = self._kappa_trace, self._own_energy.sum(-1)
            mixed = self._energy(estimate.odd, identity.product(estimate.odd)).sum(-1)
            return (kappa * total + kappa * mixed / energy.clamp_min(1e-300)) / 2

        def values() -> Values:
            trace, norm = estimate.sampled_diagonal.sum(-1), estimate.sampled_squared_norm.clamp_min(0).sqrt()
            return Values(trace, trace, norm)

        # sums over all pairs of products are products of sums, or squared norms
        return self._finished(units, Gram(total, total, identity.squared_norm.sqrt()), prior, values, parallel=False)

    @cached_property
    def _kappa_trace(self) -> Tensor:
        assert self.prior is not None
        return self.prior.own(self._own_products).sum(-1)

    @property
    def squared_norm(self) -> Tensor:
        """‖Ĥ‖²_F, (B,)."""
        return self.estimate.squared_norm

    @cached_property
    def variation(self) -> Tensor:
        """Variation of the gradient, E‖g − G‖², (B,)."""
        features = self.features
        mean_even = features.even_sum / features.n.clamp_min(1)[:, None]
        energy = features.head.energy.double().sum(1) / features.n_head.clamp_min(1)
        return energy - mean_even.square().sum(-1)

    @cached_property
    def explained(self) -> Tensor:
        """Share of the gradient's variation around x that Ĥδ explains for fresh draws, (B,).

        It is 1 − E‖g − Ĝ − Ĥδ‖² / E‖g − G‖². By Stein's identity Cov(g, δ) = HΣ, so the numerator is
        V − 2⟨HL, ĤL⟩ + ‖ĤL‖² + ‖Ĝ − G‖²; with E⟨HL, ĤL⟩ = E‖ĤL‖² − noise no held-out gradients are needed.
        """
        white, features = self.white, self.features
        assert white is not None
        push, precisions = self.gaussian.push, self.gaussian.precisions(features.k)
        total = precisions.sum().double().to(features.n.device)
        lifted = self.estimate.needs_correction
        odd = corrected_rows(white.head, self.estimate.correction) if lifted else white.head.odd

        def norm2(score: Tensor, rows: Tensor, constant: Tensor) -> Tensor:
            found = _one_sided_norm(score, rows, push)
            if not lifted:
                return found
            mixed = (push(score).double() * push(rows).double()).sum((-1, -2))
            return found + 2 * constant * mixed + constant.square() * total

        noise = self.replicates.of_norm(white.head.score, odd, norm2)
        if self.prior is None:
            noise = self._weigh(noise)
        else:
            prior = (total * self.prior.trace + (self.prior.k + 2) * self._kappa_trace) / 4
            noise = self._weigh(noise, prior, self._prior_df)
        if white.is_factored:
            score, rows = white.factors()
            norm = norm2(score, torch.cat([odd, rows[:, odd.shape[1] :]], 1), self.estimate.constant)
        else:
            mean = symmetric(white.summed() / white.n.clamp_min(1)[:, None, None])
            if lifted:
                rows = torch.nonzero((self.estimate.correction.slope != 0).any(0)).reshape(-1)
                change = white.head.score[:, rows].double().mT @ (odd - white.head.odd)[:, rows].double()
                mean = mean + symmetric(change / white.n[:, None, None])
                mean.diagonal(dim1=-2, dim2=-1).add_(self.estimate.constant[:, None])
            norm = push(mean.to(white.gradient.dtype)).double().square().sum((-1, -2))
        variation = self.variation
        gradient_noise = self.of_gradient().value.sum(-1)
        share = (norm - 2 * noise - gradient_noise) / variation
        return torch.where((variation > 0) & torch.isfinite(noise), share, torch.nan)

    def zero_score(self) -> Tensor:
        """Unbiased estimate of ‖H‖² over the standard deviation that it would have for H = 0, (B,)."""
        signal = self.squared_norm - self.of_frobenius
        if self.prior is None:  # inner products of the estimates of two rows have mean ‖H‖²
            stats = self.features
            s, g = (t[:, :ZERO_TEST_ROWS].double() for t in (stats.head.score, stats.head.odd))
            products = ((s @ s.mT) * (g @ g.mT) + (s @ g.mT) * (g @ s.mT)) / 2
            products.diagonal(dim1=-2, dim2=-1).zero_()
            rows = stats.n_head.clamp_max(ZERO_TEST_ROWS)
            pairs = (rows * (rows - 1)).clamp_min(1)
            deviation = (2 * products.square().sum((-1, -2)) / pairs / (stats.n * (stats.n - 1)).clamp_min(1)).sqrt()
        else:  # symmetric minus antisymmetric energy, for noise of rank one, which has the largest deviation
            deviation = self.of_frobenius * (8 / self.features.k) ** 0.5
        return torch.where(deviation > 0, signal / deviation, torch.where(signal > 0, torch.inf, 0.0))

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
        rng = torch.Generator().manual_seed(0)
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


def _squared_norm_of(known: Known) -> Tensor:
    """‖K‖²_F, (B,)."""
    rows, columns = known.pairs()
    return pair_norm(rows, columns) if known.is_thin else known.core.double().square().sum((-1, -2))


def _one_sided_norm(score: Tensor, odd: Tensor, push: Callable[[Tensor], Tensor]) -> Tensor:
    """‖L⁺ᵀ sym SᵀG‖²_F of rows S and G, (B,)."""
    if odd.shape[1] >= odd.shape[2]:
        whole = symmetric(score.double().mT @ odd.double())
        return push(whole.to(odd.dtype)).double().square().sum((-1, -2))
    s, y, a, g = (t.double() for t in (score, odd, push(score), push(odd)))
    square = (a @ a.mT) * (y @ y.mT) + (g @ g.mT) * (s @ s.mT) + 2 * (a @ g.mT) * (y @ s.mT)
    return square.sum((-1, -2)) / 4
