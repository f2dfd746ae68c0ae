"""Numbers of fixed seeds, by name: every design, Gaussian, control, form and baseline of the public interface.

    python tests/golden/golden.py     writes golden.safetensors beside this file

The test beside it compares them with those of the code as it is, so that moving code cannot change a result.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import smoothhess as sh

FILE = Path(__file__).with_name("golden.safetensors")
D = 9
baselines: Any = sh.baselines


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(*sizes: int, seed: int = 0) -> nn.Sequential:
    """Layers of linear and relu, with weights that do not depend on torch's own initialisation."""
    layers: list[nn.Module] = []
    for place, (a, b) in enumerate(itertools.pairwise(sizes)):
        linear = nn.Linear(a, b).double()
        linear.weight.data = normal(seed + 10 * place, b, a) * (2 / a) ** 0.5
        linear.bias.data = 0.3 * normal(seed + 10 * place + 1, b)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def conv_network() -> nn.Sequential:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)).double()
    for place, p in enumerate(net.parameters()):
        p.data = 0.5 * normal(100 + place, *p.shape)
    return net


def gaussians() -> dict[str, sh.Gaussian]:
    root = normal(3, D, D) / 3
    directions = torch.linalg.qr(normal(4, D, 6)).Q.mT
    return {
        "isotropic": sh.Isotropic(0.4),
        "diagonal": sh.Diagonal(torch.linspace(0.1, 0.8, D)),
        "dense": sh.Dense(root @ root.mT + 0.05 * torch.eye(D, dtype=torch.float64)),
        "eigenbasis": sh.Eigenbasis(directions, torch.linspace(0.2, 0.7, 6), 0.0),
    }


def forms(result: Any, mask: Tensor) -> Iterator[tuple[str, Tensor]]:
    """All that can be read off a result."""
    v, w = normal(5, *result.feature_shape), normal(6, *result.feature_shape)
    for name in ("value", "output", "gradient", "hessian", "relative_error", "r2", "n_calls", "n_passes", "stein_z"):
        yield name, getattr(result, name)
    yield "gradient_stderr", result.gradient_stderr
    yield "stderr", result.stderr()
    yield "product", result @ v
    batch = (len(result), *result.feature_shape)
    for name, estimate in (
        ("row", result.row(1)),
        ("diagonal", result.diagonal()),
        ("bilinear", result.bilinear(v.expand(batch), w.expand(batch))),
        ("gradient_estimate", result.gradient_estimate()),
        ("value_estimate", result.value_estimate()),
    ):
        yield f"{name}.value", estimate.value
        yield f"{name}.stderr", estimate.stderr
        yield f"{name}.df", estimate.df
        yield f"{name}.interval", torch.stack(estimate.interval())
    groups = result.groups(mask)
    yield "groups.hessian", groups.hessian
    yield "groups.stderr", groups.stderr()
    yield "groups.relative_error", groups.relative_error
    pairs = [p for each in result.top_pairs(6) for p in each]
    yield "pairs", torch.tensor([[p.i, p.j, p.value, p.stderr, p.low, p.high, p.effect, p.q_value] for p in pairs])
    values, vectors = result.eigh(3)
    yield "eigenvalues", values
    flat = vectors.flatten(2)
    yield "eigenprojectors", flat[..., None] * flat[..., None, :]
    points = result.inputs[:, None] + 0.1 * torch.stack([v, w])
    yield "taylor", result.taylor()(points)
    yield "calls_for", result.calls_for(0.05)
    yield "unshrunk", result.unshrunk().hessian


def exact_forms(result: Any, mask: Tensor) -> Iterator[tuple[str, Tensor]]:
    v = normal(5, *result.feature_shape)
    for name in ("value", "gradient", "hessian"):
        yield name, getattr(result, name)
    yield "product", result @ v
    yield "groups", result.groups(mask).hessian
    yield "row", result.row(1).value


def compute() -> dict[str, Tensor]:
    """Every number, by name."""
    found: dict[str, Tensor] = {}

    def keep(name: str, values: Any) -> None:
        for part, value in values:
            found[f"{name}/{part}"] = torch.as_tensor(value, dtype=torch.float64).clone().contiguous()

    net, x, mask = network(D, 16, 12, 3), 0.5 * normal(1, 2, D), torch.arange(D) % 4
    explainer = sh.SmoothHess(net)
    for noise, gaussian in gaussians().items():
        for design in ("iid", "antithetic", "orthogonal", "sobol"):
            for control in (None, "kink"):
                options = {"gaussian": gaussian, "design": design, "control": control}
                for calls in (10, 72) if design == "orthogonal" else (64,):
                    result = explainer.attribute(x, 1, n_calls=calls, **options)
                    keep(f"{noise}/{design}/{control}/{calls}", forms(result, mask))
                streamed = explainer.attribute(x, 1, n_calls=64, feature_mask=mask, **options)
                keep(f"{noise}/{design}/{control}/masked", [("hessian", streamed.hessian), ("se", streamed.stderr())])
    default = explainer.attribute(x, 1, radius=1.0, seed=[3, 4])
    keep("adaptive", forms(default, mask))
    keep("more", forms(explainer.more(explainer.attribute(x, 1, radius=1.0, n_calls=20, control=None), 30), mask))
    keep("probes", forms(explainer.attribute(x, 1, sigma=0.3, n_calls=40, tau_probes=8), mask))
    keep("plain", forms(explainer.attribute(x, 1, sigma=0.3, n_calls=72, shrink=False), mask))
    keep("joined", forms(sh.Interactions.cat([default[1], default[0]]), mask))
    closed = explainer.closed_form(x, 1, sigma=0.4)
    keep("closed form", [("hessian", closed.hessian), ("gradient", closed.gradient)])

    images, conv = 0.5 * normal(2, 2, 1, 6, 6), conv_network()
    parts = (torch.arange(6)[:, None] // 2 * 3 + torch.arange(6) // 2)[None]
    keep("image", forms(sh.SmoothHess(conv).attribute(images, 0, radius=1.0, n_calls=40), parts))
    keep("neuron", forms(sh.NeuronSmoothHess(net, "2").attribute(x, 4, radius=1.0, n_calls=40), mask))
    shifted = sh.SmoothHess(conv).attribute(images, 0, gaussian=sh.segments.noise(parts, 0.3), n_calls=36)
    keep("segment noise", [("hessian", shifted.hessian), ("stderr", shifted.stderr())])

    smooth = nn.Sequential(net[0], nn.Tanh(), net[2])
    for name in ("gradient", "hessian"):
        keep(f"own {name}", exact_forms(getattr(baselines, name)(smooth, x, 1), mask))
    for name, beta in (("softplus", 4.0), ("swish", 3.0)):
        keep(name, exact_forms(getattr(baselines, name)(net, x, 1, beta=beta), mask))
    keep("smoothgrad", [("gradient", baselines.smoothgrad(net, x, 1, sigma=0.3, n_calls=40).gradient)])
    keep("random", [("gradient", baselines.random(net, x, 1).gradient)])
    keep("integrated", [("hessian", baselines.integrated_hessians(smooth, x, 1, n_steps=8, tolerance=9.0).hessian)])
    keep("nid", [("hessian", baselines.gradient_nid(smooth, x, 1).hessian)])
    for name in ("cafo", "caso"):
        keep(name, [("gradient", getattr(baselines, name)(net, x, 1, l2=8.0).gradient)])
    keep("taylor_cam", [("hessian", baselines.taylor_cam(conv, "0", images, 0).hessian)])

    keep("pmse", [("", sh.perturbation_mse(net, x, default.taylor(), 0.5, 1, n_samples=200))])
    keep("attack", [("", sh.attack(default.taylor(), 0.5))])
    keep("minimum", [("", sh.minimize_in_ball(default.gradient, default, 0.7))])
    keep("minimum dense", [("", sh.minimize_in_ball(default.gradient, default.hessian, 0.7))])
    scored = sh.evaluate.validate_pairs(net, default, 4)
    keep("validation", [("form", scored.form), ("plain", scored.plain), ("central", scored.central)])
    keep("select", [("", sh.evaluate.select(net, x, 1, radius=0.5, n_calls=40, n_samples=100).scores)])
    scales = sh.sweep(explainer, x, [0.2, 0.4], target=1, n_calls=36)
    keep("sweep", forms(scales[1], mask))
    change = scales.difference(0, 1)
    keep("change", [("hessian", change.hessian), ("stderr", change.stderr())])
    whole = sh.evaluate.global_interactions(explainer, [0.5 * normal(7, 6, D)], target=1, radius=1.0, n_calls=36)
    keep("global", [("mean", whole.mean.value), ("stderr", whole.mean.stderr), ("abs", whole.mean_abs.value)])
    return found


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_file(compute(), FILE)
    print(FILE, FILE.stat().st_size)
