"""`Store`: read access to a folder of explanations, also while a job is writing to it.

Stores are written by `explain_dataset`; no method of this module changes a file.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import numpy as np

from smoothhess.datasets.store.record import SCALARS, Record, read_records
from smoothhess.datasets.store.running_summary import covered, standing
from smoothhess.datasets.store.shard_files import Shard, numbers_in, read_manifest, size_of, summaries
from smoothhess.datasets.store.shard_reader import open_shard, read_shards
from smoothhess.evaluate.global_summary import GlobalInteractions


class Store:
    """Explanations of the records of a data set, written by `explain_dataset`.

    Records are indexed by their number, the position in the data set. The list of records is read when the store is
    opened: open it again to see what a running job has added. A warning names shards that cannot be read; all other
    records stay readable.

    Args:
        path: the folder of the store.

    Raises:
        FileNotFoundError: there is no store at `path`.
        ValueError: the manifest is damaged, or was written by another version.

    >>> import tempfile, torch
    >>> from smoothhess import SmoothHess
    >>> from smoothhess.datasets import explain_dataset
    >>> x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)).double()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = explain_dataset(SmoothHess(lambda x: x.prod(1)), x, folder, sigma=0.5, n_calls=60)
    ...     store = Store(folder)
    ...     len(store), store[7].hessian.shape, [record.number for record in store][:3], store.missing(22)
    (20, torch.Size([3, 3]), [0, 1, 2], [20, 21])
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        about = read_manifest(self.path)
        self.settings: dict[str, Any] = about["settings"]
        self.pack_size: int = about["pack_size"]  # records per pack
        self.job: str = about["job"]
        shards = read_shards(self.path, self.job)
        self.shards: tuple[Shard, ...] = tuple(s for s in shards if not s.problem)
        self.damaged: tuple[Shard, ...] = tuple(s for s in shards if s.problem)
        if self.damaged:
            warnings.warn(
                f"{len(self.damaged)} of {len(shards)} shard(s) cannot be read. {self.damaged[0].problem}", stacklevel=2
            )
        self._verified: set[tuple[str, str]] = set()  # tensors whose checksum was compared
        # number, shard and row of each record, sorted by number without duplicates
        numbers = [numbers_in(s.spans) for s in self.shards]
        sizes = [len(n) for n in numbers]
        every = np.concatenate([np.empty(0, np.int64), *numbers])
        self._numbers, first = np.unique(every, return_index=True)
        self._shard = np.repeat(np.arange(len(sizes)), sizes)[first]
        self._row = np.concatenate([np.empty(0, np.int64), *map(np.arange, sizes)]).astype(np.int64)[first]

    @property
    def keep(self) -> str:
        """The `keep` argument of the job: "pairs", "hessian" or "result"."""
        return self.settings["keep"]

    @property
    def estimator_version(self) -> int:
        """Version of the estimator that computed the records."""
        return self.settings.get("estimator_version", 1)  # the first stores have no version

    def __len__(self) -> int:
        """Number of records that can be read."""
        return len(self._numbers)

    @property
    def numbers(self) -> list[int]:
        """Numbers of the records in ascending order."""
        return self._numbers.tolist()

    def __contains__(self, number: object) -> bool:
        return hasattr(number, "__index__") and self._place(int(number)) is not None  # type: ignore[call-overload]

    def _place(self, number: int) -> int | None:
        at = int(np.searchsorted(self._numbers, number))
        return at if at < len(self) and self._numbers[at] == number else None

    def missing(self, total: int | None = None) -> list[int]:
        """Numbers without a record.

        Args:
            total: number of records of the data set; None: up to the largest number in the store.
        """
        end = (int(self._numbers[-1]) + 1 if len(self) else 0) if total is None else total
        return np.setdiff1d(np.arange(end), self._numbers).tolist()

    def __getitem__(self, number: int) -> Record:
        """Read the record with this number.

        Raises:
            IndexError: the store has no record with this number.
            TypeError: `number` is not an integer.
            ValueError: the shard of the record cannot be read.
        """
        if not hasattr(number, "__index__"):
            raise TypeError(f"records are read one by one: expected a number, got {type(number).__name__}.")
        at = self._place(int(number))
        if at is None:
            for shard in self.damaged:
                if any(start <= number < stop for start, stop in shard.spans):
                    raise ValueError(f"record {number} is lost. {shard.problem}")
            raise IndexError(f"record {number} is not in {self.path}, which holds {self._described()}.")
        shard, row = self.shards[self._shard[at]], int(self._row[at])
        with open_shard(self.path, shard, self._verified) as file:
            return next(read_records(file, self.settings, [row]))

    def __iter__(self) -> Iterator[Record]:
        """Iterate over all records in the order of their numbers."""
        start = 0
        while start < len(self):  # consecutive records of one shard
            stop = start + 1
            while stop < len(self) and self._shard[stop] == self._shard[start]:
                stop += 1
            rows = self._row[start:stop].tolist()
            with open_shard(self.path, self.shards[self._shard[start]], self._verified) as file:
                yield from read_records(file, self.settings, rows)
            start = stop

    def column(self, name: str) -> np.ndarray:
        """One scalar of every record, in the order of `numbers`.

        Args:
            name: "output", "value", "value_stderr", "relative_error", "r2", "n_calls", "n_passes" or "digest".

        Raises:
            ValueError: `name` is not one of these.
        """
        if name not in (*SCALARS, "digest"):
            raise ValueError(f"a column is one of {', '.join(SCALARS)}, got {name!r}. Read others from the records.")
        found = []
        for shard in self.shards:
            with open_shard(self.path, shard, self._verified) as file:
                found.append(file.tensor(f"column.{name}").numpy())
        starts = np.cumsum([0, *map(len, found)])
        return np.concatenate(found)[starts[self._shard] + self._row] if found else np.empty(0)

    def summary(self) -> GlobalInteractions:
        """Global interactions of the data set, over exactly the records in the store.

        Raises:
            ValueError: the job was run with summary=False, the store is empty, or summary and records differ.
        """
        if not self.settings["summary"]:
            raise ValueError("no summary was kept (summary=False). Use evaluate.global_interactions, or another store.")
        if not len(self):
            raise ValueError(f"{self.path} holds no records yet.")
        try:
            parts = standing(self.path, [*self.shards, *self.damaged])
        except ValueError:  # a summary is damaged
            parts = []
        inside = np.sort(np.concatenate([np.empty(0, np.int64), *map(covered, parts)]))
        if np.array_equal(inside, self._numbers):
            return reduce(GlobalInteractions.merge, parts)
        if self.is_rebuildable:
            return self.rebuild_summary()
        extra = np.setdiff1d(inside, self._numbers)
        raise ValueError(
            f"the summary and the records of {self.path} differ: {len(extra)} record(s) are only in the summary, "
            f"{len(np.setdiff1d(self._numbers, inside))} only in the store. A shard was removed or cannot be "
            "read, or the job is running: run the same explain_dataset call, then open the store again. A summary can "
            "be rebuilt only from shards that hold their part of it (up to 128 features or groups): the second "
            "estimates of the records are not stored."
        )

    @cached_property
    def is_rebuildable(self) -> bool:
        """Whether all shards hold the summary of their records."""
        for shard in self.shards:
            with open_shard(self.path, shard, self._verified) as file:
                if "summary" not in file.about:
                    return False
        return bool(self.settings["summary"])

    def rebuild_summary(self) -> GlobalInteractions:
        """The summary computed from the shards, equal to the one on file up to rounding.

        Raises:
            ValueError: a shard does not hold the summary of its records, which is the case above 128 features or
                groups, in older stores, and with summary=False; or the store is empty.
        """
        return self._merge_shards(self.shards)

    def summary_of_rank(self, rank: int) -> GlobalInteractions | None:
        """The summary of the records that one process wrote; for modules of this package."""
        own = [s for s in self.shards if s.name.rank == rank]
        if not own:
            return None
        numbers = np.sort(np.concatenate([numbers_in(s.spans) for s in own]))
        with suppress(ValueError, FileNotFoundError):  # missing, or damaged
            path = summaries(self.path, self.shards).get(rank)
            found = None if path is None else GlobalInteractions.load(path)
            if found is not None and np.array_equal(np.sort(covered(found)), numbers):
                return found
        return self._merge_shards(own)

    def _merge_shards(self, shards: Sequence[Shard]) -> GlobalInteractions:
        total: GlobalInteractions | None = None
        for shard in shards:
            with open_shard(self.path, shard, self._verified) as file:
                part = file.summary()
            if part is None:
                raise ValueError(
                    f"{self.path / shard.file} does not hold the summary of its records, so that of the store cannot "
                    "be rebuilt. Records stay readable; explain them into another store for a summary."
                )
            total = part if total is None else total.merge(part)
        if total is None:
            raise ValueError(f"{self.path} holds no records yet.")
        return total

    @property
    def n_bytes(self) -> int:
        """Size of all files in bytes."""
        return size_of(self.path)

    def _described(self) -> str:
        if not len(self):
            return "no records yet"
        gaps = len(self.missing())
        records = f"{len(self)} records, numbers {self._numbers[0]} to {self._numbers[-1]}"
        return f"{records}, {gaps} missing" if gaps else records

    def __repr__(self) -> str:
        model, size = self.settings.get("model", ""), self.n_bytes / 2**20
        return f"Store {self.path}: {self._described()}; keep={self.keep!r}, {model}, {size:.1f} MiB"
