"""Noise that moves whole segments: the result is that of the model as a function of the K shifts."""

import math

import pytest
import torch
from torch import nn

import smoothhess as sh
from smoothhess import Interactions, SmoothHess, segments
from smoothhess.evaluate import validate_pairs
from smoothhess.result.segments import noise
from tests.truths import OneHidden, Plain, covariance, quadratic

SHAPE = (2, 4, 5)
D = math.prod(SHAPE)
PARTS = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 5, 0, 1, 2]).reshape(4, 5).expand(SHAPE)
SIGMAS = torch.tensor([0.2, 0.5, 0.3, 0.4, 0.25, 0.6], dtype=torch.float64)
K = len(SIGMAS)


def inside():
    """(K, D), one row of ones and zeros for each segment."""
    return nn.functional.one_hot(PARTS.reshape(-1)).T.double()


def points(count, seed=0):
    return 0.3 * torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of_shifts(model, x):
    """The model as a function of the shifts t (n, K) of the segments of one input."""
    return lambda t: model(x + (t @ inside().to(t)).reshape(-1, *SHAPE))


def relu_truth(net, x):
    """Hessian and gradient of Σ a relu(w·x + b) in the shifts: only the sums of w over the segments matter."""
    with torch.no_grad():
        w = net.w @ inside().T  # (width, K)
        s = x.flatten(1) @ net.w.mT + net.b
        tau = (w.square() @ SIGMAS.square()).sqrt()
        density = torch.exp(-((s / tau) ** 2) / 2) / math.sqrt(2 * math.pi) / tau
        hessian = torch.einsum("bu,uk,ul->bkl", net.a * density, w, w)
        return hessian, (net.a * torch.special.ndtr(s / tau)) @ w


# --- the Gaussian -----------------------------------------------------------------------------------------------------


def test_the_covariance_is_one_shift_for_each_segment():
    gaussian = noise(PARTS, SIGMAS)
    expected = sum(s**2 * row.outer(row) for s, row in zip(SIGMAS, inside(), strict=True))
    torch.testing.assert_close(covariance(gaussian, D), expected)
    eigenvalues = torch.linalg.eigvalsh(expected)[-K:]
    torch.testing.assert_close(gaussian.precisions(D).sort().values, (1 / eigenvalues).flip(0))
    torch.testing.assert_close(gaussian.precision_diagonal(D), torch.linalg.pinv(expected, hermitian=True).diagonal())
    assert gaussian.rank(D) == K


def test_it_is_that_of_the_eigenbasis():
    size = inside().sum(1).sqrt()
    other = sh.Eigenbasis(inside() / size[:, None], SIGMAS * size, rest=0.0)
    model, x = OneHidden(D), points(2)
    ours, theirs = (
        Plain(model).attribute(x, gaussian=g, feature_mask=PARTS, n_calls=60) for g in (noise(PARTS, SIGMAS), other)
    )
    torch.testing.assert_close(ours.hessian, theirs.hessian)
    torch.testing.assert_close(ours.stderr(), theirs.stderr())
    torch.testing.assert_close(ours.gradient, theirs.gradient)


def test_a_segment_without_noise_stays_still():
    sigmas = SIGMAS.clone()
    sigmas[3] = 0
    gaussian = noise(PARTS, sigmas)
    assert gaussian.rank(D) == K - 1
    assert not bool(gaussian.colour(torch.ones(K - 1).double())[PARTS.reshape(-1) == 3].any())
    matrix, slope = quadratic(D)
    result = Plain(lambda x: x.flatten(1) @ slope + (x.flatten(1) @ matrix * x.flatten(1)).sum(1) / 2).attribute(
        points(1), gaussian=gaussian, feature_mask=PARTS, n_calls=2 * (K - 1)
    )
    expected = inside() @ matrix @ inside().T
    expected[3], expected[:, 3] = 0, 0
    torch.testing.assert_close(result.hessian[0], expected)
    assert not bool(result.stderr()[0, 3].any())


def test_a_photo_needs_no_large_matrix():
    cells = segments.grid((3, 224, 224), 10)
    gaussian = noise(cells, 0.1)
    held = sum(v.numel() for v in gaussian.state().values())
    assert held < 2 * 150_528
    assert gaussian.rank(150_528) == 100
    z = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(gaussian.whiten(gaussian.colour(z)), z)


@pytest.mark.parametrize(
    ("parts", "sigma", "words"),
    [
        (torch.tensor([0, 2, 2]), 0.1, r"ids 0 … 2 must have a feature, got 1 without \(such as 1\).*from_mask"),
        (torch.tensor([-1, 0]), 0.1, "segment ids must be 0, 1, 2, …, got -1"),
        (torch.zeros(0, dtype=torch.long), 0.1, "got none"),
        (torch.tensor([0, 1]), [0.1, 0.2, 0.3], r"one per segment, 2 here, got shape \(3,\)"),
        (torch.tensor([0, 1]), -0.1, "sigma must be a positive, finite standard deviation"),
        (torch.tensor([0, 1]), [0.0, 0.0], "sigma must be a positive, finite standard deviation"),
        (torch.tensor([0, 1]), math.nan, "sigma must be a positive, finite standard deviation"),
    ],
)
def test_what_cannot_be_moved_is_refused(parts, sigma, words):
    with pytest.raises(ValueError, match=words):
        noise(parts, sigma)


def test_wrong_types_are_refused():
    with pytest.raises(TypeError, match="integer ids"):
        noise(torch.zeros(3), 0.1)
    with pytest.raises(TypeError, match="one by one, each with its own segments.noise"):
        noise([segments.grid((4, 4), 2), segments.grid((4, 4), 1)], 0.1)
    with pytest.raises(TypeError, match="a number or one per segment"):
        noise(torch.tensor([0, 1]), "wide")


def test_a_mask_for_each_example_is_refused_with_the_way_out():
    masks = torch.stack([PARTS, PARTS.flip(1)])
    with pytest.raises(ValueError, match=r"80 features but an input has 40\. One Gaussian .* one by one: attribute"):
        SmoothHess(OneHidden(D)).attribute(points(2), gaussian=noise(masks, 0.1), feature_mask=masks)
    with pytest.raises(ValueError, match=r"20 features but an input has 40\. Pass a mask with the shape of one input"):
        SmoothHess(OneHidden(D)).attribute(points(2), gaussian=noise(PARTS[0], 0.1))


# --- what the numbers are ---------------------------------------------------------------------------------------------


def test_a_quadratic_is_exact_from_one_block():
    matrix, slope = quadratic(D)
    x, sums = points(2), inside()

    def f(x):
        return x.flatten(1) @ slope + (x.flatten(1) @ matrix * x.flatten(1)).sum(1) / 2

    gaussian = noise(PARTS, SIGMAS)
    streamed = Plain(f).attribute(x, gaussian=gaussian, feature_mask=PARTS, n_calls=2 * K)
    whole = Plain(f).attribute(x, gaussian=gaussian, n_calls=2 * K)
    for result in (streamed, whole.groups(PARTS)):
        torch.testing.assert_close(result.hessian, (sums @ matrix @ sums.T).expand(2, K, K))
        torch.testing.assert_close(result.gradient, (slope + x.flatten(1) @ matrix) @ sums.T)
    average = sums.T @ torch.diag(1 / sums.sum(1)) @ sums  # P: the mean over a feature's segment
    torch.testing.assert_close(whole.hessian, (average @ matrix @ average).expand(2, D, D))


@pytest.mark.parametrize("control", [None, "kink"])
def test_relu_units_have_their_closed_form(control):
    net, x = OneHidden(D, width=30), points(2)
    expected, slope = relu_truth(net, x)
    options = {"gaussian": noise(PARTS, SIGMAS), "n_calls": 240 * K, "control": control}
    result = SmoothHess(net).attribute(x, feature_mask=PARTS, **options)
    if control is not None:  # each unit flips by itself: the closed form is exact
        torch.testing.assert_close(result.hessian, expected, rtol=1e-6, atol=1e-9)
        return
    z = (result.hessian - expected) / result.stderr()
    assert float(z.abs().max()) < 4.5
    assert 0.5 < float(z.square().mean()) < 2
    z = (result.gradient - slope) / result.gradient_stderr
    assert float(z.abs().max()) < 4.5
    off = float((result.hessian - expected).norm() / expected.norm())
    assert 0.4 * off < float(result.relative_error.mean()) < 2.5 * off
    grouped = SmoothHess(net).attribute(x, shrink=False, **options).groups(PARTS)
    torch.testing.assert_close(grouped.hessian, result.hessian)
    torch.testing.assert_close(grouped.stderr(), result.stderr())
    torch.testing.assert_close(
        grouped.relative_error, result.relative_error, rtol=0.02, atol=0
    )  # by probes, and by all


def test_it_is_the_model_of_the_shifts():
    """Draw for draw: the same numbers, scales, effects and calls as of a model with the K shifts for inputs."""
    net, x = nn.Sequential(nn.Flatten(), nn.Linear(D, 24), nn.Tanh(), nn.Linear(24, 1)).double(), points(1)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).double() / 3)
    shifts = Plain(of_shifts(net, x)).attribute(torch.zeros(1, K).double(), sigma=SIGMAS, n_calls=20 * K)
    result = Plain(net).attribute(x, gaussian=noise(PARTS, SIGMAS), feature_mask=PARTS, n_calls=20 * K)
    torch.testing.assert_close(result.hessian, shifts.hessian)
    torch.testing.assert_close(result.gradient, shifts.gradient)
    torch.testing.assert_close(result.gradient_stderr, shifts.gradient_stderr)
    torch.testing.assert_close(result.value, shifts.value)
    assert float((result.stderr() / shifts.stderr()).log().abs().max()) < 0.2
    torch.testing.assert_close(result.grouping.scales[0], SIGMAS)
    own, other = (sorted(r.top_pairs(K * (K - 1) // 2)[0], key=lambda p: (p.i, p.j)) for r in (result, shifts))
    for p, q in zip(own, other, strict=True):
        assert (p.i, p.j) == (q.i, q.j)
        assert p.effect == pytest.approx(q.effect)
        assert p.effect == pytest.approx(p.value * float(SIGMAS[p.i] * SIGMAS[p.j]))
    u, v = torch.randn(2, K, generator=torch.Generator().manual_seed(1)).double()
    torch.testing.assert_close(result.bilinear(u, v).value, shifts.bilinear(u, v).value)
    torch.testing.assert_close(result.row(2).value, shifts.row(2).value)
    torch.testing.assert_close(result.row(2).value, result.hessian[:, 2])
    torch.testing.assert_close(result.row(2).stderr, result.stderr()[:, 2])
    torch.testing.assert_close(result.diagonal().value, shifts.diagonal().value)
    torch.testing.assert_close(result @ v, shifts @ v)


def test_still_features_do_not_make_the_move_of_their_group_smaller():
    still = torch.cat([torch.zeros(3, dtype=torch.long), torch.ones(3, dtype=torch.long)])
    gaussian = noise(torch.tensor([0, 0, 1, 2, 2, 2]), [0.5, 0.0, 0.2])
    result = SmoothHess(lambda x: x.sum(1) ** 2).attribute(
        torch.zeros(1, 6).double(), gaussian=gaussian, feature_mask=still, n_calls=40
    )
    torch.testing.assert_close(result.grouping.scales[0], torch.tensor([0.5, 0.2]).double())


# --- results as all others --------------------------------------------------------------------------------------------


def test_saved_and_loaded_and_more(tmp_path):
    net, x, gaussian = OneHidden(D), points(2), noise(PARTS, SIGMAS)
    options = {"gaussian": gaussian, "feature_mask": PARTS, "control": None}
    first = SmoothHess(net).attribute(x, n_calls=10 * K, **options)
    first.save(tmp_path / "r.safetensors")
    loaded = Interactions.load(tmp_path / "r.safetensors")
    assert loaded.gaussian.same_as(first.gaussian)
    assert torch.equal(loaded.hessian, first.hessian)
    torch.testing.assert_close(loaded.stderr(), first.stderr())
    longer = SmoothHess(net).more(loaded, 6 * K)
    at_once = SmoothHess(net).attribute(x, n_calls=16 * K, **options).unshrunk()
    torch.testing.assert_close(longer.hessian, at_once.hessian)
    torch.testing.assert_close(longer.stderr(), at_once.stderr(), rtol=0.02, atol=0)  # the same noise, by other probes
    other = SmoothHess(net).attribute(x, n_calls=6 * K, seed=1, **options)
    assert first.merge(other).n_calls.tolist() == [16 * K] * 2
    with pytest.raises(ValueError, match="differ in Gaussian"):
        first.merge(SmoothHess(net).attribute(x, n_calls=6 * K, seed=1, **(options | {"gaussian": noise(PARTS, 0.1)})))


def test_without_groups_the_features_of_a_segment_share_its_numbers():
    net, x = OneHidden(D), points(1)
    result = SmoothHess(net).attribute(x, gaussian=noise(PARTS, SIGMAS), n_calls=20 * K)
    first, second = (torch.nonzero(PARTS.reshape(-1) == 2).reshape(-1)[i] for i in (0, 3))
    torch.testing.assert_close(result.hessian[0, first], result.hessian[0, second])
    taylor = result.taylor()(x[:, None] + 0.1 * inside()[2].reshape(SHAPE))
    assert taylor.shape == (1, 1)
    inputs = sh.attack(result, 0.1)
    move = (inputs - x).flatten(1)
    torch.testing.assert_close(move[0, first], move[0, second])


def test_pairs_are_validated_by_shifts_of_whole_segments():
    def f(x):
        means = [x.flatten(1)[:, PARTS.reshape(-1) == i].mean(1) for i in range(K)]
        return 3 * means[0] * means[1] + means[2] * means[3] - 2 * means[4] * means[5]

    result = SmoothHess(f).attribute(points(1), gaussian=noise(PARTS, SIGMAS), feature_mask=PARTS, n_calls=8 * K)
    found = validate_pairs(f, result, 5)
    assert "σ√K" in str(found)
    pairs = {frozenset((p.i, p.j)): p.value for p in result.top_pairs(3)[0]}
    assert pairs == {
        frozenset((0, 1)): pytest.approx(3),
        frozenset((2, 3)): pytest.approx(1),
        frozenset((4, 5)): pytest.approx(-2),
    }


def test_nine_segments_of_a_picture_take_few_calls():
    """Independent noise in 3 072 pixels would take thousands of calls for the sums of the same nine segments."""
    rng = torch.Generator().manual_seed(3)
    net = nn.Sequential(
        *(nn.Conv2d(3, 8, 5, stride=2), nn.Softplus(4), nn.Conv2d(8, 8, 3, stride=2), nn.Softplus(4)),
        *(nn.Flatten(), nn.Linear(288, 1)),
    ).double()
    with torch.no_grad():
        for p in net.parameters():
            fan = p[0].numel() if p.ndim > 1 else 1
            p.copy_(torch.randn(p.shape, generator=rng).double() / fan**0.5)
    x = torch.rand(1, 3, 32, 32, generator=rng).double()
    cells = segments.grid((3, 32, 32), 3)
    gaussian = noise(cells, 0.1)
    result = SmoothHess(net).attribute(x, gaussian=gaussian, feature_mask=cells)
    assert int(result.n_calls) <= 288
    assert bool(result.converged.all())
    long = SmoothHess(net).attribute(x, gaussian=gaussian, feature_mask=cells, n_calls=1152, seed=1)
    assert float((result.hessian - long.hessian).norm() / long.hessian.norm()) < 0.15
