"""`PairStrengths`: how strongly each pair of features interacts, without a sign, with the names of the features.

`TokenSmoothHess.strength` computes it. Pairs with a sign, and their false discoveries, belong in `pairs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from smoothhess.result.intervals import Estimate


class PairStrength(NamedTuple):
    """The strength of the interaction of two features, with its confidence interval."""

    i: int  # index of the first feature, i < j
    j: int
    names: tuple[str, str]
    value: float
    stderr: float  # standard error of the value
    low: float  # lower end of the confidence interval
    high: float  # upper end


@dataclass(frozen=True)
class PairStrengths(Estimate):
    """An `Estimate` of nonnegative strengths (B, T, T) of pairs.

    >>> value = torch.tensor([[[0.0, 2.0, 1.0], [2.0, 0.0, 3.0], [1.0, 3.0, 0.0]]])
    >>> found = PairStrengths(value, 0.1 * value, torch.tensor([31.0]), (("not", "so", "good"),))
    >>> [(pair.names, pair.value) for pair in found.top_pairs(2)[0]]
    [(('so', 'good'), 3.0), (('not', 'so'), 2.0)]
    """

    names: tuple[tuple[str, ...], ...] | None = None  # of the features of each example

    def top_pairs(self, k: int = 10, *, level: float = 0.95) -> list[list[PairStrength]]:
        """The k strongest pairs of each example, strongest first.

        The same draws choose and measure the pairs, so the values of chosen pairs are too large on average.

        Args:
            k: number of pairs; fewer if there are not as many.
            level: probability of the confidence intervals, each for itself.

        Returns:
            A list of `PairStrength` for each example, with the indices as names if no names were given.

        Raises:
            ValueError: if k is not positive, or level is not between 0 and 1.
        """
        if k < 1:
            raise ValueError(f"k, the number of pairs, must be at least 1, got {k}.")
        count = self.value.shape[-1]
        i, j = torch.triu_indices(count, count, 1, device=self.value.device)
        low, high = self.interval(level)
        parts = [part[:, i, j].cpu() for part in (self.value, self.stderr, low, high)]
        given = self.names or (tuple(map(str, range(count))),) * len(self.value)
        found = []
        for b, names in enumerate(given):
            pairs = []
            for p in parts[0][b].argsort(descending=True, stable=True)[:k].tolist():
                first, second = int(i[p]), int(j[p])
                numbers = (float(part[b, p]) for part in parts)
                pairs.append(PairStrength(first, second, (names[first], names[second]), *numbers))
            found.append(pairs)
        return found
