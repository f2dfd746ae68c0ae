"""Time and peak memory against the number of features d, of draws m, and of inputs B.

    python benchmarks/scale.py                    on a CPU, two minutes
    python benchmarks/scale.py --write FILE       the same tables as Markdown

Each point is a process of its own: its peak memory is what the operating system saw (ru_maxrss) beyond what Python,
torch, the model and a small run before it had taken. One point is `attribute` with n_calls = 2m and the questions that
make no matrix: 49 group sums, the diagonal, a product, four eigenpairs. The network is a cheap convolution, so that
what is measured is ours and not the model's. Seconds are those of the CPU with one thread, which other jobs on the
machine disturb little. Exponents are slopes of least squares in log–log.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from smoothhess import SmoothHess

SHAPES = ((1, 28, 28), (3, 32, 32), (3, 64, 64), (3, 112, 112), (3, 160, 160), (3, 224, 224))
PHOTO = SHAPES[-1]
ROWS, MORE_ROWS = 128, (32, 64, 128, 256)
BATCHES = (1, 2, 4, 8)
BATCH_SHAPE, BATCH_ROWS = (3, 64, 64), 128
MODEL_ROWS = 8  # rows in a forward pass: what the model itself keeps is the same at all points
PIECES = 7  # groups along each side of an image
LINEAR = 0.15  # a slope within this of 1 counts as linear


@dataclass(frozen=True)
class Point:
    """What was asked, and what it took."""

    shape: tuple[int, int, int]
    rows: int  # m
    batch: int  # B
    control: str | None = None
    seconds: float = math.nan  # of attribute
    asking: float = math.nan  # of the questions afterwards
    peak: float = math.nan  # bytes

    @property
    def d(self) -> int:
        return math.prod(self.shape)


# --- one point, in a process of its own -------------------------------------------------------------------------------


def network(channels: int) -> nn.Module:
    """A strided convolution, a ReLU and an average: few units for each pixel."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(channels, 4, 4, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    ).eval()


def groups(shape: tuple[int, int, int]) -> Tensor:
    """Squares of pixels, PIECES × PIECES of them."""
    rows, columns = (torch.arange(n) * PIECES // n for n in shape[1:])
    return (rows[:, None] * PIECES + columns).expand(shape)


def explained(shape: tuple[int, int, int], rows: int, batch: int, control: str | None) -> tuple[float, float]:
    """CPU seconds of the run and of the questions."""
    net = network(shape[0])
    x = torch.rand(batch, *shape, generator=torch.Generator().manual_seed(1))
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = SmoothHess(net).attribute(
            x, 1, sigma=0.1, n_calls=2 * rows, control=control, internal_batch_size=MODEL_ROWS
        )
    middle = time.process_time()
    assert result.groups(groups(shape)).stderr().isfinite().all()
    assert result.diagonal().stderr.isfinite().all()
    assert (result @ x).shape == x.shape
    assert result.eigh(4).values.isfinite().all()
    assert result.relative_error.isfinite().all()
    return middle - start, time.process_time() - middle


def measured(point: Point) -> Point:
    """Run here, after a small run that has loaded all code."""
    explained((point.shape[0], 16, 16), 8, 1, point.control)
    before = peak()
    seconds, asking = explained(point.shape, point.rows, point.batch, point.control)
    return Point(point.shape, point.rows, point.batch, point.control, seconds, asking, peak() - before)


def peak() -> int:
    """Most bytes that this process has had in memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# --- all points -------------------------------------------------------------------------------------------------------


def apart(point: Point) -> Point:
    """Run in a new process."""
    asked = json.dumps([point.shape, point.rows, point.batch, point.control])
    command = [sys.executable, __file__, "--point", asked]
    # freed blocks go back to the system, so that they are not counted together with those that come after them
    malloc = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment = {**os.environ, **malloc, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    if run.returncode:
        raise RuntimeError(f"{asked} failed:\n{run.stderr}")
    found = json.loads(run.stdout)
    return Point(**{**found, "shape": tuple(found["shape"])})


def slope(x: list[float], y: list[float]) -> float:
    """Of least squares in log–log.

    >>> slope([1.0, 10.0, 100.0], [3.0, 30.0, 300.0])
    1.0
    """
    logs = [(math.log(a), math.log(b)) for a, b in zip(x, y, strict=True)]
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    above = sum((a - mean_x) * (b - mean_y) for a, b in logs)
    return round(above / sum((a - mean_x) ** 2 for a, _ in logs), 6)


def table(title: str, column: str, x: list[float], points: list[Point], skip: int = 0) -> list[str]:
    """Markdown of one sweep; the first `skip` points, where fixed costs weigh, are shown and not fitted."""
    lines = [
        f"### {title}",
        "",
        f"| {column} | CPU s: draws and estimate | questions | peak memory, MB | bytes / (m·d·B) |",
        "|---|---|---|---|---|",
    ]
    for value, p in zip(x, points, strict=True):
        share = p.peak / (p.rows * p.d * p.batch)
        lines.append(f"| {value:,.0f} | {p.seconds:.2f} | {p.asking:.2f} | {p.peak / 1e6:,.0f} | {share:.0f} |")
    whole = [p.seconds + p.asking for p in points]
    fits = {"time": whole, "memory": [p.peak for p in points]}
    told = []
    for name, y in fits.items():
        power = slope(x[skip:], y[skip:])
        told.append(f"{name} ∝ {column}^{power:.2f} ({'linear' if power <= 1 + LINEAR else 'MORE THAN LINEAR'})")
    fitted = f", from {column} = {x[skip]:,.0f} on" if skip else ""
    return [*lines, "", f"Fitted{fitted}: {'; '.join(told)}.", ""]


def refusals() -> list[str]:
    """What is said where a matrix would be too large, or too many rows are asked for."""
    x = torch.rand(1, *PHOTO, generator=torch.Generator().manual_seed(1))
    explainer = SmoothHess(network(3))
    result = explainer.attribute(x, 1, sigma=0.1, n_calls=16, control=None, internal_batch_size=MODEL_ROWS)
    lines = ["### What is refused", ""]
    asked = {
        "result.hessian": lambda: result.hessian,
        "result.stderr()": result.stderr,
        "result.top_pairs()": result.top_pairs,
        "attribute(…, n_calls=4096)": lambda: explainer.attribute(x, 1, sigma=0.1, n_calls=4096, control=None),
        "closed_form(…)": lambda: explainer.closed_form(x, 1, sigma=0.1),
    }
    for name, ask in asked.items():
        try:
            ask()
        except ValueError as error:
            lines.append(f"- `{name}` of 150 528 features: {error}")
        else:
            raise AssertionError(f"{name} was not refused")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--point", help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help="Markdown file for the tables")
    options = parser.parse_args()
    if options.point:
        shape, rows, batch, control = json.loads(options.point)
        print(json.dumps(asdict(measured(Point(tuple(shape), rows, batch, control)))))
        return
    began = time.perf_counter()
    over_d = [apart(Point(shape, ROWS, 1)) for shape in SHAPES]
    over_m = [over_d[-1] if rows == ROWS else apart(Point(PHOTO, rows, 1)) for rows in MORE_ROWS]
    over_b = [apart(Point(BATCH_SHAPE, BATCH_ROWS, batch)) for batch in BATCHES]
    known = apart(Point(PHOTO, ROWS, 1, "auto"))
    lines = [
        *table(f"Features, m = {ROWS} draws of one input", "d", [float(p.d) for p in over_d], over_d, skip=1),
        *table(f"Draws, one input of d = {over_m[0].d:,}", "m", [float(p.rows) for p in over_m], over_m),
        *table(
            f"Inputs together, d = {over_b[0].d:,}, m = {BATCH_ROWS}", "B", [float(p.batch) for p in over_b], over_b
        ),
        f'With control="auto" (the closed form in a few directions), d = {known.d:,}, m = {ROWS}: '
        f"{known.seconds:.2f} s and {known.asking:.2f} s, {known.peak / 1e6:,.0f} MB.",
        "",
        *refusals(),
        f"*{platform.machine()} CPU, one thread, Python {platform.python_version()}, torch "
        f"{torch.__version__}, {time.strftime('%Y-%m-%d')}, {time.perf_counter() - began:.0f} s; "
        "`python benchmarks/scale.py`*",
    ]
    print("\n".join(lines))
    if options.write:
        options.write.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
