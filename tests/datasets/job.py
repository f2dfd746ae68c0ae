"""A small job that tests run here and in processes of their own, which are killed."""

import os
import signal

import torch
from torch import nn

from smoothhess import SmoothHess
from smoothhess.datasets import explain_dataset
from smoothhess.datasets.store import shard_files, writer, writer_lock
from smoothhess.model.atomic_write import atomic_write

RECORDS = 12
ASKED = {"target": 0, "sigma": 0.5, "n_calls": 8, "control": None, "pack_size": 2, "shard_seconds": 0}


def network(d: int = 3, width: int = 8) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(d, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def data(n: int = RECORDS, d: int = 3) -> torch.Tensor:
    return torch.randn(200, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)[:n]


def run(folder, n: int = RECORDS, **options):
    """The job: packs of two, each a shard."""
    return explain_dataset(SmoothHess(network().double()), data(n), folder, **{**ASKED, **options})


def run_and_tell(folder, started, ended) -> None:
    """The job, for those who want to kill it."""
    torch.set_num_threads(1)
    started.set()
    run(folder)
    ended.set()


def killed_before(step: int):
    """A decorator that kills this process −9 right before call number `step` of all decorated functions together."""
    left = [step]

    def counted(function):
        def call(*args, **kwargs):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return function(*args, **kwargs)

        return call

    return counted


def run_until(folder, step: int, ended) -> None:
    """The job of six records, killed −9 right before the given change of the file system, if there are so many."""
    torch.set_num_threads(1)
    counted = killed_before(step)
    for name in ("replace", "fsync", "unlink", "link", "mkdir"):
        setattr(os, name, counted(getattr(os, name)))
    writer.save_file = counted(writer.save_file)
    shard_files.add_to_index = counted(shard_files.add_to_index)
    run(folder, n=6)
    ended.set()


def hold(folder, ready, go) -> None:
    """Be the one who writes, until told to go."""
    with writer_lock.only_writer(folder, 0):
        ready.set()
        go.wait()


def begin_to_write(path, ready, ended) -> None:
    """Write a file until killed."""
    with atomic_write(path) as temporary:
        temporary.write_bytes(bytes(100_000))
        ready.set()
        ended.wait()


def run_as(folder, ready, go, told, given: dict) -> None:
    """The job of one process, which waits before its first call; `given` has its options, weights and records."""
    torch.set_num_threads(1)
    given = dict(given)
    net, x = network().double(), given.pop("records", data())
    with torch.no_grad():
        net[0].weight += given.pop("shift", 0.0)

    def wait(*_):
        ready.set()
        go.wait()

    net.register_forward_pre_hook(wait)
    try:
        explain_dataset(SmoothHess(net), x, folder, **{**ASKED, **given})
    except ValueError as error:
        told.put(str(error))
        raise
    told.put("")
