"""The way back through batch norms is torch's, by another way."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from smoothhess.norms import QuickNorms, _Normalised


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


def differentiated(net, x, quick):
    leaf = x.clone().contiguous(memory_format=torch.channels_last).requires_grad_()
    if quick:
        with QuickNorms():
            value = net(leaf)
    else:
        value = net(leaf)
    return value, torch.autograd.grad(value.sum(), leaf)[0]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_values_and_gradients_are_torchs(affine, frozen, monkeypatch):
    calls = []
    apply = _Normalised.apply
    monkeypatch.setattr(_Normalised, "apply", lambda *args: calls.append(1) or apply(*args))
    net = network(affine).eval().requires_grad_(not frozen)
    x = torch.randn(4, 2, 8, 8).double()
    value, gradient = differentiated(net, x, quick=True)
    wanted_value, wanted = differentiated(net, x, quick=False)
    assert calls == [1]
    assert torch.equal(value, wanted_value)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-14)
    assert gradient.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("options", [{}, {"track_running_stats": False}])
def test_batch_statistics_are_left_to_torch(options):
    """In training mode, and where none were kept."""
    net = network(True, **options).train(not options)
    x = torch.randn(4, 2, 8, 8).double()
    torch.testing.assert_close(differentiated(net, x, quick=True), differentiated(net, x, quick=False))


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
