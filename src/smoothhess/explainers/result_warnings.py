"""Warnings of an explainer: unfinished sampling, unknown errors, gradients that contradict the values, wrong groups.

This module defines the conditions and the messages of the warnings. The quantities that it tests are computed in
`smoothhess.result.interactions` and `smoothhess.estimate`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smoothhess.draws.gaussian import Gaussian, Isotropic
from smoothhess.estimate.quadratic_rows import FEW_ROWS, is_informative, rows_of_quadratic
from smoothhess.estimate.stein_check import combined
from smoothhess.explainers.adaptive import ZERO_SHARE
from smoothhess.linalg.memory import PART_MATRICES
from smoothhess.model.layer_functions import Embedded
from smoothhess.model.token_gates import are_embeddings
from smoothhess.result.interactions import Interactions

TOO_LARGE, FITTING = 1000.0, 100.0  # size of a column relative to σ, for the warning about columns
FAR = 100.0, 1e6  # σ relative to the largest input: between them the noise replaces the input, above it is centred
STEIN_LIMIT, STEIN_ROWS = 5, 200  # |z| above which a warning is issued; the limit is higher with fewer rows than that


class FewEventsWarning(UserWarning):
    """Too few draws, or none, changed the gradient: the error of the interactions is unknown or uncertain."""


class BiasWarning(UserWarning):
    """The bias of an estimated τ is the larger part of the error."""


def warn_unscaled_columns(inputs: Tensor, gaussian: Gaussian) -> None:
    """Warn if one σ is far too small for some columns of a table (B, d) and fits others."""
    if isinstance(gaussian, Isotropic) and (words := unscaled_columns(inputs, gaussian.sigma)):
        warnings.warn(words, stacklevel=3)


def unscaled_columns(inputs: Tensor, sigma: float) -> str:
    """A sentence about columns of a table (N, d) that differ too much in scale for one σ; empty if there are none."""
    if inputs.ndim != 2:
        return ""
    size = inputs.abs().amax(0) / sigma  # (d,)
    large, fitting = size > TOO_LARGE, size < FITTING
    if not bool(large.any()) or not bool(fitting.any()):
        return ""
    return (
        f"{int(large.sum())} of {inputs.shape[1]} columns are larger than {TOO_LARGE:g} σ, and {int(fitting.sum())} "
        f"are smaller than {FITTING:g} σ: one σ does not fit columns of such different scales. Standardise the "
        "columns, or pass a sigma per column."
    )


def warn_noise_beyond_inputs(inputs: Tensor, gaussian: Gaussian) -> None:
    """Warn if σ is so large that nothing of the inputs is left; a radius or σ in other units is the usual cause."""
    largest = float(inputs.abs().max())
    if isinstance(gaussian, Isotropic) and FAR[0] * largest < gaussian.sigma < FAR[1] * largest:
        warnings.warn(
            f"sigma is {gaussian.sigma / largest:.0f} times as large as the largest number of the inputs: the result "
            "describes the model far away from them. Pass sigma in the units of the inputs; smoothhess.diagnose(model, "
            "inputs, data=…) recommends one.",
            stacklevel=3,
        )


def warn_of(result: Interactions, tol: float | None) -> None:
    """Issue all warnings about a result, at the caller of the public method that calls this function."""
    _warn_unfinished(result, tol)
    _warn_few_events(result)
    _warn_biased(result)
    warn_inconsistent(result)


def _warn_unfinished(result: Interactions, tol: float | None) -> None:
    stopped = [i for i, s in enumerate(result.status) if s == "budget"]
    few = [i for i in stopped if tol is not None and float(result.relative_error[i]) <= tol]
    if few:
        warnings.warn(
            f"{len(few)} of {len(result)} example(s) stopped at max_calls={int(result.n_calls[few].max())}: the "
            f"reported error is at most {tol}, but a few draws carry the estimate, so that it is not reliable "
            f"(smallest n_eff {float(result.n_eff[few].min()):.1f}). Explain a logit instead of a probability, or use "
            "a larger sigma or more calls.",
            stacklevel=4,
        )
    if stopped := [i for i in stopped if i not in few]:
        part = result[stopped]
        needed = part.calls_for(tol or 0.1)
        estimate = f" About {int(needed.max())} calls are needed." if torch.isfinite(needed).all() else ""
        low, high = (f"{float(e):.3g}" for e in part.relative_error.aminmax())
        reached = low if low == high else f"{low} to {high}"
        warnings.warn(
            f"{len(stopped)} of {len(result)} example(s) stopped at max_calls={int(part.n_calls.max())} before "
            f"relative_error ≤ {tol}: reached {reached}.{estimate} "
            "Raise max_calls, or accept the reported errors.",
            stacklevel=4,
        )
    zeros = result.status.count("zero")
    if zeros:
        warnings.warn(
            f"{zeros} of {len(result)} example(s): H cannot be distinguished from zero. Interactions explain less than "
            f"{ZERO_SHARE:.0%} of the gradient's variation at this sigma, or the gradient did not vary at all: the "
            "model is linear there, its output is saturated (explain a logit instead), or no draw crossed a kink (use "
            "a larger sigma). Run smoothhess.diagnose to find out which.",
            stacklevel=4,
        )


def _warn_biased(result: Interactions) -> None:
    """Warn where the bias from an estimated τ is the larger part of the error."""
    if result.statistics.drift is None:
        return
    biased = result.noise.biased
    if bool(biased.any()):
        warnings.warn(
            f"the closed form of {int(biased.sum())} of {len(result)} example(s) uses τ estimated from tau_probes="
            f"{result.tau_probes} directions. Its bias is the larger part of the error, further calls do not reduce "
            "it, and the intervals contain only a rough estimate of it. Pass more tau_probes, or tau_probes=None for "
            "exact τ.",
            BiasWarning,
            stacklevel=4,
        )


class _Events(NamedTuple):
    """What the draws of B examples have seen, (B,) each."""

    jumping: Tensor  # where the function is discontinuous
    unknown: Tensor  # where the error is unknown for another reason
    unmoved: Tensor  # where no gradient changed
    moved: Tensor  # rows that changed the gradient
    kinked: Tensor  # rows that are not those of a quadratic function
    few: Tensor  # where `moved` is too small
    few_kinks: Tensor  # where `kinked` is
    heavy: Tensor  # where a few draws carry the estimate

    @staticmethod
    def of(result: Interactions) -> _Events:
        """Rows of zeros, which pad examples with fewer rows, do not count."""
        jumping, stats = result.discontinuous, result.statistics
        unknown = unmoved = torch.zeros_like(jumping)
        if bool(stats.is_uncontrolled.any()):
            unknown, unmoved = result.noise.unknown & ~jumping, result.noise.unmoved
        moved = ((stats.head.along != 0) | (stats.head.across != 0)).sum(1)
        kinked = (~rows_of_quadratic(stats)).sum(1)
        few, few_kinks = (
            (count > 0) & (count < FEW_ROWS) & (stats.n_head >= 2 * count.clamp_min(3)) & ~unknown
            for count in (moved, kinked)
        )
        if stats.rare is not None:  # the error contains the variance of kinks that few rows show
            few, few_kinks = few & ~stats.rare.complete, few_kinks & ~stats.rare.complete
        few_kinks = few_kinks & stats.has_own_values & is_informative(stats) & ~few
        if result.estimate.no_kinks is not None:  # rows of a smooth function may differ from a quadratic one
            few_kinks = few_kinks & ~result.estimate.no_kinks
        heavy = result.estimate.has_heavy_tails & ~few & ~few_kinks & ~unknown & ~jumping
        return _Events(jumping, unknown, unmoved, moved, kinked, few, few_kinks, heavy)

    @staticmethod
    def in_parts(result: Interactions) -> _Events:
        """As `of`; matrices are made of a part of the examples at a time."""
        step = PART_MATRICES.items(8 * result.statistics.k**2, result.device)
        if len(result) <= step:
            return _Events.of(result)
        found = [_Events.of(result.select(index)) for index in torch.arange(len(result)).split(step)]
        return _Events(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _warn_few_events(result: Interactions) -> None:
    """Warn of jumps, and of examples in which fewer than FEW_ROWS rows of the head, or none, show a kink."""
    stats, events = result.statistics, _Events.in_parts(result)
    jumping, unknown, unmoved, moved, kinked, few, few_kinks, heavy = events
    if jumping.any():
        warnings.warn(
            f"the function of {int(jumping.sum())} of {len(result)} example(s) is discontinuous: its values change "
            "within sigma and its gradients do not, as in a step function or a decision tree. The jumps are missing "
            "from the interactions, whose error is unknown (NaN).",
            stacklevel=4,
        )
    if few_kinks.any():
        warnings.warn(
            f"at most {int(kinked[few_kinks].max())} of {int(stats.n_head[few_kinks].max())} draws of "
            f"{int(few_kinks.sum())} of {len(result)} example(s) crossed a kink, and all others agree with a quadratic "
            "function: the contribution of the kinks is estimated from so few draws that its standard error is "
            "unreliable. Use more calls or a larger sigma.",
            FewEventsWarning,
            stacklevel=4,
        )
    if few.any():
        warnings.warn(
            f"at most {int(moved[few].max())} of {int(stats.n_head[few].max())} draws of {int(few.sum())} of "
            f"{len(result)} example(s) changed the gradient: the estimate is based on so few draws that its standard "
            "error is unreliable. Use more calls or a larger sigma.",
            FewEventsWarning,
            stacklevel=4,
        )
    if heavy.any():
        n_eff, rows = float(result.n_eff[heavy].min()), int(stats.n[heavy].max())
        warnings.warn(
            f"a few draws carry the estimate of {int(heavy.sum())} of {len(result)} example(s): the effective number "
            f"of draws is {n_eff:.1f} of {rows}. Its standard errors are unreliable. Explain a logit instead of a "
            "probability or a loss, or use a larger sigma or more calls.",
            FewEventsWarning,
            stacklevel=4,
        )
    if unknown.any():
        rows = int(result.n_calls[unknown].max())
        what = "changed" if bool(unmoved[unknown].all()) else "differs from that of a quadratic function"
        warnings.warn(
            f"no gradient of {int(unknown.sum())} of {len(result)} example(s) {what} in {rows} calls, and the model "
            "has operations with kinks that a draw could cross: the interactions that these cause are unknown, and the "
            "error is NaN. Use a larger sigma, more calls, or explain a logit instead of a saturated output.",
            FewEventsWarning,
            stacklevel=4,
        )


def warn_summed_embeddings(forward_func: Callable[..., Any], inputs: Tensor, mask: Tensor) -> None:
    """Warn if a mask sums the coordinates of token embeddings.

    The sum is the derivative along the vector of ones, which layer normalisation removes, and which has no meaning for
    a token. Inputs (B, T, E) are taken for embeddings only if the function is an `Embedded`, or if their vectors are
    rows of an nn.Embedding of the model, so channels, series and images do not cause the warning.
    """
    by_token = inputs.ndim == 3 and mask.ndim >= 2 and bool((mask == mask[..., :1]).all())
    if by_token and (isinstance(forward_func, Embedded) or are_embeddings(forward_func, inputs)):
        warnings.warn(
            "feature_mask sums the coordinates of embeddings, the derivative along a vector of ones, which layer "
            "normalisation removes: it does not measure the interactions of tokens. Use TokenSmoothHess, or pass the "
            "direction in which each token is moved, direction=embeddings − baseline.",
            stacklevel=3,
        )


def warn_inconsistent(result: Interactions, stacklevel: int = 4) -> None:
    """Warn where the gradients are not the derivatives of the values, or the function is discontinuous."""
    z = result.stein_z
    exact = result.precision == "float32"  # gradients of lower precision differ from the values' by rounding
    limit = STEIN_LIMIT * (STEIN_ROWS / result.statistics.n).clamp_min(1)
    flagged = (combined(z) > limit) & exact
    first = flagged & (z[:, 0].abs() > limit)
    if first.any():
        warnings.warn(
            f"the gradients of {int(first.sum())} of {len(result)} example(s) are not the derivatives of the values: "
            f"E[f δ] and E[∇f] differ by {float(z[:, 0].abs().max()):.0f} standard errors. Look for detached or "
            "straight-through steps, jumps, or a wrong gradient function; the interactions describe the gradients.",
            stacklevel=stacklevel,
        )
    elif flagged.any():
        warnings.warn(
            f"the values of {int(flagged.sum())} of {len(result)} example(s) have curvature that the gradients do not "
            f"have: E[f(|z|² − d)] and E[z·∇f] differ by {float(z[:, 1].abs().max()):.0f} standard errors. The "
            "function is probably discontinuous near the input; jumps are missing from the interactions.",
            stacklevel=stacklevel,
        )
