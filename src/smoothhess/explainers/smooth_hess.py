"""The explainers: what users call. A run itself is in run.py."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from smoothhess.curvature.control_variate import CONTROL_LIMIT
from smoothhess.draws.designs import find_design
from smoothhess.draws.gaussian import Gaussian
from smoothhess.estimate.statistics import ESTIMATOR_VERSION, Statistics, concatenate, symmetric
from smoothhess.explainers.adaptive import (
    Budget,
    Run,
    in_parts,
    insist,
    progress_bar,
    rows_of_calls,
    sample_until,
    seeds_of,
)
from smoothhess.explainers.result_warnings import warn_inconsistent, warn_of
from smoothhess.explainers.sampler import Sampler
from smoothhess.model.float_precision import check_precision
from smoothhess.model.gradients import Oracle, check_batch_size, check_inputs
from smoothhess.model.layer_functions import Neuron
from smoothhess.model.state import borrowed
from smoothhess.result.closed_form_hessian import LAYER_BYTES, ClosedForm, Layer
from smoothhess.result.interactions import Interactions


class SmoothHess:
    """Feature interactions of any differentiable model, ReLU networks included.

    SmoothHess is the Hessian of the model convolved with a Gaussian, ∇²E f(x + δ) = E[Σ⁻¹ δ ∇f(x + δ)ᵀ], estimated from
    gradient calls alone; SmoothGrad comes from the same calls.

    >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    >>> x = torch.zeros(4, 3, dtype=torch.float64)
    >>> result = SmoothHess(net).attribute(x, target=1, sigma=0.5, n_calls=200)
    >>> result.hessian.shape
    torch.Size([4, 3, 3])
    """

    def __init__(self, forward_func: Callable[..., Any]) -> None:
        if not callable(forward_func):
            raise TypeError(f"forward_func must be a model or another callable, got {type(forward_func).__name__}.")
        self.forward_func = forward_func
        self._found_out: dict[Any, int] = {}  # of each kind of input: rows that fit into the memory, …

    def attribute(
        self,
        inputs: Tensor,
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        sigma: Any = None,
        radius: float | None = None,
        gaussian: Gaussian | None = None,
        n_calls: int | None = None,
        tol: float = 0.1,
        max_calls: int = 20_000,
        design: str = "orthogonal",
        control: str | None = "auto",
        tau_probes: int | None = None,
        shrink: bool = True,
        feature_mask: Tensor | None = None,
        internal_batch_size: int | None = None,
        seed: int | Sequence[int] = 0,
        precision: str = "float32",
        compile: bool = False,
        show_progress: bool = False,
    ) -> Interactions:
        """Interactions around each of B inputs.

        Args:
            inputs: (B, *shape), floating point; examples in dimension 0.
            target: which output to explain; see `smoothhess.model.targets`.
            additional_forward_args: further arguments of the model; tensors with B rows follow their example.
            sigma: standard deviation of the noise, a number or one per feature. Pass one of sigma, radius, gaussian.
            radius: asks about the neighbourhood of that radius: sigma = radius/√d.
            gaussian: Isotropic, Diagonal, Dense or Eigenbasis, or segments.noise, which moves whole segments.
            n_calls: gradient calls per example. None doubles it until relative_error ≤ tol, each example on its own.
            tol: relative error to reach when n_calls is None.
            max_calls: most calls per example when n_calls is None.
            design: "orthogonal" (± pairs along orthonormal directions), "sobol", "antithetic" (± pairs, as in the
                paper) or "iid" (Eq. 8 of the paper to the letter).
            control: "kink" samples only what the closed-form one-flip Hessian H₁ of the model's activations leaves
                over: unbiased, for rank/2 (or 3/2 rank) passes beforehand and 3/4 of a pass for each call. "auto" does
                so where H₁ costs at most 1.5 n_calls (or 3/8 of max_calls) and a few pairs of draws show that it is
                worth it, and takes the passes for each call only where they are seen to pay; a model whose activations
                cannot be seen goes without, and the result's control_note says why. None samples the gradient as it is.
            tau_probes: estimate the closed form's spreads τ from so many random directions instead of exactly: rank/2
                passes fewer where the network is too large to keep its Jacobian. H₁, and so the estimate, is then
                biased by about √(2/tau_probes) times its sensitivity to τ; the error is measured, the error bars hold
                it, and unbiased is False. Beyond 8192 dimensions H₁ serves in a few directions alone, and without bias
                whatever τ is: there it is estimated from 64 directions by default, and exact with as many as the rank.
            shrink: report the denoised Hessian, `hessian`, `@`, `eigh` and `taylor` of the result, with its own
                relative_error. Intervals, pairs, rows and stderr() stay those of the unbiased estimate either way.
            feature_mask: integer group ids; streams sums over groups of features and never makes (d, d).
            internal_batch_size: rows per forward pass; chosen by memory when None. Never changes the result.
            seed: one seed gives all examples the same draws, so comparisons are paired; a sequence gives each its own.
            precision: "float32" evaluates the model with the inputs' own precision. "tf32", "fp16" and "bf16" are
                faster on a GPU and put noise on the gradients; precision_error of the result says how much.
            compile: let torch.compile make the model faster; pays for many calls of a large model on a GPU.
            show_progress: a progress bar.
        """
        run = Run.prepare(
            self.forward_func,
            inputs,
            target,
            additional_forward_args,
            sigma=sigma,
            radius=radius,
            gaussian=gaussian,
            n_calls=n_calls,
            tol=tol,
            max_calls=max_calls,
            design=design,
            control=control,
            tau_probes=tau_probes,
            shrink=shrink,
            feature_mask=feature_mask,
            internal_batch_size=internal_batch_size,
            seed=seed,
            precision=precision,
            compile=compile,
            found_out=self._found_out,
        )
        with borrowed(self.forward_func, run.sampler.inputs.device), run.progress(show_progress) as bar:
            result = run.finish(run.result(bar))
        warn_of(result, run.budget.tol)
        return result

    def closed_form(
        self,
        inputs: Tensor,
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        sigma: Any = None,
        radius: float | None = None,
        gaussian: Gaussian | None = None,
        check_calls: int = 512,
        tolerance: float = 0.1,
        internal_batch_size: int | None = None,
        seed: int | Sequence[int] = 0,
        show_progress: bool = False,
    ) -> ClosedForm:
        """H₁, the Hessian in which every unit flips alone: no draws, an approximation, and a sampled check of it.

        Exact for one hidden layer; good where few units flip within sigma; badly wrong where many do, and the check
        says so: `check_calls` gradient calls estimate ‖H₁ − H‖/‖H‖, and a warning is given where that exceeds
        `tolerance`. `by_layer()` of the result splits H₁.

        >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).double()
        >>> closed = SmoothHess(net).closed_form(torch.zeros(1, 3).double(), target=1, sigma=0.5)
        >>> [(layer.name, layer.kind, layer.units) for layer in closed.by_layer()], bool(closed.error < 1e-9)
        ([('1', 'relu', 8)], True)
        """
        check_inputs(inputs)
        inputs, plan = inputs.detach(), find_design("orthogonal")
        d = inputs[0].numel()
        gaussian = Gaussian.ensure(sigma=sigma, radius=radius, gaussian=gaussian, d=d).to(inputs.device, inputs.dtype)
        if (k := gaussian.rank(d)) > CONTROL_LIMIT:
            raise ValueError(
                f"the closed form keeps a {k} × {k} matrix for each example, and {CONTROL_LIMIT} dimensions are the "
                "most. Use attribute: its control variate keeps it in a few directions; control='kink' with "
                f"tau_probes={k} makes its τ exact, for {k // 2} passes."
            )
        rows = rows_of_calls(check_calls, plan, "check_calls")
        rows_at_once = check_batch_size(internal_batch_size)
        oracle = Oracle(
            self.forward_func, inputs, target, additional_forward_args, rows_at_once, found_out=self._found_out
        )
        sampler = Sampler(oracle, inputs, gaussian, plan, None)
        with borrowed(self.forward_func, inputs.device), progress_bar(show_progress, rows, len(inputs)) as bar:
            kinks = insist(sampler, "the closed form cannot be made")
            size = len(kinks.bent) * len(inputs) * gaussian.rank(d) ** 2 * 8
            ones = torch.ones(len(inputs), 2, dtype=torch.float64, device=inputs.device)
            sampler.take_control(kinks, ones, layers=size <= LAYER_BYTES)
            budget = Budget(rows, rows, None)
            nothing = sampler.begin(seeds_of(seed, len(inputs)))
            check = sample_until(sampler, nothing, budget, bar, shrink=False, note="")
        warn_of(check, None)
        assert sampler.control is not None
        closed = _closed_form(sampler, check, tolerance)
        if bool(closed.suspect.any()):
            off, unseen = closed.error[closed.suspect].max(), kinks.unmodelled
            reason = f"it knows nothing of {unseen}, or many units flip" if unseen else "many units flip"
            warnings.warn(
                f"the closed form of {int(closed.suspect.sum())} of {len(closed)} example(s) is seen to be off by more "
                f"than {tolerance:g} (up to {float(off):.2g}): {reason} within this sigma. Use attribute, which "
                "samples what is missing, or a smaller sigma.",
                stacklevel=2,
            )
        return closed

    def more(
        self,
        result: Interactions,
        n: int,
        additional_forward_args: Any = None,
        *,
        internal_batch_size: int | None = None,
        show_progress: bool = False,
    ) -> Interactions:
        """`n` further calls of the same stream for every example of `result`, with the model that made it.

        n₁ calls and then more(n₂) equal one run of n₁ + n₂ with the same control variate; under control="auto" a run of
        n₁ + n₂ may have decided for another one.

        >>> f = lambda x: x.prod(1)
        >>> first = SmoothHess(f).attribute(torch.ones(1, 2), sigma=0.1, n_calls=100)
        >>> SmoothHess(f).more(first, 60).n_calls
        tensor([160])
        """
        _ = result.statistics  # derivatives that were not sampled have none, and say so
        if type(result) is not Interactions:
            raise ValueError(f"a {type(result).__name__} cannot be gone on with: it is made of other results.")
        if result.estimator_version != ESTIMATOR_VERSION:
            raise ValueError(
                f"the result was made by version {result.estimator_version} of the estimator, this smoothhess has "
                f"version {ESTIMATOR_VERSION}: further calls would mix numbers that are not comparable. Rerun "
                "attribute, or use the smoothhess that made it."
            )
        plan = find_design(result.design)
        rows = rows_of_calls(n, plan, "n")
        target = None if result.target is None else [tuple(t) for t in result.target.tolist()]
        oracle = Oracle(
            self.forward_func,
            result.inputs,
            target,
            additional_forward_args,
            check_batch_size(internal_batch_size),
            check_precision(result.precision, result.device, result.dtype),
            found_out=self._found_out,
        )
        with borrowed(self.forward_func, result.device), progress_bar(show_progress, rows, len(result)) as bar:
            grown = _in_parts(result, oracle, rows, bar)
        warn_inconsistent(grown, stacklevel=3)
        return grown


class NeuronSmoothHess:
    """Interactions inside one neuron of a layer; the neuron takes the place of the model's output.

    >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> neuron = NeuronSmoothHess(net, net[2])
    >>> neuron.attribute(torch.zeros(1, 3), 1, sigma=0.5, n_calls=100).output.shape
    torch.Size([1])
    """

    def __init__(self, forward_func: Callable[..., Any], layer: nn.Module | str) -> None:
        self.forward_func = forward_func
        self.layer = layer
        self._found_out: dict[Any, int] = {}

    def _explainer(self, selector: Any, attribute_to_neuron_input: bool) -> SmoothHess:
        explainer = SmoothHess(Neuron(self.forward_func, self.layer, selector, attribute_to_neuron_input))
        explainer._found_out = self._found_out
        return explainer

    def attribute(
        self,
        inputs: Tensor,
        neuron_selector: int | tuple[int | slice, ...] | Callable[[Tensor], Tensor],
        additional_forward_args: Any = None,
        *,
        attribute_to_neuron_input: bool = False,
        **options: Any,
    ) -> Interactions:
        """As `SmoothHess.attribute`, for the neuron that `neuron_selector` picks from the layer's output.

        The selector is an int, a tuple of ints and slices (a slice sums), or a callable (N, …) → (N,).
        `attribute_to_neuron_input` takes the layer's input instead: of an activation layer, the pre-activation.
        """
        explainer = self._explainer(neuron_selector, attribute_to_neuron_input)
        return explainer.attribute(inputs, None, additional_forward_args, **options)

    def more(
        self,
        result: Interactions,
        n: int,
        neuron_selector: Any,
        *args: Any,
        attribute_to_neuron_input: bool = False,
        **options: Any,
    ) -> Interactions:
        """As `SmoothHess.more`, for the same neuron."""
        return self._explainer(neuron_selector, attribute_to_neuron_input).more(result, n, *args, **options)


def smooth_hvp(forward_func: Callable[..., Any], x: Tensor, v: Tensor, target: Any = None, **options: Any) -> Tensor:
    """∇²h(x) v, the Hessian-vector product of the smoothed function: not zero on ReLU networks.

    `options` are those of `SmoothHess.attribute`; v has the shape of x, or of one input.

    >>> f, x, v = lambda x: x.prod(1), torch.ones(1, 2).double(), torch.tensor([1.0, 0.0])
    >>> smooth_hvp(f, x, v, sigma=1.0, n_calls=20_000).round(decimals=1).abs()
    tensor([[0., 1.]], dtype=torch.float64)
    """
    return SmoothHess(forward_func).attribute(x, target, **options) @ v


def _closed_form(sampler: Sampler, check: Interactions, tolerance: float) -> ClosedForm:
    """What the sampler's control knows, in the coordinates of the features."""
    control, inputs, push = sampler.control, sampler.inputs, sampler.gaussian.push
    assert control is not None

    def among_features(white: Tensor) -> Tensor:
        return symmetric(push(push(white.to(inputs)).mT))

    hessian = among_features(control.expected.hessian.dense())
    norm2 = hessian.double().square().sum((-1, -2)).clamp_min(torch.finfo(torch.float64).tiny)
    layers = []
    for call, white in zip(control.kinks.calls, control.expected.layers, strict=False):
        part = among_features(white)
        share = ((part.double() * hessian.double()).sum((-1, -2)) / norm2).to(inputs)
        layers.append(Layer(call.name, call.operator, call.pre[0].numel(), part, share))
    gradient = check.statistics.gradient + control.expected.gradient.to(inputs)
    return ClosedForm(
        inputs=inputs,
        hessian=hessian,
        gradient=push(gradient).reshape(inputs.shape),
        output=check.output,
        check=check,
        layers=tuple(layers),
        tolerance=tolerance,
        n_passes=check.n_passes,
    )


def _in_parts(result: Interactions, oracle: Oracle, rows: int, bar: tqdm) -> Interactions:
    """The result with further rows; some examples at a time where the memory does not take all."""

    def some(index: Tensor) -> Interactions:
        return _in_parts(result[index], oracle.select(index), rows, bar)

    return in_parts(oracle, result.device, bar, partial(_grown, result, oracle, rows, bar), some)


def _grown(result: Interactions, oracle: Oracle, rows: int, bar: tqdm) -> Interactions:
    """The result with further rows of all its examples."""
    statistics = result.statistics
    sampler = Sampler(oracle, result.inputs, result.gaussian, find_design(result.design), result.grouping)
    if result.control == "kink":
        sampler.tau_probes = result.tau_probes
        assert result.control_weights is not None
        sampler.thin_rank = result.control_rank or sampler.thin_rank
        sampler.take_control(insist(sampler), result.control_weights)
    everyone = torch.arange(len(result), device=result.device)
    for index in everyone.split(1):
        sampler.check_same_model(statistics, index)
    parts = []
    for count in statistics.n.unique().tolist():  # examples that stopped at the same place go together
        index = torch.nonzero(statistics.n == count).reshape(-1)
        parts.append((index, sampler.extend(statistics.select(index), rows, index, bar)))
    return replace(
        result,
        statistics=_in_order(parts),
        grouping=None if result.grouping is None else result.grouping.without_r2(),
        n_passes=result.n_passes + sampler.passes(torch.full_like(result.n_passes, rows), everyone),
        denoised=None,
        shrink=result.shrink and result.denoised is None,
        status=tuple("budget" if s == "budget" else "calls" for s in result.status),
    )


def _in_order(parts: Sequence[tuple[Tensor, Statistics]]) -> Statistics:
    order = torch.cat([index for index, _ in parts]).argsort()
    return parts[0][1] if len(parts) == 1 else concatenate([s for _, s in parts]).select(order)
