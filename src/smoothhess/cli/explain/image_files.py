"""Reads image files as tensors with values between 0 and 1."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from smoothhess.linalg.memory import IMAGE_PIXELS
from smoothhess.model.bounded_files import read_image


def read(path: Path, size: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
    """Read an image as RGB (3, H, W) and as greyscale (1, H, W).

    Transparent pixels are blended with white, except in 16-bit images.

    Args:
        path: The image file.
        size: (height, width) to resize to; None keeps the size.

    Returns:
        Two tensors: first the image in its own colour mode, then in the other one.

    Raises:
        ImportError: If pillow is not installed.
        ValueError: If the file is not a readable image of 8 or 16 bits per channel, or has too many pixels.
    """
    picture, kind = read_image(path)
    from PIL import Image

    # PNG stores 16 bits in mode I, other formats 32
    if picture.mode == "F" or (picture.mode == "I" and kind != "PNG"):
        raise ValueError(
            f"{path} holds {'floating-point' if picture.mode == 'F' else '32-bit'} numbers, whose range is unknown: "
            "expected 8 or 16 bits per channel. Convert the image, or write the model's input with numpy.save."
        )
    deep = picture.mode.startswith("I")  # 16 bits
    if not deep and ("transparency" in picture.info or picture.mode in ("RGBA", "LA", "PA")):
        clear = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear).convert(
            "L" if picture.mode in ("1", "L", "LA") else "RGB"
        )
    if picture.mode in ("1", "P"):  # these modes have no intermediate colours, so resizing would only subsample
        picture = picture.convert("L" if picture.mode == "1" else "RGB")
    if deep:
        values = np.asarray(picture, dtype=np.float32) / 65535
        grey = Image.fromarray(values)  # mode F
    else:
        grey = picture.convert("L")
    if size is not None:
        grey, picture = (image.resize((size[1], size[0]), Image.Resampling.BICUBIC) for image in (grey, picture))
    grey_values = torch.from_numpy(np.array(grey, dtype=np.float32))[None]
    grey_values = grey_values.clamp(0, 1) if deep else grey_values / 255
    if deep or picture.mode == "L":
        return grey_values, grey_values.expand(3, -1, -1).contiguous()
    colours = torch.from_numpy(np.array(picture.convert("RGB"), dtype=np.float32)).permute(2, 0, 1) / 255
    return colours.contiguous(), grey_values


def check_size(size: tuple[int, int]) -> tuple[int, int]:
    """Return the (height, width) of --size; raise if these are too many pixels."""
    if size[0] * size[1] > IMAGE_PIXELS:
        raise ValueError(f"--size {size[0]}x{size[1]}: the limit is {IMAGE_PIXELS} pixels. Pass a smaller size.")
    return size
