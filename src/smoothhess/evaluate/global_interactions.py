"""Streaming of interactions over a data set: each record is explained from its own draws, and only sums are kept.

The accumulated result belongs in `global_summary.py`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from smoothhess.draws.designs import find_design
from smoothhess.draws.gaussian import Gaussian
from smoothhess.draws.seeding import derived_seeds
from smoothhess.evaluate.global_summary import GlobalInteractions, Moments, sign
from smoothhess.explainers.progress import Progress
from smoothhess.explainers.result_warnings import FewEventsWarning
from smoothhess.explainers.smooth_hess import SmoothHess
from smoothhess.linalg.memory import FLOAT64_CHUNK
from smoothhess.model import targets as targets
from smoothhess.model.convert_inputs import column_names, is_array, to_tensors
from smoothhess.model.gradients import check_inputs
from smoothhess.model.model_call import ModelCall, is_predicted
from smoothhess.result.exact import StoredResult
from smoothhess.result.result import Result

LEAST_CALLS, MOST_CALLS = 64, 1024  # per record when n_calls is None; the noise averages out over records
MOST_RECORDS = 256  # largest number of records in a chunk
MOST_FEATURES = 4096  # ten (F, F) matrices are kept and about as many are temporary: 3 GB

Explain = Callable[[Tensor, Any, list[int]], Result]  # inputs, target, one seed per record → result


def global_interactions(
    explainer: SmoothHess | Explain,
    batches: Any,
    *,
    target: Any = None,
    additional_forward_args: Any = None,
    feature_mask: Tensor | None = None,
    sigma: Any = None,
    radius: float | None = None,
    gaussian: Gaussian | None = None,
    n_calls: int | None = None,
    seed: int = 0,
    first_record: int = 0,
    show_progress: bool | None = None,
    **options: Any,
) -> GlobalInteractions:
    """Interactions over a data set, accumulated in one pass; memory holds a few (F, F) matrices for any data set.

    Every record is explained twice from independent draws, which are a function of (seed, number of the record) only.
    The standard errors over records therefore include the sampling noise, and the batch size does not change the
    result.

    Args:
        explainer: `SmoothHess(model)`, or a function (inputs, target, seeds) → Interactions that uses a separate seed
            for each record. A function whose results hold no draws (baselines without seed=seeds) is called once.
        batches: a tensor, array or DataFrame (N, *shape), or an iterable of batches: tensors, or tuples that begin with
            the inputs, such as a DataLoader.
        target: the output to explain; see `smoothhess.model.targets`. "predicted" is the largest output of each record;
            a function is called with the batch, `target(inputs)` or `target(*batch)` (lambda x, y: y takes labels);
            for a tensor of N records it may also hold one target per record.
        additional_forward_args: further arguments of the model, the same for all batches, or a function of the batch as
            for target; tensors with one row per record are split with the records.
        feature_mask: integer group ids with the shape of one input; interactions are then between groups, without
            matrices of size d × d.
        sigma, radius, gaussian: see `SmoothHess.attribute`; exactly one of the three.
        n_calls: gradient calls per record, for both estimates in total. None takes complete blocks of the orthogonal
            design, a multiple of 4d from 64 up to 1024. The noise averages out over records without bias, so more
            records reduce the error more than more calls.
        seed: seed of all draws.
        first_record: number of the first record, for a data set that is processed in parts and merged.
        show_progress: whether to show a progress bar; None: as in `SmoothHess.attribute`.
        options: other options of `SmoothHess.attribute`: names, design, control, internal_batch_size, precision, …

    Returns:
        A GlobalInteractions with mean H, mean |H| and E[H²] of every pair and standard errors over records.

    Raises:
        TypeError: if the explainer or a batch has another type.
        ValueError: if there are no batches, too many features, or options that conflict with unbiased estimates from a
            fixed number of calls.

    >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)).double()
    >>> x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0)).double()
    >>> found = global_interactions(SmoothHess(net), x, sigma=0.5)
    >>> found.mean_square.value.shape, len(found), len(found.top_pairs(3))
    (torch.Size([4, 4]), 100, 3)
    >>> parts = [global_interactions(SmoothHess(net), x[i : i + 50], sigma=0.5, first_record=i) for i in (0, 50)]
    >>> torch.allclose(parts[0].merge(parts[1]).mean.value, found.mean.value)
    True
    """
    for number, name in ((seed, "seed"), (first_record, "first_record")):
        if isinstance(number, bool) or not hasattr(number, "__index__") or number < 0:
            raise ValueError(f"{name} must be an integer, 0 or more, got {number!r}.")
    if not callable(target):
        target = targets.by_class_name(target, options.get("classes"))
    attribute_options = {"sigma": sigma, "radius": radius, "gaussian": gaussian, "n_calls": n_calls, **options}
    columns = column_names(batches)
    if columns is not None and feature_mask is None and isinstance(explainer, SmoothHess):
        attribute_options.setdefault("names", columns)
    maker = _Maker(explainer, additional_forward_args is not None, feature_mask, attribute_options)
    if is_array(batches):
        batches = to_tensors(batches, explainer.forward_func if isinstance(explainer, SmoothHess) else explainer)
    total: GlobalInteractions | None = None
    record = int(first_record)
    length = len(batches) if isinstance(batches, Tensor) else None
    with Progress(show_progress, length, "global interactions", "records") as bar:
        for inputs, rows, args in _batches(batches, target, additional_forward_args, maker):
            if total is not None and inputs.shape[1:] != maker.shape:
                raise ValueError(f"all batches must hold inputs of one shape, {maker.shape}, got {inputs.shape[1:]}.")
            for part in _split(len(inputs), maker.at_once(inputs)):
                seeds = [record_seeds(int(seed), record + i) for i in range(part.stop - part.start)]
                chunk = maker(inputs[part], _rows(rows, part), _arguments(args, part, len(inputs)), seeds)
                chunk = replace(chunk, segments=((int(seed), record, record + len(seeds)),))
                total = chunk if total is None else total.merge(chunk)
                record += len(seeds)
                bar.update(len(seeds))
    if total is None:
        raise ValueError("expected at least one batch, got none. Pass a new iterator if this one is exhausted.")
    return total


class _Maker:
    """Explains a chunk of records, twice if the explainer samples, and summarises the results."""

    def __init__(self, explainer: Any, with_args: bool, mask: Tensor | None, options: dict[str, Any]) -> None:
        self.explainer, self.mask, self.options = explainer, mask, options
        self.shape: tuple[int, ...] = ()
        if isinstance(explainer, SmoothHess):
            taken = sorted({"shrink", "tol", "max_calls", "tau_probes"} & options.keys())
            if taken:
                raise ValueError(
                    f"{', '.join(taken)} cannot be chosen here: means over records need unbiased estimates from a "
                    "fixed number of calls. Leave it out."
                )
            return
        if isinstance(explainer, nn.Module) or not callable(explainer):
            raise TypeError(
                "explainer must be SmoothHess(model) or a function (inputs, target, seeds) → Interactions, got "
                f"{type(explainer).__name__}."
            )
        given = sorted(name for name, value in options.items() if value is not None)
        if given or with_args:
            raise ValueError(
                f"{', '.join(given) or 'additional_forward_args'} cannot be passed on to a function. Set it inside the "
                "function, lambda x, target, seeds: …"
            )

    def at_once(self, inputs: Tensor) -> int:
        """Number of records per chunk; it does not change the result."""
        check_inputs(inputs)
        d = inputs[0].numel()
        features = d
        if self.mask is not None:
            mask = torch.as_tensor(self.mask)
            if mask.ndim >= inputs.ndim and len(mask) != 1:
                raise ValueError(
                    f"feature_mask must have the shape of one input, {tuple(inputs.shape[1:])}: groups are the same "
                    f"for all records, got {tuple(mask.shape)}."
                )
            features = int(mask.max()) + 1
        if features > MOST_FEATURES:
            raise ValueError(
                f"{features} features are too many for matrices of all pairs ({MOST_FEATURES} at most). Pass "
                "feature_mask with at most that many groups."
            )
        rows = (self.options.get("n_calls") or MOST_CALLS) * 2 * inputs.element_size()  # draws and gradients
        return min(MOST_RECORDS, FLOAT64_CHUNK.items(8 * 8 * features**2 + rows * d, inputs.device))

    def __call__(self, inputs: Tensor, target: Any, args: Any, seeds: Sequence[tuple[int, int]]) -> GlobalInteractions:
        """The summary of these records."""
        self.shape = tuple(inputs.shape[1:])
        drawn, again = ([s[i] for s in seeds] for i in (0, 1))
        first = self._explain(inputs, target, args, drawn)
        sampled = not isinstance(first, StoredResult) or first.seeds == tuple(
            drawn
        )  # otherwise the result is deterministic
        results = [first, self._explain(inputs, target, args, again)] if sampled else [first]
        one, two = (unbiased_features(r) for r in (results[0], results[-1]))
        mean = (one + two) / 2
        values = {
            "mean": mean,
            "square": one * two,
            "abs": (sign(one, two, first.dtype) * two + sign(two, one, first.dtype) * one) / 2,
            "abs_upper": mean.abs(),
            "noise": ((one - two) / 2).square(),
        }
        method = first.method if isinstance(first, StoredResult) else f"SmoothHess {first.gaussian_text}"
        return GlobalInteractions(
            moments={name: Moments.of(v) for name, v in values.items()},
            scales=first.feature_scales[0].double().cpu(),
            feature_shape=first.feature_shape,
            segments=(),
            method=method,
            n_calls=sum(int(r.n_calls.sum()) for r in results),
            n_passes=sum(float(r.n_passes.sum()) for r in results),
            names=None if first.names is None or first.feature_kind else first.names[0],
        )

    def _explain(self, inputs: Tensor, target: Any, args: Any, seeds: list[int]) -> Result:
        if isinstance(self.explainer, SmoothHess):
            options = {**self.options, "n_calls": self._half(inputs[0].numel())}
            with warnings.catch_warnings():  # the errors of single records are not used
                warnings.filterwarnings("ignore", ".*standard errors? (is|are) unreliable", FewEventsWarning)
                return self.explainer.attribute(
                    inputs, target, args, feature_mask=self.mask, seed=seeds, shrink=False, **options
                )
        result = self.explainer(inputs, target, seeds)
        if not isinstance(result, Result) or len(result) != len(inputs):
            raise ValueError(
                f"the explainer must return Interactions of the {len(inputs)} inputs that it was called with, got "
                f"{f'{len(result)} examples' if isinstance(result, Result) else type(result).__name__}."
            )
        return result if self.mask is None else result.groups(self.mask)

    def _half(self, d: int) -> int:
        """Gradient calls of one of the two estimates."""
        n_calls = self.options["n_calls"]
        if n_calls is None:  # complete blocks, which are exact for a quadratic
            block = 2 * find_design("orthogonal").block_rows(d)
            return min(block * math.ceil(LEAST_CALLS / 2 / block), MOST_CALLS // 2)
        step = 4 if find_design(self.options.get("design", "orthogonal")).mirrored else 2
        if isinstance(n_calls, bool) or not hasattr(n_calls, "__index__") or n_calls < 4 or n_calls % step:
            raise ValueError(
                f"n_calls must be a multiple of {step}, at least 4: two independent estimates share them"
                f"{' in ± pairs' if step == 4 else ''}, got {n_calls!r}."
            )
        return int(n_calls) // 2

    def predicted(self, inputs: Tensor, args: Any) -> Tensor:
        """Index of each record's largest output."""
        if not isinstance(self.explainer, SmoothHess):
            raise ValueError('target="predicted" needs SmoothHess(model). Pass a function of the batch instead.')
        rows = self.options.get("internal_batch_size")
        return ModelCall(self.explainer.forward_func, inputs, "predicted", args, rows).target


def unbiased_features(result: Result) -> Tensor:
    """The unbiased estimate of the Hessian, (B, F, F) float64."""
    return result.unshrunk().hessian.double()


def _batches(
    batches: Any, target: Any, args: Any, maker: _Maker
) -> Iterator[tuple[Tensor, list[tuple[int, ...]] | None, Any]]:
    """Inputs, target indices and additional arguments of each batch."""
    if isinstance(batches, Tensor):
        check_inputs(batches)
        items: Iterable[Any] = [(batches,)]
    elif isinstance(batches, str | dict) or not isinstance(batches, Iterable):
        remedy = " Pass a DataLoader of it." if hasattr(batches, "__getitem__") and not isinstance(batches, str) else ""
        raise TypeError(f"batches must be a tensor or an iterable of batches, got {type(batches).__name__}.{remedy}")
    else:
        items = batches
    for item in items:
        batch = tuple(item) if isinstance(item, tuple | list) else (item,)
        inputs = batch[0] if batch else None
        if not isinstance(inputs, Tensor):
            raise TypeError(
                "a batch must be a tensor, or a tuple that begins with one, got "
                f"{type(item).__name__ if inputs is item else f'a tuple that begins with {type(inputs).__name__}'}. "
                "Map it to its inputs: (b['x'] for b in loader)."
            )
        check_inputs(inputs)
        own = args(*batch) if callable(args) else args
        if is_predicted(target):
            chosen: Any = maker.predicted(inputs, own)
        else:
            chosen = target(*batch) if callable(target) else target
        rows = targets.entries(chosen, len(inputs))
        yield inputs, None if rows is None else [tuple(r) for r in rows.tolist()], own


def _split(n: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


def _rows(rows: list[tuple[int, ...]] | None, part: slice) -> list[tuple[int, ...]] | None:
    return None if rows is None else rows[part]


def _arguments(args: Any, part: slice, batch: int) -> tuple[Any, ...] | None:
    """The additional arguments for a slice of the records of a batch."""
    if args is None:
        return None
    given = args if isinstance(args, tuple) else (args,)
    return tuple(a[part] if isinstance(a, Tensor) and a.ndim and len(a) == batch else a for a in given)


def record_seeds(seed: int, record: int) -> tuple[int, int]:
    """The seeds of the two independent estimates of a record."""
    first, second = derived_seeds((seed, record), 2)
    return first, second
