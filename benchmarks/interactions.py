"""Which method finds the pairs that are known to interact? ReLU networks trained on functions of known structure.

    OMP_NUM_THREADS=1 python benchmarks/interactions.py --quick
    OMP_NUM_THREADS=1 python benchmarks/interactions.py --write

Networks are trained on F1 to F10, Four Quadrant blocks and an additive function (known.py), and explained at test
points by SmoothHess and others (detectors.py). Features and outputs have unit standard deviation. What a method leaves
open (σ, β, a step) is chosen by P_MSE at training points: nothing is tuned on the points that are reported, or on the
true pairs. Results are kept for each function in build/interactions; a run that was stopped goes on where it was, and
--fresh begins again. k-SII and STII need shapiq (pip install smoothhess[bench]).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from detectors import Counted, Fitted, I, J, Method, drawn, finite_differences, fit, methods, smooth
from known import ADDITIVE, FEATURES, FUNCTIONS, QUADRANTS, shapley_interactions, truth_table
from torch import Tensor

from smoothhess import Exact, Interactions, SmoothHess, baselines
from smoothhess.evaluate import compare, global_interactions
from smoothhess.evaluate.rank_correlation import spearman

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks" / "interactions.md"
KEPT = ROOT / "build" / "interactions"
REACH = 0.5  # standard deviations of each feature: the neighbourhood that is asked about, and that of the local truth
SIGMAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7)
BETAS = (1.0, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 50.0)
SUMMARIES, RECORDS = 40, 50  # global summaries that look for false discoveries, and the size of each
STEPS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.4)


@dataclass(frozen=True)
class Settings:
    """Sizes of a run; results that were kept with others are not used."""

    functions: tuple[str, ...] = tuple(FUNCTIONS)
    widths: tuple[int, ...] = (140, 100, 60, 20)  # of the NID paper's networks
    steps: int = 10_000  # of Adam, 256 rows each
    rows: int = 20_000  # to train on
    points: int = 100  # that are explained and reported
    choosing: int = 20  # training points by which σ, β and the step are chosen
    records: int = 500  # of the global summary
    samples: int = 1_000  # perturbations of P_MSE


QUICK = Settings(
    functions=("F5", "quadrants", "additive"),
    widths=(64, 48, 24),
    steps=2_500,
    rows=10_000,
    points=20,
    choosing=8,
    records=100,
    samples=400,
)


# --- judging ----------------------------------------------------------------------------------------------------------


def auc(scores: Tensor, truth: Tensor) -> Tensor:
    """Chance that a pair which interacts scores higher than one which does not; (…, pairs) → (…)."""
    yes, no = scores[..., truth], scores[..., ~truth]
    above = yes[..., :, None] - no[..., None, :]
    return ((above > 0).double() + (above == 0).double() / 2).mean((-1, -2))


def average(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error of what is not NaN."""
    known = torch.tensor([v for v in values if not math.isnan(v)], dtype=torch.float64)
    if len(known) < 2:
        return math.nan, math.nan
    return float(known.mean()), float(known.std() / math.sqrt(len(known)))


@dataclass(frozen=True, eq=False)
class Truths:
    """What is known of the function at the reported points, in units of standard deviations."""

    pairs: Tensor  # (45,)
    curvature: Tensor  # (P, 45) second derivative, averaged over ± REACH
    game: Tensor  # (P, 45) Shapley interaction index against the baseline
    move: Tensor  # (P, 45) what a second derivative is multiplied by to be compared with the game

    @staticmethod
    def of(fitted: Fitted, x: Tensor) -> Truths:
        known, scale = fitted.known, fitted.known.moves[:, None] * fitted.known.moves / fitted.spread
        apart = (x - fitted.baseline) / known.moves
        return Truths(
            truth_table(known.pairs),
            (known.mixed_differences(x, REACH) * scale)[:, I, J],
            (shapley_interactions(known, x, fitted.baseline) / fitted.spread)[:, I, J],
            apart[:, I] * apart[:, J],
        )


def judge(method: Method, table: Tensor, truths: Truths) -> dict[str, Any]:
    """How well the scores (P, 10, 10) agree with what is known: one number, or one for each point or pair."""
    scores = table.double()[:, I, J]
    found: dict[str, Any] = {"strength": float(scores.abs().mean())}
    if not truths.pairs.any():
        return found
    found["global auc"] = float(auc(scores.abs().mean(0), truths.pairs))
    found["point auc"] = auc(scores.abs(), truths.pairs).tolist()
    if method.signed:
        moved = scores * truths.move if method.derivative else scores
        real = truths.pairs  # AUC judges the others, whose truth is a tie at zero
        found["curvature"] = spearman(scores[:, real], truths.curvature[:, real]).tolist()
        found["tracking"] = spearman(scores[:, real].mT, truths.curvature[:, real].mT).tolist()
        found["game"] = spearman(moved[:, real], truths.game[:, real]).tolist()
    return found


def explained(method: Method, fitted: Fitted, x: Tensor, chosen: dict[str, float]) -> tuple[Tensor, dict[str, float]]:
    """Scores at points, with what they cost each."""
    model = Counted(fitted.net)
    points, baseline = fitted.standard(x), fitted.standard(fitted.baseline)
    begin = time.process_time()
    table, passes = method.explain(model, points, baseline, chosen)
    seconds = time.process_time() - begin
    cost = {
        "ms": 1e3 * seconds / len(x),
        "passes": passes,
        "forwards": model.forwards / len(x),
        "backwards": model.backwards / len(x),
    }
    return table, cost


@dataclass
class Choice:
    """P_MSE, and for the page the AUC, of every candidate at training points."""

    chosen: dict[str, float] = field(default_factory=dict)
    table: dict[str, dict[str, list[float]]] = field(default_factory=dict)


def choose(fitted: Fitted, settings: Settings) -> Choice:
    """σ, β and the step with the smallest P_MSE over the neighbourhood, at training points."""
    x = drawn(fitted.known, settings.rows, 1)[: settings.choosing]
    model, points, truth = Counted(fitted.net), fitted.standard(x), truth_table(fitted.known.pairs)
    makers: dict[str, tuple[Sequence[float], Callable[[float], Interactions | Exact]]] = {
        "sigma": (SIGMAS, lambda v: smooth(model, points, v)),
        "beta": (BETAS, lambda v: baselines.softplus(model, points, beta=v)),
        "step": (STEPS, lambda v: finite_differences(model, points, v)),
    }
    choice = Choice()
    for name, (candidates, make) in makers.items():
        results = {f"{v:g}": make(v) for v in candidates}
        surrogates = {key: result.taylor() for key, result in results.items()}
        radius = REACH * math.sqrt(FEATURES)
        errors = compare(model, points, surrogates, radius, n_samples=settings.samples).errors[:, 0].mean(1)
        scores = [auc(r.hessian[:, I, J].abs().mean(0), truth) for r in results.values()]
        choice.table[name] = {
            key: [float(error), float(score)] for key, error, score in zip(results, errors, scores, strict=True)
        }
        choice.chosen[name] = candidates[int(errors.argmin())]
    return choice


def summarised(fitted: Fitted, settings: Settings, sigma: float) -> dict[str, Any]:
    """AUC of E[H²] and mean |H| over records of their own, and what they cost."""
    x = fitted.standard(drawn(fitted.known, settings.records, 5))
    model = Counted(fitted.net)
    begin = time.process_time()
    found = global_interactions(SmoothHess(model), x, sigma=sigma)
    seconds = time.process_time() - begin
    truth = truth_table(fitted.known.pairs)
    return {
        "square": float(auc(found.mean_square.value[I, J], truth)),
        "abs": float(auc(found.mean_abs.value[I, J], truth)),
        "noise": float(found.noise_share[I, J].median()),
        "ms": 1e3 * seconds / len(x),
        "passes": found.n_passes / len(x),
    }


def run(name: str, settings: Settings) -> dict[str, Any]:
    """Everything about one function."""
    known = FUNCTIONS[name]
    fitted = fit(known, settings.widths, settings.steps, settings.rows, KEPT)
    begin = time.process_time()
    choice = choose(fitted, settings)
    x = drawn(known, settings.points, 4)
    truths = Truths.of(fitted, x)
    found: dict[str, Any] = {"r2": fitted.r2, "chosen": choice.chosen, "candidates": choice.table, "methods": {}}
    for method in methods():
        table, cost = explained(method, fitted, x, choice.chosen)
        found["methods"][method.name] = judge(method, table, truths) | {"cost": cost}
        print(f"  {name}: {method.name}, {cost['ms']:.1f} ms a point", file=sys.stderr, flush=True)
    found["global"] = summarised(fitted, settings, choice.chosen["sigma"])
    found["seconds"] = fitted.seconds + time.process_time() - begin
    return found


def false_discoveries(settings: Settings, q: float = 0.05) -> dict[str, Any]:
    """Pairs called significant in a network whose cross pairs are exactly null: per point, and over records."""
    fitted = fit(QUADRANTS, settings.widths, settings.steps, settings.rows, KEPT, blocks=True)
    begin = time.process_time()
    model, sigma = Counted(fitted.net), REACH
    x = fitted.standard(drawn(QUADRANTS, settings.points, 4))
    counts: dict[str, Any] = {"r2": fitted.r2, "points": len(x), "q": q}

    def count(called: Sequence[Any]) -> list[int]:
        false = sum((p.i, p.j) not in QUADRANTS.pairs for p in called)
        return [len(called), false]

    for calls in (64, 256, 1024):
        pairs = smooth(model, x, sigma, n_calls=calls).top_pairs(len(I), q=q)
        counts[f"{calls} calls"] = count([p for listed in pairs for p in listed if p.significant])
    records = fitted.standard(drawn(QUADRANTS, SUMMARIES * RECORDS, 5))
    for seed, part in enumerate(records.split(RECORDS)):
        found = global_interactions(SmoothHess(model), part, sigma=sigma, seed=seed)
        for by in ("square", "abs", "mean"):
            called = count([p for p in found.top_pairs(len(I), by=by, q=q) if p.significant])
            counts[f"global {by}"] = [a + b for a, b in zip(counts.get(f"global {by}", [0, 0]), called, strict=True)]
    counts["seconds"] = fitted.seconds + time.process_time() - begin
    return counts


# --- keeping and showing ----------------------------------------------------------------------------------------------


def kept(name: str, settings: Settings, make: Callable[[], dict[str, Any]], fresh: bool) -> dict[str, Any]:
    """What `make` found, from disk where it was found before with the same settings."""
    sizes = {k: v for k, v in asdict(settings).items() if k != "functions"}
    key = json.loads(json.dumps({"version": 4, "settings": sizes, "methods": [m.name for m in methods()]}))
    path = KEPT / f"{name}-{settings.points}.json"
    if path.is_file() and not fresh:
        stored = json.loads(path.read_text())
        if stored["key"] == key:
            return stored["found"]
    found = make()
    KEPT.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"key": key, "found": found}, indent=1))
    part.replace(path)
    return found


KNOBS = {"sigma": "σ", "beta": "β", "step": "step"}  # what SmoothHess, SoftPlus and differences leave open


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def cell(value: Any, best: bool = False, digits: int = 3) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    text = f"{value:.{digits}f}"
    return f"**{text}**" if best else text


def metric_table(results: dict[str, dict[str, Any]], metric: str) -> list[str]:
    """Methods by functions; the best of each function, to two digits, stands out."""
    names = [n for n in results if FUNCTIONS[n].pairs]
    columns = {
        method: [results[n]["methods"][method].get(metric) for n in names] for method in results[names[0]]["methods"]
    }
    numbers = {m: [average(v)[0] if isinstance(v, list) else v for v in column] for m, column in columns.items()}
    errors = [average(v)[1] for column in columns.values() for v in column if isinstance(v, list)]
    best = [max((c[i] for c in numbers.values() if c[i] is not None), default=None) for i in range(len(names))]
    rows = []
    for method, column in numbers.items():
        if all(v is None for v in column):
            continue
        known = [v for v in column if v is not None]
        cells = [cell(v, b is not None and round(v, 2) >= round(b, 2), 2) for v, b in zip(column, best, strict=True)]
        rows.append([method, *cells, f"{sum(known) / len(known):.3f}"])
    top = max(float(r[-1]) for r in rows)
    rows = [[*r[:-1], f"**{r[-1]}**" if float(r[-1]) >= top - 5e-4 else r[-1]] for r in rows]
    table = markdown(["", *names, "mean"], rows)
    return [*table, "", f"Standard errors are at most {max(errors):.2f}."] if errors else table


def paired_table(results: dict[str, dict[str, Any]], metric: str, reference: str = "SmoothHess") -> list[str]:
    """One method against each other, point by point: on how many functions it is better, worse, or neither."""
    names = [n for n in results if FUNCTIONS[n].pairs]
    rows = []
    for method in results[names[0]]["methods"]:
        if method == reference or metric not in results[names[0]]["methods"][method]:
            continue
        means, scores = [], []
        for n in names:
            mine, theirs = (results[n]["methods"][m][metric] for m in (reference, method))
            mean, error = average([a - b for a, b in zip(mine, theirs, strict=True)])
            means.append(mean)
            scores.append(mean / error if error else 0.0)
        better, worse = sum(z > 2 for z in scores), sum(z < -2 for z in scores)
        lost = [n for n, z in zip(names, scores, strict=True) if z < -2]
        counts = map(str, (better, worse, len(names) - better - worse))
        rows.append([method, f"{sum(means) / len(means):+.3f}", *counts, ", ".join(lost) or "–"])
    return markdown(["", f"{reference} minus it", "better", "worse", "neither", "worse on"], rows)


def cost_table(results: dict[str, dict[str, Any]]) -> list[str]:
    """Means over functions."""
    rows = []
    for method in next(iter(results.values()))["methods"]:
        costs = [r["methods"][method]["cost"] for r in results.values()]
        mean = {key: sum(c[key] for c in costs) / len(costs) for key in costs[0]}
        rows.append(
            [
                method,
                f"{mean['forwards']:.0f}",
                f"{mean['backwards']:.0f}",
                f"{mean['passes']:.0f}",
                f"{mean['ms']:.1f}",
            ]
        )
    return markdown(["", "forward rows", "backward rows", "passes", "ms"], rows)


def candidate_table(results: dict[str, dict[str, Any]]) -> list[str]:
    """How often each candidate was chosen, and the mean AUC at training points had it been taken everywhere."""
    rows = []
    names = [n for n in results if FUNCTIONS[n].pairs]
    for knob, label in KNOBS.items():
        for value in results[names[0]]["candidates"][knob]:
            scores = [results[n]["candidates"][knob][value][1] for n in names]
            times = sum(f"{results[n]['chosen'][knob]:g}" == value for n in names)
            rows.append([f"{label} = {value}", str(times), f"{sum(scores) / len(scores):.3f}"])
    return markdown(["", "chosen", "AUC if taken everywhere"], rows)


def page(results: dict[str, dict[str, Any]], nulls: dict[str, Any], settings: Settings) -> list[str]:
    names = [n for n in results if FUNCTIONS[n].pairs]
    smallest = {
        label: [min(c[0] for c in r["candidates"][knob].values()) for r in results.values()]
        for knob, label in KNOBS.items()
    }
    fits = markdown(
        ["", *results],
        [
            ["pairs of 45", *(str(len(FUNCTIONS[n].pairs)) for n in results)],
            ["R²", *(f"{r['r2']:.3f}" for r in results.values())],
            *([label, *(f"{r['chosen'][knob]:g}" for r in results.values())] for knob, label in KNOBS.items()),
            *([f"P_MSE with {label}", *(f"{e:.2g}" for e in errors)] for label, errors in smallest.items()),
        ],
    )
    summaries = {"E[H²]": "square", "mean abs H": "abs"}
    summary = markdown(
        ["", *names, "mean"],
        [
            [label, *(f"{v:.2f}" for v in values), f"{sum(values) / len(values):.3f}"]
            for label, values in ((k, [results[n]["global"][v] for n in names]) for k, v in summaries.items())
        ],
    )
    cost = [r["global"] for r in results.values()]
    passes, ms = (sum(c[key] for c in cost) / len(cost) for key in ("passes", "ms"))
    shares = sorted(c["noise"] for c in cost)
    discoveries = [
        [kind, str(nulls[kind][0]), str(nulls[kind][1]), f"{nulls[kind][1] / max(1, nulls[kind][0]):.3f}"]
        for kind in nulls
        if isinstance(nulls[kind], list)
    ]
    lines = [
        "## Networks",
        "",
        *fits,
        "",
        "## Global: AUC of the mean of absolute scores over the test points",
        "",
        *metric_table(results, "global auc"),
        "",
        f"`global_interactions` over {settings.records} other records, {passes:.0f} passes and {ms:.1f} ms of the "
        "processor a record; "
        f"{shares[0]:.0%} to {shares[-1]:.0%} of the mean squared estimates are noise (median pair):",
        "",
        *summary,
        "",
        "## Per point: mean AUC of absolute scores",
        "",
        *metric_table(results, "point auc"),
        "",
        "Paired over points, at two standard errors:",
        "",
        *paired_table(results, "point auc"),
        "",
        *paired_table(results, "point auc", "SmoothHess, 4096 calls"),
        "",
        "## Per point: rank correlation with the second derivative of the function, over the pairs that interact",
        "",
        *metric_table(results, "curvature"),
        "",
        "Paired over points, at two standard errors:",
        "",
        *paired_table(results, "curvature"),
        "",
        "## Per pair that interacts: rank correlation with the second derivative of the function, over points",
        "",
        *metric_table(results, "tracking"),
        "",
        "## Per point: rank correlation with the Shapley interactions of the function, over the pairs that interact",
        "",
        *metric_table(results, "game"),
        "",
        "## Cost of a point, in rows through the network and milliseconds of the processor",
        "",
        *cost_table(results),
        "",
        "## What was chosen, at training points",
        "",
        *candidate_table(results),
        "",
        "## Where nothing is to be found",
        "",
    ]
    if ADDITIVE.name in results:
        others = [results[n]["methods"] for n in names]
        rows = []
        for method, found in results[ADDITIVE.name]["methods"].items():
            typical = sum(o[method]["strength"] for o in others) / len(others)
            rows.append([method, f"{found['strength']:.3g}", f"{typical:.3g}", f"{found['strength'] / typical:.2f}"])
        lines += [
            "Mean absolute score of all pairs, of the network trained on the additive function and of the others:",
            "",
            *markdown(["", "additive", "others", "ratio"], rows),
            "",
        ]
    lines += [
        f"A sum of five networks of two features each, trained on the quadrants (R² {nulls['r2']:.3f}): 40 of 45 pairs "
        f"are exactly null. Pairs called significant at q = {nulls['q']}, at {nulls['points']} points and in "
        f"{SUMMARIES} global summaries of {RECORDS} records:",
        "",
        *markdown(["", "called", "false", "share"], discoveries),
    ]
    return lines


def heading(seconds: float, settings: Settings) -> list[str]:
    shown = " ".join(["python benchmarks/interactions.py", *sys.argv[1:]])
    threads = f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} " if "OMP_NUM_THREADS" in os.environ else ""
    packages = f"torch {torch.__version__.split('+')[0]}"
    if importlib.util.find_spec("shapiq"):
        from importlib.metadata import version

        packages += f", shapiq {version('shapiq')}"
    return [
        "# Known interactions",
        "",
        f"`{threads}{shown}`",
        "",
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {torch.get_num_threads()} thread(s), "
        f"Python {platform.python_version()}, {packages}, {seconds / 60:.1f} minutes of the processor",
        "",
        f"ReLU MLPs {'-'.join(map(str, settings.widths))}, {settings.steps} steps of Adam, {settings.points} test "
        f"points; neighbourhood ± {REACH:g} standard deviations. The best of a column, to two digits, is bold.",
        "",
    ]


BEGIN, END = "<!-- written by hand, kept by --write -->", "<!-- the rest is written by the script -->"


def remarks(path: Path | None) -> list[str]:
    """What was written by hand into a page that is there already."""
    old = path.read_text() if path and path.is_file() else ""
    kept = old.split(BEGIN, 1)[1].split(END, 1)[0].strip() if BEGIN in old and END in old else ""
    return [BEGIN, "", *([kept, ""] if kept else []), END, ""]


def publish(lines: Sequence[str], path: Path | None) -> None:
    """Print a page, and write it to the file."""
    text = "\n".join(lines).rstrip() + "\n"
    print(text)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three functions, small networks, a minute")
    parser.add_argument("--only", nargs="+", choices=list(FUNCTIONS), help="these functions only")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs kept (networks stay)")
    parser.add_argument("--write", nargs="?", type=Path, const=PAGE, help="write docs/benchmarks/interactions.md")
    options = parser.parse_args()
    settings = QUICK if options.quick else Settings()
    functions = tuple(options.only) if options.only else settings.functions
    results: dict[str, dict[str, Any]] = {}
    for name in functions:
        results[name] = kept(name, settings, lambda name=name: run(name, settings), options.fresh)
        print(f"{name}: {results[name]['seconds']:.0f} s", file=sys.stderr, flush=True)
    nulls = kept("nulls", settings, lambda: false_discoveries(settings), options.fresh)
    seconds = sum(r["seconds"] for r in (*results.values(), nulls))
    lines = [*heading(seconds, settings), *remarks(options.write), *page(results, nulls, settings)]
    publish(lines, options.write)


if __name__ == "__main__":
    main()
