"""Comparison of two results: paired errors against contrasts and simulation, other errors, tables, figures, pages."""

import pytest
import torch
from torch import nn

import smoothhess as sh
from smoothhess.evaluate.compare_results import compare_results

D, N = 6, 80
OPTIONS = {"sigma": 0.5, "n_calls": 64, "control": None}


def network(seed=0, outputs=2):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Linear(D, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, outputs)]
        return nn.Sequential(*layers).double()


NET = network()
X = torch.linspace(-1, 1, D).double()[None].sin()


def run(target=0, net=NET, x=X, **options):
    return sh.SmoothHess(net).attribute(x, target, **{**OPTIONS, **options})


@pytest.mark.parametrize("design", ["orthogonal", "iid", "antithetic"])
def test_the_difference_of_two_classes_is_the_contrast(design):
    """From the same rows: the value and its standard error."""
    found = compare_results({"cat": run(0, design=design), "dog": run(1, design=design)})
    contrast = run(sh.contrast(0, 1), design=design).unshrunk()
    assert found.errors == "paired"
    torch.testing.assert_close(found.difference.value, contrast.hessian, rtol=1e-9, atol=1e-9)
    # the variance of events that no row shows depends on both results
    torch.testing.assert_close(found.difference.stderr, contrast.stderr(), rtol=0.25, atol=0)
    torch.testing.assert_close(found.difference.stderr, found.difference.stderr.mT)


def coverage(a, b, truth):
    """Coverage of the intervals of the differences, and their width relative to independent ones."""
    found = compare_results({"a": a, "b": b})
    assert found.errors == "paired"
    i, j = torch.triu_indices(D, D, 1)
    low, high = found.difference.interval()
    inside = ((low <= truth) & (truth <= high))[:, i, j].double().mean()
    independent = (a.noise.of_entries().value + b.noise.of_entries().value).sqrt()
    return float(inside), float((found.difference.stderr / independent)[:, i, j].mean())


def truth_of(a, b):
    runs = [sh.SmoothHess(f).attribute(X, t, sigma=0.5, n_calls=20_000, seed=10**6, design="iid") for f, t in (a, b)]
    return (runs[0].unshrunk().hessian - runs[1].unshrunk().hessian)[0]


@pytest.mark.slow
def test_intervals_of_two_similar_models_hold_and_are_narrower():
    other = network()
    with torch.no_grad():
        other[4].weight.mul_(1.1)
    many = {"x": X.expand(N, -1), "seed": range(N), "design": "iid"}
    inside, width = coverage(run(0, **many), run(0, other, **many), truth_of((NET, 0), (other, 0)))
    assert 0.91 < inside <= 1
    assert width < 0.3


@pytest.mark.slow
def test_intervals_hold_where_one_result_has_more_draws():
    many = {"x": X.expand(N, -1), "seed": range(N)}
    inside, _ = coverage(run(0, **many), run(1, **many, n_calls=160), truth_of((NET, 0), (NET, 1)))
    assert 0.91 < inside <= 1


@pytest.mark.parametrize(("first", "second"), [(10, 12), (12, 18), (18, 30), (30, 18)])
def test_intervals_hold_where_one_result_ends_in_an_incomplete_block(first, second):
    """Nearly quadratic functions, of which a complete block has almost no error and an incomplete one has."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        matrix, change = (m + m.mT for m in torch.randn(2, D, D).double())
    one, other = (lambda x, m=m: (x @ m * x).sum(1) / 2 + 0.01 * x[:, 0] ** 4 for m in (matrix, matrix + 0.02 * change))
    many = {"x": X.expand(N, -1) * 0, "seed": range(N), "target": None}
    a, b = run(net=one, **many, n_calls=first), run(net=other, **many, n_calls=second)
    inside, _ = coverage(a, b, -0.02 * change)
    assert inside > 0.93


def test_opposite_functions_have_twice_the_error_of_one():
    """Two probabilities that add up to 1: independent errors would be too small."""
    f = lambda x: NET(x).softmax(-1)
    one, other = run(0, f), run(1, f)
    found = compare_results({"one": one, "other": other})
    torch.testing.assert_close(found.difference.value, 2 * one.unshrunk().hessian, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.difference.stderr, 2 * one.stderr(), rtol=0.2, atol=0)


def test_a_result_and_itself_do_not_differ():
    found = compare_results({"a": run(), "b": run()})
    assert float(found.difference.value.abs().max()) < 1e-12
    assert not any(p.significant for p in found.pairs(15)[0])


def test_the_error_is_bounded_where_no_row_shows_a_kink_of_the_difference():
    """Two inputs so close that all draws see the same side of each kink; the errors of both are known."""
    a, b = run(sigma=0.3), run(sigma=0.3, x=X + 1e-9)
    difference = compare_results({"a": a, "b": b}).difference
    torch.testing.assert_close(difference.stderr, a.stderr() + b.stderr())
    assert bool(difference.df.isfinite().all())


def test_other_draws_are_independent_and_shared_ones_that_cannot_be_paired_are_bounded():
    a, b = run(0), run(1, seed=1)
    independent = compare_results({"a": a, "b": b})
    assert independent.errors == "independent"
    total = (a.stderr().square() + b.stderr().square()).sqrt()
    torch.testing.assert_close(independent.difference.stderr, total)
    bounded = compare_results({"a": a, "b": run(1, design="iid")})
    assert bounded.errors == "bounded"
    assert bool((bounded.difference.stderr >= a.stderr()).all())
    exact = sh.baselines.softplus(NET, X, 0, beta=5.0)
    assert compare_results({"a": exact, "b": exact}).errors == "exact"
    half = compare_results({"a": a, "exact": exact})
    assert half.errors == "independent"
    torch.testing.assert_close(half.difference.stderr, a.stderr())


def test_estimates_of_tau_from_the_same_directions_are_not_independent():
    options = {"control": "kink", "tau_probes": 8}
    a, b = run(0, **options), run(1, seed=1, **options)
    assert compare_results({"a": a, "b": b}).errors == "bounded"
    assert compare_results({"a": a, "b": run(1, seed=1, control="kink")}).errors == "independent"


def test_columns_are_the_unbiased_numbers_and_their_difference():
    a, b = run(0, names=list("uvwxyz")), run(1, names=list("uvwxyz"))
    found = compare_results({"cat": a, "dog": b})
    (pairs,) = found.pairs(15)
    effects = [abs(p.effect) for p in pairs]
    assert effects == sorted(effects, reverse=True)
    for p in pairs:
        assert p.first - p.second == pytest.approx(p.difference, abs=1e-9)
        assert p.first == pytest.approx(float(a.unshrunk().hessian[0, p.i, p.j]))
        assert p.low < p.difference < p.high
    assert pairs[0].names[0] in "uvwxyz"
    text = repr(found)
    assert "cat − dog" in text
    assert "paired" in text


def test_groups_can_be_compared():
    mask = torch.tensor([0, 0, 1, 1, 2, 2])
    found = compare_results({"a": run(0).groups(mask), "b": run(1).groups(mask)})
    assert found.errors == "paired"
    contrast = run(sh.contrast(0, 1)).groups(mask).unshrunk()
    torch.testing.assert_close(found.difference.value, contrast.hessian, rtol=1e-9, atol=1e-9)


def test_errors_of_shifted_segments_are_those_of_the_contrast():
    """As many groups as dimensions of the noise, with several features each: no whitened coordinates."""
    parts = sh.segments.from_mask(torch.arange(D) // 2, (D,))
    options = {"sigma": None, "gaussian": sh.segments.noise(parts, 0.1), "feature_mask": parts, "n_calls": 60}
    found = compare_results({"cat": run(0, **options), "dog": run(1, **options)})
    contrast = run(sh.contrast(0, 1), **options).unshrunk()
    assert found.errors == "paired"
    torch.testing.assert_close(found.difference.value, contrast.hessian, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.difference.stderr, contrast.stderr(), rtol=0.25, atol=0)


def test_tables_figures_and_pages(tmp_path):
    pytest.importorskip("pandas")
    pytest.importorskip("matplotlib")
    found = compare_results({"<cat>": run(0), "dog": run(1)})
    frame = found.to_frame()
    assert len(frame) == 15
    assert {"<cat>", "dog_low", "difference", "share"} <= {*frame.columns}
    assert "differ" in " ".join(t.get_text() for t in found.plot().texts) + found.plot().get_title(loc="left")
    text = found.report(tmp_path / "x.html").read_text()
    assert "<cat>" not in text
    assert text.count("<tr>") == 16
    assert text.count("<script>") == 1  # the preferred colours
    assert "--accent:" in text
    with pytest.raises(ValueError, match="does not exist"):
        found.report(tmp_path / "none" / "x.html")


def test_results_that_cannot_be_compared_are_refused():
    a = run()
    with pytest.raises(TypeError, match="by name"):
        compare_results([a, a])
    with pytest.raises(ValueError, match="two results, got 1"):
        compare_results({"a": a})
    with pytest.raises(ValueError, match="same Gaussian"):
        compare_results({"a": a, "b": run(sigma=0.1)})
    with pytest.raises(ValueError, match="number of examples"):
        compare_results({"a": a, "b": run(x=X.expand(2, -1))})
    with pytest.raises(ValueError, match="names differ"):
        compare_results({"a": run(names=list("uvwxyz")), "b": run(names=list("abcdef"))})
    with pytest.raises(ValueError, match="same features"):
        compare_results({"a": a, "b": a.groups(torch.tensor([0, 0, 1, 1, 2, 2]))})
    with pytest.raises(ValueError, match="masks or directions differ"):
        compare_results(
            {str(mask): run(feature_mask=torch.tensor(mask)) for mask in ([0, 0, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2])}
        )
