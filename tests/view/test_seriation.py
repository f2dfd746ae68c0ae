"""The clustered order puts together what belongs together, by average linkage."""

from itertools import pairwise

import numpy as np
import pytest

from smoothhess.view.figures.feature_order import clustered


def blocks(sizes, rng, noise=0.0):
    n = sum(sizes)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    strength = (owner[:, None] == owner) * rng.uniform(0.5, 1.0, (n, n)) + noise * rng.uniform(0, 1, (n, n))
    strength = (strength + strength.T) / 2
    shuffle = rng.permutation(n)
    return strength[np.ix_(shuffle, shuffle)], owner[shuffle]


@pytest.mark.parametrize("seed", range(5))
def test_blocks_come_out_in_one_piece(seed):
    rng = np.random.default_rng(seed)
    strength, owner = blocks([3, 7, 2, 5, 9], rng, noise=0.2)
    order = clustered(strength)
    assert sorted(order) == list(range(26))
    changes = np.count_nonzero(np.diff(owner[order]))
    assert changes == 4


def test_a_chain_is_laid_down_in_a_row():
    order = np.random.default_rng(0).permutation(8)
    strength = np.zeros((8, 8))
    for a, b in pairwise(order):
        strength[a, b] = strength[b, a] = 1.0
    laid = clustered(strength)
    kept = sum(strength[a, b] for a, b in pairwise(laid))
    assert kept >= 6  # of 7 links


@pytest.mark.parametrize("n", [0, 1, 4])
def test_nothing_to_order_by_keeps_everyone(n):
    assert sorted(clustered(np.zeros((n, n)))) == list(range(n))


def test_signs_do_not_matter():
    rng = np.random.default_rng(3)
    strength, _ = blocks([4, 4], rng)
    signs = np.triu(rng.choice([-1.0, 1.0], (8, 8)), 1)
    assert clustered(strength * (signs + signs.T)) == clustered(strength * (signs != 0) + strength * (signs.T != 0))


def test_a_thousand_features_take_seconds_at_most():
    strength = np.abs(np.random.default_rng(0).normal(size=(1000, 1000)))
    assert len(set(clustered(strength + strength.T))) == 1000
