"""Writes the page of the interactions of a data set: a table of pairs and a picture of all of them, without scripts.

The interactive page of single examples belongs to `smoothhess.view.report`.
"""

from __future__ import annotations

import html as markup
import math
import os
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import numpy as np

from smoothhess._version import __version__
from smoothhess.evaluate.global_summary import GlobalInteractions
from smoothhess.model.atomic_write import atomic_write
from smoothhess.result.intervals import plus_minus
from smoothhess.result.pairs import Pair
from smoothhess.view.figures import canvas
from smoothhess.view.report import encoding
from smoothhess.view.report.inline_input import RED
from smoothhess.view.report.notebook_summary import SIGNS
from smoothhess.view.report.quality_levels import ERROR_FAIR, ERROR_GOOD
from smoothhess.view.report.static_page import bar_with_interval, static_page

LIMITS = (
    "The intervals describe the error from the choice of the records, with the Monte-Carlo error of each, for the "
    "smoothed Hessian of this network. They do not show whether an interaction is real, stable or causal."
)


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
    text = static_page(title, _body(found, names, k, q), _made(found), limits=LIMITS)
    with atomic_write(target) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")
    return target


def _body(found: GlobalInteractions, names: Sequence[str] | None, k: int, q: float) -> str:
    pairs = found.top_pairs(k, names, q=q)
    squares = found.mean_square
    error = float(squares.stderr.norm() / squares.value.norm())
    return (
        f"{_sentence(found, pairs, q)}"
        f'<div class="toolbar"><span class="quiet chip">{_verdict(error)}</span></div>'
        f'<div class="halves"><section class="card"><h2>The {len(pairs)} strongest pairs</h2>'
        f'<div class="scroll">{_table(found, pairs)}</div>'
        f'<p class="hint">Strength: √E[H²] times the {_scale_word(found)} of both features, with the 95 % interval '
        f"over records. ± is half of it. A pair is significant if q ≤ {q:g}; others are pale.</p></section>"
        f'<section class="card"><h2>All pairs</h2>{_picture(found)}'
        '<p class="hint">Features in their order, from the top left; white is 0, red the strongest. '
        "The diagonal is left out.</p></section></div>"
    )


def _sentence(found: GlobalInteractions, pairs: Sequence[Pair], q: float) -> str:
    if not pairs or not pairs[0].significant:
        words = f"No pair is significant over these {len(found)} records."
    else:
        first, second = (f"<b>{markup.escape(name)}</b>" for name in pairs[0].names)
        words = (
            f"Over {len(found)} records, {first} and {second} act together most: <b>{pairs[0].effect:.3g}</b> in root "
            f"mean square, each moved by its {_scale_word(found)}."
        )
    sure = sum(pair.significant for pair in found.top_pairs(len(found.scales) ** 2, q=q))
    small = f"{sure} of {len(found.scales) * (len(found.scales) - 1) // 2} pairs are significant."
    return f'<section class="sentence"><p>{words}</p><p class="small">{small}</p></section>'


def _scale_word(found: GlobalInteractions) -> str:
    """What the scale of a feature is called: σ, where there was noise."""
    return "σ" if "σ" in found.method else "scale"


def _verdict(error: float) -> str:
    level = "good" if error <= ERROR_GOOD else "fair" if error <= ERROR_FAIR else "poor"
    words = f"error {100 * error:.2g} %: {level}" if math.isfinite(error) else "error unknown"
    level = level if math.isfinite(error) else "poor"
    return f'<span data-level="{level}"><span class="sign">{SIGNS[level]}</span> {words}</span>'


def _made(found: GlobalInteractions) -> list[tuple[str, str]]:
    return [
        ("Records", str(len(found))),
        ("Features", str(len(found.scales))),
        ("Method", found.method),
        ("Error", "of all mean squares, over records: standard error relative to the size (Frobenius norm)"),
        ("Date", date.today().isoformat()),
        ("Made with", f"smoothhess {__version__}"),
    ]


def _table(found: GlobalInteractions, pairs: Sequence[Pair]) -> str:
    heads = ("strength", "", "E[H²]", "mean H", "mean |H|", "q")
    rows = ["<tr><th>pair</th>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"]
    mean, half = found.mean.value, found.mean.half_width()
    limit = max((p.effect * math.sqrt(max(p.high, 0.0) / p.value) for p in pairs if p.value > 0), default=1.0) or 1.0
    for p in pairs:
        at = p.i, p.j
        low, high = max(0.0, float(found.mean_abs.value[at])), float(found.mean_abs_upper.value[at])
        scale = p.effect / math.sqrt(p.value) if p.value > 0 else 0.0
        least, most = (scale * math.sqrt(max(x, 0.0)) for x in (p.low, p.high))
        cells = (
            f"{p.effect:.3g}",
            bar_with_interval(p.effect, least, most, limit, least=0.0, faint=not p.significant),
            plus_minus(p.value, (p.high - p.low) / 2),
            plus_minus(float(mean[at]), float(half[at])),
            f"{low:.3g} … {high:.3g}",
            f"{p.q_value:.2g}",
        )
        name = markup.escape(" × ".join(p.names))
        faint = "" if p.significant else ' class="faint"'
        rows.append(f"<tr{faint}><td>{name}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table>{''.join(rows)}</table>"


def _picture(found: GlobalInteractions) -> str:
    """All pairs as an image: white for 0, red for the strongest; the diagonal is left white."""
    scales = canvas.array(found.scales)
    strength = np.sqrt(np.clip(canvas.array(found.mean_square.value), 0, None)) * scales[:, None] * scales
    np.fill_diagonal(strength, 0.0)
    share = (strength / canvas.symmetric_limit(strength))[..., None]
    pixels = np.rint(255 + share * (np.array(RED) - 255.0)).astype(np.uint8)
    return f'<img class="matrix" alt="matrix of interactions" src="{encoding.png(pixels)}">'
