"""The experiments on the plane: surface, four-quadrant, nested."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from scipy import integrate, special
from torch import nn

from paper import datasets
from paper.cells import Cells
from paper.experiments import find, four_quadrant, nested, plane, scales, surface
from paper.experiments.rings import ENTRIES, Rings
from paper.networks import plane_mlp
from paper.options import Options
from paper.training import FOUR_QUADRANT, shortened
from smoothhess import Isotropic, SmoothHess
from smoothhess.model.weight_files import read_weights
from tests.truths import FOUR_QUADRANT_HESSIAN, OneHidden, quadratic

pytestmark = pytest.mark.usefixtures("plain_figures")

TOYS = {"surface": surface, "four-quadrant": four_quadrant, "nested": nested}
SIGMA2 = torch.tensor([1e-6, 1e-3, 0.1, 1.0, 10.0], dtype=torch.float64)


def small(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = plane_mlp((12, 12))
        for layer in net.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.7)
                nn.init.normal_(layer.bias, std=0.3)
    return net.eval()


# --- rings: the exact Hessian -----------------------------------------------------------------------------------------


def test_rings_of_a_quadratic_are_exact_at_every_scale():
    A, b = quadratic(2)
    rings = Rings.of(lambda x: 7.0 + x @ b + ((x @ A) * x).sum(-1) / 2)
    torch.testing.assert_close(rings.hessian(SIGMA2), A.expand(5, 2, 2), rtol=0, atol=1e-7)


def test_expectation_of_a_quadratic_and_of_a_network():
    A, b = quadratic(2)
    mean = Rings.of(lambda x: 7.0 + x @ b + ((x @ A) * x).sum(-1) / 2).expectation(SIGMA2)
    torch.testing.assert_close(mean, SIGMA2 * A.trace() / 2, rtol=1e-6, atol=0)
    net, x = OneHidden(2, seed=4), torch.zeros(1, 2, dtype=torch.float64)
    found = Rings.of(net).expectation(torch.tensor([0.16])) + net(x).detach()
    torch.testing.assert_close(found, net.truth(x, Isotropic(0.4)).value, rtol=1e-4, atol=0)


def test_rings_of_the_four_quadrants():
    found = Rings.of(datasets.four_quadrant, n_angles=1024).hessian(SIGMA2)
    torch.testing.assert_close(found, FOUR_QUADRANT_HESSIAN.expand(5, 2, 2), rtol=0, atol=1e-4)


@pytest.mark.parametrize("sigma", [0.05, 0.4, 2.0])
def test_rings_of_a_network_with_a_closed_form(sigma):
    net = OneHidden(2, seed=4)
    truth = net.truth(torch.zeros(1, 2, dtype=torch.float64), Isotropic(sigma)).hessian[0]
    found = Rings.of(net, n_radii=1600, n_angles=2048).hessian(torch.tensor([sigma**2]))[0]
    torch.testing.assert_close(found, truth, rtol=0, atol=2e-4)


def test_regions_add_up():
    net = OneHidden(2, seed=5)

    def inside(x):
        return x.abs().amax(-1) <= 2

    whole, inner, outer = (Rings.of(net, where=where).hessian(SIGMA2) for where in (None, inside, lambda x: ~inside(x)))
    torch.testing.assert_close(inner + outer, whole, rtol=1e-12, atol=1e-12)
    assert outer[:3].abs().max() < 1e-6  # six σ away
    assert outer[4].norm() > 0.1 * whole[4].norm()


def test_batches_do_not_change_the_rings(monkeypatch):
    net = OneHidden(2)
    whole = Rings.of(net, n_radii=50, n_angles=16)
    monkeypatch.setattr("paper.experiments.rings._BATCH", 7)
    torch.testing.assert_close(Rings.of(net, n_radii=50, n_angles=16).sin2, whole.sin2, rtol=1e-12, atol=1e-14)


def test_smoothhess_agrees_with_the_rings():
    """Two routes that share nothing: gradients at random points, values on rings."""
    net = small()
    exact = Rings.of(lambda x: net.double()(x)[:, 0], n_radii=1600, n_angles=1024).entries([0.01, 0.3])
    net.float()
    for k, sigma2 in enumerate((0.01, 0.3)):
        found = scales._smooth_hessian(net, sigma2, 20_480, seed=1, device="cpu")
        for name in ENTRIES:
            assert abs(found[name] - exact[name][k]) <= 4 * found[f"{name} standard error"]
            assert 0 < found[f"{name} standard error"] <= 0.1
        assert found["calls"] == 20_480


def test_error_bars_hold_for_gradients_that_few_draws_meet():
    """A ramp around a circle, reached by one draw in a hundred: over scales with independent draws, z is normal."""

    class Ramp(nn.Module):
        def forward(self, x):
            beyond = ((x.norm(dim=-1) - 1.2) * 50).clamp(0, 1)
            return (x[:, 0] * x[:, 1] * (1 - 6 * beyond))[:, None]

    ramp, sigma2 = Ramp(), [0.3 * 1.05**k for k in range(12)]
    exact = Rings.of(lambda x: ramp(x)[:, 0], n_radii=8_000, n_angles=32, smallest=1e-3).entries(sigma2)
    scores = []
    for k, s2 in enumerate(sigma2):
        found = scales._smooth_hessian(ramp, s2, 5_120, k, "cpu")
        scores += [(found[name] - exact[name][k]) / found[f"{name} standard error"] for name in ENTRIES]
    assert max(map(abs, scores)) < 4.5
    assert sum(abs(z) > scales.REACH for z in scores) <= 6  # 1.8 of 36 expected, in groups of three
    assert 0.7 < math.sqrt(sum(z * z for z in scores) / len(scores)) < 1.4


# --- closed form of the nested target ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma2", [0.005, 0.05, 0.18, 0.5, 3.0])
def test_closed_form_of_the_nested_target(sigma2):
    """Against the integral over radius and angle, from the function itself, piece by piece between its jumps."""
    sigma = math.sqrt(sigma2)

    def integrand(angle, r, i, j):
        delta = r * math.cos(angle), r * math.sin(angle)
        value = float(datasets.nested(torch.tensor([delta], dtype=torch.float64)))
        density = r / (2 * math.pi * sigma2) * math.exp(-r * r / (2 * sigma2))
        return value * (delta[i] * delta[j] / sigma2**2 - (i == j) / sigma2) * density

    found = nested.target_hessian(torch.tensor([sigma2], dtype=torch.float64))[0]
    edges = [0.0, 0.6 - 1e-12, 1.2 - 1e-12, max(9 * sigma, 2.0)]
    for i, j in ENTRIES.values():
        pieces = [
            integrate.fixed_quad(
                lambda r, i=i, j=j: [
                    # trigonometric polynomials: 16 angles are exact
                    sum(integrand(2 * math.pi * k / 16, one, i, j) for k in range(16)) * 2 * math.pi / 16
                    for one in r
                ],
                low,
                high,
                n=60,
            )[0]
            for low, high in pairwise(edges)
        ]
        assert float(found[i, j]) == pytest.approx(sum(pieces), abs=1e-9)


def test_closed_form_limits():
    ends = nested.target_hessian(torch.tensor([1e-6, 1e6], dtype=torch.float64))
    torch.testing.assert_close(ends[0], torch.tensor([[1.0, 1.0], [1.0, 0.0]], dtype=torch.float64))
    torch.testing.assert_close(
        ends[1], torch.tensor([[0.0, -5.0], [-5.0, 0.0]], dtype=torch.float64), atol=1e-4, rtol=0
    )
    assert float(ends[0, 0, 1]) == pytest.approx(1 - 6 * special.gammaincc(3, 0.72e6))


def test_the_gap_is_split_without_remainder(tmp_path):
    """Of a network that is the target but for x₁x₂/2 beyond the square: no gap inside, and the right one outside."""

    class Departed(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            far = x.abs().amax(-1) > nested.SIDE
            return (datasets.nested(x) + torch.where(far, x[:, 0] * x[:, 1] / 2, 0.0))[:, None]

    fitted = plane.Trained(Departed(), 0, 0.0)
    scales = [0.01, 0.5, 10.0]
    exact = Rings.of(lambda x: fitted.in_double(x)[:, 0], n_radii=6400).entries(scales)
    rows = [{"σ²": s2, **{f"{name} of the network": exact[name][k] for name in ENTRIES}} for k, s2 in enumerate(scales)]
    nested.explain(rows, fitted, Cells(tmp_path, {}), Options(tmp_path))
    for row in rows:
        for name in ENTRIES:
            assert row[f"{name} gap from inside the square"] == pytest.approx(0, abs=0.005)  # the rings' error
            whole = row[f"{name} of the network"] - row[f"{name} of the target"]
            assert row[f"{name} gap from outside the square"] == pytest.approx(whole, abs=0.005)
    sigma = math.sqrt(10.0)
    inside = integrate.quad(lambda t: t * t * math.exp(-t * t / 2) / math.sqrt(2 * math.pi), -2 / sigma, 2 / sigma)[0]
    assert rows[2]["H₁₂ gap from outside the square"] == pytest.approx((1 - inside**2) / 2, abs=0.01)


def test_the_error_is_found_where_it_is():
    class Beside(nn.Module):
        """The target, and 0.5 more in a thin ring around its outer jump."""

        def forward(self, x):
            ring = (x.norm(dim=-1) - 1.2).abs() < 0.05
            return (datasets.nested(x) + torch.where(ring, 0.5, 0.0))[:, None]

    words = nested.jump_words(plane.Trained(Beside(), 0, 0.0), "cpu")
    area = 100 * 2 * math.pi * (0.6 + 1.2) * 2 * nested.BAND / 16
    assert (
        f"100 % of the squared error on the square lies within 0.1 of the two jumps, {area:.0f} % of its area" in words
    )
    assert "within 0.4 of 0 the error is 0 (" in words


def test_the_error_at_new_points():
    class Beside(nn.Module):
        """The target, and 0.5 more near 0."""

        def forward(self, x):
            return (datasets.nested(x) + torch.where(x.norm(dim=-1) < scales.NEAR, 0.5, 0.0))[:, None]

    words = scales.unseen_words(plane.Trained(Beside(), 0, 0.0), datasets.nested, "cpu")
    assert "median 0; " in words
    assert words.endswith("within 0.2 of 0: mean 0.25")
    share = float(words.split("mean squared error ")[1].split(",")[0]) / 0.25
    assert share == pytest.approx(math.pi * scales.NEAR**2 / 16, rel=0.2)


# --- the smoothed surface ---------------------------------------------------------------------------------------------


def test_the_surface_and_its_hessian_are_exact():
    net = OneHidden(2, seed=7)
    found = surface.Surface.of(nn.Sequential(net, nn.Unflatten(0, (-1, 1))), step=0.05)
    sigma = math.sqrt(surface.SIGMA2)
    at = [(3, 90), (50, 50), (77, 12)]
    x = torch.stack([found.axis[list(index)] for index in at])
    truth = net.truth(x, Isotropic(sigma))
    for k, index in enumerate(at):
        assert float(found.f[index]) == pytest.approx(net(x[k : k + 1]).item(), abs=1e-12)
        assert float(found.h[index]) == pytest.approx(float(truth.value[k]), abs=1e-3)
        torch.testing.assert_close(found.hessian[index], truth.hessian[k], rtol=0, atol=1e-3)
        assert [found.index(value) for value in x[k].tolist()] == list(index)
    with pytest.raises(ValueError, match="choose a step that divides it"):
        found.index(0.01)


# --- training ---------------------------------------------------------------------------------------------------------


def test_training_is_kept_resumed_and_leaves_the_global_generator_alone(tmp_path, monkeypatch):
    recipe, sizes, points = shortened(FOUR_QUADRANT, 60), (2, 16, 1), datasets.plane_grid(0.5)

    def fit(folder):
        options = Options(tmp_path / folder)
        return plane.trained("toy", datasets.four_quadrant, recipe, options, sizes, points)

    torch.manual_seed(3)
    before = torch.get_rng_state()
    straight = fit("straight")
    assert torch.equal(torch.get_rng_state(), before)
    assert (straight.n_steps, straight.network.training) == (60, False)
    assert "60 steps, mean squared error" in straight.words

    # cut off after 40 steps: a checkpoint every 20 is there
    steps, train = [], plane.train

    def cut(*arguments, **further):
        counted = replace(arguments[2], loss=lambda *pair: _count(steps, 45) or recipe.loss(*pair))
        return train(*arguments[:2], counted, **further | {"checkpoint": replace(further["checkpoint"], every=20)})

    with monkeypatch.context() as patch:
        patch.setattr(plane, "train", cut)
        with pytest.raises(KeyboardInterrupt):
            fit("cut")
    (left,) = (tmp_path / "cut" / "weights").iterdir()
    assert left.name.endswith(".checkpoint.safetensors")
    resumed = fit("cut")
    for a, b in zip(straight.network.parameters(), resumed.network.parameters(), strict=True):
        assert torch.equal(a, b)
    (kept,) = (tmp_path / "cut" / "weights").iterdir()
    assert kept.name == "toy-60-steps-seed-0.safetensors"

    monkeypatch.setattr(plane, "train", lambda *_, **__: pytest.fail("trained again"))
    again = fit("cut")
    assert again.mse == straight.mse
    assert all(torch.equal(a, b) for a, b in zip(again.network.parameters(), resumed.network.parameters(), strict=True))


def test_a_training_with_fewer_steps_equals_the_full_one_at_that_step(tmp_path, monkeypatch):
    recipe, sizes, points = shortened(FOUR_QUADRANT, 60), (2, 16, 1), datasets.plane_grid(0.5)
    train = plane.train
    monkeypatch.setattr(
        plane, "train", lambda *a, checkpoint, **k: train(*a, checkpoint=replace(checkpoint, every=25), **k)
    )

    def fit(steps, loss=recipe.loss):
        options = Options(tmp_path, steps=steps)
        return plane.trained("toy", datasets.four_quadrant, replace(recipe, loss=loss), options, sizes, points)

    stopped = fit(25)
    assert stopped.words.startswith("25 of 60 steps, ")
    again = fit(25)
    assert (again.n_steps, again.mse, again.planned) == (25, stopped.mse, 60)
    steps = []
    with pytest.raises(KeyboardInterrupt):
        fit(None, lambda *pair: _count(steps, 30) or recipe.loss(*pair))
    state, _ = read_weights(tmp_path / "weights" / "toy-60-steps-seed-0.safetensors.checkpoint.safetensors")
    for name, value in stopped.network.state_dict().items():
        assert torch.equal(value, state[f"network.{name}"])
    assert fit(60).words.startswith("60 steps, ")
    with pytest.raises(ValueError, match="--steps must be at most 60"):
        fit(61)


def _count(steps, most):
    steps.append(1)
    if len(steps) > most:
        raise KeyboardInterrupt


def test_a_shortened_recipe_falls_at_the_same_shares():
    short = shortened(FOUR_QUADRANT, 400)
    assert short.n_steps == 400
    assert [short.rate(k) for k in (0, 49, 50, 100, 200)] == [
        FOUR_QUADRANT.rate(100 * k) for k in (0, 49, 50, 100, 200)
    ]


def test_full_precision_under_autocast():
    net = plane._FullPrecision((2, 8, 1))
    x = torch.rand(5, 2)
    with torch.autocast("cpu", torch.bfloat16):
        inside = net(x)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, net(x))


# --- full experiments, on small networks ------------------------------------------------------------------------------


@pytest.fixture
def toy(monkeypatch):
    """The experiments with an untrained network in the place of the trained one."""
    for module in TOYS.values():
        monkeypatch.setattr(module, "trained", lambda *_, **__: plane.Trained(small(), 12, 0.5))
    monkeypatch.setattr(four_quadrant, "QUICK_CALLS", 640)
    monkeypatch.setattr(nested, "QUICK_CALLS", (640, 640))


@pytest.mark.parametrize("name", TOYS)
def test_an_experiment_writes_tables_and_figures_and_does_not_repeat_itself(name, toy, tmp_path, monkeypatch):
    options = Options(tmp_path / "out", quick=True)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    outcome = find(name)(options)
    assert torch.equal(torch.get_rng_state(), before)
    assert outcome.name == name
    assert {path.suffix for path in outcome.files} == {".csv", ".md", ".png", ".svg"}
    assert all(path.is_file() and path.parent == tmp_path / "out" / f"{name}-quick" for path in outcome.files)
    assert "12 steps, mean squared error 0.5" in outcome.lines[0]
    page = next(path for path in outcome.files if path.suffix == ".md").read_text(encoding="utf-8")
    assert f"python -m paper {name} --out DIR --device cpu --quick --seed 0" in page
    assert all(line in page for line in outcome.lines)

    tables = [path.read_bytes() for path in outcome.files if path.suffix == ".csv"]
    monkeypatch.setattr(SmoothHess, "attribute", lambda *_, **__: pytest.fail("estimated again"))
    monkeypatch.setattr(TOYS[name], "save_figure", lambda *_, **__: [])
    again = find(name)(options)
    assert [path.read_bytes() for path in again.files if path.suffix == ".csv"] == tables
    with pytest.raises(ValueError, match="seed is 0 there and 1 now"):
        find(name)(replace(options, seed=1))
    monkeypatch.setattr(TOYS[name], "trained", lambda *_, **__: plane.Trained(small(), 12, 0.25))
    with pytest.raises(ValueError, match="mean squared error is 0.5 there and 0.25 now"):
        find(name)(options)


def test_findings_count_what_is_outside_the_band():
    rows = [
        {"σ²": s2, **{key: value for name in ENTRIES for key, value in ((name, h), (f"{name} standard error", 0.1))}}
        | {f"{name} of the network": h + 0.25 for name in ENTRIES}
        | {"error of the network": 0.002}
        for s2, h in ((0.005, 9.0), (0.01, 2.66), (0.1, 2.5), (1.0, 2.4))
    ]
    soft = [{"β": 1.0, **dict.fromkeys(ENTRIES, 0.0)}, {"β": 700.0, **dict.fromkeys(ENTRIES, 10.0)}]
    lines = four_quadrant.findings(rows, soft, plane.Trained(small(), 12, 0.5))
    assert "2.400 to 2.660, within 2.5 ± 0.15 at 2 of 3 scales" in lines[1]
    assert "the network's exact H₁₂ there: 2.650 to 2.910" in lines[1]
    assert "can put H₁₂ off by up to 0.20 and H₁₁ by 0.28; 0.15 is certain only below 0.0015" in lines[2]
    assert "0.0 % of 12 entries within their 95 % intervals, farthest 2.5" in lines[4]
    assert "to 10.00, the peak at β = 700" in lines[5]
    assert "within 2.5 ± 0.15 at 2 of 4 scales, the network's exact H₁₂ at 1; " in lines[6]
    assert lines[6].endswith("within 0.15 at every scale from σ² = 0.1 on (exact: 1)")


def test_the_error_bounds_the_gap(tmp_path):
    """Of the network's exact Hessian from the target's, at every scale."""
    fitted = plane.Trained(small(), 0, 0.0)
    rows = scales.smooth_rows(
        fitted,
        datasets.four_quadrant,
        Cells(tmp_path, {}),
        Options(tmp_path),
        [0.01, 0.1, 1.0],
        [640] * 3,
    )
    for row in rows:
        for name, (i, j) in ENTRIES.items():
            gap = abs(row[f"{name} of the network"] - float(FOUR_QUADRANT_HESSIAN[i, j]))
            assert 0 < gap <= row["error of the network"] / row["σ²"] * (1 if i != j else math.sqrt(2))


def test_agreement_leaves_out_what_saw_no_kink():
    rows = [
        {key: value for name in ENTRIES for key, value in ((name, 1.0), (f"{name} standard error", error))}
        | {f"{name} exact": 1.3 for name in ENTRIES}
        for error in (0.0, 0.1, 0.2)
    ]
    assert "50.0 % of 6 entries within their 95 % intervals, farthest 3.0" in scales.agreement(rows, "exact")


@pytest.mark.slow
@pytest.mark.parametrize("name", TOYS)
def test_a_quick_run_learns_its_function(name, tmp_path):
    outcome = find(name)(Options(tmp_path, quick=True))
    error = float(outcome.lines[0].split("mean squared error ")[1].split()[0])
    assert error < {"surface": 1e-3, "four-quadrant": 0.1, "nested": 0.5}[name]
