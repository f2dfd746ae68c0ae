"""Table 2 and its appendix: predictions left unchanged when an image is moved to the minimum of a method's surrogate.

The attacked output is the softmax of the predicted class. First-order methods step along −G, second-order methods to
the exact minimum of the quadratic in the ball; the paper's reduction to the eigenvectors that account for a share T of
Σ|λ| is measured as well. σ² and β are selected from the paper's grids: the values that leave the fewest predictions
unchanged on validation images; ties are resolved by the lowest probability. On MNIST and FMNIST the values of the paper
are measured as well.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from paper.cells import Cells
from paper.classifiers import CLASSIFIERS, Classifier, NoWeightsError, Source, selected
from paper.experiments import Outcome
from paper.experiments.attack_report import Chosen, Measured, Row, report
from paper.methods import ATTACK, ATTACK_BETA, ATTACK_SIGMA2, Maker, Method, quiet
from paper.options import Options
from paper.published import published
from smoothhess import Interactions, Taylor
from smoothhess.evaluate import post_hoc
from smoothhess.evaluate.attack import AttackPath
from smoothhess.linalg.trust_region.few_directions import orthogonal_part
from smoothhess.linalg.trust_region.lanczos import Product, Space
from smoothhess.linalg.trust_region.scaling import eigenpairs
from smoothhess.linalg.trust_region.spectrum import Spectrum
from smoothhess.result.exact import Exact
from smoothhess.result.hessian_forms import rows_of, spectrum_of

__all__ = ["EPSILONS", "KEEP", "Size", "measure", "perturbed", "run"]

NAME = "attack"
EPSILONS = {"mlp5": (0.25, 0.5, 0.75, 1.25, 1.75), "resnet18": (0.1, 0.2, 0.3, 0.4, 1.0)}
KEEP = {"mlp5": 0.98, "resnet18": 0.8}  # the paper's T
KRYLOV = 32  # initial dimension of the Krylov space for the minimum: enough for nearly every image
ROUNDING = 1e-6  # rounding error of a product with a float32 network
DENSE = 1024  # features up to which the reduction by T, which needs all eigenvalues, is measured


@dataclass(frozen=True)
class Size:
    """Sizes of the experiment for one network."""

    points: int  # test images
    batch: int  # images at once
    calls: int  # of SmoothHess
    val: int  # validation images
    val_calls: int
    stride: int = 1  # use every stride-th value of the grids


FULL = Size(400, 100, 1_568, 200, 784)
FULL_CONVOLUTIONAL = Size(200, 10, 2_048, 50, 768)
QUICK = Size(6, 6, 784, 6, 392, 6)
QUICK_CONVOLUTIONAL = Size(1, 1, 96, 1, 32, 7)


def run(options: Options) -> Outcome:
    """Attack one network of each requested data set: on MNIST that of the authors if it is available."""
    started = time.perf_counter()
    done: list[Measured] = []
    skipped: list[str] = []
    for sources in _by_dataset(selected(options, CLASSIFIERS)):
        classifier = _first(sources, options, skipped)
        if classifier is not None:
            done.append(measure(classifier, options, size_of(classifier, options)))
    if not done:
        return Outcome(NAME, [], skipped)
    return report(NAME, done, skipped, options, time.perf_counter() - started)


def _by_dataset(sources: Sequence[Source]) -> list[list[Source]]:
    names = dict.fromkeys(source.dataset for source in sources)
    return [[source for source in sources if source.dataset == name] for name in names]


def _first(sources: Sequence[Source], options: Options, skipped: list[str]) -> Classifier | None:
    """The first network that has weights or can be trained."""
    for source in sources:
        try:
            return source.classifier(options)
        except NoWeightsError as error:
            skipped.append(f"left out: {error}")
    return None


def size_of(classifier: Classifier, options: Options) -> Size:
    """Sizes of the experiment, which depend on `quick` and on the cost of a pass of the network."""
    if options.quick:
        return QUICK_CONVOLUTIONAL if classifier.is_convolutional else QUICK
    return FULL_CONVOLUTIONAL if classifier.is_convolutional else FULL


def measure(
    classifier: Classifier, options: Options, size: Size, *, keep: float | None = None, name: str = NAME
) -> Measured:
    """Compute all cells of one network that are not on disk. `keep` is T; the paper's if None."""
    points = min(options.points or size.points, len(classifier.data.test))
    inputs = classifier.inputs("test", points)
    share = KEEP[classifier.architecture] if keep is None else keep
    settings = {
        **{key: value for key, value in asdict(size).items() if key != "points"},
        "keep": share,
        "seed": options.seed,
        "weights": classifier.fingerprint,
    }
    cells = Cells(options.folder(name) / "cells" / classifier.key, settings)
    bench = _Bench(classifier, options, size, cells, share)
    chosen = bench.choices()
    return bench.measured(inputs, chosen)


@dataclass(frozen=True, eq=False)
class _Bench:
    """One network and the folder of its cells."""

    classifier: Classifier
    options: Options
    size: Size
    cells: Cells
    keep: float

    @property
    def epsilons(self) -> tuple[float, ...]:
        """The radii of this network's columns."""
        return EPSILONS[self.classifier.architecture]

    # --- parameters -----------------------------------------------------------------------------------------------

    def grid(self, method: Method) -> list[float]:
        """The candidates of a method, σ or β."""
        if method.parameter == "σ":
            values = [sigma2**0.5 for sigma2 in ATTACK_SIGMA2[self.classifier.architecture]]
        else:
            values = list(ATTACK_BETA[self.classifier.architecture])
        return values[:: self.size.stride]

    def choices(self) -> Chosen:
        """The σ or β of the strongest attack of every method on validation images, for each radius."""
        inputs = self.classifier.inputs("val", self.size.val)
        make = self._maker(inputs, self.size.val_calls, self.options.seed)
        methods = [m for m in ATTACK if m.parameter is not None]
        pairs = [
            (m, v) for family in ("σ", "β") for v in self._grid_of(family) for m in methods if m.parameter == family
        ]
        outcomes: dict[tuple[str, float], Row] = {}
        for method, value in self._bar(pairs, "choice of σ² and β"):
            key = {"candidate": method.name, "value": value}
            outcomes[method.name, value] = self.cells.compute(
                key, lambda m=method, v=value: self._unchanged(make, m, v)
            )
        return {
            (epsilon, method.name): strongest({v: outcomes[method.name, v] for v in self.grid(method)}, i)
            for method in methods
            for i, epsilon in enumerate(self.epsilons)
        }

    def _grid_of(self, parameter: str) -> list[float]:
        return self.grid(next(m for m in ATTACK if m.parameter == parameter))

    @torch.no_grad()
    def _unchanged(self, make: Maker, method: Method, value: float) -> Row:
        """Number of validation images with an unchanged prediction, and its mean probability, for each radius."""
        points = perturbed(make(method, value), method.order, self.epsilons, exact=False)
        rows = self.classifier.rows or 4_096
        scores = torch.cat([self.classifier.network(x) for x in points.flatten(0, 1).split(rows)])
        scores = scores.unflatten(0, points.shape[:2])  # (R, B, C)
        chance = scores.softmax(-1).gather(2, make.target.expand(len(points), -1)[..., None])
        return {
            "unchanged": (scores.argmax(-1) == make.target).sum(1).tolist(),
            "probability": chance.double().mean((1, 2)).tolist(),
        }

    def printed(self, epsilon: float, method: Method) -> float | None:
        """The σ or β of the paper's table."""
        found = published(
            metric="attack_smoothing",
            dataset=self.classifier.dataset,
            network=self.classifier.architecture,
            function="softmax",
            epsilon=epsilon,
            method=method.name,
        )
        if found is None or method.parameter is None:
            return None
        return found.value**0.5 if method.parameter == "σ" else found.value

    # --- cells ----------------------------------------------------------------------------------------------------

    def measured(self, inputs: Tensor, chosen: Chosen) -> Measured:
        """Attack every image by every method at every value of its parameter that a column needs."""
        printed: Chosen = {}
        for epsilon in self.epsilons:
            for method in ATTACK:
                value = self.printed(epsilon, method)
                if value is not None and not self.classifier.is_convolutional:
                    printed[epsilon, method.name] = value
        asked: list[tuple[Method, float | None]] = []
        for method in ATTACK:
            values = {
                c[e, method.name]: None for c in (chosen, printed) for e in self.epsilons if (e, method.name) in c
            }
            asked += [(method, v) for v in values] if method.parameter else [(method, None)]
        asked.sort(key=lambda item: (item[0].parameter or "", item[1] or 0.0))  # both orders of one σ after each other
        batches = list(inputs.split(self.size.batch))
        images = [hashlib.sha256(x.cpu().contiguous().numpy().tobytes()).hexdigest()[:12] for x in batches]
        work = [(b, method, value) for b in range(len(batches)) for method, value in asked]
        makers: dict[int, Maker] = {}
        found: dict[tuple[str, float | None], list[Row]] = {}
        for b, method, value in self._bar(work, "attacks"):

            def attacked(b: int = b, method: Method = method, value: float | None = value) -> Row:
                if b not in makers:
                    makers.clear()
                    makers[b] = self._maker(batches[b], self.size.calls, 10_000 * self.options.seed + b)
                return self._attacked(makers[b], method, value)

            key = {"method": method.name, "value": value, "images": images[b]}
            found.setdefault((method.name, value), []).append(self.cells.compute(key, attacked))
        return Measured.joined(self.classifier, self.epsilons, len(inputs), self.keep, found, chosen, printed)

    def _attacked(self, make: Maker, method: Method, value: float | None) -> Row:
        """Predictions before and after the attack, and its cost."""
        result = make(method, value)
        attackers = {"exact": perturbed(result, method.order, self.epsilons)}
        if method.name == "SH+SG" and result.shape[1] <= DENSE:
            attackers["cut"] = perturbed(result, method.order, self.epsilons, keep=self.keep)
        comparison = post_hoc(
            self.classifier.network,
            make.inputs,
            attackers,
            self.epsilons,
            internal_batch_size=self.classifier.rows,
        )
        return {
            "before": comparison.before.tolist(),
            "after": dict(zip(comparison.methods, comparison.after.tolist(), strict=True)),
            "calls": float(result.n_calls.double().mean()),
            "passes": float(result.n_passes.double().mean()),
        }

    # --- parts ----------------------------------------------------------------------------------------------------

    def _maker(self, inputs: Tensor, n_calls: int, seed: int) -> Maker:
        target = self.classifier.predicted(inputs)
        return Maker(self.classifier, inputs, target, n_calls=n_calls, probability=True, seed=seed)

    def _bar(self, work: Sequence[Any], words: str) -> tqdm:
        return tqdm(work, desc=f"{self.classifier.title}: {words}", disable=not self.options.show_progress)


def strongest(outcomes: Mapping[float, Row], column: int) -> float:
    """The candidate that leaves the fewest predictions unchanged; ties are resolved by the lowest mean probability.

    >>> close = {"unchanged": [3], "probability": [0.4]}
    >>> strongest({1.0: {"unchanged": [4], "probability": [0.1]}, 2.0: close, 3.0: {**close, "probability": [0.3]}}, 0)
    3.0
    """
    return min(outcomes, key=lambda v: (outcomes[v]["unchanged"][column], outcomes[v]["probability"][column]))


# --- the minimum in a ball --------------------------------------------------------------------------------------------


def perturbed(
    result: Interactions | Exact, order: int, radii: Sequence[float], *, keep: float | None = None, exact: bool = True
) -> Tensor:
    """The inputs that minimize a surrogate in the balls of these radii, (R, B, *shape).

    Args:
        result: of any method.
        order: of the surrogate.
        radii: of the balls.
        keep: T, the share of Σ|λ| of the eigenvectors that are kept; None keeps all.
        exact: enlarge the Krylov space until it contains the minimum; otherwise 32 dimensions are used.

    >>> from smoothhess import baselines
    >>> result = baselines.hessian(lambda x: x.square().sum(1), torch.ones(1, 3).double())
    >>> perturbed(result, 2, [1.0, 5.0]).flatten(1).norm(dim=1).round(decimals=4)  # from √3 away, to the minimum at 0
    tensor([0.7321, 0.0000], dtype=torch.float64)
    """
    if order == 2 and not isinstance(result, Exact):
        _ = result.hessian  # for an estimate, cheaper than its factors for some thirty products
    taylor = result.taylor(order)
    inputs = taylor.inputs
    with quiet():
        if taylor.product is None:
            path = AttackPath.of(taylor)
            steps = torch.stack([path.step(radius) for radius in radii])
        elif keep is not None:
            steps = spectrum_of(taylor.gradient, result.hessian).cut(keep).minimize(list(radii))
        else:
            steps = spectrum(taylor, exact).minimize(list(radii))
    return inputs + steps.reshape(len(radii), *inputs.shape).to(inputs)


def spectrum(taylor: Taylor, exact: bool = True, size: int = KRYLOV) -> Spectrum:
    """The surrogate in the Krylov space of its gradient and a random direction; `exact` enlarges that space.

    An image takes some thirty products with its Hessian, batched over images, instead of all its eigenvectors.
    """
    assert taylor.product is not None
    gradient = taylor.gradient.double()
    product = rows_of(taylor.product, taylor.gradient.dtype)
    space = _krylov(gradient, product, size)
    vectors = space.vectors.mT
    found = Spectrum(space.values, vectors, (gradient[:, None] @ vectors)[:, 0], gradient, taylor.gradient.dtype)
    if not exact or space.vectors.shape[1] == gradient.shape[1]:
        return found
    return replace(found, product=product, space=space, eps=ROUNDING)


def _krylov(gradient: Tensor, product: Product, size: int) -> Space:
    """Blocks of two, each H times the previous one; the second vector adds directions orthogonal to the gradient."""
    d = gradient.shape[1]
    full = min(size, d)
    basis, images = gradient[:, None][:, :0], []
    block = torch.stack([gradient, torch.zeros_like(gradient)], 1)
    while basis.shape[1] < full:
        before = basis.shape[1]
        for row in block.unbind(1)[: full - before]:
            basis = torch.cat([basis, orthogonal_part(basis, row)[:, None]], 1)
        block = product(basis[:, before:])
        images.append(block)
    image = torch.cat(images, 1)
    small = basis @ image.mT
    values, rotation = eigenpairs((small + small.mT) / 2)
    return Space(values, rotation.mT @ basis, rotation.mT @ image)
