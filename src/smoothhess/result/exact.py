"""Exact and Attribution: results without sampling error, which share the interface `Result` with sampled results.

An `Exact` holds derivatives and defines a Taylor surrogate; an `Attribution` holds interactions that are not second
derivatives. Their numbers are kept in `derivatives`; the functions that compute such results are in
`smoothhess.baselines`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from smoothhess.draws.gaussian import Diagonal, Isotropic
from smoothhess.draws.seeding import fixed_normal
from smoothhess.estimate.grouping import Grouping
from smoothhess.estimate.hessian_estimate import refuse_dense
from smoothhess.estimate.statistics import symmetric
from smoothhess.linalg.krylov import leading_eigenpairs
from smoothhess.model.gradients import check_inputs
from smoothhess.result import combine, eigenpairs, files, text
from smoothhess.result.derivatives import INSTEAD, Derivatives, Operator
from smoothhess.result.eigenpairs import Eigenpairs
from smoothhess.result.features import name_each
from smoothhess.result.files import Parts
from smoothhess.result.intervals import Estimate
from smoothhess.result.result import Result
from smoothhess.result.taylor import Taylor, surrogate

ASYMMETRY = 1e-3  # difference between H and its transpose that counts as rounding, relative to the largest entry


@dataclass(frozen=True, eq=False, repr=False)
class StoredResult(Result):
    """A result whose numbers were computed elsewhere: an `Exact` or an `Attribution`."""

    derivatives: Derivatives
    method: str = ""  # how the numbers were computed
    note: str = ""  # a remark about them for the reader
    seeds: tuple[int, ...] = ()  # one per example, if the method is random

    @classmethod
    def make(
        cls,
        inputs: Tensor,
        output: Tensor,
        gradient: Tensor,
        hessian: Tensor | None = None,
        *,
        operator: Operator | None = None,
        value: Tensor | None = None,
        scales: Any = None,
        target: Tensor | None = None,
        n_passes: Tensor | float | None = None,
        gradient_stderr: Tensor | None = None,
        n_calls: Tensor | None = None,
        relative_error: Tensor | None = None,
        seed: int | Sequence[int] = 0,
        method: str = "",
        note: str = "",
        names: Sequence[str] | None = None,
    ) -> Self:
        """Make a result from a gradient and a Hessian.

        Args:
            inputs: (B, *shape); the derivatives are converted to their dtype and device.
            output: f(x), (B,).
            gradient: (B, *shape), or flat.
            hessian: (B, d, d), or (B, *shape, *shape); zero where neither it nor `operator` is given.
            operator: callable that maps rows (B, n, d) to H applied to each row; H is never made dense. Its method
                `select(index)`, if there is one, returns the operator of a selection of examples.
            value: value of the differentiated function, (B,), if that is not f but a softened network.
            scales: typical change of each feature, (*shape); 1 if None.
            target: (B, q) indices into the model's output.
            n_passes: total work in units of a gradient call, (B,) or one number for all; 0 if None.
            gradient_stderr: standard errors of the gradient, if it was sampled.
            n_calls: number of gradients at perturbed inputs, (B,); 0 if None.
            relative_error: relative error of the sampled Hessian from which these numbers were computed, (B,). The
                error of single entries is then unknown: standard errors are infinite and no pair is significant.
            seed: seed of a random method, one or one per example.
            method: name of the method.
            note: a remark about the numbers for the reader.
            names: one name per feature.

        Returns:
            A result of the class on which the method is called.

        Raises:
            TypeError: if `operator` is not callable.
            ValueError: if both `hessian` and `operator` are given, if a shape does not fit the inputs, if a number is
                not finite, or if the Hessian is not symmetric.
        """
        check_inputs(inputs)
        inputs = inputs.detach()
        b, d = len(inputs), inputs[0].numel()
        if hessian is not None and operator is not None:
            raise ValueError("a Hessian is a matrix or an operator, got both: pass one of hessian and operator.")
        curvature: Tensor | Operator | None = operator
        if hessian is not None:
            curvature = _given(hessian, inputs, (b, d, d), "hessian")
            _refuse_asymmetric(curvature)
            curvature = symmetric(curvature)
        elif operator is not None and not callable(operator):
            raise TypeError(f"operator must be callable, rows (B, n, d) → (B, n, d), got {type(operator).__name__}.")
        elif operator is not None and not hasattr(operator, "select"):  # the operators of this library are symmetric
            _refuse_asymmetric_operator(operator, inputs, d)
        passes = torch.as_tensor(0.0 if n_passes is None else n_passes, dtype=torch.float64, device=inputs.device)
        stderr = None if gradient_stderr is None else _given(gradient_stderr, inputs, (b, d), "gradient_stderr")
        calls = torch.zeros(b, dtype=torch.long, device=inputs.device) if n_calls is None else n_calls.to(inputs.device)
        return cls(
            inputs=inputs,
            target=target,
            n_passes=passes.expand(b),
            status=("exact",) * b,
            derivatives=Derivatives(
                output=_given(output, inputs, (b,), "output"),
                value=_given(output if value is None else value, inputs, (b,), "value"),
                gradient=_given(gradient, inputs, (b, d), "gradient"),
                curvature=curvature,
                n_calls=calls,
                gaussian=Isotropic(1.0) if scales is None else Diagonal(torch.as_tensor(scales).reshape(-1)).check(d),
                gradient_stderr=stderr,
                relative_error=None if relative_error is None else relative_error.to(inputs).expand(b),
            ),
            method=method,
            note=note,
            seeds=_each_seed(seed, b),
            names=None if names is None else (name_each(names, d),) * b,
        )

    @property
    def source(self) -> Derivatives:
        """The derivatives; for modules of this package."""
        return self.derivatives

    @property
    def design(self) -> str:
        """Always "exact"."""
        return "exact"

    @property
    def seed(self) -> int | tuple[int, ...]:
        """The seed, or one per example; 0 for methods that are not random."""
        return self.seeds[0] if len(set(self.seeds)) == 1 else self.seeds

    @property
    def n_calls(self) -> Tensor:
        """Number of gradients at perturbed inputs, (B,); 0 unless the gradient is a mean of such gradients."""
        return self.derivatives.n_calls

    @property
    def shrink(self) -> bool:
        """False: exact numbers are not denoised."""
        return False

    def unshrunk(self) -> Self:
        """This result: exact numbers are not denoised."""
        return self

    @property
    def relative_error(self) -> Tensor:
        """0, (B,); for numbers that were computed from a sampled Hessian, the error of the latter."""
        error = self.derivatives.relative_error
        return torch.zeros_like(self.output) if error is None else error

    @property
    def r2(self) -> Tensor:
        """NaN, (B,): there are no gradients in the neighbourhood."""
        return torch.full_like(self.output, torch.nan)

    @property
    def stein_z(self) -> Tensor:
        """NaN, (B, 2): there are no gradients in the neighbourhood."""
        return self.inputs.new_full((len(self), 2), torch.nan)

    def eigh(self, k: int | None = None) -> Eigenpairs:
        """The k eigenpairs of H with the largest |λ|, as `Result.eigh`; from an operator, by products only."""
        k = eigenpairs.check_count(k, self.shape[1])
        if isinstance(self.derivatives.form, Tensor):
            found = eigenpairs.of_matrix(self.hessian, k)
        else:
            found = Eigenpairs(*leading_eigenpairs(self.derivatives.product, self.derivatives.gradient, k))
        return replace(found, compute_estimate=partial(self._certain, found.values)).shaped(self.feature_shape)

    def _certain(self, values: Tensor) -> Estimate:
        """Numbers (B, k) of this Hessian, whose error is zero, or infinite if it was computed from a sampled one."""
        variance = self.noise.of_diagonal()
        return Estimate(values, variance.value[:, :1].sqrt().expand_as(values).to(values), variance.df)

    def grouped(self, grouping: Grouping) -> Self:
        """As `groups`, for a `Grouping` that was validated before; one product per group, no d × d matrix."""
        return replace(self, derivatives=self.derivatives.grouped(grouping, self.inputs[0].numel()), names=None)

    def select(self, chosen: Tensor) -> Self:
        """The examples at indices on the CPU, in that order; for modules of this package."""
        seeds = tuple(self.seeds[i] for i in chosen.tolist())
        return combine.selected(self, chosen, derivatives=self.derivatives.select(chosen.to(self.device)), seeds=seeds)

    def concatenated(self, results: Sequence[Result]) -> Self:
        """All of `results`, of which this is the first, as one; for modules of this package."""
        alike = combine.same_settings(self, results)
        if len(methods := sorted({r.method for r in alike})) > 1:
            raise ValueError(f"only results of one method can be concatenated, got {', '.join(methods)}.")
        return combine.concatenated(
            alike,
            derivatives=Derivatives.cat([r.derivatives for r in alike]),
            seeds=tuple(s for r in alike for s in r.seeds),
            note=" ".join(dict.fromkeys(r.note for r in alike if r.note)),
        )

    def to(self, device: torch.device | str) -> Self:
        """The same result on another device."""
        return combine.moved(self, device, derivatives=self.derivatives.to(device))

    def parts(self) -> Parts:
        """This result as plain data, for files and stores.

        Raises:
            ValueError: if the Hessian is an operator and has not been made dense.
        """
        if callable(self.derivatives.form):
            raise ValueError(
                "a matrix-free Hessian calls the model and cannot be saved. Save groups(mask), or read .hessian first "
                "(one product per feature): the dense matrix is then saved with the result."
            )
        return files.stored_parts(self)

    def save(self, path: str | Path) -> None:
        """Write this result to a safetensors file, as `Interactions.save`.

        Raises:
            ValueError: if the Hessian is an operator and has not been made dense.
        """
        files.save(self.parts(), path)

    def refuse_dense(self) -> None:
        """Raise if there are too many features for a dense matrix, or for one product per feature."""
        refuse_dense(self.shape[1], INSTEAD)

    def __repr__(self) -> str:
        return text.exact_table(self, self.derivatives.form)


class Exact(StoredResult):
    """A gradient and a Hessian without sampling error, with the methods of `Interactions` that need no draws.

    `Exact.make` and the functions of `smoothhess.baselines` return it. Standard errors are 0, `relative_error` is 0,
    `r2` is NaN. There are no draws to merge or to extend. `gaussian` holds the typical change of each feature, which
    weights the pairs in the ranking.

    The Hessian is dense, zero, or an operator, of which only products are computed. An operator may call the model:
    such a result works for any number of features, but it cannot be saved, and `hessian` takes one product per feature.

    >>> x = torch.tensor([[1.0, 2.0, 3.0]])
    >>> hessian = torch.tensor([[[0.0, 3.0, 2.0], [3.0, 0.0, 1.0], [2.0, 1.0, 0.0]]])
    >>> result = Exact.make(x, x.prod(1), torch.tensor([[6.0, 3.0, 2.0]]), hessian)
    >>> [(p.names, p.value, p.significant) for p in result.top_pairs(2)[0]]
    [(('0', '1'), 3.0, True), (('0', '2'), 2.0, True)]
    >>> result.taylor()(x[:, None] + 1), (x + 1).prod(1)
    (tensor([[23.]]), tensor([24.]))
    """

    def taylor(self, order: int = 2) -> Taylor:
        """The surrogate f(x₀) + Gᵀδ + ½δᵀHδ, as `Interactions.taylor`."""
        return surrogate(self, order)


class Attribution(StoredResult):
    """Interactions of pairs that are not second derivatives: it has pairs, groups and figures, but no surrogate.

    `gradient` holds the first-order attribution of the same method, if there is one. There is no method `taylor`, and
    functions that need a surrogate (`attack`, `perturbation_mse`, `to_shapiq`) refuse an attribution.

    >>> x = torch.ones(1, 2)
    >>> found = Attribution.make(x, x.sum(1), x, torch.eye(2)[None], method="some index")
    >>> hasattr(found, "taylor")
    False
    """


def _given(numbers: Any, inputs: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """Validate numbers of the given shape, or of that with unflattened features, and convert them like the inputs."""
    tensor = torch.as_tensor(numbers).detach()
    features = tuple(inputs.shape[1:])
    loose = (shape[0], *features * (len(shape) - 1))
    if tuple(tensor.shape) not in (shape, loose):
        wanted = f"{shape}" if loose == shape else f"{shape} or {loose}"
        raise ValueError(f"{name} must have shape {wanted}, got {tuple(tensor.shape)}.")
    tensor = tensor.to(inputs, copy=True).reshape(shape)  # a copy: the caller may change the tensor later
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{name} must be finite, got NaN or infinity. Check the inputs' scale and the model.")
    return tensor


def _each_seed(seed: Any, batch: int) -> tuple[int, ...]:
    seeds = [seed] * batch if isinstance(seed, int) or getattr(seed, "ndim", None) == 0 else seed
    if len(seeds) != batch:
        raise ValueError(f"seed must be one integer, or one per example: {batch}, got {len(seeds)}.")
    return tuple(map(int, seeds))


def _refuse_asymmetric_operator(operator: Operator, inputs: Tensor, d: int) -> None:
    """Raise if uᵀHv and vᵀHu differ by more than rounding for random u and v."""
    rows = fixed_normal(1, 2, d).to(inputs).expand(len(inputs), 2, d)
    product = operator(rows)
    if not isinstance(product, Tensor) or product.shape != rows.shape:
        got = tuple(product.shape) if isinstance(product, Tensor) else type(product).__name__
        raise ValueError(f"the operator must map rows {tuple(rows.shape)} to rows of that shape, got {got}.")
    between = rows.double() @ product.double().mT  # uᵀHv and vᵀHu off the diagonal
    size = rows.double().norm(dim=-1).amax(1) * product.double().norm(dim=-1).amax(1)
    if bool(((between[:, 0, 1] - between[:, 1, 0]).abs() > ASYMMETRY * size).any()):
        raise ValueError(
            "a Hessian is symmetric, this operator is not: uᵀHv and vᵀHu differ for random directions. Pass a callable "
            "that maps rows (B, n, d) to H applied to each of them."
        )


def _refuse_asymmetric(hessian: Tensor) -> None:
    for i, matrix in enumerate(hessian):
        apart, largest = (matrix - matrix.mT).abs().max(), matrix.abs().max()
        if bool(apart > ASYMMETRY * largest):
            raise ValueError(
                f"hessian must be symmetric, that of example {i} differs from its transpose by {float(apart):.2g} "
                f"(largest entry {float(largest):.2g}). Pass (H + H.mT) / 2 to use its symmetric part."
            )


@files.restorer("Exact")
def _restored_exact(parts: Parts) -> Exact:
    return Exact(**files.stored_fields(parts))


@files.restorer("Attribution")
def _restored_attribution(parts: Parts) -> Attribution:
    return Attribution(**files.stored_fields(parts))
