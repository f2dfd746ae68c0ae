"""Generators that are seeded together are numpy's own, bit for bit."""

import numpy as np
import pytest

from smoothhess.draws.seeding import generator, generators, states


def keys():
    rng = np.random.default_rng(0)
    drawn = [(int(rng.integers(2**63)) << int(rng.integers(65)), int(rng.integers(2**32)), 1) for _ in range(300)]
    return [*drawn, (0, 0, 0), (2**128 - 1, 2**32 - 1, 2**32 - 1), (2**32, 0, 0), (2**127, 1, 1)]


def test_the_same_numbers_as_numpy():
    for key, found in zip(keys(), generators(states(keys())), strict=True):
        expected = np.random.default_rng(np.random.SeedSequence(key[0], spawn_key=key[1:]))
        assert found.bit_generator.state == expected.bit_generator.state
        assert np.array_equal(found.standard_normal(3), expected.standard_normal(3))
        assert np.array_equal(found.chisquare(5, 3), expected.chisquare(5, 3))


@pytest.mark.parametrize("odd", [[(7,)], [(2**128, 3)], [(1, 2**32)], [(2**200 + 5, 2**40)]])
def test_keys_of_another_layout(odd):
    found = next(generators(states(odd)))
    assert found.bit_generator.state == generator(odd[0]).bit_generator.state


def test_nothing_is_left_of_the_generator_before():
    """A half-used word of 32 bits does not go on into the next stream."""
    for found in generators(states([(1, 0), (1, 0)])):
        drawn = found.integers(2**32, dtype=np.uint32)
        assert drawn == generator((1, 0)).integers(2**32, dtype=np.uint32)
    assert states([]) == []


def test_a_negative_seed_is_refused_as_by_numpy():
    with pytest.raises(ValueError, match="non-negative"):
        states([(-1, 0)])
