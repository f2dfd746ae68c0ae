"""Atomic writes: nothing is left beside the file, also of writers that create further files or are killed."""

import socket

import pytest

from smoothhess.model.atomic_write import atomic_write, remove_stale, temporary_path
from smoothhess.model.running_process import RunningProcess


@pytest.mark.parametrize("fails", [False, True])
def test_further_files_of_a_writer_are_removed(tmp_path, fails):
    (tmp_path / "a.txt").write_text("before")
    try:
        with atomic_write(tmp_path / "a.txt") as temporary:
            (temporary.parent / ".tmp123").write_text("of the writer")
            temporary.write_text("after")
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.txt", "before" if fails else "after")]


def test_temporary_folders_of_ended_processes_are_removed(tmp_path, monkeypatch):
    with temporary_path(tmp_path / "mine") as running:
        dead = RunningProcess(socket.gethostname(), 2**22 + 1, 1)
        monkeypatch.setattr(RunningProcess, "current", lambda: dead)
        with temporary_path(tmp_path / "stale") as stale:
            stale.write_text("half")
            (stale.parent / ".tmp123").write_text("of safetensors")
            (tmp_path / ".notes.tmp").write_text("of the user")
            remove_stale(tmp_path)
            left = sorted(path.name for path in tmp_path.iterdir())
            assert left == sorted([".notes.tmp", running.parent.name])
