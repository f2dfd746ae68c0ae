"""What the recorded activations tell about kinks that no or few draws cross.

`with_rare_flips` finds the neurons whose variance the draws do not show, and whether all kinks of the model are known.
The neurons themselves are found in `smoothhess.curvature.rare_flips`; whether a model has kinks at all is decided in
`no_kinks`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from smoothhess.curvature.activation_hooks import OtherPathError, record
from smoothhess.curvature.frozen_network import FrozenNetwork, NoKinksError, intercepted
from smoothhess.curvature.rare_flips import RareFlips, find_rare_flips, price
from smoothhess.curvature.unknown_operations import KINKED, SMOOTH, unknown_operations
from smoothhess.draws.designs import tau_rows
from smoothhess.explainers.choose_control import Choice, frozen_model
from smoothhess.explainers.sampler import Sampler

REACHES = (1.0, 3.0)  # distances, in units of sigma, at which pre-activations are compared with the frozen ones
AFFINE = 1e-3  # deviation of a pre-activation from the frozen one, relative to its change, that counts as none
CHECK_PASSES = 3  # one for the operations, and two frozen and two recorded forward passes


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
    """Where all kinks are recorded and none depends on another, (B,): margins of the frozen network are then exact."""
    oracle, inputs, owner = sampler.oracle, sampler.inputs, network.everyone
    no = torch.zeros_like(owner, dtype=torch.bool)

    def forward(x: Tensor) -> Tensor:
        return oracle.pick(oracle.bound(owner)(x), owner)

    with intercepted(lambda: forward(inputs), warn=False):
        bent = set(unknown_operations(forward, inputs, oracle.forward_func)) - SMOOTH
        if bent - KINKED or network.unmodelled:
            return no
        return _pre_activations_are_affine(sampler, network)


def _pre_activations_are_affine(sampler: Sampler, network: FrozenNetwork) -> Tensor:
    """Where the pre-activations of all kinks are those of the frozen network at a few perturbed inputs, (B,)."""
    oracle, inputs, owner = sampler.oracle, sampler.inputs, network.everyone
    found = torch.ones_like(owner, dtype=torch.bool)
    for draw, reach in zip(tau_rows(len(REACHES), sampler.rank, inputs), REACHES, strict=True):
        points = inputs + sampler.gaussian.colour(reach * draw[None]).reshape(1, *inputs.shape[1:])
        with torch.no_grad():
            real, frozen = record(oracle.bound(owner), points), network.run(points, owner)
        if len(real.calls) != len(network.tape.calls):
            return torch.zeros_like(found)
        for i, pre in zip(network.bent, network.pre, strict=True):
            if not network.tape.calls[i].knots:
                continue
            moved, rounding = (frozen.pre[i] - pre).abs(), 64 * torch.finfo(pre.dtype).eps * pre.abs()
            off = (real.calls[i].pre - frozen.pre[i]).abs() > AFFINE * moved + rounding
            found = found & ~off.reshape(len(off), -1).any(1)
    return found
