"""Lines between features: on a circle and over the image."""

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgba
from matplotlib.patches import FancyArrowPatch, PathPatch

import smoothhess as sh
from smoothhess import view
from smoothhess.view.figures import canvas, pair_lines
from tests.view.pictures import NAMES, dots, picture, segments, table

pytestmark = pytest.mark.usefixtures("plain_figures")


def looks(patch, pair, found):
    colour = canvas.POSITIVE if pair.value > 0 else canvas.NEGATIVE
    assert to_rgba(patch.get_edgecolor())[:3] == to_rgba(colour)[:3]
    assert patch.get_linestyle() in (("-", "solid") if pair.significant else ("--", "dashed"))
    noise = abs(pair.value) < 2 * pair.stderr
    assert patch.get_alpha() == (pair_lines.FAINT_LINE if noise else 0.9)
    strongest = max(abs(p.effect) for p in found)
    assert patch.get_linewidth() == pytest.approx(0.8 + 2.4 * abs(pair.effect) / strongest)


@pytest.mark.parametrize("example", [0, 1])
def test_circle_joins_the_names_of_each_pair(example):
    result = table(120, design="iid", control=None)
    ax = view.graph(result, k=15, names=NAMES, example=example, significant=False)
    found = result.top_pairs(15, NAMES)[example]
    z = [abs(p.value) / p.stderr for p in found]
    assert any(1 < x < 2 for x in z)
    assert any(x > 2 for x in z)
    spots = {t.get_text(): np.array(t.xy) for t in ax.texts if t.get_text() in NAMES}
    assert set(spots) == {n for p in found for n in p.names}
    np.testing.assert_allclose([np.hypot(*spot) for spot in spots.values()], 1)
    lines = [p for p in ax.patches if isinstance(p, PathPatch)][::-1]
    for pair, line in zip(found, lines, strict=True):
        ends = line.get_path().vertices[[0, -1]]
        np.testing.assert_allclose(ends, [spots[n] for n in pair.names], atol=1e-12)
        looks(line, pair, found)
    assert any(line.get_alpha() < 0.9 for line in lines)  # else nothing is tested about noise
    said = [t.get_text() for t in ax.get_legend().get_texts()]
    assert "faint: within noise (|z| < 2)" in said
    assert "together more than apart (H > 0)" in said


def test_only_significant_pairs_are_drawn_unless_all_are_asked_for():
    result = table(120, design="iid", control=None)
    found = [p for p in result.top_pairs(15, NAMES)[0] if p.significant]
    assert 0 < len(found) < 15
    ax = view.graph(result, k=15, names=NAMES)
    assert len([p for p in ax.patches if isinstance(p, PathPatch)]) == len(found)
    assert {t.get_text() for t in ax.texts} & set(NAMES) == {n for p in found for n in p.names}
    assert not any("not significant" in t.get_text() for t in ax.get_legend().get_texts())
    image = picture((4, 5), 8, control=None)
    assert not any(p.significant for p in image.top_pairs(10)[0])
    for ax in (view.graph(image), view.graph(image, over="image")):
        assert ax.get_title(loc="left") == "No significant pair of pixels"
        assert not ax.patches
    assert not view.image(image).patches


def test_dots_say_what_a_feature_does_by_itself():
    result = table(200)
    ax = view.graph(result, k=15, names=NAMES, significant=False)
    spots = {t.get_text(): np.array(t.xy) for t in ax.texts if t.get_text() in NAMES}
    (shown,) = dots(ax)
    slope, stderr = result.gradient[0], result.gradient_stderr[0]
    strength = (slope * result.gaussian.scales(6)).abs()
    for place, colour, area in zip(shown.get_offsets(), shown.get_facecolors(), shown.get_sizes(), strict=True):
        (i,) = (i for i, n in enumerate(NAMES) if n in spots and np.allclose(spots[n], place))
        noise = bool(slope[i].abs() < 2 * stderr[i])
        expected = "#bdbdbd" if noise else canvas.POSITIVE if slope[i] > 0 else canvas.NEGATIVE
        assert tuple(colour) == to_rgba(expected)
        assert area == pytest.approx(18 + 60 * float(strength[i] / strength.max()))


def test_over_an_image_segments_are_joined_at_their_middles():
    grouped = picture((3, 4, 5)).groups(segments())
    ax = view.graph(grouped, over="image", k=6, significant=False, names=["sky", "sun", "sea", "sand"])
    middles = np.array([(0.5, 0.5), (3.0, 0.5), (1.5, 2.5), (4.0, 2.5)])
    found = grouped.top_pairs(6)[0]
    lines = [p for p in ax.patches if isinstance(p, FancyArrowPatch)][::-1]
    for pair, line in zip(found, lines, strict=True):
        np.testing.assert_allclose(line.get_path().vertices[[0, -1]], middles[[pair.i, pair.j]], atol=1e-6)
        looks(line, pair, found)
    tags = {t.get_text(): t.xy for t in ax.texts if t.get_text() in ("sky", "sun", "sea", "sand")}
    assert tags["sand"] == (4.0, 2.5)
    np.testing.assert_allclose(np.asarray(ax.images[0].get_array()), grouped.inputs[0].permute(1, 2, 0).numpy())


def test_graph_refuses_what_it_cannot_draw():
    with pytest.raises(ValueError, match="over must be None, for a circle, or 'image', got 'map'"):
        view.graph(table(40), over="map")
    alone = sh.SmoothHess(lambda x: x[:, 0] ** 2).attribute(torch.ones(1, 1), sigma=0.5, n_calls=96)
    with pytest.raises(ValueError, match="at least two features"):
        view.graph(alone)
    with pytest.raises(ValueError, match="k ≥ 1"):
        view.graph(table(40), k=0)
