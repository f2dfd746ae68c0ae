"""Tables, figure and findings of the P_MSE experiment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paper.balls import SAMPLERS
from paper.classifiers import Classifier
from paper.experiments import Outcome
from paper.methods import PMSE, Method
from paper.options import Options
from paper.published import published
from paper.tables import COLOURS, COLUMN, legend_with_published, print_style, save_figure, with_published, write_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Chosen", "Measured", "Record", "numbered", "report"]

Row = dict[str, Any]
Chosen = dict[tuple[str, str, float, str], float]  # by function, sampler, ε and method
OURS = "SH+SG"
LEAST_HEIGHT = 2.6  # inches, the minimum for label and legend of a figure
METHODS = {method.name: method for method in PMSE}
NOISY = ": too few calls for a verdict on SH+SG"
FAR = 10.0  # times the measured value: no sampler and no network explains such a ratio
CLAIM = {"lowest": "18 of 18", "least spread": "15 of 18, and 2 ties"}  # the paper's, of SH+SG


@dataclass(frozen=True, eq=False)
class Record:
    """P_MSE of one method at one value of its parameter, of every point."""

    function: str
    epsilon: float
    method: str
    value: float | None  # σ or β
    errors: Mapping[str, Tensor]  # by sampler, (points,)
    draw_error: Mapping[str, float]  # standard error of their mean over the draws of P_MSE
    calls: float  # gradients at perturbed inputs for each point, on average
    passes: float
    error: float  # relative error that the estimates report
    by: str = ""  # which estimator, where two are compared
    seconds: float = math.nan  # for each point

    @staticmethod
    def merged(function: str, epsilon: float, batches: Sequence[Sequence[Row]]) -> list[Record]:
        """Merge the records of the batches of points of a cell, each of which has separate draws."""
        found = []
        for parts in zip(*batches, strict=True):
            first, sizes = parts[0], [len(part["errors"][SAMPLERS[0]]) for part in parts]
            weighted = [(n / sum(sizes), part) for n, part in zip(sizes, parts, strict=True)]
            errors = {s: [e for part in parts for e in part["errors"][s]] for s in SAMPLERS}
            found.append(
                Record(
                    function=function,
                    epsilon=epsilon,
                    method=first["method"],
                    value=first["value"],
                    errors={s: torch.tensor(e, dtype=torch.float64) for s, e in errors.items()},
                    draw_error={s: math.hypot(*(w * part["stderr"][s] for w, part in weighted)) for s in SAMPLERS},
                    calls=sum(w * part["calls"] for w, part in weighted),
                    passes=sum(w * part["passes"] for w, part in weighted),
                    error=sum(w * part["error"] for w, part in weighted),
                    by=first.get("by", ""),
                    seconds=first.get("seconds", math.nan),
                )
            )
        return found

    def mean(self, sampler: str) -> float:
        """Over points."""
        return float(self.errors[sampler].mean())

    def stderr(self, sampler: str) -> float:
        """Of the mean, over points."""
        return _stderr(self.errors[sampler])

    def std(self, sampler: str) -> float:
        """Over points."""
        return float(self.errors[sampler].std()) if len(self.errors[sampler]) > 1 else math.nan


@dataclass(frozen=True, eq=False)
class Measured:
    """All measurements of one network."""

    classifier: Classifier
    functions: Mapping[str, str]  # to the name in the paper's tables
    units: Mapping[str, int]
    epsilons: Sequence[float]
    samplings: Sequence[str]
    n_points: int
    n_samples: int
    n_exact: int | None  # draws in full precision, where the others are in TF32; None: all are
    records: Sequence[Record]
    recipes: Sequence[Record]
    chosen: Chosen
    printed: Mapping[tuple[str, float, str], float]
    choices: Sequence[tuple[Row, list[Row]]]

    def record(self, function: str, epsilon: float, method: str, value: float | None) -> Record | None:
        """The record at this value of the parameter."""
        for r in self.records:
            if (r.function, r.epsilon, r.method, r.value) == (function, epsilon, method, value):
                return r
        return None

    def best(self, function: str, epsilon: float, method: str, sampler: str) -> Record:
        """The record whose parameter was chosen for this sampler, or for the first sampler if there is none."""
        value = None
        if METHODS[method].parameter is not None:
            sampling = sampler if sampler in self.samplings else self.samplings[0]
            value = self.chosen[function, sampling, epsilon, method]
        found = self.record(function, epsilon, method, value)
        assert found is not None
        return found

    def cells(self) -> Iterator[tuple[str, float]]:
        """Every function at every radius."""
        return ((function, epsilon) for function in self.functions for epsilon in self.epsilons)

    def labels(self, function: str, epsilon: float, method: str) -> Row:
        """The first columns of a row."""
        unit = self.units.get(function)
        shown = function if unit is None else f"{function} ({unit})"
        return {"network": self.classifier.title, "function": shown, "ε": epsilon, "method": method}

    def published(self, metric: str, function: str, epsilon: float, method: str) -> tuple[float | None, str]:
        """The printed number, and its known error."""
        found = published(
            metric=metric,
            dataset=self.classifier.dataset,
            network=self.classifier.architecture,
            function=self.functions[function],
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
    heading = [f"# {_title(name)}", "", *made_by, "", *(f"- {line}" for line in lines)]
    files: list[Path] = []
    tables = {
        name: (heading, main_rows(measured)),
        "paired": (_heading(name, "SH+SG against each other method", made_by), paired_rows(measured)),
        "points": (_heading(name, "every point", made_by), point_rows(measured)),
        "std": (_heading(name, "standard deviation over points", made_by), std_rows(measured)),
        "parameters": (_heading(name, "selected σ² and β", made_by), parameter_rows(measured)),
        "published-parameters": (_heading(name, "at the published σ² and β", made_by), printed_rows(measured)),
        "recipe": (_heading(name, "default estimate and published recipe", made_by), recipe_rows(measured)),
    }
    for table, (head, rows) in tables.items():
        if rows:
            notes, rows = numbered(rows)
            files += write_table(rows, folder, table, [*head, *notes])
    with print_style():
        files += save_figure(figure(measured), folder, name)
    return Outcome(name, files, lines)


def _title(name: str) -> str:
    return "P_MSE" if name == "pmse" else "P_MSE, ResNet-101"


def _heading(name: str, words: str, made_by: Sequence[str]) -> list[str]:
    return [f"# {_title(name)}: {words}", "", *made_by]


def numbered(rows: Sequence[Row]) -> tuple[list[str], list[Row]]:
    """Replace long notes by numbers, and list the numbered notes as lines of Markdown.

    >>> numbered([{"note": ""}, {"note": "a misprint"}, {"note": "a misprint"}])
    (['', 'Note 1: a misprint.'], [{'note': ''}, {'note': '1'}, {'note': '1'}])
    """
    notes = [note for note in dict.fromkeys(row.get("note", "") for row in rows) if note]
    lines = [line for i, note in enumerate(notes) for line in ("", f"Note {i + 1}: {note}.")]
    if not any("note" in row for row in rows):
        return lines, list(rows)
    return lines, [{**row, "note": str(notes.index(row["note"]) + 1) if row["note"] else ""} for row in rows]


# --- tables -----------------------------------------------------------------------------------------------------------


def main_rows(measured: Sequence[Measured]) -> list[Row]:
    """Ours and published with the sampler of the paper, and ours over the uniform ball."""
    rows = []
    for m in measured:
        for function, epsilon in m.cells():
            for method in PMSE:
                near, ball = (m.best(function, epsilon, method.name, sampler) for sampler in SAMPLERS)
                printed, note = m.published("pmse_mean", function, epsilon, method.name)
                further = {
                    "ball": ball.mean("ball"),
                    "ball standard error": ball.stderr("ball"),
                    "smoothing": _shown(method, near.value),
                    "calls": round(near.calls) if method.family == "smooth" else None,
                    "note": note,
                }
                labels = m.labels(function, epsilon, method.name)
                rows.append(with_published(labels, near.mean("radius"), printed, near.stderr("radius"), **further))
    return rows


def std_rows(measured: Sequence[Measured]) -> list[Row]:
    """Standard deviations over points, sampler of the paper."""
    rows = []
    for m in measured:
        for function, epsilon in m.cells():
            for method in PMSE:
                record = m.best(function, epsilon, method.name, "radius")
                printed, note = m.published("pmse_std", function, epsilon, method.name)
                # of a standard deviation, for normally distributed points: too small for heavy tails
                n = len(record.errors["radius"])
                stderr = record.std("radius") / math.sqrt(2 * (n - 1)) if n > 1 else math.nan
                labels = m.labels(function, epsilon, method.name)
                rows.append(
                    with_published(
                        labels,
                        record.std("radius"),
                        printed,
                        stderr,
                        ball=m.best(function, epsilon, method.name, "ball").std("ball"),
                        note=note,
                    )
                )
    return rows


def paired_rows(measured: Sequence[Measured]) -> list[Row]:
    """P_MSE of SH+SG minus that of each other method, at each point."""
    rows = []
    for m in measured:
        for function, epsilon in m.cells():
            for method in PMSE[1:]:
                row = m.labels(function, epsilon, method.name)
                for sampler in SAMPLERS:
                    ours, other = (m.best(function, epsilon, name, sampler) for name in (OURS, method.name))
                    apart = ours.errors[sampler] - other.errors[sampler]
                    row |= {
                        f"ratio, {sampler}": ours.mean(sampler) / other.mean(sampler),
                        f"difference, {sampler}": float(apart.mean()),
                        f"paired standard error, {sampler}": _stderr(apart),
                        f"z, {sampler}": _score(apart),
                        f"lower on, {sampler}": f"{int((apart < 0).sum())} of {len(apart)}",
                        f"median ratio, {sampler}": float((ours.errors[sampler] / other.errors[sampler]).quantile(0.5)),
                    }
                rows.append(row)
    return rows


def point_rows(measured: Sequence[Measured]) -> list[Row]:
    """P_MSE of every method at every point, in the order of the test set."""
    return [
        m.labels(function, epsilon, method.name) | {"point": point, "radius": float(radius), "ball": float(ball)}
        for m in measured
        for function, epsilon in m.cells()
        for method in PMSE
        for point, (radius, ball) in enumerate(
            zip(*(m.best(function, epsilon, method.name, s).errors[s] for s in SAMPLERS), strict=True)
        )
    ]


def parameter_rows(measured: Sequence[Measured]) -> list[Row]:
    """Values chosen on validation points, values tied with them, and those of the paper."""
    rows = []
    for m in measured:
        kept = {
            (key["choice"], key["sampling"], epsilon, key["method"]): found
            for key, values in m.choices
            for epsilon, found in zip(key["epsilons"], values, strict=True)
        }
        for (function, sampling, epsilon, name), found in kept.items():
            if function not in m.functions:
                continue
            method = METHODS[name]
            printed, note = m.published("pmse_smoothing", function, epsilon, name)
            tied = [method.printed(v) for v in found["tied"]]
            rows.append(
                {
                    **m.labels(function, epsilon, name),
                    "parameter": method.printed_parameter,
                    "sampler": sampling,
                    "ours": method.printed(found["best"]),
                    "scored": f"{len(found['values'])} of {found['candidates']}",
                    "tied": f"{min(tied):.3g} to {max(tied):.3g}" if len(tied) > 1 else "",
                    "published": printed,
                    "ratio": None if not printed else method.printed(found["best"]) / printed,
                    "at the edge": "yes" if found["at edge"] else "",
                    "note": note,
                }
            )
    order = {name: i for i, name in enumerate(METHODS)}
    return sorted(
        rows, key=lambda row: (row["network"], row["function"], row["sampler"], row["ε"], order[row["method"]])
    )


def printed_rows(measured: Sequence[Measured]) -> list[Row]:
    """At the paper's σ² and β, with its sampler: on the authors' network only the draws differ."""
    rows = []
    for m in measured:
        for function, epsilon in m.cells():
            for method in PMSE:
                value = m.printed.get((function, epsilon, method.name))
                if method.parameter is not None and value is None:
                    continue
                record = m.record(function, epsilon, method.name, value)
                printed, note = m.published("pmse_mean", function, epsilon, method.name)
                if record is None:
                    continue
                labels = m.labels(function, epsilon, method.name)
                further = {
                    "standard error over draws": record.draw_error["radius"],
                    "smoothing": _shown(method, value),
                    "note": note,
                }
                rows.append(with_published(labels, record.mean("radius"), printed, record.stderr("radius"), **further))
    return rows


def recipe_rows(measured: Sequence[Measured]) -> list[Row]:
    """On the same few points: the default estimate, the published recipe, and the others at the published β."""
    rows = []
    for m in measured:
        for r in m.recipes:
            row = {
                **m.labels(r.function, r.epsilon, r.method),
                "by": r.by,
                "points": len(r.errors["radius"]),
                "calls": round(r.calls) if r.by in ("default", "recipe") else None,
                "passes": round(r.passes) if r.by in ("default", "recipe") else None,
                "relative error": r.error if r.by in ("default", "recipe") else None,
                "seconds a point": r.seconds,
                "smoothing": _shown(METHODS[r.method], r.value),
            }
            for sampler in SAMPLERS:
                row |= {sampler: r.mean(sampler), f"{sampler} standard error": r.stderr(sampler)}
            rows.append(row)
    return rows


def _shown(method: Method, value: float | None) -> str:
    return "–" if value is None else f"{method.printed_parameter} = {method.printed(value):.3g}"


def _stderr(values: Tensor) -> float:
    return float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _score(apart: Tensor) -> float:
    """Mean over its standard error."""
    stderr = _stderr(apart)
    return float(apart.mean()) / stderr if stderr > 0 else math.nan


# --- findings ---------------------------------------------------------------------------------------------------------


def findings(measured: Sequence[Measured]) -> list[str]:
    """Summarise the tables in numbers."""
    lines = []
    for m in measured:
        units = "".join(f", {function} is unit {unit}" for function, unit in m.units.items())
        rough = "" if m.n_exact is None else f" (in TF32, corrected with {m.n_exact} exact ones; gradients in TF32)"
        lines.append(
            f"{m.classifier.title}: {m.classifier.words}; {m.n_points} test points, {m.n_samples} draws each"
            f"{rough}{units}"
        )
    for sampler in SAMPLERS:
        lines += _lowest(measured, sampler)
    lines += _totals(measured)
    lines += _sharpness(measured)
    lines += _gradient(measured)
    lines += _cost(measured)
    return lines


def _lowest(measured: Sequence[Measured], sampler: str) -> list[str]:
    """The number of cells in which SH+SG is lowest, and the ratios to the next best."""
    words = {"radius": "radius uniform, the sampler of the tables", "ball": "uniform in the ball"}[sampler]
    lines = []
    for m in measured:
        won, sure, ratios, lost = 0, 0, [], []
        cells = list(m.cells())
        for function, epsilon in cells:
            means = {p.name: m.best(function, epsilon, p.name, sampler).mean(sampler) for p in PMSE}
            second = min((name for name in means if name != OURS), key=lambda name: means[name])
            ours, other = (m.best(function, epsilon, name, sampler).errors[sampler] for name in (OURS, second))
            z = _score(ours - other)
            ratios.append(means[OURS] / means[second])
            if means[OURS] < means[second]:
                won, sure = won + 1, sure + (z <= -2)
            else:
                lost.append(
                    f"{function} at ε = {epsilon:g} ({second} is {1 / ratios[-1]:.2f} of it, {z:+.1f} paired se)"
                )
        exceptions = f"; not lowest: {', '.join(lost)}" if lost else ""
        lines.append(
            f"{m.classifier.title}, {words}: SH+SG is lowest in {won} of {len(cells)} cells, in {sure} of them by two "
            f"paired standard errors; it is {min(ratios):.2f} to {max(ratios):.2f} of the next best{exceptions}"
        )
    return lines


def _totals(measured: Sequence[Measured]) -> list[str]:
    """The paper's counts, over one network of each data set: that trained here, and the neuron by the paper's rule."""
    ours = [m for m in measured if m.classifier.key != "mnist-authors"] or list(measured)
    cells = [(m, f, e) for m in ours for f, e in m.cells() if f in ("logit", "neuron")]
    lines = []
    for sampler in SAMPLERS:
        found = [{p.name: m.best(f, e, p.name, sampler) for p in PMSE} for m, f, e in cells]
        lowest = sum(min(c, key=lambda n, c=c: c[n].mean(sampler)) == OURS for c in found)
        spread = sum(min(c, key=lambda n, c=c: c[n].std(sampler)) == OURS for c in found)
        line = (
            f"{', '.join(m.classifier.title for m in ours)}, {sampler}: SH+SG has the lowest P_MSE in {lowest} of "
            f"{len(cells)} cells (published: {CLAIM['lowest']})"
        )
        if min(m.n_points for m in ours) > 1:
            line += f" and the least standard deviation over points in {spread} (published: {CLAIM['least spread']})"
        lines.append(line)
    return lines


def _sharpness(measured: Sequence[Measured]) -> list[str]:
    """The dependence of the chosen β of SoftPlus on ε."""
    lines = []
    for m in measured:
        for function in m.functions:
            chosen = [m.chosen[function, m.samplings[0], e, "SP H+G"] for e in m.epsilons]
            words = ", ".join(f"{b:g}" for b in chosen)
            product = ", ".join(f"{b * e:.3g}" for b, e in zip(chosen, m.epsilons, strict=True))
            radii = ", ".join(f"{e:g}" for e in m.epsilons)
            lines.append(f"{m.classifier.title}, {function}: β of SP H+G at ε = {radii} is {words}; β·ε = {product}")
    return lines


def _gradient(measured: Sequence[Measured]) -> list[str]:
    """Compare the printed row of G, which is not the error of the gradient, with the measured one."""
    ours, printed = [], []
    for m in measured:
        for function, epsilon in m.cells():
            g, sg = (m.best(function, epsilon, name, "radius").mean("radius") for name in ("G", "SG"))
            ours.append(g / sg)
            shown = m.published("pmse_mean", function, epsilon, "G")[0]
            if shown:
                printed.append(shown / g)
    if not printed:
        return []
    verdict = ", and grows as ε²: it cannot be the error of the gradient" if min(printed) > FAR else ""
    return [
        f"G is {min(ours):.2f} to {max(ours):.2f} times SG; the printed row of G is {min(printed):.3g} to "
        f"{max(printed):.3g} times the measured value{verdict}"
    ]


def _cost(measured: Sequence[Measured]) -> list[str]:
    """Calls of the default estimate and of the recipe, and the P_MSE of both on the same points."""
    lines = []
    for m in measured:
        ours = [m.best(f, e, OURS, "radius") for f, e in m.cells()]
        calls, passes, error = (
            sum(getattr(r, name) for r in ours) / len(ours) for name in ("calls", "passes", "error")
        )
        lines.append(
            f"{m.classifier.title}: SmoothHess took {calls:.0f} calls ({passes:.0f} passes) per point and radius on "
            f"average; relative error of the Hessian {error:.2f}{NOISY if error > 0.5 else ''}"
        )
        by = {words: [r for r in m.recipes if r.by == words and r.method == OURS] for words in ("default", "recipe")}
        if not by["default"] or not by["recipe"]:
            continue
        ratios = [d.mean("radius") / r.mean("radius") for d, r in zip(by["default"], by["recipe"], strict=True)]
        calls, passes, seconds = (
            {words: sum(getattr(r, name) for r in found) / len(found) for words, found in by.items()}
            for name in ("calls", "passes", "seconds")
        )
        lines.append(
            f"{m.classifier.title}: the published recipe took {calls['recipe']:.0f} calls ({seconds['recipe']:.3g} s) "
            f"per point and radius where the default took {calls['default']:.0f} ({passes['default']:.0f} passes, "
            f"{seconds['default']:.3g} s); P_MSE of the default is {min(ratios):.3f} to {max(ratios):.3f} of the "
            f"recipe's on the same {len(by['recipe'][0].errors['radius'])} point(s)"
        )
    return lines


# --- figure -----------------------------------------------------------------------------------------------------------

_LOOK = {
    "SG": (COLOURS[0], "o"),
    "SP H+G": (COLOURS[1], "s"),
    "SP G": (COLOURS[4], "v"),
    "SW H+G": (COLOURS[2], "D"),
    "SW G": (COLOURS[5], "^"),
    "G": ("#4d4d4d", "X"),
}


def figure(measured: Sequence[Measured]) -> Figure:
    """P_MSE of each method over that of SH+SG, measured (filled) and published (hollow)."""
    from smoothhess.view.figures.canvas import new_figure

    panels = [(m, function) for m in measured for function in m.functions if function in ("logit", "neuron")]
    columns = 2 if len(panels) > 1 else 1
    rows = -(-len(panels) // columns)
    drawn = new_figure(COLUMN, max(0.6 + 1.3 * rows, LEAST_HEIGHT))
    axes = drawn.subplots(rows, columns, squeeze=False, sharey="row")
    for ax, panel in zip(axes.flat, panels, strict=False):
        _panel(ax, *panel)
    for ax in axes.flat[len(panels) :]:
        ax.set_axis_off()
    for ax in axes[-1]:
        ax.set_xlabel("radius ε")
    drawn.supylabel("P_MSE over that of SH+SG", fontsize=7.5)
    legend_with_published(drawn, _LOOK, ncols=4)
    return drawn


def _panel(ax: Axes, m: Measured, function: str) -> None:
    from smoothhess.view.figures.canvas import INK

    ax.axhline(1, color=INK, linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
    ax.margins(y=0.08)  # no marker touches the frame
    for k, (name, (colour, marker)) in enumerate(_LOOK.items()):
        for i, epsilon in enumerate(m.epsilons):
            ours, other = (m.best(function, epsilon, method, "radius") for method in (OURS, name))
            x = i + 0.12 * (k - 2.5)
            ax.plot(x, other.mean("radius") / ours.mean("radius"), marker, color=colour, markersize=3.2, zorder=3)
            base, printed = (m.published("pmse_mean", function, epsilon, method)[0] for method in (OURS, name))
            if name != "G" and base and printed:  # the printed row of G is not the error of the gradient
                ax.plot(
                    x,
                    printed / base,
                    marker,
                    color=colour,
                    markerfacecolor="none",
                    markersize=4.6,
                    markeredgewidth=0.6,
                    zorder=2,
                )
    ax.set(yscale="log", xticks=range(len(m.epsilons)), xticklabels=[f"{e:g}" for e in m.epsilons])
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_title(f"{m.classifier.title}, {function}", loc="left", fontsize=7)
