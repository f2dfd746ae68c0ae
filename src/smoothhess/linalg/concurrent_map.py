"""The same work on several matrices; on a GPU several of them at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache

import torch
from torch import Tensor

AT_ONCE = 8  # a factorisation of one matrix waits for itself most of the time, and leaves a GPU idle


def concurrently(work: Callable[[Tensor], Tensor], matrices: Tensor) -> Tensor:
    """`work` of each of (b, …), which must keep shape and dtype, as one tensor.

    >>> concurrently(torch.linalg.inv, torch.diag_embed(torch.tensor([[1.0, 2.0], [4.0, 4.0]])))
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
    main, inference = torch.cuda.current_stream(matrices.device), torch.is_inference_mode_enabled()
    workers = _workers(matrices.device)[: len(matrices)]

    def on(which: int) -> None:
        with torch.inference_mode(inference), torch.cuda.stream(workers[which][1]):  # both are a thread's own
            for i in range(which, len(matrices), len(workers)):
                found[i].copy_(work(matrices[i]))

    for _, stream in workers:
        stream.wait_stream(main)
    jobs = [thread.submit(on, which) for which, (thread, _) in enumerate(workers)]
    try:
        wait(jobs)
    finally:  # whatever failed: what is freed from here on must not be in use any more
        for _, stream in workers:
            main.wait_stream(stream)
    for job in jobs:
        job.result()
    return found


@cache
def _workers(device: torch.device) -> list[tuple[ThreadPoolExecutor, torch.cuda.Stream]]:
    """Always the same threads and streams, in pairs: torch keeps memory and workspaces for each pair."""
    torch.linalg.qr(torch.ones(1, 1, device=device))  # loads a library, which threads must not do at the same time
    return [(ThreadPoolExecutor(1), torch.cuda.Stream(device)) for _ in range(AT_ONCE)]
