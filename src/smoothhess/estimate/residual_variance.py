"""Estimate of the variance of the curvature vᵀĤv along a direction from the residuals of the rows.

The antisymmetric half A contains the noise of v with other directions, but vᵀAv = 0. The rows show the noise of v with
itself: a row has the coordinate t = z·q̂ along the whitened direction and the slope y = q·γ, and with the residual e of
y after the linear part, |q| mean(w t e) is the error of vᵀĤv. Its variance is the mean of |q|²(w t e)² over n, also
where the noise along v is smaller than elsewhere, or grows with t.

A function of t alone, such as cosh(v·x), has a residual c(t³ − 3t) up to higher terms, whose noise is due to a few
large t. c is therefore fitted, and its noise in orthogonal blocks follows from c in closed form. docs/theory.md has the
derivation. The variance from the antisymmetric half is in `antisymmetric_variance`; the larger of both is used in
`pooled_variance`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smoothhess.estimate.statistics import Statistics
from smoothhess.estimate.unbiased_hessian import Unbiased, corrected_rows

CHUNK = 1 << 22  # numbers per temporary tensor
_TINY = 1e-300


class ResidualVariance:
    """Variances of vᵀĤv for B examples; `white` holds the whitened statistics (None for group sums).

    `trace` (B,) is tr(K)/n, the noise of the regression on all coordinates. Group sums hold only the coordinates of the
    groups: the linear part in other directions cannot be separated from the noise, and the variance is that of the
    cubic part alone.
    """

    def __init__(self, white: Statistics | None, estimate: Unbiased, trace: Tensor) -> None:
        self.estimate, self.stats, self.trace, self.white = estimate, estimate.stats, trace, white
        if white is None:
            return
        self.draws = white.draws()  # (1 or B, P, k)
        self.odd = corrected_rows(white.head, estimate.correction) if estimate.needs_correction else white.head.odd
        self.by_rows = self.odd.shape[1] < white.k
        if self.by_rows:  # inner products of rows take less memory than k × k matrices
            self.cross, self.gram = self.draws @ self.odd.mT, self.odd @ self.odd.mT

    def of_directions(self, score: Tensor, odd: Tensor, gram: Tensor) -> Tensor:
        """Variance of vᵀĤv, (B, m), from the products (B, P, m) of scores and corrected rows with v; `gram` is |q|²."""
        size = max(1, CHUNK // max(1, odd.shape[0] * odd.shape[1]))
        parts = zip(score.split(size, -1), odd.split(size, -1), gram.split(size, -1), strict=True)
        return torch.cat([self._of_chunk(*part) for part in parts], -1)

    def _of_chunk(self, score: Tensor, odd: Tensor, gram: Tensor) -> Tensor:
        k, n_head = self.stats.rank, self.stats.n_head[:, None].double()
        weight = self.stats.head.weight.double()[..., None]
        length = gram.double().sqrt().clamp_min(_TINY)[:, None]  # |q|
        s = score.double() / length
        t, y = s / weight.clamp_min(_TINY), odd.double()

        def total(rows: Tensor) -> Tensor:
            return (weight * rows).sum(1, keepdim=True)

        if self.white is not None:
            fitted, noise = self._across(score, gram.double(), t, y)
            y = y - fitted
        square = total(t * t).clamp_min(_TINY)
        y = y - t * (total(t * y) / square)
        cubic = t**3 - t * (total(t**4) / square)
        size = total(cubic * cubic).clamp_min(_TINY)
        slope = total(cubic * y) / size  # c
        rest = y - slope * cubic
        c2 = slope.square() - total(rest.square()) / size / (n_head - 2).clamp_min(1)[..., None]
        variance = cubic_variance(k) * c2[:, 0].clamp_min(0)
        if self.white is not None:
            of_rows = (weight * t * rest).square().sum(1) / n_head.clamp_min(1)
            variance = variance + (of_rows - noise).clamp_min(0)
        return gram * variance / self.stats.n.clamp_min(1)[:, None]

    def _across(self, score: Tensor, gram: Tensor, t: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The linear part of y in the directions orthogonal to q̂, shrunk by the noise of its coefficients, (B, P, m).

        The coefficients are those of all slopes on the coordinate t, Mᵀq, with the noise tr(K)|q|²/n.
        """
        n = self.stats.n_head.clamp_min(1).double()[:, None]
        weights = score.to(self.odd) / n[..., None].to(self.odd)
        if self.by_rows:
            fitted, norm2 = self.cross @ weights, (weights * (self.gram @ weights)).sum(1)
        else:
            slopes = self.odd.mT @ weights
            fitted, norm2 = self.draws @ slopes, slopes.square().sum(1)
        weight = self.stats.head.weight.double()[..., None]
        along = (weight * t * y).sum(1) / n  # q̂ᵀMᵀq
        signal = (norm2.double() - along.square()).clamp_min(_TINY)
        noise = (self.trace * self.stats.n)[:, None] / n * (1 - 1 / self.stats.rank) * gram
        share = (1 - noise / signal).clamp_min(0)
        return share[:, None] * (fitted.double() - along[:, None] * t), share.square() * noise


def cubic_variance(k: int) -> float:
    """n times the variance of vᵀĤv/|q|² from orthogonal blocks, for the slope t³ in k dimensions; about 24."""
    return k * (24 * k + 186) / ((k + 4) * (k + 6))
