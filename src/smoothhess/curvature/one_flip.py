"""The closed-form one-flip Hessian of a network, and the field g̃ of which it is the expectation.

A ReLU network has ∇²f = Σ_k u_k · jump_k · Dirac(z_k − knot_k) · J_k J_kᵀ over neurons k, with pre-activation z_k, its
input gradient J_k, and u_k = ∂f/∂(output of neuron k); for a smooth activation the Dirac is replaced by a''(z_k). With
slopes and sensitivities frozen at x, each term can be averaged over the Gaussian: whitened, with j_k = LᵀJ_k and
τ_k = |j_k|,

    W₁ = Σ_k u_k E[a''(z_k + τ_k ξ)] j_k j_kᵀ,      Γ₁ = Σ_k u_k (E[a'(z_k + τ_k ξ)] − a'(z_k)) j_k.

They are exactly the Stein expectations of the field g̃(δ) = Σ_k u_k (a'(z_k + J_kδ) − a'(z_k)) J_k. Sampling ∇f − g̃
instead of ∇f and adding W₁, Γ₁ back is unbiased for every network, and has far less variance if few neurons flip at
the same time. One frozen forward pass gives every z_k + J_kδ, one frozen backward pass g̃; no Jacobian is needed. The
weights of the control variate are fitted in `control_variate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smoothhess.curvature.activation_hooks import Call, FrozenRun, Tape, freeze, is_opaque, record
from smoothhess.curvature.slope_change_moments import is_modelled, moments, second_derivative, slope_change
from smoothhess.draws.gaussian import Gaussian
from smoothhess.draws.seeding import fixed_normal
from smoothhess.linalg.low_rank import Known
from smoothhess.linalg.memory import NEURON_GRADIENTS, in_batches
from smoothhess.linalg.orthonormal import orthonormal
from smoothhess.model.gradients import Oracle
from smoothhess.model.state import modules_behind

ROUNDING = 16  # tolerance of gradients through a softmax, in units in the last place
DRIFT_PROBES, DRIFT_PARTS = 8, 4  # random vectors, and subsets of the probes, to measure the error of an estimated τ


class NoKinksError(ValueError):
    """Raised, with the reason, if the model cannot be frozen."""


@dataclass(frozen=True, eq=False)
class Expectation:
    """The whitened expectation of the field g̃ of B examples."""

    hessian: Known  # W₁, in the precision of the inputs
    gradient: Tensor  # (B, k) Γ₁, float64
    passes: float  # passes per example that it took
    layers: tuple[Tensor, ...] = ()  # (B, k, k) of each call if requested; their sum is W₁
    drift: Tensor | None = None  # (B, R, k) D v for random v, with D the error of W₁ if τ was estimated

    def spread(self, index: Tensor, count: int) -> Expectation:
        """Scatter to `count` examples: these examples are at `index`, and the others are zero."""

        def among(t: Tensor) -> Tensor:
            return t.new_zeros(count, *t.shape[1:]).index_copy(0, index, t)

        factor = None if self.hessian.factor is None else among(self.hessian.factor)
        drift = None if self.drift is None else among(self.drift)
        hessian = Known(among(self.hessian.core), factor)
        return Expectation(hessian, among(self.gradient), self.passes, tuple(map(among, self.layers)), drift)


@dataclass(frozen=True, eq=False)
class Kinks:
    """The frozen network of B examples."""

    oracle: Oracle
    inputs: Tensor  # (B, *shape)
    tape: Tape
    bent: tuple[int, ...]  # indices of the calls whose curvature is modelled
    pre: tuple[Tensor, ...]  # pre-activations at the inputs, of the bent calls
    sensitivity: tuple[Tensor, ...]  # u of the bent calls

    @staticmethod
    def see(oracle: Oracle, inputs: Tensor, value: Tensor, gradient: Tensor) -> Kinks:
        """Freeze the model at the inputs; raises NoKinksError if that does not reproduce f(x) and ∇f(x)."""
        if any(is_opaque(m) for m in [oracle.forward_func, *modules_behind(oracle.forward_func)]):
            raise NoKinksError("the model is scripted or compiled, so its activations cannot be seen")
        owner = torch.arange(len(inputs), device=inputs.device)
        tape = record(oracle.bound(owner), inputs)
        bent = tuple(i for i, call in enumerate(tape.calls) if is_modelled(call))
        if not bent:
            raise NoKinksError("no ReLU-like or smooth activation was seen in the model")
        if any(call.pre.shape[0] != len(inputs) for call in tape.calls):
            raise NoKinksError("an activation does not have the examples in dimension 0")
        leaf = inputs.detach().requires_grad_()
        try:
            with torch.enable_grad():
                run = freeze(oracle.bound(owner), tape, leaf)
        except ValueError as error:
            raise NoKinksError(str(error)) from error
        output = oracle.pick(run.output, owner)
        wanted = [leaf, *(run.post[i] for i in bent)]
        own, *sensitivity = torch.autograd.grad(
            output.sum(), wanted, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        through = own.detach()
        if maps := [(run.pre[i], u) for i, u in zip(bent, sensitivity, strict=True) if tape.calls[i].kind == "map"]:
            # In a saturated softmax large gradients cancel, and the difference may consist of rounding errors.
            (through,) = torch.autograd.grad(torch.stack([(u.abs() * pre).sum() for pre, u in maps]).sum(), leaf)
        rounding = ROUNDING * torch.finfo(own.dtype).eps * through
        if not (torch.allclose(output, value, rtol=1e-3, atol=1e-5) and _close(own, gradient, slack=rounding)):
            raise NoKinksError("freezing the activations does not reproduce f(x) and its gradient")
        pre = tuple(run.pre[i].detach() for i in bent)
        kinks = Kinks(oracle, inputs, tape, bent, pre, tuple(u.detach() for u in sensitivity))
        if not kinks._is_affine(owner):
            raise NoKinksError("products of activations (attention, gates) are not affine when they are frozen")
        return kinks

    def _is_affine(self, owner: Tensor) -> bool:
        """Whether frozen pre-activations are affine in the input; otherwise W₁ is not the expectation of g̃."""
        shape = self.inputs[0].shape
        delta = fixed_normal(*shape).to(self.inputs)
        delta = delta / delta.norm() * self._reach.reshape(-1, *[1] * len(shape))
        points = torch.stack([self.inputs + delta, self.inputs - delta], 1)
        with torch.no_grad():
            run = self._frozen(points.flatten(0, 1), owner.repeat_interleave(2))
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

    def price(self, k: int, probes: int | None = None) -> float:
        """Passes per example that `expectation` takes in k dimensions."""
        if probes is not None:
            return (k / 2 if self._stored(k) else k) + probes / 2 + DRIFT_PROBES * (1 + DRIFT_PARTS) / 2
        return k / 2 if self._stored(k) else 1.5 * k

    def _stored(self, k: int) -> bool:
        """Whether all j_k of an example are kept; otherwise W₁ takes one more pass per column."""
        return self._gradient_bytes(k) <= NEURON_GRADIENTS.on(self.inputs.device)

    def _gradient_bytes(self, k: int) -> int:
        return self.neurons * k * self.inputs.element_size()

    # --- the field g̃ ---------------------------------------------------------------------------------------------

    def flips(self, points: Tensor, index: Tensor, mirrored: bool) -> tuple[Tensor, Tensor]:
        """Odd and even part of g̃ at points (b, n, *shape) of the examples at `index`, each of that shape.

        If not `mirrored`, both are g̃ itself. The frozen network is affine, so the mirror image of a point needs no
        additional forward pass.
        """
        return self.select(index).own_flips(points, index, mirrored)

    def own_flips(self, points: Tensor, owner: Tensor, mirrored: bool) -> tuple[Tensor, Tensor]:
        """`flips` for all examples of this object; `owner` are their indices in the oracle."""
        found = in_batches(
            lambda rows: self._flips(points[:, rows], owner, mirrored),
            points.shape[1],
            lambda _: max(1, self.oracle.batch_size // len(points)),
            lambda n: self.oracle.take_fewer(n * len(points), least=len(points)),
        )
        odd, even = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
        return odd, even

    def _flips(self, points: Tensor, owner: Tensor, mirrored: bool) -> tuple[Tensor, Tensor]:
        b, n = points.shape[:2]
        leaf = points.flatten(0, 1).detach().requires_grad_()
        run = self._frozen(leaf, owner.repeat_interleave(n))
        odd, even = leaf.new_zeros(()), leaf.new_zeros(())
        for i, call, pre, u in zip(self.bent, self.calls, self.pre, self.sensitivity, strict=True):
            grouped = run.pre[i].unflatten(0, (b, n))
            moved, centre = grouped.detach(), pre[:, None]
            if call.kind == "map":
                odd = odd + (second_derivative(call, pre, u, moved - centre) * grouped).sum()
                continue
            there = slope_change(call, moved, centre) * u[:, None]
            if mirrored:
                back = slope_change(call, 2 * centre - moved, centre) * u[:, None]
                even = even + ((there + back) / 2 * grouped).sum()
                there = (there - back) / 2
            odd = odd + (there * grouped).sum()
        wanted = [odd, even] if mirrored else [odd]
        gradients = [
            torch.autograd.grad(total, leaf, retain_graph=i + 1 < len(wanted), allow_unused=True)[0]
            if total.requires_grad
            else None
            for i, total in enumerate(wanted)
        ]
        filled = [torch.zeros_like(points) if g is None else g.reshape(points.shape) for g in gradients]
        return filled[0], filled[-1]

    # --- expectation of g̃ ----------------------------------------------------------------------------------------

    def expectation(
        self, gaussian: Gaussian, layers: bool = False, probes: Tensor | None = None, index: Tensor | None = None
    ) -> Expectation:
        """W₁ and Γ₁ of all examples or of those at `index`; `layers` adds the contribution of each layer.

        τ is exact unless white `probes` (n, k) are given to estimate it: τ² ≈ mean (j·v)² has a relative error of about
        √(2/n), which biases W₁; `drift` measures the bias along random vectors.
        """
        k = gaussian.rank(self.inputs[0].numel())
        batch = NEURON_GRADIENTS.items(self._gradient_bytes(k), self.inputs.device)
        everyone = torch.arange(len(self.inputs), device=self.inputs.device) if index is None else index

        def some(examples: slice) -> Expectation:
            return self.select(everyone[examples])._expectation(gaussian, everyone[examples], layers, probes)

        def fewer(n: int) -> bool:
            nonlocal batch
            if n == 1:  # reduce the number of examples, then the batch size
                return self.oracle.take_fewer(self.oracle.batch_size)
            batch = -(-n // 2)
            return True

        parts = [*in_batches(some, len(everyone), lambda _: batch, fewer)]
        split = [torch.stack(p.layers) for p in parts if p.layers]  # (calls, b, k, k) each
        return Expectation(
            Known.cat([p.hessian for p in parts]),
            torch.cat([p.gradient for p in parts]),
            parts[0].passes,
            tuple(torch.cat(split, 1)) if split else (),
            None if probes is None else torch.cat([p.drift for p in parts if p.drift is not None]),
        )

    def _expectation(self, gaussian: Gaussian, owner: Tensor, layers: bool, probes: Tensor | None) -> Expectation:
        k = gaussian.rank(self.inputs[0].numel())
        passes = self.price(k, None if probes is None else len(probes))
        squares, drift = None, None
        if probes is not None:
            moved = self.moves(gaussian, probes, owner).double().square()
            squares = moved.mean(1)
            drift = self._drift(gaussian, owner, [part.mean(1) for part in moved.chunk(DRIFT_PARTS, 1)])
        if self._stored(k):
            j = torch.cat(list(self._all_columns(gaussian, owner)), 1)  # (b, k, units)
            bend, lean = self.weights((_squares(j) if squares is None else squares).sqrt())
            weighted = self.curved(j, bend)
            parts = ()
            if layers:
                parts = tuple(c @ w.mT for c, w in zip(self.per_call(j), self.per_call(weighted), strict=True))
            gradient = (j @ lean[..., None].to(j))[..., 0].double()
            return Expectation(Known(j @ weighted.mT), gradient, passes, parts, drift)
        squares = self.squares(gaussian, owner) if squares is None else squares
        bend, lean = self.weights(squares.sqrt())
        count = len(self.bent) if layers else 1
        hessians = self.inputs.new_zeros(count, len(owner), k, k)
        start = 0
        for part in self._all_columns(gaussian, owner):
            stop = start + part.shape[1]
            weighted = self.curved(part, bend)
            for layer in range(count):
                chosen = self._only(weighted, layer) if layers else weighted
                hessians[layer, :, start:stop] = gaussian.pull(self.back(chosen, owner))
            start = stop
        gradient = gaussian.pull(self.back(lean[:, None], owner))[:, 0].double()
        hessians = (hessians + hessians.mT) / 2
        return Expectation(Known(hessians.sum(0)), gradient, passes, tuple(hessians) if layers else (), drift)

    def thin_price(self, rank: int, probes: int) -> float:
        """Passes per example that `thin_expectation` takes."""
        return 2 * rank + probes / 2

    def thin_expectation(
        self, gaussian: Gaussian, probes: Tensor | None, directions: Tensor, index: Tensor | None = None
    ) -> Expectation:
        """A low-rank approximation of W₁, for dimensions in which no dense matrix is formed.

        With Q a basis of W₁Ω for random directions Ω (q, k), it is QQᵀW₁ + W₁QQᵀ − QQᵀW₁QQᵀ: 2q products. τ is
        estimated from `probes`, so the result is an approximation and Γ₁ is not computed, which is sufficient for a
        linear control variate. Without probes τ is exact, for k/2 passes.
        """
        everyone = torch.arange(len(self.inputs), device=self.inputs.device) if index is None else index
        found = [self.select(owner)._thin(gaussian, probes, directions, owner) for owner in everyone.split(1)]
        k = gaussian.rank(self.inputs[0].numel())
        nothing = torch.zeros(len(everyone), k, dtype=torch.float64, device=self.inputs.device)
        price = self.thin_price(len(directions), k if probes is None else len(probes))
        return Expectation(Known.cat(found), nothing, price)

    def _thin(self, gaussian: Gaussian, probes: Tensor | None, directions: Tensor, owner: Tensor) -> Known:
        """The low-rank W₁ of one example."""
        step = max(1, self.oracle.batch_size)
        if probes is None:
            squares = self.squares(gaussian, owner)
        else:
            squares = torch.stack([_squares(self.moves(gaussian, part, owner)) for part in probes.split(step)])
            squares = squares.sum(0) / len(probes)
        bend, _ = self.weights(squares.sqrt())

        def times(vectors: Tensor) -> Tensor:
            return torch.cat([self.product(gaussian, bend, part, owner)[0] for part in vectors.split(step)])

        basis = orthonormal(times(directions))  # (q, k)
        turned = times(basis)
        inner = basis @ turned.mT
        inner = (inner + inner.mT) / 2
        one = torch.eye(len(basis)).to(inner)
        core = torch.cat([torch.cat([-inner, one], 1), torch.cat([one, torch.zeros_like(one)], 1)])
        return Known(core[None], torch.cat([basis, turned])[None])

    def _drift(self, gaussian: Gaussian, owner: Tensor, squares: Sequence[Tensor]) -> Tensor:
        """Deviation of the W₁ of each subset of the probes from their mean, along random vectors, (b, R, k).

        Scaled so that its mean square over the R rows is that of the error of W₁ from all probes.
        """
        k = gaussian.rank(self.inputs[0].numel())
        moved = self.moves(gaussian, fixed_normal(DRIFT_PROBES, k), owner)
        bends = torch.stack([self.weights(part.sqrt())[0] for part in squares])
        off = ((bends - bends.mean(0)) / (len(squares) - 1) ** 0.5).to(moved)
        return torch.cat([gaussian.pull(self.back(moved * part[:, None], owner)).double() for part in off], 1)

    def product(self, gaussian: Gaussian, bend: Tensor, vectors: Tensor, owner: Tensor | None = None) -> Tensor:
        """W₁ v for whitened vectors (n, k) without forming W₁, (B, n, k): a frozen pass each; `bend` from `weights`."""
        owner = torch.arange(len(self.inputs), device=self.inputs.device) if owner is None else owner
        return gaussian.pull(self.back(self.curved(self.moves(gaussian, vectors, owner), bend), owner))

    def squares(self, gaussian: Gaussian, owner: Tensor, columns: range | None = None) -> Tensor:
        """τ² of every neuron, Σ (j_k · e_i)² over all white directions e_i or those in `columns`, (b, units) float64.

        It takes one forward pass per direction, in chunks; only the sum is kept.
        """
        total = torch.zeros(len(owner), self.neurons, dtype=torch.float64, device=self.inputs.device)
        for part in self._all_columns(gaussian, owner, columns):
            total += _squares(part)
        return total

    def _all_columns(self, gaussian: Gaussian, owner: Tensor, columns: range | None = None) -> Iterator[Tensor]:
        k = gaussian.rank(self.inputs[0].numel())
        columns = range(k) if columns is None else columns
        step = max(1, self.oracle.batch_size // len(owner))
        for start in range(columns.start, columns.stop, step):
            stop = min(start + step, columns.stop)
            unit = torch.zeros(stop - start, k, dtype=self.inputs.dtype, device=self.inputs.device)
            unit[torch.arange(stop - start), torch.arange(start, stop)] = 1
            yield self.moves(gaussian, unit, owner)

    def moves(self, gaussian: Gaussian, directions: Tensor, owner: Tensor) -> Tensor:
        """j_k · v of every neuron for whitened directions v (c, k), (b, c, units), by frozen, hence affine, passes."""
        x = self.inputs
        shift = gaussian.colour(directions.to(x))
        length = shift.norm(dim=1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
        reach = self._reach[:, None, None]  # independent of σ: exact for an affine function, and limits rounding errors
        with torch.no_grad():
            points = x[:, None] + (reach * shift / length).reshape(len(x), -1, *x.shape[1:])
            run = self._frozen(points.flatten(0, 1), owner.repeat_interleave(len(directions)))
            moved = [
                (run.pre[i].unflatten(0, points.shape[:2]) - p[:, None]).reshape(*points.shape[:2], -1)
                for i, p in zip(self.bent, self.pre, strict=True)
            ]
        return torch.cat(moved, 2).mul_(length / reach)

    def curved(self, moves: Tensor, bend: Tensor) -> Tensor:
        """Second derivatives of the calls, times u, applied to moves (b, c, units)."""
        turned = moves * bend[:, None].to(moves)
        if all(call.kind != "map" for call in self.calls):
            return turned
        weighted = list(self.per_call(turned))
        for n, (call, pre, u, part) in enumerate(
            zip(self.calls, self.pre, self.sensitivity, self.per_call(moves), strict=True)
        ):
            if call.kind == "map":
                shaped = part.unflatten(2, pre.shape[1:])
                weighted[n] = second_derivative(call, pre, u, shaped).flatten(2)
        return torch.cat(weighted, 2)

    def back(self, weights: Tensor, owner: Tensor) -> Tensor:
        """Σ_k weights_k J_k for each row of (b, c, units), (b, c, d)."""
        x = self.inputs
        b, c = weights.shape[:2]
        leaf = x.repeat_interleave(c, 0).requires_grad_()
        run = self._frozen(leaf, owner.repeat_interleave(c))
        total = leaf.new_zeros(())
        for i, part in zip(self.bent, self.per_call(weights), strict=True):
            total = total + (part.flatten(0, 1).to(leaf) * run.pre[i].reshape(b * c, -1)).sum()
        return torch.autograd.grad(total, leaf)[0].reshape(b, c, -1)

    def weights(self, tau: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of j_k j_kᵀ in W₁ and of j_k in Γ₁, (b, units) each; zero for neurons with τ_k = 0."""
        bend, lean = [], []
        for call, pre, u, t in zip(self.calls, self.pre, self.sensitivity, self.per_call(tau), strict=True):
            found = None if call.kind == "map" else moments(call, pre, t.reshape(pre.shape))
            if call.kind != "map" and found is None:
                raise NoKinksError(f"the curvature of a {call.kind} call could not be averaged over this Gaussian")
            both = (torch.zeros_like(t), torch.zeros_like(t)) if found is None else [f.reshape(t.shape) for f in found]
            bend.append(both[0] * u.double().reshape(t.shape))
            lean.append(both[1] * u.double().reshape(t.shape))
        return torch.cat(bend, 1), torch.cat(lean, 1)

    def chances(self, gaussian: Gaussian) -> tuple[Tensor, Tensor]:
        """Expected number of neurons that flip, and a bound of ‖W₁‖_F, (B,) each; k/2 passes per example."""
        owner = torch.arange(len(self.inputs), device=self.inputs.device)
        tau = self.squares(gaussian, owner).sqrt()
        total = torch.zeros(len(self.inputs), dtype=torch.float64, device=self.inputs.device)
        for call, pre, t in zip(self.calls, self.pre, self.per_call(tau), strict=True):
            for knot, _ in call.knots:
                gap = (pre.double().reshape(len(pre), -1) - knot).abs()
                margin = gap / t.clamp_min(torch.finfo(torch.float64).tiny)
                total += torch.where(t > 0, torch.special.ndtr(-margin), 0.0).sum(1)
        bend, _ = self.weights(tau)
        return total, (bend.abs() * tau.square()).sum(1)

    # --- selection of calls and examples --------------------------------------------------------------------------

    def per_call(self, units: Tensor) -> tuple[Tensor, ...]:
        """Split (…, units) into the neurons of each call."""
        return units.split([p[0].numel() for p in self.pre], -1)

    def _only(self, units: Tensor, layer: int) -> Tensor:
        """(…, units) with the neurons of all other calls set to zero."""
        kept = [t if n == layer else torch.zeros_like(t) for n, t in enumerate(self.per_call(units))]
        return torch.cat(kept, -1)

    def select(self, index: Tensor) -> Kinks:
        """The examples at `index`."""
        if len(index) == len(self.inputs) and torch.equal(index, torch.arange(len(index), device=index.device)):
            return self

        def rows(t: Tensor | None) -> Tensor | None:
            return t if t is None or t.shape[0] != self.tape.batch else t[index]

        calls = tuple(
            replace(c, pre=c.pre[index], slope=rows(c.slope), offset=rows(c.offset), indices=rows(c.indices))
            for c in self.tape.calls
        )
        return Kinks(
            self.oracle,
            self.inputs[index],
            Tape(calls, len(index), None),
            self.bent,
            tuple(p[index] for p in self.pre),
            tuple(u[index] for u in self.sensitivity),
        )

    def _frozen(self, points: Tensor, owner: Tensor) -> FrozenRun:
        return freeze(self.oracle.bound(owner), self.tape, points)


def _squares(moves: Tensor) -> Tensor:
    """Σ over directions of (j_k · v)², accumulated in float64, (b, units)."""
    return moves.square().sum(1, dtype=torch.float64)


def _close(a: Tensor, b: Tensor, scale: Tensor | None = None, slack: Tensor | None = None) -> bool:
    """Whether a and b agree for every example, to a thousandth of b or of `scale`, plus `slack`."""
    size = (b if scale is None else scale).reshape(len(b), -1).norm(dim=1)
    more = 0 if slack is None else slack.reshape(len(b), -1).norm(dim=1)
    return bool(((a - b).reshape(len(b), -1).norm(dim=1) <= 1e-3 * size + 1e-6 + more).all())
