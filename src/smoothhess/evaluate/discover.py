"""Pairs of features that interact in the data: a network on features and knockoffs, and a count of false discoveries.

A network is trained on the features and on a knockoff of each of them, which has the same distribution and no relation
to the response. Interactions in which a knockoff takes part are errors of the network, so they estimate how many of the
interactions between features are. The idea is that of Diamond (Chen, Jiang, Noble & Lu, Nature Machine Intelligence
2025), which subtracts what a regression on the effects of single features predicts; here the importance is that of
SmoothHess, which ReLU networks have too, and the regression is one of the median, which interactions do not change.
Knockoffs are drawn in `gaussian_knockoffs`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from smoothhess import baselines
from smoothhess.evaluate.gaussian_knockoffs import GaussianKnockoffs, as_table
from smoothhess.evaluate.global_interactions import global_interactions
from smoothhess.explainers.smooth_hess import SmoothHess
from smoothhess.model.convert_inputs import as_array, column_names

if TYPE_CHECKING:
    import pandas as pd

MOST_PAIRS = 10  # shown by repr
TINY = 1e-12  # relative to the largest importance; smaller ones count as this

Importance = Callable[[Any, Tensor], tuple[Tensor, Tensor]]  # model, inputs → (F, F) of pairs, (F, k) of features


class Discovery(NamedTuple):
    """A pair of features of `Discoveries`."""

    i: int  # index of the first feature, i < j
    j: int
    names: tuple[str, str]
    importance: float  # mean |H_ij| over records, in units of the output per standard deviation of both
    score: float  # importance over its median for pairs of columns with the same effects
    q_value: float  # smallest q at which the pair is discovered
    discovered: bool  # whether q_value is at most the q that was asked for


@dataclass(frozen=True, eq=False, repr=False)
class Discoveries:
    """Importance and calibrated scores of all pairs of p features and p knockoffs; returned by `discover`."""

    importance: Tensor  # (2p, 2p) of pairs; features first, then their knockoffs
    effects: Tensor  # (2p, k) effects of single features by which the importance is calibrated
    scores: Tensor  # (2p, 2p) calibrated importance
    coefficients: Tensor  # (1 + 2k,) of the calibration
    q: float
    names: tuple[str, ...]  # p names
    model: Any  # what the factory returned

    def __len__(self) -> int:
        """Number of discovered pairs."""
        return sum(p.discovered for p in self.pairs())

    @cached_property
    def q_values(self) -> Tensor:
        """The smallest q at which each pair of features is discovered, (p, p); 1 on the diagonal."""
        return knockoff_q_values(self.scores)

    def pairs(self, k: int | None = None) -> list[Discovery]:
        """The k pairs of features with the largest scores; None: all."""
        p = len(self.names)
        i, j = torch.triu_indices(p, p, 1)
        order = self.scores[i, j].argsort(descending=True, stable=True)[:k].tolist()
        found = []
        for n in order:
            a, b = int(i[n]), int(j[n])
            q_value = float(self.q_values[a, b])
            numbers = float(self.importance[a, b]), float(self.scores[a, b])
            found.append(Discovery(a, b, (self.names[a], self.names[b]), *numbers, q_value, q_value <= self.q))
        return found

    def to_frame(self, k: int | None = None) -> pd.DataFrame:
        """The pairs as a pandas DataFrame; see `pairs`.

        Raises:
            ImportError: if pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("to_frame needs pandas: pip install pandas") from error
        rows = [(p.i, p.j, *p.names, *p[3:]) for p in self.pairs(k)]
        return pd.DataFrame(rows, columns=["i", "j", "first", "second", *Discovery._fields[3:]])

    def __repr__(self) -> str:
        p = len(self.names)
        lines = [f"Pairs of {p} features, {len(self)} discovered at a false-discovery rate of {self.q:g}"]
        table = [("pair", "importance", "score", "q", "")]
        for pair in self.pairs(MOST_PAIRS):
            mark = "discovered" if pair.discovered else ""
            numbers = (f"{pair.importance:.3g}", f"{pair.score:.3g}", f"{pair.q_value:.2g}")
            table.append((" × ".join(pair.names), *numbers, mark))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        rest = p * (p - 1) // 2 - MOST_PAIRS
        return "\n".join(lines + ([f"  … and {rest} more pairs"] if rest > 0 else []))


def discover(
    model_factory: Callable[[Tensor, Tensor], Any],
    data: Any,
    response: Any,
    *,
    q: float = 0.2,
    sigma: float | None = None,
    importance: Importance | None = None,
    knockoffs: Any = None,
    n_records: int = 200,
    names: Sequence[str] | None = None,
    seed: int = 0,
    **options: Any,
) -> Discoveries:
    """Which pairs of features interact in the data, with an estimated share q of false discoveries.

    1. Columns are standardised, and a knockoff of each is drawn.
    2. `model_factory` trains a network on the 2p columns.
    3. Γ_ij is the mean of |H_ij| over records, for all pairs of columns.
    4. Γ is calibrated: the score is Γ_ij over its median for pairs whose columns have the same effects, the mean
       |∂f/∂x_i| and the mean |H_ii|, by a median regression of log Γ on the logarithms of these.
    5. For every threshold t, with OO, OK and KK the numbers of pairs with a score of at least t of two features, of a
       feature and the knockoff of another, and of two knockoffs, (1 + max(OK − KK, KK)) / OO estimates the share of
       false discoveries. The smallest t with an estimate of at most q is taken.

    The estimate assumes that the knockoffs are valid, that training treats all columns alike, and that the calibrated
    scores of two features that do not interact exceed t no more often than 2 P(OK pair ≥ t) − P(KK pair ≥ t). The last
    assumption cannot be derived: it is measured in the benchmarks. At least 1/q pairs must be discovered for any to be.

    Args:
        model_factory: a function of inputs (n, 2p) float32 and responses (n, …) that returns a trained model of such
            inputs with one output, or one for each target. Called once.
        data: (n, p) tensor, array or DataFrame.
        response: (n, …) tensor, array or column; passed on to `model_factory`.
        q: accepted false-discovery rate, between 0 and 1.
        sigma: standard deviation of the Gaussian of SmoothHess, in standard deviations of the features. Needed unless
            `importance` is given.
        importance: a function of the model and inputs (n_records, 2p) that returns the importance of pairs (2p, 2p) and
            effects of single features (2p, k), instead of SmoothHess and of the effects above.
        knockoffs: knockoffs (n, p) of the data, or a fitted `GaussianKnockoffs`; None fits a Gaussian copula.
        n_records: records over which the importance is averaged.
        names: names of the features; None: the columns of a DataFrame, else their numbers.
        seed: seed of the knockoffs, of the choice of records and of SmoothHess.
        options: passed on to `global_interactions`: target, n_calls, internal_batch_size, …

    Returns:
        `Discoveries`; print it for a table.

    Raises:
        ValueError: if data, response, knockoffs or names do not fit each other, if an argument is out of range, if the
            response is not finite, or if there are fewer than 1/q pairs of columns.

    >>> x = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))
    >>> fit = lambda inputs, y: lambda v: v[:, 0] * v[:, 1] + (v @ torch.linspace(0.1, 0.2, 16)).relu()
    >>> found = discover(fit, x, x[:, 0] * x[:, 1], sigma=0.5, n_records=50)
    >>> found.pairs(1)[0].names
    ('0', '1')
    """
    if not 0 < q < 1:
        raise ValueError(f"q must be between 0 and 1, got {q!r}.")
    if (sigma is None) == (importance is None):
        raise ValueError("pass exactly one of sigma and importance.")
    x = as_table(data)
    p = x.shape[1]
    if p < 2:
        raise ValueError("data must have at least two columns: pairs of features are discovered.")
    if (pairs := p * (p - 1) // 2) < 1 / q:
        raise ValueError(
            f"at least 1/q = {1 / q:g} pairs must be discovered for any to be, and {p} columns have {pairs}. Pass a "
            "larger q or more columns."
        )
    y = torch.as_tensor(as_array(response))
    if len(y) != len(x):
        raise ValueError(f"expected one response per row, {len(x)}, got {len(y)}.")
    if not bool(torch.isfinite(y).all()):
        raise ValueError("response must hold finite numbers, got NaN or infinity. Drop these rows.")
    labels = tuple(map(str, names if names is not None else column_names(data) or range(p)))
    if len(labels) != p:
        raise ValueError(f"expected one name per column, {p}, got {len(labels)}.")
    copies = _knockoffs(x, knockoffs, seed)
    centre, spread = x.mean(0), x.std(0)
    inputs = torch.cat([(x - centre) / spread, (copies - centre) / spread], 1).float()  # (n, 2p)
    model = model_factory(inputs, y)
    generator = torch.Generator().manual_seed(seed)
    records = inputs[torch.randperm(len(inputs), generator=generator)[:n_records]]
    if importance is None:
        found, effects = _smooth_importance(model, records, sigma, seed, options)
    else:
        found, effects = importance(model, records)
    found, effects = found.detach().double().cpu(), effects.detach().double().cpu()
    scores, coefficients = calibrated(found, effects)
    return Discoveries(found, effects, scores, coefficients, q, labels, model)


def _smooth_importance(
    model: Any, records: Tensor, sigma: Any, seed: int, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Mean |H| of pairs by SmoothHess; mean |∂f/∂x_i| and mean |H_ii| of single features."""
    summary = global_interactions(SmoothHess(model), records, sigma=sigma, seed=seed, **options)
    size = summary.mean_abs.value.clamp_min(0)
    slope = baselines.gradient(model, records, options.get("target")).gradient.abs().mean(0)
    return size, torch.stack([slope.to(size), size.diagonal()], 1)


def _knockoffs(x: Tensor, given: Any, seed: int) -> Tensor:
    if given is None:
        given = GaussianKnockoffs.fit(x)
    copies = given.sample(x, seed) if isinstance(given, GaussianKnockoffs) else as_table(given)
    if copies.shape != x.shape:
        raise ValueError(f"knockoffs must have the shape of the data, {tuple(x.shape)}, got {tuple(copies.shape)}.")
    return copies


# --- calibration and counts -------------------------------------------------------------------------------------------


def pair_kinds(p: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of two features, of a feature and the knockoff of another, and of two knockoffs, each (2, pairs)."""
    i, j = torch.triu_indices(2 * p, 2 * p, 1)
    mixed = (i < p) & (j >= p) & (j - p != i)  # a feature and its own knockoff replace each other
    return tuple(torch.stack([i[kind], j[kind]]) for kind in (j < p, mixed, i >= p))  # type: ignore[return-value]


def calibrated(importance: Tensor, effects: Tensor) -> tuple[Tensor, Tensor]:
    """Importance over its median for pairs with the same effects, and the coefficients of that median.

    The median of log Γ_ij is a + Σ_k b_k (u_ik + u_jk) + c_k u_ik u_jk with the standardised u_ik = log e_ik, fitted by
    least absolute deviations to all pairs but those of a feature and its own knockoff. Pairs that interact are
    outliers of this regression: fewer than half of the pairs of features with large effects may interact.

    Args:
        importance: (2p, 2p), not negative.
        effects: (2p, k), not negative.

    Returns:
        Scores (2p, 2p), and coefficients (1 + 2k,).
    """
    pairs = torch.cat(pair_kinds(len(importance) // 2), 1)
    u = effects.clamp_min(_least(effects)).log()
    u = (u - u.mean(0)) / u.std(0).clamp_min(TINY)
    sums, products = u[:, None] + u, u[:, None] * u  # (2p, 2p, k)
    design = torch.cat([torch.ones_like(sums[..., :1]), sums, products], 2)
    size = importance.clamp_min(_least(importance)).log()
    coefficients = _least_absolute_deviations(design[pairs[0], pairs[1]], size[pairs[0], pairs[1]])
    return (size - design @ coefficients).exp(), coefficients


def _least(sizes: Tensor) -> float:
    """The size from which sizes are told apart; positive, also for a model without interactions."""
    return max(TINY * float(sizes.max()), torch.finfo(torch.float64).tiny)


def _least_absolute_deviations(rows: Tensor, values: Tensor) -> Tensor:
    """Coefficients c with the smallest Σ |value − row @ c|, by linear programming."""
    from scipy.optimize import linprog

    n, k = rows.shape
    equal = torch.cat([rows, torch.eye(n), -torch.eye(n)], 1).double().numpy()  # row @ c + over − under = value
    cost = [0.0] * k + [1.0] * (2 * n)
    bounds = [(None, None)] * k + [(0, None)] * (2 * n)
    found = linprog(cost, A_eq=equal, b_eq=values.numpy(), bounds=bounds, method="highs")
    return torch.from_numpy(found.x[:k])


def knockoff_q_values(scores: Tensor) -> Tensor:
    """q-values of the pairs of features, (p, p), from the scores of all pairs of features and knockoffs, (2p, 2p).

    The q-value is the smallest estimated share of false discoveries (1 + max(OK − KK, KK)) / OO over the thresholds at
    which the pair is discovered, at most 1.

    >>> scores = torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) + torch.zeros(8, 8).fill_diagonal_(1.0)
    >>> scores[:4, :4] += 10
    >>> knockoff_q_values(scores)[0, 1]  # six pairs of features above all others
    tensor(0.1667, dtype=torch.float64)
    """
    p = len(scores) // 2
    kinds = pair_kinds(p)
    features, mixed, copies = (scores[kind[0], kind[1]].double() for kind in kinds)
    thresholds = features.sort(descending=True).values  # (m,)

    def above(values: Tensor) -> Tensor:
        ordered = values.sort().values
        return (len(ordered) - torch.searchsorted(ordered, thresholds)).double()

    oo, ok, kk = above(features), above(mixed), above(copies)
    share = (1 + torch.maximum(ok - kk, kk)) / oo
    least = share.clamp_max(1).flip(0).cummin(0).values.flip(0)  # over thresholds up to each
    q = torch.ones(p, p, dtype=torch.float64)
    i, j = kinds[0]
    order = features.argsort(descending=True)
    q[i[order], j[order]] = least
    return torch.minimum(q, q.mT)
