"""Comparison of surrogates at several radii by P_MSE, on the same samples.

The estimate of P_MSE itself belongs in `perturbation_mse.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smoothhess.estimate import student_t
from smoothhess.evaluate.ball_samples import BallSamples
from smoothhess.evaluate.perturbation_mse import Surrogate, measure
from smoothhess.linalg.trust_region.check_radius import check_radius
from smoothhess.model.model_call import ModelCall
from smoothhess.result.intervals import half_width


class Average(NamedTuple):
    """A mean over points and its standard error."""

    value: float  # mean over points
    stderr: float  # standard error over points; NaN for a single point


@dataclass(frozen=True, eq=False)
class Difference:
    """P_MSE of one method minus that of another, on the same points and samples."""

    radii: tuple[float, ...]
    value: Tensor  # (R,) mean over points
    stderr: Tensor  # (R,) paired, over points; NaN for a single point
    per_point: Tensor  # (R, B)
    per_point_stderr: Tensor  # (R, B) paired, over samples

    @property
    def p_value(self) -> Tensor:
        """p-value of Student's paired test over points that the mean difference is zero, (R,); NaN for one point."""
        t = torch.where(self.value == 0, 0.0, self.value / self.stderr)
        df = torch.tensor(float(max(self.per_point.shape[1] - 1, 1)))
        return torch.where(self.stderr.isnan(), torch.nan, student_t.two_sided_p(t.nan_to_num(0), df))


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """P_MSE of M methods at R radii around B points, with standard errors. Returned by `compare`.

    There are two kinds of standard error. `stderr` is over the samples in each ball; `mean(…).stderr` is over points.
    All points of one comparison share their samples, so the sampling error of a mean over points, `sampling_stderr`,
    decreases with n_samples but not with the number of points.
    """

    methods: tuple[str, ...]
    radii: tuple[float, ...]
    errors: Tensor  # (M, R, B) mean of (f̃ − f)² over the samples
    covariance: Tensor  # (R, B, M, M) covariance of `errors` between methods, over samples
    mean_covariance: Tensor  # (R, M, M) covariance of their means over points, over samples
    n_samples: int  # forward passes per radius and point, for any number of methods
    sampling: str
    seeds: tuple[int, ...]

    def __len__(self) -> int:
        return self.errors.shape[2]

    @property
    def stderr(self) -> Tensor:
        """Standard error of `errors` over samples, (M, R, B)."""
        return _root_diagonal(self.covariance).permute(2, 0, 1)

    @property
    def sampling_stderr(self) -> Tensor:
        """Standard error over samples of the means over points, (M, R)."""
        return _root_diagonal(self.mean_covariance).T

    def mean(self, name: str, radius: float) -> Average:
        """Mean over points and its standard error over points."""
        value, stderr = _over_points(self.errors[self._method(name), self._radius(radius)])
        return Average(float(value), float(stderr))

    def difference(self, a: str, b: str) -> Difference:
        """P_MSE of `a` minus P_MSE of `b` at each radius; negative where `a` is the better surrogate."""
        i, j = self._method(a), self._method(b)
        per_point = self.errors[i] - self.errors[j]  # (R, B)
        value, stderr = _over_points(per_point)
        c = self.covariance
        variance = c[..., i, i] + c[..., j, j] - 2 * c[..., i, j]
        return Difference(self.radii, value, stderr, per_point, variance.clamp_min(0).sqrt())

    @staticmethod
    def cat(tables: Sequence[Comparison]) -> Comparison:
        """Concatenate comparisons of the same methods on different points; each must have its own seed.

        >>> f = lambda x: x.square().sum(1)
        >>> zero = lambda points: points.new_zeros(points.shape[:2])
        >>> parts = [compare(f, torch.zeros(2, 3), {"zero": zero}, 1.0, n_samples=100, seed=s) for s in (0, 1)]
        >>> len(Comparison.cat(parts))
        4
        """
        if not tables:
            raise ValueError("expected at least one comparison, got none.")
        first = tables[0]
        if len({(t.methods, t.radii, t.n_samples, t.sampling) for t in tables}) != 1:
            raise ValueError("comparisons can be concatenated only when methods, radii, n_samples and sampling agree.")
        seeds = tuple(s for t in tables for s in t.seeds)
        if len(set(seeds)) != len(seeds):
            raise ValueError(
                f"these comparisons share draws (seeds {seeds}), so the error of their mean cannot be computed. Pass "
                "different seeds to compare(…)."
            )
        shares = [len(t) / sum(map(len, tables)) for t in tables]
        weighted = [share**2 * t.mean_covariance for share, t in zip(shares, tables, strict=True)]
        return Comparison(
            first.methods,
            first.radii,
            torch.cat([t.errors for t in tables], 2),
            torch.cat([t.covariance for t in tables], 1),
            torch.stack(weighted).sum(0),
            first.n_samples,
            first.sampling,
            seeds,
        )

    def to_markdown(self, against: str | None = None) -> str:
        """A table of methods by radii, mean ± half of its 95 % interval.

        Args:
            against: name of a reference method; adds the paired difference of each other method to it.
        """
        rows = [
            ["P_MSE", *(f"r = {r:g}" for r in self.radii)],
            ["---"] * (len(self.radii) + 1),
            *self._cells(against),
        ]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    def __repr__(self) -> str:
        where = "uniform in the ball" if self.sampling == "ball" else "radius uniform, as in the paper's tables"
        seeds = f"seed {self.seeds[0]}" if len(self.seeds) == 1 else f"{len(self.seeds)} seeds"
        rows = [["", *(f"r = {r:g}" for r in self.radii)], *self._cells()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            f"P_MSE of {len(self.methods)} method(s) around {len(self)} point(s), {self.n_samples} samples each "
            f"({where}), {seeds}",
            *("  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows),
        ]
        if len(self) == 1:
            return "\n".join([*lines, "  ± half of a 95 % interval over samples"])
        share = (self.sampling_stderr / self.errors.mean(2)).nan_to_num(0).max()
        note = f"  ± half of a 95 % interval over points; the sampling error is at most {float(share):.1%} of a mean"
        return "\n".join([*lines, note])

    def _cells(self, against: str | None = None) -> list[list[str]]:
        """Name and mean ± half of its 95 % interval at each radius; over samples if there is only one point."""
        table, df = [], len(self) - 1 if len(self) > 1 else math.inf
        if against is not None:
            self._method(against)
        for m, name in enumerate(self.methods):
            averages = [self.mean(name, r) for r in self.radii]
            if len(self) == 1:
                averages = [Average(a.value, float(self.stderr[m, i, 0])) for i, a in enumerate(averages)]
            cells = [f"{a.value:.3g} ± {half_width(a.stderr, df):.1g}" for a in averages]
            if against is not None and name != against:
                apart = self.difference(name, against)
                stderr = apart.stderr if len(self) > 1 else apart.per_point_stderr[:, 0]
                found = zip(cells, apart.value.tolist(), stderr.tolist(), strict=True)
                cells = [f"{c} ({v:+.2g} ± {half_width(e, df):.1g})" for c, v, e in found]
            table.append([name, *cells])
        return table

    def _method(self, name: str) -> int:
        if name not in self.methods:
            raise ValueError(f"expected one of the methods {', '.join(map(repr, self.methods))}, got {name!r}.")
        return self.methods.index(name)

    def _radius(self, radius: float) -> int:
        if radius not in self.radii:
            raise ValueError(f"expected one of the radii {', '.join(f'{r:g}' for r in self.radii)}, got {radius!r}.")
        return self.radii.index(radius)


def compare(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    surrogates: Mapping[str, Surrogate],
    radii: float | Sequence[float],
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    n_samples: int = 10_000,
    sampling: str = "ball",
    internal_batch_size: int | None = None,
    seed: int = 0,
) -> Comparison:
    """P_MSE of several surrogates {name: surrogate} at one or several radii, from one set of model calls.

    All methods are evaluated at the same points, so their differences are paired, and all radii use the same
    displacements, scaled. Each radius costs n_samples forward passes per point, since the importance weights for
    sharing points between radii would grow exponentially with the dimension.

    Args:
        forward_func, inputs, target, additional_forward_args: see `perturbation_mse`.
        surrogates: the surrogates by name, as for `perturbation_mse`.
        radii: one or several radii, each once.
        n_samples, sampling, internal_batch_size, seed: see `perturbation_mse`.

    Returns:
        A Comparison of all surrogates at all radii.

    Raises:
        ValueError: if there is no surrogate or no radius, or if a surrogate has other inputs.

    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
    >>> x = torch.randn(5, 4).double()
    >>> from smoothhess import SmoothHess
    >>> result = SmoothHess(net).attribute(x, radius=0.5, n_calls=200)
    >>> table = compare(net, x, {"order 2": result.taylor(), "order 1": result.taylor(1)}, [0.1, 0.5], n_samples=500)
    >>> table.errors.shape
    torch.Size([2, 2, 5])
    >>> bool((table.difference("order 2", "order 1").value < 0).all())
    True
    """
    if not isinstance(surrogates, Mapping) or not surrogates:
        raise ValueError(
            f"surrogates must be a mapping {{name: surrogate}} with at least one, got {type(surrogates).__name__}"
            f"{' without entries' if isinstance(surrogates, Mapping) else ''}."
        )
    chosen = as_radii(radii)
    call = ModelCall(forward_func, inputs, target, additional_forward_args, internal_batch_size)
    moments = measure(call, surrogates, chosen, BallSamples(n_samples, sampling, seed))
    mean = torch.stack([m.mean for m in moments])  # (R, B + 1, M)
    covariance = torch.stack([m.covariance_of_mean for m in moments])  # (R, B + 1, M, M)
    return Comparison(
        tuple(surrogates),
        chosen,
        mean[:, :-1].permute(2, 0, 1),
        covariance[:, :-1],
        covariance[:, -1],
        int(n_samples),
        sampling,
        (int(seed),),
    )


def as_radii(radii: Any) -> tuple[float, ...]:
    """Validate one number or a sequence of numbers as a tuple of distinct positive radii."""
    listed = radii.tolist() if hasattr(radii, "tolist") else radii
    listed = list(listed) if isinstance(listed, Sequence) and not isinstance(listed, str) else [listed]
    for radius in listed:
        check_radius(radius)
    chosen = tuple(map(float, listed))
    if not chosen or len(set(chosen)) != len(chosen):
        raise ValueError(f"expected at least one radius and each once, got {list(chosen)}.")
    return chosen


def _root_diagonal(covariance: Tensor) -> Tensor:
    return covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()


def _over_points(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over the last dimension and its standard error; NaN for a single value."""
    points = values.shape[-1]
    spread = values.std(-1) if points > 1 else torch.full_like(values[..., 0], torch.nan)
    return values.mean(-1), spread / points**0.5
