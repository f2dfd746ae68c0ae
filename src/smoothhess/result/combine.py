"""Selection, concatenation and merging of results, and the settings in which results must agree.

The statistics themselves are selected, concatenated and merged in `smoothhess.estimate.statistics`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from smoothhess.estimate.hessian_estimate import HessianEstimate
from smoothhess.estimate.statistics import merge
from smoothhess.result.result import Result

R = TypeVar("R", bound=Result)
S = TypeVar("S")
T = TypeVar("T")
Sampled = Any  # a `SampledResult`: its methods call these functions

PER_EXAMPLE = ("n_passes", "precision_error", "control_weights")  # tensors (B, …) in addition to inputs and target


def selected(result: R, chosen: Tensor, **source: Any) -> R:
    """The examples at indices on the CPU; `source` is the field that holds the numbers, already selected."""
    where = chosen.to(result.device)
    tensors = {name: t[where] for name, t in _tensors(result).items()}
    return replace(
        result,
        inputs=result.inputs[where],
        target=None if result.target is None else result.target[chosen],
        status=tuple(result.status[i] for i in chosen.tolist()),
        names=None if result.names is None else tuple(result.names[i] for i in chosen.tolist()),
        **tensors,
        **source,
    )


def moved(result: R, device: torch.device | str, **source: Any) -> R:
    """The result on another device; `source` is the field that holds the numbers, already moved."""
    tensors = {name: t.to(device) for name, t in _tensors(result).items()}
    return replace(result, inputs=result.inputs.to(device), **tensors, **source)


def concatenated(results: Sequence[R], **source: Any) -> R:
    """Concatenate results with equal settings; `source` is the field that holds the numbers, already concatenated."""
    targets = [r.target for r in results if r.target is not None]
    errors = [r.precision_error for r in results if r.precision_error is not None]
    return replace(
        results[0],
        inputs=torch.cat([r.inputs for r in results]),
        target=torch.cat(targets) if len(targets) == len(results) else None,
        n_passes=torch.cat([r.n_passes for r in results]),
        status=tuple(s for r in results for s in r.status),
        **_labels(results),
        feature_kind=results[0].feature_kind if len({r.feature_kind for r in results}) == 1 else "",
        control=next((r.control for r in results if r.control), None),
        control_note=next((r.control_note for r in results if r.control_note), ""),
        unbiased=all(r.unbiased for r in results),
        precision_error=torch.cat(errors) if errors else None,
        **source,
    )


def _labels(results: Sequence[Result]) -> dict[str, Any]:
    """Names of features and outputs of concatenated results."""
    columns = [r for r in results if not r.feature_kind]
    shared = agreed(columns, "names of features", lambda r: None if r.names is None else r.names[0])
    each = [r.names if r.feature_kind else None if shared is None else (shared,) * len(r) for r in results]
    return {
        "names": None if any(n is None for n in each) else tuple(name for n in each for name in n or ()),
        "classes": agreed(results, "names of classes", lambda r: r.classes),
        "unit": agreed(results, "units of the output", lambda r: r.unit or None) or "",
        "predicted": all(r.predicted for r in results),
    }


def agreed(results: Sequence[S], what: str, read: Callable[[S], T | None]) -> T | None:
    """The value that all results agree on, of those that have one; raises ValueError if two values differ."""
    values = [value for r in results if (value := read(r)) is not None]
    for value in values[1:]:
        if value != values[0]:
            raise ValueError(
                f"the results have different {what}: {_start(values[0])} and {_start(value)}. Combine results of the "
                "same columns and classes, in the same order."
            )
    return values[0] if values else None


def _start(value: Any) -> str:
    """The beginning of a list of names, or another value, for errors."""
    return f"{', '.join(map(repr, value[:4]))}{', …' if len(value) > 4 else ''}" if isinstance(value, tuple) else value


def concatenate_sampled(first: Sampled, results: Sequence[Result]) -> Sampled:
    """Concatenate sampled results of one kind, of which `first` is the first."""
    alike = same_settings(first, results)
    return concatenated(
        alike,
        estimate=HessianEstimate.cat([r.estimate for r in alike]),
        control_weights=_weights(alike),
        control_rank=next((r.control_rank for r in alike if r.control_rank is not None), None),
        tau_probes=next((r.tau_probes for r in alike if r.tau_probes is not None), None),
    )


def same_settings(first: R, results: Sequence[Result]) -> list[R]:
    """The results, if all have the kind and the settings of `first`."""
    for result in results:
        refuse_other_version(first, result)
        if differ := differences(first, result):
            raise ValueError(f"results with different settings cannot be concatenated; they differ in {differ[0]}.")
    return [r for r in results if isinstance(r, type(first))]


def merge_sampled(a: Sampled, b: Sampled) -> Sampled:
    """Merge two results of the same inputs from different draws, as if they were one run.

    Statistics and passes are added; a field that is not set below is that of `a`. The statistics refuse shared draws.
    """
    if type(b) is not type(a):
        raise ValueError(
            f"only two Interactions can be merged, got {type(b).__name__}: it was not sampled, or was computed from "
            "other results. To concatenate different examples use Interactions.cat."
        )
    refuse_other_version(a, b)
    differ = differences(a, b)
    if not differ and a.grouping is not None and not a.grouping.same_as(b.grouping):
        differ = ["groups"]
    if not differ and not torch.equal(a.inputs, b.inputs):
        differ = ["inputs"]
    if differ:
        raise ValueError(
            "only results of the same inputs with the same settings can be merged; these differ in "
            f"{', '.join(differ)}."
        )
    if not torch.allclose(a.output, b.output, rtol=1e-4, atol=1e-6):
        raise ValueError("the outputs of the two results differ: they come from different models or targets.")
    features = a.inputs[0].numel() if a.grouping is None else None
    return replace(
        a,
        estimate=a.estimate.with_statistics(merge(a.statistics, b.statistics, features)),
        control=a.control or b.control,
        control_weights=a.control_weights if a.control else b.control_weights,
        control_rank=a.control_rank if a.control else b.control_rank,
        tau_probes=a.tau_probes if a.control else b.tau_probes,
        control_note="" if a.control or b.control else a.control_note or b.control_note,
        precision_error=_larger(a.precision_error, b.precision_error),
        unbiased=a.unbiased and b.unbiased,
        names=agreed([a, b], "names of features", lambda r: r.names),
        classes=agreed([a, b], "names of classes", lambda r: r.classes),
        unit=agreed([a, b], "units of the output", lambda r: r.unit or None) or "",
        n_passes=a.n_passes + b.n_passes,
        status=tuple(s if s == t else "calls" for s, t in zip(a.status, b.status, strict=True)),
    )


def refuse_other_version(a: Result, b: Result) -> None:
    """Raise if two results were made by different versions of the estimator."""
    if a.estimator_version != b.estimator_version:
        raise ValueError(
            f"the results were made by versions {a.estimator_version} and {b.estimator_version} of the estimator, "
            "whose numbers are not comparable. Rerun the older one with this version of smoothhess."
        )


def differences(a: Result, b: Result) -> list[str]:
    """The settings in which two results differ, as text."""

    def settings(r: Result) -> dict[str, object]:
        return {
            "kind": type(r).__name__,
            "design": r.design,
            "feature shape": r.feature_shape,
            "input shape": tuple(r.inputs.shape[1:]),
            "inputs": r.input_parts and [(part.name, part.shape) for part in r.input_parts],
            "dtype": r.dtype,
            "shrink": r.shrink,
            "precision": r.precision,
            "grouped": r.grouping is not None,
        }

    mine, other = settings(a), settings(b)
    found = [f"{name} ({mine[name]} and {other[name]})" for name in mine if mine[name] != other[name]]
    return found if a.gaussian.same_as(b.gaussian) else [*found, f"Gaussian ({a.gaussian_text} and {b.gaussian_text})"]


def _tensors(result: Result) -> dict[str, Tensor]:
    """The tensors of PER_EXAMPLE that a result has."""
    return {name: t for name in PER_EXAMPLE if isinstance(t := getattr(result, name, None), Tensor)}


def _larger(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The larger of two errors, where None is unknown."""
    return b if a is None else a if b is None else torch.maximum(a, b)


def _weights(results: Sequence[Sampled]) -> Tensor | None:
    """`control_weights` of all examples; zero for results without a control variate."""
    like = next((r.control_weights for r in results if r.control_weights is not None), None)
    if like is None:
        return None
    return torch.cat([like.new_zeros(len(r), 2) if (w := r.control_weights) is None else w for r in results])
