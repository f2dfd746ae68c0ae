"""The image classifiers of the tables: where their weights come from, and which outputs are explained.

A network is loaded from the folder of trained weights if it is there, else from a file in the folder of the data sets,
else it is trained by the paper's recipe and stored. Nothing is trained twice, and an interrupted training is resumed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from paper import datasets, networks, training
from paper.datasets import ImageData
from paper.options import Options
from paper.training import Checkpoint, Recipe, mean_score, shortened, train
from smoothhess.model.weight_files import load_weights, save_weights

__all__ = ["CLASSIFIERS", "RESNET101", "Classifier", "NoWeightsError", "Readout", "Source", "selected"]

NEURON_CLASS = 3  # three, dress, cat: the neuron is the one most active on average over the training images of it
QUICK_STEPS = 1_200
SCORED = 10_000  # test images for the reported accuracy; on a CPU, of convolutional networks,
SCORED_SLOWLY = 200
PROBED = 5_000  # training images that a neuron is chosen from; likewise
PROBED_SLOWLY = 300


class NoWeightsError(FileNotFoundError):
    """Weights that are neither given nor can be trained here; the message says what to do."""


class Readout(nn.Module):
    """The explained outputs of a classifier, concatenated: its scores, then its penultimate units.

    The units are the input of `layer`: for the last ReLU of an MLP the pre-activations, for the linear layer of a
    ResNet the pooled features. One pass computes both functions of the paper, and a target selects one of them.

    >>> network = networks.MLP((4, 8, 3))
    >>> readout = Readout(network, network.f[-2], 3).eval()
    >>> readout(torch.zeros(2, 4)).shape, readout.unit(5)
    (torch.Size([2, 11]), 8)
    """

    def __init__(self, network: nn.Module, layer: nn.Module, n_classes: int) -> None:
        super().__init__()
        self.network = network
        self.n_classes = n_classes
        self._layer = [layer]  # in a list: it is a part of `network` already

    def unit(self, index: int) -> int:
        """Return the target of this penultimate unit."""
        return self.n_classes + index

    def forward(self, x: Tensor) -> Tensor:
        """(N, classes + units)."""
        seen: list[Tensor] = []

        def before(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            seen.append(arguments[0].clone())  # a ReLU may work in place

        handle = self._layer[0].register_forward_pre_hook(before)
        try:
            scores = self.network(x)
        finally:
            handle.remove()
        return torch.cat([scores, seen[0].flatten(1)], 1)


@dataclass(frozen=True, eq=False)
class Classifier:
    """A trained network in eval mode on the device of the run, with its data."""

    key: str  # "mnist-authors", …: names the folder of its cells
    title: str  # for tables: "MNIST (authors)"
    dataset: str  # as the paper's tables call it
    architecture: str  # as in the paper's tables: mlp5, resnet18, resnet101
    words: str  # where the weights come from, and their accuracy
    readout: Readout
    data: ImageData
    device: str

    @property
    def network(self) -> nn.Module:
        """Scores (N, classes)."""
        return self.readout.network

    @property
    def is_convolutional(self) -> bool:
        """Whether the network is convolutional, so that a pass costs a thousand times that of an MLP."""
        return any(isinstance(module, nn.Conv2d) for module in self.network.modules())

    @property
    def rows(self) -> int | None:
        """Rows per forward pass; None: chosen from the memory of the device."""
        return 128 if self.is_convolutional and self.device == "cpu" else None

    @property
    def fingerprint(self) -> str:
        """Twelve letters that change with any weight."""
        digest = hashlib.sha256()
        for name, value in sorted(self.network.state_dict().items()):
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:12]

    def inputs(self, part: str, n: int) -> Tensor:
        """The first n images of "val" or "test", on the device."""
        split = getattr(self.data, part)
        return split.inputs[:n].to(self.device)

    @torch.no_grad()
    def predicted(self, inputs: Tensor) -> Tensor:
        """The predicted class of each input, (N,)."""
        return torch.cat([self.network(x).argmax(1) for x in inputs.split(self.rows or 4_096)])

    @torch.no_grad()
    def most_active_unit(self, of_class: int | None = None) -> int:
        """The penultimate unit with the largest mean over the training images, of one class or of all."""
        train = self.data.train
        images = train.inputs if of_class is None else train.inputs[train.targets == of_class]
        images = images[: PROBED_SLOWLY if self.rows else PROBED] if of_class is not None or self.rows else images
        total = torch.stack(
            [self.readout(x.to(self.device)).double().sum(0) for x in images.split(self.rows or 4_096)]
        ).sum(0)
        return int(total[self.readout.n_classes :].argmax())


@dataclass(frozen=True)
class Source:
    """How a classifier is obtained."""

    key: str
    title: str
    dataset: str  # on the command line: mnist, fmnist, cifar10
    published: str  # in the paper's tables
    architecture: str
    load: Callable[..., ImageData]
    build: Callable[[], nn.Module]
    penultimate: Callable[[nn.Module], nn.Module]  # the layer whose input are the units
    run: str | None = None  # name of the training, or None: the weights are given
    recipe: Recipe | None = None
    given: str | None = None  # file in the folder of the data sets
    trains_on_cpu: bool = True

    def classifier(self, options: Options) -> Classifier:
        """Load the network, or train and store it; NoWeightsError where neither is possible."""
        with torch.random.fork_rng(devices=[]):  # layers draw their initial weights from the global generator
            torch.manual_seed(options.seed)
            network = self.build()
        origin, notes = self._fill(network, options)
        data = _images(self.load, options.data)
        network.to(options.device).eval()
        readout = Readout(network, self.penultimate(network), len(data.classes)).eval()
        found = Classifier(
            self.key, self.title, self.published, self.architecture, origin, readout, data, options.device
        )
        return replace(found, words=f"{origin}, {_accuracy(found, notes)}")

    def _fill(self, network: nn.Module, options: Options) -> tuple[str, dict[str, str]]:
        """Load the weights into the network; return their origin and their metadata."""
        recipe, kept, given = self._recipe(options), self.path(options), _in_data_folder(options, self.given)
        if kept is not None and kept.exists():
            notes = load_weights(network, kept)
            return f"trained here, {notes.get('steps') or (recipe and recipe.n_steps)} steps", notes
        if given is not None and given.exists():
            return f"given weights, {given.name}", load_weights(network, given)
        if recipe is None or kept is None:
            raise NoWeightsError(f"{self.title}: no weights at {given}")
        if not self.trains_on_cpu and torch.device(options.device).type != "cuda":
            raise NoWeightsError(
                f"{self.title}: no weights at {kept}, and a CPU would take days to train it. On a GPU: "
                f"python -m paper.training {self.run} --data DIR --out {kept.name}"
            )
        return self._train(network, recipe, kept, options)

    def path(self, options: Options) -> Path | None:
        """Where its trained weights are stored; None where they can only be given."""
        recipe = self._recipe(options)
        if recipe is None:
            return None
        return options.weights / f"{self.run}-{recipe.n_steps}-steps-seed-{options.seed}.safetensors"

    def _recipe(self, options: Options) -> Recipe | None:
        quick = QUICK_STEPS if options.quick and self.trains_on_cpu else None
        n_steps = options.steps or quick
        return self.recipe if self.recipe is None or n_steps is None else shortened(self.recipe, n_steps)

    def _train(self, network: nn.Module, recipe: Recipe, path: Path, options: Options) -> tuple[str, dict[str, str]]:
        data = _images(self.load, options.data)
        checkpoint = Checkpoint.of(path)
        fitted = train(
            network,
            data.train,
            recipe,
            held_out={"val": data.val, "test": data.test},
            seed=options.seed,
            checkpoint=checkpoint,
            device=options.device,
            show_progress=options.show_progress,
        )
        scores = {name: repr(score) for name, score in fitted.scores.items()}
        save_weights(network, path, run=str(self.run), seed=str(options.seed), steps=str(fitted.n_steps), **scores)
        checkpoint.path.unlink(missing_ok=True)
        return f"trained here, {fitted.n_steps} steps", scores


def _in_data_folder(options: Options, name: str | None) -> Path | None:
    """Return the path of a file in the folder of the data sets."""
    return None if name is None else Path(options.data or os.environ.get("SMOOTHHESS_DATA") or ".") / name


@lru_cache(maxsize=1)
def _images(load: Callable[..., ImageData], data: Path | None) -> ImageData:
    """Load and cache the images: decoding sixty thousand of them takes as long as explaining some of them."""
    return load(data)


def _accuracy(found: Classifier, notes: dict[str, str]) -> str:
    if {"train", "val", "test"} <= notes.keys():
        shown = " / ".join(f"{100 * float(notes[part]):.2f}" for part in ("train", "val", "test"))
        return f"accuracy {shown} % (train / validation / test)"
    count = min(SCORED_SLOWLY if found.rows else SCORED, len(found.data.test))
    some = "" if count == len(found.data.test) else f" of the first {count} images"
    return f"test accuracy {100 * mean_score(found.network, found.data.test[:count]):.2f} %{some}"


def _last_relu(network: nn.Module) -> nn.Module:
    return [module for module in network.modules() if isinstance(module, nn.ReLU)][-1]


def _linear(network: nn.Module) -> nn.Module:
    return [module for module in network.modules() if isinstance(module, nn.Linear)][-1]


_MNIST = {"dataset": "mnist", "published": "MNIST", "architecture": "mlp5", "load": datasets.mnist}
_MLP = {"build": networks.image_mlp, "penultimate": _last_relu}
CLASSIFIERS: tuple[Source, ...] = (
    Source("mnist-authors", "MNIST (authors)", **_MNIST, **_MLP, given="authors/MNIST.pth"),
    Source("mnist", "MNIST", **_MNIST, **_MLP, run="mnist-mlp", recipe=training.IMAGE_MLP),
    Source(
        "fmnist",
        "FMNIST",
        "fmnist",
        "FMNIST",
        "mlp5",
        datasets.fashion_mnist,
        **_MLP,
        run="fashion-mnist-mlp",
        recipe=training.IMAGE_MLP,
    ),
    Source(
        "cifar10",
        "CIFAR10",
        "cifar10",
        "CIFAR10",
        "resnet18",
        datasets.cifar10,
        networks.resnet18,
        _linear,
        run="cifar10-resnet18",
        recipe=training.CIFAR10,
        given="resnet18_cifar10.safetensors",
        trains_on_cpu=False,
    ),
)
RESNET101 = Source(
    "cifar10-resnet101",
    "CIFAR10, ResNet-101",
    "cifar10",
    "CIFAR10",
    "resnet101",
    datasets.cifar10,
    networks.resnet101,
    _linear,
    run="cifar10-resnet101",
    recipe=training.CIFAR10,
    trains_on_cpu=False,
)


def selected(options: Options, sources: Sequence[Source] = CLASSIFIERS) -> list[Source]:
    """Return the sources of the requested data set, or all.

    >>> [source.key for source in selected(Options(Path("out"), dataset="mnist"))]
    ['mnist-authors', 'mnist']
    """
    chosen = [source for source in sources if options.dataset in (None, source.dataset)]
    if not chosen:
        known = ", ".join(dict.fromkeys(source.dataset for source in sources))
        raise ValueError(f"--dataset: expected one of {known}, got {options.dataset!r}.")
    return chosen
