"""Curves: the bars and arcs are the numbers, over the right times."""

from functools import lru_cache

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle

import smoothhess as sh
from smoothhess import baselines, view
from smoothhess.view.figures import canvas
from tests.view.pictures import draw, line_segments, network, picture, unbiased_noise

pytestmark = pytest.mark.usefixtures("plain_figures")

WINDOWS = torch.tensor([0] * 4 + [1] * 2 + [2] * 6)


@lru_cache
def curve(shape=(12,), n_calls=96, **options):
    inputs = torch.rand(2, *shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return sh.SmoothHess(network(shape)).attribute(inputs, sigma=0.5, n_calls=n_calls, **options)


def bars(ax):
    return list(ax.containers[0])


@pytest.mark.parametrize("example", [0, 1])
@pytest.mark.parametrize("grouped", [True, False])
def test_bars_stand_over_their_intervals(grouped, example):
    noisy = curve((12,), 60, design="iid", control=None)
    result = noisy.groups(WINDOWS) if grouped else noisy
    ax = view.series(result, source=1, step=0.5, example=example, level=0.9)
    top, slope, pair = ax.figure.axes
    assert ax is top
    starts, stops = ([0, 4, 6], [4, 6, 12]) if grouped else (range(12), range(1, 13))
    one = result[example]
    x, y = top.lines[0].get_data()
    np.testing.assert_allclose(y, one.inputs[0].numpy())
    np.testing.assert_allclose(x, (np.arange(12) + 0.5) * 0.5)
    middles = (np.array(starts) + np.array(stops)) / 4
    expected = one.gradient[0].numpy(), one.row(1).value[0].numpy().copy()
    expected[1][1] = 0  # the source itself
    for panel, values in zip((slope, pair), expected, strict=True):
        np.testing.assert_allclose([b.get_height() for b in bars(panel)], values)
        np.testing.assert_allclose([b.get_x() + b.get_width() / 2 for b in bars(panel)], middles)
    stderr = one.row(1).stderr[0].numpy()
    noise = unbiased_noise(expected[1], stderr)
    assert grouped or ((np.abs(expected[1]) > stderr) & noise).any()
    assert [b.get_alpha() == canvas.FAINT for b in bars(pair)] == noise.tolist()
    low, high = (t[0].numpy() for t in one.row(1).interval(0.9))
    low[1] = high[1] = 0
    np.testing.assert_allclose(line_segments(pair)[0][:, :, 1], np.stack([low, high], 1), atol=1e-12)
    error = one.gradient_estimate().half_width(0.9)[0].numpy()
    np.testing.assert_allclose(line_segments(slope)[0][:, 1, 1], expected[0] + error)
    shade = next(p for p in pair.patches if isinstance(p, Rectangle) and p not in bars(pair))
    assert (shade.get_x(), shade.get_width()) == pytest.approx((starts[1] * 0.5, (stops[1] - starts[1]) * 0.5))
    assert pair.get_xlabel().startswith("time (s)")
    draw(ax)


def test_arcs_lead_from_the_source_to_its_strongest_partners():
    result = curve(n_calls=200)[0]
    pair = view.series(result, source=5, k=3).figure.axes[2]
    row = result.row(5)
    value, stderr = row.value[0].numpy().copy(), row.stderr[0].numpy()
    value[5] = 0
    clear = np.where(np.abs(value) >= 2 * stderr, np.abs(value), 0)
    partners = np.argsort(-clear, kind="stable")[:3]
    arcs = [p for p in pair.patches if isinstance(p, PathPatch)][::-1]
    assert len(arcs) == 3
    for j, arc in zip(partners, arcs, strict=True):
        start, knee, end = arc.get_path().vertices
        assert start == pytest.approx((5.5, 0))
        assert end[0] == pytest.approx(j + 0.5)
        assert np.sign(end[1]) == np.sign(knee[1]) == np.sign(value[j])
        assert abs(end[1]) >= abs(value[j])
        assert to_rgba(arc.get_edgecolor())[:3] == to_rgba(canvas.POSITIVE if value[j] > 0 else canvas.NEGATIVE)[:3]
        assert abs(value[j]) >= 2 * stderr[j]
        t = np.linspace(0, 1, 50)[:, None]
        path = (1 - t) ** 2 * start + 2 * t * (1 - t) * knee + t**2 * end
        low, high = pair.get_ylim()
        assert low <= path[:, 1].min()
        assert path[:, 1].max() <= high


def test_one_axes_is_divided_and_three_are_used():
    result = curve().groups(WINDOWS)
    whole = canvas.new_figure(4, 4).add_subplot()
    assert view.series(result, ax=whole) is whole
    assert len(whole.child_axes) == 3
    assert [len(a.containers) > 0 for a in whole.child_axes] == [False, True, True]
    draw(whole)
    three = Figure().subplots(3, 1)
    assert view.series(result, ax=three) is three[0]
    with pytest.raises(ValueError, match="expected 3 Axes, one for each panel, got 2"):
        view.series(result, ax=list(three[:2]))


def test_channels_are_grouped_in_time():
    mask = WINDOWS.expand(2, 12)
    ax = view.series(curve((2, 12)).groups(mask), step=0.1)
    assert len(ax.lines) >= 2
    with pytest.raises(ValueError, match=r"grouped in time if C > 1, got \(2, 12\): group them by intervals"):
        view.series(curve((2, 12)))
    assert "samples" in view.series(curve((1, 12)).groups(mask[:1]), source=1).get_title(loc="left")


@pytest.mark.parametrize(
    "mask", [torch.tensor([0, 1] * 6), torch.tensor([0] * 6 + [2] * 6), torch.tensor([0] * 4 + [1] * 4 + [0] * 4)]
)
def test_groups_that_are_no_intervals_are_refused(mask):
    with pytest.raises(ValueError, match="must be intervals of time"):
        view.series(curve().groups(mask))


def test_what_is_no_curve_is_refused():
    with pytest.raises(ValueError, match=r"\(T,\) or \(C, T\).*got \(3, 4, 5\): use kind"):
        view.series(picture((3, 4, 5), 40))
    for step in (0.0, -1.0, float("inf")):
        with pytest.raises(ValueError, match="step must be positive"):
            view.series(curve(), step=step)
    with pytest.raises(ValueError, match="source 12 is not among"):
        view.series(curve(), source=12)


def test_exact_results_have_bars_without_whiskers():
    exact = baselines.softplus(network((12,)), curve().inputs, beta=3.0)
    ax = view.series(exact)
    assert not line_segments(ax.figure.axes[2])
    assert "whiskers" not in ax.figure.axes[2].get_xlabel()
    draw(ax)


def test_many_samples_have_a_band_in_the_place_of_whiskers():
    ax = view.series(curve((100,), 240), source=3)
    assert not line_segments(ax.figure.axes[1])
    assert ax.figure.axes[1].collections
    draw(ax)
