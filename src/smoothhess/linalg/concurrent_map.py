"""Apply a function to each matrix of a batch, concurrently on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache

import torch
from torch import Tensor

AT_ONCE = 8  # streams: the factorisation of one matrix is sequential and leaves most of a GPU idle


def concurrently(work: Callable[[Tensor], Tensor], matrices: Tensor) -> Tensor:
    """Apply `work`, which must preserve shape and dtype, to each of (b, …), and stack the results.

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
        with torch.inference_mode(inference), torch.cuda.stream(workers[which][1]):  # both settings are thread-local
            for i in range(which, len(matrices), len(workers)):
                found[i].copy_(work(matrices[i]))

    for _, stream in workers:
        stream.wait_stream(main)
    jobs = [thread.submit(on, which) for which, (thread, _) in enumerate(workers)]
    try:
        wait(jobs)
    finally:  # also after an error: memory freed from here on must not be in use
        for _, stream in workers:
            main.wait_stream(stream)
    for job in jobs:
        job.result()
    return found


@cache
def _workers(device: torch.device) -> list[tuple[ThreadPoolExecutor, torch.cuda.Stream]]:
    """A fixed set of pairs (thread, stream): torch keeps memory and workspaces for each pair."""
    torch.linalg.qr(torch.ones(1, 1, device=device))  # loads a library, which is not thread-safe
    return [(ThreadPoolExecutor(1), torch.cuda.Stream(device)) for _ in range(AT_ONCE)]
