"""The field g̃ of single flips: the change of each neuron's slope, with all other neurons frozen.

g̃(δ) = Σ_k u_k (a'(z_k + J_kδ) − a'(z_k)) J_k is evaluated at given points: one frozen forward pass gives every
z_k + J_kδ, one frozen backward pass g̃. Its expectation is in `one_flip`, its use as a control variate in
`control_variate`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smoothhess.curvature.frozen_network import FrozenNetwork, intercepted
from smoothhess.curvature.slope_change_moments import second_derivative, slope_change
from smoothhess.linalg.memory import in_batches


def flips(network: FrozenNetwork, points: Tensor, index: Tensor, mirrored: bool) -> tuple[Tensor, Tensor]:
    """Odd and even part of g̃ at points (b, n, *shape) of the examples at `index`, each of that shape.

    If not `mirrored`, both are g̃ itself. The frozen network is affine, so the mirror image of a point needs no
    additional forward pass.
    """
    return own_flips(network.select(index), points, index, mirrored)


def own_flips(network: FrozenNetwork, points: Tensor, owner: Tensor, mirrored: bool) -> tuple[Tensor, Tensor]:
    """`flips` for all examples of the network; `owner` are their indices in the oracle."""
    oracle = network.oracle
    found = in_batches(
        lambda rows: _checked_flips(network, points[:, rows], owner, mirrored),
        points.shape[1],
        lambda _: max(1, oracle.batch_size // len(points)),
        lambda n: oracle.take_fewer(n * len(points), least=len(points)),
    )
    odd, even = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    return odd, even


def _checked_flips(network: FrozenNetwork, points: Tensor, owner: Tensor, mirrored: bool) -> tuple[Tensor, Tensor]:
    each = owner.repeat_interleave(points.shape[1])
    with intercepted(lambda: network.oracle.bound(each)(points.flatten(0, 1))):
        return _flips(network, points, owner, mirrored)


def _flips(network: FrozenNetwork, points: Tensor, owner: Tensor, mirrored: bool) -> tuple[Tensor, Tensor]:
    b, n = points.shape[:2]
    leaf = points.flatten(0, 1).detach().requires_grad_()
    run = network.run(leaf, owner.repeat_interleave(n))
    odd, even = leaf.new_zeros(()), leaf.new_zeros(())
    for i, call, pre, u in zip(network.bent, network.calls, network.pre, network.sensitivity, strict=True):
        grouped = run.pre[i].unflatten(0, (b, n))
        moved, centre = grouped.detach(), pre[:, None]
        if call.kind == "map":
            odd = odd + (second_derivative(call, pre, u, moved - centre) * grouped).sum()
            continue
        there = slope_change(call, moved, centre) * u[:, None]
        if mirrored:
            back = slope_change(call, 2 * centre - moved, centre) * u[:, None]
            even = even + ((there + back) / 2 * grouped).sum()
            there = (there - back) / 2
        odd = odd + (there * grouped).sum()
    wanted = [odd, even] if mirrored else [odd]
    gradients = [
        torch.autograd.grad(total, leaf, retain_graph=i + 1 < len(wanted), allow_unused=True)[0]
        if total.requires_grad
        else None
        for i, total in enumerate(wanted)
    ]
    filled = [torch.zeros_like(points) if g is None else g.reshape(points.shape) for g in gradients]
    return filled[0], filled[-1]
