"""The numbers that the paper prints, for comparison.

They are the numbers in the tables of Torop et al., "SmoothHess: ReLU Network Feature Interactions via Stein's Lemma",
NeurIPS 2023, in published.csv in the folder of this file: one row for each number, as printed; `note` describes known
errors.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources

__all__ = ["SOURCE", "Published", "published"]

SOURCE = (
    'A. Torop, A. Masoomi, D. Hill, K. Kose, S. Ioannidis, J. Dy: "SmoothHess: ReLU Network Feature Interactions via '
    "Stein's Lemma\", NeurIPS 2023"
)
_OTHER_NAMES = {"fashionmnist": "fmnist", "fashion-mnist": "fmnist", "neuron": "penultimate neuron"}
_NAMES = ("metric", "dataset", "network", "function")


@dataclass(frozen=True)
class Published:
    """A printed number; `unit` is mse, percent, sigma2 or beta, `note` is empty unless it has a known error."""

    value: float
    note: str
    unit: str
    n_points: int


def published(
    *, metric: str, dataset: str, network: str, function: str, epsilon: float, method: str
) -> Published | None:
    """Return the printed number of a cell, or None if the paper has none for that radius and method.

    Args:
        metric: "pmse_mean", "pmse_std", "pmse_smoothing" (the selected σ² or β), "attack_posthoc_accuracy" (per cent of
            predictions unchanged) or "attack_smoothing".
        dataset: "MNIST", "FMNIST" (or "FashionMNIST") or "CIFAR10"; upper and lower case are the same.
        network: "mlp5", "resnet18" or "resnet101".
        function: "logit", "neuron" or "softmax".
        epsilon: radius of the ball.
        method: "SH+SG", "SG", "SP H+G", "SP G", "SW H+G", "SW G", "H+G", "G" or "random".

    >>> published(metric="pmse_mean", dataset="MNIST", network="mlp5", function="logit", epsilon=0.5, method="SG")
    Published(value=4.1e-05, note='', unit='mse', n_points=200)
    """
    key = tuple(_plain(name) for name in (metric, dataset, network, function))
    for place, (column, name) in enumerate(zip(_NAMES, key, strict=True)):
        known = {cell[place] for cell in _cells()}
        if name not in known:
            raise ValueError(f"{column}: expected one of {', '.join(sorted(known))}, got {name!r}.")
    for radius, printed in _cells().get(key, {}).get(method, {}).items():
        if math.isclose(radius, epsilon):
            return printed
    return None


def _plain(name: str) -> str:
    return _OTHER_NAMES.get(name.lower(), name.lower())


@cache
def _cells() -> dict[tuple[str, ...], dict[str, dict[float, Published]]]:
    """(metric, dataset, network, function) → method → radius → number."""
    cells: dict[tuple[str, ...], dict[str, dict[float, Published]]] = {}
    text = resources.files("paper").joinpath("published.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        found = Published(float(row["value"]), row["note"], row["unit"], int(row["n_points"]))
        methods = cells.setdefault(tuple(_plain(row[name]) for name in _NAMES), {})
        methods.setdefault(row["method"], {})[float(row["epsilon"])] = found
    return cells
