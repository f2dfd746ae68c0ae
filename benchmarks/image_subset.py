"""The first validation and test images of CIFAR10 with their super-pixels, for benchmarks on images.

    python benchmarks/image_subset.py --data DIR --out data/image_subset.npz

DIR holds CIFAR10. The file has about 1 MB and is read with NumPy only: a machine without pillow and scikit-image needs
it in its --data folder instead of CIFAR10. Pixels, labels and super-pixels are those that are found without the file.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paper.datasets import ImageData, cifar10
from smoothhess import segments
from smoothhess.model.atomic_write import atomic_write
from smoothhess.result.segments import Segments

FILE = "image_subset.npz"
SUPERPIXELS = 16
PARTS = ("val", "test")


@dataclass(frozen=True, eq=False)
class Images:
    """Images of one part of the data, their labels, and their super-pixels where these were stored."""

    inputs: Tensor  # (N, C, H, W), 0 … 1
    targets: Tensor  # (N,)
    masks: Tensor | None = None  # (N, H, W) ids of super-pixels

    def __len__(self) -> int:
        return len(self.inputs)

    def superpixels(self, i: int) -> Segments:
        if self.masks is None:
            return segments.slic(self.inputs[i], SUPERPIXELS)
        return segments.from_mask(self.masks[i], self.inputs[i].shape)


@dataclass(frozen=True, eq=False)
class Subset:
    """The images that benchmarks explain, and the mean colour of all training images."""

    val: Images
    test: Images
    colour: Tensor  # (C,)

    @property
    def baseline(self) -> Tensor:
        """An image of the mean colour, (C, H, W)."""
        return self.colour[:, None, None].expand_as(self.test.inputs[0]).contiguous()


@lru_cache(maxsize=1)
def full(folder: Path) -> ImageData:
    """CIFAR10, which takes half a minute to decode from JPEG copies."""
    return cifar10(folder)


def load(folder: Path, val: int, test: int) -> Subset:
    """The first images of both parts, from the small file if the folder has it, else from CIFAR10."""
    path = folder / FILE
    if not path.is_file():
        data = full(folder)
        first, second = (Images(s.inputs[:n], s.targets[:n]) for s, n in ((data.val, val), (data.test, test)))
        return Subset(first, second, data.train.inputs.mean((0, 2, 3)))
    with np.load(path, allow_pickle=False) as stored:
        arrays = {key: torch.from_numpy(stored[key]) for key in stored.files}
    for part, count in zip(PARTS, (val, test), strict=True):
        if len(arrays[f"{part}_pixels"]) < count:
            raise ValueError(
                f"expected at least {count} {part} images in {path}, got {len(arrays[f'{part}_pixels'])}. Write it "
                f"again with --{part} {count}."
            )
    first, second = (
        Images(
            arrays[f"{part}_pixels"][:count].float() / 255,
            arrays[f"{part}_labels"][:count].long(),
            arrays[f"{part}_superpixels"][:count].long(),
        )
        for part, count in zip(PARTS, (val, test), strict=True)
    )
    return Subset(first, second, arrays["colour"])


def write(subset: Subset, path: Path) -> None:
    """Write pixels as bytes and super-pixels as 16-bit integers."""
    arrays = {"colour": subset.colour.numpy()}
    for part, images in zip(PARTS, (subset.val, subset.test), strict=True):
        masks = [images.superpixels(i).mask[0].to(torch.int16) for i in range(len(images))]
        arrays[f"{part}_pixels"] = (images.inputs * 255).round().to(torch.uint8).numpy()
        arrays[f"{part}_labels"] = images.targets.to(torch.uint8).numpy()
        arrays[f"{part}_superpixels"] = torch.stack(masks).numpy()
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        np.savez_compressed(temporary, **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of CIFAR10")
    parser.add_argument("--out", type=Path, required=True, help=f"the file to write, such as data/{FILE}")
    parser.add_argument("--val", type=int, default=64, help="validation images")
    parser.add_argument("--test", type=int, default=300, help="test images")
    options = parser.parse_args()
    write(load(options.data, options.val, options.test), options.out)
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
