"""Settings of a job as JSON values, with hashes of weights and inputs.

They are compared when a job is resumed, and between the processes of a distributed job.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from smoothhess.draws.gaussian import Gaussian
from smoothhess.model.state import modules_behind
from smoothhess.model.targets import Continuation, Contrast
from smoothhess.model.tensor_hash import digest, weights_digest

LABELS = ("names", "classes", "unit")  # text of the result, which may be missing
SILENT = ("internal_batch_size", "compile", "show_progress")  # options that do not change the result


def described(value: Any) -> Any:
    """Convert a value to JSON; tensors become dtype, shape and hash, functions their name.

    >>> described((1, None, len, torch.zeros(2)))
    [1, None, 'function len', 'float32 [2] ca08ea5bca49cc18']
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Tensor | np.ndarray) and value.ndim == 0:
        return described(value.item())
    if isinstance(value, np.ndarray):
        return described(torch.from_numpy(value))
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} {digest(value)}"
    if hasattr(value, "__index__"):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value)
    if isinstance(value, Gaussian):
        return {type(value).__name__: {name: described(v) for name, v in value.state().items()}}
    if isinstance(value, Contrast | Continuation):
        return {type(value).__name__: {f.name: described(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, dict):
        return {str(name): described(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [described(v) for v in value]
    if isinstance(value, nn.Module):
        return fingerprint(value)
    return f"{'function' if callable(value) else type(value).__name__} {getattr(value, '__name__', '')}".strip()


def record_digests(inputs: Tensor) -> list[int]:
    """One 63-bit hash for each record of a batch, to check that a record is unchanged."""
    rows = inputs.detach().cpu().contiguous().reshape(len(inputs), -1).view(torch.uint8).numpy()
    found = (hashlib.blake2b(row, digest_size=8).digest() for row in rows)
    return [int.from_bytes(h, "little") >> 1 for h in found]


def fingerprint(forward_func: Callable[..., Any]) -> str:
    """The class name of a model and a hash of all weights that can be found in a callable.

    >>> net = nn.Linear(2, 1)
    >>> fingerprint(net) == fingerprint(net), fingerprint(net) == fingerprint(nn.Linear(2, 1))
    (True, False)
    """
    modules = modules_behind(forward_func)
    name = getattr(forward_func, "__name__", type(forward_func).__name__)
    if not modules:
        return f"function {name}"
    through = "" if isinstance(forward_func, nn.Module) else f"{name} of "
    return f"{through}{' + '.join(type(m).__name__ for m in modules)} {weights_digest(modules)}"


def differences(made_with: dict[str, Any], given: dict[str, Any]) -> list[str]:
    """List the settings that differ, with both values."""
    plain = json.loads(json.dumps(given))
    unknown = {name for name in LABELS if None in (made_with.get(name), plain.get(name))}  # older stores have none
    names = [name for name in dict.fromkeys((*made_with, *plain)) if name not in unknown]
    return [
        f"{name} = {made_with.get(name)!r}, not {plain.get(name)!r}"
        for name in names
        if made_with.get(name) != plain.get(name)
    ]
