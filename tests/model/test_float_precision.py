"""Less exact model calls: measured, said, and never leaking into the rest."""

import pytest
import torch
from torch import nn

from benchmarks.small_transformers import SHAPES, Shape, Transformer
from smoothhess import Interactions, SmoothHess, TokenSmoothHess
from smoothhess.model.gradients import Oracle

pytestmark = pytest.mark.rounding


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3)).eval()


X = torch.randn(2, 10, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("control", [None, "kink"])
def test_bf16_is_measured_and_seen_by_the_error_bars(control, tmp_path):
    model, options = net(), {"sigma": 0.2, "n_calls": 400, "control": control, "shrink": False}
    exact = SmoothHess(model).attribute(X, 1, **options)
    rounded = SmoothHess(model).attribute(X, 1, precision="bf16", **options)
    assert exact.precision_error is None
    assert ((rounded.precision_error > 1e-3) & (rounded.precision_error < 0.5)).all()
    assert rounded.hessian.dtype == torch.float32
    assert not torch.equal(exact.hessian, rounded.hessian)
    z = (rounded.hessian - exact.hessian).abs() / (rounded.stderr() + exact.stderr())
    assert z.max() < 5
    assert float((rounded.hessian - exact.hessian).norm() / exact.hessian.norm()) < 0.2
    rounded.save(tmp_path / "r")
    again = Interactions.load(tmp_path / "r")
    assert again.precision == "bf16"
    torch.testing.assert_close(again.precision_error, rounded.precision_error)
    assert SmoothHess(model).more(again, 40).precision == "bf16"
    assert ", bf16 (noise up to" in repr(rounded)
    with pytest.raises(ValueError, match="differ in precision"):
        rounded.merge(SmoothHess(model).attribute(X, 1, seed=1, **options))


def test_bad_precision():
    with pytest.raises(ValueError, match="precision must be one of 'float32', 'tf32', 'bf16', 'fp16', got 'half'"):
        SmoothHess(net()).attribute(X, 1, sigma=0.2, n_calls=20, precision="half")
    with pytest.raises(ValueError, match="is a mode of CUDA devices"):
        SmoothHess(net()).attribute(X, 1, sigma=0.2, n_calls=20, precision="tf32")
    with pytest.raises(ValueError, match="is for float32 inputs and models"):
        SmoothHess(net().double()).attribute(X.double(), 1, sigma=0.2, n_calls=20, precision="bf16")


def test_compile_reaches_the_gradient_calls_alone(monkeypatch):
    made = []

    def compiled(f):
        made.append(f)
        return lambda *a: f(*a)

    monkeypatch.setattr(torch, "compile", compiled)
    model = net()
    fast = SmoothHess(model).attribute(X, 1, sigma=0.2, n_calls=100, compile=True)
    plain = SmoothHess(model).attribute(X, 1, sigma=0.2, n_calls=100)
    assert made == [model]
    assert fast.control == "kink"
    torch.testing.assert_close(fast.hessian, plain.hessian)


def test_exact_calls_inside_a_less_exact_run():
    oracle = Oracle(net(), X, 1, precision="bf16")
    owner = torch.arange(2)
    rounded = oracle(X, owner)[1]
    with oracle.exact():
        exact = oracle(X, owner)[1]
    torch.testing.assert_close(exact, Oracle(net(), X, 1)(X, owner)[1])
    assert not torch.equal(exact, rounded)
    assert oracle.precision == "bf16"


def test_fp16_is_finer_than_bf16_and_says_where_it_ends():
    options = {"sigma": 0.2, "n_calls": 400, "shrink": False, "control": None}
    exact, half, brain = (
        SmoothHess(net()).attribute(X, 1, precision=precision, **options) for precision in ("float32", "fp16", "bf16")
    )
    assert (half.precision_error < brain.precision_error / 3).all()
    z = (half.hessian - exact.hessian).abs() / (half.stderr() + exact.stderr())
    assert z.max() < 5
    assert (half.hessian - exact.hessian).norm() < (brain.hessian - exact.hessian).norm()
    steep = nn.Sequential(net(), nn.Linear(3, 2))
    nn.init.constant_(steep[1].weight, 1e3)  # gradients beyond 64, which do not fit with the scale but without
    assert float(SmoothHess(steep).attribute(X, 1, **options).gradient.abs().max()) > 64
    assert (SmoothHess(steep).attribute(X, 1, precision="fp16", **options).precision_error < 0.1).all()
    huge = nn.Sequential(net(), nn.Linear(3, 2))
    nn.init.constant_(huge[1].weight, 1e5)
    with pytest.raises(ValueError, match=r"infinite with precision='fp16', which overflows at 65504. Use 'bf16'"):
        SmoothHess(huge).attribute(X, 1, precision="fp16", **options)


def test_noise_of_rounding_is_measured_for_each_example_alone():
    together = SmoothHess(net()).attribute(X, 1, sigma=0.2, n_calls=40, precision="bf16", seed=[3, 4])
    for i, seed in enumerate((3, 4)):
        alone = SmoothHess(net()).attribute(X[i : i + 1], 1, sigma=0.2, n_calls=40, precision="bf16", seed=seed)
        torch.testing.assert_close(together.precision_error[i : i + 1], alone.precision_error)


def test_gradients_that_grow_too_large_among_the_draws_go_without_the_scale():
    """At the input the gradient is zero, a draw away it is beyond 64."""
    eye = nn.Linear(10, 10, bias=False)
    nn.init.eye_(eye.weight)
    for seed in range(4):
        result = SmoothHess(lambda x: 10 * eye(x).square().sum(1)).attribute(
            torch.zeros(1, 10), sigma=1.0, n_calls=80, precision="fp16", control=None, seed=seed
        )
        torch.testing.assert_close(result.hessian[0], 20 * torch.eye(10), rtol=0.02, atol=0.2)


def test_the_reported_errors_of_half_precision_contain_the_rounding():
    """It is within `precision_error`, an upper 95 % limit, for most networks, and of the size of `relative_error`."""
    shares, total = [], []
    for name in ("GPT", "BERT", "Llama"):
        for seed in range(100, 104):
            torch.manual_seed(seed)
            shape = Shape(**{**SHAPES[name].__dict__, "width": 32, "vocabulary": 20, "length": 8})
            model, ids = Transformer(shape).eval(), torch.randint(1, 20, (1, 8))
            explainer, target = TokenSmoothHess(model, "tokens"), 1 if shape.classes else (7, 5)
            for sigma in (0.1, 0.3):
                options = {"sigma": sigma, "n_calls": 16, "control": None, "shrink": False}
                exact = explainer.attribute(ids, target, **options).hessian
                for precision in ("bf16", "fp16"):
                    result = explainer.attribute(ids, target, precision=precision, **options)
                    error = float((result.hessian - exact).norm() / exact.norm())
                    shares.append(error / float(result.precision_error))
                    total.append(error / max(float(result.relative_error), 1e-3))
    within = sum(share <= 1 for share in shares)
    assert within >= 0.87 * len(shares)  # 48 networks: three standard errors below 0.95 would be 0.86
    assert sorted(shares)[len(shares) // 2] > 0.25
    assert sum(share <= 1 for share in total) >= 0.9 * len(total)
    assert max(total) < 2


def test_the_rounding_of_values_is_not_taken_for_curvature():
    """Values of about 5 are rounded to 1/64 in bfloat16; they change by about 0.002 from x to x ± δ."""
    torch.manual_seed(0)
    smooth = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    smooth.requires_grad_(False)[4].bias.add_(5)
    x = torch.randn(8, 12)
    result = SmoothHess(smooth).attribute(x, sigma=0.05, n_calls=24, precision="bf16", seed=range(8))
    true = torch.func.vmap(torch.func.hessian(lambda one: smooth(one)[0]))(x)
    error, unbiased = (relative(found, true) for found in (result.hessian, result.unshrunk().hessian))
    assert float(error.median()) < 1.3 * float(unbiased.median())  # four times as much if rounding were curvature
    ratio = float((result.relative_error / error).median())
    assert 0.5 < ratio < 2, ratio


def test_files_and_copies_keep_that_values_are_rounded(tmp_path):
    result = SmoothHess(net()).attribute(X, 1, sigma=0.2, n_calls=40, precision="bf16")
    result.save(tmp_path / "r")
    for copy in (Interactions.load(tmp_path / "r"), result.to("cpu"), result[0], Interactions.cat([result, result])):
        assert not copy.statistics.has_own_values.any()
        torch.testing.assert_close(copy.relative_error[0], result.relative_error[0])


def relative(found, true):
    return (found - true).flatten(1).norm(dim=1) / true.flatten(1).norm(dim=1)
