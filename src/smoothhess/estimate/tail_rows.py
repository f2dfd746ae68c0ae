"""What was sampled in tail strata: its part of the estimates.

Rows of the design inside the strata (`smoothhess.draws.tail_strata`) are set to zero, and the mean over couples of
draws from the strata is added: to the Hessian with the expectation of the control variate (`Statistics.known`), to
gradient and value from here. The first KEPT couples are stored; the variance is estimated from them in `tail_variance`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smoothhess.draws.tail_strata import NEVER, TailStrata

KEPT = 256  # couples that are stored


@dataclass(frozen=True, eq=False)
class TailRows:
    """The couples of B examples; those without strata have no couples, and zeros elsewhere."""

    strata: TailStrata  # in whitened coordinates
    score: Tensor  # (B, c, 2, k) z times the weight of the draw
    odd: Tensor  # (B, c, 2, k)
    even: Tensor  # (B, c, k) mean over the couple, with weights
    value: Tensor  # (B, c) likewise
    n: Tensor  # (B,) number of couples
    square: Tensor  # (B,) Σω²; float64
    even_mean: Tensor  # (B, k) that is added to the gradient, float64
    value_mean: Tensor  # (B,) that is added to the value, float64

    @staticmethod
    def none(strata: TailStrata, gradient: Tensor) -> TailRows:
        """No couples yet, of examples with gradients (B, k) in the coordinates of the statistics."""
        count, k = gradient.shape
        zero = torch.zeros(count, dtype=torch.float64, device=gradient.device)
        rows = gradient.new_zeros(count, 0, 2, k)
        even = torch.zeros_like(gradient, dtype=torch.float64)
        return TailRows(strata, rows, rows, rows[:, :, 0], rows[:, :, 0, 0], zero.long(), zero, even, zero)

    @staticmethod
    def of(strata: TailStrata, score: Tensor, odd: Tensor, even: Tensor, value: Tensor) -> TailRows:
        """Couples (B, c, 2, k), (B, c, k) and (B, c) of examples that all have strata."""
        count = torch.full((len(odd),), odd.shape[1], device=odd.device)
        return TailRows(
            strata,
            score[:, :KEPT],
            odd[:, :KEPT],
            even[:, :KEPT],
            value[:, :KEPT],
            n=count,
            square=1 / count.double(),
            even_mean=even.mean(1, dtype=torch.float64),
            value_mean=value.mean(1, dtype=torch.float64),
        )

    def among(self, index: Tensor, strata: TailStrata) -> TailRows:
        """As the examples at `index` of more examples, which have `strata`."""
        full = {
            name: (t := getattr(self, name)).new_zeros(len(strata.margin), *t.shape[1:]).index_copy(0, index, t)
            for name in _NAMES
        }
        return TailRows(strata, **full)

    def with_couples(self, before: Tensor, new: TailRows, added: int) -> TailRows:
        """With the `new` couples, which go with `added` rows after the first `before` rows (B,) of the design."""
        share = before / (before + added)
        return self._mean(new, share, 1 - share)

    def _mean(self, other: TailRows, own: Tensor, others: Tensor) -> TailRows:
        """The mean with weights `own` and `others`, (B,) each."""
        grown = {}
        for name in ("score", "odd", "even", "value"):
            grown[name] = _appended(getattr(self, name), self.kept, getattr(other, name), other.kept)
        return replace(
            self,
            **grown,
            n=self.n + other.n,
            square=own.square() * self.square + others.square() * other.square,
            even_mean=own[:, None] * self.even_mean + others[:, None] * other.even_mean,
            value_mean=own * self.value_mean + others * other.value_mean,
        )

    @property
    def kept(self) -> Tensor:
        """Number of stored couples, (B,)."""
        return self.n.clamp_max(KEPT)

    def map(self, linear: Callable[[Tensor], Tensor]) -> TailRows:
        """In other coordinates."""
        score, odd = (linear(t.flatten(1, 2)).unflatten(1, t.shape[1:3]) for t in (self.score, self.odd))
        mean = linear(self.even_mean.to(self.even)).double()
        return replace(self, score=score, odd=odd, even=linear(self.even), even_mean=mean)

    def select(self, index: Tensor) -> TailRows:
        """The examples at `index`."""
        most = int(self.kept[index].max()) if len(index) else 0
        cut = {name: getattr(self, name)[index, :most] for name in ("score", "odd", "even", "value")}
        own = {name: getattr(self, name)[index] for name in ("n", "square", "even_mean", "value_mean")}
        return TailRows(self.strata.select(index), **cut, **own)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name; the inverse of `from_tensors`."""
        own = {f"tails.{name}": getattr(self, name) for name in _NAMES}
        return own | {"tails.direction": self.strata.direction, "tails.margin": self.strata.margin}

    @staticmethod
    def from_tensors(tensors: dict[str, Tensor]) -> TailRows | None:
        """From all tensors of some statistics; removes its own."""
        found = {name: tensors.pop(f"tails.{name}", None) for name in (*_NAMES, "direction", "margin")}
        given = {name: t for name, t in found.items() if t is not None}
        if len(given) < len(found):
            return None
        return TailRows(TailStrata(given.pop("direction"), given.pop("margin")), **given)

    @staticmethod
    def cat(parts: Sequence[TailRows | None], sizes: Sequence[int]) -> TailRows | None:
        """Concatenate; None stands for examples, `sizes` of them, without strata."""
        like = next((p for p in parts if p is not None), None)
        if like is None:
            return None
        filled = [like._nothing(n) if p is None else p for p, n in zip(parts, sizes, strict=True)]
        couples, strata = (
            max(dims) for dims in zip(*((p.odd.shape[1], p.strata.margin.shape[1]) for p in filled), strict=True)
        )
        joined = {
            name: torch.cat(
                [_padded(getattr(p, name), couples) if name in _STORED else getattr(p, name) for p in filled]
            )
            for name in _NAMES
        }
        direction = torch.cat([_padded(p.strata.direction, strata) for p in filled])
        margin = torch.cat([_padded(p.strata.margin, strata, NEVER) for p in filled])
        return TailRows(TailStrata(direction, margin), **joined)

    @staticmethod
    def merged(a: TailRows | None, n_a: Tensor, b: TailRows | None, n_b: Tensor) -> TailRows | None:
        """Of the mean over n_a rows of one run and n_b rows of another, (B,) each, of which one may have no strata.

        Strata are those of the first. If they differ, the scatter of all couples is larger than that of each run.
        """
        like = b if a is None else a
        if like is None:
            return None
        share, nothing = n_a / (n_a + n_b).clamp_min(1), like._nothing(len(like.n))
        first, second = (nothing if part is None else part for part in (a, b))
        return replace(first._mean(second, share, 1 - share), strata=like.strata)

    @staticmethod
    def difference(a: TailRows | None, b: TailRows | None) -> TailRows | None:
        """Of a − b: variances are added, as those of independent couples."""
        like = b if a is None else a
        if like is None:
            return None
        first, second = (like._nothing(len(like.n)) if part is None else part for part in (a, b))
        one = torch.ones_like(like.square)
        even, value = first.even_mean - second.even_mean, first.value_mean - second.value_mean
        return replace(first._mean(second, one, one), strata=like.strata, even_mean=even, value_mean=value)

    def scaled(self, score: float, odd: float, even: float) -> TailRows:
        """With rows in other units."""
        return replace(
            self, score=self.score * score, odd=self.odd * odd, even=self.even * even, even_mean=self.even_mean * even
        )

    def _nothing(self, count: int) -> TailRows:
        own = {name: (t := getattr(self, name)).new_zeros(count, *t.shape[1:]) for name in _NAMES}
        direction, margin = self.strata.direction, self.strata.margin
        none = TailStrata(
            direction.new_zeros(count, *direction.shape[1:]), margin.new_full((count, margin.shape[1]), NEVER)
        )
        return TailRows(none, **own)

    def first_half_change(self, share: Tensor) -> tuple[Tensor, Tensor]:
        """Rows S and G, (B, r, k) each, of the change if only the first `share` (B,) of the couples is used.

        sym SᵀG is the difference of both means. It is zero if not all couples are stored.
        """
        kept = self.kept
        first = (share * kept).round().clamp_min(1)
        index = torch.arange(self.odd.shape[1], device=kept.device)
        inside = (index < first[:, None]) / first[:, None] - (index < kept[:, None]) / kept.clamp_min(1)[:, None]
        inside = inside * (kept == self.n)[:, None] / 2
        return (self.score * inside[..., None, None].to(self.score)).flatten(1, 2), self.odd.flatten(1, 2)


def _appended(a: Tensor, kept_a: Tensor, b: Tensor, kept_b: Tensor) -> Tensor:
    """The stored couples of a and then of b, KEPT at most, where examples may have different numbers of them."""
    most = min(int((kept_a + kept_b).max()), KEPT)
    found = _padded(a[:, :most], most).clone()
    for example, (before, new) in enumerate(zip(kept_a.tolist(), kept_b.tolist(), strict=True)):
        after = min(before + new, most)
        found[example, before:after] = b[example, : after - before]
    return found


def _padded(t: Tensor, size: int, value: float = 0.0) -> Tensor:
    """With `size` entries along dimension 1."""
    return torch.cat([t, t.new_full((t.shape[0], size - t.shape[1], *t.shape[2:]), value)], 1)


_STORED = ("score", "odd", "even", "value")
_NAMES = (*_STORED, "n", "square", "even_mean", "value_mean")
