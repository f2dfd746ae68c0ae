"""One trainer for every network, and the paper's settings. On the command line::

    python -m paper.training mnist-mlp --data DIR --out FILE

Order of the data, augmentation and dropout depend only on (seed, step). So a run that was interrupted and resumed from
its checkpoint gives the same numbers as one that was not.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, Optimizer, RMSprop
from tqdm import trange

from paper import datasets, networks
from paper.augmentation import paper_augmentation
from paper.datasets import Split
from paper.gauss_newton import GaussNewton
from paper.passes import Passes
from smoothhess.model.weight_files import read_weights, save_tensors, save_weights

__all__ = [
    "CIFAR10",
    "FOUR_QUADRANT",
    "FOUR_QUADRANT_REFINED",
    "IMAGE_MLP",
    "NESTED",
    "NESTED_REFINED",
    "Checkpoint",
    "Recipe",
    "Training",
    "mean_score",
    "shortened",
    "train",
]

AVERAGED = 100  # steps over which the loss of a run is averaged
LOOKED_AT = 50  # steps between two checks of the loss


def correct(outputs: Tensor, labels: Tensor) -> Tensor:
    """1 for each example whose largest logit is that of its label, else 0."""
    return (outputs.argmax(-1) == labels).float()


def squared_error(outputs: Tensor, values: Tensor) -> Tensor:
    """Squared error of each example; outputs are (B, 1), values (B,)."""
    return (outputs.squeeze(-1) - values).square()


def milestones(rate: float, steps: Sequence[int], factor: float = 0.1) -> Callable[[int], float]:
    """A learning rate that is multiplied by `factor` at each of the given steps.

    >>> [round(milestones(1.0, (10, 20))(step), 3) for step in (0, 9, 10, 25)]
    [1.0, 1.0, 0.1, 0.01]
    """
    return lambda step: rate * factor ** sum(step >= milestone for milestone in steps)


def warm_cosine(low: float, high: float, final: float, n_warm: int, n_steps: int) -> Callable[[int], float]:
    """A learning rate that rises from `low` to `high` in `n_warm` steps and falls to `final` as a cosine.

    >>> [round(warm_cosine(0.1, 0.5, 0.0, 4, 8)(step), 3) for step in (0, 2, 4, 6, 8)]
    [0.1, 0.3, 0.5, 0.25, 0.0]
    """

    def rate(step: int) -> float:
        if step < n_warm:
            return low + (high - low) * step / n_warm
        done = (step - n_warm) / (n_steps - n_warm)
        return final + (high - final) * (1 + math.cos(math.pi * done)) / 2

    return rate


@dataclass(frozen=True)
class Recipe:
    """How to train: `rate(step)` is the learning rate, `score` the reported score of each example."""

    n_steps: int
    batch_size: int
    optimizer: Callable[..., Optimizer]
    rate: Callable[[int], float]
    loss: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[Tensor, Tensor], Tensor]
    augment: Callable[[Tensor, Generator], Tensor] | None = None


def shortened(recipe: Recipe, n_steps: int) -> Recipe:
    """Return the same recipe with fewer steps and a proportionally shortened learning-rate schedule.

    >>> [round(shortened(FOUR_QUADRANT, 400).rate(step), 6) for step in (49, 50, 399)]
    [0.001, 0.0001, 1e-06]
    """
    ratio = recipe.n_steps / n_steps
    return changed(recipe, n_steps=n_steps, rate=lambda step: recipe.rate(round(step * ratio)))


def _mean_squared_error(outputs: Tensor, values: Tensor) -> Tensor:
    return squared_error(outputs, values).mean()


def _plane(n_steps: int, batch_size: int, steps: Sequence[int]) -> Recipe:
    rate = milestones(1e-3, steps)
    return Recipe(n_steps, batch_size, RMSprop, rate, _mean_squared_error, squared_error)


# 30 epochs of 50 000 images. The paper does not name the momentum; with 0.9 its accuracies are reached.
IMAGE_MLP = Recipe(
    n_steps=30 * 391,
    batch_size=128,
    optimizer=partial(SGD, momentum=0.9),
    rate=milestones(1e-2, (4_000, 8_000)),
    loss=functional.cross_entropy,
    score=correct,
)
# 55 epochs of 40 000 images, 5 of them warm-up. Optimiser and weight decay are not in the paper.
CIFAR10 = Recipe(
    n_steps=55 * 313,
    batch_size=128,
    optimizer=partial(SGD, momentum=0.9, weight_decay=5e-4),
    rate=warm_cosine(1e-2, 0.5, 1e-5, 5 * 313, 55 * 313),
    loss=functional.cross_entropy,
    score=correct,
    augment=paper_augmentation,
)
FOUR_QUADRANT = _plane(40_000, 128, (5_000, 10_000, 20_000))
NESTED = _plane(200_000, 64, (40_000, 80_000, 120_000, 160_000))
# Not in the paper: two stages with a smaller error at new points, for the same network, loss and examples.
_ADAM = Recipe(2_000, 256, Adam, warm_cosine(1e-3, 1e-3, 1e-4, 0, 2_000), _mean_squared_error, squared_error)
FOUR_QUADRANT_REFINED = (_ADAM, GaussNewton(400, 1_000, rate=0.5, final_rate=0.01, damping=3e-4))
NESTED_REFINED = (_ADAM, GaussNewton(1_000, 1_000, rate=0.4, final_rate=0.005, damping=1e-3))


@dataclass(frozen=True)
class Checkpoint:
    """The file from which an interrupted training resumes, written every `every` steps."""

    path: Path
    every: int = 1_000

    @staticmethod
    def of(weights: Path, every: int = 1_000) -> Checkpoint:
        """The checkpoint in the folder of the file that the trained weights are written to."""
        return Checkpoint(weights.with_name(weights.name + ".checkpoint.safetensors"), every)


@dataclass(frozen=True)
class Training:
    """Result of a training run: `loss` is the mean over its last 100 steps, `scores` are means by split."""

    n_steps: int
    loss: float
    scores: dict[str, float]
    seconds: float


def train(
    network: nn.Module,
    data: Split,
    recipe: Recipe,
    *,
    held_out: Mapping[str, Split] | None = None,
    seed: int = 0,
    checkpoint: Checkpoint | None = None,
    device: torch.device | str = "cpu",
    show_progress: bool = False,
) -> Training:
    """Train a network in place, from its current weights or from the checkpoint if that file exists.

    The network ends on `device` in eval mode. On CUDA it runs in bfloat16 and channels-last. The scores are those
    of the training data, without augmentation, and of every split in `held_out`. The global RNG does not move.

    >>> line = Split(torch.linspace(-1, 1, 50)[:, None], torch.linspace(-3, 3, 50))
    >>> recipe = Recipe(100, 10, SGD, milestones(0.5, (50,)), _mean_squared_error, squared_error)
    >>> train(nn.Linear(1, 1), line, recipe).scores["train"] < 1e-3
    True
    """
    started = time.perf_counter()
    device = torch.device(device)
    on_cuda = device.type == "cuda"
    network.to(device)
    if on_cuda:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = recipe.optimizer(network.parameters(), lr=recipe.rate(0))
    step, losses = 0, torch.zeros(0, device=device)
    if checkpoint is not None and checkpoint.path.exists():
        step, last = _resume(checkpoint.path, network, optimizer, recipe, seed)
        losses = torch.tensor(last, device=device)

    inputs, targets = data.inputs.to(device), data.targets.to(device)
    network.train()
    passes = Passes(network, recipe.loss, recipe.batch_size)
    steps = trange(step, recipe.n_steps, initial=step, total=recipe.n_steps, disable=not show_progress)
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        for step in steps:
            rows = _rows(len(data), recipe.batch_size, step, seed).to(device, non_blocking=True)
            batch = inputs[rows]
            if recipe.augment is not None:
                batch = recipe.augment(batch, Generator().manual_seed(_mix(seed, step, 1)))
            if on_cuda and batch.dim() == 4:
                batch = batch.to(memory_format=torch.channels_last)
            torch.manual_seed(_mix(seed, step, 2))  # for dropout
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(step)
            loss = passes(batch, targets[rows])
            optimizer.step()
            losses = torch.cat([losses[-(AVERAGED - 1) :], loss.float().reshape(1)])
            is_last = step + 1 == recipe.n_steps
            keep = checkpoint is not None and ((step + 1) % checkpoint.every == 0 or is_last)
            if keep or is_last or step % LOOKED_AT == 0:  # each check synchronises with the device
                if not bool(losses.isfinite().all()):
                    raise FloatingPointError(f"the loss is not finite at step {step}; lower the learning rate")
                steps.set_postfix(loss=f"{float(losses[-1]):.4g}")
            if checkpoint is not None and keep:
                _save(checkpoint.path, network, optimizer, step + 1, losses.tolist(), recipe, seed)
    network.eval()
    splits = {"train": data, **(held_out or {})}
    scores = {name: mean_score(network, split, recipe.score) for name, split in splits.items()}
    return Training(recipe.n_steps, float(losses.double().mean()), scores, time.perf_counter() - started)


@torch.no_grad()
def mean_score(network: nn.Module, split: Split, score: Callable[[Tensor, Tensor], Tensor] = correct) -> float:
    """Mean score (by default the accuracy) of a network in its current mode, on the device of its parameters."""
    device = next(network.parameters()).device
    total = 0.0
    for inputs, targets in zip(split.inputs.split(1_000), split.targets.split(1_000), strict=True):
        total += score(network(inputs.to(device)), targets.to(device)).sum().item()
    return total / len(split)


def _mix(*numbers: int) -> int:
    """Hash several numbers to a seed for the generator."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 6_364_136_223_846_793_005 + number + 1_442_695_040_888_963_407) % 2**63
    return mixed


def _rows(n_examples: int, batch_size: int, step: int, seed: int) -> Tensor:
    """Indices of the examples of a step: each epoch has a new permutation, and its last batch may be smaller."""
    epoch, batch = divmod(step, math.ceil(n_examples / batch_size))
    return _order(n_examples, _mix(seed, epoch, 0))[batch * batch_size : (batch + 1) * batch_size]


@lru_cache(maxsize=1)
def _order(n_examples: int, seed: int) -> Tensor:
    return torch.randperm(n_examples, generator=Generator().manual_seed(seed))


def _save(
    path: Path,
    network: nn.Module,
    optimizer: Optimizer,
    step: int,
    losses: list[float],
    recipe: Recipe,
    seed: int,
) -> None:
    """Write a checkpoint with everything that the next step depends on."""
    tensors = {f"network.{key}": value for key, value in network.state_dict().items()}
    for index, entries in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": value for key, value in entries.items() if value is not None}
    progress = {"step": step, "losses": losses, **_identity(network, recipe, seed)}
    save_tensors(tensors, path, {"training": json.dumps(progress)})


def _identity(network: nn.Module, recipe: Recipe, seed: int) -> dict[str, int]:
    """Properties that must agree between a checkpoint and the run that resumes it."""
    n_parameters = sum(parameter.numel() for parameter in network.parameters())
    return {
        "n_parameters": n_parameters,
        "n_steps": recipe.n_steps,
        "batch_size": recipe.batch_size,
        "seed": seed,
    }


def _resume(path: Path, network: nn.Module, optimizer: Optimizer, recipe: Recipe, seed: int) -> tuple[int, list[float]]:
    tensors, metadata = read_weights(path)
    progress = json.loads(metadata.get("training", "{}"))
    expected = _identity(network, recipe, seed)
    got = {key: progress.get(key) for key in expected}
    if got != expected:
        raise ValueError(f"{path}: expected a checkpoint of {expected}, got {got}. Pass another path to start over.")
    network.load_state_dict({k.removeprefix("network."): v for k, v in tensors.items() if k.startswith("network.")})
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, index, entry = key.split(".", 2)
            state.setdefault(int(index), {})[entry] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return progress["step"], progress["losses"]


def _plane_split(function: Callable[[Tensor], Tensor]) -> Split:
    points = datasets.plane_grid()
    return Split(points, function(points))


def _image_splits(load: Callable[..., datasets.ImageData], folder: Path | None) -> dict[str, Split]:
    images = load(folder)
    return {"train": images.train, "val": images.val, "test": images.test}


# Name on the command line: how to build the network, how to train it, and its data as a function of the folder.
_RUNS: dict[str, tuple[Callable[[], nn.Module], Recipe, Callable[[Path | None], dict[str, Split]]]] = {
    "mnist-mlp": (networks.image_mlp, IMAGE_MLP, partial(_image_splits, datasets.mnist)),
    "mnist-gelu-mlp": (networks.gelu_mlp, IMAGE_MLP, partial(_image_splits, datasets.mnist)),
    "mnist-vgg": (
        partial(networks.VGG, (16, 32), in_channels=1),
        IMAGE_MLP,
        partial(_image_splits, datasets.mnist),
    ),
    "fashion-mnist-mlp": (networks.image_mlp, IMAGE_MLP, partial(_image_splits, datasets.fashion_mnist)),
    "cifar10-resnet18": (networks.resnet18, CIFAR10, partial(_image_splits, datasets.cifar10)),
    "cifar10-resnet101": (networks.resnet101, CIFAR10, partial(_image_splits, datasets.cifar10)),
    "four-quadrant": (
        networks.plane_mlp,
        FOUR_QUADRANT,
        lambda _: {"train": _plane_split(datasets.four_quadrant)},
    ),
    "nested": (networks.plane_mlp, NESTED, lambda _: {"train": _plane_split(datasets.nested)}),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train a network of the paper and write its weights; an interrupted run is resumed."""
    parser = argparse.ArgumentParser(prog="python -m paper.training", description=main.__doc__)
    parser.add_argument("name", choices=sorted(_RUNS))
    parser.add_argument("--data", type=Path, help="folder of the data sets (default: SMOOTHHESS_DATA)")
    parser.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--steps", type=int, help="stop early (default: as in the paper)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)

    build, recipe, load = _RUNS[options.name]
    if options.steps is not None:
        recipe = changed(recipe, n_steps=options.steps)
    checkpoint = Checkpoint.of(options.out)
    try:
        splits = load(options.data)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            network = build()
        training = train(
            network,
            splits.pop("train"),
            recipe,
            held_out=splits,
            seed=options.seed,
            checkpoint=checkpoint,
            device=options.device,
            show_progress=True,
        )
    except (OSError, ValueError, FloatingPointError) as error:
        parser.exit(1, f"{error}\n")
    scores = {name: repr(score) for name, score in training.scores.items()}
    save_weights(network, options.out, run=options.name, seed=str(options.seed), **scores)
    checkpoint.path.unlink(missing_ok=True)
    words = ", ".join(f"{name} {score:.6g}" for name, score in training.scores.items())
    measure = "accuracy" if recipe.score is correct else "mean squared error"
    print(f"{options.name}: {measure} {words}; {training.n_steps} steps, {training.seconds:.0f} s → {options.out}")


if __name__ == "__main__":
    main()
