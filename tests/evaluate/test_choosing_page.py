"""The page on choosing σ runs as it stands, and prints what it says it prints."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from smoothhess import evaluate

PAGE = Path(__file__).parents[2] / "docs" / "choosing.md"


@pytest.mark.skipif(not PAGE.exists(), reason="an installed package has no docs")
@pytest.mark.skipif(not callable(getattr(evaluate, "select", None)), reason="smoothhess.evaluate does not export it")
def test_the_page_runs():
    blocks = re.findall(r"```(python)?\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names, outputs = {}, 0
    for (kind, code), (_, shown) in zip(blocks, [*blocks[1:], ("python", "")], strict=True):
        if kind != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(PAGE), "exec"), names)
        if "print(" in code:
            outputs += 1
            # words must agree; digits may differ in the last place on another machine
            words = [re.sub(r"[-+\d.e±%\s–*=]+", " ", text).split() for text in (printed.getvalue(), shown)]
            assert words[0] == words[1]
    assert outputs == 6
