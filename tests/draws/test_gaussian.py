import math

import pytest
import torch

from smoothhess import Dense, Diagonal, Eigenbasis, Gaussian, Isotropic
from tests.truths import covariance, gaussians


@pytest.mark.parametrize("kind", sorted(gaussians(5)))
@pytest.mark.parametrize("d", [1, 2, 5])
class TestContract:
    """What every Gaussian owes: four linear maps of one root L."""

    def test_maps_belong_to_one_root(self, kind, d):
        gaussian = gaussians(d)[kind]
        k = gaussian.rank(d)
        root = gaussian.colour(torch.eye(k).double()).mT  # (d, k)
        inverse = torch.linalg.pinv(root)
        x = torch.randn(7, d, generator=torch.Generator().manual_seed(0)).double()
        z = x[:, :k]
        torch.testing.assert_close(gaussian.pull(x), x @ root)
        torch.testing.assert_close(gaussian.whiten(z @ root.mT), z)
        torch.testing.assert_close(gaussian.whiten(x), x @ inverse.mT)
        torch.testing.assert_close(gaussian.push(z), z @ inverse)

    def test_scales_are_the_standard_deviations(self, kind, d):
        gaussian = gaussians(d)[kind]
        torch.testing.assert_close(gaussian.scales(d), covariance(gaussian, d).diagonal().sqrt())

    def test_state_makes_it_again(self, kind, d):
        gaussian = gaussians(d)[kind]
        again = Gaussian.from_state(type(gaussian).__name__, gaussian.state())
        assert gaussian.same_as(again)
        assert not gaussian.same_as(Isotropic(0.123))

    def test_follows_dtype(self, kind, d):
        gaussian = gaussians(d)[kind].to("cpu", torch.float32)
        assert gaussian.colour(torch.ones(gaussian.rank(d))).dtype == torch.float32


def test_covariances_are_what_was_asked_for():
    q = torch.tensor([[3.0, 4.0, 0.0], [1.0, 0.0, 0.0]]).double()
    first, second = torch.tensor([0.6, 0.8, 0.0]).double(), torch.tensor([0.8, -0.6, 0.0]).double()
    rest = torch.tensor([0.0, 0.0, 1.0]).double()
    expected = 0.25 * first.outer(first) + 0.01 * second.outer(second) + 0.04 * rest.outer(rest)
    torch.testing.assert_close(covariance(Eigenbasis(q, [0.5, 0.1], rest=0.2), 3), expected)
    matrix = torch.tensor([[2.0, 0.5], [0.5, 1.0]]).double()
    torch.testing.assert_close(covariance(Dense(matrix), 2), matrix)
    assert covariance(Diagonal([1.0, 0.0, 2.0]), 3).diagonal().tolist() == [1.0, 0.0, 4.0]


def test_radius_rule():
    assert Isotropic.from_radius(0.5, 784).sigma == 0.5 / 28
    gaussian = Gaussian.ensure(radius=2.0, d=9)
    assert isinstance(gaussian, Isotropic)
    assert gaussian.sigma == pytest.approx(2 / 3)


def test_sigma_per_feature_has_the_shape_of_an_input():
    gaussian = Gaussian.ensure(sigma=torch.ones(2, 3), d=6)
    assert isinstance(gaussian, Diagonal)
    assert gaussian.dimension == 6


def test_from_data_moves_features_as_the_data_do():
    rng = torch.Generator().manual_seed(0)
    mix = torch.tensor([[1.0, 0.0], [0.9, 0.1]]).double()
    data = torch.randn(20_000, 2, generator=rng).double() @ mix.mT
    torch.testing.assert_close(covariance(Dense.from_data(data, scale=0.1), 2), 0.01 * torch.cov(data.T))
    with pytest.raises(ValueError, match=r"not positive definite .* Pass ridge=0\.01"):
        Dense.from_data(torch.ones(5, 3))
    assert Dense.from_data(torch.randn(4, 6, generator=rng), ridge=0.1).dimension == 6


def test_a_photo_needs_no_square_matrix():
    d = 150_528
    directions = torch.randn(3, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    singular = Eigenbasis(directions, [1.0, 2.0, 3.0], rest=0.0)
    full = Eigenbasis(directions, [1.0, 2.0, 3.0], rest=0.5)
    assert (singular.rank(d), full.rank(d)) == (3, d)
    x = torch.ones(2, d).double()
    torch.testing.assert_close(full.whiten(full.colour(x)), x)
    assert float(singular.scales(d).square().sum()) == pytest.approx(1 + 4 + 9)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Isotropic(-1.0), "sigma must be positive, a standard deviation, got -1"),
        (lambda: Isotropic(0.0), "sigma must be positive"),
        (lambda: Isotropic(math.nan), "sigma must be finite"),
        (lambda: Diagonal([1.0, -2.0]), "sigma must not be negative"),
        (lambda: Diagonal([0.0, 0.0]), "zero for every feature"),
        (lambda: Dense([[1.0, 2.0], [2.0, 1.0]]), "lowest eigenvalue is -1"),
        (lambda: Dense([[1.0, 1.0], [1.0, 1.0]]), "must be positive definite"),
        (lambda: Dense([[1.0, 0.0]]), r"square matrix \(d, d\), got shape \(1, 2\)"),
        (lambda: Dense([[1.0, 0.5], [0.0, 1.0]]), "must be symmetric"),
        (lambda: Eigenbasis([[1.0, 0.0], [2.0, 0.0]], [1.0, 1.0], 0.0), "linearly independent"),
        (lambda: Eigenbasis([[1.0, 0.0]], [1.0, 1.0], 0.0), "got 1 directions and 2 sigmas"),
        (lambda: Eigenbasis([[1.0, 0.0]], [0.0], 1.0), "sigmas must be positive"),
        (lambda: Gaussian.ensure(d=3), "exactly one of sigma .* got none of them"),
        (lambda: Gaussian.ensure(sigma=1.0, radius=1.0, d=3), "got sigma and radius"),
        (lambda: Gaussian.ensure(radius=-1.0, d=3), "radius must be one positive number"),
        (lambda: Gaussian.ensure(sigma=[1.0, 2.0], d=3), "made for 2 features but an input has 3"),
        (lambda: Gaussian.ensure(gaussian=Dense(torch.eye(2)), d=3), "made for 2 features but an input has 3"),
    ],
)
def test_refused_with_a_reason(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_wrong_types_are_refused():
    with pytest.raises(TypeError, match="For a number pass sigma="):
        Gaussian.ensure(gaussian=0.5, d=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sigma must be real numbers"):
        Diagonal("wide")
