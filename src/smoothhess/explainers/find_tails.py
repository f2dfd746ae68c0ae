"""The search for directions in which the sampled gradient changes strongly where few draws go: tail strata.

A kink far from the input, or the steep part of a saturated output, changes the gradient along one direction: a function
that is continuous has jumps of its gradient along the normal of the kink. Draws at several times σ reach it often in
any number of dimensions. Where their gradients grow faster than usual with the distance, the gradient is followed along
its own direction ê to find the distance t at which it changes, and |ê·z| > t becomes a stratum (`draws.tail_strata`).

The search uses gradients only, so it also serves models that cannot be frozen. What it finds does not bias the
estimate, since it is independent of the draws of the run; what it does not find is sampled as before.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smoothhess.curvature.control_variate import CONTROL_LIMIT, ODD_FLIPS_PER_PAIR, pilot_pairs
from smoothhess.draws.designs import pilot_stack
from smoothhess.draws.tail_strata import NEVER, TailStrata
from smoothhess.explainers.choose_control import Choice
from smoothhess.explainers.sampler import FarInputError, Sampler
from smoothhess.linalg.memory import CLOSED_FORMS

LEAST_CALLS = 400  # budget below which the search would be too large a part of a run
SCALES = (2.5, 3.5, 4.0, 5.0, 6.0, 6.0, 8.0, 8.0, 8.0)  # of the far draws, one ± pair each
NEAR_PAIRS = 4  # draws that these are compared with, if there is no pilot
GROWTH = 4.0  # squared size of a far draw over the cube of its scale, relative to the usual one, that is followed
OUTLIER = 30.0  # squared size of a near draw, relative to the usual one, that is followed
CANDIDATES = 6  # directions of an example that are tried
KEPT = 2.0  # energy of a first direction, over that of the refined one, above which it is kept
SAME = 0.95  # |cosine| of directions that count as one
REACHES = (1.5, 2.5, 3.5, 4.5, 6.0)  # distances at which the gradient is evaluated along a direction,
EDGES = (1.0, 2.0, 3.0, 4.0, 5.2, 40.0)  # the limits of the distances that each stands for,
BEFORE = (1.0, 1.5, 2.5, 3.5, 4.5, 40.0)  # and those at which a change that is seen there may have begun
STEPS = 2  # divisions by four of the interval of distances in which it changes
INSIDE = 0.7  # share of what a direction adds to the estimate that its stratum contains
APART = 0.6  # least distance between the margins of two strata of one direction
HEAVY = 0.5  # share of the energy of a stratum that lies farther out, above which there is another stratum
SHARE = 0.5  # least share of the energy of the rows that is beyond the margin
LEAST_MARGIN = 2.2  # strata that more than 3 % of the draws reach need no separate sample
BEGUN = 0.1  # share of the change at which it has begun
SLACK = 0.05  # by which the margin is smaller than the distance that was found
ROUNDING = 1e4  # units in the last place of the gradient below which a change counts as none


def with_tails(sampler: Sampler, choice: Choice, seeds: Sequence[int], calls: int) -> Sampler:
    """The sampler with tail strata, if there are any, for a run of at most `calls` calls; it counts the passes."""
    if calls < LEAST_CALLS or not sampler.plan.mirrored or sampler.oracle.precision != "float32":
        return sampler
    size = 16 * len(sampler.inputs) * sampler.rank**2  # of the matrices of all examples
    if sampler.rank > CONTROL_LIMIT or size > CLOSED_FORMS.on(sampler.inputs.device):
        return sampler
    try:
        return _Search.of(sampler, choice, seeds).sampler()
    except FarInputError as error:
        warnings.warn(
            f"the model raises an error at inputs farther away than the draws of the run ({error}): regions that few "
            "draws reach were not searched. Pass tails=None to omit the search.",
            stacklevel=2,
        )
        return sampler


@dataclass(frozen=True, eq=False)
class _Search:
    given: Sampler
    near: Tensor  # (B, P, k) odd parts of what is sampled at usual draws
    far: Tensor  # (B, S, k) the same at other draws times `scales`
    scales: Tensor  # (S,) float64
    pairs: int  # ± pairs that were evaluated

    @staticmethod
    def of(sampler: Sampler, choice: Choice, seeds: Sequence[int]) -> _Search:
        everyone = torch.arange(len(sampler.inputs), device=sampler.inputs.device)
        pilot, first, count = choice.pilot, pilot_pairs(sampler.rank), len(SCALES)
        drawn = pilot_stack(seeds, first + count + NEAR_PAIRS, sampler.rank, sampler.inputs)[:, first:]
        times = torch.tensor(SCALES, dtype=torch.float64, device=drawn.device)
        far = _odd_at(sampler, drawn[:, :count] * times[:, None].to(drawn), everyone)
        near = _odd_at(sampler, drawn[:, count:], everyone) if pilot is None else pilot.left_over(sampler.control)
        pairs = count + (NEAR_PAIRS if pilot is None else 0)
        return _Search(sampler, near.double(), far, times, pairs)

    def _each(self) -> float | Tensor:
        """Passes of a ± pair, (B,) or for all examples."""
        control = self.given.control
        return 2.0 if control is None else 2.0 + ODD_FLIPS_PER_PAIR * (control.flip != 0)

    def sampler(self) -> Sampler:
        """The given sampler, with the strata that were found."""
        spent = self.pairs * self._each()
        far, near = (t.square().sum(-1) for t in (self.far, self.near))  # (B, S) and (B, P)
        usual = near.median(1).values  # which one draw in a stratum does not change
        eps = ROUNDING * torch.finfo(self.given.inputs.dtype).eps
        least = eps**2 * (self.given.unperturbed.whitened.double().square().sum(1) + far.amax(1))
        size = torch.cat([far / self.scales.pow(3) / GROWTH, near / OUTLIER], 1)
        found = size.amax(1) > usual + least
        index = torch.nonzero(found).reshape(-1)
        if not len(index):
            return replace(self.given, extra_passes=self.given.extra_passes + spent)
        lines = self._lines(index, size)
        strata, pairs = lines.strata(usual[index])
        pairs, count = torch.zeros_like(usual).index_copy(0, index, pairs), len(size)
        direction = strata.direction.new_zeros(count, *strata.direction.shape[1:]).index_copy(
            0, index, strata.direction
        )
        margin = strata.margin.new_full((count, strata.margin.shape[1]), NEVER).index_copy(0, index, strata.margin)
        everyone = TailStrata(direction, margin)
        return replace(
            self.given,
            strata=everyone if bool(everyone.exist.any()) else None,
            extra_passes=self.given.extra_passes + spent + pairs * self._each(),
        )

    def _lines(self, index: Tensor, size: Tensor) -> _Lines:
        """The gradient along the best directions of the examples at `index`."""
        towards, left = [], size[index]
        unit = _normalized(torch.cat([self.far, self.near], 1)[index])
        for _ in range(CANDIDATES):  # the largest, and the largest of those with another direction
            best = left.argmax(1)
            towards.append(unit[torch.arange(len(index), device=index.device), best])
            left = torch.where((unit @ towards[-1][..., None])[..., 0].abs() < SAME, left, 0.0)
        first = _Lines.along(self.given, index, torch.stack(towards, 1)).sorted()
        second = _Lines.along(self.given, index, first.normals())
        return first.better(second)


@dataclass(frozen=True, eq=False)
class _Lines:
    """What is sampled along CANDIDATES directions of b examples."""

    given: Sampler
    index: Tensor  # (b,)
    direction: Tensor  # (b, m, k) unit vectors, float64
    odd: Tensor  # (b, m, R, k) at the distances REACHES
    pairs: int  # ± pairs that were evaluated of each example

    @staticmethod
    def along(given: Sampler, index: Tensor, direction: Tensor) -> _Lines:
        reaches = torch.tensor(REACHES, dtype=torch.float64, device=direction.device)
        points = direction[:, :, None] * reaches[:, None]
        odd = _odd_at(given, points.flatten(1, 2), index).unflatten(1, points.shape[1:3])
        return _Lines(given, index, direction, odd, points.shape[1] * len(REACHES))

    @property
    def energy(self) -> Tensor:
        """|odd|² times the probability of each distance, (b, m, R)."""
        return self.odd.square().sum(-1) * -_beyond(EDGES, self.odd).diff()

    def sorted(self) -> _Lines:
        """The directions with most energy first."""
        chosen = self.energy.sum(2).argsort(1, descending=True)
        direction = self.direction.gather(1, chosen[..., None].expand(-1, -1, self.direction.shape[-1]))
        odd = self.odd.gather(1, chosen[..., None, None].expand(-1, -1, *self.odd.shape[2:]))
        return replace(self, direction=direction, odd=odd)

    def normals(self) -> Tensor:
        """The directions of the changes that carry most energy, (b, m, k)."""
        change = torch.cat([self.odd[:, :, :1], self.odd.diff(dim=2)], 2)
        weight = change.square().sum(-1) * _beyond(EDGES[:-1], change)
        best = weight.argmax(2)[..., None, None].expand(-1, -1, 1, change.shape[-1])
        return _normalized(change.gather(2, best)[:, :, 0])

    def better(self, other: _Lines) -> _Lines:
        """The other directions, which are nearer to normals, but for those with much less energy."""
        mine = (self.energy.sum(2) >= KEPT * other.energy.sum(2))[..., None]
        direction = torch.where(mine, self.direction, other.direction)
        return replace(
            self,
            direction=direction,
            odd=torch.where(mine[..., None], self.odd, other.odd),
            pairs=self.pairs + other.pairs,
        )

    def strata(self, usual: Tensor) -> tuple[TailStrata, Tensor]:
        """The strata of directions with a considerable share of the energy, and all pairs that were evaluated, (b,).

        `usual` (b,) is the energy of usual draws.
        """
        reaches = torch.tensor(REACHES, dtype=torch.float64, device=self.odd.device)
        size = self.odd.square().sum(-1)
        within, before = (-_beyond(limits, self.odd).diff() for limits in (EDGES, BEFORE))
        linear = size[..., 0].sqrt() / REACHES[0]  # growth of a linear function
        growth = size.sqrt() - linear[..., None] * reaches
        added, energy = _from_there_on(growth.clamp_min(0) * before), _from_there_on(size * within)
        # the farthest distance beyond which is most of what the direction adds to the estimate
        place = (added >= INSIDE * added[..., :1]).sum(2) - 1
        there = size.sqrt().gather(2, place[..., None])[..., 0]

        def begun(found: Tensor, reach: Tensor, linear: Tensor, there: Tensor) -> Tensor:
            """Whether the change has begun at a distance, from the size of the gradient there."""
            own = linear[..., None] * reach
            return found > own + BEGUN * (there[..., None] - own).clamp_min(0)

        place = begun(size.sqrt(), reaches, linear, there).long().argmax(2)  # the first distance at which it has begun
        low, high = torch.cat([reaches.new_tensor([EDGES[0]]), reaches])[place], reaches[place]
        kept = (energy[..., 0] > SHARE * (usual[:, None] + energy[..., 0])) & (high - SLACK > LEAST_MARGIN)
        kept &= added[..., 0] > 0
        pairs = torch.full_like(usual, self.pairs)
        some, ways = (torch.nonzero(kept.any(dim)).reshape(-1) for dim in (1, 0))
        if len(some):
            block = some[:, None], ways
            left, right = low[block], high[block]
            for _ in range(STEPS):
                middle = (left + right) / 2
                reach = torch.stack([(left + middle) / 2, middle, (middle + right) / 2], -1)  # (b, m, 3)
                points = self.direction[block][:, :, None] * reach[..., None]
                odd = _odd_at(self.given, points.flatten(1, 2), self.index[some]).unflatten(1, points.shape[1:3])
                large = begun(torch.linalg.vector_norm(odd, dim=-1), reach, linear[block], there[block])
                for at, big in (
                    (middle, large[..., 1]),
                    (
                        torch.where(large[..., 1], reach[..., 0], reach[..., 2]),
                        torch.where(large[..., 1], large[..., 0], large[..., 2]),
                    ),
                ):
                    left, right = torch.where(big, left, at), torch.where(big, at, right)
            low[block] = left
            pairs[some] += STEPS * 3 * len(ways)
        margin = low - SLACK
        kept &= margin >= LEAST_MARGIN
        alike = (self.direction @ self.direction.mT).abs() >= SAME
        for m in range(1, kept.shape[1]):
            kept[:, m] &= ~(alike[:, m, :m] & kept[:, :m]).any(1)
        farther = (energy > HEAVY * energy.gather(2, place[..., None])) & (reaches - 0.5 > margin[..., None] + APART)
        margins = torch.cat([margin[..., None], reaches.expand_as(energy) - 0.5], 2)  # (b, m, 1 + R)
        kept = torch.cat([kept[..., None], farther & kept[..., None]], 2)
        direction = torch.where(kept[..., None], self.direction[:, :, None], 0.0).flatten(1, 2)
        strata = TailStrata(direction.to(self.given.inputs), torch.where(kept, margins, NEVER).flatten(1))
        return strata, pairs


def _normalized(rows: Tensor) -> Tensor:
    """Unit vectors along rows of any length; zero where a row is zero."""
    return torch.nn.functional.normalize(rows, dim=-1, eps=torch.finfo(rows.dtype).tiny)


def _from_there_on(t: Tensor) -> Tensor:
    """Sums over each distance and those beyond it, in the last dimension."""
    return t.flip(-1).cumsum(-1).flip(-1)


def _beyond(distances: Sequence[float], like: Tensor) -> Tensor:
    """2Φ(−t) of each distance t, float64."""
    return torch.special.erfc(torch.tensor(distances, dtype=torch.float64, device=like.device) / 2**0.5)


def _odd_at(sampler: Sampler, z: Tensor, index: Tensor) -> Tensor:
    """Odd parts of what is sampled at z (b, r, k), float64."""
    return sampler.odd_at(z.to(sampler.inputs), index).double()
