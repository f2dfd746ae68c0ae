"""FoldedMean: the mean of |H| over estimates of H at independent random points, with its standard error.

The absolute value of an unbiased estimate is too large on average, most where H is small; that of a denoised estimate
is closer, and may be too small. The variance over the points shows neither. The difference between both means is
therefore added to the error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class FoldedMean:
    """Sums over estimates, to which rows are added.

    >>> mean = FoldedMean()
    >>> for value in (1.0, -2.0, 3.0):
    ...     mean = mean.with_row(torch.tensor([value]), torch.tensor([value]))
    >>> mean.value, mean.stderr
    (tensor([2.], dtype=torch.float64), tensor([0.5774], dtype=torch.float64))
    """

    n: int = 0
    total: Tensor | float = 0.0  # Σ|h| of denoised estimates
    squares: Tensor | float = 0.0  # Σ h² of denoised estimates
    unbiased: Tensor | float = 0.0  # Σ|h| of unbiased estimates

    def with_row(self, denoised: Tensor, unbiased: Tensor) -> FoldedMean:
        """With the estimates at one more point."""
        h = denoised.double().abs()
        return FoldedMean(
            self.n + 1, self.total + h, self.squares + h.square(), self.unbiased + unbiased.double().abs()
        )

    @property
    def value(self) -> Tensor:
        """The mean of |h| of the denoised estimates."""
        return torch.as_tensor(self.total / self.n)

    @property
    def stderr(self) -> Tensor:
        """The standard error of the mean over the points, and the difference of the means of both estimates."""
        variance = (torch.as_tensor(self.squares) / self.n - self.value.square()).clamp_min(0) / (self.n - 1)
        return (variance + (torch.as_tensor(self.unbiased / self.n) - self.value).square()).sqrt()
