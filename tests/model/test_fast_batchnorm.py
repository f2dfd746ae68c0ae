"""The way back through batch norms is torch's, by another way."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from smoothhess import SmoothHess
from smoothhess.model import gradients
from smoothhess.model.capacity import InputKind
from smoothhess.model.fast_batchnorm import QuickNorms

pytestmark = pytest.mark.rounding


def network(affine, **options):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 5, 3, bias=False),
        nn.BatchNorm2d(5, affine=affine, **options),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(5 * 36, 1),
    ).double()
    for _ in range(3):
        net(3 * torch.randn(7, 2, 8, 8).double() + 1)
    if affine:
        nn.init.normal_(net[1].weight)
        nn.init.normal_(net[1].bias)
    return net


def differentiated(net, x, norms=None):
    leaf = x.clone().contiguous(memory_format=torch.channels_last).requires_grad_()
    with norms or nullcontext():
        value = net(leaf)
    return value, torch.autograd.grad(value.sum(), leaf)[0]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_values_and_gradients_are_torchs(affine, frozen):
    net = network(affine).eval().requires_grad_(not frozen)
    x = torch.randn(4, 2, 8, 8).double()
    value, gradient = differentiated(net, x, norms := QuickNorms())
    expected_value, expected = differentiated(net, x)
    assert norms.count == 1
    assert torch.equal(value, expected_value)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)
    assert gradient.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    net = network(True).float().eval()
    x = torch.randn(4, 2, 8, 8)
    with torch.autocast("cpu", dtype):
        _, gradient = differentiated(net, x, QuickNorms())
    _, expected = differentiated(net, x)
    assert gradient.dtype == torch.float32
    assert float((gradient - expected).norm() / expected.norm()) < 5 * torch.finfo(dtype).eps


@pytest.mark.parametrize("options", [{}, {"track_running_stats": False}])
def test_batch_statistics_are_left_to_torch(options):
    """In training mode, and where none were kept."""
    net = network(True, **options).train(not options)
    x = torch.randn(4, 2, 8, 8).double()
    torch.testing.assert_close(differentiated(net, x, norms := QuickNorms()), differentiated(net, x))
    assert norms.count == 0


def test_other_shapes_and_ways_of_calling():
    x = torch.randn(6, 3).double().requires_grad_()
    mean, variance = torch.randn(3).double(), torch.rand(3).double() + 0.5
    with QuickNorms():
        flat = functional.batch_norm(x, mean, variance)
        image = functional.batch_norm(x[..., None, None], mean, variance, eps=0.25)
    torch.testing.assert_close(flat, (x - mean) / (variance + 1e-5).sqrt())
    torch.testing.assert_close(image[..., 0, 0], (x - mean) / (variance + 0.25).sqrt())
    (gradient,) = torch.autograd.grad(image.square().sum(), x)
    torch.testing.assert_close(gradient, 2 * (x - mean).detach() / (variance + 0.25))


# --- inside an attribution --------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Computed again on the way back, where no mode is seen."""

    def __init__(self):
        super().__init__()
        self.net = network(True)

    def forward(self, x):
        return self.net[3:](checkpoint(self.net[:3], x, use_reentrant=False))


class Differentiated(nn.Module):
    """A derivative inside of the model."""

    def __init__(self):
        super().__init__()
        self.net = network(True)

    def forward(self, x):
        slope = torch.func.grad(lambda x: self.net(x).sum())(x)
        return self.net(x) + slope.flatten(1).tanh().sum(1, keepdim=True)


class Conditional(nn.Module):
    """The norm's weights come from the input, which each row has its own of."""

    def __init__(self):
        super().__init__()
        self.net = network(False)
        self.weights = nn.Linear(128, 5).double()

    def forward(self, x):
        h, norm = self.net[0](x), self.net[1]
        n = len(x)
        weight = self.weights(x.flatten(1)).tanh().reshape(-1)
        mean, variance = norm.running_mean.repeat(n), norm.running_var.repeat(n)
        h = functional.batch_norm(h.reshape(1, -1, *h.shape[2:]), mean, variance, weight)
        return self.net[3:](h.reshape(n, 5, *h.shape[2:]).relu())


class Halved(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found / 2 + found.detach() / 2 if func is functional.batch_norm else found


class OwnMode(nn.Module):
    """Another mode sees to the same calls, and halves their gradients."""

    def __init__(self):
        super().__init__()
        self.net = network(True)

    def forward(self, x):
        with Halved():
            return self.net(x)


@pytest.mark.parametrize(
    ("make", "quick"),
    [
        (lambda: network(True), True),
        (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 1)).double(), False),
        (Checkpointed, False),
        (Differentiated, False),
        (Conditional, False),
        (OwnMode, None),
    ],
)
def test_an_attribution_takes_the_quicker_way_where_it_is_the_same(make, quick, monkeypatch):
    net = make().eval()
    x = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    ask = {"sigma": 0.3, "n_calls": 64, "control": None}
    expected = SmoothHess(net).attribute(x, **ask)
    monkeypatch.setattr(gradients, "may_pay", lambda points: points.ndim == 4)
    explainer = SmoothHess(net)
    found = explainer.attribute(x, **ask)
    for name in ("hessian", "gradient", "value"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-9, atol=1e-12)
    if quick is not None:
        assert explainer.capacity.fast_batchnorm(InputKind.of(x)) is quick
    assert torch.equal(explainer.attribute(x, **ask).hessian, found.hessian)  # what was found out is kept
