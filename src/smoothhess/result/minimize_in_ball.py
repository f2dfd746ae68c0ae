"""The exact minimum of a quadratic on a ball: the trust-region problem behind second-order attacks.

    min gᵀδ + ½δᵀHδ   over ‖δ‖ ≤ r

The problem is not convex if H has a negative eigenvalue, but its global minimum has a simple characterisation: δ is one
if and only if (H + λI)δ = −g, λ ≥ 0, H + λI ⪰ 0, and λ = 0 unless ‖δ‖ = r. An eigendecomposition turns these conditions
into one equation for λ (`secular`). The decomposition is that of H if H is dense; of H in a few directions if H is
low-rank plus a multiple of the identity (`few_directions`); or of H in a Krylov space if only products with H are
available (`lanczos`).

This module holds the public functions. The solvers are in `smoothhess.linalg.trust_region`, the validation and
conversion of Hessians in `hessian_forms`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from smoothhess.estimate.statistics import HEAD_LEAST
from smoothhess.linalg.memory import TRUST_REGION_MATRICES
from smoothhess.linalg.trust_region.certified import minimize_certified
from smoothhess.linalg.trust_region.lanczos import Product
from smoothhess.linalg.trust_region.scaling import eigenvalues, exponent, norm, power, unit_vector
from smoothhess.linalg.trust_region.spectrum import Spectrum, check_radii, count_kept
from smoothhess.result.exact import StoredResult
from smoothhess.result.hessian_forms import (
    DENSE_PAYS,
    Hessian,
    check_gradient,
    dense,
    few_directions,
    rows_of,
    spectrum_of,
)
from smoothhess.result.result import Result

__all__ = ["kkt_residual", "minimize_in_ball"]

CERTIFIED_PAYS = 128  # features from which the solver without an eigendecomposition is faster


def minimize_in_ball(
    gradient: Tensor, hessian: Hessian, radius: float | Tensor, *, keep: float | None = None
) -> Tensor:
    """The global minimiser of gᵀδ + ½δᵀHδ over ‖δ‖ ≤ radius for each of B examples, (B, d).

    The step is exact to rounding, also if H is indefinite or singular, or if g is orthogonal to the lowest eigenvector
    of H. It is computed in float64 and has the gradient's dtype and device. If the minimum is not unique, one minimiser
    is returned; if it lies inside the ball, it is the shortest one.

    Args:
        gradient: (B, d), or (B, *shape), floating point.
        hessian: (B, d, d), symmetric; or an `Interactions` of the same examples, which is not made dense for more than
            some thousand features; or a callable that maps rows (B, n, d) to H times each row, like `Taylor.product`.
        radius: radius of the ball, a number or one per example (B,). For many radii from one eigendecomposition use
            `smoothhess.result.hessian_forms.spectrum_of`.
        keep: the reduction of the paper, for comparison: the share T of Σ|λ| that the kept eigenvectors must have,
            above 0 and at most 1. The part of the gradient outside of their span is dropped, so the step is not the
            minimum.

    Returns:
        The steps, (B, d).

    Raises:
        TypeError: if the gradient or the Hessian has the wrong type.
        ValueError: if shapes, devices or radii do not fit, if a number is not finite, if the Hessian is not symmetric,
            or if it is an `Attribution`.

    >>> g, H = torch.tensor([[0.0, 2.0]]), torch.diag(torch.tensor([-1.0, 1.0]))[None]
    >>> minimize_in_ball(g, H, 2.0)  # g is orthogonal to the lowest eigenvector, the step is not
    tensor([[ 1.7321, -1.0000]])
    >>> minimize_in_ball(g, H.abs(), 4.0)  # the minimum lies inside
    tensor([[ 0., -2.]])
    """
    flat = check_gradient(gradient, hessian)
    if isinstance(radius, list | tuple):
        raise ValueError(
            "radius must be a number or a tensor with one per example, got a list. For many radii per example use "
            "spectrum_of(gradient, hessian).minimize(radii)."
        )
    radii = check_radii(radius, flat)
    if radii.ndim == 2:
        raise ValueError(
            f"radius must be a number or one per example ({len(flat)},), got shape {tuple(radii.shape)}. For many "
            "radii per example use spectrum_of(gradient, hessian).minimize(radii)."
        )
    if keep is not None:
        count_kept(flat.new_ones(1, 1), keep)  # validates keep before any work is done
        hessian = hessian if isinstance(hessian, Tensor) else dense(hessian, flat)
    if isinstance(hessian, Result) and flat.shape[1] <= DENSE_PAYS and few_directions(hessian) is None:
        hessian = hessian.hessian
    steps = []
    for start, part in _parts(flat, hessian):
        chosen = slice(start, start + len(part)) if isinstance(part, Tensor | Result) else slice(None)
        g, r = flat[chosen], radii[chosen]
        if not isinstance(part, Tensor):
            steps.append(spectrum_of(g, part).minimize(r))
            continue
        matrix = dense(part, g, start)
        if keep is None:
            steps.append(_minimize_dense(g, matrix, r))
        else:
            steps.append(Spectrum.of_dense(g, matrix).cut(keep).minimize(r))
    return torch.cat(steps)


def _minimize_dense(gradient: Tensor, matrix: Tensor, radii: Tensor) -> Tensor:
    """By the certified solver, and by an eigendecomposition for the examples that it cannot certify."""
    if gradient.shape[1] < CERTIFIED_PAYS:
        return Spectrum.of_dense(gradient, matrix).minimize(radii)
    step, proven = minimize_certified(gradient.double(), matrix, radii)
    step, unproven = step.to(gradient.dtype), torch.nonzero(~proven).reshape(-1)
    if len(unproven):
        step[unproven] = Spectrum.of_dense(gradient[unproven], matrix[unproven]).minimize(radii[unproven])
    return step


def kkt_residual(gradient: Tensor, hessian: Hessian, radius: float | Tensor, step: Tensor) -> Tensor:
    """Violation of the optimality conditions by steps on the ball, (B,): 0 for an exact minimiser, up to about 1.

    It is the largest of four numbers, minimised over λ = 0 and the best-fitting λ ≥ 0. They are invariant under
    scalings of gradient, Hessian and radius that leave the problem the same:

        stationarity      ‖(H + λI)δ + g‖ / (‖g‖ + (‖H‖₂ + λ)‖δ‖)
        feasibility       (‖δ‖ − r)₊ / r
        complementarity   λ (r − ‖δ‖)₊ / (r ‖H‖₂ + ‖g‖)
        curvature         (−λ_min(H) − λ)₊ / (‖H‖₂ + λ)

    The first is the backward error: the relative change of g and H that makes δ stationary. If H is given by its
    products only, ‖H‖₂ and λ_min(H) are those of H in the solver's Krylov space.

    Args:
        gradient, hessian, radius: as in `minimize_in_ball`.
        step: steps with the shape of the gradient.

    Returns:
        (B,).

    Raises:
        TypeError, ValueError: as `minimize_in_ball`, and if `step` has another shape than the gradient.

    >>> g, H = torch.tensor([[1.0, 0.0]]), torch.eye(2)[None]
    >>> kkt_residual(g, H, 0.5, torch.tensor([[-0.5, 0.0]])), kkt_residual(g, H, 0.5, torch.zeros(1, 2))
    (tensor([0.]), tensor([1.]))
    """
    flat = check_gradient(gradient, hessian)
    if not isinstance(step, Tensor) or step.shape not in (flat.shape, gradient.shape):
        got = tuple(step.shape) if isinstance(step, Tensor) else type(step).__name__
        raise ValueError(f"step must have the gradient's shape {tuple(flat.shape)}, got {got}.")
    radii = check_radii(radius, flat)
    if radii.ndim == 2:
        raise ValueError(f"radius must be a number or one per example ({len(flat)},), got shape {tuple(radii.shape)}.")
    g, delta = flat.double(), step.detach().to(flat.device).double().reshape(flat.shape)
    values, product = _curvature(flat, hessian, radii)
    largest, length = values.abs().amax(1), norm(delta)
    per = torch.where(largest > 0, largest, 1.0)
    # forces in units of ‖H‖‖δ‖ + ‖g‖ and multipliers in units of ‖H‖ + ‖g‖/‖δ‖, to avoid overflow
    of_h, of_g = _shares(largest, g, length)
    way = unit_vector(delta)
    force = of_h[:, None] * product(way) / per[:, None] + of_g[:, None] * unit_vector(g)
    lowest = of_h * values.amin(1) / per
    fitting = -(force * way).sum(1).clamp_max(0)
    reach = length / radii
    found = []
    for multiplier in (torch.zeros_like(fitting), fitting):
        missed = torch.linalg.vector_norm(force + multiplier[:, None] * way, dim=1)
        stationarity = _share(missed, of_g + of_h + multiplier)
        complementarity = _share(multiplier * (1 - reach).clamp_min(0), of_h + of_g * reach)
        curvature = _share((-lowest - multiplier).clamp_min(0), of_h + multiplier)
        found.append(torch.stack([stationarity, complementarity, curvature]).amax(0))
    feasibility = (reach - 1).clamp_min(0)
    return torch.maximum(torch.stack(found).amin(0), feasibility).to(flat.dtype)


def _parts(flat: Tensor, hessian: Hessian) -> Iterator[tuple[int, Hessian]]:
    """Hessians in chunks of examples that fit into memory, each with the index of its first example."""
    batch, d = flat.shape
    width = d if d <= DENSE_PAYS or isinstance(hessian, Tensor) else 2 * HEAD_LEAST
    step = TRUST_REGION_MATRICES.items(32 * d * width, flat.device)
    # an operator may need all of its examples for each product
    if batch <= step or isinstance(hessian, StoredResult) or not isinstance(hessian, Tensor | Result):
        yield 0, hessian
        return
    for start in range(0, batch, step):
        yield start, hessian[start : start + step]


def _curvature(gradient: Tensor, hessian: Hessian, radii: Tensor) -> tuple[Tensor, Product]:
    """Eigenvalues of H, at least the extreme ones, and H as a map of (B, d)."""
    if isinstance(hessian, Tensor):
        matrix = dense(hessian, gradient)
        return eigenvalues(matrix), lambda v: (v[:, None] @ matrix)[:, 0]
    rows = rows_of(hessian, gradient.dtype)
    return spectrum_of(gradient, hessian).widened(radii).values, lambda v: rows(v[:, None])[:, 0]


def _shares(largest: Tensor, g: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """‖H‖‖δ‖ and ‖g‖ as shares of their sum; 1 and 0 if g is zero, 0 and 0 if both are."""
    of = exponent(g)
    slope = torch.linalg.vector_norm(g * power(-of)[:, None], dim=1)
    ratio = of + slope.log2() - largest.log2() - length.log2()  # log₂ of ‖g‖/(‖H‖‖δ‖)
    ratio = torch.where(slope == 0, -torch.inf, ratio)
    nothing = (slope == 0) & (largest == 0)
    of_h, of_g = (torch.where(nothing, 0.0, 1 / (1 + torch.exp2(sign * ratio))) for sign in (1, -1))
    return of_h, of_g


def _share(part: Tensor, total: Tensor) -> Tensor:
    return torch.where(total > 0, part / total, 0.0)
