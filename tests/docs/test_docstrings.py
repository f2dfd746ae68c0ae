"""Docstrings become reStructuredText without changing what they say."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "docs" / "_sphinx" / "docstrings.py"
pytestmark = pytest.mark.skipif(not SOURCE.exists(), reason="an installed package has no docs")


@pytest.fixture(scope="module")
def docstrings():
    spec = importlib.util.spec_from_file_location("docstrings", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_markup_characters_mean_themselves(docstrings):
    text = docstrings.plain(["(B, *shape) of |H_ij|, *not* of `a * b | c`, x_"])[0]
    assert text == r"(B, \*shape) of \|H_ij\|, *not*\  of `a * b | c`\ , x\_"


def test_formulas_keep_their_shape_and_examples_stay(docstrings):
    lines = ["Words:", "", "    H = E[z γᵀ]", "", ">>> 1 * 2", "2"]
    assert docstrings.plain(lines) == ["Words:", "", "::", "", "    H = E[z γᵀ]", "", ">>> 1 * 2", "2", ""]


def test_arguments_become_fields(docstrings):
    lines = ["Args:", "    inputs, target: as", "        everywhere.", "    **options: others."]
    found = docstrings.plain(lines)
    assert found[:4] == [":param inputs: as", "    everywhere.", ":param target: as", "    everywhere."]
    assert found[4] == r":param \*\*options: others."
    assert docstrings.plain(["Returns:", "    A number."])[:2] == [":returns:", "    A number."]


@dataclass
class Record:
    first: int  # what it is, (B, *shape)
    second: str = "#"  # another
    _hidden: int = 0


def test_comments_of_fields_are_found(docstrings):
    assert docstrings.field_comments(Record) == {"first": "what it is, (B, *shape)", "second": "another"}
