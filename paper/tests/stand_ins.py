"""Small data sets and networks in the place of MNIST and CIFAR10."""

from functools import partial

import torch
from torch import Generator, nn
from torch.nn import functional
from torch.optim import SGD

from paper.classifiers import Classifier, Readout, Source, _last_relu, _linear
from paper.datasets import ImageData, Split
from paper.networks import MLP, resnet18
from paper.training import Recipe, correct, milestones

N_CLASSES = 4
SHAPE = (1, 3, 4)


def blobs(n, shape=SHAPE, seed=0):
    """Images of a class are noise around one pattern; of 32 × 32 pixels, with edges that segments can follow."""
    rng = Generator().manual_seed(seed)
    patterns = torch.rand(N_CLASSES, *shape, generator=Generator().manual_seed(99))
    if shape[-1] == 32:
        patterns = functional.interpolate(patterns[..., :4, :4], size=shape[-2:])
    labels = torch.arange(n) % N_CLASSES
    noise = 0.15 if shape[-1] != 32 else 0.03
    return Split((patterns[labels] + noise * torch.randn(n, *shape, generator=rng)).clamp(0, 1), labels)


def images(data=None, shape=SHAPE, classes=("zero", "one", "two", "three")):
    return ImageData("blobs", blobs(200, shape, 1), blobs(40, shape, 2), blobs(60, shape, 3), classes, "made here")


RECIPE = Recipe(
    n_steps=60,
    batch_size=50,
    optimizer=partial(SGD, momentum=0.9),
    rate=milestones(0.2, (40,)),
    loss=functional.cross_entropy,
    score=correct,
)


def mlp_source(key="mnist", published="MNIST", dataset="mnist", **options):
    return Source(
        key,
        key.upper(),
        dataset,
        published,
        "mlp5",
        images,
        partial(MLP, (12, 16, 16, N_CLASSES)),
        _last_relu,
        **{"run": f"{key}-mlp", "recipe": RECIPE, **options},
    )


def objects(data=None):
    return images(shape=(3, 32, 32), classes=("automobile", "frog", "dog", "cat"))


def resnet_source(**options):
    return Source(
        "cifar10",
        "CIFAR10",
        "cifar10",
        "CIFAR10",
        "resnet18",
        objects,
        partial(resnet18, 2, N_CLASSES),
        _linear,
        **{"run": "cifar10-resnet18", "recipe": RECIPE, "trains_on_cpu": False, **options},
    )


def untrained(network: nn.Module, layer: nn.Module, data: ImageData, **options):
    """A classifier with whatever weights it has."""
    defaults = {"key": "blobs", "title": "blobs", "dataset": "MNIST", "architecture": "mlp5", "words": "untrained"}
    readout = Readout(network.eval(), layer, len(data.classes)).eval()
    return Classifier(**{**defaults, **options}, readout=readout, data=data, device="cpu")
