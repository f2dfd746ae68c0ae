"""Forced expiration: a lung of two compartments, an effort, and coughs → the volume that a spirometer records.

The flow is the smaller of two (Mead et al. 1967; Wilson, Hyatt & Rodarte, Comprehensive Physiology 1986): the flow that
the muscles drive, which depends on the effort, and the flow at which the airways collapse, which depends on the volume
left in the lung only. With R = volume left in the compartments, V = their volumes at full inspiration,

    flow = g(t) · min(a(t) · Q · s(ΣR/ΣV), Σ R_i/τ_i) + b(t)        dR_i/dt = − flow · (R_i/τ_i) / Σ R_j/τ_j

a(t) = 1 − exp(−(t − onset)/rise) is the start of the muscles; after the end of the effort there is no flow. Q is the
flow that they would drive through open airways at full inspiration, and s(x) = w + (1 − w)·x their strength at the
relative volume x: muscles weaken as they shorten. Fast airways give a straight descending flow–volume curve, slow ones
the tail that grows with obstruction. The late part of a maximal effort is limited by the airways and does not depend
on Q; a weak effort reaches the same descending curve later, at a lower volume. So the state of the airways can be read
from the part of the curve where they limit the flow, wherever that part is.

A cough interrupts the flow. It may begin with an inspiration, at a constant rate, which fills the compartments in
proportion to what they have expelled; then the glottis is closed (g = 0); when it opens, the collapsing airways expel a
burst b(t). After the first cough the muscles may drive less flow, and after the last one the effort may stop.
Substituting θ' = flow / Σ R_j/τ_j gives R_i = R_i(0)·exp(−θ/τ_i) while the flow is limited by the airways: a cough
without an inspiration stops the internal time θ of the lung, and costs time, not volume.

Sources of the numbers of `Population`. They were chosen from physiology. Before they were fixed, only errors of
predicted FEV₁ were computed (linear regression, boosted trees, the network), and no explanation of a prediction.

- Vital capacity: the linear reference equations of the European Coal and Steel Community (Quanjer et al. 1993) for
  age and height, men and women, with their residual scatter; heights of a northern European population; ages 40 to 69
  as in UK Biobank. Kept between 2 and 6.5 L.
- FEV₁/FVC: time constants and slow share are set so that healthy lungs give 0.78 ± 0.05, mild obstruction 0.6 to 0.7
  and severe about 0.4, the range of clinical practice; one visitor in four has some obstruction. FEV₁ is kept between
  0.8 and 5 L.
- Start of the effort: the 26 test waveforms of the American Thoracic Society reach peak flow 60 to 270 ms after they
  start, with extrapolated volumes of 1 to 6 % of FVC; a slow start takes two to four times as long. The recorder
  stores up to a quarter of a second before the start (assumption; ATS/ERS 2005 requires that the start is stored).
- Peak flow: healthy adults of these ages reach about 1.9 times the vital capacity each second (8.5 L/s for 4.5 L).
- Strength: the largest expiratory pressure falls with volume (Rahn et al. 1946; Cook et al. 1964); a straight line to
  0.4 of that at full inspiration is an assumption.
- Submaximal efforts: 37.5 % of the efforts in UK Biobank are submaximal (Hill et al. 2023, who compare FVC). How much
  of the flow is driven in them is an assumption.
- Repeatability: best and second-best FVC and FEV₁ of a visit within 150 mL or 5 %, so a few per cent between efforts.
- Coughs: the glottis is closed for about 0.2 s or more before each cough (Leith et al. 1986); coughs come in runs, of 6
  or 7 closures in patients (Whittenberger & Mead 1952) and of one or two usually. The burst lasts some 50 ms and
  drives out a few hundredths of a litre, about the volume of the central airways. A cough begins with an inspiration of
  variable depth (Leith et al. 1986), or, as an expiration reflex, without one (Widdicombe & Fontana 2006); their
  shares during a forced expiration are an assumption.
- Time of the first cough: ATS/ERS 2005 and 2019 reject an effort for a cough in its first second, or a later one that
  disturbs the measurement, so most of the rejected efforts have one in the first second; the distribution is an
  assumption. So are the loss of drive after a cough and the share of efforts that stop after one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Generator, Tensor

from paper.spirometry import Spirograms, fev1, find_coughs, resample

__all__ = ["Coughs", "Effort", "Lung", "Population", "Visits", "exhale", "simulate", "simulate_visits"]

VERSION = 2  # of the simulated curves
RAW_STEP = 0.01  # s, the sampling of the spirometer
N_RAW = 1_500
BURST_TIME = 0.05  # s, in which the burst of a cough dies away
MOST_BURST = 0.05  # share of the remaining volume that a burst may expel within 10 ms
WEAKEST = 0.4  # w: strength of the expiratory muscles at the smallest volume, relative to full inspiration
MOST_REFILL = 0.9  # share of the expelled volume that an inspiration may return within 10 ms
CHUNK = 256  # visits simulated at a time; results for a seed depend on it, so it never depends on memory or machine


@dataclass(frozen=True)
class Lung:
    """N lungs: their volumes and time constants, each (N,)."""

    vital_capacity: Tensor  # L
    fast: Tensor  # s, time constant of the fast compartment
    slow: Tensor  # s
    slow_share: Tensor  # of the vital capacity


@dataclass(frozen=True)
class Effort:
    """N efforts, each (N,)."""

    onset: Tensor  # s, when the breath starts
    rise: Tensor  # s, time constant of the muscles' start
    drive: Tensor  # L/s, Q: flow driven through open airways at full inspiration; inf: only the airways limit the flow
    end: Tensor  # s, end of the effort; inf: it lasts to the end of the record


@dataclass(frozen=True)
class Coughs:
    """Up to k coughs in each of N efforts, each (N, k) unless stated otherwise; `start` is inf where there is none."""

    start: Tensor  # s, when the flow is interrupted
    pause: Tensor  # s, how long: an inspiration, then a closed glottis
    burst: Tensor  # L, driven out when it opens
    inspiration: Tensor  # s, the part of the pause in which the person breathes in
    inhaled: Tensor  # L, during the inspiration
    loss: Tensor  # (N,) share of the drive that is lost after the first cough
    stop: Tensor  # (N,) s, when the effort ends because of the cough; inf: it does not


def exhale(lung: Lung, effort: Effort, coughs: Coughs | None = None, *, flutter: Tensor | None = None) -> Tensor:
    """Volumes at 0, 10 ms, 20 ms, …, (N, 1500). `flutter` (N, 1500), if given, multiplies the flow.

    A step is exact in the start and end of the effort, in the glottis and in the inspired volume; drive and burst act
    on the volume in its middle.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> lung = Lung(4 * one, 0.5 * one, 2 * one, 0 * one)
    >>> effort = Effort(0 * one, 1e-6 * one, math.inf * one, math.inf * one)
    >>> volume = exhale(lung, effort)  # one compartment at once: 4 (1 − exp(−t/0.5))
    >>> volume[0, [0, 50, 100]].round(decimals=4)
    tensor([0.0000, 2.5285, 3.4587], dtype=torch.float64)
    """
    like = lung.vital_capacity
    edges = RAW_STEP * torch.arange(N_RAW, dtype=like.dtype, device=like.device)
    opening = _share_of_step(edges, effort.onset, effort.end)  # (N, 1499)
    driven = _activation(edges, effort) * effort.drive[:, None]  # (N, 1499), L/s
    burst, inhaled = torch.zeros_like(opening), torch.zeros_like(opening)
    if coughs is not None:
        some = coughs.start.isfinite().any(1)
        shut, burst[some], inhaled[some] = _interruptions(edges, coughs, some)
        opening[some] = (_share_of_step(edges, effort.onset, effort.end.minimum(coughs.stop))[some] - shut).clamp_min(0)
        driven = driven * torch.where(edges[1:] > coughs.start[:, :1], 1 - coughs.loss[:, None], 1.0)
    if flutter is not None:
        opening, burst = opening * flutter[:, :-1], burst * flutter[:, :-1]

    full = torch.stack([1 - lung.slow_share, lung.slow_share], 1) * lung.vital_capacity[:, None]  # (N, 2) L
    taus = torch.stack([lung.fast, lung.slow], 1)
    left, volumes = full, [torch.zeros_like(like)]
    for j in range(N_RAW - 1):
        push = torch.minimum(burst[:, j], MOST_BURST * left.sum(1))
        half = left
        for share in (0.5, 1.0):  # to the middle of the step, then the full step with the state in the middle
            limit = (half / taus).sum(1)  # L/s
            strength = WEAKEST + (1 - WEAKEST) * half.sum(1) / lung.vital_capacity
            flowing = opening[:, j] * torch.minimum(driven[:, j] * strength, limit)
            clock = (RAW_STEP * flowing + push) / limit
            half = left * torch.exp(-share * clock[:, None] / taus)
        left = half
        if bool(inhaled[:, j].any()):
            expelled = full - left
            total = expelled.sum(1)
            back = torch.minimum(inhaled[:, j], MOST_REFILL * total) / total.clamp_min(1e-12)
            left = left + back[:, None] * expelled
        volumes.append(lung.vital_capacity - left.sum(1))
    return torch.stack(volumes, 1)


def _share_of_step(edges: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """The share of each step between `start` and `end`, (N, T − 1)."""
    inside = torch.minimum(edges, end[:, None]).clamp_min(start[:, None])
    return inside.diff(dim=1) / RAW_STEP


def _activation(edges: Tensor, effort: Effort) -> Tensor:
    """a(t) in the middle of each step, (N, T − 1), at least 1e-9: the drive may be inf."""
    since = (edges[:-1] + RAW_STEP / 2 - effort.onset[:, None]).clamp_min(0)
    return -torch.expm1(-since / effort.rise[:, None]).clamp_max(-1e-9)


def _interruptions(t: Tensor, coughs: Coughs, which: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of the efforts `which` and each step: the share in which the flow is interrupted, the litres of the burst, and
    the litres inhaled, each (n, T − 1)."""
    start, pause, burst = (x[which, :, None] for x in (coughs.start, coughs.pause, coughs.burst))
    inspiration, inhaled = (x[which, :, None] for x in (coughs.inspiration, coughs.inhaled))
    shut = torch.minimum((t - start).clamp_min(0), pause).sum(1)
    since = (t - start - pause).clamp_min(0)
    driven = -(burst * torch.expm1(-since / BURST_TIME)).sum(1)
    done = ((t - start) / inspiration.clamp_min(1e-9)).clamp(0, 1)
    return shut.diff(dim=1) / RAW_STEP, driven.diff(dim=1), (inhaled * done).sum(1).diff(dim=1)


@dataclass(frozen=True)
class Population:
    """Distributions of the participants and efforts of `simulate_visits`. (low, high) are bounds, (mean, sd) normal,
    (median, spread) of a lognormal; see the module for the sources of the numbers."""

    age: tuple[float, float] = (40.0, 69.0)  # years, uniform
    share_of_men: float = 0.46
    height_of_men: tuple[float, float] = (1.76, 0.068)  # m, normal
    height_of_women: tuple[float, float] = (1.63, 0.063)
    vital_capacity: tuple[float, float] = (2.0, 6.5)  # L, bounds
    fev1: tuple[float, float] = (0.8, 5.0)  # L, bounds
    share_obstructed: float = 0.25
    fast: tuple[float, float] = (0.36, 0.16)  # s, lognormal; of a healthy lung at 55 years
    slow: tuple[float, float] = (2.2, 0.2)  # s, lognormal
    slow_share: tuple[float, float] = (0.22, 0.04)  # normal
    onset: tuple[float, float] = (0.0, 0.25)  # s, uniform
    rise: tuple[float, float] = (0.05, 0.3)  # s, lognormal
    share_slow_start: float = 0.1
    drive: tuple[float, float] = (3.5, 0.2)  # L/s for each litre of vital capacity, lognormal
    missing: tuple[float, float] = (0.02, 0.04)  # missing share of a full breath, half normal: best, other efforts
    share_submaximal: float = 0.375  # of further efforts, and of coughing ones
    submaximal: tuple[float, float] = (0.15, 0.7)  # of the drive, uniform
    share_early_end: float = 0.2
    early_end: tuple[float, float] = (4.0, 10.0)  # s, uniform
    first_cough: tuple[float, float] = (0.8, 0.9)  # s after the start, lognormal
    most_coughs: int = 6
    share_of_another: float = 0.5  # after each cough
    pause: tuple[float, float] = (0.28, 0.45)  # s, lognormal: the closed glottis
    between: tuple[float, float] = (0.15, 0.6)  # s from a burst to the next pause, uniform
    burst: tuple[float, float] = (0.02, 0.08)  # L, uniform
    share_inhaling: float = 0.25  # of coughs
    inhaled: tuple[float, float] = (0.1, 0.8)  # L, uniform
    inspiration: tuple[float, float] = (0.5, 0.3)  # s, lognormal
    loss: tuple[float, float] = (0.0, 0.7)  # of the drive after a cough, uniform
    share_stopping: float = 0.3  # of coughing efforts, after the last cough
    stopping: tuple[float, float] = (0.0, 1.5)  # s after the last cough, uniform
    flutter: float = 0.03  # relative wobble of the flow over some 60 ms
    resolution: float = 0.001  # L


@dataclass(frozen=True)
class Visits:
    """n visits of k efforts each; effort 0 is the one with coughs. (n,) unless stated otherwise."""

    curves: Tensor  # (n, 300) L, of the coughing effort
    fev1: Tensor  # L, the best of the visit: the label
    effort_fev1: Tensor  # (n, k) L
    fvc: Tensor  # L, the most exhaled in any effort
    cough_start: Tensor  # (n, c) s, inf where there is none
    cough_end: Tensor  # (n, c) s
    vital_capacity: Tensor  # L, of the lung
    age: Tensor
    height: Tensor
    male: Tensor
    without_coughs: Tensor  # (n, 300) L, the same effort without the coughs and what follows from them

    def __len__(self) -> int:
        return len(self.curves)


def simulate(n: int, seed: int = 0, population: Population | None = None) -> Spirograms:
    """n visits as a set to train on: coughing curves, float32, with the FEV₁ of the best effort.

    The coughs are those that `find_coughs` detects, as in recorded curves; visits without a detected cough are
    left out, since a spirometer would not have marked them.

    >>> spirograms = simulate(3)
    >>> tuple(spirograms.curves.shape), bool(spirograms.coughing.all()), spirograms.source
    ((3, 300), True, 'simulated curves')
    """
    visits = simulate_visits(n, seed, population)
    seen = find_coughs(visits.curves)
    note = f"{n} simulated visits, seed {seed}"
    without = visits.without_coughs.float()
    return Spirograms(visits.curves.float(), visits.fev1.float(), seen, "simulated curves", note, without, VERSION)


def simulate_visits(n: int, seed: int = 0, population: Population | None = None) -> Visits:
    """n visits with a detectable cough, float64; the first n of a longer run are those of a shorter one.

    >>> visits = simulate_visits(3, seed=1)
    >>> bool((visits.fev1 == visits.effort_fev1.max(1).values).all()), bool((visits.cough_start[:, 0] < 15).all())
    (True, True)
    """
    if n < 1:
        raise ValueError(f"expected one visit or more, got {n}.")
    population = population or Population()
    parts: list[Visits] = []
    chunk = 0
    while sum(map(len, parts)) < n:
        generator = Generator().manual_seed(seed * 1_000_003 + chunk)
        drawn = _draw(CHUNK, generator, population)
        parts.append(_where(drawn, _kept(drawn, population)))
        chunk += 1
        if chunk > 10 and sum(map(len, parts)) < chunk * CHUNK / 100:
            raise ValueError("fewer than one visit in a hundred fits the bounds of this population; widen them.")
    stacked = _stack(parts)
    return _where(stacked, torch.arange(len(stacked)) < n)


def _stack(records: Sequence[Any]) -> Any:
    """Records of the same kind, one after the other."""
    names = [field.name for field in fields(records[0])]
    return type(records[0])(**{name: torch.cat([getattr(record, name) for record in records]) for name in names})


def _none_of(coughs: Coughs) -> Coughs:
    return replace(coughs, start=torch.full_like(coughs.start, math.inf))


def _where(visits: Visits, mask: Tensor) -> Visits:
    return Visits(**{field.name: getattr(visits, field.name)[mask] for field in fields(Visits)})


def _kept(visits: Visits, population: Population) -> Tensor:
    """Whether the visit is within the bounds, and a spirometer would have detected the cough."""
    kept = torch.tensor([bool(found) for found in find_coughs(visits.curves)])
    for values, (low, high) in ((visits.fev1, population.fev1), (visits.vital_capacity, population.vital_capacity)):
        kept &= (values >= low) & (values <= high)
    return kept


class _Chance:
    """n numbers at a time from one generator."""

    def __init__(self, n: int, generator: Generator) -> None:
        self.n, self.generator = n, generator

    def uniform(self, bounds: tuple[float, float] = (0.0, 1.0), *shape: int) -> Tensor:
        low, high = bounds
        drawn = torch.rand(self.n, *shape, generator=self.generator, dtype=torch.float64)
        return low + (high - low) * drawn

    def normal(self, mean_sd: tuple[float, float] = (0.0, 1.0), *shape: int) -> Tensor:
        mean, sd = mean_sd
        return mean + sd * torch.randn(self.n, *shape, generator=self.generator, dtype=torch.float64)

    def lognormal(self, median_spread: tuple[float, float], *shape: int) -> Tensor:
        median, spread = median_spread
        return self.normal((math.log(median), spread), *shape).exp()

    def happens(self, share: float, *shape: int) -> Tensor:
        return self.uniform((0.0, 1.0), *shape) < share


def _draw(n: int, generator: Generator, p: Population, n_efforts: int = 3) -> Visits:
    chance = _Chance(n, generator)
    age, male, height, lung = _people(chance, p)
    blown = [_effort(chance, p, lung, best=k == 1) for k in range(n_efforts)]
    cough = _coughs(chance, p, blown[0][1].onset)
    flutter = [_flutter(chance, p) for _ in range(n_efforts)]
    # Effort 0 has the coughs; it is simulated once more without them, and all are simulated in one batch.
    order, no_cough = [0, *range(1, n_efforts), 0], _none_of(cough)
    volumes = exhale(
        _stack([blown[k][0] for k in order]),
        _stack([blown[k][1] for k in order]),
        _stack([cough, *[no_cough] * n_efforts]),
        flutter=torch.cat([flutter[k] for k in order]),
    )
    volumes = ((volumes / p.resolution).round() * p.resolution).reshape(n_efforts + 1, n, -1)
    each = fev1(volumes[:-1], RAW_STEP).T
    return Visits(
        curves=resample(volumes[0], RAW_STEP),
        fev1=each.max(1).values,
        effort_fev1=each,
        fvc=volumes[:-1, :, -1].max(0).values,
        cough_start=cough.start,
        cough_end=cough.start + cough.pause,
        vital_capacity=lung.vital_capacity,
        age=age,
        height=height,
        male=male,
        without_coughs=resample(volumes[-1], RAW_STEP),
    )


def _people(chance: _Chance, p: Population) -> tuple[Tensor, Tensor, Tensor, Lung]:
    age, male = chance.uniform(p.age), chance.happens(p.share_of_men)
    height = torch.where(male, chance.normal(p.height_of_men), chance.normal(p.height_of_women))
    expected = torch.where(male, 5.76 * height - 0.026 * age - 4.34, 4.43 * height - 0.026 * age - 2.89)
    capacity = expected + chance.normal() * torch.where(male, 0.61, 0.43)
    severity = chance.uniform() * chance.happens(p.share_obstructed)  # 0: healthy, 1: severe
    older = 1 + 0.006 * (age - 55)  # FEV₁/FVC falls with age
    lung = Lung(
        vital_capacity=(capacity * (1 - 0.15 * severity)).clamp_min(0.5),  # bounds: see _kept
        fast=chance.lognormal(p.fast) * older * (1 + 1.3 * severity),
        slow=chance.lognormal(p.slow) * (1 + 1.5 * severity),
        slow_share=(chance.normal(p.slow_share) + 0.4 * severity).clamp(0.02, 0.7),
    )
    return age, male, height, lung


def _effort(chance: _Chance, p: Population, lung: Lung, *, best: bool) -> tuple[Lung, Effort]:
    """The lung after inspiration, and the effort; the `best` is never submaximal."""
    missing = chance.normal().abs() * (p.missing[0] if best else p.missing[1])
    weak = chance.happens(0.0 if best else p.share_submaximal)
    vigour = torch.where(weak, chance.uniform(p.submaximal), 1.0)
    hesitant = chance.happens(0.0 if best else p.share_slow_start)
    stops = chance.happens(0.0 if best else p.share_early_end)
    end = torch.where(stops, chance.uniform(p.early_end), math.inf)
    effort = Effort(
        onset=chance.uniform(p.onset),
        rise=chance.lognormal(p.rise) * torch.where(hesitant, chance.uniform((2.0, 4.0)), 1.0),
        drive=chance.lognormal(p.drive) * lung.vital_capacity * vigour,
        end=end,
    )
    filled = lung.vital_capacity * (1 - missing).clamp_min(0.7)
    return replace(lung, vital_capacity=filled), effort


def _coughs(chance: _Chance, p: Population, onset: Tensor) -> Coughs:
    k = p.most_coughs
    inhales = chance.happens(p.share_inhaling, k).double()
    inspiration = inhales * chance.lognormal(p.inspiration, k).clamp(0.2, 1.0)
    pause = inspiration + chance.lognormal(p.pause, k).clamp(0.1, 1.5)
    first = onset[:, None] + chance.lognormal(p.first_cough, 1).clamp(0.2, 8.0)
    ends = (torch.cat([first, chance.uniform(p.between, k - 1)], 1) + pause).cumsum(1)
    another = torch.cat([torch.ones(chance.n, 1, dtype=torch.bool), chance.happens(p.share_of_another, k - 1)], 1)
    some = another.cummin(1).values
    last = torch.where(some, ends, 0.0).max(1).values
    stops = chance.happens(p.share_stopping)
    return Coughs(
        start=torch.where(some, ends - pause, math.inf),
        pause=pause,
        burst=chance.uniform(p.burst, k),
        inspiration=inspiration,
        inhaled=inhales * chance.uniform(p.inhaled, k),
        loss=chance.uniform(p.loss),
        stop=torch.where(stops, last + chance.uniform(p.stopping), math.inf),
    )


def _flutter(chance: _Chance, p: Population) -> Tensor:
    """1 + a fluctuation with a correlation time of some 60 ms, (n, 1500)."""
    n_kernel = 7
    white = chance.normal((0.0, 1.0), N_RAW + n_kernel - 1)
    smooth = white.unfold(1, n_kernel, 1).mean(2) * math.sqrt(n_kernel)
    return (1 + p.flutter * smooth).clamp_min(0)
