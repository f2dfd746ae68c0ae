"""Gates of tokens: a model of token ids, or of patches, as a function of one number per token.

The gate s_t of a token moves its embedding e_t on the line through a baseline b: F(s) = f(b + s ⊙ (e − b)). The model
is called with ids and all its other arguments as usual; a forward hook replaces the output of the embedding layer.
The explainer is `smoothhess.explainers.token_smooth_hess`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smoothhess.model.layer_functions import call_replacing, replaceable_layer
from smoothhess.model.random_operations import call_without_random_operations
from smoothhess.model.state import is_opaque, modules_behind, uncompiled

SAMPLED_VECTORS = 4  # input vectors that are compared with the rows of the model's embeddings
LEAST_WIDTH = 4  # of vectors that are not multiples of a row by chance
SAME_DIRECTION = 1 - 1e-5  # cosine from which two vectors are multiples of each other


class TokenGates:
    """A model as a function of the gates (N, T) of its tokens, or of their embeddings (N, T, E).

    Args:
        forward_func: the model.
        layer: the embedding layer, or its name; it must run once per call and return (N, T, E).
        keywords: names of the last arguments of a call, which are passed to the model by name.

    >>> words, ids = nn.Embedding(10, 3), torch.tensor([[4, 2]])
    >>> gates = TokenGates(lambda ids: words(ids).sum((1, 2)), words)
    >>> gates(torch.zeros(1, 2), ids, torch.ones(1, 1, 3), None)  # at the baseline
    tensor([6.])
    """

    def __init__(self, forward_func: Callable[..., Any], layer: nn.Module | str, keywords: Sequence[str] = ()) -> None:
        self.forward_func = uncompiled(forward_func)
        self.layer = replaceable_layer(self.forward_func, layer)
        self.keywords = tuple(keywords)

    def __call__(self, moved: Tensor, ids: Tensor, baseline: Tensor | None, held: Tensor | None, *args: Any) -> Any:
        """The output of the model for moved gates or embeddings.

        Args:
            moved: gates (N, T), or embeddings (N, T, E).
            ids: the first argument of the model, (N, …).
            baseline: b, broadcast with (N, T, E); None is the mean over the positions of each row.
            held: where tokens keep their own embedding, (N, T).
            *args: the other arguments of the model.
        """

        def put(output: Any) -> Tensor:
            check_embeddings(output, len(ids), moved.shape[1])
            e = output.detach()
            if moved.ndim == 3:
                new = moved
            else:
                b = e.mean(1, keepdim=True) if baseline is None else baseline
                new = b + moved[..., None] * (e - b)
            return (new if held is None else torch.where(held[..., None], e, new)).to(output.dtype)

        return self._call(put, ids, args)

    def embed(self, ids: Tensor, *args: Any) -> tuple[Tensor, Any]:
        """The embeddings (N, T, E) of these arguments of the model, and the output of the model."""
        seen: list[Tensor] = []

        def keep(output: Any) -> None:
            check_embeddings(output, len(ids))
            seen.append(output.detach().clone())

        def call(given: Tensor) -> Any:
            seen.clear()
            return self._call(keep, given, args)

        with torch.no_grad():
            output = call(ids) if is_opaque(self.forward_func) else call_without_random_operations(call, ids)
        return seen[0], output

    def _call(self, replace: Callable[[Any], Any], ids: Tensor, args: tuple[Any, ...]) -> Any:
        split = len(args) - len(self.keywords)
        named = dict(zip(self.keywords, args[split:], strict=True))
        return call_replacing(self.forward_func, self.layer, replace, (ids, *args[:split]), named)


def check_embeddings(output: Any, rows: int, tokens: int | None = None) -> None:
    """Raise an error unless a layer has returned one vector per token, (N, T, E)."""
    shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if not isinstance(output, Tensor) or output.ndim != 3 or not output.is_floating_point() or len(output) != rows:
        raise ValueError(
            f"the layer must return one vector per token, ({rows}, T, E) with examples in dimension 0, got {shape}. "
            "Pass the embedding of the tokens, or the layer that returns patches as (N, patches, E)."
        )
    if tokens is not None and output.shape[1] != tokens:
        raise ValueError(f"the layer returned {output.shape[1]} tokens, expected {tokens} as in the first call.")


def check_ids(layer: nn.Module, ids: Any) -> Tensor:
    """The token ids (B, T) as a tensor, or any other first argument of a model whose layer is no nn.Embedding."""
    if isinstance(ids, Mapping):
        raise TypeError(
            f"input_ids must be a tensor, got {type(ids).__name__}. Pass its ids first and the rest as additional "
            "arguments: input_ids=encoding['input_ids'], additional_forward_args={'attention_mask': …}."
        )
    if ids is None or isinstance(ids, tuple):
        raise TypeError(
            f"input_ids must be one tensor (B, T), got {type(ids).__name__}. Pass the token ids first, and further "
            "arguments of the model as additional_forward_args."
        )
    if isinstance(ids, list) and ids and all(isinstance(row, Tensor) for row in ids):
        ids = [row.tolist() for row in ids]
    if not isinstance(ids, Tensor):
        try:
            ids = torch.as_tensor(ids)
        except (TypeError, ValueError, RuntimeError) as error:
            if "str" in str(error):
                raise TypeError(
                    "input_ids must be integers, got strings. Convert the texts with the tokenizer of the model."
                ) from error
            raise ValueError(
                "input_ids must be a tensor (B, T), or texts of the same length. Pad the shorter ones, pass the "
                "attention mask as additional_forward_args, and freeze the padding: frozen=mask == 0."
            ) from error
    if not isinstance(layer, nn.Embedding):
        return ids
    if not ids.numel():
        raise ValueError(
            "input_ids must be integers (B, T) with at least one token, got an empty text of shape "
            f"{tuple(ids.shape)}. Leave it out."
        )
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool or ids.ndim != 2:
        advice = (
            "For a single text use ids[None]." if ids.ndim == 1 else "Pass the ids of the tokenizer, as ids.long()."
        )
        raise ValueError(
            f"input_ids must be integers (B, T) with at least one token, got {ids.dtype} of shape {tuple(ids.shape)}. "
            f"{advice}"
        )
    _check_vocabulary(layer, ids, "input_ids")
    return ids if ids.dtype in (torch.int32, torch.int64) else ids.long()


def _check_vocabulary(layer: nn.Embedding, ids: Tensor, what: str) -> None:
    low, high = (int(v) for v in ids.aminmax())
    if low < 0 or high >= layer.num_embeddings:
        raise ValueError(
            f"{what} must be 0 … {layer.num_embeddings - 1}, the rows of the embedding, got {low} … {high}. Use the "
            "tokenizer of this model."
        )


def baseline_vectors(layer: nn.Module, baseline: Any, like: Tensor, batch: int) -> Tensor | None:
    """The baseline b as (1 or B, 1 or T, E); None is the mean over positions of a layer that is no nn.Embedding.

    `like` are the embeddings (·, T, E) of some of the B texts.
    """
    expected = 'baseline must be "mean", "zero", a token id or a tensor'
    if isinstance(baseline, str):
        if baseline == "zero":
            return torch.zeros_like(like[:1, :1])
        if baseline != "mean":
            raise ValueError(f"{expected}, got {baseline!r}. For a word pass tokenizer.convert_tokens_to_ids(word).")
        return _mean_row(layer).to(like)[None, None] if isinstance(layer, nn.Embedding) else None
    try:
        given = torch.as_tensor(baseline, device=like.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{expected}, got {type(baseline).__name__}.") from error
    if given.dtype == torch.bool:
        raise TypeError(f"{expected}, got booleans. Tokens that keep their embeddings are passed as frozen=.")
    if given.is_floating_point():
        rows = given.to(like)
        if not bool(rows.isfinite().all()):
            raise ValueError("baseline must be finite, got NaN or infinity. Check how it was computed.")
    elif not isinstance(layer, nn.Embedding):
        raise ValueError(
            f'a token id as baseline needs an nn.Embedding, and the layer is {type(layer).__name__}. Pass "mean", '
            '"zero" or a tensor of vectors.'
        )
    else:
        _check_vocabulary(layer, given, "the token ids of baseline")
        with torch.no_grad():
            rows = layer(given.reshape(1, -1).long()).reshape(*given.shape, -1).to(like)
    rows = rows.reshape(*[1] * (3 - rows.ndim), *rows.shape)
    _, tokens, width = like.shape
    if rows.ndim != 3 or len(rows) not in (1, batch) or rows.shape[1] not in (1, tokens) or rows.shape[2] != width:
        raise ValueError(
            f"a baseline must be one vector ({width},), one per token ({tokens}, {width}) or one per token of each "
            f"text, ({batch}, {tokens}, {width}), or token ids: one, ({tokens},) or ({batch}, {tokens}), got shape "
            f"{tuple(given.shape)}."
        )
    return rows


def _mean_row(layer: nn.Embedding) -> Tensor:
    """The mean of the vectors that an embedding returns for all ids."""
    with torch.no_grad():
        if type(layer).forward is nn.Embedding.forward:
            weight = layer.weight
            return (weight if layer.max_norm is None else weight.renorm(layer.norm_type, 0, layer.max_norm)).mean(0)
        every = torch.arange(layer.num_embeddings, device=layer.weight.device)
        return torch.stack([layer(part[None])[0].sum(0) for part in every.split(4096)]).sum(0) / len(every)


def frozen_positions(frozen: Any, ids: Tensor, batch: int, tokens: int) -> Tensor:
    """Where tokens are frozen, (B, T), from a boolean mask or from token ids."""
    try:
        given = torch.as_tensor(frozen, device=ids.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"frozen must be a boolean mask ({tokens},) or ({batch}, {tokens}), or token ids, got "
            f"{type(frozen).__name__}. For special tokens pass tokenizer.all_special_ids."
        ) from error
    if given.dtype == torch.bool:
        if given.shape not in ((tokens,), (batch, tokens)):
            raise ValueError(
                f"frozen must be a boolean mask ({tokens},) or ({batch}, {tokens}), or token ids, got a mask of shape "
                f"{tuple(given.shape)}."
            )
        return given.expand(batch, tokens)
    if given.is_floating_point() and given.numel():
        raise TypeError(f"frozen must be a boolean mask or token ids, got {given.dtype}. Use frozen=mask == 0.")
    if _is_mask_of_integers(given, tokens):
        raise TypeError(
            f"frozen must be a boolean mask or token ids, got zeros and ones as {given.dtype} of shape "
            f"{tuple(given.shape)}. Use frozen=mask.bool(), or frozen=mask == 0 of an attention mask."
        )
    if ids.shape != (batch, tokens):
        raise ValueError(f"frozen token ids need input_ids ({batch}, {tokens}), got {tuple(ids.shape)}. Pass a mask.")
    return torch.isin(ids, given.to(ids.dtype))


def _is_mask_of_integers(given: Tensor, tokens: int) -> bool:
    """Whether integers are a mask of 0 and 1: one per token, and not a list of different ids."""
    repeated = given.ndim > 1 or given.numel() > given.unique().numel()
    return repeated and given.shape[-1:] == (tokens,) and bool(((given == 0) | (given == 1)).all())


def are_embeddings(forward_func: Callable[..., Any], inputs: Tensor) -> bool:
    """Whether inputs (B, T, E) are rows, up to a factor, of an nn.Embedding of the model.

    >>> words = nn.Embedding(10, 8)
    >>> are_embeddings(lambda v: words.weight.sum() * v, 2 * words(torch.tensor([[4, 2]])).detach())
    True
    """
    vectors = inputs[0, :SAMPLED_VECTORS]
    vectors = vectors[vectors.norm(dim=1) > 0] if inputs.ndim == 3 else vectors[:0]
    if not len(vectors) or vectors.shape[1] < LEAST_WIDTH:
        return False
    layers = {layer for root in modules_behind(forward_func) for layer in root.modules()}
    return any(
        isinstance(layer, nn.Embedding) and layer.embedding_dim == vectors.shape[1] and _are_rows(vectors, layer.weight)
        for layer in layers
    )


def _are_rows(vectors: Tensor, weight: Tensor) -> bool:
    """Whether each of the vectors is a multiple of a row."""
    if weight.device != vectors.device:
        return False
    rows = nn.functional.normalize(weight.detach().to(vectors), dim=1)
    cosines = nn.functional.normalize(vectors, dim=1) @ rows.mT
    return bool((cosines.abs().amax(1) >= SAME_DIRECTION).all())
