"""Selection of σ or β on validation points, with all candidates scored on the same points and draws.

P_MSE needs only a surrogate's values f(x) + r gᵀu + ½ r² uᵀHu at displacements r·u. The two forms gᵀu and uᵀHu are
computed once per candidate for all radii r, without the Hessian: one Hessian–vector product per displacement is cheaper
than the matrix if there are fewer displacements than features. The model's values at x + r·u are computed once per
radius for all candidates.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from smoothhess import baselines
from smoothhess.evaluate.attack import AttackPath
from smoothhess.evaluate.attack_comparison import Judge
from smoothhess.evaluate.ball_samples import BallSamples
from smoothhess.evaluate.compare_surrogates import as_radii
from smoothhess.evaluate.perturbation_mse import check_centre
from smoothhess.explainers.progress import Progress
from smoothhess.explainers.result_warnings import FewEventsWarning
from smoothhess.explainers.smooth_hess import SmoothHess
from smoothhess.linalg.trust_region.check_radius import check_radius
from smoothhess.model.model_call import ModelCall
from smoothhess.model.state import borrowed
from smoothhess.result.intervals import half_width
from smoothhess.result.result import Result
from smoothhess.result.taylor import surrogate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from smoothhess.result.taylor import Taylor

Method = str | Callable[[float], Result]

SIGMA_METHODS = ("smoothhess", "smoothgrad")
METHODS = (*SIGMA_METHODS, "softplus", "swish")
SCORES = {"pmse": "P_MSE", "attack": "unchanged predictions"}
SIGMA_SHARES = (
    0.25,
    0.5,
    0.75,
    1.0,
    1.5,
)  # default candidates, in units of the radius rule σ = r/√d; the paper uses ½, ¾ and 1
BETAS = tuple(10 ** (k / 6) for k in range(-6, 19))  # 0.1 … 1000


@dataclass(frozen=True, eq=False, repr=False)
class Selection:
    """Scores of C candidates on B points at one radius; lower is better. Returned by `select`.

    All candidates are scored on the same points and draws, so comparisons are paired: a candidate is `tied` with the
    best if it is worse by at most one standard error of the paired difference, which may be much smaller than the
    standard error of each score.
    """

    method: str
    parameter: str  # the parameter that the values are of: "σ", "β", or "value" for a function
    score: str  # "pmse" or "attack"
    radius: float
    values: Tensor  # (C,) the candidates that were scored, ascending
    per_point: Tensor  # (C, B) score of each point
    per_sample: Tensor | None  # (C, n) mean over points at each displacement; None for attacks
    n_candidates: int  # size of the grid, including candidates that were not scored

    def __len__(self) -> int:
        return len(self.values)

    @property
    def scores(self) -> Tensor:
        """Mean over points, (C,)."""
        return self.per_point.mean(1)

    @property
    def stderr(self) -> Tensor:
        """Standard error of `scores` over points and samples, (C,); only over samples if there is one point."""
        return self._error(self.per_point, self.per_sample)

    @property
    def best_index(self) -> int:
        """Index of the lowest score; the first one in case of ties."""
        return int(self.scores.argmin())

    @property
    def best(self) -> float:
        """The candidate with the lowest score."""
        return float(self.values[self.best_index])

    @property
    def difference(self) -> Tensor:
        """Score of each candidate minus the best score, (C,)."""
        return self.scores - self.scores[self.best_index]

    @property
    def difference_stderr(self) -> Tensor:
        """Paired standard error of `difference` over points and samples, (C,)."""
        best, samples = self.best_index, self.per_sample
        apart = None if samples is None else samples - samples[best]
        return self._error(self.per_point - self.per_point[best], apart)

    @property
    def tied(self) -> Tensor:
        """Whether a candidate is worse than the best by at most one paired standard error, (C,)."""
        return (self.difference == 0) | (self.difference <= self.difference_stderr)

    @property
    def at_edge(self) -> bool:
        """Whether the best candidate is the smallest or the largest, so that a wider grid may be better."""
        return len(self) > 1 and self.best_index in (0, len(self) - 1)

    @staticmethod
    def _error(per_point: Tensor, per_sample: Tensor | None) -> Tensor:
        """Standard error of a mean over points × displacements: the sum of the variances of the two factors."""
        variances = [t.var(1) / t.shape[1] for t in (per_point, per_sample) if t is not None and t.shape[1] > 1]
        return torch.stack(variances).sum(0).sqrt() if variances else torch.full_like(per_point[:, 0], torch.nan)

    def to_markdown(self) -> str:
        """A table of candidates."""
        head, *rows = self._cells()
        return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---:"] * len(head), *rows])

    def __repr__(self) -> str:
        rows = self._cells()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        skipped = "" if len(self) == self.n_candidates else f" {self.n_candidates}, {len(self)} of them scored"
        lines = [
            f"{self.parameter} of {self.method} by {SCORES[self.score]} at radius {self.radius:g}, "
            f"{self.per_point.shape[1]} point(s): best {self.best:g} of{skipped or f' {len(self)}'}",
            *("  " + "  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows),
            "  ± half of a 95 % interval over points and samples; differences are paired; *: best, =: tied with it",
        ]
        if self.at_edge:
            lines.append("  The best candidate lies at the edge of the grid: a wider grid may hold a better one.")
        return "\n".join(lines)

    def _cells(self) -> list[list[str]]:
        rows = [[self.parameter, SCORES[self.score], "minus the best", ""]]
        columns = (self.values, self.scores, self.stderr, self.difference, self.difference_stderr, self.tied)
        for c, (value, score, error, apart, apart_error, tied) in enumerate(
            zip(*(t.tolist() for t in columns), strict=True)
        ):
            mark = "*" if c == self.best_index else "=" if tied else ""
            beyond = "" if c == self.best_index else f"{apart:.2g} ± {half_width(apart_error):.1g}"
            rows.append([f"{value:.4g}", f"{score:.3g} ± {half_width(error):.1g}", beyond, mark])
        return rows

    def plot(self, *, ax: Axes | None = None) -> Axes:
        """Plot scores against candidates; bars show `difference_stderr`, the band shows `stderr`."""
        from smoothhess.view.figures import canvas, title_layout

        ax = canvas.new_axes(ax, 6.0, 3.6)
        x, score, band, bar = map(canvas.array, (self.values, self.scores, self.stderr, self.difference_stderr))
        ax.fill_between(x, score - band, score + band, color=canvas.NEGATIVE, alpha=0.15, linewidth=0)
        ax.errorbar(x, score, yerr=bar, color=canvas.NEGATIVE, marker="o", markersize=4, capsize=2, linewidth=1.2)
        ax.plot([self.best], [score.min()], marker="o", markersize=8, color=canvas.POSITIVE, linestyle="none")
        if x.max() > 10 * x.min():
            ax.set_xscale("log")
        if self.score == "pmse" and score.min() > 0 and score.max() > 10 * score.min():
            ax.set_yscale("log")
        ax.set_xlabel(
            f"{self.parameter} of {self.method}\nbars: stderr of the difference to the best; band: of each score",
            fontsize="small",
        )
        ax.set_ylabel(SCORES[self.score])
        title_layout.caption(ax, f"radius {self.radius:g}, {self.per_point.shape[1]} points: best {self.best:.4g}")
        canvas.hide_spines(ax, "top", "right")
        return ax


def select(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    radius: float,
    method: Method = "smoothhess",
    values: Iterable[float] | Tensor | None = None,
    order: int = 2,
    score: str = "pmse",
    coarse_to_fine: bool = False,
    n_samples: int = 500,
    sampling: str = "ball",
    bounds: Any = None,
    decide: Callable[[Any], Tensor] | None = None,
    internal_batch_size: int | None = None,
    seed: int = 0,
    show_progress: bool | None = None,
    **options: Any,
) -> Selection:
    """Choose σ or β on validation points: the candidate with the lowest score, and those that are tied with it.

    Args:
        forward_func: the model, or another callable; it is left unchanged.
        inputs: (B, *shape), the validation points, which should differ from the points to explain.
        target: the output to explain; see `smoothhess.model.targets`.
        additional_forward_args, internal_batch_size: see `SmoothHess.attribute`.
        radius: radius of the ball in which the surrogate is used.
        method: "smoothhess" or "smoothgrad" (values are σ, standard deviations), "softplus" or "swish" (values are β),
            or a function value → result around these inputs.
        values: the candidates; (¼, ½, ¾, 1, 1½)·r/√d for σ and 0.1 … 1000 for β when None.
        order: order of the surrogate, 1 or 2; 1 ignores the Hessian. "smoothgrad" is "smoothhess" of order 1.
        score: "pmse", the mean of (f̃ − f)² over the ball, or "attack", the share of points whose prediction is
            unchanged by the exact attack on the surrogate; lower is better for both.
        coarse_to_fine: whether to score about √C of the candidates, then halve the distance to the neighbours of the
            best one. Finds the best candidate if scores fall and then rise along the grid, otherwise a local minimum.
        n_samples: number of displacements in the ball, for P_MSE. If there are fewer of them than features, β is scored
            by Hessian–vector products and no Hessian is computed.
        sampling: "ball" or "radius"; see `perturbation_mse`.
        bounds: (low, high) of the inputs for attacks; see `smoothhess.evaluate.attack`.
        decide: maps the model's output to classes (N,), for attacks; None takes the argmax of scores (N, C).
        seed: seed of the displacements and of the draws of SmoothHess, common to all candidates.
        show_progress: whether to show a progress bar over candidates; None: as in `SmoothHess.attribute`.
        options: other options of `SmoothHess.attribute` (n_calls, control, …), or of the baseline.

    Returns:
        A Selection; `best` is the chosen value.

    Raises:
        TypeError: if values are not numbers, or if a function as method does not return Interactions.
        ValueError: if radius, order, score, method or values are invalid.

    >>> _ = torch.manual_seed(0)
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).double()
    >>> chosen = select(net, torch.randn(20, 4).double(), radius=0.5, method="softplus", values=[0.1, 5, 1000])
    >>> chosen.best, chosen.scores.shape, chosen.tied
    (5.0, torch.Size([3]), tensor([False,  True, False]))
    """
    check_radius(radius)
    (only,) = _select(
        ModelCall(forward_func, inputs, target, additional_forward_args, internal_batch_size),
        (float(radius),),
        _Search(
            method=method,
            values=values,
            order=order,
            score=score,
            coarse_to_fine=coarse_to_fine,
            n_samples=n_samples,
            sampling=sampling,
            bounds=bounds,
            decide=decide,
            seed=seed,
            show_progress=show_progress,
            options=options,
        ),
    )
    return only


def select_radii(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    radii: Sequence[float] | Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    **options: Any,
) -> tuple[Selection, ...]:
    """Choose σ or β for each of several radii.

    The surrogate of a candidate is computed once and scored at every radius. With `values=None`, the candidates for σ
    depend on the radius, and each radius is a separate `select`.

    Args:
        forward_func, inputs, target, additional_forward_args: see `select`.
        radii: the radii, each once.
        options: the keyword arguments of `select`, except radius.

    Returns:
        One Selection per radius.

    >>> f = lambda x: torch.relu(x.sum(1))
    >>> x = torch.zeros(1, 2).double()
    >>> [s.best for s in select_radii(f, x, [0.1, 1.0], method="softplus", values=[1, 3, 10, 30])]
    [30.0, 3.0]
    """
    chosen = as_radii(radii)
    if options.get("values") is None and options.get("method", "smoothhess") in SIGMA_METHODS:
        return tuple(select(forward_func, inputs, target, additional_forward_args, radius=r, **options) for r in chosen)
    given = {name: options.pop(name, default) for name, default in (select.__kwdefaults__ or {}).items()}
    call = ModelCall(forward_func, inputs, target, additional_forward_args, given.pop("internal_batch_size"))
    return _select(call, chosen, _Search(**given, options=options))


@dataclass(frozen=True, eq=False, kw_only=True)
class _Search:
    """The candidates and how they are scored; the fields are arguments of `select`."""

    method: Any
    values: Any
    order: int
    score: str
    coarse_to_fine: bool
    n_samples: int
    sampling: str
    bounds: Any
    decide: Callable[[Any], Tensor] | None
    seed: int
    show_progress: bool | None
    options: dict[str, Any]  # of the method

    def __post_init__(self) -> None:
        if self.order not in (1, 2):
            raise ValueError(f"order must be 1 or 2, got {self.order!r}.")
        if self.score not in SCORES:
            raise ValueError(f'score must be "pmse" or "attack", got {self.score!r}.')


def _select(call: ModelCall, radii: tuple[float, ...], search: _Search) -> tuple[Selection, ...]:
    name, parameter = _describe(search.method)
    order = 1 if search.method == "smoothgrad" else search.order
    grid = _grid(search.values, search.method, radii[0] / call.inputs[0].numel() ** 0.5)
    scorer: _Score
    if search.score == "pmse":
        scorer = _Perturbation(call, radii, BallSamples(search.n_samples, search.sampling, search.seed))
    else:
        scorer = _Attack(call, radii, search.bounds, search.decide)
    make = _maker(call, search, order == 2 and scorer.needs_matrix)
    scored: dict[int, tuple[Tensor, Tensor | None]] = {}
    with Progress(search.show_progress, None, f"select {parameter}", "candidates") as bar:

        def visit(indices: Iterable[int]) -> None:
            for i in indices:
                if 0 <= i < len(grid) and i not in scored:
                    with warnings.catch_warnings():  # the score itself shows the effect of a noisy Hessian
                        warnings.simplefilter("ignore", FewEventsWarning)
                        taylor = surrogate(make(grid[i]), order)
                    check_centre(f"{parameter} = {grid[i]:g}", taylor, call.inputs)
                    scored[i] = scorer(taylor)
                    bar.update()

        if search.coarse_to_fine:
            for r in range(len(radii)):
                _refine(len(grid), visit, lambda i, r=r: float(scored[i][0][r].mean()))
        else:
            visit(range(len(grid)))
    visited = sorted(scored)
    points = torch.stack([scored[i][0] for i in visited])  # (C, R, B)
    samples = [s for i in visited if (s := scored[i][1]) is not None]
    return tuple(
        Selection(
            method=name,
            parameter=parameter,
            score=search.score,
            radius=radius,
            values=torch.tensor([grid[i] for i in visited], dtype=torch.float64),
            per_point=points[:, r],
            per_sample=torch.stack(samples)[:, r] if samples else None,
            n_candidates=len(grid),
        )
        for r, radius in enumerate(radii)
    )


# --- candidates -------------------------------------------------------------------------------------------------------


def _describe(method: Any) -> tuple[str, str]:
    """Name of the method and of its parameter."""
    if isinstance(method, str) and method in METHODS:
        return method, "σ" if method in SIGMA_METHODS else "β"
    if callable(method):
        return getattr(method, "__name__", type(method).__name__), "value"
    names = ", ".join(f'"{m}"' for m in METHODS)
    raise ValueError(f"method must be one of {names}, or a function value → result, got {method!r}.")


def _grid(values: Any, method: Any, rule: float) -> list[float]:
    """Validate the candidates and return them in ascending order."""
    if values is None:
        if not isinstance(method, str):
            raise ValueError("values must be given if method is a function: pass a list of candidates.")
        values = [share * rule for share in SIGMA_SHARES] if method in SIGMA_METHODS else BETAS
    listed = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(listed, int | float | str) or not hasattr(listed, "__iter__"):
        raise TypeError(f"values must hold several candidates: pass a list, got {type(values).__name__}.")
    grid = []
    for value in listed:
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"candidates must be positive numbers, got {type(value).__name__}.") from error
        if not (math.isfinite(number) and number > 0):
            raise ValueError(f"candidates must be positive, finite numbers, got {number:g}.")
        grid.append(number)
    if not grid or len(set(grid)) != len(grid):
        raise ValueError(f"expected at least one candidate and each once, got {sorted(grid)}.")
    return sorted(grid)


def _maker(call: ModelCall, search: _Search, matrix: bool) -> Callable[[float], Result]:
    """A function from a candidate to its result."""
    method, seed, options = search.method, search.seed, search.options
    where = (call.forward_func, call.inputs, call.target, call.additional_forward_args)
    shared = {"internal_batch_size": call.internal_batch_size, **options}
    if method == "smoothhess":
        return lambda sigma: SmoothHess(where[0]).attribute(*where[1:], sigma=sigma, seed=seed, **shared)
    if method == "smoothgrad":
        return lambda sigma: baselines.smoothgrad(*where, sigma=sigma, seed=seed, **shared)
    if method in ("softplus", "swish"):
        find = baselines.softplus if method == "softplus" else baselines.swish
        if not matrix:
            shared.setdefault("dense", False)
        return lambda beta: find(*where, beta=beta, **shared)
    if options:
        raise TypeError(
            f"a function as method takes no options, got {', '.join(sorted(options))}. Set them inside the function."
        )

    def own(value: float) -> Result:
        result = method(value)
        if not isinstance(result, Result):
            raise TypeError(f"the method must return a result (Interactions), got {type(result).__name__}.")
        return result

    return own


def _refine(count: int, visit: Callable[[Iterable[int]], None], score: Callable[[int], float]) -> None:
    """Every s-th candidate, then neighbours of the best at s/2, s/4, … 1; s is a power of two, about √count."""
    stride = 1 << max(0, round(math.log2(max(count, 1)) / 2))
    seen = {*range(0, count, stride), count - 1}
    visit(sorted(seen))
    while stride > 1:
        stride //= 2
        best = min(sorted(seen), key=score)
        seen |= {i for i in (best - stride, best + stride) if 0 <= i < count}
        visit(sorted(seen))


# --- scores -----------------------------------------------------------------------------------------------------------


class _Score(Protocol):
    needs_matrix: bool  # whether a Hessian as a matrix is cheaper than the products that the score needs

    def __call__(self, taylor: Taylor) -> tuple[Tensor, Tensor | None]:
        """Scores (R, B), and means over points at each sample (R, n) where there are samples."""
        ...


class _Perturbation:
    """P_MSE at R radii; the model's values are computed once."""

    def __init__(self, call: ModelCall, radii: Sequence[float], samples: BallSamples) -> None:
        self.inputs, self.radii, self.samples = call.inputs, radii, samples
        self.needs_matrix = samples.n_samples >= self.inputs[0].numel()
        batch = len(self.inputs)
        oracle, owner = call.oracle(), torch.arange(batch, device=self.inputs.device)
        rows: list[list[Tensor]] = [[] for _ in radii]
        with borrowed(call.forward_func, self.inputs.device), torch.no_grad():
            for unit in samples.chunks(self.inputs):
                for radius, found in zip(radii, rows, strict=True):
                    points = self.inputs[:, None] + (radius * unit).to(self.inputs).reshape(
                        1, -1, *self.inputs.shape[1:]
                    )
                    values = oracle.values(points.flatten(0, 1), owner.repeat_interleave(len(unit)))
                    found.append(values.reshape(batch, -1).double().cpu())
        self.truth = torch.stack([torch.cat(found, 1) for found in rows])  # (R, B, n)

    def __call__(self, taylor: Taylor) -> tuple[Tensor, Tensor | None]:
        forms = [self._forms(taylor, unit) for unit in self.samples.chunks(self.inputs)]
        linear, square = (torch.cat(parts, 1) for parts in zip(*forms, strict=True))  # (B, n)
        value = taylor.value.double().cpu()[:, None]
        r = torch.tensor(self.radii, dtype=torch.float64)[:, None, None]
        errors = (value + r * linear + r.square() / 2 * square - self.truth).square()  # (R, B, n)
        return errors.mean(2), errors.mean(1)

    def _forms(self, taylor: Taylor, unit: Tensor) -> tuple[Tensor, Tensor]:
        """gᵀu and uᵀHu of each example, (B, c) float64 on the CPU."""
        u = unit.to(taylor.gradient)  # which may be on the host although the model is on a GPU
        linear = (taylor.gradient @ u.mT).double().cpu()
        if taylor.product is None:
            return linear, torch.zeros_like(linear)
        product = taylor.product(u.expand(len(self.inputs), -1, -1))
        return linear, (product * u).sum(-1).double().cpu()


class _Attack:
    """Whether the attack at R radii leaves the prediction of each point unchanged."""

    needs_matrix = True

    def __init__(self, call: ModelCall, radii: Sequence[float], bounds: Any, decide: Any) -> None:
        self.call, self.radii, self.bounds = call, radii, bounds
        self.judge = Judge(
            call.forward_func, call.inputs, call.additional_forward_args, decide, call.internal_batch_size
        )
        with borrowed(call.forward_func, call.inputs.device), torch.no_grad():
            self.before = self.judge(call.inputs)

    def __call__(self, taylor: Taylor) -> tuple[Tensor, Tensor | None]:
        path = AttackPath.of(taylor, bounds=self.bounds)
        perturbed = [path(radius).to(self.call.inputs) for radius in self.radii]
        with borrowed(self.call.forward_func, self.call.inputs.device), torch.no_grad():
            survived = [self.judge(points) == self.before for points in perturbed]
        return torch.stack(survived).double().cpu(), None
