"""--model, --weights and --output → a function from inputs to one tensor of outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smoothhess.cli.explain import exported_models, model_factories, model_hash, state_dict_files
from smoothhess.model.state import modules_behind

PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin")


class OutputError(ValueError):
    """The model runs, but returns something else than one tensor."""


@dataclass(frozen=True, eq=False)
class Model:
    """What is explained: a function (N, *shape) → (N, …), and what is known about it."""

    forward_func: Callable[[Tensor], Any]
    title: str
    shape: tuple[int | None, ...] | None  # of one input, where an export says it
    dtype: torch.dtype
    identity: str  # changes with the weights, the layers and the code
    notes: tuple[str, ...] = ()

    def try_on(self, batch: Tensor, forward_func: Callable[[Tensor], Any] | None = None) -> tuple[str, int]:
        """Why the model cannot be run on these inputs, in its own words, else empty; and its output's dimensions."""
        rows = torch.cat([batch[:1], batch[:1]])  # two: a layer may take (1, L) for one example of (channels, length)
        try:
            with torch.no_grad():
                output = (forward_func or self.forward_func)(rows)
        except OutputError:
            raise
        except Exception as error:
            return " ".join(str(error).split()) or type(error).__name__, 0
        if output.ndim == 0 or len(output) != 2:
            return f"it returned {tuple(output.shape)} for 2 inputs", 0
        return "", output.ndim


class OneTensor:
    """A model that returns a tuple, a dictionary or an object, as a function that returns one tensor of it.

    >>> OneTensor(lambda x: {"logits": 2 * x, "loss": None}, "logits")(torch.ones(2))
    tensor([2., 2.])
    """

    def __init__(self, model: Callable[..., Any], output: str | None) -> None:
        self.model, self.output = model, output

    def __call__(self, x: Tensor) -> Tensor:
        """The tensor that was asked for."""
        found = self.model(x)
        if self.output is not None:
            found = self._chosen(found)
        if not isinstance(found, Tensor):
            what = f"--output {self.output} of the model's output" if self.output is not None else "the model's output"
            raise OutputError(f"{what} is {_parts(found)}: wanted one tensor.{_advice(found)}")
        if not found.is_floating_point():
            raise OutputError(
                f"the model's output holds {found.dtype}, such as classes: wanted logits or other numbers."
            )
        return found

    def _chosen(self, found: Any) -> Any:
        key = str(self.output)
        if isinstance(found, Mapping) and key in found:
            return found[key]
        if not key.lstrip("-").isdigit():
            if isinstance(getattr(found, key, None), Tensor):
                return getattr(found, key)
        elif isinstance(found, tuple | list) and -len(found) <= int(key) < len(found):
            return found[int(key)]
        raise OutputError(f"--output {key}: the model's output is {_parts(found)}.{_advice(found)}")


def load(words: str, weights: Path | None, output: str | None, device: torch.device, seed: int) -> Model:
    """The model that the command line names, on `device`, ready to be explained."""
    path, notes = Path(words).expanduser(), []
    if path.suffix in PICKLES:
        raise ValueError(_refusal(path))
    if path.suffix == ".pt2":
        if weights is not None:
            raise ValueError("--weights are for --model pkg.module:factory: an export holds its own.")
        export = exported_models.read(path, device)
        if export.batch is not None:
            rows = "1 row" if export.batch == 1 else f"{export.batch} rows"
            notes.append(
                f"{path.name} was exported for {rows} at a time and is run so, filled up. Exported with dynamic_shapes="
                "({0: torch.export.Dim.AUTO},) it is faster, and its activations can be seen: fewer calls do"
            )
        made, shape, dtype = export.forward_func, export.shape, export.dtype
        title, known = path.name, export.digest
    else:
        if path.suffix and ":" not in words:
            module = path.suffix == ".py" or not path.is_file()
            hint = f" Of a module, name the network as well: {words}:factory." if module else ""
            raise ValueError(f"--model wants file.pt2 (torch.export) or pkg.module:factory, got {words}.{hint}")
        made, shape = model_factories.make(words, seed), None
        if weights is not None:
            if not isinstance(made, nn.Module):
                raise ValueError(f"--weights need a torch.nn.Module to fill, but {words} is a {type(made).__name__}.")
            state_dict_files.fill(made, weights.expanduser())
        for module in modules_behind(made):
            module.eval().to(device)
            if _dtype(module) in (torch.float16, torch.bfloat16):
                module.float()
                notes.append("its half-precision weights are used in float32: the gradients are then exact")
        dtype = next((d for m in modules_behind(made) if (d := _dtype(m)) is not None), torch.float32)
        file, _, name = words.rpartition(":")
        title = f"{Path(file).name}:{name}" if file.endswith(".py") else words  # no folders: pages are shown to others
        known = model_hash.of_model(made, words)
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{words} takes {dtype} inputs: wanted float32 or float64, as gradients are taken of them.")
    return Model(OneTensor(made, output), title, shape, dtype, f"{words} {known} {output}", tuple(notes))


def _refusal(path: Path) -> str:
    if not path.is_file():
        return f"no file {path} for --model; and a file of that kind would be refused: wanted .pt2 (torch.export)."
    try:
        state_dict_files.open_plainly(path)
    except ValueError as error:
        return str(error)
    return f"{path} holds weights alone. Pass them as --weights, with --model pkg.module:factory for the network."


def _dtype(module: nn.Module) -> torch.dtype | None:
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), None)


def _parts(found: Any) -> str:
    if isinstance(found, Mapping):
        return f"a dictionary with {', '.join(map(str, found))}"
    if isinstance(found, tuple | list):
        return f"a {type(found).__name__} of {len(found)}"
    return f"a {type(found).__name__}"


def _advice(found: Any) -> str:
    if isinstance(found, Mapping):
        named = [str(key) for key, value in found.items() if isinstance(value, Tensor)]
    elif isinstance(found, tuple | list):
        named = [str(i) for i, value in enumerate(found) if isinstance(value, Tensor)]
    else:
        named = (
            [key for key, value in vars(found).items() if isinstance(value, Tensor)]
            if hasattr(found, "__dict__")
            else []
        )
    if not named:
        return " Write a function that returns the tensor, and pass --model file.py:function."
    return f" Choose with --output {named[0]}" + (f" (or {', '.join(named[1:6])})." if named[1:] else ".")
