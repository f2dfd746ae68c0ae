"""Tokens of a tokenizer as readable text: markers of sub-words become spaces or joins, repeated tokens get an index.

Markers are those of byte-level BPE ("Ġ" before a word, as in GPT-2 and RoBERTa), of SentencePiece ("▁" before a word),
of WordPiece ("##" inside a word, as in BERT), and of BPE ("</w>" at the end of a word, as in CLIP, or "@@" at the end
of all other tokens). Tokens without markers are words.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

CLOSING = frozenset(".,;:!?%)]}…")  # no space before these, where tokens do not mark spaces
SPECIAL = re.compile(r"<[^<>]+>|\[[A-Z]+\]")  # "<s>", "<|endoftext|>", "[CLS]"
WHITESPACE = {True: "↵", False: "␣"}  # shown for a token of whitespace, by whether it contains a line break

_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that byte-level BPE writes as themselves
_OTHERS = [byte for byte in range(256) if byte not in _PLAIN]
_BYTES = {chr(byte): byte for byte in _PLAIN} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}


class Token(NamedTuple):
    """A token as it is shown."""

    text: str
    gap: str  # between it and the token before: "", " " or "\\n"


def readable(names: Sequence[str]) -> list[Token]:
    """Return the tokens of one text without markers, with the gaps between them.

    >>> "".join(token.gap + token.text for token in readable(["un", "##believ", "##able", "film", "!"]))
    'unbelievable film!'
    >>> [token.text for token in readable(["Not", "Ġso", "Ġgood", ".", "Ċ", "ĠÃ©t", "Ã©"])]
    ['Not', 'so', 'good', '.', '↵', 'ét', 'é']
    """
    found: list[Token] = []
    spaces = ""  # whitespace at the end of the token before
    for name, text in zip(names, _spaced(names), strict=True):
        body = text.strip()
        spaces += text[: len(text) - len(text.lstrip())] if body else ""
        apart = bool(spaces) or not body or SPECIAL.fullmatch(name) or (found and SPECIAL.fullmatch(found[-1].text))
        gap = "\n" if "\n" in spaces else " " if apart else ""
        found.append(Token(body or WHITESPACE["\n" in text], gap if found else ""))
        spaces = text[len(text.rstrip()) :] if body else text
    return found


def labels(names: Sequence[str]) -> list[str]:
    """Return a short name for each token; tokens that occur more than once have their index in brackets.

    >>> labels(["▁the", "▁film", "▁and", "▁the", "▁plot"])
    ['the (0)', 'film', 'and', 'the (3)', 'plot']
    """
    texts = [token.text for token in readable(names)]
    count = Counter(texts)
    return [f"{text} ({i})" if count[text] > 1 else text for i, text in enumerate(texts)]


def _spaced(names: Sequence[str]) -> list[str]:
    """Return the tokens with spaces in place of markers."""
    if any(name.startswith(("Ġ", "Ċ")) for name in names):
        return [_decoded(name) for name in names]
    if any("▁" in name for name in names):
        return [name.replace("▁", " ").replace("<0x0A>", "\n") for name in names]
    if any(name[:1].isspace() for name in names):
        return list(names)
    if any(name.endswith("</w>") for name in names):
        return _words(names, [name.endswith("</w>") or bool(SPECIAL.fullmatch(name)) for name in names], "</w>")
    if any(name.endswith("@@") for name in names):
        return _words(names, [not name.endswith("@@") for name in names], "@@")
    return [
        name[2:] if name.startswith("##") and len(name) > 2 else name if name in CLOSING else f" {name}"
        for name in names
    ]


def _words(names: Sequence[str], ends: Sequence[bool], marker: str) -> list[str]:
    """Return the tokens without markers, with a space after those that end a word."""
    bare = [name.removesuffix(marker) for name in names]
    starts = [False, *ends][: len(names)]
    return [f" {name}" if start and name not in CLOSING else name for name, start in zip(bare, starts, strict=True)]


def _decoded(name: str) -> str:
    """Return the text of a token of byte-level BPE, which writes each byte as one character."""
    if not all(character in _BYTES for character in name):  # an added token, which is not written in bytes
        return name.replace("Ġ", " ").replace("Ċ", "\n")
    return bytes(_BYTES[character] for character in name).decode("utf-8", errors="replace")
