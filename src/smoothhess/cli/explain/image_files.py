"""Pictures as tensors of numbers between 0 and 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")


def read(path: Path, size: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
    """A picture as grey (1, H, W) and as red, green and blue (3, H, W), its own kind first.

    What is transparent is laid on white, but for 16-bit pictures. `size` (height, width) resizes it.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise ImportError("pictures need pillow: pip install pillow") from error
    try:
        with Image.open(path) as opened:
            kind = opened.format
            picture = ImageOps.exif_transpose(opened) or opened
            picture.load()
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"{path} is not a picture that pillow can read, or it is cut short.") from error
    if picture.mode == "F" or (picture.mode == "I" and kind not in ("PNG", "PPM")):  # those two hold 16 bits in it
        raise ValueError(
            f"{path} holds {'floating-point' if picture.mode == 'F' else '32-bit'} numbers, whose range is not known: "
            "wanted 8 or 16 bits for each pixel. Save it so, or write the numbers that the model takes with numpy.save."
        )
    deep = picture.mode.startswith("I")  # 16 bits
    if not deep and ("transparency" in picture.info or picture.mode in ("RGBA", "LA", "PA")):
        clear = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear).convert(
            "L" if picture.mode in ("1", "L", "LA") else "RGB"
        )
    if picture.mode in ("1", "P"):  # which have no colours in between, so that resizing would only pick some pixels
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


def parse_size(words: str | None) -> tuple[int, int] | None:
    """(height, width) of "224" or "224x320".

    >>> parse_size("224"), parse_size("20x30")
    ((224, 224), (20, 30))
    """
    if words is None:
        return None
    parts: list[Any] = words.lower().replace("×", "x").split("x")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or min(numbers) < 1:
        raise ValueError(f"--size wants 224 or 224x320 (height x width) pixels, got {words!r}.")
    return (numbers[0], numbers[-1])
