"""Estimate of the variance from the antisymmetric half of the estimated Hessian.

H is symmetric, so A = (Ŵ − Ŵᵀ)/2 of the unsymmetrised whitened estimate contains no signal, and as much noise as the
symmetric half. If the errors of rows are independent with covariance K, then E[AAᵀ] = ((k−2)K + tr(K) I)/4n and, for
whitened directions u and v,

    Var(uᵀŴv) = (|u|² vᵀKv + |v|² uᵀKu + 2 (u·v) uᵀKv)/4n.

This estimate is available from an incomplete block on. Features (or groups) have whitened directions: uᵀHv = q_uᵀ W q_v
with q_u = L⁺u; their products are in `direction_products`. The variance between independent replicates is in
`block_variance`; both are combined in `pooled_variance`.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from smoothhess.draws.designs import SMALL
from smoothhess.draws.gaussian import Gaussian
from smoothhess.estimate.statistics import PROBES, Statistics
from smoothhess.linalg.gram import symmetric_product

DENSE_SKEW = 4096  # coordinates up to which A is stored as a matrix
SPREAD_DF = 1.5  # degrees of freedom per direction that carries noise
ALONG_ITSELF = 2.2  # factor on the cross term: curvature along a direction varies more along that direction
PAIRS_OF_DIRECTIONS = 1.5  # degrees of freedom of a pair of directions over those of one direction
QUIET = 0.07  # lower bound of the noise of a direction, as a share of the noise that its energy implies
PARALLEL = 0.4  # additional share for parallel directions, such as a direction with itself


def goes_by_rows(white: Statistics) -> bool:
    """Whether A is stored as its factors, the rows, instead of a matrix."""
    return white.total is None and white.k > min(DENSE_SKEW, 3 * white.head.odd.shape[1])


class Skew:
    """The antisymmetric half A of the unsymmetrised whitened mean, with its norm and participation number."""

    def __init__(self, white: Statistics) -> None:
        self.k = white.k
        self.n = white.n.clamp_min(1)[:, None, None].double()
        self.matrix: Tensor | None = None
        if not goes_by_rows(white):
            mean = white.summed() / self.n
            self.matrix = (mean - mean.mT) / 2
        else:
            self.score, self.odd, self.grams = white.head.score, white.head.odd, white.grams
        small = self._small()
        self.norm2 = -(small * small.mT).sum((-1, -2)).clamp_max(0)  # ‖A‖²_F = −tr A²

    def _small(self) -> Tensor:
        """A matrix whose powers have the traces of those of A, as small as possible."""
        if self.matrix is not None:
            return self.matrix
        # A = FᵀJF/2n with F = [s; γ] and J = [0 1; −1 0]; its powers have the traces of those of JFFᵀ/2n.
        odd, cross, score = self.grams
        upper = torch.cat([cross, odd], 2)
        return torch.cat([upper, -torch.cat([score.expand_as(cross), cross.mT], 2)], 1) / 2 / self.n

    @cached_property
    def spread(self) -> Tensor:
        """Participation number of the noise, (B,): about k/2 if all directions carry it, small if few do."""
        if self.matrix is None:
            small = self._small()
            square = small @ small
        else:
            square = symmetric_product(self.matrix, self.matrix)  # −A²
        fourth = (square * square.mT).sum((-1, -2))  # tr A⁴
        return torch.where(fourth > 0, self.norm2.square() / fourth, self.k / 2)

    def apply(self, q: Tensor) -> Tensor:
        """A q for each row of (B, n, k)."""
        q = q.double()
        if self.matrix is not None:
            return q @ self.matrix.mT
        score, odd = self.score.double(), self.odd.double()
        forth, back = (q @ rows.mT / (2 * self.n) for rows in (odd, score))
        return torch.baddbmm(forth @ score, back, odd, alpha=-1)

    def diagonal(self, features: Statistics, gaussian: Gaussian) -> Tensor:
        """|A q_j|² for every feature j, (B, d)."""
        if self.matrix is not None:
            if gaussian.is_diagonal and self.k == features.k:  # q_j is a multiple of a unit vector
                scale = gaussian.push(features.gradient.new_ones(1, self.k)).double()
                return (self.matrix * scale).mT.contiguous().square_().sum(-1)
            eye = torch.eye(self.k, dtype=features.gradient.dtype, device=self.n.device)
            return self.apply(gaussian.push(eye).mT).square().sum(-1)  # column j of L⁺ is q_j
        a, g = features.head.score.double(), features.head.odd.double()
        odd, cross, score = self.grams
        outer = (odd @ a * a).sum(-2) + (score @ g * g).sum(-2)
        return (outer - 2 * (cross.mT @ a * g).sum(-2)) / 4 / self.n[:, 0].square()


class ProbedSkew(NamedTuple):
    """The norm and the participation number of A of group sums, from random probes, (B,) each."""

    norm2: Tensor
    spread: Tensor


class Products(NamedTuple):
    """Products of two directions u and v, (B, …) each: (A q_u)·(A q_v), q_u·q_v, and the mean of (q_u·γ)(q_v·γ)."""

    inner: Tensor
    gram: Tensor
    energy: Tensor


class Prior:
    """Variances from the antisymmetric half.

    The covariance K of the rows' noise is estimated in two ways. The estimate from A is free of the signal, but its
    error for a direction is proportional to the length |q_u|: if Σ is far from isotropic, that error dominates in the
    long directions, in which the gradients hardly vary. The estimate from the rows' energy, times the share of noise in
    the total energy, has an error proportional to itself. The two are weighted by their errors.
    """

    def __init__(self, skew: Skew | ProbedSkew, k: int, n: Tensor, energy: Tensor) -> None:
        self.k, self._skew = k, skew
        self.trace = 2 * skew.norm2 / max(k - 1, 1)  # tr(K)/n, (B,)
        self.share = torch.where(energy > 0, self.trace / energy.clamp_min(1e-300), 0.0).clamp_max(1 / n.clamp_min(1))

    @cached_property
    def df(self) -> Tensor:
        """Degrees of freedom, (B,); zero in few dimensions, where the variances are not used."""
        # Eigenvalues come in pairs ±iλ, so at least two directions carry the noise; rounding could give less.
        return SPREAD_DF * self._skew.spread.clamp_min(2) if self.k > SMALL else torch.zeros_like(self.trace)

    @staticmethod
    def of_features(skew: Skew, stats: Statistics, energy: Tensor) -> Prior:
        """From the antisymmetric half of a whitened estimate."""
        return Prior(skew, skew.k, stats.n, energy)

    @staticmethod
    def of_groups(stats: Statistics, energy: Tensor) -> Prior:
        """From the products of A with random probes, which are kept with group sums."""
        assert stats.skew is not None
        probes = stats.skew[..., stats.k :] / stats.n[:, None, None]
        norm2 = probes.square().sum(1).mean(-1)
        # ‖AᵀA‖²_F from inner products of different probes, which is unbiased
        products = (probes.mT @ probes).square()
        fourth = (products.sum((-1, -2)) - products.diagonal(dim1=-2, dim2=-1).sum(-1)) / (PROBES * (PROBES - 1))
        spread = torch.where(fourth > 0, norm2.square() / fourth, stats.rank / 2)
        return Prior(ProbedSkew(norm2, spread), stats.rank, stats.n, energy)

    def _each(self, numbers: Tensor, like: Tensor) -> Tensor:
        return numbers.reshape(-1, *[1] * (like.ndim - 1))

    def _shown(self, p: Products) -> Tensor:
        """q_uᵀ(K/n)q_v from A, shrunk towards the average over directions by a share 2/k."""
        t = self._each(self.trace, p.inner)
        return torch.addcmul(p.inner * (4 / self.k), t * (2 / self.k**2 - 1 / self.k), p.gram)

    def _weight(self, p: Products) -> Tensor:
        """Weight of the estimate from A for a single direction, between 0 and 1."""
        by_rows = self._each(self.share, p.energy) * p.energy
        error = (by_rows + self._each(self.trace, p.gram) / self.k * p.gram).square() * (2 / self.k)
        return by_rows.square() / (by_rows.square() + error).clamp_min(1e-300)

    def df_of_directions(self, p: Products) -> Tensor:
        """Degrees of freedom of the noise of single directions, (B,): few where Σ is far from isotropic."""
        doubt = (1 - self._weight(p)).mean(-1)  # squared relative error of q_uᵀKq_u; it is smaller for pairs
        return PAIRS_OF_DIRECTIONS * 2 / doubt.clamp_min(1e-9)

    def own(self, p: Products) -> Tensor:
        """q_uᵀ(K/n)q_u, bounded below by a positive number."""
        by_rows, weight = self._each(self.share, p.energy) * p.energy, self._weight(p)
        return torch.maximum(weight * self._shown(p) + (1 - weight) * by_rows, QUIET * by_rows)

    def variance(self, uu: Products, vv: Products, uv: Products | None) -> Tensor:
        """Var(uᵀĤv), bounded below by the variance that the shares QUIET and PARALLEL give; see `Pairs`."""
        variance = torch.addcmul(vv.gram * (self.own(uu) / 4), uu.gram, self.own(vv) / 4)
        if uv is None:  # the bound holds: `own` satisfies it
            return variance
        share = self._each(self.share, variance)
        weight = (self._weight(uu) * self._weight(vv)).sqrt()
        mixed = weight * self._shown(uv) + (1 - weight) * share * uv.energy
        variance = torch.addcmul(variance, uv.gram * (ALONG_ITSELF / 2), mixed)
        quiet = uu.gram * vv.energy + vv.gram * uu.energy
        parallel = uv.gram.abs() * (uu.energy * vv.energy).sqrt()
        return torch.maximum(variance, share / 2 * (QUIET / 2 * quiet + PARALLEL * parallel))
