"""The effective number of terms that carry a sum."""

from __future__ import annotations

from torch import Tensor


def effective_number(parts: Tensor) -> Tensor:
    """(Σe)²/Σe² over dimension 1, (B, …); 0 where all are zero.

    >>> import torch
    >>> effective_number(torch.tensor([[1.0, 1.0, 1.0, 0.0], [9.0, 0.0, 0.0, 0.0]]))
    tensor([3., 1.])
    """
    if not parts.shape[1]:
        return parts.sum(1)
    scaled = parts / parts.amax(1, keepdim=True).clamp_min(1e-300)  # squares could underflow
    return scaled.sum(1).square() / scaled.square().sum(1).clamp_min(1e-300)
