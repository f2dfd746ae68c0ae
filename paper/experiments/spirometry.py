"""Figs. 3 and 4: interactions between parts of a spirogram with a cough in a network that predicts FEV₁.

Fig. 3: SmoothGrad of each half second, and SmoothHess of each half second with the first one, on a curve with a cough
in its first 4 s and on one without. Fig. 4: the full SmoothHess matrix of the first curve, in a network with narrow
kernels and in one with wide kernels. In addition to the figures, the same quantities are computed on a set of test
curves, for two trainings of each network, to test the paper's statements in numbers:

- reach: the mean distance in time |i − j| of two samples, i ≠ j, weighted by H_ij². Weights are products of two
  independent estimates, so noise does not bias them; weights |H_ij| would sum the noise of 90 000 entries.
- cough share: the share of Σ_k H_0k², k ≥ 1, in intervals in which the flow is interrupted, that sum itself, and the
  first interval's share of Σ_k |SmoothGrad_k|. Simulated curves are also explained without the cough: same lung, same
  effort, same intervals. The differences are paired, for all curves and for those with a cough before and after 1 s.
- calm curves, whose first cough comes after 4 s, of other visits.
- prediction: errors of each network, paired with those of a linear regression, which has no interactions.

The paper states neither its narrow width nor σ. σ is chosen here for the neighbourhood that a spirometer cannot
resolve: ATS/ERS allow ± 0.05 L, so the ball has radius 0.05·√300 L, and σ is the one of five candidates with the lowest
P_MSE in that ball, on test curves that are not explained afterwards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binomtest
from torch import Tensor, nn
from tqdm import tqdm

from paper.cells import Cells
from paper.experiments import Outcome
from paper.experiments.spirometry_figures import Explained, kernels_figure, samples_figure
from paper.expiration import simulate
from paper.nhanes import nhanes
from paper.options import Options
from paper.spirometry import N_SAMPLES, STEP, Coughing, Spirograms
from paper.spirometry_network import NARROW, WIDE, Fitted, Regression, fitted, ridge_regression, squared_errors
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
FIRST_SECOND = 1.0  # s: a cough before it can change the FEV₁ of its effort
CLEAR = 0.3  # s, minimum duration of the break of the first sample
FAR = 4.5  # s: with ten blocks of narrow kernels, samples farther apart cannot interact
SCALES = (0.25, 0.5, 1.0, 2.0)  # times ACCURACY: further σ at which the reach is measured

Row = dict[str, Any]


@dataclass(frozen=True)
class _Size:
    """Sizes of the experiment."""

    n_curves: int
    n_steps: int
    n_networks: int  # trainings with each kernel
    n_explained: int
    n_calm: int  # curves whose first cough comes after 4 s
    n_calls: int  # for each estimate
    figure_calls: int  # for the curves that are drawn
    n_select: int  # curves on which σ is chosen
    select_calls: int


FULL = _Size(
    n_curves=8_721,
    n_steps=6_000,
    n_networks=2,
    n_explained=80,
    n_calm=40,
    n_calls=800,
    figure_calls=3_200,
    n_select=6,
    select_calls=300,
)
QUICK = _Size(
    n_curves=600,
    n_steps=60,
    n_networks=2,
    n_explained=3,
    n_calm=2,
    n_calls=300,
    figure_calls=600,
    n_select=2,
    select_calls=150,
)


def run(options: Options) -> Outcome:
    """Train the networks, explain curves, write figures and tables."""
    started = time.perf_counter()
    size = QUICK if options.quick else FULL
    n_explained = options.points or size.n_explained
    n_steps = options.steps or size.n_steps
    spirograms = _spirograms(options, size.n_curves)
    seeds = range(options.seed, options.seed + size.n_networks)
    fits = [fitted(spirograms, kernel, n_steps, options, seed=seed) for seed in seeds for kernel in (WIDE, NARROW)]
    wide, narrow = fits[:2]
    test = spirograms.split()[1]
    settings = {
        "source": spirograms.source,
        "version": spirograms.version,
        "curves": len(spirograms),
        "steps": n_steps,
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
    quiet = _calm(test)[: size.n_calm]
    unseen = [i for i in range(len(test)) if i not in (*explained, *quiet)][-size.n_select :]
    choice = cells.compute({"sigma": "choice"}, lambda: _choose_sigma(wide.network, test.curves[unseen], size, options))
    sigma = choice["best"]

    explainer = _Explainer(test, sigma, options, folder, cells, size)
    samples = [explainer.sample(wide, i, name) for name, i in (("coughing", cough), ("calm", calm))]
    dense = {fit.kernel: explainer.result(fit, cough, "coughing").hessian[0].cpu() for fit in (narrow, wide)}
    rows = [
        explainer.row(fit, i)
        for i in tqdm(explained, desc="test curves", disable=not options.show_progress)
        for fit in fits
    ]
    profiles = {fit.kernel: torch.tensor([row["profile"] for row in _of(rows, fit)]) for fit in (narrow, wide)}
    for row in rows:
        del row["profile"]
    calm_rows = [
        explainer.calm_row(fit, i)
        for i in tqdm(quiet, desc="calm curves", disable=not options.show_progress)
        for fit in fits
    ]
    scales = [explainer.scale_row(wide, narrow, cough, scale * ACCURACY) for scale in SCALES]
    regression = ridge_regression(spirograms)
    errors = _prediction_rows(fits, regression, test)
    claims = _claim_rows(rows, fits)

    lines = [
        f"data: {spirograms.source}; {spirograms.note}",
        *_networks_told(fits),
        *_predictions_told(errors, regression),
        f"σ = {choice['best']:.3g} L by P_MSE in the ball of radius {ACCURACY:g}·√{N_SAMPLES} L on {choice['points']} "
        f"curves{'; at the edge of the grid' if choice['at edge'] else ''}",
        *_reach_told(rows, fits),
        *(_claim_told(row) for row in claims),
        *_calm_told(calm_rows, rows, fits),
        *_samples_told(samples),
        _scales_told(scales),
    ]
    heading = ["# Spirometry", "", *options.made_by(NAME, time.perf_counter() - started), ""]
    heading += [f"- {line}" for line in lines]
    files = write_table(rows, folder, "curves", heading)
    files += write_table(errors, folder, "errors", ["# Spirometry: mean squared errors of predicted FEV₁"])
    files += write_table(claims, folder, "claims", ["# Spirometry: the same efforts with and without their coughs"])
    files += write_table(calm_rows, folder, "calm", ["# Spirometry: curves whose first cough comes after 4 s"])
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


def _calm(test: Spirograms) -> list[int]:
    """Curves without a break before 4 s."""
    return (~test.cough_within(EARLY)).nonzero()[:, 0].tolist()


def _samples(test: Spirograms) -> tuple[int, int]:
    """The first test curve with one clear break, in its first 4 s; and the first one without any before 4 s."""
    cough = [
        i
        for i in _early_coughs(test)
        if len(test.coughs[i]) == 1 and test.coughs[i][0].end - test.coughs[i][0].start > CLEAR
    ]
    calm = _calm(test)
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

    def row(self, fit: Fitted, i: int) -> Row:
        """One test curve in one network: reach, and the location of the interactions with the first interval."""
        seed = self._seed(i)
        coughs = self.test.coughs[i]
        row: Row = {"curve": i, "coughs": _told(coughs), "first cough (s)": coughs[0].start, **_network(fit)}
        row |= self.cells.compute(
            {"kernel": fit.kernel, "network": fit.seed, "curve": i},
            lambda: self._reach(fit, self.test.curves[i], seed),
        )
        shut = _shut(coughs)
        row["cough share of intervals"] = len(shut) / (N_INTERVALS - 1)
        row |= _shares(row.pop("row"), shut, "")
        if self.test.without_coughs is not None:
            without = self.test.without_coughs[i]
            found = self.cells.compute(
                {"kernel": fit.kernel, "network": fit.seed, "curve": i, "cough": "none"},
                lambda: _intervals_record(self._attribute(fit.network, without, seed)),
            )
            row |= _shares(found, shut, ", no cough")
        return row

    def calm_row(self, fit: Fitted, i: int) -> Row:
        """One curve without an early cough in one network."""
        found = self.cells.compute(
            {"kernel": fit.kernel, "network": fit.seed, "calm": i},
            lambda: _intervals_record(self._attribute(fit.network, self.test.curves[i], self._seed(i))),
        )
        shares = _shares(found, [], "")
        names = ("strength with the first", "SmoothGrad share of the first")
        return {"curve": i, "coughs": _told(self.test.coughs[i]), **_network(fit)} | {key: shares[key] for key in names}

    def _seed(self, i: int) -> int:
        """Each curve has separate draws."""
        return 1_000_003 * self.options.seed + 2 * i

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

    def _reach(self, fit: Fitted, curve: Tensor, seed: int) -> Row:
        first, second = (self._attribute(fit.network, curve, s) for s in (seed, seed + 1))
        weights = _crossed(first, second)
        return {
            "reach (s)": reach(weights),
            f"beyond {FAR:g} s": share_beyond(weights, FAR),
            "relative error": float(first.relative_error[0]),
            "profile": profile(weights),
            "row": _intervals_record(first),
        }


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
        f"strength with the first{tag}": float(energy[1:].sum()),
        f"strongest at cough{tag}": int(1 + int(value[1:].abs().argmax()) in shut),
        f"SmoothGrad share of the first{tag}": float(slopes[0] / slopes.sum()),
    }


def _network(fit: Fitted) -> Row:
    return {"kernel": fit.kernel, "network": fit.seed}


def _of(rows: Sequence[Row], fit: Fitted) -> list[Row]:
    """The rows of one network."""
    return [row for row in rows if (row["kernel"], row["network"]) == (fit.kernel, fit.seed)]


def _told(coughs: Sequence[Coughing]) -> str:
    return ", ".join(f"{cough.start:g}–{cough.end:g} s" for cough in coughs)


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error; NaN of one value."""
    x = torch.tensor(list(values), dtype=torch.float64)
    return float(x.mean()), float(x.std() / math.sqrt(len(x))) if len(x) > 1 else math.nan


def _pm(values: Sequence[float], digits: int = 2) -> str:
    mean, error = _mean(values)
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def _prediction_rows(fits: Sequence[Fitted], regression: Regression, test: Spirograms) -> list[Row]:
    """Mean squared errors of each network and of the linear regression, on all test curves and by time of the cough."""
    early = test.cough_within(FIRST_SECOND)
    subsets = {"all": torch.ones_like(early), **_by_time(early)}
    rows: list[Row] = []
    for fit in fits:
        errors = squared_errors(fit.network, test.curves, test.fev1)
        for name, mask in subsets.items():
            mse, error = _mean(errors[mask].tolist())
            linear, linear_error = _mean(regression.errors[mask].tolist())
            less, less_error = _mean((regression.errors - errors)[mask].tolist())
            variance = float(test.fev1[mask].double().var(unbiased=False))
            row = {**_network(fit), "first cough": name, "curves": int(mask.sum()), "variance (L²)": variance}
            row |= {
                "MSE (L²)": mse,
                "standard error": error,
                "linear MSE (L²)": linear,
                "its standard error": linear_error,
            }
            row |= {"difference": less, "paired standard error": less_error, "ratio": mse / linear}
            if test.without_coughs is not None:
                row["MSE without coughs (L²)"] = float(
                    squared_errors(fit.network, test.without_coughs[mask], test.fev1[mask]).mean()
                )
            rows.append(row)
    return rows


def _by_time(early: Tensor) -> dict[str, Tensor]:
    return {f"before {FIRST_SECOND:g} s": early, f"after {FIRST_SECOND:g} s": ~early}


QUANTITIES = (
    "cough share",
    "strongest at cough",
    "strength with the first",
    "SmoothGrad share of the first",
)


def _claim_rows(rows: Sequence[Row], fits: Sequence[Fitted]) -> list[Row]:
    """Each quantity with and without the cough, in each network, for all curves and by time of the first cough."""
    if "cough share, no cough" not in rows[0]:
        return []
    found: list[Row] = []
    tests: dict[str, Callable[[Row], bool]] = {
        "all": lambda row: True,
        f"before {FIRST_SECOND:g} s": lambda row: row["first cough (s)"] < FIRST_SECOND,
        f"after {FIRST_SECOND:g} s": lambda row: row["first cough (s)"] >= FIRST_SECOND,
    }
    for fit in fits:
        for subset, belongs in tests.items():
            chosen = [row for row in _of(rows, fit) if belongs(row)]
            if chosen:
                found += [_compared(chosen, fit, subset, name) for name in QUANTITIES]
    return found


def _compared(chosen: Sequence[Row], fit: Fitted, subset: str, name: str) -> Row:
    """One quantity with and without the cough; for counts of curves the exact test of McNemar."""
    cough, none = ([float(row[key]) for row in chosen] for key in (name, f"{name}, no cough"))
    difference = [a - b for a, b in zip(cough, none, strict=True)]
    row: Row = {**_network(fit), "first cough": subset, "curves": len(chosen), "quantity": name}
    for label, values in (("with cough", cough), ("without", none), ("difference", difference)):
        row[label], row[f"{label}, standard error"] = _mean(values)
    row["larger with cough"] = sum(x > 0 for x in difference)
    row["larger without"] = sum(x < 0 for x in difference)
    row["cough share of intervals"] = _mean([x["cough share of intervals"] for x in chosen])[0]
    apart = row["larger with cough"] + row["larger without"]
    row["sign test p"] = binomtest(row["larger with cough"], apart).pvalue if apart else 1.0
    return row


def _networks_told(fits: Sequence[Fitted]) -> list[str]:
    return [
        f"network: {fit.words}; train {fit.train_mse:.3g}, test before calibration of its batch-norms "
        f"{fit.uncalibrated_mse:.3g} (paper, other data: {PUBLISHED_MSE['train']} / {PUBLISHED_MSE['test']})"
        f"{'; trained on ' + fit.machine if fit.machine else ''}"
        for fit in fits
    ]


def _predictions_told(errors: Sequence[Row], regression: Regression) -> list[str]:
    lines = [f"ridge regression on the same curves: penalty {regression.penalty:g} L²"]
    for row in errors:
        without = row.get("MSE without coughs (L²)")
        lines.append(
            f"test MSE, kernel {row['kernel']}, seed {row['network']}, first cough {row['first cough']} "
            f"({row['curves']} curves, variance {row['variance (L²)']:.3g} L²): {row['MSE (L²)']:.4f} ± "
            f"{row['standard error']:.4f} L², linear regression {row['linear MSE (L²)']:.4f} ± "
            f"{row['its standard error']:.4f}, paired difference {row['difference']:.4f} ± "
            f"{row['paired standard error']:.4f}, ratio {row['ratio']:.3f}"
            f"{'' if without is None else f'; on the curves without coughs {without:.4f}'}"
        )
    return lines


def _reach_told(rows: Sequence[Row], fits: Sequence[Fitted]) -> list[str]:
    """Reach of each network, and the paired difference of the two kernels for each seed."""
    lines = []
    for wide, narrow in zip(fits[::2], fits[1::2], strict=True):
        far, near = ([row["reach (s)"] for row in _of(rows, fit)] for fit in (wide, narrow))
        beyond, beyond_near = ([100 * row[f"beyond {FAR:g} s"] for row in _of(rows, fit)] for fit in (wide, narrow))
        apart = [a - b for a, b in zip(far, near, strict=True)]
        lines.append(
            f"reach (H²-weighted |i − j|, {len(far)} curves, seed {wide.seed}): kernel {WIDE} {_pm(far, 3)} s, kernel "
            f"{NARROW} {_pm(near, 3)} s, paired difference {_pm(apart, 3)} s; pairs farther apart than {FAR:g} s have "
            f"{_pm(beyond, 1)} % and {_pm(beyond_near)} % of the weight"
        )
    return lines


def _claim_told(row: Row) -> str:
    digits = 4
    told = ", ".join(
        f"{words}{row[label]:.{digits}f} ± {row[f'{label}, standard error']:.{digits}f}"
        for words, label in (
            ("", "with cough"),
            ("without the cough ", "without"),
            ("paired difference ", "difference"),
        )
    )
    extra = ""
    if row["quantity"] == "cough share":
        extra = f"; {row['cough share of intervals']:.3f} of the intervals have the cough"
    return (
        f"{row['quantity']}, kernel {row['kernel']}, seed {row['network']}, first cough {row['first cough']} "
        f"({row['curves']} curves): {told}; larger with the cough in {row['larger with cough']} and without in "
        f"{row['larger without']} curves, p = {row['sign test p']:.2g}{extra}"
    )


def _calm_told(calm: Sequence[Row], rows: Sequence[Row], fits: Sequence[Fitted]) -> list[str]:
    """Curves with and without an early cough, of different visits: differences are not paired."""
    lines = []
    for fit in fits:
        for name in ("SmoothGrad share of the first", "strength with the first"):
            (a, da), (b, db) = (_mean([row[name] for row in _of(each, fit)]) for each in (rows, calm))
            lines.append(
                f"other visits, {name}, kernel {fit.kernel}, seed {fit.seed}: cough before {EARLY:g} s {a:.4f} ± "
                f"{da:.4f} ({len(_of(rows, fit))} curves), no cough before {EARLY:g} s {b:.4f} ± {db:.4f} "
                f"({len(_of(calm, fit))} curves), difference {a - b:.4f} ± {math.hypot(da, db):.4f}"
            )
    return lines


def _samples_told(samples: Sequence[Explained]) -> list[str]:
    lines = []
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
