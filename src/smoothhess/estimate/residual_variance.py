"""Estimate of the variance of the curvature vᵀĤv along a direction from the residuals of the rows.

The antisymmetric half A contains the noise of v with other directions, but vᵀAv = 0. The rows show the noise of v with
itself: a row has the coordinate t = z·q̂ along the whitened direction and the slope y = q·γ, and with the residual e of
y after the linear part, |q| mean(w t e) is the error of vᵀĤv. Its variance is the mean of |q|²(w t e)² over n, also
where the noise along v is smaller than elsewhere, or grows with t.

A function of t alone, such as cosh(v·x), has a residual c(t³ − 3t) up to higher terms, whose noise is due to a few
large t. c is therefore fitted, and its noise in orthogonal blocks follows from c in closed form. Incomplete blocks have
noise of the linear part as well, so their rows are left out where there are complete ones. docs/theory.md has the
derivation. The variance from the antisymmetric half is in `antisymmetric_variance`; both are combined in
`pooled_variance`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smoothhess.draws.designs import SMALL
from smoothhess.estimate.incomplete_blocks import in_complete_blocks
from smoothhess.estimate.statistics import Statistics
from smoothhess.estimate.unbiased_hessian import Unbiased, corrected_rows

SIGNIFICANT = 3.0  # c² of noise, in squared standard errors, by which c is shrunk
LEAST_SPREAD = 0.3  # Σ w (t³ − 3t)²/n below which c is shrunk more; its expectation is 6
LEAST_UNUSED = 0.1  # lower bound of the share of a residual that the fit of the slope leaves
CHUNK = 1 << 22  # numbers per temporary tensor
_TINY = 1e-300


class ResidualVariance:
    """Variances of vᵀĤv for B examples; `white` holds whitened rows (None for group sums that do not determine them).

    `trace` (B,) is tr(K)/n, the noise of the mean of all slopes. Without whitened rows the linear part in directions
    outside of the groups cannot be separated from the noise, and the variance is that of the cubic part.
    """

    def __init__(self, white: Statistics | None, estimate: Unbiased, trace: Tensor) -> None:
        self.estimate, self.stats, self.white = estimate, estimate.stats, white
        self.n = self.stats.n_head.clamp_min(1)  # rows that are used, (B,)
        self.used: Tensor | None = None  # these rows, (B, P); None: all
        if white is None:
            return
        self.draws = white.draws()  # (1 or B, P, k)
        self.odd = corrected_rows(white.head, estimate.correction) if estimate.needs_correction else white.head.odd
        self.by_rows = self.odd.shape[1] < white.k
        self.noise = trace * self.stats.n / self.n  # tr(K) of one row, over the number of rows
        if estimate.correction.is_incomplete and not self.by_rows:
            self._use_complete_blocks(white)
        if self.by_rows:  # inner products of rows take less memory than k × k matrices
            self.cross = self.draws @ self.odd.mT

    def _use_complete_blocks(self, white: Statistics) -> None:
        """Leave out the rows of incomplete blocks, where there are complete ones: they add noise of the linear part."""
        inside = in_complete_blocks(white, self.odd.shape[1])
        found = inside.any(1)
        rows = torch.arange(self.odd.shape[1], device=inside.device) < self.stats.n_head[:, None]
        self.used = torch.where(found[:, None], inside, rows)
        self.n = self.used.sum(1).clamp_min(1)
        score = white.head.score * self.used[..., None]
        mean = score.double().mT @ self.odd.double() / self.n[:, None, None]
        norm2 = (mean - mean.mT).square().sum((1, 2)) / 4
        self.noise = torch.where(found, 2 * norm2 / max(white.k - 1, 1), self.noise)

    def of_directions(self, score: Tensor, odd: Tensor, gram: Tensor) -> Tensor:
        """Variance of vᵀĤv, (B, m), from the products (B, P, m) of scores and corrected rows with v; `gram` is |q|²."""
        size = max(1, CHUNK // max(1, odd.shape[0] * odd.shape[1]))
        parts = zip(score.split(size, -1), odd.split(size, -1), gram.split(size, -1), strict=True)
        return torch.cat([self._of_chunk(*part) for part in parts], -1)

    def _of_chunk(self, score: Tensor, odd: Tensor, gram: Tensor) -> Tensor:
        k, n = self.stats.rank, self.n[:, None].double()
        weight = self.stats.head.weight.double()[..., None]
        if self.used is not None:
            score, weight = score * self.used[..., None], weight * self.used[..., None]
        length = gram.double().clamp_min(_TINY).sqrt()[:, None]  # |q|
        s = score.double() / length
        t, y = s / weight.clamp_min(_TINY), odd.double()

        def total(rows: Tensor) -> Tensor:
            return (weight * rows).sum(1, keepdim=True)

        square = total(t * t).clamp_min(_TINY)
        y = y - t * (total(t * y) / square)
        noise = torch.zeros_like(gram, dtype=torch.float64)
        if self.white is not None:
            across = self._across(score).double()
            across = across - t * (total(t * across) / square)
            share = (total(across * y) / total(across.square()).clamp_min(_TINY)).clamp(0, 1)
            y = y - share * across
            noise = share[:, 0].square() * gram * self.noise[:, None]
        cubic = t**3 - t * (total(t**4) / square)
        size = total(cubic * cubic).clamp_min(_TINY)
        slope = total(cubic * y) / size  # c
        error = total((y - slope * cubic).square()) / size / (n - 2).clamp_min(1)[..., None]  # squared
        few = (LEAST_SPREAD * n[..., None] / size).clamp_min(1)  # |t| that hardly differ give large c by chance
        slope = slope * (1 - SIGNIFICANT * few * error / slope.square().clamp_min(_TINY)).clamp_min(0)
        slope = torch.where((n > SMALL)[..., None], slope, 0.0)  # a line and a cubic slope fit any two rows
        if self.stats.tails is not None:  # large t were sampled apart
            slope = torch.where((self.stats.tails.n > 0)[:, None, None], 0.0, slope)
        variance = cubic_variance(k) * slope[:, 0].square()
        if self.white is not None:
            unused = (1 - weight * t * t / square).clamp_min(LEAST_UNUSED)  # the fit of the slope takes part of rows
            of_rows = ((weight * t * (y - slope * cubic)).square() / unused).sum(1) / n
            variance = variance + (of_rows - noise).clamp_min(0)
        return gram * variance / self.stats.n.clamp_min(1)[:, None]

    def _across(self, score: Tensor) -> Tensor:
        """The rows z times the mean of all slopes γ on the coordinate t, which estimates Wq, (B, P, m)."""
        weights = (score / self.n[:, None, None]).to(self.odd)
        return self.cross @ weights if self.by_rows else self.draws @ (self.odd.mT @ weights)


def cubic_variance(k: int) -> float:
    """n times the variance of vᵀĤv/|q|² from orthogonal blocks, for the slope t³ in k dimensions; about 24."""
    return k * (24 * k + 186) / ((k + 4) * (k + 6))
