"""The page holds the numbers of the result, is whole or not there, and takes the user's text for text."""

import base64
import io
import json
import re
import sys
from datetime import date
from html.parser import HTMLParser
from importlib.resources import files
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import smoothhess as sh
from smoothhess import baselines
from smoothhess.estimate import student_t
from smoothhess.result.exact import Attribution, Exact
from smoothhess.result.shown_estimate import error_text
from smoothhess.view import report as page_module
from smoothhess.view.report import encoding, feature_layout, html, quality_levels, report
from smoothhess.view.report.payload import PageOptions
from tests.view import texts

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "{{payload}} & <!--",
    "'\"`${x}\u2028%{y}",
]


def one_pair(x):
    """Features 0 and 1 interact, the others are additive."""
    return torch.relu(x[:, 0] - x[:, 1]) * 2 + torch.relu(x[:, 2:]).sum(1)


@pytest.fixture(scope="module")
def table():
    inputs = torch.tensor([[0.0] * 4, [0.3, 0.2, -0.1, 0.1]], dtype=torch.float64)
    return sh.SmoothHess(one_pair).attribute(inputs, gaussian=sh.Diagonal([0.5, 1, 2, 1]), n_calls=400)


def network(shape, outputs=1, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        d = int(np.prod(shape))
        return nn.Sequential(nn.Flatten(), nn.Linear(d, 24), nn.ReLU(), nn.Linear(24, outputs)).double()


def result_of(shape, batch=1, n_calls=200, **options):
    inputs = torch.rand(batch, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return sh.SmoothHess(network(shape)).attribute(inputs, sigma=0.5, n_calls=n_calls, **options)


def payload(result, **options):
    return page_module.payload(result, PageOptions(**options))


def floats(text):
    return np.frombuffer(base64.b64decode(text), "<f4")


def unpacked(text, d):
    """A packed triangle as the symmetric matrix it is."""
    matrix = np.zeros((d, d), np.float32)
    matrix[np.triu_indices(d)] = floats(text)
    return np.triu(matrix) + np.triu(matrix, 1).T


def labels_of(example):
    runs = np.frombuffer(base64.b64decode(example["labels"]), "<u4").reshape(-1, 2)
    return np.repeat(runs[:, 1], runs[:, 0])


def inside(text):
    """The payload of a written page, as a browser's parser finds it."""

    class Finder(HTMLParser):
        found, reading, scripts = "", False, 0

        def handle_starttag(self, tag, attrs):
            self.scripts += tag == "script"
            self.reading = ("id", "payload") in attrs

        def handle_data(self, data):
            if self.reading:
                self.found += data

        def handle_endtag(self, tag):
            self.reading = False

    finder = Finder()
    finder.feed(text)
    return json.loads(finder.found), finder.scripts


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("b", [0, 1])
def test_the_numbers_are_those_of_the_result(table, b):
    content = payload(table, names=["age", "dose", "iron", "sleep"])
    numbers, one = content["results"][0][b], table[b]
    d = 4
    value, stderr = unpacked(numbers["value"], d), unpacked(numbers["stderr"], d)
    np.testing.assert_allclose(value, one.unshrunk().hessian[0], rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(stderr, one.stderr()[0], rtol=1e-6)
    np.testing.assert_allclose(floats(numbers["slope"]), one.gradient[0], rtol=1e-6)
    np.testing.assert_allclose(floats(numbers["slope_stderr"]), one.gradient_stderr[0], rtol=1e-6)
    np.testing.assert_allclose(floats(numbers["move"]), [0.5, 1, 2, 1])
    q = unpacked(numbers["q"], d)
    for p in one.top_pairs(6)[0]:
        assert q[p.i, p.j] == pytest.approx(p.q_value, rel=1e-6)
        low = value[p.i, p.j] - numbers["width"] * stderr[p.i, p.j]
        assert low == pytest.approx(p.low, rel=1e-5, abs=1e-9)  # what the page works out is what top_pairs says
    assert np.isnan(q.diagonal()).all()


def test_values_order_and_error_are_those_of_one_estimate():
    result = result_of((24,), n_calls=96, control=None)
    assert result.shrink
    content = payload(result)
    numbers, own = content["results"][0][0], result.unshrunk()
    np.testing.assert_allclose(unpacked(numbers["value"], 24), own.hessian[0], rtol=1e-6, atol=1e-12)
    assert "denoised" not in numbers
    quality = {reading["name"]: reading for reading in numbers["quality"]}
    for name, error in (("Relative error", own.relative_error), ("Denoised matrix", result.relative_error)):
        assert quality[name]["figure"] == error_text(float(error[0]))
    assert quality["Denoised matrix"]["level"] == "plain"  # one verdict
    assert numbers["eigen"]["denoised"]
    np.testing.assert_allclose(numbers["eigen"]["values"], result.eigh(6).values[0], rtol=1e-6)
    assert dict(content["made"][0][0])["Estimate"] == "unbiased"


def test_the_page_has_the_sizes_of_pairs():
    result = result_of((24,))
    content = payload(result)
    numbers, (pair, *_) = content["results"][0][0], result.top_pairs(1)[0]
    separate = floats(numbers["separate"])
    share = abs(pair.effect) / np.sqrt(separate[pair.i] + separate[pair.j])
    assert share == pytest.approx(pair.separate_share, rel=1e-5)
    assert abs(pair.effect) / numbers["spread"] == pytest.approx(pair.output_share, rel=1e-5)
    assert content["sizes"][0] == [0.01, "tiny"]
    x = torch.zeros(1, 4)
    attribution = sh.Attribution.make(x, x.sum(1), x, torch.eye(4)[None], method="some index")
    assert payload(attribution)["results"][0][0]["separate"] is None


def test_the_width_of_intervals_follows_the_level(table):
    wide, narrow = (payload(table, level=level)["results"][0][0]["width"] for level in (0.99, 0.8))
    df = table[0].row(0).df
    assert wide == pytest.approx(float(student_t.quantile(0.99, df)[0]))
    assert narrow == pytest.approx(float(student_t.quantile(0.8, df)[0]))


def test_slopes_have_the_width_of_their_own_degrees_of_freedom():
    x = torch.tensor([[0.3, 0.2, -0.1, 0.1]], dtype=torch.float64)
    few = sh.SmoothHess(one_pair).attribute(x, sigma=0.5, n_calls=8, design="antithetic", control=None)
    df = few.noise.of_gradient().df
    assert 1 <= float(df) <= 3
    for level in (0.8, 0.95):
        numbers = payload(few, level=level)["results"][0][0]
        assert numbers["slope_width"] == pytest.approx(float(student_t.quantile(level, df)[0]))
    known = payload(Exact.make(x, x.sum(1), x, torch.eye(4)[None]))["results"][0][0]
    assert known["slope_width"] == pytest.approx(1.96, abs=1e-3)
    none = sh.SmoothHess(one_pair).attribute(x, sigma=0.5, n_calls=2, design="antithetic", control=None)
    assert payload(none)["results"][0][0]["slope_width"] is None  # infinite: nothing is known


def test_the_scale_is_that_of_the_features_that_move():
    x = torch.tensor([[0.3, 0.2, -0.1, 0.1]], dtype=torch.float64)
    result = sh.SmoothHess(one_pair).attribute(x, gaussian=sh.Diagonal([0.25, 0.25, 0, 0.25]), n_calls=40)
    content = payload(result)
    assert content["sweep"] == [{"sigma": 0.25, "radius": pytest.approx(0.25 * 3**0.5), "same": True, "still": 1}]
    assert "σ = 0.25, radius σ√d = 0.433, none in 1 of 4 features" in dict(content["made"][0][0])["Noise"]
    assert content["results"][0][0]["still"] == [2]
    moved = payload(sh.SmoothHess(one_pair).attribute(x, sigma=0.5, n_calls=40))
    assert moved["results"][0][0]["still"] == []
    assert "none in" not in dict(moved["made"][0][0])["Noise"]
    known = Exact.make(x, x.sum(1), x, torch.eye(4)[None], scales=[1, 0, 1, 1])
    assert payload(known)["results"][0][0]["still"] == []


def test_what_the_noise_moved_is_said():
    shape = (3, 12, 12)
    cells = sh.segments.grid(shape, 3)
    shifts = result_of_noise(shape, cells, sh.segments.noise(cells, 0.2))
    content = payload(shifts)
    assert content["noise"] == [
        "The noise shifts all pixels of a segment by the same amount; an interaction of two segments is the effect of "
        "shifting both."
    ]
    assert dict(content["made"][0][0])["Noise"].startswith("Gaussian shifts of segments, σ = 0.2")
    coarser = payload(result_of_noise(shape, sh.segments.grid(shape, 1), sh.segments.noise(cells, 0.2)))
    assert coarser["noise"] == ["The noise shifts all pixels of a segment by the same amount."]
    own = payload(result_of_noise(shape, cells, sh.Isotropic(0.2)))
    assert own["noise"] == [
        "The noise shifts every pixel independently; an interaction of two segments is the sum over all pairs of their "
        "pixels."
    ]
    windows = sh.segments.windows((1, 64), 8)
    curve = payload(result_of_noise((1, 64), windows, sh.segments.noise(windows, 0.2)))
    assert curve["noise"][0].startswith("The noise shifts all samples of a window by the same amount")
    dense = payload(result_of_noise((6,), torch.arange(6) // 2, sh.Dense(torch.eye(6) + 0.1)))
    assert dense["noise"][0].startswith("The noise shifts the features jointly")
    assert payload(result_of((3, 4, 4)))["noise"] == [""]  # one number per pixel: no groups to describe


def result_of_noise(shape, mask, gaussian):
    inputs = torch.rand(1, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return sh.SmoothHess(network(shape)).attribute(inputs, gaussian=gaussian, feature_mask=mask, n_calls=40)


def test_scales_replace_the_moves_and_change_the_q_values_of_frozen_features(table):
    numbers = payload(table, scales=torch.tensor([1.0, 2.0, 0.0, 1.0]))["results"][0][0]
    assert floats(numbers["move"]).tolist() == [1, 2, 0, 1]
    assert np.isnan(unpacked(numbers["q"], 4)[2]).all()


def test_directions_are_the_eigenpairs(table):
    eigen = payload(table)["results"][0][0]["eigen"]
    values, vectors = table[0].eigh(4)
    np.testing.assert_allclose(eigen["values"], values[0])
    found = floats(eigen["vectors"]).reshape(4, 4)
    np.testing.assert_allclose(np.abs(np.sum(found * vectors[0].numpy(), 1)), 1, rtol=1e-6)
    assert (found.max(1) == np.abs(found).max(1)).all()
    assert sum(eigen["shares"]) == pytest.approx(1)


def test_a_sweep_is_ordered_by_scale_and_begins_at_the_result(table):
    inputs = table.inputs
    results = sh.sweep(one_pair, inputs, [0.8, 0.2, 0.4], n_calls=200)
    content = payload(results[2], sweep=results)
    assert [s["sigma"] for s in content["sweep"]] == pytest.approx([0.2, 0.4, 0.8])
    assert content["start"] == 1
    for s, k in enumerate([1, 2, 0]):
        found = unpacked(content["results"][s][1]["value"], 4)
        np.testing.assert_allclose(found, results[k][1].unshrunk().hessian[0], rtol=1e-6, atol=1e-12)


def test_a_sweep_is_grouped_as_the_result_is():
    x = torch.rand(1, 6, dtype=torch.float64)
    mask = torch.tensor([0, 0, 1, 1, 2, 2])
    scales = sh.sweep(one_pair, x, [0.2, 0.4], n_calls=200)
    content = payload(scales[0].groups(mask), sweep=scales)
    found = unpacked(content["results"][1][0]["value"], 3)
    np.testing.assert_allclose(found, scales[1].groups(mask).unshrunk().hessian[0], rtol=1e-6, atol=1e-12)


def test_numbers_are_no_sweep(table):
    with pytest.raises(TypeError, match=r"a result for each σ, got float. Pass sweep=smoothhess.sweep"):
        payload(table, sweep=[0.1, 0.2])


def test_a_sweep_of_other_inputs_is_refused(table):
    with pytest.raises(ValueError, match="same inputs: expected .2, 4., got .1, 4."):
        payload(table, sweep=[sh.SmoothHess(one_pair).attribute(table.inputs[:1], sigma=0.1, n_calls=100)])


def test_examples_can_be_chosen(table):
    content = payload(table, example=[1], headings=["first", "second"])
    assert [e["heading"] for e in content["examples"]] == ["second"]
    assert content["examples"][0]["values"] == pytest.approx(table.inputs[1].tolist())
    assert payload(table, example=-1)["examples"][0]["f"] == pytest.approx(float(table.output[1]))
    for wrong in (2, []):
        with pytest.raises(ValueError, match="of the 2 examples"):
            payload(table, example=wrong)


def test_exact_results_and_attributions_have_pages():
    x = torch.tensor([[0.3, -0.2, 0.5]], dtype=torch.float64)
    content = payload(baselines.hessian(lambda x: x.prod(1), x))
    assert content["exact"]
    assert content["derivative"]
    assert unpacked(content["results"][0][0]["stderr"], 3).max() == 0
    assert not payload(Attribution.make(x, x.sum(1), x, torch.eye(3)[None]))["derivative"]


# --- places -----------------------------------------------------------------------------------------------------------


def test_segments_of_an_image():
    mask = torch.arange(16).reshape(4, 4).repeat_interleave(2, 0).repeat_interleave(2, 1)
    inputs = torch.rand(1, 3, 8, 8, dtype=torch.float64)
    result = sh.SmoothHess(network((3, 8, 8))).attribute(inputs, sigma=0.5, n_calls=200).groups(mask)
    content = payload(result)
    example = content["examples"][0]
    assert (content["kind"], content["word"], content["examples"][0]["names"][3]) == ("image", "segment", "segment 3")
    assert example["size"] == [8, 8]
    np.testing.assert_array_equal(labels_of(example), mask.reshape(-1))


def test_small_images_are_shown_by_pixel_with_channels_summed():
    grey, colour = result_of((4, 5)), result_of((3, 4, 4))
    assert payload(grey)["examples"][0]["names"][7] == "pixel (1, 2)"
    content = payload(colour)
    summed = colour.groups(torch.arange(16).reshape(4, 4).expand(3, 4, 4))
    assert content["word"] == "pixel"
    found = unpacked(content["results"][0][0]["value"], 16)
    np.testing.assert_allclose(found, summed.unshrunk().hessian[0], rtol=1e-5, atol=1e-8)


def test_segments_that_differ_between_channels_make_a_table():
    mask = torch.arange(3)[:, None, None].expand(3, 4, 4)
    assert payload(result_of((3, 4, 4)).groups(mask))["kind"] == "table"


def test_windows_make_a_series_and_columns_a_table():
    curve = result_of((64,)).groups(torch.arange(64) // 8)
    content = payload(curve, series=np.linspace(0, 6.3, 64), units="s")
    assert (content["kind"], content["word"], content["examples"][0]["names"][1]) == ("series", "window", "0.80–1.60 s")
    np.testing.assert_array_equal(labels_of(content["examples"][0]), np.arange(64) // 8)
    assert payload(curve)["examples"][0]["names"][1] == "samples 8–15"
    assert payload(curve, series=False)["kind"] == "table"
    assert payload(curve, kind="table")["kind"] == "table"
    assert payload(result_of((6,)))["kind"] == "table"
    assert payload(result_of((1, 40)))["kind"] == "series"
    channels = result_of((2, 40)).groups((torch.arange(40) // 10).expand(2, 40))
    assert payload(channels)["kind"] == "series"
    assert payload(channels, series=False)["kind"] == payload(channels, kind="image")["kind"] == "image"


def test_a_curve_is_not_taken_for_its_times():
    curve = result_of((64,)).groups(torch.arange(64) // 8)
    with pytest.raises(ValueError, match="increasing times of the 64 samples"):
        payload(curve, series=curve.inputs[0])
    with pytest.raises(ValueError, match="one contiguous interval"):
        payload(result_of((64,)).groups(torch.arange(64) % 8), series=True)


def test_pictures_decode_to_the_pixels():
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for shape in ((5, 7), (5, 7, 3)):
        pixels = rng.integers(0, 256, shape).astype(np.uint8)
        uri = encoding.png(pixels)
        found = np.array(image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))))
        np.testing.assert_array_equal(found, pixels)


def test_pictures_come_from_the_image_given_or_the_input():
    inputs = torch.tensor([[[0.0, 0.5], [1.0, 0.25]]])
    assert feature_layout.pixels(None, inputs, 0, 1).tolist() == [[0, 128], [255, 64]]
    bright = np.full((2, 2, 3), 7, np.uint8)
    assert (feature_layout.pixels([bright], inputs, 0, 1) == 7).all()
    assert feature_layout.pixels(torch.stack([torch.zeros(3, 2, 2), torch.ones(3, 2, 2)]), inputs, 1, 2).shape == (
        2,
        2,
        3,
    )
    assert (
        feature_layout.pixels(inputs * 4 - 2, inputs, 0, 1) == [[0, 128], [255, 64]]
    ).all()  # normalised for a network
    with pytest.raises(ValueError, match="one image, or one per example: 2, got 1"):
        feature_layout.pixels([bright], inputs, 0, 2)
    with pytest.raises(ValueError, match="got .5,."):
        feature_layout.pixels(torch.zeros(5), inputs, 0, 1)


# --- words ------------------------------------------------------------------------------------------------------------


def test_what_is_explained_is_said(table):
    inputs = torch.zeros(2, 4, dtype=torch.float64)
    result = sh.SmoothHess(network((4,), 3)).attribute(inputs, target=[2, 0], sigma=0.5, n_calls=100)

    def words(result, **options):
        return [e["output"] for e in payload(result, **options)["examples"]]

    assert words(table) == ["the output"] * 2
    assert words(table, classes="risk", output="score") == ["the ‘risk’ score"] * 2
    assert words(result) == ["output 2", "output 0"]
    assert words(result, classes=["cat", "dog", "cup"], output="logit") == ["the ‘cup’ logit", "the ‘cat’ logit"]
    assert words(result, classes={0: "cat", 2: "cup"}) == ["the ‘cup’ output", "the ‘cat’ output"]
    with pytest.raises(ValueError, match="a name for target 2, got 1 names"):
        payload(result, classes=["cat"])


def test_units_and_values(table):
    names = ["age", "dose", "iron", "sleep"]
    content = payload(table, names=names, units={"age": "years"}, values=[[50, 1, 2, 3], [60, 4, 5, 6]])
    assert content["units"] == ["years", "", "", ""]
    assert content["examples"][1]["values"] == [60, 4, 5, 6]
    with pytest.raises(ValueError, match="units must be a list of length 4, got 1"):
        payload(table, units=["kg"])
    with pytest.raises(ValueError, match="headings must be a list of length 2, got one string"):
        payload(table, headings="ab")
    with pytest.raises(ValueError, match="values must have 4 features"):
        payload(table, values=[1, 2])
    with pytest.raises(ValueError, match="one name per feature, 4, got 1"):
        payload(table, names=["age"])


def test_readings_are_good_fair_and_poor():
    def named(result):
        return {r.name.split(":")[0]: r for r in quality_levels.readings(result)}

    certain = named(result_of((4,), n_calls=2000))
    assert certain["Relative error"].level == "good"
    assert certain["Calls"].level == "plain"
    poor = named(result_of((40,), n_calls=8, shrink=False))
    assert poor["Relative error"].level == "poor"
    assert poor["R²"].level == "poor"
    with pytest.warns(UserWarning, match="max_calls"):
        stopped = sh.SmoothHess(network((40,))).attribute(
            torch.zeros(1, 40, dtype=torch.float64), sigma=0.5, tol=1e-6, max_calls=100
        )
    found = named(stopped)
    assert (found["Calls"].level, found["Calls"].verdict) == ("plain", "stopped at the limit of calls")
    assert "was not reached" in found["Denoised matrix"].meaning
    quadratic = sh.SmoothHess(lambda x: x[:, 0] * x[:, 1]).attribute(torch.zeros(1, 2), sigma=1.0, n_calls=100)
    assert named(quadratic)["R²"].level == "good"


def test_a_low_r2_is_explained_with_what_to_do():
    reading = next(r for r in quality_levels.readings(result_of((40,), n_calls=8)) if r.name.startswith("R²"))
    assert reading.meaning.startswith("Pairs explain ")
    assert "What to do: smoothhess.diagnose" in reading.meaning
    assert quality_levels.verdict(result_of((40,), n_calls=800, control=None)).words.count("pairs explain") <= 1


def test_the_verdict_is_that_of_the_numbers_that_are_shown():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(200, 3), nn.ReLU(), nn.Linear(3, 1))
    result = sh.SmoothHess(net).attribute(torch.zeros(1, 200), sigma=0.5, n_calls=400, control=None)
    assert result.shrink
    own, denoised = float(result.unshrunk().relative_error[0]), float(result.relative_error[0])
    assert denoised < quality_levels.ERROR_GOOD
    assert own > quality_levels.ERROR_FAIR  # so much apart that they are called differently
    found = quality_levels.readings(result)[0]
    assert (found.figure, found.level, found.verdict) == (error_text(own), "poor", "noisy")
    level, words = quality_levels.verdict(result)
    assert level == "poor"
    assert words.startswith(f"error {error_text(own)}: poor")
    assert quality_levels.verdict(result.unshrunk()) == (level, words)


def test_failed_checks_take_precedence_over_a_small_error():
    x = torch.tensor([[0.3, -0.2, 0.5, 0.1]], dtype=torch.float64)
    explainer = sh.SmoothHess(lambda x: x.square().sum(1) + 5 * (x[:, 0] > 0.3).double())
    with pytest.warns(UserWarning, match="not the derivatives of the values"):
        jumps = explainer.attribute(x, sigma=0.5, n_calls=4000)
    assert quality_levels.verdict(jumps) == ("poor", "gradients do not fit the values")
    exact = Exact.make(x, x.sum(1), x, torch.eye(4)[None])
    assert quality_levels.verdict(exact) == ("plain", "exact: not sampled")


def test_an_error_beyond_the_signal_and_one_that_is_not_known_are_told_apart():
    noisy = result_of((40,), n_calls=4, seed=2, design="antithetic", control=None, shrink=False)
    assert float(noisy.relative_error[0]) == np.inf
    assert quality_levels.readings(noisy)[0][1:4] == ("over 100 %", "poor", "mostly noise")
    none = result_of((4,), n_calls=2, design="antithetic", control=None, shrink=False)
    assert quality_levels.readings(none)[0][1:4] == ("unknown", "poor", "too few draws for an estimate")
    assert quality_levels.verdict(none) == ("poor", "error unknown")


def test_the_sentence_comes_first_and_the_note_where_everybody_sees_it(table):
    text = page_module.page(payload(table, note="Standardised."))
    main = text[text.index("<main>") : text.index("</main>")]
    order = [main.index(f'id="{name}"') for name in ("sentence", "chip", "lead", "note", "explore")]
    assert order == sorted(order)


def test_every_page_says_its_limits_and_how_it_was_made(table):
    content = payload(table)
    assert "not show whether an interaction is real, stable or causal" in content["limits"]
    made = dict(content["made"][0][0])
    assert made["Made with"] == f"smoothhess {sh.__version__}"
    assert made["Explained"] == "the output"
    assert "n_calls=400, seed=0)" in made["Call"]
    told = payload(table, model="risk.pt2", command="smoothhess explain --model risk.pt2", date="2026-01-02")
    named = dict(told["made"][0][0])
    assert (named["Model"], named["Date"]) == ("risk.pt2", "2026-01-02")
    assert named["Command"] == "smoothhess explain --model risk.pt2"
    assert "seed 0" in made["Draws"]
    assert "400 gradient calls" in made["Work"]


# --- the file ---------------------------------------------------------------------------------------------------------


def test_a_page_is_one_file_that_asks_for_nothing(table, tmp_path):
    path = report(table, tmp_path / "x.html")
    text = path.read_text()
    outside = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert "default-src 'none'" in outside
    assert re.findall(r"""(?:src|href)=["'](?!data:|#)""", outside) == []
    assert "url(" not in outside
    content, scripts = inside(text)
    assert scripts == 2
    made_today = payload(table, date=date.today().isoformat())
    assert content == json.loads(json.dumps(made_today))


def test_hostile_text_stays_text(table, tmp_path):
    path = report(
        table,
        tmp_path / "x.html",
        names=HOSTILE,
        title=HOSTILE[0],
        headings=HOSTILE[:2],
        units=HOSTILE,
        note=HOSTILE[1],
    )
    text = path.read_text()
    content, scripts = inside(text)
    assert scripts == 2
    assert content["examples"][0]["names"] == HOSTILE
    assert content["title"] == HOSTILE[0]
    assert "alert(1)</script>" not in text
    assert "<img src=x" not in text
    assert "<img" not in html(table, names=HOSTILE).replace("<img alt=", "")


def test_pages_without_pictures_stay_below_200_kilobytes(table, tmp_path):
    assert report(table, tmp_path / "x.html").stat().st_size < 2e5


def test_a_photo_with_100_segments_stays_below_1_megabyte(tmp_path):
    rng = np.random.default_rng(0)
    inputs = torch.tensor(rng.random((1, 3, 224, 224)))  # noise: no picture is larger
    mask = (torch.arange(224) * 10 // 224)[:, None] * 10 + torch.arange(224) * 10 // 224
    result = sh.SmoothHess(lambda x: x.mean((2, 3)).prod(1)).attribute(
        inputs, sigma=0.1, n_calls=4, design="antithetic", feature_mask=mask, control=None
    )
    assert result.shape == (1, 100, 100)
    assert report(result, tmp_path / "x.html").stat().st_size < 1e6
    assert len(html(result)) < 1e5


def test_an_older_page_is_replaced_and_a_failure_leaves_it(table, tmp_path, monkeypatch):
    path = tmp_path / "x.html"
    path.write_text("old")
    with pytest.raises(ValueError, match="one name per feature"):
        report(table, path, names=["a"])
    assert path.read_text() == "old"
    monkeypatch.setattr("smoothhess.model.atomic_write.os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        report(table, path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.html"]
    monkeypatch.undo()
    assert report(table, str(path)) == path
    assert path.read_text().startswith("<!doctype html>")
    assert [p.name for p in tmp_path.iterdir()] == ["x.html"]
    assert path.stat().st_mode & 0o044  # others can read it as any file


def test_a_missing_folder_and_a_folder_in_the_way_are_said(table, tmp_path):
    with pytest.raises(ValueError, match="missing does not exist. Create it first"):
        report(table, tmp_path / "missing" / "x.html")
    with pytest.raises(ValueError, match="is a folder"):
        report(table, tmp_path)


def test_too_much_for_a_page_is_refused(tmp_path):
    large = result_of((600,), n_calls=20)
    with pytest.raises(ValueError, match="at most 512 features, this result has 600. Group them"):
        report(large, tmp_path / "x.html")
    assert payload(large, segments=torch.arange(600) // 60, series=False)["kind"] == "table"
    with pytest.raises(ValueError, match="already has groups"):
        payload(large.groups(torch.arange(600) // 60), segments=torch.arange(10))
    several = sh.Interactions.cat([result_of((500,), n_calls=4)] * 30)
    with pytest.raises(ValueError, match="30 matrices of 500 features would make a page of 80 MB. Pass example="):
        report(several, tmp_path / "x.html")
    assert list(tmp_path.iterdir()) == []


def test_the_same_result_gives_the_same_page(table):
    assert page_module.page(payload(table)) == page_module.page(payload(table))


# --- notebooks --------------------------------------------------------------------------------------------------------


def test_notebooks_get_a_small_table_without_scripts(table):
    text = html(table, names=["age", "dose", "iron", "sleep"])
    pair = table[0].top_pairs(1)[0][0]
    assert "<script" not in text
    assert len(text) < 3e4
    assert "age × dose" in text
    assert f"{pair.value:+.3g}" in text
    assert "real, stable or causal" in text
    assert text.count("Relative error") == 2
    large = html(sh.SmoothHess(lambda x: x.relu().sum(1)).attribute(torch.zeros(6, 2000), sigma=1.0, n_calls=4))
    assert "too many features" in large
    assert "the first 4 are shown" in large
    alone = html(sh.SmoothHess(lambda x: x[:, 0] ** 2).attribute(torch.zeros(1, 1), sigma=1.0, n_calls=4))
    assert "no pairs" in alone


def test_the_verdict_names_a_strongest_pair_that_is_known_less_than_the_matrix():
    """A large diagonal has a small error, and the matrix with it; the only pair is noisy."""
    net = lambda x: 5 * x[:, 0] ** 2 + 0.3 * (x[:, 0] + x[:, 1]).relu() - 0.3 * (x[:, 0] - x[:, 1]).relu()
    result = sh.SmoothHess(net).attribute(torch.zeros(1, 2).double(), sigma=0.5, n_calls=100, control=None)
    (pair,) = result.top_pairs(1)[0]
    share = (pair.high - pair.low) / 2 / abs(pair.value)
    assert pair.significant
    assert share > 2 * max(0.1, 2 * float(result.unshrunk().relative_error))
    level, words = quality_levels.verdict(result)
    assert level != "good"
    assert words.endswith(f"the strongest pair ± {100 * share:.0f} %")
    assert "with the diagonal" in repr(result.top_pairs(1)).splitlines()[-1]


def test_notebooks_see_the_answer_first_and_one_verdict(table):
    text = html(table[0], names=["age", "dose", "iron", "sleep"])
    assert "Raising <b>age</b> and <b>dose</b> together puts the output" in text
    assert text.index("Raising") < text.index("<summary") < text.index("<table")
    assert text.count("<summary") == 1
    assert "http" not in text


def test_notebooks_see_the_input_with_its_strongest_pairs():
    small = result_of((4, 5))
    text = html(small)
    first = small.unshrunk().top_pairs(1)[0][0]
    assert first.significant
    assert f"Raising <b>pixel {first.names[0]}</b>" in text
    (x0, y0), (x1, y1) = ((k % 5 + 0.5, k // 5 + 0.5) for k in (first.i, first.j))
    assert f'd="M{x0:.2f} {y0:.2f}L{x1:.2f} {y1:.2f}"' in text  # from the middle of one pixel to that of the other
    curve = html(result_of((64,)).groups(torch.arange(64) // 8))
    assert 'aria-label="the curve"' in curve
    words = html(texts.result())
    assert words.index("believ") < words.index("<table")
    assert "the gates of" in words
    assert "pixel" not in words
    scattered = html(result_of((3, 4, 4)).groups(torch.arange(3)[:, None, None].expand(3, 4, 4)))
    assert "matrix of interactions" in scattered  # no place for a picture


def test_show_prints_in_a_terminal_and_displays_in_a_notebook(table, capsys, monkeypatch):
    table.show()
    assert capsys.readouterr().out.strip() == repr(table)
    shown = []
    notebook = SimpleNamespace(get_ipython=lambda: object())
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    display = SimpleNamespace(display=lambda content, raw: shown.append((content, raw)))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    table.show(pairs=2, names=["age", "dose", "iron", "sleep"])
    [(content, raw)] = shown
    assert raw
    assert content["text/plain"] == repr(table)
    assert content["text/html"].count("age × dose") == len(table)
    assert capsys.readouterr().out == ""
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))  # imported, not running
    table.show()
    assert capsys.readouterr().out.strip() == repr(table)


def test_notebooks_show_no_intervals_where_nothing_was_drawn():
    x = torch.tensor([[0.3, -0.2, 0.5]], dtype=torch.float64)
    text = html(baselines.hessian(lambda x: x.prod(1), x), names=["age", "dose", "iron"])
    row = text[text.index("age × dose") :].split("</tr>")[0]
    cells = [re.sub("<.*?>", "", cell) for cell in row.split("<td")]
    sizes = ["2.8 times", "78 %", "large"]
    assert [cell.split(">", 1)[-1] for cell in cells[1:]] == ["+0.5", "–", "", "+0.5", *sizes, "–"]
    few = sh.SmoothHess(lambda x: x.prod(1)).attribute(x, sigma=0.5, n_calls=2, design="antithetic", control=None)
    assert "unknown</td>" in html(few)
    assert "inf" not in html(few)


# --- what it is made of -----------------------------------------------------------------------------------------------


def test_own_scripts_cannot_end_their_element():
    folder = files(page_module.__name__)
    scripts = folder.joinpath("script")
    assert sorted(path.name for path in scripts.iterdir()) == sorted(f"{name}.js" for name in page_module.SCRIPTS)
    for path in (*scripts.iterdir(), folder.joinpath("style.css"), folder.joinpath("page.css")):
        text = path.read_text()
        assert "</s" not in text.lower()
        assert "<!--" not in text
