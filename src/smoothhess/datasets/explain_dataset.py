"""`explain_dataset`: explain the records of a data set in batches, write them to a store, and resume where it stopped.

This module validates the arguments and drives the run. Batching is in `record_batches`, the explainer in
`record_explainer`, and everything about files in `store`.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from smoothhess.datasets.data_check import DataCheck, refuse_fewer
from smoothhess.datasets.disk_budget import SMALL, Room, Sizes
from smoothhess.datasets.job_settings import described
from smoothhess.datasets.record_batches import Pack, batches, count, packs
from smoothhess.datasets.record_explainer import CheckedExplainer, Question
from smoothhess.datasets.store import shard_files
from smoothhess.datasets.store.job_manifest import begin, known_store, refuse_other_job
from smoothhess.datasets.store.record import Rows, rows_of
from smoothhess.datasets.store.running_summary import tally
from smoothhess.datasets.store.shard_files import KEEP
from smoothhess.datasets.store.store_folder import Store
from smoothhess.datasets.store.writer import Writer
from smoothhess.datasets.store.writer_lock import one_at_a_time, only_writer
from smoothhess.estimate.statistics import DENSE_LIMIT, ESTIMATOR_VERSION
from smoothhess.evaluate.global_interactions import MOST_FEATURES, Explain, record_seeds
from smoothhess.evaluate.global_summary import GlobalInteractions
from smoothhess.explainers.interrupted import Interrupted
from smoothhess.explainers.progress import Progress
from smoothhess.explainers.smooth_hess import NeuronSmoothHess, SmoothHess
from smoothhess.linalg.memory import in_batches
from smoothhess.model.convert_inputs import column_names, is_array, to_tensors
from smoothhess.model.model_call import is_predicted


def explain_dataset(
    explainer: SmoothHess | NeuronSmoothHess | CheckedExplainer | Explain,
    loader: Any,
    store: str | Path | Store,
    *,
    target: Any = None,
    additional_forward_args: Any = None,
    key: str | int | None = None,
    keep: str | None = None,
    n_pairs: int = 20,
    summary: bool = True,
    summary_calls: int | None = None,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    max_bytes: int | None = None,
    pack_size: int | None = None,
    shard_seconds: float = 60.0,
    device: torch.device | str | None = None,
    show_progress: bool | None = None,
    **attribute_options: Any,
) -> Store:
    """Explain every record of a data set in one pass over a loader, and write the results to a folder.

    Records are numbered 0, 1, 2, … in the order of the loader. The draws of a record depend only on (seed, number):
    batch sizes, interruptions and the number of processes do not change a result beyond rounding.

    Shards are written atomically, so a job can be resumed after any interruption, including SIGKILL: run the same call
    again. Records in the store are skipped without calling the model, and at most one shard per process is recomputed.
    Settings, weights and records must be those that the store was created with; otherwise ValueError is raised.

    Args:
        explainer: `SmoothHess(model)`, `NeuronSmoothHess(model, layer)` with neuron_selector=…, or any function
            (inputs, target, seeds) → Interactions.
        loader: a tensor, array or DataFrame (N, *shape), a DataLoader, or another iterable of batches: tensors, tuples
            that begin with the inputs, or dictionaries. It must return the same records in the same order each time.
        store: the folder of the store; created if it does not exist. Its parent must exist.
        target: the output to explain; see `smoothhess.model.targets`. "predicted" selects the largest output of each
            record; a function is called with the batch: `target(inputs)` for a tensor, `target(*batch)` for a tuple,
            `target(batch)` for a dictionary.
        additional_forward_args: further arguments of the model, the same for all records, or a function of the batch,
            called like `target`; its tensors with one row per record are indexed like the records.
        key: position of the inputs in a batch: the key of a dictionary, or the index of a tuple.
        keep: what to keep of each record in addition to gradient, value and errors: "pairs" (the n_pairs strongest),
            "hessian" (the pairs, and the matrix with its standard errors) or "result" (everything). None: "hessian" up
            to 128 features or groups, otherwise "pairs".
        n_pairs: number of pairs to keep of each record.
        summary: whether to keep global interactions of the records as well, see `Store.summary`. They need a second,
            independent estimate of each record.
        summary_calls: gradient calls of the second estimate; few by default, because noise averages out over records.
        seed: seed of all draws.
        rank: index of this process among `world_size` processes that share the store. Process r explains the packs
            r, r + world_size, …
        world_size: number of processes that share the data set.
        max_bytes: largest size of the store in bytes. The size is estimated before the job starts and checked before
            each shard is written.
        pack_size: number of records per pack, which are explained in one batch; None: chosen by the memory. It is fixed
            when the store is created.
        shard_seconds: a shard is written after this time, or when it holds 256 MiB or 4096 records. An interruption
            loses at most this much work.
        device: device on which records are explained; None: the device of the model.
        show_progress: whether to show a progress bar; None: as in `SmoothHess.attribute`.
        **attribute_options: options of `SmoothHess.attribute`: sigma or radius or gaussian, n_calls, feature_mask,
            names, …

    Returns:
        The store, opened after the last shard was written.

    Raises:
        TypeError: the explainer, the loader or a batch has an unsupported type, or an option is unknown.
        ValueError: an argument is out of range; the store belongs to another job, or another thread or process writes
            to it with the same rank; the loader shuffles, returns other records than the store or another process has,
            or fewer; a record is missing although all processes have ended; or the records do not fit into `max_bytes`
            or on the disk.
        OSError: the disk is full. All shards written before stay readable.

    >>> import tempfile
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    >>> data = torch.utils.data.TensorDataset(torch.randn(30, 4), torch.arange(30) % 3)
    >>> loader = torch.utils.data.DataLoader(data, batch_size=8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = explain_dataset(SmoothHess(net), loader, folder, target=lambda x, y: y, radius=0.5, n_calls=64)
    ...     len(store), store[4].target, len(store[4].top_pairs(3)), store[4].hessian.shape, len(store.summary())
    (30, (1,), 3, torch.Size([4, 4]), 30)
    """
    _check_numbers(seed, rank, world_size, n_pairs, max_bytes, pack_size)
    if keep is not None and keep not in KEEP:
        raise ValueError(f"keep must be {', '.join(map(repr, KEEP))} or None, got {keep!r}.")
    question = Question.make(explainer, attribute_options, column_names(loader))
    if is_array(loader):
        loader = to_tensors(loader, question.forward_func)
    batch_target = None if is_predicted(target) else target
    arriving = batches(loader, key, batch_target, additional_forward_args, or_ids=question.is_function)
    head = next(arriving, None)
    if head is None:
        raise ValueError("expected at least one batch, got none. An iterator can be used only once: pass a new one.")
    sizes = question.sizes(head.inputs)
    keep = keep or ("hessian" if sizes.features <= SMALL else "pairs")
    _refuse_many_features(sizes, keep, n_pairs, summary)
    calls = question.second_calls(sizes.d) if summary_calls is None else int(summary_calls)
    settings = {
        **question.about,
        "inputs": [list(head.inputs.shape[1:]), str(head.inputs.dtype).removeprefix("torch.")],
        "target": described(target),
        "additional_forward_args": described(additional_forward_args),
        "keep": keep,
        "n_pairs": int(n_pairs),
        "summary": bool(summary),
        "summary_calls": calls if summary else None,
        "seed": int(seed),
        "estimator_version": ESTIMATOR_VERSION,
    }
    where = torch.device(device) if device is not None else question.device(head.inputs)
    total = count(loader, key)
    path = store.path if isinstance(store, Store) else Path(store)
    if question.agree is not None:
        question.agree(settings)
    known = known_store(path)
    if known is not None:
        refuse_other_job(known, settings, pack_size)
        if total is not None:
            refuse_fewer(path, total, known)
    room = Room(path, sizes.summary_bytes() if summary else 0, max_bytes)
    room.refuse(sizes.record_bytes(keep, n_pairs), _n_new(total, known))
    path.mkdir(exist_ok=True)
    with ExitStack() as locks:
        with one_at_a_time(path):
            locks.enter_context(only_writer(path, rank))
            if known is None:
                begin(path, settings, pack_size or _fair(sizes.pack_size(where), total, world_size), rank)
            known = Store(path)
            refuse_other_job(known, settings, pack_size)
        shard_files.sweep(path, known.shards, rank)
        shard_files.mend_index(path, known.shards, rank, world_size)
        writer = Writer(known, rank, max_bytes, float(shard_seconds))
        run = _Run(question, writer, where, int(seed), calls, is_predicted(target))
        data = DataCheck(known, rank, world_size)
        every = itertools.chain([head], arriving)
        waiting = packs(every, known.pack_size, (rank, world_size), data.read, run.check_same_function)
        with Progress(show_progress, total, "explain_dataset", "records", initial=len(known)) as bar:
            run.through(waiting, bar, lambda per_record, n: room.refuse(per_record, max(_n_new(total, known) - n, 0)))
        if question.agree is not None:
            question.agree(asdict(data.ended))
        return data.finish(complete=question.agree is not None)


class _Run:
    """Explains packs and passes the results to the writer."""

    def __init__(
        self, question: Question, writer: Writer, device: torch.device, seed: int, calls: int, predicted: bool
    ) -> None:
        self.question, self.writer, self.device, self.seed = question, writer, device, seed
        self.calls, self.predicted = calls, predicted
        self.most = writer.store.pack_size  # records per batch that fit into memory
        self.warned: set[str] = set()  # kinds of warnings that were issued

    def through(self, waiting: Iterator[Pack], bar: Progress, measured: Callable[[int, int], None]) -> None:
        """Explain and write all packs; complete packs are written also when an exception is raised.

        `measured` is called after the first pack with the bytes per record and the number of records.
        """
        try:
            for i, pack in enumerate(waiting):
                found = [*self._explained(pack)]
                self.writer.add(found)
                bar.update(len(pack))
                if not i:
                    measured(sum(rows.n_bytes for rows, _ in found) // len(pack), len(pack))
            self.writer.close()
        except BaseException as error:
            with suppress(Exception):  # report the first error
                self.writer.close()
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted(
                    f"interrupted: the records that were complete are in {self.writer.store.path}. Run the same call "
                    "again to explain the others."
                ) from None
            raise

    def check_same_function(self, stored: Pack) -> None:
        """Raise ValueError if f(x) of a stored record has changed: the model or the target differs."""
        part, record = stored.to(self.device), self.writer.store[stored.numbers[0]]
        if self.predicted:
            part = replace(part, target=self.question.predicted(part))
        output = self.question.output(part)
        if output is None:
            return
        target = None if part.target is None else part.target[0]
        if target != record.target or abs(output - record.output) > self.question.agreement * abs(record.output) + 1e-6:
            raise ValueError(
                f"f(x) of record {record.number} is {output:.6g} (target {target}), but {self.writer.store.path} was "
                f"made with {record.output:.6g} (target {record.target}): another model, target or "
                "additional_forward_args. Use the same to resume the job, or another folder."
            )

    def _explained(self, pack: Pack) -> Iterator[tuple[Rows, GlobalInteractions | None]]:
        """Explain a pack, in smaller batches after an out-of-memory error; the smaller batch size is kept."""

        def some(records: slice) -> tuple[Rows, GlobalInteractions | None]:
            part = pack[records]
            try:
                with self._each_once(part):
                    return self._explain(part.to(self.device))
            except Exception as error:
                first, last = part.numbers[0], part.numbers[-1]
                error.add_note(f"This error occurred in records {first} to {last} of the data set.")
                raise

        def fewer(n: int) -> bool:
            self.most = max(1, n // 2)
            return n > 1

        return in_batches(some, len(pack), lambda left: pack.part_size(self.most, left), fewer)

    def _explain(self, part: Pack) -> tuple[Rows, GlobalInteractions | None]:
        if self.predicted:
            part = replace(part, target=self.question.predicted(part))
        drawn, more = zip(*(record_seeds(self.seed, n) for n in part.numbers), strict=True)
        first = self.question.explain(part, [*drawn])
        settings = self.writer.store.settings
        rows = rows_of(first, part.numbers, part.digests, settings["keep"], settings["n_pairs"])
        chosen = self.writer.not_summed(part.numbers) if settings["summary"] else []
        if not chosen:
            return rows, None
        second = self.question.again(part, first, [*drawn], [*more], self.calls)
        return rows, tally(first, second, self.seed, part.numbers, chosen)

    @contextmanager
    def _each_once(self, part: Pack) -> Iterator[None]:
        """Issue each kind of warning only once per job: repetitions for every pack would hide other warnings."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        for warning in caught:
            kind = re.sub(r"\d[\d.,e+-]*", "#", str(warning.message))
            if kind not in self.warned:
                self.warned.add(kind)
                where = f"records {part.numbers[0]} to {part.numbers[-1]}"
                text = f"{warning.message} (In {where}. This warning is not repeated: see `status` of each record.)"
                warnings.warn(text, warning.category, stacklevel=2)


def _n_new(total: int | None, known: Store | None) -> int:
    """Number of records that are not stored yet; 1 where the number of records is unknown."""
    return 1 if total is None else max(total - (0 if known is None else len(known)), 0)


def _fair(size: int, total: int | None, world_size: int) -> int:
    """The pack size, reduced so that every process has at least one pack."""
    return size if total is None else max(1, min(size, -(-total // world_size)))


def _refuse_many_features(sizes: Sizes, keep: str, n_pairs: int, summary: bool) -> None:
    if summary and sizes.features > MOST_FEATURES:
        raise ValueError(
            f"{sizes.features} features are too many for a summary of all pairs ({MOST_FEATURES} at most). Pass "
            "feature_mask, with up to that many groups, or summary=False."
        )
    if sizes.features > DENSE_LIMIT and (keep == "hessian" or (keep == "pairs" and n_pairs)):
        raise ValueError(
            f"{sizes.features} features are too many for matrices, and pairs are ranked in one ({DENSE_LIMIT} at "
            "most). Pass feature_mask, keep='result', or keep='pairs' with n_pairs=0 to keep only the gradient."
        )


def _check_numbers(
    seed: Any, rank: Any, world_size: Any, n_pairs: Any, max_bytes: int | None, pack_size: int | None
) -> None:
    least = {"seed": (seed, 0), "rank": (rank, 0), "world_size": (world_size, 1), "n_pairs": (n_pairs, 0)}
    least |= {} if max_bytes is None else {"max_bytes": (max_bytes, 1)}
    least |= {} if pack_size is None else {"pack_size": (pack_size, 1)}
    for name, (number, lowest) in least.items():
        if isinstance(number, bool) or not hasattr(number, "__index__") or number < lowest:
            raise ValueError(f"{name} must be a whole number, {lowest} or more, got {number!r}.")
    if rank >= world_size:
        raise ValueError(f"rank must be below world_size, got rank {rank} of {world_size}. Processes count from 0.")
