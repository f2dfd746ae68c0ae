"""Sanity checks of SmoothHess: dependence on the parameters, on the input and on the seed.

Each check compares Hessians. After randomising the parameters they should differ, otherwise they show the architecture
or the input and not what the model has learnt. Nearby inputs should have more similar Hessians than unrelated inputs.
Other seeds should give the same Hessians up to noise. Every run uses independent draws, so that shared noise cannot
make two Hessians similar.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from smoothhess.draws.designs import pilot_rows
from smoothhess.draws.gaussian import Gaussian
from smoothhess.draws.seeding import evaluation_seed, torch_generator
from smoothhess.evaluate.check_integer import check_integer
from smoothhess.evaluate.rank_correlation import spearman
from smoothhess.explainers.smooth_hess import SmoothHess
from smoothhess.model.model_call import ModelCall
from smoothhess.result.intervals import half_width
from smoothhess.result.result import Result

RESOLUTION = 1e-6  # relative to the strongest pair; weaker pairs are rounding errors and tied in rank
MOST_PAIRS = 200_000  # pairs that are ranked; a random subset if there are more
DIRECTIONS = 4  # leading eigenvectors that are compared, at most half of the features
STABLE, PARTLY = 0.8, 0.5  # share of the top pairs that another seed finds again
FALLEN = 0.5  # largest similarity with all parameters random, relative to that of two seeds
ALIKE = 0.95  # similarity of nearby inputs that passes without a comparison
SURE = 2.0  # standard errors of a paired difference that count as significant
_SALT = 0x5A17


class Check(NamedTuple):
    """One check: a row of the table of `Sanity`."""

    name: str
    value: float  # mean over examples
    stderr: float  # standard error over examples; NaN for one example
    reference: float  # the value to compare with, NaN if there is none
    should: str  # the expected value, in words
    verdict: str
    passed: bool | None  # None if it could not be measured, or is for information only


@dataclass(frozen=True, eq=False, repr=False)
class Sanity:
    """The checks of `sanity`; its repr is a table."""

    checks: tuple[Check, ...]
    question: str  # the method, the inputs and the Gaussian, in words
    n_examples: int  # over which values are averaged

    @property
    def passed(self) -> bool:
        """Whether no check failed; checks that could not be measured do not count."""
        return all(check.passed is not False for check in self.checks)

    def __len__(self) -> int:
        return len(self.checks)

    def __getitem__(self, name: str) -> Check:
        """The check of that name."""
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(f"expected one of {', '.join(repr(c.name) for c in self.checks)}, got {name!r}.")

    def to_markdown(self) -> str:
        """The table in Markdown."""
        head, *rows = self._cells()
        return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])

    def __repr__(self) -> str:
        rows = self._cells()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [f"Sanity of {self.question}"]
        lines += ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, "  ± half of a 95 % interval over examples"])

    def _cells(self) -> list[list[str]]:
        rows = [["check", "value", "reference", "should be", "verdict"]]
        for c in self.checks:
            value = "–" if math.isnan(c.value) else f"{c.value:.2f}"
            value += "" if math.isnan(c.stderr) else f" ± {half_width(c.stderr, self.n_examples - 1):.2f}"
            rows.append([c.name, value, "–" if math.isnan(c.reference) else f"{c.reference:.2f}", c.should, c.verdict])
        return rows


def sanity(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    sigma: Any = None,
    radius: float | None = None,
    gaussian: Gaussian | None = None,
    k: int = 10,
    n_seeds: int = 3,
    nearness: float = 0.1,
    stages: int = 3,
    seed: int = 0,
    **options: Any,
) -> Sanity:
    """Check SmoothHess by parameter randomisation, nearby and unrelated inputs, and stability between seeds.

    Randomisation calls `reset_parameters` of layers that have it; the parameters of other layers are drawn from a
    normal distribution with their mean and standard deviation.

    Args:
        forward_func: the model. Randomising its parameters needs a torch.nn.Module, of which a deep copy is changed;
            for another callable that check is left out. For a softmax pass nn.Sequential(net, nn.Softmax(-1)).
        inputs: (B, *shape); several different inputs, so that unrelated inputs can be compared.
        target: the output to explain; see `smoothhess.model.targets`. It stays the same when the model is randomised.
        additional_forward_args: see `SmoothHess.attribute`.
        sigma, radius, gaussian: see `SmoothHess.attribute`; exactly one of the three.
        k: number of top pairs for the stability between seeds.
        n_seeds: number of runs with different draws.
        nearness: factor of the displacement of a nearby input, which is nearness times a draw of the Gaussian.
        stages: number of steps of the randomisation, from the output to the input; 1 randomises all layers at once.
        seed: seed of all draws and of the randomisation.
        options: other options of `SmoothHess.attribute`: n_calls, design, feature_mask, …

    Returns:
        A Sanity with one Check per comparison; print it for the table.

    Raises:
        ValueError: if k, n_seeds, stages, seed or nearness is out of range, or if there are fewer than 3 features.

    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 1)).double()
    >>> report = sanity(net, torch.randn(4, 6).double(), radius=1.0, n_calls=200)
    >>> [check.name for check in report.checks][:2], len(report)
    (['seeds: top 10 pairs found again', 'seeds: rank correlation of |H|'], 8)
    """
    call = ModelCall(forward_func, inputs, target, additional_forward_args)
    inputs, target = call.inputs, call.target
    for name, number, least in (("k", k, 1), ("n_seeds", n_seeds, 2), ("stages", stages, 1), ("seed", seed, 0)):
        check_integer(number, name, least)
    if not (isinstance(nearness, int | float) and 0 < nearness < math.inf):
        raise ValueError(f"nearness must be a positive number of σ, got {nearness!r}.")
    given = Gaussian.ensure(sigma=sigma, radius=radius, gaussian=gaussian, d=inputs[0].numel())
    runs = _Runs(inputs, target, additional_forward_args, given, int(k), int(seed), options)
    base = runs.of(forward_func, inputs, 0, quiet=False)
    again = [runs.of(forward_func, inputs, role) for role in range(1, n_seeds)]
    near = runs.of(forward_func, runs.nearby(float(nearness)), n_seeds)
    checks = [*_seed_checks(base, again, int(k)), *_input_checks(base, near)]
    ceiling = _Likeness.mean([base.like(other) for other in again])
    checks += _parameter_checks(forward_func, runs, base, ceiling, n_seeds + 1, int(stages))
    b, d, _ = runs.shape
    return Sanity(tuple(checks), f"SmoothHess of {b} example(s) × {d} features, {runs.text}", b)


# --- similarity of Hessians -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Likeness:
    """Similarity of two Hessians for each of B examples, (B,) each."""

    ranks: Tensor  # Spearman's ρ of |H_ij|
    directions: Tensor  # overlap of the spans of the leading eigenvectors: 1 if equal, 0 at chance level
    pairs: Tensor  # share of the top k pairs that both have in common

    @staticmethod
    def mean(several: Sequence[_Likeness]) -> _Likeness:
        return _Likeness(
            *(torch.stack([getattr(s, n) for s in several]).mean(0) for n in ("ranks", "directions", "pairs"))
        )


@dataclass(frozen=True, eq=False)
class _Reading:
    """The features of a run's Hessians that are compared."""

    n_pairs: int  # number of pairs i < j
    strength: Tensor  # (B, P) |H_ij| σ_i σ_j of these pairs, or of a random subset
    top: Tensor  # (B, k) indices of the strongest pairs; −1 if fewer than k pairs interact
    directions: Tensor  # (B, m, d) leading eigenvectors

    def like(self, other: _Reading, shift: int = 0) -> _Likeness:
        """Similarity of example b here and b + shift there; 0 if one of them has no interactions."""
        strength, top, directions = (t.roll(-shift, 0) for t in (other.strength, other.top, other.directions))
        ranks = spearman(self.strength, strength).nan_to_num(0.0)
        (_, m, d), n = self.directions.shape, directions.shape[1]
        span, chance = (self.directions @ directions.mT).square().sum((-1, -2)) / min(m, n), max(m, n) / d
        span = (span - chance) / (1 - chance)
        shared = ((self.top[:, :, None] == top[:, None]).any(-1) & (self.top >= 0)).sum(1)
        shared = shared.double() / torch.maximum((self.top >= 0).sum(1), (top >= 0).sum(1)).clamp_min(1)
        return _Likeness(ranks.cpu(), span.double().cpu(), shared.cpu())


class _Runs:
    """Runs of SmoothHess on the same examples, each with different seeds."""

    def __init__(
        self, inputs: Tensor, target: Any, args: Any, gaussian: Gaussian, k: int, seed: int, options: dict[str, Any]
    ) -> None:
        self.inputs, self.target, self.args, self.gaussian = inputs, target, args, gaussian
        self.k, self.seed, self.options = k, seed, options
        self.shape, self.text = (0, 0, 0), ""

    def of(self, forward_func: Callable[..., Any], inputs: Tensor, role: int, quiet: bool = True) -> _Reading:
        """The Hessians of a model at these inputs; each `role` has independent draws."""
        first = self.seed + role * len(inputs)
        seeds = list(range(first, first + len(inputs)))
        with warnings.catch_warnings():
            if quiet:  # the first run has issued the same warnings
                warnings.simplefilter("ignore")
            result = SmoothHess(forward_func).attribute(
                inputs, self.target, self.args, gaussian=self.gaussian, seed=seeds, **self.options
            )
        self.shape, self.text = result.shape, result.gaussian_text
        return self._read(result)

    def _read(self, result: Result) -> _Reading:
        d = result.shape[1]
        if d < 3:
            raise ValueError(f"sanity ranks pairs of features and needs at least 3 features, got {d}.")
        i, j = torch.triu_indices(d, d, 1, device=result.device)
        scales = result.feature_scales.to(result.hessian)
        effects = (result.hessian * scales[:, :, None] * scales[:, None]).abs()[:, i, j]  # (B, d(d − 1)/2)
        effects = torch.where(effects > RESOLUTION * effects.amax(1, keepdim=True), effects, 0.0)
        strongest = effects.topk(min(self.k, effects.shape[1]), 1)
        top, n_pairs = torch.where(strongest.values > 0, strongest.indices, -1), effects.shape[1]
        if n_pairs > MOST_PAIRS:
            chosen = torch.randint(n_pairs, (MOST_PAIRS,), generator=torch_generator())
            effects = effects[:, chosen.to(result.device)]
        vectors = result.eigh(max(1, min(DIRECTIONS, d // 2))).vectors.flatten(2)
        return _Reading(n_pairs, effects, top, vectors)

    def nearby(self, nearness: float) -> Tensor:
        """The inputs, each displaced by an independent draw of the Gaussian times `nearness`."""
        x = self.inputs
        z = pilot_rows(self.seed, len(x), self.gaussian.rank(x[0].numel()))
        moved = self.gaussian.to(x.device, x.dtype).colour(z.to(x))
        return x + nearness * moved.reshape(x.shape)


# --- the checks -------------------------------------------------------------------------------------------------------


def _seed_checks(base: _Reading, again: Sequence[_Reading], k: int) -> list[Check]:
    alike = _Likeness.mean([base.like(other) for other in again])
    lines = []
    found = (
        (f"seeds: top {base.top.shape[1]} pairs found again", alike.pairs, min(k / base.n_pairs, 1.0)),
        ("seeds: rank correlation of |H|", alike.ranks, 0.0),
    )
    for name, values, chance in found:
        value, stderr = _mean(values)
        if value >= STABLE:
            verdict = "stable"
        elif value >= PARTLY:
            verdict = "partly stable: raise n_calls, or use groups"
        else:
            verdict = "unstable, mostly noise: raise n_calls, or use groups"
        lines.append(Check(name, value, stderr, chance, "near 1, far above chance", verdict, value >= STABLE))
    return lines


def _input_checks(base: _Reading, near: _Reading) -> list[Check]:
    close, lines = base.like(near), []
    if len(base.strength) == 1:
        verdict = "not measured: pass several different inputs"
        return [
            Check(f"inputs: {what}, nearby", *_mean(getattr(close, of)), math.nan, "above unrelated", verdict, None)
            for of, what in (("ranks", "rank correlation of |H|"), ("directions", "eigen-directions"))
        ]
    apart = base.like(base, shift=1)
    for of, what in (("ranks", "rank correlation of |H|"), ("directions", "eigen-directions")):
        mine, other = getattr(close, of), getattr(apart, of)
        gain, error = _mean(mine - other)
        value, stderr = _mean(mine)
        if gain > SURE * error:
            verdict, passed = "nearby inputs are more similar", True
        elif value >= ALIKE:
            verdict, passed = "similar for all inputs: H hardly depends on the input", True
        else:
            verdict, passed = "nearby inputs are no more similar than unrelated inputs", False
        name = f"inputs: {what}, nearby"
        lines.append(Check(name, value, stderr, float(other.mean()), "above that of unrelated inputs", verdict, passed))
    return lines


def _parameter_checks(
    forward_func: Any, runs: _Runs, base: _Reading, ceiling: _Likeness, role: int, stages: int
) -> list[Check]:
    should = "far below that of two seeds"
    try:
        layers = _layers(forward_func)
        copy.deepcopy(forward_func)
    except (ValueError, TypeError, RuntimeError, copy.Error) as error:
        return [Check("parameters: randomised", math.nan, math.nan, math.nan, should, f"not measured: {error}", None)]
    counts = sorted({math.ceil(len(layers) * s / stages) for s in range(1, stages + 1)})
    lines = []
    for n in counts:
        random = _randomised(forward_func, layers[-n:], runs.seed)
        alike = base.like(runs.of(random, runs.inputs, role))
        role += 1
        last = n == len(layers)
        which = f"all {n} layers random" if last else f"last {n} of {len(layers)} layers random"
        for of, what in (("ranks", "rank correlation of |H|"), ("directions", "eigen-directions")):
            similarity, top = getattr(alike, of), getattr(ceiling, of)
            value, stderr = _mean(similarity)
            fall, error = _mean(top - similarity)
            sure = fall > SURE * error or math.isnan(error)
            fallen = sure and value <= FALLEN * float(top.mean())
            if not last:
                verdict, passed = "intermediate stage", None
            elif fallen:
                verdict, passed = "falls: H depends on what the model has learnt", True
            else:
                verdict, passed = "stays: H shows the architecture or the input, or is noise", False
            lines.append(
                Check(f"parameters: {what}, {which}", value, stderr, float(top.mean()), should, verdict, passed)
            )
    return lines


# --- randomised models ------------------------------------------------------------------------------------------------


def _layers(forward_func: Any) -> list[str]:
    """Names of the modules that own parameters, in the order of registration."""
    if not isinstance(forward_func, nn.Module):
        raise ValueError("parameters can be randomised only in a torch.nn.Module, not in another callable")
    layers = [
        name for name, module in forward_func.named_modules() if any(True for _ in module.parameters(recurse=False))
    ]
    if not layers:
        raise ValueError("the model has no parameters")
    return layers


def _randomised(model: nn.Module, layers: Sequence[str], seed: int) -> nn.Module:
    """A copy of the model in which these layers have random parameters."""
    changed = copy.deepcopy(model)
    modules = dict(changed.named_modules())
    with torch.no_grad(), _own_random_state(seed):
        for name in layers:
            module = modules[name]
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
                continue
            for parameter in module.parameters(recurse=False):
                spread = parameter.std() if parameter.numel() > 1 else parameter.abs().squeeze()
                parameter.copy_(parameter.mean() + spread * torch.randn_like(parameter))
    return changed


@contextmanager
def _own_random_state(seed: int) -> Iterator[None]:
    """Seed the global generators, from which `reset_parameters` draws, and restore their state afterwards.

    No other code than that which creates weights sets global generators: they belong to all threads.
    """
    # torch.manual_seed seeds the generators of all devices, not only of the model's device
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    # A seed that no user is likely to choose: the seed of the user's initialisation would restore the initial weights,
    # which trained weights resemble.
    unusual = evaluation_seed(seed, _SALT) >> 1
    with torch.random.fork_rng(devices):
        torch.manual_seed(unusual)
        yield


def _mean(values: Tensor) -> tuple[float, float]:
    """Mean over examples and its standard error, which is NaN for one example."""
    n = len(values)
    return float(values.mean()), float(values.std()) / n**0.5 if n > 1 else math.nan
