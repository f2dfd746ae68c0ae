"""Text with numbers in it, compared as a reader would: words and whole numbers exactly, others to their last digit."""

import math
import re

NUMBER = re.compile(r"\d+(?:\.(\d+))?(?:e([-+]?\d+))?")


def alike(one: str, other: str, rel: float = 1e-6) -> bool:
    """Whether two texts differ by one unit in the last printed digit of their numbers at most, or by `rel` of them."""
    if NUMBER.sub("#", one) != NUMBER.sub("#", other):
        return False
    return all(_close(a, b, rel) for a, b in zip(NUMBER.finditer(one), NUMBER.finditer(other), strict=True))


def _close(a: re.Match[str], b: re.Match[str], rel: float) -> bool:
    if a[0].isdigit() and b[0].isdigit():
        return a[0] == b[0]
    return math.isclose(float(a[0]), float(b[0]), rel_tol=rel, abs_tol=1.01 * max(_unit(a), _unit(b)))


def _unit(number: re.Match[str]) -> float:
    """Of the last digit that is printed."""
    return 10.0 ** (int(number[2] or 0) - len(number[1] or ""))
