"""Groups of features: super-pixels, intervals, columns that belong together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from smoothhess.gaussian import Gaussian
from smoothhess.statistics import PROBES


@dataclass(frozen=True, eq=False)
class Grouping:
    """Which group each feature belongs to, and what the group sums keep of their features."""

    mask: Tensor  # (1 or B, D) group ids
    direction: Tensor | None  # (1 or B, D) weight of each feature
    count: int  # K
    scales: Tensor  # (K,) size of a usual move of each group
    r2: Tensor  # (B,) of the Hessian that was summed

    @staticmethod
    def make(
        feature_mask: Any, direction: Any, inputs_shape: Sequence[int], feature_scales: Tensor, like: Tensor
    ) -> Grouping:
        """From a user's mask (and direction) for inputs of shape (B, *features); numbers follow `like`."""
        batch, *features = inputs_shape
        mask = torch.as_tensor(feature_mask)
        if mask.is_floating_point() or mask.is_complex() or mask.dtype == torch.bool:
            raise TypeError(f"feature_mask must hold integer group ids, got {mask.dtype}.")
        mask = _flat(mask, batch, features, "feature_mask").long().to(like.device)
        if int(mask.min()) < 0:
            raise ValueError(
                f"group ids must be 0, 1, 2, …, got {int(mask.min())}. Give features to leave out an id of their own."
            )
        count = int(mask.max()) + 1
        weight = None
        if direction is not None:
            weight = _flat(torch.as_tensor(direction).to(like), batch, features, "direction")
        # A group moves by the root mean square of its features' σ; with a direction the move is in the sums already.
        ids = mask[0].cpu()
        members = torch.bincount(ids, minlength=count).clamp_min(1)
        square = torch.zeros(count, dtype=torch.float64).index_add(0, ids, feature_scales.double().cpu().square())
        scales = (square / members).sqrt() if weight is None else torch.ones(count, dtype=torch.float64)
        return Grouping(
            mask, weight, count, scales, torch.full((batch,), torch.nan, dtype=like.dtype, device=like.device)
        )

    def sum(self, x: Tensor) -> Tensor:
        """Group sums along the last dimension, (1 or B, …, D) → (…, K)."""
        if self.direction is not None:
            x = x * _between(self.direction, x)
        if len(self.mask) == 1:
            return x.new_zeros(*x.shape[:-1], self.count).index_add(-1, self.mask[0], x)
        mask = _between(self.mask, x)
        x, mask = torch.broadcast_tensors(x, mask)
        return x.new_zeros(*x.shape[:-1], self.count).scatter_add(-1, mask, x)

    def directions(self, gaussian: Gaussian) -> Tensor:
        """Whitened directions q_I = L⁺ 1_I of the groups, (1 or B, K, rank)."""
        rows = []
        for mask, weight in zip(*self._per_example(), strict=True):
            indicator = weight.new_zeros(self.count, len(mask))
            indicator[mask, torch.arange(len(mask), device=mask.device)] = weight
            rows.append(gaussian.whiten(indicator))
        return torch.stack(rows)

    def _per_example(self) -> tuple[Tensor, Tensor]:
        weight = torch.ones_like(self.mask, dtype=self.r2.dtype) if self.direction is None else self.direction
        both = torch.broadcast_tensors(self.mask, weight)
        return both[0], both[1]

    def select(self, index: Tensor) -> Grouping:
        """For the examples at `index`."""
        return replace(
            self,
            mask=self.mask if len(self.mask) == 1 else self.mask[index],
            direction=self.direction if self.direction is None or len(self.direction) == 1 else self.direction[index],
            r2=self.r2[index],
        )

    def to(self, device: torch.device | str) -> Grouping:
        """On another device."""
        direction = None if self.direction is None else self.direction.to(device)
        return replace(self, mask=self.mask.to(device), direction=direction, r2=self.r2.to(device))

    def same_as(self, other: Grouping | None) -> bool:
        """Whether the features are summed alike."""
        if other is None or self.count != other.count or not torch.equal(self.mask, other.mask):
            return False
        if self.direction is None or other.direction is None:
            return self.direction is other.direction
        return torch.equal(self.direction, other.direction)

    @staticmethod
    def cat(parts: Sequence[Grouping], sizes: Sequence[int]) -> Grouping:
        """Side by side, for `sizes` examples each."""
        first = parts[0]
        shared = all(len(p.mask) == 1 and p.same_as(first) for p in parts)
        direction = first.direction
        if not shared and direction is not None:
            direction = torch.cat(
                [p.direction.expand(n, -1) for p, n in zip(parts, sizes, strict=True) if p.direction is not None]
            )
        return replace(
            first,
            mask=first.mask if shared else torch.cat([p.mask.expand(n, -1) for p, n in zip(parts, sizes, strict=True)]),
            direction=direction,
            r2=torch.cat([p.r2 for p in parts]),
        )


def probes(rank: int, like: Tensor) -> Tensor:
    """Fixed random directions in which group sums watch the noise of the whole Hessian, (PROBES, rank)."""
    rng = torch.Generator().manual_seed(0)
    return torch.randn(PROBES, rank, generator=rng, dtype=torch.float64).to(like)


def _flat(x: Tensor, batch: int, features: Sequence[int], name: str) -> Tensor:
    """(1 or B, D) from the shape of one input, of one input with a leading 1, or of the batch."""
    shape = tuple(x.shape)
    if shape == tuple(features):
        return x.reshape(1, -1)
    if shape in ((1, *features), (batch, *features)):
        return x.reshape(len(x), -1)
    raise ValueError(f"{name} must have the shape of one input, {tuple(features)}, or of the batch, got {shape}.")


def _between(per_example: Tensor, x: Tensor) -> Tensor:
    """(B, D) with dimensions of size 1 put in so that it lines up with (B, …, D)."""
    return per_example.reshape(len(per_example), *[1] * (x.ndim - 2), -1)
