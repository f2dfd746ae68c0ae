"""Progress bars appear by themselves only where somebody can see them, and estimate the time left."""

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import warnings

import pytest
import torch

from smoothhess import SmoothHess
from smoothhess.explainers import progress
from smoothhess.explainers.adaptive import Budget
from smoothhess.explainers.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(progress, "DELAY", 0.02)
    monkeypatch.setattr(progress, "INTERVAL", 0.01)


def shown(monkeypatch, stream, show, work=lambda bar: None):
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(show, 100) as bar:
        bar.update(10)
        work(bar)
        threading.Event().wait(0.2)
    return stream.getvalue()


def test_when_a_bar_is_shown(quick, monkeypatch):
    assert shown(monkeypatch, io.StringIO(), None) == ""
    assert shown(monkeypatch, Terminal(), False) == ""
    assert "10/100 draws" in shown(monkeypatch, Terminal(), None)
    assert "10/100 draws" in shown(monkeypatch, io.StringIO(), True)
    assert "left" in shown(monkeypatch, Terminal(), None)


def test_a_short_call_shows_nothing(monkeypatch):
    monkeypatch.setattr(progress, "INTERVAL", 0.01)
    assert shown(monkeypatch, Terminal(), None) == ""


def test_no_bar_inside_another_one_or_in_a_thread(quick, monkeypatch):
    def inside(_):
        with Progress(None, 7, "inner"):
            threading.Event().wait(0.1)

    assert "inner" not in shown(monkeypatch, Terminal(), None, inside)
    assert shown(monkeypatch, Terminal(), False, inside) == ""
    stream = Terminal()
    thread = threading.Thread(target=shown, args=(monkeypatch, stream, None))
    thread.start()
    thread.join()
    assert stream.getvalue() == ""


def test_time_left_extrapolates_the_mean_rate(monkeypatch):
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with Progress(False, items=2) as bar:
        now += 60  # work before the first draws does not count
        bar.expect(None)
        now += 4
        bar.update(100)
        assert bar.time_left() is None
        bar.expect(250)
        assert bar.time_left() == pytest.approx(16)
        bar.update(400)
        assert bar.time_left() is None


def test_the_expected_number_of_draws_follows_the_error():
    budget = Budget(64, 10_000, 0.1, block=64)
    errors = torch.tensor([0.19, 0.09, torch.inf])
    assert budget.expected_rows(errors, 512).tolist() == [2048.0, 1024.0, 10_000.0]
    assert budget.next_rows(torch.tensor([0.39]), 512).tolist() == [4096]  # half of the expected rows
    assert budget.next_rows(torch.tensor([0.39]), 32).tolist() == [64]  # in a part of a block the error may fall faster
    assert budget.next_rows(torch.tensor([0.9, torch.nan, torch.inf, 0.0]), 512).tolist() == [1024] * 4  # may be zero


def test_check_points_do_not_depend_on_the_other_examples():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).double()
    x = torch.randn(6, 5).double() * torch.tensor([0.1, 0.3, 1.0, 2.0, 4.0, 8.0])[:, None]
    options = {"target": 0, "sigma": 0.3, "tol": 0.02, "control": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        together = SmoothHess(net).attribute(x, **options)
        alone = [SmoothHess(net).attribute(one[None], **options) for one in x]
    assert len(set(together.n_calls.tolist())) > 1
    assert together.n_calls.tolist() == [int(one.n_calls) for one in alone]
    assert together.status == tuple(one.status[0] for one in alone)


def test_a_run_reports_its_total(monkeypatch):
    totals = []
    monkeypatch.setattr(Progress, "expect", lambda bar, total: totals.append(total))
    net = torch.nn.Sequential(torch.nn.Linear(5, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    result = SmoothHess(net).attribute(torch.zeros(2, 5), target=0, sigma=1.0, tol=0.05, control=None)
    assert totals[0] is None
    assert all(total <= 10_000 for total in totals[1:])
    assert totals[-1] == pytest.approx(float(result.n_calls.double().mean()) / 2, rel=1)


def test_a_tolerance_out_of_reach_is_reported_early():
    net = torch.nn.Sequential(torch.nn.Linear(5, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    options = {"target": 0, "sigma": 1.0, "control": None, "max_calls": 2000}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = SmoothHess(net).attribute(torch.zeros(1, 5), tol=1e-4, **options)
    early = [str(w.message) for w in caught if "out of reach" in str(w.message)]
    assert len(early) == 1
    assert all(word in early[0] for word in ("feature_mask", "tol=", "n_calls=", "max_calls=2000"))
    assert result.status == ("budget",)
    assert result.n_calls.tolist() == [2000]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SmoothHess(net).attribute(torch.zeros(1, 5), tol=0.3, **options)


def test_a_terminal_shows_the_bar_of_a_slow_call():
    script = """
import torch, time, smoothhess as sh
net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
def slow(x):
    time.sleep(0.05)
    return net(x)[:, 0]
sh.SmoothHess(slow).attribute(torch.zeros(1, 4), sigma=0.5, n_calls=4000, control=None, internal_batch_size=64)
"""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    run = subprocess.Popen([sys.executable, "-c", script], stderr=follower, stdout=subprocess.DEVNULL)
    os.close(follower)
    seen = b""
    while True:
        try:
            piece = os.read(leader, 4096)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        seen += piece
    os.close(leader)
    assert run.wait(60) == 0
    assert "draws" in seen.decode(errors="replace")
    assert "s left" in seen.decode(errors="replace")
