"""`smoothhess explain`, end to end and in the process: files, numbers, errors, going on."""

import contextlib
import csv
import hashlib
import io
import json
import os
import re
import shutil
import sys
import urllib.parse
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import smoothhess as sh
from smoothhess.cli.demo import LIMITS
from smoothhess.cli.explain import model_factories, output_files, output_folder, run_explain
from smoothhess.cli.explain.folder_lock import LOCK
from smoothhess.cli.explain.output_folder import Folder
from smoothhess.cli.main import main
from smoothhess.model.json_checksum import with_checksum
from smoothhess.result.shown_estimate import error_text

TABLE = "--model mine.py:table --input data.csv --drop label --sigma 0.25 --calls 200".split()


def explain(*arguments):
    return main(["explain", *map(str, arguments)])


def files(folder):
    return sorted(p.name for p in folder.iterdir())


def pairs_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# --- three kinds of inputs --------------------------------------------------------------------------------------------


def test_rows_of_a_table(here, capsys):
    assert explain(*TABLE, "--rows", "2", "--out", "out") == 0
    kinds = [".csv", ".html", ".safetensors", "-gradient.png", "-graph.png", "-heatmap.png", "-pairs.png"]
    assert files(here / "out") == sorted([*(f"data-row2{kind}" for kind in kinds), "explain.json"])
    assert str(here.resolve() / "out" / "data-row2.html") in capsys.readouterr().out
    page = (here / "out" / "data-row2.html").read_text(encoding="utf-8")
    assert "data.csv, row 2: which features act together for output" in page
    assert "one standard deviation of its column over the 20 rows of data.csv" in page
    assert {row["unit"] for row in pairs_of(here / "out" / "data-row2.csv")} == {"sd"}


def payload(path):
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="payload">(.*?)</script>', text, re.DOTALL)[1])


def test_the_unit_of_a_feature_is_told(here, quick, capsys):
    assert explain(*TABLE, "--rows", "2", "--out", "out") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "one unit of a feature is one standard deviation of its column over the 20 rows of data.csv" in said
    assert {row["unit"] for row in pairs_of(here / "out" / "data-row2.csv")} == {"sd"}
    assert explain(*TABLE, "--rows", "2", "--out", "own", "--no-standardize") == 0
    assert "one unit of a feature" not in capsys.readouterr().out
    assert {row["unit"] for row in pairs_of(here / "own" / "data-row2.csv")} == {""}


def test_the_page_says_which_columns_got_no_noise_and_names_no_class_that_is_none(here, monkeypatch):
    monkeypatch.setattr(output_files, "draw", lambda *_: None)
    (here / "x.csv").write_text("a,b,c,d\n" + "".join(f"7,{i},{i * i % 5},3\n" for i in range(9)))
    (here / "classes.txt").write_text("sick\nhealthy\n")
    arguments = ["--model", f"{here / 'mine.py'}:product_of_rows", "--input", "x.csv", "--rows", 0, "--sigma", 0.5]
    assert explain(*arguments, "--calls", 40, "--classes", "classes.txt", "--out", "out") == 0
    found = payload(here / "out" / "x-row0.html")
    assert "No noise in a, d: they do not vary in the file." in found["note"]
    assert found["title"] == "x.csv, row 0: which features act together for the output in mine.py:product_of_rows"
    assert found["examples"][0]["output"] == "the output"


def test_the_numbers_of_a_table_are_those_of_the_library(here, quick, capsys):
    torch.manual_seed(9)
    state = torch.get_rng_state()
    assert explain(*TABLE, "--rows", "2,5", "--out", "out") == 0
    assert torch.equal(state, torch.get_rng_state())
    said = capsys.readouterr().out
    assert " ".join(said.split()).endswith(f"{LIMITS} Written: open {here.resolve() / 'out' / 'index.html'}")

    # asked in the columns' own units, and then scaled
    raw = torch.from_numpy(np.genfromtxt("data.csv", delimiter=",", skip_header=1)[:, :4])
    spread = raw.std(0)
    net = model_factories.make("mine.py:table", 0)
    for i in (2, 5):
        found = sh.Interactions.load(here / "out" / f"data-row{i}.safetensors")
        target = int(net(raw[i : i + 1]).argmax())
        assert int(found.target) == target
        own = sh.SmoothHess(net).attribute(raw[i : i + 1], target=target, sigma=0.25 * spread, n_calls=200)
        torch.testing.assert_close(found.unshrunk().hessian, own.unshrunk().hessian * spread[:, None] * spread)
        torch.testing.assert_close(found.gradient, own.gradient * spread)
        rows = pairs_of(here / "out" / f"data-row{i}.csv")
        for row, p in zip(rows, found.top_pairs(6, ["age", "dose", "height", "time"])[0], strict=True):
            assert (row["first"], row["second"]) == p.names
            assert [float(row[k]) for k in ("value", "stderr", "low", "high", "effect", "q_value")] == [
                *(p.value, p.stderr, p.low, p.high, p.effect, p.q_value)
            ]
            assert row["significant"] == str(p.significant)
        strongest = found.top_pairs(1, ["age", "dose", "height", "time"])[0][0]
        assert f"{' × '.join(strongest.names)} " in said
        assert f"{strongest.value:+.4g}" in said

    index = (here / "out" / "index.html").read_text(encoding="utf-8")
    assert re.findall(r'href="([^"]+)"', index) == ["data-row2.html", "data-row5.html"]
    assert LIMITS in index.replace("&#x27;", "'")


def test_a_picture_and_an_export_of_fixed_size(here, exported, capsys):
    (here / "classes.txt").write_text("cat\ndog\nfox\nowl\nbee\n")
    arguments = ["--model", exported / "fixed.pt2", "--input", "colour.png", "--radius", 1, "--calls", 40]
    assert explain(*arguments, "--classes", "classes.txt", "--segments", "grid:3", "--out", "out") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "exported for 4 rows at a time" in said
    assert "colour.png is converted to grey" in said
    assert "9 groups by grid:3" in said
    names = ["colour.csv", "colour.html", "colour.safetensors"]
    names += [f"colour-{kind}.png" for kind in ("graph", "heatmap", "pairs", "segment")]
    assert files(here / "out") == sorted([*names, "explain.json"])
    found = sh.Interactions.load(here / "out" / "colour.safetensors")
    assert found.shape == (1, 9, 9)
    assert found.inputs.shape == (1, 1, 12, 12)
    assert float(found.gaussian.scales(144)[0]) == pytest.approx(1 / 12)
    name = ["cat", "dog", "fox", "owl", "bee"][int(found.target)]
    assert f"colour.png: {name} = " in said
    page = (here / "out" / "colour.html").read_text(encoding="utf-8")
    assert f"which features act together for {name} in fixed.pt2" in page


def test_a_curve_in_windows_of_time(here, capsys):
    np.save("curve.npy", np.sin(np.arange(100) / 5))
    arguments = ["--model", "mine.py:curve", "--input", "curve.npy", "--sigma", 0.1, "--calls", 100]
    assert explain(*arguments, "--segments", "window:0.5s", "--step", 0.05, "--out", "out") == 0
    said = capsys.readouterr().out
    assert "curve.npy: (100,) interpreted as one example of one channel" in said
    assert "curve-series.png" in files(here / "out")
    assert payload(here / "out" / "curve.html")["units"] == ["s"] * 10
    rows = pairs_of(here / "out" / "curve.csv")
    assert len(rows) == 45
    assert {rows[0]["first"][-2:], rows[0]["second"][-2:]} == {" s"}
    net, x = model_factories.make("mine.py:curve", 0), torch.from_numpy(np.load("curve.npy")).float()[None, None]
    own = sh.SmoothHess(net).attribute(x, sigma=0.1, n_calls=100, feature_mask=torch.arange(100) // 10)
    found = sh.Interactions.load(here / "out" / "curve.safetensors")
    torch.testing.assert_close(found.hessian, own.hessian)


# --- units, groups, defaults ------------------------------------------------------------------------------------------


def test_noise_can_move_whole_segments(here, monkeypatch, capsys):
    monkeypatch.setattr(output_files, "draw", lambda *_: None)
    arguments = ["--model", "mine.py:pixels", "--input", "colour.png", "--radius", 2, "--calls", 36]
    arguments += ["--segments", "grid:3"]
    net, cells = model_factories.make("mine.py:pixels", 0), sh.segments.grid((3, 12, 12), 3)
    said, found, pages = {}, {}, {}
    for noise in ("pixels", "segments"):
        assert explain(*arguments, "--segments-noise", noise, "--out", noise) == 0
        said[noise] = " ".join(capsys.readouterr().out.split())
        found[noise] = sh.Interactions.load(here / noise / "colour.safetensors")
        pages[noise] = payload(here / noise / "colour.html")["noise"]
    assert explain(*arguments, "--out", "default") == 0
    default = sh.Interactions.load(here / "default" / "colour.safetensors")
    assert default.gaussian.same_as(found["pixels"].gaussian)
    sigma = 2 / 432**0.5  # the usual move of the whole picture has the same length
    own = sh.SmoothHess(net).attribute(
        found["segments"].inputs,
        target=found["segments"].target[0].tolist(),
        gaussian=sh.segments.noise(cells, sigma),
        feature_mask=cells,
        n_calls=36,
    )
    torch.testing.assert_close(found["segments"].hessian, own.hessian)
    torch.testing.assert_close(found["segments"].grouping.scales, found["pixels"].grouping.scales)
    whole, each = "The noise shifts all pixels of a segment by", "The noise shifts every pixel independently"
    assert whole in said["segments"]
    assert each not in said["segments"]
    assert each in said["pixels"]
    assert pages["segments"][0].startswith(whole)
    assert pages["pixels"][0].startswith(each)


def test_whole_groups_of_columns_move_without_those_that_do_not_vary(here, quick, capsys):
    (here / "x.csv").write_text("a,b,c,d\n" + "".join(f"7,{i},{i * i % 5},3\n" for i in range(9)))
    (here / "groups.json").write_text(json.dumps({"ab": ["a", "b"], "other": ["d"]}))
    arguments = ["--model", f"{here / 'mine.py'}:product_of_rows", "--input", "x.csv", "--rows", 0, "--sigma", 0.5]
    arguments += ["--calls", 40, "--segments", "columns:groups.json", "--segments-noise", "segments"]
    assert explain(*arguments, "--out", "out") == 0
    assert "The noise shifts all features of a group by the same amount" in capsys.readouterr().out
    found = sh.Interactions.load(here / "out" / "x-row0.safetensors")
    assert found.gaussian.scales(4).tolist() == [0, 0.5, 0.5, 0]
    assert found.grouping.scales[0].tolist() == [0.5, 0.5, 0]


def test_whole_segments_need_segments(here, quick, capsys):
    assert explain(*TABLE, "--rows", 0, "--segments-noise", "segments", "--out", "out") == 2
    assert "--segments-noise segments shifts groups of features" in capsys.readouterr().err
    assert explain(*TABLE, "--rows", 0, "--segments-noise", "patches", "--out", "out") == 2
    assert "patches" in capsys.readouterr().err


def test_normalisation_is_part_of_the_explained_function(here, quick):
    mean, std = [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]
    arguments = ["--model", "mine.py:pixels", "--input", "colour.png", "--sigma", 0.1, "--calls", 100]
    arguments += ["--segments", "grid:2", "--out", "out", "--target", 1]
    assert explain(*arguments, "--mean", "0.4,0.5,0.6", "--std", *std) == 0
    found = sh.Interactions.load(here / "out" / "colour.safetensors")
    net = model_factories.make("mine.py:pixels", 0)
    m, s = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (mean, std))
    mask = sh.Interactions.load(here / "out" / "colour.safetensors").grouping.mask.reshape(3, 12, 12)
    own = sh.SmoothHess(lambda x: net((x - m) / s)).attribute(
        found.inputs, target=1, sigma=0.1, n_calls=100, feature_mask=mask
    )
    torch.testing.assert_close(found.hessian, own.hessian, rtol=1e-6, atol=1e-9)


def test_many_features_are_grouped_and_that_is_said(here, quick, capsys):
    from PIL import Image

    Image.fromarray(np.random.default_rng(1).integers(0, 256, (24, 24, 3), dtype=np.uint8)).save("large.png")
    assert explain("--model", "mine.py:pixels", "--input", "large.png", "--radius", 1, "--calls", 20) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1728 features are too many to show individually: grouped by slic:50" in said
    found = sh.Interactions.load(here / "smoothhess-explanation" / "large.safetensors")
    assert 2 < found.shape[1] < 100


def test_another_number_of_super_pixels_than_asked_for_is_remarked_on(here, quick, capsys):
    from PIL import Image

    pixels = np.zeros((12, 12, 3), dtype=np.uint8)
    pixels[:, 6:] = 255
    Image.fromarray(pixels).save("halves.png")
    arguments = ["--model", "mine.py:pixels", "--input", "halves.png", "--radius", 1, "--calls", 20]
    assert explain(*arguments, "--segments", "slic:100") == 0
    found = sh.Interactions.load(here / "smoothhess-explanation" / "halves.safetensors")
    said = " ".join(capsys.readouterr().out.split())
    assert f"slic:100 found {found.shape[1]} super-pixels" in said


def test_the_channels_of_a_pixel_are_one_feature(here, quick):
    arguments = ["--model", "mine.py:pixels", "--input", "colour.png", "--radius", 1, "--calls", 20, "--out", "out"]
    assert explain(*arguments, "--segments", "none") == 0
    rows = pairs_of(here / "out" / "colour.csv")
    assert len(rows) == 144 * 143 // 2
    assert re.fullmatch(r"pixel \(\d+, \d+\)", rows[0]["first"])


def test_the_channels_of_a_moment_are_one_feature(here, quick):
    (here / "leads.py").write_text("def f(x):\n    return x.sum((1, 2)) ** 2\n")
    np.save("x.npy", np.zeros((3, 20)))
    arguments = ["--model", "leads.py:f", "--input", "x.npy", "--single", "--sigma", 0.1, "--calls", 20, "--step", 0.5]
    assert explain(*arguments, "--out", "out") == 0
    rows = pairs_of(here / "out" / "x.csv")
    assert len(rows) == 20 * 19 // 2
    assert {r["first"] for r in rows} | {r["second"] for r in rows} == {f"{i / 2:g} s" for i in range(20)}


def test_columns_can_be_grouped_by_name(here, quick):
    (here / "groups.json").write_text(json.dumps({"body": ["age", "height"]}))
    assert explain(*TABLE, "--rows", 0, "--segments", "columns:groups.json", "--out", "out") == 0
    rows = pairs_of(here / "out" / "data-row0.csv")
    assert {r["first"] for r in rows} | {r["second"] for r in rows} == {"body", "dose", "time"}


def test_a_column_that_does_not_vary_stays_still(here, quick, capsys):
    text = (here / "data.csv").read_text().splitlines()
    lines = [text[0], *(",".join(["7", *line.split(",")[1:]]) for line in text[1:])]
    (here / "data.csv").write_text("\n".join(lines))
    arguments = "--model mine.py:table --input data.csv --drop label --radius 0.6 --calls 200 --rows 0".split()
    assert explain(*arguments, "--out", "out") == 0
    assert "no noise in age" in capsys.readouterr().out
    found = sh.Interactions.load(here / "out" / "data-row0.safetensors")
    assert found.gaussian.scales(4).tolist() == pytest.approx([0, *[0.6 / 3**0.5] * 3])
    assert len(pairs_of(here / "out" / "data-row0.csv")) == 3


def test_a_function_and_an_array_of_several_examples(here, quick, capsys):
    np.save("rows.npy", np.arange(6.0).reshape(2, 3))
    arguments = ["--model", "mine.py:product", "--input", "rows.npy", "--sigma", 0.5, "--calls", 4000, "--batched"]
    assert explain(*arguments, "--out", "out") == 0
    for i in (0, 1):
        strongest = pairs_of(here / "out" / f"rows-{i}.csv")[0]
        assert (strongest["first"], strongest["second"]) == ("feature 0", "feature 1")
        assert float(strongest["value"]) == pytest.approx(3, abs=5 * float(strongest["stderr"]) + 1e-5)


def test_what_the_library_warns_of_is_a_note(here, quick, capsys):
    (here / "line.py").write_text("def f(x):\n    return x.sum(1)\n")
    assert explain("--model", "line.py:f", "--input", "data.csv", "--rows", 0, "--sigma", 1, "--out", "out") == 0
    done = capsys.readouterr()
    assert "note: H cannot be distinguished from zero" in " ".join(done.out.split())
    assert done.err == ""
    arguments = [a for a in TABLE if a not in ("--calls", "200")]
    assert explain(*arguments, "--rows", 0, "--tol", 1e-9, "--max-calls", 8, "--out", "out") == 0
    assert "stopped at --max-calls 8 before" in " ".join(capsys.readouterr().out.split())


def test_an_estimate_of_noise_alone_is_said_to_be_one(here, quick, capsys):
    np.save("x.npy", np.random.default_rng(0).normal(size=(3, 12, 12)))
    arguments = ["--model", "mine.py:pixels", "--input", "x.npy", "--sigma", 0.01, "--calls", 8, "--segments", "grid:6"]
    assert explain(*arguments, "--out", "out") == 0
    said = " ".join(capsys.readouterr().out.split())
    found = sh.Interactions.load(here / "out" / "x.safetensors")
    assert float(found.relative_error) > 1
    assert "not reliable" in said


def test_the_error_is_that_of_the_pairs(here, quick, capsys):
    text = "import torch\nweight = torch.randn(60, 3)\ndef net(x):\n    y = x @ weight\n"
    (here / "few.py").write_text(text + "    return torch.where(y > 0, y, 0 * y).sum(1)\n")
    np.save("x.npy", np.zeros((1, 60), dtype=np.float32))
    arguments = ["--model", "few.py:net", "--input", "x.npy", "--batched", "--sigma", 0.5, "--segments", "none"]
    for calls in (16, 400):
        assert explain(*arguments, "--calls", calls, "--out", f"out{calls}") == 0
        said = " ".join(capsys.readouterr().out.split())
        found = sh.Interactions.load(here / f"out{calls}" / "x.safetensors")
        own, denoised = float(found.unshrunk().relative_error), float(found.relative_error)
        assert own > 1.5 * denoised
        assert f"relative error {error_text(own)}" in said
        assert error_text(denoised) not in said
        assert ("not reliable" in said) == (own > 1) == (calls == 16)
        assert denoised < 1
    assert explain(*arguments, "--tol", 0.2, "--out", "tol") == 0
    said = " ".join(capsys.readouterr().out.split())
    found = sh.Interactions.load(here / "tol" / "x.safetensors")
    assert found.status == ("tolerance",)
    assert f"(stopped by that of the denoised matrix, {error_text(float(found.relative_error))})" in said


def test_a_csv_that_leaves_pairs_out_says_so(here, quick, monkeypatch, capsys):
    monkeypatch.setattr(output_files, "MOST_ROWS", 4)
    assert explain(*TABLE, "--rows", "0", "--out", "out") == 0
    assert "data-row0.csv holds the 4 strongest of 6 pairs" in capsys.readouterr().out
    assert len(pairs_of(here / "out" / "data-row0.csv")) == 4


def test_probabilities_are_remarked_on(here, quick, capsys):
    (here / "soft.py").write_text("def f(x):\n    return (x @ x.new_ones(x.shape[1], 2).cumsum(1)).softmax(1)\n")
    assert explain("--model", "soft.py:f", "--input", "data.csv", "--rows", 0, "--sigma", 0.1, "--calls", 20) == 0
    assert "look like probabilities" in " ".join(capsys.readouterr().out.split())


# --- going on ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def attributed(monkeypatch):
    """Names of the examples that were really explained; None in `stop_at` interrupts."""
    made, whole = [], run_explain._attribute

    def counted(question, device):
        if len(made) == counted.stop_at:
            raise KeyboardInterrupt
        made.append(question.example.name)
        return whole(question, device)

    counted.stop_at = None
    counted.made = made
    monkeypatch.setattr(run_explain, "_attribute", counted)
    return counted


def test_finished_inputs_survive_an_interruption_and_are_not_made_again(here, quick, attributed, capsys):
    arguments = [*TABLE, "--rows", "0:4", "--out", "out"]
    attributed.stop_at = 2
    assert explain(*arguments) == 130
    done = capsys.readouterr()
    assert done.err == "smoothhess: interrupted\n"
    assert "2 of 4 inputs are finished" in done.out
    assert "index.html" in files(here / "out")
    assert not any("partial" in name for name in files(here / "out"))
    first = (here / "out" / "data-row0.safetensors").stat().st_mtime_ns

    attributed.stop_at = None
    assert explain(*arguments) == 0
    assert attributed.made == [f"data-row{i}" for i in range(4)]
    assert (here / "out" / "data-row0.safetensors").stat().st_mtime_ns == first
    said = capsys.readouterr().out
    assert said.count("kept from an earlier run with the same settings") == 2
    assert said.count(": effect ") == 2  # the strongest pair of what is kept
    assert (here / "out" / "index.html").read_text(encoding="utf-8").count("<a href") == 4


def test_an_interruption_before_anything_is_finished_says_so_and_tells_no_result(here, quick, monkeypatch, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(output_files, "draw", stop)
    assert explain(*TABLE, "--rows", "0", "--out", "out") == 130
    said = capsys.readouterr().out
    assert "no input is finished; rerun the same command to start again" in said
    assert "95 % interval" not in said


def test_a_folder_that_cannot_be_written_into_is_refused_before_anything_is_sampled(here, attributed, capsys):
    assert explain(*TABLE, "--rows", "0", "--out", "mine.py/out") == 2
    assert "cannot write to" in capsys.readouterr().err
    assert attributed.made == []


@pytest.mark.parametrize("rows", [["0,2"], ["0", "2"]])
def test_rows_may_be_given_apart(here, quick, rows):
    assert explain(*TABLE, "--rows", *rows, "--out", "out") == 0
    assert {"data-row0.csv", "data-row2.csv"} <= set(files(here / "out"))


def test_other_settings_are_explained_anew(here, quick, attributed):
    arguments = [*TABLE, "--rows", "0"]
    assert explain(*arguments, "--out", "first") == 0
    assert explain(*arguments, "--out", "first") == 0
    assert len(attributed.made) == 1
    state = model_factories.make("mine.py:table", 0).state_dict()
    torch.save({k: v + 0.01 for k, v in state.items()}, "w.pth")
    other_sigma = [a if a != "0.25" else "0.5" for a in arguments]
    for number, changed in enumerate(
        (
            [*arguments, "--seed", 1],
            [*arguments, "--target", 0],
            other_sigma,
            [*arguments, "--no-standardize"],
            [*arguments, "--std", 2],
            [*arguments, "--segments", "columns"],
            [*arguments, "--weights", "w.pth"],
        ),
        start=2,
    ):
        shutil.copytree("first", f"out{number}")
        assert explain(*changed, "--out", f"out{number}") == 0
        assert len(attributed.made) == number, changed
    attributed.made.clear()
    shutil.copytree("first", "copy")
    assert explain(*arguments, "--out", "copy") == 0
    assert attributed.made == []  # the folder is not one of the settings
    (here / "copy" / "data-row0.csv").unlink()
    assert explain(*arguments, "--out", "copy") == 0
    assert attributed.made == ["data-row0"]


def test_files_of_other_settings_do_not_stay_behind(here, quick, monkeypatch):
    def draw(question, result, place):
        (place / f"{question.example.name}-old.png").write_text("figure")

    with monkeypatch.context() as patch:
        patch.setattr(output_files, "draw", draw)
        assert explain(*TABLE, "--rows", "0", "--out", "out") == 0
    (here / "out" / "notes.txt").write_text("mine")
    assert explain(*TABLE, "--rows", "0", "--out", "out", "--seed", 1) == 0
    assert files(here / "out") == [
        "data-row0.csv",
        "data-row0.html",
        "data-row0.safetensors",
        "explain.json",
        "notes.txt",
    ]


def test_nothing_half_written_stays_after_a_failure(here, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("no space")

    monkeypatch.setattr(output_files, "draw", fail)
    assert explain(*TABLE, "--rows", "0", "--out", "out") == 2
    assert capsys.readouterr().err == "smoothhess: error: no space\n"
    assert not (here / "out").exists()


@pytest.mark.parametrize("text", ["not json", "[]", '{"format": "other", "version": 2, "finished": {}}'])
def test_a_foreign_explain_json_is_not_replaced(here, quick, attributed, text, capsys):
    (here / "out").mkdir()
    (here / "out" / "explain.json").write_text(text)
    assert explain(*TABLE, "--rows", "0", "--out", "out") == 2
    assert "explain.json was not written by smoothhess explain" in capsys.readouterr().err
    assert (here / "out" / "explain.json").read_text() == text
    assert attributed.made == []


@pytest.mark.parametrize("name", ["data-row0.safetensors", "data-row0.csv", "data-row1-heatmap.png", "index.html"])
@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_files_of_others_are_not_replaced(here, quick, attributed, name, kind, capsys):
    path = here / name
    if kind == "file":
        path.write_text("mine")
    elif kind == "link":
        path.symlink_to("nowhere")
    else:
        path.mkdir()
    assert explain(*TABLE, "--rows", "0:2", "--out", ".") == 2
    assert f"{name} would be replaced, but smoothhess did not write it" in capsys.readouterr().err
    assert attributed.made == []
    assert path.read_text() == "mine" if kind == "file" else path.is_symlink() or path.is_dir()


def test_weights_beside_the_output_are_not_replaced(here, quick, capsys):
    state = model_factories.make("mine.py:table", 0).state_dict()
    save_file(state, "data-row0.safetensors")
    before = (here / "data-row0.safetensors").read_bytes()
    weights = ("--weights", "data-row0.safetensors")
    assert explain(*TABLE, "--rows", "0", *weights, "--out", ".") == 2
    assert "data-row0.safetensors would be replaced" in capsys.readouterr().err
    assert (here / "data-row0.safetensors").read_bytes() == before


def test_files_of_an_earlier_run_are_replaced_unless_they_were_changed(here, quick, capsys):
    assert explain(*TABLE, "--rows", "0:2", "--out", "out") == 0
    assert explain(*TABLE, "--rows", "0:2", "--out", "out", "--seed", 1) == 0
    (here / "out" / "data-row1.csv").write_text("edited")
    assert explain(*TABLE, "--rows", "0:2", "--out", "out", "--seed", 1) == 0  # finished: nothing is replaced
    assert explain(*TABLE, "--rows", "0:2", "--out", "out", "--seed", 2) == 2
    assert "data-row1.csv would be replaced" in capsys.readouterr().err
    assert (here / "out" / "data-row1.csv").read_text() == "edited"


@pytest.mark.parametrize("moved", range(4))
def test_a_run_that_was_killed_while_it_moved_files_is_resumed(here, quick, monkeypatch, moved):
    def kill(path, target, whole=Path.replace):
        if Path(target).name != "explain.json":
            kill.left -= 1
        if kill.left < 0:
            raise SystemExit
        return whole(path, target)

    assert explain(*TABLE, "--rows", "0", "--out", "out") == 0
    kill.left = moved
    with monkeypatch.context() as patch, pytest.raises(SystemExit) if moved < 3 else contextlib.nullcontext():
        patch.setattr(Path, "replace", kill)
        explain(*TABLE, "--rows", "0", "--out", "out", "--seed", 1)
    assert explain(*TABLE, "--rows", "0", "--out", "out", "--seed", 1) == 0
    assert "data-row0.csv" in files(here / "out")


def test_temporary_folders_of_killed_runs_are_removed_and_block_nothing(here, quick):
    (here / "out").mkdir()
    stale = here / "out" / f".smoothhess-{'0' * 32}.partial"
    stale.mkdir()
    (stale / "x.html").write_text("half")
    mine = here / "out" / ".smoothhess-notes.partial"
    mine.mkdir()
    assert explain(*TABLE, "--rows", "0", "--out", "out") == 0
    assert not stale.exists()
    assert mine.exists()


def test_a_second_run_in_the_same_folder_is_refused_by_name(here, quick, capsys):
    with Folder(here / "out").opened():
        lock = (here / "out" / LOCK).read_text()
        assert explain(*TABLE, "--rows", "0", "--out", "out") == 2
        assert (here / "out" / LOCK).read_text() == lock
    said = capsys.readouterr().err
    assert f"is used by another run of smoothhess (process {os.getpid()}, started 20" in said
    assert explain(*TABLE, "--rows", "0", "--out", "out") == 0
    assert LOCK not in files(here / "out")


def test_the_lock_of_a_killed_run_is_stale_also_with_the_same_process_id(here, quick):
    (here / "out").mkdir()
    (here / "out" / LOCK).write_text(f"process {os.getpid()}, started 2020-01-01 00:00:00\n")
    assert explain(*TABLE, "--rows", "0", "--out", "out") == 0
    assert LOCK not in files(here / "out")


@pytest.mark.parametrize("victim", ["../victim.txt", "..", "notes.txt", "data-row0.d/../../victim.txt"])
def test_a_foreign_explain_json_deletes_nothing(here, quick, victim):
    (here / "out").mkdir()
    kept = [here / "victim.txt", here / "out" / "notes.txt"]
    for path in kept:
        path.write_text("mine")
    hashed = hashlib.blake2b(b"mine", digest_size=16).hexdigest()
    record = {"key": "k", "files": {victim: hashed}, "words": {}}
    about = {"format": output_folder.FORMAT, "version": output_folder.VERSION, "finished": {"data-row0": record}}
    (here / "out" / "explain.json").write_text(json.dumps(about))
    assert explain(*TABLE, "--rows", "0", "--out", "out") == 0
    assert all(path.read_text() == "mine" for path in kept)
    assert "data-row0.csv" in files(here / "out")


def test_a_record_without_files_is_not_finished(here, quick, attributed):
    assert explain(*TABLE, "--rows", "0", "--out", "out") == 0
    about = json.loads((here / "out" / "explain.json").read_text())
    for file in about["finished"]["data-row0"]["files"]:
        (here / "out" / file).unlink()
    about["finished"]["data-row0"]["files"] = {}
    (here / "out" / "explain.json").write_text(json.dumps(with_checksum(about)))
    assert explain(*TABLE, "--rows", "0", "--out", "out") == 0
    assert len(attributed.made) == 2


def test_file_names_become_neither_script_nor_broken_links(here, quick):
    names = ["javascript:alert(1)", "a#1", "50%20 <b>\"&'", "digit 3 – Übung"]
    for name in names:
        np.save(here / f"{name}.npy", np.ones(4))
    paths = [here / f"{name}.npy" for name in names]
    assert explain("--model", "mine.py:product", "--input", *paths, "--sigma", 0.1, "--calls", 20, "--out", "out") == 0
    index = (here / "out" / "index.html").read_text(encoding="utf-8")
    links = re.findall(r'href="([^"]+)"', index)
    assert not any(set(link) & set(":#<>&' ") for link in links)
    assert [urllib.parse.unquote(link) for link in links] == [f"{name}.html" for name in names]
    assert all((here / "out" / urllib.parse.unquote(link)).is_file() for link in links)


def test_names_from_files_are_printed_without_control_characters_and_are_no_formulas(here, quick, monkeypatch, capsys):
    names = ["\x1b[2Jage", '=HYPERLINK("x")', "-5", "+a\nb", "\u202edose"]
    with (here / "\x1b]0;x\x07.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerows([names, *np.random.default_rng(0).normal(size=(5, 5)).tolist()])
    (here / "classes.txt").write_text("\x1b[31mred\n", encoding="utf-8")
    options = "--model mine.py:product --sigma 0.5 --calls 64 --rows 0 --classes classes.txt --out out".split()
    for _ in range(2):  # the second time from the record
        assert explain(*options, "--input", here / "\x1b]0;x\x07.csv") == 0
        said = capsys.readouterr().out
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", said)
        assert r"\x1b[2Jage" in said
        assert r"\x1b[31mred" in said
    (table,) = (here / "out").glob("*.csv")
    found = {row[key] for row in pairs_of(table) for key in ("first", "second")}
    assert found == {"\x1b[2Jage", '\'=HYPERLINK("x")', "-5", "'+a\nb", "\u202edose"}
    assert all(float(row["value"]) is not None for row in pairs_of(table))


def test_output_that_cannot_be_encoded_is_replaced(here, quick, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", stream)
    assert explain(*TABLE, "--rows", "0", "--out", "out") == 0
    stream.flush()
    assert b"age ? time" in stream.buffer.getvalue()


# --- errors -----------------------------------------------------------------------------------------------------------


def test_groups_that_cannot_be_drawn_are_refused_before_anything_is_sampled(here, attributed, capsys):
    np.save("channels.npy", np.arange(3)[:, None, None] + np.zeros((3, 12, 12), dtype=int))
    arguments = ["--model", "mine.py:pixels", "--input", "colour.png", "--sigma", 0.1, "--calls", 20]
    assert explain(*arguments, "--segments", "mask:channels.npy") == 2
    assert "--segments: all channels of a pixel must share a group" in capsys.readouterr().err
    np.save("curve.npy", np.sin(np.arange(100) / 5))
    np.save("parts.npy", np.arange(100) // 10 % 5)
    arguments = ["--model", "mine.py:curve", "--input", "curve.npy", "--sigma", 0.1, "--calls", 20, "--step", 0.05]
    assert explain(*arguments, "--segments", "mask:parts.npy") == 2
    assert "must be one contiguous interval of time" in capsys.readouterr().err
    assert explain(*arguments, "--segments", "slic:5") == 2
    assert "--segments slic is for images" in capsys.readouterr().err
    assert attributed.made == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--model mine.py:table --input data.csv", "the scale of the noise is missing: pass --sigma"),
        ("--model mine.py:table --input data.csv --sigma 1 --radius 1", "--radius or --sigma, not both"),
        ("--model mine.py:table --input data.csv --sigma -1", "--sigma must be a positive number"),
        ("--model mine.py:table --input data.csv --sigma x", '"x"'),
        ("--model mine.py:table --input data.csv --sgima 1", "Did you mean --sigma"),
        ("--model mine.py:table --sigma 1", "--input"),
        ("--input data.csv --sigma 1", "--model"),
        ("--model mine.py:table --input data.csv --sigma 1 --calls 7", "--calls must be even"),
        ("--model mine.py:table --input data.csv --sigma 1 --tol 0.1 --calls 8", "--tol .* or --calls"),
        ("--model mine.py:table --input data.csv --sigma 1 --tol 0", "--tol must lie between 0 and 1"),
        ("--model mine.py:table --input data.csv --sigma 1 --tol 10", "--tol must lie between 0 and 1"),
        ("--model mine.py:table --input data.csv --sigma 1 --seed -1", "--seed must be between 0"),
        ("--model mine.py:table --input data.csv --sigma 1 --device nothing", "--device nothing cannot be used"),
        ("--model mine.py:table --input nowhere.csv --sigma 1", "--input nowhere.csv does not exist"),
        ("--model mine.py:table --input data.csv --sigma 1", "cannot be run on the 5 columns.*--drop"),
        ("--model mine.py:table --input data.csv --sigma 1 --drop label --target 9", "--target 9 is out of range"),
        (
            "--model mine.py:table --input data.csv --sigma 1 --drop label --target cat",
            "expected the number of an output",
        ),
        ("--model mine.py:table --input data.csv --sigma 1 --drop label --segments grid:9", "9 cells are more than"),
        ("--model mine.py:table --input data.csv --sigma 1 --drop label --segments grid:1", "it has no pairs"),
        ("--model mine.py:Pair --input data.csv --sigma 1 --drop label", "a tuple of 2.*--output 0"),
        (
            "--model mine.py:table --input data.csv --sigma 1 --drop label --out mine.py",
            "got the file .*mine.py. Pass another",
        ),
        (
            "--model mine.py:table --input data.csv --sigma 1 --drop label --classes no.txt",
            "--classes no.txt does not exist",
        ),
        ("--model mine.py:table --input grey.png --sigma 1", "cannot be run on grey.png"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(here, quick, arguments, words, capsys):
    assert explain(*arguments.split()) == 2
    done = capsys.readouterr()
    assert done.out == ""
    assert done.err.startswith("smoothhess: error: ")
    assert done.err.count("\n") == 1
    assert re.search(words, done.err)
    assert not (here / "smoothhess-explanation").exists()


def test_text_in_a_number_column_names_column_and_row(here, capsys):
    text = (here / "data.csv").read_text().splitlines()
    text[4] = "blue" + text[4][text[4].index(",") :]
    (here / "data.csv").write_text("\n".join(text))
    assert explain(*TABLE) == 2
    assert "row 3, column 'age': expected a number, got text" in capsys.readouterr().err


def test_debug_shows_the_traceback(here, capsys):
    assert explain("--model", "mine.py:table", "--input", "nowhere.csv", "--sigma", 1, "--debug") == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("smoothhess: error: ")


def test_without_matplotlib_it_is_named_before_anything_is_done(here, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert explain(*TABLE) == 2
    assert "pip install 'smoothhess[view]'" in capsys.readouterr().err


def test_help_says_what_is_needed(capsys):
    assert main(["explain", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for words in (
        "--model",
        "torch.export.save",
        "Pickled models",
        "--weights",
        "--segments",
        "window:0.5s",
        "--no-standardize",
        "--mean",
        "--rows",
        "the predicted class",
        "index.html lists the pages",
    ):
        assert words in text, words
    assert main(["--help"]) == 0
    assert "explain" in capsys.readouterr().out
