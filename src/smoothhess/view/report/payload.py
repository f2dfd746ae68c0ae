"""All that a page shows, as one record of plain values: the numbers of the result, and the words for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from smoothhess._version import __version__
from smoothhess.draws.gaussian import SegmentShift
from smoothhess.result.exact import Attribution
from smoothhess.view.captions import noise_sentence
from smoothhess.view.figures import canvas
from smoothhess.view.report import encoding, feature_layout
from smoothhess.view.report.example_numbers import numbers
from smoothhess.view.report.feature_layout import Layout
from smoothhess.view.report.quality_levels import LIMITS

if TYPE_CHECKING:
    from smoothhess.result.interactions import Interactions

MOST_FEATURES = 512  # a page with more could neither be looked at nor be opened quickly
MOST_BYTES = 64e6  # of numbers in one page
NAMES_OF_KINDS = {"image": "parts of the image", "series": "intervals", "table": "features"}


def payload(
    result: Interactions,
    *,
    example: int | Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    image: Any = None,
    segments: Any = None,
    series: Any = None,
    classes: Sequence[str] | Mapping[int, str] | str | None = None,
    output: str = "output",
    title: str | None = None,
    headings: Sequence[str] | None = None,
    sweep: Sequence[Interactions] | None = None,
    values: Any = None,
    units: Sequence[str] | Mapping[str, str] | str | None = None,
    note: str = "",
    scales: Tensor | None = None,
    level: float = 0.95,
    q: float = 0.05,
    kind: str | None = None,
) -> dict[str, Any]:
    """What `report` writes into the page; the options are explained there."""
    count = len(result)
    chosen = _chosen(example, count)
    regroup = _regrouping(result, segments, kind, series)
    results = _every_scale(result, sweep, regroup)
    start, result = next((s, r) for s, (r, asked) in enumerate(results) if asked)
    d = result.shape[1]
    _refuse_large(d, len(results) * len(chosen))
    layouts = [feature_layout.find_layout(result, kind, image, series, b) for b in chosen]
    first = layouts[0]
    if any(other.kind != first.kind for other in layouts):
        raise ValueError("these examples lie in different ways (image, table, series): pass kind, or one example.")
    labels = canvas.check_names(names, d) or first.names(d, units if isinstance(units, str) else "")
    texts = _one_each(headings, count, "headings") or [f"Example {b}" for b in range(count)]
    words = [_output_words(result, classes, output, b) for b in chosen]
    return _plain(
        {
            "kind": first.kind,
            "title": str(title) if title else _title(first.kind, words),
            "names": labels,
            "units": _units(units, labels),
            "word": first.word,
            "directed": result.grouping is not None and result.grouping.direction is not None,
            "exact": result.design == "exact",
            "derivative": not isinstance(result, Attribution),
            "note": str(note),
            "level": level,
            "q": q,
            "limits": LIMITS,
            "start": start,
            "sweep": [_scale(r) for r, _ in results],
            "noise": [noise_sentence(r, first.kind) for r, _ in results],
            "examples": [
                {
                    "heading": str(texts[b]),
                    "output": words[k],
                    "f": float(result.output[b]),
                    **_places(result, layouts[k], image, values, b),
                }
                for k, b in enumerate(chosen)
            ],
            "results": [[numbers(r[b], scales, level, q) for b in chosen] for r, _ in results],
            "made": [[_made(r[b]) for b in chosen] for r, _ in results],
        }
    )


# --- which results ----------------------------------------------------------------------------------------------------


def _chosen(example: int | Sequence[int] | None, count: int) -> list[int]:
    chosen = [*range(count)] if example is None else [example] if isinstance(example, int) else [*map(int, example)]
    if not chosen or not all(-count <= b < count for b in chosen):
        raise ValueError(f"example must be among the {count} of this result, or several of them, got {example}.")
    return [b % count for b in chosen]


def _regrouping(result: Interactions, segments: Any, kind: str | None, series: Any) -> Callable[[Any], Interactions]:
    """What makes the features of a result, or of another scale of it, those that the page shows."""
    grouping = result.grouping
    if grouping is not None:
        if segments is not None:
            raise ValueError("this result has groups already: leave segments out, or pass the result before groups().")
        shape = (-1, *result.inputs.shape[1:])
        weight = None if grouping.direction is None else grouping.direction.reshape(shape)
        return lambda r: r if r.grouping is not None else r.groups(grouping.mask.reshape(shape), weight)
    if segments is not None:
        return lambda r: r.groups(segments)
    return lambda r: feature_layout.features_of_pixels(r, kind, series)


def _every_scale(
    result: Interactions, sweep: Sequence[Interactions] | None, regroup: Callable[[Any], Interactions]
) -> list[tuple[Interactions, bool]]:
    """The result of each scale, from the smallest on, and whether it is the one that was asked for."""
    others = [r for r in sweep or [] if r is not result and not r.gaussian.same_as(result.gaussian)]
    for other in others:
        if other.inputs.shape != result.inputs.shape:
            raise ValueError(
                f"a sweep is of the same inputs: wanted {tuple(result.inputs.shape)}, got {tuple(other.inputs.shape)}."
            )
    found = [(regroup(result), True), *((regroup(other), False) for other in others)]
    if any(r.shape != found[0][0].shape for r, _ in found):
        raise ValueError("the results of a sweep must have the same groups.")
    return sorted(found, key=lambda each: _scale(each[0])["sigma"])


def _scale(result: Interactions) -> dict[str, Any]:
    """Of the features that noise moves; `still` is the number of the others."""
    every = result.gaussian.scales(result.inputs[0].numel()).double()
    sigma = every[every > 0] if bool((every > 0).any()) else every
    mean = float(sigma.square().mean().sqrt())
    same = bool((sigma - sigma[0]).abs().max() <= 1e-6 * sigma[0])
    return {
        "sigma": mean,
        "radius": mean * math.sqrt(len(sigma)),
        "same": same,
        "still": len(every) - len(sigma),
    }


def _refuse_large(d: int, count: int) -> None:
    if d > MOST_FEATURES:
        raise ValueError(
            f"a page shows at most {MOST_FEATURES} features, this result has {d}. Group them: pass segments=mask with "
            "an integer id for each feature."
        )
    size = count * d * (d + 1) / 2 * 4 * 4 * 4 / 3  # four triangles of four bytes each, in base64
    if size > MOST_BYTES:
        raise ValueError(
            f"{count} matrices of {d} features would make a page of {size / 1e6:.0f} MB. Pass example=[…] with fewer "
            "of them, or fewer scales."
        )


# --- words ------------------------------------------------------------------------------------------------------------


def _output_words(result: Interactions, classes: Any, output: str, b: int) -> str:
    """What is explained: "the ‘cat’ logit", "output 3", "the output"."""
    target = None if result.target is None else result.target[b].reshape(-1).tolist()
    if isinstance(classes, str):
        return f"the ‘{classes}’ {output}"
    if target is None:
        return f"the {output}"
    index = target[0] if len(target) == 1 else tuple(target)
    if classes is None or not isinstance(index, int):
        return f"{output} {index}"
    try:
        return f"the ‘{classes[index]}’ {output}"
    except (KeyError, IndexError) as error:
        raise ValueError(f"classes has no name for target {index}: it holds {len(classes)}.") from error


def _title(kind: str, words: list[str]) -> str:
    what = words[0] if len(set(words)) == 1 else "the output"
    return f"Which {NAMES_OF_KINDS[kind]} act together for {what}?"


def _units(units: Any, labels: list[str]) -> list[str] | None:
    if units is None:
        return None
    if isinstance(units, str):
        return [units] * len(labels)
    if isinstance(units, Mapping):
        return [str(units.get(name, "")) for name in labels]
    return [str(unit) for unit in _one_each(units, len(labels), "units") or []]


def _one_each(given: Sequence[Any] | None, count: int, what: str) -> Sequence[Any] | None:
    if given is not None and (isinstance(given, str) or len(given) != count):
        came = "one text" if isinstance(given, str) else str(len(given))
        raise ValueError(f"{what} must be a list of {count}, one each, got {came}.")
    return given


def _made(one: Interactions) -> list[tuple[str, str]]:
    """How the numbers came about, as terms and their values."""
    scale = _scale(one)
    calls, passes = int(one.n_calls[0]), float(one.n_passes[0])
    if one.design == "exact":
        rows = [("Method", str(getattr(one, "method", "")) or "exact"), ("Note", str(getattr(one, "note", "")))]
    else:
        same = "" if scale["same"] else " (root mean square over features)"
        still = f", none in {scale['still']} of {one.inputs[0].numel()} features" if scale["still"] else ""
        what = "Gaussian shifts of whole segments" if isinstance(one.gaussian, SegmentShift) else "Gaussian"
        rows = [
            ("Noise", f"{what}, σ = {scale['sigma']:.4g}{same}, radius σ√d = {scale['radius']:.4g}{still}"),
            ("Draws", f"{one.design} design, seed {one.seed}"),
            ("Work", f"{calls} gradient calls; {passes:.0f} passes in all"),
            ("Control variate", one.control or "none"),
            ("Estimate", f"{'unbiased' if one.unbiased else 'biased'}{', and a denoised one' if one.shrink else ''}"),
            ("Precision", one.precision),
        ]
    return [*((term, text) for term, text in rows if text), ("Made with", f"smoothhess {__version__}")]


# --- places -----------------------------------------------------------------------------------------------------------


def _places(result: Interactions, where: Layout, image: Any, values: Any, b: int) -> dict[str, Any]:
    """Where the features of example b lie, and what is there."""
    if where.kind == "image":
        height, width = where.ids.shape
        picture = feature_layout.pixels(image, result.inputs, b, len(result))
        return {"picture": encoding.png(picture), "size": [height, width], "labels": encoding.runs(where.ids)}
    if where.kind == "series":
        curves = canvas.array(result.inputs[b]).reshape(-1, len(where.ids))
        if values is not None:
            curves = canvas.array(torch.as_tensor(values)).reshape(len(result), -1, len(where.ids))[b]
        times = np.arange(len(where.ids)) if where.times is None else where.times
        return {
            "curves": [encoding.float32(c) for c in curves],
            "times": times.tolist(),
            "labels": encoding.runs(where.ids),
        }
    d = result.shape[1]
    if values is not None:
        given = torch.as_tensor(values, dtype=torch.float64)
        if given.numel() not in (d, d * len(result)):
            raise ValueError(f"wanted values of {d} features, one row or one per example, got {tuple(given.shape)}.")
        rows = given.reshape(-1, d)
        return {"values": canvas.array(rows[b if len(rows) > 1 else 0]).tolist()}
    return {"values": canvas.array(result.inputs[b]).reshape(-1).tolist() if result.grouping is None else None}


def _plain(x: Any) -> Any:
    """The same without what JSON does not know: numbers that are not finite become null."""
    if isinstance(x, dict):
        return {str(k): _plain(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [_plain(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
