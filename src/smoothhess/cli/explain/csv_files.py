"""Reads tables from csv and tsv files with a header.

Parsing, row selection and column moments belong here; the units in which noise is added belong to `inputs`.
"""

from __future__ import annotations

import csv
import difflib
import io
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from smoothhess.cli.explain.option_values import parse_rows
from smoothhess.linalg.memory import TABLE_BYTES
from smoothhess.model.bounded_files import read_text

MISSING = {"", "na", "n/a", "nan", "null", "none", "?"}
FIRST_ROWS = 5  # rows explained by default
MOST_LISTED = 20  # columns that an error names


@dataclass(frozen=True, eq=False)
class Table:
    """The numbers of a csv file; an empty cell is NaN."""

    path: Path
    names: tuple[str, ...]
    values: Tensor  # (rows, columns) float64

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return the mean and standard deviation of each column over its non-missing cells."""
        present = torch.isfinite(self.values)
        count = present.sum(0)
        filled = self.values.nan_to_num()
        mean = filled.sum(0) / count.clamp_min(1)
        squares = torch.where(present, filled - mean, 0.0).square().sum(0)
        deviation = (squares / (count - 1).clamp_min(1)).sqrt()
        flat = deviation <= 1e-12 * mean.abs()  # a constant column, up to rounding
        return mean, torch.where(flat, 0.0, deviation)

    def row(self, number: int) -> Tensor:
        """Return the row to explain.

        Raises:
            ValueError: If a cell of the row is empty.
        """
        row = self.values[number]
        if not torch.isfinite(row).all():
            column = self.names[int(torch.nonzero(~torch.isfinite(row))[0])]
            raise ValueError(
                f"{self.path}, row {number}, column {column!r} is empty or NaN. Fill it, omit the row with --rows "
                f"or the column with --drop {column!r}."
            )
        return row


def read(path: Path, drop: Sequence[str] = ()) -> Table:
    """Read a csv (or tsv) file whose first line names the columns; the columns in `drop` are omitted."""
    text = read_text(path, TABLE_BYTES)
    separator = max(",;\t", key=text.partition("\n")[0].count)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
        lines = [line for line in reader if len(line) > 1 or "".join(line).strip()]
    except csv.Error as error:
        raise ValueError(f"{path} is not a csv file ({error}).") from error
    # spreadsheets append rows of empty cells; such rows elsewhere keep their row number
    while lines and not any(cell.strip() for cell in lines[-1]):
        lines.pop()
    if len(lines) < 2:
        raise ValueError(
            f"{path} has {len(lines)} line(s): expected a header that names the columns, and at least one row."
        )
    names = [cell.strip() for cell in lines[0]]
    if all(_number(name) is not None for name in names):
        raise ValueError(f"{path}: the first line contains numbers. Expected a header that names the columns.")
    if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ValueError(f"{path}: two columns have the name {repeated[0]!r}. Rename one.")
    known = set(names)
    dropped = {part: None for words in drop for part in ([words] if words in known else words.split(",")) if part}
    if unknown := [name for name in dropped if name not in known]:
        near = difflib.get_close_matches(unknown[0], names, 3, 0.5)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise ValueError(f"--drop {unknown[0]!r}: {path} has no such column. Its columns are {_listed(names)}.{hint}")
    kept = [i for i, name in enumerate(names) if name not in dropped]
    if not kept:
        raise ValueError(f"--drop leaves no column of {path}.")
    return Table(
        path, tuple(names[i] for i in kept), torch.tensor(_cells(path, lines[1:], names, kept), dtype=torch.float64)
    )


def _cells(path: Path, lines: list[list[str]], names: list[str], kept: list[int]) -> list[list[float]]:
    found = []
    for row, line in enumerate(lines):
        if len(line) != len(names):
            raise ValueError(f"{path}, row {row}: {len(line)} cells, but the header names {len(names)} columns.")
        numbers = [_number(line[i]) for i in kept]
        if None in numbers:
            place = kept[numbers.index(None)]
            column = names[place]
            if re.fullmatch(r"\s*[-+]?\d+,\d+\s*", line[place]):
                raise ValueError(
                    f"{path}, row {row}, column {column!r}: got a decimal comma. Write numbers with a point, as in 1.5."
                )
            raise ValueError(
                f"{path}, row {row}, column {column!r}: expected a number, got text. Omit the column with --drop "
                f"{column!r}, or encode it as the numbers that the model expects."
            )
        found.append([math.nan if n is None else n for n in numbers])
    return found


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_LISTED]) + (" …" if len(names) > MOST_LISTED else "")


def _number(cell: str) -> float | None:
    """Return the number in a cell, NaN for an empty cell, None for text."""
    if cell.strip().lower() in MISSING:
        return math.nan
    try:
        return None if "_" in cell else float(cell)  # float() accepts 1_000
    except ValueError:
        return None


def chosen_rows(words: str | None, count: int, path: Path) -> list[int]:
    """Return the row numbers selected by "0:5", "3", "1,4,7" or "all"; the first five by default.

    >>> chosen_rows("0:3,7", 10, Path("x.csv")), chosen_rows("-1", 10, Path("x.csv"))
    ([0, 1, 2, 7], [9])
    """
    if words is None:
        return list(range(min(count, FIRST_ROWS)))
    everything = range(count)
    chosen: list[int] = []
    for part, rows in parse_rows(words):
        try:
            chosen += everything[rows] if isinstance(rows, slice) else [everything[rows]]
        except IndexError as error:
            raise ValueError(f"--rows {part}: {path} has rows 0 … {count - 1}.") from error
    if not chosen:
        raise ValueError(f"--rows {words} selects none of the {count} rows of {path}.")
    return list(dict.fromkeys(chosen))
