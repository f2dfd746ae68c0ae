"""Where nothing is known of an error it is reported as unknown: no 0 ± 0."""

import warnings

import pytest
import torch
from torch import nn

from smoothhess import SmoothHess
from smoothhess.curvature.unknown_operations import unknown_operations

F64 = torch.float64


def unit(margin, slope=0.0, d=12, sigma=0.5):
    """A single (leaky) ReLU unit whose kink lies `margin` τ away from 0."""
    w = torch.randn(d, generator=torch.Generator().manual_seed(0), dtype=F64)
    w = w / w.norm()
    return lambda x: nn.functional.leaky_relu(x @ w - margin * sigma, slope)


class TestNothingMet:
    @pytest.mark.parametrize(
        ("design", "slope"),
        [("orthogonal", 0.0), ("orthogonal", 0.1), ("antithetic", 0.1), ("sobol", 0.1), ("iid", 0.0)],
    )
    def test_is_unknown_with_a_warning(self, design, slope):
        x = torch.zeros(1, 12, dtype=F64)
        with pytest.warns(UserWarning, match="no gradient of 1 of 1 example"):
            result = SmoothHess(unit(5, slope)).attribute(x, sigma=0.5, n_calls=12, control=None, design=design)
        assert result.relative_error.isnan().all()
        for estimate in (result.diagonal(), result.row(0), result.bilinear(torch.ones(12), torch.ones(12))):
            low, high = estimate.interval()
            assert low.isnan().all()
            assert high.isnan().all()
        assert not any(pair.significant for pair in result.top_pairs(66)[0])

    def test_few_events_are_warned_of(self):
        x = torch.zeros(40, 12, dtype=F64)
        with pytest.warns(UserWarning, match="no gradient"), pytest.warns(UserWarning, match="changed the gradient"):
            SmoothHess(unit(2)).attribute(x, sigma=0.5, n_calls=12, control=None, seed=list(range(40)))

    def test_an_affine_model_is_exactly_zero(self):
        model = nn.Linear(6, 1).double()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = SmoothHess(model).attribute(torch.ones(2, 6, dtype=F64), sigma=0.5, n_calls=8)
        assert result.relative_error.tolist() == [0, 0]
        assert result.stderr().abs().max() == 0

    def test_units_that_never_flip_are_no_doubt(self):
        """Where the margins of all units are known, and none is within reach, H is zero."""
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).double()
        with torch.no_grad():
            net[0].bias.copy_(torch.tensor([100.0, -100.0] * 4))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = SmoothHess(net).attribute(torch.zeros(1, 4, dtype=F64), sigma=0.1, n_calls=16, control=None)
        assert result.relative_error.tolist() == [0]

    def test_survives_saving_and_slicing(self, tmp_path):
        x = torch.zeros(2, 12, dtype=F64)
        model = nn.Linear(12, 1).double()
        result = SmoothHess(model).attribute(x, sigma=0.5, n_calls=12)
        result.save(tmp_path / "r.safetensors")
        assert type(result).load(tmp_path / "r.safetensors")[1].relative_error.tolist() == [0]

    def test_an_adaptive_run_ends(self):
        with pytest.warns(UserWarning, match="no gradient"):
            result = SmoothHess(unit(9)).attribute(torch.zeros(1, 12, dtype=F64), sigma=0.5, control=None)
        assert result.status == ("zero",)
        assert result.n_calls.tolist() == [1536]


class TestSteps:
    @pytest.mark.parametrize("calls", [200, 1000])
    def test_values_that_move_without_their_gradients_are_jumps(self, calls):
        rng = torch.Generator().manual_seed(8)
        place, size = torch.randn(60, generator=rng, dtype=F64), torch.randn(60, generator=rng, dtype=F64)
        weight = torch.randn(12, generator=rng, dtype=F64)

        def tree(x):
            return x @ weight + (size * (x[:, torch.arange(60) % 12] > place).to(F64)).sum(1)

        with pytest.warns(UserWarning, match="discontinuous"):
            result = SmoothHess(tree).attribute(torch.zeros(1, 12, dtype=F64), sigma=0.5, n_calls=calls)
        assert result.discontinuous.all()
        assert result.relative_error.isnan().all()


class TestOperations:
    @pytest.mark.parametrize(
        ("function", "expected"),
        [
            (lambda x: x.tanh().sum(1), []),
            (lambda x: (x @ torch.ones(3, 2)).softmax(-1)[:, 0], []),
            (lambda x: x.relu().sum(1), ["relu"]),
            (lambda x: x.sum(1) * (x > 0).sum(1), ["gt"]),
            (lambda x: x.sum(1) + x.long().sum(1), ["conversion to integers"]),
            (lambda x: torch.div(x, 2, rounding_mode="floor").sum(1) + x.sum(1), ["aten.div.Tensor_mode"]),
        ],
    )
    def test_that_could_bend(self, function, expected):
        assert unknown_operations(function, torch.ones(1, 3), None) == expected


class TestFeaturesThatNoRowMoved:
    @pytest.mark.parametrize("design", ["orthogonal", "antithetic"])
    def test_are_not_certain_while_others_move(self, design):
        """Kinks up to 6 σ away: of the far ones no row sees anything, which is no proof that there is nothing."""
        d, sigma, seeds = 50, 0.5, 100
        x = sigma * torch.linspace(0, 6, d, dtype=F64)
        result = SmoothHess(lambda z: z.abs().sum(1)).attribute(
            x.expand(seeds, d).clone(), sigma=sigma, n_calls=2 * d, seed=range(seeds), control=None, design=design
        )
        truth = 2 * torch.exp(-((x / sigma) ** 2) / 2) / (2 * torch.pi) ** 0.5 / sigma
        low, high = result.diagonal().interval()
        held = ((low <= truth) & (truth <= high)).double().mean(0)
        assert float(held[30:].mean()) > 0.92
        assert (high - low).min() > 0
        assert float((high - low)[:, 30:].median()) < 0.3 * float((high - low)[:, :10].median())
