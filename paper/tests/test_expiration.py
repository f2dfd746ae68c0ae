import dataclasses
import math

import pytest
import torch
from scipy.integrate import solve_ivp

from paper import expiration
from paper.expiration import N_RAW, RAW_STEP, Coughs, Effort, Lung, Population, exhale, simulate, simulate_visits
from paper.spirometry import find_coughs, flow


def column(*values):
    return torch.tensor(values, dtype=torch.float64)


def lungs():
    return Lung(column(4.5, 3.0), column(0.36, 0.8), column(2.2, 5.0), column(0.2, 0.6))


def efforts(peak_flow=math.inf, end=math.inf):
    return Effort(column(0.1, 0.0), column(0.05, 0.2), column(peak_flow, peak_flow), column(end, end))


T = RAW_STEP * torch.arange(N_RAW, dtype=torch.float64)


def emptied(lung, clock):
    """V = Σ Vᵢ (1 − exp(−θ/τᵢ))."""
    fast = (1 - lung.slow_share)[:, None] * (1 - torch.exp(-clock / lung.fast[:, None]))
    slow = lung.slow_share[:, None] * (1 - torch.exp(-clock / lung.slow[:, None]))
    return lung.vital_capacity[:, None] * (fast + slow)


def started(effort):
    """θ(t) without coughs: ∫ (1 − exp(−s/rise))."""
    s = (T - effort.onset[:, None]).clamp_min(0)
    return s - effort.rise[:, None] * (1 - torch.exp(-s / effort.rise[:, None]))


def test_without_coughs_the_volume_is_the_closed_form():
    torch.testing.assert_close(exhale(lungs(), efforts()), emptied(lungs(), started(efforts())), atol=1e-12, rtol=0)


def test_a_cough_without_a_burst_costs_time_and_no_volume():
    coughs = Coughs(column(0.7, 3.0)[:, None], column(0.4, 0.65)[:, None], column(0, 0)[:, None], column(0, 0))
    t, start, end = T, coughs.start, coughs.start + coughs.pause
    shut = (t > start) & (t < end)
    late = started(efforts())
    # After the start of the effort has died away the clock runs at one, so the cough takes its own length off it.
    clock = torch.where(t <= start, late, torch.where(shut, late.gather(1, (start / RAW_STEP).round().long()), late))
    volumes = exhale(lungs(), efforts(), coughs)
    for k, (s, e) in enumerate([(70, 110), (300, 365)]):
        torch.testing.assert_close(volumes[k, s:e], volumes[k, s].expand(e - s), atol=1e-12, rtol=0)  # a plateau
        torch.testing.assert_close(volumes[k, :s], emptied(lungs(), clock)[k, :s], atol=1e-12, rtol=0)
    assert torch.all(volumes[:, -1] < exhale(lungs(), efforts())[:, -1])
    lost = exhale(lungs(), efforts())[0, N_RAW - 1 - 40]  # 0.4 s earlier: the second lung's start is over, too
    assert volumes[0, -1].item() == pytest.approx(lost.item(), abs=1e-4)


def right_side(lung, effort, coughs, k):
    """The differential equations of the module, one lung, for scipy."""

    def derivative(t, left):
        taus = [lung.fast[k].item(), lung.slow[k].item()]
        limit = sum(x / tau for x, tau in zip(left, taus, strict=True))
        s = max(t - effort.onset[k].item(), 0.0)
        drive = 1 - math.exp(-s / effort.rise[k].item())
        start, pause = coughs.start[k, 0].item(), coughs.pause[k, 0].item()
        if t > start:
            drive *= 1 - coughs.loss[k].item()
        burst = 0.0
        if t > start + pause:
            rate = coughs.burst[k, 0].item() / expiration.BURST_TIME
            burst = rate * math.exp(-(t - start - pause) / expiration.BURST_TIME)
        opened = 0.0 if start < t < start + pause else 1.0
        total = opened * min(drive * limit, effort.peak_flow[k].item()) + burst
        return [-total * (x / tau) / limit for x, tau in zip(left, taus, strict=True)]

    return derivative


def test_peak_flow_and_bursts_agree_with_an_ode_solver():
    lung, effort = lungs(), efforts(peak_flow=3.0)
    coughs = Coughs(column(0.8, 1.5)[:, None], column(0.3, 0.3)[:, None], column(0.04, 0.03)[:, None], column(0.2, 0.1))
    got = exhale(lung, effort, coughs)
    for k in range(2):
        full = lung.vital_capacity[k].item()
        left = [full * (1 - lung.slow_share[k].item()), full * lung.slow_share[k].item()]
        solved = solve_ivp(
            right_side(lung, effort, coughs, k), (0, 6.0), left, t_eval=T[:600].numpy(), max_step=0.005, rtol=1e-8
        )
        volumes = full - torch.from_numpy(solved.y).sum(0)
        torch.testing.assert_close(got[k, :600], volumes, atol=1e-3, rtol=0)  # the recorder's resolution


def test_effort_limits_the_peak_alone():
    free, weak = exhale(lungs(), efforts()), exhale(lungs(), efforts(peak_flow=3.0))
    assert flow(weak, RAW_STEP).max() <= 3.0 + 1e-9
    assert flow(free, RAW_STEP).max() > 5.0
    # Once the airways limit both, flow at the same volume left is the same: late flow does not depend on effort.
    at = {}
    for name, volume in {"free": free, "weak": weak}.items():
        where = int((volume[0] >= 3.8).nonzero()[0])
        at[name] = flow(volume, RAW_STEP)[0, where].item()
    assert at["free"] == pytest.approx(at["weak"], rel=0.02)


def test_who_gives_up_stays_where_he_is():
    volumes = exhale(lungs(), efforts(end=2.0))
    torch.testing.assert_close(volumes[:, 200:], volumes[:, 200:201].expand(-1, N_RAW - 200))
    torch.testing.assert_close(volumes[:, :201], exhale(lungs(), efforts())[:, :201])


@pytest.fixture(scope="module")
def visits():
    return simulate_visits(300, seed=3)


def test_the_population_is_within_its_bounds(visits):
    assert bool((visits.vital_capacity >= 2.0).all())
    assert bool((visits.vital_capacity <= 6.5).all())
    assert bool((visits.fev1 >= 0.8).all())
    assert bool((visits.fev1 <= 5.0).all())
    ratio = visits.fev1 / visits.fvc
    healthy = ratio.median().item()
    assert 0.74 < healthy < 0.82
    assert 0.05 < (ratio < 0.6).double().mean() < 0.25  # obstruction
    assert ratio.min() > 0.25
    men, women = visits.fev1[visits.male].mean(), visits.fev1[~visits.male].mean()
    assert men - women > 0.6
    assert torch.corrcoef(torch.stack([visits.age, ratio]))[0, 1] < -0.05


def test_curves_are_spirograms(visits):
    for curves in (visits.curves, visits.without_coughs):
        assert curves.shape == (300, 300)
        assert bool((curves.diff(dim=1) >= -1e-12).all())  # nobody breathes in
        assert bool((curves[:, 0] == 0).all())
        assert bool((curves[:, -1] <= visits.vital_capacity + 1e-9).all())


def test_the_label_is_the_best_effort_and_coughs_cost_fev1(visits):
    assert torch.equal(visits.fev1, visits.effort_fev1.max(1).values)
    early = visits.cough_start[:, 0] < 0.8
    own = visits.effort_fev1[:, 0] / visits.fev1
    assert own[early].mean() < 0.9
    assert own[early].mean() < own[~early].mean() - 0.05
    # repeatability: the best two of three efforts within 5 % or 150 mL in most visits
    best = visits.effort_fev1.sort(1, descending=True).values
    close = (best[:, 0] - best[:, 1] < 0.15) | (best[:, 0] - best[:, 1] < 0.05 * best[:, 0])
    assert close.double().mean() > 0.6


def test_coughs_are_found_where_they_are_and_nowhere_else(visits):
    assert not any(find_coughs(visits.without_coughs))
    found = find_coughs(visits.curves)
    n_true = int(visits.cough_start.isfinite().sum())
    hits = 0
    for seen, starts, ends in zip(found, visits.cough_start, visits.cough_end, strict=True):
        assert seen
        for cough in seen:
            near = (starts < cough.end + 0.05) & (ends > cough.start - 0.05)
            assert bool(near.any())  # every break that is seen is a cough
        hits += sum(any(c.overlaps(s, e) for c in seen) for s, e in zip(starts, ends, strict=True) if s < math.inf)
    assert hits > 0.85 * n_true


def test_visits_depend_on_the_seed_alone(visits):
    state = torch.random.get_rng_state()
    again = simulate_visits(5, seed=3)
    assert all(torch.equal(getattr(again, f.name), getattr(visits, f.name)[:5]) for f in dataclasses.fields(again))
    assert not torch.equal(simulate_visits(5, seed=4).curves, again.curves)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_set_to_train_on(visits):
    spirograms = simulate(5, seed=3)
    assert spirograms.curves.dtype == spirograms.fev1.dtype == torch.float32
    torch.testing.assert_close(spirograms.curves, visits.curves[:5].float())
    assert spirograms.coughs == find_coughs(visits.curves[:5])
    assert spirograms.source == "simulated curves"


def test_another_population():
    coughless = dataclasses.replace(Population(), most_coughs=1, fev1=(2.0, 2.5))
    visits = simulate_visits(20, seed=0, population=coughless)
    assert visits.cough_start.shape == (20, 1)
    assert bool(((visits.fev1 >= 2.0) & (visits.fev1 <= 2.5)).all())
    with pytest.raises(ValueError, match="one visit or more"):
        simulate_visits(0)
