"""Pairs of many examples at once are those of each alone."""

import pytest
import torch

from smoothhess.estimate.variance import Variance
from smoothhess.linalg.memory import ByteLimit
from smoothhess.result import pairs
from smoothhess.result.pairs import Entries, _largest, strongest_pairs


def estimates(batch=5, d=9, seed=0):
    rng = torch.Generator().manual_seed(seed)
    hessian = torch.randn(batch, d, d, generator=rng, dtype=torch.float64)
    hessian = hessian + hessian.mT
    variance = torch.rand(batch, d, d, generator=rng, dtype=torch.float64)
    df = torch.tensor([0.0, 1.5, 12.0, 40.0, torch.inf], dtype=torch.float64)
    return hessian, variance + variance.mT, df, torch.rand(batch, d, generator=rng, dtype=torch.float64)


@pytest.mark.parametrize("few", [0, 10_000])
@pytest.mark.parametrize("room", [1, 1 << 28])
def test_examples_do_not_see_each_other(monkeypatch, few, room):
    """With tables of p-values and without, all at once and one by one."""
    hessian, variance, df, scales = estimates()
    alone = [
        strongest_pairs(Entries(h, Variance(v, n), h), s, 6, 0.1, 0.9)
        for h, v, n, s in zip(*(t.split(1) for t in (hessian, variance, df, scales)), strict=True)
    ]
    monkeypatch.setattr(pairs, "FEW_PAIRS", few)
    monkeypatch.setattr(pairs, "EXAMPLE_MATRICES", ByteLimit(room))
    (together,) = strongest_pairs(Entries(hessian, Variance(variance, df), hessian), scales, 6, 0.1, 0.9)
    for b, (own,) in enumerate(alone):
        for name, column in together._asdict().items():
            torch.testing.assert_close(column[b], getattr(own, name)[0], rtol=1e-7, atol=0)


def test_examples_with_other_frozen_features_have_columns_of_their_own():
    hessian, variance, df, scales = estimates()
    scales[2:4, 0] = 0
    parts = strongest_pairs(Entries(hessian, Variance(variance, df), hessian), scales, 100, 0.1, 0.9)
    assert [p.i.shape for p in parts] == [(2, 36), (2, 28), (1, 36)]
    assert not bool((parts[1].i == 0).any())


def test_equals_keep_their_order():
    strength = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0, 0.0], [0.0] * 6])
    assert _largest(strength, 3).tolist() == [[1, 3, 0], [0, 1, 2]]
    assert _largest(strength, 6).tolist() == [[1, 3, 0, 2, 4, 5], [0, 1, 2, 3, 4, 5]]
    assert _largest(strength, 0).shape == (2, 0)
