"""`Oracle`: values and per-example gradients of a model, in batches that fit into memory.

The state of the model is restored by `state`; which output is explained is decided by `targets`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor

from smoothhess.linalg.memory import (
    BATCH_INPUTS,
    CACHED_ACTIVATIONS,
    SAVED_ACTIVATIONS,
    in_batches,
    reraise_out_of_memory,
    with_bytes_kept,
)
from smoothhess.model import targets
from smoothhess.model.capacity import Capacity, InputKind
from smoothhess.model.fast_batchnorm import QuickNorms, may_pay
from smoothhess.model.float_precision import AGREEMENT, HALVES, LARGE, SCALE, evaluated
from smoothhess.model.input_advice import OutputRowsError, advising
from smoothhess.model.input_parts import are_several
from smoothhess.model.random_operations import call_without_random_operations
from smoothhess.model.state import is_opaque

FIRST_ROWS = 32  # rows of the first pass, which measures the memory per row
LEAST_CACHED = 32  # rows of a batch on a CPU even if their activations leave the caches
TRIED_ROWS = 4  # rows on which the fast backward pass is compared with torch
MOST_ROWS = {"cpu": 4096, "cuda": 32_768}  # small batches leave a GPU idle

T = TypeVar("T")


class Oracle:
    """Values and gradients of f at many points around B inputs.

    `owner` is the index of the input that a point belongs to; it selects targets and additional arguments that are
    given per example. Gradients of all rows come from one backward pass of the summed outputs, since the output of a
    row depends only on that row.

    The number of rows that fit into memory, and whether the fast backward pass can be used, are determined once and
    stored in `capacity`, which can be shared between oracles.
    """

    def __init__(
        self,
        forward_func: Callable[..., Any],
        inputs: Tensor,
        target: Any = None,
        additional_forward_args: Any = None,
        internal_batch_size: int | None = None,
        precision: str = "float32",
        compiled: bool = False,
        capacity: Capacity | None = None,
    ) -> None:
        self.forward_func = forward_func
        self.precision = precision
        self._scales = dict(SCALE)
        self.called = torch.compile(forward_func) if compiled else forward_func
        self._inspected = compiled or is_opaque(forward_func)  # whether random operations were, or cannot be, refused
        self.batch = len(inputs)
        self.entries = targets.entries(target, self.batch)
        self._target_kind: targets.Kind = targets.kind(self.entries)
        self.indices = None if self.entries is None else self.entries.to(inputs.device)
        args = additional_forward_args
        self.args: tuple[Any, ...] = () if args is None else args if isinstance(args, tuple) else (args,)
        self._follows = [isinstance(a, Tensor) and a.ndim > 0 and len(a) == self.batch for a in self.args]
        most = MOST_ROWS.get(inputs.device.type, MOST_ROWS["cpu"])
        fitting = min(most, BATCH_INPUTS.items(inputs[0].numel() * inputs.element_size(), inputs.device))
        self._capacity = Capacity() if capacity is None or internal_batch_size is not None else capacity
        self._kind = InputKind.of(inputs, precision, compiled)
        known = self._capacity.rows(self._kind)
        self.batch_size = internal_batch_size or known or fitting
        self.measured = (internal_batch_size or known) is not None  # whether the memory per row is known
        self._checked_shape: torch.Size | None = None  # of an output that the targets were checked against
        self.n_rows = 0  # rows of forward and backward passes so far
        self._doubts: list[Tensor] = []  # largest output and gradient of calls that were not checked yet
        self._answered = False  # whether the model has returned an output that can be explained

    def __call__(self, points: Tensor, owner: Tensor, wait: bool = True) -> tuple[Tensor, Tensor]:
        """Values (N,) and gradients (N, *shape) at points (N, *shape).

        NaN and infinity raise ValueError immediately if `wait`, which synchronises the device; otherwise in the next
        `refuse_infinite`.
        """
        value, gradient = self.unchecked(points, owner)
        if wait and self.scale > 1 and not bool(gradient.abs().amax() * self.scale < LARGE):
            self._scales[self.precision] = 1.0  # gradients may overflow with the scale and not without
            value, gradient = self.in_batches(self._differentiated, points, owner)
        self._doubts.append(torch.stack([torch.linalg.vector_norm(t, torch.inf) for t in (value, gradient)]))
        if wait:
            self.refuse_infinite()
        return value, gradient

    def unchecked(self, points: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
        """Values and gradients, which may be infinite or NaN."""
        self.n_rows += len(points)
        value, gradient = self.in_batches(self._differentiated, points, owner)
        return value, gradient

    @property
    def scale(self) -> float:
        """Factor of the gradients in the backward pass."""
        return self._scales.get(self.precision, 1.0)

    def refuse_infinite(self) -> None:
        """Raise ValueError if an output or a gradient since the last check was NaN or infinite."""
        doubts, self._doubts = self._doubts, []
        if doubts:
            finite = torch.stack(doubts).isfinite().all(0)
            for fine, what in zip(finite.tolist(), ("output", "gradient"), strict=True):
                _refuse(fine, what, self.precision)

    def values(self, points: Tensor, owner: Tensor) -> Tensor:
        """Values (N,) without gradients: forward passes only."""
        with torch.no_grad():
            value = self.in_batches(lambda p, o: (self._output(p, o),), points, owner, cautious=False)[0]
        _refuse(bool(torch.isfinite(value).all()), "output", self.precision)
        return value

    def in_batches(
        self,
        evaluate: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
        points: Tensor,
        owner: Tensor,
        cautious: bool = True,
    ) -> tuple[Tensor, ...]:
        """Evaluate in batches, which are halved after an out-of-memory error; the batch size is kept for later calls.

        `cautious` starts with a small batch if the memory per row is not known yet.
        """

        def size(_: int) -> int:
            return min(self.batch_size, FIRST_ROWS) if cautious and not self.measured else self.batch_size

        found = in_batches(lambda rows: evaluate(points[rows], owner[rows]), len(points), size, self.take_fewer)
        return tuple(parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*found, strict=True))

    def take_fewer(self, rows: int, least: int = 1) -> bool:
        """Reduce the batch size to half of `rows`, which did not fit into memory.

        If half of the batch size is less than `least`, it is forgotten instead, and the result is False.
        """
        if self.batch_size < 2 * least:
            self._capacity.forget_rows(self._kind)
            return False
        self._take(max(1, min(self.batch_size, rows) // 2))
        return True

    def _take(self, rows: int) -> None:
        self.batch_size = rows
        self._capacity.keep_rows(self._kind, rows)

    def forward(self, points: Tensor, owner: Tensor) -> Tensor:
        """Return the explained output of each row, (N,)."""
        value = self._output(points, owner)
        _refuse(bool(torch.isfinite(value).all()), "output", self.precision)
        return value

    def _output(self, points: Tensor, owner: Tensor, norms: QuickNorms | None = None) -> Tensor:
        def check(output: Any, rows: int) -> None:
            _check_rows(output, rows)
            if output.shape[1:] != self._checked_shape:
                targets.check(self.entries, output)
                self._checked_shape = output.shape[1:]

        with evaluated(self.precision, points.device), norms or nullcontext():
            output = self._called_at(points, owner, check)
        if self.precision != "float32":
            output = output.to(points.dtype)
        return self.pick(output, owner)

    def _called_at(self, points: Tensor, owner: Tensor, check: Callable[[Any, int], None]) -> Tensor:
        """The output of the model, which `check` accepts; errors of the first call name a remedy where one is known."""
        call = self.bound(owner, self.called)

        def explained(points: Tensor) -> Tensor:
            output = call(points) if self._inspected else call_without_random_operations(call, points)
            check(output, len(points))
            return output

        if self._answered:
            return explained(points)
        with advising(self.forward_func, explained, points):
            output = explained(points)
        self._inspected = self._answered = True
        return output

    def _differentiated(self, points: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
        leaf = points.detach()
        if leaf.is_cuda and leaf.ndim == 4:  # convolutions are faster in this format, for weights of any format
            leaf = leaf.contiguous(memory_format=torch.channels_last)
        leaf.requires_grad_()
        norms = QuickNorms() if self._norms_are_quick(leaf, owner) else None
        value = (self._output if self.measured else self._measure)(leaf, owner, norms)
        gradient = self._gradient(value, leaf)
        if gradient is None:
            raise ValueError(
                "the output does not depend on the input through differentiable operations. Look for .detach(), numpy, "
                "torch.no_grad() or an integer step in the model; for another framework use from_gradient."
            )
        return value.detach(), gradient.detach()

    def _gradient(self, value: Tensor, leaf: Tensor) -> Tensor | None:
        if not value.requires_grad:
            return None
        scale = self.scale
        with evaluated(self.precision, leaf.device):
            (gradient,) = torch.autograd.grad(scale * value.sum(), leaf, allow_unused=True)
        return gradient if gradient is None or scale == 1 else gradient / scale

    def _norms_are_quick(self, leaf: Tensor, owner: Tensor) -> bool:
        """Whether the fast backward pass of batch norms reproduces the gradient of torch; tried once, on a few rows."""
        if not may_pay(leaf) or self.called is not self.forward_func:
            return False
        agrees = self._capacity.fast_batchnorm(self._kind)
        if agrees is None:
            few, whose, norms = leaf[:TRIED_ROWS].detach(), owner[:TRIED_ROWS], QuickNorms()
            plain, quick = few.clone().requires_grad_(), few.clone().requires_grad_()
            expected = self._gradient(self._output(plain, whose), plain)
            try:
                found = self._gradient(self._output(quick, whose, norms), quick)
            except (RuntimeError, TypeError) as error:
                reraise_out_of_memory(error)
                found = None
            agrees = False
            if norms.count and found is not None and expected is not None:
                agrees = bool((found - expected).norm() <= AGREEMENT[self.precision] * expected.norm())
            self._capacity.keep_fast_batchnorm(self._kind, agrees)
        return agrees

    def _measure(self, points: Tensor, owner: Tensor, norms: QuickNorms | None = None) -> Tensor:
        """`_output`, and set the batch size from the memory that the pass saves per row."""
        value, per_row = with_bytes_kept(lambda: self._output(points, owner, norms), len(points))
        rows = SAVED_ACTIVATIONS.items(per_row, points.device)
        if points.device.type == "cpu":
            rows = min(rows, max(LEAST_CACHED, CACHED_ACTIVATIONS.items(per_row, points.device)))
        self._take(min(self.batch_size, rows))
        self.measured = True
        return value

    def bound(self, owner: Tensor, forward_func: Callable[..., Any] | None = None) -> Callable[[Tensor], Any]:
        """The model as a function of points only, with the additional arguments of the example of each point.

        The model gets a copy of the points, because it may modify its input in place.
        """
        called = self.forward_func if forward_func is None else forward_func
        return lambda points: called(points.clone(), *self._of(owner))

    def _of(self, owner: Tensor) -> list[Any]:
        """The additional arguments of these examples."""
        each = zip(self.args, self._follows, strict=True)
        return [a.index_select(0, owner.to(a.device)) if follows else a for a, follows in each]

    def select(self, index: Tensor) -> Oracle:
        """The oracle of the inputs at `index`."""
        chosen = copy(self)
        chosen.batch, chosen.n_rows, chosen._doubts = len(index), 0, []
        chosen.entries = None if self.entries is None else self.entries[index.cpu()]
        chosen.indices = None if self.indices is None else self.indices[index]
        chosen.args = tuple(self._of(index))
        return chosen

    @property
    def most_examples(self) -> int:
        """Number of examples that fit into memory in one batch, as far as is known."""
        return self._capacity.examples(self._kind) or self.batch

    @most_examples.setter
    def most_examples(self, count: int | None) -> None:
        if count is None:  # not even one example fitted: more memory may be free next time
            self._capacity.forget_examples(self._kind)
        else:
            self._capacity.keep_examples(self._kind, count)

    def begin_again(self, rows: int, measured: bool) -> None:
        """Reset the batch size to `rows`; it is measured again if it was not `measured`."""
        self._capacity.forget_rows(self._kind)
        self.batch_size, self.measured = rows, measured
        if measured:
            self._take(rows)

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Evaluate calls in this context in the precision of the inputs, with the uncompiled model."""
        precision, called, rows = self.precision, self.called, self.batch_size
        self.precision, self.called = "float32", self.forward_func
        if precision in HALVES:
            self.batch_size = max(1, rows // 2)  # activations take twice the memory
        try:
            yield
        finally:
            self.precision, self.called = precision, called
            if self.measured:
                self._take(rows)

    def pick(self, output: Tensor, owner: Tensor) -> Tensor:
        """The scalar of each row that is explained."""
        return targets.pick(output, None if self.indices is None else self.indices[owner], self._target_kind)


def check_inputs(inputs: Any, or_ids: bool = False) -> None:
    """Raise an error unless `inputs` is one batch of finite floating-point examples, or of token ids if `or_ids`."""
    if are_several(inputs):
        raise TypeError(
            f"inputs must be one torch tensor here, got {type(inputs).__name__}: several inputs are supported by "
            "SmoothHess.attribute. Pass further inputs as additional_forward_args."
        )
    if not isinstance(inputs, Tensor):
        raise TypeError(
            "inputs must be one tensor, array or DataFrame with examples in dimension 0, got "
            f"{type(inputs).__name__}. Use torch.as_tensor; pass further inputs as additional_forward_args."
        )
    if inputs.dtype not in (torch.float32, torch.float64, *((torch.int32, torch.int64) if or_ids else ())):
        raise TypeError(
            f"inputs must be float32 or float64, got {inputs.dtype}: noise is added to them and gradients are taken. "
            "Use inputs.float(), and model.float() for a model in half precision; for token ids use TokenSmoothHess."
        )
    if inputs.ndim < 2 or inputs.numel() == 0:
        raise ValueError(
            f"inputs must be (B, …) with at least one example and one feature, got shape {tuple(inputs.shape)}. "
            "For a single example use x[None], or df.iloc[[0]] of a DataFrame."
        )
    if inputs.is_inference():
        raise ValueError(
            "inputs were made in torch.inference_mode() and cannot have gradients. Create or clone them outside."
        )
    if not torch.isfinite(inputs).all():
        raise ValueError("inputs contain NaN or infinity. Fill or drop those values first.")


def entire_outputs(oracle: Oracle, inputs: Tensor) -> Tensor:
    """The entire output of the model at its inputs, (B, …), without gradients."""
    everyone = torch.arange(len(inputs), device=inputs.device)

    def evaluate(points: Tensor, owner: Tensor) -> tuple[Tensor]:
        return (oracle._called_at(points, owner, _check_rows),)

    with torch.no_grad():
        return oracle.in_batches(evaluate, inputs, everyone, cautious=False)[0]


def _check_rows(output: Any, rows: int) -> None:
    """Raise an error unless the output of a model is a tensor with one row for each input."""
    if not isinstance(output, Tensor):
        targets.check(None, output)
    if output.ndim == 0 or len(output) != rows:
        got = f"{len(output)} rows" if output.ndim else "one number"
        raise OutputRowsError(f"the model returned {got} for {rows} inputs: expected one output per row.")


def check_batch_size(rows: int | None) -> int | None:
    """Return `internal_batch_size` if it is None or a positive integer, otherwise raise ValueError."""
    if rows is not None and (not hasattr(rows, "__index__") or rows < 1):
        raise ValueError(f"internal_batch_size must be a whole number of rows, at least 1, got {rows}.")
    return rows


def _refuse(fine: bool, what: str, precision: str) -> None:
    if fine:
        return
    if precision == "fp16":
        raise ValueError(
            f"the model's {what} is NaN or infinite with precision='fp16', which overflows at 65504. Use 'bf16', "
            "which is as fast, or 'tf32'; if the error remains, check the scale of the inputs."
        )
    raise ValueError(
        f"the model's {what} is NaN or infinite near these inputs. Check the inputs' scale, or use a smaller sigma "
        "or radius."
    )
