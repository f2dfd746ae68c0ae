"""Minimise a quadratic over balls of many radii, from one eigendecomposition or Krylov space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smoothhess.linalg.eigenvalue_order import by_magnitude
from smoothhess.linalg.trust_region.few_directions import reduced
from smoothhess.linalg.trust_region.lanczos import Product, Space, widen
from smoothhess.linalg.trust_region.scaling import eigenpairs
from smoothhess.linalg.trust_region.secular import minimize_diagonal


@dataclass(frozen=True, eq=False, repr=False)
class Spectrum:
    """gᵀδ + ½δᵀHδ of B examples in the eigenbasis of H; the minimum on a ball takes one scalar equation per radius.

    Created by `of_dense`, `of_few_directions` or `of_products`. The k vectors are all d eigenvectors; or those of a
    low-rank H and the direction of the remaining part of g; or Ritz vectors, if only products with H are available and
    the space grows when a radius needs it.

    >>> g, H = torch.tensor([[1.0, 1.0]]), torch.diag(torch.tensor([0.0, 1.0]))[None]
    >>> Spectrum.of_dense(g, H.double()).minimize([0.1, 5.0])  # against the gradient at first, then along the valley
    tensor([[[-0.0732, -0.0682]],
    <BLANKLINE>
            [[-4.9304, -0.8314]]])
    """

    values: Tensor  # (B, k) float64
    vectors: Tensor  # (B, d, k) float64, orthonormal
    coefficients: Tensor  # (B, k) of the gradient, float64
    gradient: Tensor  # (B, d) float64
    dtype: torch.dtype  # dtype of the steps
    product: Product | None = None  # H times rows (B, n, d), if the vectors are Ritz vectors
    space: Space | None = None  # the Krylov space and its image
    eps: float = torch.finfo(torch.float64).eps  # relative precision of the products

    @staticmethod
    def of_dense(gradient: Tensor, matrix: Tensor) -> Spectrum:
        """From a validated gradient (B, d) and a symmetric matrix (B, d, d) in float64."""
        return _make(gradient.double(), gradient.dtype, *eigenpairs(matrix))

    @staticmethod
    def of_few_directions(gradient: Tensor, product: Product, directions: Tensor) -> Spectrum:
        """From products with a matrix that is a multiple of the identity outside of `directions` (B, r, d)."""
        g = gradient.double()
        basis, small = reduced(product, directions, g)
        values, rotation = eigenpairs(small)
        return _make(g, gradient.dtype, values, basis.mT @ rotation)

    @staticmethod
    def of_products(gradient: Tensor, product: Product, eps: float) -> Spectrum:
        """From matrix-vector products of relative precision `eps`; the space grows when a radius needs it."""
        g = gradient.double()
        space = Space.start(g, product)
        made = _make(g, gradient.dtype, space.values, space.vectors.mT)
        return replace(made, product=product, space=space, eps=eps)

    def minimize(self, radius: float | Tensor | Sequence[float]) -> Tensor:
        """The minimiser of each example, (B, d), for one radius or one radius per example (B,).

        For a list of R radii, or a tensor (R, 1) or (R, B), the result is (R, B, d).
        """
        radii = check_radii(radius, self.gradient)
        wide = self.widened(radii)
        y, _ = minimize_diagonal(wide.values, wide.coefficients, radii)  # (B, k) or (R, B, k)
        step = torch.einsum("bdk,...bk->...bd", wide.vectors, y)
        return step.to(self.dtype)

    def widened(self, radius: float | Tensor | Sequence[float]) -> Spectrum:
        """The spectrum with all vectors that these radii need; unchanged unless made by `of_products`."""
        if self.product is None or self.space is None:
            return self
        radii = check_radii(radius, self.gradient).reshape(-1, len(self.gradient))
        space = widen(self.space, self.gradient, self.product, radii, self.eps)
        made = _make(self.gradient, self.dtype, space.values, space.vectors.mT)
        return replace(made, product=self.product, space=space, eps=self.eps)

    def cut(self, keep: float) -> Spectrum:
        """The reduction of the paper: keep the fewest eigenvectors by |λ| that hold the share `keep` of Σ|λ|.

        The other eigenvectors, and the components of the gradient along them, are dropped.
        """
        _, d, k = self.vectors.shape
        if k < d:
            raise ValueError(f"a share of Σ|λ| needs all {d} eigenvalues, got {k}. Pass a dense Hessian.")
        order = by_magnitude(self.values)
        kept = count_kept(self.values, keep)
        order = order[:, : int(kept.max())]
        gone = torch.arange(order.shape[1], device=order.device) >= kept[:, None]
        values = self.values.gather(1, order)
        return replace(
            self,
            values=_set_aside(values, gone),
            vectors=self.vectors.gather(2, order[:, None].expand(-1, d, -1)).masked_fill(gone[:, None], 0.0),
            coefficients=self.coefficients.gather(1, order).masked_fill(gone, 0.0),
        )

    def __neg__(self) -> Spectrum:
        """The spectrum of −gᵀδ − ½δᵀHδ, whose minimum is the maximum of this one."""
        product, space = self.product, self.space
        gone = self.vectors.abs().amax(1) == 0
        return replace(
            self,
            values=_set_aside(-self.values, gone).flip(1),
            vectors=self.vectors.flip(2),
            coefficients=-self.coefficients.flip(1),
            gradient=-self.gradient,
            product=None if product is None else lambda rows: -product(rows),
            space=None if space is None else Space(-space.values.flip(1), space.vectors.flip(1), -space.images.flip(1)),
        )


def _set_aside(values: Tensor, gone: Tensor) -> Tensor:
    """Replace dropped eigenvalues by a larger curvature than all others, so that steps have no component there."""
    kept = values.masked_fill(gone, -torch.inf).amax(1, keepdim=True)
    size = values.masked_fill(gone, 0.0).abs().amax(1, keepdim=True)
    return torch.where(gone, kept + size, values)


def count_kept(values: Tensor, keep: float) -> Tensor:
    """How many eigenvalues (B, d), largest |λ| first, hold the share `keep` of Σ|λ|, (B,); at least one.

    >>> count_kept(torch.tensor([[1.0, -6.0, 3.0]]), 0.9)
    tensor([2])
    """
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
        raise ValueError(f"keep must be the share of Σ|λ| to keep, above 0 and at most 1, got {keep!r}.")
    sizes = values.abs().sort(dim=1, descending=True).values
    held = (sizes / sizes[:, :1].clamp_min(torch.finfo(sizes.dtype).tiny)).cumsum(1)
    return ((held < keep * held[:, -1:]).sum(1) + 1).clamp_max(values.shape[1])


def _make(gradient: Tensor, dtype: torch.dtype, values: Tensor, vectors: Tensor) -> Spectrum:
    coefficients = (gradient[:, None] @ vectors)[:, 0]
    return Spectrum(values, vectors, coefficients, gradient, dtype)


def check_radii(radius: float | Tensor | Sequence[float], gradient: Tensor) -> Tensor:
    """Validate radii; returns (B,), or (R, B) for several radii per example, float64."""
    batch = len(gradient)
    listed = isinstance(radius, list | tuple)
    try:
        radii = torch.as_tensor(radius, dtype=torch.float64).detach().to(gradient.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"radius must be a number, a list of them or a tensor, got {type(radius).__name__}.") from error
    if listed and radii.ndim == 1:
        radii = radii[:, None]
    if radii.shape not in ((), (batch,)) and not (radii.ndim == 2 and radii.shape[1] in (1, batch) and len(radii)):
        raise ValueError(
            f"radius must be a number, one per example ({batch},), a list of R radii, or a tensor (R, 1) or "
            f"(R, {batch}), got shape {tuple(radii.shape)}."
        )
    if not (torch.isfinite(radii) & (radii > 0)).all():
        raise ValueError("radius must be positive and finite, the radius of the ball around each input.")
    return radii.expand(*radii.shape[:-1], batch)
