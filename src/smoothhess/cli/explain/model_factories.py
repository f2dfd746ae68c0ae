"""Imports the model that `pkg.module:factory` or `file.py:factory` names; the current folder is searched as well."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn


def make(words: str, seed: int) -> Callable[..., Any]:
    """Return the model that `pkg.module:name` or `file.py:name` names.

    The name refers to a network, to a function of the inputs, or to a factory: a callable without arguments that
    returns one of these. A factory draws its initial weights from `seed`; the global random state is restored.

    Raises:
        ValueError: If the name cannot be imported, called or used as a model.

    >>> make("torch.nn:ReLU", seed=0)
    ReLU()
    """
    module, _, name = words.rpartition(":")
    with _from_here(module), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        found = _attribute(_imported(module), name, words)
        return _called(found, words)


def _imported(module: str) -> Any:
    if module.endswith(".py"):
        path = Path(module).expanduser()
        name = f"{path.stem} of --model"  # a name that no other module can have
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[name] = loaded  # so that classes defined in it find their module
        _guarded(lambda: spec.loader.exec_module(loaded), f"{path} cannot be run")  # type: ignore[union-attr]
        return loaded
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
            raise ValueError(
                f"no module {module!r} for --model. Install it, or run in the folder that contains it "
                f"({module.replace('.', '/')}.py)."
            ) from error
        raise ValueError(f"{module} requires {error.name}, which is not installed.") from error
    except Exception as error:
        raise ValueError(f"{module} cannot be imported: {type(error).__name__}: {error}") from error


def _attribute(module: Any, name: str, words: str) -> Any:
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            has = f" It defines {', '.join(known[:8])}." if known else ""
            raise ValueError(f"--model {words}: the module has no {name!r}.{has}")
        found = getattr(found, part)
    return found


def _called(found: Any, words: str) -> Callable[..., Any]:
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise ValueError(
            f"--model {words} is a {type(found).__name__}: expected a network, or a function that returns one."
        )
    required = _required(found)
    if required and (isinstance(found, type) or len(required) > 1):
        raise ValueError(
            f"--model {words} cannot be called without arguments ({', '.join(required)}). Write a function without "
            "arguments that returns the network, and pass its name."
        )
    if required:  # a function of the inputs
        return found
    made = _guarded(found, f"--model {words} failed")
    if not callable(made):
        raise ValueError(f"--model {words} returned a {type(made).__name__}: expected a network or a function.")
    return made


def _required(found: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):  # built-in
        return []
    flexible = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in flexible]


def _guarded(action: Callable[[], Any], words: str) -> Any:
    try:
        return action()
    except Exception as error:
        raise ValueError(f"{words}: {type(error).__name__}: {error}") from error


@contextmanager
def _from_here(module: str) -> Iterator[None]:
    """Temporarily put the folder of a .py file and the current folder first on sys.path."""
    before = list(sys.path)
    own = [str(Path(module).expanduser().parent.resolve())] if module.endswith(".py") else []
    sys.path[:0] = [*own, str(Path.cwd())]
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before
