"""The qualitative figure on stand-ins."""

import csv
import sys
from dataclasses import replace

import pytest
import torch

from paper.cells import Cells
from paper.experiments import superpixels
from paper.methods import PMSE, Maker
from paper.options import Options
from paper.tests.stand_ins import RECIPE, objects, resnet_source
from paper.training import train
from smoothhess import baselines
from smoothhess.model.weight_files import save_weights
from tests.printed import alike

pytestmark = [pytest.mark.rounding, pytest.mark.usefixtures("plain_figures")]

TINY = superpixels.Size(calls=24, samples=10, val=1, val_smooth=1, val_samples=4, stride=60)


def tiles(image):
    """5 × 4 segments."""
    rows, columns = (torch.arange(32) * 5 // 32)[:, None], (torch.arange(32) * 4 // 32)[None]
    return 4 * rows + columns


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A ResNet that classifies every test image correctly, trained for a second."""
    folder = tmp_path_factory.mktemp("weights")
    source = resnet_source()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = source.build()
    recipe = replace(RECIPE, n_steps=40, batch_size=40, rate=lambda step: 0.05 * (1 - step / 40))
    scores = train(network, objects().train, recipe, held_out={"test": objects().test}).scores
    assert scores["test"] == 1  # the falling rate sees to it whatever the rounding
    save_weights(network, source.path(Options(folder, cache=folder)), steps="20", train="1", val="1", test="1")
    return folder


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(superpixels, "CLASSIFIERS", (resnet_source(),))
    monkeypatch.setattr(superpixels, "FULL", TINY)
    monkeypatch.setattr(superpixels, "segment", tiles)


def test_the_full_run(stand_in, weights, tmp_path, monkeypatch):
    options = Options(tmp_path, cache=weights)
    outcome = superpixels.run(options)
    assert {path.name for path in outcome.files} == {
        f"{stem}.{kind}"
        for stem, kinds in (("superpixels", ("csv", "md", "png", "svg")), ("segments", ("csv", "md")))
        for kind in kinds
    }
    with (tmp_path / "superpixels" / "superpixels.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["image"], row["method"]) for row in rows] == [
        (subject, method) for subject in ("automobile", "frog", "dog") for method in ("SmoothHess", "SoftPlus", "Swish")
    ]
    assert all(row["segments"] == "20" and row["chosen"] == "10" for row in rows)  # the middle of the image
    assert all(float(row["P_MSE, radius"]) > 0 for row in rows)
    assert any("SmoothHess is lowest in" in line for line in outcome.lines)
    with (tmp_path / "superpixels" / "segments.csv").open(encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 3 * 3 * 20

    monkeypatch.setattr(Maker, "__call__", None)  # a second run makes nothing
    monkeypatch.setattr(superpixels, "segment", None)
    again = superpixels.run(options)
    assert alike("\n".join(again.lines), "\n".join(outcome.lines))


def test_interactions_are_plain_sums_over_pairs(stand_in, weights, tmp_path):
    options = Options(tmp_path, cache=weights)
    classifier = resnet_source().classifier(options)
    x = classifier.inputs("test", 1)
    bench = superpixels._Bench(classifier, options, TINY, x, tiles(x[0]), 10)
    found = bench.explained(PMSE[2], 4.0)
    mask = tiles(x[0]).expand(3, 32, 32).flatten()
    indicators = torch.stack([(mask == k).float() for k in (10, 0, 9, 19)])[None]
    soft = baselines.softplus(classifier.readout, x, classifier.predicted(x), beta=4.0, dense=False)
    expected = (soft.taylor().product(indicators) @ indicators.mT)[0, 0].double()  # by differentiating twice
    ours = torch.tensor([found["interactions"][k] for k in (10, 0, 9, 19)]).double()
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_a_run_that_was_killed_goes_on(stand_in, weights, tmp_path, monkeypatch):
    monkeypatch.setattr(superpixels, "SUBJECTS", ("frog",))
    options = Options(tmp_path, cache=weights)
    count, put = 0, Cells.put

    def killed(self, key, value):
        nonlocal count
        count += 1
        if count > 5:
            raise KeyboardInterrupt
        put(self, key, value)

    monkeypatch.setattr(Cells, "put", killed)
    with pytest.raises(KeyboardInterrupt):
        superpixels.run(options)
    monkeypatch.setattr(Cells, "put", put)
    superpixels.run(options)
    assert (tmp_path / "superpixels" / "superpixels.png").exists()
    monkeypatch.setattr(superpixels, "FULL", replace(TINY, samples=11))
    with pytest.raises(ValueError, match="samples is 10 there and 11 now"):
        superpixels.run(options)


def test_neighbours():
    picture = superpixels.Picture("frog", torch.zeros(3, 32, 32), tiles(None), 10, {})
    assert [k for k in range(20) if k != 10 and picture.touches(k)] == [6, 9, 11, 14]


def test_without_scikit_image_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "skimage.segmentation", None)
    with pytest.raises(ImportError, match="pip install"):
        superpixels.segment(torch.zeros(3, 32, 32))


def test_slic_makes_20_to_25_segments():
    pytest.importorskip("skimage")
    for image in objects().test.inputs[:3]:
        found = superpixels.segment(image)
        assert found.shape == (32, 32)
        assert 20 <= len(found.unique()) <= 25
        assert int(found.max()) == len(found.unique()) - 1


def test_without_weights_there_is_a_line(stand_in, tmp_path):
    outcome = superpixels.run(Options(tmp_path))
    assert outcome.files == []
    assert outcome.lines[0].startswith("left out: CIFAR10")
    assert "only CIFAR10" in superpixels.run(Options(tmp_path, dataset="mnist")).lines[0]
