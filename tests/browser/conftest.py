"""Chromium, driven by Playwright, and the pages that it opens; all tests here are skipped where either is missing."""

import os
import shutil
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smoothhess as sh
from smoothhess import baselines
from smoothhess.result.exact import Attribution
from smoothhess.result.interactions import Interactions
from smoothhess.view.report import report
from tests.view import texts

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
HOSTILE = ["</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<b>b</b> & {{title}}", "'\"`${x}%{y}"]


@pytest.fixture(scope="session")
def chromium():
    """A headless Chromium of this machine: Playwright's own download is not needed."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    options = ["--disable-gpu", "--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=found, args=options)
        yield browser
        browser.close()


@dataclass
class Opened:
    """A page in the browser, and what must stay empty: complaints in its console, and requests to anywhere."""

    tab: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def settle(self) -> None:
        """Until what was asked for is drawn."""
        self.tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def data(self, selector: str) -> dict[str, str]:
        """The data attributes of an element."""
        return self.tab.eval_on_selector(selector, "(element) => ({...element.dataset})")

    def partners(self) -> dict[int, dict[str, float]]:
        """All partners of the chosen feature, with their numbers."""
        if self.tab.locator("#all-partners").is_visible() and "all" in self.tab.locator("#all-partners").inner_text():
            self.tab.click("#all-partners")
            self.settle()
        rows = self.tab.eval_on_selector_all("#partners .row", "(rows) => rows.map((row) => ({...row.dataset}))")
        numbers = ("value", "low", "high", "q")
        return {int(row["partner"]): {name: float(row[name]) for name in numbers} for row in rows}


@pytest.fixture
def open_page(chromium):
    """Opens a file; afterwards nothing may have been complained of, asked for or popped up."""
    opened: list[tuple[Any, Opened]] = []

    def open_(path: Path, width: int = 1280, height: int = 900, theme: str = "light", touch: bool = False) -> Opened:
        size = {"width": width, "height": height}
        context = chromium.new_context(viewport=size, color_scheme=theme, has_touch=touch)
        page = Opened(context.new_page())
        page.tab.set_default_timeout(20_000)
        page.tab.on("console", lambda message: page.complaints.append(f"{message.type}: {message.text}"))
        page.tab.on("pageerror", lambda error: page.complaints.append(f"error: {error}"))
        page.tab.on("dialog", lambda dialog: (page.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.tab.on("request", lambda request: page.requests.append(request.url))
        page.tab.goto(path.as_uri())
        page.tab.wait_for_selector("body[data-ready]")
        page.settle()
        opened.append((context, page))
        return page

    yield open_
    for context, page in opened:
        page.settle()
        context.close()
        assert page.complaints == []
        assert [url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))] == []


@dataclass(frozen=True, eq=False)
class Sample:
    """A page and the result that it shows."""

    path: Path
    result: Interactions
    options: dict[str, Any]


@pytest.fixture(scope="session")
def sample(tmp_path_factory):
    """Makes the page of a name, once."""
    folder = tmp_path_factory.mktemp("pages")

    @cache
    def make(name: str) -> Sample:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            result, options = MAKERS[name]()
        return Sample(report(result, folder / f"{name}.html", **options), result, options)

    return make


def _digits():
    pytest.importorskip("sklearn")
    from smoothhess.cli import demo

    task = demo.digits(0)
    found = demo.explain(task, demo.train(task, 32, 4, 0), 0, n_calls=256)
    shown = [1 - x for x in found.result.inputs]
    headings = [found.heading(i) for i in range(3)]
    return found.result, {"image": shown, "classes": list("0123456789"), "output": "logit", "headings": headings}


def _breast_cancer():
    pytest.importorskip("sklearn")
    from smoothhess.cli import demo

    task = demo.breast_cancer(0)
    net = demo.train(task, 16, 4, 0)
    inputs, target = task.test_inputs[:2], task.test_labels[:2]
    scales = sh.sweep(net, inputs, [0.25, 0.5, 1.0], target=target, n_calls=400)
    note = "Columns are standardised."
    return scales[1], {"names": task.names, "classes": task.classes, "sweep": scales, "note": note}


def segments() -> torch.Tensor:
    """A 10 × 10 grid over 224 × 224 pixels."""
    tenth = torch.arange(224) * 10 // 224
    return tenth[:, None] * 10 + tenth


def _image():
    net = nn.Sequential(nn.AvgPool2d(16), nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3)).eval()
    x = torch.linspace(0, 1, 224)
    picture = torch.stack([x.expand(224, 224), x[:, None].expand(224, 224), (8 * x).sin().square().expand(224, 224)])
    # Noise that moves whole segments: 100 dimensions are quick to look at.
    gaussian = sh.segments.noise(segments().expand(3, -1, -1), 0.3)
    result = sh.SmoothHess(net).attribute(
        picture[None],
        target=1,
        gaussian=gaussian,
        n_calls=200,
        feature_mask=segments(),
        control=None,
        internal_batch_size=50,
    )
    return result, {"classes": ["dog", "cat", "cup"], "output": "logit"}


def _series():
    times = torch.linspace(0, 8, 200)
    curve = torch.exp(-((times - 2) ** 2)) * 3 + torch.sin(3 * times) / 3
    net = nn.Sequential(
        nn.Unflatten(1, (1, 200)), nn.Conv1d(1, 8, 21, 10), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.ReLU()
    )
    model = nn.Sequential(net, nn.Linear(8, 1))
    result = sh.SmoothHess(model).attribute(curve[None], target=0, sigma=0.3, n_calls=800)
    return result.groups(torch.arange(200) // 20), {"series": times, "units": "s", "output": "risk"}


def _hostile():
    def f(x):
        return torch.relu(x[:, 0] - x[:, 1]) * 2 + torch.relu(x[:, 2] + x[:, 3])

    result = sh.SmoothHess(f).attribute(torch.zeros(2, 4), sigma=0.5, n_calls=400)
    words = {"title": HOSTILE[0], "headings": HOSTILE[:2], "units": HOSTILE, "note": HOSTILE[1], "classes": HOSTILE[1]}
    return result, {"names": HOSTILE, **words}


def _standardised():
    """A row of a file whose first column does not vary, from few draws and with large numbers."""

    def price(x):
        return 3.6e6 * torch.tanh(x[:, 1] * x[:, 2] + x[:, 3]) + 2.7e5 * torch.relu(x[:, 1] - x[:, 3])

    gaussian = sh.Diagonal(torch.tensor([0.0, 0.25, 0.25, 0.25]))
    inputs = torch.tensor([[0.0, 0.4, -0.3, 0.2]])
    result = sh.SmoothHess(price).attribute(inputs, gaussian=gaussian, n_calls=12, design="antithetic", control=None)
    note = "One unit of a feature is one standard deviation of its column."
    return result, {"names": ["floor", "rooms", "size", "age"], "values": [7, 3, 81, 12], "note": note}


def _exact():
    """Derivatives that are known: one pair acts together, the others do not; some features bend, some do not."""
    inputs = torch.tensor([[0.3, -0.2, 0.5, 0.1]], dtype=torch.float64)
    return baselines.hessian(lambda x: x[:, 0] * x[:, 1] + x[:, 2] ** 2 + x[:, 3], inputs), {"names": [*"abcd"]}


def _affine():
    inputs = torch.zeros(1, 4)
    return sh.SmoothHess(lambda x: x.sum(1)).attribute(inputs, sigma=0.5, n_calls=100), {"names": [*"abcd"]}


def _attribution():
    x, matrix = torch.ones(1, 3, dtype=torch.float64), torch.tensor([[1.0, -2, 3], [-2, 0, 4], [3, 4, 5]])
    return Attribution.make(x, x.sum(1), x, matrix[None], scales=[2, 3, 4]), {"names": [*"abc"]}


def _directed():
    inputs = torch.tensor([[0.3, -0.2, 0.5, 0.1]])
    result = sh.SmoothHess(lambda x: (x[:, 0] * x[:, 2]).tanh() + x[:, 1] * x[:, 3]).attribute(
        inputs, sigma=0.5, n_calls=400
    )
    return result.groups(torch.tensor([0, 0, 1, 1]), -inputs[0]), {"names": ["left", "right"]}


def _two_draws():
    def curve(x):
        return torch.tanh(x[:, :20].mean(1) * x[:, 20:].mean(1))

    inputs = torch.linspace(0, 2, 40)[None]
    result = sh.SmoothHess(curve).attribute(inputs, sigma=0.5, n_calls=2, design="antithetic", shrink=False)
    return result.groups(torch.arange(40) // 10), {"series": True}


def _text():
    """Two texts of ten tokens; the first token is not moved."""
    frozen = (True, *[False] * 9)
    names = (tuple(texts.TOKENS), ("<b>", "##x", "ein", "##mal", ",", "$y$", "nicht", "mehr", "gut", "."))
    return texts.result(batch=2, frozen=frozen, names=names), {"output": "score", "headings": ["English", "Deutsch"]}


def _long_text():
    names = tuple(f"{'Ġ' if k % 3 else ''}tok{k % 90}" for k in range(512))
    return texts.result(count=512, n_calls=1024, control=None, names=names), {}


MAKERS = {
    "text": _text,
    "long_text": _long_text,
    "digits": _digits,
    "breast_cancer": _breast_cancer,
    "image": _image,
    "series": _series,
    "hostile": _hostile,
    "standardised": _standardised,
    "exact": _exact,
    "affine": _affine,
    "attribution": _attribution,
    "directed": _directed,
    "two_draws": _two_draws,
}
