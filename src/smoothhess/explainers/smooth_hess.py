"""SmoothHess, NeuronSmoothHess and smooth_hvp, the explainers of the public interface.

This module holds the classes and functions that users call. The sampling loop is in `adaptive`, the evaluation of draws
in `sampler`, and the warnings about results in `result_warnings`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from smoothhess.curvature.control_variate import CONTROL_LIMIT, THIN_LEAST, Control, Directions
from smoothhess.draws.designs import find_design
from smoothhess.draws.gaussian import Gaussian
from smoothhess.estimate.statistics import ESTIMATOR_VERSION, Extension, Statistics, concatenate, symmetric
from smoothhess.explainers.adaptive import Budget, Run, in_parts, sample_until
from smoothhess.explainers.choose_control import given_control, with_control
from smoothhess.explainers.interrupted import STATUS, Interrupted, interrupted
from smoothhess.explainers.options import Options, rows_of_calls, seeds_of
from smoothhess.explainers.progress import Progress
from smoothhess.explainers.result_warnings import (
    warn_inconsistent,
    warn_noise_beyond_inputs,
    warn_of,
    warn_summed_embeddings,
    warn_unscaled_columns,
)
from smoothhess.explainers.sampler import Sampler
from smoothhess.linalg.memory import LAYER_HESSIANS
from smoothhess.model.capacity import Capacity
from smoothhess.model.convert_inputs import column_names, in_column_order, to_tensors
from smoothhess.model.float_precision import check_precision
from smoothhess.model.gradients import Oracle, check_batch_size
from smoothhess.model.input_parts import FunctionOfParts, are_several, join_inputs, join_names, join_values
from smoothhess.model.layer_functions import Neuron
from smoothhess.model.model_call import ModelCall
from smoothhess.model.model_output import OutputField
from smoothhess.model.state import borrowed
from smoothhess.model.targets import by_class_name
from smoothhess.result.closed_form_hessian import ClosedForm, Layer
from smoothhess.result.interactions import Interactions


class SmoothHess:
    """Feature interactions of any differentiable model, ReLU networks included.

    SmoothHess is the Hessian of the model convolved with a Gaussian, ∇²E f(x + δ) = E[Σ⁻¹ δ ∇f(x + δ)ᵀ]. It is
    estimated from first derivatives only; SmoothGrad is estimated from the same gradient calls.

    Args:
        forward_func: the model, a module or another callable that maps inputs (B, *shape) to outputs.
        output: the field of the model's output to explain, for models that return a dataclass, a dictionary or a tuple:
            a name such as "logits", or a position. None is for models that return one tensor.

    Raises:
        TypeError: if `forward_func` is not callable.

    >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    >>> x = torch.zeros(4, 3, dtype=torch.float64)
    >>> result = SmoothHess(net).attribute(x, target=1, sigma=0.5, n_calls=200)
    >>> result.hessian.shape
    torch.Size([4, 3, 3])
    """

    def __init__(self, forward_func: Callable[..., Any], output: str | int | None = None) -> None:
        if not callable(forward_func):
            network = type(forward_func).__module__.startswith("sklearn.")
            remedy = " Use from_sklearn(estimator)." if network else ""
            raise TypeError(
                f"forward_func must be a model or another callable, got {type(forward_func).__name__}.{remedy}"
            )
        self.forward_func = forward_func if output is None else OutputField(forward_func, output)
        self.capacity = Capacity()

    def attribute(
        self,
        inputs: Any,
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        sigma: Any = None,
        radius: float | None = None,
        gaussian: Gaussian | None = None,
        n_calls: int | None = None,
        tol: float = 0.1,
        max_calls: int | None = None,
        design: str = "orthogonal",
        control: str | None = "auto",
        tau_probes: int | None = None,
        tails: str | None = "auto",
        shrink: bool = True,
        feature_mask: Tensor | None = None,
        direction: Tensor | None = None,
        names: Any = None,
        classes: Sequence[str] | None = None,
        unit: str | None = None,
        internal_batch_size: int | None = None,
        seed: int | Sequence[int] = 0,
        precision: str = "float32",
        compile: bool = False,
        show_progress: bool | None = None,
    ) -> Interactions:
        """Estimate the interactions of features around each of B inputs.

        Args:
            inputs: (B, *shape), floating point; examples in dimension 0: a tensor, or a NumPy array or a DataFrame,
                which is converted to the dtype and device of the model's parameters. A tuple of inputs is passed to
                the model as its first arguments, a dictionary as keyword arguments; their features are concatenated,
                and `between` of the result reads the interactions of two inputs.
            target: the output to explain, such as the index of a class, or "predicted" for the class with the largest
                output of each input; see `smoothhess.model.targets`.
            additional_forward_args: further arguments of the model; a tensor with B rows is indexed with the examples.
            sigma: standard deviation of the noise, a number or one per feature. Pass one of sigma, radius, gaussian.
                For several inputs sigma, feature_mask and direction may be tuples (or dictionaries), one for each.
            radius: radius of the neighbourhood to explain; sets sigma = radius/√d.
            gaussian: Isotropic, Diagonal, Dense or Eigenbasis, or the result of segments.noise, which shifts all
                features of a segment by the same amount.
            n_calls: gradient calls per example. None increases the number of calls of each example, by a factor of 2
                or more, until its relative_error ≤ tol.
            tol: relative error to reach when n_calls is None, between 0 and 1.
            max_calls: maximum number of calls per example when n_calls is None. None is 20 000, and without
                feature_mask above 1 024 dimensions one call per dimension, at least 2 048: matrices of a complete block
                of so many dimensions take longer than the gradients of a small network.
            design: "orthogonal" (± pairs along orthonormal directions), "sobol", "antithetic" (± pairs, as in the
                paper) or "iid" (Eq. 8 of the paper).
            control: the control variate. "kink" subtracts the closed-form one-flip Hessian H₁ of the model's
                activations and samples the residual: the estimate is unbiased, and costs rank/2 (or 3/2 rank) passes in
                advance and 3/4 of a pass for each call. "auto" applies it where H₁ costs at most 1.5 n_calls (or 3/8 of
                max_calls; 7 500 passes by default) and a few pilot draws show that it reduces the total work, and pays
                for the pass of each call only where the pilot draws show a gain. It is not applied to a model whose
                activations cannot be recorded; the result's control_note gives the reason. None samples the gradient
                itself.
            tau_probes: number of random directions from which the spreads τ of the closed form are estimated; None
                computes them exactly. Saves rank/2 passes where the network is too large to keep its Jacobian. H₁, and
                with it the estimate, is then biased by about √(2/tau_probes) times its sensitivity to τ; this bias is
                measured and included in the standard errors, and unbiased is False. Beyond 8192 dimensions H₁ is used
                in a few directions only, and the estimate is unbiased for any τ: there τ is estimated from 64
                directions by default, and is exact with as many directions as the rank.
            tails: "auto" searches, from 400 calls on, for directions in which the gradient changes strongly where few
                draws go, such as a kink at three standard deviations or the steep part of a saturated output, and draws
                from these regions separately; the estimate is unbiased. The search takes about 30 passes, or 150 where
                the gradient grows fast, and the regions four calls for every sixteen. None never does.
            shrink: denoise the Hessian that `hessian`, `@`, `eigh` and `taylor` of the result return, and report the
                relative_error of the denoised Hessian. Intervals, pairs, rows and stderr() always belong to the
                unbiased estimate.
            feature_mask: integer group ids; accumulates sums over groups of features without a (d, d) matrix.
            direction: weights of the features in these sums, with the shape of one input or of the batch, as in
                `Interactions.groups`.
            names: one name per feature, or per group with feature_mask; a tuple or dictionary of names for each of
                several inputs. None takes the columns of a DataFrame, or the names of `Segments`. Pairs, figures,
                pages and files of the result use them.
            classes: names of the model's outputs, by target; one for each output of a classifier.
            unit: unit of the output, such as "€".
            internal_batch_size: rows per forward pass; None chooses it by the free memory. Does not change the result.
            seed: one seed gives all examples the same draws, so comparisons are paired; a sequence gives one seed for
                each example.
            precision: "float32" evaluates the model in the precision of the inputs. "tf32", "fp16" and "bf16" are
                faster on a GPU and add noise to the gradients. relative_error and all intervals contain it;
                precision_error of the result is an upper 95 % limit of its size, relative to the change of a gradient
                between x + δ and x − δ, from four draws, which is too low for small ReLU networks. The rounding of the
                Hessian after 2d calls has the same size, and decreases with further calls unless it is the same in all
                draws.
            compile: evaluate the model through torch.compile, which is faster for many calls of a large model on a GPU.
            show_progress: show a progress bar with an estimate of the time left. None shows it after two seconds, in a
                terminal or a notebook only.

        Returns:
            An `Interactions` of B examples, on the device of the inputs, or on the CPU if it would take more than half
            of the free memory of a GPU; its `device` says where. Examples are explained in batches. The peak memory is
            that of one batch, and in float32 at most 120 d² bytes per example with d dimensions and up to 2d calls: 70
            of the result, and 50 while results of batches are concatenated.

        Raises:
            TypeError: if an argument has the wrong type.
            ValueError: if an argument is out of range, if the noise is lost to rounding, if the model is random or
                mixes the rows of a batch, if its values or gradients are not finite, if its parameters are modified
                meanwhile, or if control="kink" cannot be applied.
            Interrupted: after a KeyboardInterrupt, with the `result` of what was drawn so far.

        Warns:
            UserWarning: if an example stopped at max_calls, if H cannot be distinguished from zero, if the gradients
                are not the derivatives of the values, or if the model fails only while its activations are recorded.
            UserWarning: if the model raises an error at the far inputs of the search that `tails` makes.
            UserWarning: if some columns of a table are larger than 1000 sigma while others are about as large as sigma.
            UserWarning: if sigma is more than 100 times as large as the largest number of the inputs.
            UserWarning: if feature_mask sums the coordinates of embeddings, see `TokenSmoothHess`.
            UserWarning: if tol or max_calls is given together with n_calls, which replaces both.
            FewEventsWarning: if no draw, or very few, changed the gradient, so that the error is unknown or uncertain.
        """
        function, parts, features = self.forward_func, None, cast(Any, inputs)
        if are_several(inputs):
            columns = list(map(column_names, inputs.values() if isinstance(inputs, Mapping) else inputs))
            features, parts = join_inputs(to_tensors(inputs, function))
            function = FunctionOfParts(function, parts)
            names = join_names(names, columns, parts) if feature_mask is None else names
            sigma = join_values(sigma, parts, "sigma")
            feature_mask = join_values(feature_mask, parts, "feature_mask")
            direction = join_values(direction, parts, "direction")
        sigma = in_column_order(sigma, inputs)
        options = Options(
            sigma=sigma,
            radius=radius,
            gaussian=gaussian,
            n_calls=n_calls,
            tol=tol,
            max_calls=max_calls,
            design=design,
            control=control,
            tau_probes=tau_probes,
            tails=tails,
            shrink=shrink,
            feature_mask=feature_mask,
            direction=direction,
            names=names,
            classes=classes,
            unit=unit,
            internal_batch_size=internal_batch_size,
            seed=seed,
            precision=precision,
            compile=compile,
            show_progress=show_progress,
        )
        target = by_class_name(target, options.classes)
        call = ModelCall(function, features, target, additional_forward_args, internal_batch_size)
        run = replace(Run.prepare(call, options, self.capacity), input_parts=parts)
        call.check_classes(options.classes)
        if feature_mask is not None and direction is None:
            warn_summed_embeddings(self.forward_func, run.inputs, torch.as_tensor(feature_mask))
        result = None
        try:
            with borrowed(self.forward_func, run.inputs.device), Progress(show_progress, items=len(run.inputs)) as bar:
                result = run.explain(bar)
            warn_of(result, run.budget.tol)
        except KeyboardInterrupt as error:
            raise interrupted(error, len(run.inputs), result) from None
        if parts is None:
            warn_unscaled_columns(run.inputs, run.gaussian)
            warn_noise_beyond_inputs(run.inputs, run.gaussian)
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
        show_progress: bool | None = None,
    ) -> ClosedForm:
        """Compute the one-flip Hessian H₁ in closed form, and estimate its error from a sample.

        H₁ averages the curvature of each hidden unit separately, with the other units frozen at x. It is exact for one
        hidden layer, a good approximation where few units flip within sigma, and badly wrong where many do.

        Args:
            inputs, target, additional_forward_args, sigma, radius, gaussian, internal_batch_size, seed, show_progress:
                as in `attribute`.
            check_calls: gradient calls per example that estimate ‖H₁ − H‖/‖H‖.
            tolerance: value of ‖H₁ − H‖/‖H‖ above which a warning is issued.

        Returns:
            A `ClosedForm`, whose `by_layer()` gives the part of H₁ of each layer.

        Raises:
            ValueError: if the Gaussian has more than 8192 dimensions, or if the activations cannot be recorded.
            Interrupted: after a KeyboardInterrupt; its `result` is the sampled estimate of the check.

        >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).double()
        >>> closed = SmoothHess(net).closed_form(torch.zeros(1, 3).double(), target=1, sigma=0.5)
        >>> [(layer.name, layer.kind, layer.units) for layer in closed.by_layer()], bool(closed.error < 1e-9)
        ([('1', 'relu', 8)], True)
        """
        call = ModelCall(self.forward_func, inputs, target, additional_forward_args, internal_batch_size)
        sigma = in_column_order(sigma, inputs)
        inputs, plan = call.inputs, find_design("orthogonal")
        d = inputs[0].numel()
        gaussian = Gaussian.ensure(sigma=sigma, radius=radius, gaussian=gaussian, d=d).to(inputs.device, inputs.dtype)
        if (k := gaussian.rank(d)) > CONTROL_LIMIT:
            raise ValueError(
                f"the closed form keeps a {k} × {k} matrix for each example, and is limited to {CONTROL_LIMIT} "
                "dimensions. Use attribute, whose control variate keeps H₁ in a few directions; control='kink' with "
                f"tau_probes={k} makes its τ exact, for {k // 2} passes."
            )
        rows = rows_of_calls(check_calls, plan, "check_calls")
        oracle = Oracle(
            self.forward_func, inputs, call.target, additional_forward_args, internal_batch_size, capacity=self.capacity
        )
        ones = torch.ones(len(inputs), 2, dtype=torch.float64, device=inputs.device)
        try:
            with borrowed(self.forward_func, inputs.device), Progress(show_progress, items=len(inputs)) as bar:
                sampler = Sampler.start(oracle, inputs, gaussian, plan)
                refusal, limit = "the closed form cannot be computed", LAYER_HESSIANS.on(inputs.device)
                choice = given_control(sampler, ones, Directions(), refusal, limit)
                sampler = with_control(sampler, choice)
                nothing = sampler.begin(seeds_of(seed, len(inputs)))
                check = sample_until(sampler, nothing, Budget(rows, rows, None), bar, shrink=False, note="")
        except KeyboardInterrupt as error:
            raise interrupted(error, len(inputs)) from None
        warn_of(check, None)
        assert choice.control is not None
        closed = _closed_form(choice.control, sampler, check, tolerance)
        if bool(closed.suspect.any()):
            off, unseen = closed.error[closed.suspect].max(), choice.control.kinks.network.unmodelled
            reason = f"it does not model {unseen}, or many units flip" if unseen else "many units flip"
            warnings.warn(
                f"the closed form of {int(closed.suspect.sum())} of {len(closed)} example(s) has an estimated relative "
                f"error of more than {tolerance:g} (up to {float(off):.2g}): {reason} within this sigma. Use "
                "attribute, which samples the residual, or a smaller sigma.",
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
        show_progress: bool | None = None,
    ) -> Interactions:
        """Add `n` further gradient calls to every example of a result.

        n₁ calls followed by more(n₂) equal one run of n₁ + n₂ calls with the same control variate and tails=None; under
        control="auto" a run of n₁ + n₂ calls may choose another one, and tail strata are those of `result`.

        Args:
            result: a sampled result of the same model.
            n: number of further calls per example.
            additional_forward_args, internal_batch_size, show_progress: as in `attribute`; the other options are those
                of `result`.

        Returns:
            A new `Interactions`; `result` is not changed.

        Raises:
            ValueError: if `result` was not sampled, was computed from other results, or was made by another version of
                the estimator, or if f(x) or its gradient differs from that in `result`.
            Interrupted: after a KeyboardInterrupt, with the `result` of all calls so far.

        >>> f = lambda x: x.prod(1)
        >>> first = SmoothHess(f).attribute(torch.ones(1, 2), sigma=0.1, n_calls=100)
        >>> SmoothHess(f).more(first, 60).n_calls
        tensor([160])
        """
        if not isinstance(result, Interactions):
            raise ValueError(
                f"only an Interactions can be extended, got {type(result).__name__}: it was not sampled, or was "
                "computed from other results. Use SmoothHess.attribute for a sampled result, or extend these."
            )
        if result.estimator_version != ESTIMATOR_VERSION:
            raise ValueError(
                f"the result was made by version {result.estimator_version} of the estimator, this smoothhess has "
                f"version {ESTIMATOR_VERSION}: further calls would mix numbers that are not comparable. Rerun "
                "attribute, or use the smoothhess that made it."
            )
        plan = find_design(result.design)
        rows = rows_of_calls(n, plan, "n")
        target = None if result.target is None else [tuple(t) for t in result.target.tolist()]
        parts = result.input_parts
        oracle = Oracle(
            self.forward_func if parts is None else FunctionOfParts(self.forward_func, parts),
            result.inputs,
            target,
            additional_forward_args,
            check_batch_size(internal_batch_size),
            check_precision(result.precision, result.device, result.dtype),
            capacity=self.capacity,
        )
        grown = None
        try:
            with borrowed(self.forward_func, result.device), Progress(show_progress, rows, items=len(result)) as bar:
                grown = _in_parts(result, oracle, rows, bar)
            warn_inconsistent(grown, stacklevel=3)
        except KeyboardInterrupt as error:
            raise interrupted(error, len(result), result if grown is None else grown) from None
        return grown


class NeuronSmoothHess:
    """Interactions of features in one neuron of a layer; the neuron replaces the model's output.

    Args:
        forward_func: the model, as in `SmoothHess`.
        layer: the module that the neuron belongs to, or its name.

    >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> neuron = NeuronSmoothHess(net, net[2])
    >>> neuron.attribute(torch.zeros(1, 3), 1, sigma=0.5, n_calls=100).output.shape
    torch.Size([1])
    """

    def __init__(self, forward_func: Callable[..., Any], layer: nn.Module | str) -> None:
        self.forward_func = forward_func
        self.layer = layer
        self.capacity = Capacity()

    def for_neuron(self, selector: Any, attribute_to_neuron_input: bool) -> SmoothHess:
        """Return an explainer of one neuron as a function of the inputs."""
        explainer = SmoothHess(Neuron(self.forward_func, self.layer, selector, attribute_to_neuron_input))
        explainer.capacity = self.capacity
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
        """Estimate the interactions of features in one neuron, as `SmoothHess.attribute` does for an output.

        Args:
            inputs, additional_forward_args: as in `SmoothHess.attribute`.
            neuron_selector: the index of the neuron in the layer's output: an int, a tuple of ints and slices (the
                neurons of a slice are summed), or a callable (N, …) → (N,).
            attribute_to_neuron_input: select from the layer's input instead of its output; the input of an activation
                layer is the pre-activation.
            **options: keyword arguments of `SmoothHess.attribute`.

        Returns:
            An `Interactions` of B examples.
        """
        explainer = self.for_neuron(neuron_selector, attribute_to_neuron_input)
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
        """Add `n` further gradient calls to every example of a result, as `SmoothHess.more`.

        Args:
            result, n: as in `SmoothHess.more`.
            neuron_selector, attribute_to_neuron_input: those that `result` was made with.
            *args, **options: further arguments of `SmoothHess.more`.

        Returns:
            A new `Interactions`.
        """
        return self.for_neuron(neuron_selector, attribute_to_neuron_input).more(result, n, *args, **options)


def smooth_hvp(forward_func: Callable[..., Any], x: Tensor, v: Tensor, target: Any = None, **options: Any) -> Tensor:
    """Hessian-vector product ∇²h(x) v of the smoothed function, which is not zero on ReLU networks.

    Args:
        forward_func: the model, as in `SmoothHess`.
        x: inputs (B, *shape).
        v: direction, with the shape of x or of one input.
        target: as in `SmoothHess.attribute`.
        **options: keyword arguments of `SmoothHess.attribute`.

    Returns:
        ∇²h(x) v, (B, *shape).

    >>> f, x, v = lambda x: x.prod(1), torch.ones(1, 2).double(), torch.tensor([1.0, 0.0])
    >>> smooth_hvp(f, x, v, sigma=1.0, n_calls=20_000).round(decimals=1).abs()
    tensor([[0., 1.]], dtype=torch.float64)
    """
    return SmoothHess(forward_func).attribute(x, target, **options) @ torch.as_tensor(v)


def _closed_form(control: Control, sampler: Sampler, check: Interactions, tolerance: float) -> ClosedForm:
    """The expectation of the control variate, in the coordinates of the features."""
    inputs, push = sampler.inputs, sampler.gaussian.push

    def among_features(white: Tensor) -> Tensor:
        return symmetric(push(push(white.to(inputs)).mT))

    hessian = among_features(control.expected.hessian.dense())
    norm2 = hessian.double().square().sum((-1, -2)).clamp_min(torch.finfo(torch.float64).tiny)
    layers = []
    for call, white in zip(control.kinks.network.calls, control.expected.layers, strict=False):
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


def _in_parts(result: Interactions, oracle: Oracle, rows: int, bar: Progress) -> Interactions:
    """The result with further rows, in batches of examples where all of them would run out of memory."""

    def some(index: Tensor) -> Interactions:
        return _in_parts(result[index], oracle.select(index), rows, bar)

    try:
        return in_parts(oracle, result.device, bar, partial(_grown, result, oracle, rows, bar), some)
    except KeyboardInterrupt as error:
        grown = [error.result] if isinstance(error, Interrupted) and error.result is not None else []
        if (done := sum(map(len, grown))) < len(result):
            grown.append(replace(result[done:], status=(STATUS,) * (len(result) - done)))
        raise Interrupted(result=Interactions.cat(grown)) from None


def _grown(result: Interactions, oracle: Oracle, rows: int, bar: Progress) -> Interactions:
    """The result with further rows of all its examples."""
    statistics = result.statistics
    sampler = Sampler.start(oracle, result.inputs, result.gaussian, find_design(result.design), result.grouping)
    if result.control == "kink":
        assert result.control_weights is not None
        directions = Directions(result.control_rank or THIN_LEAST, result.tau_probes)
        exact = statistics.rare is not None and bool(statistics.rare.complete.any())  # then the residual has no flips
        refusal = "control='kink' cannot be used"
        choice = given_control(sampler, result.control_weights, directions, refusal, all_neurons=exact)
        sampler = with_control(sampler, choice)
    if statistics.tails is not None:
        sampler = replace(sampler, strata=statistics.tails.strata)
    sampler.check_same_model(statistics)
    # examples with the same number of rows are batched
    batches = [torch.nonzero(statistics.n == count).reshape(-1) for count in statistics.n.unique().tolist()]
    growing = [sampler.extension(statistics.select(index), index) for index in batches]
    try:
        for extension in growing:
            sampler.extend(extension, rows, bar, check=True)
        return _with_rows(result, sampler, growing, rows)
    except KeyboardInterrupt:
        raise Interrupted(result=_with_rows(result, sampler, growing, rows)) from None


def _with_rows(result: Interactions, sampler: Sampler, growing: Sequence[Extension], rows: int) -> Interactions:
    """The result with the rows that were added to its statistics; `rows` per example were wanted."""
    statistics = _in_order([(extension.index, extension.statistics()) for extension in growing])
    added = statistics.n - result.statistics.n
    status = ("budget" if s == "budget" else "calls" for s in result.status)
    everyone = torch.arange(len(result), device=result.device)
    return replace(
        result,
        estimate=result.estimate.with_statistics(statistics),
        n_passes=result.n_passes + sampler.passes(added.to(result.n_passes), everyone),
        status=tuple(s if n == rows else STATUS for s, n in zip(status, added.tolist(), strict=True)),
    )


def _in_order(parts: Sequence[tuple[Tensor, Statistics]]) -> Statistics:
    order = torch.cat([index for index, _ in parts]).argsort()
    return parts[0][1] if len(parts) == 1 else concatenate([s for _, s in parts]).select(order)
