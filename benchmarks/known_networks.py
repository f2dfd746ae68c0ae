"""Networks that are trained on functions with known pairs: all networks of one architecture at once.

The parameters of all networks are stacked and trained by one step of Adam (torch.func.vmap), which a GPU replays as a
CUDA graph. Functions and draws are those of known.py and detectors.py; how interactions are scored does not belong
here.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from detectors import Fitted, drawn, mlp
from known import FEATURES, FUNCTIONS, Known
from small_transformers import Block, Shape
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from smoothhess.model.weight_files import read_weights, save_tensors

WIDTHS = (140, 100, 60, 20)  # of the NID paper's networks
CORRELATIONS = {"independent": 0.0, "correlated": 0.5}  # of all pairs in the Gaussian copula of the features
UNSEEN = 10_000  # rows of which R² is computed
WARMUP = 0.05  # share of the steps in which the learning rate increases


# --- architectures ----------------------------------------------------------------------------------------------------


class TableTransformer(nn.Module):
    """A transformer whose tokens are the features: token i is x_i w_i + b_i; the mean token gives the output."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape.length, shape.width))
        self.bias = nn.Parameter(torch.randn(shape.length, shape.width))
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.layers)])
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, 1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[:, :, None] * self.weight + self.bias  # (N, features, width)
        for block in self.blocks:
            tokens = block(tokens, None)
        return self.head(self.norm(tokens).mean(1))


def transformer_shape(width: int, heads: int, layers: int) -> Shape:
    """Attention is written out, since the fused kernels have no second derivatives."""
    return Shape(causal=False, width=width, heads=heads, layers=layers, length=FEATURES, fused=False)


MEDIUM, SMALL = transformer_shape(32, 4, 2), transformer_shape(8, 2, 1)


@dataclass(frozen=True)
class Sizes:
    """Sizes of the networks and of their training."""

    functions: tuple[str, ...] = tuple(f"F{i}" for i in range(1, 11))
    seeds: int = 6  # networks for each function and distribution; the first is used only to choose σ, β and the step
    widths: tuple[int, ...] = WIDTHS
    transformer: Shape = MEDIUM
    steps: int = 10_000  # of Adam
    transformer_steps: int = 6_000
    batch: int = 256
    rows: int = 20_000  # to train on
    rate: float = 3e-3


TINY = Sizes(
    functions=("F8", "F10"),
    seeds=3,
    widths=(16, 8),
    transformer=SMALL,
    steps=40,
    transformer_steps=20,
    batch=64,
    rows=1_000,
)

ARCHITECTURES: Mapping[str, Callable[[Sizes], nn.Module]] = {
    "relu": lambda sizes: mlp(FEATURES, sizes.widths),
    "gelu": lambda sizes: mlp(FEATURES, sizes.widths, nn.GELU),
    "transformer": lambda sizes: TableTransformer(sizes.transformer),
}


# --- networks and their data ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One function, one distribution of its features and one network."""

    function: str
    distribution: str
    seed: int

    @property
    def known(self) -> Known:
        """The function with this distribution."""
        return replace(FUNCTIONS[self.function], correlation=CORRELATIONS[self.distribution])

    def rows(self, rows: int, purpose: int) -> Tensor:
        """Rows of the domain; each network and each purpose (0 to 9) has its own draws."""
        number = 100 * (1 + list(CORRELATIONS).index(self.distribution)) + 10 * self.seed + purpose
        return drawn(self.known, rows, number)


TRAINING, NEW, REPORTED = range(3)  # purposes of rows


def cells(sizes: Sizes) -> list[Cell]:
    return [Cell(f, d, s) for f in sizes.functions for d in CORRELATIONS for s in range(sizes.seeds)]


@dataclass(frozen=True, eq=False)
class Data:
    """Standardised rows of all networks."""

    inputs: Tensor  # (networks, rows, 10)
    targets: Tensor  # (networks, rows)

    @staticmethod
    def of(networks: Sequence[Cell], rows: int, purpose: int, device: str) -> Data:
        inputs, targets = [], []
        for cell in networks:
            known = cell.known
            values = known(cell.rows(max(rows, 10_000), TRAINING))  # the standardisation does not depend on the rows
            x = cell.rows(rows, purpose)
            inputs.append(Fitted(known, nn.Identity(), 0.0, 1.0, 0.0).standard(x))
            targets.append(((known(x) - values.mean()) / values.std()).float())
        return Data(torch.stack(inputs).to(device), torch.stack(targets).to(device))


# --- training ---------------------------------------------------------------------------------------------------------


def initial(architecture: str, sizes: Sizes, networks: int, device: str) -> dict[str, Tensor]:
    """Stacked parameters of differently initialised networks."""
    modules = []
    for number in range(networks):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            modules.append(ARCHITECTURES[architecture](sizes))
    parameters, buffers = stack_module_state(modules)
    if buffers:
        raise ValueError("only networks without buffers can be trained this way")
    return {name: p.detach().to(device).requires_grad_() for name, p in parameters.items()}


def predictions(net: nn.Module, parameters: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """Outputs (networks, rows) of all networks, each for its own rows (networks, rows, 10)."""
    return vmap(lambda p, x: functional_call(net, p, (x,))[:, 0])(dict(parameters), inputs)


def learning_rate(step: int, steps: int, rate: float) -> float:
    """Linear warm-up, then a cosine to zero."""
    return rate * min(1.0, (step + 1) / (WARMUP * steps)) * (1 + math.cos(math.pi * step / steps)) / 2


class Trainer:
    """Steps of Adam for all networks; on a GPU one step is captured as a CUDA graph and replayed."""

    def __init__(
        self, net: nn.Module, parameters: dict[str, Tensor], data: Data, sizes: Sizes, graph: bool = True
    ) -> None:
        device = data.inputs.device
        self.net, self.parameters, self.data, self.sizes = net, parameters, data, sizes
        self.rate = torch.zeros((), device=device)
        cuda = device.type == "cuda"
        self.optimizer = torch.optim.Adam(parameters.values(), lr=self.rate, fused=True, capturable=cuda)
        self.networks = torch.arange(len(data.inputs), device=device)[:, None]
        self.index = torch.zeros(len(data.inputs), sizes.batch, dtype=torch.long, device=device)
        self.draws = torch.Generator(device).manual_seed(0)
        self.replay = self._captured() if cuda and graph else self._step

    def _step(self) -> None:
        x, y = self.data.inputs[self.networks, self.index], self.data.targets[self.networks, self.index]
        loss = (predictions(self.net, self.parameters, x) - y).square().mean(1).sum()  # networks share no parameters
        parameters = list(self.parameters.values())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient.contiguous()  # fused Adam expects the strides of the parameter
        self.optimizer.step()

    def _captured(self) -> Callable[[], None]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # with a learning rate of zero
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph.replay

    def run(self, steps: int) -> None:
        for step in range(steps):
            self.rate.fill_(learning_rate(step, steps, self.sizes.rate))
            torch.randint(self.data.inputs.shape[1], self.index.shape, generator=self.draws, out=self.index)
            self.replay()


def coefficients_of_determination(net: nn.Module, parameters: Mapping[str, Tensor], data: Data) -> list[float]:
    """R² of each network at these rows."""
    with torch.no_grad():
        chunks = [predictions(net, parameters, x) for x in data.inputs.split(500, dim=1)]
    error = (torch.cat(chunks, 1) - data.targets).square().mean(1)
    return (1 - error / data.targets.var(1)).tolist()


def train(architecture: str, sizes: Sizes, device: str, folder: Path, graph: bool = True) -> dict[str, Any]:
    """Train all networks of an architecture and write them to `folder`; networks that are there stay."""
    path = folder / f"{architecture}.safetensors"
    steps = sizes.transformer_steps if architecture == "transformer" else sizes.steps
    key = json.dumps({"version": 1, "sizes": asdict(sizes)})
    if path.is_file() and (kept := read_weights(path)[1])["key"] == key:
        return kept
    networks = cells(sizes)
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
    net = ARCHITECTURES[architecture](sizes).to(device)
    parameters = initial(architecture, sizes, len(networks), device)
    data = Data.of(networks, sizes.rows, TRAINING, device)
    begin = time.perf_counter()
    Trainer(net, parameters, data, sizes, graph).run(steps)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.set_float32_matmul_precision("highest")
    seconds = time.perf_counter() - begin
    r2 = coefficients_of_determination(net, parameters, Data.of(networks, UNSEEN, NEW, device))
    found = {"key": key, "r2": json.dumps(r2), "seconds": f"{seconds:.1f}", "device": device_name(device)}
    save_tensors(parameters, path, found)
    return found


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def train_all(sizes: Sizes, device: str, folder: Path, graph: bool = True) -> None:
    """Train every architecture and print which networks fit badly."""
    for architecture in ARCHITECTURES:
        found = train(architecture, sizes, device, folder, graph)
        r2 = torch.tensor(json.loads(found["r2"]))
        size = (folder / f"{architecture}.safetensors").stat().st_size / 1e6
        print(
            f"{architecture}: {len(r2)} networks in {found['seconds']} s on {found['device']}, R² from "
            f"{float(r2.min()):.4f}, median {float(r2.median()):.4f}, {size:.1f} MB",
            file=sys.stderr,
            flush=True,
        )
        rows = r2.unflatten(0, (-1, sizes.seeds)).min(1).values
        names = [f"{f} {d}" for f in sizes.functions for d in CORRELATIONS]
        poor = [f"{n} {float(v):.3f}" for n, v in zip(names, rows, strict=True) if v < 0.99]
        print(f"  smallest R² below 0.99: {', '.join(poor) or 'none'}", file=sys.stderr, flush=True)


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Ensemble:
    """The trained networks of one architecture."""

    architecture: str
    sizes: Sizes
    parameters: dict[str, Tensor]  # each (networks, …)
    r2: list[float]
    metadata: dict[str, str]

    @staticmethod
    def load(architecture: str, sizes: Sizes, folder: Path) -> Ensemble:
        tensors, metadata = read_weights(folder / f"{architecture}.safetensors")
        return Ensemble(architecture, sizes, tensors, json.loads(metadata["r2"]), metadata)

    def fitted(self, cell: Cell) -> Fitted:
        """The network of one cell."""
        number = cells(self.sizes).index(cell)
        net = ARCHITECTURES[self.architecture](self.sizes)
        net.load_state_dict({name: p[number] for name, p in self.parameters.items()})
        return Fitted(cell.known, net.eval().requires_grad_(False), self.r2[number], 1.0, 0.0)
