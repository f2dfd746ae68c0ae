"""Reads models written by torch.export.save (.pt2) and runs them at the batch sizes that they were exported for.

The checks that a file holds no pickled object and no compiled code belong here, those of symbolic sizes to
`size_formulas`; other sources of models do not.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smoothhess.cli.explain.size_formulas import is_size_formula
from smoothhess.linalg.memory import ARCHIVE_EXTRA_BYTES, ARRAY_BYTES
from smoothhess.model.bounded_files import check_unpacked_size, describe_bytes

WRITE_AGAIN = (
    "Write it with torch.export.save(torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},)), "
    "'model.pt2'), where x holds two examples"
)


@dataclass(frozen=True, eq=False)
class Export:
    """An exported model with its input shape, dtype and batch size."""

    forward_func: Callable[[Tensor], Any]
    shape: tuple[int | None, ...]  # shape of one input; None: any size
    dtype: torch.dtype
    batch: int | None  # the only batch size it runs at; None: any
    digest: str  # hash of the file


class InBatches:
    """Wraps a model that takes between `least` and `most` rows so that it takes any number of rows.

    Larger batches are split; smaller ones are padded with copies of the last row, and the padded outputs are removed.

    >>> def pair(x):
    ...     assert len(x) == 2
    ...     return x.sum(1)
    >>> InBatches(pair, 2, 2)(torch.ones(3, 4))
    tensor([4., 4., 4.])
    """

    def __init__(self, model: Callable[[Tensor], Any], least: int, most: int | None) -> None:
        self.model, self.least, self.most = model, least, most

    def __call__(self, x: Tensor) -> Any:
        """Return the output of each row."""
        parts = [self._padded(rows) for rows in x.split(self.most or len(x))]
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _padded(self, rows: Tensor) -> Any:
        missing = self.least - len(rows)
        if missing <= 0:
            return self.model(rows)
        filled = torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])])
        return _each(self.model(filled), lambda output: _cut(output, len(rows), len(filled)))


def read(path: Path, device: torch.device) -> Export:
    """Load the model of a .pt2 file; files with pickled objects, compiled code or code as sizes are rejected.

    Open only exports that you trust nevertheless: the operations of the graph are run, and torch does not guarantee
    that reading an export is safe.

    Raises:
        ValueError: If the file is not an export, holds pickled objects, code or more than its size, or does not take
            one tensor.
    """
    content = path.read_bytes()  # read once, so that the checked bytes are the loaded bytes
    check_unpacked_size(io.BytesIO(content), len(content), str(path))
    _refuse_code(path, content)
    with _quiet():
        try:
            program, model = _opened(content, device)
            placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
            taken = [node.meta["val"] for node in placeholders if node.name in program.graph_signature.user_inputs]
        except Exception as error:
            raise ValueError(
                f"{path} cannot be read by torch {torch.__version__} ({_first_line(error)}). {WRITE_AGAIN}."
            ) from error
    if len(taken) != 1 or not isinstance(taken[0], Tensor):
        raise ValueError(
            f"{path} takes {len(taken)} inputs: expected one tensor, with examples in dimension 0. Export a module "
            "that sets the other inputs to constants."
        )
    sizes = list(taken[0].shape)
    if len(sizes) < 2:
        raise ValueError(
            f"{path} takes {len(sizes)}-dimensional inputs: expected examples in dimension 0. {WRITE_AGAIN}."
        )
    least, most = _bounds(sizes[0], program)
    shape = tuple(size if isinstance(size, int) else None for size in sizes[1:])
    if 8 * least * math.prod(size or 1 for size in shape) > ARRAY_BYTES:
        raise ValueError(
            f"{path} takes at least {least} inputs of shape {shape} at a time: the limit is "
            f"{describe_bytes(ARRAY_BYTES)} as float64. {WRITE_AGAIN}."
        )
    if least > 1 or most is not None:
        model = InBatches(model, least, most)
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    return Export(model, shape, taken[0].dtype, least if least == most else None, digest)


def _opened(content: bytes, device: torch.device) -> tuple[Any, Callable[[Tensor], Any]]:
    """Return the exported program and its function."""
    from torch.export.passes import move_to_device_pass
    from torch.export.pt2_archive._package import load_pt2

    # torch.export.load would fall back to an older, pickled layout on failure
    program = load_pt2(io.BytesIO(content)).exported_programs["model"]
    if device.type != "cpu":
        program = move_to_device_pass(program, device)
    # guards are code in the file and are not run; torch still checks the sizes of inputs
    return program, program.module(check_guards=False)


def _bounds(size: Any, program: Any) -> tuple[int, int | None]:
    """Return the smallest and the largest batch size; None: no limit."""
    if isinstance(size, int):
        return size, size
    limits = program.range_constraints.get(size.node.expr)
    if limits is None:
        return 1, None
    return max(1, _finite_int(limits.lower) or 1), _finite_int(limits.upper)


def _finite_int(limit: Any) -> int | None:
    try:
        number = int(limit)
    except (TypeError, ValueError, OverflowError, AttributeError):  # infinity
        return None
    return number if number < 2**31 else None


def _refuse_code(path: Path, content: bytes) -> None:
    """Raise if a file holds more than a graph and tensors: torch would unpickle, load or evaluate it without asking."""
    from torch.export.pt2_archive._package import PT2ArchiveReader

    try:
        archive = PT2ArchiveReader(io.BytesIO(content))
        names = archive.get_file_names()
    except Exception as error:
        raise ValueError(f"{path} is not a model that torch.export.save has written. {WRITE_AGAIN}.") from error
    for name in names:
        plain = name.lower()  # torch looks up members case-insensitively
        if plain.startswith("data/aotinductor/"):
            raise ValueError(f"{path} holds compiled code ({name}), which is not loaded. {WRITE_AGAIN}.")
        described = plain.startswith("models/") or plain.endswith(".json")
        try:
            member = archive.read_bytes(name) if described or plain.endswith(".pt") else b""
            about = json.loads(member) if described else None
        except Exception as error:
            raise ValueError(f"{path} is damaged: {name} cannot be read. {WRITE_AGAIN}.") from error
        if plain.endswith(".pt") and member:
            check_unpacked_size(io.BytesIO(member), len(member), f"{path} ({name})")
            try:
                torch.load(io.BytesIO(member), map_location="cpu", weights_only=True)
            except Exception as error:
                raise ValueError(
                    f"{path} holds a pickled object ({name}), which is not opened. {WRITE_AGAIN}."
                ) from error
        if plain.endswith("_config.json") and plain.startswith(("data/weights/", "data/constants/")):
            _check_tensors(path, name, about, len(content))
        for formula in _formulas(about):
            if not is_size_formula(formula):
                raise ValueError(
                    f"{path} holds a size that is no formula of numbers and symbols ({name}). torch would evaluate it, "
                    f"so the file is not opened. {WRITE_AGAIN}."
                )


def _check_tensors(path: Path, name: str, about: Any, n_bytes: int) -> None:
    """Raise if a list of tensors names pickles, or tensors that are larger than the file."""
    try:
        entries = list(about["config"].values())
        pickles = [e["path_name"] for e in entries if e["use_pickle"] or not _is_plain(e["path_name"])]
        tensors = [] if pickles else [(e["path_name"], e["tensor_meta"]["sizes"]) for e in entries]
        sizes = {file: math.prod(max(0, int(size["as_int"])) for size in shape) for file, shape in tensors}
    except Exception as error:
        raise ValueError(f"{path} is damaged: {name} does not list tensors. {WRITE_AGAIN}.") from error
    if pickles:
        raise ValueError(f"{path} holds a pickled object ({pickles[0]}), which is not opened.")
    if sum(sizes.values()) > n_bytes + ARCHIVE_EXTRA_BYTES:
        raise ValueError(f"{path} lists tensors that are larger than the file ({name}). {WRITE_AGAIN}.")


def _is_plain(path_name: str) -> bool:
    return path_name.startswith(("weight_", "tensor_"))


def _formulas(about: Any) -> Iterator[Any]:
    """Yield every symbolic size of a graph, without recursion."""
    waiting = [about]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            if "expr_str" in item:
                yield item["expr_str"]
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item


def _each(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to every tensor of an output that may be a tuple, a list or a dictionary."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, dict):
        return {key: _each(value, change) for key, value in output.items()}
    if isinstance(output, tuple | list):
        return tuple(_each(value, change) for value in output)
    return output


def _cut(output: Tensor, rows: int, filled: int) -> Tensor:
    """Return the first rows of a batched output; outputs without a batch dimension, such as a loss, are unchanged."""
    return output[:rows] if output.ndim and len(output) == filled else output


def _joined(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts) if first.ndim else first
    if isinstance(first, dict):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple | list):
        return tuple(_joined(list(column)) for column in zip(*parts, strict=True))
    return first


@contextmanager
def _quiet() -> Iterator[None]:
    """Disable the torch loggers that report an unreadable file, and warnings: a raised error replaces their output."""
    loggers = [logging.getLogger(name) for name in ("torch.export", "torch.export.pt2_archive._package")]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.11 warns that the bytes of the file are read-only
            yield
    finally:
        for logger, was in zip(loggers, before, strict=True):
            logger.disabled = was


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
