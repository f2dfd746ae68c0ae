"""Things that go wrong on one rank; every rank writes down what it was told, and how long that took."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from smoothhess import SmoothHess
from smoothhess.datasets import distributed
from smoothhess.datasets.distributed import distributed_dataset
from tests.datasets.distributed.cases import TwoPaths, X, network


class Breaks(nn.Module):
    """Works for a while; then `what` happens. Every call takes some `seconds`."""

    def __init__(self, calls, what, seconds=0.0):
        super().__init__()
        self.net, self.left, self.what, self.seconds = network(), calls, what, seconds

    def forward(self, x):
        time.sleep(self.seconds)
        self.left -= 1
        if self.left < 0:
            self.what()
        return self.net(x)


def stumble():
    raise ValueError("the last rank stumbled")


def interrupt():
    raise KeyboardInterrupt


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def shifted(by):
    net = network()
    with torch.no_grad():
        net[4].bias += by
    return net


def infinite():
    net = network()
    return lambda x: net(x) / 0


def explain(model, inputs=X, **options):
    return distributed.attribute(SmoothHess(model), inputs, **{"target": 0, "sigma": 0.4, "n_calls": 64, **options})


def explain_records(model, path, shift=0.0, n=40, **options):
    asked = {"target": 0, "sigma": 0.4, "n_calls": 16, "pack_size": 1, "shard_seconds": 0.0, "summary": False}
    inputs = torch.linspace(0, 1, 40)[:n, None].double() + X[0] + shift
    return distributed.explain_dataset(SmoothHess(model), inputs, path, **asked, **options)


def scenes(rank, count, folder):
    last, sampled = rank == count - 1, {"control": None, "internal_batch_size": 8}

    def breaks(calls, what):
        return Breaks(calls, what) if last else network()

    return {
        "before": lambda: explain(network()),
        "stumbles while sampling": lambda: explain(breaks(4, stumble), **sampled),
        "stumbles at once": lambda: explain(breaks(0, stumble)),
        "the leader stumbles": lambda: explain(network() if rank else infinite()),
        "all are asked for nonsense": lambda: explain(network(), n_calls=7),
        "one is asked for more": lambda: explain(network(), n_calls=64 + 2 * rank),
        "other inputs": lambda: explain(network(), X + 0.1 * rank),
        "other weights": lambda: explain(shifted(rank)),
        "one cannot be frozen": lambda: explain(TwoPaths(rank == 1), control="kink"),
        "interrupted": lambda: explain(breaks(4, interrupt), **sampled),
        "records": lambda: explain_records(
            Breaks(12, stumble) if last else Breaks(1000, stumble, seconds=0.05), folder / "records"
        ),
        "other seeds": lambda: explain_records(network(), folder / "other seeds", seed=rank),
        "records of other weights": lambda: explain_records(shifted(0.1 * rank), folder / "other weights"),
        "other records": lambda: explain_records(network(), folder / "other records", shift=0.1 * rank),
        "fewer records": lambda: explain_records(network(), folder / "fewer records", n=40 - 3 * rank),
        "other folders": lambda: explain_records(network(), folder / f"folder of {rank}"),
        "after": lambda: explain(network()),
        "dies": lambda: explain(breaks(4, die), **sampled),
    }


def main(rank: int, count: int, folder: Path) -> None:
    distributed_dataset.PATIENCE = 0.5
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=count)
    told = {}
    for name, scene in scenes(rank, count, folder).items():
        start, kind, words = time.monotonic(), "", ""
        try:
            scene()
        except BaseException as error:
            kind, words = type(error).__name__, str(error)
        told[name] = kind, words, time.monotonic() - start
        (folder / f"told {rank}.json").write_text(json.dumps(told))
    sys.exit(3)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
