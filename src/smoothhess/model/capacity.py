"""`Capacity`: limits of a model that are measured once, for each kind of input.

The limits in bytes that the measurements are compared with are in `smoothhess.linalg.memory`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class InputKind(NamedTuple):
    """What the memory of a row depends on."""

    shape: torch.Size  # of one example
    dtype: torch.dtype
    device: torch.device
    precision: str
    compiled: bool

    @staticmethod
    def of(inputs: Tensor, precision: str = "float32", compiled: bool = False) -> InputKind:
        """The kind of a batch of inputs (B, *shape)."""
        return InputKind(inputs.shape[1:], inputs.dtype, inputs.device, precision, compiled)


class Capacity:
    """Rows per batch, examples per run, and whether the fast batch norm agrees with torch, by kind of input.

    This is the only mutable object that is shared: an explainer passes it to the oracles of all of its runs, and these
    write to it what they have measured. Its entries decide about batch sizes and speed, never about results. Threads
    may share it: each method reads or writes one entry of a dictionary.

    >>> capacity, kind = Capacity(), InputKind.of(torch.zeros(1, 3))
    >>> capacity.keep_rows(kind, 64)
    >>> capacity.rows(kind), capacity.examples(kind)
    (64, None)
    """

    def __init__(self) -> None:
        self._rows: dict[InputKind, int] = {}
        self._examples: dict[InputKind, int] = {}
        self._fast_batchnorm: dict[InputKind, bool] = {}

    def rows(self, kind: InputKind) -> int | None:
        """Rows per batch that fit into memory; None if unknown."""
        return self._rows.get(kind)

    def keep_rows(self, kind: InputKind, rows: int) -> None:
        """Keep the number of rows per batch."""
        self._rows[kind] = rows

    def forget_rows(self, kind: InputKind) -> None:
        """Forget the number of rows: more memory may be free next time."""
        self._rows.pop(kind, None)

    def examples(self, kind: InputKind) -> int | None:
        """Examples per run that fit into memory; None if no run was too large."""
        return self._examples.get(kind)

    def keep_examples(self, kind: InputKind, count: int) -> None:
        """Keep the number of examples per run."""
        self._examples[kind] = count

    def forget_examples(self, kind: InputKind) -> None:
        """Forget the number of examples: more memory may be free next time."""
        self._examples.pop(kind, None)

    def fast_batchnorm(self, kind: InputKind) -> bool | None:
        """Whether the fast backward pass of batch norms reproduces the gradient of torch; None if it was not tried."""
        return self._fast_batchnorm.get(kind)

    def keep_fast_batchnorm(self, kind: InputKind, agrees: bool) -> None:
        """Keep whether the fast backward pass reproduces the gradient."""
        self._fast_batchnorm[kind] = agrees
