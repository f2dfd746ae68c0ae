"""Interactions, the sampled result: SmoothHess and SmoothGrad of B examples with their standard errors.

Methods that need draws belong here: merging, extrapolation of the error, the check of the gradients. What exact
results have too is in `result`; the formulas of the estimates are in `smoothhess.estimate`, the file format in `files`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Self

import torch
from torch import Tensor

from smoothhess.draws.designs import find_design
from smoothhess.estimate import fit_quality
from smoothhess.estimate.effective_draws import carrying_rows, row_tail_index
from smoothhess.estimate.grouping import Grouping
from smoothhess.estimate.halves import Halves
from smoothhess.estimate.hessian_estimate import HessianEstimate, refuse_dense
from smoothhess.estimate.statistics import Statistics
from smoothhess.estimate.variance import Noise, Variance
from smoothhess.result import combine, eigenpairs, files, text
from smoothhess.result.eigenpairs import Eigenpairs
from smoothhess.result.eigenvalue_intervals import cross_fitted
from smoothhess.result.files import Parts
from smoothhess.result.pairs import Entries
from smoothhess.result.result import Result
from smoothhess.result.taylor import Taylor, surrogate


@dataclass(frozen=True, eq=False, repr=False)
class SampledResult(Result):
    """A result that is estimated from draws: an `Interactions`, or the change between two of them."""

    estimate: HessianEstimate  # for modules of this package
    control_weights: Tensor | None = None  # (B, 2) μ and β of the control variate; β = 0: no frozen pass per call
    control_rank: int | None = None  # rank of the closed form where it is not kept as a matrix
    tau_probes: int | None = None  # random directions from which the closed form's τ was estimated; None: exact

    @property
    def source(self) -> HessianEstimate:
        """The estimate; for modules of this package."""
        return self.estimate

    @property
    def statistics(self) -> Statistics:
        """The raw statistics of the draws; for modules of this package."""
        return self.estimate.statistics

    @property
    def noise(self) -> Noise:
        """Variances of everything that is read off this result; for modules of this package."""
        return self.estimate.noise

    @property
    def shrink(self) -> bool:
        """Whether `hessian`, `@`, `eigh`, `taylor` and `relative_error` use the denoised estimate."""
        return self.estimate.shrink

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
    def relative_error(self) -> Tensor:
        """Estimated ‖Ĥ − H‖_F / ‖H‖_F of `hessian`, (B,); 0 where both norms are zero, NaN where it is unknown.

        For the unbiased estimate it is inf while ‖H‖ cannot be distinguished from zero. For the denoised estimate of an
        isotropic Gaussian it is at most 1, which means that the estimate carries no information.
        """
        return self.estimate.relative_error

    @property
    def r2(self) -> Tensor:
        """Share of the gradient's variation in the neighbourhood that pairwise interactions explain, (B,).

        It is an estimate for fresh gradients, which were not used in the fit; 1 for a quadratic. NaN where the gradient
        does not vary, and for group sums that were streamed with feature_mask, which do not keep the variation.
        """
        return self.estimate.r2

    @property
    def n_eff(self) -> Tensor:
        """Effective number of draws that carry the estimate, (B,): (Σe)²/Σe² of the rows' squared gradient changes e.

        A row is one call, or a pair of calls at x ± δ. A small share of all rows, below a tenth, means that a few
        draws carry the estimate, as in a saturated output: its standard errors are unreliable.
        """
        return carrying_rows(self.statistics, self.grouping is not None).to(self.dtype)

    @property
    def tail_index(self) -> Tensor:
        """Pareto tail index k̂ of the gradient changes, (B,); NaN with fewer than 25 rows.

        Above 0.7 the largest changes decide the estimate, and more draws may find larger ones.
        """
        return row_tail_index(self.statistics).to(self.dtype)

    @property
    def stein_z(self) -> Tensor:
        """z-scores of the check that the gradients are the derivatives of the values, (B, 2).

        The check uses Stein's identities: E[f z] = E[γ] (first column, the worse of two directions) and E[f (|z|² − k)]
        = E[z·γ] (second column). Scores beyond 5 mean jumps, detached or straight-through gradients, or a wrong
        gradient function. Differences that rounding can explain are not counted.
        """
        return self.estimate.stein_z

    @property
    def discontinuous(self) -> Tensor:
        """Where values changed although no gradient did, (B,): the function has jumps, which Ĥ does not contain.

        It is False for designs that do not use each direction twice (±).
        """
        return fit_quality.discontinuous(self.statistics)

    def eigh(self, k: int | None = None) -> Eigenpairs:
        """The k eigenpairs of H with the largest |λ|, as `Result.eigh`."""
        found = eigenpairs.of_estimate(self.estimate, eigenpairs.check_count(k, self.shape[1]))
        errors = partial(cross_fitted, self.estimate, found.values)
        note = Halves(self.estimate.unbiased).reason
        return replace(found, compute_estimate=errors, note=note).shaped(self.feature_shape)

    def split_entries(self) -> Entries:
        """Entries for pairs that are chosen and measured with different draws; for modules of this package."""
        halves, variance = Halves(self.estimate.unbiased), self.noise.of_entries()
        if halves.reason:
            raise ValueError(f'selection="split" needs two halves of the draws: {halves.reason}')
        if not bool(halves.share_control.all()):
            raise ValueError(
                'selection="split" needs the same control variate in all draws, and this result was merged from '
                "several runs. Pass one of them, or make one run with all calls (SmoothHess.more)."
            )
        each = variance.value / (1 - halves.share)[:, None, None]  # a mean over fewer rows
        return Entries(halves.second.dense(), Variance(each, variance.df), halves.first.dense(), True)

    def taylor(self, order: int = 2) -> Taylor:
        """The surrogate f(x₀) + Gᵀδ + ½δᵀHδ.

        Args:
            order: 2, or 1 for the surrogate without its quadratic term.

        Returns:
            A `Taylor`, which can be called with points.

        Raises:
            ValueError: for group sums, or if `order` is not 1 or 2.
        """
        return surrogate(self, order)

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

    def unshrunk(self) -> Self:
        """The same result with the unbiased estimate for all quantities."""
        return replace(self, estimate=self.estimate.changed(shrink=False, sums=None))

    def grouped(self, grouping: Grouping) -> Self:
        """As `groups`, for a `Grouping` that was validated before."""
        # "tolerance" refers to the error of all pairs of features
        status = tuple("calls" if s == "tolerance" else s for s in self.status)
        estimate = self.estimate.grouped(grouping, self.inputs[0].numel())
        return replace(self, estimate=estimate, status=status, names=None)

    def select(self, chosen: Tensor) -> Self:
        """The examples at indices on the CPU, in that order; for modules of this package."""
        return combine.selected(self, chosen, estimate=self.estimate.select(chosen.to(self.device)))

    def concatenated(self, results: Sequence[Result]) -> Self:
        """All of `results`, of which this is the first, as one; for modules of this package."""
        return combine.concatenate_sampled(self, results)

    def to(self, device: torch.device | str) -> Self:
        """The same result on another device."""
        return combine.moved(self, device, estimate=self.estimate.to(device))

    def refuse_dense(self) -> None:
        """Raise if there are too many features for a dense matrix."""
        refuse_dense(self.shape[1])

    def __repr__(self) -> str:
        return text.sampled_table(self)


class Interactions(SampledResult):
    """SmoothHess and SmoothGrad of B examples with their Monte-Carlo error.

    `SmoothHess.attribute` returns it. It holds the raw statistics of the draws and no reference to the model, so it can
    be saved, merged and moved to another device, and every quantity can be computed later. The dense matrix `hessian`
    is computed on first access.

    A result contains two estimates. The *unbiased* estimate is used for everything that has an interval: `top_pairs`,
    `row`, `diagonal`, `bilinear`, `stderr`, `gradient` and `value`. If `shrink` is True, the *denoised* estimate, whose
    total error is smaller, is used for `hessian`, `@`, `eigh`, `taylor`, `groups(mask).hessian` and the figures, and
    `relative_error` and `r2` describe it. `unshrunk()` returns a result that uses the unbiased estimate everywhere.
    """

    def merge(self, other: Interactions) -> Interactions:
        """Merge this result with another of the same inputs from other draws, as if both were one run.

        Args:
            other: result of the same inputs, model and settings, with another seed or other rows of the same stream.

        Returns:
            A new result with the draws of both.

        Raises:
            ValueError: if `other` is not an `Interactions`, if the results differ in inputs, outputs, settings or
                version, or if they share draws.
        """
        return combine.merge_sampled(self, other)

    def parts(self) -> Parts:
        """This result as plain data, for files and stores."""
        return files.sampled_parts(self)

    def save(self, path: str | Path) -> None:
        """Write this result to a safetensors file, atomically.

        Args:
            path: file to write; an existing file is replaced.

        Raises:
            ValueError: if the folder does not exist.
        """
        files.save(self.parts(), path)


@files.restorer("Interactions")
def _restored(parts: Parts) -> Interactions:
    return Interactions(**files.sampled_fields(parts))
