"""An interrupted run keeps what was drawn, restores the model, and can be continued."""

import os
import pickle
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn

import smoothhess as sh
from smoothhess import Interrupted, NeuronSmoothHess, SmoothHess
from smoothhess.explainers import adaptive
from smoothhess.linalg import memory

D = 6


class Interrupting(nn.Module):
    """A small network whose n-th forward call raises KeyboardInterrupt."""

    def __init__(self, at=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(D, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)).double()
        self.at, self.calls = at, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return self.net(x)


def inputs(n=3):
    return torch.randn(n, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def state(model):
    buffers = {name: t.clone() for name, t in model.state_dict().items()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    flags = [torch.is_grad_enabled(), torch.backends.cuda.matmul.allow_tf32, *(m.training for m in model.modules())]
    return buffers, hooks, flags, [p.requires_grad for p in model.parameters()]


def assert_same_state(a, b):
    assert all(torch.equal(a[0][name], b[0][name]) for name in a[0])
    assert a[1:] == b[1:]


def interrupted_at(n, x, method="attribute", **options):
    """The exception of a run whose n-th call of the model is interrupted; None if it makes fewer calls."""
    model, found = Interrupting(n).eval(), None
    before = state(model)
    try:
        getattr(SmoothHess(model), method)(x, target=0, internal_batch_size=64, **options)
    except KeyboardInterrupt as error:
        found = error
    assert found is None or isinstance(found, Interrupted)
    assert_same_state(before, state(model))
    return found


def assert_equal(a, b):
    assert a.n_calls.tolist() == b.n_calls.tolist()
    assert a.statistics.stream == b.statistics.stream
    for name in ("gradient", "value", "output"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name))
    torch.testing.assert_close(a.unshrunk().hessian, b.unshrunk().hessian)
    torch.testing.assert_close(a.unshrunk().stderr(), b.unshrunk().stderr())


CASES = {
    "plain": {"control": None},
    "control variate": {"control": "kink"},
    "groups": {"control": None, "feature_mask": torch.tensor([0, 0, 1, 1, 2, 2])},
    "sums that are streamed": {"control": None, "shrink": False, "feature_mask": torch.tensor([0, 0, 1, 1, 2, 2])},
    "sobol": {"control": None, "design": "sobol"},
    "seeds": {"control": None, "seed": [3, 4, 5]},
}


@pytest.mark.parametrize("name", CASES)
def test_interrupted_and_continued_equals_one_run(name):
    x, options = inputs(), {"sigma": 0.5, "tails": None, **CASES[name]}  # other draws belong to each extension
    whole = SmoothHess(Interrupting()).attribute(x, target=0, n_calls=1600, **options)
    found = 0
    for n in (1, 2, 3, 5, 8, 13, 21, 34, 55):
        error = interrupted_at(n, x, n_calls=1600, **options)
        if error is None:
            break
        if error.result is None:
            continue
        found += 1
        calls = error.result.n_calls
        assert 0 < int(calls.min()) < 1600
        assert error.result.status == ("interrupted",) * 3
        assert not error.result.converged.any()
        assert "more(error.result, n)" in str(error)
        rest = SmoothHess(Interrupting()).more(error.result, 1600 - int(calls[0]))
        assert_equal(rest, whole)
        assert rest.status == ("calls",) * 3
    assert found >= 2


def test_nothing_was_drawn_yet():
    for n in (1, 2):
        error = interrupted_at(n, inputs(), sigma=0.5, n_calls=100)
        assert error.result is None
        assert "no result" in str(error)


@pytest.mark.filterwarnings("ignore")
def test_examples_that_had_stopped_keep_their_status():
    """A constant gradient stops as zero after 512 rows, while the other example goes on."""
    weight = torch.randn(16, D, generator=torch.Generator().manual_seed(2)).double()
    calls = 0

    def f(x):
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt
        return torch.where(x[:, 0] > 50, x.sum(1), (x @ weight.T).abs().sum(1))

    x = inputs(2)
    x[0, 0] = 100.0
    statuses = set()
    for n in range(30, 400, 10):
        at, calls = n, 0
        try:
            SmoothHess(f).attribute(x, sigma=0.5, tol=1e-3, max_calls=8000, control=None, internal_batch_size=128)
            break
        except Interrupted as error:
            if error.result is not None:
                statuses.add(error.result.status)
    assert ("interrupted", "interrupted") in statuses
    assert any(first != "interrupted" and second == "interrupted" for first, second in statuses)


def test_an_interruption_between_the_rows_keeps_them(monkeypatch):
    def verdicts(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(adaptive, "_verdicts", verdicts)
    with pytest.raises(Interrupted) as caught:
        SmoothHess(Interrupting()).attribute(inputs(), target=0, sigma=0.5)
    assert caught.value.result.n_calls.tolist() == [12, 12, 12]


def test_a_smooth_function_has_the_error_of_one_run():
    calls = 0

    def f(x):
        nonlocal calls
        calls += 1
        if calls == 12:
            raise KeyboardInterrupt
        return x.prod(1).sin()

    with pytest.raises(Interrupted) as caught:
        SmoothHess(f).attribute(inputs(1), sigma=0.1, n_calls=1200, tails=None, internal_batch_size=64)
    result = caught.value.result
    rest = SmoothHess(f).more(result, 1200 - int(result.n_calls))
    whole = SmoothHess(f).attribute(inputs(1), sigma=0.1, n_calls=1200, tails=None)
    torch.testing.assert_close(rest.relative_error, whole.relative_error)


def test_more_keeps_the_calls_of_before_and_those_that_were_complete():
    x = inputs()
    model = Interrupting()
    first = SmoothHess(model).attribute(x, target=0, sigma=0.5, n_calls=200, control=None)
    whole = SmoothHess(model).more(first, 1000)
    seen = set()
    for n in range(1, 20):
        model.calls, model.at = 0, n
        with pytest.raises(Interrupted) as caught:
            SmoothHess(model).more(first, 1000, internal_batch_size=64)
        model.at = None
        result = caught.value.result
        assert result.status == ("interrupted",) * 3
        seen.add(done := int(result.n_calls[0]))
        if n % 6 == 0:
            assert_equal(SmoothHess(model).more(result, 1200 - done), whole)
    assert min(seen) == 200
    assert len(seen) > 3


def test_batches_after_an_out_of_memory_error(monkeypatch):
    """Three examples do not fit: the first two are explained, then the third is interrupted."""
    x, model = inputs(), Interrupting()
    explainer, real = SmoothHess(model), adaptive.Run.start

    def start(run):
        if len(run.inputs) == 3:
            raise torch.OutOfMemoryError
        if len(run.inputs) == 1:
            raise KeyboardInterrupt
        return real(run)

    monkeypatch.setattr(adaptive.Run, "start", start)
    with pytest.raises(Interrupted, match="first 2 of 3 examples") as caught:
        explainer.attribute(x, target=0, sigma=0.5, n_calls=100, feature_mask=torch.tensor([0, 0, 1, 1, 2, 2]))
    assert len(caught.value.result) == 2
    assert caught.value.result.status == ("calls", "calls")
    assert memory.is_out_of_memory(torch.OutOfMemoryError())


def test_neurons_and_closed_forms():
    model = Interrupting(9)
    with pytest.raises(Interrupted):
        NeuronSmoothHess(model, model.net[2]).attribute(inputs(), 3, sigma=0.5, n_calls=2000, internal_batch_size=64)
    results = [interrupted_at(n, inputs(), "closed_form", sigma=0.5) for n in (1, 4, 12)]
    assert results[0].result is None


def test_the_exception_can_be_pickled():
    error = interrupted_at(21, inputs(), sigma=0.5, n_calls=1600, control=None)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.result.n_calls.tolist() == error.result.n_calls.tolist()


def test_a_store_keeps_its_records(tmp_path):
    x, model = inputs(8), Interrupting(30)
    options = {"target": 0, "sigma": 0.5, "n_calls": 64, "control": None, "pack_size": 2}
    with pytest.raises(Interrupted, match="same call again") as caught:
        sh.explain_dataset(SmoothHess(model), x, tmp_path / "store", **options)
    assert caught.value.result is None
    assert 0 < len(sh.Store(tmp_path / "store")) < 8
    model.at = None
    assert len(sh.explain_dataset(SmoothHess(model), x, tmp_path / "store", **options)) == 8


SCRIPT = """
import signal, torch, time, sys, smoothhess as sh
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background processes with SIGINT ignored
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
calls = 0
def slow(x):
    global calls
    calls += 1
    if calls == 40:
        print("ready", flush=True)
    time.sleep(0.005)
    return net(x)[:, 0]
try:
    options = {"sigma": 0.5, "tol": 1e-6, "max_calls": 400_000, "control": None, "internal_batch_size": 64}
    sh.SmoothHess(slow).attribute(torch.zeros(1, 6), **options)
except sh.Interrupted as error:
    grown = sh.SmoothHess(slow).more(error.result, 64)
    print(int(error.result.n_calls) > 0, int(grown.n_calls - error.result.n_calls), error.result.status)
"""


def test_a_signal_in_another_process():
    run = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout.readline().strip() == "ready"
    os.kill(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert out.strip() == "True 64 ('interrupted',)", err
    assert "draws" not in err  # no bar: stderr is not a terminal
