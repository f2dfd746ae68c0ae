"""Explaining in one thread while others draw, explain or train."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from smoothhess import Embedded, NeuronSmoothHess, SmoothHess, baselines
from smoothhess.curvature.activation_hooks import record
from smoothhess.model.process_flags import math_attention, tf32
from smoothhess.model.state import borrowed

X = torch.linspace(-1, 1, 12).reshape(2, 6).double()
OPTIONS = {"sigma": 0.3, "n_calls": 400, "internal_batch_size": 20}


def network(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2)).double()


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = network()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return self.inner(x)


def repeat(count, work):
    for _ in range(count):
        work()


def concurrent(*works, repeats=3):
    """The results of functions that are called at the same time, several times."""
    found = []
    with ThreadPoolExecutor(len(works)) as pool:
        for _ in range(repeats):
            start = threading.Barrier(len(works))
            jobs = [pool.submit(lambda work=work, start=start: (start.wait(), work())[1]) for work in works]
            found.append([job.result() for job in jobs])
    return found


def test_another_thread_draws_the_numbers_that_it_would_draw_alone():
    explainer = SmoothHess(network())
    torch.manual_seed(5)
    alone = torch.cat([torch.rand(1) for _ in range(400)])
    torch.manual_seed(5)
    done = threading.Event()

    def explain():
        while not done.is_set():
            explainer.attribute(X, 0, sigma=0.3, n_calls=20)

    thread = threading.Thread(target=explain)
    thread.start()
    drawn = []
    for _ in range(400):
        drawn.append(torch.rand(1))
        done.wait(0.001)
    done.set()
    thread.join()
    assert torch.equal(torch.cat(drawn), alone)
    assert len(torch.cat(drawn).unique()) == len(alone.unique())


def test_threads_that_explain_get_the_numbers_of_one_thread():
    net, other = network(), network(1)
    shared = SmoothHess(net)
    works = [
        lambda: shared.attribute(X, 0, **OPTIONS),
        lambda: shared.attribute(X, 1, **OPTIONS),
        lambda: SmoothHess(net).attribute(X, 0, **OPTIONS, control="kink"),
        lambda: SmoothHess(other).attribute(X, 0, **OPTIONS),
        lambda: baselines.softplus(net, X, 0, beta=4.0),
    ]
    expected = [work() for work in works]
    for found in concurrent(*works):
        for result, truth in zip(found, expected, strict=True):
            torch.testing.assert_close(result.hessian, truth.hessian)


def test_neurons_of_one_layer_in_two_threads():
    net = network()
    works = [
        lambda: NeuronSmoothHess(net, net[2]).attribute(X, 0, **OPTIONS),
        lambda: NeuronSmoothHess(net, net[2]).attribute(X, 1, **OPTIONS, attribute_to_neuron_input=True),
        lambda: SmoothHess(net).attribute(X, 0, **OPTIONS),
    ]
    expected = [work() for work in works]
    for found in concurrent(*works):
        for result, truth in zip(found, expected, strict=True):
            torch.testing.assert_close(result.hessian, truth.hessian)


class Slow(nn.Module):
    """A layer that waits until another thread is in it as well."""

    def __init__(self, meeting):
        super().__init__()
        self.meeting = meeting

    def forward(self, x):
        self.meeting.wait(10)
        return 1.0 * x


def test_embeddings_do_not_reach_the_call_of_another_thread():
    layer = Slow(threading.Barrier(2))
    inside = Embedded(nn.Sequential(layer, nn.ReLU()), layer)
    for a, b in concurrent(lambda: inside(torch.ones(2), torch.zeros(2)), lambda: inside(-X[0, :2], torch.zeros(2))):
        assert torch.equal(a, torch.ones(2))
        assert torch.equal(b, (-X[0, :2]).relu())


class Waiting(nn.Module):
    """A layer that waits for an event."""

    def __init__(self, event):
        super().__init__()
        self.event = event
        self.register_forward_hook(lambda *_: None)

    def forward(self, x):
        self.event.wait(10)
        return x


def test_names_of_recorded_calls_are_those_of_this_thread():
    event = threading.Event()
    thread = threading.Thread(target=Waiting(event), args=(X,))

    class Meanwhile(nn.Module):
        def forward(self, x):
            event.set()
            thread.join()
            return x

    thread.start()
    calls = record(nn.Sequential(nn.Identity(), Meanwhile(), nn.ReLU()), X).calls
    assert [call.name for call in calls] == ["2"]


def test_buffers_are_restored_by_the_last_of_several_threads():
    net = Counting()
    first, second = borrowed(net, torch.device("cpu")), borrowed(net, torch.device("cpu"))
    with first:
        net(X)
        second.__enter__()
        net(X)
    net(X)
    second.__exit__(None, None, None)
    assert int(net.calls) == 0
    concurrent(*[lambda: SmoothHess(net).attribute(X, 0, **OPTIONS)] * 3)
    assert int(net.calls) == 0


def step(net):
    """One step of an optimiser."""
    optimiser = torch.optim.SGD(net.parameters(), lr=1e-3)
    with torch.enable_grad():
        net(X).square().sum().backward()
    optimiser.step()


def fail_after_a_step(net):
    with borrowed(net, X.device):
        step(net)
        raise RuntimeError("a consequence")


def test_training_the_model_meanwhile_is_refused():
    net = Counting()
    started, seen = threading.Event(), []

    def f(x):
        if seen and not started.is_set():
            with ThreadPoolExecutor(1) as pool:
                pool.submit(step, net).result()
            started.set()
        seen.append(len(x))
        return net(x)

    with pytest.raises(ValueError, match=r"'inner.0.weight' first, were modified.*Explain a copy"):
        SmoothHess(f).attribute(X, 0, **OPTIONS)
    assert int(net.calls) > 1  # the count may be that of the training
    with pytest.raises(ValueError, match="were modified") as raised:
        fail_after_a_step(net)
    assert str(raised.value.__cause__) == "a consequence"


def test_training_a_copy_meanwhile_is_fine():
    net = network()
    trained, explainer = copy.deepcopy(net), SmoothHess(net)
    expected = explainer.attribute(X, 0, **OPTIONS).hessian
    for result, _ in concurrent(
        lambda: explainer.attribute(X, 0, **OPTIONS), lambda: repeat(20, lambda: step(trained))
    ):
        torch.testing.assert_close(result.hessian, expected)


def test_embeddings_that_renormalise_their_weights_are_explained():
    words = nn.Embedding(5, 3, max_norm=1.0)
    inside = Embedded(nn.Sequential(words, nn.Flatten(), nn.Linear(6, 1)), words)
    ids = torch.tensor([[1, 4]])
    vectors = inside.embed(ids)
    SmoothHess(inside).attribute(vectors, 0, ids, sigma=0.1, n_calls=12)


def flags():
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def test_process_wide_flags_are_shared_or_refused():
    before, elsewhere = flags(), tf32(False)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(elsewhere.__enter__).result()
        with tf32(False):
            assert flags() == (False, False)
            with pytest.raises(RuntimeError, match="another thread is computing with another setting"), tf32(True):
                pass
            pool.submit(elsewhere.__exit__, None, None, None).result()
            assert flags() == (False, False)
            with tf32(True):
                assert flags() == (True, True)
            assert flags() == (False, False)
    assert flags() == before
    kernels = torch.backends.cuda.flash_sdp_enabled()
    with math_attention():
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled() == kernels
