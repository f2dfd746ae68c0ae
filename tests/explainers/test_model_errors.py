"""Errors of the user's model are raised; errors of the interception of its calls are a warning."""

import pytest
import torch
from torch import nn

from smoothhess import SmoothHess, diagnose

X = torch.linspace(-1, 1, 12).reshape(2, 6).double()
OPTIONS = {"sigma": 0.3, "n_calls": 400}


class Fails(nn.Module):
    """Fails in some of its calls, counted from 0."""

    def __init__(self, error, calls):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)).double()
        self.error, self.calls, self.count = error, calls, 0

    def forward(self, x):
        self.count += 1
        if self.count - 1 in self.calls:
            raise self.error("device lost")
        return self.net(x)


@pytest.mark.parametrize("error", [ValueError, RuntimeError, TypeError, IndexError, KeyError])
def test_an_error_of_the_model_is_raised(error):
    for first in range(6):
        with pytest.raises(error, match="device lost"):
            SmoothHess(Fails(error, range(first, 1000))).attribute(X, 0, **OPTIONS)
        with pytest.raises(error, match="device lost"):
            diagnose(Fails(error, range(first, 1000)), X, 0, sigma=0.3)


@pytest.mark.parametrize("error", [ValueError, RuntimeError, TypeError, IndexError])
def test_an_error_of_one_call_is_raised_or_reported(error):
    for call in range(1, 6):
        with pytest.raises((error, UserWarning), match="device lost"):  # a warning is an error in these tests
            SmoothHess(Fails(error, [call])).attribute(X, 0, **OPTIONS)


class Intercepted(nn.Module):
    """Fails only while its activations are recorded or frozen."""

    def __init__(self):
        super().__init__()
        self.model = Fails(ValueError, ())

    def forward(self, x):
        if torch.overrides._get_current_function_mode_stack():
            raise ValueError("not while I am watched")
        return self.model(x)


def test_an_error_of_the_interception_is_a_warning():
    model = Intercepted()
    plain = SmoothHess(model).attribute(X, 0, **OPTIONS, control=None)
    with pytest.warns(UserWarning, match=r"ValueError: not while I am watched\), although the model itself runs"):
        result = SmoothHess(model).attribute(X, 0, **OPTIONS)
    assert "not while I am watched" in result.control_note
    torch.testing.assert_close(result.hessian, plain.hessian)
    with pytest.warns(UserWarning, match="not while I am watched"):
        assert "not while I am watched" in diagnose(model, X, 0, sigma=0.3).unseen


def test_a_frozen_pass_that_fails_later_is_a_warning():
    frozen = []

    def f(x):
        if torch.overrides._get_current_function_mode_stack():
            frozen.append(len(x))
            if len(frozen) > 12:
                raise RuntimeError("too many")
        return net(x)

    net = Fails(ValueError, ())
    with pytest.warns(UserWarning, match="RuntimeError: too many"):
        result = SmoothHess(f).attribute(X, 0, sigma=0.3, n_calls=400, internal_batch_size=8)
    assert "too many" in result.control_note


def test_operations_that_cannot_be_recorded_are_a_warning():
    def affine(x):  # gradients that do not change, so the operations are recorded
        if torch.utils._python_dispatch._get_current_dispatch_mode_stack():
            raise RuntimeError("no modes")
        return (x @ weights).sum(1)

    weights = torch.ones(6, 2).double()
    with pytest.warns(UserWarning, match="RuntimeError: no modes"):
        SmoothHess(affine).attribute(X, sigma=0.3, n_calls=40)
