"""The network with its activations frozen at the inputs: every pre-activation is then affine in the input.

This module records and freezes a model, checks that the frozen model is affine, and multiplies with the input gradients
J_k of its neurons, from the right (`moves`) and from the left (`back`), by frozen passes; no Jacobian is formed. The
interception of calls is in `activation_hooks`, the curvature of the neurons in `one_flip`, the field of their slope
changes in `flip_field`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from smoothhess.curvature.activation_hooks import Call, FrozenRun, OtherPathError, Tape, freeze, record
from smoothhess.curvature.slope_change_moments import is_modelled
from smoothhess.draws.gaussian import Gaussian
from smoothhess.draws.seeding import fixed_normal
from smoothhess.linalg.memory import reraise_out_of_memory
from smoothhess.model.gradients import Oracle
from smoothhess.model.state import is_opaque

SOFTMAX_ROUNDING = 16  # tolerance of gradients through a softmax, in units in the last place


class NoKinksError(ValueError):
    """Raised, with the reason, if the model cannot be frozen."""


@contextmanager
def intercepted(plain: Callable[[], Any], warn: bool = True) -> Iterator[None]:
    """Turn errors of a block that intercepts calls of the model into NoKinksError, and a warning if `warn`.

    `plain` calls the model without interception; if it fails too, that error is raised.
    """
    try:
        yield
    except (NoKinksError, OtherPathError):
        raise
    except Exception as error:
        reraise_out_of_memory(error)
        plain()
        reason = f"recording or freezing the activations fails ({type(error).__name__}: {error})"
        if warn:
            warnings.warn(f"{reason}, although the model itself runs: the closed form is not used.", stacklevel=2)
        raise NoKinksError(reason) from error


@dataclass(frozen=True, eq=False)
class FrozenNetwork:
    """The frozen network of B examples; "bent" calls are those whose curvature is modelled."""

    oracle: Oracle
    inputs: Tensor  # (B, *shape)
    tape: Tape
    bent: tuple[int, ...]  # indices of the bent calls
    pre: tuple[Tensor, ...]  # pre-activations at the inputs, of the bent calls
    sensitivity: tuple[Tensor, ...]  # u of the bent calls

    @staticmethod
    def see(oracle: Oracle, inputs: Tensor, value: Tensor, gradient: Tensor, warn: bool = True) -> FrozenNetwork:
        """Freeze the model at the inputs; raises NoKinksError if that does not reproduce f(x) and ∇f(x).

        `warn`: also warn if the recording itself fails.
        """
        if is_opaque(oracle.forward_func):
            raise NoKinksError("the model is scripted or compiled, so its activations cannot be seen")
        owner = torch.arange(len(inputs), device=inputs.device)
        try:
            with intercepted(lambda: oracle.bound(owner)(inputs), warn):
                return FrozenNetwork._see(oracle, inputs, owner, value, gradient)
        except OtherPathError as error:
            raise NoKinksError(str(error)) from error

    @staticmethod
    def _see(oracle: Oracle, inputs: Tensor, owner: Tensor, value: Tensor, gradient: Tensor) -> FrozenNetwork:
        tape = record(oracle.bound(owner), inputs)
        bent = tuple(i for i, call in enumerate(tape.calls) if is_modelled(call))
        if not bent:
            raise NoKinksError("no ReLU-like or smooth activation was seen in the model")
        if any(call.pre.shape[0] != len(inputs) for call in tape.calls):
            raise NoKinksError("an activation does not have the examples in dimension 0")
        leaf = inputs.detach().requires_grad_()
        with torch.enable_grad():
            run = freeze(oracle.bound(owner), tape, leaf)
        if not all(run.post[i].requires_grad for i in bent):
            raise NoKinksError("an activation is called where gradients are disabled, such as in a custom function")
        output = oracle.pick(run.output, owner)
        wanted = [leaf, *(run.post[i] for i in bent)]
        own, *sensitivity = torch.autograd.grad(
            output.sum(), wanted, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        through = own.detach()
        if maps := [(run.pre[i], u) for i, u in zip(bent, sensitivity, strict=True) if tape.calls[i].kind == "map"]:
            # In a saturated softmax large gradients cancel, and the difference may consist of rounding errors.
            (through,) = torch.autograd.grad(torch.stack([(u.abs() * pre).sum() for pre, u in maps]).sum(), leaf)
        rounding = SOFTMAX_ROUNDING * torch.finfo(own.dtype).eps * through
        if not (torch.allclose(output, value, rtol=1e-3, atol=1e-5) and _close(own, gradient, slack=rounding)):
            raise NoKinksError("freezing the activations does not reproduce f(x) and its gradient")
        pre = tuple(run.pre[i].detach() for i in bent)
        network = FrozenNetwork(oracle, inputs, tape, bent, pre, tuple(u.detach() for u in sensitivity))
        if not network._is_affine():
            raise NoKinksError("products of activations (attention, gates) are not affine when they are frozen")
        return network

    def _is_affine(self) -> bool:
        """Whether frozen pre-activations are affine in the input; otherwise W₁ is not the expectation of g̃."""
        shape = self.inputs[0].shape
        delta = fixed_normal(*shape).to(self.inputs)
        delta = delta / delta.norm() * self._reach.reshape(-1, *[1] * len(shape))
        points = torch.stack([self.inputs + delta, self.inputs - delta], 1)
        with torch.no_grad():
            run = self.run(points.flatten(0, 1), self.everyone.repeat_interleave(2))
        for i, p in zip(self.bent, self.pre, strict=True):
            if len(run.pre[i]) != 2 * len(p):
                raise NoKinksError("an activation does not have the examples in dimension 0")
            there, back = run.pre[i].unflatten(0, (len(p), 2)).unbind(1)
            if not _close(there + back - 2 * p, torch.zeros_like(p), (there - back).abs() + p.abs()):
                return False
        return True

    @property
    def _reach(self) -> Tensor:
        """A step length for which rounding of the inputs is negligible, (B,)."""
        return self.inputs.flatten(1).norm(dim=1).clamp_min(1)

    @property
    def everyone(self) -> Tensor:
        """Indices of all examples, (B,)."""
        return torch.arange(len(self.inputs), device=self.inputs.device)

    @property
    def calls(self) -> tuple[Call, ...]:
        """The bent calls."""
        return tuple(self.tape.calls[i] for i in self.bent)

    @property
    def unmodelled(self) -> str:
        """Kinds and numbers of the calls whose curvature is not modelled, as text; may be empty."""
        kinds = [c.operator or c.kind for i, c in enumerate(self.tape.calls) if i not in self.bent]
        return ", ".join(f"{kind} ({kinds.count(kind)})" for kind in dict.fromkeys(kinds))

    @property
    def neurons(self) -> int:
        """Number of neurons per example in the bent calls."""
        return sum(p[0].numel() for p in self.pre)

    # --- passes ---------------------------------------------------------------------------------------------------

    def run(self, points: Tensor, owner: Tensor) -> FrozenRun:
        """A frozen pass at points (n, *shape); `owner` (n,) are the indices of their examples in the oracle."""
        return freeze(self.oracle.bound(owner), self.tape, points)

    def moves(self, gaussian: Gaussian, directions: Tensor, owner: Tensor) -> Tensor:
        """j_k · v of every neuron for whitened directions v (c, k), (b, c, units), by frozen, hence affine, passes."""
        x = self.inputs
        shift = gaussian.colour(directions.to(x))
        length = shift.norm(dim=1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
        reach = self._reach[:, None, None]  # independent of σ: exact for an affine function, and limits rounding errors
        with torch.no_grad(), self._intercepted(owner):
            points = x[:, None] + (reach * shift / length).reshape(len(x), -1, *x.shape[1:])
            run = self.run(points.flatten(0, 1), owner.repeat_interleave(len(directions)))
            moved = [
                (run.pre[i].unflatten(0, points.shape[:2]) - p[:, None]).reshape(*points.shape[:2], -1)
                for i, p in zip(self.bent, self.pre, strict=True)
            ]
        return torch.cat(moved, 2).mul_(length / reach)

    def back(self, weights: Tensor, owner: Tensor) -> Tensor:
        """Σ_k weights_k J_k for each row of (b, c, units), (b, c, d)."""
        x = self.inputs
        b, c = weights.shape[:2]
        leaf = x.repeat_interleave(c, 0).requires_grad_()
        with self._intercepted(owner):
            run = self.run(leaf, owner.repeat_interleave(c))
            total = leaf.new_zeros(())
            for i, part in zip(self.bent, self.per_call(weights), strict=True):
                total = total + (part.flatten(0, 1).to(leaf) * run.pre[i].reshape(b * c, -1)).sum()
            return torch.autograd.grad(total, leaf)[0].reshape(b, c, -1)

    def _intercepted(self, owner: Tensor) -> AbstractContextManager[None]:
        """`intercepted` for frozen passes far from the inputs, where the model itself need not run."""
        return intercepted(lambda: self.oracle.bound(owner)(self.inputs))

    def columns(self, gaussian: Gaussian, owner: Tensor, columns: range | None = None) -> Iterator[Tensor]:
        """`moves` for all white directions e_i, or those in `columns`, in chunks."""
        k = gaussian.rank(self.inputs[0].numel())
        columns = range(k) if columns is None else columns
        step = max(1, self.oracle.batch_size // len(owner))
        for start in range(columns.start, columns.stop, step):
            stop = min(start + step, columns.stop)
            unit = torch.zeros(stop - start, k, dtype=self.inputs.dtype, device=self.inputs.device)
            unit[torch.arange(stop - start), torch.arange(start, stop)] = 1
            yield self.moves(gaussian, unit, owner)

    def squares(self, gaussian: Gaussian, owner: Tensor, columns: range | None = None) -> Tensor:
        """τ² of every neuron, Σ (j_k · e_i)² over all white directions e_i or those in `columns`, (b, units) float64.

        It takes one forward pass per direction, in chunks; only the sum is kept.
        """
        total = torch.zeros(len(owner), self.neurons, dtype=torch.float64, device=self.inputs.device)
        for part in self.columns(gaussian, owner, columns):
            total += sum_of_squares(part)
        return total

    # --- selection of calls and examples --------------------------------------------------------------------------

    def per_call(self, units: Tensor) -> tuple[Tensor, ...]:
        """Split (…, units) into the neurons of each call."""
        return units.split([p[0].numel() for p in self.pre], -1)

    def select(self, index: Tensor) -> FrozenNetwork:
        """The examples at `index`."""
        if len(index) == len(self.inputs) and torch.equal(index, self.everyone.to(index.device)):
            return self

        def rows(t: Tensor | None) -> Tensor | None:
            return t if t is None or t.shape[0] != self.tape.batch else t[index]

        calls = tuple(
            replace(c, pre=c.pre[index], slope=rows(c.slope), offset=rows(c.offset), indices=rows(c.indices))
            for c in self.tape.calls
        )
        return FrozenNetwork(
            self.oracle,
            self.inputs[index],
            Tape(calls, len(index), None),
            self.bent,
            tuple(p[index] for p in self.pre),
            tuple(u[index] for u in self.sensitivity),
        )


def sum_of_squares(moves: Tensor) -> Tensor:
    """Σ over directions of (j_k · v)², accumulated in float64, (b, units)."""
    return moves.square().sum(1, dtype=torch.float64)


def _close(a: Tensor, b: Tensor, scale: Tensor | None = None, slack: Tensor | None = None) -> bool:
    """Whether a and b agree for every example, to a thousandth of b or of `scale`, plus `slack`."""
    size = (b if scale is None else scale).reshape(len(b), -1).norm(dim=1)
    more = 0 if slack is None else slack.reshape(len(b), -1).norm(dim=1)
    return bool(((a - b).reshape(len(b), -1).norm(dim=1) <= 1e-3 * size + 1e-6 + more).all())
