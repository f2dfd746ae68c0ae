"""The control variate: what the closed form knows about each row is subtracted, and its exact expectation added back.

From the field g̃ of `kinks`, with E[z g̃ᵀ] = W₁, two fields of known expectation are made: its linear part W₁z, and the
rest g̃ − W₁z, which averages to nothing. Rows are sampled of

    ∇f − μ W₁z − β (g̃ − W₁z),      and μ W₁ is added back;

whatever μ and β, the estimate is unbiased, as long as they do not depend on the rows: they are fitted to a few pairs
of draws of their own, the pilot. β = 0 needs no frozen passes: W₁ then serves partial blocks, and as a centre to shrink
to. In more dimensions than a matrix can have, W₁ is kept in a few directions and serves as a line alone, for which τ
may be estimated: whatever line is subtracted is added back. The pilot also says, before W₁ is made, how much of the
gradient's variation single flips explain at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smoothhess.curvature.one_flip import Expectation, Kinks
from smoothhess.draws.designs import Design, pilot_stack
from smoothhess.draws.gaussian import Gaussian
from smoothhess.linalg.low_rank import Known
from smoothhess.model.gradients import Oracle

PILOT_PAIRS = 8  # draws for the weights; twice that in few dimensions
FEW = 16  # dimensions
RIDGE = 0.02  # pull of the weights towards one, in units of the fields' energy
FLIPS_PER_PAIR = 1.5  # frozen passes for a ± pair: one forward, two backward
CONTROL_LIMIT = 8192  # dimensions up to which W₁ is kept as a matrix; beyond, in a few directions
THIN_CALLS, THIN_LEAST, THIN_MOST = 16, 8, 128  # one direction for so many calls, and how many there are
THIN_PROBES = 64  # random directions for its τ
MOST_BYTES = 1 << 32  # of the closed forms of all examples that "auto" is willing to keep; four times that on a GPU


@dataclass(frozen=True, eq=False)
class Control:
    """The two fields of B examples and their weights."""

    kinks: Kinks
    expected: Expectation
    linear: Tensor  # (B,) μ
    flip: Tensor  # (B,) β; both are 0 where the closed form was not made

    def known(self, index: Tensor) -> Known:
        """What is added back to the Hessian for each row, whitened."""
        return self._hessian(index).scaled(self.linear[index])

    def _hessian(self, index: Tensor) -> Known:
        """W₁ of the examples at `index`, in rising order: all of them need no copy."""
        return self.expected.hessian if len(index) == len(self.flip) else self.expected.hessian.select(index)

    def among(self, index: Tensor) -> Subtraction:
        """What is to be done with the rows of the examples at `index`."""
        flipping = torch.nonzero(self.flip[index]).reshape(-1)
        owner = index[flipping]
        return Subtraction(
            hessian=self._hessian(index),
            line=(self.linear - self.flip)[index],
            flipping=flipping,
            owner=owner,
            kinks=self.kinks.select(owner) if len(flipping) else None,
            flip=self.flip[owner],
            gradient=None if self.expected.drift is not None else self.expected.gradient[owner],
        )

    @property
    def drift(self) -> Tensor | None:
        """(B, R, k) along random vectors: the bias that an estimated τ leaves; none without flips, whatever τ is."""
        return None if self.expected.drift is None else self.flip[:, None, None] * self.expected.drift

    def passes(self, plan: Design, rows: Tensor, index: Tensor) -> Tensor:
        """Frozen passes for so many rows of the examples at `index`, and for their closed forms."""
        each = FLIPS_PER_PAIR if plan.mirrored else 1
        made = (self.linear[index] != 0) | (self.flip[index] != 0)
        return rows * each * (self.flip[index] != 0) + self.expected.passes * made


@dataclass(frozen=True, eq=False)
class Subtraction:
    """What is taken off the rows of b examples, f of which have flips taken off."""

    hessian: Known  # W₁, (b, …)
    line: Tensor  # (b,) weight of W₁z
    flipping: Tensor  # (f,) which of the examples these are,
    owner: Tensor  # (f,) and which of the oracle's
    kinks: Kinks | None  # of these
    flip: Tensor  # (f,) β
    gradient: Tensor | None  # (f, k) Γ₁; None where τ was estimated, which would bias it: even parts are then sampled

    def left_over(
        self, gaussian: Gaussian, points: Tensor, z: Tensor, rows: tuple[Tensor, Tensor, Tensor], mirrored: bool
    ) -> tuple[Tensor, Tensor]:
        """Odd and (weighted) even part of what is sampled, from those of the whitened gradient and the rows' weights.

        `points` (b, r, *shape) are the rows' points at +z; `rows` are odd, even (b, r, k) and weight (1 or b, r).
        """
        odd, even, weight = rows
        odd = odd - self.line[:, None, None].to(odd) * self.hessian.product(z)
        if self.kinks is None:
            return odd, even
        flipping, flat = self.flipping, (len(self.flipping), points.shape[1], -1)
        there, around = self.kinks.own_flips(points[flipping], self.owner, mirrored)
        there, around = (gaussian.pull(f.reshape(flat)) for f in (there, around))
        beta, odd = self.flip[:, None, None].to(odd), odd.clone()
        odd[flipping] -= beta * there
        if self.gradient is None:
            return odd, even
        weight, even = weight if len(weight) == 1 else weight[flipping], even.clone()
        even[flipping] += beta * (self.gradient[:, None].to(even) - weight[..., None] * around)
        return odd, even


def thin_rank(calls: float) -> int:
    """In how many directions W₁ is kept where it is not kept as a matrix."""
    return int(min(max(calls / THIN_CALLS, THIN_LEAST), THIN_MOST))


def pilot_pairs(k: int) -> int:
    """How many pairs of draws the weights are fitted to."""
    return PILOT_PAIRS if k >= FEW else 2 * PILOT_PAIRS


def pilot_passes(k: int) -> float:
    """Passes that the pilot takes: two gradients, a frozen forward and a frozen backward pass for each pair."""
    return 3.0 * pilot_pairs(k)


@dataclass(frozen=True, eq=False)
class Pilot:
    """A few ± pairs of draws of its own for each example, and what gradient and field are there."""

    z: Tensor  # (B, P, k)
    odd: Tensor  # (B, P, k) of the whitened gradient
    flips: Tensor  # (B, P, k) of the field g̃, whitened

    @staticmethod
    def draw(oracle: Oracle, gaussian: Gaussian, kinks: Kinks, seeds: Sequence[int]) -> Pilot:
        """From the stream of each example's seed that no design draws from."""
        x = kinks.inputs.flatten(1)
        shape, k = kinks.inputs.shape[1:], gaussian.rank(x.shape[1])
        pairs = pilot_pairs(k)
        drawn = pilot_stack(seeds, pairs, k, x)
        found = []
        for index in torch.arange(len(x), device=x.device).split(max(1, oracle.batch_size // (2 * pairs))):
            z = drawn[index]  # (b, P, k)
            delta = gaussian.colour(z)
            points = torch.stack([x[index, None] + delta, x[index, None] - delta], 2)  # (b, P, 2, d)
            _, gradient = oracle(points.reshape(-1, *shape), index.repeat_interleave(2 * pairs))
            gradient = gaussian.pull(gradient.reshape(points.shape))
            there, _ = kinks.flips(points[:, :, 0].reshape(len(index), pairs, *shape), index, mirrored=True)
            found.append((z, (gradient[:, :, 0] - gradient[:, :, 1]) / 2, gaussian.pull(there.flatten(2))))
        return Pilot(*(torch.cat(parts) for parts in zip(*found, strict=True)))

    @property
    def unexplained(self) -> Tensor:
        """Share of the gradient's odd variation that no multiple of the field explains, (B,); 0 if nothing varies."""
        odd, flips = (t.flatten(1).double() for t in (self.odd, self.flips))
        varied, moved = odd.square().sum(1), flips.square().sum(1)
        shared = (odd * flips).sum(1).square() / moved.clamp_min(torch.finfo(torch.float64).tiny)
        return torch.where(varied > 0, 1 - shared / varied, 0.0)

    def fit(self, expected: Expectation, chosen: Tensor, always: bool) -> Tensor:
        """Weights (b, 2) of the `chosen` examples, whose W₁ is given; `always` with β, whether it pays or not."""
        z, odd, flips = self.z[chosen], self.odd[chosen], self.flips[chosen]
        line = expected.hessian.product(z)
        if expected.hessian.is_thin:  # it is not what the field has on average, and serves as a line alone
            return _weights(odd, line, torch.zeros_like(line), always=False)
        return _weights(odd, line, flips - line, always)


def _weights(odd: Tensor, line: Tensor, rest: Tensor, always: bool) -> Tensor:
    """μ and β of each example, (b, 2); β = 0 where its frozen passes would buy more as further rows."""
    fields = torch.stack([line, rest], 1).flatten(2).double()  # (b, 2, P k)
    wanted = odd.flatten(1).double()
    square = fields @ fields.mT
    ridge = RIDGE * square.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(torch.finfo(torch.float64).tiny)
    system = square + ridge[:, None, None] * torch.eye(2, dtype=torch.float64, device=odd.device)
    right = (fields @ wanted[..., None])[..., 0] + ridge[:, None]
    both = torch.linalg.solve(system, right).clamp(-2, 2)
    both[:, 1].clamp_(0, 1.5)
    alone = right[:, 0] / system[:, 0, 0]
    left = (wanted - (both[:, None] @ fields)[:, 0]).square().sum(1)
    without = (wanted - alone[:, None] * fields[:, 0]).square().sum(1)
    pays = (left * (2 + FLIPS_PER_PAIR) < without * 2) | always
    return torch.where(pays[:, None], both, torch.stack([alone.clamp(-2, 2), torch.zeros_like(alone)], 1))
