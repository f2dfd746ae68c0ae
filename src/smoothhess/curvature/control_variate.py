"""The control variate: subtract a field with a closed-form expectation from each row, and add the expectation back.

From the field g̃ of `flip_field`, with E[z g̃ᵀ] = W₁, two fields with known expectation are made: the linear part W₁z,
and the residual g̃ − W₁z, whose expectation is zero. Sampled is

    ∇f − μ W₁z − β (g̃ − W₁z),      and μ W₁ is added back.

From the values, the potentials of these fields are subtracted, and their expectations β v₁ + (μ − β) tr(W₁)/2 added.
The estimate is unbiased for all weights μ and β that do not depend on the rows; they are fitted to a few separate pairs
of draws, the pilot. β = 0 needs no frozen passes: W₁ then reduces the variance of partial blocks and is a target for
shrinkage. In dimensions above CONTROL_LIMIT, W₁ has low rank and is used only as a linear control variate; τ may then
be estimated, because the same linear field is subtracted and added back. Before W₁ is computed, the pilot also
estimates which share of the variation of the gradient single flips explain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from smoothhess.curvature.flip_field import odd_flips, own_flips
from smoothhess.curvature.frozen_network import FrozenNetwork
from smoothhess.curvature.neuron_selection import selection_price
from smoothhess.curvature.one_flip import Expectation, Kinks
from smoothhess.draws.designs import Design, pilot_stack, tau_rows
from smoothhess.draws.gaussian import Gaussian
from smoothhess.linalg.low_rank import Known
from smoothhess.model.gradients import Oracle

PILOT_PAIRS = 8  # pairs of draws to fit the weights; twice as many below FEW dimensions
FEW = 16
RIDGE = 0.02  # ridge penalty on the distance of the weights from 1, relative to the energy of the fields
FLIPS_PER_PAIR = 1.5  # frozen passes for a ± pair: one forward, two backward
ODD_FLIPS_PER_PAIR = 1.0  # for the odd part only: one forward, one backward
CONTROL_LIMIT = 8192  # dimensions up to which W₁ is dense; above it, W₁ has low rank
THIN_CALLS, THIN_LEAST, THIN_MOST = 16, 8, 128  # calls per direction; smallest and largest number of directions
THIN_PROBES = 64  # random directions to estimate τ of a low-rank W₁


@dataclass(frozen=True)
class Directions:
    """Numbers of random directions that W₁ is computed from; in more than CONTROL_LIMIT dimensions W₁ has low rank."""

    rank: int = THIN_LEAST  # of a low-rank W₁
    tau_probes: int | None = None  # directions to estimate τ; None: τ is exact, or from THIN_PROBES for a low-rank W₁

    def rows(self, k: int) -> int:
        """Number of rows of length k that W₁ of an example takes."""
        return k if k <= CONTROL_LIMIT else 2 * self.rank

    def selects(self, kinks: Kinks, k: int) -> bool:
        """Whether a selection of neurons may reduce the passes of `expectation` in k dimensions."""
        return k <= CONTROL_LIMIT and self.tau_probes is None and selection_price(kinks, k) > 0

    def least_price(self, kinks: Kinks, k: int) -> float:
        """Passes per example that `expectation` takes at least, with those to select neurons where it may."""
        if self.selects(kinks, k):
            return selection_price(kinks, k) + k / 2
        return float(self.prices(kinks, k).min())

    def prices(self, kinks: Kinks, k: int) -> Tensor:
        """Passes that `expectation` takes in k dimensions, (B,) float64."""
        if k > CONTROL_LIMIT:
            price = kinks.thin_price(self.rank, min(self.tau_probes, k) if self.tau_probes else THIN_PROBES)
            return torch.full_like(kinks.network.everyone, price, dtype=torch.float64)
        return kinks.prices(k, self.tau_probes)

    def expectation(self, kinks: Kinks, gaussian: Gaussian, index: Tensor, layers: bool = False) -> Expectation:
        """W₁ and Γ₁ of the examples at `index`; `layers` adds the contribution of each layer to a dense W₁."""
        inputs, probes = kinks.network.inputs, None
        k = gaussian.rank(inputs[0].numel())
        if k > CONTROL_LIMIT:
            exact = self.tau_probes is not None and self.tau_probes >= k
            drawn = tau_rows(self.rank + (0 if exact else self.tau_probes or THIN_PROBES), k, inputs)
            probes = None if exact else drawn[self.rank :]
            return kinks.thin_expectation(gaussian, probes, drawn[: self.rank], index)
        if self.tau_probes is not None:
            probes = tau_rows(self.tau_probes, k, inputs)
        return kinks.expectation(gaussian, layers, probes, index)


@dataclass(frozen=True, eq=False)
class Control:
    """The two fields of B examples and their weights."""

    kinks: Kinks
    expected: Expectation
    linear: Tensor  # (B,) μ
    flip: Tensor  # (B,) β; both are 0 for examples without a closed form
    directions: Directions = Directions()  # that W₁ was computed from

    @staticmethod
    def make(kinks: Kinks, expected: Expectation, weights: Tensor, chosen: Tensor, directions: Directions) -> Control:
        """From the expectation and the weights (b, 2) of the `chosen` examples, (b,)."""
        count = len(kinks.network.inputs)
        weights = weights.to(chosen.device, torch.float64)
        if len(chosen) < count:
            weights = weights.new_zeros(count, 2).index_copy(0, chosen, weights)
            expected = expected.spread(chosen, count)
        return Control(kinks, expected, weights[:, 0], weights[:, 1], directions)

    def known(self, index: Tensor) -> Known:
        """The whitened matrix that is added back to the Hessian."""
        return self._hessian(index).scaled(self.linear[index])

    def _hessian(self, index: Tensor) -> Known:
        """W₁ of the examples at `index`, ascending; not copied if these are all examples."""
        return self.expected.hessian if len(index) == len(self.flip) else self.expected.hessian.select(index)

    def among(self, index: Tensor) -> Subtraction:
        """The subtraction for the rows of the examples at `index`, ascending."""
        return self._among_all if len(index) == len(self.flip) else self._among(index)

    @cached_property
    def _among_all(self) -> Subtraction:
        return self._among(self.kinks.network.everyone)

    def _among(self, index: Tensor) -> Subtraction:
        flipping = torch.nonzero(self.flip[index]).reshape(-1)
        owner = index[flipping]
        return Subtraction(
            hessian=self._hessian(index),
            linear=(self.linear - self.flip)[index],
            flipping=flipping,
            owner=owner,
            network=self.kinks.network.select(owner) if len(flipping) else None,
            flip=self.flip[owner],
            gradient=None if self.expected.drift is not None else self.expected.gradient[owner],
            value=None if self.expected.value is None else self.expected.value[owner],
        )

    @property
    def drift(self) -> Tensor | None:
        """(B, R, k) bias along random vectors due to an estimated τ; zero without flips."""
        return None if self.expected.drift is None else self.flip[:, None, None] * self.expected.drift

    def passes(self, plan: Design, rows: Tensor, index: Tensor) -> Tensor:
        """Frozen passes for `rows` rows of the examples at `index`, and for their closed forms."""
        each = FLIPS_PER_PAIR if plan.mirrored else 1
        made = (self.linear[index] != 0) | (self.flip[index] != 0)
        return rows * each * (self.flip[index] != 0) + self.expected.passes[index] * made


@dataclass(frozen=True, eq=False)
class Subtraction:
    """The fields that are subtracted from the rows of b examples; g̃ is subtracted for f of them."""

    hessian: Known  # W₁, (b, …)
    linear: Tensor  # (b,) weight of W₁z, μ − β
    flipping: Tensor  # (f,) indices of these examples among the b
    owner: Tensor  # (f,) their indices in the oracle
    network: FrozenNetwork | None  # their frozen networks
    flip: Tensor  # (f,) β
    gradient: Tensor | None  # (f, k) Γ₁; None if τ was estimated: Γ₁ would be biased, so even parts are sampled
    value: Tensor | None  # (f,) v₁

    def left_over(self, gaussian: Gaussian, points: Tensor, z: Tensor, rows: Sampled, mirrored: bool) -> Sampled:
        """The residual of the rows, without `expectation`; `points` (b, r, *shape) are the points at +z."""
        odd, even, value, weight = rows
        turned = self.hessian.product(z)
        linear = self.linear[:, None].to(odd)
        odd = odd - linear[..., None] * turned
        value = value - linear / 2 * weight * (z * turned).sum(-1)
        if self.network is None:
            return Sampled(odd, even, value, weight)
        flipping, flat = self.flipping, (len(self.flipping), points.shape[1], -1)
        found = own_flips(self.network, _examples(points, flipping), self.owner, mirrored)
        beta = self.flip[:, None, None].to(odd)
        odd = _minus(odd, flipping, beta * gaussian.pull(found.odd.reshape(flat)))
        if self.gradient is None or self.value is None:
            return Sampled(odd, even, value, weight)
        own = weight if len(weight) == 1 else _examples(weight, flipping)
        even = _minus(even, flipping, beta * own[..., None] * gaussian.pull(found.even.reshape(flat)))
        return Sampled(odd, even, _minus(value, flipping, (self.flip[:, None] * own * found.value).to(value)), weight)

    def odd_left_over(self, gaussian: Gaussian, points: Tensor, z: Tensor, odd: Tensor) -> Tensor:
        """The odd part of `left_over`, from that of the gradient."""
        odd = odd - self.linear[:, None, None].to(odd) * self.hessian.product(z)
        if self.network is None:
            return odd
        found = odd_flips(self.network, _examples(points, self.flipping), self.owner)
        there = gaussian.pull(found.reshape(len(self.flipping), points.shape[1], -1))
        return _minus(odd, self.flipping, self.flip[:, None, None].to(odd) * there)

    def expectation(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """What is added back to the even part of each row, (b, k), and to its value, (b,)."""
        even = like.new_zeros(len(self.linear), like.shape[-1])
        value = self.linear / 2 * self.hessian.diagonal().double().sum(-1)
        if self.gradient is not None and self.value is not None:
            even[self.flipping] = (self.flip[:, None] * self.gradient).to(like)
            value = value.index_add(0, self.flipping, self.flip * self.value)
        return even, value.to(like)


def _examples(t: Tensor, index: Tensor) -> Tensor:
    """The examples at `index`, ascending; not copied if these are all examples."""
    return t if len(index) == len(t) else t[index]


def _minus(t: Tensor, index: Tensor, part: Tensor) -> Tensor:
    """`t` with `part` subtracted from the examples at `index`, ascending."""
    return t - part if len(index) == len(t) else t.index_add(0, index, part, alpha=-1)


class Sampled(NamedTuple):
    """What is sampled of b examples in each row: the whitened gradient, and the value."""

    odd: Tensor  # (b, r, k)
    even: Tensor  # (b, r, k) times the weight
    value: Tensor  # (b, r) even part of f(x + δ) − f(x), times the weight
    weight: Tensor  # (1 or b, r)

    def only(self, rows: Tensor) -> Sampled:
        """With zeros instead of other rows than those in the mask, (b, r)."""
        keep = rows[..., None].to(self.odd)
        return Sampled(self.odd * keep, self.even * keep, self.value * keep[..., 0], self.weight)

    def where_finite(self, finite: Tensor) -> Sampled:
        """With zeros instead of other rows than those in the mask, (b, r), which may hold infinite numbers."""
        rows = finite[..., None]
        odd, even = (torch.where(rows, t, 0.0) for t in (self.odd, self.even))
        return Sampled(odd, even, torch.where(finite, self.value, 0.0), self.weight)

    def plus(self, even: Tensor, value: Tensor) -> Sampled:
        """With constants (b, k) and (b,) added to each row."""
        return Sampled(self.odd, self.even + even[:, None], self.value + value[:, None], self.weight)


def thin_rank(calls: float) -> int:
    """Rank of a low-rank W₁ for a budget of `calls` gradient calls."""
    return int(min(max(calls / THIN_CALLS, THIN_LEAST), THIN_MOST))


def pilot_pairs(k: int) -> int:
    """Number of pairs of draws in the pilot."""
    return PILOT_PAIRS if k >= FEW else 2 * PILOT_PAIRS


def pilot_passes(k: int) -> float:
    """Passes that the pilot takes: two gradients, a frozen forward and a frozen backward pass for each pair."""
    return (2 + ODD_FLIPS_PER_PAIR) * pilot_pairs(k)


@dataclass(frozen=True, eq=False)
class Pilot:
    """A few separate ± pairs of draws for each example, with the gradient and the field g̃ at these points."""

    z: Tensor  # (B, P, k)
    odd: Tensor  # (B, P, k) of the whitened gradient
    flips: Tensor  # (B, P, k) of the field g̃, whitened

    @staticmethod
    def draw(oracle: Oracle, gaussian: Gaussian, kinks: Kinks, seeds: Sequence[int]) -> Pilot:
        """Draw from the pilot stream of the seed of each example, which no design uses."""
        network = kinks.network
        x = network.inputs.flatten(1)
        shape, k = network.inputs.shape[1:], gaussian.rank(x.shape[1])
        pairs = pilot_pairs(k)
        drawn = pilot_stack(seeds, pairs, k, x)
        found = []
        for index in torch.arange(len(x), device=x.device).split(max(1, oracle.batch_size // (2 * pairs))):
            z = drawn[index]  # (b, P, k)
            delta = gaussian.colour(z)
            points = torch.stack([x[index, None] + delta, x[index, None] - delta], 2)  # (b, P, 2, d)
            _, gradient = oracle(points.reshape(-1, *shape), index.repeat_interleave(2 * pairs))
            gradient = gaussian.pull(gradient.reshape(points.shape))
            there = odd_flips(network.select(index), points[:, :, 0].reshape(len(index), pairs, *shape), index)
            found.append((z, (gradient[:, :, 0] - gradient[:, :, 1]) / 2, gaussian.pull(there.flatten(2))))
        return Pilot(*(torch.cat(parts) for parts in zip(*found, strict=True)))

    @property
    def unexplained(self) -> Tensor:
        """Share of the odd variation of the gradient that no multiple of g̃ explains, (B,); 0 without variation."""
        odd, flips = (t.flatten(1).double() for t in (self.odd, self.flips))
        varied, moved = odd.square().sum(1), flips.square().sum(1)
        shared = (odd * flips).sum(1).square() / moved.clamp_min(torch.finfo(torch.float64).tiny)
        return torch.where(varied > 0, 1 - shared / varied, 0.0)

    def left_over(self, control: Control | None) -> Tensor:
        """Odd parts of what is sampled at these draws, (B, P, k)."""
        if control is None:
            return self.odd
        linear = (control.linear - control.flip)[:, None, None].to(self.odd)
        turned = control.expected.hessian.product(self.z)
        return self.odd - linear * turned - control.flip[:, None, None].to(self.odd) * self.flips

    def fit(self, expected: Expectation, chosen: Tensor, always: bool) -> Tensor:
        """Weights (b, 2) of the `chosen` examples, whose W₁ is given; `always`: use β even if it does not pay off."""
        z, odd, flips = self.z[chosen], self.odd[chosen], self.flips[chosen]
        linear = expected.hessian.product(z)
        if expected.hessian.is_thin:  # not the expectation of the field: only a linear control variate
            return _weights(odd, linear, torch.zeros_like(linear), always=False)
        return _weights(odd, linear, flips - linear, always)


def _weights(odd: Tensor, linear: Tensor, residual: Tensor, always: bool) -> Tensor:
    """μ and β of each example, (b, 2); β = 0 if further rows reduce the variance more than frozen passes."""
    fields = torch.stack([linear, residual], 1).flatten(2).double()  # (b, 2, P k)
    target = odd.flatten(1).double()
    square = fields @ fields.mT
    ridge = RIDGE * square.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(torch.finfo(torch.float64).tiny)
    system = square + ridge[:, None, None] * torch.eye(2, dtype=torch.float64, device=odd.device)
    right = (fields @ target[..., None])[..., 0] + ridge[:, None]
    both = torch.linalg.solve(system, right).clamp(-2, 2)
    both[:, 1].clamp_(0, 1.5)
    single = right[:, 0] / system[:, 0, 0]
    with_flips = (target - (both[:, None] @ fields)[:, 0]).square().sum(1)
    without_flips = (target - single[:, None] * fields[:, 0]).square().sum(1)
    pays = (with_flips * (2 + FLIPS_PER_PAIR) < without_flips * 2) | always
    return torch.where(pays[:, None], both, torch.stack([single.clamp(-2, 2), torch.zeros_like(single)], 1))
