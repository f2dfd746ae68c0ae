"""Several methods, several radii, one set of model calls."""

import math

import pytest
import torch
from scipy.stats import ttest_rel

from smoothhess import Isotropic, SmoothHess, Taylor
from smoothhess.evaluate import Comparison, compare, perturbation_mse
from smoothhess.result.intervals import half_width
from tests.truths import OneHidden

F = OneHidden(5)
X = torch.linspace(-1.5, 1.5, 60).double().sin().reshape(12, 5)
RADII = [0.3, 1.0]


def surrogates(x=X, sigma=0.3):
    truth = F.truth(x, Isotropic(sigma))
    value = F(x).detach()
    second = Taylor(x, value, truth.gradient, lambda rows: rows @ truth.hessian)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F(leaf).sum(), leaf)
    return {"SH+SG": second, "SG": Taylor(x, value, truth.gradient, None), "G": Taylor(x, value, gradient, None)}


def table(**options):
    return compare(F, X, surrogates(), RADII, **{"n_samples": 1_000, **options})


@pytest.mark.parametrize("sampling", ["ball", "radius"])
def test_each_cell_is_the_perturbation_mse(sampling):
    compared = table(sampling=sampling, seed=4)
    for m, surrogate in enumerate(surrogates().values()):
        for r, radius in enumerate(RADII):
            alone = perturbation_mse(F, X, surrogate, radius, n_samples=1_000, sampling=sampling, seed=4)
            torch.testing.assert_close(compared.errors[m, r], alone, rtol=1e-12, atol=0)


def test_methods_share_the_model_calls():
    calls = []

    def counted(x):
        calls.append(len(x))
        return F(x)

    compare(counted, X, surrogates(), RADII, n_samples=70)
    assert sum(calls) == len(X) * 70 * len(RADII)


def test_radii_and_methods_see_the_same_draws_scaled():
    seen = {0.5: [], 2.0: []}
    x = torch.zeros(1, 3).double()

    def watch(points):
        seen[0.5 if points.norm(dim=-1).max() <= 0.5 else 2.0].append(points)
        return points.sum(-1)

    compare(lambda x: x.sum(1), x, {"a": watch, "b": watch}, [0.5, 2.0], n_samples=100)
    assert torch.equal(seen[0.5][0], seen[0.5][1])
    torch.testing.assert_close(4 * seen[0.5][0], seen[2.0][0])


def test_standard_errors_are_those_of_the_samples():
    runs = [table(seed=s, n_samples=300) for s in range(60)]
    spread = torch.stack([r.errors for r in runs]).std(0)
    claimed = torch.stack([r.stderr for r in runs]).square().mean(0).sqrt()
    ratio = claimed / spread  # known to 9 % from 60 runs
    assert ratio.min() > 0.6
    assert ratio.max() < 1.6
    assert abs(float(ratio.mean()) - 1) < 0.1
    # the mean over points: its draws are common, so its error is not that of independent points
    spread = torch.stack([r.errors.mean(2) for r in runs]).std(0)
    claimed = torch.stack([r.sampling_stderr for r in runs]).square().mean(0).sqrt()
    assert ((claimed / spread) > 0.7).all()
    assert ((claimed / spread) < 1.4).all()
    independent = torch.stack([r.stderr.square().mean(2).sqrt() for r in runs]).mean(0) / math.sqrt(len(X))
    assert (claimed[:, 1] > 1.3 * independent[:, 1]).all()


def test_mean_over_points():
    compared = table()
    mean = compared.mean("SG", 1.0)
    values = compared.errors[1, 1]
    assert mean.value == pytest.approx(float(values.mean()))
    assert mean.stderr == pytest.approx(float(values.std() / math.sqrt(len(X))))
    assert math.isnan(compare(F, X[:1], {"a": lambda p: p.sum(-1)}, 1.0, n_samples=50).mean("a", 1.0).stderr)


def test_differences_are_paired():
    compared = table()
    apart = compared.difference("SG", "G")
    for r, radius in enumerate(RADII):
        first, second = compared.mean("SG", radius), compared.mean("G", radius)
        assert float(apart.value[r]) == pytest.approx(first.value - second.value)
        assert float(apart.stderr[r]) < 0.8 * math.hypot(first.stderr, second.stderr)
    unpaired = (compared.stderr[1].square() + compared.stderr[2].square()).sqrt()
    assert (apart.per_point_stderr < unpaired).double().mean() > 0.9
    runs = torch.stack([table(seed=s, n_samples=300).difference("SG", "G").per_point for s in range(40)]).std(0)
    claimed = table(n_samples=300, seed=99).difference("SG", "G").per_point_stderr
    assert 0.7 < float((claimed / runs).median()) < 1.4
    back = compared.difference("G", "SG")
    torch.testing.assert_close(back.value, -apart.value)
    torch.testing.assert_close(back.stderr, apart.stderr)
    nothing = compared.difference("G", "G")
    assert nothing.value.abs().max() == 0
    assert nothing.per_point_stderr.max() < 1e-12


def test_curvature_helps_where_it_was_smoothed_for():
    compared = compare(F, X, surrogates(sigma=0.3 / math.sqrt(5)), 0.3, n_samples=2_000)
    assert float(compared.difference("SH+SG", "SG").value) < 0


@pytest.mark.parametrize("rows", [1, 17])
def test_batch_size_changes_nothing(rows):
    whole, parts = table(n_samples=100), table(n_samples=100, internal_batch_size=rows)
    torch.testing.assert_close(whole.errors, parts.errors, rtol=1e-12, atol=0)
    torch.testing.assert_close(whole.covariance, parts.covariance, rtol=1e-9, atol=1e-18)


def test_points_side_by_side():
    parts = []
    for seed, index in enumerate([slice(0, 5), slice(5, 12)]):
        parts.append(compare(F, X[index], surrogates(X[index]), RADII, n_samples=200, seed=seed))
    whole = Comparison.cat(parts)
    assert len(whole) == 12
    assert whole.seeds == (0, 1)
    torch.testing.assert_close(whole.errors, torch.cat([p.errors for p in parts], 2))
    torch.testing.assert_close(whole.stderr, torch.cat([p.stderr for p in parts], 2))
    variances = [(n / 12) ** 2 * p.sampling_stderr**2 for n, p in zip((5, 7), parts, strict=True)]
    torch.testing.assert_close(whole.sampling_stderr, sum(variances).sqrt())
    with pytest.raises(ValueError, match=r"share draws \(seeds \(0, 0\)\).* Pass different seeds"):
        Comparison.cat([parts[0], parts[0]])
    other = compare(F, X, {"a": lambda p: p.sum(-1)}, RADII, n_samples=200, seed=9)
    with pytest.raises(ValueError, match="only when methods, radii, n_samples and sampling agree"):
        Comparison.cat([parts[0], other])
    with pytest.raises(ValueError, match="at least one comparison"):
        Comparison.cat([])


def test_reading_it():
    compared = table()
    lines = compared.to_markdown().splitlines()
    assert lines[0] == "| P_MSE | r = 0.3 | r = 1 |"
    assert len(lines) == 5
    assert all(line.count("|") == 4 for line in lines)
    mean = compared.mean("SH+SG", 0.3)
    assert f"{mean.value:.3g} ± {half_width(mean.stderr, len(compared) - 1):.1g}" in lines[2]
    text = repr(compared)
    assert "3 method(s) around 12 point(s), 1000 samples each (uniform in the ball), seed 0" in text
    assert "over points; the sampling error is at most" in text
    alone = compare(F, X[:1], {"zero": lambda p: 0 * p.sum(-1)}, 1.0, n_samples=50, sampling="radius")
    assert "± half of a 95 % interval over samples" in repr(alone)
    assert "as in the paper's tables" in repr(alone)
    assert f"± {half_width(float(alone.stderr)):.1g}" in alone.to_markdown()
    exact = compare(F, X[:2], {"f": lambda p: F(p.flatten(0, 1)).reshape(p.shape[:2])}, 1.0, n_samples=50)
    assert "nan" not in repr(exact)


def test_one_radius_may_be_a_number_or_a_tensor():
    assert compare(F, X, surrogates(), 1, n_samples=50).radii == (1.0,)
    assert compare(F, X, surrogates(), torch.tensor([0.5, 2.0]), n_samples=50).radii == (0.5, 2.0)


def test_an_estimate_serves_as_a_surrogate():
    x = X[:3].float()
    model = OneHidden(5).float()
    result = SmoothHess(model).attribute(x, radius=0.5, n_calls=2_000)
    compared = compare(model, x, {"2": result.taylor(), "1": result.taylor(1)}, 0.5, n_samples=500)
    assert (compared.difference("2", "1").per_point < 0).all()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"surrogates": {}}, "at least one, got dict without entries"),
        ({"surrogates": [1]}, r"surrogates must be a mapping \{name: surrogate\} with at least one, got list"),
        ({"radii": []}, "expected at least one radius and each once, got \\[\\]"),
        ({"radii": [1.0, 1]}, r"expected at least one radius and each once, got \[1.0, 1.0\]"),
        ({"radii": [0.5, -1]}, "radius must be a positive number, .*, got -1"),
        ({"radii": "1"}, "radius must be a positive number, .*, got '1'"),
        ({"sampling": "sphere"}, "sampling must be"),
        ({"surrogates": {"mine": lambda p: p}}, r"surrogate 'mine' must map points \(12, 50, 5\) to values \(12, 50\)"),
    ],
)
def test_what_is_refused(changes, text):
    arguments = {"surrogates": surrogates(), "radii": 1.0, "n_samples": 50, **changes}
    with pytest.raises(ValueError, match=text):
        compare(F, X, **arguments)


def test_names_and_radii_that_are_not_there():
    compared = table(n_samples=50)
    with pytest.raises(ValueError, match="expected one of the methods 'SH\\+SG', 'SG', 'G', got 'H'"):
        compared.mean("H", 1.0)
    with pytest.raises(ValueError, match="expected one of the methods"):
        compared.difference("G", "H")
    with pytest.raises(ValueError, match=r"expected one of the radii 0.3, 1, got 0.5"):
        compared.mean("G", 0.5)


def test_p_values_are_those_of_the_paired_t_test():
    compared = table(n_samples=300)
    expected = ttest_rel(compared.errors[1].numpy(), compared.errors[2].numpy(), axis=1).pvalue
    torch.testing.assert_close(compared.difference("SG", "G").p_value, torch.from_numpy(expected), rtol=1e-6, atol=0)
    assert (compared.difference("G", "G").p_value == 1).all()
    alone = compare(F, X[:1], {"a": lambda p: p.sum(-1), "b": lambda p: 0 * p.sum(-1)}, 1.0, n_samples=50)
    assert alone.difference("a", "b").p_value.isnan().all()


def test_a_table_beside_one_method():
    compared = table(n_samples=300)
    lines = compared.to_markdown(against="SG").splitlines()
    apart = compared.difference("G", "SG")
    assert f"({float(apart.value[1]):+.2g} ± {half_width(float(apart.stderr[1]), len(compared) - 1):.1g}) |" in lines[4]
    assert "(" not in lines[3]
    assert lines[:2] == compared.to_markdown().splitlines()[:2]
    with pytest.raises(ValueError, match="expected one of the methods"):
        compared.to_markdown(against="H")
    pair = {"a": lambda p: p.sum(-1), "b": lambda p: 0 * p.sum(-1)}
    assert "nan" not in compare(F, X[:1], pair, 1.0, n_samples=50).to_markdown(against="a")
