"""Hessian–vector products of a model at many inputs, in batches of examples × directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from smoothhess.draws.seeding import fixed_normal
from smoothhess.linalg.memory import SAVED_ACTIVATIONS, in_batches, reraise_out_of_memory, with_bytes_kept
from smoothhess.model.gradients import FIRST_ROWS, MOST_ROWS, Oracle
from smoothhess.model.process_flags import math_attention
from smoothhess.model.state import borrowed

PROBES = 2  # random directions; a nonzero Hessian maps them to zero with probability zero


class HessianProducts:
    """H v at each of B inputs for many directions v: rows (B, n, d) → (B, n, d).

    The gradient of a chunk of inputs is computed once with its graph, and the backward pass through it is batched over
    directions (vmap). If an operation of the model does not support that, each direction has its own backward pass. The
    object keeps a reference to the model, whose state is restored after each product.

    >>> x = torch.ones(1, 3)
    >>> oracle = Oracle(lambda x: x.prod(1), x)
    >>> HessianProducts(oracle, x, oracle.forward_func)(torch.eye(3)[None])
    tensor([[[0., 1., 1.],
             [1., 0., 1.],
             [1., 1., 0.]]])
    """

    def __init__(
        self,
        oracle: Oracle,  # evaluates the function to differentiate
        inputs: Tensor,
        model: Callable[..., Any],  # the model that this function calls
        rows: int | None = None,
        examples: Tensor | None = None,
    ) -> None:
        self.oracle = oracle
        self.model = model
        self.inputs = inputs  # (B, *shape)
        everyone = torch.arange(len(inputs), device=inputs.device)
        self.examples = everyone if examples is None else examples  # (B,) indices into the oracle's inputs
        self.rows = rows  # examples × directions per pass; None until the memory of one is measured
        self.batched = True  # whether the backward pass is batched over directions
        self.checked = False  # whether the graph of a gradient was checked
        self.passes = 0.0  # cost in units of a gradient call, summed over examples

    def select(self, index: Tensor) -> HessianProducts:
        """The products at the examples in `index`."""
        return HessianProducts(self.oracle, self.inputs[index], self.model, self.rows, self.examples[index])

    def __call__(self, rows: Tensor) -> Tensor:
        """H applied to each row of (B, n, d)."""
        n = rows.shape[1]

        def size(_: int) -> int:
            return FIRST_ROWS if self.rows is None else max(1, self.rows // max(n, 1))

        def some(chosen: slice) -> Tensor:
            return self._of(self.inputs[chosen], self.examples[chosen], rows[chosen])

        with borrowed(self.model, self.inputs.device), math_attention():
            return torch.cat([*in_batches(some, len(rows), size, self._take_fewer)])

    def _take_fewer(self, _: int) -> bool:
        if self.rows == 1:
            return False
        self.rows = max(1, (self.rows or FIRST_ROWS) // 2)
        return True

    def dense(self) -> Tensor:
        """H as a dense matrix, (B, d, d)."""
        d = self.inputs[0].numel()
        return self(torch.eye(d, dtype=self.inputs.dtype, device=self.inputs.device).expand(len(self.inputs), d, d))

    def vanish(self) -> bool:
        """Whether H is exactly zero at every input, tested in random directions."""
        probes = fixed_normal(PROBES, self.inputs[0].numel()).to(self.inputs)
        return not bool(self(probes.expand(len(self.inputs), -1, -1)).any())

    # --- products at a chunk of examples ----------------------------------------------------------------------------

    def _of(self, inputs: Tensor, owner: Tensor, rows: Tensor) -> Tensor:
        """Products (b, n, d) at b inputs that fit into memory."""
        directions = rows.reshape(*rows.shape[:2], *inputs.shape[1:]).transpose(0, 1)  # (n, b, *shape)
        found = None
        if self.batched:
            graph = self._gradient(inputs, owner)
            try:
                found = self._backwards(*graph, directions)
            except (RuntimeError, TypeError, ValueError) as error:
                reraise_out_of_memory(error)
                self.batched = False
        if found is None:
            found = self._one_by_one(inputs, owner, directions)
        if not torch.isfinite(found).all():
            raise ValueError(
                "the model's second derivative is NaN or infinite at these inputs. Look for a square root, a norm or a "
                "logarithm at 0, or move the inputs away from there."
            )
        return found.transpose(0, 1).flatten(2)

    def _gradient(self, points: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
        """The points as a leaf of a new graph, and the gradient at them with its graph."""
        leaf = points.detach()
        if leaf.is_cuda and leaf.ndim == 4:  # faster convolutions, for any memory format of their weights
            leaf = leaf.contiguous(memory_format=torch.channels_last)
        leaf = leaf.clone().requires_grad_()

        def differentiated() -> Tensor:
            value = self.oracle.forward(leaf, owner)
            return torch.autograd.grad(value.sum(), leaf, create_graph=True)[0]

        gradient, per_row = with_bytes_kept(differentiated, len(points))
        if not self.checked:
            _refuse_once_differentiable(gradient)
            self.checked = True
        if self.rows is None:  # a direction needs as much memory as the graph of one example
            most = MOST_ROWS.get(points.device.type, MOST_ROWS["cpu"])
            self.rows = min(most, SAVED_ACTIVATIONS.items(per_row, points.device))
        return leaf, gradient

    def _backwards(self, leaf: Tensor, gradient: Tensor, directions: Tensor) -> Tensor:
        """Products (n, b, *shape), by backward passes through one graph that are batched over directions."""
        b, rows = len(leaf), self.rows or 1
        self.passes += b * (1 + len(directions))
        if not gradient.requires_grad:
            return torch.zeros_like(directions)
        found = []
        for some in directions.split(max(1, rows // b)):
            (product,) = torch.autograd.grad(
                gradient,
                leaf,
                some[0] if len(some) == 1 else some,
                is_grads_batched=len(some) > 1,
                retain_graph=True,
                allow_unused=True,
            )
            found.append(torch.zeros_like(some) if product is None else product.detach().reshape(some.shape))
        return torch.cat(found)

    def _one_by_one(self, inputs: Tensor, owner: Tensor, directions: Tensor) -> Tensor:
        """Products (n, b, *shape), with a copy of the input, and its own graph, for each direction."""
        n, b = directions.shape[:2]
        self.passes += 2 * b * n
        found = []
        for some in directions.split(max(1, (self.rows or 1) // b)):
            copies = len(some)
            points = inputs.expand(copies, *inputs.shape).flatten(0, 1)
            leaf, gradient = self._gradient(points, owner.repeat(copies))
            product = None
            if gradient.requires_grad:
                try:
                    (product,) = torch.autograd.grad(gradient, leaf, some.reshape(leaf.shape), allow_unused=True)
                except RuntimeError as error:
                    reraise_out_of_memory(error)
                    raise ValueError(_ONCE.format(str(error).rstrip("."))) from error
            found.append(torch.zeros_like(some) if product is None else product.detach().reshape(some.shape))
        return torch.cat(found)


_ONCE = (
    "the model's gradient cannot be differentiated again: {}. Write that step with ordinary torch operations, or use "
    "SmoothHess, which needs only gradients."
)


def _refuse_once_differentiable(gradient: Tensor) -> None:
    """Raise if autograd would silently drop an operation that is marked once_differentiable."""
    seen, pending = set(), [gradient.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::Error":
            raise ValueError(_ONCE.format("one of its operations is marked once_differentiable"))
        pending += [following for following, _ in node.next_functions]
