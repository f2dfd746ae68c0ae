"""Writes the page of the interactions of a data set: a table of pairs and a picture of all of them, without scripts.

The interactive page of single examples belongs to `smoothhess.view.report`.
"""

from __future__ import annotations

import html as markup
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from smoothhess.evaluate.global_summary import GlobalInteractions
from smoothhess.model.atomic_write import atomic_write
from smoothhess.result.intervals import plus_minus
from smoothhess.result.text import LIMITS
from smoothhess.view.figures import canvas
from smoothhess.view.report import encoding
from smoothhess.view.report.notebook_summary import CELL, RED

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.4rem; line-height: 1.3; }}
.parts {{ display: flex; flex-wrap: wrap; gap: 2rem; align-items: flex-start; }}
.wide {{ overflow-x: auto; max-width: 100%; }}
table {{ border-collapse: collapse; font-size: 14px; }}
figure {{ margin: 0; font-size: 13px; }}
footer, .small {{ opacity: .75; font-size: .9rem; }}
</style>
<h1>{title}</h1>
<p class="small">{about}</p>
<div class="parts"><div class="wide">{table}</div>
<figure><img alt="matrix of interactions" width="260" height="260" style="image-rendering:pixelated" src="{picture}">
<figcaption>all pairs: √E[H²] times the scales of both,<br>white is 0, red the strongest</figcaption></figure></div>
<footer>{limits}</footer>
</html>
"""


def global_page(
    found: GlobalInteractions,
    path: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    k: int = 20,
    q: float = 0.05,
    title: str = "Which features act together over the data set",
) -> Path:
    """Write a self-contained HTML page of the interactions of a data set, atomically.

    Args:
        found: The result of `global_interactions`.
        path: The HTML file, in an existing folder; an existing file is replaced.
        names, k, q: As for `GlobalInteractions.top_pairs`.
        title: Title of the page.

    Returns:
        The path of the page.

    Raises:
        ValueError: If the folder does not exist.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise ValueError(f"the folder {target.parent} does not exist. Create it first.")
    size = len(found.scales)
    about = (
        f"{size} features, {len(found)} records, {found.method}. ± is half of a 95 % interval over records. A pair is "
        f"significant if q ≤ {q:g}; others are pale."
    )
    text = PAGE.format(
        title=markup.escape(title),
        about=markup.escape(about),
        table=_table(found, names, k, q),
        picture=_picture(found),
        limits=markup.escape(LIMITS),
    )
    with atomic_write(target) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")
    return target


def _table(found: GlobalInteractions, names: Sequence[str] | None, k: int, q: float) -> str:
    heads = ("√E[H²]·scales", "E[H²]", "mean H", "mean |H|", "q")
    rows = [f'<tr><th style="{CELL};text-align:left">pair</th>{_cells(heads, "th")}</tr>']
    mean, half = found.mean.value, found.mean.half_width()
    for p in found.top_pairs(k, names, q=q):
        at = p.i, p.j
        low, high = max(0.0, float(found.mean_abs.value[at])), float(found.mean_abs_upper.value[at])
        cells = (
            f"{p.effect:.3g}",
            plus_minus(p.value, (p.high - p.low) / 2),
            plus_minus(float(mean[at]), float(half[at])),
            f"{low:.3g} … {high:.3g}",
            f"{p.q_value:.2g}",
        )
        faint = "" if p.significant else ' style="opacity:.6"'
        name = markup.escape(" × ".join(p.names))
        rows.append(f'<tr{faint}><td style="{CELL};text-align:left">{name}</td>{_cells(cells, "td")}</tr>')
    return f"<table>{''.join(rows)}</table>"


def _cells(texts: Sequence[str], tag: str) -> str:
    return "".join(f'<{tag} style="{CELL}">{markup.escape(text)}</{tag}>' for text in texts)


def _picture(found: GlobalInteractions) -> str:
    """All pairs as the data URI of an image: white for 0, red for the strongest; the diagonal is left white."""
    scales = canvas.array(found.scales)
    strength = np.sqrt(np.clip(canvas.array(found.mean_square.value), 0, None)) * scales[:, None] * scales
    np.fill_diagonal(strength, 0.0)
    share = (strength / canvas.symmetric_limit(strength))[..., None]
    return encoding.png(np.rint(255 + share * (np.array(RED) - 255.0)).astype(np.uint8))
