"""The command line and its demo, end to end."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import smoothhess as sh
from smoothhess.cli import demo as demonstration
from smoothhess.cli.main import main
from smoothhess.result.shown_estimate import error_text
from smoothhess.view.figures import canvas
from tests.printed import alike
from tests.view.pictures import without_layout

FIGURES = [f"{name}-{figure}.png" for name in ("breast_cancer", "digits") for figure in demonstration.WHICH]
FIGURES += [f"{name}-{figure}.png" for name in ("breast_cancer", "digits") for figure in ("gradient", "heatmap")]
RESULTS = [f"{name}.{kind}" for name in ("breast_cancer", "digits") for kind in ("html", "safetensors")]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The whole demo, run once, into a folder that already holds something."""
    out = tmp_path_factory.mktemp("demo")
    (out / "notes.txt").write_text("mine")
    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    with contextlib.redirect_stdout(io.StringIO()) as said, pytest.MonkeyPatch.context() as patch:
        patch.setattr(canvas, "new_figure", without_layout)  # a layout takes most of the time
        code = main(["demo", "--out", str(out)])
    still = torch.equal(before, torch.get_rng_state()) and torch.get_num_threads() == threads
    return SimpleNamespace(out=out, code=code, said=said.getvalue(), still=still)


# --- the demo ---------------------------------------------------------------------------------------------------------


def test_demo_writes_every_file_and_names_the_folder(demo):
    assert demo.code == 0
    assert sorted(p.name for p in demo.out.iterdir()) == sorted([*FIGURES, *RESULTS, "notes.txt", "explain.json"])
    assert str(demo.out.resolve()) in demo.said
    assert all(name in demo.said for name in (*FIGURES, *RESULTS))
    for name in FIGURES:
        assert (demo.out / name).read_bytes().startswith(b"\x89PNG")
    assert (demo.out / "notes.txt").read_text() == "mine"


def test_demo_networks_are_good_and_their_accuracy_is_printed(demo):
    accuracies = [float(a) for a in re.findall(r"test accuracy ([\d.]+) %", demo.said)]
    assert len(accuracies) == 2
    assert min(accuracies) > 94


def test_demo_prints_the_pairs_intervals_and_quality_of_the_saved_results(demo):
    for name, names in (("digits", None), ("breast_cancer", demonstration.breast_cancer(0).names)):
        result = sh.Interactions.load(demo.out / f"{name}.safetensors")
        assert len(result) == 3
        assert bool(result.converged.all())
        for i, found in enumerate(result.top_pairs(demonstration.PAIRS, names)):
            for p in found:
                line = next(
                    x for x in demo.said.splitlines() if f"    {' × '.join(p.names)} " in x and f"{p.value:+.3f}" in x
                )
                assert f"[{p.low:+.3f}, {p.high:+.3f}]" in line
            one = result.unshrunk()
            quality = f"relative error {error_text(float(one.relative_error[i]))}, R² {float(one.r2[i]):.2f}"
            assert f"{quality}, {int(result.n_calls[i])} calls" in demo.said


def test_demo_says_what_its_numbers_mean_and_where_they_end(demo):
    plain = " ".join(demo.said.split())
    assert demonstration.LIMITS in plain
    for words in (
        "radius 1: noise of standard deviation 0.125",
        "sigma 0.25:",
        "Relative error: the estimated error",
        "R²: the share",
    ):
        assert words in plain


def test_demo_leaves_the_global_random_state_and_the_threads_as_they_were(demo):
    assert demo.still


def test_demo_does_not_replace_files_that_it_did_not_write(tmp_path, monkeypatch, capsys):
    """Its own files are replaced; files of others are named before anything is trained."""
    train, trained = demonstration.train, []

    def train_little(task, hidden, epochs, seed):
        trained.append(task.name)
        return train(task, hidden, 0, seed)

    monkeypatch.setattr(demonstration, "train", train_little)
    monkeypatch.setattr(demonstration, "_write", lambda e, place: (place / f"{e.task.name}.html").write_text("a page"))
    (tmp_path / "digits-sure.png").write_text("mine")
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "digits-sure.png would be replaced, but smoothhess did not write it" in capsys.readouterr().err
    assert trained == []
    assert [path.name for path in tmp_path.iterdir()] == ["digits-sure.png"]
    (tmp_path / "digits-sure.png").rename(tmp_path / "mine.png")
    for _ in range(2):
        assert main(["demo", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "mine.png").read_text() == "mine"


@pytest.mark.parametrize("load", [demonstration.digits, demonstration.breast_cancer])
def test_same_seed_same_numbers(load):
    def explanation(seed):
        task = load(seed)
        return demonstration.explain(task, demonstration.train(task, 8, 1, seed), seed, n_calls=100)

    first, again, other = explanation(3), explanation(3), explanation(4)
    assert torch.equal(first.result.hessian, again.result.hessian)
    assert alike(demonstration.report(first), demonstration.report(again))
    assert not torch.equal(first.result.inputs, other.result.inputs)


def test_inputs_are_scaled_as_promised():
    images, columns = demonstration.digits(0), demonstration.breast_cancer(0)
    assert images.inputs.shape[1:] == (8, 8)
    assert (float(images.inputs.min()), float(images.inputs.max())) == (0, 1)
    torch.testing.assert_close(columns.inputs.mean(0), torch.zeros(30), atol=1e-5, rtol=0)
    torch.testing.assert_close(columns.inputs.std(0), torch.ones(30))


def test_an_input_the_network_gets_wrong_is_said_to_be_wrong():
    task = demonstration.digits(0)
    net = demonstration.train(task, 8, 1, 0)
    explanation = demonstration.explain(task, net, 0, n_calls=64)
    truths = task.test_labels[explanation.index].tolist()
    for i, (truth, guess) in enumerate(zip(truths, explanation.predicted, strict=True)):
        assert (f'wrong, the label is "{truth}"' in explanation.heading(i)) == (truth != guess)
    assert truths != explanation.predicted


@pytest.mark.parametrize("existed", [True, False])
def test_nothing_half_written_stays_after_a_failure(tmp_path, monkeypatch, capsys, existed):
    out = tmp_path / "new" / "demo"
    if existed:
        out.mkdir(parents=True)
        (out / "notes.txt").write_text("mine")

    def train_little(task, hidden, epochs, seed, whole=demonstration.train):
        return whole(task, hidden, 0, seed)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demonstration, "train", train_little)
    monkeypatch.setattr(demonstration, "overview", interrupt)
    assert main(["demo", "--out", str(out)]) == 130
    assert capsys.readouterr().err == "smoothhess: interrupted\n"
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == (["notes.txt"] if existed else [])
    assert out.exists() == existed


# --- the command line -------------------------------------------------------------------------------------------------


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "smoothhess", *arguments], capture_output=True, text=True, check=False)


def heed_interrupts():
    """In a process that is started in the background, which inherits an ignored SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


INTERRUPT = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"
SCRIPT = "import sys; sys.argv[0] = '/bin/smoothhess'; from smoothhess.cli.main import main; sys.exit(main())"


@pytest.mark.parametrize("module", ["torch", "cyclopts", "smoothhess_interrupt_nothing"])
@pytest.mark.parametrize("started", [["-m", "smoothhess"], ["-c", SCRIPT]])
def test_an_interruption_during_imports_is_one_line(module, started, tmp_path):
    (tmp_path / f"{module}.py").write_text(INTERRUPT)
    path = os.pathsep.join([str(tmp_path), str(Path(sh.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, *started, "demo"] if module == "torch" else [sys.executable, *started, "--version"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        preexec_fn=heed_interrupts,
    )
    expected = (0, "") if module.endswith("nothing") else (130, "smoothhess: interrupted\n")
    assert (done.returncode, done.stderr) == expected


def test_importing_the_package_in_a_program_leaves_ctrl_c_alone():
    code = "import signal, smoothhess; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    done = subprocess.run([sys.executable, "-c", code], check=False, preexec_fn=heed_interrupts)
    assert done.returncode == 0


def test_streams_that_cannot_encode_replace_characters(monkeypatch):
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict") for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    assert main(["demo", "--help"]) == 0
    assert main(["demo", "--seed", "-1"]) == 2
    for stream, words in zip(streams, (b"(8?8 pixels)", b"between 0 and 2?? ? 1, got -1"), strict=True):
        stream.flush()
        assert words in b" ".join(stream.buffer.getvalue().split())


def test_errors_show_control_characters_as_escapes(capsys):
    assert main(["explain", "--model", "\x1b]0;title\x07.pt2", "--input", "x.npy", "--sigma", "1"]) == 2
    err = capsys.readouterr().err
    assert r"\x1b]0;title\x07.pt2" in err
    assert "\x1b" not in err


def test_help_lists_the_commands_and_the_options():
    done = run("--help")
    assert done.returncode == 0
    assert "demo" in done.stdout
    assert "130 interrupted" in " ".join(done.stdout.split())
    assert done.stderr == ""


def test_help_of_demo_explains_its_options(capsys):
    assert main(["demo", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--out" in text
    assert "--seed" in text
    assert "smoothhess-demo" in text


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == sh.__version__


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], 'Unknown command "nonsense"'),
        (["demo", "--sed", "1"], "Did you mean --seed"),
        (["demo", "--seed", "x"], '"x"'),
        (["demo", "--seed", "-1"], "--seed must be between 0"),
        (["demo", "--out", __file__], "--out must be a folder, got the file"),
        (["demo", "--out", __file__ + "/deeper"], "Pass another --out"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(arguments, words, capsys):
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("smoothhess: error: ")
    assert words in err
    assert err.count("\n") == 1


def test_debug_shows_the_traceback(capsys):
    assert main(["demo", "--debug", "--out", __file__]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("smoothhess: error: ")


@pytest.mark.parametrize(
    ("module", "extra"), [("cyclopts", "cli"), ("matplotlib.figure", "view"), ("sklearn.datasets", "demo")]
)
def test_a_missing_package_is_named_with_its_extra(module, extra, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["demo", "--out", str(tmp_path / "out")]) == 2
    assert f"pip install 'smoothhess[{extra}]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_picture_of_the_readme_is_small():
    path = Path(__file__).parents[2] / "docs" / "images" / "digits.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size <= 200_000
