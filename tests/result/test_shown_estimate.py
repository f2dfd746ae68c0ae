"""One question, one number: values, order, intervals and the error of a view belong to the same estimate."""

import pytest
import torch

import smoothhess as sh
from smoothhess.cli.explain import printed_summary
from smoothhess.result.shown_estimate import error_text, shown, shown_error
from smoothhess.view import captions
from smoothhess.view.report import html, quality_levels
from smoothhess.view.report.payload import PageOptions, payload


@pytest.fixture(scope="module")
def result():
    """One whose two estimates have different errors."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.ReLU(), torch.nn.Linear(30, 1))
    found = sh.SmoothHess(net).attribute(torch.zeros(1, 40), sigma=0.5, n_calls=80, control=None)
    assert error_text(float(found.relative_error[0])) != error_text(float(shown_error(found)[0]))
    return found


def test_values_order_and_intervals_are_unbiased(result):
    pairs = result.top_pairs(30)[0]
    values = shown(result).hessian[0]
    assert [p.value for p in pairs] == pytest.approx([float(values[p.i, p.j]) for p in pairs], rel=1e-5)
    effects = [abs(p.effect) for p in pairs]
    assert effects == sorted(effects, reverse=True)
    assert all(p.low < p.value < p.high for p in pairs)
    frame = result.to_frame(k=30)
    assert frame["effect"].abs().is_monotonic_decreasing


def test_the_matrix_decides_which_pairs_are_listed(result):
    i, j = torch.triu_indices(40, 40, 1)
    largest = result.hessian[0][i, j].abs().topk(5).indices
    assert {(p.i, p.j) for p in result.top_pairs(5)[0]} == {(int(i[k]), int(j[k])) for k in largest}


def test_pairs_of_two_halves_are_in_the_order_of_what_is_reported():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 30), torch.nn.ReLU(), torch.nn.Linear(30, 1))
    found = sh.SmoothHess(net).attribute(torch.zeros(1, 8), sigma=0.5, n_calls=64, control=None)
    effects = [abs(p.effect) for p in found.top_pairs(10, selection="split")[0]]
    assert effects == sorted(effects, reverse=True)


def test_every_view_of_pairs_shows_the_error_of_its_numbers(result):
    own, denoised = error_text(float(shown_error(result)[0])), error_text(float(result.relative_error[0]))
    [page] = payload(result, PageOptions())["results"][0]
    about = "Denoised matrix"  # the one detail that names the other error, without a verdict
    views = {
        "table": repr(result.top_pairs(3)),
        "caption": captions.quality_words(result),
        "page": str([page["chip"], *(r for r in page["quality"] if r["name"] != about)]),
        "notebook": html(result).split(about)[0],
        "command line": printed_summary.quality(result),
        "levels": str([r for r in quality_levels.readings(result) if r.name != about]),
    }
    for name, text in views.items():
        assert own in text, name
        assert denoised not in text, name


@pytest.mark.parametrize("kind", ["pairs", "heatmap", "graph", "gradient", "diagonal"])
def test_every_figure_of_pairs_shows_the_error_of_its_numbers(result, kind):
    pytest.importorskip("matplotlib")
    denoised = error_text(float(result.relative_error[0]))
    ax = result.plot(kind)
    texts = " ".join(" ".join(t.get_text().split()) for t in ax.texts)
    assert denoised not in texts
    if kind != "gradient":
        assert error_text(float(shown_error(result)[0])) in texts


def test_the_page_does_not_call_the_same_run_rough_and_precise(result):
    """One verdict on precision."""
    words = [r.verdict for r in quality_levels.readings(result)]
    assert sum("precis" in word for word in words) <= 1


def test_unknown_errors_are_called_so():
    one = sh.SmoothHess(lambda x: x.prod(1)).attribute(
        torch.zeros(1, 3), sigma=0.5, n_calls=2, design="antithetic", control=None, shrink=False
    )
    assert "unknown" in repr(one.top_pairs(1))
