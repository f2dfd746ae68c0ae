"""Witness two of the noise: H is symmetric, so what is antisymmetric in its estimate is noise.

A = (Ŵ − Ŵᵀ)/2 of the unsymmetrised whitened estimate holds no signal, and as much noise as the symmetric half. If rows
err independently with covariance K, then E[AAᵀ] = ((k−2)K + tr(K) I)/4n and, for whitened directions u and v,

    Var(uᵀŴv) = (|u|² vᵀKv + |v|² uᵀKu + 2 (u·v) uᵀKv)/4n.

This works from a part of one block on. Directions of features (or groups) are whitened vectors too: uᵀHv = q_uᵀ W q_v
with q_u = L⁺u.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from smoothhess.draws.designs import SMALL
from smoothhess.estimate.statistics import Statistics

DENSE_SKEW = 4096  # coordinates up to which A is held as a matrix
SPREAD_DF = 1.5  # degrees of freedom for each direction that shares the noise
ALONG_ITSELF = 2.2  # what bends along a direction varies along it: a direction with itself has that much more noise
PAIRS_OF_DIRECTIONS = 1.5  # degrees of freedom of a pair of directions over those of one
QUIET = 0.07  # a direction's noise is never taken for less than this share of the average,
PARALLEL = 0.4  # and not for less than this share where it is the interaction of a direction with itself


def goes_by_rows(white: Statistics) -> bool:
    """Whether A is kept as the rows that it is made of."""
    return white.total is None and white.k > min(DENSE_SKEW, 4 * white.head.odd.shape[1])


class Skew:
    """The antisymmetric half A of the unsymmetrised whitened mean, and the noise that it shows."""

    def __init__(self, white: Statistics) -> None:
        self.k = white.k
        self.n = white.n.clamp_min(1)[:, None, None].double()
        self.matrix: Tensor | None = None
        if not goes_by_rows(white):
            mean = white.summed() / self.n
            self.matrix = (mean - mean.mT) / 2
            small = self.matrix
        else:
            self.score, self.odd, self.grams = white.head.score, white.head.odd, white.grams
            # A = FᵀJF/2n with F = [s; γ] and J = [0 1; −1 0]; its powers have the traces of those of JFFᵀ/2n.
            odd, cross, score = self.grams
            upper = torch.cat([cross, odd], 2)
            small = torch.cat([upper, -torch.cat([score.expand_as(cross), cross.mT], 2)], 1) / 2 / self.n
        square = small @ small
        self.norm2 = -square.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_max(0)  # ‖A‖²_F = −tr A²
        fourth = (square * square.mT).sum((-1, -2))  # tr A⁴
        # How many directions share the noise: about k/2 when all do, few when it has a few causes.
        self.spread = torch.where(fourth > 0, self.norm2.square() / fourth, self.k / 2)

    def apply(self, q: Tensor) -> Tensor:
        """A q for each row of (B, n, k)."""
        q = q.double()
        if self.matrix is not None:
            return q @ self.matrix.mT
        score, odd = self.score.double(), self.odd.double()
        forth, back = (q @ rows.mT / (2 * self.n) for rows in (odd, score))
        return torch.baddbmm(forth @ score, back, odd, alpha=-1)

    def diagonal(self, features: Statistics, push: Callable[[Tensor], Tensor]) -> Tensor:
        """|A q_j|² for every feature j, (B, d)."""
        if self.matrix is not None:
            eye = torch.eye(self.k, dtype=features.gradient.dtype, device=self.n.device)
            return self.apply(push(eye).mT).square().sum(-1)  # column j of L⁺ is q_j
        a, g = features.head.score.double(), features.head.odd.double()
        odd, cross, score = self.grams
        outer = (odd @ a * a).sum(-2) + (score @ g * g).sum(-2)
        return (outer - 2 * (cross.mT @ a * g).sum(-2)) / 4 / self.n[:, 0].square()


class Products(NamedTuple):
    """Of two directions u and v: (A q_u)·(A q_v), q_u·q_v, and the rows' mean of (q_u·γ)(q_v·γ), (B, …) each."""

    inner: Tensor
    gram: Tensor
    energy: Tensor


class Prior:
    """Variances from the skew.

    The covariance K of the rows' noise is estimated in two ways. A shows it without the signal, but each direction
    shows it with an error in proportion to its length |q_u|: where Σ is far from isotropic, that error is all that is
    left of the long directions, in which the gradients hardly vary. The rows' own energy, times the share of noise in
    the energy of all directions together, has an error in proportion to itself. The two are weighted by their errors.
    """

    def __init__(self, norm2: Tensor, spread: Tensor, k: int, n: Tensor, energy: Tensor) -> None:
        self.k = k
        self.trace = 2 * norm2 / max(k - 1, 1)  # tr(K)/n, (B,)
        self.share = torch.where(energy > 0, self.trace / energy.clamp_min(1e-300), 0.0).clamp_max(1 / n.clamp_min(1))
        # Eigenvalues come in pairs ±iλ, so two share it at the least; rounding alone could say fewer.
        shared = SPREAD_DF * spread.clamp_min(2)
        self.df = shared if k > SMALL else torch.zeros_like(spread)  # few dimensions show too little

    def _each(self, numbers: Tensor, like: Tensor) -> Tensor:
        return numbers.reshape(-1, *[1] * (like.ndim - 1))

    def _shown(self, p: Products) -> Tensor:
        """q_uᵀ(K/n)q_v from A, drawn towards the average over directions by a share 2/k."""
        t = self._each(self.trace, p.inner)
        return torch.addcmul(p.inner * (4 / self.k), t * (2 / self.k**2 - 1 / self.k), p.gram)

    def _weight(self, p: Products) -> Tensor:
        """Of what A shows of a single direction, between 0 and 1."""
        by_rows = self._each(self.share, p.energy) * p.energy
        error = (by_rows + self._each(self.trace, p.gram) / self.k * p.gram).square() * (2 / self.k)
        return by_rows.square() / (by_rows.square() + error).clamp_min(1e-300)

    def df_of_directions(self, p: Products) -> Tensor:
        """Degrees of freedom of the noise of single directions, (B,): few where Σ is far from isotropic."""
        doubt = (1 - self._weight(p)).mean(-1)  # squared relative error of q_uᵀKq_u; pairs have some less
        return PAIRS_OF_DIRECTIONS * 2 / doubt.clamp_min(1e-9)

    def own(self, p: Products) -> Tensor:
        """q_uᵀ(K/n)q_u, kept positive."""
        by_rows, weight = self._each(self.share, p.energy) * p.energy, self._weight(p)
        return torch.maximum(weight * self._shown(p) + (1 - weight) * by_rows, QUIET * by_rows)

    def variance(self, uu: Products, vv: Products, uv: Products) -> Tensor:
        """Var(uᵀĤv), never less than if all directions were QUIET."""
        variance = uu.gram * (self.own(vv) / 4) + vv.gram * (self.own(uu) / 4)
        share = self._each(self.share, variance)
        weight = (self._weight(uu) * self._weight(vv)).sqrt()
        mixed = weight * self._shown(uv) + (1 - weight) * share * uv.energy
        variance = torch.addcmul(variance, uv.gram * (ALONG_ITSELF / 2), mixed)
        quiet = uu.gram * vv.energy + vv.gram * uu.energy
        parallel = uv.gram.abs() * (uu.energy * vv.energy).sqrt()
        return torch.maximum(variance, share / 2 * (QUIET / 2 * quiet + PARALLEL * parallel))
