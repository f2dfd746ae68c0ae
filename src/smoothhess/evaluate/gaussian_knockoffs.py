"""Gaussian knockoffs: copies of features that can be swapped with them without changing the joint distribution.

For X ~ N(μ, Σ) a knockoff X̃ is drawn from X alone, so that it carries no further information about a response, and
(X, X̃) has the covariance [[Σ, Σ − D], [Σ − D, Σ]] with a diagonal D: swapping X_j and X̃_j for any set of j leaves it
as it is (Candès, Fan, Janson & Lv, 2018). Features that are monotone functions of such Gaussians, a Gaussian copula,
have knockoffs by the same transformation. The selection of pairs by knockoffs is in `discover`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smoothhess.draws.seeding import evaluation_generator
from smoothhess.model.convert_inputs import is_array, is_table

MARGINS, METHODS = ("copula", "normal"), ("equicorrelated", "sdp")
LEAST_EIGENVALUE = 1e-6  # of the correlations; with less, columns depend linearly on each other
_KNOCKOFFS = 6  # third word of the generator's key


@dataclass(frozen=True, eq=False)
class GaussianKnockoffs:
    """A Gaussian, or Gaussian copula, of p features, from which knockoffs are drawn; made by `fit`."""

    mean: Tensor  # (p,) of the Gaussian scores; 0 for a copula
    scale: Tensor  # (p,) their standard deviations; 1 for a copula
    correlation: Tensor  # (p, p) R
    s: Tensor  # (p,) D on the scale of correlations: corr(X_j, X̃_j) = 1 − s_j
    quantiles: Tensor | None  # (n, p) sorted columns of the data for a copula

    @staticmethod
    def fit(data: Any, *, margins: str = "copula", method: str = "equicorrelated") -> GaussianKnockoffs:
        """Estimate the distribution of the features from the rows of a table.

        Args:
            data: (n, p) tensor, array or DataFrame.
            margins: "copula" replaces each column by its normal scores, and knockoffs have the observed values of their
                column; "normal" takes the columns as Gaussian.
            method: "equicorrelated" takes the same s_j = min(1, 2λ_min(R)) for all features; "sdp" maximises Σ s_j,
                which makes knockoffs of correlated features less similar to them, and needs cvxpy.

        Raises:
            ImportError: if method is "sdp" and cvxpy is not installed.
            ValueError: if data is not a table of finite numbers, if a column is constant or a linear function of
                others, or if margins or method is another word.

        >>> x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
        >>> GaussianKnockoffs.fit(x).sample(x).shape
        torch.Size([200, 3])
        """
        for name, given, known in (("margins", margins, MARGINS), ("method", method, METHODS)):
            if given not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {given!r}.")
        x = as_table(data)
        spread = x.std(0)
        if len(x) < 3 or bool((spread == 0).any()):
            raise ValueError("every column must vary over at least three rows. Drop constant columns.")
        z = normal_scores(x) if margins == "copula" else x
        mean, scale = (z.mean(0), z.std(0)) if margins == "normal" else (torch.zeros_like(spread), z.std(0) * 0 + 1)
        correlation = torch.corrcoef(z.mT).reshape(x.shape[1], x.shape[1])
        least = float(torch.linalg.eigvalsh(correlation)[0])
        if least < LEAST_EIGENVALUE:
            raise ValueError(
                f"columns must be linearly independent, got correlations with an eigenvalue of {least:.1g}. Drop one "
                "column of each group that determines another, or add rows."
            )
        s = _equicorrelated(correlation) if method == "equicorrelated" else _semidefinite(correlation)
        return GaussianKnockoffs(mean, scale, correlation, s, x.sort(0).values if margins == "copula" else None)

    @property
    def joint_correlation(self) -> Tensor:
        """Correlations of (X, X̃) of the Gaussian scores, (2p, 2p)."""
        cross = self.correlation - torch.diag(self.s)
        return torch.cat([torch.cat([self.correlation, cross], 1), torch.cat([cross, self.correlation], 1)])

    @property
    def conditional(self) -> tuple[Tensor, Tensor]:
        """Coefficients A and covariance C of X̃ | X ~ N(AX, C) of standardised scores, (p, p) each.

        A = I − DR⁻¹ and C = 2D − DR⁻¹D.
        """
        d = torch.diag(self.s)
        half = torch.linalg.solve(self.correlation, d)  # R⁻¹D
        return torch.eye(len(d), dtype=d.dtype) - half.mT, 2 * d - d @ half

    def sample(self, data: Any, seed: int = 0) -> Tensor:
        """Knockoffs of the rows of a table, (n, p) float64; `seed` determines the draws."""
        x = as_table(data)
        if x.shape[1] != len(self.s):
            raise ValueError(f"expected {len(self.s)} columns, as in fit, got {x.shape[1]}.")
        z = ((normal_scores(x) if self.quantiles is not None else x) - self.mean) / self.scale
        coefficients, covariance = self.conditional
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors * values.clamp_min(0).sqrt()  # the smallest eigenvalue is 0 if s is as large as possible
        noise = torch.from_numpy(evaluation_generator(seed, 0, _KNOCKOFFS).standard_normal(x.shape))
        scores = z @ coefficients.mT + noise @ root.mT
        if self.quantiles is None:
            return self.mean + self.scale * scores
        rows = len(self.quantiles)
        level = torch.special.ndtr(scores)
        return self.quantiles.gather(0, (level * rows).long().clamp(0, rows - 1))


def normal_scores(x: Tensor) -> Tensor:
    """Each column's ranks as quantiles of N(0, 1), float64; ties have the mean of their ranks.

    >>> normal_scores(torch.tensor([[1.0], [9.0], [2.0]])).flatten()
    tensor([-0.9674,  0.9674,  0.0000], dtype=torch.float64)
    """
    from scipy.stats import rankdata

    level = (torch.from_numpy(np.asarray(rankdata(x.numpy(), axis=0))) - 0.5) / len(x)
    return torch.special.ndtri(level)


def as_table(data: Any) -> Tensor:
    """A table of finite numbers, (n, p) float64 on the CPU.

    Raises:
        TypeError: if it is no tensor, array or DataFrame.
        ValueError: if it has another number of dimensions, or numbers that are not finite.
    """
    if not isinstance(data, Tensor) and not is_array(data):
        raise TypeError(f"data must be a tensor, array or DataFrame (n, p), got {type(data).__name__}.")
    x = (
        data.detach()
        if isinstance(data, Tensor)
        else torch.tensor(np.array(data.to_numpy() if is_table(data) else data))
    )
    if x.ndim != 2:
        raise ValueError(f"data must be a table (n, p), got shape {tuple(x.shape)}.")
    x = x.double().cpu()
    if not bool(torch.isfinite(x).all()):
        raise ValueError("data must hold finite numbers, got NaN or infinity. Drop or impute these rows.")
    return x


def _equicorrelated(correlation: Tensor) -> Tensor:
    """s_j = min(1, 2λ_min) for all j."""
    least = torch.linalg.eigvalsh(correlation)[0]
    return (2 * least).clamp(0, 1).expand(len(correlation)).contiguous()


def _semidefinite(correlation: Tensor) -> Tensor:
    """The s with the largest sum under 0 ≤ s ≤ 1 and 2R − diag(s) ⪰ 0, scaled so that the latter holds exactly."""
    try:
        import cvxpy
    except ImportError as error:
        raise ImportError('method="sdp" needs cvxpy: pip install cvxpy, or use "equicorrelated"') from error
    s = cvxpy.Variable(len(correlation))
    constraints = [s >= 0, s <= 1, 2 * correlation.numpy() - cvxpy.diag(s) >> 0]
    cvxpy.Problem(cvxpy.Maximize(cvxpy.sum(s)), constraints).solve()
    found = torch.from_numpy(np.asarray(s.value)).clamp(0, 1)
    root = found.sqrt()
    # 2R − γ diag(s) ⪰ 0 as long as 1/γ is at least the largest eigenvalue of diag(√s)(2R)⁻¹diag(√s)
    largest = torch.linalg.eigvalsh(root[:, None] * torch.linalg.inv(2 * correlation) * root)[-1]
    return found / largest.clamp_min(1)
