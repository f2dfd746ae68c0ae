"""Directions by strength, with and without eigenvectors."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from smoothhess import SmoothHess
from smoothhess.draws.designs import mixing
from smoothhess.linalg import principal_directions
from smoothhess.linalg.orthonormal import cholesky_qr, gram_schmidt
from smoothhess.linalg.principal_directions import FLOOR, _in_steps, _powered

pytestmark = pytest.mark.rounding


@pytest.mark.parametrize("decay", [0.5, 2.0, 4.0, math.inf])
def test_directions_by_products_and_by_reflections_are_the_same(decay):
    """Also where most are empty (all but 20 at an infinite decay), and they order by strength."""
    rng = torch.Generator().manual_seed(0)
    k = 60
    turn = torch.linalg.qr(torch.randn(k, k, generator=rng).double())[0]
    strengths = torch.arange(1, k + 1).double() ** -(2.0 if math.isinf(decay) else decay)
    if math.isinf(decay):
        strengths[20:] = 0
    moments = (turn * strengths) @ turn.mT
    found = _powered(moments, mixing(k))
    scaled = moments / moments.trace() + FLOOR * torch.eye(k).double()
    other = _in_steps(scaled, mixing(k), gram_schmidt)
    for q in (found, other):
        torch.testing.assert_close(q.mT @ q, torch.eye(k).double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(found, other, rtol=0, atol=1e-6)
    strength = (found.mT @ moments @ found).diagonal()
    assert strength[:10].min() > strength[30:].max()


def test_rounding_does_not_choose_among_empty_directions(monkeypatch):
    """Forty of 300 directions are seen: the same result from moments that are wrong in their last digits."""
    monkeypatch.setattr(principal_directions, "EIGENBASIS", 240)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(300, 40), nn.ReLU(), nn.Linear(40, 1)).double()
    x = torch.randn(1, 300, generator=torch.Generator().manual_seed(0)).double()
    ask = partial(SmoothHess(net).attribute, x, sigma=0.05, n_calls=660, control=None)
    here = ask().hessian
    monkeypatch.setattr(principal_directions, "cholesky_qr", lambda rows: (gram_schmidt(rows), None))
    there = ask().hessian
    torch.testing.assert_close(there, here, rtol=1e-6, atol=1e-6 * float(here.abs().max()))


@pytest.mark.parametrize("wrong", [1e-6, math.nan])
def test_products_that_fail_are_repaired_or_replaced(wrong, monkeypatch):
    """A little from orthonormal: one step puts it right. Not a number: reflections."""
    rng = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 60, generator=rng).double() * torch.logspace(0, -2, 60).double()
    moments = rows.mT @ rows
    expected, noise = _powered(moments, mixing(60)), torch.randn(60, 60, generator=rng).double()
    monkeypatch.setattr(principal_directions, "cholesky_qr", lambda rows: (cholesky_qr(rows)[0] + wrong * noise, None))
    found = _powered(moments, mixing(60))
    torch.testing.assert_close(found.mT @ found, torch.eye(60).double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 if wrong == 1e-6 else 1e-9)
