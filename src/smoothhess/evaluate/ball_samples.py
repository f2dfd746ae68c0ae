"""Random displacements inside the unit ball, a function of (seed, block) only.

    "ball"     uniform in the ball: |δ|^d is uniform in [0, 1], so nearly all points lie close to the sphere
    "radius"   |δ| is uniform in [0, 1]: the sampler of the paper's tables, much closer to the centre

Both use the same uniform directions, and their radii are computed from the same uniform numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from smoothhess.draws.seeding import evaluation_generator
from smoothhess.evaluate.check_integer import check_integer
from smoothhess.linalg.memory import BATCH_INPUTS

SAMPLINGS = ("ball", "radius")
BLOCK = 64  # rows per random generator
CHUNK_ROWS = 16_384  # points per chunk, if BATCH_INPUTS allows as many
# Third words of the generator's key. Designs use the keys without a third word and with 1: with the same keys here, a
# surrogate would be evaluated, under the same seed, in the directions that it was fitted to.
_DIRECTIONS, _RADII = 2, 3


@dataclass(frozen=True)
class BallSamples:
    """The first `n_samples` displacements of the stream of `seed`; the arguments are those of `perturbation_mse`.

    >>> [len(unit) for unit in BallSamples(20_000, "ball", 0).chunks(torch.zeros(2, 3))]
    [8192, 8192, 3616]
    """

    n_samples: int
    sampling: str
    seed: int

    def __post_init__(self) -> None:
        _check_sampling(self.sampling)
        check_integer(self.n_samples, "n_samples", 2)
        check_integer(self.seed, "seed", 0)

    def chunks(self, inputs: Tensor) -> Iterator[Tensor]:
        """The displacements (c, d), in chunks whose size depends on the shape and type of the B inputs only."""
        d = inputs[0].numel()
        fitting = BATCH_INPUTS.items(d * inputs.element_size(), inputs.device)
        step = max(1, min(CHUNK_ROWS, fitting) // len(inputs))
        for start in range(0, self.n_samples, step):
            yield displacements(self.sampling, self.seed, start, min(start + step, self.n_samples), d)


def displacements(sampling: str, seed: int, start: int, stop: int, d: int) -> Tensor:
    """Rows start … stop − 1 of the stream of `seed` in the unit ball of R^d, (stop − start, d), float64 on the CPU.

    >>> rows = displacements("ball", seed=0, start=0, stop=100, d=3)
    >>> torch.equal(rows[40:90], displacements("ball", seed=0, start=40, stop=90, d=3))
    True
    """
    _check_sampling(sampling)
    parts = []
    for block in range(start // BLOCK, -(-stop // BLOCK)):
        low, high = max(start - block * BLOCK, 0), min(stop - block * BLOCK, BLOCK)
        parts.append(_block(sampling, seed, block, high, d)[low:])
    return torch.from_numpy(np.concatenate(parts))


def _block(sampling: str, seed: int, block: int, rows: int, d: int) -> np.ndarray:
    """The first rows of a block; they do not depend on the number of rows."""
    normal = evaluation_generator(seed, block, _DIRECTIONS).standard_normal((rows, d))
    direction = normal / np.linalg.norm(normal, axis=1, keepdims=True)
    uniform = evaluation_generator(seed, block, _RADII).random((rows, 1))
    return direction * (uniform ** (1 / d) if sampling == "ball" else uniform)


def _check_sampling(sampling: str) -> None:
    """Raise if there is no sampler of that name."""
    if sampling not in SAMPLINGS:
        raise ValueError(
            f'sampling must be "ball" (uniform in the ball) or "radius" (uniform radius, the paper\'s tables), '
            f"got {sampling!r}."
        )
