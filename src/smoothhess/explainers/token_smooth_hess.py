"""TokenSmoothHess: which tokens of a text, or patches of an image, act together in a transformer.

This module validates texts, baselines and frozen tokens. The function that is explained is in
`smoothhess.model.token_gates`; sampling and errors are those of `SmoothHess`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from smoothhess.draws.gaussian import Diagonal, Gaussian
from smoothhess.draws.seeding import evaluation_generator, evaluation_seed
from smoothhess.estimate.folded_mean import FoldedMean
from smoothhess.explainers.diagnose_model import Diagnosis, diagnose
from smoothhess.explainers.interrupted import Interrupted
from smoothhess.explainers.result_warnings import FewEventsWarning
from smoothhess.explainers.smooth_hess import SmoothHess
from smoothhess.model import targets
from smoothhess.model.capacity import Capacity
from smoothhess.model.convert_inputs import to_tensors
from smoothhess.model.gradients import check_batch_size
from smoothhess.model.model_call import is_predicted
from smoothhess.model.state import borrowed
from smoothhess.model.token_gates import TokenGates, baseline_vectors, check_ids, frozen_positions
from smoothhess.result.features import name_each
from smoothhess.result.interactions import Interactions
from smoothhess.result.pair_strengths import PairStrengths

EMBEDDED_ROWS = 32  # texts whose embeddings are computed in one forward pass
PROBE_PASSES = 0.5  # one forward pass, in units of a gradient call


class TokenSmoothHess:
    """Interactions of tokens in a model of token ids, or of patches in a vision transformer.

    Token t has a gate s_t, which moves its embedding e_t on the line from a baseline b (gate 0) through the token
    (gate 1). The explained function is F(s) = f(b + s ⊙ (e − b)) with s ~ N(1, σ²I): one feature per token, and entry
    (t, u) of the Hessian is the effect of both tokens beyond the sum of their effects. It does not depend on the basis
    of the embedding space. Only first derivatives are used, so fused attention works.

    Args:
        forward_func: the model, as in `SmoothHess`, called with ids and the additional_forward_args.
        layer: the embedding of the tokens, or its name: a module that runs once per call and returns (N, T, E). Only
            its output is replaced, so weights that are tied to the embedding stay as they are.
        baseline: b: "mean" of all rows of the embedding (of all positions, for a layer that is no nn.Embedding),
            "zero", a token id such as that of the mask or of padding, vectors (E,), (T, E) or (B, T, E), or the ids of
            one replacement for each token, (T,) or (B, T).
        output: the field of the model's output to explain, as in `SmoothHess`.

    Raises:
        TypeError, ValueError: as `Embedded`, if there is no such layer.

    >>> class Text(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.words, self.out = nn.Embedding(100, 8), nn.Linear(8, 2)
    ...     def forward(self, ids):
    ...         return self.out(self.words(ids).mean(1).tanh())
    >>> model, ids = Text(), torch.tensor([[3, 14, 15, 92]])
    >>> explainer = TokenSmoothHess(model, "words")
    >>> result = explainer.attribute(ids, 1, sigma=0.1, names=["not", "a", "bad", "film"])
    >>> result.hessian.shape, len(result.top_pairs(3)[0][0].names)
    (torch.Size([1, 4, 4]), 2)
    """

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: nn.Module | str,
        baseline: Any = "mean",
        *,
        output: str | int | None = None,
    ) -> None:
        self.gates = TokenGates(forward_func, layer)  # finds the layer, or raises
        self.forward_func, self.layer, self.baseline, self.output = forward_func, layer, baseline, output
        self.capacity = Capacity()

    def attribute(
        self,
        input_ids: Tensor,
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        sigma: Any = None,
        radius: float | None = None,
        gaussian: Gaussian | None = None,
        space: Literal["gates", "embedding"] = "gates",
        frozen: Any = None,
        names: Sequence[str] | Sequence[Sequence[str]] | None = None,
        **options: Any,
    ) -> Interactions:
        """Estimate the interactions of the tokens of each of B texts.

        Args:
            input_ids: token ids (B, T), or the pixels of a vision transformer: the first argument of the model.
            target: as in `SmoothHess.attribute`: for logits (N, T, V) a tuple (position, token), contrast(a, b) or
                continuation(ids).
            additional_forward_args: further arguments of the model, as in `SmoothHess.attribute`, or a dictionary of
                keyword arguments, such as {"attention_mask": mask}.
            sigma: standard deviation of the gates, which are 1 at the text and 0 at the baseline; one number, or one
                per token. With space="embedding" that of each coordinate of an embedding.
            radius, gaussian: in place of sigma, as in `SmoothHess.attribute`.
            space: "gates" perturbs one gate per token. "embedding" adds noise to all coordinates of the embeddings, as
                the paper does to pixels, and reads the Hessian along e − b; it takes more calls for the same error.
            frozen: tokens that are never perturbed, such as padding: a boolean mask (T,) or (B, T), or token ids.
                Tokens that are frozen in all texts have no draws, gradient 0 and interactions 0. Where texts differ,
                F does not depend on the frozen tokens of each, and their zeros are estimated like other entries.
            names: the tokens as strings, T for all texts or T for each; with feature_mask the names of the groups.
            **options: keyword arguments of `SmoothHess.attribute`. feature_mask (T,) or (B, T) sums over groups of
                tokens, such as words.

        Returns:
            An `Interactions` of B examples whose features are the tokens, or groups of them.

        Raises:
            TypeError: if an argument has the wrong type.
            ValueError: if an id is not in the vocabulary, if texts of different length have no padding or no mask, if
                the layer does not run exactly once, if a target position is not in the text, if a cache of keys and
                values is passed, and as in `SmoothHess.attribute`.
            Interrupted: after a KeyboardInterrupt, with the `result` of what was drawn so far.

        Warns:
            UserWarning: if the model returns a cache of keys and values, and as in `SmoothHess.attribute`.
        """
        if options.get("compile"):
            raise ValueError(
                "compile=True is not supported: compiled code does not run the hook that moves the tokens. Compile the "
                "blocks of the model after the embedding, model.block = torch.compile(model.block)."
            )
        text = self._text(input_ids, additional_forward_args, frozen, options.get("internal_batch_size"))
        target = targets.by_class_name(target, options.get("classes"))
        text.check_target(target)
        mask = _group_ids(options.pop("feature_mask", None))
        labels = _names(names, len(text.ids), text.held.shape[1] if mask is None else int(mask.max()) + 1)
        if space == "gates":
            inputs, given = text.gates, {"feature_mask": mask}
        elif space == "embedding":
            inputs, given = self._embeddings(text, mask, options.get("internal_batch_size") or EMBEDDED_ROWS)
        else:
            raise ValueError(f'space must be "gates" or "embedding", got {space!r}.')
        scale = {"sigma": sigma, "radius": radius, "gaussian": gaussian}
        if text.always_frozen.any():
            scale = {"gaussian": _without_frozen(text.always_frozen, inputs[0].numel(), **scale)}

        def described(result: Interactions) -> Interactions:
            known = None if labels is None else labels[: len(result)]  # an interrupted run may lack examples
            passes = result.n_passes + PROBE_PASSES
            return replace(result, names=known, feature_kind=text.feature_kind, n_passes=passes)

        try:
            return described(
                self._explainer(text).attribute(inputs, target, text.arguments, **scale, **given, **options)
            )
        except Interrupted as error:
            raise Interrupted(str(error), None if error.result is None else described(error.result)) from None

    def diagnose(
        self,
        input_ids: Tensor,
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        frozen: Any = None,
        **options: Any,
    ) -> Diagnosis:
        """Find the σ of the gates that are usable for a text, and recommend one; or examine a given σ.

        Gates are 0 at the baseline and 1 at the text; their standard deviation, 0.7, is the scale of the data.

        Args:
            input_ids, target, additional_forward_args, frozen: as in `attribute`.
            **options: the keyword arguments of `smoothhess.diagnose`, such as sigma and seed.

        Returns:
            A `Diagnosis` with one feature for each token.

        Raises:
            TypeError, ValueError: as in `attribute` and `smoothhess.diagnose`.

        >>> words, head = nn.Embedding(100, 8), nn.Linear(8, 2)
        >>> explainer = TokenSmoothHess(lambda ids: head(words(ids).mean(1).tanh()), words)
        >>> 0 < explainer.diagnose(torch.tensor([[3, 14, 15, 92, 65, 35]]), 1).recommended <= 1
        True
        """
        text = self._text(input_ids, additional_forward_args, frozen, options.get("internal_batch_size"))
        target = targets.by_class_name(target, options.get("classes"))
        text.check_target(target)
        between = torch.stack([torch.zeros_like(text.gates[0]), text.gates[0]])  # the baseline and the text
        held = text.held if bool(text.held.any()) else None
        arguments = (text.ids, text.baseline, held, *text.others)
        function = self._explainer(text).forward_func
        return diagnose(function, text.gates, target, arguments, **{"data": between, **options})

    def strength(
        self,
        input_ids: Tensor,
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        sigma: float = 0.1,
        n_centers: int = 32,
        frozen: Any = None,
        names: Any = None,
        seed: int = 0,
        **options: Any,
    ) -> PairStrengths:
        """Mean strength of the interactions between the baseline and the text, E|H_tu(c)| over random gates c.

        `attribute` describes the neighbourhood of the text, where a model that is certain of its answer has little
        curvature, and the sign of an interaction may change on the way to the baseline. Here H(c) is the smoothed
        Hessian around gates c that are uniform between 0 (the baseline) and 1 (the text), independently for each
        token, and its absolute values are averaged. It ranks pairs; it has no sign.

        Args:
            input_ids, target, additional_forward_args, frozen, names: as in `attribute`; names are those of tokens.
            sigma: standard deviation of the gates around each c.
            n_centers: number of random c, at least 2. Each takes 2T calls.
            seed: seed of the random c and of the draws around them.
            **options: internal_batch_size, precision, control and n_calls of `SmoothHess.attribute`.

        Returns:
            `PairStrengths` (B, T, T) of denoised Hessians: an `Estimate` with `top_pairs`. The standard errors are
            those of the mean over c, and contain the difference to the mean of the unbiased ones, whose absolute values
            are too large on average.

        Raises:
            TypeError, ValueError: as in `attribute`, and if there are fewer than two centres.
            Interrupted: after a KeyboardInterrupt, without a `result`.

        >>> words, head = nn.Embedding(100, 8), nn.Linear(8, 2)
        >>> explainer = TokenSmoothHess(lambda ids: head(words(ids).mean(1).tanh()), words)
        >>> explainer.strength(torch.tensor([[3, 14, 15, 92, 65, 35]]), 1, n_centers=4).value.shape
        torch.Size([1, 6, 6])
        """
        if n_centers < 2:
            raise ValueError(f"n_centers must be at least 2, for a standard error of their mean, got {n_centers}.")
        text = self._text(input_ids, additional_forward_args, frozen, options.get("internal_batch_size"))
        target = targets.by_class_name(target, options.get("classes"))
        text.check_target(target)
        labels = _names(names, len(text.ids), text.held.shape[1])
        explainer, moving = self._explainer(text), ~text.always_frozen
        gaussian = Diagonal(sigma * moving.double().cpu())
        options = {"n_calls": 2 * max(int(moving.sum()), 1), **options}
        total = FoldedMean()
        for i in range(n_centers):
            random = evaluation_generator(seed, i).random(text.held.shape)
            gates = torch.where(text.held, 1.0, torch.as_tensor(random).to(text.gates))
            seeds = evaluation_seed(seed, i) % (1 << 63)
            try:
                with warnings.catch_warnings():  # the errors of single centres are not used
                    warnings.simplefilter("ignore", FewEventsWarning)
                    found = explainer.attribute(gates, target, text.arguments, gaussian=gaussian, seed=seeds, **options)
            except Interrupted:
                raise Interrupted(f"interrupted after {i} of {n_centers} centres: there is no result.") from None
            total = total.with_row(found.hessian, found.unshrunk().hessian)
        df = torch.full((len(text.ids),), n_centers - 1.0, dtype=torch.float64, device=text.ids.device)
        return PairStrengths(total.value.to(text.gates), total.stderr.to(text.gates), df, labels)

    def more(
        self,
        result: Interactions,
        n: int,
        input_ids: Tensor,
        additional_forward_args: Any = None,
        *,
        frozen: Any = None,
        **options: Any,
    ) -> Interactions:
        """Add `n` further gradient calls to every example of a result, as `SmoothHess.more`.

        Args:
            result, n: as in `SmoothHess.more`.
            input_ids, additional_forward_args, frozen: those that `result` was made with.
            **options: keyword arguments of `SmoothHess.more`.

        Returns:
            A new `Interactions`.

        Raises:
            ValueError: as `SmoothHess.more`, and if the texts, the baseline or the frozen tokens are others.
        """
        text = self._text(input_ids, additional_forward_args, frozen, options.get("internal_batch_size"))
        grown = self._explainer(text).more(result, n, text.arguments, **options)
        return replace(grown, n_passes=grown.n_passes + PROBE_PASSES)

    def _text(self, input_ids: Any, args: Any, frozen: Any, rows: int | None) -> _Text:
        """Validate the arguments of the model; calls it once, with the first text."""
        check_batch_size(rows)
        ids = check_ids(self.gates.layer, input_ids)
        args = to_tensors(args, self.forward_func)
        _refuse_first_argument(args)
        named = dict(args) if isinstance(args, Mapping) else {}
        plain = () if args is None or isinstance(args, Mapping) else args if isinstance(args, tuple) else (args,)
        _refuse_cache(named, plain)
        _refuse_padding_without_mask(self.gates.layer, ids, named, plain, frozen)
        gates = TokenGates(self.forward_func, self.gates.layer, tuple(named))
        others = (*plain, *named.values())
        with borrowed(gates, ids.device), _advising_on_masks(named, ids):
            vectors, output = gates.embed(*_rows(ids, others, slice(1)))
        _advise_against_cache(output)
        if vectors.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"the embeddings are {vectors.dtype}, in which differences of gradients are lost to rounding. Use "
                "model.float(), and precision='bf16' or 'fp16' for speed."
            )
        batch, tokens = len(ids), vectors.shape[1]
        held = torch.zeros(batch, tokens, dtype=torch.bool, device=ids.device)
        if frozen is not None:
            held = frozen_positions(frozen, ids, batch, tokens)
            _refuse_all_frozen(held)
        baseline = baseline_vectors(self.gates.layer, self.baseline, vectors, batch)
        _refuse_baseline_of_the_text(vectors, baseline, held)
        return _Text(gates, ids, others, vectors, baseline, held, *_text_of_outputs(named, ids, held))

    def _explainer(self, text: _Text) -> SmoothHess:
        explainer = SmoothHess(text.gates_function, self.output)
        explainer.capacity = self.capacity
        return explainer

    def _embeddings(self, text: _Text, mask: Tensor | None, rows: int) -> tuple[Tensor, dict[str, Any]]:
        """The embeddings of all texts, in batches of `rows`, and the options that sum their coordinates along e − b."""
        with borrowed(text.gates_function, text.ids.device):
            vectors = torch.cat([
                text.gates_function.embed(*_rows(text.ids, text.others, slice(i, i + rows)))[0]
                for i in range(0, len(text.ids), rows)
            ]).to(text.gates.dtype)  # fmt: skip
        b = vectors.mean(1, keepdim=True) if text.baseline is None else text.baseline.to(vectors)
        mask = torch.arange(vectors.shape[1]) if mask is None else mask
        return vectors, {"feature_mask": mask[..., None].to(vectors.device), "direction": vectors - b}


@dataclass(frozen=True, eq=False)
class _Text:
    """The validated arguments of a model of tokens."""

    gates_function: TokenGates
    ids: Tensor  # (B, …)
    others: tuple[Any, ...]  # the other arguments of the model
    first: Tensor  # (1, T, E) embeddings of the first text
    baseline: Tensor | None  # (1 or B, 1 or T, E)
    held: Tensor  # (B, T) frozen tokens
    written: Tensor | None  # (B, T′) ids of the text whose positions the outputs have; None if it is not known
    mask: Any  # its attention mask, a keyword argument

    @property
    def gates(self) -> Tensor:
        """Gates of the texts themselves, (B, T)."""
        dtype = torch.float64 if self.first.dtype == torch.float64 else torch.float32
        return torch.ones(self.held.shape, dtype=dtype, device=self.ids.device)

    @property
    def feature_kind(self) -> str:
        """What a position is: "token" for ids, "patch" for pixels."""
        if isinstance(self.gates_function.layer, nn.Embedding):
            return "token"
        return "patch" if self.ids.is_floating_point() or self.ids.shape != self.held.shape else "token"

    @property
    def always_frozen(self) -> Tensor:
        """Tokens that are frozen in all texts, (T,)."""
        return self.held.all(0)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of `TokenGates` after the gates."""
        held = None if torch.equal(self.held, self.always_frozen.expand_as(self.held)) else self.held
        return (self.ids, self.baseline, held, *self.others)

    def check_target(self, target: Any) -> None:
        """Raise if a target reads a position that attention_mask excludes, or if a continuation is not in the text."""
        if is_predicted(target):
            return
        rows = targets.entries(target, len(self.ids))
        kind = targets.kind(rows)
        if rows is None or (kind == "entry" and rows.shape[1] != 2) or (kind == "contrast" and rows.shape[1] != 5):
            return
        if self.written is None:
            return
        tokens = self.written.shape[1]
        t, token = targets.positions(rows, tokens, kind)
        if bool((t < 0).any()) or bool((t >= tokens).any()):
            return  # an output may have other positions than the input; its shape is checked after the first call
        if kind == "continuation" and not torch.equal(self.written.cpu().gather(1, t[:, :-1] + 1), token[:, :-1]):
            raise ValueError(
                "input_ids must contain the continuation up to its last token, at its position; for an encoder–decoder "
                "model decoder_input_ids. Append it to the texts, and freeze its tokens, or pass start."
            )
        mask = self.mask.cpu().bool() if isinstance(self.mask, Tensor) else torch.ones(self.written.shape).bool()
        if mask.shape == self.written.shape and not bool(mask.gather(1, t).all()):
            raise ValueError(
                "the target position of a text is padding: attention_mask is 0 there. Pass one position per text, such "
                "as target=[(length − 1, token), …]."
            )


def _text_of_outputs(named: Mapping[str, Any], ids: Tensor, held: Tensor) -> tuple[Tensor | None, Any]:
    """The text whose positions the outputs have, and its attention mask: that of the decoder, if there is one."""
    if any(name.startswith("decoder_") for name in named):
        decoded, mask = named.get("decoder_input_ids"), named.get("decoder_attention_mask")
        if isinstance(decoded, Tensor) and decoded.ndim == 2 and len(decoded) in (1, len(ids)):
            return decoded.expand(len(ids), -1), mask
        return None, mask
    return (ids if ids.shape == held.shape else None), named.get("attention_mask")


def _rows(ids: Tensor, others: Sequence[Any], rows: slice) -> tuple[Any, ...]:
    """The arguments of some of the texts: tensors with one row per text are indexed."""
    follows = [isinstance(a, Tensor) and a.ndim > 0 and len(a) == len(ids) for a in others]
    return (ids[rows], *(a[rows] if f else a for a, f in zip(others, follows, strict=True)))


def _without_frozen(frozen: Tensor, d: int, sigma: Any, radius: Any, gaussian: Any) -> Diagonal:
    """The Gaussian of `sigma` or `radius` with standard deviation 0 for the features of frozen tokens."""
    if gaussian is not None:
        raise ValueError("frozen tokens cannot be combined with gaussian. Pass sigma, or a Gaussian that freezes them.")
    moving = (~frozen).double().cpu().repeat_interleave(d // len(frozen))
    count = int(moving.sum())
    if radius is not None or sigma is None:
        return Diagonal(Gaussian.ensure(sigma=sigma, radius=radius, d=count).scales(1)[0] * moving)
    return Diagonal(Gaussian.ensure(sigma=sigma, radius=radius, d=d).scales(d) * moving)


def _refuse_all_frozen(held: Tensor) -> None:
    """Raise ValueError if nothing of a text would be perturbed; `held` are the frozen tokens (B, T)."""
    entirely = held.all(1)
    if bool(entirely.any()):
        raise ValueError(
            f"all {held.shape[1]} tokens are frozen in text {int(entirely.int().argmax())}: nothing would be "
            "perturbed. Freeze fewer of them, or leave out the text."
        )


def _refuse_baseline_of_the_text(vectors: Tensor, baseline: Tensor | None, held: Tensor) -> None:
    """Raise ValueError if the gates of the first text move nothing: e = b for all of its tokens that are not frozen."""
    tokens, b = vectors.shape[1], vectors.mean(1, keepdim=True) if baseline is None else baseline[:1]
    if bool(((vectors == b).all(2) | held[:1]).all()):
        raise ValueError(
            f"the baseline equals the embeddings of all {tokens} token(s) of the first text, so gates do not move "
            'them. Pass another baseline, such as "zero", or the id of a mask or padding token.'
        )


def _group_ids(mask: Any) -> Tensor | None:
    """feature_mask as a tensor."""
    try:
        return None if mask is None else torch.as_tensor(mask)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            "feature_mask must be one integer per token, (T,) or (B, T), the index of its group. Where word_ids() of a "
            "tokenizer is None, use a separate group, and freeze these tokens."
        ) from error


def _names(names: Any, batch: int, count: int) -> tuple[tuple[str, ...], ...] | None:
    """The names of the features of each text."""
    if names is None:
        return None
    shared = isinstance(names, str) or all(isinstance(name, str) for name in names)
    each = [names] * batch if shared else list(names)
    if not shared and any(isinstance(one, str) or not isinstance(one, Iterable) for one in each):
        kinds = sorted({type(one).__name__ for one in each})
        raise TypeError(f"names must be {count} strings, or {batch} lists of them, got {' and '.join(kinds)}.")
    if len(each) != batch:
        raise ValueError(f"names must be {count} strings, or {batch} lists of them, got {len(each)} lists.")
    return tuple(name_each(one, count) for one in each)


def _refuse_first_argument(args: Any) -> None:
    again = [name for name in ("input_ids", "pixel_values") if isinstance(args, Mapping) and name in args]
    if again:
        raise ValueError(
            f"additional_forward_args contain {again[0]!r}, which is the first argument of the model. Leave it out."
        )


@contextmanager
def _advising_on_masks(named: Mapping[str, Any], ids: Tensor) -> Iterator[None]:
    """Raise ValueError in place of an error of the model if its attention mask has another shape than the texts."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        mask = named.get("attention_mask")
        if isinstance(mask, Tensor) and ids.ndim == 2 and mask.ndim < 3 and mask.shape != ids.shape:
            raise ValueError(
                f"the model fails with an attention_mask of shape {tuple(mask.shape)}: expected one entry per token, "
                f"{tuple(ids.shape)}. Pad the mask as the texts."
            ) from error
        raise


def _refuse_cache(named: Mapping[str, Any], plain: Sequence[Any]) -> None:
    if named.get("past_key_values") is not None or any(hasattr(a, "get_seq_length") for a in (*plain, *named.values())):
        raise ValueError(
            "a cache of keys and values was passed, which each call of the model extends, and whose tokens have no "
            "gates. Pass the entire text as input_ids, without past_key_values."
        )


def _advise_against_cache(output: Any) -> None:
    cache = output.get("past_key_values") if isinstance(output, Mapping) else getattr(output, "past_key_values", None)
    if cache is not None:
        warnings.warn(
            "the model returns a cache of keys and values, which takes memory and is not used. Switch it off: "
            'additional_forward_args={"use_cache": False}, or model.config.use_cache = False.',
            stacklevel=4,
        )


def _refuse_padding_without_mask(
    layer: nn.Module, ids: Tensor, named: Mapping[str, Any], plain: Sequence[Any], frozen: Any
) -> None:
    padding = layer.padding_idx if isinstance(layer, nn.Embedding) else None
    masked = frozen is not None or bool(plain) or any("mask" in name for name in named)
    if padding is not None and not masked and bool((ids == padding).any()):
        raise ValueError(
            f"input_ids contain padding (id {padding}), but neither an attention mask nor frozen tokens were passed. "
            'Pass additional_forward_args={"attention_mask": …}, or '
            f"frozen=[{padding}] if the model itself masks padding."
        )
