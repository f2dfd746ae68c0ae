"""`smoothhess explain --tokens`: the same files as for other inputs, with names, and errors before the model loads."""

import csv
import json
import re

import numpy as np
import pytest

import smoothhess as sh
from smoothhess.cli.explain import load_model
from smoothhess.cli.main import main

MODULE = """
import torch
from torch import nn


class Words(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.head = nn.Embedding(20, 6), nn.Linear(6, classes)

    def forward(self, ids):
        e = self.wte(ids)
        return self.head((e[:, 0] * e[:, 1]).tanh() + e.mean(1))


class Predictor(Words):
    def forward(self, ids):
        e = self.wte(ids)
        return {"logits": self.head(e.cumsum(1).tanh())}


def function():
    net = Words()
    return lambda ids: net(ids)


def plain(ids):
    return ids.sum(1).float()
"""
TOKENS = ["Not", "Ġso", "Ġun", "believ", "able", "Ġso"]
TEXT = "--model words.py:Words --tokens ids.npy --layer wte --sigma 0.1 --calls 60 --out out".split()


@pytest.fixture
def folder(here):
    (here / "words.py").write_text(MODULE)
    np.save(here / "ids.npy", np.arange(6))
    np.save(here / "both.npy", np.arange(12).reshape(2, 6))
    (here / "tokens.txt").write_text("\n".join(TOKENS) + "\n", encoding="utf-8")
    (here / "both.json").write_text(json.dumps([TOKENS, list("abcdef")]), encoding="utf-8")
    return here


def explain(*arguments):
    return main(["explain", *map(str, arguments)])


def payload(path):
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="payload">(.*?)</script>', text, re.DOTALL)[1])


def test_a_text(folder, capsys):
    assert explain(*TEXT, "--names", "tokens.txt", "--target", "1") == 0
    kinds = [".csv", ".html", ".safetensors", "-gradient.png", "-heatmap.png", "-pairs.png", "-text.png"]
    assert sorted(p.name for p in (folder / "out").iterdir()) == sorted([*(f"ids{k}" for k in kinds), "explain.json"])
    content = payload(folder / "out" / "ids.html")
    assert (content["kind"], content["word"]) == ("text", "token")
    assert content["title"] == "ids.npy: which tokens act together for output 1 in words.py:Words"
    assert content["examples"][0]["names"] == ["Not", "so (1)", "un", "believ", "able", "so (5)"]
    result = sh.Interactions.load(folder / "out" / "ids.safetensors")
    assert (result.names, result.feature_kind) == ((tuple(TOKENS),), "token")
    with (folder / "out" / "ids.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 15
    first = result.top_pairs(1)[0][0]
    assert (rows[0]["first"], rows[0]["second"]) == first.names
    assert float(rows[0]["value"]) == pytest.approx(first.value)
    printed = capsys.readouterr().out
    assert "so (1)" in printed
    assert "Ġ" not in printed
    assert "The noise moves the gate of each token" in printed
    assert explain(*TEXT, "--names", "tokens.txt", "--target", "1") == 0
    assert "kept from an earlier run" in capsys.readouterr().out
    assert explain(*TEXT, "--names", "tokens.txt", "--target", "1", "--baseline", "zero") == 0
    assert "kept from an earlier run" not in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_several_texts_functions_and_fields_of_an_output(folder, capsys):
    many = [*TEXT[:2], "--tokens", "both.npy", "--names", "both.json", *TEXT[4:]]
    assert explain(*many) == 0
    second = sh.Interactions.load(folder / "out" / "both-1.safetensors")
    assert second.names == (tuple("abcdef"),)
    assert (folder / "out" / "index.html").exists()
    assert explain("--model", "words.py:function", *TEXT[2:], "--baseline", "7") == 0
    logits = ["--model", "words.py:Predictor", "--output", "logits", "--target", "-1,2"]
    assert explain(*logits, *TEXT[2:]) == 0
    assert sh.Interactions.load(folder / "out" / "ids.safetensors").target.tolist() == [[5, 2]]
    assert "output (5, 2)" in capsys.readouterr().out


BEFORE_THE_MODEL = [
    (["--tokens", "none.npy"], "--tokens none.npy does not exist"),
    (["--tokens", "tokens.txt"], "expected a .npy file of token ids"),
    (["--tokens", "halves.npy"], "expected integers, (tokens,) or (texts, tokens), got float64 of shape (3,)"),
    (["--tokens", "negative.npy"], "must not be negative, got -1"),
    (["--tokens", "long.npy"], "texts of 2 to 512 tokens, got 513. Shorten the text"),
    (["--tokens", "single.npy"], "texts of 2 to 512 tokens, got 1. A single token has no partner"),
    (["--names", "none.txt"], "--names none.txt does not exist"),
    (["--names", "both.json"], "expected 6 names, one per token, got 12"),
    (["--names", "numbers.json"], "expected a list of strings"),
    (["--names", "tokens.txt", "tokens.txt"], "one file for each file of --tokens, 1, got 2"),
    (["--model", "net.pt2"], "an export (.pt2) has no layers. Pass --model file.py:factory"),
    (["--input", "grey.png"], "--input cannot be combined with --tokens"),
    (["--segments", "grid:4"], "--segments cannot be combined with --tokens"),
    (["--baseline", "middle"], "--baseline must be mean, zero or a token id"),
]


@pytest.mark.parametrize(("changes", "message"), BEFORE_THE_MODEL)
def test_errors_before_the_model_is_loaded(folder, capsys, monkeypatch, changes, message):
    monkeypatch.setattr(load_model, "load", lambda *_: pytest.fail("the model was loaded"))
    np.save(folder / "halves.npy", np.ones(3) / 2)
    np.save(folder / "negative.npy", np.array([3, -1]))
    np.save(folder / "long.npy", np.zeros(513, dtype=int))
    np.save(folder / "single.npy", np.zeros(1, dtype=int))
    (folder / "numbers.json").write_text("[1, 2]")
    if changes[0] in TEXT:
        at = TEXT.index(changes[0])
        arguments = [*TEXT[:at], *changes, *TEXT[at + 2 :]]
    else:
        arguments = [*TEXT, *changes]
    assert explain(*arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*TEXT[:4], *TEXT[6:]], "--tokens need --layer"),
        ([*TEXT[:2], *TEXT[4:]], "pass --input, at least one image, .csv or .npy file, or --tokens"),
        ([*TEXT[:2], "--input", "ids.npy", *TEXT[4:]], "--layer is for texts: pass --tokens ids.npy"),
        ([*TEXT[:4], "--layer", "wpe", *TEXT[6:]], "--layer wpe: no layer is called 'wpe'. The model has wte, head"),
        (["--model", "words.py:plain", *TEXT[2:]], "a function without a network"),
        ([*TEXT[:2], "--tokens", "large.npy", *TEXT[4:]], "--tokens large.npy: input_ids must be 0 … 19"),
        (["--model", "words.py:Predictor", "--output", "logits", *TEXT[2:]], "select an entry with --target 0,0"),
    ],
)
def test_errors_name_the_option(folder, capsys, arguments, message):
    np.save(folder / "large.npy", np.array([3, 20]))
    assert explain(*arguments) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "out").exists()
