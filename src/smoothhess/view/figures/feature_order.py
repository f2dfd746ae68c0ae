"""An order of features in which those that act together stand side by side."""

from __future__ import annotations

import numpy as np

from smoothhess.view.figures.canvas import Array


def clustered(strength: Array) -> list[int]:
    """The leaves of the average-linkage tree of a symmetric (n, n) strength of interaction, turned to fit.

    The two features, then groups of features, that interact most on average are joined first; of the two ways to lay
    each of them down, that is taken in which those who touch interact most.

    >>> tied = np.zeros((4, 4))
    >>> tied[0, 2] = tied[2, 0] = tied[1, 3] = tied[3, 1] = 1.0
    >>> clustered(tied)
    [0, 2, 1, 3]
    """
    strength = np.abs(np.asarray(strength, dtype=float))
    n = len(strength)
    distance = strength.max(initial=0.0) - strength
    leaves: dict[int, list[int]] = {i: [i] for i in range(n)}
    for a, b, _ in average_linkage(distance):
        # the smaller name stays; of ties, the order in which features were given
        leaves[a] = _touching(leaves[a], leaves.pop(b), distance)
    order = leaves[min(leaves)] if leaves else []
    return order if not order or order[0] <= order[-1] else order[::-1]


def _touching(left: list[int], right: list[int], distance: Array) -> list[int]:
    """Two rows of features as one, each turned so that the ends that meet are close."""
    ways = [(left, right), (left, right[::-1]), (left[::-1], right), (left[::-1], right[::-1])]
    a, b = min(ways, key=lambda way: distance[way[0][-1], way[1][0]])
    return a + b


def average_linkage(distance: Array) -> list[tuple[int, int, float]]:
    """Which clusters are joined, and at which mean distance: n − 1 triples (a, b, height); the union is called a < b.

    Chains of nearest neighbours, O(n²): joins come in another order than by height, but they are the same joins.
    """
    between = np.array(distance, dtype=float)
    n = len(between)
    np.fill_diagonal(between, np.inf)
    size, chain, joins = np.ones(n), [], []
    alive = np.ones(n, dtype=bool)
    while len(joins) < n - 1:
        if not chain:
            chain = [int(np.argmax(alive))]
        here = chain[-1]
        near = int(np.argmin(between[here]))
        if len(chain) > 1 and between[here, chain[-2]] <= between[here, near]:  # of ties, where the chain came from
            near = chain[-2]
        if len(chain) == 1 or near != chain[-2]:
            chain.append(near)
            continue
        chain = chain[:-2]
        a, b = sorted((here, near))
        joins.append((a, b, float(between[a, b])))
        mean = (size[a] * between[a] + size[b] * between[b]) / (size[a] + size[b])
        mean[[a, b]] = np.inf
        between[a], between[:, a] = mean, mean
        between[b], between[:, b] = np.inf, np.inf
        size[a] += size[b]
        alive[b] = False
    return joins
