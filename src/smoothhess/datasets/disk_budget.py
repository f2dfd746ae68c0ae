"""How much a job takes: bytes of a record on disk, records that are explained together."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from smoothhess.curvature.control_variate import CONTROL_LIMIT, MOST_BYTES, THIN_MOST
from smoothhess.datasets.store.shard_files import size_of
from smoothhess.estimate.statistics import PROBES, head_rows

PACK_BYTES = 1 << 29  # of statistics held for the records of a pack; half of the memory on a GPU
MOST_RECORDS = {"cpu": 256, "cuda": 4096}
USUAL_ROWS = 512  # that an adaptive run draws, or one for each dimension, whichever is more
SMALL = 128  # features up to which matrices are kept unless told otherwise: no more than 130 kB a record
SUMMARY_MATRICES = 10  # float64 that a global summary is made of
SCALAR_BYTES = 100  # numbers of a record beside its vectors and matrices, about


@dataclass(frozen=True)
class Sizes:
    """What the records of a job have in common."""

    d: int  # features of an input
    features: int  # that are paired: d, or the number of groups
    rank: int  # dimensions that the draws live in
    itemsize: int  # bytes of a number
    rows: int | None  # draws of a record; None where each stops on its own, and for explainers without draws
    most_rows: int  # that it may have

    @property
    def grouped(self) -> bool:
        """Whether group sums are kept."""
        return self.features != self.d

    def record_bytes(self, keep: str, n_pairs: int) -> int:
        """Bytes of a record on disk, at least."""
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
        """Of the draws of a record, without a control variate."""
        k, head = (self.features if self.grouped else self.rank), min(rows, head_rows(self.rank))
        size = head * (3 * k + 5) * self.itemsize + (8 + self.itemsize) * k
        if rows > head_rows(self.rank):
            size += 8 * k**2
        if self.grouped:
            size += 8 * self.rank * (k + PROBES) + (self.itemsize + 16) * k**2  # served sums, gram
        return size

    def summary_bytes(self) -> int:
        """Of the global summary."""
        return SUMMARY_MATRICES * 8 * self.features**2

    def pack_size(self, device: torch.device) -> int:
        """Records that are explained together: enough to fill the device, few enough to fit."""
        rows = self.rows or min(self.most_rows, max(USUAL_ROWS, self.rank))
        closed = self.rank * (self.rank if self.rank <= CONTROL_LIMIT else 2 * THIN_MOST)
        each = self._statistics_bytes(rows) + 16 * closed + 32 * self.features**2
        room, most = PACK_BYTES, MOST_BYTES
        if device.type == "cuda":  # what starting the work of a pack takes is shared by its records
            room, most = torch.cuda.get_device_properties(device).total_memory // 2, 4 * MOST_BYTES
        # the closed form is left out where it would hold more than this, which must not hang on who is in a pack
        within = most // max(closed * self.itemsize, 1)
        return max(1, min(room // each, within, MOST_RECORDS.get(device.type, MOST_RECORDS["cpu"])))


@dataclass(frozen=True)
class Room:
    """Where a store may grow, and how far."""

    folder: Path
    fixed: int  # bytes that are needed once
    max_bytes: int | None

    def refuse(self, per_record: int, records: int) -> None:
        """Raise where that many further records cannot fit."""
        here = self.folder if self.folder.is_dir() else self.folder.parent
        if not here.is_dir():
            raise ValueError(f"the folder {here} does not exist. Make it first.")
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
    "Pass feature_mask (groups of features instead of all pairs), keep='pairs', fewer n_calls where whole results are "
    "kept, summary=False, or fewer records."
)


def in_words(n_bytes: float) -> str:
    """A size for people.

    >>> in_words(512), in_words(4.92e6)
    ('512 B', '4.92 MB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n_bytes < 1000 or unit == "TB":
            break
        n_bytes /= 1000
    return f"{n_bytes:.3g} {unit}"
