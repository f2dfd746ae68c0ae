"""Where the perturbations go: uniform in the ball, or with a uniform radius."""

import math

import pytest
import torch

from smoothhess.draws.designs import DESIGNS
from smoothhess.evaluate.ball_samples import BLOCK, displacements

N = 20_000


def z_score(values, truth):
    return float((values.mean() - truth) / (values.std() / math.sqrt(len(values))))


@pytest.mark.parametrize("d", [1, 2, 7, 50])
@pytest.mark.parametrize("sampling", ["ball", "radius"])
def test_radii_follow_their_law(sampling, d):
    radius = displacements(sampling, 3, 0, N, d).norm(dim=1)
    uniform = radius**d if sampling == "ball" else radius
    assert uniform.max() <= 1 + 1e-12
    ranks = (torch.arange(N) + 0.5) / N
    kolmogorov = float((uniform.sort().values - ranks).abs().max()) * math.sqrt(N)
    assert kolmogorov < 1.95  # beyond it: 1 in 1000
    assert abs(z_score(uniform, 1 / 2)) < 4
    assert abs(z_score(uniform**2, 1 / 3)) < 4


@pytest.mark.parametrize("sampling", ["ball", "radius"])
def test_directions_are_uniform_and_independent_of_the_radius(sampling):
    d = 4
    delta = displacements(sampling, 1, 0, N, d)
    radius = delta.norm(dim=1)
    u = delta / radius[:, None]
    for i in range(d):
        assert abs(z_score(u[:, i], 0)) < 4
        assert abs(z_score(u[:, i] ** 2, 1 / d)) < 4
        assert abs(z_score(u[:, i] ** 4, 3 / (d * (d + 2)))) < 4
        assert abs(z_score(u[:, i] * u[:, (i + 1) % d], 0)) < 4
        assert abs(z_score((u[:, i] ** 2 - 1 / d) * (radius - radius.mean()), 0)) < 4


def test_one_dimension_is_an_interval():
    delta = displacements("ball", 0, 0, N, 1)[:, 0]
    assert abs(z_score((delta > 0).double(), 1 / 2)) < 4
    assert abs(z_score(delta**2, 1 / 3)) < 4


def test_a_row_depends_on_seed_and_place_alone():
    whole = displacements("ball", 5, 0, 3 * BLOCK, 6)
    pieces = [displacements("ball", 5, a, b, 6) for a, b in [(0, 1), (1, BLOCK + 3), (BLOCK + 3, 3 * BLOCK)]]
    assert torch.equal(whole, torch.cat(pieces))
    assert not torch.allclose(whole, displacements("ball", 6, 0, 3 * BLOCK, 6))


def test_both_samplers_share_directions_and_uniform_numbers():
    ball, radius = (displacements(s, 2, 0, 100, 5) for s in ("ball", "radius"))
    torch.testing.assert_close(ball.norm(dim=1) ** 5, radius.norm(dim=1))
    torch.testing.assert_close(ball / ball.norm(dim=1, keepdim=True), radius / radius.norm(dim=1, keepdim=True))


@pytest.mark.parametrize("design", DESIGNS)
def test_directions_are_not_those_of_an_estimate_with_the_same_seed(design):
    """Otherwise a surrogate would be judged where it was fitted."""
    u = displacements("ball", 0, 0, 64, 32)
    z = DESIGNS[design].rows(0, 0, 64, 32).z
    cosine = (u / u.norm(dim=1, keepdim=True)) @ (z / z.norm(dim=1, keepdim=True)).mT
    assert cosine.abs().max() < 0.85


def test_the_global_generator_does_not_move():
    before = torch.random.get_rng_state()
    displacements("ball", 0, 0, 100, 3)
    assert torch.equal(before, torch.random.get_rng_state())


def test_unknown_sampling_is_refused():
    with pytest.raises(ValueError, match=r'sampling must be "ball" .* or "radius" .*, got \'sphere\''):
        displacements("sphere", 0, 0, 10, 3)
