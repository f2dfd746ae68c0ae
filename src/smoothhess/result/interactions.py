"""Interactions, the sampled result: SmoothHess and SmoothGrad of B examples with their standard errors.

Methods that read, combine and convert a result belong here. Exact results are in `exact`, the formulas of the estimates
in `smoothhess.estimate`, the file format in `files`, and tables for other packages in `export`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from smoothhess.draws.designs import find_design
from smoothhess.draws.gaussian import Gaussian
from smoothhess.estimate import fit_quality, student_t
from smoothhess.estimate.grouping import Grouping, probes
from smoothhess.estimate.shrinkage import Denoised, Shrunk, denoise
from smoothhess.estimate.statistics import (
    DENSE_LIMIT,
    ESTIMATOR_VERSION,
    DrawRange,
    Statistics,
    concatenate,
    merge,
    symmetric,
)
from smoothhess.estimate.stein_check import z_scores
from smoothhess.estimate.unbiased_hessian import Unbiased
from smoothhess.estimate.variance import Noise, Variance
from smoothhess.linalg.eigenvalue_order import by_magnitude
from smoothhess.linalg.krylov import leading_eigenpairs
from smoothhess.linalg.memory import ROW_SPAN, ROW_SPAN_FOR_FEW
from smoothhess.linalg.orthonormal import orthonormal
from smoothhess.result import export, files, text
from smoothhess.result.files import Parts
from smoothhess.result.pairs import Columns, Pair, labels_of, strongest_pairs
from smoothhess.result.taylor import Taylor

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

DENSE_EIGH = 2048  # features up to which `eigh` makes a matrix if the rows do not span H
TOLD_FROM_ZERO = 1.0  # the estimate of ‖H‖² must exceed this many standard deviations that it would have for H = 0
JUMP_ROUNDING = 1e3  # units in the last place by which values of an affine function may differ
# `eigh` makes a basis of the rows within ROW_SPAN, or ROW_SPAN_FOR_FEW for a few eigenpairs of a denoised H, whose
# spectrum decays; otherwise it uses products only, to this residual, which is far below the noise of such an estimate.
EIGH_TOLERANCE = 1e-4


@dataclass(frozen=True, eq=False)
class Estimate:
    """Estimates with their standard errors; intervals use Student's t distribution.

    >>> one = torch.ones(1)
    >>> [round(float(end), 2) for end in Estimate(one, 0.1 * one, 10 * one).interval()]
    [0.78, 1.22]
    """

    value: Tensor  # (B, …)
    stderr: Tensor  # (B, …); NaN where the error is unknown
    df: Tensor  # (B,) degrees of freedom of the standard errors

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Confidence interval of each number.

        Args:
            level: probability with which the interval contains the true value, between 0 and 1.

        Returns:
            The lower and upper ends, with the shape of `value`; NaN where the error is unknown.
        """
        width = student_t.quantile(level, self.df).to(self.stderr).reshape(-1, *[1] * (self.stderr.ndim - 1))
        reach = torch.where(self.stderr == 0, 0.0, width * self.stderr)  # NaN stays NaN: the error is unknown
        return self.value - reach, self.value + reach


class Eigenpairs(NamedTuple):
    """Leading interaction directions, largest |eigenvalue| first."""

    values: Tensor  # (B, k)
    vectors: Tensor  # (B, k, *feature shape)


@dataclass(frozen=True, eq=False, repr=False)
class Interactions:
    """SmoothHess and SmoothGrad of B examples with their Monte-Carlo error.

    `SmoothHess.attribute` returns it. It holds the raw statistics of the draws and no reference to the model, so it can
    be saved, merged and moved to another device, and every quantity can be computed later. The dense matrix `hessian`
    is computed on first access.

    A result contains two estimates. The *unbiased* estimate is used for everything that has an interval: `top_pairs`,
    `row`, `diagonal`, `bilinear`, `stderr`, `gradient` and `value`. If `shrink` is True, the *denoised* estimate, whose
    total error is smaller, is used for `hessian`, `@`, `eigh`, `taylor`, `groups(mask).hessian` and the figures, and
    `relative_error` and `r2` describe it. `unshrunk()` returns a result that uses the unbiased estimate everywhere.
    """

    inputs: Tensor  # (B, *shape)
    statistics: Statistics  # whitened, or of group sums
    gaussian: Gaussian
    grouping: Grouping | None
    target: Tensor | None  # (B, q) indices into the model's output
    n_passes: Tensor  # (B,) total work in units of a gradient call
    status: tuple[str, ...]  # why sampling stopped, per example
    control: str | None = None  # the control variate that was applied
    control_weights: Tensor | None = (
        None  # (B, 2) μ and β of smoothhess.curvature.control_variate; β = 0: no frozen pass per call
    )
    control_rank: int | None = None  # rank of the closed form where it is not kept as a matrix
    tau_probes: int | None = None  # random directions from which the closed form's τ was estimated; None: exact
    control_note: str = ""  # why no control variate was applied
    shrink: bool = False  # whether hessian, @, eigh, taylor and relative_error use the denoised estimate
    unbiased: bool = True  # whether the estimate behind stderr(), pairs and intervals is unbiased
    precision: str = "float32"  # precision in which the model was evaluated
    precision_error: Tensor | None = None  # (B,) relative error of a gradient's half-difference in that precision
    no_kinks: Tensor | None = None  # (B,) where no draw can cross a kink; None: unknown for all examples
    denoised: Shrunk | None = None  # for group sums only, which cannot be denoised from their own statistics
    estimator_version: int = ESTIMATOR_VERSION  # version of the formulas

    @property
    def has_surrogate(self) -> bool:
        """Whether the numbers are derivatives and define a Taylor surrogate; False for attributions."""
        return True

    # --- shape and settings of the run ----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """Shape of the features of one example: the shape of an input, or (K,) for K groups."""
        return tuple(self.inputs.shape[1:]) if self.grouping is None else (self.grouping.count,)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of `hessian`, (B, d, d)."""
        d = 1
        for size in self.feature_shape:
            d *= size
        return len(self), d, d

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the inputs."""
        return self.inputs.dtype

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.inputs.device

    @property
    def design(self) -> str:
        """Name of the design of the draws: "orthogonal", "sobol", "antithetic" or "iid"."""
        return self.statistics.design

    @property
    def seed(self) -> int | tuple[int, ...]:
        """The seed, or one per example."""
        seeds = tuple(segments[-1].seed for segments in self.statistics.stream)
        return seeds[0] if len(set(seeds)) == 1 else seeds

    @property
    def n_calls(self) -> Tensor:
        """Number of gradients of the model at perturbed inputs, per example, (B,)."""
        return self.statistics.n * find_design(self.design).calls_per_row

    @property
    def converged(self) -> Tensor:
        """False where sampling stopped before the tolerance was reached, or with an unknown error, (B,)."""
        return torch.tensor([s not in ("budget", "unknown") for s in self.status], device=self.device)

    # --- estimates ------------------------------------------------------------------------------------------------

    @cached_property
    def feature_statistics(self) -> Statistics:
        """The statistics in the coordinates of the features."""
        return self.statistics if self.grouping is not None else self.statistics.map(self.gaussian.push)

    @cached_property
    def noise(self) -> Noise:
        """Variances of everything that is read off this result; for modules of this package."""
        white = self.statistics if self.grouping is None else None
        return Noise(white, self.feature_statistics, self.gaussian, self.no_kinks)

    @property
    def unbiased_estimate(self) -> Unbiased:
        """The unbiased estimate; for modules of this package."""
        return self.noise.estimate

    @property
    def output(self) -> Tensor:
        """f(x), (B,)."""
        return self.statistics.value

    @property
    def value(self) -> Tensor:
        """Estimate of the smoothed function h(x) = E f(x + δ), (B,)."""
        stats = self.statistics
        return stats.value + (stats.value_sum / stats.n).to(self.dtype)

    @property
    def value_stderr(self) -> Tensor:
        """Standard error of `value`, (B,)."""
        return self.value_estimate().stderr

    def value_estimate(self) -> Estimate:
        """`value` with its standard error and degrees of freedom, an `Estimate` (B,)."""
        return self.estimate_of(self.value, self.noise.of_value())

    @property
    def gradient(self) -> Tensor:
        """SmoothGrad, ∇h(x), (B, *feature shape)."""
        stats = self.feature_statistics
        flat = stats.gradient + (stats.even_sum / stats.n[:, None]).to(self.dtype)
        return flat.reshape(len(self), *self.feature_shape)

    @cached_property
    def gradient_stderr(self) -> Tensor:
        """Standard error of `gradient`, (B, *feature shape)."""
        return self.gradient_estimate().stderr

    def gradient_estimate(self) -> Estimate:
        """`gradient` with its standard errors and degrees of freedom, an `Estimate` (B, *feature shape).

        >>> from smoothhess import SmoothHess
        >>> f = lambda x: x.prod(1)
        >>> result = SmoothHess(f).attribute(torch.ones(1, 3).double(), sigma=0.5, n_calls=600)
        >>> low, high = result.gradient_estimate().interval()
        >>> bool(((low < 1) & (1 < high)).all())
        True
        """
        return self.estimate_of(self.gradient, self.noise.of_gradient())

    @cached_property
    def denoised_estimate(self) -> Denoised | None:
        """The denoised estimate in whitened coordinates; None for group sums, or if `shrink` is False."""
        if not self.shrink or self.grouping is not None:
            return None
        return denoise(self.statistics, self.gaussian, self.shape[1])

    def with_status(self, status: tuple[str, ...]) -> Interactions:
        """The same result with another `status`; cached quantities are kept."""
        same = replace(self, status=status)
        same.__dict__.update({k: v for k, v in self.__dict__.items() if k not in same.__dict__})
        return same

    def lean(self) -> Interactions:
        """A copy without cached quantities, except the denoised estimate."""
        same, known = replace(self, statistics=replace(self.statistics)), self.__dict__.get("denoised_estimate")
        return same if known is None else same._knowing(known)

    def unshrunk(self) -> Interactions:
        """The same result with the unbiased estimate for all quantities."""
        return replace(self, shrink=False, denoised=None)

    @cached_property
    def hessian(self) -> Tensor:
        """SmoothHess, ∇²h(x), dense and symmetric, (B, d, d); denoised where `shrink` is True."""
        if self.denoised is not None:
            return self.denoised.hessian
        if self.denoised_estimate is not None:
            self.refuse_dense()
            white = self.denoised_estimate.dense().to(self.dtype)
            return symmetric(self.gaussian.push(self.gaussian.push(white).mT))
        return self._unbiased_hessian.to(self.dtype)

    @property
    def _unbiased_hessian(self) -> Tensor:
        """The unbiased estimate, (B, d, d) float64."""
        return self.unbiased_estimate.dense()

    def stderr(self) -> Tensor:
        """Standard error of each entry of the unbiased estimate, (B, d, d).

        Raises:
            ValueError: if there are too many features for a dense matrix.
        """
        self.refuse_dense()
        return self.noise.of_entries().value.sqrt().to(self.dtype)

    @cached_property
    def relative_error(self) -> Tensor:
        """Estimated ‖Ĥ − H‖_F / ‖H‖_F of `hessian`, (B,); 0 where both norms are zero, NaN where it is unknown.

        For the unbiased estimate it is inf while ‖H‖ cannot be distinguished from zero. For the denoised estimate of an
        isotropic Gaussian it is at most 1, which means that the estimate carries no information.
        """
        error = self._estimated_error()
        if self.no_kinks is not None:
            error = torch.where(self.noise.unmoved & self.no_kinks, 0.0, error)
        return torch.where(self.noise.unknown, torch.nan, error).to(self.dtype)

    def _estimated_error(self) -> Tensor:
        """`relative_error` of examples whose error is known, (B,)."""
        if self.denoised is not None:
            return _ratio(self.denoised.error2, self.denoised.true2)
        if self.denoised_estimate is not None:
            more = self.noise.control_errors.of_drift + self.noise.control_errors.of_unseen
            error2, true2 = self.denoised_estimate.error2 + more, self.denoised_estimate.true2
            return _ratio(error2, torch.where(true2 > 0, true2 + more, 0.0))
        variance = self.noise.of_frobenius
        signal = self.noise.squared_norm - variance
        return _ratio(variance, torch.where(fit_quality.zero_score(self.noise) > TOLD_FROM_ZERO, signal, 0.0))

    @cached_property
    def discontinuous(self) -> Tensor:
        """Where values changed although no gradient did, (B,): the function has jumps, which Ĥ does not contain.

        It is False for designs that do not use each direction twice (±).
        """
        stats, head = self.statistics, self.statistics.head
        still = self.noise.unmoved & (head.even.abs().amax((1, 2)) == 0)
        if stats.known is not None:  # the residuals are not gradients of the function
            still = still & stats.known.is_zero
        if not find_design(self.design).mirrored or not bool(still.any()):
            return torch.zeros_like(still)
        size = stats.value.double().abs() + torch.linalg.vector_norm(stats.gradient.double(), dim=1)
        moved = (head.value_even.double() / head.weight.double().clamp_min(1e-300)).abs().amax(1)
        return still & (moved > JUMP_ROUNDING * torch.finfo(self.dtype).eps * size)

    @cached_property
    def r2(self) -> Tensor:
        """Share of the gradient's variation in the neighbourhood that pairwise interactions explain, (B,).

        It is an estimate for fresh gradients, which were not used in the fit; 1 for a quadratic. NaN where the gradient
        does not vary, and for group sums that were streamed with feature_mask, which do not keep the variation.
        """
        if self.grouping is not None:
            return self.grouping.r2
        if self.denoised_estimate is not None:
            variation = fit_quality.variation(self.noise)
            share = (self.denoised_estimate.explained / variation).clamp_max(1)
            return torch.where(variation > 0, share, torch.nan).to(self.dtype)
        return fit_quality.explained(self.noise).to(self.dtype)

    @cached_property
    def stein_z(self) -> Tensor:
        """z-scores of the check that the gradients are the derivatives of the values, (B, 2).

        The check uses Stein's identities: E[f z] = E[γ] (first column, the worse of two directions) and E[f (|z|² − k)]
        = E[z·γ] (second column). Scores beyond 5 mean jumps, detached or straight-through gradients, or a wrong
        gradient function. Differences that rounding can explain are not counted.
        """
        return z_scores(self.statistics.stein, self.statistics.n).to(self.dtype)

    # --- interactions: products, entries, eigenpairs, groups, pairs, surrogate ------------------------------------

    def __matmul__(self, v: Tensor) -> Tensor:
        """The product H v, computed without H.

        Args:
            v: (B, *features), (*features), flat (B, d) or (d,), or columns (B, d, n) or (d, n). The first of these
                shapes that fits is taken.

        Returns:
            H v, with the shape of v and a batch dimension in front.

        Raises:
            ValueError: if v has none of these shapes.
        """
        b, d, _ = self.shape
        v = torch.as_tensor(v, dtype=self.dtype, device=self.device)
        features = self.feature_shape
        if v.shape in ((b, *features), features, (b, d), (d,)):
            flat = v.reshape(-1, d).expand(b, d)
            return self._product(flat[:, None])[:, 0].reshape(
                b, *(features if v.shape[-len(features) :] == features else (d,))
            )
        if v.ndim in (2, 3) and v.shape[-2] == d and v.shape[:-2] in ((), (b,)):
            return self._product(v.mT.expand(b, -1, -1)).mT
        raise ValueError(
            f"v must be a vector of {d} features, {features} or with {b} examples in front, got {tuple(v.shape)}."
        )

    def product(self, rows: Tensor) -> Tensor:
        """H applied to each row of (B, n, d).

        Args:
            rows: (B, n, d). Unlike `@`, no other shape is accepted.

        Returns:
            (B, n, d).

        Raises:
            ValueError: if `rows` has another shape.
        """
        b, d, _ = self.shape
        if rows.ndim != 3 or rows.shape[0] != b or rows.shape[2] != d:
            raise ValueError(f"rows must have shape ({b}, n, {d}), got {tuple(rows.shape)}.")
        return self._product(rows.to(self.device, self.dtype))

    def _product(self, rows: Tensor) -> Tensor:
        """The reported H applied to each row of (B, n, d)."""
        if "hessian" in self.__dict__ or self.denoised is not None:
            return rows @ self.hessian
        if self.denoised_estimate is not None:
            return self.gaussian.push(self.denoised_estimate.product(self.gaussian.whiten(rows)))
        return self._unbiased_product(rows)

    def _unbiased_product(self, rows: Tensor) -> Tensor:
        """The unbiased H applied to each row of (B, n, d)."""
        return self.unbiased_estimate.product(rows)

    def row(self, i: int | tuple[int, ...]) -> Estimate:
        """Interactions of feature i with every feature.

        Args:
            i: flat index of the feature, or one index per dimension of `feature_shape`.

        Returns:
            An `Estimate` of H_ij for all j, (B, *feature shape).

        Raises:
            TypeError: if i is a name.
            ValueError: if there is no feature i.
        """
        index = self.flat_index(i)
        unit = torch.zeros(self.shape[1], dtype=self.dtype, device=self.device)
        unit[index] = 1
        value = self._unbiased_product(unit.expand(len(self), 1, -1))
        return self.estimate_of(value.reshape(len(self), *self.feature_shape), self.noise.of_row(index))

    def diagonal(self) -> Estimate:
        """The interaction H_ii of each feature with itself, an `Estimate` (B, *feature shape)."""
        value = self.unbiased_estimate.diagonal()
        return self.estimate_of(value.to(self.dtype).reshape(len(self), *self.feature_shape), self.noise.of_diagonal())

    def bilinear(self, u: Tensor, v: Tensor) -> Estimate:
        """The interaction uᵀHv of two directions.

        Args:
            u: (*feature shape), flat, or either with the batch dimension in front.
            v: likewise.

        Returns:
            An `Estimate` (B,).

        Raises:
            ValueError: if u or v has another shape.
        """
        u, v = self._rows_of(u), self._rows_of(v)
        value = (u * self._unbiased_product(v[:, None])[:, 0]).sum(-1)
        return self.estimate_of(value, self.noise.of_bilinear(u, v))

    def estimate_of(self, value: Tensor, variance: Variance) -> Estimate:
        """Return a value with its standard error and degrees of freedom."""
        return Estimate(value, variance.value.sqrt().to(self.dtype).reshape(value.shape), variance.df)

    def eigh(self, k: int | None = None) -> Eigenpairs:
        """The k eigenpairs of H with the largest |λ|.

        Args:
            k: number of eigenpairs; 8 if None, or d if that is less.

        Returns:
            Eigenvalues (B, k) and eigenvectors (B, k, *feature shape); fewer than k if the estimate has lower rank.

        Raises:
            ValueError: if k is not between 1 and d.
        """
        b, d, _ = self.shape
        k = min(8, d) if k is None else k
        if not 1 <= k <= d:
            raise ValueError(f"k must be between 1 and {d} eigenpairs, got {k}.")
        rows = self.unbiased_estimate.factors()[1].shape[1] if self.feature_statistics.is_factored else d
        lifted = (
            not self.shrink and self.unbiased_estimate.needs_correction
        )  # a multiple of Σ⁻¹ outside of the rows' span
        if lifted and d > DENSE_EIGH:
            values, vectors = leading_eigenpairs(
                self._product, self.feature_statistics.gradient, k, EIGH_TOLERANCE, cheap=True
            )
            return Eigenpairs(values, vectors.reshape(b, k, *self.feature_shape))
        if 2 * rows < d and "hessian" not in self.__dict__ and self.denoised is None and not lifted:
            few = 8 * k <= rows and self.denoised_estimate is not None
            if 2 * rows * d * self.inputs.element_size() > (ROW_SPAN_FOR_FEW if few else ROW_SPAN).on(self.device):
                values, vectors = leading_eigenpairs(
                    self._product, self.feature_statistics.gradient, k, EIGH_TOLERANCE, cheap=True
                )
                return Eigenpairs(values, vectors.reshape(b, k, *self.feature_shape))
            # The range of H is in the span of the rows: solve the eigenvalue problem in a basis of it.
            span = orthonormal(torch.cat(self.unbiased_estimate.factors(), 1)).mT
            small = span.mT @ self._product(span.mT).mT
            values, vectors = torch.linalg.eigh(symmetric(small))
            vectors = span @ vectors
        else:
            self.refuse_dense()
            values, vectors = torch.linalg.eigh(self.hessian)
        k = min(k, values.shape[-1])
        order = by_magnitude(values, k)
        values = values.gather(1, order)
        vectors = vectors.gather(2, order[:, None].expand(-1, d, -1)).mT
        return Eigenpairs(values, vectors.reshape(b, k, *self.feature_shape))

    def eigh_residuals(self, pairs: Eigenpairs) -> Tensor:
        """Residuals |Hv − λv| of eigenpairs from `eigh`, relative to the largest |λ|.

        They measure the accuracy of the eigensolver. The standard error of an eigenvalue is that of bilinear(v, v).

        Args:
            pairs: eigenpairs from `eigh`.

        Returns:
            (B, k).
        """
        vectors = pairs.vectors.reshape(*pairs.values.shape, -1)
        left = self._product(vectors) - pairs.values[..., None] * vectors
        largest = pairs.values.abs().amax(1, keepdim=True).clamp_min(torch.finfo(self.dtype).tiny)
        return torch.linalg.vector_norm(left, dim=-1) / largest

    def groups(self, feature_mask: Tensor, direction: Tensor | None = None) -> Interactions:
        """Interactions of groups of features: entry (I, J) sums H_ij over i ∈ I, j ∈ J.

        A diagonal entry sums all ordered pairs inside the group, H_ii included. No d × d matrix is made.

        Args:
            feature_mask: integer group ids with the shape of one input, or of the batch.
            direction: weights v of the features, so that each term is v_i H_ij v_j. With v = x − baseline an entry is
                the effect of removing both groups beyond the sum of the effects of removing each.

        Returns:
            An `Interactions` whose features are the groups.

        Raises:
            TypeError: if `feature_mask` does not hold integers.
            ValueError: if an id is negative, or a shape does not fit the inputs.
        """
        shape = (len(self), *self.feature_shape)
        return self.grouped(Grouping.make(feature_mask, direction, shape, self.feature_scales[0], self.inputs))

    def grouped(self, grouping: Grouping) -> Interactions:
        """As `groups`, for a `Grouping` that was validated before."""
        grouping = replace(grouping, r2=self.r2)
        stats = self.feature_statistics.map(grouping.sum)
        whole = grouping
        if self.grouping is not None:  # composed to one grouping of the features, which `more` needs
            whole = grouping.after(self.grouping, self.gaussian.scales(self.inputs[0].numel()))
        if self.noise.skew is not None:  # the antisymmetric half of the groups is kept with their sums
            q = grouping.directions(self.gaussian).double()
            watched = torch.cat([q, probes(stats.rank, q).expand(len(q), -1, -1)], 1).expand(len(self), -1, -1)
            skew = self.noise.skew.apply(watched).mT * stats.n[:, None, None]
            stats = replace(stats, skew=skew, gram=q @ q.mT)
        elif stats.skew is not None and stats.gram is not None:
            k = self.shape[1]
            skew = torch.cat([grouping.sum(stats.skew[..., :k]), stats.skew[..., k:]], -1)
            stats = replace(stats, skew=skew, gram=grouping.sum(grouping.sum(stats.gram).mT))
        # "tolerance" refers to the error of all pairs of features
        status = tuple("calls" if s == "tolerance" else s for s in self.status)
        sums = replace(self, statistics=stats, grouping=whole, status=status, denoised=None, shrink=False)
        denoised = self._denoised_groups(grouping, sums)
        return sums if denoised is None else replace(sums, denoised=denoised, shrink=True)

    def _denoised_groups(self, grouping: Grouping, unbiased: Interactions) -> Shrunk | None:
        """Group sums that use the denoised Hessian; None if there is none, and for groups of groups."""
        if self.denoised_estimate is None:
            return None
        q = grouping.directions(self.gaussian).expand(len(self), -1, -1)
        hessian = symmetric(self.denoised_estimate.product(q) @ q.mT).double()
        risk = self.denoised_estimate.group_error2(lambda rows, i: grouping.select(i).sum(self.gaussian.push(rows)))
        noise = unbiased.noise
        rows = noise.estimate.odd.double()
        gram, errors = noise.estimate.identity.dense(), noise.control_errors
        missed = errors.of_drift + errors.of_unseen  # common to both
        found = Shrunk.combine(
            noise.estimate.dense(), noise.of_entries().value, hessian, risk + missed, gram, rows.mT @ rows
        )
        return replace(found, hessian=found.hessian.to(self.dtype))

    def top_pairs(
        self,
        k: int = 10,
        names: Sequence[str] | None = None,
        *,
        q: float = 0.05,
        level: float = 0.95,
        scales: Tensor | None = None,
    ) -> list[list[Pair]]:
        """The k strongest pairs of each example, ranked by |H_ij| σ_i σ_j, with confidence intervals.

        Values and intervals are those of the unbiased estimate. Pairs are ranked by `hessian`: if it is denoised, the
        ranking depends less on the noise.

        Args:
            k: number of pairs.
            names: one name per feature; the index of the feature if None.
            q: accepted share of false discoveries among the significant pairs (Benjamini–Hochberg over all pairs).
            level: probability of the confidence intervals.
            scales: typical change of each feature, which replaces the σ_i of the Gaussian; (d,).

        Returns:
            A list of `Pair` for each example, strongest first.

        Raises:
            ValueError: if k, q or level is out of range, if the number of names or scales is not d, or if there are too
                many features for a dense matrix.
        """
        label = labels_of(names, self.shape[1], self.feature_shape)
        return [pairs for part in self.strongest_pairs_of(k, q, level, scales) for pairs in part.named(label)]

    def strongest_pairs_of(
        self, k: int, q: float = 0.05, level: float = 0.95, scales: Tensor | None = None
    ) -> list[Columns]:
        """The strongest pairs as tensors."""
        self.refuse_dense()
        given = self.feature_scales if scales is None else torch.as_tensor(scales, dtype=torch.float64).reshape(1, -1)
        variance = self.noise.of_entries()
        return strongest_pairs(
            self._unbiased_hessian,
            self.hessian,
            variance.value,
            variance.df,
            given.expand(len(self), -1),
            k,
            q,
            level,
        )

    @property
    def feature_scales(self) -> Tensor:
        """The size of a usual move of each feature or group, (1 or B, d)."""
        if self.grouping is not None:
            return self.grouping.scales
        return self.gaussian.scales(self.shape[1]).double()[None]

    def taylor(self, order: int = 2) -> Taylor:
        """The surrogate f(x₀) + Gᵀδ + ½δᵀHδ.

        Args:
            order: 2, or 1 for the surrogate without its quadratic term.

        Returns:
            A `Taylor`, which can be called with points.

        Raises:
            ValueError: for group sums, or if `order` is not 1 or 2.
        """
        if self.grouping is not None:
            raise ValueError(
                "group sums have no Taylor surrogate, since single features are not kept. Use the result before "
                "groups()."
            )
        if order not in (1, 2):
            raise ValueError(f"order must be 1 or 2, got {order}.")
        return Taylor(self.inputs, self.output, self.gradient.flatten(1), self._product if order == 2 else None)

    def calls_for(self, error: float, norm: Literal["fro", "op"] = "fro") -> Tensor:
        """Number of gradient calls after which the relative error is about `error`, by the rate 1/√n of Theorem 1.

        Where a control variate was applied, the number is at least `n_calls`: with a smaller budget control="auto" may
        not apply it. The error of a denoised estimate falls more slowly than 1/√n: on multilayer perceptrons it fell by
        a factor of 1.3 to 1.9 where 2 was requested, and of 2 to 3.5 where 4 was. Call the method again on the longer
        run; `unshrunk()` has the rate 1/√n.

        Args:
            error: relative error to reach.
            norm: "fro" for the Frobenius norm, "op" for the operator norm.

        Returns:
            (B,); infinite where H cannot be distinguished from zero.

        Raises:
            ValueError: if `error` is not positive, or `norm` is not "fro" or "op".
        """
        if error <= 0:
            raise ValueError(f"error must be positive, got {error}.")
        if norm == "fro":
            reached = self.relative_error.double()
        elif norm == "op":
            self.refuse_dense()
            size, deviation = self.noise.operator_norms()
            reached = torch.where(size > 0, deviation / size, 0.0)
        else:
            raise ValueError(f'norm must be "fro" or "op", got {norm!r}.')
        needed = torch.ceil(self.n_calls * (reached / error).square())
        if self.control_weights is None:
            return needed
        return torch.where(self.control_weights.any(1), needed.maximum(self.n_calls.to(needed)), needed)

    # --- selection, concatenation and merging of examples; devices ------------------------------------------------

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> Interactions:
        """The examples at an index, a slice or several indices; a single example is a batch of one.

        Raises:
            IndexError: if there is no such example.
        """
        if isinstance(index, int) and not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        chosen = torch.arange(len(self))[index.cpu() if isinstance(index, Tensor) else index].reshape(-1)
        if not len(chosen):
            raise IndexError("the index must select at least one example, got none.")
        return self._at(chosen)

    def _at(self, chosen: Tensor) -> Interactions:
        """The examples at indices on the CPU."""
        where = chosen.to(self.device)
        part = replace(
            self,
            inputs=self.inputs[where],
            statistics=self.statistics.select(where),
            grouping=None if self.grouping is None else self.grouping.select(where),
            target=None if self.target is None else self.target[chosen],
            n_passes=self.n_passes[where],
            status=tuple(self.status[i] for i in chosen.tolist()),
            control_weights=None if self.control_weights is None else self.control_weights[where],
            precision_error=None if self.precision_error is None else self.precision_error[where],
            no_kinks=None if self.no_kinks is None else self.no_kinks[where],
            denoised=None if self.denoised is None else self.denoised.select(where),
        )
        known = self.__dict__.get("denoised_estimate")
        return part if known is None else part._knowing(known.select(where))

    def _knowing(self, denoised: Denoised) -> Interactions:
        """This result with a denoised estimate that was computed before."""
        self.__dict__["denoised_estimate"] = denoised
        return self

    def __iter__(self) -> Iterator[Interactions]:
        return (self[i] for i in range(len(self)))

    @staticmethod
    def cat(results: Sequence[Interactions]) -> Interactions:
        """Concatenate results of different examples.

        Args:
            results: results that agree in everything but examples and draws.

        Returns:
            One result of all examples, in the given order.

        Raises:
            ValueError: if there is no result, or if two results differ in their settings.
        """
        if not results:
            raise ValueError("cat needs at least one result, got none.")
        first = results[0]
        for result in results:
            _refuse_other_version(first, result)
            if differ := _differences(first, result):
                raise ValueError(f"results with different settings cannot be concatenated; they differ in {differ[0]}.")
        return first._beside(results)

    def _beside(self, results: Sequence[Interactions]) -> Interactions:
        """Concatenate results with equal settings; this result is the first of them."""
        first, targets = self, [r.target for r in results if r.target is not None]
        whole = replace(
            first,
            inputs=torch.cat([r.inputs for r in results]),
            statistics=concatenate([r.statistics for r in results]),
            grouping=None
            if first.grouping is None
            else Grouping.cat([r.grouping for r in results if r.grouping], [*map(len, results)]),
            target=torch.cat(targets) if len(targets) == len(results) else None,
            n_passes=torch.cat([r.n_passes for r in results]),
            status=tuple(s for r in results for s in r.status),
            control="kink" if any(r.control for r in results) else None,
            control_weights=_weights([*results]),
            control_note=next((r.control_note for r in results if r.control_note), ""),
            control_rank=next((r.control_rank for r in results if r.control_rank is not None), None),
            tau_probes=next((r.tau_probes for r in results if r.tau_probes is not None), None),
            unbiased=all(r.unbiased for r in results),
            precision_error=_cat([r.precision_error for r in results]),
            no_kinks=_flags([*results]),
            denoised=None if first.denoised is None else Shrunk.cat([r.denoised for r in results if r.denoised]),
        )
        known = [k for r in results if (k := r.__dict__.get("denoised_estimate")) is not None]
        return whole._knowing(Denoised.cat(known)) if len(known) == len(results) else whole

    def merge(self, other: Interactions) -> Interactions:
        """Merge this result with another of the same inputs from other draws, as if both were one run.

        Args:
            other: result of the same inputs, model and settings, with another seed or other rows of the same stream.

        Returns:
            A new result with the draws of both.

        Raises:
            ValueError: if the results differ in inputs, outputs, settings or version, or if they share draws.
        """
        _refuse_other_version(self, other)
        differ = _differences(self, other)
        if not differ and self.grouping is not None and not self.grouping.same_as(other.grouping):
            differ = ["groups"]
        if not differ and not torch.equal(self.inputs, other.inputs):
            differ = ["inputs"]
        if differ:
            raise ValueError(
                "only results of the same inputs with the same settings can be merged; these differ in "
                f"{', '.join(differ)}."
            )
        if not torch.allclose(self.output, other.output, rtol=1e-4, atol=1e-6):
            raise ValueError("the outputs of the two results differ: they come from different models or targets.")
        status = tuple(a if a == b else "calls" for a, b in zip(self.status, other.status, strict=True))
        return replace(
            self,
            statistics=merge(
                self.statistics, other.statistics, self.inputs[0].numel() if self.grouping is None else None
            ),
            control=self.control or other.control,
            control_weights=self.control_weights if self.control else other.control_weights,
            unbiased=self.unbiased and other.unbiased,
            grouping=None if self.grouping is None else self.grouping.without_r2(),
            n_passes=self.n_passes + other.n_passes,
            status=status,
            denoised=None,
            shrink=self.shrink and self.denoised is None,
        )

    def to(self, device: torch.device | str) -> Interactions:
        """The same result on another device."""
        return replace(
            self,
            inputs=self.inputs.to(device),
            statistics=self.statistics.to(device),
            gaussian=self.gaussian.to(device, self.dtype),
            grouping=None if self.grouping is None else self.grouping.to(device),
            n_passes=self.n_passes.to(device),
            control_weights=None if self.control_weights is None else self.control_weights.to(device),
            precision_error=None if self.precision_error is None else self.precision_error.to(device),
            no_kinks=None if self.no_kinks is None else self.no_kinks.to(device),
            denoised=None if self.denoised is None else self.denoised.to(device),
        )

    # --- files, other packages, figures and text ------------------------------------------------------------------

    def parts(self) -> Parts:
        """This result as plain data, for files and stores."""
        about, tensors = files.common_parts(self)
        tensors |= {f"statistics.{name}": t for name, t in self.statistics.tensors().items()}
        about |= {
            "design": self.design,
            "rank": self.statistics.rank,
            "stream": self.statistics.stream,
            "control": self.control,
            "shrink": self.shrink,
            "unbiased": self.unbiased,
            "control_note": self.control_note,
            "precision": self.precision,
            "tau_probes": self.tau_probes,
            "control_rank": self.control_rank,
        }
        if self.control_weights is not None:
            tensors["control_weights"] = self.control_weights
        if self.precision_error is not None:
            tensors["precision_error"] = self.precision_error
        if self.denoised is not None:
            tensors |= {f"denoised.{name}": getattr(self.denoised, name) for name in ("hessian", "error2", "true2")}
        if self.no_kinks is not None:
            tensors["no_kinks"] = self.no_kinks
        return Parts(about, tensors)

    def save(self, path: str | Path) -> None:
        """Write this result to a safetensors file, atomically.

        Args:
            path: file to write; an existing file is replaced.

        Raises:
            ValueError: if the folder does not exist.
        """
        files.save(self.parts(), path)

    @staticmethod
    def load(path: str | Path) -> Interactions:
        """Read a result that `save` has written.

        Args:
            path: file to read.

        Returns:
            The result, on the CPU; the numbers are exactly those that were saved.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if the file is damaged, or is not a smoothhess result of a readable version.
        """
        return files.load(path)

    def to_frame(self, names: Sequence[str] | None = None, **options: Any) -> Any:
        """A pandas DataFrame with one row for each pair of each example; see smoothhess.result.export.to_frame."""
        return export.to_frame(self, names, **options)

    def to_shapiq(self, example: int = 0, **options: Any) -> Any:
        """One example as shapiq.InteractionValues of order ≤ 2; see smoothhess.result.export.to_shapiq."""
        return export.to_shapiq(self, example, **options)

    def to_scipy(self) -> LinearOperator:
        """H of a single example as a scipy LinearOperator, for example for scipy.sparse.linalg.eigsh.

        Raises:
            ValueError: if this result has several examples.
        """
        from scipy.sparse.linalg import LinearOperator

        if len(self) != 1:
            raise ValueError(
                f"a scipy operator holds one example, this result has {len(self)}. Use result[i].to_scipy()."
            )

        def product(v: Any) -> Any:
            return (self @ torch.as_tensor(v).reshape(self.shape[1], -1)).squeeze(0).cpu().numpy().reshape(v.shape)

        kind = str(self.dtype).removeprefix("torch.")
        return LinearOperator(self.shape[1:], matvec=product, rmatvec=product, matmat=product, dtype=kind)  # pyright: ignore

    def plot(self, kind: str = "heatmap", **options: Any) -> Any:
        """Plot one example with Matplotlib.

        Args:
            kind: "heatmap", "pairs", "graph" and "image" show which features act together; "segment" the interactions
                of one segment of an image; "series" a curve, its SmoothGrad by interval and its interactions;
                "gradient" and "diagonal" single features; "eigen" the directions of largest curvature.
            **options: `example`, `ax`, and the options of the kind, see smoothhess.view.

        Returns:
            Matplotlib Axes. The figure is not registered with pyplot: `ax.figure` displays it in a notebook,
            `ax.figure.savefig(path)` saves it.
        """
        from smoothhess import view

        return view.plot(self, kind, **options)

    def report(self, path: str | Path, **options: Any) -> Path:
        """Write a self-contained interactive HTML page.

        Args:
            path: file to write.
            **options: options of smoothhess.view.report.report.

        Returns:
            The path of the file.
        """
        from smoothhess.view.report import report

        return report(self, path, **options)

    def _repr_html_(self) -> str:
        from smoothhess.view.report import html

        return html(self)

    def __repr__(self) -> str:
        return text.sampled_table(self)

    @property
    def gaussian_text(self) -> str:
        """Kind and standard deviations of the Gaussian as text."""
        return text.describe_gaussian(self.gaussian, self.inputs[0].numel())

    def refuse_dense(self) -> None:
        """Raise if there are too many features for a dense matrix."""
        if self.shape[1] > DENSE_LIMIT:
            raise ValueError(
                f"{self.shape[1]} features are too many for a dense matrix ({DENSE_LIMIT} at most). Use groups(mask), "
                "row(i), diagonal(), bilinear(u, v) or result @ v."
            )

    def flat_index(self, i: int | tuple[int, ...]) -> int:
        """Return the position of a feature, given as a number or as an index into the input, among all features."""
        shape = self.feature_shape
        if isinstance(i, str):
            raise TypeError(f"a feature must be an index, not a name, got {i!r}. Use names.index({i!r}).")
        single = hasattr(i, "__index__") and not isinstance(i, tuple)
        index = tuple(map(operator.index, (i,) if single else i))  # type: ignore[arg-type]
        sizes = (self.shape[1],) if single else shape
        if len(index) != len(sizes) or not all(-s <= j < s for j, s in zip(index, sizes, strict=True)):
            raise ValueError(f"feature {i!r} is not among the {self.shape[1]} features of shape {shape}.")
        flat = 0
        for j, size in zip(index, sizes, strict=True):
            flat = flat * size + j % size
        return flat

    def _rows_of(self, v: Tensor) -> Tensor:
        """A direction as (B, d)."""
        b, d, _ = self.shape
        v = torch.as_tensor(v, dtype=self.dtype, device=self.device)
        if v.shape not in ((b, *self.feature_shape), self.feature_shape, (b, d), (d,)):
            raise ValueError(
                f"a direction must have shape {self.feature_shape}, or that with {b} examples in front, got "
                f"{tuple(v.shape)}."
            )
        return v.reshape(-1, d).expand(b, d)


def _ratio(error2: Tensor, true2: Tensor) -> Tensor:
    """√(error²/‖H‖²); infinite where the estimate of ‖H‖² is zero and the error is not."""
    ratio = (error2 / true2.clamp_min(torch.finfo(torch.float64).tiny)).sqrt()
    return torch.where(true2 > 0, ratio, torch.where(error2 > 0, torch.inf, 0.0))


def _weights(results: Sequence[Interactions]) -> Tensor | None:
    """`control_weights` of all examples; zero for results without a control variate."""
    like = next((r.control_weights for r in results if r.control_weights is not None), None)
    if like is None:
        return None
    return torch.cat([like.new_zeros(len(r), 2) if (w := r.control_weights) is None else w for r in results])


def _flags(results: Sequence[Interactions]) -> Tensor | None:
    """`no_kinks` of all examples; False for results without it."""
    if all(r.no_kinks is None for r in results):
        return None
    none = [torch.zeros(len(r), dtype=torch.bool, device=r.device) for r in results]
    return torch.cat([z if r.no_kinks is None else r.no_kinks for r, z in zip(results, none, strict=True)])


def _cat(tensors: Sequence[Tensor | None]) -> Tensor | None:
    given = [t for t in tensors if t is not None]
    return torch.cat(given) if given else None


def _refuse_other_version(a: Interactions, b: Interactions) -> None:
    if a.estimator_version != b.estimator_version:
        raise ValueError(
            f"the results were made by versions {a.estimator_version} and {b.estimator_version} of the estimator, "
            "whose numbers are not comparable. Rerun the older one with this version of smoothhess."
        )


def _differences(a: Interactions, b: Interactions) -> list[str]:
    """The settings in which two results differ, as text."""

    def kinds(r: Interactions) -> dict[str, object]:
        return {
            "kind": type(r).__name__,
            "design": r.design,
            "feature shape": r.feature_shape,
            "input shape": tuple(r.inputs.shape[1:]),
            "dtype": r.dtype,
            "shrink": r.shrink,
            "precision": r.precision,
            "grouped": r.grouping is not None,
        }

    mine, other = kinds(a), kinds(b)
    found = [f"{name} ({mine[name]} and {other[name]})" for name in mine if mine[name] != other[name]]
    return found if a.gaussian.same_as(b.gaussian) else [*found, f"Gaussian ({a.gaussian_text} and {b.gaussian_text})"]


@files.restorer("Interactions")
def _restored(parts: Parts) -> Interactions:
    about, tensors = parts
    stream = tuple(tuple(DrawRange(*s) for s in example) for example in about["stream"])
    return Interactions(
        **files.common_fields(parts),
        statistics=Statistics.from_tensors(about["design"], stream, about["rank"], parts.under("statistics.")),
        control=about["control"],
        shrink=about["shrink"],
        unbiased=about["unbiased"],
        control_weights=tensors.get("control_weights"),
        control_note=about.get("control_note", ""),
        precision=about.get("precision", "float32"),
        tau_probes=about.get("tau_probes"),
        control_rank=about.get("control_rank"),
        precision_error=tensors.get("precision_error"),
        denoised=_sums(parts.under("denoised.")),
        no_kinks=tensors.get("no_kinks", tensors.get("exactly_zero")),  # its former name
    )


def _sums(tensors: dict[str, Tensor]) -> Shrunk | None:
    """Denoised group sums of a file; files of estimator version 1 do not hold their squared norm."""
    if "hessian" not in tensors:
        return None
    if "true2" not in tensors:
        tensors["true2"] = tensors["hessian"].double().square().sum((-1, -2)) + tensors["error2"]
    return Shrunk(**tensors)
