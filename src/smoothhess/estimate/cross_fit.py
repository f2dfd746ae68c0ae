"""Rows of an incomplete block from which a fitted linear field is subtracted.

Below one block the unbiased estimate has a large error from directions that no row has. The denoised estimate predicts
much of what is there. The rows of the block are divided into folds, and D_f is the denoised estimate, made traceless,
of all rows outside of fold f; beyond half a block it is multiplied by 2(1 − m/k). With D̄ the mean of the D_f, weighted
by the number of rows m_f,

    γ′_i = γ_i − [(1 − m/k) D_f + (m/k) D̄] z_i   for row i of fold f, and D̄ added to the mean over the rows,

is unbiased for every function, although the rows of a block depend on each other: given the rows outside of the fold,
the directions of the fold are uniformly distributed in the orthogonal complement, whose dimension is k − m + m_f.
docs/theory.md has the proof. The part of γ that is not linear in z is not reduced.

The rows γ′ depend on themselves through D̄, so their antisymmetric half is too small. The variance is that of `noise`,
the same rows with more of D_f and less of D̄.

The fit is computed by `fit_rows`; a `Noise` that is given one uses the fitted rows for the Hessian alone. Results do
not use it: the estimate is unbiased and has less variance, but in directions in which a Hessian of low rank is zero
its variance is underestimated, see docs/benchmarks/coverage.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from smoothhess.linalg.low_rank import Known


@dataclass(frozen=True, eq=False)
class CrossFit:
    """The fitted rows of B examples, and what is added to their mean; examples without a fit have their own rows."""

    odd: Tensor  # (B, P, k) γ′
    noise: Tensor  # (B, P, k) rows from which the variance is estimated
    along: Tensor  # (B, P) as in `Rows`, of γ′
    across: Tensor  # (B, P)
    added: Known  # D̄ without the multiple of the identity
    constant: Tensor  # (B,) that multiple, float64
    skew: Tensor | None = None  # (B, rank, K + PROBES) group sums only: the antisymmetric half of γ′

    def map(self, linear: Callable[[Tensor], Tensor]) -> CrossFit:
        """Apply a linear map of rows."""
        added = self.added.map(linear)
        rank, size = added.core.shape[-1], linear(self.odd[:1, :1]).shape[-1]
        added = Known(added.dense()) if size < rank else added
        return replace(self, odd=linear(self.odd), noise=linear(self.noise), added=added)

    def select(self, index: Tensor, rows: int) -> CrossFit:
        """The examples at `index`, which have at most `rows` rows."""
        skew = None if self.skew is None else self.skew[index]
        odd, noise, along, across = (t[index, :rows] for t in (self.odd, self.noise, self.along, self.across))
        return CrossFit(odd, noise, along, across, self.added.select(index), self.constant[index], skew)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name; the inverse of `from_tensors`."""
        own = {f.name: getattr(self, f.name) for f in fields(self)} | {"added": self.added.dense()}
        return {f"fit.{name}": t for name, t in own.items() if t is not None}

    @staticmethod
    def from_tensors(tensors: dict[str, Tensor]) -> CrossFit | None:
        """From all tensors of some statistics; removes its own."""
        found = {f.name: tensors.pop(f"fit.{f.name}", None) for f in fields(CrossFit)}
        skew = found.pop("skew")
        given = {name: t for name, t in found.items() if t is not None}
        if len(given) < len(found):
            return None
        added = Known(given.pop("added"))
        return CrossFit(**given, added=added, skew=skew)

    @staticmethod
    def cat(parts: Sequence[CrossFit], rows: int) -> CrossFit:
        """Concatenate the examples, padded to `rows` rows."""
        padded = [[_padded(t, rows) for t in (p.odd, p.noise, p.along, p.across)] for p in parts]
        odd, noise, along, across = (torch.cat(tensors) for tensors in zip(*padded, strict=True))
        skews = [p.skew for p in parts if p.skew is not None]
        skew = torch.cat(skews) if len(skews) == len(parts) else None
        constant = torch.cat([p.constant for p in parts])
        return CrossFit(odd, noise, along, across, Known.cat([p.added for p in parts]), constant, skew)


def _padded(rows: Tensor, count: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(len(rows), count - rows.shape[1], *rows.shape[2:])], 1)
