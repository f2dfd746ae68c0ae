"""`diagnose` without σ: the usable range, the recommended σ and the cost, against closed forms."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from smoothhess import SmoothHess, TokenSmoothHess, diagnose, from_gradient
from smoothhess.explainers.gradient_changes import MULTIPLES
from smoothhess.explainers.sigma_range import (
    BEYOND,
    FEW,
    GOOD,
    MISFIT,
    SATURATES,
    recommended_index,
    slope_stderr,
    with_misfits,
)
from tests.truths import OneHidden


def net(*activations, d=6, width=32, seed=0):
    torch.manual_seed(seed)
    layers = []
    for i, activation in enumerate(activations):
        layers += [nn.Linear(width if i else d, width), activation()]
    return nn.Sequential(*layers, nn.Linear(width, 1)).double()


def points(b, d=6):
    return torch.randn(b, d, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def chosen(found):
    """Index of the recommended σ in the grid."""
    return found.sigmas.tolist().index(found.recommended)


def test_flips_of_one_unit_in_closed_form():
    a, c = torch.tensor([3.0, 4.0]).double(), 2.0
    x = torch.tensor([[0.1, 0.2]]).double()
    found = diagnose(lambda x: (x @ a - c).relu(), x, n_calls=100)
    margin = abs(float(x[0] @ a) - c) / 5  # |a| = 5
    probability = torch.special.ndtr(-margin / found.sigmas)
    torch.testing.assert_close(found.expected_flips[0], probability, rtol=1e-9, atol=1e-12)
    seen = ~found.share_rare[0].isnan()  # H₁ underflows at the smallest σ
    assert found.share_rare[0, seen].tolist() == (100 * probability < 3).double()[seen].tolist()
    assert found.sigmas[len(MULTIPLES) // 2].item() == pytest.approx(margin / 10)
    assert found.low <= found.recommended <= found.high
    assert probability[chosen(found)] >= 1 / 4


def test_share_of_rare_flips_is_that_of_the_units_traces():
    model, x = OneHidden(5), points(2, 5)
    found = diagnose(model, x, sigma=0.2, n_calls=40)
    tau = 0.2 * model.w.norm(dim=1)
    score = (x @ model.w.mT + model.b) / tau
    size = model.a.abs() * torch.exp(-score.square() / 2) * tau
    rare = size * (40 * torch.special.ndtr(-score.abs()) < 3)
    torch.testing.assert_close(found.share_rare[:, 6], (rare.sum(1) / size.sum(1)).detach())
    assert "rests on fewer than 3 flips in 40 calls" in str(found)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_scaling_the_inputs_scales_the_recommendation(activation):
    model, x = net(activation, activation), points(2)
    found, scaled = diagnose(model, x), diagnose(lambda y: 7 * model(y / 10), 10 * x)
    torch.testing.assert_close(scaled.sigmas, 10 * found.sigmas)
    assert scaled.states == found.states
    assert scaled.recommended == pytest.approx(10 * found.recommended)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.Tanh])
def test_default_run_converges_at_the_recommended_sigma(activation):
    model, x = net(activation, activation), points(2)
    found = diagnose(model, x)
    result = SmoothHess(model).attribute(x, sigma=found.recommended)
    assert set(result.status) == {"tolerance"}
    assert (result.r2.double() - found.r2[:, chosen(found)]).abs().max() < 0.3
    assert found.inside.all()


def test_smooth_models_are_limited_by_the_fit():
    found = diagnose(net(nn.Tanh, nn.Tanh), points(1))
    assert found.expected_flips.isnan().all()
    assert found.share_rare.isnan().all()
    assert found.r2[0, chosen(found)] > 0.8
    assert "own Hessian is not zero" in str(found)
    assert "flips/draw" not in str(found)


def test_a_black_box_has_a_range_without_flips():
    quadratic = from_gradient(lambda x: ((x**2).sum(1), 2 * x))
    found = diagnose(quadratic, torch.ones(1, 8).double())
    torch.testing.assert_close(found.r2[0, chosen(found)].item(), 1.0)
    assert "Flips are unknown: no activation call was seen" in str(found)
    assert found.high <= 1.0  # the size of the inputs
    assert found.states[-1] == BEYOND


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_model_has_a_range():
    found = diagnose(torch.jit.script(net(nn.ReLU, nn.ReLU)), points(1))
    assert found.recommended is not None
    assert "scripted or compiled" in str(found)


def test_nothing_is_recommended_for_an_affine_function():
    found = diagnose(lambda x: x.sum(1), points(1))
    assert found.recommended is None
    assert math.isnan(found.low)
    assert "No σ from" in str(found)
    assert "the model is affine around these inputs" in str(found)
    assert "only a smoothed Hessian" not in str(found)


def test_the_nearest_sigma_is_recommended_where_none_is_usable():
    """One unit, 3 away from its kink, and data of scale 0.5: no draw meets it often enough within the data."""
    x, data = torch.full((1, 2), -3.0).double(), 0.5 * points(400, 2)
    found = diagnose(lambda x: x[:, 0].relu() + x[:, 1], x, data=data)
    assert GOOD not in found.states
    assert math.isnan(found.low)
    assert found.recommended == max(
        s for s, state in zip(found.sigmas.tolist(), found.states, strict=True) if state == FEW
    )
    assert "No σ is usable without reservation; the nearest is sigma=" in str(found)
    assert str(found).count("← nearest") == 1
    assert "inf" not in str(found)  # R² is not known at any of these scales


def test_examples_without_flips_do_not_enter_the_mean_r2():
    """The closed form of a far kink is not zero, but the gradient does not vary: R² is unknown there."""
    x = torch.tensor([[0.1, 0.2], [0.2, 0.1], [-40.0, 0.0]]).double()
    found = diagnose(lambda x: (x[:, 0] + x[:, 1]).relu() + (x[:, 0] - 0.05).relu(), x)
    at = chosen(found)
    assert found.r2[2, at].isnan()
    assert found.r2[:2, at].isfinite().all()
    assert float(found.r2.nan_to_num(0).abs().max()) <= 1


def test_slope_stderr_is_that_of_simulation():
    """Gamma-distributed o: the standard deviation of log-ratio slopes over repetitions."""
    draws = torch.from_numpy(np.random.default_rng(0).gamma(4.0, size=(600, len(MULTIPLES), 16)))
    slope = torch.gradient(draws.mean(2).log(), spacing=(MULTIPLES.log(),), dim=1)[0]
    expected = slope.std(0)
    torch.testing.assert_close(slope_stderr(draws).square().mean(0).sqrt(), expected, rtol=0.15, atol=0)


def test_data_may_be_a_table():
    pd = pytest.importorskip("pandas")
    model, x = net(nn.ReLU, nn.ReLU), points(40)
    table = pd.DataFrame(x.numpy(), columns=list("abcdef"))
    found = diagnose(model, table[:2], data=table)
    assert str(found).splitlines()[:8] == str(diagnose(model, x[:2], data=x)).splitlines()[:8]
    with pytest.raises(ValueError, match="data must be a finite tensor, array or DataFrame"):
        diagnose(model, x[:2], data=table[["a", "b"]])


def test_columns_of_different_scales_are_named():
    data = torch.randn(200, 3, generator=torch.Generator().manual_seed(0)).double() * torch.tensor([1.0, 1e5, 1.0])
    net = lambda x: (x / torch.tensor([1.0, 1e5, 1.0])).sum(1).relu()
    assert "Caution: 1 of 3 columns are larger than 1000 σ" in str(diagnose(net, data[:1], data=data))
    assert "Caution" not in str(diagnose(net, data[:1], sigma=data.std(0)))


def test_an_explainer_of_tokens_diagnoses_itself():
    explainer = TokenSmoothHess(torch.nn.Sequential(torch.nn.Embedding(4, 2), torch.nn.Flatten()), "0")
    with pytest.raises(TypeError, match=r"takes a model, got a TokenSmoothHess. Use explainer.diagnose"):
        diagnose(explainer, torch.zeros(1, 2).long())


def test_noise_beyond_the_data_is_not_recommended():
    model, x = net(nn.ReLU, nn.ReLU), points(1)
    free = diagnose(model, x)
    data = 1.2 * free.recommended * torch.randn(500, 6, generator=torch.Generator().manual_seed(0)).double()
    found = diagnose(model, x, data=data)
    assert found.high == found.recommended < free.high
    assert "exceeds the scale of the data" in str(found)
    assert "pass data=" in str(free)
    assert "pass data=" not in str(found)


def test_the_report_is_short_and_lists_few_examples():
    found = diagnose(net(nn.ReLU, nn.ReLU), points(12))
    lines = str(found).splitlines()
    assert repr(found) == str(found)
    assert len(lines) <= 21
    assert max(map(len, lines)) <= 120
    assert sum(line.startswith("  example") for line in lines) == 4
    assert "… 8 more" in str(found)
    assert sum("← recommended" in line for line in lines) == 1
    assert f"Use sigma={found.recommended:.2g}" in str(found)


def test_the_same_seed_gives_the_same_diagnosis():
    model, x = net(nn.ReLU, nn.ReLU), points(2)
    state = torch.get_rng_state()
    one, two = diagnose(model, x), diagnose(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(one.r2, two.r2, equal_nan=True)
    assert one.recommended == two.recommended
    assert not torch.allclose(diagnose(model, x, seed=1).r2, one.r2, equal_nan=True)


def test_cost_of_a_block():
    found = diagnose(net(nn.ReLU, d=40), points(3, 40))
    cost = found.cost
    assert (cost.block, cost.n_calls) == (80, 80)
    assert cost.n_passes == 80 + 40 / 2 + 0.75 * 80  # calls, closed form, frozen passes
    assert 0 < cost.seconds < 60
    assert cost.n_bytes > 3 * 40 * 40 * 3 * 8
    assert diagnose(net(nn.ReLU), points(1), n_calls=1000).cost.n_calls == 1000


def test_to_frame():
    pytest.importorskip("pandas")
    found = diagnose(net(nn.ReLU), points(2))
    frame = found.to_frame()
    assert len(frame) == 2 * len(found.sigmas)
    assert frame[frame.example == 1].expected_flips.tolist() == found.expected_flips[1].tolist()
    assert frame[frame.usable].sigma.min() == found.low


def test_rules_of_the_range():
    r2 = torch.tensor([[math.nan, 0.2, 0.8, 0.9, 0.85, math.nan]])
    states = [FEW, GOOD, GOOD, GOOD, GOOD, SATURATES]
    assert with_misfits(states, r2) == [FEW, MISFIT, GOOD, GOOD, GOOD, SATURATES]
    assert recommended_index([FEW, MISFIT, GOOD, GOOD, GOOD, SATURATES], r2) == 3  # a step below the largest that fits
    assert recommended_index([FEW, MISFIT, GOOD, GOOD, GOOD, BEYOND], r2) == 4  # the data end the range for all inputs
    assert recommended_index([GOOD, GOOD], torch.tensor([[-0.2, -0.1]])) == 1  # noise of a small R²
    r2[0, 2] = 0.6
    assert recommended_index([FEW, FEW, GOOD, GOOD, SATURATES, SATURATES], r2) == 3  # the smaller one does not fit


def test_refusals():
    model, x = net(nn.ReLU), points(2)
    with pytest.raises(ValueError, match="data must be a finite tensor, array or DataFrame of at least 2 inputs"):
        diagnose(model, x, data=x[:, :3])
    with pytest.raises(ValueError, match="data must be"):
        diagnose(model, x, data=[1.0])
    with pytest.raises(ValueError, match="n_calls must be at least 2"):
        diagnose(model, x, n_calls=0)
    with pytest.raises(ValueError, match="exactly one of sigma"):
        diagnose(model, x, sigma=0.1, radius=1.0)
