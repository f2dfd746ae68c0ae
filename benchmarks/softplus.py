"""Time of a SoftPlus Hessian beside torch.func.hessian of the same replaced network.

    OMP_NUM_THREADS=1 python benchmarks/softplus.py
    python benchmarks/softplus.py --device cuda --resnet

The network is the paper's MNIST MLP, 784-500-300-250-250-250-10, with random weights. Both sides start from the ReLU
network and end with (d, d) matrices, are warmed up, synchronised and timed in turn; the ratio is that of the medians.
Ours also gives f, the gradient and the checks. torch.func.hessian differentiates torch's own softplus. --resnet makes
the Hessian of a CIFAR10 ResNet-18 (random weights, d = 3072) for one input in one call, and compares some of its rows
with forward-over-reverse products.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from paper.networks import image_mlp, resnet18
from smoothhess import baselines
from smoothhess.curvature import activation_hooks

GOAL = 2.0  # times torch.func.hessian, at most
SHARP = 1e9  # torch's softplus is linear above this βz: never


def replaced(network: nn.Module, beta: float) -> Callable[[Tensor], Tensor]:
    """The network with torch's own softplus, logit 3 of one input."""
    soft = activation_hooks.replace(network, lambda z: functional.softplus(z, beta, SHARP))
    return lambda x: soft(x[None])[0, 3]


def seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def compare(n_inputs: int, beta: float, repeats: int, device: torch.device) -> list[str]:
    """Both sides in turn, after two rounds that are thrown away."""
    torch.manual_seed(0)
    network = image_mlp().eval().to(device)
    x = torch.rand(n_inputs, 784, device=device)
    one = torch.func.hessian(replaced(network, beta))

    def ours() -> Tensor:
        return baselines.softplus(network, x, target=3, beta=beta).hessian

    def theirs() -> Tensor:
        return one(x[0])[None] if n_inputs == 1 else torch.func.vmap(one)(x)

    sides = {"ours": ours, "torch.func": theirs}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 2):
        for name, work in sides.items():
            spent = seconds(work, device)
            if turn > 1:
                times[name].append(spent)
    apart = float(((ours() - theirs()).abs().max() / theirs().abs().max()).detach())
    mine, other = (statistics.median(times[name]) for name in sides)
    verdict = "yes" if mine <= GOAL * other else "NO"
    return [
        "| inputs | baselines.softplus, ms | torch.func.hessian, ms | ratio | largest difference / largest entry |",
        "|---|---|---|---|---|",
        f"| {n_inputs} | {1e3 * mine:.1f} | {1e3 * other:.1f} | {mine / other:.2f} | {apart:.1e} |",
        "",
        f"At most {GOAL:g} times torch.func.hessian: {verdict}.",
    ]


def residual_network(beta: float, width: int, device: torch.device) -> list[str]:
    """One (3072, 3072) Hessian in one call: time, peak memory, and whether it is right."""
    torch.manual_seed(0)
    network = resnet18(width).eval().to(device)
    x = torch.rand(1, 3, 32, 32, device=device)
    if device.type == "cuda":
        _ = baselines.softplus(network, x, target=3, beta=beta, dense=False) @ x  # warm
        torch.cuda.reset_peak_memory_stats(device)
    found: list[Tensor] = []
    spent = seconds(lambda: found.append(baselines.softplus(network, x, target=3, beta=beta).hessian[0]), device)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slope = torch.func.grad(replaced(network, beta))
    worst = 0.0
    for i in (0, 1500, 3071):
        unit = torch.zeros_like(x[0])
        unit.view(-1)[i] = 1
        row = torch.func.jvp(slope, (x[0],), (unit,))[1].flatten()
        worst = max(worst, float(((row - found[0][i]).abs().max() / row.abs().max()).detach()))
    return [
        "| network | d | seconds, one call | peak memory, GB | largest difference / largest entry, 3 rows |",
        "|---|---|---|---|---|",
        f"| ResNet-18, width {width} | {len(found[0])} | {spent:.1f} | {peak / 1e9:.1f} | {worst:.1e} |",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--inputs", type=int, default=1, help="inputs of the MLP at once")
    parser.add_argument("--beta", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--resnet", action="store_true", help="the Hessian of a CIFAR10 ResNet-18 as well")
    parser.add_argument("--width", type=int, default=64, help="of the ResNet")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # as inside the library
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    print(
        f"{time.strftime('%Y-%m-%d')}, {name}, {torch.get_num_threads()} thread(s), "
        f"Python {platform.python_version()}, torch {torch.__version__.split('+')[0]}, float32, β = {options.beta:g}\n"
    )
    print("\n".join(compare(options.inputs, options.beta, options.repeats, device)))
    if options.resnet:
        print("\n" + "\n".join(residual_network(options.beta, options.width, device)))


if __name__ == "__main__":
    main()
