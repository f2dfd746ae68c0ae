"""Post-hoc accuracy: outcomes counted right, shares with binomial errors, paired tests against scipy."""

import math

import pytest
import torch
from scipy.stats import binomtest
from torch import nn

from smoothhess import SmoothHess, Taylor, baselines
from smoothhess.evaluate.attack import AttackPath, attack
from smoothhess.evaluate.attack_comparison import AttackComparison, mcnemar, post_hoc
from smoothhess.evaluate.smallest_flip import smallest_flip
from smoothhess.result.intervals import half_width

W = torch.tensor([3.0, 4.0]).double()  # of length 5
MARGINS = torch.tensor([0.1, 0.4, 0.6, 0.9, -0.2, -0.7]).double()  # signed distances of six points to the boundary
POINTS = MARGINS[:, None] * W / 5 + torch.tensor([[4.0, -3.0]]).double() * torch.arange(6).double()[:, None]


def linear(x):
    """Two classes: which side of W·x = 0."""
    return torch.stack([x @ W, torch.zeros(len(x)).to(x)], 1)


def own_score(x=POINTS):
    """The exact first-order surrogate of the lead of the predicted class."""
    sign = (x @ W).sign()
    return Taylor(x, (x @ W).abs(), sign[:, None] * W, None)


def net(seed=0, d=5, classes=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(d, 24), nn.ReLU(), nn.Linear(24, classes)).double().eval()


X = torch.randn(40, 5, generator=torch.Generator().manual_seed(1)).double()
RADII = [0.2, 0.6, 1.2]


def explained(model, x=X, **options):
    return SmoothHess(model).attribute(x, model(x).argmax(1), **{"radius": 0.6, "n_calls": 120, **options})


def contest(**options):
    model = net()
    result = explained(model)
    return post_hoc(model, X, {"H+G": result, "G": result.taylor(1)}, RADII, **options)


def made(*rows):
    """A contest with these outcomes: one string of 1 (unchanged) and 0 per method, one radius."""
    after = torch.tensor([[int(c) for c in row] for row in rows])[:, None]
    return AttackComparison(
        tuple("abcdef"[: len(rows)]), (1.0,), torch.ones(len(rows[0])).long(), after, torch.ones(after.shape).double()
    )


def test_flips_of_a_linear_classifier_are_those_of_its_margins():
    radii = [0.05, 0.15, 0.5, 0.65, 1.0]
    found = post_hoc(linear, POINTS, {"G": own_score()}, radii)
    expected = torch.stack([MARGINS.abs() > r for r in radii])
    assert torch.equal(found.unchanged[0], expected)
    assert torch.equal(found.before, (MARGINS < 0).long())
    torch.testing.assert_close(found.moved[0], torch.tensor(radii).double()[:, None].expand(5, 6))


def test_outcomes_are_those_of_the_model_at_the_attacked_points():
    model, found = net(), contest()
    result = explained(model)
    for m, taylor in enumerate((result.taylor(), result.taylor(1))):
        for r, radius in enumerate(RADII):
            assert torch.equal(found.after[m, r], model(attack(taylor, radius)).argmax(1))
    assert torch.equal(found.before, model(X).argmax(1))
    assert (found.share("H+G", 1.2).value) < found.share("H+G", 0.2).value < 1


def test_shares_have_binomial_errors():
    found = made("1110000000")
    share = found.share("a", 1.0)
    assert share.value == pytest.approx(0.3)
    assert share.stderr == pytest.approx(math.sqrt(0.3 * 0.7 / 10))
    low, high = found.interval("a", 1.0)
    expected = binomtest(3, 10).proportion_ci(0.95, method="wilson")
    assert (low, high) == (pytest.approx(expected.low), pytest.approx(expected.high))
    assert made("0000").interval("a", 1.0)[1] == pytest.approx(binomtest(0, 4).proportion_ci(0.95, "wilson").high)


def test_differences_are_paired():
    a, b = "1111100000", "1100111000"
    apart = made(a, b).difference("a", "b")
    signs = torch.tensor([int(p) - int(q) for p, q in zip(a, b, strict=True)]).double()
    assert float(apart.value) == pytest.approx(float(signs.mean()))
    assert float(apart.stderr) == pytest.approx(float(signs.std(correction=0)) / math.sqrt(10))
    assert (int(apart.only_first), int(apart.only_second)) == (2, 2)
    assert float(apart.p_value) == 1
    back = made(a, b).difference("b", "a")
    assert float(back.value) == -float(apart.value)
    assert float(back.stderr) == float(apart.stderr)
    same = made(a, a).difference("a", "b")
    assert (float(same.value), float(same.stderr), float(same.p_value)) == (0, 0, 1)


def test_paired_errors_cover():
    """Over repeated draws of points the paired difference spreads as its standard error says."""
    rng = torch.Generator().manual_seed(0)
    scores = []
    for _ in range(400):
        hard = torch.rand(200, generator=rng)
        outcomes = [hard + 0.3 * torch.rand(200, generator=rng) > 0.6 for _ in range(2)]
        after = torch.stack(outcomes)[:, None].long()
        apart = AttackComparison(("a", "b"), (1.0,), torch.ones(200).long(), after, after.double()).difference("a", "b")
        scores.append((float(apart.value / apart.stderr), float(apart.p_value)))
    z, p = torch.tensor(scores).double().T
    assert abs(float(z.mean())) < 4 / 20
    assert 0.85 < float(z.std()) < 1.15
    assert float((p < 0.05).double().mean()) < 0.06  # an exact test errs on the safe side


@pytest.mark.parametrize("counts", [(0, 0), (1, 0), (3, 3), (2, 9), (40, 22), (0, 30), (500, 431), (5_000, 5_100)])
def test_mcnemar_is_the_exact_binomial_test(counts):
    first, second = counts
    expected = 1.0 if not sum(counts) else binomtest(first, sum(counts), 0.5).pvalue
    assert float(mcnemar(torch.tensor(first), torch.tensor(second))) == pytest.approx(expected, rel=1e-9)
    assert float(mcnemar(torch.tensor(second), torch.tensor(first))) == pytest.approx(expected, rel=1e-9)


def test_mcnemar_takes_many_at_once():
    p = mcnemar(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[9, 2], [0, 4]]))
    assert p.shape == (2, 2)
    assert float(p[1, 0]) == pytest.approx(0.25)


def test_all_radii_come_from_one_eigendecomposition(monkeypatch):
    calls = []
    whole = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda a, *rest, **named: calls.append(1) or whole(a, *rest, **named))
    model = net()
    result = explained(model, shrink=False, control=None)
    calls.clear()
    post_hoc(model, X, {"H+G": result, "G": result.taylor(1)}, torch.linspace(0.1, 2, 25))
    assert len(calls) == 1


def test_attackers_of_every_kind():
    model = net()
    result = explained(model)
    attackers = {
        "result": result,
        "taylor": result.taylor(),
        "path": AttackPath.of(result),
        "callable": lambda radius: attack(result, radius),
        "tensor": torch.stack([attack(result, r) for r in RADII]),
    }
    found = post_hoc(model, X, attackers, RADII)
    for i in range(1, 5):
        assert torch.equal(found.after[i], found.after[0])
    upwards = post_hoc(model, X, {"up": AttackPath.of(result, maximize=True)}, RADII)
    assert upwards.share("up", 0.6).value > found.share("result", 0.6).value


def test_bounds_are_kept_by_surrogates():
    model, x = net(), X.sigmoid()
    result = explained(model, x)
    seen = []
    watched = lambda points: seen.append(points.clone()) or model(points)
    found = post_hoc(watched, x, {"H+G": result, "G": result.taylor(1)}, RADII, bounds=(0, 1))
    assert all(((p >= -1e-12) & (p <= 1 + 1e-12)).all() for p in seen)
    assert (found.moved <= torch.tensor(RADII)[None, :, None] * (1 + 1e-6)).all()
    assert (found.moved[:, 2] < 1.2 - 1e-3).any()


def test_a_decision_of_ones_own():
    one = lambda x: x @ W
    found = post_hoc(one, POINTS, {"G": own_score()}, 0.5, decide=lambda out: out > 0)
    assert torch.equal(found.unchanged[0, 0], MARGINS.abs() > 0.5)


def test_additional_arguments_follow_their_example():
    shift = torch.arange(6).double()
    f = lambda x, s: linear(x) + torch.stack([s, torch.zeros_like(s)], 1)
    found = post_hoc(f, POINTS, {"stay": lambda r: POINTS}, 1.0, shift, internal_batch_size=4)
    assert torch.equal(found.before, (5 * MARGINS + shift <= 0).long())
    assert found.unchanged.all()


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_batch_size_changes_nothing(rows):
    whole, parts = contest(), contest(internal_batch_size=rows)
    assert torch.equal(whole.after, parts.after)


def test_points_side_by_side():
    model = net()
    parts = []
    for index in (slice(0, 15), slice(15, 40)):
        result = explained(model, X[index])
        parts.append(post_hoc(model, X[index], {"H+G": result, "G": result.taylor(1)}, RADII))
    whole = AttackComparison.cat(parts)
    assert len(whole) == 40
    assert torch.equal(whole.after, contest().after)
    with pytest.raises(ValueError, match="only when methods and radii agree"):
        AttackComparison.cat([parts[0], made("10")])
    with pytest.raises(ValueError, match="at least one comparison"):
        AttackComparison.cat([])


def test_reading_it():
    found = contest()
    lines = found.to_markdown().splitlines()
    assert lines[0] == "| unchanged, % | r = 0.2 | r = 0.6 | r = 1.2 |"
    assert len(lines) == 4
    low, high = found.interval("G", 0.6)
    assert f"{100 * found.share('G', 0.6).value:.1f} ± {50 * (high - low):.1f}" in lines[3]
    apart = found.difference("H+G", "G")
    against = found.to_markdown(against="G").splitlines()
    assert f"({100 * float(apart.value[0]):+.1f} ± {100 * half_width(float(apart.stderr[0])):.1f}, p = " in against[2]
    assert "p =" not in against[3]
    text = repr(found)
    assert "Predictions left unchanged by 2 attack(s) on 40 point(s)" in text
    assert "which is paired" in text


def test_the_model_is_given_back_as_it_was():
    model = net()
    model.train()  # no dropout or batch-norm: allowed
    result = explained(model)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    inputs, random = X.clone().requires_grad_(), torch.random.get_rng_state()
    post_hoc(model, inputs, {"H+G": result}, RADII)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not model._forward_hooks
    assert torch.equal(inputs, X)
    assert torch.equal(random, torch.random.get_rng_state())
    assert torch.is_grad_enabled()


def test_a_model_that_works_in_place_is_served():
    f = lambda x: linear(x.mul_(2))
    found = post_hoc(f, POINTS, {"G": own_score()}, [0.5, 0.8])
    assert torch.equal(found.unchanged[0], torch.stack([MARGINS.abs() > r for r in (0.5, 0.8)]))


OTHER = Taylor(POINTS.flip(0), torch.zeros(6).double(), torch.ones(6, 2).double(), None)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"attackers": {}}, ValueError, "at least one, got dict without entries"),
        ({"attackers": [1]}, ValueError, r"attackers must be a mapping \{name: attacker\} with at least one, got list"),
        ({"attackers": {"a": 3}}, TypeError, "attacker 'a' must be a result, a Taylor, .*, got int"),
        ({"attackers": {"a": POINTS}}, ValueError, r"must be \(R, B, \*shape\), here \(1, 6, 2\), got \(6, 2\)"),
        (
            {"attackers": {"a": lambda r: POINTS[:2]}},
            ValueError,
            r"must return perturbed inputs \(6, 2\) torch.float64",
        ),
        ({"attackers": {"a": lambda r: POINTS.float()}}, ValueError, r"got \(6, 2\) torch.float32"),
        ({"attackers": {"a": lambda r: 1.0}}, ValueError, "got float"),
        ({"attackers": {"a": lambda r: POINTS * math.nan}}, ValueError, "attacker 'a' returns NaN or infinite inputs"),
        (
            {"attackers": {"a": lambda r: POINTS + 3}},
            ValueError,
            "moves inputs by up to 4.24.*, further than",
        ),
        (
            {"attackers": {"a": OTHER}},
            ValueError,
            "must be made around these inputs, got one around others",
        ),
        ({"inputs": POINTS[:3]}, ValueError, r"surrogate 'G' must be made around these inputs, \(3, 2\)"),
        ({"inputs": POINTS.float()}, ValueError, r"must be made around these inputs, \(6, 2\) torch.float32"),
        ({"attackers": {"a": AttackPath.of(OTHER)}}, ValueError, "must be made around these inputs"),
        ({"attackers": {"a": AttackPath.of(own_score())}, "bounds": (-9, 9)}, ValueError, "already has bounds"),
        ({"radii": []}, ValueError, r"expected at least one radius and each once, got \[\]"),
        ({"radii": [1, 1.0]}, ValueError, r"expected at least one radius and each once"),
        ({"radii": -1}, ValueError, "radius must be a positive number, .*, got -1"),
        (
            {"forward_func": lambda x: x @ W},
            ValueError,
            r"expected scores \(N, C\) of at least two classes, got \(6,\)",
        ),
        ({"forward_func": lambda x: (x, x)}, TypeError, "the model must return one tensor of scores"),
        ({"forward_func": lambda x: linear(x).log()}, ValueError, "the model's output is NaN or infinite"),
        ({"forward_func": lambda x: linear(x)[:1]}, ValueError, r"one class for each row, \(6,\), got \(1,\)"),
        ({"decide": lambda out: out}, ValueError, r"decide must return one class for each row, \(6,\), got \(6, 2\)"),
        ({"decide": 3}, TypeError, "decide must be a callable"),
        ({"internal_batch_size": 0}, ValueError, "internal_batch_size must be a whole number of rows"),
        ({"inputs": POINTS[0]}, ValueError, r"inputs must be \(B, …\)"),
        (
            {"forward_func": nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2).double())},
            ValueError,
            r"layer '0' \(Dropout\) is in training mode",
        ),
    ],
)
def test_what_is_refused(changes, error, text):
    arguments = {"forward_func": linear, "inputs": POINTS, "attackers": {"G": own_score()}, "radii": 1.0, **changes}
    with pytest.raises(error, match=text):
        post_hoc(**arguments)


def test_names_and_radii_that_are_not_there():
    found = contest()
    with pytest.raises(ValueError, match=r"expected one of the methods 'H\+G', 'G', got 'H'"):
        found.share("H", 0.2)
    with pytest.raises(ValueError, match="expected one of the methods"):
        found.difference("G", "H")
    with pytest.raises(ValueError, match="expected one of the methods"):
        found.to_markdown(against="H")
    with pytest.raises(ValueError, match=r"expected one of the radii 0.2, 0.6, 1.2, got 0.5"):
        found.share("G", 0.5)


def test_a_matrix_free_rival_attacks_too():
    model = net()
    labels = model(X).argmax(1)
    dense, free = (baselines.softplus(model, X, labels, beta=5.0, dense=dense) for dense in (True, False))
    found = post_hoc(model, X, {"dense": dense, "free": free}, RADII)
    assert torch.equal(found.after[0], found.after[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("bounds", [None, (-4, 4)])
def test_a_gpu_does_the_same(bounds):
    model = net()
    result = explained(model)
    here = post_hoc(model, X, {"H+G": result, "G": result.taylor(1)}, RADII, bounds=bounds)
    flip = smallest_flip(model, result, 1.0, bounds=bounds)
    there, x = result.to("cuda"), X.cuda()
    model = model.cuda()
    found = post_hoc(model, x, {"H+G": there, "G": there.taylor(1)}, RADII, bounds=bounds)
    assert float((found.after == here.after).double().mean()) > 0.98
    torch.testing.assert_close(found.moved, here.moved, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        smallest_flip(model, there, 1.0, bounds=bounds).radius.cpu(), flip.radius, rtol=1e-3, atol=0
    )
