"""The same work on several matrices; on a GPU several of them at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

AT_ONCE = 8  # a factorisation of one matrix waits for itself most of the time, and leaves a GPU idle


def side_by_side(work: Callable[[Tensor], Tensor], matrices: Tensor) -> Tensor:
    """`work` of each of (b, …), which must keep shape and dtype, as one tensor.

    >>> side_by_side(torch.linalg.inv, torch.diag_embed(torch.tensor([[1.0, 2.0], [4.0, 4.0]])))
    tensor([[[1.0000, 0.0000],
             [0.0000, 0.5000]],
    <BLANKLINE>
            [[0.2500, 0.0000],
             [0.0000, 0.2500]]])
    """
    found = torch.empty_like(matrices)
    if not matrices.is_cuda or len(matrices) == 1:
        for matrix, place in zip(matrices, found, strict=True):
            place.copy_(work(matrix))
        return found
    main = torch.cuda.current_stream(matrices.device)
    streams = [torch.cuda.Stream(matrices.device) for _ in range(min(AT_ONCE, len(matrices)))]

    def on(which: int) -> None:
        with torch.cuda.stream(streams[which]):
            for i in range(which, len(matrices), len(streams)):
                found[i].copy_(work(matrices[i]))

    for stream in streams:
        stream.wait_stream(main)
    with ThreadPoolExecutor(len(streams)) as pool:
        list(pool.map(on, range(len(streams))))
    for stream in streams:
        main.wait_stream(stream)
    return found
