"""The cross-entropy of a classifier as the function to explain, with its gradient and its Gauss–Newton Hessian.

Attributions that are computed from this loss belong in their own modules (`caso.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from smoothhess.baselines.derivative_source import Derivatives, Source
from smoothhess.model import targets as targets
from smoothhess.model.gradients import Oracle
from smoothhess.model.model_call import ModelCall, is_predicted
from smoothhess.model.state import borrowed
from smoothhess.result.exact import Attribution, Exact
from smoothhess.result.result import Result

DENSE = 1024  # features up to which H is kept as a matrix


def cross_entropy(forward_func: Callable[..., Any]) -> Callable[..., Tensor]:
    """The cross-entropy of a classifier as a forward function (points, …, labels) → (N,).

    Args:
        forward_func: the model, which returns logits (N, C).

    Returns:
        A function whose last argument holds the labels (N,), so that the labels of B examples can be passed as
        `additional_forward_args`.

    >>> net = torch.nn.Linear(3, 2)
    >>> cross_entropy(net)(torch.zeros(4, 3), torch.tensor([0, 1, 1, 0])).shape
    torch.Size([4])
    """

    def loss(points: Tensor, *args: Any) -> Tensor:
        *rest, label = args
        score = forward_func(points, *rest).log_softmax(-1)  # a call that the control variate can record
        return -score.gather(1, label[:, None])[:, 0]

    return loss


def gauss_newton(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    internal_batch_size: int | None = None,
) -> Exact:
    """Gradient and Hessian of the cross-entropy from the Jacobian J of the logits: g = Jᵀ(p − y), H = Jᵀ(pI − ppᵀ)J.

    H is the full Hessian if the logits are piecewise linear in the input, as for ReLU networks; otherwise the curvature
    of the logits themselves is left out. H is positive semidefinite and its rank is below the number C of classes. It
    costs C gradients per example.

    Args:
        forward_func: the model, which returns logits (N, C); it is left unchanged.
        inputs: (B, *shape), floating point; examples in dimension 0.
        target: the label of each example, an int or B ints; None uses the predicted labels.
        additional_forward_args, internal_batch_size: see `gradient`.

    Returns:
        An Exact result with `output` the loss. Above 1024 features it holds the factor (C, d) of H, not the matrix.

    Raises:
        ValueError: if the model does not return finite logits (N, C) with at least two classes.

    >>> net = torch.nn.Linear(5, 3)
    >>> gauss_newton(net, torch.zeros(2, 5)).eigh(3).values[:, 2].abs().max() < 1e-6  # rank 2
    tensor(True)
    """
    loss = Loss.of(forward_func, inputs, target, additional_forward_args, internal_batch_size)
    batch, classes = loss.logits.shape
    J = loss.jacobian()  # (B, C, d)
    J = (
        J - J[torch.arange(batch, device=J.device), loss.label][:, None]
    )  # relative to the label's row: avoids cancellation where p is close to 1 for the label
    p = loss.logits.double().softmax(1).to(J)
    slope = torch.einsum("bc,bcd->bd", p, J)  # Jᵀ(p − y): the label's row of J is zero now
    F = p.sqrt()[..., None] * (J - slope[:, None])  # pI − ppᵀ = √p (I − √p√pᵀ) √p with a projector inside: H = FᵀF
    dense = J.shape[-1] <= DENSE
    return Exact.make(
        loss.inputs,
        loss.value,
        slope.reshape(loss.inputs.shape),
        F.mT @ F if dense else None,
        operator=None if dense else _Gram(F),
        n_passes=torch.full((batch,), float(classes), dtype=loss.inputs.dtype, device=loss.inputs.device),
        method="Gauss–Newton Hessian of the cross-entropy",
        note=f"labels {loss.label.tolist()}" if batch <= 16 else "",
    )


@dataclass(frozen=True, eq=False)
class Loss:
    """The cross-entropy of B examples for their labels."""

    forward_func: Callable[..., Any]
    inputs: Tensor  # (B, *shape)
    label: Tensor  # (B,)
    logits: Tensor  # (B, C)
    args: tuple[Any, ...]
    internal_batch_size: int | None

    @staticmethod
    def of(
        forward_func: Callable[..., Any], inputs: Tensor, target: Any, args: Any, internal_batch_size: int | None
    ) -> Loss:
        """Run the model once; the labels are `target`, or the predicted classes if it is None."""
        call = ModelCall(forward_func, inputs, None, args, internal_batch_size)
        inputs, oracle = call.inputs, call.oracle()
        rows = None if is_predicted(target) else targets.entries(target, len(inputs))
        owner = torch.arange(len(inputs), device=inputs.device)

        def run(points: Tensor, whose: Tensor) -> tuple[Tensor]:
            logits = oracle.bound(whose)(points)
            _check_logits(logits, len(points))
            return (logits,)

        with borrowed(forward_func, inputs.device), torch.no_grad():
            (logits,) = oracle.in_batches(run, inputs, owner, cautious=False)
        if rows is not None:
            if rows.shape[1] != 1:
                raise ValueError(f"labels must be an int or one int per example, got {rows.shape[1]} indices each.")
            targets.check(rows, logits)
        label = logits.argmax(1) if rows is None else rows[:, 0].to(inputs.device) % logits.shape[1]
        return Loss(forward_func, inputs, label, logits, oracle.args, internal_batch_size)

    @property
    def value(self) -> Tensor:
        """The loss of each example, (B,)."""
        return functional.cross_entropy(self.logits, self.label, reduction="none")

    def jacobian(self) -> Tensor:
        """Jacobian of the logits, (B, C, d), from one gradient per example and class."""
        batch, classes = self.logits.shape
        base = Oracle(self.forward_func, self.inputs, None, self.args)

        def logits(points: Tensor, whose: Tensor) -> Tensor:
            return base.bound(whose)(points)

        owner = torch.arange(batch, device=self.inputs.device).repeat_interleave(classes)
        points = self.inputs[owner]
        target = torch.arange(classes).repeat(batch)
        oracle = Oracle(logits, points, target, (owner,), self.internal_batch_size)
        with borrowed(self.forward_func, self.inputs.device):
            _, rows = oracle(points, torch.arange(len(points), device=points.device))
        return rows.reshape(batch, classes, -1)

    def derivatives(self, of: str | Derivatives | Result, options: dict[str, Any]) -> Result:
        """Gradient and Hessian of the loss."""
        if isinstance(of, Result):
            self._check(of)
            if options:
                raise TypeError(f"of is an existing result, which takes no options, got {', '.join(options)}.")
            return of
        source = Source.ensure(of, options, also={"gauss_newton": gauss_newton})
        rows = self.internal_batch_size
        if source.find is gauss_newton:  # takes the model that returns logits, with the labels as target
            return source(self.forward_func, self.inputs, self.label, self.args, internal_batch_size=rows)
        loss, args = cross_entropy(self.forward_func), (*self.args, self.label)
        return source(loss, self.inputs, None, args, internal_batch_size=rows)

    def _check(self, of: Result) -> None:
        """Raise unless `of` is a result for this loss at these inputs."""
        if isinstance(of, Attribution):
            raise ValueError(
                f"of must hold the derivatives of the loss, got an attribution ({of.method}). Pass a result of "
                "SmoothHess or of a baseline."
            )
        if of.grouping is not None or of.inputs.shape != self.inputs.shape or not torch.equal(of.inputs, self.inputs):
            raise ValueError("of must be a result for these inputs, in this order, before groups().")
        if not torch.allclose(of.output, self.value.to(of.output), rtol=1e-3, atol=1e-5):
            raise ValueError(
                "of must be a result for the cross-entropy for these labels; its f(x) differs from that loss. Use "
                "SmoothHess(cross_entropy(model)).attribute(x, None, labels, …), or pass the labels as target."
            )


def _check_logits(logits: Any, rows: int) -> None:
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != rows or logits.shape[1] < 2:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"the model must return logits ({rows}, C) of at least two classes, got {got}.")
    if not torch.isfinite(logits).all():
        raise ValueError("the model's logits are NaN or infinite at these inputs.")


@dataclass(frozen=True, eq=False)
class _Gram:
    """FᵀF as an operator on rows."""

    factor: Tensor  # (B, C, d)

    def __call__(self, rows: Tensor) -> Tensor:
        return (rows @ self.factor.mT) @ self.factor

    def select(self, index: Tensor) -> _Gram:
        return _Gram(self.factor[index])
