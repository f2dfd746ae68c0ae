"""SmoothHess beside every baseline: the two tables are those of compare and post_hoc, and say what was chosen."""

import math

import pytest
import torch
from torch import nn

from smoothhess import Isotropic, SmoothHess, baselines
from smoothhess.evaluate.attack_comparison import post_hoc
from smoothhess.evaluate.compare_methods import _spread, compare_methods
from smoothhess.evaluate.compare_surrogates import compare
from tests.truths import OneHidden, covariance

X = torch.randn(60, 5, generator=torch.Generator().manual_seed(1)).double()


def net(seed=0, d=5, classes=3, activation=nn.ReLU):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(d, 24), activation(), nn.Linear(24, classes)).double().eval()


def found(model=None, **options):
    model = net() if model is None else model
    return compare_methods(model, X, model(X).argmax(1), **{"radius": 0.6, "n_calls": 200, "n_samples": 300, **options})


def test_every_row_is_what_its_parts_say():
    model, table = net(), found(beta=6.0, sigma=0.2, seed=3)
    labels = model(X).argmax(1)
    smooth = SmoothHess(model).attribute(X, labels, sigma=0.2, n_calls=200, seed=3)
    soft, curl = baselines.softplus(model, X, labels, beta=6.0), baselines.swish(model, X, labels, beta=3.0)
    taylors = {
        "SmoothHess": smooth.taylor(),
        "SmoothGrad": smooth.taylor(1),
        "SoftPlus H+G": soft.taylor(),
        "SoftPlus G": soft.taylor(1),
        "Swish H+G": curl.taylor(),
        "Swish G": curl.taylor(1),
        "gradient": baselines.gradient(model, X, labels).taylor(1),
    }
    expected = compare(model, X, taylors, 0.6, labels, n_samples=300, seed=3)
    assert table.surrogates.methods == expected.methods
    torch.testing.assert_close(table.surrogates.errors, expected.errors, rtol=1e-9, atol=0)
    taylors["random"] = baselines.random(model, X, labels, seed=3).taylor(1)
    attacked = post_hoc(model, X, taylors, 0.6)
    assert table.attacks.methods == attacked.methods
    assert torch.equal(table.attacks.after, attacked.after)


def test_it_says_who_is_ahead():
    model, x = net(d=30), torch.randn(60, 30, generator=torch.Generator().manual_seed(1)).double()
    table = compare_methods(model, x, model(x).argmax(1), radius=1.5, n_calls=200, n_samples=300)
    assert float(table.attacks.difference("random", "SmoothHess").p_value) < 1e-3
    text = repr(table)
    assert "gradient − SmoothHess: +" in text
    assert "SmoothHess is the better surrogate" in text
    assert "SmoothHess is the stronger attack" in text  # than a random direction
    assert "σ = 0.274" in text
    assert "SoftPlus H+G: β = " in text
    assert "not corrected for the number of baselines" in text
    lines = table.to_markdown().splitlines()
    assert lines[0] == "| P_MSE | r = 1.5 |"
    assert any(line.startswith("| random |") and "p = " in line for line in lines)


def test_beta_is_matched_to_sigma():
    """One hidden layer: pre-activations spread by τ² = wᵀΣw, known exactly; the corner's curvature is matched."""
    model = OneHidden(5, width=400)
    scores = lambda x: torch.stack([model(x), torch.zeros(len(x)).to(x)], 1)
    tau = _spread(scores, X, None, 0.3, None, 0)
    sigma = covariance(Isotropic(0.3), 5)
    exact = float(torch.einsum("kd,de,ke->k", model.w, sigma, model.w).mean().sqrt().detach())
    assert tau == pytest.approx(exact, rel=0.15)  # 64 shared draws of 5 numbers: 6 % is one standard error
    table = compare_methods(scores, X, 0, radius=0.3 * math.sqrt(5), n_calls=100, n_samples=50)
    beta = 4 / (math.sqrt(2 * math.pi) * tau)
    assert table.results["softplus"].method == f"softplus β = {beta:g}"
    assert table.results["swish"].method == f"swish β = {beta / 2:g}"


def test_the_spread_does_not_depend_on_the_batch_size():
    model = net()
    assert _spread(model, X, None, 0.3, 7, 0) == pytest.approx(_spread(model, X, None, 0.3, None, 0), rel=1e-12)
    assert _spread(model, X, None, 0.6, None, 0) == pytest.approx(2 * _spread(model, X, None, 0.3, None, 0), rel=1e-9)


def test_a_network_without_relu_goes_without_softened_ones():
    table = found(net(activation=nn.Tanh))
    assert table.surrogates.methods == ("SmoothHess", "SmoothGrad", "gradient")
    assert any("SoftPlus H+G: left out, since the model has no relu" in note for note in table.notes)


def test_a_regression_goes_without_attacks():
    model = OneHidden(5)
    table = compare_methods(model, X, radius=0.5, n_calls=100, n_samples=50)
    assert table.attacks is None
    assert any("No attacks: the output is not scores (N, C)" in note for note in table.notes)
    assert "unchanged" not in table.to_markdown()
    decided = compare_methods(model, X, radius=0.5, n_calls=100, n_samples=50, decide=lambda out: out > 0)
    assert len(decided.attacks) == len(X)


def test_rivals_may_be_chosen():
    table = found(baselines=["gradient", "hessian"])
    assert table.surrogates.methods == ("SmoothHess", "SmoothGrad", "gradient", "own H+G")
    assert any(note.startswith("hessian: the Hessian is exactly zero") for note in table.notes)
    assert set(table.results) == {"smoothhess", "gradient", "hessian"}
    alone = found(baselines=())
    assert alone.surrogates.methods == ("SmoothHess", "SmoothGrad")


def test_bounds_are_those_of_the_attacks():
    table = found(bounds=(X - 0.1, X + 0.1))
    assert (table.attacks.moved <= 0.1 * math.sqrt(5) + 1e-9).all()


def test_the_model_is_given_back_as_it_was():
    model = net()
    state, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.random.get_rng_state()
    found(model)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert torch.equal(random, torch.random.get_rng_state())
    assert not model[1]._forward_hooks


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"radius": 0}, "radius must be a positive number"),
        ({"baselines": "softplus"}, r"baselines must be a list of some of 'softplus', .*, got 'softplus'"),
        ({"baselines": ["softmax"]}, r"got \['softmax'\]"),
        ({"beta": -1.0}, "beta must be a positive, finite number"),
        ({"n_samples": 1}, "n_samples must be at least 2"),
    ],
)
def test_what_is_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        found(**changes)
