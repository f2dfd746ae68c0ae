"""`smoothhess demo`: train two small ReLU networks on scikit-learn datasets and explain them.

This module holds the datasets, the training loop and the printed text of the demo. The figures are those of
`smoothhess.view`; explaining a model given by the user is the task of `smoothhess.cli.explain`.
"""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from smoothhess import view
from smoothhess.cli.explain.output_folder import UNFINISHED, Folder
from smoothhess.draws.seeding import torch_generator
from smoothhess.explainers.smooth_hess import SmoothHess
from smoothhess.result.effect_sizes import share_text
from smoothhess.result.interactions import Interactions
from smoothhess.result.pairs import Pair
from smoothhess.result.shown_estimate import error_text, shown
from smoothhess.result.text import LIMITS
from smoothhess.view import captions
from smoothhess.view.figures import canvas, title_layout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAINING_NOISE = 0.25  # std per feature: without it, weights of pixels that are always blank are never trained
PAIRS = 8  # pairs in each table and figure
WIDTH = 100  # characters per printed line
WHICH = ("sure", "typical", "unsure")

READING = (
    "How to read the tables: H is the mixed second derivative of the smoothed logit of the predicted class, with its "
    "95 % interval. H > 0: raising both features together raises the logit by more than the sum of their separate "
    "effects; H < 0: by less. Effect is H times one standard deviation of the noise in each feature, in units of the "
    "logit. q-value: the expected share of false discoveries among all pairs with a q-value no larger than this one. "
    "Size: the effect as a share of the separate effects of both features and of the output's change over the noise; "
    "tiny: one of them is below 1 %, small: below 10 %, moderate: below 50 %.",
    "Relative error: the estimated error of all these numbers in the Frobenius norm, relative to the norm of the "
    "matrix; sampling stops when that of the denoised matrix, result.hessian, is 10 %. "
    "R²: the share of the gradient's variation around the input that pairwise interactions "
    "account for; the remainder is of higher order. Calls: gradient evaluations of the network for this input.",
)


@dataclass(frozen=True, eq=False)
class Task:
    """A dataset: training data, test data, and the scale of the noise."""

    name: str
    title: str
    inputs: Tensor  # (n, *shape) for training
    labels: Tensor  # (n,)
    test_inputs: Tensor
    test_labels: Tensor
    classes: Sequence[str]
    names: Sequence[str] | None  # column names; None: pixels, named by (row, column)
    scale: dict[str, float]  # scale of the noise: radius or sigma
    scale_words: str
    measured: Tensor | None = None  # the test inputs before standardisation


@dataclass(frozen=True, eq=False)
class Explanation:
    """A trained network and its interactions at the test inputs of highest, median and lowest confidence."""

    task: Task
    accuracy: float
    index: list[int]  # positions of the inputs in the test set
    predicted: list[int]
    confidence: list[float]
    result: Interactions

    @property
    def pairs(self) -> list[list[Pair]]:
        """Return the strongest pairs of each input."""
        return self.result.top_pairs(PAIRS, self.task.names)

    def heading(self, i: int) -> str:
        """Describe the i-th input and its predicted class in one line."""
        classes, truth = self.task.classes, int(self.task.test_labels[self.index[i]])
        wrong = "" if truth == self.predicted[i] else f"; wrong, the label is {classes[truth]}"
        guess = f"{classes[self.predicted[i]]} (probability {_percent(self.confidence[i])}{wrong})"
        return f"{WHICH[i].capitalize()}: test input {self.index[i]}, predicted as {guess}"


def digits(seed: int) -> Task:
    """Load the handwritten digits: 8 × 8 pixels in [0, 1]."""
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
        f"a total distance of about {radius:g}; the median distance to the nearest image of another digit is "
        f"{nearest:.1f}. Pixels are named (row, column), counted from 0 at the top left.",
    )


def breast_cancer(seed: int) -> Task:
    """Load the breast-cancer data: 30 named columns, standardised by the training set."""
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
        scale_words=f"sigma {sigma:g}: the noise in each column has a quarter of the column's standard deviation over "
        "the patients, and H is per standard deviation of each column.",
        measured=test,
    )


def train(task: Task, hidden: int, epochs: int, seed: int) -> nn.Sequential:
    """Train a ReLU network with two hidden layers; the global random state is restored."""
    generator = torch_generator(seed)
    inputs, labels = task.inputs, task.labels
    with torch.random.fork_rng(devices=[]):  # the layers draw their initial weights from the global generator
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
    """Explain the logit of the predicted class at three test inputs; `options` go to `SmoothHess.attribute`."""
    with torch.no_grad():
        probabilities = net(task.test_inputs).softmax(-1)
    confidence, predicted = probabilities.max(-1)
    order = confidence.argsort(descending=True, stable=True)
    index = order[[0, len(order) // 2, -1]]
    with warnings.catch_warnings():  # the tables report the error that was reached
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
    """Format the printed text about one network: accuracy, tables of pairs, quality figures."""
    task, result = explanation.task, explanation.result
    one = shown(result)
    lines = [
        f"{task.title}: test accuracy {_percent(explanation.accuracy)} of {len(task.test_labels)} inputs "
        f"({len(task.labels)} for training)",
        "  A ReLU network with two hidden layers, trained with Gaussian noise on its inputs.",
        _wrapped(f"Scale of the noise: {task.scale_words}", "  "),
    ]
    for i, found in enumerate(explanation.pairs):
        names = [" × ".join(p.names) for p in found]
        width = max(map(len, names))
        lines += ["", f"  {explanation.heading(i)}"]
        lines.append(f"    {'pair':<{width}}  {'H':>7}  {'95 % interval':<18}  {'effect':>8}  {'q-value':<8}  size")
        for name, p in zip(names, found, strict=True):
            interval = f"[{p.low:+.3f}, {p.high:+.3f}]"
            size = f"{share_text(p.separate_share)} and {share_text(p.output_share)}, {p.size}"
            star = "" if p.significant else ", not significant"
            numbers = f"{p.value:+7.3f}  {interval:<18}  {p.effect:+8.4f}  {_q_text(p.q_value):<8}"
            lines.append(f"    {name:<{width}}  {numbers}  {size}{star}")
        reached = "" if result.status[i] == "tolerance" else f" (stopped by: {result.status[i]})"
        error, r2 = error_text(float(one.relative_error[i])), float(one.r2[i])
        lines.append(f"    relative error {error}, R² {r2:.2f}, {int(result.n_calls[i])} calls{reached}")
    return "\n".join(lines)


def overview(explanation: Explanation, i: int) -> Figure:
    """Draw one wide figure: the input or its gradient, and the strongest pairs with their intervals."""
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
        title_layout.caption(left, f"gradient: the 10 strongest of {len(task.names)} features")
        title_layout.caption(right, f"interactions: {captions.quality_words(result[i])}")
        right.tick_params(axis="y", labelsize="small")
    what = "pixels" if task.names is None else "measurements"
    predicted = f"{task.classes[explanation.predicted[i]]} (probability {_percent(explanation.confidence[i])})"
    figure.suptitle(f"Which {what} act together for the prediction {predicted}?", fontsize=13)
    return figure


def gradients(explanation: Explanation) -> Figure:
    """Draw SmoothGrad of the three inputs."""
    images = explanation.task.names is None
    figure = canvas.new_figure(10.667, 3.4 if images else 3.8)
    panels = figure.subplots(1, len(WHICH))
    limit = float(explanation.result.gradient.abs().max())  # one colour scale for all three
    for i, ax in enumerate(panels):
        view.gradient(explanation.result, example=i, k=10, names=explanation.task.names, limit=limit, ax=ax)
        title_layout.caption(ax, f"{WHICH[i]}: {explanation.task.classes[explanation.predicted[i]]}")
    words = "faint: within noise (|z| < 2)" if images else panels[0].get_xlabel().replace("\n", "; ")
    for ax in panels:
        ax.set_xlabel("")
    figure.supxlabel(words, fontsize="small")
    return figure


def page(explanation: Explanation, path: Path) -> Path:
    """Write the interactive page of the three inputs."""
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
        note=f"Scale of the noise: {task.scale_words}",
        model="ReLU network with two hidden layers, trained by smoothhess demo",
    )


def heatmap(explanation: Explanation) -> Figure:
    """Draw the full matrix of the typical input."""
    figure = canvas.new_figure(6.6, 5.6)
    which = WHICH.index("typical")
    view.heatmap(explanation.result, example=which, names=explanation.task.names, ax=figure.subplots())
    figure.suptitle(f"typical: {explanation.task.classes[explanation.predicted[which]]}", fontsize="medium")
    return figure


TASKS = {digits: 64, breast_cancer: 32}  # with the widths of the hidden layers
FIGURES = {"gradient": gradients, "heatmap": heatmap}  # of all three inputs


def run(out: Path, seed: int = 0, epochs: int = 40, say: Callable[[str], object] = print, **options: Any) -> list[Path]:
    """Train and explain both networks, print the tables, and write pages, figures and results.

    The files of a network are moved to `out` when all of them are written. Files of an earlier run are replaced, other
    files never.

    Args:
        out: Output folder; created if it does not exist.
        seed: Seed of the data split, of the initial weights and of the noise.
        epochs: Number of training epochs of each network.
        say: Function that prints one string.
        **options: Arguments of `SmoothHess.attribute`.

    Returns:
        The paths of the written files.

    Raises:
        ValueError: If `out` is a file, cannot be written to, or holds files of the same names that no run wrote.
        ImportError: If matplotlib or scikit-learn is not installed.
    """
    folder = Folder(out)
    canvas.new_figure(1, 1)  # raises at once where matplotlib is missing
    names = sorted(file for load in TASKS for file in _files(load.__name__))
    with _one_thread(), folder.opened():
        folder.refuse_foreign(names)
        found = []
        for load, hidden in TASKS.items():
            task = load(seed)
            found.append(explain(task, train(task, hidden, epochs, seed), seed, **options))
            say(report(found[-1]) + "\n")
        for paragraph in (*READING, f"Limits: {LIMITS}"):
            say(_wrapped(paragraph, ""))
        for explanation in _progress(found, "drawing"):
            with folder.writing(explanation.task.name, UNFINISHED, {}) as place:
                _write(explanation, place)
    say(f"\nWritten to {folder.path}:\n{_wrapped(', '.join(names), '  ')}")
    say(f"\nOpen {folder.path / 'digits.html'} in a browser: hover over a pixel to show its interactions.")
    return [folder.path / name for name in names]


def _files(task: str) -> list[str]:
    """Names of the files that `_write` writes."""
    return [f"{task}.safetensors", f"{task}.html", *(f"{task}-{figure}.png" for figure in (*WHICH, *FIGURES))]


def _write(explanation: Explanation, place: Path) -> None:
    name = explanation.task.name
    explanation.result.save(place / f"{name}.safetensors")
    page(explanation, place / f"{name}.html")
    drawn = {which: overview(explanation, i) for i, which in enumerate(WHICH)}
    drawn |= {figure: draw(explanation) for figure, draw in FIGURES.items()}
    for figure, drawing in drawn.items():
        drawing.savefig(place / f"{name}-{figure}.png", dpi=150)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: small networks gain nothing from more, and slow down when threads outnumber the free cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _split(inputs: Any, labels: Any, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split into training and test sets, with a quarter of each class in the test set."""
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
