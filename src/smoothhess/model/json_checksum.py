"""Checksums of the contents of JSON files. Those of tensor files are in `tensor_hash`; nothing here imports torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def text_digest(text: str) -> str:
    """A 64-bit hash of a text."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def with_checksum(about: Mapping[str, Any]) -> dict[str, Any]:
    """An object for a JSON file with a checksum of its other entries.

    >>> parse_checked(json.dumps(with_checksum({"n": 1})))
    {'n': 1}
    >>> parse_checked(json.dumps(with_checksum({"n": 1})).replace("1", "2", 1))
    Traceback (most recent call last):
    ValueError: its checksum does not match
    """
    plain = json.loads(json.dumps(about))  # keys are text, as they will be read
    plain.pop("checksum", None)
    return {**plain, "checksum": text_digest(json.dumps(plain, sort_keys=True))}


def parse_checked(text: str | bytes) -> Any:
    """The object that `with_checksum` made, without its checksum; objects that were written without one are accepted.

    Raises:
        ValueError: the text is not JSON, is nested too deeply, or has changed since it was written.
    """
    try:
        about = json.loads(text)
        checksum = about.pop("checksum", None) if isinstance(about, dict) else None
        if checksum is not None and checksum != text_digest(json.dumps(about, sort_keys=True)):
            raise ValueError("its checksum does not match")
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return about
