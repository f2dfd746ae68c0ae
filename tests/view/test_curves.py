"""Sweeps over σ, and f beside its surrogate."""

import numpy as np
import pytest
import torch
from torch import nn

import smoothhess as sh
from smoothhess import baselines, view
from smoothhess.result.exact import Attribution
from smoothhess.view.figures import canvas
from tests.view.pictures import NAMES, dots, draw, network, one_pair, table

pytestmark = pytest.mark.usefixtures("plain_figures")


@pytest.fixture(scope="module")
def scales():
    inputs = torch.tensor([[0.1] * 6, [0.3, 0.2, -0.1, 0.0, 0.1, 0.2]], dtype=torch.float64)
    return sh.sweep(one_pair, inputs, [0.4, 0.1, 0.8], n_calls=96)


@pytest.mark.parametrize("as_effect", [False, True])
@pytest.mark.parametrize("example", [0, 1])
def test_curves_are_the_entries_with_their_intervals(scales, example, as_effect):
    ax = view.sweep_curves(
        scales, pairs=[(0, 1), ("pulse", "dose")], names=NAMES, example=example, level=0.9, as_effect=as_effect
    )
    order = [1, 0, 2]  # by σ
    for n, (i, j) in enumerate([(0, 1), (3, 1)]):
        curve = scales.entry(i, j)
        factor = np.array([0.1, 0.4, 0.8]) ** 2 if as_effect else np.ones(3)
        x, y = ax.lines[n].get_data()
        np.testing.assert_allclose(x, [0.1, 0.4, 0.8])
        np.testing.assert_allclose(y, curve.value[order, example].numpy() * factor)
        band = [c for c in ax.collections if c not in dots(ax)][n].get_paths()[0].vertices
        low, high = (t[order, example].numpy() * factor for t in curve.interval(0.9))
        for k in range(3):
            ends = band[np.isclose(band[:, 0], x[k]), 1]
            assert (ends.min(), ends.max()) == pytest.approx((low[k], high[k]), abs=1e-12)
        strong, weak = (len(c.get_offsets()) for c in dots(ax)[2 * n : 2 * n + 2])
        z = curve.value[:, example].abs() / curve.stderr[:, example]
        assert (strong, weak) == (int((z >= 2).sum()), int((z < 2).sum()))
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["age × dose", "pulse × dose"]
    assert ax.get_xscale() == "log"
    draw(ax)


def test_within_noise_is_fainter_and_hollow(scales):
    ax = view.sweep_curves(scales, pairs=[(2, 3)])
    strong, weak = dots(ax)
    assert weak.get_alpha() < 0.5
    assert strong.get_alpha() == 1
    assert len(weak.get_offsets())
    assert "within noise" in " ".join(t.get_text() for t in ax.texts).replace("\n", " ")


def test_without_pairs_those_of_the_middle_scale_are_taken(scales):
    ax = view.sweep_curves(scales, k=2, names=NAMES)
    expected = [" × ".join(p.names) for p in scales[1].top_pairs(2, NAMES)[0]]
    assert [t.get_text() for t in ax.get_legend().get_texts()] == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": [(0, 9)]}, "source 9 is not among the 6 features"),
        ({"pairs": [(0, 1, 2)]}, "a list of pairs of features"),
        ({"pairs": []}, "a list of pairs of features"),
        ({"pairs": ["ab"]}, "a list of pairs of features"),
        ({"pairs": [("age", "dose")]}, "no feature named 'age': names were not given"),
        ({"example": 5}, "no example 5 of 2"),
        ({"names": ["a"]}, "one name per feature, 6, got 1"),
        ({"k": 0}, "k ≥ 1 pairs"),
        ({"ax": "here"}, "ax must be matplotlib Axes"),
    ],
)
def test_sweeps_refuse_what_is_not_there(scales, options, message):
    with pytest.raises(ValueError, match=message):
        view.sweep_curves(scales, **options)


def test_a_list_of_results_is_no_sweep(scales):
    with pytest.raises(ValueError, match="sweep must be the return value of smoothhess.sweep, got list"):
        view.sweep_curves(list(scales))


# --- along ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", [0, 1])
def test_lines_are_f_and_both_surrogates(example):
    result = table()
    v = torch.tensor([1.0, -2.0, 0.5, 0.0, 0.0, 1.0]).double()
    ax = view.along(one_pair, result, v, reach=1.5, n_points=31, example=example)
    t = torch.linspace(-1.5, 1.5, 31, dtype=torch.float64)
    points = result.inputs[example] + t[:, None] * v / v.norm()
    expected = [one_pair(points), *(result[example].taylor(o)(points[None])[0] for o in (1, 2))]
    for line, values in zip(ax.lines, expected, strict=False):
        np.testing.assert_allclose(line.get_xdata(), t)
        np.testing.assert_allclose(line.get_ydata(), values.numpy(), rtol=1e-9)
    rms = [float((expected[o] - expected[0]).square().mean().sqrt()) for o in (1, 2)]
    said = " ".join(x.get_text() for x in ax.texts).replace("\n", " ")
    assert f"first order {rms[0]:.3g}, second order {rms[1]:.3g}" in said
    sigma = float((result.gaussian.scales(6) * v / v.norm()).norm())
    shade = ax.patches[0]
    assert (shade.get_x(), shade.get_width()) == pytest.approx((-sigma, 2 * sigma))
    draw(ax)


def test_own_direction_is_the_one_of_largest_curvature():
    result = table()
    ax = view.along(one_pair, result)
    v = result[0].eigh(1).vectors[0, 0]
    reach = 4 * float((result.gaussian.scales(6) * v).norm())
    assert ax.get_xlim() == pytest.approx((-reach, reach))
    assert "direction of largest curvature" in ax.get_title(loc="left").replace("\n", " ")


def test_target_and_arguments_follow_the_example():
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()

    def f(x, scale):
        return net(x) * scale[:, None]

    inputs, scale = torch.rand(2, 4).double(), torch.tensor([1.0, 5.0]).double()
    result = sh.SmoothHess(f).attribute(inputs, [2, 0], scale, sigma=0.3, n_calls=96)
    ax = view.along(f, result, torch.ones(4), additional_forward_args=scale[1:], example=1, n_points=3, reach=1.0)
    with torch.no_grad():
        expected = net(inputs[1] + torch.linspace(-1, 1, 3).double()[:, None] * 0.5)[:, 0] * 5
    np.testing.assert_allclose(ax.lines[0].get_ydata(), expected.numpy())
    with pytest.raises(ValueError, match="Pass the model that was explained"):
        view.along(f, result, torch.ones(4), additional_forward_args=scale[:1], example=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"direction": torch.ones(5)}, r"direction must have the shape of one input, \(6,\), got \(5,\)"),
        ({"direction": torch.zeros(6)}, "finite and not zero"),
        ({"direction": torch.full((6,), torch.nan)}, "finite and not zero"),
        ({"reach": -1.0}, "reach must be positive"),
        ({"n_points": 1}, "n_points must be at least 2"),
        ({"example": 2}, "no example 2 of 2"),
        ({"ax": 3}, "ax must be matplotlib Axes"),
    ],
)
def test_along_refuses_what_makes_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        view.along(one_pair, table(200), **options)
    with pytest.raises(ValueError, match="forward_func must be the model"):
        view.along("model", table(200))


def test_only_derivatives_have_a_surrogate():
    x = torch.rand(1, 6).double()
    index = Attribution.make(x, one_pair(x), x, torch.eye(6).double()[None], method="some index")
    with pytest.raises(ValueError, match="is an attribution, not a Hessian"):
        view.along(one_pair, index)
    with pytest.raises(ValueError, match="no Taylor surrogate"):
        view.along(one_pair, table(200).groups(torch.tensor([0, 0, 1, 1, 2, 2])))
    exact = baselines.softplus(network((6,)), x, beta=2.0)
    ax = view.along(network((6,)), exact, reach=0.5)
    assert not ax.patches  # nothing was smoothed, so no noise is shaded
    assert canvas.PALETTE[1] == ax.lines[2].get_color()
