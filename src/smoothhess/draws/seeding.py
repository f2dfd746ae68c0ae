"""All random numbers from seeds: the draws of designs, independent streams for evaluations, and fixed directions.

`generator` and `states` seed the draws; `evaluation_generator`, `evaluation_seed` and `derived_seeds` seed what must be
independent of the draws with the same seed; `torch_generator` and `fixed_normal` are for random directions that are no
draws. The fixed directions of `smoothhess.linalg`, which cannot import this module, are made there.

`default_rng(SeedSequence(seed, spawn_key))` hashes its key to the state of a PCG64. Creating one generator takes longer
than drawing a few thousand numbers, and holds the GIL. In `states` the hashes of many keys are vectorised, and one
generator per thread is set from state to state: bit for bit the same numbers, ten times faster. The hash is O'Neill's,
https://www.pcg-random.org/posts/developing-a-seed_seq-alternative.html; NumPy documents it and guarantees that it does
not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "State",
    "derived_seeds",
    "evaluation_generator",
    "evaluation_seed",
    "fixed_normal",
    "generator",
    "generators",
    "states",
    "torch_generator",
]

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


def evaluation_generator(*words: int) -> np.random.Generator:
    """The generator of a seed and further words, with other streams than `generator`."""
    return np.random.default_rng(words)


def evaluation_seed(*words: int) -> int:
    """A seed of 64 bits from a seed and further words."""
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])


def derived_seeds(key: Key, count: int) -> list[int]:
    """`count` seeds of 63 bits that are independent of each other and of the seed of the key.

    >>> derived_seeds((0, 1), 2) == derived_seeds((0, 1), 3)[:2], derived_seeds((0, 1), 1) == derived_seeds((0, 2), 1)
    (True, False)
    """
    sequence = np.random.SeedSequence(key[0], spawn_key=key[1:])
    return [int(word) >> 1 for word in sequence.generate_state(count, np.uint64)]


def torch_generator(seed: int = 0) -> torch.Generator:
    """A generator of torch on the CPU; the global generator does not move."""
    return torch.Generator().manual_seed(seed)


def fixed_normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers that are the same in every call, float64 on the CPU: for probes and tests of a property.

    >>> torch.equal(fixed_normal(2, 3), fixed_normal(2, 3))
    True
    """
    return torch.randn(shape, generator=torch_generator(seed), dtype=torch.float64)


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
