"""FoldedMean: the mean of |H| over independent estimates of H at different points, with its standard error.

The absolute value of an estimate with error τ is too large on average, most where H is small. The variance of the mean
over the points does not show this bias; it is computed from τ and added to the error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class FoldedMean:
    """Sums over estimates, to which rows are added.

    >>> mean = FoldedMean()
    >>> for value in (1.0, -2.0, 3.0):
    ...     mean = mean.with_row(torch.tensor([value]), torch.zeros(1))
    >>> mean.value(), mean.stderr()
    (tensor([2.], dtype=torch.float64), tensor([0.5774], dtype=torch.float64))
    """

    n: int = 0
    total: Tensor | float = 0.0  # Σ|h|
    squares: Tensor | float = 0.0  # Σ h²
    bias: Tensor | float = 0.0  # Σ of the expected increase of |h|

    def with_row(self, value: Tensor, stderr: Tensor) -> FoldedMean:
        """With one more estimate, and its standard errors."""
        h = value.double().abs()
        return FoldedMean(
            self.n + 1,
            self.total + h,
            self.squares + h.square(),
            self.bias + folding_bias(h, stderr.double()),
        )

    def value(self) -> Tensor:
        """The mean of |h|."""
        return torch.as_tensor(self.total / self.n)

    def stderr(self) -> Tensor:
        """The standard error of the mean over the rows, and the mean bias."""
        variance = (torch.as_tensor(self.squares) / self.n - self.value().square()).clamp_min(0) / (self.n - 1)
        return (variance + torch.as_tensor(self.bias / self.n).square()).sqrt()


def folding_bias(size: Tensor, stderr: Tensor) -> Tensor:
    """E|N(μ, τ²)| − μ for μ = `size` ≥ 0 and τ = `stderr`: √(2/π) τ exp(−μ²/2τ²) − μ erfc(μ/√2τ).

    >>> folding_bias(torch.tensor([0.0, 10.0]), torch.ones(2)).round(decimals=3)
    tensor([0.7980, 0.0000])
    """
    ratio = size / stderr.clamp_min(torch.finfo(stderr.dtype).tiny)
    bias = math.sqrt(2 / math.pi) * stderr * torch.exp(-ratio.square() / 2) - size * torch.erfc(ratio / math.sqrt(2))
    return bias.clamp_min(0)
