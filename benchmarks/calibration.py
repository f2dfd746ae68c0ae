"""Where do the error bars hold? Coverage, width over that of an oracle, and warnings, case by case.

    python benchmarks/calibration.py --out before.jsonl --label before
    python benchmarks/calibration.py --quick --only "block: *"
    python benchmarks/calibration.py --table before.jsonl after.jsonl
    python benchmarks/calibration.py --table before.jsonl after.jsonl --write docs/benchmarks/calibration.md

In each case SmoothHess runs once for each seed, 25 seeds in a batch, which does not change the numbers. The intervals
of every quantity are compared with the truth (see calibration_problems). The oracle's interval is ±1.96 standard
deviations of the same unbiased estimate between the seeds; with 2–4 independent replicates (blocks, ± pairs, draws or
scramblings) it has Student's t instead of 1.96. A quantity passes if

- the seeds that neither warn nor report an infinite or undefined width have coverage ≥ .92 and a median width of at
  most 1.5 times the oracle's, and
- at most 5 % of the seeds warn or report such a width, unless the coverage over all seeds is below .92.

A warning that max_calls was reached does not put the intervals in doubt: such seeds are judged with the others. A
coverage below .92 by less than two standard errors (between seeds) is marked "low". Where the estimates of all seeds
are exact to rounding, the oracle has no width; there the half-width may be up to a tenth of the largest entry. Reported
pairs are those with the largest estimates, so that even an oracle's intervals cover them less often; the verdict is
"selected" where an oracle is below .92 on the same pairs too, and they are within .1 of it. The relative
error passes if its median is at least .67 of the true one (sums over groups: also at most 1.5), false discoveries if
their rate is at most q + 2 standard errors, sums over groups if their error is at most 1.2 times that of the better of
the unbiased and the denoised sums. Finished cases in --out are not run again.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import multiprocessing
import os
import platform
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from calibration_cases import Case, all_cases
from calibration_page import page
from calibration_problems import Problem, randn
from numpy.typing import NDArray
from scipy.stats import t as student_t
from torch import Tensor

import smoothhess as sh
from smoothhess.explainers.result_warnings import warn_of

LEAST_COVERAGE, MOST_WIDTH, MOST_FLAGGED = 0.92, 1.5, 0.05
RATIOS = 0.67, 1.5  # of reported to true relative error
SUMS = 1.2  # error of served sums over that of the better of two estimates
ROUNDING = 1e-9  # of the largest entry
EXACT_WIDTH = 0.1  # half-width, as a share of the largest entry, of estimates that are exact
REPORTED = 10  # pairs
EIGENVALUES = 4
BATCH = 25  # seeds in one call
SELECTED = 0.1  # coverage of reported pairs below that of an oracle, where the oracle is below LEAST_COVERAGE itself
DISCOVERIES = {"discoveries": 0.05, "discoveries, q = .2": 0.2}  # accepted false-discovery rates
KINDS = {
    "budget": ("max_calls",),
    "zero": ("distinguished from zero",),
    "jump": ("jump", "discontinu", "not the derivatives of"),
    "bias": ("estimated from tau_probes",),
    "closed form": ("the closed form of",),
    "few": ("carry the estimate",),
    "unknown": ("no gradient of", "changed the gradient", "crossed a kink"),
}


class Reading(NamedTuple):
    """Intervals of one seed; `place` numbers the entries where they differ from seed to seed."""

    error: NDArray[np.float32]  # estimate − truth
    half: NDArray[np.float32]  # half-width
    covered: NDArray[np.bool_]
    place: NDArray[np.int64] | None = None


class Seed(NamedTuple):
    """What one run said."""

    warned: tuple[str, ...]  # kinds
    intervals: dict[str, Reading]
    numbers: dict[str, tuple[float, ...]]
    calls: int
    status: str
    control: str
    replicates: int


# --- one run ----------------------------------------------------------------------------------------------------------


def kind_of(message: str) -> str:
    """The kind of a warning, from its text."""
    return next((kind for kind, words in KINDS.items() if any(word in message for word in words)), "other")


def indicator(mask: Tensor) -> Tensor:
    """(d, K) from group ids."""
    return torch.nn.functional.one_hot(mask.flatten()).double()


class Target(NamedTuple):
    """True numbers with the standard errors of the reference and the size below which a difference is rounding."""

    value: Tensor
    error: Tensor | None
    rounding: float


@cache
def targets(problem: Problem) -> dict[str, Target]:
    """The truth of every quantity."""
    truth, d = problem.truth, problem.d
    scale = float(problem.gaussian.scales(d).min())
    least = 1e-12 * float(truth.gradient.abs().max())

    def target(value: Tensor, error: Tensor | None, size: float | None = None, unit: float = 1.0) -> Target:
        size = float(value.abs().max()) if size is None else size
        return Target(value, error, ROUNDING * size + least / unit)

    H, E = truth.hessian, truth.hessian_error
    size = float(H.abs().max())
    i, j = torch.triu_indices(d, d, 1)
    value_error = torch.tensor([truth.value_error], dtype=torch.float64) if truth.value_error else None

    def sums(left: Tensor, right: Tensor, pairs: bool) -> tuple[Tensor, Tensor | None]:
        """left H right′ of all rows, or of pairs of rows, with its error between the runs of the reference."""
        formula = "ni,ij,nj->n" if pairs else "ni,ij,mj->nm"
        value = torch.einsum(formula, left, H, right)
        if truth.samples is None:
            return value, None
        runs = torch.stack([torch.einsum(formula, left, run, right) for run in truth.samples])
        return value, runs.std(0) / math.sqrt(len(runs))

    found = {
        "diagonal": target(H.diagonal(), None if E is None else E.diagonal(), size, scale),
        "off-diagonal": target(H[i, j], None if E is None else E[i, j], size, scale),
        "row": target(H[d // 2], None if E is None else E[d // 2], size, scale),
        "bilinear": target(*sums(*directions(problem, "bilinear"), True), unit=scale),
        "gradient": target(truth.gradient, truth.gradient_error),
        "value": target(torch.tensor([truth.value], dtype=torch.float64), value_error),
        "hessian": target(H, E, size, scale),
        "eigenvalues": target(torch.linalg.eigvalsh(H).flip(0), None, size, scale),
    }
    if problem.inside is not None:
        found["along"] = target(*sums(problem.inside, problem.inside, True), unit=scale)
    if problem.mask is not None:
        P = indicator(problem.mask)
        value, error = sums(P.T, P.T, False)
        k = P.shape[1]
        i, j = torch.triu_indices(k, k, 1)
        size = float(value.abs().max())
        found["groups"] = target(value[i, j], None if error is None else error[i, j], size, scale)
        found["groups diagonal"] = target(value.diagonal(), None if error is None else error.diagonal(), size, scale)
        found["sums"] = target(value, error, size, scale)
    return found


@cache
def directions(problem: Problem, name: str) -> tuple[Tensor, Tensor]:
    """Pairs of directions: random, random with themselves, indicators, and those of the problem; or these only."""
    d = problem.d
    if name == "along":
        assert problem.inside is not None
        return problem.inside, problem.inside
    u, v = randn(501, 4, d) / d**0.5, randn(502, 4, d) / d**0.5
    marks = (randn(503, 3, d) > 0).double()
    left = [u, u[:2], marks[:2], marks[:1]]
    right = [v, u[:2], marks[1:], marks[:1]]
    if problem.inside is not None:
        left += [problem.inside, problem.inside[:-1]]
        right += [problem.inside, problem.inside[1:]]
    return torch.cat(left), torch.cat(right)


class Interval(NamedTuple):
    """Estimates and the ends of their intervals."""

    value: Tensor
    low: Tensor
    high: Tensor

    @staticmethod
    def of(estimate: sh.Estimate) -> Interval:
        return Interval(estimate.value, *estimate.interval())


def reading(interval: Interval, target: Target, place: Tensor | None = None) -> Reading:
    """Intervals against the truth; the error of a reference widens them."""
    value, low, high = (t.detach().double().flatten() for t in interval)
    truth = target.value.flatten() if place is None else target.value[place]
    half, slack = (high - low) / 2, torch.full_like(low, target.rounding)
    if target.error is not None:
        own = (target.error if place is None else target.error[place]).flatten()
        slack = slack + (half.square() + (1.96 * own).square()).sqrt() - half
    covered = (low - slack <= truth) & (truth <= high + slack)
    return Reading(
        (value - truth).float().numpy(),
        half.float().numpy(),
        covered.numpy(),
        None if place is None else place.numpy(),
    )


def _columns(pairs: Sequence[sh.Pair], d: int) -> tuple[Tensor, Tensor]:
    """Values and ends of intervals, (n, 3), and the places of the pairs in the order of the upper triangle."""
    i, j = torch.tensor([p.i for p in pairs]), torch.tensor([p.j for p in pairs])
    columns = torch.tensor([[p.value, p.low, p.high] for p in pairs], dtype=torch.float64)
    return columns, i * (2 * d - i - 1) // 2 + j - i - 1


def eigenvalue_places(values: Tensor, d: int) -> Tensor:
    """The places, in descending order, of the eigenvalues that reported `values` (k,) stand for."""
    positive = values >= 0
    return torch.where(positive, positive.cumsum(0) - 1, d - (~positive).cumsum(0))


def relative(estimate: Tensor, target: Target) -> float:
    """True relative error; the reference's own squared error is subtracted above and below."""
    own = 0.0 if target.error is None else float(target.error.square().sum())
    off = float((estimate.detach().double() - target.value).square().sum()) - own
    norm = float(target.value.square().sum()) - own
    if norm <= 0:
        return 0.0 if off <= target.rounding**2 else math.inf
    return math.sqrt(max(off, 0.0) / norm)


class Readings(NamedTuple):
    """What is read off one run."""

    intervals: dict[str, Reading]
    numbers: dict[str, tuple[float, ...]]


def read(case: Case, problem: Problem, result: Any) -> list[Readings]:
    """Everything that a case is judged by, for each example of a result."""
    true = targets(problem)
    examples = [Readings({}, {}) for _ in range(len(result.hessian))]

    def put(name: str, interval: Interval, target: Target) -> None:
        for example, *own in zip(examples, *interval, strict=True):
            example.intervals[name] = reading(Interval(*own), target)

    if case.how == "closed_form":
        error, reach = result.error.double(), 1.96 * result.error_stderr.double()
        off = torch.tensor([relative(result.hessian[0].double(), true["hessian"])], dtype=torch.float64)
        put("closed form", Interval(error, error - reach, error + reach), Target(off, None, 1e-6))
        return examples
    if "off-diagonal" in case.read:
        for example, pairs in zip(examples, result.top_pairs(problem.d * (problem.d - 1) // 2), strict=True):
            _read_pairs(example, case, problem, pairs)
    if "split pairs" in case.read:
        for example, pairs in zip(examples, result.top_pairs(REPORTED, selection="split"), strict=True):
            columns, place = _columns(pairs, problem.d)
            example.intervals["split pairs"] = reading(Interval(*columns.T), true["off-diagonal"], place)
    if "eigenvalues" in case.read:
        values, estimate = result.eigh(EIGENVALUES).values, Interval.of(result.eigh(EIGENVALUES).estimate)
        for example, found, *own in zip(examples, values, *estimate, strict=True):
            target = true["eigenvalues"]
            chosen = target._replace(value=target.value[eigenvalue_places(found, problem.d)])
            example.intervals["eigenvalues"] = reading(Interval(*own), chosen)
    for name in case.read:
        if name == "diagonal":
            put(name, Interval.of(result.diagonal()), true[name])
        elif name == "row":
            put(name, Interval.of(result.row(problem.d // 2)), true[name])
        elif name in ("bilinear", "along"):
            pairs = zip(*directions(problem, name), strict=True)
            forms = [Interval.of(result.bilinear(u, v)) for u, v in pairs]
            put(name, Interval(*(torch.stack(end, 1) for end in zip(*forms, strict=True))), true[name])
        elif name == "gradient":
            put(name, Interval.of(result.gradient_estimate()), true[name])
        elif name == "value":
            put(name, Interval.of(result.value_estimate()), true[name])
        elif name == "relative error":
            for example, error, hessian in zip(examples, result.relative_error, result.hessian, strict=True):
                example.numbers[name] = float(error), relative(hessian, true["hessian"])
    if "groups" in case.read or "masked" in case.read:
        _read_groups(examples, case, problem, result, put)
    return examples


def _read_pairs(example: Readings, case: Case, problem: Problem, pairs: Sequence[sh.Pair]) -> None:
    """All entries above the diagonal, the pairs that are reported first, and false discoveries."""
    target = targets(problem)["off-diagonal"]
    columns, place = _columns(pairs, problem.d)
    example.intervals["off-diagonal"] = reading(Interval(*columns[place.argsort()].T), target)
    if "top pairs" in case.read:
        example.intervals["top pairs"] = reading(Interval(*columns[:REPORTED].T), target, place[:REPORTED])
    for name, q in DISCOVERIES.items():
        if name in case.read:
            assert problem.zeros is not None
            found = [p for p in pairs if p.q_value <= q]
            example.numbers[name] = float(sum(bool(problem.zeros[p.i, p.j]) for p in found)), float(len(found))


def _read_groups(examples: Sequence[Readings], case: Case, problem: Problem, result: Any, put: Callable[..., None]):
    """Sums over groups of features, their errors, and those of the unbiased and of the denoised sums."""
    true, mask, masked = targets(problem), problem.mask, "masked" in case.read
    assert mask is not None
    name, P = "masked" if masked else "groups", indicator(mask)
    grouped = result if masked else result.groups(mask)
    unshrunk, k = grouped.unshrunk().hessian, P.shape[1]
    for b, (example, pairs) in enumerate(zip(examples, grouped.top_pairs(k * (k - 1) // 2), strict=True)):
        columns, place = _columns(pairs, k)
        example.intervals[name] = reading(Interval(*columns[place.argsort()].T), true["groups"])
        served = relative(grouped.hessian[b], true["sums"])
        example.numbers["masked error" if masked else "group error"] = float(grouped.relative_error[b]), served
        sums = [served, relative(unshrunk[b], true["sums"])]
        if not masked:
            sums.append(relative(P.T @ result.hessian[b].double() @ P, true["sums"]))
        example.numbers["sums"] = tuple(sums)
    put(f"{name} diagonal", Interval.of(grouped.diagonal()), true["groups diagonal"])


def replicates_of(case: Case, problem: Problem, calls: int) -> int:
    """Independent replicates behind a result."""
    design = case.options.get("design", "orthogonal")
    if case.how == "merge":
        return case.parts
    rows = calls if design == "iid" else calls // 2
    k = problem.gaussian.rank(problem.d)
    block = {"iid": 1, "antithetic": 1, "sobol": 64, "orthogonal": 2 * k if k <= 4 else k}[design]
    return rows // block


def run_seeds(case: Case, problem: Problem, seeds: Sequence[int]) -> list[Seed]:
    """One call of SmoothHess with an example for each seed; the warnings are those of each example."""
    options = dict(case.options)
    if "masked" in case.read:
        options["feature_mask"] = problem.mask
    model: Any = problem.model
    explainer: Any = sh.TokenSmoothHess(model, problem.layer) if problem.layer else sh.SmoothHess(model)

    def attribute(seeds: Sequence[int]) -> sh.Interactions:
        inputs = problem.x.expand(len(seeds), *problem.x.shape)
        return explainer.attribute(inputs, problem.target, gaussian=problem.gaussian, seed=list(seeds), **options)

    if case.how == "attribute":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = attribute(seeds)
            readings = read(case, problem, result)
        return [_seed(case, problem, result[b], found, ()) for b, found in enumerate(readings)]
    every = []
    for seed in seeds:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if case.how == "closed_form":
                result: Any = explainer.closed_form(
                    problem.x[None], problem.target, gaussian=problem.gaussian, seed=seed, **options
                )
            elif case.how == "merge":
                result = attribute([1000 * seed])
                for part in range(1, case.parts):
                    result = result.merge(attribute([1000 * seed + part]))
            else:
                result = explainer.more(attribute([seed]), case.parts * int(options["n_calls"]))
            [found] = read(case, problem, result)
        every.append(_seed(case, problem, result, found, caught))
    return every


def _seed(
    case: Case, problem: Problem, result: Any, found: Readings, caught: Sequence[warnings.WarningMessage]
) -> Seed:
    """What one run reported; a run that was part of a batch is asked for its warnings separately."""
    if case.how == "attribute":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_of(result, None)
    kinds = tuple(sorted({kind_of(str(w.message)) for w in caught if issubclass(w.category, UserWarning)}))
    if case.how == "closed_form":
        calls, status, control = int(case.options["check_calls"]), "calls", ""
    else:
        calls, status, control = int(result.n_calls[0]), result.status[0], str(result.control)
    return Seed(kinds, *found, calls, status, control, replicates_of(case, problem, calls))


def run_chunk(name: str, seeds: Sequence[int]) -> tuple[list[Seed], float]:
    """Some seeds of a case, in a worker."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    case = all_cases()[name]
    problem = case.problem()
    found = [s for start in range(0, len(seeds), BATCH) for s in run_seeds(case, problem, seeds[start : start + BATCH])]
    return found, time.perf_counter() - started


def prepare(name: str) -> str:
    """Train the networks and make the reference of a case, in a worker."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        all_cases()[name].problem()
    return name


# --- the judgement ----------------------------------------------------------------------------------------------------


def oracle_factor(replicates: int) -> float:
    """1.96, or Student's t for 2–4 replicates."""
    return float(student_t.ppf(0.975, replicates - 1)) if 2 <= replicates <= 4 else 1.96


def in_doubt(seed: Seed) -> bool:
    """Whether a run warns of more than its budget, or of a closed form that is off: those intervals must still hold."""
    return bool(set(seed.warned) - {"budget", "closed form"})


def judge_intervals(case: Case, problem: Problem, name: str, seeds: Sequence[Seed]) -> dict[str, Any]:
    """Coverage, width, warnings and verdict of one quantity."""
    every = [s.intervals[name] for s in seeds]
    chosen = name in ("top pairs", "split pairs")
    source = "off-diagonal" if chosen else name.replace("masked", "groups")
    target = None if name == "closed form" else targets(problem)[source]
    rounding = 1e-6 if target is None else target.rounding
    errors = np.stack([s.intervals["off-diagonal" if chosen else name].error for s in seeds]).astype(float)
    sd = np.nanstd(errors, 0, ddof=1) * (math.sqrt(2) if name == "split pairs" else 1.0)
    known = case.uses_pair_sd and problem.pair_sd is not None and name in ("diagonal", "off-diagonal")
    if known and problem.pair_sd is not None:
        i, j = torch.triu_indices(problem.d, problem.d, 1)
        exact = problem.pair_sd.diagonal() if name == "diagonal" else problem.pair_sd[i, j]
        sd = exact.numpy() / math.sqrt(seeds[0].calls / 2)
    warned = np.array([bool(set(s.warned) - {*case.allowed, case.must_warn}) for s in seeds])
    unknown = np.array([not np.isfinite(r.half).all() for r in every])
    coverage = np.array([(r.covered | ~np.isfinite(r.half)).mean() for r in every])
    # flags that the case allows keep a seed out of the judgement, and do not count against the case
    flagged = np.array([in_doubt(s) for s in seeds]) | unknown
    good = ~flagged
    against = warned | (unknown & ("unknown" not in case.allowed))
    everywhere_exact = np.nanmax(np.abs(errors), initial=0.0) <= 2 * rounding
    ratios, plain, oracle_covers = [], [], []
    for seed, r, ok in zip(seeds, every, good, strict=True):
        if ok:
            own = sd if r.place is None else sd[r.place]
            oracle = np.where(own > rounding, own, np.nan)
            plain.append(r.half / (1.96 * oracle))
            ratios.append(r.half / (oracle_factor(seed.replicates) * oracle))
            oracle_covers.append(np.mean(np.abs(r.error) <= 1.96 * own + rounding))
    size = rounding / ROUNDING
    halves = [np.median(r.half) for r, ok in zip(every, good, strict=True) if ok]
    reach = float(np.median(halves)) if halves else 0.0
    width, width_plain = _median(ratios, every[0].place is None), _median(plain, every[0].place is None)
    n = int(good.sum())
    clean = float(coverage[good].mean()) if n else math.nan
    spread = float(coverage[good].std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan
    reasons, verdict = [], "pass"
    best = float(np.mean(oracle_covers)) if oracle_covers else math.nan
    if n and clean < LEAST_COVERAGE:
        low = n > 1 and clean + 2 * spread >= LEAST_COVERAGE
        selected = name == "top pairs" and best < LEAST_COVERAGE and clean + SELECTED >= best
        verdict = "low" if low else "selected" if selected else "FAIL"
        reasons.append(f"coverage {clean:.3f}")
    if n and width > MOST_WIDTH:
        verdict = "FAIL"
        reasons.append(f"width {width:.2g}")
    if n and everywhere_exact and reach > EXACT_WIDTH * size:
        verdict = "FAIL"
        reasons.append(f"exact, half-width {reach / size:.2g} of the largest")
    if coverage.mean() >= LEAST_COVERAGE and against.mean() > MOST_FLAGGED:
        verdict = "FAIL"
        reasons.append(f"flagged {against.mean():.0%}")
    if case.exact and not everywhere_exact:
        verdict = "FAIL"
        reasons.append("not exact")
    if case.must_warn and np.mean([case.must_warn in s.warned for s in seeds]) < 0.95:
        verdict = "FAIL"
        reasons.append(f"no warning of a {case.must_warn}")
    found: dict[str, Any] = {
        "coverage": clean,
        "coverage_error": spread,
        "worst_seed": float(coverage[good].min()) if n else math.nan,
        "coverage_all": float(coverage.mean()),
        "coverage_all_error": float(coverage.std(ddof=1) / math.sqrt(len(seeds))) if len(seeds) > 1 else math.nan,
        "width": width,
        "width_plain": width_plain,
        "oracle_coverage": best,
        "exact": bool(everywhere_exact),
        "half_over_largest": reach / size,
        "zero_width": float(np.mean([(r.half == 0).mean() for r in every])),
        "warned": float(np.mean([bool(s.warned) for s in seeds])),
        "unknown": float(unknown.mean()),
        "judged": n,
        "verdict": verdict,
        "reasons": reasons,
    }
    if target is not None and target.error is not None:
        own = target.error.flatten().numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            found["reference"] = float(np.nanmedian(own / sd))
    return found


def _median(rows: Sequence[NDArray[Any]], aligned: bool) -> float:
    """Over seeds for each entry, then over entries; over everything where the entries differ between seeds."""
    if not rows:
        return math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return float(np.nanmedian(np.nanmedian(np.stack(rows), 0) if aligned else np.concatenate(rows)))


def judge_relative(case: Case, name: str, seeds: Sequence[Seed]) -> dict[str, Any]:
    """Reported over true relative error, of the seeds that do not warn."""
    both = np.array([s.numbers[name] for s in seeds])
    reported, true = both[:, 0], both[:, 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(true > 1e-8, reported / true, np.where(reported <= 1e-6, 1.0, np.inf))
    warned = np.array([in_doubt(s) for s in seeds])
    finite = np.isfinite(reported)
    use = ratio[finite & ~warned]
    quantiles = (
        [float(np.quantile(use, q, method="inverted_cdf")) for q in (0.1, 0.5, 0.9)] if len(use) else [math.nan] * 3
    )
    false_zero = float(((reported == 0) & (true > 1e-6) & ~warned).mean())
    reasons = []
    if len(use) and quantiles[1] < RATIOS[0]:
        reasons.append(f"reported/true {quantiles[1]:.2g}")
    if len(use) and quantiles[1] > RATIOS[1] and name != "relative error":
        reasons.append(f"reported/true {quantiles[1]:.2g}")
    if false_zero:
        reasons.append(f"0 reported in {false_zero:.0%}")
    return {
        "ratio": quantiles,
        "reported": _finite_median(reported),
        "true": _finite_median(true),
        "infinite": float(np.isinf(reported).mean()),
        "nan": float(np.isnan(reported).mean()),
        "warned": float(warned.mean()),
        "judged": len(use),
        "verdict": "FAIL" if reasons else "pass",
        "reasons": reasons,
    }


def _finite_median(values: NDArray[Any]) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


def judge_discoveries(name: str, seeds: Sequence[Seed]) -> dict[str, Any]:
    """Mean share of pairs among those marked significant that are exactly zero."""
    both = np.array([s.numbers[name] for s in seeds])
    share = both[:, 0] / both[:, 1].clip(1)
    error = float(share.std(ddof=1) / math.sqrt(len(share))) if len(share) > 1 else 0.0
    verdict = "pass" if share.mean() <= DISCOVERIES[name] + 2 * error else "FAIL"
    return {
        "rate": float(share.mean()),
        "rate_error": error,
        "false": float(both[:, 0].mean()),
        "found": float(both[:, 1].mean()),
        "verdict": verdict,
        "reasons": [] if verdict == "pass" else [f"false discoveries {share.mean():.3f}"],
    }


def judge_sums(seeds: Sequence[Seed]) -> dict[str, Any]:
    """Mean errors of sums over groups: served, unbiased, denoised."""
    errors = np.array([s.numbers["sums"] for s in seeds]).mean(0)
    ratio = float(errors[0] / max(errors[1:].min(), 1e-300)) if errors[1:].min() > 1e-8 else 1.0
    found: dict[str, Any] = {"served": float(errors[0]), "unbiased": float(errors[1]), "over_better": ratio}
    if len(errors) > 2:
        found["denoised"] = float(errors[2])
    found["verdict"] = "pass" if ratio <= SUMS else "FAIL"
    found["reasons"] = [] if ratio <= SUMS else [f"sums {ratio:.2f} × the better"]
    return found


def judge(case: Case, seeds: Sequence[Seed]) -> dict[str, Any]:
    """The line of one case."""
    problem = case.problem()
    quantities: dict[str, Any] = {}
    for name in case.read:
        if name in seeds[0].intervals:
            quantities[name] = judge_intervals(case, problem, name, seeds)
        elif name in DISCOVERIES:
            quantities[name] = judge_discoveries(name, seeds)
        elif name in seeds[0].numbers:
            quantities[name] = judge_relative(case, name, seeds)
    if "sums" in seeds[0].numbers:
        quantities["sums"] = judge_sums(seeds)
    return {
        "case": case.name,
        "seeds": len(seeds),
        "quantities": quantities,
        "warnings": dict(Counter(kind for s in seeds for kind in s.warned)),
        "status": dict(Counter(s.status for s in seeds)),
        "control": dict(Counter(s.control for s in seeds)),
        "calls": float(np.median([s.calls for s in seeds])),
        "replicates": float(np.median([s.replicates for s in seeds])),
    }


# --- all cases --------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run what is not in the file yet; one line for each case, as soon as it is complete."""
    chosen = [c for c in all_cases().values() if any(fnmatch.fnmatch(c.name, p) or p in c.name for p in options.only)]
    if not chosen:
        raise SystemExit(f"no case matches {options.only}. Use --list.")
    lines = _lines(options.out) if options.out and options.out.is_file() else []
    done = {line["case"] for line in lines if line["label"] == options.label and line["asked"] >= options.seeds}
    todo = sorted((c for c in chosen if c.name not in done), key=lambda c: -c.weight)
    found = [line for line in lines if line["case"] in done and line["label"] == options.label]
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")  # of the workers
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        ready = [pool.submit(prepare, name) for name in _one_per_problem(todo)]
        for n, future in enumerate(as_completed(ready), 1):
            _tell(f"networks and references {n}/{len(ready)}: {future.result()}")
        chunks: dict[str, list[Future[tuple[list[Seed], float]]]] = {}
        for case in todo:
            count = max(2, options.seeds // case.seeds_divisor)
            size = max(1, math.ceil(count / (8 if case.weight >= 2 else 4)))
            parts = [range(i, min(i + size, count)) for i in range(0, count, size)]
            chunks[case.name] = [pool.submit(run_chunk, case.name, part) for part in parts]
        for n, case in enumerate(todo, 1):
            line: dict[str, Any] = {"label": options.label, "asked": options.seeds}
            try:
                results = [future.result() for future in chunks.pop(case.name)]
            except Exception as error:
                _tell(f"{n}/{len(todo)} {case.name}: {type(error).__name__}: {error}")
                line |= {"case": case.name, "failed": f"{type(error).__name__}: {error}"}
                found.append(line)
                continue
            line |= judge(case, [seed for part, _ in results for seed in part])
            line |= {"seconds": sum(s for _, s in results), "versions": versions()}
            found.append(line)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            _tell(f"{n}/{len(todo)} {case.name}: {_summary(line)} ({line['seconds']:.0f} s)")
    return found


def _one_per_problem(cases: Sequence[Case]) -> list[str]:
    """The names of one case for each function and arguments that make a problem."""
    seen: dict[Any, str] = {}
    for case in cases:
        made = case.problem
        key = (getattr(made, "func", made), getattr(made, "args", ()))
        seen.setdefault(key, case.name)
    return list(seen.values())


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _summary(line: dict[str, Any]) -> str:
    bad = [f"{k} ({', '.join(v['reasons'])})" for k, v in line["quantities"].items() if v["verdict"] != "pass"]
    return "; ".join(bad) or "pass"


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


# --- tables -----------------------------------------------------------------------------------------------------------


def _number(value: float | None, digits: int = 2) -> str:
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value) or abs(value) >= 1e4:
        return "∞" if math.isinf(value) else f"{value:.0e}"
    return f"{value:.{digits}f}" if abs(value) < 10 else f"{value:.0f}"


def cells(name: str, found: dict[str, Any] | None) -> list[str]:
    """Coverage (or what stands for it), width, share warned, share unknown, verdict."""
    if found is None:
        return ["", "", "", "", ""]
    verdict = found["verdict"]
    if "coverage" in found:
        error = f" ± {_number(found['coverage_error'], 3)}"
        shown = found["coverage"]
        first = f"{_number(shown, 3)}{error}" if found["judged"] else f"– (all {_number(found['coverage_all'], 3)})"
        width = f"exact, {_number(found['half_over_largest'])}" if found["exact"] else _number(found["width"])
        return [first, width, f"{found['warned']:.0%}", f"{found['unknown']:.0%}", verdict]
    if "ratio" in found:
        low, middle, high = (_number(r) for r in found["ratio"])
        unknown = f"{found['infinite'] + found['nan']:.0%}"
        values = f"{_number(found['reported'])} / {_number(found['true'])}"
        return [f"{values} = {middle} ({low}–{high})", "", f"{found['warned']:.0%}", unknown, verdict]
    if "rate" in found:
        counts = f"{_number(found['false'], 1)} of {_number(found['found'], 1)}"
        return [f"{counts}, FDR {_number(found['rate'], 3)} ± {_number(found['rate_error'], 3)}", "", "", "", verdict]
    errors = " / ".join(_number(found.get(k)) for k in ("served", "unbiased", "denoised"))
    return [errors, _number(found["over_better"]), "", "", verdict]


def table(lines: Sequence[dict[str, Any]]) -> str:
    """One row for each case and quantity, labels joined by arrows, after a count of verdicts."""
    labels = list(dict.fromkeys(line["label"] for line in lines))
    by: dict[str, dict[str, dict[str, Any]]] = {}
    for line in lines:
        by.setdefault(line["case"], {})[line["label"]] = line
    tally = {label: Counter[str]() for label in labels}
    rows = []
    for case, versions_of in by.items():
        names = list(dict.fromkeys(q for line in versions_of.values() for q in line.get("quantities", {})))
        for failed in (line for line in versions_of.values() if "failed" in line):
            rows.append(f"| {case} | {failed['label']}: {failed['failed']} | | | | | error |")
            tally[failed["label"]]["error"] += 1
        for name in names:
            columns = []
            for label in labels:
                found = versions_of.get(label, {}).get("quantities", {}).get(name)
                if found is not None:
                    tally[label][found["verdict"]] += 1
                columns.append(cells(name, found))
            joined = [
                " → ".join(dict.fromkeys(c)) if len(set(c)) == 1 else " → ".join(c) for c in zip(*columns, strict=True)
            ]
            rows.append(f"| {case.replace('|', '‖')} | {name} | " + " | ".join(joined) + " |")
    heads = ["case", "quantity", "coverage ± s.e.", "width / oracle", "warned", "unknown", "verdict"]
    head = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    counts = [
        f"{label}: " + ", ".join(f"{n} {verdict}" for verdict, n in c.most_common()) for label, c in tally.items()
    ]
    return "\n".join([*counts, "", *head, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="20 seeds")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="of case names, or parts of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--label", default="after", help="goes into the file; tables have a column for each")
    parser.add_argument("--out", type=Path, help="JSON lines; cases that are in it are not run again")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", help="print a table of files, run nothing")
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="with --table: a page of the last label, and of the first one if two"
    )
    parser.add_argument("--failures", action="store_true", help="table of what does not pass (in the last label) only")
    parser.add_argument("--list", action="store_true", help="names of the cases")
    options = parser.parse_args()
    if options.list:
        print("\n".join(all_cases()))
        return
    if options.quick:
        options.seeds = 20
    lines = [line for path in options.table for line in _lines(path)] if options.table else run(options)
    if options.write:
        first, last = lines[0]["label"], lines[-1]["label"]
        before = [line for line in lines if line["label"] == first != last]
        now = {line["case"]: line for line in lines if line["label"] == last}  # of two runs of a case the later one
        options.write.write_text(page(list(now.values()), before, options.write), encoding="utf-8")
        return
    if options.failures:
        last = lines[-1]["label"]
        bad = {
            line["case"]
            for line in lines
            if line["label"] == last and any(v["verdict"] != "pass" for v in line.get("quantities", {}).values())
        }
        lines = [line for line in lines if line["case"] in bad]
    print(table(lines))


if __name__ == "__main__":
    main()
