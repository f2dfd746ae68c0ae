"""The `target` argument: which scalar of the output of a model is explained.

All functions of the library accept the forms of Captum, for an output of shape (N, …):

    None                 the output has shape (N,) or (N, 1)
    int                  the same column for every example, output (N, C)
    tuple of ints        the same entry for every example, output with more dimensions
    list of B ints, or a tensor of B (or 1) integers     one column per example
    list of B tuples     one entry per example
    contrast(a, b)       the difference of two outputs; a and b have one of the forms above
    "predicted"          the class with the largest output of each example, output (N, C)
    "cat"                the output of that name, where `classes` are passed
    continuation(ids)    the log-probability that a text continues with these tokens, output (N, T, V) of logits

The logit of a token at a position of a text is the tuple (position, token).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

# The last index of a row that is not an entry of the output; no output has as many columns.
_CONTRAST, _CONTINUATION = -(2**40), -(2**40) - 1
_END = 2**40  # start of a continuation at the end of the text

PREDICTED = "predicted"  # the target "class with the largest output"

Kind = Literal["entry", "contrast", "continuation"]


@dataclass(frozen=True)
class Contrast:
    """The difference of two outputs; created by `contrast`."""

    a: Any
    b: Any


@dataclass(frozen=True, eq=False)
class Continuation:
    """The log-probability of a continuation; created by `continuation`."""

    ids: Any
    start: Any


def contrast(a: Any, b: Any) -> Contrast:
    """The target "output a minus output b", for every explainer.

    Args:
        a: an int, a tuple of ints, a list of them or a tensor, as any other target.
        b: likewise, with the same number of indices.

    Returns:
        A target.

    >>> import smoothhess as sh
    >>> f = lambda x: torch.stack([x.prod(1), x.square().sum(1)], 1)
    >>> result = sh.SmoothHess(f).attribute(torch.ones(1, 2).double(), contrast(0, 1), sigma=0.1, n_calls=40)
    >>> result.hessian.round(decimals=6)
    tensor([[[-2.,  1.],
             [ 1., -2.]]], dtype=torch.float64)
    """
    return Contrast(a, b)


def continuation(ids: Any, start: Any = None) -> Continuation:
    """The target "log-probability that the text continues with these tokens", of a causal language model.

    The model returns logits (N, T, V), of which position t predicts token t + 1. The target is the sum of the
    log-probabilities of `ids` at the positions start − 1, start, …; all but the last of these tokens are part of the
    input, which `TokenSmoothHess` checks.

    Args:
        ids: n token ids, or (B, n) for one continuation per example.
        start: position of the first token of the continuation, or B positions; None for texts that end with the
            continuation. The length T of the text makes `continuation([token], T)` the next token.

    Returns:
        A target.

    Raises:
        ValueError: by explainers, if a position is not in the text or an id is not in the vocabulary.

    >>> import smoothhess as sh
    >>> logits = lambda x: torch.stack([x.cumsum(1), 0 * x], 2)  # (N, T, 2)
    >>> result = sh.SmoothHess(logits).attribute(torch.zeros(1, 3).double(), continuation([0, 1]), sigma=0.1)
    >>> round(float(result.output.exp()), 6)
    0.25
    """
    return Continuation(ids, start)


def entries(target: Any, batch: int) -> Tensor | None:
    """Convert `target` to a (B, q) tensor of indices into the q trailing output dimensions, or None.

    >>> entries([3, 1], 2)
    tensor([[3],
            [1]])
    """
    if target is None:
        return None
    if isinstance(target, Contrast):
        return _contrasted(target, batch)
    if isinstance(target, Continuation):
        return _continued(target, batch)
    if isinstance(target, np.ndarray) or hasattr(target, "to_numpy"):
        target = torch.from_numpy(np.array(target))
    if isinstance(target, Tensor):
        if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
            raise TypeError(f"target must hold integers, got a tensor of {target.dtype}.")
        flat = target.detach().cpu().reshape(-1)
        if target.ndim > 1 and target.shape[-1] != target.numel():
            raise ValueError(
                f"a target tensor must hold one index per example, ({batch},), got shape {tuple(target.shape)}. "
                "Squeeze it."
            )
        target = int(flat) if flat.numel() == 1 else flat.tolist()
    if _is_index(target):
        rows = [(int(target),)] * batch
    elif isinstance(target, tuple) and all(map(_is_index, target)) and target:
        rows = [tuple(map(int, target))] * batch
    elif isinstance(target, Sequence) and not isinstance(target, str | tuple) and len(target) == 0:
        raise ValueError("target is empty. Pass one index per example, or one for all.")
    elif isinstance(target, Sequence) and not isinstance(target, str | tuple):
        if not all(map(_is_index, target)) and not all(isinstance(t, tuple) and all(map(_is_index, t)) for t in target):
            raise TypeError("a list of targets must hold ints, or tuples of ints, one per example.")
        rows = [tuple(map(int, t)) if isinstance(t, tuple) else (int(t),) for t in target]
        if len(rows) != batch:
            raise ValueError(f"expected one target per example, got {len(rows)} targets for {batch} examples.")
        if len({len(r) for r in rows}) != 1:
            raise ValueError("all targets must index the same number of output dimensions: use tuples of one length.")
    else:
        raise TypeError(
            f"target must be None, an int, a tuple of ints, a list of them, an integer tensor, contrast(a, b) or "
            f"continuation(ids), got {type(target).__name__}."
        )
    return torch.tensor(rows, dtype=torch.long)


def _contrasted(target: Contrast, batch: int) -> Tensor:
    """The indices of a, those of b, and _CONTRAST, (B, 2q + 1)."""
    a, b = (entries(t, batch) for t in (target.a, target.b))
    if a is None or b is None or a.shape != b.shape or any(kind(t) != "entry" for t in (a, b)):
        raise ValueError(
            "contrast(a, b) needs two targets with the same number of indices, such as contrast(3, 5) or "
            "contrast((-1, 17), (-1, 42))."
        )
    if bool((same := (a == b).all(1)).any()):
        raise ValueError(f"contrast(a, b) needs two different outputs, got {described(a[same][0].tolist())} twice.")
    return torch.cat([a, b, torch.full((batch, 1), _CONTRAST)], 1)


def _continued(target: Continuation, batch: int) -> Tensor:
    """The start, the ids, and _CONTINUATION, (B, n + 2)."""
    ids = torch.as_tensor(target.ids).detach().cpu()
    if ids.is_floating_point() or ids.dtype == torch.bool or ids.ndim not in (1, 2) or not ids.numel():
        raise ValueError(
            f"continuation(ids) needs token ids (n,) or (B, n), got shape {tuple(ids.shape)} of {ids.dtype}."
        )
    start = torch.as_tensor(_END if target.start is None else target.start).detach().cpu().reshape(-1, 1)
    ids = ids.reshape(-1, ids.shape[-1]).long()
    if len(ids) not in (1, batch) or len(start) not in (1, batch):
        raise ValueError(
            f"expected one continuation and one start for all examples, or one per example, got {len(ids)} and "
            f"{len(start)} for {batch} examples."
        )
    parts = start.long(), ids, torch.tensor([[_CONTINUATION]])
    return torch.cat([part.expand(batch, -1) for part in parts], 1)


def check_entries(rows: Tensor) -> None:
    """Raise ValueError if a tensor that was read from a file cannot come from `entries`.

    >>> check_entries(entries(contrast(1, 0), 2))
    >>> check_entries(torch.zeros(2, 0, dtype=torch.long))
    Traceback (most recent call last):
    ValueError: expected targets (B, q) with at least one index, got (2, 0)
    """
    if rows.ndim != 2 or not rows.shape[1]:
        raise ValueError(f"expected targets (B, q) with at least one index, got {tuple(rows.shape)}")
    of, width = kind(rows), rows.shape[1]
    fits = {"entry": True, "contrast": width >= 3 and width % 2 == 1, "continuation": width >= 3}[of]
    special = rows <= _CONTRAST
    last = rows[:, -1] == rows[0, -1] if of != "entry" else ~special[:, -1]
    if not fits or bool(special[:, :-1].any()) or not bool(last.all()):
        raise ValueError(f"expected targets of one kind with their indices, got {of} rows {tuple(rows.shape)}")


def kind(rows: Tensor | None) -> Kind:
    """What the rows of `entries` select; reads one number, so pass rows on the CPU."""
    last = 0 if rows is None else int(rows[0, -1])
    return "contrast" if last == _CONTRAST else "continuation" if last == _CONTINUATION else "entry"


def positions(rows: Tensor, length: int, of: Kind) -> tuple[Tensor, Tensor]:
    """Positions of a text, (B, n), whose outputs (N, T, V) the target reads, and their tokens; counted from 0.

    >>> positions(entries(continuation([7, 8]), 1), 5, "continuation")
    (tensor([[2, 3]]), tensor([[7, 8]]))
    """
    if of == "continuation":
        ids = rows[:, 1:-1]
        n = ids.shape[1]
        start = torch.where(rows[:, :1] == _END, length - n, rows[:, :1])
        return start - 1 + torch.arange(n, device=rows.device), ids
    halves = rows[:, :-1].unflatten(1, (2, -1)) if of == "contrast" else rows[:, None]  # (B, 1 or 2, q)
    t = halves[..., 0]
    return torch.where(t < 0, t + length, t), halves[..., 1]


def by_class_name(target: Any, classes: Sequence[str] | None) -> Any:
    """A target with names of classes in place of their indices; "predicted" and other targets as they are.

    Raises:
        ValueError: if a string is not the name of one class.
        TypeError: if names are in a tuple, which is the index of one entry of the output.

    >>> by_class_name(["dog", "cat"], ["cat", "dog"]), by_class_name(contrast("cat", "dog"), ["cat", "dog"])
    ([1, 0], Contrast(a=0, b=1))
    """
    if isinstance(target, Contrast):
        if any(isinstance(side, str) and side == PREDICTED for side in (target.a, target.b)):
            raise ValueError(
                f'contrast(a, b) needs the indices or the names of two outputs, got "{PREDICTED}". Compute the '
                "predicted class first: model(x).argmax(1)."
            )
        return Contrast(by_class_name(target.a, classes), by_class_name(target.b, classes))
    if isinstance(target, tuple) and any(isinstance(one, str) for one in target):
        raise TypeError(
            "a tuple is the index of one entry of the output, got one of strings. Pass a list for the class of each "
            "example, or contrast(a, b) for the difference of two classes."
        )
    if not isinstance(target, str | tuple | Tensor) and hasattr(target, "tolist") and _holds_strings(target):
        target = target.tolist()  # labels as scikit-learn and pandas hold them
    if isinstance(target, list):
        return [by_class_name(one, classes) for one in target]
    if not isinstance(target, str) or target == PREDICTED:
        return target
    if classes is None or list(classes).count(target) != 1:
        known = "classes=, a list of names, was not passed" if classes is None else f"the classes are {list(classes)}"
        close = get_close_matches(target, [PREDICTED, *map(str, classes or ())], 1)
        raise ValueError(
            f'target must be "{PREDICTED}", an index, or the name of a class, got {target!r}, but {known}.'
            f"{f' Did you mean {close[0]!r}?' if close and close[0] != target else ''}"
        )
    return list(classes).index(target)


def described(row: Sequence[int], classes: Sequence[str] | Mapping[int, str] | None = None) -> str:
    """The target of one example in words: "3", "cat", "(4, 17)", "3 − 5", "log p(7, 8)".

    >>> described(entries(contrast((4, 17), (4, 9)), 1)[0].tolist())
    '(4, 17) − (4, 9)'
    >>> described(entries(contrast(1, 0), 1)[0].tolist(), ["cat", "dog"])
    'dog − cat'
    """
    names = dict(enumerate(classes)) if isinstance(classes, Sequence) else dict(classes or {})

    def index(numbers: Sequence[int]) -> str:
        one = numbers[0] + len(names) if numbers[0] < 0 else numbers[0]
        return names.get(one, str(numbers[0])) if len(numbers) == 1 else str(tuple(numbers))

    if row[-1] == _CONTRAST:
        half = len(row) // 2
        return f"{index(row[:half])} − {index(row[half:-1])}"
    if row[-1] == _CONTINUATION:
        return f"log p({', '.join(map(str, row[1:-1]))})"
    return index(row)


def _holds_strings(values: Any) -> bool:
    return np.asarray(values).dtype.kind in "UOT"


def _is_index(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_floating_point() and value.dtype != torch.bool
    return hasattr(value, "__index__") and not isinstance(value, bool | np.ndarray)


def check(rows: Tensor | None, output: Tensor) -> None:
    """Raise an error if an (N, …) output cannot be indexed by `rows` (B, q)."""
    if not isinstance(output, Tensor):
        raise TypeError(
            f"the model must return one tensor, got {type(output).__name__}. Pass output='logits', the name of the "
            "field to explain, to the explainer, or wrap the model in a function that returns one tensor."
        )
    shape = tuple(output.shape)
    if rows is None:
        if len(shape) == 1 or (len(shape) == 2 and shape[1] == 1):
            return
        raise ValueError(
            f"without a target the output must be (N,) or (N, 1), got {shape}. Pass target=, the index of the output "
            "to explain."
        )
    if kind(rows) == "contrast":
        for half in rows[:, :-1].chunk(2, 1):
            check(half, output)
        return
    if kind(rows) == "continuation":
        _check_continuation(rows, shape)
        return
    if len(shape) != rows.shape[1] + 1:
        advice = f"Expected {len(shape) - 1}."
        if len(shape) == 1:
            advice = "Pass target=None."
        elif rows.shape[1] == 1:
            index = ", ".join(["-1", *["0"] * (len(shape) - 3), str(int(rows[0, 0]))])
            advice = f"Expected {len(shape) - 1}, such as ({index}) for output {int(rows[0, 0])} at the last position."
        elif len(shape) == 2:
            advice = "Expected 1; the difference of two outputs is contrast(a, b)."
        raise ValueError(f"target has {rows.shape[1]} index(es) per example but the output has shape {shape}. {advice}")
    sizes = torch.tensor(shape[1:])
    outside = ((rows < -sizes) | (rows >= sizes)).any(1)
    if outside.any():
        bad = rows[outside][0].tolist()
        ranges = ", ".join(f"0 … {size - 1}" for size in shape[1:])
        expected = f"({ranges}), such as (position, token)," if len(bad) > 1 else ranges
        raise ValueError(
            f"target {tuple(bad) if len(bad) > 1 else bad[0]} is out of range for an output of shape {shape}. Expected "
            f"{expected} or negative numbers, which count from the end."
        )


def _check_continuation(rows: Tensor, shape: tuple[int, ...]) -> None:
    if len(shape) != 3:
        raise ValueError(f"a continuation needs logits (N, T, V) of a causal language model, got {shape}.")
    t, ids = positions(rows, shape[1], "continuation")
    if bool((t < 0).any()) or bool((t >= shape[1]).any()):
        raise ValueError(
            f"a continuation of {ids.shape[1]} token(s) reads positions {int(t.min())} … {int(t.max())} of {shape[1]}. "
            "The text must contain a token before the continuation, and all of its tokens but the last; start counts "
            "from 0."
        )
    if bool((ids < 0).any()) or bool((ids >= shape[2]).any()):
        raise ValueError(f"a token of the continuation is not in the vocabulary of {shape[2]} tokens.")


def pick(output: Tensor, rows: Tensor | None, of: Kind = "entry") -> Tensor:
    """The (N,) scalars of an (N, …) output that has passed `check`; `rows` (N, q) are the indices of each row."""
    if rows is None:
        return output.reshape(len(output))
    if of == "contrast":
        a, b = rows[:, :-1].chunk(2, 1)
        return pick(output, a) - pick(output, b)
    if of == "continuation":
        t, ids = positions(rows, output.shape[1], of)
        logits = output.gather(1, t[..., None].expand(-1, -1, output.shape[2]))  # (N, n, V)
        return logits.log_softmax(-1).gather(2, ids[..., None]).sum((1, 2))
    return output[(torch.arange(len(output), device=output.device), *rows.unbind(1))]
