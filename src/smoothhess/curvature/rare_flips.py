"""Neurons that few draws flip: margins, jumps and directions, as the frozen network gives them.

A neuron with pre-activation z, knot c and τ = |j| flips at +δ or −δ with probability 2Φ(−t), t = |z − c|/τ, and then
changes the whitened gradient by the vector a ĵ, a = |u · jump| τ. Where no or few draws flip it, the scatter of the
draws says nothing about it, but its variance follows from t, a and ĵ (`estimate.rare_flip_variance`). This module finds
the neurons of each example with most of that variance. Their expectation is in `one_flip`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smoothhess.curvature.frozen_network import FrozenNetwork, sum_of_squares
from smoothhess.draws.designs import tau_rows
from smoothhess.draws.gaussian import Gaussian
from smoothhess.linalg.memory import in_batches

NEURONS = 16  # neurons of an example that are kept
PROBES = 32  # random directions that estimate τ of all neurons, in more than twice as many dimensions
SLACK = 1.3  # factor on an estimated τ, so that no neuron is overlooked
OFTEN_FLIPPED = 1e-3  # least share of the variance by which neurons are ranked
RARE = 0.05  # chance of a flip in a draw below which rows with flips are told apart from others
WIDEST = 2.0  # draws across the direction of a neuron that are taken into account, in units of τ
FARTHEST = 1e3  # margins beyond this many τ are set to it
LEFT_OUT = 0.1  # variance of the neurons that are not kept, relative to the others, that counts as none
SEEN = 8  # expected flips in the rows above which their scatter contains the neuron's variance


@dataclass(frozen=True, eq=False)
class RareFlips:
    """The neurons of B examples that few draws flip.

    `complete` marks examples whose kinks are all recorded and do not depend on each other, so that t is exact, and of
    which neurons with a negligible variance are left out.
    """

    direction: Tensor  # (B, m, k) ĵ, towards the kink, or its products with the directions of features or groups
    margin: Tensor  # (B, m) t
    jump: Tensor  # (B, m) a; 0 where there are fewer neurons
    complete: Tensor  # (B,) bool

    def map(self, linear: Callable[[Tensor], Tensor]) -> RareFlips:
        """In other coordinates."""
        return RareFlips(linear(self.direction), self.margin, self.jump, self.complete)

    def select(self, index: Tensor) -> RareFlips:
        """The examples at `index`."""
        return RareFlips(*(t[index] for t in self._all))

    def scaled(self, factor: Tensor) -> RareFlips:
        """With jumps times `factor`, (B,)."""
        return RareFlips(self.direction, self.margin, self.jump * factor[:, None].to(self.jump), self.complete)

    def without(self, direction: Tensor, margin: Tensor) -> RareFlips:
        """Without neurons that only flip in the regions |ê·z| > t, up to a negligible probability.

        ê (B, s, k) are given in whitened coordinates, t (B, s) float64.
        """
        cosine = (self.direction.to(direction) @ direction.mT).abs().double().clamp_max(1)  # (B, m, s)
        nearest = self.margin[..., None] * cosine - WIDEST * (1 - cosine.square()).sqrt()
        inside = (nearest >= margin[:, None]).any(2)
        return RareFlips(self.direction, self.margin, self.jump.masked_fill(inside, 0.0), self.complete)

    def beyond(self, z: Tensor, mirrored: bool) -> Tensor:
        """Distance of rows z (1 or B, P, k), or ±z, beyond the kink of each neuron in units of τ, (B, P, m).

        It is 0 where the row does not flip the neuron; `direction` must be that of whitened coordinates.
        """
        moved = (z @ self.direction.mT).double()
        return ((moved.abs() if mirrored else moved) - self.margin[:, None]).clamp_min(0)

    def flipped(self, z: Tensor, mirrored: bool) -> Tensor:
        """Rows that flip one of the neurons with a chance of less than RARE, (B, P)."""
        rare = (self.jump > 0) & (chance(self.margin) < RARE)
        return ((self.beyond(z, mirrored) > 0) & rare[:, None]).any(2)

    @property
    def _all(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.direction, self.margin, self.jump, self.complete

    @property
    def is_empty(self) -> bool:
        """Whether it holds no neuron of any example, and does not show either that there is none."""
        return not bool(self.jump.any()) and not bool(self.complete.any())

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name; the inverse of `from_tensors`."""
        names = ("rare.direction", "rare.margin", "rare.jump", "rare.complete")
        return dict(zip(names, self._all, strict=True))

    @staticmethod
    def from_tensors(tensors: dict[str, Tensor]) -> RareFlips | None:
        """From all tensors of some statistics; removes its own."""
        names = ("rare.direction", "rare.margin", "rare.jump", "rare.complete")
        found = [tensors.pop(name) for name in names if name in tensors]
        return RareFlips(*found) if len(found) == len(names) else None

    @staticmethod
    def cat(parts: Sequence[RareFlips | None], sizes: Sequence[int]) -> RareFlips | None:
        """Concatenate; None stands for examples, `sizes` of them, of which nothing is known."""
        like = next((p for p in parts if p is not None), None)
        if like is None:
            return None
        most = max(p.jump.shape[1] for p in parts if p is not None)
        filled = [like._nothing(n) if p is None else p for p, n in zip(parts, sizes, strict=True)]
        return RareFlips(*(torch.cat(some) for some in zip(*(p._padded(most)._all for p in filled), strict=True)))

    @staticmethod
    def merged(a: RareFlips | None, n_a: Tensor, b: RareFlips | None, n_b: Tensor) -> RareFlips | None:
        """Of the mean over n_a rows of one run and n_b rows of another, which may subtract other flips, (B,) each."""
        like = b if a is None else a
        if like is None:
            return None
        square = torch.zeros_like(like.jump)
        for part, n in ((a, n_a), (b, n_b)):
            if part is not None:
                square = square + part.jump.square() * (n / (n_a + n_b).clamp_min(1))[:, None]
        complete = torch.zeros_like(like.complete) if a is None or b is None else a.complete & b.complete
        return RareFlips(like.direction, like.margin, square.sqrt(), complete)

    def _nothing(self, count: int) -> RareFlips:
        return RareFlips(*(t.new_zeros(count, *t.shape[1:]) for t in self._all))

    def _padded(self, neurons: int) -> RareFlips:
        if (missing := neurons - self.jump.shape[1]) == 0:
            return self
        pad = torch.nn.functional.pad
        own = pad(self.direction, (0, 0, 0, missing)), pad(self.margin, (0, missing)), pad(self.jump, (0, missing))
        return RareFlips(*own, self.complete)


def chance(margin: Tensor) -> Tensor:
    """Φ(−t), the probability that a draw flips a neuron."""
    return torch.special.erfc(margin / 2**0.5) / 2  # ndtr underflows beyond t = 8


def unseen_share(margin: Tensor, draws: Tensor | float) -> Tensor:
    """Share of a neuron's variance that the scatter of `draws` draws is expected to lack, between 0 and 1."""
    return (1 - chance(margin) * draws / SEEN).clamp_min(0)


def price(k: int) -> float:
    """Passes per example that `find_rare_flips` takes in k dimensions."""
    return k / 2 if k <= 2 * PROBES else PROBES / 2 + NEURONS


def find_rare_flips(network: FrozenNetwork, gaussian: Gaussian) -> RareFlips:
    """The neurons that carry most of the variance that a block of ± pairs of draws is expected to lack."""
    oracle = network.oracle
    at_once = NEURONS if gaussian.rank(network.inputs[0].numel()) > 2 * PROBES else 1
    parts = [
        *in_batches(
            lambda examples: _find(network, gaussian, network.everyone[examples]),
            len(network.inputs),
            lambda _: max(1, oracle.batch_size // at_once),
            lambda n: oracle.take_fewer(n * at_once, least=at_once),
        )
    ]
    found = RareFlips.cat(parts, [len(p.jump) for p in parts])
    assert found is not None
    return found


def _find(everyone: FrozenNetwork, gaussian: Gaussian, owner: Tensor) -> RareFlips:
    network = everyone.select(owner)
    k = gaussian.rank(network.inputs[0].numel())
    gradients = None
    if k <= 2 * PROBES:
        gradients = torch.cat([*network.columns(gaussian, owner)], 1)  # (b, k, units) all j
        tau = sum_of_squares(gradients).sqrt()
    else:
        probes = tau_rows(PROBES, k, network.inputs)
        tau = SLACK * (sum_of_squares(network.moves(gaussian, probes, owner)) / PROBES).sqrt()
    neuron, distance, slope = (torch.cat(parts, -1) for parts in zip(*_knots(network), strict=True))
    gap = distance.abs()
    reach = tau[:, neuron].clamp_min(torch.finfo(torch.float64).tiny)
    margin = (gap / reach).clamp_max(FARTHEST)
    share = unseen_share(margin, 2 * k).clamp_min(OFTEN_FLIPPED)
    score = torch.where(tau[:, neuron] > 0, chance(margin) * (slope * reach).square(), 0.0) * share
    chosen = score.topk(min(NEURONS, score.shape[1]), 1).indices  # (b, m)
    among = neuron[chosen]
    if gradients is not None:
        j = gradients.gather(2, among[:, None].expand(-1, k, -1)).mT  # (b, m, k)
    else:
        one = torch.zeros(*chosen.shape, network.neurons, dtype=network.inputs.dtype, device=chosen.device)
        j = gaussian.pull(network.back(one.scatter_(2, among[..., None], 1.0), owner))
    exact = j.double().square().sum(-1).sqrt()
    j = j * torch.where(distance.gather(1, chosen) < 0, -1.0, 1.0)[..., None].to(j)
    direction = (j / exact.clamp_min(torch.finfo(j.dtype).tiny)[..., None].to(j)).to(network.inputs)
    jump = slope.gather(1, chosen) * exact
    margin = (gap.gather(1, chosen) / exact.clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(FARTHEST)
    kept = score.gather(1, chosen).sum(1)
    return RareFlips(direction, margin, jump, score.sum(1) - kept <= LEFT_OUT * kept)


def _knots(network: FrozenNetwork) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For the neurons of each call and knot: their indices (n,), knot − z and |u · jump|, (b, n) float64."""
    first = 0
    for call, pre, u in zip(network.calls, network.pre, network.sensitivity, strict=True):
        count = pre[0].numel()
        index = torch.arange(first, first + count, device=pre.device)
        first += count
        for knot, jump in call.knots:
            size = u.double() * (jump.double() if isinstance(jump, Tensor) else jump)
            yield index, (knot - pre.double()).reshape(len(pre), -1), size.abs().reshape(len(pre), -1)
