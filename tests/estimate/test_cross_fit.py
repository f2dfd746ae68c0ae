"""Rows of an incomplete block, from which the denoised estimate of the other rows is subtracted."""

import math
from itertools import pairwise

import pytest
import torch

import smoothhess as sh
from smoothhess.estimate.cross_fit import CrossFit
from smoothhess.estimate.fit_rows import LEAST_ROWS, fit_rows
from smoothhess.estimate.statistics import concatenate

F64 = torch.float64


def matrix(d, kind):
    rng = torch.Generator().manual_seed(d)
    turn = torch.linalg.qr(torch.randn(d, d, generator=rng, dtype=F64)).Q
    values = {"1/i": 1 / torch.arange(1, d + 1, dtype=F64), "rank 2": torch.eye(d, dtype=F64)[:2].sum(0) * 2}[kind]
    return turn @ torch.diag(values) @ turn.mT


def kinked(d, width=10, sigma=0.3):
    """A network with one hidden layer, and its exact Hessian at zero."""
    rng = torch.Generator().manual_seed(width)
    a = torch.randn(width, d, generator=rng, dtype=F64) / math.sqrt(d)
    u, b = (torch.randn(width, generator=rng, dtype=F64) for _ in range(2))
    tau = sigma * a.norm(dim=1)
    density = torch.exp(-((b / tau) ** 2) / 2) / math.sqrt(2 * math.pi)
    return (lambda x: torch.relu(x @ a.mT + b) @ u), (a.mT * (u * density / tau)) @ a


def explain(f, d, rows, seeds=1, sigma=0.3, dtype=F64, **options):
    x = torch.zeros(seeds, d, dtype=dtype)
    settings = {"control": None, "shrink": False, "tails": None, "seed": range(seeds)} | options
    return sh.SmoothHess(f).attribute(x, sigma=sigma, n_calls=2 * rows, **settings)


def fitted_error(result, truth):
    """Root mean squares of the relative errors with the fit and without."""
    without = result.noise.own.estimate.dense()
    return [
        float((h.double() - truth).square().sum((1, 2)).mean().sqrt() / truth.norm()) for h in (result.hessian, without)
    ]


@pytest.mark.parametrize("rows", [LEAST_ROWS, 24, 40, 47])
def test_unbiased_with_right_intervals(rows):
    d, seeds = 48, 300
    f, truth = kinked(d)
    result = explain(f, d, rows, seeds)
    error = result.hessian - truth
    z = error.mean(0) / (error.std(0) / math.sqrt(seeds))
    assert 0.8 < z.square().mean().sqrt() < 1.25
    assert z.abs().max() < 5
    for low_high, value in ((result.diagonal().interval(), truth.diagonal()), (result.row(3).interval(), truth[3])):
        low, high = low_high
        assert ((low <= value) & (value <= high)).double().mean() > 0.92
    u, top = torch.ones(d, dtype=F64), torch.linalg.eigh(truth).eigenvectors[:, -1]
    for left, right in ((u, u), (u, top), (top, top)):
        low, high = result.bilinear(left, right).interval()
        assert ((low <= left @ truth @ right) & (left @ truth @ right <= high)).double().mean() > 0.9
    ratio = result.stderr().square().mean(0).sqrt() / error.square().mean(0).sqrt()
    assert 0.9 < ratio.median() < 1.3


@pytest.mark.parametrize(("kind", "rows", "gain"), [("1/i", 24, 1.6), ("rank 2", 24, 2.0), ("1/i", 12, 0.99)])
def test_less_variance(kind, rows, gain):
    d = 48
    truth = matrix(d, kind)
    result = explain(lambda x: ((x @ truth) * x).sum(1) / 2 + 1e-3 * torch.relu(x[:, 0]), d, rows, 60)
    with_fit, without = fitted_error(result, truth)
    assert with_fit < without / gain + 1e-12


def test_pure_noise_is_not_made_worse():
    d, rng = 64, torch.Generator().manual_seed(1)
    a = torch.randn(400, d, generator=rng, dtype=F64)
    u = torch.randn(400, generator=rng, dtype=F64)
    result = explain(lambda x: torch.cos(5 * x @ a.mT) @ u, d, 32, 40)
    own, fit = result.noise.own.estimate.dense(), result.hessian
    assert fit.square().sum() < 1.1 * own.square().sum()


def test_of_groups_and_of_their_files(tmp_path):
    d, rows, seeds = 48, 24, 200
    f, truth = kinked(d)
    mask = torch.arange(d) // 6
    result = explain(f, d, rows, seeds)
    groups = result.groups(mask)
    one = torch.nn.functional.one_hot(mask).to(F64)
    torch.testing.assert_close(groups.hessian, one.mT @ result.hessian @ one)
    low, high = groups.diagonal().interval()
    value = (one.mT @ truth @ one).diagonal()
    assert ((low <= value) & (value <= high)).double().mean() > 0.92
    pairs = groups.groups(torch.arange(8) // 2)
    halves = torch.nn.functional.one_hot(mask // 2).to(F64)
    torch.testing.assert_close(pairs.hessian, halves.mT @ result.hessian @ halves)
    groups.save(tmp_path / "groups.safetensors")
    loaded = sh.Interactions.load(tmp_path / "groups.safetensors")
    torch.testing.assert_close(loaded.hessian, groups.hessian)
    torch.testing.assert_close(loaded.stderr(), groups.stderr())
    part = groups[3:5]
    torch.testing.assert_close(part.hessian, groups.hessian[3:5])
    torch.testing.assert_close(part.stderr(), groups.stderr()[3:5])


def test_merged_and_extended_results_use_their_own_rows():
    d, rows = 48, 20
    f, _ = kinked(d)
    a, b = explain(f, d, rows), explain(f, d, rows, seed=7)
    merged = a.merge(b)
    assert merged.noise.fit is None
    own = (a.noise.own.estimate.dense() + b.noise.own.estimate.dense()) / 2
    torch.testing.assert_close(merged.hessian, own)
    groups = a.groups(torch.arange(d) // 6)
    assert groups.noise.fit is not None
    more = sh.SmoothHess(f).more(groups, 2 * rows)
    assert more.noise.fit is None
    extended = sh.SmoothHess(f).more(a, 2 * rows)
    torch.testing.assert_close(extended.hessian, explain(f, d, 2 * rows).hessian)


def test_examples_with_and_without_a_fit():
    d = 48
    f, _ = kinked(d)
    results = few, one, more = explain(f, d, 8), explain(f, d, 24), explain(f, d, d + 5)
    for result, fits in ((few, False), (one, True), (more, False)):
        assert (result.noise.fit is not None) == fits
    mask = torch.arange(d) // 6
    for parts in (results, [r.groups(mask) for r in results]):
        together = sh.Interactions.cat(parts)
        torch.testing.assert_close(together.hessian, torch.cat([r.hessian for r in parts]))
        torch.testing.assert_close(together.stderr(), torch.cat([r.stderr() for r in parts]))


def test_a_complete_block_is_not_changed_much_by_the_limit():
    """The weight of the prediction goes to zero at a complete block, where the estimate of a quadratic is exact."""
    d = 40
    truth = matrix(d, "1/i")
    errors = [
        fitted_error(explain(lambda x: ((x @ truth) * x).sum(1) / 2, d, rows, 40), truth)[0]
        for rows in (20, 30, 36, 39, 40)
    ]
    assert all(b < 1.05 * a for a, b in pairwise(errors))
    assert errors[-1] < 1e-10


def test_float32_agrees_with_float64():
    d = 64
    f, _ = kinked(d)
    one = explain(f, d, 32)
    other = explain(lambda x: f(x.double()).float(), d, 32, dtype=torch.float32)
    torch.testing.assert_close(other.hessian.double(), one.hessian, rtol=0, atol=2e-5 * float(one.hessian.norm()))


def test_a_fit_in_parts_of_different_lengths():
    """Examples that stopped at different numbers of rows are fitted as if they were alone."""
    d = 48
    f, _ = kinked(d)
    both = [explain(f, d, rows).estimate.statistics for rows in (20, 30)]
    gaussian = sh.Isotropic(0.3)
    fit = fit_rows(concatenate(both), gaussian)
    assert isinstance(fit, CrossFit)
    for example, (stats, rows) in enumerate(zip(both, (20, 30), strict=True)):
        alone = fit_rows(stats, gaussian)
        assert alone is not None
        torch.testing.assert_close(fit.odd[example, :rows], alone.odd[0])
        torch.testing.assert_close(fit.added.dense()[example], alone.added.dense()[0])
