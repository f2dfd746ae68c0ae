"""Standard normal numbers of many NumPy generators, computed on a GPU: the numbers that NumPy draws on the CPU.

NumPy's PCG64 is a linear congruential generator of 128 bits, and its normal numbers come from the ziggurat of Marsaglia
& Tsang with 256 strips, which takes one 64-bit word for 99 % of them. A thread of the GPU follows one generator, so
that thousands of generators take milliseconds. The words are the same bits, and so are the numbers, except those beyond
3.65, which contain a logarithm and are equal up to rounding.

The kernel is written in Triton, which comes with PyTorch for CUDA on Linux; see `computes_on`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smoothhess.draws.seeding import PCG_MASK, PCG_MULTIPLIER, State, generators, states
from smoothhess.linalg.memory import reraise_out_of_memory

__all__ = ["computes_on", "normals_on_gpu", "ziggurat"]

STRIPS = 256
MANTISSA = 2**52
LANES = 32  # generators per program
FEWEST = 256  # generators; fewer are drawn faster on the CPU


def computes_on(device: torch.device | str, count: int) -> bool:
    """Whether `count` generators are better followed on this device."""
    device = torch.device(device)
    return device.type == "cuda" and count >= FEWEST and _works_on(device)


@lru_cache(maxsize=8)
def _works_on(device: torch.device) -> bool:
    """Whether the kernel can be compiled and gives NumPy's numbers; a warning says why not."""
    found = states([(1, i) for i in range(2)])
    try:
        numbers = normals_on_gpu(found, 4096, device).cpu().numpy()
    except Exception as error:  # no Triton, no C compiler, an unknown GPU
        reraise_out_of_memory(error)
        words = " ".join(str(error).split())[:200]
        reason = f"the kernel for the GPU cannot be run ({type(error).__name__}: {words})"
    else:
        expected = np.stack([one.standard_normal(4096) for one in generators(found)])
        if np.allclose(numbers, expected, rtol=1e-12, atol=0):
            return True
        reason = "the kernel for the GPU does not give NumPy's numbers"
    warnings.warn(
        f"Normal numbers are drawn on the CPU: {reason}. Results are the same; runs with different draws for each "
        "input are slower.",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


@lru_cache(maxsize=1)
def ziggurat() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per strip: the number of 52 bits below which a point is inside, the width over 2⁵², and the density at the edge.

    NumPy's tables contain rounding errors, so the widths are read off NumPy: a generator whose next word has
    the bits of 2⁵¹ in a strip returns 2⁵¹ times the width. The other columns follow from the widths. Their rounding
    matters for one number in 10¹⁵.

    >>> inside, width, density = ziggurat()
    >>> round(float(width[255] * MANTISSA), 6), round(float(density[255]), 6), float(density[0])
    (3.654153, 0.00126, 1.0)
    """
    width = np.array([_number_of(strip | MANTISSA // 2 << 9) for strip in range(STRIPS)]) * (2 / MANTISSA)
    edge = width * MANTISSA
    density = np.exp(-0.5 * edge**2)
    density[0] = 1.0  # the lowest strip contains the tail: its width is the area over the density of its edge
    inside = np.concatenate([edge[-1:] / edge[:1], [0.0], edge[1:-1] / edge[2:]]) * MANTISSA
    return inside.astype(np.int64), width, density


def _number_of(word: int) -> float:
    """The normal number that NumPy makes of a word: that of the generator whose next state is the word.

    The upper half of that state is zero, so the output is its lower half, not rotated. Strip 1 has no inside; there the
    following word accepts the number.
    """
    increment = 1
    state = (word - increment) * pow(PCG_MULTIPLIER, -1, PCG_MASK + 1) & PCG_MASK
    return float(next(generators([State(state, increment)])).standard_normal())


def normals_on_gpu(found: Sequence[State], count: int, device: torch.device | str) -> Tensor:
    """`count` standard normal numbers of each generator, (len(found), count) float64 on the device."""
    from smoothhess.draws.ziggurat_kernel import fill_normals  # imports Triton

    device = torch.device(device)
    out = torch.empty(len(found), count, dtype=torch.float64, device=device)
    words = np.array([[n >> 64, n & (2**64 - 1)] for state in found for n in state], dtype=np.uint64)
    start = torch.from_numpy(words.reshape(len(found), 4).T.copy().view(np.int64)).to(device)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        programs = -(-len(found) // LANES)
        launch: Any = fill_normals
        launch[(programs,)](out, start, *_tables(device), len(found), count, LANES, num_warps=1)
    return out


@lru_cache(maxsize=8)
def _tables(device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(column).to(device) for column in ziggurat())
