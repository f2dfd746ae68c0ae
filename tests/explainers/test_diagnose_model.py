"""What `diagnose` says, against closed forms and models whose trouble is known."""

import itertools
import math

import pytest
import torch
from torch import nn

from smoothhess import Eigenbasis, SmoothHess, from_gradient
from smoothhess.curvature.one_flip import Kinks
from smoothhess.explainers.diagnose_model import ASKED, diagnose
from smoothhess.explainers.gradient_changes import MULTIPLES
from smoothhess.model.gradients import Oracle
from tests.printed import alike
from tests.truths import OneHidden, covariance, gaussians


def mlp(d, *widths, activations=None, seed=0):
    torch.manual_seed(seed)
    layers, sizes = [], [d, *widths]
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.Linear(a, b), activations[i]() if activations else nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 3))


def points(b, d, dtype=torch.float64):
    return torch.randn(b, d, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("kind", sorted(gaussians(5)))
def test_one_hidden_layer_in_closed_form(kind):
    net, gaussian, x = OneHidden(5), gaussians(5)[kind], points(2, 5)
    found = diagnose(net, x, gaussian=gaussian)
    tau = torch.einsum("kd,de,ke->k", net.w, covariance(gaussian, 5), net.w).sqrt()
    score = (x @ net.w.mT + net.b).abs() / tau
    expected = torch.stack([torch.special.ndtr(-score / m).sum(1) for m in MULTIPLES], 1)
    torch.testing.assert_close(found.expected_flips, expected.detach(), rtol=1e-9, atol=1e-12)
    (call,) = found.calls
    torch.testing.assert_close(call.flips, found.expected_flips[:, ASKED])
    torch.testing.assert_close(call.active, (x @ net.w.mT + net.b > 0).double().mean(1))
    assert (call.kind, call.units, call.share.tolist()) == ("relu", 24, [1.0, 1.0])
    assert found.own_hessian == ("zero", "zero")
    assert found.own_curvature.tolist() == [0.0, 0.0]
    assert "piecewise linear" in found.why


def test_shares_of_layers_are_those_of_the_closed_form():
    """Exact in one dimension, where every probe says the same; elsewhere they add up to one."""
    net, x = mlp(6, 16, 12, 8, activations=[nn.ReLU, nn.GELU, nn.Hardtanh]).double(), points(2, 6)
    line = Eigenbasis(torch.ones(1, 6), [0.7], rest=0.0)
    oracle = Oracle(net, x, 1)
    expected = Kinks.see(oracle, x, *oracle(x, torch.arange(2))).expectation(line, layers=True)
    shares = torch.stack(expected.layers)[:, :, 0, 0] / expected.hessian.dense()[:, 0, 0]
    found = diagnose(net, x, 1, gaussian=line)
    torch.testing.assert_close(torch.stack([c.share for c in found.calls]), shares, rtol=1e-8, atol=1e-10)
    found = diagnose(net, x, 1, sigma=0.4)
    torch.testing.assert_close(sum(c.share for c in found.calls), torch.ones(2).double())
    assert [c.flips.isnan().any().item() for c in found.calls] == [False, True, False]


def test_shares_in_many_dimensions_by_probes():
    net, x = mlp(6, 16, 12, 8).double(), points(1, 6)
    oracle = Oracle(net, x, 1)
    gaussian = gaussians(6)["dense"]
    expected = Kinks.see(oracle, x, *oracle(x, torch.arange(1))).expectation(gaussian, layers=True)
    inner = torch.stack([(w * expected.hessian.dense()).sum() for w in expected.layers])
    found = diagnose(net, x, 1, gaussian=gaussian, n_pairs=4000)
    shares = torch.stack([c.share[0] for c in found.calls])
    torch.testing.assert_close(shares, inner / expected.hessian.dense().square().sum(), rtol=0, atol=0.05)


def test_spreads_estimated_from_probes(monkeypatch):
    net, x = mlp(40, 50, 50).double(), points(1, 40)
    exact = diagnose(net, x, 0, sigma=0.3)
    monkeypatch.setattr("smoothhess.explainers.activation_flips.EXACT_RANK", 0)
    probed = diagnose(net, x, 0, sigma=0.3)
    for one, other in zip(probed.calls, exact.calls, strict=True):
        assert one.flips.item() != other.flips.item()
        assert abs(one.flips.item() / other.flips.item() - 1) < 0.2
    assert probed.n_passes - exact.n_passes == (64 - 40) / 2


def test_a_smooth_layer_is_named():
    net = mlp(6, 16, 16, 16, activations=[nn.ReLU, nn.GELU, nn.LeakyReLU]).double()
    found = diagnose(net, points(1, 6), 0, sigma=0.3)
    assert found.own_hessian == ("nonzero",)
    assert "3 (GELU): a smooth activation" in found.why
    assert "1 (ReLU)" not in found.why
    assert [c.kind for c in found.calls] == ["relu", "smooth", "leaky_relu"]
    x = points(1, 6).requires_grad_()
    hessian = torch.autograd.functional.hessian(lambda x: net(x)[0, 0], x)[0, :, 0]
    assert found.own_curvature.item() == pytest.approx(0.3**2 * hessian.norm().item(), rel=0.8)


def test_a_softmax_head_is_named():
    net = mlp(6, 16).double()
    found = diagnose(nn.Sequential(net, nn.Softmax(-1)), points(1, 6), 0, sigma=0.3)
    assert found.own_hessian == ("nonzero",)
    assert "1 (Softmax): softmax or normalisation" in found.why
    wrapped = diagnose(lambda x: net(x).softmax(-1), points(1, 6), 0, sigma=0.3)
    assert "(the model): softmax or normalisation" in wrapped.why
    torch.testing.assert_close(wrapped.odd, found.odd)


def test_curvature_outside_the_calls_is_noticed():
    found = diagnose(lambda x: x.relu().sum(1) ** 2, points(1, 4), sigma=0.3)
    assert found.own_hessian == ("nonzero",)
    assert "products or other operations have curvature" in found.why


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("activation", "own"), [(nn.ReLU, "zero"), (nn.GELU, "nonzero")])
def test_a_scripted_model_is_judged_by_numbers(activation, own):
    net = mlp(6, 32, 32, activations=[activation] * 2)
    found = diagnose(torch.jit.script(net), points(1, 6, torch.float32), 0, sigma=0.3)
    assert (found.own_hessian, found.calls) == ((own,), ())
    assert "scripted or compiled" in found.unseen
    assert found.unseen in str(found)
    seen = diagnose(net, points(1, 6, torch.float32), 0, sigma=0.3)
    torch.testing.assert_close(found.odd, seen.odd, rtol=1e-3, atol=1e-6)
    assert found.inside.item()


class Gradient(torch.autograd.Function):
    """x³/3, with no derivative of its own."""

    @staticmethod
    def forward(ctx, x):
        return x**3 / 3

    @staticmethod
    def backward(ctx, g):
        raise RuntimeError("derivative not implemented")


class Quartic(torch.autograd.Function):
    """Σ x⁴/12."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x**4).sum(1) / 12

    @staticmethod
    def backward(ctx, g):
        return g[:, None] * Gradient.apply(ctx.saved_tensors[0])


BLACK_BOXES = {
    "a product": (lambda x: x.prod(1), "nonzero", "Double backward gives |LᵀHLz|"),
    "kinks by arithmetic": (lambda x: (x * (x > 0)).sum(1), "zero", "exactly 0"),
    "affine": (lambda x: x.sum(1), "zero", "exactly 0"),
    "gradient alone": (from_gradient(lambda x: ((x**2).sum(1), 2 * x)), "nonzero", "Yet gradients change"),
    "once differentiable": (Quartic.apply, "nonzero", "not possible (derivative not implemented)"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", sorted(BLACK_BOXES))
def test_black_boxes(name, dtype):
    f, own, evidence = BLACK_BOXES[name]
    found = diagnose(f, points(2, 4, dtype), sigma=0.5)
    assert found.own_hessian == (own, own)
    assert evidence in found.why
    assert "no activation call was seen" in found.unseen


def test_kinks_nearer_than_the_tiny_step_are_not_called_curvature():
    """A black box whose every step crosses hundreds of kinks looks curved at any step that float32 allows."""
    edges = torch.linspace(-4, 4, 200_000)

    def staircase(x):  # slope rises by a random amount at every edge
        jumps = torch.randn(len(edges), generator=torch.Generator().manual_seed(0)).cumsum(0)
        at = torch.bucketize(x.detach(), edges).clamp_max(len(edges) - 1)
        return (jumps[at] * x).sum(1)

    assert diagnose(staircase, points(1, 3, torch.float32), sigma=0.5).own_hessian == ("undecided",)


# --- the range of σ ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU])
def test_float32_and_a_sigma_far_too_small(activation):
    net, x = mlp(6, 64, 64, activations=[activation] * 2), points(1, 6, torch.float32)
    found = diagnose(net, x, 0, sigma=1e-6)
    assert not found.inside.item()
    assert "σ = 1e-06 is too small" in str(found)
    with pytest.raises(ValueError, match="lost to rounding"):
        SmoothHess(net).attribute(x, 0, sigma=1e-8)
    assert "is too small" in str(diagnose(net, x, 0, sigma=1e-8))


def test_rounding_ends_the_range_of_a_smooth_model():
    """o ≈ σ|Hz| sinks into rounding at about eps; in float64 the same σ is fine."""
    net, x = mlp(6, 32, activations=[nn.Tanh]), points(1, 6, torch.float32)
    found = diagnose(net, x, 0, sigma=1e-5)
    assert 1e-6 <= found.lower.item() <= 1e-4
    assert diagnose(net.double(), x.double(), 0, sigma=1e-5).inside.item()
    assert diagnose(net, x.double(), 0, sigma=1e-5).lower.isnan().item()


def test_noise_that_a_large_feature_swallows():
    x, f = torch.tensor([[1e6, 0.5, 0.3]]), lambda x: x[:, 1:].square().sum(1) + 1e-6 * x[:, 0]
    with pytest.raises(ValueError, match="lost to rounding"):
        SmoothHess(f).attribute(x, sigma=0.05, n_calls=20)
    found = diagnose(f, x, sigma=0.05)
    assert "loses over 10% of it to rounding" in found.verdict[0]
    assert found.inside.item() is False
    with pytest.warns(UserWarning, match="1 of 3 columns are larger than 1000 σ"):
        SmoothHess(f).attribute(x, sigma=found.lower.item(), n_calls=20)


def test_too_few_flips():
    net, x = mlp(6, 64, 64).double(), points(1, 6)
    found = diagnose(net, x, 0, sigma=1e-4)
    assert (found.expected_flips[0, ASKED] < 1).item()
    assert "meets less than one kink" in found.verdict[0]
    assert (found.expected_flips[0, found.sigmas < found.lower] < 1).all()
    assert diagnose(net, x, 0, sigma=found.lower.item()).inside.item()


SATURATING = {
    "tanh of large arguments": lambda x: torch.tanh(50 * x + 0.5).sum(1),
    "one kink": lambda x: (x.sum(1) + 0.01).relu(),
    "one hidden layer": lambda x: OneHidden(4)(20 * x),
}


@pytest.mark.parametrize("name", sorted(SATURATING))
def test_saturation(name):
    found = diagnose(SATURATING[name], torch.zeros(1, 4).double(), sigma=3.0)
    assert not found.inside.item()
    assert "σ = 3 is too large" in found.verdict[0]
    assert found.upper.item() < 3
    assert diagnose(SATURATING[name], torch.zeros(1, 4).double(), sigma=found.upper.item()).inside.item()


def test_gradients_that_overflow():
    found = diagnose(lambda x: x.exp().sum(1), points(1, 4, torch.float32), sigma=300.0)
    assert "not finite" in found.verdict[0]
    assert found.upper.item() < 300
    assert found.odd[0, -1].isnan()


def test_examples_have_their_own_verdicts():
    """One kink: near the first example, far from the second."""
    x = torch.tensor([[0.05, 0.0], [50.0, 0.0]]).double()
    found = diagnose(lambda x: x[:, 0].relu() + 0 * x[:, 1], x, sigma=0.1)
    assert found.inside.tolist() == [True, False]
    assert found.lower.isnan().tolist() == [False, False]
    assert found.lower[1] > 10
    alone = diagnose(lambda x: x[:, 0].relu() + 0 * x[:, 1], x[1:], sigma=0.1)
    assert alone.verdict[0] == found.verdict[1]


# --- manners ----------------------------------------------------------------------------------------------------------


def test_the_report_holds_the_verdict():
    found = diagnose(mlp(6, 64, 64).double(), points(2, 6), [0, 1], sigma=0.3)
    text = str(found)
    assert repr(found) == text
    assert all(f"Verdict {i}: {line}" in text for i, line in enumerate(found.verdict))
    assert all(word in text for word in ("Own Hessian: zero", "1 (ReLU)", "share of H₁", "passes per example"))
    assert found.lower.shape == found.upper.shape == found.inside.shape == (2,)


class Counting(nn.Module):
    """Counts its calls in a buffer, holds a batch-norm in eval mode, and works in place."""

    def __init__(self):
        super().__init__()
        self.body = mlp(6, 16)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, shift):
        self.calls += 1
        return self.norm(self.body(x.add_(shift))).relu_()


def test_the_model_is_given_back_and_the_budget_kept():
    net = Counting().double().eval()
    net.body[0].weight.requires_grad_(False)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    state, x, shift = torch.get_rng_state(), points(2, 6), 0.1 * points(2, 6)
    kept = x.clone()
    with torch.no_grad():
        found = diagnose(net, x, 1, shift, sigma=0.3)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert [p.requires_grad for p in net.parameters()].count(False) == 1
    assert all(p.grad is None for p in net.parameters())
    assert not any(m.training or m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, kept)
    assert found.own_hessian == ("zero", "zero")
    pairs, tau = 2 * 16, 6 / 2
    assert found.n_passes == 1 + 2 + tau + pairs + 8 + pairs * (1 + 2 + len(MULTIPLES))


def test_batches_and_seeds():
    net, x = mlp(6, 16, 16).double(), points(3, 6)
    whole = diagnose(net, x, [0, 1, 2], sigma=0.3)
    small = diagnose(net, x, [0, 1, 2], sigma=0.3, internal_batch_size=5)
    torch.testing.assert_close(small.odd, whole.odd)
    torch.testing.assert_close(small.expected_flips, whole.expected_flips)
    assert small.verdict == whole.verdict
    assert not torch.equal(diagnose(net, x, [0, 1, 2], sigma=0.3, seed=1).odd, whole.odd)
    one = diagnose(net, x[1:2], 1, sigma=0.3)
    torch.testing.assert_close(one.odd[0], whole.odd[1])
    torch.testing.assert_close(one.calls[1].share[0], whole.calls[1].share[1])


def test_a_large_image():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 8, stride=8), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(196, 2))
    found = diagnose(net, torch.rand(1, 3, 224, 224), 0, radius=20.0, n_pairs=4)
    assert found.own_hessian == ("zero",)
    assert [c.kind for c in found.calls] == ["relu", "max_pool"]
    assert found.calls[1].share.item() == pytest.approx(1.0)  # the relu is one of the candidates of each window
    assert found.calls[1].flips.item() > 0
    assert math.isfinite(found.n_passes)
    assert found.n_passes < 300


def test_refusals():
    x = points(1, 4)
    with pytest.raises(ValueError, match="exactly one of sigma"):
        diagnose(lambda x: x.sum(1), x, sigma=0.1, radius=0.1)
    with pytest.raises(ValueError, match="n_pairs must be a whole number"):
        diagnose(lambda x: x.sum(1), x, sigma=0.1, n_pairs=1)
    with pytest.raises(TypeError, match="float32 or float64"):
        diagnose(lambda x: x.sum(1), x.half(), sigma=0.1)
    with pytest.raises(ValueError, match="training mode"):
        diagnose(nn.Sequential(nn.Linear(4, 1), nn.Dropout()).double(), x, sigma=0.1)
    with pytest.raises(ValueError, match="without a target"):
        diagnose(mlp(4, 8).double(), x, sigma=0.1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_equals_cpu():
    net, x = mlp(6, 16, 16).double(), points(2, 6)
    here = diagnose(net, x, 0, sigma=0.3)
    there = diagnose(net.cuda(), x.cuda(), 0, sigma=0.3)
    torch.testing.assert_close(there.odd, here.odd, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(there.expected_flips, here.expected_flips)
    assert alike(str(there), str(here))
