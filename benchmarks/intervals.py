"""Do 95 % intervals hold the truth: of all entries, of the 20 pairs largest in truth, of the 20 reported as largest?

    python benchmarks/intervals.py
    python benchmarks/intervals.py --data DIR --only mnist --inputs 3 --seeds 2

The truth is a long unbiased run (orthogonal design, control variate, no denoising); its own noise makes the coverage
look a little too small where ours is not much larger.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from pathlib import Path

import cases
import torch
from cases import Case
from efficiency import estimate
from torch import Tensor

from smoothhess.estimate import student_t

TOP = 20


def coverage(case: Case, truths: list[Tensor], calls: int, seeds: int, control: str | None) -> list[float]:
    """Shares covered: all entries, largest in truth, reported as largest."""
    d = case.d
    i, j = torch.triu_indices(d, d, 1)
    everywhere, largest, reported = [], [], []
    for index, truth in enumerate(truths):
        order = truth[i, j].abs().argsort(descending=True)[:TOP]
        for seed in range(seeds):
            result = estimate(case, index, calls, seed, control=control)
            reach = student_t.quantile(0.95, result.noise.df).to(truth) * result.stderr()[0].double()
            inside = ((result.unshrunk().hessian[0].double() - truth).abs() <= reach)[i, j].double()
            everywhere.append(float(inside.mean()))
            largest.append(float(inside[order].mean()))
            pairs = result.top_pairs(TOP)[0]
            reported.append(sum(p.low <= float(truth[p.i, p.j]) <= p.high for p in pairs) / len(pairs))
    return [sum(x) / len(x) for x in (everywhere, largest, reported)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("SMOOTHHESS_DATA"))
    parser.add_argument("--only", nargs="+", choices=list(cases.MAKERS), default=["digits", "gelu", "curve", "vgg"])
    parser.add_argument("--inputs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--epsilons", nargs="+", type=float, default=[0.25, 1.0])
    parser.add_argument("--blocks", nargs="+", type=float, default=[0.5, 1, 4])
    parser.add_argument("--reference", type=int, default=200, help="blocks of 2d calls")
    options = parser.parse_args()
    data = Path(options.data) if options.data else None
    if missing := [name for name in options.only if name in cases.NEEDS_DATA and not data]:
        parser.error(f"{missing[0]} needs --data DIR (or SMOOTHHESS_DATA).")
    shown = ["DIR" if word == str(options.data) else word for word in sys.argv[1:]]
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    print(f"{platform.machine()} CPU, {versions}; `{' '.join(['python benchmarks/intervals.py', *shown])}`\n")
    print("| network | control | calls/2d | all entries | 20 largest in truth | 20 reported as largest |")
    print("|---|---|---|---|---|---|")
    for name in options.only:
        for case in cases.MAKERS[name]("cpu", options.inputs, options.epsilons, data):
            long = {"control": "kink", "shrink": False}
            calls = 2 * case.d * options.reference
            truths = [estimate(case, i, calls, 900, **long).hessian[0].double() for i in range(options.inputs)]
            for control in (None, "auto"):
                for blocks in options.blocks:
                    shares = coverage(case, truths, 2 * round(case.d * blocks), options.seeds, control)
                    cells = " | ".join(f"{s:.3f}" for s in shares)
                    print(f"| {case.name} | {control} | {blocks:g} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
