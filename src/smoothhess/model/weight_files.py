"""Read and write files of weights: safetensors, and .pth files of other projects (read only)."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from smoothhess.model.atomic_write import atomic_write
from smoothhess.model.bounded_files import check_unpacked_size

__all__ = ["fill_network", "load_weights", "read_weights", "save_tensors", "save_weights"]


def save_tensors(tensors: Mapping[str, Tensor], path: Path | str, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file atomically."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, temporary, dict(metadata))


def save_weights(network: nn.Module, path: Path | str, **metadata: str) -> None:
    """Write a network's parameters and buffers as safetensors.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_weights(nn.Linear(2, 1), Path(folder) / "line.safetensors", made_by="a doctest")
    ...     load_weights(nn.Linear(2, 1), Path(folder) / "line.safetensors")
    {'made_by': 'a doctest'}
    """
    save_tensors(network.state_dict(), path, metadata)


def read_weights(path: Path | str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by name and metadata of a .safetensors, .pth or .pt file; no code in the file is executed."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}: expected a .safetensors, .pth or .pt file")
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt", device="cpu") as stored:
                return {key: stored.get_tensor(key) for key in stored.keys()}, dict(stored.metadata() or {})  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is not a complete safetensors file ({error}); replace it") from error
    check_unpacked_size(path, path.stat().st_size, str(path))
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for damaged files
        raise ValueError(f"{path} is not a complete file of plain weights ({error}); replace it") from error
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(
            f"{path}: expected a state dict of tensors, got {type(state).__name__}; save network.state_dict()"
        )
    return dict(state), {}


def load_weights(network: nn.Module, *paths: Path | str) -> dict[str, str]:
    """Load the weights of a network from one file or several shards; returns the metadata.

    Names and shapes must match exactly. Weights are cast to the dtypes of the network, so float16 files can be used.
    """
    stored: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for path in paths:
        shard, notes = read_weights(path)
        if twice := sorted(stored.keys() & shard.keys()):
            raise ValueError(f"{path} repeats {_listed(twice)} of the other shards; pass each file once")
        stored |= shard
        metadata |= notes

    fill_network(network, stored, ", ".join(str(path) for path in paths))
    return metadata


def fill_network(network: nn.Module, stored: Mapping[str, Tensor], source: str) -> None:
    """Load tensors by name into a network, cast to its dtypes.

    Raises:
        ValueError: If names or shapes differ from those of the network; `source` is named in the message.
    """
    expected = network.state_dict()
    shapes = [
        f"{key} {tuple(expected[key].shape)} (file: {tuple(stored[key].shape)})"
        for key in expected
        if key in stored and expected[key].shape != stored[key].shape
    ]
    faults = [
        ("lacks", sorted(expected.keys() - stored.keys())),
        ("has unknown", sorted(stored.keys() - expected.keys())),
        ("has other shapes for", shapes),
    ]
    if mismatch := "; ".join(f"{verb} {_listed(names)}" for verb, names in faults if names):
        raise ValueError(
            f"{source} does not fit {type(network).__name__}: it {mismatch}. Pass the weights of this network."
        )
    network.load_state_dict({key: value.to(expected[key].dtype) for key, value in stored.items()})


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
