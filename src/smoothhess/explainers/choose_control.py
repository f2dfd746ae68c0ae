"""The choice of the control variate: the control, or the reason for none.

The fields that are subtracted, and their weights, are in `smoothhess.curvature.control_variate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smoothhess.curvature.activation_hooks import OtherPathError
from smoothhess.curvature.control_variate import Control, Directions, Pilot, pilot_passes, thin_rank
from smoothhess.curvature.frozen_network import NoKinksError
from smoothhess.curvature.neuron_selection import select_neurons, selection_price
from smoothhess.curvature.one_flip import Kinks
from smoothhess.explainers.independent_kinks import Checked, check_independence
from smoothhess.explainers.sampler import Sampler
from smoothhess.linalg.memory import CLOSED_FORMS

PRICE = 1.5  # maximum passes of "auto" for the closed form and its pilot draws, per gradient call
WORTH = 3  # exponent: the unexplained share must be below (share of passes left for calls) to this power


@dataclass(frozen=True, eq=False)
class Choice:
    """A control variate, or the reason for none."""

    control: Control | None
    reason: str = ""  # empty if there is a control variate
    passes: float | Tensor = 0  # that the choice took, without those of the closed form, per example or (B,)
    kinks: Kinks | None = None  # the frozen model, if it was frozen
    can_be_frozen: bool = True  # False if freezing the model failed
    checked: Checked | None = None  # whether all kinks are recorded and independent
    pilot: Pilot | None = None  # the draws that the choice was based on


def with_control(sampler: Sampler, choice: Choice) -> Sampler:
    """The sampler with the chosen control variate, which counts the passes of the choice."""
    return replace(sampler, control=choice.control, extra_passes=sampler.extra_passes + choice.passes)


def choose_control(
    sampler: Sampler, wanted: str | None, seeds: Sequence[int], calls: float, tau_probes: int | None
) -> Choice:
    """Decide whether a run of `calls` gradient calls subtracts a control variate, and from which examples.

    `wanted` is the option `control`: None is never, "kink" always (ValueError if it is impossible), and "auto" where
    the closed form costs at most PRICE · calls and the pilot draws show that it reduces the total work, or all kinks
    are recorded and independent: then it is exact, and its weights are 1.
    """
    if wanted is None:
        return Choice(None, "control=None was passed")
    auto, inputs, k = wanted == "auto", sampler.inputs, sampler.rank
    directions = Directions(thin_rank(calls), tau_probes)
    size = len(inputs) * k * directions.rows(k) * inputs.element_size()
    if auto and size > CLOSED_FORMS.on(inputs.device):
        return Choice(None, f"the closed form of {len(inputs)} examples would hold {size / 2**30:.1f} GiB")
    passes = _exact_passes(sampler)
    try:
        kinks = frozen_model(sampler)
        least, most = directions.least_price(kinks, k), PRICE * calls - pilot_passes(k)
        if auto and least > most:
            return Choice(None, _too_expensive(least, k), passes, kinks)
        passes += 1  # one frozen pass at x
        kinks = sampler.share(kinks)
        checked = check_independence(sampler, kinks.network)
        independent = checked.independent
        passes = passes + checked.passes
        field = kinks
        if directions.selects(kinks, k) and not bool(independent.any()):  # otherwise the field is that of all kinks
            passes = passes + selection_price(kinks, k)
            field = select_neurons(kinks, sampler.gaussian)
        price = directions.prices(field, k)
        affordable = price <= most
        if auto and not bool(affordable.any()):
            return Choice(None, _too_expensive(float(price.min()), k), passes, kinks, checked=checked)
        passes = passes + pilot_passes(k)
        pilot = Pilot.draw(sampler.oracle, sampler.gaussian, field, seeds)
        chosen = torch.arange(len(inputs), device=inputs.device)
        if auto:
            unexplained = pilot.unexplained
            pays = (unexplained <= (calls / (calls + price)) ** WORTH) | independent
            chosen = torch.nonzero(pays & affordable).reshape(-1)
            if not len(chosen):
                least = f"{float(unexplained.min()):.0%} of the gradient's variation"
                reason = f"single flips do not explain {least}: not worth {float(price.min()):.0f} passes"
                return Choice(None, reason, passes, kinks, checked=checked, pilot=pilot)
        expected = directions.expectation(field, sampler.gaussian, chosen)
        weights = pilot.fit(expected, chosen, always=not auto)
        if expected.drift is None and not expected.hessian.is_thin:  # the field is that of all kinks
            weights[independent[chosen]] = 1.0
        control = Control.make(field, expected, weights, chosen, directions)
        return Choice(control, "", passes, kinks, checked=checked, pilot=pilot)
    except (NoKinksError, OtherPathError) as error:
        if auto:
            return Choice(None, str(error), passes, can_be_frozen=False)
        raise ValueError(f"control='kink' cannot be used: {error}. Pass control=None.") from error


def _too_expensive(price: float, k: int) -> str:
    return f"the closed form would take {price + pilot_passes(k):.0f} passes, more than the budget allows"


def given_control(
    sampler: Sampler,
    weights: Tensor,
    directions: Directions,
    refusal: str,
    layer_bytes: int = 0,
    *,
    all_neurons: bool = True,
) -> Choice:
    """The control variate with given weights, (B, 2); none if all of them are zero.

    The closed form has the part of each layer if these take at most `layer_bytes`; neurons may be left out unless
    `all_neurons`. If the model cannot be frozen, the ValueError begins with `refusal`.
    """
    try:
        kinks = sampler.share(frozen_model(sampler))
    except NoKinksError as error:
        raise ValueError(f"{refusal}: {error}. Use attribute with control=None.") from error
    passes = _exact_passes(sampler) + 1
    chosen = torch.nonzero(weights.any(1)).reshape(-1).to(sampler.inputs.device)
    if not len(chosen):
        return Choice(None, "its weights are zero", passes)
    if not all_neurons and directions.selects(kinks, sampler.rank):
        passes = passes + selection_price(kinks, sampler.rank)
        kinks = select_neurons(kinks, sampler.gaussian)
    size = len(kinks.network.bent) * len(sampler.inputs) * sampler.rank**2 * 8
    expected = directions.expectation(kinks, sampler.gaussian, chosen, layers=size <= layer_bytes)
    return Choice(Control.make(kinks, expected, weights[chosen], chosen, directions), "", passes)


def _exact_passes(sampler: Sampler) -> int:
    """Passes at the inputs in full precision, which the frozen model is compared with."""
    return int(sampler.oracle.precision != "float32")


def frozen_model(sampler: Sampler, warn: bool = True) -> Kinks:
    """The frozen model; raises NoKinksError if its activations cannot be recorded, as `FrozenNetwork.see`."""
    oracle, inputs = sampler.oracle, sampler.inputs
    value, gradient = sampler.unperturbed.value, sampler.unperturbed.gradient
    if _exact_passes(sampler):
        with oracle.exact():
            value, gradient = oracle(inputs, torch.arange(len(inputs), device=inputs.device))
    return Kinks.see(oracle, inputs, value, gradient, warn)
