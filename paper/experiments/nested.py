"""Nested Interactions: interactions that depend on the distance, as a function of σ² (SmoothHess) and β (SoftPlus).

The target is ½x₁² + x₁x₂ within radius 0.6 of 0, x₁x₂ up to 1.2, −5x₁x₂ beyond. Smoothed at 0 its Hessian is, with
t = .18/σ² and the regularised incomplete gamma functions P and Q = 1 − P,

    H₁₂ = 1 − 6 Q(3, .72/σ²),      H₁₁ = ³⁄₂ P(3, t) − ½ P(2, t),      H₂₂ = ½ (P(3, t) − P(2, t)).

A network can represent the target neither at its jumps nor outside the training square [−2, 2]². The Hessian is linear
in the function, so the difference between network and target is the sum of two contributions, from inside and outside
the square; both are computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.special import gammainc, gammaincc

from paper.cells import Cells
from paper.datasets import nested, plane_grid
from paper.experiments import Outcome
from paper.experiments.plane import Trained, open_cells, stages, trained
from paper.experiments.rings import ENTRIES, Rings
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
from paper.tables import COLUMN, panel_title, print_style, save_figure, write_csv, write_page
from paper.training import NESTED, NESTED_REFINED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "nested"
ALLOWED, JUDGED = 0.15, (0.005, 0.5)  # agreement with the target is required at these σ²
SIGMA2, BETA = (1e-6, 10.0), (1e-1, 1e4)
MET = 0.05  # from this σ² on draws reach the jumps, and more of them are needed
CALLS, QUICK_CALLS = (20_480, 163_840), (4_096, 16_384)  # below and above
BAND = 0.1  # within this distance of a jump the error is attributed to the jump
DASHED, DOTTED = (0, (4, 2)), (0, (1, 1))
LINES = {" of the network": "-", " of the target": DASHED, " of the target clipped to the square": DOTTED}
SIDE = 2.0  # half the side of the square of the training points


def run(options: Options) -> Outcome:
    """H₁₁, H₁₂ and H₂₂ at 0 against σ², compared with the target, and against β; tables and the figure."""
    (few, many), per_decade = (QUICK_CALLS, 3) if options.quick else (CALLS, 6)
    recipe, refinement = stages(NESTED, NESTED_REFINED, 4_000, options)
    folder = options.folder(NAME)
    fitted = trained(NAME, nested, recipe, options, refinement=refinement)
    cells = open_cells(folder, options, fitted, calls=(few, many), runs=RUNS)

    sigma2 = sorted({*log_grid(*SIGMA2, per_decade), *JUDGED})
    n_calls = [few if s2 < MET else many for s2 in sigma2]
    smooth = smooth_rows(fitted, nested, cells, options, sigma2, n_calls)
    explain(smooth, fitted, cells, options)
    soft = softplus_rows(fitted, cells, options, log_grid(*BETA, 4 * per_decade))
    lines = findings(smooth, soft, fitted, options.device)
    lines.insert(1, unseen_words(fitted, nested, options.device))
    files = [write_csv(smooth, folder / "smoothhess.csv"), write_csv(soft, folder / "softplus.csv")]
    tables = {f"{name} at 0": [_shown(row, name) for row in smooth] for name in ("H₁₂", "H₁₁", "H₂₂")}
    files.append(
        write_page(
            folder / f"{NAME}.md", "Nested Interactions", options.made_by(NAME), lines, tables | {"SoftPlus": soft}
        )
    )
    with print_style():
        files += save_figure(figure(smooth, soft, fitted), folder, NAME)
    return Outcome(NAME, files, lines)


def target_hessian(sigma2: Tensor) -> Tensor:
    """The smoothed Hessian of the target at 0 for each σ² of (S,), in closed form; (S, 2, 2).

    >>> target_hessian(torch.tensor([1e-3])).round(decimals=4).tolist()
    [[[1.0, 1.0], [1.0, 0.0]]]
    """
    two, three = (torch.full_like(sigma2, order) for order in (2.0, 3.0))
    t = 0.18 / sigma2
    across = 1 - 6 * gammaincc(three, 0.72 / sigma2)
    first = 1.5 * gammainc(three, t) - 0.5 * gammainc(two, t)
    second = (gammainc(three, t) - gammainc(two, t)) / 2
    return torch.stack([torch.stack([first, across], -1), torch.stack([across, second], -1)], -2)


def explain(smooth: list[Row], fitted: Trained, cells: Cells, options: Options) -> None:
    """Add to each row the target's Hessian and the two contributions to the network's difference from it."""
    sigma2 = [row["σ²"] for row in smooth]
    double = fitted.in_double

    def outside(other: str) -> dict[str, list[float]]:
        """The change of the Hessian if the target is replaced by another function outside the square."""
        replaced = {
            "network": lambda x: double(x)[:, 0] - double(x.new_zeros(1, 2))[:, 0],
            "clipped": lambda x: nested(x.clamp(-SIDE, SIDE)),
        }[other]
        rings = Rings.of(
            lambda x: replaced(x) - nested(x),
            where=lambda x: x.abs().amax(-1) > SIDE,
            smallest=0.95 * SIDE,
            n_radii=240,
            n_angles=512,
            device=options.device,
        )
        return rings.entries(sigma2)

    shares = {
        other: cells.compute({"outside": other, "scales": len(sigma2)}, lambda other=other: outside(other))
        for other in ("network", "clipped")
    }

    truth = target_hessian(torch.tensor(sigma2, dtype=torch.float64))
    for k, row in enumerate(smooth):
        for name, (i, j) in ENTRIES.items():
            known = float(truth[k, i, j])
            beyond = shares["network"][name][k]
            row[f"{name} of the target"] = known
            row[f"{name} of the target clipped to the square"] = known + shares["clipped"][name][k]
            row[f"{name} gap from outside the square"] = beyond
            row[f"{name} gap from inside the square"] = row[f"{name} of the network"] - known - beyond


def jump_words(fitted: Trained, device: str) -> str:
    """The share of the squared error at the jumps of the target, which no continuous network can represent."""
    points = plane_grid(0.016).double().to(device)
    double = fitted.in_double
    with torch.no_grad():
        squared = torch.cat([(double(x)[:, 0] - nested(x)).square() for x in points.split(8_192)])
    radius = points.norm(dim=-1)
    near = ((radius - 0.6).abs() < BAND) | ((radius - 1.2).abs() < BAND)
    share, area = (100 * float(part) for part in (squared[near].sum() / squared.sum(), near.double().mean()))
    middle = float(squared[radius < 0.4].mean().sqrt())
    return (
        f"{share:.0f} % of the squared error on the square lies within {BAND} of the two jumps, {area:.0f} % of its "
        f"area; within 0.4 of 0 the error is {middle:.2g} (root mean square)"
    )


def findings(smooth: list[Row], soft: list[Row], fitted: Trained, device: str = "cpu") -> list[str]:
    """Summarise the experiment in numbers."""
    low, high = JUDGED
    judged = [row for row in smooth if low <= row["σ²"] <= high]
    below = [row for row in smooth if row["σ²"] <= high]
    lines = [f"network: {fitted.words} (published: 200000 steps, 1e-1)", jump_words(fitted, device)]
    for name in ENTRIES:
        gaps = [row[name] - row[f"{name} of the target"] for row in judged]
        exact = [row[f"{name} of the network"] - row[f"{name} of the target"] for row in judged]
        inside, known = (sum(abs(gap) <= ALLOWED for gap in found) for found in (gaps, exact))
        k = max(range(len(gaps)), key=lambda k: abs(gaps[k]))
        worst = judged[k]
        inner, outer = (worst[f"{name} gap from {place} the square"] for place in ("inside", "outside"))
        stderr = worst[f"{name} standard error"]
        lines.append(
            f"{name} for σ² in [{low:g}, {high:g}]: within {ALLOWED} of the target's at {inside} of {len(judged)} "
            f"scales, the network's exact {name} at {known}; farthest {gaps[k]:+.3f} ± {stderr:.3f} at σ² = "
            f"{worst['σ²']:.3g}, where the exact gap is {inner:+.3f} from inside the square (jumps and fit) and "
            f"{outer:+.3f} from outside; "
            + within_from(below, name, [row[f"{name} of the target"] for row in below], ALLOWED)
        )
    lines.append(error_words(judged[0], ALLOWED))
    lines.append(agreement(smooth))
    for place, goal in (("inner", (1.0, 1.0, 0.0)), ("outer", (0.0, -5.0, 0.0))):
        distance, beta = min((_apart(row, goal), row["β"]) for row in soft)
        ours, s2 = min((_apart(row, goal), row["σ²"]) for row in smooth)
        lines.append(
            f"nearest to the {place} interactions {goal}, largest difference of the three: SoftPlus {distance:.2f} "
            f"at β = {beta:.3g}, SmoothHess {ours:.2f} at σ² = {s2:.3g}"
        )
    return lines


def figure(smooth: list[Row], soft: list[Row], fitted: Trained) -> Figure:
    """H against σ² above, its gap from the target explained in the middle, H against β below."""
    from smoothhess.view.figures.canvas import INK, new_figure

    drawn = new_figure(COLUMN, 6.2)
    top, middle, bottom = drawn.subplots(3, 1, height_ratios=[1.35, 0.8, 1])
    scales = [row["σ²"] for row in smooth]
    for ax in (top, middle):
        ax.axvspan(*JUDGED, color=INK, alpha=0.08, linewidth=0)
    for name, (colour, marker) in LOOK.items():
        for ending, style in LINES.items():
            values = [row[name + ending] for row in smooth]
            top.plot(scales, values, color=colour, linewidth=0.9, linestyle=style, zorder=1)
        bars = [REACH * row[f"{name} standard error"] for row in smooth]
        values = [row[name] for row in smooth]
        top.errorbar(scales, values, bars, fmt=marker, color=colour, markersize=2.4, elinewidth=0.8, label=LABEL[name])
    for (_, style), words in zip(LINES.items(), ("network, exact", "target", "target, clipped"), strict=True):
        top.plot([], [], color=INK, linewidth=0.9, linestyle=style, label=words)
    top.set_ylabel("SmoothHess at 0")
    top.legend(loc="best", handletextpad=0.5, labelspacing=0.3)
    panel_title(top, "(a) SmoothHess", fitted.caption)

    for place, style in (("inside", "-"), ("outside", DOTTED)):
        middle.plot([], [], color=INK, linewidth=0.9, linestyle=style, label=f"{place} $[-2, 2]^2$")
        for name, (colour, _) in LOOK.items():
            gaps = [row[f"{name} gap from {place} the square"] for row in smooth]
            middle.plot(scales, gaps, color=colour, linewidth=0.9, linestyle=style)
    middle.set(ylabel="network − target", xlabel="σ², variance of the smoothing")
    middle.legend(loc="best", handlelength=1.6, labelspacing=0.2)
    panel_title(middle, "(b) the network's gap, by where it arises")

    betas = [row["β"] for row in soft]
    for name, (colour, _) in LOOK.items():
        bottom.plot(betas, [row[name] for row in soft], color=colour, label=LABEL[name])
    bottom.set(xlabel="β, sharpness of SoftPlus", ylabel="Hessian of $f_β$ at 0")
    bottom.legend(loc="lower right")
    panel_title(bottom, "(c) every ReLU replaced by SoftPlus")
    for ax in (top, middle, bottom):
        _zero_line(ax)
    return drawn


def _shown(row: Row, name: str) -> Row:
    numbers = {
        "network, exact": row[f"{name} of the network"],
        "target": row[f"{name} of the target"],
        "target, clipped to the square": row[f"{name} of the target clipped to the square"],
        "gap from inside the square": row[f"{name} gap from inside the square"],
        "gap from outside": row[f"{name} gap from outside the square"],
    }
    shown = {words: f"{value:.3f}" for words, value in numbers.items()}
    return {"σ²": row["σ²"], "SmoothHess": estimate(row, name), **shown, "calls": row["calls"]}


def _zero_line(ax: Axes) -> None:
    from smoothhess.view.figures.canvas import INK

    ax.axhline(0, color=INK, linewidth=0.5, zorder=0)
    ax.set_xscale("log")


def _apart(row: Row, goal: tuple[float, float, float]) -> float:
    return max(abs(row[name] - value) for name, value in zip(ENTRIES, goal, strict=True))
