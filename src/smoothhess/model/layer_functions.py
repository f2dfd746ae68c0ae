"""Functions of a model that start or end at one of its layers.

`Embedded` takes the output of a layer as input, for token ids and categories, which cannot be perturbed themselves; one
gate per token is in `token_gates`. `Neuron` returns a neuron of a layer as output.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from smoothhess.model.state import modules_behind, refuse_compiled_layer, uncompiled

__all__ = ["Embedded"]


class Embedded:
    """A model as a function of the output of one of its layers, such as the embeddings of token ids.

    `embed(*args)` returns the output of the layer for the arguments of the model. Calling the object replaces the
    output of the layer by its first argument; the arguments of the model follow, so pass them to `attribute` as
    additional_forward_args. The layer has a forward hook during a call, which is removed afterwards, and must run
    exactly once per call. For interactions of tokens use `TokenSmoothHess`.

    Args:
        forward_func: the model.
        layer: the layer, or its name in `named_modules()`.

    Raises:
        TypeError: `layer` is neither a module nor a name, or a name was given for a model that is not a module.
        ValueError: the model has no layer of this name.

    >>> class Text(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.words = nn.Embedding(100, 8)
    ...         self.out = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    ...     def forward(self, ids):
    ...         return self.out(self.words(ids).mean(1))
    >>> import smoothhess as sh
    >>> model, ids = Text(), torch.tensor([[3, 14, 15, 92]])
    >>> inside = Embedded(model, "words")
    >>> vectors = inside.embed(ids)  # (1, 4, 8)
    >>> sh.SmoothHess(inside).attribute(vectors, 1, ids, radius=1.0, n_calls=200).hessian.shape
    torch.Size([1, 32, 32])
    """

    def __init__(self, forward_func: Callable[..., Any], layer: nn.Module | str) -> None:
        self.forward_func = uncompiled(forward_func)
        self.layer = replaceable_layer(self.forward_func, layer)

    def embed(self, *args: Any, **keywords: Any) -> Tensor:
        """The output of the layer for these arguments of the model.

        Args:
            *args: arguments of the model.
            **keywords: keyword arguments of the model.

        Raises:
            TypeError: the output of the layer is not one tensor.
            ValueError: the layer does not run exactly once.
        """
        seen: list[Any] = []
        with torch.no_grad():
            call_replacing(self.forward_func, self.layer, seen.append, args, keywords)
        if not isinstance(seen[0], Tensor):
            raise TypeError(f"the layer must return one tensor, got {type(seen[0]).__name__}.")
        return seen[0].detach().clone()

    def __call__(self, embeddings: Tensor, *args: Any, **keywords: Any) -> Any:
        """The output of the model for its arguments, with `embeddings` as the output of the layer.

        Args:
            embeddings: tensor with the shape of the output of the layer.
            *args: arguments of the model.
            **keywords: keyword arguments of the model.

        Raises:
            ValueError: the shape differs, or the layer does not run exactly once.
        """

        def put(output: Any) -> Tensor:
            if not isinstance(output, Tensor) or output.shape != embeddings.shape:
                got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
                raise ValueError(
                    f"expected embeddings of the shape that the layer returns, {got}, got {tuple(embeddings.shape)}. "
                    "Pass the arguments of the model as additional_forward_args, with one row per example."
                )
            return embeddings

        return call_replacing(self.forward_func, self.layer, put, args, keywords)


def call_replacing(
    forward_func: Callable[..., Any],
    layer: nn.Module,
    replace: Callable[[Any], Any],
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
) -> Any:
    """Call the model with `replace(output)` in place of the output of a layer, which must run exactly once."""
    runs: list[None] = []
    thread = threading.get_ident()

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        if threading.get_ident() != thread:  # another thread calls the same layer
            return None
        runs.append(None)
        return replace(output)

    handle = layer.register_forward_hook(hook)
    try:
        output = forward_func(*args, **keywords)
    finally:
        handle.remove()
    if len(runs) != 1:
        times = f"the layer ran {len(runs)} times in one forward pass, expected once."
        advice = (
            "Wrap the call to explain in a separate module, or pass the other call its embeddings, such as "
            "decoder_inputs_embeds."
        )
        raise ValueError(f"{times} {advice if runs else _advice_on_unused(forward_func, layer)}")
    return output


def _advice_on_unused(forward_func: Callable[..., Any], layer: nn.Module) -> str:
    """What to do about a layer that does not run; embeddings that share its weights may run in its place."""
    weights = {id(p) for p in layer.parameters()}
    tied = [
        name
        for root in modules_behind(forward_func)
        for name, other in root.named_modules()
        if other is not layer and isinstance(other, nn.Embedding) and id(other.weight) in weights
    ]
    if tied:
        return f"It shares its weights with {', '.join(tied)}: pass the one of these that looks up the tokens."
    return "Is it part of this model, and used in this call?"


def replaceable_layer(forward_func: Callable[..., Any], layer: nn.Module | str) -> nn.Module:
    """As `find_layer`; raises ValueError if the layer is inside a compiled module."""
    found = find_layer(forward_func, layer)
    refuse_compiled_layer(forward_func, found)
    return found


def find_layer(forward_func: Callable[..., Any], layer: nn.Module | str) -> nn.Module:
    """The layer itself, or the layer of the model with this name."""
    if isinstance(layer, str):
        if not isinstance(forward_func, nn.Module):
            raise TypeError("a layer can be given by name only when forward_func is a torch.nn.Module.")
        names = dict(forward_func.named_modules())
        if layer not in names:
            known = ", ".join(list(names)[1:9])
            raise ValueError(f"no layer is called {layer!r}. The model has {known}, … (named_modules).")
        layer = names[layer]
    if not isinstance(layer, nn.Module):
        raise TypeError(f"layer must be a torch.nn.Module or its name, got {type(layer).__name__}.")
    return layer


class Neuron:
    """One neuron of a layer as a function of the inputs of the model.

    The output of the layer, or its input if `attribute_to_neuron_input` (the neurons of the paper are pre-activations),
    is captured by a hook during each call. `selector` is an int, a tuple of ints and slices (slices are summed), or a
    callable from the captured tensor (N, …) to (N,).
    """

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: nn.Module | str,
        selector: int | tuple[int | slice, ...] | Callable[[Tensor], Tensor],
        attribute_to_neuron_input: bool = False,
    ) -> None:
        self.forward_func = forward_func
        self.layer = find_layer(forward_func, layer)
        self.selector = selector
        self.attribute_to_neuron_input = attribute_to_neuron_input

    def __call__(self, *args: Any, **keywords: Any) -> Tensor:
        """The value of the neuron for each row."""
        seen: list[Any] = []
        thread = threading.get_ident()

        def keep(value: Any) -> None:
            if threading.get_ident() == thread:  # not a call of the same layer in another thread
                seen.append(_first_tensor(value).clone())  # a later in-place ReLU must not change the clone

        def before(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            keep(arguments)

        def after(_: nn.Module, __: Any, output: Any) -> None:
            keep(output)

        handle = (
            self.layer.register_forward_pre_hook(before)
            if self.attribute_to_neuron_input
            else self.layer.register_forward_hook(after)
        )
        try:
            self.forward_func(*args, **keywords)
        finally:
            handle.remove()
        if len(seen) != 1:
            raise ValueError(
                f"the layer ran {len(seen)} times in one forward pass, expected once. "
                + ("Is it part of this model?" if not seen else "Wrap the call to explain in a separate module.")
            )
        return self._select(seen[0])

    def _select(self, captured: Tensor) -> Tensor:
        if callable(self.selector):
            chosen = self.selector(captured)
            if not isinstance(chosen, Tensor) or chosen.shape != captured.shape[:1]:
                raise ValueError(f"neuron_selector must return one number per row, ({len(captured)},).")
            return chosen
        index = self.selector if isinstance(self.selector, tuple) else (self.selector,)
        if len(index) != captured.ndim - 1:
            raise ValueError(
                f"neuron_selector must have {captured.ndim - 1} index(es) for a layer of shape "
                f"{tuple(captured.shape)}, got {self.selector!r}."
            )
        try:
            chosen = captured[(slice(None), *index)]
        except IndexError as error:
            raise ValueError(
                f"neuron_selector {self.selector!r} is out of range for {tuple(captured.shape)}."
            ) from error
        return chosen.reshape(len(captured), -1).sum(1)


def _first_tensor(value: Any) -> Tensor:
    first = value[0] if isinstance(value, tuple | list) and value else value
    if not isinstance(first, Tensor):
        raise TypeError(f"the layer must return a tensor or a tuple that begins with one, got {type(value).__name__}.")
    return first
