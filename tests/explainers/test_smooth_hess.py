"""The run itself: what the model sees, what the stream promises, how it stops, what is refused."""

import warnings

import pytest
import torch
from torch import nn

from smoothhess import Diagonal, Isotropic, NeuronSmoothHess, from_gradient, smooth_hvp
from smoothhess.draws.designs import DESIGNS, find_design
from smoothhess.estimate import statistics
from smoothhess.estimate.stein_check import z_scores
from tests.truths import OneHidden, Plain, additive, covariance, gaussians

pytestmark = pytest.mark.rounding


def batch(b=3, d=5, seed=0):
    return torch.randn(b, d, generator=torch.Generator().manual_seed(seed)).double()


class Recorder(nn.Module):
    """Keeps every row that it was called with."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.rows = inner, []

    def forward(self, x):
        self.rows.append(x.detach().clone())
        return self.inner(x)


@pytest.mark.parametrize("design", ["iid", "antithetic"])
@pytest.mark.parametrize("kind", sorted(gaussians(4)))
def test_equation_8_by_hand(kind, design):
    """The same draws, the formula of the paper, nothing else."""
    d, n = 4, 60
    gaussian, net, x = gaussians(d)[kind], OneHidden(d), batch(2, d)
    plan = find_design(design)
    z = plan.rows(11, 0, n // plan.calls_per_row, gaussian.rank(d)).z
    z = torch.cat([z, -z]) if plan.mirrored else z
    delta = gaussian.colour(z)
    precision = torch.linalg.pinv(covariance(gaussian, d), hermitian=True)
    result = Plain(net).attribute(x, gaussian=gaussian, n_calls=n, design=design, seed=11, shrink=False)
    for b in range(len(x)):
        points = (x[b] + delta).requires_grad_()
        value = net(points)
        (g,) = torch.autograd.grad(value.sum(), points)
        project = precision @ covariance(gaussian, d)
        hessian = precision @ delta.mT @ (g @ project) / n
        torch.testing.assert_close(result.hessian[b], (hessian + hessian.mT) / 2, rtol=0, atol=1e-12)
        torch.testing.assert_close(result.gradient[b], (g @ project).mean(0), rtol=0, atol=1e-12)
        torch.testing.assert_close(result.value[b], value.mean().detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("design", sorted(DESIGNS))
@pytest.mark.parametrize("internal_batch_size", [None, 7])
def test_the_model_sees_exactly_n_calls_perturbed_rows(design, internal_batch_size):
    x, n = batch(1), 4000
    model = Recorder(lambda points: torch.where(points > x, points, 2 * points - x).sum(1))  # a kink at x, not recorded
    batches = {"internal_batch_size": internal_batch_size}
    result = Plain(model).attribute(x, sigma=0.3, n_calls=n, design=design, tails=None, **batches)
    delta = torch.cat(model.rows) - x
    moved = delta[(delta != 0).any(1)]
    assert len(moved) == n
    assert len(delta) == n + 3  # the input itself: separately, in a batch with others, and to record its activations
    expected = 0.09 * torch.eye(5) * (7 / 5 if design == "orthogonal" else 1)
    assert (moved.mT @ moved / n - expected).abs().max() < 6 * 0.09 * (2 / n) ** 0.5 * 2
    assert (result.n_calls.tolist(), result.n_passes.tolist()) == ([n], [n + 3])


@pytest.mark.filterwarnings("ignore:no gradient")  # far from all kinks
def test_every_example_gets_its_calls():
    model, n = Recorder(lambda x: torch.where(x.sin() > 0, x.sin(), 0.0).sum(1)), 60
    x = 100 * torch.arange(3).double()[:, None] + batch()
    Plain(model).attribute(x, sigma=0.3, n_calls=n)
    rows = torch.cat(model.rows)
    away = [(rows - x[b]).abs().amax(1) for b in range(3)]
    assert [int(((d > 0) & (d < 50)).sum()) for d in away] == [n] * 3  # and some at the inputs themselves


def same(a, b, **tolerance):
    for name in ("hessian", "gradient", "value", "relative_error", "r2", "n_calls", "gradient_stderr"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), equal_nan=True, **tolerance)
    torch.testing.assert_close(a.stderr(), b.stderr(), **tolerance)


EXACT = {"rtol": 1e-9, "atol": 1e-12}


@pytest.mark.parametrize("design", sorted(DESIGNS))
@pytest.mark.parametrize(("first", "second"), [(20, 60), (30, 2600), (2400, 600)])
def test_more_equals_one_run(first, second, design):
    """Also across the border where the factored form becomes dense."""
    explainer, x = Plain(OneHidden(5)), batch()
    options = {"sigma": 0.3, "design": design, "tails": None}  # of tail strata, further calls have other draws
    whole = explainer.attribute(x, n_calls=first + second, **options)
    parts = explainer.more(explainer.attribute(x, n_calls=first, **options), second)
    same(whole, parts, **EXACT)


@pytest.mark.parametrize("design", sorted(DESIGNS))
def test_merge_equals_one_pass_over_both_streams(design):
    explainer, x = Plain(OneHidden(5)), batch()
    a, b = (explainer.attribute(x, sigma=0.3, n_calls=400, design=design, seed=s) for s in (0, 1))
    both = a.merge(b)
    torch.testing.assert_close(both.hessian, (a.hessian + b.hessian) / 2, **EXACT)
    torch.testing.assert_close(both.gradient, (a.gradient + b.gradient) / 2, **EXACT)
    assert both.n_calls.tolist() == [800] * 3
    assert (both.relative_error < a.relative_error).all()
    with pytest.raises(ValueError, match=r"share draws \(seed 0, rows 0 to"):
        a.merge(a)
    with pytest.raises(ValueError, match="share draws"):
        both.merge(b)
    grown = explainer.more(both, 100)
    assert grown.n_calls.tolist() == [900] * 3
    with pytest.raises(ValueError, match="differ in inputs"):
        a.merge(explainer.attribute(x + 1, sigma=0.3, n_calls=400, design=design, seed=1))


@pytest.mark.parametrize("design", sorted(DESIGNS))
def test_an_adaptive_run_equals_a_run_of_that_many_calls(design):
    explainer, x = Plain(OneHidden(5)), batch(6)
    adaptive = explainer.attribute(x, sigma=0.3, tol=0.2, design=design)
    assert adaptive.converged.all()
    assert (adaptive.relative_error <= 0.2).all()
    for i, one in enumerate(adaptive):
        fixed = explainer.attribute(x[i : i + 1], sigma=0.3, n_calls=int(one.n_calls), design=design)
        same(one, fixed, **EXACT)
    grown = explainer.more(adaptive, 64)
    assert torch.equal(grown.n_calls, adaptive.n_calls + 64)


@pytest.mark.parametrize("design", sorted(DESIGNS))
def test_a_batch_equals_single_runs(design):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8)).double()
    x, target = batch(8), list(range(8))
    together = Plain(net).attribute(x, target, sigma=0.3, n_calls=100, design=design)
    for i in range(8):
        same(together[i], Plain(net).attribute(x[i : i + 1], i, sigma=0.3, n_calls=100, design=design), **EXACT)


@pytest.mark.parametrize("rows", [1, 7, 64, 100_000])
def test_any_internal_batch_size(rows):
    explainer, x = Plain(OneHidden(5)), batch()
    a, b = (explainer.attribute(x, sigma=0.3, n_calls=60, internal_batch_size=r) for r in (None, rows))
    same(a, b, **EXACT)


class TestEquivariance:
    def test_scaling_f(self):
        net, x = OneHidden(5), batch()
        a = Plain(net).attribute(x, sigma=0.3, n_calls=200)
        b = Plain(lambda x: -3 * net(x)).attribute(x, sigma=0.3, n_calls=200)
        torch.testing.assert_close(b.hessian, -3 * a.hessian, **EXACT)
        torch.testing.assert_close(b.stderr(), 3 * a.stderr(), **EXACT)
        torch.testing.assert_close(b.r2, a.r2, **EXACT)

    def test_permuting_features(self):
        """In distribution; and exactly, when the noise is permuted too."""
        net, x, order = OneHidden(5), batch(1), torch.tensor([3, 0, 4, 1, 2])
        scales = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]).double()
        a = Plain(net).attribute(x, sigma=scales, n_calls=4_000)
        inverse = order.argsort()
        b = Plain(lambda y: net(y[:, inverse])).attribute(x[:, order], sigma=scales[order], n_calls=4_000, seed=1)
        z = (b.hessian - a.hessian[:, order][:, :, order]) / (
            b.stderr() ** 2 + a.stderr()[:, order][:, :, order] ** 2
        ).sqrt()
        assert z.abs().max() < 5

    def test_linear_change_of_variables(self):
        """f(Ax) with Σ' = A⁻¹ΣA⁻ᵀ has H' = AᵀHA, exactly where A keeps the Cholesky order."""
        net, x = OneHidden(4), batch(1, 4)
        a = torch.tensor([[2.0, 0, 0, 0], [0.3, 1, 0, 0], [-0.5, 0.2, 0.7, 0], [0.1, 0.1, 0.4, 1.5]]).double()
        gaussian = gaussians(4)["dense"]
        sigma = covariance(gaussian, 4)
        inverse = torch.linalg.inv(a)
        moved = type(gaussian)(inverse @ sigma @ inverse.mT)
        plain = Plain(net).attribute(x, gaussian=gaussian, n_calls=300)
        changed = Plain(lambda y: net(y @ a.mT)).attribute(x @ inverse.mT, gaussian=moved, n_calls=300)
        torch.testing.assert_close(changed.hessian[0], a.mT @ plain.hessian[0] @ a, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(changed.gradient[0], plain.gradient[0] @ a, rtol=1e-8, atol=1e-10)


def test_float32_sees_the_same_draws():
    net, x = OneHidden(5), batch()
    a = Plain(net).attribute(x, sigma=0.3, n_calls=2000)
    b = Plain(OneHidden(5).float()).attribute(x.float(), sigma=0.3, n_calls=2000)
    assert b.hessian.dtype == torch.float32
    torch.testing.assert_close(b.hessian.double(), a.hessian, rtol=1e-3, atol=1e-4)


def test_inputs_of_any_shape():
    net = OneHidden(12)
    x = batch(2, 12)
    flat = Plain(net).attribute(x, sigma=0.3, n_calls=100)
    shaped = Plain(net).attribute(x.reshape(2, 3, 1, 4), sigma=0.3, n_calls=100)
    assert shaped.gradient.shape == (2, 3, 1, 4)
    torch.testing.assert_close(shaped.hessian, flat.hessian, **EXACT)
    assert shaped.feature_shape == (3, 1, 4)


def test_grouped_streaming_equals_groups(monkeypatch):
    monkeypatch.setattr(statistics, "HEAD_LEAST", 64)  # rows that are kept: fewer than the 150 below
    explainer, x = Plain(OneHidden(12)), batch(2, 12).reshape(2, 3, 4)
    own = torch.stack([torch.arange(12).reshape(3, 4) % 5, torch.arange(12).reshape(3, 4) // 3])
    for gaussian in gaussians(12).values():
        whole = {n: explainer.attribute(x, gaussian=gaussian, n_calls=n) for n in (100, 300)}
        for mask in (own[0], own):
            for n, result in whole.items():
                streamed = explainer.attribute(x, gaussian=gaussian, n_calls=n, feature_mask=mask)
                summed = result.groups(mask)
                torch.testing.assert_close(streamed.hessian, summed.hessian, rtol=1e-7, atol=1e-10)
                torch.testing.assert_close(streamed.gradient, summed.gradient, rtol=1e-7, atol=1e-10)
                torch.testing.assert_close(streamed.stderr(), summed.stderr(), rtol=1e-6, atol=1e-9)
                torch.testing.assert_close(streamed.relative_error, summed.relative_error, rtol=1e-5, atol=1e-9)
    more = explainer.more(explainer.attribute(x, sigma=0.1, n_calls=100, feature_mask=own), 50)
    torch.testing.assert_close(
        more.hessian, explainer.attribute(x, sigma=0.1, n_calls=150, feature_mask=own).hessian, **EXACT
    )


def test_r2_is_the_score_on_gradients_never_seen():
    net, x, seeds = OneHidden(6), batch(2, 6), 50
    for gaussian in (Isotropic(0.4), Diagonal([0.1, 0.0, 0.3, 0.4, 0.2, 0.3]), gaussians(6)["dense"]):
        for n in (40, 400):
            for design in ("iid", "antithetic", "orthogonal"):
                result = Plain(net).attribute(
                    x.repeat_interleave(seeds, 0), gaussian=gaussian, n_calls=n, design=design, seed=range(2 * seeds)
                )
                fresh = gaussian.colour(
                    torch.randn(2_000, gaussian.rank(6), generator=torch.Generator().manual_seed(1)).double()
                )
                for b in range(2):
                    points = (x[b] + fresh).requires_grad_()
                    (g,) = torch.autograd.grad(net(points).sum(), points)
                    g = gaussian.push(gaussian.pull(g))
                    part = result[slice(seeds * b, seeds * (b + 1))]
                    left = g - part.gradient[:, None] - fresh @ part.hessian
                    total = (g - g.mean(0)).square().sum(1).mean()
                    honest = 1 - left.square().sum(-1).mean(-1) / total
                    error = (part.r2 - honest).mean().abs()
                    spread = (part.r2 - honest).std() / seeds**0.5
                    assert error < 4 * spread + 0.03


class TestSteinCheck:
    """Do the gradients belong to the values?"""

    @pytest.mark.parametrize("design", sorted(DESIGNS))
    @pytest.mark.parametrize("d", [1, 2, 12, 64])
    def test_honest_functions_pass(self, d, design):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            x = batch(200, d)
            warnings.filterwarnings("ignore", "at most|no gradient|a few draws")  # few kinks within σ
            n = 64 if d <= 2 else 256
            result = Plain(OneHidden(d)).attribute(x, sigma=0.5, n_calls=n, design=design, seed=range(200))
        assert result.stein_z.abs().max() < 5
        assert result.stein_z[:, 1].std() < 1.2

    @pytest.mark.parametrize("design", sorted(DESIGNS))
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("d", [1, 2, 5])
    def test_rounding_is_no_evidence(self, d, dtype, design):
        """Quadratics: in mirrored designs nothing but rounding is left of the first identity, in every row alike."""

        def product(x):
            return x[:, 0] * x[:, -1]

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = Plain(product).attribute(batch(1, d).to(dtype), sigma=1.0, n_calls=8000, design=design)
        assert result.stein_z.abs().max() < 5

    def test_merging_and_going_on_give_the_scores_of_one_run(self):
        x = batch(2, 6)
        explainer = Plain(OneHidden(6))
        whole = explainer.attribute(x, sigma=0.5, n_calls=480)
        longer = explainer.more(explainer.attribute(x, sigma=0.5, n_calls=240), 240)
        torch.testing.assert_close(longer.stein_z, whole.stein_z)
        one, other = (explainer.attribute(x, sigma=0.5, n_calls=240, seed=s) for s in (0, 1))
        sums = one.statistics.stein + other.statistics.stein
        torch.testing.assert_close(one.merge(other).stein_z, z_scores(sums, torch.tensor([240, 240])))

    def test_a_discontinuous_function_is_flagged(self):
        def nested(x):
            r, a, b = x.norm(dim=1), x[:, 0], x[:, 1]
            return torch.where(r < 0.6, a * a / 2 + a * b, torch.where(r < 1.2, a * b, -5 * a * b))

        with pytest.warns(UserWarning, match="probably discontinuous"):
            Plain(nested).attribute(torch.zeros(1, 2).double(), sigma=0.25, n_calls=16_000)

    @pytest.mark.parametrize(
        "f",
        [
            lambda x: (x.sin() + (x.sin().sign() - x.sin()).detach()).sum(1),  # straight-through
            lambda x: (x.detach() * x).sum(1),  # half of the product rule
            from_gradient(lambda x: ((x**2).sum(1), 3 * x)),  # a wrong gradient function
        ],
    )
    def test_wrong_gradients_are_flagged(self, f):
        with pytest.warns(UserWarning, match="are not the derivatives of the values"):
            Plain(f).attribute(0.3 * torch.ones(1, 5).double(), sigma=0.5, n_calls=1000)


class TestStopping:
    def test_zero_is_recognised(self):
        """f = sin has no curvature at 0 but plenty of noise."""
        with pytest.warns(UserWarning, match="H cannot be distinguished from zero"):
            result = Plain(lambda x: x.abs().sum(1) * 0 + (3 * x).sin().sum(1)).attribute(
                torch.zeros(1, 3).double(), sigma=1.0, design="iid", tol=0.05
            )
        assert result.status == ("zero",)
        assert result.converged.all()
        assert int(result.n_calls) <= 20_000

    def test_no_kink_met_is_not_called_a_tolerance_reached(self):
        w = torch.zeros(20).double()
        w[0] = 1
        x = torch.zeros(1, 20).double()
        with pytest.warns(UserWarning, match="the interactions that these cause are unknown"):
            result = Plain(lambda x: torch.where(x @ w > 1, x @ w, 1.0)).attribute(x, sigma=0.1)
        assert result.status == ("unknown",)
        with pytest.warns(UserWarning, match="cannot be distinguished from zero"):
            result = Plain(lambda x: torch.relu(x @ w - 1)).attribute(x, sigma=0.1)
        assert result.status == ("zero",)
        assert 0 < float(result.stderr().max()) < 1e-9  # of a unit that is 10 standard deviations from its kink

    def test_a_signal_is_not_called_zero(self):
        result = Plain(OneHidden(12)).attribute(batch(20, 12), sigma=0.5, tol=0.3)
        assert set(result.status) == {"tolerance"}

    def test_the_budget_ends_it_with_a_warning(self):
        with pytest.warns(
            UserWarning, match=r"stopped at max_calls=64 before relative_error ≤ 0.001: reached .* calls are needed"
        ):
            result = Plain(OneHidden(5)).attribute(batch(1), sigma=0.3, tol=1e-3, max_calls=64)
        assert result.converged.tolist() == [False]
        assert int(result.n_calls) == 64

    def test_each_example_stops_on_its_own(self):
        net = OneHidden(5)
        x = torch.cat([batch(3), 50 + batch(1)])  # the last one sees hardly a kink
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = Plain(net).attribute(x, sigma=0.3, tol=0.2)
        assert len(set(result.n_calls.tolist())) > 1
        assert result[3].hessian.shape == (1, 5, 5)


def test_smooth_hvp():
    net, x = OneHidden(5), batch(2)
    v = torch.linspace(-1, 1, 5).double()
    expected = Plain(net).attribute(x, sigma=0.3, n_calls=100).hessian @ v
    torch.testing.assert_close(smooth_hvp(net, x, v, sigma=0.3, n_calls=100, control=None, shrink=False), expected)
    leaf = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(net(leaf).sum(), leaf, create_graph=True)
    own = torch.autograd.grad(g @ v, leaf, torch.ones(2).double(), allow_unused=True)[0] if g.requires_grad else None
    assert own is None or (own == 0).all()  # the model's own answer says nothing


def test_neuron_more():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    neuron, x = NeuronSmoothHess(net, "3"), batch()
    options = {"attribute_to_neuron_input": True}
    for control in (None, "kink"):
        more = options | {"control": control}
        first = neuron.attribute(x, 4, sigma=0.3, n_calls=40, **more)
        torch.testing.assert_close(first.output, net[:3](x)[:, 4].detach())
        same(neuron.more(first, 60, 4, **options), neuron.attribute(x, 4, sigma=0.3, n_calls=100, **more), **EXACT)


@pytest.mark.parametrize(
    ("design", "half", "n_calls", "least"),
    [
        ("iid", 4, 4000, 5),
        ("antithetic", 4, 400, 5),
        ("orthogonal", 4, 400, 5),
        ("orthogonal", 16, 64, 1),  # inside one block
        ("orthogonal", 16, 32, 0),  # half of one
        ("sobol", 4, 1024, 5),
    ],
)
def test_false_discoveries_stay_below_q(design, half, n_calls, least):
    """Additive network: every cross pair is null. Mean share of false discoveries over 200 seeds."""
    net, seeds = additive(half, half), 200
    x = 0.2 * torch.ones(seeds, 2 * half).double()
    result = Plain(net).attribute(x, sigma=0.5, n_calls=n_calls, seed=range(seeds), design=design)
    all_pairs = result.top_pairs(half * (2 * half - 1))
    for q in (0.05, 0.2):
        rates, found = [], 0
        for pairs in all_pairs:
            declared = [p for p in pairs if p.q_value <= q]
            false = [p for p in declared if p.i < half <= p.j]
            rates.append(len(false) / max(len(declared), 1))
            found += len(declared) - len(false)
        assert sum(rates) / seeds <= q
        assert found >= least * seeds  # and it does find true ones


# --- refused ----------------------------------------------------------------------------------------------------------


def linear(x):
    return x.sum(1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "pass exactly one of sigma"),
        ({"sigma": 1.0, "radius": 1.0}, "got sigma and radius"),
        ({"sigma": -1.0}, "sigma must be positive"),
        (
            {"sigma": 1.0, "n_calls": 1001},
            r"n_calls must be even: each direction is used twice \(±\), got 1001. Pass 1000",
        ),
        ({"sigma": 1.0, "n_calls": 0}, "n_calls must be at least 2, got 0"),
        ({"sigma": 1.0, "max_calls": 7}, "max_calls must be even"),
        ({"sigma": 1.0, "tol": 0.0}, "tol must lie between 0 and 1"),
        ({"sigma": 1.0, "design": "latin"}, "design must be one of"),
        ({"sigma": 1.0, "control": "magic"}, 'control must be "auto", "kink" or None'),
        ({"sigma": 1.0, "internal_batch_size": 0}, "whole number of rows, at least 1, got 0"),
        ({"sigma": 1.0, "seed": [1, 2]}, "seed must be one integer, or one per example: 3, got 2"),
        ({"sigma": 1.0, "seed": -1}, "seeds must not be negative, got -1"),
        ({"sigma": 1.0, "internal_batch_size": 2.5}, "whole number of rows"),
        ({"sigma": 1e-20}, "sigma is too small for torch.float64: 100% of the noise is lost to rounding"),
        (
            {"sigma": 1.0, "feature_mask": torch.zeros(4, dtype=torch.long)},
            r"feature_mask must have the shape of one input, \(5,\)",
        ),
        ({"sigma": 1.0, "feature_mask": torch.tensor([0, 1, -1, 0, 1])}, "group ids must be 0, 1, 2, …, got -1"),
    ],
)
def test_bad_options(options, text):
    with pytest.raises(ValueError, match=text):
        Plain(linear).attribute(batch(), **options)


@pytest.mark.parametrize(
    ("inputs", "error", "text"),
    [
        (torch.ones(2, 3, dtype=torch.long), TypeError, "must be float32 or float64, got torch.int64"),
        (torch.ones(2, 3).half(), TypeError, "must be float32 or float64"),
        (torch.ones(0, 3), ValueError, "at least one example"),
        (torch.ones(3), ValueError, r"For a single example use x\[None\]"),
        (torch.tensor([[1.0, torch.nan]]), ValueError, "inputs contain NaN"),
        ([[1.0]], TypeError, "must be one tensor, array or DataFrame with examples in dimension 0, got list"),
    ],
)
def test_bad_inputs(inputs, error, text):
    with pytest.raises(error, match=text):
        Plain(linear).attribute(inputs, sigma=1.0)


def test_inference_mode():
    with torch.inference_mode():
        x = torch.ones(1, 3)
        with pytest.raises(ValueError, match=r"inputs were made in torch.inference_mode|inside torch.inference_mode"):
            Plain(linear).attribute(x, sigma=1.0)
    with pytest.raises(ValueError, match="were made in torch.inference_mode"):
        Plain(linear).attribute(x, sigma=1.0)


def test_a_single_lost_feature_is_noticed():
    x = torch.ones(1, 200)
    x[0, 0] = 1e8
    with pytest.raises(ValueError, match="is lost to rounding when it is added to an input feature"):
        Plain(linear).attribute(x, sigma=0.1, n_calls=10)


def test_seeds_of_other_types():
    import numpy as np

    a, b, c = (
        Plain(OneHidden(5)).attribute(batch(), sigma=0.3, n_calls=20, seed=s).hessian
        for s in ([0, 1, 2], np.arange(3), torch.arange(3))
    )
    assert torch.equal(a, b)
    assert torch.equal(a, c)


def test_more_says_when_gradients_do_not_belong():
    f = lambda x: (x.detach() * x).sum(1)
    first = Plain(f).attribute(0.3 * torch.ones(1, 5).double(), sigma=0.5, n_calls=20)
    with pytest.warns(UserWarning, match="are not the derivatives of the values"):
        Plain(f).more(first, 1000)


def test_photos_stop_at_what_can_be_kept(monkeypatch):
    monkeypatch.setattr("smoothhess.estimate.statistics.DENSE_LIMIT", 3)
    monkeypatch.setattr("smoothhess.estimate.statistics.HEAD_LEAST", 64)
    monkeypatch.setattr("smoothhess.estimate.antisymmetric_variance.DENSE_SKEW", 3)
    with pytest.warns(UserWarning, match="stopped at max_calls=128"):
        Plain(OneHidden(5)).attribute(batch(1), sigma=0.3, tol=1e-4)


def test_not_a_model():
    with pytest.raises(TypeError, match="forward_func must be a model"):
        Plain(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="n_calls must be an integer, got float"):
        Plain(linear).attribute(batch(), sigma=1.0, n_calls=1e4)  # type: ignore[arg-type]


def test_a_model_that_changes_between_calls():
    calls = iter(range(1000))
    with pytest.raises(ValueError, match="is random or mixes the rows"):
        Plain(lambda x: x.sum(1) + next(calls)).attribute(batch(), sigma=1.0, n_calls=10)


def test_a_model_that_mixes_its_batch():
    with pytest.raises(ValueError, match="is random or mixes the rows"):
        Plain(lambda x: (x - x.mean(0)).square().sum(1)).attribute(batch(1), sigma=1.0, n_calls=10)


def test_more_with_another_model():
    first = Plain(OneHidden(5)).attribute(batch(), sigma=0.3, n_calls=10)
    with pytest.raises(ValueError, match="Pass the same model, layer and additional_forward_args"):
        Plain(OneHidden(5, seed=9)).more(first, 10)


def test_too_many_rows_of_too_many_features(monkeypatch):
    monkeypatch.setattr("smoothhess.estimate.statistics.DENSE_LIMIT", 3)
    monkeypatch.setattr("smoothhess.estimate.hessian_estimate.DENSE_LIMIT", 3)
    explainer = Plain(OneHidden(5))
    small = explainer.attribute(batch(), sigma=0.3, n_calls=10)
    with pytest.raises(ValueError, match=r"Use result @ v, groups\(mask\)"):
        _ = small.hessian
    for ask in (small.stderr, small.top_pairs):
        with pytest.raises(ValueError, match=r"too many for a dense matrix"):
            ask()
    assert (small @ torch.ones(5)).shape == (3, 5)
    with pytest.raises(ValueError, match="Request fewer calls, or pass feature_mask"):
        explainer.attribute(batch(), sigma=0.3, n_calls=4000)
    streamed = explainer.attribute(batch(), sigma=0.3, n_calls=4000, feature_mask=torch.tensor([0, 0, 1, 1, 1]))
    assert streamed.hessian.shape == (3, 2, 2)


def test_a_result_does_not_share_memory_with_the_inputs():
    x = torch.zeros(100, 5).double()
    result = Plain(OneHidden(5)).attribute(x[:2], sigma=0.3, n_calls=20)
    before = result.taylor()(torch.ones(2, 1, 5).double())
    x.fill_(7)
    assert not result.inputs.any()
    torch.testing.assert_close(result.taylor()(torch.ones(2, 1, 5).double()), before)
    assert result.inputs.untyped_storage().nbytes() == 2 * 5 * 8
