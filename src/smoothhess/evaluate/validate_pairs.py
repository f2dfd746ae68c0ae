"""Validation of interactions against second differences of the model.

The interaction of two moves u and v, measured on the model itself, is the second difference

    D(u, v) = f(x + u + v) − f(x + u) − f(x + v) + f(x) = ∫₀¹∫₀¹ uᵀ∇²f(x + a u + b v) v da db,

the effect of both moves minus the effects of each: curvature averaged over a parallelogram with a corner at x. A
smoothed Hessian averages over a Gaussian around x instead, so the two agree if the parallelogram is about as large as
the Gaussian: for single features that is a step of the Gaussian's radius σ√d, not of σ, since a step of σ along one of
d features almost never crosses a kink at distance σ. For a quadratic the two agree at any step; for a smooth function
at small steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from smoothhess.draws.gaussian import Gaussian, Isotropic, SegmentShift
from smoothhess.draws.seeding import evaluation_generator
from smoothhess.evaluate.rank_correlation import spearman, spearman_p
from smoothhess.linalg.memory import BATCH_INPUTS
from smoothhess.linalg.trust_region.check_radius import check_radius
from smoothhess.model.gradients import Oracle, check_batch_size
from smoothhess.model.input_parts import FunctionOfParts
from smoothhess.model.state import borrowed
from smoothhess.result.exact import Attribution, StoredResult
from smoothhess.result.intervals import half_width
from smoothhess.result.pairs import Pair
from smoothhess.result.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEPS = (0.125, 0.25, 0.5, 1.0, 2.0)  # in units of the radius of the Gaussian
ROUNDING = 8.0  # machine epsilons of the largest |f| below which a second difference counts as zero
CHUNK_ROWS = 16_384  # points per chunk, if BATCH_INPUTS allows as many
_NOISE = 4  # third word of the generator's key; designs and ball samples use smaller ones


@dataclass(frozen=True, eq=False, repr=False)
class Validation:
    """Second differences of the model compared with uᵀHv, for P pairs of moves of B examples at T steps t.

    Returned by `validate_pairs`. At step t the moves are t·u and t·v, and t²uᵀHv is compared with D(t·u, t·v), the
    `plain` second difference, and with its symmetric form `central`, whose four corners lie around x:
    (f(x+u+v) − f(x+u−v) − f(x−u+v) + f(x−u−v))/4. All properties refer to the plain one; those of `validation.around`
    refer to the central one.
    """

    labels: tuple[tuple[str, ...], ...]  # labels of the pairs of each example
    steps: Tensor  # (T,) ascending
    moves: tuple[Tensor, Tensor]  # u and v at step 1, (B, P, d) each
    form: Tensor  # (B, P) uᵀHv at step 1
    form_stderr: Tensor  # (B, P)
    plain: Tensor  # (T, B, P) D
    plain_stderr: Tensor  # (T, B, P) over draws; 0 without draws
    central: Tensor  # (T, B, P)
    central_stderr: Tensor  # (T, B, P)
    rounding: Tensor  # (B,) threshold below which a second difference counts as zero
    tolerance: float
    n_draws: int
    unit: str  # description of a step of 1
    kind: str = "plain"  # the second difference that the properties refer to, "plain" or "central"

    def __len__(self) -> int:
        return len(self.form)

    @property
    def around(self) -> Validation:
        """The same validation by the central second difference."""
        return replace(self, kind="central")

    @property
    def second(self) -> Tensor:
        """The second difference of this `kind`, (T, B, P)."""
        return self.plain if self.kind == "plain" else self.central

    @property
    def second_stderr(self) -> Tensor:
        """Standard error of `second` over draws, (T, B, P); 0 without draws."""
        return self.plain_stderr if self.kind == "plain" else self.central_stderr

    @property
    def predicted(self) -> Tensor:
        """t²uᵀHv, (T, B, P)."""
        return self.steps[:, None, None].square() * self.form

    @property
    def rank_correlation(self) -> Tensor:
        """Spearman's ρ over the pairs of each example, (T, B); NaN where all second differences are equal."""
        return spearman(self.predicted, self._seen)

    @property
    def p_value(self) -> Tensor:
        """p-value of |ρ| in a permutation test of predictions against second differences, (T, B).

        At least 1 over the number of permutations: 2/5! = 0.017 for five pairs, 1e-4 for many. NaN where ρ is NaN.
        """
        return spearman_p(self.predicted, self._seen)

    @property
    def bent(self) -> Tensor:
        """Share of the pairs with a nonzero second difference, (T, B)."""
        return (self._seen != 0).double().mean(-1)

    @property
    def sign_agreement(self) -> Tensor:
        """Share of equal signs among pairs with a nonzero second difference, (T, B); NaN if there are none."""
        agree = ((self._seen * self.predicted) > 0).double().sum(-1)
        return agree / (self._seen != 0).double().sum(-1)

    @property
    def discrepancy(self) -> Tensor:
        """|D − t²uᵀHv| / |t²uᵀHv| of each pair, (T, B, P)."""
        off = (self._seen - self.predicted).abs()
        return torch.where(off > 0, off / self.predicted.abs(), 0.0)

    @property
    def relative_error(self) -> Tensor:
        """‖D − t²uᵀHv‖ / ‖t²uᵀHv‖ over the pairs of each example, (T, B)."""
        off = (self._seen - self.predicted).norm(dim=-1)
        return torch.where(off > 0, off / self.predicted.norm(dim=-1), 0.0)

    @property
    def holds_from(self) -> Tensor:
        """First step of the longest run of steps at which a pair agrees to within `tolerance`, (B, P).

        inf where it never agrees. Runs are used since a single step may agree by chance.
        """
        length, end = self._longest_run
        return torch.where(length > 0, self.steps[(end - length + 1).clamp_min(0)], torch.inf)

    @property
    def breaks_at(self) -> Tensor:
        """First step after that run, at which the quadratic approximation fails, (B, P).

        inf if the run includes the last step, and the first of all steps if there is no run.
        """
        length, end = self._longest_run
        after = torch.cat([self.steps, self.steps.new_tensor([torch.inf])])[end + 1]
        return torch.where(length > 0, after, self.steps[0])

    @property
    def _longest_run(self) -> tuple[Tensor, Tensor]:
        """Length and last step of the longest run of agreement, the earliest one in case of ties, (B, P) each."""
        lengths = [torch.zeros_like(self.form, dtype=torch.long)]
        for good in self.discrepancy <= self.tolerance:
            lengths.append(torch.where(good, lengths[-1] + 1, 0))
        length, end = torch.stack(lengths[1:]).max(0)
        return length, end

    @property
    def _seen(self) -> Tensor:
        """The second difference, with rounding errors set to zero."""
        return torch.where(self.second.abs() > self.rounding[:, None], self.second, 0.0)

    def to_markdown(self) -> str:
        """A table of steps; means over examples."""
        head, *rows = self._cells()
        return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---:"] * len(head), *rows])

    def __repr__(self) -> str:
        rows = self._cells()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        b, p = self.form.shape
        where = f"averaged over {self.n_draws} draws" if self.n_draws else "at x itself"
        lines = [f"uᵀHv against second differences of the model {where}: {p} pair(s) of {b} example(s)"]
        lines += ["  " + "  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        spread = "examples" if b > 1 else "pairs"
        lines.append(f"  step 1 is {self.unit}; ± half of a 95 % interval over {spread}")
        return "\n".join([*lines, f"  {self.summary}"])

    @property
    def summary(self) -> str:
        """A sentence about the steps at which the quadratic approximation holds."""
        start, end = self.holds_from, self.breaks_at
        held = start.isfinite()
        share = f"{int(held.sum())} of {held.numel()} pairs agree with the model to {self.tolerance:.0%} at some step"
        if not held.any():
            return share + "."
        ends = end[held]
        broken = ends[ends.isfinite()]
        if not len(broken):
            return f"{share}, and none of them breaks up to step {float(self.steps[-1]):g}."
        return (
            f"{share}; {len(broken)} of these break later, from step {float(broken.min()):g} on "
            f"(median {float(broken.median()):g})."
        )

    def _cells(self) -> list[list[str]]:
        rows = [["step", "ρ", "p", "same sign", "bent", "off by", "off by, central"]]
        around = self.around.relative_error
        rho, p, error = self.rank_correlation, self.p_value, self.relative_error
        for t, step in enumerate(self.steps.tolist()):
            sign, bent = self.sign_agreement[t].nanmean(), self.bent[t].mean()
            rows.append(
                [
                    f"{step:g}",
                    _mean_text(rho[t], self.form.shape[1]),
                    f"{p[t].nanmedian():.2g}",
                    "–" if sign.isnan() else f"{sign:.0%}",
                    f"{bent:.0%}",
                    f"{error[t].median():.0%}",
                    f"{around[t].median():.0%}",
                ]
            )
        return rows

    def plot(self, *, example: int = 0, ax: Axes | None = None) -> Axes:
        """Plot D/t² of each pair of one example against the step; dashed lines show the expected value uᵀHv."""
        from smoothhess.view.figures import canvas, title_layout

        ax = canvas.new_axes(ax, 6.4, 4.0)
        steps = canvas.array(self.steps)
        ratio = canvas.array(self.second[:, example] / self.steps[:, None].square())  # (T, P)
        for p, label in enumerate(self.labels[example]):
            (line,) = ax.plot(steps, ratio[:, p], marker="o", markersize=3, label=label)
            ax.axhline(float(self.form[example, p]), color=line.get_color(), linestyle="--", linewidth=0.8)
        if steps.max() > 10 * steps.min():
            ax.set_xscale("log")
        ax.set_xlabel(f"step t, in units of {self.unit}\ndashed: uᵀHv of the result", fontsize="small")
        ax.set_ylabel("second difference / t²")
        if len(self.labels[example]) <= 12:
            ax.legend(fontsize="x-small", frameon=False)
        title_layout.caption(ax, self.summary)
        canvas.hide_spines(ax, "top", "right")
        return ax


def validate_pairs(
    forward_func: Callable[..., Any],
    result: Result,
    pairs: int | Sequence[Any] = 10,
    additional_forward_args: Any = None,
    *,
    directions: tuple[Tensor, Tensor] | None = None,
    steps: Sequence[float] | Tensor = STEPS,
    radius: float | None = None,
    tolerance: float = 0.5,
    n_draws: int = 0,
    names: Sequence[str] | None = None,
    internal_batch_size: int | None = None,
    seed: int = 0,
) -> Validation:
    """Compare uᵀHv of a result with second differences of the model at several steps, by forward passes only.

    Args:
        forward_func: the model that the result explains; it is left unchanged.
        result: a result of `SmoothHess` or of a baseline, of features or of groups; the features of a group move
            jointly.
        pairs: number of strongest pairs of each example, or a list of pairs (i, j) for all examples, or a list of such
            lists, one per example (such as the result of `top_pairs`).
        additional_forward_args: the same as for the result.
        directions: moves (u, v) instead of pairs, each (*features), (P, *features) or (B, P, *features).
        steps: multiples of the moves.
        radius: length of a step of 1 along a feature or a group; None takes the radius of the result's Gaussian, σ_i√d.
            It does not apply to directions.
        tolerance: relative discrepancy up to which a pair agrees.
        n_draws: 0 takes second differences at x. An even number averages them over draws of the result's Gaussian
            around x; these are second differences of the smoothed model, which agree with SmoothHess at small steps.
        names: names of the features.
        internal_batch_size: see `SmoothHess.attribute`.
        seed: seed of the draws.

    Returns:
        A Validation; print it for a table over steps.

    Raises:
        TypeError: if result, pairs, directions or steps have another type.
        ValueError: if the model's f(x) differs from that of the result, or if an argument is out of range.

    >>> from smoothhess import SmoothHess
    >>> f = lambda x: 3 * x[:, 0] * x[:, 1] - x[:, 1] * x[:, 2]
    >>> result = SmoothHess(f).attribute(torch.ones(1, 4).double(), radius=1.0, n_calls=40)
    >>> found = validate_pairs(f, result, 3)
    >>> found.labels[0][:2], found.rank_correlation[0].round(decimals=6), found.breaks_at[0, 0]
    (('0 × 1', '1 × 2'), tensor([1.], dtype=torch.float64), tensor(inf, dtype=torch.float64))
    """
    if not isinstance(result, Result):
        raise TypeError(f"expected a result of attribute, or of a baseline, got {type(result).__name__}.")
    if isinstance(result, Attribution):
        raise ValueError(
            f"an attribution ({result.method}) is not a Hessian, so uᵀHv is not defined. Pass a result of SmoothHess "
            "or of a baseline."
        )
    if not (isinstance(tolerance, int | float) and tolerance > 0):
        raise ValueError(f"tolerance must be a positive number, got {tolerance!r}.")
    if isinstance(n_draws, bool) or not hasattr(n_draws, "__index__") or n_draws < 0 or n_draws % 2:
        raise ValueError(f"n_draws must be an even number (draws come in ± pairs), or 0 for none, got {n_draws!r}.")
    chosen = _steps(steps)
    if directions is not None:
        labels, left, right, unit = _along(result, directions)
    else:
        labels, left, right, unit = _pairs(result, pairs, radius, names)
    forms = [result.bilinear(left[:, p], right[:, p]) for p in range(left.shape[1])]
    embed = _embedding(result)
    u, v = embed(left), embed(right)  # (B, P, d)
    target = None if result.target is None else [tuple(t) for t in result.target.tolist()]
    x, parts = result.inputs, result.input_parts
    function = forward_func if parts is None else FunctionOfParts(forward_func, parts)
    oracle = Oracle(function, x, target, additional_forward_args, check_batch_size(internal_batch_size))
    with borrowed(forward_func, x.device), torch.no_grad():
        table = _Differences(oracle, x)
        table.check(result)
        offsets = _offsets(result.gaussian, x, int(n_draws), seed)
        found = torch.stack([table.averaged(t * u, t * v, offsets) for t in chosen.tolist()])  # (T, 4, B, P)
    plain, plain_stderr, central, central_stderr = found.unbind(1)
    return Validation(
        labels=labels,
        steps=chosen,
        moves=(u, v),
        form=torch.stack([e.value for e in forms], 1).double().cpu(),
        form_stderr=torch.stack([e.stderr for e in forms], 1).double().cpu(),
        plain=plain,
        plain_stderr=plain_stderr,
        central=central,
        central_stderr=central_stderr,
        rounding=ROUNDING * torch.finfo(x.dtype).eps * table.largest,
        tolerance=float(tolerance),
        n_draws=int(n_draws),
        unit=unit,
    )


class _Differences:
    """Second differences of the model around inputs, and the largest |f| among its values."""

    def __init__(self, oracle: Oracle, inputs: Tensor) -> None:
        self.oracle, self.inputs = oracle, inputs
        self.everyone = torch.arange(len(inputs), device=inputs.device)
        self.largest = torch.zeros(len(inputs), dtype=torch.float64)  # |f|, per example

    def check(self, result: Result) -> None:
        """Raise if f(x) differs from that of the result."""
        value = self.oracle.values(self.inputs, self.everyone)
        if not torch.allclose(value, result.output.to(value), rtol=1e-3, atol=1e-5):
            i = int((value - result.output).abs().argmax())
            raise ValueError(
                f"f(x) of example {i} is {float(value[i]):.6g}, but the result was made with "
                f"{float(result.output[i]):.6g}. Pass the same model, layer and additional_forward_args."
            )

    def averaged(self, u: Tensor, v: Tensor, offsets: Tensor | None) -> Tensor:
        """Plain and central second differences, each followed by its standard error, (4, B, P), for moves (B, P, d)."""
        if offsets is None:
            both = self.at(self.inputs, u, v)  # (2, B, P)
            return torch.stack([both[0], torch.zeros_like(both[0]), both[1], torch.zeros_like(both[1])])
        found = []
        for delta in offsets:  # standard errors are over ± pairs of draws
            shift = delta.reshape(1, *self.inputs.shape[1:])
            found.append((self.at(self.inputs + shift, u, v) + self.at(self.inputs - shift, u, v)) / 2)
        both = torch.stack(found)
        mean, stderr = both.mean(0), both.std(0) / len(both) ** 0.5
        return torch.stack([mean[0], stderr[0], mean[1], stderr[1]])

    def at(self, centre: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Plain and central second differences at centres (B, *shape), (2, B, P) float64 on the CPU."""
        b, _, d = u.shape
        base = self._values(centre.flatten(1), self.everyone)  # (B,)
        step = max(1, min(CHUNK_ROWS, BATCH_INPUTS.items(d * u.element_size(), u.device)) // (6 * b))
        parts = []
        for left, right in zip(u.split(step, 1), v.split(step, 1), strict=True):
            corners = [left + right, left, right, left - right, right - left, -left - right]
            points = centre.flatten(1)[:, None, None] + torch.stack(corners, 2)  # (B, c, 6, d)
            owner = self.everyone.repeat_interleave(points.shape[1] * 6)
            f = self._values(points.reshape(-1, d), owner).reshape(b, -1, 6)
            plain = f[..., 0] - f[..., 1] - f[..., 2] + base[:, None]
            central = (f[..., 0] - f[..., 3] - f[..., 4] + f[..., 5]) / 4
            parts.append(torch.stack([plain, central]))
        return torch.cat(parts, 2)

    def _values(self, rows: Tensor, owner: Tensor) -> Tensor:
        values = self.oracle.values(rows.reshape(-1, *self.inputs.shape[1:]), owner).double().cpu()
        self.largest = self.largest.scatter_reduce(0, owner.cpu(), values.abs(), "amax")
        return values


def _offsets(gaussian: Gaussian, x: Tensor, n_draws: int, seed: int) -> Tensor | None:
    """Draws of a Gaussian, one of each ± pair, (n/2, d); None for n_draws = 0."""
    if not n_draws:
        return None
    k = gaussian.rank(x[0].numel())
    rows = [evaluation_generator(seed, i, _NOISE).standard_normal(k) for i in range(n_draws // 2)]
    return gaussian.colour(torch.from_numpy(np.stack(rows)).to(x))


# --- moves and steps --------------------------------------------------------------------------------------------------


def _pairs(
    result: Result, pairs: Any, radius: float | None, names: Sequence[str] | None
) -> tuple[tuple[tuple[str, ...], ...], Tensor, Tensor, str]:
    """Labels, moves along both features of each pair, (B, P, features), and the description of a step of 1."""
    b, d, _ = result.shape
    if isinstance(pairs, bool) or (not hasattr(pairs, "__index__") and not isinstance(pairs, Sequence)):
        raise TypeError(f"pairs must be a number, or a list of pairs (i, j), got {type(pairs).__name__}.")
    if names is not None and len(names) != d:
        raise ValueError(f"expected one name per feature, {d}, got {len(names)}.")
    if isinstance(pairs, Sequence):
        own = bool(pairs) and isinstance(pairs[0], list)
        listed: list[Any] = [list(p) for p in pairs] if own else [list(pairs)] * b
    else:
        if pairs < 1:
            raise ValueError(f"expected at least one pair, got {pairs}.")
        listed = list(result.top_pairs(int(pairs), names))
    if len(listed) != b:
        raise ValueError(f"expected pairs for each of {b} examples, got {len(listed)} lists.")
    if not listed[0] or len({len(row) for row in listed}) != 1:
        raise ValueError(f"expected equally many pairs for each example, at least one, got {[len(r) for r in listed]}.")
    index = torch.empty(b, len(listed[0]), 2, dtype=torch.long)
    labels = []
    for example, row in enumerate(listed):
        words = []
        for p, pair in enumerate(row):
            ends = (pair.i, pair.j) if isinstance(pair, Pair) else pair
            if not isinstance(ends, tuple | list) or len(ends) != 2:
                raise ValueError(f"a pair must be (i, j), two features, got {pair!r}.")
            i, j = (result.flat_index(e) for e in ends)
            index[example, p] = torch.tensor([i, j])
            own = result.names[example] if names is None and result.names is not None else names
            texts = pair.names if isinstance(pair, Pair) else [str(e) if own is None else own[e] for e in (i, j)]
            words.append(" × ".join(texts))
        labels.append(tuple(words))
    lengths, unit = _lengths(result, radius)  # (1 or B, features)
    lengths = lengths.expand(b, -1).to(result.inputs)
    moves = []
    for end in index.to(result.device).unbind(2):  # (B, P)
        size = lengths.gather(1, end)
        if bool((size == 0).any()):
            raise ValueError(
                "a pair holds a feature that the result's Gaussian does not move. Pass radius, or other pairs."
            )
        moves.append(torch.zeros(b, end.shape[1], d, dtype=result.dtype, device=result.device))
        moves[-1].scatter_(2, end[..., None], size[..., None])
    return tuple(labels), moves[0], moves[1], unit


def _lengths(result: Result, radius: float | None) -> tuple[Tensor, str]:
    """Length of a step of 1 along each feature or group, and its description in words."""
    grouping = result.grouping
    if radius is not None:
        check_radius(radius)
    elif isinstance(result, StoredResult) and (grouping is None or grouping.direction is None):
        raise ValueError("the step length is undefined for a result without a Gaussian. Pass radius, or directions.")
    if grouping is not None and grouping.direction is not None and radius is None:
        return torch.ones(1, grouping.count), "the full move along the direction of the groups"
    d = result.inputs[0].numel()
    own = result.gaussian.scales(d).double().cpu() * result.gaussian.rank(d) ** 0.5
    reach = float(own.square().mean().sqrt()) if radius is None else float(radius)
    if grouping is not None and radius is None and isinstance(result.gaussian, SegmentShift):
        own = grouping.scales * result.gaussian.rank(d) ** 0.5  # for a segment, as for a feature below
        return own, f"the Gaussian's radius σ√K = {_range(own)} along a segment"
    if grouping is not None:
        size = grouping.directions(Isotropic(1.0)).double().norm(dim=2).cpu()  # (1 or B, K)
        return torch.where(size > 0, reach / size, 0.0), f"a move of length {reach:.3g} along a group"
    if radius is not None:
        return torch.full((1, d), reach), f"{reach:.3g} along a feature"
    return own[None], f"the Gaussian's radius σ√d = {_range(own)} along a feature"


def _range(numbers: Tensor) -> str:
    low, high = float(numbers.min()), float(numbers.max())
    return f"{low:.3g}" if high - low <= 1e-6 * high else f"{low:.3g} … {high:.3g}"


def _along(result: Result, directions: Any) -> tuple[tuple[tuple[str, ...], ...], Tensor, Tensor, str]:
    """Labels, moves (B, P, features) and the description of a step of 1 for given directions."""
    if not isinstance(directions, tuple | list) or len(directions) != 2:
        raise TypeError(f"directions must be a pair (u, v) of tensors, got {type(directions).__name__}.")
    b, d, _ = result.shape
    rows = []
    for w in directions:
        w = torch.as_tensor(w, dtype=result.dtype, device=result.device)
        features = result.feature_shape
        flat = w.reshape(*w.shape[: w.ndim - len(features)], d) if w.shape[-len(features) :] == features else w
        if flat.shape[-1:] != (d,) or flat.ndim > 3 or (flat.ndim == 3 and len(flat) != b):
            raise ValueError(
                f"a direction must have shape {features}, (P, …) or ({b}, P, …) with these, got {tuple(w.shape)}."
            )
        rows.append(flat.reshape(-1, *flat.shape[-2:]) if flat.ndim > 1 else flat[None, None])
    u, v = torch.broadcast_tensors(rows[0].expand(b, -1, -1), rows[1].expand(b, -1, -1))
    labels = (tuple(f"direction {p}" for p in range(u.shape[1])),) * b
    return labels, u.contiguous(), v.contiguous(), "the directions as they were given"


def _embedding(result: Result) -> Callable[[Tensor], Tensor]:
    """A function from moves of the result's features (B, P, K) to moves of the inputs (B, P, d)."""
    if result.grouping is None:
        return lambda moves: moves
    members = result.grouping.directions(Isotropic(1.0)).to(result.inputs)  # (1 or B, K, d)
    return lambda moves: moves @ members


def _steps(steps: Any) -> Tensor:
    try:
        chosen = torch.as_tensor(steps, dtype=torch.float64).reshape(-1).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"steps must be positive numbers, got {type(steps).__name__}.") from error
    if not len(chosen) or not bool((torch.isfinite(chosen) & (chosen > 0)).all()):
        raise ValueError(f"steps must be positive numbers, at least one, got {chosen.tolist()}.")
    if len(chosen.unique()) != len(chosen):
        raise ValueError(f"all steps must be different, got {chosen.tolist()}.")
    return chosen.sort().values


def _mean_text(rho: Tensor, pairs: int) -> str:
    """Mean of ρ over examples and half of its 95 % interval; over pairs if there is one example."""
    defined = rho[~rho.isnan()]
    if not len(defined):
        return "–"
    if len(defined) > 1:
        stderr, df = float(defined.std()) / len(defined) ** 0.5, len(defined) - 1
    else:
        df = max(pairs - 2, 1)
        stderr = float(((1 - defined[0].square()).clamp_min(0) / max(pairs - 2, 1)).sqrt())
    return f"{float(defined.mean()):.2f} ± {half_width(stderr, df):.2f}"
