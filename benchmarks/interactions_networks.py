"""Which method finds the pairs that are known to interact, at equal cost, with errors over networks?

    python benchmarks/interactions_networks.py train --device cuda --folder build/networks
    python benchmarks/interactions_networks.py score --processes 8 --folder build/networks
    python benchmarks/interactions_networks.py table --folder build/networks --write
    python benchmarks/interactions_networks.py all --tiny --folder build/tiny      # seconds

`train` trains six ReLU MLPs, GELU MLPs and transformers on each of F1 to F10 with independent and with correlated
features (known_networks.py). `score` computes the AUC of the mean absolute score of each method. All methods have the
same number of passes in total, in units of a gradient call: a budget per point times the number of points; a method
that takes fewer passes per point explains more points. σ, β, the step and the control variate are those with the
smallest P_MSE at training points of the first network, which is not reported, and never depend on the true pairs.
Every result is appended to scores.jsonl when it is known; a run that was stopped continues. k-SII and FSII need shapiq
(pip install smoothhess[bench]) and can be added by a second run on another machine. `table` writes the page.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from detectors import Counted, Fitted, I, J, Method, finite_differences, load_shapiq, shapley, smooth
from interactions import BETAS, REACH, SIGMAS, STEPS, auc, average, markdown, publish, remarks
from known import FEATURES, truth_table
from known_networks import (
    ARCHITECTURES,
    CORRELATIONS,
    REPORTED,
    TINY,
    TRAINING,
    Cell,
    Ensemble,
    Sizes,
    cells,
    train_all,
)
from torch import Tensor, nn

from smoothhess import Exact, Interactions, SmoothHess, baselines
from smoothhess.estimate.student_t import quantile
from smoothhess.evaluate import compare, global_interactions
from smoothhess.result.result import Result

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks" / "interactions_networks.md"
FOLDER = ROOT / "build" / "networks"
REFERENCE = "SmoothHess"
GLOBAL = "SmoothHess, global mean abs H"
RADIUS = REACH * math.sqrt(FEATURES)  # of the neighbourhood that is asked about
BLOCK = 2 * FEATURES  # calls of a complete block of the orthogonal design
RECORD_CALLS = 2 * BLOCK  # calls for each record of global_interactions: two independent blocks
CHEAPEST = 2.5  # passes per point of CASO, which takes fewest
PRICED = 16  # points by which the price of a method is estimated; they are not reported
SAME = "auc at the same points"
SOFTENED = ("relu",)  # architectures whose own Hessian is zero


@dataclass(frozen=True)
class Scoring:
    """Sizes of `score`; results of other sizes are not used."""

    budgets: tuple[int, ...] = (64, 256)  # passes per point
    points: int = 48
    choosing: int = 20  # training points by which σ, β, the step and the control variate are chosen
    samples: int = 400  # perturbations of P_MSE
    sigmas: tuple[float, ...] = SIGMAS
    betas: tuple[float, ...] = BETAS
    steps: tuple[float, ...] = STEPS


SMALL = Scoring(budgets=(64,), points=4, choosing=3, samples=50, sigmas=(0.3, 0.5), betas=(3.0, 7.0), steps=(0.5, 1.0))


# --- methods ----------------------------------------------------------------------------------------------------------


class Logits(nn.Module):
    """The output as the difference of two logits, for CASO, which explains a cross-entropy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        value = self.model(x)
        return torch.stack([torch.zeros_like(value), value], 1)


def matrices(result: Result) -> tuple[Tensor, float]:
    return result.hessian, float(result.n_passes.double().mean())


def options_of(chosen: Mapping[str, Any], budget: int) -> dict[str, Any]:
    """σ, the calls and the control variate of SmoothHess for a budget."""
    picked = chosen["smooth"][str(budget)]
    return {"sigma": picked["sigma"], "n_calls": picked["n_calls"], "control": picked["control"]}


def methods(architecture: str, budget: int) -> list[Method]:
    """Methods that score pairs at points; `chosen` of their calls is a result of `choose`."""
    soft = architecture in SOFTENED
    label = "SoftPlus" if soft else "own"

    def source(c: Mapping[str, Any]) -> dict[str, Any]:
        return {"of": "softplus", "beta": c["beta"]} if soft else {"of": "own"}

    def second(m: Counted, x: Tensor, c: Mapping[str, Any]) -> Exact:
        return baselines.softplus(m, x, beta=c["beta"]) if soft else baselines.hessian(m, x)

    def integrated(m: Counted, x: Tensor, b: Tensor, c: Mapping[str, Any]) -> tuple[Tensor, float]:
        ends, each = 2.0, float(second(m, x[:1], c).n_passes[0])
        n_steps = max(1, round((budget - ends) / each))
        return matrices(
            baselines.integrated_hessians(m, x, baselines=b, n_steps=n_steps, tolerance=math.inf, **source(c))
        )

    found = [
        Method("SmoothHess", lambda m, x, b, c: matrices(smooth(m, x, **options_of(c, budget))), True),
        Method("SoftPlus Hessian" if soft else "Hessian", lambda m, x, b, c: matrices(second(m, x, c)), True),
        Method(f"Gradient-NID, {label}", lambda m, x, b, c: matrices(baselines.gradient_nid(m, x, **source(c))), True),
        Method(f"Integrated Hessians, {label}", integrated, False),
        Method("CASO", lambda m, x, b, c: matrices(baselines.caso(Logits(m), x, radius=RADIUS)), False),
        Method(
            f"CASO, {label}",
            lambda m, x, b, c: matrices(baselines.caso(Logits(m), x, radius=RADIUS, **source(c))),
            False,
        ),
        Method("finite differences", lambda m, x, b, c: matrices(finite_differences(m, x, c["step"])), True),
    ]
    if soft:
        swish = Method("Swish Hessian", lambda m, x, b, c: matrices(baselines.swish(m, x, beta=c["swish"])), True)
        found.insert(2, swish)
    return found


def shapley_methods(budget: int) -> list[Method]:
    """Methods of shapiq; a coalition takes a forward pass, which is half a gradient call."""
    return [Method(index, shapley(index, 2 * budget), False) for index in ("k-SII", "FSII")]


def partial_dependence(model: Callable[[Tensor], Tensor], x: Tensor, features: Sequence[int]) -> Tensor:
    """Centred partial dependence of these features at the rows, averaged over the same rows, (n,)."""
    rows = x.expand(len(x), -1, -1).clone()  # (n points, n rows of the background, 10)
    for feature in features:
        rows[:, :, feature] = x[:, None, feature]
    with torch.no_grad():
        values = model(rows.flatten(0, 1)).double().reshape(len(x), len(x)).mean(1)
    return values - values.mean()


def friedman(model: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Friedman and Popescu's H² of all pairs, (45,), and its numerator."""
    single = [partial_dependence(model, x, (i,)) for i in range(FEATURES)]
    top, bottom = [], []
    for i, j in combinations(range(FEATURES), 2):
        both = partial_dependence(model, x, (i, j))
        top.append((both - single[i] - single[j]).square().sum())
        bottom.append(both.square().sum())
    numerator = torch.stack(top)
    return numerator / torch.stack(bottom), numerator


# --- choosing ---------------------------------------------------------------------------------------------------------


def calls_within(model: Counted, x: Tensor, budget: int, control: str | None) -> int | None:
    """The largest number of calls that takes at most `budget` passes; None if a complete block takes more."""
    for calls in range(budget - budget % 4, BLOCK - 1, -4):
        if float(smooth(model, x, REACH, n_calls=calls, control=control).n_passes.double().mean()) <= budget:
            return calls
    return None


def choose(fitted: Fitted, x: Tensor, architecture: str, scoring: Scoring) -> dict[str, Any]:
    """σ and the control variate for each budget, β and the step with the smallest P_MSE."""
    model = Counted(fitted.net)
    candidates: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for budget in scoring.budgets:
        for control in (None, "auto") if architecture in SOFTENED else (None,):
            calls = calls_within(model, x[:4], budget, control)
            candidates.setdefault(("smooth", str(budget)), []).extend(
                {"sigma": s, "n_calls": calls, "control": control} for s in scoring.sigmas if calls
            )
    if architecture in SOFTENED:
        candidates["beta", ""] = candidates["swish", ""] = [{"beta": b} for b in scoring.betas]
    candidates["step", ""] = [{"step": s} for s in scoring.steps]
    makers: dict[str, Callable[..., Interactions | Exact]] = {
        "smooth": partial(smooth, model, x),
        "beta": partial(baselines.softplus, model, x),
        "swish": partial(baselines.swish, model, x),
        "step": partial(finite_differences, model, x),
    }
    surrogates = {
        f"{kind} {budget} {number}": makers[kind](**options).taylor()
        for (kind, budget), listed in candidates.items()
        for number, options in enumerate(listed)
    }
    compared = compare(model, x, surrogates, RADIUS, n_samples=scoring.samples)
    errors = dict(zip(surrogates, compared.errors[:, 0].mean(1).tolist(), strict=True))
    chosen: dict[str, Any] = {"smooth": {}, "p_mse": {}}
    for (kind, budget), listed in candidates.items():
        costs = [errors[f"{kind} {budget} {number}"] for number in range(len(listed))]
        best = listed[costs.index(min(costs))]
        if kind == "smooth":
            chosen["smooth"][budget] = best
        else:
            chosen[kind] = next(iter(best.values()))
        chosen["p_mse"][f"{kind} {budget}".strip()] = min(costs)
    return chosen


# --- scoring ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What one process computes: the choice for a function, or the scores of a group of methods for one network."""

    architecture: str
    cell: Cell
    group: str  # "choice", "own" or "shapiq"
    budget: int | None = None  # passes per point; a choice is for all budgets

    @property
    def name(self) -> str:
        c = self.cell
        name = f"{self.group} {self.architecture} {c.function} {c.distribution} {c.seed}"
        return name if self.budget is None else f"{name} {self.budget}"

    @property
    def choice(self) -> Job:
        """The job whose result this one needs."""
        return Job(self.architecture, replace(self.cell, seed=0), "choice")


@dataclass(frozen=True)
class Setup:
    """Everything that a job needs beside its name."""

    folder: Path
    sizes: Sizes
    scoring: Scoring


@cache
def loaded(architecture: str, sizes: Sizes, folder: Path) -> Ensemble:
    return Ensemble.load(architecture, sizes, folder)


def judged(method: Method, fitted: Fitted, pool: Tensor, chosen: Any, total: float, points: int) -> dict[str, Any]:
    """AUC of a method over as many points as it can explain with `total` passes."""
    model, baseline = Counted(fitted.net), fitted.standard(fitted.baseline)
    truth = truth_table(fitted.known.pairs)
    _, passes = method.explain(model, pool[-PRICED:], baseline, chosen)

    def explained(passes: float) -> tuple[Tensor, float, int, float]:
        number = max(1, min(len(pool) - PRICED, int(total / passes + 1e-9)))
        begin = time.process_time()
        table, passes = method.explain(model, pool[:number], baseline, chosen)
        return table, passes, number, time.process_time() - begin

    table, passes, number, seconds = explained(passes)
    for _ in range(2):  # the control variate makes some points more expensive than others
        if not 0.98 * total < passes * number <= 1.01 * total:
            table, passes, number, seconds = explained(passes)
    scores = table.double()[:, I, J].abs()
    return {
        "auc": float(auc(scores.mean(0), truth)),
        SAME: float(auc(scores[:points].mean(0), truth)),
        "points": number,
        "passes": passes * number,
        "seconds": seconds,
    }


def judged_globally(fitted: Fitted, pool: Tensor, chosen: Any, budget: int, total: float) -> dict[str, Any]:
    """AUC of methods without scores at points: `global_interactions` and Friedman's H."""
    model, truth, found = Counted(fitted.net), truth_table(fitted.known.pairs), {}
    begin = time.process_time()
    options = {"sigma": options_of(chosen, budget)["sigma"], "n_calls": RECORD_CALLS, "control": None}
    explainer = SmoothHess(model)
    price = global_interactions(explainer, pool[-PRICED:], **options).n_passes / PRICED
    records = max(2, min(len(pool) - PRICED, int(total / price)))
    summary = global_interactions(explainer, pool[:records], **options)
    seconds = time.process_time() - begin
    for name, matrix in (("SmoothHess, global E[H²]", summary.mean_square.value), (GLOBAL, summary.mean_abs.value)):
        found[name] = {
            "auc": float(auc(matrix.double()[I, J], truth)),
            "points": records,
            "passes": float(summary.n_passes),
            "seconds": seconds,
        }
    begin = time.process_time()
    pairs = FEATURES * (FEATURES - 1) // 2
    rows = max(2, int(math.sqrt(2 * total / (FEATURES + pairs))))
    ratio, numerator = friedman(model, pool[:rows])
    seconds = time.process_time() - begin
    for name, scores in (("Friedman's H", ratio), ("Friedman's H, not normalised", numerator)):
        cost = {"points": rows, "passes": (FEATURES + pairs) * rows**2 / 2, "seconds": seconds}
        found[name] = {"auc": float(auc(scores, truth)), **cost}
    return found


def score(job: Job, setup: Setup, chosen: dict[str, Any] | None) -> dict[str, Any]:
    """The result of one job."""
    torch.set_num_threads(1)
    scoring = setup.scoring
    fitted = loaded(job.architecture, setup.sizes, setup.folder).fitted(job.cell)
    if job.group == "choice":
        return choose(
            fitted,
            fitted.standard(job.cell.rows(setup.sizes.rows, TRAINING)[: scoring.choosing]),
            job.architecture,
            scoring,
        )
    if chosen is None or job.budget is None:
        raise ValueError(f"{job.name} needs a budget and a choice")
    total = float(job.budget * scoring.points)
    pool = fitted.standard(job.cell.rows(PRICED + int(total / CHEAPEST), REPORTED))
    listed = shapley_methods(job.budget) if job.group == "shapiq" else methods(job.architecture, job.budget)
    found = {m.name: judged(m, fitted, pool, chosen, total, scoring.points) for m in listed}
    if job.group == "own":
        found |= judged_globally(fitted, pool, chosen, job.budget, total)
    return found


# --- keeping results --------------------------------------------------------------------------------------------------


def keys(setup: Setup) -> dict[str, str]:
    """The key of each architecture's results: sizes, and a hash of the networks."""
    found = {}
    for architecture in ARCHITECTURES:
        path = setup.folder / f"{architecture}.safetensors"
        if path.is_file():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
            found[architecture] = json.dumps({"version": 1, "scoring": asdict(setup.scoring), "networks": digest})
    return found


@dataclass(frozen=True)
class Store:
    """Results, one line of JSON each; a line that was cut off is ignored."""

    path: Path
    keys: Mapping[str, str]

    def read(self) -> dict[str, Any]:
        """Results by name of the job."""
        found = {}
        for line in self.path.read_text().splitlines() if self.path.is_file() else []:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if row["key"] == self.keys.get(row["name"].split()[1]):
                found[row["name"]] = row["found"]
        return found

    def append(self, job: Job, found: dict[str, Any]) -> None:
        line = json.dumps({"key": self.keys[job.architecture], "name": job.name, "found": found})
        with self.path.open("a") as file:
            file.write(f"\n{line}\n")  # the first end of line closes a line that was cut off
            file.flush()


def choices(setup: Setup, architectures: Sequence[str]) -> Iterator[Job]:
    """What is chosen by the first network of each function."""
    for architecture in architectures:
        for cell in cells(setup.sizes):
            if cell.seed == 0:
                yield Job(architecture, cell, "choice")


def jobs(setup: Setup, architectures: Sequence[str], groups: Sequence[str], budgets: Sequence[int]) -> Iterator[Job]:
    """The scores of all other networks, so that a run that is stopped has whole budgets and whole sets of networks."""
    for budget in budgets:
        for seed in range(1, setup.sizes.seeds):
            for group in groups:
                for architecture in architectures:
                    for cell in cells(setup.sizes):
                        if cell.seed == seed:
                            yield Job(architecture, cell, group, budget)


def run_jobs(wanted: Sequence[Job], setup: Setup, store: Store, processes: int) -> bool:
    """Compute and keep the results that are missing; whether all jobs succeeded."""
    kept = store.read()
    missing = [job for job in wanted if job.name not in kept]
    chosen = {job.name: kept.get(job.choice.name) for job in missing}
    begin, failed = time.perf_counter(), 0

    def done(number: int, job: Job, find: Callable[[], dict[str, Any]]) -> int:
        try:
            store.append(job, find())
        except Exception as error:  # other jobs go on
            print(f"{job.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            return 1
        if number % 20 == 0 or number == len(missing):
            seconds = time.perf_counter() - begin
            print(f"{job.group}: {number} of {len(missing)}, {seconds:.0f} s", file=sys.stderr, flush=True)
        return 0

    if processes == 1:
        for number, job in enumerate(missing, 1):
            failed += done(number, job, partial(score, job, setup, chosen[job.name]))
        return not failed
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        futures = {pool.submit(score, job, setup, chosen[job.name]): job for job in missing}
        try:
            for number, future in enumerate(as_completed(futures), 1):
                failed += done(number, futures[future], future.result)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return not failed


def score_all(
    setup: Setup,
    processes: int,
    groups: Sequence[str],
    architectures: Sequence[str] | None = None,
    budgets: Sequence[int] | None = None,
) -> bool:
    """Choose, then score, for all architectures and budgets by default; kept results are not computed again."""
    found = keys(setup)
    if not found:
        raise FileNotFoundError(f"no networks in {setup.folder}: run `train` first")
    store = Store(setup.folder / "scores.jsonl", found)
    groups = list(groups)
    if "shapiq" in groups and importlib.util.find_spec("shapiq") is None:
        print("shapiq is not installed (pip install smoothhess[bench]): k-SII and FSII are left out.", file=sys.stderr)
        groups.remove("shapiq")
    if "shapiq" in groups:
        load_shapiq()  # before other processes compile parts of it at the same time
    architectures = [a for a in found if a in (architectures or found)]
    budgets = [b for b in setup.scoring.budgets if b in (budgets or setup.scoring.budgets)]
    good = run_jobs(list(choices(setup, architectures)), setup, store, processes)
    return run_jobs(list(jobs(setup, architectures, groups, budgets)), setup, store, processes) and good


# --- page -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Number:
    """A mean with its standard error over networks, and the degrees of freedom of the latter."""

    value: float
    stderr: float
    degrees: float

    @staticmethod
    def of(values: Sequence[float]) -> Number:
        return Number(*average(values), len(values) - 1)

    @staticmethod
    def over_functions(numbers: Sequence[Number]) -> Number:
        """The mean of several functions, whose networks are independent; degrees of freedom by Satterthwaite."""
        n, squares = len(numbers), [a.stderr**2 for a in numbers]
        spread = sum(s**2 / a.degrees for s, a in zip(squares, numbers, strict=True))
        degrees = sum(squares) ** 2 / spread if spread else math.inf
        return Number(sum(a.value for a in numbers) / n, math.sqrt(sum(squares)) / n, degrees)

    def differs(self) -> bool:
        """Whether the 95 % interval excludes zero."""
        return abs(self.value) > float(quantile(0.95, torch.tensor(self.degrees).double())) * self.stderr

    def text(self, digits: int = 2, sign: str = "") -> str:
        shown = f"{self.stderr:.{digits}f}"
        return f"{self.value:{sign}.{digits}f} ± {shown.removeprefix('0')}"


@dataclass(frozen=True)
class Table:
    """Scores of one architecture, distribution and budget: methods × functions × networks."""

    networks: int  # of each function
    scores: dict[str, dict[str, list[float]]]
    costs: dict[str, dict[str, float]]  # means over networks
    same: dict[str, float]  # mean AUC at the same points

    @staticmethod
    def of(results: Mapping[str, Any], architecture: str, distribution: str, budget: int, sizes: Sizes) -> Table:
        """The scores of those networks for which all functions are scored, by the methods that scored all of them."""

        def found(group: str, function: str, seed: int) -> Mapping[str, Any]:
            return results.get(Job(architecture, Cell(function, distribution, seed), group, budget).name, {})

        seeds = [s for s in range(1, sizes.seeds) if all(found("own", f, s) for f in sizes.functions)]
        rows = {
            (function, seed): {**found("own", function, seed), **found("shapiq", function, seed)}
            for function in sizes.functions
            for seed in seeds
        }
        common = [m for m in next(iter(rows.values()), {}) if all(m in row for row in rows.values())]
        listed = {m: [row[m] for row in rows.values()] for m in common}
        return Table(
            len(seeds),
            {m: {f: [rows[f, seed][m]["auc"] for seed in seeds] for f in sizes.functions} for m in common},
            {
                m: {name: sum(row[name] for row in mine) / len(mine) for name in ("points", "passes", "seconds")}
                for m, mine in listed.items()
            },
            {m: sum(row.get(SAME, math.nan) for row in mine) / len(mine) for m, mine in listed.items()},
        )

    def means(self, method: str) -> list[Number]:
        return [Number.of(values) for values in self.scores[method].values()]

    def differences(self, method: str, reference: str = REFERENCE) -> list[Number]:
        """The reference minus the method, paired by network."""
        pairs = zip(self.scores[reference].values(), self.scores[method].values(), strict=True)
        return [Number.of([a - b for a, b in zip(mine, theirs, strict=True)]) for mine, theirs in pairs]

    def markdown(self) -> list[str]:
        """AUC of all methods; the best of each function, to two digits, is bold."""
        functions = list(self.scores[REFERENCE])
        columns = {method: self.means(method) for method in self.scores}
        best = [max(round(c[i].value, 2) for c in columns.values()) for i in range(len(functions))]
        rows = []
        for method, numbers in columns.items():
            texts = [
                f"**{n.text()}**" if round(n.value, 2) >= b else n.text() for n, b in zip(numbers, best, strict=True)
            ]
            rows.append([method, *texts, Number.over_functions(numbers).text(3)])
        return markdown(["", *functions, "mean"], rows)

    def paired(self) -> list[str]:
        """The reference minus each other method, and the functions on which the 95 % interval excludes zero."""
        functions = list(self.scores[REFERENCE])
        rows = []
        for method in self.scores:
            if method == REFERENCE:
                continue
            numbers = self.differences(method)
            clear = [n.differs() for n in numbers]
            better = [f for f, n, c in zip(functions, numbers, clear, strict=True) if c and n.value > 0]
            worse = [f for f, n, c in zip(functions, numbers, clear, strict=True) if c and n.value < 0]
            texts = [n.text(2, "+") for n in numbers]
            total = Number.over_functions(numbers).text(3, "+")
            rows.append([method, *texts, total, ", ".join(better) or "–", ", ".join(worse) or "–"])
        return markdown([f"{REFERENCE} minus it", *functions, "mean", "better on", "worse on"], rows)


NAMES = {"relu": "ReLU MLP", "gelu": "GELU MLP", "transformer": "transformer"}


def cost_rows(tables: Mapping[tuple[str, str, int], Table], architecture: str, budget: int) -> list[str]:
    """Points and passes of each method, of networks with both distributions."""
    listed = [t for (a, _, b), t in tables.items() if (a, b) == (architecture, budget)]
    rows = []
    for method in [m for m in listed[0].costs if all(m in t.costs for t in listed)]:
        mean = {
            name: sum(t.costs[method][name] for t in listed) / len(listed) for name in ("points", "passes", "seconds")
        }
        rows.append([method, f"{mean['points']:.0f}", f"{mean['passes']:.0f}", f"{mean['seconds']:.2f}"])
    return markdown([NAMES[architecture], "points", "passes", "seconds"], rows)


def titles(tables: Mapping[tuple[str, str, int], Table]) -> list[str]:
    return ["", *(f"{NAMES[a]}, {d} ({t.networks})" for (a, d, _), t in tables.items())]


def at(tables: Mapping[tuple[str, str, int], Table], budget: int) -> dict[tuple[str, str, int], Table]:
    return {key: table for key, table in tables.items() if key[2] == budget}


def summary_rows(tables: Mapping[tuple[str, str, int], Table], budget: int) -> list[str]:
    """Mean over functions of all methods, for all architectures and distributions."""
    chosen = at(tables, budget)
    rows = []
    for method in dict.fromkeys(method for table in chosen.values() for method in table.scores):
        numbers = [Number.over_functions(t.means(method)) if method in t.scores else None for t in chosen.values()]
        rows.append([method, *("–" if n is None else n.text(3) for n in numbers)])
    return markdown(titles(chosen), rows)


def difference_rows(tables: Mapping[tuple[str, str, int], Table], budget: int, reference: str) -> list[str]:
    """Mean over functions of the reference minus each method; bold where the 95 % interval excludes zero."""
    chosen = at(tables, budget)
    rows = []
    for method in dict.fromkeys(method for table in chosen.values() for method in table.scores):
        texts = []
        for table in chosen.values():
            if method not in table.scores:
                texts.append("–")
                continue
            number = Number.over_functions(table.differences(method, reference))
            shown = number.text(3, "+")
            texts.append(f"**{shown}**" if number.differs() else shown)
        if method != reference:
            rows.append([method, *texts])
    return markdown([f"{reference} minus it", *titles(chosen)[1:]], rows)


def same_rows(tables: Mapping[tuple[str, str, int], Table], budget: int) -> list[str]:
    """Mean AUC over functions when the methods explain the same points, whatever that takes."""
    chosen = at(tables, budget)
    names = list(dict.fromkeys(m for t in chosen.values() for m in t.same if not math.isnan(t.same[m])))
    rows = [[m, *(f"{t.same[m]:.3f}" if m in t.same else "–" for t in chosen.values())] for m in names]
    return markdown(titles(chosen), rows)


def choice_rows(results: Mapping[str, Any], architecture: str, setup: Setup) -> list[str]:
    """R² of the networks that are reported, and what P_MSE chose on the first."""
    ensemble = loaded(architecture, setup.sizes, setup.folder)
    r2 = dict(zip(cells(setup.sizes), ensemble.r2, strict=True))
    rows = []
    for distribution in CORRELATIONS:
        for function in setup.sizes.functions:
            listed = [r2[Cell(function, distribution, seed)] for seed in range(1, setup.sizes.seeds)]
            choice = results[Job(architecture, Cell(function, distribution, 0), "choice").name]
            smooth_rows = [
                f"{c['sigma']:g}, {c['n_calls']}, {c['control'] or 'none'}" for c in choice["smooth"].values()
            ]
            others = [f"{choice[k]:g}" if k in choice else "–" for k in ("beta", "swish", "step")]
            fits = [f"{sum(listed) / len(listed):.4f}", f"{min(listed):.4f}"]
            rows.append([f"{function}, {distribution}", *fits, *smooth_rows, *others])
    budgets = [f"σ, calls, control at {b}" for b in setup.scoring.budgets]
    return markdown([NAMES[architecture], "mean R²", "smallest R²", *budgets, "β", "β of Swish", "step"], rows)


def page(setup: Setup) -> list[str]:
    """The tables of all results that are there."""
    found = keys(setup)
    results = Store(setup.folder / "scores.jsonl", found).read()
    sizes, scoring = setup.sizes, setup.scoring
    every = {(a, d, b): Table.of(results, a, d, b, sizes) for b in scoring.budgets for a in found for d in CORRELATIONS}
    tables = {key: table for key, table in every.items() if table.networks > 1}  # one network has no standard error
    budgets = [b for b in scoring.budgets if at(tables, b)]
    if not budgets:
        raise ValueError(f"no two networks of all functions are scored in {setup.folder}: run `score`")
    lines = []
    for budget in budgets:
        lines += [
            f"## Mean over functions, {budget} passes per point ({budget * scoring.points} in total)",
            "",
            "AUC; the number of networks for each function is in brackets:",
            "",
            *summary_rows(tables, budget),
            "",
            "SmoothHess minus each method, paired by network; bold where the 95 % interval (Student's t, degrees of "
            "freedom by Satterthwaite) excludes zero:",
            "",
            *difference_rows(tables, budget, REFERENCE),
            "",
            *difference_rows(tables, budget, GLOBAL),
            "",
            f"At the first {scoring.points} points, or as many as the budget allows; a method that takes fewer passes "
            "per point keeps the rest:",
            "",
            *same_rows(tables, budget),
            "",
        ]
    for (architecture, distribution, budget), table in tables.items():
        lines += [
            f"## {NAMES[architecture]}, {distribution} features, {budget} passes per point",
            "",
            *table.markdown(),
            "",
            *table.paired(),
            "",
        ]
    lines += ["## Cost: points, passes and seconds of one core for one network", ""]
    for architecture in found:
        for budget in budgets:
            if any((architecture, d, budget) in tables for d in CORRELATIONS):
                lines += [f"{budget} passes per point:", "", *cost_rows(tables, architecture, budget), ""]
    lines += ["## Networks, and what was chosen", ""]
    for architecture in found:
        lines += [*choice_rows(results, architecture, setup), ""]
    return lines[:-1]


def shapiq_version() -> str:
    found = importlib.util.find_spec("shapiq") is not None
    return f", shapiq {importlib.metadata.version('shapiq')}" if found else ""


def heading(setup: Setup, shown: str) -> list[str]:
    sizes, scoring = setup.sizes, setup.scoring
    trained = [
        f"{NAMES[a]} {(data := loaded(a, sizes, setup.folder).metadata)['seconds']} s on {data['device']}"
        for a in keys(setup)
    ]
    widths = "-".join(map(str, sizes.widths))
    shape = sizes.transformer
    return [
        "# Known interactions, several networks for each function",
        "",
        f"`{shown}`",
        "",
        f"{time.strftime('%Y-%m-%d')}. Training of {len(cells(sizes))} networks per architecture: "
        f"{', '.join(trained)}. "
        f"Scores: {platform.machine()}, 1 thread, Python {platform.python_version()}, torch {torch.__version__}"
        f"{shapiq_version()}",
        "",
        f"MLPs {widths}, {sizes.steps} steps of Adam; transformers of {shape.layers} layers, width {shape.width}, "
        f"{shape.heads} heads, {sizes.transformer_steps} steps; {sizes.rows} rows. Mean ± standard error over "
        f"networks of the global AUC of pairs; {scoring.points} points times the budget of passes. In tables of "
        "functions, the best of a column, to two digits, is bold.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["train", "score", "table", "all"])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="networks and scores")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="of train")
    parser.add_argument("--no-graph", action="store_true", help="train on a GPU without CUDA graphs")
    parser.add_argument("--processes", type=int, default=1, help="of score, one thread each")
    parser.add_argument("--groups", nargs="+", default=["own", "shapiq"], choices=["own", "shapiq"])
    parser.add_argument("--architectures", nargs="+", choices=list(ARCHITECTURES), help="of score, default all")
    parser.add_argument("--budgets", nargs="+", type=int, help="of score, passes per point, default all")
    parser.add_argument("--write", nargs="?", type=Path, const=PAGE, help="write the page, of table")
    parser.add_argument("--tiny", action="store_true", help="two functions and small networks, seconds")
    options = parser.parse_args()
    sizes, scoring = (TINY, SMALL) if options.tiny else (Sizes(), Scoring())
    setup = Setup(options.folder, sizes, scoring)
    setup.folder.mkdir(parents=True, exist_ok=True)
    if options.step in ("train", "all"):
        train_all(sizes, options.device, setup.folder, graph=not options.no_graph)
    if options.step in ("score", "all"):
        wanted = (options.groups, options.architectures, options.budgets)
        if not score_all(setup, options.processes, *wanted):
            raise SystemExit("some jobs failed, see above; run the same command again to repeat them")
    if options.step in ("table", "all"):
        shown = "python benchmarks/interactions_networks.py train --device cuda, score, table --write"
        publish([*heading(setup, shown), *remarks(options.write), *page(setup)], options.write)


if __name__ == "__main__":
    main()
