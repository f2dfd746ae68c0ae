"""Comparison of two results of the same features, such as two classes, two inputs or two models, with paired errors.

Draws are a function of the seed, so two results with one seed and one Gaussian have the same rows z, and the rows of
the difference H_a − H_b are z (γ_a − γ_b)ᵀ: its error is that of one estimate from these rows (`Sweep.difference`). If
a has n_a rows and b has n_b ≥ n_a rows, of which the first n_a are those of a, the difference of both estimates has

    Var(Ĥ_a − Ĥ_b) = V_d / n_b + V_a (1/n_a − 1/n_b),

with V_d the variance of a row of the difference and V_a that of a row of a, since the covariance of the two means is
that of a row over n_b. An incomplete orthogonal block has more variance than its share of the complete one, so that the
variance of the whole result to which it belongs is added in its place. Rare events that the rows do not show, and draws
from tail strata, may be correlated in any way: their standard errors are added, and also those of both results where no
row of the difference shows a kink, as for nearly equal inputs. Differences between scales are in
`sweep`, agreement of many models in `across_models`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from smoothhess.draws.designs import find_design
from smoothhess.estimate.incomplete_blocks import Gram
from smoothhess.estimate.student_t import pooled_df
from smoothhess.estimate.variance import Noise, Variance
from smoothhess.evaluate.sweep import Change, Sweep
from smoothhess.result.effect_sizes import share_text
from smoothhess.result.features import label_of
from smoothhess.result.interactions import Interactions, SampledResult
from smoothhess.result.intervals import Estimate, plus_minus
from smoothhess.result.pairs import Entries, strongest_pairs
from smoothhess.result.result import Result
from smoothhess.result.select_example import batch_of_one
from smoothhess.result.shown_estimate import shown

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

ERRORS = {
    "exact": "neither result was sampled",
    "paired": "paired: both results have the same draws",
    "independent": "independent: the results share no draws",
    "bounded": "upper bounds: the results share draws whose rows cannot be paired",
}


class ComparedPair(NamedTuple):
    """A pair of features in two results, and the difference of its interactions, first minus second."""

    i: int  # index of the first feature, i < j
    j: int
    names: tuple[str, str]
    first: float  # H_ij of the first result
    first_low: float
    first_high: float
    second: float  # H_ij of the second result
    second_low: float
    second_high: float
    difference: float  # first − second
    stderr: float  # standard error of the difference
    low: float
    high: float
    effect: float  # difference times σ_i σ_j, in units of the output
    q_value: float  # smallest false-discovery rate at which the difference is significant
    significant: bool
    share: float  # |difference| relative to the larger of both values


@dataclass(frozen=True, eq=False, repr=False)
class ResultComparison:
    """Two results of the same features and their difference; returned by `compare_results`."""

    names: tuple[str, str]  # of the results
    results: tuple[Result, Result]
    errors: str  # "paired", "independent", "bounded" or "exact": how the errors of the differences were computed

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.results[0])

    @cached_property
    def difference(self) -> Estimate:
        """The difference of the unbiased Hessians, first minus second, an `Estimate` (B, d, d)."""
        variance = self.variance
        return Estimate(self._matrix(), variance.value.sqrt(), variance.df)

    @cached_property
    def variance(self) -> Variance:
        """The variance of `difference`."""
        a, b = self.results
        if self.errors != "paired":
            return _unpaired(a, b, self.errors == "bounded")
        assert isinstance(a, Interactions)
        assert isinstance(b, Interactions)
        return _paired(a, b)

    def _matrix(self) -> Tensor:
        a, b = (shown(r).hessian.double() for r in self.results)
        return a - b

    def pairs(self, k: int = 10, *, q: float = 0.05, level: float = 0.95) -> list[list[ComparedPair]]:
        """The k pairs of each example whose interactions differ most, by |difference| σ_i σ_j.

        Args:
            k: number of pairs.
            q: accepted share of false discoveries among the significant differences.
            level: probability of the intervals.

        Returns:
            A list of `ComparedPair` for each example, the largest difference first.

        Raises:
            ValueError: if k or q is out of range.
        """
        a, b = self.results
        entries = Entries(self.difference.value, self.variance, (a.hessian - b.hessian).double())
        scales = a.feature_scales.expand(len(self), -1)
        labels = iter([label_of(a, names) for names in self.feature_names()])
        parts = strongest_pairs(entries, scales, k, q, level)
        tables = []
        for r in self.results:
            own = Estimate(shown(r).hessian.double(), r.stderr().double(), r.noise.of_entries().df)
            tables.append((own.value, *own.interval(level)))
        found = []
        for example, pairs in enumerate(p for part in parts for p in part.named(labels)):
            rows = []
            for p in pairs:
                own = [float(t[example, p.i, p.j]) for table in tables for t in table]
                largest = max(abs(own[0]), abs(own[3]))
                share = abs(p.value) / largest if largest else 0.0
                numbers: dict[str, Any] = dict(zip(ComparedPair._fields, (*p[:3], *own, *p[3:10], share), strict=True))
                rows.append(ComparedPair(**numbers))
            found.append(rows)
        return found

    def feature_names(self) -> list[tuple[str, ...] | None]:
        """The names of the features of each example; both names where they differ, as in two texts."""
        first, second = (r.names or (None,) * len(self) for r in self.results)
        return [_joined(a, b) for a, b in zip(first, second, strict=True)]

    def to_frame(self, k: int | None = None, *, q: float = 0.05, level: float = 0.95) -> pd.DataFrame:
        """The pairs as a pandas DataFrame with one row per pair of each example; see `pairs`.

        Args:
            k: number of pairs of each example; all if None.
            q, level: as for `pairs`.

        Raises:
            ImportError: if pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("to_frame needs pandas: pip install pandas") from error
        d = self.results[0].shape[1]
        most = max(1, d * (d - 1) // 2) if k is None else k
        one, other = self.names
        own = [f"{name}{end}" for name in (one, other) for end in ("", "_low", "_high")]
        columns = ["example", "i", "j", "feature_1", "feature_2", *own, *ComparedPair._fields[9:]]
        found = self.pairs(most, q=q, level=level)
        rows = [(example, p.i, p.j, *p.names, *p[3:]) for example, pairs in enumerate(found) for p in pairs]
        return pd.DataFrame(rows, columns=columns)

    def plot(self, *, example: int = 0, k: int = 10, q: float = 0.05, ax: Axes | None = None) -> Axes:
        """Plot the k largest differences: both values and their difference, with 95 % intervals.

        Args:
            example: index of the example.
            k: number of pairs.
            q: accepted share of false discoveries.
            ax: Axes to draw into; a new figure if None.

        Returns:
            Matplotlib Axes.
        """
        from smoothhess.view.figures.compared_pairs import compared_pairs

        return compared_pairs(self, example=example, k=k, q=q, ax=ax)

    def report(self, path: str | Path, **options: Any) -> Path:
        """Write a self-contained HTML page: pairs as rows, a column for each result and one for the difference.

        Args:
            path: file to write.
            **options: `k`, `q`, and `title`.

        Returns:
            The path of the file.
        """
        from smoothhess.view.report.comparison_page import comparison_page

        return comparison_page(self, path, **options)

    def only(self, example: int) -> ResultComparison:
        """The comparison at one example, as a batch of one."""
        a, b = (batch_of_one(r, example) for r in self.results)
        return ResultComparison(self.names, (a, b), self.errors)

    def __repr__(self) -> str:
        one, other = self.names
        about = f"± half of a 95 % interval; errors of differences: {ERRORS[self.errors]}"
        lines = [f"{one} − {other}, {len(self)} example(s); {about}"]
        table = [["example", "pair", one, other, "difference", "of larger", "q", "interval"]]
        for example, pairs in enumerate(self.pairs()):
            for p in pairs:
                cells = (
                    plus_minus(p.first, (p.first_high - p.first_low) / 2),
                    plus_minus(p.second, (p.second_high - p.second_low) / 2),
                    plus_minus(p.difference, (p.high - p.low) / 2),
                )
                zero = "exact" if p.stderr == 0 else "excludes zero" if p.low > 0 or p.high < 0 else "contains zero"
                row = [f"{example:7d}", " × ".join(p.names), *cells, share_text(p.share), f"{p.q_value:.2g}", zero]
                table.append(row)
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        return "\n".join(lines)


def compare_results(results: Mapping[str, Result]) -> ResultComparison:
    """Compare two results of the same features: two classes, two inputs, two models.

    With the same seed and the same Gaussian both results have the same draws, and the errors of the differences are
    paired: smaller than those of two independent runs if the noise of both is alike, as for two similar models or
    inputs, and larger if it is opposite, as for two probabilities that add up to 1. Results without common draws have
    independent errors; `ResultComparison.errors` is the kind of the errors.

    Args:
        results: two results by name; the differences are the first minus the second.

    Returns:
        A `ResultComparison`; print it for a table.

    Raises:
        TypeError: if `results` is not a mapping from names to results.
        ValueError: if there are not two results, or if they differ in examples, features or Gaussians.

    >>> import smoothhess as sh
    >>> f = lambda x: torch.stack([x[:, 0] * x[:, 1], 3 * x[:, 0] * x[:, 1]], 1)
    >>> x, options = torch.zeros(1, 3).double(), {"sigma": 0.5, "n_calls": 64, "control": None}
    >>> cat, dog = (sh.SmoothHess(f).attribute(x, target, **options) for target in (0, 1))
    >>> found = compare_results({"cat": cat, "dog": dog})
    >>> found.errors, round(found.pairs(1)[0][0].difference)
    ('paired', -2)
    """
    if not isinstance(results, Mapping) or not all(isinstance(r, Result) for r in results.values()):
        raise TypeError('compare_results takes results by name, {"cat": a, "dog": b}.')
    if len(results) != 2:
        raise ValueError(f"compare_results compares two results, got {len(results)}. Compare them two by two.")
    (one, other), (a, b) = map(str, results), results.values()
    _refuse_other_features(a, b)
    return ResultComparison((one, other), (a, b), _kind_of_errors(a, b))


def _refuse_other_features(a: Result, b: Result) -> None:
    if len(a) != len(b):
        raise ValueError(f"both results need the same number of examples, got {len(a)} and {len(b)}. Select with [i].")
    if a.feature_shape != b.feature_shape:
        raise ValueError(f"both results need the same features, got shapes {a.feature_shape} and {b.feature_shape}.")
    if a.names is not None and b.names is not None and not a.feature_kind and a.names != b.names:
        raise ValueError("both results need the same features, and their names differ. Explain the same columns.")
    if not _same_groups(a, b):
        raise ValueError(
            "both results need the same groups of features, and their masks or directions differ. Use one feature_mask."
        )
    if hasattr(a, "taylor") != hasattr(b, "taylor"):
        raise ValueError("one result is an attribution, the other a Hessian: their numbers are not comparable.")
    sampled = isinstance(a, SampledResult) and isinstance(b, SampledResult)
    if sampled and not a.gaussian.same_as(b.gaussian):
        raise ValueError(
            f"both results need the same Gaussian, got {a.gaussian_text} and {b.gaussian_text}. For two scales use "
            "smoothhess.sweep and its difference."
        )


def _same_groups(a: Result, b: Result) -> bool:
    """Whether neither result has groups of features, or both have those of the same mask and kind of direction."""
    if a.grouping is None or b.grouping is None:
        return a.grouping is b.grouping
    first, second = a.grouping.mask.cpu(), b.grouping.mask.cpu()
    if first.shape[1] != second.shape[1] or not bool((first == second).all()):
        return False
    if a.feature_kind and a.feature_kind == b.feature_kind:  # the direction of a token depends on its text
        return True
    directions = a.grouping.direction, b.grouping.direction
    if directions[0] is None or directions[1] is None:
        return directions[0] is directions[1]
    return bool(torch.allclose(directions[0].cpu(), directions[1].cpu()))


def _kind_of_errors(a: Result, b: Result) -> str:
    """One of ERRORS."""
    if not isinstance(a, SampledResult) or not isinstance(b, SampledResult):
        return "independent" if isinstance(a, SampledResult) or isinstance(b, SampledResult) else "exact"
    streams = [*zip(a.statistics.stream, b.statistics.stream, strict=True)]
    if all({p.seed for p in first}.isdisjoint(q.seed for q in second) for first, second in streams):
        estimated = a.statistics.drift is not None and b.statistics.drift is not None
        return "bounded" if estimated else "independent"  # τ is estimated from the same directions at every seed
    alike = a.design == b.design and isinstance(a, Interactions) and isinstance(b, Interactions)
    if a.grouping is not None or b.grouping is not None:
        alike = alike and a.grouping is not None and a.grouping.same_as(b.grouping)
    if not alike:
        return "bounded"
    try:
        _change(a, b)
    except ValueError:  # other rows of one stream, or sums of groups whose rows are not kept
        return "bounded"
    return "paired"


def _change(a: Any, b: Any) -> Change:
    """The difference from the rows that both results have, without draws from tail strata."""
    plain = [
        replace(r, estimate=r.estimate.with_statistics(replace(r.statistics, tails=None, rare=None))) for r in (a, b)
    ]
    found = Sweep(tuple(plain)).difference(0, 1)
    slope = a.statistics.gradient.abs() + b.statistics.gradient.abs()  # of which both roundings are a share
    statistics = replace(found.statistics, gradient=slope)
    return replace(found, estimate=found.estimate.with_statistics(statistics))


def _paired(a: Interactions, b: Interactions) -> Variance:
    """The variance of Ĥ_a − Ĥ_b from the rows that both results have."""
    change = _change(a, b)
    paired, own, other = change.noise.of_entries(), a.noise.of_entries(), b.noise.of_entries()
    n_a, n_b = a.statistics.n.double(), b.statistics.n.double()
    longer = torch.maximum(n_a, n_b)
    shared, rest = change.statistics.n / longer, 1 - torch.minimum(n_a, n_b) / longer
    whole_a, whole_b = (torch.tensor(share, device=n_a.device).to(n_a) for share in _unequal_blocks(a, b))

    def each(t: Tensor) -> Tensor:
        return t[:, None, None]

    rows, alone = each(shared) * paired.value, []
    for variance, own_n, other_n, whole in ((own, n_a, n_b, whole_a), (other, n_b, n_a, whole_b)):
        share = each(torch.where(own_n <= other_n, rest, 0.0).maximum(whole))
        alone.append(torch.where(share > 0, share * variance.value, 0.0))
    missed = (_missed(a.noise).sqrt() + _missed(b.noise).sqrt()).square()
    unknown = own.value.isnan() | other.value.isnan()
    value = torch.where(unknown, torch.nan, rows + alone[0] + alone[1] + missed)
    sums = [t.nan_to_num(0.0, 0.0).sum((-1, -2)) for t in (rows, *alone, missed)]
    df = (paired.df, own.df, other.df, torch.minimum(own.df, other.df))
    found, bound = Variance(value, pooled_df(*zip(sums, df, strict=True))), _unpaired(a, b, bounded=True)
    # no shared row shows a kink of the difference: that of an unseen one is at most the sum of both
    unseen = paired.value.isnan() & ~unknown
    df = torch.where(unseen.flatten(1).any(1), bound.df, found.df)
    return Variance(torch.where(unseen, bound.value, found.value), df)


def _unequal_blocks(a: Interactions, b: Interactions) -> tuple[list[float], list[float]]:
    """1 for each example of a, and of b, whose whole variance is part of that of the difference, else 0.

    An incomplete block has more variance than its share of the complete one, of which a quadratic function has none. If
    a has fewer rows, its incomplete block adds Var(Ĥ_a) at most. An incomplete block of the longer result of which the
    shorter has no row is independent of it, and adds Var(Ĥ_b) at most.
    """
    size = find_design(a.design).replicate_rows(a.statistics.rank)
    whole: tuple[list[float], list[float]] = ([], [])
    for ends in zip(a.statistics.n.tolist(), b.statistics.n.tolist(), strict=True):
        short, long = min(ends), max(ends)
        of_short = short < long and short % size > 0
        of_long = short < long and long % size > 0 and -(-short // size) < -(-long // size)
        for found, n in zip(whole, ends, strict=True):
            found.append(float(of_short if n == short else of_long))
    return whole


def _unpaired(a: Result, b: Result, bounded: bool) -> Variance:
    """The variance of the difference of independent estimates, or its bound for any correlation."""
    own, other = a.noise.of_entries(), b.noise.of_entries()
    value = (own.value.sqrt() + other.value.sqrt()).square() if bounded else own.value + other.value
    sums = [v.value.nan_to_num(0.0, 0.0, 0.0).sum((-1, -2)) for v in (own, other)]
    return Variance(value, pooled_df((sums[0], own.df), (sums[1], other.df)))


def _missed(noise: Noise) -> Tensor:
    """Variance of the entries that the rows do not show, (B, d, d)."""
    lengths = noise.estimate.identity.diagonal
    gram = Gram(lengths[..., None], lengths[:, None], noise.estimate.identity.dense())
    found = noise.missed.of_form(gram, lambda w: w[..., None], lambda w: w[:, :, None])
    d = noise.features.k
    return torch.as_tensor(found, dtype=torch.float64, device=lengths.device).expand(len(noise.features), d, d)


def _joined(a: tuple[str, ...] | None, b: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Names of two results as one; both where they differ.

    >>> _joined(("not", "good"), ("so", "good")), _joined(None, ("a", "b"))
    (('not / so', 'good'), ('a', 'b'))
    """
    if a is None or b is None:
        return b if a is None else a
    return tuple(x if x == y else f"{x} / {y}" for x, y in zip(a, b, strict=True))
