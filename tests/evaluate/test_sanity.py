"""The table of sanity checks: what each line must say of models that are known to pass or to fail it."""

import copy
import math
import sys

import pytest
import torch
from torch import nn

from smoothhess import Diagonal
from smoothhess.evaluate.sanity import Check, Sanity, sanity
from tests.printed import alike
from tests.truths import OneHidden, quadratic

pytestmark = pytest.mark.rounding

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).double()
RANKS, DIRECTIONS = "rank correlation of |H|", "eigen-directions"


def paired(seed=0):
    """Hidden units that each see one of the pairs (0, 1), (2, 3), …: structure that random weights do not have."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2)).double()
    mask = torch.zeros(64, 8)
    for unit in range(64):
        mask[unit, 2 * (unit % 4) : 2 * (unit % 4) + 2] = 2 + unit % 4
    with torch.no_grad():
        net[0].weight.mul_(mask)
    return net


def test_a_network_with_structure_passes():
    report = sanity(paired(), X, 1, radius=1.0, n_calls=320)
    assert report.passed
    assert [c.name.split(":")[0] for c in report.checks] == ["seeds"] * 2 + ["inputs"] * 2 + ["parameters"] * 4
    last = report[f"parameters: {RANKS}, all 2 layers random"]
    assert last.passed is True
    assert last.value < 0.5 * last.reference
    assert last.verdict.startswith("falls")
    half = report[f"parameters: {RANKS}, last 1 of 2 layers random"]
    assert half.passed is None
    assert half.value > last.value
    seeds = report["seeds: top 10 pairs found again"]
    assert seeds.value > 0.8
    assert seeds.reference == pytest.approx(10 / 28)
    near = report[f"inputs: {RANKS}, nearby"]
    assert near.value > near.reference
    assert near.verdict == "nearby inputs are more similar"


class Stubborn(nn.Module):
    """Its parameters do not enter the interactions: what is shown is fixed."""

    def __init__(self):
        super().__init__()
        self.inner = [OneHidden(8, width=40)]  # not registered
        self.scale = nn.Linear(1, 1).double()

    def forward(self, x):
        return self.inner[0](x) + 0 * self.scale(x[:, :1])[:, 0]


def test_a_model_that_ignores_its_parameters_fails():
    report = sanity(Stubborn(), X, radius=1.0, n_calls=160, stages=1)
    assert not report.passed
    for what in (RANKS, DIRECTIONS):
        line = report[f"parameters: {what}, all 1 layers random"]
        assert line.passed is False
        assert line.value == pytest.approx(line.reference, abs=0.1)
        assert line.verdict.startswith("stays")


def test_too_few_calls_are_called_noise():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(30, 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 1)).double()
    x = torch.randn(3, 30, generator=torch.Generator().manual_seed(1)).double()
    report = sanity(net, x, radius=3.0, n_calls=10, control=None, stages=1)
    seeds = report["seeds: top 10 pairs found again"]
    assert seeds.passed is False
    assert "raise n_calls" in seeds.verdict
    assert not report.passed
    better = sanity(net, x, radius=3.0, n_calls=2_000, stages=1)["seeds: top 10 pairs found again"]
    assert better.value > seeds.value + 0.2


def test_a_quadratic_is_alike_everywhere_and_at_every_seed():
    a, b = quadratic(8)
    report = sanity(lambda x: x @ b + (x @ a * x).sum(1) / 2, X, radius=1.0, n_calls=32)
    assert report["seeds: top 10 pairs found again"].value == 1
    assert report[f"seeds: {RANKS}"].value == pytest.approx(1)
    line = report[f"inputs: {RANKS}, nearby"]
    assert line.value == pytest.approx(1)
    assert line.reference == pytest.approx(1)
    assert line.verdict.startswith("similar for all inputs")
    assert report.passed
    assert report[f"inputs: {DIRECTIONS}, nearby"].value == pytest.approx(1)


def test_what_cannot_be_measured_says_so():
    net = paired()
    report = sanity(lambda x: net(x).softmax(-1), X[:1], 0, radius=1.0, n_calls=64)
    line = report["parameters: randomised"]
    assert line.passed is None
    assert "not measured: parameters can be randomised only in a torch.nn.Module" in line.verdict
    near = report[f"inputs: {RANKS}, nearby"]
    assert near.passed is None
    assert "pass several different inputs" in near.verdict
    assert math.isnan(near.stderr)
    bare = sanity(nn.ReLU(), X, (3,), radius=1.0, n_calls=16)
    assert "the model has no parameters" in bare["parameters: randomised"].verdict

    class Uncopied(nn.Linear):
        def __deepcopy__(self, memo):
            raise RuntimeError("it holds a socket")

    alone = sanity(nn.Sequential(Uncopied(8, 4), nn.ReLU(), nn.Linear(4, 1)).double(), X, radius=1.0, n_calls=16)
    assert "not measured: it holds a socket" in alone["parameters: randomised"].verdict


def test_chance_is_no_likeness():
    """Eigen-directions of unrelated networks overlap by 0 on average, though spans of half the space always meet."""
    values = []
    for seed in range(8):
        report = sanity(OneHidden(8, width=200, seed=seed), X, radius=1.0, n_calls=64, stages=1, seed=100 + seed)
        values.append(report[f"parameters: {DIRECTIONS}, all 1 layers random"].value)
    mean, stderr = torch.tensor(values).mean(), torch.tensor(values).std() / math.sqrt(8)
    assert abs(float(mean)) < 4 * float(stderr) + 0.02
    assert float(stderr) < 0.15


def test_the_model_and_the_random_state_are_untouched():
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)).double().eval()
    net[1].running_mean.normal_()
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    one = sanity(net, X, radius=1.0, n_calls=32, stages=2)
    after = net.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(123)
    two = sanity(net, X, radius=1.0, n_calls=32, stages=2)
    assert alike(repr(one), repr(two))
    other = sanity(net, X, radius=1.0, n_calls=32, stages=2, seed=1)
    assert not alike(repr(one), repr(other))


def test_cascade_goes_from_the_output_to_the_input():
    net = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(8, 8), nn.ReLU())], nn.Linear(8, 1)).double()
    names = [c.name for c in sanity(net, X, radius=1.0, n_calls=16, stages=3).checks if "parameters" in c.name]
    assert [n.split(", ")[1] for n in names[::2]] == [
        "last 2 of 5 layers random",
        "last 4 of 5 layers random",
        "all 5 layers random",
    ]


def test_parameters_without_a_reset_are_drawn_anew():
    net = OneHidden(8, width=100, seed=0)  # not with the seed that they were made with
    report = sanity(net, X, radius=1.0, n_calls=160)
    assert report[f"parameters: {RANKS}, all 1 layers random"].value < 0.5


def test_targets_gaussians_groups_and_arguments():
    net = paired()
    mask = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    report = sanity(net, X, [0, 1, 0, 1, 0, 1], gaussian=Diagonal([0.5] * 8), n_calls=64, feature_mask=mask, k=2)
    assert "4 features" in repr(report)
    assert report["seeds: top 2 pairs found again"].reference == pytest.approx(2 / 6)
    scaled = sanity(lambda x, c: c * net(x), X, 0, torch.ones(6, 1).double(), sigma=0.3, n_calls=64)
    plain = sanity(lambda x: net(x), X, 0, sigma=0.3, n_calls=64)
    assert scaled.checks[1].value == pytest.approx(plain.checks[1].value, abs=1e-6)
    wide = sanity(net, X, 0, sigma=0.3, n_calls=64, internal_batch_size=7)
    torch.testing.assert_close(wide.checks[1].value, sanity(net, X, 0, sigma=0.3, n_calls=64).checks[1].value)


def test_many_pairs_are_ranked_in_part(monkeypatch):
    whole = sanity(paired(), X, 1, radius=1.0, n_calls=64, stages=1)
    monkeypatch.setattr(sys.modules[sanity.__module__], "MOST_PAIRS", 20)
    part = sanity(paired(), X, 1, radius=1.0, n_calls=64, stages=1)
    assert part.checks[0] == whole.checks[0]  # top pairs are found among all
    assert part.checks[1].value == pytest.approx(whole.checks[1].value, abs=0.2)


def test_reading_it():
    report = sanity(paired(), X, 1, radius=1.0, n_calls=64, stages=1)
    text = repr(report)
    assert "Sanity of SmoothHess of 6 example(s) × 8 features, Isotropic σ = 0.354" in text
    assert len(text.splitlines()) == 2 + 6 + 1
    assert len(report.to_markdown().splitlines()) == 2 + 6
    with pytest.raises(KeyError, match="expected one of 'seeds: top 10"):
        report["nothing"]
    assert isinstance(report, Sanity)
    assert isinstance(report.checks[0], Check)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"radius": None}, ValueError, "pass exactly one of sigma"),
        ({"radius": -1.0}, ValueError, "radius must be one positive number"),
        ({"k": 0}, ValueError, "k must be at least 1"),
        ({"n_seeds": 1}, ValueError, "n_seeds must be at least 2"),
        ({"stages": 0}, ValueError, "stages must be at least 1"),
        ({"nearness": 0}, ValueError, "nearness must be a positive number of σ"),
        ({"inputs": X[:, :2]}, ValueError, "at least 3 features, got 2"),
        ({"inputs": X[0]}, ValueError, "inputs must be"),
        ({"target": None}, ValueError, "without a target"),
    ],
)
def test_what_is_refused(changes, error, text):
    arguments = {"inputs": X, "target": 0, "radius": 1.0, "n_calls": 16, **changes}
    model = paired() if arguments["inputs"].shape[-1] == 8 else nn.Linear(2, 2).double()
    with pytest.raises(error, match=text):
        sanity(model, **arguments)


def test_a_training_mode_model_is_refused():
    with pytest.raises(ValueError, match="training mode"):
        sanity(nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double(), X, radius=1.0, n_calls=16)
