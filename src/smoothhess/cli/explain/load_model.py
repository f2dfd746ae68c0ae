"""Loads the model of --model, --weights and --output as a function from inputs to one tensor of outputs.

Each source of models has its own module: `exported_models`, `model_factories`, `state_dict_files`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smoothhess.cli.explain import exported_models, model_factories, model_hash, state_dict_files
from smoothhess.cli.explain.checked_settings import PICKLES
from smoothhess.model.state import modules_behind


class OutputError(ValueError):
    """The model runs, but does not return a single floating-point tensor."""


@dataclass(frozen=True, eq=False)
class Model:
    """The explained function (N, *shape) → (N, …), with its input shape, dtype and hash."""

    forward_func: Callable[[Tensor], Any]
    title: str
    shape: tuple[int | None, ...] | None  # shape of one input; None unless the model is an export
    dtype: torch.dtype
    identity: str  # hash of the weights, the layers and the code
    notes: tuple[str, ...] = ()

    def try_on(self, batch: Tensor, forward_func: Callable[[Tensor], Any] | None = None) -> tuple[str, int]:
        """Run the model on these inputs; return its error message (empty on success) and the output's dimensions."""
        rows = torch.cat([batch[:1], batch[:1]])  # two rows: a layer may read (1, L) as one example (channels, length)
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
    """Wraps a model that returns a tuple, a dictionary or an object; returns one tensor of its output.

    >>> OneTensor(lambda x: {"logits": 2 * x, "loss": None}, "logits")(torch.ones(2))
    tensor([2., 2.])
    """

    def __init__(self, model: Callable[..., Any], output: str | None) -> None:
        self.model, self.output = model, output

    def __call__(self, x: Tensor) -> Tensor:
        """Return the selected tensor."""
        found = self.model(x)
        if self.output is not None:
            found = self._chosen(found)
        if not isinstance(found, Tensor):
            what = f"--output {self.output} of the model's output" if self.output is not None else "the model's output"
            raise OutputError(f"{what} is {_parts(found)}: expected one tensor.{_advice(found)}")
        if not found.is_floating_point():
            raise OutputError(
                f"the model's output has dtype {found.dtype}: expected floating-point numbers such as logits."
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
    """Load the model that the command line names and move it to `device`.

    Args:
        words: The value of --model: file.pt2, pkg.module:factory or file.py:factory.
        weights: A file of weights for a network made by a factory.
        output: The name or number of the output tensor, if the model returns several.
        device: Where the model is run.
        seed: Seed of the initial weights that a factory draws.

    Raises:
        ValueError: If the model is pickled, cannot be loaded, or takes inputs that are not float32 or float64.
    """
    path, notes = Path(words).expanduser(), []
    if path.suffix in PICKLES:
        raise ValueError(_refusal(path))
    if path.suffix == ".pt2":
        export = exported_models.read(path, device)
        if export.batch is not None:
            rows = "1 row" if export.batch == 1 else f"{export.batch} rows"
            notes.append(
                f"{path.name} was exported for {rows} at a time; smaller batches are padded. An export with "
                "dynamic_shapes=({0: torch.export.Dim.AUTO},) is faster and needs fewer calls, since its "
                "activations can be recorded"
            )
        made, shape, dtype = export.forward_func, export.shape, export.dtype
        title, known = path.name, export.digest
    else:
        made, shape = model_factories.make(words, seed), None
        if weights is not None:
            if not isinstance(made, nn.Module):
                raise ValueError(f"--weights require a torch.nn.Module, but {words} is a {type(made).__name__}.")
            state_dict_files.fill(made, weights.expanduser())
        for module in modules_behind(made):
            module.eval().to(device)
            if _dtype(module) in (torch.float16, torch.bfloat16):
                module.float()
                notes.append("the half-precision weights are converted to float32 for exact gradients")
        dtype = next((d for m in modules_behind(made) if (d := _dtype(m)) is not None), torch.float32)
        file, _, name = words.rpartition(":")
        title = f"{Path(file).name}:{name}" if file.endswith(".py") else words  # without folders: pages may be shared
        known = model_hash.of_model(made, words)
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{words} takes {dtype} inputs: expected float32 or float64, since gradients with respect to them are "
            "needed."
        )
    return Model(OneTensor(made, output), title, shape, dtype, f"{words} {known} {output}", tuple(notes))


def _refusal(path: Path) -> str:
    try:
        state_dict_files.open_plainly(path)
    except ValueError as error:
        return str(error)
    return f"{path} holds only weights. Pass them as --weights, with --model pkg.module:factory for the network."


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
