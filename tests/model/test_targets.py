"""Targets that are no single entry of the output: differences and log-probabilities."""

import pytest
import torch
from torch import nn

import smoothhess as sh
from smoothhess.datasets.job_settings import described
from smoothhess.model import targets

OPTIONS = {"sigma": 0.3, "n_calls": 64, "shrink": False, "control": None}


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 4)).double()


@pytest.mark.parametrize("pair", [(1, 2), ([0, 1], 3), (torch.tensor([3, 2]), [1, 1]), (-1, 0)], ids=str)
def test_a_contrast_is_a_difference_for_every_explainer(net, pair):
    x = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    explain = {
        "smooth": lambda target: sh.SmoothHess(net).attribute(x, target, **OPTIONS),
        "hessian": lambda target: sh.baselines.hessian(net, x, target),
        "gradient": lambda target: sh.baselines.gradient(net, x, target),
        "path": lambda target: sh.baselines.integrated_hessians(net, x, target, n_steps=8),
    }
    for name, method in explain.items():
        a, b, both = (method(t) for t in (*pair, sh.contrast(*pair)))
        torch.testing.assert_close(both.output, a.output - b.output)
        torch.testing.assert_close(both.gradient, a.gradient - b.gradient)
        if name != "gradient":
            torch.testing.assert_close(both.hessian, a.hessian - b.hessian)


def test_a_contrast_is_kept_by_files_and_further_calls(net, tmp_path):
    x, target = torch.zeros(2, 3).double(), sh.contrast([0, 1], 2)
    result = sh.SmoothHess(net).attribute(x, target, **OPTIONS)
    result.save(tmp_path / "r.safetensors")
    more = sh.SmoothHess(net).more(sh.Interactions.load(tmp_path / "r.safetensors"), 64)
    once = sh.SmoothHess(net).attribute(x, target, **OPTIONS | {"n_calls": 128})
    torch.testing.assert_close(more.hessian, once.hessian)
    assert [targets.described(row) for row in more.target.tolist()] == ["0 − 2", "1 − 2"]


def test_stores_of_data_sets_accept_contrasts(net, tmp_path):
    x = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    store = sh.explain_dataset(sh.SmoothHess(net), x, tmp_path / "s", target=sh.contrast(0, 1), **OPTIONS)
    output = net(x).detach()
    assert abs(float(store[1].output) - float(output[1, 0] - output[1, 1])) < 1e-9
    assert described(sh.contrast(0, 1)) != described(sh.contrast(0, 2))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (sh.contrast(1, None), "two targets with the same number of indices"),
        (sh.contrast(1, (1, 2)), "two targets with the same number of indices"),
        (sh.contrast(1, sh.contrast(2, 3)), "two targets with the same number of indices"),
        (sh.contrast(1, 4), "target 4 is out of range"),
        (sh.continuation([1]), "needs logits \\(N, T, V\\)"),
        (sh.continuation([0.5]), "needs token ids"),
        (sh.continuation([[1], [2], [3]]), "got 3 and 1 for 2 examples"),
    ],
)
def test_wrong_targets_are_refused(net, target, words):
    with pytest.raises(ValueError, match=words):
        sh.SmoothHess(net).attribute(torch.zeros(2, 3).double(), target, **OPTIONS)


def test_labels_of_a_loss_are_no_contrasts(net):
    with pytest.raises(ValueError, match="labels must be an int"):
        sh.baselines.gauss_newton(net, torch.zeros(2, 3).double(), sh.contrast(0, 1))
