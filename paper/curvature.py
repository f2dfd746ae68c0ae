"""The Hessian of a softened network, at the cost of one gradient call for each direction.

With SoftPlus or Swish in the place of every ReLU, all curvature comes from the units: H = Σ_k u_k φ″(z_k) J_k J_kᵀ,
plus the term of a softmax at the end. So H v takes one forward pass of the network's tangent at x, which gives J_k·v of
all units, and one backward pass with the weights u_k φ″(z_k): nothing is differentiated twice. The paper's search over
β needs a few hundred thousand such products, and its tables a few thousand Hessians of 3072 pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smoothhess.baselines.softened_activations import Form
from smoothhess.curvature import activation_hooks
from smoothhess.linalg.memory import SAVED_ACTIVATIONS, in_batches
from smoothhess.model.float_precision import check_precision, evaluated
from smoothhess.model.state import borrowed
from smoothhess.result.exact import Exact

__all__ = ["softened"]

REACH = 1024.0  # length of a tangent step: the tangent is linear, and a long step makes rounding negligible
COPIES = 6  # memory of a row, in copies of all units
EXAMPLES = 256  # examples frozen at once
MOST_ROWS = {"cpu": 4_096, "cuda": 16_384}


class Corner:
    """The unmodified relu, as a form without curvature."""

    def value(self, z: Tensor) -> Tensor:
        """max(z, 0)."""
        return z.clamp_min(0)

    def slope(self, z: Tensor) -> Tensor:
        """1 where z > 0."""
        return (z > 0).to(z)

    def curvature(self, z: Tensor) -> Tensor:
        """0."""
        return torch.zeros_like(z)


def softened(
    network: Callable[..., Any],
    inputs: Tensor,
    target: Tensor,
    form: Form | None,
    *,
    probability: bool = False,
    precision: str = "float32",
    method: str = "",
) -> Exact:
    """Gradient and Hessian of one output of a network with `form` in the place of every relu; matrix-free.

    Args:
        network: from inputs to scores (N, C); apart from its relus it must be affine, as MLPs and ResNets are.
        inputs: (B, *shape).
        target: which score, (B,).
        form: `Softplus(beta)` or `Swish(beta)` of `smoothhess.baselines.softplus`; None leaves the relus as they are.
        probability: explain the softmax of the scores instead.
        precision: of the products, "float32" or, on a GPU, "tf32"; f and gradient are always exact.
        method: name of the method in the result.

    >>> from smoothhess.baselines.softplus import Softplus
    >>> f = lambda x: torch.relu(x.sum(1, keepdim=True))
    >>> softened(f, torch.zeros(1, 2), torch.tensor([0]), Softplus(4.0)).hessian  # β/4 at the kink
    tensor([[[1., 1.],
             [1., 1.]]])
    """
    if check_precision(precision, inputs.device, inputs.dtype) not in ("float32", "tf32"):
        raise ValueError(f"precision must be 'float32' or 'tf32' for products, got {precision!r}.")
    inputs, target = inputs.detach(), target.to(inputs.device)
    with borrowed(network, inputs.device):
        with torch.no_grad():
            output = _scalar(network(inputs), target, probability)
        parts = zip(inputs.split(EXAMPLES), target.split(EXAMPLES), strict=True)
        frozen = Frozen.cat([_freeze(network, x, t, form or Corner(), probability) for x, t in parts])
    return Exact.make(
        inputs,
        output,
        frozen.gradient,
        operator=Tangent(network, inputs, target, probability, precision, frozen),
        value=frozen.value,
        target=target[:, None].cpu(),
        n_passes=1.5,
        method=method,
    )


@dataclass(frozen=True, eq=False)
class Frozen:
    """The state of a softened network at B examples; for the units, one tensor (B, …) for each activation call."""

    value: Tensor  # (B,)
    gradient: Tensor  # (B, *shape)
    scores: Tensor  # (B, C)
    pre: tuple[Tensor, ...]  # z
    post: tuple[Tensor, ...]  # φ(z)
    slope: tuple[Tensor, ...]  # φ′(z)
    bend: tuple[Tensor, ...]  # u φ″(z), with u the sensitivity of the value to φ(z)

    def select(self, index: Tensor) -> Frozen:
        """Of the examples at `index`."""
        units = [tuple(t[index] for t in kept) for kept in (self.pre, self.post, self.slope, self.bend)]
        return Frozen(self.value[index], self.gradient[index], self.scores[index], *units)

    @staticmethod
    def cat(parts: Sequence[Frozen]) -> Frozen:
        """Concatenate the states of different examples."""
        joined = [torch.cat([getattr(p, name) for p in parts]) for name in ("value", "gradient", "scores")]
        units = [
            tuple(torch.cat(t) for t in zip(*(getattr(p, name) for p in parts), strict=True))
            for name in ("pre", "post", "slope", "bend")
        ]
        return Frozen(joined[0], joined[1], joined[2], *units)


@dataclass(frozen=True, eq=False)
class Tangent:
    """The softened network, linearised around each of B examples: rows (B, n, d) → H times each of them."""

    network: Callable[..., Any]
    inputs: Tensor  # (B, *shape)
    target: Tensor  # (B,)
    probability: bool
    precision: str
    frozen: Frozen

    def select(self, index: Tensor) -> Tangent:
        """Of the examples at `index`."""
        some = self.inputs[index], self.target[index]
        return Tangent(self.network, *some, self.probability, self.precision, self.frozen.select(index))

    def __call__(self, rows: Tensor) -> Tensor:
        """H applied to each row of (B, n, d)."""
        if not self.probability and not any(bool(b.any()) for b in self.frozen.bend):
            return torch.zeros_like(rows)
        most, found = self._most_rows(), []
        with borrowed(self.network, self.inputs.device):
            for index, part in self._parts(rows, most):
                found.append(_in_smaller_batches(self.select(index)._product, part, most))
        flat = torch.cat([f.flatten(0, 1) for f in found])
        return flat.reshape(rows.shape)

    def _most_rows(self) -> int:
        per_row = COPIES * sum(p[0].numel() * p.element_size() for p in self.frozen.pre)
        most = MOST_ROWS.get(self.inputs.device.type, MOST_ROWS["cpu"])
        return min(most, SAVED_ACTIVATIONS.items(per_row, self.inputs.device))

    def _parts(self, rows: Tensor, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Some examples at a time, with all their rows."""
        batch_size = max(1, most // rows.shape[1])
        for index in torch.arange(len(rows), device=rows.device).split(batch_size):
            yield index, rows[index]

    def _product(self, rows: Tensor) -> Tensor:
        """H applied to rows (b, n, d) that fit into memory."""
        frozen, (b, n, _) = self.frozen, rows.shape
        length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        step = REACH * rows / torch.where(length > 0, length, 1.0)
        leaf = (self.inputs[:, None] + step.reshape(b, n, *self.inputs.shape[1:])).flatten(0, 1)
        if leaf.is_cuda and leaf.ndim == 4:
            leaf = leaf.contiguous(memory_format=torch.channels_last)
        leaf = leaf.detach().requires_grad_()
        total = leaf.new_zeros(())
        seen = 0

        def straight(z: Tensor) -> Tensor:
            nonlocal total, seen
            kept = (frozen.pre, frozen.post, frozen.slope, frozen.bend)
            pre, post, slope, bend = (t[seen][:, None] for t in kept)
            seen += 1
            moved = z.unflatten(0, (b, n)) - pre
            total = total + (bend * moved.detach() * moved).sum()
            return (post + slope * moved).flatten(0, 1)

        with torch.enable_grad(), evaluated(self.precision, leaf.device):
            scores = activation_hooks.replace(self.network, straight)(leaf)
            if self.probability:
                moved = scores.unflatten(0, (b, n)) - frozen.scores[:, None]
                total = total + (_bent_softmax(frozen.scores, self.target, moved.detach()) * moved).sum()
            (product,) = torch.autograd.grad(total, leaf)
        return product.reshape(rows.shape) * (length / REACH)


def _freeze(network: Callable[..., Any], inputs: Tensor, target: Tensor, form: Form, probability: bool) -> Frozen:
    """One forward and one backward pass."""
    leaf = inputs.detach().requires_grad_()
    pre: list[Tensor] = []
    post: list[Tensor] = []

    def soft(z: Tensor) -> Tensor:
        pre.append(z.detach())
        # the slope is given explicitly, so that the backward pass uses φ′ and not autograd's derivative of φ
        value = form.value(z.detach()) + form.slope(z.detach()) * (z - z.detach())
        post.append(value)
        return value

    with torch.enable_grad():
        scores = activation_hooks.replace(network, soft)(leaf)
        value = _scalar(scores, target, probability)
        gradient, *reach = torch.autograd.grad(value.sum(), [leaf, *post], allow_unused=True, materialize_grads=True)
    slope = tuple(form.slope(z) for z in pre)
    bend = tuple(u * form.curvature(z) for u, z in zip(reach, pre, strict=True))
    kept = tuple(p.detach() for p in post)
    return Frozen(value.detach(), gradient.detach(), scores.detach(), tuple(pre), kept, slope, bend)


def _scalar(scores: Tensor, target: Tensor, probability: bool) -> Tensor:
    """The explained number of each row, (N,)."""
    own = scores.gather(1, target[:, None])
    if not probability:
        return own[:, 0]
    # p/(1 − p) = exp(own − log Σ exp of the others): no 1 − p is rounded away where the softmax is saturated
    others = scores.masked_fill(_indicator(scores, target).bool(), -torch.inf)
    return torch.nn.functional.logsigmoid(own[:, 0] - others.logsumexp(1)).exp()


def _indicator(scores: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(target, scores.shape[1]).to(scores)


def _bent_softmax(scores: Tensor, target: Tensor, moved: Tensor) -> Tensor:
    """∇²p_c applied to moves v of the scores (b, n, C), p_c the softmax of the target c.

    With w = v − v_c, m = pᵀw and e the indicator of c it is p_c (−m (e − p) − p∘(w − m)); 1 − p_c is the sum of the
    other p, so that nothing cancels where the softmax is saturated.
    """
    p = scores.softmax(-1)[:, None]  # (b, 1, C)
    e = _indicator(scores, target)[:, None]
    rest = e * ((1 - e) * p).sum(-1, keepdim=True) - (1 - e) * p  # e − p
    w = moved - (e * moved).sum(-1, keepdim=True)
    m = (p * w).sum(-1, keepdim=True)
    return (e * p).sum(-1, keepdim=True) * (-m * rest - p * (w - m))


def _in_smaller_batches(product: Callable[[Tensor], Tensor], rows: Tensor, most: int) -> Tensor:
    """`product` of (b, n, d), with fewer rows at a time when memory runs out."""
    step = max(1, most // len(rows))

    def fewer(n: int) -> bool:
        nonlocal step
        step = max(1, n // 2)
        return n > 1

    return torch.cat([*in_batches(lambda chosen: product(rows[:, chosen]), rows.shape[1], lambda _: step, fewer)], 1)
