"""How exactly the model is evaluated. Draws, statistics and frozen passes always keep the inputs' precision.

Half-differences of gradients cancel, so less exact arithmetic puts noise on each of them: with TF32 5 to 20 %, with
bfloat16 16 to 53 % on a CIFAR10 ResNet-18, the more the smaller σ is. float16 is as fast as bfloat16 and, with about
twice the noise of TF32, less coarse, but its numbers end at 65504. The noise is random, and the error bars see it as
they see all noise; how large it is, is measured on a few pairs of points and kept with the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

PRECISIONS = ("float32", "tf32", "bf16", "fp16")
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
AGREEMENT = {"float32": 1e-4, "tf32": 2e-2, "bf16": 0.1, "fp16": 2e-2}  # to which f(x) must be the same among others
SCALE = {"fp16": 2.0**10}  # of gradients on their way back, so that small ones are not lost,
LARGE = 2.0**13  # unless they come near the end of such numbers with it


def check_precision(precision: Any, device: torch.device, dtype: torch.dtype) -> str:
    """`precision`, after making sure that the device and the inputs can have it."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(map(repr, PRECISIONS))}, got {precision!r}.")
    if precision != "float32" and dtype != torch.float32:
        raise ValueError(f"precision={precision!r} is for float32 inputs and models, got {dtype}. Use inputs.float().")
    if precision == "tf32" and device.type != "cuda":
        raise ValueError(f"precision='tf32' is a mode of CUDA devices, the inputs are on {device.type!r}.")
    return precision


@contextmanager
def evaluated(precision: str, device: torch.device) -> Iterator[None]:
    """Model calls inside are made with that precision; everything is as before afterwards."""
    if precision == "tf32":
        with tf32(True):
            yield
    elif precision in HALVES:
        with torch.autocast(device.type, HALVES[precision]):
            yield
    else:
        yield


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Whether float32 products may be rounded to ten bits on a CUDA device."""
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
