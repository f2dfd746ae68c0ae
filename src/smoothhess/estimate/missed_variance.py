"""Variance that the scatter of the rows does not show: control variates, neurons that few rows flip, and rounding.

It adds up `control_errors` and `rare_flip_variance` for each quantity. Rare events of which nothing is known are in
`unseen_events`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from smoothhess.estimate.control_errors import ControlErrors
from smoothhess.estimate.incomplete_blocks import Gram
from smoothhess.estimate.rare_flip_variance import RareFlipVariance
from smoothhess.estimate.tail_variance import TailVariance
from smoothhess.estimate.unbiased_hessian import Identity

VALUE_ROUNDING = 4  # assumed rounding error of a value, in units in the last place


class MissedVariance:
    """Sum of both variances for one result."""

    def __init__(self, control: ControlErrors, flips: RareFlipVariance, identity: Identity) -> None:
        self.control, self.flips, self.identity = control, flips, identity
        self.features, tails = control.features, control.features.tails
        self.tails = None if tails is None else TailVariance(tails)

    def of_form(
        self, gram: Gram, left: Callable[[Tensor], Tensor], right: Callable[[Tensor], Tensor]
    ) -> Tensor | float:
        """Of uᵀĤv; `left` and `right` map directions (B, m, d) to their products with u and v."""
        found = self.control.missed(gram.left, gram.right)
        if self.tails is not None:
            found = found + self.tails.of_form(left, right)
        if self.flips.is_zero:
            return found
        w = self.flips.directions
        return found + self.flips.of_form(gram, left(w), right(w))

    @cached_property
    def of_frobenius(self) -> Tensor | float:
        """The sum over all entries, with the bias of a control variate, (B,)."""
        found = self.control.of_drift + self.control.of_unseen
        if self.tails is not None:
            found = found + self.tails.of_frobenius
        if self.flips.is_zero:
            return found
        w = self.flips.directions
        gram = (self.identity.product(w.to(self.features.gradient)).double() * w).sum(-1)
        return found + self.flips.of_frobenius(gram, self.identity.diagonal.sum(-1))

    def of_gradient(self) -> Tensor | float:
        """Of the smoothed gradient, (B, d)."""
        found = self.flips.of_gradient()
        if self.tails is not None:
            found = found + self.tails.of_gradient()
        if self.control.unseen is None:
            return found
        event = self.control.unseen / self.features.rank**2  # of average size, with probability 1/n
        return found + event[:, None] * self.identity.diagonal

    def of_value(self) -> Tensor:
        """Of the smoothed value, (B,)."""
        precision = VALUE_ROUNDING * torch.finfo(self.features.gradient.dtype).eps
        found = self.flips.of_value() + (precision * self.features.value.double()).square()
        if self.tails is not None:
            found = found + self.tails.of_value()
        return found if self.control.unseen is None else found + self.control.unseen / self.features.rank
