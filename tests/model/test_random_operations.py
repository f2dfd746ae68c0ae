"""Models that draw random numbers are refused by the name of the operator."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

from smoothhess import SmoothHess, baselines, from_gradient

X = torch.ones(2, 4)


def swallowed(x):
    try:
        return x.sum(1) + torch.rand(len(x))
    except ValueError:
        return x.sum(1)


RANDOM = {
    "bernoulli_": lambda x: functional.dropout(x, 0.5, training=True).sum(1),
    "rand_like": lambda x: (x + torch.rand_like(x)).sum(1),
    "normal_": lambda x: (x + torch.empty(4).normal_()).sum(1),
    "bernoulli": lambda x: (x * torch.bernoulli(torch.full_like(x, 0.5))).sum(1),
    "multinomial": lambda x: x[:, torch.multinomial(torch.ones(4), 2)].sum(1),
    "randperm": lambda x: (x * torch.arange(4)[torch.randperm(4)]).sum(1),
    "rrelu_with_noise": lambda x: functional.rrelu(x, training=True).sum(1),
    "rand": swallowed,
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_operations_are_refused_before_they_draw(name):
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=rf"draws random numbers \({name}\).*model.eval\(\)"):
        SmoothHess(RANDOM[name]).attribute(X, sigma=0.1, n_calls=8)
    with pytest.raises(ValueError, match=rf"\({name}\)"):
        baselines.gradient(RANDOM[name], X)
    assert torch.equal(state, torch.get_rng_state())


def attention(dropout):
    def f(x):
        rows = x.reshape(len(x), 1, 2, 2)
        return functional.scaled_dot_product_attention(rows, rows, rows, dropout_p=dropout).sum((1, 2, 3))

    return f


def test_attention_is_random_only_with_dropout():
    with pytest.raises(ValueError, match="draws random numbers"):
        SmoothHess(attention(0.1)).attribute(X, sigma=0.1, n_calls=8)
    SmoothHess(attention(0.0)).attribute(X, sigma=0.1, n_calls=8)


def test_layers_in_evaluation_mode_and_own_generators_are_not_random():
    def features(x):  # the same random features in each call
        weights = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
        return (functional.dropout(x, 0.5, training=False) @ weights).tanh().sum(1)

    SmoothHess(features).attribute(X, sigma=0.1, n_calls=8)
    recurrent = nn.LSTM(2, 3, num_layers=2, dropout=0.5, batch_first=True).eval()
    SmoothHess(lambda x: recurrent(x.reshape(-1, 2, 2))[0].sum((1, 2))).attribute(X, sigma=0.1, n_calls=8)


def test_each_run_inspects_one_call():
    inspected = []

    def f(x):
        inspected.append(bool(torch.utils._python_dispatch._get_current_dispatch_mode_stack()))
        return x.square().sum(1)

    explainer = SmoothHess(f)
    for _ in range(2):
        inspected.clear()
        explainer.attribute(X, sigma=0.1, n_calls=64, internal_batch_size=8, control=None)
        assert inspected[0]
        assert not any(inspected[1:-1])


def test_a_foreign_model_is_called_once_at_the_inputs():
    calls = []

    def gradient(x):
        calls.append(len(x))
        return (x**2).sum(1), 2 * x

    baselines.gradient(from_gradient(gradient), X)
    assert calls == [2]


def test_the_compiler_of_torch_is_not_imported():
    code = (
        "import sys, torch, smoothhess; smoothhess.baselines.gradient(lambda x: x.sum(1), torch.ones(1, 2)); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert not subprocess.run([sys.executable, "-c", code], check=False).returncode
