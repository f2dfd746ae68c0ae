"""Figs. 3 and 4: interactions between parts of a spirogram with a cough in a network that predicts FEV₁.

Fig. 3: SmoothGrad of each half second, and SmoothHess of each half second with the first one, on a curve with a cough
in its first 4 s and on one without. Fig. 4: the full SmoothHess matrix of the first curve, in a network with narrow
kernels and in one with wide kernels. In addition to the figures, the same quantities are computed on a set of test
curves, to test the paper's statements in numbers:

- reach: the mean distance in time |i − j| of two samples, i ≠ j, weighted by H_ij². Weights are products of two
  independent estimates, so noise does not bias them; weights |H_ij| would sum the noise of 90 000 entries.
- cough share: the share of Σ_k H_0k², k ≥ 1, in intervals in which the glottis is closed. Simulated curves are
  also explained without the cough: same lung, same effort, same intervals.

The paper states neither its narrow width nor σ. σ is chosen here for the neighbourhood that a spirometer cannot
resolve: ATS/ERS allow ± 0.05 L, so the ball has radius 0.05·√300 L, and σ is the one of five candidates with the lowest
P_MSE in that ball, on test curves that are not explained afterwards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from paper.cells import Cells
from paper.experiments import Outcome
from paper.experiments.spirometry_figures import Explained, kernels_figure, samples_figure
from paper.expiration import simulate
from paper.nhanes import nhanes
from paper.options import Options
from paper.spirometry import N_SAMPLES, STEP, Coughing, Spirograms
from paper.spirometry_network import NARROW, WIDE, Fitted, fitted, linear_mse
from paper.tables import print_style, save_figure, write_table
from smoothhess import Interactions, SmoothHess
from smoothhess.evaluate.selection import select

__all__ = ["run"]

NAME = "spirometry"
INTERVAL = 0.5  # s
PER_INTERVAL = round(INTERVAL / STEP)
N_INTERVALS = N_SAMPLES // PER_INTERVAL
EARLY = 4.0  # s, within which the paper's first sample has a cough and its second has none
ACCURACY = 0.05  # L, the tolerance of a spirometer by ATS/ERS
PUBLISHED_MSE = {"train": 0.563, "test": 0.547}
CLEAR = 0.3  # s, minimum duration of the break of the first sample
FAR = 4.5  # s: with ten blocks of narrow kernels, samples farther apart cannot interact
SCALES = (0.25, 0.5, 1.0, 2.0)  # times ACCURACY: further σ at which the reach is measured

Row = dict[str, Any]


@dataclass(frozen=True)
class _Size:
    """Sizes of the experiment."""

    n_curves: int
    n_steps: int
    n_explained: int
    n_calls: int  # for each estimate
    figure_calls: int  # for the curves that are drawn
    n_select: int  # curves on which σ is chosen
    select_calls: int


FULL = _Size(
    n_curves=8_721, n_steps=2_400, n_explained=40, n_calls=800, figure_calls=3_200, n_select=6, select_calls=300
)
QUICK = _Size(n_curves=600, n_steps=60, n_explained=3, n_calls=300, figure_calls=600, n_select=2, select_calls=150)


def run(options: Options) -> Outcome:
    """Train the two networks, explain curves, write figures and tables."""
    started = time.perf_counter()
    size = QUICK if options.quick else FULL
    n_explained = options.points or size.n_explained
    spirograms = _spirograms(options, size.n_curves)
    wide, narrow = (fitted(spirograms, kernel, size.n_steps, options) for kernel in (WIDE, NARROW))
    test = spirograms.split()[1]
    settings = {
        "source": spirograms.source,
        "curves": len(spirograms),
        "steps": size.n_steps,
        "seed": options.seed,
        "calls": size.n_calls,
        "calls of the figures": size.figure_calls,
        "calls for sigma": size.select_calls,
        "curves for sigma": size.n_select,
    }
    folder = options.folder(NAME)
    cells = Cells(folder / "cells", settings)

    cough, calm = _samples(test)
    others = [i for i in _early_coughs(test) if i not in (cough, calm)]
    explained = [cough, *others][:n_explained]
    unseen = [i for i in range(len(test)) if i not in (*explained, calm)][-size.n_select :]
    choice = cells.compute({"sigma": "choice"}, lambda: _choose_sigma(wide.network, test.curves[unseen], size, options))
    sigma = choice["best"]

    explainer = _Explainer(test, sigma, options, folder, cells, size)
    samples = [explainer.sample(wide, i, name) for name, i in (("coughing", cough), ("calm", calm))]
    dense = {fit.kernel: explainer.result(fit, cough, "coughing").hessian[0].cpu() for fit in (narrow, wide)}
    rows = [
        explainer.row(wide, narrow, i) for i in tqdm(explained, desc="test curves", disable=not options.show_progress)
    ]

    scales = [explainer.scale_row(wide, narrow, cough, scale * ACCURACY) for scale in SCALES]
    profiles = {
        kernel: torch.tensor([row.pop(f"profile, kernel {kernel}") for row in rows]) for kernel in (NARROW, WIDE)
    }
    lines = [*findings(rows, wide, narrow, choice, spirograms, samples), _scales_told(scales)]
    heading = ["# Spirometry", "", *options.made_by(NAME, time.perf_counter() - started), ""]
    heading += [f"- {line}" for line in lines]
    files = write_table(rows, folder, "curves", heading)
    files += write_table(_interval_rows(samples), folder, "intervals", ["# Spirometry: the two curves of the figure"])
    files += write_table(scales, folder, "scales", ["# Spirometry: reach of the coughing curve's pairs at other σ"])
    files += write_table(choice["rows"], folder, "sigma", ["# Spirometry: choice of σ"])
    with print_style():
        title = f"{spirograms.source}, kernel {WIDE}, σ = {sigma:.3g} L"
        files += save_figure(samples_figure(samples, title, INTERVAL), folder, "samples")
        drawn = kernels_figure(dense, profiles, samples[0], f"{spirograms.source}, σ = {sigma:.3g} L")
        files += save_figure(drawn, folder, "kernels")
    return Outcome(NAME, files, lines)


def _spirograms(options: Options, n: int) -> Spirograms:
    """NHANES if it is requested by name, else simulated curves."""
    return nhanes(options.data, seed=options.seed) if options.dataset == "nhanes" else simulate(n, options.seed)


def _early_coughs(test: Spirograms) -> list[int]:
    """Curves with a break between the first interval and 4 s."""
    return [
        i
        for i, coughs in enumerate(test.coughs)
        if any(cough.start < EARLY for cough in coughs) and not any(cough.overlaps(0, INTERVAL) for cough in coughs)
    ]


def _samples(test: Spirograms) -> tuple[int, int]:
    """The first test curve with one clear break, in its first 4 s; and the first one without any before 4 s."""
    cough = [
        i
        for i in _early_coughs(test)
        if len(test.coughs[i]) == 1 and test.coughs[i][0].end - test.coughs[i][0].start > CLEAR
    ]
    calm = (~test.cough_within(EARLY)).nonzero()[:, 0].tolist()
    if not cough or not calm:
        raise ValueError(
            f"expected a test curve with one break before {EARLY:g} s and one without, got {len(cough)} and {len(calm)}"
            f" among {len(test)}; use more curves."
        )
    return cough[0], calm[0]


def _choose_sigma(network: nn.Module, curves: Tensor, size: _Size, options: Options) -> dict[str, Any]:
    chosen = select(
        network,
        curves.to(options.device),
        0,
        radius=ACCURACY * math.sqrt(N_SAMPLES),
        n_calls=size.select_calls,
        n_samples=300,
        seed=options.seed,
        show_progress=options.show_progress,
    )
    columns = (chosen.values, chosen.scores, chosen.stderr, chosen.difference, chosen.difference_stderr)
    names = ("σ (L)", "P_MSE (L²)", "standard error", "less that of the best", "paired standard error")
    rows = [dict(zip(names, values, strict=True)) for values in zip(*(c.tolist() for c in columns), strict=True)]
    return {"best": chosen.best, "rows": rows, "at edge": chosen.at_edge, "points": len(curves)}


@dataclass(frozen=True)
class _Explainer:
    """The explained curves, the settings, and the folder of the results."""

    test: Spirograms
    sigma: float
    options: Options
    folder: Path
    cells: Cells
    size: _Size

    def _attribute(
        self, network: nn.Module, curve: Tensor, seed: int, sigma: float | None = None, n_calls: int | None = None
    ) -> Interactions:
        sigma, n_calls = sigma or self.sigma, n_calls or self.size.n_calls
        x = curve[None].to(self.options.device)
        return SmoothHess(network).attribute(x, 0, sigma=sigma, n_calls=n_calls, seed=seed)

    def result(self, fit: Fitted, i: int, name: str) -> Interactions:
        """The estimate of a curve of the figures, stored as a file."""
        path = self.folder / "cells" / f"{name}-kernel-{fit.kernel}.safetensors"
        if path.exists():
            return Interactions.load(path)
        curve, seed = self.test.curves[i], self.options.seed
        found = self._attribute(fit.network, curve, seed, n_calls=self.size.figure_calls)
        found.save(path)
        return found

    def sample(self, fit: Fitted, i: int, name: str) -> Explained:
        """A curve of Fig. 3."""
        result = self.result(fit, i, name)
        slopes, slope_errors, row, row_errors = _intervals(result)
        return Explained(
            name=name,
            curve=self.test.curves[i],
            coughs=self.test.coughs[i],
            fev1=float(self.test.fev1[i]),
            predicted=float(result.output[0]),
            slopes=slopes,
            slope_errors=slope_errors,
            row=row,
            row_errors=row_errors,
            n_calls=int(result.n_calls[0]),
            relative_error=float(result.relative_error[0]),
        )

    def row(self, wide: Fitted, narrow: Fitted, i: int) -> Row:
        """One test curve: reach in both networks, and the location of the interactions with the first interval."""
        seed = 1_000_003 * self.options.seed + 2 * i  # each curve has separate draws
        row: Row = {"curve": i, "coughs": _told(self.test.coughs[i])}
        for fit in (narrow, wide):
            row |= self.cells.compute(
                {"kernel": fit.kernel, "curve": i},
                lambda fit=fit: self._reach(fit, self.test.curves[i], seed, row_too=fit is wide),
            )
        shut = _shut(self.test.coughs[i])
        row |= _shares(row.pop("row"), shut, "")
        if self.test.without_coughs is not None:
            without = self.test.without_coughs[i]
            found = self.cells.compute(
                {"kernel": wide.kernel, "curve": i, "cough": "none"},
                lambda: _intervals_record(self._attribute(wide.network, without, seed)),
            )
            row |= _shares(found, shut, ", no cough")
            del row["cough share of intervals, no cough"]  # the same intervals
        return row

    def scale_row(self, wide: Fitted, narrow: Fitted, i: int, sigma: float) -> Row:
        """The reach of one curve at another σ."""
        row: Row = {"σ (L)": sigma}
        for fit in (narrow, wide):
            row |= self.cells.compute(
                {"kernel": fit.kernel, "curve": i, "sigma": sigma},
                lambda fit=fit: {f"reach, kernel {fit.kernel} (s)": reach(self._product(fit, i, sigma))},
            )
        return row

    def _product(self, fit: Fitted, i: int, sigma: float) -> Tensor:
        seeds = (self.options.seed, self.options.seed + 1)
        return _crossed(*(self._attribute(fit.network, self.test.curves[i], seed, sigma) for seed in seeds))

    def _reach(self, fit: Fitted, curve: Tensor, seed: int, *, row_too: bool) -> Row:
        first, second = (self._attribute(fit.network, curve, s) for s in (seed, seed + 1))
        weights = _crossed(first, second)
        found: Row = {
            f"reach, kernel {fit.kernel}": reach(weights),
            f"beyond {FAR:g} s, kernel {fit.kernel}": share_beyond(weights, FAR),
            f"relative error, kernel {fit.kernel}": float(first.relative_error[0]),
            f"profile, kernel {fit.kernel}": profile(weights),
        }
        return {**found, "row": _intervals_record(first)} if row_too else found


def _crossed(first: Interactions, second: Interactions) -> Tensor:
    """H_ij of one estimate times that of another with other draws: H_ij² on average, (300, 300)."""
    a, b = (result.unshrunk().hessian[0].double().cpu() for result in (first, second))
    return a * b


def _distance() -> Tensor:
    """|i − j| in seconds, (300, 300)."""
    t = STEP * torch.arange(N_SAMPLES, dtype=torch.float64)
    return (t[:, None] - t).abs()


def reach(weights: Tensor) -> float:
    """Mean distance in time of two different samples, weighted, in seconds.

    >>> round(reach(torch.ones(300, 300)), 3)  # equal weights
    5.017
    """
    off = weights.double().clone().fill_diagonal_(0)
    return float((off * _distance()).sum() / off.sum())


def profile(weights: Tensor) -> list[float]:
    """The share of the weight of pairs that are at most 1, 2, … 299 samples apart.

    >>> weights = torch.zeros(300, 300)
    >>> weights[5, 7] = weights[7, 5] = 1
    >>> profile(weights)[:3]
    [0.0, 1.0, 1.0]
    """
    lags = torch.stack([weights.diagonal(k).sum() + weights.diagonal(-k).sum() for k in range(1, len(weights))])
    return (lags.cumsum(0) / lags.sum()).tolist()


def share_beyond(weights: Tensor, seconds: float) -> float:
    """The share of the weight of pairs that are farther apart than `seconds`.

    >>> share_beyond(torch.ones(300, 300), 15.0)
    0.0
    """
    off = weights.double().clone().fill_diagonal_(0)
    return float(off[_distance() > seconds].sum() / off.sum())


def _mask() -> Tensor:
    return torch.arange(N_SAMPLES) // PER_INTERVAL


def _intervals(result: Interactions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """SmoothGrad of each interval and its interaction with the first one, each with its standard error, (30,)."""
    grouped = result.groups(_mask().to(result.device))
    first = grouped.row(0)
    found = (grouped.gradient[0], grouped.gradient_stderr[0], first.value[0], first.stderr[0])
    slopes, slope_errors, row, row_errors = (x.detach().cpu().double() for x in found)
    return slopes, slope_errors, row, row_errors


def _intervals_record(result: Interactions) -> Row:
    names = ("slopes", "slope errors", "row", "row errors")
    return {name: x.tolist() for name, x in zip(names, _intervals(result), strict=True)}


def _shut(coughs: Sequence[Coughing]) -> list[int]:
    """Intervals after the first in which the flow is interrupted."""
    return [
        k for k in range(1, N_INTERVALS) if any(cough.overlaps(k * INTERVAL, (k + 1) * INTERVAL) for cough in coughs)
    ]


def _shares(found: Row, shut: list[int], tag: str) -> Row:
    """Location of a curve's interactions with the first interval, from squares minus their variance."""
    value, error = (torch.tensor(found[name], dtype=torch.float64) for name in ("row", "row errors"))
    energy = value.square() - error.square()
    slopes = torch.tensor(found["slopes"], dtype=torch.float64).abs()
    return {
        f"cough share{tag}": float(energy[shut].sum() / energy[1:].sum()),
        f"cough share of intervals{tag}": len(shut) / (N_INTERVALS - 1),
        f"strongest at cough{tag}": int(1 + int(value[1:].abs().argmax()) in shut),
        f"SmoothGrad share of the first{tag}": float(slopes[0] / slopes.sum()),
    }


def _told(coughs: Sequence[Coughing]) -> str:
    return ", ".join(f"{cough.start:g}–{cough.end:g} s" for cough in coughs)


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error; NaN of one value."""
    x = torch.tensor(list(values), dtype=torch.float64)
    return float(x.mean()), float(x.std() / math.sqrt(len(x))) if len(x) > 1 else math.nan


def _pm(values: Sequence[float], digits: int = 2) -> str:
    mean, error = _mean(values)
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def findings(
    rows: Sequence[Row],
    wide: Fitted,
    narrow: Fitted,
    choice: dict[str, Any],
    spirograms: Spirograms,
    samples: Sequence[Explained],
) -> list[str]:
    """Summarise the experiment in numbers."""

    def of(name: str, times: float = 1.0) -> list[float]:
        return [times * row[name] for row in rows]

    far = f"reach, kernel {WIDE}", f"reach, kernel {NARROW}"
    beyond = f"beyond {FAR:g} s, kernel {WIDE}", f"beyond {FAR:g} s, kernel {NARROW}"
    apart = [a - b for a, b in zip(of(far[0]), of(far[1]), strict=True)]
    lines = [
        f"data: {spirograms.source}; {spirograms.note}",
        *(
            f"network: {fit.words}; train {fit.train_mse:.3g}, test before calibration of its batch-norms "
            f"{fit.uncalibrated_mse:.3g} (paper, other data: {PUBLISHED_MSE['train']} / {PUBLISHED_MSE['test']})"
            f"{'; trained on ' + fit.machine if fit.machine else ''}"
            for fit in (wide, narrow)
        ),
        f"a linear regression on the same curves: test MSE {linear_mse(spirograms):.3g} L²",
        f"σ = {choice['best']:.3g} L by P_MSE in the ball of radius {ACCURACY:g}·√{N_SAMPLES} L on {choice['points']} "
        f"curves{'; at the edge of the grid' if choice['at edge'] else ''}",
        f"reach (H²-weighted |i − j|, {len(rows)} curves): kernel {WIDE} {_pm(of(far[0]), 3)} s, kernel {NARROW} "
        f"{_pm(of(far[1]), 3)} s, paired difference {_pm(apart, 3)} s; pairs farther apart than {FAR:g} s have "
        f"{_pm(of(beyond[0], 100), 1)} % and {_pm(of(beyond[1], 100))} % of the weight",
        f"share of the first interval's interactions (H²) that lies on the cough: {_pm(of('cough share'), 3)}, "
        f"{_pm(of('cough share of intervals'), 3)} of the intervals; strongest there in "
        f"{sum(of('strongest at cough')):g} of {len(rows)} curves",
    ]
    if "cough share, no cough" in rows[0]:
        gained = [a - b for a, b in zip(of("cough share"), of("cough share, no cough"), strict=True)]
        first = "SmoothGrad share of the first"
        lowered = [a - b for a, b in zip(of(first), of(first + ", no cough"), strict=True)]
        lines += [
            f"the same intervals of the same efforts without the cough: {_pm(of('cough share, no cough'), 3)}, paired "
            f"difference {_pm(gained, 3)}; strongest there in {sum(of('strongest at cough, no cough')):g} of "
            f"{len(rows)}",
            f"the first interval's share of Σ|SmoothGrad|: {_pm(of(first), 4)} with the cough, "
            f"{_pm(of(first + ', no cough'), 4)} without, paired difference {_pm(lowered, 4)}",
        ]
    for sample in samples:
        k = sample.strongest
        lines.append(
            f"figure, {sample.name} curve (breaks: {_told(sample.coughs) or 'none'}): strongest interaction with the "
            f"first interval at {k * INTERVAL:g}–{(k + 1) * INTERVAL:g} s, {sample.row[k]:.3g} ± "
            f"{sample.row_errors[k]:.2g} L/L²; FEV₁ {sample.fev1:.2f} L, predicted {sample.predicted:.2f} L; "
            f"{sample.n_calls} calls, relative error {sample.relative_error:.2g}"
        )
    return lines


def _scales_told(scales: Sequence[Row]) -> str:
    """The comparison of kernels at other σ."""
    wide, narrow = f"reach, kernel {WIDE} (s)", f"reach, kernel {NARROW} (s)"
    text = ", ".join(f"{row[wide]:.2f} and {row[narrow]:.2f} s at σ = {row['σ (L)']:g} L" for row in scales)
    return f"reach on the coughing curve of the figure at other σ, kernels {WIDE} and {NARROW}: {text}"


def _interval_rows(samples: Sequence[Explained]) -> list[Row]:
    return [
        {
            "curve": sample.name,
            "from (s)": k * INTERVAL,
            "to (s)": (k + 1) * INTERVAL,
            "SmoothGrad (L/L)": float(sample.slopes[k]),
            "its standard error": float(sample.slope_errors[k]),
            "interaction with the first (L/L²)": float(sample.row[k]),
            "its s.e.": float(sample.row_errors[k]),
        }
        for sample in samples
        for k in range(N_INTERVALS)
    ]
