"""Combines an example with its target, its groups of features and the options of the explainer.

Reading inputs belongs to `inputs`, running the explainer to `run_explain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from smoothhess._version import __version__
from smoothhess.cli.explain import target_class
from smoothhess.cli.explain.checked_settings import Settings
from smoothhess.cli.explain.inputs import Example
from smoothhess.cli.explain.load_model import Model
from smoothhess.cli.explain.normalization import Affine
from smoothhess.cli.explain.output_folder import key_of
from smoothhess.cli.explain.target_class import Target
from smoothhess.cli.printable_text import one_line
from smoothhess.datasets.job_settings import described
from smoothhess.result import segments
from smoothhess.result.segments import Segments
from smoothhess.view import token_text

MANY = 256  # with more features, images and curves are grouped by default
MOST = 512  # features or groups that fit on a page


@dataclass(frozen=True, eq=False)
class Question:
    """An example with its target, its groups and the options of `SmoothHess.attribute`."""

    example: Example
    target: Target
    segments: Segments | None
    segments_words: str
    options: dict[str, Any]  # arguments of `SmoothHess.attribute`
    classes: Sequence[str] | None
    output: float
    step: float | None  # seconds between the samples of a series

    @property
    def heading(self) -> str:
        """Describe the explained output in one line."""
        grouped = f"; {self.segments_words}" if self.segments_words else ""
        text = f"{self.example.title}: {self.target.name} = {self.output:.4g}, {self.target.words}{grouped}"
        return one_line(text)

    @property
    def names(self) -> Sequence[str] | None:
        """Return the names of the features, or of the groups."""
        if self.segments is not None:
            return self.segments.names
        return self.example.names or _names_of_places(self.example, self.step)

    @property
    def labels(self) -> Sequence[str] | None:
        """Return names for printed text: tokens without markers of sub-words."""
        return token_text.labels(self.names or ()) if self.example.kind == "text" else self.names


def ask(example: Example, settings: Settings, classes: Sequence[str] | None, device: torch.device) -> Question:
    """Build the question that the settings of the command line define for an example."""
    with torch.no_grad():
        output = example.forward_func(example.values[None].to(device))
    if not torch.isfinite(output).all():
        raise ValueError(
            f"the model's output for {example.title} is NaN or infinite. Check that the input has the "
            "scale that the model expects."
        )
    target = target_class.find(settings.target, output, classes)
    chosen, words, notes = _segments(example, settings)
    if target_class.look_like_probabilities(output):
        notes = [
            *notes,
            "the outputs look like probabilities, whose gradients vanish near 0 and 1: explain logits if possible",
        ]
    features = example.values.numel() if chosen is None else len(chosen)
    if features > MOST:
        raise ValueError(
            f"{example.title} has {features} features{'' if chosen is None else ' after grouping'}; a page shows up to "
            f"{MOST}. Group them with --segments: slic:50, grid:14, window:20, columns:groups.json or mask:file."
        )
    if features < 2:
        raise ValueError(
            f"{example.title} has one feature or group, so it has no pairs. Use more and smaller --segments, for "
            "example grid:4 of an image."
        )
    options: dict[str, Any] = {"n_calls": settings.calls, "max_calls": settings.max_calls, "seed": settings.seed}
    options["tol"] = 0.1 if settings.tol is None else settings.tol
    options |= _scale(example, settings)
    if settings.segments_noise == "segments":
        options = _of_segments(options, chosen, example)
    value = float(output[0] if target.index is None else output[0][target.index])
    example = replace(example, notes=(*example.notes, *notes))
    return Question(example, target, chosen, words, options, classes, value, settings.step)


def _segments(example: Example, settings: Settings) -> tuple[Segments | None, str, list[str]]:
    """Return the groups of features, their description, and notes on them."""
    shape, d = example.values.shape, example.values.numel()
    if settings.segments is not None:
        if example.kind == "series" and settings.segments.startswith("slic"):
            raise ValueError("--segments slic is for images: use window:0.5s (with --step) or window:20 for a curve.")
        found = segments.parse(settings.segments, example.values, example.names, settings.step)
        if found is not None:
            _refuse_scattered(found, example.kind)
            return found, f"{len(found)} groups by {settings.segments}", _unlike(found, settings.segments)
    elif d > MANY and example.kind in ("image", "series"):
        return _default_segments(example, settings)
    names = _names_of_places(example, settings.step)
    if names is None or len(names) == d:
        return None, "", []
    # all channels of a pixel, or of a time step, form one feature
    mask = torch.arange(len(names)).reshape(shape[-2:] if example.kind == "image" else shape[-1:]).expand(shape)
    return Segments(mask, tuple(names)), "", []


def _unlike(found: Segments, words: str) -> list[str]:
    """Return a note if the number of super-pixels differs much from the requested number."""
    kind, _, count = words.partition(":")
    if kind != "slic" or 0.8 <= len(found) / int(count or 50) <= 1.25:
        return []
    return [f"{words} found {len(found)} super-pixels: SLIC depends on the colours; grid:7 makes exactly 7 × 7 cells"]


def _refuse_scattered(found: Segments, kind: str) -> None:
    """Raise unless the groups can be drawn: as regions of an image, or as intervals of a curve."""
    if kind not in ("image", "series"):
        return
    shape = found.mask.shape
    places = found.mask.reshape(-1, *(shape[-2:] if kind == "image" else shape[-1:]))
    what = "pixel" if kind == "image" else "time step"
    if not bool((places == places[:1]).all()):
        raise ValueError(f"--segments: all channels of a {what} must share a group, but the mask differs between them.")
    if kind == "series" and len(torch.unique_consecutive(places[0])) > len(found):
        raise ValueError(
            "--segments: a group of a curve must be one contiguous interval of time, but the mask splits some groups."
        )


def _names_of_places(example: Example, step: float | None) -> list[str] | None:
    """Return default names for the pixels of an image, the samples of a curve or the numbers of a row."""
    shape = example.values.shape
    if example.kind == "image":
        return [f"pixel ({row}, {column})" for row in range(shape[-2]) for column in range(shape[-1])]
    if example.kind == "text":
        return [f"token {i}" for i in range(len(example.values))]
    if example.kind == "series":
        return [f"sample {i}" if step is None else f"{i * step:.6g} s" for i in range(shape[-1])]
    return [f"feature {i}" for i in range(shape[0])] if len(shape) == 1 else None


def _default_segments(example: Example, settings: Settings) -> tuple[Segments | None, str, list[str]]:
    d = example.values.numel()
    if example.kind == "image":
        try:
            found, words = segments.slic(example.values, 50), "slic:50"
        except ImportError:
            found, words = segments.grid(example.values.shape, 7), "grid:7"
    else:
        words = f"window:{max(1, example.values.shape[-1] // 20)}"
        found = segments.parse(words, example.values, step=settings.step)
    assert found is not None
    note = f"{d} features are too many to show individually: grouped by {words}; choose groups with --segments"
    return found, f"{len(found)} groups by {words}", [note]


def _scale(example: Example, settings: Settings) -> dict[str, Any]:
    """Return the scale of the noise as arguments of `attribute`."""
    if example.still is None:
        return {"radius": settings.radius} if settings.sigma is None else {"sigma": settings.sigma}
    moving = (~example.still).to(example.values.dtype)
    sigma = settings.sigma
    if sigma is None:
        assert settings.radius is not None
        sigma = settings.radius / float(moving.sum()) ** 0.5
    return {"sigma": sigma * moving}


def _of_segments(options: dict[str, Any], chosen: Segments | None, example: Example) -> dict[str, Any]:
    """Return the options with noise that shifts each group as a unit; features without noise keep none."""
    if chosen is None:
        raise ValueError(
            f"--segments-noise segments shifts groups of features, but {example.title} has no groups. Choose them with "
            "--segments, or omit --segments-noise."
        )
    sigma = options["sigma"] if "sigma" in options else options["radius"] / example.values.numel() ** 0.5
    still = torch.zeros_like(chosen.mask) if example.still is None else example.still.long()
    # the noiseless part of a group is a separate segment
    found, mask = torch.unique(2 * chosen.mask + still, return_inverse=True)
    scale = torch.where(found % 2 == 0, torch.as_tensor(sigma).max(), 0.0)
    others = {name: value for name, value in options.items() if name not in ("sigma", "radius")}
    return others | {"gaussian": segments.noise(mask, scale)}


def key(question: Question, model: Model) -> str:
    """Return a short hash of everything that an explanation depends on."""
    example = question.example
    return key_of(
        {
            "version": __version__,
            "model": model.identity,
            "units": _units(example.forward_func),
            "gates": example.gates_words,
            "values": described(example.values),
            "title": example.title,
            "names": described(list(question.names)) if question.names is not None else None,
            "target": [described(question.target.index), question.target.name],
            "output": f"{question.output:.5g}",  # detects a model whose code reads other files
            "groups": None if question.segments is None else described(question.segments.mask),
            "options": described(question.options),
            "step": question.step,
        }
    )


def _units(forward_func: Any) -> list[Any]:
    if not isinstance(forward_func, Affine):
        return []
    return [described(forward_func.scale), described(forward_func.shift), *_units(forward_func.model)]
