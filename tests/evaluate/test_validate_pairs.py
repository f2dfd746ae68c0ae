"""uᵀHv beside second differences: closed forms, and where the quadratic picture breaks."""

import itertools
import math

import pytest
import torch
from scipy import stats
from torch import nn

from smoothhess import Diagonal, Isotropic, SmoothHess
from smoothhess.evaluate.rank_correlation import PERMUTATIONS, ranks, spearman, spearman_p
from smoothhess.evaluate.validate_pairs import validate_pairs
from smoothhess.result.exact import Attribution, Exact
from tests.truths import OneHidden, Plain, quadratic

A, BIAS = quadratic(6)
X = torch.linspace(-1, 1, 18).reshape(3, 6).double()


def square(x):
    return x.flatten(1) @ BIAS + (x.flatten(1) @ A * x.flatten(1)).sum(1) / 2


def exact(f, x, hessian, **options):
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(f(leaf).sum(), leaf)
    return Exact.make(x, f(x).detach(), gradient, hessian, **options)


def test_second_differences_of_a_quadratic_are_its_hessian():
    result = SmoothHess(square).attribute(X, radius=1.5, n_calls=36)
    found = validate_pairs(square, result, 15, steps=[1e-2, 1.0, 50.0])
    for kind in (found, found.around):
        assert (kind.relative_error < 1e-7).all()
        torch.testing.assert_close(kind.rank_correlation, torch.ones(3, 3).double())
        assert (kind.sign_agreement == 1).all()
        assert (kind.bent == 1).all()
        assert torch.equal(kind.holds_from, torch.full((3, 15), 1e-2, dtype=torch.float64))
        assert torch.equal(kind.breaks_at, torch.full((3, 15), torch.inf).double())
    # the entries themselves, at the Gaussian's radius along both features
    for b, row in enumerate(result.top_pairs(15)):
        expected = torch.tensor([A[p.i, p.j] * 1.5**2 for p in row])
        torch.testing.assert_close(found.form[b], expected.double())
        torch.testing.assert_close(found.second[1, b], expected.double())
    assert found.labels[0][0] == " × ".join(result.top_pairs(1)[0][0].names)
    assert "none of them breaks up to step 50" in found.summary


def test_directions_of_all_shapes():
    x = X.reshape(3, 2, 3)
    result = exact(square, x, A.expand(3, -1, -1))
    rng = torch.Generator().manual_seed(0)
    u, v = (torch.randn(3, 4, 2, 3, generator=rng).double() for _ in range(2))
    expected = torch.einsum("bpi,ij,bpj->bp", u.flatten(2), A, v.flatten(2))
    whole = validate_pairs(square, result, directions=(u, v), steps=[1.0])
    torch.testing.assert_close(whole.second[0], expected)
    torch.testing.assert_close(whole.central[0], expected)
    torch.testing.assert_close(whole.form, expected)
    assert whole.labels[2] == ("direction 0", "direction 1", "direction 2", "direction 3")
    for left, right in [(u[0], v[0]), (u[0].flatten(1), v[0].flatten(1)), (u[0, 0], v[0])]:
        part = validate_pairs(square, result, directions=(left, right), steps=[1.0])
        row = torch.einsum("pi,ij,pj->p", left.reshape(-1, 6).expand(4, 6), A, v[0].flatten(1))
        torch.testing.assert_close(part.second[0], row.expand(3, 4))
    one = validate_pairs(square, result, directions=(u[0, 0], u[0, 0]), steps=[2.0])  # u = v: 4 uᵀHu
    torch.testing.assert_close(one.second[0, 0, 0], 4 * u[0, 0].flatten() @ A @ u[0, 0].flatten())
    torch.testing.assert_close(one.central[0, 0, 0], 4 * u[0, 0].flatten() @ A @ u[0, 0].flatten())


def test_where_a_cubic_breaks():
    """f = x₀x₁ + x₀²x₁/2 at 0: D(t, t) = t² + t³/2, off by t/2; the central one, (D(++) + …)/4 = t², is never off."""
    f = lambda x: x[:, 0] * x[:, 1] + x[:, 0].square() * x[:, 1] / 2
    x = torch.zeros(1, 2).double()
    result = exact(f, x, torch.tensor([[[0.0, 1.0], [1.0, 0.0]]]).double())
    found = validate_pairs(f, result, 1, steps=[0.25, 0.5, 1.0, 1.5, 4.0], radius=1.0, tolerance=0.6)
    torch.testing.assert_close(found.discrepancy[:, 0, 0], found.steps / 2)
    assert found.breaks_at.tolist() == [[1.5]]
    assert found.holds_from.tolist() == [[0.25]]
    assert found.around.breaks_at.tolist() == [[math.inf]]
    assert found.around.relative_error.max() < 1e-12
    assert (
        "1 of 1 pairs agree with the model to 60% at some step; 1 of these break later, from step 1.5" in found.summary
    )
    never = validate_pairs(f, result, 1, steps=[2.0, 4.0], radius=1.0, tolerance=0.6)
    assert never.breaks_at.tolist() == [[2.0]]
    assert never.holds_from.tolist() == [[math.inf]]
    assert never.summary == "0 of 1 pairs agree with the model to 60% at some step."


def test_a_single_relu_has_its_closed_form():
    """relu(w·x − s) with moves that only together cross the kink: D = relu(w·u + w·v − s)."""
    w, s = torch.tensor([1.0, 2.0, 0.5]).double(), 1.0
    f = lambda x: torch.relu(x @ w - s)
    x = torch.zeros(1, 3).double()
    result = Plain(f).attribute(x, sigma=0.5, n_calls=600)
    steps = torch.tensor([0.2, 0.38, 0.5, 0.8]).double()
    found = validate_pairs(f, result, [(0, 1), (1, 2)], steps=steps, radius=1.0)
    for p, (i, j) in enumerate([(0, 1), (1, 2)]):
        left, right = steps * w[i], steps * w[j]
        relu = torch.relu
        plain = relu(left + right - s) - relu(left - s) - relu(right - s)
        torch.testing.assert_close(found.second[:, 0, p], plain)
        corners = relu(left + right - s) - relu(left - right - s) - relu(right - left - s) + relu(-left - right - s)
        torch.testing.assert_close(found.central[:, 0, p], corners / 4)
    assert found.bent[:, 0].tolist() == [0.0, 0.5, 1.0, 1.0]
    assert found.sign_agreement[0].isnan().all()
    assert found.rank_correlation[0].isnan().all()
    assert found.sign_agreement[3].tolist() == [1.0]
    assert "–" in repr(found)


def test_draws_ask_the_smoothed_model():
    """E D(x + δ) is the second difference of h, known for one hidden layer; the errors are those claimed."""
    net, x, sigma = OneHidden(6, width=30, seed=2), X[:1], 0.5
    result = SmoothHess(net).attribute(x, sigma=sigma, n_calls=200, control="kink")
    h = lambda point: net.truth(point, Isotropic(sigma)).value
    scores = []
    pairs = [(0, 1), (2, 5), (3, 4)]
    for seed in range(20):
        found = validate_pairs(net, result, pairs, steps=[0.3], n_draws=40, seed=seed)
        for p, (i, j) in enumerate(pairs):
            t = 0.3 * sigma * math.sqrt(6)
            u, v = t * torch.eye(6)[i], t * torch.eye(6)[j]
            plain = h(x + u + v) - h(x + u) - h(x + v) + h(x)
            central = (h(x + u + v) - h(x + u - v) - h(x - u + v) + h(x - u - v)) / 4
            scores.append(float((found.second[0, 0, p] - plain) / found.second_stderr[0, 0, p]))
            scores.append(float((found.central[0, 0, p] - central) / found.central_stderr[0, 0, p]))
    z = torch.tensor(scores)
    assert z.abs().max() < 5
    assert 0.8 < float(z.square().mean().sqrt()) < 1.25
    # at small steps it is the smoothed Hessian
    small = validate_pairs(net, result, pairs, steps=[0.05], n_draws=2_000)
    assert ((small.around.second - small.predicted).abs() < 4.5 * small.around.second_stderr).all()


def test_a_step_of_the_radius_is_where_a_smoothed_hessian_shows():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 1)).double()
    x = torch.randn(4, 20, generator=torch.Generator().manual_seed(0)).double()
    result = SmoothHess(net).attribute(x, radius=1.0, n_calls=800)
    found = validate_pairs(net, result, 20, steps=[0.02, 1.0]).around
    assert float(found.rank_correlation[1].mean()) > 0.8
    assert float(found.relative_error[1].mean()) < 0.5 < float(found.relative_error[0].mean())
    assert float(found.bent[0].mean()) < 0.9


def test_groups_are_moved_as_a_whole():
    mask = torch.tensor([0, 0, 1, 1, 1, 2])
    result = SmoothHess(square).attribute(X, radius=1.5, n_calls=36).groups(mask)
    found = validate_pairs(square, result, 3, steps=[0.5, 1.0])
    assert (found.relative_error < 1e-7).all()
    length = found.moves[0].norm(dim=-1)
    torch.testing.assert_close(length, torch.full_like(length, 1.5))
    pair = result.top_pairs(1)[0][0]
    one, two = ((mask == g).double() for g in (pair.i, pair.j))
    expected = (one / one.norm() * 1.5) @ A @ (two / two.norm() * 1.5)
    torch.testing.assert_close(found.second[1, 0, 0], expected)
    # with a direction a step of 1 is the whole move
    away = SmoothHess(square).attribute(X[:1], radius=1.5, n_calls=36).groups(mask, X[0])
    found = validate_pairs(square, away, 3, steps=[1.0])
    torch.testing.assert_close(found.moves[0].sum(1) + found.moves[1].sum(1), 2 * X[:1])
    assert (found.relative_error < 1e-7).all()
    assert "along the direction of the groups" in found.unit


def test_features_step_by_their_own_scale():
    scales = torch.tensor([1.0, 0.1, 2.0, 0.5, 0.0, 1.0]).double()
    result = SmoothHess(square).attribute(X, gaussian=Diagonal(scales), n_calls=40)
    found = validate_pairs(square, result, [(0, 1)], steps=[1.0])
    torch.testing.assert_close(found.moves[0][0, 0, 0], scales[0] * math.sqrt(5))
    torch.testing.assert_close(found.moves[1][0, 0, 1], scales[1] * math.sqrt(5))
    with pytest.raises(ValueError, match="a feature that the result's Gaussian does not move"):
        validate_pairs(square, result, [(0, 4)])


def test_targets_arguments_batches_and_the_model():
    net = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.BatchNorm1d(9), nn.Linear(9, 3)).double().eval()
    f = lambda x, c: c * net(x)
    c = torch.tensor([[1.0], [2.0], [-1.0]]).double()
    result = SmoothHess(f).attribute(X, [0, 2, 1], c, radius=0.5, n_calls=24)
    before, state = [p.clone() for p in net.state_dict().values()], torch.get_rng_state()
    whole = validate_pairs(f, result, 4, c, n_draws=4)
    parts = validate_pairs(f, result, 4, c, n_draws=4, internal_batch_size=5)
    torch.testing.assert_close(whole.second, parts.second, rtol=1e-9, atol=1e-13)
    assert all(torch.equal(a, b) for a, b in zip(before, net.state_dict().values(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    for b, target in enumerate([0, 2, 1]):
        alone = validate_pairs(lambda x, b=b: c[b] * net(x), result[b], 4, n_draws=4)
        torch.testing.assert_close(whole.second[:, b], alone.second[:, 0], rtol=1e-9, atol=1e-13)
        assert result[b].target.tolist() == [[target]]
    with pytest.raises(ValueError, match=r"f\(x\) of example . is .*, but the result was made with"):
        validate_pairs(lambda x, c: 2 * c * net(x), result, 4, c)


def test_pairs_in_all_forms():
    x = X.reshape(3, 2, 3)
    result = SmoothHess(square).attribute(x, radius=1.0, n_calls=36)
    shared = validate_pairs(square, result, [((0, 1), (1, 2)), (0, 3)], steps=[1.0])
    torch.testing.assert_close(shared.second[0, 0], torch.stack([A[1, 5], A[0, 3]]))
    own = validate_pairs(square, result, [[(0, 1)], [(0, 2)], [(0, 3)]], steps=[1.0])
    torch.testing.assert_close(own.second[0, :, 0], torch.stack([A[0, 1], A[0, 2], A[0, 3]]))
    given = validate_pairs(square, result, result.top_pairs(2), steps=[1.0])
    torch.testing.assert_close(given.second, validate_pairs(square, result, 2, steps=[1.0]).second)
    named = validate_pairs(square, result, [(0, 1)], steps=[1.0], names=list("abcdef"))
    assert named.labels[0] == ("a × b",)


def test_reading_it():
    result = SmoothHess(square).attribute(X, radius=1.5, n_calls=36)
    found = validate_pairs(square, result, 5)
    text = repr(found)
    assert "second differences of the model at x itself: 5 pair(s) of 3 example(s)" in text
    assert "σ√d = 1.5 along a feature" in text
    assert "over examples" in text
    assert len(found.to_markdown().splitlines()) == 7
    assert len(found) == 3
    assert "over pairs" in repr(validate_pairs(square, result[0], 5))
    pytest.importorskip("matplotlib")
    ax = found.plot(example=1)
    assert ax.get_xscale() == "log"
    assert len(ax.get_legend().get_texts()) == 5


def test_ranks_are_those_of_scipy():
    rng = torch.Generator().manual_seed(0)
    a = torch.randint(0, 8, (5, 20), generator=rng).double()
    b = torch.randn(5, 20, generator=rng).double() + 0.2 * a
    rho = spearman(a, b)
    for i in range(5):
        expected = stats.spearmanr(a[i].numpy(), b[i].numpy())
        assert float(rho[i]) == pytest.approx(expected.statistic, abs=1e-12)
        assert ranks(a[i]).tolist() == stats.rankdata(a[i].numpy()).tolist()
    assert spearman(a[0], torch.ones(20)).isnan()


def test_p_values_of_few_pairs_count_all_orders():
    """By hand: the share of the n! orders with |ρ| at least as large, ties included."""
    a = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 1.0, 2.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    b = torch.tensor([2.0, 1.0, 4.0, 3.0, 5.0])
    p = spearman_p(a, b)
    for i in range(2):
        orders = torch.tensor(list(itertools.permutations(a[i].tolist())))
        every = spearman(orders, b).abs()
        assert float(p[i]) == pytest.approx(float((every >= spearman(a[i], b).abs() - 1e-9).double().mean()), abs=1e-12)
    assert p[2].isnan()
    assert float(spearman_p(b, -b)) == pytest.approx(2 / math.factorial(5))  # not 2e-300
    assert float(spearman_p(b[:2], b[:2])) == 1.0


def test_p_values_of_many_pairs_are_sampled_and_never_zero():
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 100, 12, generator=rng).double()
    p = spearman_p(a, b)
    assert torch.equal(p, spearman_p(a, b))  # a fixed seed
    assert abs(float((p <= 0.05).double().mean()) - 0.05) < 4 * (0.05 * 0.95 / 100) ** 0.5  # uniform where unrelated
    assert float(spearman_p(a[0], a[0])) == pytest.approx(1 / (PERMUTATIONS + 1))
    exact = stats.spearmanr(a[0].numpy(), b[0].numpy()).pvalue
    assert float(p[0]) == pytest.approx(exact, abs=0.03)


RESULT = SmoothHess(square).attribute(X, radius=1.5, n_calls=12)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"pairs": 0}, ValueError, "at least one pair, got 0"),
        ({"pairs": True}, TypeError, "pairs must be a number, or a list of pairs"),
        ({"pairs": []}, ValueError, "at least one, got"),
        ({"pairs": [(0, 1, 2)]}, ValueError, r"a pair must be \(i, j\), two features"),
        ({"pairs": [(0, 9)]}, ValueError, "feature 9 is not among"),
        ({"pairs": [[(0, 1)]]}, ValueError, "pairs for each of 3 examples, got 1 lists"),
        ({"pairs": [[(0, 1)], [(0, 1)], []]}, ValueError, "equally many pairs"),
        ({"steps": []}, ValueError, "steps must be positive numbers, at least one"),
        ({"steps": [0.0, 1.0]}, ValueError, "steps must be positive numbers"),
        ({"steps": [1.0, 1.0]}, ValueError, "all steps must be different"),
        ({"steps": "x"}, TypeError, "steps must be positive numbers"),
        ({"radius": -1.0}, ValueError, "radius must be a positive number"),
        ({"tolerance": 0}, ValueError, "tolerance must be a positive number"),
        ({"n_draws": 3}, ValueError, "n_draws must be an even number"),
        ({"directions": torch.ones(6)}, TypeError, r"directions must be a pair \(u, v\)"),
        (
            {"directions": (torch.ones(5), torch.ones(6))},
            ValueError,
            r"a direction must have shape \(6,\), .* got \(5,\)",
        ),
        ({"names": ["a"]}, ValueError, "one name per feature, 6, got 1"),
    ],
)
def test_what_is_refused(changes, error, text):
    with pytest.raises(error, match=text):
        validate_pairs(square, RESULT, **changes)


def test_which_results_are_refused():
    with pytest.raises(ValueError, match=r"without a Gaussian. Pass radius, or directions"):
        validate_pairs(square, exact(square, X, A.expand(3, -1, -1)))
    attribution = Attribution.make(X, square(X), X, A.expand(3, -1, -1), method="some index")
    with pytest.raises(ValueError, match=r"an attribution \(some index\) is not a Hessian"):
        validate_pairs(square, attribution)
    with pytest.raises(TypeError, match="expected a result of attribute, .* got Tensor"):
        validate_pairs(square, A)
