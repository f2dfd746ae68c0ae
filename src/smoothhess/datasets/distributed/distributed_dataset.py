"""`explain_dataset` with the records split over the processes of a torch.distributed group.

The work itself is done by `smoothhess.datasets.explain_dataset`; here the arguments, the folder and failures of other
processes are checked.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import DistributedSampler

from smoothhess import datasets
from smoothhess.datasets import Store
from smoothhess.datasets.distributed.process_group import Processes, check_same_arguments, connected, is_single_process
from smoothhess.datasets.job_settings import SILENT, described
from smoothhess.datasets.record_explainer import CheckedExplainer
from smoothhess.datasets.store.shard_files import MANIFEST

PATIENCE = 30.0  # seconds that a shared folder may take to show a new file on another machine
OWN = (*SILENT, "device")  # options that may differ between processes


def explain_dataset(
    explainer: Any, loader: Any, store: str | Path | Store, *, group: dist.ProcessGroup | None = None, **options: Any
) -> Store:
    """`smoothhess.explain_dataset(explainer, loader, store, …)` with the records split over all processes of a group.

    Every process calls it with the same model, the same complete loader and a folder on a shared file system. Each
    process explains some packs of records and writes its own shards; all return when the last one is done. The draws of
    a record do not depend on the number of processes. If a process fails, all processes raise an error; what is stored
    stays, and the same call with any number of processes resumes the job.

    Args:
        explainer: as in `smoothhess.explain_dataset`.
        loader: as in `smoothhess.explain_dataset`; every process reads all of it, so do not use a DistributedSampler.
        store: the folder, on a file system that all processes share.
        group: the process group; None: the default group.
        **options: options of `smoothhess.explain_dataset` except rank and world_size. Only internal_batch_size,
            compile, show_progress and device may differ between processes.

    Returns:
        The store, opened after the last shard of all processes was written.

    Raises:
        RankError: another process failed; `rank` and `reason` say which and why. The process that failed raises its
            original error.
        ValueError: the arguments, weights, records or folders differ between processes, a record is missing at the end,
            the loader has a DistributedSampler, or rank or world_size was passed.

    >>> import tempfile, torch
    >>> from smoothhess import SmoothHess
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
            "the loader returns different records on each rank (DistributedSampler), so record numbers would be "
            "ambiguous. Pass the same loader on every rank, DataLoader(…, shuffle=False): the records are split here."
        )
    if is_single_process(group):
        return datasets.explain_dataset(explainer, loader, store, **options)
    path = store.path if isinstance(store, Store) else Path(store)
    with connected(group) as processes:
        check_same_arguments(processes, {name: described(v) for name, v in options.items() if name not in OWN})
        _refuse_other_folder(processes, path)

        def agree(about: dict[str, Any]) -> None:
            check_same_arguments(processes, about)
            _wait_for_manifest(processes, path)

        if not processes.is_leader:
            options["show_progress"] = False
        return datasets.explain_dataset(
            CheckedExplainer(explainer, processes.check, agree),  # stops before the next pack if another one failed
            loader,
            path,
            rank=processes.process_rank,
            world_size=processes.count,
            **options,
        )


def _refuse_other_folder(processes: Processes, path: Path) -> None:
    """Raise ValueError if a process does not see the files of process 0: the folder is not shared."""
    mark = None
    if processes.is_leader and path.parent.is_dir():  # if it does not exist, explain_dataset raises
        path.mkdir(exist_ok=True)
        mark = path / f".shared-{os.urandom(8).hex()}"
        mark.touch()
    try:
        name = processes.exchange(None if mark is None else mark.name)[0]
        deadline = time.monotonic() + PATIENCE
        while name is not None and not (path / name).exists():
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{path} of this rank is not the folder that rank 0 writes to. Use a file system that all machines "
                    "share, and the same path on each."
                )
            time.sleep(0.1)
            if path.is_dir():
                os.listdir(path)  # refreshes the cache of a network file system
        processes.exchange(None)
    finally:
        if mark is not None:
            mark.unlink(missing_ok=True)


def _wait_for_manifest(processes: Processes, path: Path) -> None:
    """Wait up to PATIENCE seconds until process 0 has created the store."""
    deadline = time.monotonic() + PATIENCE
    while not processes.is_leader and not (path / MANIFEST).is_file() and time.monotonic() < deadline:
        processes.check()
        time.sleep(0.05)
