"""`attribute` with the draws split over the processes of a torch.distributed group.

The communication is in `process_group`, the distributed sampler in `shared_sampler`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from smoothhess.datasets.distributed.process_group import check_same_arguments, connected, is_single_process
from smoothhess.datasets.distributed.shared_sampler import Leader, follow
from smoothhess.datasets.job_settings import SILENT, described
from smoothhess.explainers.adaptive import Run
from smoothhess.explainers.options import Options
from smoothhess.explainers.progress import Progress
from smoothhess.explainers.result_warnings import warn_of
from smoothhess.explainers.smooth_hess import NeuronSmoothHess, SmoothHess
from smoothhess.model.model_call import ModelCall
from smoothhess.model.state import borrowed, modules_behind
from smoothhess.result.interactions import Interactions

# Modules that communicate in every call.
DISTRIBUTED_MODELS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


def attribute(
    explainer: SmoothHess | NeuronSmoothHess,
    inputs: Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Interactions:
    """`explainer.attribute(inputs, target, …)` with the draws split over all processes of a torch.distributed group.

    Every process calls it with the same model, inputs and options, on its own device, and gets the same result: that of
    a single process with the same seed, up to rounding. n_calls, tol and max_calls refer to the calls of all processes
    in total; n_passes counts work that every process repeats only once. Without a group, or in a group of one process,
    this is `explainer.attribute`.

    Args:
        explainer: SmoothHess(model), or NeuronSmoothHess(model, layer) with its neuron_selector as target.
        inputs: batch of examples, the same in all processes.
        target: as in `SmoothHess.attribute`.
        additional_forward_args: as in `SmoothHess.attribute`.
        group: the process group; None: the default group.
        **options: options of `SmoothHess.attribute`. Only internal_batch_size, compile and show_progress may differ
            between processes.

    Returns:
        The same `Interactions` in every process.

    Raises:
        RankError: another process failed; `rank` and `reason` say which and why. The process that failed raises its
            original error.
        ValueError: the arguments or the models differ between processes, the model itself communicates
            (DistributedDataParallel, FSDP), or several processes were started without a process group.

    >>> import torch
    >>> from smoothhess import SmoothHess
    >>> f, x = lambda x: x.prod(1), torch.ones(1, 2).double()
    >>> attribute(SmoothHess(f), x, sigma=0.1, n_calls=64, control=None).hessian.round(decimals=6).abs()
    tensor([[[0., 1.],
             [1., 0.]]], dtype=torch.float64)
    """
    if isinstance(explainer, NeuronSmoothHess):
        explainer = explainer.for_neuron(
            options.pop("neuron_selector", target), options.pop("attribute_to_neuron_input", False)
        )
        target = None
    if not isinstance(explainer, SmoothHess):
        raise TypeError(f"explainer must be SmoothHess(model), got {type(explainer).__name__}.")
    if is_single_process(group):
        return explainer.attribute(inputs, target, additional_forward_args, **options)
    with connected(group) as processes:
        chosen = Options(**options)
        arguments = {"inputs": inputs, "target": target, "additional_forward_args": additional_forward_args}
        arguments |= chosen.arguments()
        check_same_arguments(
            processes, {name: described(value) for name, value in arguments.items() if name not in SILENT}
        )
        refuse_distributed_model(explainer.forward_func)
        rows = chosen.internal_batch_size
        call = ModelCall(explainer.forward_func, inputs, target, additional_forward_args, rows)
        run = Run.prepare(call, chosen, explainer.capacity)
        with borrowed(explainer.forward_func, run.inputs.device):
            sampler = run.start()
            if not processes.is_leader:
                return run.finish(follow(sampler, processes))
            leader = Leader.of(sampler, processes)
            with Progress(chosen.show_progress, items=len(inputs)) as bar:
                result = run.finish(leader.release(run.lead(leader, bar)))
        warn_of(result, run.budget.tol)
        return result


def refuse_distributed_model(forward_func: Callable[..., Any]) -> None:
    """Raise ValueError if the model communicates with other processes: it would wait for calls they do not make."""
    for root in modules_behind(forward_func):
        for name, module in root.named_modules():
            kinds = {kind.__name__ for kind in type(module).__mro__}
            if found := kinds.intersection(DISTRIBUTED_MODELS):
                raise ValueError(
                    f"{name or 'the model'!r} is a {found.pop()}, which communicates with all ranks in every call, "
                    "while here each rank makes different calls. Pass the model inside it (model.module), complete on "
                    "each rank."
                )
