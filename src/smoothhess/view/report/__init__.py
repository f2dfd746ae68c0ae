"""The interactive page of a result: one HTML file that needs no network, to look at, question and share.

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
import tempfile
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from smoothhess.view.report.notebook_summary import html
from smoothhess.view.report.payload import payload

if TYPE_CHECKING:
    from smoothhess.result.interactions import Interactions

__all__ = ["html", "page", "payload", "report"]

SCRIPTS = (  # in the order in which they need each other
    "numbers",
    "words",
    "elements",
    "image",
    "features",
    "series",
    "partners",
    "pairs",
    "matrix",
    "directions",
    "page",
)


def report(
    result: Interactions,
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
    sweep: Sequence[Interactions] | None = None,
    values: Any = None,
    units: Sequence[str] | Mapping[str, str] | str | None = None,
    note: str = "",
    scales: Tensor | None = None,
    level: float = 0.95,
    q: float = 0.05,
    kind: str | None = None,
) -> Path:
    """Write the page of a result, whole or not at all; its path.

    Args:
        result: up to 512 features or groups of them. Images and curves are shown as such, all else as a table.
        path: of the file, in a folder that exists; an older file is replaced.
        example: which example, or examples; all if None.
        names: one for each feature or group.
        image: what to show instead of the inputs, (H, W), (3, H, W) or (H, W, 3), as bytes or in [0, 1]; one, or a list
            with one per example.
        segments: integer group ids, as for `Interactions.groups`, where the result has no groups yet.
        series: True, or the times of the samples, where the inputs are curves (…, L). Found out if None, where the
            groups are windows of a long row or the inputs have the shape (1, L); False: they are not.
        classes: names of the outputs, by target; or that of the one output.
        output: what the output is: "logit", "probability", "price in €", …
        title: of the page.
        headings: one for each example.
        sweep: results of the same inputs at other σ, as `smoothhess.sweep` makes them: the page has a slider.
        values: the features' values as people know them, (d,) or (B, d), where the inputs are standardised.
        units: of those values, one for all, one each, or by name.
        note: a sentence on the inputs, such as how they were standardised.
        scales: size of a usual move of each feature, as for `top_pairs`; the Gaussian's σ if None.
        level: of the confidence intervals.
        q: share of false discoveries among the pairs called significant.
        kind: "image", "table" or "series"; found out if None.
    """
    options = {k: v for k, v in locals().items() if k not in ("result", "path")}
    target = Path(path)
    if not target.parent.is_dir():
        raise ValueError(f"the folder {target.parent} does not exist. Make it first.")
    if target.is_dir():
        raise ValueError(f"wanted a file to write, but {target} is a folder. Pass {target}/explanation.html.")
    _write(target, page(payload(result, **options)))
    return target


def page(content: dict[str, Any]) -> str:
    """The HTML of a payload."""
    parts = {
        "title": markup.escape(content["title"]),
        "css": _text("page.css"),
        "plotly": _text("vendor/plotly-cartesian.min.js"),
        "script": "\n".join(_text(f"script/{name}.js") for name in SCRIPTS),
        "payload": _for_script(content),
    }
    # In one pass, so that no text of the user's is taken for a place to fill.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _text("page.html"))


def _for_script(content: dict[str, Any]) -> str:
    """JSON that no HTML parser can take for the end of a script, or for a comment."""
    text = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _text(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def _write(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # mkstemp's files are private, an ordinary file is not
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
