"""The notebook representation of a result: the answer in words, the input with its strongest pairs, and their table.

It is a fragment of HTML of a few kilobytes without scripts: notebooks store every output in their file, and many
viewers remove scripts. The interactive page belongs to `smoothhess.view.report.report`.
"""

from __future__ import annotations

import html as markup
import importlib
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from smoothhess.result import shown_estimate
from smoothhess.result.effect_sizes import share_text
from smoothhess.result.intervals import plus_minus
from smoothhess.result.text import LIMITS
from smoothhess.view import captions
from smoothhess.view.figures import canvas
from smoothhess.view.report import encoding, inline_input
from smoothhess.view.report.encoding import Array
from smoothhess.view.report.inline_input import BLUE, RED, css_colour, sign_colour
from smoothhess.view.report.quality_levels import readings, verdict

if TYPE_CHECKING:
    from smoothhess.result.pairs import Pair
    from smoothhess.result.result import Result

MOST_FEATURES = 1024  # with more, computing the pairs is too slow for a cell output
PAIRS, EXAMPLES = 8, 4
SIGNS = {"good": "●", "fair": "▲", "poor": "■", "plain": "○"}
HEADS = ("H", "95 % interval", "", "effect", "of separate effects", "of output’s change", "size", "q")
CELL = "padding:2px 10px 2px 0;text-align:right;background:none;border:none;font-variant-numeric:tabular-nums"


def show(result: Result, *, names: Sequence[str] | None = None, pairs: int = PAIRS) -> None:
    """Display the summary of a result in a notebook; in a terminal, print its repr.

    Args:
        result: The result; up to four examples are shown.
        names: One name per feature or group; those of the result if None.
        pairs: Number of pairs per example.
    """
    ipython = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None:
        print(result)
        return
    content = {"text/html": html(result, names=names, pairs=pairs), "text/plain": repr(result)}
    importlib.import_module("IPython.display").display(content, raw=True)


def html(result: Result, *, names: Sequence[str] | None = None, pairs: int = PAIRS) -> str:
    """Return the summary for notebooks.

    Args:
        result: The result; up to four examples are shown.
        names: One name per feature or group; those of the result if None.
        pairs: Number of pairs per example.

    Returns:
        An HTML fragment without scripts.

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
        '<div style="font:14px/1.45 system-ui,sans-serif;max-width:76em">'
        f'<div><b>Interactions</b> <span style="opacity:.7">{markup.escape(head)}</span></div>{"".join(parts)}'
        f'<div style="opacity:.7;font-size:12px;margin-top:8px">{LIMITS} '
        '<code>result.report("explanation.html")</code> writes the interactive page.</div></div>'
    )


def _example(one: Result, heading: str, names: Sequence[str] | None, pairs: int) -> str:
    title = f'<div style="margin-top:10px"><b>{heading}</b></div>' if heading else ""
    if not 1 < one.shape[1] <= MOST_FEATURES:
        few = one.shape[1] < 2
        why = "a single feature has no pairs." if few else "too many features for a table of pairs: use groups(mask)."
        return f'{title}{_quality(one)}<div style="opacity:.7">{why}</div>'
    own = shown_estimate.shown(one)
    found = own.top_pairs(pairs, canvas.names_of(one, names))[0]
    drawn = inline_input.picture(own, found) or _matrix(own)
    return (
        f"{title}{_sentence(own, found[0])}{_quality(one)}"
        '<div style="display:flex;flex-wrap:wrap;gap:16px 28px;align-items:flex-start">'
        f"{drawn}{_table(found, one.design != 'exact')}</div>"
    )


def _sentence(own: Result, p: Pair) -> str:
    """The strongest pair in words."""
    named = (f"{captions.noun(own)} {name}" if name.startswith("(") else name for name in p.names)
    first, second = (f"<b>{markup.escape(name)}</b>" for name in named)
    gates = bool(own.feature_kind)  # per unit: from the baseline to the token
    move = 1.0 if gates else abs(p.effect / p.value) if p.value else 0.0
    amount = f"<b>{plus_minus(move * abs(p.value), move * (p.high - p.low) / 2)}</b>"
    if captions.is_attribution(own):
        words = f"The interaction of {first} and {second} is {plus_minus(p.value, 0.0)}."
    elif not p.significant and own.design != "exact":
        words = f"No pair is significant; the strongest is {first} and {second}."
    else:
        both, moved = ("the gates of ", "per unit of each gate") if gates else ("", "each moved by its σ")
        side = "above" if p.value > 0 else "below"
        words = (
            f"Raising {both}{first} and {second} together puts the output {side} the sum of their separate effects, by "
            f"{amount} ({moved})."
        )
    return f'<div style="font-size:17px;margin:6px 0 4px">{words}</div>'


def _quality(one: Result) -> str:
    """The verdict, which opens to the quality figures."""
    level, words = verdict(one)
    rows = "".join(
        f'<div style="margin:3px 0"><b>{r.name}: {r.figure}</b>, {markup.escape(r.verdict)}. '
        f'<span style="opacity:.7">{markup.escape(r.meaning)}</span></div>'
        for r in readings(one)
    )
    return (
        f'<details style="margin:2px 0 10px;font-size:13px"><summary style="cursor:pointer">{SIGNS[level]} '
        f'<b>{markup.escape(words)}</b></summary><div style="max-width:56em;margin:4px 0 0 16px">{rows}</div></details>'
    )


def _table(found: list[Pair], sampled: bool) -> str:
    ends = [abs(x) for p in found for x in (p.low, p.high) if math.isfinite(x)]
    reach = max(ends, default=0.0) or 1.0
    header = "".join(f'<th style="{CELL}">{t}</th>' for t in HEADS)
    rows = "".join(_row(p, reach, sampled) for p in found)
    return (
        '<table style="border-collapse:collapse;font-size:13px;margin:0">'
        f'<tr><th style="{CELL};text-align:left">pair</th>{header}</tr>{rows}</table>'
    )


def _row(p: Pair, reach: float, sampled: bool) -> str:
    low, high = (min(max(x, -reach), reach) for x in (p.low, p.high))
    colour = css_colour(sign_colour(p.value))
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
    size = (share_text(p.separate_share), share_text(p.output_share), p.size) if p.size else ("–",) * 3
    cells = (f"{p.value:+.3g}", interval, picture, f"{p.effect:+.3g}", *size, q)
    name = markup.escape(" × ".join(p.names))
    faint = "" if p.significant else ";opacity:.6"
    return (
        f'<tr style="background:none{faint}"><td style="{CELL};text-align:left">{name}</td>'
        + "".join(f'<td style="{CELL}">{cell}</td>' for cell in cells)
        + "</tr>"
    )


def _matrix(own: Result) -> str:
    hessian, stderr = canvas.array(own.hessian[0]), canvas.array(own.stderr()[0])
    faint = canvas.within_noise(hessian, stderr)
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
