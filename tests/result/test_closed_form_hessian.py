"""H₁ alone: exact where it should be, split by layer, and found out where it is wrong."""

import pytest
import torch
from torch import nn

from smoothhess import SmoothHess
from smoothhess.linalg.memory import ByteLimit
from tests.curvature.test_one_flip import Residual, mlp, quadrature
from tests.truths import OneHidden, gaussians


@pytest.mark.parametrize("kind", sorted(gaussians(6)))
def test_one_hidden_layer(kind):
    net, gaussian = OneHidden(6), gaussians(6)[kind]
    x = torch.stack([0.3 * torch.ones(6), -0.2 * torch.ones(6)]).double()
    closed, truth = SmoothHess(net).closed_form(x, gaussian=gaussian), net.truth(x, gaussian)
    torch.testing.assert_close(closed.hessian, truth.hessian, rtol=0, atol=1e-10)
    torch.testing.assert_close(closed.gradient, truth.gradient, rtol=0, atol=1e-10)
    assert (closed.error < 1e-6).all()
    assert not closed.suspect.any()
    v = torch.linspace(-1, 1, 6).double()
    torch.testing.assert_close(closed @ v, closed.hessian @ v)


def test_layers_add_up_and_have_names():
    net = Residual(6).double().eval()
    closed = SmoothHess(net).closed_form(torch.full((2, 6), 0.2).double(), 1, sigma=0.1)
    layers = closed.by_layer()
    torch.testing.assert_close(sum(layer.hessian for layer in layers), closed.hessian)
    torch.testing.assert_close(sum(layer.share for layer in layers), torch.ones(2).double())
    assert [layer.kind for layer in layers] == ["relu", "leaky_relu", "prelu", "hardtanh", "abs"]
    assert [layer.name for layer in layers][2] == "prelu"
    assert {layer.units for layer in layers} == {10}


def test_a_layer_without_influence_has_no_share():
    net = mlp(6, 8, 8).double()
    with torch.no_grad():
        net[2].weight.copy_(torch.eye(8))
        net[2].bias.fill_(100.0)  # the second layer of ReLUs never flips
    closed = SmoothHess(net).closed_form(torch.zeros(1, 6).double(), 1, sigma=0.3)
    assert [round(float(layer.share), 6) for layer in closed.by_layer()] == [1, 0]


def test_the_check_finds_out_where_it_is_wrong():
    net = Residual(2).double().eval()
    x = torch.zeros(1, 2).double()
    truth = quadrature(net, 1, 2.0)
    with pytest.warns(UserWarning, match="estimated relative error of more than 0.1"):
        closed = SmoothHess(net).closed_form(x, 1, sigma=2.0, check_calls=4000)
    assert closed.suspect.all()
    true_error = float((closed.hessian[0] - truth).norm() / truth.norm())
    assert float(closed.error) == pytest.approx(true_error, abs=4 * float(closed.error_stderr) + 0.05 * true_error)
    assert "more than 0.1" in repr(closed)
    refined = SmoothHess(net).more(closed.check, 4_000)
    assert float((refined.hessian[0] - truth).norm()) < 0.2 * float((closed.hessian[0] - truth).norm())


def test_the_check_is_right_on_average():
    net = mlp(24, 40, 40).double()
    x = 0.3 * torch.randn(1, 24, generator=torch.Generator().manual_seed(0)).double()
    truth = SmoothHess(net).attribute(x, 0, sigma=0.5, n_calls=60_000, control="kink", shrink=False).hessian[0]
    with pytest.warns(UserWarning, match="estimated relative error"):
        closed = SmoothHess(net).closed_form(x.expand(40, -1).clone(), 0, sigma=0.5, seed=range(40), tolerance=1e-3)
    true_error = (closed.hessian[0] - truth).norm() / truth.norm()
    squares = closed.error.square()
    assert float(squares.mean()) == pytest.approx(float(true_error) ** 2, rel=0.25)


@pytest.mark.parametrize(("d", "sigma", "calls"), [(3, 0.5, 200), (8, 0.5, 128), (16, 0.2, 256)])
def test_the_interval_of_the_error_holds_the_truth(d, sigma, calls):
    net, runs = mlp(d, 24, 24).double(), 100
    x = 0.3 * torch.randn(1, d, generator=torch.Generator().manual_seed(0)).double()
    truth = SmoothHess(net).attribute(x, 0, sigma=sigma, n_calls=20_000, control="kink", shrink=False, seed=1000)
    with pytest.warns(UserWarning, match="estimated relative error"):
        closed = SmoothHess(net).closed_form(
            x.expand(runs, -1).clone(), 0, sigma=sigma, seed=range(runs), check_calls=calls, tolerance=1e-3
        )
    true_error = (closed.hessian[0] - truth.hessian[0]).norm() / truth.hessian[0].norm()
    low, high = closed.error_interval()
    chance = 2 * (0.92 * 0.08 / runs) ** 0.5
    assert float(((low <= true_error) & (true_error <= high)).double().mean()) >= 0.92 - chance
    assert float(((closed.error - true_error).abs() <= 1.96 * closed.error_stderr).double().mean()) >= 0.92 - chance
    spread = closed.error.square().std()
    assert (
        high.square() - low.square()
    ).median() < 1.5 * 2 * 2.6 * spread  # 2.6: Student's t of five degrees of freedom


def test_an_uncertainty_that_is_not_known_is_not_stated():
    """100 calls in 40 features are fewer than four complete blocks."""
    net, x = mlp(40, 24, 24).double(), torch.zeros(1, 40).double()
    closed = SmoothHess(net).closed_form(x, 0, sigma=0.1, check_calls=100, tolerance=10.0)
    assert closed.error.isfinite().all()
    assert closed.error_stderr.isinf().all()
    assert [float(end) for end in closed.error_interval()] == [0.0, float("inf")]
    assert "unknown" in repr(closed)


def test_taylor_and_bad_input():
    net, x = OneHidden(5), torch.zeros(1, 5).double()
    closed = SmoothHess(net).closed_form(x, sigma=0.3)
    point = torch.full((1, 1, 5), 0.1).double()
    step = point[:, 0]
    expected = closed.output + (closed.gradient * step).sum() + step[0] @ closed.hessian[0] @ step[0] / 2
    torch.testing.assert_close(closed.taylor()(point)[0], expected)
    with pytest.raises(ValueError, match="closed form cannot be computed: no ReLU-like or smooth activation was seen"):
        SmoothHess(nn.Linear(5, 1).double()).closed_form(x, sigma=0.3)
    with pytest.raises(ValueError, match="check_calls must be even"):
        SmoothHess(net).closed_form(x, sigma=0.3, check_calls=33)
    with pytest.raises(ValueError, match="exactly one of sigma"):
        SmoothHess(net).closed_form(x)


def test_layers_that_do_not_fit(monkeypatch):
    monkeypatch.setattr("smoothhess.explainers.smooth_hess.LAYER_HESSIANS", ByteLimit(10))
    closed = SmoothHess(OneHidden(5)).closed_form(torch.zeros(1, 5).double(), sigma=0.3)
    with pytest.raises(ValueError, match="Pass fewer examples to closed_form"):
        closed.by_layer()


def test_pairs_of_flips_that_no_draw_met_are_not_excluded():
    """relu(relu(a) + relu(b) − 3): both inner units must flip together, which no draw of a small check does."""

    def f(x):
        return torch.relu(torch.relu(x[:, 0] - 2.2) + torch.relu(x[:, 1] - 2.2) + 0.2 * x.sum(1) - 0.3)

    closed = SmoothHess(f).closed_form(torch.zeros(1, 4, dtype=torch.float64), sigma=0.8, check_calls=64)
    low, high = closed.error_interval()
    assert (closed.error_stderr > 0).all()
    assert (high > low).all()
