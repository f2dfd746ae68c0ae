"""Where a ReLU network's curvature sits: the closed-form one-flip Hessian, and the control variate that it makes.

∇²f = Σ_k u_k · jump_k · Dirac(z_k − knot_k) · J_k J_kᵀ over hidden units k, with pre-activation z_k, its input gradient
J_k, and u_k = ∂f/∂(output of unit k). With masks and sensitivities frozen at x, each Dirac can be integrated over the
Gaussian: whitened, with j_k = LᵀJ_k and τ_k = |j_k|,

    W₁ = Σ_k jump_k u_k φ((z_k − knot_k)/τ_k)/τ_k · j_k j_kᵀ,
    Γ₁ = Σ_k jump_k u_k (Φ((z_k − knot_k)/τ_k) − 1[z_k > knot_k]) j_k.

They are exactly the Stein expectations of g̃(δ) = Σ_k jump_k (1[z_k + J_kδ > knot_k] − 1[z_k > knot_k]) u_k J_k.
Sampling ∇f − g̃ instead of ∇f and adding W₁, Γ₁ back is unbiased whatever the network does, and far less noisy where few
units flip at once. One frozen forward pass gives every z_k + J_kδ, one frozen backward pass g̃; no Jacobian is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from smoothhess.activations import Call, FrozenRun, Tape, freeze, is_opaque, record
from smoothhess.borrow import modules_behind
from smoothhess.gaussian import Gaussian
from smoothhess.oracle import Oracle

COLUMNS = 128  # whitened directions that go through the frozen network at once
STORED_BYTES = 1 << 28  # of all j_k of an example; where they do not fit, W₁ takes another pass for each column


class NoKinksError(ValueError):
    """The model cannot be frozen, with the reason."""


@dataclass(frozen=True, eq=False)
class Kinks:
    """The frozen network of B examples."""

    oracle: Oracle
    inputs: Tensor  # (B, *shape)
    tape: Tape
    bent: tuple[int, ...]  # which calls have knots
    pre: tuple[Tensor, ...]  # pre-activations at the inputs, of the bent calls
    sensitivity: tuple[Tensor, ...]  # u, likewise

    @staticmethod
    def see(oracle: Oracle, inputs: Tensor, value: Tensor, gradient: Tensor) -> Kinks:
        """Freeze the model at the inputs; NoKinksError where that does not give the f(x) and ∇f(x) that were found."""
        if any(is_opaque(m) for m in [oracle.forward_func, *modules_behind(oracle.forward_func)]):
            raise NoKinksError("the model is scripted or compiled, so its activations cannot be seen")
        owner = torch.arange(len(inputs), device=inputs.device)
        tape = record(oracle.bound(owner), inputs)
        bent = tuple(i for i, call in enumerate(tape.calls) if call.knots)
        if not bent:
            raise NoKinksError("no ReLU-like call was seen in the model")
        if any(call.pre.shape[0] != len(inputs) for call in tape.calls):
            raise NoKinksError("an activation does not have the examples in dimension 0")
        leaf = inputs.detach().requires_grad_()
        try:
            run = freeze(oracle.bound(owner), tape, leaf)
        except ValueError as error:
            raise NoKinksError(str(error)) from error
        output = oracle.pick(run.output, owner)
        wanted = [leaf, *(run.post[i] for i in bent)]
        own, *sensitivity = torch.autograd.grad(output.sum(), wanted, allow_unused=True, materialize_grads=True)
        same = torch.allclose(output, value, rtol=1e-3, atol=1e-5) and _close(own, gradient)
        if not same:
            raise NoKinksError("freezing the activations does not reproduce f(x) and its gradient")
        pre = tuple(run.pre[i].detach() for i in bent)
        return Kinks(oracle, inputs, tape, bent, pre, tuple(u.detach() for u in sensitivity))

    def flips(self, points: Tensor, index: Tensor) -> Tensor:
        """g̃ at points (b, n, *shape) of the examples at `index`, (b, n, *shape)."""
        b = len(points)
        part = self.select(index)
        found = []
        step = max(1, self.oracle.batch_size // b)
        for rows in points.split(step, 1):
            leaf = rows.reshape(-1, *points.shape[2:]).detach().requires_grad_()
            run = part._frozen(leaf, index.repeat_interleave(rows.shape[1]))
            total = leaf.new_zeros(())
            for i, pre, u in zip(part.bent, part.pre, part.sensitivity, strict=True):
                moved = run.pre[i]
                grouped = moved.unflatten(0, (b, -1))
                flip = _flips(part.tape.calls[i], grouped.detach(), pre[:, None])
                total = total + (flip * u[:, None] * grouped).sum()
            (gradient,) = torch.autograd.grad(total, leaf, materialize_grads=True, allow_unused=True)
            found.append(gradient.reshape(b, -1, *points.shape[2:]))
        return torch.cat(found, 1)

    def expectation(self, gaussian: Gaussian) -> tuple[Tensor, Tensor, float]:
        """W₁ (B, k, k) and Γ₁ (B, k) in float64, and the passes of work per example that they took."""
        hessians, gradients, passes = [], [], 0.0
        for index in torch.arange(len(self.inputs), device=self.inputs.device).split(1):
            hessian, gradient, passes = self.select(index)._one(gaussian, index)
            hessians.append(hessian)
            gradients.append(gradient)
        return torch.stack(hessians), torch.stack(gradients), passes

    def select(self, index: Tensor) -> Kinks:
        """The examples at `index`."""
        if len(index) == len(self.inputs) and torch.equal(index, torch.arange(len(index), device=index.device)):
            return self

        def rows(t: Tensor | None) -> Tensor | None:
            return t if t is None or t.shape[0] != self.tape.batch else t[index]

        calls = tuple(
            Call(c.kind, c.pre[index], rows(c.slope), rows(c.offset), c.knots, rows(c.indices)) for c in self.tape.calls
        )
        return Kinks(
            self.oracle,
            self.inputs[index],
            Tape(calls, len(index), None),
            self.bent,
            tuple(p[index] for p in self.pre),
            tuple(u[index] for u in self.sensitivity),
        )

    def _frozen(self, points: Tensor, owner: Tensor) -> FrozenRun:
        return freeze(self.oracle.bound(owner), self.tape, points)

    def _one(self, gaussian: Gaussian, owner: Tensor) -> tuple[Tensor, Tensor, float]:
        """W₁, Γ₁ and passes of a single example."""
        x = self.inputs[0].flatten()
        k = gaussian.rank(len(x))
        units = sum(p.numel() for p in self.pre)
        stored = units * k * 4 <= STORED_BYTES
        squares = torch.zeros(units, dtype=torch.float64, device=x.device)
        columns = []
        for start in range(0, k, COLUMNS):
            part = self._columns(gaussian, owner, start, min(start + COLUMNS, k))  # (c, units)
            squares += part.double().square().sum(0)
            if stored:
                columns.append(part)
        tau = squares.sqrt()
        bend, lean = self._weights(tau)
        if stored:
            j = torch.cat(columns)  # (k, units)
            hessian = (j.double() * bend) @ j.double().mT
            return hessian, j.double() @ lean, k / 2
        hessian = torch.zeros(k, k, dtype=torch.float64, device=x.device)
        for start in range(0, k, COLUMNS):
            stop = min(start + COLUMNS, k)
            part = self._columns(gaussian, owner, start, stop)
            hessian[start:stop] = gaussian.pull(self._back(part.double() * bend, owner)).double()
        gradient = gaussian.pull(self._back(lean[None], owner))[0].double()
        return (hessian + hessian.mT) / 2, gradient, 1.5 * k

    def _columns(self, gaussian: Gaussian, owner: Tensor, start: int, stop: int) -> Tensor:
        """j_k along whitened unit vectors start … stop − 1, (c, units): differences of frozen, hence affine, passes."""
        x = self.inputs[0]
        k = gaussian.rank(x.numel())
        unit = torch.zeros(stop - start, k, dtype=x.dtype, device=x.device)
        unit[torch.arange(stop - start), torch.arange(start, stop)] = 1
        direction = gaussian.colour(unit)
        length = direction.norm(dim=1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
        with torch.no_grad():  # steps of length one, whatever σ: an affine function does not mind, rounding does
            run = self._frozen(x + (direction / length).reshape(-1, *x.shape), owner.expand(stop - start))
            moved = [run.pre[i] - p for i, p in zip(self.bent, self.pre, strict=True)]
        return torch.cat([m.flatten(1) for m in moved], 1) * length

    def _back(self, weights: Tensor, owner: Tensor) -> Tensor:
        """Σ_k weights_k J_k for each row of (c, units), (c, d)."""
        x = self.inputs[0]
        leaf = x.expand(len(weights), *x.shape).detach().clone().requires_grad_()
        run = self._frozen(leaf, owner.expand(len(weights)))
        total, first = leaf.new_zeros(()), 0
        for i in self.bent:
            flat = run.pre[i].flatten(1)
            total = total + (weights[:, first : first + flat.shape[1]].to(flat) * flat).sum()
            first += flat.shape[1]
        return torch.autograd.grad(total, leaf)[0].flatten(1)

    def _weights(self, tau: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of j_k j_kᵀ in W₁ and of j_k in Γ₁, (units,) each; units that do not move contribute nothing."""
        bend, lean, first = torch.zeros_like(tau), torch.zeros_like(tau), 0
        for i, pre, u in zip(self.bent, self.pre, self.sensitivity, strict=True):
            here = slice(first, first + pre.numel())
            t = tau[here]
            moves = t > 0
            for knot, jump in self.tape.calls[i].knots:
                weight = (u * _spread(jump, pre)).double().flatten()
                score = (pre.double().flatten() - knot) / torch.where(moves, t, 1.0)
                density = torch.exp(-score.square() / 2) / math.sqrt(2 * math.pi) / torch.where(moves, t, 1.0)
                bend[here] += torch.where(moves, weight * density, 0.0)
                step = torch.special.ndtr(score) - (score > 0).double()
                lean[here] += torch.where(moves, weight * step, 0.0)
            first += pre.numel()
        return bend, lean


def _flips(call: Call, moved: Tensor, pre: Tensor) -> Tensor:
    """Σ jump (1[moved > knot] − 1[pre > knot]) of each unit."""
    total = torch.zeros_like(moved)
    for knot, jump in call.knots:
        step = (moved > knot).to(moved.dtype) - (pre > knot).to(moved.dtype)
        total = total + step * _spread(jump, pre)
    return total


def _spread(jump: float | Tensor, like: Tensor) -> float | Tensor:
    """A slope jump, per channel perhaps, lined up with pre-activations (…, C, *)."""
    return jump.to(like) if isinstance(jump, Tensor) else jump


def _close(a: Tensor, b: Tensor) -> bool:
    return float((a - b).norm()) <= 1e-3 * float(b.norm()) + 1e-6
