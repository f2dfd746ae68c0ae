"""What a browser shows: the right numbers after a hover, a click, a key; nothing in the console, nothing asked for."""

import csv
import os
import re
from pathlib import Path

import pytest
import torch

import smoothhess as sh
from smoothhess.estimate import student_t
from smoothhess.evaluate import global_interactions
from smoothhess.evaluate.sweep import Sweep
from smoothhess.view.report.global_page import global_page

PAGES = ["digits", "breast_cancer", "image", "series", "hostile", "standardised", "text"]

CUT_OFF = """() => [...document.querySelectorAll(".row .figure:last-child")]
  .filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.textContent)"""
NAMELESS = """() => [...document.querySelectorAll("button, input, select, [tabindex='0'], [role=img]")].filter((e) => {
  const label = e.getAttribute("aria-label") || e.getAttribute("aria-labelledby") || e.textContent.trim()
    || (e.labels && e.labels.length && e.labels[0].textContent.trim());
  return !e.hidden && !label;
}).map((e) => e.outerHTML.slice(0, 100))"""


def moves(result):
    """σ_i of each feature: the page shows effects, H_ij σ_i σ_j."""
    return result.feature_scales[0].double()


def expected(result, i):
    """value, low and high of each partner of feature i, as effects, in Python."""
    one, size = result[0], moves(result)
    row = one.row(i)
    ends = [row.value, *row.interval()]
    return [end[0].flatten().double() * size * size[i] for end in ends]


def assert_shows(page, result, i):
    """The partners on the page are all others, with the numbers of row i."""
    value, low, high = expected(result, i)
    found = page.partners()
    assert sorted(found) == [j for j in range(result.shape[1]) if j != i]
    for j, numbers in found.items():
        assert numbers["value"] == pytest.approx(float(value[j]), rel=2e-5, abs=1e-9)
        assert numbers["low"] == pytest.approx(float(low[j]), rel=2e-5, abs=1e-8)
        assert numbers["high"] == pytest.approx(float(high[j]), rel=2e-5, abs=1e-8)


def strongest(result, k=4000):
    return result[0].unshrunk().top_pairs(k)[0]


def open_options(page):
    if page.tab.get_attribute("#options", "aria-expanded") == "false":
        page.tab.click("#options")


def point(page, i, sides):
    """Where on the screen the middle of cell i of a grid of segments lies."""
    page.tab.eval_on_selector("#map", "(map) => map.scrollIntoView({ block: 'center' })")
    box = page.tab.locator("#map").bounding_box()
    r, c = divmod(i, sides[1])
    return box["x"] + (c + 0.5) / sides[1] * box["width"], box["y"] + (r + 0.5) / sides[0] * box["height"]


# --- every page -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [375, 1440])
@pytest.mark.parametrize("name", PAGES)
def test_opens_without_complaints_and_fits_the_screen(sample, open_page, tmp_path, name, width):
    page = open_page(sample(name).path, width, 812 if width < 500 else 900)
    folder = Path(os.environ.get("SMOOTHHESS_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    for theme in ("light", "dark"):
        page.tab.emulate_media(color_scheme=theme)
        page.settle()
        assert page.tab.evaluate("document.documentElement.dataset.theme") == theme
        shot = page.tab.screenshot(path=folder / f"{name}-{width}-{theme}.png", full_page=True)
        assert len(shot) > 30_000  # something is drawn
    for tab in page.tab.locator("#tabs button").all():
        tab.click()
        page.settle()
        assert page.tab.evaluate("document.documentElement.scrollWidth") <= width
        assert page.tab.evaluate(CUT_OFF) == []
        assert page.tab.evaluate(NAMELESS) == []
    assert "real, stable or causal" in page.tab.locator("main").inner_text()


@pytest.mark.parametrize("name", PAGES)
def test_a_phone_shows_the_sentence_and_the_verdict_without_scrolling(sample, open_page, name):
    page = open_page(sample(name).path, 375, 667)
    if name != "hostile":  # whose headings and outputs are long
        assert page.tab.locator("#sentence").bounding_box()["y"] < 180
    ends = [page.tab.locator(f"#{part}").bounding_box() for part in ("sentence", "chip")]
    assert max(box["y"] + box["height"] for box in ends) < 667


def test_one_verdict_opens_to_its_details(sample, open_page):
    digits = sample("digits")
    page = open_page(digits.path)
    own, denoised = (float(r.relative_error[0]) for r in (digits.result[0].unshrunk(), digits.result[0]))
    assert own > 1.2 * denoised
    level = "good" if own <= 0.1 else "fair"
    assert page.tab.inner_text("#chip").endswith(f"%: {level}")
    assert float(page.tab.inner_text("#chip").split()[2]) == pytest.approx(100 * own, rel=0.06)
    assert page.tab.locator("#quality-panel").is_hidden()
    page.tab.focus("#chip")
    page.tab.keyboard.press("Enter")
    assert page.tab.get_attribute("#chip", "aria-expanded") == "true"
    assert page.tab.locator('.tile[data-name="Relative error"] .verdict').inner_text()[0] in "●▲"
    tile = page.tab.locator('.tile[data-name="Denoised matrix"]')
    assert float(tile.locator(".figure").inner_text().rstrip(" %")) == pytest.approx(100 * denoised, rel=0.06)
    assert tile.get_attribute("data-level") == "plain"
    page.tab.click("#chip")
    assert page.tab.locator("#quality-panel").is_hidden()


@pytest.mark.parametrize("name", ["breast_cancer", "image"])
def test_help_opens_on_a_click_or_a_key_and_closes(sample, open_page, name):
    page = open_page(sample(name).path, 375, 667)
    for opener in page.tab.locator("main .help").all():
        if not opener.is_visible():
            continue
        opener.scroll_into_view_if_needed()
        opener.click()
        box = page.tab.locator("#help").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 375
        assert len(page.tab.inner_text("#help")) > 20
        assert opener.get_attribute("aria-expanded") == "true"
        opener.click()
        assert page.tab.locator("#help").is_hidden()
    opener = page.tab.locator("#sentence .help")
    opener.focus()
    page.tab.keyboard.press("Enter")
    assert "extra change" in page.tab.inner_text("#help")
    page.tab.keyboard.press("Escape")
    assert page.tab.locator("#help").is_hidden()


def test_all_pairs_are_saved_as_csv(sample, open_page):
    it = sample("breast_cancer")
    page = open_page(it.path)
    with page.tab.expect_download() as started:
        page.tab.click("#csv")
    text = Path(started.value.path()).read_text(encoding="utf-8-sig")
    assert started.value.suggested_filename.endswith("-example-0.csv")
    rows, pairs = list(csv.DictReader(text.splitlines())), strongest(it.result)
    assert len(rows) == 435
    for row, p in zip(rows, pairs, strict=True):
        assert [row["first"], row["second"]] == [it.options["names"][k] for k in (p.i, p.j)]
        assert float(row["H"]) == pytest.approx(p.value, rel=1e-5)
        assert float(row["extra_change"]) == pytest.approx(p.effect, rel=1e-5)
        assert float(row["low"]) < float(row["extra_change"]) < float(row["high"])
        assert row["significant"] == str(p.significant).lower()


def test_names_in_csv_are_no_formulas(sample, open_page):
    names = ["=1+2", "a,b", 'c"d', "-e"]
    result = sh.SmoothHess(lambda x: x.prod(1)).attribute(torch.ones(1, 4), sigma=0.5, n_calls=100)
    path = sample("exact").path.with_name("formulas.html")
    page = open_page(result.report(path, names=names))
    with page.tab.expect_download() as started:
        page.tab.click("#csv")
    rows = list(csv.DictReader(Path(started.value.path()).read_text(encoding="utf-8-sig").splitlines()))
    assert {row["first"] for row in rows} | {row["second"] for row in rows} == {"'=1+2", "a,b", 'c"d', "'-e"}


@pytest.mark.parametrize("name", ["digits", "breast_cancer", "series", "text"])
def test_the_view_is_saved_as_png(sample, open_page, name):
    image = pytest.importorskip("PIL.Image")
    page = open_page(sample(name).path, theme="dark")
    with page.tab.expect_download() as started:
        page.tab.click("#png")
    picture = image.open(started.value.path())
    assert started.value.suggested_filename.endswith(".png")
    assert picture.width == 1400
    assert 400 < picture.height <= 1600
    assert picture.convert("RGB").getpixel((5, 5)) == (255, 255, 255)  # on white, also from a dark page
    assert len(picture.convert("RGB").getcolors(1 << 20)) > 20
    assert page.tab.evaluate("document.documentElement.dataset.theme") == "dark"


def test_how_the_page_was_made_is_said(sample, open_page):
    page = open_page(sample("breast_cancer").path)
    page.tab.click(".made summary")
    said = page.tab.inner_text("#made")
    assert "SmoothHess(model).attribute(x, target=" in said
    assert "n_calls=400" in said
    assert f"smoothhess {sh.__version__}" in said


def test_hostile_names_are_shown_as_they_are(sample, open_page):
    hostile = sample("hostile")
    page = open_page(hostile.path)
    assert page.tab.inner_text("h1") == hostile.options["title"]
    assert page.tab.title() == hostile.options["title"]
    said = page.tab.inner_text("#sentence")
    assert hostile.options["names"][0] in said
    for tab in ("matrix", "directions"):
        page.tab.click(f"#tab-{tab}")
        page.settle()
    assert page.tab.locator("img").count() == 0
    assert page.tab.locator("#panel b").count() == 0
    assert page.tab.locator("option").nth(1).inner_text() == hostile.options["headings"][1]


def test_the_theme_can_be_changed(sample, open_page):
    page = open_page(sample("image").path, theme="light")
    before = page.tab.evaluate("getComputedStyle(document.body).backgroundColor")
    page.tab.click("#theme")
    page.settle()
    assert page.tab.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.tab.evaluate("getComputedStyle(document.body).backgroundColor") != before


# --- images -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "sides", "chosen"), [("digits", (8, 8), (27, 45)), ("image", (10, 10), (0, 57))])
def test_hovering_shows_the_interactions_of_that_segment(sample, open_page, name, sides, chosen):
    it = sample(name)
    page = open_page(it.path)
    first = strongest(it.result)
    assert int(page.data("#map")["source"]) == next((p for p in first if p.significant), first[0]).i
    for i in chosen:
        page.tab.mouse.move(*point(page, i, sides))
        page.settle()
        assert page.data("#map")["source"] == str(i)
        assert page.data("#map")["held"] == "false"
        assert_shows(page, it.result, i)


@pytest.mark.parametrize(("name", "sides"), [("digits", (8, 8)), ("image", (10, 10))])
def test_the_colours_on_the_picture_are_those_of_the_numbers(sample, open_page, name, sides):
    it = sample(name)
    i = 44
    page = open_page(it.path)
    page.tab.click("#map", position=_inside(page, i, sides))
    page.settle()
    value, _, _ = expected(it.result, i)
    row = it.result[0].row(i)
    clear = (row.value[0].abs() >= 2 * row.stderr[0]).flatten()
    limit = float(value[torch.arange(len(value)) != i].abs().max())
    assert float(page.data("#map")["limit"]) == pytest.approx(limit, rel=1e-4)
    colours = page.tab.evaluate(
        """([rows, columns]) => {
          const map = document.getElementById("map"), context = map.getContext("2d"), found = [];
          for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) {
            const at = [(c + 0.2) / columns * map.width, (r + 0.2) / rows * map.height];
            found.push([...context.getImageData(...at, 1, 1).data].slice(0, 3));
          }
          return found;
        }""",
        list(sides),
    )
    redder = torch.tensor([red - blue for red, _, blue in colours], dtype=torch.float64)
    shown = [j for j in range(len(value)) if j != i and clear[j] and abs(float(value[j])) > 0.1 * limit]
    assert len(shown) > 5
    assert all((redder[j] > 0) == (value[j] > 0) for j in shown)
    assert int(redder.abs().argmax()) in value.abs().argsort(descending=True)[:4].tolist()
    assert abs(redder[i]) < 10  # the segment itself is left as it is


def _inside(page, i, sides):
    box = page.tab.locator("#map").bounding_box()
    r, c = divmod(i, sides[1])
    return {"x": (c + 0.5) / sides[1] * box["width"], "y": (r + 0.5) / sides[0] * box["height"]}


def test_a_click_holds_a_segment_and_hovering_then_reads_pairs(sample, open_page):
    it = sample("image")
    page = open_page(it.path)
    page.tab.mouse.click(*point(page, 33, (10, 10)))
    page.settle()
    assert page.data("#map")["held"] == "true"
    page.tab.mouse.move(*point(page, 71, (10, 10)))
    page.settle()
    assert page.data("#map") | {"source": "33", "partner": "71"} == page.data("#map")
    value, low, high = expected(it.result, 33)
    said = page.data("#sentence")
    assert (said["i"], said["j"]) == ("33", "71")
    found = [float(said[name]) for name in ("value", "low", "high")]
    assert found == pytest.approx([float(x[71]) for x in (value, low, high)], rel=1e-5)
    assert "segment 33" in page.tab.inner_text("#sentence")
    assert "segment 71" in page.tab.inner_text("#sentence")
    page.tab.keyboard.press("Escape")
    page.settle()
    assert page.data("#map")["held"] == "false"


@pytest.mark.parametrize("width", [375, 1280])
@pytest.mark.parametrize(("name", "sides"), [("digits", (8, 8)), ("image", (10, 10))])
def test_pointing_at_segments_does_not_move_the_picture(sample, open_page, name, sides, width):
    page = open_page(sample(name).path, width)
    point(page, 0, sides)  # scrolls
    tops, sentences = set(), set()
    for i in range(0, sides[0] * sides[1], 3):
        page.tab.mouse.move(*point(page, i, sides))
        page.settle()
        tops.add(round(page.tab.locator("#map").bounding_box()["y"]))
        sentences.add(page.tab.locator("#sentence p").first.inner_text())
    assert len(sentences) > 5
    assert len(tops) == 1


def test_the_sentence_says_the_sign(sample, open_page):
    it = sample("digits")
    page = open_page(it.path)
    page.tab.click("#more-pairs")
    for sign, word in ((1, "above"), (-1, "below")):
        p = next(p for p in strongest(it.result, 50) if p.significant and p.value * sign > 0)
        page.tab.click(f'#pairs tr[data-pair="{p.i},{p.j}"]')
        page.settle()
        said = page.tab.inner_text("#sentence")
        assert f"logit {word} the sum of their separate effects, by" in said.replace("\n", " ")
        assert page.data("#sentence")["sign"] == ("more" if sign > 0 else "less")
    page.tab.keyboard.press("Escape")


def test_examples_can_be_chosen(sample, open_page):
    it = sample("digits")
    page = open_page(it.path)
    page.tab.select_option("#example", "2")
    page.settle()
    page.tab.mouse.move(*point(page, 20, (8, 8)))
    page.settle()
    assert page.data("#map")["example"] == "2"
    assert_shows(page, it.result[2], 20)
    assert it.options["headings"][2] in page.tab.text_content("#lead")


def test_the_words_beside_the_matrix_follow_the_example_and_the_mode(sample, open_page):
    it = sample("digits")
    page = open_page(it.path)
    words = [f"the two put the ‘{int(target)}’ logit above" for target in it.result.target.flatten()]
    assert words[0] != words[1]
    page.tab.click("#tab-matrix")
    page.settle()
    assert words[0] in page.tab.inner_text("#matrix-hint")
    page.tab.select_option("#example", "1")
    page.settle()
    assert words[1] in page.tab.inner_text("#matrix-hint")
    open_options(page)
    page.tab.check('input[name="mode"][value="magnitude"]')
    page.settle()
    said = page.tab.inner_text("#matrix-hint")
    assert "signs are left out" in said
    assert "Red" not in said


def test_directions_are_drawn(sample, open_page):
    it = sample("digits")
    page = open_page(it.path)
    page.tab.click("#tab-directions")
    page.settle()
    values = it.result[0].eigh(6).values[0]
    rows = page.tab.eval_on_selector_all("#panel .row", "(rows) => rows.map((row) => Number(row.dataset.value))")
    assert rows == pytest.approx(values.tolist(), rel=1e-5)
    page.tab.click('#panel [data-direction="2"]')
    page.settle()
    assert page.data("#direction")["index"] == "2"


def test_directions_keep_their_signs_in_magnitude_mode(sample, open_page):
    page = open_page(sample("digits").path)
    open_options(page)
    page.tab.check('input[name="mode"][value="magnitude"]')
    page.tab.click("#tab-directions")
    page.settle()
    bars = page.tab.eval_on_selector_all("#panel .bar", "(bars) => bars.map((bar) => bar.style.background)")
    assert "of the denoised matrix" in page.tab.inner_text("#panel")
    own = sample("digits").result[0]
    values = own.eigh(6).values[0]
    assert bars == ["var(--pos)" if value > 0 else "var(--neg)" for value in values]
    vector = own.eigh(1).vectors[0, 0].flatten()
    redder = page.tab.evaluate(
        """() => { const map = document.getElementById("direction"), context = map.getContext("2d"), found = [];
          for (let k = 0; k < 64; k++) {
            const at = [((k % 8) + 0.2) / 8 * map.width, (Math.floor(k / 8) + 0.2) / 8 * map.height];
            const [red, , blue] = context.getImageData(...at, 1, 1).data;
            found.push(red - blue);
          }
          return found; }"""
    )
    strong = vector.abs() > 0.3 * vector.abs().max()
    vector = vector * vector[vector.abs().argmax()].sign()
    assert (torch.tensor(redder)[strong].sign() == vector[strong].sign()).all()
    assert len(vector[strong].sign().unique()) == 2


# --- texts ------------------------------------------------------------------------------------------------------------


def token(page, k):
    return page.tab.locator(f'.token[data-token="{k}"]')


def effects(result, i):
    """value, low and high of each partner of token i, per unit of the gates."""
    row = result.unshrunk().row(i)
    return [end[0].double() for end in (row.value, *row.interval())]


def test_tokens_are_set_as_text_and_coloured_by_their_interactions(sample, open_page):
    it = sample("text")
    page = open_page(it.path)
    assert " ".join(page.tab.inner_text("#text").split()) == "<s> Not so unbelievable, so good."
    one, i = it.result[0], int(page.data("#text")["source"])
    first = next(p for p in one.unshrunk().top_pairs(45)[0] if p.significant)
    assert i == first.i
    value, low, high = effects(one, i)
    found = page.partners()
    assert sorted(found) == [j for j in range(1, 10) if j != i]  # token 0 is not moved
    order = sorted(found, key=lambda j: -abs(float(value[j])))
    assert list(found) == order
    for j, numbers in found.items():
        assert [numbers["value"], numbers["low"], numbers["high"]] == pytest.approx(
            [float(value[j]), float(low[j]), float(high[j])], rel=2e-5, abs=1e-8
        )
    tints = page.tab.eval_on_selector_all(".token", "(all) => all.map((e) => e.style.getPropertyValue('--tint'))")
    strongest_tint = max(range(10), key=lambda k: float(tints[k].split("/")[1].strip(" )")))
    assert strongest_tint == order[0]
    assert "Raising the gates of" in page.tab.inner_text("#sentence")
    arcs = page.tab.eval_on_selector_all("#arcs path", "(all) => all.map((path) => path.dataset.pair)")
    assert f"{first.i},{first.j}" in arcs
    significant = {f"{p.i},{p.j}" for p in one.unshrunk().top_pairs(45)[0] if p.significant}
    assert set(arcs) <= significant
    assert "pixel" not in page.tab.inner_text("body").lower()


def luminance(rgb):
    """The relative luminance of a colour, as WCAG defines it."""
    linear = [v / 12.92 if v <= 0.04 else ((v + 0.055) / 1.055) ** 2.4 for v in (c / 255 for c in rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_letters_can_be_read_on_every_token(sample, open_page, theme):
    page = open_page(sample("text").path, theme=theme)
    look = """(all) => all.filter((e) => e.getAttribute("aria-pressed") === "false").map((e) =>
      [e.style.getPropertyValue("--tint"), getComputedStyle(e).color, getComputedStyle(e).backgroundColor])"""
    looks = page.tab.eval_on_selector_all(".token", look)
    assert len(looks) == 9
    for tint, *colours in looks:
        *colour, opacity = map(float, re.findall(r"[\d.]+", tint))
        letters, card = ([float(v) for v in re.findall(r"[\d.]+", c)[:3]] for c in colours)
        below = luminance([opacity * c + (1 - opacity) * k for c, k in zip(colour, card, strict=True)])
        low, high = sorted([below, luminance(letters)])
        assert (high + 0.05) / (low + 0.05) > 3.5


def test_arcs_over_a_text_of_one_line_have_room(sample, open_page):
    page = open_page(sample("text").path, 1440)
    assert "single" in page.data("#text")
    look = """() => { const top = document.querySelector(".pages").getBoundingClientRect().top;
      return [...document.querySelectorAll("#arcs path")].map((path) => {
        const box = path.getBoundingClientRect();
        return [box.width, box.height, box.top - top];
      }); }"""
    arcs = sorted(page.tab.evaluate(look))
    assert len(arcs) > 1
    assert min(above for *_, above in arcs) > 0
    assert arcs[-1][1] > 1.5 * arcs[0][1]  # the longest is higher than the shortest
    narrow = open_page(sample("text").path, 375)
    assert "single" not in narrow.data("#text")


def test_keys_move_between_tokens_and_lines(sample, open_page):
    page = open_page(sample("text").path, 375, 812)
    token(page, 3).click()
    page.settle()
    assert page.data("#text")["source"] == "3"
    for key, expected in (("ArrowRight", "4"), ("ArrowLeft", "3"), ("End", "9"), ("ArrowRight", "9"), ("Home", "0")):
        page.tab.keyboard.press(key)
        page.settle()
        assert page.data("#text")["source"] == expected
    page.tab.keyboard.press("ArrowDown")
    page.settle()
    tops = page.tab.eval_on_selector_all(".token", "(all) => all.map((e) => Math.round(e.getBoundingClientRect().top))")
    now = int(page.data("#text")["source"])
    assert len(set(tops)) > 1
    assert tops[now] == sorted(set(tops))[1]
    assert page.tab.evaluate("document.activeElement.dataset.token") == str(now)
    page.tab.keyboard.press("Escape")
    page.settle()
    assert page.data("#text")["held"] == "false"


def test_each_token_by_itself(sample, open_page):
    it = sample("text")
    page = open_page(it.path)
    open_options(page)
    page.tab.check('input[name="paint"][value="alone"]')
    page.tab.click("#tab-alone")
    page.settle()
    rows = page.tab.eval_on_selector_all(
        "#features .feature[data-feature]", "(all) => all.map((e) => ({...e.dataset}))"
    )
    gradient = it.result[0].gradient[0].tolist()
    assert [float(row["value"]) for row in rows] == pytest.approx(gradient, rel=1e-5, abs=1e-9)
    assert "does by itself" in page.tab.inner_text("#where-title")
    assert "raises it" in page.tab.inner_text("#text-scale")
    assert token(page, 0).get_attribute("aria-label") == "<s>: not moved"


def test_another_text_has_its_own_tokens(sample, open_page):
    page = open_page(sample("text").path)
    page.tab.select_option("#example", "1")
    page.settle()
    assert " ".join(page.tab.inner_text("#text").split()) == "<b> x einmal, $y$ nicht mehr gut."
    assert "Deutsch" in page.tab.text_content("#lead")


def test_a_text_is_printed_in_light_colours_with_all_lines(sample, open_page):
    page = open_page(sample("text").path, theme="dark")
    page.tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.tab.evaluate("document.documentElement.dataset.theme") == "light"
    assert page.tab.evaluate("document.getElementById('text').offsetWidth") == 600
    page.tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.tab.evaluate("document.documentElement.dataset.theme") == "dark"


@pytest.mark.parametrize("width", [375, 1440])
def test_512_tokens_can_be_read_and_chosen(sample, open_page, width):
    it = sample("long_text")
    page = open_page(it.path, width)
    first = int(page.data("#text")["source"])
    inside = """([k]) => { const box = document.querySelector(".pages").getBoundingClientRect();
      const { top, bottom } = document.querySelector(`[data-token="${k}"]`).getBoundingClientRect();
      return box.top <= top && bottom <= box.bottom + 1; }"""
    assert page.tab.evaluate(inside, [first])
    token(page, 300).click()
    page.settle()
    assert page.data("#text")["source"] == "300"
    page.tab.click("#tab-matrix")
    page.settle()
    cells = int(page.data("#matrix")["count"])
    assert cells <= 40
    assert f"The {cells} of 512 tokens" in page.tab.inner_text("#matrix-hint")
    strongest_pair = it.result[0].unshrunk().top_pairs(1)[0][0]  # the diagonal, which is larger, is not on the scale
    assert float(page.data("#matrix")["limit"]) == pytest.approx(abs(strongest_pair.value), rel=1e-4)
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= width


# --- tables -----------------------------------------------------------------------------------------------------------


def test_the_table_of_pairs_is_that_of_top_pairs_and_can_be_sorted(sample, open_page):
    it = sample("breast_cancer")
    page = open_page(it.path)

    def rows():
        page.settle()
        return page.tab.eval_on_selector_all("#pairs tbody tr", "(rows) => rows.map((row) => ({...row.dataset}))")

    page.tab.click("#more-pairs")
    found, pairs = rows(), strongest(it.result)
    assert len(found) == 60
    assert [row["pair"] for row in found] == [f"{p.i},{p.j}" for p in pairs[:60]]
    for row, p in zip(found, pairs, strict=False):
        assert float(row["value"]) == pytest.approx(p.value, rel=1e-5)
        assert float(row["effect"]) == pytest.approx(p.effect, rel=1e-5)
        assert float(row["q"]) == pytest.approx(p.q_value, rel=1e-5, abs=1e-30)
    page.tab.click('th button[data-column="value"]')
    values = [float(row["value"]) for row in rows()]
    assert values == sorted(values, reverse=True)
    assert values[0] == pytest.approx(max(p.value for p in pairs), rel=1e-5)
    page.tab.click('th button[data-column="value"]')
    assert float(rows()[0]["value"]) == pytest.approx(min(p.value for p in pairs), rel=1e-5)
    assert page.tab.get_attribute('th:has(button[data-column="value"])', "aria-sort") == "ascending"
    page.tab.fill("input[type=search]", "texture error")
    column = it.options["names"].index("texture error")
    assert all(str(column) in row["pair"].split(",") for row in rows())


def test_one_feature_can_be_looked_at(sample, open_page):
    it = sample("breast_cancer")
    page = open_page(it.path)
    page.tab.click('#features button[data-feature="3"]')
    page.settle()
    assert page.data("#features")["source"] == "3"
    assert_shows(page, it.result, 3)
    row = page.tab.inner_text('#features button[data-feature="3"]')
    assert "mean area" in row
    assert f"{float(it.result.inputs[0, 3]):.3g}".replace("-", "−") in row


def test_a_cell_of_the_matrix_chooses_its_pair(sample, open_page):
    it = sample("breast_cancer")
    page = open_page(it.path, 1440)
    page.tab.click("#tab-matrix")
    page.tab.wait_for_selector("#matrix[data-ready]")
    i, j = 7, 22
    x, y = cell(page, i, j)
    page.tab.mouse.move(x, y)
    page.tab.wait_for_selector('#sentence[data-i="7"][data-j="22"]')
    page.tab.mouse.click(x, y)
    page.tab.wait_for_selector('#features[data-source="7"]')
    value, _, _ = expected(it.result, i)
    assert float(page.data("#sentence")["value"]) == pytest.approx(float(value[j]), rel=1e-5)
    page.tab.mouse.move(5, 5)
    page.settle()
    row, column = (int(page.data("#sentence")[key]) for key in ("i", "j"))
    assert (row, column) == (i, j)
    red, _, blue = colour(page, 3, 20)
    assert (red > blue) == (float(it.result[0].unshrunk().hessian[0, 3, 20]) > 0)
    page.tab.focus("#matrix canvas")
    page.tab.keyboard.press("ArrowRight")
    page.tab.wait_for_selector('#sentence[data-i="7"][data-j="23"]')


def cell(page, i, j):
    """Where on the screen a cell of the matrix lies."""
    canvas = page.tab.locator("#matrix canvas")
    canvas.scroll_into_view_if_needed()
    box, data = canvas.bounding_box(), page.data("#matrix")
    scale, margin, size = box["width"] / float(data["side"]), float(data["margin"]), float(data["cell"])
    return box["x"] + scale * (margin + (j + 0.5) * size), box["y"] + scale * (margin + (i + 0.5) * size)


def colour(page, i, j):
    """The colour of a cell of the matrix."""
    look = """([i, j]) => {
        const { margin, cell, side } = document.getElementById("matrix").dataset;
        const canvas = document.querySelector("#matrix canvas");
        const at = (k) => (Number(margin) + (k + 0.5) * Number(cell)) / Number(side) * canvas.width;
        return [...canvas.getContext("2d").getImageData(at(j), at(i), 1, 1).data].slice(0, 3);
    }"""
    return page.tab.evaluate(look, [i, j])


def test_the_slider_shows_the_results_of_each_sigma(sample, open_page):
    it = sample("breast_cancer")
    scales = it.options["sweep"]
    assert isinstance(scales, Sweep)
    page = open_page(it.path)
    page.tab.click('#features button[data-feature="5"]')
    assert page.tab.input_value("#sigma") == "1"
    for key, k in (("ArrowRight", 2), ("Home", 0)):
        page.tab.focus("#sigma")
        page.tab.keyboard.press(key)
        page.settle()
        assert_shows(page, scales[k], 5)
        assert page.tab.inner_text("#sigma-label") == f"Scale of the noise: σ = {['0.250', '0.500', '1.00'][k]}"
    page.tab.click("#tab-sigma")
    page.settle()
    j = int(page.data("#sentence")["j"])
    found = page.tab.eval_on_selector("#sigma-chart", "(chart) => JSON.parse(chart.dataset.values)")
    assert found == pytest.approx([float(expected(r, 5)[0][j]) for r in scales], rel=1e-5)


def test_switches(sample, open_page):
    it = sample("breast_cancer")
    page = open_page(it.path)
    page.tab.click('#features button[data-feature="0"]')
    open_options(page)
    page.tab.check("#only")
    page.settle()
    partners = {p.j if p.i == 0 else p.i for p in strongest(it.result) if p.significant and 0 in (p.i, p.j)}
    assert set(page.partners()) == partners
    page.tab.uncheck("#only")
    page.tab.check('input[name="unit"][value="unit"]')
    page.settle()
    row = it.result[0].row(0).value[0]
    assert {j: n["value"] for j, n in page.partners().items()} == pytest.approx(
        {j: float(row[j]) for j in range(1, 30)}, rel=1e-5
    )
    open_options(page)
    page.tab.check('input[name="mode"][value="magnitude"]')
    page.settle()
    page.tab.click("#tab-matrix")
    page.tab.wait_for_selector("#matrix[data-ready]")
    p = strongest(it.result)[0]
    red, green, blue = colour(page, p.i, p.j)
    assert green < min(red, blue)  # violet: no sign


def test_a_feature_that_was_not_moved_is_said_to_be_unknown(sample, open_page):
    it = sample("standardised")
    page = open_page(it.path)
    assert page.tab.locator("#note").is_visible()  # what one unit is
    assert page.tab.inner_text("#note") == it.options["note"]
    assert "(σ = 0.250)." in page.tab.inner_text("#lead").replace("\u00a0", " ")
    assert "each moved by its σ of 0.250 ·" in page.tab.inner_text("#sentence")
    assert "not moved" in page.tab.inner_text('#features button[data-feature="0"]')
    page.tab.click('#features button[data-feature="0"]')
    page.settle()
    assert page.tab.inner_text("#sentence").strip() == "floor has no noise, so there is no estimate for it."
    assert page.tab.inner_text("#partners-hint") == "It has no noise, so there is no estimate for it."
    assert page.partners() == {}
    page.tab.click("#tab-matrix")
    page.settle()
    assert "Empty: no noise." in page.tab.inner_text("#matrix-hint")


def test_slopes_have_the_intervals_of_their_level(sample, open_page):
    it = sample("standardised")
    page = open_page(it.path)
    one = it.result[0]
    width = float(student_t.quantile(0.95, one.noise.of_gradient().df)[0])
    assert width > 2.2  # so few draws: two standard errors are too little
    for k in (1, 2, 3):
        found = page.data(f'#features button[data-feature="{k}"]')
        assert float(found["value"]) == pytest.approx(0.25 * float(one.gradient[0, k]), rel=1e-5)
        assert float(found["half"]) == pytest.approx(0.25 * width * float(one.gradient_stderr[0, k]), rel=1e-5)
    page.tab.click('#features button[data-feature="2"]')
    page.settle()
    half = 0.25 * width * float(one.gradient_stderr[0, 2])
    page.tab.click("#sentence .help")
    said = page.tab.inner_text("#help").replace("\u00a0", " ").split("size by itself changes the output by")[1]
    assert float(said.split("±")[1].split(";")[0].rstrip(".")) == pytest.approx(half, rel=0.01)


def test_exact_zeros_have_no_sign(sample, open_page):
    page = open_page(sample("exact").path)

    def said(i, j):
        page.tab.click(f'#features button[data-feature="{i}"]')
        page.tab.click(f'#partners button[data-partner="{j}"]')
        page.settle()
        return page.tab.inner_text("#sentence p:first-child"), page.data("#sentence")["sign"]

    assert said(0, 1) == (
        "Raising a and b together puts the output above the sum of their separate effects, by 1.00.",
        "more",
    )
    assert said(0, 3) == ("a and d do not act together here: exactly 0.", "none")
    page.tab.click("#tab-directions")
    page.settle()
    values = page.tab.eval_on_selector_all("#panel .row", "(rows) => rows.map((row) => Number(row.dataset.value))")
    page.tab.click(f'#panel [data-direction="{values.index(0)}"]')
    page.settle()
    assert "the output does not bend: λ = 0" in page.tab.inner_text("#panel .hint")
    page.tab.click("#tab-matrix")
    page.tab.wait_for_selector("#matrix[data-ready]")
    for k, words in ((3, "does not bend: exactly 0."), (2, "bends upwards by 2.00.")):
        page.tab.mouse.move(*cell(page, k, k))
        page.tab.wait_for_selector(f'#sentence[data-i="{k}"][data-j="{k}"]')
        assert words in page.tab.inner_text("#sentence")
    affine = open_page(sample("affine").path)
    assert affine.tab.inner_text("#sentence p:first-child").startswith("No draw shows a and b acting together")
    assert affine.data("#sentence")["sign"] == "none"


def test_attributions_and_directions_of_the_user_are_called_by_what_they_are(sample, open_page):
    it = sample("attribution")
    page = open_page(it.path)
    said = page.tab.inner_text("#sentence")
    assert "The interaction of b and c is +4.00." in said  # whatever a usual move is
    assert "moved by its σ" not in said
    assert page.tab.locator('input[name="unit"]').count() == 0
    assert page.tab.inner_text("#partners-hint") == "Attributions, not derivatives."
    assert "Attributions, not derivatives." in page.tab.inner_text("#pairs-hint")
    assert page.tab.locator('th button[data-column="value"]').count() == 0
    page.tab.click("#tab-matrix")
    page.settle()
    assert "Red: the interaction is positive" in page.tab.inner_text("#matrix-hint")
    page.tab.click("#tab-directions")
    page.settle()
    assert "bends" not in page.tab.inner_text("#panel")
    page = open_page(sample("directed").path)
    assert "Both moved along the given direction." in page.tab.inner_text("#pairs-hint")
    page.tab.click("#tab-matrix")
    page.settle()
    assert "Red: moved together" in page.tab.inner_text("#matrix-hint")


# --- series -----------------------------------------------------------------------------------------------------------


def _window(page, k, height=0.2):
    box = page.tab.locator(f'#chart rect[data-window="{k}"]').bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + height * box["height"]


def bars(page):
    """value and half-width of each bar of the chart, by partner."""
    found = page.tab.eval_on_selector_all("#chart .bar", "(bars) => bars.map((bar) => ({...bar.dataset}))")
    return {int(bar["partner"]): (float(bar["value"]), float(bar["half"])) for bar in found}


def test_windows_can_be_hovered_and_clicked(sample, open_page):
    it = sample("series")
    page = open_page(it.path, 1440)
    page.tab.mouse.move(*_window(page, 6))
    page.tab.wait_for_selector('#chart[data-source="6"][data-held="false"]')
    assert_shows(page, it.result, 6)
    page.tab.mouse.click(*_window(page, 3))
    page.tab.wait_for_selector('#chart[data-source="3"][data-held="true"]')
    assert_shows(page, it.result, 3)
    value, _, high = expected(it.result, 3)
    found = bars(page)
    assert sorted(found) == [j for j in range(10) if j != 3]
    for j, (y, reach) in found.items():
        assert y == pytest.approx(float(value[j]), rel=1e-5)
        assert reach == pytest.approx(float(high[j] - value[j]), rel=1e-4)
    assert page.tab.locator("#chart .whisker").count() == 9
    page.tab.mouse.click(*_window(page, 3))
    page.tab.wait_for_selector('#chart[data-source="3"][data-held="false"]')


def test_the_heights_of_bars_are_in_proportion_to_their_numbers(sample, open_page):
    page = open_page(sample("series").path, 1440)
    drawn = page.tab.eval_on_selector_all(
        "#chart .bar", "(bars) => bars.map((bar) => [Math.abs(bar.dataset.value), Number(bar.getAttribute('height'))])"
    )
    (most, tall), *_ = sorted(drawn, reverse=True)
    assert tall > 40
    assert [height for _, height in drawn] == pytest.approx([value / most * tall for value, _ in drawn], abs=1e-3)


def test_windows_have_their_numbers_in_the_chart_and_in_the_list(sample, open_page):
    page = open_page(sample("series").path)
    numbers = page.tab.eval_on_selector_all("#chart > text", "(all) => all.map((e) => e.textContent)")
    assert numbers == [str(k) for k in range(10)]
    rows = page.tab.eval_on_selector_all(
        "#partners .row", "(rows) => rows.map((row) => [row.dataset.partner, row.querySelector('.tag').textContent])"
    )
    assert all(k == tag for k, tag in rows)


def test_a_phone_chooses_by_touch(sample, chromium, open_page):
    page = open_page(sample("image").path, 375, 667, touch=True)
    box = page.tab.locator("#map").bounding_box()
    assert box["width"] > 300
    page.tab.locator("#map").tap(position={"x": 0.35 * box["width"], "y": 0.35 * box["height"]})
    page.tab.wait_for_selector('#map[data-source="33"][data-held="true"]')
    page.tab.locator("#input").tap(position={"x": 0.55 * box["width"], "y": 0.55 * box["height"]})
    page.tab.wait_for_selector('#map[data-source="55"]')
    assert page.tab.locator("#input").bounding_box()["width"] == box["width"]  # as large as the map


def test_intervals_that_are_not_known_are_not_drawn_as_narrow_ones(sample, open_page):
    page = open_page(sample("two_draws").path)
    assert page.tab.locator("#chart .whisker").count() == 0
    assert "here are too few draws for intervals" in page.tab.inner_text("#where-hint")
    assert "here are too few draws for intervals" in page.tab.inner_text("#partners-hint")
    assert page.tab.inner_text("#chip").startswith("■ error unknown")
    widths = page.tab.eval_on_selector_all("#partners .whisker", "(lines) => lines.map((line) => line.style.width)")
    assert widths == ["100%"] * 3
    assert "± ?" in page.tab.inner_text("#partners")


def test_arrow_keys_walk_along_the_curve(sample, open_page):
    it = sample("series")
    page = open_page(it.path)
    page.tab.focus("#chart")
    for _ in range(12):
        page.tab.keyboard.press("ArrowLeft")
    page.tab.keyboard.press("ArrowRight")
    page.settle()
    assert page.data("#chart")["source"] == "1"
    assert_shows(page, it.result, 1)


# --- keyboard ---------------------------------------------------------------------------------------------------------


def test_an_image_can_be_walked_with_the_keyboard_alone(sample, open_page):
    it = sample("image")
    page = open_page(it.path)
    for _ in range(30):
        page.tab.keyboard.press("Tab")
        if page.tab.evaluate("document.activeElement.id") == "map":
            break
    assert page.tab.evaluate("document.activeElement.id") == "map"
    outline = page.tab.evaluate("getComputedStyle(document.activeElement).outlineWidth")
    assert outline == "3px"  # one sees where one is
    start = int(page.data("#map")["source"])
    r, c = divmod(start, 10)
    for key, step in (("ArrowRight", (0, 1)), ("ArrowDown", (1, 0)), ("ArrowLeft", (0, -1)), ("ArrowUp", (-1, 0))):
        page.tab.keyboard.press(key)
        page.settle()
        r, c = min(9, max(0, r + step[0])), min(9, max(0, c + step[1]))
        assert page.data("#map")["source"] == str(10 * r + c)
    assert_shows(page, it.result, 10 * r + c)
    page.tab.focus("#map")
    page.tab.keyboard.press("Tab")
    assert page.tab.evaluate("document.activeElement.className") == "help"
    page.tab.keyboard.press("Tab")
    page.tab.keyboard.press("ArrowDown")
    page.settle()
    second = page.tab.eval_on_selector_all("#partners .row", "(rows) => rows.map((row) => row.dataset.partner)")[1]
    assert page.data("#map")["partner"] == second
    assert page.tab.evaluate("document.activeElement.dataset.partner") == second


def test_tabs_and_rows_follow_the_arrow_keys(sample, open_page):
    page = open_page(sample("breast_cancer").path)
    page.tab.focus("#tab-pairs")
    page.tab.keyboard.press("ArrowRight")
    page.settle()
    assert page.tab.get_attribute("#tab-matrix", "aria-selected") == "true"
    assert page.tab.evaluate("document.activeElement.id") == "tab-matrix"
    page.tab.keyboard.press("ArrowLeft")
    page.tab.focus('#features button[tabindex="0"]')
    page.tab.keyboard.press("Home")
    page.tab.keyboard.press("ArrowDown")
    page.settle()
    assert page.data("#features")["source"] == "1"
    page.tab.focus("#pairs tbody tr")
    page.tab.keyboard.press("ArrowDown")
    page.tab.keyboard.press("Enter")
    page.settle()
    pair = page.data("#pairs tbody tr:nth-child(2)")["pair"]
    assert f"{page.data('#sentence')['i']},{page.data('#sentence')['j']}" == pair


# --- pages without scripts --------------------------------------------------------------------------------------------


def test_the_table_of_a_data_set_scrolls_in_its_own_box(chromium, tmp_path):
    names = ["mean concavity error", "worst_fractal_dimension_of_the_nucleus", "x" * 40, "age"]
    inputs = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    found = global_interactions(sh.SmoothHess(lambda x: x.prod(1)), inputs, sigma=0.5, n_calls=16)
    path = global_page(found, tmp_path / "data.html", names=names)
    context = chromium.new_context(viewport={"width": 375, "height": 812}, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(path.as_uri())
    page.locator("details summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    assert page.eval_on_selector(".scroll", "(box) => box.scrollWidth > box.clientWidth")
    context.close()
