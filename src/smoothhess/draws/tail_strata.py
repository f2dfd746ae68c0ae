"""Tail strata: regions far from the input that few draws of a design reach, and draws from inside them.

The stratum of a unit vector ê with margin t is |ê·z| > t, which a draw reaches with probability P = 2Φ(−t). Of the M
strata of an example, which may overlap, each is chosen with the same probability. Draws z then have 1/w(z) times the
density of the noise, and

    E[g(z) 1{z in a stratum}] = E[w(z) g(z)] over these draws,      1/w(z) = Σ 1/(M P) over the strata that contain z.

Weights are at most M times the largest P. Draws come in couples ξê ± z⊥ with the same ξ, so that what depends on ξ only
has no noise from the other directions. Which strata an example has is decided in `smoothhess.explainers.find_tails`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from smoothhess.draws.seeding import generator

TAIL = 2**32 - 4  # key of the streams of couples, instead of a block number
NEVER = 40.0  # margin of strata that do not exist


class Couples(NamedTuple):
    """Draws from the strata of B examples."""

    z: Tensor  # (B, c, 2, k)
    weight: Tensor  # (B, c, 2) w(z)


@dataclass(frozen=True, eq=False)
class TailStrata:
    """The strata of B examples, in whitened coordinates."""

    direction: Tensor  # (B, m, k) ê; zero where an example has fewer strata
    margin: Tensor  # (B, m) t, float64; NEVER where an example has fewer strata

    @property
    def exist(self) -> Tensor:
        """Which examples have strata, (B,)."""
        return (self.margin < NEVER).any(1)

    @property
    def chances(self) -> Tensor:
        """2Φ(−t), (B, m)."""
        return torch.special.erfc(self.margin / 2**0.5) * (self.margin < NEVER)

    def contain(self, z: Tensor) -> Tensor:
        """Whether each of z (1 or B, P, k) is in a stratum, (B, P)."""
        return self._memberships(z).any(2)

    def _memberships(self, z: Tensor) -> Tensor:
        """Which strata contain each of z, (B, P, m)."""
        return (z.to(self.direction) @ self.direction.mT).abs().double() > self.margin[:, None]

    def same_as(self, other: TailStrata) -> bool:
        """Whether both have the same strata, up to rounding."""
        if self.margin.shape != other.margin.shape:
            return False
        close = torch.allclose(self.margin, other.margin, atol=1e-4)
        return close and torch.allclose(self.direction, other.direction.to(self.direction), atol=1e-4)

    def plus(self, other: TailStrata) -> TailStrata:
        """With the strata of both."""
        direction = torch.cat([self.direction, other.direction.to(self.direction)], 1)
        return TailStrata(direction, torch.cat([self.margin, other.margin], 1))

    def select(self, index: Tensor) -> TailStrata:
        """The strata of the examples at `index`."""
        return TailStrata(self.direction[index], self.margin[index])

    def couples(self, streams: Sequence[tuple[int, int]], count: int) -> Couples:
        """`count` couples of each example, from its stream: a seed, and the first row of the design that they go with.

        Every example must have strata.
        """
        k, like = self.direction.shape[2], self.direction
        chances, real = self.chances, self.margin < NEVER
        drawn = [_drawn(seed, row, count, k) for seed, row in streams]
        uniform, normal = (torch.from_numpy(np.stack(parts)).to(like.device) for parts in zip(*drawn, strict=True))
        number = real.sum(1)  # M, (B,)
        place = (uniform[..., 0] * number[:, None]).long()  # among the strata that exist, (B, c)
        stratum = torch.argsort((~real).long(), dim=1, stable=True).gather(1, place)
        along = -torch.special.ndtri((1 - uniform[..., 1]) * chances.gather(1, stratum) / 2)  # beyond t
        towards = like.double().gather(1, stratum[..., None].expand(-1, -1, k))
        across = normal - (normal * towards).sum(-1, keepdim=True) * towards
        z = torch.stack([along[..., None] * towards + across, along[..., None] * towards - across], 2).to(like)
        share = torch.where(real, 1 / (number[:, None] * chances.clamp_min(1e-300)), 0.0)  # 1/(M P), (B, m)
        own = torch.zeros_like(real, dtype=torch.float64)[:, None].expand(-1, 2 * count, -1)
        own = own.scatter(2, stratum.repeat_interleave(2, 1)[..., None], 1.0) > 0  # its own stratum, despite rounding
        inside = self._memberships(z.flatten(1, 2)) | own
        density = (inside * share[:, None]).sum(2).unflatten(1, (count, 2))
        return Couples(z, (1 / density).to(like))


def _drawn(seed: int, row: int, count: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Uniform numbers (count, 2) and normal rows (count, k) of the couples that go with a row of a design."""
    numbers = generator((seed, TAIL, row))
    return numbers.random((count, 2)), numbers.standard_normal((count, k))
