"""Diagnosis of a model before sampling: is its Hessian zero, which layers have curvature, and which σ are usable?

The usable σ are found from the odd half-difference of the gradient, o(σ) = |Lᵀ(∇f(x + σδ) − ∇f(x − σδ))|/2, along the
same directions δ at every σ. It grows like σ where f is smooth, and like √σ where many kinks are crossed independently.
Where σ is too small it is dominated by rounding, or no kink is crossed; where σ is too large it stops growing, and Ĥ
falls like 1/σ. The shares of the layers are those of the closed form W₁ (`smoothhess.curvature.one_flip`), computed
matrix-free.

This module measures and reports; it does not estimate H, which `smooth_hess` does. Warnings about a finished estimate
are in `result_warnings`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from smoothhess.curvature.activation_hooks import Call, OtherPathError, record
from smoothhess.curvature.frozen_network import NoKinksError, intercepted
from smoothhess.curvature.one_flip import Kinks
from smoothhess.draws.designs import pilot_rows
from smoothhess.draws.gaussian import Gaussian, Isotropic
from smoothhess.linalg.memory import FLOAT64_CHUNK, reraise_out_of_memory
from smoothhess.model.gradients import Oracle, check_batch_size, check_inputs
from smoothhess.model.state import borrowed, is_opaque, modules_behind

MULTIPLES = torch.logspace(-3, 3, 13, dtype=torch.float64)  # of the given Gaussian
ASKED = len(MULTIPLES) // 2
EXACT_RANK, TAU_PROBES = 512, 64  # dimensions up to which τ² = |j|² is exact; random probes that estimate it above
HVP_DIRECTIONS = 4
MARGIN = 10.0  # a half-difference counts if it exceeds the rounding noise by this factor
SATURATED = 0.25  # slope of log o against log σ: half of the slope of independent kinks
LOST = 0.1  # share of the noise lost in x + δ above which `attribute` raises
NEGLIGIBLE = 0.1  # expected flips below which flips do not explain a change of the gradient over a tiny step
PIECEWISE_LINEAR = frozenset({"relu", "leaky_relu", "prelu", "hardtanh", "clamp", "abs", "max_pool"})

GOOD, SATURATES, INFINITE, NOISE, FEW, ROUNDED = range(6)  # states of one σ of the grid
_SAYS = {
    GOOD: "lies inside the good range",
    SATURATES: "is too large: the gradient's change hardly grows with σ any more",
    INFINITE: "is too large: values or gradients are not finite there",
    NOISE: f"is too small: most draws change the gradient by less than {MARGIN:g} times its rounding",
    FEW: "is too small: a draw meets less than one kink on average",
    ROUNDED: f"is too small: adding such noise to the inputs loses over {LOST:.0%} of it to rounding",
}


@dataclass(frozen=True, eq=False)
class Activation:
    """One activation call of the forward pass; (B,) tensors, NaN where a number does not apply."""

    name: str  # of the module that made it
    kind: str  # as in `smoothhess.curvature.activation_hooks`
    units: int
    active: Tensor  # share of units with slope ≠ 0 (relu, hardtanh, clamp) or with a positive pre-activation
    flips: Tensor  # Σ Φ(−|z − knot|/τ): expected number of units that cross a knot in one draw
    share: Tensor  # ⟨W, W₁⟩/‖W₁‖² of the call's part W of the one-flip Hessian; the shares of all calls add up to 1


@dataclass(frozen=True, eq=False, repr=False)
class Diagnosis:
    """The findings of `diagnose` for B examples, on the CPU; print it for a report."""

    calls: tuple[Activation, ...]
    unseen: str  # why the calls, or their shares, could not be recorded; empty if they were
    own_hessian: tuple[str, ...]  # "zero", "nonzero" or "undecided", of each example
    own_curvature: Tensor  # (B,) root mean square of |LᵀHLz| by double backward; NaN if that fails
    why: str  # evidence for own_hessian
    scales: Tensor  # (S,) of the grid: σ, or multiples of a Gaussian that is not isotropic
    odd: Tensor  # (B, S) mean of o over the pairs
    noise: Tensor  # (B,) rounding error of o
    flips: Tensor  # (B, S) expected number in one draw; NaN where it cannot be computed
    lower: Tensor  # (B,) lower end of the good range, in units of scales; NaN if it lies outside of the grid
    upper: Tensor  # (B,) upper end of the good range, likewise
    inside: Tensor  # (B,) whether the given Gaussian lies in the good range
    verdict: tuple[str, ...]  # one sentence per example
    n_passes: float  # work per example, in gradient calls

    def __str__(self) -> str:
        own = " / ".join(f"{word} ({self.own_hessian.count(word)})" for word in sorted(set(self.own_hessian)))
        lines = [f"Own Hessian: {own if ' / ' in own else self.own_hessian[0]}. {self.why}"]
        if self.calls:
            table = [("call", "kind", "units", "active", "flips/draw", "share of H₁"), *map(_cells, self.calls)]
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        if self.calls and self.unseen:
            lines.append(f"The shares of the layers are unknown: {self.unseen}.")
        for i, line in enumerate(self.verdict):
            lines.append(f"Verdict{f' {i}' if len(self.verdict) > 1 else ''}: {line}")
        return "\n".join([*lines, f"Cost: {self.n_passes:.0f} passes per example."])

    __repr__ = __str__


def diagnose(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    sigma: Any = None,
    radius: float | None = None,
    gaussian: Gaussian | None = None,
    n_pairs: int = 16,
    seed: int = 0,
    internal_batch_size: int | None = None,
) -> Diagnosis:
    """Determine whether ∇²f is zero around each input, which activation calls have curvature, and which σ are usable.

    Args:
        forward_func: the model, as in `SmoothHess`.
        inputs, target, additional_forward_args, sigma, radius, gaussian, internal_batch_size: as in
            `SmoothHess.attribute`.
        n_pairs: ± pairs of points at which gradients are compared, for each σ of a grid around the given one.
        seed: seed of these points.

    Returns:
        A `Diagnosis`; print it for a report.

    Raises:
        ValueError: if `n_pairs` is less than 2.

    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 40), torch.nn.ReLU(), torch.nn.Linear(40, 1)).double()
    >>> found = diagnose(net, torch.ones(1, 3).double(), sigma=1e-6)
    >>> found.own_hessian, found.calls[0].name, found.inside.item(), "is too small" in str(found)
    (('zero',), '1 (ReLU)', False, True)
    """
    check_inputs(inputs)
    if isinstance(n_pairs, bool) or not hasattr(n_pairs, "__index__") or n_pairs < 2:
        raise ValueError(f"n_pairs must be a whole number of ± pairs, at least 2, got {n_pairs!r}. 16 are enough.")
    x = inputs.detach()
    gaussian = Gaussian.ensure(sigma=sigma, radius=radius, gaussian=gaussian, d=x[0].numel())
    gaussian = gaussian.to(x.device, x.dtype)
    k = gaussian.rank(x[0].numel())
    oracle = Oracle(forward_func, x, target, additional_forward_args, check_batch_size(internal_batch_size))
    z = pilot_rows(seed, n_pairs if k <= EXACT_RANK else max(n_pairs, TAU_PROBES), k).to(x)  # (≥ n_pairs, k)
    with borrowed(forward_func, x.device):
        value, gradient = oracle(x, torch.arange(len(x), device=x.device))
        model = _look_inside(oracle, x, value, gradient, gaussian, z, n_pairs)
        curvature, refusal = _double_backward(oracle, x, gaussian, z[:HVP_DIRECTIONS])
        line = _Line.measure(oracle, x, gaussian, z[:n_pairs], gradient, seed)
        flips = torch.stack([model.flips(m.expand(len(x))) for m in MULTIPLES], 1)
    own = _own_hessian(model, curvature, line)
    states = _states(model, own, line, flips)
    scales = MULTIPLES * (gaussian.sigma if isinstance(gaussian, Isotropic) else 1.0)
    label = f"σ = {gaussian.sigma:.3g}" if isinstance(gaussian, Isotropic) else "the given Gaussian"
    ends = torch.tensor([_ends(row, scales) for row in states.tolist()], dtype=torch.float64)
    return Diagnosis(
        calls=model.calls,
        unseen=model.unseen,
        own_hessian=own,
        own_curvature=curvature,
        why=_why(model, own, curvature, refusal),
        scales=scales,
        odd=line.odd.mean(2),
        noise=line.noise,
        flips=flips,
        lower=ends[:, 0],
        upper=ends[:, 1],
        inside=states[:, ASKED] == GOOD,
        verdict=tuple(_verdict(label, *pair, scales) for pair in zip(states.tolist(), ends.tolist(), strict=True)),
        n_passes=oracle.n_rows / len(x) + model.passes + 2 * HVP_DIRECTIONS,
    )


# --- activation calls of the model ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Model:
    """The activation calls of the model that could be recorded."""

    calls: tuple[Activation, ...]
    unseen: str
    tau: tuple[tuple[Call, Tensor], ...]  # calls with knots, and τ of their units (B, units)
    passes: float

    @property
    def piecewise_linear(self) -> bool:
        return bool(self.calls) and all(call.kind in PIECEWISE_LINEAR for call in self.calls)

    def flips(self, multiple: Tensor) -> Tensor:
        """Expected number in one draw at multiples (B,) of the Gaussian; NaN where it cannot be computed."""
        counts = [_flips(call, tau, multiple) for call, tau in self.tau]
        return torch.stack(counts).sum(0) if counts else torch.full_like(multiple, math.nan, dtype=torch.float64)


def _look_inside(
    oracle: Oracle, x: Tensor, value: Tensor, gradient: Tensor, gaussian: Gaussian, z: Tensor, n_probes: int
) -> _Model:
    """Record the calls, and compute their expected flips and shares of W₁."""
    if is_opaque(oracle.forward_func):
        return _Model((), "the model is scripted or compiled, which hides its activation calls", (), 0)
    forward = oracle.bound(torch.arange(len(x), device=x.device))
    try:
        with intercepted(lambda: forward(x)):
            recorded = record(forward, x).calls
    except NoKinksError as error:
        return _Model((), str(error), (), 0.5)
    if not recorded:
        reason = "no activation call was seen (other framework, fused or hand-written operations, or none at all)"
        return _Model((), reason, (), 0.5)
    calls = [_activation(call, len(x), oracle.forward_func) for call in recorded]
    try:
        kinks = Kinks.see(oracle, x, value, gradient)
        taus, shares, passes = _bending(kinks, gaussian, z, n_probes)
    except (NoKinksError, OtherPathError) as error:
        return _Model(tuple(calls), str(error), (), 2)
    one = torch.ones(len(x))
    for i, call, tau, share in zip(kinks.network.bent, kinks.network.calls, taus, shares, strict=True):
        flips = _flips(call, tau, one) if call.knots else calls[i].flips
        calls[i] = replace(calls[i], flips=flips, share=share)
    knotted = tuple((call, tau) for call, tau in zip(kinks.network.calls, taus, strict=True) if call.knots)
    return _Model(tuple(calls), "", knotted, 2 + passes)


def _activation(call: Call, batch: int, forward_func: Callable[..., Any]) -> Activation:
    roots = [dict(root.named_modules()) for root in modules_behind(forward_func)]
    module = max(roots, key=len, default={}).get(call.name) if call.name else None
    name = call.name if module is None else f"{call.name} ({type(module).__name__})"
    unknown = torch.full((batch,), math.nan, dtype=torch.float64)
    active = unknown
    if call.slope is not None:
        on = (call.slope != 0 if call.kind in ("relu", "hardtanh", "clamp") else call.pre > 0).double()
        active = on.reshape(batch, -1).mean(1).cpu() if len(on) == batch else on.mean().cpu().expand(batch)
    return Activation(name or "(the model)", call.kind, call.pre.numel() // batch, active, unknown, unknown)


def _bending(kinks: Kinks, gaussian: Gaussian, z: Tensor, n_probes: int) -> tuple[tuple[Tensor, ...], Tensor, float]:
    """τ of each nonlinear call (B, units), its share ⟨W, W₁⟩/‖W₁‖² (calls, B), and the number of passes."""
    rows = torch.eye(z.shape[1]).to(z) if z.shape[1] <= EXACT_RANK else z / math.sqrt(len(z))
    network = kinks.network
    batch_size = min(network.oracle.batch_size, FLOAT64_CHUNK.items(network.neurons * z.element_size(), z.device))
    taus, shares = [], []
    for owner in network.everyone.split(1):
        frozen = network.select(owner)
        part = Kinks(frozen)
        tau = sum(frozen.moves(gaussian, v, owner).double().square().sum(1) for v in rows.split(batch_size)) ** 0.5
        bend = part.weights(tau).bend
        total = torch.zeros(len(network.bent), dtype=torch.float64, device=z.device)
        for v in z[:n_probes].split(batch_size):
            bent = part.curved(frozen.moves(gaussian, v, owner), bend)
            turned = gaussian.pull(frozen.back(bent, owner))[0]  # W₁v, (c, k); its products give vᵀW W₁v of each call
            products = frozen.per_call(bent.double() * frozen.moves(gaussian, turned, owner).double())
            total += torch.stack([p.sum() for p in products])
        taus.append(tau)
        shares.append(total / total.sum())
    return network.per_call(torch.cat(taus)), torch.stack(shares, 1).cpu(), len(rows) / 2 + 2 * n_probes


def _flips(call: Call, tau: Tensor, multiple: Tensor) -> Tensor:
    """Σ Φ(−|z − knot|/τ) over units and knots, with τ (B, units) times `multiple` (B,)."""
    spread = tau * multiple[:, None].to(tau)
    pre = call.pre.reshape(tau.shape).to(tau)
    crossed = sum(torch.special.ndtr(-(pre - knot).abs() / spread) for knot, _ in call.knots)
    return torch.where(spread > 0, crossed, 0.0).sum(1).cpu()


# --- measurements -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Line:
    """Half-differences o of the whitened gradient along the same directions at several distances, on the CPU."""

    odd: Tensor  # (B, S, n) at the multiples
    noise: Tensor  # (B,) their rounding error
    lost: Tensor  # (B, S) largest share of a feature's noise that is lost in x + δ
    step: Tensor  # (B,) a tiny multiple of δ
    near: Tensor  # (B, 2, n) o over that step and over twice that step

    @staticmethod
    def measure(oracle: Oracle, x: Tensor, gaussian: Gaussian, z: Tensor, gradient: Tensor, seed: int) -> _Line:
        flat, eps = x.flatten(1), torch.finfo(x.dtype).eps
        delta = gaussian.colour(z)[None]  # (1, n, d)
        jitter = eps * flat[:, None] * pilot_rows(seed, len(z), flat.shape[1]).to(x)  # in the inputs' last digit
        floor = eps * gaussian.pull(gradient.flatten(1)).double().norm(dim=1).cpu()
        step = math.sqrt(eps) * (flat.norm(dim=1) / delta.norm(dim=2).mean()).clamp_min(1)
        multiples = MULTIPLES.tolist()
        return _Line(
            odd=torch.stack([_odd(oracle, x, gaussian, m * delta) for m in multiples], 1),
            noise=_odd(oracle, x, gaussian, jitter).median(1).values.clamp_min(floor),
            lost=torch.stack([_lost(flat, m * delta[0]) for m in multiples], 1),
            step=step.cpu(),
            near=torch.stack([_odd(oracle, x, gaussian, m * step[:, None, None] * delta) for m in (1, 2)], 1),
        )

    def seen(self, odd: Tensor) -> Tensor:
        """Whether most of (B, S, n) half-differences exceed the rounding error, (B, S)."""
        return (odd > MARGIN * self.noise[:, None, None]).double().mean(2) >= 0.5


def _odd(oracle: Oracle, x: Tensor, gaussian: Gaussian, delta: Tensor) -> Tensor:
    """|Lᵀ(∇f(x + δ) − ∇f(x − δ))|/2 for δ (1 or B, n, d), (B, n); NaN where f or its gradient is not finite."""
    found, n = [], delta.shape[1]

    def differentiated(points: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:  # infinite values do not raise
        leaf = points.detach().requires_grad_()
        value = oracle.pick(oracle.bound(owner)(leaf), owner)
        return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]

    for index in torch.arange(len(x), device=x.device).split(max(1, oracle.batch_size // (2 * n))):
        shift, centre = delta if len(delta) == 1 else delta[index], x[index].flatten(1)[:, None]
        points = torch.stack([centre + shift, centre - shift], 2)  # (b, n, 2, d)
        owner = index.repeat_interleave(2 * n)
        value, gradient = oracle.in_batches(differentiated, points.reshape(-1, *x.shape[1:]), owner)
        oracle.n_rows += len(owner)
        there, back = gaussian.pull(gradient.reshape(points.shape)).double().unbind(2)
        finite = value.reshape(points.shape[:3]).isfinite().all(2)
        found.append(((there - back).norm(dim=2) / 2).masked_fill(~finite, math.nan))
    return torch.cat(found).cpu()


def _lost(x: Tensor, delta: Tensor) -> Tensor:
    """Largest share of a feature's noise (n, d) that adding it to x (B, d) loses to rounding, (B,)."""
    missing = torch.stack([((row + delta) - row - delta).norm(dim=0) for row in x])  # (B, d)
    share = missing / delta.norm(dim=0).clamp_min(torch.finfo(x.dtype).tiny)
    return share.amax(1).double().cpu()


def _double_backward(oracle: Oracle, x: Tensor, gaussian: Gaussian, z: Tensor) -> tuple[Tensor, str]:
    """Root mean square of |LᵀHLz| with the model's own H, (B,), or NaN and the reason why autograd has none."""
    square = torch.zeros(len(x), dtype=torch.float64)
    everyone = torch.arange(len(x), device=x.device)
    for v in gaussian.colour(z):

        def product(points: Tensor, owner: Tensor, v: Tensor = v) -> tuple[Tensor, ...]:
            leaf = points.detach().requires_grad_()
            value = oracle.pick(oracle.bound(owner)(leaf), owner)
            (gradient,) = torch.autograd.grad(value.sum(), leaf, create_graph=True)
            along = (gradient.flatten(1) * v).sum() + 0 * leaf.sum()  # the gradient of an affine f has no graph
            return torch.autograd.grad(along, leaf)

        try:
            (turned,) = oracle.in_batches(product, x, everyone)
        except RuntimeError as error:
            reraise_out_of_memory(error)
            oracle.forward(x, everyone)  # raises if the model itself fails
            return torch.full_like(square, math.nan), str(error).strip().split("\n")[0].split(". ")[0]
        square += gaussian.pull(turned.flatten(1)).double().square().sum(1).cpu()
    return (square / len(z)).sqrt(), ""


# --- interpretation of the measurements -------------------------------------------------------------------------------


def _own_hessian(model: _Model, curvature: Tensor, line: _Line) -> tuple[str, ...]:
    """By double backward; its zero must be confirmed by gradients that do not change over a tiny step."""
    still = ~line.seen(line.near)[:, 0]
    crossed = (curvature == 0) & model.piecewise_linear & (model.flips(line.step) > NEGLIGIBLE)  # explains a change
    doubled = (line.near[:, 1] / line.near[:, 0]).median(1).values  # 2 for a smooth f, less where kinks are crossed
    return tuple(
        "nonzero" if c > 0 else "zero" if zero else "nonzero" if abs(ratio - 2) < 0.3 else "undecided"
        for c, zero, ratio in zip(curvature.tolist(), (still | crossed).tolist(), doubled.tolist(), strict=True)
    )


def _states(model: _Model, own: Sequence[str], line: _Line, flips: Tensor) -> Tensor:
    """The state of each multiple of the grid, (B, S)."""
    height = line.odd.mean(2).clamp_min(torch.finfo(torch.float64).tiny).log()
    (slope,) = torch.gradient(height, spacing=(MULTIPLES.log(),), dim=1)
    knots = sum(tau.shape[1] * len(call.knots) for call, tau in model.tau)  # at most half of them flip
    only_kinks = torch.tensor([word == "zero" for word in own]) & all(c.kind != "max_pool" for c in model.calls)
    states = torch.full(slope.shape, GOOD)
    states[slope < SATURATED] = SATURATES
    states[~line.seen(line.odd)] = NOISE
    states[(flips < min(1.0, knots / 4)) & only_kinks[:, None]] = FEW
    states[line.lost > LOST] = ROUNDED
    # o exceeded the rounding error at a smaller σ
    states[(states >= NOISE) & ((states < NOISE).cumsum(1) > 0)] = SATURATES
    states[~line.odd.isfinite().all(2)] = INFINITE
    return states


def _ends(states: Sequence[int], scales: Tensor) -> tuple[float, float]:
    """Ends of the range of good multiples nearest to the given Gaussian; NaN where it reaches the end of the grid."""
    good = [i for i, state in enumerate(states) if state == GOOD]
    low = high = min(good, key=lambda i: abs(i - ASKED), default=0)
    while low - 1 in good:
        low -= 1
    while high + 1 in good:
        high += 1
    return (
        float(scales[low]) if good and low > 0 else math.nan,
        float(scales[high]) if good and high < len(states) - 1 else math.nan,
    )


def _verdict(label: str, states: Sequence[int], ends: Sequence[float], scales: Tensor) -> str:
    first, last = (f"{float(s):.2g}" for s in (scales[0], scales[-1]))
    if min(states) >= NOISE:
        return f"{label} is too small, or f is affine: no change of the gradient at any scale from {first} to {last}."
    low = f"below {first}" if math.isnan(ends[0]) else f"{ends[0]:.2g}"
    high = f"above {last}" if math.isnan(ends[1]) else f"{ends[1]:.2g}"
    span = f"good: {low} to {high}" if GOOD in states else f"none from {first} to {last} is good"
    return f"{label} {_SAYS[states[ASKED]]} ({span})."


def _why(model: _Model, own: Sequence[str], curvature: Tensor, refusal: str) -> str:
    """The evidence about the model's own Hessian as text."""
    words = {"smooth": "a smooth activation", "map": "softmax or normalisation"}
    bent = [f"{c.name}: {words.get(c.kind, c.kind)}" for c in model.calls if c.kind not in PIECEWISE_LINEAR]
    kinds = ", ".join(dict.fromkeys(c.kind for c in model.calls))
    if not model.calls:
        seen = f"Judged by gradients only: {model.unseen}."
    elif bent:
        seen = f"Calls with a second derivative: {'; '.join(bent)}."
    else:
        seen = f"All activation calls ({kinds}) are piecewise linear, so ∇²f = 0 almost everywhere."
        if "nonzero" in own:
            seen = f"All activation calls ({kinds}) are piecewise linear: products or other operations have curvature."
    if refusal:
        numbers = f"Double backward is not possible ({refusal}); gradients over a tiny step decide."
    elif curvature.any():
        numbers = f"Double backward gives |LᵀHLz| up to {float(curvature.max()):.2g}."
    else:
        numbers = f"Double backward gives exactly 0 along {HVP_DIRECTIONS} directions."
        if own.count("zero") < len(own):
            numbers += " Yet gradients change over a tiny step: it crosses kinks, or the gradients have no derivative."
    return f"{seen} {numbers}"


def _cells(call: Activation) -> tuple[str, ...]:
    means = [float(t.nanmean()) for t in (call.active, call.flips, call.share)]
    active, flips, share = (
        "–" if math.isnan(m) else format(round(m, 4) + 0.0, form)
        for m, form in zip(means, (".0%", ".3g", ".0%"), strict=True)
    )
    return call.name, call.kind, str(call.units), active, flips, share
