"""P_MSE against closed forms, and what must not change it."""

import math

import pytest
import torch
from torch import nn

from smoothhess import SmoothHess, Taylor
from smoothhess.evaluate import ball_samples, compare, perturbation_mse
from tests.truths import OneHidden, quadratic

TRUTHS = {"ball": lambda d: d / (d + 4), "radius": lambda d: 1 / 5}  # E|δ|⁴ in the unit ball


def square(x):
    return x.flatten(1).square().sum(1)


def flat(x):
    """The first-order Taylor of ‖x‖² at 0: nothing."""
    return Taylor(x, x.new_zeros(len(x)), x.new_zeros(x.flatten(1).shape), None)


def net(out=3, d=6, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(d, 12), nn.ReLU(), nn.Linear(12, out)).double().eval()


X = torch.linspace(-1, 1, 24).reshape(4, 6).double()


@pytest.mark.parametrize("sampling", TRUTHS)
@pytest.mark.parametrize("d", [1, 2, 50])
def test_square_has_its_closed_form(sampling, d):
    x = torch.zeros(1, d, dtype=torch.float64)
    truth = TRUTHS[sampling](d)
    scores = []
    for seed in range(40):
        table = compare(square, x, {"flat": flat(x)}, 1.0, n_samples=2_000, sampling=sampling, seed=seed)
        scores.append(float((table.errors - truth) / table.stderr))
        if seed == 0:
            same = perturbation_mse(square, x, flat(x), 1.0, n_samples=2_000, sampling=sampling)
            torch.testing.assert_close(same, table.errors[0, 0])
    scores = torch.tensor(scores)
    assert scores.abs().max() < 4.5
    assert (scores.abs() < 2).double().mean() > 0.85  # 95 % expected of 40
    assert abs(float(scores.mean())) * math.sqrt(40) < 4


@pytest.mark.parametrize("sampling", TRUTHS)
def test_the_asked_for_number(sampling):
    """‖x‖² at 0, radius 1, d = 50: 50/54 and 1/5."""
    x = torch.zeros(1, 50, dtype=torch.float64)
    table = compare(square, x, {"flat": flat(x)}, 1.0, n_samples=20_000, sampling=sampling)
    assert abs(float((table.errors - {"ball": 50 / 54, "radius": 1 / 5}[sampling]) / table.stderr)) < 4
    assert float(table.stderr) < {"ball": 1e-3, "radius": 3e-3}[sampling]


def test_radius_scales_the_draws():
    x = torch.zeros(1, 8, dtype=torch.float64)
    one, two = (perturbation_mse(square, x, flat(x), r, n_samples=500) for r in (1.0, 2.0))
    torch.testing.assert_close(two, 16 * one)


def test_an_exact_surrogate_has_no_error():
    f = net(1)
    points_first = lambda points: f(points.flatten(0, 1)).reshape(points.shape[:2])
    assert (perturbation_mse(f, X, points_first, 0.7, n_samples=300) < 1e-28).all()


def test_a_quadratic_has_no_error_with_its_own_taylor():
    a, b = quadratic(6)
    f = lambda x: x @ b + (x @ a * x).sum(1) / 2
    own = Taylor(X, f(X), b + X @ a, lambda rows: rows @ a)
    assert (perturbation_mse(f, X, own, 2.0, n_samples=300) < 1e-25).all()
    assert (perturbation_mse(f, X, SmoothHess(f).attribute(X, sigma=1.0, n_calls=24).taylor(), 2.0) < 1e-20).all()
    without = Taylor(X, f(X), b + X @ a, None)
    assert (perturbation_mse(f, X, without, 2.0, n_samples=300) > 1e-2).all()


def test_a_taylor_and_its_call_at_absolute_points_agree():
    f = OneHidden(6)
    taylor = SmoothHess(f).attribute(X, sigma=0.3, n_calls=100).taylor()
    torch.testing.assert_close(
        perturbation_mse(f, X, taylor, 0.5, n_samples=400),
        perturbation_mse(f, X, lambda points: taylor(points), 0.5, n_samples=400),
        rtol=1e-10,
        atol=0,
    )


@pytest.mark.parametrize("rows", [1, 7, 64, 10_000])
def test_batch_size_changes_nothing(rows):
    f = net()
    whole, parts = (
        perturbation_mse(f, X, lambda p: p.sum(-1), 0.5, [0, 1, 2, 0], n_samples=201, internal_batch_size=size)
        for size in (None, rows)
    )
    torch.testing.assert_close(whole, parts, rtol=1e-12, atol=0)


def test_no_more_points_at_once_than_asked_for_and_no_more_in_all(monkeypatch):
    monkeypatch.setattr(ball_samples, "CHUNK_ROWS", 40)
    seen, held = [], []

    def f(x):
        assert not torch.is_grad_enabled()
        seen.append(len(x))
        return x.sum(1)

    def surrogate(points):
        held.append(points.shape[0] * points.shape[1])
        return points.sum(-1)

    chunked = perturbation_mse(f, X, lambda p: surrogate(p) ** 2, 0.5, n_samples=53, internal_batch_size=6)
    assert max(seen) == 6
    assert sum(seen) == 4 * 53
    assert max(held) <= 40
    monkeypatch.undo()
    whole = perturbation_mse(lambda x: x.sum(1), X, lambda p: p.sum(-1) ** 2, 0.5, n_samples=53)
    torch.testing.assert_close(chunked, whole, rtol=1e-12, atol=0)


def test_examples_share_their_draws():
    twice = X[:1].repeat(3, 1)
    f = net(1)
    together = perturbation_mse(f, twice, lambda p: 0 * p.sum(-1), 0.5, n_samples=100)
    alone = perturbation_mse(f, X[:1], lambda p: 0 * p.sum(-1), 0.5, n_samples=100)
    torch.testing.assert_close(together, alone.expand(3), rtol=1e-12, atol=0)
    assert not torch.allclose(alone, perturbation_mse(f, X[:1], lambda p: 0 * p.sum(-1), 0.5, n_samples=100, seed=1))


@pytest.mark.parametrize("target", [1, [2, 0, 1, 1], torch.tensor([0, 1, 2, 0]), [(0,), (2,), (1,), (0,)]])
def test_targets_follow_their_example(target):
    f = net()
    columns = [target] * 4 if isinstance(target, int) else [int(t[0] if isinstance(t, tuple) else t) for t in target]
    zero = lambda points: points.new_zeros(points.shape[:2])
    together = perturbation_mse(f, X, zero, 0.5, target, n_samples=150)
    alone = [
        perturbation_mse(lambda x, c=c: f(x)[:, c], X[i : i + 1], zero, 0.5, n_samples=150)
        for i, c in enumerate(columns)
    ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-12, atol=0)


def test_additional_arguments_follow_their_example():
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    f = lambda x, s, power: s * x.sum(1) ** power
    zero = lambda points: points.new_zeros(points.shape[:2])
    together = perturbation_mse(f, X, zero, 0.5, None, (scale, 2), n_samples=150, internal_batch_size=31)
    alone = perturbation_mse(lambda x: x.sum(1) ** 2, X, zero, 0.5, n_samples=150)
    torch.testing.assert_close(together, alone * scale**2, rtol=1e-12, atol=0)


def test_images_keep_their_shape():
    x = torch.zeros(2, 1, 3, 4)
    seen = []
    f = lambda x: seen.append(x.shape[1:]) or square(x)
    error = perturbation_mse(f, x, lambda points: points.flatten(2).square().sum(-1), 1.0, n_samples=50)
    assert set(seen) == {(1, 3, 4)}
    assert error.shape == (2,)
    assert error.dtype == x.dtype
    assert (error < 1e-10).all()


def test_the_model_is_given_back_as_it_was():
    f = net()
    f.train()  # no dropout or batch-norm: allowed
    state = {k: v.clone() for k, v in f.state_dict().items()}
    inputs, random = X.clone().requires_grad_(), torch.random.get_rng_state()
    error = perturbation_mse(f, inputs, lambda p: p.sum(-1), 0.5, 0, n_samples=50)
    assert not error.requires_grad
    assert all(torch.equal(v, state[k]) for k, v in f.state_dict().items())
    assert f.training
    assert all(p.requires_grad and p.grad is None for p in f.parameters())
    assert not f._forward_hooks
    assert torch.equal(inputs, X)
    assert torch.equal(random, torch.random.get_rng_state())
    assert torch.is_grad_enabled()


def test_a_model_that_works_in_place_is_served():
    f = lambda x: x.mul_(2).sum(1)
    assert (perturbation_mse(f, X, lambda p: 2 * p.sum(-1), 0.5, n_samples=50) < 1e-26).all()


def test_a_lack_of_memory_is_met_with_smaller_batches():
    def f(x):
        x.mul_(2)  # in place, so the second attempt must not see what the first one did
        if len(x) > 50:
            raise torch.OutOfMemoryError("pretended")
        return x.sum(1)

    assert (perturbation_mse(f, X, lambda p: 2 * p.sum(-1), 0.5, n_samples=50) < 1e-26).all()


def test_works_without_gradients_and_after_an_error_they_are_back():
    with torch.no_grad():
        perturbation_mse(net(1), X, lambda p: p.sum(-1), 0.5, n_samples=50)
        assert not torch.is_grad_enabled()
    with pytest.raises(ValueError):
        perturbation_mse(net(1), X, lambda p: p, 0.5, n_samples=50)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"radius": 0}, ValueError, "radius must be a positive number, .*, got 0."),
        ({"radius": -1.5}, ValueError, "radius must be a positive number, .*, got -1.5."),
        ({"radius": math.inf}, ValueError, "radius must be a positive number, .*, got inf."),
        ({"radius": math.nan}, ValueError, "radius must be a positive number, .*, got nan."),
        ({"radius": "1"}, ValueError, "radius must be a positive number, .*, got '1'."),
        ({"sampling": "sphere"}, ValueError, 'sampling must be "ball" .* or "radius" .*, got \'sphere\'.'),
        ({"n_samples": 1}, ValueError, "n_samples must be at least 2, got 1."),
        ({"n_samples": 1e4}, TypeError, "n_samples must be an integer, got float."),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1."),
        (
            {"internal_batch_size": 0},
            ValueError,
            "internal_batch_size must be a whole number of rows, at least 1",
        ),
        ({"inputs": X[0]}, ValueError, r"inputs must be \(B, …\)"),
        ({"inputs": X.long()}, TypeError, "inputs must be float32 or float64"),
        ({"target": 7}, ValueError, r"target 7 is out of range for an output of shape"),
        ({"target": None}, ValueError, r"without a target the output must be \(N,\) or \(N, 1\)"),
        ({"target": [0, 1]}, ValueError, "expected one target per example, got 2 targets for 4"),
        ({"surrogate": 3}, TypeError, "surrogate 'surrogate' must be a Taylor or a callable .*, got int"),
        (
            {"surrogate": SmoothHess(square).attribute(X, sigma=1.0, n_calls=20)},
            TypeError,
            r"got Interactions. Pass result.taylor\(\)",
        ),
        (
            {"surrogate": lambda p: p.sum(-1).T},
            ValueError,
            r"must map points \(4, 50, 6\) to values \(4, 50\), got \(50, 4\). Points are \(B, n, \*shape\)",
        ),
        ({"surrogate": lambda p: p.sum(-1, keepdim=True)}, ValueError, r"got \(4, 50, 1\)"),
        ({"surrogate": lambda p: 1.0}, ValueError, r"to values \(4, 50\), got float"),
        (
            {"surrogate": lambda p: p.sum(-1) * math.nan},
            ValueError,
            "surrogate 'surrogate' returns NaN or infinite values in this neighbourhood. Check",
        ),
        (
            {"surrogate": flat(X[:2])},
            ValueError,
            r"made around these inputs, \(4, 6\) torch.float64, got one around \(2, 6\)",
        ),
        ({"surrogate": flat(X.float())}, ValueError, r"got one around \(4, 6\) torch.float32"),
        ({"surrogate": flat(X.flip(0))}, ValueError, "around others of the same shape. Pass the same batch"),
        (
            {"forward_func": lambda x: x.log()},
            ValueError,
            "the model's output is NaN or infinite near these inputs. .* smaller sigma or radius",
        ),
        ({"forward_func": lambda x: x[:1]}, ValueError, "the model returned 1 rows for 200 inputs"),
        ({"forward_func": lambda x: (x, x)}, TypeError, "the model must return one tensor, got tuple"),
        (
            {"forward_func": nn.Sequential(nn.Dropout(0.5), net())},
            ValueError,
            r"layer '0' \(Dropout\) is in training mode",
        ),
    ],
)
def test_what_is_refused(changes, error, text):
    arguments = {"forward_func": net(), "inputs": X, "surrogate": lambda p: p.sum(-1), "radius": 0.5, "target": 0}
    with pytest.raises(error, match=text):
        perturbation_mse(**{"n_samples": 50, **arguments, **changes})
