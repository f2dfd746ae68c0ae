"""Texts on pages and in figures: the numbers are those of the result, tokens are readable, and nothing is a pixel."""

import re

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle

import smoothhess as sh
from smoothhess.result.shown_estimate import error_text
from smoothhess.view import captions, token_text
from smoothhess.view.report import html, report
from smoothhess.view.report import payload as payload_of
from smoothhess.view.report.payload import PageOptions
from tests.view import texts
from tests.view.pictures import draw

READABLE = ["<s>", "Not", "so", "un", "believ", "able", ",", "so", "good", "."]
LABELS = ["<s>", "Not", "so (2)", "un", "believ", "able", ",", "so (7)", "good", "."]


def payload(result, **options):
    return payload_of(result, PageOptions(**options))


def floats(text):
    import base64

    return np.frombuffer(base64.b64decode(text), "<f4")


# --- markers of sub-words ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["Not", "Ġso", "Ġgood", ".", "Ċ", "ĊNext"], "Not so good. ↵\nNext"),
        (["▁Not", "▁un", "believ", "able", ",", "▁no"], "Not unbelievable, no"),
        (["[CLS]", "not", "un", "##believ", "##able", "!", "[SEP]"], "[CLS] not unbelievable! [SEP]"),
        (["Not", " so", " good", "."], "Not so good."),
        (["<s>", "Hello", "Ġworld", "</s>"], "<s> Hello world </s>"),
        (["ĠÃ©tÃ©", "Ġ", "Ġâ"], "été ␣ �"),
        (["##", "#", "$x$", ""], "## # $x$ ␣"),
        (["<|startoftext|>", "not</w>", "un", "believ", "able</w>", "!</w>"], "<|startoftext|> not unbelievable!"),
        (["not", "un@@", "believ@@", "able", "."], "not unbelievable."),
        (["▁Not", "<0x0A>", "▁so"], "Not ↵\nso"),
        (["Not", "Ġ⊙", "Ġ→Ċ"], "Not ⊙ →"),
        ([], ""),
    ],
)
def test_markers_become_spaces_or_joins(names, expected):
    found = token_text.readable(names)
    assert len(found) == len(names)
    assert "".join(token.gap + token.text for token in found) == expected


def test_repeated_tokens_have_their_index():
    assert token_text.labels(texts.TOKENS) == LABELS


# --- the kind of the features -----------------------------------------------------------------------------------------


def test_words_are_those_of_tokens_in_every_space():
    gates = texts.result()
    embedded = texts.result(space="embedding", sigma=0.05, n_calls=320)
    for result in (gates, embedded):
        assert captions.noun(result) == "token"
        assert captions.is_text(result)
        assert payload(result)["kind"] == "text"
        said = " ".join([captions.unit_words(result), captions.noise_sentence(result, "text"), html(result)])
        for kind in ("heatmap", "pairs", "graph", "gradient", "diagonal", "eigen", "text"):
            axes = result.plot(kind).figure.axes
            said += " ".join(t.get_text() for ax in axes for t in ax.findobj(lambda a: hasattr(a, "get_text")))
        assert not re.search(r"\b(pixels?|segments?|given direction)\b", said)
        assert "gate" in said
    assert "embeddings" in captions.noise_sentence(embedded, "text")


def test_groups_of_consecutive_tokens_are_a_text_and_others_a_table():
    result = texts.result()
    words = result.groups(torch.tensor([0, 1, 2, 3, 3, 3, 4, 5, 6, 7]))
    content = payload(words, names=["<s>", "Not", "so", "unbelievable", ",", "so", "good", "."])
    assert (content["kind"], content["word"], content["words"]) == ("text", "group", "groups")
    assert "sum over all pairs of their tokens" in content["noise"][0]
    mixed = payload(result.groups(torch.tensor([0, 1] * 5)))
    assert (mixed["kind"], mixed["examples"][0]["names"]) == ("table", ["group 0", "group 1"])
    assert mixed["examples"][0]["values"] is None


def test_patches_are_a_table():
    patches = torch.nn.Conv2d(1, 6, 2, 2)

    class Pictures(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = torch.nn.Sequential(patches, torch.nn.Flatten(2), Swap())

        def forward(self, x):
            return self.patches(x).tanh().prod(1).sum(1)

    class Swap(torch.nn.Module):
        def forward(self, x):
            return x.mT

    result = sh.TokenSmoothHess(Pictures(), "patches").attribute(torch.rand(1, 1, 4, 4), sigma=0.1, n_calls=40)
    content = payload(result)
    assert (content["kind"], content["word"], content["words"]) == ("table", "patch", "patches")
    assert content["title"] == "Which patches act together for the output?"
    with pytest.raises(ValueError, match="not the tokens of a text"):
        result.plot("text")


def test_other_results_are_no_text():
    plain = sh.SmoothHess(lambda x: x[:, 0] * x[:, 1]).attribute(torch.zeros(1, 3), sigma=0.5, n_calls=40)
    with pytest.raises(ValueError, match="kind='text' is for tokens"):
        payload(plain, kind="text")
    with pytest.raises(ValueError, match="does not fit this result"):
        payload(texts.result(), kind="image")
    assert payload(texts.result(), kind="table")["kind"] == "table"


# --- the page ---------------------------------------------------------------------------------------------------------


def test_all_pairs_of_the_page_are_of_the_unbiased_estimate():
    result = texts.result()
    assert result.shrink
    content, unbiased = payload(result), result.unshrunk()
    found, triangle = content["results"][0][0], np.triu_indices(10)
    assert floats(found["value"]) == pytest.approx(unbiased.hessian[0].numpy()[triangle], rel=1e-6)
    assert floats(found["stderr"]) == pytest.approx(unbiased.stderr()[0].numpy()[triangle], rel=1e-6)
    assert found["eigen"]["values"] == pytest.approx(result.eigh(6).values[0].tolist())  # of the matrix as a whole
    error = next(reading for reading in found["quality"] if reading["name"] == "Relative error")
    assert error["figure"] == error_text(float(unbiased.relative_error))
    assert "denoised" not in error["meaning"]
    assert ["Estimate", "unbiased"] in [list(row) for row in content["made"][0][0]]
    for pair in unbiased.top_pairs(45)[0]:
        place = pair.i * 10 - pair.i * (pair.i - 1) // 2 + pair.j - pair.i
        assert floats(found["q"])[place] == pytest.approx(pair.q_value, rel=1e-5)


def test_each_text_has_its_own_tokens():
    names = (tuple("abcdefghij"), tuple(f"Ġ{c}" for c in "aacdefghij"))
    first, second = payload(texts.result(batch=2, names=names))["examples"]
    assert first["names"] == list("abcdefghij")
    assert second["names"][:3] == ["a (0)", "a (1)", "c"]
    assert second["tokens"][1] == ["a", " "]
    unnamed = payload(texts.result(batch=2, names=None))["examples"][1]
    assert unnamed["names"][3] == "token 3"
    given = payload(texts.result(), names=list("klmnopqrst"))["examples"][0]
    assert given["names"] == list("klmnopqrst")


def test_a_text_of_512_tokens_has_a_page(tmp_path):
    result = texts.result(count=512, n_calls=1024, control=None)
    path = report(result, tmp_path / "long.html")
    assert path.stat().st_size < 6_000_000


# --- the figure -------------------------------------------------------------------------------------------------------


def boxes(ax):
    return [patch for patch in ax.patches if isinstance(patch, Rectangle)]


def words(ax):
    return [label for label in ax.texts if label.get_gid() == "token"]


def redness(ax):
    return np.array([box.get_facecolor()[0] - box.get_facecolor()[2] for box in boxes(ax)])


def darkness(ax):
    return np.array([1 - np.mean(box.get_facecolor()[:3]) for box in boxes(ax)])


def test_the_figure_shows_the_interactions_of_the_source():
    result = texts.result()
    ax = result.plot("text", source="good", k=3)
    draw(ax)
    assert [label.get_text() for label in words(ax)] == READABLE
    row = result.unshrunk().row(8)
    clear = (row.value[0].abs() >= 2 * row.stderr[0]).numpy()
    value = row.value[0].numpy().copy()
    value[8] = 0
    strong = clear & (np.abs(value) > 0.1 * np.abs(value).max())
    assert strong.any()
    assert (np.sign(redness(ax)[strong]) == np.sign(value[strong])).all()
    assert darkness(ax).argmax() == np.abs(value).argmax()
    assert darkness(ax)[8] == 0
    assert boxes(ax)[8].get_edgecolor() == (0, 0, 0, 1)
    assert "“good”" in ax.get_title(loc="left")


def test_arcs_are_the_strongest_significant_pairs():
    result = texts.result()
    ax = result.plot("text", k=4)
    expected = [p for p in result.unshrunk().top_pairs(4)[0] if p.significant]
    arcs = [patch for patch in ax.patches if isinstance(patch, PathPatch)]
    middles = np.array([box.get_x() + box.get_width() / 2 for box in boxes(ax)])
    ends = [{int(np.abs(middles - x).argmin()) for x in arc.get_path().vertices[[0, -1], 0]} for arc in arcs]
    assert expected
    assert ends == [{p.i, p.j} for p in reversed(expected)]
    none = sh.TokenSmoothHess(lambda ids: texts.model().wte(ids).sum((1, 2)), texts.model().wte)
    additive = none.attribute(texts.ids(), sigma=0.2, n_calls=40)
    assert "no significant pair" in " ".join(t.get_text() for t in additive.plot("text").texts)


def test_arcs_over_a_text_of_one_line_are_higher_for_distant_tokens():
    words = texts.model().wte
    product = lambda e: (e[:, 0] * (e[:, 1] + e[:, 9])).sum(1)
    result = sh.TokenSmoothHess(lambda ids: product(words(ids)), words).attribute(texts.ids(), sigma=0.2, n_calls=200)
    ax = result.plot("text", k=4)
    draw(ax)
    arcs = [patch.get_path().vertices for patch in ax.patches if isinstance(patch, PathPatch)]
    rise = sorted((float(np.ptp(arc[:, 0])), 0.75 * float(np.ptp(arc[:, 1]))) for arc in arcs)  # of Bézier curves
    assert len({round(box.get_y(), 3) for box in boxes(ax)}) == 1
    assert len(rise) == 2
    assert rise[1][1] > 1.5 * rise[0][1]
    assert min(box.get_y() for box in boxes(ax)) - rise[1][1] > min(ax.get_ylim())


def test_the_figure_of_gradients_and_wrapped_lines():
    result = texts.result()
    figure = Figure(figsize=(2.2, 3))
    ax = figure.add_subplot()
    assert result.plot("text", by="gradient", ax=ax) is ax
    draw(ax)
    tops = {round(box.get_y(), 3) for box in boxes(ax)}
    assert len(tops) > 1  # wrapped
    for box, label in zip(boxes(ax), words(ax), strict=True):
        inner, outer = label.get_window_extent(), box.get_window_extent()
        assert inner.width <= 1.05 * outer.width
    gradient = result.gradient[0].numpy()
    assert darkness(ax).argmax() == np.abs(gradient).argmax()
    assert (np.sign(redness(ax)) == np.sign(gradient)).all()


def test_tokens_of_a_figure_are_not_read_as_formulas():
    names = ["$", "Ġ$x_1", "$", "a^b$", "\\\\frac", "_", "Ġ{", "}", "%", "#"]
    ax = texts.result().plot("text", source=1, names=names)
    draw(ax)
    assert words(ax)[1].get_text() == r"\$x_1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "size"}, "by must be"),
        ({"source": "nothing"}, "no feature named"),
        ({"source": 10}, "not among the 10 features"),
        ({"k": 0}, "k ≥ 1"),
        ({"names": ["a"]}, "one name per feature, 10"),
    ],
)
def test_wrong_options_of_the_figure_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        texts.result().plot("text", **options)


def test_figures_take_the_names_of_the_result():
    ax = texts.result().plot("heatmap")
    assert [label.get_text() for label in ax.get_yticklabels()] == LABELS
    pairs = texts.result().plot("pairs", k=1)
    [(i, j)] = [(p.i, p.j) for p in texts.result().top_pairs(1)[0]]
    assert [label.get_text() for label in pairs.get_yticklabels()] == [f"{LABELS[i]} × {LABELS[j]}"]
