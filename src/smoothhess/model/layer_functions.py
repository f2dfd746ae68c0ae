"""Token ids have no neighbourhood; their embeddings do: the part of a model that comes after one of its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Embedded"]


class Embedded:
    """A model as a function of what one of its layers gives, such as the embeddings of token ids.

    `embed(*args)` is the layer's output for the model's own arguments. The object itself takes such an output in place
    of the layer's, and the same arguments after it: pass them as additional_forward_args. It borrows the model: a hook
    sits on the layer for the time of a call, and the layer must run once in it.

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
    >>> by_token = torch.arange(4)[:, None]  # one group for each token
    >>> result = sh.SmoothHess(inside).attribute(vectors, 1, ids, radius=1.0, n_calls=200, feature_mask=by_token)
    >>> result.hessian.shape
    torch.Size([1, 4, 4])
    """

    def __init__(self, forward_func: Callable[..., Any], layer: nn.Module | str) -> None:
        self.forward_func = forward_func
        self.layer = find_layer(forward_func, layer)

    def embed(self, *args: Any, **keywords: Any) -> Tensor:
        """What the layer gives for these arguments of the model."""
        seen: list[Any] = []
        with torch.no_grad():
            self._run(lambda output: seen.append(output), *args, **keywords)
        if not isinstance(seen[0], Tensor):
            raise TypeError(f"the layer must give one tensor, got {type(seen[0]).__name__}.")
        return seen[0].detach().clone()

    def __call__(self, embeddings: Tensor, *args: Any, **keywords: Any) -> Any:
        """The model's output for its arguments, with `embeddings` in place of what the layer gives."""

        def put(output: Any) -> Tensor:
            if not isinstance(output, Tensor) or output.shape != embeddings.shape:
                got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
                raise ValueError(
                    f"wanted embeddings of the shape that the layer gives, {got}, got {tuple(embeddings.shape)}. Pass "
                    "the model's own arguments as additional_forward_args, as many rows as there are examples."
                )
            return embeddings

        return self._run(put, *args, **keywords)

    def _run(self, replace: Callable[[Any], Any], *args: Any, **keywords: Any) -> Any:
        runs: list[None] = []

        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            runs.append(None)
            return replace(output)

        handle = self.layer.register_forward_hook(hook)
        try:
            output = self.forward_func(*args, **keywords)
        finally:
            handle.remove()
        if len(runs) != 1:
            raise ValueError(
                f"the layer ran {len(runs)} times in one forward pass, wanted once. "
                + ("Is it part of this model?" if not runs else "Wrap the call you mean in a module of its own.")
            )
        return output


def find_layer(forward_func: Callable[..., Any], layer: nn.Module | str) -> nn.Module:
    """The layer itself, or that of the model with this name."""
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
    """f = one neuron of a layer of a model, as a callable of the model's inputs.

    The layer's output, or its input when `attribute_to_neuron_input` (the paper's neurons are pre-activations), is seen
    by a hook that lives as long as one call. `selector` is an int, a tuple of ints and slices (a slice sums), or a
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

    def __call__(self, inputs: Tensor, *args: Any) -> Tensor:
        """The neuron's value for each row."""
        seen: list[Any] = []

        # Copies: a later in-place ReLU must not turn a pre-activation into an activation.
        def before(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            seen.append(_first_tensor(arguments).clone())

        def after(_: nn.Module, __: Any, output: Any) -> None:
            seen.append(_first_tensor(output).clone())

        handle = (
            self.layer.register_forward_pre_hook(before)
            if self.attribute_to_neuron_input
            else self.layer.register_forward_hook(after)
        )
        try:
            self.forward_func(inputs, *args)
        finally:
            handle.remove()
        if len(seen) != 1:
            raise ValueError(
                f"the layer ran {len(seen)} times in one forward pass, wanted once. "
                + ("Is it part of this model?" if not seen else "Wrap the call you mean in a module of its own.")
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
        raise TypeError(f"the layer must give a tensor (or a tuple that begins with one), got {type(value).__name__}.")
    return first
