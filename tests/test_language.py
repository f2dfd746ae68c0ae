"""Plain technical English: phrases that a reader could not search for stay out of code, README and documentation."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PHRASES = (
    "way back",
    "at the door",
    "side by side",
    "whole or not at all",
    "gone on with",
    "survives any end",
    r"witness(?:es)?",
    "by luck",
    "has the word",
    r"rival(?:s|ry)?",
    r"contests?",
    "made again",
    "of (?:its|their) own",
)
FILES = [
    path
    for folder, pattern in (("src/smoothhess", "*.py"), ("paper", "*.py"), ("docs", "*.md"), (".", "*.md"))
    for path in (ROOT / folder).glob(pattern if folder == "." else f"**/{pattern}")
    if path.name != "CHANGELOG.md"  # which names what things were called before
]

pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="an installed package has no docs")


@pytest.mark.parametrize("phrase", PHRASES)
def test_phrase_is_not_used(phrase):
    pattern = re.compile(rf"\b{phrase}\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found
