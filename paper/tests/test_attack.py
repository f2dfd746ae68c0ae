"""The attacks on stand-ins."""

import csv
import math
from dataclasses import replace

import pytest
import torch

from paper.cells import Cells
from paper.experiments import attack, attack_report
from paper.methods import ATTACK, Maker
from paper.networks import MLP
from paper.options import Options
from paper.published import published
from paper.tests.stand_ins import mlp_source
from smoothhess import SmoothHess, baselines
from smoothhess.evaluate import AttackComparison, minimize_in_ball, post_hoc
from smoothhess.evaluate import attack as exact_attack

pytestmark = pytest.mark.usefixtures("plain_figures")

TINY = attack.Size(points=7, batch=4, calls=40, val=4, val_calls=24, stride=20)
RADII = (0.5, 0.75, 1.25)


@pytest.fixture(scope="module", autouse=True)
def fewer_radii():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attack, "EPSILONS", {"mlp5": RADII})
        yield


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    mlp_source().classifier(Options(folder / "out", cache=folder))
    return folder


@pytest.fixture(scope="module")
def measured(weights, tmp_path_factory):
    options = Options(tmp_path_factory.mktemp("out"), cache=weights)
    classifier = mlp_source().classifier(options)
    return attack.measure(classifier, options, TINY), options


def test_the_full_run(weights, tmp_path, monkeypatch):
    monkeypatch.setattr(attack, "CLASSIFIERS", (mlp_source(),))
    monkeypatch.setattr(attack, "FULL", TINY)
    outcome = attack.run(Options(tmp_path, cache=weights))
    names = {path.name for path in outcome.files}
    assert {"attack.csv", "attack.md", "parameters.csv", "published-parameters.md", "attack.png", "attack.svg"} <= names
    with (tmp_path / "attack" / "attack.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(RADII) * (len(ATTACK) + 1)  # and SH+SG by the paper's reduction
    for row in rows:
        share, error = float(row["ours"]) / 100, float(row["standard error"]) / 100
        assert error == pytest.approx(math.sqrt(share * (1 - share) / 7))
        printed = published(
            metric="attack_posthoc_accuracy",
            dataset="MNIST",
            network="mlp5",
            function="softmax",
            epsilon=float(row["ε"]),
            method=row["method"].split(",")[0],
        )
        assert float(row["published"]) == printed.value
    text = (tmp_path / "attack" / "attack.md").read_text()
    assert all(line in text for line in outcome.lines)
    assert "SH+SG is the strongest attack in" in text


def test_a_column_is_what_the_library_says(measured):
    found, _ = measured
    classifier = found.classifier
    x = classifier.inputs("test", 4)
    target, epsilon = classifier.predicted(x), 0.75
    softmax = lambda x: classifier.network(x).softmax(-1)
    sigma, beta = found.chosen[epsilon, "SH+SG"], found.chosen[epsilon, "SP H+G"]
    attackers = {
        "SH+SG": SmoothHess(softmax).attribute(x, target, sigma=sigma, n_calls=TINY.calls, seed=0),
        "SP H+G": baselines.softplus(softmax, x, target, beta=beta),
        "H+G": baselines.hessian(softmax, x, target),
        "G": baselines.gradient(softmax, x, target).taylor(1),
        "random": baselines.random(softmax, x, target, seed=0).taylor(1),
    }
    expected = post_hoc(classifier.network, x, attackers, epsilon)
    comparison = found.comparison(epsilon, found.chosen)
    for name in attackers:
        ours = comparison.after[comparison.methods.index(name), 0, :4]
        assert torch.equal(ours, expected.after[expected.methods.index(name), 0]), name


def test_paired_columns(measured):
    found, _ = measured
    rows = {(r["ε"], r["method"]): r for r in attack_report.rows_of([found], "chosen")}
    comparison = found.comparison(1.25, found.chosen)
    apart = comparison.difference("G", "SH+SG")
    row = rows[1.25, "G"]
    assert row["less SH+SG"] == pytest.approx(100 * float(apart.value[0]))
    assert row["McNemar p"] == pytest.approx(float(apart.p_value[0]))
    assert rows[1.25, "SH+SG"]["McNemar p"] is None
    assert row["ours"] == pytest.approx(100 * comparison.share("G", 1.25).value)


def test_it_says_where_another_is_stronger(measured):
    found, _ = measured
    before = torch.zeros(40, dtype=torch.long)
    after = {key: torch.zeros(len(RADII), 40, dtype=torch.long) for key in found.after}
    value = found.chosen[0.5, "SG"]
    after["SG", value, "exact"][0] = 1  # SG turns every prediction at ε = .5
    made = replace(found, before=before, after=after, n_points=40)
    lines = attack_report.findings([made])
    (line,) = [line for line in lines if "not the strongest" in line]
    assert "at ε = 0.5: SH+SG is not the strongest; SG leaves 0.0 % unchanged, SH+SG 100.0 %" in line
    assert line.endswith(": significant)")
    assert any("strongest attack in 0 of 3 columns and tied with another in 2" in line for line in lines)


def test_a_run_that_was_killed_goes_on(weights, tmp_path, monkeypatch):
    options = Options(tmp_path, cache=weights)
    classifier = mlp_source().classifier(options)
    whole = attack.measure(classifier, replace(options, out=tmp_path / "whole"), TINY)
    count, put = 0, Cells.put

    def killed(self, key, value):
        nonlocal count
        count += 1
        if count > 14:
            raise KeyboardInterrupt
        put(self, key, value)

    monkeypatch.setattr(Cells, "put", killed)
    with pytest.raises(KeyboardInterrupt):
        attack.measure(classifier, options, TINY)
    monkeypatch.setattr(Cells, "put", put)
    again = attack.measure(classifier, options, TINY)
    assert again.chosen == whole.chosen
    assert all(torch.equal(again.after[key], whole.after[key]) for key in whole.after)
    monkeypatch.setattr(Maker, "__call__", None)
    attack.measure(classifier, options, TINY)
    with pytest.raises(ValueError, match=r"keep is 0.98 there and 0.5 now"):
        attack.measure(classifier, options, TINY, keep=0.5)


def test_the_first_network_of_a_data_set_that_there_is(weights, tmp_path, monkeypatch):
    sources = (mlp_source("mnist-authors", run=None, recipe=None, given="x.pth"), mlp_source())
    monkeypatch.setattr(attack, "CLASSIFIERS", sources)
    monkeypatch.setattr(attack, "FULL", replace(TINY, points=2))
    outcome = attack.run(Options(tmp_path, cache=weights))
    assert any("left out: MNIST-AUTHORS" in line for line in outcome.lines)
    assert any(line.startswith("MNIST: trained here") for line in outcome.lines)


# --- the minimum in a ball --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net, x = MLP((60, 40, 40, 4)).double().eval(), torch.randn(5, 60).double()
    target = net(x).argmax(1)
    return baselines.softplus(lambda x: net(x).softmax(-1), x, target, beta=3.0)


def test_perturbed_inputs_are_exact_minima(result):
    radii = [0.1, 1.0, 5.0]
    found = attack.perturbed(result, 2, radii)
    for radius, points in zip(radii, found, strict=True):
        step = minimize_in_ball(result.gradient, result.hessian, radius)
        expected, ours = (_value(result, s) for s in (step, (points - result.inputs).flatten(1)))
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-12)


def test_32_dimensions_nearly_do(result):
    for radius, points in zip([0.1, 1.0], attack.perturbed(result, 2, [0.1, 1.0], exact=False), strict=True):
        step = minimize_in_ball(result.gradient, result.hessian, radius)
        expected, ours = (_value(result, s) for s in (step, (points - result.inputs).flatten(1)))
        assert bool((ours >= expected - 1e-12).all())
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=0)


def test_the_hard_case_is_found():
    """No gradient along the direction of negative curvature."""
    inputs = torch.zeros(1, 40).double()
    gradient = torch.zeros(1, 40).double()
    gradient[0, 0] = 0.1
    hessian = torch.diag(torch.linspace(1, 2, 40).double())[None].clone()
    hessian[0, 7, 7] = -3.0
    made = baselines.hessian(lambda x: x @ gradient[0] + ((x @ hessian[0]) * x).sum(1) / 2, inputs)
    (points,) = attack.perturbed(made, 2, [1.0])
    step = minimize_in_ball(gradient, hessian, 1.0)
    assert float(_value(made, points.flatten(1))) == pytest.approx(float(_value(made, step)), rel=1e-6)
    assert abs(float(points[0, 7])) > 0.9


def test_the_reduction_is_the_librarys(result):
    (points,) = attack.perturbed(result, 2, [0.7], keep=0.9)
    step = minimize_in_ball(result.gradient, result.hessian, 0.7, keep=0.9)
    torch.testing.assert_close((points - result.inputs).flatten(1), step, rtol=1e-8, atol=1e-10)


def test_first_order_steps_follow_the_gradient(result):
    (points,) = attack.perturbed(result, 1, [0.7])
    torch.testing.assert_close(points, exact_attack(result, 0.7, order=1))


def _value(result, step):
    g, H = result.gradient.flatten(1), result.hessian
    return (g * step).sum(1) + ((step[:, None] @ H)[:, 0] * step).sum(1) / 2


def test_comparisons_are_the_librarys(measured):
    found, _ = measured
    assert isinstance(found.comparison(0.5, found.chosen), AttackComparison)
    assert found.comparison(0.5, found.chosen, cut=True).methods[-1] == "SH+SG, T = 0.98"
