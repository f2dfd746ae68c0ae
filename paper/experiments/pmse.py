"""Table 1 and its appendix: how close each method's Taylor expansion is to a network in the ball around an image.

Three data sets, the logit of the predicted class and a penultimate neuron, ε = .25, .5 and 1, seven methods. σ and β
are chosen on validation points; the values of the paper are measured as well. Two samplers are reported: "radius",
with the radius of a perturbation uniform in [0, ε], was used for the published numbers; "ball", uniform in the ball, is
the definition. SmoothHess is the library's default estimate on all points, and on a few of them also the
published recipe: 100 000 antithetic gradients for each image of MNIST and FMNIST, 480 000 for CIFAR10.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from paper.balls import SAMPLERS, Balls, Forms
from paper.cells import Cells
from paper.classifiers import CLASSIFIERS, NEURON_CLASS, RESNET101, Classifier, NoWeightsError, Source, selected
from paper.experiments import Outcome
from paper.experiments.pmse_report import Chosen, Measured, Record, report
from paper.methods import PMSE, PMSE_BETA, RECIPE_CALLS, Maker, Method, choose, sigma_candidates
from paper.options import Options
from paper.published import published
from smoothhess import Exact, Interactions
from smoothhess.evaluate import Selection
from smoothhess.evaluate.ball_samples import BallSamples
from smoothhess.model.model_call import ModelCall

__all__ = ["EPSILONS", "Function", "Size", "measure", "run", "run_resnet101"]

NAME, RESNET101_NAME = "pmse", "pmse-resnet101"
EPSILONS = (0.25, 0.5, 1.0)
SAME = 0.05  # σ² that differ by less are identified: the tables print two digits


@dataclass(frozen=True)
class Size:
    """Sizes of the experiment for one network."""

    points: int  # test images
    samples: int  # displacements of each
    exact: int | None  # how many of them are evaluated in full precision if the others are not
    batch: int  # images at once; each batch has separate draws
    calls: int | None  # of SmoothHess; None: until its relative error is 0.1
    val: int  # validation images for β,
    val_smooth: (
        int  # for σ, whose estimates cost more; 0: the second of the three candidates, as in all cells of the paper
    )
    val_samples: int
    samplings: tuple[str, ...]  # samplers that parameters are chosen for; results of another one use those of the first
    recipe_points: int  # images on which the published recipe is run
    recipe_share: float = 1.0  # of its calls
    stride: int = 1  # use every stride-th value of the β grid


# An estimate of a convolutional network takes one or two seconds of a GPU. With fewer calls the closed form would not
# be worth its passes, and noise would dominate the comparison and the choice of σ.
FULL = Size(200, 15_000, None, 50, None, 200, 200, 500, ("radius", "ball"), 20)
FULL_CONVOLUTIONAL = Size(100, 15_000, 1_000, 10, 4_096, 50, 6, 300, ("radius",), 1)
FULL_DEEP = Size(100, 15_000, 500, 10, 4_096, 16, 3, 200, ("radius",), 0)  # a pass costs five times as much again
QUICK = Size(6, 400, None, 6, None, 6, 4, 60, ("radius",), 1, 0.02, 8)
QUICK_CONVOLUTIONAL = Size(1, 60, None, 1, 96, 1, 0, 16, ("radius",), 0, 0.0, 16)


@dataclass(frozen=True)
class Function:
    """An explained function of a classifier."""

    name: str
    published: str  # "logit" or "neuron"
    unit: int | None = None  # of the penultimate layer; None: the logit of the predicted class

    def target(self, classifier: Classifier, inputs: Tensor) -> Tensor:
        """Which entry of the readout, (B,)."""
        if self.unit is None:
            return classifier.predicted(inputs)
        return torch.full((len(inputs),), classifier.readout.unit(self.unit), device=inputs.device)


def run(options: Options) -> Outcome:
    """Run all networks of the requested data sets."""
    return _run(options, NAME, selected(options, CLASSIFIERS), ("logit", "neuron"))


def run_resnet101(options: Options) -> Outcome:
    """Run ResNet-101 on CIFAR10, only the logit."""
    if options.quick:
        return Outcome(RESNET101_NAME, [], ["left out of a quick run: it needs a trained ResNet-101 and a GPU"])
    if options.dataset not in (None, "cifar10") or options.function not in (None, "logit"):
        return Outcome(RESNET101_NAME, [], ["left out: it uses only the logits of CIFAR10"])
    return _run(options, RESNET101_NAME, [RESNET101], ("logit",))


def _run(options: Options, name: str, sources: Sequence[Source], functions: Sequence[str]) -> Outcome:
    started = time.perf_counter()
    asked = [f for f in functions if options.function in (None, f)]
    if not asked:
        raise ValueError(f"--function: expected {' or '.join(functions)}, got {options.function!r}.")
    done: list[Measured] = []
    skipped: list[str] = []
    for source in sources:
        try:
            classifier = source.classifier(options)
        except NoWeightsError as error:
            skipped.append(f"left out: {error}")
            continue
        done.append(measure(classifier, asked, options, size_of(classifier, options), name))
    if not done:
        return Outcome(name, [], skipped)
    return report(name, done, skipped, options, time.perf_counter() - started)


def size_of(classifier: Classifier, options: Options) -> Size:
    """Sizes of the experiment, which depend on `quick` and on the cost of a pass of the network."""
    if options.quick:
        return QUICK_CONVOLUTIONAL if classifier.is_convolutional else QUICK
    if classifier.architecture == "resnet101":
        return FULL_DEEP
    return FULL_CONVOLUTIONAL if classifier.is_convolutional else FULL


def measure(classifier: Classifier, asked: Sequence[str], options: Options, size: Size, name: str = NAME) -> Measured:
    """Compute all cells of one network that are not on disk."""
    points = min(options.points or size.points, len(classifier.data.test))
    inputs = classifier.inputs("test", points)
    settings = {
        **{key: value for key, value in asdict(size).items() if key != "points"},
        "seed": options.seed,
        "weights": classifier.fingerprint,
    }
    cells = Cells(options.folder(name) / "cells" / classifier.key, settings)
    bench = _Bench(classifier, options, size, cells, _functions(classifier, asked, cells))
    chosen = bench.choices()
    bench.score(inputs, chosen)
    bench.recipes(inputs[: size.recipe_points])
    return bench.measured(inputs, chosen)


def _digest(inputs: Tensor) -> str:
    return hashlib.sha256(inputs.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:12]


def _functions(classifier: Classifier, asked: Sequence[str], cells: Cells) -> list[Function]:
    """The requested functions; on MNIST two neurons, since the printed row is that of the second."""
    found = [Function("logit", "logit")] if "logit" in asked else []
    if "neuron" in asked:
        unit = cells.compute({"unit": "class"}, lambda: classifier.most_active_unit(NEURON_CLASS))
        found.append(Function("neuron", "neuron", unit))
        if classifier.dataset == "MNIST":
            unit = cells.compute({"unit": "all"}, classifier.most_active_unit)
            found.append(Function("neuron, all classes", "neuron", unit))
    return found


@dataclass(frozen=True, eq=False)
class _Bench:
    """One network and the folder of its cells."""

    classifier: Classifier
    options: Options
    size: Size
    cells: Cells
    functions: list[Function]

    @property
    def _d(self) -> int:
        return self.classifier.data.test.inputs[0].numel()

    @property
    def _is_rough(self) -> bool:
        """Whether most values are computed in TF32 and corrected with some exact ones."""
        on_gpu = torch.device(self.classifier.device).type == "cuda"
        return self.classifier.is_convolutional and on_gpu and self.size.exact is not None

    # --- parameters -----------------------------------------------------------------------------------------------

    def choices(self) -> Chosen:
        """The best σ or β on validation points, for every function, sampler, radius and method."""
        inputs = self.classifier.inputs("val", self.size.val)
        smoothed = [m for m in PMSE if m.parameter is not None]
        total = len(self.functions) * len(self.size.samplings) * len(smoothed)
        chosen: Chosen = {}
        with self._bar(total, "choice of σ and β") as bar:
            for function in self.functions:
                few = inputs[: self.size.val_smooth]
                makers = {
                    "σ": self._maker(few, function, self.options.seed) if len(few) else None,
                    "β": self._maker(inputs, function, self.options.seed),
                }
                for sampling in self.size.samplings:
                    for epsilons, methods in _orders(smoothed):
                        for method in methods:
                            make = makers[str(method.parameter)]
                            for epsilon, value in self._choice(make, function, sampling, method, epsilons).items():
                                chosen[function.name, sampling, epsilon, method.name] = value
                            bar.update(len(epsilons) / len(EPSILONS))
        return chosen

    def _choice(
        self, make: Maker | None, function: Function, sampling: str, method: Method, epsilons: Sequence[float]
    ) -> dict[float, float]:
        def scored() -> list[dict[str, Any]]:
            if make is None:
                return [_unscored(sigma_candidates(epsilon, self._d)) for epsilon in epsilons]
            betas = PMSE_BETA[self.classifier.architecture][:: self.size.stride]
            found = choose(
                make,
                method,
                epsilons,
                betas,
                n_samples=self.size.val_samples,
                sampling=sampling,
                seed=self.options.seed,
                show_progress=self.options.show_progress,
            )
            return [_kept(selection) for selection in found]

        key = {"choice": function.name, "sampling": sampling, "method": method.name, "epsilons": list(epsilons)}
        return {epsilon: kept["best"] for epsilon, kept in zip(epsilons, self.cells.compute(key, scored), strict=True)}

    def printed(self, function: Function, epsilon: float, method: Method) -> float | None:
        """The parameter of the paper's table for this cell.

        A printed σ² is one of three candidates up to rounding; any other value is a misprint, and is replaced by the
        second candidate, which is the value of all other cells.
        """
        classifier = self.classifier
        found = published(
            metric="pmse_smoothing",
            dataset=classifier.dataset,
            network=classifier.architecture,
            function=function.published,
            epsilon=epsilon,
            method=method.name,
        )
        if found is None or method.parameter is None:
            return None
        if method.parameter == "β":
            return found.value
        candidates = sigma_candidates(epsilon, self._d)
        return next((c for c in candidates if abs(c**2 / found.value - 1) < SAME), candidates[1])

    # --- cells ----------------------------------------------------------------------------------------------------

    def score(self, inputs: Tensor, chosen: Chosen) -> None:
        """P_MSE of all methods on all points; one file for each function, radius and batch of points."""
        batches = list(inputs.split(self.size.batch))
        cells = [(b, f, e) for b in range(len(batches)) for f in self.functions for e in EPSILONS]
        images = [_digest(x) for x in batches]
        with self._bar(len(cells), "P_MSE") as bar:
            for number, x in enumerate(batches):
                missing = [(f, e) for b, f, e in cells if b == number and self._key(f, e, images[b]) not in self.cells]
                bar.update(len(self.functions) * len(EPSILONS) - len(missing))
                if not missing:
                    continue
                seed = 10_000 * self.options.seed + number
                balls = self._balls(x, missing, seed)
                for function in dict.fromkeys(f for f, _ in missing):
                    make = self._maker(x, function, seed)
                    known: dict[tuple[str, int, float | None], tuple[Forms, dict[str, float]]] = {}
                    for epsilon in (e for f, e in missing if f == function):
                        candidates = self._candidates(function, epsilon, chosen)
                        records = [self._record(balls, make, function, epsilon, m, v, known) for m, v in candidates]
                        self.cells.put(self._key(function, epsilon, images[number]), records)
                        bar.update()

    @staticmethod
    def _key(function: Function, epsilon: float, images: str) -> dict[str, Any]:
        """Batches are identified by their images, so that a run with more points resumes one with fewer."""
        return {"function": function.name, "epsilon": epsilon, "images": images}

    def _candidates(self, function: Function, epsilon: float, chosen: Chosen) -> list[tuple[Method, float | None]]:
        """Methods with every value of their parameter that a table needs, each once."""
        found: dict[tuple[Method, float | None], None] = {}
        for method in PMSE:
            if method.parameter is None:
                found[method, None] = None
                continue
            for sampling in self.size.samplings:
                found[method, chosen[function.name, sampling, epsilon, method.name]] = None
            printed = self.printed(function, epsilon, method)
            if printed is not None and not self.classifier.is_convolutional:
                found[method, printed] = None
        return list(found)

    def _record(
        self,
        balls: Balls,
        make: Maker,
        function: Function,
        epsilon: float,
        method: Method,
        value: float | None,
        known: dict[tuple[str, int, float | None], tuple[Forms, dict[str, float]]],
    ) -> dict[str, Any]:
        """The P_MSE of one method at one value of its parameter, with both samplers."""
        name = (method.family, method.order, value)
        if name not in known:
            known[name] = self._forms(balls, make(method, value), method.order)
        forms, cost = known[name]
        return {"method": method.name, "value": value, **_scores(balls, function, epsilon, forms), **cost}

    def _forms(self, balls: Balls, result: Interactions | Exact, order: int) -> tuple[Forms, dict[str, float]]:
        if order == 2 and len(balls.directions) >= result.shape[1]:
            _ = result.hessian  # cheaper than products along so many directions
        cost = {
            name: float(getattr(result, attribute).double().mean())
            for name, attribute in (("calls", "n_calls"), ("passes", "n_passes"), ("error", "relative_error"))
        }
        return balls.forms(result.taylor(order)), cost

    # --- the published recipe -------------------------------------------------------------------------------------

    def recipes(self, inputs: Tensor) -> None:
        """Compare the published recipe with the default estimate: same σ, same points, same draws of P_MSE."""
        if not len(inputs):
            return
        n_calls = 2 * round(self.size.recipe_share * RECIPE_CALLS[self.classifier.architecture] / 2)
        images = _digest(inputs)
        keys = [({"recipe": f.name, "epsilon": e, "images": images}, f, e) for f in self.functions for e in EPSILONS]
        with self._bar(len(keys), "published recipe") as bar:
            missing = [item for item in keys if item[0] not in self.cells]
            bar.update(len(keys) - len(missing))
            if not missing:
                return
            seed = 10_000 * self.options.seed + 9_999
            balls = self._balls(inputs, [(f, e) for _, f, e in missing], seed)
            for key, function, epsilon in missing:
                make = self._maker(inputs, function, seed)
                self.cells.put(key, list(self._both(balls, make, function, epsilon, n_calls)))
                bar.update()

    def _both(
        self, balls: Balls, make: Maker, function: Function, epsilon: float, n_calls: int
    ) -> Iterator[dict[str, Any]]:
        sigma = self.printed(function, epsilon, PMSE[0]) or sigma_candidates(epsilon, self._d)[1]
        for words, make_it in (
            ("default", lambda: make.smooth(sigma)),
            ("recipe", lambda: make.recipe(sigma, n_calls)),
        ):
            _wait(make.inputs)
            started = time.perf_counter()
            result = make_it()
            _wait(make.inputs)
            seconds = (time.perf_counter() - started) / len(make.inputs)
            for method in PMSE[:2]:
                forms, cost = self._forms(balls, result, method.order)
                scores = _scores(balls, function, epsilon, forms)
                yield {"method": method.name, "by": words, "value": sigma, "seconds": seconds, **scores, **cost}
        for method in PMSE[2:]:
            value = self.printed(function, epsilon, method)
            if value is None and method.parameter is not None:
                continue
            forms, cost = self._forms(balls, make(method, value), method.order)
            yield {
                "method": method.name,
                "by": "published β" if value else "",
                "value": value,
                **_scores(balls, function, epsilon, forms),
                **cost,
            }

    def measured(self, inputs: Tensor, chosen: Chosen) -> Measured:
        """Combine the contents of the cells."""
        batches = [_digest(x) for x in inputs.split(self.size.batch)]
        tried = _digest(inputs[: self.size.recipe_points])
        records = [
            Record.merged(f.name, e, [self.cells.get(self._key(f, e, images)) for images in batches])
            for f in self.functions
            for e in EPSILONS
        ]
        recipes = [
            Record.merged(f.name, e, [found])
            for f in self.functions
            for e in EPSILONS
            if (found := self.cells.get({"recipe": f.name, "epsilon": e, "images": tried})) is not None
        ]
        printed = {
            (f.name, e, m.name): value
            for f in self.functions
            for e in EPSILONS
            for m in PMSE
            if (value := self.printed(f, e, m)) is not None
        }
        return Measured(
            classifier=self.classifier,
            functions={f.name: f.published for f in self.functions},
            units={f.name: f.unit for f in self.functions if f.unit is not None},
            epsilons=EPSILONS,
            samplings=self.size.samplings,
            n_points=len(inputs),
            n_samples=self.size.samples,
            n_exact=self.size.exact if self._is_rough else None,
            records=[record for cell in records for record in cell],
            recipes=[record for cell in recipes for record in cell],
            chosen=chosen,
            printed=printed,
            choices=[(key, value) for key, value in self.cells if "choice" in key],
        )

    # --- parts ----------------------------------------------------------------------------------------------------

    def _balls(self, inputs: Tensor, missing: Sequence[tuple[Function, float]], seed: int) -> Balls:
        functions = dict.fromkeys(f for f, _ in missing)
        return Balls.around(
            ModelCall(self.classifier.readout, inputs, internal_batch_size=self.classifier.rows),
            {f.name: f.target(self.classifier, inputs) for f in functions},
            sorted({e for _, e in missing}),
            BallSamples(self.size.samples, "ball", seed),
            n_exact=self.size.exact,
            precision="tf32" if self._is_rough else "float32",
            show_progress=self.options.show_progress,
        )

    def _maker(self, inputs: Tensor, function: Function, seed: int) -> Maker:
        target = function.target(self.classifier, inputs)
        return Maker(self.classifier, inputs, target, n_calls=self.size.calls, seed=seed)

    def _bar(self, total: int, words: str) -> tqdm:
        return tqdm(total=total, desc=f"{self.classifier.title}: {words}", disable=not self.options.show_progress)


def _orders(methods: Sequence[Method]) -> Iterator[tuple[tuple[float, ...], list[Method]]]:
    """σ for each radius: both orders share an estimate. β for all radii at once: they share the products."""
    smooth = [m for m in methods if m.parameter == "σ"]
    for epsilon in EPSILONS:
        yield (epsilon,), smooth
    yield EPSILONS, [m for m in methods if m.parameter == "β"]


def _kept(selection: Selection) -> dict[str, Any]:
    return {
        "best": selection.best,
        "values": selection.values.tolist(),
        "scores": selection.scores.tolist(),
        "stderr": selection.stderr.tolist(),
        "tied": selection.values[selection.tied].tolist(),
        "at edge": selection.at_edge,
        "candidates": selection.n_candidates,
    }


def _unscored(candidates: list[float]) -> dict[str, Any]:
    return {
        "best": candidates[1],
        "values": [],
        "scores": [],
        "stderr": [],
        "tied": [],
        "at edge": False,
        "candidates": len(candidates),
    }


def _scores(balls: Balls, function: Function, epsilon: float, forms: Forms) -> dict[str, Any]:
    found = {sampler: balls.score(function.name, epsilon, sampler, forms) for sampler in SAMPLERS}
    return {
        "errors": {sampler: score.per_point.tolist() for sampler, score in found.items()},
        "stderr": {sampler: score.stderr for sampler, score in found.items()},
    }


def _wait(like: Tensor) -> None:
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
