"""Moments of slope changes, against scipy's quadrature and autograd."""

import math

import pytest
import torch
from scipy.integrate import quad
from torch.nn import functional

from smoothhess.curvature.activation_hooks import record
from smoothhess.curvature.slope_change_moments import (
    is_modelled,
    moments,
    second_derivative,
    slope_change,
    value_change,
)

CALLS = {
    "relu": torch.relu,
    "leaky_relu": lambda z: functional.leaky_relu(z, 0.3),
    "hardtanh": lambda z: functional.hardtanh(z, -0.5, 1.5),
    "abs": torch.abs,
    "gelu": functional.gelu,
    "gelu tanh": lambda z: functional.gelu(z, approximate="tanh"),
    "silu": functional.silu,
    "mish": functional.mish,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": lambda z: functional.softplus(z, beta=5.0),
}


def slope(f, z):
    leaf = torch.tensor([z], dtype=torch.float64, requires_grad=True)
    return float(torch.autograd.grad(f(leaf).sum(), leaf)[0])


@pytest.mark.parametrize("name", sorted(CALLS))
@pytest.mark.parametrize("tau", [0.01, 0.7, 6.0])
def test_moments_against_scipy(name, tau):
    f, z = CALLS[name], torch.tensor([[-1.3, 0.2, 2.0]]).double()
    call = record(f, z).calls[0]
    bend, lean, rise = moments(call, z, torch.full_like(z, tau))
    for i, centre in enumerate(z[0].tolist()):
        own = slope(f, centre)
        kinks = [(k - centre) / tau for k, _ in call.knots if abs(k - centre) < 8 * tau]

        def density(t):
            return math.exp(-t * t / 2) / math.sqrt(2 * math.pi)

        def change(t, f=f, centre=centre, own=own):
            return (slope(f, centre + tau * t) - own) * density(t)

        options = {"points": kinks or None, "limit": 400, "epsabs": 1e-10}
        assert float(lean[0, i]) == pytest.approx(quad(change, -8.5, 8.5, **options)[0], abs=1e-7)
        expected = quad(lambda t: t * change(t), -8.5, 8.5, **options)[0] / tau
        assert float(bend[0, i]) == pytest.approx(expected, abs=1e-7 / tau)

        def values(t, f=f, centre=centre):
            there, here = f(torch.tensor([centre + tau * t, centre], dtype=torch.float64))
            return float(there - here) * density(t)

        assert float(rise[0, i]) == pytest.approx(quad(values, -8.5, 8.5, **options)[0], abs=1e-7 * max(tau, 1))


@pytest.mark.parametrize("name", sorted(CALLS))
def test_units_that_do_not_move_have_no_moments(name):
    z = torch.tensor([[-1.0, 0.0, 2.0]]).double()
    found = moments(record(CALLS[name], z).calls[0], z, torch.tensor([[0.0, 0.0, 1.0]]).double())
    for moment in found:
        assert moment[0, :2].tolist() == [0, 0]
        assert torch.isfinite(moment).all()


@pytest.mark.parametrize("name", sorted(CALLS))
def test_slope_change_is_the_difference_of_slopes(name):
    f = CALLS[name]
    pre, moved = torch.tensor([[-1.0, 0.3, 2.0]]).double(), torch.tensor([[0.4, -0.7, 1.0]]).double()
    expected = [[slope(f, b) - slope(f, a) for a, b in zip(pre[0].tolist(), moved[0].tolist(), strict=True)]]
    got = slope_change(record(f, pre).calls[0], moved, pre)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_value_change_is_what_the_tangent_leaves_out(name):
    f = CALLS[name]
    pre, moved = torch.tensor([[-1.0, 0.3, 2.0]]).double(), torch.tensor([[0.4, -0.7, 1.0]]).double()
    slopes = torch.tensor([[slope(f, a) for a in pre[0].tolist()]], dtype=torch.float64)
    got = value_change(record(f, pre).calls[0], moved, pre)
    torch.testing.assert_close(got, f(moved) - f(pre) - slopes * (moved - pre), rtol=1e-9, atol=1e-12)


def test_too_narrow_for_the_rule_is_said():
    z = torch.zeros(1, 1).double()
    call = record(lambda z: functional.softplus(z, beta=1e5), z).calls[0]
    assert moments(call, z, torch.ones(1, 1).double()) is None


@pytest.mark.parametrize("f", [lambda z: z.softmax(-1), lambda z: functional.layer_norm(z, (4,))])
def test_second_derivative_of_a_call_that_mixes_its_units(f):
    rng = torch.Generator().manual_seed(0)
    z, u = (torch.randn(2, 4, generator=rng).double() for _ in range(2))
    direction = torch.randn(2, 3, 4, generator=rng).double()
    call = record(f, z).calls[0]
    assert is_modelled(call)
    got = second_derivative(call, z, u, direction)
    for b in range(2):
        hessian = torch.autograd.functional.hessian(lambda z, b=b: (u[b] * f(z[None])[0]).sum(), z[b])
        torch.testing.assert_close(got[b], direction[b] @ hessian, rtol=1e-9, atol=1e-12)


def test_what_bends_without_being_smooth_stays_frozen():
    call = record(functional.elu, torch.zeros(1, 2)).calls[0]
    assert call.kind == "smooth"
    assert not is_modelled(call)
