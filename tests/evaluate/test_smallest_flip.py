"""The smallest flip: exact for linear and quadratic classifiers, and split into gradient and interaction."""

import math

import pytest
import torch
from torch import nn

from smoothhess import SmoothHess, Taylor
from smoothhess.evaluate.attack import AttackPath
from smoothhess.evaluate.attack_comparison import post_hoc
from smoothhess.evaluate.smallest_flip import smallest_flip

pytestmark = pytest.mark.rounding

W = torch.tensor([3.0, 4.0]).double()  # of length 5
MARGINS = torch.tensor([0.1, 0.4, 0.6, 0.9, -0.2, -0.7]).double()  # signed distances of six points to the boundary
POINTS = MARGINS[:, None] * W / 5 + torch.tensor([[4.0, -3.0]]).double() * torch.arange(6).double()[:, None]


def linear(x):
    return torch.stack([x @ W, torch.zeros(len(x)).to(x)], 1)


def own_score(x=POINTS):
    sign = (x @ W).sign()
    return Taylor(x, (x @ W).abs(), sign[:, None] * W, None)


def product_sign(x):
    """Class 0 where x₁x₂ > 0: from the diagonal only a joint change of both signs leaves it."""
    return torch.stack([x[:, 0] * x[:, 1], torch.zeros(len(x)).to(x)], 1)


def test_a_linear_classifier_flips_at_its_margin():
    flip = smallest_flip(linear, own_score(), 2.0, tol=1e-13)
    torch.testing.assert_close(flip.radius, MARGINS.abs(), rtol=1e-12, atol=0)
    torch.testing.assert_close(flip.change, -MARGINS[:, None] * W / 5, rtol=1e-11, atol=1e-14)
    assert torch.equal(flip.before, (MARGINS < 0).long())
    assert torch.equal(flip.after, (MARGINS > 0).long())
    torch.testing.assert_close(flip.gradient_part, -5 * MARGINS.abs(), rtol=1e-11, atol=0)
    assert flip.interaction_part.abs().max() == 0
    assert flip.interaction_share.abs().max() == 0
    assert flip.flipped.all()


def test_an_estimate_of_a_linear_classifier_does_as_well():
    result = SmoothHess(linear).attribute(POINTS[:4], 0, sigma=0.3, n_calls=40)
    flip = smallest_flip(linear, result, 2.0, tol=1e-12)
    torch.testing.assert_close(flip.radius, MARGINS[:4], rtol=1e-9, atol=0)
    assert flip.interaction_share.abs().max() < 1e-9


def test_none_within_reach_is_infinite():
    flip = smallest_flip(linear, own_score(), 0.5, tol=1e-13)
    inside = MARGINS.abs() < 0.5
    assert torch.equal(flip.flipped, inside)
    torch.testing.assert_close(flip.radius[inside], MARGINS[inside].abs(), rtol=1e-12, atol=0)
    assert flip.radius[~inside].isinf().all()
    for numbers in (flip.change[~inside], flip.gradient_part[~inside], flip.interaction_share[~inside]):
        assert numbers.isnan().all()
    assert torch.equal(flip.after[~inside], flip.before[~inside])


def test_tolerance_is_relative():
    for tol in (1e-2, 1e-5):
        flip = smallest_flip(linear, own_score(), 2.0, tol=tol)
        assert (flip.radius >= MARGINS.abs()).all()
        assert (flip.radius <= MARGINS.abs() * (1 + 1.1 * tol)).all()


def test_a_quadratic_classifier_at_its_exact_distance():
    """x₁x₂ from (a, b): the nearest axis is min(a, b) away, and the second-order path finds it."""
    x = torch.tensor([[1.0, 2.0], [0.5, 3.0]]).double()
    a = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).double()
    own = Taylor(x, x[:, 0] * x[:, 1], x @ a, lambda rows: rows @ a)
    flip = smallest_flip(product_sign, own, 4.0, tol=1e-12)
    for i, (p, q) in enumerate(x.tolist()):
        # in the ball of radius r the lowest product is (s·r)-dependent; it reaches 0 first on the nearer axis
        assert float(flip.radius[i]) == pytest.approx(min(p, q), rel=1e-9)
    value = (x + flip.change).prod(1)
    assert (value.abs() < 1e-9).all()
    torch.testing.assert_close(flip.predicted_change, -x.prod(1), rtol=1e-9, atol=0)
    torch.testing.assert_close(flip.interaction_part, flip.change.prod(1), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(flip.interaction_share, flip.change.prod(1) / -x.prod(1), rtol=1e-9, atol=1e-12)


def test_where_the_gradient_vanishes_all_is_interaction():
    x = torch.zeros(1, 2).double()
    f = lambda x: torch.stack([x[:, 0] * x[:, 1] + 1, torch.zeros(len(x)).to(x)], 1)
    a = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).double()
    own = Taylor(x, torch.ones(1).double(), torch.zeros(1, 2).double(), lambda rows: rows @ a)
    flip = smallest_flip(f, own, 4.0, tol=1e-12)
    assert float(flip.radius) == pytest.approx(math.sqrt(2), rel=1e-9)
    assert float(flip.interaction_share) == pytest.approx(1)
    assert smallest_flip(f, Taylor(x, own.value, own.gradient, None), 4.0).radius.isinf()  # first order: no move


def test_it_agrees_with_the_contest():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 3)).double()
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(1)).double()
    result = SmoothHess(model).attribute(x, model(x).argmax(1), radius=0.6, n_calls=120)
    flip = smallest_flip(model, result, 1.0, n_radii=20)
    assert 5 < int(flip.flipped.sum()) < 40
    radii = torch.linspace(0.05, 1.0, 20)
    found = post_hoc(model, x, {"a": result}, radii).unchanged[0]  # (R, B)
    first = torch.where(found, torch.inf, radii[:, None]).amin(0)  # the first radius of the scan that flips
    assert (flip.radius <= first * (1 + 1e-6)).all()
    assert (flip.radius[flip.flipped] > first[flip.flipped] - 0.05 - 1e-9).all()
    assert torch.equal(flip.flipped, first.isfinite())
    changed = x[flip.flipped] + flip.change[flip.flipped]
    assert torch.equal(model(changed).argmax(1), flip.after[flip.flipped])
    assert (flip.after[flip.flipped] != flip.before[flip.flipped]).all()
    torch.testing.assert_close(flip.size[flip.flipped], flip.radius[flip.flipped], rtol=1e-6, atol=0)


def test_bounds_and_paths_of_ones_own():
    walls = (POINTS - 0.2, POINTS + 0.2)
    flip = smallest_flip(linear, own_score(), 2.0, bounds=walls, tol=1e-12)
    assert (flip.change[flip.flipped].abs() <= 0.2 + 1e-12).all()
    assert not flip.flipped.all()
    assert (flip.radius >= MARGINS.abs() * (1 - 1e-9)).all()
    path = AttackPath.of(own_score(), bounds=walls)
    assert torch.equal(smallest_flip(linear, path, 2.0, tol=1e-12).radius, flip.radius)


def test_float32_ends():
    x = POINTS.float()
    f = lambda x: torch.stack([x @ W.to(x), torch.zeros(len(x))], 1)
    sign = (x @ W.float()).sign()
    flip = smallest_flip(f, Taylor(x, (x @ W.float()).abs(), sign[:, None] * W.float(), None), 2.0, tol=1e-12)
    torch.testing.assert_close(flip.radius, MARGINS.abs().float(), rtol=1e-4, atol=1e-5)


def test_reading_it():
    text = repr(smallest_flip(linear, own_score(), 0.5))
    assert "Smallest flips of 6 example(s), 3 of them within radius 0.5" in text
    assert "none" in text
    assert "0 → 1" in text
    assert "… and 4 more" in repr(smallest_flip(linear, own_score(POINTS.repeat(2, 1)), 0.5))


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"max_radius": 0}, ValueError, "radius must be a positive number"),
        ({"tol": 0}, ValueError, "tol must lie between 0 and 1, .*, got 0"),
        ({"tol": 1.5}, ValueError, "tol must lie between 0 and 1"),
        ({"n_radii": 0}, ValueError, "n_radii must be at least 1, got 0"),
        ({"n_radii": 1.5}, TypeError, "n_radii must be an integer, got float"),
        ({"surrogate": W}, TypeError, "surrogate must be a result"),
        ({"surrogate": AttackPath.of(own_score()), "bounds": (-9, 9)}, ValueError, "already has bounds"),
        ({"forward_func": lambda x: x @ W}, ValueError, r"expected scores \(N, C\)"),
    ],
)
def test_what_is_refused(changes, error, text):
    with pytest.raises(error, match=text):
        smallest_flip(**{"forward_func": linear, "surrogate": own_score(), "max_radius": 1.0, **changes})
