"""Standard errors of eigenvalues, from two independent halves of the draws (cross-fitting).

With independent unbiased estimates H_A and H_B of H, an eigenvector v_A of H_A and its eigenvalue λ_A, to second order
in the noise

    λ_A = λ + vᵀN_A v + q_A,      v_Aᵀ H_B v_A = λ + vᵀN_B v − q_A + (noise with mean zero),

with q_A ≥ 0 for the largest λ: the value on the draws that chose v_A is as much too large as the value on other draws
is too small. E q is proportional to 1/rows, so the eigenvalue of the whole estimate, with shares w_A and w_B of the
rows, is too large by w_A w_B (q_A + q_B), and q_A + q_B = λ_A − v_Bᵀ H_A v_B = λ_B − v_Aᵀ H_B v_A in expectation. The
mean of both is subtracted. docs/theory.md has the proof; the halves are in `smoothhess.estimate.halves`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smoothhess.estimate.halves import Halves, SymmetricOperator
from smoothhess.estimate.hessian_estimate import HessianEstimate
from smoothhess.result.eigenpairs import Eigenpairs, Solver
from smoothhess.result.intervals import Estimate

SPARE = 2  # eigenpairs computed from products for each one that is needed: the halves may order them differently


def cross_fitted(estimate: HessianEstimate, values: Tensor) -> Estimate:
    """The eigenvalues of H at the places of the reported `values` (B, k), from the unbiased estimate."""
    unbiased = estimate.changed(shrink=False, sums=None) if estimate.shrink else estimate
    whole, noise, halves = unbiased.unbiased, unbiased.noise, Halves(unbiased.unbiased)
    unknown = torch.full_like(values, torch.nan)
    if not bool(halves.cut.any()):
        return Estimate(unknown, unknown, noise.df)
    solver, positive = Solver.of(unbiased, values.shape[1]), values >= 0
    found = _at(solver, SymmetricOperator(whole.product, whole.dense), positive)
    first, second = (_at(solver, half, positive) for half in (halves.first, halves.second))
    over_first = first.values - _forms(halves.first, second.vectors)
    over_second = second.values - _forms(halves.second, first.vectors)
    share = halves.share[:, None].to(values)
    bias = share * (1 - share) * (over_first + over_second) / 2
    variance = torch.stack([noise.of_bilinear(v, v).value for v in found.vectors.unbind(1)], 1)
    # The bias is known less well than the noise, most of all where it is large: it is counted as an error itself.
    stderr = (variance + bias.double().square()).sqrt().to(values)
    known = halves.cut[:, None] > 0
    return Estimate(torch.where(known, found.values - bias, unknown), torch.where(known, stderr, unknown), noise.df)


def _forms(operator: SymmetricOperator, vectors: Tensor) -> Tensor:
    """vᵀHv of each of (B, k, d), (B, k)."""
    return (operator.product(vectors) * vectors).sum(-1)


def _at(solver: Solver, operator: SymmetricOperator, positive: Tensor) -> Eigenpairs:
    """The eigenpairs at the places of the positive (B, k) and negative eigenvalues: largest first, smallest first.

    By Weyl's inequality the p-th largest eigenvalue moves by at most the norm of the noise, so ordered eigenvalues
    need not be matched; eigenvalues of similar magnitude and opposite sign have different places. From products, only
    eigenpairs of largest magnitude are computed, and a place among these is NaN if its eigenvalue has the other sign.
    """
    k, d = positive.shape[1], solver.like.shape[1]
    by_products = not solver.dense and solver.basis is None
    found = solver.leading(operator, min(SPARE * k, d) if by_products else d)
    values, order = found.values.sort(dim=1, descending=True)
    place = torch.where(positive, positive.cumsum(1) - 1, values.shape[1] - (~positive).cumsum(1))
    place = place.clamp(0, values.shape[1] - 1)
    values, order = values.gather(1, place), order.gather(1, place)
    if by_products:
        values = torch.where((values >= 0) == positive, values, torch.nan)
    return Eigenpairs(values, found.vectors.gather(1, order[..., None].expand(-1, -1, d)))
