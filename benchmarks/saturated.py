"""Why some printed attack rates are weaker than ours at large radii: predictions that are almost certain.

    python benchmarks/saturated.py --data DIR                 seven minutes on two cores

The softmax of a confident prediction is 1 up to rounding, and its gradient almost zero. Two tables, on the authors'
MNIST network and the first 400 test images, of the per cent of predictions that an attack leaves as they were:

- G, the step against the gradient of the softmax: by autograd in float32, where p_c (1 − p_c) is made of what rounding
  left; in float64; and by the log-odds of the class, whose gradient is parallel and does not cancel.
- H+G and SP H+G at the published β, exact minima in the ball, if images are left where they are whose gradient is
  shorter than a threshold, as a solver leaves them that takes so small an objective for solved.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from paper.curvature import softened
from paper.datasets import mnist
from paper.networks import image_mlp
from paper.published import published
from smoothhess.baselines.softplus import Softplus
from smoothhess.model.weight_files import load_weights
from smoothhess.result.hessian_forms import spectrum_of

IMAGES, RADII = 400, (0.25, 0.5, 0.75, 1.25, 1.75)
THRESHOLDS = (0.0, 1e-7, 1e-6, 2.4e-6, 1e-5)
BATCH_SIZE = 50  # images whose Hessians are held at once


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


def downhill(gradient: Tensor, radius: float) -> Tensor:
    """Made in float64, so that a tiny gradient is a direction too."""
    flat = gradient.double().flatten(1)
    return -radius * flat / flat.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)


@torch.no_grad()
def unchanged(network: nn.Module, x: Tensor, step: Tensor, target: Tensor) -> Tensor:
    """Which predictions stay as they were."""
    return network(x + step.reshape(x.shape).to(x)).argmax(1) == target


def second_order(
    exact: nn.Module, x: Tensor, target: Tensor, beta: float | None, radius: float
) -> tuple[Tensor, Tensor]:
    """Exact steps of second order, and the lengths of the gradients."""
    form = None if beta is None else Softplus(beta)
    result = softened(exact, x, target, form, probability=True)
    gradient, steps = result.gradient.flatten(1), []
    for index in torch.arange(len(x)).split(BATCH_SIZE):
        steps.append(spectrum_of(gradient[index], result[index.tolist()].hessian).minimize(radius).flatten(1))
    return torch.cat(steps), gradient.norm(dim=1)


def printed(metric: str, method: str) -> list[float | None]:
    cell = {"dataset": "MNIST", "network": "mlp5", "function": "softmax", "method": method}
    found = [published(metric=metric, epsilon=radius, **cell) for radius in RADII]
    return [None if f is None else f.value for f in found]


def show(name: str, rates: list[float | None]) -> None:
    print(f"| {name} | " + " | ".join("–" if r is None else f"{r:.4g}" for r in rates) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("SMOOTHHESS_DATA"))
    options = parser.parse_args()
    if not options.data:
        parser.error("expected --data DIR (or SMOOTHHESS_DATA).")
    network = image_mlp().eval()
    load_weights(network, Path(options.data) / "authors" / "MNIST.pth")
    exact = image_mlp().double().eval()
    exact.load_state_dict({name: value.double() for name, value in network.state_dict().items()})
    x = mnist(options.data).test.inputs[:IMAGES]
    target = network(x).argmax(1)
    head = " | ".join(f"ε = {radius:g}" for radius in RADII) + " |\n|" + "---|" * (len(RADII) + 1)

    print(f"| G, gradient of | {head}")
    for name, gradient in {
        "softmax, float32": softmax_gradient(network, x, target),
        "softmax, float64": softmax_gradient(exact, x.double(), target),
        "log-odds, float32": log_odds_gradient(network, x, target),
    }.items():
        stays = [unchanged(network, x, downhill(gradient, radius), target) for radius in RADII]
        show(name, [100 * float(s.double().mean()) for s in stays])
    show("published", printed("attack_posthoc_accuracy", "G"))

    for method in ("H+G", "SP H+G"):
        betas = printed("attack_smoothing", method) if method == "SP H+G" else [None] * len(RADII)
        found = []
        for radius, beta in zip(RADII, betas, strict=True):
            step, length = second_order(exact, x.double(), target, beta, radius)
            found.append((unchanged(network, x, step, target), length))
        print(f"\n| {method}, left alone where ∣∇p∣ < | {head}")
        for threshold in THRESHOLDS:
            rates = [100 * float((stays | (length < threshold)).double().mean()) for stays, length in found]
            show(f"{threshold:g}", [*rates])
        show("published", printed("attack_posthoc_accuracy", method))
    print(
        f"\n*{platform.machine()} CPU, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{time.strftime('%Y-%m-%d')}; `python benchmarks/saturated.py --data DIR`*"
    )


if __name__ == "__main__":
    main()
