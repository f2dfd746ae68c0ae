"""The records of a data set, split over the processes of a torch.distributed group."""

from __future__ import annotations

import functools
import inspect
import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import DistributedSampler

from smoothhess import datasets
from smoothhess.datasets import Store
from smoothhess.datasets.distributed.process_group import Processes, is_alone, same_everywhere, together
from smoothhess.datasets.job_settings import SILENT, described
from smoothhess.datasets.store.shard_files import MANIFEST
from smoothhess.explainers.smooth_hess import NeuronSmoothHess, SmoothHess

PATIENCE = 30.0  # seconds that a shared folder may take to show a new file on another machine
OWN = (*SILENT, "device")  # options that may differ between ranks


def explain_dataset(
    explainer: Any, loader: Any, store: str | Path | Store, *, group: dist.ProcessGroup | None = None, **options: Any
) -> Store:
    """`smoothhess.explain_dataset(explainer, loader, store, …)`, with the records shared by all ranks of a group.

    Every rank calls it with the same model, the same whole loader and a folder that all of them see; each explains some
    packs of records into shards of its own, and all return when the last is done. Each record has draws of its own, so
    the numbers do not depend on how many ranks there are. When a rank fails, all fail: what is stored stays, and the
    same call, from as many ranks or fewer, goes on from there.

    Args:
        explainer: as in `smoothhess.explain_dataset`.
        loader: likewise; every rank reads all of it, so do not split it with a DistributedSampler.
        store: the folder, on a file system that all ranks share.
        group: the ranks that share the work; None for all of them.
        **options: those of `smoothhess.explain_dataset` but rank and world_size, the same on all ranks.

    Raises:
        RankError: another rank failed; it says which and why. The rank that failed raises its own error.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     f, x = SmoothHess(lambda x: x.prod(1)), torch.ones(5, 2).double()
    ...     len(explain_dataset(f, x, folder, sigma=0.1, n_calls=16))
    5
    """
    given = sorted({"rank", "world_size"} & options.keys())
    if given:
        raise ValueError(f"{' and '.join(given)} come from the process group here. Leave them out.")
    if isinstance(getattr(loader, "sampler", None), DistributedSampler):
        raise ValueError(
            "the loader gives each rank other records (DistributedSampler), so that numbers would mean different "
            "records. Pass the same loader on every rank, DataLoader(…, shuffle=False): the records are split here."
        )
    if is_alone(group):
        return datasets.explain_dataset(explainer, loader, store, **options)
    path = store.path if isinstance(store, Store) else Path(store)
    with together(group) as ranks:
        same_everywhere(ranks, {name: described(v) for name, v in options.items() if name not in OWN})
        _refuse_other_folder(ranks, path)
        _let_the_leader_begin(ranks, path)
        if options.get("show_progress"):
            options["show_progress"] = ranks.leads
        datasets.explain_dataset(
            _watched(explainer, ranks), loader, path, rank=ranks.rank, world_size=ranks.count, **options
        )
    return Store(path)


def _refuse_other_folder(ranks: Processes, path: Path) -> None:
    """Raise where a rank does not see what the leader writes: every machine would have a store of its own."""
    mark = None
    if ranks.leads and path.parent.is_dir():  # where it is not, the job itself says so
        path.mkdir(exist_ok=True)
        mark = path / f".shared-{os.urandom(8).hex()}"
        mark.touch()
    try:
        name = ranks.exchange(None if mark is None else mark.name)[0]
        deadline = time.monotonic() + PATIENCE
        while name is not None and not (path / name).exists():
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{path} of this rank is not the folder that rank 0 writes to. Use a file system that all machines "
                    "share, and the same path on each."
                )
            time.sleep(0.1)
            if path.is_dir():
                os.listdir(path)  # makes a network file system look again
        ranks.exchange(None)
    finally:
        if mark is not None:
            mark.unlink(missing_ok=True)


def _let_the_leader_begin(ranks: Processes, path: Path) -> None:
    """Wait for the store, for a while: one rank begins it, and the others find it whole."""
    deadline = time.monotonic() + PATIENCE
    while not ranks.leads and not (path / MANIFEST).is_file() and time.monotonic() < deadline:
        ranks.check()
        time.sleep(0.05)


def _watched(explainer: Any, ranks: Processes) -> Any:
    """The same explainer, which asks before each pack whether another rank has failed.

    It keeps its kind and name: they are among the settings that a store is begun with.
    """
    if isinstance(explainer, NeuronSmoothHess):
        return _twin(explainer, "_explainer", lambda *args: _watched(explainer._explainer(*args), ranks))
    asked = explainer.attribute if isinstance(explainer, SmoothHess) else explainer
    if not inspect.isroutine(asked):
        return explainer

    @functools.wraps(asked)
    def watched(*args: Any, **options: Any) -> Any:
        ranks.check()
        return asked(*args, **options)

    return _twin(explainer, "attribute", watched) if isinstance(explainer, SmoothHess) else watched


def _twin(explainer: Any, name: str, method: Any) -> Any:
    """An object of the same kind and contents with one method changed."""
    kind = type(explainer)
    twin = object.__new__(type(kind.__name__, (kind,), {name: staticmethod(method)}))
    twin.__dict__.update(explainer.__dict__)
    return twin
