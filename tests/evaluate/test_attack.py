"""Attacks: exact on quadratics, never weaker than first order on their own surrogate, one path for all radii."""

import math

import pytest
import torch
from torch import nn

from smoothhess import SmoothHess, Taylor
from smoothhess.evaluate.attack import AttackPath, attack, margin
from smoothhess.result.exact import Attribution, Exact
from smoothhess.result.minimize_in_ball import kkt_residual, minimize_in_ball
from tests.truths import OneHidden, quadratic

A, SLOPE = quadratic(6)
X = torch.linspace(-1, 1, 24).reshape(4, 6).double()
F = OneHidden(6)
RADII = [0.1, 0.5, 2.0, 20.0]


def bowl(x):
    """A quadratic: its own surrogate, so an attack on it can be checked on the function itself."""
    return x @ SLOPE + (x @ A * x).sum(1) / 2


def result(f=F, x=X, **options):
    return SmoothHess(f).attribute(x, **{"sigma": 0.4, "n_calls": 240, **options})


def surrogate_at(taylor, points):
    return taylor(points[:, None])[:, 0]


def ball(radius, n=4_000, d=6, seed=0):
    """Points of the ball and of its sphere, (n, d)."""
    rng = torch.Generator().manual_seed(seed)
    direction = nn.functional.normalize(torch.randn(n, d, generator=rng).double(), dim=1)
    length = torch.rand(n, 1, generator=rng).double().pow(1 / d)
    length[::2] = 1
    return radius * length * direction


@pytest.mark.parametrize("radius", RADII)
def test_a_quadratic_is_minimised_itself(radius):
    found = attack(result(bowl), radius)
    step = found - X
    assert (step.norm(dim=1) <= radius * (1 + 1e-9)).all()
    others = bowl((X[:, None] + ball(radius)).flatten(0, 1)).reshape(4, -1).amin(1)
    assert (bowl(found) <= others + 1e-9).all()
    gradient, hessian = SLOPE + X @ A, A.expand(4, 6, 6)
    exact = minimize_in_ball(gradient, hessian, radius)
    torch.testing.assert_close(step, exact, rtol=1e-6, atol=1e-8 * radius)
    assert (kkt_residual(gradient, hessian, radius, step) < 1e-6).all()


def test_a_convex_quadratic_is_left_at_its_minimum():
    steep = A @ A + torch.eye(6).double()
    f = lambda x: x @ SLOPE + (x @ steep * x).sum(1) / 2
    found = attack(result(f), 100.0)
    torch.testing.assert_close(found, -torch.linalg.solve(steep, SLOPE).expand(4, 6), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("radius", RADII)
def test_second_order_lowers_the_surrogate_most(radius):
    taylor = result().taylor()
    start = taylor.value
    second = surrogate_at(taylor, attack(taylor, radius))
    first = surrogate_at(taylor, attack(taylor, radius, order=1))
    somewhere = taylor(X[:, None] + ball(radius)).amin(1)
    assert (second <= first + 1e-12).all()
    assert (second <= somewhere + 1e-12).all()
    assert (second < start).all()


def test_first_order_goes_down_the_gradient():
    estimate = result()
    expected = X - 0.7 * nn.functional.normalize(estimate.gradient, dim=1)
    torch.testing.assert_close(attack(estimate, 0.7, order=1), expected)
    torch.testing.assert_close(attack(estimate.taylor(1), 0.7), expected)
    torch.testing.assert_close(attack(estimate.taylor(), 0.7, order=1), expected)
    torch.testing.assert_close(attack(estimate, 0.7, order=1, maximize=True), 2 * X - expected)


def test_without_a_gradient_first_order_does_not_move():
    flat = Taylor(X, torch.zeros(4).double(), torch.zeros_like(X), None)
    assert torch.equal(attack(flat, 1.0), X)
    mixed = torch.zeros_like(X)
    mixed[1, 2] = 3
    moved = attack(Taylor(X, torch.zeros(4).double(), mixed, None), 1.0) - X
    assert torch.equal(moved.norm(dim=1), torch.tensor([0.0, 1, 0, 0]).double())


def test_without_a_gradient_second_order_goes_down_the_lowest_direction():
    curved = Taylor(X, torch.zeros(4).double(), torch.zeros_like(X), lambda rows: rows @ A)
    values, vectors = torch.linalg.eigh(A)
    assert values[0] < 0
    step = attack(curved, 0.5) - X
    torch.testing.assert_close((step @ vectors[:, 0]).abs(), torch.full((4,), 0.5).double())


def test_maximising_is_minimising_the_negative():
    estimate = result()
    taylor = estimate.taylor()
    negative = Taylor(X, -taylor.value, -taylor.gradient, lambda rows: -taylor.product(rows))
    torch.testing.assert_close(attack(estimate, 0.6, maximize=True), attack(negative, 0.6), rtol=1e-9, atol=1e-11)
    higher = surrogate_at(taylor, attack(estimate, 0.6, maximize=True))
    assert (higher >= taylor(X[:, None] + ball(0.6)).amax(1) - 1e-12).all()


def test_a_result_its_taylor_and_a_taylor_of_its_matrices_attack_alike():
    estimate = result()
    dense = estimate.hessian
    plain = Taylor(X, estimate.output, estimate.gradient, lambda rows: rows @ dense)
    exact = Exact.make(X, estimate.output, estimate.gradient, dense)
    expected = attack(estimate, 0.8)
    for other in (estimate.taylor(), plain, exact, exact.taylor()):
        torch.testing.assert_close(attack(other, 0.8), expected, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(attack(exact, 0.8, order=1), attack(estimate, 0.8, order=1))


def test_an_exact_result_without_curvature_attacks_to_first_order():
    gradient = torch.ones_like(X)
    linear = Exact.make(X, torch.zeros(4).double(), gradient)
    torch.testing.assert_close(attack(linear, 2.0), X - 2 * gradient / math.sqrt(6))


def test_the_path_deepens_with_the_radius():
    path = AttackPath.of(result())
    radii = torch.linspace(0.02, 3, 40).double()
    steps = torch.stack([path.step(float(r)) for r in radii], 1)  # (B, R, d)
    values = path.taylor.displaced(steps)
    assert (values[:, 1:] <= values[:, :-1] + 1e-12).all()
    assert (steps.norm(dim=2) <= radii * (1 + 1e-9)).all()


def test_every_radius_of_a_path_is_an_attack():
    estimate = result()
    path = AttackPath.of(estimate)
    for radius in RADII:
        torch.testing.assert_close(path(radius), attack(estimate, radius))


def test_each_example_may_have_its_radius():
    estimate = result()
    radii = torch.tensor([0.1, 0.4, 0.2, 2.0]).double()
    together = attack(estimate, radii)
    for i in range(4):
        torch.testing.assert_close(together[i], attack(estimate, float(radii[i]))[i], rtol=1e-9, atol=1e-11)
    first = attack(estimate, radii, order=1)
    torch.testing.assert_close((first - X).norm(dim=1), radii)


def test_change_splits_what_the_surrogate_says():
    path = AttackPath.of(result())
    step = path.step(0.5)
    linear, bent = path.change(step)
    torch.testing.assert_close(path.taylor.value + linear + bent, path.taylor.displaced(step[:, None])[:, 0])
    assert torch.equal(AttackPath.of(result(), order=1).change(step)[1], torch.zeros(4).double())


@pytest.mark.parametrize("radius", [0.3, 1.5])
@pytest.mark.parametrize("order", [1, 2])
def test_a_box_is_kept(radius, order):
    taylor = result().taylor()
    found = attack(taylor, radius, order=order, bounds=(-1, 1))
    assert (found.abs() <= 1 + 1e-12).all()
    assert ((found - X).norm(dim=1) <= radius * (1 + 1e-9)).all()
    clipped = attack(taylor, radius, order=order).clamp(-1, 1)
    surrogate = taylor if order == 2 else Taylor(X, taylor.value, taylor.gradient, None)
    assert (surrogate_at(surrogate, found) <= surrogate_at(surrogate, clipped) + 1e-12).all()
    first = attack(taylor, radius, order=1, bounds=(-1, 1))
    assert (surrogate_at(surrogate, found) <= surrogate_at(surrogate, first) + 1e-12).all()
    assert (surrogate_at(surrogate, found) < surrogate_at(surrogate, clipped) - 1e-6).any()


def test_a_wide_box_changes_nothing():
    estimate = result()
    torch.testing.assert_close(attack(estimate, 0.5, bounds=(-100, 100)), attack(estimate, 0.5), rtol=1e-6, atol=1e-8)


def test_a_box_is_kept_upwards_too():
    estimate = result()
    found = attack(estimate, 1.0, bounds=(-1, 1), maximize=True)
    assert (found.abs() <= 1 + 1e-12).all()
    assert (surrogate_at(estimate.taylor(), found) > estimate.output).all()


def test_images_keep_shape_and_type_and_stay_inside_to_the_last_bit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.rand(300, 1, 3, 4)
    found = attack(SmoothHess(model).attribute(x, target=1, radius=0.5, n_calls=100), 3.0, bounds=(0, 1))
    assert ((found == 0) | (found == 1)).any()
    assert (found >= 0).all()
    assert (found <= 1).all()
    assert found.shape == x.shape
    assert found.dtype == x.dtype
    assert not found.requires_grad


def test_nothing_of_the_result_is_changed():
    estimate = result()
    kept = [t.clone() for t in (estimate.inputs, estimate.gradient, estimate.hessian)]
    attack(estimate, 1.0, bounds=(-2, 2))
    attack(estimate, 1.0, order=1)
    assert all(
        torch.equal(a, b) for a, b in zip(kept, (estimate.inputs, estimate.gradient, estimate.hessian), strict=True)
    )


def test_many_features_are_attacked_without_a_matrix():
    d = 30_000
    rng = torch.Generator().manual_seed(0)
    w = torch.randn(3, d, generator=rng) / math.sqrt(d)
    f = lambda x: (x @ w[0]) + (x @ w[1]) * (x @ w[2])
    x = torch.randn(2, d, generator=rng)
    estimate = SmoothHess(f).attribute(x, sigma=0.5, n_calls=64, control=None, shrink=False)
    path = AttackPath.of(estimate)
    second, first = path.step(3.0), AttackPath.of(estimate, order=1).step(3.0)
    assert (second.norm(dim=1) <= 3.0 * (1 + 1e-4)).all()
    assert (sum(path.change(second)) <= sum(path.change(first)) + 1e-6).all()


# --- margins ----------------------------------------------------------------------------------------------------------


def net(seed=0, d=6, classes=4):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(d, 16), nn.ReLU(), nn.Linear(16, classes)).double().eval()


def test_a_margin_is_the_difference_of_two_scores():
    model = net()
    own, other = torch.tensor([0, 1, 2, 3]), torch.tensor([3, 2, 0, 1])
    scores = model(X)
    rows = torch.arange(4)
    torch.testing.assert_close(margin(model)(X, own, other), scores[rows, own] - scores[rows, other])
    torch.testing.assert_close(margin(model)(X, 2, torch.tensor(1)), scores[:, 2] - scores[:, 1])
    shifted = lambda x, s: model(x + s)
    torch.testing.assert_close(margin(shifted)(X, 2, 1, 0.3), (model(X + 0.3)[:, 2] - model(X + 0.3)[:, 1]))


def test_an_attack_on_a_margin_reaches_the_chosen_class():
    linear = nn.Linear(6, 4).double()
    own = linear(X).argmax(1)
    for step in (1, 2, 3):
        other = (own + step) % 4
        estimate = SmoothHess(margin(linear)).attribute(X, None, (own, other), sigma=0.3, n_calls=24)
        gap = estimate.output / estimate.gradient.norm(dim=1)  # the distance to the boundary between the two
        scores = linear(attack(estimate, gap * 1.001))
        assert (scores.gather(1, other[:, None]) > scores.gather(1, own[:, None])).all()
        scores = linear(attack(estimate, gap * 0.999))
        assert (scores.gather(1, other[:, None]) < scores.gather(1, own[:, None])).all()


@pytest.mark.parametrize(
    ("own", "text"),
    [
        (1.0, "own must be a class index or a tensor with one for each example, got float"),
        (True, "got bool"),
        ([0, 1, 2, 3], "got list"),
        (torch.tensor([0, 1]), r"got a tensor \(2,\) torch.int64. Pass additional_forward_args=\(own, other\)"),
        (torch.zeros(4), r"got a tensor \(4,\) torch.float32"),
        (7, "own holds classes outside 0 … 3"),
        (torch.tensor([0, 1, 2, -1]), "own holds classes outside 0 … 3"),
    ],
)
def test_what_a_margin_refuses(own, text):
    with pytest.raises(ValueError, match=text):
        margin(net())(X, own, 0)


def test_a_margin_wants_scores():
    with pytest.raises(ValueError, match=r"margin needs a model that returns scores \(N, C\), got \(4,\)"):
        margin(F)(X, 0, 1)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("radius", "text"),
    [
        (0, "radius must be a positive number, .*, got 0."),
        (-1.0, "radius must be a positive number, .*, got -1.0."),
        (math.nan, "radius must be a positive number, .*, got nan."),
        (math.inf, "radius must be a positive number, .*, got inf."),
        ("1", "radius must be a positive number, .*, got '1'."),
        (torch.ones(3), r"radius must be a number or one per example, \(4,\), got \(3,\)"),
        (torch.tensor([1.0, 1, 1, 0]), "radius must be positive and finite for every example"),
        (torch.tensor([1.0, 1, 1, math.nan]), "radius must be positive and finite for every example"),
    ],
)
def test_radii_that_are_refused(radius, text):
    for order in (1, 2):
        with pytest.raises(ValueError, match=text):
            attack(result(), radius, order=order)


def test_what_cannot_attack():
    estimate = result()
    with pytest.raises(ValueError, match="order must be 1 or 2, got 3"):
        attack(estimate, 1.0, order=3)
    with pytest.raises(TypeError, match=r"surrogate must be a result \(Interactions\) or a Taylor of one, got Tensor"):
        attack(estimate.hessian, 1.0)
    with pytest.raises(ValueError, match="group sums have no Taylor surrogate"):
        attack(estimate.groups(torch.tensor([0, 0, 1, 1, 2, 2])), 1.0)
    attribution = Attribution.make(X, estimate.output, estimate.gradient, estimate.hessian)
    for order in (1, 2):
        with pytest.raises(ValueError):
            attack(attribution, 1.0, order=order)
    broken = Taylor(X, estimate.output, estimate.gradient * math.nan, None)
    with pytest.raises(ValueError, match="the surrogate's gradient holds NaN or infinity"):
        attack(broken, 1.0)
    bent = Taylor(X, estimate.output, estimate.gradient, lambda rows: rows * math.nan)
    with pytest.raises(ValueError, match="NaN or inf"):
        attack(bent, 1.0)
    with pytest.raises(ValueError, match="4 of 4 inputs lie outside the bounds"):
        attack(estimate, 1.0, bounds=(3, 4))
