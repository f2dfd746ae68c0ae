"""The global summary of a store: computed per pack, merged as packs are explained, and loaded again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from smoothhess.datasets.store.shard_files import Shard, numbers_in, spans, summaries
from smoothhess.evaluate.global_interactions import unbiased_features
from smoothhess.evaluate.global_summary import GlobalInteractions, Moments, sign
from smoothhess.result.exact import StoredResult
from smoothhess.result.result import Result

TRIALS = 10  # attempts to read the summaries of a running job


def tally(
    first: Result, second: Result | None, seed: int, numbers: Sequence[int], chosen: Sequence[int]
) -> GlobalInteractions:
    """Summary of the `chosen` examples of a pack from two independent estimates, or from one that is not random.

    As in `global_interactions`; where the two have different numbers of calls, n′ and n″, `mean` and `mean_abs_upper`
    are computed from (n′H′ + n″H″)/(n′ + n″), and `noise` assumes that variances are proportional to 1/n.
    """
    rows = torch.as_tensor(chosen, device=first.device)
    one = unbiased_features(first)[rows]
    two = one if second is None else unbiased_features(second)[rows]
    share = _share(first, second)[rows]
    mean = share * one + (1 - share) * two
    values = {
        "mean": mean,
        "square": one * two,
        "abs": (sign(one, two, first.dtype) * two + sign(two, one, first.dtype) * one) / 2,
        "abs_upper": mean.abs(),
        "noise": share * (1 - share) * (one - two).square(),
    }
    results = [first] if second is None else [first, second]
    return GlobalInteractions(
        moments={name: Moments.of(v) for name, v in values.items()},
        scales=first.feature_scales[0].double().cpu(),
        feature_shape=first.feature_shape,
        segments=tuple((seed, start, stop) for start, stop in spans([numbers[i] for i in chosen])),
        method=first.method if isinstance(first, StoredResult) else f"SmoothHess {first.gaussian_text}",
        n_calls=sum(int(r.n_calls[rows].sum()) for r in results),
        n_passes=sum(float(r.n_passes[rows].sum()) for r in results),
        names=None if first.names is None or first.feature_kind else first.names[0],
    )


def _share(first: Result, second: Result | None) -> Tensor:
    """Weight of the first estimate, (B, 1, 1)."""
    calls = first.n_calls.double()
    more = torch.zeros_like(calls) if second is None else second.n_calls.double()
    return torch.where(more > 0, calls / (calls + more).clamp_min(1), 0.5)[:, None, None]


def standing(folder: Path, shards: Sequence[Shard]) -> list[GlobalInteractions]:
    """The valid summaries for these shards, one per process that has written records."""
    for _ in range(TRIALS):
        with suppress(FileNotFoundError):  # a running job replaced the file after it was listed
            return [GlobalInteractions.load(path) for path in summaries(folder, shards).values()]
    raise ValueError(f"the summaries in {folder} change faster than they can be read. Wait for the job to end.")


def covered(found: GlobalInteractions) -> np.ndarray:
    """Numbers of the records that are in a summary."""
    return numbers_in(tuple((start, stop) for _, start, stop in found.segments))
