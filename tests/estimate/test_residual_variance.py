"""The variance of vᵀĤv from the residuals of the rows: coverage where the noise along v is unlike that elsewhere."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from smoothhess import Dense, Diagonal, SmoothHess
from smoothhess.estimate import residual_variance
from smoothhess.estimate.residual_variance import ResidualVariance, cubic_variance

SEEDS = 200
LEAST, MOST = 0.90, 1.5  # coverage, 3 standard errors below .95 for 200 seeds; half-width over that of an oracle


def repeated(f, x, sigma, calls, seeds=SEEDS):
    return SmoothHess(f).attribute(x.expand(seeds, -1), sigma=sigma, n_calls=calls, seed=range(seeds), control=None)


def judged(estimate, truth):
    """Share of the intervals that contain the truth, and their median half-width over 1.96 true standard errors."""
    low, high = estimate.interval()
    spread = (estimate.value - truth).square().mean(0).sqrt()
    share = ((low <= truth) & (truth <= high)).double().mean()
    return float(share), float(((high - low) / 2 / (1.96 * spread)).median())


def residuals_of(result):
    """The variances from the residuals of a result."""
    pooled = result.noise.pooled
    assert pooled.prior is not None
    return ResidualVariance(pooled.white, pooled.estimate, pooled.prior.trace)


def attention(tokens, width, seed):
    """The mean over tokens of an attention layer, and an input."""
    rng = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(width, width, generator=rng).double() / width**0.5 for _ in range(3))
    out, x = (torch.randn(size, generator=rng).double() for size in (width, tokens * width))

    def f(x):
        h = x.reshape(-1, tokens, width)
        weights = (2 * h @ query @ (h @ key).mT / width**0.5).softmax(-1)
        return (weights @ (h @ value)).mean(1) @ out

    return f, x[None]


@pytest.mark.parametrize("k", [5, 12])
def test_the_variance_of_a_cubic_slope_is_that_of_the_estimates(k):
    """f = (v·x)⁴/4 has the slope t³ along v: c = 1, and nothing is left."""
    v = normalize(torch.randn(k, generator=torch.Generator().manual_seed(0)).double(), dim=0)
    result = repeated(lambda x: (x @ v) ** 4 / 4, torch.zeros(1, k).double(), 1.0, 2 * k, seeds=4000)
    found = result.bilinear(v, v)
    expected, pooled = cubic_variance(k) / k, result.noise.pooled
    residuals = residuals_of(result)
    score, odd = (rows @ v[:, None] for rows in (pooled.stats.head.score, pooled.estimate.odd))
    variance = residuals.of_directions(score, odd, torch.ones(4000, 1).double())[:, 0]
    torch.testing.assert_close(variance, torch.full_like(variance, expected), rtol=1e-6, atol=0)
    assert (found.stderr.square() > 0.999 * expected).all()
    squares = (found.value - 3).square()
    z = (squares.mean() - expected) / (squares.std() / math.sqrt(len(squares)))
    assert abs(float(z)) < 4


@pytest.mark.parametrize("blocks", [1, 3, 10])
def test_weak_directions_of_attention_are_covered(blocks):
    """They covered 0.57 to 0.95: their noise was taken to be the same share of their energy as elsewhere."""
    f, x = attention(5, 4, seed=31)
    long = [SmoothHess(f).attribute(x, sigma=0.3, n_calls=60_000, seed=10_000 + i, control=None) for i in range(2)]
    truth = torch.stack([r.unshrunk().hessian[0] for r in long]).mean(0)
    size, vectors = torch.linalg.eigh(truth)
    result = repeated(f, x, 0.3, 2 * 20 * blocks)
    for place in size.abs().argsort()[:4]:
        v = vectors[:, place]
        share, width = judged(result.bilinear(v, v), v @ truth @ v)
        assert share >= LEAST
        assert width < MOST


@pytest.mark.parametrize("blocks", [1, 10])
@pytest.mark.parametrize("rate", [0.3, 0.6])
def test_curvature_along_one_direction_is_covered(blocks, rate):
    """exp(b·x) covered 0.79 to 0.93."""
    b = normalize(torch.randn(12, generator=torch.Generator().manual_seed(4)).double(), dim=0)
    result = repeated(lambda x: torch.exp(rate * (x @ b)), torch.zeros(1, 12).double(), 1.0, 24 * blocks)
    share, _ = judged(result.bilinear(b, b), rate**2 * math.exp(rate**2 / 2))
    assert share >= LEAST


@pytest.mark.parametrize("blocks", [1, 5])
def test_the_diagonal_of_a_sum_over_features_is_covered(blocks):
    """Σ x⁴ covered 0.76 with one block and 0.91 with five."""
    x = torch.randn(1, 40, generator=torch.Generator().manual_seed(6)).double()
    result = repeated(lambda x: (x**4).sum(1), x, 0.5, 80 * blocks)
    share, width = judged(result.diagonal(), 12 * (x[0].square() + 0.25))
    assert share >= 0.93
    assert width < MOST


def network(d):
    rng = torch.Generator().manual_seed(7)
    first, second = torch.randn(d, 24, generator=rng).double() / d**0.5, torch.randn(24, generator=rng).double()
    return lambda x: (1.5 * x @ first + 0.2).tanh() @ second


def test_other_entries_do_not_change(monkeypatch):
    d = 9
    result = repeated(network(d), torch.full((1, d), 0.2).double(), 0.7, 4 * d, seeds=3)
    stderr = result.unshrunk().stderr()
    monkeypatch.setattr(ResidualVariance, "of_directions", lambda _, score, odd, gram: 1e6 * gram.expand(3, -1))
    wide = repeated(network(d), torch.full((1, d), 0.2).double(), 0.7, 4 * d, seeds=3).unshrunk().stderr()
    apart = ~torch.eye(d, dtype=torch.bool)
    torch.testing.assert_close(wide[:, apart], stderr[:, apart], rtol=0, atol=0)
    assert (wide.diagonal(dim1=1, dim2=2) > 10 * stderr.diagonal(dim1=1, dim2=2)).all()


@pytest.mark.parametrize("calls", [14, 18, 60])  # fewer rows than features, a block, several and a part of one
def test_chunks_and_batches_give_the_same_variance(monkeypatch, calls):
    d = 9
    x = torch.full((1, d), 0.2).double()
    gaussian = Diagonal(torch.linspace(0.1, 0.9, d).double())
    explainer = SmoothHess(network(d))
    both = explainer.attribute(x.expand(2, -1), gaussian=gaussian, n_calls=calls, seed=[3, 4], control=None)
    monkeypatch.setattr(residual_variance, "CHUNK", 1)
    for i in range(2):
        one = explainer.attribute(x, gaussian=gaussian, n_calls=calls, seed=3 + i, control=None)
        torch.testing.assert_close(one.diagonal().stderr[0], both.diagonal().stderr[i], rtol=1e-9, atol=0)


def test_the_linear_part_is_the_same_from_rows_and_from_matrices():
    d = 9
    result = repeated(network(d), torch.full((1, d), 0.2).double(), 0.7, 40, seeds=2)
    pooled = result.noise.pooled
    estimate, gram = pooled.estimate, pooled.directions.of_features.gram
    found = []
    for by_rows in (True, False):
        residuals = residuals_of(result)
        residuals.by_rows = by_rows
        residuals.cross = residuals.draws @ residuals.odd.mT
        found.append(residuals.of_directions(estimate.stats.head.score, estimate.odd, gram))
    torch.testing.assert_close(*found, rtol=1e-9, atol=0)


def products_of_squares(d, seeds, blocks):
    """Results of Σ x_i²x_{i+1}², and the truth of vᵀHv for a random v."""
    x = torch.randn(1, d, generator=torch.Generator().manual_seed(3)).double()
    v = normalize(torch.randn(d, generator=torch.Generator().manual_seed(5)).double(), dim=0)
    square = x[0].square() + 0.3**2
    truth = torch.diag(4 * x[0, 1:] * x[0, :-1], 1)
    neighbours = torch.cat([square[1:], square.new_zeros(1)]) + torch.cat([square.new_zeros(1), square[:-1]])
    truth = truth + truth.mT + torch.diag(2 * neighbours)
    result = repeated(lambda x: (x[:, 1:] * x[:, :-1]).square().sum(1), x, 0.3, int(2 * d * blocks), seeds)
    return result.bilinear(v, v), v @ truth @ v


@pytest.mark.parametrize("blocks", [1.5, 2.5])
def test_an_incomplete_block_does_not_widen_intervals(blocks):
    """They were 1.8 times as wide as those of an oracle: an incomplete block has noise of the linear part."""
    share, width = judged(*products_of_squares(16, SEEDS, blocks))
    assert share >= LEAST
    assert width < MOST


def test_lengths_that_hardly_differ_do_not_widen_intervals():
    """Four rows determine no cubic slope where |t| is about the same: the mean variance was 50 times too large."""
    found, _ = products_of_squares(16, 1000, 0.25)
    assert float(found.stderr.square().mean() / found.value.var()) < 10


@pytest.mark.parametrize("calls", [4, 6, 8])
def test_a_few_rows_have_no_cubic_slope(calls):
    """The variance of two rows was up to 10⁵ times too large: a line and a cubic slope fit them exactly."""
    d = 16
    v = normalize(torch.randn(d, generator=torch.Generator().manual_seed(5)).double(), dim=0)
    found = repeated(network(d), torch.full((1, d), 0.2).double(), 0.7, calls, seeds=500).bilinear(v, v)
    assert float(found.stderr.square().max() / found.value.var()) < 100


def test_a_short_direction_has_a_finite_error():
    result = repeated(network(9), torch.full((1, 9), 0.2).double(), 0.7, 36, seeds=2)
    v = torch.ones(9).double()
    expected = result.bilinear(v, v).stderr
    for length in (1e-60, 1e60):
        torch.testing.assert_close(result.bilinear(length * v, length * v).stderr / length**2, expected)
    assert (result.bilinear(1e-200 * v, 1e-200 * v).stderr == 0).all()


def test_groups_that_span_the_space_use_the_residuals_of_whole_rows():
    """With a group for each feature, the coordinates of the groups determine the rows, also with correlated noise."""
    d, rng = 7, torch.Generator().manual_seed(2)
    root = torch.eye(d).double() + 0.3 * torch.randn(d, d, generator=rng).double()
    gaussian = Dense(root @ root.mT / 10)
    w, x = torch.randn(d, generator=rng).double(), torch.randn(1, d, generator=rng).double()
    options = {"gaussian": gaussian, "n_calls": 6 * d, "control": None, "tails": None}
    single, sums = (
        SmoothHess(lambda x: (x @ w).tanh() + (x[:, 0] * x[:, 1:].sum(1)).sin()).attribute(x, **options, **more)
        for more in ({}, {"feature_mask": torch.arange(d)})
    )
    torch.testing.assert_close(sums.hessian, single.unshrunk().hessian)
    found = []
    for result in (single, sums):
        pooled = result.noise.pooled
        products, head = pooled.directions.of_features, pooled.stats.head
        residuals = ResidualVariance(pooled.whitened, pooled.estimate, single.noise.prior.trace)
        found.append(residuals.of_directions(head.score, pooled.estimate.odd, products.gram))
    torch.testing.assert_close(*found)
