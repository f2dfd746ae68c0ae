"""The neurons of which a control variate consists, where the input gradients of all neurons cannot be kept.

Most neurons of a large network are far from their kinks. Where the j_k of the others can be kept, W₁ takes half a pass
for each column and not 3/2 (`one_flip`). The field and its expectation consist of the same neurons, so that the control
variate is unbiased for every selection.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smoothhess.curvature.frozen_network import sum_of_squares
from smoothhess.curvature.one_flip import Kinks
from smoothhess.curvature.pool_windows import CANDIDATES
from smoothhess.draws.designs import tau_rows
from smoothhess.draws.gaussian import Gaussian
from smoothhess.linalg.memory import in_batches

PROBES = 32  # random directions that estimate τ
LEFT_OUT = 1e-3  # largest share of the sum of all |bend_k| τ_k² that neurons have which are not selected


def selection_price(kinks: Kinks, k: int) -> float:
    """Passes per example of `select_neurons` in k dimensions; 0 where all j_k are kept, or calls mix their inputs."""
    return 0.0 if kinks.is_kept(k) or kinks.has_maps else min(PROBES, k) / 2


def select_neurons(kinks: Kinks, gaussian: Gaussian) -> Kinks:
    """Without the neurons that hardly contribute to W₁, if the j_k of the others can be kept and all j_k cannot.

    Neurons are ranked by |bend_k| τ_k², the Frobenius norms of their terms, with τ estimated from random directions.
    Those left out add up to less than the rounding of the sum, or, if fewer can be kept, to at most LEFT_OUT of it.
    """
    network, k = kinks.network, gaussian.rank(kinks.network.inputs[0].numel())
    if not selection_price(kinks, k):
        return kinks
    probes = tau_rows(min(PROBES, k), k, network.inputs)
    found = in_batches(
        lambda examples: _largest(kinks, gaussian, probes, network.everyone[examples]),
        len(network.inputs),
        lambda _: max(1, network.oracle.batch_size // len(probes)),
        lambda n: network.oracle.take_fewer(n * len(probes)),
    )
    mask = torch.cat([*found])
    return kinks if bool(mask.all()) else kinks.only(mask)


def _largest(kinks: Kinks, gaussian: Gaussian, probes: Tensor, owner: Tensor) -> Tensor:
    """The neurons of the examples at `owner` that are selected, (b, units); all where too many would be."""
    own, k = kinks.examples(owner), probes.shape[1]
    network = own.network
    parts = probes.split(max(1, network.oracle.batch_size // len(owner)))
    squares = torch.stack([sum_of_squares(network.moves(gaussian, part, owner)) for part in parts]).sum(0) / len(probes)
    size = own.weights(squares.sqrt()).bend.abs() * squares
    for call, part in zip(network.calls, network.per_call(size), strict=True):
        if call.kind == "max_pool":  # the gaps of a window are selected together
            part[:] = part.unflatten(1, (-1, CANDIDATES)).sum(2).repeat_interleave(CANDIDATES, 1)
    ascending = size.sort(1).values
    rest = ascending.cumsum(1) / size.sum(1, keepdim=True)  # share of each neuron and all smaller ones
    left = (rest <= torch.finfo(network.inputs.dtype).eps).sum(1, keepdim=True)
    left = left.clamp_min(size.shape[1] - kinks.most_kept(k))
    largest_left = (left - 1).clamp_min(0)
    is_small = (rest.gather(1, largest_left) <= LEFT_OUT) & (left > 0)
    return (size > ascending.gather(1, largest_left)) | ~is_small
