"""Records of a store: the `Record` class, and its conversion to and from the tensors of a shard.

File names and atomic writes are in `shard_files`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from smoothhess.datasets.store.shard_reader import ShardReader
from smoothhess.evaluate.global_summary import GlobalInteractions
from smoothhess.result.exact import StoredResult
from smoothhess.result.files import Parts, restore
from smoothhess.result.interactions import Interactions
from smoothhess.result.intervals import plus_minus
from smoothhess.result.pairs import Columns, Pair, labels_of
from smoothhess.result.result import Result

SCALARS = ("output", "value", "value_stderr", "relative_error", "r2", "n_calls", "n_passes")
SHARED = ("gaussian.", "grouping.mask", "grouping.scales")  # parts of a result that are the same for all records

_PAIR = Columns._fields


@dataclass(frozen=True, eq=False, repr=False)
class Record:
    """The explanation of one input of a data set.

    Attributes have the same meaning as those of `Interactions` with the same name, for one example and without the
    batch dimension. Which of `hessian`, `stderr`, `top_pairs` and `result` can be read depends on the `keep` argument
    of `explain_dataset`.
    """

    number: int  # index in the data set, from 0
    status: str  # why sampling stopped
    target: tuple[int, ...] | None
    output: float
    value: float
    value_stderr: float
    relative_error: float
    r2: float
    n_calls: int
    n_passes: float
    gradient: Tensor  # (*feature shape)
    gradient_stderr: Tensor  # (*feature shape)
    keep: str
    n_pairs: int  # largest number of pairs that were kept
    names: Sequence[str] | None  # names of the features
    kept: dict[str, Any]  # "pairs", "hessian", "stderr" or "result"

    @property
    def hessian(self) -> Tensor:
        """The Hessian, (F, F); denoised if the job was run with shrink=True.

        Raises:
            ValueError: keep="pairs": matrices were not kept.
        """
        return self._matrix("hessian")

    @property
    def stderr(self) -> Tensor:
        """Standard errors of the unbiased estimate, (F, F).

        Raises:
            ValueError: keep="pairs": matrices were not kept.
        """
        return self._matrix("stderr")

    def _matrix(self, name: str) -> Tensor:
        if self.keep == "result":
            return self.result.hessian[0] if name == "hessian" else self.result.stderr()[0]
        if name not in self.kept:
            raise ValueError(_not_kept("matrices", self.keep, "hessian"))
        return self.kept[name]

    def top_pairs(self, k: int = 10, names: Sequence[str] | None = None) -> list[Pair]:
        """The k strongest pairs, as in `Interactions.top_pairs`.

        Args:
            k: number of pairs, at most the `n_pairs` of the job unless keep="result".
            names: names of the features; None: those of the job, or their indices.

        Raises:
            ValueError: k is larger than the number of pairs that were kept.
        """
        if self.keep == "result":
            return self.result.top_pairs(k, names)[0]
        if not 1 <= k <= self.n_pairs:
            raise ValueError(
                f"expected between 1 and {self.n_pairs} pairs, which is how many were kept, got k={k}. Explain into "
                "another store with a larger n_pairs, or keep='result'."
            )
        label = labels_of(self.names if names is None else names, self.gradient.numel(), tuple(self.gradient.shape))
        return [p._replace(names=(label(p.i), label(p.j))) for p in self.kept.get("pairs", [])[:k]]

    @property
    def result(self) -> Result:
        """The complete result, a batch of one example.

        Raises:
            ValueError: the job was not run with keep="result".
        """
        if "result" not in self.kept:
            raise ValueError(_not_kept("results", self.keep, "result"))
        return self.kept["result"]

    def __repr__(self) -> str:
        error = f"relative error {self.relative_error:.3g}, {self.n_calls} calls, stopped by {self.status}"
        pairs = [
            f"  {' × '.join(p.names)}: {plus_minus(p.value, (p.high - p.low) / 2)}"
            for p in self.kept.get("pairs", [])[:3]
        ]
        return "\n".join([f"Record {self.number}: f(x) = {self.output:.4g}, {error}", *pairs])


def _not_kept(what: str, keep: str, needed: str) -> str:
    return f"{what} were not kept (keep={keep!r}). Explain into another store with keep={needed!r}."


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Rows:
    """Records of one pack as tensors, ready to be written to a shard."""

    numbers: list[int]
    status: list[str]
    columns: dict[str, Tensor]  # (n, …) on the CPU
    results: list[Parts]  # one per record if keep="result", otherwise empty

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def n_bytes(self) -> int:
        """Size of the tensors in bytes."""
        each = [*self.columns.values(), *(t for _, tensors in self.results for t in tensors.values())]
        return sum(t.numel() * t.element_size() for t in each)


def rows_of(result: Result, numbers: Sequence[int], digests: Sequence[int], keep: str, n_pairs: int) -> Rows:
    """Convert the result of a pack to the rows of a shard."""
    count = len(result)
    columns = {"number": torch.tensor(numbers), "digest": torch.tensor(digests)}
    status, parts, results = [""] * count, [], [Parts({}, {})] * count
    for index, part in _by_control(result):
        found = {name: getattr(part, name) for name in (*SCALARS, "gradient", "gradient_stderr")}
        if part.target is not None:
            found["target"] = part.target
        if keep != "result" and n_pairs:
            found |= _pair_columns(part.strongest_pairs_of(n_pairs))
        if keep == "hessian":
            found |= {"hessian": _triangle(part.hessian), "stderr": _triangle(part.stderr())}
        parts.append((index, {name: t.cpu() for name, t in found.items()}))
        on_cpu = part.to("cpu") if keep == "result" else None
        for row, i in enumerate(index.tolist()):
            status[i] = part.status[row]
            if on_cpu is not None:
                results[i] = _parts(on_cpu[row])
    order = torch.cat([index for index, _ in parts]).argsort()
    for name in parts[0][1]:
        columns[name] = torch.cat([found[name] for _, found in parts])[order].contiguous()
    return Rows(list(numbers), status, columns, results if keep == "result" else [])


def _by_control(result: Result) -> Iterator[tuple[Tensor, Result]]:
    """Examples with a control variate and examples without one, each as if explained in a batch of one."""
    everyone = torch.arange(len(result))
    if not isinstance(result, Interactions) or result.control_weights is None:
        yield everyone, result
        return
    applied = result.control_weights.any(1).cpu()
    if applied.any():
        yield everyone[applied], result if applied.all() else result[everyone[applied]]
    if not applied.all():  # their closed form is zero, a placeholder for other examples of the pack
        plain = result[everyone[~applied]]
        statistics = replace(plain.statistics, known=None, drift=None, drift_norm2=None)
        yield (
            everyone[~applied],
            replace(
                plain,
                estimate=plain.estimate.changed(statistics=statistics),
                control=None,
                control_weights=None,
                control_note=plain.control_note or "single flips explain too little of the gradient's variation",
                tau_probes=None,
                unbiased=True,
            ),
        )


def _pair_columns(ranked: list[Columns]) -> dict[str, Tensor]:
    """The pairs of all records as columns (n, k); empty for a single feature."""
    if not ranked[0].i.shape[1]:
        return {}
    kinds = {"i": torch.int32, "j": torch.int32, "significant": torch.uint8}
    columns = zip(_PAIR, zip(*ranked, strict=True), strict=True)
    return {f"pair.{name}": torch.cat(parts).to(kinds.get(name, torch.float64)) for name, parts in columns}


def _triangle(matrix: Tensor) -> Tensor:
    """The upper triangle of symmetric matrices, (n, F(F + 1)/2)."""
    i, j = torch.triu_indices(*matrix.shape[1:], device=matrix.device)
    return matrix[:, i, j]


def _square(triangle: Tensor, size: int) -> Tensor:
    """The inverse of `_triangle`, for one matrix."""
    i, j = torch.triu_indices(size, size)
    matrix = triangle.new_empty(size, size)
    matrix[i, j] = triangle
    matrix[j, i] = triangle
    return matrix


def _parts(result: Result) -> Parts:
    """A result as text and tensors; the inverse is `smoothhess.result.files.restore`."""
    if not isinstance(result, Interactions | StoredResult):
        raise ValueError(f"a {type(result).__name__} cannot be stored. Use keep='hessian'.")
    if isinstance(result, StoredResult) and callable(result.derivatives.form):
        raise ValueError(
            "a matrix-free Hessian calls the model and cannot be stored. Use keep='hessian', feature_mask, or an "
            "explainer that returns dense results."
        )
    return result.parts()


def shard_of(packs: Sequence[Rows], summary: GlobalInteractions | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file that holds these packs and, if given, the summary of their records."""
    names = list(packs[0].columns)
    tensors = {f"column.{name}": torch.cat([p.columns[name] for p in packs]).contiguous() for name in names}
    results = []
    for pack in packs:
        for number, (about, held) in zip(pack.numbers, pack.results, strict=False):
            where = {}
            for name, tensor in held.items():
                own, shared = f"result.{number}.{name}", f"shared.{name}"
                if name.startswith(SHARED):
                    known = tensors.setdefault(shared, tensor.contiguous().clone())
                    own = shared if torch.equal(known, tensor) else own
                if own not in tensors:
                    tensors[own] = tensor.contiguous().clone()  # safetensors refuses two names for the same memory
                where[name] = own
            results.append([about, where])
    status = [s for p in packs for s in p.status]
    metadata = {"columns": json.dumps(names), "status": json.dumps(status), "results": json.dumps(results)}
    if summary is not None:
        about, held = summary.parts()
        tensors |= {f"summary.{name}": tensor.contiguous().clone() for name, tensor in held.items()}
        metadata["summary"] = json.dumps(about)
    return tensors, metadata


# --- reading ----------------------------------------------------------------------------------------------------------


def read_records(file: ShardReader, settings: dict[str, Any], rows: Sequence[int]) -> Iterator[Record]:
    """Yield the records in these rows of an open shard of a job with these settings."""
    keep, names = settings["keep"], settings.get("names")
    columns = {name: file.rows(name) for name in file.columns}
    for row in rows:
        found = {name: part[row : row + 1][0] for name, part in columns.items()}
        gradient = found["gradient"]
        if found["gradient_stderr"].shape != gradient.shape:
            raise ValueError(f"expected 'gradient_stderr' {tuple(gradient.shape)} in {file.path}")
        kept: dict[str, Any] = {}
        if "pair.i" in found:
            kept["pairs"] = _pairs(found, labels_of(names, gradient.numel(), tuple(gradient.shape)))
        if keep == "hessian":
            kept |= {name: _square(found[name], gradient.numel()) for name in ("hessian", "stderr")}
        if keep == "result":
            about, where = file.results[row]
            kept["result"] = restore(Parts(about, {name: file.tensor(stored) for name, stored in where.items()}))
        scalars = {name: found[name].item() for name in SCALARS}
        yield Record(
            number=int(found["number"]),
            status=file.status[row],
            target=tuple(found["target"].tolist()) if "target" in found else None,
            gradient=gradient,
            gradient_stderr=found["gradient_stderr"],
            keep=keep,
            n_pairs=settings["n_pairs"],
            names=names,
            kept=kept,
            **scalars,
        )


def _pairs(found: dict[str, Tensor], label: Callable[[int], str]) -> list[Pair]:
    columns = [found[f"pair.{name}"].tolist() for name in _PAIR]
    return [
        Pair(i, j, (label(i), label(j)), value, stderr, low, high, effect, q_value, bool(significant))
        for i, j, value, stderr, low, high, effect, q_value, significant in zip(*columns, strict=True)
    ]
