"""Gauss-Newton steps against dense linear algebra, and their checkpoints."""

from dataclasses import replace

import pytest
import torch
from torch.func import functional_call, jacrev

from paper import datasets, gauss_newton
from paper.datasets import Split
from paper.experiments import plane
from paper.gauss_newton import GaussNewton, refine
from paper.networks import MLP
from paper.options import Options
from paper.training import FOUR_QUADRANT, NESTED, NESTED_REFINED, shortened

RECIPE = GaussNewton(6, 20, rate=0.4, final_rate=0.1, damping=1e-2)


def network(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MLP((2, 9, 7, 1)).double()


def examples(step=0.25):
    points = datasets.plane_grid(step).double()
    return Split(points, datasets.four_quadrant(points))


def flat(tensors):
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def dense_steps(net, data, recipe, n_steps, seed=0):
    """The parameters after some steps, with J from automatic differentiation and the formula of the module."""
    parameters = {name: value.detach().clone() for name, value in net.named_parameters()}
    direction = torch.zeros_like(flat(parameters.values()))
    for step in range(n_steps):
        generator = torch.Generator().manual_seed(seed * 2**31 + step)
        rows = torch.randint(len(data), (recipe.batch_size,), generator=generator)
        x, y = data.inputs[rows], data.targets[rows]

        def outputs(values, x=x):
            return functional_call(net, values, (x,))[:, 0]

        jacobian = torch.cat([part.flatten(1) for part in jacrev(outputs)(parameters).values()], 1)  # (N, P)
        kernel = jacobian @ jacobian.T
        kernel += recipe.damping * kernel.diagonal().mean() * torch.eye(len(x), dtype=torch.float64)
        residual = y - outputs(parameters) - recipe.momentum * jacobian @ direction
        direction = recipe.momentum * direction + jacobian.T @ torch.linalg.solve(kernel, residual)
        moved = flat(parameters.values()) + recipe.rate_at(step) * direction
        parts = moved.split([value.numel() for value in parameters.values()])
        parameters = {name: part.view_as(value) for (name, value), part in zip(parameters.items(), parts, strict=True)}
    return flat(parameters.values())


@pytest.mark.parametrize("n_steps", [1, 4])
def test_steps_equal_those_with_a_dense_jacobian(n_steps):
    net, data = network(), examples()
    expected = dense_steps(net, data, RECIPE, n_steps)
    refine(net, data, RECIPE, n_steps=n_steps)
    torch.testing.assert_close(flat(net.state_dict().values()), expected, rtol=1e-8, atol=1e-10)


def test_an_interrupted_refinement_gives_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(gauss_newton, "_EVERY", 2)
    straight, resumed, path = network(), network(), tmp_path / "state.safetensors"
    before = torch.get_rng_state()
    refine(straight, examples(), RECIPE, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    refine(resumed, examples(), RECIPE, seed=3, n_steps=4, checkpoint=path)
    another = network(seed=9)  # its weights are replaced by those of the checkpoint
    refine(another, examples(), RECIPE, seed=3, checkpoint=path)
    for a, b in zip(straight.parameters(), another.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="expected a checkpoint of"):
        refine(network(), examples(), RECIPE, seed=4, checkpoint=path)


@pytest.mark.parametrize("other", [{"damping": 0.1}, {"rate": 0.3}, {"final_rate": 0.05}, {"momentum": 0.8}])
def test_a_checkpoint_of_another_recipe_is_not_resumed(tmp_path, other):
    path = tmp_path / "state.safetensors"
    refine(network(), examples(), RECIPE, n_steps=2, checkpoint=path)
    with pytest.raises(ValueError, match="expected a checkpoint of"):
        refine(network(), examples(), replace(RECIPE, **other), checkpoint=path)


def test_residuals_that_are_not_finite_raise():
    net, data = network(), examples()
    with pytest.raises(FloatingPointError, match="smaller rate or more damping"):
        refine(net, replace(data, targets=data.targets * float("inf")), RECIPE)


def test_a_refined_network_is_stored_and_can_be_stopped_in_either_stage(tmp_path):
    recipe, sizes, points = shortened(FOUR_QUADRANT, 60), (2, 16, 1), datasets.plane_grid(0.5)

    def fit(steps=None):
        options = Options(tmp_path, steps=steps)
        return plane.trained("toy", datasets.four_quadrant, recipe, options, sizes, points, RECIPE)

    full, first, second = fit(), fit(50), fit(63)
    assert (full.words.split(",")[0], first.words.split(",")[0], second.words.split(",")[0]) == (
        "66 steps",
        "50 of 66 steps",
        "63 of 66 steps",
    )
    assert len({full.mse, first.mse, second.mse}) == 3
    assert fit().mse == full.mse
    names = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert names == [f"toy-refined-{kind}steps-seed-0.safetensors" for kind in ("50-of-66-", "63-of-66-", "66-")]
    with pytest.raises(ValueError, match="--steps must be at most 66"):
        fit(67)


def test_the_options_choose_the_stages(tmp_path):
    assert plane.stages(NESTED, NESTED_REFINED, 4_000, Options(tmp_path)) == (NESTED, None)
    assert plane.stages(NESTED, NESTED_REFINED, 4_000, Options(tmp_path, refined=True)) == NESTED_REFINED
    short, second = plane.stages(NESTED, NESTED_REFINED, 4_000, Options(tmp_path, refined=True, quick=True))
    assert (short.n_steps, second.n_steps) == (500, 30)
    assert Options(tmp_path, refined=True, quick=True).folder("nested").name == "nested-refined-quick"
    assert "--refined" in Options(tmp_path, refined=True).command("nested")
