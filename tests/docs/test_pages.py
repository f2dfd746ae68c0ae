"""The pages of the documentation run as they stand, and print what they say they print."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
import torch

from smoothhess.cli import main

DOCS = Path(__file__).parents[2] / "docs"
FAST = ["quickstart.md", "certainty.md", "howto/neurons.md", "howto/other-frameworks.md", "howto/pages.md"]
SLOW = [
    "sigma.md",
    "global.md",
    "howto/attacks.md",
    "howto/command-line.md",
    "howto/datasets.md",
    "howto/images.md",
    "howto/large-inputs.md",
    "howto/series.md",
    "howto/tables.md",
]
NEEDS = {
    "howto/attacks.md": ["sklearn"],
    "howto/command-line.md": ["cyclopts", "skimage", "matplotlib"],
    "howto/images.md": ["skimage", "matplotlib"],
    "howto/other-frameworks.md": ["pandas", "scipy"],
    "howto/series.md": ["matplotlib"],
    "howto/tables.md": ["sklearn", "pandas", "matplotlib"],
    "quickstart.md": ["matplotlib"],
}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="an installed package has no docs")


def blocks(page):
    """(language, code, what it is said to print or None) in order."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = [*FENCE.finditer(text)]
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block[1] not in ("python", "sh"):
            continue
        follows = after is not None and after[1] == "" and not text[block.end() : after.start()].strip()
        yield block[1], block[2], after[2] if follows and after is not None else None


def words(text):
    """Without numbers, which may differ in the last place on another machine."""
    return re.sub(r"[-+−\d.,e±%\s–*=…<>]+", " ", text).split()


@pytest.mark.parametrize("page", [*FAST, *(pytest.param(page, marks=pytest.mark.slow) for page in SLOW)])
def test_the_page_runs(page, tmp_path, monkeypatch):
    for package in NEEDS.get(page, []):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names = {}
    with torch.random.fork_rng():
        for language, code, expected in blocks(page):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                if language == "python":
                    exec(compile(code, page, "exec"), names)
                else:
                    run_commands(code)
            if expected is not None:
                assert words(printed.getvalue()) == words(expected), printed.getvalue()
            elif "print(" in code:
                assert printed.getvalue()
    assert names


def run_commands(lines):
    """Those of smoothhess; others, such as pip, are not for tests."""
    for line in lines.splitlines():
        if line.startswith("smoothhess "):
            arguments = shlex.split(line, comments=True)[1:]
            assert main(arguments) == 0, line
            if "--out" in arguments:
                assert [*Path(arguments[arguments.index("--out") + 1]).glob("*.html")]


def test_every_page_with_code_is_known():
    """A page is run here or elsewhere, or its code stands in the air on purpose."""
    elsewhere = {"choosing.md"}  # tests/evaluate/test_choosing_page.py
    in_the_air = {
        "index.md",
        "accuracy.md",
        "attack.md",
        "rivals.md",
        "rivals_attributions.md",
        "howto/cluster.md",
    }
    pages = {p.relative_to(DOCS) for p in DOCS.rglob("*.md") if "```python" in p.read_text(encoding="utf-8")}
    pages = {str(p) for p in pages if p.parts[0] not in ("benchmarks", "reproduction")}
    assert pages == {*FAST, *SLOW} | elsewhere | in_the_air
