"""Neurons that few draws flip, for the errors of a run.

They are found in `smoothhess.curvature.rare_flips`. Whether they are all that the draws may miss is decided in
`independent_kinks`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from smoothhess.curvature.activation_hooks import OtherPathError
from smoothhess.curvature.frozen_network import NoKinksError
from smoothhess.explainers.choose_control import Choice, frozen_model
from smoothhess.explainers.independent_kinks import check_independence
from smoothhess.explainers.sampler import Sampler


def with_rare_flips(sampler: Sampler, choice: Choice) -> Sampler:
    """The sampler with the neurons of which a block of rows is expected to show too little; it counts their passes.

    They are used where all kinks are independent, so that margins and jumps are exact. Flips that a control variate
    subtracts are left out; models that cannot be frozen have none.
    """
    if sampler.oracle.precision != "float32" or not choice.can_be_frozen:
        return sampler
    control, passes = sampler.control, sampler.extra_passes + (choice.kinks is None)
    subtracted = torch.zeros(len(sampler.inputs), dtype=torch.bool, device=sampler.inputs.device)
    if control is not None and control.drift is None:
        subtracted = control.flip != 0
    try:
        kinks = frozen_model(sampler, warn=False) if choice.kinks is None else choice.kinks
        if not any(call.knots for call in kinks.network.calls):
            return replace(sampler, extra_passes=passes)
        checked = choice.checked
        if checked is None:
            checked = check_independence(sampler, kinks.network)
            passes = passes + checked.passes
    except (NoKinksError, OtherPathError):
        return replace(sampler, extra_passes=passes)
    if checked.flips is None or not bool(checked.independent.any()):
        return replace(sampler, extra_passes=passes)
    left = checked.independent & ~subtracted  # flips that are in the rows
    complete = checked.independent & (subtracted | checked.flips.complete)
    rare = replace(checked.flips.scaled(left), complete=complete)
    if sampler.strata is not None:  # where flips are sampled separately
        rare = rare.without(sampler.strata.direction, sampler.strata.margin)
    return replace(sampler, rare=rare, extra_passes=passes)
