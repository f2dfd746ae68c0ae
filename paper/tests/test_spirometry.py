import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn

from paper.experiments import find, spirometry
from paper.expiration import simulate
from paper.long_convolution import LongConv1d, with_long_convolutions
from paper.networks import SpirometryCNN
from paper.options import Options
from paper.spirometry import STEP, Coughing, Spirograms, fev1, find_coughs, flow, resample
from paper.spirometry_network import fitted, recalibrate, recipe, ridge_regression, squared_errors
from paper.tests.sas_files import xpt
from paper.tests.test_nhanes import LENGTHS, record, table
from smoothhess import SmoothHess
from smoothhess.model.weight_files import load_weights
from tests.printed import alike

pytestmark = [pytest.mark.rounding, pytest.mark.usefixtures("plain_figures")]

T = STEP * torch.arange(300, dtype=torch.float64)


def seeded(build, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


# --- what is measured on a curve ---------------------------------------------------------------------------------


def exponential(t, onset=0.0, volume=4.0, tau=0.6):
    return volume * (1 - torch.exp(-(t - onset).clamp_min(0) / tau))


@pytest.mark.parametrize("step", [0.01, 0.02, 0.05])
@pytest.mark.parametrize("onset", [0.0, 0.3])
def test_fev1_of_an_exponential_is_the_closed_form(step, onset):
    # The steepest chord is the first one after the start, so time zero is the start.
    t = step * torch.arange(round(8 / step), dtype=torch.float64)
    got = fev1(exponential(t, onset), step).item()
    between = 4.0 / 0.6**2 * math.exp(-1 / 0.6) * step**2 / 8  # of a chord from the curve
    assert got == pytest.approx(4.0 * (1 - math.exp(-1 / 0.6)), abs=between + 1e-12)


def test_a_slow_start_moves_time_zero_by_back_extrapolation():
    # 0.3 L leak out in 0.5 s, then 3 L/s for 1.5 s: the tangent meets zero at 0.5 − 0.1 s.
    t = 0.01 * torch.arange(400, dtype=torch.float64)
    curve = 0.6 * t.clamp_max(0.5) + 3 * (t - 0.5).clamp(0, 1.5)
    assert fev1(curve, 0.01).item() == pytest.approx(0.3 + 3 * 0.9, abs=1e-9)


def test_fev1_takes_many_curves_and_refuses_flat_ones():
    curves = torch.stack([exponential(T), exponential(T, 0.2, 3.0)])
    torch.testing.assert_close(fev1(curves), torch.stack([fev1(curve) for curve in curves]), rtol=1e-12, atol=0)
    torch.testing.assert_close(fev1(curves.reshape(1, 2, 300)), fev1(curves)[None], rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match="without flow has no FEV₁"):
        fev1(torch.zeros(2, 300))
    with pytest.raises(ValueError, match="more than 2 samples"):
        fev1(torch.zeros(2, 2))


def test_a_short_record_keeps_its_last_value():
    short = exponential(0.01 * torch.arange(90, dtype=torch.float64))
    assert fev1(short, 0.01).item() == pytest.approx(short[-1].item())
    resampled = resample(short, 0.01)
    assert torch.equal(resampled[18:], short[-1].expand(282))
    torch.testing.assert_close(resampled[:18], short[:90:5], atol=1e-12, rtol=0)


def test_coughs_of_known_times_are_found():
    awake = T - (T - 0.6).clamp(0, 0.35) - (T - 2.0).clamp(0, 0.5)
    slow = 4 * (1 - torch.exp(-awake / 1.5))
    assert find_coughs(slow[None]) == ((Coughing(0.6, 0.95), Coughing(2.0, 2.5)),)
    assert find_coughs(exponential(T)[None]) == ((),)
    partly = exponential(T - 0.9 * (T - 0.6).clamp(0, 0.35))  # nearly shut: a tenth of the flow goes on
    assert find_coughs(partly[None]) == ((Coughing(0.6, 0.95),),)
    with pytest.raises(ValueError, match=r"expected curves \(N, T\)"):
        find_coughs(T)


def test_wobble_is_no_cough():
    wobbling = exponential(T) + 0.01 * torch.sin(2 * math.pi * 1.2 * T)  # a heart beats
    assert find_coughs(wobbling[None]) == ((),)
    assert flow(wobbling).min() < 0  # though the flow even turns


def test_a_set_keeps_its_parts_together():
    curves = torch.stack([exponential(T)] * 10)
    coughs = tuple((Coughing(float(k), k + 0.5),) if k else () for k in range(10))
    whole = Spirograms(curves, torch.arange(10.0), coughs, "test", "note", curves)
    learn, test = whole.split()
    assert (len(learn), len(test)) == (8, 2)
    assert (test.coughs, test.fev1.tolist(), test.source) == (coughs[8:], [8.0, 9.0], "test")
    assert test.without_coughs is not None
    assert len(test.without_coughs) == 2
    assert whole.coughing.tolist() == [False] + [True] * 9
    assert whole.cough_within(4.0).tolist() == [False, True, True, True] + [False] * 6
    assert torch.equal(whole.as_split().inputs, curves)
    with pytest.raises(ValueError, match="10 curves, 9 values and 10 tuples"):
        Spirograms(curves, torch.zeros(9), coughs, "test")
    with pytest.raises(ValueError, match="between 0 and 1"):
        whole.split(1.0)


# --- the network ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("taps", "bias"), [(200, True), (63, False), (499, True)])
def test_long_convolutions_are_convolutions(taps, bias):
    layer = seeded(lambda: nn.Conv1d(3, 4, taps, bias=bias).double())
    long = LongConv1d.of(layer)
    x = torch.randn(2, 3, 499, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    up = torch.randn(2, 4, 500 - taps, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    grads = []
    for module in (layer, long):
        out = module(x)
        grads.append((out, *torch.autograd.grad((out * up).sum(), [x, *module.parameters()])))
    for expected, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-11, rtol=1e-11)
    assert long.weight is layer.weight


def test_long_convolutions_leave_a_network_what_it_is():
    plain, swift = (seeded(lambda: SpirometryCNN(n_blocks=3, channels=4, kernel=200).double().eval()) for _ in range(2))
    with_long_convolutions(swift)
    assert list(plain.state_dict()) == list(swift.state_dict())
    assert all(type(block.conv) is LongConv1d for block in swift.blocks)
    x = torch.rand(2, 300, dtype=torch.float64)
    torch.testing.assert_close(swift(x), plain(x), atol=1e-12, rtol=1e-12)
    narrow = with_long_convolutions(SpirometryCNN(n_blocks=1, channels=2, kernel=10))
    assert type(narrow.blocks[0].conv) is nn.Conv1d
    with pytest.raises(ValueError, match="stride, dilation and groups 1"):
        LongConv1d.of(nn.Conv1d(1, 1, 60, stride=2))


def test_narrow_kernels_cannot_reach_far():
    network = seeded(lambda: SpirometryCNN(length=60, n_blocks=3, channels=3, kernel=4).double().eval())
    x = torch.rand(1, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    result = SmoothHess(network).attribute(x, 0, sigma=0.3, n_calls=4_000)
    far = (torch.arange(60)[:, None] - torch.arange(60)).abs() > 3 * 3  # blocks · (taps − 1)
    z = (result.unshrunk().hessian[0] / result.stderr()[0])[far]
    assert z.abs().max() < 5
    near = (result.unshrunk().hessian[0] / result.stderr()[0])[~far]
    assert near.abs().max() > 10


def test_recalibration_sets_what_a_plain_forward_sees():
    network = seeded(lambda: SpirometryCNN(length=40, n_blocks=3, channels=3, kernel=5).double())
    curves = torch.rand(64, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before = {key: value.clone() for key, value in network.named_parameters()}
    recalibrate(network, curves, batch_size=64)
    assert not any(module.training for module in network.modules())
    assert all(torch.equal(value, before[key]) for key, value in network.named_parameters())
    assert all(module.momentum == 0.1 for module in network.modules() if isinstance(module, nn.BatchNorm1d))
    seen = {}
    for block in network.blocks:
        block.bn.register_forward_pre_hook(lambda norm, inputs: seen.update({norm: inputs[0]}))
    network(curves)
    n = curves.numel()  # a batch is normalised by its variance, the running one is n/(n − 1) times as large
    for k, block in enumerate(network.blocks):
        close = {"atol": 3 * k / n, "rtol": 3 * k / n + 1e-12}
        torch.testing.assert_close(block.bn.running_mean, seen[block.bn].mean((0, 2)), **close)
        torch.testing.assert_close(block.bn.running_var, seen[block.bn].var((0, 2)), **close)


@pytest.fixture(scope="module")
def spirograms():
    return simulate(240, seed=1)


def test_a_training_is_kept_and_not_repeated(spirograms, tmp_path):
    options = Options(tmp_path, cache=tmp_path / "kept")
    first = fitted(spirograms, 10, 6, options)
    assert not first.network.training
    (path,) = (tmp_path / "kept").iterdir()
    assert path.name == "spirometry-simulated-240-version-2-seed-0-kernel-10-6-steps-seed-0.safetensors"
    assert load_weights(SpirometryCNN(kernel=10), path)["kernel"] == "10"
    again = fitted(spirograms, 10, 6, options)
    test = spirograms.split()[1]
    assert torch.equal(again.network(test.curves), first.network(test.curves))
    for name in ("n_steps", "mse", "train_mse", "uncalibrated_mse", "variance", "machine"):
        assert getattr(again, name) == getattr(first, name), name
    outputs = first.network(test.curves)[:, 0]
    assert first.mse == pytest.approx((outputs - test.fev1).square().mean().item(), rel=1e-5)
    assert first.r2 == pytest.approx(1 - first.mse / test.fev1.var(unbiased=False).item(), rel=1e-5)


def test_a_linear_fev1_is_regressed_exactly(spirograms):
    weights = torch.linspace(-1, 1, 300)
    linear = dataclasses.replace(spirograms, fev1=spirograms.curves @ weights + 0.5)
    assert ridge_regression(linear, penalties=(1e-9,)).mse < 1e-6
    chosen = ridge_regression(spirograms)
    assert chosen.mse < spirograms.fev1.var().item()
    assert chosen.mse == ridge_regression(spirograms, penalties=(chosen.penalty,)).mse
    assert chosen.errors.shape == (48,)


def test_two_trainings_are_kept_separately(spirograms, tmp_path):
    options = Options(tmp_path, cache=tmp_path / "kept")
    first, second = (fitted(spirograms, 10, 2, options, seed=seed) for seed in (0, 1))
    assert (first.seed, second.seed) == (0, 1)
    assert len(list((tmp_path / "kept").iterdir())) == 2
    test = spirograms.split()[1]
    assert not torch.equal(first.network(test.curves), second.network(test.curves))
    errors = squared_errors(first.network, test.curves, test.fev1, batch_size=7)
    assert errors.shape == (48,)
    assert errors.mean().item() == pytest.approx(first.mse, rel=1e-5)


def test_quantities_are_compared_in_pairs():
    fit = small_fitted(simulate(20, seed=1), 10, 4, None, seed=3)
    rows = [
        {"cough share": a, "cough share, no cough": b, "cough share of intervals": 0.1}
        for a, b in ((0.5, 0.2), (0.4, 0.2), (0.6, 0.2), (0.1, 0.3))
    ]
    got = spirometry._compared(rows, fit, "all", "cough share")
    assert (got["kernel"], got["network"], got["curves"]) == (10, 3, 4)
    assert got["difference"] == pytest.approx(0.175)
    assert got["difference, standard error"] == pytest.approx(np.std([0.3, 0.2, 0.4, -0.2], ddof=1) / 2)
    assert (got["larger with cough"], got["larger without"]) == (3, 1)
    assert got["sign test p"] == pytest.approx(0.625)  # 2 (1 + 4) / 16


def test_the_learning_rate_rises_and_falls():
    rates = [recipe(100).rate(step) for step in range(101)]
    assert max(rates) == rates[10] == pytest.approx(1e-3)
    assert rates[100] == pytest.approx(1e-5)


# --- the experiment ------------------------------------------------------------------------------------------------


def test_reach_is_the_mean_distance_in_time():
    one = torch.zeros(300, 300)
    one[10, 50] = one[50, 10] = -2.0  # 40 samples apart; the sign of the sum does not matter
    one[7, 7] = 100.0
    assert spirometry.reach(one) == pytest.approx(2.0)
    one[0, 20] = one[20, 0] = -2.0
    assert spirometry.reach(one) == pytest.approx(1.5)
    assert spirometry.share_beyond(one, 1.5) == pytest.approx(0.5)
    assert spirometry.share_beyond(one, 2.0 - 1e-9) == pytest.approx(0.5)


def test_noise_adds_nothing_to_the_reach_of_two_estimates():
    generator = torch.Generator().manual_seed(0)
    lag = (torch.arange(300)[:, None] - torch.arange(300)).abs()
    truth = torch.exp(-lag.double() / 10)
    reaches = []
    for _ in range(40):
        a, b = (truth + 0.3 * torch.randn(300, 300, generator=generator, dtype=torch.float64) for _ in range(2))
        reaches.append(spirometry.reach(a * b))
    mean, error = torch.tensor(reaches).mean().item(), torch.tensor(reaches).std().item() / math.sqrt(40)
    assert abs(mean - spirometry.reach(truth * truth)) < 4 * error
    assert abs(spirometry.reach(a * a) - spirometry.reach(truth * truth)) > 100 * error  # one estimate squared does


def test_shares_count_the_cough_and_not_the_noise():
    found = {"slopes": [3.0, -1.0] + [0.0] * 28, "row": [9.0, 0.0, 2.0, 1.0] + [0.1] * 26, "row errors": [0.0] * 30}
    found["row errors"][4:] = [0.1] * 26
    got = spirometry._shares(found, [2], "")
    assert got["cough share"] == pytest.approx(4 / 5)
    assert got["strongest at cough"] == 1
    assert got["strength with the first"] == pytest.approx(5)
    assert got["SmoothGrad share of the first"] == 0.75
    assert spirometry._shares(found, [3, 4], ", x")["strongest at cough, x"] == 0
    assert spirometry._shut([Coughing(0.9, 1.6)]) == [1, 2, 3]
    assert spirometry._shut([Coughing(0.0, 0.4)]) == []


def make_small(patch, n_explained=2):
    """The experiment with small networks and few draws."""
    size = spirometry._Size(
        240,
        n_steps=4,
        n_networks=2,
        n_explained=n_explained,
        n_calm=1,
        n_calls=60,
        figure_calls=60,
        n_select=1,
        select_calls=20,
    )
    patch.setattr(spirometry, "QUICK", size)
    patch.setattr(spirometry, "fitted", small_fitted)
    patch.setattr(spirometry, "SCALES", (1.0,))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """The whole experiment, and once more in the same folder."""
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        options = Options(out, quick=True, seed=1)
        first = find("spirometry")(options)
        cells = sorted(path.name for path in (out / "spirometry-quick" / "cells").iterdir())
        patch.setattr(spirometry._Explainer, "_attribute", None)  # nothing is computed again
        second = find("spirometry")(options)
    return first, second, cells


def small_fitted(data, kernel, n_steps, options, *, seed):
    from paper.spirometry_network import Fitted

    network = seeded(lambda: SpirometryCNN(n_blocks=2, channels=2, kernel=kernel), seed)
    recalibrate(network, data.curves[:64])
    return Fitted(network, kernel, n_steps, seed, 0.5, 0.4, 0.6, 1.0)


def test_the_experiment_writes_figures_and_tables(outcome):
    first, _, _ = outcome
    assert sorted(path.name for path in first.files) == [
        "calm.csv",
        "calm.md",
        "claims.csv",
        "claims.md",
        "curves.csv",
        "curves.md",
        "errors.csv",
        "errors.md",
        "intervals.csv",
        "intervals.md",
        "kernels.png",
        "kernels.svg",
        "samples.png",
        "samples.svg",
        "scales.csv",
        "scales.md",
        "sigma.csv",
        "sigma.md",
    ]
    assert all(path.stat().st_size > 40 for path in first.files)
    page = next(path for path in first.files if path.name == "curves.md").read_text()
    assert "python -m paper spirometry --out DIR --device cpu --quick --seed 1" in page
    assert "4 steps" in page
    assert "R² 0.500" in page
    lines = "\n".join(first.lines)
    for word in (
        "data: simulated curves",
        "σ = ",
        "reach (H²-weighted",
        "without the cough",
        "linear regression",
        "first cough all (48 curves",
        "SmoothGrad share of the first, kernel 10, seed 2",
        "other visits",
        "figure, coughing curve",
        "at other σ",
    ):
        assert word in lines


def test_a_second_run_finds_everything_done(outcome):
    first, second, cells = outcome
    assert alike("\n".join(second.lines), "\n".join(first.lines))
    assert sum(name.endswith(".safetensors") for name in cells) == 3


def test_nhanes_is_used_only_when_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("SMOOTHHESS_DATA", raising=False)
    with pytest.raises(ValueError, match="--data DIR"):
        spirometry.run(Options(tmp_path, dataset="nhanes"))
    with pytest.raises(FileNotFoundError, match="SPXRAW_E"):
        spirometry.run(Options(tmp_path, data=tmp_path, dataset="nhanes"))
    assert spirometry._spirograms(Options(tmp_path, dataset="mnist"), 2).source == "simulated curves"


def test_nhanes_curves_go_the_same_way(spirograms, tmp_path, monkeypatch):
    make_small(monkeypatch, n_explained=1)
    records = []
    for seqn, (curve, calm) in enumerate(zip(spirograms.curves, spirograms.without_coughs, strict=True)):
        ten = [np.interp(0.01 * np.arange(1_200), T.numpy(), volumes.numpy()) for volumes in (curve, calm)]
        records += [record(seqn, 1, ten[0], accepted="N", grade="D"), record(seqn, 2, ten[1])]
    (tmp_path / "SPXRAW_E.xpt").write_bytes(xpt(table(records), {**LENGTHS, "SPXRAW": 4_800}))
    outcome = spirometry.run(Options(tmp_path / "out", data=tmp_path, dataset="nhanes", quick=True, seed=1))
    assert outcome.lines[0].startswith("data: NHANES; SPXRAW_E: 240 coughing efforts")
    assert not any("without the cough" in line for line in outcome.lines)
    figure = next(path for path in outcome.files if path.name == "samples.svg")
    assert figure.stat().st_size > 10_000


def test_the_samples_are_chosen_by_rule(spirograms):
    cough, calm = spirometry._samples(spirograms)
    (only,) = spirograms.coughs[cough]
    assert 0.5 <= only.start < 4.0
    assert only.end - only.start > 0.3
    assert all(c.start >= 4.0 for c in spirograms.coughs[calm])
    none = dataclasses.replace(spirograms, coughs=((),) * len(spirograms))
    with pytest.raises(ValueError, match="use more curves"):
        spirometry._samples(none)
