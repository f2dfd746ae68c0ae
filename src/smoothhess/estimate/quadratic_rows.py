"""Rows whose values and slopes are those of a quadratic function.

A row that does not agree with one has crossed a kink, or sees higher derivatives. The radial variance of
`incomplete_blocks`, the unknown errors of `unseen_events`, and the warnings about few events are based on this test.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smoothhess.draws.designs import SMALL
from smoothhess.estimate.statistics import Statistics

NEARLY_QUADRATIC = 1e-3  # tolerance of values and slopes of rows that may be those of a quadratic function
QUADRATIC, ROUNDING = 1e-6, 64  # tolerance of values and slopes: relative, and in units in the last place of f
INFORMATIVE = 1e-2  # rounding of values as a share of their change up to which they can show a kink
FEW_ROWS = 4  # rows that cross a kink are few below this number


def is_quadratic(stats: Statistics, tolerance: float = QUADRATIC) -> Tensor:
    """Whether values and slopes of every row are those of a quadratic function, w f = k α/2, (B,).

    False with a control variate, whose residual has other slopes than the function.
    """
    return rows_of_quadratic(stats, tolerance).all(1)


def rows_of_quadratic(stats: Statistics, tolerance: float = QUADRATIC) -> Tensor:
    """Where a row of the head agrees with a quadratic function, w f = k α/2, (B, P); False with a control variate.

    P is the number of rows of the head. Rows without a score count as agreeing: those that pad examples with fewer
    rows, and, in few dimensions, those that only the gradient and the value use.
    """
    if not bool(stats.has_own_values.any()):
        return torch.zeros_like(stats.head.along, dtype=torch.bool)
    value, slope, rounding = _parts(stats)
    agree = (value - slope).abs() <= tolerance * (value.abs() + slope.abs()) + rounding
    return (agree | _without_score(stats)) & stats.has_own_values[:, None]


def is_informative(stats: Statistics) -> Tensor:
    """Where the values of most rows are precise enough to show a kink, (B,); false for a large f(x) in float32."""
    value, slope, rounding = _parts(stats)
    precise = (rounding <= INFORMATIVE * (value.abs() + slope.abs())) | _without_score(stats)
    return precise.double().mean(1) > 0.5


def shows_no_kink(stats: Statistics) -> Tensor:
    """Where all rows but a few may be those of a quadratic function: the operations have to be checked, (B,)."""
    if not bool(stats.has_own_values.any()):
        return stats.has_own_values
    others = (~rows_of_quadratic(stats, NEARLY_QUADRATIC)).sum(1)
    return ((others < FEW_ROWS) | ~is_informative(stats)) & stats.has_own_values


def _parts(stats: Statistics) -> tuple[Tensor, Tensor, Tensor]:
    """w f and k α/2 of each row, and the rounding error of the former, (B, P) each."""
    head = stats.head
    # values at x ± δ are as large as f(x) plus the linear part, whose standard deviation is |γ(0)|
    size = stats.value.double().abs() + torch.linalg.vector_norm(stats.gradient.double(), dim=1)
    rounding = ROUNDING * torch.finfo(head.odd.dtype).eps * head.weight.double() * size[:, None]
    slope = head.along.double() * stats.rank / 2
    if stats.design == "orthogonal" and stats.rank <= SMALL:  # twice the score, and w = 2/(1 + R²/k)
        slope = slope * (1 - head.weight.double() / 2)
    return head.value_even.double(), slope, rounding


def _without_score(stats: Statistics) -> Tensor:
    return (stats.head.score == 0).all(-1)
