"""The recommended σ of `diagnose` on networks that its rules were not chosen on.

    python benchmarks/sigma_range.py                          two minutes on two cores

Each network is trained on data of scikit-learn, and `diagnose` gets the model and four inputs, without σ and without
the data. Default `attribute` calls then run at σ = low/10, at the recommended σ, and at 10 · high. Columns:

- error, calls: median over the inputs of the relative error and of the gradient calls; `tol` is 0.1.
- R² at σ: share of the gradient's variation on fresh draws of the same σ that the surrogate G + Hδ explains.
- R² near x: the same share on fresh draws of the recommended σ. A surrogate that does not describe the neighbourhood of
  its input has a small or negative one.
"""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from sklearn import datasets
from torch import Tensor, nn

import smoothhess as sh

INPUTS, DRAWS = 4, 2000
SEED = 1  # of the networks; with seed 0 they were looked at while the rules were written
FAR = 10  # factor beyond the ends of the range


@dataclass(frozen=True)
class Network:
    """A trained network and inputs that it was not trained on."""

    name: str
    model: nn.Module
    inputs: Tensor
    target: list[int] | None


def trained(model: nn.Sequential, x: Tensor, y: Tensor, steps: int) -> nn.Sequential:
    optimizer = torch.optim.Adam(model.parameters(), 3e-3, weight_decay=1e-4)
    loss = nn.functional.mse_loss if y.is_floating_point() else nn.functional.cross_entropy
    for rows in torch.randint(len(x), (steps, 64)):
        optimizer.zero_grad()
        output = model(x[rows])
        loss(output[:, 0] if y.is_floating_point() else output, y[rows]).backward()
        optimizer.step()
    return model.eval()


def dense(d: int, widths: tuple[int, ...], outputs: int, activation: Callable[[], nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in zip((d, *widths), widths, strict=False):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


def table(name: str) -> tuple[Tensor, Tensor]:
    """Standardised columns and labels, in random order."""
    found = getattr(datasets, f"load_{name}")()
    x, y = torch.as_tensor(found.data).float(), torch.as_tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    x = (x - x.mean(0)) / x.std(0)
    y = (y.float() - y.float().mean()) / y.float().std() if y.is_floating_point() else y.long()
    return x[order], y[order]


def digits() -> tuple[Tensor, Tensor]:
    pixels, target = datasets.load_digits(return_X_y=True)
    return torch.as_tensor(pixels).float().reshape(-1, 1, 8, 8) / 16, torch.as_tensor(target)


def networks() -> Iterator[Network]:
    torch.manual_seed(SEED)
    for name, model in (
        ("wine", dense(13, (32, 32), 3, nn.ReLU)),
        ("breast_cancer", dense(30, (64, 64, 32), 2, nn.ReLU)),
        ("diabetes", dense(10, (100,), 1, nn.ReLU)),
    ):
        x, y = table(name)
        yield kept(f"{name.replace('_', ' ')}, {sum(isinstance(m, nn.ReLU) for m in model)} ReLU layers", model, x, y)
    x, y = table("wine")
    yield kept("wine, tanh", dense(13, (32, 32), 3, nn.Tanh), x, y)
    x, y = table("diabetes")
    yield kept("diabetes, GELU", dense(10, (64, 64), 1, nn.GELU), x, y)
    x, y = digits()
    yield kept("digits, ReLU MLP", nn.Sequential(nn.Flatten(), *dense(64, (128, 128), 10, nn.ReLU)), x, y)
    convolutions = nn.Sequential(
        *(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(24 * 16, 10)),
    )
    yield kept("digits, CNN with max-pooling", convolutions, x, y)


def kept(name: str, model: nn.Sequential, x: Tensor, y: Tensor) -> Network:
    trained(model, x[INPUTS:], y[INPUTS:], 1000)
    target = None if y.is_floating_point() else model(x[:INPUTS]).argmax(1).tolist()
    return Network(name, model, x[:INPUTS], target)


def explained(network: Network, result: sh.Interactions, sigma: float) -> float:
    """Median over inputs of the share of the gradient's variation on fresh draws of σ that the surrogate explains."""
    shares = []
    for i, x in enumerate(network.inputs):
        noise = sigma * torch.randn(DRAWS, x.numel(), generator=torch.Generator().manual_seed(i))
        points = (x.flatten() + noise).reshape(-1, *x.shape).requires_grad_()
        output = network.model(points)[:, 0 if network.target is None else network.target[i]]
        gradient = torch.autograd.grad(output.sum(), points)[0].flatten(1)
        predicted = result.gradient[i].flatten() + noise @ result.hessian[i]
        missed = (gradient - predicted).square().sum()
        shares.append(1 - float(missed / (gradient - gradient.mean(0)).square().sum().clamp_min(1e-30)))
    return float(torch.tensor(shares).median())


def row(network: Network, label: str, sigma: float, recommended: float) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # too small σ have unknown errors, which the table shows
        try:
            result = sh.SmoothHess(network.model).attribute(network.inputs, network.target, sigma=sigma)
        except ValueError as error:
            return f"| {label} | {sigma:.2g} | refused: {str(error).split('.')[0][:40]} | – | – | – |"
    error, calls = float(result.relative_error.median()), int(result.n_calls.median())
    own, near = (explained(network, result, s) for s in (sigma, recommended))
    return f"| {label} | {sigma:.2g} | {error:.2g} | {calls} | {own:.2f} | {near:.2f} |"


def main() -> None:
    print("| network, place of σ | σ | error | calls | R² at σ | R² near x |\n|---|---|---|---|---|---|")
    for network in networks():
        found = sh.diagnose(network.model, network.inputs, network.target)
        assert found.recommended is not None
        name = f"{network.name}: low/{FAR}"
        name += " (the grid ends at low)" if found.low == found.sigmas[0] else ""
        print(row(network, name, found.low / FAR, found.recommended), flush=True)
        print(row(network, "recommended", found.recommended, found.recommended), flush=True)
        print(row(network, f"{FAR} · high", FAR * found.high, found.recommended), flush=True)
    print(
        f"\n*{platform.machine()} CPU, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; "
        "`python benchmarks/sigma_range.py`*"
    )


if __name__ == "__main__":
    main()
