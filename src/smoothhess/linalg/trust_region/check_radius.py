"""Validation of a radius."""

from __future__ import annotations

import math
from typing import Any


def check_radius(radius: Any) -> None:
    """Raise unless `radius` is a positive, finite number."""
    try:
        good = math.isfinite(radius) and radius > 0
    except (TypeError, ValueError, RuntimeError):
        good = False
    if not good:
        raise ValueError(f"radius must be a positive number, the radius of the ball around each input, got {radius!r}.")
