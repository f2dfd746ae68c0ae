"""The paper's Four Quadrant example: a network whose closed form is wrong, and whose smoothed Hessian is known."""

import pytest
import torch
from torch.nn import functional

from paper.networks import plane_mlp
from smoothhess import SmoothHess
from tests.curvature.test_one_flip import quadrature
from tests.truths import four_quadrant


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(1)
    net = plane_mlp((100, 60, 50, 50, 50))
    steps = 2500
    optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps)
    for _ in range(steps):
        points = 4 * torch.rand(512, 2, generator=rng) - 2
        loss = functional.mse_loss(net(points)[:, 0], four_quadrant(points))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return net.double().eval()


@pytest.mark.slow
def test_defaults_find_what_the_closed_form_misses(network):
    sigma, x = 0.1**0.5, torch.zeros(1, 2).double()
    truth = quadrature(network, 0, sigma)
    assert float(truth[0, 1]) == pytest.approx(2.5, abs=0.1)  # the network has learned the function
    with pytest.warns(UserWarning, match="estimated relative error"):
        closed = SmoothHess(network).closed_form(x, 0, sigma=sigma)
    assert abs(float(closed.hessian[0, 0, 1]) - 2.5) > 0.5  # many units flip at once
    result = SmoothHess(network).attribute(x, 0, sigma=sigma, tol=0.02)
    pair = result.top_pairs(1)[0][0]
    assert pair.value == pytest.approx(2.5, abs=0.15)
    assert pair.low <= float(truth[0, 1]) <= pair.high
    assert pair.significant
