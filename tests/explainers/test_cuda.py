"""The same numbers on a GPU; skipped where there is none."""

import contextlib
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD

from paper import passes
from paper.datasets import Split
from paper.training import Recipe, correct, train
from smoothhess import Interactions, SmoothHess, evaluate
from smoothhess.datasets import explain_dataset
from smoothhess.draws.designs import DESIGNS, EXACT
from smoothhess.model.capacity import InputKind
from tests.truths import OneHidden, Plain

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("design", sorted(DESIGNS))
@pytest.mark.parametrize("n_calls", [40, 4000])
def test_cuda_equals_cpu(design, n_calls):
    x = torch.randn(3, 12, generator=torch.Generator().manual_seed(0)).double()
    here = Plain(OneHidden(12)).attribute(x, sigma=0.3, n_calls=n_calls, design=design)
    there = Plain(OneHidden(12).cuda()).attribute(x.cuda(), sigma=0.3, n_calls=n_calls, design=design)
    assert there.hessian.is_cuda
    for name in ("hessian", "gradient", "value", "relative_error", "r2", "gradient_stderr", "stein_z"):
        torch.testing.assert_close(
            getattr(there, name).cpu(), getattr(here, name), rtol=1e-8, atol=1e-8, equal_nan=True
        )
    torch.testing.assert_close(there.stderr().cpu(), here.stderr(), rtol=1e-7, atol=1e-9)
    mask = torch.arange(12) % 5
    grouped = there.groups(mask.cuda())
    torch.testing.assert_close(grouped.stderr().cpu(), here.groups(mask).stderr(), rtol=1e-6, atol=1e-9)
    streamed = Plain(OneHidden(12).cuda()).attribute(
        x.cuda(), sigma=0.3, n_calls=n_calls, design=design, feature_mask=mask
    )
    torch.testing.assert_close(streamed.hessian, grouped.hessian, rtol=1e-8, atol=1e-9)
    assert len(there.top_pairs(3)[0]) == 3


def test_adaptive_per_example_targets_save_and_flags(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
    x = torch.randn(5, 12).cuda()
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.cuda.get_rng_state()
    result = SmoothHess(net).attribute(x, [0, 1, 2, 3, 0], sigma=0.5, tol=0.2)
    after = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.cuda.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])
    result.save(tmp_path / "r")
    loaded = Interactions.load(tmp_path / "r")
    assert loaded.device.type == "cpu"
    torch.testing.assert_close(loaded.hessian, result.to("cpu").hessian)
    grown = SmoothHess(net).more(loaded.to("cuda"), 64)
    assert torch.equal(grown.n_calls.cpu(), loaded.n_calls + 64)


def test_model_on_another_device():
    with pytest.raises(ValueError, match=r"the model is on \['cuda:0'\] but the inputs are on 'cpu'"):
        SmoothHess(nn.Linear(3, 1).cuda()).attribute(torch.ones(1, 3), sigma=1.0)


@pytest.mark.parametrize("batch", [2, 12])
@pytest.mark.parametrize("control", [None, "kink"])
def test_denoised_on_cuda_as_on_the_cpu(control, batch):
    """Many small matrices go through another solver on a GPU."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)).double()
    x = torch.randn(batch, 40, generator=torch.Generator().manual_seed(0)).double()
    for calls in (30, 80, 200):
        options = {"sigma": 0.3, "n_calls": calls, "control": control}
        here = SmoothHess(net.cpu()).attribute(x, **options)
        there = SmoothHess(net.cuda()).attribute(x.cuda(), **options)
        torch.testing.assert_close(
            there.hessian.cpu(), here.hessian, rtol=1e-4, atol=1e-4 * float(here.hessian.abs().max())
        )
        torch.testing.assert_close(there.relative_error.cpu(), here.relative_error, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_less_exact_convolutions(precision):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 2))
    x = torch.rand(2, 3, 8, 8).cuda()
    options = {"sigma": 0.1, "n_calls": 800, "shrink": False}
    exact = SmoothHess(net.cuda()).attribute(x, 1, **options)
    rounded = SmoothHess(net).attribute(x, 1, precision=precision, **options)
    assert (rounded.precision_error > 1e-6).all()
    assert float((rounded.hessian - exact.hessian).norm() / exact.hessian.norm()) < 0.5
    assert not torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32


def test_large_designs_are_made_on_the_device():
    """Rows beyond the size for a QR are transformed where they are used: the same up to rounding."""
    for start, stop in [(0, 64), (1_090, 1_110)]:
        here, there = (
            DESIGNS["orthogonal"].rows(3, start, stop, 1_100, EXACT.to(device)) for device in ("cpu", "cuda")
        )
        for name in ("z", "score", "weight"):
            assert getattr(there, name).is_cuda
            torch.testing.assert_close(getattr(there, name).cpu(), getattr(here, name), rtol=1e-12, atol=1e-12)


def test_eigenpairs_of_many_matrices_at_once():
    """Processes from 0 to full: reconstruct, and stay orthonormal."""
    from smoothhess.estimate.shrinkage import _eigenpairs

    rng = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 64, 64, generator=rng).double()
    rows = rows * (torch.arange(64) < torch.arange(200)[:, None] % 65)[:, None] * 10.0 ** torch.linspace(0, -4, 64)
    gram = (rows @ rows.mT).cuda()
    values, vectors = _eigenpairs(gram)
    size = gram.diagonal(dim1=-2, dim2=-1).amax(-1).clamp_min(1e-300)
    back = (vectors * values[:, None]) @ vectors.mT - gram
    assert float((back.abs().amax((-1, -2)) / size).max()) < 1e-8
    unit = vectors.mT @ vectors - torch.eye(64, dtype=torch.float64, device="cuda")
    assert float(unit.abs().max()) < 1e-6


@pytest.mark.parametrize("calls", [40, 200, 700])
def test_own_draws_on_cuda_as_on_the_cpu(calls):
    """Many streams are drawn into pinned memory and made orthogonal together, blocks cut anywhere."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(80, 32), nn.ReLU(), nn.Linear(32, 1)).double()
    x = torch.randn(30, 80).double()
    options = {"sigma": 0.3, "n_calls": calls, "seed": range(30), "control": None}
    here = SmoothHess(net).attribute(x, **options)
    there = SmoothHess(net.cuda()).attribute(x.cuda(), **options)
    for name in ("hessian", "gradient", "relative_error"):
        torch.testing.assert_close(getattr(there, name).cpu(), getattr(here, name), rtol=1e-5, atol=1e-6)
    for i in (0, 29):
        for one, other in zip(here[i].top_pairs(20)[0], there[i].top_pairs(20)[0], strict=True):
            assert (one.i, one.j) == (other.i, other.j)
            assert one.value == pytest.approx(other.value, rel=1e-6)
            assert one.q_value == pytest.approx(other.q_value, rel=1e-3, abs=1e-12)


@pytest.mark.parametrize("keep", ["pairs", "hessian"])
def test_data_sets_on_cuda_as_on_the_cpu(keep, tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(60, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 3))
    x = torch.randn(70, 60)
    options = {"target": "predicted", "sigma": 0.3, "n_calls": 120, "keep": keep, "summary": False}
    here = explain_dataset(SmoothHess(net), x, tmp_path / "cpu", **options)
    there = explain_dataset(SmoothHess(net.cuda()), x, tmp_path / "cuda", device="cuda", **options)
    assert len(here) == len(there) == 70
    for i in range(0, 70, 9):
        torch.testing.assert_close(there[i].gradient, here[i].gradient, rtol=1e-3, atol=1e-4)
        for one, other in zip(here[i].top_pairs(3), there[i].top_pairs(3), strict=True):
            assert one.value == pytest.approx(other.value, rel=1e-2, abs=1e-4)


def _trained(eager, monkeypatch):
    with monkeypatch.context() as patched:
        if eager:
            patched.setattr(passes, "WARM_STEPS", 10**9)
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(8 * 36, 4)
        )
        data = Split(torch.randn(100, 3, 8, 8), torch.arange(100) % 4)  # batches of 32, 32, 32 and 4
        recipe = Recipe(40, 32, partial(SGD, momentum=0.9), lambda _: 0.05, nn.functional.cross_entropy, correct)
        return train(net, data, recipe, device="cuda"), net


def test_recorded_training_steps(monkeypatch):
    """Replayed or not, short last batch and dropout included: the same network, up to bfloat16."""
    replayed, net = _trained(False, monkeypatch)
    again, same = _trained(False, monkeypatch)
    eager, other = _trained(True, monkeypatch)
    assert eager.loss == pytest.approx(replayed.loss, rel=0.02)
    assert again.loss == pytest.approx(replayed.loss, rel=0.02)
    assert eager.loss < 1.2  # ln 4 = 1.39: it learns
    states = (network.state_dict().values() for network in (net, other, same))
    for one, two, three in zip(*states, strict=True):
        for copy in (two, three):
            assert float((one - copy).double().norm()) <= 0.05 * float(one.double().norm()) + 1e-6


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode])
def test_directions_of_many_dimensions_side_by_side(mode):
    """More than 1024 dimensions and several inputs: one thread and stream for each matrix."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1100, 40), nn.ReLU(), nn.Linear(40, 1)).double()
    x = torch.randn(3, 1100).double()
    options = {"sigma": 0.05, "n_calls": 2400, "control": None}
    here = SmoothHess(net).attribute(x, **options)
    there = SmoothHess(net.cuda()).attribute(x.cuda(), **options)
    with mode():
        found = there.hessian
    size = float(here.hessian.abs().max())
    torch.testing.assert_close(found.cpu(), here.hessian, rtol=1e-6, atol=1e-6 * size)


def test_batch_norms_with_a_quicker_way_back(monkeypatch):
    """Inside an attribution of images on a GPU; as torch would have it, and as on a CPU."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 1)
    ).double()
    for _ in range(3):
        net(2 * torch.randn(8, 2, 6, 6).double() + 1)
    net.eval()
    x = torch.randn(2, 2, 6, 6).double()
    options = {"sigma": 0.3, "n_calls": 144, "control": None}
    here = SmoothHess(net).attribute(x, **options)
    explainer = SmoothHess(net.cuda())
    quick = explainer.attribute(x.cuda(), **options)
    assert explainer.capacity.fast_batchnorm(InputKind.of(quick.inputs))
    monkeypatch.setattr("smoothhess.model.gradients.may_pay", lambda _: False)
    plain = SmoothHess(net).attribute(x.cuda(), **options)
    for name in ("hessian", "gradient", "value"):
        expected = getattr(here, name)
        for found in (quick, plain):
            torch.testing.assert_close(getattr(found, name).cpu(), expected, rtol=1e-8, atol=1e-10)


def test_results_on_the_host_are_compared_with_a_model_on_the_gpu():
    """Results that take more than half of the free memory are moved to the host."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(3, 12, generator=rng).double().cuda()
    model = OneHidden(12).cuda()
    there = SmoothHess(model).attribute(x, sigma=0.3, n_calls=96)
    here = there.to("cpu")
    errors = [evaluate.perturbation_mse(model, x, r.taylor(), 0.3) for r in (there, here)]
    torch.testing.assert_close(*errors, rtol=1e-9, atol=1e-12)
    assert errors[1].is_cuda
    chosen = [
        evaluate.select(
            model,
            x,
            radius=0.3,
            values=[0.1, 0.2],
            method=lambda s, d=d: SmoothHess(model).attribute(x, sigma=s, n_calls=96).to(d),
        )
        for d in ("cuda", "cpu")
    ]
    torch.testing.assert_close(chosen[0].scores, chosen[1].scores, rtol=1e-9, atol=1e-12)
