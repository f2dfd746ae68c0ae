"""Weights of the control variate: when it pays, and what it costs."""

import itertools
import warnings

import pytest
import torch
from torch import nn

from smoothhess import Interactions, Isotropic, SmoothHess
from smoothhess.curvature import control_variate
from smoothhess.curvature.control_variate import FLIPS_PER_PAIR, pilot_passes
from smoothhess.explainers.result_warnings import BiasWarning
from tests.truths import OneHidden


def mlp(d, *widths, seed=3):
    torch.manual_seed(seed)
    layers = []
    for a, b in itertools.pairwise([d, *widths]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1)).double()


@pytest.fixture(scope="module")
def x():
    return torch.randn(3, 20, generator=torch.Generator().manual_seed(0)).double()


def test_one_hidden_layer_is_taken_whole(x):
    result = SmoothHess(OneHidden(20)).attribute(x, sigma=0.4, n_calls=200)
    torch.testing.assert_close(result.control_weights, torch.ones(3, 2).double(), rtol=0, atol=1e-9)
    assert (result.relative_error < 1e-9).all()


def test_where_many_units_flip_the_passes_go_into_rows(x):
    net = mlp(20, 40, 40, 40, 40)
    near, between, far = (SmoothHess(net).attribute(x, sigma=sigma, n_calls=n) for sigma, n in SCALES)
    assert near.control == between.control == "kink"
    assert (near.control_weights[:, 1] > 0.5).all()
    assert (between.control_weights[:, 0] != 0).all()
    assert (between.control_weights[:, 1] == 0).all()
    pilot, closed = 2 + 1 + pilot_passes(20), 20 / 2
    check = 1 + 4  # that kinks depend on each other
    assert near.n_passes.tolist() == [200 + pilot + closed + 100 * FLIPS_PER_PAIR + check] * 3
    search = 2 * 9  # for tails, from 400 calls on
    assert between.n_passes.tolist() == [1000 + pilot + closed + check + search] * 3
    assert far.control is None
    assert "not worth 10 passes" in far.control_note
    assert far.n_passes.tolist() == [60 + pilot + check] * 3


SCALES = (0.01, 200), (3.0, 1000), (8.0, 60)  # standard deviations and calls


def test_examples_choose_for_themselves_and_do_not_see_each_other(x):
    """Near a kink and far from all of them, in one batch and alone."""
    net = mlp(20, 40, 40, 40, 40)
    inputs = torch.cat([x, 30 * x])
    batch = SmoothHess(net).attribute(inputs, sigma=1.5, n_calls=60)
    assert 0 < int(batch.control_weights.any(1).sum()) < 6  # for some the closed form is not worth its passes
    for i in range(6):
        one = SmoothHess(net).attribute(inputs[i : i + 1], sigma=1.5, n_calls=60)
        own = torch.zeros(2).double() if one.control is None else one.control_weights[0]
        torch.testing.assert_close(own, batch.control_weights[i], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(one.hessian[0], batch.hessian[i], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(one.relative_error[0], batch.relative_error[i], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(one.stderr()[0], batch.stderr()[i], rtol=1e-6, atol=1e-9)
        assert one.n_passes[0] == batch.n_passes[i]


def test_results_whose_pilots_disagree_go_together(x):
    """Side by side, merged with other draws, gone on with: as if each had been made with its own control."""
    net = mlp(20, 40, 40, 40, 40)
    inputs = torch.cat([x, 30 * x])
    batch = SmoothHess(net).attribute(inputs, sigma=1.5, n_calls=60)
    ones = [SmoothHess(net).attribute(inputs[i : i + 1], sigma=1.5, n_calls=60) for i in range(6)]
    assert {one.control for one in ones} == {None, "kink"}
    for order in (ones, ones[::-1]):
        whole = Interactions.cat(order)
        expected = batch if order is ones else batch[[5, 4, 3, 2, 1, 0]]
        torch.testing.assert_close(whole.hessian, expected.hessian, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(whole.control_weights, expected.control_weights, rtol=1e-6, atol=1e-9)
    for i, one in enumerate(ones):
        longer = SmoothHess(net).more(batch[i], 40)
        torch.testing.assert_close(longer.hessian, SmoothHess(net).more(one, 40).hessian, rtol=1e-6, atol=1e-9)
    options = {"sigma": 1.5, "n_calls": 60, "shrink": False}
    unlike = [SmoothHess(net).attribute(x[:1], seed=s, control=c, **options) for s, c in ((1, "kink"), (2, None))]
    merged = unlike[0].merge(unlike[1])
    torch.testing.assert_close(merged.hessian, (unlike[0].hessian + unlike[1].hessian) / 2)


def test_weights_come_from_draws_of_their_own(x):
    """The rows that are sampled are those of a run without control."""
    net = mlp(20, 30, 30)
    with_control, without = (
        SmoothHess(net).attribute(x, sigma=0.3, n_calls=60, control=control, shrink=False) for control in ("kink", None)
    )
    torch.testing.assert_close(with_control.statistics.head.score, without.statistics.head.score)
    torch.testing.assert_close(with_control.output, without.output)


def test_a_saturated_softmax_is_seen(x):
    """Of one probability all that is left of the gradient is rounding; the others' control does not suffer."""
    net = mlp(20, 30, 30, seed=1).float()
    net[-1] = nn.Linear(30, 4)
    steep = lambda x: (300 * net(x)).softmax(-1)
    inputs = torch.cat([x, 2 * x, 4 * x]).float()
    output = steep(inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # so steep that it is nearly a step, and flat elsewhere
        result = SmoothHess(steep).attribute(inputs, output.argmax(1), sigma=0.005, n_calls=200)
    assert bool((result.output > 1 - 1e-6).any())
    assert result.control == "kink", result.control_note


def test_a_model_that_cuts_its_batch_goes_without(x):
    net = mlp(20, 30, 30)
    cut = lambda x: torch.cat([net(part) for part in x.split(80)])
    with pytest.raises(ValueError, match="another path"):
        SmoothHess(cut).attribute(x, sigma=0.1, n_calls=120, control="kink")
    result = SmoothHess(cut).attribute(x, sigma=0.1, n_calls=120)
    assert result.control is None
    assert "another path" in result.control_note
    plain = SmoothHess(net).attribute(x, sigma=0.1, n_calls=120, control=None)
    torch.testing.assert_close(result.hessian, plain.hessian)


def test_price_above_the_budget(x):
    net = mlp(20, 30)
    assert SmoothHess(net).attribute(x, sigma=0.3, n_calls=20).control is None
    assert SmoothHess(net).attribute(x, sigma=0.3, n_calls=40).control == "kink"
    with pytest.warns(UserWarning, match="stopped at max_calls=80"):
        assert SmoothHess(net).attribute(x, sigma=0.3, max_calls=80).control is None  # 3/8 of it must do
    assert SmoothHess(net).attribute(x, sigma=0.3, max_calls=160).control == "kink"


def test_more_goes_on_with_the_same_weights(x):
    explainer, options = SmoothHess(mlp(20, 30, 30)), {"sigma": 0.3, "control": "kink"}
    whole = explainer.attribute(x, n_calls=120, **options)
    grown = explainer.more(explainer.attribute(x, n_calls=60, **options), 60)
    torch.testing.assert_close(grown.hessian, whole.hessian, rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(grown.relative_error, whole.relative_error, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("activation", [nn.GELU, nn.SiLU, nn.Tanh, nn.Softplus])
def test_smooth_activations_pay_as_well(activation):
    """Averaged second derivatives against frozen slopes, that is no control at all, at equal passes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 40), activation(), nn.Linear(40, 40), activation(), nn.Linear(40, 1)).double()
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).double()
    truth = SmoothHess(net).attribute(x, sigma=0.5, n_calls=16_000, seed=9, control="kink", shrink=False).hessian
    with_control = SmoothHess(net).attribute(x, sigma=0.5, n_calls=320, shrink=False)
    calls = 2 * round(float(with_control.n_passes.max()) / 2)
    without = SmoothHess(net).attribute(x, sigma=0.5, n_calls=calls, control=None, shrink=False)
    errors = [(r.hessian - truth).norm(dim=(1, 2)).mean() for r in (with_control, without)]
    assert errors[0] < 0.75 * errors[1]


def test_a_softmax_head_is_part_of_it():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 5), nn.Softmax(-1)).double()
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).double()
    with_control, without = (
        SmoothHess(net).attribute(x, 0, gaussian=Isotropic(0.05), n_calls=160, control=control, shrink=False)
        for control in ("kink", None)
    )
    assert (with_control.relative_error < 0.5 * without.relative_error).all()


class TestEstimatedTau:
    """Probes instead of all directions: cheaper, biased, and honest about it."""

    @pytest.fixture(scope="class")
    @classmethod
    def known(cls):
        net, x = mlp(40, 60, 60), 0.3 * torch.randn(1, 40, generator=torch.Generator().manual_seed(5)).double()
        options = {"n_calls": 80 * 1000, "seed": 50, "control": "kink", "shrink": False}
        return net, x, SmoothHess(net).attribute(x, sigma=0.2, **options).hessian[0]

    @pytest.mark.parametrize("probes", [16, 32])
    @pytest.mark.parametrize("shrink", [False, True])
    def test_the_error_of_a_single_result_lies_inside_its_error_bar(self, known, probes, shrink):
        net, x, truth = known
        options = {"sigma": 0.2, "n_calls": 4000, "control": "kink", "shrink": shrink}
        with pytest.warns(BiasWarning, match="estimated from tau_probes"):
            result = SmoothHess(net).attribute(x, tau_probes=probes, **options)
        exact = SmoothHess(net).attribute(x, **options)
        assert (result.unbiased, exact.unbiased) == (False, True)
        assert (result.tau_probes, exact.tau_probes) == (probes, None)
        error = float((result.hessian[0] - truth).norm() / truth.norm())
        assert error > 1.5 * float((exact.hessian[0] - truth).norm() / truth.norm())  # the bias is there,
        assert 0.5 * error < float(result.relative_error[0]) < 3 * error  # and it is said
        inside = []
        for i in range(40):
            low, high = result.row(i).interval()
            inside.append((low[0] <= truth[i]) & (truth[i] <= high[0]))
        assert float(torch.stack(inside).double().mean()) > 0.85
        v = torch.linspace(-1, 1, 40).double()
        form = result.bilinear(v, v)
        assert abs(float(form.value - v @ truth @ v)) < 4 * float(form.stderr)
        assert float(form.stderr) > float(exact.bilinear(v, v).stderr)
        torch.testing.assert_close(result.stderr()[0].diagonal(), result.diagonal().stderr[0])

    @pytest.mark.parametrize("probes", [8, 64])
    def test_intervals_contain_the_bias_of_other_probes(self, probes, monkeypatch):
        """One hidden layer, whose only error is the bias: diagonal entries, a row and a form along itself."""
        net, runs, covered = OneHidden(30, width=60), 12, []
        x = 0.3 * torch.randn(1, 30, generator=torch.Generator().manual_seed(5)).double()
        truth = net.truth(x, Isotropic(0.5)).hessian[0]
        v = torch.ones(1, 30, dtype=torch.float64)
        for seed in range(runs):
            rng = torch.Generator().manual_seed(seed)
            drawn = torch.randn(probes, 30, generator=rng, dtype=torch.float64)
            monkeypatch.setattr(control_variate, "tau_rows", lambda *_, drawn=drawn: drawn)
            with pytest.warns(BiasWarning, match="estimated from tau_probes"):
                result = SmoothHess(net).attribute(x, sigma=0.5, n_calls=120, control="kink", tau_probes=probes)
            for estimate, true in (
                (result.diagonal(), truth.diagonal()),
                (result.row(3), truth[3]),
                (result.bilinear(v, v), (truth @ v[0] @ v[0])[None]),
            ):
                low, high = estimate.interval()
                covered.append(((low <= true) & (true <= high)).double().mean(-1))
        diagonal, row, form = torch.stack([c.reshape(()) for c in covered]).reshape(runs, 3).mean(0).tolist()
        assert diagonal >= 0.92  # 0.87 with 64 probes if a direction with itself counted as any pair
        assert min(row, form) >= 0.85

    def test_the_jackknife_estimates_the_bias(self):
        """Of 1/τ from n probes: the deviation of the mean of four subsets over three is the bias of all, 3/4n."""
        rng = torch.Generator().manual_seed(0)
        n, squares = 64, torch.randn(200_000, 64, generator=rng, dtype=torch.float64).square()
        whole = squares.mean(1).rsqrt()
        parts = torch.stack([part.mean(1).rsqrt() for part in squares.chunk(4, 1)])
        bias = (parts.mean(0) - whole) / 3
        assert float(bias.mean()) == pytest.approx(float((whole - 1).mean()), rel=0.15)
        assert float(bias.mean()) == pytest.approx(3 / (4 * n), rel=0.15)

    def test_the_gradient_stays_unbiased(self):
        """Its closed form is not used where τ is estimated: the bias was 300 standard errors."""
        net, runs = OneHidden(20, width=40), 60
        x = 0.3 * torch.randn(1, 20, generator=torch.Generator().manual_seed(5)).double()
        truth = net.truth(x, Isotropic(0.5)).gradient
        result = SmoothHess(net).attribute(
            x.expand(runs, -1).contiguous(), sigma=0.5, n_calls=200, control="kink", tau_probes=8, seed=range(runs)
        )
        assert bool((result.control_weights[:, 1] > 0).all())
        estimate = result.gradient_estimate()
        low, high = estimate.interval()
        assert float(((low <= truth) & (truth <= high)).double().mean()) >= 0.92
        error = (result.gradient - truth).mean(0) / (result.gradient.std(0) / runs**0.5)
        assert error.abs().max() < 4
        assert (high - low).mean() < 1.5 * 2 * 1.96 * result.gradient.std(0).mean()

    def test_more_probes_less_bias(self, known):
        net, x, _ = known
        errors = [
            float(
                SmoothHess(net)
                .attribute(x, sigma=0.2, n_calls=4000, control="kink", shrink=False, tau_probes=n)
                .relative_error[0]
            )
            for n in (8, 128, 2048)
        ]
        assert errors[0] > errors[1] > errors[2]

    def test_without_flips_there_is_no_bias(self):
        x = torch.randn(2, 20, generator=torch.Generator().manual_seed(0)).double()
        result = SmoothHess(mlp(20, 40, 40, 40, 40)).attribute(x, sigma=3.0, n_calls=1000, tau_probes=16)
        assert (result.control_weights[:, 1] == 0).all()
        assert result.unbiased

    def test_files_groups_and_more(self, known, tmp_path):
        net, x, _ = known
        options = {"sigma": 0.2, "control": "kink", "tau_probes": 16}
        result = SmoothHess(net).attribute(x, n_calls=160, **options)
        grown = SmoothHess(net).more(SmoothHess(net).attribute(x, n_calls=80, **options), 80)
        torch.testing.assert_close(grown.hessian, result.hessian, rtol=1e-8, atol=1e-11)
        torch.testing.assert_close(grown.stderr(), result.stderr(), rtol=1e-6, atol=1e-9)
        result.save(tmp_path / "r")
        again = type(result).load(tmp_path / "r")
        assert (again.unbiased, again.tau_probes) == (False, 16)
        torch.testing.assert_close(again.relative_error, result.relative_error)
        assert (result.groups(torch.arange(40) // 10).stderr() > 0).all()
        with pytest.raises(ValueError, match="tau_probes must be at least 8"):
            SmoothHess(net).attribute(x, n_calls=80, sigma=0.2, tau_probes=1)


def test_calls_are_not_extrapolated_below_the_run_that_had_the_control():
    """A smaller budget may not buy the closed form: what the run's error says does not hold there."""
    x = 0.3 * torch.randn(2, 12, generator=torch.Generator().manual_seed(5)).double()
    net = OneHidden(12)
    with_control = SmoothHess(net).attribute(x, sigma=0.5, n_calls=480)
    assert with_control.control == "kink"
    assert (with_control.calls_for(0.9) == 480).all()
    without = SmoothHess(net).attribute(x, sigma=0.5, n_calls=480, control=None)
    assert (without.calls_for(0.9) < 480).all()
    beside = Interactions.cat([with_control, without])
    assert ((beside.calls_for(0.9) == 480) == torch.tensor([True, True, False, False])).all()


@pytest.mark.parametrize("first", [0, 1])
def test_merging_keeps_the_control_variate_and_its_bias(first):
    """A result without control variate, and one whose τ is estimated: in either order the bias is in the error."""
    net = mlp(12, 20, 20)
    x = torch.randn(2, 12, generator=torch.Generator().manual_seed(0)).double()
    parts = [
        SmoothHess(net).attribute(x, sigma=0.4, n_calls=48, control=None, seed=1),
        SmoothHess(net).attribute(x, sigma=0.4, n_calls=48, control="kink", tau_probes=8, seed=2),
    ]
    both = parts[first].merge(parts[1 - first])
    assert (both.control, both.tau_probes, both.unbiased) == ("kink", 8, False)
    whole, half = parts[1].statistics, both.statistics
    torch.testing.assert_close(half.drift, whole.drift / 2)
    torch.testing.assert_close(half.drift_norm2, whole.drift_norm2 / 4)


def test_merging_results_of_one_control_variate_keeps_its_bias():
    net = mlp(12, 20, 20)
    x = torch.randn(2, 12, generator=torch.Generator().manual_seed(0)).double()
    options = {"sigma": 0.4, "n_calls": 48, "control": "kink", "tau_probes": 8}
    a, b = (SmoothHess(net).attribute(x, seed=seed, **options) for seed in (1, 2))
    merged = a.merge(b).statistics  # the weights of the control variate come from the pilot draws of each seed
    torch.testing.assert_close(merged.drift, (a.statistics.drift + b.statistics.drift) / 2)
    norms = [r.statistics.drift_norm2.sqrt() for r in (a, b)]
    torch.testing.assert_close(merged.drift_norm2.sqrt(), (norms[0] + norms[1]) / 2)
