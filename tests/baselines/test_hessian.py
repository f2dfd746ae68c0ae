"""Baselines that differentiate the model as it is, against torch.func in float64."""

import contextlib
import copy
import warnings
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from smoothhess import Isotropic, SmoothHess, baselines, from_gradient, perturbation_mse
from smoothhess.baselines.hessian_vector_products import HessianProducts
from smoothhess.linalg.memory import ByteLimit
from smoothhess.model.gradients import Oracle
from smoothhess.result.exact import Exact
from tests.truths import OneHidden

pytestmark = pytest.mark.rounding

TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def seeded(build, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build().double().eval()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, activation="gelu", batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.layer(x).mean(1))


NETWORKS = {
    "tanh MLP": (lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), (5,)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
        ),
        (2, 4, 4),
    ),
    "softmax of a ReLU MLP": (
        lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 3), nn.Softmax(-1)),
        (5,),
    ),
    "attention": (Attention, (3, 4)),
}


def truth(f, inputs, columns):
    """Values, gradients and Hessians of one column of f for each example, by torch.func."""
    found = []
    for x, column in zip(inputs, columns, strict=True):
        one = lambda x, column=column: f(x[None])[0, column]
        d = x.numel()
        with sdpa_kernel(SDPBackend.MATH):  # the only attention with a forward derivative
            found.append((one(x), torch.func.grad(one)(x), torch.func.hessian(one)(x).reshape(d, d)))
    return tuple(torch.stack(part).detach() for part in zip(*found, strict=True))


@pytest.mark.parametrize("name", NETWORKS)
class TestHessian:
    def test_against_torch_func(self, name):
        build, shape = NETWORKS[name]
        net, x = seeded(build), draw(4, *shape)
        columns = [2, 0, 1, 2]
        value, slope, hessian = truth(net, x, columns)
        result = baselines.hessian(net, x, target=columns)
        torch.testing.assert_close(result.output, value, **TIGHT)
        torch.testing.assert_close(result.value, value, **TIGHT)
        torch.testing.assert_close(result.gradient, slope, **TIGHT)
        torch.testing.assert_close(result.hessian, hessian, **TIGHT)
        assert (result.method, result.note) == ("hessian", "")
        assert result.target.tolist() == [[c] for c in columns]
        d = x[0].numel()
        assert torch.equal(result.n_passes, torch.full((4,), 1.0 + 1 + 2 + 1 + d).double())  # ∇f, a probe, d products

    def test_operator_and_groups(self, name):
        build, shape = NETWORKS[name]
        net, x = seeded(build), draw(3, *shape)
        hessian = truth(net, x, [1, 1, 1])[2]
        operator = baselines.hessian(net, x, target=1, dense=False)
        assert callable(operator.derivatives.curvature)
        v = draw(x[0].numel(), seed=1)
        torch.testing.assert_close(operator @ v, hessian @ v, **TIGHT)
        torch.testing.assert_close(operator[[2, 0, 2]] @ v, hessian[[2, 0, 2]] @ v, **TIGHT)
        mask = torch.arange(x[0].numel()).reshape(shape) % 3
        p = functional.one_hot(mask.flatten()).double()
        groups = baselines.hessian(net, x, target=1, feature_mask=mask)
        torch.testing.assert_close(groups.hessian, p.mT @ hessian @ p, **TIGHT)
        torch.testing.assert_close(operator.hessian, hessian, **TIGHT)
        assert torch.equal(groups.n_passes, torch.full((3,), 1.0 + 1 + 2 + 1 + 3).double())

    @pytest.mark.parametrize("rows", [1, 2, 7])
    def test_any_batch_size(self, name, rows):
        build, shape = NETWORKS[name]
        net, x = seeded(build), draw(3, *shape)
        whole = baselines.hessian(net, x, target=1)
        parts = baselines.hessian(net, x, target=1, internal_batch_size=rows)
        torch.testing.assert_close(parts.hessian, whole.hessian, **TIGHT)
        torch.testing.assert_close(parts.gradient, whole.gradient, **TIGHT)


class TestZeroHessian:
    @pytest.mark.parametrize("grad", [True, False])
    def test_logits_of_a_relu_network(self, grad):
        net = seeded(lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))).requires_grad_(grad)
        x = draw(2, 5)
        with pytest.warns(UserWarning, match="the Hessian is exactly zero: .* SmoothHess"):
            result = baselines.hessian(net, x, target=1)
        assert "exactly zero" in result.note
        assert result.derivatives.curvature is None
        assert not result.hessian.any()
        torch.testing.assert_close(result.gradient, truth(net, x, [1, 1])[1], **TIGHT)

    def test_normalisation_and_pooling_do_not_hide_it(self):
        build = lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.LeakyReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3, 1)
        )
        with pytest.warns(UserWarning, match="exactly zero"):
            assert baselines.hessian(seeded(build), draw(1, 1, 4, 4)).derivatives.curvature is None

    def test_a_gradient_that_is_given(self):
        f = from_gradient(lambda x: ((x**2).sum(1), 2 * x))
        with pytest.warns(UserWarning, match="not differentiable code"):
            baselines.hessian(f, draw(1, 3))

    def test_groups_of_it(self):
        net = seeded(lambda: nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 1)))
        with pytest.warns(UserWarning, match="exactly zero"):
            groups = baselines.hessian(net, draw(2, 4), feature_mask=torch.tensor([0, 0, 1, 1]))
        assert groups.shape == (2, 2, 2)
        assert groups.note

    def test_one_curved_example_is_enough(self):
        f = lambda x: torch.relu(x[:, 0]) ** 2
        x = torch.tensor([[-1.0, 0.0], [1.0, 0.0]])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = baselines.hessian(f, x)
        assert torch.equal(result.hessian, torch.tensor([[[0.0, 0], [0, 0]], [[2.0, 0], [0, 0]]]))


class TestProducts:
    def make(self, f, x, rows=None):
        oracle = Oracle(f, x)
        return HessianProducts(oracle, x, f, rows)

    def test_steps_that_cannot_go_together_go_one_by_one(self):
        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x**2

            @staticmethod
            def backward(ctx, g):
                (x,) = ctx.saved_tensors
                return Twice.apply(g, x)

        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, g, x):
                ctx.save_for_backward(g, x)
                return 2 * g * x

            @staticmethod
            def backward(ctx, u):
                g, x = ctx.saved_tensors
                assert float(u.abs().max()) >= 0  # no such number while directions go together
                return 2 * u * x, 2 * u * g

        f, x = lambda x: Square.apply(x).sum(1) * x[:, 0], draw(3, 4)
        products = self.make(f, x)
        hessian = torch.stack([torch.func.hessian(lambda x: (x**2).sum() * x[0])(row) for row in x])
        torch.testing.assert_close(products.dense(), hessian, **TIGHT)
        assert not products.batched
        assert products.passes == 3 * (1 + 4 + 2 * 4)
        torch.testing.assert_close(self.make(f, x, 2).dense(), hessian, **TIGHT)

    def test_a_gradient_that_has_none_says_so(self):
        class Once(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x**2

            @staticmethod
            @torch.autograd.function.once_differentiable
            def backward(ctx, g):
                return 2 * g * ctx.saved_tensors[0]

        message = "cannot be differentiated again: .*once_differentiable.*SmoothHess, which needs only gradients"
        for f in (lambda x: Once.apply(x).sum(1) ** 2, lambda x: Once.apply(x).sum(1) ** 2 + x.prod(1)):
            with pytest.raises(ValueError, match=message):  # torch itself leaves the step out, and says nothing
                baselines.hessian(f, draw(2, 3))

    def test_an_operator_without_a_second_derivative(self):
        f = lambda x: torch.segment_reduce(x.mT.contiguous(), "max", lengths=torch.tensor([3]), axis=0)[0] ** 2
        with pytest.raises(ValueError, match="cannot be differentiated again: .*segment_reduce"):
            baselines.hessian(f, draw(2, 3))

    def test_infinite_second_derivatives(self):
        with pytest.raises(ValueError, match="second derivative is NaN or infinite"):
            baselines.hessian(lambda x: x.abs().pow(1.5).sum(1), torch.zeros(1, 2))

    def test_memory_that_runs_out_makes_smaller_batches(self):
        seen = []

        def f(x):
            seen.append(len(x))
            if len(x) > 2:
                raise torch.OutOfMemoryError("not enough memory")
            return x.prod(1)

        x = draw(7, 3)
        expected = self.make(lambda x: x.prod(1), x).dense()
        products = self.make(f, x)
        torch.testing.assert_close(products.dense(), expected, **TIGHT)
        assert max(seen) == 7
        assert seen[-1] <= 2
        assert products.rows is not None

    def test_memory_that_is_never_enough(self):
        def f(x):
            raise torch.OutOfMemoryError("not enough memory")

        with pytest.raises(torch.OutOfMemoryError):
            self.make(f, draw(2, 3)).dense()


def test_gradient():
    net, x = seeded(NETWORKS["convolutions"][0]), draw(3, 2, 4, 4)
    result = baselines.gradient(net, x, target=[0, 2, 1], internal_batch_size=2)
    value, slope, _ = truth(net, x, [0, 2, 1])
    torch.testing.assert_close(result.output, value, **TIGHT)
    torch.testing.assert_close(result.gradient, slope, **TIGHT)
    assert not result.hessian.any()
    assert torch.equal(result.n_passes, torch.ones(3).double())
    assert result.method == "gradient"


def test_a_quadratic_is_its_own_surrogate():
    a = draw(4, 4)
    f = lambda x: torch.einsum("bi,ij,bj->b", x, a, x) + x.sum(1)
    x = draw(3, 4, seed=1)
    assert bool((perturbation_mse(f, x, baselines.hessian(f, x).taylor(), 1.0, n_samples=50) < 1e-24).all())


class TestSmoothgrad:
    def test_is_the_gradient_of_the_estimator(self):
        f, x = OneHidden(6), draw(2, 6)
        options = {"sigma": 0.5, "n_calls": 400, "seed": [3, 5]}
        found = baselines.smoothgrad(f, x, **options)
        sampled = SmoothHess(f).attribute(x, shrink=False, **options)
        for name in ("gradient", "gradient_stderr", "value", "value_stderr", "output", "n_calls", "n_passes"):
            assert torch.equal(getattr(found, name), getattr(sampled, name)), name
        assert found.seed == (3, 5)
        assert found.gaussian.same_as(Isotropic(0.5))
        assert found.control == sampled.control
        assert not found.hessian.any()
        assert isinstance(found, Exact)
        again = found[1]
        assert torch.equal(again.value_stderr, found.value_stderr[1:])

    def test_against_the_closed_form(self):
        f, x = OneHidden(6), draw(20, 6)
        found = baselines.smoothgrad(f, x, sigma=0.5, n_calls=1000, control=None, seed=list(range(20)))
        z = (found.gradient - f.truth(x, Isotropic(0.5)).gradient) / found.gradient_stderr
        assert z.abs().max() < 5
        assert 0.8 < z.square().mean() < 1.2

    def test_group_sums_with_their_own_error(self):
        f, x, mask = OneHidden(6), draw(2, 6), torch.tensor([0, 0, 1, 1, 2, 2])
        found = baselines.smoothgrad(f, x, sigma=0.5, n_calls=400, control=None, feature_mask=mask)
        later = baselines.smoothgrad(f, x, sigma=0.5, n_calls=400, control=None).groups(mask)
        torch.testing.assert_close(found.gradient, later.gradient, **TIGHT)
        assert bool((found.gradient_stderr <= later.gradient_stderr).all())

    def test_round_trip(self, tmp_path):
        found = baselines.smoothgrad(OneHidden(6), draw(2, 6), radius=0.5, n_calls=40)
        found.save(tmp_path / "r.safetensors")
        again = Exact.load(tmp_path / "r.safetensors")
        assert torch.equal(again.gradient_stderr, found.gradient_stderr)
        assert torch.equal(again.value_stderr, found.value_stderr)
        assert torch.equal(again.n_calls, found.n_calls)

    def test_how_far_must_be_said(self):
        with pytest.raises(ValueError, match="exactly one of sigma"):
            baselines.smoothgrad(OneHidden(6), draw(2, 6))


class TestRandom:
    def test_length_and_direction(self):
        f, x = OneHidden(50), draw(400, 50)
        found, slope = baselines.random(f, x, seed=1), baselines.gradient(f, x).gradient
        torch.testing.assert_close(found.gradient.norm(dim=1), slope.norm(dim=1), **TIGHT)
        cosine = functional.cosine_similarity(found.gradient, slope)
        assert abs(float(cosine.mean())) < 5 / (50 * 400) ** 0.5  # cos has variance 1/d
        assert 0.7 < 50 * float(cosine.square().mean()) < 1.3
        assert not found.hessian.any()

    def test_the_seed_says_it_all(self):
        assert torch.equal(*(baselines.random(OneHidden(5), draw(3, 5), seed=s).gradient for s in (1, np.int64(1))))
        f, x = OneHidden(5), draw(3, 5)
        state = torch.random.get_rng_state()
        first, again, other = (baselines.random(f, x, seed=s).gradient for s in (1, 1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert torch.equal(torch.random.get_rng_state(), state)
        alone = torch.cat([baselines.random(f, x[i : i + 1], seed=[s]).gradient for i, s in enumerate((4, 7, 1))])
        torch.testing.assert_close(alone, baselines.random(f, x, seed=[4, 7, 1]).gradient, **TIGHT)
        with pytest.raises(ValueError, match="one per example: 3, got 2"):
            baselines.random(f, x, seed=[1, 2])


ALL = {
    "gradient": baselines.gradient,
    "hessian": baselines.hessian,
    "softplus": lambda *args, **options: baselines.softplus(*args, beta=3.0, **options),
    "swish": lambda *args, **options: baselines.swish(*args, beta=3.0, **options),
    "smoothgrad": lambda *args, **options: baselines.smoothgrad(*args, sigma=0.1, n_calls=20, **options),
    "random": baselines.random,
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.filterwarnings("ignore:the Hessian is exactly zero")
class TestAll:
    def net(self):
        return seeded(lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)))

    def test_the_model_is_given_back(self, name):
        net, x = self.net(), draw(2, 5).requires_grad_()
        net[0].weight.requires_grad_(False)
        before, hooks = copy.deepcopy(net.state_dict()), dict(net[2]._forward_hooks)
        flags = [p.requires_grad for p in net.parameters()]
        state = torch.random.get_rng_state()
        with torch.no_grad():
            result = ALL[name](net, x, target=1)
        assert isinstance(result, Exact)
        assert not result.gradient.requires_grad
        assert not result.inputs.requires_grad
        assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
        assert [p.requires_grad for p in net.parameters()] == flags
        assert all(p.grad is None for p in net.parameters())
        assert x.grad is None
        assert dict(net[2]._forward_hooks) == hooks
        assert torch.equal(torch.random.get_rng_state(), state)
        assert not net.training

    def test_also_after_an_error(self, name):
        class Counting(nn.Module):
            def __init__(self, net, most):
                super().__init__()
                self.net, self.most = net, most
                self.register_buffer("calls", torch.zeros((), dtype=torch.long))

            def forward(self, x):
                self.calls += 1
                if self.calls > self.most:
                    raise KeyError("enough")
                return self.net(x)

        for most in (0, 1, 2):
            model = Counting(self.net(), most)
            state = torch.random.get_rng_state()
            with contextlib.suppress(KeyError):  # some need one call, others many
                ALL[name](model, draw(2, 5), target=1)
            assert int(model.calls) == 0
            assert torch.equal(torch.random.get_rng_state(), state)
            with torch.no_grad():
                relu = torch.relu(torch.tensor([-1.0]))
            assert torch.equal(relu, torch.zeros(1))  # nothing is intercepted any more

    def test_targets_and_arguments_follow_their_example(self, name):
        net = self.net()
        f = lambda x, scale, shift: net(x * scale) + shift
        x, scale = draw(3, 5), torch.tensor([[1.0], [2.0], [3.0]]).double()
        columns = torch.tensor([2, 0, 1])
        whole = ALL[name](f, x, columns, (scale, 0.5), internal_batch_size=2)
        for i in range(3):
            seed = {"seed": [i]} if name == "random" else {}
            alone = ALL[name](f, x[i : i + 1], int(columns[i]), (scale[i : i + 1], 0.5), **seed)
            torch.testing.assert_close(whole.output[i : i + 1], alone.output, **TIGHT)
            if name != "random":
                torch.testing.assert_close(whole.gradient[i : i + 1], alone.gradient, **TIGHT)
            torch.testing.assert_close(whole.hessian[i : i + 1], alone.hessian, **TIGHT)

    def test_dtype_follows_the_inputs(self, name):
        result = ALL[name](self.net().float(), draw(2, 5).float(), target=0)
        assert result.gradient.dtype == result.hessian.dtype == result.output.dtype == torch.float32

    def test_what_is_refused(self, name):
        net, x = self.net(), draw(2, 5)
        with pytest.raises(ValueError, match="without a target the output must be"):
            ALL[name](net, x)
        with pytest.raises(ValueError, match="out of range"):
            ALL[name](net, x, target=3)
        with pytest.raises(ValueError, match="NaN or infinity"):
            ALL[name](net, x * torch.nan, target=0)
        with pytest.raises(TypeError, match="must be float32 or float64"):
            ALL[name](net, x.long(), target=0)
        with pytest.raises(ValueError, match="internal_batch_size"):
            ALL[name](net, x, target=0, internal_batch_size=0)
        with pytest.raises(ValueError, match="in training mode"):
            ALL[name](self.net().train(), x, target=0)


def test_matrices_that_do_not_fit_are_operators(monkeypatch):
    f, x = lambda x: x.prod(1), draw(2, 4)
    expected = baselines.hessian(f, x).hessian
    for name, limit in (("MATRIX_FEATURES", 3), ("DENSE_HESSIANS", ByteLimit(8 * 31))):
        monkeypatch.setattr(import_module("smoothhess.baselines.hessian"), name, limit)
        result = baselines.hessian(f, x)
        assert callable(result.derivatives.curvature)
        torch.testing.assert_close(result.hessian, expected, **TIGHT)
        assert isinstance(baselines.hessian(f, x, dense=True).derivatives.curvature, torch.Tensor)
        monkeypatch.undo()
    with pytest.raises(TypeError, match="dense must be True, False or None"):
        baselines.hessian(f, x, dense="yes")
