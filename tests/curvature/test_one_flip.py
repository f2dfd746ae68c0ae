"""The one-flip closed form, and the control variate: exact where it can be, unbiased everywhere."""

import functools
import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from smoothhess import Isotropic, SmoothHess, from_gradient
from smoothhess.curvature.flip_field import flips
from smoothhess.curvature.one_flip import Kinks
from smoothhess.draws.designs import DESIGNS
from smoothhess.linalg.memory import ByteLimit
from smoothhess.model.gradients import Oracle
from tests.truths import OneHidden, gaussians


class Residual(nn.Module):
    """A shared layer called twice, skip connections, leaky, PReLU, hardtanh and abs, functional and in-place calls."""

    def __init__(self, d=2, width=10):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.shared = nn.Linear(d, width), nn.Linear(width, width)
        self.prelu, self.last = nn.PReLU(width), nn.Linear(width, 3)
        nn.init.uniform_(self.prelu.weight, 0.1, 0.6)

    def forward(self, x):
        h = self.first(x).relu_()
        h = h + functional.leaky_relu(self.shared(h), 0.2)
        h = h + self.prelu(self.shared(h))
        return self.last(functional.hardtanh(h, -1.0, 2.0) + 0.3 * h.abs())


class Pooled(nn.Module):
    """Convolution, batch-norm in eval mode, max-pooling and a softmax head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Sequential(
            nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(12, 3)
        )

    def forward(self, x):
        return self.body(x.reshape(-1, 1, 6)).softmax(-1)


def mlp(d, *widths, activation=nn.ReLU):
    torch.manual_seed(3)
    layers, sizes = [], [d, *widths]
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 3))


NETWORKS = {
    "mlp": (lambda: mlp(6, 16, 16), (6,)),
    "residual": (lambda: Residual(6), (6,)),
    "pooled": (Pooled, (6,)),
    "gelu and relu": (lambda: nn.Sequential(nn.Linear(6, 9), nn.GELU(), mlp(9, 9)), (6,)),
}


@pytest.mark.parametrize("kind", sorted(gaussians(5)))
@pytest.mark.parametrize("d", [1, 2, 6])
def test_one_hidden_layer_is_exact_from_two_calls(kind, d):
    net, gaussian = OneHidden(d), gaussians(d)[kind]
    x = torch.stack([0.3 * torch.ones(d), -0.2 * torch.ones(d)]).double()
    truth = net.truth(x, gaussian)
    result = SmoothHess(net).attribute(x, gaussian=gaussian, n_calls=2, control="kink")
    torch.testing.assert_close(result.hessian, truth.hessian, rtol=0, atol=1e-10)
    torch.testing.assert_close(result.gradient, truth.gradient, rtol=0, atol=1e-10)
    torch.testing.assert_close(result.value, truth.value, rtol=0, atol=1e-10)
    assert (result.control, result.unbiased) == ("kink", True)
    pilot = 3 * 16  # two gradients and a frozen pass for each of 16 pairs
    check = 1 + 4 * 4 + gaussian.rank(d) / 2 + 2 * 8  # of independence: operations, perturbed inputs, and kinks
    assert result.n_passes.tolist() == [2 + 1.5 + 2 + 1 + gaussian.rank(d) / 2 + pilot + check] * 2


def seen(net, x, target=1):
    oracle = Oracle(net, x, target)
    value, gradient = oracle(x, torch.arange(len(x)))
    return Kinks.see(oracle, x, value, gradient)


@pytest.mark.parametrize("name", sorted(NETWORKS))
@pytest.mark.parametrize("kind", ["isotropic", "dense", "singular"])
def test_the_expectation_of_the_flips_is_the_closed_form(name, kind):
    """E[z g̃ᵀ] = W₁, E[g̃] = Γ₁, and the mean of the potential is v₁, on deep networks, by z-score."""
    make, shape = NETWORKS[name]
    net, gaussian = make().double().eval(), gaussians(6)[kind]
    x = 0.4 * torch.randn(1, *shape, generator=torch.Generator().manual_seed(0)).double()
    kinks = seen(net, x)
    expected = kinks.expectation(gaussian)
    z = torch.randn(10_000, gaussian.rank(6), generator=torch.Generator().manual_seed(1)).double()
    points = (x + gaussian.colour(z))[None]
    one_sided = gaussian.pull(flips(kinks.network, points, torch.arange(1), mirrored=False)[0][0])
    found = flips(kinks.network, points, torch.arange(1), mirrored=True)
    odd, even = (gaussian.pull(f[0]) for f in (found.odd, found.even))
    for there, around in ((one_sided, one_sided), (odd, even)):
        for sample, truth in (
            (z[:, :, None] * there[:, None], expected.hessian.dense()[0]),
            (around, expected.gradient[0]),
            (found.value[0], expected.value[0]),
        ):
            error, se = (sample.mean(0) - truth).abs(), sample.std(0) / math.sqrt(len(z))
            assert (error <= 5 * se + 1e-12).all()


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_mirror_images_need_no_pass_of_their_own(name):
    make, shape = NETWORKS[name]
    net, x = make().double().eval(), 0.4 * torch.randn(2, *shape, generator=torch.Generator().manual_seed(8)).double()
    kinks = seen(net, x)
    delta = torch.randn(2, 50, *shape, generator=torch.Generator().manual_seed(3)).double()
    there, back = (flips(kinks.network, x[:, None] + d, torch.arange(2), mirrored=False)[0] for d in (delta, -delta))
    odd, even, _ = flips(kinks.network, x[:, None] + delta, torch.arange(2), mirrored=True)
    torch.testing.assert_close(odd, (there - back) / 2, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(even, (there + back) / 2, rtol=1e-8, atol=1e-12)


def test_columns_that_do_not_fit_are_taken_twice(monkeypatch):
    net = Residual(6).double().eval()
    x = torch.zeros(2, 6).double() + torch.tensor([[0.1], [0.7]])
    gaussian = gaussians(6)["dense"]
    stored = seen(net, x).expectation(gaussian, layers=True)
    monkeypatch.setattr("smoothhess.curvature.one_flip.NEURON_GRADIENTS", ByteLimit(0))
    streamed = seen(net, x).expectation(gaussian, layers=True)
    torch.testing.assert_close(stored.hessian.dense(), streamed.hessian.dense(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(stored.gradient, streamed.gradient, rtol=1e-9, atol=1e-12)
    assert len(streamed.layers) == 5
    assert stored.passes.tolist() == [3, 3]
    assert streamed.passes.tolist() == [9 + 4 * 3] * 2  # a backward pass more for each further layer
    assert seen(net, x).expectation(gaussian).passes.tolist() == [9, 9]
    for parts in (stored, streamed):
        torch.testing.assert_close(torch.stack(parts.layers).sum(0), parts.hessian.dense(), rtol=1e-9, atol=1e-12)
    for a, b in zip(stored.layers, streamed.layers, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@functools.cache
def long_run(name):
    """A network, an input, and their SmoothHess at σ = 0.6 from many calls, for all designs."""
    make, shape = NETWORKS[name]
    net, x = make().double().eval(), 0.4 * torch.randn(1, *shape, generator=torch.Generator().manual_seed(0)).double()
    return net, x, SmoothHess(net).attribute(x, 1, sigma=0.6, n_calls=20_000, seed=77)


@pytest.mark.parametrize("design", sorted(DESIGNS))
@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_unbiased_on_deep_networks(name, design):
    """Mean over seeds against a long plain run."""
    (net, x, long), seeds = long_run(name), 100
    options = {"sigma": 0.6, "n_calls": 48, "seed": range(seeds), "design": design}
    many = SmoothHess(net).attribute(x.repeat_interleave(seeds, 0), 1, control="kink", shrink=False, **options)
    for estimate, truth, own in (
        (many.hessian, long.hessian[0], long.stderr()[0]),
        (many.gradient, long.gradient[0], long.gradient_stderr[0]),
    ):
        error = (estimate.mean(0) - truth).abs()
        assert (error <= 5 * (estimate.var(0) / seeds + own**2).sqrt() + 1e-12).all()


def quadrature(net, target, sigma):
    """E[z γᵀ]/σ² at 0 of a 2-D network, on a fine grid."""
    axis = torch.linspace(-6, 6, 601).double()
    z = torch.cartesian_prod(axis, axis)
    weight = torch.exp(-z.square().sum(1) / 2)
    points = (sigma * z).requires_grad_()
    (g,) = torch.autograd.grad(net(points)[:, target].sum(), points)
    hessian = (weight[:, None] * z).mT @ g / weight.sum() / sigma
    return (hessian + hessian.mT) / 2


@pytest.mark.parametrize("sigma", [0.1, 2.0])
def test_against_quadrature(sigma):
    """Also at a σ where many units flip at once and the closed form alone is far off."""
    net = Residual(2).double().eval()
    truth = quadrature(net, 1, sigma)
    x = torch.zeros(1, 2).double()
    closed = seen(net, x).expectation(Isotropic(sigma)).hessian.dense() / sigma**2
    result = SmoothHess(net).attribute(x, 1, sigma=sigma, n_calls=4_000, control="kink")
    z = (result.hessian[0] - truth).abs() / (result.stderr()[0] + 2e-3 * truth.abs().max() / 5)
    assert z.max() < 5
    if sigma == 2.0:
        assert (closed[0] - truth).norm() > 0.2 * truth.norm()


def test_less_noise_than_without():
    net = mlp(12, 40, 40).double()
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(0)).double()
    with_control, without = (
        SmoothHess(net).attribute(x, 0, sigma=0.03, n_calls=96, control=control) for control in ("kink", None)
    )
    assert with_control.noise.of_frobenius.mean() < 0.2 * without.noise.of_frobenius.mean()
    torch.testing.assert_close(with_control.stein_z, without.stein_z)  # the check is on the model, not on the rest


@pytest.mark.parametrize("d", [12])
def test_intervals_stay_honest(d):
    """Coverage of the residual's error bars on a deep network."""
    net, seeds = mlp(d, 24, 24).double(), 100
    x = 0.3 * torch.ones(1, d).double()
    truth = SmoothHess(net).attribute(x, 0, sigma=0.5, n_calls=2 * d * 1000, seed=5, control="kink", shrink=False)
    truth = truth.hessian[0]
    many = x.expand(seeds, d).clone()
    for blocks in (1, 4):
        result = SmoothHess(net).attribute(
            many, 0, sigma=0.5, n_calls=2 * d * blocks, seed=range(seeds), control="kink"
        )
        inside = []
        for i in range(d):
            low, high = result.row(i).interval()
            inside.append((low <= truth[i]) & (truth[i] <= high))
        assert 0.92 <= float(torch.stack(inside).double().mean()) <= 0.985


EXACT = {"rtol": 1e-8, "atol": 1e-11}


def test_more_batches_groups_and_files(tmp_path):
    net = Residual(6).double().eval()
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)).double()
    explainer, options = SmoothHess(net), {"sigma": 0.3, "control": "kink", "shrink": False}
    whole = explainer.attribute(x, [0, 1, 2], n_calls=60, **options)
    grown = explainer.more(explainer.attribute(x, [0, 1, 2], n_calls=20, **options), 40)
    torch.testing.assert_close(grown.hessian, whole.hessian, **EXACT)
    torch.testing.assert_close(grown.gradient, whole.gradient, **EXACT)
    for i in range(3):
        one = explainer.attribute(x[i : i + 1], i, n_calls=60, **options)
        torch.testing.assert_close(one.hessian, whole[i].hessian, **EXACT)
    torch.testing.assert_close(
        explainer.attribute(x, [0, 1, 2], n_calls=60, internal_batch_size=7, **options).hessian, whole.hessian, **EXACT
    )
    mask = torch.tensor([0, 0, 1, 1, 2, 2])
    streamed = explainer.attribute(x, [0, 1, 2], n_calls=60, feature_mask=mask, **options)
    torch.testing.assert_close(streamed.hessian, whole.groups(mask).hessian, **EXACT)
    torch.testing.assert_close(streamed.stderr(), whole.groups(mask).stderr(), rtol=1e-6, atol=1e-10)
    whole.save(tmp_path / "r")
    torch.testing.assert_close(type(whole).load(tmp_path / "r").hessian, whole.hessian, **EXACT)
    v = torch.linspace(-1, 1, 6).double()
    torch.testing.assert_close(whole @ v, whole.hessian @ v, **EXACT)
    plain = explainer.attribute(x, [0, 1, 2], n_calls=60, sigma=0.3, seed=1, control=None, shrink=False)
    torch.testing.assert_close(whole.merge(plain).hessian, (whole.hessian + plain.hessian) / 2, **EXACT)
    other = explainer.attribute(x, [0, 1, 2], n_calls=60, seed=1, **options)  # weights of its own
    both = whole.merge(other)
    torch.testing.assert_close(both.hessian, (whole.hessian + other.hessian) / 2, **EXACT)
    # goes on in the stream of seed 1 with the weights of seed 0
    further = explainer.more(replace(other, control_weights=whole.control_weights), 60)
    rows = 2 * further.hessian - other.hessian
    torch.testing.assert_close(explainer.more(both, 60).hessian, (2 * both.hessian + rows) / 3, **EXACT)


def test_the_model_is_given_back():
    net = Pooled().double().eval()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    SmoothHess(net).attribute(torch.ones(2, 6).double(), 1, sigma=0.3, n_calls=20, control="kink")
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert not any(m._forward_hooks for m in net.modules())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_cannot_be_seen_is_refused():
    x = torch.ones(1, 6)
    scripted = torch.jit.script(mlp(6, 4))
    with pytest.raises(ValueError, match=r"control='kink' cannot be used: the model is scripted or compiled"):
        SmoothHess(scripted).attribute(x, 0, sigma=0.1, n_calls=10, control="kink")
    with pytest.raises(ValueError, match="no ReLU-like or smooth activation was seen"):
        SmoothHess(nn.Linear(6, 2)).attribute(x, 0, sigma=0.1, n_calls=10, control="kink")
    for model, why in (
        (scripted, "scripted or compiled"),
        (nn.Linear(6, 2), "no ReLU-like or smooth activation"),
        (mlp(6, 4), "would take 51 passes, more than the budget"),
        (from_gradient(lambda x: ((x**2).sum(1), 2 * x)), "no ReLU-like or smooth activation"),
    ):
        target = None if why.startswith("no") and not isinstance(model, nn.Module) else 0
        result = SmoothHess(model).attribute(x, target, sigma=0.1, n_calls=10, control="auto")
        assert result.control is None
        assert why in result.control_note
    with pytest.raises(ValueError, match="limited to 8192 dimensions"):
        SmoothHess(lambda x: x.relu().sum(1)).closed_form(torch.ones(1, 9000), sigma=0.1)


class Gated(nn.Module):
    """A product of activations, then a ReLU: frozen, it is still curved."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.first, self.gate, self.last = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.relu(self.first(x).relu() * self.gate(x).sigmoid() - 0.1))


def test_what_stays_curved_when_frozen_is_left_alone():
    """W₁ would not be the expectation of its flips, and the estimate would be biased."""
    net, x = Gated().double(), torch.ones(1, 6).double()
    with pytest.raises(ValueError, match="products of activations"):
        SmoothHess(net).attribute(x, 0, sigma=0.3, n_calls=100, control="kink")
    result = SmoothHess(net).attribute(x, 0, sigma=0.3, n_calls=100)
    assert result.control is None
    assert "products of activations" in result.control_note


def test_large_inputs_in_float32_keep_their_digits():
    net, x = mlp(6, 16, 16), torch.full((1, 6), 1e5)
    gaussian = Isotropic(1e5)
    single = seen(net, x).expectation(gaussian).hessian.dense()
    double = seen(net.double(), x.double()).expectation(gaussian).hessian.dense()
    assert float((single - double).norm() / double.norm()) < 1e-3


class CustomSwish(torch.autograd.Function):
    """An activation with a gradient of its own: what happens inside cannot be differentiated by others."""

    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z * torch.sigmoid(z)

    @staticmethod
    def backward(ctx, g):
        (z,) = ctx.saved_tensors
        s = torch.sigmoid(z)
        return g * s * (1 + z * (1 - s))


def test_whatever_goes_wrong_in_freezing_auto_goes_without():
    net = mlp(6, 16).double()
    scale = nn.Parameter(torch.zeros(1).double())
    x = torch.ones(1, 6).double()
    for model in (
        lambda x: net[2](CustomSwish.apply(net[0](x)))[:, 0],
        lambda x: (net(x) / functional.softplus(scale))[:, 0],  # an activation of a parameter
        lambda x: net(x.reshape(len(x), 6, 1).transpose(0, 1).reshape(6, -1).T)[:, 0],
    ):
        result = SmoothHess(model).attribute(x, sigma=0.3, n_calls=200)
        plain = SmoothHess(model).attribute(x, sigma=0.3, n_calls=4_000, control=None, shrink=False)
        assert float((result.hessian - plain.hessian).norm() / plain.hessian.norm()) < 0.5


def test_a_model_that_cuts_its_batch_is_told_what_to_do():
    net, x = mlp(6, 16).double(), torch.ones(2, 6).double()
    chunked = SmoothHess(lambda x: torch.cat([net(c) for c in x.split(64)])[:, 0])
    with pytest.raises(ValueError, match=r"another path for larger batches.*Pass control=None"):
        chunked.attribute(x, sigma=0.3, n_calls=400, control="kink")
    assert "another path" in chunked.attribute(x, sigma=0.3, n_calls=400).control_note


@pytest.mark.rounding
@pytest.mark.parametrize("sigma", [0.003, 0.3])
def test_neurons_that_hardly_flip_are_left_out_within_rounding(sigma):
    net = mlp(20, 200, 100)
    x = torch.randn(2, 20, generator=torch.Generator().manual_seed(0))

    def closed_form(dtype):
        net.to(dtype)
        inputs = x.to(dtype)
        oracle = Oracle(net, inputs, 0)
        value, gradient = oracle(inputs, torch.arange(2))
        return Kinks.see(oracle, inputs, value, gradient).expectation(Isotropic(sigma)).hessian.core.double()

    exact, found = closed_form(torch.float64), closed_form(torch.float32)
    assert float(exact.norm()) > 0
    assert float((found - exact).norm()) < 1e-4 * float(exact.norm())
