"""Text for terminals: control characters are escaped, and characters that a stream cannot encode are replaced."""

from __future__ import annotations

import io
import re
import sys

# C0 and C1 control characters without the line feed, and those that change the direction of text
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""Return the text with control characters as escapes; line feeds are kept.

    >>> printable("\x1b[2J") == "\\x1b[2J", printable("two\nlines") == "two\nlines"
    (True, True)
    """
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    r"""Return the text as one printable line: also line feeds become escapes.

    >>> one_line("a\nb") == "a\\nb"
    True
    """
    return printable(text).replace("\n", "\\n")


def replace_unencodable() -> None:
    """Make stdout and stderr replace characters that they cannot encode, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
