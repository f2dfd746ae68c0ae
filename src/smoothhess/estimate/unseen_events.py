"""Errors that no sampled row shows: events that are too rare, and the rounding of gradients.

Where no row shows a kink, the scatter of the rows says nothing about one. This module says for which examples the error
is therefore unknown, and bounds the variance of the others from below. Rare events in the residual of a control variate
are in `control_errors`, the variance that the rows do show is in `pooled_variance`; which operations of a model have
kinks is found in `curvature.unknown_operations`.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from smoothhess.draws.designs import SMALL
from smoothhess.estimate.incomplete_blocks import Gram
from smoothhess.estimate.pooled_variance import PooledVariance
from smoothhess.estimate.quadratic_rows import NEARLY_QUADRATIC, is_informative, is_quadratic
from smoothhess.estimate.statistics import UNDERFLOW, unmoved
from smoothhess.estimate.unbiased_hessian import mean_energy

GRADIENT_ROUNDING = 16  # assumed rounding error of a gradient, in units in the last place
EXACT_ROWS = 1e-10  # share of the noise in the energy of the rows below which they agree with a quadratic function


class UnseenEvents:
    """Variance of an estimate from rounding and from events that no row contains.

    `shown` holds the variances that the rows show. `no_kinks` (B,) marks examples of which no draw can cross a kink;
    None: of none this is known.
    """

    def __init__(self, shown: PooledVariance, no_kinks: Tensor | None) -> None:
        self.shown, self.estimate, self.stats, self.no_kinks = shown, shown.estimate, shown.stats, no_kinks

    @cached_property
    def unmoved(self) -> Tensor:
        """Where the sampled gradients did not vary, (B,); further draws may still cross a kink."""
        return unmoved(self.stats)

    @cached_property
    def agrees_with_quadratic(self) -> Tensor:
        """Where the rows are those of a quadratic function, by their values or for lack of noise, (B,)."""
        own = self.stats.has_own_values
        if not bool(own.any()):
            return own
        informative = is_informative(self.stats)
        found = is_quadratic(self.stats) & informative
        nearly = (is_quadratic(self.stats, NEARLY_QUADRATIC) | ~informative) & own & ~found
        if not bool(nearly.any()) or self.shown.prior is None or self.stats.rank <= SMALL:
            return found
        rounding = 4 * self.stats.rank * self.stats.n.square() * self.rounding
        exact = self.stats.n * self.shown.prior.trace <= EXACT_ROWS * self._energy + rounding
        return found | (exact & nearly)  # values of float32 are less precise than differences of gradients

    @cached_property
    def exact(self) -> Tensor:
        """Where the estimate has no error, (B,): the gradient is constant, and no draw can cross a kink.

        A gradient that varies equally on both sides of the input, such as that of x³ at zero, is not constant: far
        away it may vary otherwise.
        """
        if self.no_kinks is None:
            return torch.zeros_like(self.unmoved)
        still = (self.stats.head.even.abs() <= UNDERFLOW).flatten(1).all(1)
        found = self.unmoved & self.no_kinks & still
        return found if self.stats.tails is None else found & (self.stats.tails.n == 0)

    @cached_property
    def unknown(self) -> Tensor:
        """Where the error is unknown, (B,): no sampled gradient shows a kink, but the operations may have some."""
        found = (self.unmoved | self.agrees_with_quadratic) & self.stats.is_uncontrolled
        if self.stats.rare is not None:  # the variance from kinks that no row shows is known
            found = found & ~self.stats.rare.complete
        if self.no_kinks is None:
            return found
        return found & torch.where(self.unmoved, ~self.exact, ~self.no_kinks)

    @cached_property
    def _energy(self) -> Tensor:
        """Mean of |γ|² over the rows, whitened, (B,)."""
        return mean_energy(self.stats, self.stats.head.along.double())

    @cached_property
    def rounding(self) -> Tensor:
        """Variance of uᵀĤv of whitened unit vectors from the rounding of gradients, (B,)."""
        lengths = self.estimate.identity.diagonal
        own = self.stats.gradient.double().square() / lengths.clamp_min(1e-300)
        own = torch.where(lengths > 0, own, 0.0).sum(1)  # |γ(0)|²; for groups a sum over their own directions
        if self.shown.white is not None and self.shown.white.known is not None:  # the closed form is rounded too
            own = own + self.shown.white.known.squared_norm
        eps = GRADIENT_ROUNDING * torch.finfo(self.stats.gradient.dtype).eps
        return eps**2 * (own + self._energy) / (2 * self.stats.rank * self.stats.n.clamp_min(1))

    @cached_property
    def rare(self) -> Tensor:
        """Variance of uᵀĤv of whitened unit vectors from an event with probability 1/n that no row contains, (B,).

        The size of the event is the average noise of a direction. This is about 1/n of the variance of directions along
        which gradients changed, and the whole variance of the others.
        """
        stats, n = self.stats, self.stats.n.clamp_min(1)
        prior = self.shown.prior
        noise = self.estimate.energy / n if prior is None else prior.trace
        return torch.where(stats.is_uncontrolled, noise / (2 * stats.rank * n), 0.0)

    def bounded(self, variance: Tensor, gram: Gram) -> Tensor:
        """Var(uᵀĤv), bounded below by rare events, with that of rounding; NaN where it is unknown."""
        shape = (-1, *[1] * (variance.ndim - 1))
        both = torch.addcmul(gram.mixed.square(), gram.left, gram.right)
        variance = torch.maximum(variance, self.rare.reshape(shape) * both).addcmul(self.rounding.reshape(shape), both)
        if bool(self.exact.any()):
            variance = torch.where(self.exact.reshape(shape), 0.0, variance)
        return torch.where(self.unknown.reshape(shape), torch.nan, variance) if bool(self.unknown.any()) else variance
