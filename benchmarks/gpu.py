"""What one GPU can do: small networks by the thousand, a ResNet on CIFAR10, and photos of 150 528 features.

    python benchmarks/gpu.py --data DIR --out DIR                   all parts on one H200, four minutes
    python benchmarks/gpu.py --data DIR --out DIR --part a --part b
    python benchmarks/gpu.py --data DIR --out DIR --device cpu --tiny        whether it runs at all, a minute

(a) MNIST, the authors' network: inputs a second at a relative error of 0.1, in `attribute` and in `explain_dataset`.
(b) CIFAR10, ResNet-18: inputs a second at a relative error of 0.15.
(c) 224 × 224: a ResNet-18 trained here on enlarged CIFAR10 images, and the shape of a ResNet-50.
(d) The share of the time of (b) and (c) that the model and the frozen model take, the limit of any method that lives on
    gradients.

True errors are taken against two independent long runs, as in efficiency.py. Times are medians after a warm-up, with
the GPU waited for. One Markdown table comes out, gpu.md, and the same numbers as gpu.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cases
import numpy as np
import torch
from cases import Case
from efficiency import Truth, median
from speed import recipe
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse
from torch.nn import functional
from torch.optim import SGD

from paper import datasets
from paper.augmentation import flip
from paper.datasets import ImageData
from paper.networks import ResNet, _BasicBlock, _Bottleneck, resnet18
from paper.training import Recipe, correct, train, warm_cosine
from smoothhess import Interactions, Isotropic, SmoothHess
from smoothhess.curvature import control_variate
from smoothhess.curvature.frozen_network import FrozenNetwork
from smoothhess.datasets import Store, explain_dataset
from smoothhess.draws.designs import find_design
from smoothhess.explainers.choose_control import frozen_model
from smoothhess.explainers.sampler import Sampler
from smoothhess.model.gradients import Oracle
from smoothhess.model.state import borrowed
from smoothhess.model.weight_files import load_weights

RECIPE_CALLS = 100_000  # of the published recipe for an MNIST input
MNIST_EPSILON, MNIST_TOL, MNIST_GOAL = 0.25, 0.1, 2_000
CIFAR_EPSILON, CIFAR_TOL, CIFAR_GOAL = 0.25, 0.15, 5
COMPILED, FOLDED = "compiled", "batch norms folded"
PHOTO_EPSILONS = (4.0, 16.0, 1.0)  # radii of the neighbourhoods of a photo; σ = 3ε/4√d as everywhere
CELLS, SHARE_OF_LARGEST, GROUP_SECONDS = 10, 0.2, 5.0  # super-pixels along a side, and their goal
EIGENPAIRS, RESIDUAL, EIGEN_SECONDS = 8, 0.05, 15.0
TRAINING_SECONDS = 40.0
TAU_SECONDS = 60.0  # a τ that would take longer is measured on a share of its columns
MODEL_SHARE = 0.85


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    part: str
    what: str
    goal: str
    measured: str
    met: bool | None = None  # None: nothing was promised


@dataclass
class Setting:
    """How large everything is; --tiny makes it small."""

    data: Path
    device: torch.device
    tiny: bool
    rows: list[Row] = field(default_factory=list)

    def tell(self, part: str, what: str, goal: str, measured: str, met: bool | None = None) -> None:
        """Add a line, and say it now."""
        row = Row(part, what, goal, measured, met)
        self.rows.append(row)
        print(_line(row), flush=True)

    def choose(self, usual: Any, tiny: Any) -> Any:
        return tiny if self.tiny else usual


# --- time, memory, and whose time it is -------------------------------------------------------------------------------


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """How long it takes, and what comes out."""
    synchronise()
    start = time.perf_counter()
    found = work()
    synchronise()
    return time.perf_counter() - start, found


def usual_seconds(work: Callable[[], Any], repeats: int) -> float:
    """The median, after a run that is thrown away."""
    work()
    return median([seconds(work)[0] for _ in range(repeats)])


@contextmanager
def peak_memory() -> Iterator[Callable[[], str]]:
    """Most memory of the GPU that was in use inside, in words."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    yield (
        lambda: f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if torch.cuda.is_available() else "not measured"
    )


class Clock:
    """Time inside some functions: of the device where that is a GPU, else of the wall."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.depth = 0
        self.spans: list[tuple[Any, Any]] = []

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, on the clock; a call inside a call counts once."""

        def timed(*args: Any, **options: Any) -> Any:
            self.depth += 1
            start = self._now() if self.depth == 1 else None
            try:
                return function(*args, **options)
            finally:
                self.depth -= 1
                if start is not None:
                    self.spans.append((start, self._now()))

        return timed

    @property
    def total(self) -> float:
        """Seconds."""
        synchronise()
        return sum(a.elapsed_time(b) / 1000 if self.cuda else b - a for a, b in self.spans)


PASSES: dict[Any, tuple[str, ...]] = {
    Oracle: ("__call__", "values"),
    FrozenNetwork: ("moves", "back"),
    control_variate: ("odd_flips", "own_flips"),
}


@contextmanager
def on_the_clock(device: torch.device) -> Iterator[Clock]:
    """Passes of the model and of the frozen model inside are timed."""
    clock = Clock(device)
    with ExitStack() as stack:
        for owner, names in PASSES.items():
            for name in names:
                stack.enter_context(patch.object(owner, name, clock.around(getattr(owner, name))))
        yield clock


def shared(work: Callable[[], Any], device: torch.device) -> tuple[float, float, Any]:
    """Seconds, the share of them in passes, and what came out."""
    with on_the_clock(device) as clock:
        took, found = seconds(work)
        return took, clock.total / took, found


# --- (a) MNIST --------------------------------------------------------------------------------------------------------


def part_a(s: Setting) -> None:
    """The authors' network, thousands of inputs together."""
    count = s.choose(2048, 6)
    case = next(cases.mnist(str(s.device), s.choose(8192, 12), [MNIST_EPSILON], s.data))
    together = replace(case, inputs=case.inputs[:count], target=case.target[:count] if case.target else None)
    radius = 0.75 * MNIST_EPSILON
    where = f"MNIST MLP, d = {case.d}, radius {radius:g} (σ = {case.sigma:.3g})"
    checked = s.choose(8, 1)
    truths = [Truth.of(case, i, s.choose(12, 2)) for i in range(checked)]

    calls = s.choose(RECIPE_CALLS, 2_000)
    loop = usual_seconds(partial(recipe, case, 0, calls, 16_384, 1), s.choose(3, 1))
    theirs = [truth.errors(recipe(case, i, calls, 16_384, 1))[0] for i, truth in enumerate(truths)]
    s.tell(
        "a",
        f"{where}: clean loop of the published calls, {calls} antithetic gradients",
        "",
        f"{1 / loop:.0f} inputs/s, true error {_spread(theirs)}",
    )
    for draws, seed in (("the same draws for all", 0), ("own draws for each", range(count))):
        work = partial(explained, together, tol=MNIST_TOL, seed=seed)
        rate = count / usual_seconds(lambda work=work: work().hessian, s.choose(3, 1))
        share, result = shared(work, s.device)[1:]
        errors = [truth.errors(result[i].hessian[0])[0] for i, truth in enumerate(truths)]
        reported = float(result.relative_error.max())
        s.tell(
            "a",
            f"`attribute`, {count} inputs together, {draws}, Hessians made dense",
            f"≥ {MNIST_GOAL} inputs/s at error ≤ {MNIST_TOL}",
            f"{rate:.0f} inputs/s ({rate * loop:.1f}× the loop); reported error ≤ {reported:.3f}, true "
            f"{_spread(errors)}; {float(result.n_calls.double().mean()):.0f} calls, "
            f"{float(result.n_passes.mean()):.0f} passes; {share:.0%} of the time in passes",
            rate >= MNIST_GOAL and max(errors) <= MNIST_TOL and reported <= MNIST_TOL,
        )
    cells = torch.arange(28) // 4
    patches = (cells[:, None] * 7 + cells)[None]
    for what, options in (
        ("20 strongest of 306 936 pairs, own draws", {"keep": "pairs"}),
        ("49 patches: Hessian and standard errors, own draws", {"keep": "hessian", "feature_mask": patches}),
    ):
        rate, error, calls = _stored(s, case, options)
        within = float((error <= MNIST_TOL).mean())
        s.tell(
            "a",
            f"`explain_dataset`, {len(error)} records, {what}",
            f"≥ {MNIST_GOAL} inputs/s at error ≤ {MNIST_TOL}",
            f"{rate:.0f} inputs/s; reported error ≤ {error.max():.3f} ({within:.1%} of them within {MNIST_TOL}), "
            f"{calls.mean():.0f} calls",
            rate >= MNIST_GOAL and within > 0.99,
        )


def explained(case: Case, **options: Any) -> Interactions:
    return SmoothHess(case.model).attribute(case.inputs, case.target, gaussian=Isotropic(case.sigma), **options)


def _stored(s: Setting, case: Case, options: dict[str, Any]) -> tuple[float, np.ndarray, np.ndarray]:
    """Records a second, and of each its reported error and its calls."""
    inputs, explainer = case.inputs.cpu(), SmoothHess(case.model)

    def job(folder: Path, records: int) -> Store:
        target = None if case.target is None else case.target[:records]
        return explain_dataset(
            explainer,
            inputs[:records],
            folder,
            target=target,
            gaussian=Isotropic(case.sigma),
            tol=MNIST_TOL,
            summary=False,
            device=s.device,
            pack_size=s.choose(None, 6),
            **options,
        )

    with tempfile.TemporaryDirectory() as scratch:
        job(Path(scratch) / "warm", s.choose(2048, 6))
        took, store = seconds(lambda: job(Path(scratch) / "store", len(inputs)))
        return len(store) / took, store.column("relative_error"), store.column("n_calls")


# --- (b) CIFAR10 ------------------------------------------------------------------------------------------------------


def part_b(s: Setting) -> None:
    """A trained ResNet-18, without a closed form: its passes would take longer than the rows that it saves."""
    case, other = _cifar_cases(s)
    truths = [Truth.of(case, i, s.choose(3, 1)) for i in range(s.choose(2, 1))]
    where = f"CIFAR10 ResNet-18, d = {case.d}, ε = {CIFAR_EPSILON} (σ = {case.sigma:.3g})"
    calls = _enough_calls(other, s)
    settings = s.choose((("tf32", ""), ("fp16", ""), ("fp16", COMPILED), ("fp16", FOLDED)), (("float32", FOLDED),))
    for precision, how in settings:
        asked = case
        options: dict[str, Any] = {"control": None, "precision": precision, "compile": how == COMPILED}
        name = precision + (f", {how}" if how else "")
        try:
            if how == FOLDED:
                asked = replace(case, model=_folded(case.model))
            result = explained(asked, n_calls=calls, **options)
        except Exception as error:  # torch.compile needs a compiler, and fx a model that it can trace
            s.tell("b", f"{where}, {name}", "", f"failed: {_first_line(error)}")
            continue
        work = partial(explained, asked, n_calls=calls, **options)
        took = usual_seconds(lambda work=work: work().hessian, s.choose(2, 1))
        rate = len(case.inputs) / took
        share = shared(lambda work=work: work().hessian, s.device)[1]
        errors = [truth.errors(result[i].hessian[0])[0] for i, truth in enumerate(truths)]
        reported, worst = float(result.relative_error.mean()), float(result.relative_error.max())
        noise = (
            "" if result.precision_error is None else f", rounding {float(result.precision_error.max()):.2f} a gradient"
        )
        met = rate >= CIFAR_GOAL and worst <= CIFAR_TOL and max(errors) <= CIFAR_TOL
        s.tell(
            "b",
            f"{where}, {len(case.inputs)} inputs, control=None, {name}",
            f"≥ {CIFAR_GOAL} inputs/s at error ≤ {CIFAR_TOL}",
            f"{rate:.2f} inputs/s; {calls} calls; reported error {reported:.3f} (≤ {worst:.3f}), true "
            f"{_spread(errors)}{noise}",
            met,
        )
        s.tell(
            "d",
            f"share of (b) in passes of the model, {name}",
            f"≥ {MODEL_SHARE:.0%}",
            f"{share:.0%}",
            share >= MODEL_SHARE,
        )
    defaults = replace(case, inputs=case.inputs[:1], target=case.target[:1] if case.target else None)
    took, share, result = shared(lambda: explained(defaults, tol=CIFAR_TOL), s.device)
    s.tell(
        "b",
        f"{where}, one input, defaults (float32, closed form where it pays)",
        "",
        f"{took:.2f} s, reported error {float(result.relative_error.max()):.3f}, {int(result.n_calls[0])} calls, "
        f"{float(result.n_passes[0]):.0f} passes, {share:.0%} in passes",
    )


def _folded(network: Any) -> nn.Module:
    """The same function, with each batch norm inside the convolution before it."""
    folded = fuse(network)
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv2d) and module.weight.is_contiguous(memory_format=torch.channels_last):
            folded.get_submodule(name).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return folded


def _cifar_cases(s: Setting) -> tuple[Case, Case]:
    """Test images to report on, and validation images to choose on."""
    images = _cifar10(s.data)
    count = s.choose(8, 2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = s.choose(resnet18, partial(resnet18, width=4))()
    inputs = torch.cat([images.test.inputs[:count], images.val.inputs[:count]])
    if s.tiny:
        inputs = inputs[:, :, ::4, ::4]
    else:
        load_weights(network, s.data / "resnet18_cifar10.safetensors")
    network, inputs = network.to(s.device).eval(), inputs.to(s.device)
    if s.device.type == "cuda":
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with torch.no_grad():
        target = network(inputs).argmax(1).tolist()
    sigma = 0.75 * CIFAR_EPSILON / math.sqrt(inputs[0].numel())
    reported, other = (
        Case("CIFAR10 ResNet-18", network, inputs[part], target[part], sigma, CIFAR_EPSILON, 0)
        for part in (slice(count), slice(count, None))
    )
    return reported, other


@lru_cache(maxsize=1)
def _cifar10(data: Path) -> ImageData:
    return datasets.cifar10(data, n_val=1_000)


def _enough_calls(case: Case, s: Setting) -> int:
    """Fewest calls, in sixths of a block, at which every one of some other inputs reports the requested error."""
    calls = 0
    for sixths in s.choose((10, 11, 12, 13, 14, 15, 16, 18), (6,)):
        calls = 2 * (sixths * case.d // 6)
        result = explained(case, n_calls=calls, control=None, precision=s.choose("fp16", "float32"))
        if float(result.relative_error.max()) <= CIFAR_TOL:
            break
    return calls


# --- (c) photos -------------------------------------------------------------------------------------------------------


def photo_network(kind: str, width: int = 64) -> ResNet:
    """A ResNet as for ImageNet: a 7 × 7 stem with stride 2 and a max-pool."""
    block, depths = {"18": (_BasicBlock, (2, 2, 2, 2)), "50": (_Bottleneck, (3, 4, 6, 3))}[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = ResNet(block, depths, width)
        network.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    network.relu = nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))  # type: ignore[assignment]
    return network


def part_c(s: Setting) -> None:
    """Photos of 3 × 224 × 224."""
    side = s.choose(224, 24)
    images = _cifar10(s.data)
    network, words = _trained(s, images, side)
    s.tell("c", f"ResNet-18 with ImageNet's stem on CIFAR10 enlarged to {side}², bf16", "≤ 60 s", words)
    x = enlarged(images.test.inputs[:1], side).to(s.device)
    with torch.no_grad():
        target = int(network(x).argmax())
    _superpixels(s, network, x, target)
    _eigenpairs(s, network, x, target)
    _exact_tau(s, network, x, target)
    other = photo_network("50", s.choose(64, 4)).to(s.device).eval()
    if s.device.type == "cuda":
        other = other.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for precision in s.choose(("tf32", "fp16"), ("float32",)):
        calls = s.choose(2048, 16)
        options = {"n_calls": calls, "feature_mask": cells(side), "control": None, "precision": precision}
        work = partial(SmoothHess(other).attribute, x, 0, sigma=_sigma(x, PHOTO_EPSILONS[0]), **options)
        work(n_calls=s.choose(256, 16))
        with peak_memory() as peak:
            took, share, _ = shared(work, s.device)
            s.tell(
                "c",
                f"shape of a ResNet-50 at {side}² (random weights), {CELLS * CELLS} super-pixels, {precision}",
                "",
                f"{calls} calls in {took:.2f} s, {calls / took:.0f} gradients/s, peak {peak()}",
            )
        _tell_share(s, f"ResNet-50 shape, super-pixels, {calls} calls, {precision}", share)


def _trained(s: Setting, images: ImageData, side: int) -> tuple[nn.Module, str]:
    """A network for enlarged images, in about TRAINING_SECONDS, and what it came to."""
    network = photo_network("18", s.choose(64, 4))
    whole = nn.Sequential(nn.Upsample((side, side), mode="bilinear", align_corners=False), network)
    batch = s.choose(256, 16)

    def steps(n: int) -> Recipe:
        rate = warm_cosine(0.01, 0.1, 1e-4, max(n // 5, 1), n)
        optimizer = partial(SGD, momentum=0.9, weight_decay=5e-4, nesterov=True)
        return Recipe(n, batch, optimizer, rate, functional.cross_entropy, correct, flip)

    few = images.train[: 2 * batch]
    start = {name: value.clone() for name, value in whole.state_dict().items()}
    train(whole, few, steps(5), device=s.device)
    took, _ = seconds(lambda: train(whole, few, steps(20), device=s.device))
    whole.load_state_dict(start)
    n_steps = s.choose(max(50, min(1500, int(TRAINING_SECONDS / (took / 20)))), 2)
    data = images.train[: s.choose(len(images.train), 32)]
    held_out = {"test": images.test[: s.choose(2_000, 16)]}
    done = train(whole, data, steps(n_steps), held_out=held_out, device=s.device)
    words = f"{n_steps} steps of {batch}, {done.seconds:.0f} s, test accuracy {done.scores['test']:.3f}"
    return network.eval().requires_grad_(False), words


def enlarged(images: Tensor, side: int) -> Tensor:
    return functional.interpolate(images, (side, side), mode="bilinear", align_corners=False)


def cells(side: int) -> Tensor:
    """CELLS × CELLS squares, the same for the three colours."""
    place = torch.arange(side) * CELLS // side
    return (place[:, None] * CELLS + place).expand(3, side, side)


def _sigma(x: Tensor, epsilon: float) -> float:
    return 0.75 * epsilon / math.sqrt(x[0].numel())


def _superpixels(s: Setting, network: nn.Module, x: Tensor, target: int) -> None:
    """Interactions of a hundred squares: more calls until the standard errors are small."""
    explainer, mask = SmoothHess(network), cells(x.shape[-1])
    for epsilon in PHOTO_EPSILONS:
        ratio, took, calls = math.inf, 0.0, s.choose(512, 8)
        share, peak_text = 0.0, ""
        while True:
            ask = partial(
                explainer.attribute,
                x,
                target,
                sigma=_sigma(x, epsilon),
                n_calls=calls,
                feature_mask=mask,
                control=None,
                precision=s.choose("tf32", "float32"),
            )
            if not peak_text:
                ask()  # to warm up
            with peak_memory() as peak:
                took, share, result = shared(lambda ask=ask: _with_errors(ask()), s.device)
                peak_text = peak()
            ratio = float(result.stderr().max() / result.hessian.abs().max())
            if ratio <= SHARE_OF_LARGEST or 2 * took > 1.2 * GROUP_SECONDS or s.tiny:
                break
            calls *= 2
        s.tell(
            "c",
            f"{CELLS * CELLS} super-pixels of one photo, d = {x[0].numel()}, ε = {epsilon:g} "
            f"(σ = {_sigma(x, epsilon):.3g}), {s.choose('tf32', 'float32')}, control=None",
            f"standard errors ≤ {SHARE_OF_LARGEST:.0%} of the largest entry in ≤ {GROUP_SECONDS:g} s",
            f"largest standard error {ratio:.0%} of the largest entry, {calls} calls, {took:.2f} s, peak {peak_text}",
            ratio <= SHARE_OF_LARGEST and took <= GROUP_SECONDS,
        )
        _tell_share(s, f"super-pixels, ε = {epsilon:g}, {calls} calls", share, promised=False)
        more = partial(ask, n_calls=8 * calls)
        more()  # to warm up
        took, share, result = shared(lambda more=more: _with_errors(more()), s.device)
        ratio = float(result.stderr().max() / result.hessian.abs().max())
        _tell_share(
            s, f"the same, {8 * calls} calls, {took:.2f} s, standard errors ≤ {ratio:.0%} of the largest entry", share
        )


def _tell_share(s: Setting, what: str, share: float, promised: bool = True) -> None:
    """Of the time of (c), what the passes of the model took."""
    goal, met = (f"≥ {MODEL_SHARE:.0%}", share >= MODEL_SHARE) if promised else ("", None)
    s.tell("d", f"share of (c) in passes of the model, {what}", goal, f"{share:.0%}", met)


def _with_errors(result: Interactions) -> Interactions:
    result.stderr()
    return result


def _eigenpairs(s: Setting, network: nn.Module, x: Tensor, target: int) -> None:
    """The leading directions of a matrix that is never made, and what other draws say of them."""
    explainer, calls = SmoothHess(network), s.choose(2048, 64)
    for epsilon in PHOTO_EPSILONS[:2]:
        ask = partial(
            explainer.attribute,
            x,
            target,
            sigma=_sigma(x, epsilon),
            n_calls=calls,
            precision=s.choose("tf32", "float32"),
        )

        def solved(ask: Callable[..., Interactions] = ask) -> tuple[Interactions, Any, Tensor]:
            result = ask(seed=0)
            pairs = result.eigh(EIGENPAIRS)
            return result, pairs, result.eigh_residuals(pairs)

        solved()  # to warm up
        with peak_memory() as peak:
            took, share, (result, pairs, residuals) = shared(solved, s.device)
            used = peak()
        other = ask(seed=1)
        again = [other.bilinear(v[None], v[None]) for v in pairs.vectors[0, :2]]
        seen = ", ".join(
            f"{float(value):.3g} (other draws: {float(e.value[0]):.3g} ± {float(e.stderr[0]):.1g})"
            for value, e in zip(pairs.values[0, :2], again, strict=True)
        )
        s.tell(
            "c",
            f"{EIGENPAIRS} eigenpairs, d = {x[0].numel()}, ε = {epsilon:g}, {calls} calls, control {result.control}",
            f"Rayleigh residual ≤ {RESIDUAL:.0%} of the largest eigenvalue in ≤ {EIGEN_SECONDS:g} s",
            f"residual ≤ {float(residuals.max()):.1e}, {took:.2f} s ({share:.0%} in passes), peak {used}; "
            f"λ₁, λ₂ = {seen}; reported relative error {float(result.relative_error[0]):.2f}",
            float(residuals.max()) <= RESIDUAL and took <= EIGEN_SECONDS,
        )


def _exact_tau(s: Setting, network: nn.Module, x: Tensor, target: int) -> None:
    """τ of every unit from all columns, or from a share of them where that would take too long."""
    gaussian = Isotropic(_sigma(x, PHOTO_EPSILONS[0]))
    oracle = Oracle(network, x, target)
    owner = torch.zeros(1, dtype=torch.long, device=x.device)
    d = x[0].numel()
    with borrowed(network, x.device):
        frozen = frozen_model(Sampler.start(oracle, x, gaussian, find_design("orthogonal"))).network
        few = range(min(s.choose(1024, 8), d))
        frozen.squares(gaussian, owner, few)
        took, _ = seconds(lambda: frozen.squares(gaussian, owner, few))
        whole = took * d / len(few)
        with peak_memory() as peak:
            if whole <= TAU_SECONDS:
                whole, squares = seconds(lambda: frozen.squares(gaussian, owner))
                how = f"all {d} columns, mean τ {float(squares.sqrt().mean()):.3g}"
            else:
                how = f"extrapolated from {len(few)} of {d} columns"
            s.tell(
                "c",
                f"exact τ of {frozen.neurons:,} units, d = {d}, float32",
                "timed",
                f"{whole:.1f} s ({how}), peak {peak()}; 64 random directions instead: {64 * took / len(few):.3f} s",
            )


# --- the table --------------------------------------------------------------------------------------------------------


PARTS: dict[str, Callable[[Setting], None]] = {"a": part_a, "b": part_b, "c": part_c}


def _spread(errors: Sequence[float]) -> str:
    return f"{sum(errors) / len(errors):.3f} (≤ {max(errors):.3f}, {len(errors)} inputs)"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]


def _line(row: Row) -> str:
    met = "–" if row.met is None else "yes" if row.met else "no"
    return f"| {row.part} | {row.what} | {row.goal or '–'} | {row.measured} | {met} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("SMOOTHHESS_DATA"))
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu.md and gpu.json")
    parser.add_argument("--part", action="append", choices=["a", "b", "c", "d"], help="d is measured inside b and c")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see whether it runs")
    options = parser.parse_args()
    if not options.data:
        parser.error("expected --data DIR (or SMOOTHHESS_DATA).")
    options.out.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    asked = set(options.part or "abcd")
    chosen = [name for name in PARTS if name in asked or ("d" in asked and name in "bc")]
    s = Setting(Path(options.data), torch.device(options.device), options.tiny)
    began = time.perf_counter()
    print("| | what | goal | measured | met |\n|---|---|---|---|---|", flush=True)
    times = {}
    for name in chosen:
        start = time.perf_counter()
        try:
            PARTS[name](s)
        except Exception as error:  # the other parts are still worth their time
            traceback.print_exc()
            s.tell(name, "stopped by an error", "", _first_line(error), False)
        times[name] = time.perf_counter() - start
        print(f"    part {name}: {times[name]:.0f} s", file=sys.stderr, flush=True)
    machine = torch.cuda.get_device_name() if s.device.type == "cuda" else f"{platform.machine()} CPU"
    command = f"python benchmarks/gpu.py --data DIR --out DIR{' --tiny --device cpu' if s.tiny else ''}"
    parts = ", ".join(f"{name} {took:.0f} s" for name, took in times.items())
    foot = (
        f"*{machine}, Python {platform.python_version()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, "
        f"{time.perf_counter() - began:.0f} s in all ({parts}); `{command}`*"
    )
    rows = sorted(s.rows, key=lambda row: row.part)
    lines = ["| | what | goal | measured | met |", "|---|---|---|---|---|", *map(_line, rows), "", foot]
    (options.out / "gpu.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (options.out / "gpu.json").write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    print("\n" + foot)


if __name__ == "__main__":
    main()
