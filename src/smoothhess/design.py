"""Where the draws go: rows of white noise and their weights, a function of (seed, block) alone.

A design is an endless stream of rows, cut into blocks. Row i has a point z_i in R^k and a weight w_i; a mirrored
design evaluates the model at +z_i and −z_i. The weights undo a change of the radial law, so that

    E[w z γ(z)ᵀ] = W      (Hessian)        E[w γ(z)] = Γ      (gradient)

whatever the design. Rows inside one *unit* may depend on each other; units never do, so error bars are over units.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Draws:
    """Consecutive rows of a design, float64 on the CPU."""

    z: Tensor  # (r, k)
    weight: Tensor  # (r,)

    def __len__(self) -> int:
        return len(self.weight)


class Design(ABC):
    """A stream of draws; `rows` is the only thing that others call."""

    name: str
    mirrored: bool  # each row is used at ±z: two gradient calls

    @abstractmethod
    def block_rows(self, k: int) -> int:
        """Rows in one block, the amount of noise that one random generator makes."""

    @abstractmethod
    def unit_rows(self, k: int) -> int:
        """Rows in one independent unit."""

    @abstractmethod
    def block(self, rng: np.random.Generator, rows: int, k: int) -> Draws:
        """The first `rows` rows of a block; they do not depend on how many are asked for."""

    def rows(self, seed: int, start: int, stop: int, k: int) -> Draws:
        """Rows start … stop − 1 of the stream of `seed` in k dimensions."""
        size = self.block_rows(k)
        parts = []
        for index in range(start // size, -(-stop // size)):
            first = index * size
            low, high = max(start - first, 0), min(stop - first, size)
            drawn = self.block(np.random.default_rng([seed, index]), high, k)
            parts.append((drawn.z[low:high], drawn.weight[low:high]))
        return Draws(torch.cat([z for z, _ in parts]), torch.cat([w for _, w in parts]))

    @property
    def calls_per_row(self) -> int:
        """Gradient calls that one row costs."""
        return 2 if self.mirrored else 1


class Independent(Design):
    """Independent standard normal rows: Eq. 8 of the paper to the letter.

    >>> design = Independent()
    >>> design.rows(seed=0, start=0, stop=5, k=3).z.shape
    torch.Size([5, 3])
    """

    name = "iid"
    mirrored = False

    def block_rows(self, k: int) -> int:
        """64, for bookkeeping alone."""
        return 64

    def unit_rows(self, k: int) -> int:
        """Each row stands alone."""
        return 1

    def block(self, rng: np.random.Generator, rows: int, k: int) -> Draws:
        """Standard normal rows of weight 1."""
        z = torch.from_numpy(rng.standard_normal((rows, k)))
        return Draws(z, torch.ones(rows, dtype=torch.float64))


class Antithetic(Independent):
    """The same rows, each used at +z and −z: the paper's variance reduction, and exact for affine functions."""

    name = "antithetic"
    mirrored = True


DESIGNS: dict[str, Design] = {design.name: design for design in (Independent(), Antithetic())}


def find_design(name: str) -> Design:
    """The design called `name`.

    >>> find_design("antithetic").mirrored
    True
    """
    if name not in DESIGNS:
        raise ValueError(f"design must be one of {sorted(DESIGNS)}, got {name!r}.")
    return DESIGNS[name]
