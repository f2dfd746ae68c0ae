"""The rounding of gradients in low precision, relative to their changes: an upper limit from a few draws."""

from __future__ import annotations

import torch
from torch import Tensor

LEVEL = 0.95


def upper_ratio(rounding: Tensor, change: Tensor) -> Tensor:
    """Upper 95 % limit of the root of E|a|²/E|b|², (B,), from m draws of a, `rounding`, and of b, `change`, (B, m, k).

    A few draws may by chance have small rounding or large changes, most of all if these lie in few directions. The sum
    of squares of m normal vectors with covariance C has about mr degrees of freedom, where r = (tr C)²/tr C² is the
    number of their directions, so the ratio of both sums follows an F distribution. Few draws give too large an r if
    one direction carries more than the others: with its root the limit holds in at least 95 % of cases for one, three
    or thirty equal directions, for sizes that decay, and for one large direction among small ones. It does not hold if
    a few draws carry the rounding, as in small ReLU networks, where rounding moves few neurons across their kink.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch...
    >>> few = upper_ratio(0.1 * torch.randn(1, 4, 1), torch.randn(1, 4, 1))
    >>> many = upper_ratio(0.1 * torch.randn(1, 4, 500), torch.randn(1, 4, 500))
    >>> bool(few > many), bool(many > 0.1)
    (True, True)
    """
    from scipy.special import fdtri

    df = [_degrees_of_freedom(vectors.double()).cpu().numpy() for vectors in (change, rounding)]
    factor = torch.from_numpy(fdtri(*df, LEVEL)).sqrt().to(change)
    size = change.flatten(1).norm(dim=1).clamp_min(torch.finfo(change.dtype).tiny)
    return factor * rounding.flatten(1).norm(dim=1) / size


def _degrees_of_freedom(vectors: Tensor) -> Tensor:
    """m √r from m vectors (B, m, k); r, between 1 and k, is estimated from products of different vectors."""
    m, k = vectors.shape[1:]
    products = vectors @ vectors.mT
    sizes = products.diagonal(dim1=1, dim2=2)
    others = ~torch.eye(m, dtype=torch.bool, device=vectors.device)
    trace2 = (sizes[:, :, None] * sizes[:, None])[:, others].sum(1)
    square = products.square()[:, others].sum(1)
    return m * torch.where(square > 0, trace2 / square, float(k)).clamp(1, k).sqrt()
