"""Are interactions of tokens right, and do they find the pairs that act together?

    OMP_NUM_THREADS=1 python benchmarks/tokens.py             # prints the tables
    OMP_NUM_THREADS=1 python benchmarks/tokens.py --write     # and writes docs/benchmarks/tokens.md
    python benchmarks/tokens.py --parts large                 # the shape of GPT-2 on a CPU, about a minute
    python benchmarks/tokens.py --parts large --device cuda   # of GPT-2 and of a Llama on a GPU
    python benchmarks/tokens.py --parts large --tiny          # whether all rows of the table run, seconds
    python benchmarks/tokens.py --parts kernels --device cuda # fused kernels and half precision on a GPU

Gates of tokens on small transformers (small_transformers.py) in float32 with fused attention, against Hessians by
double backward in float64 without it; transformers trained on texts in which few pairs of tokens interact; and the time
and memory of large random ones.
"""

from __future__ import annotations

import argparse
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from small_transformers import SHAPES, Attention, Shape, Transformer, gated, rotated, written_out
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import smoothhess as sh
from smoothhess.estimate.student_t import quantile
from smoothhess.model.gradients import Oracle
from smoothhess.model.token_gates import TokenGates

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "tokens.md"
BEGIN, END = "<!-- written by hand, kept by --write -->", "<!-- the rest is written by the script -->"
TOKENS, SEEDS, PAIRS = 12, 3, 100  # PAIRS: mirrored pairs of draws of the Gaussian average of exact Hessians
TEXTS = 40  # explained texts of each planted interaction


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# --- the exact matrix -------------------------------------------------------------------------------------------------


def cases() -> Iterator[tuple[str, Transformer, Tensor, tuple[int, ...]]]:
    """Random transformers of each shape, a text and a target."""
    for name, shape in SHAPES.items():
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            ids = torch.randint(0, shape.vocabulary, (1, TOKENS))
            yield name, Transformer(shape).eval(), ids, (2,) if shape.classes else (TOKENS - 1, 7)


def distance(found: Tensor, true: Tensor) -> float:
    return float(((found.double() - true).norm() / true.norm()).detach())


def exactness() -> str:
    """Error against the exact token × token matrix at one block of 2T calls."""
    errors: dict[str, list[list[float]]] = {}
    for name, model, ids, target in cases():
        hessian = torch.func.hessian(gated(written_out(model), ids[0], target))
        true = hessian(torch.ones(TOKENS, dtype=torch.float64))
        explainer = sh.TokenSmoothHess(model, "tokens")
        found = [explainer.attribute(ids, target, sigma=s, n_calls=2 * TOKENS).hessian[0] for s in (0.003, 0.01, 0.03)]
        turned = sh.TokenSmoothHess(Rotated(model), "words").attribute(ids, target, sigma=0.01, n_calls=2 * TOKENS)
        own = [distance(h, true) for h in found]
        errors.setdefault(name, []).append([*own, distance(turned.hessian[0], found[1].double())])
    rows = [[name, *(f"{max(column):.1e}" for column in zip(*e, strict=True))] for name, e in errors.items()]
    return table(
        ["largest error of three networks", "σ = .003", "σ = .01", "σ = .03", "after a rotation, σ = .01"], rows
    )


class Rotated(nn.Module):
    """The same function with a rotated embedding space."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model, width = model, model.shape.width
        self.rotation = torch.linalg.qr(torch.randn(width, width)).Q
        self.words = nn.Embedding.from_pretrained(model.tokens.weight.detach() @ self.rotation)

    def forward(self, ids: Tensor) -> Tensor:
        return sh.Embedded(self.model, "tokens")(self.words(ids) @ self.rotation.mT, ids)


def intervals() -> str:
    """Coverage of 95 % intervals for the Gaussian average of exact Hessians, whose own error is included."""
    upper = torch.triu_indices(TOKENS, TOKENS).unbind()
    found: dict[tuple[str, float, int], list[tuple[Tensor, float, float]]] = {}
    for name, model, ids, target in cases():
        hessians = torch.func.vmap(torch.func.hessian(gated(written_out(model), ids[0], target)))
        for sigma in (0.1, 0.3):
            delta = sigma * torch.randn(PAIRS, TOKENS, dtype=torch.float64)
            pairs = hessians(1 + torch.cat([delta, -delta])).detach().unflatten(0, (2, PAIRS)).mean(0)
            mean, variance = pairs.mean(0), pairs.var(0) / PAIRS
            for calls in (2 * TOKENS, 16 * TOKENS):
                result = sh.TokenSmoothHess(model, "tokens").attribute(ids, target, sigma=sigma, n_calls=calls)
                row = result.row(0)
                error = (result.stderr()[0].double().square() + variance).sqrt()
                score = ((result.unshrunk().hessian[0] - mean) / error)[upper].abs()
                inside = (score < quantile(0.95, row.df.reshape(-1)[:1].double().cpu())).double()
                numbers = (inside, float(result.relative_error), distance(result.hessian[0], mean))
                found.setdefault((name, sigma, calls), []).append(numbers)
    rows = []
    for (name, sigma, calls), numbers in found.items():
        covered, reported, true = zip(*numbers, strict=True)
        share = float(torch.cat(covered).mean())
        errors = (f"{sum(e) / len(e):.3f}" for e in (reported, true))
        rows.append([name, f"{sigma:g}", str(calls), f"{share:.3f}", *errors])
    return table(["", "σ", "calls", "covered", "reported error", "distance to the average of 200 Hessians"], rows)


# --- kernels and precisions ------------------------------------------------------------------------------------------


KERNELS = {
    "math": SDPBackend.MATH,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
}
RUNS = {  # kernels and precisions for which torch has fused attention
    "cpu": [("math", "float32"), ("flash", "float32"), ("flash", "bf16")],
    "cuda": [
        ("math", "float32"),
        *(("memory-efficient", precision) for precision in ("float32", "tf32", "fp16", "bf16")),
        *(("flash", precision) for precision in ("fp16", "bf16")),
    ],
}


def kernels(device: str) -> str:
    """Largest error against the exact matrix at σ = .01 and rounding at σ = .1, both next to `precision_error`."""
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for _, model, ids, target in cases():
        true = torch.func.hessian(gated(written_out(model), ids[0], target))(torch.ones(TOKENS, dtype=torch.float64))
        explainer = sh.TokenSmoothHess(model.to(device), "tokens")
        run = partial(explainer.attribute, ids.to(device), target, n_calls=2 * TOKENS)
        with sdpa_kernel(SDPBackend.MATH):
            single = run(sigma=0.1).unshrunk().hessian[0].cpu()
        for kernel, precision in RUNS[device]:
            with sdpa_kernel([KERNELS[kernel], SDPBackend.MATH]):  # the model's first call is in float32
                small, own = (run(sigma=sigma, precision=precision) for sigma in (0.01, 0.1))
            errors = [distance(result.hessian[0].cpu(), true) for result in (small.unshrunk(), small)]
            rounding = distance(own.unshrunk().hessian[0].cpu(), single.double())
            numbers = (errors[0], stated(small), rounding, stated(own), errors[1], float(small.relative_error))
            found.setdefault((kernel, precision), []).append(numbers)
    rows = []
    for (kernel, precision), numbers in found.items():
        exact, limit, rounding, own_limit, denoised, reported = (
            torch.tensor(column) for column in zip(*numbers, strict=True)
        )
        row = [
            kernel,
            precision,
            f"{exact.max():.1e}",
            "",
            f"{rounding.max():.1e}",
            "",
            "",
            f"{denoised.max():.1e}",
            "",
        ]
        if precision != "float32":
            inside = [f"{int((a <= b).sum())} of {len(numbers)}" for a, b in ((exact, limit), (rounding, own_limit))]
            row[3], row[5] = (f"{a.min():.1e} to {a.max():.1e}" for a in (limit, own_limit))
            row[6] = " and ".join(inside)
            row[8] = f"{(reported / denoised).median():.1f} ({(reported / denoised).min():.1f})"
        rows.append(row)
    head = ["attention", "precision", "largest error, σ = .01", "`precision_error`", "largest rounding of Ĥ, σ = .1"]
    head += ["`precision_error`", "within the limits", "largest denoised error, σ = .01", "reported / true (least)"]
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})"
    return f"On {where}, torch {torch.__version__}.\n\n{table(head, rows)}"


def stated(result: sh.Interactions) -> float:
    """The limit of the rounding that a result reports; 0 in full precision."""
    return 0.0 if result.precision_error is None else float(result.precision_error)


# --- planted interactions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    """Texts whose label depends on few of their tokens, jointly."""

    name: str
    classes: int
    vocabulary: int
    draw: Callable[[int], tuple[Tensor, Tensor, Tensor]]  # n → ids (n, T), labels (n,), pairs (n, T, T)
    causal: bool = False  # the label is the token after the text

    def batch(self, n: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
        ids, label, pairs = self.draw(n)
        return ids.to(device), label.to(device), pairs.to(device)


PLANTED, UNCLEAR = 1, -1  # a pair that acts together; one that may, and is not counted


def marked(where: Tensor, value: int = PLANTED) -> Tensor:
    """All pairs of the positions (n, k), as (n, T, T)."""
    chosen = functional.one_hot(where, TOKENS).sum(1)
    return value * chosen[:, :, None] * chosen[:, None]


def places(n: int, count: int = 2) -> Tensor:
    """Different positions in each of n texts, (n, count)."""
    return torch.rand(n, TOKENS).argsort(1)[:, :count]


def xor(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bits, two of them marked (ids 2 and 3); the label is the exclusive or of the marked ones."""
    ids, where = torch.randint(0, 2, (n, TOKENS)), places(n)
    label = ids.gather(1, where).sum(1) % 2
    return ids.scatter(1, where, ids.gather(1, where) + 2), label, marked(where)


def addition(n: int, modulus: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """Two numbers 0 … 6 between ten kinds of other tokens; the label is their sum modulo 7."""
    ids, where, numbers = torch.randint(7, 17, (n, TOKENS)), places(n), torch.randint(0, modulus, (n, 2))
    return ids.scatter(1, where, numbers), numbers.sum(1) % modulus, marked(where)


def negation(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """One of six adjectives (ids 2 to 7), three of them good, and "not" (0) or "so" (1); the rest are fillers."""
    ids, where = torch.randint(8, 30, (n, TOKENS)), places(n)
    adjective, negated = torch.randint(0, 6, (n,)), torch.randint(0, 2, (n,))
    ids = ids.scatter(1, where, torch.stack([negated, adjective + 2], 1))
    return ids, (adjective % 2) ^ (negated == 0).long(), marked(where)


def induction(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Five keys (ids 0 to 7) with the values (8 to 13) that follow them, and one of the keys again; its value is next.

    The three pairs of the key, its value and the repeated key are planted.
    """
    keys, values, which = torch.rand(n, 8).argsort(1)[:, :5], torch.randint(8, 14, (n, 5)), torch.randint(0, 5, (n, 1))
    pairs = torch.stack([keys, values], 2).reshape(n, 10)
    ids = torch.cat([pairs, torch.full((n, 1), 14), keys.gather(1, which)], 1)
    where = torch.cat([2 * which, 2 * which + 1, torch.full((n, 1), TOKENS - 1)], 1)
    return ids, values.gather(1, which)[:, 0], marked(where)


def brackets(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two pairs of brackets, nested or not, of two kinds (ids 0 to 3) between fillers; the label: all kinds match.

    Brackets that do not match are planted, or both pairs if all match. Which brackets belong together depends on all
    four of them: their other pairs are not counted.
    """
    where, nested = places(n, 4).sort(1).values, torch.randint(0, 2, (n, 1)).bool()
    kinds, wrong = torch.randint(0, 2, (n, 2)), torch.randint(0, 4, (n,))  # wrong: 1 or 2, otherwise none
    closing = kinds ^ torch.stack([wrong == 1, wrong == 2], 1).long()
    order = torch.where(nested, torch.tensor([0, 1, 3, 2]), torch.tensor([0, 2, 1, 3]))  # of opening 0, 1, closing 2, 3
    ids = torch.randint(4, 12, (n, TOKENS)).scatter(1, where, torch.cat([kinds, closing + 2], 1).gather(1, order))
    pairs = marked(where, UNCLEAR)
    places_of = where.gather(1, order.argsort(1))  # positions of opening 0, 1 and closing 2, 3
    right = (wrong == 0) | (wrong == 3)
    for k in (0, 1):
        own = marked(places_of[:, [k, k + 2]]) * (right | (wrong == k + 1))[:, None, None]
        pairs = torch.where(own == PLANTED, PLANTED, pairs)
    return ids, right.long(), pairs


TASKS = (
    Planted("exclusive or", 2, 4, xor),
    Planted("sum modulo 7", 7, 17, addition),
    Planted("negation × adjective", 2, 30, negation),
    Planted("induction", 15, 15, induction, causal=True),
    Planted("brackets", 2, 12, brackets),
)


class Answer(nn.Module):
    """Logits (N, classes) of a transformer: its own, or those of the token after the text."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.model(ids)
        return logits if logits.ndim == 2 else logits[:, -1]


@dataclass(frozen=True)
class Networks:
    """The trained networks of all tasks, which are kept in a file."""

    file: Path | None
    steps: int
    device: str

    def of(self, task: Planted, seed: int) -> tuple[Answer, float]:
        """The network of a task and a seed, and its accuracy on new texts."""
        known = torch.load(self.file) if self.file is not None and self.file.exists() else {}
        key = f"{task.name} {seed} {self.steps}"
        torch.manual_seed(seed)
        classes = None if task.causal else task.classes
        shape = Shape(task.causal, classes=classes, vocabulary=task.vocabulary, length=TOKENS, width=48)
        model = Answer(Transformer(shape)).to(self.device)
        if key in known:
            model.load_state_dict(known[key])
        else:
            train(model, task, self.steps, self.device)
        if self.file is not None:
            torch.save({**known, key: {name: v.cpu() for name, v in model.state_dict().items()}}, self.file)
        ids, label, _ = task.batch(1000, self.device)
        with torch.no_grad():
            return model.eval(), float((model(ids).argmax(1) == label).double().mean())

    def explained(self) -> Iterator[tuple[Planted, int, Answer, float]]:
        """The networks of all tasks and seeds, one after the other."""
        for task in TASKS:
            for seed in range(SEEDS):
                yield task, seed, *self.of(task, seed)


def train(model: Answer, task: Planted, steps: int, device: str) -> None:
    """Train a transformer on a task."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, steps)
    for _ in range(steps):
        ids, label, _ = task.batch(128, device)
        loss = functional.cross_entropy(model(ids), label)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()


def attention_weights(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean attention over layers and heads, both directions added, (N, T, T)."""
    seen: list[Tensor] = []

    def keep(layer: nn.Module, given: tuple[Tensor, Tensor | None]) -> None:
        assert isinstance(layer, Attention)
        n, t, _ = given[0].shape
        q, k, _ = layer.project(given[0]).reshape(n, t, 3, layer.shape.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = (rotated(q), rotated(k)) if layer.shape.llama else (q, k)
        seen.append(layer.weights(q, k, given[1]).mean(1))

    handles = [m.register_forward_pre_hook(keep) for m in model.modules() if isinstance(m, Attention)]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    mean = torch.stack(seen).mean(0)
    return mean + mean.mT


def auc(scores: Tensor, pairs: Tensor) -> Tensor:
    """Chance that a planted pair scores higher than another pair of its text, (N,)."""
    i, j = torch.triu_indices(TOKENS, TOKENS, 1).unbind()
    found = []
    for score, kind in zip(scores.abs().cpu()[:, i, j], pairs.cpu()[:, i, j], strict=True):
        more = score[kind == PLANTED][:, None] - score[kind == 0]
        found.append(((more > 0).double() + 0.5 * (more == 0)).mean())
    return torch.stack(found)


def shapley_interactions(oracle: Oracle, text: int, index: str, calls: int) -> Tensor:
    """k-SII or FSII of order 2 from shapiq for one text of an oracle of gates, (T, T)."""
    import shapiq

    def game(coalitions: np.ndarray) -> np.ndarray:
        gates = torch.as_tensor(coalitions, dtype=torch.float32)
        return oracle.values(gates, torch.full((len(gates),), text)).double().numpy()

    if index == "k-SII":
        approximator: Any = shapiq.approximator.KernelSHAPIQ(n=TOKENS, max_order=2, index="k-SII", random_state=0)
    else:
        approximator = shapiq.approximator.RegressionFSII(n=TOKENS, max_order=2, random_state=0)
    return torch.as_tensor(approximator.approximate(budget=calls, game=game).get_n_order_values(2))


def methods(model: Answer, ids: Tensor, target: object) -> Iterator[tuple[str, Tensor, Tensor | float]]:
    """The name, the matrices and the passes per text of each method."""
    slow = Answer(written_out(model.model).to(ids.device))
    gates = TokenGates(slow, slow.model.tokens)
    ones = torch.ones(ids.shape, dtype=torch.float64, device=ids.device)
    arguments = (ids, slow.model.tokens.weight.detach().mean(0)[None, None], None)
    explainer = sh.TokenSmoothHess(model, model.model.tokens)
    for calls in (2 * TOKENS, 64 * TOKENS):
        result = explainer.attribute(ids, target, sigma=0.1, n_calls=calls)
        yield f"TokenSmoothHess, σ = 0.1, {calls // TOKENS}T calls", result.hessian, result.n_passes
    for centers in (8, 32, 64):
        found = explainer.strength(ids, target, n_centers=centers, control=None)
        yield f"TokenSmoothHess.strength, {centers} centres", found.value, centers * (2.0 * TOKENS + 2) + 0.5
    exact = sh.baselines.hessian(gates, ones, target, arguments)
    yield "Hessian of the gates at the text", exact.hessian, exact.n_passes
    for steps in (1, 16):
        path = sh.baselines.integrated_hessians(gates, ones, target, arguments, of="own", n_steps=steps)
        yield f"Integrated Hessians of the gates, {steps} step(s)", path.hessian, path.n_passes
    fused = TokenGates(model, model.model.tokens)
    single = (ids, model.model.tokens.weight.detach().mean(0)[None, None], None)
    start = torch.ones(ids.shape, device=ids.device)
    path = sh.baselines.integrated_hessians(
        fused, start, target, single, of="smooth", n_steps=4, sigma=0.1, n_calls=2 * TOKENS
    )
    yield "the same of SmoothHess, σ = 0.1, 4 steps", path.hessian, path.n_passes
    yield "attention weights", attention_weights(slow, ids), 0.5


def shapley_methods(model: Answer, ids: Tensor, target: object) -> Iterator[tuple[str, Tensor, Tensor | float]]:
    """As `methods`, for interaction indices of shapiq, from gates of 0 and 1."""
    baseline = model.model.tokens.weight.detach().mean(0)[None, None]
    oracle = Oracle(TokenGates(model, model.model.tokens), torch.ones(ids.shape), target, (ids, baseline, None))
    for index in ("k-SII", "FSII"):
        for calls in (8 * TOKENS, 64 * TOKENS):
            found = torch.stack([shapley_interactions(oracle, b, index, calls) for b in range(len(ids))])
            yield f"{index} of shapiq, {calls // TOKENS}T forward passes", found, calls / 2


def planted(networks: Networks, compared: Callable[..., Iterator[tuple[str, Tensor, Tensor | float]]]) -> str:
    """AUC of the planted pairs, per method and task, with the standard error over networks."""
    scores: dict[str, dict[str, list[float]]] = {}
    passes, accuracies = dict[str, float](), dict[str, float]()
    for task, seed, model, accuracy in networks.explained():
        accuracies[task.name] = min(accuracies.get(task.name, 1.0), accuracy)
        torch.manual_seed(100 + seed)
        ids, label, pairs = task.batch(TEXTS, networks.device)
        other = model(ids).detach().scatter(1, label[:, None], -torch.inf).argmax(1)
        for name, matrices, work in compared(model, ids, sh.contrast(label.tolist(), other.tolist())):
            found = float(auc(matrices, pairs).mean())
            scores.setdefault(name, {}).setdefault(task.name, []).append(found)
            passes[name] = float(torch.as_tensor(work).double().mean())
            print(f"{task.name}, network {seed}, {name}: {found:.3f}", flush=True)
    rows = [["*least accuracy of the networks*", "", *(f"{a:.3f}" for a in accuracies.values())]]
    for name, each in scores.items():
        of = [torch.tensor(found, dtype=torch.float64) for found in each.values()]
        rows.append([name, f"{passes[name]:.0f}", *(f"{o.mean():.3f} ± {o.std() / len(o) ** 0.5:.3f}" for o in of)])
    where = torch.cuda.get_device_name() if networks.device == "cuda" else f"CPU ({platform.machine()})"
    head = ["AUC of the planted pairs, three networks", "passes", *(task.name for task in TASKS)]
    return f"On {where}, torch {torch.__version__}.\n\n{table(head, rows)}"


# --- large shapes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Large:
    """A row of the table of large transformers."""

    name: str
    shape: Shape
    tokens: int
    device: str
    precision: Literal["float32", "bf16"] = "float32"

    @property
    def tiny(self) -> Large:
        """The same row with a small network, on the CPU."""
        shape = replace(self.shape, width=32, heads=4, layers=2, vocabulary=100, length=16)
        return replace(self, shape=shape, tokens=16, device="cpu")


GPT2 = Shape(tied=True, vocabulary=50257, length=512, width=768, heads=12, layers=12)
LLAMA = Shape(llama=True, vocabulary=32000, length=256, width=2048, heads=32, layers=20)
LARGE = (
    Large("GPT-2 small", GPT2, 32, "cpu"),
    Large("GPT-2 small", GPT2, 128, "cuda"),
    Large("GPT-2 small", GPT2, 128, "cuda", "bf16"),
    Large("GPT-2 small", GPT2, 512, "cuda"),
    Large("GPT-2 small", GPT2, 512, "cuda", "bf16"),
    Large("Llama", LLAMA, 256, "cuda"),
    Large("Llama", LLAMA, 256, "cuda", "bf16"),
)


class NextToken(nn.Module):
    """Logits (N, vocabulary) of the token after a text; the output layer runs at the last position only."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.tokens(ids) + self.model.positions[: ids.shape[1]]
        for block in self.model.blocks:
            x = block(x, None)
        return self.model.head(self.model.norm(x[:, -1]))


class Clock:
    """Total time of all calls of a function of the device, without calls inside of others."""

    def __init__(self, device: str) -> None:
        self.device, self.seconds, self.depth = device, 0.0, 0

    def now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            start, self.depth = self.now(), self.depth + 1
            try:
                return function(*args, **options)
            finally:
                self.depth -= 1
                self.seconds += 0.0 if self.depth else self.now() - start

        return call


def large(rows: Sequence[Large]) -> str:
    """Time, peak memory and error of one text, and the share of the time in which the model is evaluated."""
    lines = []
    for row in rows:
        torch.manual_seed(0)
        with torch.device(row.device):
            model = NextToken(Transformer(row.shape)).eval().requires_grad_(False)
            ids = torch.randint(0, row.shape.vocabulary, (1, row.tokens))
        size, clock = sum(p.numel() for p in model.parameters()), Clock(row.device)
        explainer = sh.TokenSmoothHess(model, model.model.tokens)
        options = {"sigma": 0.1, "precision": row.precision, "show_progress": True}
        if row.device == "cuda":
            explainer.attribute(ids, 7, n_calls=8, **options)  # kernels are loaded at the first call
            torch.cuda.reset_peak_memory_stats()
        with patch.object(Oracle, "in_batches", clock.timed(Oracle.in_batches)):
            start = clock.now()
            result = explainer.attribute(ids, 7, **options)
            seconds = clock.now() - start
        memory = f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB" if row.device == "cuda" else ""
        name = f"{row.name}, {size / 1e6:.0f} M parameters"
        run = [f"{seconds:.1f} s", memory, str(int(result.n_calls)), f"{float(result.relative_error):.3f}"]
        lines.append([name, str(row.tokens), row.precision, *run, f"{clock.seconds / seconds:.0%}"])
        print(" | ".join(lines[-1]), flush=True)
    head = ["random weights", "tokens", "precision", "time", "peak memory", "calls", "error", "share of time in passes"]
    where = torch.cuda.get_device_name() if rows[0].device == "cuda" else f"CPU ({platform.machine()})"
    return f"On {where}, {torch.get_num_threads()} thread(s), torch {torch.__version__}.\n\n{table(head, lines)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/tokens.md")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"), help="date of the page")
    parser.add_argument("--steps", type=int, default=1500, help="training steps of the planted interactions")
    parser.add_argument("--device", default="cpu", help="device of planted interactions and large shapes, cpu or cuda")
    parser.add_argument("--tiny", action="store_true", help="all large shapes in small, on the CPU")
    parser.add_argument("--networks", type=Path, help="file that keeps the trained networks")
    parser.add_argument("--parts", nargs="*", default=["exact", "intervals", "planted", "shapley"], help="tables")
    settings = parser.parse_args()
    warnings.simplefilter("ignore")
    start, parts = time.time(), {}
    networks = Networks(settings.networks, settings.steps, settings.device)
    sizes = [row.tiny for row in LARGE] if settings.tiny else [row for row in LARGE if row.device == settings.device]
    for name, title, make in (
        ("exact", "The exact matrix, 2T calls", exactness),
        ("intervals", "Intervals", intervals),
        ("planted", "Planted interactions", lambda: planted(networks, methods)),
        ("shapley", "Planted interactions, Shapley", lambda: planted(networks, shapley_methods)),
        ("kernels", f"Kernels and precisions, {settings.device}", lambda: kernels(settings.device)),
        ("large", f"Large shapes, {settings.device}", lambda: large(sizes)),
    ):
        if name in settings.parts:
            parts[title] = f"## {title}\n\n{make()}\n"
            print(parts[title], flush=True)
    if settings.write:
        write(parts, settings.date, time.time() - start)


def write(parts: dict[str, str], date: str, seconds: float) -> None:
    """Write the page; what was written by hand, and tables that were not made, are kept."""
    old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    kept = {part.split("\n", 1)[0].strip(): f"## {part}" for part in old.partition(END)[2].split("\n## ")[1:]}
    by_hand = old.split(BEGIN, 1)[1].split(END, 1)[0].strip() if BEGIN in old and END in old else ""
    lines = [
        "# Tokens",
        "`OMP_NUM_THREADS=1 python benchmarks/tokens.py --write`",
        f"{date}, 2 cores, CPU ({platform.machine()}), {torch.get_num_threads()} thread(s), torch {torch.__version__}, "
        f"{seconds / 60:.0f} minutes",
        BEGIN,
        by_hand,
        END,
        *(part.strip() for part in (kept | parts).values()),
    ]
    PAGE.write_text("\n\n".join(line for line in lines if line) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
