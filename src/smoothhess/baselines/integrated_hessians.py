"""Integrated Hessians: what each pair of features contributes on the way from a baseline to the input."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from smoothhess.baselines.derivative_source import DENSE, Derivatives, Level, Source, caution, curvature
from smoothhess.baselines.log_quadrature import logarithmic_rule
from smoothhess.model import targets as targets
from smoothhess.model.gradients import check_inputs
from smoothhess.result.exact import Attribution, Exact
from smoothhess.result.interactions import Interactions

CANCELLED = 1e-3  # share of the absolute row sums that is not missed where they cancel
MOST_STEPS = 500  # points; the rule for more of them takes longer to find than it is worth


def integrated_hessians(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    baselines: Any = None,
    of: str | Derivatives = "own",
    n_steps: int = 32,
    tolerance: float = 0.05,
    internal_batch_size: int | None = None,
    show_progress: bool = False,
    **options: Any,
) -> Attribution:
    """Interactions Γ of all pairs, and of each feature with itself, that add up to h(x) − h(x′) for a baseline x′.

    With Δ = x − x′, and h the model or the smooth function that takes its place (see `of`):

        Γ_ij = Δ_i Δ_j ∫∫ αβ ∂_ij h(x′ + αβΔ) dα dβ,  and on the diagonal + Δ_i ∫∫ ∂_i h(x′ + αβΔ) dα dβ.

    Only the product t = αβ enters. Its density is −log t, so both are integrals over t alone, taken by the Gauss rule
    for that weight: n_steps points do what n_steps² of a double sum do. Row sums are the Integrated Gradients of h.

    Γ is Integrated Gradients applied twice, and its entries add up to h(x) − h(x′) when gradient and Hessian belong to
    one function and the rule is fine enough. Both are checked: the note says how far off the sum is, and a warning is
    given beyond `tolerance`. The Hessian of a ReLU network sits on its kinks, where no point of a path meets it: its
    own derivatives do not add up; use a softened or smoothed network.

    Args:
        forward_func: the model, borrowed and given back as it was.
        inputs: (B, *shape), floating point; examples in dimension 0.
        target: which output; see `smoothhess.model.targets`.
        additional_forward_args: further arguments of the model; tensors with B rows follow their example.
        baselines: where the path begins: a number, or a tensor of the shape of one input or of the batch; 0 if None.
        of: whose derivatives: "own" of the model; "softplus" or "swish" of the softened network, with beta=; "smooth"
            of the model smoothed by a Gaussian, with sigma=, n_calls=, … of `SmoothHess.attribute`, and draws of their
            own at every point; or a function with the signature of the baselines.
        n_steps: points on the path.
        tolerance: share of h(x) − h(x′) by which the entries may miss it before a warning is given; the noise of a
            sampled h, and a thousandth of the absolute row sums, are allowed for.
        internal_batch_size: rows per forward pass; chosen by memory when None. Never changes the result.
        show_progress: a progress bar.
        options: for what `of` names. dense=False keeps a softened network's Γ matrix-free.

    Returns:
        An Attribution: its matrix is Γ, `gradient` holds the row sums (Integrated Gradients), `output` is f(x) and
        `value` is h(x) − h(x′), which all entries add up to.

    >>> f = lambda x: x[:, 0] * x[:, 1] + x[:, 1]
    >>> integrated_hessians(f, torch.tensor([[2.0, 3.0]])).hessian  # x₁x₂ = 6 in quarters, x₂ = 3 to itself
    tensor([[[1.5000, 1.5000],
             [1.5000, 4.5000]]])
    """
    check_inputs(inputs)
    inputs, source = inputs.detach(), Source.ensure(of, options)
    start = _baseline(baselines, inputs)
    _check_steps(n_steps)
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance!r}.")
    if "feature_mask" in options:
        raise ValueError("feature_mask is of no use here: Γ is no sum of sums. Use groups(mask) of the result.")

    def at(find: Callable[..., Any], points: Tensor, step: int) -> Any:
        own = {"seed": _reseeded(options.get("seed", 0), step)} if source.is_sampled else {}
        return find(
            forward_func, points, target, additional_forward_args, internal_batch_size=internal_batch_size, **own
        )

    move = (inputs - start).flatten(1)  # Δ
    first, second, rest = torch.zeros_like(move), None, []  # Σ w ∇h, Σ w t ∇²h as a matrix, and where it is none
    noise, error, passes = torch.zeros(3, len(inputs), dtype=inputs.dtype, device=inputs.device)  # (B,) each
    rule = zip(*logarithmic_rule(n_steps), strict=True)
    bar = tqdm(rule, "integrated Hessians", n_steps, unit="point", disable=not show_progress, leave=False)
    for step, (t, weight) in enumerate(bar):
        here: Interactions = at(source, start + float(t) * (inputs - start), step)
        first = first + float(weight) * here.gradient.flatten(1)
        share, form = float(weight * t), curvature(here)
        if "hessian" in form:
            second = share * form["hessian"] if second is None else second.add_(form["hessian"], alpha=share)
        elif form:
            rest.append((share, here))
        if not isinstance(here, Exact):
            noise = noise + (share * here.bilinear(move, move).stderr).square()
        passes, error = passes + here.n_passes, torch.maximum(error, here.relative_error)
    end, begin = (at(source.level, x, n_steps + i) for i, x in enumerate((inputs, start)))
    noise = (noise + end.stderr.square() + begin.stderr.square()).sqrt()
    integral = _Integral(move, first, second, tuple(rest))
    dense = not rest and (second is not None or move.shape[1] <= DENSE)
    rows = integral(torch.ones_like(move)[:, None])[:, 0]
    return Attribution.make(
        inputs,
        end.output,
        rows,
        integral.dense() if dense else None,
        operator=None if dense else integral,
        value=end.value - begin.value,
        target=targets.entries(target, len(inputs)),
        n_passes=passes + end.n_passes + begin.n_passes,
        relative_error=error,
        seed=options.get("seed", 0) if source.is_sampled else 0,
        method=f"integrated Hessians, {source.name}",
        note=_completeness(rows, end, begin, noise, tolerance) + caution(error),
    )


@dataclass(frozen=True, eq=False)
class _Integral:
    """Γ as an operator on rows: diag(Δ) Σ w t ∇²h diag(Δ) + diag(Δ Σ w ∇h)."""

    move: Tensor  # (B, d) Δ
    first: Tensor  # (B, d) Σ w ∇h
    second: Tensor | None  # (B, d, d) Σ w t ∇²h of the points whose Hessian is a matrix
    rest: tuple[tuple[float, Interactions], ...]  # w t of the others, and what their Hessian is asked from

    def __call__(self, rows: Tensor) -> Tensor:
        moved = self.move[:, None] * rows
        total = self.first[:, None] * rows
        if self.second is not None:
            total = total + moved @ self.second
        for share, here in self.rest:
            total = total + share * here.product(moved)
        return self.move[:, None] * total

    def dense(self) -> Tensor:
        """Γ as a matrix, where all Hessians were."""
        whole = torch.diag_embed(self.move * self.first)
        return whole if self.second is None else whole + self.move[:, :, None] * self.second * self.move[:, None]

    def select(self, index: Tensor) -> _Integral:
        """Of the examples at `index`."""
        second = None if self.second is None else self.second[index]
        rest = tuple((share, here[index]) for share, here in self.rest)
        return _Integral(self.move[index], self.first[index], second, rest)


def _completeness(rows: Tensor, end: Level, begin: Level, noise: Tensor, tolerance: float) -> str:
    """What is to be said about Σ Γ = h(x) − h(x′); warns where it fails."""
    total = rows.double().sum(1)
    missed = total - (end.value - begin.value).double()
    scale = (end.value - begin.value).abs().double()
    share = torch.where(missed == 0, 0.0, missed.abs() / scale)
    model = (total - (end.output - begin.output).double()).abs()
    failed = missed.abs() > tolerance * scale + 3 * noise.double() + CANCELLED * rows.abs().double().sum(1)
    if bool(failed.any()):
        warnings.warn(
            f"the entries of {int(failed.sum())} of {len(failed)} example(s) do not add up to h(x) − h(x′): they miss "
            f"up to {float(share[failed].max()):.2g} of it. Use more n_steps. The own Hessian of a network with kinks "
            "(ReLU) misses what happens there: use of='softplus', 'swish' or 'smooth'.",
            stacklevel=3,
        )
    chance = f" ± {float(noise.max()):.2g}" if bool(noise.any()) else ""
    return (
        f"completeness: entries miss h(x) − h(x′) by {float(missed.abs().max()):.2g}{chance}, "
        f"{float(share.max()):.2g} of it, and f(x) − f(x′) by {float(model.max()):.2g}, at most"
    )


def _reseeded(seed: int | Sequence[int], step: int) -> int | list[int]:
    """Seeds of a point's own, so that the errors of different points average out."""
    if isinstance(seed, SupportsIndex):
        return int(np.random.SeedSequence([operator.index(seed), step]).generate_state(1)[0])
    return [int(np.random.SeedSequence([int(s), step]).generate_state(1)[0]) for s in seed]


# --- what is refused at the door --------------------------------------------------------------------------------------


def _baseline(baselines: Any, inputs: Tensor) -> Tensor:
    """Where the path of each example begins, (B, *shape)."""
    given = torch.as_tensor(0.0 if baselines is None else baselines)
    shapes = ((), tuple(inputs.shape[1:]), (1, *inputs.shape[1:]), tuple(inputs.shape))
    if tuple(given.shape) not in shapes:
        raise ValueError(
            f"baselines must be a number, or have the shape of one input {shapes[1]} or of the batch {shapes[3]}, got "
            f"{tuple(given.shape)}."
        )
    if given.is_complex() or given.dtype == torch.bool:
        raise TypeError(f"baselines must hold real numbers, got {given.dtype}.")
    if not torch.isfinite(given).all():
        raise ValueError("baselines contain NaN or infinity.")
    return given.detach().to(inputs).expand_as(inputs)


def _check_steps(n_steps: Any) -> None:
    if isinstance(n_steps, bool) or not hasattr(n_steps, "__index__"):
        raise TypeError(f"n_steps must be an integer, got {type(n_steps).__name__}.")
    if not 1 <= n_steps <= MOST_STEPS:
        raise ValueError(f"n_steps must be between 1 and {MOST_STEPS} points, got {n_steps}.")
