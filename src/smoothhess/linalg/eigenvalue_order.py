"""The order of eigenvalues that is used everywhere: by magnitude, largest first."""

from __future__ import annotations

from torch import Tensor


def by_magnitude(values: Tensor, k: int | None = None) -> Tensor:
    """Return the positions of the k eigenvalues of largest magnitude (all when None), largest first, (B, k).

    >>> import torch
    >>> by_magnitude(torch.tensor([[1.0, -3.0, 2.0]]), 2)
    tensor([[1, 2]])
    """
    return values.abs().argsort(dim=-1, descending=True, stable=True)[..., :k]
