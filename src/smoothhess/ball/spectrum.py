"""A quadratic on balls of any radius, from one eigendecomposition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smoothhess.ball.lanczos import Product, Space, widen
from smoothhess.ball.reduction import reduced, span
from smoothhess.ball.scaling import eigenpairs
from smoothhess.ball.secular import minimize_diagonal
from smoothhess.exact import ROW_BYTES, Attribution
from smoothhess.interactions import Interactions
from smoothhess.statistics import DENSE_LIMIT

Hessian = Tensor | Interactions | Callable[[Tensor], Tensor]

DENSE_PAYS = 1024  # features up to which a whole eigendecomposition is made of what is known by its products alone
ASYMMETRY = 0.6  # H and its transpose may differ by the machine's precision to this power: rounding, no more
REDUCED_SHARE = 0.75  # of the dimensions: with more directions than these, a reduction saves nothing


@dataclass(frozen=True, eq=False, repr=False)
class Spectrum:
    """gᵀδ + ½δᵀHδ of B examples in the eigenbasis of H: its minimum on a ball of any radius is one equation away.

    Made by `Spectrum.of`. The k vectors are all d of them; or those of a low-rank H and the direction of the rest of g,
    which is all that a minimum needs; or Ritz vectors, where H is known by its products alone and the space grows with
    what is asked of it.

    >>> g, H = torch.tensor([[1.0, 1.0]]), torch.diag(torch.tensor([0.0, 1.0]))[None]
    >>> Spectrum.of(g, H).minimize([0.1, 5.0])  # against the gradient at first, then along the valley
    tensor([[[-0.0732, -0.0682]],
    <BLANKLINE>
            [[-4.9304, -0.8314]]])
    """

    values: Tensor  # (B, k) float64
    vectors: Tensor  # (B, d, k) float64, orthonormal
    coefficients: Tensor  # (B, k) of the gradient, float64
    gradient: Tensor  # (B, d) float64
    dtype: torch.dtype  # that steps are returned in
    product: Product | None = None  # H times rows (B, n, d), where the vectors are not yet all that is needed,
    space: Space | None = None  # what they span, with its image,
    eps: float = torch.finfo(torch.float64).eps  # and the precision of the products

    @staticmethod
    def of(gradient: Tensor, hessian: Hessian) -> Spectrum:
        """From a gradient (B, d) or (B, *shape), and a Hessian in any form; see `minimize_in_ball`."""
        flat = check_gradient(gradient, hessian)
        if isinstance(hessian, Tensor):
            return Spectrum.of_dense(flat, dense(hessian, flat))
        g, dtype = flat.double(), flat.dtype
        directions = few_directions(hessian)
        if directions is not None:
            basis, small = reduced(rows_of(hessian, dtype), directions, g)
            values, rotation = eigenpairs(small)
            return _make(g, dtype, values, basis.mT @ rotation)
        if g.shape[1] <= DENSE_PAYS:
            return Spectrum.of_dense(flat, dense(hessian, flat))
        product = rows_of(hessian, dtype)
        eps = torch.finfo(hessian.dtype if isinstance(hessian, Interactions) else dtype).eps
        space = Space.start(g, product)
        return replace(_make(g, dtype, space.values, space.vectors.mT), product=product, space=space, eps=eps)

    @staticmethod
    def of_dense(gradient: Tensor, matrix: Tensor) -> Spectrum:
        """From what was looked at already: a gradient (B, d) and a symmetric matrix (B, d, d) in float64."""
        return _make(gradient.double(), gradient.dtype, *eigenpairs(matrix))

    def minimize(self, radius: float | Tensor | Sequence[float]) -> Tensor:
        """The minimiser for each example, (B, d), of one radius or one per example (B,).

        A list of R radii, or a tensor (R, 1) or (R, B), gives all of them at once, (R, B, d).
        """
        radii = check_radii(radius, self.gradient)
        wide = self.widened(radii)
        y, _ = minimize_diagonal(wide.values, wide.coefficients, radii)  # (B, k) or (R, B, k)
        step = torch.einsum("bdk,...bk->...bd", wide.vectors, y)
        return step.to(self.dtype)

    def widened(self, radius: float | Tensor | Sequence[float]) -> Spectrum:
        """With all the vectors that these radii need; itself, unless H is known by its products alone."""
        if self.product is None or self.space is None:
            return self
        radii = check_radii(radius, self.gradient).reshape(-1, len(self.gradient))
        space = widen(self.space, self.gradient, self.product, radii, self.eps)
        made = _make(self.gradient, self.dtype, space.values, space.vectors.mT)
        return replace(made, product=self.product, space=space, eps=self.eps)

    def cut(self, keep: float) -> Spectrum:
        """The paper's reduction: the fewest eigenvectors by |λ| that hold the share `keep` of Σ|λ|; the others, and
        what the gradient has of them, are dropped.
        """
        _, d, k = self.vectors.shape
        if k < d:
            raise ValueError(f"a share of Σ|λ| needs all {d} eigenvalues, got {k}. Pass a dense Hessian.")
        order = self.values.abs().argsort(dim=1, descending=True, stable=True)
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
        """Of −gᵀδ − ½δᵀHδ: its minimum is the maximum of this one."""
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
    """What was cut gets no part of a step: without gradient, and with more curvature than all others."""
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


def few_directions(hessian: Hessian) -> Tensor | None:
    """Where a reduction pays, the directions (B, r, d) outside of which H is a multiple of the identity."""
    directions = span(hessian) if isinstance(hessian, Interactions) else None
    if directions is None or directions.shape[1] >= REDUCED_SHARE * directions.shape[2]:
        return None
    return directions


def dense(hessian: Hessian, like: Tensor, first: int = 0) -> Tensor:
    """The Hessian as (B, d, d) float64, finite, and symmetric to the last bit; for gradients `like` (B, d).

    Errors count examples from `first` on.
    """
    batch, d = like.shape
    if isinstance(hessian, Interactions):
        hessian = hessian.hessian
    elif not isinstance(hessian, Tensor):
        if d > DENSE_LIMIT:
            raise ValueError(f"{d} features are too many for a dense matrix ({DENSE_LIMIT} at most). Leave keep out.")
        step = max(1, ROW_BYTES // (8 * batch * d))
        eye = torch.eye(d, dtype=torch.float64, device=like.device)
        product = rows_of(hessian, like.dtype)
        parts = [product(rows.expand(batch, -1, -1)) for rows in eye.split(step)]
        hessian = torch.cat(parts, 1).to(like.dtype)
    largest = _largest(hessian)
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("hessian must be finite, got NaN or infinity. Look at how it was computed.")
    if torch.equal(hessian, hessian.mT):
        return hessian.detach().double()
    apart = _largest(hessian - hessian.mT)
    wrong = apart > torch.finfo(hessian.dtype).eps ** ASYMMETRY * largest
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        raise ValueError(
            f"hessian must be symmetric, that of example {first + i} differs from its transpose by "
            f"{float(apart[i]):.2g} (largest entry {float(largest[i]):.2g}). Pass (H + H.mT) / 2 if its symmetric part "
            "is meant."
        )
    hessian = hessian.detach().double()
    return hessian / 2 + hessian.mT / 2


def _largest(matrix: Tensor) -> Tensor:
    """|entry| of each example, (B,); NaN where there is one."""
    flat = matrix.flatten(1)
    return torch.maximum(flat.amax(1), -flat.amin(1))


def rows_of(hessian: Interactions | Callable[[Tensor], Tensor], dtype: torch.dtype) -> Product:
    """H times rows (B, n, d), in and out in float64; it computes in its own precision."""
    if isinstance(hessian, Interactions):
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


def _make(gradient: Tensor, dtype: torch.dtype, values: Tensor, vectors: Tensor) -> Spectrum:
    coefficients = (gradient[:, None] @ vectors)[:, 0]
    return Spectrum(values, vectors, coefficients, gradient, dtype)


# --- what is refused at the door --------------------------------------------------------------------------------------


def check_gradient(gradient: Tensor, hessian: Hessian) -> Tensor:
    """The gradient as (B, d), after making sure that the Hessian belongs to it; its numbers are not looked at here."""
    if not isinstance(gradient, Tensor) or not gradient.is_floating_point():
        got = gradient.dtype if isinstance(gradient, Tensor) else type(gradient).__name__
        raise TypeError(f"gradient must be a floating point tensor (B, d), got {got}.")
    if gradient.ndim < 2 or not gradient.numel():
        raise ValueError(
            f"gradient must be (B, d) with examples in dimension 0, got shape {tuple(gradient.shape)}. For one example "
            "use gradient[None] and hessian[None]."
        )
    if not torch.isfinite(gradient).all():
        raise ValueError("gradient must be finite, got NaN or infinity. Look at the model's outputs near these inputs.")
    flat = gradient.detach().flatten(1)
    batch, d = flat.shape
    if isinstance(hessian, Attribution):
        raise ValueError(
            f"{hessian.method or 'this'} is an attribution, not a Hessian: there is no quadratic to minimise."
        )
    if isinstance(hessian, Tensor | Interactions):
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


def check_radii(radius: float | Tensor | Sequence[float], gradient: Tensor) -> Tensor:
    """Radii of all examples (B,), or (R, B) where several are asked for, float64."""
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
        raise ValueError("radius must be positive and finite, that of the ball around each input.")
    return radii.expand(*radii.shape[:-1], batch)
