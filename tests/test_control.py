"""Weights of the control variate: when it pays, and what it costs."""

import itertools

import pytest
import torch
from torch import nn

from smoothhess import Isotropic, SmoothHess
from smoothhess.control import FLIPS_PER_PAIR, pilot_passes
from tests.truths import OneHidden


def mlp(d, *widths, seed=3):
    torch.manual_seed(seed)
    layers = []
    for a, b in itertools.pairwise([d, *widths]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1)).double()


@pytest.fixture(scope="module")
def x():
    return torch.randn(3, 20, generator=torch.Generator().manual_seed(0)).double()


def test_one_hidden_layer_is_taken_whole(x):
    result = SmoothHess(OneHidden(20)).attribute(x, sigma=0.4, n_calls=200)
    torch.testing.assert_close(result.control_weights, torch.ones(3, 2).double(), rtol=0, atol=1e-9)
    assert (result.relative_error < 1e-6).all()


def test_where_many_units_flip_the_passes_go_into_rows(x):
    net = mlp(20, 40, 40, 40, 40)
    near, far = (SmoothHess(net).attribute(x, sigma=sigma, n_calls=200) for sigma in (0.01, 8.0))
    assert near.control == far.control == "kink"
    assert (near.control_weights[:, 1] > 0.5).all()
    assert (far.control_weights[:, 1] == 0).all()
    price = 2 + 1 + 20 / 2 + pilot_passes(20)
    assert far.n_passes.tolist() == [200 + price] * 3
    assert near.n_passes.tolist() == [200 + price + 100 * FLIPS_PER_PAIR] * 3


def test_examples_choose_for_themselves_and_do_not_see_each_other(x):
    """Near a kink and far from all of them, in one batch and alone."""
    net = mlp(20, 30, 30)
    inputs = torch.cat([x, 30 * x])
    batch = SmoothHess(net).attribute(inputs, sigma=1.0, n_calls=120)
    for i in range(6):
        one = SmoothHess(net).attribute(inputs[i : i + 1], sigma=1.0, n_calls=120)
        torch.testing.assert_close(one.control_weights[0], batch.control_weights[i], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(one.hessian[0], batch.hessian[i], rtol=1e-6, atol=1e-9)
        assert one.n_passes[0] == batch.n_passes[i]


def test_weights_come_from_draws_of_their_own(x):
    """The rows that are sampled are those of a run without control."""
    net = mlp(20, 30, 30)
    with_control, without = (
        SmoothHess(net).attribute(x, sigma=0.3, n_calls=60, control=control, shrink=False) for control in ("kink", None)
    )
    torch.testing.assert_close(with_control.statistics.head.score, without.statistics.head.score)
    torch.testing.assert_close(with_control.value, without.value)


def test_price_above_the_budget(x):
    net = mlp(20, 30)
    assert SmoothHess(net).attribute(x, sigma=0.3, n_calls=20).control is None
    assert SmoothHess(net).attribute(x, sigma=0.3, n_calls=40).control == "kink"
    assert SmoothHess(net).attribute(x, sigma=0.3, max_calls=80).control is None  # 3/8 of it must do
    assert SmoothHess(net).attribute(x, sigma=0.3, max_calls=160).control == "kink"


def test_more_goes_on_with_the_same_weights(x):
    explainer, options = SmoothHess(mlp(20, 30, 30)), {"sigma": 0.3, "control": "kink"}
    whole = explainer.attribute(x, n_calls=120, **options)
    grown = explainer.more(explainer.attribute(x, n_calls=60, **options), 60)
    torch.testing.assert_close(grown.hessian, whole.hessian, rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(grown.relative_error, whole.relative_error, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("activation", [nn.GELU, nn.SiLU, nn.Tanh, nn.Softplus])
def test_smooth_activations_pay_as_well(activation):
    """Averaged second derivatives against frozen slopes, that is no control at all, at equal passes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 40), activation(), nn.Linear(40, 40), activation(), nn.Linear(40, 1)).double()
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).double()
    truth = SmoothHess(net).attribute(x, sigma=0.5, n_calls=80_000, seed=9, control="kink", shrink=False).hessian
    with_control = SmoothHess(net).attribute(x, sigma=0.5, n_calls=320, shrink=False)
    calls = 2 * round(float(with_control.n_passes.max()) / 2)
    without = SmoothHess(net).attribute(x, sigma=0.5, n_calls=calls, control=None, shrink=False)
    errors = [(r.hessian - truth).norm(dim=(1, 2)).mean() for r in (with_control, without)]
    assert errors[0] < 0.75 * errors[1]


def test_a_softmax_head_is_part_of_it():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 5), nn.Softmax(-1)).double()
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).double()
    with_control, without = (
        SmoothHess(net).attribute(x, 0, gaussian=Isotropic(0.05), n_calls=160, control=control, shrink=False)
        for control in ("kink", None)
    )
    assert (with_control.relative_error < 0.5 * without.relative_error).all()
