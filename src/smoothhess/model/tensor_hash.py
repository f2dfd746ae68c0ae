"""Hashes of tensors: of one tensor, of all weights of a model, and of the contents of a file.

Every entry is hashed, in chunks, so that a large tensor on a GPU is not copied at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

CHUNK = 1 << 22  # entries that are copied to the CPU at a time


def digest(tensor: Tensor) -> str:
    """A 64-bit hash of the entries of a tensor on any device.

    >>> digest(torch.zeros(2)) == digest(torch.zeros(2)), digest(torch.zeros(2)) == digest(torch.ones(2))
    (True, False)
    """
    found = hashlib.blake2b(digest_size=8)
    for chunk in _chunks(tensor):
        found.update(chunk)
    return found.hexdigest()


def weights_digest(modules: list[nn.Module]) -> str:
    """A 64-bit hash of all parameters and buffers, with their names, shapes and dtypes."""
    found = hashlib.blake2b(digest_size=8)
    for module in modules:
        state = module.state_dict()
        state |= {name: b for name, b in module.named_buffers() if name not in state}  # those that are not saved
        for name, weight in state.items():
            if isinstance(weight, Tensor):
                found.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
                for chunk in _chunks(weight):
                    found.update(chunk)
    return found.hexdigest()


def labelled_digest(name: str, tensor: Tensor) -> str:
    """A 64-bit hash of a tensor with its name, dtype and shape: exchanged tensors have other hashes.

    >>> labelled_digest("a", torch.zeros(2)) == labelled_digest("b", torch.zeros(2))
    False
    """
    return text_digest(f"{name} {tensor.dtype} {tuple(tensor.shape)} {digest(tensor)}")


def text_digest(text: str) -> str:
    """A 64-bit hash of a text."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def metadata_digest(metadata: Mapping[str, str]) -> str:
    """A 64-bit hash of the metadata of a file, which may contain the hashes of its tensors."""
    return text_digest(json.dumps(sorted(metadata.items())))


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    flat = tensor.detach().reshape(-1)
    for part in flat.split(CHUNK):
        yield part.cpu().contiguous().view(torch.uint8).numpy().data
