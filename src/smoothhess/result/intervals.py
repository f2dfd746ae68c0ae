"""Estimate: numbers with their standard errors and confidence intervals.

The distribution is in `smoothhess.estimate.student_t`, the variances are in `smoothhess.estimate.variance`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from smoothhess.estimate import student_t

MOST_DIGITS = 6  # of a printed number before or after the point; others have an exponent


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
        half = self.half_width(level)
        return self.value - half, self.value + half

    def half_width(self, level: float = 0.95) -> Tensor:
        """Half of the width of `interval`, with the shape of `value`; NaN where the error is unknown."""
        width = student_t.quantile(level, self.df).to(self.stderr).reshape(-1, *[1] * (self.stderr.ndim - 1))
        return torch.where(self.stderr == 0, 0.0, width * self.stderr)  # NaN stays NaN: the error is unknown


def half_width(stderr: float, df: float = math.inf) -> float:
    """Half of the width of a 95 % confidence interval: what tables print after ±.

    >>> round(half_width(1.0), 2), round(half_width(1.0, 4), 2)
    (1.96, 2.78)
    """
    return 0.0 if stderr == 0 else float(student_t.quantile(0.95, torch.tensor(float(df)))) * stderr


def plus_minus(value: float, half: float) -> str:
    """A number with the half-width of its 95 % interval, to two digits of the half-width.

    >>> plus_minus(1.23456, 0.0456), plus_minus(2.0, math.inf), plus_minus(2.0, 0.0), plus_minus(-1e-9, 2e-11)
    ('1.235 ± 0.046', '2 ± unknown', '2', '-1e-09 ± 2e-11')
    """
    if half == 0:
        return f"{value:.4g}"
    if not math.isfinite(half):
        return f"{value:.4g} ± unknown"
    digits = max(0, 1 - math.floor(math.log10(half)))
    if digits > MOST_DIGITS or abs(value) >= 10**MOST_DIGITS:
        return f"{value:.4g} ± {half:.2g}"
    return f"{round(value, digits) + 0.0:.{digits}f} ± {half:.{digits}f}"  # not −0
