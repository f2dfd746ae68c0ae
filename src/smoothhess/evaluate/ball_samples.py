"""Displacements inside the unit ball, a function of (seed, block) alone.

    "ball"     uniform in the ball: |δ|^d is uniform in [0, 1], so nearly all points lie close to the sphere
    "radius"   |δ| itself is uniform in [0, 1]: the sampler behind the paper's tables, much nearer the centre

Both have the same uniform directions, and their radii come from the same uniform numbers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

SAMPLINGS = ("ball", "radius")
BLOCK = 64  # rows that one random generator makes, for bookkeeping alone
# Third words of the generator's key. Designs own the keys without one and with 1: were they used here too, a surrogate
# would be judged, under the same seed, in the very directions that it was fitted to.
_DIRECTIONS, _RADII = 2, 3


def check_sampling(sampling: str) -> None:
    """Raise where there is no sampler of that name."""
    if sampling not in SAMPLINGS:
        raise ValueError(
            f'sampling must be "ball" (uniform in the ball) or "radius" (uniform radius, the paper\'s tables), '
            f"got {sampling!r}."
        )


def displacements(sampling: str, seed: int, start: int, stop: int, d: int) -> Tensor:
    """Rows start … stop − 1 of the stream of `seed` in the unit ball of R^d, (stop − start, d), float64 on the CPU.

    >>> whole = displacements("ball", seed=0, start=0, stop=100, d=3)
    >>> torch.equal(whole[40:90], displacements("ball", seed=0, start=40, stop=90, d=3))
    True
    """
    check_sampling(sampling)
    parts = []
    for block in range(start // BLOCK, -(-stop // BLOCK)):
        low, high = max(start - block * BLOCK, 0), min(stop - block * BLOCK, BLOCK)
        parts.append(_block(sampling, seed, block, high, d)[low:])
    return torch.from_numpy(np.concatenate(parts))


def _block(sampling: str, seed: int, block: int, rows: int, d: int) -> np.ndarray:
    """The first rows of a block; they do not depend on how many are asked for."""
    normal = np.random.default_rng((seed, block, _DIRECTIONS)).standard_normal((rows, d))
    direction = normal / np.linalg.norm(normal, axis=1, keepdims=True)
    uniform = np.random.default_rng((seed, block, _RADII)).random((rows, 1))
    return direction * (uniform ** (1 / d) if sampling == "ball" else uniform)
