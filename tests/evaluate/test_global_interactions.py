"""Global interactions: closed forms over data sets, noise that biases nothing, honest errors, parts that merge."""

import math
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from smoothhess import Interactions, Isotropic, SmoothHess, evaluate
from smoothhess.baselines.gradient_nid import gradient_nid
from smoothhess.evaluate.global_interactions import global_interactions
from smoothhess.evaluate.global_summary import GlobalInteractions
from smoothhess.result.exact import Exact
from tests.truths import OneHidden, additive

PAGE = Path(__file__).parents[2] / "docs" / "global.md"
ROUGH = {"design": "antithetic", "control": None}  # noise that no closed form takes away
RNG = torch.Generator().manual_seed(0)
X = torch.randn(40, 3, generator=RNG, dtype=torch.float64)


def product(x):
    """H₀₁ = x₂ and so on; smoothing changes nothing, as no feature occurs twice."""
    return x.prod(1)


def product_hessian(x):
    h = x.new_zeros(len(x), 3, 3)
    for i, j, k in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):
        h[:, i, j] = h[:, j, i] = x[:, k]
    return h


def exactly(x, target, seeds):
    """The Hessian of `product` without noise."""
    return Exact.make(x, product(x), x.prod(1, keepdim=True) / x, product_hessian(x), method="by hand")


# --- closed forms -----------------------------------------------------------------------------------------------------


def test_exact_results_give_plain_means():
    found = global_interactions(exactly, X)
    h = product_hessian(X)
    root = math.sqrt(len(X))
    for estimate, values in (
        (found.mean, h),
        (found.mean_square, h.square()),
        (found.mean_abs, h.abs()),
        (found.mean_abs_upper, h.abs()),
    ):
        torch.testing.assert_close(estimate.value, values.mean(0))
        torch.testing.assert_close(estimate.stderr, values.std(0) / root)
        assert float(estimate.df) == len(X) - 1
    assert found.noise.abs().max() == 0
    assert found.noise_share.abs().max() == 0
    assert len(found) == len(X)
    assert found.n_calls == 0
    assert found.method == "by hand"


def test_quadratics_with_their_own_matrix():
    """f_b = ½ xᵀA_b x with a matrix for each record: full blocks see it without noise."""
    a = torch.randn(30, 3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    a = (a + a.mT) / 2
    found = global_interactions(
        SmoothHess(lambda x, m: torch.einsum("bi,bij,bj->b", x, m, x) / 2),
        DataLoader(TensorDataset(X[:30], a), batch_size=7),
        additional_forward_args=lambda x, m: (m,),
        sigma=0.7,
        n_calls=48,
    )
    torch.testing.assert_close(found.mean.value, a.mean(0))
    torch.testing.assert_close(found.mean_square.value, a.square().mean(0))
    torch.testing.assert_close(found.mean_square.stderr, a.square().std(0) / math.sqrt(30))
    torch.testing.assert_close(found.mean_abs.value, a.abs().mean(0))
    assert found.noise.max() < 1e-20


# --- noise ------------------------------------------------------------------------------------------------------------


def runs(model, x, n, **options):
    """Estimates of n seeds."""
    return [global_interactions(SmoothHess(model), x, seed=s, **options) for s in range(n)]


def z_scores(values, truth):
    """Of the mean of (n, F, F) independent estimates, at the pairs."""
    i, j = torch.triu_indices(*truth.shape, 1)
    z = (values.mean(0) - truth) / (values.std(0) / math.sqrt(len(values)))
    return z[i, j]


@pytest.fixture(scope="module")
def noisy():
    """A network whose noise in 16 calls is larger than its interactions, explained with 100 seeds."""
    net = OneHidden(4)
    x = torch.randn(10, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    truth = net.truth(x, Isotropic(0.5)).hessian
    return truth, runs(net, x, 100, sigma=0.5, n_calls=16, **ROUGH)


def test_noise_biases_neither_the_mean_nor_the_square(noisy):
    truth, found = noisy
    share = torch.stack([f.noise_share for f in found]).mean(0)
    assert share.median() > 0.3  # there is something to be biased by
    assert z_scores(torch.stack([f.mean.value for f in found]), truth.mean(0)).abs().max() < 4
    assert z_scores(torch.stack([f.mean_square.value for f in found]), truth.square().mean(0)).abs().max() < 4
    naive = torch.stack([f.mean_square.value + f.noise for f in found])
    assert z_scores(naive, truth.square().mean(0)).min() > 5


def test_noise_is_the_variance_of_an_estimate(noisy):
    _, found = noisy
    # of the mean over these ten records: its spread over seeds is Monte-Carlo alone
    spread = torch.stack([f.mean.value for f in found]).var(0)
    claimed = torch.stack([f.monte_carlo_stderr.square() for f in found]).mean(0)
    torch.testing.assert_close(claimed, spread, rtol=5 * math.sqrt(2 / len(found)), atol=0)


def test_mean_abs_lies_between(noisy):
    truth, found = noisy
    expected = truth.abs().mean(0)
    low = z_scores(torch.stack([f.mean_abs.value for f in found]), expected)
    high = z_scores(torch.stack([f.mean_abs_upper.value for f in found]), expected)
    assert low.max() < 3
    assert low.min() < -5
    assert high.min() > -3
    assert high.max() > 5
    quiet = global_interactions(SmoothHess(OneHidden(4)), torch.zeros(5, 4).double(), sigma=0.5, n_calls=2000)
    torch.testing.assert_close(quiet.mean_abs.value, quiet.mean_abs_upper.value, rtol=1e-2, atol=1e-3)


def test_nulls_of_an_additive_network_stay_null():
    """Cross pairs of f₁(x_A) + f₂(x_B): mean |H| and E[H²] are zero in the mean, and rarely called significant."""
    net = additive(3, 3)
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    seeds = 30
    found = runs(net, x, seeds, sigma=0.5, n_calls=16, **ROUGH)
    cross = [(i, j) for i in range(3) for j in range(3, 6)]
    for name in ("mean", "mean_square", "mean_abs"):
        values = torch.stack([getattr(f, name).value for f in found])
        z = torch.stack([values[:, i, j].mean() / (values[:, i, j].std() / math.sqrt(seeds)) for i, j in cross])
        assert z.abs().max() < 4, name
    upper = torch.stack([f.mean_abs_upper.value for f in found]).mean(0)
    assert min(float(upper[p]) for p in cross) > 0.05  # noise alone
    for by in ("square", "abs", "mean"):
        called = [p for f in found for p in f.top_pairs(15, by=by) if p.significant]
        false = [p for p in called if (p.i, p.j) in cross]
        assert len(false) <= 0.05 * len(called) + 3 * math.sqrt(0.05 * len(called)), by
        assert len(called) > seeds, by


@pytest.mark.parametrize("own", [True, False], ids=["own draws", "shared draws"])
def test_standard_errors_are_honest_because_draws_are_own(own):
    """Records x ~ N(0, s²) drawn anew each time: E[H] is the Hessian at 0 smoothed by σ² + s².

    z-scores have unit variance, unless records share draws.
    """
    net, sigma, s = OneHidden(4), 0.5, 0.3
    mean = net.truth(torch.zeros(1, 4).double(), Isotropic(math.hypot(sigma, s))).hessian[0]
    many = s * torch.randn(40_000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    square = net.truth(many, Isotropic(sigma)).hessian.square().mean(0)
    z, squares = [], []
    n = 150 if own else 40
    for run in range(n):
        x = s * torch.randn(40, 4, generator=torch.Generator().manual_seed(run + 1), dtype=torch.float64)

        def explain(x, target, seeds, run=run):
            given = seeds if own else [2 * run + seeds[0] % 2] * len(x)
            return SmoothHess(net).attribute(x, sigma=sigma, n_calls=8, seed=given, **ROUGH)

        found = global_interactions(explain, x, seed=run)
        z.append((found.mean.value - mean) / found.mean.stderr)
        squares.append((found.mean_square.value - square) / found.mean_square.stderr)
    i, j = torch.triu_indices(4, 4, 1)
    z, squares = (torch.stack(s)[:, i, j] for s in (z, squares))
    if not own:
        assert z.std(0).min() > 2.5  # means look several times too certain
        return
    assert z.mean(0).abs().max() < 4 / math.sqrt(n)
    assert (z.std(0) - 1).abs().max() < 0.2  # known to 6 %, and t-like tails
    assert abs(float(z.std(0).mean()) - 1) < 0.1
    assert abs(float(squares.std(0).mean()) - 1) < 0.2  # products have heavier tails


def test_the_two_estimates_of_a_record_are_independent():
    seen = []

    def explain(x, target, seeds):
        seen.append(seeds)
        return SmoothHess(product).attribute(x, sigma=0.5, n_calls=8, seed=seeds)

    global_interactions(explain, X, seed=5)
    drawn = [s for seeds in seen for s in seeds]
    assert len(seen) == 2
    assert len(set(drawn)) == 2 * len(X)
    global_interactions(explain, X, seed=6)
    assert not set(drawn) & {s for seeds in seen[2:] for s in seeds}


@pytest.mark.parametrize("sampled", [True, False])
def test_rivals_that_sample_are_asked_twice(sampled):
    seen = []

    def explain(x, target, seeds):
        seen.append(seeds)
        options = {"of": "smooth", "sigma": 0.5, "n_calls": 8, "seed": seeds} if sampled else {}
        return gradient_nid(product, x, **options)

    found = global_interactions(explain, X)
    assert len(seen) == (2 if sampled else 1)
    assert (found.noise.max() > 0) == sampled
    assert "nid" in found.method.lower()


# --- one pass, many parts ---------------------------------------------------------------------------------------------


def same(a: GlobalInteractions, b: GlobalInteractions, rtol=1e-9):
    for name in a.moments:
        torch.testing.assert_close(a.moments[name].mean, b.moments[name].mean, rtol=rtol, atol=1e-12)
        torch.testing.assert_close(a.moments[name].squares, b.moments[name].squares, rtol=1e-6, atol=1e-10)
    assert len(a) == len(b)
    assert a.segments == b.segments
    assert a.n_calls == b.n_calls
    assert a.n_passes == pytest.approx(b.n_passes)


def test_parts_merge_to_one_pass_in_any_order():
    net, options = OneHidden(3), {"sigma": 0.5, "n_calls": 24, "seed": 3}
    whole = global_interactions(SmoothHess(net), X, **options)
    assert whole.segments == ((3, 0, 40),)
    parts = [
        global_interactions(SmoothHess(net), X[i:j], first_record=i, **options) for i, j in ((0, 7), (7, 8), (8, 40))
    ]
    same(parts[0].merge(parts[1]).merge(parts[2]), whole)
    same(parts[2].merge(parts[0]).merge(parts[1]), whole)
    with pytest.raises(ValueError, match="records 7 to 7 of seed 3 are in both.*first_record"):
        whole.merge(parts[1])
    other = global_interactions(SmoothHess(net), X, sigma=0.4, n_calls=24, seed=4)
    with pytest.raises(ValueError, match="same features, groups, Gaussian and explainer can be merged"):
        whole.merge(other)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_batches_change_nothing(size, monkeypatch):
    net, x, options = OneHidden(3), X[:10], {"sigma": 0.5, "n_calls": 24}
    whole = global_interactions(SmoothHess(net), x, **options)
    same(global_interactions(SmoothHess(net), x.split(size), **options), whole)
    same(global_interactions(SmoothHess(net), DataLoader(TensorDataset(x), size), **options), whole)
    same(global_interactions(SmoothHess(net), x, internal_batch_size=size, **options), whole)
    monkeypatch.setattr(import_module("smoothhess.evaluate.global_interactions"), "MOST_RECORDS", size)
    same(global_interactions(SmoothHess(net), x, **options), whole)


def test_groups_are_sums():
    mask = torch.tensor([0, 1, 0, 1, 2])
    net = OneHidden(5)
    x = torch.randn(20, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    p = nn.functional.one_hot(mask).double()
    options = {"sigma": 0.5, "n_calls": 40, "control": None}
    grouped = global_interactions(SmoothHess(net), x, feature_mask=mask, **options)
    whole = global_interactions(SmoothHess(net), x, **options)
    torch.testing.assert_close(grouped.mean.value, p.mT @ whole.mean.value @ p)
    assert grouped.feature_shape == (3,)
    assert grouped.scales.shape == (3,)

    def explain(x, target, seeds):
        return SmoothHess(net).attribute(x, sigma=0.5, n_calls=20, control=None, seed=seeds)

    same(global_interactions(explain, x, feature_mask=mask), grouped)
    h = net.truth(x, Isotropic(0.5)).hessian
    truth = lambda x, target, seeds: Exact.make(x, net(x), x, net.truth(x, Isotropic(0.5)).hessian)
    exact = global_interactions(truth, x, feature_mask=mask)
    torch.testing.assert_close(exact.mean_square.value, (p.mT @ h @ p).square().mean(0))


# --- what is explained ------------------------------------------------------------------------------------------------


class Two(nn.Module):
    """Two outputs: x₀x₁ and 3x₀x₁."""

    def forward(self, x, shift=0.0):
        both = x[:, 0] * x[:, 1]
        return torch.stack([both, 3 * both + shift], 1)


@pytest.mark.parametrize(
    ("batches", "target", "expected"),
    [
        (X, 1, 3.0),
        (X, [i % 2 for i in range(40)], 2.0),
        (X, torch.arange(40) % 2, 2.0),
        (X.split(9), lambda x: torch.ones(len(x), dtype=torch.long), 3.0),
        (DataLoader(TensorDataset(X, torch.arange(40) % 2), 11), lambda x, y: y, 2.0),
    ],
)
def test_targets(batches, target, expected):
    found = global_interactions(SmoothHess(Two()), batches, target=target, sigma=0.5, n_calls=24)
    assert float(found.mean.value[0, 1]) == pytest.approx(expected)


def test_predicted_outputs():
    x = torch.tensor([[1.0, 1.0], [1.0, -1.0], [2.0, 1.0]]).double()
    found = global_interactions(SmoothHess(Two()), x, target="predicted", sigma=0.1, n_calls=32)
    assert float(found.mean.value[0, 1]) == pytest.approx((3 + 1 + 3) / 3)
    with pytest.raises(ValueError, match="needs outputs \\(N, C\\)"):
        global_interactions(SmoothHess(product), X, target="predicted", sigma=0.1)
    with pytest.raises(ValueError, match="needs SmoothHess\\(model\\)"):
        global_interactions(exactly, X, target="predicted")


def test_the_model_is_borrowed_and_the_global_rng_does_not_move():
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    before, state = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    found = global_interactions(SmoothHess(net), X.float(), target="predicted", sigma=0.5)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert found.mean.value.dtype == torch.float64
    assert found.n_calls == 40 * 72
    assert found.n_passes >= found.n_calls


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"batches": []}, ValueError, "expected at least one batch, got none"),
        ({"batches": 3}, TypeError, "batches must be a tensor or an iterable of batches, got int"),
        ({"batches": TensorDataset(X)}, TypeError, "got TensorDataset. Pass a DataLoader of it"),
        ({"batches": [{"x": X}]}, TypeError, "a batch must be a tensor, or a tuple that begins with one, got dict"),
        ({"batches": [("a", X)]}, TypeError, "a tuple that begins with str"),
        ({"batches": [X, X[:, :2]]}, ValueError, r"inputs of one shape, \(3,\), got"),
        ({"batches": X.round().long()}, TypeError, "inputs must be float32 or float64"),
        ({"explainer": nn.Linear(3, 1)}, TypeError, "explainer must be SmoothHess\\(model\\) or a function"),
        ({"explainer": lambda x, t, s: 3}, ValueError, "sigma cannot be passed on to a function"),
        ({"explainer": lambda x, t, s: 3, "sigma": None}, ValueError, "must return Interactions of the 40 inputs"),
        ({"n_calls": 30}, ValueError, "multiple of 4, at least 4: two independent estimates share them in ± pairs"),
        ({"n_calls": 31, "design": "iid"}, ValueError, "multiple of 2, at least 4: two independent"),
        ({"shrink": True}, ValueError, "shrink cannot be chosen here"),
        ({"tol": 0.1}, ValueError, "tol cannot be chosen here"),
        ({"seed": -1}, ValueError, "seed must be an integer, 0 or more, got -1"),
        ({"first_record": 1.5}, ValueError, "first_record must be an integer"),
        ({"target": "best"}, ValueError, 'target must be "predicted", an index'),
        ({"target": [0, 1]}, ValueError, "expected one target per example, got 2 targets for 40"),
        ({"feature_mask": torch.zeros(40, 3).long()}, ValueError, "feature_mask must have the shape of one input"),
        ({"sigma": None}, ValueError, "exactly one"),
    ],
)
def test_what_is_refused(changes, error, text):
    arguments = {"explainer": SmoothHess(product), "batches": X, "sigma": 0.5, **changes}
    with pytest.raises(error, match=text):
        global_interactions(**arguments)


def test_too_many_features_want_groups():
    x = torch.zeros(1, 20_000)
    with pytest.raises(ValueError, match="20000 features are too many for matrices of all pairs.*feature_mask"):
        global_interactions(SmoothHess(lambda x: x.square().sum(1)), x, sigma=0.1)
    found = global_interactions(
        SmoothHess(lambda x: x.square().sum(1)), x, sigma=0.1, feature_mask=torch.arange(20_000) // 5_000, n_calls=8
    )
    assert found.mean.value.shape == (4, 4)


@pytest.mark.skipif(not PAGE.exists(), reason="an installed package has no docs")
@pytest.mark.skipif(not callable(getattr(evaluate, "global_interactions", None)), reason="not exported yet")
def test_the_page_runs(capsys, tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    names = {}
    with torch.random.fork_rng(devices=[]):
        for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
            exec(compile(code, str(PAGE), "exec"), names)
    assert "Global interactions of 4 features over 300 record(s)" in capsys.readouterr().out
    assert len(names["pairs"]) == 3
    assert len(names["frame"]) == 10
    assert len(names["whole"]) == 500
    assert names["soft"].noise.max() == 0


def test_results_of_a_function_are_interactions():
    found = global_interactions(lambda x, t, s: SmoothHess(product).attribute(x, sigma=0.5, n_calls=8, seed=s), X)
    assert isinstance(found, GlobalInteractions)
    assert not isinstance(found, Interactions)
    assert found.method == "SmoothHess Isotropic σ = 0.5"
