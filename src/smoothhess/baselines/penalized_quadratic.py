"""Maximisation of a quadratic with L1 and L2 penalties, matrix-free and batched over B problems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from smoothhess.linalg.krylov import leading_eigenpairs

MOST_STEPS = 20_000  # of the accelerated proximal gradient method
POLISH_EVERY = 20  # steps between exact solves for the active features
MOST_PRODUCTS = 1000  # with H, for one linear system
NEWTON_STEPS = 60  # for the multiplier of the ball
ROUNDINGS = 200  # machine epsilons of the largest eigenvalue by which an eigenvalue may be wrong


@dataclass(frozen=True, eq=False)
class Quadratic:
    """q(δ) = gᵀδ + ½ δᵀHδ."""

    gradient: Tensor  # (B, d) float64
    product: Callable[[Tensor], Tensor]  # δ (B, d) → Hδ (B, d)
    lowest: Tensor  # (B,) lower bound of the eigenvalues of H
    highest: Tensor  # (B,) upper bound


class Peak(NamedTuple):
    """The maximiser of the penalised quadratic and its stationarity residual."""

    step: Tensor  # (B, d)
    residual: Tensor  # (B,) relative length of one further proximal gradient step


def maximize_penalized(
    quadratic: Quadratic, l1: float, l2: float, radius: float | None = None, *, tol: float = 1e-10
) -> Peak:
    """argmax gᵀδ + ½ δᵀHδ − l1 ‖δ‖₁ − l2 ‖δ‖², over ‖δ‖ ≤ radius if a radius is given.

    2·l2 must exceed every eigenvalue of H, so that Q = 2·l2·I − H is positive definite, the problem is concave and the
    maximum is unique. Without l1 and radius, Qδ = g is solved by conjugate gradients. Otherwise an accelerated proximal
    gradient method (FISTA) finds the features that are zero and the signs of the others, and an exact solve for the
    nonzero features follows.

    >>> g = torch.tensor([[3.0, -1.0, 0.5]]).double()
    >>> flat = Quadratic(g, torch.zeros_like, torch.zeros(1).double(), torch.zeros(1).double())
    >>> maximize_penalized(flat, 0.5, 1.0).step  # soft threshold of g, divided by 2·l2
    tensor([[ 1.2500, -0.2500,  0.0000]], dtype=torch.float64)
    """
    problem = _Problem(quadratic, l1, l2, radius)
    if l1 == 0 and radius is None:
        step = _solve(problem.curve, quadratic.gradient, tol / 100)
        return Peak(step, problem.residual(step))
    step = problem.proximal(torch.zeros_like(quadratic.gradient), quadratic.gradient)
    ahead, momentum = step, problem.momentum
    for count in range(1, MOST_STEPS + 1):
        before, step = step, problem.proximal(ahead, problem.slope(ahead))
        ahead = step + momentum * (step - before)
        if count % POLISH_EVERY == 0:
            polished = problem.polish(step, tol / 100)
            better = problem.residual(polished) < problem.residual(step)
            step = torch.where(better[:, None], polished, step)
            if bool((problem.residual(step) <= tol).all()):
                break
    return Peak(step, problem.residual(step))


def extremes(product: Callable[[Tensor], Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of the eigenvalues of B operators, (B,) float64: the extreme eigenvalues, widened by rounding errors.

    `product` maps rows (B, n, d) to their products with H, in the dtype of `like` (B, d).

    >>> lowest, highest = extremes(lambda rows: rows * torch.tensor([-1.0, 0.0, 4.0]), torch.zeros(1, 3))
    >>> lowest.round(decimals=3), highest.round(decimals=3)
    (tensor([-1.], dtype=torch.float64), tensor([4.], dtype=torch.float64))
    """
    one = leading_eigenpairs(product, like, 1)[0]  # (B, 1) largest in absolute value
    # shifted by it, the other end of the spectrum is the largest in absolute value
    other = leading_eigenpairs(lambda rows: product(rows) - one[..., None] * rows, like, 1)[0] + one
    ends = torch.cat([one, other], 1).double()
    slack = ROUNDINGS * torch.finfo(like.dtype).eps * ends.abs().amax(1)
    return ends.amin(1) - slack, ends.amax(1) + slack


@dataclass(frozen=True, eq=False)
class _Problem:
    quadratic: Quadratic
    l1: float
    l2: float
    radius: float | None

    @property
    def steepest(self) -> Tensor:
        """The largest eigenvalue of Q, (B, 1)."""
        return (2 * self.l2 - self.quadratic.lowest)[:, None]

    @property
    def momentum(self) -> Tensor:
        """Momentum of the accelerated method for a strongly concave function, from its condition number, (B, 1)."""
        root = ((2 * self.l2 - self.quadratic.highest)[:, None] / self.steepest).clamp_min(0).sqrt()
        return (1 - root) / (1 + root)

    def curve(self, step: Tensor) -> Tensor:
        """Qδ."""
        return 2 * self.l2 * step - self.quadratic.product(step)

    def slope(self, step: Tensor) -> Tensor:
        """The gradient of the smooth part, g − Qδ."""
        return self.quadratic.gradient - self.curve(step)

    def proximal(self, step: Tensor, slope: Tensor) -> Tensor:
        """One ascent step, then soft threshold, then projection to the ball: in this order, the proximal map."""
        moved = step + slope / self.steepest
        moved = moved.sign() * (moved.abs() - self.l1 / self.steepest).clamp_min(0)
        if self.radius is None:
            return moved
        return moved * (self.radius / moved.norm(dim=1, keepdim=True).clamp_min(self.radius))

    def residual(self, step: Tensor) -> Tensor:
        """Length of one proximal step from here, relative to ‖g‖/λ_max(Q) (at most the radius) plus ‖δ‖, (B,)."""
        moved = (self.proximal(step, self.slope(step)) - step).norm(dim=1)
        reach = self.quadratic.gradient.norm(dim=1) / self.steepest[:, 0]
        return moved / (reach.clamp(torch.finfo(step.dtype).tiny, self.radius) + step.norm(dim=1))

    def polish(self, step: Tensor, tol: float) -> Tensor:
        """The exact maximum for fixed zeros and signs: (Q + μ)δ = g − l1·sign where δ ≠ 0."""
        active, rhs = step != 0, self.quadratic.gradient - self.l1 * step.sign()
        rhs = torch.where(active, rhs, 0.0)

        def restricted(mu: Tensor) -> Callable[[Tensor], Tensor]:
            return lambda v: torch.where(active, self.curve(v) + mu * v, 0.0)

        mu = torch.zeros_like(self.steepest)
        solved = _solve(restricted(mu), rhs, tol)
        if self.radius is None:
            return solved
        for _ in range(NEWTON_STEPS):  # on the secular equation 1/‖δ(μ)‖ = 1/radius, nearly linear in μ
            length = solved.norm(dim=1, keepdim=True)
            outside = (length > self.radius * (1 + tol)) & (length > 0)
            if not bool(outside.any()):
                break
            stretched = (solved * _solve(restricted(mu), solved, tol)).sum(1, keepdim=True)
            newton = length.square() / stretched.clamp_min(1e-300) * (length / self.radius - 1)
            mu = torch.where(outside, mu + newton, mu)
            solved = _solve(restricted(mu), rhs, tol)
        return solved


def _solve(apply: Callable[[Tensor], Tensor], rhs: Tensor, tol: float) -> Tensor:
    """apply⁻¹ rhs for a positive definite `apply`, by conjugate gradients, each row to the relative residual `tol`."""
    solved, residual = torch.zeros_like(rhs), rhs
    along, energy = rhs, rhs.square().sum(1, keepdim=True)
    enough = energy * tol**2
    for _ in range(min(MOST_PRODUCTS, 4 * rhs.shape[1] + 10)):
        going = energy > enough
        if not bool(going.any()):
            break
        image = apply(along)
        stride = torch.where(going, energy / (along * image).sum(1, keepdim=True), 0.0)
        solved, residual = solved + stride * along, residual - stride * image
        after = residual.square().sum(1, keepdim=True)
        along = residual + torch.where(going, after / energy, 0.0) * along
        energy = torch.where(going, after, energy)
    return solved
