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
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    strength = np.abs(np.asarray(strength, dtype=float))
    n = len(strength)
    if n < 2:
        return list(range(n))
    distance = strength.max(initial=0.0) - strength
    np.fill_diagonal(distance, 0.0)
    rows = [[i] for i in range(n)]
    for join in linkage(squareform(distance, checks=False), "average"):
        # of ties, the order in which features were given
        left, right = sorted((rows[int(c)] for c in join[:2]), key=min)
        rows.append(_touching(left, right, distance))
    order = rows[-1]
    return order if order[0] <= order[-1] else order[::-1]


def _touching(left: list[int], right: list[int], distance: Array) -> list[int]:
    """Two rows of features as one, each turned so that the ends that meet are close."""
    ways = [(left, right), (left, right[::-1]), (left[::-1], right), (left[::-1], right[::-1])]
    a, b = min(ways, key=lambda way: distance[way[0][-1], way[1][0]])
    return a + b
