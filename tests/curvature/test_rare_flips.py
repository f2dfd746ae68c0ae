"""Neurons that few draws flip, against margins and jumps computed by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from smoothhess import Dense, Isotropic, SmoothHess
from smoothhess.curvature.one_flip import Kinks
from smoothhess.curvature.rare_flips import NEURONS, RareFlips, find_rare_flips
from smoothhess.model.gradients import Oracle

F64 = torch.float64


def frozen(model, x):
    oracle = Oracle(model, x)
    value, gradient = oracle(x, torch.arange(len(x)))
    return Kinks.see(oracle, x, value, gradient).network


def single_layer(d, neurons, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(d, neurons), nn.ReLU(), nn.Linear(neurons, 1), nn.Flatten(0)).double()


def by_hand(net, x, root):
    """Margin, jump and direction of every neuron of a net with one hidden layer; the noise is root @ z."""
    j = net[0].weight @ root
    tau = j.norm(dim=1)
    margin = net[0](x)[0].abs() / tau
    return margin, net[2].weight[0].abs() * tau, j / tau[:, None]


@pytest.mark.parametrize("d", [6, 100])  # with all gradients, and with those of a few neurons
def test_margins_jumps_and_directions(d):
    net, x = single_layer(d, 200), torch.zeros(1, d, dtype=F64)
    with torch.no_grad():
        net[0].bias.mul_(20)
    found = find_rare_flips(frozen(net, x), Isotropic(0.3))
    with torch.no_grad():
        margin, jump, direction = by_hand(net, x, 0.3 * torch.eye(d, dtype=F64))
    assert found.jump.shape == (1, NEURONS)
    places = (found.direction[0] @ direction.mT).abs().argmax(1)
    assert len(set(places.tolist())) == NEURONS
    torch.testing.assert_close(found.margin[0], margin[places])
    torch.testing.assert_close(found.jump[0], jump[places])
    torch.testing.assert_close(found.direction[0].abs(), direction[places].abs())


def test_under_a_correlated_gaussian():
    net, x = single_layer(5, 8), torch.zeros(1, 5, dtype=F64)
    root = torch.randn(5, 5, generator=torch.Generator().manual_seed(1), dtype=F64)
    gaussian = Dense(root @ root.mT)
    found = find_rare_flips(frozen(net, x), gaussian.to("cpu", F64))
    with torch.no_grad():
        margin, jump, _ = by_hand(net, x, gaussian.to("cpu", F64).colour(torch.eye(5, dtype=F64)).mT)
    torch.testing.assert_close(found.margin[0].sort().values, margin.sort().values)
    torch.testing.assert_close(found.jump[0].sort().values, jump.sort().values)


def test_every_knot_counts():
    x = torch.tensor([[0.2]], dtype=F64)
    found = find_rare_flips(frozen(lambda x: functional.hardtanh(3 * x[:, 0], -1.0, 2.0), x), Isotropic(0.5))
    assert sorted(found.margin[0].tolist()) == pytest.approx([1.4 / 1.5, 1.6 / 1.5])
    assert found.jump[0].tolist() == pytest.approx([1.5, 1.5])


MODELS = {
    "one layer": (single_layer(6, 10), True),
    "two branches": (lambda x: torch.relu(x[:, :3]).sum(1) + functional.leaky_relu(x[:, 3:], 0.1).sum(1), True),
    "after a quadratic": (lambda x: torch.relu(x[:, 0] - 1) + x[:, 1] * x[:, 2], True),
    "two layers": (
        nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 1)).double(),
        False,
    ),
    "before a softmax": (lambda x: torch.softmax(torch.relu(x), 1)[:, 0], False),
    "before a square": (lambda x: torch.relu(x).sum(1).square(), False),
    "a kink of arithmetic": (lambda x: torch.relu(x[:, 0]) + torch.where(x[:, 1] > 1, x[:, 1], 1.0), False),
    "a maximum": (lambda x: torch.relu(x[:, 0]) + x[:, 1:].amax(1), False),
    "pooling": (lambda x: functional.max_pool1d(torch.relu(x)[:, None], 2).sum((1, 2)), False),
}


@pytest.mark.parametrize("name", MODELS)
def test_all_kinks_are_known_only_where_they_are(name):
    model, expected = MODELS[name]
    x = 0.1 * torch.ones(2, 6, dtype=F64)
    result = SmoothHess(model).attribute(x, 0 if name == "two layers" else None, sigma=0.5, n_calls=24, control=None)
    rare = result.statistics.rare
    assert (rare is not None and bool(rare.complete.all())) is expected


def test_models_without_recorded_kinks_have_none():
    x = torch.ones(1, 4, dtype=F64)
    for model in (lambda x: torch.tanh(x).sum(1), lambda x: x.prod(1)):
        assert SmoothHess(model).attribute(x, sigma=0.1, n_calls=16, control=None).statistics.rare is None


def test_concatenated_with_unknown_ones():
    one = RareFlips(torch.ones(1, 2, 3), torch.ones(1, 2), torch.ones(1, 2), torch.ones(1, dtype=torch.bool))
    more = RareFlips(torch.ones(2, 1, 3), torch.ones(2, 1), torch.ones(2, 1), torch.ones(2, dtype=torch.bool))
    both = RareFlips.cat([one, None, more], [1, 2, 2])
    assert both is not None
    assert both.jump.tolist() == [[1, 1], [0, 0], [0, 0], [1, 0], [1, 0]]
    assert both.complete.tolist() == [True, False, False, True, True]
    assert RareFlips.cat([None, None], [1, 2]) is None
