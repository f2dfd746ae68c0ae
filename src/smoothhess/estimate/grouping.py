"""Grouping: sums of features over groups, such as super-pixels, intervals or columns of a table.

This module validates masks and sums tensors over groups. Masks are made in `smoothhess.result.segments`; the variance
of group sums is in `variance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from smoothhess.draws.gaussian import Gaussian
from smoothhess.draws.seeding import fixed_normal
from smoothhess.estimate.statistics import PROBES


@dataclass(frozen=True, eq=False)
class Grouping:
    """Assignment of features to groups, and the quantities that are kept for the groups."""

    mask: Tensor  # (1 or B, D) group ids
    direction: Tensor | None  # (1 or B, D) weight of each feature
    count: int  # K
    scales: Tensor  # (1 or B, K) typical change of each group, float64 on the CPU
    r2: Tensor  # (B,) of the Hessian that was summed

    @staticmethod
    def make(
        feature_mask: Any,
        direction: Any,
        inputs_shape: Sequence[int],
        feature_scales: Tensor,
        like: Tensor,
        name: str = "feature_mask",
    ) -> Grouping:
        """Validate a mask (and direction) for inputs of shape (B, *features); dtype and device are those of `like`.

        `name` is that of the mask in errors.
        """
        batch, *features = inputs_shape
        try:
            mask = torch.as_tensor(feature_mask)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"{name} must hold integer group ids, got {type(feature_mask).__name__}. Replace names by ids."
            ) from error
        if mask.is_floating_point() or mask.is_complex() or mask.dtype == torch.bool:
            raise TypeError(f"{name} must hold integer group ids, got {mask.dtype}.")
        mask = _flat(mask, batch, features, name).long().to(like.device)
        if int(mask.min()) < 0:
            raise ValueError(
                f"group ids must be 0, 1, 2, …, got {int(mask.min())}. Give features to leave out a separate id."
            )
        count = int(mask.max()) + 1
        weight = None
        if direction is not None:
            weight = _flat(torch.as_tensor(direction).to(like), batch, features, "direction")
        scales = _scales(mask.cpu(), weight, count, feature_scales.double().cpu())
        r2 = torch.full((batch,), torch.nan, dtype=like.dtype, device=like.device)
        return Grouping(mask, weight, count, scales, r2)

    def after(self, first: Grouping, feature_scales: Tensor) -> Grouping:
        """The composition of `first` and this grouping of its groups, as one grouping of the features."""
        batch = max(len(self.mask), len(first.mask))
        mask = self.mask.expand(batch, -1).gather(1, first.mask.expand(batch, -1))
        directions = []
        if first.direction is not None:
            directions.append(first.direction)
        if self.direction is not None:
            n = max(len(self.direction), len(first.mask))
            directions.append(self.direction.expand(n, -1).gather(1, first.mask.expand(n, -1)))
        weight = None if not directions else directions[0] if len(directions) == 1 else directions[0] * directions[1]
        scales = _scales(mask.cpu(), weight, self.count, feature_scales.double().cpu())
        return replace(self, mask=mask, direction=weight, scales=scales)

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
        """The grouping of the examples at `index`."""
        return replace(
            self,
            mask=self.mask if len(self.mask) == 1 else self.mask[index],
            direction=self.direction if self.direction is None or len(self.direction) == 1 else self.direction[index],
            scales=self.scales if len(self.scales) == 1 else self.scales[index.cpu()],
            r2=self.r2[index],
        )

    def to(self, device: torch.device | str) -> Grouping:
        """Copy to another device."""
        direction = None if self.direction is None else self.direction.to(device)
        return replace(self, mask=self.mask.to(device), direction=direction, r2=self.r2.to(device))

    def without_r2(self) -> Grouping:
        """A copy without r2, for statistics that have changed: group sums do not keep the gradient's variation."""
        return replace(self, r2=torch.full_like(self.r2, torch.nan))

    def same_as(self, other: Grouping | None) -> bool:
        """Whether two groupings have the same groups and weights."""
        if other is None or self.count != other.count or not torch.equal(self.mask, other.mask):
            return False
        if self.direction is None or other.direction is None:
            return self.direction is other.direction
        return torch.equal(self.direction, other.direction)

    @staticmethod
    def cat(parts: Sequence[Grouping], sizes: Sequence[int]) -> Grouping:
        """Concatenate groupings of `sizes` examples each."""
        first = parts[0]
        if len({p.direction is None for p in parts}) > 1:
            raise ValueError(
                "groups weighted by a direction and plain groups cannot be concatenated. Pass a direction for all, or "
                "for none."
            )
        if all(len(p.mask) == 1 and p.same_as(first) for p in parts):
            return replace(first, r2=torch.cat([p.r2 for p in parts]))

        def rows(tensors: Sequence[Tensor]) -> Tensor:
            return torch.cat([t.expand(n, -1) for t, n in zip(tensors, sizes, strict=True)])

        return Grouping(
            mask=rows([p.mask for p in parts]),
            direction=None
            if first.direction is None
            else rows([p.direction for p in parts if p.direction is not None]),
            count=first.count,
            scales=rows([p.scales for p in parts]),
            r2=torch.cat([p.r2 for p in parts]),
        )


def _scales(mask: Tensor, direction: Tensor | None, count: int, feature_scales: Tensor) -> Tensor:
    """Root mean square σ of the features of each group with σ > 0; 1 with a direction, which includes the scale."""
    if direction is not None:
        return torch.ones(1, count, dtype=torch.float64)
    moving = (feature_scales > 0).double().expand(len(mask), -1)
    members = torch.zeros(len(mask), count, dtype=torch.float64).scatter_add(1, mask, moving)
    squares = torch.zeros_like(members).scatter_add(1, mask, feature_scales.square().expand(len(mask), -1))
    return (squares / members.clamp_min(1)).sqrt()


def probes(rank: int, like: Tensor) -> Tensor:
    """Fixed random directions in which group sums keep the antisymmetric half of the Hessian, (PROBES, rank)."""
    return _probes(rank).to(like)


@lru_cache(maxsize=1)
def _probes(rank: int) -> Tensor:
    return fixed_normal(PROBES, rank)


def _flat(x: Tensor, batch: int, features: Sequence[int], name: str) -> Tensor:
    """(1 or B, D) from the shape of one input or of the batch; missing dimensions and those of size 1 are broadcast."""
    shape, features = tuple(x.shape), tuple(features)
    own = x[None] if x.ndim <= len(features) else x
    fits = own.ndim > 1 and len(own) in (1, batch)
    try:
        spread = torch.broadcast_shapes(own.shape[1:], features) if fits else ()
    except RuntimeError:
        spread = ()
    if spread != features or (len(features) == 1 and own.shape[1:] != features):
        raise ValueError(f"{name} must have the shape of one input, {features}, or of the batch, got {shape}.")
    missing = len(features) + 1 - own.ndim
    own = own.reshape(len(own), *[1] * missing, *own.shape[1:])
    return own.expand(len(own), *features).reshape(len(own), -1)


def _between(per_example: Tensor, x: Tensor) -> Tensor:
    """(B, D) with dimensions of size 1 inserted so that it broadcasts with (B, …, D)."""
    return per_example.reshape(len(per_example), *[1] * (x.ndim - 2), -1)
