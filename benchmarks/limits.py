"""How far off are error bars in the cases that docs/limits.md lists? Coverage of runs without a warning.

    OMP_NUM_THREADS=1 python benchmarks/limits.py
    OMP_NUM_THREADS=1 python benchmarks/limits.py --seeds 50 --only attention

Functions that were chosen because their intervals are too narrow: curvature along one direction, directions in few
dimensions, those of weak curvature in an attention layer, a kink in one dimension, far kinks beside a quadratic
function, and the limit of rounding in half precision. The truth is a closed form, or the mean of four long runs.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import smoothhess as sh
from smoothhess.explainers.result_warnings import warn_of

REFERENCE_RUNS, REFERENCE_CALLS, OTHER_SEEDS = 4, 60_000, 1_000_000
PAIRS_OF_POINTS, NETWORKS = 1_500, 8

Function = Callable[[Tensor], Tensor]


def runs(f: Any, x: Tensor, seeds: int, **options: Any) -> sh.Interactions:
    """One result per seed, as a batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sh.SmoothHess(f).attribute(x.expand(seeds, *x.shape[1:]), seed=[*range(seeds)], **options)


def is_silent(result: sh.Interactions) -> bool:
    """Whether a result of one example has no warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of(result, None)
    return not caught


def reference(f: Function, x: Tensor, sigma: float) -> Tensor:
    """The Hessian from long runs, (d, d)."""
    options: dict[str, Any] = {"sigma": sigma, "n_calls": REFERENCE_CALLS, "tails": None, "control": None}
    found = [sh.SmoothHess(f).attribute(x, seed=OTHER_SEEDS + i, **options) for i in range(REFERENCE_RUNS)]
    return torch.stack([r.unshrunk().hessian[0] for r in found]).mean(0)


def judged(name: str, result: sh.Interactions, truth: Tensor, directions: Tensor) -> None:
    """Print the coverage of entries, group sums and vᵀHv, and the share of relative errors below half of the truth."""
    silent = torch.tensor([is_silent(result[i]) for i in range(len(result))])
    cells = [f"silent {int(silent.sum())} of {len(result)}"]
    shown = result.unshrunk()

    def covered(low: Tensor, high: Tensor, true: Tensor) -> str:
        inside = ((low <= true) & (true <= high))[silent].double()
        return f"{float(inside.mean()):.2f}"

    rows = [result.row(i).interval() for i in range(len(truth))]
    low, high = (torch.stack([row[end] for row in rows], 1) for end in (0, 1))
    cells.append("entries " + covered(low, high, truth))
    if len(truth) >= 3:
        mask = torch.arange(len(truth)) * 3 // len(truth)
        sums, groups = nn.functional.one_hot(mask).to(truth), result.groups(mask)
        low, high = (torch.stack([groups.row(i).interval()[end] for i in range(3)], 1) for end in (0, 1))
        cells.append("groups " + covered(low, high, sums.mT @ truth @ sums))
    along = [covered(*result.bilinear(v, v).interval(), v @ truth @ v) for v in directions]
    cells.append("vᵀHv " + " ".join(along))
    error = (shown.hessian - truth).flatten(1).norm(dim=1) / truth.norm()
    known = silent & shown.relative_error.isfinite()
    low_share = (shown.relative_error < error / 2)[known].double().mean()
    cells.append(f"relative error below half of the true one {float(low_share):.2f} ({int(known.sum())} finite)")
    print(f"{name:46s} " + "; ".join(cells), flush=True)


def one_direction(seeds: int) -> None:
    """cosh(w·x + b), which is curved along w only."""
    for d in (4, 10, 30):
        rng = torch.Generator().manual_seed(1)
        w = nn.functional.normalize(torch.randn(d, generator=rng), dim=0)
        x, sigma = torch.linspace(-0.15, 0.24, d)[None], 0.7
        for length in (0.3, 0.7, 1.4):
            v = w * (length / sigma)
            truth = torch.outer(v, v) * (x[0] @ v).cosh() * math.exp(length**2 / 2)
            for blocks in (1, 3, 10):
                calls = 2 * d * blocks * (2 if d <= 4 else 1)
                result = runs(lambda x, v=v: (x @ v).cosh(), x, seeds, sigma=sigma, n_calls=calls, control=None)
                judged(f"cosh, d = {d}, σ|w| = {length}, {blocks} block(s)", result, truth, w[None])


def attention(seeds: int) -> None:
    """Mean over tokens of an attention layer, along eigenvectors with small and large eigenvalues."""
    for tokens, width in ((4, 4), (6, 5), (8, 4)):
        rng = torch.Generator().manual_seed(tokens)
        query, key, value = (torch.randn(width, width, generator=rng) / width**0.5 for _ in range(3))
        out, d = torch.randn(width, generator=rng), tokens * width

        def f(x: Tensor, shape: Any = (-1, tokens, width), maps: Any = (query, key, value, out)) -> Tensor:
            h, (q, k, v, o) = x.reshape(shape), maps
            weights = (2 * h @ q @ (h @ k).mT / shape[2] ** 0.5).softmax(-1)
            return (weights @ (h @ v)).mean(1) @ o

        x = torch.randn(1, d, generator=torch.Generator().manual_seed(9))
        truth = reference(f, x, 0.3)
        size, vectors = torch.linalg.eigh(truth)
        order = size.abs().argsort()
        for blocks in (1, 3, 10):
            result = runs(f, x, seeds, sigma=0.3, n_calls=2 * d * blocks)
            places = torch.stack([order[0], order[1], order[2], order[3], order[-2], order[-1]])
            judged(f"attention, {tokens} × {width}, {blocks} block(s)", result, truth, vectors[:, places].mT)
        print("   |λ| over the largest: " + " ".join(f"{float(s):.4f}" for s in size[places].abs() / size.abs().max()))


def few_dimensions(seeds: int) -> None:
    """Directions beside w of exp(w·x) and along that of tanh, and those of a tanh network and of Gaussian bumps."""
    for d in (5, 8):
        w, across = torch.linalg.qr(torch.randn(d, 2, generator=torch.Generator().manual_seed(d)))[0].mT
        angle = torch.tensor([0.0, 17.0, 45.0]).deg2rad()[:, None]
        truth = 0.49 * math.exp(0.49 / 2) * torch.outer(w, w)
        origin, beside = torch.zeros(1, d), angle.cos() * w + angle.sin() * across
        along(
            f"exp(0.7 w·x), d = {d}, at 0°, 17°, 45°", lambda x, w=w: (0.7 * x @ w).exp(), origin, truth, beside, seeds
        )
        truth = curvature_of_tanh(0.5) * torch.outer(w, w)
        along(f"tanh(w·x + 0.5), d = {d}", lambda x, w=w: (x @ w + 0.5).tanh(), origin, truth, w[None], seeds)
        own(f"tanh network, d = {d}, strongest, e₁", tanh_network(d), d, (-1,), seeds)
    own("Gaussian bumps, d = 16, from weak to strong", gaussian_bumps(16), 16, (0, 5, 10, -1), seeds)


def own(name: str, f: Function, d: int, places: tuple[int, ...], seeds: int) -> None:
    """Intervals along eigenvectors, numbered by the size of their eigenvalues, and along the first feature."""
    x = torch.randn(1, d, generator=torch.Generator().manual_seed(3))
    truth = reference(f, x, 0.3)
    size, vectors = torch.linalg.eigh(truth)
    chosen = vectors.mT[size.abs().argsort()[list(places)]]
    along(name, f, x, truth, torch.cat([chosen, torch.eye(d)[:1]]), seeds, sigma=0.3)


def along(name: str, f: Function, x: Tensor, truth: Tensor, directions: Tensor, seeds: int, sigma: float = 1.0) -> None:
    """Print the coverage of vᵀHv, and the median width over that of an oracle, for one to ten blocks."""
    for blocks in (1, 3, 10):
        result = runs(f, x, seeds, sigma=sigma, n_calls=2 * x.shape[1] * blocks, control=None)
        silent = torch.tensor([is_silent(result[i]) for i in range(len(result))])
        cells = []
        for v in directions:
            low, high = result.bilinear(v, v).interval()
            true, oracle = v @ truth @ v, 2 * 1.96 * ((low + high) / 2).std()
            inside = ((low <= true) & (true <= high))[silent].double().mean()
            cells.append(f"{float(inside):.2f} ({float((high - low)[silent].median() / oracle):.1f})")
        shown = f"silent {int(silent.sum())} of {len(result)}; coverage (width) " + " ".join(cells)
        print(f"{name}, {blocks} block(s)".ljust(60) + shown, flush=True)


def curvature_of_tanh(shift: float) -> float:
    """E tanh″(t + shift) for a standard normal t, by quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(150)
    value = np.tanh(nodes + shift)
    return float((weights / weights.sum() * -2 * value * (1 - value**2)).sum())


def tanh_network(d: int) -> Function:
    """A random network of three hidden layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        hidden = [nn.Linear(d, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()]
        network = nn.Sequential(*hidden, nn.Linear(32, 1))
    return lambda x: network(x)[:, 0]


def gaussian_bumps(d: int) -> Function:
    """Ten bumps at random places."""
    rng = torch.Generator().manual_seed(1)
    centres, heights = 0.7 * torch.randn(10, d, generator=rng), torch.randn(10, generator=rng)
    return lambda x: (-(x[:, None] - centres).square().sum(-1) / (0.6 * d)).exp() @ heights


def one_feature(seeds: int) -> None:
    """relu(x − c) of a single feature, without its closed form."""
    for c in (0.0, 0.5, 1.0):
        truth = torch.tensor([[normal_density(c)]])
        for calls in (20, 60, 200):
            options: dict[str, Any] = {"sigma": 1.0, "n_calls": calls, "control": None, "tails": None}
            result = runs(lambda x, c=c: (x[:, 0] - c).relu(), torch.zeros(1, 1), seeds, **options)
            judged(f"relu(x − {c:g}), d = 1, {calls} calls", result, truth, torch.ones(1, 1))


def far_kinks(seeds: int) -> None:
    """Kinks far away that carry a few per cent of ‖H‖, in addition to a quadratic function, a near kink and a sine.

    The sine is no operation of which the kinks are known, so flips that no draw shows are not computed.
    """
    d, rng = 6, torch.Generator().manual_seed(0)
    matrix = torch.randn(d, d, generator=rng)
    matrix = (matrix + matrix.mT) / 8
    normals = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(1)))[0]
    near = torch.zeros(d, d)
    near[2, 2] = 0.2 * normal_density(0.3)
    for jumps, ends in (([3.0], [2.5]), ([10.0], [3.0]), ([40.0], [3.5]), ([10.0] * 3, [3.0] * 3)):
        own = [*zip(jumps, ends, normals, strict=False)]

        def f(x: Tensor, own: list[tuple[float, float, Tensor]] = own) -> Tensor:
            usual = (x @ matrix * x).sum(1) / 2 + 0.1 * (x[:, 2] - 0.3).abs() + 0.05 * x[:, 1].sin()
            return usual + torch.stack([c * (x @ w - t).relu() for c, t, w in own]).sum(0)

        far = torch.stack([c * normal_density(t) * torch.outer(w, w) for c, t, w in own]).sum(0)
        truth = matrix + near + far
        share = float(far.norm() / truth.norm())
        for calls in (400, 1200):
            result = runs(f, torch.zeros(1, d), seeds, sigma=1.0, n_calls=calls)
            name = f"{len(ends)} kink(s) at {ends[0]:g} σ, {share:.0%} of ‖H‖, {calls} calls"
            judged(name, result, truth, normals[: len(ends)])


def normal_density(t: float) -> float:
    """φ(t)."""
    return math.exp(-t * t / 2) / math.sqrt(2 * math.pi)


def rounding(seeds: int) -> None:
    """The share of runs whose precision_error is at least the true ratio, for bfloat16 on this CPU."""
    for kind, width, layers in (
        ("tanh", 32, 2),
        ("gelu", 32, 2),
        ("relu", 32, 2),
        ("relu", 32, 4),
        ("relu", 512, 2),
        ("relu", 512, 6),
    ):
        for d in (8, 64):
            for sigma in (0.1, 1.0):
                held = []
                for number in range(NETWORKS):
                    model, x = network(kind, d, width, layers, number)
                    true = true_rounding(model, x, sigma)
                    result = runs(model, x, seeds, target=0, sigma=sigma, n_calls=2, precision="bf16", control=None)
                    assert result.precision_error is not None
                    held.append((result.precision_error.double() >= true).double().mean())
                name = f"bf16, {kind}, {layers} layers of {width}, d = {d}, σ = {sigma:g}"
                print(f"{name:46s} limit holds in {float(torch.stack(held).mean()):.2f} of the runs", flush=True)


def network(kind: str, d: int, width: int, layers: int, number: int) -> tuple[nn.Module, Tensor]:
    """A random network in float32, and an input."""
    activation = {"tanh": nn.Tanh, "gelu": nn.GELU, "relu": nn.ReLU}[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        parts: list[nn.Module] = [nn.Linear(d, width, dtype=torch.float32), activation()]
        for _ in range(layers - 1):
            parts += [nn.Linear(width, width, dtype=torch.float32), activation()]
        return nn.Sequential(*parts, nn.Linear(width, 5, dtype=torch.float32)), torch.randn(1, d, dtype=torch.float32)


def true_rounding(model: nn.Module, x: Tensor, sigma: float) -> float:
    """√(E|a|²/E|b|²) of the rounding a and the change b of the gradient between x + δ and x − δ, from many pairs."""
    delta = sigma * torch.randn(PAIRS_OF_POINTS, x.shape[1], generator=torch.Generator().manual_seed(7)).to(x)

    def gradient(points: Tensor, half: bool) -> Tensor:
        leaf = points.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            value = model(leaf)[:, 0]
        return torch.autograd.grad(value.float().sum(), leaf)[0].double()

    rounded, exact = (gradient(x + delta, half) - gradient(x - delta, half) for half in (True, False))
    return float(((rounded - exact).square().sum() / exact.square().sum()).sqrt())


FAMILIES = {f.__name__: f for f in (one_direction, few_dimensions, attention, one_feature, far_kinks, rounding)}


def main() -> None:
    """Run all families, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--only", choices=FAMILIES)
    arguments = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    begin = time.time()
    for name, family in FAMILIES.items():
        if arguments.only in (None, name):
            family(arguments.seeds)
    print(f"{platform.machine()}, torch {torch.__version__}, {time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
