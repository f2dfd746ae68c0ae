"""Estimate: numbers with their standard errors and confidence intervals.

The distribution is in `smoothhess.estimate.student_t`, the variances are in `smoothhess.estimate.variance`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smoothhess.estimate import student_t


@dataclass(frozen=True, eq=False)
class Estimate:
    """Estimates with their standard errors; intervals use Student's t distribution.

    >>> one = torch.ones(1)
    >>> [round(float(end), 2) for end in Estimate(one, 0.1 * one, 10 * one).interval()]
    [0.78, 1.22]
    """

    value: Tensor  # (B, …)
    stderr: Tensor  # (B, …); NaN where the error is unknown
    df: Tensor  # (B,) degrees of freedom of the standard errors

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Confidence interval of each number.

        Args:
            level: probability with which the interval contains the true value, between 0 and 1.

        Returns:
            The lower and upper ends, with the shape of `value`; NaN where the error is unknown.
        """
        width = student_t.quantile(level, self.df).to(self.stderr).reshape(-1, *[1] * (self.stderr.ndim - 1))
        reach = torch.where(self.stderr == 0, 0.0, width * self.stderr)  # NaN stays NaN: the error is unknown
        return self.value - reach, self.value + reach
