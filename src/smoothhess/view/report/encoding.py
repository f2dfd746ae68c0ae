"""Encodes arrays and images as text for an HTML page: base64, run lengths, PNG."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def float32(numbers: Array) -> str:
    """Encode numbers as base64 of little-endian float32; inf and NaN are preserved.

    >>> float32(np.array([1.0, -2.0]))
    'AACAPwAAAMA='
    """
    return base64.b64encode(np.ascontiguousarray(numbers, dtype="<f4").tobytes()).decode()


def packed(matrix: Array) -> str:
    """Encode the upper triangle of a symmetric (d, d) matrix with its diagonal, row by row, by `float32`."""
    return float32(matrix[np.triu_indices(len(matrix))])


def runs(labels: Array) -> str:
    """Encode ids as base64 of little-endian uint32: length and id of each run of equal ids, in row-major order.

    >>> list(np.frombuffer(base64.b64decode(runs(np.array([[7, 7], [7, 2]]))), "<u4"))
    [3, 7, 1, 2]
    """
    flat = labels.reshape(-1)
    starts = np.concatenate([[0], np.flatnonzero(flat[1:] != flat[:-1]) + 1])
    lengths = np.diff(np.append(starts, len(flat)))
    return base64.b64encode(np.stack([lengths, flat[starts]], 1).astype("<u4").tobytes()).decode()


def png(pixels: Array) -> str:
    """Encode (H, W) or (H, W, 3) bytes as the data URI of a PNG."""
    height, width = pixels.shape[:2]
    rows = pixels.reshape(height, -1).astype(np.uint8)
    # PNG filter "up", the difference from the byte above: reduces photos by about a third.
    above = np.vstack([np.zeros_like(rows[:1]), rows[:-1]])
    filtered = np.hstack([np.full((height, 1), 2, np.uint8), rows - above])
    colour = 0 if pixels.ndim == 2 else 2
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(filtered.tobytes(), 9)), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()
