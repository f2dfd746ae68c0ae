"""Draws from tail strata: they lie inside, and their weights give expectations over the strata."""

import math

import pytest
import torch

from smoothhess.draws.tail_strata import NEVER, TailStrata

D = torch.float64


def strata(*margins, k=5, batch=1):
    """Strata along the first axes, one for each margin."""
    direction = torch.eye(k, dtype=D)[: len(margins)].expand(batch, -1, -1)
    return TailStrata(direction, torch.tensor(margins, dtype=D).expand(batch, -1))


def chance(t):
    return math.erfc(t / 2**0.5)


def test_draws_are_inside_and_couples_are_mirrored_across_the_direction():
    z, weight = strata(2.5).couples([(3, 0)], 500)
    assert bool((z[..., 0] > 2.5).all())
    torch.testing.assert_close(z[:, :, 0, 0], z[:, :, 1, 0])
    torch.testing.assert_close(z[:, :, 0, 1:], -z[:, :, 1, 1:])
    torch.testing.assert_close(weight, torch.full_like(weight, chance(2.5)))
    assert bool(strata(2.5).contain(z.flatten(1, 2)).all())


def test_weights_average_to_the_probability_of_the_union():
    """1 − (1 − P₁)(1 − P₂) for orthogonal directions; z-test over couples."""
    _, weight = strata(1.0, 1.5).couples([(0, 0)], 4000)
    found = weight[0].mean(1)
    true = 1 - (1 - chance(1.0)) * (1 - chance(1.5))
    assert abs(float(found.mean()) - true) < 4 * float(found.std()) / len(found) ** 0.5


def test_expectations_over_nested_strata():
    """E[z₁² 1{|z₁| > t}] = 2(tφ(t) + Φ(−t)), with three strata of the same direction."""
    t = 1.2
    direction = torch.eye(4, dtype=D)[:1].expand(1, 3, -1)
    z, weight = TailStrata(direction, torch.tensor([[t, 2.0, 3.0]], dtype=D)).couples([(1, 0)], 4000)
    found = (weight * z[..., 0].square())[0].mean(1)
    true = 2 * t * math.exp(-t * t / 2) / math.sqrt(2 * math.pi) + chance(t)
    assert abs(float(found.mean()) - true) < 4 * float(found.std()) / len(found) ** 0.5
    across = (weight * z[..., 1].square())[0].mean(1)  # the other directions are normal
    assert abs(float(across.mean()) - chance(t)) < 4 * float(across.std()) / len(across) ** 0.5


def test_examples_have_their_own_strata():
    both = TailStrata(strata(2.0, NEVER, batch=2).direction, torch.tensor([[2.0, NEVER], [NEVER, 3.0]], dtype=D))
    z, weight = both.couples([(0, 0), (0, 0)], 200)
    assert bool((z[0, ..., 0].abs() > 2).all())
    assert bool((z[1, ..., 1].abs() > 3).all())
    torch.testing.assert_close(weight[1], torch.full_like(weight[1], chance(3.0)))
    assert both.exist.tolist() == [True, True]
    assert both.select(torch.tensor([1])).margin.tolist() == [[NEVER, 3.0]]


def test_draws_depend_on_the_stream_only():
    many = strata(2.0, batch=2).couples([(5, 0), (5, 8)], 30)
    again = strata(2.0).couples([(5, 8)], 30)
    torch.testing.assert_close(many.z[1:], again.z, rtol=0, atol=0)
    assert not torch.equal(many.z[0], many.z[1])


@pytest.mark.parametrize("margin", [3.0, 8.0, 20.0])
def test_far_margins_do_not_overflow(margin):
    z, weight = strata(margin).couples([(0, 0)], 100)
    assert bool(z.isfinite().all())
    assert bool((z[..., 0] > margin - 1e-9).all())
    assert bool((weight > 0).all())
