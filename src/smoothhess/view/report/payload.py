"""Collects the content of a page, numbers and text, as one record of JSON values.

The encoding of arrays belongs to `encoding`, the numbers of one example to `example_numbers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smoothhess._version import __version__
from smoothhess.draws.gaussian import Isotropic, SegmentShift
from smoothhess.linalg.memory import PAGE_BYTES
from smoothhess.model.convert_inputs import as_array
from smoothhess.model.targets import described
from smoothhess.model.targets import kind as kind_of_target
from smoothhess.result.effect_sizes import LARGE, WORDS
from smoothhess.result.exact import Attribution
from smoothhess.result.result import Result
from smoothhess.result.text import LIMITS
from smoothhess.view import token_text
from smoothhess.view.captions import noise_sentence, plural
from smoothhess.view.figures import canvas
from smoothhess.view.report import encoding, feature_layout
from smoothhess.view.report.example_numbers import numbers
from smoothhess.view.report.feature_layout import Layout

MOST_FEATURES = 512  # with more, a page is slow to open and not legible
PREDICTED = "The explained output of each example is that of the class which the model predicts for it."
NAMES_OF_KINDS = {"image": "parts of the image", "series": "intervals"}


@dataclass(frozen=True, eq=False, kw_only=True)
class PageOptions:
    """What a page shows of a result, and its text; the fields are described in `smoothhess.view.report.report`."""

    example: int | Sequence[int] | None = None
    names: Sequence[str] | None = None
    image: Any = None
    segments: Any = None
    series: Any = None
    classes: Sequence[str] | Mapping[int, str] | str | None = None
    output: str = "output"
    title: str | None = None
    headings: Sequence[str] | None = None
    sweep: Sequence[Result] | None = None
    values: Any = None
    units: Sequence[str] | Mapping[str, str] | str | None = None
    note: str = ""
    scales: Tensor | None = None
    level: float = 0.95
    q: float = 0.05
    kind: str | None = None
    model: str = ""
    command: str = ""
    date: str = ""


def payload(result: Result, options: PageOptions) -> dict[str, Any]:
    """Return the content of the page; the errors that are raised are those of `report`."""
    count, kind, units = len(result), options.kind, options.units
    level, q = options.level, options.q
    chosen = _chosen(options.example, count)
    regroup = _regrouping(result, options.segments, kind, options.series)
    results = _every_scale(result, options.sweep, regroup)
    start, result = next((s, r) for s, (r, asked) in enumerate(results) if asked)
    d = result.shape[1]
    _refuse_large(d, len(results) * len(chosen))
    layouts = [feature_layout.find_layout(result, kind, options.image, options.series, b) for b in chosen]
    first = layouts[0]
    if any(other.kind != first.kind for other in layouts):
        raise ValueError("the examples have different layouts (image, table, series): pass kind, or one example.")
    names = [_names(result, first, options, b) for b in chosen]
    labels = [token_text.labels(each) if first.kind == "text" else each for each in names]
    texts = _one_each(options.headings, count, "headings") or [f"Example {b}" for b in range(count)]
    words = [_output_words(result, options.classes, options.output, b) for b in chosen]
    return _plain(
        {
            "kind": first.kind,
            "title": str(options.title) if options.title else _title(first, words),
            "units": _units(units, labels[0]),
            "word": first.word,
            "words": plural(first.word),
            "part": first.part,
            "gates": bool(result.feature_kind),
            "directed": result.grouping is not None and result.grouping.direction is not None,
            "exact": result.design == "exact",
            "derivative": not isinstance(result, Attribution),
            "note": " ".join(filter(None, (str(options.note), PREDICTED if result.predicted else ""))),
            "level": level,
            "q": q,
            "limits": LIMITS,
            "sizes": [*WORDS, (None, LARGE)],
            "start": start,
            "sweep": [_scale(r) for r, _ in results],
            "noise": [noise_sentence(r, first.kind) for r, _ in results],
            "examples": [
                {
                    "heading": str(texts[b]),
                    "names": labels[k],
                    "tokens": token_text.readable(names[k]) if first.kind == "text" else None,
                    "output": words[k],
                    "f": float(result.output[b]),
                    **_places(result, layouts[k], options.image, options.values, b),
                }
                for k, b in enumerate(chosen)
            ],
            "results": [[numbers(r[b], options.scales, level, q) for b in chosen] for r, _ in results],
            "made": [[_made(r[b], options, words[k]) for k, b in enumerate(chosen)] for r, _ in results],
        }
    )


# --- examples, groups and scales --------------------------------------------------------------------------------------


def _chosen(example: int | Sequence[int] | None, count: int) -> list[int]:
    chosen = [*range(count)] if example is None else [example] if isinstance(example, int) else [*map(int, example)]
    if not chosen or not all(-count <= b < count for b in chosen):
        raise ValueError(
            f"example must be an index, or indices, of the {count} examples of this result, got {example}."
        )
    return [b % count for b in chosen]


def _regrouping(result: Result, segments: Any, kind: str | None, series: Any) -> Callable[[Any], Result]:
    """Return the function that groups the features of a result, at any scale, as the page shows them."""
    grouping = result.grouping
    if grouping is not None:
        if segments is not None:
            raise ValueError("this result already has groups: omit segments, or pass the result before groups().")
        shape = (-1, *result.inputs.shape[1:])
        weight = None if grouping.direction is None else grouping.direction.reshape(shape)
        return lambda r: r if r.grouping is not None else r.groups(grouping.mask.reshape(shape), weight)
    if segments is not None:
        return lambda r: r.groups(segments)
    return lambda r: feature_layout.features_of_pixels(r, kind, series)


def _every_scale(
    result: Result, sweep: Sequence[Result] | None, regroup: Callable[[Any], Result]
) -> list[tuple[Result, bool]]:
    """Return the result of each scale in increasing order, and whether it is the `result` argument."""
    for other in sweep or []:
        if not isinstance(other, Result):
            raise TypeError(
                f"sweep must hold a result for each σ, got {type(other).__name__}. Pass sweep=smoothhess.sweep(model, "
                "inputs, sigmas)."
            )
    others = [r for r in sweep or [] if r is not result and not r.gaussian.same_as(result.gaussian)]
    for other in others:
        if other.inputs.shape != result.inputs.shape:
            raise ValueError(
                f"the results of a sweep must have the same inputs: expected {tuple(result.inputs.shape)}, got "
                f"{tuple(other.inputs.shape)}."
            )
    found = [(regroup(result), True), *((regroup(other), False) for other in others)]
    if any(r.shape != found[0][0].shape for r, _ in found):
        raise ValueError("the results of a sweep must have the same groups.")
    return sorted(found, key=lambda each: _scale(each[0])["sigma"])


def _scale(result: Result) -> dict[str, Any]:
    """Return the root mean square σ and the radius over features with noise; `still` counts features without noise."""
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
    size = count * d * (d + 1) / 2 * 4 * 4 * 4 / 3  # four triangles of four-byte numbers, in base64
    if size > PAGE_BYTES:
        raise ValueError(
            f"{count} matrices of {d} features would make a page of {size / 1e6:.0f} MB. Pass example=[…] with fewer "
            "examples, or fewer scales."
        )


# --- text -------------------------------------------------------------------------------------------------------------


def _output_words(result: Result, classes: Any, output: str, b: int) -> str:
    """Return the name of the explained output: "the ‘cat’ logit", "output 3", "the output"."""
    target = None if result.target is None else result.target[b].reshape(-1).tolist()
    classes = result.classes if classes is None else classes
    if output == "output" and result.unit:
        output = f"output in {result.unit}"
    if isinstance(classes, str):
        return f"the ‘{classes}’ {output}"
    if target is None:
        return f"the {output}"
    single = kind_of_target(result.target) == "entry"
    if not single and output != "output":  # the given words are those of the difference
        return f"the {output}"
    if classes is None or len(target) > 1:
        return f"{output} {described(target, classes)}"
    index = target[0]
    try:
        return f"the ‘{classes[index]}’ {output}"
    except (KeyError, IndexError) as error:
        raise ValueError(f"classes must have a name for target {index}, got {len(classes)} names.") from error


def _names(result: Result, layout: Layout, options: PageOptions, b: int) -> list[str]:
    """Return the given names of the features of example b, those of the result, or default names."""
    given = canvas.check_names(options.names, result.shape[1])
    if given is None and result.names is not None:
        return list(result.names[b])
    return given or layout.names(result.shape[1], options.units if isinstance(options.units, str) else "")


def _title(layout: Layout, words: list[str]) -> str:
    what = words[0] if len(set(words)) == 1 else "the output"
    things = NAMES_OF_KINDS.get(layout.kind, plural(layout.word) if layout.noun else "features")
    return f"Which {things} act together for {what}?"


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
        came = "one string" if isinstance(given, str) else str(len(given))
        raise ValueError(f"{what} must be a list of length {count}, got {came}.")
    return given


def _made(one: Result, options: PageOptions, explained: str) -> list[tuple[str, str]]:
    """Return how the numbers were computed, as terms and their values."""
    rows = [("Model", options.model), ("Explained", f"{explained}{_target(one)}"), *_computation(one)]
    rows += [("Command", options.command), ("Date", options.date), ("Made with", f"smoothhess {__version__}")]
    return [(term, text) for term, text in rows if text]


def _target(one: Result) -> str:
    """Return the index of the explained output in brackets."""
    if one.target is None:
        return ""
    return f" (target={described(one.target[0].reshape(-1).tolist())})"


def _computation(one: Result) -> list[tuple[str, str]]:
    if one.design == "exact":
        return [("Method", str(getattr(one, "method", "")) or "exact"), ("Note", str(getattr(one, "note", "")))]
    scale = _scale(one)
    same = "" if scale["same"] else " (root mean square over features)"
    still = f", none in {scale['still']} of {one.inputs[0].numel()} features" if scale["still"] else ""
    what = "Gaussian shifts of segments" if isinstance(one.gaussian, SegmentShift) else "Gaussian"
    calls, passes = int(one.n_calls[0]), float(one.n_passes[0])
    return [
        ("Noise", f"{what}, σ = {scale['sigma']:.4g}{same}, radius σ√d = {scale['radius']:.4g}{still}"),
        ("Draws", f"{one.design} design, seed {one.seed}"),
        ("Work", f"{calls} gradient calls; {passes:.0f} passes in total"),
        ("Control variate", one.control or "none"),
        ("Estimate", "unbiased" if one.unbiased else "biased"),
        ("Precision", one.precision),
        ("Call", _call(one)),
    ]


def _call(one: Result) -> str:
    """Return the call that computes the same numbers of one example."""
    explainer = "TokenSmoothHess(model, layer)" if one.feature_kind else "SmoothHess(model)"
    scales = one.gaussian.scales(one.inputs[0].numel())
    sigma = "gaussian=gaussian"
    if isinstance(one.gaussian, Isotropic):
        sigma = f"sigma={float(scales[0]):.6g}"
    given = [sigma, f"n_calls={int(one.n_calls[0])}", f"seed={one.seed}"]
    if one.target is not None:
        single = kind_of_target(one.target) == "entry"
        given.insert(0, f"target={described(one.target[0].reshape(-1).tolist()) if single else 'target'}")
    given += [f'design="{one.design}"'] if one.design != "orthogonal" else []
    given += ["feature_mask=mask"] if one.grouping is not None else []
    return f"{explainer}.attribute(x, {', '.join(given)})"


# --- positions and values of features ---------------------------------------------------------------------------------


def _places(result: Result, where: Layout, image: Any, values: Any, b: int) -> dict[str, Any]:
    """Return the positions of the features of example b, and the input values there."""
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
        given = torch.as_tensor(as_array(values), dtype=torch.float64)
        if given.numel() not in (d, d * len(result)):
            raise ValueError(
                f"values must have {d} features, in one row or one row per example, got {tuple(given.shape)}."
            )
        rows = given.reshape(-1, d)
        return {"values": canvas.array(rows[b if len(rows) > 1 else 0]).tolist()}
    numbers_of_input = result.grouping is None and not result.feature_kind
    return {"values": canvas.array(result.inputs[b]).reshape(-1).tolist() if numbers_of_input else None}


def _plain(x: Any) -> Any:
    """Convert to JSON types; numbers that are not finite become None."""
    if isinstance(x, dict):
        return {str(k): _plain(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [_plain(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
