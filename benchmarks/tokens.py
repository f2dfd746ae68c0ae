"""Are interactions of tokens right, and do they find the pairs that act together?

    OMP_NUM_THREADS=1 python benchmarks/tokens.py             # prints the tables
    OMP_NUM_THREADS=1 python benchmarks/tokens.py --write     # and writes docs/benchmarks/tokens.md

Gates of tokens on small transformers (small_transformers.py) in float32 with fused attention, against Hessians by
double backward in float64 without it; and transformers trained on texts in which exactly one pair of tokens interacts.
"""

from __future__ import annotations

import argparse
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from small_transformers import SHAPES, Attention, Shape, Transformer, gated, rotated, written_out
from torch import Tensor, nn
from torch.nn import functional

import smoothhess as sh
from smoothhess.estimate.student_t import quantile
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


# --- planted interactions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    """Texts whose label depends on exactly two of their tokens, jointly."""

    name: str
    classes: int
    vocabulary: int
    draw: Callable[[int], tuple[Tensor, Tensor, Tensor]]  # n → ids (n, T), labels (n,), the two positions (n, 2)


def places(n: int) -> Tensor:
    """Two different positions in each of n texts, (n, 2)."""
    return torch.rand(n, TOKENS).argsort(1)[:, :2]


def xor(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bits, two of them marked (ids 2 and 3); the label is the exclusive or of the marked ones."""
    ids, where = torch.randint(0, 2, (n, TOKENS)), places(n)
    label = ids.gather(1, where).sum(1) % 2
    return ids.scatter(1, where, ids.gather(1, where) + 2), label, where


def addition(n: int, modulus: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """Two numbers 0 … 6 between ten kinds of other tokens; the label is their sum modulo 7."""
    ids, where, numbers = torch.randint(7, 17, (n, TOKENS)), places(n), torch.randint(0, modulus, (n, 2))
    return ids.scatter(1, where, numbers), numbers.sum(1) % modulus, where


def negation(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """One of six adjectives (ids 2 to 7), three of them good, and "not" (0) or "so" (1); the rest are fillers."""
    ids, where = torch.randint(8, 30, (n, TOKENS)), places(n)
    adjective, negated = torch.randint(0, 6, (n,)), torch.randint(0, 2, (n,))
    ids = ids.scatter(1, where, torch.stack([negated, adjective + 2], 1))
    return ids, (adjective % 2) ^ (negated == 0).long(), where


TASKS = (
    Planted("exclusive or of two marked bits", 2, 4, xor),
    Planted("sum of two numbers modulo 7", 7, 17, addition),
    Planted("negation × adjective", 2, 30, negation),
)


def trained(task: Planted, steps: int) -> tuple[Transformer, float]:
    """A BERT-like transformer, and its accuracy on new texts."""
    torch.manual_seed(0)
    shape = Shape(
        causal=False, classes=task.classes, vocabulary=task.vocabulary, length=TOKENS, width=48, norm_first=True
    )
    model = Transformer(shape)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, steps)
    for _ in range(steps):
        ids, label, _ = task.draw(128)
        loss = functional.cross_entropy(model(ids), label)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    ids, label, _ = task.draw(1000)
    with torch.no_grad():
        return model.eval(), float((model(ids).argmax(1) == label).double().mean())


def attention_weights(model: Transformer, ids: Tensor) -> Tensor:
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


def auc(scores: Tensor, where: Tensor) -> Tensor:
    """Chance that the planted pair scores higher than another pair of its text, (N,)."""
    i, j = torch.triu_indices(TOKENS, TOKENS, 1).unbind()
    planted = (i == where.amin(1, keepdim=True)) & (j == where.amax(1, keepdim=True))  # (N, pairs)
    flat = scores.abs()[:, i, j]
    own = flat[planted][:, None]
    return ((own > flat).double() + 0.5 * (own == flat)).sub(0.5 * planted).sum(1) / (len(i) - 1)


def methods(model: Transformer, ids: Tensor, target: object) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The name, the matrices and the passes per text of each method."""
    slow = written_out(model)
    gates, ones = TokenGates(slow, "tokens"), torch.ones(ids.shape, dtype=torch.float64)
    arguments = (ids, slow.tokens.weight.detach().mean(0)[None, None], None)
    explainer = sh.TokenSmoothHess(model, "tokens")
    for sigma in (0.1, 0.3):
        result = explainer.attribute(ids, target, sigma=sigma, n_calls=2 * TOKENS)
        yield f"TokenSmoothHess, σ = {sigma:g}, 2T calls", result.hessian, result.n_passes
    result = explainer.attribute(ids, target, sigma=0.1)
    yield "TokenSmoothHess, σ = 0.1, defaults", result.hessian, result.n_passes
    exact = sh.baselines.hessian(gates, ones, target, arguments)
    yield "Hessian of the gates at the text", exact.hessian, exact.n_passes
    for steps in (1, 16):
        path = sh.baselines.integrated_hessians(gates, ones, target, arguments, n_steps=steps)
        yield f"Integrated Hessians of the gates, {steps} step(s)", path.hessian, path.n_passes
    fused = TokenGates(model, "tokens")
    single = (ids, model.tokens.weight.detach().mean(0)[None, None], None)
    for steps in (1, 4):
        own = {"of": "smooth", "sigma": 0.1, "n_calls": 2 * TOKENS, "n_steps": steps}
        path = sh.baselines.integrated_hessians(fused, torch.ones(ids.shape), target, single, **own)
        yield f"the same of SmoothHess, σ = 0.1, fused attention, {steps} step(s)", path.hessian, path.n_passes
    yield "attention weights", attention_weights(slow, ids), torch.full((len(ids),), 0.5)


def planted(steps: int) -> str:
    """AUC of the planted pair, per method and task."""
    cells: dict[str, list[str]] = {}
    head, accuracies = ["AUC of the planted pair (passes)"], []
    for task in TASKS:
        model, accuracy = trained(task, steps)
        head.append(task.name)
        accuracies.append(f"{accuracy:.3f}")
        torch.manual_seed(1)
        ids, label, where = task.draw(TEXTS)
        other = model(ids).detach().scatter(1, label[:, None], -torch.inf).argmax(1)
        for name, scores, passes in methods(model, ids, sh.contrast(label, other)):
            found = auc(scores, where)
            cells.setdefault(name, []).append(f"{float(found.mean()):.3f} ({float(passes.double().mean()):.0f})")
    rows = [["*accuracy of the network*", *accuracies], *([name, *row] for name, row in cells.items())]
    return table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/tokens.md")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"), help="date of the page")
    parser.add_argument("--steps", type=int, default=1500, help="training steps of the planted interactions")
    settings = parser.parse_args()
    warnings.simplefilter("ignore")
    start, parts = time.time(), []
    for title, make in (
        ("The exact matrix, 2T calls", exactness),
        ("Intervals", intervals),
        ("Planted interactions", lambda: planted(settings.steps)),
    ):
        parts.append(f"## {title}\n\n{make()}\n")
        print(parts[-1], flush=True)
    if settings.write:
        write(parts, settings.date, time.time() - start)


def write(parts: list[str], date: str, seconds: float) -> None:
    """Write the page; what was written by hand is kept."""
    old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    by_hand = old.split(BEGIN, 1)[1].split(END, 1)[0].strip() if BEGIN in old and END in old else ""
    lines = [
        "# Tokens",
        "`OMP_NUM_THREADS=1 python benchmarks/tokens.py --write`",
        f"{date}, 2 cores, CPU ({platform.machine()}), {torch.get_num_threads()} thread(s), torch {torch.__version__}, "
        f"{seconds / 60:.0f} minutes",
        BEGIN,
        by_hand,
        END,
        *(part.strip() for part in parts),
    ]
    PAGE.write_text("\n\n".join(line for line in lines if line) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
