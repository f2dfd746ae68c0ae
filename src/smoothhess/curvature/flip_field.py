"""The field g̃ of single flips: the change of each neuron's slope, with all other neurons frozen.

g̃(δ) = Σ_k u_k (a'(z_k + J_kδ) − a'(z_k)) J_k is evaluated at given points, with its potential, of which it is the
gradient: one frozen forward pass gives every z_k + J_kδ, one frozen backward pass g̃. Its expectation is in `one_flip`,
its use as a control variate in `control_variate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from smoothhess.curvature.activation_hooks import Call
from smoothhess.curvature.frozen_network import FrozenNetwork, intercepted
from smoothhess.curvature.slope_change_moments import second_derivative, slope_change, value_change
from smoothhess.linalg.memory import in_batches


class Flips(NamedTuple):
    """g̃ at points (b, n, *shape)."""

    odd: Tensor  # (b, n, *shape)
    even: Tensor  # (b, n, *shape)
    value: Tensor  # (b, n) even part of the potential, float64


def flips(network: FrozenNetwork, points: Tensor, index: Tensor, mirrored: bool) -> Flips:
    """Odd and even part of g̃ at points (b, n, *shape) of the examples at `index`.

    If not `mirrored`, they are g̃ and its potential themselves. The frozen network is affine, so the mirror image of a
    point needs no additional forward pass.
    """
    return own_flips(network.select(index), points, index, mirrored)


def own_flips(network: FrozenNetwork, points: Tensor, owner: Tensor, mirrored: bool) -> Flips:
    """`flips` for all examples of the network; `owner` are their indices in the oracle."""
    return Flips(*_in_batches(network, points, owner, partial(_flips, mirrored=mirrored)))


def odd_flips(network: FrozenNetwork, points: Tensor, owner: Tensor) -> Tensor:
    """The odd part only, as of `own_flips` with mirror images: one backward pass less."""
    return _in_batches(network, points, owner, _odd_flips)[0]


_Evaluate = Callable[[FrozenNetwork, Tensor, Tensor], tuple[Tensor, ...]]


def _in_batches(network: FrozenNetwork, points: Tensor, owner: Tensor, evaluate: _Evaluate) -> tuple[Tensor, ...]:
    oracle = network.oracle

    def some(rows: slice) -> tuple[Tensor, ...]:
        part = points[:, rows]
        with intercepted(lambda: oracle.bound(owner.repeat_interleave(part.shape[1]))(part.flatten(0, 1))):
            return evaluate(network, part, owner)

    found = in_batches(
        some,
        points.shape[1],
        lambda _: max(1, oracle.batch_size // len(points)),
        lambda n: oracle.take_fewer(n * len(points), least=len(points)),
    )
    return tuple(parts[0] if len(parts) == 1 else torch.cat(parts, 1) for parts in zip(*found, strict=True))


class _Moved(NamedTuple):
    """The neurons of one call at points (b, n, *shape), in a frozen pass."""

    call: Call
    affine: Tensor  # (b·n, …) pre-activations, which the input can be reached from by autograd
    there: Tensor  # (b, n, …) the same without graph
    pre: Tensor  # (b, 1, …) at the inputs
    u: Tensor  # (b, 1, …) sensitivities


def _moved(network: FrozenNetwork, leaf: Tensor, owner: Tensor, b: int, n: int) -> list[_Moved]:
    run = network.run(leaf, owner.repeat_interleave(n))
    each = zip(network.calls, network.units(run), network.pre, network.sensitivity, strict=True)
    return [_Moved(call, t, t.detach().unflatten(0, (b, n)), pre[:, None], u[:, None]) for call, t, pre, u in each]


def _flips(network: FrozenNetwork, points: Tensor, owner: Tensor, mirrored: bool) -> Flips:
    b, n = points.shape[:2]
    leaf = points.flatten(0, 1).detach().requires_grad_()
    odd, even, value = [], [], leaf.new_zeros(b, n, dtype=torch.float64)
    moved = _moved(network, leaf, owner, b, n)
    for call, _, there, pre, u in moved:
        if call.kind == "map":
            turned = second_derivative(call, pre[:, 0], u[:, 0], there - pre)
            odd.append(turned)
            even.append(torch.zeros_like(turned))
            risen = turned * (there - pre) / 2
        elif mirrored:
            both = torch.stack([there, 2 * pre - there])  # (2, b, n, …)
            slope, risen = slope_change(call, both, pre), value_change(call, both, pre).mean(0) * u
            odd.append((slope[0] - slope[1]) / 2 * u)
            even.append(slope.mean(0) * u)
        else:
            odd.append(slope_change(call, there, pre) * u)
            risen = value_change(call, there, pre) * u
        value = value + risen.reshape(b, n, -1).sum(2, dtype=torch.float64)
    wanted = [odd, even] if mirrored else [odd]
    pulled = [_pulled(moved, part, leaf, more=part is not wanted[-1]).reshape(points.shape) for part in wanted]
    return Flips(pulled[0], pulled[-1], value)


def _odd_flips(network: FrozenNetwork, points: Tensor, owner: Tensor) -> tuple[Tensor]:
    b, n = points.shape[:2]
    leaf = points.flatten(0, 1).detach().requires_grad_()
    moved, weights = _moved(network, leaf, owner, b, n), []
    for call, _, there, pre, u in moved:
        if call.kind == "map":
            weights.append(second_derivative(call, pre[:, 0], u[:, 0], there - pre))
        else:
            slope = slope_change(call, torch.stack([there, 2 * pre - there]), pre)
            weights.append((slope[0] - slope[1]) / 2 * u)
    return (_pulled(moved, weights, leaf).reshape(points.shape),)


def _pulled(moved: Sequence[_Moved], weights: Sequence[Tensor], leaf: Tensor, more: bool = False) -> Tensor:
    """Σ_k weights_k J_k, shaped like `leaf`; `more`: another backward pass follows."""
    total = sum(((m.affine * w.flatten(0, 1)).sum() for m, w in zip(moved, weights, strict=True)), leaf.new_zeros(()))
    if not total.requires_grad:
        return torch.zeros_like(leaf)
    (found,) = torch.autograd.grad(total, leaf, retain_graph=more, allow_unused=True)
    return torch.zeros_like(leaf) if found is None else found
