"""`python -m paper`."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paper import experiments
from paper.__main__ import main
from paper.experiments import EXPERIMENTS, Outcome, run_all
from paper.options import Options, machine


@pytest.fixture
def asked(monkeypatch):
    """What the experiments are asked for, instead of running them."""
    seen = []

    def find(name):
        def run(options):
            seen.append((name, options))
            return Outcome(name, [Path("a.csv")], [f"{name} is done"])

        return run

    monkeypatch.setattr(experiments, "find", find)
    return seen


def test_the_options_reach_the_experiment(asked, tmp_path, capsys):
    words = "pmse --quick --points 7 --seed 5 --dataset fmnist --function neuron --device cpu --steps 9 --refined"
    folders = ["--data", str(tmp_path), "--out", str(tmp_path / "o"), "--cache", str(tmp_path / "c")]
    assert main([*words.split(), *folders]) == 0
    ((name, options),) = asked
    assert name == "pmse"
    expected = Options(
        out=tmp_path / "o",
        data=tmp_path,
        device="cpu",
        quick=True,
        points=7,
        seed=5,
        dataset="fmnist",
        function="neuron",
        cache=tmp_path / "c",
        steps=9,
        refined=True,
        show_progress=False,
    )
    assert options == expected
    assert options.weights == tmp_path / "c"
    said = capsys.readouterr().out
    assert "pmse is done" in said
    assert "a.csv" in said


@pytest.mark.parametrize("name", [*EXPERIMENTS, "all"])
def test_every_experiment_has_its_name(asked, name):
    assert main([name]) == 0
    ((found, options),) = asked
    assert found == name
    assert (options.out, options.quick, options.seed, options.points) == (
        Path("smoothhess-reproduction"),
        False,
        0,
        None,
    )
    assert options.device == ("cuda" if torch.cuda.is_available() else "cpu")


def test_help_explains_the_options(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    options = "--data --out --device --quick --points --seed --dataset --function --cache --steps --refined"
    for option in options.split():
        assert option in text
    assert all(name in " ".join(text.split()) for name in ("surface", "superpixels", "SMOOTHHESS_DATA"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], '"nonsense"'),
        (["nested", "--seed", "-1"], "--seed must be between 0"),
        (["nested", "--points", "0"], "--points must be 1 or more"),
        (["nested", "--steps", "0"], "--steps must be 1 or more"),
        (["nested", "--out", __file__], "is a file"),
        (["nested", "--device", "nowhere"], "--device nowhere cannot be used here"),
        (["pmse", "--dataset", "svhn"], '"svhn"'),
        (["pmse", "--function", "softmax"], '"softmax"'),
    ],
)
def test_errors_are_one_line_and_exit_code_2(arguments, words, asked, capsys):
    assert main([*arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("paper: error: ")
    assert words in err
    assert err.count("\n") == 1
    assert not asked


def test_without_matplotlib_nothing_is_begun(asked, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["nested"]) == 2
    assert "pip install 'smoothhess[view]'" in capsys.readouterr().err
    assert not asked


def test_importing_the_command_line_loads_no_experiment():
    code = "import sys, smoothhess.cli.main; print([m for m in sys.modules if m.startswith('paper')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_all_goes_on_after_a_failure_and_tells_it(monkeypatch, tmp_path):
    done = []

    def find(name):
        def run(options):
            if name == "pmse":
                raise ValueError("expected a folder of data sets")
            done.append(name)
            return Outcome(name, [], [])

        return run

    monkeypatch.setattr(experiments, "find", find)
    with pytest.raises(ValueError, match=r"1 of 8 experiments failed: pmse: expected a folder"):
        run_all(Options(tmp_path))
    assert done == [name for name in EXPERIMENTS if name != "pmse"]


def test_all_gathers_files_and_lines(monkeypatch, tmp_path):
    monkeypatch.setattr(
        experiments, "find", lambda name: lambda options: Outcome(name, [options.folder(name) / "x.csv"], ["fine"])
    )
    outcome = run_all(Options(tmp_path, quick=True))
    assert outcome.files[2] == tmp_path / "nested-quick" / "x.csv"
    assert outcome.lines[2] == "nested: fine"
    assert len(outcome.lines) == len(EXPERIMENTS)


def test_outputs_say_how_they_were_made(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = Options(tmp_path / "secret", data=tmp_path, points=5, dataset="mnist", function="logit")
    command, _, where = options.made_by("pmse", seconds=125)
    assert command == (
        "`OMP_NUM_THREADS=1 python -m paper pmse --data DIR --out DIR --device cpu --points 5 --seed 0 "
        "--dataset mnist --function logit`"
    )
    assert where.endswith("2.1 minutes")
    assert machine() in where
    assert f"torch {torch.__version__.split('+')[0]}" in where
    assert str(tmp_path) not in command + where
