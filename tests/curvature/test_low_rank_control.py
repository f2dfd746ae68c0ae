"""The closed form in a few directions, where there are too many dimensions for a matrix."""

import pytest
import torch
from torch import nn

from smoothhess import Diagonal, Interactions, SmoothHess
from smoothhess.curvature import control_variate
from smoothhess.draws.designs import find_design
from smoothhess.explainers.choose_control import frozen_model
from smoothhess.explainers.sampler import Sampler
from smoothhess.linalg.low_rank import Known, mean
from smoothhess.model.gradients import Oracle

pytestmark = pytest.mark.rounding


@pytest.fixture
def few(monkeypatch):
    """More than 16 dimensions are many."""
    monkeypatch.setattr(control_variate, "CONTROL_LIMIT", 16)


def network(seed=0, d=40):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(d, 50), nn.ReLU(), nn.Linear(50, 30), nn.ReLU(), nn.Linear(30, 1)).double()


X = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).double()
GAUSSIAN = Diagonal(torch.linspace(0.1, 0.4, 40).double())


def thin(seed=0, n_calls=128, **options):
    return SmoothHess(network()).attribute(X, gaussian=GAUSSIAN, n_calls=n_calls, seed=seed, control="kink", **options)


@pytest.mark.usefixtures("few")
class TestResults:
    def test_it_is_kept_as_factors(self):
        result = thin(shrink=False)
        known = result.statistics.known
        assert known is not None
        assert known.is_thin
        assert known.core.shape == (3, 16, 16)  # twice one direction for 16 calls
        assert bool((result.control_weights[:, 0] > 0.5).all())
        assert bool((result.control_weights[:, 1] == 0).all())
        assert result.unbiased
        check = 1 + 4
        assert result.n_passes.tolist() == [128 + 2 + 1 + 3 * 8 + 2 * 8 + 64 / 2 + check] * 3

    @pytest.mark.parametrize("shrink", [False, True])
    def test_every_answer_is_that_of_the_dense_matrix(self, shrink):
        result, asked = thin(shrink=shrink, n_calls=24), thin(shrink=shrink, n_calls=24)
        dense = asked.hessian
        rows = torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(1)).double()
        torch.testing.assert_close(result.product(rows), rows @ dense)
        values, vectors = result.eigh(3)
        torch.testing.assert_close((dense @ vectors.flatten(2).mT).mT, values[..., None] * vectors.flatten(2))
        unbiased = asked.estimate.unbiased.dense()
        torch.testing.assert_close(result.diagonal().value, unbiased.diagonal(dim1=-2, dim2=-1))
        torch.testing.assert_close(result.row(3).value, unbiased[:, 3])
        mask = torch.arange(40) % 6
        chosen = nn.functional.one_hot(mask).double()
        torch.testing.assert_close(result.groups(mask).hessian, chosen.T @ dense @ chosen)
        noise = result.noise
        torch.testing.assert_close(noise.estimate.squared_norm, unbiased.square().sum((-1, -2)))
        if shrink:
            torch.testing.assert_close(result.estimate.denoised.norm2, dense.square().sum((-1, -2)))
            white = result.estimate.denoised.dense()
            scale = GAUSSIAN.scales(40)
            torch.testing.assert_close(result.estimate.denoised.explained.isfinite().all(), torch.tensor(True))
            torch.testing.assert_close(white, dense * scale[:, None] * scale, rtol=1e-6, atol=1e-9)

    def test_it_stays_unbiased(self):
        """Whatever was subtracted is added back: the mean over seeds against a long plain run, by z-score."""
        estimates = torch.stack([thin(seed, n_calls=40, shrink=False).hessian for seed in range(60)])
        long = SmoothHess(network()).attribute(X, gaussian=GAUSSIAN, n_calls=20_000, control=None, shrink=False)
        spread = (estimates.var(0) / 60 + long.stderr().square()).sqrt()
        z = (estimates.mean(0) - long.hessian) / spread
        assert float(z.abs().max()) < 5
        assert 0.8 < float(z.square().mean()) < 1.2

    def test_it_pays_where_few_directions_matter(self):
        """Of 40 features the network sees six combinations."""
        torch.manual_seed(3)
        narrow = nn.Sequential(nn.Linear(40, 6), *network(d=6)).double()
        truth = SmoothHess(narrow).attribute(X, sigma=0.1, n_calls=40_000, control="kink").hessian
        control, plain = (
            SmoothHess(narrow).attribute(X, sigma=0.1, n_calls=24, control=c, shrink=False) for c in ("kink", None)
        )
        errors = [((r.hessian - truth).norm() / truth.norm()).item() for r in (control, plain)]
        assert errors[0] < 0.7 * errors[1]

    def test_more_files_and_sums_of_groups(self, tmp_path):
        explainer, first = SmoothHess(network()), thin(n_calls=128, shrink=False)
        result = explainer.more(first, 64)
        assert torch.equal(result.statistics.known.factor, first.statistics.known.factor)
        result.save(tmp_path / "r.safetensors")
        again = Interactions.load(tmp_path / "r.safetensors")
        torch.testing.assert_close(again.hessian, result.hessian)
        mask = torch.arange(40) % 6
        streamed = thin(n_calls=128, feature_mask=mask)
        torch.testing.assert_close(streamed.unshrunk().hessian, first.groups(mask).hessian)
        whole = Interactions.cat([first[:1], first[1:]])
        torch.testing.assert_close(whole.hessian, first.hessian)

    def test_auto_takes_it(self):
        result = SmoothHess(network()).attribute(X, sigma=0.05, n_calls=128)
        assert result.control == "kink"
        assert result.statistics.known.is_thin


def test_sums_of_known_matrices():
    rng = torch.Generator().manual_seed(0)

    def draw(r):
        core = torch.randn(2, r, r, generator=rng).double()
        return Known(core + core.mT, torch.randn(2, r, 7, generator=rng).double())

    a, b = draw(2), draw(3)
    torch.testing.assert_close(a.plus(b).dense(), a.dense() + b.dense())
    torch.testing.assert_close(a.plus(Known(b.dense())).dense(), a.dense() + b.dense())
    n_a, n_b = torch.tensor([1, 2]), torch.tensor([3, 2])
    both = mean(a, n_a, b, n_b)
    weight = torch.tensor([0.25, 0.5]).double()[:, None, None]
    torch.testing.assert_close(both.dense(), weight * a.dense() + (1 - weight) * b.dense())
    assert mean(a, n_a, a, n_b) is a
    torch.testing.assert_close(mean(None, n_a, b, n_b).dense(), (1 - weight) * b.dense())
    torch.testing.assert_close(Known.cat([a, b]).dense(), torch.cat([a.dense(), b.dense()]))
    torch.testing.assert_close(a.pairs()[0].mT @ a.pairs()[1], a.dense())


@pytest.mark.usefixtures("few")
def test_tau_can_be_exact_in_any_dimension():
    """From as many directions as there are dimensions: W₁ in all directions is then the matrix itself."""
    x = X[:2]
    oracle = Oracle(network(), x)
    kinks = frozen_model(Sampler.start(oracle, x, GAUSSIAN, find_design("orthogonal")))
    owner = torch.arange(2)
    dense = kinks.expectation(GAUSSIAN).hessian.dense()
    exact = kinks.thin_expectation(GAUSSIAN, None, torch.eye(40).double())
    torch.testing.assert_close(exact.hessian.dense(), dense)
    assert exact.passes.tolist() == [2 * 40 + 40 / 2] * 2
    parts = [kinks.network.squares(GAUSSIAN, owner, columns) for columns in (range(13), range(13, 40))]
    torch.testing.assert_close(parts[0] + parts[1], kinks.network.squares(GAUSSIAN, owner))
    estimated, asked = thin(tau_probes=16, shrink=False), thin(tau_probes=40, shrink=False)
    assert float(asked.n_passes[0] - estimated.n_passes[0]) == (40 - 16) / 2
