"""Model + target (or layer + neuron) → values and per-example gradients, in batches, counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor

from smoothhess.linalg.memory import ROW_BYTES, is_out_of_memory, release, room, with_bytes_kept
from smoothhess.model import targets
from smoothhess.model.fast_batchnorm import QuickNorms, may_pay
from smoothhess.model.float_precision import AGREEMENT, HALVES, LARGE, SCALE, evaluated

FIRST_ROWS = 32  # rows of the very first pass, which shows what a row takes inside the model,
TRIED_ROWS = 4  # on which another way back is compared with torch's
MOST_ROWS = {"cpu": 4096, "cuda": 32_768}  # a GPU waits for its orders when they are small

T = TypeVar("T")


class Oracle:
    """f at many points around B inputs, and its gradients.

    `owner` says which of the B inputs a point belongs to, so that targets and additional arguments given per example
    follow their example. Gradients of all rows come from one backward pass of the summed outputs: rows do not mix.

    How many rows fit into the memory, and which way back may be taken, is found once. An oracle that is given the same
    `found_out` begins with it.
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
        found_out: dict[Any, int] | None = None,
    ) -> None:
        self.forward_func = forward_func
        self.precision = precision
        self._scales = dict(SCALE)
        self.called = torch.compile(forward_func) if compiled else forward_func
        self.batch = len(inputs)
        self.entries = targets.entries(target, self.batch)
        self.indices = None if self.entries is None else self.entries.to(inputs.device)
        args = additional_forward_args
        self.args: tuple[Any, ...] = () if args is None else args if isinstance(args, tuple) else (args,)
        self._follows = [isinstance(a, Tensor) and a.ndim > 0 and len(a) == self.batch for a in self.args]
        row_bytes = max(inputs[0].numel() * inputs.element_size(), 1)
        most = MOST_ROWS.get(inputs.device.type, MOST_ROWS["cpu"])
        self._found_out = {} if found_out is None or internal_batch_size is not None else found_out
        self._kind = (inputs.shape[1:], inputs.dtype, inputs.device, precision, compiled)
        known = self._found_out.get(self._kind)
        self.batch_size = internal_batch_size or known or min(most, max(1, ROW_BYTES // row_bytes))
        self.measured = (internal_batch_size or known) is not None  # whether what a row takes in the model is known
        self.n_rows = 0  # rows that went through a forward and a backward pass
        self._doubts: list[Tensor] = []  # whether outputs and gradients are finite, of calls that were not looked at

    def __call__(self, points: Tensor, owner: Tensor, wait: bool = True) -> tuple[Tensor, Tensor]:
        """Values (N,) and gradients (N, *shape) at points (N, *shape).

        What is not finite is refused at once, which waits for the device, or else by the next `refuse_infinite`.
        """
        value, gradient = self.in_batches(self._differentiated, points, owner)
        if wait and self.scale > 1 and not bool(gradient.abs().amax() * self.scale < LARGE):
            self._scales[self.precision] = 1.0  # gradients that are, or may become, too large with it may fit without
            value, gradient = self.in_batches(self._differentiated, points, owner)
        self.n_rows += len(points)
        self._doubts.append(torch.stack([torch.isfinite(t).all() for t in (value, gradient)]))
        if wait:
            self.refuse_infinite()
        return value, gradient

    @property
    def scale(self) -> float:
        """What gradients are multiplied with on their way back."""
        return self._scales.get(self.precision, 1.0)

    def refuse_infinite(self) -> None:
        """Raise where an output or a gradient since the last time was NaN or infinite."""
        doubts, self._doubts = self._doubts, []
        if doubts:
            for fine, what in zip(torch.stack(doubts).all(0).tolist(), ("output", "gradient"), strict=True):
                _refuse(fine, what, self.precision)

    def values(self, points: Tensor, owner: Tensor) -> Tensor:
        """Values (N,) alone: forward passes, no gradients."""
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
        """As many rows at a time as the memory takes; what was found out is kept for later calls.

        `cautious` begins with few rows where it is not known yet what a row takes.
        """
        found, start = [], 0
        while start < len(points):
            most = min(self.batch_size, FIRST_ROWS) if cautious and not self.measured else self.batch_size
            rows = slice(start, start + most)
            try:
                found.append(evaluate(points[rows], owner[rows]))
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) or self.batch_size == 1:
                    self.forget()
                    raise
                self.take_fewer(min(most, len(points) - start))
                continue
            start = rows.stop
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))

    def forget(self) -> None:
        """What was found out about the memory: it may be free again next time."""
        self._found_out.pop(self._kind, None)

    def take_fewer(self, rows: int) -> None:
        """From now on at most half of these rows at once: they did not fit into the memory."""
        self._take(max(1, min(self.batch_size, rows) // 2))
        release()

    def _take(self, rows: int) -> None:
        self.batch_size = self._found_out[self._kind] = rows

    def _forward(self, points: Tensor, owner: Tensor) -> Tensor:
        value = self._output(points, owner)
        _refuse(bool(torch.isfinite(value).all()), "output", self.precision)
        return value

    def _output(self, points: Tensor, owner: Tensor, norms: QuickNorms | None = None) -> Tensor:
        with evaluated(self.precision, points.device), norms or nullcontext():
            output = self.bound(owner, self.called)(points)
        if self.precision != "float32" and isinstance(output, Tensor) and output.is_floating_point():
            output = output.to(points.dtype)
        targets.check(self.entries, output)
        if len(output) != len(points):
            raise ValueError(
                f"the model returned {len(output)} rows for {len(points)} inputs: wanted one output per row."
            )
        return self.pick(output, owner)

    def _differentiated(self, points: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
        leaf = points.detach()
        if leaf.is_cuda and leaf.ndim == 4:  # convolutions are faster so, whatever the format of their weights
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
        """Whether there are batch norms whose quicker way back leads to torch's gradient: tried once, on a few rows."""
        kind = self._kind, "norms"
        if not may_pay(leaf) or self.called is not self.forward_func:
            return False
        if kind not in self._found_out:
            few, whose, norms = leaf[:TRIED_ROWS].detach(), owner[:TRIED_ROWS], QuickNorms()
            plain, quick = few.clone().requires_grad_(), few.clone().requires_grad_()
            wanted = self._gradient(self._output(plain, whose), plain)
            try:
                found = self._gradient(self._output(quick, whose, norms), quick)
            except (RuntimeError, TypeError) as error:
                if is_out_of_memory(error):
                    raise
                found = None
            agrees = False
            if norms.count and found is not None and wanted is not None:
                agrees = bool((found - wanted).norm() <= AGREEMENT[self.precision] * wanted.norm())
            self._found_out[kind] = int(agrees)
        return bool(self._found_out[kind])

    def _measure(self, points: Tensor, owner: Tensor, norms: QuickNorms | None = None) -> Tensor:
        """As `_output`, with a batch size found from what the pass keeps for each row."""
        value, per_row = with_bytes_kept(lambda: self._output(points, owner, norms), len(points))
        self._take(max(1, min(self.batch_size, room(points.device) // per_row)))
        self.measured = True
        return value

    def bound(self, owner: Tensor, forward_func: Callable[..., Any] | None = None) -> Callable[[Tensor], Any]:
        """The model as a function of points alone, with the additional arguments of each point's example.

        A copy goes in, so that a model which works in place on its input can be explained too.
        """
        called = self.forward_func if forward_func is None else forward_func
        return lambda points: called(points.clone(), *self._of(owner))

    def _of(self, owner: Tensor) -> list[Any]:
        """The additional arguments of these examples."""
        each = zip(self.args, self._follows, strict=True)
        return [a.index_select(0, owner.to(a.device)) if follows else a for a, follows in each]

    def select(self, index: Tensor) -> Oracle:
        """The same around the inputs at `index` alone."""
        chosen = copy(self)
        chosen.batch, chosen.n_rows, chosen._doubts = len(index), 0, []
        chosen.entries = None if self.entries is None else self.entries[index.cpu()]
        chosen.indices = None if self.indices is None else self.indices[index]
        chosen.args = tuple(self._of(index))
        return chosen

    @property
    def most_examples(self) -> int:
        """As many as fitted into the memory together, as far as is known."""
        return self._found_out.get((self._kind, "examples"), self.batch)

    @most_examples.setter
    def most_examples(self, count: int | None) -> None:
        if count is None:  # not even one: it may be free again next time
            self._found_out.pop((self._kind, "examples"), None)
        else:
            self._found_out[self._kind, "examples"] = count

    def begin_again(self, rows: int, measured: bool) -> None:
        """With as many rows at once as before, found anew where they were not known."""
        self.forget()
        self.batch_size, self.measured = rows, measured
        if measured:
            self._take(rows)

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Calls inside are made with the inputs' own precision, by the model as it was given."""
        precision, called, rows = self.precision, self.called, self.batch_size
        self.precision, self.called = "float32", self.forward_func
        if precision in HALVES:
            self.batch_size = max(1, rows // 2)  # what the model keeps of a row is twice as long
        try:
            yield
        finally:
            self.precision, self.called = precision, called
            if self.measured:
                self._take(rows)

    def pick(self, output: Tensor, owner: Tensor) -> Tensor:
        """The scalar of each row that is explained."""
        return targets.pick(output, None if self.indices is None else self.indices[owner])


def check_inputs(inputs: Any) -> None:
    """Raise unless `inputs` are one batch of finite floating point examples."""
    if not isinstance(inputs, Tensor):
        raise TypeError(
            f"inputs must be one torch tensor with examples in dimension 0, got {type(inputs).__name__}. Use "
            "torch.as_tensor; pass further inputs as additional_forward_args."
        )
    if inputs.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"inputs must be float32 or float64, got {inputs.dtype}: noise is added to them and gradients are taken. "
            "Use inputs.float(); for token ids explain the embeddings."
        )
    if inputs.ndim < 2 or inputs.numel() == 0:
        raise ValueError(
            f"inputs must be (B, …) with at least one example and one feature, got shape {tuple(inputs.shape)}. "
            "For a single example use x[None]."
        )
    if inputs.is_inference():
        raise ValueError(
            "inputs were made in torch.inference_mode() and cannot carry gradients. Make or clone them outside."
        )
    if not torch.isfinite(inputs).all():
        raise ValueError("inputs contain NaN or infinity. Fill or drop those values first.")


def check_batch_size(rows: int | None) -> int | None:
    """`internal_batch_size`, after making sure that it is a number of rows."""
    if rows is not None and (not hasattr(rows, "__index__") or rows < 1):
        raise ValueError(f"internal_batch_size must be a whole number of rows, at least 1, got {rows}.")
    return rows


def _refuse(fine: bool, what: str, precision: str) -> None:
    if fine:
        return
    if precision == "fp16":
        raise ValueError(
            f"the model's {what} is NaN or infinite with precision='fp16', whose numbers end at 65504. Use 'bf16', "
            "which is as fast, or 'tf32'; if it is so with them too, check the inputs' scale."
        )
    raise ValueError(
        f"the model's {what} is NaN or infinite near these inputs. Check the inputs' scale, or use a smaller sigma "
        "or radius."
    )
