"""The notebook representation of a result: a small static table and heat map, without scripts.

The interactive page includes a plotting library of 1.5 MB. Notebooks store every output in their file, and many viewers
remove scripts, so the notebook shows a summary of a few kilobytes that names the function for the interactive page.
"""

from __future__ import annotations

import html as markup
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from smoothhess.result.text import LIMITS
from smoothhess.view import captions
from smoothhess.view.figures import canvas
from smoothhess.view.report import encoding
from smoothhess.view.report.encoding import Array
from smoothhess.view.report.quality_levels import readings

if TYPE_CHECKING:
    from smoothhess.result.pairs import Pair
    from smoothhess.result.result import Result

MOST_FEATURES = 1024  # with more, computing the pairs is too slow for a cell output
PAIRS, EXAMPLES = 8, 4
RED, BLUE = (200, 40, 55), (45, 120, 195)  # visible on white and on black
SIGNS = {"good": "●", "fair": "▲", "poor": "■", "plain": "○"}
CELL = "padding:2px 10px 2px 0;text-align:right;background:none;border:none;font-variant-numeric:tabular-nums"


def html(result: Result, *, names: Sequence[str] | None = None, pairs: int = PAIRS) -> str:
    """Return a summary for notebooks: quality, the strongest pairs with their intervals, and an image of the matrix.

    Args:
        result: The result; up to four examples are shown.
        names: One name per feature or group.
        pairs: Number of pairs per example.

    Returns:
        An HTML fragment.

    >>> import torch, smoothhess as sh
    >>> result = sh.SmoothHess(lambda x: x[:, 0] * x[:, 1]).attribute(torch.zeros(1, 3), sigma=0.5, n_calls=400)
    >>> "age × dose" in html(result, names=["age", "dose", "height"])
    True
    """
    shown = min(len(result), EXAMPLES)
    what = captions.plural(captions.noun(result))
    hidden = "" if shown == len(result) else f"; the first {shown} are shown"
    many = "s" if len(result) > 1 else ""
    head = f"{len(result)} example{many} × {result.shape[1]} {what}, {result.gaussian_text}{hidden}"
    parts = [_example(result[b], f"Example {b}" if len(result) > 1 else "", names, pairs) for b in range(shown)]
    return (
        '<div style="font:14px/1.45 system-ui,sans-serif;max-width:60em">'
        f'<div><b>Interactions</b> <span style="opacity:.7">{markup.escape(head)}</span></div>{"".join(parts)}'
        f'<div style="opacity:.7;font-size:12px;margin-top:8px">{LIMITS} '
        '<code>result.report("explanation.html")</code> writes the interactive page.</div></div>'
    )


def _example(one: Result, heading: str, names: Sequence[str] | None, pairs: int) -> str:
    quality = " &nbsp; ".join(
        f'<span title="{markup.escape(r.meaning)}">{SIGNS[r.level]} {r.name} {r.figure} '
        f'<span style="opacity:.7">({markup.escape(r.verdict)})</span></span>'
        for r in readings(one)
    )
    title = f'<div style="margin-top:10px"><b>{heading}</b></div>' if heading else ""
    line = f'<div style="margin:4px 0 6px;font-size:13px">{quality}</div>'
    if not 1 < one.shape[1] <= MOST_FEATURES:
        few = one.shape[1] < 2
        why = "a single feature has no pairs." if few else "too many features for a table of pairs: use groups(mask)."
        return f'{title}{line}<div style="opacity:.7">{why}</div>'
    found = one.top_pairs(pairs, canvas.names_of(one, names))[0]
    return (
        f'{title}{line}<div style="display:flex;flex-wrap:wrap;gap:24px;align-items:flex-start">'
        f"{_table(found, one.design != 'exact')}{_matrix(one)}</div>"
    )


def _table(found: list[Pair], sampled: bool) -> str:
    ends = [abs(x) for p in found for x in (p.low, p.high) if math.isfinite(x)]
    reach = max(ends, default=0.0) or 1.0
    header = "".join(f'<th style="{CELL}">{t}</th>' for t in ("H", "95 % interval", "", "effect", "q"))
    rows = "".join(_row(p, reach, sampled) for p in found)
    return (
        '<table style="border-collapse:collapse;font-size:13px;margin:0">'
        f'<tr><th style="{CELL};text-align:left">pair</th>{header}</tr>{rows}</table>'
    )


def _row(p: Pair, reach: float, sampled: bool) -> str:
    low, high = (min(max(x, -reach), reach) for x in (p.low, p.high))
    colour = "#{:02x}{:02x}{:02x}".format(*(RED if p.value > 0 else BLUE))
    fill = colour if p.significant else "none"
    scale = 46 / reach
    picture = (
        f'<svg width="104" height="12" viewBox="-52 -6 104 12" role="img" aria-label="interval">'
        f'<path d="M0-6V6" stroke="currentColor" opacity=".4"/>'
        f'<path d="M{low * scale:.1f} 0H{high * scale:.1f}" stroke="{colour}" stroke-width="2"/>'
        f'<circle cx="{p.value * scale:.1f}" r="3.5" fill="{fill}" stroke="{colour}" stroke-width="1.5"/></svg>'
    )
    interval, q = f"{p.low:+.3g} … {p.high:+.3g}", f"{p.q_value:.2g}"
    if not math.isfinite(p.high - p.low):
        interval = "unknown"
    if not sampled:  # exact results have no sampling error
        interval, q = "–", "–"
    cells = (f"{p.value:+.3g}", interval, picture, f"{p.effect:+.3g}", q)
    name = markup.escape(" × ".join(p.names))
    faint = "" if p.significant else ";opacity:.6"
    return (
        f'<tr style="background:none{faint}"><td style="{CELL};text-align:left">{name}</td>'
        + "".join(f'<td style="{CELL}">{cell}</td>' for cell in cells)
        + "</tr>"
    )


def _matrix(one: Result) -> str:
    hessian, stderr = canvas.array(one.hessian[0]), canvas.array(one.stderr()[0])
    faint = canvas.within_noise(canvas.array(one.unshrunk().hessian[0]), stderr)
    colours = _colours(hessian / canvas.symmetric_limit(hessian), faint)
    return (
        f'<figure style="margin:0;font-size:12px"><img alt="matrix of interactions" width="200" height="200" '
        f'style="image-rendering:pixelated;border:1px solid rgba(128,128,128,.4)" src="{encoding.png(colours)}">'
        '<figcaption style="opacity:.7">all pairs: red above 0, blue below,<br>'
        "pale within noise (|z| &lt; 2)</figcaption></figure>"
    )


def _colours(share: Array, faint: Array) -> Array:
    """Map −1 to blue, 0 to white and 1 to red, with a quarter of the intensity where faint."""
    strength = (np.abs(share) * np.where(faint, canvas.FAINT, 1.0))[..., None]
    full = np.where(share[..., None] > 0, RED, BLUE)
    return np.rint(255 + strength * (full - 255.0)).astype(np.uint8)
