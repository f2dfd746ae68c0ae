"""The page of the calibration benchmark: strata with low coverage first, then all other failures.

A stratum is one quantity of one case. `python benchmarks/calibration.py --table FILE … --write PAGE` calls `page`; text
between the markers is kept.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import binom

BEGIN, END = "<!-- written by hand, kept by --write -->", "<!-- the rest is written by the script -->"
NOMINAL, LOW, VERY_LOW = 0.95, 0.92, 0.88  # coverage
SIMULTANEOUS = 0.05  # probability that any of all strata with the nominal coverage is below its limit
LEAST_SEEDS = 10  # without a warning, for a stratum to count
MOST_INTERVALS = 10_000  # effective number, where all seeds cover the same intervals
CHOSEN = "top pairs"  # by the same draws, so that even the true standard errors give low coverage


class Stratum(NamedTuple):
    """One quantity of one case."""

    case: str
    quantity: str
    seeds: int
    found: dict[str, Any]

    @property
    def counts(self) -> bool:
        """Whether there are sampled intervals in enough runs without a warning."""
        return "coverage" in self.found and self.found["judged"] >= LEAST_SEEDS and not self.found["exact"]

    @property
    def effective(self) -> int:
        """Independent intervals with the same standard error of the coverage: at least one for each seed."""
        c, error = self.found["coverage"], self.found["coverage_error"]
        independent = c * (1 - c) / error**2 if error > 0 else math.inf
        return round(min(max(independent, self.found["judged"]), MOST_INTERVALS))

    @property
    def p_value(self) -> float:
        """Probability of a coverage as low as this one at the nominal coverage."""
        n = self.effective
        return float(binom.cdf(math.floor(n * self.found["coverage"] + 1e-9), n, NOMINAL))

    def below_by_chance(self, limit: float) -> float:
        """Probability of a coverage below the limit at the nominal coverage."""
        n = self.effective
        return float(binom.cdf(math.ceil(n * limit - 1e-9) - 1, n, NOMINAL))


def strata(lines: Sequence[dict[str, Any]]) -> Iterator[Stratum]:
    for line in lines:
        for name, found in line.get("quantities", {}).items():
            yield Stratum(line["case"], name, line["seeds"], found)


def too_narrow(found: dict[str, Any]) -> bool:
    """Whether a failure is one of coverage, or of a relative error that is reported too small."""
    if found["verdict"] != "FAIL":
        return False
    small = (re.match(r"reported/true ([\d.e+-]+)$", reason) for reason in found["reasons"])
    text = any(r.startswith("coverage") or " reported in " in r for r in found["reasons"])
    return text or any(m is not None and float(m.group(1)) < 1 for m in small)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (heads, *rows)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return [lines[0], "|" + "---|" * len(heads), *lines[1:], ""]


def _share(value: float | None, digits: int = 2) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _width(found: dict[str, Any]) -> str:
    return f"{found['width']:.2g}" if math.isfinite(found["width"]) else "–"


def _coverage_rows(every: Sequence[Stratum], limit: float) -> list[list[str]]:
    rows = []
    for s in sorted(every, key=lambda s: s.found["coverage"]):
        coverage = f"{_share(s.found['coverage'], 3)} ± {_share(s.found['coverage_error'], 3)}"
        band = "below" if s.p_value < limit else "within"
        unflagged = f"{s.found['judged']} of {s.seeds}"
        truth = "sampled" if "reference" in s.found else "exact"
        worst = _share(s.found.get("worst_seed"))
        rows.append([s.case, s.quantity, coverage, band, unflagged, worst, _width(s.found), truth])
    return rows


def silent(lines: Sequence[dict[str, Any]]) -> list[str]:
    """The summary, and the strata whose runs without a warning have low coverage."""
    every = [s for s in strata(lines) if s.counts]
    judged = [s for s in every if s.quantity != CHOSEN]
    limit = SIMULTANEOUS / len(judged)
    low = [s for s in judged if s.found["coverage"] < LOW]
    very_low = [s for s in low if s.found["coverage"] < VERY_LOW]
    below = [s for s in judged if s.p_value < limit]
    nearly = sum(s.found["coverage"] >= LOW for s in below)
    by_chance = [sum(s.below_by_chance(c) for s in judged) for c in (LOW, VERY_LOW)]
    flagged = 1 - np.mean([s.found["judged"] / s.seeds for s in strata(lines) if "judged" in s.found])
    warned = np.mean([max(s.found.get("warned", 0.0) for s in strata([line])) for line in lines])
    worst = np.array([w for s in judged if (w := s.found.get("worst_seed")) is not None])
    heads = ["case", "quantity", "coverage ± s.e.", "band", "seeds", "worst seed", "width / oracle", "truth"]
    return [
        f"{len(lines)} cases. {len(judged)} strata, each one quantity of one case, have sampled intervals and at least "
        f"{LEAST_SEEDS} runs without a warning. **{len(low)} of these strata have a coverage below {LOW:g}, and "
        f"{len(very_low) or 'none'} below {VERY_LOW:g}**; {by_chance[0]:.1f} and {by_chance[1]:.1f} would be expected "
        f"if all had {NOMINAL:g}. {len(below)} are below the simultaneous 95 % band, {nearly} of them "
        f"with a coverage of {LOW:g} or more: the card as a whole is {'not ' if below else ''}within the band.",
        "",
        f"The band: a stratum with coverage c and standard error s between seeds counts as c(1 − c)/s² independent "
        f"intervals (at least one for each seed), and is below the band if so few covered intervals have a binomial "
        f"probability, at coverage {NOMINAL:g}, of less than {SIMULTANEOUS:g}/{len(judged)} (Bonferroni).",
        "",
        f"Runs that warn of more than their budget, or report an unknown error, are left out: {flagged:.0%} of the "
        f"runs of a stratum on average ({warned:.0%} give a warning of any kind). The worst of the seeds covers "
        f"{np.median(worst):.0%} of its intervals in the median of the {len(worst)} strata for which it was recorded.",
        "",
        f"## Coverage below {VERY_LOW:g} without a warning",
        "",
        *(_table(heads, _coverage_rows(very_low, limit)) if very_low else ["None.", ""]),
        f"## Coverage from {VERY_LOW:g} to {LOW:g} without a warning",
        "",
        *_table(heads, _coverage_rows([s for s in low if s not in very_low], limit)),
    ]


def families(lines: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]) -> list[str]:
    """Failures by family, after those of the first estimator where its lines are given."""
    counts: dict[str, list[int]] = {}
    for column, part in ((0, before), (3, lines)):
        for s in strata(part):
            own = counts.setdefault(s.case.split(":")[0], [0] * 6)
            own[column] += 1
            own[column + 1] += s.found["verdict"] == "FAIL"
            own[column + 2] += too_narrow(s.found)
    total = [sum(own[i] for own in counts.values()) for i in range(6)]
    first = 0 if before else 3
    heads = ["strata in version 1", "fail", "too narrow", "strata now" if before else "strata", "fail", "too narrow"]
    heads = ["family", *heads[first:]]
    rows = [[name, *map(str, own[first:])] for name, own in [*counts.items(), ("**all**", total)]]
    return ["## By family", "", *_table(heads, rows)]


def other_failures(lines: Sequence[dict[str, Any]]) -> list[str]:
    """What fails for another reason than coverage, and reported pairs."""
    failed = [s for s in strata(lines) if s.found["verdict"] == "FAIL"]
    rows = []
    for s in failed:
        low = s.counts and s.quantity != CHOSEN and s.found["coverage"] < LOW
        if not low:
            rows.append([s.case, s.quantity, _share(s.found.get("coverage")), "; ".join(s.found["reasons"])])
    chosen = [s for s in strata(lines) if s.quantity == CHOSEN and s.counts and s.found["coverage"] < LOW]
    pairs = [
        [s.case, _share(s.found["coverage"]), _share(s.found["oracle_coverage"])]
        for s in sorted(chosen, key=lambda s: s.found["coverage"])
    ]
    return [
        "## Other failures",
        "",
        "Too wide (more than 1.5 times the oracle), too many warnings where coverage is good, relative errors that are "
        "reported as less than .67 of the true ones, false discoveries above their rate, and sums over groups with "
        "more than 1.2 times the error of the better estimate. Low coverage is that of reported pairs where an "
        f"oracle's is good, or of strata with fewer than {LEAST_SEEDS} runs without a warning.",
        "",
        *_table(["case", "quantity", "coverage", "why"], rows),
        "## Reported pairs",
        "",
        "The ten pairs with the largest estimates are chosen by the draws that measure them, with the default "
        '`selection="all"`. Cases with a coverage below .92, and the coverage of intervals with the true standard '
        "errors for the same pairs:",
        "",
        *_table(["case", "coverage", "of an oracle"], pairs),
    ]


def page(lines: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]], old: Path) -> str:
    """The whole page; the part written by hand is that of the old one."""
    text = old.read_text(encoding="utf-8") if old.is_file() else ""
    by_hand = text.split(BEGIN, 1)[1].split(END, 1)[0].strip() if BEGIN in text and END in text else ""
    parts = ["# Calibration: where the error bars are valid", "", *silent(lines), BEGIN, "", by_hand, "", END, ""]
    return "\n".join([*parts, *families(lines, before), *other_failures(lines)]).rstrip() + "\n"
