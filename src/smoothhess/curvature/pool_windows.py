"""The windows of max-pooling: the positions that each covers, and the largest candidates of each.

The expectation of the maximum of these candidates is in `window_maximum`, the interception of calls in
`activation_hooks`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

CANDIDATES = 3  # of each window: the maximum at x and the next largest; the closed form is exact for up to three


def pooled_positions(inputs: Sequence[int], outputs: Sequence[int], options: Mapping[str, Any] | None) -> Tensor:
    """Positions of each window in the flattened input, (windows, positions), −1 where a window covers less.

    `inputs` and `outputs` are the sizes that are pooled, `options` the arguments of the call; None: adaptive pooling.

    >>> pooled_positions((4,), (3,), {"kernel_size": 2, "stride": 2, "padding": 1}).tolist()
    [[-1, 0], [1, 2], [3, -1]]
    >>> pooled_positions((5,), (2,), None).tolist()
    [[0, 1, 2], [2, 3, 4]]
    """
    total = torch.zeros(1, 1, dtype=torch.long)
    inside = torch.ones(1, 1, dtype=torch.bool)
    for dim, (size, count) in enumerate(zip(inputs, outputs, strict=True)):
        window = torch.arange(count)[:, None]
        if options is None:
            first, last = window * size // count, -(-(window + 1) * size // count)
            position = first + torch.arange(int((last - first).max()))
        else:
            kernel, padding, dilation = (_size(options.get(n), dim, 1 - n.count("padding")) for n in _OPTIONS)
            step = _size(options.get("stride") or options["kernel_size"], dim, 1)
            position = window * step - padding + torch.arange(kernel) * dilation
            last = torch.tensor(size)
        within = (position >= 0) & (position < last)
        total = (total[:, None, :, None] * size + position[None, :, None]).flatten(2).flatten(0, 1)
        inside = (inside[:, None, :, None] & within[None, :, None]).flatten(2).flatten(0, 1)
    return torch.where(inside, total, -1)


_OPTIONS = ("kernel_size", "padding", "dilation")


def _size(option: Any, dim: int, default: int) -> int:
    """An option of a pooling call in one of its dimensions."""
    if option is None:
        return default
    sizes = [option] if isinstance(option, int) else list(option)
    return int(sizes[dim] if len(sizes) > 1 else sizes[0])


def largest_candidates(pre: Tensor, positions: Tensor, winners: Tensor, floor: bool) -> Tensor:
    """Positions of the CANDIDATES largest candidates of each window, the maximum first, (b, windows, CANDIDATES).

    They are positions in the flattened input of an example, and its number of elements stands for the constant 0, a
    candidate of each window if `floor`. `pre` is the input (b, …), `winners` the indices (b, …) of the maxima, as torch
    returns them. Where a window has fewer candidates, its maximum is repeated.
    """
    windows, positions = len(positions), positions.to(pre.device)
    planes = winners[0].numel() // windows  # channels
    size = pre[0].numel() // planes
    value = pre.reshape(len(pre), planes, size)[:, :, positions.clamp_min(0)]  # (b, planes, windows, positions)
    value = value.masked_fill(positions < 0, -math.inf)
    winner = winners.reshape(len(pre), planes, windows, 1)
    value = value.masked_fill(positions == winner, math.inf)
    start = size * torch.arange(planes, device=pre.device)[:, None, None]
    places, first = (positions + start).expand(value.shape), winner + start
    if floor:
        zero = planes * size
        below = pre.reshape(len(pre), planes, size).gather(2, winner[..., 0])[..., None] <= 0  # the maximum is 0
        value = torch.where(below, value.masked_fill(positions == winner, 0.0), value)
        value = torch.cat([value, torch.where(below, math.inf, 0.0).to(value)], 3)
        places = torch.cat([places, torch.full_like(first, zero)], 3)
        first = torch.where(below, zero, first)
    best = value.topk(min(CANDIDATES, value.shape[3]), 3)
    chosen = torch.where(best.values == -math.inf, first, places.gather(3, best.indices))
    missing = CANDIDATES - chosen.shape[3]
    return torch.cat([chosen, first.expand(-1, -1, -1, missing)], 3).flatten(1, 2)


def gaps(pre: Tensor, candidates: Tensor) -> Tensor:
    """Differences z₁ − z₀, z₂ − z₀ and z₂ − z₁ of the candidates, (b n, windows, 3); `pre` is (b n, …)."""
    flat = pre.flatten(1)
    flat = torch.cat([flat, flat.new_zeros(len(flat), 1)], 1).unflatten(0, (len(candidates), -1))
    index = candidates.flatten(1)[:, None].expand(-1, flat.shape[1], -1)
    z = flat.gather(2, index).unflatten(2, candidates.shape[1:])  # (b, n, windows, CANDIDATES)
    zeroth, first, second = z.unbind(3)
    return torch.stack([first - zeroth, second - zeroth, second - first], 3).flatten(0, 1)
