"""Where nothing is known of an error it is reported as unknown: no 0 ± 0."""

import warnings

import pytest
import torch
from torch import nn

import smoothhess as sh
from smoothhess import SmoothHess
from smoothhess.curvature.unknown_operations import unknown_operations
from smoothhess.explainers.result_warnings import FewEventsWarning

F64 = torch.float64


def hidden_relu(z, slope=0.0):
    """A (leaky) ReLU that is not recorded, since it is written as arithmetic."""
    return torch.where(z > 0, z, slope * z)


def unit(margin, slope=0.0, d=12, sigma=0.5):
    """A single (leaky) ReLU unit whose kink lies `margin` τ away from 0, and is not recorded."""
    w = torch.randn(d, generator=torch.Generator().manual_seed(0), dtype=F64)
    w = w / w.norm()
    return lambda x: hidden_relu(x @ w - margin * sigma, slope)


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
        assert result.status == ("unknown",)
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
            (lambda x: x.prod(1) + x.pow(3).sum(1) / 3, []),
            (lambda x: x.tanh().sum(1), ["tanh"]),
            (lambda x: (1 / x).sum(1), ["reciprocal"]),
            (lambda x: x[:, 0] / x[:, 1], ["div"]),
            (lambda x: (x @ torch.ones(3, 2)).softmax(-1)[:, 0], ["_softmax"]),
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


class TestKinksBehindAQuadratic:
    """Rows that agree with a quadratic function prove nothing about kinks that none of them crossed."""

    D, SIGMA = 20, 0.5
    TRUTH = torch.exp(torch.tensor(-4.5, dtype=F64)) / (2 * torch.pi) ** 0.5 / SIGMA  # φ(3)/σ

    def model(self, margin=3.0, slope=1.0):
        return lambda x: x[:, 0] * x[:, 1] + hidden_relu(slope * (x[:, 2] - margin * self.SIGMA))

    @pytest.mark.parametrize(("slope", "calls"), [(10.0, 20), (1.0, 40), (1.0, 200)])
    @pytest.mark.parametrize(
        ("design", "control", "dtype"),
        [("orthogonal", "auto", F64), ("orthogonal", None, torch.float32), ("antithetic", None, F64)],
    )
    def test_are_never_missed_in_silence(self, slope, calls, design, control, dtype):
        """Over 30 seeds, intervals cover H₃₃ where neither they are unknown nor a warning is issued."""
        seeds, truth = 30, slope * self.TRUTH
        silent = held = 0
        for seed in range(seeds):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                result = SmoothHess(self.model(slope=slope)).attribute(
                    torch.zeros(1, self.D, dtype=dtype),
                    sigma=self.SIGMA,
                    n_calls=calls,
                    control=control,
                    design=design,
                    seed=seed,
                )
            low, high = (float(e[0, 2]) for e in result.diagonal().interval())
            assert result.relative_error.isnan().item() == (low != low)
            if not caught and low == low:
                silent, held = silent + 1, held + (low <= truth <= high)
        assert held >= 0.92 * silent

    def test_reach_every_number(self):
        x, parts = torch.zeros(1, self.D, dtype=F64), torch.arange(self.D) // 2
        with pytest.warns(UserWarning, match="quadratic function"):
            result = SmoothHess(self.model()).attribute(x, sigma=self.SIGMA, n_calls=2 * self.D)
        for one in (result, result.unshrunk(), result.groups(parts), result[0]):
            assert one.relative_error.isnan().all()
            assert one.diagonal().stderr.isnan().all()
            assert one.row(1).stderr.isnan().all()
            assert one.stderr().isnan().all()

    def test_end_an_adaptive_run(self):
        with pytest.warns(UserWarning, match="quadratic function"):
            result = SmoothHess(self.model(margin=4.6)).attribute(
                torch.zeros(1, self.D, dtype=F64), sigma=self.SIGMA, control=None
            )
        assert result.status == ("unknown",)
        assert not result.converged.any()

    def test_of_a_black_box_are_possible(self):
        def f(x):
            return x[:, 0] * x[:, 1]

        def opaque(x):
            return f(x), torch.cat([x[:, 1:2], x[:, :1], torch.zeros_like(x[:, 2:])], 1)

        x = torch.zeros(1, self.D, dtype=F64)
        assert SmoothHess(f).attribute(x, sigma=0.5, n_calls=2 * self.D).relative_error < 1e-12
        with pytest.warns(UserWarning, match="quadratic function"):
            unseen = SmoothHess(sh.from_gradient(opaque, numpy=False)).attribute(x, sigma=0.5, n_calls=2 * self.D)
        assert unseen.relative_error.isnan().all()

    def test_smooth_networks_have_none(self):
        """At a small σ a smooth network is quadratic up to rounding."""
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3), nn.Softmax(-1)).double()
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            result = SmoothHess(net).attribute(torch.ones(2, 6, dtype=F64), target=1, sigma=1e-4, n_calls=24)
        assert (result.relative_error < 1e-3).all()

    def test_that_never_flip_leave_it_exact(self):
        def model(x):
            return x[:, 0] * x[:, 1] + torch.relu(x[:, 2] - 40 * self.SIGMA)

        x = torch.zeros(1, self.D, dtype=F64)
        result = SmoothHess(model).attribute(x, sigma=self.SIGMA, n_calls=2 * self.D)
        assert result.relative_error < 1e-12

    def test_are_remembered(self, tmp_path):
        x = torch.zeros(2, self.D, dtype=F64)
        result = SmoothHess(lambda x: x[:, 0] * x[:, 1]).attribute(x, sigma=self.SIGMA, n_calls=2 * self.D)
        with pytest.warns(UserWarning, match="quadratic function"):
            other = SmoothHess(self.model()).attribute(x, sigma=self.SIGMA, n_calls=2 * self.D)
        both = type(result).cat([result, other])
        both.save(tmp_path / "r.safetensors")
        for kept in (both, type(result).load(tmp_path / "r.safetensors"), both[[0, 1, 2, 3]]):
            assert (kept.relative_error < 1e-12).tolist() == [True, True, False, False]

    @pytest.mark.parametrize("dtype", [torch.float32, F64])
    def test_saturated_outputs_are_unknown(self, dtype):
        """The gradient of a saturated sigmoid underflows; P(x₁ > 3σ) does not."""
        x = torch.zeros(1, self.D, dtype=dtype)
        with pytest.warns(FewEventsWarning):
            result = SmoothHess(lambda x: torch.sigmoid(1000 * (x[:, 0] - 3 * self.SIGMA))).attribute(
                x, sigma=self.SIGMA, n_calls=2 * self.D
            )
        assert result.relative_error.isnan().all() or dtype == F64


HALF = torch.arange(12) < 6


class TestCasesOfAnAttack:
    """Where a rule about kinks that no row shows once failed, in one direction or the other."""

    @staticmethod
    def explain(f, d=12, dtype=F64, at=0.0, **options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            options = {"sigma": 1.0, "n_calls": 2 * d, **options}
            result = SmoothHess(f).attribute(torch.full((1, d), at, dtype=dtype), **options)
        return result, [w for w in caught if issubclass(w.category, UserWarning)]

    @pytest.mark.parametrize("d", [1, 2, 3, 4])
    @pytest.mark.parametrize("calls", [None, 40])
    def test_few_dimensions(self, d, calls):
        result, caught = self.explain(lambda x: x[:, 0] * x[:, -1] + 100 * hidden_relu(x[:, 0] - 4.6), d, n_calls=calls)
        assert result.relative_error.isnan().all()
        assert caught

    @pytest.mark.parametrize("slope", [1e3, 1e4])
    def test_a_large_slope_in_float32(self, slope):
        def f(x):
            return slope * x[:, 3] + x[:, 0] * x[:, 1]

        exact, silent = self.explain(f, 20, torch.float32)
        assert exact.relative_error < 1e-2
        assert not silent
        result, caught = self.explain(lambda x: f(x) + hidden_relu(x[:, 2] - 4.6), 20, torch.float32)
        assert result.relative_error.isnan().all()
        assert caught

    @pytest.mark.parametrize(
        "kink",
        [
            lambda z: z.square().sqrt(),
            lambda z: (z**2) ** 0.5,
            lambda z: torch.stack([z, -z]).std(0),
            lambda z: z * torch.zeros(len(z), dtype=torch.long).copy_(z.detach() > 0).to(z),
            lambda z: torch.stack([r if r.tolist() > 0 else 0 * r for r in z]),
            lambda z: z * torch.as_tensor(z.detach().numpy() > 0).to(z),
        ],
    )
    def test_kinks_that_are_made_of_other_operations(self, kink):
        result, caught = self.explain(lambda x: x[:, 0] * x[:, 1] + kink(x[:, 2] - 6), 20)
        assert result.relative_error.isnan().all()
        assert caught

    @pytest.mark.parametrize(
        "f",
        [
            lambda x: nn.functional.mse_loss(x, torch.zeros_like(x), reduction="none").sum(1),
            lambda x: nn.functional.bilinear(x, x, torch.ones(1, 12, 12).to(x))[:, 0],
            lambda x: torch.where(HALF, x, 0).square().sum(1),
            lambda x: (x * 1.0).sigmoid_().sum(1),
            lambda x: nn.functional.cross_entropy(x.tanh(), torch.zeros(len(x), dtype=torch.long), reduction="none"),
            lambda x: nn.functional.softplus(x).sum(1),
        ],
    )
    @pytest.mark.parametrize("dtype", [torch.float32, F64])
    def test_smooth_functions_at_a_small_scale_are_certain(self, f, dtype):
        result, caught = self.explain(f, dtype=dtype, at=0.3, sigma=1e-2)
        assert (result.relative_error < 0.05).all()
        assert not caught

    def test_a_large_output_in_float32(self):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 1))
        result, caught = self.explain(lambda x: net(x) + 1e4, dtype=torch.float32, sigma=0.5, n_calls=120, control=None)
        assert result.relative_error.isfinite().all()
        assert not caught

    def test_an_odd_function(self):
        result, caught = self.explain(lambda x: torch.sin(x).sum(1))
        assert not result.hessian.any()
        assert result.relative_error.isnan().all()  # far away the function may not be odd
        assert caught

    def test_smooth_networks_do_not_cross_kinks(self):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1))
        x = torch.randn(1, 12, generator=torch.Generator().manual_seed(1))
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            for seed in range(12):
                SmoothHess(net).attribute(x, sigma=0.06, n_calls=24, seed=seed)

    def test_units_that_never_flip_behind_smooth_ones(self):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)).double()
        result, caught = self.explain(net, at=0.4, sigma=1e-5)
        assert (result.relative_error < 1e-3).all()
        assert not caught
