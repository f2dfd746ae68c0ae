"""What was sampled in tail strata: its part of the estimates.

Rows of the design inside the strata (`smoothhess.draws.tail_strata`) are set to zero, and the mean over couples of
draws from the strata is added to the Hessian, the gradient and the value. All couples have the same weight in these
means. Some are stored; the variance is estimated from them in `tail_variance`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smoothhess.draws.tail_strata import NEVER, TailStrata

STORED, LEAST_STORED = 2**18, 256  # numbers of a tensor of couples that are stored, and the least number of couples


@dataclass(frozen=True, eq=False)
class TailRows:
    """The couples of B examples; those without strata have no couples, and zeros elsewhere."""

    strata: TailStrata  # in whitened coordinates
    score: Tensor  # (B, c, 2, k) z times the weight of the draw
    odd: Tensor  # (B, c, 2, k)
    even: Tensor  # (B, c, k) mean over the couple, with weights
    value: Tensor  # (B, c) likewise
    n: Tensor  # (B,) number of couples
    stored: Tensor  # (B,) number of couples that are stored
    share: Tensor  # (B,) share of the rows that are zero inside the strata; below 1 after a merge with other runs
    hessian: Tensor  # (B, k, k) mean of the symmetric part of s γᵀ over all couples, float64
    even_mean: Tensor  # (B, k) float64
    value_mean: Tensor  # (B,) float64

    @staticmethod
    def none(strata: TailStrata, gradient: Tensor) -> TailRows:
        """No couples yet, of examples with gradients (B, k) in the coordinates of the statistics."""
        count, k = gradient.shape
        zero = torch.zeros(count, dtype=torch.float64, device=gradient.device)
        rows, even = gradient.new_zeros(count, 0, 2, k), torch.zeros_like(gradient, dtype=torch.float64)
        return TailRows(
            strata,
            score=rows,
            odd=rows,
            even=rows[:, :, 0],
            value=rows[:, :, 0, 0],
            n=zero.long(),
            stored=zero.long(),
            share=torch.ones_like(zero),
            hessian=even.new_zeros(count, k, k),
            even_mean=even,
            value_mean=zero,
        )

    @staticmethod
    def of(strata: TailStrata, score: Tensor, odd: Tensor, even: Tensor, value: Tensor) -> TailRows:
        """Couples (B, c, 2, k), (B, c, k) and (B, c) of examples that all have strata."""
        batch, couples, k = len(odd), odd.shape[1], odd.shape[-1]
        kept = min(couples, most_stored(k))
        product = score.flatten(1, 2).double().mT @ odd.flatten(1, 2).double() / (2 * couples)
        count = torch.full((batch,), couples, device=odd.device)
        return TailRows(
            strata,
            score=score[:, :kept],
            odd=odd[:, :kept],
            even=even[:, :kept],
            value=value[:, :kept],
            n=count,
            stored=torch.full_like(count, kept),
            share=torch.ones_like(count, dtype=torch.float64),
            hessian=(product + product.mT) / 2,
            even_mean=even.mean(1, dtype=torch.float64),
            value_mean=value.mean(1, dtype=torch.float64),
        )

    def among(self, index: Tensor, strata: TailStrata) -> TailRows:
        """As the examples at `index` of more examples, which have `strata`."""
        full = {
            name: (t := getattr(self, name)).new_zeros(len(strata.margin), *t.shape[1:]).index_copy(0, index, t)
            for name in _NAMES
        }
        return TailRows(strata, **{**full, "share": torch.ones_like(full["share"])})

    def with_couples(self, new: TailRows) -> TailRows:
        """With further couples from the same strata."""
        total = (self.n + new.n).clamp_min(1)
        means = {}
        for name in ("hessian", "even_mean", "value_mean"):
            mine, other = getattr(self, name), getattr(new, name)
            shape = (-1, *[1] * (mine.ndim - 1))
            means[name] = (self.n.reshape(shape) * mine + new.n.reshape(shape) * other) / total.reshape(shape)
        most = most_stored(self.odd.shape[-1])
        room = torch.minimum(self.stored + new.stored, torch.full_like(self.n, most))
        first = torch.where(self.stored + new.stored <= most, self.stored, (room * self.n / total).long())
        first = torch.maximum(torch.minimum(first, self.stored), room - new.stored)
        rows = {name: _appended(getattr(self, name), first, getattr(new, name), room) for name in _ROWS}
        return replace(self, **rows, **means, n=self.n + new.n, stored=room)

    def weighted(self, factor: Tensor) -> TailRows:
        """With all contributions times `factor`, (B,)."""

        def times(t: Tensor) -> Tensor:
            return t * factor.reshape(-1, *[1] * (t.ndim - 1)).to(t)

        names = ("score", "even", "value", "hessian", "even_mean", "value_mean")
        return replace(self, **{name: times(getattr(self, name)) for name in names})

    def map(self, linear: Callable[[Tensor], Tensor]) -> TailRows:
        """In other coordinates."""
        score, odd = (linear(t.flatten(1, 2)).unflatten(1, t.shape[1:3]) for t in (self.score, self.odd))
        hessian = linear(linear(self.hessian.to(self.even)).mT).mT.double()
        mean = linear(self.even_mean[:, None].to(self.even))[:, 0].double()
        return replace(self, score=score, odd=odd, even=linear(self.even), hessian=hessian, even_mean=mean)

    def select(self, index: Tensor) -> TailRows:
        """The examples at `index`."""
        most = int(self.stored[index].max()) if len(index) else 0
        own = {name: getattr(self, name)[index] for name in _NAMES}
        return TailRows(self.strata.select(index), **{**own, **{name: own[name][:, :most] for name in _ROWS}})

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
        couples = max(p.odd.shape[1] for p in filled)
        number = max(p.strata.margin.shape[1] for p in filled)
        joined = {
            name: torch.cat([_padded(getattr(p, name), couples) if name in _ROWS else getattr(p, name) for p in filled])
            for name in _NAMES
        }
        direction = torch.cat([_padded(p.strata.direction, number) for p in filled])
        margin = torch.cat([_padded(p.strata.margin, number, NEVER) for p in filled])
        return TailRows(TailStrata(direction, margin), **joined)

    @staticmethod
    def merged(a: TailRows | None, n_a: Tensor, b: TailRows | None, n_b: Tensor) -> TailRows | None:
        """Of the mean over n_a rows of one run and n_b rows of another, (B,) each, of which one may have no strata."""
        share = n_a.double() / (n_a + n_b).clamp_min(1)
        if a is None or b is None:
            only, weight = (b, 1 - share) if a is None else (a, share)
            return None if only is None else replace(only.weighted(weight), share=only.share * weight)
        same = a.strata.same_as(b.strata)
        if same and bool(((a.share == 1) & (b.share == 1)).all()):
            return a.with_couples(b)
        total = (a.n + b.n).double().clamp_min(1)  # the weights of all couples become equal
        first, second = (p.weighted(w * total / p.n.clamp_min(1)) for p, w in ((a, share), (b, 1 - share)))
        both = share * a.share + (1 - share) * b.share
        if same:
            return replace(first.with_couples(second), share=both)
        # rows of one run count inside the strata of the other
        return replace(first.with_couples(second), strata=a.strata.plus(b.strata), share=both / 2)

    def _nothing(self, count: int) -> TailRows:
        own = {name: (t := getattr(self, name)).new_zeros(count, *t.shape[1:]) for name in _NAMES}
        direction, margin = self.strata.direction, self.strata.margin
        none = TailStrata(
            direction.new_zeros(count, *direction.shape[1:]), margin.new_full((count, margin.shape[1]), NEVER)
        )
        return TailRows(none, **own)

    def first_half_change(self, share: Tensor) -> tuple[Tensor, Tensor]:
        """Rows S and G, (B, r, k) each, of the change if only the first `share` (B,) of the couples is used.

        sym SᵀG is the difference of both means, if all couples are stored.
        """
        first = (share * self.stored).round().clamp_min(1)
        index = torch.arange(self.odd.shape[1], device=first.device)
        inside = (index < first[:, None]) / first[:, None]
        inside = inside - (index < self.stored[:, None]) / self.stored.clamp_min(1)[:, None]
        return (self.score * (inside / 2)[..., None, None].to(self.score)).flatten(1, 2), self.odd.flatten(1, 2)


def most_stored(k: int) -> int:
    """Number of couples of k coordinates that are stored."""
    return max(LEAST_STORED, STORED // k)


def _appended(a: Tensor, kept: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """The first `kept` (B,) couples of a and then those of b, `total` (B,) in all."""
    most = int(total.max())
    found = _padded(a[:, :most], most).clone()
    for example, (before, after) in enumerate(zip(kept.tolist(), total.tolist(), strict=True)):
        found[example, before:after] = b[example, : after - before]
        found[example, after:] = 0
    return found


def _padded(t: Tensor, size: int, value: float = 0.0) -> Tensor:
    """With at least `size` entries along dimension 1."""
    missing = max(size - t.shape[1], 0)
    return torch.cat([t, t.new_full((t.shape[0], missing, *t.shape[2:]), value)], 1)


_ROWS = ("score", "odd", "even", "value")
_NAMES = (*_ROWS, "n", "stored", "share", "hessian", "even_mean", "value_mean")
