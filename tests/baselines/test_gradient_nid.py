"""Gradient-NID: squared entries of any Hessian."""

import pytest
import torch
from torch import nn

from smoothhess import Diagonal, Interactions, SmoothHess, attack
from smoothhess.baselines import hessian, softplus
from smoothhess.baselines.gradient_nid import gradient_nid, squared
from smoothhess.result.exact import Attribution
from tests.model.test_state import Net, assert_same, snapshot
from tests.truths import OneHidden, additive, quadratic

pytestmark = pytest.mark.rounding

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def test_a_quadratic():
    A, b = quadratic(4)
    result = gradient_nid(lambda x: x @ b + ((x @ A) * x).sum(1) / 2, X)
    torch.testing.assert_close(result.hessian, A.square().expand(3, 4, 4), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(result.gradient, (b + X @ A).square(), rtol=1e-12, atol=1e-14)


def test_of_the_softened_network():
    f = OneHidden(4)
    expected = torch.func.vmap(torch.func.hessian(lambda x: nn.functional.softplus(x @ f.w.mT + f.b, 3.0) @ f.a))(X)
    result = gradient_nid(f, X, of="softplus", beta=3.0)
    torch.testing.assert_close(result.hessian, expected.detach().square(), rtol=1e-9, atol=1e-12)
    assert result.note == "squares of softplus β = 3"


def test_additive_functions_have_no_cross_pairs():
    result = gradient_nid(additive(2, 2), X, of="swish", beta=3.0)
    assert not result.hessian[:, :2, 2:].any()
    assert result.hessian[:, 0, 1].min() > 0


@pytest.mark.parametrize("shrink", [True, False])
def test_of_a_result(shrink):
    f = OneHidden(6)
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    options = {"sigma": 0.5, "n_calls": 60, "control": None, "shrink": shrink, "seed": 3}
    made = SmoothHess(f).attribute(x, **options)
    result = gradient_nid(None, x, of=made)
    assert torch.equal(result.hessian, made.hessian.square())
    assert torch.equal(result.hessian, gradient_nid(f, x, of="smooth", **options).hessian)
    assert torch.equal(result.n_passes, made.n_passes)
    assert result.seed == 3
    assert f"relative error {float(made.relative_error.max()):.2g}" in result.note


def test_pairs_are_ranked_by_the_square_of_their_effect():
    scales = torch.tensor([1.0, 0.1, 2.0, 0.5]).double()
    A, _ = quadratic(4)
    made = SmoothHess(lambda x: ((x @ A) * x).sum(1) / 2).attribute(X, gaussian=Diagonal(scales), n_calls=40)
    pairs, squares = made.top_pairs(6)[0], squared(made).top_pairs(6)[0]
    assert [(p.i, p.j) for p in pairs] == [(p.i, p.j) for p in squares]
    for pair, square in zip(pairs, squares, strict=True):
        assert square.effect == pytest.approx(pair.effect**2)


def test_of_groups():
    made = hessian(lambda x: x.prod(1), X)
    groups = squared(made.groups(torch.tensor([0, 0, 1, 1])))
    assert groups.hessian.shape == (3, 2, 2)
    assert torch.equal(groups.hessian, made.groups(torch.tensor([0, 0, 1, 1])).hessian.square())
    assert groups.feature_shape == (2,)
    assert len(groups.top_pairs(1)[0]) == 1


def test_it_is_an_attribution(tmp_path):
    result = gradient_nid(lambda x: x.prod(1), X)
    assert isinstance(result, Attribution)
    with pytest.raises(ValueError, match="Gradient-NID is an attribution, not a Hessian"):
        attack(result, 0.1)
    result.save(tmp_path / "r.safetensors")
    loaded = Interactions.load(tmp_path / "r.safetensors")
    assert isinstance(loaded, Attribution)
    assert torch.equal(loaded.hessian, result.hessian)
    assert torch.equal(Interactions.cat([result[0], result[1:]]).hessian, result.hessian)


@pytest.mark.parametrize("fail_after", [None, 0, 2])
def test_the_model_is_given_back_as_it_was(fail_after):
    model = Net().eval()
    model.fail_after = fail_after
    before = snapshot(model)
    if fail_after is None:
        gradient_nid(model, X.float(), 0, of="softplus", beta=2.0)
    else:
        with pytest.raises(RuntimeError, match="midway"):
            gradient_nid(model, X.float(), 0, of="softplus", beta=2.0)
    assert_same(before, snapshot(model))


def test_what_is_refused():
    f = OneHidden(4)
    made = softplus(f, X, beta=2.0)
    with pytest.raises(ValueError, match="of must be a result for these inputs"):
        gradient_nid(f, X.flip(0), of=made)
    with pytest.raises(ValueError, match="of must be a result for these inputs"):
        gradient_nid(f, X[:2], of=made)
    with pytest.raises(TypeError, match="takes no options, got beta"):
        gradient_nid(f, X, of=made, beta=2.0)
    with pytest.raises(ValueError, match=r"got an attribution \(Gradient-NID\)"):
        squared(squared(made))
    with pytest.raises(ValueError, match="of must be .*got 'relu'"):
        gradient_nid(f, X, of="relu")
    with pytest.raises(ValueError, match=r"no such call was seen"):
        gradient_nid(lambda x: x.prod(1), X, of="softplus", beta=2.0)
    with pytest.warns(UserWarning, match="the Hessian is exactly zero"):
        assert not gradient_nid(f, X).hessian.any()
