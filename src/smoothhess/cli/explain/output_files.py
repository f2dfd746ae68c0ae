"""Writes the files of one explanation: page, figures, table of pairs and result.

Which files exist and when they count as finished belongs to `output_folder`.
"""

from __future__ import annotations

import csv
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from smoothhess.cli.early_interrupt import is_command_line
from smoothhess.cli.explain.example_question import Question
from smoothhess.cli.explain.inputs import unmoved
from smoothhess.cli.explain.load_model import Model
from smoothhess.result.interactions import Interactions
from smoothhess.result.pairs import COLUMNS as PAIR_COLUMNS

MOST_ROWS = 20_000  # maximum number of pairs in a csv file
COLUMNS = (*PAIR_COLUMNS[1:], "unit")  # unit of both features: "sd", or empty for the units of the file


def write(question: Question, result: Interactions, model: Model, place: Path, remarks: Sequence[str]) -> None:
    """Write all files of an example into a folder."""
    name = question.example.name
    result.save(place / f"{name}.safetensors")
    write_pairs(result, question.names, place / f"{name}.csv", "sd" if question.example.units else "")
    draw(question, result, place)
    write_page(question, result, model, place / f"{name}.html", remarks)


def write_pairs(result: Interactions, names: Sequence[str] | None, path: Path, unit: str = "") -> None:
    """Write the strongest pairs as csv, one row per pair; names that a spreadsheet would run as formulas are quoted."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        found = result.top_pairs(MOST_ROWS, names).rows()
        writer.writerows((*(_no_formula(cell) for cell in row[1:]), unit) for row in found)


def _no_formula(cell: Any) -> Any:
    """Return a cell that spreadsheets take for text or a number.

    >>> _no_formula("=1+2"), _no_formula("-5"), _no_formula(-5.0), _no_formula("age")
    ("'=1+2", '-5', -5.0, 'age')
    """
    if not isinstance(cell, str) or not cell.lstrip().startswith(("=", "+", "-", "@")):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def left_out(result: Interactions, name: str) -> list[str]:
    """Return a note if the csv file does not contain all pairs."""
    d = result.shape[1]
    pairs = d * (d - 1) // 2
    return [] if pairs <= MOST_ROWS else [f"{name}.csv holds the {MOST_ROWS} strongest of {pairs} pairs"]


def names(question: Question) -> list[str]:
    """Return the names of the files that `write` writes."""
    name = question.example.name
    figures = [f"{name}-{kind}.png" for kind in _figures(question)]
    return [f"{name}.safetensors", f"{name}.csv", *figures, f"{name}.html"]


def draw(question: Question, result: Interactions, place: Path) -> None:
    """Save the figures that suit the kind of input."""
    for kind, options in _figures(question).items():
        axes = result.plot(kind, **options)
        axes.figure.savefig(place / f"{question.example.name}-{kind}.png", dpi=150)


def _figures(question: Question) -> dict[str, dict[str, Any]]:
    """Return the kinds of figures and their options."""
    named = {"names": question.names}
    kinds: dict[str, dict[str, Any]] = {"pairs": {"k": 10, **named}, "heatmap": named}
    if question.example.kind == "text":  # names are those of the result
        part = {"k": 40} if len(question.example.values) > 40 else {}
        return {"pairs": {"k": 10}, "text": {}, "heatmap": part, "gradient": {}}
    if question.example.kind == "image":
        short = [name.split(" ", 1)[-1] for name in question.names or ()]  # short names: space on an image is limited
        return kinds | {"segment": named, "graph": {"over": "image", "names": short}}
    if question.example.kind == "series":
        return kinds | {"series": {"step": question.step}}
    return kinds | {"gradient": named, "graph": named}


def write_page(question: Question, result: Interactions, model: Model, path: Path, remarks: Sequence[str]) -> None:
    """Write the interactive page."""
    from smoothhess.view.report import report

    example = question.example
    series: Any = False
    if example.kind == "series":
        series = True if question.step is None else torch.arange(example.values.shape[-1]) * question.step
    things = "tokens" if example.kind == "text" else "features"
    notes = [f"one unit of a feature is {example.units}"] if example.units else []
    if example.still is not None and example.names is not None:
        notes.append(unmoved(example.names, example.still))
    report(
        result,
        path,
        names=question.names,
        image=example.picture,
        series=series,
        classes=question.target.name if question.target.name in (question.classes or ()) else None,
        title=f"{example.title}: which {things} act together for {question.target.name} in {model.title}",
        headings=[example.title],
        values=example.original if question.segments is None else None,
        units="s" if example.kind == "series" and question.step is not None else None,
        note=" ".join(f"{t[0].upper()}{t[1:].rstrip('.')}." for t in (*notes, *remarks)),
        kind=example.kind if example.kind != "array" else "table",
        model=model.title,
        command=shlex.join(["smoothhess", *sys.argv[1:]]) if is_command_line() else "",
    )
