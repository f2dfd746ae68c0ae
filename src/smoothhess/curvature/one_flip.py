"""The closed-form one-flip Hessian of a network.

A ReLU network has ∇²f = Σ_k u_k · jump_k · Dirac(z_k − knot_k) · J_k J_kᵀ over neurons k, with pre-activation z_k, its
input gradient J_k, and u_k = ∂f/∂(output of neuron k); for a smooth activation the Dirac is replaced by a''(z_k). With
slopes and sensitivities frozen at x, each term can be averaged over the Gaussian: whitened, with j_k = LᵀJ_k and
τ_k = |j_k|,

    W₁ = Σ_k u_k E[a''(z_k + τ_k ξ)] j_k j_kᵀ,      Γ₁ = Σ_k u_k (E[a'(z_k + τ_k ξ)] − a'(z_k)) j_k,
    v₁ = Σ_k u_k (E[a(z_k + τ_k ξ)] − a(z_k)).

They are exactly the Stein expectations of the field g̃(δ) = Σ_k u_k (a'(z_k + J_kδ) − a'(z_k)) J_k and of its potential.
Sampling ∇f − g̃ instead of ∇f and adding W₁, Γ₁ back is unbiased for every network, and has far less variance if few
neurons flip at the same time. The frozen network is in `frozen_network`, the field g̃ at given points in `flip_field`;
the weights of the control variate are fitted in `control_variate`; neurons are selected in `neuron_selection`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smoothhess.curvature.frozen_network import FrozenNetwork, NoKinksError, sum_of_squares
from smoothhess.curvature.slope_change_moments import Moments, moments, second_derivative
from smoothhess.draws.gaussian import Gaussian
from smoothhess.draws.seeding import fixed_normal
from smoothhess.linalg.gram import symmetric_product, weighted_gram
from smoothhess.linalg.low_rank import Known
from smoothhess.linalg.memory import NEURON_GRADIENTS, in_batches
from smoothhess.linalg.orthonormal import orthonormal
from smoothhess.model.gradients import Oracle

DRIFT_PROBES, DRIFT_PARTS = 8, 4  # random vectors, and subsets of the probes, to measure the error of an estimated τ


@dataclass(frozen=True, eq=False)
class Expectation:
    """The whitened expectation of the field g̃ of B examples."""

    hessian: Known  # W₁, in the precision of the inputs
    gradient: Tensor  # (B, k) Γ₁, float64
    passes: Tensor  # (B,) that it took, float64
    layers: tuple[Tensor, ...] = ()  # (B, k, k) of each call if requested; their sum is W₁
    drift: Tensor | None = None  # (B, R, k) D v for random v, with D the error of W₁ if τ was estimated
    value: Tensor | None = None  # (B,) v₁, float64; None if W₁ is low-rank

    @staticmethod
    def cat(parts: Sequence[Expectation]) -> Expectation:
        """Concatenate."""
        if len(parts) == 1:
            return parts[0]
        split = [torch.stack(p.layers) for p in parts if p.layers]  # (calls, b, k, k) each
        return Expectation(
            Known.cat([p.hessian for p in parts]),
            torch.cat([p.gradient for p in parts]),
            torch.cat([p.passes for p in parts]),
            tuple(torch.cat(split, 1)) if split else (),
            _joined([p.drift for p in parts]),
            _joined([p.value for p in parts]),
        )

    def spread(self, index: Tensor, count: int) -> Expectation:
        """Scatter to `count` examples: these examples are at `index`, and the others are zero."""

        def among(t: Tensor) -> Tensor:
            return t.new_zeros(count, *t.shape[1:]).index_copy(0, index, t)

        factor = None if self.hessian.factor is None else among(self.hessian.factor)
        drift = None if self.drift is None else among(self.drift)
        hessian = Known(among(self.hessian.core), factor)
        value = None if self.value is None else among(self.value)
        layers = tuple(map(among, self.layers))
        return Expectation(hessian, among(self.gradient), among(self.passes), layers, drift, value)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


@dataclass(frozen=True, eq=False)
class Kinks:
    """The curvature of the neurons of a frozen network, averaged over a Gaussian."""

    network: FrozenNetwork
    selection: Tensor | None = None  # (B, units) neurons whose sensitivity was not set to zero; None: all

    @staticmethod
    def see(oracle: Oracle, inputs: Tensor, value: Tensor, gradient: Tensor, warn: bool = True) -> Kinks:
        """The kinks of the model at the inputs; raises NoKinksError if it cannot be frozen, as `FrozenNetwork.see`."""
        return Kinks(FrozenNetwork.see(oracle, inputs, value, gradient, warn))

    def price(self, k: int, probes: int | None = None) -> float:
        """Passes per example that `expectation` takes in k dimensions with all neurons."""
        if probes is not None:  # the bias is that of DRIFT_PARTS + 1 products with each of DRIFT_PROBES directions
            return (k / 2 if self.is_kept(k) else k) + probes / 2 + DRIFT_PROBES * (1 / 2 + DRIFT_PARTS + 1)
        return k / 2 if self.is_kept(k) else 1.5 * k

    def prices(self, k: int, probes: int | None = None) -> Tensor:
        """Passes that `expectation` takes in k dimensions, (B,) float64."""
        price = torch.full_like(self.network.everyone, self.price(k, probes), dtype=torch.float64)
        return price if self.selection is None else torch.where(self.selection.all(1), price, k / 2)

    def is_kept(self, k: int) -> bool:
        """Whether the j_k of all neurons of an example are kept; otherwise W₁ takes one more pass per column."""
        return self.network.neurons <= self.most_kept(k)

    def most_kept(self, k: int) -> int:
        """Largest number of neurons of an example whose j_k are kept."""
        inputs = self.network.inputs
        return NEURON_GRADIENTS.on(inputs.device) // (k * inputs.element_size())

    # --- selection of neurons and examples ------------------------------------------------------------------------

    def only(self, mask: Tensor) -> Kinks:
        """With the neurons in the mask (B, units); the sensitivities of the others are set to zero.

        W₁ and the field at given points consist of the same neurons, so that W₁ is still the expectation of the field.
        """
        parts = zip(self.network.sensitivity, self.network.per_call(mask), strict=True)
        sensitivity = tuple(torch.where(part.reshape(u.shape), u, 0.0) for u, part in parts)
        return Kinks(replace(self.network, sensitivity=sensitivity), mask)

    def examples(self, index: Tensor) -> Kinks:
        """The examples at `index`, without a selection if it is of all neurons."""
        selection = None if self.selection is None else self.selection[index]
        return Kinks(self.network.select(index), None if selection is None or bool(selection.all()) else selection)

    # --- dense closed form ----------------------------------------------------------------------------------------

    def expectation(
        self, gaussian: Gaussian, layers: bool = False, probes: Tensor | None = None, index: Tensor | None = None
    ) -> Expectation:
        """W₁ and Γ₁ of all examples or of those at `index`; `layers` adds the contribution of each layer.

        τ is exact unless white `probes` (n, k) are given to estimate it: τ² ≈ mean (j·v)² has a relative error of about
        √(2/n), which biases W₁; `drift` measures the bias along random vectors.
        """
        everyone = self.network.everyone if index is None else index
        places = torch.arange(len(everyone), device=everyone.device)
        if self.selection is None:
            return self._batched(gaussian, layers, probes, everyone)
        whole = self.selection[everyone].all(1)
        groups = [group for group in (places[~whole], places[whole]) if len(group)]
        parts = [self._batched(gaussian, layers, probes, everyone[group]) for group in groups]
        return parts[0] if len(parts) == 1 else Expectation.cat(parts).spread(torch.cat(groups), len(everyone))

    def _batched(self, gaussian: Gaussian, layers: bool, probes: Tensor | None, index: Tensor) -> Expectation:
        """`expectation` of the examples at `index`, all or none of which have all neurons."""
        network, k = self.network, gaussian.rank(self.network.inputs[0].numel())
        neurons = network.neurons if self.selection is None else int(self.selection[index].sum(1).max())
        batch = NEURON_GRADIENTS.items(neurons * k * network.inputs.element_size(), network.inputs.device)

        def some(examples: slice) -> Expectation:
            owner = index[examples]
            return self.examples(owner)._expectation(gaussian, owner, layers, probes)

        def fewer(n: int) -> bool:
            nonlocal batch
            if n == 1:  # reduce the number of examples, then the batch size
                return network.oracle.take_fewer(network.oracle.batch_size)
            batch = -(-n // 2)
            return True

        return Expectation.cat([*in_batches(some, len(index), lambda _: batch, fewer)])

    def _expectation(self, gaussian: Gaussian, owner: Tensor, layers: bool, probes: Tensor | None) -> Expectation:
        network, kept = self.network, None
        k = gaussian.rank(network.inputs[0].numel())
        passes = self.prices(k, None if probes is None else len(probes))
        squares, drift = None, None
        if probes is not None:
            moved = network.moves(gaussian, probes, owner).double().square()
            squares = moved.mean(1)
            drift = self._drift(gaussian, owner, squares, [part.mean(1) for part in moved.chunk(DRIFT_PARTS, 1)])
        if self.selection is not None:  # those of an example with fewer neurons than others are filled up
            count = int(self.selection.sum(1).max())
            kept = self.selection.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :count]
        if kept is not None or self.is_kept(k):
            parts, lengths = [], torch.zeros(len(owner), network.neurons, dtype=torch.float64, device=owner.device)
            for part in network.columns(gaussian, owner):  # (b, c, units); its squares are summed while it is cached
                parts.append(part if kept is None else part.gather(2, kept[:, None].expand(-1, part.shape[1], -1)))
                lengths += sum_of_squares(part)
            bend, lean, rise = self.weights((lengths if squares is None else squares).sqrt())
            if kept is not None:
                bend, lean, lengths = (t.gather(1, kept) for t in (bend, lean, lengths))
            gradient = torch.cat([(part @ lean[..., None].to(part))[..., 0] for part in parts], 1).double()
            if not (layers or self.has_maps or parts[0].is_cuda):
                return Expectation(Known(self._summed(parts, bend, lengths)), gradient, passes, (), drift, rise)
            j = torch.cat(parts, 1)  # (b, k, units)
            weighted = self.curved(j, bend)
            if self.has_maps:
                rise = rise + self._of_maps((j.double() * weighted.double()).sum(1))
            split = zip(network.per_call(j), network.per_call(weighted), strict=True) if layers else ()
            each = tuple(c @ w.mT for c, w in split)
            return Expectation(Known(symmetric_product(j, weighted)), gradient, passes, each, drift, rise)
        squares = network.squares(gaussian, owner) if squares is None else squares
        bend, lean, rise = self.weights(squares.sqrt())
        count = len(network.bent) if layers else 1
        passes = passes + (count - 1) * k / 2  # a backward pass for each layer
        hessians, gradient = network.inputs.new_zeros(count, len(owner), k, k), []

        def curve(moves: Tensor) -> Iterable[Tensor]:
            weighted = self.curved(moves, bend)
            if self.has_maps:
                rises.append(self._of_maps((moves.double() * weighted.double()).sum(1)))
            return (self._only(weighted, layer) for layer in range(count)) if layers else [weighted]

        start, rises = 0, [rise]
        for unit in network.unit_directions(gaussian, owner):
            moves, products = network.turned(gaussian, unit, owner, curve)
            stop = start + len(unit)
            hessians[:, :, start:stop] = torch.stack([gaussian.pull(product) for product in products])
            gradient.append((moves @ lean[..., None].to(moves))[..., 0])
            start = stop
        hessians = (hessians + hessians.mT) / 2
        found = Known(hessians.sum(0)), torch.cat(gradient, 1).double()
        return Expectation(*found, passes, tuple(hessians) if layers else (), drift, torch.stack(rises).sum(0))

    def _summed(self, parts: Sequence[Tensor], bend: Tensor, lengths: Tensor) -> Tensor:
        """Σ_k bend_k j_k j_kᵀ, (b, k, k), from chunks (b, c, units) of the j_k and their squared lengths.

        Neurons that hardly any draw flips are left out: their terms together are smaller than the rounding of the sum
        of all sizes.
        """
        size = bend.abs() * lengths  # Frobenius norm of each term
        least = torch.finfo(parts[0].dtype).eps / size.shape[1] * size.sum(1, keepdim=True)
        found = []
        for i, counts in enumerate(size > least):
            chosen = torch.nonzero(counts).reshape(-1)
            j = torch.cat([part[i].index_select(1, chosen) for part in parts])
            found.append(weighted_gram(j, bend[i, chosen]))
        return torch.stack(found)

    @property
    def has_maps(self) -> bool:
        """Whether there are calls that mix their inputs."""
        return any(call.kind == "map" for call in self.network.calls)

    def _of_maps(self, curvature: Tensor) -> Tensor:
        """Half the sum of (b, units) over the neurons of calls that mix their inputs, (b,)."""
        parts = zip(self.network.calls, self.network.per_call(curvature), strict=True)
        return sum((part.sum(1) / 2 for call, part in parts if call.kind == "map"), torch.zeros_like(curvature[:, 0]))

    def _drift(self, gaussian: Gaussian, owner: Tensor, squares: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """The error of W₁ from `squares` of all probes, along random vectors, (b, R, k), from those of subsets of them.

        The mean square over the R rows is that of the error: the variance, from the deviations of the subsets from
        their mean, and the bias, which is the difference of this mean to all probes over P − 1 (jackknife), since it
        falls like one over the number of probes.
        """
        k, count = gaussian.rank(self.network.inputs[0].numel()), len(parts)
        moved = self.network.moves(gaussian, fixed_normal(DRIFT_PROBES, k), owner)
        bends = torch.stack([self.weights(part.sqrt()).bend for part in parts])
        mean = bends.mean(0)
        bias = (mean - self.weights(squares.sqrt()).bend) / (count - 1)
        scaled = [*((bends - mean) / (count * (count - 1)) ** 0.5), bias]
        off = [(part * (count + 1) ** 0.5).to(moved) for part in scaled]
        return torch.cat([gaussian.pull(self.network.back(moved * part[:, None], owner)).double() for part in off], 1)

    # --- low-rank closed form -------------------------------------------------------------------------------------

    def thin_price(self, rank: int, probes: int) -> float:
        """Passes per example that `thin_expectation` takes."""
        return 2 * rank + probes / 2

    def thin_expectation(
        self, gaussian: Gaussian, probes: Tensor | None, directions: Tensor, index: Tensor | None = None
    ) -> Expectation:
        """A low-rank approximation of W₁, for dimensions in which no dense matrix is formed.

        With Q a basis of W₁Ω for random directions Ω (q, k), it is QQᵀW₁ + W₁QQᵀ − QQᵀW₁QQᵀ: 2q products. τ is
        estimated from `probes`, so the result is an approximation and Γ₁ is not computed, which is sufficient for a
        linear control variate. Without probes τ is exact, for k/2 passes.
        """
        network = self.network
        everyone = network.everyone if index is None else index
        found = [Kinks(network.select(owner))._thin(gaussian, probes, directions, owner) for owner in everyone.split(1)]
        k = gaussian.rank(network.inputs[0].numel())
        nothing = torch.zeros(len(everyone), k, dtype=torch.float64, device=network.inputs.device)
        price = self.thin_price(len(directions), k if probes is None else len(probes))
        return Expectation(Known.cat(found), nothing, torch.full_like(everyone, price, dtype=torch.float64))

    def _thin(self, gaussian: Gaussian, probes: Tensor | None, directions: Tensor, owner: Tensor) -> Known:
        """The low-rank W₁ of one example."""
        network = self.network
        step = max(1, network.oracle.batch_size)
        if probes is None:
            squares = network.squares(gaussian, owner)
        else:
            squares = torch.stack([sum_of_squares(network.moves(gaussian, part, owner)) for part in probes.split(step)])
            squares = squares.sum(0) / len(probes)
        bend = self.weights(squares.sqrt()).bend

        def times(vectors: Tensor) -> Tensor:
            return torch.cat([self._product(gaussian, bend, part, owner)[0] for part in vectors.split(step)])

        basis = orthonormal(times(directions))  # (q, k)
        turned = times(basis)
        inner = basis @ turned.mT
        inner = (inner + inner.mT) / 2
        one = torch.eye(len(basis)).to(inner)
        core = torch.cat([torch.cat([-inner, one], 1), torch.cat([one, torch.zeros_like(one)], 1)])
        return Known(core[None], torch.cat([basis, turned])[None])

    def _product(self, gaussian: Gaussian, bend: Tensor, vectors: Tensor, owner: Tensor) -> Tensor:
        """W₁ v for whitened vectors (n, k) without forming W₁, (b, n, k): a frozen pass each; `bend` from `weights`."""
        _, (product,) = self.network.turned(gaussian, vectors, owner, lambda moves: [self.curved(moves, bend)])
        return gaussian.pull(product)

    # --- weights of the neurons -----------------------------------------------------------------------------------

    def weights(self, tau: Tensor) -> Moments:
        """Weights of j_k j_kᵀ in W₁ and of j_k in Γ₁, (b, units) each, zero for neurons with τ_k = 0; and v₁, (b,).

        v₁ is without the calls that mix their inputs.
        """
        network = self.network
        bend, lean, rise = [], [], []
        for call, pre, u, t in zip(network.calls, network.pre, network.sensitivity, network.per_call(tau), strict=True):
            found = None if call.kind == "map" else moments(call, pre, t.reshape(pre.shape))
            if call.kind != "map" and found is None:
                raise NoKinksError(f"the curvature of a {call.kind} call could not be averaged over this Gaussian")
            all_three = [torch.zeros_like(t)] * 3 if found is None else [f.reshape(t.shape) for f in found]
            for parts, moment in zip((bend, lean, rise), all_three, strict=True):
                parts.append(moment * u.double().reshape(t.shape))
        return Moments(torch.cat(bend, 1), torch.cat(lean, 1), torch.cat(rise, 1).sum(1))

    def curved(self, moves: Tensor, bend: Tensor) -> Tensor:
        """Second derivatives of the calls, times u, applied to moves (b, c, units)."""
        network = self.network
        turned = moves * bend[:, None].to(moves)
        if not self.has_maps:
            return turned
        weighted = list(network.per_call(turned))
        for n, (call, pre, u, part) in enumerate(
            zip(network.calls, network.pre, network.sensitivity, network.per_call(moves), strict=True)
        ):
            if call.kind == "map":
                shaped = part.unflatten(2, pre.shape[1:])
                weighted[n] = second_derivative(call, pre, u, shaped).flatten(2)
        return torch.cat(weighted, 2)

    def _only(self, units: Tensor, layer: int) -> Tensor:
        """(…, units) with the neurons of all other calls set to zero."""
        kept = [t if n == layer else torch.zeros_like(t) for n, t in enumerate(self.network.per_call(units))]
        return torch.cat(kept, -1)

    def chances(self, gaussian: Gaussian) -> tuple[Tensor, Tensor]:
        """Expected number of neurons that flip, and a bound of their part of ‖W₁‖_F, (B,) each; k/2 passes."""
        network = self.network
        owner = network.everyone
        tau = network.squares(gaussian, owner).sqrt()
        total = torch.zeros(len(network.inputs), dtype=torch.float64, device=network.inputs.device)
        for call, pre, t in zip(network.calls, network.pre, network.per_call(tau), strict=True):
            for knot, _ in call.knots:
                gap = (pre.double().reshape(len(pre), -1) - knot).abs()
                margin = gap / t.clamp_min(torch.finfo(torch.float64).tiny)
                total += torch.where(t > 0, torch.special.ndtr(-margin), 0.0).sum(1)
        bend = self.weights(tau).bend
        sizes = zip(network.calls, network.per_call(bend.abs() * tau.square()), strict=True)
        return total, torch.stack([part.sum(1) * bool(call.knots) for call, part in sizes]).sum(0)
