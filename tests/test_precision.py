"""Less exact model calls: measured, said, and never leaking into the rest."""

import pytest
import torch
from torch import nn

from smoothhess import Interactions, SmoothHess
from smoothhess.oracle import Oracle


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3)).eval()


X = torch.randn(2, 10, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("control", [None, "kink"])
def test_bf16_is_measured_and_seen_by_the_error_bars(control, tmp_path):
    model, options = net(), {"sigma": 0.2, "n_calls": 400, "control": control, "shrink": False}
    exact = SmoothHess(model).attribute(X, 1, **options)
    rounded = SmoothHess(model).attribute(X, 1, precision="bf16", **options)
    assert exact.precision_error is None
    assert ((rounded.precision_error > 1e-3) & (rounded.precision_error < 0.5)).all()
    assert rounded.hessian.dtype == torch.float32
    assert not torch.equal(exact.hessian, rounded.hessian)
    z = (rounded.hessian - exact.hessian).abs() / (rounded.stderr() + exact.stderr())
    assert z.max() < 5
    assert float((rounded.hessian - exact.hessian).norm() / exact.hessian.norm()) < 0.2
    rounded.save(tmp_path / "r")
    again = Interactions.load(tmp_path / "r")
    assert again.precision == "bf16"
    torch.testing.assert_close(again.precision_error, rounded.precision_error)
    assert SmoothHess(model).more(again, 40).precision == "bf16"
    assert ", bf16 (noise up to" in repr(rounded)
    with pytest.raises(ValueError, match="differ in precision"):
        rounded.merge(SmoothHess(model).attribute(X, 1, seed=1, **options))


def test_bad_precision():
    with pytest.raises(ValueError, match="precision must be one of 'float32', 'tf32', 'bf16', 'fp16', got 'half'"):
        SmoothHess(net()).attribute(X, 1, sigma=0.2, n_calls=20, precision="half")
    with pytest.raises(ValueError, match="is a mode of CUDA devices"):
        SmoothHess(net()).attribute(X, 1, sigma=0.2, n_calls=20, precision="tf32")
    with pytest.raises(ValueError, match="is for float32 inputs and models"):
        SmoothHess(net().double()).attribute(X.double(), 1, sigma=0.2, n_calls=20, precision="bf16")


def test_compile_reaches_the_gradient_calls_alone(monkeypatch):
    made = []

    def compiled(f):
        made.append(f)
        return lambda *a: f(*a)

    monkeypatch.setattr(torch, "compile", compiled)
    model = net()
    fast = SmoothHess(model).attribute(X, 1, sigma=0.2, n_calls=100, compile=True)
    plain = SmoothHess(model).attribute(X, 1, sigma=0.2, n_calls=100)
    assert made == [model]
    assert fast.control == "kink"
    torch.testing.assert_close(fast.hessian, plain.hessian)


def test_exact_calls_inside_a_less_exact_run():
    oracle = Oracle(net(), X, 1, precision="bf16")
    owner = torch.arange(2)
    rounded = oracle(X, owner)[1]
    with oracle.exact():
        exact = oracle(X, owner)[1]
    torch.testing.assert_close(exact, Oracle(net(), X, 1)(X, owner)[1])
    assert not torch.equal(exact, rounded)
    assert oracle.precision == "bf16"
