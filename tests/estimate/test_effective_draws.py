"""Effective draws and tail index, against closed forms; the warning, on outputs with and without heavy tails."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from smoothhess import SmoothHess
from smoothhess.estimate.effective_draws import exponential_share, growth_rate, tail_index
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
    assert result.estimate.has_heavy_tails.double().mean() > 0.9
    assert result.n_eff.median() < 12
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = SmoothHess(logit).attribute(x, 0, sigma=0.5, n_calls=240, seed=range(20))
    assert not result.estimate.has_heavy_tails.any()
    assert result.n_eff.min() > 40


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
def test_exponential_share_is_that_of_an_exponential_function(rate):
    z, weight = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(120))
    energy = torch.cosh(2 * rate * z) - 2 * torch.cosh(rate * z) + 1
    mean, square = (float((weight * e).sum() / weight.sum()) for e in (energy, energy.square()))
    assert float(exponential_share(torch.tensor(rate))) == pytest.approx(mean**2 / square, rel=1e-6)


def test_the_growth_of_an_exponential_function_is_its_rate():
    rates = torch.tensor([0.5, 1.0, 2.0], dtype=F64)
    b = torch.nn.functional.normalize(torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=F64), dim=0)
    for rate in rates:
        x = torch.zeros(20, 12, dtype=F64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = SmoothHess(lambda z, r=rate: torch.exp(2 * r * (z @ b))).attribute(
                x, sigma=0.5, n_calls=380, seed=range(20)
            )
        found = growth_rate(result.statistics, result.estimate.features.gradient)
        assert abs(float(found.mean()) - float(rate)) < 0.15 * float(rate)


@pytest.mark.parametrize("calls", [52, 260])
def test_a_run_that_met_no_steep_part_warns(calls):
    """p = 1 − exp(b·δ − 12), |b| = 3.5 per σ: the rows that carry H are never met, and the others look even."""
    b = 7 * torch.nn.functional.normalize(torch.randn(13, generator=torch.Generator().manual_seed(1)).double(), dim=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = SmoothHess(lambda z: torch.sigmoid(12 - z @ b)).attribute(
            torch.zeros(60, 13, dtype=F64), sigma=0.5, n_calls=calls, seed=range(60)
        )
    assert result.estimate.has_heavy_tails.double().mean() >= 0.95


def test_uneven_rows_without_growth_do_not_warn():
    """A quadratic at its minimum, where the gradient at x is zero, and a kink that half of the draws cross."""
    x = torch.zeros(60, 13, dtype=F64)
    for f in (lambda z: z[:, 0].square() + 1e-3 * z[:, 1], lambda z: torch.relu(z[:, 0] - 0.25) + 0.1 * z.sum(1)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = SmoothHess(f).attribute(x, sigma=0.5, n_calls=260, seed=range(60), control=None)
        assert result.estimate.has_heavy_tails.double().mean() <= 0.05


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
        warned, total = warned + int(result.estimate.has_heavy_tails.sum()), total + 40
    assert warned <= 0.05 * total
