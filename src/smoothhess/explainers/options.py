"""`Options`: the keyword arguments of `SmoothHess.attribute` as one validated record.

Checks that need only the options belong here. Checks against the inputs (number of features, batch, device) are in
`adaptive`.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from smoothhess.draws.designs import Design, find_design
from smoothhess.draws.gaussian import Gaussian
from smoothhess.model.gradients import check_batch_size

MOST_CALLS = 20_000  # default of max_calls
MANY, LEAST_MOST_CALLS = 1024, 2048  # dimensions above which it is one call per dimension, and the least number then


@dataclass(frozen=True, eq=False, kw_only=True)
class Options:
    """The keyword arguments of `SmoothHess.attribute`, where they are described.

    >>> Options(sigma=0.1, n_calls=64).rows(3)
    32
    >>> [Options(sigma=0.1).most_calls(k) for k in (784, 3072)]
    [20000, 3072]
    """

    sigma: Any = None
    radius: float | None = None
    gaussian: Gaussian | None = None
    n_calls: int | None = None
    tol: float = 0.1
    max_calls: int | None = None
    design: str = "orthogonal"
    control: str | None = "auto"
    tau_probes: int | None = None
    tails: str | None = "auto"
    shrink: bool = True
    feature_mask: Tensor | None = None
    direction: Tensor | None = None
    names: Any = None
    classes: Sequence[str] | None = None
    unit: str | None = None
    internal_batch_size: int | None = None
    seed: int | Sequence[int] = 0
    precision: str = "float32"
    compile: bool = False
    show_progress: bool | None = None

    def __post_init__(self) -> None:
        _ = self.rows(1)  # validates design, and n_calls or max_calls
        if self.control not in ("auto", "kink", None):
            raise ValueError(f'control must be "auto", "kink" or None, got {self.control!r}.')
        if self.tails not in ("auto", None):
            raise ValueError(f'tails must be "auto" or None, got {self.tails!r}.')
        if self.n_calls is None and not 0 < self.tol < 1:
            raise ValueError(f"tol must lie between 0 and 1, it is a relative error, got {self.tol}. Or pass n_calls.")
        probes = self.tau_probes
        if probes is not None and (isinstance(probes, bool) or not probes >= 8):
            raise ValueError(f"tau_probes must be at least 8 random directions, or None for exact τ, got {probes}.")
        if self.direction is not None and self.feature_mask is None:
            raise ValueError("direction weights the features of groups: pass feature_mask as well.")
        if isinstance(self.classes, str) or not isinstance(self.unit, str | None):
            raise TypeError(
                "classes must be a sequence of strings, one for each output, and unit one string, got "
                f"{type(self.classes).__name__} and {type(self.unit).__name__}."
            )
        check_batch_size(self.internal_batch_size)
        if ignored := self.ignored:
            warnings.warn(
                f"n_calls={self.n_calls} is given, so {' and '.join(ignored)} {'is' if len(ignored) == 1 else 'are'} "
                "ignored: every example takes n_calls. Leave n_calls out to stop at a relative error.",
                stacklevel=4,
            )

    @property
    def ignored(self) -> list[str]:
        """The options with values of the user that n_calls replaces."""
        given = {"tol": self.tol != Options.tol, "max_calls": self.max_calls is not None}
        return [f"{name}={getattr(self, name)}" for name in given if given[name] and self.n_calls is not None]

    @property
    def plan(self) -> Design:
        """The design of the draws."""
        return find_design(self.design)

    def most_calls(self, k: int) -> int:
        """`max_calls`, or its default for draws of k dimensions.

        An estimate of a complete block of many dimensions consists of dense matrices and takes longer than the
        gradients of a small network, so the default is half of a block there, unless groups of features are summed.
        """
        if self.max_calls is not None:
            return self.max_calls
        return MOST_CALLS if k <= MANY or self.feature_mask is not None else max(LEAST_MOST_CALLS, k - k % 2)

    def rows(self, k: int) -> int:
        """Maximum number of rows of the design, for draws of k dimensions."""
        if self.n_calls is None:
            return rows_of_calls(self.most_calls(k), self.plan, "max_calls")
        return rows_of_calls(self.n_calls, self.plan, "n_calls")

    @property
    def expected_calls(self) -> float:
        """Gradient calls that the passes of a closed form are compared with; independent of the dimensions."""
        return self.n_calls if self.n_calls is not None else (self.max_calls or MOST_CALLS) / 4

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def rows_of_calls(n: Any, plan: Design, name: str) -> int:
    """Number of rows of a design for `n` gradient calls; `name` is the argument's name in errors."""
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise TypeError(f"{name} must be an integer, got {type(n).__name__}.")
    n = int(n)
    if n < 2:
        raise ValueError(f"{name} must be at least 2, got {n}.")
    if plan.mirrored and n % 2:
        raise ValueError(
            f"{name} must be even: each direction is used twice (±), got {n}. Pass {n - 1} or {n + 1}, or design='iid'."
        )
    return n // plan.calls_per_row


def seeds_of(seed: Any, batch: int) -> list[int]:
    """One seed per example, from a single seed or a sequence."""
    given: Any = [seed] * batch if isinstance(seed, int) or getattr(seed, "ndim", None) == 0 else seed
    seeds = [operator.index(s) for s in given]
    if len(seeds) != batch:
        raise ValueError(f"seed must be one integer, or one per example: {batch}, got {len(seeds)}.")
    if min(seeds) < 0:
        raise ValueError(f"seeds must not be negative, got {min(seeds)}. Use 0, 1, 2, …")
    return seeds
