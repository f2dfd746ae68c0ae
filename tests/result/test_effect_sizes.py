"""Sizes of pairs: their definition on polynomials, their errors, and results that have no draws or move as groups."""

import math

import pytest
import torch

import smoothhess as sh
from smoothhess.result.effect_sizes import EffectSizes, share_text, size_sentence

SIGMA = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
SLOPE = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
BEND = torch.tensor([[0.6, 0.8, 0.0], [0.8, -0.4, 0.3], [0.0, 0.3, 0.2]], dtype=torch.float64)
POINT = torch.tensor([[0.3, -0.7, 1.1]], dtype=torch.float64)


def quadratic(x):
    return x @ SLOPE + (x @ BEND * x).sum(-1) / 2


def expected(i, j):
    """Shares of the pair by the definition."""
    slope = SLOPE + POINT[0] @ BEND
    squares = (slope * SIGMA) ** 2 + (BEND.diagonal() * SIGMA**2) ** 2 / 2
    effects = (BEND * SIGMA[:, None] * SIGMA) ** 2
    spread = squares.sum() + (effects.sum() - effects.diagonal().sum()) / 2
    effect = effects[i, j].sqrt()
    return float(effect / (squares[i] + squares[j]).sqrt()), float(effect / spread.sqrt())


def exact(**options):
    slope = SLOPE + POINT[0] @ BEND
    return sh.Exact.make(POINT, quadratic(POINT), slope[None], BEND[None], **{"scales": SIGMA, **options})


def test_sizes_of_an_exact_quadratic_are_the_definition():
    for p in exact().top_pairs(3)[0]:
        assert (p.separate_share, p.output_share) == pytest.approx(expected(p.i, p.j))
        assert p.separate_share_stderr == 0 or p.value == 0


def test_terms_of_first_and_second_order_are_the_variance_of_a_quadratic():
    draws = SIGMA * torch.randn(200_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = quadratic(POINT + draws)
    variance = values.var()
    error = ((values - values.mean()).square().var() / len(values)).sqrt()
    assert abs(float(EffectSizes.of(exact()).output[0]) ** 2 - variance) < 4 * error


@pytest.mark.parametrize("design", ["orthogonal", "iid", "antithetic", "sobol"])
@pytest.mark.parametrize("control", [None, "kink"])
def test_the_change_of_the_output_is_the_standard_deviation_of_the_values(design, control):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 20), torch.nn.ReLU(), torch.nn.Linear(20, 1)).double()
    result = sh.SmoothHess(net).attribute(POINT, sigma=SIGMA, n_calls=1200, design=design, control=control)
    draws = SIGMA * torch.randn(100_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        spread = float(net(POINT + draws).std())
    assert float(EffectSizes.of(result).output[0]) == pytest.approx(spread, rel=0.1)  # about 4 standard errors


def test_sizes_of_a_sampled_quadratic_agree_within_their_errors():
    result = sh.SmoothHess(quadratic).attribute(POINT, sigma=SIGMA, n_calls=3000, design="iid", control=None)
    p = next(p for p in result.top_pairs(3)[0] if (p.i, p.j) == (0, 1))
    share, output = expected(0, 1)
    assert abs(p.separate_share - share) < 4 * p.separate_share_stderr
    assert abs(p.output_share - output) < 5 * p.stderr / abs(p.value) * output


def test_standard_errors_of_shares_are_the_spread_over_seeds():
    options = {"n_calls": 400, "design": "iid", "control": None, "seed": range(60)}
    made = sh.SmoothHess(quadratic).attribute(POINT.expand(60, -1), sigma=SIGMA, **options)
    found = [p for pairs in made.top_pairs(3) for p in pairs if (p.i, p.j) == (0, 1)]
    shares, errors = ([getattr(p, f"separate_share{name}") for p in found] for name in ("", "_stderr"))
    spread, error = float(torch.tensor(shares).std()), sum(errors) / len(errors)
    assert 0.7 < error / spread < 1.4  # the spread of 60 has a relative error of 0.09


def test_a_word_belongs_to_the_smaller_share_and_a_bound_to_noise():
    x = torch.zeros(1, 3, dtype=torch.float64)
    result = sh.SmoothHess(lambda x: x[:, 0] * x[:, 1] + 30 * x[:, 2]).attribute(x, sigma=1.0, n_calls=400)
    p = result.top_pairs(1)[0][0]
    assert (p.i, p.j) == (0, 1)
    assert p.separate_share > 5
    assert p.size == "small"  # 3 % of the change of the output
    noisy = sh.SmoothHess(lambda x: (x @ SLOPE).relu()).attribute(x, sigma=1.0, n_calls=20, control=None)
    unsure = [p for p in noisy.top_pairs(3)[0] if p.low < 0 < p.high]
    assert unsure
    assert all(p.size.startswith("at most ") for p in unsure)


def test_nothing_is_divided_by_zero():
    x = torch.zeros(1, 3, dtype=torch.float64)
    matrix = torch.tensor([[[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]], dtype=torch.float64)
    p, none, _ = sh.Exact.make(x, x.sum(1), x, matrix).top_pairs(3)[0]
    assert (p.separate_share, p.output_share, p.size) == (math.inf, 1.0, "large")
    assert size_sentence(p) == "100 % of the output’s change (large)"
    assert math.isnan(p.separate_share_stderr)
    assert (none.separate_share, none.output_share, none.size) == (0.0, 0.0, "none")


def test_sizes_of_groups_are_those_of_their_joint_moves():
    """Groups with one feature each have the sizes of the features; a group moves by its root mean square σ."""
    alone = exact().groups(torch.tensor([0, 1, 2])).top_pairs(3)[0]
    assert [p[-4:-1] for p in alone] == [pytest.approx(p[-4:-1], nan_ok=True) for p in exact().top_pairs(3)[0]]
    p = exact(scales=None).groups(torch.tensor([0, 0, 1])).top_pairs(1)[0][0]
    slope = SLOPE + POINT[0] @ BEND
    squares = [float((slope[:2].sum()) ** 2 + BEND[:2, :2].sum() ** 2 / 2), float(slope[2] ** 2 + BEND[2, 2] ** 2 / 2)]
    effect = float(BEND[:2, 2].sum())
    assert p.separate_share == pytest.approx(effect / math.sqrt(sum(squares)))
    assert p.output_share == pytest.approx(effect / math.sqrt(sum(squares) + effect**2))


def test_groups_that_are_the_segments_of_the_noise_use_the_values():
    """A function of higher order, whose terms of first and second order are not all of its change."""
    mask, x = torch.tensor([0, 0, 1]), torch.zeros(1, 3, dtype=torch.float64)
    shifted = sh.SmoothHess(lambda x: (2 * x[:, :2].sum(1) + x[:, 2]).sin())
    result = shifted.attribute(
        x, gaussian=sh.segments.noise(mask, 1.0), n_calls=2000, control=None, design="iid"
    ).groups(mask)
    p = result.top_pairs(1)[0][0]
    spread = math.sqrt((1 - math.exp(-2 * 17)) / 2)  # of sin z, z ~ N(0, 17)
    assert p.output_share == pytest.approx(abs(p.effect) / spread, rel=0.05)


def test_correlated_noise_uses_the_standard_deviations_of_the_features():
    covariance = torch.tensor([[0.25, 0.2, 0.0], [0.2, 1.0, 0.0], [0.0, 0.0, 4.0]], dtype=torch.float64)
    result = sh.SmoothHess(quadratic).attribute(
        POINT, gaussian=sh.Dense(covariance), n_calls=6000, control=None, design="iid"
    )
    p = next(p for p in result.top_pairs(3)[0] if (p.i, p.j) == (0, 1))
    assert p.separate_share == pytest.approx(expected(0, 1)[0], rel=0.2)
    draws = torch.randn(200_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    spread = float(quadratic(POINT + draws @ torch.linalg.cholesky(covariance).mT).std())
    assert p.output_share == pytest.approx(abs(p.effect) / spread, rel=0.06)


def test_given_scales_replace_those_of_the_noise():
    result = sh.SmoothHess(quadratic).attribute(POINT, sigma=0.1, n_calls=4000, design="iid", control=None)
    p = next(p for p in result.top_pairs(3, scales=SIGMA)[0] if (p.i, p.j) == (0, 1))
    assert (p.separate_share, p.output_share) == pytest.approx(expected(0, 1), rel=0.1)


def test_sizes_survive_files_merging_and_selection(tmp_path):
    def run(seed):
        return sh.SmoothHess(quadratic).attribute(POINT, sigma=SIGMA, n_calls=400, seed=seed)

    one, other = run(0), run(1)
    both = one.merge(other)
    means = [r.statistics.square_sum / r.statistics.n for r in (one, other, both)]
    torch.testing.assert_close((means[0] + means[1]) / 2, means[2])
    one.save(tmp_path / "one.safetensors")
    read = sh.Interactions.load(tmp_path / "one.safetensors")
    assert [p.size for p in read.top_pairs(3)[0]] == [p.size for p in one.top_pairs(3)[0]]
    torch.testing.assert_close(sh.Interactions.cat([one, other])[1].statistics.square_sum, other.statistics.square_sum)


def test_older_files_have_sizes_of_the_terms():
    old = sh.Interactions.load("tests/data/sampled.safetensors")
    assert bool(old.statistics.square_sum.isnan().all())
    assert all(p.size and not math.isnan(p.output_share) for pairs in old.top_pairs(2) for p in pairs)


def test_attributions_have_no_sizes():
    found = sh.Attribution.make(POINT, quadratic(POINT), POINT, BEND[None], method="some index")
    assert "of separate" not in repr(found.top_pairs(2))
    assert found.top_pairs(1)[0][0].size == ""
    assert size_sentence(found.top_pairs(1)[0][0]) == ""


@pytest.mark.parametrize("share", [0.0, 1.5, 999.0, 1e5, math.inf])
def test_every_share_has_a_text(share):
    assert share_text(share)
