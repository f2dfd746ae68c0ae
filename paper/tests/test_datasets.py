import gzip
import io
import pickle
import tarfile

import numpy as np
import pytest
import torch

from paper import datasets
from paper.datasets import cifar10, fashion_mnist, fetch, mnist, read_idx


def idx(array):
    header = b"\x00\x00\x08" + bytes([array.ndim])
    return header + b"".join(size.to_bytes(4, "big") for size in array.shape) + array.astype(np.uint8).tobytes()


def pixels(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write_idx(folder, n_train=12, n_test=5, ending=""):
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        "train-images-idx3-ubyte": pixels(n_train, 28, 28),
        "train-labels-idx1-ubyte": np.arange(n_train) % 10,
        "t10k-images-idx3-ubyte": pixels(n_test, 28, 28, seed=1),
        "t10k-labels-idx1-ubyte": np.arange(n_test) % 10,
    }
    for stem, array in arrays.items():
        raw = idx(array)
        (folder / (stem + ending)).write_bytes(gzip.compress(raw) if ending else raw)
    return arrays


@pytest.mark.parametrize(("place", "ending"), [("MNIST/raw", ".gz"), ("MNIST/raw", ""), ("MNIST", ""), ("", ".gz")])
def test_mnist_layouts_and_splits(tmp_path, place, ending):
    arrays = write_idx(tmp_path / place, ending=ending)
    data = mnist(tmp_path, n_val=4)
    assert [len(part) for part in (data.train, data.val, data.test)] == [8, 4, 5]
    images = torch.cat([data.train.inputs, data.val.inputs])
    assert images.dtype == torch.float32
    assert images.shape == (12, 1, 28, 28)
    assert torch.equal(images[:, 0], torch.from_numpy(arrays["train-images-idx3-ubyte"]).float() / 255)
    assert data.val.targets.tolist() == [8, 9, 0, 1]
    assert data.classes[3] == "three"
    assert str(tmp_path / place) in data.source


def test_the_folder_comes_from_the_environment_and_names_do_not_mix(tmp_path, monkeypatch):
    write_idx(tmp_path / "MNIST" / "raw")
    fashion = write_idx(tmp_path / "FashionMNIST" / "raw", n_train=9)
    monkeypatch.setenv("SMOOTHHESS_DATA", str(tmp_path))
    data = fashion_mnist(n_val=2)
    assert len(data.train) == 7
    assert data.classes[3] == "dress"
    assert data.test.targets.tolist() == fashion["t10k-labels-idx1-ubyte"].tolist()
    monkeypatch.delenv("SMOOTHHESS_DATA")
    with pytest.raises(ValueError, match="SMOOTHHESS_DATA"):
        mnist()


@pytest.mark.parametrize(("load", "name"), [(mnist, "mnist"), (fashion_mnist, "fashion-mnist"), (cifar10, "cifar10")])
def test_missing_data_names_folder_and_command(tmp_path, load, name):
    with pytest.raises(FileNotFoundError) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert f"python -m paper.datasets fetch {name} --data {tmp_path}" in str(caught.value)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load(tmp_path / "nowhere")


def test_damaged_idx_files_are_named(tmp_path):
    path = tmp_path / "a"
    whole = idx(pixels(3, 4, 5))
    path.write_bytes(whole)
    assert read_idx(path).shape == (3, 4, 5)
    for raw, told in [
        (whole[:-1], r"a: expected 76 bytes for shape \(3, 4, 5\), got 75"),
        (whole + b"x", "got 77"),
        (whole[:9], "expected .* got 9"),
        (b"GIF89a", "expected an idx file .* got 47 49 46 38"),
        (b"", "got nothing"),
    ]:
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=told):
            read_idx(path)
    zipped = tmp_path / "a.gz"
    for raw in (gzip.compress(whole)[:-9], b"not gzip"):
        zipped.write_bytes(raw)
        with pytest.raises(ValueError, match=r"a\.gz: expected a complete gzip file"):
            read_idx(zipped)


def test_inconsistent_idx_files_are_refused(tmp_path):
    write_idx(tmp_path)
    with pytest.raises(ValueError, match="n_val must lie between 0 and the 12"):
        mnist(tmp_path)
    labels = tmp_path / "train-labels-idx1-ubyte"
    labels.write_bytes(idx(np.arange(11)))
    with pytest.raises(ValueError, match="one label per image, got 11 for 12"):
        mnist(tmp_path, n_val=2)
    labels.write_bytes(idx(np.full(12, 10)))
    with pytest.raises(ValueError, match="labels 0 to 9"):
        mnist(tmp_path, n_val=2)
    labels.write_bytes(idx(pixels(12, 1)))
    with pytest.raises(ValueError, match=r"expected 1 dimensions, got shape \(12, 1\)"):
        mnist(tmp_path, n_val=2)


def batch(n, seed):
    return {b"data": pixels(n, 3072, seed=seed), b"labels": [i % 10 for i in range(n)], b"batch_label": b"one"}


def write_batches(folder, n=3):
    folder.mkdir(parents=True)
    for seed, name in enumerate(datasets._BATCHES):
        (folder / name).write_bytes(pickle.dumps(batch(n, seed), protocol=4))


def test_cifar10_official_batches(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    write_batches(folder)
    data = cifar10(tmp_path, n_val=5)
    assert [len(part) for part in (data.train, data.val, data.test)] == [10, 5, 3]
    assert data.test.inputs.shape == (3, 3, 32, 32)
    assert torch.equal(data.test.inputs[0].flatten(), torch.from_numpy(pixels(3, 3072, seed=5)[0]).float() / 255)
    assert data.source.startswith("official")
    assert data.classes[3] == "cat"

    (folder / "data_batch_2").unlink()
    with pytest.raises(FileNotFoundError, match="data_batch_2"):
        cifar10(tmp_path)


class Trap:
    def __reduce__(self):
        return (open, ("trapped", "w"))


def test_cifar10_batches_run_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cifar-10-batches-py"
    write_batches(folder)
    first = folder / "data_batch_1"
    whole = first.read_bytes()
    for raw, told in [
        (pickle.dumps({b"data": Trap(), b"labels": []}), "is not allowed"),
        (whole[:-40], "damaged or foreign"),
        (b"", "damaged or foreign"),
        (pickle.dumps([1, 2]), "damaged or foreign"),
        (pickle.dumps({b"labels": [1]}, protocol=4), "damaged or foreign"),
        (pickle.dumps({b"data": pixels(2, 5), b"labels": [1, 2]}, protocol=4), r"got torch.uint8 \(2, 5\)"),
    ]:
        first.write_bytes(raw)
        with pytest.raises(ValueError, match=told) as caught:
            cifar10(tmp_path)
        assert str(first) in str(caught.value)
    assert not (tmp_path / "trapped").exists()


def write_jpegs(path, n_train=6, n_test=2):
    image = pytest.importorskip("PIL.Image", reason="JPEG copies need pillow")
    arrays = {}
    for part, n in (("train", n_train), ("test", n_test)):
        encoded = []
        for i in range(n):
            buffer = io.BytesIO()
            image.fromarray(np.full((32, 32, 3), (40 * i, 100, 200), np.uint8)).save(buffer, "JPEG", quality=95)
            encoded.append(np.frombuffer(buffer.getvalue(), np.uint8))
        arrays[f"{part}_jpeg"] = np.concatenate(encoded)
        arrays[f"{part}_offsets"] = np.cumsum([0, *map(len, encoded)])
        arrays[f"{part}_labels"] = (np.arange(n) % 10).astype(np.uint8)
    np.savez(path, **arrays)
    return arrays


def test_cifar10_jpeg_copies_say_so(tmp_path):
    path = tmp_path / "cifar10_jpeg.npz"
    arrays = write_jpegs(path)
    data = cifar10(tmp_path, n_val=2)
    assert "lossy" in data.source
    assert data.train.inputs.shape == (4, 3, 32, 32)
    assert data.train.inputs[2].mean((1, 2)).mul(255).round().tolist() == pytest.approx([80, 100, 200], abs=3)
    assert data.val.targets.tolist() == [4, 5]

    np.savez(path, **(arrays | {"train_jpeg": arrays["train_jpeg"][:-5]}))
    with pytest.raises(ValueError, match="7 train offsets"):
        cifar10(tmp_path)
    np.savez(path, **(arrays | {"train_jpeg": np.zeros_like(arrays["train_jpeg"])}))
    with pytest.raises(ValueError, match=r"cifar10_jpeg\.npz: expected JPEG copies"):
        cifar10(tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="damaged or foreign"):
        cifar10(tmp_path)


def test_plane_functions_have_the_papers_curvature():
    grid = datasets.plane_grid(0.5)
    assert grid.shape == (81, 2)
    assert datasets.plane_grid().shape == (501**2, 2)
    # H₁₂ at 0 under N(0, 1) is E[f · z₁z₂]: the mean of the four factors, 2.5 (Stein).
    z = torch.randn(400_000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws = datasets.four_quadrant(z) * z.prod(1)
    assert abs(draws.mean() - 2.5) < 5 * draws.std() / len(z) ** 0.5


def tarball(folder):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.add(folder, arcname=folder.name)
    return buffer.getvalue()


def test_fetch_mnist_then_load(tmp_path, monkeypatch, serve, md5):
    write_idx(tmp_path / "published", ending=".gz")
    files = {path.name: path.read_bytes() for path in (tmp_path / "published").iterdir()}
    address = serve(files)
    source = datasets._Source(
        "MNIST/raw", ("http://127.0.0.1:9/", address), tuple((k, md5(v)) for k, v in files.items())
    )
    monkeypatch.setitem(datasets._SOURCES, "mnist", source)
    folder = fetch("mnist", tmp_path / "new", show_progress=False)
    assert folder == tmp_path / "new" / "MNIST" / "raw"
    assert sorted(p.name for p in folder.iterdir()) == sorted(files)
    assert len(mnist(tmp_path / "new", n_val=4).train) == 8


def test_fetch_cifar10_unpacks_atomically(tmp_path, monkeypatch, serve, md5, capsys):
    write_batches(tmp_path / "published" / "cifar-10-batches-py")
    archive = tarball(tmp_path / "published" / "cifar-10-batches-py")
    source = datasets._Source("", ("http://127.0.0.1:9/",), (("cifar-10-python.tar.gz", md5(archive)),))
    monkeypatch.setitem(datasets._SOURCES, "cifar10", source)
    root = tmp_path / "new"
    address = serve({"cifar-10-python.tar.gz": archive})
    datasets.main(["fetch", "cifar10", "--data", str(root), "--mirror", address])
    assert capsys.readouterr().out.strip() == str(root / "cifar-10-batches-py")
    assert [p.name for p in root.iterdir()] == ["cifar-10-batches-py"]
    assert len(cifar10(root, n_val=5).test) == 3
    assert fetch("cifar10", root) == root / "cifar-10-batches-py"  # without another request


def test_the_command_fails_kindly(tmp_path, capsys, serve):
    with pytest.raises(SystemExit) as caught:
        datasets.main(["fetch", "mnist", "--data", str(tmp_path), "--mirror", serve({})])
    assert caught.value.code == 1
    assert "404" in capsys.readouterr().err
    with pytest.raises(ValueError, match="expected one of mnist"):
        fetch("imagenet", tmp_path)
