"""Result: what sampled and exact results have in common, the interface that figures, pages, files and methods read.

Methods of this class are short and call the module that owns the question: `pairs`, `eigenpairs`, `features`, `files`,
`export`, `smoothhess.view`. Sampled results are in `interactions`, results without draws in `exact`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from smoothhess.draws.gaussian import Gaussian
from smoothhess.estimate.grouping import Grouping
from smoothhess.estimate.hessian_estimate import HessianEstimate
from smoothhess.estimate.statistics import ESTIMATOR_VERSION
from smoothhess.estimate.variance import Variance, Variances
from smoothhess.model.convert_inputs import as_array
from smoothhess.model.input_parts import InputPart, grouped_parts, join_values
from smoothhess.result import eigenpairs, export, features, files, text
from smoothhess.result.derivatives import Derivatives
from smoothhess.result.effect_sizes import with_sizes
from smoothhess.result.eigenpairs import Eigenpairs
from smoothhess.result.intervals import Estimate
from smoothhess.result.pairs import (
    Columns,
    Entries,
    TopPairs,
    note_on_errors,
    strongest_pairs,
    with_effective_draws,
)
from smoothhess.result.segments import group_names
from smoothhess.result.shown_estimate import errors_text, shown_error

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator


@dataclass(frozen=True, eq=False, repr=False)
class Result(ABC):
    """Gradient and pairwise interactions of B examples."""

    inputs: Tensor  # (B, *shape)
    target: Tensor | None  # (B, q) indices into the model's output
    n_passes: Tensor  # (B,) total work in units of a gradient call
    status: tuple[str, ...]  # why sampling stopped, per example
    _: KW_ONLY
    control: str | None = None  # the control variate that was applied
    control_note: str = ""  # why no control variate was applied
    unbiased: bool = True  # whether the estimate behind stderr(), pairs and intervals is unbiased
    precision: str = "float32"  # precision in which the model was evaluated
    precision_error: Tensor | None = None  # (B,) relative error of gradient changes in that precision, an upper limit
    estimator_version: int = ESTIMATOR_VERSION  # version of the formulas
    names: tuple[tuple[str, ...], ...] | None = None  # names of the features of each example: columns or tokens
    classes: tuple[str, ...] | None = None  # names of the model's outputs, by target
    unit: str = ""  # unit of the output
    predicted: bool = False  # whether the target of each example is the class that the model predicts
    feature_kind: str = ""  # "token" or "patch": the positions of an input; "" for the numbers of other inputs
    input_parts: tuple[InputPart, ...] | None = None  # the inputs whose features are concatenated, if there are several

    @property
    @abstractmethod
    def source(self) -> HessianEstimate | Derivatives:
        """The numbers that this result is read from; for modules of this package."""

    # --- shape and settings ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def gaussian(self) -> Gaussian:
        """The Gaussian of the noise; for an exact result the typical change of each feature."""
        return self.source.gaussian

    @property
    def grouping(self) -> Grouping | None:
        """The groups, if the features of this result are groups."""
        return self.source.grouping

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """Shape of the features of one example: the shape of an input, or (K,) for K groups."""
        return tuple(self.inputs.shape[1:]) if self.grouping is None else (self.grouping.count,)

    @property
    def feature_parts(self) -> tuple[InputPart, ...] | None:
        """The features, or groups, of each of several inputs; None for one input, or if a group is part of two."""
        if self.input_parts is None or self.grouping is None:
            return self.input_parts
        return grouped_parts(self.input_parts, self.grouping.mask)

    @property
    def target_names(self) -> tuple[str, ...]:
        """The target of each example in words: the name of its class, or its index; "" without a target."""
        return features.target_names(self)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of `hessian`, (B, d, d)."""
        d = torch.Size(self.feature_shape).numel()
        return len(self), d, d

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the inputs."""
        return self.inputs.dtype

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.inputs.device

    @property
    @abstractmethod
    def design(self) -> str:
        """Name of the design of the draws: "orthogonal", "sobol", "antithetic" or "iid"; "exact" without draws."""

    @property
    @abstractmethod
    def seed(self) -> int | tuple[int, ...]:
        """The seed, or one per example."""

    @property
    @abstractmethod
    def n_calls(self) -> Tensor:
        """Number of gradients of the model at perturbed inputs, per example, (B,)."""

    @property
    def converged(self) -> Tensor:
        """False where sampling stopped before the tolerance was reached, or with an unknown error, (B,)."""
        return torch.tensor([s not in ("budget", "interrupted", "unknown") for s in self.status], device=self.device)

    @property
    def feature_scales(self) -> Tensor:
        """The size of a usual move of each feature or group, (1 or B, d)."""
        if self.grouping is not None:
            return self.grouping.scales
        return self.gaussian.scales(self.shape[1]).double()[None]

    @property
    def gaussian_text(self) -> str:
        """Kind and standard deviations of the Gaussian as text."""
        return text.describe_gaussian(self.gaussian, self.inputs[0].numel())

    # --- value, gradient and Hessian ------------------------------------------------------------------------------

    @property
    def output(self) -> Tensor:
        """f(x), (B,)."""
        return self.source.output

    @property
    def value(self) -> Tensor:
        """Estimate of the smoothed function h(x) = E f(x + δ), (B,)."""
        return self.source.value

    @property
    def value_stderr(self) -> Tensor:
        """Standard error of `value`, (B,)."""
        return self.value_estimate().stderr

    def value_estimate(self) -> Estimate:
        """`value` with its standard error and degrees of freedom, an `Estimate` (B,)."""
        return self._estimate(self.value, self.noise.of_value())

    @property
    def gradient(self) -> Tensor:
        """SmoothGrad, ∇h(x), (B, *feature shape)."""
        return self.source.gradient.reshape(len(self), *self.feature_shape)

    @cached_property
    def gradient_stderr(self) -> Tensor:
        """Standard error of `gradient`, (B, *feature shape)."""
        return self.gradient_estimate().stderr

    def gradient_estimate(self) -> Estimate:
        """`gradient` with its standard errors and degrees of freedom, an `Estimate` (B, *feature shape).

        >>> from smoothhess import SmoothHess
        >>> f = lambda x: x.prod(1)
        >>> result = SmoothHess(f).attribute(torch.ones(1, 3).double(), sigma=0.5, n_calls=600)
        >>> low, high = result.gradient_estimate().interval()
        >>> bool(((low < 1) & (1 < high)).all())
        True
        """
        return self._estimate(self.gradient, self.noise.of_gradient())

    @property
    def hessian(self) -> Tensor:
        """SmoothHess, ∇²h(x), dense and symmetric, (B, d, d); denoised where `shrink` is True."""
        return self.source.hessian

    @property
    def noise(self) -> Variances:
        """Variances of everything that is read off this result; for modules of this package."""
        return self.source.noise

    def stderr(self) -> Tensor:
        """Standard error of each entry of the unbiased estimate, (B, d, d).

        Raises:
            ValueError: if there are too many features for a dense matrix.
        """
        self.refuse_dense()
        return self.noise.of_entries().value.sqrt().to(self.dtype)

    @property
    @abstractmethod
    def shrink(self) -> bool:
        """Whether `hessian`, `@`, `eigh`, `taylor` and `relative_error` use the denoised estimate."""

    @abstractmethod
    def unshrunk(self) -> Self:
        """The same result with the unbiased estimate for all quantities."""

    @property
    @abstractmethod
    def relative_error(self) -> Tensor:
        """Estimated ‖Ĥ − H‖_F / ‖H‖_F of `hessian`, (B,)."""

    @property
    @abstractmethod
    def r2(self) -> Tensor:
        """Share of the gradient's variation in the neighbourhood that pairwise interactions explain, (B,)."""

    @property
    @abstractmethod
    def stein_z(self) -> Tensor:
        """z-scores of the check that the gradients are the derivatives of the values, (B, 2)."""

    # --- interactions: products, entries, eigenpairs, groups, pairs -----------------------------------------------

    def __matmul__(self, v: Tensor) -> Tensor:
        """The product H v, computed without H.

        Args:
            v: (B, *features), (*features), flat (B, d) or (d,), or columns (B, d, n) or (d, n). The first of these
                shapes that fits is taken.

        Returns:
            H v, with the shape of v and a batch dimension in front.

        Raises:
            ValueError: if v has none of these shapes.
        """
        return features.matrix_product(self, v)

    def product(self, rows: Tensor) -> Tensor:
        """H applied to each row of (B, n, d).

        Args:
            rows: (B, n, d). Unlike `@`, no other shape is accepted.

        Returns:
            (B, n, d).

        Raises:
            ValueError: if `rows` has another shape.
        """
        return self.source.product(features.check_rows(self, rows))

    def row(self, i: int | str | tuple[int, ...]) -> Estimate:
        """Interactions of feature i with every feature.

        Args:
            i: flat index of the feature, one index per dimension of `feature_shape`, or its name.

        Returns:
            An `Estimate` of H_ij for all j, (B, *feature shape).

        Raises:
            ValueError: if there is no feature i, or if a name is not that of one feature of all examples.
        """
        index = self.flat_index(i)
        value = self.source.unbiased.product(features.unit_rows(self, index))
        return self._estimate(value.reshape(len(self), *self.feature_shape), self.noise.of_row(index))

    def diagonal(self) -> Estimate:
        """The interaction H_ii of each feature with itself, an `Estimate` (B, *feature shape)."""
        value = self.source.unbiased.diagonal().to(self.dtype)
        return self._estimate(value.reshape(len(self), *self.feature_shape), self.noise.of_diagonal())

    def between(self, a: int | str, b: int | str) -> Estimate:
        """Interactions of the features of two inputs of a model with several inputs.

        Args:
            a: position of the first input in the tuple that was explained, or its name in the dictionary.
            b: that of the second input.

        Returns:
            An `Estimate` of H_ij for the features i of `a` and j of `b`, (B, *shape of a, *shape of b); their groups
            for a result of groups.

        Raises:
            ValueError: if there is no such input, if a group contains features of two inputs, or if there are too many
                features for a dense matrix.

        >>> from smoothhess import SmoothHess
        >>> f = lambda a, b: 2 * a[:, 0] * b[:, 1] + a[:, 1] * b[:, 0] + b.prod(1)
        >>> result = SmoothHess(f).attribute((torch.ones(1, 3), torch.ones(1, 2)), sigma=0.5, n_calls=10)
        >>> result.between(0, 1).value.round(decimals=3).abs()
        tensor([[[0., 2.],
                 [1., 0.],
                 [0., 0.]]])
        """
        first, second = (features.find_part(self, name) for name in (a, b))
        entries = self._entries()
        where = (slice(None), first.features, second.features)
        value = entries.hessian[where].reshape(len(self), *first.shape, *second.shape).to(self.dtype)
        return self._estimate(value, Variance(entries.variance.value[where], entries.variance.df))

    def bilinear(self, u: Tensor, v: Tensor) -> Estimate:
        """uᵀHv, the second derivative of h along the directions u and v.

        u and v must not depend on the draws of this result. Along an eigenvector of the same estimate the value is that
        of the largest noise, and its interval is too narrow: use `eigh(k).interval()`, or take the direction from a
        result with another seed.

        Args:
            u: direction with the shape of one example's features, or of the batch.
            v: likewise.

        Returns:
            An `Estimate` (B,).

        Raises:
            ValueError: if a direction has another shape.
        """
        u, v = features.directions(self, u), features.directions(self, v)
        value = (u * self.source.unbiased.product(v[:, None])[:, 0]).sum(-1)
        return self._estimate(value, self.noise.of_bilinear(u, v))

    def _estimate(self, value: Tensor, variance: Variance) -> Estimate:
        """Return a value with its standard error and degrees of freedom."""
        return Estimate(value, variance.value.sqrt().to(self.dtype).reshape(value.shape), variance.df)

    @abstractmethod
    def eigh(self, k: int | None = None) -> Eigenpairs:
        """The k eigenpairs of H with the largest |λ|.

        Args:
            k: number of eigenpairs; 8 if None, or d if that is less.

        Returns:
            `Eigenpairs`: eigenvalues (B, k) and eigenvectors (B, k, *feature shape), which can be unpacked; fewer than
            k if the estimate has lower rank. Its `stderr` and `interval(level)` are those of the true eigenvalues,
            corrected for the choice of the directions, from two blocks of draws on.

        Raises:
            ValueError: if k is not between 1 and d.
        """

    def eigh_residuals(self, pairs: Eigenpairs) -> Tensor:
        """Residuals |Hv − λv| of eigenpairs from `eigh`, relative to the largest |λ|.

        They measure the accuracy of the eigensolver. The standard error of an eigenvalue is `pairs.stderr`.

        Args:
            pairs: eigenpairs from `eigh`.

        Returns:
            (B, k).
        """
        return eigenpairs.residuals(self.source.product, pairs)

    def groups(self, feature_mask: Tensor, direction: Tensor | None = None) -> Self:
        """Interactions of groups of features: entry (I, J) sums H_ij over i ∈ I, j ∈ J.

        A diagonal entry sums all ordered pairs inside the group, H_ii included. No d × d matrix is made.

        Args:
            feature_mask: integer group ids with the shape of one input, or of the batch; a tuple or dictionary with a
                mask for each of several inputs.
            direction: weights v of the features, so that each term is v_i H_ij v_j. With v = x − baseline an entry is
                the effect of removing both groups beyond the sum of the effects of removing each.

        Returns:
            A result whose features are the groups; their names are those of the mask, if it is a `Segments`.

        Raises:
            TypeError: if `feature_mask` does not hold integers.
            ValueError: if an id is negative, or a shape does not fit the inputs.
        """
        shape = (len(self), *self.feature_shape)
        if self.feature_parts is not None:
            feature_mask = join_values(feature_mask, self.feature_parts, "feature_mask")
            direction = join_values(direction, self.feature_parts, "direction")
        found = self.grouped(Grouping.make(feature_mask, direction, shape, self.feature_scales[0], self.inputs))
        names = group_names(feature_mask)
        return found if names is None else replace(found, names=(names,) * len(self))

    @abstractmethod
    def grouped(self, grouping: Grouping) -> Self:
        """As `groups`, for a `Grouping` that was validated before."""

    def top_pairs(
        self,
        k: int = 10,
        names: Sequence[str] | None = None,
        *,
        q: float = 0.05,
        level: float = 0.95,
        scales: Tensor | None = None,
        selection: Literal["all", "split"] = "all",
        between: tuple[int | str, int | str] | None = None,
    ) -> TopPairs:
        """The k strongest pairs of each example, by |H_ij| σ_i σ_j, with confidence intervals and sizes.

        Values, their order, intervals and sizes are those of the unbiased estimate. `hessian` decides which pairs are
        listed: if it is denoised, the choice depends less on the noise (docs/certainty.md).

        The same draws choose and measure the pairs, so the values of chosen pairs are too large on average (winner's
        curse). This matters where the errors are as large as the differences between pairs; docs/benchmarks/coverage.md
        has the coverage. selection="split" ranks the pairs on one half of the draws and takes values, intervals and
        q-values from the other half: the intervals, about √2 times as wide, then hold for the chosen pairs.

        Args:
            k: number of pairs.
            names: one name per feature; None takes the names of the result, or the index of the feature.
            q: accepted share of false discoveries among the significant pairs (Benjamini–Hochberg over all pairs).
            level: probability of the confidence intervals.
            scales: typical change of each feature, which replaces the σ_i of the Gaussian; (d,).
            selection: "all" to choose pairs with all draws, "split" to choose them with one half and to measure them
                with the other. Without sampling error both are the same.
            between: two inputs of a model with several inputs, as in the method `between`: only pairs of a feature of
                one with a feature of the other are ranked and counted.

        Returns:
            A list of `Pair` for each example, strongest first; it prints as a table and has `to_frame()`. The sizes
            `separate_share`, `output_share` and `size` are defined in docs/certainty.md.

        Raises:
            ValueError: if k, q, level or selection is out of range, if the number of names or scales is not d, if there
                are too many features for a dense matrix, or if selection="split" and an example has fewer than two
                independent blocks of draws, or was merged from runs with control variates.
        """
        if selection not in ("all", "split"):
            raise ValueError(f'selection must be "all" or "split", got {selection!r}.')
        given = [names] * len(self) if names is not None or self.names is None else self.names
        labels = iter([features.label_of(self, n) for n in given])
        found = self.strongest_pairs_of(k, q, level, scales, selection == "split", between)
        pairs = [pairs for part in found for pairs in part.named(labels)]
        if isinstance(self.source, HessianEstimate):
            pairs = with_effective_draws(pairs, self.source.features)
        moves = None if scales is None else torch.as_tensor(as_array(scales), dtype=torch.float64)
        sampled = isinstance(self.source, HessianEstimate)
        error = errors_text(shown_error(self)) if sampled else ""
        note = note_on_errors(pairs, shown_error(self).tolist(), level) if sampled else ""
        return TopPairs(with_sizes(pairs, self, moves), level, self.unit, error, note)

    def strongest_pairs_of(
        self,
        k: int,
        q: float = 0.05,
        level: float = 0.95,
        scales: Tensor | None = None,
        split: bool = False,
        between: tuple[int | str, int | str] | None = None,
    ) -> list[Columns]:
        """The strongest pairs as tensors; for modules of this package."""
        self.refuse_dense()
        given = self.feature_scales
        if scales is not None:
            given = torch.as_tensor(as_array(scales), dtype=torch.float64).reshape(1, -1)
        entries = self.split_entries() if split else self._entries()
        allowed = None if between is None else features.pairs_between(self, *between)
        return strongest_pairs(entries, given.expand(len(self), -1), k, q, level, allowed)

    def _entries(self) -> Entries:
        return Entries(self.source.unbiased.dense(), self.noise.of_entries(), self.hessian)

    def split_entries(self) -> Entries:
        """Entries for pairs that are chosen and measured with different draws; for modules of this package."""
        return self._entries()  # there are no draws

    # --- selection and concatenation of examples ------------------------------------------------------------------

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> Self:
        """The examples at an index, a slice or several indices; a single example is a batch of one.

        Raises:
            IndexError: if there is no such example.
        """
        return self.select(features.example_indices(index, len(self)))

    @abstractmethod
    def select(self, chosen: Tensor) -> Self:
        """The examples at indices on the CPU, in that order; for modules of this package."""

    def __iter__(self) -> Iterator[Self]:
        return (self[i] for i in range(len(self)))

    @staticmethod
    def cat(results: Sequence[Any]) -> Any:
        """Concatenate results of different examples.

        Args:
            results: results that agree in everything but examples and draws.

        Returns:
            One result of all examples, in the given order.

        Raises:
            ValueError: if there is no result, or if two results differ in their settings.
        """
        if not results:
            raise ValueError("cat needs at least one result, got none.")
        return results[0].concatenated(results)

    @abstractmethod
    def concatenated(self, results: Sequence[Result]) -> Self:
        """All of `results`, of which this is the first, as one; for modules of this package."""

    @abstractmethod
    def to(self, device: torch.device | str) -> Self:
        """The same result on another device."""

    # --- files, other packages, figures and text ------------------------------------------------------------------

    @staticmethod
    def load(path: str | Path) -> Any:
        """Read a result that `save` has written.

        Args:
            path: file to read.

        Returns:
            The result, on the CPU; the numbers are exactly those that were saved.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if the file is damaged, or is not a smoothhess result of a readable version.
        """
        return files.load(path)

    def to_frame(self, names: Sequence[str] | None = None, **options: Any) -> Any:
        """A pandas DataFrame with one row for each pair of each example; see smoothhess.result.export.to_frame."""
        return export.to_frame(self, names, **options)

    def to_shapiq(self, example: int = 0, **options: Any) -> Any:
        """One example as shapiq.InteractionValues of order ≤ 2; see smoothhess.result.export.to_shapiq."""
        return export.to_shapiq(self, example, **options)

    def to_scipy(self) -> LinearOperator:
        """H of a single example as a scipy LinearOperator, for example for scipy.sparse.linalg.eigsh.

        Raises:
            ValueError: if this result has several examples.
        """
        return export.to_scipy(self)

    def plot(self, kind: str = "heatmap", **options: Any) -> Any:
        """Plot one example with Matplotlib.

        Args:
            kind: "heatmap", "pairs", "graph" and "image" show which features act together; "segment" the interactions
                of one segment of an image; "series" a curve, its SmoothGrad by interval and its interactions;
                "text" the tokens of a text; "gradient" and "diagonal" single features; "eigen" the directions of
                largest curvature.
            **options: `example`, `ax`, and the options of the kind, see smoothhess.view.

        Returns:
            Matplotlib Axes. The figure is not registered with pyplot: `ax.figure` displays it in a notebook,
            `ax.figure.savefig(path)` saves it.
        """
        from smoothhess import view

        return view.plot(self, kind, **options)

    def report(self, path: str | Path, **options: Any) -> Path:
        """Write a self-contained interactive HTML page.

        Args:
            path: file to write.
            **options: options of smoothhess.view.report.report.

        Returns:
            The path of the file.
        """
        from smoothhess.view.report import report

        return report(self, path, **options)

    def show(self, **options: Any) -> None:
        """Display a summary in a notebook: the answer in words, the input and the strongest pairs; print in a terminal.

        Args:
            **options: `names` and `pairs`, see smoothhess.view.report.show.
        """
        from smoothhess.view.report import show

        show(self, **options)

    def _repr_html_(self) -> str:
        from smoothhess.view.report import html

        return html(self)

    @abstractmethod
    def refuse_dense(self) -> None:
        """Raise if there are too many features for a dense matrix."""

    def flat_index(self, i: int | str | tuple[int, ...]) -> int:
        """Return the position of a feature, given by a number, an index into the input or its name."""
        return features.flat_index(i, self.feature_shape, self.names)
