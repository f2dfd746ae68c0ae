"""Spirograms: exhaled volume against time, measurements on them, and a set of them for training.

The paper's network takes a curve of 300 volumes, 15 s at 50 ms, and predicts the FEV₁ of the visit, the volume of
the first second of the best effort. Curves come from `paper.expiration`, which simulates them, or from
`paper.nhanes`. Volumes are in litres, times in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paper.datasets import Split

__all__ = ["N_SAMPLES", "STEP", "Coughing", "Spirograms", "fev1", "find_coughs", "flow", "resample"]

STEP = 0.05  # s between the samples of the network's input
N_SAMPLES = 300
SLOPE_WINDOW = 0.08  # s, over which ATS/ERS 2005 averages the steepest slope
BEGUN = 0.25  # share of the peak flow that must be reached before breaks are searched for
RECOVERY = 2.0  # a cough ends where the flow is this many times its minimum,
REBOUND = 0.3  # and has risen by this much, L/s: three times the flow resolution required by ATS/ERS
STILL = 0.05  # L/s, smaller flows count as zero


@dataclass(frozen=True)
class Coughing:
    """One break in the flow, from `start` to `end`."""

    start: float
    end: float

    def overlaps(self, start: float, end: float) -> bool:
        """Whether the two spans of time share more than a point.

        >>> Coughing(1.2, 1.6).overlaps(1.5, 2.0), Coughing(1.2, 1.6).overlaps(1.6, 2.0)
        (True, False)
        """
        return self.start < end and start < self.end


@dataclass(frozen=True)
class Spirograms:
    """N curves of efforts with coughs, each with the FEV₁ of its visit and the breaks that were detected in it."""

    curves: Tensor  # (N, 300) L
    fev1: Tensor  # (N,) L, of the best effort of the visit
    coughs: tuple[tuple[Coughing, ...], ...]
    source: str  # "simulated curves" or "NHANES", for titles
    note: str = ""  # how they were chosen
    without_coughs: Tensor | None = None  # (N, 300) L, the same efforts without the cough; only for simulated curves
    version: int = 1  # of the simulator; weights of networks on other versions' curves are not reused

    def __post_init__(self) -> None:
        if not len(self.curves) == len(self.fev1) == len(self.coughs):
            raise ValueError(
                f"expected one FEV₁ and one tuple of coughs for each curve, got {len(self.curves)} curves, "
                f"{len(self.fev1)} values and {len(self.coughs)} tuples."
            )

    def __len__(self) -> int:
        return len(self.curves)

    def __getitem__(self, index: slice) -> Spirograms:
        without = None if self.without_coughs is None else self.without_coughs[index]
        parts = (self.curves[index], self.fev1[index], self.coughs[index])
        return Spirograms(*parts, self.source, self.note, without, self.version)

    @property
    def coughing(self) -> Tensor:
        """Whether a break was detected in the curve, (N,)."""
        return torch.tensor([bool(seen) for seen in self.coughs])

    def cough_within(self, seconds: float) -> Tensor:
        """Whether a break begins in the first `seconds`, (N,)."""
        return torch.tensor([any(cough.start < seconds for cough in seen) for seen in self.coughs])

    def split(self, train_share: float = 0.8) -> tuple[Spirograms, Spirograms]:
        """The first curves for training, the others for testing; the curves are in random order."""
        if not 0 < train_share < 1:
            raise ValueError(f"train_share must lie between 0 and 1, got {train_share}.")
        n = round(train_share * len(self))
        return self[:n], self[n:]

    def as_split(self) -> Split:
        """Inputs and targets for `training.train`."""
        return Split(self.curves, self.fev1)


def flow(volumes: Tensor, step: float = STEP) -> Tensor:
    """Mean flow between one sample and the next, L/s, (…, T − 1).

    >>> flow(torch.tensor([0.0, 0.2, 0.3, 0.3])).round(decimals=2)
    tensor([4., 2., 0.])
    """
    return volumes.diff(dim=-1) / step


def fev1(volumes: Tensor, step: float = STEP, seconds: float = 1.0) -> Tensor:
    """Volume exhaled `seconds` after time zero, by back-extrapolation, (…,).

    Time zero is where the steepest tangent of the curve, its slope averaged over 80 ms, meets volume zero (ATS/ERS
    2005). At 10 ms that is eight samples; where 80 ms is no multiple of `step`, the nearest one is taken. The volume is
    interpolated between samples; after the end of a record it is constant.

    >>> ramp = torch.arange(300) * 0.05 - 0.3  # breath is held for 0.3 s, then 2 L/s for 1.5 s
    >>> fev1(2 * ramp.clamp(0, 1.5)).round(decimals=4)
    tensor(2.)
    """
    n = max(1, round(SLOPE_WINDOW / step))
    if volumes.shape[-1] <= n:
        raise ValueError(f"expected more than {n} samples at {step:g} s, got {volumes.shape[-1]}.")
    slopes = (volumes[..., n:] - volumes[..., :-n]) / (n * step)
    steepest, j = slopes.max(-1)
    zero = j.to(volumes) * step - volumes.gather(-1, j[..., None])[..., 0] / steepest
    if bool((steepest <= 0).any()):
        raise ValueError("expected curves that rise somewhere; a curve without flow has no FEV₁. Leave it out.")
    return _at(volumes, zero + seconds, step)


def resample(volumes: Tensor, step: float, *, n_samples: int = N_SAMPLES, to: float = STEP) -> Tensor:
    """The curve at 0, `to`, 2·`to`, …, linear between samples and constant after the last one, (…, n_samples).

    >>> resample(torch.tensor([0.0, 1.0, 2.0, 3.0]), 0.02, n_samples=4, to=0.03)
    tensor([0.0000, 1.5000, 3.0000, 3.0000])
    """
    times = to * torch.arange(n_samples, dtype=volumes.dtype, device=volumes.device)
    return _at(volumes[..., None, :].expand(*volumes.shape[:-1], n_samples, -1), times, step)


def find_coughs(volumes: Tensor, step: float = STEP) -> tuple[tuple[Coughing, ...], ...]:
    """Breaks in the flow of each curve (N, T), in order of time.

    After its peak the flow of a forced expiration decreases monotonically. So wherever it rises again to twice its
    minimum and by 0.3 L/s or more, it was interrupted: by a cough, a closed glottis, or a new effort. The break
    lasts while the flow stays within twice its minimum.

    >>> t = STEP * torch.arange(300)
    >>> find_coughs((4 * (1 - torch.exp(-t / 0.6)))[None])
    ((),)
    >>> awake = t - (t - 0.5).clamp(0, 0.4)  # the same lung, closed from 0.5 s to 0.9 s
    >>> find_coughs((4 * (1 - torch.exp(-awake / 0.6)))[None])
    ((Coughing(start=0.5, end=0.9),),)
    """
    if volumes.dim() != 2:
        raise ValueError(f"expected curves (N, T), got shape {tuple(volumes.shape)}.")
    return tuple(_breaks(row, step) for row in flow(volumes.double(), step).clamp_min(0).tolist())


def _breaks(flows: Sequence[float], step: float) -> tuple[Coughing, ...]:
    found = []
    begun = next(j for j, f in enumerate(flows) if f >= BEGUN * max(flows))
    last_peak = lowest = j = _climb(flows, begun)  # lowest: the minimum of the flow since the last peak
    while j < len(flows):
        if flows[j] < flows[lowest]:
            lowest = j
        elif flows[j] >= RECOVERY * flows[lowest] and flows[j] - flows[lowest] >= REBOUND:
            peak = _climb(flows, j)
            start, end, shut = lowest, lowest, RECOVERY * flows[lowest] + STILL
            while start - 1 > last_peak and flows[start - 1] < shut:
                start -= 1
            while end + 1 < peak and flows[end + 1] < shut:
                end += 1
            found.append(Coughing(round(start * step, 6), round((end + 1) * step, 6)))
            last_peak, lowest, j = peak, peak, peak
        j += 1
    return tuple(found)


def _climb(flows: Sequence[float], j: int) -> int:
    """The next peak from j on."""
    while j + 1 < len(flows) and flows[j + 1] > flows[j]:
        j += 1
    return j


def _at(volumes: Tensor, times: Tensor, step: float) -> Tensor:
    """Curves (…, T) at one time each, linear between samples, constant before the first and after the last."""
    place = (times / step).clamp(0, volumes.shape[-1] - 1)
    left = place.floor().long().clamp_max(volumes.shape[-1] - 2)
    share = place - left
    low, high = (volumes.gather(-1, k.expand(volumes.shape[:-1])[..., None])[..., 0] for k in (left, left + 1))
    return low + share * (high - low)
