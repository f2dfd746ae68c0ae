"""Writes the page of a comparison of two results: pairs as rows, a column for each result and one for the difference.

The page has no scripts. The interactive page of one result belongs to `smoothhess.view.report`.
"""

from __future__ import annotations

import html as markup
import math
import os
from pathlib import Path

from smoothhess._version import __version__
from smoothhess.evaluate.compare_results import ERRORS, ComparedPair, ResultComparison
from smoothhess.model.atomic_write import atomic_write
from smoothhess.result.effect_sizes import share_text
from smoothhess.result.intervals import plus_minus
from smoothhess.result.shown_estimate import error_text, shown_error
from smoothhess.view import captions
from smoothhess.view.report.static_page import static_page

STYLE = """
.compared { width: 100%; border-collapse: collapse; font-size: .92rem; }
.compared th, .compared td { text-align: right; padding: 7px 0 7px 18px; border-top: 1px solid var(--line);
  vertical-align: middle; white-space: nowrap; }
.compared thead th { border-top: 0; color: var(--soft); font-weight: 600; vertical-align: bottom; }
.compared th:first-child { text-align: left; padding-left: 0; font-weight: 600; white-space: normal; }
.compared svg { display: block; margin: 3px 0 0 auto; }
.compared .pale { opacity: .55; }
.compared .small { color: var(--soft); font-size: .85rem; }
.compared .more { color: var(--pos); } .compared .less { color: var(--neg); }
section.card { margin-top: 22px; }
.wide { overflow-x: auto; }
@media (max-width: 640px) {
  .compared thead { display: none; }
  .compared tr { display: block; border-top: 1px solid var(--line); padding: 10px 0; }
  .compared th, .compared td { display: flex; justify-content: space-between; gap: 12px; border: 0; padding: 2px 0;
    white-space: normal; text-align: right; }
  .compared td::before { content: attr(data-what); color: var(--soft); text-align: left; }
}
@media print { .card { break-inside: avoid; } }
"""


def comparison_page(
    found: ResultComparison,
    path: str | os.PathLike[str],
    *,
    k: int = 20,
    q: float = 0.05,
    title: str | None = None,
) -> Path:
    """Write a self-contained HTML page of the differences between two results, atomically.

    Args:
        found: The result of `compare_results`.
        path: The HTML file, in an existing folder; an existing file is replaced.
        k: Number of pairs of each example.
        q: False discovery rate at which a difference is significant; other differences are pale.
        title: Title of the page; a default if None.

    Returns:
        The path of the page.

    Raises:
        ValueError: If the folder does not exist.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise ValueError(f"the folder {target.parent} does not exist. Create it first.")
    one, other = found.names
    unit = captions.unit_words(found.results[0])
    lead = (
        f"The pairs in which {one} and {other} differ most, in units of the output {unit}. ± is half of a 95 % "
        f"interval. Errors of the differences: {ERRORS[found.errors]}. A difference is significant if q ≤ {q:g}; "
        "others are pale. Differences are drawn on another scale."
    )
    examples = found.pairs(k, q=q)
    sections = "\n".join(_section(found, b, pairs) for b, pairs in enumerate(examples))
    title = title or f"Where do {one} and {other} differ?"
    text = static_page(title, f'{sections}<p class="hint">{markup.escape(lead)}</p>', _made(found), STYLE)
    with atomic_write(target) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")
    return target


def _made(found: ResultComparison) -> list[tuple[str, str]]:
    """How the numbers were computed, as terms and their values."""
    one = found.results[0]
    sigma = float(one.feature_scales[0].square().mean().sqrt())
    noise = f"{type(one.gaussian).__name__}, root mean square of σ {sigma:.4g}"
    calls = " and ".join(str(int(r.n_calls.max())) for r in found.results)
    return [
        ("Noise", "none" if one.design == "exact" else noise),
        ("Gradient calls", "none" if one.design == "exact" else f"{calls} for each example"),
        ("Estimate", "unbiased"),
        ("Made with", f"smoothhess {__version__}"),
    ]


def _section(found: ResultComparison, example: int, pairs: list[ComparedPair]) -> str:
    one, other = (markup.escape(name) for name in found.names)
    facts = []
    for name, r in zip((one, other), found.results, strict=True):
        error = "" if r.design == "exact" else f", relative error {error_text(float(shown_error(r)[example]))}"
        facts.append(f"{name}: f(x) = {float(r.output[example]):.4g}{error}")
    heading = f"<h2>Example {example}</h2>" if len(found) > 1 else ""
    sentence = _sentence(pairs[0], one, other) if pairs else "There are no pairs to compare."
    reaches = _largest([x for p in pairs for x in p[3:9]]), _largest([x for p in pairs for x in (p.low, p.high)])
    heads = ("pair", one, other, f"{one} − {other}", "q")
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    rows = "\n".join(_row(p, reaches, heads) for p in pairs)
    return (
        f'{heading}<div class="sentence"><p>{sentence}</p><p class="small">{"; ".join(facts)}.</p></div>'
        '<section class="card"><div class="wide">'
        f'<table class="compared"><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div></section>'
    )


def _sentence(p: ComparedPair, one: str, other: str) -> str:
    """The pair whose interactions differ most, in words, as HTML."""
    name = f"<b>{markup.escape(' × '.join(p.names))}</b>"
    if p.stderr > 0 and not p.significant:
        return f"No pair differs significantly between {one} and {other}; the largest difference is that of {name}."
    amount = f"<b>{plus_minus(p.difference, (p.high - p.low) / 2)}</b>"
    return f"{one} and {other} differ most in the interaction of {name}: {one} minus {other} is {amount}."


def _largest(ends: list[float]) -> float:
    """The reach of the pictures of some intervals."""
    return max((abs(x) for x in ends if math.isfinite(x)), default=0.0) or 1.0


def _row(p: ComparedPair, reaches: tuple[float, float], heads: tuple[str, ...]) -> str:
    reach, of_differences = reaches
    cells = (
        _number(p.first, p.first_low, p.first_high, reach),
        _number(p.second, p.second_low, p.second_high, reach),
        _number(p.difference, p.low, p.high, of_differences, f"{share_text(p.share)} of the larger"),
    )
    q = "< 0.0001" if p.q_value < 1e-4 else f"{p.q_value:.2g}"
    q = "–" if p.stderr == 0 else q + ("" if p.significant else ", not significant")
    pale = ("", "", "" if p.significant else " class=pale", "")
    columns = "".join(
        f'<td data-what="{what}"{faint}>{cell}</td>'
        for what, faint, cell in zip(heads[1:], pale, (*cells, q), strict=True)
    )
    return f'<tr><th scope="row">{markup.escape(" × ".join(p.names))}</th>{columns}</tr>'


def _number(value: float, low: float, high: float, reach: float, small: str = "") -> str:
    """A number with its interval as text and as a picture."""
    colour = "more" if value > 0 else "less"
    scale = 58 / reach
    left, right = (min(max(x, -reach), reach) * scale if math.isfinite(x) else 0.0 for x in (low, high))
    note = f'<div class="small">{small}</div>' if small else ""
    return (
        f"<div>{plus_minus(value, (high - low) / 2)}{note}"
        f'<svg class="{colour}" width="124" height="10" viewBox="-62 -5 124 10" aria-hidden="true">'
        f'<path d="M0-5V5" stroke="var(--line)"/><path d="M-60 0H60" stroke="var(--line)"/>'
        f'<path d="M{left:.1f} 0H{right:.1f}" stroke="currentColor" stroke-width="2"/>'
        f'<circle cx="{value * scale:.1f}" r="3.5" fill="currentColor"/></svg></div>'
    )
