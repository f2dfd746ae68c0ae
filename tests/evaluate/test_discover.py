"""Pairs discovered by knockoffs: counts, calibration, and models whose interactions are known."""

import math

import pytest
import torch

from smoothhess.evaluate import GaussianKnockoffs, discover
from smoothhess.evaluate.discover import calibrated, knockoff_q_values, pair_kinds

P = 6


def symmetric(values):
    upper = values.triu(1)
    return upper + upper.mT


def counted(scores, q):
    """The threshold by trying all of them: pairs of features with a score of at least the smallest that passes."""
    p = len(scores) // 2
    features, mixed, copies = pair_kinds(p)

    def above(kind, t):
        return sum(float(scores[a, b]) >= t for a, b in zip(*kind.tolist(), strict=True))

    passing = []
    for a, b in zip(*features.tolist(), strict=True):
        t = float(scores[a, b])
        ok, kk = above(mixed, t), above(copies, t)
        if (1 + max(ok - kk, kk)) / above(features, t) <= q:
            passing.append(t)
    least = min(passing, default=math.inf)
    return {(a, b) for a, b in zip(*features.tolist(), strict=True) if float(scores[a, b]) >= least}


def test_kinds_of_pairs_are_counted():
    features, mixed, copies = pair_kinds(P)
    assert [kind.shape[1] for kind in (features, mixed, copies)] == [15, 30, 15]
    assert not (mixed[1] - mixed[0] == P).any()


@pytest.mark.parametrize("seed", range(5))
def test_q_values_are_those_of_all_thresholds(seed):
    generator = torch.Generator().manual_seed(seed)
    scores = symmetric(torch.rand(2 * P, 2 * P, generator=generator).double())
    scores[:P, :P] += symmetric((torch.rand(P, P, generator=generator) < 0.5).double())
    q_values = knockoff_q_values(scores)
    for q in (0.1, 0.2, 0.5):
        i, j = torch.triu_indices(P, P, 1)
        found = {(int(a), int(b)) for a, b in zip(i, j, strict=True) if q_values[a, b] <= q}
        assert found == counted(scores, q)
    torch.testing.assert_close(q_values, q_values.mT)


@pytest.mark.rounding
@pytest.mark.parametrize("interacting", [0, 10])
def test_exchangeable_scores_keep_the_false_discovery_rate(interacting):
    """Scores of pairs that do not interact are independent and equally distributed: the mean share is at most q."""
    generator, shares = torch.Generator().manual_seed(interacting), []
    p, q = 10, 0.2
    i, j = torch.triu_indices(p, p, 1)
    true = torch.zeros(len(i), dtype=torch.bool)
    true[:interacting] = True
    for _ in range(300):
        scores = symmetric(torch.rand(2 * p, 2 * p, generator=generator).double())
        scores[i[true], j[true]] += torch.rand(interacting, generator=generator).double()
        called = knockoff_q_values(scores)[i, j] <= q
        shares.append(float((called & ~true).sum()) / max(int(called.sum()), 1))
    shares = torch.tensor(shares)
    assert float(shares.mean()) <= q + 3 * float(shares.std()) / math.sqrt(len(shares))


def test_calibration_removes_the_effects_of_single_features():
    """Γ_ij = exp(0.3 + 0.7 (log e_i + log e_j)) has scores of 1; pairs that interact keep their factor."""
    generator = torch.Generator().manual_seed(0)
    effects = torch.rand(2 * P, 1, generator=generator).double().mul(3).exp()
    importance = (0.3 + 0.7 * (effects.log() + effects.log().mT)).exp()
    importance[0, 1] = importance[1, 0] = 10 * importance[0, 1]
    scores, _ = calibrated(importance, effects)
    expected = torch.ones(2 * P, 2 * P).double()
    expected[0, 1] = expected[1, 0] = 10.0
    pairs = torch.cat(pair_kinds(P), 1)
    torch.testing.assert_close(scores[pairs[0], pairs[1]], expected[pairs[0], pairs[1]], rtol=1e-6, atol=1e-6)


def products(inputs, response):
    """f = x₀x₁ + x₂x₃ + x₄x₅ + x₀x₂ + x₁x₃ + x₀x₃ and a weak kink in all columns; nothing is trained."""
    direction = torch.linspace(0.05, 0.1, inputs.shape[1])
    pairs = ((0, 1), (2, 3), (4, 5), (0, 2), (1, 3), (0, 3))
    return lambda x: sum(x[:, i] * x[:, j] for i, j in pairs) + (x @ direction).abs()


X = torch.randn(150, P, generator=torch.Generator().manual_seed(1)).double()


def test_known_interactions_are_discovered():
    found = discover(products, X, X[:, 0], sigma=0.5, n_records=40, names=list("abcdef"))
    assert {(p.i, p.j) for p in found.pairs() if p.discovered} == {(0, 1), (2, 3), (4, 5), (0, 2), (1, 3), (0, 3)}
    assert len(found) == 6
    assert found.pairs(1)[0].importance == pytest.approx(1.0, abs=0.05)
    assert found.pairs(1)[0].q_value == pytest.approx(1 / 6)
    assert "6 discovered" in repr(found)
    assert found.names == tuple("abcdef")


def test_the_factory_gets_standardised_features_and_knockoffs():
    given = {}

    def factory(inputs, response):
        given.update(inputs=inputs, response=response)
        return products(inputs, response)

    pd = pytest.importorskip("pandas")
    table = pd.DataFrame((X * 7 + 3).numpy(), columns=list("abcdef"))
    copies = GaussianKnockoffs.fit(table).sample(table, seed=5)
    found = discover(factory, table, table["a"], sigma=0.5, n_records=40, knockoffs=copies)
    inputs = given["inputs"]
    assert inputs.shape == (150, 12)
    torch.testing.assert_close(inputs[:, :P].mean(0), torch.zeros(P), atol=1e-6, rtol=0)
    torch.testing.assert_close(inputs[:, :P].std(0), torch.ones(P))
    torch.testing.assert_close(inputs[:, P:], ((copies - (X * 7 + 3).mean(0)) / (X * 7).std(0)).float())
    assert len(given["response"]) == 150
    assert found.names == tuple("abcdef")
    assert list(found.to_frame(3).columns)[:4] == ["i", "j", "first", "second"]


def test_another_importance_is_used_as_it_is():
    table = symmetric(torch.rand(2 * P, 2 * P, generator=torch.Generator().manual_seed(0)).double()) + 0.1

    def importance(model, records):
        assert records.shape == (30, 2 * P)
        return table, torch.ones(2 * P, 1).double()

    found = discover(products, X, X[:, 0], importance=importance, n_records=30)
    torch.testing.assert_close(found.importance, table)
    i, j = torch.triu_indices(P, P, 1)
    assert torch.equal(found.scores[i, j].argsort(), table[i, j].argsort())  # equal effects: the order stays


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_a_model_without_interactions_has_no_discoveries(scale):
    found = discover(lambda inputs, y: lambda v: scale * v.sum(1), X, X[:, 0], sigma=0.5, n_records=10, n_calls=24)
    assert len(found) == 0
    assert bool((found.q_values == 1).all())
    assert bool(found.scores.isfinite().all())


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q": 0.0}, ValueError, "q must be between 0 and 1"),
        ({"sigma": None}, ValueError, "exactly one of sigma and importance"),
        ({"response": X[:10, 0]}, ValueError, "one response per row, 150"),
        ({"names": ["a"]}, ValueError, "one name per column, 6"),
        ({"knockoffs": X[:, :2]}, ValueError, "shape of the data"),
        ({"data": X[:, :1]}, ValueError, "at least two columns"),
        ({"data": X[:, :3]}, ValueError, "3 columns have 3"),
        ({"response": X[:, 0] / 0}, ValueError, "response must hold finite numbers"),
    ],
)
def test_errors_say_what_was_expected(change, error, words):
    given = {"data": X, "response": X[:, 0], "sigma": 0.5, **change}
    with pytest.raises(error, match=words):
        discover(products, given.pop("data"), given.pop("response"), **given)
