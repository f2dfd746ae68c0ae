"""Orders features so that interacting features are adjacent (average-linkage clustering)."""

from __future__ import annotations

import numpy as np

from smoothhess.view.figures.canvas import Array


def clustered(strength: Array) -> list[int]:
    """Return the leaf order of the average-linkage tree of a symmetric (n, n) matrix of interaction strengths.

    The two clusters with the largest average interaction are merged first. At each merge, each cluster is reversed if
    this gives the two features that become adjacent a stronger interaction.

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
        # ties keep the order of the features
        left, right = sorted((rows[int(c)] for c in join[:2]), key=min)
        rows.append(_touching(left, right, distance))
    order = rows[-1]
    return order if order[0] <= order[-1] else order[::-1]


def _touching(left: list[int], right: list[int], distance: Array) -> list[int]:
    """Concatenate two orders, each reversed if this brings closer features to the junction."""
    ways = [(left, right), (left, right[::-1]), (left[::-1], right), (left[::-1], right[::-1])]
    a, b = min(ways, key=lambda way: distance[way[0][-1], way[1][0]])
    return a + b
