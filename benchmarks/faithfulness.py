"""Are the scores of pairs of super-pixels those of removing both? Rank correlation with measured joint effects.

    OMP_NUM_THREADS=1 python benchmarks/faithfulness.py --data DIR --network vgg --images 200
    OMP_NUM_THREADS=1 python benchmarks/faithfulness.py --data DIR --network resnet18 --images 240 --device cuda \\
        --processes 5
    OMP_NUM_THREADS=1 python benchmarks/faithfulness.py --data DIR --write

DIR holds CIFAR10, or the file of image_subset.py, and resnet18_cifar10.safetensors; the VGG is trained here in minutes.
Super-pixels are those of SLIC, removed pixels have the mean colour of the training images, and the output is the logit
of the predicted class. `evaluate.joint_removal` measures f(x) − f(x∖I) − f(x∖J) + f(x∖I∪J) of all pairs once, and every
method is compared with these numbers. σ and β are chosen on validation images; the reported images are test images. The
numbers of each image are kept in build/faithfulness, and a run that was stopped resumes. Several processes share one
GPU, which a single image does not fill. Without --network the page is made from the images that were kept, also those
of a run that was stopped.
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
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from image_subset import SUPERPIXELS, Images, Subset, full, load
from interactions import average, cell, markdown, publish, remarks
from torch import Tensor, nn
from torch.nn import functional

from paper.datasets import ImageData
from paper.networks import VGG, resnet18
from smoothhess import SmoothHess, baselines
from smoothhess.evaluate import JointRemoval, joint_removal
from smoothhess.evaluate.rank_correlation import spearman
from smoothhess.model.atomic_write import atomic_write
from smoothhess.model.weight_files import load_weights, save_weights
from smoothhess.result.intervals import half_width

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks" / "faithfulness.md"
KEPT = ROOT / "build" / "faithfulness"
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
    accuracy: int  # test images on which the accuracy is measured


NETWORKS = {
    "vgg": Settings("VGG", "six convolutions, ReLU, three max-poolings, no batch-norm", 96, 5, 6, 1000),
    "resnet18": Settings("ResNet-18", "batch-norm, no max-pooling", 512, 5, 24, 300),
}


# --- networks and games -----------------------------------------------------------------------------------------------


def train_vgg(read: Callable[[], ImageData], path: Path, steps: int = 1_500, batch: int = 64) -> nn.Module:
    """A small VGG, trained by Adam with a cosine schedule and mirrored images; kept in a file."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = VGG((16, 32, 64))
    if path.is_file():
        load_weights(net, path)
        return net.eval()
    data, generator = read(), torch.Generator().manual_seed(0)
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


def load_network(name: str, folder: Path) -> nn.Module:
    if name == "vgg":
        return train_vgg(lambda: full(folder), KEPT / "vgg.safetensors")
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
        return torch.zeros(1, len(self.measured.names), device=self.gated.x.device)


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


@dataclass(frozen=True, eq=False)
class Setup:
    """A network on its device, and the images that it explains."""

    name: str
    net: nn.Module
    subset: Subset
    device: torch.device

    @property
    def settings(self) -> Settings:
        return NETWORKS[self.name]

    @property
    def key(self) -> list[Any]:
        """Settings with which the kept numbers were found."""
        sizes = [self.settings.calls, self.settings.steps, self.settings.choosing, SUPERPIXELS]
        return [*sizes, SIGMAS, PIXEL_SIGMAS, BETAS, [*METHODS], self.device.type, 2]

    @property
    def baseline(self) -> Tensor:
        return self.subset.baseline.to(self.device)


@lru_cache(maxsize=1)
def prepared(name: str, folder: Path, device: str, images: int) -> Setup:
    """The network and the images, once in each process."""
    if torch.device(device).type == "cuda":  # convolutions would round to 10 bits
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    settings = NETWORKS[name]
    subset = load(folder, settings.choosing, max(images, settings.accuracy))
    net = load_network(name, folder).to(device)
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    return Setup(name, net, subset, torch.device(device))


def seconds_of(setup: Setup) -> float:
    """Processor time on a CPU; on a GPU the time that has passed when its work is done."""
    if setup.device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(setup.device)
    return time.perf_counter()


def measured(setup: Setup, images: Images, i: int, seed: int) -> Image:
    """Super-pixels of an image, and the joint effects of all pairs of them."""
    x, parts = images.inputs[i].to(setup.device), images.superpixels(i)
    with torch.no_grad():
        target = int(setup.net(x[None]).argmax())
    found = joint_removal(setup.net, x[None], parts, setup.baseline, None, target)
    return Image(Gated(setup.net, x, setup.baseline, parts.mask.to(setup.device)), target, found, seed)


def scored(setup: Setup, image: Image, method: Method, value: float) -> dict[str, float]:
    begin = seconds_of(setup)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table, passes = method.score(image, setup.settings, value)
    seconds = seconds_of(setup) - begin
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


def candidates(setup: Setup, i: int) -> dict[str, dict[str, float]]:
    """ρ of each candidate of each method at a validation image."""
    image = measured(setup, setup.subset.val, i, 10_000 + i)
    return {
        name: {f"{value:g}": scored(setup, image, method, value)["signed"] for value in method.candidates}
        for name, method in METHODS.items()
        if method.candidates
    }


def mean_of(images: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Mean ρ of each candidate over validation images."""
    return {
        name: {value: sum(image[name][value] for image in images) / len(images) for value in values}
        for name, values in images[0].items()
    }


def one_image(setup: Setup, i: int, chosen: dict[str, float]) -> dict[str, Any]:
    begin = seconds_of(setup)
    image = measured(setup, setup.subset.test, i, i)
    seconds = seconds_of(setup) - begin
    found = {name: scored(setup, image, method, chosen.get(name, 0.0)) for name, method in METHODS.items()}
    first, second = image.measured.pairs[0].unbind(1)
    effects, alone = image.measured.effects[0], image.measured.single[0]
    return {
        "methods": found,
        "segments": len(image.measured.names),
        "forward": image.measured.n_forward,
        "seconds": seconds,
        "size": float(effects.abs().mean() / alone.abs().mean()),
        "zero": float((effects.abs() <= image.measured.rounding).double().mean()),
        "substitution": float(spearman(effects[None], (alone[first] * alone[second])[None])),
    }


def accuracy(setup: Setup) -> float:
    images = setup.subset.test
    with torch.no_grad():
        parts = images.inputs[: setup.settings.accuracy].split(100)
        found = torch.cat([setup.net(x.to(setup.device)).argmax(1).cpu() for x in parts])
    return float((found == images.targets[: len(found)]).double().mean())


@dataclass(frozen=True)
class Task:
    """One image to explain, in this process or another."""

    prepare: tuple[str, Path, str, int]  # arguments of `prepared`
    i: int
    chosen: dict[str, float] | None = None  # σ and β; None for a validation image, by which they are chosen

    def __call__(self) -> Any:
        setup, i, chosen = prepared(*self.prepare), self.i, self.chosen
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()  # the other processes need the memory of the last image
        if chosen is None:
            return kept(KEPT / f"{setup.name}-choosing" / f"{i}.json", setup.key, lambda: candidates(setup, i))
        return kept(KEPT / setup.name / f"{i}.json", [setup.key, chosen], lambda: one_image(setup, i, chosen))


def finished(tasks: list[Task], pool: ProcessPoolExecutor | None) -> list[Any]:
    """Results of all tasks, in order."""
    found = []
    for result in pool.map(Task.__call__, tasks) if pool else map(Task.__call__, tasks):
        found.append(result)
        print(f"{tasks[0].prepare[0]}: image {len(found)} of {len(tasks)}", file=sys.stderr, flush=True)
    return found


def run(name: str, folder: Path, images: int, device: str = "cpu", processes: int = 1) -> None:
    """Explain the first `images` test images; what was done before is kept."""
    begin, arguments = time.perf_counter(), (name, folder, device, images)
    if name == "vgg":
        load_network(name, folder)  # trained once
    pool = ProcessPoolExecutor(processes, get_context("spawn")) if processes > 1 else None
    try:
        found = finished([Task(arguments, i) for i in range(NETWORKS[name].choosing)], pool)
        table = mean_of(found)
        chosen = {m: float(max(rho, key=lambda v, rho=rho: rho[v])) for m, rho in table.items()}
        setup = prepared(*arguments)
        about = {"candidates": table, "accuracy": accuracy(setup), "images": images, "key": [setup.key, chosen]}
        with atomic_write(KEPT / f"{name}.json") as part:  # before the test images: a stopped run has a page as well
            part.write_text(json.dumps(about | {"where": where(device, processes)}))
        finished([Task(arguments, i, chosen) for i in range(images)], pool)
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)
    print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)


def where(device: str, processes: int) -> str:
    """Machine and versions, for the page."""
    cuda = torch.device(device).type == "cuda"
    machine = torch.cuda.get_device_name() if cuda else platform.machine()
    seconds = "elapsed time" if cuda else "processor time"
    if processes > 1:
        machine, seconds = f"{machine}, {processes} processes", f"{seconds}, while the other processes run"
    return (
        f"{time.strftime('%Y-%m-%d')}, {machine}, {torch.get_num_threads()} thread(s), Python "
        f"{platform.python_version()}, torch {torch.__version__.split('+')[0]}; seconds are {seconds}"
    )


# --- page -------------------------------------------------------------------------------------------------------------


def mean_text(values: list[float], digits: int = 3) -> str:
    """Mean with half of its 95 % interval over images."""
    mean, stderr = average(values)
    n = sum(not math.isnan(v) for v in values)
    return f"{cell(mean, digits=digits)} ± {half_width(stderr, n - 1):.{digits}f}" if n > 1 else "–"


def section(name: str) -> list[str]:
    settings, summary = NETWORKS[name], KEPT / f"{name}.json"
    about: dict[str, Any] = json.loads(summary.read_text()) if summary.is_file() else {"images": 0}
    files = [KEPT / name / f"{i}.json" for i in range(about["images"])]
    stored = [json.loads(file.read_text()) for file in files if file.is_file()]
    images = [image["found"] for image in stored if image["key"] == about["key"]]
    if not images:
        return []
    table = about["candidates"]
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
        f"{settings.words}; accuracy {100 * about['accuracy']:.0f} %. {len(images)} test images, {min(parts)} to "
        f"{max(parts)} super-pixels, all pairs of them: {sum(i['forward'] for i in images) / len(images):.0f} forward "
        f"passes and {sum(i['seconds'] for i in images) / len(images):.2f} s per image. The mean joint effect is "
        f"{100 * sum(i['size'] for i in images) / len(images):.0f} % of the mean effect of one removal; "
        f"{100 * sum(i['zero'] for i in images) / len(images):.1f} % of the joint effects are zero to rounding. "
        f"SmoothHess has {settings.calls} calls, Integrated Hessians have {settings.steps} points.",
        "",
        f"*{about['where']}*",
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
    parser.add_argument("--device", default="cpu", help="where the networks run, such as cuda")
    parser.add_argument("--processes", type=int, default=1, help="processes that explain images at the same time")
    options = parser.parse_args()
    if options.network:
        run(options.network, options.data, options.images, options.device, options.processes)
    lines = [
        "# Faithfulness on images",
        "",
        "`OMP_NUM_THREADS=1 python benchmarks/faithfulness.py --data DIR --network vgg --images 200`",
        "",
        "`OMP_NUM_THREADS=1 python benchmarks/faithfulness.py --data DIR --network resnet18 --images 240 "
        "--device cuda --processes 5`",
        "",
        "± is half of a 95 % interval over images.",
        "",
        *remarks(options.write),
        *section("vgg"),
        *section("resnet18"),
    ]
    publish(lines, options.write)


if __name__ == "__main__":
    main()
