"""Statistics: the sufficient sums and rows that are kept of the sampled draws and gradients.

Each row of a design gives a score s, a weight w, and the odd and even parts of the whitened gradient,

    odd  = (γ(z) − γ(−z))/2,   even = w ((γ(z) + γ(−z))/2 − γ(0))      mirrored designs
    odd  = γ(z),               even = w (γ(z) − γ(0))                  others

and the estimates are means over rows:   W = sym E[s oddᵀ]   (Eq. 8),   Γ = γ(0) + E[even].

The first rows, the *head*, are stored: the variance of any linear function of W is estimated from them. While the head
holds all rows, it is also the factored form of W, with O(n k) numbers; beyond it the sum Σ s oddᵀ is kept too, O(k²).

This module extends, merges, concatenates and converts statistics. Estimates from them are in `unbiased_hessian` and
`shrinkage`, variances in `variance`; the rows are evaluated in `smoothhess.explainers.sampler`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smoothhess.curvature.rare_flips import RareFlips
from smoothhess.draws.designs import SMALL, find_design
from smoothhess.estimate.stein_check import MOMENTS
from smoothhess.estimate.tail_rows import TailRows
from smoothhess.linalg.gram import Grams
from smoothhess.linalg.low_rank import Known, mean

ESTIMATOR_VERSION = 6  # increased whenever the same draws give other numbers; versions are never merged
HEAD_LEAST = 1024  # rows of the head,
HEAD_FACTOR = 4  # or this many times k, if that is more
PROBES = 16  # random directions in which group sums keep the antisymmetric half of the Hessian
NOTHING = 1e-20  # energy of a row, relative to the largest, that is rounding
UNDERFLOW = 1e-150  # smaller changes of a gradient count as none: their squares underflow
DENSE_LIMIT = 20_000  # maximum number of features for a dense k × k matrix


def head_rows(rank: int) -> int:
    """Maximum number of rows of a head; above DENSE_LIMIT dimensions it is HEAD_LEAST, which takes gigabytes."""
    return HEAD_LEAST if rank > DENSE_LIMIT else max(HEAD_LEAST, HEAD_FACTOR * rank)


def must_be_factored(features: int) -> bool:
    """Whether a dense matrix of the features is too large."""
    return features > DENSE_LIMIT


def most_rows(rank: int, features: int) -> int:
    """Maximum number of rows of an estimate with `rank` dimensions and the given number of features."""
    return head_rows(rank) if must_be_factored(features) else 1 << 62


class DrawRange(NamedTuple):
    """Rows start … stop − 1 of the stream of one seed."""

    seed: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Rows:
    """A chunk of evaluated rows for B examples."""

    weight: Tensor  # (1 or B, r)
    score: Tensor  # (1 or B, r, k)
    odd: Tensor  # (B, r, k)
    even: Tensor  # (B, r, k)
    value_even: Tensor  # (B, r)
    energy: Tensor  # (B, r) w times |∇f(x + δ) − ∇f(x)|², of odd and even parts
    along: Tensor  # (B, r) s·odd/k, whitened: change of the gradient along the row's own direction; its mean is tr(W)/k
    across: Tensor  # (B, r) w |odd|²/k − along², whitened: squared change of the gradient in all other directions
    # Sums over a chunk, which are not kept for single rows and are not part of a head:
    stein: Tensor | None = None  # (B, MOMENTS, 3), see smoothhess.estimate.stein_check
    skew: Tensor | None = None  # (B, rank, K + PROBES) antisymmetric half of group sums
    square_sum: Tensor | None = None  # (B,) Σ w (f(x + δ) − f(x))², float64

    def sum(self) -> Tensor:
        """Σ s oddᵀ in float64, (B, k, k)."""
        if len(self.score) == 1 and len(self.odd) > 1:  # draws shared by all examples: one large product
            return torch.einsum("rk,brl->bkl", self.score[0], self.odd).double()
        return (self.score.mT @ self.odd).double()

    def each(self, change: Callable[[Tensor], Tensor]) -> Rows:
        """Apply a function to every tensor that has rows."""
        return Rows(**{name: change(getattr(self, name)) for name in _NAMES})

    def map(self, linear: Callable[[Tensor], Tensor]) -> Rows:
        """Apply a linear map to scores and gradients."""
        return replace(self, score=linear(self.score), odd=linear(self.odd), even=linear(self.even))


@dataclass(frozen=True, eq=False)
class Statistics:
    """Mergeable statistics of B examples, on which sampling, merging and saving operate."""

    design: str
    stream: tuple[tuple[DrawRange, ...], ...]  # per example
    n: Tensor  # (B,) number of rows
    head: Rows  # the first rows, padded with zeros where examples have fewer
    total: Tensor | None  # (B, k, k) Σ s oddᵀ over all rows; None while the head holds all rows
    even_sum: Tensor  # (B, k) over all rows, float64
    value_sum: Tensor  # (B,) Σ value_even over all rows, float64
    square_sum: Tensor  # (B,) Σ w (f(x + δ) − f(x))² over all rows, float64; NaN if it was not kept
    value: Tensor  # (B,) f(x)
    own_values: Tensor  # (B,) bool, False for values of low precision, and of another function than the gradients
    gradient: Tensor  # (B, k) γ(0)
    stein: Tensor  # (B, MOMENTS, 3) float64, see smoothhess.estimate.stein_check
    rank: int  # dimension of the draws; k unless these are group sums
    skew: Tensor | None = None  # (B, rank, K + PROBES) group sums only: Σ (s γᵀ − γ sᵀ)/2 for the groups and the probes
    known: Known | None = None  # expectation of the control variate that was subtracted, averaged over rows
    drift: Tensor | None = None  # (B, R, k) D v for random white v, with D the bias of `known` if it is not exact
    drift_norm2: Tensor | None = None  # (B,) ‖D‖²_F, whitened
    gram: Tensor | None = None  # (1 or B, K, K) group sums only: q_I·q_J of the groups' whitened directions
    rare: RareFlips | None = None  # neurons that few rows flip; None: not known
    tails: TailRows | None = None  # draws from tail strata, where rows of the design count as zero; None: no strata

    @staticmethod
    def empty(design: str, seeds: Sequence[int], value: Tensor, gradient: Tensor) -> Statistics:
        """Statistics without rows, of examples with outputs `value` (B,) and whitened gradients `gradient` (B, k)."""
        batch, k = gradient.shape
        none = gradient.new_zeros(batch, 0, k)
        return Statistics(
            design=design,
            stream=tuple((DrawRange(seed, 0, 0),) for seed in seeds),
            n=torch.zeros(batch, dtype=torch.long, device=value.device),
            head=Rows(none[..., 0], none, none, none, *[none[..., 0]] * 4),
            total=None,
            even_sum=torch.zeros_like(gradient, dtype=torch.float64),
            value_sum=torch.zeros_like(value, dtype=torch.float64),
            square_sum=torch.zeros_like(value, dtype=torch.float64),
            value=value,
            own_values=torch.ones_like(value, dtype=torch.bool),
            gradient=gradient,
            stein=torch.zeros(batch, MOMENTS, 3, dtype=torch.float64, device=value.device),
            rank=k,
        )

    def __len__(self) -> int:
        return len(self.n)

    @property
    def k(self) -> int:
        """Number of coordinates."""
        return self.gradient.shape[1]

    @cached_property
    def grams(self) -> Grams:
        """Inner products of the rows of the head."""
        return Grams.of(self.head.odd, self.head.score)

    @property
    def head_rows(self) -> int:
        """Maximum number of rows of the head."""
        return head_rows(self.rank)

    @property
    def n_head(self) -> Tensor:
        """Number of rows of each example in the head, (B,)."""
        return self.n.clamp_max(self.head_rows)

    @property
    def even_mean(self) -> Tensor:
        """Mean of the even parts over all rows, with those of the tail strata, (B, k) float64."""
        found = self.even_sum / self.n.clamp_min(1)[:, None]
        return found if self.tails is None else found + self.tails.even_mean

    @property
    def value_mean(self) -> Tensor:
        """The same of the values, (B,) float64."""
        found = self.value_sum / self.n.clamp_min(1)
        return found if self.tails is None else found + self.tails.value_mean

    def next_row(self, example: int) -> DrawRange:
        """The position at which the stream of an example continues: the first unused row of its last seed."""
        seed = self.stream[example][-1].seed
        start = max(s.stop for s in self.stream[example] if s.seed == seed)
        return DrawRange(seed, start, start)

    def refuse_large(self, rows: int, features: int | None = None) -> None:
        """Raise if this number of rows needs a dense matrix, of the dimensions or features, above DENSE_LIMIT."""
        d = max(self.k, features or 0)
        if d > DENSE_LIMIT:
            raise ValueError(
                f"{rows} rows of {d} features are more than the {self.head_rows} that are kept in factored form, and a "
                f"{d} × {d} matrix is too large. Request fewer calls, or pass feature_mask to stream sums."
            )

    def draws(self) -> Tensor:
        """The draws z of the head's rows, (1 or B, P, k), of whitened statistics; zero where the score is zero."""
        weight, tiny = self.head.weight, torch.finfo(self.head.weight.dtype).tiny
        if self.design == "orthogonal" and self.rank <= SMALL:  # w = 2/(1 + R²/k), and the scores are not w z
            radius = (self.rank * (2 / weight.clamp_min(tiny) - 1)).clamp_min(0).sqrt()
            return torch.nn.functional.normalize(self.head.score, dim=-1) * radius[..., None]
        return self.head.score / weight.clamp_min(tiny)[..., None]

    def sampled(self) -> Tensor:
        """Σ s oddᵀ over all rows, without the control variate's expectation, (B, k, k), float64."""
        return self.head.sum() if self.total is None else self.total

    def summed(self) -> Tensor:
        """Σ s oddᵀ over all rows, with the control variate's expectation added to each, (B, k, k), float64."""
        if self.total is None and self.k > DENSE_LIMIT:
            raise ValueError(
                f"a dense Hessian of {self.k} features would hold {self.k}² numbers. Use result @ v, groups(mask), "
                "row(i), diagonal() or eigh(k), which do not need it."
            )
        total = self.sampled()
        if self.added is None:
            return total
        return torch.addcmul(total, self.added.dense().double(), self.n[:, None, None].double())

    @cached_property
    def added(self) -> Known | None:
        """What is added to the mean over the rows: the control variate's expectation, and the part of tail strata."""
        if self.tails is None:
            return self.known
        tails = Known(self.tails.hessian.to(self.gradient))
        return tails if self.known is None else self.known.plus(tails)

    @cached_property
    def without_computed_flips(self) -> Statistics:
        """Whitened statistics without the energy of events whose error is known.

        These are flips that were computed (`rare_flips`) or subtracted, and rows in tail strata, which were sampled
        apart.
        """
        known = self.rare is not None and bool(self.rare.complete.any())
        if not known and self.tails is None:
            return self
        head, energy, draws = self.head, self.head.energy, self.draws()
        flipped = torch.zeros_like(energy, dtype=torch.bool)
        if self.rare is not None and known:
            complete = self.rare.complete[:, None]
            residual = head.along.square() + head.across
            energy = torch.where(complete & ~self.is_uncontrolled[:, None], residual, energy)
            flipped = self.rare.flipped(draws, find_design(self.design).mirrored) & complete
        if self.tails is not None:
            flipped = flipped | (self.tails.strata.contain(draws) & (self.tails.share == 1)[:, None])
        moved = energy > NOTHING * energy.amax(1, keepdim=True) if energy.shape[1] else energy > 0
        usual = energy.masked_fill(flipped, 0.0).sum(1) / (~flipped & moved).sum(1).clamp_min(1)
        energy = torch.where(flipped, usual[:, None], energy)  # as if the row were a usual one
        return replace(self, head=replace(head, energy=energy))

    @property
    def is_uncontrolled(self) -> Tensor:
        """Where no control variate was subtracted from the rows, (B,)."""
        return torch.ones_like(self.n, dtype=torch.bool) if self.known is None else self.known.is_zero

    @property
    def has_own_values(self) -> Tensor:
        """Where the rows hold precise values of the function whose gradients they hold, (B,)."""
        return self.is_uncontrolled & self.own_values

    @property
    def is_factored(self) -> bool:
        """Whether the head and the factors of the control variate's expectation determine the estimate."""
        return self.total is None and (self.added is None or self.added.is_thin)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Rows S and G, (B, r, k) each, with Ĥ = sym SᵀG, for a factored estimate."""
        n = self.n[:, None, None].clamp_min(1).to(self.head.score)
        score, odd = (self.head.score / n).expand(len(self), -1, -1), self.head.odd
        if self.known is None:
            return score, odd
        pairs = self.known.pairs()
        return torch.cat([score, pairs[0].to(score)], 1), torch.cat([odd, pairs[1].to(odd)], 1)

    def map(self, linear: Callable[[Tensor], Tensor]) -> Statistics:
        """The statistics in other coordinates: the same linear map is applied to scores, gradients and sums."""
        total = None if self.total is None else linear(linear(self.total.to(self.gradient.dtype)).mT).mT
        return replace(
            self,
            head=self.head.map(linear),
            total=None if total is None else total.double(),
            known=None if self.known is None else self.known.map(linear),
            drift=None if self.drift is None else linear(self.drift),
            rare=None if self.rare is None else self.rare.map(linear),
            tails=None if self.tails is None else self.tails.map(linear),
            even_sum=linear(self.even_sum.to(self.gradient.dtype)).double(),
            gradient=linear(self.gradient),
        )

    def select(self, index: Tensor) -> Statistics:
        """The examples at `index` (int64), in that order."""
        rows = int(self.n_head[index].max())
        return replace(
            self,
            stream=tuple(self.stream[i] for i in index.tolist()),
            n=self.n[index],
            head=cut(
                self.head.each(lambda t: _examples(t, index, len(self))),
                rows,
            ),
            total=None if self.total is None else self.total[index],
            even_sum=self.even_sum[index],
            value_sum=self.value_sum[index],
            square_sum=self.square_sum[index],
            value=self.value[index],
            own_values=self.own_values[index],
            gradient=self.gradient[index],
            stein=self.stein[index],
            known=None if self.known is None else self.known.select(index),
            drift=None if self.drift is None else self.drift[index],
            drift_norm2=None if self.drift_norm2 is None else self.drift_norm2[index],
            rare=None if self.rare is None else self.rare.select(index),
            tails=None if self.tails is None else self.tails.select(index),
            skew=None if self.skew is None else self.skew[index],
            gram=self.gram if self.gram is None or len(self.gram) == 1 else self.gram[index],
        )

    def to(self, device: torch.device | str) -> Statistics:
        """Copy to another device."""
        tensors = {name: t.to(device) for name, t in self.tensors().items()}
        return Statistics.from_tensors(self.design, self.stream, self.rank, tensors)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name; with `design`, `stream` and `rank` they determine the statistics."""
        names = ("n", "total", "even_sum", "value_sum", "square_sum", "value", "own_values", "gradient", "stein")
        names = (*names, "drift", "drift_norm2", "skew", "gram")
        own = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        own |= {} if self.known is None else self.known.tensors()
        own |= {} if self.rare is None or self.rare.is_empty else self.rare.tensors()
        own |= {} if self.tails is None else self.tails.tensors()
        return own | {f"head.{name}": getattr(self.head, name) for name in _NAMES}

    @staticmethod
    def from_tensors(
        design: str, stream: tuple[tuple[DrawRange, ...], ...], rank: int, tensors: dict[str, Tensor]
    ) -> Statistics:
        """The inverse of `tensors`."""
        kept = {k.removeprefix("head."): v for k, v in tensors.items() if k.startswith("head.")}
        if "along" not in kept:  # files of estimator version 1; not available for group sums
            found = own_slopes(kept["score"], kept["odd"], kept["weight"], rank)
            kept |= {n: t if kept["odd"].shape[-1] == rank else torch.zeros_like(t) for n, t in found.items()}
        head = Rows(**kept)
        own = {k: v for k, v in tensors.items() if not k.startswith("head.")}
        factor = own.pop("known.factor", None)
        known = Known(own.pop("known"), factor) if "known" in own else None
        rare, tails = RareFlips.from_tensors(own), TailRows.from_tensors(own)
        total = own.pop("total", None)
        own.setdefault("square_sum", torch.full_like(own["value_sum"], torch.nan))  # older files hold neither
        own.setdefault("own_values", torch.ones_like(own["value_sum"], dtype=torch.bool))
        if (kept := own["stein"].shape[1]) < MOMENTS:  # files of estimator version 1 have no higher powers
            own["stein"] = torch.nn.functional.pad(own["stein"], (0, 0, 0, MOMENTS - kept))
        values: dict[str, Any] = {"head": head, "total": total, "known": known, "rare": rare, "tails": tails, **own}
        return Statistics(design=design, stream=stream, rank=rank, **values)


class _Sums(NamedTuple):
    """The rows that are kept and the sums over all rows, of an `Extension`."""

    n: int
    kept: tuple[Rows, ...]
    total: Tensor | None
    even_sum: Tensor
    value_sum: Tensor
    square_sum: Tensor
    stein: Tensor
    skew: Tensor | None


class Extension:
    """Adds further rows of the same streams, from `next_row` on, to statistics, one chunk at a time.

    All examples must have the same number of rows. `add` replaces all sums in one assignment, so that an interruption
    never leaves a part of a chunk in them.
    """

    def __init__(self, stats: Statistics, index: Tensor, known: Known | None) -> None:
        self.stats = stats
        self.index = index  # (b,) indices of the examples in the run
        self.known = known  # what the control variate subtracts from each added row on average
        self.tails: TailRows | None = None  # couples that go with the added rows
        n = int(stats.n.max())
        self._sums = _Sums(
            n=n,
            kept=(stats.head,) if n else (),
            total=stats.total,
            even_sum=stats.even_sum,
            value_sum=stats.value_sum,
            square_sum=stats.square_sum,
            stein=stats.stein,
            skew=stats.skew,
        )

    def add(self, chunk: Rows) -> None:
        """Add the next rows."""
        n, kept, total, even_sum, value_sum, square_sum, stein, skew = self._sums
        room, rows = max(self.stats.head_rows - n, 0), chunk.odd.shape[1]
        if rows > room and total is None:
            self.stats.refuse_large(n + rows)
            total = even_sum.new_zeros(len(self.stats), self.stats.k, self.stats.k)
            for part in kept:
                total += part.sum()
        self._sums = _Sums(
            n=n + rows,
            kept=(*kept, cut(chunk, room)) if room else kept,
            total=None if total is None else total + chunk.sum(),
            even_sum=even_sum + chunk.even.sum(1, dtype=torch.float64),
            value_sum=value_sum + chunk.value_even.sum(1, dtype=torch.float64),
            square_sum=square_sum + (torch.nan if chunk.square_sum is None else chunk.square_sum),
            stein=stein if chunk.stein is None else stein + chunk.stein,
            skew=skew if skew is None or chunk.skew is None else skew + chunk.skew,
        )

    def statistics(self) -> Statistics:
        """The statistics of all rows so far."""
        stats, sums = self.stats, self._sums
        before = int(stats.n.max())
        added, stream = sums.n - before, []
        for example, segments in enumerate(stats.stream):
            seed, start, _ = stats.next_row(example)
            stream.append(chain(*segments, DrawRange(seed, start, start + added)))
        return replace(
            stats,
            stream=tuple(stream),
            n=stats.n + added,
            head=join(sums.kept) if sums.kept else stats.head,
            total=sums.total,
            even_sum=sums.even_sum,
            value_sum=sums.value_sum,
            square_sum=sums.square_sum,
            stein=sums.stein,
            skew=sums.skew,
            known=mean(stats.known, stats.n, self.known, torch.full_like(stats.n, added)) if before else self.known,
            tails=self.grown_tails(added),
        )

    def grown_tails(self, added: int) -> TailRows | None:
        """The couples of the statistics, with those that go with `added` rows."""
        before, new = self.stats.tails, self.tails
        if new is None or not added:
            return before
        return TailRows.merged(before, self.stats.n, new, torch.full_like(self.stats.n, added))


def unmoved(stats: Statistics) -> Tensor:
    """Where the sampled gradients did not vary, (B,); further draws may still cross a kink."""
    if not stats.head.odd.shape[1]:
        return torch.ones_like(stats.n, dtype=torch.bool)
    rows = stats.head
    still = (rows.along.abs() <= UNDERFLOW).all(1) & (rows.across <= UNDERFLOW).all(1)
    return still & (rows.odd.abs() <= UNDERFLOW).all(2).all(1)


def own_slopes(score: Tensor, odd: Tensor, weight: Tensor, k: int) -> dict[str, Tensor]:
    """`along` and `across` of whitened rows, (B, r) each."""
    along = (score * odd).sum(-1) / k
    return {"along": along, "across": (weight / k * odd.square().sum(-1) - along.square()).clamp_min(0)}


def symmetric(matrix: Tensor) -> Tensor:
    """(M + Mᵀ)/2, as in Eq. 8."""
    return (matrix + matrix.mT).div_(2)


def concatenate(parts: Sequence[Statistics]) -> Statistics:
    """Concatenate the statistics of different examples."""
    if len({(p.design, p.k) for p in parts}) != 1:
        raise ValueError(
            "only results with the same design and number of features can be concatenated, got "
            f"{sorted({(p.design, p.k) for p in parts})}."
        )
    rows = max(p.head.odd.shape[1] for p in parts)
    longest = max(parts, key=lambda p: p.head.odd.shape[1]).head
    # The scores stay shared if all parts have the same scores.
    shared = all(
        len(p.head.score) == 1 and torch.equal(p.head.score, longest.score[:, : p.head.score.shape[1]]) for p in parts
    )
    heads = [_pad(p.head if shared else _own_scores(p), rows) for p in parts]
    dense = any(p.total is not None for p in parts)
    return Statistics(
        design=parts[0].design,
        stream=tuple(s for p in parts for s in p.stream),
        n=torch.cat([p.n for p in parts]),
        head=Rows(
            **{
                name: getattr(longest, name)
                if shared and name in ("weight", "score")
                else torch.cat([getattr(h, name) for h in heads])
                for name in _NAMES
            }
        ),
        total=torch.cat([p.sampled() for p in parts]) if dense else None,
        even_sum=torch.cat([p.even_sum for p in parts]),
        value_sum=torch.cat([p.value_sum for p in parts]),
        square_sum=torch.cat([p.square_sum for p in parts]),
        value=torch.cat([p.value for p in parts]),
        own_values=torch.cat([p.own_values for p in parts]),
        gradient=torch.cat([p.gradient for p in parts]),
        stein=torch.cat([p.stein for p in parts]),
        rank=parts[0].rank,
        known=_known(parts),
        drift=_cat_or_zero([p.drift for p in parts], [*map(len, parts)]),
        drift_norm2=_cat_or_zero([p.drift_norm2 for p in parts], [*map(len, parts)]),
        rare=RareFlips.cat([p.rare for p in parts], [*map(len, parts)]),
        tails=TailRows.cat([p.tails for p in parts], [*map(len, parts)]),
        skew=_cat([p.skew for p in parts]),
        gram=_cat([None if p.gram is None else p.gram.expand(len(p), -1, -1) for p in parts]),
    )


def merge(a: Statistics, b: Statistics, features: int | None = None) -> Statistics:
    """Merge the statistics of the same examples from different draws, as if they were one run."""
    if a.design != b.design or a.gradient.shape != b.gradient.shape:
        raise ValueError(
            f"only results of one design and the same inputs can be merged, got {a.design} "
            f"{tuple(a.gradient.shape)} and {b.design} {tuple(b.gradient.shape)}."
        )
    for left, right in zip(a.stream, b.stream, strict=True):
        for p in left:
            for q in right:
                if p.seed == q.seed and p.start < q.stop and q.start < p.stop:
                    raise ValueError(
                        f"these results share draws (seed {p.seed}, rows {max(p.start, q.start)} to "
                        f"{min(p.stop, q.stop) - 1}); counting them twice would make the error bars too small. "
                        "Use another seed, or SmoothHess.more."
                    )
    return concatenate(
        [_merge_one(a.select(i), b.select(i), features) for i in torch.arange(len(a), device=a.n.device).split(1)]
    )


def _merge_one(a: Statistics, b: Statistics, features: int | None = None) -> Statistics:
    n = a.n + b.n
    dense = a.total is not None or b.total is not None or int(n) > a.head_rows
    if dense:
        a.refuse_large(int(n), features)
    return replace(
        a,
        stream=(chain(*a.stream[0], *b.stream[0]),),
        n=n,
        head=cut(join([a.head, b.head]), a.head_rows),
        total=a.sampled() + b.sampled() if dense else None,
        even_sum=a.even_sum + b.even_sum,
        value_sum=a.value_sum + b.value_sum,
        square_sum=a.square_sum + b.square_sum,
        own_values=a.own_values & b.own_values,
        stein=a.stein + b.stein,
        skew=None if a.skew is None or b.skew is None else a.skew + b.skew,
        known=mean(a.known, a.n, b.known, b.n),
        rare=RareFlips.merged(a.rare, a.n, b.rare, b.n),
        tails=TailRows.merged(a.tails, a.n, b.tails, b.n),
        **_mean_drift(a, b),
    )


def _mean_drift(a: Statistics, b: Statistics) -> dict[str, Tensor]:
    """`drift` and `drift_norm2` of the mean over the rows of both; the control variate may be that of one of them."""
    if a.drift is None and b.drift is None:
        return {}
    n = (a.n + b.n)[:, None, None].clamp_min(1)
    scaled = [s.drift * (s.n[:, None, None] / n).to(s.drift) for s in (a, b) if s.drift is not None]
    total = sum(scaled[1:], scaled[0])
    shares = [s.n / n[:, 0, 0] * s.drift_norm2.sqrt() for s in (a, b) if s.drift_norm2 is not None]
    return {"drift": total, "drift_norm2": sum(shares[1:], shares[0]).square()}


def _examples(rows: Tensor, index: Tensor, batch: int) -> Tensor:
    """The examples at `index`; a tensor that all examples share stays shared."""
    return rows if len(rows) == 1 and batch > 1 else rows[index]


def _known(parts: Sequence[Statistics]) -> Known | None:
    """The control variate's expectation of all examples; zero for parts without a control variate."""
    like = next((p.known for p in parts if p.known is not None), None)
    if like is None:
        return None
    return Known.cat([like.nothing(len(p)) if p.known is None else p.known for p in parts])


def _cat_or_zero(tensors: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    like = next((t for t in tensors if t is not None), None)
    if like is None:
        return None
    filled = (like.new_zeros(n, *like.shape[1:]) if t is None else t for t, n in zip(tensors, sizes, strict=True))
    return torch.cat([*filled])


def _cat(tensors: Sequence[Tensor | None]) -> Tensor | None:
    given = [t for t in tensors if t is not None]
    return torch.cat(given) if given else None


def chain(*segments: DrawRange) -> tuple[DrawRange, ...]:
    """The same rows in the same order; consecutive ranges of one seed are joined.

    >>> chain(DrawRange(0, 0, 4), DrawRange(0, 4, 6), DrawRange(1, 0, 2))
    (DrawRange(seed=0, start=0, stop=6), DrawRange(seed=1, start=0, stop=2))
    """
    found: list[DrawRange] = []
    for segment in segments:
        if found and found[-1].seed == segment.seed and found[-1].stop == segment.start:
            found[-1] = found[-1]._replace(stop=segment.stop)
        else:
            found.append(segment)
    return tuple(found)


def _own_scores(p: Statistics) -> Rows:
    return replace(p.head, weight=p.head.weight.expand(len(p), -1), score=p.head.score.expand(len(p), -1, -1))


def cut(rows: Rows, most: int) -> Rows:
    """The first rows, `most` at most."""
    return rows.each(lambda t: t[:, :most])


def join(parts: Sequence[Rows]) -> Rows:
    """Concatenate rows; scores stay shared only if all parts share them."""
    joined = {}
    for name in _NAMES:
        tensors = [getattr(p, name) for p in parts]
        batch = max(len(t) for t in tensors)
        joined[name] = torch.cat([t.expand(batch, *t.shape[1:]) for t in tensors], 1) if len(parts) > 1 else tensors[0]
    return Rows(**joined)


def _pad(rows: Rows, to: int) -> Rows:
    missing = to - rows.odd.shape[1]
    return rows.each(lambda t: torch.cat([t, t.new_zeros(t.shape[0], missing, *t.shape[2:])], 1))


_NAMES = ("weight", "score", "odd", "even", "value_even", "energy", "along", "across")
