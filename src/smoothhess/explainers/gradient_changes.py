"""Changes of the gradient along random directions, measured at several σ before sampling.

The odd half-difference of the gradient, o(σ) = |Lᵀ(∇f(x + σδ) − ∇f(x − σδ))|/2, is measured along the same directions δ
at every σ, and compared with its rounding error; products with the model's own Hessian come from double backward. What
the numbers say about σ is decided in `sigma_range`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from smoothhess.draws.designs import pilot_rows
from smoothhess.draws.gaussian import Gaussian
from smoothhess.linalg.memory import reraise_out_of_memory
from smoothhess.model.gradients import Oracle

MULTIPLES = torch.logspace(-3, 3, 13, dtype=torch.float64)  # of a Gaussian, at which gradients are compared
MARGIN = 10.0  # a half-difference counts if it exceeds the rounding noise by this factor


@dataclass(frozen=True, eq=False)
class GradientChanges:
    """Half-differences o of the whitened gradient along the same directions at several distances, on the CPU."""

    odd: Tensor  # (B, S, n) at the multiples
    noise: Tensor  # (B,) their rounding error
    lost: Tensor  # (B, S) largest share of a feature's noise that is lost in x + δ
    step: Tensor  # (B,) a tiny multiple of δ
    near: Tensor  # (B, 2, n) o over that step and over twice that step

    @staticmethod
    def measure(
        oracle: Oracle, x: Tensor, gaussian: Gaussian, z: Tensor, gradient: Tensor, seed: int
    ) -> GradientChanges:
        """Measure around x along the whitened directions z (n, k) at the MULTIPLES of the Gaussian."""
        flat, eps = x.flatten(1), torch.finfo(x.dtype).eps
        delta = gaussian.colour(z)[None]  # (1, n, d)
        jitter = eps * flat[:, None] * pilot_rows(seed, len(z), flat.shape[1]).to(x)  # in the inputs' last digit
        floor = eps * gaussian.pull(gradient.flatten(1)).double().norm(dim=1).cpu()
        step = math.sqrt(eps) * (flat.norm(dim=1) / delta.norm(dim=2).mean()).clamp_min(1)
        multiples = MULTIPLES.tolist()
        return GradientChanges(
            odd=torch.stack([_odd(oracle, x, gaussian, m * delta) for m in multiples], 1),
            noise=_odd(oracle, x, gaussian, jitter).median(1).values.clamp_min(floor),
            lost=torch.stack([_lost(flat, m * delta[0]) for m in multiples], 1),
            step=step.cpu(),
            near=torch.stack([_odd(oracle, x, gaussian, m * step[:, None, None] * delta) for m in (1, 2)], 1),
        )

    def seen(self, odd: Tensor) -> Tensor:
        """Whether most of (B, S, n) half-differences exceed the rounding error, (B, S)."""
        return (odd > MARGIN * self.noise[:, None, None]).double().mean(2) >= 0.5


def _odd(oracle: Oracle, x: Tensor, gaussian: Gaussian, delta: Tensor) -> Tensor:
    """|Lᵀ(∇f(x + δ) − ∇f(x − δ))|/2 for δ (1 or B, n, d), (B, n); NaN where f or its gradient is not finite."""
    found, n = [], delta.shape[1]

    def differentiated(points: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:  # infinite values do not raise
        leaf = points.detach().requires_grad_()
        value = oracle.pick(oracle.bound(owner)(leaf), owner)
        return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]

    for index in torch.arange(len(x), device=x.device).split(max(1, oracle.batch_size // (2 * n))):
        shift, centre = delta if len(delta) == 1 else delta[index], x[index].flatten(1)[:, None]
        points = torch.stack([centre + shift, centre - shift], 2)  # (b, n, 2, d)
        owner = index.repeat_interleave(2 * n)
        value, gradient = oracle.in_batches(differentiated, points.reshape(-1, *x.shape[1:]), owner)
        oracle.n_rows += len(owner)
        there, back = gaussian.pull(gradient.reshape(points.shape)).double().unbind(2)
        finite = value.reshape(points.shape[:3]).isfinite().all(2)
        found.append(((there - back).norm(dim=2) / 2).masked_fill(~finite, math.nan))
    return torch.cat(found).cpu()


def _lost(x: Tensor, delta: Tensor) -> Tensor:
    """Largest share of a feature's noise (n, d) that adding it to x (B, d) loses to rounding, (B,)."""
    missing = torch.stack([((row + delta) - row - delta).norm(dim=0) for row in x])  # (B, d)
    share = missing / delta.norm(dim=0).clamp_min(torch.finfo(x.dtype).tiny)
    return share.amax(1).double().cpu()


def double_backward(oracle: Oracle, x: Tensor, gaussian: Gaussian, z: Tensor) -> tuple[Tensor, str]:
    """Root mean square of |LᵀHLz| with the model's own H, (B,), or NaN and the reason why autograd has none."""
    square = torch.zeros(len(x), dtype=torch.float64)
    everyone = torch.arange(len(x), device=x.device)
    for v in gaussian.colour(z):

        def product(points: Tensor, owner: Tensor, v: Tensor = v) -> tuple[Tensor, ...]:
            leaf = points.detach().requires_grad_()
            value = oracle.pick(oracle.bound(owner)(leaf), owner)
            (gradient,) = torch.autograd.grad(value.sum(), leaf, create_graph=True)
            along = (gradient.flatten(1) * v).sum() + 0 * leaf.sum()  # the gradient of an affine f has no graph
            return torch.autograd.grad(along, leaf)

        try:
            (turned,) = oracle.in_batches(product, x, everyone)
        except RuntimeError as error:
            reraise_out_of_memory(error)
            oracle.forward(x, everyone)  # raises if the model itself fails
            return torch.full_like(square, math.nan), str(error).strip().split("\n")[0].split(". ")[0]
        square += gaussian.pull(turned.flatten(1)).double().square().sum(1).cpu()
    return (square / len(z)).sqrt(), ""
