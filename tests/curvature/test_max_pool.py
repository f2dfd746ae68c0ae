"""Max-pooling in the closed form: windows, exact moments of up to three candidates, unbiased for all others."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from smoothhess import Dense, Isotropic, SmoothHess
from smoothhess.curvature.activation_hooks import record
from smoothhess.curvature.flip_field import flips
from smoothhess.curvature.one_flip import Kinks
from smoothhess.curvature.pool_windows import largest_candidates
from smoothhess.linalg.memory import ByteLimit
from smoothhess.model.gradients import Oracle
from tests.truths import gaussians

POOLS = {
    "1d": (nn.MaxPool1d(2), (3, 7)),
    "1d, padding and dilation": (nn.MaxPool1d(3, 2, padding=1, dilation=2), (3, 11)),
    "2d": (nn.MaxPool2d(2), (2, 6, 5)),
    "2d, overlapping": (nn.MaxPool2d(3, 2, 1), (2, 7, 8)),
    "2d, unequal sizes": (nn.MaxPool2d((2, 3), (1, 2), (1, 0), (2, 1)), (2, 7, 8)),
    "2d, ceil mode": (nn.MaxPool2d(3, 2, ceil_mode=True), (2, 6, 8)),
    "2d, without channels": (nn.MaxPool2d(2), (6, 6)),
    "3d": (nn.MaxPool3d(2, 1), (2, 3, 4, 3)),
    "adaptive 1d": (nn.AdaptiveMaxPool1d(3), (2, 7)),
    "adaptive 2d": (nn.AdaptiveMaxPool2d((2, 3)), (2, 7, 5)),
    "adaptive 3d": (nn.AdaptiveMaxPool3d(2), (2, 3, 4, 5)),
    "function": (lambda z: functional.max_pool2d(z, 2, stride=1, return_indices=True)[0], (2, 4, 4)),
    "amax": (lambda z: z.amax(-1), (3, 5)),
    "amax over two dimensions": (lambda z: torch.amax(z, dim=(3, 1), keepdim=True), (3, 4, 5)),
    "max": (lambda z: z.max(dim=1).values, (3, 5)),
    "aten": (lambda z: torch.ops.aten.max_pool2d.default(z, [2, 2]), (2, 4, 4)),
}


@pytest.mark.parametrize("name", sorted(POOLS))
def test_windows_are_those_of_torch(name):
    pool, shape = POOLS[name]
    z = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    (call,) = record(pool, z).calls
    planes = call.indices[0].numel() // len(call.windows)
    among = call.pre.reshape(2, planes, -1)[:, :, call.windows.clamp_min(0)].masked_fill(call.windows < 0, -math.inf)
    torch.testing.assert_close(among.amax(3).flatten(), pool(z).flatten(), rtol=0, atol=0)
    padded = torch.cat([call.pre.flatten(1), torch.zeros(2, 1)], 1)
    best = padded.gather(1, largest_candidates(call.pre, call.windows, call.indices, floor=False).flatten(1))
    expected = functional.pad(among.sort(3, descending=True).values, (0, 3), value=-math.inf)[..., :3]
    expected = torch.where(expected.isinf(), expected[..., :1], expected)  # smaller windows repeat their maximum
    torch.testing.assert_close(best.flatten(), expected.flatten(), rtol=0, atol=0)
    floored = padded.gather(1, largest_candidates(call.pre, call.windows, call.indices, floor=True).flatten(1))
    assert (floored.reshape(-1, 3)[:, 0] == pool(z).relu().flatten()).all()
    assert ((floored.reshape(-1, 3) == 0).any(1) | (floored.reshape(-1, 3) > 0).all(1)).all()


def seen(net, x, target=0):
    oracle = Oracle(net, x, target)
    value, gradient = oracle(x, torch.arange(len(x)))
    return Kinks.see(oracle, x, value, gradient)


class OneLayer(nn.Module):
    """Affine candidates, max-pooling with or without a relu, and a linear layer."""

    def __init__(self, d, n, window, relu=""):
        super().__init__()
        torch.manual_seed(10 * d + window)
        self.first, self.last = nn.Linear(d, n), nn.Linear(n // window, 1)
        self.pool, self.relu = nn.MaxPool1d(window), relu
        self.double()

    def forward(self, x):
        z = self.first(x)[:, None]
        z = z.relu() if self.relu == "before" else z
        z = self.pool(z)
        z = z.relu() if self.relu == "after" else z
        return self.last(z[:, 0])


LAYERS = [(2, ""), (3, ""), (2, "before"), (2, "after")]


@pytest.mark.parametrize(("window", "relu"), LAYERS)
@pytest.mark.parametrize("d", [1, 2, 3])
def test_one_layer_against_quadrature(d, window, relu):
    """E[(zzᵀ − I) f] on a grid; up to three candidates, of which a relu is one."""
    net, sigma = OneLayer(d, 6, window, relu), 0.7
    x = torch.full((1, d), 0.2).double()
    axis = torch.linspace(-6, 6, {1: 20001, 2: 601, 3: 121}[d]).double()
    z = torch.cartesian_prod(*[axis] * d).reshape(-1, d)
    weight = torch.exp(-z.square().sum(1) / 2)
    weight = weight / weight.sum()
    with torch.no_grad():
        f = net(x + sigma * z)[:, 0]
    hessian = (z.mT * (weight * f)) @ z - torch.eye(d).double() * (weight @ f)
    expected = seen(net, x).expectation(Isotropic(sigma))
    scale = float(hessian.abs().max()) + 1e-2
    assert float((expected.hessian.dense()[0] - hessian).abs().max()) < 3e-3 * scale
    assert float(net(x).detach()) + float(expected.value) == pytest.approx(float(weight @ f), abs=1e-3 * scale)
    tangent = sigma * torch.autograd.functional.jacobian(lambda x: net(x).sum(), x)[0]
    gradient = (weight * f) @ z
    assert float((tangent + expected.gradient[0] - gradient).abs().max()) < 3e-3 * scale


@pytest.mark.parametrize("kind", sorted(gaussians(5)))
@pytest.mark.parametrize(("window", "relu"), LAYERS)
def test_one_layer_is_exact_from_two_calls(window, relu, kind):
    net, gaussian = OneLayer(5, 12, window, relu), gaussians(5)[kind]
    x = torch.stack([0.3 * torch.ones(5), -0.2 * torch.ones(5)]).double()
    first, second = (
        SmoothHess(net).attribute(x, gaussian=gaussian, n_calls=2, seed=seed, control="kink", shrink=False)
        for seed in (0, 1)
    )
    for name in ("hessian", "gradient", "value"):
        torch.testing.assert_close(getattr(first, name), getattr(second, name), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("window", "relu"), LAYERS)
def test_the_field_is_the_change_of_the_gradient(window, relu):
    net = OneLayer(4, 12, window, relu)
    x = 0.3 * torch.randn(2, 4, generator=torch.Generator().manual_seed(2)).double()
    kinks = seen(net, x)
    points = x[:, None] + torch.randn(2, 200, 4, generator=torch.Generator().manual_seed(3)).double()
    found = flips(kinks.network, points, torch.arange(2), mirrored=False)

    def gradient(at):
        leaf = at.reshape(-1, 4).clone().requires_grad_()
        value = net(leaf)
        return torch.autograd.grad(value.sum(), leaf)[0].reshape(at.shape), value.detach().reshape(at.shape[:-1])

    (there, value), (here, base) = gradient(points), gradient(x)
    torch.testing.assert_close(found.odd, there - here[:, None], rtol=0, atol=1e-10)
    linear = ((points - x[:, None]) * here[:, None]).sum(2)
    torch.testing.assert_close(found.value, value - base[:, None] - linear, rtol=0, atol=1e-10)


class Largest(nn.Module):
    def __init__(self, dim=2):
        super().__init__()
        self.dim = dim

    def forward(self, z):
        return z.max(self.dim)[0] if self.dim == 1 else z.amax(self.dim)


def conv(*layers, read=nn.Flatten, **options):
    torch.manual_seed(5)
    built = nn.Sequential(nn.Unflatten(1, (1, -1)), *(layer() for layer in layers), read(**options))
    built.append(nn.Linear(built.eval()(torch.zeros(1, 8)).shape[1], 1))
    for module in built.modules():
        if isinstance(module, nn.BatchNorm1d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return built.double().eval()


def first():
    return nn.Conv1d(1, 4, 3, padding=1)


class Skip(nn.Module):
    """The output of a relu is pooled, and read by another layer as well."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.conv, self.down = nn.Conv1d(1, 3, 3, padding=1), nn.Linear(24, 1)
        self.last = nn.Linear(12, 1)
        self.double()

    def forward(self, x):
        z = self.conv(x[:, None]).relu_()
        return self.last(functional.max_pool1d(z, 2).flatten(1)) + self.down(z.flatten(1))


NETWORKS = {
    "relu, pool": lambda: conv(first, nn.ReLU, lambda: nn.MaxPool1d(2)),
    "pool, relu": lambda: conv(first, lambda: nn.MaxPool1d(2), lambda: nn.ReLU(inplace=True)),
    "windows of four": lambda: conv(first, lambda: nn.ReLU(inplace=True), lambda: nn.MaxPool1d(4)),
    "overlapping": lambda: conv(first, nn.ReLU, lambda: nn.MaxPool1d(3, 1, padding=1)),
    "normalised between": lambda: conv(first, nn.ReLU, lambda: nn.BatchNorm1d(4), lambda: nn.MaxPool1d(2)),
    "gelu, pool": lambda: conv(first, nn.GELU, lambda: nn.MaxPool1d(2)),
    "adaptive": lambda: conv(first, nn.LeakyReLU, lambda: nn.AdaptiveMaxPool1d(3)),
    "two stages": lambda: conv(
        *(first, nn.ReLU, lambda: nn.MaxPool1d(2)),
        *(lambda: nn.Conv1d(4, 4, 3, padding=1), nn.ReLU, lambda: nn.AdaptiveMaxPool1d(1)),
    ),
    "skip": Skip,
    "maximum over time": lambda: conv(first, nn.ReLU, read=Largest),
    "maximum over channels": lambda: conv(first, read=Largest, dim=1),
}


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_the_expectation_of_the_field_is_the_closed_form(name):
    net = NETWORKS[name]()
    gaussian = Dense(0.3 * torch.eye(8).double() + 0.1)
    x = 0.4 * torch.randn(1, 8, generator=torch.Generator().manual_seed(0)).double()
    kinks = seen(net, x)
    expected = kinks.expectation(gaussian)
    z = torch.randn(20_000, 8, generator=torch.Generator().manual_seed(1)).double()
    found = flips(kinks.network, (x + gaussian.colour(z))[None], torch.arange(1), mirrored=True)
    odd, even = (gaussian.pull(f[0]) for f in (found.odd, found.even))
    for sample, truth in (
        (z[:, :, None] * odd[:, None], expected.hessian.dense()[0]),
        (even, expected.gradient[0]),
        (found.value[0], expected.value[0]),
    ):
        error, se = (sample.mean(0) - truth).abs(), sample.std(0) / math.sqrt(len(z))
        assert (error <= 5 * se + 1e-12).all()


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_unbiased_with_less_noise(name):
    """Mean over seeds against a long run without control."""
    net, seeds = NETWORKS[name](), 100
    x = 0.4 * torch.randn(1, 8, generator=torch.Generator().manual_seed(0)).double()
    long = SmoothHess(net).attribute(x, sigma=0.2, n_calls=30_000, seed=77, control=None, shrink=False)
    options = {"sigma": 0.2, "n_calls": 48, "seed": range(seeds), "shrink": False}
    many, plain = (
        SmoothHess(net).attribute(x.repeat_interleave(seeds, 0), control=control, **options)
        for control in ("kink", None)
    )
    for estimate, truth, own in (
        (many.hessian, long.hessian[0], long.stderr()[0]),
        (many.gradient, long.gradient[0], long.gradient_stderr[0]),
        (many.value, long.value[0], long.value_stderr[0]),
    ):
        error = (estimate.mean(0) - truth).abs()
        assert (error <= 5 * (estimate.var(0) / seeds + own**2).sqrt() + 1e-12).all()
    share = {"two stages": 0.9, "maximum over time": 0.5}.get(name, 0.3)  # flips of two layers, windows of nine
    assert float(many.hessian.var(0).sum()) < share * float(plain.hessian.var(0).sum())


def test_a_relu_is_part_of_the_windows_unless_other_layers_read_it():
    x = 0.4 * torch.randn(2, 8, generator=torch.Generator().manual_seed(0)).double()
    kinds = {name: [c.kind for c in seen(make(), x).network.calls] for name, make in NETWORKS.items()}
    assert kinds["relu, pool"] == kinds["pool, relu"] == kinds["overlapping"] == ["max_pool"]
    assert kinds["skip"] == kinds["normalised between"] == ["relu", "max_pool"]
    same = [seen(NETWORKS[name](), x).expectation(Isotropic(0.5)) for name in ("relu, pool", "pool, relu")]
    torch.testing.assert_close(same[0].hessian.dense(), same[1].hessian.dense())


def test_ties_and_constant_windows():
    """Equal channels, candidates that a relu keeps at 0, and windows without any other candidate."""
    dead = conv(first, nn.ReLU, lambda: nn.BatchNorm1d(4), lambda: nn.MaxPool1d(2))
    with torch.no_grad():
        dead[1].weight[1], dead[1].bias[1] = 0.0, -1.0  # never active
        dead[1].weight[2], dead[1].bias[2] = 0.0, 1.0  # constant
    x = torch.ones(2, 8).double()  # equal pixels: windows of equal candidates
    for net in (dead, conv(first, nn.ReLU, lambda: nn.MaxPool1d(2)), conv(first, lambda: nn.MaxPool1d(1), nn.ReLU)):
        expected = seen(net, x).expectation(Isotropic(0.4))
        assert expected.hessian.dense().isfinite().all()
        assert expected.gradient.isfinite().all()
        assert expected.value.isfinite().all()
        short, long = (
            SmoothHess(net).attribute(x, sigma=0.4, n_calls=n, control=c, shrink=False)
            for n, c in ((2_000, "kink"), (20_000, None))
        )
        error = (short.hessian - long.hessian).abs() / (short.stderr() ** 2 + long.stderr() ** 2 + 1e-20).sqrt()
        assert float(error.max()) < 5


class Masked(nn.Module):
    """The largest entry of a constant, which has no examples, and of a detached activation."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 1)
        self.double()

    def forward(self, x):
        mask = torch.arange(18.0).double().reshape(3, 6)
        z = self.first(x).relu()
        return self.last(z * mask.amax(0) / mask.amax(1, keepdim=True)[-1] + 0 * z.detach().amax(1, keepdim=True))


def test_maxima_of_constants_stay_frozen():
    net, x = Masked(), torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).double()
    assert [c.kind for c in seen(net, x).network.calls] == ["relu"]
    batch = SmoothHess(net).attribute(x, sigma=0.4, n_calls=48, control="kink", shrink=False)
    one = SmoothHess(net).attribute(x[2:3], sigma=0.4, n_calls=48, control="kink", shrink=False)
    torch.testing.assert_close(batch.hessian[2], one.hessian[0])


def test_columns_that_do_not_fit_are_taken_twice(monkeypatch):
    net = NETWORKS["two stages"]()
    x = 0.4 * torch.randn(2, 8, generator=torch.Generator().manual_seed(4)).double()
    stored = seen(net, x).expectation(Isotropic(0.4), layers=True)
    monkeypatch.setattr("smoothhess.curvature.one_flip.NEURON_GRADIENTS", ByteLimit(0))
    streamed = seen(net, x).expectation(Isotropic(0.4), layers=True)
    torch.testing.assert_close(stored.hessian.dense(), streamed.hessian.dense(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(stored.gradient, streamed.gradient, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(stored.value, streamed.value, rtol=1e-9, atol=1e-12)
    for a, b in itertools.zip_longest(stored.layers, streamed.layers):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_max_pooling_is_not_declared_independent():
    """Windows of more than three candidates, and switches far from x, are not proven to be those of the closed form."""
    net, x = OneLayer(5, 12, 3).float(), torch.full((1, 5), 0.3)
    result = SmoothHess(net).attribute(x, sigma=0.2, n_calls=200)
    assert result.control == "kink"
    assert not result.statistics.rare or not bool(result.statistics.rare.complete.any())
