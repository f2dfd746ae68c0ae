"""The figures show the numbers of the result, and nothing else in the process changes."""

import sys

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import to_rgba
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch
from torch import nn

import smoothhess as sh
from smoothhess import view
from smoothhess.view.figures import canvas

NAMES = ["age", "dose", "height", "pulse", "iron", "sleep"]


def one_pair(x):
    """Features 0 and 1 interact, the others are additive."""
    return torch.relu(x[:, 0] - x[:, 1]) * 2 + torch.relu(x[:, 2:]).sum(1)


def network(shape, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        d = int(np.prod(shape))
        return nn.Sequential(nn.Flatten(), nn.Linear(d, 24), nn.ReLU(), nn.Linear(24, 1)).double()


@pytest.fixture(scope="module")
def table():
    inputs = torch.tensor([[0.0] * 6, [0.3, 0.2, -0.1, 0.0, 0.1, 0.2]], dtype=torch.float64)
    return sh.SmoothHess(one_pair).attribute(inputs, gaussian=sh.Diagonal([0.5, 1, 1, 1, 2, 1]), n_calls=2000)


def picture(shape, n_calls=600):
    inputs = torch.rand(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return sh.SmoothHess(network(shape)).attribute(inputs, sigma=0.5, n_calls=n_calls)


def draw(ax):
    ax.figure.savefig("/dev/null", format="png")


def segments_of(ax):
    return [np.array(c.get_segments()) for c in ax.collections if isinstance(c, LineCollection)]


# --- plot -------------------------------------------------------------------------------------------------------------


def test_plot_names_the_kinds_it_knows(table):
    with pytest.raises(ValueError, match="'heatmap', 'pairs', 'gradient', 'image', got 'histogram'"):
        table.plot("histogram")


@pytest.mark.parametrize("kind", ["heatmap", "pairs", "gradient", "image"])
def test_every_kind_draws_into_the_axes_it_is_given_or_its_own(kind):
    result = picture((4, 5), 200)
    ax = Figure().add_subplot()
    assert result.plot(kind, ax=ax) is ax
    own = result.plot(kind, example=-1)
    assert isinstance(own, Axes)
    draw(own)


def test_without_matplotlib_the_error_says_what_to_install(table, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'smoothhess\[view\]'"):
        table.plot("pairs")


def test_an_example_that_is_not_there_is_refused(table):
    with pytest.raises(IndexError, match="example 2 of 2"):
        table.plot("pairs", example=2)


# --- heatmap ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", [0, 1])
def test_heatmap_shows_the_hessian_with_noise_faint(table, example):
    shown = view.heatmap(table, example=example).images[0]
    hessian, stderr = table.hessian[example].numpy(), table.stderr()[example].numpy()
    values = np.asarray(shown.get_array())
    np.testing.assert_allclose(values, hessian, rtol=1e-6, atol=1e-12)
    low, high = shown.get_clim()
    assert high == -low == pytest.approx(np.abs(hessian).max())
    unbiased = table.unshrunk().hessian[example].numpy()
    faint = (np.abs(unbiased) < 2 * stderr) | (unbiased == 0)
    np.testing.assert_array_equal(np.asarray(shown.get_alpha()) == canvas.FAINT, faint)
    np.testing.assert_array_equal(np.asarray(shown.get_alpha()) == 1, ~faint)
    assert not faint[0, 1]
    assert faint[2:, :2].any()


def test_heatmap_colours_are_white_at_zero_and_say_what_they_mean(table):
    ax = view.heatmap(table)
    zero = mpl.colormaps[canvas.DIVERGING](0.5)
    assert min(zero[:3]) > 0.95
    bar = ax.images[0].colorbar
    assert bar is not None
    assert "together" in bar.ax.get_ylabel()


def test_heatmap_names_stand_on_both_axes_while_they_fit(table):
    ax = view.heatmap(table, names=NAMES)
    assert [t.get_text() for t in ax.get_xticklabels()] == NAMES == [t.get_text() for t in ax.get_yticklabels()]
    wide = sh.SmoothHess(lambda x: x.prod(1)).attribute(torch.ones(1, 41), sigma=0.1, n_calls=100)
    assert "f7" not in [t.get_text() for t in view.heatmap(wide, names=[f"f{i}" for i in range(41)]).get_xticklabels()]
    with pytest.raises(ValueError, match="one name per feature, 6, got 2"):
        view.heatmap(table, names=["a", "b"])


def test_heatmap_limit_can_be_shared_between_figures(table):
    assert view.heatmap(table, limit=3.0).images[0].get_clim() == (-3.0, 3.0)


def test_affine_function_draws_in_white_without_a_word():
    flat = sh.SmoothHess(lambda x: x.sum(1)).attribute(torch.zeros(1, 4), sigma=0.5, n_calls=100)
    ax = view.heatmap(flat)
    assert ax.images[0].get_clim() == (-1.0, 1.0)
    for kind in ("heatmap", "pairs", "gradient"):
        draw(flat.plot(kind))


@pytest.mark.filterwarnings("error")
def test_two_calls_with_their_infinite_error_bars_still_draw(table):
    least = sh.SmoothHess(one_pair).attribute(table.inputs[:1], sigma=0.5, n_calls=2)
    for kind in ("heatmap", "pairs", "gradient"):
        draw(least.plot(kind))


# --- pairs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", [0, 1])
def test_pairs_are_those_of_top_pairs_with_their_intervals(table, example):
    ax = view.pairs(table, k=7, names=NAMES, example=example, level=0.9, q=0.01)
    found = table.top_pairs(7, NAMES, level=0.9, q=0.01)[example]
    expected = [[[p.low, y], [p.high, y]] for y, p in enumerate(found)]
    np.testing.assert_allclose(segments_of(ax)[0], expected, rtol=1e-12)
    assert [t.get_text() for t in ax.get_yticklabels()] == [" × ".join(p.names) for p in found]
    top, bottom = ax.get_ylim()[::-1]
    assert top < 0 < bottom  # the strongest on top
    dots = [c for c in ax.collections if isinstance(c, PathCollection)][-1]
    np.testing.assert_allclose(np.asarray(dots.get_offsets()), [[p.value, y] for y, p in enumerate(found)])
    hollow = [tuple(c) == to_rgba("white") for c in np.asarray(dots.get_facecolor())]
    assert hollow == [not p.significant for p in found]
    assert any(hollow)
    assert not all(hollow)
    colours = [tuple(c) for c in np.asarray(dots.get_edgecolor())]
    assert colours == [to_rgba(canvas.POSITIVE if p.value > 0 else canvas.NEGATIVE) for p in found]
    assert "90 % intervals" in ax.get_xlabel()
    assert "q ≤ 0.01" in ax.get_xlabel()


def test_pairs_as_effect_are_in_units_of_the_output(table):
    ax = view.pairs(table, k=4, as_effect=True)
    found = table.top_pairs(4)[0]
    scales = table.gaussian.scales(6)
    size = [float(scales[p.i] * scales[p.j]) for p in found]
    expected = [[[p.low * s, y], [p.high * s, y]] for y, (p, s) in enumerate(zip(found, size, strict=True))]
    np.testing.assert_allclose(segments_of(ax)[0], expected, rtol=1e-9, atol=1e-12)
    assert "units of the output" in ax.get_xlabel()


def test_one_feature_has_no_pairs():
    alone = sh.SmoothHess(lambda x: x[:, 0] ** 2).attribute(torch.ones(1, 1), sigma=0.5, n_calls=100)
    with pytest.raises(ValueError, match="at least two features"):
        view.pairs(alone)


# --- gradient ---------------------------------------------------------------------------------------------------------


def test_gradient_of_a_table_is_bars_with_two_standard_errors(table):
    ax = view.gradient(table, k=4, names=NAMES, example=1)
    slope, stderr = table.gradient[1], table.gradient_stderr[1]
    chosen = (slope * table.gaussian.scales(6)).abs().argsort(descending=True)[:4]
    bars = next(c for c in ax.containers if isinstance(c, BarContainer))
    np.testing.assert_allclose([b.get_width() for b in bars], slope[chosen])
    assert [t.get_text() for t in ax.get_yticklabels()] == [NAMES[i] for i in chosen]
    whiskers = segments_of(ax)[0]
    np.testing.assert_allclose(whiskers[:, 0, 0], slope[chosen] - 2 * stderr[chosen])
    np.testing.assert_allclose(whiskers[:, 1, 0], slope[chosen] + 2 * stderr[chosen])


@pytest.mark.parametrize("shape", [(4, 5), (1, 4, 5), (3, 4, 5)])
def test_gradient_of_an_image_is_a_map_with_channels_summed(shape):
    result = picture(shape)
    shown = view.gradient(result, example=1).images[0]
    expected = result.gradient[1].reshape(-1, 4, 5).sum(0).numpy()
    values = np.asarray(shown.get_array())
    np.testing.assert_allclose(values, expected, rtol=1e-9)
    low, high = shown.get_clim()
    assert high == -low == pytest.approx(np.abs(expected).max())
    assert np.asarray(shown.get_alpha()).shape == (4, 5)


def test_gradient_refuses_no_bars(table):
    with pytest.raises(ValueError, match="k ≥ 1"):
        view.gradient(table, k=0)


# --- image ------------------------------------------------------------------------------------------------------------


def ends_of(ax):
    """Both ends of each line, strongest pair first."""
    lines = [p for p in ax.patches if isinstance(p, FancyArrowPatch)][::-1]
    return lines, [np.asarray(line.get_path().vertices)[[0, -1]] for line in lines]


@pytest.mark.parametrize("shape", [(4, 5), (1, 4, 5), (3, 4, 5)])
def test_image_joins_the_two_pixels_of_each_pair(shape):
    result = picture(shape, 200)
    ax = view.image(result, k=12, beside=False, example=1, significant=False)
    found = result.top_pairs(12)[1]
    lines, ends = ends_of(ax)
    for p, line, (start, stop) in zip(found, lines, ends, strict=True):
        for feature, end in ((p.i, start), (p.j, stop)):
            index = np.unravel_index(feature, shape)
            np.testing.assert_allclose(end, index[:-3:-1], atol=1e-6)  # x is the column, y the row
        assert to_rgba(line.get_edgecolor())[:3] == to_rgba(canvas.POSITIVE if p.value > 0 else canvas.NEGATIVE)[:3]
        assert line.get_linestyle() in (("-", "solid") if p.significant else ("--", "dashed"))


def test_image_stands_beside_the_plain_input():
    result = picture((4, 5), 200)
    ax = view.image(result, k=3, numbered=True)
    plain, under = ax.images
    np.testing.assert_array_equal(np.asarray(plain.get_array()), result.inputs[0].numpy())
    shift = under.get_extent()[0] - plain.get_extent()[0]
    assert shift > 5
    _, ends = ends_of(ax)
    pair = result.top_pairs(1)[0][0]
    np.testing.assert_allclose(ends[0][0], (pair.i % 5 + shift, pair.i // 5), atol=1e-6)
    assert [t.get_text() for t in ax.texts if t.get_text().isdigit()] == ["1", "2", "3"]


def test_image_of_segments_joins_their_middles():
    mask = torch.tensor([[0, 0, 1, 1, 1]] * 2 + [[2, 2, 2, 2, 3]] * 2).expand(3, 4, 5)
    ax = view.image(picture((3, 4, 5)).groups(mask), k=6, beside=False, significant=False)
    middles = {(0.5, 0.5), (3.0, 0.5), (1.5, 2.5), (4.0, 2.5)}
    lines, ends = ends_of(ax)
    assert len(lines) == 6
    assert {(round(float(x), 6), round(float(y), 6)) for pair in ends for x, y in pair} == middles


def test_normalised_colours_are_brought_back_into_range():
    result = picture((3, 4, 5), 100)
    odd = sh.SmoothHess(network((3, 4, 5))).attribute(result.inputs * 6 - 3, sigma=0.5, n_calls=100)
    shown = np.asarray(view.image(odd).images[0].get_array())
    assert shown.shape == (4, 5, 3)
    assert shown.min() == 0
    assert shown.max() == 1


def test_image_refuses_what_is_no_image(table):
    with pytest.raises(ValueError, match=r"inputs must be images of shape .* got \(6,\)"):
        view.image(table)


def test_gradient_of_groups(table):
    groups = table.groups(torch.tensor([0, 0, 1, 1, 2, 2]))
    for names in (None, ["a", "b", "c"]):
        ax = view.gradient(groups, names=names)
        assert sorted(bar.get_width() for bar in ax.patches) == pytest.approx(sorted(groups.gradient[0].tolist()))
