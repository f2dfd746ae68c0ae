"""The notebooks run in a new kernel, report their errors, and are stored as `make.py` stores them."""

import importlib.util
import json
import os
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[2] / "docs" / "notebooks"
NAMES = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))

pytestmark = pytest.mark.skipif(not NOTEBOOKS.exists(), reason="an installed package has no docs")


def outputs(book):
    return [output for cell in book["cells"] for output in cell.get("outputs", [])]


def printed(book):
    return "".join("".join(output["text"]) for output in outputs(book) if output["output_type"] == "stream")


def make():
    spec = importlib.util.spec_from_file_location("make", NOTEBOOKS / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_notebook_runs(name, monkeypatch):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    made, stored = make().run(NOTEBOOKS / name), json.loads((NOTEBOOKS / name).read_text(encoding="utf-8"))
    assert "relative error" in printed(made)
    kinds = [output["output_type"] for output in outputs(stored)]
    assert [output["output_type"] for output in outputs(made)] == kinds


@pytest.mark.parametrize("name", NAMES)
def test_stored_outputs_hold_text_and_figures_only(name):
    text = (NOTEBOOKS / name).read_text(encoding="utf-8")
    book = json.loads(text)
    assert all("execution" not in cell["metadata"] for cell in book["cells"])
    assert {output.get("name", "figure") for output in outputs(book)} <= {"stdout", "figure"}
    assert "Warning" not in printed(book)
    assert len(text) < 250_000


def test_the_list_of_notebooks_is_complete():
    listed = (NOTEBOOKS / "index.md").read_text(encoding="utf-8")
    assert len(NAMES) == 4
    assert all(f"]({name})" in listed for name in NAMES)
