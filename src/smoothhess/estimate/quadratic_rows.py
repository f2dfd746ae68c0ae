"""Rows whose values and slopes are those of a quadratic function.

A row that does not agree with one has crossed a kink, or sees higher derivatives. The radial variance of
`incomplete_blocks`, the unknown errors of `unseen_events`, and the warnings about few events are based on this test.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smoothhess.estimate.statistics import Statistics

NEARLY_QUADRATIC = 1e-3  # tolerance of values and slopes of rows that may be those of a quadratic function
QUADRATIC, ROUNDING = 1e-6, 64  # tolerance of values and slopes: relative, and in units in the last place of f(x)


def is_quadratic(stats: Statistics, tolerance: float = QUADRATIC) -> Tensor:
    """Whether values and slopes of every row are those of a quadratic function, w f = k α/2, (B,).

    False with a control variate, whose residual has other slopes than the function.
    """
    return rows_of_quadratic(stats, tolerance).all(1)


def rows_of_quadratic(stats: Statistics, tolerance: float = QUADRATIC) -> Tensor:
    """Where a row of the head agrees with a quadratic function, w f = k α/2, (B, P); False with a control variate.

    P is the number of rows of the head; rows of zeros, which pad examples with fewer rows, count as agreeing.
    """
    head = stats.head
    value, slope = head.value_even.double(), head.along.double() * stats.rank / 2
    rounding = torch.finfo(head.odd.dtype).eps * head.weight.double() * stats.value.double().abs()[:, None]
    agree = (value - slope).abs() <= tolerance * (value.abs() + slope.abs()) + ROUNDING * rounding
    return agree & stats.has_own_values[:, None]
