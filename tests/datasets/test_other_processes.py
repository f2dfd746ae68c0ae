"""Processes that share a store but differ in weights, settings or data: named, and never mixed."""

import json
import multiprocessing
import re
import threading

import pytest
import torch

from smoothhess import SmoothHess
from smoothhess.datasets import Store, explain_dataset
from smoothhess.datasets.store import writer_lock
from smoothhess.datasets.store.shard_files import MANIFEST
from tests.datasets import job


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.datasets.job"])
    return context


class Child:
    """A process of rank 0 of 2 that stands before its first call of the model until `finish`."""

    def __init__(self, processes, folder, **given):
        self.ready, self.go, self.told = processes.Event(), processes.Event(), processes.Queue()
        given = {"rank": 0, "world_size": 2, **given}
        self.process = processes.Process(target=job.run_as, args=(folder, self.ready, self.go, self.told, given))
        self.process.start()
        assert self.ready.wait(60)

    def finish(self):
        """The text of its error, or nothing; the exit code agrees."""
        self.go.set()
        text = self.told.get(timeout=60)
        self.process.join()
        assert (self.process.exitcode != 0) == bool(text)
        return text


def second(folder, x=None, shift=0.0, **options):
    """Rank 1 of 2, in this process."""
    net = job.network().double()
    with torch.no_grad():
        net[0].weight += shift
    options = {"rank": 1, "world_size": 2, **job.ASKED, **options}
    return explain_dataset(SmoothHess(net), job.data() if x is None else x, folder, **options)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"shift": 0.1}, "model = 'Sequential"),
        ({"sigma": 0.7}, "sigma = 0.5, not 0.7"),
        ({"seed": 7}, "seed = 0, not 7"),
        ({"n_calls": 16}, "n_calls = 8, not 16"),
        ({"pack_size": 3}, "pack_size = 2, not 3"),
    ],
)
def test_a_process_with_other_settings_before_the_first_shard(processes, tmp_path, given, said):
    first = Child(processes, tmp_path)
    manifest = (tmp_path / MANIFEST).read_text()
    with pytest.raises(ValueError, match=re.escape(said)):
        second(tmp_path, **given)
    assert (tmp_path / MANIFEST).read_text() == manifest
    assert first.finish() == ""
    assert Store(tmp_path).numbers == [0, 1, 4, 5, 8, 9]
    assert len(second(tmp_path)) == 12


def test_a_shorter_loader_that_ends_first(processes, tmp_path):
    first = Child(processes, tmp_path)
    second(tmp_path, job.data(7))
    said = first.finish()
    assert "rank 1 has read 7 records, this process (rank 0) 12: records 7, 8, 9, 10, 11 are missing" in said
    assert len(second(tmp_path)) == 12


def test_a_shorter_loader_that_ends_last(processes, tmp_path):
    first = Child(processes, tmp_path)
    assert first.finish() == ""
    with pytest.raises(ValueError, match=r"returns 7 records, but .* also holds 8, 9 \(2 more\)"):
        second(tmp_path, job.data(7))
    with pytest.raises(ValueError, match=r"rank 0 has read 12 records, this process \(rank 1\) 10: records 10, 11"):
        second(tmp_path, job.data(10))


@pytest.mark.parametrize(("changed", "said"), [(2, "record 2 is not the one"), (0, "rank 1 has read other records")])
def test_other_data_in_one_process(processes, tmp_path, changed, said):
    """In a record that the second process explains, or only reads."""
    x = job.data()
    x[changed] += 0.1
    first = Child(processes, tmp_path)
    second(tmp_path, x)  # nothing to compare with yet
    assert said in first.finish()


def test_a_data_set_that_has_grown(tmp_path):
    """Rank after rank, as in a chain of jobs: the first to run again does not complain about the other."""
    for n in (8, 12):
        for rank in (0, 1):
            made = job.run(tmp_path, n=n, rank=rank, world_size=2)
    assert len(made) == 12


def test_a_record_that_is_missing_at_the_end(tmp_path):
    for rank in (0, 1):
        job.run(tmp_path, rank=rank, world_size=2)
    (lost,) = (s for s in Store(tmp_path).shards if s.spans[0][0] == 4)
    (tmp_path / lost.file).unlink()
    with pytest.raises(ValueError, match=r"lacks 2 of 12 records: 4, 5, explained by rank\(s\) 0 of 2"):
        job.run(tmp_path, rank=1, world_size=2)
    assert len(job.run(tmp_path, rank=0, world_size=2)) == 12


def test_fewer_records_than_the_store_holds_are_named(tmp_path):
    job.run(tmp_path)
    for x in (job.data(9), iter(job.data(9).split(3))):  # a known and an unknown number
        with pytest.raises(ValueError, match=r"returns 9 records, but .* also holds 9, 10, 11 \(3 more\)"):
            second(tmp_path, x, rank=0, world_size=1)


def test_two_threads_with_one_rank(tmp_path):
    """The second is refused, and the first keeps its lock also against other processes."""
    errors = []

    def other():
        try:
            job.run(tmp_path, n=4)
        except ValueError as error:
            errors.append(str(error))

    with writer_lock.only_writer(tmp_path, 0):
        for _ in range(2):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        assert writer_lock.other_writers(tmp_path, 1) == [0]
    assert len(errors) == 2
    assert "as rank 0: process " in errors[0]
    assert len(job.run(tmp_path, n=4)) == 4


def test_a_stale_lock(tmp_path, monkeypatch):
    """Of a process that has ended, also on a file system without locks."""
    (tmp_path / ".lock-0000").write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": 1}))
    assert len(job.run(tmp_path, n=4)) == 4
    import fcntl
    import socket

    def none(*_):
        raise OSError("no locks")

    monkeypatch.setattr(fcntl, "lockf", none)
    dead = {"host": socket.gethostname(), "pid": 2**22 + 1, "started": 1}
    (tmp_path / ".lock-0000").write_text(json.dumps(dead))
    assert len(job.run(tmp_path, n=6)) == 6
    (tmp_path / ".lock-0000").write_text(json.dumps({**dead, "host": "elsewhere"}))
    with pytest.raises(ValueError, match=f"process {2**22 + 1} on elsewhere"):
        job.run(tmp_path, n=8)
