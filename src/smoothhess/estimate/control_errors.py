"""Errors that a control variate adds to the variance: a biased expectation, and rare events in its residual.

The expectation is biased where τ is estimated from random directions (`tau_probes`); the residual may be zero in all
sampled rows, because the events that the control variate does not model are rare. Without a control variate all of this
is zero. The control variate itself is in `curvature.control_variate`.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from smoothhess.draws.gaussian import Gaussian
from smoothhess.estimate.incomplete_blocks import Gram
from smoothhess.estimate.statistics import Statistics

SEEN, NOTHING = 8, 1e-10  # rows with a nonzero residual after which it is not rare, and the share that counts as zero


class ControlErrors:
    """Squared errors of one result that its control variate adds.

    `white` holds the whitened statistics (None for group sums), `features` those in the coordinates of the features.
    """

    def __init__(self, white: Statistics | None, features: Statistics, gaussian: Gaussian) -> None:
        self.white, self.features, self.gaussian = white, features, gaussian

    def drift(self, left: Tensor, right: Tensor, gram: Gram) -> Tensor | float:
        """(uᵀDv)² from |Du|² and |Dv|², with D the bias of the control variate's expectation.

        D is a sum of terms e_k j_k j_kᵀ over the neurons. If one of them dominates, (uᵀDv)² = |Du|²|Dv|²/‖D‖²; if there
        are many with directions like those of Gaussian vectors, it has this mean for orthogonal directions, and 3 times
        as much for parallel ones: E[(j·u)²(j·v)²] = |u|²|v|² + 2(u·v)². Further draws do not reduce it.
        """
        norm2 = self.features.drift_norm2
        if norm2 is None:
            return 0.0
        cosine2 = gram.mixed.square() / (gram.left * gram.right).clamp_min(1e-300)
        norm2 = norm2.reshape(-1, *[1] * (torch.broadcast_tensors(left, right)[0].ndim - 1)).clamp_min(1e-300)
        return left * right / norm2 * (1 + 2 * cosine2)

    @cached_property
    def drifting(self) -> Tensor:
        """|D q_i|² for every feature, (B, d)."""
        drift = self.features.drift
        if drift is None:
            return self.features.gradient.new_zeros(1, self.features.k, dtype=torch.float64)
        return drift.double().square().mean(1)

    @cached_property
    def unseen(self) -> Tensor | None:
        """Squared error from rare events that no row contains, whitened ‖·‖²_F, (B,); None without a control variate.

        The residual of a control variate can be zero in all sampled rows, because the events that it does not model are
        rare. Until SEEN rows have a nonzero residual, an event of average size with probability 1/n is assumed.
        """
        stats = self.features if self.white is None else self.white
        if stats.known is None or (self.white is None and stats.gram is None):
            return None
        head = stats.head if self.white is None else self.white.without_computed_flips.head
        usual = head.energy.double().sum(1) / stats.n_head.clamp_min(1) * self._whitening
        if self.white is not None:  # the mean of z g̃ᵀ bounds the size of g̃
            usual = torch.maximum(usual, stats.known.squared_norm)
        least = NOTHING * usual * (1.0 if self.white is not None else self.lengths.sum(-1) / stats.rank)
        seen = (stats.head.odd.double().square().sum(-1) > least[:, None]).sum(1)
        doubt = torch.where(stats.known.is_zero, 0.0, (1 - seen / SEEN).clamp_min(0))
        if stats.rare is not None:  # single flips are all that there is, and they are subtracted
            doubt = torch.where(stats.rare.complete, 0.0, doubt)
        return doubt * stats.rank * usual / stats.n.clamp_min(1).square()

    @cached_property
    def _whitening(self) -> Tensor:
        """|Lᵀg|² over |g|² of the sampled gradients, (B,); for group sums, with equal shares of all dimensions."""
        p = self.gaussian.precisions(self.gaussian.dimension or self.features.rank).double()
        alike = (len(p) / p.sum()).to(self.features.n.device).expand(len(self.features))
        if self.white is None or bool((p == p[0]).all()):
            return alike
        known, rows = self.white.known, [self.white.head.even, self.white.head.odd]
        if known is not None:  # K z has the mean square ‖K‖²_F
            root = self.white.n_head.clamp_min(1).to(rows[0])[:, None, None].sqrt()
            if known.factor is None:
                rows.append(root * known.core.to(rows[0]))
            else:
                factor = known.factor.to(rows[0])
                half = torch.linalg.cholesky_ex(factor @ factor.mT).L.mT
                rows.append(root * (half @ known.core.to(factor) @ factor))
        white, plain = (
            torch.stack([r.double().square().sum((-1, -2)) for r in some]).sum(0)
            for some in (rows, [self.gaussian.push(r) for r in rows])
        )
        return torch.where(plain > 0, white / plain.clamp_min(1e-300), alike)

    @cached_property
    def lengths(self) -> Tensor:
        """|q_i|² for every feature or group, (1 or B, d)."""
        if self.white is None:
            assert self.features.gram is not None
            return self.features.gram.diagonal(dim1=-2, dim2=-1).double()
        return self.gaussian.precision_diagonal(self.features.k).double().to(self.features.n.device)[None]

    def missed(self, left: Tensor, right: Tensor) -> Tensor | float:
        """The part of `unseen` in uᵀHv, from |q_u|² and |q_v|²: it is spread evenly over all pairs of dimensions."""
        if self.unseen is None:
            return 0.0
        unseen = self.unseen.reshape(-1, *[1] * (torch.broadcast_tensors(left, right)[0].ndim - 1))
        return unseen / self.features.rank**2 * left * right

    @cached_property
    def of_unseen(self) -> Tensor | float:
        """Squared error of the matrix from rare events, in feature coordinates, (B,)."""
        if self.unseen is None:
            return 0.0
        total = self.lengths.sum(-1)
        return self.missed(total, total)

    @cached_property
    def of_drift(self) -> Tensor | float:
        """‖D‖²_F in feature coordinates, with D the bias of the control variate's expectation, (B,)."""
        if self.features.drift_norm2 is None:
            return 0.0
        return self.drifting.sum(-1).square() / self.features.drift_norm2.clamp_min(1e-300)
