"""Functions whose interacting pairs are known: they are sums of terms, and features meet only inside a term.

F1 to F10 are the synthetic functions on which Tsang, Cheng & Liu compare detectors of pairs ("Detecting statistical
interactions from neural network weights", ICLR 2018, Table 1; F1 goes back to Hooker, KDD 2004), written down again
from the formulas. `quadrants` is the Four Quadrant function of the SmoothHess paper on five pairs of features, and
`additive` has no pair at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

FEATURES = 10

Term = tuple[tuple[int, ...], Callable[..., Tensor]]  # numbers of its features, from 1 as in the papers; a function


@dataclass(frozen=True)
class Known:
    """A sum of terms of ten features, each uniform between its own bounds; they are independent by default."""

    name: str
    terms: tuple[Term, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    correlation: float = 0.0  # of all pairs of features in their Gaussian copula

    def __call__(self, x: Tensor) -> Tensor:
        """(…, 10) → (…)."""
        columns = x.unbind(-1)
        total = torch.zeros_like(columns[0])
        for features, term in self.terms:
            total = total + term(*(columns[i - 1] for i in features))
        return total

    @property
    def pairs(self) -> frozenset[tuple[int, int]]:
        """The pairs i < j that interact, counted from 0."""
        together = (sorted(i - 1 for i in features) for features, _ in self.terms)
        return frozenset(pair for features in together for pair in combinations(features, 2))

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """n draws of the features, (n, 10) float64."""
        low, high = self.bounds
        if self.correlation == 0:
            return low + (high - low) * torch.rand(n, FEATURES, generator=generator, dtype=torch.float64)
        normal = torch.randn(n, 1 + FEATURES, generator=generator, dtype=torch.float64)
        shared, own = normal[:, :1], normal[:, 1:]
        mixed = math.sqrt(self.correlation) * shared + math.sqrt(1 - self.correlation) * own
        return low + (high - low) * torch.special.ndtr(mixed)

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """Ends of the intervals, (10,) each."""
        return torch.tensor(self.low, dtype=torch.float64), torch.tensor(self.high, dtype=torch.float64)

    @property
    def moves(self) -> Tensor:
        """Standard deviation of each feature, (10,)."""
        low, high = self.bounds
        return (high - low) / math.sqrt(12)

    def mixed_differences(self, x: Tensor, reach: float) -> Tensor:
        """∂²f/∂x_i∂x_j averaged over the rectangle of ± `reach` standard deviations around x, cut to the domain.

        (n, 10) → (n, 10, 10) with a zero diagonal; the four corners of the rectangle hold the whole average.
        """
        low, high = self.bounds
        ends = (x - reach * self.moves).clamp_min(low), (x + reach * self.moves).clamp_max(high)
        table = x.new_zeros(len(x), FEATURES, FEATURES)
        for i, j in combinations(range(FEATURES), 2):
            corners = x.new_zeros(len(x))
            for a in (0, 1):
                for b in (0, 1):
                    point = x.clone()
                    point[:, i], point[:, j] = ends[a][:, i], ends[b][:, j]
                    corners = corners + (1 if a == b else -1) * self(point)
            area = (ends[1] - ends[0])[:, i] * (ends[1] - ends[0])[:, j]
            table[:, i, j] = table[:, j, i] = corners / area
        return table


def truth_table(pairs: frozenset[tuple[int, int]]) -> Tensor:
    """Which of the pairs i < j, in the order of torch.triu_indices(10, 10, 1), interact."""
    return torch.tensor([pair in pairs for pair in combinations(range(FEATURES), 2)])


# --- games ------------------------------------------------------------------------------------------------------------


def coalitions() -> Tensor:
    """All 1024 subsets of the features, (1024, 10) boolean."""
    return (torch.arange(2**FEATURES)[:, None] >> torch.arange(FEATURES)) % 2 == 1


def shapley_interactions(f: Callable[[Tensor], Tensor], x: Tensor, baseline: Tensor) -> Tensor:
    """The Shapley interaction index of all pairs, exactly, for the game in which absent features are at `baseline`.

    (n, 10) → (n, 10, 10) with a zero diagonal. Order-2 k-SII has the same values for pairs.
    """
    sets = coalitions()
    values = torch.stack([f(torch.where(sets, point, baseline)) for point in x]).double()  # (n, 1024)
    table = values.new_zeros(len(x), FEATURES, FEATURES)
    weights = [1 / ((FEATURES - 1) * math.comb(FEATURES - 2, t)) for t in range(FEATURES - 1)]  # of t other features
    weight, size = torch.tensor(weights, dtype=torch.float64), sets.sum(1)
    for i, j in combinations(range(FEATURES), 2):
        others = size - sets[:, i].long() - sets[:, j].long()
        sign = torch.where(sets[:, i] == sets[:, j], 1.0, -1.0).double()
        table[:, i, j] = table[:, j, i] = values @ (weight[others] * sign)
    return table


# --- the functions ----------------------------------------------------------------------------------------------------


def _on(name: str, terms: Sequence[Term], low: Sequence[float] | float = -1.0, high: float = 1.0) -> Known:
    lows = tuple(low) if isinstance(low, Sequence) else (low,) * FEATURES
    return Known(name, tuple(terms), lows, (high,) * FEATURES)


def _sum_of_squares(*x: Tensor) -> Tensor:
    return sum((v.square() for v in x), torch.zeros_like(x[0]))


_SHARED: list[Term] = [  # of F3 and F4
    ((1, 2), lambda a, b: (a - b).abs().exp()),
    ((2, 3), lambda a, b: (a * b).abs()),
    ((3, 4), lambda a, b: -(a.square() ** b.abs())),
    ((4, 5, 7, 8), lambda *x: _sum_of_squares(*x).log()),
    ((9,), lambda a: a),
    ((10,), lambda a: 1 / (1 + a.square())),
]

F1 = _on(
    "F1",
    [
        ((1, 2, 3), lambda a, b, c: math.pi ** (a * b) * (2 * c).sqrt()),
        ((4,), lambda a: -a.arcsin()),
        ((3, 5), lambda a, b: (a + b).log()),
        ((7, 8, 9, 10), lambda a, b, c, e: -(c / e) * (a / b).sqrt()),
        ((2, 7), lambda a, b: -a * b),
    ],
    low=[0.6 if i in (4, 5, 8, 10) else 0.0 for i in range(1, FEATURES + 1)],
)
F2 = _on(
    "F2",
    [
        ((1, 2, 3), lambda a, b, c: math.pi ** (a * b) * (2 * c.abs()).sqrt()),
        ((4,), lambda a: -(a / 2).arcsin()),
        ((3, 5), lambda a, b: ((a + b).abs() + 1).log()),
        ((7, 8, 9, 10), lambda a, b, c, e: c / (1 + e.abs()) * (a.abs() / (1 + b.abs())).sqrt()),
        ((2, 7), lambda a, b: -a * b),
    ],
)
F3 = _on("F3", _SHARED)
F4 = _on("F4", [*_SHARED, ((1, 4), lambda a, b: (a * b).square())])
F5 = _on(
    "F5",
    [
        ((1, 2, 3), lambda *x: 1 / (1 + _sum_of_squares(*x))),
        ((4, 5), lambda a, b: (a + b).exp().sqrt()),
        ((6, 7), lambda a, b: (a + b).abs()),
        ((8, 9, 10), lambda a, b, c: a * b * c),
    ],
)
F6 = _on(
    "F6",
    [
        ((1, 2), lambda a, b: ((a * b).abs() + 1).exp()),
        ((3, 4), lambda a, b: -((a + b).abs() + 1).exp()),
        ((5, 6, 8), lambda a, b, c: (a + b - c).cos()),
        ((8, 9, 10), lambda *x: _sum_of_squares(*x).sqrt()),
    ],
)
F7 = _on(
    "F7",
    [
        ((1, 2), lambda a, b: (a.arctan() + b.arctan()).square()),
        ((3, 4, 6), lambda a, b, c: (a * b + c).clamp_min(0)),
        ((4, 5, 6, 7, 8), lambda a, b, c, e, g: -1 / (1 + (a * b * c * e * g).square())),
        ((7, 9), lambda a, b: (a.abs() / (1 + b.abs())) ** 5),
        *(((i,), lambda a: a) for i in range(1, FEATURES + 1)),
    ],
)
F8 = _on(
    "F8",
    [
        ((1, 2), lambda a, b: a * b),
        ((3, 5, 6), lambda a, b, c: 2 ** (a + b + c)),
        ((3, 4, 5, 7), lambda a, b, c, e: 2 ** (a + b + c + e)),
        ((7, 8, 9), lambda a, b, c: (a * (b + c).sin()).sin()),
        ((10,), lambda a: (0.9 * a).arccos()),
    ],
)
F9 = _on(
    "F9",
    [
        ((1, 2, 3, 4, 5), lambda a, b, c, e, g: (a * b + c * e).tanh() * g.abs().sqrt()),
        ((5, 6), lambda a, b: (a + b).exp()),
        ((6, 7, 8), lambda a, b, c: ((a * b * c).square() + 1).log()),
        ((9, 10), lambda a, b: a * b),
        ((10,), lambda a: 1 / (1 + a.abs())),
    ],
)
F10 = _on(
    "F10",
    [
        ((1, 2), lambda a, b: (a + b).sinh()),
        ((3, 5, 7), lambda a, b, c: (a + b + c).tanh().arccos()),
        ((4, 5), lambda a, b: (a + b).cos()),
        ((7, 9), lambda a, b: 1 / (a * b).cos()),
    ],
)


def _quadrant(a: Tensor, b: Tensor) -> Tensor:
    above = torch.where(a >= 0, 5.0, 3.0)
    below = torch.where(a < 0, 12.0, -10.0)
    return torch.where(b >= 0, above, below).to(a) * a * b


QUADRANTS = _on("quadrants", [((i, i + 1), _quadrant) for i in range(1, FEATURES, 2)], low=-2.0, high=2.0)

ADDITIVE = _on(
    "additive",
    [
        ((1,), lambda a: (3 * a).sin()),
        ((2,), lambda a: 2 * a.square()),
        ((3,), lambda a: 2 * a.abs()),
        ((4,), lambda a: a.exp()),
        ((5,), lambda a: (3 * a).tanh()),
        ((6,), lambda a: (2 * a).cos()),
        ((7,), lambda a: 2 * a**3),
        ((8,), lambda a: 2 * a.abs().sqrt()),
        ((9,), lambda a: 2 / (1 + 4 * a.square())),
        ((10,), lambda a: a),
    ],
)

FUNCTIONS = {f.name: f for f in (F1, F2, F3, F4, F5, F6, F7, F8, F9, F10, QUADRANTS, ADDITIVE)}
