"""Gaussian knockoffs: the joint covariance is that of swapped features; draws have it, by z-scores."""

import math

import numpy as np
import pytest
import torch

from smoothhess.evaluate import GaussianKnockoffs
from smoothhess.evaluate.gaussian_knockoffs import normal_scores


def autoregressive(p, rho):
    lag = (torch.arange(p)[:, None] - torch.arange(p)).abs()
    return rho ** lag.double()


def drawn(n, covariance, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, len(covariance), generator=generator).double() @ torch.linalg.cholesky(covariance).mT


def of_correlation(correlation, s):
    """Knockoffs of N(0, R) with R known exactly."""
    p = len(correlation)
    zero, one = torch.zeros(p).double(), torch.ones(p).double()
    return GaussianKnockoffs(zero, one, correlation, s, None)


@pytest.mark.parametrize("method", ["equicorrelated", "sdp"])
def test_joint_correlation_is_that_of_swapped_features_and_positive(method):
    if method == "sdp":
        pytest.importorskip("cvxpy")
    x = drawn(400, autoregressive(5, 0.6))
    found = GaussianKnockoffs.fit(x, margins="normal", method=method)
    joint = found.joint_correlation
    assert float(torch.linalg.eigvalsh(joint)[0]) > -1e-10
    assert float(found.s.min()) >= 0
    assert float(found.s.max()) <= 1
    for swapped in ((0,), (1, 3), (0, 1, 2, 3, 4)):
        order = torch.arange(10)
        for j in swapped:
            order[[j, j + 5]] = torch.tensor([j + 5, j])
        torch.testing.assert_close(joint[order][:, order], joint)


def test_conditional_mean_and_covariance_give_the_joint_correlation():
    """cov(X̃, X) = A R and cov(X̃) = A R Aᵀ + C."""
    r = autoregressive(6, 0.5)
    found = of_correlation(r, torch.full((6,), 0.4).double())
    a, c = found.conditional
    torch.testing.assert_close(a @ r, found.joint_correlation[6:, :6])
    torch.testing.assert_close(a @ r @ a.mT + c, r)


def test_equicorrelated_knockoffs_reach_the_smallest_eigenvalue():
    r = torch.full((4, 4), 0.5).double().fill_diagonal_(1.0)  # λ_min = ½, so s = 1
    x = drawn(50_000, autoregressive(3, 0.8))
    found = GaussianKnockoffs.fit(x, margins="normal")
    expected = 2 * float(torch.linalg.eigvalsh(torch.corrcoef(x.mT))[0])
    torch.testing.assert_close(found.s, torch.full((3,), expected).double())
    assert float(torch.linalg.eigvalsh(2 * r - torch.eye(4))[0]) == pytest.approx(0.0, abs=1e-12)


def test_semidefinite_knockoffs_are_less_similar_to_the_features():
    pytest.importorskip("cvxpy")
    r = autoregressive(4, 0.0)
    r[0, 1] = r[1, 0] = 0.9
    x = drawn(2_000, r)
    equal, better = (GaussianKnockoffs.fit(x, method=m).s for m in ("equicorrelated", "sdp"))
    assert float(better.sum()) > float(equal.sum()) + 1
    assert float(better[2:].min()) > 0.8  # features that are nearly independent of all others


def z_scores(a, b, rows):
    """Differences of two correlation matrices of independent rows, in standard errors of N(0, 1/n)."""
    upper = torch.triu_indices(len(a), len(a), 1)
    return (a - b)[upper[0], upper[1]] * math.sqrt(rows)


@pytest.mark.rounding
@pytest.mark.parametrize("margins", ["normal", "copula"])
def test_draws_can_be_swapped_with_the_features(margins):
    """Correlations of (X, X̃) and of (X, X̃) with swapped columns are those of the joint distribution."""
    n, p = 20_000, 4
    x = drawn(n, autoregressive(p, 0.5), seed=1)
    if margins == "copula":
        x = x.exp()
    found = GaussianKnockoffs.fit(x, margins=margins)
    both = torch.cat([x, found.sample(x, seed=3)], 1)
    z = normal_scores(both) if margins == "copula" else both
    sampled = torch.corrcoef(z.mT)
    score = z_scores(sampled, found.joint_correlation, n)
    assert float(score.abs().max()) < 4.5  # 28 correlations
    swapped = torch.cat([z[:, [0, 5, 2, 7]], z[:, [4, 1, 6, 3]]], 1)
    assert float(z_scores(torch.corrcoef(swapped.mT), sampled, n).abs().max()) < 4.5 * math.sqrt(2)


@pytest.mark.rounding
def test_knockoffs_have_the_distribution_of_their_column():
    from scipy.stats import ks_2samp

    x = torch.rand(3_000, 2, generator=torch.Generator().manual_seed(0)).double() ** 3
    copies = GaussianKnockoffs.fit(x).sample(x, seed=1)
    for j in range(2):
        assert ks_2samp(x[:, j].numpy(), copies[:, j].numpy()).pvalue > 1e-3


def test_knockoffs_of_a_copula_are_values_of_the_column():
    x = torch.tensor([[0.0, 1.5], [1.0, 2.5], [1.0, -1.0], [0.0, 0.5], [1.0, 9.0]])
    copies = GaussianKnockoffs.fit(x).sample(x, seed=0)
    for j in range(2):
        assert set(copies[:, j].tolist()) <= set(x[:, j].double().tolist())


def test_the_seed_determines_the_draws_and_the_global_state_stays():
    x = drawn(50, autoregressive(3, 0.3))
    found = GaussianKnockoffs.fit(x)
    state = torch.get_rng_state()
    assert torch.equal(found.sample(x, seed=2), found.sample(x.numpy(), seed=2))
    assert not torch.equal(found.sample(x, seed=2), found.sample(x, seed=3))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("data", "options", "error", "words"),
    [
        (torch.ones(10, 2), {}, ValueError, "every column must vary"),
        (torch.randn(10), {}, ValueError, r"a table \(n, p\)"),
        ([[1.0]], {}, TypeError, "tensor, array or DataFrame"),
        (np.array([[np.nan, 1.0]] * 4), {}, ValueError, "finite"),
        (torch.arange(8.0)[:, None].expand(8, 2), {}, ValueError, "linearly independent"),
        (torch.randn(10, 2), {"margins": "uniform"}, ValueError, "margins must be one of"),
        (torch.randn(10, 2), {"method": "best"}, ValueError, "method must be one of"),
    ],
)
def test_errors_say_what_was_expected(data, options, error, words):
    with pytest.raises(error, match=words):
        GaussianKnockoffs.fit(data, **options)


def test_another_number_of_columns_is_refused():
    x = drawn(50, autoregressive(3, 0.3))
    with pytest.raises(ValueError, match="expected 3 columns"):
        GaussianKnockoffs.fit(x).sample(x[:, :2])
