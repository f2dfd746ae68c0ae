"""Integrated Hessians against closed forms, a double sum, and Captum."""

import itertools
import warnings

import captum.attr
import numpy as np
import pytest
import torch
from torch import nn

from smoothhess import Interactions, Isotropic, attack
from smoothhess.baselines import hessian, softplus
from smoothhess.baselines.integrated_hessians import integrated_hessians
from smoothhess.baselines.log_quadrature import logarithmic_rule
from smoothhess.result.exact import Attribution
from tests.model.test_state import Counting, Net, assert_same, snapshot
from tests.truths import OneHidden, additive, quadratic

pytestmark = pytest.mark.rounding

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
START = torch.randn(3, 4, generator=torch.Generator().manual_seed(6), dtype=torch.float64)


def net(*sizes, activation=nn.Tanh, seed=0):
    torch.manual_seed(seed)
    layers = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), activation()]
    return nn.Sequential(*layers[:-1]).double()


def entries(result):
    return result.hessian.sum((1, 2))


# --- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_steps", [1, 2, 7])
def test_a_quadratic(n_steps):
    A, b = quadratic(4)
    f = lambda x: x @ b + ((x @ A) * x).sum(1) / 2
    result = integrated_hessians(f, X, baselines=START, n_steps=n_steps)
    move = X - START
    expected = move[:, :, None] * A * move[:, None] / 4  # ∫∫ αβ = 1/4
    expected = expected + torch.diag_embed(move * (b + START @ A + move @ A / 4))
    torch.testing.assert_close(result.hessian, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(result.value, f(X) - f(START), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("powers", [(1, 1, 0, 0), (2, 1, 3, 0), (4, 0, 0, 0), (1, 1, 1, 1), (5, 2, 1, 3)])
def test_a_monomial_is_shared_by_its_powers(powers):
    # of degree m: Γ_ij = a_i a_j f(x)/m², because f(tx) = t^m f(x) and ∫ −log(t) t^(m−1) dt = 1/m²
    a = torch.tensor(powers).double()
    f = lambda x: (x**a).prod(1)
    result = integrated_hessians(f, X, n_steps=6)
    expected = torch.outer(a, a) * (f(X) / a.sum() ** 2)[:, None, None]
    torch.testing.assert_close(result.hessian, expected, rtol=1e-11, atol=1e-13)


def test_additive_functions_have_no_cross_terms():
    result = integrated_hessians(additive(2, 2), X, of="softplus", beta=3.0, n_steps=12)
    assert not result.hessian[:, :2, 2:].any()
    assert result.hessian[:, 0, 1].abs().min() > 1e-4


def test_what_is_not_used_or_does_not_move_gets_nothing():
    f = net(3, 8, 1)
    result = integrated_hessians(lambda x: f(x[:, 1:]), X, baselines=START)
    assert not result.hessian[:, 0].any()
    still = START.clone()
    still[:, 2] = X[:, 2]
    result = integrated_hessians(net(4, 8, 1), X, baselines=still)
    assert not result.hessian[:, 2].any()
    assert not integrated_hessians(net(4, 8, 1), X, baselines=X).hessian.any()


# --- independent routes -----------------------------------------------------------------------------------------------


def double_sum(f, x, start, n=24):
    """The definition, by n² points of a Gauss–Legendre product rule and torch.func."""
    node, share = np.polynomial.legendre.leggauss(n)
    node, share = torch.from_numpy((node + 1) / 2), torch.from_numpy(share / 2)
    t, w = torch.outer(node, node).flatten(), torch.outer(share, share).flatten()
    move = x - start
    points = start + t[:, None] * move
    single = lambda p: f(p[None])[0]
    second = torch.func.vmap(torch.func.hessian(single))(points)
    first = torch.func.vmap(torch.func.grad(single))(points)
    gamma = torch.einsum("i,j,n,nij->ij", move, move, w * t, second)
    return gamma + torch.diag(move * (w @ first))


@pytest.mark.parametrize("activation", [nn.Tanh, nn.GELU])
def test_the_double_sum(activation):
    f = net(4, 10, 10, 2, activation=activation)
    result = integrated_hessians(f, X, [1, 0, 1], baselines=START)
    for i, column in enumerate([1, 0, 1]):
        expected = double_sum(lambda x, c=column: f(x)[:, c], X[i], START[i])
        torch.testing.assert_close(result.hessian[i], expected, rtol=1e-8, atol=1e-10)


def test_the_double_sum_of_a_softened_network():
    f = net(4, 6, 6, 1, activation=nn.ReLU)
    soft = nn.Sequential(*[nn.Softplus(beta=4.0) if isinstance(m, nn.ReLU) else m for m in f])
    result = integrated_hessians(f, X, of="softplus", beta=4.0, n_steps=48)
    for i in range(len(X)):
        expected = double_sum(lambda x: soft(x)[:, 0], X[i], torch.zeros(4).double(), n=48)
        torch.testing.assert_close(result.hessian[i], expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("of", ["own", "softplus"])
def test_row_sums_are_captums_integrated_gradients(of):
    f = net(4, 12, 12, 3, activation=nn.Tanh if of == "own" else nn.ReLU)
    theirs = f
    if of == "softplus":
        theirs = nn.Sequential(*[nn.Softplus(beta=5.0) if isinstance(m, nn.ReLU) else m for m in f])
    options = {} if of == "own" else {"beta": 5.0}
    target = [2, 0, 1]
    result = integrated_hessians(f, X, target, baselines=START, of=of, n_steps=64, **options)
    expected = captum.attr.IntegratedGradients(theirs).attribute(X, START, target, n_steps=200)
    torch.testing.assert_close(result.hessian.sum(2), expected, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(result.gradient, expected, rtol=1e-7, atol=1e-9)


# --- completeness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("of", "beta"), [("softplus", 3.0), ("swish", 3.0)])
def test_entries_add_up_to_the_softened_change(of, beta):
    f = net(4, 10, 10, 1, activation=nn.ReLU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = integrated_hessians(f, X, baselines=START, of=of, beta=beta, n_steps=60)
    torch.testing.assert_close(entries(result), result.value, rtol=1e-7, atol=1e-9)
    with torch.no_grad():
        output, change = f(X)[:, 0], (f(X) - f(START))[:, 0]
    assert (result.value - change).abs().max() > 1e-2  # that of the softened network, not of f
    torch.testing.assert_close(result.output, output)
    missed = (entries(result) - change).abs().max()
    assert "completeness" in result.note
    assert f"from f(x) − f(x′) by {float(missed):.2g}" in result.note


def test_a_relu_networks_own_derivatives_do_not_add_up():
    f = net(4, 10, 10, 1, activation=nn.ReLU)
    with (
        pytest.warns(UserWarning, match="the Hessian is exactly zero"),  # at every point of the path
        pytest.warns(UserWarning, match=r"3 of 3 .* do not add up .* use of='softplus', 'swish' or 'smooth'"),
    ):
        result = integrated_hessians(f, 3 * X, of="own")
    off = result.hessian - torch.diag_embed(result.hessian.diagonal(dim1=1, dim2=2))
    assert not off.any()


def test_a_relu_network_is_smoothed_by_default():
    f = net(4, 10, 10, 1, activation=nn.ReLU)
    with pytest.warns(UserWarning, match=r"smoothed with sigma=0\.\d+, 1/50 of the mean distance") as caught:
        result = integrated_hessians(f, 3 * X, n_calls=2000)
    assert len(caught) == 1
    sigma = float((3 * X).norm(dim=1).mean()) / 50
    assert f"smooth (n_calls 2000, sigma {sigma:g})" in result.method
    change = (f(3 * X) - f(0 * X))[:, 0].detach()
    total = result.hessian.sum((1, 2))
    assert bool(((total - result.value).abs() <= 0.05 * result.value.abs()).all())
    assert bool(((total - change).abs() <= 0.05 * change.abs().max()).all())


def test_a_smooth_network_and_a_given_sigma_need_no_default():
    smooth = net(4, 10, 1, activation=nn.Tanh)
    torch.testing.assert_close(integrated_hessians(smooth, X).hessian, integrated_hessians(smooth, X, of="own").hessian)
    kinked, options = net(4, 10, 1, activation=nn.ReLU), {"sigma": 0.5, "n_calls": 64}
    given = integrated_hessians(kinked, X, **options)
    torch.testing.assert_close(given.hessian, integrated_hessians(kinked, X, of="smooth", **options).hessian)


def test_too_few_steps_are_noticed():
    f = lambda x: (6 * x.sum(1)).sin()
    with pytest.warns(UserWarning, match="Use more n_steps"):
        integrated_hessians(f, X, n_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integrated_hessians(f, X, n_steps=60)


# --- the smoothed network ---------------------------------------------------------------------------------------------


def smoothed_truth(f, x, sigma, n_steps):
    gamma = torch.zeros(len(x), 4, 4).double()
    for t, w in zip(*logarithmic_rule(n_steps), strict=True):
        truth = f.truth(t * x, Isotropic(sigma))
        gamma += w * t * x[:, :, None] * truth.hessian * x[:, None] + torch.diag_embed(w * x * truth.gradient)
    return gamma


def test_smooth_in_closed_form():
    # the one-flip control variate knows a network of one hidden layer exactly
    f = OneHidden(4)
    result = integrated_hessians(f, X, of="smooth", sigma=0.6, n_calls=200, control="kink", n_steps=4)
    torch.testing.assert_close(result.hessian, smoothed_truth(f, X, 0.6, 4), rtol=1e-8, atol=1e-9)
    change = f.truth(X, Isotropic(0.6)).value - f.truth(0 * X, Isotropic(0.6)).value
    assert (result.value - change).abs().max() < 0.1


def test_smooth_sampled_is_unbiased_and_every_point_has_draws_of_its_own():
    f, expected = OneHidden(4), smoothed_truth(OneHidden(4), X, 0.6, 6)
    options = {"of": "smooth", "sigma": 0.6, "n_calls": 40, "control": None, "shrink": False, "n_steps": 6}
    seeds, copies = [*range(60)], X[:1].expand(60, -1)  # as many runs as there are copies
    result = integrated_hessians(f, copies, seed=seeds, **options)
    runs = result.hessian
    z = (runs.mean(0) - expected[0]) / (runs.std(0) / 60**0.5)
    assert z.abs().max() < 4
    assert z.square().mean() < 2
    again = integrated_hessians(f, X[:1], seed=7, **options)
    torch.testing.assert_close(again.hessian[0], runs[7], rtol=1e-12, atol=1e-14)
    assert (again.seed, result.seed) == (7, tuple(seeds))
    # with the same draws at every point, six points would be as noisy as one
    single = integrated_hessians(f, copies, seed=seeds, **{**options, "n_steps": 1}).hessian
    assert (runs.var(0) / single.var(0))[0, 1] < 0.7


def test_noise_is_not_called_incomplete():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = integrated_hessians(
            OneHidden(4), X, of="smooth", sigma=0.6, n_calls=40, control=None, shrink=False, n_steps=4, seed=[1, 2, 3]
        )
    assert "±" in result.note
    assert "computed from a sampled Hessian" in result.note
    assert result.seed == (1, 2, 3)


# --- the form of the result -------------------------------------------------------------------------------------------


def test_matrix_free_equals_dense():
    f = net(4, 10, 1, activation=nn.ReLU)
    dense = integrated_hessians(f, X, baselines=START, of="softplus", beta=2.0, n_steps=9)
    free = integrated_hessians(f, X, baselines=START, of="softplus", beta=2.0, n_steps=9, dense=False)
    assert callable(free.derivatives.curvature)
    v = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(free @ v, dense @ v, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(free[[2, 0]] @ v[:2], dense[[2, 0]] @ v[:2], rtol=1e-11, atol=1e-13)
    mask = torch.tensor([0, 1, 0, 1])
    torch.testing.assert_close(free.groups(mask).hessian, dense.groups(mask).hessian, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(free.hessian, dense.hessian, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(free.gradient, dense.gradient, rtol=1e-11, atol=1e-13)
    P = torch.nn.functional.one_hot(mask).double()
    torch.testing.assert_close(dense.groups(mask).hessian, P.T @ dense.hessian @ P)


def test_large_inputs_stay_matrix_free():
    x = torch.ones(1, 5000)
    result = integrated_hessians(lambda x: x.square().sum(1), x, n_steps=2, dense=False)
    assert callable(result.derivatives.curvature)
    torch.testing.assert_close(result.gradient, torch.ones_like(x))
    with pytest.warns(UserWarning, match="the Hessian is exactly zero"):
        flat = integrated_hessians(lambda x: x.sum(1), x, n_steps=2)  # a Hessian of zero is no operator
    torch.testing.assert_close(flat @ torch.ones(5000), torch.ones_like(x))


def test_it_is_an_attribution(tmp_path):
    result = integrated_hessians(net(4, 8, 1), X)
    assert isinstance(result, Attribution)
    assert result.method == "integrated Hessians, own"
    with pytest.raises(ValueError, match="not a Hessian"):
        attack(result, 0.1)
    result.save(tmp_path / "r.safetensors")
    assert torch.equal(Interactions.load(tmp_path / "r.safetensors").hessian, result.hessian)
    assert (result.n_passes >= 32).all()


def test_a_function_in_the_place_of_a_name():
    f = net(4, 8, 1, activation=nn.ReLU)
    named = integrated_hessians(f, X, of="softplus", beta=2.0)
    given = integrated_hessians(f, X, of=lambda *args, **options: softplus(*args, beta=2.0, **options))
    assert torch.equal(named.hessian, given.hessian)
    smooth = net(4, 8, 1)
    assert torch.equal(integrated_hessians(smooth, X, of=hessian).hessian, integrated_hessians(smooth, X).hessian)


@pytest.mark.parametrize(
    "baselines",
    [0.5, torch.tensor(0.5), torch.full((2, 2), 0.5), torch.full((1, 2, 2), 0.5), torch.full((3, 2, 2), 0.5)],
)
def test_forms_of_the_baseline(baselines):
    f = net(4, 8, 1)
    image, g = X.reshape(3, 2, 2), lambda x: f(x.flatten(1))
    expected = integrated_hessians(f, X, baselines=0.5 * torch.ones_like(X)).hessian
    result = integrated_hessians(g, image, baselines=baselines)
    torch.testing.assert_close(result.hessian, expected)
    assert result.gradient.shape == (3, 2, 2)


def test_arguments_follow_their_example_and_batches_do_not_matter():
    scale = torch.tensor([1.0, 2.0, 3.0]).double()
    f = lambda x, s: s * x.prod(1) * x.sum(1)
    together = integrated_hessians(f, X, None, scale, internal_batch_size=2)
    alone = integrated_hessians(lambda x: x.prod(1) * x.sum(1), X)
    torch.testing.assert_close(together.hessian, scale[:, None, None] * alone.hessian, rtol=1e-12, atol=1e-14)


def test_float32_follows_the_inputs():
    result = integrated_hessians(net(4, 8, 1).float(), X.float())
    assert result.hessian.dtype == result.value.dtype == torch.float32


@pytest.mark.parametrize(
    "options", [{}, {"of": "softplus", "beta": 2.0}, {"of": "smooth", "sigma": 0.3, "n_calls": 20}]
)
@pytest.mark.parametrize("fail_after", [None, 0, 3, 7])
@pytest.mark.filterwarnings("ignore")
def test_the_model_is_given_back_as_it_was(options, fail_after):
    model = Net().eval()
    model.b.weight.grad = torch.ones_like(model.b.weight)
    model.fail_after = fail_after
    x = X.float().requires_grad_()
    before = snapshot(model)
    if fail_after is None:
        integrated_hessians(model, x, 0, n_steps=3, **options)
    else:
        with pytest.raises(RuntimeError, match="midway"):
            integrated_hessians(model, x, 0, n_steps=3, **options)
    assert_same(before, snapshot(model))
    assert x.grad is None


@pytest.mark.filterwarnings("ignore")
def test_buffers_are_put_back():
    model = Counting()
    integrated_hessians(model, X.float(), 0, n_steps=2)
    assert int(model.calls) == 0


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"baselines": torch.zeros(5)}, ValueError, r"shape of one input \(4,\) or of the batch \(3, 4\), got \(5,\)"),
        ({"baselines": torch.zeros(2, 4)}, ValueError, r"or of the batch \(3, 4\), got \(2, 4\)"),
        ({"baselines": float("nan")}, ValueError, "baselines must hold finite numbers"),
        ({"baselines": torch.zeros(4, dtype=torch.bool)}, TypeError, "baselines must hold real numbers"),
        ({"n_steps": 0}, ValueError, "n_steps must be between 1 and 500 points, got 0"),
        ({"n_steps": 3.0}, TypeError, "n_steps must be an integer, got float"),
        ({"tolerance": 0}, ValueError, "tolerance must be positive, got 0"),
        (
            {"of": "relu"},
            ValueError,
            r'of must be "own", "softplus", "swish", "smooth", or a function .*, got \'relu\'',
        ),
        ({"of": hessian(lambda x: x.prod(1), X)}, ValueError, "of must be .* such as baselines.softplus, got Exact"),
        ({"of": lambda *a, **o: 3}, TypeError, "returns Interactions, got int"),
        ({"of": "softplus"}, TypeError, "missing .*'beta'"),
        ({"of": "softplus", "beta": 0.0}, ValueError, "beta must be a positive, finite number"),
        ({"of": "softplus", "beta": 1.0}, ValueError, "no such call was seen"),
        ({"of": "smooth"}, ValueError, "sigma"),
        ({"beta": 1.0}, TypeError, "unexpected keyword argument 'beta'"),
        ({"inputs": X[0]}, ValueError, r"inputs must be \(B, …\)"),
        ({"target": 5}, ValueError, "target 5 is out of range"),
    ],
)
def test_what_is_refused(changes, error, text):
    with pytest.raises(error, match=text):
        integrated_hessians(**{"forward_func": net(4, 8, 2), "inputs": X, "target": 0, "n_steps": 2, **changes})
