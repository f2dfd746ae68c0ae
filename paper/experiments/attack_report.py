"""Tables, figure and findings of the attacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paper.classifiers import Classifier
from paper.experiments import Outcome
from paper.experiments.pmse_report import numbered
from paper.methods import ATTACK
from paper.options import Options
from paper.published import published
from paper.tables import COLOURS, COLUMN, legend_with_published, print_style, save_figure, with_published, write_table
from smoothhess.evaluate import AttackComparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Chosen", "Measured", "Row", "report"]

Row = dict[str, Any]
Chosen = dict[tuple[float, str], float]  # by ε and method: σ or β
OURS = "SH+SG"
METHODS = {method.name: method for method in ATTACK}
SURE = 0.05  # p below which a difference is called significant


@dataclass(frozen=True, eq=False)
class Measured:
    """Predictions of one network before and after every attack."""

    classifier: Classifier
    epsilons: Sequence[float]
    n_points: int
    keep: float  # T
    before: Tensor  # (B,)
    after: Mapping[tuple[str, float | None, str], Tensor]  # by method, parameter and "exact" or "cut": (R, B)
    calls: Mapping[tuple[str, float | None], float]
    passes: Mapping[tuple[str, float | None], float]
    chosen: Chosen
    printed: Chosen

    @staticmethod
    def joined(
        classifier: Classifier,
        epsilons: Sequence[float],
        n_points: int,
        keep: float,
        found: Mapping[tuple[str, float | None], Sequence[Row]],
        chosen: Chosen,
        printed: Chosen,
    ) -> Measured:
        """From the cells of all batches, by method and parameter."""
        after = {}
        for (method, value), batches in found.items():
            for step in batches[0]["after"]:
                after[method, value, step] = torch.cat([torch.tensor(b["after"][step]) for b in batches], 1)
        first = next(iter(found.values()))

        def mean(name: str) -> dict[tuple[str, float | None], float]:
            return {key: sum(b[name] * len(b["before"]) for b in batches) / n_points for key, batches in found.items()}

        return Measured(
            classifier=classifier,
            epsilons=tuple(epsilons),
            n_points=n_points,
            keep=keep,
            before=torch.cat([torch.tensor(b["before"]) for b in first]),
            after=after,
            calls=mean("calls"),
            passes=mean("passes"),
            chosen=chosen,
            printed=printed,
        )

    def comparison(self, epsilon: float, parameters: Chosen, *, cut: bool = False) -> AttackComparison:
        """All methods in one column, each at its parameter; with `cut` also SH+SG by the paper's reduction."""
        i = self.epsilons.index(epsilon)
        columns = {
            name: self.after[name, parameters.get((epsilon, name)), "exact"][i]
            for name in METHODS
            if (name, parameters.get((epsilon, name)), "exact") in self.after
        }
        reduced = (OURS, parameters.get((epsilon, OURS)), "cut")
        if cut and reduced in self.after:
            columns[self.cut_name] = self.after[reduced][i]
        after = torch.stack(list(columns.values()))[:, None]
        return AttackComparison(
            tuple(columns), (epsilon,), self.before, after, torch.zeros_like(after, dtype=torch.float32)
        )

    @property
    def cut_name(self) -> str:
        """How the reduced attack is called."""
        return f"{OURS}, T = {self.keep:g}"

    def published(self, metric: str, epsilon: float, method: str) -> tuple[float | None, str]:
        """The printed number, and its known error."""
        found = published(
            metric=metric,
            dataset=self.classifier.dataset,
            network=self.classifier.architecture,
            function="softmax",
            epsilon=epsilon,
            method=method,
        )
        return (None, "") if found is None else (found.value, found.note)


def report(
    name: str, measured: Sequence[Measured], skipped: Sequence[str], options: Options, seconds: float
) -> Outcome:
    """Write all tables and the figure; the findings are printed above the first table."""
    folder = options.folder(name)
    lines = [*findings(measured), *skipped]
    made_by = options.made_by(name, seconds)
    heading = ["# Attacks: predictions left unchanged, in per cent", "", *made_by, "", *(f"- {line}" for line in lines)]
    tables = {
        name: (heading, rows_of(measured, "chosen")),
        "published-parameters": (
            ["# Attacks at the published σ² and β", "", *made_by],
            rows_of([m for m in measured if m.printed], "printed"),
        ),
        "parameters": (["# Attacks: selected σ² and β", "", *made_by], parameter_rows(measured)),
    }
    files: list[Path] = []
    for table, (head, rows) in tables.items():
        if rows:
            notes, rows = numbered(rows)
            files += write_table(rows, folder, table, [*head, *notes])
    with print_style():
        files += save_figure(figure(measured), folder, name)
    return Outcome(name, files, lines)


def rows_of(measured: Sequence[Measured], which: str) -> list[Row]:
    """Every method in every column: share, binomial standard error, and paired difference from SH+SG."""
    rows = []
    for m in measured:
        parameters: Chosen = getattr(m, which)
        for epsilon in m.epsilons:
            comparison = m.comparison(epsilon, parameters, cut=True)
            for name in comparison.methods:
                share, apart = comparison.share(name, epsilon), comparison.difference(name, OURS)
                printed, note = m.published("attack_posthoc_accuracy", epsilon, name.split(",")[0])
                method, value = METHODS.get(name), parameters.get((epsilon, name.split(",")[0]))
                shown = METHODS[name.split(",")[0]]
                low, high = comparison.interval(name, epsilon)
                further = {
                    "95 % interval": f"{100 * low:.1f} to {100 * high:.1f}",
                    "less SH+SG": None if name == OURS else 100 * float(apart.value[0]),
                    "paired standard error": None if name == OURS else 100 * float(apart.stderr[0]),
                    "McNemar p": None if name == OURS else float(apart.p_value[0]),
                    "smoothing": "–" if value is None else f"{shown.printed_parameter} = {shown.printed(value):.3g}",
                    "calls": _calls(m, method.name if method else OURS, value),
                    "note": note,
                }
                labels = {"network": m.classifier.title, "ε": epsilon, "method": name}
                rows.append(with_published(labels, 100 * share.value, printed, 100 * share.stderr, **further))
    return rows


def _calls(m: Measured, name: str, value: float | None) -> int | None:
    found = m.calls.get((name, value), 0.0)
    return round(found) if found else None


def parameter_rows(measured: Sequence[Measured]) -> list[Row]:
    """Values chosen on validation images, compared with those of the paper."""
    rows = []
    for m in measured:
        for epsilon in m.epsilons:
            for name, method in METHODS.items():
                if method.parameter is None:
                    continue
                ours = method.printed(m.chosen[epsilon, name])
                printed, note = m.published("attack_smoothing", epsilon, name)
                rows.append(
                    {
                        "network": m.classifier.title,
                        "ε": epsilon,
                        "method": name,
                        "parameter": method.printed_parameter,
                        "ours": ours,
                        "published": printed,
                        "ratio": None if not printed else ours / printed,
                        "note": note,
                    }
                )
    return rows


# --- findings ---------------------------------------------------------------------------------------------------------


def findings(measured: Sequence[Measured]) -> list[str]:
    """Summarise the tables in numbers."""
    lines = [f"{m.classifier.title}: {m.classifier.words}; {m.n_points} test images" for m in measured]
    lines.append(_strongest(measured))
    lines += [line for m in measured for epsilon in m.epsilons if (line := _not_strongest(m, epsilon))]
    lines.append(_own_hessian(measured))
    lines += _cuts(measured)
    return lines


def _strongest(measured: Sequence[Measured]) -> str:
    strongest, tied, total = 0, 0, 0
    for m in measured:
        for epsilon in m.epsilons:
            comparison = m.comparison(epsilon, m.chosen)
            shares = {name: comparison.share(name, epsilon).value for name in comparison.methods}
            others = min(share for name, share in shares.items() if name != OURS)
            total += 1
            strongest += shares[OURS] < others
            tied += shares[OURS] == others
    return (
        f"SH+SG is the strongest attack in {strongest} of {total} columns and tied with another in {tied} (published: "
        "14 of 15, including ties)"
    )


def _not_strongest(m: Measured, epsilon: float) -> str | None:
    """The method that is stronger than SH+SG in a column, and the significance of the difference."""
    comparison = m.comparison(epsilon, m.chosen)
    shares = {name: comparison.share(name, epsilon).value for name in comparison.methods}
    best = min(shares, key=lambda name: shares[name])
    if shares[best] >= shares[OURS]:
        return None
    apart = comparison.difference(best, OURS)
    p = float(apart.p_value[0])
    words = "significant" if p < SURE else "not significant"
    return (
        f"{m.classifier.title} at ε = {epsilon:g}: SH+SG is not the strongest; {best} leaves "
        f"{100 * shares[best]:.1f} % unchanged, SH+SG {100 * shares[OURS]:.1f} % (paired "
        f"{100 * float(apart.value[0]):+.1f} ± {100 * float(apart.stderr[0]):.1f}, p = {p:.2g}: {words})"
    )


def _own_hessian(measured: Sequence[Measured]) -> str:
    weaker, total = 0, 0
    for m in measured:
        for epsilon in m.epsilons:
            comparison = m.comparison(epsilon, m.chosen)
            weaker += comparison.share("H+G", epsilon).value > comparison.share("SG", epsilon).value
            total += 1
    return f"the Hessian of the network, H+G, is weaker than SG in {weaker} of {total} columns (published: 14 of 15)"


def _cuts(measured: Sequence[Measured]) -> list[str]:
    """The effect of the paper's reduction."""
    lines = []
    for m in measured:
        differ = []
        for epsilon in m.epsilons:
            comparison = m.comparison(epsilon, m.chosen, cut=True)
            if m.cut_name in comparison.methods:
                differ.append(100 * float(comparison.difference(m.cut_name, OURS).value[0]))
        if differ:
            lines.append(
                f"{m.classifier.title}: keeping the eigenvectors with {m.keep:g} of Σ|λ| changes the share of "
                f"SH+SG by {min(differ):+.1f} to {max(differ):+.1f} points"
            )
    return lines


# --- figure -----------------------------------------------------------------------------------------------------------

_LOOK = {
    "SG": (COLOURS[0], "o"),
    "SP H+G": (COLOURS[1], "s"),
    "SP G": (COLOURS[4], "v"),
    "H+G": (COLOURS[2], "D"),
    "G": ("#4d4d4d", "X"),
}


def figure(measured: Sequence[Measured]) -> Figure:
    """Predictions left unchanged by each attack minus those of SH+SG, measured (filled) and published (hollow)."""
    from smoothhess.view.figures.canvas import new_figure

    drawn = new_figure(COLUMN, 0.6 + 1.6 * len(measured))
    axes = drawn.subplots(len(measured), 1, squeeze=False)[:, 0]
    for ax, m in zip(axes, measured, strict=True):
        _panel(ax, m)
    axes[-1].set_xlabel("radius ε; unchanged by SH+SG, % (published)")
    drawn.supylabel("left unchanged beyond SH+SG (percentage points)", fontsize=7.5)
    legend_with_published(drawn, _LOOK, ncols=6)
    return drawn


def _panel(ax: Axes, m: Measured) -> None:
    from smoothhess.view.figures.canvas import INK

    ax.axhline(0, color=INK, linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
    ax.margins(y=0.08)  # no marker touches the frame
    labels = []
    for i, epsilon in enumerate(m.epsilons):
        comparison = m.comparison(epsilon, m.chosen)
        base = m.published("attack_posthoc_accuracy", epsilon, OURS)[0]
        words = "" if base is None else f"\n({base:.1f})"
        labels.append(f"{epsilon:g}\n{100 * comparison.share(OURS, epsilon).value:.1f}{words}")
        for k, (name, (colour, marker)) in enumerate(_LOOK.items()):
            apart, x = comparison.difference(name, OURS), i + 0.14 * (k - 2)
            value, error = 100 * float(apart.value[0]), 100 * float(apart.stderr[0])
            ax.errorbar(x, value, error, fmt=marker, color=colour, markersize=3, elinewidth=0.7, zorder=3)
            printed = m.published("attack_posthoc_accuracy", epsilon, name)[0]
            if printed is not None and base is not None:
                hollow: dict[str, Any] = {"markerfacecolor": "none", "markersize": 4.4, "markeredgewidth": 0.6}
                ax.plot(x, printed - base, marker, color=colour, zorder=2, **hollow)
    ax.set_xticks(range(len(labels)), labels, fontsize=6.5)
    ax.set_title(m.classifier.title, loc="left", fontsize=8)
