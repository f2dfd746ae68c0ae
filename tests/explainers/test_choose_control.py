"""The choice of the control variate: a control or a reason, and the passes that it took."""

from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import nn

from smoothhess import Isotropic
from smoothhess.curvature.control_variate import Directions, pilot_passes
from smoothhess.draws.designs import find_design
from smoothhess.explainers.choose_control import choose_control, given_control, with_control
from smoothhess.explainers.sampler import CENTRE_PASSES, Sampler
from smoothhess.model.gradients import Oracle

X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)).double()


def sampler(sigma=0.1, model=None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 1)).double() if model is None else model
    return Sampler.start(Oracle(net, X), X, Isotropic(sigma), find_design("orthogonal"))


@pytest.mark.parametrize("wanted", ["auto", "kink"])
def test_a_control_has_no_reason(wanted):
    before = sampler()
    choice = choose_control(before, wanted, [0, 1, 2], 1000, None)
    assert choice.control is not None
    assert choice.reason == ""
    check = 1 + 4 * 4 + 6 / 2 + 2 * 8  # that kinks are independent: operations, perturbed inputs, neurons, their kinks
    assert (choice.passes == 1 + pilot_passes(6) + check).all()
    after = with_control(before, choice)
    assert (before.control, before.extra_passes) == (None, CENTRE_PASSES)
    assert after.control is choice.control
    assert (after.extra_passes == CENTRE_PASSES + choice.passes).all()


@pytest.mark.parametrize(
    ("wanted", "calls", "model", "reason", "passes"),
    [
        (None, 1000, None, "control=None was passed", 0),
        ("auto", 10, None, "more than the budget allows", 0),
        ("auto", 1000, lambda x: x.prod(1), "no ReLU-like or smooth activation", 0),
    ],
)
def test_without_a_control_there_is_a_reason(wanted, calls, model, reason, passes):
    choice = choose_control(sampler(model=model), wanted, [0, 1, 2], calls, None)
    assert choice.control is None
    assert reason in choice.reason
    assert choice.passes == passes


def test_a_control_that_was_demanded_raises():
    with pytest.raises(ValueError, match=r"control='kink' cannot be used: no ReLU-like.*Pass control=None"):
        choose_control(sampler(model=lambda x: x.prod(1)), "kink", [0, 1, 2], 1000, None)


def test_given_weights_are_used_for_their_examples():
    weights = torch.tensor([[1.0, 0.5], [0.0, 0.0], [0.25, 0.0]]).double()
    control = given_control(sampler(), weights, Directions(), "impossible").control
    assert torch.equal(torch.stack([control.linear, control.flip], 1), weights)
    assert bool((control.expected.hessian.dense()[1] == 0).all())
    assert given_control(sampler(), torch.zeros(3, 2), Directions(), "impossible").control is None


def test_a_sampler_is_frozen():
    with pytest.raises(FrozenInstanceError):
        sampler().control = None
