"""The scripts of the gallery run and check themselves, and their page says what they say."""

import contextlib
import importlib.util
import io
import re
import runpy
import warnings
from pathlib import Path

import pytest
import torch

GALLERY = Path(__file__).parents[2] / "docs" / "gallery"
FAST = ["neuron", "sigma_sweep"]

pytestmark = pytest.mark.skipif(not GALLERY.exists(), reason="an installed package has no docs")


def make():
    spec = importlib.util.spec_from_file_location("make", GALLERY / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPTS = sorted(path.stem for path in GALLERY.glob("*.py") if path.stem != "make")


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in SCRIPTS])
def test_the_script_runs_and_prints_what_the_page_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with torch.random.fork_rng(), warnings.catch_warnings(), contextlib.redirect_stdout(printed):
        warnings.simplefilter("error", UserWarning)
        runpy.run_path(str(GALLERY / f"{name}.py"), run_name="__main__")
    figure = tmp_path / f"{name}.png"
    assert figure.stat().st_size > 5000
    shown = printed_on_the_page(name)
    # pairs close to each other may change places on another machine: the words need not agree, the number of lines must
    assert len(printed.getvalue().strip().split("\n")) == len(shown.strip().split("\n"))


def printed_on_the_page(name):
    section = (GALLERY / "index.md").read_text(encoding="utf-8").split(f"figures/{name}.png")[1]
    return re.findall(r"```\n(.*?)```", section, re.DOTALL)[0]


def test_the_page_is_made_of_the_scripts():
    gallery = make()
    assert sorted(gallery.ORDER) == SCRIPTS
    written = (GALLERY / "index.md").read_text(encoding="utf-8")
    assert written == gallery.page({name: printed_on_the_page(name).rstrip() for name in gallery.ORDER})
    for name in gallery.ORDER:
        assert (gallery.FIGURES / f"{name}.png").exists()
