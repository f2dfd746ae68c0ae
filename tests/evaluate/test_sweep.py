"""Several scales from one set of random numbers: closed forms, and errors of changes that are paired."""

import math

import pytest
import torch
from torch import nn

from smoothhess import Dense, Diagonal, Isotropic, NeuronSmoothHess, SmoothHess
from smoothhess.estimate import student_t
from smoothhess.evaluate.sweep import Change, sweep
from tests.truths import OneHidden, Plain, quadratic

pytestmark = pytest.mark.rounding

X = torch.linspace(-1, 1, 10).double().sin().reshape(2, 5)
SIGMAS = [0.3, 0.6, 0.9]


def deep(d=5, seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(d, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 1)).double()


@pytest.mark.filterwarnings("ignore:sigma is 1")  # times as large as the inputs, on purpose
def test_a_quadratic_is_the_same_at_every_scale():
    a, b = quadratic(5)
    scales = sweep(lambda x: x @ b + (x @ a * x).sum(1) / 2, X, [0.01, 1.0, 100.0], n_calls=20)
    for result in scales:
        torch.testing.assert_close(result.hessian, a.expand(2, -1, -1), rtol=1e-9, atol=1e-9)
    assert scales.difference(0, 2).hessian.abs().max() < 1e-9
    curve = scales.entry(1, 3)
    assert curve.value.shape == curve.stderr.shape == (3, 2)
    torch.testing.assert_close(curve.value, a[1, 3].expand(3, 2), rtol=1e-9, atol=1e-9)


def test_scales_see_the_same_directions():
    """The gradient of |x₀| at 0 is sign(z₀) at every σ, so σĤ is one number, sampling error included."""
    f = lambda x: x[:, 0].abs() + 0 * x.sum(1)
    for design in ("iid", "antithetic", "orthogonal", "sobol"):
        n = 60 if design != "sobol" else 64
        scales = sweep(Plain(f), torch.zeros(1, 3).double(), SIGMAS, n_calls=n, design=design, seed=5)
        scaled = scales.entry(0, 0).value[:, 0] * scales.sigmas
        torch.testing.assert_close(scaled, scaled[:1].expand(3), rtol=1e-12, atol=0)
        assert abs(float(scaled[0]) - math.sqrt(2 / math.pi)) > 1e-6  # an estimate, the same one thrice
        assert abs(float(scaled[0]) - math.sqrt(2 / math.pi)) < 0.5
        assert all(torch.equal(r.statistics.head.score, scales[0].statistics.head.score) for r in scales)


@pytest.mark.parametrize("control", [None, "kink"])
def test_one_hidden_layer_has_its_closed_form(control):
    net = OneHidden(5)
    scales = sweep(SmoothHess(net), X, SIGMAS, n_calls=400, control=control)
    for k, sigma in enumerate(SIGMAS):
        truth = net.truth(X, Isotropic(sigma))
        curve = scales.entry(0, 2)
        off = (curve.value[k] - truth.hessian[:, 0, 2]).abs()
        assert (off <= 5 * curve.stderr[k] + 1e-9).all()
    assert scales.gradient.shape == (3, 2, 5)
    assert scales.value.shape == scales.relative_error.shape == scales.r2.shape == (3, 2)


@pytest.mark.parametrize(
    ("design", "n_calls"), [("iid", 300), ("antithetic", 300), ("orthogonal", 60), ("orthogonal", 12)]
)
def test_the_error_of_a_change_is_paired(design, n_calls):
    """Over seeds the z-scores of the change of entries are those of a standard normal, and the claim is far below that
    of two separate runs."""
    net, x = OneHidden(8, width=40, seed=3), torch.zeros(1, 8).double()
    narrow, wide = 0.5, 0.7
    truth = net.truth(x, Isotropic(narrow)).hessian - net.truth(x, Isotropic(wide)).hessian
    both = sweep(Plain(net), x.repeat(60, 1), [narrow, wide], n_calls=n_calls, design=design, seed=range(60))
    change = both.difference(0, 1)
    stderr = change.stderr()
    z = ((change.hessian - truth) / stderr)[:, *torch.triu_indices(8, 8)]
    assert z.abs().max() < 6.5  # 2160 scores with as few as 8 degrees of freedom
    assert 0.9 < float((z.abs() < 2).double().mean()) < 0.99
    assert 0.8 < float(z.square().mean().sqrt()) < 1.2
    alone = both[0].stderr().square() + both[1].stderr().square()
    assert float(stderr.square().mean() / alone.mean()) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"control": "kink"}, {"control": "kink", "tau_probes": 16}, {"control": "auto"}])
def test_the_error_of_a_change_holds_with_a_control_variate(options):
    net, x = deep(8), torch.zeros(1, 8).double()
    truth = sweep(net, x, [0.5, 0.7], n_calls=100_000, control="kink", shrink=False, seed=999).difference(0, 1).hessian
    p_values = []
    for seed in range(60):
        change = sweep(net, x, [0.5, 0.7], n_calls=64, shrink=False, seed=seed, **options).difference(0, 1)
        z = ((change.hessian - truth) / change.stderr())[0][*torch.triu_indices(8, 8)]
        p_values.append(student_t.two_sided_p(z, change.diagonal().df))
    p = torch.stack(p_values)
    assert p.min() > 1e-6  # of 2160
    assert 0.02 < float((p < 0.05).double().mean()) < 0.08
    assert 0.4 < float((p < 0.5).double().mean()) < 0.6


def test_the_change_of_gradient_and_value_is_paired_too():
    net, x = OneHidden(8, width=40, seed=3), torch.zeros(1, 8).double()
    left, right = (net.truth(x, Isotropic(s)) for s in (0.5, 0.7))
    both = sweep(Plain(net), x.repeat(40, 1), [0.5, 0.7], n_calls=160, design="antithetic", seed=range(40))
    change = both.difference(0, 1)
    torch.testing.assert_close(change.gradient, both[0].gradient - both[1].gradient)
    torch.testing.assert_close(change.value, both[0].value - both[1].value)
    value = (change.value - (left.value - right.value)) / change.value_stderr
    gradient = (change.gradient - (left.gradient - right.gradient)) / change.gradient_stderr
    z = torch.cat([value[:, None], gradient], 1)
    assert z.abs().max() < 5
    assert 0.85 < float(z.square().mean().sqrt()) < 1.15


@pytest.mark.parametrize("n_calls", [20, 3_000])  # inside the head, and beyond it
@pytest.mark.parametrize("control", [None, "kink"])
def test_a_change_is_the_difference_of_the_unbiased_estimates(n_calls, control):
    net = deep()
    scales = sweep(net, X, SIGMAS, n_calls=n_calls, control=control)
    change = scales.difference(2, 0)
    assert isinstance(change, Change)
    expected = scales[2].unshrunk().hessian - scales[0].unshrunk().hessian
    torch.testing.assert_close(change.hessian, expected, rtol=1e-9, atol=1e-12)
    u, v = torch.randn(5, generator=torch.Generator().manual_seed(0)).double(), torch.ones(5).double()
    torch.testing.assert_close(change.bilinear(u, v).value, torch.einsum("d,bde,e->b", u, expected, v))
    torch.testing.assert_close(change.row(1).value, expected[:, 1])
    back = scales.difference(0, 2)
    torch.testing.assert_close(back.hessian, -change.hessian)
    torch.testing.assert_close(back.stderr(), change.stderr())
    assert scales.difference(1, 1).hessian.abs().max() == 0
    assert change.r2.isnan().all()
    assert torch.equal(change.output, torch.zeros(2).double())
    torch.testing.assert_close(
        change.taylor()(X[:, None] + 0.1),
        scales[2].unshrunk().taylor()(X[:, None] + 0.1) - scales[0].unshrunk().taylor()(X[:, None] + 0.1),
    )
    assert "Change between two scales" in repr(change)
    assert isinstance(change[0], Change)


def test_adaptive_runs_share_the_draws_that_both_have():
    scales = sweep(deep(), X, [0.05, 3.0], tol=0.3, control=None, tails=None, design="antithetic", shrink=False)
    n = torch.stack([r.n_calls for r in scales])
    assert (n[0] != n[1]).any()
    change = scales.difference(0, 1)
    assert torch.equal(change.n_calls, n.amin(0).clamp_max(2 * 1024))
    for b in range(2):
        again = sweep(Plain(deep()), X, [0.05, 3.0], n_calls=int(change.n_calls[b]), tails=None, design="antithetic")
        same = again.difference(0, 1)
        torch.testing.assert_close(change.hessian[b], same.hessian[b])
        torch.testing.assert_close(change.stderr()[b], same.stderr()[b])
        torch.testing.assert_close(change.gradient[b], same.gradient[b])


@pytest.mark.parametrize("design", ["antithetic", "orthogonal"])
def test_groups_of_a_change(design):
    mask = torch.tensor([0, 1, 1, 2, 0])
    net = deep()
    scales = sweep(net, X, SIGMAS, n_calls=200, design=design, control=None)
    one = scales.groups(mask).difference(0, 1)
    two = scales.difference(0, 1).groups(mask)
    torch.testing.assert_close(one.hessian, two.hessian)
    torch.testing.assert_close(one.gradient, two.gradient)
    # sums of two scales keep less of the rows than a change of all features: its noise in blocks is known less well
    near = {"rtol": 1e-6, "atol": 1e-12} if design == "antithetic" else {"rtol": 0.4, "atol": 0}
    torch.testing.assert_close(one.stderr(), two.stderr(), **near)
    streamed = sweep(net, X, SIGMAS, n_calls=200, design=design, control=None, feature_mask=mask).difference(0, 1)
    torch.testing.assert_close(streamed.unshrunk().hessian, two.unshrunk().hessian)
    torch.testing.assert_close(streamed.stderr(), two.stderr(), **near)


def test_pairs_that_change_are_found():
    """x₀x₁ is the same at all scales, relu(x₂ + x₃) is not."""

    def f(x):
        return x[:, 0] * x[:, 1] + 3 * torch.relu(x[:, 2] + x[:, 3])

    change = sweep(Plain(f), torch.zeros(1, 6).double(), [0.2, 0.4], n_calls=600).difference(0, 1)
    found = {(p.i, p.j) for p in change.top_pairs(15)[0] if p.significant}
    assert found == {(2, 3)}


def test_gaussians_of_one_shape_can_be_compared():
    scale = torch.tensor([1.0, 2.0, 0.5, 1.0, 0.0]).double()
    net = deep()
    scales = sweep(net, X, [0.2 * scale, 0.4 * scale], n_calls=40, control=None)
    assert torch.allclose(scales.sigmas, torch.tensor([0.2, 0.4]).double() * scale.square().mean().sqrt())
    expected = scales[0].unshrunk().hessian - scales[1].unshrunk().hessian
    torch.testing.assert_close(scales.difference(0, 1).hessian, expected)
    root = torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).double()
    covariance = root @ root.mT + torch.eye(5)
    dense = sweep(net, X, [Dense(0.1 * covariance), Dense(0.2 * covariance)], n_calls=40, control=None)
    expected = dense[0].unshrunk().hessian - dense[1].unshrunk().hessian
    torch.testing.assert_close(dense.difference(0, 1).hessian, expected)
    other = sweep(net, X, [Isotropic(0.2), Diagonal([0.1, 0.2, 0.3, 0.4, 0.5])], n_calls=40)
    with pytest.raises(ValueError, match="differ only in their scale, c·Σ; these two differ in shape"):
        other.difference(0, 1)
    with pytest.raises(ValueError, match="these two differ in shape"):
        sweep(net, X, [Isotropic(0.2), 0.2 * scale], n_calls=40).difference(0, 1)


def test_radii_models_targets_and_neurons():
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    scales = sweep(net, X, radii=[0.5, 1.0], target=[0, 2], n_calls=40)
    torch.testing.assert_close(scales.radii, torch.tensor([0.5, 1.0]).double())
    alone = SmoothHess(net).attribute(X, [0, 2], radius=1.0, n_calls=40)
    torch.testing.assert_close(scales[1].hessian, alone.hessian, rtol=1e-10, atol=1e-12)
    assert len(scales) == len(list(scales)) == 2
    assert len(scales[1:]) == 1
    assert scales[-1] is scales[1]
    neuron = sweep(NeuronSmoothHess(net, net[0]), X, [0.5], neuron_selector=3, n_calls=40)
    assert neuron[0].output.shape == (2,)
    scaled = sweep(lambda x, c: c[:, 0] * net(x)[:, 0], X, [0.5], additional_forward_args=torch.ones(2, 1), n_calls=20)
    torch.testing.assert_close(scaled[0].output, net(X)[:, 0].detach())


def test_reading_it():
    scales = sweep(deep(), X, [0.05, 0.6, 0.9], n_calls=60)
    text = repr(scales)
    assert "Sweep over 3 scale(s) of 2 example(s), orthogonal design, seed 0" in text
    assert len(text.splitlines()) == 6
    lines = scales.to_markdown().splitlines()
    assert lines[0] == "| σ | σ√d | |G| | rel. error | R² | calls |".replace("|G|", "‖G‖")
    assert len(lines) == 5
    assert "| 0.6 | 1.342 |" in lines[3]
    low, high = scales.entry(0, 1).interval(0.9)
    each = [r.bilinear(torch.eye(5)[0], torch.eye(5)[1]).interval(0.9) for r in scales]
    torch.testing.assert_close(low, torch.stack([e[0] for e in each]))
    torch.testing.assert_close(high, torch.stack([e[1] for e in each]))


def test_the_curve_is_drawn():
    pytest.importorskip("matplotlib")
    scales = sweep(deep(), X, [0.05, 0.6, 0.9], n_calls=60)
    ax = scales.plot(0, 1)
    assert ax.get_xscale() == "log"
    assert len(ax.containers) == 2
    one = scales[1:].entry(0, 1).plot(example=1)
    assert one.get_xscale() == "linear"
    assert len(one.containers) == 1


def test_the_model_is_untouched_and_the_random_state_too():
    net = deep()
    before, state = [p.clone() for p in net.parameters()], torch.get_rng_state()
    sweep(net, X, SIGMAS, n_calls=20)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((), {}, ValueError, "pass sigmas or radii, got neither"),
        (([0.1],), {"radii": [0.1]}, ValueError, "got both"),
        (([],), {}, ValueError, "at least one scale"),
        (([0.1, 0.1],), {}, ValueError, "all scales must be different"),
        ((0.1,), {}, TypeError, "hold several scales: pass a list, got float"),
        (([0.1, -1.0],), {}, ValueError, "sigma must be positive"),
        ((), {"radii": [0.0]}, ValueError, "radius must be one positive number"),
        (([0.1],), {"sigma": 0.1}, ValueError, "sweep takes several scales: pass a list as sigmas or radii, not sigma"),
        (([0.1],), {"radius": 0.1}, ValueError, "not radius"),
    ],
)
def test_what_is_refused(arguments, options, error, text):
    with pytest.raises(error, match=text):
        sweep(lambda x: x.sum(1), X, *arguments, **options)


def test_what_a_change_refuses():
    scales = sweep(deep(), X, [0.3, 0.6], n_calls=20)
    change = scales.difference(0, 1)
    assert not any(hasattr(change, name) for name in ("save", "merge"))  # save and merge the two results
    with pytest.raises(ValueError, match="only an Interactions can be extended, got Change"):
        SmoothHess(deep()).more(change, 20)
    other = sweep(deep(), X, [0.9], n_calls=20, seed=1)
    with pytest.raises(ValueError, match="do not share their draws"):
        type(scales)((scales[0], other[0])).difference(0, 1)


def test_differences_take_indices_of_scales():
    scales = sweep(deep(), X, [0.3, 0.6], n_calls=20)
    with pytest.raises(TypeError, match=r"indices of two scales \(0: σ = 0.3, 1: σ = 0.6\), got 0.3 and 0.6"):
        scales.difference(0.3, 0.6)


def test_what_is_not_known_of_groups():
    mask = torch.tensor([0, 1, 1, 2, 0])
    uneven = type(sweep(deep(), X, [0.3], n_calls=20))(
        (
            SmoothHess(deep()).attribute(X, sigma=0.3, n_calls=20, control=None).groups(mask),
            SmoothHess(deep()).attribute(X, sigma=0.6, n_calls=40, control=None).groups(mask),
        )
    )
    with pytest.raises(
        ValueError, match=r"unequal numbers of draws. Pass n_calls to sweep; or .*difference\(a, b\).groups"
    ):
        uneven.difference(0, 1)
    biased = sweep(deep(), X, [0.3, 0.6], n_calls=20, control="kink", tau_probes=16)
    with pytest.raises(ValueError, match="do not support tau_probes"):
        biased.groups(mask).difference(0, 1)
    assert torch.isfinite(biased.difference(0, 1).groups(mask).stderr()).all()
