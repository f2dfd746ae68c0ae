"""Every form of an activation call is seen, replaced, recorded and frozen; the model is left as it was."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from paper.networks import MLP, VGG, SpirometryCNN, resnet18
from smoothhess.curvature.activation_hooks import freeze, record, replace
from smoothhess.model.state import is_opaque

pytestmark = pytest.mark.rounding

ATEN = torch.ops.aten
ZERO, SIX = torch.zeros((), dtype=torch.float64), torch.tensor(6.0, dtype=torch.float64)


def softplus(beta):
    return lambda z: z.clamp(min=0) + torch.log1p(torch.exp(-(beta * z).abs())) / beta


def swish(beta):
    return lambda z: z * torch.sigmoid(beta * z)


def points(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


RELUS = {
    "nn.ReLU": nn.ReLU(),
    "nn.ReLU inplace": nn.ReLU(inplace=True),
    "F.relu": F.relu,
    "F.relu inplace": lambda x: F.relu(x, inplace=True),
    "F.relu_": F.relu_,
    "torch.relu": torch.relu,
    "torch.relu by keyword": lambda x: torch.relu(input=x),
    "torch.relu_": torch.relu_,
    "Tensor.relu": Tensor.relu,
    "Tensor.relu_": Tensor.relu_,
    "torch.clamp": lambda x: torch.clamp(x, min=0),
    "Tensor.clamp": lambda x: x.clamp(0),
    "Tensor.clamp_": lambda x: x.clamp_(min=0.0),
    "clamp by tensor": lambda x: x.clamp(min=ZERO),
    "clamp_min": lambda x: torch.clamp_min(x, 0),
    "clamp_min_": lambda x: x.clamp_min_(0),
    "clip": lambda x: torch.clip(x, 0),
    "Tensor.clip_": lambda x: x.clip_(min=0),
    "F.threshold": lambda x: F.threshold(x, 0, 0),
    "nn.Threshold inplace": nn.Threshold(0, 0, inplace=True),
    "torch.threshold_": lambda x: torch.threshold_(x, 0, 0),
    "maximum zeros": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "maximum zeros first": lambda x: torch.maximum(ZERO, x),
    "maximum 0-tensor": lambda x: x.maximum(ZERO),
    "maximum by keyword": lambda x: torch.maximum(x, other=ZERO),
    "max": lambda x: torch.max(x, ZERO),
    "aten.relu": ATEN.relu.default,
    "aten.relu packet": ATEN.relu,
    "aten.relu_": ATEN.relu_.default,
    "aten.clamp": lambda x: ATEN.clamp.default(x, 0),
    "aten.clamp_min": lambda x: ATEN.clamp_min.default(x, 0),
    "aten.threshold": lambda x: ATEN.threshold.default(x, 0, 0),
    "aten.maximum": lambda x: ATEN.maximum.default(x, torch.zeros_like(x)),
}
prelu, prelu_channels = nn.PReLU(init=0.3).double(), nn.PReLU(3).double()
prelu_channels.weight.data = torch.tensor([0.1, -0.5, 1.5], dtype=torch.float64)
# call, kind, and its value in terms of a relu r
OTHERS = {
    "F.leaky_relu": (lambda x: F.leaky_relu(x, 0.2), "leaky_relu", lambda x, r: 0.2 * x + 0.8 * r(x)),
    "leaky default": (F.leaky_relu, "leaky_relu", lambda x, r: 0.01 * x + 0.99 * r(x)),
    "leaky_relu_": (lambda x: F.leaky_relu_(x, 0.2), "leaky_relu", lambda x, r: 0.2 * x + 0.8 * r(x)),
    "nn.LeakyReLU inplace": (nn.LeakyReLU(0.2, True), "leaky_relu", lambda x, r: 0.2 * x + 0.8 * r(x)),
    "aten.leaky_relu": (
        lambda x: ATEN.leaky_relu.default(x, 0.2),
        "leaky_relu",
        lambda x, r: 0.2 * x + 0.8 * r(x),
    ),
    "nn.PReLU": (prelu, "prelu", lambda x, r: 0.3 * x + 0.7 * r(x)),
    "nn.PReLU channels": (
        prelu_channels,
        "prelu",
        lambda x, r: (w := prelu_channels.weight.detach()[:, None]) * x + (1 - w) * r(x),
    ),
    "aten.prelu": (lambda x: ATEN.prelu.default(x, prelu.weight), "prelu", lambda x, r: 0.3 * x + 0.7 * r(x)),
    "nn.ReLU6": (nn.ReLU6(), "hardtanh", lambda x, r: r(x) - r(x - 6)),
    "nn.ReLU6 inplace": (nn.ReLU6(True), "hardtanh", lambda x, r: r(x) - r(x - 6)),
    "F.relu6": (F.relu6, "hardtanh", lambda x, r: r(x) - r(x - 6)),
    "aten.relu6": (ATEN.relu6.default, "hardtanh", lambda x, r: r(x) - r(x - 6)),
    "nn.Hardtanh": (nn.Hardtanh(-1, 2), "hardtanh", lambda x, r: -1 + r(x + 1) - r(x - 2)),
    "F.hardtanh_": (lambda x: F.hardtanh_(x, -1, 2), "hardtanh", lambda x, r: -1 + r(x + 1) - r(x - 2)),
}
KEPT = {  # recorded and frozen, never replaced
    "clamp elsewhere": (lambda x: x.clamp(min=0.5), "clamp"),
    "clamp two-sided": (lambda x: x.clamp(-1, 1), "clamp"),
    "clamp above": (lambda x: x.clamp(max=0), "clamp"),
    "clamp_max_": (lambda x: x.clamp_max_(1), "clamp"),
    "maximum elsewhere": (lambda x: torch.maximum(x, -SIX), "clamp"),
    "threshold elsewhere": (lambda x: F.threshold(x, 1, 1), "clamp"),
    "abs": (torch.abs, "abs"),
    "gelu": (F.gelu, "smooth"),
    "gelu tanh": (nn.GELU("tanh"), "smooth"),
    "aten.gelu": (ATEN.gelu.default, "smooth"),
    "silu": (F.silu, "smooth"),
    "silu inplace": (nn.SiLU(inplace=True), "smooth"),
    "elu": (lambda x: F.elu(x, 0.7), "smooth"),
    "elu_": (F.elu_, "smooth"),
    "selu": (nn.SELU(inplace=True), "smooth"),
    "celu": (F.celu, "smooth"),
    "mish": (F.mish, "smooth"),
    "sigmoid": (torch.sigmoid, "smooth"),
    "Tensor.sigmoid_": (Tensor.sigmoid_, "smooth"),
    "tanh": (F.tanh, "smooth"),
    "softplus": (lambda x: F.softplus(x, beta=2), "smooth"),
    "logsigmoid": (F.logsigmoid, "smooth"),
    "hardswish": (F.hardswish, "smooth"),
    "hardsigmoid": (F.hardsigmoid, "smooth"),
    "F.softmax": (lambda x: F.softmax(x, -1), "map"),
    "Tensor.softmax": (lambda x: x.softmax(1), "map"),
    "log_softmax": (nn.LogSoftmax(-1), "map"),
    "layer_norm": (nn.LayerNorm(8).double(), "map"),
    "group_norm": (nn.GroupNorm(1, 3).double(), "map"),
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), "max_pool"),
    "max_pool1d overlapping": (nn.MaxPool1d(3, 1, padding=1), "max_pool"),
    "torch.max_pool1d": (lambda x: torch.max_pool1d(x, 2), "max_pool"),
    "adaptive_max_pool1d": (nn.AdaptiveMaxPool1d(3), "max_pool"),
    "torch.adaptive_max_pool1d": (lambda x: torch.adaptive_max_pool1d(x, 3)[0], "max_pool"),
    "max_pool2d": (lambda x: F.max_pool2d(x[:, None], 2), "max_pool"),
    "torch.max_pool2d": (lambda x: torch.max_pool2d(x[:, None], 2, ceil_mode=True), "max_pool"),
    "max_pool2d indices": (lambda x: F.max_pool2d(x[:, None], 2, return_indices=True)[0], "max_pool"),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, (2, 3)), "max_pool"),
    "max_pool3d": (lambda x: F.max_pool3d(x.reshape(-1, 1, 2, 3, 4), 2), "max_pool"),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x.reshape(-1, 1, 2, 3, 4), 1), "max_pool"),
    "amax": (lambda x: x.amax((1, 2), keepdim=True), "max_pool"),
    "max over a dimension": (lambda x: torch.max(x, 1).values, "max_pool"),
    "aten.amax": (lambda x: ATEN.amax.default(x, [-1]), "max_pool"),
    "aten.max_pool2d": (lambda x: ATEN.max_pool2d.default(x[:, None], [2, 2]), "max_pool"),
    "aten.adaptive_max_pool2d": (lambda x: ATEN.adaptive_max_pool2d.default(x, [2, 2])[0], "max_pool"),
}


def scale(x):
    return 4 * x + 1  # a tensor of the model's own, so that in-place calls are allowed


def kinds(forward, x):
    return [call.kind for call in record(forward, x).calls]


def check_frozen(forward, x, n=3, tolerance=1e-12):
    """A frozen pass has the network's outputs and gradients at x, and is affine around each example."""
    x = x.clone().requires_grad_()
    output = forward(x)
    cotangent = points(*output.shape, seed=9)
    (gradient,) = torch.autograd.grad(output, x, cotangent)

    tape = record(forward, x)
    assert tape.calls
    torch.testing.assert_close(tape.output, output, rtol=0, atol=0)
    run = freeze(forward, tape, x)
    (frozen_gradient,) = torch.autograd.grad(run.output, x, cotangent, retain_graph=True)
    torch.testing.assert_close(run.output, output, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(frozen_gradient, gradient, rtol=tolerance, atol=tolerance)
    for pre, call in zip(run.pre, tape.calls, strict=True):
        torch.testing.assert_close(pre.detach(), call.pre, rtol=tolerance, atol=tolerance)

    delta = points(len(x) * n, *x.shape[1:], seed=5)
    rows = freeze(forward, tape, x.detach().repeat_interleave(n, 0) + delta)
    slope = torch.stack([(delta[i] * gradient[i // n]).sum() for i in range(len(delta))])
    moved = ((rows.output - output.detach().repeat_interleave(n, 0)) * cotangent.repeat_interleave(n, 0)).flatten(1)
    torch.testing.assert_close(moved.sum(1), slope, rtol=1e-9, atol=1e-9)
    back = freeze(forward, tape, x.detach().repeat_interleave(n, 0) - delta)
    centre = freeze(forward, tape, x.detach().repeat_interleave(n, 0))
    for plus, minus, middle in zip(rows.pre, back.pre, centre.pre, strict=True):
        torch.testing.assert_close((plus + minus) / 2, middle, rtol=1e-9, atol=1e-9)
    return tape


@pytest.mark.parametrize("form", RELUS)
def test_each_relu_form_is_seen_replaced_and_frozen(form):
    call, x = RELUS[form], points(2, 3, 8)
    assert kinds(lambda x: call(scale(x)), x) == ["relu"]
    torch.testing.assert_close(replace(lambda x: call(scale(x)), swish(2.0))(x), swish(2.0)(scale(x)))
    check_frozen(lambda x: 2 * call(scale(x)), x)


@pytest.mark.parametrize("form", OTHERS)
def test_other_kinks_are_sums_of_relus(form):
    (call, kind, formula), x = OTHERS[form], points(2, 3, 8)
    network = lambda x: call(scale(x))
    assert kinds(network, x) == [kind]
    torch.testing.assert_close(network(x), formula(scale(x), torch.relu))
    torch.testing.assert_close(replace(network, swish(2.0))(x), formula(scale(x), swish(2.0)))
    tape = check_frozen(network, x)
    call_ = tape.calls[0]
    assert call_.slope is not None
    left = call_.slope - sum((call_.pre > knot) * jump for knot, jump in call_.knots)
    torch.testing.assert_close(left, left.amin((0, 2), keepdim=True).expand_as(left))  # one left slope a channel


@pytest.mark.parametrize("form", KEPT)
def test_the_rest_is_frozen_and_not_replaced(form):
    (call, kind), x = KEPT[form], points(2, 3, 8)
    network = lambda x: call(scale(x))
    assert kinds(network, x) == [kind]
    check_frozen(network, x, tolerance=1e-11)
    with pytest.raises(ValueError, match="no such call was seen"):
        replace(network, swish(2.0))(x)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.max(),
        lambda x: x.amax(),
        lambda x: torch.max(x, dim=0, keepdim=True)[0],
        lambda x: torch.maximum(x, 2 * x),
        lambda x: x.clamp(min=x.detach() - 1),
        lambda x: F.threshold(x, 0.0, 1.0),
        lambda x: x.long().clamp(min=0),
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: torch.clamp(x.detach(), min=0, out=torch.empty_like(x)),
    ],
)
def test_what_is_not_an_activation_passes_untouched(call):
    x = points(2, 3, 8)
    tape = record(call, x)
    assert tape.calls == ()
    assert torch.equal(tape.output, call(x))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.deep = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(6, 4, 2, stride=2), nn.Conv2d(8, 1, 1)

    def forward(self, x):
        skip = torch.relu(self.down(x))
        deep = F.leaky_relu(self.deep(F.max_pool2d(skip, 2)), 0.1)
        return self.last(torch.cat([skip, F.relu(self.up(deep))], 1)).flatten(1)


class Twice(nn.Module):
    """One module called twice, batch-norm before an in-place relu, residual sums made in place."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.act = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True)
        self.norm.running_mean, self.norm.running_var = torch.randn(6), torch.rand(6) + 0.5

    def forward(self, x):
        first = self.norm(self.layer(x))
        first += x
        second = self.norm(self.layer(self.act(first)))
        second += first
        return self.act(second).sigmoid().softmax(-1)


class TokenMixer(nn.Module):
    """Rows folded into dim 0, and a batch that sits in dim 1."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 5), nn.Linear(5, 3)

    def forward(self, x):
        tokens = torch.relu(self.a(x.reshape(-1, 2)))
        times_first = torch.relu(self.b(tokens).reshape(len(x), 3, 3).transpose(0, 1))
        return times_first.sum(0)


NETWORKS = {
    "MLP": (lambda: MLP((8, 12, 10, 3)), (8,)),
    "GELU MLP": (lambda: MLP((8, 12, 10, 3), nn.GELU), (8,)),
    "VGG": (lambda: VGG((3, 4), in_channels=1), (1, 8, 8)),
    "ResNet-18": (lambda: resnet18(width=2), (3, 8, 8)),
    "1-D CNN": (lambda: SpirometryCNN(length=20, n_blocks=3, channels=4, kernel=6), (20,)),
    "U-net": (UNet, (1, 8, 8)),
    "shared module": (Twice, (6,)),
    "token mixer": (TokenMixer, (6,)),
}


def build(name):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        make, shape = NETWORKS[name]
        network = make().double().eval()
        for module in network.modules():
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
                nn.init.normal_(module.bias)
                nn.init.uniform_(module.weight, 0.5, 2.0)
    return network, points(2, *shape)


@pytest.mark.parametrize("name", NETWORKS)
def test_frozen_networks(name):
    network, x = build(name)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    check_frozen(network, x)
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


@pytest.mark.parametrize("name", ["MLP", "VGG", "ResNet-18", "shared module"])
def test_exported_networks(name):
    network, x = build(name)
    dynamic = {0: torch.export.Dim("batch", min=1, max=64)}
    exported = torch.export.export(network, (x,), dynamic_shapes=(dynamic,)).module()
    assert kinds(exported, x) == kinds(network, x)
    check_frozen(exported, x)
    torch.testing.assert_close(replace(exported, swish(3.0))(x), replace(network, swish(3.0))(x))


def test_calls_are_numbered_in_order_and_shared_modules_told_apart():
    network, x = build("shared module")
    tape = record(network, x)
    assert [call.kind for call in tape.calls] == ["relu", "relu", "smooth", "map"]
    assert not torch.equal(tape.calls[0].pre, tape.calls[1].pre)


def test_sensitivities_of_dead_units_come_from_post():
    network, x = build("MLP")
    tape = record(network, x)
    run = freeze(network, tape, x)
    u = torch.autograd.grad(run.output[:, 0].sum(), run.post)
    last = network.f[4].weight[0].detach()
    torch.testing.assert_close(u[1], last.expand_as(u[1]))
    torch.testing.assert_close(u[0], (last * tape.calls[1].slope) @ network.f[2].weight.detach())


def test_units_differentiate_through_the_frozen_pass():
    network, x = build("MLP")
    tape = record(network, x)
    rows = (x.repeat_interleave(4, 0) + points(8, 8, seed=3)).requires_grad_()
    run = freeze(network, tape, rows)
    weight = points(8, 10, seed=4)
    (pulled,) = torch.autograd.grad((weight * run.pre[1]).sum(), rows)
    mask = (tape.calls[0].pre > 0).double().repeat_interleave(4, 0)
    expected = ((weight @ network.f[2].weight) * mask) @ network.f[0].weight
    torch.testing.assert_close(pulled, expected.detach())


def hand_replaced(network, smooth):
    class Smooth(nn.Module):
        def forward(self, x):
            return smooth(x)

    twin = copy.deepcopy(network)
    for module in list(twin.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, Smooth())
    return twin


@pytest.mark.parametrize("smooth", [softplus(5.0), swish(5.0)], ids=["softplus", "swish"])
@pytest.mark.parametrize("name", ["MLP", "VGG", "ResNet-18", "1-D CNN"])
def test_replacing_equals_a_twin_with_other_modules(name, smooth):
    network, x = build(name)
    twin, replaced = hand_replaced(network, smooth), replace(network, smooth)

    def gradient_and_hvp(forward):
        point = x[:1].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(forward(point)[0, 0], point, create_graph=True)
        return gradient, torch.autograd.grad((gradient * points(*point.shape, seed=2)).sum(), point)[0]

    for got, expected in zip(gradient_and_hvp(replaced), gradient_and_hvp(twin), strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["MLP", "VGG", "ResNet-18", "U-net"])
def test_sharp_softplus_tends_to_the_network(name):
    network, x = build(name)
    errors = [(replace(network, softplus(b))(x) - network(x)).abs().max().item() for b in (10, 100, 1e6)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-4


def test_inplace_calls_leave_their_result_in_the_tensor():
    def forward(x):
        y = 2 * x
        z = F.relu(y, inplace=True)
        assert z is y
        y += 1  # and the recorded values must not follow
        return y * z

    x = points(3, 4)
    tape = record(forward, x)
    torch.testing.assert_close(tape.calls[0].pre, 2 * x)
    run = freeze(forward, tape, x)
    torch.testing.assert_close(run.pre[0], 2 * x)
    torch.testing.assert_close(run.post[0], torch.relu(2 * x))
    torch.testing.assert_close(run.output, forward(x))
    torch.testing.assert_close(replace(forward, swish(1.0))(x), (swish(1.0)(2 * x) + 1) ** 2)


class Stumbles(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.act = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x):
        self.act(self.layer(x))
        raise RuntimeError("stumbled")


@pytest.mark.parametrize("use", ["record", "freeze", "replace"])
def test_nothing_remains_after_an_exception(use):
    network = Stumbles().train()
    state = copy.deepcopy(network.state_dict())
    x = torch.randn(2, 4)
    tape = record(lambda x: network.act(network.layer(x)), x)
    calls = {
        "record": lambda: record(network, x),
        "freeze": lambda: freeze(network, tape, x),
        "replace": lambda: replace(network, swish(1.0))(x),
    }
    with pytest.raises(RuntimeError, match="stumbled"):
        calls[use]()
    assert torch.overrides._get_current_function_mode_stack() == []
    assert torch.equal(torch.relu(x), x.clamp(min=0))
    assert network.training
    assert network.act.training
    assert all(torch.equal(value, network.state_dict()[key]) for key, value in state.items())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in network.modules())
    assert all(p.requires_grad and p.grad is None for p in network.parameters())


def test_opaque_models_are_recognised_and_refused():
    network, x = build("MLP")
    part = nn.Sequential(nn.Linear(8, 8).double(), torch.jit.script(nn.ReLU()))
    opaques: list[Any] = [torch.jit.script(network), torch.jit.trace(network, x), part, torch.compile(network)]
    for opaque in opaques:
        assert is_opaque(opaque)
        with pytest.raises(ValueError, match="scripted or compiled"):
            record(opaque, x)
        with pytest.raises(ValueError, match="scripted or compiled"):
            replace(opaque, swish(1.0))
    assert not is_opaque(network)
    assert not is_opaque(torch.relu)
    scripted = torch.jit.script(network)
    assert is_opaque(lambda x: scripted(x))


def test_a_changed_path_is_an_error():
    network, x = build("MLP")
    tape = record(network, x)
    with pytest.raises(ValueError, match="wants call 0 to be relu of"):
        freeze(MLP((8, 5, 3)).double(), tape, x)
    with pytest.raises(ValueError, match=r"wants call 0 to be relu .* got smooth"):
        freeze(build("GELU MLP")[0], tape, x)
    with pytest.raises(ValueError, match="got another relu"):
        freeze(lambda x: torch.relu(network(x)), tape, x)
    with pytest.raises(ValueError, match="wants the 2 recorded calls, got 0"):
        freeze(lambda x: x, tape, x)
    with pytest.raises(ValueError, match="2 examples"):
        freeze(network, tape, points(3, 8))


def test_recording_works_without_gradients_and_in_other_precisions():
    network, x = build("VGG")
    with torch.no_grad():
        tape = record(network, x)
        run = freeze(network, tape, x)
    torch.testing.assert_close(run.output, network(x).detach())
    assert not run.output.requires_grad
    single = copy.deepcopy(network).float()
    tape = record(single, x.float())
    assert {call.pre.dtype for call in tape.calls} == {torch.float32}
