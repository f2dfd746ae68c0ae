"""Formats the printed summary of an explanation and the index page of several explanations."""

from __future__ import annotations

import html
import os
import sys
import textwrap
import urllib.parse
from collections.abc import Sequence

from tqdm import tqdm

from smoothhess.cli.explain.output_folder import Record
from smoothhess.cli.printable_text import one_line, printable
from smoothhess.result.effect_sizes import share_text
from smoothhess.result.interactions import Interactions
from smoothhess.result.pairs import Pair
from smoothhess.result.shown_estimate import error_text, shown
from smoothhess.result.text import LIMITS

WIDTH = 100
PAIRS = 5  # pairs printed per input
READING = (
    "H is the mixed second derivative of the smoothed output, with its 95 % interval. H > 0: raising both raises the "
    "output by more than the sum of their separate effects; H < 0: by less. Effect: H times one standard deviation of "
    "the noise in each, in units of the output. Size: the effect as a share of the separate effects of both and of the "
    "output's change over the noise; tiny: one of them is below 1 %, small: below 10 %, moderate: below 50 %."
)


def say(text: str) -> None:
    """Print without breaking a progress bar; after a broken pipe, as with `| head`, further output is discarded.

    Control characters, which may come from names in the files, are escaped.
    """
    try:
        tqdm.write(printable(text))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def table(pairs: Sequence[Pair]) -> str:
    """Format the strongest pairs, one per line."""
    if not pairs:
        return "  no pairs: there is a single feature"
    names = [one_line(" × ".join(p.names)) for p in pairs]
    width = max(map(len, names))
    lines = [f"  {'pair':<{width}}  {'H':>10}  {'95 % interval':<24}  {'effect':>10}  size"]
    for name, p in zip(names, pairs, strict=True):
        interval = f"[{p.low:+.4g}, {p.high:+.4g}]"
        star = "" if p.significant else ", not significant"
        size = f"{share_text(p.separate_share)} and {share_text(p.output_share)}, {p.size}{star}"
        lines.append(f"  {name:<{width}}  {p.value:>+10.4g}  {interval:<24}  {p.effect:>+10.4g}  {size}")
    return "\n".join(lines)


def quality(result: Interactions) -> str:
    """Format the quality figures of one example: the error and R² of the numbers of the pairs, calls."""
    one = shown(result)
    error, r2 = float(one.relative_error[0]), float(one.r2[0])
    explained = "" if r2 != r2 else f", R² {r2:.2f}"
    effective = f"{float(result.n_eff[0]):.0f} effective draws of {int(result.statistics.n[0])}"
    denoised = float(result.relative_error[0])
    stopped = ""
    if result.status[0] == "tolerance" and error_text(denoised) != error_text(error):
        stopped = f" (stopped by that of the denoised matrix, {error_text(denoised)})"
    return f"relative error {error_text(error)}{stopped}{explained}, {int(result.n_calls[0])} calls, {effective}"


def wrapped(text: str, indent: str = "") -> str:
    """Wrap a paragraph to the width of the printed text."""
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def index(title: str, records: Sequence[tuple[str, Record]]) -> str:
    """Return the HTML of a page that lists explanations with links to their pages."""
    rows = []
    for name, record in records:
        words = record.words
        cells = "".join(f'<td data-what="{h}">{html.escape(words.get(k, ""))}</td>' for k, h in SHOWN.items())
        link = f'<a href="{urllib.parse.quote(name)}.html">{html.escape(words.get("title", name))}</a>'
        rows.append(f"<tr><th scope=row>{link}</th>{cells}</tr>")
    heads = "".join(f"<th>{head}</th>" for head in SHOWN.values())
    return PAGE.format(
        title=html.escape(title),
        count=len(records),
        heads=heads,
        rows="\n".join(rows),
        limits=html.escape(f"Limits: {LIMITS}"),
    )


SHOWN = {"target": "explained output", "strongest": "strongest pair", "quality": "quality of the estimate"}
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: #8884; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.4rem; line-height: 1.3; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; padding: .45rem .8rem .45rem 0; border-bottom: 1px solid var(--line); }}
th, td {{ vertical-align: top; }}
th[scope=row] {{ font-weight: 600; white-space: nowrap; }}
footer {{ margin-top: 1.5rem; opacity: .75; font-size: .9rem; }}
@media (max-width: 600px) {{
thead {{ display: none; }}
tr, th, td {{ display: block; border: 0; padding: 0; }}
tr {{ padding: .6rem 0; border-bottom: 1px solid var(--line); }}
th[scope=row] {{ white-space: normal; }}
td::before {{ content: attr(data-what) ": "; opacity: .7; }}
}}
</style>
<h1>{title}</h1>
<p>{count} inputs, one page each: which features act together, how strongly, and with what error.</p>
<div class="wide"><table>
<thead><tr><th>input</th>{heads}</tr></thead>
<tbody>
{rows}
</tbody></table></div>
<footer>{limits}</footer>
</html>
"""
