"""Check the state of the user's model before it is called, and restore it afterwards.

Modes of torch (gradients, autocast, TF32, random state) are set here as well; values and gradients are in `gradients`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from smoothhess.model.float_precision import tf32

# Layers whose output is random or depends on other rows of the batch in training mode.
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def modules_behind(forward_func: Callable[..., Any]) -> list[nn.Module]:
    """Find the modules that a callable uses: itself, its owner, its closure, and globals that it names.

    >>> net = nn.Linear(2, 1)
    >>> modules_behind(lambda x: net(x).sigmoid())
    [Linear(in_features=2, out_features=1, bias=True)]
    """
    found: dict[int, nn.Module] = {}
    pending: list[Any] = [forward_func]
    seen: set[int] = set()
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module):
            found[id(item)] = item
        elif isinstance(item, functools.partial):
            pending += [item.func, *item.args, *item.keywords.values()]
        elif hasattr(item, "__code__"):
            cells = [c.cell_contents for c in item.__closure__ or () if _is_filled(c)]
            named = [item.__globals__[name] for name in item.__code__.co_names if name in item.__globals__]
            pending += [v for v in cells if callable(v)] + [v for v in named if isinstance(v, nn.Module)]
        elif callable(item) and not isinstance(item, type) and hasattr(item, "__dict__"):  # an object with __call__
            pending += [v for v in vars(item).values() if isinstance(v, nn.Module) or hasattr(v, "__code__")]
        pending += [getattr(item, name) for name in ("__self__", "__func__") if hasattr(item, name)]
    return list(found.values())


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # an empty cell: the variable is not assigned yet
        return False


def refuse_training_mode(forward_func: Callable[..., Any]) -> None:
    """Raise ValueError, with the name of the layer, if dropout or batch norm is in training mode."""
    for root in modules_behind(forward_func):
        for name, layer in root.named_modules():
            random = isinstance(layer, _DROPOUTS) and layer.p > 0
            if layer.training and (random or isinstance(layer, _NORMS)):
                raise ValueError(
                    f"layer {name or '(the model)'!r} ({type(layer).__name__}) is in training mode, so f(x) does not "
                    "depend on x only. Call model.eval() first."
                )


def refuse_other_device(forward_func: Callable[..., Any], device: torch.device) -> None:
    """Raise ValueError if all parameters are on another device type than the inputs."""
    for root in modules_behind(forward_func):
        devices = {p.device for p in root.parameters()}
        if devices and all(d.type != device.type for d in devices):
            raise ValueError(
                f"the model is on {sorted(map(str, devices))} but the inputs are on {str(device)!r}. "
                "Move one of them with .to(device)."
            )


@contextmanager
def borrowed(forward_func: Callable[..., Any], device: torch.device) -> Iterator[None]:
    """Enable gradients, disable autocast and TF32; restore modes, buffers and random state on exit, also on errors."""
    if torch.is_inference_mode_enabled():
        raise ValueError("gradients cannot be taken inside torch.inference_mode(). Leave it, or use torch.no_grad().")
    refuse_training_mode(forward_func)
    refuse_other_device(forward_func, device)
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        cuda = [device] if device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(cuda))
        if device.type == "cuda":
            stack.enter_context(tf32(False))
        stack.enter_context(_same_buffers(forward_func))
        yield


@contextmanager
def _same_buffers(forward_func: Callable[..., Any]) -> Iterator[None]:
    """Restore buffers: a model may count calls or update running estimates in them."""
    buffers = {id(b): b for root in modules_behind(forward_func) for b in root.buffers()}
    kept = [(b, b.detach().clone()) for b in buffers.values()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
