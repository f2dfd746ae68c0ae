"""Figures of the spirometry experiment: explained curves (Fig. 3) and dense Hessians by kernel (Fig. 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from paper.spirometry import N_SAMPLES, STEP, Coughing
from paper.tables import COLOURS, COLUMN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Explained", "kernels_figure", "samples_figure"]

BLUE, VERMILION, GREEN = COLOURS[:3]
SHADE = "#cccccc"  # of a cough
CLIP = 99.5  # per cent of |H| within the colours; the rest is drawn in the last one


@dataclass(frozen=True, eq=False)
class Explained:
    """A curve and its results; the (30,) are by half second, interactions are those with the first one."""

    name: str
    curve: Tensor  # (300,) L
    coughs: tuple[Coughing, ...]
    fev1: float
    predicted: float
    slopes: Tensor  # (30,)
    slope_errors: Tensor
    row: Tensor  # (30,)
    row_errors: Tensor
    n_calls: int
    relative_error: float

    @property
    def strongest(self) -> int:
        """The interval other than the first that interacts most with the first."""
        return 1 + int(self.row[1:].abs().argmax())


def samples_figure(samples: Sequence[Explained], title: str, interval: float) -> Figure:
    """For each curve: volume with its coughs, SmoothGrad by interval, and interactions with the first interval."""
    from smoothhess.view.figures.canvas import INK, new_figure

    drawn = new_figure(COLUMN, 0.3 + 2.6 * len(samples))
    axes = drawn.subplots(3 * len(samples), 1, sharex=True, height_ratios=[1.2, 1, 1] * len(samples))
    times = STEP * np.arange(N_SAMPLES)
    middles = interval * (np.arange(len(samples[0].row)) + 0.5)
    slope_limit = 1.1 * max(float((s.slopes.abs() + 2 * s.slope_errors).max()) for s in samples)
    pair_limit = 1.25 * max(float((s.row[1:].abs() + 2 * s.row_errors[1:]).max()) for s in samples)
    for k, sample in enumerate(samples):
        curve, slope, pair = axes[3 * k : 3 * k + 3]
        for ax in (curve, slope, pair):
            for cough in sample.coughs:
                ax.axvspan(cough.start, cough.end, color=SHADE, linewidth=0, zorder=0)
        curve.plot(times, sample.curve, color=BLUE)
        curve.set(ylabel="volume (L)", ylim=(0, None))
        heading = "cough in the first 4 s" if sample.name == "coughing" else "no cough in the first 4 s"
        curve.set_title(f"({chr(ord('a') + k)}) {heading}", loc="left")
        words = f"FEV₁ {sample.fev1:.2f} L\npredicted {sample.predicted:.2f} L"
        curve.text(0.99, 0.1, words, transform=curve.transAxes, ha="right", color=INK)
        if sample.coughs:
            beside = sample.coughs[0].end + 0.15
            curve.text(beside, 0.1, "cough", transform=curve.get_xaxis_transform(), color=INK)
        _bars(slope, middles, interval, sample.slopes, sample.slope_errors, GREEN)
        slope.set(ylabel="SmoothGrad\n(L/L)", ylim=(-slope_limit, slope_limit))
        values, errors = sample.row.clone(), sample.row_errors.clone()
        values[0] = errors[0] = np.nan  # a diagonal entry, not an interaction
        _bars(pair, middles, interval, values, errors, VERMILION)
        pair.set(ylabel="with the first\n0.5 s (L/L²)", ylim=(-pair_limit, pair_limit))
        pair.axvspan(0, interval, facecolor="none", edgecolor=INK, hatch="////", linewidth=0.5, alpha=0.5)
        _arrow(pair, middles, sample, pair_limit)
    axes[-1].set(xlabel="time (s)", xlim=(0, STEP * N_SAMPLES), xticks=range(0, 16, 3))
    drawn.suptitle(title, fontsize=8, x=0.02, ha="left", weight="bold")
    drawn.align_ylabels()
    drawn.get_layout_engine().set(h_pad=0.02, hspace=0.02)  # pyright: ignore[reportOptionalMemberAccess,reportCallIssue]
    return drawn


def _bars(ax: Axes, middles: np.ndarray, interval: float, values: Tensor, errors: Tensor, colour: str) -> None:
    from smoothhess.view.figures.canvas import INK

    ax.bar(middles, values.numpy(), width=0.86 * interval, color=colour, zorder=2)
    ax.errorbar(middles, values.numpy(), 2 * errors.numpy(), fmt="none", ecolor=INK, elinewidth=0.7, zorder=3)
    ax.axhline(0, color=INK, linewidth=0.6, zorder=4)


def _arrow(ax: Axes, middles: np.ndarray, sample: Explained, limit: float) -> None:
    """From the first interval to the one that interacts most with it, above or below the bars."""
    k = sample.strongest
    tip = float(sample.row[k])
    end = tip + np.sign(tip) * (2 * float(sample.row_errors[k]) + 0.02 * limit)
    ax.annotate(
        "",
        (middles[k], end),
        (middles[0], 0.5 * np.sign(tip) * limit),
        arrowprops={
            "arrowstyle": "-|>",
            "color": VERMILION,
            "linewidth": 0.9,
            "connectionstyle": f"arc3,rad={-0.15 * np.sign(tip)}",
        },
        zorder=5,
    )


def kernels_figure(
    hessians: Mapping[int, Tensor], profiles: Mapping[int, Tensor], sample: Explained, title: str
) -> Figure:
    """The Hessian of one curve for each kernel, and the distribution of the weight of many curves over distances."""
    from smoothhess.view.figures.canvas import new_figure

    drawn = new_figure(COLUMN, 3.4)
    grid = drawn.add_gridspec(2, len(hessians), height_ratios=[1.9, 1])
    for k, (kernel, H) in enumerate(hessians.items()):
        ax = drawn.add_subplot(grid[0, k])
        _heatmap(ax, H, sample.coughs)
        ax.set_title(f"({chr(ord('a') + k)}) kernel {kernel}: {kernel * STEP:g} s", loc="left")
        if k == 0:
            ax.set_ylabel("time (s)")
    _profiles(drawn.add_subplot(grid[1, :]), profiles, chr(ord("a") + len(hessians)))
    drawn.suptitle(title, fontsize=8, x=0.02, ha="left", weight="bold")
    drawn.get_layout_engine().set(h_pad=0.03, hspace=0.0)  # pyright: ignore[reportOptionalMemberAccess,reportCallIssue]
    return drawn


def _heatmap(ax: Axes, H: Tensor, coughs: Sequence[Coughing]) -> None:
    from smoothhess.view.figures.canvas import DIVERGING, INK

    values, end = H.double().numpy(), STEP * N_SAMPLES
    limit = float(np.percentile(np.abs(values), CLIP)) or 1.0
    picture = ax.imshow(values, cmap=DIVERGING, vmin=-limit, vmax=limit, extent=(0, end, end, 0), interpolation="none")
    bar = ax.figure.colorbar(picture, ax=ax, location="bottom", fraction=0.05, pad=0.02, extend="both", aspect=16)
    bar.set_ticks([-limit, 0, limit], labels=[f"−{limit:.1g}", "0", f"{limit:.1g}"])
    bar.set_label("H (L/L²)", labelpad=1)
    bar.outline.set_linewidth(0.4)  # pyright: ignore[reportCallIssue]
    for cough in coughs:
        for line in (ax.axvline, ax.axhline):
            line((cough.start + cough.end) / 2, color=INK, linewidth=0.5, linestyle=":")
    ax.set(xticks=range(0, 16, 5), yticks=range(0, 16, 5), xlabel="time (s)")
    for side in ("top", "right"):
        ax.spines[side].set_visible(True)


def _profiles(ax: Axes, profiles: Mapping[int, Tensor], letter: str) -> None:
    """Cumulative weight against distance, mean over curves with a band of two standard errors."""
    lags = STEP * np.arange(1, N_SAMPLES)
    for (kernel, each), colour, style in zip(profiles.items(), (BLUE, VERMILION), ("-", "--"), strict=True):
        curves = each.double().numpy()
        mean, error = curves.mean(0), curves.std(0) / np.sqrt(max(len(curves) - 1, 1))
        ax.fill_between(lags, mean - 2 * error, mean + 2 * error, color=colour, alpha=0.2, linewidth=0)
        reach = float(lags[0] * mean[0] + (lags[1:] * np.diff(mean)).sum())
        ax.plot(lags, mean, color=colour, linestyle=style, label=f"kernel {kernel}: mean {reach:.2f} s")
    ax.set(xlim=(0, STEP * N_SAMPLES), ylim=(0, 1.04), xticks=range(0, 16, 3))
    ax.set(xlabel="distance in time $|i-j|$ (s)", ylabel="share of $H_{ij}^2$\nwithin it")
    ax.legend(loc="lower right")
    ax.set_title(f"({letter}) mean of {len(next(iter(profiles.values())))} curves, ± 2 s.e.", loc="left")
