"""The files of one explanation: page, figures, table of pairs, result."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from smoothhess.cli.explain.example_question import Question
from smoothhess.cli.explain.inputs import unmoved
from smoothhess.cli.explain.load_model import Model
from smoothhess.result import export
from smoothhess.result.interactions import Interactions

MOST_ROWS = 20_000  # pairs in a csv file
COLUMNS = (*export.COLUMNS[1:], "unit")  # what one unit of both features is: "sd", or empty for the file's own


def write(question: Question, result: Interactions, model: Model, place: Path, remarks: Sequence[str]) -> None:
    """All files of an example into a folder."""
    name = question.example.name
    result.save(place / f"{name}.safetensors")
    write_pairs(result, question.names, place / f"{name}.csv", "sd" if question.example.units else "")
    draw(question, result, place)
    write_page(question, result, model, place / f"{name}.html", remarks)


def write_pairs(result: Interactions, names: Sequence[str] | None, path: Path, unit: str = "") -> None:
    """The strongest pairs as csv, one row each."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows((*row[1:], unit) for row in export.rows(result, names, k=MOST_ROWS))


def left_out(result: Interactions, name: str) -> list[str]:
    """A remark where the csv file has no room for all pairs."""
    d = result.shape[1]
    pairs = d * (d - 1) // 2
    return [] if pairs <= MOST_ROWS else [f"{name}.csv holds the {MOST_ROWS} strongest of {pairs} pairs"]


def draw(question: Question, result: Interactions, place: Path) -> None:
    """Figures of a result, as fits its kind of input."""
    example, names = question.example, {"names": question.names}
    kinds: dict[str, dict[str, Any]] = {"pairs": {"k": 10, **names}, "heatmap": names}
    if example.kind == "image":
        short = [name.split(" ", 1)[-1] for name in question.names or ()]  # there is little room on an image
        kinds |= {"segment": names, "graph": {"over": "image", "names": short}}
    elif example.kind == "series":
        kinds |= {"series": {"step": question.step}}
    else:
        kinds |= {"gradient": names, "graph": names}
    for kind, options in kinds.items():
        axes = result.plot(kind, **options)
        axes.figure.savefig(place / f"{example.name}-{kind}.png", dpi=150)


def write_page(question: Question, result: Interactions, model: Model, path: Path, remarks: Sequence[str]) -> None:
    """The interactive page."""
    from smoothhess.view.report import report

    example = question.example
    series: Any = False
    if example.kind == "series":
        series = True if question.step is None else torch.arange(example.values.shape[-1]) * question.step
    told = [f"one unit of a feature is {example.units}"] if example.units else []
    if example.still is not None and example.names is not None:
        told.append(unmoved(example.names, example.still))
    report(
        result,
        path,
        names=question.names,
        image=example.picture,
        series=series,
        classes=question.target.name if question.target.name in (question.classes or ()) else None,
        title=f"{example.title}: what acts together for {question.target.name} in {model.title}",
        headings=[example.title],
        values=example.original if question.segments is None else None,
        units="s" if example.kind == "series" and question.step is not None else None,
        note=" ".join(f"{t[0].upper()}{t[1:].rstrip('.')}." for t in (*told, *remarks)),
        kind=example.kind if example.kind in ("image", "series") else "table",
    )
