"""Would closed forms of noisy centres reduce the error? Bounds for the gain, with weights fitted to the truth.

    python benchmarks/noisy_centres.py                         networks that are trained here, on the CPU in minutes
    python benchmarks/noisy_centres.py --data DIR --only cifar10 --images 2 --reference 2 --device cuda

A closed form H₁ takes slopes and sensitivities at x. Here they are taken at centres x' ~ N(x, Σ), the pre-activations
are extrapolated back to x, and τ is that of x. The targets are H₁ at x, means over centres, and "own centres": the
products of H₁ with the directions of an orthogonal block, every product with slopes of one of at most 256 centres.

A mix is the linear combination of a denoised estimate and a target, or the closed forms H₁ˡ of its layers, that is
closest to the truth (least squares), so its gain is an upper bound for all weights that have to be estimated. "Around"
denoises the estimate around the target with weight 1, or around Σ βₗH₁ˡ with the weights that are closest to the truth.
"Mix, directions" replaces the estimate in its r strongest eigenvectors by the best linear combination with the target,
which takes r products per centre; r is the one of d/64, …, d/4 with the largest gain.

A closed form counts d/2 passes, as where the input gradients of all neurons are stored; only "defaults" counts passes
as the library does, which stores them within a limit of memory.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cases
import torch
from cases import Case
from efficiency import PAPER, Truth, estimate, geometric, mean_of
from torch import Generator, Tensor

from smoothhess import Interactions, Isotropic
from smoothhess.curvature.frozen_network import FrozenNetwork, Switches
from smoothhess.curvature.one_flip import Kinks
from smoothhess.estimate.shrinkage import denoise
from smoothhess.estimate.statistics import Statistics, own_slopes, symmetric
from smoothhess.linalg.low_rank import Known
from smoothhess.model.gradients import Oracle
from smoothhess.model.state import borrowed

MEANS = 1, 4, 16, 32  # numbers of centres
MOST_CENTRES = 256  # of the products with centres of their own
CENTRE_PASSES = 1.5  # gradient at the centre, and a frozen forward pass at x
BLOCKS: dict[str, tuple[int, dict[str, Any]]] = {  # blocks of 2d calls, and options
    "one block": (1, {"control": None}),
    "two blocks": (2, {"control": None}),
    "one block, kink": (1, {"control": "kink"}),
}
MIXES = "mix", "mix, layers", "mix, directions", "around", "around, layers"
SHARES = 64, 32, 16, 8, 4  # d over the number of directions


# --- targets ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Target:
    """An approximation of the Hessian without draws of the gradient."""

    layers: Tensor  # (layers, d, d); their sum is the target
    passes: float
    shared: float  # of these passes, those that an estimate with control="kink" has made already
    centres: int  # whose dense closed forms it is the mean of, without x; −1: has none


@dataclass(frozen=True, eq=False)
class Centres:
    """The network frozen at n centres, with the windows of max-pooling as at x, and the curvature of its neurons."""

    case: Case
    x: Tensor  # (1, *shape)
    network: FrozenNetwork
    bend: Tensor  # (n, units) u E[a''] at the pre-activations extrapolated back to x
    saved: float  # passes that the library takes for H₁ beyond d/2

    @staticmethod
    def of(case: Case, index: int, points: Tensor) -> Centres:
        x = case.inputs[index : index + 1]
        here, there = (_frozen(case, index, p) for p in (x, points))
        if here.bent != there.bent:
            raise RuntimeError("other activations are modelled at the centres than at x. Use another input.")
        spread = {i: Switches(s.source, s.candidates.expand(len(points), -1, -1)) for i, s in here.switches.items()}
        network, everyone = replace(there, switches=spread), there.everyone
        with torch.no_grad():
            own, back = (network.units(network.run(p, everyone)) for p in (points, x.expand_as(points)))
        tau = here.squares(Isotropic(case.sigma), here.everyone).sqrt().expand(len(points), -1)
        bend = Kinks(replace(network, pre=back)).weights(tau).bend
        return Centres(case, x, replace(network, pre=own), bend, Kinks(here).price(case.d) - case.d / 2)

    def closed_form(self, centre: int) -> Tensor:
        """H₁ of each layer at one centre, (layers, d, d)."""
        index = torch.tensor([centre], device=self.x.device)
        columns = self.network.select(index).columns(Isotropic(self.case.sigma), index)
        parts = zip(*map(self.network.per_call, columns), strict=True)
        found = []
        for part, bend in zip(parts, self.network.per_call(self.bend[centre]), strict=True):
            j = torch.cat(part, 1)[0]  # (d, units)
            found.append((j * bend.to(j)) @ j.mT)
        return torch.stack(found) / self.case.sigma**2

    def products(self, first: int, delta: Tensor) -> Tensor:
        """H₁ˡδ of each layer for rows δ (rows, d), (layers, rows, d); the centres from `first` on share the rows."""
        each = len(delta) // (len(self.bend) - first)
        step, found = max(1, self.network.oracle.batch_size // (4 * each)), []  # the graph keeps more than a gradient
        for index in self.network.everyone[first:].split(step):
            network, bend = self.network.select(index), self.bend[index].repeat_interleave(each, 0)
            rows = slice((int(index[0]) - first) * each, (int(index[-1]) + 1 - first) * each)
            x, owner = self.x.expand(rows.stop - rows.start, *self.x.shape[1:]), index.repeat_interleave(each)
            leaf = x.clone().requires_grad_()
            units = network.units(network.run(leaf, owner))
            with torch.no_grad():
                moved = network.units(network.run(x + delta[rows].view_as(x), owner))
            pulled = []
            for z, there, b in zip(units, moved, network.per_call(bend), strict=True):
                total = (z * (there - z.detach()) * b.view_as(z).to(z)).sum()
                pulled += torch.autograd.grad(total, leaf, retain_graph=True)
            found.append(torch.stack(pulled).flatten(2))
        return torch.cat(found, 1)


def _frozen(case: Case, index: int, points: Tensor) -> FrozenNetwork:
    oracle = Oracle(case.model, points, None if case.target is None else [case.target[index]] * len(points))
    owner = torch.arange(len(points), device=points.device)
    return FrozenNetwork.see(oracle, points, *oracle(points, owner))


@dataclass(frozen=True)
class Limit:
    """The squared error of the mean over infinitely many centres."""

    squared: float
    deviation: float  # jackknife standard error


def targets(case: Case, index: int, block: Interactions, truth: Truth) -> tuple[dict[str, Target], Limit, float]:
    """The targets, the limit of means over centres, and the passes that the library takes for H₁ beyond d/2."""
    x, d, most = case.inputs[index : index + 1], case.d, max(MEANS)
    own = max(n for n in range(1, MOST_CENTRES + 1) if d % n == 0)
    noise = torch.randn(most + own, *x.shape[1:], generator=Generator().manual_seed(77 + index), dtype=x.dtype)
    centres = Centres.of(case, index, torch.cat([x, x + case.sigma * noise.to(x.device)]))
    tau, each = d / 2, d / 2 + CENTRE_PASSES  # τ at x, whose passes give H₁ at x too
    total = torch.zeros_like(layers := centres.closed_form(0))
    found, all_forms = {"H₁ at x": Target(layers, tau, tau, 0)}, []
    for n in range(1, most + 1):
        one = centres.closed_form(n)
        total, all_forms = total + one, [*all_forms, one.sum(0)]
        if n in MEANS:
            found[f"{n} centre{'s' * (n > 1)}"] = Target(total / n, tau + n * each, tau, n)
    stats = block.statistics
    rows = case.sigma * Centres.products(centres, most + 1, case.sigma * stats.draws()[0])  # (layers, d, d), whitened
    score, passes = stats.head.score[0], tau + d + CENTRE_PASSES * own
    found["own centres"] = Target(symmetric(score.mT @ rows) / len(score) / case.sigma**2, passes, tau, -1)
    odd = rows.sum(0)[None]
    found["own centres, denoised"] = Target(_denoised(case, _with_rows(stats, odd, None))[None], passes, tau, -1)
    return found, _limit(torch.stack(all_forms), truth), centres.saved


def _limit(forms: Tensor, truth: Truth) -> Limit:
    """⟨Cᵢ − R₁, Cⱼ − R₂⟩ of different centres has the expectation ‖E C − H‖²."""
    rows, a, b = (t.double().flatten(-2) for t in (forms, truth.first, truth.second))
    products = rows @ rows.mT - (rows @ b)[None] - (rows @ a)[:, None] + a @ b
    n = len(forms)

    def without(kept: Tensor) -> float:
        part = products[kept][:, kept]
        return float((part.sum() - part.trace()) / (len(part) * (len(part) - 1)) / (a @ b))

    everyone = torch.arange(n, device=rows.device)
    left = torch.tensor([without(everyone[everyone != i]) for i in range(n)])
    return Limit(without(everyone), math.sqrt((n - 1) * float(left.var(correction=0))))


# --- errors -----------------------------------------------------------------------------------------------------------


def _weights(parts: Sequence[Tensor], truth: Truth) -> tuple[Tensor, float]:
    """Weights of the linear combination that is closest to the truth, and its relative error."""
    rows = torch.stack([p.double().flatten() for p in parts])
    a, b = truth.first.flatten(), truth.second.flatten()
    right = rows @ (a + b) / 2
    weights = torch.linalg.pinv(rows @ rows.mT, rtol=1e-12, hermitian=True) @ right
    return weights, math.sqrt(max(1 - float(right @ weights / (a @ b)), 1e-12))


def _error(hessian: Tensor, truth: Truth) -> float:
    h, a, b = hessian.double(), truth.first, truth.second
    return math.sqrt(max(float(((h - a) * (h - b)).sum() / (a * b).sum()), 1e-12))


def _with_rows(stats: Statistics, odd: Tensor, known: Known | None) -> Statistics:
    slopes = own_slopes(stats.head.score, odd, stats.head.weight, stats.k)
    return replace(stats, head=replace(stats.head, odd=odd, **slopes), known=known)


def _denoised(case: Case, stats: Statistics) -> Tensor:
    return denoise(stats, Isotropic(case.sigma), case.d).dense()[0] / case.sigma**2


def _around(case: Case, result: Interactions, target: Tensor) -> Tensor:
    """The denoised estimate from the draws of complete blocks, with the target as centre of denoising."""
    stats, white = result.statistics, case.sigma**2 * target[None]
    before = torch.zeros_like(white) if stats.known is None else stats.known.dense()
    return _denoised(case, _with_rows(stats, stats.head.odd + stats.draws() @ (before - white), Known(white)))


@dataclass(frozen=True)
class Outcome:
    """One estimate of one input."""

    passes: float
    error: float
    gain: float


def measure(case: Case, index: int, blocks: int) -> tuple[dict[tuple[str, str], Outcome], Limit]:
    """Outcomes by target or block and by mix, and the limit of means over centres."""
    truth = Truth.of(case, index, blocks)
    theirs = _error(estimate(case, index, 8 * case.d, 500, **PAPER).hessian[0], truth)
    found: dict[tuple[str, str], Outcome] = {}

    def add(row: str, column: str, error: float, passes: float) -> None:
        outcome = Outcome(passes, error, 8 * case.d * (theirs / error) ** 2 / passes)
        found[row, column] = max(found.get((row, column), outcome), outcome, key=lambda o: o.gain)

    results = {
        name: estimate(case, index, 2 * case.d * count, index, shrink=True, tails=None, **options)
        for name, (count, options) in BLOCKS.items()
    }
    defaults = estimate(case, index, 2 * case.d, index)
    add("defaults", "alone", _error(defaults.hessian[0], truth), float(defaults.n_passes[0]))
    with borrowed(case.model, case.inputs.device):
        every, limit, saved = targets(case, index, results["one block"], truth)
    for block, result in results.items():
        kink, own = "kink" in block, result.hessian[0]
        made = float(result.n_passes[0]) - saved * kink
        add(block, "alone", _error(own, truth), made)
        vectors = torch.linalg.eigh(own)
        strongest = vectors.eigenvectors[:, vectors.eigenvalues.abs().argsort(descending=True)]
        for name, target in every.items():
            row, summed, before = f"{name} + {block}", target.layers.sum(0), target.shared * kink
            passes = made + target.passes - before
            weights = _weights(list(target.layers), truth)[0].to(summed)
            layered = torch.einsum("l,lij->ij", weights, target.layers)
            add(row, "mix", _weights([own, summed], truth)[1], passes)
            add(row, "mix, layers", _weights([own, *target.layers], truth)[1], passes)
            add(row, "around", _error(_around(case, result, summed), truth), passes)
            add(row, "around, layers", _error(_around(case, result, layered), truth), passes)
            for r in [case.d // share for share in SHARES] if target.centres >= 0 else []:
                outside = strongest[:, r:]
                parts = [h - outside @ (outside.mT @ h @ outside) @ outside.mT for h in (own, summed)]
                products = case.d / 2 + (CENTRE_PASSES + r) * target.centres if target.centres else case.d / 2 + r
                products = 0 if kink and not target.centres else products - before
                add(row, "mix, directions", _weights([own, *parts], truth)[1], made + products)
    for name, target in every.items():
        add(name, "alone", _error(target.layers.sum(0), truth), target.passes)
    print(f"    {case.name}: image {index + 1} of {len(case.inputs)}", file=sys.stderr, flush=True)
    return found, limit


# --- tables -----------------------------------------------------------------------------------------------------------


def report(case: Case, blocks: int) -> tuple[list[str], str]:
    """Markdown: the estimates and targets alone, and their mixes; and one row of the summary."""
    measured = [measure(case, i, blocks) for i in range(len(case.inputs))]
    cells: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for found, _ in measured:
        for key, outcome in found.items():
            cells[key].append(outcome)

    def gain(key: tuple[str, str]) -> float:
        return geometric([o.gain for o in cells[key]])

    def text(key: tuple[str, str]) -> str:
        if key not in cells:
            return "–"
        found = f"{mean_of([o.error for o in cells[key]]):.4f}, {gain(key):.3g}×"
        return f"{found}, {mean_of([o.passes for o in cells[key]]):.0f} passes" if "directions" in key[1] else found

    squared = mean_of([limit.squared for _, limit in measured])
    deviation = math.hypot(*(limit.deviation for _, limit in measured)) / len(measured)
    lines = [
        f"### {case.name}",
        "",
        f"{len(case.inputs)} inputs. Squared error of the mean over infinitely many centres: {squared:.2g} ± "
        f"{deviation:.1g}, an error of {math.sqrt(max(squared, 0)):.3f}.",
        "",
        "| estimate | passes | error, gain |",
        "|---|---|---|",
    ]
    alone = [key for key in cells if key[1] == "alone"]
    passes = {
        key[0]: mean_of([o.passes for o in outcomes]) for key, outcomes in cells.items() if key[1] in ("alone", "mix")
    }
    lines += [f"| {key[0]} | {passes[key[0]]:.0f} | {text(key)} |" for key in alone]
    lines += ["", f"| target + estimate | passes | {' | '.join(MIXES)} |", "|---|---|---|---|---|---|---|"]
    rows = dict.fromkeys(row for row, column in cells if column != "alone")
    lines += [f"| {row} | {passes[row]:.0f} | {' | '.join(text((row, c)) for c in MIXES)} |" for row in rows]

    def best(noisy: bool, columns: Sequence[str]) -> str:
        found = max((key for key in cells if key[1] in columns and ("centre" in key[0]) == noisy), key=gain)
        return f"{gain(found):.3g}× ({'; '.join(found if len(columns) > 1 else found[:1])})"

    errors = [mean_of([o.error for o in cells[name, "alone"]]) for name in ("H₁ at x", "4 centres", "32 centres")]
    known = [f"{gain((name, 'alone')):.3g}×" for name in ("one block", "one block, kink", "defaults")]
    bests = [best(noisy, columns) for columns in (("around",), MIXES) for noisy in (False, True)]
    limits = " / ".join(f"{e:.3f}" for e in (*errors, math.sqrt(max(squared, 0))))
    summary = f"| {' | '.join([case.name, limits, *known, *bests])} |"
    return [*lines, ""], summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("SMOOTHHESS_DATA"), help="folder with MNIST, CIFAR10 and weights"
    )
    parser.add_argument("--only", nargs="+", choices=list(cases.MAKERS), default=["digits", "vgg", "curve"])
    parser.add_argument("--images", type=int, default=4, help="inputs per network")
    parser.add_argument("--epsilons", nargs="+", type=float, default=[0.25, 1.0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--reference", type=int, default=16, help="blocks of 2d calls in each half of the reference")
    parser.add_argument("--write", type=Path, help="write the tables to this file too")
    options = parser.parse_args()
    data = Path(options.data) if options.data else None
    if missing := [name for name in options.only if name in cases.NEEDS_DATA and not data]:
        parser.error(f"{missing[0]} needs --data DIR (or SMOOTHHESS_DATA).")
    machine = torch.cuda.get_device_name() if options.device.startswith("cuda") else f"{platform.machine()} CPU"
    shown = " ".join(["DIR" if word == str(options.data) else word for word in sys.argv[1:]])
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    head = [f"{machine}, {versions}", f"`python benchmarks/noisy_centres.py {shown}`", ""]
    table = [
        "| network, ε | error of H₁ / 4 / 32 / ∞ centres | one block | one block, kink | defaults "
        "| around H₁ | around noisy centres | best with H₁ | best with noisy centres |",
        f"|{'---|' * 9}",
    ]
    details: list[str] = []
    for name in options.only:
        for case in cases.MAKERS[name](options.device, options.images, options.epsilons, data):
            lines, summary = report(case, options.reference)
            table, details = [*table, summary], [*details, *lines]
            if options.write:  # what is finished is kept
                options.write.write_text("\n".join([*head, *table, "", *details]) + "\n")
    print("\n".join([*head, *table, "", *details]))


if __name__ == "__main__":
    main()
