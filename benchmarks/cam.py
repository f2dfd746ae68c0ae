"""Which map of a layer's positions finds the image cells that matter? Deletion and insertion curves on ResNet-18.

    OMP_NUM_THREADS=1 python benchmarks/cam.py --data DIR --images 128 --layers layer3 --device cuda
    OMP_NUM_THREADS=1 python benchmarks/cam.py --data DIR --images 128 --layers layer4
    OMP_NUM_THREADS=1 python benchmarks/cam.py --data DIR --write

DIR holds CIFAR10, or the file of image_subset.py, and resnet18_cifar10.safetensors. The logit of the predicted class is
explained by a map over the positions of a layer, and the pixels under each position are one cell of the image. Deletion
replaces cells by the mean colour of the training images, those with the largest values first; insertion begins with all
cells replaced and restores them in the same order. The layer, σ and β are chosen on validation images. The numbers of
each chunk of images are kept in build/cam, and a run that was stopped resumes. Layers can be run on different devices;
each section of the page names its own. Without --images the page is made from the chunks that were kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from faithfulness import kept, load_network, mean_text, where
from image_subset import Images, Subset, load
from interactions import markdown, publish, remarks
from torch import Tensor, nn

from paper.networks import ResNet
from smoothhess import Attribution
from smoothhess.baselines import taylor_cam, taylor_map
from smoothhess.model.atomic_write import atomic_write

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks" / "cam.md"
KEPT = ROOT / "build" / "cam"
SIGMAS = (0.05, 0.1, 0.2, 0.4, 0.8)  # of the gates: 1 closes a gate
BETAS = (1.0, 3.0, 10.0, 30.0, 100.0)
ROWS = {"cuda": 2048, "cpu": 128}  # images in a forward pass


@dataclass(frozen=True)
class Settings:
    """Sizes of a run; results that were kept with others are not used."""

    layers: tuple[str, ...] = ("layer3", "layer4.0", "layer4")
    calls: int = 256  # gradient calls of the smoothed model
    choosing: int = 48  # validation images
    chunk: int = 64  # images that are explained together
    points: int = 33  # at most, of a curve
    sigmas: tuple[float, ...] = SIGMAS
    betas: tuple[float, ...] = BETAS


# --- the network in two parts -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Parts:
    """A network that is `rest(first(x))`, where `first` ends with the layer."""

    first: nn.Module
    rest: nn.Sequential  # begins with nn.Identity, whose output is the activation
    linear: bool  # whether `rest` is affine


def split(net: ResNet, layer: str) -> Parts:
    """The network before and after a block, named layer3.0, or a stage, named layer3."""
    stages = (net.layer1, net.layer2, net.layer3, net.layer4)
    blocks = [(f"layer{s}.{b}", block) for s, stage in enumerate(stages, 1) for b, block in enumerate(stage)]
    last = layer if "." in layer else f"{layer}.{len(getattr(net, layer)) - 1}"
    end = [name for name, _ in blocks].index(last) + 1
    modules = [block for _, block in blocks]
    first = nn.Sequential(net.conv1, net.bn1, net.relu, *modules[:end])
    rest = nn.Sequential(nn.Identity(), *modules[end:], net.avgpool, nn.Flatten(), net.fc)
    return Parts(first.eval(), rest.eval(), end == len(modules))


@dataclass(frozen=True, eq=False)
class Chunk:
    """Images that are explained together, with their activations at one layer."""

    parts: Parts
    x: Tensor  # (B, C, H, W)
    colour: Tensor  # (C,)
    activation: Tensor  # (B, c, h, w)
    output: Tensor  # (B, classes) logits
    target: Tensor  # (B,)
    seeds: tuple[int, ...]  # one per image

    @staticmethod
    def of(parts: Parts, x: Tensor, colour: Tensor, seeds: Sequence[int]) -> Chunk:
        with torch.no_grad():
            activation = parts.first(x)
            output = parts.rest(activation)
        return Chunk(parts, x, colour, activation, output, output.argmax(1), tuple(seeds))

    @property
    def positions(self) -> int:
        return self.activation[0, 0].numel()

    def logits(self, model: nn.Module, points: Tensor) -> Tensor:
        """Outputs at points of each image, (B, n, …) → (B, n, classes)."""
        with torch.no_grad():
            found = torch.cat([model(some) for some in points.flatten(0, 1).split(ROWS[points.device.type])])
        return found.reshape(*points.shape[:2], -1)

    def explained(self, logits: Tensor) -> Tensor:
        """Logits of the targets, (B, n, classes) → (B, n)."""
        return logits.gather(2, self.target[:, None, None].expand(-1, logits.shape[1], 1))[..., 0]

    def cells(self, mask: Tensor) -> Tensor:
        """From positions to pixels by the nearest position, (B, n, positions) → (B, n, 1, H, W)."""
        rows, columns = self.activation.shape[2:]
        mask = mask.reshape(*mask.shape[:2], 1, rows, columns)
        return mask.repeat_interleave(self.x.shape[2] // rows, 3).repeat_interleave(self.x.shape[3] // columns, 4)

    def without(self, removed: Tensor) -> Tensor:
        """Images with cells replaced by the mean colour, (B, n, positions) → (B, n, C, H, W)."""
        return torch.where(self.cells(removed), self.colour[:, None, None], self.x[:, None])


# --- maps -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Found:
    """Scores (B, positions) by the name of the method, and what is known about the expansion that they belong to."""

    scores: dict[str, Tensor]
    about: dict[str, list[float]]  # one number per image


def greedy(gradient: Tensor, hessian: Tensor) -> Tensor:
    """Scores (B, P) of the order in which closing one more gate lowers the second-order expansion most.

    With the gates in S closed, gate k lowers it by G_k − ½M_kk − Σ_{l∈S} M_kl.
    """
    count, everyone = gradient.shape[1], torch.arange(len(gradient), device=gradient.device)
    gain, scores = gradient - hessian.diagonal(dim1=1, dim2=2) / 2, torch.zeros_like(gradient)
    for step in range(count):
        best = gain.masked_fill(scores > 0, -torch.inf).argmax(1)
        scores[everyone, best] = float(count - step)
        gain = gain - hessian[everyone, best]
    return scores


def expanded(chunk: Chunk, **options: Any) -> Attribution:
    """Taylor-CAM over the positions of the layer."""
    rest = chunk.parts.rest
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return taylor_cam(rest, rest[0], chunk.activation, chunk.target, dims=(2, 3), **options)


def second_order(chunk: Chunk, source: str, **options: Any) -> Found:
    """First order, second order and greedy order of one expansion."""
    result = expanded(chunk, **options)
    first, second = result.gradient.flatten(1), taylor_map(result).flatten(1)
    scores = {
        f"gradient, {source}": first,
        f"Taylor-CAM, {source}": second,
        f"Taylor-CAM, {source}, greedy": greedy(first, result.hessian),
    }
    about = {"error": result.relative_error, "passes": result.n_passes, "value": result.value}
    about |= {"first": first.sum(1), "second": second.sum(1)}
    return Found(scores, {key: number.tolist() for key, number in about.items()})


def smoothed(chunk: Chunk, settings: Settings, sigma: float) -> Found:
    options = {"sigma": sigma, "n_calls": settings.calls, "seed": chunk.seeds, "show_progress": False}
    return second_order(chunk, "smoothed", of="smooth", **options)


def softened(chunk: Chunk, settings: Settings, beta: float) -> Found:
    return second_order(chunk, "SoftPlus", of="softplus", beta=beta)


def fixed(chunk: Chunk) -> Found:
    """Maps without a parameter; `own` is the largest entry of M of the network itself."""
    result, count = expanded(chunk, of="own"), chunk.positions
    leaf = chunk.activation.clone().requires_grad_()
    chosen = chunk.parts.rest(leaf).gather(1, chunk.target[:, None]).sum()
    (gradient,) = torch.autograd.grad(chosen, leaf)
    weights = gradient.mean((2, 3), keepdim=True)
    each = torch.eye(count, dtype=torch.bool, device=chunk.x.device).expand(len(chunk.x), -1, -1)
    before = chunk.explained(chunk.output[:, None])
    open_gates = (~each).reshape(len(chunk.x), count, 1, *chunk.activation.shape[2:])
    closed = chunk.logits(chunk.parts.rest, open_gates * chunk.activation[:, None])
    removed = chunk.logits(nn.Sequential(chunk.parts.first, chunk.parts.rest), chunk.without(each))
    random = [torch.rand(count, generator=torch.Generator().manual_seed(seed)) for seed in chunk.seeds]
    scores = {
        "HiResCAM": result.gradient.flatten(1),
        "Grad-CAM": (weights * chunk.activation).sum(1).flatten(1),  # its ReLU would only make ties
        "closing one gate": before - chunk.explained(closed),
        "removing one cell": before - chunk.explained(removed),
        "random": torch.stack(random).to(chunk.x.device),
    }
    own = result.hessian.abs().amax((1, 2)).tolist()
    first = result.gradient.flatten(1).sum(1).tolist()
    return Found(scores, {"own": own, "value": result.value.tolist(), "first": first})


COMMANDS = (
    "python benchmarks/cam.py --data DIR --images 128 --layers layer3 --device cuda",
    "python benchmarks/cam.py --data DIR --images 128 --layers layer4",
)
FIXED = ("HiResCAM", "Grad-CAM", "closing one gate", "removing one cell", "random")
FIRST, REMOVAL = "HiResCAM", "removing one cell"
KINDS = ("deletion", "insertion")


@dataclass(frozen=True)
class Source:
    """A family of maps with one parameter."""

    symbol: str
    maps: Callable[[Chunk, Settings, float], Found]
    candidates: Callable[[Settings], tuple[float, ...]]


SOURCES = {
    "smoothed": Source("σ", smoothed, lambda settings: settings.sigmas),
    "SoftPlus": Source("β", softened, lambda settings: settings.betas),
}
METHODS = {
    **dict.fromkeys(FIXED[:2]),
    **{
        name: source
        for source in SOURCES
        for name in (f"gradient, {source}", f"Taylor-CAM, {source}", f"Taylor-CAM, {source}, greedy")
    },
    **dict.fromkeys(FIXED[2:]),
}
HALF_PASSES = {"closing one gate", "removing one cell"}  # one forward pass per position


# --- curves -----------------------------------------------------------------------------------------------------------


def curves(chunk: Chunk, scores: Tensor, points: int, insert: bool = True) -> dict[str, list[float]]:
    """Areas under the curves of each image: means over the fraction of cells, by the trapezoidal rule."""
    count = chunk.positions
    rank = scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)  # 0 is the largest score
    stride = max(1, -(-count // (points - 1)))
    steps = torch.tensor([*range(0, count, stride), count], device=scores.device)
    deleted = rank[:, None] < steps[:, None]  # (B, steps, positions)
    model, fraction = nn.Sequential(chunk.parts.first, chunk.parts.rest), steps.double() / count
    found = {}
    for name, gone in (("deletion", deleted), ("insertion", ~deleted))[: 1 + insert]:
        logits = chunk.logits(model, chunk.without(gone)).double()
        found[name] = torch.trapezoid(chunk.explained(logits.softmax(2)), fraction).tolist()
        found[f"{name}, logit"] = torch.trapezoid(chunk.explained(logits), fraction).tolist()
    return found


# --- runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Setup:
    """The network on its device, and the images that it explains."""

    net: ResNet
    subset: Subset
    device: torch.device
    settings: Settings

    def chunk(self, layer: str, images: Images, rows: range, seed: int) -> Chunk:
        x = images.inputs[rows.start : rows.stop].to(self.device)
        return Chunk.of(split(self.net, layer), x, self.subset.colour.to(self.device), [seed + i for i in rows])

    def key(self, rows: range) -> list[Any]:
        """Settings with which the kept numbers were found."""
        s = self.settings
        return [s.calls, s.points, s.sigmas, s.betas, [*METHODS], [rows.start, rows.stop], self.device.type, 1]


def ranges(count: int, size: int) -> list[range]:
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def candidates(setup: Setup, layer: str, rows: range) -> dict[str, Any]:
    """Deletion areas of each candidate of each method at validation images, by method and value."""
    begin, settings = time.perf_counter(), setup.settings
    chunk = setup.chunk(layer, setup.subset.val, rows, 10_000)
    found: dict[str, dict[str, list[float]]] = {}

    def add(maps: Found, value: str) -> None:
        for name, scores in maps.scores.items():
            found.setdefault(name, {})[value] = curves(chunk, scores, settings.points, insert=False)["deletion"]

    add(fixed(chunk), "")
    for source in SOURCES.values() if not chunk.parts.linear else ():
        for value in source.candidates(settings):
            add(source.maps(chunk, settings, value), f"{value:g}")
    return {"areas": found, "seconds": time.perf_counter() - begin}


def evaluated(setup: Setup, layer: str, chosen: dict[str, str], rows: range) -> dict[str, Any]:
    """Areas of all methods at test images, with the parameters that were chosen."""
    begin, settings = time.perf_counter(), setup.settings
    chunk = setup.chunk(layer, setup.subset.test, rows, 0)
    maps = fixed(chunk)
    scores, about = dict(maps.scores), {FIRST: maps.about}
    for source, of in SOURCES.items():
        values = {chosen[name] for name in METHODS if METHODS[name] == source and name in chosen}
        for value in sorted(values):
            maps = of.maps(chunk, settings, float(value))
            names = [name for name in maps.scores if chosen[name] == value]
            scores |= {name: maps.scores[name] for name in names}
            about |= dict.fromkeys(names, maps.about)
    areas = {name: curves(chunk, scores[name], settings.points) for name in METHODS if name in scores}
    seconds = time.perf_counter() - begin
    return {"areas": areas, "about": about, "positions": chunk.positions, "seconds": seconds}


def run(setup: Setup, images: int) -> None:
    """Choose σ and β for each layer, and explain the first `images` test images."""
    settings = setup.settings
    for layer in settings.layers:
        parts = []
        for rows in ranges(settings.choosing, settings.chunk):
            path = KEPT / f"{layer}-choosing-{rows.start}.json"
            parts.append(kept(path, setup.key(rows), partial(candidates, setup, layer, rows)))
        table = {
            name: {value: mean([part["areas"][name][value] for part in parts]) for value in values}
            for name, values in parts[0]["areas"].items()
        }
        chosen = {name: min(areas, key=lambda v, t=areas: t[v]) for name, areas in table.items()}
        seconds, todo = sum(part["seconds"] for part in parts), ranges(images, settings.chunk)
        keys = {rows.start: [setup.key(rows), chosen] for rows in todo}
        about = {"candidates": table, "keys": keys, "calls": settings.calls, "choosing": settings.choosing}
        about |= {"seconds": seconds, "where": where(str(setup.device), 1).split(";")[0]}
        with atomic_write(KEPT / f"{layer}.json") as part:  # before the test images: a stopped run has a page as well
            part.write_text(json.dumps(about))
        for rows in todo:
            path, make = KEPT / f"{layer}-{rows.start}.json", partial(evaluated, setup, layer, chosen, rows)
            seconds += kept(path, keys[rows.start], make)["seconds"]
            print(f"{layer}: {rows.stop} of {images} images, {seconds:.0f} s", file=sys.stderr, flush=True)


def mean(parts: Sequence[Sequence[float]]) -> float:
    """Mean of the numbers of all chunks."""
    numbers = [number for part in parts for number in part]
    return sum(numbers) / len(numbers)


def prepared(folder: Path, device: str, images: int, settings: Settings) -> Setup:
    if torch.device(device).type == "cuda":  # convolutions would round to 10 bits
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    net = load_network("resnet18", folder).to(device)
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    assert isinstance(net, ResNet)
    return Setup(net, load(folder, settings.choosing, images), torch.device(device), settings)


# --- page -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """What was kept of one layer."""

    name: str
    positions: int
    areas: dict[str, dict[str, list[float]]]  # by method and kind of curve, one number per image
    about: dict[str, dict[str, list[float]]]
    candidates: dict[str, dict[str, float]]
    sizes: str  # of the run, and its machine

    @staticmethod
    def read(name: str) -> Layer | None:
        """The chunks that were kept with the settings of the last run of this layer."""
        path = KEPT / f"{name}.json"
        run: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"keys": {}}
        files = [(KEPT / f"{name}-{start}.json", key) for start, key in run["keys"].items()]
        stored = [(json.loads(file.read_text()), key) for file, key in files if file.is_file()]
        parts = [content["found"] for content, key in stored if content["key"] == key]
        if not parts:
            return None
        areas, about = (
            {
                method: {key: [number for part in parts for number in part[what][method][key]] for key in keys}
                for method, keys in parts[0][what].items()
            }
            for what in ("areas", "about")
        )
        seconds = run["seconds"] + sum(part["seconds"] for part in parts)
        sizes = f"{len(areas[FIRST]['deletion'])} test images, {run['choosing']} validation images"
        if any(METHODS[method] for method in areas):
            sizes = f"{sizes}, {run['calls']} calls of the smoothed model"
        sizes = f"{sizes}; {run['where']}, {seconds:.0f} s"
        return Layer(name, parts[0]["positions"], areas, about, run["candidates"], sizes)

    @property
    def margin(self) -> float:
        """Deletion area of random orders minus that of HiResCAM on validation images, by which the layer is chosen."""
        return self.candidates["random"][""] - self.candidates[FIRST][""]

    def passes(self, method: str) -> float:
        """Gradient calls per image; a forward pass is half of one."""
        if method in HALF_PASSES:
            return (1 + self.positions) / 2
        own = self.about.get(method, {}).get("passes", [])
        return sum(own) / len(own) if own else float(method != "random")

    def chosen(self, method: str) -> str:
        table = self.candidates[method]
        source = METHODS[method]
        return f"{SOURCES[source].symbol} = {min(table, key=lambda v: table[v])}" if source else "–"

    def minus(self, method: str, reference: str, kind: str) -> str:
        """Mean difference of areas with half of its paired 95 % interval."""
        if method == reference:
            return "–"
        pairs = zip(self.areas[method][kind], self.areas[reference][kind], strict=True)
        return mean_text([a - b for a, b in pairs])

    def table(self) -> list[str]:
        rows = []
        for method, areas in self.areas.items():
            kinds = ("deletion", "deletion, logit", "insertion")
            pairs = [(f"{sum(areas[kind]) / len(areas[kind]):.3f}", self.minus(method, FIRST, kind)) for kind in kinds]
            cells = [text for pair in pairs for text in pair]
            rows.append([method, self.chosen(method), *cells, f"{self.passes(method):.0f}"])
        head = ["method", "chosen", "deletion", f"minus {FIRST}", "of the logit", f"minus {FIRST}"]
        return markdown([*head, "insertion", f"minus {FIRST}", "passes"], rows)

    def references(self) -> list[str]:
        """What the second order adds to the first, and what the exact effects of removals have beyond both."""
        rows = []
        for method in self.areas:
            source = METHODS[method]
            references = (f"gradient, {source}", REMOVAL) if source else ()
            cells = [self.minus(method, reference, kind) for reference in references for kind in KINDS]
            rows += [[method, *cells]] if cells else []
        names = ("its first order", REMOVAL)
        head = ["method", *(f"{kind} minus {name}" for name in names for kind in KINDS)]
        return [*markdown(head, rows), ""] if rows else []

    def sums(self) -> list[str]:
        """How well the maps add up to the effect of closing all gates."""

        def error(method: str, key: str) -> str:
            about = self.about[method]
            missed = [abs(a - b) for a, b in zip(about[key], about["value"], strict=True)]
            return f"{100 * sum(missed) / sum(map(abs, about['value'])):.0f} %"

        rows = [[FIRST, error(FIRST, "first"), "–", "–"]]
        for source in SOURCES:
            method = f"Taylor-CAM, {source}"
            if method in self.about:
                noise = self.about[method]["error"]
                sampled = f"{sum(noise) / len(noise):.2f}" if any(noise) else "–"
                rows.append([method, error(method, "first"), error(method, "second"), sampled])
        return markdown(["expansion", "error of ΣG", "error of the sum of the map", "relative error of M"], rows)

    def lines(self, first: bool) -> list[str]:
        """The section of the page."""
        side, own = round(self.positions**0.5), max(self.about[FIRST]["own"])
        searched = [
            [method, ", ".join(f"{SOURCES[METHODS[method]].symbol} = {v}: {area:.3f}" for v, area in table.items())]
            for method, table in self.candidates.items()
            if METHODS[method]
        ]
        table = [
            "Candidates, mean deletion area on validation images:",
            "",
            *markdown(["method", "areas"], searched),
            "",
        ]
        return [
            f"## {self.name}, {side} × {side} positions{', the chosen layer' if first else ''}",
            "",
            f"*{self.sizes}*",
            "",
            f"Largest entry of the network's own M over these images: {own:g}. On validation images HiResCAM has a "
            f"deletion area {self.margin:.3f} smaller than random orders.",
            "",
            *self.table(),
            "",
            *self.references(),
            *self.sums(),
            "",
            *(table if searched else []),
        ]


def page(path: Path | None) -> str:
    begin = ["# Second-order CAM", "", *(f"`OMP_NUM_THREADS=1 {command}`\n" for command in COMMANDS)]
    found = [layer for layer in map(Layer.read, Settings().layers) if layer]
    if not found:
        return "\n".join([*begin, *remarks(path)])
    layers = sorted(found, key=lambda layer: -layer.margin)
    second = [layer for layer in layers if any(METHODS[method] for method in layer.areas)]
    about = (
        "Areas are means over the fraction of cells: of the probability of the predicted class, or of its logit. "
        "Deletion areas are better when small, insertion areas when large. ± is half of a paired 95 % interval."
    )
    sections = [*second, *(layer for layer in layers if layer not in second)]
    lines = [line for layer in sections for line in layer.lines(len(second) > 1 and layer is second[0])]
    return "\n".join([*begin, about, "", *remarks(path), *lines]).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of CIFAR10 and of the weights")
    parser.add_argument("--images", type=int, help="test images; none: print what was kept")
    layers = Settings().layers
    parser.add_argument("--layers", nargs="+", choices=layers, default=layers, help="layers to run, all by default")
    parser.add_argument("--device", default="cpu", help="where the network runs, such as cuda")
    parser.add_argument("--write", nargs="?", type=Path, const=PAGE, help="write docs/benchmarks/cam.md")
    options = parser.parse_args()
    if options.images:
        settings = Settings(layers=tuple(options.layers))
        run(prepared(options.data, options.device, options.images, settings), options.images)
    publish([page(options.write)], options.write)


if __name__ == "__main__":
    main()
