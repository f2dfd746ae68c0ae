"""The P_MSE experiment on stand-ins."""

import csv
import json
import math
from dataclasses import replace

import pytest
import torch

from paper.cells import Cells
from paper.experiments import pmse, pmse_report
from paper.methods import PMSE, Maker, sigma_candidates
from paper.options import Options
from paper.published import published
from paper.tests.stand_ins import mlp_source
from smoothhess import SmoothHess, baselines
from smoothhess.evaluate import compare
from tests.printed import alike

pytestmark = pytest.mark.usefixtures("plain_figures")

TINY = pmse.Size(
    points=5,
    samples=50,
    exact=None,
    batch=3,
    calls=40,
    val=4,
    val_smooth=3,
    val_samples=8,
    samplings=("radius",),
    recipe_points=2,
    recipe_share=0.0008,
    stride=30,
)
RADII = pmse.EPSILONS


@pytest.fixture
def stand_ins(monkeypatch):
    monkeypatch.setattr(pmse, "CLASSIFIERS", (mlp_source(), mlp_source("fmnist", "FMNIST", "fmnist")))
    monkeypatch.setattr(pmse, "FULL", TINY)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Trained once for all tests of this file."""
    folder = tmp_path_factory.mktemp("weights")
    for source in (mlp_source(), mlp_source("fmnist", "FMNIST", "fmnist")):
        source.classifier(Options(folder / "out", cache=folder))
    return folder


def table(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_full_run(stand_ins, weights, tmp_path):
    options = Options(tmp_path, cache=weights)
    outcome = pmse.run(options)
    folder = tmp_path / "pmse"
    names = {path.name for path in outcome.files}
    for stem in ("pmse", "paired", "points", "std", "parameters", "published-parameters", "recipe"):
        assert {f"{stem}.csv", f"{stem}.md"} <= names
    assert {"pmse.png", "pmse.svg"} <= names
    assert all(path.exists() for path in outcome.files)

    rows = table(folder / "pmse.csv")
    assert len(rows) == (3 + 2) * len(RADII) * len(PMSE)  # two neurons on MNIST
    assert {row["network"] for row in rows} == {"MNIST", "FMNIST"}
    for row in rows:
        function = "logit" if row["function"] == "logit" else "neuron"
        printed = published(
            metric="pmse_mean",
            dataset=row["network"],
            network="mlp5",
            function=function,
            epsilon=float(row["ε"]),
            method=row["method"],
        )
        assert float(row["published"]) == printed.value
        assert float(row["ratio"]) == pytest.approx(float(row["ours"]) / printed.value)
        assert float(row["standard error"]) > 0
        assert float(row["ball"]) > 0
    assert len(table(folder / "paired.csv")) == (3 + 2) * len(RADII) * (len(PMSE) - 1)
    chosen = table(folder / "parameters.csv")
    assert len(chosen) == (3 + 2) * len(RADII) * 6
    assert {row["parameter"] for row in chosen} == {"σ²", "β"}
    text = (folder / "pmse.md").read_text()
    assert "`" in text
    assert "python -m paper pmse --out DIR --device cpu --seed 0" in text
    assert "Note 1: cannot be the gradient's" in text
    assert all(line in text for line in outcome.lines)
    assert any("SH+SG has the lowest P_MSE in" in line and "of 12 cells" in line for line in outcome.lines)


def test_a_cell_is_what_the_library_says(weights, tmp_path):
    """The default estimate and the library's own SoftPlus, judged by `compare`, on the first batch of points."""
    classifier = mlp_source().classifier(Options(tmp_path, cache=weights))
    options = Options(tmp_path)
    found = pmse.measure(classifier, ("logit",), options, TINY)
    x = classifier.inputs("test", 3)
    target, epsilon = classifier.predicted(x), 0.5
    sigma, beta = (found.chosen["logit", "radius", epsilon, name] for name in ("SH+SG", "SP H+G"))
    smooth = SmoothHess(classifier.readout).attribute(x, target, sigma=sigma, n_calls=TINY.calls, seed=0)
    soft = baselines.softplus(classifier.readout, x, target, beta=beta)
    surrogates = {
        "SH+SG": smooth.taylor(),
        "SP H+G": soft.taylor(),
        "G": baselines.gradient(classifier.readout, x, target).taylor(1),
    }
    for sampler in ("radius", "ball"):
        expected = compare(
            classifier.readout, x, surrogates, epsilon, target, n_samples=TINY.samples, sampling=sampler, seed=0
        )
        for m, name in enumerate(surrogates):
            record = found.best("logit", epsilon, name, sampler)
            torch.testing.assert_close(record.errors[sampler][:3], expected.errors[m, 0], rtol=1e-3, atol=1e-10)
    ours = found.best("logit", epsilon, "SH+SG", "radius")
    assert (ours.calls, ours.value) == (TINY.calls, sigma)
    assert len(ours.errors["radius"]) == 5
    apart = ours.errors["radius"] - found.best("logit", epsilon, "G", "radius").errors["radius"]
    row = next(r for r in pmse_report.paired_rows([found]) if (r["ε"], r["method"]) == (epsilon, "G"))
    assert row["paired standard error, radius"] == pytest.approx(float(apart.std()) / math.sqrt(5))
    assert row["difference, radius"] == pytest.approx(float(apart.mean()))
    assert row["lower on, radius"] == f"{sum(a < 0 for a in apart.tolist())} of 5"
    ratios = ours.errors["radius"] / found.best("logit", epsilon, "G", "radius").errors["radius"]
    assert row["median ratio, radius"] == pytest.approx(sorted(ratios.tolist())[2])
    points = [r for r in pmse_report.point_rows([found]) if (r["ε"], r["method"]) == (epsilon, "SH+SG")]
    assert [r["radius"] for r in points] == ours.errors["radius"].tolist()
    assert [r["ball"] for r in points] == found.best("logit", epsilon, "SH+SG", "ball").errors["ball"].tolist()


def test_a_run_that_was_killed_goes_on(stand_ins, weights, tmp_path, monkeypatch):
    """Stopped in the middle of the cells: nothing is made twice, and the tables are the same."""
    whole = Options(tmp_path / "whole", cache=weights, dataset="mnist", function="logit")
    pmse.run(whole)
    cut = replace(whole, out=tmp_path / "cut")
    count, put = 0, Cells.put

    def killed(self, key, value):
        nonlocal count
        count += 1
        if count > 10:
            raise KeyboardInterrupt
        put(self, key, value)

    monkeypatch.setattr(Cells, "put", killed)
    with pytest.raises(KeyboardInterrupt):
        pmse.run(cut)
    cells = tmp_path / "cut" / "pmse" / "cells" / "mnist"
    kept = {path: path.read_bytes() for path in cells.glob("cell-*.json")}
    assert len(kept) == 10
    monkeypatch.setattr(Cells, "put", put)
    pmse.run(cut)
    assert all(path.read_bytes() == text for path, text in kept.items())
    for name in ("pmse", "paired", "std", "parameters", "published-parameters"):
        first, second = ((run.folder("pmse") / f"{name}.csv").read_text() for run in (whole, cut))
        assert alike(first, second), name

    monkeypatch.setattr(Maker, "__call__", None)  # a third run makes nothing
    monkeypatch.setattr(Maker, "_attribute", None)
    pmse.run(cut)


def test_other_settings_in_the_same_folder_raise(weights, tmp_path):
    classifier = mlp_source().classifier(Options(tmp_path, cache=weights))
    options = Options(tmp_path)
    folder = options.folder("pmse") / "cells" / "mnist"
    Cells(folder, {**json.loads(json.dumps(_settings(classifier, options)))})
    with pytest.raises(ValueError, match=r"val is 4 there and 3 now.*Pass another --out"):
        pmse.measure(classifier, ("logit",), options, replace(TINY, val=3))
    with pytest.raises(ValueError, match=r"seed is 0 there and 1 now"):
        pmse.measure(classifier, ("logit",), replace(options, seed=1), TINY)
    with torch.no_grad():
        classifier.network.f[0].bias[0] += 1
    with pytest.raises(ValueError, match=r"weights is '[0-9a-f]{12}' there"):
        pmse.measure(classifier, ("logit",), options, TINY)


def _settings(classifier, options):
    sizes = {key: value for key, value in vars(TINY).items() if key != "points"}
    return {**sizes, "seed": options.seed, "weights": classifier.fingerprint}


def test_a_run_of_more_points_goes_on_from_one_of_fewer(weights, tmp_path, monkeypatch):
    classifier = mlp_source().classifier(Options(tmp_path, cache=weights))
    whole = pmse.measure(classifier, ("logit",), Options(tmp_path / "whole"), TINY)
    some = Options(tmp_path / "some", points=3)
    pmse.measure(classifier, ("logit",), some, TINY)
    asked = []
    monkeypatch.setattr(
        pmse.Balls, "around", lambda *a, f=pmse.Balls.around, **k: asked.append(len(a[0].inputs)) or f(*a, **k)
    )
    found = pmse.measure(classifier, ("logit",), replace(some, points=5), TINY)
    assert asked == [2]  # only the second batch
    for one, other in zip(whole.records, found.records, strict=True):
        torch.testing.assert_close(one.errors, other.errors, rtol=0, atol=0)


def test_the_recipe_is_compared_with_the_default(weights, tmp_path):
    classifier = mlp_source().classifier(Options(tmp_path, cache=weights))
    found = pmse.measure(classifier, ("logit",), Options(tmp_path), TINY)
    rows = [r for r in pmse_report.recipe_rows([found]) if r["ε"] == 1.0]
    assert [(r["method"], r["by"]) for r in rows[:4]] == [
        ("SH+SG", "default"),
        ("SG", "default"),
        ("SH+SG", "recipe"),
        ("SG", "recipe"),
    ]
    assert [r["calls"] for r in rows[:4]] == [40, 40, 80, 80]  # 0.0008 of 100 000
    assert {r["method"] for r in rows[4:]} == {"SP H+G", "SP G", "SW H+G", "SW G", "G"}
    assert all(r["points"] == 2 for r in rows)
    assert any("recipe took 80 calls" in line for line in pmse_report.findings([found]))


def test_samplers_have_parameters_of_their_own_where_asked(weights, tmp_path):
    classifier = mlp_source().classifier(Options(tmp_path, cache=weights))
    size = replace(TINY, samplings=("radius", "ball"), recipe_points=0, points=3)
    found = pmse.measure(classifier, ("logit",), Options(tmp_path), size)
    for sampler in ("radius", "ball"):
        for method in PMSE[:-1]:
            value = found.chosen["logit", sampler, 1.0, method.name]
            assert found.best("logit", 1.0, method.name, sampler).value == value
    assert found.recipes == []


def test_sigma_may_be_taken_as_it_is(weights, tmp_path):
    classifier = mlp_source().classifier(Options(tmp_path, cache=weights))
    size = replace(TINY, val_smooth=0, recipe_points=0, points=3)
    found = pmse.measure(classifier, ("logit",), Options(tmp_path), size)
    assert found.chosen["logit", "radius", 0.5, "SG"] == sigma_candidates(0.5, 12)[1]
    rows = [r for r in pmse_report.parameter_rows([found]) if r["method"] == "SG"]
    assert all(r["scored"] == "0 of 3" for r in rows)


def test_resnet101_is_left_out_with_a_line(tmp_path):
    quick = pmse.run_resnet101(Options(tmp_path, quick=True))
    assert quick.files == []
    assert "left out of a quick run" in quick.lines[0]
    slow = pmse.run_resnet101(Options(tmp_path))
    assert slow.files == []
    assert "python -m paper.training cifar10-resnet101" in slow.lines[0]
    for other in ({"function": "neuron"}, {"dataset": "mnist"}):
        assert "only the logits of CIFAR10" in pmse.run_resnet101(Options(tmp_path, **other)).lines[0]
    with pytest.raises(ValueError, match="--function: expected logit or neuron, got 'softmax'"):
        pmse.run(Options(tmp_path, function="softmax"))


def test_networks_without_weights_are_left_out_with_a_line(stand_ins, weights, tmp_path, monkeypatch):
    monkeypatch.setattr(
        pmse, "CLASSIFIERS", (mlp_source("mnist-authors", run=None, recipe=None, given="x.pth"), mlp_source())
    )
    outcome = pmse.run(Options(tmp_path, cache=weights, dataset="mnist", function="logit", points=3))
    assert any("left out: MNIST-AUTHORS: no weights" in line for line in outcome.lines)
    assert (tmp_path / "pmse" / "pmse.csv").exists()


def test_full_sizes_are_those_of_the_paper():
    assert pmse.FULL.samples == pmse.FULL_CONVOLUTIONAL.samples == 15_000
    assert (pmse.FULL.points, pmse.FULL.val) == (200, 200)
    assert (pmse.FULL_CONVOLUTIONAL.points, pmse.FULL_CONVOLUTIONAL.val) == (100, 50)
    assert pmse.FULL.stride == pmse.FULL.recipe_share == pmse.FULL_CONVOLUTIONAL.recipe_share == 1
