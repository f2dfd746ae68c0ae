"""`smoothhess demo`: two small ReLU networks trained on data that come with scikit-learn, and explained."""

from __future__ import annotations

import os
import shutil
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from smoothhess import view
from smoothhess.explainers.smooth_hess import SmoothHess
from smoothhess.result.interactions import Interactions
from smoothhess.result.pairs import Pair
from smoothhess.view import captions
from smoothhess.view.figures import canvas, title_layout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAINING_NOISE = 0.25  # of each feature: without it, weights of pixels that are always blank stay as they were drawn
PAIRS = 8  # in each table and figure
WIDTH = 100  # of what is printed
WHICH = ("sure", "typical", "unsure")

LIMITS = (
    "Limits: the intervals are Monte-Carlo error of this one network's smoothed Hessian, not whether an interaction is "
    "real, stable or causal."
)
READING = (
    "How to read the tables: H is the mixed second derivative of the smoothed logit of the predicted class, with its "
    "95 % interval. H > 0: raising both features together raises the logit by more than the sum of their separate "
    "effects; H < 0: by less. Effect is H times one standard deviation of the noise in each feature, in units of the "
    "logit. q-value: the share of false discoveries among all pairs that look at least this clear.",
    "Relative error: how far the whole estimated matrix is from the exact one, as a share of its size; sampling went "
    "on until 10 %. R²: the share of the gradient's change around the input that pairs account for; the rest is of "
    "higher order. Calls: gradients of the network that were taken for this one input.",
)


@dataclass(frozen=True, eq=False)
class Task:
    """Data to learn and to explain."""

    name: str
    title: str
    inputs: Tensor  # (n, *shape) for training
    labels: Tensor  # (n,)
    test_inputs: Tensor
    test_labels: Tensor
    classes: Sequence[str]
    names: Sequence[str] | None  # of the columns; None: pixels by (row, column)
    scale: dict[str, float]  # how far to look: radius or sigma
    scale_words: str
    measured: Tensor | None = None  # the test inputs before they were standardised


@dataclass(frozen=True, eq=False)
class Explanation:
    """A trained network, and its interactions around a sure, a typical and an unsure test input."""

    task: Task
    accuracy: float
    index: list[int]  # of the inputs in the test set
    predicted: list[int]
    confidence: list[float]
    result: Interactions

    @property
    def pairs(self) -> list[list[Pair]]:
        """The strongest pairs of each input."""
        return self.result.top_pairs(PAIRS, self.task.names)

    def heading(self, i: int) -> str:
        """What the network sees in the i-th input."""
        classes, truth = self.task.classes, int(self.task.test_labels[self.index[i]])
        wrong = "" if truth == self.predicted[i] else f"; wrong, it is {classes[truth]}"
        guess = f"{classes[self.predicted[i]]} ({_percent(self.confidence[i])} sure{wrong})"
        return f"{WHICH[i].capitalize()}: number {self.index[i]} of the test set, taken for {guess}"


def digits(seed: int) -> Task:
    """Handwritten digits, 8 × 8 pixels in [0, 1]."""
    data = _sklearn("datasets").load_digits()
    train, test, train_labels, test_labels = _split(data.images / 16, data.target, seed)
    apart = torch.cdist(test.flatten(1), train.flatten(1))
    nearest = float(apart.where(test_labels[:, None] != train_labels, torch.inf).amin(1).median())
    radius = 1.0
    return Task(
        name="digits",
        title="handwritten digits, 8×8 pixels",
        inputs=train,
        labels=train_labels,
        test_inputs=test,
        test_labels=test_labels,
        classes=[f'"{i}"' for i in range(10)],
        names=None,
        scale={"radius": radius},
        scale_words=f"radius {radius:g}: noise of standard deviation {radius / 8:g} in every pixel (0 blank, 1 ink), "
        f"a distance of about {radius:g} in all; the nearest image of another digit is typically {nearest:.1f} away. "
        "Pixels are (row, column), counted from 0 at the top left.",
    )


def breast_cancer(seed: int) -> Task:
    """Measurements of cell nuclei, 30 named columns, standardised by the training set."""
    data = _sklearn("datasets").load_breast_cancer()
    train, test, train_labels, test_labels = _split(data.data, data.target, seed)
    mean, deviation = train.mean(0), train.std(0)
    sigma = 0.25
    return Task(
        name="breast_cancer",
        title="breast cancer, 30 measurements of cell nuclei",
        inputs=(train - mean) / deviation,
        labels=train_labels,
        test_inputs=(test - mean) / deviation,
        test_labels=test_labels,
        classes=[str(name) for name in data.target_names],
        names=[str(name) for name in data.feature_names],
        scale={"sigma": sigma},
        scale_words=f"sigma {sigma:g}: every column moves by about a quarter of its own standard deviation over the "
        "patients, so H is per standard deviation of each column.",
        measured=test,
    )


def train(task: Task, hidden: int, epochs: int, seed: int) -> nn.Sequential:
    """A ReLU network with two hidden layers; the global random state stays where it was."""
    generator = torch.Generator().manual_seed(seed)
    inputs, labels = task.inputs, task.labels
    with torch.random.fork_rng(devices=[]):  # the layers draw their first weights from the global generator
        torch.default_generator.manual_seed(seed)
        net = nn.Sequential(
            nn.Flatten(),
            nn.Linear(inputs[0].numel(), hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, len(task.classes)),
        )
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-2)
    with torch.enable_grad():
        for _ in _progress(range(epochs), f"training on {task.name}"):
            for batch in torch.randperm(len(inputs), generator=generator).split(64):
                noise = torch.randn(inputs[batch].shape, generator=generator)
                loss = nn.functional.cross_entropy(net(inputs[batch] + TRAINING_NOISE * noise), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return net.eval()


def explain(task: Task, net: nn.Sequential, seed: int, **options: Any) -> Explanation:
    """The interactions in the logit of the predicted class; `options` are those of `SmoothHess.attribute`."""
    with torch.no_grad():
        probabilities = net(task.test_inputs).softmax(-1)
    confidence, predicted = probabilities.max(-1)
    order = confidence.argsort(descending=True, stable=True)
    index = order[[0, len(order) // 2, -1]]
    with warnings.catch_warnings():  # the tables say what was reached
        warnings.simplefilter("ignore", UserWarning)
        result = SmoothHess(net).attribute(
            task.test_inputs[index], target=predicted[index], seed=seed, **task.scale, **options
        )
    return Explanation(
        task,
        accuracy=float((predicted == task.test_labels).float().mean()),
        index=index.tolist(),
        predicted=predicted[index].tolist(),
        confidence=confidence[index].tolist(),
        result=result,
    )


def report(explanation: Explanation) -> str:
    """What is printed about one network: accuracy, tables of pairs, quality figures."""
    task, result = explanation.task, explanation.result
    lines = [
        f"{task.title}: test accuracy {_percent(explanation.accuracy)} of {len(task.test_labels)} inputs "
        f"({len(task.labels)} for training)",
        "  A ReLU network with two hidden layers, trained with a little noise on its inputs.",
        _wrapped(f"How far we look: {task.scale_words}", "  "),
    ]
    for i, found in enumerate(explanation.pairs):
        names = [" × ".join(p.names) for p in found]
        width = max(map(len, names))
        lines += ["", f"  {explanation.heading(i)}"]
        lines.append(f"    {'pair':<{width}}  {'H':>7}  {'95 % interval':<18}  {'effect':>8}  q-value")
        for name, p in zip(names, found, strict=True):
            interval = f"[{p.low:+.3f}, {p.high:+.3f}]"
            star = "" if p.significant else "  not significant"
            lines.append(
                f"    {name:<{width}}  {p.value:+7.3f}  {interval:<18}  {p.effect:+8.4f}  {_q_text(p.q_value)}{star}"
            )
        reached = "" if result.status[i] == "tolerance" else f" (stopped by: {result.status[i]})"
        lines.append(
            f"    relative error {100 * float(result.relative_error[i]):.1f} %, R² {float(result.r2[i]):.2f}, "
            f"{int(result.n_calls[i])} calls{reached}"
        )
    return "\n".join(lines)


def overview(explanation: Explanation, i: int) -> Figure:
    """One wide figure: what the network saw, and its strongest pairs with their intervals."""
    task, result = explanation.task, explanation.result
    figure = canvas.new_figure(10.667, 4)
    left, right = figure.subplots(1, 2, width_ratios=[1.5, 1] if task.names is None else [1, 1.1])
    view.pairs(result, example=i, k=PAIRS, names=task.names, ax=right)
    if task.names is None:
        view.image(result, example=i, k=PAIRS, numbered=True, cmap="gray_r", ax=left)
        words = [label.get_text() for label in right.get_yticklabels()]
        right.set_yticks(right.get_yticks(), [f"{n}:  {pair}" for n, pair in enumerate(words, 1)])
    else:
        view.gradient(result, example=i, k=10, names=task.names, ax=left)
        title_layout.caption(left, f"each by itself: the 10 strongest of {len(task.names)}")
        title_layout.caption(right, f"together: {captions.quality_words(result[i])}")
        right.tick_params(axis="y", labelsize="small")
    what = "pixels" if task.names is None else "measurements"
    says = f"{task.classes[explanation.predicted[i]]}? ({_percent(explanation.confidence[i])} sure)"
    figure.suptitle(f"Which {what} act together when the network says {says}", fontsize=13)
    return figure


def gradients(explanation: Explanation) -> Figure:
    """SmoothGrad of the three inputs."""
    images = explanation.task.names is None
    figure = canvas.new_figure(10.667, 3.4 if images else 3.8)
    panels = figure.subplots(1, len(WHICH))
    limit = float(explanation.result.gradient.abs().max())  # the same colours in all three
    for i, ax in enumerate(panels):
        view.gradient(explanation.result, example=i, k=10, names=explanation.task.names, limit=limit, ax=ax)
        title_layout.caption(ax, f"{WHICH[i]}: {explanation.task.classes[explanation.predicted[i]]}")
    words = "faint: within noise (|z| < 2)" if images else panels[0].get_xlabel().replace("\n", "; ")
    for ax in panels:
        ax.set_xlabel("")
    figure.supxlabel(words, fontsize="small")
    return figure


def page(explanation: Explanation, path: Path) -> Path:
    """The interactive page of the three inputs."""
    task = explanation.task
    images = task.names is None
    return explanation.result.report(
        path,
        names=task.names,
        classes=[name.strip('"') for name in task.classes],
        output="logit",
        title=f"Which {'pixels' if images else 'measurements'} act together?",
        headings=[explanation.heading(i) for i in range(len(WHICH))],
        values=None if task.measured is None else task.measured[explanation.index],
        note=f"How far we look: {task.scale_words}",
    )


def heatmap(explanation: Explanation) -> Figure:
    """The whole matrix of the typical input."""
    figure = canvas.new_figure(6.6, 5.6)
    which = WHICH.index("typical")
    view.heatmap(explanation.result, example=which, names=explanation.task.names, ax=figure.subplots())
    figure.suptitle(f"typical: {explanation.task.classes[explanation.predicted[which]]}", fontsize="medium")
    return figure


def run(out: Path, seed: int = 0, epochs: int = 40, say: Callable[[str], object] = print, **options: Any) -> list[Path]:
    """Train, explain, print, and write pages, figures and results into the folder `out`; the files written.

    The files appear together at the end, each whole; files of an earlier run are replaced. `options` are those of
    `SmoothHess.attribute`.
    """
    out = out.expanduser().resolve()
    if out.exists() and not out.is_dir():
        raise ValueError(f"wanted a folder to write into, but {out} is a file. Pass another --out.")
    canvas.new_figure(1, 1)  # without matplotlib, say so at once
    with _one_thread(), _complete(out) as staging:
        drawings: list[tuple[str, Callable[[], Figure]]] = []
        for load, hidden in ((digits, 64), (breast_cancer, 32)):
            task = load(seed)
            explanation = explain(task, train(task, hidden, epochs, seed), seed, **options)
            say(report(explanation) + "\n")
            explanation.result.save(staging / f"{task.name}.safetensors")
            page(explanation, staging / f"{task.name}.html")
            drawings += [(f"{task.name}-{which}", partial(overview, explanation, i)) for i, which in enumerate(WHICH)]
            drawings.append((f"{task.name}-gradient", partial(gradients, explanation)))
            drawings.append((f"{task.name}-heatmap", partial(heatmap, explanation)))
        for paragraph in (*READING, LIMITS):
            say(_wrapped(paragraph, ""))
        for name, draw in _progress(drawings, "drawing"):
            draw().savefig(staging / f"{name}.png", dpi=150)
        names = sorted(path.name for path in staging.iterdir())
    say(f"\nWritten to {out}:\n{_wrapped(', '.join(names), '  ')}")
    say(f"\nOpen {out / 'digits.html'} in a browser: hover over a pixel to see what it acts together with.")
    return [out / name for name in names]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Networks this small gain nothing from threads, and crawl where there are more threads than free cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _complete(out: Path) -> Iterator[Path]:
    """A folder to write into whose files move to `out` when all are there, or vanish."""
    existed = out.is_dir()
    home = out if existed else out.parent
    staging = home / f".{out.name}.{os.getpid()}.partial"
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"cannot write into {home}: {error.strerror}. Pass another --out.") from error
    try:
        yield staging
        if not existed:
            staging.rename(out)
            return
        for path in sorted(staging.iterdir()):
            path.replace(out / path.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _split(inputs: Any, labels: Any, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A quarter of each class for the test."""
    parts = _sklearn("model_selection").train_test_split(
        inputs.astype("float32"), labels, test_size=0.25, stratify=labels, random_state=seed
    )
    train, test, train_labels, test_labels = (torch.as_tensor(part) for part in parts)
    return train, test, train_labels.long(), test_labels.long()


def _sklearn(module: str) -> Any:
    from importlib import import_module

    try:
        return import_module(f"sklearn.{module}")
    except ImportError as error:
        raise ImportError("the demo needs scikit-learn: pip install 'smoothhess[demo]'") from error


def _progress(steps: Any, what: str) -> Any:
    return tqdm(steps, desc=what, leave=False, disable=None)


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _percent(share: float) -> str:
    return "over 99.9 %" if share > 0.999 else f"{100 * share:.1f} %"


def _q_text(q: float) -> str:
    return f"{q:.3f}" if q >= 0.001 else f"{q:.0e}" if q > 1e-99 else "< 1e-99"
