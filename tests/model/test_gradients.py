"""Targets, additional arguments, neurons, memory, other frameworks."""

import numpy as np
import pytest
import torch
from captum.attr import NeuronGradient
from torch import nn

from smoothhess import NeuronSmoothHess, SmoothHess, baselines, from_gradient
from smoothhess.curvature.one_flip import Kinks
from smoothhess.explainers.adaptive import Run
from smoothhess.linalg.memory import ByteLimit, is_out_of_memory
from smoothhess.model.gradients import Oracle
from smoothhess.model.layer_functions import Neuron
from tests.truths import Plain


def net(out=4, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, out)).double()


X = torch.linspace(-1, 1, 15).reshape(3, 5).double()
OWNER = torch.arange(3)


def by_autograd(f, x):
    """Row by row, the slow and plain way."""
    rows = [x[i : i + 1].clone().requires_grad_() for i in range(len(x))]
    values = [f(r, i) for i, r in enumerate(rows)]
    return torch.stack([v.detach() for v in values]), torch.cat(
        [torch.autograd.grad(v, r)[0] for v, r in zip(values, rows, strict=True)]
    )


@pytest.mark.parametrize(
    ("target", "index"),
    [
        (2, [2, 2, 2]),
        (-1, [3, 3, 3]),
        ([0, 1, 2], [0, 1, 2]),
        (torch.tensor([3, 0, 1]), [3, 0, 1]),
        (torch.tensor([2]), [2, 2, 2]),
        (torch.tensor(1), [1, 1, 1]),
        (np.int64(1), [1, 1, 1]),
        ([(1,), (0,), (2,)], [1, 0, 2]),
        (np.array([3, 0, 1]), [3, 0, 1]),
        ([torch.tensor(1), torch.tensor(2), torch.tensor(0)], [1, 2, 0]),
    ],
)
def test_targets(target, index):
    f = net()
    value, gradient = Oracle(f, X, target)(X, OWNER)
    expected = by_autograd(lambda r, i: f(r)[0, index[i]], X)
    torch.testing.assert_close(value, expected[0])
    torch.testing.assert_close(gradient, expected[1])


def test_targets_in_outputs_of_more_dimensions():
    f = net(6)
    shaped = lambda x: f(x).reshape(-1, 2, 3)
    value, _ = Oracle(shaped, X, (1, 2))(X, OWNER)
    torch.testing.assert_close(value, f(X)[:, 5].detach())
    value, _ = Oracle(shaped, X, [(0, 0), (1, 2), (0, 1)])(X, OWNER)
    torch.testing.assert_close(value, f(X)[OWNER, torch.tensor([0, 5, 1])].detach())


@pytest.mark.parametrize("f", [lambda x: x.sum(1), lambda x: x.sum(1, keepdim=True)])
def test_scalar_outputs_need_no_target(f):
    assert Oracle(f, X)(X, OWNER)[0].shape == (3,)


@pytest.mark.parametrize(
    ("target", "error", "text"),
    [
        (None, ValueError, r"without a target the output must be \(N,\) or \(N, 1\), got \(3, 4\). Pass target="),
        (4, ValueError, r"target 4 is out of range for an output of shape \(3, 4\)"),
        ([0, 1], ValueError, "got 2 targets for 3 examples"),
        ([], ValueError, "target is empty"),
        ((0, 1), ValueError, r"target has 2 index\(es\) per example but the output has shape \(3, 4\). Expected 1"),
        (torch.tensor([0.5]), TypeError, "must hold integers"),
        ("cat", TypeError, "target must be None, an int, .* got str"),
        (True, TypeError, "got bool"),
        ([0.9, 1.7, 2.2], TypeError, "must hold ints, or tuples of ints"),
        ([[0], [1], [2]], TypeError, "must hold ints, or tuples of ints"),
        ([(0,), (1, 1), (0,)], ValueError, "same number of output dimensions"),
        (torch.zeros(3, 2, dtype=torch.long), ValueError, "one index per example"),
    ],
)
def test_bad_targets(target, error, text):
    with pytest.raises(error, match=text):
        Oracle(net(), X, target)(X, OWNER)


def test_scalar_output_refuses_a_target():
    with pytest.raises(ValueError, match="Pass target=None"):
        Oracle(lambda x: x.sum(1), X, 0)(X, OWNER)


def test_additional_arguments_follow_their_example():
    scale = torch.tensor([1.0, 2.0, 3.0]).double()
    f = lambda x, s, power, flag: (x**power * s[:, None]).sum(1) if flag else x.sum(1)
    points = X.repeat_interleave(2, 0)
    value, gradient = Oracle(f, X, None, (scale, 2, True), 4)(points, OWNER.repeat_interleave(2))
    torch.testing.assert_close(value, (X**2).sum(1).mul(scale).repeat_interleave(2))
    torch.testing.assert_close(gradient, (2 * X * scale[:, None]).repeat_interleave(2, 0))


def test_any_batch_size_gives_the_same():
    f = net()
    whole = Oracle(f, X, 0)(X, OWNER)
    for size in (1, 2, 3, 100):
        for a, b in zip(Oracle(f, X, 0, None, size)(X, OWNER), whole, strict=True):
            torch.testing.assert_close(a, b)


def test_backs_off_when_memory_runs_out_and_keeps_the_batch():
    sizes = []

    def greedy(x):
        sizes.append(len(x))
        if len(x) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x.sum(1)

    points = torch.randn(40, 5).double()
    oracle = Oracle(greedy, X, None, None, 32)
    value, _ = oracle(points, torch.zeros(40, dtype=torch.long))
    torch.testing.assert_close(value, points.sum(1))
    assert oracle.batch_size == 4
    assert sizes == [32, 16, 8] + [4] * 10
    with pytest.raises(torch.OutOfMemoryError):
        Oracle(lambda x: greedy(torch.zeros(9)), X)(X, OWNER)


def test_counts_its_gradient_calls():
    oracle = Oracle(net(), X, 0, None, 2)
    oracle(X, OWNER)
    oracle(X[:2], OWNER[:2])
    oracle.values(X, OWNER)
    assert oracle.n_rows == 5


def test_other_runtime_errors_are_the_models_own():
    def broken(x):
        raise RuntimeError("shape '[3]' is invalid")

    with pytest.raises(RuntimeError, match="is invalid"):
        Oracle(broken, X)(X, OWNER)


@pytest.mark.parametrize(
    ("f", "text"),
    [
        (lambda x: x.detach().sum(1), "does not depend on the input through differentiable"),
        (lambda x: torch.ones(len(x), requires_grad=True), "does not depend on the input"),
        (lambda x: x.sum(1) / 0, "output is NaN or infinite"),
        (lambda x: (x * 0).sqrt().sum(1), "gradient is NaN or infinite"),
        (lambda x: x.sum(1)[:2], "returned 2 rows for 3 inputs"),
    ],
)
def test_bad_models(f, text):
    with pytest.raises(ValueError, match=text):
        Oracle(f, X)(X, OWNER)


def test_output_must_be_a_tensor():
    with pytest.raises(TypeError, match="must return one tensor, got tuple"):
        Oracle(lambda x: (x, x), X)(X, OWNER)


def test_a_model_that_works_in_place_on_its_input():
    x = X.clone()
    value, gradient = Oracle(lambda r: r.mul_(2).sum(1), x)(x, OWNER)
    assert torch.equal(x, X)
    torch.testing.assert_close(gradient, torch.full_like(X, 2.0))
    torch.testing.assert_close(value, 2 * X.sum(1))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(3 * 16, 2)

    def forward(self, x):
        return self.head(self.relu(self.conv(x)).flatten(1))


@pytest.mark.parametrize("to_input", [False, True])
def test_neurons_agree_with_captum(to_input):
    model = net()
    captum = NeuronGradient(model, model[1])
    expected = captum.attribute(X.clone().requires_grad_(), 4, attribute_to_neuron_input=to_input)
    _, gradient = Oracle(Neuron(model, model[1], 4, to_input), X)(X, OWNER)
    torch.testing.assert_close(gradient, expected.detach())


def test_conv_maps_and_in_place_activations():
    """The output of the convolution is a pre-activation although an in-place ReLU follows."""
    model = ConvNet().double().eval()
    x = torch.randn(2, 1, 4, 4).double()
    pre = model.conv(x).detach()
    value, _ = Oracle(Neuron(model, "conv", (2, 1, 3)), x)(x, torch.arange(2))
    torch.testing.assert_close(value, pre[:, 2, 1, 3])
    value, _ = Oracle(Neuron(model, model.relu, (0, slice(None), slice(0, 2)), True), x)(x, torch.arange(2))
    torch.testing.assert_close(value, pre[:, 0, :, :2].sum((1, 2)))
    value, _ = Oracle(Neuron(model, "conv", lambda c: c.mean((1, 2, 3))), x)(x, torch.arange(2))
    torch.testing.assert_close(value, pre.mean((1, 2, 3)))


def test_the_hook_is_always_removed():
    model = ConvNet().double()

    def broken(x):
        model(x)
        raise KeyError("midway")

    neuron = Neuron(broken, model.conv, (0, 0, 0))
    with pytest.raises(KeyError):
        neuron(torch.zeros(1, 1, 4, 4).double())
    assert not model.conv._forward_hooks
    NeuronSmoothHess(model, "conv").attribute(torch.zeros(1, 1, 4, 4).double(), (0, 1, 1), sigma=1.0, n_calls=10)
    assert not model.conv._forward_hooks


@pytest.mark.parametrize(
    ("layer", "selector", "text"),
    [
        ("0", 99, r"neuron_selector 99 is out of range"),
        ("0", (1, 2), r"must have 1 index\(es\)"),
        ("0", lambda t: t, "must return one number per row"),
        ("nothing", 0, "no layer is called 'nothing'. The model has 0, 1, 2"),
    ],
)
def test_bad_neurons(layer, selector, text):
    with pytest.raises(ValueError, match=text):
        Oracle(Neuron(net(), layer, selector), X)(X, OWNER)


def test_a_layer_that_runs_twice_or_never_is_refused():
    layer, other = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()
    with pytest.raises(ValueError, match="ran 2 times"):
        Neuron(lambda x: layer(layer(x)), layer, 0)(X)
    with pytest.raises(ValueError, match="ran 0 times .* Is it part of this model"):
        Neuron(layer, other, 0)(X)
    with pytest.raises(TypeError, match="by name only when"):
        Neuron(lambda x: x, "conv", 0)
    with pytest.raises(TypeError, match="layer must be"):
        Neuron(layer, 3, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("numpy", [True, False])
def test_gradients_of_another_framework(numpy):
    model = net(1)

    def value_and_gradient(points):
        leaf = torch.as_tensor(points).clone().requires_grad_()
        value = model(leaf)[:, 0]
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        assert isinstance(points, np.ndarray) == numpy
        return (value.detach().numpy(), gradient.numpy()) if numpy else (value.detach(), gradient)

    options = {"sigma": 0.5, "n_calls": 100}
    given = Plain(from_gradient(value_and_gradient, numpy=numpy)).attribute(X, **options)
    torch.testing.assert_close(given.hessian, Plain(model).attribute(X, **options).hessian)


def test_bad_gradient_functions():
    for fn, text in [(lambda x: x, "must return a pair"), (lambda x: (x.sum(1), x[:, :2]), "gradients .*got")]:
        with pytest.raises(ValueError, match=text):
            from_gradient(fn)(X.requires_grad_(False))
    with pytest.raises(TypeError, match="wants a function"):
        from_gradient(3)  # type: ignore[arg-type]


def test_the_batch_follows_what_a_row_takes_inside_the_model(monkeypatch):
    """A wide model of a small input must not be given thousands of rows at once."""
    seen = []

    class Wide(nn.Module):
        def forward(self, x):
            seen.append(len(x))
            return x.repeat(1, 1000).exp().tanh().sum(1)

    monkeypatch.setattr("smoothhess.model.gradients.SAVED_ACTIVATIONS", ByteLimit(1 << 20))
    x = torch.zeros(1, 10)
    Plain(Wide()).attribute(x, sigma=0.1, n_calls=400)
    assert max(seen) <= 32
    seen.clear()
    Plain(Wide()).attribute(x, sigma=0.1, n_calls=400, internal_batch_size=300)
    assert max(seen) > 100


class Greedy(nn.Module):
    """Takes eight rows at once, and counts what it is asked for."""

    def __init__(self):
        super().__init__()
        self.inner, self.sizes = net(), []

    def forward(self, x):
        self.sizes.append(len(x))
        if len(x) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.inner(x)


@pytest.mark.parametrize("control", [None, "kink"])
def test_an_explainer_finds_the_largest_batch_once(control):
    """Frozen passes included: the closed form and the flips back off as well."""
    model = Greedy()
    explainer = SmoothHess(model)
    first = explainer.attribute(X, 0, sigma=0.5, n_calls=40, control=control)
    assert max(model.sizes) > 8
    model.sizes.clear()
    again = explainer.attribute(X, 0, sigma=0.5, n_calls=40, control=control)
    assert max(model.sizes) <= 8
    torch.testing.assert_close(again.hessian, first.hessian)
    torch.testing.assert_close(
        first.hessian, SmoothHess(model.inner).attribute(X, 0, sigma=0.5, n_calls=40, control=control).hessian
    )


def test_what_is_not_finite_is_refused_when_the_rows_are_done():
    calls = []

    def f(x):
        calls.append(len(x))
        return torch.where(x[:, 0] > 1.0, torch.nan, 1.0) * x.sum(1)

    oracle = Oracle(f, X)
    oracle(torch.full((1, 5), 2.0).double(), OWNER[:1], wait=False)
    with pytest.raises(ValueError, match="output is NaN or infinite"):
        oracle.refuse_infinite()
    oracle.refuse_infinite()  # said once
    with pytest.raises(ValueError, match="output is NaN or infinite"):
        SmoothHess(f).attribute(torch.zeros(1, 5), sigma=1.0, n_calls=64)


def test_rows_that_did_not_fit_are_forgotten_with_the_run_that_failed():
    busy, sizes = [True], []

    def f(x):
        sizes.append(len(x))
        if busy[0] and len(sizes) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return x.square().sum(1)

    explainer = SmoothHess(f)
    with pytest.raises(torch.OutOfMemoryError):
        explainer.attribute(torch.zeros(1, 8), sigma=0.1, n_calls=64, control=None)
    busy[0] = False
    explainer.attribute(torch.zeros(1, 8), sigma=0.1, n_calls=2000, control=None)
    assert max(sizes) > 100


class Crowded(nn.Module):
    """Cannot be frozen for more than three examples at once, and counts how many it was asked for."""

    def __init__(self, most=3):
        super().__init__()
        self.inner, self.most, self.frozen = net(), most, []

    def forward(self, x, scale, shared):
        return self.inner(x) * scale[:, None] + shared.sum()


@pytest.mark.parametrize("seed", [0, range(7)])
@pytest.mark.parametrize("mask", [None, torch.tensor([0, 0, 1, 1, 2]), torch.arange(35).reshape(7, 5) % 3])
def test_examples_that_do_not_fit_together_go_in_parts(monkeypatch, seed, mask):
    """Targets, arguments, groups and seeds follow their example; an argument with as many rows as a part does not."""
    model, see = Crowded(), Kinks.see

    def crowded(oracle, inputs, *rest):
        model.frozen.append(len(inputs))
        if len(inputs) > model.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return see(oracle, inputs, *rest)

    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(2)).double()
    args = torch.linspace(1, 2, 7).double(), torch.ones(2).double()
    target, options = [0, 1, 0, 1, 0, 1, 1], {"sigma": 0.5, "tol": 0.3, "seed": seed, "feature_mask": mask}
    expected = SmoothHess(model).attribute(x, target, args, control="kink", **options)
    monkeypatch.setattr(Kinks, "see", staticmethod(crowded))
    explainer = SmoothHess(model)
    found = explainer.attribute(x, target, args, control="kink", **options)
    assert model.frozen == [7, 4, 2, 2, 2, 1]
    for name in ("hessian", "gradient", "relative_error", "n_calls", "output", "target", "n_passes"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    assert found.status == expected.status
    model.frozen.clear()
    again = explainer.attribute(x, target, args, control="kink", **options)
    assert model.frozen == [2, 2, 2, 1]  # found once
    torch.testing.assert_close(again.hessian, expected.hessian)
    grown = SmoothHess(model).more(found, 40, args)
    assert model.frozen[4:] == [7, 4, 2, 2, 2, 1]
    monkeypatch.setattr(Kinks, "see", staticmethod(see))
    for name in ("hessian", "n_calls", "n_passes"):
        torch.testing.assert_close(getattr(grown, name), getattr(SmoothHess(model).more(expected, 40, args), name))
    monkeypatch.setattr(Kinks, "see", staticmethod(crowded))
    model.most = 0
    with pytest.raises(torch.OutOfMemoryError):
        explainer.attribute(x, target, args, control="kink", **options)


def test_room_that_other_examples_took_is_not_taken_for_what_a_row_takes(monkeypatch):
    """Parts find their own batch, and a run that fails leaves nothing behind."""
    together, most, sizes, runs, start = [0], [3], [], [], Run.start

    def crowded(x):
        if together[0] > most[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        sizes.append(len(x))
        return x.square().sum(1)

    def watched(self):
        together[0] = len(self.seeds)
        runs.append(together[0])
        return start(self)

    monkeypatch.setattr(Run, "start", watched)
    explainer, x = SmoothHess(crowded), torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    options = {"sigma": 0.3, "n_calls": 400, "control": None}
    explainer.attribute(x, **options)
    assert runs == [7, 4, 2, 2, 2, 1]
    assert max(sizes) > 300
    most[0] = 0
    with pytest.raises(torch.OutOfMemoryError):
        explainer.attribute(x, **options)
    most[0] = 100
    runs.clear()
    explainer.attribute(x, **options)
    assert runs == [7]


def test_what_a_cpu_says_when_its_memory_ends():
    with pytest.raises(RuntimeError) as said:
        torch.empty(1 << 50)
    assert is_out_of_memory(said.value)


class Sloped(nn.Module):
    """A model with a derivative inside, by torch.func or by autograd."""

    def __init__(self, functional):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 9), nn.Softplus(), nn.Linear(9, 1)).double()
        self.functional = functional

    def forward(self, x):
        if self.functional:
            slope = torch.func.grad(lambda x: self.net(x).sum())(x)
        else:
            x = x if x.requires_grad else x.requires_grad_()
            (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return slope.square().sum(1)


def test_models_whose_graph_cannot_be_watched():
    """torch.func.grad refuses the hooks that tell what a pass keeps."""
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)).double()
    with pytest.warns(UserWarning, match="recording or freezing the activations fails"):
        found = SmoothHess(Sloped(True).eval()).attribute(x, sigma=0.5, n_calls=32)
    expected = SmoothHess(Sloped(False).eval()).attribute(x, sigma=0.5, n_calls=32)
    torch.testing.assert_close(found.hessian, expected.hessian)
    found, expected = (baselines.hessian(Sloped(f).eval(), x).hessian for f in (True, False))
    torch.testing.assert_close(found, expected)
