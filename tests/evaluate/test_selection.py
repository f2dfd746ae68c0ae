"""Choosing σ and β: known optima, identities with the scores themselves, paired errors."""

import math

import pytest
import torch
from torch import nn

from smoothhess import SmoothHess, baselines, evaluate
from smoothhess.evaluate.attack_comparison import post_hoc
from smoothhess.evaluate.selection import Selection, select, select_radii
from smoothhess.result.exact import Attribution, Exact
from tests.truths import OneHidden

X = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)).double()
NET = OneHidden(5, width=30)


def absolute(x):
    """|x₀|, of relus that can be softened."""
    return torch.relu(x[:, 0]) + torch.relu(-x[:, 0])


def absolute_pmse(hessian, radius):
    """E(|δ| − Hδ²/2)² for δ uniform in [−r, r]: its moments are r^k/(k + 1). Lowest at H = 5/(2r)."""
    h = torch.as_tensor(hessian).double()
    return radius**2 / 3 - h * radius**3 / 4 + h**2 * radius**4 / 20


CURVATURES = {  # of the smoothed |x| at 0
    "smoothhess": lambda sigma: math.sqrt(2 / math.pi) / sigma,
    "softplus": lambda beta: beta / 2,
    "swish": lambda beta: beta,
}


@pytest.mark.parametrize("method", CURVATURES)
@pytest.mark.parametrize("radius", [0.5, 4.0])
def test_the_best_is_the_known_optimum(method, radius):
    curvature = CURVATURES[method]
    optimum = {"smoothhess": math.sqrt(2 / math.pi) * radius / 2.5, "softplus": 5 / radius, "swish": 2.5 / radius}[
        method
    ]
    values = [optimum * 1.3**k for k in range(-4, 6)]
    options = {"n_calls": 64, "control": "kink"} if method == "smoothhess" else {}  # exact
    x = torch.zeros(1, 1).double()
    chosen = select(absolute, x, radius=radius, method=method, values=values, n_samples=4_000, **options)
    assert chosen.best == pytest.approx(optimum)
    truth = absolute_pmse([curvature(v) for v in values], radius)
    assert ((chosen.scores - truth).abs() < 4.5 * chosen.stderr).all()
    apart = truth - truth[4]
    z = (chosen.difference - apart)[[0, 1, 2, 3, 5, 6, 7, 8, 9]] / chosen.difference_stderr[[0, 1, 2, 3, 5, 6, 7, 8, 9]]
    assert z.abs().max() < 4.5
    assert not chosen.at_edge


@pytest.mark.parametrize("method", ["smoothhess", "smoothgrad", "softplus", "swish"])
@pytest.mark.parametrize(("n_samples", "sampling"), [(3, "ball"), (40, "radius")])  # fewer than features, and more
def test_each_score_is_the_perturbation_mse(method, n_samples, sampling):
    net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    values, target = [0.3, 2.0], [0, 1, 2] * 4
    options = {"n_calls": 40} if method.startswith("smooth") else {}
    if method == "smoothhess":
        make = lambda v: SmoothHess(net).attribute(X, target, sigma=v, seed=7, **options).taylor()
    elif method == "smoothgrad":
        make = lambda v: SmoothHess(net).attribute(X, target, sigma=v, seed=7, **options).taylor(1)
    else:
        make = lambda v: getattr(baselines, method)(net, X, target, beta=v).taylor()
    found = select_radii(
        net,
        X,
        [0.2, 1.5],
        target,
        method=method,
        values=values,
        n_samples=n_samples,
        sampling=sampling,
        seed=7,
        **options,
    )
    for one, radius in zip(found, [0.2, 1.5], strict=True):
        assert isinstance(one, Selection)
        assert (one.radius, one.method, one.score) == (radius, method, "pmse")
        for row, value in zip(one.per_point, values, strict=True):
            alone = evaluate.perturbation_mse(
                net, X, make(value), radius, target, n_samples=n_samples, sampling=sampling, seed=7
            )
            torch.testing.assert_close(row, alone, rtol=1e-8, atol=1e-18)
        single = select(
            net,
            X,
            target,
            radius=radius,
            method=method,
            values=values,
            n_samples=n_samples,
            sampling=sampling,
            seed=7,
            **options,
        )
        torch.testing.assert_close(single.per_point, one.per_point)


def test_first_order_leaves_the_hessian_out():
    for method in ("softplus", "swish", "smoothhess"):
        options = {"n_calls": 40} if method == "smoothhess" else {}
        first = select(NET, X, radius=1.0, method=method, values=[0.5, 3.0], order=1, n_samples=50, **options)
        find = (lambda v: SmoothHess(NET).attribute(X, sigma=v, n_calls=40)) if method == "smoothhess" else None
        find = find or (lambda v, m=method: getattr(baselines, m)(NET, X, beta=v))
        for row, value in zip(first.per_point, [0.5, 3.0], strict=True):
            alone = evaluate.perturbation_mse(NET, X, find(value).taylor(1), 1.0, n_samples=50)
            torch.testing.assert_close(row, alone, rtol=1e-8, atol=1e-18)


def test_model_calls_are_shared_by_all_candidates():
    calls = []

    def counted(x):
        calls.append(len(x))
        return NET(x)

    truth = baselines.softplus(NET, X, beta=3.0)
    for values in ([1.0], [1.0, 2.0, 3.0, 4.0]):
        calls.clear()
        select_radii(counted, X, [0.5, 1.0], method=lambda v: truth, values=values, n_samples=30)
        assert sum(calls) == len(X) * 30 * 2


def test_a_hessian_is_made_only_where_it_is_cheaper(monkeypatch):
    seen = []
    original = baselines.softplus

    def watch(*args, **options):
        result = original(*args, **options)
        seen.append(isinstance(result.derivatives.curvature, torch.Tensor))
        return result

    monkeypatch.setattr(baselines, "softplus", watch)
    for options in ({"n_samples": 4}, {"n_samples": 5}, {"n_samples": 5, "order": 1}, {"n_samples": 4, "dense": True}):
        select(NET, X, radius=1.0, method="softplus", values=[1.0], **options)
    assert seen == [False, True, False, True]


def test_errors_of_differences_are_paired():
    """Other validation points, other draws: the spread of score and difference over 60 such runs is the claimed one."""
    values, runs = [4.0, 5.0], []
    for run in range(60):
        rng = torch.Generator().manual_seed(run)
        x = torch.randn(25, 5, generator=rng, dtype=torch.float64)
        runs.append(select(NET, x, radius=1.0, method="softplus", values=values, n_samples=60, seed=run))
    apart = torch.stack([r.scores[0] - r.scores[1] for r in runs])
    claimed = torch.stack([r.difference_stderr.max() for r in runs]).square().mean().sqrt()
    assert 0.75 < float(claimed / apart.std()) < 1.35  # a spread of 60 numbers is known to 9 %
    scores = torch.stack([r.scores for r in runs])
    alone = torch.stack([r.stderr for r in runs]).square().mean(0).sqrt()
    assert (alone / scores.std(0) > 0.75).all()
    assert (alone / scores.std(0) < 1.35).all()
    assert float(claimed) < 0.5 * float(alone.square().sum().sqrt())


def test_few_samples_are_part_of_the_error():
    """All points share their displacements: with 8 of them the score moves more than points alone would tell."""
    scores, claims = [], []
    for seed in range(60):
        one = select(NET, X, radius=2.0, method="softplus", values=[3.0], n_samples=8, seed=seed)
        scores.append(one.scores[0])
        claims.append(one.per_sample.var(1) / 8)
    spread = torch.stack(scores).var()
    assert 0.6 < float(torch.stack(claims).mean() / spread) < 1.7


def test_ties():
    rng = torch.Generator().manual_seed(0)
    points = 1 + 10 * torch.rand(50, generator=rng).double()  # points differ much more than candidates do
    noise = torch.randn(4, 50, generator=rng).double()
    noise = 0.1 * (noise - noise.mean(1, keepdim=True)) / noise.std(1, keepdim=True)
    offset = torch.tensor([0.1, 0.01, 0.0, 0.04]).double()[:, None]  # paired errors are about 0.1·√2/√50 = 0.02
    chosen = Selection("m", "β", "pmse", 1.0, torch.arange(1.0, 5.0), points + noise + offset, None, 4)
    assert chosen.best == 3.0
    assert chosen.tied.tolist() == [False, True, True, False]
    torch.testing.assert_close(chosen.difference[:, None], offset)
    expected = (chosen.per_point - chosen.per_point[2]).std(1) / math.sqrt(50)
    torch.testing.assert_close(chosen.difference_stderr, expected)
    assert (chosen.stderr > 10 * chosen.difference_stderr).all()
    one = Selection("m", "σ", "attack", 1.0, torch.tensor([1.0, 2.0, 3.0]), torch.eye(3)[:, :1], None, 3)
    assert one.best == 2.0  # the first of equal ones
    assert one.tied.tolist() == [False, True, True]
    assert one.stderr.isnan().all()


def classes(x):
    return torch.stack([x.sum(1), -x.sum(1)], 1)


def test_attacks_score_by_the_share_that_survives():
    x = torch.tensor([[1.0, 1.0], [0.2, 0.2], [3.0, 3.0]]).double()

    def method(value):
        gradient = (1.0 if value < 2 else -1.0) * torch.ones_like(x)  # the second candidate runs uphill
        return Exact.make(x, x.sum(1), gradient)

    for radius, survive in [(0.1, [1, 1, 1]), (0.5, [1, 0, 1]), (2.0, [0, 0, 1]), (9.0, [0, 0, 0])]:
        chosen = select(classes, x, 0, radius=radius, method=method, values=[1.0, 2.0], score="attack")
        assert chosen.per_point.tolist() == [survive, [1, 1, 1]]
        assert chosen.best == 1.0
        assert chosen.parameter == "value"
    # inside a box that ends before the border between the classes nothing flips
    boxed = select(classes, x, 0, radius=9.0, method=method, values=[1.0], score="attack", bounds=(0.1, 5.0))
    assert boxed.scores.tolist() == [1.0]
    # one logit, read by the user
    one = select(
        lambda x: x.sum(1),
        x,
        radius=2.0,
        method=method,
        values=[1.0],
        score="attack",
        decide=lambda out: (out > 0).long(),
    )
    assert one.per_point.tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("method", ["smoothhess", "smoothgrad", "softplus"])
def test_attack_scores_are_those_of_post_hoc(method):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 4)).double()
    target = net(X).argmax(1)
    options = {"n_calls": 60} if method.startswith("smooth") else {}
    found = select_radii(net, X, [0.3, 1.0], target, method=method, values=[0.3, 2.0], score="attack", **options)
    results = {}
    for v in (0.3, 2.0):
        if method == "softplus":
            results[str(v)] = baselines.softplus(net, X, target, beta=v)
        else:
            result = SmoothHess(net).attribute(X, target, sigma=v, n_calls=60)
            results[str(v)] = result.taylor(1 if method == "smoothgrad" else 2)
    contest = post_hoc(net, X, results, [0.3, 1.0])
    for r, one in enumerate(found):
        assert torch.equal(one.per_point.bool(), contest.unchanged[:, r])
        assert one.per_sample is None
    margin = contest.difference("0.3", "2.0")
    one = found[1]
    assert float(one.scores[0] - one.scores[1]) == pytest.approx(float(margin.value[1]))
    assert float(one.difference_stderr.max()) == pytest.approx(float(margin.stderr[1]) * math.sqrt(12 / 11))


def test_coarse_to_fine_finds_the_same_with_fewer():
    made = []

    def method(value):
        made.append(value)
        x = torch.zeros(1, 1).double()
        return Exact.make(x, torch.zeros(1).double(), x, torch.full((1, 1, 1), value).double())

    x = torch.zeros(1, 1).double()
    for count, best in [(100, 2.5), (37, 0.7), (64, 6.0), (5, 1.0), (1, 2.0)]:
        values = [best * (k + 1) / (count // 3 + 1) for k in range(count)]  # one of them is `best`
        radius = 2.5 / best  # P_MSE of |x| is lowest at H = 5/(2r)
        made.clear()
        chosen = select(
            absolute,
            x,
            radius=radius,
            method=method,
            values=values,
            coarse_to_fine=True,
            n_samples=2_000,
            sampling="ball",
        )
        whole = select(absolute, x, radius=radius, method=method, values=values, n_samples=2_000)
        assert chosen.best == whole.best
        assert len(chosen) <= 2 * math.sqrt(count) + 2 * math.log2(count + 1) + 2
        assert chosen.n_candidates == count
        assert len(made) == len(chosen) + count
        if len(chosen) < count:
            assert f"of {count}, {len(chosen)} of them scored" in repr(chosen)
    made.clear()
    both = select_radii(
        absolute, x, [0.5, 5.0], method=method, values=[0.1 * 1.2**k for k in range(40)], coarse_to_fine=True
    )
    assert len(made) == len(set(made)) == len(both[0]) == len(both[1])  # each candidate is made once for all radii
    assert both[0].best > 5 * both[1].best


def test_default_candidates():
    for radius in (0.5, 2.0):
        chosen = select(NET, X, radius=radius, n_calls=20, n_samples=20)
        torch.testing.assert_close(
            chosen.values, radius / math.sqrt(5) * torch.tensor([0.25, 0.5, 0.75, 1, 1.5]).double()
        )
    each = select_radii(NET, X, [0.5, 2.0], n_calls=20, n_samples=20)
    torch.testing.assert_close(each[1].values, chosen.values)
    torch.testing.assert_close(each[1].per_point, chosen.per_point)
    betas = select(NET, X, radius=1.0, method="softplus", n_samples=20, coarse_to_fine=True)
    assert betas.n_candidates == 25
    assert float(betas.values[0]) == pytest.approx(0.1)
    assert float(betas.values[-1]) == pytest.approx(1000)


def test_candidates_are_sorted_and_forms_of_values_do_not_matter():
    one = select(NET, X, radius=1.0, method="softplus", values=torch.tensor([5.0, 1.0]), n_samples=20)
    two = select(NET, X, radius=1.0, method="softplus", values=(v for v in (1, 5)), n_samples=20)
    assert one.values.tolist() == two.values.tolist() == [1.0, 5.0]
    torch.testing.assert_close(one.per_point, two.per_point)


def test_batches_arguments_and_the_model():
    net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 3)).double().eval()
    f = lambda x, c: c * net(x)
    c = torch.linspace(-1, 2, 12).double()[:, None]
    before, state = [p.clone() for p in net.state_dict().values()], torch.get_rng_state()
    whole = select(f, X, 1, c, radius=1.0, method="softplus", values=[1.0, 5.0], n_samples=30)
    parts = select(f, X, 1, c, radius=1.0, method="softplus", values=[1.0, 5.0], n_samples=30, internal_batch_size=7)
    torch.testing.assert_close(whole.per_point, parts.per_point, rtol=1e-9, atol=1e-18)
    assert all(torch.equal(a, b) for a, b in zip(before, net.state_dict().values(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    alone = select(lambda x: c[3] * net(x), X[3:4], 1, radius=1.0, method="softplus", values=[1.0, 5.0], n_samples=30)
    torch.testing.assert_close(alone.per_point[:, 0], whole.per_point[:, 3])


def test_reading_it():
    chosen = select(NET, X, radius=1.0, method="softplus", values=[0.1, 3.0, 4.0, 100.0], n_samples=60)
    text = repr(chosen)
    assert "β of softplus by P_MSE at radius 1, 12 point(s): best" in text
    assert "*" in text
    assert len(chosen.to_markdown().splitlines()) == 6
    assert len(chosen) == 4
    edge = select(NET, X, radius=1.0, method="softplus", values=[0.1, 0.2], n_samples=60)
    assert edge.at_edge
    assert "at the edge of the grid" in repr(edge)
    pytest.importorskip("matplotlib")
    ax = chosen.plot()
    assert ax.get_xscale() == "log"
    narrow = select(NET, X, radius=1.0, method="softplus", values=[3.0, 4.0], n_samples=60).plot()
    assert narrow.get_xscale() == "linear"


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"values": []}, ValueError, "at least one candidate and each once"),
        ({"values": [1.0, 1.0]}, ValueError, "at least one candidate and each once"),
        ({"values": [1.0, 0.0]}, ValueError, "candidates must be positive, finite numbers, got 0"),
        ({"values": [-2.0]}, ValueError, "candidates must be positive, finite numbers, got -2"),
        ({"values": 1.0}, TypeError, "values must hold several candidates: pass a list, got float"),
        ({"values": ["a"]}, TypeError, "candidates must be positive numbers, got str"),
        ({"radius": 0.0}, ValueError, "radius must be a positive number"),
        ({"radius": -1.0}, ValueError, "radius must be a positive number"),
        ({"radius": [1.0, 2.0]}, ValueError, "radius must be a positive number"),
        ({"method": "grad"}, ValueError, 'method must be one of "smoothhess", "smoothgrad", "softplus", "swish", or a'),
        ({"order": 3}, ValueError, "order must be 1 or 2, got 3"),
        ({"score": "mse"}, ValueError, 'score must be "pmse" or "attack"'),
        ({"n_samples": 1}, ValueError, "n_samples must be at least 2"),
        ({"sampling": "sphere"}, ValueError, "sampling must be"),
        ({"inputs": X[0]}, ValueError, "inputs must be"),
        ({"target": 1}, ValueError, "target"),
        ({"method": lambda v: 3}, TypeError, r"must return a result \(Interactions\), got int"),
        ({"method": lambda v: baselines.gradient(NET, X + 1)}, ValueError, "made around these inputs"),
        ({"method": lambda v: baselines.gradient(NET, X), "n_calls": 5}, TypeError, "takes no options, got n_calls"),
        ({"method": lambda v: baselines.gradient(NET, X), "values": None}, ValueError, "values must be given"),
        ({"score": "attack"}, ValueError, r"expected scores \(N, C\) of at least two classes"),
        (
            {"method": lambda v: Attribution.make(X, X.sum(1), X, torch.eye(5).expand(12, 5, 5))},
            ValueError,
            "attribution",
        ),
    ],
)
def test_what_is_refused(changes, error, text):
    arguments = {"inputs": X, "radius": 1.0, "method": "softplus", "values": [1.0, 2.0], "n_samples": 20, **changes}
    with pytest.raises(error, match=text):
        select(NET, **arguments)


def test_what_select_radii_refuses():
    with pytest.raises(ValueError, match="each once"):
        select_radii(NET, X, [1.0, 1.0], method="softplus", values=[1.0])
    with pytest.raises(TypeError, match="unexpected keyword"):
        select_radii(NET, X, [1.0], method="softplus", values=[1.0], betas=[2.0])
