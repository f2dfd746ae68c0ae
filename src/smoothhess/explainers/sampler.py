"""The sampler: it evaluates the model at the perturbed inputs of a design and forms the rows of the estimate.

This module calls the model and computes odd and even parts of values and gradients. How many rows are drawn is decided
in `adaptive`; the statistics that are kept of the rows are in `smoothhess.estimate.statistics`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from smoothhess.curvature.activation_hooks import OtherPathError
from smoothhess.curvature.control_variate import FLIPS_PER_PAIR, Control, Sampled, Subtraction
from smoothhess.curvature.one_flip import Kinks
from smoothhess.curvature.rare_flips import RareFlips
from smoothhess.draws.designs import Design, pilot_stack
from smoothhess.draws.gaussian import Gaussian
from smoothhess.draws.tail_strata import TailStrata
from smoothhess.estimate.grouping import Grouping, probes
from smoothhess.estimate.precision_error import upper_ratio
from smoothhess.estimate.statistics import DrawRange, Extension, Rows, Statistics, own_slopes
from smoothhess.estimate.stein_check import moments, rounding_rows, stein_rows
from smoothhess.estimate.tail_rows import TailRows
from smoothhess.explainers.progress import Progress
from smoothhess.linalg.low_rank import Known
from smoothhess.linalg.memory import PERTURBED_INPUTS, reraise_out_of_memory
from smoothhess.model.float_precision import AGREEMENT
from smoothhess.model.gradients import Oracle

LOOKED_AT = 32  # rows that are checked for noise that is lost to rounding when it is added to an input
LEAST_POINTS = 256  # perturbed inputs of a chunk, if the model takes smaller batches
PRECISION_PAIRS = 4  # pairs of points at which gradients of low and full precision are compared
PRECISION_PASSES = 4 * PRECISION_PAIRS
FIRST_COUPLES, ROWS_PER_COUPLE = 16, 8  # couples of draws from tail strata: a number, and one for so many rows
COUPLE_CALLS = 4
ROUNDED_VALUE = 1e-6  # difference of values near zero that is rounding
SAME_GRADIENT = 0.05  # relative difference of gradients of the same function on two machines
CENTRE_PASSES = 2  # passes at the input itself: one separately, one in a batch with the first rows


class FarInputError(RuntimeError):
    """The model raised an error at an input that the draws of a design hardly reach."""


@dataclass(frozen=True, eq=False)
class Unperturbed:
    """The model at the inputs themselves."""

    value: Tensor  # (B,) f(x)
    gradient: Tensor  # (B, *shape) ∇f(x)
    whitened: Tensor  # (B, k) the same gradient


@dataclass(frozen=True, eq=False)
class Sampler:
    """Evaluate rows of a design around the inputs."""

    oracle: Oracle
    inputs: Tensor  # (B, *shape)
    gaussian: Gaussian
    plan: Design
    grouping: Grouping | None
    unperturbed: Unperturbed
    control: Control | None = None  # subtracted from every row
    rare: RareFlips | None = None  # neurons that few rows flip, for the errors
    strata: TailStrata | None = None  # regions that are sampled separately
    extra_passes: float | Tensor = CENTRE_PASSES  # passes that are not at perturbed inputs, per example or (B,)

    @staticmethod
    def start(
        oracle: Oracle, inputs: Tensor, gaussian: Gaussian, plan: Design, grouping: Grouping | None = None
    ) -> Sampler:
        """A sampler without control variate; evaluates the model at the inputs."""
        value, gradient = oracle(inputs, torch.arange(len(inputs), device=inputs.device))
        unperturbed = Unperturbed(value, gradient, gaussian.pull(gradient.flatten(1)))
        return Sampler(oracle, inputs, gaussian, plan, grouping, unperturbed)

    @property
    def rank(self) -> int:
        """Dimension of the draws."""
        return self.gaussian.rank(self.inputs[0].numel())

    def share(self, kinks: Kinks) -> Kinks:
        """The frozen model, in the form that this sampler computes closed forms with."""
        return kinks

    def begin(self, seeds: Sequence[int]) -> Statistics:
        """Statistics without rows."""
        gradient = self.unperturbed.whitened
        empty = Statistics.empty(self.plan.name, seeds, self.unperturbed.value, gradient)
        if self.oracle.precision != "float32":  # the rounding of values exceeds the changes that they are to show
            empty = replace(empty, own_values=torch.zeros_like(empty.own_values))
        empty = replace(empty, rare=self.rare)
        if self.control is not None and self.control.drift is not None:
            drift = self.control.drift
            empty = replace(empty, drift=drift.to(gradient), drift_norm2=drift.square().sum(-1).mean(-1))
        if self.grouping is None:
            return empty
        grouping = self.grouping
        empty = empty.map(lambda v: grouping.sum(self.gaussian.push(v)))
        if self.watched is None:
            return empty
        q = self.watched[:, : grouping.count].double()
        skew = torch.zeros(len(self.inputs), *self.watched.mT.shape[1:], dtype=torch.float64, device=q.device)
        return replace(empty, skew=skew, gram=q @ q.mT)

    @cached_property
    def watched(self) -> Tensor | None:
        """Whitened directions of groups and probes, (1 or B, K + PROBES, k); None for designs of independent rows."""
        if self.grouping is None or self.plan.replicate_rows(self.rank) == 1:
            return None
        q = self.grouping.directions(self.gaussian)
        return torch.cat([q, probes(self.rank, q).expand(len(q), -1, -1)], 1)

    def passes(self, rows: Tensor, index: Tensor) -> Tensor:
        """Total work for `rows` rows of the examples at `index`, in gradient calls, frozen passes included."""
        frozen = 0 if self.control is None else self.control.passes(self.plan, rows, index)
        extra = self.extra_passes[index] if isinstance(self.extra_passes, Tensor) else self.extra_passes
        return rows * self.plan.calls_per_row + frozen + extra + self._tail_passes(rows, index)

    def _tail_passes(self, rows: Tensor, index: Tensor) -> Tensor | float:
        """Passes in tail strata that go with `rows` rows of the examples at `index`."""
        if self.strata is None:
            return 0.0
        each = torch.full_like(rows, COUPLE_CALLS, dtype=torch.float64)
        if self.control is not None:
            each = each + 2 * FLIPS_PER_PAIR * (self.control.flip[index] != 0)
        return each * _couples(rows) * self.strata.exist[index]

    def _grouped(self, chunk: Rows, index: Tensor) -> Rows:
        """Group sums of a chunk, and the antisymmetric half in the directions of `watched`."""
        if self.grouping is None:
            return chunk
        grouping = self.grouping.select(index)
        if self.watched is None:
            return chunk.map(lambda v: grouping.sum(self.gaussian.push(v)))
        # Products with the groups' whitened directions are their sums.
        watched = (self.watched if len(self.watched) == 1 else self.watched[index]).mT
        score, odd = chunk.score @ watched, chunk.odd @ watched
        skew = chunk.score.mT @ odd - chunk.odd.mT @ score
        groups = slice(grouping.count)
        return replace(
            chunk,
            score=score[..., groups].contiguous(),
            odd=odd[..., groups].contiguous(),
            even=chunk.even @ watched[..., groups],
            skew=skew.double() / 2,
        )

    def measure_precision(self, seeds: Sequence[int]) -> Tensor:
        """Upper 95 % limit of the relative error of half-differences of the gradient due to the precision, (B,)."""
        x, found = self.inputs.flatten(1), []
        k, d = self.rank, x.shape[1]
        together = PERTURBED_INPUTS.items(2 * PRECISION_PAIRS * d * x.element_size(), x.device)
        for index in torch.arange(len(x), device=x.device).split(together):
            drawn = pilot_stack([seeds[i] for i in index.tolist()], PRECISION_PAIRS, k, x)
            delta = self.gaussian.colour(drawn)
            points = torch.stack([x[index, None] + delta, x[index, None] - delta], 1)  # (b, 2, pairs, d)
            owner = index.repeat_interleave(2 * PRECISION_PAIRS)
            flat = points.reshape(-1, *self.inputs.shape[1:])
            rounded = self.oracle(flat, owner)[1]
            with self.oracle.exact():
                exact = self.oracle(flat, owner)[1]
            halves = [self.gaussian.pull(g.reshape(points.shape)).diff(dim=1)[:, 0] for g in (rounded, exact)]
            found.append(upper_ratio(halves[0] - halves[1], halves[1]))
        return torch.cat(found)

    def check_same_model(self, stats: Statistics) -> None:
        """Raise if values or gradients at the inputs differ from those in the statistics of the same examples."""
        values, rounding = self.unperturbed.value, AGREEMENT[self.oracle.precision]
        gradients = self.begin([0] * len(values)).gradient
        for i, (value, before) in enumerate(zip(values.tolist(), stats.value.tolist(), strict=True)):
            slack = ROUNDED_VALUE + rounding * abs(before)  # whitened gradients have the unit of values
            if abs(value - before) > slack:
                raise ValueError(
                    f"f(x) of example {i} is {value:.6g}, but the result was made with {before:.6g}. Pass the same "
                    "model, layer and additional_forward_args."
                )
            size = float(stats.gradient[i].norm())
            change = float((gradients[i] - stats.gradient[i]).norm())
            if change > slack + max(SAME_GRADIENT, 2 * rounding) * size:
                raise ValueError(
                    f"the gradient at example {i} is not that of the result: the relative difference is "
                    f"{change / max(size, slack):.0%}. Pass the same model, layer and additional_forward_args, and for "
                    "tokens the same baseline and frozen tokens."
                )

    def extension(self, stats: Statistics, index: Tensor) -> Extension:
        """`stats` of the examples at `index`, to which `extend` adds rows."""
        known = self.group_known(None if self.control is None else self.control.known(index), index)
        return Extension(stats, index, known)

    def extend(self, extension: Extension, rows: int, bar: Progress, check: bool) -> Statistics:
        """Add `rows` further rows, and the draws from tail strata that go with them.

        After an exception the extension has the chunks that were complete. `check` as in `add_rows`.
        """
        self.add_tails(extension, rows)
        return self.add_rows(extension, rows, bar, check)

    def add_rows(self, extension: Extension, rows: int, bar: Progress, check: bool) -> Statistics:
        """Add `rows` further rows; after an exception the extension has the chunks that were complete.

        `check` tests with the first rows that the noise is not lost to rounding, and that f(x) does not depend on the
        other rows of its batch.
        """
        stats, index = extension.stats, extension.index
        if (total := int(stats.n.max()) + rows) > stats.head_rows:
            features = self.inputs[0].numel() if self.grouping is None else None
            stats.refuse_large(total, features)  # before the model is called
        positions = [stats.next_row(b) for b in range(len(stats))]
        positions = positions[:1] if len(set(positions)) == 1 else positions
        subtraction = None if self.control is None else self.control.among(index)
        step = self._chunk_rows(len(index), len(positions))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            chunk = range(start, stop), index, subtraction, check and start == 0
            extension.add(self._grouped(self._evaluate(positions, *chunk), index))
            bar.update((stop - start) * len(index))
        self.oracle.refuse_infinite()  # once per call, since it synchronises with the device
        return extension.statistics()

    def add_tails(self, extension: Extension, rows: int) -> None:
        """Evaluate the draws from tail strata that go with `rows` further rows."""
        if self.strata is None or not rows:
            return
        stats, index = extension.stats, extension.index
        strata = self.strata.select(index)
        chosen = torch.nonzero(strata.exist).reshape(-1)
        if not len(chosen):
            return
        own, sampled, before = index[chosen], strata.select(chosen), int(stats.n.max())
        count = max(1, _couples(before + rows) - (_couples(before) if before else 0))
        streams = [(p.seed, p.start) for p in (stats.next_row(i) for i in chosen.tolist())]
        z, weight = sampled.couples(streams, count)
        try:
            found = self.sampled_at(z.flatten(1, 2), weight.flatten(1, 2), own)
        except FarInputError as error:  # draws of the run: the error is the model's, as for any other draw
            raise error.__cause__ or error from None
        shape = (count, 2)
        score, odd = z * weight[..., None], found.odd.unflatten(1, shape)
        even, value = (t.unflatten(1, shape).mean(2) for t in (found.even, found.value))
        couples = TailRows.of(sampled, score, odd, even, value)
        if self.grouping is not None:
            grouping = self.grouping.select(own)
            couples = couples.map(lambda v: grouping.sum(self.gaussian.push(v)))
        extension.tails = couples.among(chosen, strata)

    def sampled_at(self, z: Tensor, weight: Tensor, index: Tensor) -> Sampled:
        """What is sampled at ±z (b, r, k) of the examples at `index`, without the control variate's expectation.

        It is zero where values or gradients are infinite or NaN: such inputs may be outside of the model's domain.
        """
        subtraction = None if self.control is None else self.control.among(index)
        step = self._chunk_rows(len(index), 1)
        parts = [self._sampled_chunk(z[:, i], weight[:, i], index, subtraction) for i in _slices(z.shape[1], step)]
        found = Sampled(*(torch.cat(some, 1) for some in zip(*parts, strict=True)))
        finite = found.odd.isfinite().all(-1) & found.even.isfinite().all(-1) & found.value.isfinite()
        return found if bool(finite.all()) else found.where_finite(finite)

    def odd_at(self, z: Tensor, index: Tensor) -> Tensor:
        """The odd part of `sampled_at`, (b, r, k), for fewer passes."""
        subtraction = None if self.control is None else self.control.among(index)
        step, found = self._chunk_rows(len(index), 1), []
        for rows in _slices(z.shape[1], step):
            points, value, gradient = self._far_call(z[:, rows], index)
            odd = self.gaussian.pull(_odd(gradient))
            if subtraction is not None:
                with _same_path():
                    odd = subtraction.odd_left_over(self.gaussian, _shaped(points, self.inputs), z[:, rows], odd)
            largest = [torch.linalg.vector_norm(t, torch.inf, -1) for t in (value, odd)]
            finite = torch.maximum(*largest).isfinite()
            found.append(odd if bool(finite.all()) else torch.where(finite[..., None], odd, 0.0))
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def _sampled_chunk(self, z: Tensor, weight: Tensor, index: Tensor, subtraction: Subtraction | None) -> Sampled:
        points, value, gradient = self._far_call(z, index)
        gradient = self.gaussian.pull(gradient)
        even = gradient.mean(2) - self.unperturbed.whitened[index, None]
        risen = value.mean(2) - self.unperturbed.value[index, None]
        sampled = Sampled(_odd(gradient), weight[..., None] * even, weight * risen, weight)
        if subtraction is None:
            return sampled
        with _same_path():
            return subtraction.left_over(self.gaussian, _shaped(points, self.inputs), z, sampled, mirrored=True)

    def _far_call(self, z: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The points x ± δ, (b, r, 2, d), and what the model returns there, which may be infinite or NaN."""
        delta = self.gaussian.colour(z)
        points = self.inputs[index].flatten(1)[:, None, None] + torch.stack([delta, -delta], 2)
        try:
            value, gradient = self._call(points, index, far=True)
        except Exception as error:  # of the model, at inputs that the draws of a design do not reach
            reraise_out_of_memory(error)
            raise FarInputError(f"{type(error).__name__}: {error}") from error
        return points, value, gradient

    def group_known(self, known: Known | None, index: Tensor) -> Known | None:
        """Return the control variate's expectation, summed over groups where there are groups."""
        if known is None or self.grouping is None:
            return known
        grouping = self.grouping.select(index)
        return known.map(lambda rows: grouping.sum(self.gaussian.push(rows)))

    def _chunk_rows(self, examples: int, streams: int) -> int:
        """Number of rows of a chunk of perturbed inputs: about one batch of the model, within the limit of memory.

        A chunk is the unit of progress, and is dropped if it is interrupted. Several streams take a block at least,
        since each chunk computes the orthonormal directions of its blocks.
        """
        points = examples * self.plan.calls_per_row
        most = PERTURBED_INPUTS.items(self.inputs[0].numel() * self.inputs.element_size() * points, self.inputs.device)
        least = 1 if streams == 1 else self.plan.block_rows(self.rank)
        return min(most, max(least, self.oracle.batch_size // points, LEAST_POINTS // points))

    def _evaluate(
        self, positions: Sequence[DrawRange], rows: range, index: Tensor, subtraction: Subtraction | None, check: bool
    ) -> Rows:
        x = self.inputs[index].flatten(1)  # (b, d)
        drawn = self.plan.stacked([(p.seed, p.start + rows.start) for p in positions], len(rows), self.rank, x)
        z, score, weight = drawn.z, drawn.score, drawn.weight  # (1 or b, r, k), likewise, and (1 or b, r)
        delta = self.gaussian.colour(z)[:, :, None]  # (1 or b, r, 1, d)
        if self.plan.mirrored:
            delta = torch.cat([delta, -delta], 2)  # (1 or b, r, 2, d)
        points = x[:, None, None] + delta  # (b, r, 1 or 2, d)
        if check:
            _refuse_lost_noise(points[:, :LOOKED_AT], x, delta[:, :LOOKED_AT])
        value, gradient = self._checked_call(points, x, index) if check else self._call(points, index)
        gradient = self.gaussian.pull(gradient)  # (b, r, 1 or 2, k)
        own_value, own_gradient = self.unperturbed.value[index, None], self.unperturbed.whitened[index, None]
        change = gradient - own_gradient[:, :, None]
        energy = torch.linalg.vector_norm(self.gaussian.push(change), dim=-1).square().mean(2)  # (b, r)
        odd, even = _odd(gradient), change.mean(2)  # (b, r, k)
        turned = odd if self.plan.mirrored else even
        stein = weight[..., None] * stein_rows(z, value - own_value[..., None], turned, even, own_gradient)
        size = self._rounded_size(index, value, own_value, energy, delta)
        rounding = weight[..., None] * rounding_rows(z, size, own_gradient)
        sampled = Sampled(odd, weight[..., None] * even, weight * (value.mean(2) - own_value), weight)
        if subtraction is not None:  # sample the residual
            there = _shaped(points, self.inputs)
            with _same_path():
                sampled = subtraction.left_over(self.gaussian, there, z, sampled, self.plan.mirrored)
        if self.strata is not None:  # which are sampled separately
            sampled = sampled.only(~self.strata.select(index).contain(z))
        if subtraction is not None:
            sampled = sampled.plus(*subtraction.expectation(odd))
        return Rows(
            weight=weight,
            score=score,
            odd=sampled.odd,
            even=sampled.even,
            value_even=sampled.value,
            energy=weight * energy,
            **own_slopes(score, sampled.odd, weight, self.rank),
            stein=moments(stein, rounding),
            square_sum=(weight * (value - own_value[..., None]).double().square().mean(2)).sum(1),
        )

    def _rounded_size(self, index: Tensor, value: Tensor, own: Tensor, energy: Tensor, delta: Tensor) -> Tensor:
        """Upper bound of |f| + |∇f||x + δ|, to which the rounding errors of values are proportional, (b, r)."""
        norm = torch.linalg.vector_norm
        slope = norm(self.unperturbed.gradient[index].flatten(1), dim=1)[:, None] + (2 * energy).sqrt()
        reach = norm(self.inputs[index].flatten(1), dim=1)[:, None] + norm(delta[:, :, 0], dim=-1)
        return torch.maximum(value.abs().amax(2), own.abs()) + slope * reach

    def _call(self, points: Tensor, index: Tensor, far: bool = False) -> tuple[Tensor, Tensor]:
        """Values (b, r, s) and gradients (b, r, s, d) at points (b, r, s, d); those of `far` points may be infinite."""
        b, r, s, d = points.shape
        owner = index.repeat_interleave(r * s)
        evaluate = self.oracle.unchecked if far else partial(self.oracle, wait=False)
        value, gradient = evaluate(points.reshape(-1, *self.inputs.shape[1:]), owner)
        return value.reshape(b, r, s), gradient.reshape(b, r, s, d)

    def _checked_call(self, points: Tensor, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """As `_call`; raises ValueError if f(x) depends on the other rows of its batch.

        x is evaluated again in a batch with perturbed inputs. Mirror images are evaluated in a separate call: a batch
        that is symmetric about x could hide the dependence.
        """
        value, gradient = self._call(torch.cat([x[:, None, None], points[:, :, :1]], 1), index)
        tolerance = AGREEMENT[self.oracle.precision] if value.dtype == torch.float32 else 1e-8
        _refuse_random(value[..., 0], self.unperturbed.value[index], tolerance)
        value, gradient = value[:, 1:], gradient[:, 1:]
        if points.shape[2] == 1:
            return value, gradient
        mirrored = self._call(points[:, :, 1:], index)
        return torch.cat([value, mirrored[0]], 2), torch.cat([gradient, mirrored[1]], 2)


def _couples(rows: Any) -> Any:
    """Number of couples of draws from tail strata that go with the first `rows` rows, an int or a tensor."""
    return FIRST_COUPLES + (rows + ROWS_PER_COUPLE - 1) // ROWS_PER_COUPLE


@contextmanager
def _same_path() -> Iterator[None]:
    """Add the remedy to the error of a frozen pass."""
    try:
        yield
    except OtherPathError as error:
        raise OtherPathError(f"the model takes another path for larger batches: {error} Pass control=None.") from error


def _slices(count: int, step: int) -> list[slice]:
    return [slice(i, i + step) for i in range(0, count, step)]


def _odd(pairs: Tensor) -> Tensor:
    """Half-difference over dimension 2 of a mirrored pair; the value itself for designs without mirror images."""
    return (pairs[:, :, 0] - pairs[:, :, 1]) / 2 if pairs.shape[2] == 2 else pairs[:, :, 0]


def _shaped(points: Tensor, inputs: Tensor) -> Tensor:
    """The points x + δ of (b, r, s, d) in the shape of the inputs, (b, r, *shape)."""
    return points[:, :, 0].reshape(*points.shape[:2], *inputs.shape[1:])


def _refuse_random(value: Tensor, own: Tensor, tolerance: float) -> None:
    change = (value[:, 0] - own).abs()
    if (change > tolerance * value.abs().amax(1)).any():
        raise ValueError(
            f"f(x) changes by up to {float(change.max()):.3g} when the same input is evaluated in another batch. "
            "The model is random or mixes the rows of a batch (dropout, batch statistics, noise): make each output "
            "depend on its own input only, for example with model.eval()."
        )


def _refuse_lost_noise(points: Tensor, x: Tensor, delta: Tensor) -> None:
    kept = points - x[:, None, None]  # (b, r, s, d)
    size = delta.square().sum((1, 2)).sqrt()  # of each feature's noise, (1 or b, d)
    share = (kept - delta).square().sum((1, 2)).sqrt() / size.clamp_min(torch.finfo(x.dtype).tiny)
    lost = torch.where(size > 0, share, 0.0).max()
    if lost > 0.1:
        raise ValueError(
            f"sigma is too small for {x.dtype}: {float(lost):.0%} of the noise is lost to rounding when it is added to "
            "an input feature. Use a larger sigma, or float64 inputs and model."
        )
