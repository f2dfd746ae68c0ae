"""Explains every case on all ranks, or some of them on one GPU, and saves what each rank got."""

import json
import sys
import warnings
from pathlib import Path

import torch.distributed as dist

from smoothhess import SmoothHess
from smoothhess.datasets import distributed
from tests.datasets.distributed.cases import CASES, OPTIONS, Counter, X, plain


def main(folder: Path, device: str = "cpu") -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if device != "cpu":  # nccl wants a GPU for each rank; over gloo they can share one
        for name, options in OPTIONS.items():
            plain(distributed.attribute, rank, device, **options).save(folder / f"{name} {rank}.safetensors")
        return
    warned = {}
    for name, run in CASES.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(distributed.attribute, rank).save(folder / f"{name} {rank}.safetensors")
        warned[name] = [str(w.message) for w in caught]

    model = Counter()
    distributed.attribute(SmoothHess(model), X, target=0, sigma=0.4, n_calls=400, control=None)
    others = dist.new_group([1])  # some of the ranks may work on something of their own
    if rank == 1:
        plain(distributed.attribute, rank, n_calls=40, group=others)
    (folder / f"about {rank}.json").write_text(json.dumps({"warned": warned, "rows": model.rows}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
