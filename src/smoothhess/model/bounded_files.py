"""Read image, array and text files of users within stated limits: sizes are checked before memory is allocated.

Readers raise one kind of error, a ValueError that names the file and what was expected. The limits are defined in
`smoothhess.linalg.memory`; what the content means is decided by the callers.
"""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from smoothhess.linalg.memory import ARCHIVE_EXTRA_BYTES, ARRAY_BYTES, IMAGE_PIXELS, TEXT_BYTES

__all__ = ["check_unpacked_size", "describe_bytes", "read_array", "read_image", "read_text"]

# Other formats of pillow are not opened: some of them start external programs, such as Ghostscript for PostScript.
IMAGE_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP")


def read_image(path: Path) -> tuple[Any, str]:
    """Read an image, rotated as its metadata require.

    Returns:
        The pillow image, and the name of its file format.

    Raises:
        ImportError: If pillow is not installed.
        ValueError: If the file is no readable image of IMAGE_FORMATS, or has more than IMAGE_PIXELS pixels.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ImportError("reading images requires pillow: pip install pillow") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the size, which is checked here, and about damaged metadata
            with Image.open(path, formats=IMAGE_FORMATS) as opened:
                kind, (width, height) = str(opened.format), opened.size
                if width * height <= IMAGE_PIXELS:
                    picture = ImageOps.exif_transpose(opened) or opened
                    picture.load()
                    return picture, kind
    except Image.DecompressionBombError as error:
        raise ValueError(_too_many_pixels(path, "far more")) from error
    except Exception as error:  # pillow raises many kinds for damaged files
        raise ValueError(
            f"{path} is not an image that pillow can read as {', '.join(IMAGE_FORMATS)}, or it is truncated."
        ) from error
    raise ValueError(_too_many_pixels(path, f"{height} × {width}"))


def _too_many_pixels(path: Path, got: str) -> str:
    return f"{path}: the limit for an image is {IMAGE_PIXELS} pixels, got {got}. Resize the image first."


def read_array(path: Path) -> np.ndarray:
    """Map the numbers of a .npy file; nothing is read into memory before they are used.

    Raises:
        ValueError: If the file is damaged or pickled, holds no real numbers, or more than ARRAY_BYTES as float64.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:
        pickled = "pickle" in str(error) or "Python objects" in str(error)
        reason = "holds pickled Python objects, which are not loaded" if pickled else "is damaged or truncated"
        raise ValueError(f"{path} {reason}: expected an array of numbers. Write it with numpy.save.") from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise ValueError(f"{path} holds several arrays: expected one array per .npy file.")
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{path} holds {array.dtype}: expected real numbers.")
    if array.size * 8 > ARRAY_BYTES:
        raise ValueError(
            f"{path}: the limit for an array is {describe_bytes(ARRAY_BYTES)} as float64, got "
            f"{describe_bytes(array.size * 8)} for shape {array.shape}. Split it into several files."
        )
    return array


def read_text(path: Path, limit: int = TEXT_BYTES) -> str:
    """Read a text file in UTF-8.

    Raises:
        ValueError: If the file has more than `limit` bytes, or is not UTF-8.
    """
    if (size := path.stat().st_size) > limit:
        raise ValueError(
            f"{path}: the limit for this file is {describe_bytes(limit)}, got {describe_bytes(size)}. Shorten or "
            "split it."
        )
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 (byte {error.start}). Save it as UTF-8.") from error


def check_unpacked_size(file: Path | IO[bytes], n_bytes: int, name: str) -> None:
    """Raise if the members of a zip archive are much larger than the archive; torch writes them uncompressed.

    Args:
        file: The archive. Other files pass: their readers report what they are.
        n_bytes: Size of the archive.
        name: Name of the archive in the error.

    Raises:
        ValueError: If the members have more than n_bytes + ARCHIVE_EXTRA_BYTES bytes.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
    except Exception:
        return
    if unpacked > n_bytes + ARCHIVE_EXTRA_BYTES:
        raise ValueError(
            f"{name} unpacks to {describe_bytes(unpacked)} from {describe_bytes(n_bytes)}: the limit is its own size "
            f"and {describe_bytes(ARCHIVE_EXTRA_BYTES)} more. Save it with torch, which does not compress."
        )


def describe_bytes(n: int) -> str:
    """A number of bytes in words.

    >>> describe_bytes(2048), describe_bytes(3 << 30)
    ('2 KiB', '3 GiB')
    """
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= size:
            return f"{n / size:.4g} {unit}"
    return f"{n} bytes"
