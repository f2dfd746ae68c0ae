"""The change of slope and value of one activation call, and their moments under a Gaussian.

For a neuron a(z) whose pre-activation changes from z to z + τξ, ξ ~ N(0, 1), the one-flip Hessian, gradient and value
need

    bend = E[a''(z + τξ)] = E[ξ a'(z + τξ)]/τ,   lean = E[a'(z + τξ)] − a'(z)   and   rise = E[a(z + τξ)] − a(z).

For kinks they have a closed form. For smooth activations they are computed by the trapezoidal rule, which for analytic
functions under a Gaussian converges faster than any power of its step. Softmax and normalisation layers mix their
inputs; for them the second derivative at z is used. The "neurons" of max-pooling are the gaps between candidates of a
window (`window_maximum`). Sums over neurons are in `one_flip`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from smoothhess.curvature.activation_hooks import Call
from smoothhess.curvature.window_maximum import exceeded, moments_of_maximum, switched
from smoothhess.model.process_flags import jvp

REACH = 9.0  # range of the trapezoidal rule in standard deviations
NODES = 160  # initial number of intervals, which is doubled until convergence
MOST_NODES = 5120
ACCURACY = 1e-10  # change at convergence, relative to the largest slope
CHUNK = 1 << 22  # evaluations of an activation per chunk


def is_modelled(call: Call) -> bool:
    """Whether the closed form includes the curvature of a call; other calls stay frozen, which only adds variance."""
    return bool(call.knots) or call.analytic or call.kind in ("map", "max_pool")


def slope_change(call: Call, moved: Tensor, pre: Tensor) -> Tensor:
    """a'(moved) − a'(pre) of each neuron; `pre` broadcasts against `moved`."""
    if call.kind == "max_pool":
        return switched(moved)
    if call.knots:
        return _sum(_jumps(knot, jump, moved, pre) for knot, jump in call.knots)
    return _slope(call, moved) - _slope(call, pre)


def value_change(call: Call, moved: Tensor, pre: Tensor) -> Tensor:
    """a(moved) − a(pre) − a'(pre)(moved − pre) of each neuron; `pre` broadcasts against `moved`."""
    if call.kind == "max_pool":
        return exceeded(moved)
    if call.knots:
        return _sum(_jumps(knot, jump, moved, pre) * (moved - knot) for knot, jump in call.knots)
    function = call.function
    assert function is not None
    return function(moved) - function(pre) - _slope(call, pre) * (moved - pre)


class Moments(NamedTuple):
    """Bend, lean and rise of neurons."""

    bend: Tensor
    lean: Tensor
    rise: Tensor


def moments(call: Call, pre: Tensor, tau: Tensor) -> Moments | None:
    """Those of each neuron in float64, shaped like `pre`; zero where τ = 0. None without convergence."""
    if call.kind == "max_pool":
        return Moments(*moments_of_maximum(pre, tau))
    z, moves = pre.double(), tau > 0
    spread = torch.where(moves, tau, 1.0)
    if not call.knots:
        found = _quadrature(call, z.flatten(), spread.flatten())
        if found is None:
            return None
        return Moments(*(torch.where(moves, m.reshape(z.shape), 0.0) for m in found))
    bend, lean, rise = torch.zeros_like(z), torch.zeros_like(z), torch.zeros_like(z)
    for knot, jump in call.knots:
        jump = _lined_up(jump, z)
        score = (z - knot) / spread
        density = torch.exp(-score.square() / 2) / math.sqrt(2 * math.pi) / spread
        bend = bend + torch.where(moves, jump * density, 0.0)
        lean = lean + torch.where(moves, jump * (torch.special.ndtr(score) - (score > 0).double()), 0.0)
        beyond = spread * (spread * density - score.abs() * torch.special.ndtr(-score.abs()))
        rise = rise + torch.where(moves, jump * beyond, 0.0)
    return Moments(bend, lean, rise)


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


def _quadrature(call: Call, z: Tensor, tau: Tensor) -> Moments | None:
    """The moments for flat z and τ, or None."""
    own, last, intervals = _slope(call, z), None, NODES
    function = call.function
    assert function is not None
    size = max(float(own.abs().max()) if len(own) else 0.0, 1e-300)
    while intervals <= MOST_NODES:
        nodes = torch.linspace(-REACH, REACH, intervals + 1, dtype=torch.float64, device=z.device)
        weight = torch.exp(-nodes.square() / 2)
        weight = weight / weight.sum()
        bend, lean, rise = torch.empty_like(z), torch.empty_like(z), torch.empty_like(z)
        step = max(1, CHUNK // len(nodes))
        for part in torch.arange(len(z), device=z.device).split(step):
            moved = z[part, None] + tau[part, None] * nodes
            change = _slope(call, moved) - own[part, None]
            bend[part] = change @ (weight * nodes)
            lean[part] = change @ weight
            rise[part] = (function(moved) - function(z[part, None])) @ weight
        now = torch.stack([bend, lean])
        if last is not None and float((now - last).abs().max()) <= ACCURACY * size:
            return Moments(bend / tau, lean, rise)
        last, intervals = now, 2 * intervals
    return None


def _slope(call: Call, z: Tensor) -> Tensor:
    function = call.function
    assert function is not None
    with torch.enable_grad():
        leaf = z.detach().requires_grad_()
        return torch.autograd.grad(function(leaf).sum(), leaf)[0]


def _jumps(knot: float, jump: float | Tensor, moved: Tensor, pre: Tensor) -> Tensor:
    """The change of slope at one knot between `pre` and `moved`."""
    return ((moved > knot).to(moved.dtype) - (pre > knot).to(moved.dtype)) * _lined_up(jump, moved)


def _sum(terms: Iterable[Tensor]) -> Tensor:
    first, *others = terms
    return sum(others, first)


def _lined_up(jump: float | Tensor, like: Tensor) -> float | Tensor:
    """A slope jump, one number or one per channel, for pre-activations (…, C, *)."""
    return jump.to(like) if isinstance(jump, Tensor) else jump
