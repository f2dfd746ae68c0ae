"""Grids and choices of the tables' rows."""

import pytest
import torch

from paper.methods import ATTACK_BETA, ATTACK_SIGMA2, PMSE, PMSE_BETA, Maker, choose, sigma_candidates
from paper.networks import MLP
from paper.published import published
from paper.tests.stand_ins import images, untrained
from smoothhess.evaluate import select


def test_the_grids_hold_what_the_paper_selected():
    """Every printed σ² and β of the SoftPlus and SmoothHess rows is a candidate."""
    cells = [
        (dataset, network, function, epsilon)
        for dataset, network in (("MNIST", "mlp5"), ("FMNIST", "mlp5"), ("CIFAR10", "resnet18"))
        for function in ("logit", "neuron")
        for epsilon in (0.25, 0.5, 1.0)
    ]
    for dataset, network, function, epsilon in cells:
        for method in ("SP H+G", "SP G", "SW H+G", "SW G"):
            found = published(
                metric="pmse_smoothing",
                dataset=dataset,
                network=network,
                function=function,
                epsilon=epsilon,
                method=method,
            )
            assert found is not None
            assert found.value in PMSE_BETA[network], (dataset, function, epsilon, method)
    for dataset, network, radii in (("MNIST", "mlp5", (0.25, 1.75)), ("CIFAR10", "resnet18", (0.1, 1.0))):
        for epsilon in radii:
            for method, grid in (("SH+SG", ATTACK_SIGMA2), ("SG", ATTACK_SIGMA2), ("SP H+G", ATTACK_BETA)):
                found = published(
                    metric="attack_smoothing",
                    dataset=dataset,
                    network=network,
                    function="softmax",
                    epsilon=epsilon,
                    method=method,
                )
                assert found is not None
                assert found.value in grid[network]


def test_the_grids_have_more_than_a_hundred_values():
    assert len(PMSE_BETA["mlp5"]) == 9 + 19 + 16 + 70
    assert len(PMSE_BETA["resnet18"]) == 9 + 38 + 16 + 70
    assert len(ATTACK_SIGMA2["mlp5"]) == 2 + 9 + 17
    assert len(ATTACK_SIGMA2["resnet18"]) == 2 + 5 + 1 + 5
    assert len(ATTACK_BETA["mlp5"]) == 19 + 16 + 11
    assert len(ATTACK_BETA["resnet18"]) == 9 + 7
    assert all(
        grid == sorted(set(grid)) for grids in (PMSE_BETA, ATTACK_SIGMA2, ATTACK_BETA) for grid in grids.values()
    )


def test_the_sigma_of_the_paper_is_the_second_candidate():
    for epsilon, variance in ((0.25, 4.5e-5), (0.5, 1.8e-4), (1.0, 7.2e-4)):
        assert sigma_candidates(epsilon, 784)[1] ** 2 == pytest.approx(variance, rel=0.01)


@pytest.fixture(scope="module")
def make():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = MLP((12, 16, 16, 4))
    found = untrained(net, net.f[-2], images())
    x = found.inputs("val", 6)
    return Maker(found, x, found.predicted(x), n_calls=60, seed=3)


def test_the_choice_is_that_of_select(make):
    """β by our products along displacements, against the library's own SoftPlus."""
    betas = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    for method, name in ((PMSE[2], "softplus"), (PMSE[3], "softplus"), (PMSE[4], "swish")):
        ours = choose(make, method, [0.5, 1.0], betas, n_samples=10, sampling="radius", seed=1)
        for radius, found in zip([0.5, 1.0], ours, strict=True):
            theirs = select(
                make.classifier.readout,
                make.inputs,
                make.target,
                radius=radius,
                method=name,
                values=found.values.tolist(),
                order=method.order,
                n_samples=10,
                sampling="radius",
                seed=1,
            )
            torch.testing.assert_close(found.scores, theirs.scores, rtol=2e-3, atol=1e-9)
            assert found.best == theirs.best


def test_sigma_is_chosen_for_each_radius(make):
    found = choose(make, PMSE[0], [0.5, 1.0], [], n_samples=20, sampling="ball")
    assert [s.values.tolist() for s in found] == [sigma_candidates(0.5, 12), sigma_candidates(1.0, 12)]


def test_estimates_are_made_once(make, monkeypatch):
    made = []
    monkeypatch.setattr(Maker, "_attribute", lambda self, sigma, **options: made.append(sigma) or f"{sigma}")
    fresh = Maker(make.classifier, make.inputs, make.target, n_calls=60)
    assert [fresh(method, 0.1) for method in PMSE[:2]] == ["0.1", "0.1"]
    for sigma in (0.2, 0.3, 0.4, 0.1):
        fresh.smooth(sigma)
    assert made == [0.1, 0.2, 0.3, 0.4, 0.1]  # the oldest made room


def test_the_recipe_is_equation_8_with_pairs(make):
    found = make.recipe(0.1, 40)
    assert (found.design, found.control, found.shrink, int(found.n_calls[0])) == ("antithetic", None, False, 40)
