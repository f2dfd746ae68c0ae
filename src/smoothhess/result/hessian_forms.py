"""Conversion of a Hessian in any form (a tensor, a result, or a callable) for the solver of the trust-region problem.

Estimates from m rows are low-rank: sums of outer products of the rows, or, denoised, cΣ⁻¹ + VMVᵀ. Where Σ⁻¹ is a
multiple of the identity outside of a few directions, the Hessian is too, and the problem is reduced to these
directions. This module validates and converts; the solver is in `smoothhess.linalg.trust_region`, the public function
in `minimize_in_ball`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from smoothhess.draws.gaussian import Eigenbasis, Isotropic, SegmentShift
from smoothhess.estimate.shrinkage import FactoredBasis
from smoothhess.estimate.statistics import DENSE_LIMIT
from smoothhess.linalg.memory import BATCH_INPUTS
from smoothhess.linalg.trust_region.lanczos import Product
from smoothhess.linalg.trust_region.spectrum import Spectrum
from smoothhess.result.exact import Attribution
from smoothhess.result.interactions import SampledResult
from smoothhess.result.result import Result

Hessian = Tensor | Result | Callable[[Tensor], Tensor]

DENSE_PAYS = 1024  # features up to which a Hessian that is given by its products is made dense
ASYMMETRY = 0.6  # H and its transpose may differ by the machine epsilon to this power, as a share of the largest entry
REDUCED_SHARE = 0.75  # share of the dimensions above which a reduction to fewer directions does not save work


def spectrum_of(gradient: Tensor, hessian: Hessian) -> Spectrum:
    """The quadratic gᵀδ + ½δᵀHδ in the eigenbasis of H, for minima on balls of many radii.

    For example `spectrum_of(gradient, hessian).minimize([0.1, 0.2, 0.5])`.

    Args:
        gradient, hessian: as in `minimize_in_ball`.

    Returns:
        A `Spectrum`, whose method `minimize` takes radii.

    Raises:
        TypeError, ValueError: as `minimize_in_ball`.
    """
    flat = check_gradient(gradient, hessian)
    if isinstance(hessian, Tensor):
        return Spectrum.of_dense(flat, dense(hessian, flat))
    directions = few_directions(hessian)
    if directions is not None:
        return Spectrum.of_few_directions(flat, rows_of(hessian, flat.dtype), directions)
    if flat.shape[1] <= DENSE_PAYS:
        return Spectrum.of_dense(flat, dense(hessian, flat))
    eps = torch.finfo(hessian.dtype if isinstance(hessian, Result) else flat.dtype).eps
    return Spectrum.of_products(flat, rows_of(hessian, flat.dtype), eps)


def few_directions(hessian: Hessian) -> Tensor | None:
    """Directions (B, r, d) outside of which H is a multiple of the identity; None if they are not few."""
    directions = span(hessian) if isinstance(hessian, SampledResult) else None
    if directions is None or directions.shape[1] >= REDUCED_SHARE * directions.shape[2]:
        return None
    return directions


def dense(hessian: Hessian, like: Tensor, first: int = 0) -> Tensor:
    """The Hessian as (B, d, d) float64, finite and exactly symmetric, for gradients `like` (B, d).

    Error messages number the examples from `first` on.
    """
    batch, d = like.shape
    if isinstance(hessian, Result):
        hessian = hessian.hessian
    elif not isinstance(hessian, Tensor):
        if d > DENSE_LIMIT:
            raise ValueError(f"{d} features are too many for a dense matrix ({DENSE_LIMIT} at most). Omit keep.")
        step = BATCH_INPUTS.items(8 * batch * d, like.device)
        eye = torch.eye(d, dtype=torch.float64, device=like.device)
        product = rows_of(hessian, like.dtype)
        parts = [product(rows.expand(batch, -1, -1)) for rows in eye.split(step)]
        hessian = torch.cat(parts, 1).to(like.dtype)
    largest = _largest(hessian)
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("hessian must be finite, got NaN or infinity. Check how it was computed.")
    if torch.equal(hessian, hessian.mT):
        return hessian.detach().double()
    apart = _largest(hessian - hessian.mT)
    wrong = apart > torch.finfo(hessian.dtype).eps ** ASYMMETRY * largest
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        raise ValueError(
            f"hessian must be symmetric, that of example {first + i} differs from its transpose by "
            f"{float(apart[i]):.2g} (largest entry {float(largest[i]):.2g}). Pass (H + H.mT) / 2 to use its symmetric "
            "part."
        )
    hessian = hessian.detach().double()
    return hessian / 2 + hessian.mT / 2


def _largest(matrix: Tensor) -> Tensor:
    """Largest |entry| of each example, (B,); NaN if any entry is NaN."""
    flat = matrix.flatten(1)
    return torch.maximum(flat.amax(1), -flat.amin(1))


def rows_of(hessian: Result | Callable[[Tensor], Tensor], dtype: torch.dtype) -> Product:
    """A function that multiplies H with rows (B, n, d) in float64; the product is computed in the precision of H."""
    if isinstance(hessian, Result):
        return lambda rows: hessian.product(rows.to(hessian.dtype)).double()

    def product(rows: Tensor) -> Tensor:
        made = hessian(rows.to(dtype))
        if not isinstance(made, Tensor) or made.shape != rows.shape:
            got = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
            raise ValueError(f"hessian must map rows {tuple(rows.shape)} to rows of that shape, got {got}.")
        if not torch.isfinite(made).all():
            raise ValueError("the products with the Hessian must be finite, got NaN or infinity.")
        return made.detach().double()

    return product


def check_gradient(gradient: Tensor, hessian: Hessian) -> Tensor:
    """Validate the gradient and the form of the Hessian, and return the gradient as (B, d).

    The numbers of the Hessian are checked later, in `dense` or `rows_of`.
    """
    if not isinstance(gradient, Tensor) or not gradient.is_floating_point():
        got = gradient.dtype if isinstance(gradient, Tensor) else type(gradient).__name__
        raise TypeError(f"gradient must be a floating point tensor (B, d), got {got}.")
    if gradient.ndim < 2 or not gradient.numel():
        raise ValueError(
            f"gradient must be (B, d) with examples in dimension 0, got shape {tuple(gradient.shape)}. For one example "
            "use gradient[None] and hessian[None]."
        )
    if not torch.isfinite(gradient).all():
        raise ValueError("gradient must be finite, got NaN or infinity. Check the model's outputs near these inputs.")
    flat = gradient.detach().flatten(1)
    batch, d = flat.shape
    if isinstance(hessian, Attribution):
        raise ValueError(
            f"{hessian.method or 'this'} is an attribution, not a Hessian: there is no quadratic to minimise. Pass a "
            "result of SmoothHess, or a derivative among smoothhess.baselines."
        )
    if isinstance(hessian, Tensor | Result):
        if tuple(hessian.shape) != (batch, d, d):
            raise ValueError(
                f"hessian must be (B, d, d) = {(batch, d, d)} for a gradient {tuple(gradient.shape)}, "
                f"got {tuple(hessian.shape)}."
            )
        if hessian.device != gradient.device:
            raise ValueError(f"gradient is on {gradient.device} and hessian on {hessian.device}: move one of them.")
    elif not callable(hessian):
        raise TypeError(
            "hessian must be a tensor (B, d, d), an Interactions, or a callable rows (B, n, d) → H times each, got "
            f"{type(hessian).__name__}."
        )
    if isinstance(hessian, Tensor) and not hessian.is_floating_point():
        raise TypeError(f"hessian must be a floating point tensor (B, d, d), got {hessian.dtype}.")
    return flat


def span(result: SampledResult) -> Tensor | None:
    """Directions (B, r, d) outside of whose span the reported H is a multiple of the identity; None if r would be ~d.

    They are neither normalised nor linearly independent.
    """
    if result.grouping is not None or result.estimate.cached_matrix.value is not None:
        return None
    gaussian, batch = result.gaussian, len(result)
    axes = None
    if isinstance(gaussian, SegmentShift):  # H is zero outside of the shifts
        rank = gaussian.rank(result.shape[1])
        return gaussian.push(torch.eye(rank, dtype=result.dtype, device=result.device)).double().expand(batch, -1, -1)
    if isinstance(gaussian, Eigenbasis):
        axes = gaussian.basis.double().to(result.device).expand(batch, -1, -1)
        if not gaussian.rest:  # H is zero outside of them
            return axes
    rows = _denoised_rows(result) if result.shrink else _sampled_rows(result)
    has_constant = result.shrink or result.estimate.unbiased.needs_correction  # a multiple of Σ⁻¹ outside of the rows
    if rows is None or (has_constant and not isinstance(gaussian, Eigenbasis | Isotropic)):
        return None
    return rows.double() if axes is None else torch.cat([rows.double(), axes], 1)


def _sampled_rows(result: SampledResult) -> Tensor | None:
    """Rows (B, r, d) that span H: scores, gradients, and factors of the control variate's expectation."""
    unbiased = result.estimate.unbiased
    return torch.cat(unbiased.factors(), 1) if unbiased.is_factored else None


def _denoised_rows(result: SampledResult) -> Tensor | None:
    """Rows (B, r, d) that span the denoised H less a multiple of Σ⁻¹."""
    denoised = result.estimate.denoised
    if denoised is None:
        return None
    low_rank = []
    for index, part in denoised.parts:
        factor = None if part.known is None else part.known.factor
        if not isinstance(part.basis, FactoredBasis) or (part.known is not None and factor is None):
            return None
        rows = part.basis.rows
        low_rank.append((index, rows if factor is None else torch.cat([rows, factor.to(rows)], 1)))
    rows = result.inputs.new_zeros(len(result), max(r.shape[1] for _, r in low_rank), result.shape[1])
    for index, white in low_rank:
        rows[index, : white.shape[1]] = result.gaussian.push(white)
    return rows
