"""The two-dimensional networks, trained once and stored."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paper.cells import Cells
from paper.datasets import Split, plane_grid
from paper.gauss_newton import GaussNewton, refine
from paper.networks import MLP
from paper.options import Options
from paper.training import Checkpoint, Recipe, mean_score, shortened, train
from smoothhess.model.weight_files import load_weights, save_weights

__all__ = ["Trained", "open_cells", "stages", "trained"]


class _FullPrecision(MLP):
    """An MLP in float32: the trainer's bfloat16 on a GPU is too coarse for an error of 1e-4 of values up to 48."""

    def forward(self, x: Tensor) -> Tensor:
        """The outputs, (B, sizes[-1])."""
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x)


@dataclass(frozen=True, eq=False)
class Trained:
    """A two-dimensional network, in eval mode, and the result of its training."""

    network: nn.Module
    n_steps: int
    mse: float
    planned: int | None = None  # steps of the full recipe, if the training was stopped before

    @property
    def in_double(self) -> nn.Module:
        """The same network in float64."""
        return copy.deepcopy(self.network).double()

    @property
    def words(self) -> str:
        """Steps and error, for tables."""
        share = "" if self.planned is None else f" of {self.planned}"
        return f"{self.n_steps}{share} steps, mean squared error {self.mse:.2g}"

    @property
    def caption(self) -> str:
        """The same, short enough for a figure."""
        return "network: " + self.words.replace("mean squared error", "MSE")


def trained(
    name: str,
    target: Callable[[Tensor], Tensor],
    recipe: Recipe,
    options: Options,
    sizes: tuple[int, ...] = (2, 500, 300, 250, 250, 250, 1),
    points: Tensor | None = None,
    refinement: GaussNewton | None = None,
) -> Trained:
    """Return the network `name` trained on `target` at `points` (the paper's grid if None), or the stored one.

    With `refinement`, Gauss-Newton steps at the same points follow. Weights and the state of an unfinished training are
    files in `options.weights`, so nothing is trained twice. With `options.steps` the training stops there, with the
    weights that the full training has at that step.
    """
    total = recipe.n_steps + (0 if refinement is None else refinement.n_steps)
    name += "" if refinement is None else "-refined"
    kind, planned, steps = f"{name}-{total}-steps", None, total
    if options.steps is not None and options.steps != total:
        if options.steps > total:
            raise ValueError(f"--steps must be at most {total}, all of them, got {options.steps}.")
        kind, planned, steps = f"{name}-{options.steps}-of-{total}-steps", total, options.steps
    refining = max(0, steps - recipe.n_steps)
    recipe = replace(recipe, n_steps=steps - refining)
    path = options.weights / f"{kind}-seed-{options.seed}.safetensors"
    with torch.random.fork_rng(devices=[]):  # layers draw their initial weights from the global generator
        torch.manual_seed(options.seed)
        network = _FullPrecision(sizes)
    if path.exists():
        notes = load_weights(network, path)
        return Trained(network.to(options.device).eval(), int(notes["steps"]), float(notes["mse"]), planned)
    points = plane_grid() if points is None else points
    data = Split(points, target(points))
    checkpoint = Checkpoint.of(path)
    training = train(
        network,
        data,
        recipe,
        seed=options.seed,
        checkpoint=checkpoint,
        device=options.device,
        show_progress=options.show_progress,
    )
    mse = training.scores["train"]
    state = path.with_name(path.name + ".gauss-newton.safetensors")
    if refinement is not None and refining:
        refine(
            network,
            data,
            refinement,
            n_steps=refining,
            seed=options.seed,
            checkpoint=state,
            device=options.device,
            show_progress=options.show_progress,
        )
        mse = mean_score(network, data, recipe.score)
    save_weights(network, path, run=name, seed=str(options.seed), steps=str(steps), mse=repr(mse))
    for unfinished in (checkpoint.path, state):
        unfinished.unlink(missing_ok=True)
    return Trained(network, steps, mse, planned)


def stages(
    published: Recipe, refined: tuple[Recipe, GaussNewton], quick_steps: int, options: Options
) -> tuple[Recipe, GaussNewton | None]:
    """The training that the options choose: the paper's, or with `--refined` two stages; short ones with `--quick`."""
    if not options.refined:
        return shortened(published, quick_steps) if options.quick else published, None
    first, second = refined
    return (shortened(first, 500), replace(second, n_steps=30)) if options.quick else refined


def open_cells(folder: Path, options: Options, fitted: Trained, **settings: Any) -> Cells:
    """The cells of an experiment; the settings include the network's error, so that cells of another network raise."""
    network = {"seed": options.seed, "steps": fitted.n_steps, "mean squared error": float(f"{fitted.mse:.6g}")}
    return Cells(folder / "cells", network | settings)
