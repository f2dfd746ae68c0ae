"""Memory: limits for batch sizes, free memory of a device, and detection of out-of-memory errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


ROW_BYTES = 1 << 26  # default size of the inputs of one batch


ACTIVATION_BYTES = 1 << 30  # limit for saved tensors of one pass; on a GPU at least a quarter of the free memory


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
        if is_out_of_memory(error):
            raise
        found = work()
    return found, max(sum(kept.values()) // rows, 1)


def room(device: torch.device) -> int:
    """Bytes that the autograd graph of one pass may save."""
    return max(ACTIVATION_BYTES, free_bytes(device) // 4) if device.type == "cuda" else ACTIVATION_BYTES


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that memory ran out, so that smaller batches may help."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        text in str(error) for text in ("not enough memory", "can't allocate memory")
    )


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
