"""Fig. 2: the interaction at the corner of four quadrants, as a function of σ² (SmoothHess) and of β (SoftPlus).

The function is K·x₁x₂ with K = 5, 3, 12, −10 in the quadrants. Smoothed at 0 by any isotropic Gaussian it has
H₁₂ = (5 + 3 + 12 − 10)/4 = 2.5 and H₁₁ = H₂₂ = 12/π. A network learns it; SmoothHess of the network should have the
same values at every σ, while the Hessian of the network with SoftPlus has them over no range of β.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from paper.datasets import four_quadrant
from paper.experiments import Outcome
from paper.experiments.plane import Trained, open_cells, stages, trained
from paper.experiments.scales import (
    LABEL,
    LOOK,
    REACH,
    RUNS,
    Row,
    agreement,
    error_words,
    estimate,
    log_grid,
    smooth_rows,
    softplus_rows,
    unseen_words,
    within_from,
)
from paper.options import Options
from paper.tables import COLOURS, COLUMN, panel_title, print_style, save_figure, write_csv, write_page
from paper.training import FOUR_QUADRANT, FOUR_QUADRANT_REFINED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "four-quadrant"
TRUTH = {"H₁₁": 12 / math.pi, "H₁₂": 2.5, "H₂₂": 12 / math.pi}
ALLOWED, FROM = 0.15, 0.01  # H₁₂ should be within 2.5 ± 0.15 for σ² from 0.01 on
CLAIMED = 10**-2.5  # the paper: from this σ² on
# H₁₂ of the authors' network, read off the published figure to about ± 0.1; by σ², and at the peak by β.
READ_OFF = {0.001: 1.5, 0.00316228: 2.2, 0.00630957: 2.5, 1.0: 2.45}
READ_OFF_PEAK = (700.0, 10.5)
CALLS, QUICK_CALLS = 65_536, 4_096  # for each σ²
SIGMA2, BETA = (1e-3, 1.0), (1e-1, 1e4)


def run(options: Options) -> Outcome:
    """H₁₂ at 0 against σ² with error bars, and against β; tables and the figure."""
    n_calls, per_decade = (QUICK_CALLS, 5) if options.quick else (CALLS, 10)
    recipe, refinement = stages(FOUR_QUADRANT, FOUR_QUADRANT_REFINED, 2_000, options)
    folder = options.folder(NAME)
    fitted = trained(NAME, four_quadrant, recipe, options, refinement=refinement)
    cells = open_cells(folder, options, fitted, calls=n_calls, runs=RUNS)

    sigma2 = log_grid(*SIGMA2, per_decade)
    smooth = smooth_rows(fitted, four_quadrant, cells, options, sigma2, [n_calls] * len(sigma2))
    for row in smooth:
        row["published H₁₂"] = READ_OFF.get(row["σ²"])
    soft = softplus_rows(fitted, cells, options, log_grid(*BETA, 2 * per_decade))
    lines = findings(smooth, soft, fitted)
    lines.insert(1, unseen_words(fitted, four_quadrant, options.device))
    files = [write_csv(smooth, folder / "smoothhess.csv"), write_csv(soft, folder / "softplus.csv")]
    tables = {"SmoothHess at 0 (exact: the smoothed network, by quadrature)": [_shown(row) for row in smooth]}
    files.append(
        write_page(folder / f"{NAME}.md", "Four Quadrant", options.made_by(NAME), lines, tables | {"SoftPlus": soft})
    )
    with print_style():
        files += save_figure(figure(smooth, soft, fitted), folder, NAME)
    return Outcome(NAME, files, lines)


def findings(smooth: list[Row], soft: list[Row], fitted: Trained) -> list[str]:
    """Summarise the experiment in numbers."""
    judged = [row for row in smooth if row["σ²"] >= FROM * (1 - 1e-9)]
    values = [row["H₁₂"] for row in judged]
    inside = sum(abs(value - TRUTH["H₁₂"]) <= ALLOWED for value in values)
    exact = [row["H₁₂ of the network"] for row in judged]
    peak = max(soft, key=lambda row: row["H₁₂"])
    claimed = [row for row in smooth if row["σ²"] >= CLAIMED * (1 - 1e-5)]
    estimated, known = (
        sum(abs(row[key] - TRUTH["H₁₂"]) <= ALLOWED for row in claimed) for key in ("H₁₂", "H₁₂ of the network")
    )
    near = [row["β"] for row in soft if abs(row["H₁₂"] - TRUTH["H₁₂"]) <= ALLOWED]
    return [
        f"network: {fitted.words} (published: 40000 steps, 1e-4)",
        f"SmoothHess H₁₂ for σ² in [{FROM:g}, 1]: {min(values):.3f} to {max(values):.3f}, within {TRUTH['H₁₂']} ± "
        f"{ALLOWED} at {inside} of {len(judged)} scales; the network's exact H₁₂ there: {min(exact):.3f} to "
        f"{max(exact):.3f}",
        error_words(judged[0], ALLOWED),
        f"diagonal for σ² in [{FROM:g}, 1]: H₁₁ {_range(judged, 'H₁₁')}, H₂₂ {_range(judged, 'H₂₂')} "
        f"(12/π = {TRUTH['H₁₁']:.3f})",
        agreement(smooth),
        f"SoftPlus H₁₂: {min(row['H₁₂'] for row in soft):.2f} to {peak['H₁₂']:.2f}, the peak at β = {peak['β']:.3g} "
        f"(published about {READ_OFF_PEAK[1]} at {READ_OFF_PEAK[0]:g}); within 2.5 ± {ALLOWED} at {len(near)} of "
        f"{len(soft)} values of β",
        f"SmoothHess H₁₂ for σ² in [10^-2.5, 1]: within {TRUTH['H₁₂']} ± {ALLOWED} at {estimated} of {len(claimed)} "
        f"scales, the network's exact H₁₂ at {known}; "
        + within_from(smooth, "H₁₂", [TRUTH["H₁₂"]] * len(smooth), ALLOWED),
    ]


def figure(smooth: list[Row], soft: list[Row], fitted: Trained) -> Figure:
    """H against σ² with 95 % intervals above, H₁₂ against β below."""
    from smoothhess.view.figures.canvas import INK, new_figure

    drawn = new_figure(COLUMN, 4.4)
    top, bottom = drawn.subplots(2, 1)
    hollow: dict[str, Any] = {"marker": "D", "markerfacecolor": "none", "color": INK, "markersize": 4.5, "linewidth": 0}
    for ax in (top, bottom):
        ax.axhspan(2.5 - ALLOWED, 2.5 + ALLOWED, color=COLOURS[1], alpha=0.15, linewidth=0)
        _level(ax, 2.5, "2.5")
    _level(top, 12 / math.pi, "12/π")

    scales = [row["σ²"] for row in smooth]
    for name, (colour, marker) in LOOK.items():
        top.plot(scales, [row[f"{name} of the network"] for row in smooth], color=colour, linewidth=0.8, zorder=2)
        bars = [REACH * row[f"{name} standard error"] for row in smooth]
        values = [row[name] for row in smooth]
        top.errorbar(scales, values, bars, fmt=marker, color=colour, markersize=2.6, elinewidth=0.8, label=LABEL[name])
    read = [(row["σ²"], row["published H₁₂"]) for row in smooth if row["published H₁₂"] is not None]
    top.plot(*zip(*read, strict=True), **hollow, label="$H_{12}$, published")
    top.set(xscale="log", xlabel="σ², variance of the smoothing", ylabel="SmoothHess at 0")
    top.set_ylim(bottom=min(0.0, top.get_ylim()[0]))
    top.legend(loc="lower right", ncols=2, columnspacing=1.0, handletextpad=0.4)
    panel_title(top, "(a) SmoothHess", fitted.caption)

    bottom.plot([row["β"] for row in soft], [row["H₁₂"] for row in soft], color=COLOURS[1], label="$H_{12}$")
    bottom.plot(*READ_OFF_PEAK, **hollow, label="its peak, published")
    bottom.set(xscale="log", xlabel="β, sharpness of SoftPlus", ylabel="Hessian of $f_β$ at 0")
    bottom.legend(loc="upper left")
    panel_title(bottom, "(b) every ReLU replaced by SoftPlus")
    return drawn


def _shown(row: Row) -> Row:
    shown: Row = {"σ²": row["σ²"]}
    for name in ("H₁₂", "H₁₁", "H₂₂"):
        shown |= {name: estimate(row, name), f"{name} exact": f"{row[f'{name} of the network']:.3f}"}
    return {**shown, "H₁₂ published": row["published H₁₂"], "calls": row["calls"]}


def _level(ax: Axes, height: float, words: str) -> None:
    from smoothhess.view.figures.canvas import INK

    ax.axhline(height, color=INK, linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
    ax.text(1.01, height, words, transform=ax.get_yaxis_transform(), va="center", ha="left", color=INK)


def _range(rows: list[Row], name: str) -> str:
    values = [row[name] for row in rows]
    return f"{min(values):.2f} to {max(values):.2f}"
