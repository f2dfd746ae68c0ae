"""Pairs that several models have in common."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from smoothhess import SmoothHess, baselines
from smoothhess.evaluate import ModelAgreement, across_models

NAMES = ["a", "b", "c", "d"]
X = torch.linspace(-1, 1, 8).reshape(2, 4).double()
OPTIONS = {"sigma": 0.5, "n_calls": 200, "names": NAMES}


def quadratics(weights):
    """Models f = w₀ x₀x₁ + w₁ x₂x₃ whose Hessians are known."""
    return [lambda x, w=w: w[0] * x[:, 0] * x[:, 1] + w[1] * x[:, 2] * x[:, 3] for w in weights]


def test_mean_spread_and_share_of_known_hessians():
    models = quadratics([(2.0, 1.0), (3.0, -1.0), (4.0, 1.0)])
    results = tuple(replace(baselines.hessian(f, X), names=(tuple(NAMES),) * 2) for f in models)
    found = ModelAgreement(results, k=2, q=0.05)
    torch.testing.assert_close(found.mean.value[:, 0, 1], torch.full((2,), 3.0).double())
    torch.testing.assert_close(found.mean.stderr[:, 0, 1], torch.full((2,), 1 / math.sqrt(3)).double())
    torch.testing.assert_close(found.spread[:, 0, 1], torch.ones(2).double())
    assert found.share[:, 0, 1].tolist() == [1.0, 1.0]
    torch.testing.assert_close(found.share[:, 2, 3], torch.full((2,), 2 / 3).double())  # one of them has another sign
    torch.testing.assert_close(found.share, found.share.mT)
    assert [[p.names for p in pairs] for pairs in found.pairs()] == [[("a", "b"), ("c", "d")]] * 2
    assert len(found.pairs(6)[0]) == 6
    first = found.pairs()[0][0]
    assert first.effect == pytest.approx(3.0)
    assert first.low < first.mean < first.high


def test_a_pair_beyond_the_k_strongest_does_not_count():
    found = across_models(quadratics([(2.0, 1.0), (2.0, 1.0)]), X, k=1, **OPTIONS)
    assert found.share[:, 0, 1].tolist() == [1.0, 1.0]
    assert found.share[:, 2, 3].tolist() == [0.0, 0.0]


def test_the_spread_does_not_contain_the_noise_of_each_model():
    """Equal models differ by Monte-Carlo noise only."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)).double()
    found = across_models([net] * 12, X, sigma=0.5, n_calls=64, control=None, tails=None)
    noise = torch.stack([r.stderr() for r in found.results]).square().mean(0)
    variance = found.values.var(0)
    assert float((variance / noise).mean()) == pytest.approx(1.0, abs=0.4)
    assert float(found.spread.square().mean()) < 0.5 * float(noise.mean())
    seeds = {r.seed for r in found.results}
    assert len(seeds) == 12


def test_the_spread_is_unknown_where_the_noise_is():
    """A single block of few dimensions has no standard errors."""
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double() for _ in range(3)]
    found = across_models(nets, X, sigma=0.5, n_calls=8, control=None)
    assert bool(found.results[0].stderr().isinf().all())
    assert bool(found.spread.isnan().all())


def test_the_predicted_class_is_that_of_most_models():
    def classifier(winner):
        return lambda x: torch.stack([x.prod(1) + 9 * (c == winner) for c in range(3)], 1)

    found = across_models([classifier(c) for c in (2, 1, 2)], X, "predicted", **OPTIONS)
    assert all(r.target[:, 0].tolist() == [2, 2] and r.predicted for r in found.results)


def test_a_table_a_frame_and_a_figure():
    found = across_models(quadratics([(2.0, 1.0), (3.0, 1.0)]), X, k=2, **OPTIONS)
    text = repr(found)
    assert text.startswith("Pairs of 2 models, 2 example(s) × 4 features")
    assert text.count("a × b") == 2
    assert "2 of 2" in text
    pytest.importorskip("pandas")
    frame = found.to_frame()
    assert frame["first"].tolist() == ["a", "c"] * 2
    assert frame["share"].tolist() == [1.0] * 4
    pytest.importorskip("matplotlib")
    ax = found.plot(example=1, k=3)
    assert [label.get_text() for label in ax.get_yticklabels()][:2] == ["a × b", "c × d"]
    assert [text.get_text().strip() for text in ax.texts if "/" in text.get_text()] == ["2/2", "2/2", "0/2"]


def test_what_is_refused():
    with pytest.raises(ValueError, match="at least two models, got 1"):
        across_models(quadratics([(1.0, 1.0)]), X, **OPTIONS)
    with pytest.raises(ValueError, match="k must be at least 1"):
        across_models(quadratics([(1.0, 1.0)] * 2), X, k=0, **OPTIONS)


def test_results_are_those_of_smoothhess():
    models = quadratics([(2.0, 1.0), (3.0, 1.0)])
    found = across_models(models, X.numpy(), **OPTIONS)
    torch.testing.assert_close(
        found.results[1].hessian, SmoothHess(models[1]).attribute(X, seed=found.results[1].seed, **OPTIONS).hessian
    )
