"""Stein's identities: what is zero on average, what rounding leaves, and when a score means something."""

import pytest
import torch

from smoothhess.estimate.stein_check import combined, moments, rounding_rows, stein_rows, worst_of, z_scores
from smoothhess.estimate.student_t import normal_score, two_sided_p


def cubic(k, seed=0):
    """f = (c·z)³ + zᵀAz + b·z with f(0) = 0, its gradient, and the gradient at 0."""
    rng = torch.Generator().manual_seed(seed)
    c, b = torch.randn(2, k, generator=rng, dtype=torch.float64) / k**0.5
    a = torch.randn(k, k, generator=rng, dtype=torch.float64) / k
    a = a + a.T

    def value(z):
        return (z @ c) ** 3 + ((z @ a) * z).sum(-1) + z @ b

    def gradient(z):
        return 3 * ((z @ c) ** 2)[..., None] * c + 2 * z @ a + b

    return value, gradient, b


def rows(z, value, gradient, slope):
    """Of a mirrored design."""
    there, back = gradient(z), gradient(-z)
    values = torch.stack([value(z), value(-z)], 2)
    return stein_rows(
        z, values, (there - back) / 2, (there + back) / 2 - slope, slope[None, None].expand(len(z), 1, -1)
    )


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_mean_is_zero_by_quadrature(k):
    """Gauss–Hermite quadrature of all three quantities: exact up to the weight φ, which 40 nodes resolve."""
    import numpy as np

    nodes, weights = (torch.from_numpy(v) for v in np.polynomial.hermite_e.hermegauss(40))
    grid = torch.cartesian_prod(*[nodes] * k).reshape(-1, k)
    weight = torch.cartesian_prod(*[weights] * k).reshape(-1, k).prod(1) / (2 * torch.pi) ** (k / 2)
    value, gradient, slope = cubic(k)
    found = rows(grid[None], value, gradient, slope)[0]
    mean, size = (weight[:, None] * found).sum(0), (weight[:, None] * found.abs()).sum(0)
    assert (mean.abs() < 1e-6 * size + 1e-12).all()


@pytest.mark.parametrize(("k", "n"), [(1, 200), (2, 200), (5, 200), (5, 500), (20, 200)])
def test_scores_of_a_cubic_are_standard_normal(k, n):
    value, gradient, slope = cubic(k)
    rng = torch.Generator().manual_seed(1)
    z = torch.randn(1000, n, k, generator=rng, dtype=torch.float64)
    found = rows(z, value, gradient, slope)
    size = value(z).abs()
    sums = moments(found, rounding_rows(z, size, slope[None, None].expand(1000, 1, -1)))
    score = z_scores(sums, torch.full((1000,), n))
    assert combined(score).max() < 5
    assert 0.75 < score[:, 1].std() < 1.1
    assert score[:, 1].mean().abs() < 0.2  # skewness of few rows


def test_a_wrong_gradient_is_seen():
    value, gradient, slope = cubic(5)
    z = torch.randn(50, 500, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = rows(z, value, lambda z: -gradient(z), -slope)
    sums = moments(found, rounding_rows(z, value(z).abs(), slope[None, None].expand(50, 1, -1)))
    assert combined(z_scores(sums, torch.full((50,), 500))).min() > 5


def test_what_rounding_explains_does_not_count():
    """A mean of the size of rounding, with next to no variance, over ever more rows."""
    for n in (100, 10_000, 10**8):
        mean, rounding = 1e-9, 2e-9
        sums = torch.tensor([mean, mean**2 * (1 + 1e-9), mean**3, mean**4, rounding], dtype=torch.float64)
        sums = sums[None, :, None].expand(1, 5, 3) * n
        assert z_scores(sums, torch.tensor([n])).abs().max() < 1


def test_statistics_without_fourth_powers_are_read():
    sums = torch.tensor([10.0, 100.0, 0.0, 0.0, 0.0], dtype=torch.float64)[None, :, None].expand(1, 5, 3)
    score = z_scores(sums, torch.tensor([100]))
    assert torch.isfinite(score).all()
    assert z_scores(torch.zeros(1, 5, 3).double(), torch.tensor([0])).abs().max() == 0


def test_the_worst_of_several_has_their_number_times_its_p():
    z = torch.tensor([3.0, 4.0, 6.0, 9.0], dtype=torch.float64)
    p = 2 * torch.special.ndtr(-worst_of(z, 3))
    torch.testing.assert_close(p, 6 * torch.special.ndtr(-z), rtol=1e-6, atol=0)
    far = worst_of(torch.tensor([11.999, 12.001]).double(), 3)
    assert abs(float(far[1] - far[0])) < 0.01
    assert worst_of(torch.tensor([-50.0]).double(), 3) < -49


def test_normal_scores_have_the_probability_of_t():
    t, df = torch.tensor([1.0, 2.0, 4.0, 8.0]).double(), torch.tensor([3.0, 10.0, 40.0, 200.0]).double()[:, None]
    z = normal_score(t, df)
    exact = -torch.special.ndtri(two_sided_p(t, df) / 2)
    assert (z - exact).abs().max() < 0.05
    assert torch.isfinite(normal_score(torch.tensor(1e150, dtype=torch.float64), torch.tensor(5.0)))
