"""Statistics of sums over groups of features, from those of a sampled result.

The antisymmetric half, from which variances are estimated, cannot be computed from the sums. Its products with the
directions of the groups, and with random probes, are kept with them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from smoothhess.estimate.antisymmetric_variance import Skew
from smoothhess.estimate.grouping import Grouping, probes
from smoothhess.estimate.statistics import Statistics
from smoothhess.estimate.variance import Noise


def group_sums(noise: Noise, grouping: Grouping) -> Statistics:
    """The statistics of sums over groups of the features, or of the groups, of a result with the given noise."""
    stats = noise.features.map(grouping.sum)
    if noise.own.skew is not None and noise.skew is not None:
        gaussian, fit, n = noise.gaussian, noise.fit, stats.n[:, None, None]
        q = grouping.directions(gaussian).double()
        watched = torch.cat([q, probes(stats.rank, q).expand(len(q), -1, -1)], 1).expand(len(stats), -1, -1)

        def products(skew: Skew) -> Tensor:
            return skew.apply(watched).mT * n

        if fit is not None:
            fit = fit.map(lambda rows: grouping.sum(gaussian.push(rows)))
            fit = replace(fit, skew=products(noise.skew))
        return replace(stats, skew=products(noise.own.skew), gram=q @ q.mT, fit=fit)
    if stats.skew is not None and stats.gram is not None:
        k = noise.features.k

        def of_groups(skew: Tensor) -> Tensor:
            return torch.cat([grouping.sum(skew[..., :k]), skew[..., k:]], -1)

        fit = stats.fit
        if fit is not None and fit.skew is not None:
            fit = replace(fit, skew=of_groups(fit.skew))
        return replace(stats, skew=of_groups(stats.skew), gram=grouping.sum(grouping.sum(stats.gram).mT), fit=fit)
    return stats
