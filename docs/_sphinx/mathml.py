"""Render formulas as MathML, which browsers display without scripts or network access.

A displayed formula with a label, `$$…$$ (label)`, has a number, and {eq}`label` links to it.
"""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.writers.html5 import HTML5Translator

logger = logging.getLogger(__name__)

# docutils reads 12 in \frac12 as one argument, places the subscript of an accented letter under the letter, makes the
# bars of a norm as high as the formula, and leaves no space after an operator such as Var.
DIGITS = re.compile(r"\\(t?frac) ?(\d)(\d)")
ACCENT = re.compile(r"(\\(?:hat|bar|tilde)(?: ?[A-Za-z]|\{[^{}]*\}|\\[a-z]+))_")
BAR = re.compile(r'<mo(?: stretchy="false")?>([|‖])</mo>')
OPERATOR = re.compile(r"<mo>&ApplyFunction;</mo>(?=\s*<(?:mi|msu[bp]))")


def mathml(source: str, as_block: bool) -> str:
    """The formula in MathML; raises MathError if it cannot be read."""
    source = ACCENT.sub(r"\1{}_", DIGITS.sub(r"\\\1{\2}{\3}", source))
    found = BAR.sub(r'<mo stretchy="false" lspace="0" rspace="0">\1</mo>', str(tex2mathml(source, as_block=as_block)))
    return OPERATOR.sub('<mo>&ApplyFunction;</mo><mspace width="0.17em"/>', found)


def _rendered(node: nodes.Element, as_block: bool) -> str:
    """The formula of a node; its source, and a warning, where it cannot be read."""
    try:
        return mathml(node.astext(), as_block)
    except MathError as error:
        logger.warning("formula %r: %s", node.astext(), error, location=node)
        return f"<code>{escape(node.astext())}</code>"


def _inline(self: HTML5Translator, node: nodes.math) -> None:
    self.body.append(_rendered(node, as_block=False))
    raise nodes.SkipNode


def _block(self: HTML5Translator, node: nodes.math_block) -> None:
    number = f'<span class="eqno">({node["number"]})</span>' if node.get("number") else ""
    self.body.append(f'<div class="math">{_rendered(node, as_block=True)}{number}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer as html_math_renderer = "mathml"."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
