"""Pair: the strongest pairs of features, with names, confidence intervals and control of the false-discovery rate.

This module ranks pairs and computes their p- and q-values from an estimate and its variances. `Interactions.top_pairs`
is the public method; the variances are in `smoothhess.estimate.variance`, Student's t in
`smoothhess.estimate.student_t`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from smoothhess.estimate import student_t
from smoothhess.estimate.effective_draws import tail_index
from smoothhess.estimate.statistics import Statistics
from smoothhess.estimate.tail_rows import TailRows
from smoothhess.estimate.variance import Variance
from smoothhess.linalg.effective_number import effective_number
from smoothhess.linalg.memory import EXAMPLE_MATRICES
from smoothhess.result.effect_sizes import share_text
from smoothhess.result.false_discoveries import q_values
from smoothhess.result.intervals import plus_minus

if TYPE_CHECKING:
    import pandas as pd


class Pair(NamedTuple):
    """The interaction of two features: the second-order effect on f of raising both, per unit of each."""

    i: int  # index of the first feature, i < j
    j: int
    names: tuple[str, str]
    value: float  # H_ij
    stderr: float  # standard error of the value
    low: float  # lower end of the confidence interval
    high: float  # upper end
    effect: float  # H_ij σ_i σ_j, in units of the output
    q_value: float  # smallest false-discovery rate at which the pair is significant
    significant: bool  # whether q_value is at most the q that was passed to `top_pairs`
    n_eff: float = math.nan  # effective number of draws that carry the sampled part of the value; NaN if not sampled
    tail_index: float = math.nan  # of their contributions; above 0.7 the standard error is unreliable
    separate_share: float = math.nan  # |effect| relative to the separate effects of both features; NaN if undefined
    separate_share_stderr: float = math.nan  # its standard error
    output_share: float = math.nan  # |effect| relative to the standard deviation of the output over the noise
    size: str = ""  # "tiny", "small", "moderate" or "large", by the smaller share; "at most …" within noise


COLUMNS = ("example", "i", "j", "first", "second", *Pair._fields[3:])  # of `TopPairs.to_frame`


class TopPairs(list[list[Pair]]):
    """The strongest pairs: a list of `Pair` for each example, which prints as a table.

    >>> import smoothhess as sh
    >>> x = torch.tensor([[1.0, 2.0]])
    >>> result = sh.Exact.make(x, x.prod(1), x.flip(1), torch.tensor([[[0.0, 1.0], [1.0, 0.0]]]))
    >>> result.top_pairs(1, ["age", "dose"])
    Strongest pairs of 1 example(s)
      example  pair        value  effect  of separate  of output  size      q  interval
            0  age × dose  1      1       45 %         41 %       moderate  0  exact
    """

    def __init__(
        self,
        pairs: Iterable[list[Pair]] = (),
        level: float = 0.95,
        unit: str = "",
        relative_error: str = "",
        note: str = "",
    ) -> None:
        super().__init__(pairs)
        self.level, self.unit = level, unit
        self.relative_error = relative_error  # of the estimate whose values these are, as text; "" without draws
        self.note = note  # a sentence below the table

    def rows(self) -> list[tuple[Any, ...]]:
        """One tuple of COLUMNS for each pair of each example, strongest first."""
        return [(example, p.i, p.j, *p.names, *p[3:]) for example, pairs in enumerate(self) for p in pairs]

    def to_frame(self) -> pd.DataFrame:
        """The pairs as a pandas DataFrame with one row per pair; see smoothhess.result.export.to_frame.

        Raises:
            ImportError: if pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("to_frame needs pandas: pip install pandas") from error
        return pd.DataFrame(self.rows(), columns=list(COLUMNS))

    def _of_draws(self) -> str:
        """What ± and the relative error are; empty without draws."""
        if not self.relative_error:
            return ""
        return f"; ± half of a {100 * self.level:g} % interval; relative error of the estimate {self.relative_error}"

    def __repr__(self) -> str:
        unit = f" ({self.unit})" if self.unit else ""
        head = f"Strongest pairs of {len(self)} example(s){self._of_draws()}"
        sizes = ["of separate", "of output", "size"] if any(p.size for pairs in self for p in pairs) else []
        table = [["example", "pair", "value", f"effect{unit}", *sizes, "q", "interval"]]
        for example, pairs in enumerate(self):
            for p in pairs:
                value, effect, *rest = _cells(p)
                own = [share_text(p.separate_share), share_text(p.output_share), p.size] if sizes else []
                table.append([f"{example:7d}", " × ".join(p.names), value, effect, *own, *rest])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [head, *("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in table)]
        return "\n".join([*lines, *([self.note] if self.note else [])])


def _cells(p: Pair) -> tuple[str, str, str, str]:
    """Value, effect, q-value, and whether the interval contains zero, as text."""
    half, move = (p.high - p.low) / 2, abs(p.effect / p.value) if p.value else 0.0
    if half == 0:
        zero = "exact" if p.value else "exactly zero"
    elif not math.isfinite(half):
        zero = "unknown"
    else:
        zero = "excludes zero" if p.low > 0 or p.high < 0 else "contains zero"
    return plus_minus(p.value, half), plus_minus(p.effect, move * half), f"{p.q_value:.2g}", zero


class Columns(NamedTuple):
    """The fields of `Pair` as tensors (B, k), for the strongest pairs of B examples, strongest first."""

    i: Tensor
    j: Tensor
    value: Tensor
    stderr: Tensor
    low: Tensor
    high: Tensor
    effect: Tensor
    q_value: Tensor
    significant: Tensor

    def named(self, labels: Iterator[Callable[[int], str]]) -> list[list[Pair]]:
        """A list of `Pair` for each example; takes the function from index to name of each of them."""
        rows = zip(*(column.tolist() for column in self), strict=True)
        return [
            [Pair(i, j, (label(i), label(j)), *rest) for i, j, *rest in zip(*columns, strict=True)]
            for columns, label in zip(rows, labels, strict=False)
        ]


IMPRECISE = 0.1  # width of the strongest pair's interval, relative to its value and
FAR_ABOVE = 2  # relative to the error of the matrix, from which on a note says that they differ


def relative_width(pair: Pair, level: float = 0.95) -> float:
    """Half of the interval relative to the value, in standard errors of a normal distribution.

    It is larger than the relative standard error where few draws leave few degrees of freedom.
    """
    half, normal = (pair.high - pair.low) / 2, NormalDist().inv_cdf((1 + level) / 2)
    return half / normal / abs(pair.value) if pair.value else 0.0


def note_on_errors(pairs: Iterable[list[Pair]], errors: Iterable[float], level: float = 0.95) -> str:
    """A sentence about strongest pairs whose own error is far above that of the matrix, in any example; else empty."""
    for own, error in zip(pairs, errors, strict=False):
        share = relative_width(own[0], level) if own else 0.0
        if share > max(IMPRECISE, FAR_ABOVE * error):
            return (
                "The relative error is that of all entries together, with the diagonal. Those of the strongest pairs "
                "are larger, see ±: use a smaller tol, or more calls."
            )
    return ""


TEMPORARIES = 16  # float64 numbers per pair that are in memory at the same time
PAIRS_AT_ONCE = 1024  # pairs whose contributions of all rows are in memory at the same time
FEW_PAIRS = 4 * student_t.NODES  # up to this number, computing the p-values is faster than making a table


class Entries(NamedTuple):
    """Entries (B, d, d) from which pairs are chosen and reported."""

    hessian: Tensor  # the numbers that are reported
    variance: Variance  # of `hessian`
    ranking: Tensor  # the numbers that pairs are chosen by
    chosen_elsewhere: bool = False  # whether `ranking` is independent of `hessian`


def strongest_pairs(
    entries: Entries, scales: Tensor, k: int, q: float, level: float, allowed: Tensor | None = None
) -> list[Columns]:
    """The k pairs i < j of each example with the largest |ranking_ij| σ_i σ_j, in the order of their |value| σ_i σ_j.

    There is one item for each run of consecutive examples in which the same features have σ > 0. q-values count all
    pairs, or only the k pairs if they were chosen from independent draws. `allowed` (d, d) excludes pairs.
    """
    hessian, ranking, variance, df = entries.hessian, entries.ranking, entries.variance.value, entries.variance.df
    if k < 1 or not 0 < q < 1:
        raise ValueError(f"top_pairs needs k ≥ 1 and 0 < q < 1, got k={k}, q={q}.")
    b, d = hessian.shape[:2]
    if scales.shape[1] != d:
        raise ValueError(f"scales must have one number per feature, {d}, got {scales.shape[1]}.")
    scales = scales.to(hessian.device, torch.float64)
    moving, width = scales > 0, student_t.quantile(level, df.cpu()).to(df.device)
    df = df.clamp_min(0.05)
    tails = student_t.Tails.of(df) if d * (d - 1) // 2 > FEW_PAIRS else None
    step = EXAMPLE_MATRICES.items(8 * TEMPORARIES * (d * (d - 1) // 2), hessian.device)
    i, j = torch.triu_indices(d, d, 1, device=hessian.device)
    if allowed is not None:
        i, j = (place[allowed[i, j]] for place in (i, j))
    every = i * d + j
    alike = [0, *(torch.nonzero((moving[1:] != moving[:-1]).any(1)).reshape(-1) + 1).tolist(), b]
    found = []
    for first, last in pairwise(alike):
        # frozen features are excluded
        place = every if bool(moving[first].all()) else every[moving[first, i] & moving[first, j]]
        parts = []
        for start in range(first, last, step):
            rows = slice(start, min(start + step, last))
            products = scales[rows, :, None] * scales[rows, None]
            index = place + d * d * torch.arange(len(products), device=place.device)[:, None]
            matrices = (hessian[rows], ranking[rows], variance[rows], products)
            # one dimension is the fastest to index
            flat = (m.reshape(-1).index_select(0, index.reshape(-1)) for m in matrices)
            value, rank, square, moves = (x.reshape(index.shape).double() for x in flat)
            chosen = _largest((rank * moves).abs(), min(k, len(place)))
            listed = (value * moves).abs().gather(1, chosen).nan_to_num(-1.0, torch.inf)
            chosen = chosen.gather(1, listed.argsort(descending=True, stable=True))
            stderr = square.sqrt()
            # 0/0 is an exact zero, which is not significant; neither is a value whose error is unknown
            t = (value.abs() / stderr).nan_to_num_(0.0, torch.inf)
            value, stderr, moves, own = (x.gather(1, chosen) for x in (value, stderr, moves, t))
            p_value = partial(student_t.two_sided_p, df=df[rows, None]) if tails is None else tails[rows]
            q_value = q_values(own if entries.chosen_elsewhere else t, own, p_value)
            reach = torch.where(stderr == 0, 0.0, width[rows, None] * stderr)
            both = place[chosen] // d, place[chosen] % d
            parts.append((*both, value, stderr, value - reach, value + reach, value * moves, q_value, q_value <= q))
        found.append(Columns(*(torch.cat(c) for c in zip(*parts, strict=True))))
    return found


def with_effective_draws(pairs: list[list[Pair]], stats: Statistics) -> list[list[Pair]]:
    """The pairs of each example with `n_eff` and `tail_index`; `stats` are in the coordinates of the features.

    The contribution of a row to H_ij is (s_i γ_j + s_j γ_i)/2, of the residual where there is a control variate.
    """
    found = []
    for example, own in enumerate(pairs):
        n = int(stats.n_head[example])
        score = stats.head.score[example if len(stats.head.score) > 1 else 0, :n]
        odd, part = stats.head.odd[example, :n], []
        for start in range(0, len(own), PAIRS_AT_ONCE):
            i, j = (torch.tensor([p[k] for p in own[start : start + PAIRS_AT_ONCE]], device=odd.device) for k in (0, 1))
            left, right, others, own_odd = (x.double() for x in (score[:, i], score[:, j], odd[:, j], odd[:, i]))
            rows = (left * others + right * own_odd).mT.abs()  # (pairs, n)
            terms, scale = rows / max(n, 1), stats.n[example] / max(n, 1)
            if stats.tails is not None and (couples := int(stats.tails.stored[example])):
                terms = torch.cat([terms, _tail_forms(stats.tails, example, couples, i, j) / couples], 1)
            number = effective_number(terms.square()) * scale
            index = tail_index(rows, torch.full((len(rows),), n, device=rows.device))
            part += zip(number.tolist(), index.tolist(), strict=True)
        found.append([p._replace(n_eff=a, tail_index=b) for p, (a, b) in zip(own, part, strict=True)])
    return found


def _largest(strength: Tensor, k: int) -> Tensor:
    """Indices of the k largest numbers of each row, largest first; ties by index, NaN last, (b, k).

    >>> _largest(torch.tensor([[1.0, torch.nan, 3.0], [torch.nan, torch.nan, 0.0]]), 2)
    tensor([[2, 0],
            [2, 0]])
    """
    if not k:
        return strength.new_zeros(len(strength), 0, dtype=torch.long)
    strength = strength.nan_to_num(-1.0, torch.inf)  # strengths are not negative
    least = strength.topk(k).values[:, -1:]
    places = torch.nonzero(strength >= least)
    if len(places) > k * len(strength):  # ties beyond the k-th place
        above, equal = strength > least, strength == least
        places = torch.nonzero(above | (equal & (equal.cumsum(1) <= k - above.sum(1, keepdim=True))))
    places = places[:, 1].reshape(-1, k)
    return places.gather(1, strength.gather(1, places).argsort(descending=True, stable=True))


def labels_of(names: Sequence[str] | None, d: int, feature_shape: tuple[int, ...]) -> Callable[[int], str]:
    """A function from the index of a feature to its name: the given name, or its index in the feature shape."""
    if names is not None:
        if len(names) != d:
            raise ValueError(f"names must have one name per feature, {d}, got {len(names)}.")
        return lambda i: str(names[i])
    if len(feature_shape) == 1:
        return str

    def index(i: int) -> str:
        coordinates = []
        for size in reversed(feature_shape):
            i, c = divmod(i, size)
            coordinates.append(str(c))
        return "(" + ", ".join(reversed(coordinates)) + ")"

    return index


def _tail_forms(tails: TailRows, example: int, couples: int, i: Tensor, j: Tensor) -> Tensor:
    """|s_i γ_j + s_j γ_i| of the stored couples of an example, (pairs, couples)."""
    score, odd = (t[example, :couples] for t in (tails.score, tails.odd))
    forms = score[..., i] * odd[..., j] + score[..., j] * odd[..., i]
    return forms.mean(1).mT.abs()
