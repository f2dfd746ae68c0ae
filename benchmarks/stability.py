"""Which pairs does a retrained network have as well? The share of the strongest pairs that persist, against σ.

    OMP_NUM_THREADS=1 python benchmarks/stability.py
    OMP_NUM_THREADS=1 python benchmarks/stability.py --write

Digits (pixels that vary) and breast cancer (30 columns), standardised. Networks are trained five times with other seeds
on the same rows, and five times on bootstrap samples of the rows, with one initialisation. The k strongest pairs of two
networks are compared: the pairs that both have with the same sign, over k. The same network explained twice with
independent draws shows how much of the difference is Monte-Carlo error. Pairs are those around single test records, and
those of the mean of |H| over records. Results are kept in build/stability.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import warnings
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from interactions import average, cell, markdown, publish, remarks
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor, nn

from smoothhess import SmoothHess
from smoothhess.evaluate import global_interactions
from smoothhess.model.atomic_write import atomic_write

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks" / "stability.md"
FIGURE = ROOT / "docs" / "images" / "stability.png"
KEPT = ROOT / "build" / "stability"
SIGMAS = (0.1, 0.2, 0.5, 1.0, 2.0)  # standard deviations of a feature
NETWORKS, K = 5, 10
LOCAL, CALLS = 10, 512  # test records that are explained singly, and their calls
RECORDS, RECORD_CALLS = 60, 256  # of the mean over records
STEPS = 600
KINDS = ("seeds", "bootstrap", "draws")


def data(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Standardised training and test rows with their classes."""
    rows, classes = load_digits(return_X_y=True) if name == "digits" else load_breast_cancer(return_X_y=True)
    x, y = torch.tensor(np.asarray(rows)).float(), torch.tensor(np.asarray(classes))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[: 3 * len(x) // 4], order[3 * len(x) // 4 :]
    centre, spread = x[train].mean(0), x[train].std(0)
    moving = spread > (0.1 if name == "digits" else 0.0)  # pixels at the border of digits are nearly constant
    x = ((x - centre) / spread.clamp_min(1e-6))[:, moving]
    return x[train], y[train], x[test], y[test]


def trained(x: Tensor, y: Tensor, seed: int, bootstrap: bool) -> nn.Module:
    """A ReLU MLP, trained by AdamW; another seed is another initialisation and order of the rows."""
    generator = torch.Generator().manual_seed(seed)
    if bootstrap:
        rows = torch.randint(len(x), (len(x),), generator=generator)
        x, y, seed = x[rows], y[rows], 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = [x.shape[1], 64, 32]
        layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        net = nn.Sequential(*layers, nn.Linear(sizes[-1], int(y.max()) + 1))
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3, weight_decay=1e-2)
    for _ in range(STEPS):
        index = torch.randint(len(x), (64,), generator=generator)
        loss = nn.functional.cross_entropy(net(x[index]), y[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net.eval()


def strongest(effects: Tensor) -> list[set[tuple[int, int, bool]]]:
    """The K strongest pairs of each matrix with their signs."""
    d = effects.shape[-1]
    i, j = torch.triu_indices(d, d, 1)
    values = effects[:, i, j]
    top = values.abs().topk(K, 1).indices
    return [{(int(i[n]), int(j[n]), bool(row[n] > 0)) for n in chosen} for row, chosen in zip(values, top, strict=True)]


def shared(first: list[set[Any]], second: list[set[Any]]) -> float:
    """Mean share of common pairs."""
    return sum(len(a & b) for a, b in zip(first, second, strict=True)) / K / len(first)


def explained(net: nn.Module, x: Tensor, target: Tensor, sigma: float, seed: int) -> dict[str, list[set[Any]]]:
    """The strongest pairs around single records, and of the mean of |H| over records."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        local = SmoothHess(net).attribute(
            x[:LOCAL], target[:LOCAL], sigma=sigma, n_calls=CALLS, seed=seed, show_progress=False
        )
        overall = global_interactions(
            SmoothHess(net), x[:RECORDS], target=target[:RECORDS], sigma=sigma, n_calls=RECORD_CALLS, seed=seed
        )
    return {"local": strongest(local.hessian), "global": strongest(overall.mean_abs.value[None])}


def run(name: str) -> dict[str, Any]:
    x, y, test, labels = data(name)
    nets = {
        "seeds": [trained(x, y, seed, False) for seed in range(NETWORKS)],
        "bootstrap": [trained(x, y, seed, True) for seed in range(NETWORKS)],
    }
    with torch.no_grad():
        right = [float((net(test).argmax(1) == labels).double().mean()) for kind in nets for net in nets[kind]]
    found: dict[str, Any] = {"accuracy": [min(right), max(right)], "features": x.shape[1], "shares": {}}
    for sigma in SIGMAS:
        tops = {kind: [explained(net, test, labels, sigma, 0) for net in nets[kind]] for kind in nets}
        again = [explained(net, test, labels, sigma, 1) for net in nets["seeds"]]
        for scope in ("local", "global"):
            for kind in nets:
                values = [shared(a[scope], b[scope]) for a, b in combinations(tops[kind], 2)]
                found["shares"][f"{scope} {kind} {sigma:g}"] = values
            values = [shared(a[scope], b[scope]) for a, b in zip(tops["seeds"], again, strict=True)]
            found["shares"][f"{scope} draws {sigma:g}"] = values
    return found


def kept(name: str) -> dict[str, Any]:
    key = json.loads(json.dumps([SIGMAS, NETWORKS, K, LOCAL, CALLS, RECORDS, RECORD_CALLS, STEPS]))
    path = KEPT / f"{name}.json"
    if path.is_file() and (stored := json.loads(path.read_text()))["key"] == key:
        return stored["found"]
    begin = time.process_time()
    found = run(name)
    found["seconds"] = time.process_time() - begin
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as part:
        part.write_text(json.dumps({"key": key, "found": found}))
    return found


WORDS = {"draws": "the same network, other draws", "seeds": "another seed", "bootstrap": "another sample of the rows"}
TITLES = {"digits": "digits", "cancer": "breast cancer"}


def draw(results: dict[str, dict[str, Any]]) -> None:
    """Shares against σ, one panel for each data set and scope."""
    figure, axes = plt.subplots(1, 4, figsize=(11, 3), sharey=True)
    panels = [(name, scope) for name in results for scope in ("local", "global")]
    colours = {"draws": "#777777", "seeds": "#0072b2", "bootstrap": "#d55e00"}
    for ax, (name, scope) in zip(axes, panels, strict=True):
        shares = results[name]["shares"]
        for kind in ("draws", "seeds", "bootstrap"):
            points = [average(shares[f"{scope} {kind} {s:g}"]) for s in SIGMAS]
            mean, stderr = (np.array(p) for p in zip(*points, strict=True))
            ax.errorbar(SIGMAS, mean, stderr, color=colours[kind], marker="o", markersize=4, label=WORDS[kind])
        ax.set_xscale("log")
        ax.set_xticks(SIGMAS, [f"{s:g}" for s in SIGMAS])
        ax.minorticks_off()
        ax.set_ylim(0, 1)
        ax.set_title(
            f"{TITLES[name]}, {'single records' if scope == 'local' else f'mean of {RECORDS} records'}", size=10
        )
        ax.set_xlabel("σ, in standard deviations")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(f"share of the {K} strongest pairs")
    axes[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, dpi=150)


def table(found: dict[str, Any]) -> list[str]:
    rows = []
    for scope, words in (("local", "single records"), ("global", f"mean of {RECORDS} records")):
        for kind in ("draws", "seeds", "bootstrap"):
            cells = []
            for sigma in SIGMAS:
                mean, stderr = average(found["shares"][f"{scope} {kind} {sigma:g}"])
                cells.append(f"{cell(mean, digits=2)} ± {cell(stderr, digits=2)}")
            rows.append([words, WORDS[kind], *cells])
    return markdown(["pairs of", "compared with", *(f"σ = {s:g}" for s in SIGMAS)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", nargs="?", type=Path, const=PAGE, help="write docs/benchmarks/stability.md")
    options = parser.parse_args()
    results = {name: kept(name) for name in TITLES}
    lines = [
        "# Stability across retrainings",
        "",
        "`OMP_NUM_THREADS=1 python benchmarks/stability.py --write`",
        "",
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {torch.get_num_threads()} thread(s), Python "
        f"{platform.python_version()}, torch {torch.__version__.split('+')[0]}, "
        f"{sum(r['seconds'] for r in results.values()) / 60:.1f} minutes of the processor",
        "",
        *remarks(options.write),
    ]
    for name, found in results.items():
        d = found["features"]
        low, high = found["accuracy"]
        lines += [
            f"## {TITLES[name].capitalize()}",
            "",
            f"{d} features, {d * (d - 1) // 2} pairs, of which two random choices of {K} share "
            f"{K / (d * (d - 1) // 2):.3f} (around single records half of it, with the same sign). Test accuracy "
            f"{100 * low:.0f} to {100 * high:.0f} %. Shares of the {K} strongest pairs, ± standard error over pairs of "
            "networks, which is "
            "too small since each network is in four of ten pairs.",
            "",
            *table(found),
            "",
        ]
    publish(lines, options.write)
    if options.write:
        draw(results)


if __name__ == "__main__":
    main()
