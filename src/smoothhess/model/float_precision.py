"""The `precision` argument: the floating-point precision in which the model is evaluated.

Draws, statistics and frozen passes always use the precision of the inputs. Half-differences of gradients cancel, so
reduced precision adds noise to each of them: 5 to 20 % with TF32 and 16 to 53 % with bfloat16 on a CIFAR10 ResNet-18,
more for smaller σ. float16 is as fast as bfloat16 and more accurate, with about twice the noise of TF32, but overflows
at 65504. The noise is random and included in the standard errors; an upper limit of its size is measured on a few
pairs of points and stored in the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from smoothhess.model.process_flags import tf32

PRECISIONS = ("float32", "tf32", "bf16", "fp16")
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
AGREEMENT = {"float32": 1e-4, "tf32": 2e-2, "bf16": 0.1, "fp16": 2e-2}  # relative tolerance for f(x) of the same input
SCALE = {"fp16": 2.0**10}  # loss scale in the backward pass, so that small gradients do not underflow
LARGE = 2.0**13  # scaled gradients above this size are recomputed without a scale


def check_precision(precision: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Return `precision` if the device and the dtype of the inputs support it, otherwise raise ValueError."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(map(repr, PRECISIONS))}, got {precision!r}.")
    if precision != "float32" and dtype != torch.float32:
        raise ValueError(f"precision={precision!r} is for float32 inputs and models, got {dtype}. Use inputs.float().")
    if precision == "tf32" and device.type != "cuda":
        raise ValueError(f"precision='tf32' is a mode of CUDA devices, the inputs are on {device.type!r}.")
    return precision


@contextmanager
def evaluated(precision: str, device: torch.device) -> Iterator[None]:
    """Evaluate model calls in this context with that precision; the previous modes are restored on exit."""
    if precision == "tf32":
        with tf32(True):
            yield
    elif precision in HALVES:
        with torch.autocast(device.type, HALVES[precision]):
            yield
    else:
        yield
