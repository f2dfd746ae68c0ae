"""The draws of one set of inputs, split over the processes of a torch.distributed group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from smoothhess.borrow import borrowed, modules_behind
from smoothhess.dataset.settings import SILENT, described
from smoothhess.design import find_design
from smoothhess.distributed.ranks import is_alone, same_everywhere, together
from smoothhess.distributed.sharing import Follower, Leader
from smoothhess.estimator import (
    FIRST_ROWS,
    NeuronSmoothHess,
    SmoothHess,
    _Budget,
    _progress,
    _sample_until,
    _seeds,
    _take_control,
)
from smoothhess.gaussian import Gaussian
from smoothhess.grouping import Grouping
from smoothhess.interactions import Interactions
from smoothhess.oracle import Oracle, check_batch_size, check_inputs
from smoothhess.precision import check_precision
from smoothhess.sampler import OtherPathError, Sampler
from smoothhess.statistics import most_rows

TALKING = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")  # models whose ranks call in step


def attribute(
    explainer: SmoothHess | NeuronSmoothHess,
    inputs: Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Interactions:
    """`explainer.attribute(inputs, target, …)`, with the draws shared by all ranks of a torch.distributed group.

    Every rank calls it with the same model, inputs and options, each on its own device, and gets the same result: that
    of a single process with the same seed, up to rounding. n_calls, tol and max_calls count the calls of all ranks
    together; n_passes counts work that every rank repeats once. Where no group was made, or it has one rank, this
    process does everything.

    Args:
        explainer: SmoothHess(model), or NeuronSmoothHess(model, layer) with its neuron_selector in the place of target.
        inputs: the same on all ranks.
        target: as in `SmoothHess.attribute`.
        additional_forward_args: likewise.
        group: the ranks that share the work; None for all of them.
        **options: those of `SmoothHess.attribute`. Only internal_batch_size, compile and show_progress may differ
            between ranks.

    Raises:
        RankError: another rank failed; it says which and why. The rank that failed raises its own error.

    >>> import torch
    >>> from smoothhess import SmoothHess
    >>> f, x = lambda x: x.prod(1), torch.ones(1, 2).double()
    >>> attribute(SmoothHess(f), x, sigma=0.1, n_calls=64, control=None).hessian.round(decimals=6).abs()
    tensor([[[0., 1.],
             [1., 0.]]], dtype=torch.float64)
    """
    if isinstance(explainer, NeuronSmoothHess):
        explainer = explainer._explainer(
            options.pop("neuron_selector", target), options.pop("attribute_to_neuron_input", False)
        )
        target = None
    if not isinstance(explainer, SmoothHess):
        raise TypeError(f"explainer must be SmoothHess(model), got {type(explainer).__name__}.")
    if is_alone(group):
        return explainer.attribute(inputs, target, additional_forward_args, **options)
    with together(group) as ranks:
        bound = inspect.signature(SmoothHess.attribute).bind(
            explainer, inputs, target, additional_forward_args, **options
        )
        bound.apply_defaults()
        asked = bound.arguments
        same_everywhere(
            ranks, {name: described(value) for name, value in asked.items() if name not in ("self", *SILENT)}
        )
        refuse_talking(explainer.forward_func)
        run = Run.prepare(explainer.forward_func, asked)
        with borrowed(explainer.forward_func, run.sampler.inputs.device):
            if not ranks.leads:
                return Follower(run.sampler, ranks).follow()
            leader = Leader.of(run.sampler, ranks)
            with _progress(asked["show_progress"], run.budget.most, len(inputs)) as bar:
                return leader.release(run.lead(leader, bar))


@dataclass(frozen=True, eq=False)
class Run:
    """What `SmoothHess.attribute` makes of its arguments, before it draws."""

    sampler: Sampler
    budget: _Budget
    seeds: Sequence[int]
    calls: float  # that the closed form is weighed against
    control: str | None
    shrink: bool

    @staticmethod
    def prepare(forward_func: Callable[..., Any], asked: Mapping[str, Any]) -> Run:
        """With the checks of `SmoothHess.attribute`."""
        plan, control, probes = find_design(asked["design"]), asked["control"], asked["tau_probes"]
        if control not in ("auto", "kink", None):
            raise ValueError(f'control must be "auto", "kink" or None, got {control!r}.')
        check_inputs(asked["inputs"])
        inputs: Tensor = asked["inputs"].detach()
        d = inputs[0].numel()
        gaussian = Gaussian.ensure(sigma=asked["sigma"], radius=asked["radius"], gaussian=asked["gaussian"], d=d)
        mask = asked["feature_mask"]
        grouping = None if mask is None else Grouping.make(mask, None, inputs.shape, gaussian.scales(d), inputs)
        oracle = Oracle(
            forward_func,
            inputs,
            asked["target"],
            asked["additional_forward_args"],
            check_batch_size(asked["internal_batch_size"]),
            check_precision(asked["precision"], inputs.device, inputs.dtype),
            asked["compile"],
        )
        n_calls, most = asked["n_calls"], asked["max_calls"]
        budget = _Budget.make(plan, n_calls, asked["tol"], most, first=min(gaussian.rank(d), FIRST_ROWS))
        if n_calls is None and grouping is None:  # more than can be kept cannot be drawn
            budget = replace(budget, most=min(budget.most, most_rows(gaussian.rank(d))))
        if probes is not None and (isinstance(probes, bool) or not probes >= 8):
            raise ValueError(f"tau_probes must be at least 8 random directions, or None for exact τ, got {probes}.")
        sampler = Sampler(oracle, inputs, gaussian.to(inputs.device, inputs.dtype), plan, grouping, tau_probes=probes)
        return Run(
            sampler,
            budget,
            _seeds(asked["seed"], len(inputs)),
            n_calls if n_calls is not None else most / 4,
            control,
            asked["shrink"],
        )

    def lead(self, sampler: Sampler, bar: tqdm) -> Interactions:
        """The run itself, as a single process would do it."""
        precision = sampler.oracle.precision
        rounding = None if precision == "float32" else sampler.measure_precision(self.seeds)
        note = _take_control(sampler, self.control, self.seeds, self.calls)
        try:
            result = _sample_until(sampler, sampler.begin(self.seeds), self.budget, bar, self.shrink, note)
        except OtherPathError as error:
            if self.control != "auto":
                raise
            sampler.control, note = None, str(error)
            bar.reset()
            result = _sample_until(sampler, sampler.begin(self.seeds), self.budget, bar, self.shrink, note)
        return result if rounding is None else replace(result, precision=precision, precision_error=rounding)


def refuse_talking(forward_func: Callable[..., Any]) -> None:
    """Raise where the model itself talks to other ranks: it would wait for calls that they do not make."""
    for root in modules_behind(forward_func):
        for name, module in root.named_modules():
            kinds = {kind.__name__ for kind in type(module).__mro__}
            if found := kinds.intersection(TALKING):
                raise ValueError(
                    f"{name or 'the model'!r} is a {found.pop()}, which talks to the other ranks in every call, while "
                    "here each rank makes its own calls. Pass the model inside it (model.module), whole on each rank."
                )
