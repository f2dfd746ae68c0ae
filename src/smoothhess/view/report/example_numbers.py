"""Computes and encodes the numbers of one example at one scale for the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from smoothhess.estimate import student_t
from smoothhess.result.effect_sizes import EffectSizes
from smoothhess.result.exact import Attribution
from smoothhess.result.shown_estimate import shown
from smoothhess.view.figures import canvas
from smoothhess.view.report import encoding
from smoothhess.view.report.quality_levels import readings, verdict

if TYPE_CHECKING:
    from smoothhess.result.result import Result

EIGENPAIRS = 6


def numbers(result: Result, scales: Tensor | None, level: float, q: float) -> dict[str, Any]:
    """Return the encoded numbers of a result of one example.

    They are those of the estimate that views of pairs show (`smoothhess.result.shown_estimate`), except for the
    directions, which describe the matrix as a whole. `value`, `stderr` and `q` are those of `top_pairs`: the q-values
    are NaN on the diagonal and for features without noise. `separate` and `spread` are those of `EffectSizes`: the
    squared separate effect of each feature, and the standard deviation of the output. Matrices are upper triangles, row
    by row.
    """
    one = shown(result)
    d = one.shape[1]
    q_values = np.full((d, d), np.nan)
    [found] = one.strongest_pairs_of(max(1, d * (d - 1) // 2), q, level, scales)
    q_values[found.i[0].cpu().numpy(), found.j[0].cpu().numpy()] = canvas.array(found.q_value[0])
    moves = one.feature_scales[0] if scales is None else torch.as_tensor(scales, dtype=torch.float64).reshape(-1)
    return {
        "value": encoding.packed(canvas.array(one.hessian[0])),
        "stderr": encoding.packed(canvas.array(one.stderr()[0])),
        "q": encoding.packed(q_values),
        **_sizes(one, scales),
        "slope": encoding.float32(canvas.array(one.gradient[0]).reshape(-1)),
        "slope_stderr": encoding.float32(canvas.array(one.gradient_stderr[0]).reshape(-1)),
        "slope_width": float(student_t.quantile(level, _slope_df(one))[0]),
        "move": encoding.float32(canvas.array(moves)),
        "still": _still(one),
        # half-width of an interval in standard errors
        "width": float(student_t.quantile(level, one.noise.of_entries().df)[0]),
        "smoothed": float(one.value[0]),
        "chip": verdict(result)._asdict(),
        "quality": [reading._asdict() for reading in readings(result)],
        "eigen": _eigen(result),
    }


def _sizes(one: Result, scales: Tensor | None) -> dict[str, Any]:
    if isinstance(one, Attribution):
        return {"separate": None, "spread": None}
    sizes = EffectSizes.of(one, None if scales is None else torch.as_tensor(scales, dtype=torch.float64))
    return {"separate": encoding.float32(canvas.array(sizes.separate[0])), "spread": float(sizes.output[0])}


def _slope_df(one: Result) -> Tensor:
    """Return the degrees of freedom of the standard errors of the gradient, (1,)."""
    if one.design == "exact":
        return one.noise.of_entries().df
    return one.noise.of_gradient().df


def _still(one: Result) -> list[int]:
    """Return the features without noise, for which there is no estimate."""
    return [] if one.design == "exact" else torch.nonzero(one.feature_scales[0] == 0).reshape(-1).tolist()


def _eigen(one: Result) -> dict[str, Any]:
    """Return the leading eigenvectors, with the share of ‖H‖² that each accounts for."""
    values, vectors = one.eigh(min(EIGENPAIRS, one.shape[1]))
    vectors = canvas.array(vectors[0]).reshape(len(values[0]), -1)
    # The sign of an eigenvector is arbitrary: the largest entry is made positive.
    vectors *= np.sign(np.take_along_axis(vectors, np.abs(vectors).argmax(1)[:, None], 1))
    total = float(one.hessian[0].double().square().sum())
    squares = canvas.array(values[0]) ** 2
    return {
        "values": canvas.array(values[0]).tolist(),
        "shares": (squares / total if total > 0 else 0 * squares).tolist(),
        "vectors": encoding.float32(vectors),
        "denoised": one.shrink,
    }
