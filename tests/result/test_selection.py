"""Intervals of what the draws themselves have chosen: eigenvalues and the strongest pairs."""

import pytest
import torch

from smoothhess import Exact, Isotropic, SmoothHess
from smoothhess.estimate.halves import Halves
from smoothhess.linalg.memory import ByteLimit
from smoothhess.result import eigenpairs
from tests.truths import OneHidden, Plain, gaussians

TIGHT = {"rtol": 1e-9, "atol": 1e-11}
SEEDS = 150


def make(n_calls, kind="isotropic", explainer=Plain, d=12, **options):
    x = torch.randn(2, d, generator=torch.Generator().manual_seed(0)).double()
    return explainer(OneHidden(d)).attribute(x, gaussian=gaussians(d)[kind], n_calls=n_calls, **options)


def halves_of(result):
    return Halves(result.estimate.unbiased)


@pytest.mark.parametrize("kind", sorted(gaussians(4)))
def test_halves_are_the_two_runs_of_a_merged_result(kind):
    one, other = make(48, kind, seed=0), make(48, kind, seed=1)
    both = halves_of(one.merge(other))
    eye = torch.eye(12).double().expand(2, -1, -1)
    for half, run in ((both.first, one), (both.second, other)):
        torch.testing.assert_close(half.dense(), run.hessian, **TIGHT)
        torch.testing.assert_close(half.product(eye), run.hessian, **TIGHT)


@pytest.mark.parametrize("n_calls", [60, 72, 3000])  # an incomplete block, an odd number of blocks, more than the head
def test_the_whole_is_the_mean_of_the_halves(n_calls):
    result = make(n_calls)
    halves = halves_of(result)
    assert (halves.cut % 12 == 0).all()
    share = halves.share[:, None, None]
    torch.testing.assert_close(
        share * halves.first.dense() + (1 - share) * halves.second.dense(), result.hessian, **TIGHT
    )
    start = make(2 * int(halves.cut[0]))
    torch.testing.assert_close(halves.first.dense(), start.hessian, **TIGHT)


def test_halves_of_streamed_groups_are_the_groups_of_halves():
    mask = torch.arange(12) // 3
    streamed, grouped = make(60, feature_mask=mask), make(60).groups(mask)
    for name in ("first", "second"):
        torch.testing.assert_close(
            getattr(halves_of(streamed), name).dense(), getattr(halves_of(grouped), name).dense(), **TIGHT
        )
    torch.testing.assert_close(streamed.eigh(2).stderr, grouped.eigh(2).stderr, rtol=1e-6, atol=1e-9)


def test_fewer_than_two_blocks_have_no_intervals():
    pairs = make(46).eigh(3)
    assert pairs.stderr.isnan().all()
    assert all(end.isnan().all() for end in pairs.interval())
    assert "fewer than two independent blocks" in pairs.note
    assert "n_calls=48" in pairs.note
    with pytest.raises(ValueError, match=r"two independent blocks of draws. Pass n_calls=48 or more"):
        make(46).top_pairs(selection="split")
    assert make(48).eigh(3).note == ""
    assert make(48).eigh(3).stderr.isfinite().all()


@pytest.mark.parametrize("kind", sorted(gaussians(4)))
def test_examples_and_kinds_of_results(kind):
    result = make(60, kind, SmoothHess, shrink=True)
    found = result.eigh(3)
    values, vectors = found
    assert values is found.values
    assert vectors is found.vectors
    assert found.stderr.shape == found.interval()[0].shape == (2, 3)
    assert found.stderr.isfinite().all()
    torch.testing.assert_close(result[1].eigh(3).stderr, found.stderr[1:], rtol=1e-6, atol=1e-9)
    plain = result.unshrunk().eigh(3)
    if bool(((values >= 0) == (plain.values >= 0)).all()):  # the same places
        torch.testing.assert_close(found.estimate.value, plain.estimate.value, **TIGHT)


def test_one_answer_from_products_rows_and_matrices(monkeypatch):
    def few_rows():
        return make(24, d=40, design="antithetic")

    def estimate(result):
        found = result.eigh(2).estimate
        return torch.stack([found.value, found.stderr])

    by_rows = estimate(few_rows())
    dense = few_rows()
    assert dense.hessian.isfinite().all()  # computed and kept
    torch.testing.assert_close(estimate(dense), by_rows, rtol=1e-7, atol=1e-9)
    monkeypatch.setattr(eigenpairs, "ROW_SPAN", ByteLimit(0))
    torch.testing.assert_close(estimate(few_rows()), by_rows, rtol=1e-3, atol=1e-6)


def test_exact_results_have_no_error():
    x, h = torch.zeros(1, 3).double(), torch.diag(torch.tensor([1.0, -3.0, 2.0])).double()[None]
    exact = Exact.make(x, torch.zeros(1).double(), x, h)
    pairs = exact.eigh(2)
    assert not pairs.stderr.any()
    torch.testing.assert_close(pairs.interval()[0], pairs.values)
    assert exact.top_pairs(2, selection="split") == exact.top_pairs(2)
    assert eigenpairs.Eigenpairs(*pairs).stderr.isnan().all()


def test_a_split_needs_one_control_variate():
    options = {"explainer": SmoothHess, "control": "kink"}
    merged = make(48, seed=0, **options).merge(make(48, seed=1, **options))
    with pytest.raises(ValueError, match="same control variate in all draws"):
        merged.top_pairs(selection="split")
    assert make(48, seed=0).merge(make(48, seed=1)).top_pairs(2, selection="split")
    with pytest.raises(ValueError, match='selection must be "all" or "split"'):
        merged.top_pairs(selection="halves")


def repeated(d, blocks):
    """One input of a black box with many seeds, and its true Hessian."""
    model, x = OneHidden(d, 8 * d), torch.randn(1, d, generator=torch.Generator().manual_seed(1)).double()
    seeds, n_calls = [*range(SEEDS)], 2 * d * blocks
    result = Plain(model).attribute(x.expand(SEEDS, -1).contiguous(), sigma=0.5, n_calls=n_calls, seed=seeds)
    return result, model.truth(x, Isotropic(0.5)).hessian[0]


def share_inside(ends, truth):
    return ((ends[0] <= truth) & (truth <= ends[1])).double().mean(0)


@pytest.mark.parametrize(("d", "blocks"), [(8, 2), (48, 2), (48, 4)])
def test_intervals_of_eigenvalues_cover_the_true_ones(d, blocks):
    result, truth = repeated(d, blocks)
    pairs = result.eigh(4)
    ordered, positive = torch.linalg.eigvalsh(truth).flip(0), pairs.values >= 0
    expected = ordered[torch.where(positive, positive.cumsum(1) - 1, d - (~positive).cumsum(1))]
    assert (share_inside(pairs.interval(), expected) >= 0.92).all()
    bias = (pairs.estimate.value - expected).mean(0)
    assert (bias.abs() < 0.5 * pairs.stderr.mean(0)).all()
    in_sample = torch.stack([result.bilinear(v, v).stderr for v in pairs.vectors.unbind(1)], 1)
    if d == 48:  # the draws have chosen the directions along which their own noise is large
        assert ((pairs.values - expected).mean(0).abs() > 0.5 * in_sample.mean(0)).any()
        v = pairs.vectors[:, 0]
        assert share_inside(result.bilinear(v, v).interval(), ((v @ truth) * v).sum(-1)) < 0.85


def test_intervals_of_split_pairs_cover_the_chosen_ones():
    result, truth = repeated(48, 2)

    def coverage(selection):
        found = [p for pairs in result.top_pairs(3, selection=selection) for p in pairs]
        return sum(p.low <= float(truth[p.i, p.j]) <= p.high for p in found) / len(found)

    assert coverage("split") >= 0.93
    assert coverage("all") < 0.91
