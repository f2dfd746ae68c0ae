"""The pages of the documentation run as they stand, and print what they say they print."""

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"
FAST = [
    "quickstart.md",
    "certainty.md",
    "howto/comparing.md",
    "howto/neurons.md",
    "howto/other-frameworks.md",
    "howto/pages.md",
    "howto/several-inputs.md",
    "howto/text.md",
    "howto/threads.md",
]
SLOW = [
    "sigma.md",
    "troubleshooting.md",
    "global.md",
    "howto/attacks.md",
    "howto/command-line.md",
    "howto/datasets.md",
    "howto/discoveries.md",
    "howto/images.md",
    "howto/large-inputs.md",
    "howto/scikit-learn.md",
    "howto/series.md",
    "howto/tables.md",
]
NEEDS = {
    "howto/attacks.md": ["sklearn", "matplotlib"],
    "howto/command-line.md": ["cyclopts", "skimage", "matplotlib", "sklearn", "pandas"],
    "howto/discoveries.md": ["sklearn", "pandas"],
    "howto/images.md": ["skimage", "matplotlib"],
    "howto/large-inputs.md": ["skimage", "matplotlib"],
    "howto/neurons.md": ["sklearn", "matplotlib"],
    "howto/several-inputs.md": ["sklearn", "matplotlib"],
    "howto/datasets.md": ["matplotlib"],
    "howto/other-frameworks.md": ["pandas", "scipy"],
    "global.md": ["pandas", "matplotlib"],
    "howto/scikit-learn.md": ["sklearn", "pandas", "matplotlib"],
    "howto/series.md": ["matplotlib"],
    "howto/tables.md": ["sklearn", "pandas", "matplotlib"],
    "howto/text.md": ["matplotlib", "sklearn", "transformers"],
    "quickstart.md": ["matplotlib"],
}
LARGE = {  # examples about a large error, which say so; a mean over centres with 2T calls each
    "howto/images.md": ["pixels ="],
    "certainty.md": ["few ="],
    "howto/text.md": ["strength ="],
    "troubleshooting.md": [""],
}
ELSEWHERE = {"report", "digits"}  # pictures that no page makes: of the gallery's table and of the demo

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="an installed package has no docs")


def rerun():
    """The module that runs pages and writes what they print."""
    spec = importlib.util.spec_from_file_location("rerun", DOCS / "_sphinx" / "rerun.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rerun"] = module  # its records look themselves up
    spec.loader.exec_module(module)
    return module


def words(text):
    """Lines without numbers, which may differ in the last place on another machine.

    Of the rows of a table, which begin with the index of an example, only the first is compared, and the others are
    counted: pairs of nearly equal estimates change places with the rounding of the processor.
    """
    found, rows = [], 0
    for line in text.splitlines():
        rows = rows + 1 if re.match(r" +\d+ ", line) else 0
        found.append("row" if rows > 1 else re.sub(r"[-+−\d.,e±%\s–*=…<>]+", " ", line).split())
    return found


@pytest.mark.parametrize("page", [*FAST, *(pytest.param(page, marks=pytest.mark.slow) for page in SLOW)])
def test_the_page_runs(page, tmp_path, monkeypatch):
    for package in NEEDS.get(page, []):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    pages, names = rerun(), {}
    text = (DOCS / page).read_text(encoding="utf-8")
    with torch.random.fork_rng():
        for block in pages.blocks(text):
            with pages.recorded() as made:
                printed = pages.run_block(block, names, page)
            if block.shown is not None:
                assert words(printed) == words(block.shown), printed
            elif "print(" in block.code:
                assert printed
            if ".attribute(" in block.code:
                assert "relative error" in printed or "rel. error" in printed, block.code
                large = any(block.code.startswith(code) for code in LARGE.get(page, []))
                assert large or all(float(r.relative_error.max()) <= 0.2 for r in made), block.code
            if block.language == "sh":
                check_commands(block.code)
    assert names
    for name in set(pages.PICTURE.findall(text)) - ELSEWHERE:
        assert (DOCS / "images" / f"{name}.png").exists()
        assert [*tmp_path.rglob(f"{name}.png"), *tmp_path.rglob(f"{name}.html")], name


def check_commands(lines):
    """Commands with --out wrote pages there."""
    for line in lines.splitlines():
        arguments = shlex.split(line, comments=True)
        if line.startswith("smoothhess ") and "--out" in arguments:
            assert [*Path(arguments[arguments.index("--out") + 1]).glob("*.html")]


def test_every_page_with_code_is_known():
    """A page is run here or elsewhere, or its code stands in the air on purpose."""
    elsewhere = {"choosing.md"}  # tests/evaluate/test_choosing_page.py
    in_the_air = {
        "index.md",
        "accuracy.md",
        "attack.md",
        "baselines.md",
        "baselines_attributions.md",
        "howto/cluster.md",
    }
    pages = {p.relative_to(DOCS) for p in DOCS.rglob("*.md") if "```python" in p.read_text(encoding="utf-8")}
    pages = {str(p) for p in pages if p.parts[0] not in ("benchmarks", "reproduction")}
    assert pages == {*FAST, *SLOW} | elsewhere | in_the_air
