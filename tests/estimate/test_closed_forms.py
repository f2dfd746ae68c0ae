"""The estimate against closed forms, by z-score: Hessian, gradient and value, every Gaussian, every design."""

import math

import pytest
import torch

from smoothhess import Isotropic
from smoothhess.draws.designs import DESIGNS
from tests.truths import FOUR_QUADRANT_HESSIAN, OneHidden, Plain, covariance, four_quadrant, gaussians, quadratic

SEEDS, COVERED = 100, 200  # of means by z-score; of the coverage of intervals, which needs more

MANY = pytest.param(64, marks=pytest.mark.slow)  # dimensions: seconds each
MANY_CALLS = [pytest.param(d, n, marks=pytest.mark.slow) for d, n in ((12, 4000), (64, 256))]


def repeated(f, x, gaussian, n_calls=None, design="antithetic", seeds=SEEDS, **options):
    """One input explained with many different seeds: a batch of independent estimates."""
    inputs = x.expand(seeds, *x.shape[1:]).clone()
    return Plain(f).attribute(
        inputs, gaussian=gaussian, n_calls=n_calls, design=design, seed=range(seeds), shrink=False, **options
    )


def z_of_mean(estimates, truth):
    """Mean over seeds against the truth in units of its own standard error; exact zeros count as zero."""
    mean, se = estimates.mean(0), estimates.std(0) / math.sqrt(len(estimates))
    error = (mean - truth).abs()
    return torch.where(error <= 1e-12, 0.0, error / se.clamp_min(1e-300))


@pytest.mark.parametrize("design", sorted(DESIGNS))
@pytest.mark.parametrize("d", [1, 2, 12, 64])
@pytest.mark.parametrize("kind", ["isotropic", "diagonal", "frozen", "dense", "eigenbasis", "singular", "segments"])
def test_one_hidden_layer(kind, d, design):
    net, gaussian = OneHidden(d), gaussians(d)[kind]
    x = 0.3 * torch.ones(1, d, dtype=torch.float64)
    truth = net.truth(x, gaussian)
    result = repeated(net, x, gaussian, {1: 16, 2: 16, 12: 256, 64: 64}[d], design)
    assert z_of_mean(result.hessian, truth.hessian[0]).max() < 5
    assert z_of_mean(result.gradient, truth.gradient[0]).max() < 5
    assert z_of_mean(result.value, truth.value[0]) < 5


@pytest.mark.parametrize("design", sorted(DESIGNS))
@pytest.mark.parametrize("d", [1, 2, 12, 64])
def test_quadratic(d, design):
    a, b = quadratic(d)
    f, x = lambda x: x @ b + (x @ a * x).sum(1) / 2, torch.ones(1, d).double()
    result = repeated(f, x, Isotropic(0.7), 128 if d > 2 else 16, design)
    assert z_of_mean(result.hessian, a).max() < 5
    assert z_of_mean(result.gradient, a.sum(1) + b).max() < 5


@pytest.mark.parametrize("design", sorted(DESIGNS))
@pytest.mark.parametrize("sigma", [0.01, 1.0])
def test_four_quadrant_function(sigma, design):
    result = repeated(four_quadrant, torch.zeros(1, 2).double(), Isotropic(sigma), 64, design)
    assert z_of_mean(result.hessian, FOUR_QUADRANT_HESSIAN).max() < 5


@pytest.mark.parametrize("d", [1, 2, 12, 64])
def test_affine_is_exact_under_mirrored_designs(d):
    _, b = quadratic(d)
    for design in DESIGNS.values():
        if design.mirrored:
            result = repeated(lambda x: x @ b + 3, torch.ones(1, d).double(), Isotropic(1.0), 64, design.name, seeds=10)
            assert (result.hessian == 0).all()
            assert (result.relative_error == 0).all()
            torch.testing.assert_close(result.gradient, b.expand(10, d), rtol=0, atol=1e-12)
            with pytest.warns(UserWarning, match="H cannot be distinguished from zero"):
                adaptive = Plain(lambda x: x @ b + 3).attribute(
                    torch.ones(1, d).double(), sigma=1.0, design=design.name
                )
            assert adaptive.converged.all()
            assert int(adaptive.n_calls) == {1: 64, 2: 64, 12: 96, 64: 128}[d]  # the first look at 32 rows or more


def coverage(result, truth):
    """Share of the 95 % intervals that hold the truth: all entries, and the 20 largest in truth."""
    d = truth.shape[-1]
    i, j = torch.triu_indices(d, d)
    held = []
    for r in (result.row(a) for a in range(d)):
        low, high = r.interval()
        held.append((low, high))
    low, high = (torch.stack(ends, 1)[:, i, j] for ends in zip(*held, strict=True))
    inside = ((low <= truth[i, j]) & (truth[i, j] <= high)).double()
    largest = truth[i, j].abs().argsort(descending=True)[:20]
    return float(inside.mean()), float(inside[:, largest].mean())


@pytest.mark.parametrize("design", ["iid", "antithetic"])
@pytest.mark.parametrize(("d", "n_calls"), [(1, 400), (2, 400), (12, 400), (12, 1600), *MANY_CALLS])
@pytest.mark.parametrize("kind", ["isotropic", "dense"])
def test_coverage(kind, d, n_calls, design):
    net, gaussian = OneHidden(d), gaussians(d)[kind]
    x = 0.3 * torch.ones(1, d, dtype=torch.float64)
    result = repeated(net, x, gaussian, n_calls, design, COVERED)
    for share in coverage(result, net.truth(x, gaussian).hessian[0]):
        assert 0.92 <= share <= 0.98


@pytest.mark.parametrize("kind", ["isotropic", "dense"])
@pytest.mark.parametrize("d", [12, MANY])
@pytest.mark.parametrize("blocks", [0.25, 0.5, 1, 2, 8])
def test_coverage_inside_and_beyond_one_block(blocks, d, kind):
    """On a network and an input that the constants of `skew` were not chosen on."""
    net, gaussian = OneHidden(d, width=24 if d == 12 else 100, seed=11), gaussians(d)[kind]
    x = -0.2 * torch.ones(1, d, dtype=torch.float64)
    truth = net.truth(x, gaussian).hessian[0]
    result = repeated(net, x, gaussian, int(2 * d * blocks), "orthogonal", seeds=COVERED if d == 12 else 60)
    # An ill-conditioned Σ in few dimensions makes the bars rather too wide.
    for share in coverage(result, truth):
        # Below one block, neurons that no row has flipped are counted with their own variance.
        most = 1.0 if kind != "isotropic" or blocks <= 0.25 else 0.99 if blocks < 1 else 0.985
        assert 0.92 <= share <= most
    if kind == "isotropic":
        error = torch.linalg.matrix_norm(result.hessian - truth)
        assert 0.85 <= float((result.noise.of_frobenius.sqrt() / error).median()) <= 1.15


def test_one_scrambling_knows_nothing_of_its_error():
    net, gaussian = OneHidden(12), Isotropic(0.5)
    result = repeated(net, torch.zeros(1, 12, dtype=torch.float64), gaussian, 128, "sobol", seeds=2)
    assert result.stderr().isinf().all()


@pytest.mark.parametrize("kind", ["isotropic", "diagonal", "dense"])
@pytest.mark.parametrize("blocks", [0.125, 0.5, 1])
def test_coverage_of_diagonals_inside_one_block(blocks, kind):
    """Where both directions are the same, the two halves of the variance must not cancel."""
    d = 64
    net, gaussian = OneHidden(d, width=100), gaussians(d)[kind]
    x = 0.3 * torch.ones(1, d, dtype=torch.float64)
    truth = net.truth(x, gaussian).hessian[0]
    result = repeated(net, x, gaussian, int(2 * d * blocks), "orthogonal", seeds=60)
    p = torch.nn.functional.one_hot(torch.arange(d) % 8).double()
    groups = result.groups(torch.arange(d) % 8)
    for estimate, target in ((result.diagonal(), truth.diagonal()), (groups.diagonal(), (p.mT @ truth @ p).diagonal())):
        low, high = estimate.interval()
        assert (estimate.stderr > 0).all()
        assert float(((low <= target) & (target <= high)).double().mean()) >= 0.9  # rather too wide than too narrow


@pytest.mark.parametrize("design", ["orthogonal", "sobol"])
@pytest.mark.parametrize("d", [1, 2])
def test_coverage_in_few_dimensions(d, design):
    """There units are the only witness: two or more of them."""
    net, gaussian = OneHidden(d, seed=2), Isotropic(0.5)
    x = 0.3 * torch.ones(1, d, dtype=torch.float64)
    result = repeated(net, x, gaussian, 2 * 8 * (2 * d if design == "orthogonal" else 64), design, seeds=300)
    for share in coverage(result, net.truth(x, gaussian).hessian[0]):
        assert 0.92 <= share <= 0.98


@pytest.mark.parametrize("d", [2, 12, MANY])
def test_smoothgrad_is_as_good_as_antithetic(d):
    net, gaussian = OneHidden(d, seed=5), Isotropic(0.5)
    x = -0.2 * torch.ones(1, d, dtype=torch.float64)
    truth = net.truth(x, gaussian).gradient[0]
    for blocks in (1, 4):
        error = {
            design: (repeated(net, x, gaussian, 4 * d * blocks, design, COVERED).gradient - truth)
            .square()
            .mean()
            .sqrt()
            for design in ("orthogonal", "antithetic")
        }
        assert error["orthogonal"] <= 1.15 * error["antithetic"]


@pytest.mark.parametrize("d", [1, 2, 12, 64])
@pytest.mark.parametrize("kind", sorted(gaussians(4)))
def test_one_orthogonal_block_is_exact_for_quadratics(kind, d):
    a, b = quadratic(d)
    gaussian = gaussians(d)[kind]
    project = gaussian.push(gaussian.pull(torch.eye(d).double()))
    calls = 2 * DESIGNS["orthogonal"].block_rows(gaussian.rank(d))
    f = lambda x: x @ b + (x @ a * x).sum(1) / 2
    result = Plain(f).attribute(torch.ones(1, d).double(), gaussian=gaussian, n_calls=calls)
    torch.testing.assert_close(result.hessian[0], project @ a @ project, rtol=0, atol=1e-10)


def test_orthogonal_rows_have_the_promised_covariance():
    """(d + 2)/d Σ: the weights undo it."""
    seen = []
    d, gaussian = 12, gaussians(12)["dense"]
    f = lambda x: (seen.append(x.detach().clone()), x.square().sum(1))[1]
    Plain(f).attribute(torch.zeros(1, d).double(), gaussian=gaussian, n_calls=200 * d, tails=None)
    rows = torch.cat(seen)
    rows = rows[(rows != 0).any(1)]
    expected = (d + 2) / d * covariance(gaussian, d)
    spread = expected.diagonal().max() * (2 / len(rows)) ** 0.5
    assert (rows.mT @ rows / len(rows) - expected).abs().max() < 5 * spread


@pytest.mark.slow
@pytest.mark.parametrize("d", [1, 2, 12])
def test_coverage_after_the_adaptive_stop(d):
    net, gaussian = OneHidden(d, seed=2), Isotropic(0.5)
    x = 0.3 * torch.ones(1, d, dtype=torch.float64)
    for design in ("antithetic", "orthogonal"):
        result = repeated(net, x, gaussian, None, design, tol=0.2, seeds=200 if d == 12 else 600)
        assert result.converged.all()
        for share in coverage(result, net.truth(x, gaussian).hessian[0]):
            assert 0.92 <= share <= 0.98, design


@pytest.mark.parametrize("design", ["iid", "antithetic", "orthogonal"])
def test_coverage_of_gradient_value_diagonal_groups_and_bilinear_forms(design):
    d = 12
    net, gaussian = OneHidden(d), gaussians(d)["dense"]
    x = 0.3 * torch.ones(1, d, dtype=torch.float64)
    truth = net.truth(x, gaussian)
    result = repeated(net, x, gaussian, 400, design, COVERED)
    mask = torch.arange(d) % 4
    one_hot = torch.nn.functional.one_hot(mask).double()
    groups = result.groups(mask)
    u, v = torch.linspace(-1, 1, d).double(), torch.linspace(0, 1, d).double() ** 2
    cases = {
        "gradient": (result.gradient, result.gradient_stderr, truth.gradient[0]),
        "value": (result.value, result.value_stderr, truth.value[0]),
        "diagonal": (result.diagonal().value, result.diagonal().stderr, truth.hessian[0].diagonal()),
        "groups": (groups.hessian, groups.stderr(), one_hot.mT @ truth.hessian[0] @ one_hot),
        "group gradient": (groups.gradient, groups.gradient_stderr, truth.gradient[0] @ one_hot),
        "bilinear": (result.bilinear(u, v).value, result.bilinear(u, v).stderr, u @ truth.hessian[0] @ v),
    }
    for name, (value, stderr, target) in cases.items():
        share = float(((value - target).abs() <= 1.97 * stderr).double().mean())
        # rows inside a block make the orthogonal gradient's error bars a little too wide
        assert 0.90 <= share <= (1.0 if design == "orthogonal" else 0.99), name


def test_theorem_1_error_falls_as_one_over_root_n():
    """The 95 % quantile over seeds of ‖Ĥ − H‖₂ against n, on a log-log scale."""
    d, net, gaussian = 12, OneHidden(12), Isotropic(0.5)
    x = 0.3 * torch.ones(1, d, dtype=torch.float64)
    truth = net.truth(x, gaussian).hessian[0]
    counts = [32, 128, 512, 2048]
    quantiles = []
    for n in counts:
        error = torch.linalg.matrix_norm(repeated(net, x, gaussian, n, seeds=COVERED).hessian - truth, 2)
        quantiles.append(float(error.quantile(0.95)))
    log_n, log_q = torch.tensor(counts).log(), torch.tensor(quantiles).log()
    slope = float(((log_n - log_n.mean()) * (log_q - log_q.mean())).sum() / (log_n - log_n.mean()).square().sum())
    assert -0.55 <= slope <= -0.45


@pytest.mark.parametrize("design", ["antithetic", "orthogonal"])
@pytest.mark.parametrize("norm", ["fro", "op"])
def test_calls_for_predicts_the_calls(norm, design):
    d, net, gaussian, tol = 12, OneHidden(12), Isotropic(0.5), 0.1
    x = 0.3 * torch.ones(1, d, dtype=torch.float64)
    truth = net.truth(x, gaussian).hessian[0]
    size = torch.linalg.matrix_norm(truth, 2 if norm == "op" else "fro")
    expected = float(repeated(net, x, gaussian, 480, design, seeds=60).calls_for(tol, norm).median())
    n = 2 * round(expected / 2)
    error = repeated(net, x, gaussian, n, design, seeds=60).hessian - truth
    reached = torch.linalg.matrix_norm(error, 2 if norm == "op" else "fro") / size
    needed = n * (float(reached.square().mean().sqrt()) / tol) ** 2
    assert 0.7 <= expected / needed <= 1.3


@pytest.mark.parametrize("d", [1, 2])
def test_calls_for_is_never_nothing(d):
    result = repeated(OneHidden(d, seed=2), 0.3 * torch.ones(1, d).double(), Isotropic(0.5), 64, "orthogonal", seeds=5)
    assert (result.calls_for(0.01, "op") >= result.calls_for(0.01, "fro") / 2).all()


@pytest.mark.parametrize("design", sorted(DESIGNS))
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_intervals_of_gradient_and_value_hold_the_truth(design, blocks):
    d, runs = 8, 80
    net = OneHidden(d, width=40)
    x = 0.3 * torch.randn(1, d, generator=torch.Generator().manual_seed(5)).double()
    truth = net.truth(x, Isotropic(0.5))
    calls = blocks * (128 if design == "sobol" else 2 * d)
    result = Plain(net).attribute(
        x.expand(runs, -1).contiguous(), sigma=0.5, n_calls=calls, design=design, seed=range(runs)
    )
    for estimate, known in ((result.gradient_estimate(), truth.gradient), (result.value_estimate(), truth.value)):
        low, high = estimate.interval()
        held = ((low <= known) & (known <= high)).double()
        each = held.reshape(runs, -1).mean(1)  # features of one run are not independent
        assert float(each.mean()) >= 0.92 - 2 * float(each.std()) / runs**0.5
