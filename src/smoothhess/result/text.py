"""Text about results: the table that `repr` shows, and the sentence about what intervals do not show.

Sentences of figures and pages belong to `view.captions`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smoothhess.result.intervals import plus_minus

LIMITS = (
    "The intervals describe the Monte-Carlo error of this network's smoothed Hessian. They do not show whether an "
    "interaction is real, stable or causal."
)
MOST_EXAMPLES = 8  # shown by repr


def sampled_table(result: Any) -> str:
    """Return the repr of a sampled result."""
    lines = [
        f"Interactions of {_size(result)}, {result.gaussian_text}, {result.design} design"
        f"{'' if result.control is None else f', control {result.control}'}{', denoised' if result.shrink else ''}"
        f"{'' if result.unbiased else ', biased'}{_precision(result)}, seed {result.seed}",
        "  example      f(x)  smoothed value ± 95 %  rel. error      R²    calls   n_eff  stopped by"
        f"{_target_head(result)}",
    ]
    half = result.value_estimate().half_width()
    for i in range(min(len(result), MOST_EXAMPLES)):
        value = plus_minus(float(result.value[i]), float(half[i]))
        target = f"   {result.target_names[i]}".rstrip()
        lines.append(
            f"  {i:7d}  {float(result.output[i]):8.4g}  {value:<22} {float(result.relative_error[i]):9.3g}  "
            f"{float(result.r2[i]):6.3f}  {int(result.n_calls[i]):7d}  {float(result.n_eff[i]):6.1f}  "
            f"{result.status[i]:<10}{target}".rstrip()
        )
    return "\n".join([*lines, *_rest(result)])


def exact_table(result: Any, curvature: Any) -> str:
    """Return the repr of a result without sampling error; `curvature` is its Hessian in the form that it has."""
    form = "zero" if curvature is None else "dense" if isinstance(curvature, Tensor) else "matrix-free"
    lines = [
        f"{type(result).__name__} of {_size(result)}{f', {result.method}' if result.method else ''}, {form} Hessian",
        *([f"  {result.note}"] if result.note else []),
        "  example      f(x)      value  |gradient|   passes",
    ]
    for i in range(min(len(result), MOST_EXAMPLES)):
        slope = float(torch.linalg.vector_norm(result.derivatives.gradient[i]))
        lines.append(
            f"  {i:7d}  {float(result.output[i]):8.4g}  {float(result.value[i]):9.4g}  {slope:10.4g}  "
            f"{float(result.n_passes[i]):7.0f}"
        )
    return "\n".join([*lines, *_rest(result)])


def describe_gaussian(gaussian: Any, d: int) -> str:
    """Return the kind of a Gaussian and the range of its standard deviations."""
    scales = gaussian.scales(d)
    low, high = float(scales.min()), float(scales.max())
    sigma = f"σ = {low:.3g}" if high - low <= 1e-6 * high else f"σ = {low:.3g} … {high:.3g}"
    return f"{type(gaussian).__name__} {sigma}"


def _target_head(result: Any) -> str:
    if result.target is None:
        return ""
    return "   target, the predicted class" if result.predicted else "   target"


def _size(result: Any) -> str:
    b, d, _ = result.shape
    if result.input_parts is not None:
        inputs = ", ".join(f"{part.name} {part.shape}" for part in result.feature_parts or result.input_parts)
        return f"{b} example(s) × {d} {'features' if result.grouping is None else 'groups'} of inputs {inputs}"
    what = f"{d} groups" if result.grouping is not None else f"{d} features {result.feature_shape}"
    unit = f", output in {result.unit}" if result.unit else ""
    return f"{b} example(s) × {what}{unit}"


def _precision(result: Any) -> str:
    if result.precision_error is None:
        return ""
    return f", {result.precision} (noise up to {float(result.precision_error.max()):.0%} of a gradient's change)"


def _rest(result: Any) -> list[str]:
    more = len(result) - MOST_EXAMPLES
    return [f"  … and {more} more"] if more > 0 else []
