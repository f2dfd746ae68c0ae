"""Token ids have no neighbourhood; their embeddings do: the part of a model that comes after one of its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from smoothhess.oracle import find_layer

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
