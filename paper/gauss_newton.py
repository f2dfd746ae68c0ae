"""Gauss-Newton steps with momentum: the second stage of the training of a two-dimensional network.

A step solves the damped least-squares problem of the linearised network on a batch of N examples. With the residuals
r = y − f(x) and the Jacobian J (N, parameters), it is

    d ← μd + Jᵀ(JJᵀ + λI)⁻¹(r − μJd),      θ ← θ + ηd,

so the matrix to factorise is N × N (SPRING: Goldshlager, Abrahamsen and Lin 2024). For linear layers with inputs A
and gradients B with respect to their outputs, JJᵀ is the sum over layers of (AAᵀ + 1) ∘ (BBᵀ); J is never formed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import trange

from paper.datasets import Split
from paper.networks import MLP
from smoothhess.model.weight_files import read_weights, save_tensors

__all__ = ["GaussNewton", "refine"]

_EVERY = 50  # steps between two checkpoints


@dataclass(frozen=True)
class GaussNewton:
    """How to refine: η falls from `rate` to `final_rate` as a cosine; λ is `damping` times the mean of diag(JJᵀ)."""

    n_steps: int
    batch_size: int
    rate: float
    final_rate: float
    damping: float
    momentum: float = 0.9

    def rate_at(self, step: int) -> float:
        """The factor η of a step.

        >>> recipe = GaussNewton(4, 10, rate=0.5, final_rate=0.1, damping=1e-3)
        >>> [round(recipe.rate_at(step), 3) for step in (0, 2, 4)]
        [0.5, 0.3, 0.1]
        """
        share = (1 + math.cos(math.pi * step / self.n_steps)) / 2
        return self.final_rate + (self.rate - self.final_rate) * share


def refine(
    network: MLP,
    data: Split,
    recipe: GaussNewton,
    *,
    n_steps: int | None = None,
    seed: int = 0,
    checkpoint: Path | None = None,
    device: torch.device | str = "cpu",
    show_progress: bool = False,
) -> None:
    """Reduce the squared error of a ReLU network with one output, in place, from its current weights.

    An interrupted refinement resumes from the file `checkpoint`. The examples of a step depend only on (seed, step).

    Args:
        network: The network; it ends on `device` in eval mode.
        data: All examples; each step draws `recipe.batch_size` of them.
        recipe: Steps, factors and damping.
        n_steps: Stop after this many steps of the schedule; all of them if None.
        seed: Determines the batches.
        checkpoint: File of the unfinished state; none is written if None.
        device: Where to compute.
        show_progress: Whether to show a progress bar.

    Raises:
        FloatingPointError: If the residuals are not finite.
        ValueError: If the checkpoint is of another recipe or seed.

    >>> from paper.datasets import plane_grid
    >>> points = plane_grid(0.25)
    >>> data = Split(points, points.abs().sum(-1))
    >>> with torch.random.fork_rng():
    ...     _ = torch.manual_seed(0)
    ...     network = MLP((2, 20, 20, 1))
    >>> refine(network, data, GaussNewton(40, 100, rate=0.5, final_rate=0.05, damping=1e-3))
    >>> float((network(points)[:, 0] - data.targets).detach().square().mean()) < 1e-3
    True
    """
    network.to(device).eval()
    layers = [layer for layer in network.f if isinstance(layer, nn.Linear)]
    state, steps = _Steps(layers), recipe.n_steps if n_steps is None else n_steps
    identity = json.dumps(asdict(recipe) | {"seed": seed}, sort_keys=True)
    start = 0
    if checkpoint is not None and checkpoint.exists():
        start = state.load(checkpoint, identity)
    inputs, targets = data.inputs.to(device), data.targets.to(device)
    for step in trange(start, steps, initial=start, total=steps, disable=not show_progress):
        generator = torch.Generator().manual_seed(seed * 2**31 + step)
        rows = torch.randint(len(data), (recipe.batch_size,), generator=generator).to(device)
        state.step(inputs[rows], targets[rows], recipe, recipe.rate_at(step))
        if checkpoint is not None and ((step + 1) % _EVERY == 0 or step + 1 == steps):
            state.save(checkpoint, identity, step + 1)


class _Steps:
    """The layers of a network with the last direction d of each."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.weights = [layer.weight.data for layer in layers]
        self.biases = [layer.bias.data for layer in layers]
        self.along_weights = [torch.zeros_like(weight) for weight in self.weights]
        self.along_biases = [torch.zeros_like(bias) for bias in self.biases]

    def step(self, x: Tensor, y: Tensor, recipe: GaussNewton, rate: float) -> None:
        """One step on a batch: x (N, fan_in), y (N,)."""
        values, inputs, gradients = self._passes(x)  # (N,), L × (N, fan_in), L × (N, fan_out)
        residual = y - values
        if not bool(residual.isfinite().all()):
            raise FloatingPointError("the residuals are not finite; use a smaller rate or more damping")
        kernel = x.new_zeros(len(x), len(x))  # JJᵀ
        moved = x.new_zeros(len(x))  # Jd
        for a, b, weight, bias in zip(inputs, gradients, self.along_weights, self.along_biases, strict=True):
            kernel += (a @ a.T + 1) * (b @ b.T)
            moved += ((a @ weight.T + bias) * b).sum(1)
        kernel.diagonal().add_(recipe.damping * kernel.diagonal().mean())
        factor = torch.linalg.cholesky(kernel)
        found = torch.cholesky_solve((residual - recipe.momentum * moved)[:, None], factor)  # (N, 1)
        for k, (a, b) in enumerate(zip(inputs, gradients, strict=True)):
            scaled = found * b
            self.along_weights[k].mul_(recipe.momentum).add_(scaled.T @ a)
            self.along_biases[k].mul_(recipe.momentum).add_(scaled.sum(0))
            self.weights[k].add_(self.along_weights[k], alpha=rate)
            self.biases[k].add_(self.along_biases[k], alpha=rate)

    def _passes(self, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The outputs, the inputs of each layer, and the gradients of each example with respect to its outputs."""
        inputs = [x]
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            inputs.append((inputs[-1] @ weight.T + bias).clamp_min(0))
        values = (inputs[-1] @ self.weights[-1].T + self.biases[-1])[:, 0]
        gradients = [x.new_ones(len(x), 1)]
        for weight, active in zip(self.weights[:0:-1], inputs[:0:-1], strict=True):
            gradients.append((gradients[-1] @ weight) * (active > 0))
        return values, inputs, gradients[::-1]

    def _tensors(self) -> dict[str, Tensor]:
        kinds = {
            "weight": self.weights,
            "bias": self.biases,
            "along_weight": self.along_weights,
            "along_bias": self.along_biases,
        }
        return {f"{kind}.{k}": tensor for kind, tensors in kinds.items() for k, tensor in enumerate(tensors)}

    def save(self, path: Path, identity: str, step: int) -> None:
        """Write everything that the next step depends on."""
        save_tensors(self._tensors(), path, {"recipe": identity, "step": str(step)})

    def load(self, path: Path, identity: str) -> int:
        """Restore the state and return the number of steps done."""
        stored, notes = read_weights(path)
        if notes.get("recipe") != identity:
            raise ValueError(
                f"{path}: expected a checkpoint of {identity}, got {notes.get('recipe')}. "
                "Pass another path to start over."
            )
        for name, tensor in self._tensors().items():
            tensor.copy_(stored[name])
        return int(notes["step"])
