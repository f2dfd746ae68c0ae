"""SoftPlus and Swish in the place of ReLU, against torch.func on networks that were written so."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from smoothhess import baselines, perturbation_mse
from smoothhess.baselines.softened_activations import soften
from smoothhess.baselines.softplus import Softplus
from smoothhess.baselines.swish import Swish
from smoothhess.model.layer_functions import Neuron
from tests.truths import OneHidden

pytestmark = pytest.mark.rounding

TIGHT = {"rtol": 1e-9, "atol": 1e-11}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def seeded(build, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build().double().eval()


class Smooth(nn.Module):
    """The replacement, by torch's own functions: an independent route."""

    def __init__(self, kind, beta):
        super().__init__()
        self.kind, self.beta = kind, beta

    def forward(self, z):
        return functional.softplus(z, self.beta, 1e9) if self.kind == "softplus" else z * torch.sigmoid(self.beta * z)


BASELINES = {"softplus": baselines.softplus, "swish": baselines.swish}
KINDS = sorted(BASELINES)


def mlp(act):
    return nn.Sequential(nn.Linear(5, 9), act(), nn.Linear(9, 7), act(), nn.Linear(7, 3))


def convnet(act):
    first = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), act(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, nn.Conv2d(4, 4, 3, padding=1), act(), nn.Flatten(), nn.Linear(16, 3))


NETWORKS = {"MLP": (mlp, (5,)), "convolutions": (convnet, (2, 4, 4))}


def pair(name, kind, beta):
    """A ReLU network, and the same weights with smooth activations."""
    build, shape = NETWORKS[name]
    net = seeded(lambda: build(lambda: nn.ReLU(inplace=True)))
    smooth = seeded(lambda: build(lambda: Smooth(kind, beta)))
    smooth.load_state_dict(net.state_dict())
    return net, smooth, shape


def truth(f, inputs, columns):
    found = []
    for x, column in zip(inputs, columns, strict=True):
        one = lambda x, column=column: f(x[None])[0, column]
        found.append((one(x), torch.func.grad(one)(x), torch.func.hessian(one)(x).reshape(x.numel(), x.numel())))
    return tuple(torch.stack(part).detach() for part in zip(*found, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NETWORKS)
class TestAgainstTorchFunc:
    def test_gradient_and_hessian(self, name, kind):
        net, smooth, shape = pair(name, kind, 2.5)
        x, columns = draw(4, *shape), [2, 0, 1, 2]
        value, slope, hessian = truth(smooth, x, columns)
        result = BASELINES[kind](net, x, target=columns, beta=2.5)
        torch.testing.assert_close(result.value, value, **TIGHT)
        torch.testing.assert_close(result.gradient, slope, **TIGHT)
        torch.testing.assert_close(result.hessian, hessian, **TIGHT)
        own = net(x).gather(1, torch.tensor(columns)[:, None])[:, 0].detach()
        torch.testing.assert_close(result.output, own, **TIGHT)
        torch.testing.assert_close(result.taylor()(x[:, None])[:, 0], own, **TIGHT)  # the model's own f(x)
        assert result.method == f"{kind} β = 2.5"
        d = x[0].numel()
        assert torch.equal(result.n_passes, torch.full((4,), 1.5 + 1 + d).double())

    @pytest.mark.parametrize("rows", [None, 1, 7])
    def test_operator_groups_and_batches(self, name, kind, rows):
        net, smooth, shape = pair(name, kind, 2.5)
        x = draw(3, *shape)
        hessian = truth(smooth, x, [1, 1, 1])[2]
        options = {"target": 1, "beta": 2.5, "internal_batch_size": rows}
        operator = BASELINES[kind](net, x, dense=False, **options)
        v = draw(x[0].numel(), seed=1)
        with torch.no_grad():
            torch.testing.assert_close(operator @ v, hessian @ v, **TIGHT)
        torch.testing.assert_close(operator[1:].eigh(2).values.abs(), eigenvalues(hessian[1:], 2), rtol=1e-8, atol=1e-9)
        mask = torch.arange(x[0].numel()).reshape(shape) % 3
        p = functional.one_hot(mask.flatten()).double()
        groups = BASELINES[kind](net, x, feature_mask=mask, **options)
        torch.testing.assert_close(groups.hessian, p.mT @ hessian @ p, **TIGHT)
        assert torch.equal(groups.n_passes, torch.full((3,), 1.5 + 1 + 3).double())
        torch.testing.assert_close(BASELINES[kind](net, x, **options).hessian, hessian, **TIGHT)


def eigenvalues(hessian, k):
    return torch.linalg.eigvalsh(hessian).abs().sort(dim=1, descending=True).values[:, :k]


CALLS = {
    "leaky_relu": (lambda z: functional.leaky_relu(z, 0.2), lambda z, s: 0.2 * z + 0.8 * s(z)),
    "relu6": (functional.relu6, lambda z, s: s(z) - s(z - 6)),
    "hardtanh": (lambda z: functional.hardtanh(z, -1, 2), lambda z, s: -1 + s(z + 1) - s(z - 2)),
    "method in place": (lambda z: z.clone().relu_(), lambda z, s: s(z)),
    "clamp": (lambda z: z.clamp(min=0), lambda z, s: s(z)),
    "prelu": (lambda z: functional.prelu(z, SLOPE), lambda z, s: 0.3 * z + 0.7 * s(z)),
}
SLOPE = torch.tensor([0.3], dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", CALLS)
def test_piecewise_linear_calls_are_sums_of_relus(call, kind):
    bent, softened = CALLS[call]
    w1, w2, w3 = draw(8, 4), draw(6, 8, seed=1), draw(3, 6, seed=2)
    s = Smooth(kind, 3.0)
    f = lambda x: bent(bent(2 * x @ w1.mT) @ w2.mT) @ w3.mT
    g = lambda x: softened(softened(2 * x @ w1.mT, s) @ w2.mT, s) @ w3.mT
    x = draw(2, 4, seed=3)
    value, slope, hessian = truth(g, x, [0, 2])
    result = BASELINES[kind](f, x, target=[0, 2], beta=3.0)
    torch.testing.assert_close(result.value, value, **TIGHT)
    torch.testing.assert_close(result.gradient, slope, **TIGHT)
    torch.testing.assert_close(result.hessian, hessian, **TIGHT)


class TestClosedForm:
    """f = Σ aₖ φ(wₖ·x + bₖ) has ∇²f = Σ aₖ φ″ wₖwₖᵀ."""

    def test_one_hidden_layer(self):
        f, x, beta = OneHidden(7), draw(5, 7), 4.0
        s = x @ f.w.mT + f.b
        p = 1 / (1 + torch.exp(-beta * s))
        result = baselines.softplus(f, x, beta=beta)
        torch.testing.assert_close(result.value, torch.log1p(torch.exp(beta * s)) @ f.a / beta, **TIGHT)
        torch.testing.assert_close(result.gradient, (f.a * p) @ f.w, **TIGHT)
        expected = torch.einsum("bk,ki,kj->bij", f.a * beta * p * (1 - p), f.w, f.w)
        torch.testing.assert_close(result.hessian, expected, **TIGHT)

    @pytest.mark.parametrize("kind", KINDS)
    def test_sharp_corners_give_the_models_own_gradient(self, kind):
        net, _, shape = pair("MLP", kind, 1.0)
        x = draw(4, *shape)
        own = baselines.gradient(net, x, target=0)
        errors = []
        for beta in (10.0, 1e3, 1e6):
            result = BASELINES[kind](net, x, target=0, beta=beta)
            errors.append(float((result.gradient - own.gradient).abs().max()))
        assert errors[0] > errors[1] > errors[2]
        torch.testing.assert_close(result.gradient, own.gradient, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(result.value, own.output, rtol=0, atol=1e-5)
        assert result.hessian.abs().max() < 1e-6


class TestForms:
    @pytest.mark.parametrize("form", [Softplus(3.0), Swish(3.0)])
    def test_derivatives(self, form):
        z = torch.linspace(-20, 20, 400).double().requires_grad_()  # without 0, where autograd halves |z| wrongly
        (slope,) = torch.autograd.grad(form.value(z).sum(), z, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), z)
        torch.testing.assert_close(form.slope(z), slope, rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(form.curvature(z), curvature, rtol=1e-9, atol=1e-13)

    @pytest.mark.parametrize("form", [Softplus(1e4), Swish(1e4)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_no_overflow(self, form, dtype):
        z = torch.tensor([-3e38, -1e30, -1.0, -1e-3, -0.0, 0.0, 1e-3, 1.0, 1e30, 3e38], dtype=dtype)
        for numbers in (form.value(z), form.slope(z), form.curvature(z)):
            assert torch.isfinite(numbers).all()
        torch.testing.assert_close(form.value(z), z.relu(), rtol=1e-4, atol=1e-4)
        assert not form.curvature(z)[[0, 1, 2, 7, 8, 9]].any()

    @pytest.mark.parametrize("form", [Softplus(5.0), Swish(5.0)])
    def test_tails_keep_their_digits_in_float32(self, form):
        z = torch.linspace(-10, 10, 201)
        for method in ("slope", "curvature"):
            expected = getattr(form, method)(z.double()).float()
            torch.testing.assert_close(getattr(form, method)(z), expected, rtol=2e-5, atol=1e-37)

    def test_twice_through_vmap(self):
        """The replacement works inside torch.func's transforms, and is differentiable twice by them."""
        f = soften(lambda x: torch.relu(x).prod(-1), Softplus(2.0))
        x = draw(3, 4)
        once = torch.func.vmap(torch.func.jacrev(torch.func.jacrev(f)))(x)
        torch.testing.assert_close(
            once, baselines.softplus(lambda x: torch.relu(x).prod(-1), x, beta=2.0).hessian, **TIGHT
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beta", [1e4, 1e8])
def test_sharp_corners_in_float32(kind, beta):
    net, _, shape = pair("MLP", kind, 1.0)
    x = draw(6, *shape).float()
    x[0] = 0
    for scale in (1e-6, 1.0, 1e6):
        result = BASELINES[kind](net.float(), scale * x, target=0, beta=beta)
        assert torch.isfinite(result.hessian).all()
        assert torch.isfinite(result.value).all()
        torch.testing.assert_close(result.value, result.output, rtol=1e-3, atol=1e-3)


def test_a_neuron_before_its_relu():
    net, smooth, shape = pair("MLP", "softplus", 2.0)
    x = draw(2, *shape)
    result = baselines.softplus(Neuron(net, "3", 4, attribute_to_neuron_input=True), x, beta=2.0)
    torch.testing.assert_close(result.hessian, truth(smooth[:3], x, [4, 4])[2], **TIGHT)


def test_a_better_surrogate_than_the_gradient():
    f, x = OneHidden(10), draw(5, 10)
    soft, plain = baselines.softplus(f, x, beta=4.0), baselines.gradient(f, x)
    errors = [perturbation_mse(f, x, s.taylor(), 1.0, n_samples=500).mean() for s in (soft, plain)]
    assert errors[0] < errors[1]


class TestRefusals:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        ("beta", "kind_of_error", "message"),
        [
            (0, ValueError, "positive, finite number, got 0"),
            (-1.0, ValueError, "positive, finite number, got -1"),
            (math.nan, ValueError, "positive, finite number, got nan"),
            (math.inf, ValueError, "positive, finite number, got inf"),
            ("5", TypeError, "positive number, got str"),
            (True, TypeError, "positive number, got bool"),
            (None, TypeError, "positive number, got NoneType"),
            (torch.ones(3), TypeError, "positive number, got Tensor"),
        ],
    )
    def test_beta(self, kind, beta, kind_of_error, message):
        with pytest.raises(kind_of_error, match=message):
            BASELINES[kind](OneHidden(3), draw(1, 3), beta=beta)

    def test_beta_of_other_libraries(self):
        expected = baselines.softplus(OneHidden(3), draw(1, 3), beta=2).hessian
        assert torch.equal(baselines.softplus(OneHidden(3), draw(1, 3), beta=torch.tensor(2.0)).hessian, expected)

    def test_nothing_to_soften(self):
        net = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
        with pytest.raises(ValueError, match="no such call was seen"):
            baselines.softplus(net, draw(1, 3), beta=1.0)

    @pytest.mark.filterwarnings("ignore:`torch.jit")
    def test_what_cannot_be_seen(self):
        net = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)))
        with pytest.raises(ValueError, match="scripted or compiled"):
            baselines.swish(torch.jit.trace(net, draw(1, 3)), draw(1, 3), beta=1.0)
        with pytest.raises(ValueError, match="scripted or compiled"):
            baselines.softplus(torch.compile(net), draw(1, 3), beta=1.0)
        assert torch.equal(net(draw(1, 3)), net(draw(1, 3)))
