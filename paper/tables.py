"""Rows → csv and Markdown, and figures → png and svg."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paper.cells import write_atomically
from smoothhess.model.atomic_write import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLOURS",
    "COLUMN",
    "legend_with_published",
    "markdown",
    "number",
    "panel_title",
    "print_style",
    "save_figure",
    "with_published",
    "write_csv",
    "write_page",
    "write_table",
]

Row = Mapping[str, Any]
NONE = "–"
COLUMN = 3.3  # width of a printed column in inches
# Distinguishable for every kind of colour vision (Okabe and Ito): blue, vermilion, green, pink, orange, sky.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_FIGURE: dict[Any, str] = {"svg.hashsalt": "smoothhess", "svg.fonttype": "path"}  # the same drawing gives the same file


def number(value: float | None, digits: int = 3) -> str:
    """Format a number for a table.

    >>> number(4.123e-05), number(2.5), number(12345.0), number(0.0), number(None), number(float("nan"))
    ('4.12e-05', '2.5', '1.23e+04', '0', '–', '–')
    """
    if value is None or math.isnan(value):
        return NONE
    return f"{value:.{digits}g}"


def with_published(
    labels: Row, ours: float, published: float | None, stderr: float | None = None, **further: Any
) -> dict[str, Any]:
    """One row of a comparison: labels | ours | standard error | published | ratio | further columns.

    >>> with_published({"method": "SG"}, 4.5e-05, 4.5e-05, 1e-06)["ratio"]
    1.0
    """
    ratio = None if published is None or published == 0 else ours / published
    return {**labels, "ours": ours, "standard error": stderr, "published": published, "ratio": ratio, **further}


def markdown(rows: Sequence[Row], columns: Sequence[str] | None = None, digits: int = 3) -> str:
    """A Markdown table; the columns are those of the rows in order of appearance. Floats are rounded, integers not.

    >>> print(markdown([{"method": "SG", "ours": 4.2e-05, "published": None}]))
    | method | ours | published |
    |---|---|---|
    | SG | 4.2e-05 | – |
    """
    named = _columns(rows, columns)
    lines = ["| " + " | ".join(named) + " |", "|" + "---|" * len(named)]
    for row in rows:
        lines.append("| " + " | ".join(_shown(row.get(name), digits) for name in named) + " |")
    return "\n".join(lines)


def write_csv(rows: Sequence[Row], path: Path, columns: Sequence[str] | None = None) -> Path:
    """Write a csv file with all digits; None is an empty cell."""
    named = _columns(rows, columns)
    text = io.StringIO()
    writer = csv.DictWriter(text, named, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return write_atomically(text.getvalue(), path)


def write_table(
    rows: Sequence[Row],
    folder: Path,
    name: str,
    heading: Sequence[str] = (),
    columns: Sequence[str] | None = None,
    digits: int = 3,
) -> list[Path]:
    """Write `name`.csv with all digits and `name`.md with the heading and the rounded table; return both paths."""
    page = "\n".join([*heading, *([""] if heading else []), markdown(rows, columns, digits), ""])
    return [write_csv(rows, folder / f"{name}.csv", columns), write_atomically(page, folder / f"{name}.md")]


def write_page(
    path: Path, title: str, made_by: Sequence[str], lines: Sequence[str], tables: Mapping[str, Sequence[Row]]
) -> Path:
    """Write a Markdown page: command and machine (`Options.made_by`), findings, and one table below each heading."""
    page = [f"# {title}", "", *made_by, "", *(f"- {line}" for line in lines)]
    for heading, rows in tables.items():
        page += ["", f"## {heading}", "", markdown(rows)]
    return write_atomically("\n".join([*page, ""]), path)


def panel_title(ax: Axes, title: str, further: str = "") -> None:
    """Write a title at the left of a panel, and a smaller line below it."""
    from smoothhess.view.figures.canvas import INK

    ax.set_title(title, loc="left", pad=15 if further else 5)
    below = ax.text(0, 1.02, further, transform=ax.transAxes, va="bottom", ha="left", color=INK, fontsize=7)
    below.set_in_layout(False)  # else a long line makes the panel narrow


@contextmanager
def print_style() -> Iterator[None]:
    """Context with font sizes and line widths for a figure of one printed column, 3.3 inches wide."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'smoothhess[view]'") from error
    style: dict[Any, Any] = {
        "font.size": 7.5,
        "axes.titlesize": 8,
        "axes.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.fontsize": 7,
        "legend.frameon": False,
        "lines.linewidth": 1.2,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "xtick.minor.width": 0.4,
        "ytick.minor.width": 0.4,
    }
    with mpl.rc_context(style):
        yield


def legend_with_published(figure: Figure, look: Mapping[str, tuple[str, str]], ncols: int) -> None:
    """Draw a legend below the panels: colour and marker of each method; hollow markers are published values."""
    from matplotlib.lines import Line2D

    shown = {**look, "published": ("#4d4d4d", "o")}
    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle="none", markersize=3.5, label=name)
        for name, (colour, marker) in shown.items()
    ]
    handles[-1].set_markerfacecolor("none")
    figure.legend(handles=handles, loc="outside lower center", ncols=ncols, columnspacing=0.7, handletextpad=0.0)


def save_figure(figure: Figure, folder: Path, name: str, dpi: int = 250) -> list[Path]:
    """Write `name`.png and `name`.svg, each atomically, and return both paths."""
    import matplotlib as mpl

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
        path = folder / f"{name}.{kind}"
        with atomic_write(path) as temporary, mpl.rc_context(_FIGURE):
            figure.savefig(temporary, format=kind, dpi=dpi, metadata=metadata)
        written.append(path)
    return written


def _columns(rows: Sequence[Row], columns: Sequence[str] | None) -> list[str]:
    if columns is not None:
        return list(columns)
    return list(dict.fromkeys(name for row in rows for name in row))


def _shown(value: Any, digits: int) -> str:
    if value is None or isinstance(value, float):
        return number(value, digits)
    return str(value).replace("|", "\\|")
