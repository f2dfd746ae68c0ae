"""What holds for every kind of figure: whose Axes, which errors, what stays untouched, words that fit."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import smoothhess as sh
from smoothhess import baselines, view
from smoothhess.result.exact import Attribution
from tests.view.pictures import draw, network, picture, table

pytestmark = pytest.mark.usefixtures("plain_figures")

KINDS = ["heatmap", "pairs", "gradient", "image", "graph", "segment", "diagonal", "eigen"]


@pytest.fixture(scope="module")
def small():
    return picture((4, 5))


@pytest.fixture(scope="module")
def curve():
    return sh.SmoothHess(network((12,))).attribute(torch.rand(2, 12).double(), sigma=0.5, n_calls=96)


def test_every_function_is_a_kind_or_takes_more_than_a_result():
    assert set(view.KINDS) == {*KINDS, "series", "text"}
    assert set(view.__all__) == {*view.KINDS, "plot", "along", "sweep_curves"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_draws_into_the_axes_it_is_given(small, kind):
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert small.plot(kind, ax=right, example=1) is right
    assert not left.has_data()
    assert right.has_data()
    draw(right)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_results_and_attributions_draw_without_a_word_about_noise(small, kind):
    exact = baselines.softplus(network((4, 5)), small.inputs, beta=4.0)
    h = torch.eye(20).double().roll(1, 0)
    index = Attribution.make(
        small.inputs, small.output, small.gradient, ((h + h.mT) / 2).expand(2, 20, 20), method="H²"
    )
    for result in (exact, index):
        ax = result.plot(kind, example=1)
        draw(ax)
        said = " ".join(t.get_text() for t in ax.figure.findobj(match=lambda a: hasattr(a, "get_text")))
        assert "noise (|z|" not in said
        assert "relative error" not in said
    if kind in ("heatmap", "segment", "diagonal"):
        assert "H²" in said
        assert "raising" not in said


@pytest.mark.parametrize("kind", [*KINDS, "series"])
def test_wrong_examples_and_axes_are_refused(small, curve, kind):
    result = curve if kind == "series" else small
    with pytest.raises(ValueError, match="there is no example 2 of 2. Pass 0 to 1"):
        result.plot(kind, example=2)
    with pytest.raises(ValueError, match="example must be the index of one example, got 'first'"):
        result.plot(kind, example="first")
    with pytest.raises(ValueError, match="ax must be matplotlib Axes to draw into, got Figure"):
        result.plot(kind, ax=Figure())
    with pytest.raises(ValueError, match="result must be the return value of attribute, got list"):
        view.KINDS[kind]([result])


@pytest.mark.parametrize("kind", ["heatmap", "pairs", "gradient", "graph", "segment", "diagonal", "eigen"])
@pytest.mark.parametrize("names", [["a", "b"], "twenty letters long.."])
def test_names_must_be_one_per_feature(small, kind, names):
    with pytest.raises(ValueError, match="one name per feature, 20"):
        small.plot(kind, names=names)


@pytest.mark.parametrize("kind", ["histogram", None, ["pairs"]])
def test_kinds_that_do_not_exist_are_refused(small, kind):
    with pytest.raises(ValueError, match="kind must be one of 'graph', 'segment',"):
        small.plot(kind)


@pytest.mark.parametrize("kind", ["image", "segment", "graph"])
def test_tables_are_no_images(kind):
    with pytest.raises(ValueError, match=r"inputs must be images of shape .* got \(6,\). Use kind"):
        table().plot(kind, **({"over": "image"} if kind == "graph" else {}))


@pytest.mark.parametrize("limit", [0.0, float("nan")])
@pytest.mark.parametrize("kind", ["heatmap", "gradient", "segment", "diagonal", "eigen"])
def test_limits_are_positive(small, kind, limit):
    with pytest.raises(ValueError, match="limit must be positive"):
        small.plot(kind, limit=limit)


@pytest.mark.parametrize("kind", ["heatmap", "gradient", "segment", "diagonal", "eigen"])
def test_colours_are_white_at_zero_and_symmetric(small, kind):
    ax = small.plot(kind)
    shown = ax.images[-1]
    low, high = shown.get_clim()
    assert high == -low > 0
    assert high == pytest.approx(np.abs(np.ma.filled(shown.get_array(), 0.0)).max(), rel=1e-6) or kind == "eigen"
    assert min(shown.cmap(0.5)[:3]) > 0.95
    assert small.plot(kind, limit=7.0).images[-1].get_clim() == (-7.0, 7.0)


def test_figures_leave_pyplot_and_its_settings_alone():
    # reading rcParams["backend"] would itself import pyplot
    code = (
        "import dataclasses, sys, torch, matplotlib as mpl, smoothhess as sh; from smoothhess import view;"
        "settings = lambda: {k: mpl.rcParams[k] for k in mpl.rcParams if k != 'backend'}; before = settings();"
        "f = lambda x: x.flatten(1).prod(1);"
        "r = sh.SmoothHess(f).attribute(torch.ones(1, 3, 3), sigma=0.1, n_calls=96);"
        "figures = {k: r.plot(k).figure for k in view.KINDS if k not in ('series', 'text')};"
        "t = sh.SmoothHess(f).attribute(torch.ones(1, 4), sigma=0.5, n_calls=96);"
        "figures |= {'series': t.plot('series').figure, 'along': view.along(f, r).figure};"
        "figures['text'] = dataclasses.replace(t, feature_kind='token').plot('text').figure;"
        "s = sh.sweep(f, torch.ones(1, 4), [.1, .3], n_calls=96);"
        "figures['curves'] = view.sweep_curves(s).figure;"
        "[figures[k].savefig('/dev/null', format='png', dpi=40) for k in ('graph', 'pairs', 'curves')];"
        "print(settings() == before, 'matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "False"], done.stderr
