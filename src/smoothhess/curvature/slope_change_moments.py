"""The change of slope of one activation call, and its moments under a Gaussian.

For a neuron a(z) whose pre-activation changes from z to z + τξ, ξ ~ N(0, 1), the one-flip Hessian needs

    bend = E[a''(z + τξ)] = E[ξ a'(z + τξ)]/τ      and      lean = E[a'(z + τξ)] − a'(z).

For kinks they have a closed form. For smooth activations they are computed by the trapezoidal rule, which for analytic
functions under a Gaussian converges faster than any power of its step. Softmax and normalisation layers mix their
inputs; for them the second derivative at z is used. Sums over neurons are in `one_flip`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from smoothhess.curvature.activation_hooks import Call
from smoothhess.model.process_flags import jvp

REACH = 9.0  # range of the trapezoidal rule in standard deviations
NODES = 160  # initial number of intervals, which is doubled until convergence
MOST_NODES = 5120
ACCURACY = 1e-10  # change at convergence, relative to the largest slope
CHUNK = 1 << 22  # evaluations of an activation per chunk


def is_modelled(call: Call) -> bool:
    """Whether the closed form includes the curvature of a call; other calls stay frozen, which only adds variance."""
    return bool(call.knots) or call.analytic or call.kind == "map"


def slope_change(call: Call, moved: Tensor, pre: Tensor) -> Tensor:
    """a'(moved) − a'(pre) of each neuron; `pre` broadcasts against `moved`."""
    if call.knots:
        total = torch.zeros_like(moved)
        for knot, jump in call.knots:
            step = (moved > knot).to(moved.dtype) - (pre > knot).to(moved.dtype)
            total = total + step * _lined_up(jump, moved)
        return total
    return _slope(call, moved) - _slope(call, pre)


def moments(call: Call, pre: Tensor, tau: Tensor) -> tuple[Tensor, Tensor] | None:
    """Bend and lean of each neuron in float64, shaped like `pre`; zero where τ = 0. None without convergence."""
    z, moves = pre.double(), tau > 0
    spread = torch.where(moves, tau, 1.0)
    if not call.knots:
        found = _quadrature(call, z.flatten(), spread.flatten())
        if found is None:
            return None
        bend, lean = (m.reshape(z.shape) for m in found)
        return torch.where(moves, bend, 0.0), torch.where(moves, lean, 0.0)
    bend, lean = torch.zeros_like(z), torch.zeros_like(z)
    for knot, jump in call.knots:
        jump = _lined_up(jump, z)
        score = (z - knot) / spread
        density = torch.exp(-score.square() / 2) / math.sqrt(2 * math.pi) / spread
        bend = bend + torch.where(moves, jump * density, 0.0)
        lean = lean + torch.where(moves, jump * (torch.special.ndtr(score) - (score > 0).double()), 0.0)
    return bend, lean


def second_derivative(call: Call, pre: Tensor, sensitivity: Tensor, direction: Tensor) -> Tensor:
    """∇²(u·m)(pre) applied to `direction` (b, n, …) for a call m that mixes its inputs; `pre`, u are (b, …)."""
    function = call.function
    assert function is not None
    rows = direction.flatten(0, 1)
    n = direction.shape[1]
    centre, u = (t.repeat_interleave(n, 0).to(rows) for t in (pre, sensitivity))

    def pulled(z: Tensor) -> Tensor:
        with torch.enable_grad():
            return torch.func.grad(lambda z: (u * function(z)).sum())(z)

    turned = jvp(pulled, centre.detach(), rows.detach())[1]
    return turned.detach().reshape(direction.shape)


def _quadrature(call: Call, z: Tensor, tau: Tensor) -> tuple[Tensor, Tensor] | None:
    """E[ξ a'(z + τξ)]/τ and E[a'(z + τξ)] − a'(z) for flat z and τ, or None."""
    own, last, intervals = _slope(call, z), None, NODES
    size = max(float(own.abs().max()) if len(own) else 0.0, 1e-300)
    while intervals <= MOST_NODES:
        nodes = torch.linspace(-REACH, REACH, intervals + 1, dtype=torch.float64, device=z.device)
        weight = torch.exp(-nodes.square() / 2)
        weight = weight / weight.sum()
        bend, lean = torch.empty_like(z), torch.empty_like(z)
        step = max(1, CHUNK // len(nodes))
        for part in torch.arange(len(z), device=z.device).split(step):
            change = _slope(call, z[part, None] + tau[part, None] * nodes) - own[part, None]
            bend[part] = change @ (weight * nodes)
            lean[part] = change @ weight
        now = torch.stack([bend, lean])
        if last is not None and float((now - last).abs().max()) <= ACCURACY * size:
            return bend / tau, lean
        last, intervals = now, 2 * intervals
    return None


def _slope(call: Call, z: Tensor) -> Tensor:
    function = call.function
    assert function is not None
    with torch.enable_grad():
        leaf = z.detach().requires_grad_()
        return torch.autograd.grad(function(leaf).sum(), leaf)[0]


def _lined_up(jump: float | Tensor, like: Tensor) -> float | Tensor:
    """A slope jump, one number or one per channel, for pre-activations (…, C, *)."""
    return jump.to(like) if isinstance(jump, Tensor) else jump
