"""Exact and Attribution: results without sampling error, with the interface of `Interactions`.

The Hessian is stored as a matrix, as zero, or as an operator. The functions that compute such results are in
`smoothhess.baselines`; sampled results are in `interactions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from smoothhess.draws.gaussian import Diagonal, Isotropic
from smoothhess.draws.seeding import fixed_normal
from smoothhess.estimate.grouping import Grouping
from smoothhess.estimate.statistics import DENSE_LIMIT, Statistics, symmetric
from smoothhess.estimate.variance import Variance, Variances
from smoothhess.linalg.eigenvalue_order import by_magnitude
from smoothhess.linalg.krylov import leading_eigenpairs
from smoothhess.linalg.memory import BATCH_INPUTS
from smoothhess.model.gradients import check_inputs
from smoothhess.result import files, text
from smoothhess.result.files import Parts
from smoothhess.result.interactions import Eigenpairs, Estimate, Interactions
from smoothhess.result.taylor import Taylor

Operator = Callable[[Tensor], Tensor]  # rows (B, n, d) → H applied to each of them

ASYMMETRY = 1e-3  # difference between H and its transpose that counts as rounding, relative to the largest entry


@dataclass(frozen=True, eq=False)
class Derivatives:
    """Value, gradient and Hessian of B examples with d features or groups, which replace the statistics."""

    output: Tensor  # (B,) f(x)
    value: Tensor  # (B,) of the differentiated function, which is f or a softened network
    gradient: Tensor  # (B, d)
    curvature: Tensor | Operator | None  # H as (B, d, d) or as an operator; None is zero
    n_calls: Tensor  # (B,) gradients at perturbed inputs, if the gradient is a mean of such
    value_stderr: Tensor | None = None  # (B,); None is zero
    gradient_stderr: Tensor | None = None  # (B, d); None is zero
    relative_error: Tensor | None = None  # (B,) of the sampled Hessian that the curvature is made from; None is zero

    def product(self, rows: Tensor) -> Tensor:
        """H applied to each row of (B, n, d)."""
        if self.curvature is None:
            return torch.zeros_like(rows)
        if isinstance(self.curvature, Tensor):
            return rows @ self.curvature
        product = self.curvature(rows)
        if product.shape != rows.shape:
            raise ValueError(
                f"the operator must map rows {tuple(rows.shape)} to rows of that shape, got {tuple(product.shape)}."
            )
        return product.to(rows)

    def grouped(self, grouping: Grouping) -> Derivatives:
        """Derivatives of group sums: PᵀHP through one product for each of the K groups."""
        groups = grouping.directions(Isotropic(1.0)).expand(len(self.output), -1, -1)  # (B, K, d)
        stderr, weight = self.gradient_stderr, grouping.direction
        unsigned = replace(grouping, direction=None if weight is None else weight.abs())
        return replace(
            self,
            gradient=grouping.sum(self.gradient),
            # an upper bound: the standard error of a sum is at most the sum of the standard errors
            gradient_stderr=None if stderr is None else unsigned.sum(stderr),
            curvature=None if self.curvature is None else symmetric(grouping.sum(self.product(groups))),
        )

    def select(self, index: Tensor) -> Derivatives:
        """The derivatives of the examples at `index`."""
        curvature = self.curvature
        if isinstance(curvature, Tensor):
            curvature = curvature[index]
        elif curvature is not None:
            own = getattr(curvature, "select", None)
            curvature = _Selected(curvature, index, len(self.output)) if own is None else own(index)
        tensors = {name: t[index] for name, t in self.tensors().items() if name != "curvature"}
        return Derivatives(curvature=curvature, **tensors)

    @staticmethod
    def cat(parts: Sequence[Derivatives]) -> Derivatives:
        """Concatenate the derivatives of different examples."""
        if any(p.gradient_stderr is not None or p.value_stderr is not None for p in parts):
            parts = [
                replace(p, value_stderr=p.error_of("value"), gradient_stderr=p.error_of("gradient")) for p in parts
            ]
        if any(p.relative_error is not None for p in parts):
            none = [p.output.new_zeros(len(p.output)) for p in parts]
            parts = [
                replace(p, relative_error=zero if p.relative_error is None else p.relative_error)
                for p, zero in zip(parts, none, strict=True)
            ]
        curvatures = [p.curvature for p in parts]
        whole: Tensor | Operator | None = None
        if any(callable(c) for c in curvatures):
            whole = _Beside(parts)
        elif any(c is not None for c in curvatures):
            d = parts[0].gradient.shape[1]
            blocks = [p.gradient.new_zeros(len(p.output), d, d) if p.curvature is None else p.curvature for p in parts]
            whole = torch.cat([b for b in blocks if isinstance(b, Tensor)])
        names = [name for name in parts[0].tensors() if name != "curvature"]
        return Derivatives(curvature=whole, **{name: torch.cat([getattr(p, name) for p in parts]) for name in names})

    def to(self, device: torch.device | str) -> Derivatives:
        """Copy to another device; raises for an operator, which stays on the device of its model."""
        if callable(self.curvature) and torch.empty(0, device=device).device != self.output.device:
            raise ValueError(
                f"a matrix-free Hessian stays on {str(self.output.device)!r}, the device of the model that it calls. "
                "Move groups(mask), or compute the result on the other device."
            )
        tensors = {name: t.to(device) for name, t in self.tensors().items()}
        return Derivatives(**{"curvature": self.curvature, **tensors})

    def error_of(self, name: str) -> Tensor:
        """The standard error of the "value" or the "gradient"."""
        stderr = getattr(self, f"{name}_stderr")
        return torch.zeros_like(getattr(self, name)) if stderr is None else stderr

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name; an operator is not included."""
        names = ("output", "value", "gradient", "curvature", "n_calls", "value_stderr", "gradient_stderr")
        names += ("relative_error",)
        return {name: t for name in names if isinstance(t := getattr(self, name), Tensor)}


@dataclass(frozen=True, eq=False)
class _Selected:
    """A selection of the examples of an operator that needs rows of all examples in every call."""

    operator: Operator
    index: Tensor
    batch: int

    def __call__(self, rows: Tensor) -> Tensor:
        product, left = torch.empty_like(rows), torch.arange(len(rows), device=rows.device)
        index = self.index.to(rows.device)
        while len(left):  # an example that was selected twice needs two calls
            order = torch.zeros(self.batch, dtype=torch.long, device=rows.device)
            order[index[left]] = left
            now = order[index[left].unique()]
            whole = rows.new_zeros(self.batch, *rows.shape[1:])
            whole[index[now]] = rows[now]
            product[now] = self.operator(whole)[index[now]].to(rows)
            left = left[~torch.isin(left, now)]
        return product


@dataclass(frozen=True, eq=False)
class _Beside:
    """Concatenated Hessians of different examples, each as a matrix, an operator or zero."""

    parts: Sequence[Derivatives]

    def __call__(self, rows: Tensor) -> Tensor:
        sizes = [len(p.output) for p in self.parts]
        return torch.cat([p.product(r) for p, r in zip(self.parts, rows.split(sizes), strict=True)])


class _Certain:
    """Variances of an exact result: zero, or infinite (unknown) if it was computed from a sampled Hessian."""

    def __init__(self, result: Exact) -> None:
        self.shape, self.device = result.shape, result.device
        self.sampled = result.relative_error > 0

    def _zero(self, *sizes: int) -> Variance:
        b = self.shape[0]
        each = torch.where(self.sampled, torch.inf, 0.0).double().reshape(b, *[1] * len(sizes))
        return Variance(each.expand(b, *sizes), torch.full((b,), torch.inf, dtype=torch.float64, device=self.device))

    def of_mean(self, rows: Tensor, exact: Tensor | None = None) -> Variance:
        return self._zero(*rows.shape[2:])

    def of_value(self) -> Variance:
        return self._zero()

    def of_gradient(self) -> Variance:
        return self._zero(self.shape[1])

    def of_row(self, i: int) -> Variance:
        return self._zero(self.shape[1])

    def of_diagonal(self) -> Variance:
        return self._zero(self.shape[1])

    def of_bilinear(self, u: Tensor, v: Tensor) -> Variance:
        return self._zero()

    def of_entries(self) -> Variance:
        return self._zero(*self.shape[1:])

    def operator_norms(self) -> tuple[Tensor, Tensor]:
        zero = self._zero().value
        return zero, zero


@dataclass(frozen=True, eq=False, repr=False)
class Exact(Interactions):
    """A gradient and a Hessian without sampling error, with the interface of `Interactions`.

    `Exact.make` and the functions of `smoothhess.baselines` return it. Standard errors are 0, `relative_error` is 0,
    `r2` is NaN. There are no draws: `statistics`, `merge` and `SmoothHess.more` raise ValueError. `gaussian` holds the
    typical change of each feature, which weights the pairs in the ranking.

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

    statistics: Statistics = field(init=False, repr=False)
    derivatives: Derivatives = field(kw_only=True)
    method: str = ""  # how the derivatives were computed
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

        Returns:
            An `Exact`, or the subclass on which the method is called.

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
            gaussian=Isotropic(1.0) if scales is None else Diagonal(torch.as_tensor(scales).reshape(-1)).check(d),
            grouping=None,
            target=target,
            n_passes=passes.expand(b),
            status=("exact",) * b,
            derivatives=Derivatives(
                output=_given(output, inputs, (b,), "output"),
                value=_given(output if value is None else value, inputs, (b,), "value"),
                gradient=_given(gradient, inputs, (b, d), "gradient"),
                curvature=curvature,
                n_calls=calls,
                gradient_stderr=stderr,
                relative_error=None if relative_error is None else relative_error.to(inputs).expand(b),
            ),
            method=method,
            note=note,
            seeds=_each_seed(seed, b),
        )

    def __getattr__(self, name: str) -> Any:
        if name == "statistics":  # an explanation instead of an AttributeError
            raise ValueError(
                f"this result ({self.method or 'exact'}) was not sampled: it has no draws to merge, to extend or to "
                "estimate a variance from. Use SmoothHess.attribute for a sampled result."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- settings, estimates and their errors ---------------------------------------------------------------------

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
    def output(self) -> Tensor:
        """f(x), (B,)."""
        return self.derivatives.output

    @property
    def value(self) -> Tensor:
        """Value of the differentiated function, (B,): f(x), or the softened network's output."""
        return self.derivatives.value

    @property
    def value_stderr(self) -> Tensor:
        """Standard error of `value`, (B,); 0 unless the value was sampled."""
        return self.derivatives.error_of("value")

    @property
    def gradient(self) -> Tensor:
        """The gradient, (B, *feature shape)."""
        return self.derivatives.gradient.reshape(len(self), *self.feature_shape)

    @cached_property
    def gradient_stderr(self) -> Tensor:
        """Standard error of `gradient`, (B, *feature shape); 0 unless the gradient was sampled.

        For groups it is an upper bound, the sum of the standard errors of the features.
        """
        return self.derivatives.error_of("gradient").reshape(len(self), *self.feature_shape)

    def value_estimate(self) -> Estimate:
        """`value` with its standard error, an `Estimate` (B,); intervals use the normal distribution."""
        return Estimate(self.value, self.value_stderr, self._no_df)

    def gradient_estimate(self) -> Estimate:
        """`gradient` with its standard errors, an `Estimate`; intervals use the normal distribution."""
        return Estimate(self.gradient, self.gradient_stderr, self._no_df)

    @property
    def _no_df(self) -> Tensor:
        return torch.full((len(self),), torch.inf, dtype=torch.float64, device=self.device)

    @cached_property
    def hessian(self) -> Tensor:
        """The Hessian, dense and symmetric, (B, d, d); from an operator, one product per feature."""
        if isinstance(self.derivatives.curvature, Tensor):
            return self.derivatives.curvature
        self.refuse_dense()
        whole = self.inputs.new_zeros(self.shape)
        if self.derivatives.curvature is not None:
            for start, rows in self._unit_rows():
                whole[:, start : start + rows.shape[1]] = self.derivatives.product(rows)
        return symmetric(whole)

    @property
    def _unbiased_hessian(self) -> Tensor:
        return self.hessian

    def _unit_rows(self) -> Any:
        """All unit vectors in chunks: the index of the first one of a chunk, and (B, n, d)."""
        b, d, _ = self.shape
        step = BATCH_INPUTS.items(b * d * self.inputs.element_size(), self.inputs.device)
        for start in range(0, d, step):
            rows = self.inputs.new_zeros(min(step, d - start), d)
            rows[:, start:].fill_diagonal_(1)
            yield start, rows.expand(b, -1, -1)

    @property
    def _known(self) -> Derivatives:
        """The derivatives; a Hessian that was made dense replaces its operator."""
        made = callable(self.derivatives.curvature) and "hessian" in self.__dict__
        return replace(self.derivatives, curvature=self.hessian) if made else self.derivatives

    def _product(self, rows: Tensor) -> Tensor:
        return self._known.product(rows)

    def _unbiased_product(self, rows: Tensor) -> Tensor:
        return self._product(rows)

    @cached_property
    def noise(self) -> Variances:  # type: ignore[override]  # there are no statistics
        """Variances: zero, or infinite where the derivatives were made of samples."""
        return _Certain(self)

    @cached_property
    def relative_error(self) -> Tensor:
        """0, (B,); for an attribution that was computed from a sampled Hessian, the error of the latter."""
        known = self.derivatives.relative_error
        return torch.zeros_like(self.output) if known is None else known

    @cached_property
    def r2(self) -> Tensor:
        """NaN, (B,): there are no gradients in the neighbourhood."""
        return torch.full_like(self.output, torch.nan)

    @cached_property
    def stein_z(self) -> Tensor:
        """NaN, (B, 2): there are no gradients in the neighbourhood."""
        return self.inputs.new_full((len(self), 2), torch.nan)

    # --- interactions that are not computed from statistics -----------------------------------------------------

    def diagonal(self) -> Estimate:
        """H_ii of each feature, an `Estimate` (B, *feature shape); from an operator, one product per feature."""
        known = self._known
        if known.curvature is None:
            value = torch.zeros_like(known.gradient)
        elif isinstance(known.curvature, Tensor):
            value = known.curvature.diagonal(dim1=-2, dim2=-1)
        else:
            self.refuse_dense()
            parts = [
                known.product(rows)[:, :, start : start + rows.shape[1]].diagonal(dim1=-2, dim2=-1)
                for start, rows in self._unit_rows()
            ]
            value = torch.cat(parts, 1)
        return self.estimate_of(value.reshape(len(self), *self.feature_shape), self.noise.of_diagonal())

    def eigh(self, k: int | None = None) -> Eigenpairs:
        """The k eigenpairs of H with the largest |λ|, as `Interactions.eigh`; from an operator, by products only."""
        b, d, _ = self.shape
        k = min(8, d) if k is None else k
        if not 1 <= k <= d:
            raise ValueError(f"k must be between 1 and {d} eigenpairs, got {k}.")
        if isinstance(self._known.curvature, Tensor):
            values, vectors = torch.linalg.eigh(self.hessian)
            order = by_magnitude(values, k)
            values, vectors = values.gather(1, order), vectors.gather(2, order[:, None].expand(-1, d, -1)).mT
        else:
            values, vectors = leading_eigenpairs(self._product, self.derivatives.gradient, k)
        return Eigenpairs(values, vectors.reshape(b, k, *self.feature_shape))

    def groups(self, feature_mask: Tensor, direction: Tensor | None = None) -> Self:
        """Interactions of groups of features, as `Interactions.groups`; one product per group, no d × d matrix."""
        shape = (len(self), *self.feature_shape)
        grouping = Grouping.make(feature_mask, direction, shape, self.feature_scales[0], self.inputs)
        whole = grouping
        if self.grouping is not None:
            whole = grouping.after(self.grouping, self.gaussian.scales(self.inputs[0].numel()))
        return replace(self, derivatives=self._known.grouped(grouping), grouping=whole)

    # --- examples, devices, files ---------------------------------------------------------------------------------

    def _at(self, chosen: Tensor) -> Self:
        where = chosen.to(self.device)
        return replace(
            self,
            inputs=self.inputs[where],
            derivatives=self._known.select(where),
            grouping=None if self.grouping is None else self.grouping.select(where),
            target=None if self.target is None else self.target[chosen],
            n_passes=self.n_passes[where],
            status=tuple(self.status[i] for i in chosen.tolist()),
            seeds=tuple(self.seeds[i] for i in chosen.tolist()),
        )

    def _beside(self, results: Sequence[Interactions]) -> Self:
        alike = [r for r in results if isinstance(r, type(self)) and r.method == self.method]
        if len(alike) != len(results):
            methods = sorted({r.method for r in results if isinstance(r, Exact)})
            raise ValueError(f"only results of one method can be concatenated, got {', '.join(methods)}.")
        targets = [r.target for r in alike if r.target is not None]
        groupings = [r.grouping for r in alike if r.grouping is not None]
        return replace(
            self,
            inputs=torch.cat([r.inputs for r in alike]),
            derivatives=Derivatives.cat([r._known for r in alike]),
            grouping=Grouping.cat(groupings, [*map(len, alike)]) if groupings else None,
            target=torch.cat(targets) if len(targets) == len(alike) else None,
            n_passes=torch.cat([r.n_passes for r in alike]),
            status=tuple(s for r in alike for s in r.status),
            seeds=tuple(s for r in alike for s in r.seeds),
            note=" ".join(dict.fromkeys(r.note for r in alike if r.note)),
        )

    def merge(self, other: Interactions) -> Interactions:
        """Raise ValueError: an exact result has no draws.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"exact results ({self.method or 'exact'}) hold no draws, so there is nothing to merge. To concatenate "
            "different examples use Interactions.cat."
        )

    def to(self, device: torch.device | str) -> Self:
        """The same result on another device."""
        return replace(
            self,
            inputs=self.inputs.to(device),
            derivatives=self._known.to(device),
            gaussian=self.gaussian.to(device, self.dtype),
            grouping=None if self.grouping is None else self.grouping.to(device),
            n_passes=self.n_passes.to(device),
        )

    def save(self, path: str | Path) -> None:
        """Write this result to a safetensors file, as `Interactions.save`.

        Raises:
            ValueError: if the Hessian is an operator and has not been made dense.
        """
        if callable(self._known.curvature):
            raise ValueError(
                "a matrix-free Hessian calls the model and cannot be saved. Save groups(mask), or read .hessian first "
                "(one product per feature): the dense matrix is then saved with the result."
            )
        Interactions.save(replace(self, derivatives=self._known), path)

    def __repr__(self) -> str:
        return text.exact_table(self, self._known.curvature)

    def refuse_dense(self) -> None:
        """Raise if there are too many features for a dense matrix."""
        if self.shape[1] > DENSE_LIMIT:
            raise ValueError(
                f"{self.shape[1]} features are too many for a dense matrix, or one product per feature ({DENSE_LIMIT} "
                "at most). Use groups(mask), row(i), bilinear(u, v), eigh(k) or result @ v."
            )

    def parts(self) -> Parts:
        """This result as plain data, for files and stores."""
        about, tensors = files.common_parts(self)
        about |= {"method": self.method, "note": self.note, "seeds": self.seeds}
        return Parts(about, tensors | {f"derivatives.{name}": t for name, t in self.derivatives.tensors().items()})


class Attribution(Exact):
    """Interactions of pairs that are not second derivatives: it has pairs, groups and figures, but no surrogate.

    `gradient` holds the first-order attribution of the same method, if there is one.

    >>> x = torch.ones(1, 2)
    >>> found = Attribution.make(x, x.sum(1), x, torch.eye(2)[None], method="some index")
    >>> found.taylor()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: some index is an attribution, not a Hessian: it has no Taylor surrogate...
    """

    @property
    def has_surrogate(self) -> bool:
        """False: the numbers are not derivatives."""
        return False

    def taylor(self, order: int = 2) -> Taylor:
        """Raise ValueError: an attribution is not a Hessian.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{self.method or 'this'} is an attribution, not a Hessian: it has no Taylor surrogate and no attack. Use "
            "SmoothHess, or a derivative among smoothhess.baselines (gradient, hessian, softplus, swish)."
        )


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
@files.restorer("Attribution")
def _restored(parts: Parts) -> Exact:
    about, common = parts.about, files.common_fields(parts)
    cls = {"Exact": Exact, "Attribution": Attribution}[about["kind"]]
    derivatives = Derivatives(**{"curvature": None, **parts.under("derivatives.")})
    seeds = tuple(about["seeds"])
    if derivatives.gradient_stderr is None and derivatives.relative_error is None:  # no part of it was sampled
        del common["estimator_version"]
    return cls(**common, derivatives=derivatives, method=about["method"], note=about["note"], seeds=seeds)
