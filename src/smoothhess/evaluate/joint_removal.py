"""Joint effects of removing pairs of segments, measured with forward passes of the model.

With x∖I the input whose segment I has the values of a baseline, the joint effect of I and J is

    D(I, J) = f(x) − f(x∖I) − f(x∖J) + f(x∖(I ∪ J)),

the second difference of f along both removals. Whether an explanation is faithful is measured by comparing its scores
of pairs with D; second differences of moves along single features are in `validate_pairs`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from smoothhess.estimate.grouping import Grouping
from smoothhess.evaluate.rank_correlation import spearman
from smoothhess.linalg.memory import BATCH_INPUTS
from smoothhess.model.baseline_inputs import baseline_of
from smoothhess.model.convert_inputs import to_tensors
from smoothhess.model.gradients import Oracle
from smoothhess.model.model_call import ModelCall
from smoothhess.model.state import borrowed
from smoothhess.result.pairs import Pair
from smoothhess.result.result import Result
from smoothhess.result.segments import group_names

if TYPE_CHECKING:
    import pandas as pd

ROUNDING = 8.0  # machine epsilons of the largest |f| below which a joint effect counts as zero
MOST_EXAMPLES, MOST_PAIRS = 4, 5  # shown by repr


@dataclass(frozen=True, eq=False, repr=False)
class JointRemoval:
    """Joint effects of P pairs of K segments for B examples; returned by `joint_removal`.

    All numbers are exact up to rounding: they come from the forward passes of the model itself.
    """

    pairs: Tensor  # (B, P, 2) indices of the segments
    effects: Tensor  # (B, P) D(I, J), float64
    single: Tensor  # (B, K) f(x) − f(x∖I), float64; NaN for segments that are in no pair
    output: Tensor  # (B,) f(x), float64
    rounding: Tensor  # (B,) size below which a joint effect counts as zero
    names: tuple[str, ...]  # K names of segments
    n_forward: int  # forward passes per example

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.effects)

    @property
    def matrix(self) -> Tensor:
        """The joint effects as symmetric matrices, (B, K, K); NaN on the diagonal and for other pairs."""
        b, k = self.single.shape
        table = torch.full((b, k, k), torch.nan, dtype=torch.float64)
        example = torch.arange(b)[:, None]
        i, j = self.pairs.unbind(2)
        table[example, i, j] = self.effects
        table[example, j, i] = self.effects
        return table

    def rank_correlation(self, scores: Any, *, absolute: bool = False) -> Tensor:
        """Spearman's ρ between the joint effects and scores of the same pairs, over the pairs of each example.

        Joint effects below `rounding` count as ties at zero.

        Args:
            scores: (B, K, K) scores of pairs of segments, or a result whose features are the segments. Of a result for
                single features, take `result.groups(segments, direction=baseline - inputs)`.
            absolute: whether absolute values are ranked, for scores without a sign.

        Returns:
            (B,) correlations, float64; NaN where all effects or all scores are equal.

        Raises:
            ValueError: if the scores are not those of B examples and K segments.
        """
        table = scores.hessian if isinstance(scores, Result) else to_tensors(scores, self.rank_correlation)
        table = torch.as_tensor(table).detach().double().cpu()
        b, k = self.single.shape
        if tuple(table.shape) != (b, k, k):
            raise ValueError(
                f"expected scores of shape {(b, k, k)}, one for each pair of segments, got {tuple(table.shape)}. Of a "
                "result for single features, pass result.groups(segments, direction=baseline - inputs)."
            )
        i, j = self.pairs.unbind(2)
        scored = table[torch.arange(b)[:, None], i, j]
        effects = torch.where(self.effects.abs() > self.rounding[:, None], self.effects, 0.0)
        return spearman(effects.abs(), scored.abs()) if absolute else spearman(effects, scored)

    def to_frame(self) -> pd.DataFrame:
        """A pandas DataFrame with one row per pair of each example.

        Raises:
            ImportError: if pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("to_frame needs pandas: pip install pandas") from error
        rows = []
        for b, (pairs, effects) in enumerate(zip(self.pairs.tolist(), self.effects.tolist(), strict=True)):
            for (i, j), effect in zip(pairs, effects, strict=True):
                alone = float(self.single[b, i]), float(self.single[b, j])
                rows.append((b, i, j, self.names[i], self.names[j], effect, *alone))
        columns = ["example", "i", "j", "first", "second", "joint_effect", "effect_of_first", "effect_of_second"]
        return pd.DataFrame(rows, columns=columns)

    def __repr__(self) -> str:
        b, p = self.effects.shape
        lines = [
            f"Joint removal of {p} pairs of {len(self.names)} segments, {b} example(s), {self.n_forward} forward "
            "passes each; joint effect: f(x) − f(x∖I) − f(x∖J) + f(x∖I∪J)"
        ]
        table = [("example", "f(x)", "pair", "joint effect", "of each")]
        for example in range(min(b, MOST_EXAMPLES)):
            for at in self.effects[example].abs().argsort(descending=True)[:MOST_PAIRS].tolist():
                i, j = self.pairs[example, at].tolist()
                alone = f"{float(self.single[example, i]):.3g}, {float(self.single[example, j]):.3g}"
                pair = f"{self.names[i]} × {self.names[j]}"
                effect = f"{float(self.effects[example, at]):.3g}"
                table.append((f"{example:7d}", f"{float(self.output[example]):.4g}", pair, effect, alone))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        return "\n".join(lines + ([f"  … and {b - MOST_EXAMPLES} more examples"] if b > MOST_EXAMPLES else []))


def joint_removal(
    forward_func: Callable[..., Any],
    inputs: Any,
    segments: Any,
    baseline: Any = 0.0,
    pairs: Any = None,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    names: Sequence[str] | None = None,
    internal_batch_size: int | None = None,
) -> JointRemoval:
    """Effects of removing two segments jointly beyond the sum of the effects of removing each.

    Each f(x∖I) is evaluated once and used for all pairs that contain I: all pairs of K segments take
    1 + K + K(K − 1)/2 forward passes per example, and no gradients.

    Args:
        forward_func: the model.
        inputs: (B, *shape) a tensor, array or DataFrame.
        segments: integer segment ids with the shape of one input, or of the batch; a `Segments` of
            `smoothhess.segments`.
        baseline: the values of removed features: a number, or a tensor, array or DataFrame with the shape of one input
            or of the batch.
        pairs: pairs (i, j) of segment ids for all examples, or a list of such lists, one per example (such as the
            result of `top_pairs`); None: all pairs.
        target, additional_forward_args, internal_batch_size: see `SmoothHess.attribute`.
        names: names of the segments; None: those of `segments`, else their ids.

    Returns:
        A `JointRemoval`; its `rank_correlation` compares the effects with scores of the pairs.

    Raises:
        TypeError: if `segments` does not hold integers, or pairs is not a list of pairs.
        ValueError: if there are fewer than two segments, or if a pair, a baseline or a name does not fit them.

    >>> f = lambda x: x[:, 0] * x[:, 1] + x[:, 2]
    >>> found = joint_removal(f, torch.tensor([[2.0, 3.0, 5.0]]), torch.tensor([0, 1, 2]))
    >>> found.effects, found.n_forward  # x₀x₁ = 6 is lost with either feature, and once with both
    (tensor([[6., 0., 0.]], dtype=torch.float64), 7)
    """
    call = ModelCall(forward_func, inputs, target, additional_forward_args, internal_batch_size)
    x = call.inputs
    absent = baseline_of(to_tensors(baseline, forward_func), x, "baseline")
    grouping = Grouping.make(segments, None, x.shape, torch.ones(1, x[0].numel()), x, name="segments")
    count = grouping.count
    if count < 2:
        raise ValueError("expected at least two segments, got one. Pass a mask with the ids 0, 1, 2, …")
    labels = _names(names, group_names(segments), count)
    chosen = _pairs(pairs, len(x), count)  # (B, P, 2)
    used = chosen.unique()
    removed = _removed_sets(chosen, used, count)  # (B, R, K)
    oracle = call.oracle()
    with borrowed(forward_func, x.device), torch.no_grad():
        values = _values(oracle, x, absent, grouping.mask, removed)  # (B, R)
    output, alone, both = values.split([1, len(used), chosen.shape[1]], 1)
    single = torch.full((len(x), count), torch.nan, dtype=torch.float64)
    single[:, used] = output - alone
    first, second = (single.gather(1, end) for end in chosen.unbind(2))
    # f(x) − f(x∖I) − f(x∖J) + f(x∖I∪J) = (f(x) − f(x∖I)) + (f(x) − f(x∖J)) − (f(x) − f(x∖I∪J))
    return JointRemoval(
        pairs=chosen,
        effects=first + second - (output - both),
        single=single,
        output=output[:, 0],
        rounding=ROUNDING * torch.finfo(x.dtype).eps * values.abs().amax(1),
        names=labels,
        n_forward=values.shape[1],
    )


def _removed_sets(pairs: Tensor, used: Tensor, count: int) -> Tensor:
    """Which segments are removed in each row: none, each one that is used, both of each pair, (B, R, K) boolean."""
    b, p, _ = pairs.shape
    nothing = torch.zeros(b, 1, count, dtype=torch.bool)
    one = torch.nn.functional.one_hot(used, count).bool().expand(b, -1, -1)
    both = torch.zeros(b, p, count, dtype=torch.bool).scatter(2, pairs, True)
    return torch.cat([nothing, one, both], 1)


def _values(oracle: Oracle, x: Tensor, absent: Tensor, mask: Tensor, removed: Tensor) -> Tensor:
    """f of each example with each of its sets of segments replaced by the baseline, (B, R) float64 on the CPU."""
    b, r, _ = removed.shape
    owner = torch.arange(b).repeat_interleave(r)
    sets, mask = removed.flatten(0, 1), mask.cpu().expand(b, -1)
    found = []
    step = max(1, BATCH_INPUTS.items(x[0].numel() * x.element_size(), x.device))
    for rows in torch.arange(b * r).split(step):
        own = owner[rows]
        gone = sets[rows].gather(1, mask[own]).reshape(-1, *x.shape[1:]).to(x.device)
        own = own.to(x.device)
        found.append(oracle.values(torch.where(gone, absent[own], x[own]), own).double().cpu())
    return torch.cat(found).reshape(b, r)


def _names(given: Sequence[str] | None, own: tuple[str, ...] | None, count: int) -> tuple[str, ...]:
    names = own if given is None else tuple(map(str, given))
    if names is not None and len(names) != count:
        raise ValueError(f"expected one name per segment, {count}, got {len(names)}.")
    return tuple(map(str, range(count))) if names is None else names


def _pairs(pairs: Any, examples: int, count: int) -> Tensor:
    """Pairs of segments of each example, (B, P, 2)."""
    if pairs is None:
        return torch.tensor([*combinations(range(count), 2)]).expand(examples, -1, -1)
    given = pairs.tolist() if hasattr(pairs, "tolist") else pairs
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise TypeError(f"pairs must be a list of pairs (i, j), or None for all of them, got {type(pairs).__name__}.")
    rows = [*given]
    own = bool(rows) and isinstance(rows[0], Sequence) and all(isinstance(end, Sequence) for end in rows[0])
    listed = [[*row] for row in rows] if own else [rows] * examples
    if len(listed) != examples:
        raise ValueError(f"expected pairs for each of {examples} examples, got {len(listed)} lists.")
    if not listed[0] or len({len(row) for row in listed}) > 1:
        raise ValueError(f"expected equally many pairs for each example, at least one, got {[len(r) for r in listed]}.")
    ends = [[(p.i, p.j) if isinstance(p, Pair) else _two(p) for p in row] for row in listed]
    found = torch.tensor(ends)
    if int(found.min()) < 0 or int(found.max()) >= count or bool((found[..., 0] == found[..., 1]).any()):
        raise ValueError(f"a pair must be two different segment ids from 0 to {count - 1}, got others.")
    return found


def _two(pair: Any) -> tuple[int, int]:
    if not isinstance(pair, Sequence) or len(pair) != 2 or not all(hasattr(end, "__index__") for end in pair):
        raise ValueError("a pair must be (i, j), the ids of two segments. Pass integers.")
    return int(pair[0]), int(pair[1])
