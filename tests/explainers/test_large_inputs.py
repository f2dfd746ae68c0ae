"""A photo of 3 × 224 × 224 is an ordinary input: memory follows rows × features, no square matrix is made."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from smoothhess import Eigenbasis, SmoothHess
from smoothhess.estimate import statistics
from smoothhess.linalg.krylov import leading_eigenpairs
from tests.truths import Plain


def conv_net(channels=4):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, channels, 7, stride=4, padding=3),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, stride=4, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * channels, 3),
    ).eval()


PHOTO = """
import resource, torch
from tests.truths import Plain
from tests.explainers.test_large_inputs import conv_net

net, x = conv_net(), torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
net(x)
mask = (torch.arange(224)[:, None] // 32 * 7 + torch.arange(224)[None] // 32).expand(3, 224, 224)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
result = Plain(net).attribute(x, 1, radius=20.0, n_calls=200, internal_batch_size=20)
groups = result.groups(mask)
assert groups.hessian.shape == (1, 49, 49)
assert torch.isfinite(groups.stderr()).all()
assert (result @ x).shape == x.shape
assert torch.isfinite(result.diagonal().stderr).all()
assert torch.isfinite(result.row((0, 100, 100)).stderr).all()
assert result.bilinear(x, x).value.shape == (1,)
values, vectors = result.eigh(4)
assert vectors.shape == (1, 4, 3, 224, 224)
assert (result.relative_error > 1).all()  # 200 calls say nothing of the whole matrix, and say so
assert torch.isfinite(result.r2).all()
try:
    result.hessian
except ValueError as error:
    assert "which do not need it" in str(error)
else:
    raise AssertionError("a matrix of 91 GB was made")
print("extra MB:", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.slow
def test_a_photo_in_less_than_two_gigabytes():
    run = subprocess.run([sys.executable, "-c", PHOTO], capture_output=True, text=True, check=False, timeout=500)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout.split("extra MB:")[1]) < 2000


def test_groups_of_fifty_segments_equal_the_dense_answer():
    net = conv_net().double()
    x = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0)).double()
    mask = torch.arange(768).reshape(3, 16, 16) % 50
    factored = Plain(net).attribute(x, 1, radius=1.0, n_calls=200)
    groups = factored.groups(mask)
    p = nn.functional.one_hot(mask.flatten()).double()
    torch.testing.assert_close(groups.hessian[0], p.mT @ factored.hessian[0] @ p, rtol=1e-9, atol=1e-12)
    streamed = Plain(net).attribute(x, 1, radius=1.0, n_calls=200, feature_mask=mask)
    torch.testing.assert_close(streamed.hessian, groups.hessian, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(streamed.stderr(), groups.stderr(), rtol=1e-6, atol=1e-12)


@pytest.mark.slow
def test_relative_error_is_right_on_a_convnet():
    """Against a long run: estimated over true error inside one block and beyond, median over seeds."""
    net = conv_net().double()
    x = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()  # d = 192
    explainer = Plain(net)
    truth = explainer.attribute(x, 1, radius=3.0, n_calls=2 * 192 * 400, seed=99).hessian
    for blocks in (0.25, 0.5, 1, 2):
        many = x.expand(30, -1, -1, -1).clone()
        result = explainer.attribute(many, 1, radius=3.0, n_calls=int(2 * 192 * blocks), seed=range(30))
        true = torch.linalg.matrix_norm(result.hessian - truth) / torch.linalg.matrix_norm(truth)
        ratio = (result.noise.of_frobenius.sqrt() / torch.linalg.matrix_norm(truth) / true).median()
        assert 0.85 <= float(ratio) <= 1.15, blocks


def test_forms_without_a_matrix_equal_the_dense_ones():
    """The skew is kept factored when there are far fewer rows than features."""
    net = conv_net().double()
    x = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()
    result = Plain(net).attribute(x, 1, radius=3.0, n_calls=2 * 40)
    assert result.noise.skew is not None
    assert result.noise.skew.matrix is None
    stderr = result.stderr()
    for index in (0, (1, 2, 3)):
        flat = index if isinstance(index, int) else index[0] * 64 + index[1] * 8 + index[2]
        torch.testing.assert_close(result.row(index).stderr.flatten(1), stderr[:, flat], rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(
        result.diagonal().stderr.flatten(1), stderr.diagonal(dim1=1, dim2=2), rtol=1e-6, atol=1e-12
    )
    total = stderr.square().sum((1, 2)).sqrt()
    torch.testing.assert_close(result.noise.of_frobenius.sqrt(), total, rtol=0.1, atol=0)


def test_rows_that_cannot_be_kept_are_refused_before_they_are_drawn(monkeypatch):
    monkeypatch.setattr(statistics, "DENSE_LIMIT", 100)
    seen = []

    def f(x):
        seen.append(len(x))
        return x.square().sum((1, 2, 3))

    x = torch.rand(1, 3, 8, 8).double()
    with pytest.raises(ValueError, match="1500 rows of 192 features are more than the 1024 that are kept"):
        Plain(f).attribute(x, sigma=0.1, n_calls=3000)
    assert sum(seen) <= 2  # f(x) itself, and to record its activations


def test_a_few_directions_of_a_large_input_never_make_a_matrix_of_its_features():
    d, k = 30_000, 8
    rng = torch.Generator().manual_seed(3)
    directions = torch.linalg.qr(torch.randn(d, k, generator=rng).double())[0].mT
    weight = torch.randn(k, k, generator=rng).double()
    weight = weight + weight.mT

    def bowl(x):  # H = VᵀWV, and the SmoothHess too
        return ((x @ directions.mT) @ weight * (x @ directions.mT)).sum(1) / 2

    gaussian = Eigenbasis(directions, [0.5] * k, 0.0)
    result = SmoothHess(bowl).attribute(torch.zeros(1, d).double(), gaussian=gaussian, n_calls=8 * k)
    for u, v in ((0, 1), (2, 2)):
        found = result.bilinear(directions[u], directions[v]).value
        torch.testing.assert_close(found, weight[u, v].reshape(1), rtol=1e-8, atol=1e-10)
    expected = ((directions.mT @ weight) * directions.mT).sum(1)
    torch.testing.assert_close(result.diagonal().value[0].flatten(), expected, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(result.eigh(k).values.sort()[0][0], torch.linalg.eigvalsh(weight), rtol=1e-6, atol=1e-9)
    assert float(result.relative_error) < 1e-3
    with pytest.raises(ValueError, match="30000 features are more than the .* that are kept in factored form"):
        SmoothHess(bowl).attribute(torch.zeros(1, d).double(), gaussian=gaussian, n_calls=4000)


def test_zero_beside_a_hard_operator_has_orthonormal_directions():
    rng = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(400, 240, generator=rng).double())[0]
    both = torch.stack([(q * torch.linspace(1, 2, 240).double()) @ q.mT, torch.zeros(400, 400).double()])
    _, vectors = leading_eigenpairs(lambda rows: rows @ both, torch.zeros(2, 400).double(), 3, 1e-4)
    torch.testing.assert_close(vectors @ vectors.mT, torch.eye(3).double().expand(2, 3, 3), rtol=0, atol=1e-9)


def test_merging_refuses_what_attribute_refuses(monkeypatch):
    monkeypatch.setattr(statistics, "DENSE_LIMIT", 100)
    d, k = 192, 4
    directions = torch.eye(d)[:k]
    model, gaussian = lambda x: x[:, 0] * x[:, 1], Eigenbasis(directions, [0.5] * k, 0.0)
    a, b = (
        SmoothHess(model).attribute(torch.zeros(1, d), gaussian=gaussian, n_calls=1200, control=None, seed=s)
        for s in (0, 1)
    )
    with pytest.raises(ValueError, match="192 features are more than the 1024 that are kept"):
        a.merge(b)
