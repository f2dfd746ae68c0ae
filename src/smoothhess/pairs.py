"""Named pairs with confidence intervals and a bound on the share of false discoveries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from smoothhess import student


class Pair(NamedTuple):
    """Two features that act together: raising both changes f by H_ij more than raising each alone, per unit of each."""

    i: int
    j: int
    names: tuple[str, str]
    value: float  # H_ij
    stderr: float
    low: float
    high: float
    effect: float  # H_ij σ_i σ_j, in units of the output
    q_value: float
    significant: bool


def rank_pairs(
    hessian: Tensor,
    ranking: Tensor,
    variance: Tensor,
    df: Tensor,
    scales: Tensor,
    k: int,
    names: Sequence[str] | None,
    q: float,
    level: float,
    feature_shape: tuple[int, ...],
) -> list[Pair]:
    """The k pairs i < j of one (d, d) estimate, with its entries' variances, whose effect in `ranking` is largest."""
    d = len(hessian)
    labels = labels_of(names, d, feature_shape)
    if k < 1 or not 0 < q < 1:
        raise ValueError(f"wanted k ≥ 1 and 0 < q < 1, got k={k}, q={q}.")
    if len(scales) != d:
        raise ValueError(f"wanted one scale per feature, {d}, got {len(scales)}.")
    if not d > 1:
        return []
    i, j = torch.triu_indices(d, d, 1, device=hessian.device)
    moving = (scales > 0).to(hessian.device)
    i, j = (index[moving[i] & moving[j]] for index in (i, j))  # frozen features are no candidates
    value, stderr = hessian[i, j].double(), variance[i, j].double().sqrt()
    # 0/0 is an exact zero: no evidence of anything
    t = torch.where(value == 0, 0.0, value.abs() / stderr)
    p = torch.where(torch.isfinite(stderr), student.two_sided_p(t, df.clamp_min(0.05)), 1.0)
    q_values = benjamini_hochberg(p)
    effect = value * scales.to(value)[i] * scales.to(value)[j]
    strength = ranking[i, j].double() * scales.to(value)[i] * scales.to(value)[j]
    chosen = strength.abs().argsort(descending=True, stable=True)[:k]
    width = student.quantile(level, df)
    reach = torch.where(stderr > 0, width * stderr, 0.0)
    columns = [x[chosen].tolist() for x in (i, j, value, stderr, value - reach, value + reach, effect, q_values)]
    return [
        Pair(a, b, (labels(a), labels(b)), v, s, low, high, e, qv, qv <= q)
        for a, b, v, s, low, high, e, qv in zip(*columns, strict=True)
    ]


def benjamini_hochberg(p: Tensor) -> Tensor:
    """q-values: the smallest false-discovery rate at which each p-value would be declared.

    >>> benjamini_hochberg(torch.tensor([0.01, 0.04, 0.03]))
    tensor([0.0300, 0.0400, 0.0400])
    """
    order = p.argsort(descending=True)
    ranks = torch.arange(len(p), 0, -1, device=p.device)
    q = (p[order] * len(p) / ranks).clamp_max(1).cummin(0).values
    return torch.empty_like(q).index_copy(0, order, q)


def labels_of(names: Sequence[str] | None, d: int, feature_shape: tuple[int, ...]):
    """A function from the number of a feature to its name: the one given, or its place in the shape."""
    if names is not None:
        if len(names) != d:
            raise ValueError(f"wanted one name per feature, {d}, got {len(names)}.")
        return lambda i: str(names[i])
    if len(feature_shape) == 1:
        return str

    def index(i: int) -> str:
        coordinates = []
        for size in reversed(feature_shape):
            i, c = divmod(i, size)
            coordinates.append(str(c))
        return "(" + ", ".join(reversed(coordinates)) + ")"

    return index
