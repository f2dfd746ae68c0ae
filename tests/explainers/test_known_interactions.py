"""The benchmark's functions have the pairs that they declare, and its truths are those of independent routes."""

import sys
from importlib import import_module
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scipy import stats

from benchmarks.known import FEATURES, FUNCTIONS, QUADRANTS, coalitions, shapley_interactions, truth_table

POINTS = 400
ALL = list(FUNCTIONS.values())
EPS = torch.finfo(torch.float64).eps


def swapped_differences(f, i, j):
    """f(x) − f(x with y_i) − f(x with y_j) + f(x with both) for random x, y of the domain, and its rounding error."""
    rng = torch.Generator().manual_seed(1)
    x, y = f.sample(POINTS, rng), f.sample(POINTS, rng)
    corners = []
    for features in ((), (i,), (j,), (i, j)):
        point = x.clone()
        for k in features:
            point[:, k] = y[:, k]
        corners.append(f(point))
    rounding = 64 * EPS * sum(c.abs() for c in corners).clamp_min(1)
    return corners[0] - corners[1] - corners[2] + corners[3], rounding


@pytest.mark.parametrize("f", ALL, ids=lambda f: f.name)
def test_declared_pairs_are_those_of_mixed_differences(f):
    for pair in combinations(range(FEATURES), 2):
        difference, rounding = swapped_differences(f, *pair)
        assert torch.isfinite(difference).all()
        if pair in f.pairs:
            assert (difference.abs() > 1e3 * rounding).double().mean() > 0.05, pair  # somewhere, and not by rounding
            assert difference.abs().max() > 1e-3, pair
        else:
            assert (difference.abs() <= rounding).all(), pair


def test_how_many_pairs_there_are():
    counts = {name: len(f.pairs) for name, f in FUNCTIONS.items()}
    assert counts == {
        **{"F1": 11, "F2": 11, "F3": 9, "F4": 10, "F5": 8, "F6": 8, "F7": 14, "F8": 12, "F9": 15, "F10": 6},
        **{"quadrants": 5, "additive": 0},
    }
    assert truth_table(QUADRANTS.pairs).sum() == 5
    i, j = torch.triu_indices(FEATURES, FEATURES, 1)
    found = [(int(a), int(b)) for a, b, t in zip(i, j, truth_table(QUADRANTS.pairs), strict=True) if t]
    assert set(found) == QUADRANTS.pairs == {(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)}


@pytest.mark.parametrize("name", ["F1", "F2", "F5", "F8", "F9", "F10"])
def test_small_rectangles_give_the_second_derivative(name):
    f = FUNCTIONS[name]
    x = f.sample(8, torch.Generator().manual_seed(2))
    reach = 1e-3
    inside = f.moves * reach
    x = x.clamp(f.bounds[0] + 2 * inside, f.bounds[1] - 2 * inside)
    exact = torch.func.vmap(torch.func.hessian(f))(x)
    found = f.mixed_differences(x, reach)
    torch.testing.assert_close(found, found.mT)
    torch.testing.assert_close(found, exact - torch.diag_embed(exact.diagonal(dim1=-2, dim2=-1)), rtol=1e-3, atol=1e-3)


def test_large_rectangles_give_its_average():
    x = torch.zeros(1, FEATURES).double()
    found = QUADRANTS.mixed_differences(x, 0.5)
    expected = torch.zeros(FEATURES, FEATURES).double()
    for i, j in QUADRANTS.pairs:
        expected[i, j] = expected[j, i] = (5 + 3 + 12 - 10) / 4
    torch.testing.assert_close(found[0], expected)
    corner = QUADRANTS.mixed_differences(torch.full_like(x, 2.0), 0.5)  # cut to the domain: the first quadrant alone
    torch.testing.assert_close(corner[0], 2 * expected)


def test_samples_follow_the_domain():
    for f in ALL:
        x = f.sample(20_000, torch.Generator().manual_seed(3))
        low, high = f.bounds
        assert (x >= low).all()
        assert (x <= high).all()
        z = (x.mean(0) - (low + high) / 2) / (f.moves / 20_000**0.5)
        assert z.abs().max() < 5
        torch.testing.assert_close(x.std(0), f.moves, rtol=0.02, atol=0)
        assert torch.isfinite(f(x)).all()


def test_shapley_interactions_of_products():
    """Σ a_S Π_{i∈S} x_i against a baseline of zero: a product of s features gives each of its pairs 1/(s − 1)."""

    def f(x):
        return 3 * x[:, 0] * x[:, 1] - 2 * x[:, 2] * x[:, 3] * x[:, 4] + x[:, 5:9].prod(1) + x[:, 9]

    x = torch.linspace(-1, 1.3, 2 * FEATURES).double().reshape(2, FEATURES)
    found = shapley_interactions(f, x, torch.zeros(FEATURES).double())
    expected = torch.zeros_like(found)
    expected[:, 0, 1] = 3 * x[:, 0] * x[:, 1]
    for i, j in combinations((2, 3, 4), 2):
        expected[:, i, j] = -2 * x[:, 2] * x[:, 3] * x[:, 4] / 2
    for i, j in combinations(range(5, 9), 2):
        expected[:, i, j] = x[:, 5:9].prod(1) / 3
    torch.testing.assert_close(found, expected + expected.mT)


def test_shapley_interactions_are_those_of_shapiq():
    shapiq = pytest.importorskip("shapiq")
    f = FUNCTIONS["F2"]
    x, baseline = f.sample(2, torch.Generator().manual_seed(4))
    found = shapley_interactions(f, x[None], baseline)[0]

    def game(sets):
        return f(torch.where(torch.as_tensor(sets), x, baseline)).numpy()

    for index in ("SII", "k-SII"):
        theirs = shapiq.ExactComputer(game, FEATURES)(index, order=2).get_n_order_values(2)
        torch.testing.assert_close(found, torch.from_numpy(theirs), rtol=1e-9, atol=1e-12)


def test_coalitions_are_all_subsets():
    sets = coalitions()
    assert sets.shape == (1024, FEATURES)
    assert len(sets.unique(dim=0)) == 1024
    assert not sets[0].any()
    assert sets[-1].all()


# --- how methods are judged -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench():
    """The scripts, imported as they import each other."""
    folder = str(Path(__file__).resolve().parents[2] / "benchmarks")
    sys.path.append(folder)  # last: one of them has the name of an installed package
    try:
        yield SimpleNamespace(interactions=import_module("interactions"), detectors=import_module("detectors"))
    finally:
        sys.path.remove(folder)


def test_auc_is_the_mann_whitney_statistic(bench):
    rng = torch.Generator().manual_seed(5)
    scores = torch.randint(0, 9, (4, 45), generator=rng).double()  # with ties
    truth = torch.rand(45, generator=rng) < 0.3
    for row, found in zip(scores, bench.interactions.auc(scores, truth), strict=True):
        u = stats.mannwhitneyu(row[truth], row[~truth]).statistic
        assert float(found) == pytest.approx(u / (int(truth.sum()) * int((~truth).sum())))


def test_finite_differences_of_a_quadratic_are_exact(bench):
    rng = torch.Generator().manual_seed(6)
    a = torch.randn(FEATURES, FEATURES, generator=rng)
    a = (a + a.mT).double()
    x = torch.randn(3, FEATURES, generator=rng).double()

    class Quadratic(torch.nn.Module):
        def forward(self, x):
            return torch.einsum("bi,ij,bj->b", x.double(), a, x.double())[:, None] / 2

    model = bench.detectors.Counted(Quadratic())
    found = bench.detectors.finite_differences(model, x, 0.5)
    torch.testing.assert_close(found.hessian, a.expand(3, -1, -1))
    torch.testing.assert_close(found.gradient, x @ a)
    assert model.forwards == 3 * (1 + 2 * FEATURES + 4 * 45) == 6 * float(found.n_passes[0])


def test_rows_are_counted(bench):
    model = bench.detectors.Counted(torch.nn.Linear(FEATURES, 1))
    x = torch.zeros(7, FEATURES, requires_grad=True)
    model(x).sum().backward()
    with torch.no_grad():
        model(x[:2])
    assert (model.forwards, model.backwards) == (9, 7)


def test_shapley_scores_are_those_of_the_truth(bench):
    pytest.importorskip("shapiq")
    torch.manual_seed(0)
    model = bench.detectors.Counted(bench.detectors.mlp(FEATURES, (16,)))
    x, baseline = torch.randn(2, FEATURES), torch.zeros(FEATURES)
    found, passes = bench.detectors.shapley("k-SII", None)(model, x, baseline, {})
    assert (passes, model.forwards) == (512, 2048)
    with torch.no_grad():
        torch.testing.assert_close(found, shapley_interactions(model, x, baseline), rtol=1e-5, atol=1e-7)


def test_reported_points_are_seen_by_nothing_else(bench):
    f = FUNCTIONS["F2"]
    purposes = [bench.detectors.drawn(f, 100, purpose) for purpose in (1, 2, 4, 5)]
    assert len(torch.cat(purposes).unique(dim=0)) == 400


@pytest.mark.slow
def test_the_quick_run_finds_the_pairs(bench, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench.interactions, "KEPT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["interactions.py", "--quick", "--write", str(tmp_path / "page.md")])
    bench.interactions.main()
    first = (tmp_path / "page.md").read_text()
    row = next(line for line in first.splitlines() if line.startswith("| SmoothHess |"))
    assert float(row.split("|")[-2].strip(" *")) > 0.95
    marker = bench.interactions.BEGIN
    (tmp_path / "page.md").write_text(first.replace(marker, f"{marker}\n\nA remark."))
    bench.interactions.main()  # from what was kept, and so at once
    second = (tmp_path / "page.md").read_text()
    assert second.count("A remark.") == 1
    assert second.replace("A remark.\n\n", "") == first
    capsys.readouterr()
