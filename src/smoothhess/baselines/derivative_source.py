"""The source of an attribution's derivatives: the model itself, the softened network or the smoothed model.

This module selects the source (the argument `of`); the methods that compute the derivatives have their own modules.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smoothhess.baselines.hessian import hessian
from smoothhess.baselines.softened_activations import soften
from smoothhess.baselines.softplus import Softplus, softplus
from smoothhess.baselines.swish import Swish, swish
from smoothhess.explainers.smooth_hess import SmoothHess
from smoothhess.model.gradients import Oracle, check_batch_size
from smoothhess.model.state import borrowed
from smoothhess.result.exact import StoredResult
from smoothhess.result.result import Result

DENSE = 4096  # features up to which the Hessian of a sampled result is kept as a matrix

Derivatives = Callable[..., Result]  # (forward_func, inputs, target, additional_forward_args, *, …) → Interactions


def smooth(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    **options: Any,
) -> Result:
    """SmoothHess with the signature of the baselines; `options` are those of `SmoothHess.attribute`."""
    with warnings.catch_warnings():  # points of a path begin at a baseline, often near zero
        warnings.filterwarnings("ignore", message="sigma is .* times as large")
        return SmoothHess(forward_func).attribute(inputs, target, additional_forward_args, **options)


NAMED: Mapping[str, Derivatives] = {"own": hessian, "softplus": softplus, "swish": swish, "smooth": smooth}


def curvature(result: Result) -> dict[str, Any]:
    """The Hessian of a result as keyword arguments of `Exact.make`: a matrix, an operator, or none if it is zero."""
    if isinstance(result, StoredResult):
        form: Any = result.derivatives.form
    else:
        form = result.hessian if result.shape[1] <= DENSE else _SampledOperator(result)
    return {} if form is None else {"hessian": form} if isinstance(form, Tensor) else {"operator": form}


def caution(error: Tensor) -> str:
    """Text for the note of an attribution that reports the relative error of the Hessians it was computed from."""
    worst = float(error.max())
    if worst == 0:
        return ""
    return (
        f"; computed from a sampled Hessian (relative error {worst:.2g}); intervals and stderr() of this result do "
        "not include that error"
    )


@dataclass(frozen=True, eq=False)
class _SampledOperator:
    """The Hessian of a sampled result as an operator on rows (B, n, d)."""

    result: Result

    def __call__(self, rows: Tensor) -> Tensor:
        return self.result.product(rows)

    def select(self, index: Tensor) -> _SampledOperator:
        return _SampledOperator(self.result[index])


class Level(NamedTuple):
    """Values at B points, (B,) each: the differentiated function with its standard error, and the model's output."""

    value: Tensor
    stderr: Tensor
    output: Tensor
    n_passes: Tensor


@dataclass(frozen=True)
class Source:
    """A function that computes gradient and Hessian, and the options that it is called with.

    >>> import torch
    >>> source = Source.ensure("softplus", {"beta": 4.0})
    >>> source(lambda x: torch.relu(x.sum(1)), torch.zeros(1, 2)).hessian
    tensor([[[1., 1.],
             [1., 1.]]])
    """

    find: Derivatives
    options: Mapping[str, Any]

    @staticmethod
    def ensure(
        of: str | Derivatives, options: Mapping[str, Any], also: Mapping[str, Derivatives] | None = None
    ) -> Source:
        """From a name in `NAMED` or `also`, or from a function with the signature of the baselines."""
        named = {**(also or {}), **NAMED}
        if isinstance(of, str) and of in named:
            return Source(named[of], options)
        if callable(of) and not isinstance(of, type):
            return Source(of, options)
        names = ", ".join(f'"{name}"' for name in named)
        got = repr(of) if isinstance(of, str) else type(of).__name__
        raise ValueError(
            f"of must be {names}, or a function (forward_func, inputs, target, additional_forward_args, …) → "
            f"Interactions such as baselines.softplus, got {got}."
        )

    @property
    def name(self) -> str:
        """Name of the source and its numerical options, for labels."""
        name = next((n for n, find in NAMED.items() if find is self.find), getattr(self.find, "__name__", "given"))
        shown = ", ".join(f"{k} {v:g}" for k, v in self.options.items() if isinstance(v, int | float) and k != "seed")
        return f"{name} ({shown})" if shown else name

    @property
    def is_sampled(self) -> bool:
        """Whether the derivatives are estimated from draws, with sampling errors and a `seed`."""
        return self.find is smooth

    def __call__(
        self,
        forward_func: Callable[..., Any],
        inputs: Tensor,
        target: Any = None,
        additional_forward_args: Any = None,
        **options: Any,
    ) -> Result:
        """Gradient and Hessian at the inputs."""
        found = self.find(forward_func, inputs, target, additional_forward_args, **{**self.options, **options})
        if not isinstance(found, Result):
            raise TypeError(f"of must be a function that returns Interactions, got {type(found).__name__}.")
        return found

    def level(
        self,
        forward_func: Callable[..., Any],
        inputs: Tensor,
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        internal_batch_size: int | None = None,
        **options: Any,
    ) -> Level:
        """Values of the differentiated function at the inputs, by forward passes only where possible."""
        if self.find is hessian:
            function = forward_func
        elif self.find in (softplus, swish):
            form = Softplus if self.find is softplus else Swish
            function = soften(forward_func, form(float(self.options["beta"])))
        else:
            found = self(
                forward_func,
                inputs,
                target,
                additional_forward_args,
                internal_batch_size=internal_batch_size,
                **options,
            )
            return Level(found.value, found.value_stderr, found.output, found.n_passes)
        everyone, rows = torch.arange(len(inputs), device=inputs.device), check_batch_size(internal_batch_size)
        with borrowed(forward_func, inputs.device):
            value, output = (
                Oracle(f, inputs, target, additional_forward_args, rows).values(inputs, everyone)
                for f in (function, forward_func)
            )
        return Level(value, torch.zeros_like(value), output, torch.ones(len(inputs), device=inputs.device))
