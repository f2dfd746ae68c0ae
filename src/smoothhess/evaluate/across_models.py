"""Stability of pairs over several models, such as retrainings of one network: which pairs all of them have.

The comparison of explanation methods for one model is in `compare_methods`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from smoothhess.draws.seeding import derived_seeds
from smoothhess.evaluate.check_integer import check_integer
from smoothhess.explainers.progress import Progress
from smoothhess.explainers.smooth_hess import SmoothHess
from smoothhess.model.model_call import ModelCall, is_predicted
from smoothhess.result.combine import agreed
from smoothhess.result.features import label_of
from smoothhess.result.intervals import Estimate, plus_minus
from smoothhess.result.result import Result
from smoothhess.result.select_example import batch_of_one

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

MOST_EXAMPLES, MOST_PAIRS = 4, 10  # shown by repr


class StablePair(NamedTuple):
    """A pair of features in several models."""

    i: int  # index of the first feature, i < j
    j: int
    names: tuple[str, str]
    mean: float  # mean of H_ij over models
    stderr: float  # its standard error over models
    low: float  # lower end of its 95 % interval over models
    high: float  # upper end
    spread: float  # standard deviation of H_ij between models, without the Monte-Carlo noise of each; NaN if unknown
    share: float  # share of models that have the pair among their k strongest, significant, with the sign of the mean
    effect: float  # mean times σ_i σ_j, in units of the output


@dataclass(frozen=True, eq=False, repr=False)
class ModelAgreement:
    """The pairs of several models at the same inputs; returned by `across_models`.

    Intervals are over models: they describe where the mean of further models of the same kind would be.
    """

    results: tuple[Result, ...]  # one per model
    k: int  # number of strongest pairs of each model
    q: float  # share of false discoveries among its significant pairs

    def __len__(self) -> int:
        """Number of models."""
        return len(self.results)

    @property
    def values(self) -> Tensor:
        """The unbiased Hessian of each model, (M, B, d, d) in float64."""
        return torch.stack([r.unshrunk().hessian.double() for r in self.results])

    @cached_property
    def mean(self) -> Estimate:
        """Mean over models with its standard error over models, an `Estimate` (B, d, d)."""
        values = self.values
        df = torch.full((values.shape[1],), len(self) - 1.0, dtype=torch.float64, device=values.device)
        return Estimate(values.mean(0), values.std(0) / len(self) ** 0.5, df)

    @cached_property
    def spread(self) -> Tensor:
        """Standard deviation between models, (B, d, d): that of the estimates without their Monte-Carlo variance.

        NaN where the standard error of a model is unknown, as with too few calls.
        """
        noise = torch.stack([r.stderr().double().square() for r in self.results]).mean(0)
        found = (self.values.var(0) - noise).clamp_min(0).sqrt()
        return torch.where(noise.isfinite(), found, torch.nan)

    @cached_property
    def share(self) -> Tensor:
        """Share of models with a pair among their k strongest, significant, with the sign of the mean, (B, d, d)."""
        count, sign = torch.zeros_like(self.mean.value), self.mean.value.sign()
        for result in self.results:
            for example, pairs in enumerate(result.top_pairs(self.k, q=self.q)):
                for p in pairs:
                    if p.significant and p.value * float(sign[example, p.i, p.j]) > 0:
                        count[example, p.i, p.j] += 1
        return (count + count.mT) / len(self)

    def pairs(self, k: int | None = None) -> list[list[StablePair]]:
        """The pairs of each example in the order of their share, then of their mean effect.

        Args:
            k: number of pairs; None: those that at least one model has among its strongest, significant pairs.

        Returns:
            A list of `StablePair` for each example.

        Raises:
            ValueError: if k is less than 1.
        """
        if k is not None:
            check_integer(k, "k", 1)
        first = self.results[0]
        low, high = self.mean.interval()
        i, j = torch.triu_indices(*first.shape[1:], 1)
        found = []
        for b in range(len(first)):
            label = label_of(first, None if first.names is None else first.names[b])
            scales = first.feature_scales.expand(len(first), -1)[b].to(low)
            effect = self.mean.value[b] * scales[:, None] * scales
            share = self.share[b, i, j]
            order = sorted(range(len(i)), key=lambda p: (-float(share[p]), -abs(float(effect[i[p], j[p]]))))
            chosen = [p for p in order if share[p] > 0] if k is None else order[:k]
            rows = []
            for p in chosen:
                at = int(i[p]), int(j[p])
                tables = (self.mean.value, self.mean.stderr, low, high, self.spread, self.share)
                numbers = dict(zip(StablePair._fields[3:], (float(t[b][at]) for t in tables), strict=False))
                names = label(at[0]), label(at[1])
                rows.append(StablePair(*at, names, **numbers, effect=float(effect[at])))
            found.append(rows)
        return found

    def to_frame(self, k: int | None = None) -> pd.DataFrame:
        """The pairs as a pandas DataFrame with one row per pair of each example; see `pairs`.

        Raises:
            ImportError: if pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("to_frame needs pandas: pip install pandas") from error
        columns = ["example", "i", "j", "first", "second", *StablePair._fields[3:]]
        rows = [(b, p.i, p.j, *p.names, *p[3:]) for b, pairs in enumerate(self.pairs(k)) for p in pairs]
        return pd.DataFrame(rows, columns=columns)

    def plot(self, *, example: int = 0, k: int = 10, ax: Axes | None = None) -> Axes:
        """Plot the k most stable pairs: the value in each model, and the mean with its 95 % interval over models.

        Args:
            example: index of the example.
            k: number of pairs.
            ax: Axes to draw into; a new figure if None.

        Returns:
            Matplotlib Axes.
        """
        from smoothhess.view.figures.model_agreement import model_agreement

        return model_agreement(self, example=example, k=k, ax=ax)

    def only(self, example: int) -> ModelAgreement:
        """The agreement at one example, as a batch of one."""
        return ModelAgreement(tuple(batch_of_one(r, example) for r in self.results), self.k, self.q)

    def __repr__(self) -> str:
        first = self.results[0]
        lines = [
            f"Pairs of {len(self)} models, {len(first)} example(s) × {first.shape[1]} features, {first.gaussian_text}; "
            f"share: among the {self.k} strongest of a model, q ≤ {self.q:g}, with the sign of the mean",
        ]
        table = [("example", "pair", "share of models", "mean H ± 95 % over models", "spread between models")]
        for b, pairs in enumerate(self.pairs()[:MOST_EXAMPLES]):
            for p in pairs[:MOST_PAIRS]:
                count = f"{round(p.share * len(self))} of {len(self)}"
                mean = plus_minus(p.mean, (p.high - p.low) / 2)
                table.append((f"{b:7d}", " × ".join(p.names), count, mean, f"{p.spread:.3g}"))
            if not pairs:
                table.append((f"{b:7d}", "none is significant", "", "", ""))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        rest = len(first) - MOST_EXAMPLES
        return "\n".join(lines + ([f"  … and {rest} more examples"] if rest > 0 else []))


def across_models(
    models: Sequence[Callable[..., Any]],
    inputs: Any,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    k: int = 10,
    q: float = 0.05,
    seed: int = 0,
    show_progress: bool | None = None,
    **options: Any,
) -> ModelAgreement:
    """Which pairs are stable over several models, such as retrainings of one network with other seeds.

    The intervals of one result describe the Monte-Carlo error for one network. Networks that were trained again may
    have other interactions, and the difference between them is often larger than that error.

    Args:
        models: at least two models of the same inputs and outputs.
        inputs, additional_forward_args: as in `SmoothHess.attribute`.
        target: as in `SmoothHess.attribute`; "predicted" is the class that most of the models predict for each input.
        k: number of strongest pairs of each model that are counted.
        q: accepted share of false discoveries among the significant pairs of each model.
        seed: seed of the draws, which are independent between models.
        show_progress: whether to show a progress bar; None: as in `SmoothHess.attribute`.
        **options: options of `SmoothHess.attribute`: sigma or radius or gaussian, n_calls, names, …

    Returns:
        A `ModelAgreement`; print it for a table.

    Raises:
        ValueError: if there are fewer than two models, or if k is less than 1.

    >>> nets = [torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)) for _ in range(3)]
    >>> found = across_models(nets, torch.zeros(2, 3), sigma=0.5, n_calls=64)
    >>> len(found), found.mean.value.shape, found.spread.shape
    (3, torch.Size([2, 3, 3]), torch.Size([2, 3, 3]))
    """
    models = list(models)
    if len(models) < 2:
        raise ValueError(f"across_models compares at least two models, got {len(models)}. Train another one.")
    check_integer(k, "k", 1)
    if predicted := is_predicted(target):
        rows = options.get("internal_batch_size")
        voted = [ModelCall(m, inputs, target, additional_forward_args, rows).target.cpu() for m in models]
        target = torch.stack(voted).mode(0).values
    results = []
    with Progress(show_progress, len(models), "across_models", "models") as bar:
        for m, model in enumerate(models):
            (own,) = derived_seeds((seed, m), 1)
            attribute = SmoothHess(model).attribute
            results.append(attribute(inputs, target, additional_forward_args, seed=own, show_progress=False, **options))
            bar.update()
    agreed(results, "feature shapes", lambda r: r.feature_shape)
    return ModelAgreement(tuple(replace(r, predicted=predicted) for r in results), k, q)
