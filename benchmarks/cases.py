"""The networks and inputs of every benchmark.

A maker yields one case per radius ε, with σ = 3ε/4√d. Small networks are trained here when they are first asked for, a
minute each at most, and kept as safetensors; delete a file to train again. With `choose` the inputs are others than the
reported ones (training or validation images, other curves), so that nothing is tuned on what is reported.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional
from torch.optim import AdamW

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `paper` lies beside this folder

from paper import datasets
from paper.datasets import Split
from paper.networks import VGG, SpirometryCNN, gelu_mlp, image_mlp, resnet18
from paper.training import Recipe, correct, mean_score, squared_error, train, warm_cosine
from smoothhess.cli import demo
from smoothhess.model.weight_files import load_weights, save_weights

WEIGHTS = Path(__file__).resolve().parent.parent / "build" / "benchmark-weights"
LEAST_SCORE = 0.95  # accuracy or R² on held-out data, below which a network counts as not trained


@dataclass(frozen=True)
class Case:
    """A network, inputs to explain, and how to know the truth."""

    name: str
    model: Callable[[Tensor], Tensor]
    inputs: Tensor  # (B, *shape)
    target: list[int] | None  # predicted classes; None: the model has one output
    sigma: float
    epsilon: float | None  # None: σ does not come from a radius
    reference_calls: int  # gradient calls per half of the reference; 0: `truth` is exact
    truth: Tensor | None = None  # (B, d, d)

    @property
    def d(self) -> int:
        return self.inputs[0].numel()


class Maker(Protocol):
    """Cases for the first `images` inputs; `data` holds the data sets, trained networks are kept in `weights`."""

    def __call__(
        self,
        device: str,
        images: int,
        epsilons: Sequence[float],
        data: Path | None,
        weights: Path = WEIGHTS,
        choose: bool = False,
    ) -> Iterator[Case]: ...


# --- the makers -------------------------------------------------------------------------------------------------------


def closed(
    device: str,
    images: int,
    epsilons: Sequence[float],
    data: Path | None,
    weights: Path = WEIGHTS,
    choose: bool = False,
) -> Iterator[Case]:
    """One hidden layer of 200 units over 64 features, ∇²h = Σ a φ(s)/τ wwᵀ; one case, σ = ½ whatever `epsilons`."""
    rng = Generator().manual_seed(3)
    w = torch.randn(200, 64, generator=rng).double() / 8
    b, a = torch.randn(200, generator=rng).double() / 2, torch.randn(200, generator=rng).double() / 14
    x = torch.randn(images, 64, generator=Generator().manual_seed(4) if choose else rng).double()
    w, b, a, x = (t.to(device) for t in (w, b, a, x))
    sigma = 0.5
    tau = sigma * w.norm(dim=1)
    s = (x @ w.T + b) / tau
    density = torch.exp(-s.square() / 2) / math.sqrt(2 * math.pi) / tau
    truth = torch.einsum("bk,kd,ke->bde", a * density, w, w)
    yield Case("closed form, d = 64", lambda x: torch.relu(x @ w.T + b) @ a, x, None, sigma, None, 0, truth)


def digits(
    device: str,
    images: int,
    epsilons: Sequence[float],
    data: Path | None,
    weights: Path = WEIGHTS,
    choose: bool = False,
) -> Iterator[Case]:
    """The digits network of the demo."""
    task = demo.digits(0)
    build, fit = (partial(demo.train, task, hidden=64, epochs=epochs, seed=0) for epochs in (0, 40))
    training, test = _digits()
    network = _kept(weights / "digits-mlp.safetensors", build, fit, partial(mean_score, split=test))
    yield from _classified("digits MLP", network, training if choose else test, device, images, epsilons)


def mnist(
    device: str,
    images: int,
    epsilons: Sequence[float],
    data: Path | None,
    weights: Path = WEIGHTS,
    choose: bool = False,
) -> Iterator[Case]:
    """The authors' MNIST network."""
    folder = _folder(data, "MNIST and authors/MNIST.pth")
    network = _drawn(image_mlp)
    load_weights(network, folder / "authors" / "MNIST.pth")
    pictures = datasets.mnist(folder)
    pool = pictures.val if choose else pictures.test
    yield from _classified("MNIST MLP", network.eval(), pool, device, images, epsilons)


def cifar10(
    device: str,
    images: int,
    epsilons: Sequence[float],
    data: Path | None,
    weights: Path = WEIGHTS,
    choose: bool = False,
) -> Iterator[Case]:
    """A trained CIFAR10 ResNet-18."""
    folder = _folder(data, "CIFAR10 and resnet18_cifar10.safetensors")
    network = _drawn(resnet18)
    load_weights(network, folder / "resnet18_cifar10.safetensors")
    pictures = datasets.cifar10(folder, n_val=20)
    pool = pictures.val if choose else pictures.test
    yield from _classified("CIFAR10 ResNet-18", network.eval(), pool, device, images, epsilons, 250_000)


def curve(
    device: str,
    images: int,
    epsilons: Sequence[float],
    data: Path | None,
    weights: Path = WEIGHTS,
    choose: bool = False,
) -> Iterator[Case]:
    """A small 1-D CNN that reads FEV₁ off a made-up volume curve."""
    training, test, other = (volume_curves(n, seed) for seed, n in enumerate((4_000, 1_000, 1_000)))
    build = partial(SpirometryCNN, length=100, n_blocks=4, channels=8, kernel=9, dropout=0.0)
    fit = partial(_fit, build, training, _recipe(1_500, _mean_squared_error, squared_error, noise=0.05))
    network = _kept(weights / "curve-cnn.safetensors", build, fit, partial(_r2, split=test))
    inputs = _first(other if choose else test, images).to(device)
    yield from _per_radius("volume-curve CNN", network.to(device), inputs, None, epsilons, 100_000)


def vgg(
    device: str,
    images: int,
    epsilons: Sequence[float],
    data: Path | None,
    weights: Path = WEIGHTS,
    choose: bool = False,
) -> Iterator[Case]:
    """Convolutions and max-pools on digits drawn at 16 × 16 pixels."""
    training, test = (
        Split(functional.interpolate(part.inputs[:, None], scale_factor=2, mode="bilinear"), part.targets)
        for part in _digits()
    )
    build = partial(VGG, (16, 32), in_channels=1)
    fit = partial(_fit, build, training, _recipe(1_600, functional.cross_entropy, correct, noise=0.1))
    network = _kept(weights / "digits-vgg.safetensors", build, fit, partial(mean_score, split=test))
    yield from _classified("digits VGG", network, training if choose else test, device, images, epsilons)


def mnist_vgg(
    device: str,
    images: int,
    epsilons: Sequence[float],
    data: Path | None,
    weights: Path = WEIGHTS,
    choose: bool = False,
) -> Iterator[Case]:
    """Convolutions and max-pools on MNIST, trained here for a few minutes."""
    pictures = datasets.mnist(_folder(data, "MNIST"))
    build = partial(VGG, (16, 32), in_channels=1)
    fit = partial(_fit, build, pictures.train, _recipe(1_600, functional.cross_entropy, correct, noise=0.1))
    network = _kept(weights / "mnist-vgg.safetensors", build, fit, partial(mean_score, split=pictures.val))
    pool = pictures.val if choose else pictures.test
    yield from _classified("MNIST VGG", network, pool, device, images, epsilons)


def cifar10_vgg(
    device: str,
    images: int,
    epsilons: Sequence[float],
    data: Path | None,
    weights: Path = WEIGHTS,
    choose: bool = False,
) -> Iterator[Case]:
    """Convolutions and max-pools on CIFAR10, trained here for a few minutes."""
    pictures = datasets.cifar10(_folder(data, "CIFAR10"), n_val=5_000)
    build = partial(VGG, (16, 32, 64))
    fit = partial(_fit, build, pictures.train, _recipe(3_000, functional.cross_entropy, correct, noise=0.02))
    score = partial(mean_score, split=pictures.val)
    network = _kept(weights / "cifar10-vgg.safetensors", build, fit, score, least=0.65)
    pool = pictures.val if choose else pictures.test
    yield from _classified("CIFAR10 VGG", network, pool, device, images, epsilons)


def gelu(
    device: str,
    images: int,
    epsilons: Sequence[float],
    data: Path | None,
    weights: Path = WEIGHTS,
    choose: bool = False,
) -> Iterator[Case]:
    """A smooth network on the digits of the demo."""
    training, test = _digits()
    build = partial(gelu_mlp, (64, 100, 50, 10))
    noise = demo.TRAINING_NOISE
    fit = partial(_fit, build, training, _recipe(1_000, functional.cross_entropy, correct, noise))
    network = _kept(weights / "digits-gelu.safetensors", build, fit, partial(mean_score, split=test))
    pool = training if choose else test
    # Estimates of so smooth a Hessian err by a thousandth: the reference has to be sharper than elsewhere.
    yield from _classified("digits GELU MLP", network, pool, device, images, epsilons, 1_000_000)


MAKERS: dict[str, Maker] = {
    "closed": closed,
    "digits": digits,
    "gelu": gelu,
    "curve": curve,
    "vgg": vgg,
    "mnist": mnist,
    "mnist-vgg": mnist_vgg,
    "cifar10": cifar10,
    "cifar10-vgg": cifar10_vgg,
}
NEEDS_DATA = {"mnist", "mnist-vgg", "cifar10", "cifar10-vgg"}


def _classified(
    name: str,
    network: nn.Module,
    pool: Split,
    device: str,
    images: int,
    epsilons: Sequence[float],
    reference_calls: int = 100_000,
) -> Iterator[Case]:
    network, inputs = network.to(device), _first(pool, images).to(device)
    with torch.no_grad():
        target = network(inputs).argmax(1).tolist()
    yield from _per_radius(name, network, inputs, target, epsilons, reference_calls)


def _per_radius(
    name: str,
    network: nn.Module,
    inputs: Tensor,
    target: list[int] | None,
    epsilons: Sequence[float],
    reference_calls: int,
) -> Iterator[Case]:
    d = inputs[0].numel()
    for epsilon in epsilons:
        sigma = 0.75 * epsilon / math.sqrt(d)
        yield Case(f"{name}, d = {d}, ε = {epsilon:g}", network, inputs, target, sigma, epsilon, reference_calls)


def _first(pool: Split, images: int) -> Tensor:
    if not 0 < images <= len(pool):
        raise ValueError(f"images must lie between 1 and {len(pool)}, the inputs there are, got {images}.")
    return pool.inputs[:images]


def _folder(data: Path | None, held: str) -> Path:
    if data is None:
        raise ValueError(f"expected a folder with {held}, got none. Pass --data DIR or set SMOOTHHESS_DATA.")
    return data


# --- data that come with the benchmarks -------------------------------------------------------------------------------


def _digits() -> tuple[Split, Split]:
    """The images that the demo trains on and those that it does not see, (N, 8, 8)."""
    task = demo.digits(0)
    return Split(task.inputs, task.labels), Split(task.test_inputs, task.test_labels)


def volume_curves(n: int, seed: int) -> Split:
    """Litres breathed out at 100 times in 6 s, (n, 100), and FEV₁, the litres in the first second of breath, (n,).

    V(t) = FVC·(1 − exp(−((t − t₀)₊/τ)ᵖ)), plus noise. The breath starts anywhere in the first second, so no single
    point of the curve is FEV₁.
    """
    rng = Generator().manual_seed(seed)

    def between(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(n, 1, generator=rng)

    capacity, tau, power, start = between(2, 6), between(0.3, 1.5), between(0.7, 1.3), between(0, 1)

    def volume(time_of_breath: Tensor) -> Tensor:
        return capacity * (1 - torch.exp(-((time_of_breath / tau) ** power)))

    curves = volume((torch.linspace(0, 6, 100) - start).clamp(min=0))
    return Split(curves + 0.02 * torch.randn(n, 100, generator=rng), volume(torch.ones(1))[:, 0])


# --- training ---------------------------------------------------------------------------------------------------------


def _kept(
    path: Path,
    build: Callable[[], nn.Module],
    fit: Callable[[], nn.Module],
    score: Callable[[nn.Module], float],
    least: float = LEAST_SCORE,
) -> nn.Module:
    """The network in the file, or else a new one that goes there once it is good enough; on the CPU, in eval mode."""
    if path.is_file():
        network = _drawn(build)
        load_weights(network, path)
        return network.eval()
    started = time.perf_counter()
    with _one_thread():
        network = fit().eval()
        reached = score(network)
    words = f"{path.stem}: {reached:.4f} on held-out data (accuracy or R²), {time.perf_counter() - started:.0f} s"
    if not reached > least:
        raise RuntimeError(f"expected a trained network, more than {least}, got {words}. Change its recipe.")
    save_weights(network, path, held_out=f"{reached:.4f}")
    print(f"    trained {words}", file=sys.stderr, flush=True)
    return network


def _fit(build: Callable[[], nn.Module], data: Split, recipe: Recipe) -> nn.Module:
    network = _drawn(build)
    train(network, data, recipe)
    return network


def _drawn(build: Callable[[], nn.Module]) -> nn.Module:
    """A network with its first weights, which layers draw from the global generator; that one stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return build()


def _recipe(
    n_steps: int,
    loss: Callable[[Tensor, Tensor], Tensor],
    score: Callable[[Tensor, Tensor], Tensor],
    noise: float,
) -> Recipe:
    """AdamW on noisy inputs: the network is then meant for the surroundings of an input as well."""
    return Recipe(
        n_steps=n_steps,
        batch_size=64,
        optimizer=partial(AdamW, weight_decay=1e-2),
        rate=warm_cosine(3e-4, 3e-3, 1e-5, n_steps // 20, n_steps),
        loss=loss,
        score=score,
        augment=lambda batch, rng: batch + noise * torch.randn(batch.shape, generator=rng),
    )


def _mean_squared_error(outputs: Tensor, values: Tensor) -> Tensor:
    return squared_error(outputs, values).mean()


def _r2(network: nn.Module, split: Split) -> float:
    return 1 - mean_score(network, split, squared_error) / float(split.targets.var(correction=0))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums depend on the number of threads, and the weights on the sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
