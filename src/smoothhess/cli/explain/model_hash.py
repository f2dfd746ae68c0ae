"""Hashes a model's layers, parameters, buffers and source code, so that results of a changed model are not reused."""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from smoothhess import _version
from smoothhess.model.state import modules_behind
from smoothhess.model.tensor_hash import digest

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # memory address in a repr, different in each run
INSTALLED = ("site-packages", "dist-packages")


def of_model(made: Callable[..., Any], words: str) -> str:
    """Return a hash of the model that `--model words` made: its layers, parameters, buffers and source files.

    >>> net = nn.Sequential(nn.Linear(2, 1), nn.ReLU())
    >>> same, other = nn.Sequential(*net), nn.Sequential(net[0], nn.Tanh())
    >>> of_model(net, "m:f") == of_model(same, "m:f"), of_model(net, "m:f") == of_model(other, "m:f")
    (True, False)
    """
    model_hash = hashlib.blake2b(digest_size=8)
    networks = modules_behind(made)
    for network in networks:
        model_hash.update(ADDRESS.sub("", repr(network)).encode())
        for name, numbers in (*network.named_parameters(), *network.named_buffers()):
            model_hash.update(f"{name} {tuple(numbers.shape)} {numbers.dtype} {digest(numbers)}".encode())
    for path in sorted({*_defining(made, networks), *_imported_files(words.rpartition(":")[0])}):
        model_hash.update(path.name.encode() + path.read_bytes())
    return f"{getattr(made, '__name__', type(made).__name__)} {model_hash.hexdigest()}"


def _defining(made: Callable[..., Any], networks: list[nn.Module]) -> Iterator[Path]:
    """Yield the source files of a function and of the classes of all layers."""
    kinds = {type(made), *(type(layer) for network in networks for layer in network.modules())}
    for item in (inspect.unwrap(made), *kinds):
        try:
            file = inspect.getsourcefile(item)  # type: ignore[arg-type]
        except TypeError:  # an instance, or a built-in
            continue
        if file is not None and Path(file).is_file():
            yield Path(file).resolve()


def _imported_files(module: str) -> Iterator[Path]:
    """Yield the files of imported modules under the current folder or under the folder of the --model module."""
    folders = {Path.cwd().resolve()}
    if module.endswith(".py"):
        folders.add(Path(module).expanduser().resolve().parent)
    else:
        for name in (module, module.partition(".")[0]):  # also the top-level package
            if file := getattr(sys.modules.get(name), "__file__", None):
                folders.add(Path(file).resolve().parent)
    foreign = [Path(p).resolve() for p in (sysconfig.get_path("stdlib"), Path(_version.__file__).parent)]
    for found in list(sys.modules.values()):
        file = getattr(found, "__file__", None)
        if not isinstance(file, str) or not (path := Path(file).resolve()).is_file():
            continue
        inside = any(path.is_relative_to(folder) for folder in folders)
        if inside and not any(path.is_relative_to(f) for f in foreign) and not set(INSTALLED) & set(path.parts):
            yield path
