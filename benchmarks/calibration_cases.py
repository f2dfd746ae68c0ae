"""The cases of the calibration benchmark: how SmoothHess is called on each problem, and what is judged.

The problems, with their truths, are in calibration_problems.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import calibration_problems as at
from calibration_problems import Problem


@dataclass(frozen=True)
class Case:
    """One way to call SmoothHess on a problem, and what is judged."""

    name: str
    problem: Callable[[], Problem]
    options: dict[str, Any]
    read: tuple[str, ...]
    how: str = "attribute"  # "merge", "more", "closed_form"
    parts: int = 1  # seeds merged, or further calls as a multiple of n_calls
    allowed: tuple[str, ...] = ()  # kinds of warning (or "unknown") that do not count against the case
    must_warn: str = ""  # kind of warning that at least 95 % of the seeds must give
    weight: float = 1.0  # rough cost, for the order of the work
    exact: bool = False  # the estimate must be exact
    seeds_divisor: int = 1  # fewer seeds where a run is long

    @property
    def uses_pair_sd(self) -> bool:
        return self.options.get("control", "auto") is None and self.how == "attribute"


ENTRIES = ("diagonal", "off-diagonal", "row", "top pairs", "bilinear", "gradient", "value", "relative error")
GROUPS = ("groups", "groups diagonal", "group error")
FORMS = ("eigenvalues", "split pairs")  # from two blocks on
MASKED = ("masked", "masked diagonal", "masked error")


# --- the list ---------------------------------------------------------------------------------------------------------


@dataclass
class _List:
    """Collects cases; names are unique."""

    cases: dict[str, Case] = field(default_factory=dict)

    def add(self, name: str, problem: Callable[[], Problem], read: tuple[str, ...] = ENTRIES, **given: Any) -> None:
        special = {k: given.pop(k) for k in tuple(given) if k in Case.__dataclass_fields__}
        assert name not in self.cases, name
        self.cases[name] = Case(name, problem, given, read, **special)


@cache
def all_cases() -> dict[str, Case]:
    """Every case by its name, "family: what"."""
    out = _List()
    zeros = (*ENTRIES, "discoveries")
    # 1. curvature that commutes with the projector of an incomplete block
    for d, given in ((20, {"n_calls": 20}), (64, {"n_calls": 320}), (100, {}), (300, {})):
        label = f"{given['n_calls']} calls" if given else "defaults"
        out.add(f"block: ½|x|², d = {d}, {label}", partial(at.identity, d), zeros, weight=d / 30, **given)
    for r in (1, 5, 20):
        out.add(f"block: 2Π_{r}, d = 40, ½ block", partial(at.projector, 40, r), control=None, n_calls=40)
    for kind in ("five-fold", "± two-fold"):
        for d in (40, 100):
            out.add(
                f"block: traceless, {kind}, d = {d}, ½ block", partial(at.multiple, d, kind), n_calls=d, weight=d / 40
            )
    for d in (100, 300):
        out.add(f"block: PCA score, d = {d}, defaults", partial(at.pca_score, d), weight=d / 30)
    for control in (None, "auto"):
        for part, calls in (("½", 40), ("¾", 60), ("1", 80), ("2½", 200)):
            name = f"block: quadratic, d = 40, {part} block, control {control}"
            out.add(name, partial(at.general_quadratic, 40), control=control, n_calls=calls)
    for part, calls in (("½", 64), ("1", 128), ("2½", 320)):
        out.add(f"block: convex net, d = 64, {part} block", at.convex_net, control=None, n_calls=calls)
        out.add(f"block: autoencoder error, d = 64, {part} block", at.autoencoder, n_calls=calls)
    out.add("block: autoencoder error, d = 64, defaults", at.autoencoder, weight=2)
    out.add("block: convex net, d = 64, adaptive", at.convex_net, control=None, weight=3)
    for kind, size in (("quartic", 1.0), ("√(1+|x|²)", 2.0)):
        for part, calls in (("½", 30), ("1", 60), ("2", 120)):
            out.add(f"block: {kind}, d = 30, {part} block", partial(at.radial, kind, 30, 0.5, size), n_calls=calls)
        out.add(f"block: {kind}, d = 30, defaults", partial(at.radial, kind, 30, 0.5, size))
    for part, calls in (("½", 20), ("1", 40), ("5", 200)):
        out.add(f"block: log Σ exp, d = 20, {part} block", at.log_sum_exp, n_calls=calls)
    # merged parts of blocks, and blocks that are continued
    for name, problem, d in (
        ("½|x|²", partial(at.identity, 40), 40),
        ("convex net", at.convex_net, 64),
        ("MLP", at.breast, 30),
    ):
        for parts in (2, 6):
            what = f"merged: {name}, d = {d}, {parts} × ½ block"
            out.add(what, problem, how="merge", parts=parts, control=None, n_calls=d, weight=parts / 2)
        for parts in (1, 2):
            what = f"more: {name}, d = {d}, ½ block + {parts} × ½ block"
            out.add(what, problem, how="more", parts=parts, control=None, n_calls=d)
    # 2. no kink met, at.affine, discontinuous
    few = ("diagonal", "off-diagonal", "gradient", "relative error")
    for kind in ("plain", "leaky", "deep"):
        for margin in (1.0, 2.0, 3.0, 4.0) if kind == "plain" else (2.0, 4.0):
            for control, budgets in ((None, (12, 48, 240)), ("auto", (12, 240))):
                for calls in budgets if kind == "plain" else budgets[:1]:
                    name = f"no kink: {kind}, {margin:g} τ, {calls} calls, control {control}"
                    problem = partial(at.one_unit, margin, kind)
                    out.add(name, problem, few, allowed=("unknown", "zero"), control=control, n_calls=calls, weight=0.3)
    for kind in ("module", "function", "far kink"):
        out.add(f"affine: {kind}, 40 calls", partial(at.affine, kind), zeros, n_calls=40, exact=True, allowed=("zero",))
        out.add(f"affine: {kind}, defaults", partial(at.affine, kind), zeros, exact=True, allowed=("zero",))
    for linear in (False, True):
        for calls in (60, 200, 1000):
            name = f"steps: {'with' if linear else 'without'} a linear part, {calls} calls"
            out.add(name, partial(at.steps, linear), few, must_warn="jump", allowed=("unknown",), n_calls=calls)
    # 3. dense covariances
    for ridge in (0.0, 0.01):
        for design in ("orthogonal", "antithetic"):
            name = f"dense: correlated columns, ridge {ridge:g}, {design}"
            given: dict[str, Any] = {"control": None, "design": design}
            problem = partial(at.correlated, ridge)
            out.add(f"{name}, 240 calls", problem, n_calls=240, **given)
            out.add(f"{name}, tol .3", problem, tol=0.3, max_calls=4000, allowed=("budget",), weight=4, **given)
    for depth in (1, 2):
        for control in (None, "auto"):
            name = f"dense: curve CNN {depth}, control {control}"
            problem, read = partial(at.curve, depth), (*GROUPS, "gradient", "relative error")
            for label, given in (("1 block", {"n_calls": 120}), ("5 blocks", {"n_calls": 600})):
                out.add(f"{name}, {label}", problem, read, control=control, **given)
                out.add(f"{name}, feature_mask, {label}", problem, MASKED, control=control, **given)
            out.add(
                f"{name}, feature_mask, adaptive",
                problem,
                MASKED,
                control=control,
                max_calls=4000,
                allowed=("budget",),
                weight=4,
            )
    # 4. few dimensions: the check of gradients against values
    for d in (1, 2, 3):
        for calls in (200, 2000, 20_000):
            name = f"products: {'x₁²/2' if d == 1 else 'x₁x₂'}, d = {d}, {calls} calls"
            read = ("diagonal", "gradient", "value") if d == 1 else ENTRIES
            out.add(name, partial(at.product, d), read, n_calls=calls, weight=calls / 4000)
    for design in ("orthogonal", "antithetic", "iid", "sobol"):
        out.add(f"products: x₁x₂x₃, {design}, 2000 calls", at.triple_product, design=design, n_calls=2000)
        out.add(f"products: x₁x₂, {design}, 4000 calls", partial(at.product, 2), design=design, n_calls=4000)
    # 5. tau_probes, the closed form's own check, false discoveries
    for probes in (8, 32, 128):
        given = {"control": "kink", "tau_probes": probes, "n_calls": 640, "must_warn": "bias"}
        out.add(f"tau_probes: {probes}, d = 40", at.tau_net, **given)
    rare = partial(at.wine, "logit", 0.3)
    for name, problem in (
        ("wine", at.wine),
        ("wine, rare flips", rare),
        ("digits", at.digits),
        ("deep, d = 5", partial(at.deep_small, 5)),
    ):
        for calls in (128, 512):
            what = f"closed form: {name}, {calls} check calls"
            out.add(what, problem, ("closed form",), how="closed_form", check_calls=calls, allowed=("closed form",))
    for design in ("orthogonal", "antithetic", "iid", "sobol"):
        for calls in (512, 2048):
            given = {"control": None, "design": design, "n_calls": calls}
            out.add(f"discoveries: {design}, {calls} calls", at.additive_net, zeros, weight=calls / 1000, **given)
    out.add("discoveries: orthogonal, ½ block", at.additive_net, zeros, control=None, n_calls=24)
    # 6. sums over groups
    for label, problem, budgets in (
        ("edges, d = 256", at.edges, (128, 512)),
        ("CNN, 24 × 24", partial(at.image, "cnn"), (300, 1152)),
        ("pooled CNN, 24 × 24", partial(at.image, "pooled cnn"), (300, 1152)),
        ("MLP, 24 × 24", partial(at.image, "mlp"), (300, 1152)),
    ):
        for calls in budgets:
            given = {"n_calls": calls, "control": None, "weight": 8 if calls > 1000 else 3}
            out.add(f"sums: {label}, {calls} calls", problem, GROUPS, **given)
            out.add(f"sums: {label}, feature_mask, {calls} calls", problem, MASKED, **given)
    out.add(
        "sums: pooled CNN, 24 × 24, control auto, 300 calls",
        partial(at.image, "pooled cnn"),
        GROUPS,
        n_calls=300,
        weight=8,
    )
    # 7. ordinary networks
    for name, problem, d, control in (
        ("breast cancer MLP", at.breast, 30, None),
        ("wine MLP", at.wine, 13, "auto"),
        ("digits MLP", at.digits, 64, "auto"),
        ("digits MLP", at.digits, 64, None),
    ):
        for part in (0.5, 1, 2, 5):
            calls = 2 * round(part * d)
            out.add(f"healthy: {name}, control {control}, {part:g} blocks", problem, control=control, n_calls=calls)
        out.add(f"healthy: {name}, control {control}, adaptive", problem, control=control, weight=3)
    for design in ("antithetic", "iid", "orthogonal", "sobol"):
        out.add(f"healthy: wine MLP, {design}, 512 calls", at.wine, design=design, n_calls=512)
        out.add(f"healthy: breast cancer MLP, {design}, 512 calls", at.breast, control=None, design=design, n_calls=512)
    for part in (1, 5, 20):
        out.add(f"no kink: wine MLP, rare flips, {part:g} blocks", rare, n_calls=26 * part, allowed=("unknown",))
    for d in (2, 3, 5):
        out.add(f"healthy: one layer, d = {d}, 200 calls", partial(at.random_net, d), control=None, n_calls=200)
        out.add(f"healthy: two layers, d = {d}, 200 calls", partial(at.deep_small, d), n_calls=200)
        out.add(f"healthy: two layers, d = {d}, adaptive", partial(at.deep_small, d))
    for kind in ("tanh", "gelu"):
        for part in (0.5, 2, 10):
            out.add(f"healthy: {kind} net, {part:g} blocks", partial(at.smooth_net, kind), n_calls=2 * round(part * 13))
    for part in (0.5, 2, 10):
        out.add(
            f"healthy: softmax, unsaturated, {part:g} blocks",
            partial(at.wine, "softmax", 0.3),
            n_calls=2 * round(part * 13),
        )
    out.add("healthy: softmax, unsaturated, adaptive", partial(at.wine, "softmax", 0.3), weight=3)
    out.add(
        "healthy: plain antithetic, 200 pairs, shrink=False",
        at.breast,
        control=None,
        shrink=False,
        design="antithetic",
        n_calls=400,
    )
    # 8. rare flips: the expected number of flips in a run is from 20 down to 10⁻⁴
    few = (*few, "along")
    given = {"allowed": ("unknown", "zero", "few")}
    for margin in (2.5, 3.0, 3.5, 4.0, 5.0):
        unseen, seen = (partial(at.far_kink, margin, s) for s in (False, True))
        for calls in (400, 1600):
            out.add(f"rare: {margin:g} τ, black box, {calls} calls", unseen, few, n_calls=calls, **given)
        out.add(f"rare: {margin:g} τ, black box, adaptive", unseen, few, weight=2, **given)
        for control in (None, "auto"):
            out.add(
                f"rare: {margin:g} τ, control {control}, 400 calls", seen, few, control=control, n_calls=400, **given
            )
    for margin in (2.0, 2.5, 3.0, 4.0):
        for s, label in ((False, "black box"), (True, "control auto")):
            problem = partial(at.deep_pair, margin, s)
            out.add(f"deep pair: {margin:g} τ, {label}, 1000 calls", problem, few, n_calls=1000, **given)
    # 9. budgets from ¼ to 64 blocks
    budgets = ((0.25, "¼"), (1, "1"), (4, "4"), (16, "16"), (64, "64"))
    for condition in (1e2, 1e5):
        for part, label in budgets:
            name = f"ill-conditioned: {condition:.0e}, {label} blocks"
            read = (*ENTRIES, *FORMS) if part > 1 else ENTRIES
            out.add(name, partial(at.ill_conditioned, condition), read, control=None, n_calls=round(16 * part))
    net = partial(at.random_net, 12, 24)
    for design in ("orthogonal", "antithetic", "sobol", "iid"):
        for part, label in budgets:
            if design == "sobol" and part < 16:
                continue  # fewer draws than a scrambling has
            name = f"budget: {design}, {label} blocks, control None"
            read = (*ENTRIES, *FORMS) if part > 1 and design != "sobol" else ENTRIES
            out.add(name, net, read, control=None, design=design, n_calls=round(24 * part))
    for part, label in budgets[:3]:
        out.add(f"budget: orthogonal, {label} blocks, control auto", net, n_calls=round(24 * part))
    # 10. outputs
    for output in ("softmax", "loss"):
        for saturated in (False, True):
            label = f"{output} of an affine map{', saturated' if saturated else ''}"
            for part in (1, 4, 16):
                problem = partial(at.affine_classifier, output, saturated)
                out.add(f"output: {label}, {part} blocks", problem, n_calls=20 * part, allowed=("few",))
        for part in (2, 10):
            problem = partial(at.wine_output, output)
            out.add(f"output: {output} of the wine MLP, saturated, {part} blocks", problem, n_calls=26 * part, **given)
    for control in (None, "auto"):
        out.add(f"output: autoencoder error, 5 blocks, control {control}", at.autoencoder, control=control, n_calls=640)
    for part, label in ((0.5, "½"), (2, "2"), (8, "8"), (32, "32")):
        out.add(f"output: gates of a transformer, {label} blocks", at.tokens, n_calls=round(16 * part))
    # 11. eigenvalues, pairs from split draws, false discoveries at two rates
    forms = ("off-diagonal", "discoveries", "discoveries, q = .2", *FORMS)
    blocks = partial(at.additive_net, 8, 3, 8)
    for label, problem in (("groups of 4", at.additive_net), ("groups of 3", blocks)):
        for part in (2, 4, 16):
            out.add(f"forms: {label}, {part} blocks", problem, forms, control=None, n_calls=48 * part)
    for label, problem, d in (("convex net", at.convex_net, 64), ("breast cancer MLP", at.breast, 30)):
        for part in (2, 8):
            read = ("off-diagonal", *FORMS)
            out.add(f"forms: {label}, {part} blocks", problem, read, control=None, n_calls=2 * d * part)
    return out.cases
