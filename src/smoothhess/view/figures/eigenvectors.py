"""Figure of the leading eigenvectors of the Hessian: the directions of largest curvature of f."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from smoothhess.draws.seeding import fixed_normal, torch_generator
from smoothhess.result.interactions import SampledResult
from smoothhess.view import captions
from smoothhess.view.figures import canvas, feature_map, image_background, title_layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from smoothhess.result.result import Result

STEPS = 30  # power iterations for the norm of the noise
RANKS = ("strongest", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def eigen(
    result: Result,
    *,
    which: int | Sequence[int] | None = None,
    k: int | None = None,
    names: Sequence[str] | None = None,
    example: int = 0,
    limit: float | None = None,
    ax: Axes | Sequence[Axes] | None = None,
) -> Axes:
    """Draw the directions of largest |curvature|, `result.eigh`: maps for images and segments, else profiles or bars.

    The sign of an eigenvector is arbitrary: its largest component is drawn as positive. Three channels are summed. All
    components of a direction are faint if its curvature does not exceed the operator norm of the noise; single
    components have no error bars.

    Args:
        result: The result to draw.
        which: Indices of the directions, 0 being the one of largest |curvature|. None draws one direction per Axes in
            `ax`; without `ax`, three for an image and one for other inputs.
        k: Number of bars, those of the largest components; 20 if None.
        names: One name per feature or group.
        example: Index of the example in the batch.
        limit: The colour scale of a map is from −limit to limit; the largest |component| if None.
        ax: Axes to draw into, a sequence of Axes for several directions; a new figure if None.

    Returns:
        The Axes of the first direction.

    Raises:
        ValueError: If `which` holds an index without a direction, or `ax` another number of Axes.

    >>> import torch, smoothhess as sh
    >>> result = sh.SmoothHess(lambda x: x.sum(1) ** 2).attribute(torch.zeros(1, 3), sigma=0.5, n_calls=400)
    >>> eigen(result).get_title(loc="left")
    'Strongest direction: f bends up'
    """
    one = canvas.one_example(result, example)
    labels = canvas.names_of(one, names)
    chosen = _chosen(which, ax, one)
    found = one.eigh(max(chosen) + 1)
    if max(chosen) >= found.values.shape[1]:
        raise ValueError(
            f"which must be below {found.values.shape[1]}, the number of directions of this result, got {max(chosen)}."
        )
    noise = _noise_norm(one), _error_norm(one)
    drawn = [_direction(one, found.values[0, i], found.vectors[:, i], i, *noise) for i in chosen]
    size, segments = captions.image_size(one.feature_shape), image_background.segments_of(one)
    if k is not None or (size is None and segments is None):
        rows = min(feature_map.BARS if k is None else k, one.shape[1])
        profile = k is None and feature_map.is_profile(one, labels)
        axes = canvas.row_of_axes(ax, len(drawn), 6.4 * min(len(drawn), 2), 3.2 if profile else 1.5 + 0.26 * rows)
        for each, numbers in zip(axes, drawn, strict=True):
            feature_map.draw(one, numbers, k=k, names=labels, limit=limit, ax=each)
        return axes[0]
    axes = canvas.row_of_axes(ax, len(drawn), 1.5 + 2.7 * len(drawn), 3.5)
    maps = [n.value[segments] if size is None else n.value.reshape(size) for n in drawn]
    limit = canvas.symmetric_limit(np.stack(maps), limit)
    shown = [
        feature_map.paint(a, m, np.broadcast_to(n.faint[0], m.shape), segments, limit)
        for a, n, m in zip(axes, drawn, maps, strict=True)
    ]
    heads = {a: (n.title, n.caption) for a, n in zip(axes, drawn, strict=True)}
    title_layout.colour_bar(axes[0], shown[0], drawn[0].sentence, drawn[0].unit, heads)
    return axes[0]


def _chosen(which: int | Sequence[int] | None, ax: Any, one: Result) -> list[int]:
    """Return the indices of the directions to draw."""
    if which is None:
        image = captions.image_of(one) is not None
        given = len(np.ravel(np.asarray(ax, dtype=object))) if ax is not None else 3 if image else 1
        return list(range(min(given, one.shape[1])))
    numbers = list(which) if isinstance(which, Sequence | np.ndarray) else [which]
    wrong = [i for i in numbers if not isinstance(i, int | np.integer) or not 0 <= i < one.shape[1]]
    if wrong or not numbers:
        raise ValueError(f"which must hold numbers of directions from 0 to {one.shape[1] - 1}, got {which!r}.")
    return [int(i) for i in numbers]


def _direction(
    one: Result, value: Tensor, vector: Tensor, rank: int, noise: float, error: float
) -> feature_map.Numbers:
    """Return one eigenpair; it is faint if neither its unbiased nor its reported curvature exceeds its error."""
    unbiased = float(one.bilinear(vector, vector).value[0])
    faint, floor = abs(unbiased) <= noise and abs(float(value)) <= error, min(noise, error)
    flat = canvas.array(vector[0]).reshape(-1)
    flat = flat * np.sign(flat[np.abs(flat).argmax()] or 1.0)
    size, channels = captions.image_size(one.feature_shape), ""
    if size is not None and len(flat) > size[0] * size[1]:
        flat, channels = flat.reshape(-1, size[0] * size[1]).sum(0), "; channels summed"
    name = RANKS[rank] if rank < len(RANKS) else f"{rank + 1}th"
    bends = "up" if value > 0 else "down"
    doubt = "" if not floor else f", noise up to {floor:.3g}" if np.isfinite(floor) else ", noise unknown"
    noisy = "; faint: within noise" if faint else ""
    title = f"{name.capitalize()} direction: f bends {bends}"
    if captions.is_attribution(one):
        title = f"{name.capitalize()} direction of {captions.method(one)}"
    return feature_map.Numbers(
        value=flat,
        half=None,
        faint=np.full(flat.shape, faint),
        title=title,
        caption=f"λ = {float(value):+.3g}{doubt}{channels}{noisy}".replace("-", "−"),
        sentence=f"moving along it, the {captions.noun(one)}   {captions.FALLS_RISES}",
        unit="component of a unit vector",
        rank=flat,
    )


def _error_norm(one: Result) -> float:
    """Return ‖Ĥ − H‖_F of the reported Hessian, a bound on the error of its eigenvalues; inf if unknown."""
    share = float(one.relative_error[0])
    if not isinstance(one, SampledResult) or not one.shrink or not share < 1:
        return 0.0 if share == 0 else float("inf")
    denoised = one.estimate.denoised
    norm = float(one.hessian[0].norm() if denoised is None else denoised.norm2[0].sqrt())
    return norm * share / (1 - share**2) ** 0.5


def _noise_norm(one: Result) -> float:
    """Estimate the operator norm of Ĥ − H."""
    if not isinstance(one, SampledResult) or one.shape[1] <= canvas.MOST_FEATURES:
        return float(one.noise.operator_norms()[1][0])
    noise = one.noise
    if noise.skew is not None:  # the antisymmetric part has the same error distribution as the symmetric part
        skew = noise.skew

        def turned(rows: Tensor) -> Tensor:
            return one.gaussian.push(skew.apply(one.gaussian.whiten(rows)).to(rows))
    else:  # independent rows, with random signs
        head = one.estimate.features.head
        signs = torch.randint(0, 2, head.odd.shape[1:2], generator=torch_generator()).to(head.odd) * 2 - 1
        scale = 2 * (one.estimate.features.n_head * one.estimate.features.n).sqrt().to(head.odd)

        def turned(rows: Tensor) -> Tensor:
            there, back = (rows @ head.odd.mT * signs) @ head.score, (rows @ head.score.mT * signs) @ head.odd
            return (there + back) / scale

    v, norm = fixed_normal(1, 1, one.shape[1]).to(one.inputs), 0.0
    for _ in range(STEPS):
        v = v / torch.linalg.vector_norm(v).clamp_min(1e-30)
        v = turned(v)
        norm = float(torch.linalg.vector_norm(v))
    return norm
