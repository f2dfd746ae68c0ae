"""The benchmarks on images at tiny size: the small file of images, joint removals, and deletion curves."""

import json
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from paper.datasets import ImageData, Split
from paper.networks import resnet18


@pytest.fixture(scope="module")
def bench():
    """The scripts, imported as they import each other."""
    folder = str(Path(__file__).resolve().parents[2] / "benchmarks")
    sys.path.append(folder)
    try:
        yield SimpleNamespace(**{name: import_module(name) for name in ("cam", "faithfulness", "image_subset")})
    finally:
        sys.path.remove(folder)


def pixels(n, seed):
    return torch.randint(0, 256, (n, 3, 32, 32), generator=torch.Generator().manual_seed(seed)).float() / 255


@pytest.fixture
def folder(bench, tmp_path):
    """A small file of random images with two images in each part and quadrants as super-pixels."""
    quadrants = (torch.arange(32) // 16)[:, None] * 2 + torch.arange(32) // 16
    parts = [bench.image_subset.Images(pixels(2, i), torch.tensor([0, 9]), quadrants.expand(2, 32, 32)) for i in (1, 2)]
    bench.image_subset.write(
        bench.image_subset.Subset(*parts, torch.tensor([0.4, 0.5, 0.6])), tmp_path / bench.image_subset.FILE
    )
    return tmp_path


@pytest.fixture
def narrow(bench, monkeypatch):
    """A ResNet-18 with 4 to 32 channels and random weights in place of the trained one."""

    def load_network(name, folder):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return resnet18(width=4).eval()

    for script in (bench.faithfulness, bench.cam):
        monkeypatch.setattr(script, "load_network", load_network)
    bench.faithfulness.prepared.cache_clear()
    yield load_network("resnet18", None)
    bench.faithfulness.prepared.cache_clear()


def fail(*_):
    raise AssertionError("kept numbers were computed again")


# --- the small file ---------------------------------------------------------------------------------------------------


def test_small_file_has_the_pixels_and_superpixels_of_the_data(bench, tmp_path, monkeypatch):
    pytest.importorskip("skimage")
    train, val, test = (Split(pixels(5, seed), torch.arange(5)) for seed in range(3))
    data = ImageData("random", train, val, test, tuple("abcde"), "")
    monkeypatch.setattr(bench.image_subset, "full", lambda folder: data)
    found = bench.image_subset.load(tmp_path, 2, 3)
    bench.image_subset.write(found, tmp_path / bench.image_subset.FILE)
    read = bench.image_subset.load(tmp_path, 2, 3)
    assert torch.equal(read.colour, train.inputs.mean((0, 2, 3)))
    for a, b, images in zip((found.val, found.test), (read.val, read.test), (val, test), strict=True):
        assert torch.equal(b.inputs, images.inputs[: len(b)])
        assert torch.equal(a.inputs, b.inputs)
        assert torch.equal(a.targets, b.targets)
        assert b.masks is not None
        for i in range(len(a)):
            assert torch.equal(a.superpixels(i).mask, b.superpixels(i).mask)


def test_too_small_file_says_how_to_write_a_larger_one(bench, folder):
    with pytest.raises(ValueError, match="--test 3"):
        bench.image_subset.load(folder, 2, 3)


# --- joint removals ---------------------------------------------------------------------------------------------------


def test_joint_removals_resume_and_fill_the_page(bench, folder, narrow, tmp_path, monkeypatch):
    script = bench.faithfulness
    monkeypatch.setattr(script, "KEPT", tmp_path / "kept")
    tiny = replace(script.NETWORKS["resnet18"], calls=8, steps=1, choosing=1, accuracy=2)
    fewer = {name: replace(method, candidates=method.candidates[-2:]) for name, method in script.METHODS.items()}
    monkeypatch.setattr(script, "METHODS", fewer)
    monkeypatch.setitem(script.NETWORKS, "resnet18", tiny)
    script.run("resnet18", folder, 2)
    kept = json.loads((tmp_path / "kept" / "resnet18" / "1.json").read_text())["found"]
    assert kept["segments"] == 4
    assert kept["forward"] == 11
    assert kept["methods"].keys() == script.METHODS.keys()
    for name in ("one_image", "candidates"):
        monkeypatch.setattr(script, name, fail)
    script.run("resnet18", folder, 2)
    page = "\n".join(script.section("resnet18"))
    assert "2 test images, 4 to 4 super-pixels" in page
    assert all(f"| {name} |" in page for name in script.METHODS)
    (tmp_path / "kept" / "resnet18" / "1.json").unlink()  # as if the run had been stopped
    assert "1 test images" in "\n".join(script.section("resnet18"))
    monkeypatch.setitem(script.NETWORKS, "resnet18", replace(tiny, calls=16))
    script.prepared.cache_clear()
    with pytest.raises(AssertionError, match="computed again"):
        script.run("resnet18", folder, 2)


# --- maps of a layer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "side", "linear"), [("layer3", 8, False), ("layer4.0", 4, False), ("layer4", 4, True)]
)
def test_both_parts_are_the_network(bench, narrow, layer, side, linear):
    parts, x = bench.cam.split(narrow, layer), pixels(2, 3)
    with torch.no_grad():
        activation = parts.first(x)
        torch.testing.assert_close(parts.rest(activation), narrow(x))
    assert activation.shape[2:] == (side, side)
    assert parts.linear == linear


def test_greedy_order_lowers_the_expansion_most_at_each_step(bench):
    rng = torch.Generator().manual_seed(0)
    gradient, hessian = torch.randn(3, 6, generator=rng).double(), torch.randn(3, 6, 6, generator=rng).double()
    hessian = hessian + hessian.mT
    order = bench.cam.greedy(gradient, hessian).argsort(dim=1, descending=True)
    for g, h, found in zip(gradient, hessian, order.tolist(), strict=True):
        closed: list[int] = []
        for k in found:
            drops = {}
            for j in set(range(6)) - set(closed):
                gone = [*closed, j]
                drops[j] = float(g[gone].sum() - h[gone][:, gone].sum() / 2)
            assert k == max(drops, key=lambda j, drops=drops: drops[j])
            closed.append(k)


class Cells(nn.Module):
    """Weighted sum over 2 × 2 cells of an image as the second of two logits; the first is 0."""

    def __init__(self):
        super().__init__()
        self.weights = torch.tensor([4.0, -2.0, 1.0, 3.0])

    def forward(self, activation):
        score = (activation.mean(1).flatten(1) * self.weights).sum(1)
        return torch.stack([torch.zeros_like(score), score], 1)


def area(values, step):
    """Area under the curve through the values, for each of two equal images."""
    return [float(torch.trapezoid(values, dx=step))] * 2


def test_areas_of_a_linear_model_are_those_by_hand(bench):
    parts = bench.cam.Parts(nn.AvgPool2d(2), nn.Sequential(nn.Identity(), Cells()), True)
    x, colour = torch.ones(2, 3, 4, 4), torch.zeros(3)
    chunk = bench.cam.Chunk.of(parts, x, colour, (0, 1))
    assert chunk.target.tolist() == [1, 1]
    maps = bench.cam.fixed(chunk)
    assert maps.about["own"] == [0, 0]
    best = torch.tensor([[4.0, -2.0, 1.0, 3.0]]).expand(2, 4)
    for name in ("HiResCAM", "closing one gate", "removing one cell"):
        torch.testing.assert_close(maps.scores[name], best)
    found = bench.cam.curves(chunk, maps.scores["HiResCAM"], 33)
    logits = torch.tensor([6.0, 2.0, -1.0, -2.0, 0.0]).double()  # after the cells of 4, 3, 1 and −2 are gone
    assert found["deletion, logit"] == pytest.approx(area(logits, 0.25), rel=1e-6)
    assert found["insertion, logit"] == pytest.approx(area(6.0 - logits, 0.25), rel=1e-6)
    assert found["deletion"] == pytest.approx(area(logits.sigmoid(), 0.25), rel=1e-6)
    coarse = bench.cam.curves(chunk, maps.scores["HiResCAM"], 3)  # after 0, 2 and 4 cells
    assert coarse["deletion, logit"] == pytest.approx(area(logits[::2], 0.5), rel=1e-6)


def test_curves_resume_and_fill_the_page(bench, folder, narrow, tmp_path, monkeypatch):
    script = bench.cam
    monkeypatch.setattr(script, "KEPT", tmp_path / "kept")
    settings = script.Settings(("layer4.0", "layer4"), 16, 1, 1, 5, (0.1, 0.4), (10.0,))
    script.run(script.prepared(folder, "cpu", 2, settings), 2)
    for name in ("evaluated", "candidates"):
        monkeypatch.setattr(script, name, fail)
    script.run(script.prepared(folder, "cpu", 2, settings), 2)
    page = script.page(None)
    before, after = page.split("## layer4, ")
    assert "## layer4.0, 4 × 4 positions\n" in before
    assert all(f"| {name} |" in before for name in script.METHODS)
    assert "2 test images, 1 validation images, 16 calls of the smoothed model; " in before
    assert "Largest entry of the network's own M over these images: 0." in before
    assert "Taylor-CAM" not in after
    (tmp_path / "kept" / "layer4.0-1.json").unlink()  # as if the run had been stopped
    assert "1 test images, 1 validation images, 16 calls" in script.page(None)
    (tmp_path / "kept" / "layer4.0-0.json").unlink()
    assert "layer4.0" not in script.page(None).split("<!-- the rest")[1]
    with pytest.raises(AssertionError, match="computed again"):
        script.run(script.prepared(folder, "cpu", 2, replace(settings, calls=32)), 2)
