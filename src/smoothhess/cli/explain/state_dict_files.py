"""Loads weights into a network from .safetensors, .pth or .pt files without running code from the file."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smoothhess.model.bounded_files import check_unpacked_size
from smoothhess.model.weight_files import fill_network, read_weights

NESTED = ("state_dict", "model_state_dict", "model")  # keys of the weights in training checkpoints
PICKLED = (
    "a pickled model. Opening it can run any code, so it is not opened. If you trust it, load it in Python, call "
    "torch.export.save(torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},)), 'model.pt2'), "
    "where x holds two examples, and pass --model model.pt2; or save model.state_dict() and pass --model "
    "pkg.module:factory --weights file. Open only exports and code that you trust: an export can run code as well"
)


def fill(network: nn.Module, path: Path) -> None:
    """Load the weights of a .safetensors, .pth or .pt file into a network.

    Raises:
        ValueError: If the names or shapes differ from those of the network, or the file holds more than weights.
    """
    stored, expected = read(path), network.state_dict()
    if stored and all(name.startswith("module.") for name in stored) and not stored.keys() & expected.keys():
        stored = {name.removeprefix("module."): value for name, value in stored.items()}  # saved from DataParallel
    fill_network(network, stored, str(path))


def read(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file by name."""
    if path.suffix == ".safetensors":
        return read_weights(path)[0]
    state = open_plainly(path)
    for key in NESTED:
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
            break
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(
            f"{path}: expected a state dict of tensors, got {type(state).__name__}. Save model.state_dict()."
        )
    return {str(name): value for name, value in state.items()}


def open_plainly(path: Path) -> Any:
    """Load a .pth or .pt file of plain data; raise ValueError with the reason for a pickled model."""
    check_unpacked_size(path, path.stat().st_size, str(path))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the errors below report the cause
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path}: {PICKLED}.") from error
    except Exception as error:  # torch raises many kinds for damaged files
        if "TorchScript" in str(error):
            reason = "is a TorchScript archive, which holds code. Export the model with torch.export"
            raise ValueError(f"{path} {reason}.") from error
        raise ValueError(f"{path} is not a file of weights, or it is truncated. Download or save it again.") from error
