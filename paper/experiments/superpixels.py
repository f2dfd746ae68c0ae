"""Qualitative figure: how one super-pixel of an image interacts with the others, by three kinds of smoothing.

The first correctly classified test image of a car, a frog and a dog is divided into 20 to 25 segments by SLIC. The
interaction of two segments is the sum of the Hessian over all pairs of their pixels and channels; the figure shows the
interactions of the segment at the centre of the image with all others. The title of each picture is the P_MSE of the
surrogate with this Hessian, at ε = .25, with the sampler of the paper; σ and β minimize it on validation images.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from paper.balls import SAMPLERS, Balls
from paper.cells import Cells
from paper.classifiers import CLASSIFIERS, Classifier, NoWeightsError
from paper.experiments import Outcome
from paper.methods import PMSE, PMSE_BETA, Maker, Method, choose, sigma_candidates
from paper.options import Options
from paper.tables import COLUMN, print_style, save_figure, write_table
from smoothhess.evaluate.ball_samples import BallSamples
from smoothhess.model.model_call import ModelCall

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["run", "segment"]

NAME = "superpixels"
EPSILON = 0.25
SUBJECTS = ("automobile", "frog", "dog")
SEGMENTS = (20, 25)
METHODS = tuple(m for m in PMSE if m.order == 2)
TITLES = {"SH+SG": "SmoothHess", "SP H+G": "SoftPlus", "SW H+G": "Swish"}
Row = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """Sizes of the experiment."""

    calls: int | None  # of SmoothHess; None: until its relative error is 0.1
    samples: int  # of P_MSE
    val: int  # validation images for β,
    val_smooth: int  # for σ; 0: the second of the three candidates
    val_samples: int
    stride: int = 1  # use every stride-th value of the β grid


FULL = Size(None, 15_000, 20, 6, 300)
QUICK = Size(160, 60, 1, 0, 16, 16)


@dataclass(frozen=True, eq=False)
class Picture:
    """One image, its segments, and the interactions of the chosen one by each method."""

    subject: str
    image: Tensor  # (3, H, W)
    segments: Tensor  # (H, W)
    chosen: int
    found: Mapping[str, Row]  # by method

    def row(self, method: str) -> Tensor:
        """Interactions of the chosen segment with every segment, (K,)."""
        return torch.tensor(self.found[method]["interactions"])

    def partner(self, method: str) -> int:
        """The other segment that it interacts with most strongly."""
        return _strongest(self.row(method), self.chosen)

    def touches(self, other: int) -> bool:
        """Whether a segment lies next to the chosen one."""
        s = self.segments
        pairs = [(s[1:], s[:-1]), (s[:, 1:], s[:, :-1])]
        return any(
            bool((((a == self.chosen) & (b == other)) | ((b == self.chosen) & (a == other))).any()) for a, b in pairs
        )


def run(options: Options) -> Outcome:
    """Explain three images and draw them."""
    if options.dataset not in (None, "cifar10"):
        return Outcome(NAME, [], ["left out: it uses only CIFAR10"])
    started = time.perf_counter()
    source = next(s for s in CLASSIFIERS if s.key == "cifar10")
    try:
        classifier = source.classifier(options)
    except NoWeightsError as error:
        return Outcome(NAME, [], [f"left out: {error}"])
    size = QUICK if options.quick else FULL
    pictures, chosen = explain(classifier, options, size)
    folder = options.folder(NAME)
    lines = findings(pictures, classifier, chosen)
    heading = ["# Super-pixels", "", *options.made_by(NAME, time.perf_counter() - started), ""]
    files = write_table(rows_of(pictures), folder, NAME, [*heading, *(f"- {line}" for line in lines)])
    files += write_table(segment_rows(pictures), folder, "segments", ["# Super-pixels: all interactions shown"])
    with print_style():
        files += save_figure(figure(pictures), folder, NAME, dpi=300)
    return Outcome(NAME, files, lines)


def explain(classifier: Classifier, options: Options, size: Size) -> tuple[list[Picture], dict[str, float]]:
    """Compute the contents of the figure that are not on disk."""
    settings = {**asdict(size), "seed": options.seed, "weights": classifier.fingerprint, "epsilon": EPSILON}
    cells = Cells(options.folder(NAME) / "cells", settings)
    chosen = {m.name: _choice(classifier, options, size, cells, m) for m in METHODS}
    pictures = []
    work = tqdm(SUBJECTS, desc="super-pixels", disable=not options.show_progress)
    for subject in work:
        index = cells.compute({"image": subject}, lambda s=subject: _first_right(classifier, s))
        x = classifier.data.test.inputs[index : index + 1].to(options.device)
        mask = torch.tensor(cells.compute({"segments": subject}, lambda x=x: segment(x[0].cpu()).tolist()))
        middle = int(mask[mask.shape[0] // 2, mask.shape[1] // 2])
        bench = _Bench(classifier, options, size, x, mask, middle)
        found = {
            m.name: cells.compute(
                {"subject": subject, "method": m.name}, lambda m=m, bench=bench: bench.explained(m, chosen[m.name])
            )
            for m in METHODS
        }
        pictures.append(Picture(subject, x[0].cpu(), mask, middle, found))
    return pictures, chosen


def _choice(classifier: Classifier, options: Options, size: Size, cells: Cells, method: Method) -> float:
    """σ or β by P_MSE at ε = .25 on validation images."""

    def best() -> float:
        inputs = classifier.inputs("val", size.val if method.parameter == "β" else size.val_smooth)
        if not len(inputs):
            return sigma_candidates(EPSILON, classifier.data.test.inputs[0].numel())[1]
        make = Maker(classifier, inputs, classifier.predicted(inputs), n_calls=size.calls, seed=options.seed)
        (selection,) = choose(
            make,
            method,
            [EPSILON],
            PMSE_BETA[classifier.architecture][:: size.stride],
            n_samples=size.val_samples,
            sampling="radius",
            seed=options.seed,
            show_progress=options.show_progress,
        )
        return selection.best

    return cells.compute({"choice": method.name}, best)


def _first_right(classifier: Classifier, subject: str) -> int:
    """The first correctly classified test image of a class."""
    label = classifier.data.classes.index(subject)
    test = classifier.data.test
    for index in (test.targets == label).nonzero()[:, 0].tolist():
        if int(classifier.predicted(test.inputs[index : index + 1].to(classifier.device))) == label:
            return index
    raise ValueError(f"expected a test image of class {subject} that the network gets right, got none.")


def segment(image: Tensor) -> Tensor:
    """Super-pixels of an image (3, H, W) in [0, 1] by SLIC, 20 to 25 of them: ids from 0, (H, W)."""
    try:
        from skimage.segmentation import slic
    except ImportError as error:
        raise ImportError("super-pixels need scikit-image: pip install 'smoothhess[paper]'") from error
    pixels = image.permute(1, 2, 0).double().numpy()
    counts = []
    for compactness in (10.0, 5.0, 20.0, 40.0):  # by colour only, flat images are divided into too few segments
        for n_segments in range(SEGMENTS[0], 2 * SEGMENTS[1]):
            found = torch.from_numpy(slic(pixels, n_segments=n_segments, compactness=compactness, start_label=0))
            counts.append(int(found.max()) + 1)
            if SEGMENTS[0] <= counts[-1] <= SEGMENTS[1]:
                return found.long()
    raise ValueError(f"expected {SEGMENTS[0]} to {SEGMENTS[1]} super-pixels, SLIC made {min(counts)} to {max(counts)}.")


@dataclass(frozen=True, eq=False)
class _Bench:
    """One image and its segments."""

    classifier: Classifier
    options: Options
    size: Size
    x: Tensor  # (1, 3, H, W)
    mask: Tensor  # (H, W)
    chosen: int

    def explained(self, method: Method, value: float) -> Row:
        """Interactions of the chosen segment with their standard errors, and the surrogate's P_MSE."""
        target = self.classifier.predicted(self.x)
        make = Maker(self.classifier, self.x, target, n_calls=self.size.calls, seed=self.options.seed)
        result = make(method, value)
        groups = result.groups(self.mask.to(self.x.device).expand(self.x.shape[1:]))
        balls = Balls.around(
            ModelCall(self.classifier.readout, self.x, internal_batch_size=self.classifier.rows),
            {"logit": target},
            [EPSILON],
            BallSamples(self.size.samples, "ball", self.options.seed),
            show_progress=self.options.show_progress,
        )
        if self.size.samples >= result.shape[1]:
            _ = result.hessian  # cheaper than products along so many directions
        forms = balls.forms(result.taylor())
        scores = {sampler: balls.score("logit", EPSILON, sampler, forms) for sampler in SAMPLERS}
        return {
            "value": value,
            "interactions": groups.hessian[0, self.chosen].tolist(),
            "stderr": groups.stderr()[0, self.chosen].tolist(),
            "pmse": {sampler: float(score.per_point[0]) for sampler, score in scores.items()},
            "pmse stderr": {sampler: score.stderr for sampler, score in scores.items()},
            "calls": int(result.n_calls[0]),
            "error": float(result.relative_error[0]),
        }


# --- tables -----------------------------------------------------------------------------------------------------------


def _strongest(row: Tensor, chosen: int) -> int:
    others = row.abs().clone()
    others[chosen] = -1
    return int(others.argmax())


def rows_of(pictures: Sequence[Picture]) -> list[Row]:
    """One row for each picture and method."""
    rows = []
    for p in pictures:
        for method in METHODS:
            found, row, partner = p.found[method.name], p.row(method.name), p.partner(method.name)
            others = torch.arange(len(row)) != p.chosen
            both = torch.stack([p.row("SH+SG")[others], row[others]]).double()
            rows.append(
                {
                    "image": p.subject,
                    "method": TITLES[method.name],
                    "smoothing": f"{method.printed_parameter} = {method.printed(found['value']):.3g}",
                    "P_MSE, radius": found["pmse"]["radius"],
                    "standard error over draws": found["pmse stderr"]["radius"],
                    "P_MSE, ball": found["pmse"]["ball"],
                    "segments": len(row),
                    "chosen": p.chosen,
                    "strongest partner": partner,
                    "interaction": float(row[partner]),
                    "standard error": found["stderr"][partner],
                    "adjacent": "yes" if p.touches(partner) else "no",
                    "correlation with SmoothHess": float(torch.corrcoef(both)[0, 1]),
                }
            )
    return rows


def segment_rows(pictures: Sequence[Picture]) -> list[Row]:
    """All numbers of the figure."""
    return [
        {
            "image": p.subject,
            "method": TITLES[method.name],
            "segment": k,
            "pixels": int((p.segments == k).sum()),
            "interaction": float(value),
            "standard error": p.found[method.name]["stderr"][k],
            "chosen": "yes" if k == p.chosen else "",
        }
        for p in pictures
        for method in METHODS
        for k, value in enumerate(p.row(method.name))
    ]


def findings(pictures: Sequence[Picture], classifier: Classifier, chosen: Mapping[str, float]) -> list[str]:
    """Summarise the figure in numbers."""
    words = ", ".join(f"{TITLES[m.name]} {m.printed_parameter} = {m.printed(chosen[m.name]):.3g}" for m in METHODS)
    lines = [f"{classifier.title}: {classifier.words}", f"chosen on validation images at ε = {EPSILON:g}: {words}"]
    for sampler in SAMPLERS:
        ratios = []
        for p in pictures:
            errors = {m.name: p.found[m.name]["pmse"][sampler] for m in METHODS}
            ratios.append(errors["SH+SG"] / min(errors[name] for name in errors if name != "SH+SG"))
        won = sum(ratio < 1 for ratio in ratios)
        lines.append(
            f"P_MSE, {sampler}: SmoothHess is lowest in {won} of {len(pictures)} images (published: 3 of 3), at "
            f"{min(ratios):.2f} to {max(ratios):.2f} of the next best"
        )
    calls, errors = ([p.found["SH+SG"][key] for p in pictures] for key in ("calls", "error"))
    lines.append(
        f"SmoothHess used {min(calls)} to {max(calls)} calls per image, its relative error is "
        f"{min(errors):.2f} to {max(errors):.2f}"
    )
    near = sum(p.touches(p.partner("SH+SG")) for p in pictures)
    positive = sum(float(p.row("SH+SG")[p.partner("SH+SG")]) > 0 for p in pictures)
    lines.append(
        f"SmoothHess: the strongest partner of the chosen segment lies next to it in {near} of {len(pictures)} images, "
        f"and its interaction is positive in {positive}"
    )
    return lines


# --- figure -----------------------------------------------------------------------------------------------------------


def figure(pictures: Sequence[Picture]) -> Figure:
    """A row for each image: the image, and the chosen segment's interactions by each method."""
    from smoothhess.view.figures.canvas import INK, array, new_figure

    drawn = new_figure(COLUMN, 0.15 + 1.03 * len(pictures))
    axes = drawn.subplots(len(pictures), 1 + len(METHODS), squeeze=False)
    for i, (row, p) in enumerate(zip(axes, pictures, strict=True)):
        row[0].imshow(array(p.image.permute(1, 2, 0)), interpolation="nearest")
        row[0].set_ylabel({"automobile": "car"}.get(p.subject, p.subject), fontsize=7.5)
        _outline(row[0], p)
        if i == 0:
            row[0].set_title("image\n$P_{MSE}$:", fontsize=7, pad=2.5)
        for ax, method in zip(row[1:], METHODS, strict=True):
            limit = _heatmap(ax, p, method.name)
            _outline(ax, p)
            title = f"{TITLES[method.name]}\n" if i == 0 else ""
            ax.set_title(f"{title}{_scientific(p.found[method.name]['pmse']['radius'])}", fontsize=7, pad=2.5)
            ax.set_xlabel(f"± {float(f'{limit:.2g}'):g}", fontsize=6.5, labelpad=1.5, color=INK)
        for ax in row:
            ax.set(xticks=[], yticks=[])
            for spine in ax.spines.values():
                spine.set_visible(False)
    engine = drawn.get_layout_engine()
    if engine is not None:
        engine.set(w_pad=0.02, h_pad=0.03, wspace=0.02, hspace=0.02)  # type: ignore[call-arg]
    return drawn


def _scientific(value: float) -> str:
    """Format a number in short scientific notation.

    >>> _scientific(0.00098), _scientific(0.0125)
    ('$9.8\\\\cdot10^{-4}$', '$1.2\\\\cdot10^{-2}$')
    """
    power = math.floor(math.log10(value)) if value > 0 else 0
    return f"${value / 10**power:.1f}\\cdot10^{{{power}}}$"


def _heatmap(ax: Axes, p: Picture, method: str) -> float:
    """Draw the colours of the other segments over the grey image, and return the end of the colour scale."""
    from smoothhess.view.figures.canvas import DIVERGING, array

    row = p.row(method).clone()
    row[p.chosen] = 0.0
    limit = float(row.abs().max()) or 1.0
    grey = array(p.image.mean(0))
    ax.imshow(grey, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    shown = array(row)[p.segments.numpy()]
    opacity = 0.75 * (p.segments.numpy() != p.chosen)
    ax.imshow(shown, cmap=DIVERGING, vmin=-limit, vmax=limit, alpha=opacity, interpolation="nearest")
    return limit


def _outline(ax: Axes, p: Picture) -> None:
    """Borders of all segments, faint, and of the chosen one in black."""
    from matplotlib.collections import LineCollection

    s = p.segments
    faint, strong = [], []
    for a, b in ((0, 1), (1, 0)):
        shifted = s.roll((-a, -b), (0, 1))
        for y, x in (s != shifted).nonzero().tolist():
            if y + a >= s.shape[0] or x + b >= s.shape[1]:
                continue
            start = (x + 0.5, y - 0.5) if b else (x - 0.5, y + 0.5)
            line = [start, (x + 0.5, y + 0.5)]
            (strong if p.chosen in (int(s[y, x]), int(shifted[y, x])) else faint).append(line)
    ax.add_collection(LineCollection(faint, colors="white", linewidths=0.25, alpha=0.6))
    ax.add_collection(LineCollection(strong, colors="white", linewidths=1.8))
    ax.add_collection(LineCollection(strong, colors="black", linewidths=1.0))
