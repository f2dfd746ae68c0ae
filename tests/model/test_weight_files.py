import os
from pathlib import Path

import pytest
import torch
from torch import nn

from paper import datasets
from paper.networks import MLP, image_mlp, resnet18
from paper.training import mean_score
from smoothhess.model.weight_files import load_weights, save_tensors, save_weights


def real(*parts):
    path = Path(os.environ.get("SMOOTHHESS_DATA", "nowhere"), *parts)
    return pytest.param(
        path, marks=pytest.mark.skipif(not path.exists(), reason=f"needs SMOOTHHESS_DATA/{'/'.join(parts)}")
    )


def test_round_trip_keeps_every_bit_and_the_metadata(tmp_path):
    first, second = resnet18(width=2), resnet18(width=2)
    save_weights(first, tmp_path / "new" / "a.safetensors", what="a test")
    assert load_weights(second, tmp_path / "new" / "a.safetensors") == {"what": "a test"}
    assert all(torch.equal(v, second.state_dict()[k]) for k, v in first.state_dict().items())
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["a.safetensors"]


def test_half_precision_shards_are_cast(tmp_path):
    network, twin = MLP((3, 4, 2)), MLP((3, 4, 2))
    halves = {key: value.half() for key, value in network.state_dict().items()}
    for i, key in enumerate(halves):
        save_tensors({key: halves[key]}, tmp_path / f"{i}.safetensors", {})
    paths = sorted(tmp_path.iterdir())
    load_weights(twin, *paths)
    assert all(v.dtype == torch.float32 for v in twin.state_dict().values())
    assert all(torch.equal(v, halves[k].float()) for k, v in twin.state_dict().items())
    with pytest.raises(ValueError, match=r"repeats f\.0\.weight"):
        load_weights(twin, *paths, paths[0])


def test_the_authors_layout(tmp_path):
    network, twin = MLP((3, 4, 2)), MLP((3, 4, 2))
    assert list(network.state_dict()) == ["f.0.weight", "f.0.bias", "f.2.weight", "f.2.bias"]
    torch.save(network.state_dict(), tmp_path / "MNIST.pth")
    load_weights(twin, tmp_path / "MNIST.pth")
    assert torch.equal(twin.state_dict()["f.2.weight"], network.state_dict()["f.2.weight"])


def test_mismatches_are_told_and_change_nothing(tmp_path):
    path = tmp_path / "a.safetensors"
    save_weights(MLP((3, 4, 2)), path)
    deeper = MLP((3, 5, 4, 2))
    before = {key: value.clone() for key, value in deeper.state_dict().items()}
    with pytest.raises(ValueError) as caught:
        load_weights(deeper, path)
    for told in (str(path), "MLP", "lacks f.4.bias, f.4.weight", "f.0.weight (5, 3) (file: (4, 3))"):
        assert told in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in deeper.state_dict().items())
    with pytest.raises(ValueError, match=r"has unknown f\.0\.bias, f\.0\.weight, f\.2\.bias, f\.2\.weight"):
        load_weights(nn.Linear(2, 2), path)


class Trap:
    def __reduce__(self):
        return (open, ("trapped", "w"))


def test_bad_files_are_named_and_nothing_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    network = nn.Linear(2, 2)
    with pytest.raises(FileNotFoundError, match=r"gone\.pth"):
        load_weights(network, tmp_path / "gone.pth")
    torch.save({"weight": Trap()}, tmp_path / "trap.pth")
    with pytest.raises(ValueError, match=r"trap\.pth is not a complete file of plain weights"):
        load_weights(network, tmp_path / "trap.pth")
    assert not (tmp_path / "trapped").exists()
    torch.save({"epoch": 3}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match="expected a state dict of tensors"):
        load_weights(network, tmp_path / "other.pth")
    save_weights(network, tmp_path / "a.safetensors")
    for ending in (".safetensors", ".pth"):
        (tmp_path / f"cut{ending}").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-3])
        with pytest.raises(ValueError, match=rf"cut\{ending} is not a complete"):
            load_weights(network, tmp_path / f"cut{ending}")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    save_weights(nn.Linear(2, 2), path)
    old = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_weights(nn.Linear(2, 2), path)
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("path", [real("authors", "MNIST.pth")])
def test_the_authors_mnist_network(path):
    network = image_mlp().eval()
    load_weights(network, path)
    assert mean_score(network, datasets.mnist().test) == pytest.approx(0.9798)


@pytest.mark.parametrize("path", [real("resnet18_cifar10.safetensors")])
def test_the_cifar10_resnet_loads_strictly(path):
    network = resnet18().eval()
    assert "ResNet-18" in load_weights(network, path)["what"]
    assert network(torch.zeros(1, 3, 32, 32)).isfinite().all()
