"""Writes the interactive page of a result: one self-contained HTML file that needs no network connection.

The template, its scripts and the atomic writer belong here; the content of the page belongs to `payload`.

>>> import tempfile, torch, smoothhess as sh
>>> from smoothhess.view.report import report
>>> result = sh.SmoothHess(lambda x: x[:, 0] * x[:, 1]).attribute(torch.zeros(1, 3), sigma=0.5, n_calls=400)
>>> with tempfile.TemporaryDirectory() as folder:
...     path = report(result, f"{folder}/x.html", names=["age", "dose", "height"])
...     "<!doctype html>" in path.read_text()[:20]
True
"""

from __future__ import annotations

import html as markup
import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from smoothhess.model.atomic_write import atomic_write
from smoothhess.view.report.notebook_summary import html, show
from smoothhess.view.report.payload import PageOptions, payload

if TYPE_CHECKING:
    from smoothhess.result.result import Result

__all__ = ["html", "report", "show"]

SCRIPTS = (  # in the order of their dependencies
    "numbers",
    "words",
    "elements",
    "chart",
    "image",
    "features",
    "series",
    "text",
    "partners",
    "pairs",
    "matrix",
    "directions",
    "download",
    "page",
)


def report(
    result: Result,
    path: str | os.PathLike[str],
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
    sweep: Sequence[Result] | None = None,
    values: Any = None,
    units: Sequence[str] | Mapping[str, str] | str | None = None,
    note: str = "",
    scales: Tensor | None = None,
    level: float = 0.95,
    q: float = 0.05,
    kind: str | None = None,
    model: str = "",
    command: str = "",
) -> Path:
    """Write the interactive page of a result atomically.

    Args:
        result: A result with up to 512 features or groups. Images, curves and texts are drawn, other inputs are a
            table.
        path: The HTML file, in an existing folder; an existing file is replaced.
        example: Index or indices of the examples; all if None.
        names: One name per feature or group; those of the result if None.
        image: Images to show instead of the inputs, or the images of patches, (H, W), (3, H, W) or (H, W, 3), uint8 or
            in [0, 1]; one, or a list with one per example.
        segments: Integer group ids, as for `Interactions.groups`, if the result has no groups.
        series: True if the inputs are curves (…, L), or the times of their samples; False if they are not curves. If
            None, inputs are curves if the groups are windows of a long row, or if their shape is (1, L).
        classes: Names of the outputs, indexed by target, or the name of a single output; those of the result if None.
            The forms of targets are described in `smoothhess.model.targets`.
        output: Name of the explained quantity: "logit", "probability", "price in €", …; "output" with the unit of the
            result by default.
        title: Title of the page; a default if None.
        headings: One heading per example.
        sweep: Results of the same inputs at other σ, as returned by `smoothhess.sweep`; the page then has a slider.
        values: Values of the features in their original units, (d,) or (B, d), if the inputs are standardised.
        units: Units of these values: one for all, one per feature, or a mapping from names.
        note: A sentence about the inputs, such as how they were standardised.
        scales: Scale of each feature, as for `Interactions.top_pairs`; the σ of the Gaussian if None.
        level: Level of the confidence intervals.
        q: False discovery rate at which a pair is significant.
        kind: "image", "table", "series" or "text"; inferred from the result if None.
        model: Name of the model, and
        command: command that made the page, both for the list under "How this page was made".

    Returns:
        The path of the page.

    Raises:
        ValueError: If the folder does not exist, the page would be too large, or an argument does not fit the result.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise ValueError(f"the folder {target.parent} does not exist. Create it first.")
    if target.is_dir():
        raise ValueError(f"path must be a file, but {target} is a folder. Pass {target}/explanation.html.")
    options = PageOptions(
        example=example,
        names=names,
        image=image,
        segments=segments,
        series=series,
        classes=classes,
        output=output,
        title=title,
        headings=headings,
        sweep=sweep,
        values=values,
        units=units,
        note=note,
        scales=scales,
        level=level,
        q=q,
        kind=kind,
        model=model,
        command=command,
        date=date.today().isoformat(),
    )
    _write(target, page(payload(result, options)))
    return target


def page(content: dict[str, Any]) -> str:
    """Return the HTML of a payload."""
    parts = {
        "title": markup.escape(content["title"]),
        "css": _text("style.css") + _text("page.css"),
        "script": "\n".join(_text(f"script/{name}.js") for name in SCRIPTS),
        "payload": _for_script(content),
    }
    # In one pass, so that no text of the user is replaced as a placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _text("page.html"))


def _for_script(content: dict[str, Any]) -> str:
    """Return JSON without characters that an HTML parser could read as the end of a script, or as a comment."""
    text = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _text(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")
