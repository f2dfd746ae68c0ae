"""The source tree in numbers: lines of code, and the modules that one call passes.

    python benchmarks/tree.py

Pairs are distinct (module that calls, module that is called) inside smoothhess, during one `attribute` call.
"""

from __future__ import annotations

import io
import sys
import tokenize
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import smoothhess as sh

ROOT = Path(sh.__file__).parent
CALLS: dict[str, dict[str, Any]] = {
    "n_calls=64, control=None, shrink=False": {"n_calls": 64, "control": None, "shrink": False},
    "n_calls=64": {"n_calls": 64},
    "defaults": {},
    "feature_mask": {"n_calls": 64, "feature_mask": torch.arange(8) // 2},
    "Dense": {"n_calls": 64, "radius": None, "gaussian": sh.Dense(torch.eye(8) * 0.1 + 0.01)},
}


LAYOUT = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}


def code_lines(path: Path) -> int:
    """Lines that hold something beside comments and docstrings."""
    lines: set[int] = set()
    previous = tokenize.INDENT
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        statement = token.type == tokenize.STRING and previous in (tokenize.INDENT, tokenize.NEWLINE, tokenize.DEDENT)
        if token.type not in LAYOUT and not statement:
            lines.update(range(token.start[0], token.end[0] + 1))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            previous = token.type
    return len(lines)


def pairs_of(**options: Any) -> set[tuple[str, str]]:
    """Distinct pairs of modules in one call."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)).double()
    found: set[tuple[str, str]] = set()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_back is not None:
            names = [f.f_globals.get("__name__", "") for f in (frame.f_back, frame)]
            if all(name.startswith("smoothhess") for name in names) and names[0] != names[1]:
                found.add((names[0], names[1]))

    x = torch.zeros(1, 8, dtype=torch.float64)
    sys.setprofile(watch)
    try:
        sh.SmoothHess(net).attribute(x, 0, **{"radius": 0.5, **options})
    finally:
        sys.setprofile(None)
    return found


def main() -> None:
    files = sorted(ROOT.rglob("*.py"))
    loose = [p.stem for p in ROOT.glob("*.py") if not p.stem.startswith("_")]
    lines = sum(len(p.read_text().splitlines()) for p in files)
    print(f"{len(files)} files, {sum(map(code_lines, files))} lines of code, {lines} in all")
    print(f"modules outside of packages: {len(loose)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, options in CALLS.items():
            found = pairs_of(**options)
            print(f"{name}: {len(found)} pairs of modules, {len({m for pair in found for m in pair})} modules")


if __name__ == "__main__":
    main()
