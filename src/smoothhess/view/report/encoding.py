"""Numbers and pictures as text that a page can carry: base64, run lengths, PNG."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def float32(numbers: Array) -> str:
    """Base64 of little-endian float32; inf and NaN stay what they are.

    >>> float32(np.array([1.0, -2.0]))
    'AACAPwAAAMA='
    """
    return base64.b64encode(np.ascontiguousarray(numbers, dtype="<f4").tobytes()).decode()


def packed(matrix: Array) -> str:
    """The upper triangle of a symmetric (d, d) matrix with its diagonal, row by row, as `float32`."""
    return float32(matrix[np.triu_indices(len(matrix))])


def runs(labels: Array) -> str:
    """Base64 of little-endian uint32: length and id of each run of equal ids, read row by row.

    >>> list(np.frombuffer(base64.b64decode(runs(np.array([[7, 7], [7, 2]]))), "<u4"))
    [3, 7, 1, 2]
    """
    flat = labels.reshape(-1)
    starts = np.concatenate([[0], np.flatnonzero(flat[1:] != flat[:-1]) + 1])
    lengths = np.diff(np.append(starts, len(flat)))
    return base64.b64encode(np.stack([lengths, flat[starts]], 1).astype("<u4").tobytes()).decode()


def png(pixels: Array) -> str:
    """A data URI of (H, W) or (H, W, 3) bytes."""
    height, width = pixels.shape[:2]
    rows = pixels.reshape(height, -1).astype(np.uint8)
    # Each byte less the one above it ("up"): photos get smaller by about a third.
    above = np.vstack([np.zeros_like(rows[:1]), rows[:-1]])
    filtered = np.hstack([np.full((height, 1), 2, np.uint8), rows - above])
    colour = 0 if pixels.ndim == 2 else 2
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(filtered.tobytes(), 9)), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()
