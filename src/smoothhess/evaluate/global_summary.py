"""Interactions over a data set: mean H, mean |H| and E[H²] of every pair, with standard errors over records.

Explaining the records belongs in `global_interactions.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from smoothhess.estimate import student_t
from smoothhess.estimate.statistics import ESTIMATOR_VERSION
from smoothhess.result.combine import agreed
from smoothhess.result.false_discoveries import benjamini_hochberg
from smoothhess.result.features import name_each
from smoothhess.result.files import REMEDY, Parts, read_checked, write_atomically
from smoothhess.result.intervals import Estimate, plus_minus
from smoothhess.result.pairs import Pair, labels_of
from smoothhess.result.tensor_schema import check_tensors, naming

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

FORMAT, VERSION = "smoothhess.global", "1"
_MOMENTS = ("mean", "square", "abs", "abs_upper", "noise")
SUMMARIES = ("square", "abs", "mean")  # summaries that pairs can be ranked by
ROUNDING = 64  # machine epsilons of the largest entry below which the sign of an entry counts as 0
BEYOND = 1e100  # limit of t-values, which are infinite for a standard error of exactly zero


def sign(numbers: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """Sign of each entry of (n, F, F); 0 for rounding errors, whose sign would depend on the batch size."""
    size = torch.maximum(numbers.abs().amax((-1, -2), keepdim=True), other.abs().amax((-1, -2), keepdim=True))
    return torch.where(numbers.abs() > ROUNDING * torch.finfo(dtype).eps * size, numbers.sign(), 0.0)


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean and summed squared deviations of one matrix per record, (F, F) each, float64."""

    n: int
    mean: Tensor
    squares: Tensor

    @staticmethod
    def of(values: Tensor) -> Moments:
        """From the matrices of n records, (n, F, F)."""
        mean = values.mean(0)
        return Moments(len(values), mean, (values - mean).square().sum(0))

    def merge(self, other: Moments) -> Moments:
        """Moments of the union of both sets of records, without cancellation (Chan, Golub & LeVeque)."""
        n, step = self.n + other.n, other.mean - self.mean
        squares = self.squares + other.squares + step.square() * (self.n * other.n / n)
        return Moments(n, self.mean + step * (other.n / n), squares)

    @property
    def estimate(self) -> Estimate:
        """The mean with its standard error over records, which is infinite for a single record."""
        spread = self.squares / (self.n - 1) if self.n > 1 else torch.full_like(self.squares, torch.inf)
        df = torch.tensor([self.n - 1.0], dtype=torch.float64, device=self.mean.device)
        return Estimate(self.mean, (spread / self.n).sqrt(), df)


@dataclass(frozen=True, eq=False, repr=False)
class GlobalInteractions:
    """Interactions between pairs of features (or groups) over a data set, with standard errors over records.

    Returned by `global_interactions`. Every record is explained twice from independent draws, and the two estimates H′
    and H″ remove the bias that Monte-Carlo noise would cause:

    - `mean`: mean H, from (H′ + H″)/2; unbiased. Interactions of opposite sign cancel.
    - `mean_square`: E[H²], from H′H″; unbiased for any noise level, and nonzero exactly for pairs that interact
      somewhere (Friedman & Popescu's definition).
    - `mean_abs`: mean |H|. No unbiased estimate exists: this one, from sign(H′)H″, has mean zero where H is zero and is
      otherwise biased downwards, while `mean_abs_upper`, the mean of |H′ + H″|/2, is biased upwards.

    Each is an `Estimate` of shape (F, F). `noise` is the mean Monte-Carlo variance of a record's (H′ + H″)/2.
    """

    moments: dict[str, Moments]  # "mean", "square", "abs", "abs_upper", "noise"
    scales: Tensor  # (F,) typical displacement of each feature (σ), float64 on the CPU
    feature_shape: tuple[int, ...]
    segments: tuple[tuple[int, int, int], ...]  # (seed, first record, last + 1) of the ranges of records in this result
    method: str
    n_calls: int  # gradients at perturbed inputs, summed over records
    n_passes: float  # total cost in units of a gradient call
    estimator_version: int = ESTIMATOR_VERSION  # of the estimator that explained the records
    names: tuple[str, ...] | None = None  # names of the features

    def __len__(self) -> int:
        """Number of records."""
        return self.moments["mean"].n

    @property
    def mean(self) -> Estimate:
        """Mean H."""
        return self.moments["mean"].estimate

    @property
    def mean_square(self) -> Estimate:
        """E[H²]; estimates of zero may be negative."""
        return self.moments["square"].estimate

    @property
    def mean_abs(self) -> Estimate:
        """Mean |H|, biased downwards: zero where H is zero, too small where the noise hides the sign."""
        return self.moments["abs"].estimate

    @property
    def mean_abs_upper(self) -> Estimate:
        """Mean |H|, biased upwards: the noise of each record counts as interaction."""
        return self.moments["abs_upper"].estimate

    @property
    def noise(self) -> Tensor:
        """Monte-Carlo variance of a record's estimate, averaged over records, (F, F)."""
        return self.moments["noise"].mean

    @property
    def noise_share(self) -> Tensor:
        """Share of the mean squared estimate that is Monte-Carlo noise, (F, F); 0 where the estimate is 0."""
        energy = self.moments["square"].mean + self.noise  # the mean over records of ((H′ + H″)/2)²
        return torch.where(energy > 0, self.noise / energy.clamp_min(torch.finfo(torch.float64).tiny), 0.0)

    @property
    def monte_carlo_stderr(self) -> Tensor:
        """Monte-Carlo part of the standard error of `mean`, for fixed records, (F, F)."""
        return (self.noise / len(self)).sqrt()

    # --- pairs, tables, merging and files -------------------------------------------------------------------------

    def top_pairs(
        self,
        k: int = 10,
        names: Sequence[str] | None = None,
        *,
        by: str = "square",
        q: float = 0.05,
        level: float = 0.95,
        scales: Tensor | None = None,
    ) -> list[Pair]:
        """The k strongest pairs i < j with confidence intervals over records and q-values.

        Args:
            k: number of pairs.
            names: names of the features; None: those of this result.
            by: the summary that is ranked, tested against zero and reported as value: "square" (E[H²]) and "abs"
                (`mean_abs`) with one-sided tests, or "mean" (mean H) with a two-sided test.
            q: false discovery rate among the pairs marked significant (Benjamini–Hochberg over all pairs).
            level: confidence level of the intervals.
            scales: typical displacement of each feature, for `effect`; the σ of the Gaussian when None.

        Returns:
            A list of Pair. `effect` is in units of the output: √E[H²], mean |H| or mean H times the scales of both
            features.

        Raises:
            ValueError: if an argument is out of range, or if names or scales have another length.
        """
        if by not in SUMMARIES:
            raise ValueError(f"by must be {', '.join(map(repr, SUMMARIES))}, got {by!r}.")
        if k < 1 or not 0 < q < 1:
            raise ValueError(f"expected k ≥ 1 and 0 < q < 1, got k={k}, q={q}.")
        size = len(self.scales)
        labels = self._labels(names)
        moves = self.scales if scales is None else torch.as_tensor(scales, dtype=torch.float64).reshape(-1).cpu()
        if len(moves) != size:
            raise ValueError(f"expected one scale per feature, {size}, got {len(moves)}.")
        i, j = torch.triu_indices(size, size, 1)
        frozen = (moves[i] == 0) | (moves[j] == 0)  # not ranked
        i, j = i[~frozen], j[~frozen]
        if not len(i):
            return []
        estimate = self.moments[by].estimate
        value, stderr = (x.cpu()[i, j] for x in (estimate.value, estimate.stderr))
        p = _p_values(value, stderr, estimate.df.cpu(), one_sided=by != "mean")
        q_values = benjamini_hochberg(p)
        reach = torch.where(stderr > 0, student_t.quantile(level, estimate.df.cpu()) * stderr, 0.0)
        move = moves[i] * moves[j]
        effect = value.clamp_min(0).sqrt() * move if by == "square" else value * move
        strength = value * move.square() if by == "square" else effect.abs() if by == "mean" else effect
        chosen = strength.argsort(descending=True, stable=True)[:k]
        columns = [x[chosen].tolist() for x in (i, j, value, stderr, value - reach, value + reach, effect, q_values)]
        return [
            Pair(a, b, (labels(a), labels(b)), v, s, low, high, e, qv, qv <= q)
            for a, b, v, s, low, high, e, qv in zip(*columns, strict=True)
        ]

    def _labels(self, names: Sequence[str] | None) -> Callable[[int], str]:
        return labels_of(self.names if names is None else names, len(self.scales), self.feature_shape)

    def to_records(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """One dictionary per pair i ≤ j, for pandas.DataFrame(…) or a csv writer."""
        size, labels = len(self.scales), self._labels(names)
        columns = {"mean": "mean", "mean_abs": "abs", "mean_abs_upper": "abs_upper", "mean_square": "square"}
        tables: dict[str, Tensor] = {}
        for name, kept in columns.items():
            estimate = self.moments[kept].estimate
            tables |= {name: estimate.value, f"{name}_stderr": estimate.stderr}
        tables["noise"] = self.noise
        i, j = torch.triu_indices(size, size)
        listed = {name: table.cpu()[i, j].tolist() for name, table in tables.items()}
        return [
            {"i": a, "j": b, "name_i": labels(a), "name_j": labels(b), **{name: x[row] for name, x in listed.items()}}
            for row, (a, b) in enumerate(zip(i.tolist(), j.tolist(), strict=True))
        ]

    def to_frame(self, names: Sequence[str] | None = None) -> pd.DataFrame:
        """A pandas DataFrame of `to_records`, one row per pair i ≤ j.

        Raises:
            ImportError: if pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("to_frame needs pandas: pip install pandas") from error
        return pd.DataFrame(self.to_records(names))

    def plot(self, **options: Any) -> Axes:
        """Plot the strongest pairs with 95 % intervals over records, with Matplotlib.

        Args:
            **options: `k`, `names`, `by`, `q` of `top_pairs`, and `ax`.

        Returns:
            Matplotlib Axes.
        """
        from smoothhess.view.figures.global_pairs import global_pairs

        return global_pairs(self, **options)

    def report(self, path: str | Path, **options: Any) -> Path:
        """Write a self-contained HTML page with a table of the strongest pairs and a picture of all of them.

        Args:
            path: file to write.
            **options: `names`, `k`, `q` of `top_pairs`, and `title`.

        Returns:
            The path of the file.
        """
        from smoothhess.view.report.global_page import global_page

        return global_page(self, path, **options)

    def merge(self, other: GlobalInteractions) -> GlobalInteractions:
        """Merge the results of two sets of records; equal to one pass over both.

        The parts of a data set need different values of `first_record` (or of the seed), so that no two records share
        draws.

        Raises:
            ValueError: if the two results have other features, methods or versions, or share draws.
        """
        same = self.feature_shape == other.feature_shape and self.method == other.method
        if not same or not torch.equal(self.scales, other.scales):
            raise ValueError(
                "only global interactions of the same features, groups, Gaussian and explainer can be merged, got "
                f"{self.method} of {self.feature_shape} and {other.method} of {other.feature_shape}."
            )
        if self.estimator_version != other.estimator_version:
            raise ValueError(
                f"these results are from versions {self.estimator_version} and {other.estimator_version} of the "
                "estimator, whose numbers are not comparable. Recompute the older one with this version of smoothhess."
            )
        for seed, start, stop in self.segments:
            for theirs, first, last in other.segments:
                if seed == theirs and start < last and first < stop:
                    raise ValueError(
                        f"records {max(start, first)} to {min(stop, last) - 1} of seed {seed} are in both: their draws "
                        "would be counted as independent. Pass a different first_record, or seed, for each part."
                    )
        device = self.mean.value.device
        moved = other.to(device)
        return replace(
            self,
            moments={name: m.merge(moved.moments[name]) for name, m in self.moments.items()},
            segments=_joined(self.segments + other.segments),
            n_calls=self.n_calls + other.n_calls,
            n_passes=self.n_passes + other.n_passes,
            names=agreed([self, other], "names of features", lambda g: g.names),
        )

    def to(self, device: torch.device | str) -> GlobalInteractions:
        """Copy to another device."""
        moments = {n: Moments(m.n, m.mean.to(device), m.squares.to(device)) for n, m in self.moments.items()}
        return replace(self, moments=moments)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, atomically; `load` reads it back exactly."""
        about, tensors = self.parts()
        write_atomically(Path(path), tensors, {"format": FORMAT, "version": VERSION, "about": json.dumps(about)})

    def parts(self) -> Parts:
        """This summary as plain data, for files and stores."""
        tensors = {"scales": self.scales}
        for name, m in self.moments.items():
            tensors |= {f"{name}.mean": m.mean.cpu().contiguous(), f"{name}.squares": m.squares.cpu().contiguous()}
        about = {
            "n": len(self),
            "feature_shape": self.feature_shape,
            "segments": self.segments,
            "method": self.method,
            "n_calls": self.n_calls,
            "n_passes": self.n_passes,
            "estimator_version": self.estimator_version,
        }
        if self.names is not None:
            about["names"] = self.names
        return Parts(about, tensors)

    @staticmethod
    def load(path: str | Path) -> GlobalInteractions:
        """Read a file written by `save`.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is not a complete file of this format and version.
        """
        path = Path(path)
        metadata, tensors = read_checked(path)
        if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
            raise ValueError(
                f"expected a file written by GlobalInteractions.save, version {VERSION}, got format "
                f"{metadata.get('format')}, version {metadata.get('version')} in {path}."
            )
        with naming(path, REMEDY):
            return GlobalInteractions.from_parts(Parts(json.loads(metadata["about"]), tensors))

    @staticmethod
    def from_parts(parts: Parts) -> GlobalInteractions:
        """The inverse of `parts`; raises ValueError if tensors do not fit each other."""
        about, tensors = parts
        table = {f"{name}.{part}": "float64 F F" for name in _MOMENTS for part in ("mean", "squares")}
        check_tensors(tensors, {"scales": "float64 F", **table}, {"F": math.prod(about["feature_shape"])})
        segments = tuple((int(seed), int(start), int(stop)) for seed, start, stop in about["segments"])
        if sum(stop - start for _, start, stop in segments) != about["n"]:
            raise ValueError(f"expected {about['n']} records in its segments")
        return GlobalInteractions(
            moments={n: Moments(about["n"], tensors[f"{n}.mean"], tensors[f"{n}.squares"]) for n in _MOMENTS},
            scales=tensors["scales"],
            feature_shape=tuple(about["feature_shape"]),
            segments=segments,
            method=str(about["method"]),
            n_calls=int(about["n_calls"]),
            n_passes=float(about["n_passes"]),
            estimator_version=int(about.get("estimator_version", 1)),
            names=name_each(about["names"], math.prod(about["feature_shape"])) if "names" in about else None,
        )

    def __repr__(self) -> str:
        size, pairs = len(self.scales), self.top_pairs(8)
        width = max([16, *(len(" × ".join(p.names)) for p in pairs)])
        lines = [
            f"Global interactions of {size} features over {len(self)} record(s), {self.method}, "
            f"{self.n_passes / len(self):.4g} passes per record",
            f"  {'pair':<{width}} √E[H²]·scales   E[H²] ± 95 %           mean H ± 95 %          mean |H|           q",
        ]
        mean, low, high = (e.value for e in (self.mean, self.mean_abs, self.mean_abs_upper))
        reach = self.mean.half_width()
        for pair in pairs:
            a, b = pair.i, pair.j
            square = plus_minus(pair.value, (pair.high - pair.low) / 2)
            signed = plus_minus(float(mean[a, b]), float(reach[a, b]))
            between = f"{max(0.0, float(low[a, b])):.3g} … {float(high[a, b]):.3g}"
            name, strength = " × ".join(pair.names), f"{pair.effect:>11.3g}"
            lines.append(f"  {name:<{width}} {strength}    {square:<22} {signed:<22} {between:<18} {pair.q_value:.2g}")
        rest = size * (size - 1) // 2 - 8
        return "\n".join(lines + ([f"  … and {rest} more"] if rest > 0 else []))


def _joined(segments: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Ranges of records in order, with adjacent ranges merged."""
    found: list[tuple[int, int, int]] = []
    for seed, start, stop in sorted(segments):
        if found and found[-1][0] == seed and found[-1][2] == start:
            found[-1] = (seed, found[-1][1], stop)
        else:
            found.append((seed, start, stop))
    return tuple(found)


def _p_values(value: Tensor, stderr: Tensor, df: Tensor, one_sided: bool) -> Tensor:
    """p-values of the hypothesis that the mean is zero; 1 for an exact zero and for a single record."""
    if float(df) < 1:
        return torch.ones_like(value)
    t = torch.where(value == 0, 0.0, value / stderr).clamp(-BEYOND, BEYOND)
    p = student_t.two_sided_p(t.abs(), df)
    if one_sided:
        p = torch.where(t > 0, p / 2, 1 - p / 2)
    return torch.where(value == 0, 1.0, p)
