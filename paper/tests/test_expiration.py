import dataclasses
import math

import pytest
import torch
from scipy.integrate import solve_ivp

from paper import expiration
from paper.expiration import N_RAW, RAW_STEP, Coughs, Effort, Lung, Population, exhale, simulate, simulate_visits
from paper.spirometry import STEP, find_coughs, flow


def column(*values):
    return torch.tensor(values, dtype=torch.float64)


def lungs():
    return Lung(column(4.5, 3.0), column(0.36, 0.8), column(2.2, 5.0), column(0.2, 0.6))


def efforts(drive=math.inf, end=math.inf):
    return Effort(column(0.1, 0.0), column(0.05, 0.2), column(drive, drive), column(end, end))


def coughs(start, pause, burst=(0.0, 0.0), inspiration=(0.0, 0.0), inhaled=(0.0, 0.0), loss=(0.0, 0.0), stop=None):
    """One cough of each lung."""
    each = (column(*x)[:, None] for x in (start, pause, burst, inspiration, inhaled))
    return Coughs(*each, loss=column(*loss), stop=column(*(stop or (math.inf, math.inf))))


T = RAW_STEP * torch.arange(N_RAW, dtype=torch.float64)


def emptied(lung, clock):
    """V = Σ Vᵢ (1 − exp(−θ/τᵢ))."""
    fast = (1 - lung.slow_share)[:, None] * (1 - torch.exp(-clock / lung.fast[:, None]))
    slow = lung.slow_share[:, None] * (1 - torch.exp(-clock / lung.slow[:, None]))
    return lung.vital_capacity[:, None] * (fast + slow)


def since_onset(effort):
    """The time θ in which the airways limited the flow, without drive and coughs."""
    return (T - effort.onset[:, None]).clamp_min(0)


def test_without_coughs_the_volume_is_the_closed_form():
    torch.testing.assert_close(exhale(lungs(), efforts()), emptied(lungs(), since_onset(efforts())), atol=1e-12, rtol=0)


def test_a_driven_flow_is_the_closed_form():
    # One compartment, whole strength at once: dR/dt = −Q (w + (1 − w) R/V) until the airways limit the flow, then −R/τ.
    V, tau, Q, w = 4.0, 0.5, 3.0, expiration.WEAKEST
    one = column(1.0)
    lung, effort = Lung(V * one, tau * one, one, 0 * one), Effort(0 * one, 1e-9 * one, Q * one, math.inf * one)
    k = Q * (1 - w) / V  # 1/s
    left = (V + Q * w / k) * torch.exp(-k * T) - Q * w / k
    crossing = Q * w / (1 / tau - k)  # L, where both flows are equal
    when = math.log((V + Q * w / k) / (crossing + Q * w / k)) / k
    left = torch.where(when > T, left, crossing * torch.exp(-(T - when) / tau))
    torch.testing.assert_close(exhale(lung, effort)[0], V - left, atol=1e-3, rtol=0)


def test_a_cough_without_a_burst_costs_time_and_no_volume():
    cough = coughs((0.7, 3.0), (0.4, 0.65))
    clock = since_onset(efforts()) - torch.minimum((T - cough.start).clamp_min(0), cough.pause)
    volumes = exhale(lungs(), efforts(), cough)
    torch.testing.assert_close(volumes, emptied(lungs(), clock), atol=1e-12, rtol=0)
    for k, (s, e) in enumerate([(70, 110), (300, 365)]):
        torch.testing.assert_close(volumes[k, s:e], volumes[k, s].expand(e - s), atol=1e-12, rtol=0)  # a plateau


def test_an_inspiration_returns_its_volume():
    cough = coughs((1.0, 1.0), (0.8, 0.8), inspiration=(0.5, 0.5), inhaled=(0.4, 0.3))
    volumes = exhale(lungs(), efforts(), cough)
    torch.testing.assert_close(volumes[:, 100] - volumes[:, 150], column(0.4, 0.3), atol=1e-12, rtol=0)
    assert torch.all(volumes[:, 100:151].diff(dim=1) < 0)
    torch.testing.assert_close(volumes[:, 150:181], volumes[:, 150:151].expand(-1, 31), atol=1e-12, rtol=0)
    # The compartments are filled in proportion to what they had expelled, then emptied by the airways again.
    lung = lungs()
    full = torch.stack([1 - lung.slow_share, lung.slow_share], 1) * lung.vital_capacity[:, None]
    taus = torch.stack([lung.fast, lung.slow], 1)
    expelled = full * (1 - torch.exp(-column(0.9, 1.0)[:, None] / taus))
    left = full - expelled * (1 - column(0.4, 0.3) / expelled.sum(1))[:, None]
    later = (left[:, None] * torch.exp(-(T[180:] - 1.8)[:, None] / taus[:, None])).sum(2)
    torch.testing.assert_close(volumes[:, 180:], lung.vital_capacity[:, None] - later, atol=1e-12, rtol=0)


def test_no_more_is_inhaled_than_was_expelled():
    cough = coughs((0.2, 0.1), (0.6, 0.6), inspiration=(0.3, 0.3), inhaled=(50.0, 50.0))
    volumes = exhale(lungs(), efforts(), cough)
    assert torch.all(volumes >= 0)
    assert torch.all(volumes <= lungs().vital_capacity[:, None])
    assert torch.all(volumes[:, 50] < 1e-3)


def test_an_effort_stops_after_its_cough():
    stopped = exhale(lungs(), efforts(), coughs((0.7, 3.0), (0.4, 0.6), stop=(1.5, 4.0)))
    lasting = exhale(lungs(), efforts(), coughs((0.7, 3.0), (0.4, 0.6)))
    for k, end in enumerate((150, 400)):
        torch.testing.assert_close(stopped[k, : end + 1], lasting[k, : end + 1], atol=1e-12, rtol=0)
        torch.testing.assert_close(stopped[k, end:], stopped[k, end].expand(N_RAW - end), atol=1e-12, rtol=0)
    absent = coughs((math.inf, math.inf), (0.4, 0.6), loss=(0.5, 0.5), stop=(1.5, 4.0))
    torch.testing.assert_close(exhale(lungs(), efforts(), absent), exhale(lungs(), efforts()), atol=1e-12, rtol=0)


def right_side(lung, effort, cough, k):
    """The differential equations of the module, one lung, for scipy."""
    full = [
        lung.vital_capacity[k].item() * share for share in (1 - lung.slow_share[k].item(), lung.slow_share[k].item())
    ]
    taus = [lung.fast[k].item(), lung.slow[k].item()]
    start, pause = cough.start[k, 0].item(), cough.pause[k, 0].item()
    inspiration, inhaled = cough.inspiration[k, 0].item(), cough.inhaled[k, 0].item()

    def derivative(t, left):
        limit = sum(x / tau for x, tau in zip(left, taus, strict=True))
        s = max(t - effort.onset[k].item(), 0.0)
        driven = effort.drive[k].item() * (1 - math.exp(-s / effort.rise[k].item()))
        driven *= expiration.WEAKEST + (1 - expiration.WEAKEST) * sum(left) / sum(full)
        if t > start:
            driven *= 1 - cough.loss[k].item()
        burst = 0.0
        if t > start + pause:
            rate = cough.burst[k, 0].item() / expiration.BURST_TIME
            burst = rate * math.exp(-(t - start - pause) / expiration.BURST_TIME)
        if start < t < start + inspiration:
            expelled = [x - y for x, y in zip(full, left, strict=True)]
            return [inhaled / inspiration * x / sum(expelled) for x in expelled]
        opened = 0.0 if start < t < start + pause else 1.0
        total = opened * min(driven, limit) + burst
        return [-total * (x / tau) / limit for x, tau in zip(left, taus, strict=True)]

    return derivative, full


def test_drive_coughs_and_inspirations_agree_with_an_ode_solver():
    lung, effort = lungs(), efforts(drive=5.0)
    cough = coughs(
        (0.8, 1.5), (0.7, 0.5), burst=(0.04, 0.03), inspiration=(0.4, 0.3), inhaled=(0.5, 0.2), loss=(0.6, 0.3)
    )
    got = exhale(lung, effort, cough)
    for k in range(2):
        derivative, full = right_side(lung, effort, cough, k)
        solved = solve_ivp(derivative, (0, 6.0), full, t_eval=T[:600].numpy(), max_step=0.005, rtol=1e-8)
        volumes = lung.vital_capacity[k] - torch.from_numpy(solved.y).sum(0)
        torch.testing.assert_close(got[k, :600], volumes, atol=1e-3, rtol=0)  # the recorder's resolution


def test_flow_is_limited_by_the_airways_and_by_the_drive():
    free, weak = exhale(lungs(), efforts()), exhale(lungs(), efforts(drive=3.0))
    assert flow(weak, RAW_STEP).max() <= 3.0 + 1e-9
    assert flow(free, RAW_STEP).max() > 5.0
    single = dataclasses.replace(lungs(), slow_share=column(0, 0))
    for drive in (1.0, 3.0, 10.0):
        volumes = exhale(single, efforts(drive=drive))
        middle = (volumes[:, 1:] + volumes[:, :-1]) / 2
        limit = (single.vital_capacity[:, None] - middle) / single.fast[:, None]
        assert torch.all(flow(volumes, RAW_STEP) <= limit * (1 + 1e-3) + 1e-9)


def test_late_flow_does_not_depend_on_the_effort():
    # Once the airways limit both efforts, the flow of one compartment at the same volume is the same: the descending
    # limbs of the flow-volume curves coincide.
    single = dataclasses.replace(lungs(), slow_share=column(0, 0))
    free, weak = exhale(single, efforts()), exhale(single, efforts(drive=6.0))
    at = []
    for volumes in (free, weak):
        where = int((volumes[0] >= 3.9).nonzero()[0])
        middle = (volumes[0, where] + volumes[0, where + 1]) / 2
        at.append((flow(volumes, RAW_STEP)[0, where] / (4.5 - middle)).item())
    assert at[0] == pytest.approx(1 / 0.36, rel=1e-3)
    assert at[1] == pytest.approx(1 / 0.36, rel=1e-3)


def test_a_loss_of_drive_slows_the_start_only():
    cough = coughs((0.3, 0.3), (0.3, 0.3), loss=(0.8, 0.8))
    weak, strong = (
        exhale(lungs(), efforts(drive=6.0), replaced) for replaced in (cough, coughs((0.3, 0.3), (0.3, 0.3)))
    )
    torch.testing.assert_close(weak[:, :60], strong[:, :60], atol=1e-12, rtol=0)
    assert weak[0, 70] < strong[0, 70] - 0.3  # the flow of the second lung is limited by its airways
    assert torch.all((strong - weak)[:, -1] < 0.05)  # all of the vital capacity is expelled nevertheless


def test_an_effort_that_ends_stays_at_its_volume():
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
        assert bool((curves[:, 0] == 0).all())
        assert bool((curves <= visits.vital_capacity[:, None] + 1e-9).all())
        assert bool((curves >= 0).all())
    assert bool((visits.without_coughs.diff(dim=1) >= -1e-12).all())  # only coughs begin with an inspiration
    inspired = (visits.curves.diff(dim=1) < -0.01).any(1).double().mean().item()
    assert 0.2 < inspired < 0.6


def test_maximal_efforts_have_normal_peak_flows(visits):
    healthy = visits.fev1 / visits.fvc > 0.75
    peaks = flow(visits.without_coughs).max(1).values / visits.vital_capacity
    strong = peaks[healthy].quantile(0.75).item()  # over 50 ms; about 0.375 of the efforts are submaximal
    assert 1.6 < strong < 2.2


def test_a_curve_is_the_same_before_its_cough(visits):
    before = STEP * torch.arange(300) <= visits.cough_start[:, :1]
    differ = (visits.curves - visits.without_coughs).abs()
    assert differ[before].max() < 1e-9
    assert bool((differ.max(1).values > 0.005).all())


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
