import csv

import matplotlib as mpl
from matplotlib.figure import Figure

from paper.tables import markdown, number, print_style, save_figure, with_published, write_table

ROWS = [
    with_published({"method": "SH+SG", "ε": 0.25}, 1.0749e-06, 9.6e-07, 8.123e-08, calls=25088),
    with_published({"method": "a|b", "ε": 1.0}, 1 / 3, None),
]


def test_a_comparison_has_ours_published_ratio_and_error():
    first, second = ROWS
    assert first["ratio"] == 1.0749e-06 / 9.6e-07
    assert list(first) == ["method", "ε", "ours", "standard error", "published", "ratio", "calls"]
    assert second["published"] is second["ratio"] is second["standard error"] is None
    assert with_published({}, 2.0, 0.0)["ratio"] is None  # 0.0 % is printed in the attack table


def test_markdown_rounds_floats_only_and_keeps_its_columns():
    lines = markdown(ROWS).splitlines()
    assert lines[0] == "| method | ε | ours | standard error | published | ratio | calls |"
    assert lines[1] == "|---|---|---|---|---|---|---|"
    assert lines[2] == "| SH+SG | 0.25 | 1.07e-06 | 8.12e-08 | 9.6e-07 | 1.12 | 25088 |"
    assert lines[3] == "| a\\|b | 1 | 0.333 | – | – | – | – |"
    assert markdown(ROWS, columns=["ours", "method"], digits=5).splitlines()[2] == "| 1.0749e-06 | SH+SG |"


def test_csv_has_every_digit(tmp_path):
    table, page = write_table(ROWS, tmp_path / "new", "cells", ["# Title", "", "made by"])
    with table.open(encoding="utf-8", newline="") as stream:
        back = list(csv.DictReader(stream))
    assert [float(row["ours"]) for row in back] == [1.0749e-06, 1 / 3]
    assert (back[0]["calls"], back[1]["calls"], back[1]["method"], back[1]["published"]) == ("25088", "", "a|b", "")
    assert page.read_text(encoding="utf-8").startswith("# Title\n\nmade by\n\n| method | ε |")
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["cells.csv", "cells.md"]


def test_numbers_that_are_not_known():
    assert number(float("nan")) == number(None) == "–"
    assert number(float("inf")) == "inf"


def drawing():
    with print_style():
        figure = Figure(figsize=(2, 1))
        figure.subplots().plot([1, 2, 4])
    return figure


def test_figures_are_png_and_svg_and_the_same_every_time(tmp_path):
    before = dict(mpl.rcParams)
    first = save_figure(drawing(), tmp_path / "one", "line")
    second = save_figure(drawing(), tmp_path / "two", "line")
    assert [p.name for p in first] == ["line.png", "line.svg"]
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]
    assert first[0].read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in first[1].read_bytes()
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == ["line.png", "line.svg"]
    assert dict(mpl.rcParams) == before
