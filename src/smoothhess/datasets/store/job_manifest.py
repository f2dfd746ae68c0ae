"""The manifest of a store: create it for a job, and check that a later call belongs to the same job."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from smoothhess.datasets.job_settings import differences
from smoothhess.datasets.store.shard_files import MANIFEST, found_store
from smoothhess.datasets.store.store_folder import Store
from smoothhess.datasets.store.writer_lock import other_writers
from smoothhess.model.json_checksum import text_digest


def known_store(path: Path) -> Store | None:
    """The store at `path`, or None where there is none or it is empty."""
    if not (path / MANIFEST).is_file():
        others = [entry.name for entry in path.iterdir() if entry.name[0] != "."] if path.is_dir() else []
        if not others:
            return None
        if not (path / MANIFEST).is_file():  # another process may have created the store meanwhile
            raise ValueError(
                f"{path} is not a store and not empty: it has {', '.join(sorted(others)[:3])}. Use an empty folder."
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # damaged shards raise an error later
        store = Store(path)
    return store if store.shards or store.damaged else None


def begin(path: Path, settings: dict[str, Any], pack_size: int, rank: int) -> None:
    """Create an empty store; a manifest with other settings is replaced if it has no shards and nobody works on it.

    The caller holds the locks of the manifest and of its rank, so no process begins to write meanwhile.
    """
    job = text_digest(json.dumps(settings, sort_keys=True))
    unused = (path / MANIFEST).is_file() and known_store(path) is None and not other_writers(path, rank)
    other = unused and (Store(path).job, Store(path).pack_size) != (job, pack_size)
    found_store(path, {"job": job, "pack_size": pack_size, "settings": settings}, instead=other)


def refuse_other_job(store: Store, settings: dict[str, Any], pack_size: int | None) -> None:
    """Raise ValueError unless the store belongs to this job and all its shards can be read."""
    if store.estimator_version != settings["estimator_version"]:
        raise ValueError(
            f"{store.path} was made by version {store.estimator_version} of the estimator, this smoothhess has version "
            f"{settings['estimator_version']}: their records are not comparable and cannot be mixed. Begin another "
            "folder, or resume with the version of smoothhess that created this one; it can still be read."
        )
    differ = differences(store.settings, settings)
    if pack_size is not None and store.pack_size != pack_size:
        differ.append(f"pack_size = {store.pack_size}, not {pack_size}")
    if differ:
        raise ValueError(
            f"{store.path} is the store of another job: it was created with {'; '.join(differ)}. Use the same "
            "settings to resume it, or another folder."
        )
    if store.damaged:
        raise ValueError(store.damaged[0].problem)
