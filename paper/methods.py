"""The methods in the rows of the paper's tables, their smoothing parameters, and how these are chosen.

Every method is a gradient, and for half of them a Hessian, of the network smoothed in one way: by a Gaussian of
standard deviation σ, or with SoftPlus or Swish of sharpness β in the place of ReLU. The candidates are those of the
paper. They are scored on validation points, all on the same displacements: σ by estimates, β by products with the
Hessian along the displacements, coarse to fine, which are used for every radius.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paper.classifiers import Classifier
from paper.curvature import softened
from smoothhess import Exact, Interactions, SmoothHess, baselines
from smoothhess.baselines.softplus import Softplus
from smoothhess.baselines.swish import Swish
from smoothhess.evaluate import Selection, select, select_radii

__all__ = [
    "ATTACK",
    "ATTACK_BETA",
    "ATTACK_SIGMA2",
    "PMSE",
    "PMSE_BETA",
    "RECIPE",
    "RECIPE_CALLS",
    "Maker",
    "Method",
    "choose",
    "quiet",
    "sigma_candidates",
]

RECIPE: dict[str, Any] = {"design": "antithetic", "control": None, "shrink": False}  # Eq. 8 with ± pairs
RECIPE_CALLS = {"mlp5": 100_000, "resnet18": 480_000, "resnet101": 480_000}  # gradients of the published recipe
SIGMA_SHARES = (0.5, 0.75, 1.0)  # of ε/√d


@dataclass(frozen=True)
class Method:
    """A row of a table."""

    name: str
    family: str  # "smooth", "softplus", "swish", "own" (the network as it is) or "random"
    order: int  # of the surrogate

    @property
    def parameter(self) -> str | None:
        """Name of the smoothing parameter."""
        return {"smooth": "σ", "softplus": "β", "swish": "β"}.get(self.family)

    @property
    def printed_parameter(self) -> str:
        """The parameter that the paper's tables print: the variance, or β."""
        return {"σ": "σ²", "β": "β", None: "–"}[self.parameter]

    def printed(self, value: float) -> float:
        """A parameter as it is printed.

        >>> Method("SG", "smooth", 1).printed(0.5)
        0.25
        """
        return value**2 if self.parameter == "σ" else value


_SMOOTH = (Method("SH+SG", "smooth", 2), Method("SG", "smooth", 1))
_SOFTPLUS = (Method("SP H+G", "softplus", 2), Method("SP G", "softplus", 1))
_SWISH = (Method("SW H+G", "swish", 2), Method("SW G", "swish", 1))
_GRADIENT = Method("G", "own", 1)
PMSE = (*_SMOOTH, *_SOFTPLUS, *_SWISH, _GRADIENT)
ATTACK = (*_SMOOTH, *_SOFTPLUS, Method("H+G", "own", 2), _GRADIENT, Method("random", "random", 1))


def steps(start: float, stop: float, step: float) -> list[float]:
    """The paper's [start : stop : step], which leaves `stop` out.

    >>> steps(0.1, 0.5, 0.1)
    [0.1, 0.2, 0.3, 0.4]
    """
    return [round(start + k * step, 10) for k in range(round((stop - start) / step))]


_SHARP = [*steps(20, 95, 5), 95.0, *steps(100, 800, 10)]  # 95 was selected eight times, though the grid leaves it out
# By architecture. No grid is printed for Swish, nor one that holds the selected β of ResNet-101.
PMSE_BETA = {
    "mlp5": [*steps(0.1, 1, 0.1), *steps(1, 20, 1), *_SHARP],
    "resnet18": [*steps(0.1, 1, 0.1), *steps(1, 20, 0.5), *_SHARP],
}
PMSE_BETA["resnet101"] = PMSE_BETA["resnet18"]
ATTACK_SIGMA2 = {
    "mlp5": [0.001, 0.005, *steps(0.01, 0.1, 0.01), *steps(0.15, 1, 0.05)],
    "resnet18": [5e-5, 7.5e-5, *steps(1e-4, 6e-4, 1e-4), 7.5e-4, *steps(1e-3, 6e-3, 1e-3)],
}
ATTACK_BETA = {
    "mlp5": [*steps(1, 20, 1), *steps(20, 100, 5), *steps(100, 210, 10)],
    "resnet18": [*steps(1, 10, 1), *steps(10, 45, 5)],
}


def sigma_candidates(epsilon: float, d: int) -> list[float]:
    """The three σ that the paper tries in a ball of radius ε.

    >>> sigma_candidates(1.0, 100)
    [0.05, 0.075, 0.1]
    """
    return [round(share * epsilon / d**0.5, 12) for share in SIGMA_SHARES]


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings of the estimator: errors are reported in the tables."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


class Maker:
    """Gradients and Hessians of one function of a classifier around a batch of points, each computed once.

    A result stores its draws, so only the results of the last few σ are kept.
    """

    KEPT = 3

    def __init__(
        self,
        classifier: Classifier,
        inputs: Tensor,
        target: Tensor,
        *,
        n_calls: int | None,
        probability: bool = False,
        seed: int = 0,
    ) -> None:
        self.classifier = classifier
        self.inputs, self.target = inputs, target
        self.n_calls, self.probability, self.seed = n_calls, probability, seed
        fast = classifier.is_convolutional and inputs.is_cuda  # the rounding error is below the sampling error
        self.precision = "tf32" if fast else "float32"
        self._smooth: dict[float, Interactions] = {}

    def __call__(self, method: Method, value: float | None) -> Interactions | Exact:
        """The result of a method at one value of its parameter."""
        if method.family == "smooth":
            assert value is not None
            return self.smooth(value)
        if method.family == "random":
            return baselines.random(self._function, self.inputs, self.target, seed=self.seed)
        form = None
        if method.family != "own":
            assert value is not None
            form = Softplus(value) if method.family == "softplus" else Swish(value)
        # attacks need eigenvectors, which are sensitive to rounding
        precision = "float32" if self.probability else self.precision
        return softened(
            self._scores,
            self.inputs,
            self.target,
            form,
            probability=self.probability,
            precision=precision,
            method=f"{method.name}{'' if value is None else f' β = {value:g}'}",
        )

    def smooth(self, sigma: float) -> Interactions:
        """SmoothHess with the library's defaults."""
        if sigma not in self._smooth:
            while len(self._smooth) >= self.KEPT:
                self._smooth.pop(next(iter(self._smooth)))
            self._smooth[sigma] = self._attribute(sigma, n_calls=self.n_calls)
        return self._smooth[sigma]

    def recipe(self, sigma: float, n_calls: int) -> Interactions:
        """SmoothHess as published: antithetic draws, without control variate and denoising."""
        return self._attribute(sigma, n_calls=n_calls, **RECIPE)

    def _attribute(self, sigma: float, **options: Any) -> Interactions:
        with quiet():
            return SmoothHess(self._function).attribute(
                self.inputs,
                self.target,
                sigma=sigma,
                seed=self.seed,
                internal_batch_size=self.classifier.rows,
                precision=self.precision,
                **options,
            )

    @property
    def _scores(self) -> Callable[..., Any]:
        return self.classifier.network if self.probability else self.classifier.readout

    @property
    def _function(self) -> Callable[..., Any]:
        network = self.classifier.network
        return (lambda x: network(x).softmax(-1)) if self.probability else self.classifier.readout


def choose(
    make: Maker,
    method: Method,
    radii: Sequence[float],
    betas: Sequence[float],
    *,
    n_samples: int,
    sampling: str,
    seed: int = 0,
    show_progress: bool = False,
) -> tuple[Selection, ...]:
    """The parameter of a method for each radius, by P_MSE on the maker's points."""
    shared: dict[str, Any] = {
        "order": method.order,
        "n_samples": n_samples,
        "sampling": sampling,
        "seed": seed,
        "internal_batch_size": make.classifier.rows,
        "show_progress": show_progress,
    }
    where = (make.classifier.readout, make.inputs)

    def result(value: float) -> Interactions | Exact:
        return make(method, value)

    result.__name__ = method.name
    if method.parameter == "σ":
        d = make.inputs[0].numel()
        return tuple(
            select(*where, make.target, radius=r, method=result, values=sigma_candidates(r, d), **shared) for r in radii
        )
    return select_radii(*where, radii, make.target, method=result, values=betas, coarse_to_fine=True, **shared)
