"""Reads texts for `TokenSmoothHess`: token ids from .npy files, and the tokens as strings.

Everything that does not depend on the model is validated here, before the model is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from smoothhess.model.bounded_files import read_array, read_text

MOST_TOKENS = 512  # tokens that fit on a page


@dataclass(frozen=True, eq=False)
class Text:
    """One text of a file of token ids."""

    name: str  # stem of its output files
    title: str
    ids: Tensor  # (T,) int64
    tokens: tuple[str, ...] | None  # T strings


def read(paths: Sequence[Path], names: Sequence[Path]) -> list[Text]:
    """Read the texts of all files of --tokens, with the names of their tokens.

    Args:
        paths: .npy files of integers, (T,) for one text or (B, T) for B texts of the same length.
        names: Files with the tokens of each file as strings, one per line or a json list; empty without names.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a file has other contents, or the number of names differs from the number of ids.
    """
    if names and len(names) != len(paths):
        raise ValueError(f"--names must be one file for each file of --tokens, {len(paths)}, got {len(names)}.")
    found = []
    for path, name_file in zip(paths, names or [None] * len(paths), strict=True):
        path = path.expanduser()
        ids = _ids(path)
        strings = None if name_file is None else _names(name_file.expanduser(), ids)
        for i, row in enumerate(ids):
            several = len(ids) > 1
            tokens = None if strings is None else strings[i * len(row) : (i + 1) * len(row)]
            name, title = (f"{path.stem}-{i}", f"{path.name}, text {i}") if several else (path.stem, path.name)
            found.append(Text(name, title, row, None if tokens is None else tuple(tokens)))
    return found


def _ids(path: Path) -> Tensor:
    """Return the ids of a file as (B, T)."""
    if not path.is_file():
        raise FileNotFoundError(f"--tokens {path} {'is a folder' if path.is_dir() else 'does not exist'}.")
    if path.suffix.lower() != ".npy":
        raise ValueError(f"--tokens {path}: expected a .npy file of token ids, written by numpy.save.")
    array = read_array(path)
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or not array.size:
        raise ValueError(
            f"--tokens {path}: expected integers, (tokens,) or (texts, tokens), got {array.dtype} of shape "
            f"{array.shape}. Save the ids of the tokenizer: numpy.save(path, ids)."
        )
    if not 2 <= array.shape[-1] <= MOST_TOKENS:
        advice = "Shorten the text, or group its tokens in Python: TokenSmoothHess(…).attribute(…, feature_mask=…)."
        if array.shape[-1] < 2:
            advice = "A single token has no partner to act together with: pass a longer text."
        raise ValueError(
            f"--tokens {path}: a page shows texts of 2 to {MOST_TOKENS} tokens, got {array.shape[-1]}. {advice}"
        )
    ids = torch.from_numpy(np.atleast_2d(array).astype(np.int64))
    if int(ids.min()) < 0:
        raise ValueError(f"--tokens {path}: token ids must not be negative, got {int(ids.min())}.")
    return ids


def _names(path: Path, ids: Tensor) -> list[str]:
    """Return one string for each id, in the order of the texts; spaces at both ends belong to a token."""
    if not path.is_file():
        raise FileNotFoundError(f"--names {path} {'is a folder' if path.is_dir() else 'does not exist'}.")
    content = read_text(path)
    if path.suffix.lower() == ".json":
        try:
            found = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"--names {path} is not a json file.") from error
        rows = found if isinstance(found, list) and all(isinstance(row, list) for row in found) else [found]
        if not all(isinstance(row, list) and all(isinstance(name, str) for name in row) for row in rows):
            raise ValueError(f"--names {path}: expected a list of strings, or one list of strings for each text.")
        names = [name for row in rows for name in row]
    else:
        names = [line.removesuffix("\r") for line in content.removesuffix("\n").split("\n")]
    if len(names) != ids.numel():
        texts = "" if len(ids) == 1 else f" ({len(ids)} texts of {ids.shape[1]})"
        raise ValueError(f"--names {path}: expected {ids.numel()} names, one per token{texts}, got {len(names)}.")
    return names
