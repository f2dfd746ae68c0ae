"""The draws of one set of inputs, split over the processes of a torch.distributed group."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from smoothhess.datasets.distributed.process_group import is_alone, same_everywhere, together
from smoothhess.datasets.distributed.shared_sampler import Follower, Leader
from smoothhess.datasets.job_settings import SILENT, described
from smoothhess.explainers.adaptive import Run
from smoothhess.explainers.result_warnings import warn_of
from smoothhess.explainers.smooth_hess import NeuronSmoothHess, SmoothHess
from smoothhess.model.state import borrowed, modules_behind
from smoothhess.result.interactions import Interactions

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
        show = asked.pop("show_progress")
        del asked["self"]
        run = Run.prepare(explainer.forward_func, found_out=explainer._found_out, **asked)
        with borrowed(explainer.forward_func, run.sampler.inputs.device):
            if not ranks.leads:
                return run.finish(Follower(run.sampler, ranks).follow())
            leader = Leader.of(run.sampler, ranks)
            with run.progress(show) as bar:
                result = run.finish(leader.release(run.lead(leader, bar)))
        warn_of(result, run.budget.tol)
        return result


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
