"""The rule for the density of a product of two uniform numbers."""

import math

import numpy as np
import pytest
import scipy.integrate
import torch

from smoothhess.baselines.log_quadrature import logarithmic_rule


@pytest.mark.parametrize("n", [1, 2, 3, 8, 32, 100, 300])
def test_moments(n):
    t, w = logarithmic_rule(n)
    k = torch.arange(2 * n)
    moments = (w[:, None] * t[:, None] ** k).sum(0)
    torch.testing.assert_close(moments, 1 / (k + 1.0).double() ** 2, rtol=0, atol=1e-14)
    assert (w > 0).all()
    assert (t > 0).all()
    assert (t < 1).all()


def test_one_degree_more_is_too_much():
    t, w = logarithmic_rule(2)
    assert abs(float((w * t**4).sum()) - 1 / 25) > 1e-3


def test_two_nodes_in_closed_form():
    # orthogonal to 1 and t under −log t: t² − (5/7) t + 17/252
    t, _ = logarithmic_rule(2)
    root = math.sqrt(25 / 49 - 4 * 17 / 252)
    torch.testing.assert_close(t, torch.tensor([5 / 7 - root, 5 / 7 + root]).double() / 2)


@pytest.mark.parametrize("g", [np.exp, np.cos, lambda t: 1 / (1 + 4 * t), lambda t: np.tanh(3 * t - 1)])
def test_against_an_adaptive_rule(g):
    t, w = logarithmic_rule(24)
    expected, _ = scipy.integrate.quad(lambda t: -math.log(t) * g(t), 0, 1, epsabs=1e-13)
    assert abs(float((w * torch.from_numpy(np.asarray(g(t.numpy())))).sum()) - expected) < 1e-10


def test_equals_the_double_sum_it_replaces():
    x, share = np.polynomial.legendre.leggauss(12)
    x, share = (x + 1) / 2, share / 2
    double = (np.outer(share, share) * np.outer(x, x) ** 19).sum()
    t, w = logarithmic_rule(12)
    assert abs(float((w * t**19).sum()) - double) < 1e-16
