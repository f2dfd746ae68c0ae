"""Turns the files of --input into examples, in the units in which noise is added.

Matching a file to the shapes that the model accepts belongs here; parsing each file format belongs to `csv_files`,
`image_files` and `npy_files`.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smoothhess.cli.explain import csv_files, image_files, npy_files
from smoothhess.cli.explain.checked_settings import IMAGES, TABLES
from smoothhess.cli.explain.load_model import Model
from smoothhess.cli.explain.normalization import Affine, normalised
from smoothhess.cli.explain.token_files import Text
from smoothhess.explainers.token_smooth_hess import TokenSmoothHess
from smoothhess.model.layer_functions import replaceable_layer
from smoothhess.model.state import modules_behind
from smoothhess.model.token_gates import check_ids
from smoothhess.view import captions

LONG = 256  # a one-dimensional array with more numbers is treated as a curve
SHORT = 32  # a (channels, length) array of at least this length is treated as a curve
SMALL = 8  # minimum height and width of an image without channels
MOST_LISTED = 8  # columns whose standard deviations are printed
ODD = 4  # an image without channels has an aspect ratio below this


@dataclass(frozen=True, eq=False)
class Example:
    """One input and the function that is explained."""

    name: str  # stem of its output files
    title: str
    kind: str  # "image", "table", "series", "array" or "text"
    values: Tensor  # (*shape), to which noise is added; of a text, its token ids
    forward_func: Callable[[Tensor], Any]  # takes a batch of such values
    names: tuple[str, ...] | None = None  # feature names
    still: Tensor | None = None  # (D,) bool: features without noise, constant in the table
    picture: Tensor | None = None
    original: Tensor | None = None  # (D,) the row of a table in the units of the file
    units: str = ""  # unit of the features if it differs from that of the file
    notes: tuple[str, ...] = field(default=())
    gates: TokenSmoothHess | None = None  # the explainer of a text
    gates_words: str = ""  # its layer and baseline


@dataclass(frozen=True)
class Reading:
    """The options of the command line that control how files are read."""

    size: tuple[int, int] | None = None
    rows: str | None = None
    drop: Sequence[str] = ()
    standardize: bool = True
    batched: bool | None = None
    step: float | None = None
    mean: Tensor | None = None
    deviation: Tensor | None = None


def read(paths: Sequence[Path], model: Model, how: Reading, device: torch.device) -> list[Example]:
    """Read all examples of all files and give each a unique name.

    Raises:
        ValueError: If a file cannot be read, or the model cannot be run on it.
    """
    found: list[Example] = []
    paths = [path.expanduser() for path in paths]
    called = Counter(path.name for path in paths)
    for path in paths:
        ending = path.suffix.lower()
        if ending in TABLES:
            read_here = _of_table(path, model, how, device)
        elif ending in IMAGES:
            read_here = [_of_picture(path, model, how, device)]
        else:
            read_here = _of_array(path, model, how, device)
        # the folder distinguishes files of the same name
        folder = f"{path.resolve().parent.name}/" if called[path.name] > 1 else ""
        found += [replace(example, title=f"{folder}{example.title}") for example in read_here]
    return _named_apart(found)


def of_texts(texts: Sequence[Text], model: Model, layer: str, baseline: str, device: torch.device) -> list[Example]:
    """Return one example per text, whose tokens have gates at a layer of the model.

    Raises:
        ValueError: If the model has no such layer, or cannot be run on the ids.
    """
    networks = modules_behind(model.forward_func)
    if not networks:
        raise ValueError("--layer: the model is a function without a network. Pass a torch.nn.Module as --model.")
    try:
        found = replaceable_layer(networks[0], layer)
    except ValueError as error:
        raise ValueError(f"--layer {layer}: {error}") from error
    start = baseline if baseline in ("mean", "zero") else int(baseline)
    gates, examples = TokenSmoothHess(model.forward_func, found, start), []
    for text in texts:
        try:
            check_ids(found, text.ids[None])
        except ValueError as error:
            raise ValueError(f"--tokens {text.title}: {error}") from error
        if refusal := model.try_on(text.ids[None].to(device))[0]:
            raise ValueError(f"the model cannot be run on the {len(text.ids)} tokens of {text.title}: {refusal}")
        examples.append(
            Example(
                name=text.name,
                title=text.title,
                kind="text",
                values=text.ids,
                forward_func=model.forward_func,
                names=text.tokens,
                gates=gates,
                gates_words=f"{layer} {baseline}",
            )
        )
    return _named_apart(examples)


def _of_picture(path: Path, model: Model, how: Reading, device: torch.device) -> Example:
    own, other = image_files.read(path, how.size)
    height, width = own.shape[1:]
    if model.shape is not None:
        if len(model.shape) == 2:  # an export of (H, W)
            own, other = (p[0] for p in sorted((own, other), key=len)[:1] * 2)
        expected = model.shape[-2:]
        if len(model.shape) > 3 or any(w not in (None, h) for w, h in zip(expected, (height, width), strict=False)):
            raise ValueError(
                f"{path} has {height} × {width} pixels, but the model takes {_sizes(model.shape)}. Resize it with "
                f"--size {'x'.join('224' if s is None else str(s) for s in expected)}."
            )
    refusals = []
    for values in (own, other):
        values = values.to(model.dtype)
        try:
            function = normalised(model.forward_func, how.mean, how.deviation, values.shape)
        except ValueError as error:  # --mean for 3 channels
            refusals.append(str(error))
            continue
        refusal, _ = model.try_on(values[None].to(device), function)
        if not refusal:
            changed = "grey" if len(values) < len(own) else "grey, in 3 channels" if len(values) > len(own) else ""
            notes = (f"{path.name} is converted to {changed}, as the model requires",) if changed else ()
            return Example(path.stem, path.name, "image", values, function, picture=own, notes=notes)
        refusals.append(refusal)
    resized = " The image was not resized: pass --size." if _of_sizes(refusals[0]) and not how.size else ""
    raise ValueError(f"the model cannot be run on {path} as {tuple(own.shape)}: {refusals[0].rstrip('.')}.{resized}")


def _of_table(path: Path, model: Model, how: Reading, device: torch.device) -> list[Example]:
    table = csv_files.read(path, how.drop)
    numbers = csv_files.chosen_rows(how.rows, len(table.values), path)
    if model.shape is not None and model.shape not in ((len(table.names),), (None,)):
        raise ValueError(
            f"{path} has {len(table.names)} columns, but the model takes inputs of shape {model.shape}. Omit the "
            "others with --drop."
        )
    notes = []
    if how.rows is None and len(table.values) > len(numbers):
        notes.append(f"{path.name}: the first {len(numbers)} of {len(table.values)} rows; choose others with --rows")
    inner = normalised(model.forward_func, how.mean, how.deviation, (len(table.names),))
    mean, deviation = torch.zeros(len(table.names)).double(), torch.ones(len(table.names)).double()
    still, units = None, ""
    if how.standardize:
        if len(table.values) < 2:
            raise ValueError(
                f"{path} has one row: the columns' standard deviations cannot be estimated from it. Add rows (and "
                "select those to explain with --rows), or pass --no-standardize for noise in the units of the columns."
            )
        mean, deviation = table.moments()
        still = deviation == 0
        sizes = [f"{name} {size:.3g}" for name, size in zip(table.names, deviation.tolist(), strict=True) if size > 0]
        units = f"one standard deviation of its column over the {len(table.values)} rows of {path.name}"
        units += f" ({', '.join(sizes[:MOST_LISTED])}{' …' if len(sizes) > MOST_LISTED else ''})"
        if bool(still.all()):
            raise ValueError(
                f"{path}: all columns are constant, so their standard deviations are 0. Pass --no-standardize."
            )
        if bool(still.any()):
            notes.append(f"{path.name}: {unmoved(table.names, still)}")
            deviation = torch.where(still, 1.0, deviation)
        inner = Affine(inner, deviation, mean)
    first = ((table.row(numbers[0]) - mean) / deviation).to(model.dtype)
    if refusal := model.try_on(first[None].to(device), inner)[0]:
        raise ValueError(
            f"the model cannot be run on the {len(table.names)} columns of {path}: {refusal}. Omit the columns "
            "that it does not take, such as the label, with --drop."
        )
    examples = []
    for number in numbers:
        row = table.row(number)
        examples.append(
            Example(
                name=f"{path.stem}-row{number}",
                title=f"{path.name}, row {number}",
                kind="table",
                values=((row - mean) / deviation).to(model.dtype),
                forward_func=inner,
                names=table.names,
                still=still if still is not None and bool(still.any()) else None,
                original=row,
                units=units,
                notes=tuple(notes) if number == numbers[0] else (),
            )
        )
    return examples


def unmoved(names: Sequence[str], still: Tensor) -> str:
    """Return a note that names the features without noise, and the reason.

    >>> unmoved(["age", "dose", "time"], torch.tensor([True, False, True]))
    'no noise in age, time: they do not vary in the file'
    """
    found = [name for name, s in zip(names, still.tolist(), strict=True) if s]
    return f"no noise in {', '.join(found)}: {'they do' if found[1:] else 'it does'} not vary in the file"


def _of_array(path: Path, model: Model, how: Reading, device: torch.device) -> list[Example]:
    values = npy_files.read(path).to(model.dtype)
    readings, refusals = [], []
    for batch, words in npy_files.readings(values, model.shape, how.batched):
        try:
            function = normalised(model.forward_func, how.mean, how.deviation, tuple(batch.shape[1:]))
        except ValueError as error:  # --mean for other channels
            refusals.append((batch, str(error)))
            continue
        refusal, dimensions = model.try_on(batch.to(device), function)
        if refusal:
            refusals.append((batch, refusal))
        else:
            readings.append((dimensions, batch, words, function))
    if not readings:
        fitting = [r for r in refusals if _fits(tuple(r[0].shape[1:]), model.shape)]
        if not fitting:
            assert model.shape is not None
            raise ValueError(f"{path} has shape {tuple(values.shape)}, but the model takes {_sizes(model.shape)}.")
        batch, refusal = fitting[0]
        tried = f"{path} of shape {tuple(values.shape)} as {tuple(batch.shape)}"
        raise ValueError(f"the model cannot be run on {tried}: {refusal}")
    # the interpretation whose output has the fewest dimensions; the first of several
    _, batch, words, function = min(readings, key=lambda reading: reading[0])
    kind = _kind(tuple(batch.shape[1:]), how.step)
    notes = ()
    if batch.shape not in (values.shape, (1, *values.shape)):
        notes = (f"{path.name}: {tuple(values.shape)} interpreted as {words}",)
    elif {tuple(b.shape) for _, b, _, _ in readings} >= {tuple(values.shape), (1, *values.shape)}:
        other = "--single" if batch.shape == values.shape else "--batched"
        notes = (f"{path.name}: {tuple(values.shape)} interpreted as {words}; the model accepts both, see {other}",)
    several = len(batch) > 1
    return [
        Example(
            name=f"{path.stem}-{i}" if several else path.stem,
            title=f"{path.name}, number {i}" if several else path.name,
            kind=kind,
            values=one,
            forward_func=function,
            picture=one if kind == "image" else None,
            notes=notes if i == 0 else (),
        )
        for i, one in enumerate(batch)
    ]


def _of_sizes(refusal: str) -> bool:
    """Whether the error of a model seems to concern the shape of its input."""
    return bool(re.search(r"shape|size|dimension|channel|mat1|broadcast|numel|elements", refusal))


def _fits(shape: tuple[int, ...], expected: Sequence[int | None] | None) -> bool:
    if expected is None:
        return True
    return len(shape) == len(expected) and all(w in (None, s) for s, w in zip(shape, expected, strict=True))


def _sizes(shape: Sequence[int | None]) -> str:
    return " × ".join("any" if size is None else str(size) for size in shape)


def _kind(shape: tuple[int, ...], step: float | None) -> str:
    """Return the kind of figure for an array of this shape.

    >>> [_kind(shape, None) for shape in ((3, 32, 32), (28, 28), (12, 1000), (1, 600), (600,), (30,), (3, 5))]
    ['image', 'image', 'series', 'series', 'series', 'array', 'array']
    """
    if step is not None:
        return "series"
    size = captions.image_size(shape)
    if size is not None and (len(shape) == 3 or (min(size) >= SMALL and max(size) < ODD * min(size))):
        return "image"
    channels = len(shape) == 2 and shape[1] >= SHORT
    return "series" if channels or (len(shape) == 1 and shape[0] > LONG) else "array"


def _named_apart(examples: list[Example]) -> list[Example]:
    """Number the examples whose files would overwrite each other or index.html."""
    taken = {"index"}
    apart = []
    for example in examples:
        names = itertools.chain([example.name], (f"{example.name}-{again}" for again in itertools.count(2)))
        name = next(name for name in names if name.casefold() not in taken)  # some file systems ignore case
        taken.add(name.casefold())
        apart.append(replace(example, name=name))
    return apart
