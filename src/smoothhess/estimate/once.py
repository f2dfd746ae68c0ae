"""Once: a value that is computed on first use, for frozen records whose copies should not compute it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class Once(Generic[T]):
    """A value that is computed when it is first needed, and that copies of its owner can take over."""

    value: T | None = None

    def get(self, compute: Callable[[], T]) -> T:
        """The value; computed by the first call."""
        if self.value is None:
            self.value = compute()
        return self.value

    def then(self, change: Callable[[T], T]) -> Once[T]:
        """A changed copy; empty if the value has not been computed."""
        return Once(None if self.value is None else change(self.value))
