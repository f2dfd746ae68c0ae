"""Compare the records that a loader returns with those in the store, and the numbers of records between processes."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from smoothhess.datasets.store.shard_files import Pass, add_pass, passes
from smoothhess.datasets.store.store_folder import Store
from smoothhess.datasets.store.writer_lock import one_at_a_time, other_writers

NAMED = 5  # record numbers in an error message


class DataCheck:
    """The hashes of all records that were read, compared with the store when read and again at the end."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.path, self.rank, self.world_size = store.path, rank, world_size
        self.known = dict(zip(store.numbers, store.column("digest").tolist(), strict=True))
        self.digests = array("q")
        self.before = passes(store.path).get(rank)

    def read(self, digests: Sequence[int]) -> list[bool]:
        """Whether each of the next records is stored; raises ValueError for a record that differs."""
        first = len(self.digests)
        self.digests.extend(digests)
        known = [self.known.get(first + i) for i in range(len(digests))]
        for i, (stored, given) in enumerate(zip(known, digests, strict=True)):
            if stored is not None and stored != given:
                raise ValueError(another_record(first + i))
        return [stored is not None for stored in known]

    @property
    def ended(self) -> Pass:
        """Number and hash of all records, which the processes of a job must share."""
        data = hashlib.blake2b(self.digests, digest_size=8).hexdigest()
        return Pass(self.world_size, len(self.digests), data)

    def finish(self, complete: bool) -> Store:
        """Check the records that other processes have written, and note that this process has read all records.

        Args:
            complete: whether all processes have ended their share.

        Returns:
            The store with all records written so far.
        """
        with one_at_a_time(self.path):  # of two processes that end at the same time, one sees the other
            ended = {r: p for r, p in passes(self.path).items() if p.world_size == self.world_size and r != self.rank}
            store = Store(self.path)
            self._refuse_other_records(store)
            if self.world_size > 1 and not complete:
                running = other_writers(self.path, self.rank)
                ended = {r: p for r, p in ended.items() if r < self.world_size and r not in running}
                self._refuse_other_data(ended)
            count = len(self.digests)
            everyone = len([p for p in ended.values() if p.records == count]) == self.world_size - 1
            if (complete or everyone) and (missing := store.missing(count)):
                ranks = sorted({n // store.pack_size % self.world_size for n in missing})
                raise ValueError(
                    f"{self.path} lacks {len(missing)} of {count} records: {_named(missing)}, explained by rank(s) "
                    f"{', '.join(map(str, ranks))} of {self.world_size}. Run the same call there again."
                )
            add_pass(self.path, self.rank, self.ended)
        return store

    def _refuse_other_data(self, ended: dict[int, Pass]) -> None:
        mine = self.ended
        count = mine.records
        for rank, other in ended.items():
            if other.records == count and other.data != mine.data:
                raise ValueError(
                    f"rank {rank} has read other records than this process (rank {self.rank}). Use the same loader, "
                    "without shuffling or random augmentation, in every process."
                )
            grown = self.before is not None and self.before == other and other.records < count
            if other.records != count and not grown:  # after growth, the other process is expected to run again
                fewer = sorted((other.records, count))
                raise ValueError(
                    f"rank {rank} has read {other.records} records, this process (rank {self.rank}) {count}: records "
                    f"{_named(range(*fewer))} are missing in one of them. Use the same loader in every process."
                )

    def _refuse_other_records(self, store: Store) -> None:
        refuse_fewer(self.path, len(self.digests), store)
        given = np.frombuffer(self.digests, np.int64)[store.numbers]
        differ = np.flatnonzero(given != store.column("digest"))
        if len(differ):
            raise ValueError(another_record(store.numbers[differ[0]]))


def refuse_fewer(path: Path, count: int, store: Store) -> None:
    """Raise ValueError if the store holds records beyond the `count` records of a loader."""
    beyond = [n for n in store.numbers if n >= count]
    if beyond:
        raise ValueError(
            f"the loader returns {count} records, but {path} also holds {_named(beyond)} ({len(beyond)} more). Pass "
            "all records that the store was made from, or use another folder."
        )


def another_record(number: int) -> str:
    """The text of the error for a record that is not the one in the store."""
    return (
        f"record {number} is not the one that was explained under this number. The loader must return the same records "
        "in the same order each time and in every process: no shuffling, no random augmentation, the same data. For "
        "other data use another store."
    )


def _named(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else ""
    return ", ".join(map(str, numbers[:NAMED])) + more
