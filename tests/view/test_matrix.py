"""The heatmap: order, choice of features, and what it refuses."""

import numpy as np
import pytest
import torch

import smoothhess as sh
from smoothhess import view
from smoothhess.result.shown_estimate import error_text
from smoothhess.view.figures import canvas
from smoothhess.view.figures.feature_order import clustered
from tests.view.pictures import NAMES, draw, picture, segments, table, unbiased_noise

pytestmark = pytest.mark.usefixtures("plain_figures")


@pytest.fixture(scope="module")
def result():
    """Noisy: with entries of all sizes of |z|."""
    return table(120, design="iid", control=None)


def labels(ax):
    return [t.get_text() for t in ax.get_yticklabels()]


@pytest.mark.parametrize(
    "options", [{"order": "clustered"}, {"order": [4, 0, 1]}, {"k": 3}, {"k": 4, "order": "clustered"}]
)
def test_names_follow_their_numbers_whatever_the_order(result, options):
    ax = view.heatmap(result, names=NAMES, example=1, **options)
    chosen = [NAMES.index(name) for name in labels(ax)]
    assert labels(ax) == [t.get_text() for t in ax.get_xticklabels()]
    order = options.get("order")
    assert len(chosen) == (len(order) if isinstance(order, list) else options.get("k", 6))
    unbiased, stderr = result.unshrunk().hessian[1].numpy(), result.stderr()[1].numpy()
    shown, at = ax.images[0], np.ix_(chosen, chosen)
    np.testing.assert_allclose(np.asarray(shown.get_array()), unbiased[at], rtol=1e-12)
    faint = unbiased_noise(unbiased, stderr)
    z = np.abs(unbiased / stderr)
    assert ((z > 1) & (z < 2)).any()
    assert ((z > 2) & (z < 3)).any()
    np.testing.assert_array_equal(np.asarray(shown.get_alpha()) == canvas.FAINT, faint[at])


def test_clustered_is_that_of_effects(result):
    scales = result.gaussian.scales(6)
    effect = (result.hessian[0] * scales * scales[:, None]).fill_diagonal_(0)
    ax = view.heatmap(result, names=NAMES, order="clustered")
    assert labels(ax) == [NAMES[i] for i in clustered(effect.abs().numpy())]


def test_k_takes_the_features_with_the_strongest_interactions(result):
    assert labels(view.heatmap(result, names=NAMES, k=2)) == ["age", "dose"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "sorted"}, "order must be 'given', 'clustered' or indices of features, got 'sorted'"),
        ({"order": [0, 6]}, "indices of features from 0 to 5"),
        ({"order": [0, 0]}, "contains an index twice"),
        ({"order": [0.5]}, "indices of features from 0 to 5"),
        ({"order": []}, "indices of features from 0 to 5"),
        ({"order": [0, 1], "k": 2}, "omit k"),
        ({"k": 0}, "k ≥ 1 features"),
    ],
)
def test_orders_that_make_no_sense_are_refused(result, options, message):
    with pytest.raises(ValueError, match=message):
        view.heatmap(result, **options)


def test_many_features_are_refused_with_advice_before_a_matrix_is_made():
    wide = sh.SmoothHess(lambda x: (x**2).sum(1)).attribute(torch.zeros(1, 1001), sigma=0.1, n_calls=20)
    with pytest.raises(ValueError, match=r"1001 × 1001 colours is not legible.*Pass k=40 .*groups\(mask\)"):
        view.heatmap(wide)
    assert wide.estimate.cached_matrix.value is None
    assert view.heatmap(wide, k=5).images[0].get_array().shape == (5, 5)
    huge = sh.SmoothHess(lambda x: (x**2).sum(1)).attribute(torch.zeros(1, 6000), sigma=0.1, n_calls=4)
    with pytest.raises(ValueError, match=r"is not legible.*Use result.groups"):
        view.heatmap(huge, k=5)


def test_colour_bar_says_what_more_and_less_mean(result):
    for width in (3.3, 6.4):
        ax = canvas.new_figure(width, 5.0).add_subplot()
        bar = view.heatmap(result, names=NAMES, ax=ax).images[0].colorbar
        assert bar is not None
        said = (bar.ax.get_ylabel() + bar.ax.get_xlabel()).replace("\n", " ").replace("\u00a0", " ")
        assert "together ← less · more → than apart" in " ".join(said.split())
        assert "per unit of each feature" in said
    caption = [t.get_text() for t in ax.texts if "faint" in t.get_text()]
    assert "within noise" in caption[0].replace("\n", " ")


def test_small_numbers_are_counted_in_powers_of_ten():
    tiny = sh.SmoothHess(lambda x: 1e-7 * x[:, 0] * x[:, 1]).attribute(
        torch.zeros(1, 3).double(), sigma=0.5, n_calls=96
    )
    ax = view.heatmap(tiny)
    draw(ax)
    bar = ax.images[0].colorbar
    assert "10^{-7}" in bar.ax.get_ylabel()
    assert "1" in [t.get_text() for t in bar.ax.get_yticklabels()]


def test_a_matrix_of_segments_is_that_of_the_unbiased_numbers():
    grouped = picture((3, 4, 5), 400).groups(segments())
    ax = view.heatmap(grouped, order="clustered")
    np.testing.assert_allclose(
        np.sort(np.asarray(ax.images[0].get_array()), None), np.sort(grouped.unshrunk().hessian[0].numpy(), None)
    )
    assert ax.get_xlabel() == "segments"
    error = error_text(float(grouped.unshrunk().relative_error[0]))
    assert any(error in t.get_text() for t in ax.texts)
