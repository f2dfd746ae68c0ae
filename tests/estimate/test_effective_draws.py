"""Effective draws and tail index, against closed forms; the warning, on outputs with and without heavy tails."""

import warnings

import pytest
import torch
from torch import nn

from smoothhess import SmoothHess
from smoothhess.estimate.effective_draws import heavy_tails, tail_index
from smoothhess.explainers.adaptive import LEAST_EFFECTIVE
from smoothhess.explainers.result_warnings import FewEventsWarning
from smoothhess.linalg.effective_number import effective_number

F64 = torch.float64


@pytest.mark.parametrize("shape", [-0.5, 0.0, 0.5, 1.0, 2.0])
def test_tail_index_is_the_shape_of_a_pareto_distribution(shape):
    rng = torch.Generator().manual_seed(3)
    uniform = torch.rand(50, 20_000, generator=rng, dtype=F64)
    sizes = -uniform.log() if shape == 0 else (uniform**-shape - 1) / shape
    found = tail_index(sizes, torch.full((50,), 20_000))
    spread = (1 + abs(shape)) / 424**0.5  # of one fit to 3√n exceedances
    assert abs(float(found.mean()) - shape) < 0.06
    assert float(found.std()) < 2 * spread


def test_tail_index_of_few_rows_is_unknown():
    assert tail_index(torch.rand(2, 20), torch.tensor([20, 20])).isnan().all()
    assert tail_index(torch.zeros(1, 100), torch.tensor([100])).isnan().all()


def test_effective_number():
    parts = torch.tensor([[2.0, 2.0, 2.0, 2.0], [1e-200, 0, 0, 0], [0, 0, 0, 0]], dtype=F64)
    assert effective_number(parts).tolist() == [4, 1, 0]
    assert effective_number(parts[:, :0]).tolist() == [0, 0, 0]


def confident(d=12, classes=3):
    """A classifier that is sure of its answer, as a probability and as a logit."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(d, 32), nn.ReLU(), nn.Linear(32, classes)).double()
    with torch.no_grad():
        net[2].weight.mul_(30)
        net[2].bias.copy_(torch.tensor([20.0, 0.0, 0.0]))
    return net, lambda x: torch.softmax(net(x), 1)


def test_a_saturated_probability_warns_and_its_logit_does_not():
    logit, probability = confident()
    x = torch.zeros(20, 12, dtype=F64)
    with pytest.warns(FewEventsWarning, match="a few draws"):
        result = SmoothHess(probability).attribute(x, 0, sigma=0.5, n_calls=240, seed=range(20))
    assert heavy_tails(result.statistics, False).double().mean() > 0.9
    assert result.n_eff.median() < 12
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = SmoothHess(logit).attribute(x, 0, sigma=0.5, n_calls=240, seed=range(20))
    assert not heavy_tails(result.statistics, False).any()
    assert result.n_eff.min() > 40


def test_a_run_does_not_stop_on_few_effective_draws():
    _, probability = confident()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = SmoothHess(probability).attribute(torch.zeros(20, 12, dtype=F64), 0, sigma=0.5, seed=range(20))
    stopped = torch.tensor([s in ("tolerance", "zero") for s in result.status])
    assert bool((result.n_eff[stopped] >= LEAST_EFFECTIVE).all())


def test_degrees_of_freedom_are_fewer_than_effective_draws():
    _, probability = confident()
    with pytest.warns(FewEventsWarning):
        result = SmoothHess(probability).attribute(
            torch.zeros(2, 12, dtype=F64), 0, sigma=0.5, n_calls=240, seed=range(2)
        )
    assert bool((result.noise.df <= (result.n_eff - 1).clamp_min(1) + 1e-9).all())


@pytest.mark.parametrize("calls", [50, 200, 1000])
@pytest.mark.parametrize("d", [2, 10, 40])
def test_healthy_networks_seldom_warn(d, calls):
    torch.manual_seed(d)
    warned = total = 0
    for activation in (nn.ReLU(), nn.Tanh(), nn.GELU()):
        net = nn.Sequential(nn.Linear(d, 30), activation, nn.Linear(30, 30), activation, nn.Linear(30, 1)).double()
        x = torch.randn(40, d, dtype=F64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = SmoothHess(net).attribute(x, 0, sigma=0.5, n_calls=calls, seed=range(40))
        warned, total = warned + int(heavy_tails(result.statistics, False).sum()), total + 40
    assert warned <= 0.05 * total
