"""The activation calls of a model before sampling: expected flips, and the shares of the one-flip Hessian H₁.

Everything is computed from the frozen network: the spread τ of each unit under a Gaussian is proportional to σ, so the
expected flips and the weights of the units in H₁ are known at every σ from one set of frozen passes. H₁ itself is in
`smoothhess.curvature.one_flip`; measurements of gradients are in `gradient_changes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from smoothhess.curvature.activation_hooks import Call, OtherPathError, record
from smoothhess.curvature.frozen_network import NoKinksError, intercepted
from smoothhess.curvature.one_flip import Kinks
from smoothhess.curvature.window_maximum import moments_of_maximum
from smoothhess.draws.gaussian import Gaussian
from smoothhess.linalg.memory import FLOAT64_CHUNK
from smoothhess.model.gradients import Oracle
from smoothhess.model.state import is_opaque, modules_behind

EXACT_RANK, TAU_PROBES = 512, 64  # dimensions up to which τ² = |j|² is exact; random probes that estimate it above
RARE = 3  # expected flips in a budget below which the part of a unit rests on rare events
PIECEWISE_LINEAR = frozenset({"relu", "leaky_relu", "prelu", "hardtanh", "clamp", "abs", "max_pool"})


@dataclass(frozen=True, eq=False)
class Activation:
    """One activation call of the forward pass; (B,) tensors, NaN where a number does not apply."""

    name: str  # of the module that made it
    kind: str  # as in `smoothhess.curvature.activation_hooks`
    units: int
    active: Tensor  # share of units with slope ≠ 0 (relu, hardtanh, clamp) or with a positive pre-activation
    flips: Tensor  # Σ Φ(−|z − knot|/τ): expected number of units that cross a knot, or windows that switch, in one draw
    share: Tensor  # ⟨W, W₁⟩/‖W₁‖² of the call's part W of the one-flip Hessian; the shares of all calls add up to 1


@dataclass(frozen=True, eq=False)
class Activations:
    """The activation calls of the model that could be recorded, and the units of the frozen network."""

    calls: tuple[Activation, ...]
    unseen: str  # why the calls, or their units, could not be recorded; empty if they were
    passes: float  # frozen passes per example that it took
    kinks: Kinks | None = None
    tau: Tensor | None = None  # (B, units) spread of each unit under the Gaussian

    @property
    def piecewise_linear(self) -> bool:
        """Whether all recorded calls are piecewise linear."""
        return bool(self.calls) and all(call.kind in PIECEWISE_LINEAR for call in self.calls)

    @property
    def n_units(self) -> int:
        """Number of modelled units per example."""
        return 0 if self.tau is None else self.tau.shape[1]

    @property
    def n_knots(self) -> int:
        """Number of kinks per example; a window of max-pooling counts as one."""
        return sum(tau.shape[1] * len(c.knots) or pre.shape[1] for c, pre, tau in self._units() if _kinked(c))

    def _units(self) -> list[tuple[Call, Tensor, Tensor]]:
        """The modelled calls, and the pre-activations and spreads (B, units) of their units."""
        if self.kinks is None or self.tau is None:
            return []
        network = self.kinks.network
        return [*zip(network.calls, network.pre, network.per_call(self.tau), strict=True)]

    def expected_flips(self, multiple: Tensor) -> Tensor:
        """Expected number in one draw at multiples (B,) of the Gaussian; NaN where it cannot be computed."""
        counts = [_flips(call, pre, tau, multiple) for call, pre, tau in self._units() if _kinked(call)]
        return torch.stack(counts).sum(0) if counts else torch.full_like(multiple, math.nan, dtype=torch.float64)

    def share_rare(self, multiple: Tensor, n_calls: int) -> Tensor:
        """Share of H₁ from units with fewer than RARE expected flips in `n_calls` calls, (B,), at multiples (B,).

        The size of a unit's part is its trace, |u E[a'']| τ². NaN where no unit has a kink, or H₁ is zero.
        """
        if self.kinks is None or self.tau is None or not self.n_knots:
            return torch.full_like(multiple, math.nan, dtype=torch.float64)
        tau = self.tau * multiple[:, None].to(self.tau)
        try:
            bend = self.kinks.weights(tau).bend
        except NoKinksError:  # a smooth call could not be averaged over so wide a Gaussian
            return torch.full_like(multiple, math.nan, dtype=torch.float64)
        network, sizes = self.kinks.network, bend.abs() * tau.square()
        parts = zip(network.calls, network.pre, network.per_call(tau), network.per_call(sizes), strict=True)
        rare = [
            (size * (n_calls * _flip_probability(call, pre, t) < RARE)).sum(1)
            for call, pre, t, size in parts
            if _kinked(call)
        ]
        return (torch.stack(rare).sum(0) / sizes.sum(1)).cpu()

    def rescaled(self, factor: float) -> Activations:
        """The same units under `factor` times the Gaussian."""
        return self if self.tau is None else replace(self, tau=self.tau * factor)

    def typical_distance(self) -> float:
        """Median over units of the multiple at which τ equals the distance to the nearest knot, or 1 if smooth."""
        found = []
        for call, pre, tau in self._units():
            if call.kind == "map":
                continue
            gap = _nearest_knot(call, pre, tau) if _kinked(call) else torch.ones_like(tau)
            found.append((gap / tau)[(tau > 0) & (gap > 0)])
        distances = torch.cat(found) if found else torch.empty(0)
        return float(distances.median()) if len(distances) else math.nan


def n_probes_of_tau(rank: int) -> int:
    """Random directions that `inspect_activations` needs at least."""
    return 0 if rank <= EXACT_RANK else TAU_PROBES


def inspect_activations(
    oracle: Oracle, x: Tensor, value: Tensor, gradient: Tensor, gaussian: Gaussian, z: Tensor, n_probes: int
) -> Activations:
    """Record the calls; compute their expected flips, and from probes `z` their shares of W₁."""
    if is_opaque(oracle.forward_func):
        return Activations((), "the model is scripted or compiled, which hides its activation calls", 0)
    forward = oracle.bound(torch.arange(len(x), device=x.device))
    try:
        with intercepted(lambda: forward(x)):
            recorded = record(forward, x).calls
    except NoKinksError as error:
        return Activations((), str(error), 0.5)
    if not recorded:
        reason = "no activation call was seen (other framework, fused or hand-written operations, or none at all)"
        return Activations((), reason, 0.5)
    calls = [_activation(call, len(x), oracle.forward_func) for call in recorded]
    try:
        kinks = Kinks.see(oracle, x, value, gradient)
        tau, shares, passes = _bending(kinks, gaussian, z, n_probes)
    except (NoKinksError, OtherPathError) as error:
        return Activations(tuple(calls), str(error), 2)
    one = torch.ones(len(x))
    network, taus = kinks.network, kinks.network.per_call(tau)
    for i, call, pre, spread, share in zip(network.bent, network.calls, network.pre, taus, shares, strict=True):
        flips = _flips(call, pre, spread, one) if _kinked(call) else calls[i].flips
        calls[i] = replace(calls[i], flips=flips, share=share)
    return Activations(tuple(calls), "", 2 + passes, kinks, tau)


def _activation(call: Call, batch: int, forward_func: Callable[..., Any]) -> Activation:
    roots = [dict(root.named_modules()) for root in modules_behind(forward_func)]
    module = max(roots, key=len, default={}).get(call.name) if call.name else None
    name = call.name if module is None else f"{call.name} ({type(module).__name__})"
    unknown = torch.full((batch,), math.nan, dtype=torch.float64)
    active = unknown
    if call.slope is not None:
        on = (call.slope != 0 if call.kind in ("relu", "hardtanh", "clamp") else call.pre > 0).double()
        active = on.reshape(batch, -1).mean(1).cpu() if len(on) == batch else on.mean().cpu().expand(batch)
    return Activation(name or "(the model)", call.kind, call.pre.numel() // batch, active, unknown, unknown)


def _bending(kinks: Kinks, gaussian: Gaussian, z: Tensor, n_probes: int) -> tuple[Tensor, Tensor, float]:
    """τ of all units (B, units), the share ⟨W, W₁⟩/‖W₁‖² of each call (calls, B), and the number of passes."""
    rows = torch.eye(z.shape[1]).to(z) if z.shape[1] <= EXACT_RANK else z / math.sqrt(len(z))
    network = kinks.network
    batch_size = min(network.oracle.batch_size, FLOAT64_CHUNK.items(network.neurons * z.element_size(), z.device))
    taus, shares = [], []
    for owner in network.everyone.split(1):
        frozen = network.select(owner)
        part = Kinks(frozen)
        tau = sum(frozen.moves(gaussian, v, owner).double().square().sum(1) for v in rows.split(batch_size)) ** 0.5
        bend = part.weights(tau).bend
        total = torch.zeros(len(network.bent), dtype=torch.float64, device=z.device)
        for v in z[:n_probes].split(batch_size):
            bent = part.curved(frozen.moves(gaussian, v, owner), bend)
            turned = gaussian.pull(frozen.back(bent, owner))[0]  # W₁v, (c, k); its products give vᵀW W₁v of each call
            products = frozen.per_call(bent.double() * frozen.moves(gaussian, turned, owner).double())
            total += torch.stack([p.sum() for p in products])
        taus.append(tau)
        shares.append(total / total.sum())
    return torch.cat(taus), torch.stack(shares, 1).cpu(), len(rows) / 2 + 2 * n_probes


def _kinked(call: Call) -> bool:
    return bool(call.knots) or call.kind == "max_pool"


def _flips(call: Call, pre: Tensor, tau: Tensor, multiple: Tensor) -> Tensor:
    """Σ Φ(−|z − knot|/τ) over units and knots, or that of windows, with τ (B, units) times `multiple` (B,)."""
    units = pre.shape[2] if call.kind == "max_pool" else 1  # gaps of a window
    return _flip_probability(call, pre, tau * multiple[:, None].to(tau)).sum(1).cpu() / units


def _flip_probability(call: Call, pre: Tensor, tau: Tensor) -> Tensor:
    """Σ Φ(−|z − knot|/τ) over the knots of each unit, (B, units); of a gap, the chance that its window switches."""
    if call.kind == "max_pool":
        won = moments_of_maximum(pre, tau.reshape(pre.shape))[1]
        return won.sum(2, keepdim=True).expand_as(won).reshape(tau.shape)
    pre = pre.reshape(tau.shape).to(tau)
    crossed = sum(torch.special.ndtr(-(pre - knot).abs() / tau) for knot, _ in call.knots)
    return torch.where(tau > 0, crossed, 0.0)


def _nearest_knot(call: Call, pre: Tensor, tau: Tensor) -> Tensor:
    """|z − knot| of the nearest knot of each unit, (B, units); a gap has its knot at 0."""
    pre = pre.reshape(tau.shape).to(tau)
    return torch.stack([(pre - knot).abs() for knot, _ in call.knots or ((0.0, 1.0),)]).amin(0)
