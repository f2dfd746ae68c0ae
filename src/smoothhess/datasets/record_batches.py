"""Regroup the batches of a loader into packs, the batches in which records are explained.

Pack p holds the records p·size … (p + 1)·size − 1. Its contents depend neither on the batches of the loader nor on
where a job was interrupted or how many processes share it: process r explains the packs r, r + world_size, …
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SubsetRandomSampler
from torch.utils.data import WeightedRandomSampler as Weighted

from smoothhess.datasets.job_settings import record_digests
from smoothhess.model import targets as targets
from smoothhess.model.gradients import check_inputs

RANDOM = (RandomSampler, SubsetRandomSampler, Weighted)  # samplers whose order changes from pass to pass


class Argument(NamedTuple):
    """A further argument of the model."""

    value: Any
    follows: bool  # whether it is a tensor with one row per record


@dataclass(frozen=True, eq=False)
class Pack:
    """Records that are explained in one batch."""

    numbers: list[int]
    digests: list[int]
    inputs: Tensor  # (n, *shape)
    target: list[tuple[int, ...]] | None
    args: tuple[Argument, ...] | None

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, rows: slice) -> Pack:
        args = self.args
        return Pack(
            self.numbers[rows],
            self.digests[rows],
            self.inputs[rows],
            None if self.target is None else self.target[rows],
            None if args is None else tuple(a._replace(value=a.value[rows]) if a.follows else a for a in args),
        )

    def parts(self, most: int) -> Iterator[Pack]:
        """Split into packs of up to `most` records."""
        start = 0
        while start < len(self):
            size = self.part_size(most, len(self) - start)
            yield self[start : start + size]
            start += size

    def part_size(self, most: int, left: int) -> int:
        """Size of the next part of up to `most` records if `left` are left.

        It never equals the number of rows of an argument that all records share: such an argument would be mistaken for
        one row per record.
        """
        shared = {len(a.value) for a in self.args or () if _has_rows(a.value) and not a.follows}
        size = min(most, left)
        while size > 1 and size in shared:
            size -= 1
        return size

    def to(self, device: torch.device | str) -> Pack:
        """Move the tensors to another device."""
        args = None
        if self.args is not None:
            args = tuple(a._replace(value=a.value.to(device)) if isinstance(a.value, Tensor) else a for a in self.args)
        return Pack(self.numbers, self.digests, self.inputs.to(device, non_blocking=True), self.target, args)

    @property
    def forward_args(self) -> tuple[Any, ...] | None:
        """The values of the arguments, as `attribute` accepts them."""
        return None if self.args is None else tuple(a.value for a in self.args)

    @staticmethod
    def cat(packs: list[Pack]) -> Pack:
        """Concatenate packs."""
        if len(packs) == 1:
            return packs[0]
        first = packs[0]
        args = None
        if first.args is not None:
            columns = zip(*(p.args or () for p in packs), strict=True)
            args = tuple(Argument(torch.cat([a.value for a in c]), True) if c[0].follows else c[0] for c in columns)
        return Pack(
            [n for p in packs for n in p.numbers],
            [h for p in packs for h in p.digests],
            torch.cat([p.inputs for p in packs]),
            None if first.target is None else [t for p in packs for t in p.target or ()],
            args,
        )


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of the loader, with the numbers, targets and arguments of its records."""

    first: int  # number of its first record
    inputs: Tensor  # (b, *shape)
    item: Any  # the batch as the loader returned it, for functions of the batch
    target: Any
    args: Any
    is_dataset: bool  # whether it is the entire data set
    head: Batch | None  # the first batch; None if this is the first

    @cached_property
    def rows(self) -> list[tuple[int, ...]] | None:
        """Index into the output of the model for each record."""
        chosen = self._call(self.target) if callable(self.target) else self.target
        entries = targets.entries(chosen, len(self.inputs))
        return None if entries is None else [tuple(r) for r in entries.tolist()]

    @cached_property
    def arguments(self) -> tuple[Argument, ...] | None:
        """Further arguments of the model, marked as shared or as one row per record.

        This is decided in the first batch: the last batch may have as many records as a shared argument has rows.
        """
        given = self._call(self.args) if callable(self.args) else self.args
        if given is None:
            return None
        own = callable(self.args) or self.is_dataset
        each = given if isinstance(given, tuple) else (given,)
        fits = [own and _has_rows(a) and len(a) == len(self.inputs) for a in each]
        if self.head is None:
            return tuple(map(Argument, each, fits))
        follows = [a.follows for a in self.head.arguments or ()]
        if len(follows) != len(each) or any(f and not fit for f, fit in zip(follows, fits, strict=True)):
            raise ValueError(
                f"additional_forward_args must be alike for all batches: of the first, {len(follows)} with a row per "
                f"record at {[i for i, f in enumerate(follows) if f]}; from record {self.first} on, {len(each)} with a "
                f"row for each of {len(self.inputs)} records at {[i for i, fit in enumerate(fits) if fit]}."
            )
        return tuple(map(Argument, each, follows))

    def _call(self, function: Callable[..., Any]) -> Any:
        return function(*self.item) if isinstance(self.item, tuple | list) else function(self.item)

    def pieces(self, size: int) -> Iterator[tuple[int, slice]]:
        """The packs that the records of the batch belong to, and the rows of each."""
        start, end = self.first, self.first + len(self.inputs)
        while start < end:
            stop = min((start // size + 1) * size, end)
            yield start // size, slice(start - self.first, stop - self.first)
            start = stop

    def pack(self, rows: slice, digests: list[int], indices: list[int]) -> Pack:
        """The records at `indices` of these rows as a pack."""
        index = torch.tensor([rows.start + i for i in indices])
        target, args = self.rows, self.arguments
        return Pack(
            [self.first + i for i in index.tolist()],
            [digests[i] for i in indices],
            self.inputs[index.to(self.inputs.device)],
            None if target is None else [target[i] for i in index.tolist()],
            None
            if args is None
            else tuple(a._replace(value=a.value[index.to(a.value.device)]) if a.follows else a for a in args),
        )


def batches(loader: Any, key: str | int | None, target: Any, args: Any, or_ids: bool = False) -> Iterator[Batch]:
    """Number the batches of a loader and check that all have the same shape and dtype, a real one unless `or_ids`."""
    first, kind, head = 0, None, None
    for item in _items(loader):
        inputs = _inputs(item, key)
        check_inputs(inputs, or_ids)
        kind = kind or (inputs.shape[1:], inputs.dtype)
        if (inputs.shape[1:], inputs.dtype) != kind:
            raise ValueError(
                f"all records must have one shape and dtype, {tuple(kind[0])} {kind[1]}, got {tuple(inputs.shape[1:])} "
                f"{inputs.dtype} from record {first} on."
            )
        batch = Batch(first, inputs.detach(), item, target, args, isinstance(loader, Tensor), head)
        head = head or batch
        yield batch
        first += len(inputs)


def packs(
    arriving: Iterable[Batch],
    size: int,
    share: tuple[int, int],
    stored: Callable[[list[int]], list[bool]],
    check: Callable[[Pack], None],
) -> Iterator[Pack]:
    """Yield packs of up to `size` records that are not stored yet.

    `share` is (rank, world_size). `stored` is called with the hashes of all records in order, also those of other
    ranks, and returns which of them are in the store. `check` is called with one stored record before the first pack,
    if a stored record was read by then.
    """
    rank, world_size = share
    waiting: list[Pack] = []
    stored_pack: Callable[[], Pack] | None = None
    begun = False
    for batch in arriving:
        for number, rows in batch.pieces(size):
            digests = record_digests(batch.inputs[rows])
            known = stored(digests)
            if stored_pack is None and any(known):
                stored_pack = partial(batch.pack, rows, digests, [known.index(True)])
            if number % world_size != rank:
                continue
            missing = [i for i, found in enumerate(known) if not found]
            if missing and stored_pack is not None and not begun:
                check(stored_pack())
            begun = begun or bool(missing)
            if missing:
                waiting.append(batch.pack(rows, digests, missing))
            if batch.first + rows.stop == (number + 1) * size and waiting:
                yield Pack.cat(waiting)
                waiting = []
    if waiting:
        yield Pack.cat(waiting)


def count(loader: Any, key: str | int | None) -> int | None:
    """Number of records; None where it is unknown before the loader has been read."""
    if isinstance(loader, Tensor):
        return len(loader)
    if isinstance(loader, list | tuple):
        return sum(len(_inputs(item, key)) for item in loader)
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        size, sampler = loader.batch_size, loader.sampler
        if size is not None and hasattr(sampler, "__len__"):
            records = len(sampler)  # type: ignore[arg-type]
            return records // size * size if loader.drop_last else records
    return None


def _items(loader: Any) -> Iterable[Any]:
    if isinstance(loader, Tensor):
        return [loader]
    samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    if isinstance(loader, DataLoader) and any(isinstance(s, RANDOM) for s in samplers):
        raise ValueError(
            "the loader shuffles: records would have other numbers each time, and a job could not be resumed. "
            "Use DataLoader(…, shuffle=False)."
        )
    if isinstance(loader, Dataset):
        raise TypeError(
            "a data set returns single records, expected batches. Use DataLoader(dataset, batch_size=256), or "
            "batch_size=None where it returns batches itself."
        )
    if isinstance(loader, str | Mapping) or not isinstance(loader, Iterable):
        raise TypeError(
            f"loader must be a tensor (N, …), a DataLoader or another iterable of batches, got {type(loader).__name__}."
        )
    return loader


def _inputs(item: Any, key: str | int | None) -> Any:
    """The inputs of a batch: the tensor itself, the first entry of a tuple, or the entry at `key`."""
    if isinstance(item, Tensor):
        return item
    if isinstance(item, Mapping):
        if key is None or key not in item:
            known = ", ".join(map(repr, list(item)[:8]))
            missing = "the entry of the inputs is not given" if key is None else f"there is no {key!r}"
            raise ValueError(f"a batch is a dictionary with {known}: {missing}. Pass key=…")
        return item[key]
    if isinstance(item, tuple | list):
        place = 0 if key is None else key
        if not isinstance(place, int) or not -len(item) <= place < len(item):
            raise ValueError(f"a batch is a tuple of {len(item)} entries, got key={key!r}. Pass key=0, 1, …")
        return item[place]
    raise TypeError(
        f"a batch must be a tensor, a tuple or a dictionary, got {type(item).__name__}. Map it: (f(b) for b in loader)."
    )


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0
