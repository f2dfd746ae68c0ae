"""Convert docstrings of this package, plain text with `code` in backticks, into reStructuredText.

Stars, bars and trailing underscores are literal; an indented paragraph is a formula and is kept verbatim; the entries
under "Args:" become the list of parameters, and comments after the fields of a record become their description.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx
SECTIONS = {"Args:": "param", "Raises:": "raises", "Returns:": "returns", "Warns:": "Warns"}


def plain(lines: list[str]) -> list[str]:
    """Return the same docstring in reStructuredText."""
    out: list[str] = []
    for paragraph in _paragraphs(lines):
        if paragraph[0].lstrip().startswith(">>>"):
            out += paragraph
        elif paragraph[0] in SECTIONS:
            out += _fields(SECTIONS[paragraph[0]], paragraph[1:])
        elif all(line.startswith("    ") for line in paragraph):
            out += ["::", "", *paragraph]
        else:
            out += _escaped("\n".join(paragraph)).split("\n")
        out.append("")
    return out


def _fields(kind: str, lines: list[str]) -> list[str]:
    """`name: words` and their further lines as fields; names before one colon share their words."""
    if kind == "returns":
        return [":returns:", *("    " + _escaped(line.strip()) for line in lines)]
    out: list[str] = []
    names: list[str] = []
    words: list[str] = []
    for line in [*lines, "    end: "]:
        begins = re.match(r"    ([\w*]+(?:, \w+)*): (.*)", line)
        if begins is None:
            words.append("    " + _escaped(line.strip()))
            continue
        for name in names:
            out += [f":{kind} {name}: {words[0]}", *words[1:]]
        names, words = begins[1].replace("*", r"\*").split(", "), [_escaped(begins[2])]
    return out


def _paragraphs(lines: list[str]) -> Iterator[list[str]]:
    current: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            current.append(line)
        elif current:
            yield current
            current = []


def _escaped(text: str) -> str:
    """Escape markup characters outside of backticks, except for *emphasis*."""
    parts = re.split(r"(`[^`]+`|(?<!\w)\*[A-Za-z][\w -]*\w\*(?!\w))", text)
    parts[::2] = [re.sub(r"([*|])|(_)(?=\W|$)", lambda m: "\\" + m.group(), part) for part in parts[::2]]
    parts[1::2] = [part + "\\ " for part in parts[1::2]]  # ends the markup, whatever letter follows
    return "".join(parts)


def field_comments(record: type) -> dict[str, str]:
    """Return the comments after the fields of a dataclass or named tuple, in order."""
    try:
        source = textwrap.dedent(inspect.getsource(record))
    except (OSError, TypeError):
        return {}
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    lines, found = source.split("\n"), {}
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            behind = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()  # type: ignore[operator]
            found[node.target.id] = behind.strip().removeprefix("#").strip()
    return found


def _process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = plain(lines)
    if what == "class" and (hasattr(obj, "__dataclass_fields__") or hasattr(obj, "_fields")):
        fields = field_comments(obj)
        lines += [f":ivar {field}: {_escaped(comment)}" for field, comment in fields.items()] + [""]


def _skip(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Fields of records are described with their class."""
    return True if str(getattr(obj, "__doc__", "")).startswith("Alias for field number") else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to autodoc."""
    app.connect("autodoc-process-docstring", _process)
    app.connect("autodoc-skip-member", _skip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
