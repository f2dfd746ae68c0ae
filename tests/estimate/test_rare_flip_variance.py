"""Errors of neurons that few draws flip, against closed forms and repeated runs."""

import math
import warnings

import pytest
import torch

from smoothhess import SmoothHess

F64 = torch.float64
D, SIGMA = 16, 0.1
RNG = torch.Generator().manual_seed(0)
A = torch.nn.functional.normalize(torch.randn(D, generator=RNG, dtype=F64), dim=0)
B = torch.randn(D, generator=RNG, dtype=F64)
Q = torch.randn(D, D, generator=RNG, dtype=F64)
Q = 0.012 * (Q + Q.mT)


def model(margin):
    """One neuron, `margin` standard deviations from its kink, and a quadratic part."""
    return lambda x: torch.relu(x @ A - margin * SIGMA) + x @ B + ((x @ Q) * x).sum(1) / 2


def truth(margin):
    """Value, gradient and Hessian of the smoothed model at 0."""
    density = math.exp(-(margin**2) / 2) / math.sqrt(2 * math.pi)
    chance = math.erfc(margin / 2**0.5) / 2
    value = SIGMA * (density - margin * chance) + SIGMA**2 * float(Q.trace()) / 2
    return value, B + chance * A, density / SIGMA * torch.outer(A, A) + Q


def runs(margin, calls, seeds=100, **options):
    x = torch.zeros(seeds, D, dtype=F64)
    options = {"control": None, **options}
    return SmoothHess(model(margin)).attribute(x, sigma=SIGMA, n_calls=calls, seed=range(seeds), **options).unshrunk()


def covered(estimate, true):
    low, high = estimate.interval()
    return float(((low <= true) & (true <= high)).double().mean())


@pytest.mark.parametrize("design", ["orthogonal", "antithetic"])
@pytest.mark.parametrize("calls", [2 * D, 8 * D])
@pytest.mark.parametrize("margin", [2.0, 3.0])
def test_intervals_hold_the_truth_without_a_warning(margin, calls, design):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = runs(margin, calls, design=design)
    value, gradient, hessian = truth(margin)
    mask = torch.arange(D) // 4
    sums = torch.zeros(4, D, dtype=F64)
    sums[mask, torch.arange(D)] = 1
    v = torch.randn(D, generator=torch.Generator().manual_seed(5), dtype=F64)
    assert covered(result.value_estimate(), value) > 0.92
    assert covered(result.gradient_estimate(), gradient) > 0.92
    assert covered(result.row(3), hessian[3]) > 0.92
    assert covered(result.diagonal(), hessian.diagonal()) > 0.92
    assert covered(result.bilinear(v, A), v @ hessian @ A) > 0.92
    assert covered(result.groups(mask).row(1), (sums @ hessian @ sums.mT)[1]) > 0.92


def test_widths_are_those_of_the_known_variance():
    """Without any flip, the standard error is that of the neuron: the quadratic part is exact in a block."""
    margin, calls = 3.0, 2 * D
    result = runs(margin, calls, seeds=20)
    n, p = calls / 2, math.erfc(margin / 2**0.5) / 2
    density = math.exp(-(margin**2) / 2) / math.sqrt(2 * math.pi)
    along = margin * density / p
    share = (1 - 2 * density**2 / p) * 2 * p * SIGMA**2 / 4 / (4 * n) / (1 + along / D)  # a = |j| = σ
    share *= 1 - 2 * p * n / 8  # less is added, the more flips are expected
    w, one = A / SIGMA, torch.eye(D, dtype=F64) / SIGMA**2
    left = one.diagonal()[:, None] * w.square() + one.diagonal() * w.square()[:, None]
    expected = share * (left + 2 * one * torch.outer(w, w) + 4 * along * torch.outer(w, w).square())
    flipped = result.statistics.rare.flipped(result.statistics.draws(), mirrored=True).any(1)
    still = torch.nonzero(~flipped).reshape(-1).tolist()
    assert len(still) > 10
    torch.testing.assert_close(result.stderr()[still[0]].square(), expected, rtol=1e-3, atol=1e-9)


def test_a_network_with_one_hidden_layer_is_exact_at_once():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).double()
    result = SmoothHess(net).attribute(torch.randn(3, 8, dtype=F64), 0, sigma=0.5)
    assert result.relative_error.max() < 1e-9
    assert result.n_calls.max() <= 64


def test_a_rare_neuron_ends_an_adaptive_run_at_its_budget():
    x = torch.zeros(1, D, dtype=F64)
    with pytest.warns(UserWarning, match="stopped at max_calls=512"), pytest.warns(UserWarning, match="out of reach"):
        result = SmoothHess(model(3.5)).attribute(x, sigma=SIGMA, control=None, max_calls=512, tol=0.01)
    assert result.status == ("budget",)
    assert result.relative_error > 0.01


def test_it_is_kept_by_files_slices_and_further_calls(tmp_path):
    result = runs(2.5, 2 * D, seeds=4)
    result.save(tmp_path / "r.safetensors")
    explainer = SmoothHess(model(2.5))
    longer = explainer.more(result, 2 * D)
    torch.testing.assert_close(longer.stderr(), runs(2.5, 4 * D, seeds=4).stderr())
    for other in (type(result).load(tmp_path / "r.safetensors"), type(result).cat([result[:2], result[2:]])):
        torch.testing.assert_close(other.stderr(), result.stderr())
    merged = result[0].merge(result[1].to("cpu")) if result[0].seed != result[1].seed else result
    assert bool(merged.statistics.rare.complete.all())


def test_merged_with_a_run_that_subtracts_the_flips():
    """The flips of the run without control variate stay in the error."""
    x = torch.zeros(1, D, dtype=F64)
    plain = SmoothHess(model(3.0)).attribute(x, sigma=SIGMA, n_calls=2 * D, control=None, seed=0).unshrunk()
    exact = SmoothHess(model(3.0)).attribute(x, sigma=SIGMA, n_calls=2 * D, control="kink", seed=1).unshrunk()
    assert float(exact.stderr().max()) < 1e-9
    for merged in (plain.merge(exact), exact.merge(plain)):
        torch.testing.assert_close(merged.stderr(), plain.stderr() / 2, rtol=0.05, atol=1e-12)
        assert bool(merged.statistics.rare.complete.all())
