"""Memory: what fits, what is free, and what counts as running out of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


ROW_BYTES = 1 << 26  # inputs of about this many bytes go through the model at once, unless told otherwise


ACTIVATION_BYTES = 1 << 30  # of which so much is kept at once; a quarter of the free memory on a GPU


def with_bytes_kept(work: Callable[[], T], rows: int) -> tuple[T, int]:
    """What `work` makes, and how many bytes its graph keeps for each of so many rows, at least 1."""
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        if t.ndim and len(t) == rows:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            found = work()
    except RuntimeError as error:  # some models cannot be watched, such as those with torch.func.grad inside
        if is_out_of_memory(error):
            raise
        found = work()
    return found, max(sum(kept.values()) // rows, 1)


def room(device: torch.device) -> int:
    """Bytes that the graph of one pass may keep."""
    return max(ACTIVATION_BYTES, free_bytes(device) // 4) if device.type == "cuda" else ACTIVATION_BYTES


def is_out_of_memory(error: Exception) -> bool:
    """Whether smaller batches may help."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        said in str(error) for said in ("not enough memory", "can't allocate memory")
    )


def free_bytes(device: torch.device) -> int:
    """Memory of a GPU that new tensors can have: what the driver has left, and what torch keeps of freed ones."""
    free = torch.cuda.mem_get_info(device)[0]
    try:
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    except RuntimeError:  # an allocator that keeps no account
        return free


def release() -> None:
    """Hand back what the allocator of the device keeps."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
