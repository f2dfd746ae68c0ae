"""Words in the figures: they fit, at the width of a page and of a column, and are about what is there."""

import sys

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from smoothhess import view
from smoothhess.view.figures import canvas, title_layout
from tests.view.pictures import NAMES, draw, picture, segments, table


@pytest.fixture(scope="module")
def result():
    return table(96)


@pytest.fixture(scope="module")
def small():
    return picture((4, 5), 40)


@pytest.mark.parametrize("width", [3.3, 6.4])
@pytest.mark.parametrize("kind", ["heatmap", "pairs", "gradient", "diagonal", "eigen"])
def test_words_stay_inside_the_figure_at_both_widths(result, kind, width):
    figure = canvas.new_figure(width, 4.0)
    ax = result.plot(kind, names=[f"a rather long name of {n}" for n in NAMES], ax=figure.add_subplot())
    draw(ax)
    edges = figure.bbox
    for text in [ax.title, ax._left_title, ax.xaxis.label, *ax.texts, *ax.get_yticklabels()]:
        if text.get_text():
            box = text.get_window_extent()
            assert box.x0 >= edges.x0 - 2, text
            assert box.x1 <= edges.x1 + 2, text


def test_wrapped_lines_fit_and_lose_nothing():
    text = "raising the pixel by itself   ←\u00a0less\u00a0·\u00a0more\u00a0→   than the sum"
    for wrap in (title_layout.wrapped, title_layout.balanced):
        lines = wrap(text, 1.5, 8.0).split("\n")
        assert " ".join(lines).split() == text.split()
        assert all(title_layout.text_width(line, 8.0) <= 1.5 for line in lines)
        assert any("←\u00a0less\u00a0·\u00a0more\u00a0→" in line for line in lines)


def test_a_new_caption_takes_the_place_of_all_words_above(result):
    ax = result.plot("pairs")
    assert ax.get_title(loc="left")
    title_layout.caption(ax, "mine")
    assert ax.get_title(loc="left") == "mine"
    assert not [t for t in ax.texts if t.get_text() and t.get_gid()]


def test_groups_of_an_image_are_called_segments(result):
    grouped = picture((3, 4, 5), 40).groups(segments())
    assert grouped.plot("heatmap").get_title(loc="left") == "Which segments act together"
    assert result.groups(torch.tensor([0, 0, 1, 1, 2, 2])).plot("pairs").get_xlabel().count("every feature of each")


def test_axes_of_part_of_a_figure_will_do(result):
    left, right = Figure(figsize=(8, 3)).subfigures(1, 2)
    for part in (left, right):
        ax = result.plot("heatmap", ax=part.subplots())
        assert isinstance(ax, Axes)
    left.figure.savefig("/dev/null", format="png")


def test_a_result_can_be_made_without_matplotlib(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for kind in set(view.KINDS) - {"series"}:
        with pytest.raises(ImportError, match=r"pip install 'smoothhess\[view\]'"):
            small.plot(kind)
