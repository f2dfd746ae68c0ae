"""A closed form of the neurons that matter, where the input gradients of all neurons are not kept."""

import math

import pytest
import torch
from torch import nn

from smoothhess import Isotropic, SmoothHess
from smoothhess.curvature import neuron_selection, one_flip
from smoothhess.curvature.flip_field import flips
from smoothhess.curvature.frozen_network import sum_of_squares
from smoothhess.curvature.neuron_selection import select_neurons, selection_price
from smoothhess.curvature.one_flip import Kinks
from smoothhess.linalg.memory import ByteLimit
from smoothhess.model.gradients import Oracle

D = 12


def relu_net():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(D, 40), nn.ReLU(), nn.Linear(40, 40), nn.LeakyReLU(0.2), nn.Linear(40, 2)).double()


class Pooled(nn.Module):
    """Two convolutions, each with max-pooling, and a smooth activation."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.body = nn.Sequential(
            *(nn.Conv1d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2)),
            *(nn.Conv1d(6, 6, 3, padding=1), nn.GELU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(18, 2)),
        )
        self.double()

    def forward(self, x):
        return self.body(x[:, None])


NETWORKS = {"relu": relu_net, "pooled": Pooled}
X = 0.5 * torch.randn(3, D, generator=torch.Generator().manual_seed(1)).double()


def seen(net, x):
    oracle = Oracle(net, x, 0)
    value, gradient = oracle(x, torch.arange(len(x)))
    return Kinks.see(oracle, x, value, gradient)


def keep_fewer(monkeypatch, neurons, left_out=1.0):
    """Set the memory to that for the gradients of `neurons`, of which those left out may contribute `left_out`."""
    monkeypatch.setattr(one_flip, "NEURON_GRADIENTS", ByteLimit(neurons * D * 8))
    monkeypatch.setattr(neuron_selection, "LEFT_OUT", left_out)


@pytest.mark.parametrize("sigma", [0.02, 0.1])
@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_the_sum_over_selected_neurons_is_that_of_the_others_less(name, sigma, monkeypatch):
    net, gaussian = NETWORKS[name](), Isotropic(sigma)
    everything = seen(net, X)
    full = everything.expectation(gaussian)
    keep_fewer(monkeypatch, everything.network.neurons // 4)
    selected = select_neurons(everything, gaussian)
    assert int(selected.selection.sum(1).max()) <= everything.network.neurons // 4
    found = selected.expectation(gaussian)
    assert found.passes.tolist() == [D / 2] * 3
    assert (everything.price(D), selection_price(everything, D)) == (1.5 * D, D / 2)
    columns = torch.cat([*everything.network.columns(gaussian, torch.arange(3))], 1)
    lengths = sum_of_squares(columns)
    bend, lean, _ = everything.weights(lengths.sqrt())
    out = torch.cat([u.flatten(1) == 0 for u in selected.network.sensitivity], 1)
    bend, lean = bend * out, lean * out
    missing = torch.einsum("bn,bin,bjn->bij", bend, columns, columns)
    torch.testing.assert_close(found.hessian.dense() + missing, full.hessian.dense(), rtol=1e-9, atol=1e-12)
    missing = torch.einsum("bn,bin->bi", lean, columns)
    torch.testing.assert_close(found.gradient + missing, full.gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_an_example_is_selected_alike_in_every_batch(name, monkeypatch):
    net, gaussian = NETWORKS[name](), Isotropic(0.1)
    keep_fewer(monkeypatch, 30)
    together = select_neurons(seen(net, X), gaussian)
    some = together.expectation(gaussian, index=torch.tensor([2, 0])).hessian.dense()
    for i, hessian in zip((2, 0), some, strict=True):
        one = select_neurons(seen(net, X[i : i + 1]), gaussian)
        for u, own in zip(together.network.sensitivity, one.network.sensitivity, strict=True):
            torch.testing.assert_close(u[i], own[0])
        torch.testing.assert_close(hessian, one.expectation(gaussian).hessian.dense()[0], rtol=1e-9, atol=1e-12)


def test_the_gaps_of_a_window_are_selected_together(monkeypatch):
    net = Pooled()
    keep_fewer(monkeypatch, 20)
    network = select_neurons(seen(net, X), Isotropic(0.02)).network
    pools = [u for call, u in zip(network.calls, network.sensitivity, strict=True) if call.kind == "max_pool"]
    assert len(pools) == 2
    for u in pools:
        assert torch.equal(u[..., :1].expand(u.shape), u)
    assert any(bool((u == 0).any()) and bool((u != 0).any()) for u in pools)


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_the_field_has_its_expectation(name, monkeypatch):
    """Stein's identity for the field of a few neurons."""
    net, gaussian = NETWORKS[name](), Isotropic(0.3)
    keep_fewer(monkeypatch, 20)
    kinks = select_neurons(seen(net, X), gaussian)
    expected = kinks.expectation(gaussian)
    z = torch.randn(1, 20_000, D, generator=torch.Generator().manual_seed(3)).double().expand(3, -1, -1)
    odd, even, value = flips(kinks.network, X[:, None] + gaussian.colour(z), torch.arange(3), mirrored=True)
    product = z[..., :, None] * gaussian.pull(odd)[..., None, :]
    for sample, truth in (
        ((product + product.mT) / 2, expected.hessian.dense()),
        (gaussian.pull(even), expected.gradient),
        (value, expected.value),
    ):
        error, se = (sample.mean(1) - truth).abs(), sample.std(1) / math.sqrt(z.shape[1])
        assert (error <= 5 * se + 1e-12).all()


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_unbiased_with_a_few_neurons(name, monkeypatch):
    """Mean over seeds against a long run without control variate."""
    net, x, runs = NETWORKS[name](), X[:1], 200
    long = SmoothHess(net).attribute(x, 1, sigma=0.3, n_calls=100_000, seed=77, control=None, shrink=False)
    keep_fewer(monkeypatch, 20)
    options = {"sigma": 0.3, "n_calls": 48, "seed": range(runs), "control": "kink", "shrink": False}
    many = SmoothHess(net).attribute(x.expand(runs, -1).contiguous(), 1, **options)
    monkeypatch.undo()
    full = SmoothHess(net).attribute(x.expand(runs, -1).contiguous(), 1, **options)
    saved = full.n_passes - many.n_passes  # a part of the run's frozen passes is that of examples with a weight
    assert (saved == -D / 2).all()  # the same closed form and 12 / 2 passes for the selection
    assert float((many.hessian - full.hessian).abs().max()) > 1e-3
    for estimate, truth, own in (
        (many.hessian, long.hessian[0], long.stderr()[0]),
        (many.gradient, long.gradient[0], long.gradient_stderr[0]),
    ):
        error = (estimate.mean(0) - truth).abs()
        assert (error <= 5 * (estimate.var(0) / runs + own**2).sqrt() + 1e-12).all()
    z = (many.hessian.mean(0) - long.hessian[0]) / (many.hessian.var(0) / runs + long.stderr()[0] ** 2).sqrt()
    assert float(z.square().mean()) < 2


def passes(net, calls=200, control="auto", **options):
    return SmoothHess(net).attribute(X, 0, sigma=0.05, n_calls=calls, control=control, **options)


def test_a_selection_saves_two_thirds_of_the_passes(monkeypatch):
    net = relu_net()
    stored = passes(net)
    monkeypatch.setattr(one_flip, "NEURON_GRADIENTS", ByteLimit(0))
    streamed = passes(net)
    keep_fewer(monkeypatch, 60, left_out=1e-3)
    selected = passes(net)
    torch.testing.assert_close(streamed.hessian, stored.hessian, rtol=1e-9, atol=1e-12)
    assert (selected.n_passes == stored.n_passes + D / 2).all()  # for the estimate of τ
    assert (streamed.n_passes == stored.n_passes + D + D / 2).all()  # two passes per column, and the estimate in vain
    assert (selected.control_weights > 0).all()


def test_neurons_that_matter_less_than_rounding_are_left_out(monkeypatch):
    net, gaussian = relu_net().float(), Isotropic(0.02)
    kinks = seen(net, X.float())
    keep_fewer(monkeypatch, 39)  # gradients in float64, thus 78 in float32
    selected = select_neurons(kinks, gaussian)
    assert int(selected.selection.sum(1).max()) < 70
    full, found = (k.expectation(gaussian).hessian.dense() for k in (kinks, selected))
    assert float((found - full).norm()) < 1e-4 * float(full.norm())  # left out with τ from 12 directions


def test_an_example_with_too_many_neurons_keeps_all(monkeypatch):
    net, gaussian = relu_net(), Isotropic(0.1)
    kinks = seen(net, X)
    keep_fewer(monkeypatch, 1, left_out=1e-3)
    assert select_neurons(kinks, gaussian) is kinks
    alone = [kinks.examples(torch.tensor([i])) for i in range(3)]
    numbers = set()
    for n in range(79, 0, -7):  # more and more are left out: the examples exceed the limit one by one
        keep_fewer(monkeypatch, n, left_out=0.01)
        found, own = select_neurons(kinks, gaussian), [select_neurons(one, gaussian) for one in alone]
        whole = [one.selection is None for one in own]
        numbers.add(sum(whole))
        assert found.prices(D).tolist() == [1.5 * D if w else D / 2 for w in whole]
        together, separate = found.expectation(gaussian), [one.expectation(gaussian) for one in own]
        assert together.passes.tolist() == found.prices(D).tolist()
        for of in (lambda e: e.hessian.dense(), lambda e: e.gradient, lambda e: e.value):
            torch.testing.assert_close(of(together), torch.cat([*map(of, separate)]), rtol=1e-9, atol=1e-12)
    assert len(numbers) > 2


def test_independent_kinks_keep_all_neurons(monkeypatch):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(D, 50), nn.ReLU(), nn.Linear(50, 2)).double()
    before = passes(net, shrink=False)
    assert before.statistics.rare.complete.all()
    keep_fewer(monkeypatch, 10)
    after = passes(net, shrink=False)
    torch.testing.assert_close(after.hessian, before.hessian, rtol=1e-9, atol=1e-12)
    assert after.statistics.rare.complete.all()
    assert (after.n_passes == before.n_passes + D).all()
    grown = SmoothHess(net).more(after, 20)
    torch.testing.assert_close(grown.hessian, before.hessian, rtol=1e-9, atol=1e-12)


def test_further_rows_are_those_of_the_same_selection(monkeypatch):
    net = relu_net()
    keep_fewer(monkeypatch, 30)
    whole, half = passes(net, 96, "kink"), passes(net, 48, "kink")
    grown = SmoothHess(net).more(half, 48)
    torch.testing.assert_close(grown.hessian, whole.hessian, rtol=1e-8, atol=1e-10)


def test_a_cheaper_closed_form_is_affordable_with_fewer_calls(monkeypatch):
    net = relu_net()
    monkeypatch.setattr(one_flip, "NEURON_GRADIENTS", ByteLimit(0))
    refused = passes(net, 40)
    assert refused.control is None
    assert "more than the budget allows" in refused.control_note
    keep_fewer(monkeypatch, 60)
    assert passes(net, 40).control == "kink"
