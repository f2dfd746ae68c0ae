"""What the recorded activations tell about kinks that no or few draws cross.

`with_rare_flips` finds the neurons whose variance the draws do not show, and whether all kinks of the model are known.
The neurons themselves are found in `smoothhess.curvature.rare_flips`; whether a model has kinks at all is decided in
`no_kinks`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from smoothhess.curvature.activation_hooks import OtherPathError, freeze, record
from smoothhess.curvature.frozen_network import FrozenNetwork, NoKinksError, intercepted
from smoothhess.curvature.rare_flips import RareFlips, find_rare_flips, price
from smoothhess.curvature.unknown_operations import KINKED, SMOOTH, unknown_operations
from smoothhess.draws.designs import tau_rows
from smoothhess.explainers.choose_control import Choice, frozen_model
from smoothhess.explainers.sampler import Sampler

CHECK_DRAWS, REACH = 2, 3.0  # pairs of perturbed inputs x ± REACH δ at which kinks are compared with the frozen ones
AFFINE = 1e-3  # deviation of a pre-activation from the frozen one, relative to its change, that counts as none
CHECK_PASSES = 1 + 4 * CHECK_DRAWS  # one for the operations; per input a recorded, a frozen and a backward pass


def with_rare_flips(sampler: Sampler, choice: Choice) -> Sampler:
    """The sampler with the neurons of which a block of rows is expected to show too little; it counts their passes.

    Flips that a control variate subtracts are left out; models that cannot be frozen have none.
    """
    if sampler.oracle.precision != "float32" or not choice.can_be_frozen:
        return sampler
    control, passes = sampler.control, 0.0 if choice.kinks is not None else 1.0
    subtracted = torch.zeros(len(sampler.inputs), dtype=torch.bool, device=sampler.inputs.device)
    if control is not None and control.drift is None:
        subtracted = control.flip != 0
    try:
        kinks = frozen_model(sampler, warn=False) if choice.kinks is None else choice.kinks
        network = kinks.network
        if not any(call.knots for call in network.calls):
            return replace(sampler, extra_passes=sampler.extra_passes + passes)
        found = RareFlips.none(sampler.unperturbed.whitened)
        if not bool(subtracted.all()):
            found = find_rare_flips(network, sampler.gaussian).scaled((~subtracted).double())
            passes += price(sampler.rank)
        found = replace(found, complete=_all_kinks_are_known(sampler, network) & (subtracted | found.complete))
    except (NoKinksError, OtherPathError):
        return replace(sampler, extra_passes=sampler.extra_passes + passes)
    return replace(sampler, rare=found, extra_passes=sampler.extra_passes + passes + CHECK_PASSES)


def _all_kinks_are_known(sampler: Sampler, network: FrozenNetwork) -> Tensor:
    """Where all kinks are recorded and none depends on another, (B,): margins and jumps are then exact."""
    oracle, inputs, owner = sampler.oracle, sampler.inputs, network.everyone

    def forward(x: Tensor) -> Tensor:
        return oracle.pick(oracle.bound(owner)(x), owner)

    with intercepted(lambda: forward(inputs), warn=False):
        bent = set(unknown_operations(forward, inputs, oracle.forward_func)) - SMOOTH
        if bent - KINKED or network.unmodelled:
            return torch.zeros_like(owner, dtype=torch.bool)
        return _kinks_are_independent(sampler, network)


def _kinks_are_independent(sampler: Sampler, network: FrozenNetwork) -> Tensor:
    """Where the pre-activations and sensitivities of all kinks stay those of the frozen network, (B,).

    They are compared at a few inputs that are perturbed so far that most neurons flip.
    """
    oracle, inputs, owner = sampler.oracle, sampler.inputs, network.everyone
    draws = REACH * tau_rows(CHECK_DRAWS, sampler.rank, inputs)
    steps = sampler.gaussian.colour(torch.cat([draws, -draws]))  # (2 CHECK_DRAWS, d)
    count, found = len(steps), torch.ones_like(owner, dtype=torch.bool)
    for i in owner.split(max(1, oracle.batch_size // count)):
        part, each = network.select(i), i.repeat_interleave(count)
        points = (inputs[i].flatten(1)[:, None] + steps).reshape(-1, *inputs.shape[1:])
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
            centre, before, affine = (t.reshape(len(i), -1, *pre.shape[1:]) for t in (pre, u, expected.pre[n].detach()))
            moved, real = (affine - centre).abs(), run.pre[n].detach().reshape(affine.shape)
            eps = 64 * torch.finfo(pre.dtype).eps
            same = (real - affine).abs() <= AFFINE * moved + eps * centre.abs()
            largest = before.abs().amax(tuple(range(1, before.ndim)), keepdim=True)
            same &= (there.reshape(affine.shape) - before).abs() <= AFFINE * before.abs() + eps * largest
            found[i] &= same.reshape(len(i), -1).all(1)
    return found
