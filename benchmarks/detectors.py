"""Ways to score pairs of features, and the networks they are tried on.

Each method takes a network that counts the rows going through it, points and a baseline, in units of standard
deviations, and what was chosen for it (σ, β, a step). It gives a matrix of scores for each point, and the passes that a
point took in units of a gradient call.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from known import FEATURES, FUNCTIONS, Known
from torch import Tensor, nn

from smoothhess import Attribution, Exact, Interactions, SmoothHess, baselines
from smoothhess.model.weight_files import load_weights, save_weights

PATH = 32  # points on the path of Integrated Hessians
BUDGET = 256  # coalitions, where shapiq approximates by the method of its own choice
I, J = torch.triu_indices(FEATURES, FEATURES, 1)

Explain = Callable[["Counted", Tensor, Tensor, dict[str, float]], tuple[Tensor, float]]


# --- networks ---------------------------------------------------------------------------------------------------------


class Counted(nn.Module):
    """A network of one output, with the rows that went through it forwards and backwards."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.forwards, self.backwards = net, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += len(x)
        value = self.net(x)[:, 0]
        if value.requires_grad:
            value.register_hook(self._back)
        return value

    def _back(self, gradient: Tensor) -> None:
        self.backwards += len(gradient)


class Blocks(nn.Module):
    """A sum of small networks of two features each: all other pairs are exactly null, whatever was learnt."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(mlp(2, widths) for _ in range(FEATURES // 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x[:, 2 * i : 2 * i + 2]) for i, part in enumerate(self.parts)]).sum(0)


@dataclass(frozen=True, eq=False)
class Fitted:
    """A network that has learnt a function, both in units of standard deviations."""

    known: Known
    net: nn.Module
    r2: float  # on rows that it has not seen
    spread: float  # standard deviation of the function
    seconds: float  # of the processor, for the training

    def standard(self, x: Tensor) -> Tensor:
        """Features as the network takes them."""
        low, high = self.known.bounds
        return ((x - (low + high) / 2) / self.known.moves).float()

    @property
    def baseline(self) -> Tensor:
        """A quarter of the way into the domain: at its centre F3 and F4 are singular."""
        low, high = self.known.bounds
        return low + (high - low) / 4


def mlp(features: int, widths: Sequence[int], activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    sizes = [features, *widths]
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), activation())]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 1))


def drawn(known: Known, rows: int, purpose: int) -> Tensor:
    """Rows of the function's domain; each purpose has draws of its own."""
    return known.sample(rows, torch.Generator().manual_seed(1000 * list(FUNCTIONS).index(known.name) + purpose))


def fit(known: Known, widths: Sequence[int], steps: int, rows: int, folder: Path, blocks: bool = False) -> Fitted:
    """Adam with a cosine schedule, 256 rows a step; the network is kept in `folder`."""
    x, unseen = drawn(known, rows, 1), drawn(known, 10_000, 2)
    centre, spread = known(x).mean(), float(known(x).std())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Blocks((32, 16)) if blocks else mlp(FEATURES, widths)
    fitted = Fitted(known, net, 0.0, spread, 0.0)
    inputs, targets = fitted.standard(x), ((known(x) - centre) / spread).float()[:, None]
    size = "blocks" if blocks else "-".join(map(str, widths))
    path = folder / f"{known.name}-{size}-{steps}-{rows}.safetensors"
    if path.is_file():
        seconds = float(load_weights(net, path)["seconds"])
    else:
        begin = time.process_time()
        rng = torch.Generator().manual_seed(3)
        optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            index = torch.randint(len(inputs), (256,), generator=rng)
            loss = (net(inputs[index]) - targets[index]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        seconds = time.process_time() - begin
        save_weights(net, path, seconds=f"{seconds:.2f}")
    with torch.no_grad():
        error = (net(fitted.standard(unseen))[:, 0] - (known(unseen) - centre) / spread).square().mean()
    r2 = 1 - float(error / (known(unseen) / spread).var())
    return Fitted(known, net.eval(), r2, spread, seconds)


# --- methods ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A way to score pairs: `explain(model, points, baseline, chosen)` gives (P, 10, 10) and passes per point."""

    name: str
    explain: Explain
    derivative: bool  # of second order: in units of the output per unit of both features
    signed: bool = True


def _read(result: Interactions | Exact | Attribution) -> tuple[Tensor, float]:
    return result.hessian, float(result.n_passes.double().mean())


def smooth(model: Counted, x: Tensor, sigma: float, **options: Any) -> Interactions:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tolerances that are not reached in max_calls: the pairs are used as they are
        return SmoothHess(model).attribute(x, sigma=sigma, seed=list(range(len(x))), **options)


def integrated_smooth(model: Counted, x: Tensor, baseline: Tensor, sigma: float) -> tuple[Tensor, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # completeness of a sampled path
        found = baselines.integrated_hessians(
            model, x, baselines=baseline, of="smooth", sigma=sigma, n_calls=40, n_steps=PATH // 2
        )
    return _read(found)


def finite_differences(model: Counted, x: Tensor, step: float) -> Exact:
    """Central differences of the network's values: gradient and Hessian, 2d² + 1 forward passes a point."""
    eye = step * torch.eye(FEATURES)
    corners = [eye[i] * a + eye[j] * b for i, j in combinations(range(FEATURES), 2) for a in (1, -1) for b in (1, -1)]
    moves = torch.stack([torch.zeros(FEATURES), *eye, *-eye, *corners])
    with torch.no_grad():
        values = torch.stack([model(point + moves) for point in x]).double()  # (P, 1 + 2d + 4 pairs)
    centre, up, down = values[:, :1], values[:, 1 : 1 + FEATURES], values[:, 1 + FEATURES : 1 + 2 * FEATURES]
    mixed = values[:, 1 + 2 * FEATURES :].reshape(len(x), -1, 4) @ torch.tensor([1.0, -1.0, -1.0, 1.0]).double()
    hessian = torch.diag_embed((up - 2 * centre + down) / step**2)
    hessian[:, I, J] = hessian[:, J, I] = mixed / (4 * step**2)
    passes = len(moves) / 2
    return Exact.make(x, values[:, 0], (up - down) / (2 * step), hessian, n_passes=passes, method="finite differences")


def load_shapiq() -> Any:
    """shapiq, looked for outside this folder: numba, below it, asks for a `coverage` that is not the one in here."""
    here = Path(__file__).resolve().parent
    searched = sys.path[:]
    sys.path[:] = [p for p in searched if Path(p or ".").resolve() != here]
    try:
        return importlib.import_module("shapiq")
    finally:
        sys.path[:] = searched


def shapley(index: str, budget: int | None) -> Explain:
    """Pairs of an index of shapiq for the game in which absent features are at the baseline."""

    def explain(model: Counted, x: Tensor, baseline: Tensor, chosen: dict[str, float]) -> tuple[Tensor, float]:
        shapiq = load_shapiq()
        tables, used = [], 0
        for number, point in enumerate(x):

            def game(sets: np.ndarray, point: Tensor = point) -> np.ndarray:
                nonlocal used
                used += len(sets)
                with torch.no_grad():
                    return model(torch.where(torch.as_tensor(sets, dtype=torch.bool), point, baseline)).double().numpy()

            if budget is None:
                found = shapiq.ExactComputer(game, FEATURES)(index, order=2)
            else:
                choose = importlib.import_module("shapiq.explainer.configuration").setup_approximator
                found = choose("auto", index, 2, FEATURES, random_state=number).approximate(budget, game)
            tables.append(torch.from_numpy(found.get_n_order_values(2)))
        return torch.stack(tables), used / len(x) / 2

    return explain


def methods() -> list[Method]:
    """All that can be run here."""
    found = [
        Method("SmoothHess", lambda m, x, b, c: _read(smooth(m, x, c["sigma"])), True),
        Method("SmoothHess, 64 calls", lambda m, x, b, c: _read(smooth(m, x, c["sigma"], n_calls=64)), True),
        Method("SmoothHess, 4096 calls", lambda m, x, b, c: _read(smooth(m, x, c["sigma"], n_calls=4096)), True),
        Method("SoftPlus Hessian", lambda m, x, b, c: _read(baselines.softplus(m, x, beta=c["beta"])), True),
        Method(
            "Gradient-NID",
            lambda m, x, b, c: _read(baselines.gradient_nid(m, x, of="softplus", beta=c["beta"])),
            True,
            signed=False,
        ),
        Method("finite differences", lambda m, x, b, c: _read(finite_differences(m, x, c["step"])), True),
        Method(
            "Integrated Hessians, SoftPlus",
            lambda m, x, b, c: _read(
                baselines.integrated_hessians(
                    m, x, baselines=b, of="softplus", beta=c["beta"], n_steps=PATH, tolerance=math.inf
                )
            ),
            False,
        ),
        Method("Integrated Hessians, smooth", lambda m, x, b, c: integrated_smooth(m, x, b, c["sigma"]), False),
    ]
    if importlib.util.find_spec("shapiq") is None:
        print("shapiq is not installed (pip install smoothhess[bench]): k-SII and STII are left out.", file=sys.stderr)
        return found
    load_shapiq()  # now, so that no method is charged for it
    return [
        *found,
        Method("k-SII", shapley("k-SII", None), False),
        Method("STII", shapley("STII", None), False),
        Method(f"k-SII, {BUDGET} coalitions", shapley("k-SII", BUDGET), False),
        Method(f"STII, {BUDGET} coalitions", shapley("STII", BUDGET), False),
    ]
