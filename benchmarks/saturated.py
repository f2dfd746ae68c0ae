"""Why the printed attack by the plain gradient is weaker at large radii: a saturated softmax in float32.

    python benchmarks/saturated.py --data DIR

The softmax of a confident prediction is 1 up to rounding, and its gradient p_c (1 − p_c) … is made of what rounding
left. Three ways to the same direction on the authors' MNIST network, first 400 test images: autograd through
`softmax` in float32 and in float64, and the log-odds of the class, whose gradient is parallel and does not cancel.
Printed are the per cent of predictions that a step of length ε against it leaves as they were.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from smoothhess.reproduce.datasets import mnist
from smoothhess.reproduce.networks import image_mlp
from smoothhess.reproduce.published import published
from smoothhess.reproduce.weights import load_weights

IMAGES, RADII = 400, (0.25, 0.5, 0.75, 1.25, 1.75)


def softmax_gradient(network: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    probability = network(leaf).softmax(1).gather(1, target[:, None])
    return torch.autograd.grad(probability.sum(), leaf)[0]


def log_odds_gradient(network: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    scores = network(leaf)
    own = nn.functional.one_hot(target, scores.shape[1]).bool()
    odds = scores[own] - scores.masked_fill(own, -torch.inf).logsumexp(1)
    return torch.autograd.grad(odds.sum(), leaf)[0]


@torch.no_grad()
def unchanged(network: nn.Module, x: Tensor, gradient: Tensor, target: Tensor) -> list[float]:
    """Per cent at each radius; directions are made in float64, so that a tiny gradient is a direction too."""
    flat = gradient.double().flatten(1)
    unit = flat / flat.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    steps = [(radius * unit).reshape(x.shape).to(x) for radius in RADII]
    return [100 * float((network(x - step).argmax(1) == target).double().mean()) for step in steps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("SMOOTHHESS_DATA"))
    options = parser.parse_args()
    if not options.data:
        parser.error("wanted --data DIR (or SMOOTHHESS_DATA).")
    network = image_mlp().eval()
    load_weights(network, Path(options.data) / "authors" / "MNIST.pth")
    exact = image_mlp().double().eval()
    exact.load_state_dict({name: value.double() for name, value in network.state_dict().items()})
    x = mnist(options.data).test.inputs[:IMAGES]
    target = network(x).argmax(1)
    rows = {
        "softmax, float32": softmax_gradient(network, x, target),
        "softmax, float64": softmax_gradient(exact, x.double(), target),
        "log-odds, float32": log_odds_gradient(network, x, target),
    }
    print("| gradient of | " + " | ".join(f"ε = {radius:g}" for radius in RADII) + " |\n|" + "---|" * (len(RADII) + 1))
    for name, gradient in rows.items():
        print(f"| {name} | " + " | ".join(f"{r:.2f}" for r in unchanged(network, x, gradient, target)) + " |")
    cell = {"metric": "attack_posthoc_accuracy", "dataset": "MNIST", "network": "mlp5", "function": "softmax"}
    found = [published(**cell, method="G", epsilon=radius) for radius in RADII]
    print("| published | " + " | ".join("–" if f is None else f"{f.value:g}" for f in found) + " |")
    print(
        f"\n*{platform.machine()} CPU, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{time.strftime('%Y-%m-%d')}; `python benchmarks/saturated.py --data DIR`*"
    )


if __name__ == "__main__":
    main()
