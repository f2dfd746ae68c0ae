"""Intervals of the calibration benchmark: coverage in a few cases with exact truths, and the band of its page."""

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

SEEDS = 120
LEAST_COVERAGE = 0.9  # 2.5 standard errors below .95 for one interval in each run; the seeds are fixed
CASES = (
    "budget: orthogonal, 1 blocks, control None",
    "budget: orthogonal, 4 blocks, control None",
    "budget: antithetic, 16 blocks, control None",
    "ill-conditioned: 1e+02, 16 blocks",
    "rare: 3.5 τ, control None, 400 calls",
    "output: loss of an affine map, 4 blocks",
    "forms: groups of 4, 4 blocks",
)


@pytest.fixture(scope="module")
def bench():
    """The scripts, imported as they import each other."""
    folder = str(Path(__file__).resolve().parents[2] / "benchmarks")
    sys.path.append(folder)
    try:
        yield SimpleNamespace(**{name: import_module(name) for name in ("calibration", "calibration_page")})
    finally:
        sys.path.remove(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_intervals_without_a_warning_cover_the_truth(bench, name):
    case = bench.calibration.all_cases()[name]
    seeds, _ = bench.calibration.run_chunk(name, range(SEEDS))
    found = bench.calibration.judge(case, seeds)["quantities"]
    coverage = {q: v["coverage"] for q, v in found.items() if "coverage" in v and q != "top pairs"}
    assert coverage
    assert all(v["judged"] >= SEEDS // 2 for q, v in found.items() if q in coverage)
    assert {q: c for q, c in coverage.items() if c < LEAST_COVERAGE} == {}
    for discoveries in (v for v in found.values() if "rate" in v):
        assert discoveries["verdict"] == "pass"


def stratum(bench, coverage, error, judged=200):
    found = {"coverage": coverage, "coverage_error": error, "judged": judged, "exact": False}
    return bench.calibration_page.Stratum("family: case", "diagonal", 200, found)


def test_a_stratum_counts_as_the_intervals_that_its_standard_error_shows(bench):
    one_each = (0.9 * 0.1 / 200) ** 0.5
    assert stratum(bench, 0.9, one_each).effective == 200
    assert stratum(bench, 0.9, one_each / 2).effective == 800
    assert stratum(bench, 0.9, 2 * one_each).effective == 200  # not fewer than seeds
    assert stratum(bench, 1.0, 0.0).effective == bench.calibration_page.MOST_INTERVALS


def test_the_band_depends_on_the_number_of_intervals(bench):
    few, many = stratum(bench, 0.93, 0.018), stratum(bench, 0.93, 0.004)
    assert few.p_value > 0.05 > 1e-4 > many.p_value
    assert few.below_by_chance(0.92) > 0.01 > many.below_by_chance(0.92)
    assert stratum(bench, 1.0, 0.0).p_value == pytest.approx(1)
