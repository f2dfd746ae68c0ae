"""CAFO and CASO: the change of the input that raises the cross-entropy most."""

import math
import warnings
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from smoothhess import Interactions, SmoothHess
from smoothhess.baselines import hessian
from smoothhess.baselines.caso import cafo, caso
from smoothhess.baselines.cross_entropy import cross_entropy, gauss_newton
from smoothhess.evaluate.attack import attack
from smoothhess.result.exact import Attribution
from smoothhess.result.minimize_in_ball import minimize_in_ball
from tests.model.test_state import Counting, Net, assert_same, snapshot

pytestmark = pytest.mark.rounding

D, C, B = 6, 4, 3
X = torch.randn(B, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
LABELS = [2, 0, 3]
TIGHT = {"solver": "CLARABEL", "tol_gap_abs": 1e-9, "tol_gap_rel": 1e-9, "tol_feas": 1e-9}


def net(activation=nn.ReLU, d=D, seed=0):
    torch.manual_seed(seed)
    f = nn.Sequential(nn.Linear(d, 16), activation(), nn.Linear(16, 16), activation(), nn.Linear(16, C)).double()
    with torch.no_grad():
        f[4].weight *= 8  # a network that is sure of something
    return f


def truth(f, labels, x=X):
    """Gradient and Hessian of the loss by torch.func."""
    found = []
    for point, label in zip(x, labels, strict=True):
        loss = lambda p, y=label: functional.cross_entropy(f(p[None]), torch.tensor([y]))
        found.append((torch.func.grad(loss)(point), torch.func.hessian(loss)(point)))
    g, H = zip(*found, strict=True)
    return torch.stack(g).detach(), torch.stack(H).detach()


def half_of(H):
    return float(torch.linalg.eigvalsh(H).max()) / 2


# --- the Hessian of the loss ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dense", [True, False])
def test_the_closed_form_is_the_hessian_of_a_relu_network(dense, monkeypatch):
    monkeypatch.setattr(import_module("smoothhess.baselines.cross_entropy"), "DENSE", 10_000 if dense else 0)
    f = net()
    g, H = truth(f, LABELS)
    result = gauss_newton(f, X, LABELS)
    assert callable(result.derivatives.curvature) == (not dense)
    torch.testing.assert_close(result.gradient, g, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(result.hessian, H, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(result[[2, 0]].hessian, H[[2, 0]], rtol=1e-9, atol=1e-12)
    expected = functional.cross_entropy(f(X), torch.tensor(LABELS), reduction="none").detach()
    torch.testing.assert_close(result.output, expected)
    values = torch.linalg.eigvalsh(result.hessian)
    assert (values > -1e-12).all()
    assert (values[:, : D - C + 1].abs() < 1e-12).all()  # rank below C
    assert (result.n_passes == C).all()


def test_a_smooth_network_has_more_than_the_closed_form():
    f = net(nn.Tanh)
    _, H = truth(f, LABELS)
    loss, labels = cross_entropy(f), torch.tensor(LABELS)
    assert (gauss_newton(f, X, LABELS).hessian - H).abs().max() > 1e-2
    torch.testing.assert_close(hessian(loss, X, None, labels).hessian, H, rtol=1e-9, atol=1e-11)


def test_a_model_that_is_sure_loses_no_digits():
    f = net()
    with torch.no_grad():
        f[4].weight *= 100
    sure = gauss_newton(f, X)
    assert sure.output.min() < 1e-6
    rounded = gauss_newton(f.float(), X.float())
    size = sure.hessian.abs().amax((1, 2), keepdim=True)
    assert ((rounded.hessian - sure.hessian).abs() / size).max() < 1e-4
    size = sure.gradient.abs().amax(1, keepdim=True)
    assert ((rounded.gradient - sure.gradient).abs() / size).max() < 1e-4


def test_labels_are_the_predicted_ones_unless_given():
    f = net()
    predicted = f(X).argmax(1)
    result = gauss_newton(f, X)
    assert result.target is None  # of the loss, which has one output
    torch.testing.assert_close(result.output, nn.functional.cross_entropy(f(X), predicted, reduction="none"))
    assert torch.equal(gauss_newton(f, X).hessian, gauss_newton(f, X, predicted).hessian)
    assert torch.equal(gauss_newton(f, X, -1).hessian, gauss_newton(f, X, C - 1).hessian)


def test_the_closed_form_attacks():
    f = net()
    result = gauss_newton(f, X)
    raised = attack(result, 0.05, maximize=True)
    assert (cross_entropy(f)(raised, f(X).argmax(1)) > result.output).all()


# --- CAFO -------------------------------------------------------------------------------------------------------------


def test_cafo_in_closed_form():
    f = net()
    g, _ = truth(f, LABELS)
    torch.testing.assert_close(cafo(f, X, LABELS, l2=0.5).gradient, g, rtol=1e-10, atol=1e-12)
    unit = g / g.norm(dim=1, keepdim=True)
    torch.testing.assert_close(cafo(f, X, LABELS, radius=0.3).gradient, 0.3 * unit, rtol=1e-10, atol=1e-12)
    l1 = float(g.abs().median())
    soft = g.sign() * (g.abs() - l1).clamp_min(0)
    result = cafo(f, X, LABELS, l1=l1, l2=2.0)
    torch.testing.assert_close(result.gradient, soft / 4, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(result.value, (g * soft).sum(1) / 4, rtol=1e-9, atol=1e-12)
    assert not result.hessian.any()
    assert not cafo(f, X, LABELS, l1=float(g.abs().max()) * 1.01, radius=1.0).gradient.any()


@pytest.mark.parametrize(("l2", "radius"), [(2.0, None), (2.0, 0.01), (0.0, 0.1), (2.0, 10.0)])
def test_cafo_against_cvxpy(l2, radius):
    cvxpy = pytest.importorskip("cvxpy")
    f = net()
    g, _ = truth(f, LABELS)
    l1 = 0.9 * float(g.abs().median())
    result = cafo(f, X, LABELS, l1=l1, l2=l2, radius=radius)
    for i in range(B):
        unit = cvxpy.Variable(D)  # in units of the answer's size, which the solver's tolerances are made for
        size = float(result.gradient[i].norm())
        x = size * unit
        rise = g[i].numpy() @ x - l1 * cvxpy.norm1(x) - l2 * cvxpy.sum_squares(x)
        scaled = rise / float(result.value[i])
        cvxpy.Problem(cvxpy.Maximize(scaled), [] if radius is None else [cvxpy.norm(unit) <= radius / size]).solve(
            **TIGHT
        )
        error = (result.gradient[i] - torch.from_numpy(x.value)).norm() / result.gradient[i].norm()
        assert error < 1e-4  # the solver stops at 1e-9 of the objective, which is flat at its top


def test_caso_of_no_curvature_is_cafo():
    f = nn.Linear(D, C).double()  # H is small against l2
    first, second = (explain(f, X, l1=0.01, l2=1e7) for explain in (cafo, caso))
    torch.testing.assert_close(first.gradient, second.gradient, rtol=1e-6, atol=1e-16)


# --- CASO -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dense", [True, False])
def test_caso_without_l1_is_a_linear_system(dense, monkeypatch):
    monkeypatch.setattr(import_module("smoothhess.baselines.cross_entropy"), "DENSE", 10_000 if dense else 0)
    monkeypatch.setattr(import_module("smoothhess.baselines.caso"), "DENSE", 10_000 if dense else 0)
    f = net()
    g, H = truth(f, LABELS)
    l2 = 1.5 * half_of(H)
    result = caso(f, X, LABELS, l2=l2)
    step = torch.linalg.solve(2 * l2 * torch.eye(D).double() - H, g)
    torch.testing.assert_close(result.gradient, step, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(result.hessian, step[:, :, None] * H * step[:, None], rtol=1e-7, atol=1e-11)
    rise = (g * step).sum(1) + torch.einsum("bi,bij,bj->b", step, H, step) / 2
    torch.testing.assert_close(result.value, rise, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(result.hessian.sum((1, 2)), 2 * (rise - (g * step).sum(1)), rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(result[[1]].hessian, result.hessian[[1]])


@pytest.mark.parametrize("radius", [None, 0.02])
def test_caso_with_l1_against_cvxpy(radius):
    cvxpy = pytest.importorskip("cvxpy")
    f = net()
    g, H = truth(f, LABELS)
    l1, l2 = 0.9 * float(g.abs().median()), 1.2 * half_of(H)
    result = caso(f, X, LABELS, l1=l1, l2=l2, radius=radius)
    assert (result.gradient == 0).any()
    for i in range(B):
        unit = cvxpy.Variable(D)  # in units of the answer's size, which the solver's tolerances are made for
        size = float(result.gradient[i].norm())
        x = size * unit
        Q = 2 * l2 * np.eye(D) - H[i].numpy()
        rise = g[i].numpy() @ x - cvxpy.quad_form(x, cvxpy.psd_wrap((Q + Q.T) / 2)) / 2 - l1 * cvxpy.norm1(x)
        scaled = rise / float(result.value[i])
        cvxpy.Problem(cvxpy.Maximize(scaled), [] if radius is None else [cvxpy.norm(unit) <= radius / size]).solve(
            **TIGHT
        )
        error = (result.gradient[i] - torch.from_numpy(x.value)).norm() / result.gradient[i].norm()
        assert error < 1e-4  # the solver stops at 1e-9 of the objective, which is flat at its top


@pytest.mark.parametrize("shrink", [True, False])
def test_smooth_caso_without_penalties_is_the_attack_on_the_loss(shrink):
    f, labels = net(), torch.tensor(LABELS)
    options = {"sigma": 0.3, "n_calls": 240, "shrink": shrink, "seed": 4}
    estimate = SmoothHess(cross_entropy(f)).attribute(X, None, labels, **options)
    assert torch.linalg.eigvalsh(estimate.hessian)[:, 0].min() < -1e-3  # not convex: no descent would do
    for radius in (0.1, 1.0):
        result = caso(f, X, labels, l1=0, l2=0, radius=radius, of=estimate)
        step = minimize_in_ball(-estimate.gradient, -estimate.hessian, radius)
        torch.testing.assert_close(result.gradient, step, rtol=0, atol=0)
        raised = attack(estimate, radius, maximize=True) - X
        torch.testing.assert_close(result.gradient, raised, rtol=1e-8, atol=1e-10)
        made = caso(f, X, labels, radius=radius, of="smooth", **options)
        torch.testing.assert_close(made.gradient, step, rtol=0, atol=0)
        rise = (estimate.gradient * step).sum(1) + torch.einsum("bi,bij,bj->b", step, estimate.hessian, step) / 2
        torch.testing.assert_close(result.value, rise, rtol=1e-10, atol=1e-12)
        assert (result.value >= cafo(f, X, labels, radius=radius, of=estimate).value - 1e-12).all()
    assert made.seed == 4
    assert torch.equal(made.n_calls, estimate.n_calls)


def test_l2_in_a_ball():
    f = net()
    g, H = truth(f, LABELS)
    eye = torch.eye(D).double()
    for l2 in (0.3 * half_of(H), 3 * half_of(H)):  # not concave, and concave
        result = caso(f, X, LABELS, l2=l2, radius=0.4)
        torch.testing.assert_close(result.gradient, minimize_in_ball(-g, 2 * l2 * eye - H, 0.4), rtol=1e-7, atol=1e-9)
    wide = caso(f, X, LABELS, l2=3 * half_of(H), radius=1e3)  # the ball does not matter
    torch.testing.assert_close(wide.gradient, caso(f, X, LABELS, l2=3 * half_of(H)).gradient, rtol=1e-8, atol=1e-10)


def test_the_bound_on_l2_is_sharp_and_said():
    f = net()
    _, H = truth(f, LABELS)
    half = half_of(H)
    with pytest.raises(ValueError, match=rf"l2 must exceed half the largest eigenvalue of H, {half:.6g} for these"):
        caso(f, X, LABELS, l2=0.999 * half)
    with pytest.raises(ValueError, match=rf"no bound: l2 must exceed .*, {half:.6g} .*, got 0. Pass a larger l2, or a"):
        caso(f, X, LABELS)
    with pytest.raises(
        ValueError, match=rf"with l1 > 0 .* concave: l2 must exceed .* {half:.6g} .* Pass that, or l1=0"
    ):
        caso(f, X, LABELS, l1=0.1, l2=0.5 * half, radius=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.isfinite(caso(f, X, LABELS, l2=1.001 * half).gradient).all()


def test_other_sources():
    f, loss, labels = net(), cross_entropy(net()), torch.tensor(LABELS)
    own = caso(f, X, LABELS, radius=0.2, of="own")
    torch.testing.assert_close(own.gradient, caso(f, X, LABELS, radius=0.2).gradient, rtol=1e-7, atol=1e-9)
    given = caso(f, X, LABELS, radius=0.2, of=hessian(loss, X, None, labels))
    torch.testing.assert_close(own.gradient, given.gradient, rtol=1e-7, atol=1e-9)
    first = cafo(f, X, LABELS, radius=0.2, of="gauss_newton")
    torch.testing.assert_close(first.gradient, cafo(f, X, LABELS, radius=0.2).gradient, rtol=1e-10, atol=1e-12)
    softened = nn.Sequential(*[nn.Softplus(beta=6.0) if isinstance(m, nn.ReLU) else m for m in f])
    g, H = truth(softened, LABELS)
    soft = caso(f, X, LABELS, radius=0.2, of="softplus", beta=6.0)
    torch.testing.assert_close(soft.gradient, minimize_in_ball(-g, -H, 0.2), rtol=1e-7, atol=1e-9)
    assert torch.equal(soft.output, own.output)  # the loss of the model itself


def test_large_inputs_need_no_matrix():
    torch.manual_seed(0)
    f = nn.Sequential(nn.Flatten(), nn.Linear(3 * 40 * 40, 30), nn.ReLU(), nn.Linear(30, 10))
    x = torch.randn(2, 3, 40, 40, generator=torch.Generator().manual_seed(0))
    attacked = caso(f, x, radius=0.5)
    assert callable(attacked.derivatives.curvature)
    assert attacked.gradient.shape == x.shape
    torch.testing.assert_close(attacked.gradient.flatten(1).norm(dim=1), torch.full((2,), 0.5), rtol=1e-4, atol=0)
    estimate = gauss_newton(f, x)
    half = float(estimate.eigh(1).values.max()) / 2
    g = estimate.gradient.flatten(1)
    result = caso(f, x, l1=float(g.abs().quantile(0.5)), l2=1.5 * half)
    assert 0.2 < (result.gradient == 0).double().mean() < 0.8
    step = caso(f, x, l2=1.5 * half).gradient.flatten(1)
    torch.testing.assert_close(3 * half * step - estimate @ step, g, rtol=1e-3, atol=1e-6)


# --- the form of the result -------------------------------------------------------------------------------------------


def test_it_is_an_attribution(tmp_path):
    f = net()
    for result in (caso(f, X, radius=0.1), cafo(f, X, radius=0.1)):
        assert isinstance(result, Attribution)
        with pytest.raises(ValueError, match="is an attribution, not a Hessian"):
            attack(result, 0.1)
        with pytest.raises(ValueError, match="is an attribution"):
            attack(result, 0.1)
        result.save(tmp_path / "r.safetensors")
        assert torch.equal(Interactions.load(tmp_path / "r.safetensors").gradient, result.gradient)
        assert torch.equal(result.target[:, 0], f(X).argmax(1))


def test_arguments_follow_their_example_and_batches_do_not_matter():
    f, scale = net(), torch.tensor([1.0, 2.0, 3.0]).double()[:, None]
    g = lambda x, s, power: f(x) * s**power
    together = caso(g, X, LABELS, (scale, 1), radius=0.3, internal_batch_size=2)
    for i in range(B):
        alone = caso(lambda x, i=i: f(x) * scale[i], X[i : i + 1], LABELS[i], radius=0.3)
        torch.testing.assert_close(together.gradient[i : i + 1], alone.gradient, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(together.hessian[i : i + 1], alone.hessian, rtol=1e-7, atol=1e-11)


@pytest.mark.parametrize(
    "options", [{}, {"of": "smooth", "sigma": 0.3, "n_calls": 20}, {"of": "softplus", "beta": 2.0}]
)
@pytest.mark.parametrize("fail_after", [None, 0, 1, 2])
def test_the_model_is_given_back_as_it_was(options, fail_after):
    model = Net().eval()
    model.b.weight.grad = torch.ones_like(model.b.weight)
    model.fail_after = fail_after
    x = X[:, :4].float().requires_grad_()
    before = snapshot(model)
    explain = lambda: caso(model, x, radius=0.1, internal_batch_size=2, **options)
    if fail_after is None:
        explain()
    else:
        with pytest.raises(RuntimeError, match="midway"):
            explain()
    assert_same(before, snapshot(model))
    assert x.grad is None


def test_buffers_are_put_back():
    model = Counting()
    caso(model, X[:, :4].float(), radius=0.1)
    cafo(model, X[:, :4].float(), radius=0.1)
    assert int(model.calls) == 0


@pytest.mark.parametrize("explain", [cafo, caso])
@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"l1": -0.1}, ValueError, "l1, the weight of a penalty, must be a number ≥ 0, got -0.1"),
        ({"l2": -1}, ValueError, "l2, the weight of a penalty, must be a number ≥ 0, got -1"),
        ({"l1": math.nan}, ValueError, "l1, .* got nan"),
        ({"l2": math.inf}, ValueError, "l2, .* got inf"),
        ({"l1": "1"}, ValueError, "l1, .* got '1'"),
        ({"radius": 0}, ValueError, "radius must be a positive number, .*, got 0"),
        ({"radius": -1.0}, ValueError, "radius must be a positive number, .*, got -1.0"),
        ({"radius": None}, ValueError, "no bound"),
        (
            {"forward_func": lambda x: x.sum(1)},
            ValueError,
            r"must return logits \(3, C\) of at least two classes, got \(3,\)",
        ),
        ({"forward_func": lambda x: x[:, :1]}, ValueError, r"of at least two classes, got \(3, 1\)"),
        ({"forward_func": lambda x: (x, x)}, ValueError, "got tuple"),
        ({"forward_func": lambda x: (x - 100).log()}, ValueError, "logits are NaN or infinite"),
        ({"target": 9}, ValueError, "target 9 is out of range"),
        ({"target": [0, 1]}, ValueError, "expected one target per example"),
        ({"of": "relu"}, ValueError, "of must be .*got 'relu'"),
        (
            {"of": hessian(lambda x: x.prod(1), X)},
            ValueError,
            "must be a result for the cross-entropy for these labels",
        ),
        ({"of": gauss_newton(net(), X.flip(0))}, ValueError, "of must be a result for these inputs"),
        ({"of": gauss_newton(net(), X).groups(torch.tensor([0, 0, 1, 1, 2, 2]))}, ValueError, r"before groups\(\)"),
        ({"of": caso(net(), X, radius=0.1)}, ValueError, r"got an attribution \(CASO\)"),
        ({"of": gauss_newton(net(), X), "beta": 1.0}, TypeError, "takes no options, got beta"),
        ({"inputs": X[0]}, ValueError, r"inputs must be \(B, …\)"),
    ],
)
def test_what_is_refused(explain, changes, error, text):
    with pytest.raises(error, match=text):
        explain(**{"forward_func": net(), "inputs": X, "radius": 0.1, **changes})
