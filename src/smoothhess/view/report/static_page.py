"""Builds self-contained HTML pages without interaction, in the style that all pages of the package share."""

from __future__ import annotations

import html as markup
from collections.abc import Sequence
from importlib.resources import files

from smoothhess.result.text import LIMITS

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
<script>
const prefersDark = matchMedia("(prefers-color-scheme: dark)").matches;
document.documentElement.dataset.theme = prefersDark ? "dark" : "light";
</script>
</head>
<body>
<header><h1>{title}</h1></header>
<main>
{body}
<aside class="limits" aria-label="Limits"><strong>Limits.</strong> {limits}</aside>
<details class="made"><summary>How this page was made</summary><dl>{made}</dl></details>
</main>
</body>
</html>
"""


def static_page(title: str, body: str, made: Sequence[tuple[str, str]], style: str = "", limits: str = LIMITS) -> str:
    """Return a page.

    Args:
        title: Title, as text.
        body: What follows the title, as HTML; the classes are those of `style.css`.
        made: Terms and descriptions of how the numbers were computed, as text.
        style: CSS after that of `style.css`.
        limits: What the intervals describe and do not show, as text.

    Returns:
        The HTML of the page.

    >>> "<h1>A &lt; B</h1>" in static_page("A < B", "<p>…</p>", [("Date", "2026-01-02")])
    True
    """
    rows = "".join(f"<dt>{markup.escape(term)}</dt><dd>{markup.escape(words)}</dd>" for term, words in made if words)
    style = files("smoothhess.view.report").joinpath("style.css").read_text(encoding="utf-8") + style
    return PAGE.format(title=markup.escape(title), style=style, body=body, limits=markup.escape(limits), made=rows)


def bar_with_interval(value: float, low: float, high: float, limit: float, *, least: float, faint: bool = False) -> str:
    """Return a bar from zero with its interval, on a scale from `least` (−limit, or 0) to `limit`, as HTML.

    >>> 'left:50%;width:25%' in bar_with_interval(1.0, 0.5, 1.5, 2.0, least=-2.0)
    True
    >>> 'left:0%;width:50%' in bar_with_interval(1.0, 0.5, 1.5, 2.0, least=0.0)
    True
    """
    ends = [100 * (max(least, min(limit, x)) - least) / (limit - least) for x in (0.0, value, low, high)]
    zero, at, start, stop = (round(end, 2) for end in ends)
    sign = "pos" if value > 0 else "neg"
    bar = f'<i class="bar" style="left:{min(zero, at):g}%;width:{abs(at - zero):g}%;background:var(--{sign})"></i>'
    whisker = f'<i class="whisker" style="left:{start:g}%;width:{stop - start:g}%"></i>' if stop > start else ""
    axis = f'<i class="zero" style="left:{zero:g}%"></i>'
    return f'<span class="track{" faint" if faint else ""}">{bar}{axis}{whisker}</span>'
