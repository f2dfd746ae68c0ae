"""A box around each input: exact projections, and descent in its intersection with a ball."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from smoothhess.evaluate.box_constraints import Box

RNG = torch.Generator().manual_seed(0)
X = torch.rand(6, 5, generator=RNG).double()
RADIUS = torch.tensor([0.05, 0.2, 0.5, 0.8, 1.5, 10.0]).double()


def random(*shape):
    return torch.randn(*shape, generator=RNG).double()


def solved(box, b, objective, start):
    """The same problem by a general solver, one example at a time."""
    low, high = box.low[b].numpy(), box.high[b].numpy()
    return minimize(
        objective,
        start,
        method="SLSQP",
        bounds=list(zip(low, high, strict=True)),
        constraints={"type": "ineq", "fun": lambda v: float(RADIUS[b]) ** 2 - v @ v},
        options={"ftol": 1e-15, "maxiter": 1000},
    ).x


def test_walls_are_distances():
    box = Box.around(X, (0, torch.tensor([1.0, 1, 1, 2, 2])))
    torch.testing.assert_close(box.low, -X)
    torch.testing.assert_close(box.high, torch.tensor([1.0, 1, 1, 2, 2]).double() - X)


def test_projection_is_the_nearest_point():
    box, y = Box.around(X, (0.0, 1.0)), random(6, 3, 5)
    found = box.project(y, RADIUS)
    assert (found.norm(dim=-1) <= RADIUS[:, None] * (1 + 1e-12)).all()
    assert torch.equal(found, box.clip(found))
    for b in range(6):
        for n in range(3):
            there = y[b, n].numpy()
            best = solved(box, b, lambda v, there=there: ((v - there) ** 2).sum(), np.zeros(5))
            assert float((found[b, n] - y[b, n]).square().sum()) <= ((best - there) ** 2).sum() + 1e-9
            np.testing.assert_allclose(found[b, n].numpy(), best, atol=2e-5)


def test_points_inside_stay():
    box = Box.around(X, (0.0, 1.0))
    inside = box.project(random(6, 1, 5), RADIUS)
    torch.testing.assert_close(box.project(inside, RADIUS), inside, rtol=1e-12, atol=1e-15)


def test_steepest_is_the_lowest_point():
    box, g = Box.around(X, (0.0, 1.0)), random(6, 5)
    g[2, 1] = 0
    found = box.steepest(g, RADIUS)
    assert (found.norm(dim=-1) <= RADIUS * (1 + 1e-12)).all()
    for b in range(6):
        best = solved(box, b, lambda v, b=b: g[b].numpy() @ v, np.zeros(5))
        assert float(found[b] @ g[b]) <= g[b].numpy() @ best + 1e-9
    corner = torch.where(g[5] > 0, box.low[5], box.high[5])
    torch.testing.assert_close(found[5], corner)  # the ball holds the whole box
    assert box.steepest(torch.zeros(6, 5).double(), RADIUS).abs().max() == 0


def test_without_walls_it_is_the_ball():
    box, g = Box.around(X, (-torch.inf, torch.inf)), random(6, 5)
    torch.testing.assert_close(box.steepest(g, RADIUS), -RADIUS[:, None] * g / g.norm(dim=1, keepdim=True))
    y = random(6, 1, 5)
    torch.testing.assert_close(
        box.project(y, RADIUS), y * (RADIUS[:, None, None] / y.norm(dim=-1, keepdim=True)).clamp_max(1)
    )


def test_features_without_room_stay():
    high = torch.ones(6, 5).double()
    high[:, 2] = X[:, 2]
    low = torch.zeros(6, 5).double()
    low[:, 2] = X[:, 2]
    step = Box.around(X, (low, high)).steepest(random(6, 5), RADIUS)
    assert step[:, 2].abs().max() == 0
    assert (step.abs().amax(1) > 0).all()


def test_descent_ends_where_nothing_descends():
    box, g = Box.around(X, (0.0, 1.0)), random(6, 5)
    a = random(6, 5, 5)
    a = a + a.mT
    product = lambda rows: rows @ a
    starts = random(6, 2, 5)
    found = box.descend(starts, g, product, RADIUS)
    value = lambda rows: (g[:, None] * rows).sum(-1) + (rows * product(rows)).sum(-1) / 2
    lowest = value(box.project(starts, RADIUS)).amin(1)
    assert (value(found[:, None])[:, 0] <= lowest + 1e-12).all()
    again = box.project(found[:, None] - 0.01 * (g + product(found[:, None])[:, 0])[:, None], RADIUS)[:, 0]
    curvature = torch.linalg.matrix_norm(a, 2)  # points are compared by values q, which determine them to √(2ε|q|/λ)
    resolved = (2 * torch.finfo(torch.float64).eps * value(found[:, None])[:, 0].abs() / curvature).sqrt()
    assert ((again - found).norm(dim=1) < 2 * 0.01 * curvature * resolved).all()
    for b in range(6):  # no worse than a general local solver from the same place
        q = lambda v, b=b: g[b].numpy() @ v + v @ a[b].numpy() @ v / 2
        assert q(found[b].numpy()) <= q(solved(box, b, q, found[b].numpy())) + 1e-8


def test_convex_descent_finds_the_minimum():
    box, g = Box.around(X, (0.0, 1.0)), random(6, 5)
    a = random(6, 5, 5)
    a = a @ a.mT
    found = box.descend(torch.zeros(6, 1, 5).double(), g, lambda rows: rows @ a, RADIUS)
    for b in range(6):
        q = lambda v, b=b: g[b].numpy() @ v + v @ a[b].numpy() @ v / 2
        best = solved(box, b, q, np.zeros(5))
        assert q(found[b].numpy()) <= q(best) + 1e-8


def test_flat_descent_stays():
    for dtype in (torch.float64, torch.float32):
        box, calls = Box.around(X.to(dtype), (0.0, 1.0)), []
        start, flat = torch.zeros(6, 1, 5, dtype=dtype), torch.zeros(6, 5, dtype=dtype)
        product = lambda rows, calls=calls: calls.append(1) or torch.zeros_like(rows)
        assert box.descend(start, flat, product, RADIUS.to(dtype)).abs().max() == 0
        assert len(calls) < 10


@pytest.mark.parametrize("size", [2.0**-100, 2.0**-20, 2.0**20, 2.0**50])
def test_the_unit_of_the_function_does_not_matter(size):
    g, a = random(6, 5).float(), random(6, 5, 5).float()
    box, radius, start = Box.around(X.float(), (0.0, 1.0)), RADIUS.float(), torch.zeros(6, 1, 5)
    a = a + a.mT
    one, other = (box.descend(start, s * g, lambda rows, s=s: s * (rows @ a), radius) for s in (1.0, size))
    if size == 2.0**-100:  # squares vanish in float32: nothing breaks
        assert other.isfinite().all()
    else:  # powers of two: to the last bit
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        (1.0, r"bounds must be a pair \(low, high\) of numbers or tensors, got float"),
        ((0, 1, 2), "got tuple"),
        ((0, "1"), "high is str"),
        ((torch.zeros(4), 1), r"broadcast against the inputs \(6, 5\); low is a tensor \(4,\)"),
        ((0.5, 1), r"of 6 inputs lie outside the bounds, expected low ≤ input ≤ high everywhere"),
        ((0, float("nan")), r"6 of 6 inputs lie outside the bounds"),
        ((1, 0), r"6 of 6 inputs lie outside"),
    ],
)
def test_what_is_refused(bounds, text):
    with pytest.raises(ValueError, match=text):
        Box.around(X, bounds)


def test_examples_that_wait_for_others_stay_finite():
    """One example sits in its corner from the start while another creeps along a valley for all steps there are."""
    x = torch.full((2, 3), 0.5)
    box, g = Box.around(x, (0.0, 1.0)), torch.tensor([[1.0, 1.0, 1.0], [1e-3, -1e-3, 1e-3]])
    valley = torch.diag(torch.tensor([1.0, 1e-1, 2e-3]))
    H = torch.stack([torch.zeros(3, 3), valley])
    start = torch.stack([torch.full((1, 3), -0.5), torch.full((1, 3), 0.4)])
    found = box.descend(start, g, lambda rows: rows @ H, torch.tensor([5.0, 5.0]))
    assert torch.equal(found[0], torch.full((3,), -0.5))
    assert found.isfinite().all()
    torch.testing.assert_close(found[1], torch.tensor([-1e-3, 1e-2, -0.5]), rtol=1e-2, atol=1e-4)
