"""Read shards: their headers, records' columns and partial summaries, validated and compared with their checksums."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from smoothhess.datasets.store.shard_files import FORMAT, Shard, Spans, checked_spans, list_shards, numbers_in
from smoothhess.evaluate.global_summary import GlobalInteractions
from smoothhess.model.targets import check_entries
from smoothhess.model.tensor_hash import check_tensor, checksums_of
from smoothhess.result.files import Parts
from smoothhess.result.tensor_schema import check_tensors, naming

REMEDY = (
    "Other records are not affected: delete this file and run the same explain_dataset call again, which recomputes "
    "its records."
)
# dtype and dimensions of the columns of n records with F features
TABLE = {
    "number": "int64 n",
    "digest": "int64 n",
    "output": "real n",
    "value": "real n",
    "value_stderr": "real n",
    "relative_error": "real n",
    "r2": "real n",
    "n_calls": "int64 n",
    "n_passes": "float64 n",
    "gradient": "real n *",
    "gradient_stderr": "real n *",
    "target": "int64 n *",
    "hessian": "real n triangle",
    "stderr": "real n triangle",
    "pair.i": "int32 n pairs",
    "pair.j": "int32 n pairs",
    "pair.significant": "uint8 n pairs",
    **{f"pair.{name}": "float64 n pairs" for name in ("value", "stderr", "low", "high", "effect", "q_value")},
}


class ShardReader:
    """An open shard. `verified` holds the tensors of all shards whose checksum was compared before."""

    def __init__(self, path: Path, file: Any, shard: Shard, verified: set[tuple[str, str]]) -> None:
        self.path, self.file, self.verified = path, file, verified
        self.about: dict[str, str] = file.metadata() or {}
        if read_spans(path, self.about, shard.job) != shard.spans:
            raise ValueError(f"{path} holds other records than the index says. {REMEDY}")
        self.count = len(numbers_in(shard.spans))
        self.columns: list[str] = self._list("columns", None)
        self.status: list[str] = self._list("status", self.count)

    @cached_property
    def results(self) -> list[Any]:
        """For each record with keep="result", its values and the names of its tensors."""
        return self._list("results", self.count)

    def tensor(self, name: str) -> Tensor:
        """A tensor of the file."""
        key = (self.path.name, name)
        tensor = self.file.get_tensor(name)
        if key not in self.verified:
            check_tensor(name, tensor, checksums_of(self.about))
            if name.startswith("column."):
                column = name.removeprefix("column.")
                check_tensors({column: tensor}, TABLE, {"n": self.count})
                if column == "target":
                    check_entries(tensor)
            self.verified.add(key)
        return tensor

    def rows(self, column: str) -> Any:
        """A column, of which rows are read by slicing."""
        name = f"column.{column}"
        return self.file.get_slice(name) if (self.path.name, name) in self.verified else self.tensor(name)

    def summary(self) -> GlobalInteractions | None:
        """The summary of exactly the records of this shard; None if it was not kept."""
        if "summary" not in self.about:
            return None
        names = [name for name in self.file.keys() if name.startswith("summary.")]  # noqa: SIM118
        tensors = {name.removeprefix("summary."): self.tensor(name) for name in names}
        return GlobalInteractions.from_parts(Parts(json.loads(self.about["summary"]), tensors))

    def _list(self, name: str, count: int | None) -> list[Any]:
        found = json.loads(self.about[name])
        if not isinstance(found, list) or (count is not None and len(found) != count):
            raise ValueError(f"expected a list of {count} entries as {name!r}")
        return found


@contextmanager
def open_shard(folder: Path, shard: Shard, verified: set[tuple[str, str]]) -> Iterator[ShardReader]:
    """Open a shard; raises ValueError with its name and a remedy if it cannot be read or is damaged."""
    path = folder / shard.file
    with opened(path) as file:
        yield ShardReader(path, file, shard, verified)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; errors of reading and of damaged contents become a ValueError with a remedy."""
    try:
        with naming(path, REMEDY), safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error}). {REMEDY}") from error


def read_shards(folder: Path, job: str) -> list[Shard]:
    """All shards of a job sorted by name; `problem` is set for shards that cannot be read."""
    found = []
    for name, n_bytes, known in list_shards(folder):
        if known is not None and (known.n_bytes, known.job) == (n_bytes, job):
            found.append(known)
            continue
        path = folder / name.file("shard")
        try:
            with opened(path) as file:
                found.append(Shard(name, n_bytes, read_spans(path, file.metadata() or {}, job), job))
        except ValueError as error:
            found.append(Shard(name, n_bytes, () if known is None else known.spans, job, problem=str(error)))
    return sorted(found, key=lambda s: s.name)


def read_spans(path: Path, about: dict[str, str], job: str) -> Spans:
    """The numbers of the records in a shard, from its metadata, after checks that it is this shard of this job."""
    if about.get("format") != FORMAT:
        raise ValueError(f"{path} was not written by explain_dataset. Remove it.")
    if about.get("job") != job:
        raise ValueError(f"{path} belongs to another job. Remove it.")
    if about.get("name", path.name) != path.name:
        raise ValueError(f"{path} was written as {about['name']}: files were exchanged. Restore their names.")
    checksums_of(about)
    return checked_spans(json.loads(about["records"]), path.stat().st_size)
