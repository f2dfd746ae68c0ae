"""Conversion of results for other packages: a pandas DataFrame of pairs, and shapiq's InteractionValues.

Conversions that need an optional package belong here. The file format of the library is in `files`, figures and reports
are in `smoothhess.view`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from smoothhess.result.select_example import batch_of_one

if TYPE_CHECKING:
    import pandas as pd
    import shapiq
    from scipy.sparse.linalg import LinearOperator

Result = Any  # an Interactions: its methods call these functions

__all__ = ["to_frame", "to_scipy", "to_shapiq"]

MOST_PLAYERS = 1000  # shapiq keeps a Python object for each pair


def to_frame(
    result: Result,
    names: Sequence[str] | None = None,
    *,
    k: int | None = None,
    q: float = 0.05,
    level: float = 0.95,
    scales: Tensor | None = None,
) -> pd.DataFrame:
    """A pandas table with one row per pair of each example, strongest first.

    Columns: `example`, the numbers `i` < `j` and names `first`, `second` of the features, `value` (H_ij) with `stderr`
    and the interval `low` … `high`, `effect` (H_ij σ_i σ_j, in units of the output), `q_value`, `significant`, `n_eff`,
    `tail_index`, and the sizes `separate_share` with `separate_share_stderr`, `output_share` and `size`. They are those
    of `Interactions.top_pairs`.

    Args:
        result: an `Interactions`.
        names, q, level, scales: as in `Interactions.top_pairs`.
        k: number of pairs per example, the strongest ones; all if None.

    Returns:
        A pandas DataFrame.

    Raises:
        ImportError: if pandas is not installed.

    >>> import smoothhess as sh
    >>> result = sh.SmoothHess(lambda x: x[:, 0] * x[:, 1]).attribute(torch.zeros(1, 3), sigma=0.5, n_calls=400)
    >>> to_frame(result, ["age", "dose", "height"])[["first", "second", "significant"]].iloc[0].tolist()
    ['age', 'dose', True]
    """
    d = result.shape[1]
    most = max(1, d * (d - 1) // 2) if k is None else k
    return result.top_pairs(most, names, q=q, level=level, scales=scales).to_frame()


def to_shapiq(result: Result, example: int = 0, *, move: Any = None) -> shapiq.InteractionValues:
    """One example as shapiq.InteractionValues of order ≤ 2, for shapiq's plots.

    The numbers describe a cooperative game: its players are the features (or groups), and a coalition S moves each of
    its members i by m_i while the other features keep their values. The value of S is that of the surrogate,
    v(S) = f(x) + Σ_S G_i m_i + ½ Σ_S Σ_S H_ij m_i m_j with SmoothGrad G and SmoothHess H. The interactions are the
    Möbius transform of v, which is exact and has no terms beyond pairs:

        order 0:  f(x)
        order 1:  G_i m_i + ½ H_ii m_i²     effect of moving feature i only
        order 2:  H_ij m_i m_j              additional effect of moving both i and j

    so the entries of the subsets of S add up to v(S), in units of the output. They are not Shapley interactions:
    `index` is "Moebius". The numbers are those of `gradient` and `hessian`; intervals are not exported.

    Pass names to shapiq's plots as `feature_names`. In its waterfall plot the label E[f(X)] stands for f(x), and the
    label f(x) for v of all features.

    Args:
        result: an `Interactions` with a surrogate.
        example: index of the example.
        move: the moves m_i, a number or one per feature (group); one standard deviation of the noise if None. With
            `baseline − x` the effects are those of replacing features. Every feature of a group moves by that much.

    Returns:
        shapiq.InteractionValues.

    Raises:
        ImportError: if shapiq is not installed.
        ValueError: if the result has no surrogate, more than 1000 features or no such example, or if the number of
            moves is not that of the features.

    >>> import pytest; _ = pytest.importorskip("shapiq")
    >>> import smoothhess as sh
    >>> result = sh.SmoothHess(lambda x: 3 * x[:, 0] * x[:, 1]).attribute(torch.ones(1, 3), sigma=0.5, n_calls=4000)
    >>> game = to_shapiq(result, move=1.0)
    >>> game.index, [round(game[s]) for s in ((), (0,), (1,), (0, 1), (0, 2))]
    ('Moebius', [3, 3, 3, 3, 0])
    """
    if not hasattr(result, "taylor"):
        raise ValueError(
            f"{result.method or 'this'} is an attribution, not a Hessian: it has no surrogate to define a game. "
            "Use SmoothHess, or a derivative among smoothhess.baselines (hessian, softplus, swish)."
        )
    try:
        import shapiq
    except ImportError as error:
        raise ImportError("to_shapiq needs shapiq: pip install shapiq") from error
    one = batch_of_one(result, example)
    d = one.shape[1]
    if d > MOST_PLAYERS:
        raise ValueError(f"{d} features are too many players for shapiq ({MOST_PLAYERS} at most). Use groups(mask).")
    moves = (
        one.feature_scales[0] if move is None else torch.as_tensor(move, dtype=torch.float64).detach().cpu().reshape(-1)
    )
    if len(moves) not in (1, d):
        raise ValueError(f"move must be a number, or one per feature, {d}, got {len(moves)}.")
    moves = moves.double().cpu().expand(d)
    gradient = one.gradient[0].detach().double().cpu().reshape(-1)
    pairs = one.hessian[0].detach().double().cpu() * moves[:, None] * moves
    single = gradient * moves + pairs.diagonal() / 2
    i, j = torch.triu_indices(d, d, 1)
    values: dict[tuple[int, ...], float] = {(): float(one.output[0])}
    values |= {(a,): v for a, v in enumerate(single.tolist())}
    values |= dict(zip(zip(i.tolist(), j.tolist(), strict=True), pairs[i, j].tolist(), strict=True))
    return shapiq.InteractionValues(
        values,
        index="Moebius",
        max_order=2,
        min_order=0,
        n_players=d,
        estimated=one.design != "exact",
        estimation_budget=int(one.n_calls[0]),
        baseline_value=float(one.output[0]),
    )


def to_scipy(result: Result) -> LinearOperator:
    """H of a single example as a scipy LinearOperator; see `Result.to_scipy`."""
    from scipy.sparse.linalg import LinearOperator

    if len(result) != 1:
        raise ValueError(
            f"a scipy operator holds one example, this result has {len(result)}. Use result[i].to_scipy()."
        )

    def product(v: Any) -> Any:
        return (result @ torch.as_tensor(v).reshape(result.shape[1], -1)).squeeze(0).cpu().numpy().reshape(v.shape)

    kind = str(result.dtype).removeprefix("torch.")
    return LinearOperator(result.shape[1:], matvec=product, rmatvec=product, matmat=product, dtype=kind)  # pyright: ignore
