"""Taylor-CAM against closed forms, Captum, and gates closed by hand."""

import captum.attr
import pytest
import torch
from torch import nn

from smoothhess import Interactions, attack
from smoothhess.baselines.taylor_cam import taylor_cam, taylor_map
from smoothhess.result.exact import Attribution
from tests.model.test_state import Counting, assert_same, snapshot
from tests.truths import quadratic

pytestmark = pytest.mark.rounding

K = 5
X = torch.randn(3, 2, 6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


class Pooled(nn.Module):
    """b·p + ½ pᵀAp of the channels' means p, or what `head` makes of them."""

    def __init__(self, head=None):
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(2, K, 3)
        self.relu = nn.ReLU(inplace=True)
        self.head = head
        A, b = quadratic(K)
        self.register_buffer("A", A)
        self.register_buffer("b", b)
        self.double()

    def pool(self, x):
        return self.relu(self.conv(x)).mean((2, 3))

    def forward(self, x, scale=None):
        p = self.pool(x)
        y = p @ self.b + ((p @ self.A) * p).sum(1) / 2 if self.head is None else self.head(p)
        return y if scale is None else y * scale


def places(*activations):
    """A small network with places that matter on their own."""
    torch.manual_seed(2)
    first, second = activations
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), first, nn.Conv2d(4, K, 2), second, nn.Flatten(), nn.Linear(K * 9, 3)
    ).double()


def shut(model, layer, x, mask):
    """f with the activation multiplied by a mask, by a hook written here."""
    handle = layer.register_forward_hook(lambda _, __, output: output * mask)
    try:
        return model(x)
    finally:
        handle.remove()


# --- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", ["conv", "relu"])
def test_a_quadratic_of_the_pooled_channels(layer):
    # behind the conv there is a ReLU: open gates do not change its signs, so that the derivatives are the same
    model = Pooled()
    p = model.pool(X).detach()
    result = taylor_cam(model, layer, X)
    torch.testing.assert_close(result.gradient, p * (model.b + p @ model.A), rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(result.hessian, p[:, :, None] * model.A * p[:, None], rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(result.output, model(X))
    torch.testing.assert_close(result.value, model(X))  # nothing is left without channels
    torch.testing.assert_close(taylor_map(result).sum(1), model(X), rtol=1e-11, atol=1e-13)


def test_pairs_are_what_two_gates_do_beyond_each_alone():
    model = Pooled()
    result = taylor_cam(model, model.conv, X)
    for k, l in ((0, 1), (2, 4)):
        mask = torch.ones(4, K, 1, 1).double()
        mask[1, k] = mask[2, l] = mask[3, k] = mask[3, l] = 0
        open_, first, second, both = (shut(model, model.relu, X, m) for m in mask)
        torch.testing.assert_close(result.hessian[:, k, l], open_ - first - second + both, rtol=1e-9, atol=1e-12)
        change = result.gradient[:, k] - result.hessian[:, k, k] / 2
        torch.testing.assert_close(change, open_ - first, rtol=1e-9, atol=1e-12)


def test_channels_that_do_not_meet_have_no_pairs():
    model = Pooled(head=lambda p: p[:, :2].prod(1) + p[:, 2:].square().sum(1))
    result = taylor_cam(model, "conv", X)
    assert not result.hessian[:, :2, 2:].any()
    assert not result.hessian[:, 2, 3:].any()
    assert result.hessian[:, 0, 1].abs().min() > 0


def test_places_of_a_quadratic():
    model = Pooled()
    result = taylor_cam(model, "relu", X, dims=(2, 3))
    A = model.relu(model.conv(X)).detach().flatten(2) / 16  # (B, K, places), what each place adds to the means
    p = A.sum(2)
    expected = torch.einsum("bk,bku->bu", model.b + p @ model.A, A)
    torch.testing.assert_close(result.gradient.flatten(1), expected, rtol=1e-11, atol=1e-13)
    pairs = torch.einsum("bku,kl,blv->buv", A, model.A, A)
    torch.testing.assert_close(result.hessian, pairs, rtol=1e-10, atol=1e-13)
    assert result.feature_shape == (4, 4)
    assert taylor_map(result).shape == (3, 4, 4)
    torch.testing.assert_close(taylor_map(result).sum((1, 2)), model(X), rtol=1e-10, atol=1e-12)


# --- Captum, and torch.func -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 2])
def test_first_order_is_captums_gradient_times_activation(layer):
    model = places(nn.Tanh(), nn.GELU())
    target = [2, 0, 1]
    expected = captum.attr.LayerGradientXActivation(model, model[layer]).attribute(X, target).detach()
    channels = taylor_cam(model, model[layer], X, target)
    torch.testing.assert_close(channels.gradient, expected.sum((2, 3)), rtol=1e-10, atol=1e-12)
    over = taylor_cam(model, model[layer], X, target, dims=(-1, -2))
    torch.testing.assert_close(over.gradient, expected.sum(1), rtol=1e-10, atol=1e-12)
    units = taylor_cam(model, model[layer], X, target, dims=(1, 2, 3))
    torch.testing.assert_close(units.gradient, expected, rtol=1e-10, atol=1e-12)


def test_grad_cam_where_the_rest_pools():
    model = Pooled()
    expected = captum.attr.LayerGradCam(model, model.relu).attribute(X)[:, 0].detach()
    result = taylor_cam(model, model.relu, X, dims=(2, 3))
    # Grad-CAM takes the mean of the gradient over places where this takes the gradient: the same behind a mean
    torch.testing.assert_close(result.gradient, expected, rtol=1e-10, atol=1e-12)


def test_second_order_by_torch_func():
    model = places(nn.Tanh(), nn.GELU())
    A = model[:3](X).detach()
    result = taylor_cam(model, "2", X, 1)
    whole = taylor_cam(model, "2", X, 1, dims=(1, 2, 3))
    for i in range(len(X)):
        F = lambda s, i=i: model[3:](A[i : i + 1] * s.reshape(1, K, *s.shape[1:] or (1, 1)))[0, 1]
        expected = torch.func.hessian(F)(torch.ones(K).double()).detach()
        torch.testing.assert_close(result.hessian[i], expected, rtol=1e-9, atol=1e-12)
        units = torch.func.hessian(F)(torch.ones(K, 3, 3).double()).detach().reshape(45, 45)
        torch.testing.assert_close(whole.hessian[i], units, rtol=1e-9, atol=1e-12)
    blocks = whole.groups(torch.arange(K)[:, None, None].expand(K, 3, 3))
    torch.testing.assert_close(blocks.hessian, result.hessian, rtol=1e-9, atol=1e-12)


def test_softened_behind_the_layer_only():
    model = places(nn.ReLU(), nn.ReLU())
    with pytest.warns(UserWarning, match="the Hessian is exactly zero"):
        assert not taylor_cam(model, "2", X, 1).hessian.any()
    A = model[:3](X).detach()  # the activation is the model's own
    result = taylor_cam(model, "2", X, 1, of="softplus", beta=4.0)
    tail = nn.Sequential(nn.Softplus(beta=4.0), *model[4:])
    for i in range(len(X)):
        F = lambda s, i=i: tail(A[i : i + 1] * s[None, :, None, None])[0, 1]
        expected = torch.func.hessian(F)(torch.ones(K).double()).detach()
        torch.testing.assert_close(result.hessian[i], expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(result.output, model(X)[:, 1].detach())
    change = (model(X) - shut(model, model[2], X, 0.0))[:, 1].detach()
    torch.testing.assert_close(result.value, change)


def test_smooth_over_the_gates():
    model = Pooled()  # quadratic in the gates: whatever the smoothing, the pairs are the same
    own = taylor_cam(model, "relu", X)
    result = taylor_cam(model, "relu", X, of="smooth", sigma=0.2, n_calls=100, control=None, shrink=False, seed=5)
    torch.testing.assert_close(result.hessian, own.hessian, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(result.gradient, own.gradient, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(result.value, own.value)
    assert result.seed == 5
    assert (result.n_calls == 100).all()


# --- the form of the result -------------------------------------------------------------------------------------------


def test_matrix_free_equals_dense():
    model = places(nn.Tanh(), nn.GELU())
    dense = taylor_cam(model, "2", X, 1, dims=(1, 2, 3))
    free = taylor_cam(model, "2", X, 1, dims=(1, 2, 3), dense=False)
    assert callable(free.derivatives.curvature)
    torch.testing.assert_close(taylor_map(free), taylor_map(dense), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(free[[2, 0]].row((1, 2, 0)).value, dense[[2, 0]].row((1, 2, 0)).value)


def test_it_is_an_attribution(tmp_path):
    result = taylor_cam(Pooled(), "conv", X)
    assert isinstance(result, Attribution)
    with pytest.raises(ValueError, match="Taylor-CAM, own is an attribution"):
        attack(result, 0.1)
    result.save(tmp_path / "r.safetensors")
    assert torch.equal(Interactions.load(tmp_path / "r.safetensors").hessian, result.hessian)
    assert torch.equal(result.inputs, torch.ones(3, K).double())
    assert "closing all gates lowers the output by" in result.note
    assert len(result.top_pairs(3)[1]) == 3


def test_arguments_follow_their_example_and_batches_do_not_matter():
    model, scale = Pooled(), torch.tensor([1.0, 2.0, 3.0]).double()
    plain = taylor_cam(model, "conv", X)
    scaled = taylor_cam(model, "conv", X, None, scale, internal_batch_size=2)
    torch.testing.assert_close(scaled.hessian, scale[:, None, None] * plain.hessian, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(scaled.value, scale * plain.value)


def test_tokens_and_tuples():
    class Pair(nn.Module):
        def forward(self, x):
            return x.tanh(), "and more"

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair = Pair()

        def forward(self, x):
            tokens, _ = self.pair(x)
            return tokens.sum(2).prod(1)

    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    result = taylor_cam(Model(), "pair", x, dims=1)
    sums = x.tanh().sum(2)
    torch.testing.assert_close(result.gradient, sums.prod(1, keepdim=True).expand(2, 3))
    assert taylor_cam(Model(), "pair", x, dims=2).feature_shape == (4,)


@pytest.mark.parametrize(
    "options", [{}, {"of": "softplus", "beta": 2.0}, {"of": "smooth", "sigma": 0.2, "n_calls": 20}]
)
@pytest.mark.parametrize("fail_after", [None, 0, 1, 2])
@pytest.mark.filterwarnings("ignore:the Hessian is exactly zero")
def test_model_and_hooks_are_given_back_as_they_were(options, fail_after):
    class Failing(nn.Sequential):
        calls, fail_after = 0, None

        def forward(self, x):
            x = super().forward(x)
            self.calls += 1
            if self.fail_after is not None and self.calls > self.fail_after:
                raise RuntimeError("midway")
            return x

    model = Failing(*places(nn.ReLU(), nn.ReLU()))
    seen = []
    model[2].register_forward_hook(lambda *_: seen.append(1))
    model[0].weight.requires_grad_(False)
    model.fail_after = fail_after
    x = X.clone().requires_grad_()
    before = snapshot(model)
    explain = lambda: taylor_cam(model, "2", x, 0, internal_batch_size=8, **options)
    if fail_after is None:
        explain()
    else:
        with pytest.raises(RuntimeError, match="midway"):
            explain()
    assert_same(before, snapshot(model))
    assert x.grad is None
    assert seen


@pytest.mark.filterwarnings("ignore:the Hessian is exactly zero")
def test_buffers_are_put_back():
    model = Counting()
    taylor_cam(model, "inner", X.flatten(1)[:, :4].float(), 0)
    assert int(model.calls) == 0


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(self.layer(x)).sum(1)


class Odd(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.odd = nn.Identity()
        self.odd.forward = make

    def forward(self, x):
        self.odd(x)
        return x.flatten(1).sum(1)


@pytest.mark.parametrize(
    ("model", "layer", "options", "error", "text"),
    [
        (Pooled(), "conv2", {}, ValueError, "no layer is called 'conv2'. The model has conv, relu"),
        (Pooled(), 3, {}, TypeError, "layer must be a torch.nn.Module or its name, got int"),
        (lambda x: x.sum((1, 2, 3)), "conv", {}, TypeError, "by name only when forward_func is a torch.nn.Module"),
        (Pooled(), nn.Linear(1, 1), {}, ValueError, "it ran 0 times. Is it part of this model?"),
        (Pooled(), "conv", {"dims": 4}, ValueError, r"output \(3, 5, 4, 4\) after the first, 1 to 3, got 4"),
        (Pooled(), "conv", {"dims": 0}, ValueError, "after the first, 1 to 3, got 0"),
        (Pooled(), "conv", {"dims": (1, -3)}, ValueError, r"different dimensions .* got \(1, -3\)"),
        (Pooled(), "conv", {"dims": ()}, TypeError, r"dims must be an int or a tuple of them, .* got \(\)"),
        (Pooled(), "conv", {"dims": "channels"}, TypeError, "dims must be an int or a tuple of them"),
        (Pooled(), "conv", {"of": "relu"}, ValueError, "of must be .*got 'relu'"),
        (Pooled(), "conv", {"of": "softplus"}, TypeError, "missing .*'beta'"),
        (Pooled(), "conv", {"target": 1}, ValueError, "target has 1 index"),
        (Pooled(), "conv", {"inputs": X[0, 0, 0]}, ValueError, r"inputs must be \(B, …\)"),
        (Twice(), "layer", {"inputs": torch.ones(2, 4)}, ValueError, "it ran 2 times. .* separate module"),
        (Twice(), "other", {"inputs": torch.ones(2, 4)}, ValueError, "it ran 0 times"),
        (Odd(lambda x: {"a": x}), "odd", {}, TypeError, "the layer must return a tensor .*, got dict"),
        (Odd(lambda x: x.long()), "odd", {}, ValueError, "floating point activations .* torch.int64"),
        (Odd(lambda x: x[:1]), "odd", {}, ValueError, r"one row per input, \(3, …\), got \(1, 2, 6, 6\)"),
        (Odd(lambda x: x), "odd", {}, ValueError, "does not depend on the input"),
    ],
)
def test_what_is_refused(model, layer, options, error, text):
    with pytest.raises(error, match=text):
        taylor_cam(model, layer, **{"inputs": X, **options})
    if isinstance(model, nn.Module):
        assert not any(m._forward_hooks for m in model.modules())
