"""Gauss quadrature on [0, 1] for the weight −log t, the density of a product of two uniform numbers."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


@lru_cache(maxsize=8)
def logarithmic_rule(n: int) -> tuple[Tensor, Tensor]:
    """The n nodes t and weights w, float64, of ∫∫ g(αβ) dα dβ = ∫ −log(t) g(t) dt ≈ Σ w g(t).

    The rule is exact for polynomials g of degree 2n − 1, as is the double sum over the n² products of Gauss–Legendre
    nodes. It is computed from that sum: its n² atoms have the same first 2n moments as −log t, hence the same first n
    orthogonal polynomials, whose recurrence (Stieltjes) gives nodes and weights (Golub and Welsch).

    >>> t, w = logarithmic_rule(3)
    >>> bool(((w * t**4).sum() - 1 / 25).abs() < 1e-15)  # ∫ −log(t) t⁴ dt = 1/(4 + 1)²
    True
    """
    x, share = np.polynomial.legendre.leggauss(n)
    x, share = (x + 1) / 2, share / 2
    atoms, mass = np.outer(x, x).ravel(), np.outer(share, share).ravel()
    centre, spread = np.zeros(n), np.zeros(n)
    before, now = np.zeros_like(atoms), np.ones_like(atoms)
    for k in range(n):
        centre[k] = (mass * atoms * now**2).sum()
        after = (atoms - centre[k]) * now - spread[k] * before
        if k + 1 < n:
            spread[k + 1] = np.sqrt((mass * after**2).sum())
            before, now = now, after / spread[k + 1]
    jacobi = np.diag(centre) + np.diag(spread[1:], 1) + np.diag(spread[1:], -1)
    nodes, vectors = np.linalg.eigh(jacobi)
    return torch.from_numpy(nodes), torch.from_numpy(vectors[0] ** 2)
