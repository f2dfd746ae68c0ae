"""Does the explanation depend on what it should depend on, and on nothing else?

Three questions, each answered by comparing Hessians: with those of the same network after its parameters were
randomised (should differ: else what is shown is the architecture or the input, not what was learnt), with those of
nearby and of unrelated inputs (nearby ones should be more alike), and with those of other seeds (should agree: else
what is shown is Monte-Carlo noise). Every run has draws of its own, so shared noise cannot make two Hessians alike.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from smoothhess.draws.designs import pilot_rows
from smoothhess.draws.gaussian import Gaussian
from smoothhess.evaluate.perturbation_mse import check_whole
from smoothhess.evaluate.rank_correlation import spearman
from smoothhess.explainers.smooth_hess import SmoothHess
from smoothhess.model.gradients import check_inputs
from smoothhess.result.interactions import Interactions

RESOLUTION = 1e-6  # of the strongest pair: weaker ones are rounding, and share one rank
MOST_PAIRS = 200_000  # ranked; of more, as many at random
DIRECTIONS = 4  # leading eigenvectors that are compared, or half of the features where there are fewer
STABLE, PARTLY = 0.8, 0.5  # of the top pairs found again with another seed
FALLEN = 0.5  # of the similarity of two seeds that may be left when all parameters are random
ALIKE = 0.95  # similarity of nearby inputs that is enough by itself
SURE = 2.0  # standard errors of a paired difference
_SALT = 0x5A17


class Check(NamedTuple):
    """One line of the table."""

    name: str
    value: float  # mean over examples
    stderr: float  # over examples; NaN for one
    reference: float  # what it is to be compared with, NaN where there is none
    should: str
    verdict: str
    passed: bool | None  # None where it could not be measured


@dataclass(frozen=True, eq=False, repr=False)
class Sanity:
    """What `sanity` found. Print it for the table."""

    checks: tuple[Check, ...]
    question: str  # what was asked, in words

    @property
    def passed(self) -> bool:
        """Whether nothing that could be measured failed."""
        return all(check.passed is not False for check in self.checks)

    def __len__(self) -> int:
        return len(self.checks)

    def __getitem__(self, name: str) -> Check:
        """The line of that name."""
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(f"wanted one of {', '.join(repr(c.name) for c in self.checks)}, got {name!r}.")

    def to_markdown(self) -> str:
        """The table."""
        head, *rows = self._cells()
        return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])

    def __repr__(self) -> str:
        rows = self._cells()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [f"Sanity of {self.question}"]
        lines += ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, "  ± one standard error over examples"])

    def _cells(self) -> list[list[str]]:
        rows = [["check", "value", "reference", "should be", "verdict"]]
        for c in self.checks:
            value = "–" if math.isnan(c.value) else f"{c.value:.2f}"
            value += "" if math.isnan(c.stderr) else f" ± {c.stderr:.2f}"
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
    """One table: parameter randomisation, nearby against unrelated inputs, and seed-to-seed stability of SmoothHess.

    Args:
        forward_func: the model. Randomising its parameters needs a torch.nn.Module, of which a deep copy is changed;
            for another callable that check is left out. For a softmax pass nn.Sequential(net, nn.Softmax(-1)).
        inputs: (B, *shape); several, and different ones, so that unrelated inputs can be compared.
        target: which output; see `smoothhess.model.targets`. It stays the same when the model is randomised.
        additional_forward_args: further arguments of the model; tensors with B rows follow their example.
        sigma: how far to look, as in `SmoothHess.attribute`; one of sigma, radius and gaussian.
        radius: as there.
        gaussian: as there.
        k: top pairs whose stability is looked at.
        n_seeds: runs with different draws.
        nearness: of a nearby input: as far as so many σ of the Gaussian in every direction.
        stages: of the randomisation, from the output to the input; 1 randomises all layers at once.
        seed: of everything.
        options: those of `SmoothHess.attribute`: n_calls, design, feature_mask, …

    Layers that have `reset_parameters` are initialised anew by it; parameters of others are drawn from a normal with
    the mean and spread of their own.

    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 1)).double()
    >>> report = sanity(net, torch.randn(4, 6).double(), radius=1.0, n_calls=200)
    >>> [check.name for check in report.checks][:2], len(report)
    (['seeds: top 10 pairs found again', 'seeds: rank correlation of |H|'], 8)
    """
    check_inputs(inputs)
    inputs = inputs.detach()
    for name, number, least in (("k", k, 1), ("n_seeds", n_seeds, 2), ("stages", stages, 1), ("seed", seed, 0)):
        check_whole(number, name, least)
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
    return Sanity(tuple(checks), f"SmoothHess of {b} example(s) × {d} features, {runs.text}")


# --- Hessians, and how alike two of them are --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Likeness:
    """Of two Hessians, for each of B examples, (B,) each."""

    ranks: Tensor  # Spearman's ρ of |H_ij|
    directions: Tensor  # overlap of the spans of the leading eigenvectors: 1 the same, 0 what chance gives
    pairs: Tensor  # share of the top k pairs that both have

    @staticmethod
    def mean(several: Sequence[_Likeness]) -> _Likeness:
        return _Likeness(
            *(torch.stack([getattr(s, n) for s in several]).mean(0) for n in ("ranks", "directions", "pairs"))
        )


@dataclass(frozen=True, eq=False)
class _Reading:
    """What is kept of the Hessians of a run."""

    n_pairs: int  # i < j
    strength: Tensor  # (B, P) |H_ij| σ_i σ_j of these pairs, or of some of them
    top: Tensor  # (B, k) numbers of the strongest pairs; −1 where there are fewer that interact at all
    directions: Tensor  # (B, m, d) leading eigenvectors

    def like(self, other: _Reading, shift: int = 0) -> _Likeness:
        """How alike examples b here and b + shift there are; where one has no interactions at all, not at all."""
        strength, top, directions = (t.roll(-shift, 0) for t in (other.strength, other.top, other.directions))
        ranks = spearman(self.strength, strength).nan_to_num(0.0)
        (_, m, d), n = self.directions.shape, directions.shape[1]
        span, chance = (self.directions @ directions.mT).square().sum((-1, -2)) / min(m, n), max(m, n) / d
        span = (span - chance) / (1 - chance)
        shared = ((self.top[:, :, None] == top[:, None]).any(-1) & (self.top >= 0)).sum(1)
        shared = shared.double() / torch.maximum((self.top >= 0).sum(1), (top >= 0).sum(1)).clamp_min(1)
        return _Likeness(ranks.cpu(), span.double().cpu(), shared.cpu())


class _Runs:
    """Runs of SmoothHess on the same examples, each with seeds of its own."""

    def __init__(
        self, inputs: Tensor, target: Any, args: Any, gaussian: Gaussian, k: int, seed: int, options: dict[str, Any]
    ) -> None:
        self.inputs, self.target, self.args, self.gaussian = inputs, target, args, gaussian
        self.k, self.seed, self.options = k, seed, options
        self.shape, self.text = (0, 0, 0), ""

    def of(self, forward_func: Callable[..., Any], inputs: Tensor, role: int, quiet: bool = True) -> _Reading:
        """The Hessians of a model at these inputs, with the draws of this role."""
        first = self.seed + role * len(inputs)
        seeds = list(range(first, first + len(inputs)))
        with warnings.catch_warnings():
            if quiet:  # what there is to warn of was said of the first run
                warnings.simplefilter("ignore")
            result = SmoothHess(forward_func).attribute(
                inputs, self.target, self.args, gaussian=self.gaussian, seed=seeds, **self.options
            )
        self.shape, self.text = result.shape, result.gaussian_text
        return self._read(result)

    def _read(self, result: Interactions) -> _Reading:
        d = result.shape[1]
        if d < 3:
            raise ValueError(f"sanity compares ranks of pairs: wanted at least 3 features, got {d}.")
        i, j = torch.triu_indices(d, d, 1, device=result.device)
        scales = result._scales.to(result.hessian)
        effects = (result.hessian * scales[:, :, None] * scales[:, None]).abs()[:, i, j]  # (B, d(d − 1)/2)
        effects = torch.where(effects > RESOLUTION * effects.amax(1, keepdim=True), effects, 0.0)
        strongest = effects.topk(min(self.k, effects.shape[1]), 1)
        top, n_pairs = torch.where(strongest.values > 0, strongest.indices, -1), effects.shape[1]
        if n_pairs > MOST_PAIRS:
            rng = torch.Generator().manual_seed(0)
            effects = effects[:, torch.randint(n_pairs, (MOST_PAIRS,), generator=rng).to(result.device)]
        vectors = result.eigh(max(1, min(DIRECTIONS, d // 2))).vectors.flatten(2)
        return _Reading(n_pairs, effects, top, vectors)

    def nearby(self, nearness: float) -> Tensor:
        """The inputs, each moved by a draw of its own of the Gaussian, made so much smaller."""
        x = self.inputs
        z = pilot_rows(self.seed, len(x), self.gaussian.rank(x[0].numel()))
        moved = self.gaussian.to(x.device, x.dtype).colour(z.to(x))
        return x + nearness * moved.reshape(x.shape)


# --- the three questions ----------------------------------------------------------------------------------------------


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
            verdict, passed = "nearby inputs are more alike", True
        elif value >= ALIKE:
            verdict, passed = "alike everywhere: H hardly depends on the input", True
        else:
            verdict, passed = "nearby inputs are no more alike than unrelated ones", False
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
            left, top = getattr(alike, of), getattr(ceiling, of)
            value, stderr = _mean(left)
            fall, error = _mean(top - left)
            sure = fall > SURE * error or math.isnan(error)
            fallen = sure and value <= FALLEN * float(top.mean())
            if not last:
                verdict, passed = "on the way", None
            elif fallen:
                verdict, passed = "falls: H depends on what the model has learnt", True
            else:
                verdict, passed = "stays: H shows the architecture or the input, or is noise", False
            lines.append(
                Check(f"parameters: {what}, {which}", value, stderr, float(top.mean()), should, verdict, passed)
            )
    return lines


# --- a model that has learnt nothing ----------------------------------------------------------------------------------


def _layers(forward_func: Any) -> list[str]:
    """Names of the modules that own parameters, in the order in which they were put in."""
    if not isinstance(forward_func, nn.Module):
        raise ValueError("parameters can be randomised in a torch.nn.Module alone, not behind another callable")
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
    """`reset_parameters` draws from the global generators: they are put back afterwards."""
    # torch.manual_seed reaches the generators of all devices, not of the model's alone
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    # A seed that nobody takes by hand: that of the user's own initialisation would bring back the weights that training
    # began with, which trained ones resemble.
    unusual = int(np.random.SeedSequence((seed, _SALT)).generate_state(1, np.uint64)[0] >> np.uint64(1))
    with torch.random.fork_rng(devices):
        torch.manual_seed(unusual)
        yield


def _mean(values: Tensor) -> tuple[float, float]:
    """Mean over examples and its standard error; NaN for one."""
    n = len(values)
    return float(values.mean()), float(values.std()) / n**0.5 if n > 1 else math.nan
