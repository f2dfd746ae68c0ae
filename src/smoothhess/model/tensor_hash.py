"""Hashes of tensors: of one tensor, of all weights of a model, and checksums of the contents of tensor files.

Every entry is hashed, in chunks, so that a large tensor on a GPU is not copied at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from smoothhess.model.json_checksum import text_digest

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


def with_checksums(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """The metadata of a file with a checksum of each tensor, and one of the metadata."""
    each = {name: _labelled(name, tensor) for name, tensor in tensors.items()}
    complete = {**metadata, "checksums": json.dumps(each)}
    return complete | {"checksum": _metadata_digest(complete)}


def checksums_of(metadata: Mapping[str, str]) -> dict[str, str] | None:
    """The checksums of the tensors of a file; None for files that were written without them.

    Raises:
        ValueError: the metadata has changed since they were written.
    """
    if "checksums" not in metadata and "checksum" not in metadata:
        return None
    rest = {name: text for name, text in metadata.items() if name != "checksum"}
    if metadata.get("checksum") != _metadata_digest(rest):
        raise ValueError("the checksum of its metadata does not match")
    return json.loads(metadata["checksums"])


def check_tensor(name: str, tensor: Tensor, checksums: Mapping[str, str] | None) -> Tensor:
    """Return the tensor; raises ValueError if its checksum does not match.

    >>> check_tensor("a", torch.zeros(2), {"a": "0"})
    Traceback (most recent call last):
    ValueError: the checksum of 'a' does not match
    """
    if checksums is not None and checksums.get(name) != _labelled(name, tensor):
        raise ValueError(f"the checksum of {name!r} does not match")
    return tensor


def _labelled(name: str, tensor: Tensor) -> str:
    """A hash of a tensor with its name, dtype and shape, so that exchanged tensors are seen."""
    return text_digest(f"{name} {tensor.dtype} {tuple(tensor.shape)} {digest(tensor)}")


def _metadata_digest(metadata: Mapping[str, str]) -> str:
    return text_digest(json.dumps(sorted(metadata.items())))


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    flat = tensor.detach().reshape(-1)
    for part in flat.split(CHUNK):
        # a single entry may have stride 0, also after `contiguous`
        yield part.cpu().contiguous().as_strided(part.shape, (1,)).view(torch.uint8).numpy().data
