"""Estimate the disk space of a job and the number of records per pack.

Sizes are computed here; the files themselves are written by `smoothhess.datasets.store`.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from smoothhess.curvature.control_variate import CONTROL_LIMIT, THIN_MOST
from smoothhess.datasets.store.shard_files import size_of
from smoothhess.estimate.statistics import PROBES, head_rows
from smoothhess.linalg.memory import CLOSED_FORMS, PACK_STATISTICS

MOST_RECORDS = {"cpu": 256, "cuda": 4096}
USUAL_ROWS = 512  # assumed draws of an adaptive run; the number of dimensions where that is larger
SMALL = 128  # features up to which matrices are kept by default: at most 130 kB per record
SUMMARY_MATRICES = 10  # float64 matrices in a global summary
SCALAR_BYTES = 100  # approximate size of the scalars of a record


@dataclass(frozen=True)
class Sizes:
    """Sizes that all records of a job share."""

    d: int  # features of an input
    features: int  # number of features that form pairs: d, or the number of groups
    rank: int  # rank of the covariance: dimensions of the draws
    itemsize: int  # bytes per number
    rows: int | None  # draws per record; None for adaptive runs and for explainers without draws
    most_rows: int  # largest number of draws per record

    @property
    def grouped(self) -> bool:
        """Whether the features are groups (`feature_mask` was given)."""
        return self.features != self.d

    def record_bytes(self, keep: str, n_pairs: int) -> int:
        """Lower bound of the bytes of a record on disk."""
        f, item = self.features, self.itemsize
        size = SCALAR_BYTES + 2 * f * item  # gradient and its standard error
        if keep != "result":
            size += 57 * min(n_pairs, f * (f - 1) // 2)  # two indices, six numbers and a flag
        if keep == "hessian":
            size += f * (f + 1) * item
        if keep == "result":
            size += self.d * item + self._statistics_bytes(self.rows or 0)
        return size

    def _statistics_bytes(self, rows: int) -> int:
        """Bytes of the statistics of one record, without a control variate."""
        k, head = (self.features if self.grouped else self.rank), min(rows, head_rows(self.rank))
        size = head * (3 * k + 5) * self.itemsize + (8 + self.itemsize) * k
        if rows > head_rows(self.rank):
            size += 8 * k**2
        if self.grouped:
            size += 8 * self.rank * (k + PROBES) + (self.itemsize + 16) * k**2  # group sums, Gram matrix
        return size

    def summary_bytes(self) -> int:
        """Bytes of the global summary."""
        return SUMMARY_MATRICES * 8 * self.features**2

    def pack_size(self, device: torch.device) -> int:
        """Number of records per pack: enough to fill the device, few enough to fit into its memory."""
        rows = self.rows or min(self.most_rows, max(USUAL_ROWS, self.rank))
        closed = self.rank * (self.rank if self.rank <= CONTROL_LIMIT else 2 * THIN_MOST)
        each = self._statistics_bytes(rows) + 16 * closed + 32 * self.features**2
        fitting = PACK_STATISTICS.items(each, device)
        # the closed form is skipped above this size; that decision must not depend on which records share a pack
        within = CLOSED_FORMS.items(closed * self.itemsize, device)
        # large packs amortise the overhead of kernel launches on a GPU
        return min(fitting, within, MOST_RECORDS.get(device.type, MOST_RECORDS["cpu"]))


@dataclass(frozen=True)
class Room:
    """The folder of a store and the limits on its size."""

    folder: Path
    fixed: int  # bytes that do not depend on the number of records
    max_bytes: int | None

    def refuse(self, per_record: int, records: int) -> None:
        """Raise ValueError if that many further records do not fit."""
        here = self.folder if self.folder.is_dir() else self.folder.parent
        if not here.is_dir():
            raise ValueError(f"the folder {here} does not exist. Create it first.")
        present = size_of(here) if here == self.folder else 0
        room, why = shutil.disk_usage(here).free, "the disk has"
        if self.max_bytes is not None and self.max_bytes - present < room:
            room, why = max(self.max_bytes - present, 0), f"max_bytes={self.max_bytes:_} leaves"
        need = per_record * records + self.fixed
        if records and need > room:
            summary = f" and a summary of {in_words(self.fixed)}" if self.fixed else ""
            raise ValueError(
                f"{records} record(s) of at least {in_words(per_record)}{summary} need {in_words(need)}, but {why} "
                f"{in_words(room)}. {ADVICE}"
            )


ADVICE = (
    "Pass feature_mask (groups of features instead of all pairs), keep='pairs', fewer n_calls where keep='result', "
    "summary=False, or fewer records."
)


def in_words(n_bytes: float) -> str:
    """Format a number of bytes with a unit.

    >>> in_words(512), in_words(4.92e6)
    ('512 B', '4.92 MB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n_bytes < 1000 or unit == "TB":
            break
        n_bytes /= 1000
    return f"{n_bytes:.3g} {unit}"
