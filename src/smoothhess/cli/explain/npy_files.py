"""Reads arrays from .npy files, which hold one example or a batch of examples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from smoothhess.model.bounded_files import read_array


def read(path: Path) -> Tensor:
    """Read a .npy file as float64.

    Raises:
        ValueError: If the file is damaged, pickled or too large, or holds anything but finite real numbers.
    """
    array = read_array(path)
    if array.size == 0 or array.ndim == 0:
        raise ValueError(f"{path} has shape {array.shape}: expected at least one number in at least one dimension.")
    values = torch.from_numpy(np.array(array, dtype=np.float64))
    if not torch.isfinite(values).all():
        place = tuple(torch.nonzero(~torch.isfinite(values))[0].tolist())
        raise ValueError(f"{path} holds NaN or infinity, first at {place}. Fill or drop those values.")
    return values


def readings(values: Tensor, shape: tuple[int | None, ...] | None, batched: bool | None) -> list[tuple[Tensor, str]]:
    """Return the interpretations of an array as a batch, in the order in which they are tried, with descriptions."""
    one, many = (values[None], "one example"), (values, f"{len(values)} examples")
    channel = (values[None, None], "one example of one channel")
    channels = (values[:, None], f"{len(values)} examples of one channel each")
    if batched is not None:
        found = [many, channels] if batched else [one, channel]
    elif shape is not None and values.ndim == len(shape) + 1:
        found = [many]
    else:
        found = [one, many, channel, channels]
    return [(batch, words) for batch, words in found if batch.ndim >= 2]
