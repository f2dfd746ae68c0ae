"""Draws the input of one example with its strongest pairs, as HTML without scripts, for notebooks.

Images have a line between both features of each pair, curves and texts mark the strongest pair. Tables have no picture.
"""

from __future__ import annotations

import html as markup
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from smoothhess.view import captions, token_text
from smoothhess.view.figures import canvas
from smoothhess.view.report import encoding, feature_layout
from smoothhess.view.report.encoding import Array
from smoothhess.view.report.feature_layout import Layout

if TYPE_CHECKING:
    from smoothhess.result.pairs import Pair
    from smoothhess.result.result import Result

SIDE = 260  # pixels of a picture on the screen
MOST_TOKENS = 200
MOST_PIXELS = 150  # along a side of the picture that is stored
RED, BLUE, GOLD = (200, 40, 55), (45, 120, 195), (255, 194, 10)  # visible on white and on black


def css_colour(rgb: Sequence[int], opacity: float = 1.0) -> str:
    """Return a colour for a style attribute.

    >>> css_colour((255, 0, 10)), css_colour((255, 0, 10), 0.25)
    ('#ff000a', 'rgba(255,0,10,0.25)')
    """
    return "#{:02x}{:02x}{:02x}".format(*rgb) if opacity == 1 else f"rgba({','.join(map(str, rgb))},{opacity:.2g})"


def sign_colour(value: float) -> tuple[int, int, int]:
    """Return red for positive and blue for negative values."""
    return RED if value > 0 else BLUE


def picture(one: Result, pairs: Sequence[Pair]) -> str:
    """Return the picture of the input, or "" for a table; `pairs` are the strongest, in order."""
    try:
        where = feature_layout.find_layout(one, None, None, None)
    except ValueError:  # groups without a place
        return ""
    found = [p for p in pairs if p.significant or one.design == "exact"]
    if where.kind == "image":
        return _figure(
            _image(one, where, found), "the input; red and blue lines: significant pairs" if found else "the input"
        )
    if where.kind == "series":
        return _figure(_series(one, where, pairs), "the input; shaded: the strongest pair")
    if where.kind == "text" and len(where.ids) <= MOST_TOKENS:
        return _text(one, pairs)
    return ""


def _figure(drawn: str, caption: str) -> str:
    return (
        f'<figure style="margin:0;font-size:12px">{drawn}<figcaption style="opacity:.7">{caption}</figcaption></figure>'
    )


def _image(one: Result, where: Layout, pairs: Sequence[Pair]) -> str:
    height, width = where.ids.shape
    pixels = encoding.png(_reduced(feature_layout.pixels(None, one.inputs, 0, 1)))
    unit = max(height, width) / SIDE  # pixels of the image per pixel of the screen
    largest = max((abs(p.effect) for p in pairs), default=0.0) or 1.0
    lines, ends = [], {}
    for p in reversed(pairs):
        (x0, y0), (x1, y1) = (_middle(where.ids, k) for k in (p.i, p.j))
        weight = unit * (1.5 + 4 * abs(p.effect) / largest)
        lines.append(
            f'<path d="M{x0:.2f} {y0:.2f}L{x1:.2f} {y1:.2f}" stroke="{css_colour(sign_colour(p.value))}" '
            f'stroke-width="{weight:.3g}" stroke-opacity=".85"/>'
        )
        ends |= {p.i: (x0, y0), p.j: (x1, y1)}
    dots = "".join(
        f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{4 * unit:.3g}" fill="#fff" stroke="#222" stroke-width="{unit:.3g}"/>'
        for x, y in ends.values()
    )
    smooth = "auto" if max(height, width) > 64 else "pixelated"
    return (
        f'<svg width="{width / unit:.0f}" height="{height / unit:.0f}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="the input with its strongest pairs" style="border:1px solid rgba(128,128,128,.4)">'
        f'<image href="{pixels}" width="{width}" height="{height}" style="image-rendering:{smooth}"/>'
        f"{''.join(lines)}{dots}</svg>"
    )


def _reduced(pixels: Array) -> Array:
    """Return means over squares of pixels if there are more pixels than `MOST_PIXELS` along a side."""
    step = -(-max(pixels.shape[:2]) // MOST_PIXELS)
    if step == 1:
        return pixels
    height, width = (size // step * step for size in pixels.shape[:2])
    blocks = pixels[:height, :width].reshape(height // step, step, width // step, step, -1).mean((1, 3))
    return np.rint(blocks).astype(np.uint8).reshape(height // step, width // step, *pixels.shape[2:])


def _middle(ids: Array, k: int) -> tuple[float, float]:
    """Return x and y of the pixel of a segment that is closest to the mean of its pixels."""
    rows, columns = np.nonzero(ids == k)
    if not len(rows):
        return math.nan, math.nan
    away = (rows - rows.mean()) ** 2 + (columns - columns.mean()) ** 2
    if away.min() < 1:
        return float(columns.mean()) + 0.5, float(rows.mean()) + 0.5
    nearest = int(away.argmin())
    return float(columns[nearest]) + 0.5, float(rows[nearest]) + 0.5


def _series(one: Result, where: Layout, pairs: Sequence[Pair]) -> str:
    curves = canvas.array(one.inputs[0]).reshape(-1, len(where.ids))
    width, height, length = 420, 150, curves.shape[1]
    low, high = float(curves.min()), float(curves.max())
    x = (np.arange(length) + 0.5) * width / length
    y = height - 8 - (curves - low) / (high - low or 1.0) * (height - 16)
    bands = []
    for k in (pairs[0].i, pairs[0].j) if pairs else ():
        at = np.flatnonzero(where.ids == k)
        start, end = at.min() * width / length, (at.max() + 1) * width / length
        fill = css_colour(GOLD if k == pairs[0].i else sign_colour(pairs[0].value))
        bands.append(f'<path d="M{start:.1f} 0H{end:.1f}V{height}H{start:.1f}Z" fill="{fill}" fill-opacity=".35"/>')
    lines = "".join(
        f'<path d="M{"L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, row, strict=True))}" fill="none" '
        f'stroke="currentColor" stroke-width="1.4"/>'
        for row in y
    )
    return (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="the curve" '
        f'style="border:1px solid rgba(128,128,128,.4);max-width:100%">{"".join(bands)}{lines}</svg>'
    )


def _text(one: Result, pairs: Sequence[Pair]) -> str:
    """The tokens: the first of the strongest pair is gold, the others are coloured by their interaction with it."""
    names = one.names[0] if one.names is not None else [f"{captions.noun(one)} {k}" for k in range(one.shape[1])]
    row = canvas.array(one.unshrunk().row(pairs[0].i).value[0]).reshape(-1) if pairs else np.zeros(len(names))
    source = pairs[0].i if pairs else -1
    row[source if pairs else 0] = 0.0
    limit = canvas.symmetric_limit(row)
    words = []
    for k, token in enumerate(token_text.readable(names)):
        fill = css_colour(GOLD) if k == source else css_colour(sign_colour(row[k]), 0.7 * abs(row[k]) / limit)
        ink = ";color:#111" if k == source else ""
        gap = "<br>" if token.gap == "\n" else token.gap
        style = f"background:{fill};border-radius:4px;padding:1px 3px{ink}"
        words.append(f'{gap}<span style="{style}">{markup.escape(token.text)}</span>')
    caption = "gold: first token of the strongest pair; colours: what acts together with it"
    return _figure(f'<div style="font-size:16px;line-height:1.9;max-width:34em">{"".join(words)}</div>', caption)
