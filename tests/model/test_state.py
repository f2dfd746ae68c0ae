"""The model is given back as it was, also when it throws."""

import functools

import pytest
import torch
from torch import nn

from smoothhess import SmoothHess
from smoothhess.model.layer_functions import Neuron
from smoothhess.model.state import modules_behind


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.b = nn.Linear(6, 2)
        self.fail_after = None
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.fail_after is not None and self.calls > self.fail_after:
            raise RuntimeError("midway")
        return self.b(self.drop(torch.relu(self.norm(self.a(x)))))


def snapshot(net):
    return (
        {k: v.clone() for k, v in net.state_dict().items()},
        [(n, m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in net.named_modules()],
        [(n, p.requires_grad, None if p.grad is None else p.grad.clone()) for n, p in net.named_parameters()],
        torch.get_rng_state(),
        (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.is_grad_enabled()),
    )


def assert_same(before, after):
    assert all(torch.equal(v, after[0][k]) for k, v in before[0].items())
    assert before[1] == after[1]
    for (n, r, g), (m, s, h) in zip(before[2], after[2], strict=True):
        assert (n, r) == (m, s)
        assert (g is None and h is None) or torch.equal(g, h)
    assert torch.equal(before[3], after[3])
    assert before[4] == after[4]


@pytest.mark.parametrize("fail_after", [None, 0, 1, 2])
def test_given_back_as_it_was(fail_after):
    net = Net().eval()
    net.a.weight.requires_grad_(False)
    net.b.weight.grad = torch.ones_like(net.b.weight)
    net.fail_after = fail_after
    x = torch.ones(2, 4, requires_grad=True)
    before = snapshot(net)
    explain = functools.partial(SmoothHess(net).attribute, x, 0, sigma=0.3, n_calls=40, internal_batch_size=8)
    if fail_after is None:
        explain()
    else:
        with pytest.raises(RuntimeError, match="midway"):
            explain()
    assert_same(before, snapshot(net))
    assert x.grad is None


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return self.inner(x).relu()


class Wrapped:
    def __init__(self, net):
        self.net = net

    def __call__(self, x):
        return self.net(x)


def test_buffers_are_put_back():
    net = Counting()
    for f in (net, Wrapped(net), lambda x: net(x)):
        SmoothHess(f).attribute(torch.ones(2, 4), 0, sigma=0.3, n_calls=10)
        assert int(net.calls) == 0


@pytest.mark.parametrize("wrap", [Wrapped, lambda net: Neuron(net, "b", 0)])
def test_training_mode_is_seen_through_objects(wrap):
    net = Net().train()
    before = net.norm.running_mean.clone()
    with pytest.raises(ValueError, match="layer 'norm'"):
        SmoothHess(wrap(net)).attribute(torch.ones(2, 4), None, sigma=1.0)
    assert torch.equal(net.norm.running_mean, before)


def test_works_under_no_grad_and_autocast():
    net, x = Net().eval(), torch.ones(2, 4)
    plain = SmoothHess(net).attribute(x, 0, sigma=0.3, n_calls=40)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        quiet = SmoothHess(net).attribute(x, 0, sigma=0.3, n_calls=40)
    assert torch.equal(plain.hessian, quiet.hessian)


def test_the_global_random_state_does_not_move():
    net = Net().eval()
    before = torch.get_rng_state()
    SmoothHess(net).attribute(torch.ones(1, 4), 0, sigma=0.1, n_calls=10)
    assert torch.equal(before, torch.get_rng_state())


GLOBAL_NET = Net()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda net: net,
        lambda net: lambda x: net(x).softmax(-1),
        lambda net: functools.partial(lambda m, x: m(x), net),
        lambda net: net.forward,
    ],
)
def test_training_mode_is_refused_by_layer(wrap):
    net = Net().train()
    with pytest.raises(ValueError, match=r"layer 'norm' \(BatchNorm1d\) is in training mode"):
        SmoothHess(wrap(net)).attribute(torch.ones(2, 4), 0, sigma=1.0)
    net.norm.eval()
    with pytest.raises(ValueError, match=r"layer 'drop' \(Dropout\) is in training mode.*model.eval"):
        SmoothHess(wrap(net)).attribute(torch.ones(2, 4), 0, sigma=1.0)
    net.drop.p = 0.0
    SmoothHess(wrap(net)).attribute(torch.ones(2, 4), 0, sigma=1.0, n_calls=2)


def test_models_named_as_globals_are_seen():
    assert modules_behind(lambda x: GLOBAL_NET(x)) == [GLOBAL_NET]


def test_model_and_inputs_on_different_devices():
    net = Net().eval().to("meta")
    with pytest.raises(ValueError, match=r"the model is on \['meta'\] but the inputs are on 'cpu'. Move one"):
        SmoothHess(net).attribute(torch.ones(2, 4), 0, sigma=1.0)
