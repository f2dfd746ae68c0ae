"""The trust-region problem from matrix-vector products: generalised Lanczos in blocks of two, with restarts.

The problem is solved exactly in a growing Krylov space of two starting vectors, the gradient and a random one. With the
gradient only, directions without gradient would never be found, and in the hard case the solution lies along them. The
iteration has converged when for every radius

    ‖(H + λI)δ + g‖ is rounding   and   H + λI ⪰ 0, estimated with the lowest Ritz pair (θ, v): λ + θ ≥ ‖Hv − θv‖.

Every new vector is orthogonalised against all previous ones, repeatedly if necessary, and replaced by a random one if
nothing is left of it: residuals become parallel to the space. (The large blocks of `krylov`, whose eigenpairs need no
gradient in the space, are orthogonalised as a whole.) When the memory limit is reached,
the space is restarted with the solutions, the gradient and the lowest Ritz vectors, and grows from their residuals.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from smoothhess.linalg.memory import KRYLOV_SPACE
from smoothhess.linalg.orthonormal import orthonormal
from smoothhess.linalg.trust_region.few_directions import orthogonal_part
from smoothhess.linalg.trust_region.scaling import eigenpairs, norm, unit_vector
from smoothhess.linalg.trust_region.secular import minimize_diagonal

Product = Callable[[Tensor], Tensor]  # rows (B, n, d) → H times each of them

MOST_VECTORS = 160  # vectors of a space before a restart: each new one is orthogonalised against all of them
LOWEST = 24  # Ritz vectors that are kept at a restart, in addition to the solutions
LEAST = 48  # further vectors that a space may have whatever the memory limit
GROWTH = 0.25  # relative growth of a space between two convergence checks
MOST_PRODUCTS = 10_000


@dataclass(frozen=True, eq=False)
class Space:
    """Orthonormal Ritz vectors of B operators as rows, their Ritz values, and their images under H."""

    values: Tensor  # (B, k), ascending
    vectors: Tensor  # (B, k, d)
    images: Tensor  # (B, k, d)

    @staticmethod
    def start(gradient: Tensor, product: Product) -> Space:
        """The space of the gradient (B, d) and a random direction."""
        nothing = gradient[:, None][:, :0]
        return _grown(nothing, nothing, torch.stack([gradient, torch.zeros_like(gradient)], 1), 1, product)

    def grown(self, residuals: Tensor, product: Product, room: int) -> Space:
        """Grow the space by two blocks or a quarter, from residuals (B, 2, d); to `room` vectors at most."""
        k = self.values.shape[1]
        steps = max(1, min(max(int(GROWTH * k), 4), room - k) // 2)
        return _grown(self.vectors, self.images, residuals, steps, product)

    def select(self, index: Tensor) -> Space:
        """The spaces of the operators at `index`."""
        return Space(self.values[index], self.vectors[index], self.images[index])


def widen(space: Space, gradient: Tensor, product: Product, radius: Tensor, eps: float) -> Space:
    """Grow the space until it contains the minimum for every radius (R, B); `eps` is the precision of the products."""
    d, made = gradient.shape[1], 0
    room = _room(gradient, len(radius))
    while True:
        look = Look.at(space, gradient, radius)
        k = space.values.shape[1]
        if k == d or bool(((look.error <= eps**0.75) & (look.curvature <= eps**0.5)).all()):
            return space
        if made >= MOST_PRODUCTS:
            warnings.warn(
                f"{made} products with the Hessian left a relative residual of {float(look.error.max()):.1g} "
                f"(curvature {float(look.curvature.max()):.1g}). The step is close to the minimum but not converged.",
                stacklevel=3,
            )
            return space
        if k + 2 > room and room < d:
            space = _cut(space, look.coordinates, gradient)
            k = space.values.shape[1]
        space = space.grown(look.residuals, product, room)
        made += space.values.shape[1] - k


@dataclass(frozen=True, eq=False)
class Look:
    """The minimum in a space, and its residuals."""

    coordinates: Tensor  # (R, B, k) of the minimum, for each radius
    multiplier: Tensor  # (R, B) λ
    residuals: Tensor  # (B, 2, d) of the worst radius, and of the lowest Ritz pair
    error: Tensor  # (B,) ‖(H + λI)δ + g‖, relative
    curvature: Tensor  # (B,) relative bound of the negative curvature of H + λI; negative if it is definite

    @staticmethod
    def at(space: Space, gradient: Tensor, radius: Tensor) -> Look:
        """The minimum in `space` for radii (R, B)."""
        coefficients = _coefficients(space, gradient)[:, 0]
        y, multiplier = minimize_diagonal(space.values, coefficients, radius)  # (R, B, k), (R, B)
        rows = y.transpose(0, 1)  # (B, R, k)
        missed = rows @ space.images + (multiplier.mT[..., None] * rows) @ space.vectors + gradient[:, None]
        largest, slope = space.values.abs().amax(-1), norm(gradient)
        error = _share(norm(missed), (slope + (largest + multiplier) * norm(y)).mT)  # (B, R)
        worst = error.argmax(1)[:, None, None].expand(-1, 1, missed.shape[2])
        lowest = space.images[:, :1] - space.values[:, :1, None] * space.vectors[:, :1]
        doubt = _share(norm(lowest)[:, 0] - multiplier - space.values[:, 0], largest + slope / radius)  # (R, B)
        residuals = torch.cat([missed.gather(1, worst), lowest], 1)
        return Look(y, multiplier, residuals, error.amax(1), doubt.amax(0))


def _room(gradient: Tensor, radii: int) -> int:
    """Largest number of vectors of a space."""
    fitting = min(MOST_VECTORS, KRYLOV_SPACE.items(16 * gradient.numel(), gradient.device))
    return min(gradient.shape[1], max(fitting, radii + 1 + LOWEST + LEAST))


def _grown(vectors: Tensor, images: Tensor, block: Tensor, steps: int, product: Product) -> Space:
    """Add `steps` blocks, each the image of the previous block under H, orthogonalised against all vectors."""
    batch, k, d = vectors.shape
    full = min(k + steps * block.shape[1], d)
    grown = torch.cat([vectors, vectors.new_empty(batch, full - k, d)], 1)
    found = [images]
    while k < full:
        before = k
        for row in block.unbind(1)[: full - k]:
            grown[:, k] = orthogonal_part(grown[:, :k], row)
            k += 1
        block = product(grown[:, before:k])
        found.append(block)
    return _ritz(grown, torch.cat(found, 1))


def _cut(space: Space, coordinates: Tensor, gradient: Tensor) -> Space:
    """Restart: the span of the solutions, the gradient and the lowest Ritz vectors."""
    lowest = torch.eye(LOWEST, space.values.shape[1], dtype=gradient.dtype, device=gradient.device)
    spanning = [coordinates.transpose(0, 1), _coefficients(space, gradient), lowest.expand(len(gradient), -1, -1)]
    kept = orthonormal(unit_vector(torch.cat(spanning, 1)))
    return _ritz(kept @ space.vectors, kept @ space.images)


def _ritz(vectors: Tensor, images: Tensor) -> Space:
    """Rayleigh–Ritz: a basis of the same space in which H is diagonal."""
    small = vectors @ images.mT
    values, rotation = eigenpairs((small + small.mT) / 2)
    return Space(values, rotation.mT @ vectors, rotation.mT @ images)


def _coefficients(space: Space, gradient: Tensor) -> Tensor:
    return gradient[:, None] @ space.vectors.mT  # (B, 1, k)


def _share(part: Tensor, total: Tensor) -> Tensor:
    return torch.where(total > 0, part / total, 0.0)
