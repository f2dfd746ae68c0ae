"""Targets that are no single entry of the output: differences and log-probabilities."""

import numpy as np
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


def test_names_of_classes_are_targets(net):
    x, classes = torch.zeros(2, 3).double(), ["a", "b", "c", "d"]
    named = sh.SmoothHess(net).attribute(x, sh.contrast("b", "d"), classes=classes, **OPTIONS)
    plain = sh.SmoothHess(net).attribute(x, sh.contrast(1, 3), **OPTIONS)
    torch.testing.assert_close(named.hessian, plain.hessian)
    assert "b − d" in str(named)
    listed = sh.SmoothHess(net).attribute(x, ["c", "a"], classes=classes, **OPTIONS)
    assert listed.target[:, 0].tolist() == [2, 0]
    for target, given, words in (
        ("e", classes, "the classes are"),
        ("a", None, "was not passed"),
        ("a", ["a", "a"], "the classes"),
    ):
        with pytest.raises(ValueError, match=f"got {target!r}, but .*{words}"):
            sh.SmoothHess(net).attribute(x, target, classes=given, **OPTIONS)


def test_names_of_classes_are_targets_everywhere(net):
    x, classes = torch.linspace(-1, 1, 12).double().reshape(4, 3), ["a", "b", "c", "d"]
    options = {"sigma": 0.3, "n_calls": 24}
    for target, index in (("c", 2), (sh.contrast("d", "a"), sh.contrast(3, 0))):
        named = sh.evaluate.global_interactions(sh.SmoothHess(net), x, target=target, classes=classes, **options)
        plain = sh.evaluate.global_interactions(sh.SmoothHess(net), x, target=index, **options)
        torch.testing.assert_close(named.mean.value, plain.mean.value)
        torch.testing.assert_close(sh.diagnose(net, x, target, classes=classes).odd, sh.diagnose(net, x, index).odd)
        scales = sh.sweep(net, x, [0.1, 0.3], target=target, classes=classes, n_calls=24)
        torch.testing.assert_close(
            scales[1].hessian, sh.SmoothHess(net).attribute(x, index, tails=None, **options).hessian
        )


def test_a_misspelt_class_is_guessed(net):
    with pytest.raises(ValueError, match="got 'benin', but the classes are .* Did you mean 'benign'"):
        sh.SmoothHess(net).attribute(torch.zeros(1, 3).double(), "benin", classes=["malignant", "benign"], **OPTIONS)


def test_errors_of_targets_name_the_remedy(net):
    x = torch.zeros(2, 3).double()
    with pytest.raises(ValueError, match="needs two different outputs, got 2 twice"):
        sh.SmoothHess(net).attribute(x, sh.contrast([0, 2], 2), **OPTIONS)
    with pytest.raises(ValueError, match=r"Expected 1; the difference of two outputs is contrast\(a, b\)"):
        sh.SmoothHess(net).attribute(x, (1, 2), **OPTIONS)
    with pytest.raises(ValueError, match=r"such as \(-1, 2\) for output 2 at the last position"):
        sh.SmoothHess(lambda x: net(x)[:, None]).attribute(x, 2, **OPTIONS)


def test_labels_of_scikit_learn_are_targets(net):
    classes = ["a", "b", "c", "d"]
    for labels in (np.array(["d", "b"]), np.array(["d", "b"], dtype=object)):
        result = sh.SmoothHess(net).attribute(torch.zeros(2, 3).double(), labels, classes=classes, **OPTIONS)
        assert result.target[:, 0].tolist() == [3, 1]


def test_two_classes_are_compared_by_contrast(net):
    x, classes = torch.zeros(1, 3).double(), ["a", "b", "c", "d"]
    with pytest.raises(TypeError, match=r"got one of strings.*contrast\(a, b\)"):
        sh.SmoothHess(net).attribute(x, ("a", "b"), classes=classes, **OPTIONS)
    with pytest.raises(ValueError, match=r'two outputs, got "predicted".*argmax'):
        sh.SmoothHess(net).attribute(x, sh.contrast("predicted", "b"), classes=classes, **OPTIONS)


def test_a_column_of_a_table_is_a_target(net):
    pandas = pytest.importorskip("pandas")
    labels = pandas.Series([3, 1], index=[17, 4])
    result = sh.SmoothHess(net).attribute(torch.zeros(2, 3).double(), labels, **OPTIONS)
    assert result.target[:, 0].tolist() == [3, 1]


@pytest.mark.parametrize(
    "target", [3, (4, 17), [1, 2], sh.contrast(1, 0), sh.contrast((4, 17), (4, 9)), sh.continuation([7, 8])]
)
def test_entries_pass_the_check_of_files(target):
    targets.check_entries(targets.entries(target, 2))


def test_entries_of_damaged_files_are_refused():
    rows = targets.entries(sh.contrast(1, 0), 2)
    mixed = torch.cat([rows[:1], torch.tensor([[1, 0, 2]])])
    for damaged in (rows[:, :0], rows[0], rows[:, -1:], rows[:, 1:], rows.flip(1), mixed, mixed.flip(0)):
        with pytest.raises(ValueError, match="expected targets"):
            targets.check_entries(damaged)
