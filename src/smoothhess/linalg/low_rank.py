"""Batches of symmetric matrices, dense or low-rank.

`Known` holds the part of the whitened Hessian W that has a closed form and is not sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from smoothhess.linalg.gram import pair_norm, squared_norm


@dataclass(frozen=True, eq=False)
class Known:
    """K = FᵀCF of B examples (low-rank), or K = C without a factor F (dense).

    >>> dense = Known(torch.eye(3).expand(2, 3, 3))
    >>> low_rank = Known(torch.ones(2, 1, 1), torch.ones(2, 1, 3))
    >>> low_rank.product(torch.eye(3).expand(2, 3, 3)).shape, low_rank.diagonal()[0]
    (torch.Size([2, 3, 3]), tensor([1., 1., 1.]))
    >>> torch.equal((dense.scaled(torch.tensor([2.0, 1.0]))).dense()[0], 2 * torch.eye(3))
    True
    """

    core: Tensor  # (B, r, r)
    factor: Tensor | None = None  # (B, r, k)

    @property
    def is_thin(self) -> bool:
        """Whether it is low-rank, stored as factors."""
        return self.factor is not None

    def product(self, rows: Tensor) -> Tensor:
        """Each row of (B or 1, n, k) times K, (B, n, k)."""
        if self.factor is None:
            return rows @ self.core.to(rows)
        return (rows @ self.factor.to(rows).mT) @ self.core.to(rows) @ self.factor.to(rows)

    def dense(self) -> Tensor:
        """K as dense matrices, (B, k, k)."""
        return self.core if self.factor is None else self.factor.mT @ self.core @ self.factor

    def diagonal(self) -> Tensor:
        """The diagonal of K, (B, k)."""
        if self.factor is None:
            return self.core.diagonal(dim1=-2, dim2=-1)
        return (self.factor * (self.core @ self.factor)).sum(1)

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Rows S and G, (B, r, k) each, with SᵀG = K."""
        if self.factor is None:
            return torch.eye(self.core.shape[-1]).to(self.core).expand_as(self.core), self.core
        return self.factor, self.core @ self.factor

    def map(self, linear: Callable[[Tensor], Tensor]) -> Known:
        """Apply a linear map of rows on both sides; the result is low-rank if it has more than 2k coordinates."""
        if self.factor is not None:
            return Known(self.core, linear(self.factor))
        k = self.core.shape[-1]
        if linear(self.core[:, :1]).shape[-1] <= 2 * k:  # no matmul: it would use the TF32 or autocast mode of the user
            return Known(linear(linear(self.core).mT).mT)
        return Known(self.core, linear(torch.eye(k).to(self.core).expand(len(self.core), -1, -1)))

    def scaled(self, weight: Tensor) -> Known:
        """K times one weight per example, (B,)."""
        return Known(weight.to(self.core)[:, None, None] * self.core, self.factor)

    def select(self, index: Tensor) -> Known:
        """The examples at `index`."""
        return Known(self.core[index], None if self.factor is None else self.factor[index])

    def to(self, device: torch.device | str) -> Known:
        """Copy to another device."""
        return Known(self.core.to(device), None if self.factor is None else self.factor.to(device))

    def nothing(self, count: int) -> Known:
        """Zero matrices for `count` examples, with the same rank and size."""
        factor = None if self.factor is None else self.factor.new_zeros(count, *self.factor.shape[1:])
        return Known(self.core.new_zeros(count, *self.core.shape[1:]), factor)

    @cached_property
    def is_zero(self) -> Tensor:
        """Which examples have K = 0, (B,)."""
        return torch.linalg.vector_norm(self.core.flatten(1), torch.inf, 1) == 0

    @cached_property
    def squared_norm(self) -> Tensor:
        """‖K‖²_F, (B,) float64."""
        return pair_norm(*self.pairs()) if self.is_thin else squared_norm(self.core)

    def same_as(self, other: Known) -> bool:
        """Whether all entries agree up to rounding."""
        if self is other:
            return True
        mine, others = ([t for t in (k.core, k.factor) if t is not None] for k in (self, other))
        return len(mine) == len(others) and all(
            a.shape == b.shape and float((a - b.to(a)).norm()) <= 100 * torch.finfo(a.dtype).eps * float(a.norm())
            for a, b in zip(mine, others, strict=True)
        )

    def plus(self, other: Known) -> Known:
        """The sum; low-rank if both are."""
        if self.factor is None or other.factor is None:
            return Known(self.dense() + other.dense())
        core = torch.stack([torch.block_diag(a, b) for a, b in zip(self.core, other.core.to(self.core), strict=True)])
        return Known(core, torch.cat([self.factor, other.factor.to(self.factor)], 1))

    @staticmethod
    def cat(parts: Sequence[Known]) -> Known:
        """Concatenate the examples."""
        factors = [p.factor for p in parts if p.factor is not None]
        if len(factors) < len(parts):
            return Known(torch.cat([p.dense() for p in parts]))
        most = max(f.shape[1] for f in factors)
        pad = torch.nn.functional.pad
        return Known(
            torch.cat([pad(p.core, (0, most - p.core.shape[1]) * 2) for p in parts]),
            torch.cat([pad(f, (0, 0, 0, most - f.shape[1])) for f in factors]),
        )

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, for files."""
        return {"known": self.core} | ({} if self.factor is None else {"known.factor": self.factor})


def mean(a: Known | None, n_a: Tensor, b: Known | None, n_b: Tensor) -> Known | None:
    """Mean weighted by the numbers of rows; None counts as zero."""
    if a is None and b is None:
        return None
    if a is not None and b is not None and a.same_as(b):
        return a
    share = (n_a / (n_a + n_b).clamp_min(1)).double()
    parts = [k.scaled(w) for k, w in ((a, share), (b, 1 - share)) if k is not None]
    return parts[0] if len(parts) == 1 else parts[0].plus(parts[1])
