"""The penalised quadratic against cvxpy, closed forms and its own optimality conditions."""

import numpy as np
import pytest
import torch

from smoothhess.baselines.penalized_quadratic import Quadratic, extremes, maximize_penalized

pytestmark = pytest.mark.rounding

TIGHT = {"solver": "CLARABEL", "tol_gap_abs": 1e-9, "tol_gap_rel": 1e-9, "tol_feas": 1e-9}


def problem(batch=4, d=20, rank=3, seed=0, indefinite=False):
    rng = torch.Generator().manual_seed(seed)
    F = torch.randn(batch, rank, d, generator=rng, dtype=torch.float64)
    signs = torch.ones(rank).double()
    if indefinite:
        signs[0] = -1
    H = F.mT @ (signs[:, None] * F)
    g = 3 * torch.randn(batch, d, generator=rng, dtype=torch.float64)
    values = torch.linalg.eigvalsh(H)
    quadratic = Quadratic(g, lambda v: (H @ v[..., None])[..., 0], values[:, 0], values[:, -1])
    return g, H, quadratic, float(values.max()) / 2


def objective(g, H, l1, l2, step):
    curve = (step * (H @ step[..., None])[..., 0]).sum(1)
    return (g * step).sum(1) + curve / 2 - l1 * step.abs().sum(1) - l2 * step.square().sum(1)


@pytest.mark.parametrize("indefinite", [False, True])
@pytest.mark.parametrize("radius", [None, 0.03])
@pytest.mark.parametrize("l1", [0.4, 2.5])
@pytest.mark.parametrize("times", [1.02, 4.0])
@pytest.mark.filterwarnings("ignore:Solution may be inaccurate")  # how accurate it is, the comparison says
def test_against_cvxpy(times, l1, radius, indefinite):
    cvxpy = pytest.importorskip("cvxpy")
    g, H, quadratic, half = problem(indefinite=indefinite)
    l2 = times * half
    step, residual = maximize_penalized(quadratic, l1, l2, radius)
    assert residual.max() < 1e-10
    ours = objective(g, H, l1, l2, step)
    if radius is not None:
        assert (step.norm(dim=1) <= radius * (1 + 1e-10)).all()
    for i in range(len(g)):
        unit = cvxpy.Variable(g.shape[1])  # in units of the answer's size, which the solver's tolerances are made for
        size = float(step[i].norm())
        x = size * unit
        Q = 2 * l2 * np.eye(g.shape[1]) - H[i].numpy()
        rise = g[i].numpy() @ x - cvxpy.quad_form(x, cvxpy.psd_wrap((Q + Q.T) / 2)) / 2 - l1 * cvxpy.norm1(x)
        bounds = [] if radius is None else [cvxpy.norm(unit) <= radius / size]
        theirs = cvxpy.Problem(cvxpy.Maximize(rise / float(ours[i])), bounds).solve(**TIGHT)
        assert theirs == pytest.approx(1, rel=1e-8)
        assert float((step[i] - torch.from_numpy(x.value)).norm() / step[i].norm()) < 1e-4


def test_optimality_conditions():
    g, _, quadratic, half = problem(d=60, rank=5, seed=3)
    l1, l2 = 1.5, 1.1 * half
    step, _ = maximize_penalized(quadratic, l1, l2)
    slope = g - 2 * l2 * step + quadratic.product(step)
    active = step != 0
    assert 0.1 < active.double().mean() < 0.9
    torch.testing.assert_close(slope[active], l1 * step[active].sign(), rtol=1e-9, atol=1e-9)
    assert (slope[~active].abs() <= l1 * (1 + 1e-9)).all()


def test_without_l1_it_is_a_linear_system():
    g, H, quadratic, half = problem(d=80, rank=6)
    step, residual = maximize_penalized(quadratic, 0.0, 1.3 * half)
    expected = torch.linalg.solve(2.6 * half * torch.eye(80).double() - H, g)
    torch.testing.assert_close(step, expected, rtol=1e-9, atol=1e-11)
    assert residual.max() < 1e-10


def test_nearly_flat_problems_are_solved_too():
    _, _, quadratic, half = problem(d=40, rank=4, seed=1)
    step, residual = maximize_penalized(quadratic, 0.5, half * (1 + 1e-6))
    assert residual.max() < 1e-8
    assert torch.isfinite(step).all()


def test_a_large_l1_leaves_nothing():
    g, _, quadratic, half = problem()
    assert not maximize_penalized(quadratic, float(g.abs().max()), 2 * half).step.any()
    assert maximize_penalized(quadratic, 0.99 * float(g.abs().max()), 2 * half).step.any()


def test_a_gradient_of_zero():
    _, _, quadratic, half = problem()
    still = Quadratic(torch.zeros(4, 20).double(), quadratic.product, quadratic.lowest, quadratic.highest)
    for l1, radius in ((0.0, None), (1.0, None), (1.0, 0.5)):
        step, residual = maximize_penalized(still, l1, 2 * half, radius)
        assert not step.any()
        assert not residual.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", ["positive", "negative", "indefinite", "zero", "one"])
def test_extremes(case, dtype):
    rng = torch.Generator().manual_seed(0)
    F = torch.randn(3, 30, 30, generator=rng, dtype=torch.float64)
    H = {
        "positive": F @ F.mT,
        "negative": -F @ F.mT,
        "indefinite": F + F.mT,
        "zero": torch.zeros_like(F),
        "one": torch.eye(30).double().expand(3, 30, 30),
    }[case].to(dtype)
    lowest, highest = extremes(lambda rows: rows @ H, torch.zeros(3, 30, dtype=dtype))
    values = torch.linalg.eigvalsh(H.double())
    slack = 1e3 * torch.finfo(dtype).eps * values.abs().amax(1)
    assert (lowest <= values[:, 0] + slack / 1e4).all()
    assert (highest >= values[:, -1] - slack / 1e4).all()
    assert ((lowest - values[:, 0]).abs() <= slack).all()
    assert ((highest - values[:, -1]).abs() <= slack).all()
