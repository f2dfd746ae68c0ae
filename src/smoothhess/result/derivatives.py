"""Derivatives: value, gradient and Hessian of B examples that were not estimated from draws, the source of `Exact`.

The Hessian is stored as a matrix, as zero, or as an operator, of which only products are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from smoothhess.draws.gaussian import Gaussian, Isotropic
from smoothhess.estimate.grouping import Grouping
from smoothhess.estimate.hessian_estimate import refuse_dense
from smoothhess.estimate.once import Once
from smoothhess.estimate.statistics import symmetric
from smoothhess.estimate.variance import Variance
from smoothhess.linalg.memory import BATCH_INPUTS

Operator = Callable[[Tensor], Tensor]  # rows (B, n, d) → H applied to each of them

INSTEAD = "groups(mask), row(i), bilinear(u, v), eigh(k) or result @ v"  # of a dense matrix, or a product per feature


@dataclass(frozen=True, eq=False)
class Derivatives:
    """Value, gradient and Hessian of B examples with d features or groups."""

    output: Tensor  # (B,) f(x)
    value: Tensor  # (B,) of the differentiated function, which is f or a softened network
    gradient: Tensor  # (B, d)
    curvature: Tensor | Operator | None  # H as (B, d, d) or as an operator; None is zero
    n_calls: Tensor  # (B,) gradients at perturbed inputs, if the gradient is a mean of such
    gaussian: Gaussian  # the typical change of each feature
    grouping: Grouping | None = None
    value_stderr: Tensor | None = None  # (B,); None is zero
    gradient_stderr: Tensor | None = None  # (B, d); None is zero
    relative_error: Tensor | None = None  # (B,) of the sampled Hessian that the curvature is made from; None is zero
    cached_matrix: Once[Tensor] = field(default_factory=lambda: Once[Tensor]())

    def __len__(self) -> int:
        return len(self.output)

    @property
    def form(self) -> Tensor | Operator | None:
        """The curvature; a matrix if an operator was made dense before."""
        return self.curvature if self.cached_matrix.value is None else self.cached_matrix.value

    @property
    def hessian(self) -> Tensor:
        """The Hessian, dense and symmetric, (B, d, d); from an operator, one product per feature."""
        return self.curvature if isinstance(self.curvature, Tensor) else self.cached_matrix.get(self._dense)

    def _dense(self) -> Tensor:
        d = self.gradient.shape[1]
        refuse_dense(d, INSTEAD)
        matrix = self.gradient.new_zeros(len(self), d, d)
        if self.curvature is not None:
            for start, rows in self._unit_rows():
                matrix[:, start : start + rows.shape[1]] = self.product(rows)
        return symmetric(matrix)

    def _unit_rows(self) -> Iterator[tuple[int, Tensor]]:
        """All unit vectors in chunks: the index of the first one of a chunk, and (B, n, d)."""
        b, d = self.gradient.shape
        step = BATCH_INPUTS.items(b * d * self.gradient.element_size(), self.gradient.device)
        for start in range(0, d, step):
            rows = self.gradient.new_zeros(min(step, d - start), d)
            rows[:, start:].fill_diagonal_(1)
            yield start, rows.expand(b, -1, -1)

    @property
    def unbiased(self) -> Derivatives:
        """The derivatives themselves: there is no denoised version of them."""
        return self

    def dense(self) -> Tensor:
        """The Hessian, (B, d, d)."""
        return self.hessian

    def diagonal(self) -> Tensor:
        """H_ii of each feature, (B, d); from an operator, one product per feature."""
        if self.form is None:
            return torch.zeros_like(self.gradient)
        if isinstance(self.form, Tensor):
            return self.form.diagonal(dim1=-2, dim2=-1)
        refuse_dense(self.gradient.shape[1], INSTEAD)
        parts = [
            self.product(rows)[:, :, start : start + rows.shape[1]].diagonal(dim1=-2, dim2=-1)
            for start, rows in self._unit_rows()
        ]
        return torch.cat(parts, 1)

    def product(self, rows: Tensor) -> Tensor:
        """H applied to each row of (B, n, d)."""
        if self.form is None:
            return torch.zeros_like(rows)
        if isinstance(self.form, Tensor):
            return rows @ self.form
        product = self.form(rows)
        if product.shape != rows.shape:
            raise ValueError(
                f"the operator must map rows {tuple(rows.shape)} to rows of that shape, got {tuple(product.shape)}."
            )
        return product.to(rows)

    @property
    def noise(self) -> NoVariance:
        """Variances: zero, or infinite where the derivatives were computed from a sampled Hessian."""
        return NoVariance(self)

    def error_of(self, name: str) -> Tensor:
        """The standard error of the "value" or the "gradient"."""
        stderr = getattr(self, f"{name}_stderr")
        return torch.zeros_like(getattr(self, name)) if stderr is None else stderr

    def grouped(self, grouping: Grouping, d: int) -> Derivatives:
        """Derivatives of group sums, PᵀHP through one product for each of the K groups; an input has `d` features."""
        groups = grouping.directions(Isotropic(1.0)).expand(len(self), -1, -1)  # (B, K, d)
        stderr, weight = self.gradient_stderr, grouping.direction
        unsigned = replace(grouping, direction=None if weight is None else weight.abs())
        composed = grouping if self.grouping is None else grouping.after(self.grouping, self.gaussian.scales(d))
        return replace(
            self,
            gradient=grouping.sum(self.gradient),
            # an upper bound: the standard error of a sum is at most the sum of the standard errors
            gradient_stderr=None if stderr is None else unsigned.sum(stderr),
            curvature=None if self.form is None else symmetric(grouping.sum(self.product(groups))),
            grouping=composed,
            cached_matrix=Once(),
        )

    def select(self, index: Tensor) -> Derivatives:
        """The derivatives of the examples at `index`."""
        curvature = self.form
        if isinstance(curvature, Tensor):
            curvature = curvature[index]
        elif curvature is not None:
            own = getattr(curvature, "select", None)
            curvature = _Selected(curvature, index, len(self)) if own is None else own(index)
        grouping = None if self.grouping is None else self.grouping.select(index)
        tensors: dict[str, Any] = {name: t[index] for name, t in self.tensors().items() if name != "curvature"}
        return Derivatives(curvature=curvature, gaussian=self.gaussian, grouping=grouping, **tensors)

    @staticmethod
    def cat(parts: Sequence[Derivatives]) -> Derivatives:
        """Concatenate the derivatives of different examples."""
        if any(p.gradient_stderr is not None or p.value_stderr is not None for p in parts):
            parts = [
                replace(p, value_stderr=p.error_of("value"), gradient_stderr=p.error_of("gradient")) for p in parts
            ]
        if any(p.relative_error is not None for p in parts):
            none = [p.output.new_zeros(len(p)) for p in parts]
            parts = [
                replace(p, relative_error=zero if p.relative_error is None else p.relative_error)
                for p, zero in zip(parts, none, strict=True)
            ]
        forms = [p.form for p in parts]
        curvature: Tensor | Operator | None = None
        if any(callable(c) for c in forms):
            curvature = _Concatenated(parts)
        elif any(c is not None for c in forms):
            d = parts[0].gradient.shape[1]
            blocks = [p.gradient.new_zeros(len(p), d, d) if p.form is None else p.form for p in parts]
            curvature = torch.cat([b for b in blocks if isinstance(b, Tensor)])
        groupings = [p.grouping for p in parts if p.grouping is not None]
        names = [name for name in parts[0].tensors() if name != "curvature"]
        tensors: dict[str, Any] = {name: torch.cat([getattr(p, name) for p in parts]) for name in names}
        return Derivatives(
            curvature=curvature,
            gaussian=parts[0].gaussian,
            grouping=Grouping.cat(groupings, [*map(len, parts)]) if groupings else None,
            **tensors,
        )

    def to(self, device: torch.device | str) -> Derivatives:
        """Copy to another device; raises for an operator, which stays on the device of its model."""
        if callable(self.form) and torch.empty(0, device=device).device != self.output.device:
            raise ValueError(
                f"a matrix-free Hessian stays on {str(self.output.device)!r}, the device of the model that it calls. "
                "Move groups(mask), or compute the result on the other device."
            )
        tensors: dict[str, Any] = {name: t.to(device) for name, t in self.tensors().items()}
        return Derivatives(
            **{"curvature": self.form, **tensors},
            gaussian=self.gaussian.to(device, self.gradient.dtype),
            grouping=None if self.grouping is None else self.grouping.to(device),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, without those of the Gaussian and the groups; an operator is not included."""
        names = ("output", "value", "gradient", "n_calls", "value_stderr", "gradient_stderr", "relative_error")
        found = {name: t for name in names if isinstance(t := getattr(self, name), Tensor)}
        return {**found, "curvature": self.form} if isinstance(self.form, Tensor) else found


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
class _Concatenated:
    """Concatenated Hessians of different examples, each as a matrix, an operator or zero."""

    parts: Sequence[Derivatives]

    def __call__(self, rows: Tensor) -> Tensor:
        sizes = [len(p.output) for p in self.parts]
        return torch.cat([p.product(r) for p, r in zip(self.parts, rows.split(sizes), strict=True)])


class NoVariance:
    """The variances of exact numbers: zero, or infinite (unknown) if they were computed from a sampled Hessian."""

    def __init__(self, derivatives: Derivatives) -> None:
        self.derivatives = derivatives
        error = derivatives.relative_error
        self.sampled = torch.zeros_like(derivatives.output, dtype=torch.bool) if error is None else error > 0

    def _zero(self, *sizes: int) -> Variance:
        b = len(self.derivatives)
        each = torch.where(self.sampled, torch.inf, 0.0).double().reshape(b, *[1] * len(sizes))
        df = torch.full((b,), torch.inf, dtype=torch.float64, device=self.sampled.device)
        return Variance(each.expand(b, *sizes), df)

    def _stored(self, name: str) -> Variance:
        stderr = self.derivatives.error_of(name).double()
        return Variance(stderr.square(), self._zero().df)

    @property
    def _d(self) -> int:
        return self.derivatives.gradient.shape[1]

    def of_mean(self, rows: Tensor, exact: Tensor | None = None) -> Variance:
        """Variance of the mean of a quantity with one value per row, (B, …)."""
        return self._zero(*rows.shape[2:])

    def of_value(self) -> Variance:
        """Variance of the value, (B,); 0 unless it was sampled."""
        return self._stored("value")

    def of_gradient(self) -> Variance:
        """Variance of the gradient, (B, d); 0 unless it was sampled."""
        return self._stored("gradient")

    def of_entries(self) -> Variance:
        """Variance of every entry of the Hessian, (B, d, d)."""
        return self._zero(self._d, self._d)

    def of_diagonal(self) -> Variance:
        """Variance of H_ii, (B, d)."""
        return self._zero(self._d)

    def of_row(self, i: int) -> Variance:
        """Variance of H_ij for every j, (B, d)."""
        return self._zero(self._d)

    def of_bilinear(self, u: Tensor, v: Tensor) -> Variance:
        """Variance of uᵀHv, (B,)."""
        return self._zero()

    def operator_norms(self) -> tuple[Tensor, Tensor]:
        """Zero for both norms, or infinite."""
        zero = self._zero().value
        return zero, zero
