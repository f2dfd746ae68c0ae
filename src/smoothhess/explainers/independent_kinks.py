"""Whether all kinks of a model are recorded and independent of each other, as in networks with one hidden layer.

Margins and jumps of the frozen network are then exact, and so is the control variate. Whether a model has kinks at all
is decided in `no_kinks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from smoothhess.curvature.activation_hooks import OtherPathError, freeze, record
from smoothhess.curvature.frozen_network import FrozenNetwork, NoKinksError, intercepted
from smoothhess.curvature.rare_flips import FARTHEST, RARE, RareFlips, chance, find_rare_flips, price
from smoothhess.curvature.unknown_operations import KINKED, operations
from smoothhess.draws.designs import tau_rows
from smoothhess.explainers.sampler import Sampler

REACHES = (10.0, 3.0, 30.0, 100.0)  # x ± reach · δ are the inputs at which kinks are compared with the frozen ones
CROSSED, STEP = 8, 0.5  # neurons that are pushed beyond their kinks, and the distance beyond it in units of τ
AFFINE = 1e-3  # deviation of a pre-activation from the frozen one, relative to its change, that counts as none


class Checked(NamedTuple):
    """The result of `check_independence` for B examples."""

    independent: Tensor  # (B,) where all kinks are recorded and none depends on another
    flips: RareFlips | None  # neurons that few draws flip, if they were needed
    passes: Tensor  # (B,)


def check_independence(sampler: Sampler, network: FrozenNetwork) -> Checked:
    """Where all kinks are recorded and none depends on another; other operations must be polynomial."""
    oracle, inputs, owner = sampler.oracle, sampler.inputs, network.everyone
    no = torch.zeros_like(owner, dtype=torch.bool)
    knotted = sum(bool(call.knots) for call in network.calls)
    if oracle.precision != "float32" or not knotted:
        return Checked(no, None, torch.zeros_like(owner, dtype=torch.float64))

    def forward(x: Tensor) -> Tensor:
        return oracle.pick(oracle.bound(owner)(x), owner)

    passes = torch.ones_like(owner, dtype=torch.float64)
    try:
        with intercepted(lambda: forward(inputs)):
            seen = operations(forward, inputs, oracle.forward_func)
            if set(seen.unknown) - KINKED or seen.kinked != knotted or network.unmodelled:
                return Checked(no, None, passes)
            found = ~no
            for reaches in (REACHES[:1], REACHES[1:]):  # most deep networks differ at the first of them
                passes = passes + 4 * len(reaches) * found
                found = _at_draws(sampler, network, reaches, found)
                if not bool(found.any()):
                    return Checked(found, None, passes)
            flips = find_rare_flips(network, sampler.gaussian)
            passes = passes + (price(sampler.rank) + 2 * CROSSED) * found
            return Checked(_beyond_their_kinks(sampler, network, flips, found), flips, passes)
    except (NoKinksError, OtherPathError):
        return Checked(no, None, passes)


def _at_draws(sampler: Sampler, network: FrozenNetwork, reaches: Sequence[float], found: Tensor) -> Tensor:
    """Of the examples in `found`, those whose kinks are the frozen ones at x ± reach · δ, a δ for each reach, (B,)."""
    draws = tau_rows(len(REACHES), sampler.rank, sampler.inputs)[[REACHES.index(r) for r in reaches]]
    draws = draws * torch.tensor(reaches).to(draws)[:, None]
    steps = sampler.gaussian.colour(torch.cat([draws, -draws]))  # (2 reaches, d)
    return _same_kinks(network, found, lambda examples: steps.expand(len(examples), -1, -1))


def _beyond_their_kinks(sampler: Sampler, network: FrozenNetwork, flips: RareFlips, found: Tensor) -> Tensor:
    """The same at points just beyond the kinks of the neurons that few draws flip."""
    rare = (chance(flips.margin) < RARE) & (flips.margin < FARTHEST)
    step = torch.where(rare, flips.margin + STEP, 0.0)[..., None] * flips.direction
    steps = sampler.gaussian.colour(step[:, :CROSSED].to(sampler.inputs))  # (B, CROSSED, d)
    return _same_kinks(network, found, lambda examples: steps[examples])


def _same_kinks(network: FrozenNetwork, found: Tensor, steps: Callable[[Tensor], Tensor]) -> Tensor:
    """Of the examples in `found`, those whose kinks stay the frozen ones at x + steps (b, n, d), (B,).

    Compared are the pre-activations, which must be affine, and the sensitivities of the neurons, which must not change.
    """
    oracle, kept = network.oracle, found.clone()
    wanted = torch.nonzero(found).reshape(-1)
    count = steps(wanted[:1]).shape[1] if len(wanted) else 1
    for i in wanted.split(max(1, oracle.batch_size // count)):
        part, each, inputs = network.select(i), i.repeat_interleave(count), network.inputs[i]
        points = (inputs.flatten(1)[:, None] + steps(i)).reshape(-1, *inputs.shape[1:])
        expected = part.run(points, each)
        tape = record(oracle.bound(each), points)
        if len(tape.calls) != len(network.tape.calls):
            raise OtherPathError("perturbed inputs make other activation calls.")
        leaf = points.detach().requires_grad_()
        with torch.enable_grad():
            run = freeze(oracle.bound(each), tape, leaf)
            output = oracle.pick(run.output, each).sum()
        places = [n for n, call in zip(part.bent, part.calls, strict=True) if call.knots]
        sensitivity = torch.autograd.grad(
            output, [run.post[n] for n in places], allow_unused=True, materialize_grads=True
        )
        own = [(p, u) for call, p, u in zip(part.calls, part.pre, part.sensitivity, strict=True) if call.knots]
        for n, there, (pre, u) in zip(places, sensitivity, own, strict=True):
            shape = (len(i), -1, *pre.shape[1:])
            centre, before, affine = (t.reshape(shape) for t in (pre, u, expected.pre[n].detach()))
            moved, real = (affine - centre).abs(), run.pre[n].detach().reshape(affine.shape)
            eps = 64 * torch.finfo(pre.dtype).eps
            same = (real - affine).abs() <= AFFINE * moved + eps * centre.abs()
            largest = before.abs().amax(tuple(range(1, before.ndim)), keepdim=True)
            same &= (there.reshape(affine.shape) - before).abs() <= AFFINE * before.abs() + eps * largest
            kept[i] &= same.reshape(len(i), -1).all(1)
    return kept
