"""MNIST, FashionMNIST and CIFAR10 with the paper's splits, and its two functions of two variables.

Images are float32 in [0, 1] without normalisation. The folder is an argument or the environment variable
SMOOTHHESS_DATA. To fetch the files::

    python -m paper.datasets fetch mnist --data DIR
"""

import argparse
import gzip
import io
import os
import pickle
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paper.downloads import download

__all__ = [
    "ImageData",
    "Split",
    "cifar10",
    "fashion_mnist",
    "fetch",
    "four_quadrant",
    "mnist",
    "nested",
    "plane_grid",
    "read_idx",
]

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_GARMENTS = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
_OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

_IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


@dataclass(frozen=True)
class _Source:
    """Where a data set is published: mirrors, and (file, MD5) pairs."""

    folder: str
    mirrors: tuple[str, ...]
    files: tuple[tuple[str, str], ...]


_SOURCES = {
    "mnist": _Source(
        "MNIST/raw",
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
        (
            ("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            ("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
            ("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
            ("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
        ),
    ),
    "fashion-mnist": _Source(
        "FashionMNIST/raw",
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        (
            ("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            ("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
            ("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
            ("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
        ),
    ),
    "cifar10": _Source(
        "",
        ("https://www.cs.toronto.edu/~kriz/",),
        (("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),),
    ),
}


@dataclass(frozen=True)
class Split:
    """Inputs with their targets: class numbers, or values to regress on."""

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise ValueError(f"expected one target per input, got {len(self.targets)} for {len(self.inputs)}")

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: slice) -> "Split":
        return Split(self.inputs[index], self.targets[index])


@dataclass(frozen=True)
class ImageData:
    """A data set split as in the paper; `source` describes the origin of the pixels and how they were processed."""

    name: str
    train: Split
    val: Split
    test: Split
    classes: tuple[str, ...]
    source: str


def mnist(data: Path | str | None = None, *, n_val: int = 10_000) -> ImageData:
    """MNIST, images (N, 1, 28, 28); the last `n_val` training images are for validation.

    `data` holds the idx files, plain or .gz, in MNIST/raw as torchvision leaves them, in MNIST, or directly.
    """
    return _idx_data("mnist", "MNIST", _DIGITS, _data_folder(data), n_val)


def fashion_mnist(data: Path | str | None = None, *, n_val: int = 10_000) -> ImageData:
    """FashionMNIST, like `mnist`; its files have the same names, so keep them in a separate folder."""
    return _idx_data("fashion-mnist", "FashionMNIST", _GARMENTS, _data_folder(data), n_val)


def cifar10(data: Path | str | None = None, *, n_val: int = 10_000) -> ImageData:
    """CIFAR10, images (N, 3, 32, 32); the last `n_val` training images are for validation.

    Read from the official `cifar-10-batches-py` where `data` has it, else from `cifar10_jpeg.npz`. The latter
    contains lossy JPEG copies of the 60 000 images in a different order: pixels differ slightly from the
    originals, "the first 100 test images" are other images, and results differ accordingly.
    """
    folder = _data_folder(data)
    if (batches := folder / "cifar-10-batches-py").is_dir():
        parts = [_read_batch(batches / name, folder) for name in _BATCHES]
        train = Split(torch.cat([p.inputs for p in parts[:-1]]), torch.cat([p.targets for p in parts[:-1]]))
        return _split("CIFAR10", train, parts[-1], n_val, _OBJECTS, f"official python batches in {batches}")
    if (copies := folder / "cifar10_jpeg.npz").is_file():
        train, test = _read_jpegs(copies)
        source = f"lossy JPEG copies of the official images, in another order, in {copies}"
        return _split("CIFAR10", train, test, n_val, _OBJECTS, source)
    raise _missing("cifar10", "cifar-10-batches-py or cifar10_jpeg.npz", [folder], folder)


def plane_grid(step: float = 0.008) -> Tensor:
    """The points of [−2, 2]² at distance `step`, (N, 2).

    >>> plane_grid(2.0)[:4].tolist()
    [[-2.0, -2.0], [-2.0, 0.0], [-2.0, 2.0], [0.0, -2.0]]
    """
    axis = torch.linspace(-2, 2, round(4 / step) + 1)
    return torch.cartesian_prod(axis, axis)


def four_quadrant(points: Tensor) -> Tensor:
    """The Four Quadrant function K·x₁x₂, K = 5, 3, 12, −10 in quadrants 1 to 4.

    >>> four_quadrant(torch.tensor([[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]]))
    tensor([ 5., -3., 12., 10.])
    """
    x1, x2 = points.unbind(-1)
    factor = torch.where(x2 > 0, torch.where(x1 > 0, 5.0, 3.0), torch.where(x1 > 0, -10.0, 12.0))
    return factor * x1 * x2


def nested(points: Tensor) -> Tensor:
    """The Nested Interactions function: ½x₁² + x₁x₂ within radius 0.6, x₁x₂ up to 1.2, −5x₁x₂ beyond.

    >>> nested(torch.tensor([[0.2, 0.2], [0.6, 0.6], [2.0, 1.0]]))
    tensor([  0.0600,   0.3600, -10.0000])
    """
    x1, x2 = points.unbind(-1)
    radius, product = points.norm(dim=-1), x1 * x2
    return torch.where(radius <= 0.6, x1**2 / 2 + product, torch.where(radius <= 1.2, product, -5 * product))


def read_idx(path: Path) -> Tensor:
    """The uint8 array of an idx file, plain or gzipped."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path}: expected a complete gzip file, got a damaged one ({error}). Fetch it again."
        ) from error
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path}: expected an idx file of bytes (00 00 08 …), got {raw[:4].hex(' ') or 'nothing'}")
    n_dims = raw[3]
    shape = tuple(int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(n_dims))
    start, size = 4 + 4 * n_dims, int(np.prod(shape, dtype=np.int64))
    if len(raw) != start + size:
        raise ValueError(f"{path}: expected {start + size} bytes for shape {shape}, got {len(raw)}. Fetch it again.")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=start).reshape(shape)


def fetch(name: str, data: Path | str | None = None, *, mirror: str | None = None, show_progress: bool = True) -> Path:
    """Download "mnist", "fashion-mnist" or "cifar10" into `data`; returns the folder that holds the files.

    `mirror` is the address of a folder with the same files, where the usual servers cannot be reached.
    """
    if name not in _SOURCES:
        raise ValueError(f"expected one of {', '.join(_SOURCES)}, got {name!r}")
    source, root = _SOURCES[name], _data_folder(data, must_exist=False)
    if name == "cifar10" and (ready := root / "cifar-10-batches-py").is_dir():
        return ready
    for file, md5 in source.files:
        _download_from((mirror,) if mirror else source.mirrors, file, root / source.folder / file, md5, show_progress)
    return _unpack_cifar10(root) if name == "cifar10" else root / source.folder


def _download_from(mirrors: Sequence[str], file: str, path: Path, md5: str, show_progress: bool) -> None:
    for mirror in mirrors[:-1]:
        try:
            download(mirror.rstrip("/") + "/" + file, path, md5, show_progress=show_progress)
            return
        except ConnectionError:
            continue
    download(mirrors[-1].rstrip("/") + "/" + file, path, md5, show_progress=show_progress)


def _unpack_cifar10(root: Path) -> Path:
    """Unpack into a temporary folder and move it into place atomically."""
    archive, ready = root / "cifar-10-python.tar.gz", root / "cifar-10-batches-py"
    with tempfile.TemporaryDirectory(dir=root, prefix=".unpack-") as scratch:
        with tarfile.open(archive) as tar:
            tar.extractall(scratch, filter="data")
        shutil.move(Path(scratch) / ready.name, ready)
    archive.unlink()
    return ready


def _data_folder(data: Path | str | None, *, must_exist: bool = True) -> Path:
    folder = data or os.environ.get("SMOOTHHESS_DATA")
    if not folder:
        raise ValueError("expected a folder of data sets: pass data=… (--data DIR) or set SMOOTHHESS_DATA")
    if must_exist and not Path(folder).is_dir():
        raise FileNotFoundError(f"the data folder {folder} does not exist")
    return Path(folder)


def _missing(name: str, files: str, looked_in: Sequence[Path], folder: Path) -> FileNotFoundError:
    places = ", ".join(str(place) for place in looked_in)
    command = f"python -m paper.datasets fetch {name} --data {folder}"
    return FileNotFoundError(f"{name}: no {files} in {places}. Fetch it with: {command}")


def _split(name: str, train: Split, test: Split, n_val: int, classes: tuple[str, ...], source: str) -> ImageData:
    if not 0 < n_val < len(train):
        raise ValueError(f"{name}: n_val must lie between 0 and the {len(train)} training images, got {n_val}")
    for part in (train, test):
        if len(part) and not 0 <= int(part.targets.min()) <= int(part.targets.max()) < len(classes):
            raise ValueError(f"{name}: expected labels 0 to {len(classes) - 1}, got others. Fetch the data again.")
    return ImageData(name, train[:-n_val], train[-n_val:], test, classes, source)


def _idx_data(key: str, name: str, classes: tuple[str, ...], data: Path, n_val: int) -> ImageData:
    places = [data / name / "raw", data / name, data]
    tensors, used = [], data
    for stem in _IDX:
        paths = (place / (stem + ending) for place in places for ending in ("", ".gz"))
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            raise _missing(key, f"{stem} (plain or .gz)", places, data)
        values, used = read_idx(path), path.parent
        if values.dim() != int(stem[-7]):
            raise ValueError(f"{path}: expected {stem[-7]} dimensions, got shape {tuple(values.shape)}")
        tensors.append(values)
    halves = []
    for images, labels in (tensors[:2], tensors[2:]):
        if len(images) != len(labels):
            raise ValueError(f"{used}: expected one label per image, got {len(labels)} for {len(images)}")
        halves.append(Split(images[:, None].float() / 255, labels.long()))
    return _split(name, halves[0], halves[1], n_val, classes, f"idx files in {used}")


class _ArrayUnpickler(pickle.Unpickler):
    """Reads a pickle made of containers and numpy arrays.

    The official batches are pickles, and unpickling a file may run any code. So every name but the three that
    rebuild an array raises an error.
    """

    _ALLOWED = {  # noqa: RUF012
        ("multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray"):
            found = self._ALLOWED.get((module.split(".")[-1], name))
            if found is not None:
                return found
        raise pickle.UnpicklingError(f"the name {module}.{name} is not allowed")


def _read_batch(path: Path, folder: Path) -> Split:
    if not path.is_file():
        raise _missing("cifar10", path.name, [path.parent], folder)
    try:
        with path.open("rb") as stream:
            batch = _ArrayUnpickler(stream, encoding="bytes").load()
        pixels, labels = (batch.get(key.encode(), batch.get(key)) for key in ("data", "labels"))
        pixels, labels = torch.from_numpy(np.asarray(pixels)), torch.tensor(labels)
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(
            f"{path}: expected an official CIFAR10 batch, got a damaged or foreign file ({error})"
        ) from error
    if pixels.dtype != torch.uint8 or pixels.shape != (len(labels), 3072):
        raise ValueError(
            f"{path}: expected uint8 data of {(len(labels), 3072)}, got {pixels.dtype} {tuple(pixels.shape)}"
        )
    return Split(pixels.reshape(-1, 3, 32, 32).float() / 255, labels.long())


def _read_jpegs(path: Path) -> tuple[Split, Split]:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(f"{path} contains JPEG images, which need pillow: pip install pillow") from error
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {key: stored[key] for key in stored.files}
        halves = []
        for part in ("train", "test"):
            stream, offsets, labels = (arrays[f"{part}_{key}"] for key in ("jpeg", "offsets", "labels"))
            if len(offsets) != len(labels) + 1 or offsets[-1] != len(stream):
                raise ValueError(f"expected {len(labels) + 1} {part} offsets up to {len(stream)}, got others")
            images = torch.empty(len(labels), 3, 32, 32)
            for i, (start, end) in enumerate(pairwise(offsets)):
                pixels = np.asarray(Image.open(io.BytesIO(stream[start:end].tobytes())).convert("RGB"))
                images[i] = torch.from_numpy(pixels.transpose(2, 0, 1) / np.float32(255))
            halves.append(Split(images, torch.from_numpy(labels.astype(np.int64))))
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: expected JPEG copies of CIFAR10, got a damaged or foreign file ({error})") from error
    return halves[0], halves[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command `python -m paper.datasets fetch NAME --data DIR`."""
    parser = argparse.ArgumentParser(prog="python -m paper.datasets", description=main.__doc__)
    commands = parser.add_subparsers(required=True)
    fetching = commands.add_parser("fetch", help="download a data set")
    fetching.add_argument("name", choices=sorted(_SOURCES))
    fetching.add_argument("--data", type=Path, help="folder to keep it in (default: SMOOTHHESS_DATA)")
    fetching.add_argument("--mirror", help="address of a folder with the same files")
    options = parser.parse_args(arguments)
    try:
        print(fetch(options.name, options.data, mirror=options.mirror))
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
