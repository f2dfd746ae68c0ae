"""Are the scores of pairs of super-pixels those of removing both? Rank correlation with measured joint effects.

    OMP_NUM_THREADS=1 python benchmarks/faithfulness.py --data DIR --network vgg --images 200
    OMP_NUM_THREADS=1 python benchmarks/faithfulness.py --data DIR --network resnet18 --images 17
    OMP_NUM_THREADS=1 python benchmarks/faithfulness.py --data DIR --write

DIR holds CIFAR10 and resnet18_cifar10.safetensors; the VGG is trained here in minutes. Super-pixels are those of SLIC,
removed pixels have the mean colour of the training images, and the output is the logit of the predicted class.
`evaluate.joint_removal` measures f(x) − f(x∖I) − f(x∖J) + f(x∖I∪J) of all pairs once, and every method is compared with
these numbers. σ, β and the number of images are chosen on validation images; the reported images are test images. The
numbers of each image are kept in build/faithfulness, and a run that was stopped resumes. Without --images the page is
made from the images that were kept.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from interactions import average, cell, markdown, remarks
from torch import Tensor, nn
from torch.nn import functional

from paper.datasets import ImageData, cifar10
from paper.networks import VGG, resnet18
from smoothhess import SmoothHess, baselines, segments
from smoothhess.evaluate import JointRemoval, joint_removal
from smoothhess.evaluate.rank_correlation import spearman
from smoothhess.model.atomic_write import atomic_write
from smoothhess.model.weight_files import load_weights, save_weights
from smoothhess.result.intervals import half_width

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks" / "faithfulness.md"
KEPT = ROOT / "build" / "faithfulness"
SUPERPIXELS = 16
SIGMAS = (0.1, 0.25, 0.5, 1.0)  # of the gates: 1 removes a super-pixel
PIXEL_SIGMAS = (0.05, 0.15)  # of single pixels, whose values lie between 0 and 1
BETAS = (2.0, 10.0, 50.0)


@dataclass(frozen=True)
class Settings:
    """Sizes for one network."""

    name: str
    words: str
    calls: int  # gradient calls of SmoothHess
    steps: int  # points on the path of Integrated Hessians
    choosing: int  # validation images by which σ and β are chosen


NETWORKS = {
    "vgg": Settings("VGG", "six convolutions, ReLU, three max-poolings, no batch-norm", 96, 5, 6),
    "resnet18": Settings("ResNet-18", "batch-norm, no max-pooling", 48, 4, 3),
}


# --- networks and games -----------------------------------------------------------------------------------------------


def train_vgg(data: ImageData, path: Path, steps: int = 1_500, batch: int = 64) -> nn.Module:
    """A small VGG, trained by Adam with a cosine schedule and mirrored images; kept in a file."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = VGG((16, 32, 64))
    if path.is_file():
        load_weights(net, path)
        return net.eval()
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        index = torch.randint(len(data.train), (batch,), generator=generator)
        x, y = data.train.inputs[index], data.train.targets[index]
        mirrored = torch.rand(batch, generator=generator) < 0.5
        x = torch.where(mirrored[:, None, None, None], x.flip(3), x)
        loss = functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}: loss {float(loss):.2f}", file=sys.stderr, flush=True)
    save_weights(net, path, steps=str(steps))
    return net.eval()


def load_network(name: str, folder: Path, data: ImageData) -> nn.Module:
    if name == "vgg":
        return train_vgg(data, KEPT / "vgg.safetensors")
    net = resnet18()
    load_weights(net, folder / "resnet18_cifar10.safetensors")
    return net.eval()


class Gated(nn.Module):
    """The model as a function of one gate per super-pixel: 0 leaves it as it is, 1 replaces it by the baseline.

    Mixed second derivatives by gates are sums over the pixels of both super-pixels of H_ij Δ_i Δ_j, Δ = baseline − x.
    """

    def __init__(self, net: nn.Module, x: Tensor, baseline: Tensor, mask: Tensor) -> None:
        super().__init__()
        self.net, self.x, self.move, self.mask = net, x, baseline - x, mask

    def forward(self, gates: Tensor) -> Tensor:
        return self.net(self.x + gates[:, self.mask] * self.move)


# --- methods ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Image:
    """One image with its super-pixels and the measured effects."""

    gated: Gated
    target: int
    measured: JointRemoval
    seed: int

    @property
    def gates(self) -> Tensor:
        return torch.zeros(1, len(self.measured.names))


Score = Callable[[Image, Settings, float], tuple[Tensor, float]]  # (1, K, K) scores, passes


@dataclass(frozen=True)
class Method:
    score: Score
    candidates: tuple[float, ...] = ()  # of σ or β
    symbol: str = ""


def smooth(image: Image, settings: Settings, sigma: float) -> tuple[Tensor, float]:
    found = SmoothHess(image.gated).attribute(
        image.gates, image.target, sigma=sigma, n_calls=settings.calls, seed=image.seed, show_progress=False
    )
    return found.hessian, float(found.n_passes)


def smooth_pixels(image: Image, settings: Settings, sigma: float) -> tuple[Tensor, float]:
    gated = image.gated
    found = SmoothHess(gated.net).attribute(
        gated.x[None], image.target, sigma=sigma, n_calls=settings.calls, seed=image.seed, show_progress=False
    )
    sums = found.groups(gated.mask, direction=gated.move[None])
    return sums.hessian, float(found.n_passes)


def softplus(image: Image, settings: Settings, beta: float) -> tuple[Tensor, float]:
    found = baselines.softplus(image.gated, image.gates, image.target, beta=beta)
    return found.hessian, float(found.n_passes)


def integrated(image: Image, settings: Settings, beta: float) -> tuple[Tensor, float]:
    found = baselines.integrated_hessians(
        image.gated,
        image.gates,
        image.target,
        baselines=1.0,
        of="softplus",
        beta=beta,
        n_steps=settings.steps,
        tolerance=math.inf,
        show_progress=False,
    )
    return found.hessian, float(found.n_passes)


def gradient_product(image: Image, settings: Settings, _: float) -> tuple[Tensor, float]:
    found = baselines.gradient(image.gated, image.gates, image.target)
    return found.gradient[:, :, None] * found.gradient[:, None], 1.0


def removal_product(image: Image, settings: Settings, _: float) -> tuple[Tensor, float]:
    single = image.measured.single
    return single[:, :, None] * single[:, None], (1 + single.shape[1]) / 2


def random(image: Image, settings: Settings, _: float) -> tuple[Tensor, float]:
    k = image.gates.shape[1]
    draws = torch.randn(1, k, k, generator=torch.Generator().manual_seed(image.seed))
    return draws + draws.mT, 0.0


METHODS = {
    "SmoothHess, segments move": Method(smooth, SIGMAS, "σ"),
    "SmoothHess, pixels move": Method(smooth_pixels, PIXEL_SIGMAS, "σ"),
    "SoftPlus Hessian": Method(softplus, BETAS, "β"),
    "Integrated Hessians, SoftPlus": Method(integrated, BETAS, "β"),
    "product of gradients": Method(gradient_product),
    "product of single removals": Method(removal_product),
    "random": Method(random),
}
FIRST = next(iter(METHODS))


# --- runs -------------------------------------------------------------------------------------------------------------


def measured(net: nn.Module, x: Tensor, baseline: Tensor, seed: int) -> Image:
    """Super-pixels of an image, and the joint effects of all pairs of them."""
    parts = segments.slic(x, SUPERPIXELS)
    with torch.no_grad():
        target = int(net(x[None]).argmax())
    found = joint_removal(net, x[None], parts, baseline, None, target)
    return Image(Gated(net, x, baseline, parts.mask), target, found, seed)


def scored(image: Image, method: Method, settings: Settings, value: float) -> dict[str, float]:
    begin = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table, passes = method.score(image, settings, value)
    seconds = time.process_time() - begin
    rho = [float(image.measured.rank_correlation(table, absolute=absolute)) for absolute in (False, True)]
    return {"signed": rho[0], "absolute": rho[1], "passes": passes, "seconds": seconds}


def kept(path: Path, key: Any, make: Callable[[], Any]) -> Any:
    """What `make` found, from disk where it was found before with the same settings."""
    if path.is_file():
        stored = json.loads(path.read_text())
        if stored["key"] == json.loads(json.dumps(key)):
            return stored["found"]
    found = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as part:
        part.write_text(json.dumps({"key": key, "found": found}))
    return found


def choose(net: nn.Module, data: ImageData, baseline: Tensor, settings: Settings) -> dict[str, dict[str, float]]:
    """Mean ρ of each candidate of each method over validation images."""
    found: dict[str, dict[str, float]] = {}
    images = [measured(net, data.val.inputs[i], baseline, 10_000 + i) for i in range(settings.choosing)]
    for name, method in METHODS.items():
        for value in method.candidates:
            rho = [scored(image, method, settings, value)["signed"] for image in images]
            found.setdefault(name, {})[f"{value:g}"] = sum(rho) / len(rho)
            print(f"{name} {value:g}: {found[name][f'{value:g}']:.3f}", file=sys.stderr, flush=True)
    return found


def one_image(net: nn.Module, x: Tensor, baseline: Tensor, settings: Settings, chosen: dict[str, float], seed: int):
    begin = time.process_time()
    image = measured(net, x, baseline, seed)
    seconds = time.process_time() - begin
    found: dict[str, Any] = {
        name: scored(image, method, settings, chosen.get(name, 0.0)) for name, method in METHODS.items()
    }
    i, j = image.measured.pairs[0].unbind(1)
    effects, alone = image.measured.effects[0], image.measured.single[0]
    return {
        "methods": found,
        "segments": len(image.measured.names),
        "forward": image.measured.n_forward,
        "seconds": seconds,
        "size": float(effects.abs().mean() / alone.abs().mean()),
        "zero": float((effects.abs() <= image.measured.rounding).double().mean()),
        "substitution": float(spearman(effects[None], (alone[i] * alone[j])[None])),
    }


def run(name: str, folder: Path, images: int) -> None:
    """Explain the first `images` test images; what was done before is kept."""
    settings = NETWORKS[name]
    data = cifar10(folder)
    net = load_network(name, folder, data)
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    baseline = data.train.inputs.mean((0, 2, 3))[:, None, None].expand_as(data.train.inputs[0]).contiguous()
    key = [settings.calls, settings.steps, settings.choosing, SUPERPIXELS, SIGMAS, PIXEL_SIGMAS, BETAS, [*METHODS], 1]

    def accuracy() -> float:
        count = 1000 if name == "vgg" else 100
        with torch.no_grad():
            right = [
                (net(x).argmax(1) == y)
                for x, y in zip(data.test.inputs[:count].split(100), data.test.targets[:count].split(100), strict=True)
            ]
        return float(torch.cat(right).double().mean())

    table = kept(KEPT / f"{name}-chosen.json", key, lambda: choose(net, data, baseline, settings))
    kept(KEPT / f"{name}-accuracy.json", key, accuracy)
    chosen = {m: float(max(rho, key=lambda v, rho=rho: rho[v])) for m, rho in table.items()}
    for i in range(images):
        x = data.test.inputs[i]
        kept(KEPT / name / f"{i}.json", key, lambda x=x, i=i: one_image(net, x, baseline, settings, chosen, i))
        print(f"{name}: image {i + 1} of {images}", file=sys.stderr, flush=True)


# --- page -------------------------------------------------------------------------------------------------------------


def mean_text(values: list[float], digits: int = 3) -> str:
    """Mean with half of its 95 % interval over images."""
    mean, stderr = average(values)
    n = sum(not math.isnan(v) for v in values)
    return f"{cell(mean, digits=digits)} ± {half_width(stderr, n - 1):.{digits}f}" if n > 1 else "–"


def section(name: str) -> list[str]:
    settings = NETWORKS[name]
    files = sorted((KEPT / name).glob("*.json"), key=lambda p: int(p.stem))
    if len(files) < 2:
        return []
    images = [json.loads(p.read_text())["found"] for p in files]
    table = json.loads((KEPT / f"{name}-chosen.json").read_text())["found"]
    accuracy = json.loads((KEPT / f"{name}-accuracy.json").read_text())["found"]
    rows = []
    for method in METHODS:
        own = [image["methods"][method] for image in images]
        lead = [image["methods"][FIRST]["signed"] - o["signed"] for image, o in zip(images, own, strict=True)]
        lead_absolute = [
            image["methods"][FIRST]["absolute"] - o["absolute"] for image, o in zip(images, own, strict=True)
        ]
        passes = sum(o["passes"] for o in own) / len(own)
        seconds = sum(o["seconds"] for o in own) / len(own)
        chosen = f"{METHODS[method].symbol} = {max(table[method], key=table[method].get)}" if method in table else "–"
        rows.append(
            [
                method,
                chosen,
                mean_text([o["signed"] for o in own]),
                mean_text([o["absolute"] for o in own]),
                "–" if method == FIRST else mean_text(lead),
                "–" if method == FIRST else mean_text(lead_absolute),
                f"{passes:.0f}",
                f"{seconds:.2f}",
            ]
        )
    head = ["method", "chosen", "ρ", "ρ of absolute values", f"{FIRST} minus it", "of absolute values", "passes", "s"]
    parts = [image["segments"] for image in images]
    return [
        f"## {settings.name}",
        "",
        f"{settings.words}; accuracy {100 * accuracy:.0f} %. {len(images)} test images, {min(parts)} to {max(parts)} "
        f"super-pixels, all pairs of them: {sum(i['forward'] for i in images) / len(images):.0f} forward passes and "
        f"{sum(i['seconds'] for i in images) / len(images):.2f} s per image. The mean joint effect is "
        f"{100 * sum(i['size'] for i in images) / len(images):.0f} % of the mean effect of one removal; "
        f"{100 * sum(i['zero'] for i in images) / len(images):.1f} % of the joint effects are zero to rounding.",
        "",
        *markdown(head, rows),
        "",
        f"Candidates, mean ρ over {settings.choosing} validation images:",
        "",
        *markdown(
            ["method", "candidates"],
            [
                [method, ", ".join(f"{METHODS[method].symbol} = {v}: {rho:.3f}" for v, rho in found.items())]
                for method, found in table.items()
            ],
        ),
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of CIFAR10 and of the weights")
    parser.add_argument("--network", choices=list(NETWORKS), help="the network to run; none: print what was kept")
    parser.add_argument("--images", type=int, default=10, help="test images")
    parser.add_argument("--write", nargs="?", type=Path, const=PAGE, help="write docs/benchmarks/faithfulness.md")
    options = parser.parse_args()
    if options.network:
        run(options.network, options.data, options.images)
    lines = [
        "# Faithfulness on images",
        "",
        "`OMP_NUM_THREADS=1 python benchmarks/faithfulness.py --data DIR --network vgg --images 200`",
        "",
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {torch.get_num_threads()} thread(s), Python "
        f"{platform.python_version()}, torch {torch.__version__.split('+')[0]}; seconds are processor time, "
        "± half of a 95 % interval over images",
        "",
        *remarks(options.write),
        *section("vgg"),
        *section("resnet18"),
    ]
    text = "\n".join(lines).rstrip() + "\n"
    print(text)
    if options.write:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(text)


if __name__ == "__main__":
    main()
