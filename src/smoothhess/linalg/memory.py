"""The memory policy: all limits in bytes, the sizes of chunks, and what happens when memory runs out.

No other module defines a limit in bytes or a loop that halves a batch. The measured limits of a model are kept in
`smoothhess.model.capacity`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class ByteLimit(NamedTuple):
    """A limit in bytes, which may be larger on a GPU.

    >>> limit = ByteLimit(1000, on_gpu=8)
    >>> limit.on(torch.device("cpu")), limit.on(torch.device("cuda"))
    (1000, 8000)
    >>> limit.items(300, torch.device("cpu"))
    3
    """

    n_bytes: int
    on_gpu: int = 1  # factor on a GPU
    of_total: int = 0  # n: on a GPU at least 1/n of its memory
    of_free: int = 0  # n: on a GPU at least 1/n of its free memory

    def on(self, device: torch.device) -> int:
        """The limit on this device."""
        if device.type != "cuda":
            return self.n_bytes
        limit = self.n_bytes * self.on_gpu
        if self.of_total:
            limit = max(limit, torch.cuda.get_device_properties(device).total_memory // self.of_total)
        if self.of_free:
            limit = max(limit, free_bytes(device) // self.of_free)
        return limit

    def items(self, item_bytes: int, device: torch.device) -> int:
        """Size of a chunk: the number of items of `item_bytes` bytes that are within the limit, at least 1."""
        return max(1, self.on(device) // max(item_bytes, 1))


# Evaluation of the model
BATCH_INPUTS = ByteLimit(1 << 26)  # inputs of one batch, or directions that are passed to an operator
SAVED_ACTIVATIONS = ByteLimit(1 << 30, of_free=4)  # tensors that the autograd graph of one pass saves
CACHED_ACTIVATIONS = ByteLimit(1 << 24)  # the same on a CPU: larger ones leave the caches, and are mapped for each pass
PERTURBED_INPUTS = ByteLimit(1 << 27, of_total=64)  # perturbed inputs of all examples that are evaluated in one chunk

# Chunks of linear algebra
CACHED_FLOAT64 = ByteLimit(1 << 22, on_gpu=64)  # float64 copy of rows that is read once
FLOAT64_CHUNK = ByteLimit(1 << 28, of_free=32)  # float64 copies of rows, or matrices of a chunk of records
EXAMPLE_MATRICES = ByteLimit(1 << 28, on_gpu=8)  # matrices of a chunk of examples, with temporaries
TRUST_REGION_MATRICES = ByteLimit(1 << 28, on_gpu=16)  # matrices and eigenvectors of a chunk of trust-region problems

PART_MATRICES = ByteLimit(1 << 25, of_free=20)  # one float64 matrix of each example that a run explains in one batch
KEPT_RESULTS = ByteLimit(1 << 30, of_free=2)  # results of a run; larger ones are moved from a GPU to the host

# Arrays that are kept, or replaced by a slower method above the limit
NEURON_GRADIENTS = ByteLimit(1 << 28, on_gpu=8)  # input gradients of all neurons of a batch
CLOSED_FORMS = ByteLimit(1 << 32, on_gpu=4)  # closed forms of all examples with control="auto"
LAYER_HESSIANS = ByteLimit(1 << 31)  # closed forms of all layers
GROUPED_ROWS = ByteLimit(1 << 31)  # rows of all features that are kept for sums over groups
PACK_STATISTICS = ByteLimit(1 << 29, of_total=2)  # statistics of the records that are explained in one batch
DENSE_HESSIANS = ByteLimit(1 << 32, of_free=2)  # exact Hessians that are made dense without being asked for
KRYLOV_SPACE = ByteLimit(1 << 31)  # a space of the Lanczos method and its image under H
ROW_SPAN = ByteLimit(1 << 30)  # basis of the rows of an estimate, for its eigenpairs
ROW_SPAN_FOR_FEW = ByteLimit(1 << 25)  # the same for a few eigenpairs of a denoised H, whose products are fast

# Files
SHARD_BYTES = 1 << 28  # a shard of a store is written when it reaches this size
PAGE_BYTES = 64_000_000  # numbers of a report

# Files of users, checked before they are read
IMAGE_PIXELS = 1 << 25  # of an image; reading takes up to 64 bytes for each
ARRAY_BYTES = 1 << 31  # of an array as float64
TABLE_BYTES = 1 << 27  # of a csv file; reading takes up to 24 bytes for each
TEXT_BYTES = 1 << 24  # of a file of names, groups or numbers
ARCHIVE_EXTRA_BYTES = 1 << 26  # unpacked bytes of a zip archive beyond its own size


def in_batches(
    work: Callable[[slice], T], count: int, size: Callable[[int], int], fewer: Callable[[int], bool]
) -> Iterator[T]:
    """Yield `work` of consecutive slices of `count` items; after an out-of-memory error a slice is repeated with fewer.

    `size(left)` is the number of items of the next slice, of which at most `left` are taken. After an out-of-memory
    error of n items, `fewer(n)` reduces that number, or returns False if it cannot: then the error is raised.

    >>> sizes = [4]
    >>> def work(items):
    ...     if items.stop - items.start > 2:
    ...         raise torch.OutOfMemoryError
    ...     return items
    >>> def halve(n):
    ...     sizes.append(n // 2)
    ...     return n > 1
    >>> [(items.start, items.stop) for items in in_batches(work, 5, lambda left: sizes[-1], halve)]
    [(0, 2), (2, 4), (4, 5)]
    """
    start = 0
    while start < count:
        items = slice(start, min(start + size(count - start), count))
        try:
            found = work(items)
        except Exception as error:
            if not is_out_of_memory(error) or not fewer(items.stop - items.start):
                raise
        else:
            yield found
            start = items.stop
            continue
        release()  # after the handler: the error refers to the tensors that did not fit


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that memory ran out, so that smaller batches may help."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        text in str(error) for text in ("not enough memory", "can't allocate memory")
    )


def reraise_out_of_memory(error: Exception) -> None:
    """Raise `error` again if memory ran out: in a handler that takes other errors for a property of the model."""
    if is_out_of_memory(error):
        raise error


def with_bytes_kept(work: Callable[[], T], rows: int) -> tuple[T, int]:
    """The result of `work`, and the bytes that its autograd graph saves per row, at least 1."""
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        if t.ndim and len(t) == rows:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            found = work()
    except RuntimeError as error:  # hooks fail for some models, such as those that use torch.func.grad
        reraise_out_of_memory(error)
        found = work()
    return found, max(sum(kept.values()) // rows, 1)


def stored_bytes(value: object) -> int:
    """Bytes of all tensors in nested dataclasses, mappings and sequences; tensors that share memory count once.

    >>> one = torch.zeros(4)
    >>> stored_bytes({"a": [one, one[:2]], "b": (torch.zeros(2), None)})
    24
    """
    found: dict[int, int] = {}

    def visit(part: object) -> None:
        if isinstance(part, Tensor):
            storage = part.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif is_dataclass(part) and not isinstance(part, type):
            for field in fields(part):
                visit(getattr(part, field.name))
        elif isinstance(part, Mapping):
            for item in part.values():
                visit(item)
        elif isinstance(part, (list, tuple)):
            for item in part:
                visit(item)

    visit(value)
    return sum(found.values())


def free_bytes(device: torch.device) -> int:
    """Memory of a GPU that is available to new tensors: free in the driver, or cached by torch."""
    free = torch.cuda.mem_get_info(device)[0]
    try:
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    except RuntimeError:  # an allocator without statistics
        return free


def release() -> None:
    """Return cached memory to the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
