"""The checks of `smoothhess explain` that are made before torch is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from smoothhess.cli.explain.checked_settings import Settings
from smoothhess.cli.explain.option_values import parse_rows, parse_size
from smoothhess.cli.explain.output_folder import RECORDS

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = None  # importing them is an error
from smoothhess.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def checked(**options):
    Settings(**{"model": "mine.py:table", "inputs": [Path("data.csv")], "sigma": 1.0, **options}).check()


def test_settings_with_all_files_are_accepted(here):
    (here / "w.pth").touch()
    checked(
        weights=Path("w.pth"),
        size="20x30",
        rows="0:5,-1",
        mean=["0.5,0.5"],
        segments="columns",
        inputs=[
            Path("data.csv"),
            Path("grey.png"),
        ],
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": "nothing"}, "--model must be file.pt2 .* pkg.module:factory"),
        ({"model": "model.onnx"}, "got model.onnx"),
        ({"model": "mine.py"}, "got mine.py. For a module, name the network as well: mine.py:factory"),
        ({"model": "mypkg.models"}, "name the network as well: mypkg.models:factory"),
        ({"model": "nowhere.py:x"}, "--model nowhere.py does not exist"),
        ({"model": "nowhere.pt2"}, "--model nowhere.pt2 does not exist"),
        ({"model": "nowhere.pth"}, "--model nowhere.pth does not exist"),
        ({"model": "free.pt2", "weights": Path("w.pth")}, "an export contains its weights"),
        ({"weights": Path("nowhere.pth")}, "--weights nowhere.pth does not exist"),
        ({"classes": Path("no.txt")}, "--classes no.txt does not exist"),
        ({"inputs": [Path("data.csv"), Path("no.png")]}, "--input no.png does not exist"),
        ({"inputs": [Path()]}, "folder: pass its files"),
        ({"inputs": [Path("mine.py")]}, "got .py"),
        ({"inputs": []}, "pass --input, at least one image"),
        ({"size": "4x"}, "--size must be 224"),
        ({"rows": "x"}, "--rows must be like 0:5"),
        ({"mean": ["a"]}, "must be numbers"),
        ({"mean": ["nan"]}, "finite"),
        ({"std": ["1,0"]}, "positive"),
        ({"std": ["nowhere.npy"]}, "--std nowhere.npy does not exist"),
        ({"segments": "pixels"}, "--segments must be slic:50"),
        ({"segments": "mask:nowhere.png"}, "--segments mask: nowhere.png does not exist"),
    ],
)
def test_wrong_options_and_missing_files_are_refused(here, options, says):
    with pytest.raises((ValueError, FileNotFoundError), match=says):
        checked(**options)


@pytest.mark.parametrize("words", ["x", "0", "1x2x3", "-4", "4x"])
def test_wrong_sizes_are_refused(words):
    with pytest.raises(ValueError, match="--size must be 224 or 224x320"):
        parse_size(words)


@pytest.mark.parametrize("words", ["x", "1:2:3:4", "1:2:0", "", "1,"])
def test_wrong_rows_are_refused(words):
    with pytest.raises(ValueError, match="--rows must be like 0:5"):
        parse_rows(words)


def test_a_file_that_cannot_be_opened_is_refused(here, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match="--model mine.py cannot be opened: Permission denied"):
        checked()


def without_torch(*arguments):
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [["--help"], ["explain", "--help"], ["demo", "--help"], ["--version"]])
def test_help_needs_no_torch(arguments):
    done = without_torch(*arguments)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (["--input", "no.csv"], "--input no.csv does not exist"),
        (["--segments", "pixels"], "--segments must be"),
        (["--out", "taken"], "was not written by smoothhess explain"),
        (["--out", "mine.py"], "--out must be a folder"),
    ],
)
def test_errors_of_files_and_options_need_no_torch(here, changed, says):
    (here / "taken").mkdir()
    (here / "taken" / RECORDS).write_text("[]")
    done = without_torch("explain", "--model", "mine.py:table", "--input", "data.csv", "--sigma", "1", *changed)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
