"""The unbiased estimate of the Hessian (Eq. 8), with incomplete orthogonal blocks corrected.

In the coordinates of features, or of groups of features, the estimate is

    Ĥ = sym mean(s γ′ᵀ) + c I + K,

with γ′ the corrected rows and c the constant of `incomplete_blocks`, I the image of the whitened identity (Σ⁻¹ for
features, the inner products of the whitened directions for groups), and K the expectation of the control variate, which
is added back. Its variance is in `variance`, the denoised estimate in `shrinkage`.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from smoothhess.draws.gaussian import Gaussian
from smoothhess.estimate.incomplete_blocks import Correction, correct
from smoothhess.estimate.once import Once
from smoothhess.estimate.statistics import Rows, Statistics, symmetric
from smoothhess.linalg.gram import pair_norm


class Identity:
    """The image of the whitened identity: Σ⁻¹ for features, or given inner products of whitened directions."""

    def __init__(self, gaussian: Gaussian, gram: Tensor | None, like: Tensor) -> None:
        self.gaussian, self.gram, self.like = gaussian, gram, like
        self.d = like.shape[-1]

    def select(self, examples: Tensor) -> Identity:
        """That of the examples at these indices."""
        if self.gram is None or len(self.gram) == 1:
            return self
        return Identity(self.gaussian, self.gram[examples], self.like)

    def product(self, rows: Tensor) -> Tensor:
        """Its product with each row of (B, n, d)."""
        if self.gram is not None:
            return rows @ self.gram.to(rows)
        return self.gaussian.push(self.gaussian.whiten(rows))

    @cached_property
    def diagonal(self) -> Tensor:
        """|q_i|² of every feature or group, (1 or B, d) float64."""
        if self.gram is not None:
            return self.gram.diagonal(dim1=-2, dim2=-1).double()
        return self.gaussian.precision_diagonal(self.d).double().to(self.like.device)[None]

    def dense(self) -> Tensor:
        """q_i·q_j, (1 or B, d, d) float64."""
        if self.gram is not None:
            return self.gram.double()
        eye = torch.eye(self.d, dtype=self.like.dtype, device=self.like.device)
        return self.product(eye[None]).double()

    @cached_property
    def squared_norm(self) -> Tensor:
        """Its squared Frobenius norm, (1 or B,)."""
        if self.gram is not None:
            return self.gram.double().square().sum((-1, -2))
        return self.gaussian.precisions(self.d).double().square().sum().to(self.like.device)[None]


class Unbiased:
    """The unbiased estimate of B examples in the coordinates of its statistics: features or groups."""

    def __init__(self, stats: Statistics, gaussian: Gaussian, grouped: bool) -> None:
        self.stats, like = stats, stats.gradient
        self.has_identity = not grouped or stats.gram is not None
        gram = stats.gram if grouped else None
        if not self.has_identity:  # group sums of independent rows: not kept, and no correction is needed
            gram = torch.zeros(1, stats.k, stats.k, device=like.device)
        self.identity = Identity(gaussian, gram, like)
        self._cached_matrix = Once[Tensor]()

    @cached_property
    def correction(self) -> Correction:
        """The correction of incomplete blocks."""
        return correct(self.stats, self.has_identity and self.identity.gaussian.has_mean_curvature)

    @cached_property
    def needs_correction(self) -> bool:
        """Whether any block is incomplete and can be corrected."""
        return self.correction.is_needed

    @cached_property
    def odd(self) -> Tensor:
        """γ′ of the rows of the head, (B, P, d)."""
        return corrected_rows(self.stats.head, self.correction) if self.needs_correction else self.stats.head.odd

    @property
    def constant(self) -> Tensor:
        """c, (B,) float64."""
        return self.correction.constant if self.needs_correction else torch.zeros_like(self.correction.constant)

    @cached_property
    def energy(self) -> Tensor:
        """Mean of |γ′|² over the rows, whitened, (B,)."""
        return mean_energy(self.stats, self.stats.head.along.double() - self.correction.slope)

    def _matrix(self) -> Tensor:
        stats, head = self.stats, self.stats.head
        total = stats.summed()
        if self.needs_correction:
            rows = torch.nonzero((self.correction.slope != 0).any(0)).reshape(-1)
            total = total + head.score[:, rows].double().mT @ (self.odd - head.odd)[:, rows].double()
            total = total + (stats.n * self.constant)[:, None, None] * self.identity.dense()
        return symmetric(total / stats.n[:, None, None])  # Eq. 8

    def dense(self) -> Tensor:
        """The estimate, (B, d, d) float64."""
        return self._cached_matrix.get(self._matrix)

    def sampled_dense(self) -> Tensor:
        """The estimate without what is added to it, (B, d, d) float64."""
        known = self.stats.added
        return self.dense() if known is None else self.dense() - known.dense().double()

    @property
    def is_factored(self) -> bool:
        """Whether `factors` gives the estimate, up to the constant."""
        return self.stats.is_factored

    def factors(self) -> tuple[Tensor, Tensor]:
        """Rows S and G, (B, r, d) each, with Ĥ = sym SᵀG + c I, for a factored estimate."""
        score, odd = self.stats.factors()
        if self.needs_correction:
            odd = torch.cat([self.odd, odd[:, self.odd.shape[1] :]], 1)
        return score, odd

    def product(self, rows: Tensor) -> Tensor:
        """Ĥ applied to each row of (B, n, d)."""
        if not self.is_factored or self._cached_matrix.value is not None:
            return rows @ self.dense().to(rows)
        score, odd = self.factors()
        found = ((rows @ odd.mT) @ score + (rows @ score.mT) @ odd) / 2
        if not self.needs_correction:
            return found
        return found + self.constant[:, None, None].to(found) * self.identity.product(rows)

    def sampled_product(self, rows: Tensor) -> Tensor:
        """Ĥ without what is added to it, applied to each row of (B, n, d), float64."""
        known = self.stats.added
        found = self.product(rows).double()
        return found if known is None else found - known.product(rows).double()

    @cached_property
    def sampled_diagonal(self) -> Tensor:
        """The diagonal of Ĥ without what is added to it, (B, d) float64."""
        stats = self.stats
        if stats.total is not None or self._cached_matrix.value is not None:
            known = 0.0 if stats.added is None else stats.added.diagonal().double()
            return self.dense().diagonal(dim1=-2, dim2=-1) - known
        found = (stats.head.score.double() * self.odd.double()).sum(1) / stats.n.clamp_min(1)[:, None]
        return found + self.constant[:, None] * self.identity.diagonal if self.needs_correction else found

    def diagonal(self) -> Tensor:
        """Ĥ_ii, (B, d) float64."""
        known = self.stats.added
        return self.sampled_diagonal if known is None else self.sampled_diagonal + known.diagonal().double()

    @cached_property
    def squared_norm(self) -> Tensor:
        """‖Ĥ‖²_F, (B,); without a d × d matrix if there are fewer rows than features."""
        if not self.is_factored:
            return torch.linalg.vector_norm(self.dense(), dim=(-1, -2)).square()
        return self.pair_norm(*self.factors(), self.constant)

    @cached_property
    def sampled_squared_norm(self) -> Tensor:
        """Squared Frobenius norm of Ĥ without what is added to it, (B,)."""
        if self.stats.added is None:
            return self.squared_norm
        if self.stats.total is not None:
            return self.sampled_dense().square().sum((-1, -2))
        score = self.stats.head.score / self.stats.n.clamp_min(1)[:, None, None].to(self.odd)
        return self.pair_norm(score.expand_as(self.odd), self.odd, self.constant)

    def pair_norm(self, score: Tensor, odd: Tensor, constant: Tensor, examples: Tensor | None = None) -> Tensor:
        """‖sym SᵀG + c I‖²_F of rows S and G of some examples, (b,); of all examples if None."""
        found = pair_norm(score, odd)
        if not self.needs_correction:
            return found
        identity = self.identity if examples is None else self.identity.select(examples)
        mixed = (identity.product(score).double() * odd.double()).sum((-1, -2))
        return found + 2 * constant * mixed + constant.square() * identity.squared_norm


def corrected_rows(head: Rows, correction: Correction) -> Tensor:
    """γ′ = γ − b z of the rows of a head, (B, P, d), in the coordinates of the rows; z = s/w."""
    weight = head.weight.double()
    factor = torch.where(weight > 0, correction.slope / weight.clamp_min(1e-300), 0.0)
    return head.odd - factor[..., None].to(head.odd) * head.score


def mean_energy(stats: Statistics, along: Tensor) -> Tensor:
    """Mean of |γ|² over rows whose slopes along their own directions are `along` (B, P), whitened, (B,)."""
    square = (along.square() + stats.head.across.double()) * stats.rank
    return (square / stats.head.weight.double().clamp_min(1e-300)).sum(1) / stats.n_head.clamp_min(1)
