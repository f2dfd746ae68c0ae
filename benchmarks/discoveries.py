"""Does `evaluate.discover` keep the false-discovery rate? Networks trained on functions of known structure.

    OMP_NUM_THREADS=1 python benchmarks/discoveries.py --seeds 3
    OMP_NUM_THREADS=1 python benchmarks/discoveries.py --seeds 3 --write

F1 to F10 and an additive function of ten features (known.py), with ten more features that have no effect. ReLU networks
are explained by SmoothHess, GELU networks of the same sizes by their own Hessian, in the same procedure with the same
data and knockoffs. Features are independent, or a Gaussian copula with correlations 0.5^|i−j|. The importances of each
network are kept in build/discoveries, and a run that was stopped resumes. The networks, σ and the procedure are the
same for all functions; the calibration was designed on seed 0 of F5, F9 and the additive function, which is not
reported.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from interactions import average, cell, markdown, publish, remarks
from known import FEATURES, FUNCTIONS, Known
from torch import Tensor, nn

from smoothhess import baselines
from smoothhess.evaluate import discover
from smoothhess.evaluate.discover import calibrated, knockoff_q_values
from smoothhess.model.atomic_write import atomic_write

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks" / "discoveries.md"
KEPT = ROOT / "build" / "discoveries"
NAMES = [*(f"F{i}" for i in range(1, 11)), "additive"]
NULL = 10  # features without effect
ROWS, STEPS, BATCH, WIDTHS = 10_000, 1_500, 256, (64, 32, 16)
SIGMA, RECORDS = 0.4, 100
CORRELATION = 0.5
Q = 0.2
KINDS = ("relu", "gelu")


def features(known: Known, correlated: bool, seed: int) -> Tensor:
    """(ROWS, 20): the features of the function, and others that are uniform between −1 and 1."""
    generator = torch.Generator().manual_seed(1000 * list(FUNCTIONS).index(known.name) + seed)
    p = FEATURES + NULL
    z = torch.randn(ROWS, p, generator=generator, dtype=torch.float64)
    if correlated:
        lag = (torch.arange(p)[:, None] - torch.arange(p)).abs()
        order = torch.randperm(p, generator=generator)  # neighbours are not the features that interact
        factor = torch.linalg.cholesky(CORRELATION ** lag.double())
        z = (z @ factor.mT)[:, order]
    low, high = (torch.cat([end, torch.full((NULL,), other)]) for end, other in zip(known.bounds, (-1, 1), strict=True))
    return low + (high - low) * torch.special.ndtr(z)


def trained(kind: str, inputs: Tensor, response: Tensor, seed: int) -> nn.Module:
    """An MLP, trained by Adam with a cosine schedule."""
    sizes = [inputs.shape[1], *WIDTHS]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for a, b in pairwise(sizes):
            layers += [nn.Linear(a, b), nn.ReLU() if kind == "relu" else nn.GELU()]
        net = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        index = torch.randint(len(inputs), (BATCH,), generator=generator)
        loss = (net(inputs[index]) - response[index, None]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return net.eval()


def own_hessian(model: Any, records: Tensor) -> tuple[Tensor, Tensor]:
    """Mean |H| and the effects of single features of a smooth network, by its own derivatives."""
    found = baselines.hessian(model, records)
    size = found.hessian.abs().mean(0)
    return size, torch.stack([found.gradient.abs().mean(0), size.diagonal()], 1)


def run(name: str, kind: str, correlated: bool, seed: int) -> dict[str, Tensor]:
    """Importances and effects of all columns, and R² of the network on its training rows."""
    known = FUNCTIONS[name]
    x = features(known, correlated, seed)
    y = known(x[:, :FEATURES])
    y = ((y - y.mean()) / y.std()).float()
    fit: dict[str, Tensor] = {}

    def factory(inputs: Tensor, response: Tensor) -> nn.Module:
        net = trained(kind, inputs, response, seed)
        with torch.no_grad():
            fit["r2"] = 1 - (net(inputs)[:, 0] - response).square().mean()
        return net

    how: dict[str, Any] = {"sigma": SIGMA} if kind == "relu" else {"importance": own_hessian}
    begin = time.process_time()
    found = discover(factory, x, y, q=Q, n_records=RECORDS, seed=seed, **how)
    seconds = torch.tensor(time.process_time() - begin)
    return {"importance": found.importance, "effects": found.effects, "r2": fit["r2"], "seconds": seconds}


def kept(name: str, kind: str, correlated: bool, seed: int) -> dict[str, Tensor]:
    settings = f"{ROWS}-{STEPS}-{BATCH}-{RECORDS}-{SIGMA:g}"
    path = KEPT / f"{name}-{kind}-{'correlated' if correlated else 'independent'}-{seed}-{settings}.pt"
    if path.is_file():
        return torch.load(path, weights_only=True)
    found = run(name, kind, correlated, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as part:
        torch.save(found, part)
    return found


def judged(name: str, found: dict[str, Tensor], calibrate: bool = True) -> dict[str, float]:
    """Share of false discoveries, power, and the number of discoveries at q = 0.2."""
    scores = calibrated(found["importance"], found["effects"])[0] if calibrate else found["importance"]
    q_values = knockoff_q_values(scores)
    p = len(q_values)
    i, j = torch.triu_indices(p, p, 1)
    true = torch.tensor([pair in FUNCTIONS[name].pairs for pair in zip(i.tolist(), j.tolist(), strict=True)])
    called = q_values[i, j] <= Q
    number = int(called.sum())
    return {
        "false": float((called & ~true).sum()) / max(number, 1),
        "power": float((called & true).sum()) / int(true.sum()) if true.any() else math.nan,
        "number": number,
        "auc": float((scores[i, j][true][:, None] > scores[i, j][~true]).double().mean()) if true.any() else math.nan,
        "r2": float(found["r2"]),
    }


def pm(values: list[float]) -> str:
    """Mean ± standard error."""
    mean, stderr = average(values)
    return f"{cell(mean, digits=2)} ± {cell(stderr, digits=2)}"


def tables(correlated: bool, seeds: int) -> list[str]:
    rows, everything = [], {}
    for name in NAMES:
        row = [name, str(len(FUNCTIONS[name].pairs))]
        for kind in KINDS:
            found = [judged(name, kept(name, kind, correlated, seed)) for seed in range(1, seeds + 1)]
            raw = [judged(name, kept(name, kind, correlated, seed), calibrate=False) for seed in range(1, seeds + 1)]
            everything.setdefault(kind, []).extend(found)
            everything.setdefault(f"{kind} raw", []).extend(raw)
            row += [cell(sum(f["r2"] for f in found) / seeds, digits=2), pm([f["false"] for f in found])]
            row += [pm([f["power"] for f in found]) if FUNCTIONS[name].pairs else "–"]
        rows.append(row)
    last = ["all", ""]
    for kind in KINDS:
        last += ["", pm([f["false"] for f in everything[kind]]), pm([f["power"] for f in everything[kind]])]
    head = ["", "pairs"]
    for words in ("ReLU, SmoothHess", "GELU, Hessian"):
        head += [f"{words}: R²", "false discoveries", "power"]
    raw = [
        [
            words,
            pm([f["false"] for f in everything[key]]),
            pm([f["power"] for f in everything[key]]),
            pm([f["auc"] for f in everything[key]]),
        ]
        for key, words in (
            ("relu", "ReLU, SmoothHess"),
            ("relu raw", "ReLU, SmoothHess, without calibration"),
            ("gelu", "GELU, Hessian"),
            ("gelu raw", "GELU, Hessian, without calibration"),
        )
    ]
    return [
        *markdown(head, [*rows, last]),
        "",
        *markdown(["all functions", "false discoveries", "power", "AUC"], raw),
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="data sets and networks for each function, from seed 1")
    parser.add_argument("--correlated", type=int, default=0, help="the same with correlated features")
    parser.add_argument("--write", nargs="?", type=Path, const=PAGE, help="write docs/benchmarks/discoveries.md")
    options = parser.parse_args()
    parts = [["## Independent features", "", *tables(False, options.seeds)]]
    if options.correlated:
        parts.append(["## Correlated features", "", *tables(True, options.correlated)])
    arguments = f"--seeds {options.seeds}" + (f" --correlated {options.correlated}" if options.correlated else "")
    lines = [
        "# False discoveries over a data set",
        "",
        f"`OMP_NUM_THREADS=1 python benchmarks/discoveries.py {arguments} --write`",
        "",
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {torch.get_num_threads()} thread(s), Python "
        f"{platform.python_version()}, torch {torch.__version__.split('+')[0]}; q = {Q}, {ROWS} rows, {STEPS} steps of "
        f"Adam, {RECORDS} records, σ = {SIGMA}; means ± standard errors over seeds, in the last line over all networks",
        "",
        *remarks(options.write),
        *(line for part in parts for line in part),
    ]
    publish(lines, options.write)


if __name__ == "__main__":
    main()
