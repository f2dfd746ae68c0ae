"""Write packs of records as shards, each with an updated global summary.

Names, index and atomic writes of the files are in `shard_files`.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress

import numpy as np
from safetensors.torch import save_file

from smoothhess.datasets.disk_budget import ADVICE, in_words
from smoothhess.datasets.store import shard_files
from smoothhess.datasets.store.record import Rows, shard_of
from smoothhess.datasets.store.running_summary import covered
from smoothhess.datasets.store.shard_files import FORMAT, Name, Shard, commit
from smoothhess.datasets.store.store_folder import Store
from smoothhess.evaluate.global_summary import GlobalInteractions
from smoothhess.linalg.memory import SHARD_BYTES
from smoothhess.model.tensor_hash import with_checksums

SHARD_RECORDS = 4096  # a shard is written when it has as many records, or reaches SHARD_BYTES


PART_FEATURES = 128  # features up to which each shard holds the summary of its records, at most 1.3 MB


class Writer:
    """Collects packs and writes them as shards, each with the summary of all records of this process so far."""

    def __init__(self, store: Store, rank: int, max_bytes: int | None, seconds: float) -> None:
        self.store, self.rank, self.max_bytes, self.seconds = store, rank, max_bytes, seconds
        self.packs: list[Rows] = []
        self.n_bytes = self.n_records = 0  # totals of these packs
        self.began = time.monotonic()
        self.serial = shard_files.next_serial(store.path, rank)
        self.summary: GlobalInteractions | None = None
        self.part: GlobalInteractions | None = None  # of the packs that are not written yet
        self.summed = np.empty(0, np.int64)  # records in a summary whose shard was lost
        self.rebuildable = bool(store.settings["summary"]) and store.is_rebuildable
        if self.rebuildable:
            self.summary = store.summary_of_rank(rank)
        elif store.settings["summary"]:
            for owner, path in shard_files.summaries(store.path, store.shards).items():
                with suppress(FileNotFoundError):  # replaced by a running process, whose records are different
                    found = GlobalInteractions.load(path)
                    lost = np.setdiff1d(covered(found), store.numbers)
                    self.summed = np.union1d(self.summed, lost)
                    self.summary = found if owner == rank else self.summary

    def not_summed(self, numbers: list[int]) -> list[int]:
        """Positions of the records that are in no summary yet."""
        return np.flatnonzero(~np.isin(numbers, self.summed)).tolist()

    def add(self, parts: list[tuple[Rows, GlobalInteractions | None]]) -> None:
        """Add one complete pack, and write a shard if it is due."""
        for rows, found in parts:
            self.packs.append(rows)
            self.n_bytes, self.n_records = self.n_bytes + rows.n_bytes, self.n_records + len(rows)
            if found is not None:
                self.summary = _merged(self.summary, found)
                if self.rebuildable and len(found.scales) <= PART_FEATURES:
                    self.part = _merged(self.part, found)
        full = self.n_bytes >= SHARD_BYTES or self.n_records >= SHARD_RECORDS
        if full or time.monotonic() - self.began >= self.seconds:
            self.close()

    def close(self) -> None:
        """Write the collected packs: first the summary, then the shard, which makes the summary valid."""
        packs, self.packs, self.began = self.packs, [], time.monotonic()
        part, self.part = self.part, None
        self.n_bytes = self.n_records = 0
        if not packs:
            return
        name = Name(self.rank, self.serial, os.urandom(4).hex())
        folder, path = self.store.path, self.store.path / name.file("shard")
        intervals = shard_files.spans([n for p in packs for n in p.numbers])
        tensors, metadata = shard_of(packs, part)
        metadata |= {"format": FORMAT, "job": self.store.job, "name": path.name, "records": json.dumps(intervals)}
        self._refuse_exceeding(sum(t.numel() * t.element_size() for t in tensors.values()), packs)
        try:
            if self.summary is not None:
                commit(folder / name.file("summary"), self.summary.save)
            commit(path, lambda p: save_file(tensors, p, with_checksums(tensors, metadata)))
            shard_files.add_to_index(folder, Shard(name, path.stat().st_size, intervals, self.store.job))
        except OSError as error:
            if error.errno not in shard_files.FULL:
                raise
            raise OSError(
                error.errno,
                f"the disk is full: {sum(map(len, packs))} record(s) could not be written to {path}. "
                "Everything stored before is unchanged. Free some space and run the same call again to resume",
            ) from error
        shard_files.forget_summaries(folder, self.rank, before=self.serial - 1)
        self.serial += 1

    def _refuse_exceeding(self, n_bytes: int, packs: list[Rows]) -> None:
        if self.max_bytes is None:
            return
        present = shard_files.size_of(self.store.path)
        if self.summary is not None:
            n_bytes += sum(2 * m.mean.numel() * 8 for m in self.summary.moments.values())
        if present + n_bytes > self.max_bytes:
            raise ValueError(
                f"a shard of {in_words(n_bytes)} would exceed max_bytes={self.max_bytes:_}: the store has "
                f"{in_words(present)}. What is stored is intact; {sum(map(len, packs))} record(s) were "
                f"not written. Run the same call with a larger max_bytes to resume, or use another store. {ADVICE}"
            )


def _merged(so_far: GlobalInteractions | None, found: GlobalInteractions) -> GlobalInteractions:
    return found if so_far is None else so_far.to(found.mean.value.device).merge(found)
