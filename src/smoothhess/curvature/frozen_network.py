"""The network with its activations frozen at the inputs: every pre-activation is then affine in the input.

This module records and freezes a model, checks that the frozen model is affine, and multiplies with the input gradients
J_k of its neurons, from the right (`moves`) and from the left (`back`), by frozen passes; no Jacobian is formed. The
interception of calls is in `activation_hooks`, the curvature of the neurons in `one_flip`, the field of their slope
changes in `flip_field`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from smoothhess.curvature.activation_hooks import Call, FrozenRun, OtherPathError, Tape, freeze, record
from smoothhess.curvature.pool_windows import gaps, largest_candidates
from smoothhess.curvature.slope_change_moments import is_modelled
from smoothhess.draws.gaussian import Gaussian
from smoothhess.draws.seeding import fixed_normal
from smoothhess.linalg.memory import reraise_out_of_memory
from smoothhess.model.gradients import Oracle
from smoothhess.model.state import is_opaque

ROUNDING = 64  # tolerance of sensitivities that should be equal, in units in the last place
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
class Switches:
    """The candidates of the windows of a max-pooling call, in the flattened input of the call `source`."""

    source: int
    candidates: Tensor  # (B, windows, 3)

    def gaps(self, run: FrozenRun) -> Tensor:
        """The gaps between the candidates of each window in a frozen pass."""
        return gaps(run.pre[self.source], self.candidates)


@dataclass(frozen=True, eq=False)
class FrozenNetwork:
    """The frozen network of B examples; "bent" calls are those whose curvature is modelled."""

    oracle: Oracle
    inputs: Tensor  # (B, *shape)
    tape: Tape
    bent: tuple[int, ...]  # indices of the bent calls
    pre: tuple[Tensor, ...]  # pre-activations at the inputs, of the bent calls
    sensitivity: tuple[Tensor, ...]  # u of the bent calls
    switches: Mapping[int, Switches] = field(default_factory=dict)  # by index of a max-pooling call

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
        if not any(map(is_modelled, tape.calls)):
            raise NoKinksError("no ReLU-like or smooth activation was seen in the model")
        leaf = inputs.detach().requires_grad_()
        with torch.enable_grad():
            run = freeze(oracle.bound(owner), tape, leaf)
        # Maxima of masks and other constants, which have no gradient, remain frozen.
        varied = {i: c for i, c in enumerate(tape.calls) if c.kind != "max_pool" or run.post[i].requires_grad}
        bent = tuple(i for i, call in varied.items() if is_modelled(call))
        if any(call.pre.shape[0] != len(inputs) for call in varied.values()):
            raise NoKinksError("an activation does not have the examples in dimension 0")
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
            slopes = torch.stack([(u.abs() * pre).sum() for pre, u in maps]).sum()
            (through,) = torch.autograd.grad(slopes, leaf, retain_graph=True, allow_unused=True, materialize_grads=True)
        rounding = SOFTMAX_ROUNDING * torch.finfo(own.dtype).eps * through
        if not (torch.allclose(output, value, rtol=1e-3, atol=1e-5) and _close(own, gradient, slack=rounding)):
            raise NoKinksError("freezing the activations does not reproduce f(x) and its gradient")
        found = dict(zip(bent, (u.detach() for u in sensitivity), strict=True))
        switches = {i: _switches(tape, run, found, i) for i in bent if tape.calls[i].kind == "max_pool"}
        network = FrozenNetwork(oracle, inputs, tape, tuple(found), (), tuple(found.values()), switches)
        network = replace(network, pre=tuple(z.detach() for z in network.units(run)))
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
        for z, p in zip(self.units(run), self.pre, strict=True):
            if len(z) != 2 * len(p):
                raise NoKinksError("an activation does not have the examples in dimension 0")
            there, back = z.unflatten(0, (len(p), 2)).unbind(1)
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
        kinds = [c.operator or c.kind for c in self.tape.calls if not is_modelled(c)]
        return ", ".join(f"{kind} ({kinds.count(kind)})" for kind in dict.fromkeys(kinds))

    @property
    def neurons(self) -> int:
        """Number of neurons per example in the bent calls."""
        return sum(p[0].numel() for p in self.pre)

    def units(self, run: FrozenRun) -> tuple[Tensor, ...]:
        """The pre-activations of the bent calls in a frozen pass; of max-pooling, the gaps between candidates."""
        return tuple(self.switches[i].gaps(run) if i in self.switches else run.pre[i] for i in self.bent)

    # --- passes ---------------------------------------------------------------------------------------------------

    def run(self, points: Tensor, owner: Tensor) -> FrozenRun:
        """A frozen pass at points (n, *shape); `owner` (n,) are the indices of their examples in the oracle."""
        return freeze(self.oracle.bound(owner), self.tape, points)

    def moves(self, gaussian: Gaussian, directions: Tensor, owner: Tensor) -> Tensor:
        """j_k · v of every neuron for whitened directions v (c, k), (b, c, units), by frozen, hence affine, passes."""
        with torch.no_grad(), self._intercepted(owner):
            points, length = self._far_points(gaussian, directions)
            run = self.run(points.flatten(0, 1), owner.repeat_interleave(len(directions)))
            return self._changes(run, len(directions)).mul_(length)

    def turned(
        self, gaussian: Gaussian, directions: Tensor, owner: Tensor, curve: Callable[[Tensor], Iterable[Tensor]]
    ) -> tuple[Tensor, list[Tensor]]:
        """`moves`, and `back` of each result of `curve`, a function of them, with one forward pass for all."""
        with self._intercepted(owner):
            points, length = self._far_points(gaussian, directions)
            leaf = points.flatten(0, 1).requires_grad_()
            run = self.run(leaf, owner.repeat_interleave(len(directions)))
            moved = self._changes(run, len(directions)).detach() * length
            found = []
            for weights in curve(moved):
                (pulled,) = torch.autograd.grad(self._weighted(run, leaf, weights), leaf, retain_graph=True)
                found.append(pulled.reshape(*moved.shape[:2], -1))
            return moved, found

    def _far_points(self, gaussian: Gaussian, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Points along whitened directions (c, k), (b, c, *shape), and the factors of changes there, (b, c, 1)."""
        x = self.inputs
        shift = gaussian.colour(directions.to(x))
        length = shift.norm(dim=1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
        reach = self._reach[:, None, None]  # independent of σ: exact for an affine function, and limits rounding errors
        return x[:, None] + (reach * shift / length).reshape(len(x), -1, *x.shape[1:]), length / reach

    def _changes(self, run: FrozenRun, count: int) -> Tensor:
        """Changes of the pre-activations in a frozen pass at `count` points of each example, (b, c, units)."""
        shape = len(self.inputs), count
        each = zip(self.units(run), self.pre, strict=True)
        return torch.cat([(z.unflatten(0, shape) - p[:, None]).reshape(*shape, -1) for z, p in each], 2)

    def _weighted(self, run: FrozenRun, leaf: Tensor, weights: Tensor) -> Tensor:
        """Σ_k weights_k z_k over all rows of (b, c, units), with the pre-activations of a frozen pass at `leaf`."""
        total = leaf.new_zeros(())
        for z, part in zip(self.units(run), self.per_call(weights), strict=True):
            total = total + (part.flatten(0, 1).to(leaf) * z.reshape(len(leaf), -1)).sum()
        return total

    def back(self, weights: Tensor, owner: Tensor) -> Tensor:
        """Σ_k weights_k J_k for each row of (b, c, units), (b, c, d)."""
        x = self.inputs
        b, c = weights.shape[:2]
        leaf = x.repeat_interleave(c, 0).requires_grad_()
        with self._intercepted(owner):
            run = self.run(leaf, owner.repeat_interleave(c))
            return torch.autograd.grad(self._weighted(run, leaf, weights), leaf)[0].reshape(b, c, -1)

    def _intercepted(self, owner: Tensor) -> AbstractContextManager[None]:
        """`intercepted` for frozen passes far from the inputs, where the model itself need not run."""
        return intercepted(lambda: self.oracle.bound(owner)(self.inputs))

    def columns(self, gaussian: Gaussian, owner: Tensor, columns: range | None = None) -> Iterator[Tensor]:
        """`moves` for all white directions e_i, or those in `columns`, in chunks."""
        for unit in self.unit_directions(gaussian, owner, columns):
            yield self.moves(gaussian, unit, owner)

    def unit_directions(self, gaussian: Gaussian, owner: Tensor, columns: range | None = None) -> Iterator[Tensor]:
        """All white directions e_i, or those in `columns`, in chunks (c, k) of which `owner` make a batch."""
        k = gaussian.rank(self.inputs[0].numel())
        columns = range(k) if columns is None else columns
        step = max(1, self.oracle.batch_size // len(owner))
        for start in range(columns.start, columns.stop, step):
            stop = min(start + step, columns.stop)
            unit = torch.zeros(stop - start, k, dtype=self.inputs.dtype, device=self.inputs.device)
            unit[torch.arange(stop - start), torch.arange(start, stop)] = 1
            yield unit

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
            return t if t is None or t.shape[0] != self.tape.batch else t[index]  # constants are those of all examples

        calls = tuple(
            replace(c, pre=rows(c.pre), slope=rows(c.slope), offset=rows(c.offset), indices=rows(c.indices))
            for c in self.tape.calls
        )
        return FrozenNetwork(
            self.oracle,
            self.inputs[index],
            Tape(calls, len(index), None),
            self.bent,
            tuple(p[index] for p in self.pre),
            tuple(u[index] for u in self.sensitivity),
            {i: Switches(s.source, s.candidates[index]) for i, s in self.switches.items()},
        )


def _switches(tape: Tape, run: FrozenRun, sensitivity: dict[int, Tensor], i: int) -> Switches:
    """The switches of max-pooling call i; replaces its sensitivity by that of its gaps.

    A relu before or after max-pooling gives max(z₁, …, z_m, 0) of each window. Frozen separately, the relu would keep
    candidates at 0 that win if they rise, so the two calls are one, and the relu keeps only what other layers read.
    """
    call, u = tape.calls[i], sensitivity[i]
    assert call.indices is not None
    assert call.windows is not None
    source, floor = i, False
    relus = [n for n in (i - 1, i + 1) if n in sensitivity and tape.calls[n].kind == "relu"]
    if i - 1 in relus and _feeds(run, i - 1):
        source, floor = i - 1, True
        (pooled,) = torch.autograd.grad((run.post[i] * u).sum(), run.pre[i], retain_graph=True)
        others = sensitivity[i - 1] - pooled.view_as(sensitivity[i - 1])
        if _is_rounding(others, pooled):
            del sensitivity[i - 1]
        else:
            sensitivity[i - 1] = others
    elif i + 1 in relus and _feeds(run, i):
        after = (run.post[i + 1] * sensitivity[i + 1]).sum()
        (through,) = torch.autograd.grad(after, run.pre[i + 1], retain_graph=True)
        if _is_rounding(u - through.view_as(u), through):  # nothing else reads the maxima
            u, floor = sensitivity.pop(i + 1), True
    candidates = largest_candidates(tape.calls[source].pre, call.windows, call.indices, floor)
    sensitivity[i] = u.reshape(len(u), -1, 1).expand(candidates.shape)
    return Switches(source, candidates)


def _feeds(run: FrozenRun, i: int) -> bool:
    """Whether the output of call i is the input of the next call."""
    return torch.equal(run.post[i].flatten(1), run.pre[i + 1].flatten(1))


def _is_rounding(difference: Tensor, of: Tensor) -> bool:
    return float(difference.abs().max()) <= ROUNDING * torch.finfo(of.dtype).eps * float(of.abs().max())


def sum_of_squares(moves: Tensor) -> Tensor:
    """Σ over directions of (j_k · v)², accumulated in float64, (b, units)."""
    return moves.square().sum(1, dtype=torch.float64)


def _close(a: Tensor, b: Tensor, scale: Tensor | None = None, slack: Tensor | None = None) -> bool:
    """Whether a and b agree for every example, to a thousandth of b or of `scale`, plus `slack`."""
    size = (b if scale is None else scale).reshape(len(b), -1).norm(dim=1)
    more = 0 if slack is None else slack.reshape(len(b), -1).norm(dim=1)
    return bool(((a - b).reshape(len(b), -1).norm(dim=1) <= 1e-3 * size + 1e-6 + more).all())
