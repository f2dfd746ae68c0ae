"""Run the code of the pages and write its output into them.

    OMP_NUM_THREADS=1 python docs/_sphinx/rerun.py               # every page whose code runs
    OMP_NUM_THREADS=1 python docs/_sphinx/rerun.py quickstart.md howto/images.md
    OMP_NUM_THREADS=1 python docs/gallery/make.py                # the gallery

The blocks of a page run in order, in one namespace and in a temporary folder. The block without a language that
directly follows one of them is replaced by its output. For each block that creates results, their relative errors
are printed. A picture ../images/NAME.png that a page shows is replaced by the file NAME.png that its code wrote, or by
a screenshot of its page NAME.html, which needs Chromium.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
PAGES = [
    "quickstart.md",
    "certainty.md",
    "sigma.md",
    "troubleshooting.md",
    "global.md",
    "choosing.md",
    "howto/attacks.md",
    "howto/command-line.md",
    "howto/comparing.md",
    "howto/datasets.md",
    "howto/discoveries.md",
    "howto/images.md",
    "howto/large-inputs.md",
    "howto/neurons.md",
    "howto/other-frameworks.md",
    "howto/pages.md",
    "howto/scikit-learn.md",
    "howto/several-inputs.md",
    "howto/series.md",
    "howto/tables.md",
    "howto/text.md",
    "howto/threads.md",
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PICTURE = re.compile(r"\]\((?:\.\./)?images/([\w-]+)\.png\)")
WINDOW = {"width": 1200, "height": 900}  # of the screenshots
CHROMIUM = "no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-component-update"


@dataclass(frozen=True)
class Block:
    """Code of a page, and the position of its output."""

    language: str  # "python" or "sh"
    code: str
    shown: str | None  # the output on the page
    place: tuple[int, int]  # position of that output in the page


def blocks(text: str) -> Iterator[Block]:
    """Yield the code blocks of a page, in order."""
    found = [*FENCE.finditer(text)]
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block[1] not in ("python", "sh"):
            continue
        shown, place = None, (0, 0)
        if after is not None and after[1] == "" and not text[block.end() : after.start()].strip():
            shown, place = after[2], after.span(2)
        yield Block(block[1], block[2], shown, place)


def run_block(block: Block, names: dict[str, Any], page: str) -> str:
    """Return the output of a block."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if block.language == "python":
            exec(compile(block.code, page, "exec"), names)
        else:
            run_commands(block.code)
    return printed.getvalue()


def run_commands(lines: str) -> None:
    """Run the smoothhess commands; others, such as pip, are skipped."""
    from smoothhess.cli.main import main

    for line in lines.splitlines():
        if line.startswith("smoothhess "):
            code = main(shlex.split(line, comments=True)[1:])
            if code:
                raise RuntimeError(f"{line} ends with {code}")


@contextlib.contextmanager
def recorded() -> Iterator[list[Any]]:
    """Record the results of all explainers in a list."""
    from smoothhess import SmoothHess

    made: list[Any] = []

    def recording(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            made.append(method(*args, **options))
            return made[-1]

        return call

    kept = {name: getattr(SmoothHess, name) for name in ("attribute", "more")}
    try:
        for name, method in kept.items():
            setattr(SmoothHess, name, recording(method))
        yield made
    finally:
        for name, method in kept.items():
            setattr(SmoothHess, name, method)


def copy_pictures(text: str, folder: Path, images: Path = DOCS / "images") -> None:
    """Copy the pictures of a page from the folder in which its code ran."""
    for name in PICTURE.findall(text):
        for made in folder.rglob(f"{name}.png"):
            shutil.copyfile(made, images / f"{name}.png")
        for made in folder.rglob(f"{name}.html"):
            screenshot(made, images / f"{name}.png")


def screenshot(page: Path, picture: Path) -> None:
    """Save the first window of an interactive page."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        print(f"{picture.name} is not replaced: it needs Chromium")
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=[f"--{flag}" for flag in CHROMIUM.split()])
        tab = browser.new_page(viewport=WINDOW)  # type: ignore[arg-type]
        tab.goto(page.as_uri())
        tab.wait_for_load_state("networkidle")
        tab.screenshot(path=str(picture))
        browser.close()


def rerun(page: str) -> None:
    """Run a page and write its output into it."""
    import torch

    path, names = DOCS / page, {}
    text = path.read_text(encoding="utf-8")
    changes = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), torch.random.fork_rng():
        sys.path.insert(0, folder)
        try:
            for block in blocks(text):
                with recorded() as made:
                    printed = run_block(block, names, page)
                if block.shown is not None:
                    changes.append((block.place, printed.rstrip() + "\n"))
                if made:
                    first = next(line for line in block.code.splitlines() if "attribute(" in line or line)
                    print(f"{page}: {first.strip()[:70]}")
                for result in made:
                    served, unbiased = (
                        ", ".join(f"{e:.3f}" for e in r.relative_error[:4].tolist())
                        for r in (result, result.unshrunk())
                    )
                    print(f"    {result.shape} {served} (unbiased {unbiased}), {int(result.n_calls.max())} calls")
            copy_pictures(text, Path(folder))
        finally:
            sys.path.remove(folder)
            sys.modules.pop("mine", None)
    for (start, stop), printed in reversed(changes):
        text = text[:start] + printed + text[stop:]
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for page in sys.argv[1:] or PAGES:
        rerun(page)
