"""Sweeps over the scale of the smoothing with common random numbers, and paired differences between scales.

A design is a function of (seed, block) only, so one seed gives the same whitened directions z at every scale, and
δ = c L z differs only in c. The change of the Hessian between scales c_a L and c_b L is then also a smoothed Hessian,

    H_a − H_b = ∇²E[F(x + L z)],      with the rows   z (γ_a/c_a² − γ_b/c_b²)ᵀ      where γ_c = (c L)ᵀ∇f(x + c L z),

and the error estimates of a single result apply to it. Its errors are paired, and much smaller than those of two
independent estimates if the draws of both scales cross the same kinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from smoothhess.draws.gaussian import Gaussian
from smoothhess.draws.seeding import fixed_normal
from smoothhess.estimate import student_t
from smoothhess.estimate.hessian_estimate import HessianEstimate
from smoothhess.estimate.statistics import DrawRange, Rows, Statistics, own_slopes
from smoothhess.explainers.smooth_hess import NeuronSmoothHess, SmoothHess
from smoothhess.explainers.token_smooth_hess import TokenSmoothHess
from smoothhess.linalg.low_rank import Known
from smoothhess.model.model_call import ModelCall
from smoothhess.result.interactions import Interactions, SampledResult
from smoothhess.result.intervals import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TWICE = "all scales must be different, got one of them twice. Remove it."


@dataclass(frozen=True, eq=False)
class Curve(Estimate):
    """One number for each of B examples at S scales, (S, B), with standard errors for each scale.

    Scales share their draws, so the errors of neighbouring scales are correlated: use `Sweep.difference` for the
    standard error of a change between scales.
    """

    sigmas: Tensor  # (S,)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Lower and upper end of the confidence interval at each scale, (S, B) each."""
        width = student_t.quantile(level, self.df).to(self.stderr)
        reach = torch.where(self.stderr > 0, width * self.stderr, 0.0)
        return self.value - reach, self.value + reach

    def plot(self, *, example: int | None = None, level: float = 0.95, ax: Axes | None = None) -> Axes:
        """Plot the curve against σ with confidence intervals, for all examples or for one."""
        from smoothhess.view.figures import canvas

        ax = canvas.new_axes(ax, 6.0, 3.6)
        low, high = self.interval(level)
        shown = range(self.value.shape[1]) if example is None else [example]
        sigmas = canvas.array(self.sigmas)
        for b in shown:
            middle, below, above = (canvas.array(t[:, b]) for t in (self.value, low, high))
            ax.errorbar(sigmas, middle, yerr=[middle - below, above - middle], marker="o", capsize=2, label=str(b))
        if sigmas.max() > 10 * sigmas.min():
            ax.set_xscale("log")
        ax.axhline(0, color=canvas.INK, linewidth=0.8, zorder=1)
        ax.set_xlabel(f"σ\nbars: {level * 100:g} % intervals of each scale", fontsize="small")
        if len(shown) > 1:
            ax.legend(title="example", fontsize="small", frameon=False)
        canvas.hide_spines(ax, "top", "right")
        return ax


class Change(SampledResult):
    """H_a − H_b of two scales of one sweep as a result with paired errors. Returned by `Sweep.difference`.

    A change has the methods of a result: `top_pairs` lists the pairs that changed, with intervals and false-discovery
    control, `bilinear` and `row` have paired errors, `relative_error` is that of the change (inf if it is not
    distinguishable from zero), and `taylor()` is the difference of the two surrogates. The estimate is the unbiased
    one. `r2` is NaN, since the statistics of the two scales are not sufficient to compute it.
    """

    @property
    def r2(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """NaN, since R² of a change cannot be computed, (B,)."""
        return torch.full_like(self.output, torch.nan)

    def __repr__(self) -> str:
        return super().__repr__().replace("Interactions", "Change between two scales of the interactions", 1)


@dataclass(frozen=True, eq=False, repr=False)
class Sweep(Sequence[Interactions]):
    """One result per scale, in the order of the scales, all from the same draws. Returned by `sweep`."""

    results: tuple[Interactions, ...]

    def __len__(self) -> int:
        return len(self.results)

    @overload
    def __getitem__(self, index: int) -> Interactions: ...
    @overload
    def __getitem__(self, index: slice) -> Sweep: ...
    def __getitem__(self, index: int | slice) -> Interactions | Sweep:
        if isinstance(index, slice):
            return Sweep(self.results[index])
        return self.results[index]

    @property
    def sigmas(self) -> Tensor:
        """σ of each scale, (S,) float64; the root mean square over features if they have different σ."""
        d = self.results[0].inputs[0].numel()
        return torch.stack([r.gaussian.scales(d).double().cpu().square().mean().sqrt() for r in self.results])

    @property
    def radii(self) -> Tensor:
        """σ√d of each scale, (S,): the typical distance of its draws from the input."""
        return self.sigmas * self.results[0].inputs[0].numel() ** 0.5

    @property
    def gradient(self) -> Tensor:
        """SmoothGrad at each scale, (S, B, *feature shape)."""
        return torch.stack([r.gradient for r in self.results])

    @property
    def value(self) -> Tensor:
        """The smoothed value h(x) at each scale, (S, B)."""
        return torch.stack([r.value for r in self.results])

    @property
    def relative_error(self) -> Tensor:
        """Relative error of the Hessian of each scale and example, (S, B)."""
        return torch.stack([r.relative_error for r in self.results])

    @property
    def r2(self) -> Tensor:
        """R² of each scale and example, (S, B)."""
        return torch.stack([r.r2 for r in self.results])

    def entry(self, i: int | tuple[int, ...], j: int | tuple[int, ...]) -> Curve:
        """H_ij at each scale, (S, B)."""
        return self.bilinear(*(_unit_vector(self.results[0], index) for index in (i, j)))

    def bilinear(self, u: Tensor, v: Tensor) -> Curve:
        """uᵀHv at each scale, (S, B)."""
        found = [r.bilinear(u, v) for r in self.results]
        value, stderr, df = (torch.stack([getattr(e, name) for e in found]) for name in ("value", "stderr", "df"))
        return Curve(value, stderr, df, self.sigmas)

    def groups(self, feature_mask: Tensor, direction: Tensor | None = None) -> Sweep:
        """The sweep of interactions between groups; see `Interactions.groups`."""
        return Sweep(tuple(r.groups(feature_mask, direction) for r in self.results))

    def difference(self, a: int, b: int) -> Change:
        """H, G and h of scale `a` minus those of scale `b`, with paired standard errors.

        If both scales have the same number of draws, this is the difference of their unbiased estimates. Otherwise
        (adaptive runs) it is computed from the first draws that both have kept, and `n_calls` is their number.

        Args:
            a, b: indices of the two scales.

        Raises:
            TypeError: if a or b is not an index, such as a σ.
            ValueError: if the two Gaussians differ in more than their scale, or do not share their draws.
        """
        if not all(hasattr(i, "__index__") for i in (a, b)):
            sigmas = ", ".join(f"{i}: σ = {s:.4g}" for i, s in enumerate(self.sigmas.tolist()))
            raise TypeError(f"difference takes the indices of two scales ({sigmas}), got {a!r} and {b!r}.")
        return _difference(self.results[a], self.results[b])

    def plot(self, i: int | tuple[int, ...], j: int | tuple[int, ...], **options: Any) -> Axes:
        """Plot H_ij against σ; options are those of `Curve.plot`."""
        ax = self.entry(i, j).plot(**options)
        ax.set_ylabel(f"$H_{{{i}, {j}}}$")
        return ax

    def to_markdown(self) -> str:
        """A table of scales; means over examples."""
        head, *rows = self._cells()
        return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---:"] * len(head), *rows])

    def __repr__(self) -> str:
        first = self.results[0]
        rows = self._cells()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            f"Sweep over {len(self)} scale(s) of {len(first)} example(s), {first.design} design, seed {first.seed}"
        ]
        lines += ["  " + "  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([*lines, "  means over examples; all scales share their draws"])

    def _cells(self) -> list[list[str]]:
        rows = [["σ", "σ√d", "‖G‖", "rel. error", "R²", "calls"]]
        for r, sigma, radius in zip(self.results, self.sigmas.tolist(), self.radii.tolist(), strict=True):
            size, error, r2 = r.gradient.flatten(1).norm(dim=1).mean(), r.relative_error.mean(), r.r2.double().nanmean()
            cells = [f"{sigma:.4g}", f"{radius:.4g}", f"{size:.4g}", f"{error:.3g}", f"{r2:.3f}"]
            rows.append([*cells, f"{r.n_calls.double().mean():.0f}"])
        return rows


def sweep(
    explainer: Any,
    inputs: Tensor,
    sigmas: Sequence[Any] | Tensor | None = None,
    *,
    radii: Sequence[float] | Tensor | None = None,
    target: Any = None,
    additional_forward_args: Any = None,
    **options: Any,
) -> Sweep:
    """One `Interactions` per scale, all from the same random numbers.

    Args:
        explainer: a SmoothHess, NeuronSmoothHess or TokenSmoothHess, or a model, for which SmoothHess(model) is used.
        inputs, target, additional_forward_args: see `SmoothHess.attribute`.
        sigmas: the scales: standard deviations, or per-feature arrays, or Gaussians of one rank.
        radii: the scales as radii, σ = r/√d. Pass either sigmas or radii.
        options: other options of `attribute`: n_calls, seed, design, … (and neuron_selector). All scales share the
            seed. With n_calls=None each scale has its own number of draws, of which the first ones are shared.

    Returns:
        A Sweep with one result per scale.

    Raises:
        TypeError: if sigmas or radii is not a sequence.
        ValueError: if sigmas and radii are both given or both missing, or if a scale is given twice.

    >>> f = lambda x: x[:, 0].abs()
    >>> scales = sweep(f, torch.zeros(1, 2).double(), [0.1, 0.2, 0.4], n_calls=400)
    >>> scales.entry(0, 0).value[:, 0] * scales.sigmas  # √(2/π)/σ: the smaller σ, the sharper the kink
    tensor([0.7979, 0.7979, 0.7979], dtype=torch.float64)
    >>> scales.difference(0, 1).top_pairs(1)[0][0].significant  # nothing between the two features changes with σ
    False
    """
    if not hasattr(explainer, "attribute"):
        explainer = SmoothHess(explainer)
    given = [name for name in ("sigma", "radius", "gaussian") if options.get(name) is not None]
    if given:
        raise ValueError(
            f"sweep takes several scales: pass a list as sigmas or radii, not {given[0]}. sigmas may hold Gaussians, "
            "such as [segments.noise(parts, s) for s in (0.1, 0.3)]."
        )
    arguments = {"additional_forward_args": additional_forward_args, **options}
    if target is not None:
        arguments["target"] = target
    if isinstance(explainer, SmoothHess | NeuronSmoothHess | TokenSmoothHess):
        arguments.setdefault("tails", None)  # draws from tail strata are not shared between scales
    if isinstance(explainer, TokenSmoothHess):  # ids, whose gates are the features
        listed = _listed(sigmas, radii)
        name = "radius" if sigmas is None else "sigma"
        results = tuple(explainer.attribute(inputs, **{name: scale}, **arguments) for scale in listed)
        if any(a.gaussian.same_as(b.gaussian) for i, a in enumerate(results) for b in results[:i]):
            raise ValueError(TWICE)
        return Sweep(results)
    call = ModelCall(getattr(explainer, "forward_func", explainer.attribute), inputs)
    gaussians = _scales(sigmas, radii, call.inputs[0].numel())
    if call.names is not None:
        arguments.setdefault("names", call.names)
    return Sweep(tuple(explainer.attribute(call.inputs, gaussian=g, **arguments) for g in gaussians))


def _listed(sigmas: Any, radii: Any) -> list[Any]:
    """The given scales as a list.

    Raises:
        TypeError, ValueError: as `sweep`.
    """
    if (sigmas is None) == (radii is None):
        got = "neither" if sigmas is None else "both"
        raise ValueError(f"exactly one of sigmas and radii is needed: pass sigmas or radii, got {got}.")
    listed = radii if sigmas is None else sigmas
    if isinstance(listed, Gaussian) or not hasattr(listed, "__iter__") or getattr(listed, "ndim", 1) == 0:
        raise TypeError(f"sigmas and radii must hold several scales: pass a list, got {type(listed).__name__}.")
    if not len(listed := list(listed)):
        raise ValueError("expected at least one scale, got none.")
    return listed


def _scales(sigmas: Any, radii: Any, d: int) -> list[Gaussian]:
    """Validate the scales and return one Gaussian for each."""
    gaussians = []
    for scale in _listed(sigmas, radii):
        if isinstance(scale, Gaussian):
            gaussians.append(Gaussian.ensure(gaussian=scale, d=d))
        else:
            gaussians.append(Gaussian.ensure(**{"radius" if sigmas is None else "sigma": scale}, d=d))
    if any(a.same_as(b) for i, a in enumerate(gaussians) for b in gaussians[:i]):
        raise ValueError(TWICE)
    return gaussians


def _unit_vector(result: Interactions, index: int | tuple[int, ...]) -> Tensor:
    unit = torch.zeros(result.shape[1], dtype=result.dtype, device=result.device)
    unit[result.flat_index(index)] = 1
    return unit


# --- the change between two scales ------------------------------------------------------------------------------------


def _difference(a: Interactions, b: Interactions) -> Change:
    if a.statistics.tails is not None or b.statistics.tails is not None:
        raise ValueError("draws from tail strata are not shared between scales. Explain both with tails=None.")
    c = _ratio(b.gaussian, a.gaussian, a.inputs)  # L_b = c L_a; all statistics are in the coordinates of a
    shared = _shared_rows(a, b)
    left, right = _restated(a, 1.0, shared), _restated(b, c, shared)
    grouping = a.grouping if a.grouping is None else a.grouping.without_r2()
    errors = [r.precision_error for r in (a, b) if r.precision_error is not None]
    return Change(
        inputs=a.inputs,
        estimate=HessianEstimate(_minus(left, right, whitened=grouping is None), a.gaussian, grouping),
        target=a.target,
        n_passes=a.n_passes + b.n_passes,
        status=("calls",) * len(a),
        control=a.control or b.control,
        unbiased=a.unbiased and b.unbiased,
        precision=a.precision,
        precision_error=torch.stack(errors).amax(0) if errors else None,
        names=a.names,
        classes=a.classes,
        unit=a.unit,
        predicted=a.predicted,
    )


def _ratio(gaussian: Gaussian, base: Gaussian, inputs: Tensor) -> float:
    """c with L = c L_base; ValueError if the two differ in more than scale."""
    d = inputs[0].numel()
    k = base.rank(d)
    if gaussian.rank(d) == k:
        # one random vector is enough: it lies in the kernel of a nonzero matrix with probability zero
        z = fixed_normal(k)
        own, other = (g.to("cpu", torch.float64).colour(z) for g in (base, gaussian))
        c = float(own @ other / (own @ own))
        if torch.allclose(other, c * own, rtol=1e-5, atol=1e-7 * float(other.abs().max())):  # also for float32
            return c
    raise ValueError(
        "differences need Gaussians that differ only in their scale, c·Σ; these two differ in shape. Compare the two "
        "results with their separate standard errors."
    )


def _shared_rows(a: Interactions, b: Interactions) -> Tensor | None:
    """Number of first rows that both results have in common, (B,); None if these are all rows."""
    if a.statistics.stream == b.statistics.stream:
        return None
    for first, second in zip(a.statistics.stream, b.statistics.stream, strict=True):
        if {(s.seed, s.start) for s in first} != {(s.seed, s.start) for s in second} or len(first + second) > 2:
            raise ValueError("these two scales do not share their draws. Compute both in one sweep, with one seed.")
    return torch.minimum(a.statistics.n_head, b.statistics.n_head)


def _restated(result: Interactions, c: float, shared: Tensor | None) -> Statistics:
    """The statistics of a result with L = c L' in the coordinates of L', of all rows or of the first `shared` rows."""
    stats = result.statistics if shared is None else _first_rows(result.statistics, shared)
    white = result.grouping is None
    # In whitened coordinates a Hessian is LᵀHL and a gradient Lᵀg. Group sums are in feature coordinates, except for
    # their scores, which are whitened.
    of_hessian, of_gradient = (c**-2, 1 / c) if white else (1.0, 1.0)
    of_score, of_odd = (1.0, c**-2) if white else (c, 1 / c)
    head = stats.head
    skew = stats.skew
    if skew is not None:
        skew = torch.cat([skew[..., : stats.k] / c, skew[..., stats.k :] / c**2], -1)
    return replace(
        stats,
        head=replace(
            head,
            score=head.score * of_score,
            odd=head.odd * of_odd,
            even=head.even * of_gradient,
            energy=head.energy / c**2,
            along=head.along * c**-2,
            across=head.across * c**-4,
        ),
        total=_times(stats.total, of_hessian),
        known=None if stats.known is None else stats.known.scaled(torch.full((len(stats),), of_hessian)),
        drift=_times(stats.drift, of_odd),
        rare=None,  # they have other margins at another scale
        drift_norm2=_times(stats.drift_norm2, c**-4),
        even_sum=stats.even_sum * of_gradient,
        gradient=stats.gradient * of_gradient,
        skew=skew,
        gram=_times(stats.gram, c**2),
    )


def _first_rows(stats: Statistics, rows: Tensor) -> Statistics:
    """The statistics of the first rows of each example, all of them in the head."""
    if stats.skew is not None and bool((rows != stats.n).any()):
        raise ValueError(
            "group sums do not hold the statistics for the errors of a part of their draws, and these two scales have "
            "unequal numbers of draws. Pass n_calls to sweep; or sweep without groups, then use "
            "difference(a, b).groups(mask)."
        )
    most = int(rows.max())
    inside = torch.arange(most, device=rows.device) < rows[:, None]  # (B, most)

    def cut(t: Tensor) -> Tensor:
        kept = t[:, :most]
        shape = (len(rows), most, *[1] * (t.ndim - 2))
        return kept if bool(inside.all()) else torch.where(inside.reshape(shape), kept, 0.0)

    head: Rows = stats.head.each(cut)
    return replace(
        stats,
        stream=tuple(
            (DrawRange(s[0].seed, s[0].start, s[0].start + n),)
            for s, n in zip(stats.stream, rows.tolist(), strict=True)
        ),
        n=rows,
        head=head,
        total=None,
        even_sum=head.even.double().sum(1),
        value_sum=head.value_even.double().sum(1),
        square_sum=torch.full_like(stats.square_sum, torch.nan),  # of all rows only
    )


def _minus(a: Statistics, b: Statistics, whitened: bool) -> Statistics:
    """The statistics of a − b: rows and sums are subtracted, bounds of errors are added.

    The slopes of the difference are computed from rows in whitened coordinates only: group sums have their scores and
    their gradients in different coordinates, also where there are as many groups as dimensions of the noise.
    """
    head = replace(
        a.head,
        odd=a.head.odd - b.head.odd,
        even=a.head.even - b.head.even,
        value_even=a.head.value_even - b.head.value_even,
        energy=a.head.energy + b.head.energy,  # used as an upper bound
        along=a.head.along - b.head.along,
        across=(a.head.across.sqrt() - b.head.across.sqrt()).square(),
    )
    if whitened:
        head = replace(head, **own_slopes(head.score, head.odd, head.weight, a.rank))
    drift = _less(a.drift, b.drift)
    if drift is not None and a.skew is not None:
        raise ValueError("differences of group sums do not support tau_probes. Use difference(a, b).groups(mask).")
    return replace(
        a,
        head=head,
        total=_less(a.total, b.total),
        known=_known_change(a.known, b.known),
        drift=drift,
        rare=None,
        drift_norm2=None if drift is None else drift.double().square().sum(-1).mean(-1),
        even_sum=a.even_sum - b.even_sum,
        value_sum=a.value_sum - b.value_sum,
        square_sum=torch.full_like(a.square_sum, torch.nan),
        value=torch.zeros_like(a.value),
        own_values=torch.zeros_like(a.own_values),
        gradient=torch.zeros_like(a.gradient),  # ∇f(x) is the same at every scale
        stein=torch.zeros_like(a.stein),
        skew=_less(a.skew, b.skew),
    )


def _known_change(a: Known | None, b: Known | None) -> Known | None:
    if b is not None:
        b = b.scaled(-torch.ones(len(b.core)))
    return a if b is None else b if a is None else a.plus(b)


def _times(t: Tensor | None, factor: float) -> Tensor | None:
    return None if t is None else t * factor


def _less(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """a − b, where None is zero."""
    if a is None or b is None:
        return a if b is None else -b
    return a - b
