"""The sampler: it evaluates the model at the perturbed inputs of a design and forms the rows of the estimate.

This module calls the model and computes odd and even parts of values and gradients. How many rows are drawn is decided
in `adaptive`; the statistics that are kept of the rows are in `smoothhess.estimate.statistics`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from tqdm import tqdm

from smoothhess.curvature.control_variate import CONTROL_LIMIT, THIN_PROBES, Control, Pilot, Subtraction, pilot_passes
from smoothhess.curvature.frozen_network import NoKinksError
from smoothhess.curvature.one_flip import Kinks
from smoothhess.curvature.unknown_operations import KINKED, SMOOTH, unknown_operations
from smoothhess.draws.designs import Design, pilot_stack, tau_rows
from smoothhess.draws.gaussian import Gaussian
from smoothhess.estimate.grouping import Grouping, probes
from smoothhess.estimate.statistics import DrawRange, Rows, Statistics, own_slopes
from smoothhess.estimate.stein_check import moments, rounding_rows, stein_rows
from smoothhess.linalg.low_rank import Known
from smoothhess.linalg.memory import is_out_of_memory
from smoothhess.model.float_precision import AGREEMENT
from smoothhess.model.gradients import Oracle

CHUNK_BYTES, CHUNKS_ON_CUDA = 1 << 27, 64  # size of a chunk of perturbed inputs: bytes, or this fraction of a GPU
LOOKED_AT = 32  # rows that are checked for noise that is lost to rounding when it is added to an input
NEVER = 1e-6  # units are taken to never flip if the probability that any of them flips is below this
CERTAIN_PASSES = 2048  # maximum passes per example to compute the margins of its units if no draw has flipped one
PRECISION_PAIRS = 4  # pairs of points at which gradients of low and full precision are compared


class OtherPathError(ValueError):
    """The frozen model makes other activation calls than those that were recorded."""


@dataclass(eq=False)
class Sampler:
    """Evaluate rows of a design around the inputs."""

    oracle: Oracle
    inputs: Tensor  # (B, *shape)
    gaussian: Gaussian
    plan: Design
    grouping: Grouping | None
    extra_passes: float = 0  # passes per example that are not at perturbed inputs
    control: Control | None = None
    tau_probes: int | None = None  # random directions from which τ is estimated; None: τ is exact
    thin_rank: int = 8  # rank of the closed form where the dimensions are too many for a matrix
    checked: bool = False  # whether f(x) was found not to depend on the other rows of its batch
    value: Tensor | None = None  # (B,) f(x)
    plain_gradient: Tensor | None = None  # (B, *shape) ∇f(x)
    gradient: Tensor | None = None  # (B, k) ∇f(x), whitened
    certain: dict[tuple[int, bool], bool] = field(default_factory=dict)  # results of `no_kinks`

    def begin(self, seeds: Sequence[int]) -> Statistics:
        """Evaluate the unperturbed inputs and return statistics without rows."""
        value, gradient = self.unperturbed()
        empty = Statistics.empty(self.plan.name, seeds, value, gradient)
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
        skew = torch.zeros(len(value), self.watched.shape[2], self.watched.shape[1], device=q.device).double()
        return replace(empty, skew=skew, gram=q @ q.mT)

    @cached_property
    def watched(self) -> Tensor | None:
        """Whitened directions of groups and probes, (1 or B, K + PROBES, k); None for designs of independent rows."""
        k = self.gaussian.rank(self.inputs[0].numel())
        if self.grouping is None or self.plan.replicate_rows(k) == 1:
            return None
        q = self.grouping.directions(self.gaussian)
        return torch.cat([q, probes(k, q).expand(len(q), -1, -1)], 1)

    def see_kinks(self, most: float) -> Kinks:
        """The frozen model; raises NoKinksError if it cannot be recorded, or would cost more than `most` passes."""
        value, _ = self.unperturbed()
        gradient = self.plain_gradient
        if self.oracle.precision != "float32":
            with self.oracle.exact():
                value, gradient = self.oracle(self.inputs, torch.arange(len(self.inputs), device=self.inputs.device))
            self.extra_passes += 1
        assert gradient is not None
        try:
            kinks = Kinks.see(self.oracle, self.inputs, value, gradient)
        except (RuntimeError, TypeError, IndexError) as error:  # the model itself runs, so freezing it fails
            if is_out_of_memory(error):
                raise
            raise NoKinksError(f"freezing the activations fails ({error})") from error
        price = self.price(kinks) + pilot_passes(self.gaussian.rank(self.inputs[0].numel()))
        if price > most:
            raise NoKinksError(f"the closed form would take {price:.0f} passes, more than the budget allows")
        self.extra_passes += 1  # one frozen pass at x
        return kinks

    def price(self, kinks: Kinks) -> float:
        """Number of passes per example for the closed form."""
        k = self.gaussian.rank(self.inputs[0].numel())
        if k > CONTROL_LIMIT:
            return kinks.thin_price(self.thin_rank, min(self.tau_probes, k) if self.tau_probes else THIN_PROBES)
        return kinks.price(k, self.tau_probes)

    def pilot(self, kinks: Kinks, seeds: Sequence[int]) -> Pilot:
        """Pilot draws, which the weights of the control variate are fitted to."""
        self.extra_passes += pilot_passes(self.gaussian.rank(self.inputs[0].numel()))
        return Pilot.draw(self.oracle, self.gaussian, kinks, seeds)

    def take_control(
        self,
        kinks: Kinks,
        weights: Pilot | Tensor,
        chosen: Tensor | None = None,
        always: bool = True,
        layers: bool = False,
    ) -> None:
        """Set the control variate that is subtracted from every row.

        Its weights (B, 2) are given, or fitted to pilot draws. Weights of examples that are not `chosen` are zero.
        """
        everyone = torch.arange(len(self.inputs), device=self.inputs.device)
        if isinstance(weights, Tensor):
            chosen = torch.nonzero(weights.any(1)).reshape(-1).to(everyone)
        chosen = everyone if chosen is None else chosen
        if not len(chosen):  # the control variate is worth its cost for no example
            return
        k, probes = self.gaussian.rank(self.inputs[0].numel()), None
        if k > CONTROL_LIMIT:
            exact = self.tau_probes is not None and self.tau_probes >= k
            drawn = tau_rows(self.thin_rank + (0 if exact else self.tau_probes or THIN_PROBES), k, self.inputs)
            probes = None if exact else drawn[self.thin_rank :]
            expected = kinks.thin_expectation(self.gaussian, probes, drawn[: self.thin_rank], chosen)
        else:
            if self.tau_probes is not None:
                probes = tau_rows(self.tau_probes, k, self.inputs)
            expected = kinks.expectation(self.gaussian, layers, probes, chosen)
        if isinstance(weights, Pilot):
            fitted = weights.fit(expected, chosen, always)
            weights = fitted.new_zeros(len(everyone), 2).index_copy(0, chosen, fitted)
        if len(chosen) < len(everyone):
            expected = expected.spread(chosen, len(everyone))
        self.control = Control(kinks, expected, *weights.to(everyone.device, torch.float64).unbind(1))

    def passes(self, rows: Tensor, index: Tensor) -> Tensor:
        """Total work for `rows` rows of the examples at `index`, in gradient calls, frozen passes included."""
        frozen = 0 if self.control is None else self.control.passes(self.plan, rows, index)
        return rows * self.plan.calls_per_row + frozen + self.extra_passes

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

    def unperturbed(self) -> tuple[Tensor, Tensor]:
        """Evaluate the values and gradients at the inputs themselves."""
        if self.value is None or self.gradient is None:
            owner = torch.arange(len(self.inputs), device=self.inputs.device)
            self.value, self.plain_gradient = self.oracle(self.inputs, owner)
            self.gradient = self.gaussian.pull(self.plain_gradient.flatten(1))
            self.extra_passes += 1
        return self.value, self.gradient

    def no_kinks(self, index: Tensor, unmoved: Tensor) -> Tensor:
        """Whether draws of each example at `index` cannot cross a kink, (b,), given that no sampled draw did.

        They cannot if all recorded operations are smooth (polynomial, where the gradient is `unmoved`), or if all units
        that could flip were recorded and their flip probabilities add up to less than NEVER.
        """
        found = torch.zeros(len(index), dtype=torch.bool, device=index.device)
        for still in (False, True):
            chosen = [i for i, u in zip(index.tolist(), unmoved.tolist(), strict=True) if u == still]
            missing = torch.tensor([i for i in chosen if (i, still) not in self.certain], device=index.device)
            if len(missing):
                new = self._has_no_kinks(missing.long(), frozenset() if still else SMOOTH)
                self.certain.update(((i, still), c) for i, c in zip(missing.tolist(), new.tolist(), strict=True))
            own = torch.tensor([self.certain[i, still] for i in chosen], dtype=torch.bool, device=index.device)
            found[unmoved == still] = own
        return found

    def _has_no_kinks(self, index: Tensor, harmless: frozenset[str]) -> Tensor:
        oracle, inputs, everyone = self.oracle.select(index), self.inputs[index], torch.arange(len(index))
        value, _ = self.unperturbed()
        no = torch.zeros(len(index), dtype=torch.bool, device=index.device)
        owner = everyone.to(index.device)

        def forward(x: Tensor) -> Tensor:
            return oracle.pick(oracle.bound(owner)(x), owner)

        self.extra_passes += 1
        try:
            bent = set(unknown_operations(forward, inputs, oracle.forward_func)) - harmless
            if not bent:
                return ~no
            if bent - KINKED or self.plain_gradient is None or self.oracle.precision != "float32":
                return no
            kinks = Kinks.see(oracle, inputs, value[index], self.plain_gradient[index])
            if kinks.network.unmodelled or kinks.price(k := self.gaussian.rank(inputs[0].numel())) > CERTAIN_PASSES:
                return no
            self.extra_passes += 1 + k / 2
            probability, curvature = kinks.chances(self.gaussian)
        except (RuntimeError, TypeError, IndexError, ValueError) as error:  # its operations cannot be recorded
            if is_out_of_memory(error):
                raise
            return no
        assert self.gradient is not None
        size = torch.linalg.vector_norm(self.gradient[index].double(), dim=1)
        return (probability < NEVER) & (curvature <= torch.finfo(inputs.dtype).eps * size)

    def measure_precision(self, seeds: Sequence[int]) -> Tensor:
        """Relative error of half-differences of the gradient due to the precision, (B,)."""
        x, found = self.inputs.flatten(1), []
        k, d = self.gaussian.rank(x.shape[1]), x.shape[1]
        together = max(1, CHUNK_BYTES // (2 * PRECISION_PAIRS * d * x.element_size()))
        for index in torch.arange(len(x), device=x.device).split(together):
            drawn = pilot_stack([seeds[i] for i in index.tolist()], PRECISION_PAIRS, k, x)
            delta = self.gaussian.colour(drawn)
            points = torch.stack([x[index, None] + delta, x[index, None] - delta], 1)  # (b, 2, pairs, d)
            owner = index.repeat_interleave(2 * PRECISION_PAIRS)
            flat = points.reshape(-1, *self.inputs.shape[1:])
            rounded = self.oracle(flat, owner)[1]
            with self.oracle.exact():
                exact = self.oracle(flat, owner)[1]
            halves = [self.gaussian.pull(g.reshape(points.shape)).diff(dim=1).flatten(1) for g in (rounded, exact)]
            size = halves[1].norm(dim=1).clamp_min(torch.finfo(x.dtype).tiny)
            found.append((halves[0] - halves[1]).norm(dim=1) / size)
        self.extra_passes += 4 * PRECISION_PAIRS
        return torch.cat(found)

    def check_same_model(self, stats: Statistics, index: Tensor) -> None:
        """Raise if f(x) differs from the value in the statistics."""
        value, _ = self.unperturbed()
        if not torch.allclose(value[index], stats.value[index], rtol=AGREEMENT[self.oracle.precision], atol=1e-6):
            raise ValueError(
                f"f(x) of example {int(index)} is {float(value[index]):.6g}, but the result was made with "
                f"{float(stats.value[index]):.6g}. Pass the same model, layer and additional_forward_args."
            )

    def extend(self, stats: Statistics, rows: int, index: Tensor, bar: tqdm) -> Statistics:
        """`stats` of the examples at `index` with `rows` further rows."""
        if (total := int(stats.n.max()) + rows) > stats.head_rows:
            features = self.inputs[0].numel() if self.grouping is None else None
            stats.refuse_large(total, features)  # before the model is called
        known = None if self.control is None else self.control.known(index)
        longer = stats.extended(self._chunks(stats, rows, index, bar), self.group_known(known, index))
        self.oracle.refuse_infinite()  # once per call, since it synchronises with the device
        return longer

    def group_known(self, known: Known | None, index: Tensor) -> Known | None:
        """Return the control variate's expectation, summed over groups where there are groups."""
        if known is None or self.grouping is None:
            return known
        grouping = self.grouping.select(index)
        return known.map(lambda rows: grouping.sum(self.gaussian.push(rows)))

    def _chunks(self, stats: Statistics, rows: int, index: Tensor, bar: tqdm) -> Iterator[Rows]:
        example_bytes = self.inputs[0].numel() * self.inputs.element_size() * self.plan.calls_per_row
        room = CHUNK_BYTES
        if self.inputs.is_cuda:
            room = max(room, torch.cuda.get_device_properties(self.inputs.device).total_memory // CHUNKS_ON_CUDA)
        step = max(1, room // (example_bytes * len(index)))
        positions = [stats.next_row(b) for b in range(len(stats))]
        positions = positions[:1] if len(set(positions)) == 1 else positions
        subtraction = None if self.control is None else self.control.among(index)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            yield self._grouped(self._evaluate(positions, start, stop, index, subtraction), index)
            bar.update((stop - start) * len(index))

    def _evaluate(
        self, positions: Sequence[DrawRange], start: int, stop: int, index: Tensor, subtraction: Subtraction | None
    ) -> Rows:
        x = self.inputs[index].flatten(1)  # (b, d)
        k = self.gaussian.rank(x.shape[1])
        drawn = self.plan.stacked([(p.seed, p.start + start) for p in positions], stop - start, k, x)
        z, score, weight = drawn.z, drawn.score, drawn.weight  # (1 or b, r, k), likewise, and (1 or b, r)
        delta = self.gaussian.colour(z)[:, :, None]  # (1 or b, r, 1, d)
        if self.plan.mirrored:
            delta = torch.cat([delta, -delta], 2)  # (1 or b, r, 2, d)
        points = x[:, None, None] + delta  # (b, r, 1 or 2, d)
        first = not self.checked
        if first:
            _refuse_lost_noise(points[:, :LOOKED_AT], x, delta[:, :LOOKED_AT])
        value, gradient = self._call(points, x, index, with_centre=first)
        gradient = self.gaussian.pull(gradient)  # (b, r, 1 or 2, k)
        own_value, own_gradient = self.unperturbed()
        own_value, own_gradient = own_value[index, None], own_gradient[index, None]  # (b, 1), (b, 1, k)
        change = gradient - own_gradient[:, :, None]
        energy = torch.linalg.vector_norm(self.gaussian.push(change), dim=-1).square().mean(2)  # (b, r)
        odd, even = _odd(gradient), change.mean(2)  # (b, r, k)
        turned = odd if self.plan.mirrored else even
        stein = weight[..., None] * stein_rows(z, value - own_value[..., None], turned, even, own_gradient)
        size = self._rounded_size(index, value, own_value, energy, delta)
        rounding = weight[..., None] * rounding_rows(z, size, own_gradient)
        even = weight[..., None] * even
        if subtraction is not None:  # sample the residual
            there = points[:, :, 0].reshape(len(x), -1, *self.inputs.shape[1:])
            rows = odd, even, weight
            try:
                odd, even = subtraction.left_over(self.gaussian, there, z, rows, self.plan.mirrored)
            except ValueError as error:
                raise OtherPathError(
                    f"the model takes another path for larger batches: {error} Pass control=None."
                ) from error
        return Rows(
            weight=weight,
            score=score,
            odd=odd,
            even=even,
            value_even=weight * (value.mean(2) - own_value),
            energy=weight * energy,
            **own_slopes(score, odd, weight, k),
            stein=moments(stein, rounding),
        )

    def _rounded_size(self, index: Tensor, value: Tensor, own: Tensor, energy: Tensor, delta: Tensor) -> Tensor:
        """Upper bound of |f| + |∇f||x + δ|, to which the rounding errors of values are proportional, (b, r)."""
        assert self.plain_gradient is not None
        norm = torch.linalg.vector_norm
        slope = norm(self.plain_gradient[index].flatten(1), dim=1)[:, None] + (2 * energy).sqrt()
        reach = norm(self.inputs[index].flatten(1), dim=1)[:, None] + norm(delta[:, :, 0], dim=-1)
        return torch.maximum(value.abs().amax(2), own.abs()) + slope * reach

    def _call(self, points: Tensor, x: Tensor, index: Tensor, with_centre: bool) -> tuple[Tensor, Tensor]:
        """Values (b, r, s) and gradients (b, r, s, d) at points (b, r, s, d)."""
        if not with_centre:
            return self._flat_call(points, index)
        # f(x) must not depend on the other rows of the batch, so x is evaluated again in a batch with perturbed inputs.
        # Mirror images are evaluated in a separate call: a batch that is symmetric about x could hide the dependence.
        value, gradient = self._flat_call(torch.cat([x[:, None, None], points[:, :, :1]], 1), index)
        self._refuse_random(value[..., 0], index)
        self.extra_passes += 1
        self.checked = True
        value, gradient = value[:, 1:], gradient[:, 1:]
        if points.shape[2] == 1:
            return value, gradient
        mirrored = self._flat_call(points[:, :, 1:], index)
        return torch.cat([value, mirrored[0]], 2), torch.cat([gradient, mirrored[1]], 2)

    def _flat_call(self, points: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        b, r, s, d = points.shape
        owner = index.repeat_interleave(r * s)
        value, gradient = self.oracle(points.reshape(-1, *self.inputs.shape[1:]), owner, wait=False)
        return value.reshape(b, r, s), gradient.reshape(b, r, s, d)

    def _refuse_random(self, value: Tensor, index: Tensor) -> None:
        alone, _ = self.unperturbed()
        tolerance = AGREEMENT[self.oracle.precision] if value.dtype == torch.float32 else 1e-8
        change = (value[:, 0] - alone[index]).abs()
        if (change > tolerance * value.abs().amax(1)).any():
            raise ValueError(
                f"f(x) changes by up to {float(change.max()):.3g} when the same input is evaluated in another batch. "
                "The model is random or mixes the rows of a batch (dropout, batch statistics, noise): make each output "
                "depend on its own input only, for example with model.eval()."
            )


def _odd(pairs: Tensor) -> Tensor:
    """Half-difference over dimension 2 of a mirrored pair; the value itself for designs without mirror images."""
    return (pairs[:, :, 0] - pairs[:, :, 1]) / 2 if pairs.shape[2] == 2 else pairs[:, :, 0]


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
