"""State of torch that all threads of a process share: TF32 products, kernels of attention, forward-mode derivatives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Values = tuple[bool, ...]
_KERNELS = ("flash", "mem_efficient", "cudnn", "math")


class ProcessFlags:
    """Flags that concurrent threads may set to the same values; the last thread restores the values before the first.

    >>> state = [(True,)]
    >>> flags = ProcessFlags("a flag", lambda: state[-1], state.append)
    >>> with flags.set((False,)):
    ...     state[-1]
    (False,)
    >>> state[-1]
    (True,)
    """

    def __init__(self, name: str, read: Callable[[], Values], write: Callable[[Values], Any]) -> None:
        self.name, self.read, self.write = name, read, write
        self._lock = threading.Lock()
        self._before: Values = ()
        self._held: list[tuple[int, Values]] = []  # thread and values, innermost last

    @contextmanager
    def set(self, values: Values) -> Iterator[None]:
        """Set the flags; raises RuntimeError if another thread needs other values at the same time."""
        thread = threading.get_ident()
        with self._lock:
            if any(value != values for other, value in dict(self._held).items() if other != thread):
                raise RuntimeError(
                    f"{self.name} holds for all threads of the process, and another thread is computing with another "
                    "setting. Make the calls one after the other, or in separate processes."
                )
            if not self._held:
                self._before = self.read()
            self._held.append((thread, values))
            self.write(values)
        try:
            yield
        finally:
            with self._lock:
                last = max(i for i, (holder, _) in enumerate(self._held) if holder == thread)
                del self._held[last]
                innermost = dict(self._held)  # the last values of each thread
                self.write(innermost.get(thread, next(iter(innermost.values()), self._before)))


def _read_tf32() -> Values:
    return bool(torch.backends.cuda.matmul.allow_tf32), torch.backends.cudnn.allow_tf32


def _write_tf32(values: Values) -> None:
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    matmul.allow_tf32, cudnn.allow_tf32 = values


def _read_attention() -> Values:
    kernels: Any = torch.backends.cuda
    return tuple(getattr(kernels, f"{name}_sdp_enabled")() for name in _KERNELS)


def _write_attention(values: Values) -> None:
    kernels: Any = torch.backends.cuda
    for name, value in zip(_KERNELS, values, strict=True):
        getattr(kernels, f"enable_{name}_sdp")(value)


_TF32 = ProcessFlags("TF32 (precision='tf32')", _read_tf32, _write_tf32)
_ATTENTION = ProcessFlags("the kernel of attention", _read_attention, _write_attention)


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 for float32 products (ten-bit mantissa) on a CUDA device."""
    with _TF32.set((allowed, allowed)):
        yield


@contextmanager
def math_attention() -> Iterator[None]:
    """Compute attention from products and a softmax: the fused kernels have no second derivative."""
    with _ATTENTION.set((False, False, False, True)):
        yield


_FORWARD_MODE = threading.RLock()


def jvp(function: Callable[[Tensor], Any], point: Tensor, tangent: Tensor) -> tuple[Any, Any]:
    """`torch.func.jvp` of one argument, in one thread at a time: torch counts its nesting for the whole process."""
    with _FORWARD_MODE:
        found = torch.func.jvp(function, (point,), (tangent,))
    return found[0], found[1]
