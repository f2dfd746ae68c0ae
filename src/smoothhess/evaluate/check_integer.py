"""Validation of arguments that must be integers."""

from __future__ import annotations

from typing import Any


def check_integer(number: Any, name: str, least: int) -> None:
    """Raise unless `number` is an integer of at least `least`."""
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError(f"{name} must be an integer, got {type(number).__name__}.")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}.")
