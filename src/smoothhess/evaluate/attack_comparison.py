"""Comparison of attacks at several radii by the share of predictions that they leave unchanged.

The attacks themselves belong in `attack.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smoothhess.estimate import student_t
from smoothhess.evaluate.attack import AttackPath
from smoothhess.evaluate.compare_surrogates import Average, as_radii
from smoothhess.evaluate.perturbation_mse import check_centre
from smoothhess.model.gradients import Oracle, check_batch_size
from smoothhess.model.model_call import ModelCall
from smoothhess.model.state import borrowed
from smoothhess.result.intervals import half_width
from smoothhess.result.result import Result
from smoothhess.result.taylor import Taylor

Attacker = Result | Taylor | AttackPath | Tensor | Callable[[float], Tensor]

ROOM = 1e-3  # relative to the radius: distance outside the ball that is attributed to rounding


@dataclass(frozen=True, eq=False)
class AttackDifference:
    """Difference between two attacks in the share of unchanged predictions, on the same points."""

    radii: tuple[float, ...]
    value: Tensor  # (R,) first minus second: negative where the first attack is stronger
    stderr: Tensor  # (R,) paired, over points
    only_first: Tensor  # (R,) points left unchanged by the first attack but not by the second
    only_second: Tensor  # (R,) points left unchanged by the second attack but not by the first
    p_value: Tensor  # (R,) McNemar's exact test of equal strength


@dataclass(frozen=True, eq=False, repr=False)
class AttackComparison:
    """Predictions after M attacks at R radii on B points. Returned by `post_hoc`.

    All methods attack the same points, so `difference` is a paired comparison: it can be significant where the
    difference of two shares is smaller than their standard errors.
    """

    methods: tuple[str, ...]
    radii: tuple[float, ...]
    before: Tensor  # (B,) predicted class of the inputs
    after: Tensor  # (M, R, B) of the perturbed inputs
    moved: Tensor  # (M, R, B) ‖δ‖; below the radius if the surrogate has its minimum inside, or if bounds are active

    def __len__(self) -> int:
        return len(self.before)

    @property
    def unchanged(self) -> Tensor:
        """Whether the prediction is the same as before the attack, (M, R, B)."""
        return self.after == self.before

    def share(self, name: str, radius: float) -> Average:
        """Share of points with an unchanged prediction (low for a strong attack), and its binomial standard error."""
        share = float(self._outcomes(name, radius).double().mean())
        return Average(share, math.sqrt(share * (1 - share) / len(self)))

    def interval(self, name: str, radius: float, level: float = 0.95) -> tuple[float, float]:
        """Wilson's confidence interval of a share; its width is positive even for shares of 0 and 1."""
        share, n = self.share(name, radius).value, len(self)
        z2 = float(student_t.quantile(level, torch.tensor(torch.inf))) ** 2
        centre = (share + z2 / (2 * n)) / (1 + z2 / n)
        reach = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
        return max(centre - reach, 0.0), min(centre + reach, 1.0)

    def difference(self, a: str, b: str) -> AttackDifference:
        """Share of unchanged predictions of `a` minus that of `b` at each radius; negative where `a` is stronger."""
        first, second = (self.unchanged[self._method(name)] for name in (a, b))  # (R, B)
        only_first, only_second = (first & ~second).sum(1), (second & ~first).sum(1)
        apart, n = only_first - only_second, len(self)
        # per-point differences are −1, 0 or 1
        variance = (only_first + only_second).double() / n - (apart / n).double().square()
        stderr = (variance.clamp_min(0) / n).sqrt() if n > 1 else torch.full_like(variance, torch.nan)
        return AttackDifference(
            self.radii,
            apart.double() / n,
            stderr,
            only_first,
            only_second,
            mcnemar(only_first, only_second),
        )

    @staticmethod
    def cat(comparisons: Sequence[AttackComparison]) -> AttackComparison:
        """Concatenate comparisons of the same attacks on different points.

        >>> f = lambda x: torch.stack([x.sum(1), -x.sum(1)], 1)
        >>> parts = [post_hoc(f, x, {"down": lambda r, x=x: x - r / 2}, 1.0) for x in torch.ones(2, 3, 4)]
        >>> len(AttackComparison.cat(parts))
        6
        """
        if not comparisons:
            raise ValueError("expected at least one comparison, got none.")
        first = comparisons[0]
        if len({(c.methods, c.radii) for c in comparisons}) != 1:
            raise ValueError("comparisons can be concatenated only when methods and radii agree.")
        return AttackComparison(
            first.methods,
            first.radii,
            torch.cat([c.before for c in comparisons]),
            torch.cat([c.after for c in comparisons], 2),
            torch.cat([c.moved for c in comparisons], 2),
        )

    def to_markdown(self, against: str | None = None) -> str:
        """A table of methods by radii: unchanged predictions in per cent ± half of their 95 % interval.

        Args:
            against: name of a reference method; adds the paired difference of each other method to it, and McNemar's p.
        """
        rows = [
            ["unchanged, %", *(f"r = {r:g}" for r in self.radii)],
            ["---"] * (len(self.radii) + 1),
            *self._cells(against),
        ]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    def __repr__(self) -> str:
        rows = [["", *(f"r = {r:g}" for r in self.radii)], *self._cells(None)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(
            [
                f"Predictions left unchanged by {len(self.methods)} attack(s) on {len(self)} point(s), in per cent "
                "(lower is stronger)",
                *("  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows),
                "  ± half of a 95 % interval over points; to compare methods use difference(a, b), which is paired",
            ]
        )

    def _cells(self, against: str | None) -> list[list[str]]:
        table = []
        for name in self.methods:
            ends = [self.interval(name, r) for r in self.radii]
            shares = [self.share(name, r).value for r in self.radii]
            cells = [f"{100 * s:.1f} ± {50 * (high - low):.1f}" for s, (low, high) in zip(shares, ends, strict=True)]
            if against is not None and name != against:
                apart = self.difference(name, against)
                found = zip(cells, apart.value.tolist(), apart.stderr.tolist(), apart.p_value.tolist(), strict=True)
                cells = [f"{c} ({100 * v:+.1f} ± {100 * half_width(e):.1f}, p = {p:.2g})" for c, v, e, p in found]
            table.append([name, *cells])
        if against is not None:
            self._method(against)
        return table

    def _outcomes(self, name: str, radius: float) -> Tensor:
        if radius not in self.radii:
            raise ValueError(f"expected one of the radii {', '.join(f'{r:g}' for r in self.radii)}, got {radius!r}.")
        return self.unchanged[self._method(name), self.radii.index(radius)]

    def _method(self, name: str) -> int:
        if name not in self.methods:
            raise ValueError(f"expected one of the methods {', '.join(map(repr, self.methods))}, got {name!r}.")
        return self.methods.index(name)


def post_hoc(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    attackers: Mapping[str, Attacker],
    radii: float | Sequence[float],
    additional_forward_args: Any = None,
    *,
    bounds: Any = None,
    decide: Callable[[Any], Tensor] | None = None,
    internal_batch_size: int | None = None,
) -> AttackComparison:
    """The predictions after several attacks {name: attacker} at several radii: the paper's post-hoc accuracy.

    Args:
        forward_func: the classifier, which returns scores (N, C); it is left unchanged.
        inputs: (B, *shape).
        attackers: the attacks by name. A result, or a `Taylor` of one, minimises its surrogate of the explained output
            inside the ball: `result` or `result.taylor()` to second order, `result.taylor(1)` to first order, as in
            `compare`; all radii share one eigendecomposition. An `AttackPath` is used as it is. A callable radius →
            (B, *shape), or a tensor (R, B, *shape), gives the perturbed inputs of any other attack.
        radii: one or several radii; no attacker may move an input further.
        additional_forward_args, internal_batch_size: see `SmoothHess.attribute`.
        bounds: (low, high) of the inputs, for results and Taylors; see `attack`.
        decide: maps the model's output to classes (N,); None takes the argmax of scores (N, C).

    Returns:
        An AttackComparison of all attackers on the same points.

    Raises:
        TypeError: if an attacker is none of the types above.
        ValueError: if an attacker has other inputs, or moves an input out of the ball.

    >>> from smoothhess import SmoothHess
    >>> _ = torch.manual_seed(0)
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3)).double()
    >>> x = torch.randn(20, 4).double()
    >>> result = SmoothHess(net).attribute(x, target=net(x).argmax(1), radius=0.5, n_calls=200)
    >>> found = post_hoc(net, x, {"order 2": result, "order 1": result.taylor(1)}, [0.1, 0.5])
    >>> found.unchanged.shape
    torch.Size([2, 2, 20])
    >>> found.share("order 2", 0.5).value <= found.share("order 2", 0.1).value
    True
    """
    inputs = ModelCall(forward_func, inputs).inputs
    if not isinstance(attackers, Mapping) or not attackers:
        raise ValueError(
            f"attackers must be a mapping {{name: attacker}} with at least one, got {type(attackers).__name__}"
            f"{' without entries' if isinstance(attackers, Mapping) else ''}."
        )
    chosen = as_radii(radii)
    judge = Judge(forward_func, inputs, additional_forward_args, decide, internal_batch_size)
    ready = {name: _checked(name, attacker, inputs, chosen, bounds) for name, attacker in attackers.items()}
    after, moved = [], []
    with borrowed(forward_func, inputs.device), torch.no_grad():
        before = judge(inputs)
        for name, attacker in ready.items():
            points_at = attacker.widened(chosen) if isinstance(attacker, AttackPath) else attacker
            for radius in chosen:
                points = points_at(radius)
                if isinstance(attacker, AttackPath):  # large results are moved from a GPU to the host
                    points = points.to(inputs.device)
                moved.append(_distance(name, points, inputs, radius))
                after.append(judge(points))
    shape = (len(attackers), len(chosen), len(inputs))
    classes, distances = (torch.stack(parts).reshape(shape).cpu() for parts in (after, moved))
    return AttackComparison(tuple(attackers), chosen, before.cpu(), classes, distances)


class Judge:
    """Predicted classes (N,) of points (N, *shape); must be called inside `borrowed` and no_grad."""

    def __init__(
        self,
        forward_func: Callable[..., Any],
        inputs: Tensor,
        additional_forward_args: Any = None,
        decide: Callable[[Any], Tensor] | None = None,
        internal_batch_size: int | None = None,
    ) -> None:
        if decide is not None and not callable(decide):
            raise TypeError(f"decide must be a callable from outputs to classes (N,), got {type(decide).__name__}.")
        self.oracle = Oracle(forward_func, inputs, None, additional_forward_args, check_batch_size(internal_batch_size))
        self.everyone = torch.arange(len(inputs), device=inputs.device)
        self.decide = _largest if decide is None else decide

    def __call__(self, points: Tensor, owner: Tensor | None = None) -> Tensor:
        """Classes of the points; `owner` is the index of each point's input, None for one point per input."""
        owner = self.everyone if owner is None else owner
        (classes,) = self.oracle.in_batches(self._classes, points, owner, cautious=False)
        return classes

    def _classes(self, points: Tensor, owner: Tensor) -> tuple[Tensor]:
        classes = self.decide(self.oracle.bound(owner)(points))
        if not isinstance(classes, Tensor) or classes.shape != points.shape[:1]:
            got = tuple(classes.shape) if isinstance(classes, Tensor) else type(classes).__name__
            raise ValueError(f"decide must return one class for each row, ({len(points)},), got {got}.")
        return (classes,)


def _largest(output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        raise TypeError(
            f"the model must return one tensor of scores (N, C), got {type(output).__name__}. Pass decide=, from its "
            "output to classes (N,)."
        )
    if output.ndim != 2 or output.shape[1] < 2:
        raise ValueError(
            f"expected scores (N, C) of at least two classes, got {tuple(output.shape)}. Pass decide=, from the output "
            "to classes (N,): for one logit, lambda out: out.flatten() > 0."
        )
    if not torch.isfinite(output).all():
        raise ValueError("the model's output is NaN or infinite near these inputs. Use a smaller radius, or bounds.")
    return output.argmax(1)


def _checked(
    name: str, attacker: Any, inputs: Tensor, radii: tuple[float, ...], bounds: Any
) -> AttackPath | Callable[[float], Any]:
    """An attacker as a function radius → perturbed inputs."""
    if isinstance(attacker, Result | Taylor):
        attacker = AttackPath.of(attacker, bounds=bounds)
    elif isinstance(attacker, AttackPath) and bounds is not None:
        raise ValueError(
            f"attacker {name!r} is an AttackPath, which already has bounds. Pass bounds to AttackPath.of instead."
        )
    if isinstance(attacker, AttackPath):
        check_centre(name, attacker.taylor, inputs)
    elif isinstance(attacker, Tensor):
        expected, given = (len(radii), *inputs.shape), attacker
        if given.shape != expected:
            raise ValueError(
                f"perturbed inputs {name!r} must be (R, B, *shape), here {expected}, got {tuple(given.shape)}."
            )
        return lambda radius: given[radii.index(radius)]
    elif not callable(attacker):
        raise TypeError(
            f"attacker {name!r} must be a result, a Taylor, an AttackPath, a callable radius → inputs, or perturbed "
            f"inputs, got {type(attacker).__name__}."
        )
    return attacker


def _distance(name: str, points: Any, inputs: Tensor, radius: float) -> Tensor:
    """Distance that an attacker moved each input, (B,) on the CPU; raises if it exceeds the radius."""
    if not isinstance(points, Tensor) or points.shape != inputs.shape or points.dtype != inputs.dtype:
        got = f"{tuple(points.shape)} {points.dtype}" if isinstance(points, Tensor) else type(points).__name__
        raise ValueError(
            f"attacker {name!r} must return perturbed inputs {tuple(inputs.shape)} {inputs.dtype}, got {got}."
        )
    if not torch.isfinite(points).all():
        raise ValueError(f"attacker {name!r} returns NaN or infinite inputs at radius {radius:g}.")
    distance = (points - inputs).flatten(1).double().norm(dim=1)
    if (distance > radius * (1 + ROOM)).any():
        raise ValueError(
            f"attacker {name!r} moves inputs by up to {float(distance.max()):g}, further than the radius {radius:g} "
            "that it is compared at. Project its steps into the ball."
        )
    return distance.cpu()


def mcnemar(only_first: Tensor, only_second: Tensor) -> Tensor:
    """McNemar's exact two-sided p-value: a binomial test with probability ½ on the points where two methods disagree.

    >>> mcnemar(torch.tensor([1, 0]), torch.tensor([9, 0]))
    tensor([0.0215, 1.0000], dtype=torch.float64)
    """
    total, least = only_first + only_second, torch.minimum(only_first, only_second)
    tails = []
    for n, k in zip(total.reshape(-1).tolist(), least.reshape(-1).tolist(), strict=True):
        i = torch.arange(k + 1, dtype=torch.float64)
        log_pmf = math.lgamma(n + 1) - torch.lgamma(i + 1) - torch.lgamma(n - i + 1) - n * math.log(2)
        tails.append(min(1.0, 2 * float(log_pmf.exp().sum())))
    return torch.tensor(tails, dtype=torch.float64).reshape(total.shape)
