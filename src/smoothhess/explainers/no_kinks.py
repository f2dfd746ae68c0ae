"""Whether draws around an input can cross a kink at all, for runs in which no sampled draw did.

The recorded operations and the margins of the units are checked, not the sampled rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from smoothhess.curvature.activation_hooks import OtherPathError
from smoothhess.curvature.frozen_network import NoKinksError, intercepted
from smoothhess.curvature.one_flip import Kinks
from smoothhess.curvature.unknown_operations import KINKED, SMOOTH, unknown_operations
from smoothhess.explainers.sampler import Sampler

NEVER = 1e-6  # units are taken to never flip if the probability that any of them flips is below this
CERTAIN_PASSES = 2048  # maximum passes per example to compute the margins of its units if no draw has flipped one


@dataclass(frozen=True)
class KinkChecks:
    """The examples of a run that were checked so far."""

    found: Mapping[tuple[int, bool], bool] = field(default_factory=dict)  # by example, and whether it was `unmoved`
    passes: Mapping[int, float] = field(default_factory=dict)  # of the checks, by example

    def passes_of(self, index: Tensor) -> Tensor:
        """Passes of the checks of each example at `index`, (b,)."""
        return torch.tensor([self.passes.get(i, 0.0) for i in index.tolist()], dtype=torch.float64, device=index.device)


def check_kinks(sampler: Sampler, checks: KinkChecks, index: Tensor, unmoved: Tensor) -> tuple[Tensor, KinkChecks]:
    """Whether draws of each example at `index` cannot cross a kink, (b,), and `checks` with these examples.

    They cannot if all recorded operations are smooth (polynomial, where the gradient is `unmoved`), or if all units
    that could flip were recorded and their flip probabilities add up to less than NEVER.
    """
    wanted = [*zip(index.tolist(), unmoved.tolist(), strict=True)]
    found, passes = dict(checks.found), dict(checks.passes)
    for still in (False, True):
        if missing := [i for i, u in wanted if u == still and (i, u) not in found]:
            where = torch.tensor(missing, device=index.device)
            new, spent = _has_no_kinks(sampler, where, frozenset() if still else SMOOTH)
            found |= {(i, still): c for i, c in zip(missing, new.tolist(), strict=True)}
            passes |= {i: passes.get(i, 0.0) + spent for i in missing}
    return torch.tensor([found[key] for key in wanted], device=index.device), KinkChecks(found, passes)


def _has_no_kinks(sampler: Sampler, index: Tensor, harmless: frozenset[str]) -> tuple[Tensor, float]:
    """The result of the examples at `index`, (b,), and the passes per example."""
    oracle, inputs, at = sampler.oracle.select(index), sampler.inputs[index], sampler.unperturbed
    owner = torch.arange(len(index), device=index.device)
    no = torch.zeros(len(index), dtype=torch.bool, device=index.device)
    passes = 1.0

    def forward(x: Tensor) -> Tensor:
        return oracle.pick(oracle.bound(owner)(x), owner)

    try:
        with intercepted(lambda: forward(inputs)):
            bent = set(unknown_operations(forward, inputs, oracle.forward_func)) - harmless
        if not bent:
            return ~no, passes
        if bent - KINKED or oracle.precision != "float32":
            return no, passes
        kinks = Kinks.see(oracle, inputs, at.value[index], at.gradient[index])
        if kinks.network.unmodelled or kinks.price(sampler.rank) > CERTAIN_PASSES:
            return no, passes
        passes += 1 + sampler.rank / 2
        probability, curvature = kinks.chances(sampler.gaussian)
    except (NoKinksError, OtherPathError):  # its operations cannot be recorded
        return no, passes
    size = torch.linalg.vector_norm(at.whitened[index].double(), dim=1)
    return (probability < NEVER) & (curvature <= torch.finfo(inputs.dtype).eps * size), passes
